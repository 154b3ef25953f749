"""MemGuard versus Lightning's BatchSizeFinder, in a process whose memory is really limited.

Each run is a separate process under RLIMIT_AS: an allocation past the limit fails, as on a full GPU. Both choose a
batch size for the same module and data; then the largest that really trains is found by trying, one process per try.

    python benchmarks/versus_batch_size_finder.py                      # 1 GiB above the start
    python benchmarks/versus_batch_size_finder.py mlp --room 512MiB
"""

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BatchSizeFinder
from torch.utils.data import DataLoader

from lightning_memguard import MemGuard
from lightning_memguard.units import format_bytes, parse_bytes
from shared.truth import QUIET, quieten
from shared.zoo import Case, case_named

STEPS = 3


@dataclass(frozen=True)
class Outcome:
    """What one process did: the size it chose or got, how long that took, and what failed on the way."""

    who: str
    batch_size: int
    seconds: float
    failed_allocations: int
    trained: bool
    error: str = ""


class Seen:
    """Seconds that a callback's hook took, and allocations that failed and were caught."""

    seconds = 0.0
    failures = 0


class Stop(pl.Callback):
    """Ends the training after some steps; with `limit_train_batches`, MemGuard would keep the batch size."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.should_stop or batch_idx + 1 >= STEPS


def timed(callback: Any, hook: str) -> Any:
    original = getattr(callback, hook)

    def run(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            Seen.seconds += time.perf_counter() - started

    setattr(callback, hook, run)
    return callback


def count_failures() -> None:
    """Lightning asks about the kind of each error that it catches."""
    from pytorch_lightning.tuner import batch_size_scaling as scaling

    original = scaling.is_oom_error

    def asked(error: BaseException) -> bool:
        failed = original(error)
        Seen.failures += failed
        return failed

    scaling.is_oom_error = asked


def trained_here(case: Case, who: str, batch_size: int, room_bytes: int) -> Outcome:
    """Limit this process, then train in it."""
    quieten()
    count_failures()
    module = case.build(case.optimizers[0])
    dataset = case.dataset(1_000_000)
    module.batch_size = batch_size
    module.train_dataloader = lambda: DataLoader(dataset, batch_size=module.batch_size)
    torch.ones(1 << 20).add_(1).sum()  # start the worker threads: their stacks are not part of the comparison
    limit_address_space(room_bytes)
    callbacks: dict[str, Any] = {
        "MemGuard": lambda: timed(MemGuard(min_steps_per_epoch=None), "setup"),
        "BatchSizeFinder": lambda: timed(
            BatchSizeFinder("binsearch", STEPS, batch_size, 25, max_val=1 << 20), "on_fit_start"
        ),
    }
    guard = callbacks[who]() if who in callbacks else None
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_val_batches=0,
        **QUIET,
        callbacks=[guard, Stop()] if guard else [Stop()],
    )
    error = ""
    try:
        trainer.fit(module)
    except (RuntimeError, MemoryError) as failure:
        error = str(failure).splitlines()[0][:160]
        Seen.failures += 1
    return Outcome(who, module.batch_size, Seen.seconds, Seen.failures, not error, error)


def limit_address_space(room_bytes: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room_bytes, resource.RLIM_INFINITY))


def in_a_process(case: str, who: str, batch_size: int, room_bytes: int) -> Outcome:
    """Run `trained_here` in a separate process."""
    words = [sys.executable, __file__, case, "--who", who, "--batch-size", str(batch_size), "--room", str(room_bytes)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return Outcome(**json.loads(line))
    return Outcome(who, batch_size, 0.0, 1, False, (done.stderr.strip().splitlines() or ["killed"])[-1][:160])


def largest_that_trains(case: str, room_bytes: int, start: int) -> int:
    """The largest size that trains, to within one percent, by trying."""
    good, bad = 0, start
    while in_a_process(case, "no callback", bad, room_bytes).trained:
        good, bad = bad, bad + max(1, bad // 4)
    if not good:
        good = 1
    while bad - good > max(1, good // 100):
        middle = (good + bad) // 2
        if in_a_process(case, "no callback", middle, room_bytes).trained:
            good = middle
        else:
            bad = middle
    return good


def print_sizes(case: str, room_bytes: int) -> None:
    """The size that each of the two chose, the time it took, and the largest that trains."""
    room = f"{format_bytes(room_bytes)} of address space beyond the start"
    print(f"{case}, {room}, {torch.get_num_threads()} threads\n")
    guard, finder = (in_a_process(case, who, 2, room_bytes) for who in ("MemGuard", "BatchSizeFinder"))
    largest = largest_that_trains(case, room_bytes, max(guard.batch_size, 1))
    print(f"{'':18}{'batch size':>12}{'of largest':>12}{'seconds':>10}{'failed allocations':>20}  then trained")
    for outcome in (guard, finder):
        share = outcome.batch_size / largest
        print(
            f"{outcome.who:18}{outcome.batch_size:12}{share:12.1%}{outcome.seconds:10.2f}"
            f"{outcome.failed_allocations:20}  {'yes' if outcome.trained else outcome.error}"
        )
    print(f"{'largest by trying':18}{largest:12}")
    print(f"\nMemGuard chose {finder.seconds / guard.seconds:.0f} times faster.")


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", default="cnn_batch_norm")
    parser.add_argument("--room", default="1GiB", help="memory beyond what the process has at the start")
    parser.add_argument("--who", help=argparse.SUPPRESS)
    parser.add_argument("--batch-size", type=int, default=2)
    options = parser.parse_args()
    room_bytes = parse_bytes(int(options.room) if options.room.isdigit() else options.room)
    if options.who:
        print(json.dumps(asdict(trained_here(case_named(options.case), options.who, options.batch_size, room_bytes))))
        return
    print_sizes(options.case, room_bytes)


if __name__ == "__main__":
    main()
