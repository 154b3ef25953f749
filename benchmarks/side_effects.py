"""What a training step does beside its loss, and what of it is left when MemGuard only checks the run.

Each effect is a tiny module that is trained in a process of its own, in an empty folder, under a time limit: without
MemGuard, and with `MemGuard(mode="check")` from each checkout. What is compared is what is left: rows, values, how the
process ended. The last effects are of steps that cannot run at any size but the loader's, as a custom kernel might:
the training itself never meets them.

    python benchmarks/side_effects.py                              # the package as installed
    python benchmarks/side_effects.py PATH_BEFORE PATH_AFTER       # two checkouts
    python benchmarks/side_effects.py PATH --only "SQLite rows"    # some of it
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import hashlib
import json
import math
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from shared.truth import QUIET

SAMPLES, BATCH_SIZE = 24, 6
SECONDS_AT_MOST = 150
GIB = 1 << 30
ROOM_BYTES = 3 * GIB  # for what asks for fifty: the machine is not to suffer


class Effect:
    """Something that a step does beside its loss; `left` tells afterwards what is left of it."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def step(self, module: Module, x: torch.Tensor) -> None:
        """What the step does."""

    def left(self) -> str:
        return "trained"


class CsvHeldOpen(Effect):
    """a CSV row written a step, into a file held open"""

    def __init__(self, module: Module) -> None:
        module.held = csv.writer(Path("rows.csv").open("w", buffering=1))  # noqa: SIM115

    def step(self, module: Module, x: torch.Tensor) -> None:
        module.held.writerow([len(x)])

    def left(self) -> str:
        return f"{len(Path('rows.csv').read_text().splitlines())} rows"


class CsvByName(CsvHeldOpen):
    """a CSV row appended a step, to a file opened by name"""

    def __init__(self, module: Module) -> None:
        pass

    def step(self, module: Module, x: torch.Tensor) -> None:
        with Path("rows.csv").open("a") as file:
            csv.writer(file).writerow([len(x)])


class SqliteRows(Effect):
    """SQLite rows"""

    def __init__(self, module: Module) -> None:
        self.connection = module.held = sqlite3.connect("rows.db")
        module.held.execute("CREATE TABLE rows (size)")

    def step(self, module: Module, x: torch.Tensor) -> None:
        module.held.execute("INSERT INTO rows VALUES (?)", (len(x),))
        module.held.commit()

    def left(self) -> str:
        return f"{self.connection.execute('SELECT count(*) FROM rows').fetchone()[0]} rows"


class Generator(Effect):
    """a generator held on the module"""

    def __init__(self, module: Module) -> None:
        self.numbers = module.held = (number for number in range(1000))

    def step(self, module: Module, x: torch.Tensor) -> None:
        next(module.held)

    def left(self) -> str:
        return f"next is {next(self.numbers)}"


class LoaderIterator(Effect):
    """`iter(DataLoader)` held on the module"""

    def __init__(self, module: Module) -> None:
        self.batches = module.held = iter(DataLoader(range(100), batch_size=1))

    def step(self, module: Module, x: torch.Tensor) -> None:
        next(module.held)

    def left(self) -> str:
        return f"next is {next(self.batches).item()}"


class ReadPosition(Effect):
    """a file read line by line"""

    def __init__(self, module: Module) -> None:
        Path("lines.txt").write_text("line\n" * 1000)
        self.file = module.held = Path("lines.txt").open("rb", buffering=0)  # noqa: SIM115

    def step(self, module: Module, x: torch.Tensor) -> None:
        module.held.readline()

    def left(self) -> str:
        return f"at line {self.file.tell() // 5}"


STEPS: list[int] = []


class ModuleLevelList(Effect):
    """a module-level list"""

    def step(self, module: Module, x: torch.Tensor) -> None:
        STEPS.append(len(x))

    def left(self) -> str:
        return f"{len(STEPS)} items"


class Counter(pl.Callback):
    calls = 0


class CallbackCounter(Effect):
    """a counter on another callback"""

    def __init__(self, module: Module) -> None:
        self.counter = module.held = Counter()

    def step(self, module: Module, x: torch.Tensor) -> None:
        module.held.calls += 1

    def left(self) -> str:
        return f"{self.counter.calls} calls"


class Prints(Effect):
    """prints, by Python and by C"""

    def step(self, module: Module, x: torch.Tensor) -> None:
        print("a step")
        ctypes.CDLL(None).puts(b"a step")

    def left(self) -> str:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)
        return f"{Path('out.txt').read_text().count('a step')} lines"


