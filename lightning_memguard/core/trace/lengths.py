"""Growths of one step at a few lengths -> its Growth at any length: text, sound and sets have two sizes.

At each length, an event's bytes are a polynomial in the batch size n; its coefficients are polynomials in the length L.
Together they are the powers 1, n, L, nL, L^2, nL^2 (and those with n^2), which is what a step that pads its batch
allocates: nL for what belongs to tokens, nL^2 for attention that is written out, L^2 for a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from lightning_memguard.core.trace.growth import (
    Coefficients,
    Growth,
    first_alike,
    outlines_of,
    place_of,
    through,
    value_at,
    without_scratch,
)
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.errors import CannotTraceError

_Surface = tuple[Coefficients, ...]
"""For each power of the batch size, the polynomial in the length that is its coefficient."""

LEAST_LENGTHS = 4
"""So many lengths check a square."""


@dataclass(frozen=True)
class ShapeGrowth:
    """A step's events, and how they grow with the batch size and the length of the samples.

    Attributes:
        template: the growth at one of the lengths.
        lengths: those that it was fitted to.
        surfaces: by position in the template's trace, for each event whose bytes depend on either size.
        kernels: by kernel of the template, for each of its numbers that depends on either size; see `Growth`.
        same: by kernel of the template, the first one called the same way at every size.
    """

    template: Growth
    lengths: tuple[int, ...]
    surfaces: Mapping[int, _Surface]
    kernels: Mapping[int, Mapping[int, _Surface]]
    same: tuple[int, ...]

    def at(self, length: int) -> Growth:
        """The growth at another length, without the work of its operators, which is not fitted."""
        known: dict[int, Coefficients] = {}  # by identity, see `Growth.at`

        def coefficients(surface: _Surface) -> Coefficients:
            if id(surface) not in known:
                known[id(surface)] = tuple(value_at(each, length) for each in surface)
            return known[id(surface)]

        trace = self.template.template
        kernels = {
            index: {place: coefficients(surface) for place, surface in numbers.items()}
            for index, numbers in self.kernels.items()
        }
        events = {position: coefficients(surface) for position, surface in self.surfaces.items()}
        anywhere = replace(trace, batch_size=0, batch=None, seconds=0.0, work=())  # so that all of it is written again
        grown = Growth(anywhere, self.template.sizes, events, kernels, self.same)
        own = replace(grown.at(trace.batch_size), work=())
        moved = dict(zip(without_scratch(trace), without_scratch(own), strict=True))  # scratch may be other blocks here
        return replace(grown, template=own, coefficients={moved[place]: each for place, each in events.items()})


def grow_by_length(growths: Mapping[int, Growth]) -> ShapeGrowth:
    """Fit how a step grows with the length, exactly and event by event.

    Args:
        growths: by length, how the step grows with the batch size; of `LEAST_LENGTHS` or more.

    Returns:
        The growth in both sizes, which reproduces every one it was fitted to.

    Raises:
        CannotTraceError: there are too few lengths, or the step runs differently at them, or it does not grow as a
            polynomial of degree two.
    """
    lengths = tuple(sorted(growths))
    if len(lengths) < LEAST_LENGTHS:
        raise CannotTraceError(
            f"Growth with the length needs captures at {LEAST_LENGTHS} lengths or more; got {list(lengths)}."
        )
    ordered = [growths[length] for length in lengths]
    traces = [growth.template for growth in ordered]
    positions, outlines = outlines_of(traces, "lengths", lengths)
    _check_same_rest(lengths, traces)
    fit = _Fit(lengths, {})
    surfaces: dict[int, _Surface] = {}
    for places, rows in zip(zip(*positions, strict=True), zip(*outlines, strict=True), strict=True):
        by_length = [
            growth.coefficients.get(place, (Fraction(event.nbytes),))
            for growth, place, event in zip(ordered, places, rows, strict=True)
        ]
        if any(len(each) > 1 or each != by_length[0] for each in by_length):
            surfaces[places[-1]] = fit.surface(by_length, rows[-1])
    same = first_alike(growth.same for growth in ordered)
    return ShapeGrowth(ordered[-1], lengths, surfaces, _grow_kernels(ordered, set(same), fit), same)


def _check_same_rest(lengths: Sequence[int], traces: Sequence[Trace]) -> None:
    """Refuse what is not fitted: memory that batches leave behind, and assumptions that hold at some lengths."""
    for length, trace in zip(lengths, traces, strict=True):
        if trace.kept:
            raise CannotTraceError(f"At length {length}, each batch leaves memory behind.")
        if trace.notes != traces[0].notes:
            raise CannotTraceError(f"What is assumed at length {length} differs from what is at {lengths[0]}.")


@dataclass
class _Fit:
    """Fits coefficients by length; layers repeat themselves, so that few of them are new."""

    lengths: tuple[int, ...]
    known: dict[tuple[Coefficients, ...], _Surface]

    def surface(self, by_length: Sequence[Coefficients], event: Event) -> _Surface:
        """Fit what an event, or a kernel's number, has at each length."""
        key = tuple(by_length)
        if key not in self.known:
            powers = range(max(map(len, key)))
            columns = [[each[power] if power < len(each) else Fraction(0) for each in key] for power in powers]
            fitted = [through(list(zip(self.lengths, column, strict=True))) for column in columns]
            if not all(fitted):
                raise CannotTraceError(
                    f"What {place_of(event)} allocates is not linear or quadratic in the length: captured at "
                    f"{', '.join(map(str, self.lengths))}."
                )
            self.known[key] = tuple(fitted)
        return self.known[key]


def _grow_kernels(growths: Sequence[Growth], firsts: set[int], fit: _Fit) -> dict[int, dict[int, _Surface]]:
    found: dict[int, dict[int, _Surface]] = {}
    template = growths[-1].template
    places = {span.kernel: span.like for span in template.scratch_spans}
    for index in firsts:
        own = [(growth.kernels.get(growth.same[index], {}), growth.template.kernels[index]) for growth in growths]
        for place in range(len(template.kernels[index].numbers)):
            by_length = [grown.get(place, (Fraction(kernel.numbers[place]),)) for grown, kernel in own]
            if any(len(each) > 1 or each != by_length[0] for each in by_length):
                like = places.get(index, template.events[0])
                found.setdefault(index, {})[place] = fit.surface(by_length, like)
    return found
