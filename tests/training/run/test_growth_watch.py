"""Memory that grows from epoch to epoch is named once, with the epoch it ends in; all else is left alone."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_memguard import MemGuard
from lightning_memguard.training.run.growth_watch import GrowthWatch
from lightning_memguard.units import MIB

pytestmark = pytest.mark.usefixtures("taped")

BASE = 50 * MIB


class Cached(Dataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples, self.cache = samples, dict[int, Any]()

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int) -> None:
        self.cache[index] = np.zeros(MIB, np.uint8)


class Keeper:
    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.ring = deque[Any](maxlen=6)
        self.recent: list[Any] = []

    def keep(self, megabytes: int) -> None:
        self.kept.append(torch.zeros(megabytes, MIB, dtype=torch.uint8))

    def keep_in_ring(self) -> None:
        self.ring.append(torch.zeros(10, MIB, dtype=torch.uint8))

    def keep_recent(self) -> None:
        self.recent = [*self.recent, torch.zeros(10, MIB, dtype=torch.uint8)]
        self.recent = self.recent[-3:]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a watch finds in twelve epochs: in which, by how much, what, and the end; memory is what the caller says."""

    def watch(epoch_of: Any, *others: object, free: int = 200 * MIB, epochs: float = 100) -> Any:
        watch, taken = GrowthWatch(torch.device("cpu"), nn.Linear(2, 2), others), [BASE]
        monkeypatch.setattr(watch, "_measure", lambda: {False: taken[0]})
        for epoch in range(12):
            found = watch.note(taken[0] if epoch else 0, free, epoch, epochs)
            if found:
                kept, end = found
                return epoch, kept.fixed_bytes // MIB, kept.holder, end.epoch
            taken[0] += epoch_of(epoch)
        return None

    return watch


def test_an_attribute_that_grows_by_the_same_each_epoch_is_named_after_two(watched: Any):
    keeper = Keeper()
    found = watched(lambda epoch: (keeper.keep(10), 30 * MIB if epoch == 0 else 11 * MIB)[1], keeper)
    # 91 MiB after two epochs, of 200, and 10 or 11 more in each: ten fit
    assert found == (2, 11, "Keeper.kept", 2 + (200 - 91) // 10.5)


@pytest.mark.parametrize("way", ["keep_in_ring", "keep_recent"])
def test_what_holds_the_last_few_epochs_is_not_said_to_grow(watched: Any, way: str):
    keeper = Keeper()
    held = {"keep_in_ring": lambda: keeper.ring, "keep_recent": lambda: keeper.recent}[way]

    def grow(_: int) -> int:
        before = len(held())
        getattr(keeper, way)()
        return 10 * MIB * (len(held()) - before)

    assert watched(grow, keeper) is None


def test_growth_that_all_epochs_fit_is_not_said(watched: Any):
    keeper = Keeper()
    assert watched(lambda _: (keeper.keep(10), 10 * MIB)[1], keeper, epochs=12) is None


def test_a_dataset_that_caches_its_samples_is_bounded_by_their_number(watched: Any):
    def read(dataset: Cached) -> int:
        index = len(dataset.cache)
        for each in range(index, index + 10):
            dataset.read(each)
        return 10 * MIB

    small, large = Cached(120), Cached(1000)
    assert watched(lambda _: read(small), small) is None
    assert watched(lambda _: read(large), large, free=205 * MIB) == (2, 10, "Cached.cache", 2 + (205 - 70) // 10)


@pytest.mark.parametrize(
    "growth",
    [
        lambda _: 0,
        lambda epoch: 40 * MIB if epoch < 3 else 0,  # an optimizer's state, made late
        lambda epoch: 40 * MIB >> epoch,  # an allocator, or a cache that fills
        lambda epoch: (-1) ** epoch * 20 * MIB,  # to and fro
        lambda _: MIB // 2,
    ],
)
def test_growth_that_does_not_go_on_is_not_said(watched: Any, growth: Any):
    assert watched(growth) is None


def test_steady_growth_without_a_holder_takes_four_epochs(watched: Any):
    assert watched(lambda epoch: (30 if epoch == 0 else 12) * MIB) == (5, 12, "", 5 + (200 - 50 - 30 - 48) // 12)


def test_a_rate_that_rises_later_is_looked_at_again(watched: Any):
    keeper = Keeper()
    rates = itertools.chain([1] * 5, itertools.repeat(20))

    def grow(_: int) -> int:
        megabytes = next(rates)
        keeper.keep(megabytes)
        return megabytes * MIB

    found = watched(grow, keeper, epochs=30)
    assert found is not None
    assert found[2] == "Keeper.kept"


def test_what_was_looked_at_is_not_kept_alive():
    keeper, inner = Keeper(), Keeper()
    keeper.kept.append(inner)
    inner.keep(1)
    watch, alive = GrowthWatch(torch.device("cpu"), nn.Linear(2, 2), [keeper]), weakref.ref(inner)
    for epoch in range(2):
        assert watch.note(0, 1 << 40, epoch, 10) is None
    keeper.kept.clear()
    del inner
    gc.collect()
    assert alive() is None


class Keeping(pl.Callback):
    def __init__(self, kept_bytes: int) -> None:
        self.kept_bytes, self.kept = kept_bytes, list[Any]()

    def on_train_epoch_end(self, *_: object) -> None:
        self.kept.append(torch.ones(self.kept_bytes, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("kept_bytes", "settings", "most_seconds"),
    [
        (16 * MIB, {"max_epochs": 8}, "auto"),
        (16 * MIB, {"max_epochs": 8}, 0.001),
        (0, {"max_epochs": 8}, "auto"),
        (16 * MIB, {"max_epochs": -1, "max_steps": 30}, "auto"),
    ],
)
def test_a_real_run_is_warned_once_of_what_grows(
    trainer: Any, small: Any, dataset: Any, kept_bytes: int, settings: dict[str, int], most_seconds: Any
):
    """Whether or not there was time for a prediction."""
    held = [torch.empty(kept_bytes, dtype=torch.uint8) for _ in range(64)]  # takes holes of earlier tests
    guard = MemGuard(mode="check", budget="96MiB", max_setup_seconds=most_seconds)
    fit = trainer(Keeping(kept_bytes), guard, **settings)
    data = torch.utils.data.DataLoader(dataset, batch_size=10)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit.fit(small(), data)
    del held
    texts = [str(each.message) for each in said if "leaves" in str(each.message)]
    end, ends_in_time = guard.decision.runs_out_at, "max_steps" in settings or not kept_bytes
    assert len(texts) == (not ends_in_time)
    if not ends_in_time:
        assert "behind in `Keeping.kept` (test_growth_watch.py:" in texts[0]
        assert 3 <= end.epoch <= 5
    else:
        assert end is None
