"""Strategies that shard, planned for, and the precision that they compute in."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lightning_memguard import estimate
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


class ShardsItself(pl.LightningModule):
    def configure_model(self) -> None:
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def on_train_start(self) -> None:
        for layer in self.layers:
            nn.init.trunc_normal_(layer.weight)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.compile(self.layers)(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_a_module_that_is_sharded_then_initialized_at_random_is_compiled() -> None:
    strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    found = estimate(ShardsItself(), torch.zeros(4, 64), strategy=strategy, devices=2, device="T4")
    assert found.parts["parameters"] == 2 * 64 * 64 * 4 // 2
    assert (found.method, found.notes) == ("compiled", ())


class Attends(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (-1, 16)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


class RecomputesAttention(pl.LightningModule):
    def configure_model(self) -> None:
        first, last = (nn.Linear(64, 64, bias=False) for _ in range(2))
        self.layers = nn.Sequential(nn.LayerNorm(64), first, Attends(), last)
        plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)), "3": RowwiseParallel()}
        parallelize_module(self.layers, self.device_mesh["tensor_parallel"], plan)  # type: ignore[index]

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.recomputed(batch).sum()

    @torch.compile
    def recomputed(self, batch: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, batch, use_reentrant=False)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_ranks_that_share_layers_recompute_attention_as_compiled() -> None:
    """The mesh of the ranks is saved for the backward pass too, last."""
    strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    found = estimate(RecomputesAttention(), torch.zeros(4, 8, 64), strategy=strategy, devices=2, device="T4")
    assert (found.method, found.notes) == ("compiled", ())


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
