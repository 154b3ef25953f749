"""`estimate_pipeline`: the footprint of each rank of a pipeline."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.pipelines import PipelineProgram
from lightning_memguard.core.capture.predict import predict
from lightning_memguard.core.capture.program import TRUE_DTYPES
from lightning_memguard.core.decision.decision import check_count
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.training.planning.subject import MakeOptimizer
from lightning_memguard.training.planning.target import target_of


def estimate_pipeline(
    stages: Sequence[nn.Module],
    batch: tuple[torch.Tensor, torch.Tensor],
    *,
    loss: Callable[[Any, Any], Any],
    micro_batches: int,
    schedule: str = "1F1B",
    ranks: int | None = None,
    optimizer: MakeOptimizer | None = None,
    device: str = "cuda",
    precision: str = "32-true",
    shard: Callable[[nn.Module, Any], object] | None = None,
    data_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Footprint, ...]:
    """Predict the memory of one training step on each rank of a pipeline of ``torch.distributed.pipelining``.

    Args:
        stages: the parts of the model in order, each called with what the one before returns: one tensor.
        batch: the inputs of the first stage, and the targets; real, meta or fake tensors.
        loss: ``(output, targets) -> loss`` of a micro-batch.
        micro_batches: how many a batch is divided into.
        schedule: a schedule of torch's by name: ``"1F1B"``, ``"GPipe"``, ``"Interleaved1F1B"``, ...
        ranks: how many ranks there are (default: one for each stage); stage ``i`` is on rank ``i % ranks``.
        optimizer: ``(parameters) -> Optimizer`` (default: none, gradients only).
        device: as for `lightning_memguard.estimate`.
        precision: ``"32-true"``, ``"bf16-true"``, ``"16-true"`` or ``"64-true"``.
        shard: ``(stage, mesh)``: shards a copy of a stage by ``fully_shard`` or ``parallelize_module``, over the
            ``"data_parallel"`` and ``"tensor_parallel"`` dimensions of a mesh; the batch is that of one data-parallel
            rank.
        data_parallel_size: how many ranks have a stage and samples of their own.
        tensor_parallel_size: how many ranks share a stage and its samples.
        context: makes what a step runs in, such as ``loss_parallel``.

    Returns:
        The footprint of each rank of the pipeline; of those that share a stage, of the first.

    Raises:
        MemGuardError: an argument is unknown, or stages or samples cannot be divided so.
        CannotTraceError: a stage cannot be run on a copy.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> stages, batch = [nn.Linear(64, 64) for _ in range(4)], (torch.zeros(32, 64), torch.zeros(32, 64))
        >>> found = estimate_pipeline(stages, batch, loss=nn.functional.mse_loss, micro_batches=8, device="cpu")
        >>> [footprint.parts["parameters"] for footprint in found] == 4 * [4 * (64 * 64 + 64)]
        True
    """
    samples, count = len(batch[0]), ranks or len(stages)
    check_count("micro_batches", micro_batches)
    if precision not in TRUE_DTYPES:
        raise MemGuardError(f"precision={precision!r}: a pipeline takes {', '.join(TRUE_DTYPES)}.")
    if samples % micro_batches:
        raise MemGuardError(f"A batch of {samples} does not divide into {micro_batches} micro-batches.")
    if len(stages) % count:
        raise MemGuardError(f"{len(stages)} stages do not divide over {count} ranks.")
    mesh = data_parallel_size, tensor_parallel_size
    check_count("data_parallel_size", data_parallel_size)
    check_count("tensor_parallel_size", tensor_parallel_size)
    if math.prod(mesh) > 1 and shard is None:
        raise MemGuardError("Ranks that share a stage need `shard`, which divides it over them.")
    target = target_of(device).talking(sum(size > 1 for size in (count, *mesh)))
    settings = AllocatorSettings.for_device(target.device.type, os.environ)
    settings = replace(settings, capacity_bytes=target.capacity_bytes)
    found = []
    for rank in range(count):
        program = PipelineProgram(
            nn.ModuleList(stages[rank::count]),
            batches_from_one(batch),
            _no_step,
            optimizer,
            target.device,
            precision,
            gpu=target.gpu,
            ranks=count,
            stages=tuple(stages),
            rank=rank,
            schedule=schedule,
            micro_batches=micro_batches,
            loss=loss,
            shard=shard,
            mesh=mesh,
            context=context,
        )
        prediction = predict(program, samples, settings, context_bytes=target.context_bytes, scalable=False)
        if prediction.method == "states":
            raise CannotTraceError(f"Rank {rank} cannot be predicted: {'; '.join(prediction.notes)}.")
        found.append(prediction.footprint_at(samples))
    return tuple(found)


def _no_step(*_: object) -> None:
    """The schedule runs the stages."""
