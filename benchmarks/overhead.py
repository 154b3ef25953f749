"""The cost of MemGuard while training: time per step with and without it, in pairs, over many tiny steps.

Two Trainers train the same tiny module in one process, taking turns of a block of steps, so that other load slows both.
Printed are the median ratio of the times of a pair of blocks, and the time of a step.

    python benchmarks/overhead.py                 # 20,000 steps with and 20,000 without, in blocks of 500
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from shared.truth import QUIET, quieten


class Tiny(pl.LightningModule):
    """The least work a training step can do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Turns(pl.Callback):
    """Lets two trainings take turns of a block of steps, and times the blocks."""

    def __init__(self, mine: threading.Semaphore, other: threading.Semaphore, block: int) -> None:
        self.mine, self.other, self.block = mine, other, block
        self.seconds: list[float] = []
        self.started = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.block == 0:
            if batch_idx:
                self.seconds.append(time.thread_time() - self.started)
                self.other.release()
            self.mine.acquire()
            self.started = time.thread_time()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seconds.append(time.thread_time() - self.started)
        self.other.release()


def train(turns: Turns, guards: list[Any], steps: int) -> None:
    """Train for some steps, in turns."""
    data = TensorDataset(torch.zeros(steps, 4))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        **QUIET,
        callbacks=[*guards, turns],
    )
    trainer.fit(Tiny(), DataLoader(data, batch_size=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--block", type=int, default=500)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    quieten()
    torch.set_num_threads(1)
    first, second = threading.Semaphore(1), threading.Semaphore(0)
    turns = {
        "without": Turns(first, second, options.block),
        "with": Turns(second, first, options.block),
    }
    guard = MemGuard(max_batch_size=1)
    threads = [
        threading.Thread(target=train, args=(turns["without"], [], options.steps)),
        threading.Thread(target=train, args=(turns["with"], [guard], options.steps)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert guard.decision is not None
    print(f"MemGuard: {guard.decision.outcome} at batch size {guard.decision.batch_size}, {options.steps} steps each")
    pairs = list(zip(turns["without"].seconds, turns["with"].seconds, strict=True))[1:]  # the first warms up
    ratios = [guarded / alone for alone, guarded in pairs]
    each = {name: statistics.median(turn.seconds) / options.block * 1e6 for name, turn in turns.items()}
    print(f"a step without {each['without']:.1f} us, with {each['with']:.1f} us")
    print(
        f"ratio, median of {len(ratios)} pairs of {options.block} steps: {statistics.median(ratios):.4f} "
        f"(quartiles {', '.join(f'{value:.4f}' for value in statistics.quantiles(ratios)[::2])})"
    )


if __name__ == "__main__":
    main()
