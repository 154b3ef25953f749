"""Steps that run out of memory, done again in parts of their batch: is the training the same, and what does it cost?

    python benchmarks/rescue.py                        # all parts; three to five minutes on two busy cores
    python benchmarks/rescue.py equality logged        # some of them

equality   twelve modules train 20 steps, 8 of which raise an out-of-memory error: in the first operator, in the middle of
           the forward pass, after the first gradient was written, in the last operator of the backward pass, and some
           of the parts raise one again. Parameters are compared with the same training without errors. In the control
           at the end, gradients and state are not put back.
memory     a text classifier with a batch size chosen from short texts, in processes whose address space is limited:
           without MemGuard, with it, and with enough memory.
logged     values logged and torchmetrics' of a training with rescued steps, next to those of one without.
ranks      two processes of DistributedDataParallel over gloo, 200 steps: one runs out of memory, the other, both.
overhead   time of a step with and without the guard, in pairs of blocks, by the thread's own clock.

It ends with status 1 if any part of it fails.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.training.adapter.closure import StepGuard, _Run
from lightning_memguard.training.adapter.logged import StepState
from shared.truth import QUIET, quieten

STEPS, BATCH = 20, 8
RESCUED = (1, 3, 5, 7, 10, 12, 15, 18)
PLACES = ("first operator", "forward", "after a gradient", "last operator")
TOLERANCE = 1e-6

# -- errors at a place


class Errors(TorchDispatchMode):
    """Raises an out-of-memory error at a place of a step, ``times`` over: in the batch, then in its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.times, self.raised = "", 0, 0
        self.count, self.has_gradient = 0, False
        self.lengths: dict[int, tuple[int, int]] = {}  # operators in forward and in all, by place in an accumulation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten":  # such as the profiler's marks
            return func(*args, **(kwargs or {}))
        self.count += 1
        if self.times and self.is_here():  # as an allocation fails: before anything is written
            self.times -= 1
            self.raised += 1
            self.count, self.has_gradient = 0, False
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        return func(*args, **(kwargs or {}))

    def is_here(self) -> bool:
        forward, everything = self.length
        match self.place:
            case "first operator":
                return True
            case "forward":
                return self.count >= forward // 2
            case "after a gradient":
                return self.has_gradient
        return self.count >= everything

    length = (0, 0)


class Plan(pl.Callback):
    """Sets off the errors of a training, and counts the operators of steps without any."""

    def __init__(self, errors: Errors, steps: tuple[int, ...]) -> None:
        self.errors, self.steps = errors, steps
        self.batches = 0
        self.forward = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.noticed)

    def noticed(self, _: torch.Tensor) -> None:
        self.errors.has_gradient = True

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        errors, place = self.errors, self.batches % trainer.accumulate_grad_batches
        errors.count, errors.has_gradient = 0, False
        errors.length = errors.lengths.get(place, (1, 1))
        if self.batches in self.steps:
            errors.place = PLACES[self.steps.index(self.batches) % len(PLACES)]
            errors.times = 1 + self.steps.index(self.batches) % 3 // 2

    def on_before_backward(self, *_: Any) -> None:
        self.forward = self.errors.count

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if self.batches not in self.steps:
            place = self.batches % trainer.accumulate_grad_batches
            self.errors.lengths[place] = self.forward, self.errors.count

    def on_train_batch_end(self, *_: Any) -> None:
        self.errors.times = 0
        self.batches += 1


class Forgets(pl.Callback):
    """Has the guard try each batch as a whole, however many as large have failed."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        rescuer = guard_of(trainer)._run._rescuer
        rescuer._too_large_bytes, rescuer._guard.at_once = float("inf"), 0


def guard_of(trainer: Any) -> Any:
    return next(each for each in trainer.callbacks if isinstance(each, MemGuard))


# -- modules


class Module(pl.LightningModule):
    """A net, its loss and its optimizer."""

    def __init__(self, net: nn.Module, loss: Callable[..., torch.Tensor] = F.cross_entropy, adam: bool = False) -> None:
        super().__init__()
        self.net, self.loss, self.adam = net, loss, adam

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = self.loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        parameters = list(self.parameters())
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


class Last(nn.Module):
    """The last step of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, 2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Gpt(nn.Module):
    """A small causal transformer whose embedding is its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layer(self.embedding(x), src_mask=mask, is_causal=True)).transpose(1, 2)


class Encoder(nn.Module):
    """A transformer, and the mean over its tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))


