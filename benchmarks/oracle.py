"""Hash what is predicted, to show that a change of the code changes no prediction: events and every field, to the byte.

    python benchmarks/oracle.py --write before.json    # before the change
    python benchmarks/oracle.py --compare before.json  # after it: names what differs

Predicted at five sizes each: the zoo's trainings on the CPU, in two precisions on a GPU that is simulated, and small
steps that reach every way to capture one. Whole fits, from loader to decision, come last.
"""

import argparse
import hashlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.predict import predict
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.kernels import cudnn
from lightning_memguard.core.range import Range
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.errors import MemGuardError
from shared.predicted import program_of
from shared.process import forked
from shared.truth import QUIET, quieten
from shared.zoo import CASES, Case

GPU = gpus.find("NVIDIA H200")
CONTEXT = {"cpu": (0, 0, 10 << 20), "cuda": (300 << 20, 400 << 20, 600 << 20)}
ROOT = str(Path(__file__).parents[1])
Hashes = dict[str, str]


def hashed(value: object) -> str:
    return hashlib.sha256(placeless(repr(value)).encode()).hexdigest()[:20]


def placeless(text: str) -> str:
    """Leave out where this checkout is, and the lines of this file."""
    return re.sub(rf"({Path(__file__).name}):\d+", r"\1", text.replace(ROOT, ""))


def attempted(name: str, answer: Callable[[], Hashes]) -> Hashes:
    try:
        return answer()
    except MemGuardError as error:
        return {f"{name} error": placeless(str(error))}


def of_footprint(name: str, found: Footprint) -> Hashes:
    known = {each.name: getattr(found, each.name) for each in fields(found)}
    timing = known.pop("timing")
    work = timing and ([*timing.work], timing.batches_per_step, timing.compiled)
    own = {key: value for key, value in known.items() if key not in ("doubts", "low", "high", "trace", "settings")}
    ends = {end: tuple(vars(getattr(found, end)).values()) for end in ("lowest", "highest")}
    every = {**own, **ends, "work": work, "most": found.most_device_bytes}
    return {f"{name} {key}": hashed(value) for key, value in every.items()}


def of_program(program: Any, asked: int, sizes: tuple[int, ...], scalable: bool = True) -> Hashes:
    device = program.device.type
    settings = AllocatorSettings.for_device(device, {})
    prediction = predict(program, asked, settings, context_bytes=Range(*CONTEXT[device]), scalable=scalable)
    found: Hashes = {}
    for size in sizes:
        at = f"at {size}"
        found |= attempted(at, lambda: {f"{at} events": hashed(prediction.trace_at(size).events)})  # noqa: B023
        found |= attempted(at, lambda: of_footprint(at, prediction.footprint_at(size)))  # noqa: B023
    found |= attempted("proven", lambda: of_footprint("proven", prediction.proven_at(sizes[3]).footprint_at(sizes[3])))
    return found


def of_case(case: Case, device: str, precision: str) -> Hashes:
    torch.manual_seed(0)
    module, (small, size, large) = case.build(case.optimizers[0]), case.batch_sizes
    batch = next(iter(DataLoader(case.dataset(size), batch_size=size)))
    program = program_of(module, batch, device, precision, GPU if device == "cuda" else None, **case.trainer_kwargs)
    return of_program(program, size, (3, small, size, large, 3 * large + 1))


# Steps that are captured in every way --------------------------------------------------------------------------------


class Drawn:
    """Batches whose first value is the number of the draw."""

    multiple = 1

    def has(self, batch_size: int) -> bool:
        return True

    def batch(self, batch_size: int, draw: int) -> Tensor:
        batch = torch.ones(batch_size, 8)
        batch[0, 0], batch[1:, 1] = draw, -1
        return batch


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def masked(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[x[:, 1] > 0].tanh().exp().sum()


def reads(model: nn.Module, x: Tensor) -> Tensor:
    loss = plain(model, x)
    return loss.tanh() if loss.item() > 1e9 else loss


def layers_by_value(model: nn.Module, x: Tensor) -> Tensor:
    return sum(model(x).tanh().sum() for _ in range(1 + int(x[0, 0])))


def pairs(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return (y @ y.t()).exp().sum()


def by_sample(model: nn.Module, x: Tensor) -> Tensor:
    return sum(model(each).tanh().sum() for each in x)


def wide_batches_otherwise(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return (y.tanh() if len(x) > 40 else y).sum()


def even(model: nn.Module, x: Tensor) -> Tensor:
    if len(x) % 2:
        raise ValueError("samples come in pairs")
    return plain(model, x)


def fails_later(model: nn.Module, x: Tensor) -> Tensor:
    if len(x) > 16:
        raise ValueError("too many")
    return layers_by_value(model, x)


def fails(model: nn.Module, x: Tensor) -> Tensor:
    raise ValueError("no such column")


def sixteen(model: nn.Module, x: Tensor) -> Tensor:
    return plain(model, x.view(16, 8))


STEPS: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {  # whether batches are drawn
    **{each.__name__: (each, False) for each in (plain, masked, reads, pairs, by_sample, even, fails, sixteen)},
    "wide_batches_otherwise": (wide_batches_otherwise, False),
    **{f"{each.__name__} drawn": (each, True) for each in (masked, reads, layers_by_value, fails_later)},
}


def of_step(step: Callable[[Any, Any], Any], drawn: bool, on_gpu: bool) -> Hashes:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 32))
    batches = replace(batches_from_one(torch.ones(16, 8)), draws=Drawn() if drawn else None)
    device, gpu = ("cuda", GPU) if on_gpu else ("cpu", None)
    program = LoopProgram(model, batches, step, torch.optim.Adam, torch.device(device), gpu=gpu)
    return of_program(program, 16, (4, 16, 20, 50, 300))


# Whole fits ----------------------------------------------------------------------------------------------------------


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 8)

    def loss(self, batch: Any) -> Tensor:
        return self.last(self.first(batch[0] if isinstance(batch, (list, tuple)) else batch).relu()).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch).exp())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Unfreezes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch > 0:
            self.first.requires_grad_(True)


