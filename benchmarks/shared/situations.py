"""Short guarded trainings in situations where a process that forks is known to hang (run by `no_hang.py`)."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import RichProgressBar, TQDMProgressBar
from pytorch_lightning.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from shared.truth import QUIET

SAMPLES = 256


class Net(pl.LightningModule):
    """A small CNN: enough that OpenMP and autograd have threads. It may leave torch, so that only a real step shows
    what it takes."""

    def __init__(self, leaves_torch: bool = False) -> None:
        super().__init__()
        layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10))
        self.net = nn.Sequential(*layers)
        self.leaves_torch = leaves_torch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.leaves_torch:
            loss = loss * float(batch[0].numpy().std() > 0)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Tell(pl.Callback):
    """Writes how long a fit took, and what MemGuard decided in it; the first of the callbacks."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.started = 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.started = time.monotonic()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        seconds = time.monotonic() - self.started
        (guard,) = (each for each in trainer.callbacks if isinstance(each, MemGuard))
        found = guard.decision
        if trainer.is_global_zero and found is not None:
            method = found.footprint.method if found.footprint else f"{found.outcome}: {found.reason}"
            with self.out.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"seconds": seconds, "method": method}) + "\n")


def loader(**settings: Any) -> DataLoader[Any]:
    """Batches of 4 images."""
    data = TensorDataset(torch.randn(SAMPLES, 3, 16, 16), torch.randint(0, 10, (SAMPLES,)))
    return DataLoader(data, batch_size=4, **settings)


def fit(out: Path, data: DataLoader[Any] | None = None, module: Net | None = None, **settings: Any) -> None:
    """One guarded fit of one epoch."""
    callbacks = [Tell(out), MemGuard(max_batch_size=32, min_steps_per_epoch=None), *settings.pop("callbacks", [])]
    settings = {**QUIET, "accelerator": "cpu", "max_epochs": 1, **settings}
    trainer = pl.Trainer(**settings, callbacks=callbacks)
    trainer.fit(module or Net(), loader() if data is None else data)


def with_workers(method: str, persistent: bool) -> Callable[[Path, int], None]:
    def train(out: Path, fits: int) -> None:
        data = loader(num_workers=2, multiprocessing_context=method, persistent_workers=persistent)
        for _ in range(fits):  # persistent workers of one fit are alive in the next
            fit(out, data)

    return train


@contextlib.contextmanager
def busy_logger() -> Iterator[None]:
    """Threads that log all the time: one holds and releases the locks of loggers, streams and imports and allocates,
    and one waits at a queue, as those of experiment trackers do."""
    closed, messages = threading.Event(), queue.Queue[Any](maxsize=100)
    logger = logging.getLogger("tracker")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    for handler in (logging.FileHandler("tracker.log"), logging.StreamHandler(), logging.StreamHandler(io.StringIO())):
        handler.setFormatter(logging.Formatter("%(asctime)s %(threadName)s %(message)s"))
        logger.addHandler(handler)

    def write() -> None:
        number = 0
        while not closed.is_set():
            number += 1
            row = json.dumps(torch.rand(64, 64).matmul(torch.rand(64, 4))[0].tolist())
            logger.info("step %d %s", number, row)
            print(number, end=" ", flush=number % 50 == 0)
            with contextlib.suppress(queue.Full):
                messages.put_nowait([bytearray(1 << 16), row])
            sys.modules.pop("colorsys", None)
            import colorsys  # noqa: F401 - the import lock

    def read() -> None:
        while (message := messages.get()) is not None:
            logger.info("sent %d bytes", len(message[0]))

    threads = [threading.Thread(target=target, daemon=True) for target in (write, read)]
    for thread in threads:
        thread.start()
    yield
    closed.set()
    threads[0].join()
    messages.put(None)
    threads[1].join()


def with_a_logging_thread(out: Path, fits: int) -> None:
    with busy_logger():
        for number in range(fits):
            fit(out, module=Net(leaves_torch=number % 2 == 1), logger=TensorBoardLogger("."))


def in_a_notebook(out: Path, fits: int) -> None:
    """Leave what earlier cells would: threads of OpenMP, autograd and TensorBoard, progress bars, live workers."""
    before = pl.Trainer(accelerator="cpu", max_epochs=1, logger=TensorBoardLogger("."), enable_model_summary=False)
    module, data = Net(), loader(num_workers=1, persistent_workers=True)
    before.fit(module, data)
    for number in range(fits):
        bar = RichProgressBar() if number % 2 else TQDMProgressBar()
        shown = {"callbacks": [bar], "enable_progress_bar": True, "enable_model_summary": True}
        again = module if number % 3 else Net(leaves_torch=True)
        fit(out, data if number % 2 else None, again, logger=TensorBoardLogger("."), **shown)


def distributed(strategy: str) -> Callable[[Path, int], None]:
    def train(out: Path, fits: int) -> None:
        assert fits == 1
        fit(out, strategy=strategy, devices=2)

    return train


SITUATIONS: dict[str, Callable[[Path, int], None]] = {
    "ddp": distributed("ddp"),
    "ddp_spawn": distributed("ddp_spawn"),
    "workers, fork": with_workers("fork", persistent=False),
    "workers, spawn": with_workers("spawn", persistent=False),
    "persistent workers, fork": with_workers("fork", persistent=True),
    "persistent workers, spawn": with_workers("spawn", persistent=True),
    "logging thread": with_a_logging_thread,
    "notebook": in_a_notebook,
}
"""By name: each does a number of fits, and writes one line for each to a file."""
