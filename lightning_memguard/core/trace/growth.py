"""Traces of one step at a few small sizes -> the Trace at any size.

Every event's bytes are a polynomial in the batch size: constant for what belongs to the model, affine for nearly all
that belongs to the batch, quadratic where samples meet samples (a contrastive loss's n x n matrix). So the events are
fitted, exactly and one by one, never the peaks: a peak is a maximum over moments, which is not a polynomial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil

from lightning_memguard.core.trace.scratch import Scratch
from lightning_memguard.core.trace.trace import Event, Kernel, ScratchSpan, Trace, moments_of, scratch_events
from lightning_memguard.errors import CannotTraceError

_Coefficients = tuple[Fraction, ...]  # c[0] + c[1] n + c[2] n^2


@dataclass(frozen=True)
class Growth:
    """A trace, and how its events grow with the batch size.

    Attributes:
        template: the trace at one of the sizes that were captured.
        sizes: the batch sizes that were captured.
        coefficients: by position in the template, for each event whose bytes depend on the batch size.
        kernels: by kernel of the template, for each of its numbers that depends on the batch size. Scratch follows
            rules that are no polynomials; the numbers they are given grow like everything else.
        same: by kernel of the template, the first one called the same way at every size; empty if each is its own.
    """

    template: Trace
    sizes: tuple[int, ...]
    coefficients: dict[int, _Coefficients]
    kernels: dict[int, dict[int, _Coefficients]] = field(default_factory=dict)
    same: tuple[int, ...] = ()

    @property
    def degree(self) -> int:
        """Highest power of the batch size in any event."""
        kernels = (coefficients for numbers in self.kernels.values() for coefficients in numbers.values())
        return max((len(coefficients) - 1 for coefficients in (*self.coefficients.values(), *kernels)), default=0)

    def at(self, batch_size: int) -> Trace:
        """The trace of the same step at another batch size."""
        if batch_size == self.template.batch_size:
            return self.template
        events = list(self.template.events)
        sizes: dict[_Coefficients, int] = {}
        for position, coefficients in self.coefficients.items():
            nbytes = sizes.get(coefficients)
            if nbytes is None:
                nbytes = sizes[coefficients] = _evaluate(coefficients, batch_size)
            event = events[position]
            events[position] = Event(event.action, event.block, nbytes, *event[3:])
        if not self.kernels:
            return replace(self.template, batch_size=batch_size, events=tuple(events))
        return self._with_scratch(batch_size, events)

    def _with_scratch(self, batch_size: int, events: list[Event]) -> Trace:
        firsts = self.same or range(len(self.template.kernels))
        grown = {index: self._kernel(index, self.template.kernels[index], batch_size) for index in set(firsts)}
        known: dict[int, Scratch] = {}
        written: list[Event] = []
        scratch_spans: list[ScratchSpan] = []
        done = blocks = 0
        for start, end, index, place, like in self.template.scratch_spans:
            written += events[done:start]
            done = end
            first = firsts[index]
            if first not in known:
                known[first] = grown[first].scratch(grown[first].numbers)
            scratch = scratch_events(moments_of(known[first], place), -1 - blocks, like)
            blocks += len(scratch) // 2
            scratch_spans.append(ScratchSpan(len(written), len(written) + len(scratch), index, place, like))
            written += scratch
        written += events[done:]
        return replace(
            self.template,
            batch_size=batch_size,
            events=tuple(written),
            kernels=tuple(grown[first] for first in firsts),
            scratch_spans=tuple(scratch_spans),
        )

    def _kernel(self, index: int, kernel: Kernel, batch_size: int) -> Kernel:
        growing = self.kernels.get(index)
        if growing is None:
            return kernel
        numbers = list(kernel.numbers)
        for place, coefficients in growing.items():
            numbers[place] = _evaluate(coefficients, batch_size)
        return replace(kernel, numbers=tuple(numbers))


def grow(traces: Sequence[Trace]) -> Growth:
    """Fit each event's bytes to the batch size, from traces of the same step at two or more sizes.

    Two sizes give affine growth, unchecked; three check it, and find squares; a fourth checks the squares.

    Args:
        traces: at different batch sizes, in any order.

    Returns:
        The growth, which reproduces every trace it was made from.

    Raises:
        CannotTraceError: there are fewer than two traces, or they differ in more than bytes, or they do not grow as a
            polynomial of degree two.
    """
    ordered = sorted({trace.batch_size: trace for trace in traces}.values(), key=lambda trace: trace.batch_size)
    sizes = tuple(trace.batch_size for trace in ordered)
    if len(sizes) < 2:
        raise CannotTraceError(f"Growth needs traces at two batch sizes or more; got {list(sizes)}.")
    positions = [_without_scratch(trace) for trace in ordered]
    outlines = [[trace.events[at] for at in kept] for trace, kept in zip(ordered, positions, strict=True)]
    _check_same_events(ordered, outlines)
    coefficients: dict[int, _Coefficients] = {}
    known: dict[tuple[int, ...], _Coefficients] = {}
    for position, rows in zip(positions[-1], zip(*outlines, strict=True), strict=True):
        nbytes = tuple([row.nbytes for row in rows])
        if min(nbytes) == max(nbytes):
            continue
        if nbytes not in known:
            known[nbytes] = _fit(sizes, nbytes, rows[0])
        coefficients[position] = known[nbytes]
    same = _same_kernels(ordered)
    return Growth(ordered[-1], sizes, coefficients, _grow_kernels(sizes, ordered, set(same)), same)


def _without_scratch(trace: Trace) -> list[int]:
    """Positions of the events that are not a kernel's scratch."""
    kept: list[int] = []
    done = 0
    for span in trace.scratch_spans:
        kept += range(done, span.start)
        done = span.end
    return [*kept, *range(done, len(trace.events))]