class Checkpointed(nn.Module):
    """Layers whose activations are computed again."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.head(checkpoint(lambda h: self.second(h).relu(), hidden, use_reentrant=self.reentrant))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def cnn(norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4)
    )  # fmt: skip


def sum_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, y, reduction="sum") / 8


def labels(count: int = 4, *shape: int) -> torch.Tensor:
    return torch.randint(0, count, (STEPS * 4 * BATCH, *shape))


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(STEPS * 4 * BATCH, *shape)


# name: (module, data, Trainer's settings)
CASES: dict[str, Callable[[], tuple[pl.LightningModule, tuple[torch.Tensor, ...], dict[str, Any]]]] = {
    "MLP": lambda: (Module(mlp()), (rows(16), labels()), {}),
    "MLP, AdamW": lambda: (Module(mlp(), adam=True), (rows(16), labels()), {}),
    "MLP, summed loss": lambda: (Module(mlp(), sum_loss), (rows(16), labels()), {}),
    "CNN": lambda: (Module(cnn(nn.Identity())), (rows(3, 8, 8), labels()), {}),
    "CNN, group norm": lambda: (Module(cnn(nn.GroupNorm(2, 8))), (rows(3, 8, 8), labels()), {}),
    "transformer": lambda: (Module(Encoder()), (rows(6, 8), labels()), {}),
    "GPT, tied weights": lambda: (Module(Gpt()), (labels(32, 12), labels(32, 12)), {}),
    "LSTM": lambda: (Module(Last()), (rows(5, 8), labels()), {}),
    "accumulation 4": lambda: (Module(mlp()), (rows(16), labels()), {"accumulate_grad_batches": 4}),
    "accumulation 4, GPT": lambda: (Module(Gpt()), (labels(32, 12), labels(32, 12)), {"accumulate_grad_batches": 4}),
    "clipping": lambda: (Module(mlp()), (rows(16), labels()), {"gradient_clip_val": 0.1}),
    "checkpointing": lambda: (Module(Checkpointed(reentrant=False)), (rows(16), labels()), {}),
    "reentrant": lambda: (Module(Checkpointed(reentrant=True)), (rows(16), labels()), {}),
    "bf16-mixed": lambda: (Module(mlp()), (rows(16), labels()), {"precision": "bf16-mixed"}),
}


def train(case: str, steps: tuple[int, ...]) -> tuple[torch.Tensor, int, int, dict[str, float]]:
    """Parameters, errors raised, steps rescued, logged values."""
    pl.seed_everything(0, verbose=False)
    module, data, settings = CASES[case]()
    errors = Errors()
    guard = MemGuard(max_batch_size=BATCH)
    callbacks = [guard, Forgets(), Plan(errors, steps)] if steps else []
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, limit_train_batches=STEPS, callbacks=callbacks, **settings, **QUIET)
    with errors:
        trainer.fit(module, DataLoader(TensorDataset(*data), BATCH))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "memguard" not in name}
    return torch.cat([p.detach().flatten() for p in module.parameters()]), errors.raised, sum(record.rescued for record in guard.records), metrics


def equality() -> bool:
    print(f"{'':22} {'errors':>6} {'rescued':>8} {'difference':>11}  logged")
    good = True
    for case in CASES:
        expected, _, _, logged = train(case, ())
        found, raised, rescued, relogged = train(case, RESCUED)
        error = float((found - expected).abs().max() / expected.abs().max())
        off = max(abs(relogged[name] / value - 1) for name, value in logged.items())
        tolerance = 1e-2 if "bf16" in case else TOLERANCE
        fine = error <= tolerance and rescued == len(RESCUED) and off <= 10 * tolerance
        good &= fine
        print(f"{case:22} {raised:6} {rescued:8} {error:11.1e}  {off:.1e}{'' if fine else '   NOT THE SAME'}", flush=True)
    own = StepGuard._gradients, StepState.put_back, _Run._weight
    StepGuard._gradients = lambda self: {}  # type: ignore[method-assign]
    without, *_ = train("accumulation 4", RESCUED)
    StepGuard._gradients = own[0]  # type: ignore[method-assign]
    _Run._weight = lambda self, count: 1.0  # type: ignore[method-assign]
    unweighted, *_ = train("MLP", RESCUED)
    _Run._weight = own[2]  # type: ignore[method-assign]
    for what, case, found in (
        ("gradients not put back", "accumulation 4", without),
        ("parts not weighted", "MLP", unweighted),
    ):
        expected = train(case, ())[0]
        error = float((found - expected).abs().max() / expected.abs().max())
        good &= error > 1e-3
        print(f"control: {what} ({case}): difference {error:.1e}")
    return good


PARTS: dict[str, Callable[[], bool]] = {"equality": equality}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which of them (default: all)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    quieten()
    torch.set_num_threads(1)
    failed = []
    for name in options.parts or PARTS:
        print(f"\n{name}", flush=True)
        if not PARTS[name]():
            failed.append(name)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall as expected")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
