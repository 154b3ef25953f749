"""Trace -> Retries: how a step runs that does not fit with all that the allocator would like to cache.

PyTorch calls it a retry (``num_alloc_retries``): it waits for the device, releases the cache and reserves again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from lightning_memguard.core.replay.replay import Steps
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Event, Trace

_SETTLING, _COUNTED = 6, 4  # steps; ResNet-50 settles within four


@dataclass(frozen=True)
class Retries:
    """How often the allocator releases its cache: in the first steps altogether, and in each step after these."""

    at_first: int
    per_step: float


def retries_within(trace: Trace, settings: AllocatorSettings, capacity_bytes: int) -> Retries | None:
    """Return how often a step releases the cache if the allocator may reserve so much; None if it fails even so.

    The last step of the trace is repeated: most steps settle, as the segments reserved after a release are larger and
    serve the next step.

    >>> step = [Event("alloc", 1, 30 << 20), Event("free", 1, 30 << 20), Event("alloc", 2, 40 << 20)]
    >>> trace = Trace(8, "cuda", "fake", (*step, Event("free", 2, 40 << 20)))
    >>> [retries_within(trace, AllocatorSettings(), mib << 20) for mib in (70, 40, 39)]
    [Retries(at_first=0, per_step=0.0), Retries(at_first=1, per_step=0.0), None]
    """
    body, again = _last_step(trace.only("high").events)
    repeated = [next(again, []) for _ in range(_SETTLING + _COUNTED)]
    events = [*body, *(event for step in repeated for event in step)]
    steps = Steps(
        replace(trace, events=tuple(events), kernels=(), scratch_spans=()),
        replace(settings, capacity_bytes=capacity_bytes),
    )
    if steps.allocator is None or not repeated[-1]:
        return None
    at_first, settled = 0, len(events) - _COUNTED * len(repeated[-1])
    for place, _ in enumerate(steps, 1):
        if place == settled:
            at_first = steps.allocator.retries
    if steps.out_of_memory_event is not None:
        return None
    return Retries(at_first, (steps.allocator.retries - at_first) / _COUNTED)


def _last_step(events: Sequence[Event]) -> tuple[Sequence[Event], Iterator[list[Event]]]:
    """The events up to the end of the last step, and that step again and again; never if its blocks do not match.

    A trace ends by freeing all that is left. Here a block that the step leaves, such as a gradient, stays if the step
    has freed one of its kind that was left by the step before.
    """
    end = next((place for place in range(len(events), 0, -1) if events[place - 1].action == "alloc"), 0)
    body = [*events[:end]]
    step = [event for event in body if event.step == body[-1].step]
    made = {event.block for event in step if event.action == "alloc"}
    taken, heirs = defaultdict[tuple[int, str, int], list[int]](list), dict[int, int]()
    for event in step:
        if event.action == "free" and event.block not in made:
            taken[event.nbytes, event.part, event.stream].append(event.block)
    for event in events[end:]:
        of_kind = taken[event.nbytes, event.part, event.stream]
        if event.block in made and of_kind:
            heirs[of_kind.pop()] = event.block
        elif event.block in made:
            body.append(event)
            step.append(event)
    return body, iter(()) if any(taken.values()) else _repeated(step, made, heirs)


def _repeated(step: list[Event], made: set[int], heirs: Mapping[int, int]) -> Iterator[list[Event]]:
    fresh, names = count(1 + max((event.block for event in step), default=0)), {block: block for block in made}
    while True:
        before, names = names, {block: next(fresh) for block in made}
        at = names | {gone: before[stays] for gone, stays in heirs.items()}
        yield [event._replace(block=at[event.block]) for event in step]
