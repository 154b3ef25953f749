"""Traces of one step at a few small sizes -> the Trace at any size.

Every event's bytes are a polynomial in the batch size: constant for what belongs to the model, affine for nearly all
that belongs to the batch, quadratic if samples meet samples (a contrastive loss's n x n matrix). So the events are
fitted, exactly and one by one, never the peaks: a peak is a maximum over moments, which is not a polynomial.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import ceil

from lightning_memguard.core.trace.scratch import Scratch
from lightning_memguard.core.trace.trace import CASES, Event, Kernel, ScratchSpan, Trace, moments_of, scratch_events
from lightning_memguard.core.trace.work import Group, WorkAt, groups_of
from lightning_memguard.errors import CannotTraceError

Coefficients = tuple[Fraction, ...]
"""Coefficients of a polynomial: ``c[0] + c[1] n + c[2] n^2``."""

_Fit = Callable[[tuple[int, ...], Event], Coefficients]


@dataclass(frozen=True)
class Growth:
    """A trace, and how its events grow with the batch size.

    Attributes:
        template: the trace at one of the sizes that were captured.
        sizes: the batch sizes that were captured.
        coefficients: by position in the template, for each event whose bytes depend on the batch size.
        kernels: by kernel of the template, for each of its numbers that depends on the batch size. Scratch follows
            rules that are not polynomials; the numbers they are given grow like everything else.
        same: by kernel of the template, the first one called the same way at every size.
        work: what the operators compute, grouped by how it grows.
    """

    template: Trace
    sizes: tuple[int, ...]
    coefficients: dict[int, Coefficients]
    kernels: dict[int, dict[int, Coefficients]]
    same: tuple[int, ...]
    work: tuple[Group, ...] = ()

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
        sizes: dict[int, int] = {}  # by identity: equal ones are shared, and fractions are slow to hash
        for position, coefficients in self.coefficients.items():
            nbytes = sizes.get(id(coefficients))
            if nbytes is None:
                nbytes = sizes[id(coefficients)] = _evaluate(coefficients, batch_size)
            event = events[position]
            events[position] = Event(event.action, event.block, nbytes, *event[3:])
        if not self.kernels:
            work = WorkAt(self.work, self.sizes, batch_size)
            return replace(self.template, batch_size=batch_size, events=tuple(events), work=work)
        return self._with_scratch(batch_size, events)

    def _with_scratch(self, batch_size: int, events: list[Event]) -> Trace:
        grown = {index: self._kernel(index, batch_size) for index in set(self.same)}
        known: dict[int, Scratch] = {}
        written: list[Event] = []
        scratch_spans: list[ScratchSpan] = []
        done = blocks = 0
        for start, end, index, place, like in self.template.scratch_spans:
            written += events[done:start]
            done = end
            first = self.same[index]
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
            kernels=tuple(grown[first] for first in self.same),
            scratch_spans=tuple(scratch_spans),
            work=WorkAt(self.work, self.sizes, batch_size),
        )

    def _kernel(self, index: int, batch_size: int) -> Kernel:
        kernel = self.template.kernels[index]
        numbers = list(kernel.numbers)
        for place, coefficients in self.kernels.get(index, {}).items():
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
    positions, outlines = outlines_of(ordered, "batch sizes", sizes)
    fit = partial(_fit, sizes, {})
    coefficients: dict[int, Coefficients] = {}
    for position, rows in zip(positions[-1], zip(*outlines, strict=True), strict=True):
        nbytes = tuple([row.nbytes for row in rows])
        if min(nbytes) != max(nbytes):
            coefficients[position] = fit(nbytes, rows[0])
    same = first_alike(trace.kernels for trace in ordered)
    work = groups_of([trace.work for trace in ordered])
    return Growth(ordered[-1], sizes, coefficients, _grow_kernels(ordered, set(same), fit), same, work)


def extrapolate(traces: Sequence[Trace], batch_size: int) -> Trace:
    """The largest of some traces as it would be at another size, if its events do not follow those of the others.

    What belongs to the batch is assumed to grow as it did between the two largest sizes: block by block if a module
    asked an operator for as many blocks at both, else as all that belongs to the same part did together. Its range
    grows with the distance: such a block may as well grow in proportion, as it does from one size alone; or not at all.

    Args:
        traces: one at least, in any order.
        batch_size: the size wanted.
    """
    *others, largest = sorted(traces, key=lambda trace: trace.batch_size)
    smaller = next((trace for trace in reversed(others) if trace.batch_size < largest.batch_size), None)
    steps = Fraction(batch_size - largest.batch_size, largest.batch_size - (smaller.batch_size if smaller else 0))
    before, now = (_by_request(trace) if trace else {} for trace in (smaller, largest))
    there, here = (_bytes_by_part(blocks) for blocks in (before, now))
    grown: dict[tuple[int, str], tuple[int, int]] = {}
    for request, blocks in now.items():
        known = before.get(request, [])
        for place, event in enumerate(blocks):
            if len(known) == len(blocks):
                more = Fraction(event.nbytes - known[place].nbytes)
            else:
                more = Fraction(event.nbytes * (here[event.part] - there[event.part]), here[event.part] or 1)
            likely = max(0, ceil(event.nbytes + max(Fraction(0), more) * steps))
            other = ceil(Fraction(event.nbytes * batch_size, largest.batch_size)) if smaller else event.nbytes
            grown[event.block, event.case] = likely, other
    events = list[Event]()
    for event in largest.events:
        likely, other = grown.get((event.block, event.case), (event.nbytes, event.nbytes))
        if event.case or likely == other:
            events.append(event._replace(nbytes=likely))
        else:
            by_case = zip(CASES[:3], sorted((likely, other, likely)), strict=True)
            events += [event._replace(nbytes=nbytes, case=case) for case, nbytes in by_case]
    pair = [trace for trace in (smaller, largest) if trace]
    work = WorkAt(groups_of([trace.work for trace in pair]), [trace.batch_size for trace in pair], batch_size)
    made = replace(largest, batch_size=batch_size, events=tuple(events), kernels=(), scratch_spans=(), batch=None)
    return replace(made, seconds=0.0, work=work)


_Request = tuple[object, ...]


def _by_request(trace: Trace) -> dict[_Request, list[Event]]:
    """Blocks that belong to the batch, by what asked for them."""
    found: dict[_Request, list[Event]] = {}
    for event in trace.events:
        if event.action == "alloc" and event.part in _OF_BATCH and event.phase not in _NOT_OF_BATCH:
            asked = (event.part, event.phase, event.step, event.module, event.operator, event.stream, event.case)
            found.setdefault(asked, []).append(event)
    return found


def _bytes_by_part(blocks: Mapping[_Request, Sequence[Event]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for event in itertools.chain.from_iterable(blocks.values()):
        total[event.part] += event.nbytes
    return total


_OF_BATCH = ("activations", "batch", "temporaries", "workspaces")
_NOT_OF_BATCH = ("setup", "optimizer", "averaging", "epoch end")  # phases


def without_scratch(trace: Trace) -> list[int]:
    """Positions of the events that are not a kernel's scratch."""
    kept: list[int] = []
    done = 0
    for span in trace.scratch_spans:
        kept += range(done, span.start)
        done = span.end
    return [*kept, *range(done, len(trace.events))]


