"""The peak of the first of several ranks under Fabric's own strategy, by PyTorch's profiler; to be run in a child."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric.accelerators import CPUAccelerator
from lightning_fabric.plugins.environments import LightningEnvironment
from lightning_fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests import scripts

SAMPLES = 6


def benchmark() -> Any:
    """benchmarks/sharded.py, whose models and profiler these are."""
    return scripts.benchmark("sharded")


def by_block(model: Any, mesh: Any) -> nn.Module:
    """FSDP2."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def by_both(model: Any, mesh: Any) -> nn.Module:
    """Tensor parallelism within FSDP2."""
    for block in model.blocks:
        parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return by_block(model, mesh)


def strategy_of(case: str, ranks: int) -> Any:
    blocks = {benchmark().Block}
    made = {
        "ddp": DDPStrategy,
        "fsdp": lambda: FSDPStrategy(auto_wrap_policy=blocks),
        "checkpointed": lambda: FSDPStrategy(
            auto_wrap_policy=blocks, activation_checkpointing_policy=blocks, sharding_strategy="SHARD_GRAD_OP"
        ),
        "fsdp2": lambda: ModelParallelStrategy(by_block, ranks, 1),
        "both": lambda: ModelParallelStrategy(by_both, ranks // 2, 2),
    }
    return made[case]()


def measure(case: str, ranks: int) -> int:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    if case == "ddp":  # the fake group returns nothing to DDP; its buckets are as large for one rank as for several
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    strategy = strategy_of(case, ranks)
    strategy.parallel_devices, strategy.cluster_environment = [torch.device("cpu")] * ranks, LightningEnvironment()
    strategy.accelerator = CPUAccelerator()
    strategy.setup_environment()
    benchmark().CASES[case] = lambda _: strategy.setup_module
    return benchmark().measure("gpt", case, ranks, SAMPLES)[0]  # type: ignore[no-any-return]
