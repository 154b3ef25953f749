"""Strategies that shard: what they declare is divided, their batch size stays, and the report says which."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.utils.data import TensorDataset

from lightning_memguard.core.decision.decision import Limits
from lightning_memguard.training.adapter import sharded
from lightning_memguard.training.adapter.sharded import Shards, shards_of
from lightning_memguard.training.planning.plan import plan_on
from lightning_memguard.training.planning.subject import subject_of

EIGHT = {"parameters": 8, "gradients": 8, "optimizer_state": 8}


def fsdp(**settings: Any) -> FSDPStrategy:
    return FSDPStrategy(parallel_devices=[torch.device("cuda", index) for index in range(4)], **settings)


@pytest.mark.parametrize(
    ("strategy", "over"),
    [
        (fsdp(), EIGHT),
        (fsdp(sharding_strategy="SHARD_GRAD_OP"), {**EIGHT, "parameters": 1}),
        (fsdp(sharding_strategy="NO_SHARD"), dict.fromkeys(EIGHT, 1)),
        (fsdp(sharding_strategy="HYBRID_SHARD", device_mesh=(4, 2)), dict.fromkeys(EIGHT, 2)),
        (fsdp(cpu_offload=True), dict.fromkeys(EIGHT, 0)),
        (ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=2), EIGHT),
        (ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), dict.fromkeys(EIGHT, 2)),
    ],
)
def test_what_a_strategy_divides(strategy: Any, over: dict[str, int]) -> None:
    found = shards_of(strategy, 8)
    assert found is not None
    assert found.over == over


@pytest.mark.parametrize("strategy", [SingleDeviceStrategy(), DDPStrategy()])
def test_others_divide_nothing(strategy: Any) -> None:
    assert shards_of(strategy, 8) is None


def test_the_report_names_the_parts() -> None:
    shards = Shards("FSDPStrategy (SHARD_GRAD_OP)", {"parameters": 1, "gradients": 8, "optimizer_state": 0})
    assert str(shards) == "FSDPStrategy (SHARD_GRAD_OP): gradients / 8, optimizer state off the device"


def test_the_states_of_a_fit_are_divided_at_any_size(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any
) -> None:
    """Eight ranks: an eighth of each state, and all of the activations."""
    whole = tuned(trainer(), small(), dataset, mode="check").profile.prediction
    split = sharded.divide_by_rank(whole, Shards("a strategy", EIGHT))
    for size in (10, 50):
        parts, of_one = whole.footprint_at(size).parts, split.footprint_at(size).parts
        for state in EIGHT:
            assert of_one[state] == pytest.approx(parts[state] / 8, abs=8)
        assert of_one["activations"] == parts["activations"] > 0


def test_a_sharding_fit_keeps_its_size_and_says_why(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded, "shards_of", lambda *_: Shards("FSDPStrategy (FULL_SHARD)", EIGHT))
    decision = tuned(trainer(), small(), dataset).decision
    assert (decision.outcome, decision.batch_size) == ("kept", 10)
    assert decision.reason == "FSDPStrategy (FULL_SHARD) is predicted in part only"
    assert any("parameters / 8, gradients / 8" in note for note in decision.footprint.notes)


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
