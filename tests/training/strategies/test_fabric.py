"""A plain module on one of several ranks, as Fabric's strategies set it up."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import lightning.fabric.strategies
import lightning_fabric.strategies
import lightning_fabric.wrappers
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lightning_memguard import MemGuardError, estimate
from lightning_memguard.core.capture.capture import capture
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.decision.decision import Limits
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.simulation.fake_cuda import FAKE_DEVICE
from lightning_memguard.training.planning.plan import plan_on
from lightning_memguard.training.planning.subject import on_ranks, program_of, subject_of
from lightning_memguard.training.planning.target import target_of
from lightning_memguard.training.strategies import fabric
from tests.forks import CONTEXT
from tests.long import long_but
from tests.training.strategies.fabric_truth import SAMPLES, benchmark, measure, strategy_of

GPU = "A100-SXM4-40GB"
PACKAGES = [lightning.fabric.strategies, lightning_fabric.strategies]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(256, 256, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)  # type: ignore[no-any-return]


OF_BLOCKS: dict[str, Any] = {"step": lambda module, x: module(x).sum(), "optimizer": torch.optim.AdamW}


def estimated(strategy: Any, ranks: int, **options: Any) -> Footprint:
    model, batch = benchmark().GPT(), benchmark().batch_for("gpt", SAMPLES)
    given = {"step": benchmark().run_model, "optimizer": benchmark().optimizer_for, "device": "cpu", **options}
    return estimate(model, batch, strategy=strategy, devices=ranks, **given)


@pytest.mark.parametrize(("case", "ranks"), [("fsdp2", 2), pytest.param("both", 4, marks=pytest.mark.long), ("ddp", 2)])
def test_a_rank_takes_what_the_profiler_sees_of_it(case: str, ranks: int) -> None:
    found = estimated(strategy_of(case, ranks), ranks)
    unseen = 1152 if case == "ddp" else 0  # at most, of small tensors that gloo's threads free in some runs
    more = math.inf
    for _ in range(3):  # on a busy machine gloo's threads free buckets late, too
        with CONTEXT.Pool(1) as child:
            more = min(more, child.apply_async(measure, (case, ranks)).get(300) - found.peak_allocated_bytes)
        if more <= unseen:
            break
    assert 0 <= more <= unseen


@pytest.mark.parametrize("ranks", long_but([4], [2, 4]))
def test_fsdp_is_wrapped_with_its_policy(ranks: int, here: None) -> None:
    """Torch's FSDP runs on no CPU."""

    def parallelize(model: nn.Module) -> nn.Module:
        policy = ModuleWrapPolicy({benchmark().Block})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=FAKE_DEVICE, use_orig_params=True)

    plain = subject_of(
        benchmark().GPT(),
        benchmark().batch_for("gpt", SAMPLES),
        step=benchmark().run_model,
        optimizer=benchmark().optimizer_for,
    )
    target = target_of(GPU)
    by_hand: Any = program_of(plain, target)
    assert type(by_hand) is LoopProgram
    by_hand = replace(by_hand, ranks=ranks, parallelize=parallelize)
    by_fabric = program_of(on_ranks(plain, strategy_of("fsdp", ranks), ranks, 1), target)
    assert _sizes(by_fabric) == _sizes(by_hand)


def _sizes(program: Any) -> list[tuple[str, int, str, int]]:
    streams: dict[int, int] = {}  # torch numbers them again for each capture
    return [
        (event.action, event.nbytes, event.part, streams.setdefault(event.stream, len(streams)))
        for event in capture(program, SAMPLES, "fake")
    ]


def test_fsdp_checkpoints_and_offloads_as_it_is_told(here: None) -> None:
    blocks = {benchmark().Block}
    plain, kept, offloaded = (
        estimated(lightning_fabric.strategies.FSDPStrategy(auto_wrap_policy=blocks, **options), 4, device=GPU).parts
        for options in ({}, {"activation_checkpointing_policy": blocks}, {"cpu_offload": True})
    )
    assert kept["activations"] < plain["activations"] / 4
    assert plain["parameters"] > 0
    assert (offloaded["parameters"], offloaded["optimizer_state"]) == (0, 0)


def test_inputs_are_cast_and_outputs_cast_back(here: None) -> None:
    """As Fabric's wrapper does: a batch of float32 does not fit a module of bfloat16."""
    strategy = strategy_of("fsdp2", 2)
    model, batch = Blocks(), torch.zeros(4, 256)
    dtypes = []

    def step(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output = module(x)
        dtypes.append(output.dtype)
        return output.sum()

    parts = estimate(model, batch, step=step, device="cpu", strategy=strategy, devices=2, precision="bf16-true").parts
    assert parts["parameters"] == 2 * 256 * 256 // 2
    assert {*dtypes} == {torch.float32}


@pytest.mark.parametrize("strategies", PACKAGES)
def test_strategies_of_both_packages_are_taken(strategies: Any, here: None) -> None:
    def parts(strategy: Any, device: str) -> Any:
        return estimate(Blocks(), torch.zeros(4, 256), **OF_BLOCKS, strategy=strategy, devices=2, device=device).parts

    sharded = parts(strategies.FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"), GPU)
    assert sharded["optimizer_state"] < sharded["gathered"] * 1.1
    assert parts(strategies.DDPStrategy(), "cpu")["communication"] > 0


def test_a_plan_takes_a_name(here: None) -> None:
    trainer = {"strategy": "fsdp", "devices": 4, "num_nodes": 2}
    subject = subject_of(Blocks(), torch.zeros(4, 256), **OF_BLOCKS, trainer=trainer)
    plan = plan_on(subject, "T4", Limits(max_batch_size=64))
    assert plan.largest is not None
    assert (plan.largest.batch_size, plan.ranks) == (64, 8)


@pytest.mark.parametrize(
    "strategy",
    [
        "deepspeed_stage_3",
        "fsdp_9",
        pl.strategies.FSDPStrategy(),
        pl.strategies.ModelParallelStrategy(),
        lightning_fabric.strategies.DataParallelStrategy(),
        object(),
    ],
)
def test_what_a_plain_module_cannot_be_planned_under_is_refused(strategy: Any) -> None:
    with pytest.raises(MemGuardError, match=r"not for a plain module: give 'ddp', 'fsdp', or the DDPStrategy"):
        estimated(strategy, 2)


def test_precisions_that_fabric_refuses_are_refused() -> None:
    with pytest.raises(MemGuardError, match="'64-true' is not one of FSDPStrategy's: 32-true"):
        estimated("fsdp", 2, precision="64-true")


def test_a_lightning_module_is_trained_by_a_trainer() -> None:
    with pytest.raises(MemGuardError, match=r"give that of pytorch_lightning\.strategies"):
        estimate(pl.LightningModule(), torch.zeros(1), strategy=lightning_fabric.strategies.FSDPStrategy(), devices=2)


def test_an_inference_has_no_strategy() -> None:
    with pytest.raises(MemGuardError, match="those of a training"):
        estimated("ddp", 2, training=False)


def test_private_names_of_fabric_take_what_they_took() -> None:
    strategy = lightning_fabric.strategies.FSDPStrategy()
    assert {"cpu_offload", "sharding_strategy"} <= {*vars(strategy)}
    wrapper = lightning_fabric.wrappers._FabricModule
    assert [*inspect.signature(wrapper).parameters] == ["forward_module", "strategy", "original_module"]
    assert fabric.is_fabrics(strategy)
    assert not fabric.is_fabrics(pl.strategies.FSDPStrategy())
