"""Steps on batches of several shapes -> Epoch: what the allocator holds as its cache lives on from step to step.

A step's peak is that of one shape. But the cache keeps the blocks of earlier shapes, which serve few others: over an
epoch it grows to several times the largest step, or is released again and again. So each step is replayed in the same
allocator, under PyTorch's own settings and, next to it, under others.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, count
from typing import NamedTuple

from lightning_memguard.core.replay.recurring import RecurringStep, StepSequence
from lightning_memguard.core.replay.replay import Steps
from lightning_memguard.core.replay.settings import VARIABLE, AllocatorSettings
from lightning_memguard.core.trace.scratch import up
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.units import format_bytes


class Shape(NamedTuple):
    """A batch: its samples, and the length that they are padded to."""

    batch_size: int
    length: int


@dataclass(frozen=True)
class EpochRun:
    """A run of steps in one allocator.

    Attributes:
        change: what differs from the run as it is, as in ``"with expandable_segments:True"``; empty for that one.
        how: what to do for it.
        steps: how many were replayed.
        peak_reserved_bytes: the most that was reserved; if a step did not fit, with what it was refused.
        grew_at: the step in which that was first so; the first is 1.
        retries: how often the whole cache was released (``num_alloc_retries``).
        releases: how many segments were given back to the device, in all; each makes the step wait for the device.
        failed_at: the step that did not fit, even so; None if all did.
    """

    change: str
    how: str
    steps: int
    peak_reserved_bytes: int
    grew_at: int
    retries: int
    releases: int
    failed_at: int | None

    @property
    def text(self) -> str:
        """Say how it goes, as in ``"9.1 GiB with expandable_segments:True"``."""
        if self.failed_at is not None:
            return f"{self.change} step {self.failed_at} does not fit"
        rate = 100 * self.retries / self.steps
        waits = f", with {rate:.{0 if rate >= 9.5 else 1}f} releases of the cache in 100 steps" if rate else ""
        return f"{format_bytes(self.peak_reserved_bytes)}{f' {self.change}' if self.change else ''}{waits}"


@dataclass(frozen=True)
class Epoch:
    """A cache that grows over steps on batches of several shapes, and what keeps it smaller.

    Attributes:
        shortest: the shortest of the lengths.
        longest: the longest.
        run: the steps as they are.
        others: the same steps under other settings, in another order, or padded; what costs least comes first.
        settled: whether nothing new happened any more, or these were all steps; else the time was up.
    """

    shortest: int
    longest: int
    run: EpochRun
    others: tuple[EpochRun, ...] = ()
    settled: bool = True

    @property
    def fits(self) -> bool:
        """Whether no step fails."""
        return self.run.failed_at is None

    @property
    def remedy(self) -> EpochRun | None:
        """A change that helps, with which the epoch fits, and that needs little; None if there is none."""
        better = [each for each in self.others if each.failed_at is None and (not self.fits or self._helps(each))]
        calm = [each for each in better if not each.releases] or better
        least = min((each.peak_reserved_bytes for each in calm), default=0)
        return next((each for each in calm if each.peak_reserved_bytes <= _ABOUT * least), None)

    def _helps(self, other: EpochRun) -> bool:
        if other.failed_at is not None:
            return False
        return other.releases < self.run.releases or _ABOUT * other.peak_reserved_bytes < self.run.peak_reserved_bytes

    @property
    def text(self) -> str:
        """The epoch in one sentence without a full stop."""
        run, others = self.run, [each.text for each in self.others if not self.fits or self._helps(each)]
        found = f"the cache grows to {run.text} by step {run.grew_at}"
        if not self.fits:
            found = f"step {run.failed_at} runs out of memory, as what is cached of others does not serve it"
        elif run.retries:
            found = f"the cache fills {run.text}, first in step {run.grew_at}"
        elif not self.settled:
            found += f" of {run.steps}, and may grow further"
        compared = f" ({'; '.join(others)})" if others else ""
        return f"over an epoch of lengths {self.shortest}..{self.longest} {found}{compared}"


_ABOUT = 1.1


# -- replaying

TraceAt = Callable[[Shape], Trace]
"""The trace of the step on batches of a shape."""

_MULTIPLE = 64
_QUIET = 200  # so many steps, and as many as before, in which nothing new happens, and the run is over
_KEPT = 64  # steps of which the events are kept, for shapes that come again


class Padding(NamedTuple):
    """How samples may be padded further: in words, what to do for it, and the length for each length."""

    to: str
    how: str
    pad: Callable[[int], int]


def to_multiples(longest: int) -> Padding:
    """Pad to multiples of 64, or to the longest length."""
    how = f"pad the samples to multiples of {_MULTIPLE} (pad_to_multiple_of={_MULTIPLE})"
    return Padding(f"to multiples of {_MULTIPLE}", how, lambda length: min(up(length, _MULTIPLE), max(length, longest)))


def in_random_order(shapes: Sequence[Shape]) -> Iterator[Shape]:
    """Batches in a new order again and again, as a loader shuffles them."""
    draw = random.Random(0)  # noqa: S311 - the same in each process
    while True:
        yield from draw.sample(shapes, len(shapes))


def replay_epoch(
    shapes: Iterable[Shape],
    trace_at: TraceAt,
    settings: AllocatorSettings,
    *,
    most_seconds: float = 30.0,
    longest: Shape | None = None,
    padding: Padding | None = None,
) -> Epoch:
    """Replay steps on batches of several shapes until nothing new happens.

    Args:
        shapes: the batches, one at least, in the order that they come; perhaps without an end.
        trace_at: the trace of the step on such a batch.
        settings: the allocator's, of kind ``"cuda"``; with a capacity, the cache is released to stay within it.
        most_seconds: no step is begun later.
        longest: the batch that takes the most, if it may come first.
        padding: how the samples may be padded further.

    Raises:
        CannotTraceError: the step frees what it does not leave to the next, so that it is not known how it recurs.
    """
    numbers = count()

    @lru_cache(_KEPT)
    def step_at(shape: Shape) -> RecurringStep:
        step = RecurringStep.of(trace_at(shape).only("point"))
        if step is None:
            raise CannotTraceError("it is not known how the step recurs: it frees what it does not leave to the next")
        return step.apart(next(numbers))

    orders = _orders(settings, longest, padding)
    until, lengths = time.monotonic() + most_seconds, set[int]()
    last_new, settled = 0, True
    for number, shape in enumerate(shapes, 1):
        lengths.add(shape.length)
        if any([order.go_on(shape, step_at) for order in orders]):  # noqa: C419 - each goes on
            last_new = number
        if number - last_new >= max(_QUIET, last_new) or all(order.is_over for order in orders):
            break
        if time.monotonic() > until:
            settled = False
            break
    runs = [run for order in orders for run in order.runs]
    own, *others = (run.found() for run in sorted(runs, key=lambda run: run.costs_time))
    return Epoch(min(lengths), max(lengths), own, tuple(others), settled)


def _orders(settings: AllocatorSettings, longest: Shape | None, padding: Padding | None) -> list[_Order]:
    own = [_Run("", "", _allocator(settings))]
    for text in _SETTINGS if settings.capacity_bytes else _SETTINGS[:1]:
        changed = settings.with_setting(text)
        if changed != settings:
            how = f"set {VARIABLE}={text} in the environment"
            own.append(_Run(f"with {text}", how, _allocator(changed.collecting()), costs_time=text in _SETTINGS[1:]))
    orders = [_Order(lambda length: length, own)]
    if padding is not None:
        orders.append(_Order(padding.pad, [_Run(f"padded {padding.to}", padding.how, _allocator(settings))]))
    if longest is not None:
        run = _Run("with the longest batch first", "let the longest batch come first", _allocator(settings))
        orders.append(_Order(lambda length: length, [run], longest))
    return orders


_SETTINGS = ("expandable_segments:True", "max_split_size_mb:128", "garbage_collection_threshold:0.8")


def _allocator(settings: AllocatorSettings) -> Steps:
    return Steps(Trace(0, "cuda", "fake", ()), settings)


Shapes = tuple[Shape, ...]
StepAt = Callable[[Shape], RecurringStep]


class _Done(NamedTuple):
    """A step as it was replayed: the state that it left, and what it released; see `EpochRun`."""

    state: int
    retries: int
    releases: int


@dataclass
class _Run:
    """A run under way.

    Steps on a few shapes soon find the allocator as others have found it before. These are not replayed again, until
    one follows for which the allocator has to be brought to where the run is.
    """

    change: str
    how: str
    replay: Steps
    costs_time: bool = False
    steps: int = 0
    grew_at: int = 0
    peak_bytes: int = 0
    retries: int = 0
    releases: int = 0
    failed_at: int | None = None
    sequence: StepSequence = field(default_factory=StepSequence)
    states: dict[Hashable, int] = field(default_factory=dict)
    state: int = 0
    known: dict[tuple[int, Shapes], _Done] = field(default_factory=dict)
    ahead: list[tuple[int, Shapes]] = field(default_factory=list)  # steps that lead from the allocator's state to this

    def go_on(self, shapes: Shapes, step_at: StepAt) -> bool:
        """Run a step, or two at first, and return whether anything new has happened."""
        if self.failed_at is not None:
            return False
        self.steps, had_retries = self.steps + 1, self.retries > 0
        if (self.state, shapes) in self.known:
            self.ahead.append((self.state, shapes))
        else:
            self.known[self.state, shapes] = self._replayed(shapes, step_at)
        done = self.known[self.state, shapes]
        self.state = done.state
        self._forget_detours()
        self.retries += done.retries
        self.releases += done.releases
        assert self.replay.allocator is not None
        grown = self.replay.allocator.peak_reserved_bytes > self.peak_bytes
        if grown:
            self.grew_at, self.peak_bytes = self.steps, self.replay.allocator.peak_reserved_bytes
        return grown or (self.retries > 0) != had_retries

    def _replayed(self, shapes: Shapes, step_at: StepAt) -> _Done:
        """Replay a step in the allocator, after those that lead to it."""
        for _, before in self.ahead:
            self._replay(before, step_at)
        self.ahead = []
        return self._replay(shapes, step_at)

    def _replay(self, shapes: Shapes, step_at: StepAt) -> _Done:
        allocator = self.replay.allocator
        assert allocator is not None, "exact memory keeps nothing between steps"
        retries, actions = allocator.retries, len(allocator.segment_actions)
        for _ in self.replay.go_on(chain.from_iterable(self.sequence.events_of(step_at(each)) for each in shapes)):
            pass
        refused = self.replay.out_of_memory_event
        if refused is not None:
            self.failed_at = self.steps
            allocator.alloc_beyond(refused.nbytes, refused.stream)
        state = self.replay.state_with({} if refused else self.sequence.left)
        releases = sum(each.action == "segment_free" for each in allocator.segment_actions[actions:])
        number = self.states.setdefault(state, len(self.states) + 1)
        return _Done(number, allocator.retries - retries, releases)

    def _forget_detours(self) -> None:
        """Leave out steps that came back to a state."""
        came_by = [state for state, _ in self.ahead]
        if self.state in came_by:
            del self.ahead[came_by.index(self.state) :]

    def found(self) -> EpochRun:
        counts = self.steps, self.peak_bytes, self.grew_at, self.retries, self.releases
        return EpochRun(self.change, self.how, *counts, self.failed_at)


@dataclass
class _Order:
    """Steps in an order of their own, or padded so, and the runs that replay them."""

    pad: Callable[[int], int]
    runs: list[_Run]
    first: Shape | None = None

    @property
    def is_over(self) -> bool:
        return all(run.failed_at for run in self.runs)

    def go_on(self, shape: Shape, step_at: StepAt) -> bool:
        shapes: Shapes = (shape._replace(length=self.pad(shape.length)),)
        if self.first is not None:
            shapes, self.first = (self.first, *shapes), None
        return any([run.go_on(shapes, step_at) for run in self.runs])  # noqa: C419 - each goes on
