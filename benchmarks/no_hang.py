"""Short guarded trainings in situations where a process that forks is known to hang, each many times.

Every process has a session of its own and a time limit, five times as long while anything in the session uses the CPU,
as on a busy machine. One that exceeds it is a hang: each process of its session prints the stacks of all its threads
(``faulthandler``, by SIGABRT). A process that ends with an error, leaves another one behind, or trains without a
prediction is a failure. Seconds are those of a fit.

    python benchmarks/no_hang.py                              # 50 trainings in each situation
    python benchmarks/no_hang.py --runs 2 --only ddp notebook
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

# Not torch or Lightning: processes that are spawned import this file.

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 60.0  # for each process
IDLE_SECONDS = 5.0  # a session that uses next to no CPU for so long after its time waits for nothing that will come
# How many trainings one process does, one after the other. A launch of DDP is what may hang, so each is a fresh one.
WORKERS = [f"{kind}, {how}" for kind in ("workers", "persistent workers") for how in ("fork", "spawn")]
FITS = {"ddp": 1, "ddp_spawn": 1, **dict.fromkeys([*WORKERS, "logging thread", "notebook"], 5)}


@dataclass
class Tally:
    """Outcomes of the trainings in one situation; a process that hangs or fails counts as one."""

    seconds: list[float] = field(default_factory=list)
    methods: Counter[str] = field(default_factory=Counter)
    hangs: int = 0
    failures: int = 0

    @property
    def runs(self) -> int:
        return len(self.seconds) + self.hangs + self.failures


def train(name: str, fits: int, tally: Tally, limit_seconds: float) -> None:
    """Train in one process, and add what became of it to the tally."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "fits.jsonl"
        out.touch()
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name, str(out), str(fits)]
        ended = run(command, Path(folder), limit_seconds)
        found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    tally.seconds += [each["seconds"] for each in found]
    tally.methods.update(each["method"] for each in found)
    if ended.code is None:
        tally.hangs += 1
        print(f"\n{name}: hangs\n{ended.text}\n", flush=True)
    elif ended.code or ended.left or len(found) < fits:
        tally.failures += 1
        what = f"ended with {ended.code}, left {ended.left} processes behind, {len(found)} of {fits} fits predicted"
        print(f"\n{name}: {what}\n{ended.text}\n", flush=True)


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit status (None if it hung), how many it left behind, and what all of them printed."""

    code: int | None
    left: int
    text: str


def run(command: list[str], folder: Path, seconds: float) -> Ended:
    """Run a command in a session of its own, and end the session."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1", "CUDA_VISIBLE_DEVICES": ""}
    printed = folder / "printed.txt"
    with printed.open("wb") as stream:  # not a pipe, which a process left behind would keep open
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
            start_new_session=True,
        )  # fmt: skip
    code, left = exit_code(child, seconds), []
    if code is not None:
        until = time.monotonic() + 5  # helpers of multiprocessing end a moment later
        while (left := session(child.pid)) and time.monotonic() < until:
            time.sleep(0.05)
    for process in session(child.pid):
        show_stacks_and_end(process)
    child.wait()
    return Ended(code, len(left), printed.read_text(encoding="utf-8", errors="replace")[-20_000:])


def exit_code(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Wait for its exit status; None if it hangs."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(seconds)
    for _ in range(int(4 * seconds / IDLE_SECONDS)):
        before = cpu_seconds(child.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(IDLE_SECONDS)
        if all(used - before.get(pid, 0) < 0.02 * IDLE_SECONDS for pid, used in cpu_seconds(child.pid).items()):
            break
    return None


def cpu_seconds(leader: int) -> dict[int, float]:
    """The processor time that each process of a session has used."""
    used = {}
    for process in session(leader):
        with contextlib.suppress(psutil.Error):
            used[process.pid] = sum(process.cpu_times()[:2])
    return used


def session(leader: int) -> list[psutil.Process]:
    """The processes alive in the session of a process, the oldest first."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return sorted(members, key=lambda process: (process.create_time(), process.pid))


def show_stacks_and_end(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(5)
        process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="trainings in each situation (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=FITS, default=list(FITS), metavar="SITUATION")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds a process (default: %(default)g)")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        from shared.situations import SITUATIONS

        warnings.simplefilter("ignore")
        name, out, fits = options.child
        SITUATIONS[name](Path(out), int(fits))
        return 0
    print(f"{'':<28}{'runs':>6}{'hangs':>7}{'failures':>10}{'median s':>10}{'slowest s':>11}  predicted by", flush=True)
    bad = 0
    for name in options.only:
        tally = Tally()
        while tally.runs < options.runs:
            train(name, min(FITS[name], options.runs - tally.runs), tally, options.limit)
        seconds = tally.seconds or [float("nan")]
        methods = ", ".join(f"{method} {count}" for method, count in tally.methods.most_common())
        print(
            f"{name:<28}{tally.runs:>6}{tally.hangs:>7}{tally.failures:>10}{statistics.median(seconds):>10.2f}"
            f"{max(seconds):>11.2f}  {methods}",
            flush=True,
        )
        bad += tally.hangs + tally.failures
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