def _same_kernels(traces: Sequence[Trace]) -> tuple[int, ...]:
    """For each kernel the first one that was called the same way at all sizes: layers repeat themselves."""
    firsts: dict[tuple[Kernel, ...], int] = {}
    calls = zip(*(trace.kernels for trace in traces), strict=True)
    return tuple([firsts.setdefault(kernels, index) for index, kernels in enumerate(calls)])


def _grow_kernels(
    sizes: tuple[int, ...], traces: Sequence[Trace], firsts: set[int]
) -> dict[int, dict[int, _Coefficients]]:
    found: dict[int, dict[int, _Coefficients]] = {}
    known: dict[tuple[int, ...], _Coefficients] = {}
    for index, kernels in enumerate(zip(*(trace.kernels for trace in traces), strict=True)):
        if index not in firsts or len({kernel.numbers for kernel in kernels}) == 1:
            continue
        for place, numbers in enumerate(zip(*(kernel.numbers for kernel in kernels), strict=True)):
            if min(numbers) != max(numbers):
                if numbers not in known:
                    known[numbers] = _fit(sizes, numbers, traces[0].events[0])
                found.setdefault(index, {})[place] = known[numbers]
    return found


def _check_same_events(traces: Sequence[Trace], outlines: Sequence[Sequence[Event]]) -> None:
    first = traces[0]
    for other, events in zip(traces[1:], outlines[1:], strict=True):
        for mine, theirs in zip(outlines[0], events, strict=False):
            if mine[:2] != theirs[:2] or mine[3:-1] != theirs[3:-1]:  # the line may differ, as blocks are built by size
                raise _differ(first, other, f"{_words(mine)} in one is {_words(theirs)} in the other")
        if len(outlines[0]) != len(events):
            raise _differ(first, other, f"{len(outlines[0])} events versus {len(events)}")
        if [kernel.rest for kernel in first.kernels] != [kernel.rest for kernel in other.kernels]:
            raise _differ(first, other, "its kernels get other arguments")


def _differ(first: Trace, other: Trace, how: str) -> CannotTraceError:
    sizes = f"batch sizes {first.batch_size} and {other.batch_size}"
    return CannotTraceError(f"The step runs differently at {sizes}: {how}.")


def _words(event: Event) -> str:
    return f"{event.action} by {event.operator or 'nothing'} in {event.module or 'the step'} ({event.phase})"


def _fit(sizes: tuple[int, ...], nbytes: tuple[int, ...], event: Event) -> _Coefficients:
    for degree in range(1, min(3, len(sizes))):
        coefficients = _interpolate(sizes[: degree + 1], nbytes[: degree + 1])
        if all(_evaluate(coefficients, n) == b for n, b in zip(sizes, nbytes, strict=True)) and coefficients[-1] > 0:
            return coefficients
    pairs = ", ".join(f"{b} B at {n}" for n, b in zip(sizes, nbytes, strict=True))
    raise CannotTraceError(f"The bytes of {_words(event)} are not linear or quadratic in the batch size: {pairs}.")


def _interpolate(sizes: tuple[int, ...], nbytes: tuple[int, ...]) -> _Coefficients:
    slope = Fraction(nbytes[1] - nbytes[0], sizes[1] - sizes[0])
    if len(sizes) == 2:
        return (nbytes[0] - slope * sizes[0], slope)
    # Newton's divided differences, written out in powers of n
    next_slope = Fraction(nbytes[2] - nbytes[1], sizes[2] - sizes[1])
    bend = (next_slope - slope) / (sizes[2] - sizes[0])
    return (
        nbytes[0] - slope * sizes[0] + bend * sizes[0] * sizes[1],
        slope - bend * (sizes[0] + sizes[1]),
        bend,
    )


def _evaluate(coefficients: _Coefficients, batch_size: int) -> int:
    total = Fraction(0)
    for coefficient in reversed(coefficients):
        total = total * batch_size + coefficient
    return max(0, ceil(total))
