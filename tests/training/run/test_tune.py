"""From a fit that has not started to its decision, and every way to end without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_memguard import MemGuardError
from lightning_memguard.training.run import tune as tuning_module
from lightning_memguard.units import KIB


def test_a_step_that_pairs_its_samples_gets_an_even_size(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any
) -> None:
    """The largest size that fits is odd, and the step raises there: a size that the step can run is chosen."""

    class Pairs(small):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if len(batch[0]) % 2:
                raise ValueError("samples come in pairs")
            return super().training_step(batch, batch_idx)

    free = tuned(trainer(), small(), dataset, max_batch_size=51).decision
    paired = tuned(trainer(), Pairs(), dataset, max_batch_size=51).decision
    assert (free.batch_size, paired.batch_size) == (51, 50)


def test_a_step_that_grows_otherwise_is_captured_where_it_is_asked(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any
) -> None:
    """Above 40 samples the step takes as much again: the choice keeps below, since the budget has no room for it."""

    class Kinked(small):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            extra = torch.zeros(1000 * KIB if len(batch[0]) > 40 else 4)
            return loss + extra.sum()

    decision = tuned(trainer(), Kinked(), dataset, budget=1000 * KIB, margin=0.0).decision
    assert decision.batch_size == 40
    assert decision.limited_by == "memory"
    assert "each size was captured" in " ".join(decision.footprint.notes)


@pytest.mark.parametrize("error", [MemGuardError("no driver"), ZeroDivisionError("a mistake of ours")])
def test_a_guard_that_fails_lets_the_training_go_on(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(tuning_module, "read_budget", fail)
    decision = tuned(trainer(), small(), dataset).decision
    assert decision.outcome == "stepped aside"
    assert str(error) in decision.reason
