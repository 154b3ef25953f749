"""The rest of an epoch with larger batches: optimizer steps, and its samples if the Trainer limits its batches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memguard import Decision
from lightning_memguard.training.data import samples
from lightning_memguard.training.run import resume
from lightning_memguard.units import share_of
from tests.long import long_but

pytestmark = pytest.mark.usefixtures("taped")


def data(samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 16), torch.randint(0, 4, (samples,)))


def sizes_in(decision: Decision) -> str:
    """The memory of a decision's sentence."""
    return share_of(decision.footprint.most_device_bytes, decision.budget.usable_bytes)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.randn(16), torch.tensor(0)


@pytest.fixture
def decided(decided: Any) -> Any:
    return functools.partial(decided, batch_size="largest", min_steps_per_epoch=50)


@pytest.mark.parametrize(
    ("samples", "size", "accumulate", "least", "expected", "steps"),
    [
        (1000, 4, 1, 50, 20, 50),
        (1010, 4, 1, 50, 20, 51),
        (1000, 4, 1, 10, 100, 10),  # 111 would leave a last batch of one
        (100, 30, 1, 50, 30, 4),  # as many batches at 33: the last would be smaller
        (1000, 4, 2, 50, 10, 50),
        (400, 10, 1, 50, 10, 40),  # fewer than fifty: they stay
        (400, 10, 1, 40, 10, 40),
        (400, 10, 1, 39, 10, 40),
        (400, 10, 1, 37, 11, 37),
        (400, 10, 1, None, 400, 1),
    ],
)
def test_an_epoch_keeps_optimizer_steps(
    decided: Any, samples: int, size: int, accumulate: int, least: int | None, expected: int, steps: int
) -> None:
    settings = {"accumulate_grad_batches": accumulate}
    found = decided(DataLoader(data(samples), size), settings, min_steps_per_epoch=least)
    assert (found.batch_size, found.steps_per_epoch) == (expected, steps)
    assert found.limited_by == ("min_steps_per_epoch" if least else "dataset")


def test_every_size_below_the_largest_keeps_them_too(decided: Any) -> None:
    found = decided(DataLoader(data(1000), 4), multiple_of=8)
    assert (found.batch_size, found.steps_per_epoch, found.limited_by) == (16, 63, "min_steps_per_epoch")
    found = decided(DataLoader(data(1000), 4), max_batch_size=12)
    assert (found.batch_size, found.limited_by) == (12, "max_batch_size")


def test_memory_comes_first_and_a_size_that_does_not_fit_is_cut_all_the_same(decided: Any) -> None:
    free = decided(DataLoader(data(400), 40), max_batch_size=40)
    found = decided(DataLoader(data(400), 40), budget=free.footprint.peak_device_bytes - 1000, margin=0.0)
    assert found.batch_size < 40
    assert found.limited_by == "memory"


def test_the_words_name_the_limit_and_what_lifts_it(decided: Any) -> None:
    found = decided(DataLoader(data(1000), 4))
    words = "an epoch has 50 optimizer steps instead of 250 (min_steps_per_epoch allows no fewer; "
    assert found.reason == f"batch size 20 (was 4) fits: {sizes_in(found)}; {words}max_batch_size=4 keeps all)."
    found = decided(DataLoader(data(40), 4))
    words = "larger batches leave an epoch fewer than its 10 optimizer steps (min_steps_per_epoch=None allows it)"
    assert found.reason == f"batch size 4 fits: {sizes_in(found)}; {words}."
    found = decided(DataLoader(data(1000), 4), min_steps_per_epoch=None, max_batch_size=100)
    words = "an epoch has 10 optimizer steps instead of 250 (max_batch_size=4 keeps all)"
    assert (
        found.reason
        == f"batch size 100 (was 4) fits: {sizes_in(found)}; limited by max_batch_size, not by memory; {words}."
    )


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return ((torch.randn(16), torch.tensor(0)) for _ in range(self.count))


