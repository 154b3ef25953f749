"""Trace -> Replay: what PyTorch's caching allocator would hold for the events of a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeVar

from lightning_memguard.core.replay.allocator import Allocator, Block
from lightning_memguard.core.replay.settings import UNLIMITED, AllocatorSettings
from lightning_memguard.core.trace.trace import WAITS, Event, Trace

_Result = TypeVar("_Result")


class Steps:
    """A replay, event by event: iterating yields what each event adds to the allocated bytes.

    It ends before the first allocation that does not fit the capacity. A step is a plain number, since a replay has
    tens of thousands of them; in between, the attributes are as the last event left them.

    Attributes:
        trace: the events.
        allocator: what replays them; None for exact memory, which is neither rounded nor cached.
        block: the allocator's block that the last event allocated or freed.
        out_of_memory_event: the event that did not fit; None until then.

    >>> steps = Steps(Trace(8, "cuda", "fake", (Event("alloc", 0, 700), Event("free", 0, 700))), AllocatorSettings())
    >>> [(change, steps.reserved_bytes) for change in steps]
    [(1024, 2097152), (-1024, 2097152)]
    """

    def __init__(self, trace: Trace, settings: AllocatorSettings) -> None:
        self.trace = trace
        self.allocator = Allocator(settings) if settings.kind == "cuda" else None
        self.block: Block | None = None
        self.out_of_memory_event: Event | None = None
        self._capacity_bytes = settings.capacity_bytes
        self._kept_sizes: dict[tuple[int, tuple[int, ...]], int] = {}  # of requests with other sizes
        self._blocks: dict[int, Block] = {}
        self._waiting: dict[int, Block] = {}

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator holds now; 0 for exact memory."""
        return self.allocator.reserved_bytes if self.allocator else 0

    def __iter__(self) -> Iterator[int]:
        if self.allocator is not None:
            return self.go_on(self.trace.events)
        return self._exact(UNLIMITED if self._capacity_bytes is None else self._capacity_bytes)

    def _exact(self, capacity_bytes: int) -> Iterator[int]:
        live, sizes = 0, dict[int, int]()
        for event in self.trace.events:
            if event.action == "alloc":
                sizes[event.block] = change = event.nbytes
            else:
                change = -sizes.pop(event.block)
            live += change
            if live > capacity_bytes:
                self.out_of_memory_event = event
                return
            yield change

    def _alloc(self, allocator: Allocator, event: Event) -> Block | None:
        """Serve a request; one that has other sizes keeps the size that fits, as PyTorch keeps cuDNN's plan."""
        if not event.otherwise:
            return allocator.alloc(event.nbytes, event.stream)
        kept = self._kept_sizes.get((event.nbytes, event.otherwise))
        sizes = (event.nbytes, *event.otherwise) if kept is None else (kept, event.nbytes, *event.otherwise)
        for nbytes in dict.fromkeys(sizes):  # the same size would not fit either
            block = allocator.alloc(nbytes, event.stream)
            if block is not None:
                if nbytes != event.nbytes:
                    self._kept_sizes[event.nbytes, event.otherwise] = nbytes
                return block
        return None

    def _wait(self, allocator: Allocator, event: Event, waiting: dict[int, Block]) -> None:
        """A block that was freed stays with its stream, or comes back to it; it gives way to what would not fit."""
        block = allocator.alloc(event.nbytes, event.stream) if event.action == "alloc" else None
        if block is not None:
            waiting[event.block] = block
        elif event.block in waiting:
            allocator.free(waiting.pop(event.block))

    def state_with(self, left: Mapping[Hashable, int]) -> Hashable:
        """All that later events depend on, if of the blocks that are there they free ``left`` alone, by their names."""
        assert self.allocator is not None, "exact memory keeps nothing between steps"
        if self._waiting:
            return object()  # like no other
        left_at = tuple((name, self._blocks[block].address) for name, block in left.items())
        return self.allocator.state, left_at, tuple(self._kept_sizes.items())

    def go_on(self, events: Iterable[Event]) -> Iterator[int]:
        """Replay more events in the allocator as it is now."""
        allocator, blocks, waiting = self.allocator, self._blocks, self._waiting
        assert allocator is not None, "exact memory keeps nothing between steps"
        for event in events:
            if event.operator == WAITS:
                self._wait(allocator, event, waiting)
                yield 0
            elif event.action == "alloc":
                self.block = block = self._alloc(allocator, event)
                if block is None and waiting:
                    while waiting:
                        allocator.free(waiting.popitem()[1])
                    self.block = block = self._alloc(allocator, event)
                if block is None:
                    self.out_of_memory_event = event
                    return
                blocks[event.block] = block
                yield block.size_bytes
            else:
                self.block = block = blocks.pop(event.block)
                size_bytes = block.size_bytes  # freeing joins the block with free neighbors
                allocator.free(block)
                yield -size_bytes