class Saves(Effect):
    """`torch.save` in the step"""

    def step(self, module: Module, x: torch.Tensor) -> None:
        torch.save({"size": len(x)}, f"{len(x)}.pt")

    def left(self) -> str:
        return " ".join(sorted(path.name for path in Path().glob("*.pt"))) or "none"


class MemoryMap(Effect):
    """a memmap written"""

    def __init__(self, module: Module) -> None:
        np.zeros(4, np.int64).tofile("numbers.bin")
        self.numbers = module.held = np.memmap("numbers.bin", np.int64, "r+")

    def step(self, module: Module, x: torch.Tensor) -> None:
        module.held[0] += 1
        module.held.flush()

    def left(self) -> str:
        return f"{np.fromfile('numbers.bin', np.int64)[0]} counted"


class BatchNorm(Effect):
    """batch norm statistics of a network the module does not own"""

    def __init__(self, module: Module) -> None:
        self.norm = nn.BatchNorm1d(8)
        module.held = [self.norm]

    def step(self, module: Module, x: torch.Tensor) -> None:
        module.held[0](torch.ones(4, 8))

    def left(self) -> str:
        return f"{int(self.norm.num_batches_tracked)} batches, mean {self.norm.running_mean[0].item():.4f}"


class Gradient(Effect):
    """`p.grad` of a parameter the module does not own"""

    def __init__(self, module: Module) -> None:
        self.parameter = nn.Parameter(torch.zeros(1))
        module.held = [self.parameter]

    def step(self, module: Module, x: torch.Tensor) -> None:
        module.held[0].sum().backward()

    def left(self) -> str:
        grad = self.parameter.grad
        return "none" if grad is None else f"{grad.item():.0f} in a {type(grad).__name__}"


class RandomState(Effect):
    """random state, of the libraries and of a generator"""

    def __init__(self, module: Module) -> None:
        self.own = module.held = np.random.default_rng(1)

    def step(self, module: Module, x: torch.Tensor) -> None:
        random.random()
        np.random.rand()  # noqa: NPY002 - the state in question
        torch.rand(())
        module.held.random()

    def left(self) -> str:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state().tolist(), self.own.bit_generator.state  # noqa: NPY002
        return hashlib.sha256(repr(states).encode()).hexdigest()[:8]


class OneTimeWarning(Effect):
    """Lightning's one-time warning, that the step returned None"""

    def __init__(self, module: Module) -> None:
        module.returns_none = True

    def left(self) -> str:
        sys.stderr.flush()
        return f"shown {Path('err.txt').read_text().count('returned `None`')} times"


class Patched(Effect):
    """an imported module patched by the step"""

    def step(self, module: Module, x: torch.Tensor) -> None:
        math.steps = getattr(math, "steps", 0) + 1

    def left(self) -> str:
        return f"math.steps = {getattr(math, 'steps', None)}"


class AtOtherSizes(Effect):
    """What runs only at sizes that the loader does not give."""

    def step(self, module: Module, x: torch.Tensor) -> None:
        if len(x) != BATCH_SIZE:
            self.misbehave()

    def misbehave(self) -> None:
        raise NotImplementedError


class SystemExits(AtOtherSizes):
    """`sys.exit` at other sizes"""

    def misbehave(self) -> None:
        sys.exit(3)


class Exits(AtOtherSizes):
    """`os._exit` at other sizes"""

    def misbehave(self) -> None:
        os._exit(3)


class SegmentationFault(AtOtherSizes):
    """a segmentation fault through ctypes at other sizes"""

    def misbehave(self) -> None:
        ctypes.string_at(0)


class Endless(AtOtherSizes):
    """an endless loop at other sizes"""

    def misbehave(self) -> None:
        while True:
            pass


TAKEN: list[bytearray] = []


