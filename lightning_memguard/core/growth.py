"""Traces of one step at a few small sizes -> the Trace at any size.

Every event's bytes are a polynomial in the batch size: constant for what belongs to the model, affine for nearly all
that belongs to the batch, quadratic where samples meet samples (a contrastive loss's n x n matrix). So the events are
fitted, exactly and one by one, never the peaks: a peak is a maximum over moments, and kinked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from lightning_memguard.core.trace import Event, Trace
from lightning_memguard.errors import CannotTraceError

_Coefficients = tuple[Fraction, ...]  # c[0] + c[1] n + c[2] n^2


@dataclass(frozen=True)
class Growth:
    """A trace whose events know how they grow with the batch size.

    Attributes:
        template: the trace at one of the sizes that were captured.
        sizes: the batch sizes that were captured.
        coefficients: by position in the template, for each event whose bytes depend on the batch size.
    """

    template: Trace
    sizes: tuple[int, ...]
    coefficients: dict[int, _Coefficients]

    @property
    def degree(self) -> int:
        """Highest power of the batch size in any event."""
        return max((len(coefficients) - 1 for coefficients in self.coefficients.values()), default=0)

    def at(self, batch_size: int) -> Trace:
        """Write out the trace of the same step at another batch size."""
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
        return replace(self.template, batch_size=batch_size, events=tuple(events))


def grow(traces: Sequence[Trace]) -> Growth:
    """Fit each event's bytes to the batch size, from traces of the same step at two or more sizes.

    Two sizes give affine growth, unchecked; three check it, and find squares; a fourth checks the squares.

    Args:
        traces: at different batch sizes, in any order.

    Returns:
        The growth, which gives back every trace it was made from.

    Raises:
        CannotTraceError: the traces are fewer than two, differ in more than bytes, or grow in no way that a
            polynomial of degree two describes.
    """
    ordered = sorted({trace.batch_size: trace for trace in traces}.values(), key=lambda trace: trace.batch_size)
    sizes = tuple(trace.batch_size for trace in ordered)
    if len(sizes) < 2:
        raise CannotTraceError(f"Growth needs traces at two batch sizes or more; got {list(sizes)}.")
    _check_same_events(ordered)
    template = ordered[-1]
    coefficients: dict[int, _Coefficients] = {}
    known: dict[tuple[int, ...], _Coefficients] = {}
    for position, rows in enumerate(zip(*(trace.events for trace in ordered), strict=True)):
        nbytes = tuple(row.nbytes for row in rows)
        if min(nbytes) == max(nbytes):
            continue
        if nbytes not in known:
            known[nbytes] = _fit(sizes, nbytes, rows[0])
        coefficients[position] = known[nbytes]
    return Growth(template, sizes, coefficients)


def _check_same_events(traces: Sequence[Trace]) -> None:
    first = traces[0]
    for other in traces[1:]:
        for mine, theirs in zip(first.events, other.events, strict=False):
            if mine[:2] != theirs[:2] or mine[3:] != theirs[3:]:
                raise CannotTraceError(
                    f"The step runs differently at batch sizes {first.batch_size} and {other.batch_size}: "
                    f"{_words(mine)} in one is {_words(theirs)} in the other."
                )
        if len(first) != len(other):
            raise CannotTraceError(
                f"The step runs differently at batch sizes {first.batch_size} and {other.batch_size}: "
                f"{len(first)} events against {len(other)}."
            )


def _words(event: Event) -> str:
    return f"{event.action} by {event.operator or 'nothing'} in {event.module or 'the step'} ({event.phase})"


def _fit(sizes: tuple[int, ...], nbytes: tuple[int, ...], event: Event) -> _Coefficients:
    for degree in range(1, min(3, len(sizes))):
        coefficients = _interpolate(sizes[: degree + 1], nbytes[: degree + 1])
        if all(_evaluate(coefficients, n) == b for n, b in zip(sizes, nbytes, strict=True)) and coefficients[-1] > 0:
            return coefficients
    pairs = ", ".join(f"{b} B at {n}" for n, b in zip(sizes, nbytes, strict=True))
    raise CannotTraceError(f"The bytes of {_words(event)} follow no line or square of the batch size: {pairs}.")


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