def within_capacity(trace: Trace, settings: AllocatorSettings, read: Callable[[Steps], _Result]) -> _Result:
    """Read a replay within the capacity, which may make the allocator empty its cache; if that fails, without one."""
    steps = Steps(trace, settings)
    result = read(steps)
    if steps.out_of_memory_event is None:
        return result
    return read(Steps(trace, replace(settings, capacity_bytes=None)))


@dataclass(frozen=True)
class Replay:
    """Memory that the allocator held while a trace ran.

    Attributes:
        peak_allocated_bytes: largest sum of live blocks, as ``torch.cuda.max_memory_allocated()`` would report it.
        peak_reserved_bytes: largest sum of segments, as ``torch.cuda.max_memory_reserved()`` would report it.
        parts: bytes alive at the peak of allocated, by part; they sum to it. If a block is larger than requested,
            the rest counts as the block's part.
        peak_event: the event that first reached the peak of allocated; None if nothing was allocated.
        out_of_memory_event: the first event that did not fit the capacity even then; the replay ends before it.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    parts: Mapping[str, int] = field(default_factory=dict)
    peak_event: Event | None = None
    out_of_memory_event: Event | None = None

    @classmethod
    def of(cls, steps: Steps) -> Replay:
        """Run the steps to their end."""
        return cls.of_run(steps, steps.trace.events, list(steps))

    @classmethod
    def of_run(cls, steps: Steps, events: Sequence[Event], changes: Sequence[int]) -> Replay:
        """Return the replay of events that were run, by what each has added to the allocated bytes."""
        peak_event, alive = alive_at_peak(events, changes)
        parts: Counter[str] = Counter()
        for event, nbytes in alive:
            parts[event.part] += nbytes
        peak_bytes = parts.total()
        return cls(
            peak_allocated_bytes=peak_bytes,
            peak_reserved_bytes=steps.allocator.peak_reserved_bytes if steps.allocator else peak_bytes,
            parts=dict(parts),
            peak_event=peak_event,
            out_of_memory_event=steps.out_of_memory_event,
        )


def replay(trace: Trace, settings: AllocatorSettings) -> Replay:
    """Replay a trace, event after event, in an allocator with these settings.

    Args:
        trace: the events; a block that is never freed stays allocated.
        settings: see `AllocatorSettings.for_device`.

    >>> step = (Event("alloc", 0, 1000), Event("alloc", 1, 3 << 20), Event("free", 0, 1000))
    >>> held = replay(Trace(8, "cuda", "fake", step), AllocatorSettings())
    >>> held.peak_allocated_bytes == 1024 + (3 << 20), held.peak_reserved_bytes == 22 << 20
    (True, True)
    """
    return Replay.of(Steps(trace, settings))


def alive_at_peak(events: Sequence[Event], changes: Sequence[int]) -> tuple[Event | None, list[tuple[Event, int]]]:
    """The event that first reached the peak of the live bytes, and the blocks alive then, each with its bytes."""
    live = list(accumulate(changes))
    peak = max(live, default=0)
    if peak == 0:
        return None, []
    at = live.index(peak)
    alive: dict[int, tuple[Event, int]] = {}
    for event, change in zip(events[: at + 1], changes, strict=False):
        if change > 0:
            alive[event.block] = event, change
        elif change < 0:
            del alive[event.block]
    return events[at], [*alive.values()]
