"""Small trainings with each step's activations elsewhere, next to the same trainings without: equal to the bit?

    python benchmarks/trainings.py                            # 164 programs and 500 random ones, a quarter of an hour
    python benchmarks/trainings.py --only mask kl_            # programs whose name contains one of these
    python benchmarks/trainings.py --random 50 --first 1000   # so many random programs, from this seed on

Each program of `shared/step_programs.py` and `shared/random_programs.py` trains once without and once for each of three
values of `keep_bytes`, in its precisions (float32, float64, bfloat16 in part). After each step weights, buffers,
optimizer state, logged values, outputs, the batch and the random state are compared, bit by bit. A program is *equal*,
*same error* (both raise it), *unstable* (without, it does not repeat itself), or OTHER, which is the exit status.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_memguard.training.offload.engine import Offload
from shared.random_programs import compose
from shared.step_programs import PROGRAMS
from shared.truth import QUIET, quieten

STEPS = 4
KEEPS = (0, 2048, 1 << 30)  # nothing, a part, all


class Elsewhere(pl.Callback):
    """Runs each training step with its saved tensors elsewhere."""

    def __init__(self, keep_bytes: int) -> None:
        self.keep_bytes, self.moved = keep_bytes, 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.offload, strategy = Offload(pl_module, self.keep_bytes), trainer.strategy
        own = strategy.training_step

        @functools.wraps(own)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            with self.offload:
                result = own(*args, **kwargs)
            self.moved += self.offload.moved_bytes
            return result

        strategy.training_step = training_step

    def teardown(self, *_: Any, **__: Any) -> None:
        self.offload.close()


class Seen(pl.Callback):
    """A hash of all that each step has left."""

    def __init__(self) -> None:
        self.steps: list[dict[str, str]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        self.steps.append({
            "weights": hashed(pl_module.state_dict()),
            "optimizer": hashed(states),
            "logged": hashed(dict(trainer.callback_metrics)),
            "outputs": hashed(outputs),
            "batch": hashed(batch),
            "attributes": hashed({k: v for k, v in vars(pl_module).items() if not k.startswith("_")}),
            "random": hashed([torch.get_rng_state()]),
        })  # fmt: skip


def hashed(tree: Any) -> str:
    content = hashlib.sha256()
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            dense = leaf.detach().to_dense() if leaf.is_sparse else leaf.detach()
            content.update(str((tuple(dense.shape), dense.dtype)).encode())
            content.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b"")
        elif isinstance(leaf, (bool, int, float, str)):
            content.update(repr(leaf).encode())
    return content.hexdigest()


def train(program: Any, precision: str, keep_bytes: int | None) -> tuple[list[dict[str, str]], str, int]:
    """Train; return what each step has left, how it ended, and the bytes that moved."""
    quieten()
    pl.seed_everything(program.seed, verbose=False)
    seen, elsewhere = Seen(), Elsewhere(keep_bytes) if keep_bytes is not None else None
    callbacks = [*([elsewhere] if elsewhere else []), seen]
    settings = {"max_epochs": 1, "accelerator": "cpu", "precision": precision, **QUIET, **program.settings}
    module, loader = program.training(STEPS)
    error = ""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            pl.Trainer(**settings, callbacks=callbacks).fit(module, loader)
    except Exception as failure:  # noqa: BLE001 - whatever the program raises
        error = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
    return seen.steps, error, elsewhere.moved if elsewhere else 0


def examine(program: Any, precision: str) -> tuple[str, str, int]:
    """Return the outcome, in what it differs, and the most bytes that moved."""
    plain, error, _ = train(program, precision, None)
    most = 0
    for keep_bytes in KEEPS:
        found, other, moved = train(program, precision, keep_bytes)
        most = max(most, moved)
        if (found, other) == (plain, error):
            continue
        again, repeated, _ = train(program, precision, None)
        if (again, repeated) != (plain, error):
            return "unstable", "it does not repeat itself", most
        kinds = sorted({kind for a, b in zip(plain, found, strict=False) for kind in a if a[kind] != b[kind]})
        return "OTHER", f"keep_bytes={keep_bytes}: {', '.join(kinds) or f'{error!r}, {other!r}'}", most
    return ("same error" if error else "equal"), error, most


def programs(arguments: argparse.Namespace) -> Iterator[tuple[str, Any, str]]:
    for name, program in PROGRAMS.items():
        if any(part in name for part in arguments.only or [""]):
            for precision in dict.fromkeys([*program.precisions, "bf16-mixed"]):
                yield name, program, precision
    for seed in range(arguments.first, arguments.first + (0 if arguments.only else arguments.random)):
        program = compose(seed)
        yield f"random {seed}", program, ("32-true", "64-true", "bf16-mixed")[seed % 3]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="programs whose name contains one of these")
    parser.add_argument("--random", type=int, default=500, help="how many random programs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.chdir(tempfile.mkdtemp())
    outcomes: Counter[str] = Counter()
    still, started = 0, time.perf_counter()
    for name, program, precision in programs(arguments):
        outcome, words, moved = examine(program, precision)
        outcomes[outcome] += 1
        still += not moved
        if outcome in ("OTHER", "unstable"):
            print(f"{name:32} {precision:10} {outcome:10} {words}", flush=True)
    counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    print(f"{sum(outcomes.values())} trainings, each with three values of keep_bytes: {counted}")
    print(f"nothing moved in {still} of them; {time.perf_counter() - started:.0f} s")
    return int(outcomes["OTHER"] > 0)


if __name__ == "__main__":
    sys.exit(main())
