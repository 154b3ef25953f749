"""Worker processes put batches in /dev/shm: a batch grows only as far as they fit there."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from multiprocessing import reduction, resource_sharer
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_memguard import Decision, MemGuard
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.device.host import MemoryInfo
from lightning_memguard.report.decision_table import warning_of
from lightning_memguard.training.data import workers
from lightning_memguard.training.data.loaders import LoaderInfo, source_of
from tests.forks import with_shared_memory
from tests.training.quiet import quiet_trainer

PAGE = 4096


def pages(count: int) -> TensorDataset:
    """Samples of one page each, and a label."""
    return TensorDataset(torch.randn(count, PAGE // 4), torch.randint(0, 4, (count,)))


class Validated(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(PAGE // 4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


Decided = Callable[..., Decision]


@pytest.fixture
def decided(tuned: Any, trainer: Any, taped: None) -> Decided:
    """The decision for a run that starts, whose step is that of a small training, from its tapes."""

    def run(dataset: TensorDataset, size: int, validation: DataLoader[Any] | None, **loader: Any) -> Decision:
        limits = {"num_sanity_val_steps": 0, "limit_val_batches": 0 if validation is None else 1}
        module: Any = Validated()
        module.val_dataloader = lambda: validation
        data = DataLoader(dataset, size, **loader)
        return tuned(trainer(max_steps=1, max_epochs=2, **limits), module, data, margin=0.0).decision

    return run


def shm_of(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "shared_memory", lambda: MemoryInfo(nbytes, nbytes, "statvfs"))


def test_as_many_batches_fit_as_are_in_flight(decided: Decided, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 30 samples takes a page of labels, and as many pages as its images."""
    shm_of(3 * (30 * PAGE + PAGE), monkeypatch)
    found = decided(pages(200), 4, None, num_workers=1)
    assert (found.batch_size, found.limited_by) == (30, "shared_memory")
    assert found.host is not None
    assert found.host.shared_bytes == 3 * 31 * PAGE


@pytest.mark.parametrize(
    ("settings", "in_flight"),
    [
        ({"num_workers": 1}, 3),
        ({"num_workers": 1, "prefetch_factor": 5, "persistent_workers": True}, 6),
        ({"num_workers": 2}, 5),
    ],
    ids=str,
)
def test_what_is_in_flight_is_read_from_the_loader(settings: dict[str, Any], in_flight: int) -> None:
    loader = DataLoader(pages(200), 4, **settings)
    info = LoaderInfo(None, "min_size", (source_of(loader, "the loader"),), "the loader")
    found = workers.flight_of(info, [batches_from_one(next(iter(DataLoader(pages(4), 4))))], pins=False, sized=True)
    assert found is not None
    assert found.persists == settings.get("persistent_workers", False)
    assert workers.Workers(found, None, mid_epoch=False, leaves=False).shared_bytes(30, 0) == in_flight * 31 * PAGE


def test_a_warning_names_what_would_fit(decided: Decided, monkeypatch: pytest.MonkeyPatch) -> None:
    shm_of(100 * PAGE, monkeypatch)
    less = r"500\.0 KiB less; num_workers=0 needs 1\.5 MiB less"
    own = decided(pages(1000), 124, None, num_workers=1)
    assert re.search(rf"does NOT fit /dev/shm: .* {less}", warning_of(own))
    assert (own.batch_size, own.fits) == (124, False), "the loader's own size stays"


def test_without_workers_nothing_is_shared(decided: Decided, monkeypatch: pytest.MonkeyPatch) -> None:
    shm_of(1, monkeypatch)
    found = decided(pages(200), 4, None)
    assert (found.limited_by, found.host) == ("dataset", None)


