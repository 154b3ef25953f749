"""Pipelines: a rank's stages under torch's own schedule, against real tensors as PyTorch's profiler sees them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

from lightning_memguard import MemGuardError
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.pipelines import PipelineProgram, _given_shapes
from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.training.planning.pipeline import estimate_pipeline

WIDTH, SAMPLES, MICRO_BATCHES = 64, 32, 8
BATCH = torch.zeros(SAMPLES, WIDTH), torch.zeros(SAMPLES, WIDTH)


def stage() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


IN_FLOAT = MixedPrecisionPolicy()


def sharded(part: nn.Module, mesh: Any, policy: MixedPrecisionPolicy = IN_FLOAT) -> None:
    """Tensor parallelism, and FSDP2 of each half and of the whole; gathered once for all micro-batches."""
    if mesh["tensor_parallel"].size() > 1:
        parallelize_module(part, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if mesh["data_parallel"].size() > 1:
        for each in (part[0], part[2], part):
            fully_shard(each, mesh=mesh["data_parallel"], reshard_after_forward=False, mp_policy=policy)


def program(rank: int, schedule: str, ranks: int = 4, stages: int = 4, **options: Any) -> PipelineProgram:
    torch.manual_seed(0)
    made = tuple(stage() for _ in range(stages))
    return PipelineProgram(
        nn.ModuleList(made[rank::ranks]),
        batches_from_one(BATCH),
        lambda *_: None,
        torch.optim.SGD,
        torch.device("cpu"),
        ranks=ranks,
        stages=made,
        rank=rank,
        schedule=schedule,
        micro_batches=MICRO_BATCHES,
        loss=nn.functional.mse_loss,
        **options,
    )


def recorded_peak(program: PipelineProgram) -> int:
    """The most that is alive above parameters and batch."""
    recorder = Recorder("cpu")
    program.run(recorder, SAMPLES, fake=True)
    live = peak = 0
    kept = {"parameters", "batch"}
    for event in recorder.trace(SAMPLES, "fake").events:
        if event.part not in kept:
            live += event.nbytes if event.action == "alloc" else -event.nbytes
            peak = max(peak, live)
    return peak


def measured_peak(program: PipelineProgram) -> int:
    """The same of real tensors."""
    with program._group(), _given_shapes():
        parts: Any = program.model
        mesh, passed = program._passed_on(SAMPLES)
        schedule = program._schedule(parts, passed, mesh, torch.device("cpu"))
        optimizers = program._optimizers(parts)
        arguments = (BATCH[0],) if 0 in program._own else ()
        targets = {"target": BATCH[1]} if len(program.stages) - 1 in program._own else {}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            for _ in range(2):
                parts.zero_grad()
                schedule.step(*arguments, **targets)
                for optimizer in optimizers:
                    optimizer.step()
    events, found = [*profiled.profiler.kineto_results.experimental_event_tree()], []
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    live = peak = 0
    for _, nbytes in sorted(found):
        live += nbytes
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_stage_takes_what_it_takes_on_real_tensors(rank: int, schedule: str) -> None:
    assert recorded_peak(program(rank, schedule)) == pytest.approx(measured_peak(program(rank, schedule)), abs=64)


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_may_share_a_stage(rank: int, mesh: tuple[int, int]) -> None:
    found = [each(program(rank, "1F1B", shard=sharded, mesh=mesh)) for each in (recorded_peak, measured_peak)]
    assert found[0] == pytest.approx(found[1], abs=64)


def test_a_rank_may_have_several_stages() -> None:
    interleaved = program(1, "Interleaved1F1B", ranks=4, stages=8)
    assert recorded_peak(interleaved) == pytest.approx(measured_peak(interleaved), abs=64)


def test_earlier_stages_keep_more_micro_batches(here: None) -> None:
    """1F1B: the second of four stages keeps three micro-batches, the third two; first and last have the batch too."""
    made = [stage() for _ in range(4)]
    found = estimate_pipeline(made, BATCH, loss=nn.functional.mse_loss, micro_batches=MICRO_BATCHES, device="cpu")
    kept = 4 * (SAMPLES // MICRO_BATCHES) * WIDTH  # a tensor of a micro-batch
    assert found[1].peak_allocated_bytes - found[2].peak_allocated_bytes == pytest.approx(2 * kept, abs=64)


IN_HALF = partial(sharded, policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


@pytest.mark.parametrize("shard", [None, sharded, IN_HALF])
def test_gradients_of_a_micro_batch_are_gradients_in_the_next(shard: Any) -> None:
    recorder = Recorder("cpu")
    program(0, "1F1B", shard=shard, mesh=(2, 1) if shard else (1, 1)).run(recorder, SAMPLES, fake=True)
    made = Counter(event.part for event in recorder.trace(SAMPLES, "fake") if event.nbytes == 4 * WIDTH * WIDTH)
    assert made["activations"] == 0
    assert made["gradients"] > 0


def test_a_plan_of_sharded_stages_has_their_shards(here: None) -> None:
    made = [stage() for _ in range(2)]
    options = {"loss": nn.functional.mse_loss, "micro_batches": MICRO_BATCHES, "optimizer": torch.optim.Adam}
    whole, halves = (
        estimate_pipeline(made, BATCH, device="cpu", **options, **more)[0]
        for more in ({}, {"shard": sharded, "data_parallel_size": 2})
    )
    assert halves.parts["parameters"] == whole.parts["parameters"] // 2
    assert halves.parts["gathered"] > 0


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(MemGuardError, match="A batch of 32 does not divide into 5"):
        estimate_pipeline([stage()], BATCH, loss=nn.functional.mse_loss, micro_batches=5)
    with pytest.raises(MemGuardError, match="3 stages do not divide over 2 ranks"):
        estimate_pipeline([stage() for _ in range(3)], BATCH, loss=nn.functional.mse_loss, micro_batches=4, ranks=2)
    with pytest.raises(MemGuardError, match="a pipeline takes 32-true"):
        estimate_pipeline([stage()], BATCH, loss=nn.functional.mse_loss, micro_batches=4, precision="bf16-mixed")
    with pytest.raises(MemGuardError, match="need `shard`"):
        estimate_pipeline([stage()], BATCH, loss=nn.functional.mse_loss, micro_batches=4, data_parallel_size=2)