class Lengths(Dataset):
    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((5 + (index * 7919) % 36, 64), 0.5)


def padded(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


class ByLength:
    """A batch sampler that sets the batch sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0] * 8, [1] * 24, [5] * 4)

    def __len__(self) -> int:
        return 3


ROWS = TensorDataset(torch.ones(4000, 64))
FITS: dict[str, tuple[type[Net], Callable[[], Any], dict[str, Any]]] = {
    "check": (Net, lambda: DataLoader(ROWS, batch_size=16), {"mode": "check"}),
    "divided": (Net, lambda: DataLoader(ROWS, batch_size=2000), {"budget": "20MiB"}),
    "accumulating": (
        Net,
        lambda: DataLoader(ROWS, batch_size=16),
        {"budget": "24MiB", "keep_effective_batch_size": 512},
    ),
    "unfreezes": (Unfreezes, lambda: DataLoader(ROWS, batch_size=16), {"mode": "check"}),
    "compiled": (lambda: torch.compile(Net()), lambda: DataLoader(ROWS, batch_size=16), {"mode": "check"}),
    "uneven": (Net, lambda: DataLoader(Lengths(), 16, shuffle=True, collate_fn=padded), {"budget": "24MiB"}),
    "uneven checked": (Net, lambda: DataLoader(Lengths(), 16, collate_fn=padded), {"mode": "check"}),
    "kinds": (Net, lambda: DataLoader(Lengths(), batch_sampler=ByLength(), collate_fn=padded), {"mode": "check"}),
}


def of_fit(name: str) -> Hashes:
    kind, loader, settings = FITS[name]
    torch.manual_seed(0)
    guard = MemGuard(**{"min_steps_per_epoch": None, "max_setup_seconds": 600, **settings})
    given = {"max_epochs": 2, "limit_train_batches": 1} if name == "unfreezes" else {"max_epochs": 1}
    trainer = pl.Trainer(accelerator="cpu", devices=1, **QUIET, **given, callbacks=[guard])
    validation = DataLoader(ROWS, batch_size=64) if name in ("check", "divided") else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(kind(), loader(), validation)
    decision = guard.decision
    assert decision is not None
    taken = {key: value for key, value in vars(decision).items() if key not in ("footprint", "budget", "host")}
    found = {f"decision {key}": hashed(value) for key, value in taken.items()}
    return found | (of_footprint("decided", decision.footprint) if decision.footprint else {})


def everything() -> dict[str, Callable[[], Hashes]]:
    trainings = [("cpu", "32-true"), ("cuda", "32-true"), ("cuda", "bf16-mixed")]
    return {
        **{f"{case.name} {' '.join(how)}": partial(of_case, case, *how) for case in CASES for how in trainings},
        **{
            f"{name}{' cuda' * on_gpu}": partial(of_step, *step, on_gpu)
            for name, step in STEPS.items()
            for on_gpu in (False, True)
        },
        **{f"fit {name}": partial(of_fit, name) for name in FITS},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="write the hashes here")
    parser.add_argument("--compare", type=Path, help="compare the hashes with those")
    parser.add_argument("--only", nargs="+", default=[""], help="names that begin so")
    arguments = parser.parse_args()
    quieten()
    names = {name: run for name, run in everything().items() if name.startswith(tuple(arguments.only))}
    with mock.patch.object(cudnn, "workspaces", return_value=None):
        mine = {name: forked(run, threads=1) for name, run in names.items()}
    if arguments.write:
        arguments.write.write_text(json.dumps(mine, indent=0), encoding="utf-8")
    if not arguments.compare:
        return 0
    theirs = json.loads(arguments.compare.read_text(encoding="utf-8"))
    differing = 0
    for name, found in mine.items():
        before = theirs.get(name, {})
        changed = [key for key in {**before, **found} if before.get(key) != found.get(key)]
        differing += len(changed)
        if changed:
            print(f"{name}: {', '.join(changed)}")
    print(f"{sum(map(len, mine.values()))} hashes of {len(mine)} programs; {differing} differ")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
