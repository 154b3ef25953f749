"""Steps that run out of memory, done again in parts of their batch: is the training the same, and what does it cost?

    python benchmarks/rescue.py                        # all parts; three to five minutes on two busy cores
    python benchmarks/rescue.py equality logged        # some of them

equality   fourteen modules train 20 steps, 8 of which raise an out-of-memory error: in the first operator, in the
           middle of the forward pass, after the first gradient was written, in the last operator of the backward
           pass, and some of the parts raise one again. Parameters are compared with the same training without errors.
           In the controls at the end, gradients are not put back, and parts are not weighted.
memory     a text classifier with a batch size chosen from short texts, in processes whose address space is limited:
           without MemGuard, with it, and with enough memory.
logged     values logged and torchmetrics' of a training with rescued steps, next to those of one without.
ranks      two processes of DistributedDataParallel over gloo, 200 steps: one runs out of memory, the other, both.
overhead   time of a step with and without the guard, in pairs of blocks of one training, by the thread's own clock.

It ends with status 1 if any part of it fails.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.training.adapter.closure import StepGuard, _Run
from overhead import Tiny
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
        self.count, self.has_gradient, self.active = 0, False, False
        self.lengths: dict[int, tuple[int, int]] = {}  # operators in forward and in all, by place in an accumulation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten" or not self.active:  # such as the profiler's marks
            return func(*args, **(kwargs or {}))
        self.count += 1
        if self.times and self.is_here():  # as an allocation fails: before anything is written
            self.times -= 1
            self.raised += 1
            self.count, self.has_gradient, self.active = 0, False, False
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
        self.batches = self.forward = self.raised = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.net.register_forward_pre_hook(self.begin)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.noticed)

    def begin(self, *_: Any) -> None:
        self.errors.active = True

    def noticed(self, _: torch.Tensor) -> None:
        self.errors.has_gradient = True

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        errors, place = self.errors, self.batches % trainer.accumulate_grad_batches
        errors.count, errors.has_gradient, errors.active = 0, False, False
        errors.length = errors.lengths.get(place, (1, 1))
        self.raised = errors.raised
        if self.batches in self.steps:
            errors.place = PLACES[self.steps.index(self.batches) % len(PLACES)]
            errors.times = 1 + self.steps.index(self.batches) % 3 // 2

    def on_before_backward(self, *_: Any) -> None:
        self.forward = self.errors.count

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if self.errors.raised == self.raised:
            place = self.batches % trainer.accumulate_grad_batches
            self.errors.lengths[place] = self.forward, self.errors.count

    def on_train_batch_end(self, *_: Any) -> None:
        self.errors.times, self.errors.active = 0, False
        self.batches += 1


class Forgets(pl.Callback):
    """Has the guard try each batch as a whole, however many as large have failed, at one size in all epochs."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        rescuer = guard_of(trainer)._run._rescuer
        rescuer._too_large_bytes, rescuer._guard.at_once = float("inf"), 0
        rescuer.parts_to_take = lambda _: 1


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
    layers = nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 4))


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
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, limit_train_batches=STEPS, callbacks=callbacks, **settings, **QUIET
    )
    with errors:
        trainer.fit(module, DataLoader(TensorDataset(*data), BATCH))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "memguard" not in name}
    return (
        torch.cat([p.detach().flatten() for p in module.parameters()]),
        errors.raised,
        sum(record.rescued for record in guard.records),
        metrics,
    )


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
        print(
            f"{case:22} {raised:6} {rescued:8} {error:11.1e}  {off:.1e}{'' if fine else '   NOT THE SAME'}", flush=True
        )
    own = StepGuard._gradients, _Run._weight
    StepGuard._gradients = lambda self: ([], [])  # type: ignore[method-assign]
    without, *_ = train("accumulation 4", RESCUED)
    StepGuard._gradients = own[0]  # type: ignore[method-assign]
    _Run._weight = lambda self, *_: 1.0  # type: ignore[method-assign]
    unweighted, *_ = train("MLP", RESCUED)
    _Run._weight = own[1]  # type: ignore[method-assign]
    for what, case, found in (
        ("gradients not put back", "accumulation 4", without),
        ("parts not weighted", "MLP", unweighted),
    ):
        expected = train(case, ())[0]
        error = float((found - expected).abs().max() / expected.abs().max())
        good &= error > 1e-3
        print(f"control: {what} ({case}): difference {error:.1e}")
    return good


