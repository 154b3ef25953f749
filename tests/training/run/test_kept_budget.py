"""A budget on the CPU: what the process takes besides tensors is counted, and passing it is said in the first epoch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.core.decision.record import Measured
from lightning_memguard.core.device.meter import PeakMeter
from lightning_memguard.core.device.process import OBJECTS_BYTES
from lightning_memguard.units import KIB, MIB

_WIDTH = 4096  # activations are 50 KiB a sample, and set the batch size


@pytest.fixture
def wide(played) -> None:
    """Nothing is captured; the step has as much for each sample as that of so wide a module."""
    played(lambda trace: trace.plus({"activations": 50 * KIB * trace.batch_size}))


def data(samples: int = 1600) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(samples, 16), torch.randint(4, (samples,))), batch_size=8)


def fit(module: pl.LightningModule, guard: MemGuard, *callbacks: pl.Callback, batches: int = 6) -> list[str]:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        max_steps=batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, guard],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data())
    return [str(each.message) for each in caught if "over its budget" in str(each.message)]


class At(pl.Callback):
    """Counts the batches that have begun."""

    batch = -1

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.batch = arguments[-1]


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A reading of the meter that can be changed."""
    taken = [0]
    monkeypatch.setattr(PeakMeter, "read", lambda *_: Measured(taken[0], "counter"))
    return taken


def test_what_a_process_takes_besides_tensors_is_part_of_what_is_compared_with_a_budget(
    small, wide, tuned, trainer
) -> None:
    decision = tuned(trainer(), small(), data(), budget=40 * MIB, margin=0.0).decision
    footprint = decision.footprint
    assert footprint.peak_device_bytes == footprint.peak_allocated_bytes
    assert footprint.most_device_bytes - footprint.peak_device_bytes >= 6 * MIB
    assert footprint.low.device_bytes == footprint.peak_device_bytes
    assert decision.limited_by == "memory"
    assert 39.5 * MIB < footprint.most_device_bytes <= 40 * MIB


def test_a_run_that_passes_its_budget_warns_after_two_batches_with_the_size_that_would_not_have(small, takes) -> None:
    guard, at, said = MemGuard(batch_size="largest", budget=40 * MIB), At(), []
    takes[0] = 50 * MIB

    class Listener(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            said.append(guard._run._overruns.checks)

    (text,) = fit(small(_WIDTH), guard, at, Listener())
    assert said[:3] == [True, True, False]  # at the start of the third batch
    size = guard.decision.batch_size
    assert f"has taken 50.0 MiB (counter) at batch size {size}, 10.0 MiB over its budget of 40.0 MiB" in text
    within = int(text.split("Batch size ")[1].split()[0])
    assert 0 < within < size
    profile = guard._last_run.tuning.profile
    ratio = 50 * MIB / guard.decision.footprint.most_device_bytes
    usable = guard.decision.budget.usable_bytes
    assert profile.footprint_at(within).most_device_bytes * ratio <= usable
    assert profile.footprint_at(within + 1).most_device_bytes * ratio > usable


def test_an_epoch_of_two_batches_warns_when_it_ends(small, wide, takes) -> None:
    takes[0] = 50 * MIB
    (text,) = fit(small(), MemGuard(batch_size="largest", budget=40 * MIB), batches=2)
    assert "10.0 MiB over its budget" in text


def test_a_run_within_its_budget_says_nothing(small, wide, takes) -> None:
    takes[0] = 40 * MIB
    assert not fit(small(), MemGuard(batch_size="largest", budget=40 * MIB))


@pytest.mark.usefixtures("taped")
def test_a_run_whose_tensors_alone_fit_is_not_refused(small, tuned, trainer) -> None:
    decision = tuned(trainer(), small(), data(), budget=3 * MIB).decision
    assert decision.fits
    assert decision.footprint.high is None
    assert decision.batch_size == 1
    decision = tuned(trainer(), small(), data(), budget=6 * MIB).decision
    assert (decision.batch_size, decision.limited_by) == (1, "memory"), "a larger one would leave it no room"
    assert decision.footprint.most_device_bytes - decision.footprint.peak_device_bytes == OBJECTS_BYTES
