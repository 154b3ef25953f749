"""What steps cost that are done again in parts of their batch, what they save, and what the guard costs without them.

    python benchmarks/rescue_cost.py                   # everything; about five minutes on one core
    python benchmarks/rescue_cost.py cost overhead     # some of it

memory     a text classifier with a batch size chosen from short texts, in processes whose address space is limited:
           without MemGuard, with it, and with enough memory.
cost       CPU time of a step that fails in its first operator and is done in parts, where a half, a third and a
           fourth of it fits, as a multiple of that of a whole step; the steps take turns in one training.
           Milliseconds per operator are the time beyond
           the whole step's, divided by the operators of all passes; in large modules that includes their computation.
overhead   time of a step with and without the guard, in pairs of blocks of one training, by the thread's own clock.

It ends with status 1 if any of it fails.
"""

from __future__ import annotations

import argparse
import json
import math
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
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.training.rescue.flow import Flow
from lightning_memguard.training.rescue.parts import Passes
from overhead import Tiny
from shared.truth import QUIET, quieten

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
    counts = [(record.out_of_memory, record.rescued) for record in guard.records]
    print(f"RESULT {json.dumps({'losses': losses.losses, 'counts': counts})}")


def memory() -> bool:
    answers = {}
    for kind in ("enough", "without", "with"):
        command = [sys.executable, str(Path(__file__).resolve()), "--run", kind]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=folder, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
        answers[kind] = answer = json.loads(lines[0].removeprefix("RESULT")) if lines else None
        last = " / ".join(done.stderr.strip().splitlines()[-2:])
        ended = f"died: {last}"
        if answer:
            ended = f"{len(answer['losses'])} steps; failed, done in parts: {answer['counts']}"
        print(f"{kind:8} {ended}", flush=True)
    enough, without, rescued = answers["enough"], answers["without"], answers["with"]
    if not enough or without or not rescued:
        return False
    pairs = list(zip(enough["losses"], rescued["losses"], strict=True))
    off = max(abs(other / one - 1) for one, other in pairs)
    curve = "  ".join(f"{one:.4f}/{other:.4f}" for one, other in pairs[:: len(pairs) // 6])
    print(f"losses with enough memory / rescued: {curve}; largest difference {off:.1e}")
    return 0 < rescued["counts"][0][1] < LONG_STEPS and off < 1e-3


# -- what a step in parts costs


class Module(pl.LightningModule):
    """A net whose first operator fails if a pass has more than ``most`` samples."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.most, self.process = net, math.inf, os.getpid()  # copies in children never fail

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        with torch._C.DisableTorchFunction():  # to the step, a part seems to be the whole batch
            samples = int(x.shape[0])
        if samples > self.most and os.getpid() == self.process:
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Block(nn.Module):
    """Two convolutions of ResNet-18, with group norm: batch norm's statistics are another step's in parts."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(8, after), nn.GroupNorm(8, after)])
        self.short: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(8, after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(hidden + self.short(x))


def resnet18() -> nn.Module:
    widths = (64, 64, 128, 256, 512)
    blocks = [
        Block(before if place == 0 else after, after, 2 if place == 0 and after > 64 else 1)
        for before, after in pairwise(widths)
        for place in (0, 1)
    ]
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Transformer(nn.Module):
    """Six causal layers over 128 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layers(self.embedding(x), mask=mask, is_causal=True)).transpose(1, 2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


# name: (net, a batch, rounds)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]], int]] = {
    "tiny MLP": (mlp, lambda: (torch.randn(16, 16), torch.randint(0, 4, (16,))), 40),
    "ResNet-18": (resnet18, lambda: (torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))), 6),
    "6 layers": (Transformer, lambda: (torch.randint(0, 500, (16, 128)), torch.randint(0, 500, (16, 128))), 4),
}
PARTS = (1, 2, 3, 4)  # what share of a batch fits: one in so many


class Alternates(pl.Callback):
    """Lets steps fail such that a half, a third or a fourth of a batch fits, in turns, and times them."""

    def __init__(self) -> None:
        self.seconds: dict[int, list[float]] = {count: [] for count in PARTS}
        self.ran: dict[int, tuple[int, int, int]] = {}  # parts, passes, and operators of one

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.count = PARTS[batch_idx % len(PARTS)]
        samples, policy = len(batch[0]), rescuer_of(trainer).policy
        most = math.ceil(samples / self.count)
        module.most = math.inf if self.count == 1 else most
        policy.too_large_bytes, policy._fitting_bytes = math.inf, sum(each.nbytes for each in batch) * most / samples
        self.started = time.thread_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds[self.count].append(time.thread_time() - self.started)


def rescuer_of(trainer: Any) -> Any:
    return next(each for each in trainer.callbacks if isinstance(each, MemGuard))._run._rescuer  # type: ignore[union-attr]


def cost() -> bool:
    head = f"{'':10} {'whole':>9} {'fits':>6} {'parts':>6} {'passes':>6}"
    print(f"{head} {'seconds':>9} {'times whole':>11} {'ms an operator':>15}")
    for name, (make, draw, rounds) in MODELS.items():
        torch.manual_seed(0)
        turns, batch = Alternates(), draw()
        columns = [torch.cat([each] * rounds * len(PARTS)) for each in batch]
        guard = MemGuard(max_batch_size=len(batch[0]))
        trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[guard, turns], **QUIET)
        begin, finish = Flow.begin, Passes.run

        def begun(self: Any, *args: Any, **kwargs: Any) -> None:
            self.passes_begun = getattr(self, "passes_begun", 0) + 1
            begin(self, *args, **kwargs)  # noqa: B023 - called in this round only

        def finished(self: Any, most: int) -> None:
            finish(self, most)  # noqa: B023
            ran = len(self.parts), self.flow.passes_begun, len(self.flow.script.entries)
            turns.ran[turns.count] = ran  # noqa: B023

        with mock.patch.object(Flow, "begin", begun), mock.patch.object(Passes, "run", finished):
            trainer.fit(Module(make()), DataLoader(TensorDataset(*columns), len(batch[0])))
        whole = statistics.median(turns.seconds[1][1:])
        for count in PARTS[1:]:
            if count not in turns.ran:
                return False
            seconds = statistics.median(turns.seconds[count][1:])
            parts, passes, operators = turns.ran[count]
            each = (seconds - whole) / (passes * operators) * 1e3
            ran = f"{whole * 1e3:6.1f} ms    1/{count} {parts:6} {passes:6}"
            times = f"{seconds * 1e3:6.1f} ms {seconds / whole:11.2f}"
            print(f"{name:10} {ran} {times} {each:8.2f} ({operators} operators)", flush=True)
    return True


# -- what the guard costs


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
        guard = rescuer_of(trainer)._training
        note = partial(guard.state.note, trainer._results, batch)
        self.noting.append(timeit.timeit(note, timer=time.thread_time, number=self.block) / self.block)
        guard.close()
        if len(self.seconds) % 4 in (2, 3):
            guard.install()
        self.started = time.thread_time()


class Logs(pl.LightningModule):
    """A small step that logs three values."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.log_dict({"loss": loss, "largest": out.max(), "mean": out.mean()}, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def overhead() -> bool:
    good = True
    for what, module, block, pairs in (("a tiny step", Tiny(), 50, 400), ("one that logs", Logs(), 20, 100)):
        toggles, count = Toggles(block), (2 * pairs + 3) * block
        columns = [torch.zeros(count, 4)]
        if isinstance(module, Logs):
            columns = [torch.randn(count, 16), torch.randint(0, 4, (count,))]
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
        good &= more < 15 or not isinstance(module, Tiny)
    return good


EVERY: dict[str, Callable[[], bool]] = {"memory": memory, "cost": cost, "overhead": overhead}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*EVERY, []], help="default: everything")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    quieten()
    torch.set_num_threads(1)
    if options.run:
        run_memory(options.run)
        return 0
    os.chdir(tempfile.mkdtemp())  # for the reports
    failed = []
    for name in options.what or EVERY:
        print(f"\n{name}", flush=True)
        if not EVERY[name]():
            failed.append(name)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall as expected")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
