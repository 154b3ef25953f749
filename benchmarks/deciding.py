"""What a decision takes, of two checkouts of the package in turns: seconds, processor time, memory left behind.

From `setup` to the decision, for each family of the zoo, a ResNet-50, a GPT-2 small and a fit with validation. Each
number is the median of some rounds, and each measurement a process of its own: before, after, before, after, ... In the
first table the process has trained the model for two steps before, so that what libraries load when they are first used
does not count; in the second it has done nothing yet.

- seconds: of `tune`
- processor: seconds of the process and of all the processes it made
- resident: what the process holds more than before, with the decision (VmRSS, and of that RssAnon), after a garbage
  collection and `malloc_trim`

    python benchmarks/deciding.py BEFORE AFTER             # two checkouts, such as those of `git worktree add`
    python benchmarks/deciding.py BEFORE AFTER --only mlp gpt --rounds 1
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shared.truth import QUIET
from shared.zoo import CASES, LARGE, Case, Supervised, case_named, images, resnet_small

_MIB = 1 << 20
_BUDGET = 8 << 30  # the same for both, whatever else the machine does
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Validated(Supervised):
    """Trains, and validates the same way."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


VALIDATED = Case(
    "resnet_validated", lambda name: Validated(resnet_small(), name, F.cross_entropy), images(3, 48), (8, 16, 32)
)
NAMES = [case.name for case in (*CASES, *LARGE, VALIDATED)]

Measured = dict[str, float]


# -- one measurement, in a process of its own


def measure(case: Case, checkout: Path, *, warm: bool) -> Measured:
    import lightning_memguard
    from lightning_memguard import MemGuard
    from lightning_memguard.training.run.tune import tune

    if checkout not in Path(lightning_memguard.__file__).parents:
        raise SystemExit(f"{lightning_memguard.__file__} is not the package of {checkout}.")
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so that processes that outlive theirs count too
    module = case.build(case.optimizers[0])
    if warm:
        trainer_of(case, limit_train_batches=2, limit_val_batches=1, num_sanity_val_steps=0).fit(module, *loaders(case))
    trainer = trainer_of(case)
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, *loaders(case))
    settings = MemGuard(budget=_BUDGET)._settings
    held, used = resident(), processor_seconds()
    started = time.perf_counter()
    tuning = tune(trainer, module, settings)
    seconds = time.perf_counter() - started
    reap()
    used = processor_seconds() - used
    after = resident()
    if tuning.profile is None:
        raise SystemExit(f"{case.name}: {tuning.decision.reason}")
    left = {name: (after[name] - held[name]) / _MIB for name in held}
    return {"batch_size": tuning.decision.batch_size, "seconds": seconds, "processor": used, **left}


def trainer_of(case: Case, **settings: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        **QUIET,
        **case.trainer_kwargs,
        **settings,
    )


def loaders(case: Case) -> list[DataLoader]:
    count = 2 if case is VALIDATED else 1
    return [DataLoader(case.dataset(100_000), batch_size=case.batch_sizes[0]) for _ in range(count)]


def resident() -> dict[str, int]:
    """Bytes in memory, once what can be given back was."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon")}


def processor_seconds() -> float:
    """Of this process and of those that have ended below it."""
    of = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in of)


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


# -- all of them


def measured_in(checkout: Path, name: str, *, warm: bool) -> Measured:
    command = [sys.executable, __file__, str(checkout), "--measure", name, *(["--warm"] if warm else [])]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def table(names: list[str], checkouts: list[Path], rounds: int, *, warm: bool) -> None:
    state = "that has trained the model for two steps" if warm else "that has just started"
    print(f"\nIn a process {state}, before and after; memory in MiB, median of {rounds} rounds:\n")
    quantities = ("seconds", "processor", "VmRSS", "RssAnon")
    print(f"| model | batch size | ratio of seconds | {' | '.join(quantities)} |")
    print(f"|---|{'---:|' * (2 + len(quantities))}", flush=True)
    ratios = []
    left: list[float] = []
    for name in names:
        turns = [[measured_in(checkout, name, warm=warm) for checkout in checkouts] for _ in range(rounds)]
        before, after = ({key: statistics.median(t[i][key] for t in turns) for key in turns[0][0]} for i in (0, 1))
        ratios.append(before["seconds"] / after["seconds"])
        left.append(after["VmRSS"])
        sizes = " / ".join(dict.fromkeys(f"{each['batch_size']:g}" for each in (before, after)))
        cells = [f"{before[key]:.2f} / {after[key]:.2f}" for key in quantities]
        print(f"| {name} | {sizes} | {ratios[-1]:.2f} | {' | '.join(cells)} |", flush=True)
    print(f"\nSeconds before / after: {statistics.median(ratios):.2f} in the median, {min(ratios):.2f} at least.")
    print(f"Left behind after: {statistics.median(left):.2f} MiB in the median, {max(left):.2f} MiB at most.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=lambda path: Path(path).resolve(), metavar="CHECKOUT")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        warnings.filterwarnings("ignore")
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        case = VALIDATED if options.measure == VALIDATED.name else case_named(options.measure)
        print(json.dumps(measure(case, options.checkouts[0], warm=options.warm)))
        return
    if len(options.checkouts) != 2:
        parser.error("give two checkouts: the one before, and the one after")
    for warm in (True, False):
        table(options.only, options.checkouts, options.rounds, warm=warm)


if __name__ == "__main__":
    main()