@pytest.mark.parametrize(
    ("count", "expected", "words"),
    [
        (
            640,
            16,
            "larger batches leave an epoch fewer than its 40 optimizer steps (min_steps_per_epoch=None allows it)",
        ),
        (
            1600,
            32,
            "an epoch has 50 optimizer steps instead of 100 (min_steps_per_epoch allows no fewer; max_batch_size=16",
        ),
        (
            2000,
            16,
            "larger batches leave an epoch fewer optimizer steps, whose number is unknown (min_steps_per_epoch",
        ),
    ],
)
def test_streams_keep_steps_too(
    decided: Any, monkeypatch: pytest.MonkeyPatch, count: int, expected: int, words: str
) -> None:
    """All of 1,700 samples are drawn and counted."""
    monkeypatch.setattr(samples, "MOST_SAMPLES", 1700)
    found = decided(DataLoader(Stream(count), 16))
    assert (found.batch_size, found.limited_by) == (expected, "min_steps_per_epoch")
    assert words in found.reason
    assert decided(DataLoader(Stream(count), 16), min_steps_per_epoch=None, max_batch_size=400).batch_size == 400


def test_a_rehearsal_runs_at_the_size_of_the_run(decided: Any) -> None:
    assert decided(DataLoader(data(1000), 4), {"fast_dev_run": True}).batch_size == 20


def test_who_sets_the_samples_of_a_step_sets_their_number(decided: Any) -> None:
    found = decided(DataLoader(data(400), 10), keep_effective_batch_size=200)
    assert found.batch_size * found.accumulate_grad_batches == 200
    assert found.steps_per_epoch == 2


@pytest.mark.parametrize(
    ("settings", "samples", "expected"),
    [
        ({"limit_train_batches": 10}, 160, 16),
        ({"limit_train_batches": 38}, 600, 600),  # all there are
        ({"limit_train_batches": 0.5}, 304, 304),
        ({"overfit_batches": 3}, 48, 16),
        ({"overfit_batches": 0.1}, 48, 48),
    ],
    ids=str,
)
def test_an_epoch_sees_no_more_samples_than_at_the_loaders_own_size(
    decided: Any, settings: dict[str, Any], samples: int, expected: int
) -> None:
    (name,) = settings
    found = decided(DataLoader(data(600), 16), settings, min_steps_per_epoch=None)
    assert found.batch_size == expected
    assert min(600, found.steps_per_epoch * found.batch_size) <= samples
    assert found.limited_by == ("dataset" if expected == 600 else name)


@pytest.mark.parametrize(
    ("share", "multiple_of"),
    long_but([(0.1, 1), (0.3, 7), (0.55, 30), (0.9, 16)], itertools.product([0.1, 0.3, 0.55, 0.9], [1, 7, 16, 30])),
)
def test_shares_of_an_epoch_see_no_more_samples_at_any_size(decided: Any, share: float, multiple_of: int) -> None:
    settings = {"limit_train_batches": share}
    found = decided(DataLoader(data(601), 16), settings, min_steps_per_epoch=None, multiple_of=multiple_of)
    assert found.steps_per_epoch * found.batch_size <= int(38 * share) * 16 or found.batch_size == multiple_of


def test_a_stream_without_an_end_keeps_its_samples(decided: Any) -> None:
    found = decided(DataLoader(Endless(), 16), {"limit_train_batches": 10}, max_batch_size=500)
    assert (found.batch_size, found.limited_by, found.steps_per_epoch) == (16, "limit_train_batches", 10)
    assert "with larger batches, an epoch would have more samples" in found.reason


def test_a_run_goes_on_at_the_size_of_its_checkpoint(begun: Any, small: Any) -> None:
    run = begun(small(), DataLoader(data(100), 4), batch_size="largest", min_steps_per_epoch=50)
    assert (run.decision.batch_size, run.decision.limited_by) == (4, "min_steps_per_epoch")
    run.load({resume.KEY: {"batch_size": 100, "accumulate_grad_batches": 1, "ranks": 1}})
    assert (run.decision.batch_size, run.decision.limited_by) == (100, "checkpoint")
