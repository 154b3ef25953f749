"""The cost of steps that are done again in parts. (`overhead.py step`: what the guard costs without them.)

    python benchmarks/rescue_cost.py                   # a few minutes on one core
    python benchmarks/rescue_cost.py "tiny MLP"

CPU time of a step that fails in its first operator and is done in parts, where a half, a third and a fourth of it fits,
as a multiple of that of a whole step; the steps take turns in one training. Milliseconds per operator are the time
beyond the whole step's, divided by the operators of all passes; in large modules that includes their computation. It
ends with status 1 if a step was not done in parts.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.training.rescue.flow import Flow
from lightning_memguard.training.rescue.parts import Passes
from shared import zoo
from shared.truth import QUIET, quieten


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
        return F.cross_entropy(self.net(x).flatten(0, -2), y.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def resnet18() -> nn.Module:
    """ResNet-18 with group norm: batch norm's statistics are another step's in parts."""
    net = zoo.resnet18(zoo.conv_bn(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    for path, norm in list(net.named_modules()):
        if isinstance(norm, nn.BatchNorm2d):
            net.set_submodule(path, nn.GroupNorm(8, norm.num_features))
    return net


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


# name: (net, a batch, rounds)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]], int]] = {
    "tiny MLP": (mlp, lambda: (torch.randn(16, 16), torch.randint(0, 4, (16,))), 40),
    "ResNet-18": (resnet18, lambda: (torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))), 6),
    "6 layers": (
        lambda: zoo.GPT(500, 128, 256, 4, 6, 0.0),
        lambda: (torch.randint(0, 500, (16, 128)), torch.randint(0, 500, (16, 128))),
        4,
    ),
}
PARTS = (1, 2, 3, 4)  # what share of a batch fits: one in so many


class Alternates(pl.Callback):
    """Lets steps fail such that a half, a third or a fourth of a batch fits, in turns, and times them."""

    def __init__(self) -> None:
        self.seconds: dict[int, list[float]] = {count: [] for count in PARTS}
        self.ran: dict[int, tuple[int, int, int]] = {}  # parts, passes, and operators of one

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.count = PARTS[batch_idx % len(PARTS)]
        guard = next(each for each in trainer.callbacks if isinstance(each, MemGuard))
        samples, policy = len(batch[0]), guard._run._rescuer.policy
        most = math.ceil(samples / self.count)
        module.most = math.inf if self.count == 1 else most
        policy.too_large_bytes, policy._fitting_bytes = math.inf, sum(each.nbytes for each in batch) * most / samples
        self.started = time.thread_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds[self.count].append(time.thread_time() - self.started)


def cost(name: str) -> bool:
    make, draw, rounds = MODELS[name]
    torch.manual_seed(0)
    turns, batch = Alternates(), draw()
    columns = [torch.cat([each] * rounds * len(PARTS)) for each in batch]
    guard = MemGuard(max_batch_size=len(batch[0]))
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[guard, turns], **QUIET)
    begin, finish = Flow.begin, Passes.run

    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        self.passes_begun = getattr(self, "passes_begun", 0) + 1
        begin(self, *args, **kwargs)

    def finished(self: Any, most: int) -> None:
        finish(self, most)
        turns.ran[turns.count] = len(self.parts), self.flow.passes_begun, len(self.flow.script.entries)

    with mock.patch.object(Flow, "begin", begun), mock.patch.object(Passes, "run", finished):
        trainer.fit(Module(make()), DataLoader(TensorDataset(*columns), len(batch[0])))
    whole = statistics.median(turns.seconds[1][1:])
    for count, (parts, passes, operators) in sorted(turns.ran.items()):
        seconds = statistics.median(turns.seconds[count][1:])
        each = (seconds - whole) / (passes * operators) * 1e3
        ran = f"{whole * 1e3:6.1f} ms    1/{count} {parts:6} {passes:6}"
        times = f"{seconds * 1e3:6.1f} ms {seconds / whole:11.2f}"
        print(f"{name:10} {ran} {times} {each:8.2f} ({operators} operators)", flush=True)
    return set(turns.ran) == set(PARTS[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL", help="default: all")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    quieten()
    torch.set_num_threads(1)
    os.chdir(tempfile.mkdtemp())  # for the reports
    head = f"{'':10} {'whole':>9} {'fits':>6} {'parts':>6} {'passes':>6}"
    print(f"{head} {'seconds':>9} {'times whole':>11} {'ms an operator':>15}")
    failed = [name for name in options.models or MODELS if not cost(name)]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