# -- memory that really ends

ROOM = 90 << 20
LONG_STEPS = 60


class Texts(Dataset[tuple[torch.Tensor, int]]):
    """Token ids of log-normal lengths; most are short."""

    def __init__(self) -> None:
        random = np.random.default_rng(3)
        lengths = np.clip(random.lognormal(np.log(40), 0.8, LONG_STEPS * 32), 4, 700).astype(int)
        self.texts = [torch.from_numpy(random.integers(1, 500, length)) for length in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.texts[index], index % 2


def pad(items: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    texts = nn.utils.rnn.pad_sequence([text for text, _ in items], batch_first=True)
    return texts, torch.tensor([label for _, label in items])


class Classifier(pl.LightningModule):
    """Attention, which grows with the square of the longest text in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 32, padding_idx=0)
        self.attention, self.head = nn.Linear(32, 96), nn.Linear(32, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, labels = batch
        query, key, value = self.attention(self.embedding(tokens)).chunk(3, dim=-1)
        scores = (query @ key.mT).masked_fill((tokens == 0).unsqueeze(1), -1e9)
        hidden = torch.softmax(scores, dim=-1) @ value
        return F.cross_entropy(self.head(hidden.mean(dim=1)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class Losses(pl.Callback):
    """Limits the address space once the training starts, and keeps the loss of each step."""

    def __init__(self, room: int | None) -> None:
        self.room = room
        self.losses: list[float] = []

    def on_train_start(self, *_: Any) -> None:
        if self.room:
            used = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (used + self.room, resource.RLIM_INFINITY))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def run_memory(kind: str) -> None:
    pl.seed_everything(0, verbose=False)
    losses = Losses(None if kind == "enough" else ROOM)
    guard = MemGuard(max_batch_size=32)
    callbacks = [guard, losses] if kind == "with" else [losses]
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, **QUIET)
    trainer.fit(Classifier(), DataLoader(Texts(), 32, collate_fn=pad))
    rescued = sum(record.rescued for record in guard.records)
    print(f"RESULT {json.dumps({'losses': losses.losses, 'rescued': rescued})}")


def memory() -> bool:
    answers = {}
    for kind in ("enough", "without", "with"):
        done = run_apart("memory", kind)
        answers[kind] = answer = result_of(done)
        last = (done.stderr.strip().splitlines() or [""])[-1]
        ended = f"{len(answer['losses'])} steps, {answer['rescued']} rescued" if answer else f"died: {last}"
        print(f"{kind:8} {ended}", flush=True)
    enough, without, rescued = answers["enough"], answers["without"], answers["with"]
    if not enough or without or not rescued:
        return False
    pairs = list(zip(enough["losses"], rescued["losses"], strict=True))
    off = max(abs(other / one - 1) for one, other in pairs)
    curve = "  ".join(f"{one:.4f}/{other:.4f}" for one, other in pairs[:: len(pairs) // 6])
    print(f"losses with enough memory / rescued: {curve}; largest difference {off:.1e}")
    return 0 < rescued["rescued"] < LONG_STEPS and off < 1e-3


def run_apart(part: str, kind: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).resolve()), "--run", part, kind]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=folder, check=False)


def result_of(done: subprocess.CompletedProcess[str]) -> Any:
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return json.loads(lines[0].removeprefix("RESULT")) if lines else None


# -- what is logged


class Logs(pl.LightningModule):
    """Logs in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.f1 = torchmetrics.F1Score("multiclass", num_classes=4, average="macro")
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("summed", F.cross_entropy(out, y, reduction="sum"), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("largest", out.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("least", out.min(), on_step=False, on_epoch=True, reduce_fx="min")
        self.log("given", loss, on_step=False, on_epoch=True, batch_size=len(x))
        self.log("constant", 3.0, on_step=True, on_epoch=True, batch_size=8)
        self.accuracy(out, y)
        self.f1.update(out, y)
        self.mean.update(out.mean(dim=1))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"f1": self.f1, "mean": self.mean}, on_step=False, on_epoch=True)
        return {"loss": loss, "predicted": out.detach().argmax(1), "hits": (out.argmax(1) == y).sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Seen(pl.Callback):
    """Keeps what other callbacks are given and shown."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        shown = {f"output {name}": value.detach().clone() for name, value in outputs.items()}
        shown |= {name: value.clone() for name, value in trainer.callback_metrics.items() if "memguard" not in name}
        shown |= {f"bar {name}": torch.tensor(value) for name, value in trainer.progress_bar_metrics.items()}
        self.seen.append(shown)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append({name: value.clone() for name, value in trainer.logged_metrics.items()})


def run_logged(steps: tuple[int, ...]) -> tuple[list[dict[str, torch.Tensor]], dict[str, float], int]:
    pl.seed_everything(0, verbose=False)
    errors, seen, guard = Errors(), Seen(), MemGuard(max_batch_size=BATCH)
    callbacks = [guard, Forgets(), Plan(errors, steps), seen] if steps else [seen]
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, callbacks=callbacks, **QUIET)
    with errors:
        data = TensorDataset(rows(16)[: 10 * BATCH - 3], labels()[: 10 * BATCH - 3])
        trainer.fit(Logs(), DataLoader(data, BATCH))
    final = {name: float(value) for name, value in trainer.callback_metrics.items() if "memguard" not in name}
    return seen.seen, final, sum(record.rescued for record in guard.records)


def logged() -> bool:
    expected, at_end, _ = run_logged(())
    found, ended, rescued = run_logged(RESCUED)
    worst: dict[str, float] = {}
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys(), (one.keys(), other.keys())
        for name, value in one.items():
            same = value.shape == other[name].shape
            off = float((value - other[name]).abs().max() / value.abs().max().clamp(min=1e-6)) if same else float("inf")
            worst[name] = max(worst.get(name, 0), off)
    for name in sorted(worst):
        end = f"{at_end[name]:.6f} / {ended[name]:.6f}" if name in at_end else ""
        print(f"{name:20} largest difference {worst[name]:.1e}   {end}")
    print(f"{rescued} of 20 steps rescued")
    return max(worst.values()) < 1e-5 and rescued == len(RESCUED)


# -- two processes


class Buffered(Module):
    """With a buffer for the ranks to send each other."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.register_buffer("scale", torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x) * self.scale, y)


class ByRank(Plan):
    """Errors on rank 0, on rank 1, on both, and on none, in turns; or one, in the backward pass."""

    def __init__(self, errors: Errors, *, late: bool) -> None:
        super().__init__(errors, ())
        self.late = late

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        errors, rank = self.errors, trainer.global_rank
        stays = trainer.accumulate_grad_batches > 1 and batch_idx % 2 == 0  # gradients stay on their rank
        places = ("first operator", "forward", "after a gradient" if stays else "forward")
        on = ((), (0,), (1,), (0, 1))[self.batches // 2 % 4]
        errors.place, errors.times = places[self.batches % 3], int(rank in on and self.batches > 1)
        if self.late:
            errors.place, errors.times = "after a gradient", int(rank == 1 and self.batches == 9)


def run_ranks(kind: str) -> None:
    pl.seed_everything(0, verbose=False)
    errors, guard, module = Errors(), MemGuard(max_batch_size=BATCH), Buffered()
    callbacks = [] if "plain" in kind else [guard, Forgets(), ByRank(errors, late=kind == "late")]
    data = TensorDataset(torch.randn(200 * 2 * BATCH, 16), torch.randint(0, 4, (200 * 2 * BATCH,)))
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=callbacks,
        accumulate_grad_batches=2 if kind.endswith("2") else 1, **QUIET,
    )  # fmt: skip
    with errors:
        trainer.fit(module, DataLoader(data, BATCH))
    own = torch.tensor(float(sum(record.rescued for record in guard.records)))
    rescued = trainer.strategy.reduce(own, reduce_op="sum")
    if trainer.is_global_zero:
        weights = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
        print(f"RESULT {json.dumps({'weights': weights, 'rescued': float(rescued), 'steps': trainer.global_step})}")


def ranks() -> bool:
    good = True
    for accumulate in (1, 2):
        done = {kind: run_apart("ranks", f"{kind} {accumulate}") for kind in ("plain", "errors")}
        plain, failed = map(result_of, done.values())
        if not plain or not failed:
            print(done["errors"].stderr[-3000:])
            return False
        expected, found = torch.tensor(plain["weights"]), torch.tensor(failed["weights"])
        off = float((expected - found).abs().max() / expected.abs().max())
        what = (
            f"200 batches a rank, accumulation {accumulate}: {failed['steps']} steps, {failed['rescued']:.0f} rescued"
        )
        print(f"{what} in all, difference {off:.1e}", flush=True)
        good &= off < 1e-5 and failed["rescued"] > 150
    started = time.monotonic()
    late = run_apart("ranks", "late")
    why = "DistributedDataParallel cannot start a backward pass again"
    seconds = time.monotonic() - started
    print(f"an error in the backward pass: status {late.returncode} after {seconds:.0f} s, with the reason: "
          f"{why in late.stderr}")  # fmt: skip
    return good and late.returncode != 0 and why in late.stderr


# -- what it costs


class Toggles(pl.Callback):
    """Guards every other block of steps, and times each block; and what is noted before a step, alone."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.seconds: list[float] = []  # of blocks without the guard, with it, with it, without it, ...
        self.noting: list[float] = []  # seconds, in each block
        self.started = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.block:
            return
        self.seconds.append(time.thread_time() - self.started)
        guard = guard_of(trainer)._run._rescuer._guard
        note = partial(guard._state.note, guard._epoch_loop._results)
        self.noting.append(timeit.timeit(note, timer=time.thread_time, number=self.block) / self.block)
        guard.remove()
        if len(self.seconds) % 4 in (2, 3):
            guard.install()
        self.started = time.thread_time()


def overhead() -> bool:
    good = True
    for what, module, block, pairs in (("a tiny step", Tiny(), 50, 400), ("one that logs", Logs(), 20, 100)):
        toggles, count = Toggles(block), (2 * pairs + 3) * block
        columns = (
            [torch.zeros(count, 4)]
            if isinstance(module, Tiny)
            else [torch.randn(count, 16), labels()[:1].expand(count)]
        )
        trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[MemGuard(max_batch_size=1), toggles], **QUIET)
        trainer.fit(module, DataLoader(TensorDataset(*columns), 1))
        each = [second / block * 1e6 for second in toggles.seconds[3:]]
        extra = [
            (one - other) * (-1) ** place for place, (one, other) in enumerate(zip(each[::2], each[1::2], strict=False))
        ]
        low, more, high = statistics.quantiles(extra)
        print(f"{what}: {statistics.median(each):.1f} us; guarded {more:+.1f} us (quartiles {low:+.1f}, {high:+.1f}; "
              f"{len(extra)} pairs of {block} steps); noting what a step may change takes "
              f"{statistics.median(toggles.noting) * 1e6:.1f} us of it", flush=True)  # fmt: skip
        good &= more < 10 or not isinstance(module, Tiny)
    return good


PARTS: dict[str, Callable[[], bool]] = {
    "equality": equality,
    "memory": memory,
    "logged": logged,
    "ranks": ranks,
    "overhead": overhead,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which of them (default: all)")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    quieten()
    torch.set_num_threads(1)
    if not options.run:
        os.chdir(tempfile.mkdtemp())  # for the reports
    if options.run:
        {"memory": run_memory, "ranks": run_ranks}[options.run[0]](options.run[1])
        return 0
    failed = []
    for name in options.parts or PARTS:
        print(f"\n{name}", flush=True)
        if not PARTS[name]():
            failed.append(name)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall as expected")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
