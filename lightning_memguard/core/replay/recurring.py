"""Trace -> its last step as it runs again and again, also after steps on batches of other shapes: LaterSteps, Retries.

PyTorch puts the blocks of each step elsewhere, and what it does not split off a block counts as allocated; so steps
with the same requests differ by some MiB in their allocated peaks.

A step that does not fit with all that the allocator would like to cache runs all the same. PyTorch calls it a retry
(``num_alloc_retries``): it waits for the device, releases the cache and reserves again.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lightning_memguard.core.replay.replay import Replay, Steps
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Event, Trace

Name = tuple[object, ...]
"""A block by what asked for it in its step, which is the same at every shape."""


@dataclass(frozen=True)
class RecurringStep:
    """The last step of a trace, which may be of several batches.

    Attributes:
        until: the events up to its end; a trace may go on to free what is left.
        events: those of the step.
        left: blocks that it leaves to the next step, such as gradients, each by its name.
        taken: those of the step before that it frees.
    """

    until: Sequence[Event]
    events: Sequence[Event]
    left: Mapping[int, Name]
    taken: Mapping[int, Name]

    @classmethod
    def of(cls, trace: Trace, batches: int = 1) -> RecurringStep | None:
        """Read a step of so many batches; None if it does not recur, as it leaves other blocks than it frees.

        A block stays if the step has freed one like it that the step before had left; any other is freed at its end.
        """
        events = trace.events
        end = next((place for place in range(len(events), 0, -1) if events[place - 1].action == "alloc"), 0)
        if not end:
            return None
        until = [*events[:end]]
        step = [event for event in until if event.step > until[-1].step - batches]
        made = {event.block: event for event in step if event.action == "alloc"}
        gone = [event for event in step if event.action == "free" and event.block not in made]
        freed = {event.block for event in events if event.action == "free"}
        kept = [event for event in step if event.action == "alloc" and event.block not in freed]
        left = [*(event for event in events[end:] if event.block in made), *kept]
        arrived = {event.block for event in left if made[event.block].phase == "transfer"}  # of use to no step yet
        left, until, step = ([_as_batch(each, arrived) for each in several] for several in (left, until, step))
        stays, rest = _matched(gone, left, _names(until))
        if len(stays) < len(gone) or any(event.action == "alloc" for event in rest):
            return None
        left_as = {block: name for block, _, name in stays}
        return cls([*until, *rest], [*step, *rest], left_as, {block: name for _, block, name in stays})

    @functools.cached_property
    def passed_on(self) -> tuple[tuple[int, Name], ...]:
        """The places of its events on blocks that it leaves, or takes; all others are on blocks that it frees again."""
        names = {**self.taken, **self.left}
        return tuple((place, names[each.block]) for place, each in enumerate(self.events) if each.block in names)

    def apart(self, number: int) -> RecurringStep:
        """Return the step with blocks that no step of another number has."""
        more = number << 32

        def moved(events: Iterable[Event]) -> list[Event]:
            return [Event(event.action, event.block + more, *event[2:]) for event in events]

        left, taken = ({block + more: name for block, name in each.items()} for each in (self.left, self.taken))
        return RecurringStep(moved(self.until), moved(self.events), left, taken)


def _as_batch(event: Event, blocks: Collection[int]) -> Event:
    return event._replace(part="batch") if event.block in blocks else event


def _names(events: Iterable[Event]) -> dict[int, Name]:
    found: dict[int, Name] = {}
    seen = Counter[Name]()
    for event in events:
        if event.action == "alloc":
            asked = event.part, event.phase, event.module, event.operator, event.stream
            found[event.block] = (*asked, seen[(event.step, *asked)])
            seen[(event.step, *asked)] += 1
    return found


def _matched(
    gone: Sequence[Event], left: Sequence[Event], names: Mapping[int, Name]
) -> tuple[list[tuple[int, int, Name]], list[Event]]:
    """Match what a step leaves with what it freed of the step before, by name or else by kind; and return the rest."""
    by_name = {names[event.block]: event for event in gone}
    matched = [
        (event.block, like.block, names[event.block])
        for event in left
        if (like := by_name.get(names[event.block])) and like.nbytes == event.nbytes
    ]
    known = {block for pair in matched for block in pair[:2]}
    by_kind = defaultdict[tuple[int, str, int], list[int]](list)
    for event in gone:
        if event.block not in known:
            by_kind[event.nbytes, event.part, event.stream].append(event.block)
    rest = list[Event]()
    for event in left:
        of_kind = by_kind[event.nbytes, event.part, event.stream]
        if event.block not in known and of_kind:
            matched.append((event.block, of_kind.pop(), names[event.block]))
        elif event.block not in known:
            rest.append(event)
    return matched, rest


class StepSequence:
    """One step after another, as one list of events, each freeing what is left to it; steps that differ are `apart`."""

    def __init__(self) -> None:
        self._next_block = _PASSED_ON
        self._left: dict[Name, Event] | None = None

    @property
    def left(self) -> dict[Hashable, int]:
        """Blocks that the last step has left to the next one."""
        return {name: event.block for name, event in (self._left or {}).items()}

    def events_of(self, step: RecurringStep) -> list[Event]:
        """The events of the next step; before the first one, all that comes before it in its trace."""
        if self._left is None:
            self._left = {step.left[event.block]: event for event in step.events if event.block in step.left}
            return [*step.until]
        before, self._left, found, not_there = self._left, {}, [*step.events], list[int]()
        for place, name in step.passed_on:
            event, block = found[place], self._next_block
            if event.action == "alloc":
                self._next_block += 1
            elif like := before.pop(name, None):
                block = like.block
            else:  # the step before was another, and has left none
                not_there.append(place)
            found[place] = Event(event.action, block, *event[2:])
            if event.action == "alloc":
                self._left[name] = found[place]
        for place in reversed(not_there):
            del found[place]
        return [*found, *(event._replace(action="free") for event in before.values())]

    def end(self, stays: Collection[str]) -> list[Event]:
        """Free what the last step has left, but for these parts, as other work follows; the next step finds the rest.

        That is of no further step then, and has a number of its own.
        """
        left = self._left or {}
        gone = [event for event in left.values() if event.part not in stays]
        self._left = {name: event for name, event in left.items() if event.part in stays}
        return [event._replace(action="free") for event in gone]


_PASSED_ON = -1 << 62  # blocks from one step to the next; no trace has such numbers


@dataclass(frozen=True)
class LaterSteps:
    """A trace, and some more steps like its last.

    Attributes:
        replay: of them all.
        peaks: the allocated peak of the trace, and of each step after it.
    """

    replay: Replay
    peaks: tuple[int, ...]

    @classmethod
    def of(cls, steps: Steps, batches: int = 1) -> LaterSteps:
        """Run the steps of a trace to their end, and those after them if they recur, of so many batches each."""
        last = max((event.step for event in steps.trace.events), default=0)
        step = RecurringStep.of(steps.trace, batches) if steps.allocator and last >= batches else None
        if step is None:
            replay = Replay.of(steps)
            return cls(replay, (replay.peak_allocated_bytes,))
        sequence, events, changes, peaks = StepSequence(), list[Event](), list[int](), list[int]()
        added = list[int]()
        for _ in range(1 + _LATER):
            live, before = sum(changes), added
            events += sequence.events_of(step)
            added = [*steps.go_on(events[len(changes) :])]
            peaks.append(max(accumulate(added, initial=live)))
            changes += added
            if added == before or steps.out_of_memory_event is not None:  # it has settled, or cannot go on
                break
        return cls(Replay.of_run(steps, events, changes), tuple(peaks))


_LATER = 4  # after which few recorded trainings have a higher peak, and those by less than these steps differ
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
    trace = trace.only("high")
    step = RecurringStep.of(trace)
    steps, sequence = Steps(trace, replace(settings, capacity_bytes=capacity_bytes)), StepSequence()
    if steps.allocator is None or step is None:
        return None
    seen = []
    for _ in range(1 + _SETTLING + _COUNTED):
        for _ in steps.go_on(sequence.events_of(step)):
            pass
        if steps.out_of_memory_event is not None:
            return None
        seen.append(steps.allocator.retries)
    at_first = seen[_SETTLING]
    return Retries(at_first, (seen[-1] - at_first) / _COUNTED)
