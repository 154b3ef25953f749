"""Trainings end where a process that forks is known to hang: among busy threads, next to workers, in a notebook."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import logging
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import RichProgressBar, TQDMProgressBar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from tests.forks import on_ranks

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform == "win32", reason="needs to fork")]

FITS = 5  # in one process, one after the other
LIMIT_SECONDS = 300  # of a process that takes 20; then it prints where each thread is


class Net(pl.LightningModule):
    """A small CNN: OpenMP and autograd have threads. It may leave torch, so that only a real step shows its memory."""

    def __init__(self, *, leaves_torch: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 10))
        self.leaves_torch = leaves_torch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return loss * float(batch[0].numpy().std() > 0) if self.leaves_torch else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def loader(**settings: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(128, 3, 16, 16), torch.randint(0, 10, (128,)))
    return DataLoader(data, batch_size=4, **settings)


def fit(data: DataLoader[Any], module: Net, *callbacks: pl.Callback) -> None:
    """One guarded epoch, which must have been predicted."""
    guard = MemGuard(batch_size="largest", max_batch_size=32, min_steps_per_epoch=None)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=bool(callbacks), callbacks=[guard, *callbacks],
    )  # fmt: skip
    trainer.fit(module, data)
    assert guard.decision is not None
    assert guard.decision.footprint is not None, guard.decision.reason


def with_workers(method: str, *, persistent: bool) -> None:
    data = loader(num_workers=2, multiprocessing_context=method, persistent_workers=persistent)
    for _ in range(FITS):  # persistent workers of one fit are alive in the next
        fit(data, Net())


@contextlib.contextmanager
def busy_logger() -> Iterator[None]:
    """Threads that log all the time: one holds and releases the locks of loggers, streams and imports and allocates,
    and one waits at a queue, as those of experiment trackers do."""
    closed, messages = threading.Event(), queue.Queue[Any](maxsize=100)
    logger = logging.getLogger("tracker")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    for handler in (logging.FileHandler("tracker.log"), logging.StreamHandler(io.StringIO())):
        logger.addHandler(handler)

    def write() -> None:
        while not closed.is_set():
            row = json.dumps(torch.rand(64, 64).matmul(torch.rand(64, 4))[0].tolist())
            logger.info("step %s", row)
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


def with_a_logging_thread() -> None:
    with busy_logger():
        for number in range(FITS):
            fit(loader(), Net(leaves_torch=number % 2 == 1))


def in_a_notebook() -> None:
    """Leave what earlier cells would: threads of OpenMP and autograd, progress bars, live workers, a module."""
    torch.set_num_threads(2)
    module, data = Net(), loader(num_workers=1, multiprocessing_context="fork", persistent_workers=True)
    for number in range(FITS):
        again = module if number % 3 else Net(leaves_torch=True)
        fit(data if number % 2 else loader(), again, RichProgressBar() if number % 2 else TQDMProgressBar())


SITUATIONS: dict[str, Callable[[], None]] = {
    "forked workers": lambda: with_workers("fork", persistent=False),
    "spawned workers": lambda: with_workers("spawn", persistent=False),
    "persistent forked workers": lambda: with_workers("fork", persistent=True),
    "persistent spawned workers": lambda: with_workers("spawn", persistent=True),
    "a logging thread": with_a_logging_thread,
    "a notebook": in_a_notebook,
}


def train(_: int, folder: Path) -> None:
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    SITUATIONS[folder.name]()
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("situation", SITUATIONS)
def test_trainings_end(situation: str, tmp_path: Path) -> None:
    folder = tmp_path / situation
    folder.mkdir()
    on_ranks(1, train, folder)
