"""Strategies that shard, planned for, and the precision that they compute in."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import TensorDataset

from lightning_memguard.core.decision.decision import Limits
from lightning_memguard.training.planning.plan import plan_on
from lightning_memguard.training.planning.subject import subject_of


def test_a_plan_with_a_sharding_strategy_finds_the_largest_size_of_a_rank(small: Any) -> None:
    batch = (torch.zeros(8, 16), torch.zeros(8, dtype=torch.long))
    subject = subject_of(small(), batch, trainer={"strategy": "fsdp", "devices": 4})
    plan = plan_on(subject, "T4", Limits(max_batch_size=64))
    assert plan.ranks == 4
    assert plan.largest is not None
    assert plan.largest.batch_size == 64


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_the_precision_of_a_sharding_strategy_is_computed_in_on_one_device(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any, precision: Any
) -> None:
    run = trainer()
    run.strategy.precision_plugin = pl.plugins.FSDPPrecision(precision)
    ours = tuned(run, small(), dataset, mode="check").decision.footprint
    plain = tuned(trainer(precision=precision), small(), dataset, mode="check").decision.footprint
    assert ours.method == "fake"
    if precision != "bf16-mixed":  # that one autocasts for a GPU
        assert ours.peak_allocated_bytes == plain.peak_allocated_bytes