def first_alike(calls_at: Iterable[Sequence[Hashable]]) -> tuple[int, ...]:
    """Return the first kernel that was called the same way at all sizes, for each kernel: layers repeat themselves.

    ``calls_at`` has the calls at each size, each as the arguments that it had.
    """
    firsts: dict[tuple[Hashable, ...], int] = {}
    return tuple([firsts.setdefault(calls, index) for index, calls in enumerate(zip(*calls_at, strict=True))])


def _grow_kernels(traces: Sequence[Trace], firsts: set[int], fit: _Fit) -> dict[int, dict[int, Coefficients]]:
    found: dict[int, dict[int, Coefficients]] = {}
    places = {span.kernel: span.like for span in traces[0].scratch_spans}
    for index, kernels in enumerate(zip(*(trace.kernels for trace in traces), strict=True)):
        if index in firsts and len({kernel.numbers for kernel in kernels}) > 1:
            for place, numbers in enumerate(zip(*(kernel.numbers for kernel in kernels), strict=True)):
                if min(numbers) != max(numbers):
                    found.setdefault(index, {})[place] = fit(numbers, places.get(index, traces[0].events[0]))
    return found


def outlines_of(traces: Sequence[Trace], what: str, sizes: Sequence[int]) -> tuple[list[list[int]], list[list[Event]]]:
    """Return the events of traces that are not a kernel's scratch: their positions, and the events.

    Args:
        traces: of one step.
        what: the name of the sizes at which they were captured, such as ``"batch sizes"``.
        sizes: of each.

    Raises:
        CannotTraceError: they differ in more than bytes; the error says where first.
    """
    first, positions = traces[0], [without_scratch(trace) for trace in traces]
    outlines = [[trace.events[at] for at in kept] for trace, kept in zip(traces, positions, strict=True)]
    for other, events, size in zip(traces[1:], outlines[1:], sizes[1:], strict=True):
        where = f"{what} {sizes[0]} and {size}"
        for mine, theirs in zip(outlines[0], events, strict=False):
            if mine[:2] != theirs[:2] or mine[3:-1] != theirs[3:-1]:  # the line may differ, as blocks are built by size
                raise _differ(where, f"first in {place_of(mine)}")
        if len(outlines[0]) != len(events):
            raise _differ(where, "at one it allocates more often")
        if [kernel.rest for kernel in first.kernels] != [kernel.rest for kernel in other.kernels]:
            raise _differ(where, "an operator gets other arguments")
    return positions, outlines