def test_the_workers_of_validation_take_their_share(decided: Decided, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch of 30 is trained on while two of 10 are made, and two more lie ready since the validation before."""
    shm_of(3 * 31 * PAGE + 2 * 11 * PAGE, monkeypatch)
    validation = DataLoader(pages(200), 10, num_workers=1)
    found = decided(pages(200), 4, validation, num_workers=1)
    assert (found.batch_size, found.limited_by) == (30, "shared_memory")


BATCH = 10 * PAGE


def flight(**changes: Any) -> workers.Flight:
    known: dict[str, Any] = {"workers": 2, "prefetch_factor": 2, "held": 1, "persists": False, "forks": True}
    return workers.Flight(**{**known, "pins": False, "tensors": ((0.0, float(PAGE)),), **changes})


@pytest.mark.parametrize(
    ("loop", "validation", "mid_epoch", "leaves", "batches"),
    [
        (flight(), None, False, False, 5),
        (flight(held=2), None, False, False, 6),
        (flight(samples=30), None, False, False, 3),
        (None, flight(), False, True, 8),
        (flight(), flight(), False, True, 9),
        (flight(), flight(), False, False, 6),
        (flight(), flight(), True, True, 12),
        (flight(), flight(persists=True), True, True, 9),
    ],
)
def test_batches_in_shared_memory(loop: Any, validation: Any, mid_epoch: bool, leaves: bool, batches: int) -> None:
    """The counts were measured with two workers and two batches each (benchmarks/loaders.py)."""
    assert workers.Workers(loop, validation, mid_epoch, leaves).shared_bytes(10, 10) == batches * BATCH


@pytest.mark.parametrize(
    ("loop", "validation", "batches"),
    [
        (flight(), None, 1),
        (flight(held=2), None, 0),
        (flight(workers=1), None, 0),
        (flight(workers=4), flight(), 3 + 1),
        (flight(samples=55), None, 1),  # of six batches that there are
        (flight(samples=50), None, 0),  # all five are counted already
    ],
)
def test_each_worker_may_be_late_with_its_last_batch(loop: Any, validation: Any, batches: int) -> None:
    assert workers.Workers(loop, validation, mid_epoch=False, leaves=False).late_bytes(10, 10) == batches * BATCH


def test_pinned_blocks_are_powers_of_two_on_a_device_alone() -> None:
    pinned = flight(pins=True, tensors=((0.0, float(PAGE)), (float(PAGE), 0.0)))
    assert workers.Workers(pinned, None, mid_epoch=False, leaves=False).pinned_bytes(10, 0) == 5 * (16 + 1) * PAGE
    assert workers.Workers(None, pinned, mid_epoch=False, leaves=False).pinned_bytes(0, 16) == 5 * (16 + 1) * PAGE
    assert workers.Workers(flight(), None, mid_epoch=False, leaves=False).pinned_bytes(10, 0) == 0


def test_what_forked_workers_keep_depends_on_when_they_begin() -> None:
    for changes, keeps in ({}, (True, True)), ({"persists": True}, (True, False)), ({"forks": False}, (False, False)):
        found = workers.Workers(flight(**changes), None, mid_epoch=False, leaves=False)
        assert (found.keeps(begun=False), found.keeps(begun=True)) == keeps


@pytest.mark.parametrize(("epochs", "times"), [(2, 4), (1, 1)])
def test_forked_workers_keep_what_training_rewrites(
    trainer: Any, tuned: Any, at_own_size: None, monkeypatch: pytest.MonkeyPatch, epochs: int, times: int
) -> None:
    """Weights alone, or with the gradients and both moments of Adam once a step was taken before the fork."""
    module = Validated()
    monkeypatch.setattr(workers, "collected_bytes", lambda: 0)
    monkeypatch.setattr(
        module, "configure_optimizers", lambda: torch.optim.Adam(module.parameters(), 0.1, foreach=False)
    )
    run = trainer(max_epochs=epochs, num_sanity_val_steps=0, limit_train_batches=2)
    footprint = tuned(run, module, DataLoader(pages(64), 8, num_workers=1), max_batch_size=8).decision.footprint
    own = sum(each.nbytes for each in module.parameters())
    alone = workers.Workers(flight(workers=1), None, mid_epoch=False, leaves=False).own_bytes(8, 0)[1]
    kept = footprint.parts["workers"] - alone - 2 * PAGE
    assert abs(kept - times * own) < 200  # counters of steps


class Images(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(3, 64, 64)


class Mean(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (batch.mean() - self.weight).square()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_no_worker_dies_where_docker_gives_little(tmp_path: Path) -> None:
    """Under 16 MiB, 1,000 samples in one batch end a worker with a bus error, and six batches of 64 with an error."""
    with_shared_memory(16, train_where_docker_gives_little, tmp_path)


class LateDupFd(resource_sharer.DupFd):
    """A descriptor of a batch that its worker closes late, as on a busy machine, when the loop is done with it."""

    def __init__(self, fd: int) -> None:
        kept = os.dup(fd)

        def send(connection: Any, process: int) -> None:
            reduction.send_handle(connection, kept, process)

        def close() -> None:
            time.sleep(0.05)
            os.close(kept)

        self._id = resource_sharer._resource_sharer.register(send, close)


def train_where_docker_gives_little(folder: Path) -> None:
    os.chdir(folder)
    resource_sharer.DupFd = LateDupFd
    guard = MemGuard(batch_size="largest", min_steps_per_epoch=None)
    quiet_trainer(guard).fit(Mean(), DataLoader(Images(), 2, num_workers=2))
    assert guard.decision is not None
    assert (guard.decision.batch_size, guard.decision.limited_by) == (54, "shared_memory")