class Gigabytes(AtOtherSizes):
    """50 GB asked for at other sizes, 3 GiB there"""

    def __init__(self, module: Module) -> None:
        self.before = resident_bytes()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, resource.RLIM_INFINITY))

    def misbehave(self) -> None:
        while len(TAKEN) < 50 * 8:
            TAKEN.append(bytearray(b"x") * (GIB // 8))

    def left(self) -> str:
        return f"{(resident_bytes() - self.before) / GIB:.1f} GiB more resident"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


EFFECTS: list[type[Effect]] = [
    *(CsvHeldOpen, CsvByName, SqliteRows, Generator, LoaderIterator, ReadPosition, ModuleLevelList, CallbackCounter),
    *(Prints, Saves, MemoryMap, BatchNorm, Gradient, RandomState, OneTimeWarning, Patched),
    *(SystemExits, Exits, SegmentationFault, Endless, Gigabytes),
]


class Module(pl.LightningModule):
    """A linear layer whose step has an effect, which may hold something on it."""

    held: Any = None
    returns_none = False

    def __init__(self, kind: type[Effect]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.effect = kind(self)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        (x,) = batch
        self.effect.step(self, x)
        return None if self.returns_none and not batch_idx else self.layer(x).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


# -- in a process for each checkout, which forks one for each effect: importing takes longer than training


def run_all(names: list[str], *, guarded: bool) -> dict[str, str]:
    return {kind.__doc__ or "": run(kind, guarded) for kind in EFFECTS if not names or kind.__doc__ in names}


def run(kind: type[Effect], guarded: bool) -> str:
    """Train with an effect in a process of its own -> what is left."""
    with tempfile.TemporaryDirectory() as folder:
        process = os.fork()
        if not process:
            try:
                os.chdir(folder)
                for number, name in ((1, "out.txt"), (2, "err.txt")):
                    os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), number)
                Path("left.txt").write_text(train(kind, guarded))
            finally:
                os._exit(1)
        ended = wait(process)
        left = Path(folder, "left.txt")
        return left.read_text() if left.exists() else f"the process {ended}"


def wait(process: int) -> str:
    deadline = time.monotonic() + SECONDS_AT_MOST
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended and os.WIFSIGNALED(status):
            return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
        if ended:
            return f"ended with exit code {os.WEXITSTATUS(status)}"
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return f"had not trained after {SECONDS_AT_MOST} s"


def train(kind: type[Effect], guarded: bool) -> str:
    pl.seed_everything(1, verbose=False)
    module, guard = Module(kind), MemGuard(mode="check")
    others = [module.held] if isinstance(module.held, pl.Callback) else []
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[*([guard] if guarded else []), *others],
        **QUIET,
    )
    try:
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(SAMPLES, 4)), batch_size=BATCH_SIZE))
    except BaseException as error:  # noqa: BLE001 - how it ended is the result
        return f"the training ended in {type(error).__name__}"
    left = module.effect.left()
    if not guarded:
        return left
    known = guard.decision.footprint if guard.decision else None
    return f"{left}|{known.method if known else 'nothing predicted'}"


# -- the table


def in_checkout(path: str | None, names: list[str], *, guarded: bool) -> dict[str, str]:
    environment = {**os.environ, **({"PYTHONPATH": str(Path(path).resolve())} if path else {})}
    command = [
        sys.executable,
        __file__,
        "--child",
        "with" if guarded else "without",
        *(["--only", *names] if names else []),
    ]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def table(columns: dict[str, Callable[[], dict[str, str]]]) -> str:
    with ThreadPoolExecutor(2) as workers:
        plain, *guarded = [each.result() for each in [workers.submit(column) for column in columns.values()]]
    lines = [f"| effect | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
    for effect, left in plain.items():
        cells = [cell(left, each[effect]) for each in guarded]
        lines.append(f"| {effect} | {left} | {' | '.join(cells)} |")
    same = [sum(each[effect].split("|")[0] == left for effect, left in plain.items()) for each in guarded]
    lines.append(f"| as without | | {' | '.join(f'{count} of {len(plain)}' for count in same)} |")
    return "\n".join(lines)


def cell(plain: str, guarded: str) -> str:
    left, _, method = guarded.partition("|")
    marked = left if left == plain else f"**{left}**"
    return f"{marked} ({method})" if method else marked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", help="folders with the package (default: the one installed)")
    parser.add_argument("--only", nargs="+", default=[], metavar="EFFECT", help="only these effects")
    parser.add_argument("--child", choices=["with", "without"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        json.dump(run_all(given.only, guarded=given.child == "with"), sys.stdout)
        return
    columns = {"without MemGuard": lambda: in_checkout(None, given.only, guarded=False)}
    for path in given.checkouts or [None]:
        title = f"with MemGuard, {Path(path).name}" if path else "with MemGuard"
        columns[title] = lambda path=path: in_checkout(path, given.only, guarded=True)
    print(table(columns))


if __name__ == "__main__":
    main()