def _differ(where: str, how: str) -> CannotTraceError:
    return CannotTraceError(f"The step runs differently at {where}: {how}.")


def place_of(event: Event) -> str:
    """Describe an event's place in the step, such as ``encoder.layers.1 (forward, at train.py:12)``."""
    line = event.source.rpartition(":")[0]
    return f"{event.module or 'the step'} ({event.phase}{f', at {line}' if line else ''})"


def _fit(
    sizes: tuple[int, ...], known: dict[tuple[int, ...], Coefficients], nbytes: tuple[int, ...], event: Event
) -> Coefficients:
    if nbytes not in known:
        points = list(zip(sizes, nbytes, strict=True))
        coefficients = through(points)
        if not coefficients or coefficients[-1] <= 0:
            pairs = ", ".join(f"{b} B at {n}" for n, b in points)
            raise CannotTraceError(
                f"What {place_of(event)} allocates is not linear or quadratic in the batch size: {pairs}."
            )
        known[nbytes] = coefficients
    return known[nbytes]


def through(points: Sequence[tuple[int, Fraction | int]]) -> Coefficients:
    """The polynomial of least degree, two at most, through all points, exactly; empty if there is none."""
    for degree in range(min(3, len(points))):
        coefficients = _interpolate(points[: degree + 1])
        if all(value_at(coefficients, n) == b for n, b in points):
            return coefficients
    return ()


def _interpolate(points: Sequence[tuple[int, Fraction | int]]) -> Coefficients:
    """Newton's divided differences, written out in powers of n."""
    (n0, b0), *others = points
    if not others:
        return (Fraction(b0),)
    (n1, b1), *third = others
    slope = Fraction(b1 - b0) / (n1 - n0)
    if not third:
        return (b0 - slope * n0, slope)
    ((n2, b2),) = third
    bend = (Fraction(b2 - b1) / (n2 - n1) - slope) / (n2 - n0)
    return (b0 - slope * n0 + bend * n0 * n1, slope - bend * (n0 + n1), bend)


def value_at(coefficients: Coefficients, n: int) -> Fraction:
    """The value of a polynomial."""
    total = Fraction(0)
    for coefficient in reversed(coefficients):
        total = total * n + coefficient
    return total


def _evaluate(coefficients: Coefficients, batch_size: int) -> int:
    return max(0, ceil(value_at(coefficients, batch_size)))
