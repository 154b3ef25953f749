"""Trace -> Replay: what PyTorch's caching allocator would hold for the events of a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lightning_memguard.core.replay.allocator import Allocator, Block
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Event, Trace


@dataclass(frozen=True)
class Replay:
    """What the allocator held while a trace ran.

    Attributes:
        peak_allocated_bytes: largest sum of live blocks, what ``torch.cuda.max_memory_allocated()`` would say.
        peak_reserved_bytes: largest sum of segments, what ``torch.cuda.max_memory_reserved()`` would say.
        parts: bytes alive at the peak of allocated, by part; they sum to it. What a block is larger than was asked
            for belongs to the block's part.
        peak_event: the event that first reached the peak of allocated; None if nothing was allocated.
        segments: segments that made up the peak of reserved; an expandable segment counts once.
        retries: how often the whole cache was given back to make room for one request.
        fragmentation: reserved over allocated at the peak of reserved; 1.0 when every reserved byte was in use.
        out_of_memory_event: the first event that did not fit the capacity even then; the replay ends before it.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    parts: Mapping[str, int] = field(default_factory=dict)
    peak_event: Event | None = None
    segments: int = 0
    retries: int = 0
    fragmentation: float = 1.0
    out_of_memory_event: Event | None = None


def replay(trace: Trace, settings: AllocatorSettings) -> Replay:
    """What an allocator with these settings would hold, event after event.

    Args:
        trace: the events; a block that is never freed just stays.
        settings: see `AllocatorSettings.for_device`.

    >>> step = (Event("alloc", 0, 1000), Event("alloc", 1, 3 * MIB), Event("free", 0, 1000))
    >>> held = replay(Trace(8, "cuda", "fake", step), AllocatorSettings())
    >>> held.peak_allocated_bytes == 1024 + 3 * MIB, held.peak_reserved_bytes == 2 * MIB + 20 * MIB
    (True, True)
    """
    return _replay_exactly(trace, settings) if settings.kind == "exact" else _replay_cached(trace, settings)


def _replay_exactly(trace: Trace, settings: AllocatorSettings) -> Replay:
    sizes: dict[int, int] = {}
    changes = []
    for event in trace.events:
        if event.action == "alloc":
            sizes[event.block] = change = event.nbytes
        else:
            change = -sizes.pop(event.block)
        changes.append(change)

    out_of_memory = None
    capacity = settings.capacity_bytes
    if capacity is not None:
        too_much = next((i for i, live in enumerate(accumulate(changes)) if live > capacity), None)
        if too_much is not None:
            out_of_memory = trace.events[too_much]
            del changes[too_much:]

    peak_bytes, parts, peak_event = _peak(trace.events, changes)
    return Replay(peak_bytes, peak_bytes, parts, peak_event, out_of_memory_event=out_of_memory)


def _replay_cached(trace: Trace, settings: AllocatorSettings) -> Replay:
    allocator = Allocator(settings)
    blocks: dict[int, Block] = {}
    changes = []
    peak_reserved = segments = 0
    fragmentation = 1.0
    out_of_memory = None
    for event in trace.events:
        if event.action == "alloc":
            block = allocator.alloc(event.nbytes, event.stream)
            if block is None:
                out_of_memory = event
                break
            blocks[event.block] = block
            changes.append(block.size_bytes)
            if allocator.peak_reserved_bytes > peak_reserved:
                peak_reserved = allocator.peak_reserved_bytes
                segments = allocator.segment_count
                fragmentation = peak_reserved / allocator.allocated_bytes
        else:
            block = blocks.pop(event.block)
            changes.append(-block.size_bytes)
            allocator.free(block)

    peak_bytes, parts, peak_event = _peak(trace.events, changes)
    return Replay(
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=peak_reserved,
        parts=parts,
        peak_event=peak_event,
        segments=segments,
        retries=allocator.retries,
        fragmentation=fragmentation,
        out_of_memory_event=out_of_memory,
    )


def _peak(events: Sequence[Event], changes: Sequence[int]) -> tuple[int, dict[str, int], Event | None]:
    """Given what each event added to the live bytes: their peak, the parts it consists of, and who reached it."""
    live = list(accumulate(changes))
    peak = max(live, default=0)
    if peak == 0:
        return 0, {}, None
    at = live.index(peak)
    alive: dict[int, tuple[str, int]] = {}
    for event, change in zip(events[: at + 1], changes, strict=False):
        if event.action == "alloc":
            alive[event.block] = event.part, change
        else:
            del alive[event.block]
    parts: dict[str, int] = {}
    for part, nbytes in alive.values():
        if nbytes:
            parts[part] = parts.get(part, 0) + nbytes
    return peak, parts, events[at]
