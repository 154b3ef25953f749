"""A fit on data of many lengths, where blocks are cached as on a GPU: what the cache grows to, and if that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_memguard import DoesNotFitError, LengthBatchSampler, MemGuard
from lightning_memguard.core.replay.epoch import Epoch, EpochRun, Shape
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.run import choose, epochs
from lightning_memguard.training.run.tune import tune
from lightning_memguard.units import MIB
from tests import tape
from tests.training.quiet import quiet_trainer

pytestmark = pytest.mark.usefixtures("taped")


@pytest.fixture(autouse=True)
def _with_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllocatorSettings, "for_device", lambda *_: AllocatorSettings())
    monkeypatch.setattr(choose.Planner, "_share_ends", lambda *_: math.inf)  # as of a longer run, on any machine
    monkeypatch.setattr(choose, "batches_of", lambda *_: 12)


class OfTexts(pl.LightningModule):
    """Attends with scores that are written out, on texts of these lengths."""

    def __init__(self, lengths: Sequence[int], batch_size: int = 4, sampler: Any = None) -> None:
        super().__init__()
        self.lengths, self.batch_size, self.sampler = lengths, batch_size, sampler
        self.token, self.out = nn.Embedding(50, 64), nn.Linear(64, 50)

    def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.token(ids)
        logits = self.out((hidden @ hidden.transpose(1, 2)).softmax(-1) @ hidden)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        texts: Any = [torch.zeros(length, dtype=torch.long) for length in self.lengths]
        sized = {"batch_sampler": self.sampler} if self.sampler else {"batch_size": self.batch_size}
        return DataLoader(texts, **sized, collate_fn=partial(pad_sequence, batch_first=True))


def decided(module: OfTexts, **settings: Any) -> Any:
    trainer = quiet_trainer(max_steps=1)
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    return tune(trainer, module, MemGuard(**settings)._settings).decision


def failing_from(size: int) -> Any:
    """An epoch that fails with batches of so many samples or more."""

    def epoch_of(_: object, batch_size: int, settings: AllocatorSettings, **__: object) -> Epoch:
        within = settings.capacity_bytes or 0
        run = EpochRun("", "", 9, within if batch_size < size else within + MIB, 1, 3, 3, None)
        other = replace(run, change="with a", how="set a")
        return Epoch(9, 99, run if batch_size < size else replace(run, failed_at=7), (other,))

    return epoch_of


@pytest.mark.captures
def test_the_epoch_is_replayed_with_the_batches_that_the_data_gives():
    footprint = decided(OfTexts([30, 70, 50, 200, 120, 90, 10, 44] * 3)).footprint
    assert footprint.epoch.run.steps == 12  # of the run
    assert footprint.notes[-1] == footprint.epoch.text
    assert footprint.epoch.longest == 200
    assert footprint.high.reserved_bytes >= footprint.epoch.run.peak_reserved_bytes
    assert decided(OfTexts([70, 70])).footprint.epoch is None


def test_batches_that_a_sampler_sizes_are_replayed_at_their_own_sizes(monkeypatch: pytest.MonkeyPatch):
    asked = list[Shape]()
    monkeypatch.setattr(epochs, "epoch_of", lambda _, __, shapes, **___: asked.extend(shapes))
    lengths = [30, 70, 50, 200, 120, 90, 10, 44] * 3
    decided(OfTexts(lengths, sampler=LengthBatchSampler(lengths, {64: 4, 256: 2})))
    assert {size for size, _ in asked} == {2, 4}
    assert max(asked, key=lambda shape: shape.length) == Shape(2, 200)


def test_where_it_is_not_known_a_note_says_how_to_ask(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object, **__: object) -> None:
        raise CannotTraceError("time was up")

    monkeypatch.setattr(choose, "epoch_of_run", fails)
    footprint = decided(OfTexts([30, 70, 50])).footprint
    assert footprint.epoch is None
    assert any("says by how much" in note for note in footprint.notes)
    assert not decided(OfTexts([70, 70])).footprint.notes


def test_batches_whose_epoch_fails_are_divided(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose, "epoch_of_run", failing_from(5))
    decision = decided(OfTexts([30, 70, 50, 90] * 4, batch_size=8))
    assert (decision.batch_size, decision.accumulate_grad_batches) == (4, 2)
    assert decision.fits
    assert decision.footprint.epoch.fits


def test_each_step_is_captured_once_though_each_epoch_decides_anew(monkeypatch: pytest.MonkeyPatch):
    asked = list[tuple[int, int]]()

    def played(program: Any, batch_size: int, *_: object, **__: object) -> Any:
        asked.append((program.batches_per_step, batch_size))
        return tape.played(program, batch_size)

    monkeypatch.setattr("lightning_memguard.core.capture.capture.capture_here", played)
    monkeypatch.setattr(choose, "epoch_of_run", failing_from(5))
    assert decided(OfTexts([30, 70, 50, 90] * 4, batch_size=8)).accumulate_grad_batches == 2
    assert {batches for batches, _ in asked} == {1, 2}
    assert len(asked) == len({*asked})


def test_a_run_that_may_not_change_does_not_fit_and_what_makes_it_fit_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose, "epoch_of_run", failing_from(1))
    decision = decided(OfTexts([30, 70, 50]), mode="check")
    assert decision.verdict == "does not fit"
    assert decision.footprint.most_device_bytes > decision.budget.usable_bytes
    assert "over an epoch of lengths 9..99 step 7 runs out of memory" in decision.reason
    assert "To make it fit, set a." in decision.reason


def test_an_error_names_what_makes_the_epoch_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose, "epoch_of_run", failing_from(1))
    with pytest.raises(DoesNotFitError, match=r"Over an epoch of lengths 9\.\.99 step 7 runs out of memory") as caught:
        decided(OfTexts([30, 70, 50]), budget="60MiB")
    assert caught.value.way_out == "set a"
    assert "set a" in str(caught.value)
