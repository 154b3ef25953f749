"""Replay + overheads -> Footprint: the bytes one training step needs at one batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_memguard.core.allocator import AllocatorSettings, replay
from lightning_memguard.core.trace import PARTS, Method, Trace


@dataclass(frozen=True)
class Footprint:
    """The memory of a training step at one batch size, in bytes.

    Attributes:
        batch_size: number of samples in the batch.
        device: what it was predicted for, such as ``"cpu"`` or ``"cuda"``.
        peak_allocated_bytes: what ``torch.cuda.max_memory_allocated()`` would say; on the CPU the peak of live tensors.
        peak_reserved_bytes: what ``torch.cuda.max_memory_reserved()`` would say; on the CPU the same as allocated.
        peak_device_bytes: what nvidia-smi would say (reserved + context and libraries); on the CPU the same as
            allocated. This is what is held against a budget.
        parts: bytes alive at the peak by part; they sum to ``peak_allocated_bytes``.
        phase: where the peak stands: ``"forward"``, ``"backward"``, ``"optimizer"``, ...
        module: dotted path of the module that was running at the peak, or empty.
        operator: the torch operator at the peak.
        method: how it was obtained, see `lightning_memguard.core.trace.Method`.
        notes: what had to be assumed, in plain words.
    """

    batch_size: int
    device: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_device_bytes: int
    parts: Mapping[str, int] = field(default_factory=dict)
    phase: str = ""
    module: str = ""
    operator: str = ""
    method: Method = "fake"
    notes: tuple[str, ...] = ()

    @property
    def largest_part(self) -> str:
        """Name of the part with most bytes at the peak."""
        return max(self.parts, key=lambda part: self.parts[part]) if self.parts else ""


def footprint(trace: Trace, settings: AllocatorSettings, context_bytes: int = 0) -> Footprint:
    """Replay a trace and add what stands outside of it.

    Args:
        trace: the events of the step, in bytes asked for.
        settings: the rules of the allocator to replay by.
        context_bytes: what the process takes on its device outside the allocator (CUDA's context and libraries).
    """
    result = replay(trace, settings)
    peak = result.peak_event
    return Footprint(
        batch_size=trace.batch_size,
        device=trace.device,
        peak_allocated_bytes=result.peak_allocated_bytes,
        peak_reserved_bytes=result.peak_reserved_bytes,
        peak_device_bytes=result.peak_reserved_bytes + context_bytes,
        parts={part: result.parts.get(part, 0) for part in PARTS},
        phase=peak.phase if peak else "",
        module=peak.module if peak else "",
        operator=peak.operator if peak else "",
        method=trace.method,
        notes=trace.notes,
    )
