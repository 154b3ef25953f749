"""Strategies that shard, where no rank can be captured: the states are divided, the batch size is kept.

What a rank gathers of the others' shards while a layer runs, and the strategy's own buffers, are not predicted; so the
batch size stays, and the report says why. Private names of Lightning were checked on 2.5.0 to 2.6.6.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_memguard.core.capture.predict import Prediction
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.training.adapter.lightning_types import is_a

_STATES = ("parameters", "gradients", "optimizer_state")


@dataclass(frozen=True)
class Shards:
    """Over how many ranks a strategy divides each part; 0 where it keeps the part off the device."""

    strategy: str
    over: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """The division in words, such as ``gradients / 8, optimizer state / 8``."""
        parts = {part.replace("_", " "): count for part, count in self.over.items() if count != 1}
        words = [f"{part} / {count}" if count else f"{part} off the device" for part, count in parts.items()]
        return f"{self.strategy}: {', '.join(words) or 'nothing divided'}"


def shards_of(strategy: object, world_size: int) -> Shards | None:
    """What a strategy shards by its settings; None where every rank holds all states itself.

    Sources: torch.distributed.fsdp.ShardingStrategy (SHARD_GRAD_OP keeps the gathered parameters between forward and
    backward pass), the stages of DeepSpeed's ZeRO, the sizes of ModelParallelStrategy's device mesh.
    """
    if is_a(strategy, "FSDPStrategy"):
        return _fsdp(strategy, world_size)
    if is_a(strategy, "ModelParallelStrategy"):
        data, tensor = strategy._data_parallel_size, strategy._tensor_parallel_size  # type: ignore[attr-defined]
        known = isinstance(data, int) and isinstance(tensor, int)
        return Shards("ModelParallelStrategy", dict.fromkeys(_STATES, data * tensor if known else world_size))
    return None


def _fsdp(strategy: Any, world_size: int) -> Shards:
    kind, mesh = strategy.sharding_strategy.name, strategy.kwargs.get("device_mesh")
    within = max(1, strategy.num_processes) if kind.startswith(("HYBRID", "_HYBRID")) else world_size
    if isinstance(mesh, tuple):
        within = mesh[1]
    over = dict.fromkeys(_STATES, 1 if kind == "NO_SHARD" else within)
    if kind in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
        over["parameters"] = 1
    if getattr(strategy.cpu_offload, "offload_params", False):
        over = dict.fromkeys(_STATES, 0)
    return Shards(f"FSDPStrategy ({kind})", over)


def divide_by_rank(prediction: Prediction, shards: Shards) -> Prediction:
    """The prediction with every state at one rank's share of it."""
    left_out = "what a rank gathers of the others' shards while a layer runs, and the strategy's own buffers, are"
    notes = (*prediction.notes, f"{shards}; {left_out} not counted")
    share = functools.partial(_trace_of_one_rank, over=shards.over)
    return replace(prediction, share=share, scalable=False, notes=notes)


def _trace_of_one_rank(trace: Trace, over: Mapping[str, int]) -> Trace:
    def share(event: Event) -> Event:
        count = over.get(event.part, 1)
        return event if count == 1 else event._replace(nbytes=-(-event.nbytes // count) if count else 0)

    return replace(trace, events=tuple(event for event in map(share, trace.events) if event.nbytes))
