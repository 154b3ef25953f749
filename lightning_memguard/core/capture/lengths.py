"""One step on batches of several lengths -> its curve, or its trace, at each of them, from captures at a few."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, product

from lightning_memguard.core.capture.capture import CaptureFailedError, capture, captures_of
from lightning_memguard.core.capture.curve import Curve, Terms
from lightning_memguard.core.capture.predict import Surveyor
from lightning_memguard.core.capture.program import Program
from lightning_memguard.core.replay.epoch import Epoch, Padding, Shape, in_random_order, replay_epoch, to_multiples
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.growth import Growth, first_alike, grow
from lightning_memguard.core.trace.lengths import LEAST_LENGTHS, ShapeGrowth, grow_by_length
from lightning_memguard.core.trace.scratch import up
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.errors import CannotTraceError

_PADDED = 32  # to multiples of this, at most


@dataclass(frozen=True)
class LengthSurveyor:
    """Runs a step at some of its lengths; see `Surveyor`.

    Attributes:
        programs: the step, by length.
        batch_size: the size asked for.
        terms: what turns a trace into a footprint.
    """

    programs: Mapping[int, Program]
    batch_size: int
    terms: Terms

    def survey(self) -> dict[int, Curve]:
        """Return the curve at each length.

        The lengths between those that were captured follow from these, as long as the step runs the same way there;
        where it does not, shorter and longer ones are looked at apart, and the last few are surveyed one by one. So are
        those that kernels pad, as attention does. A curve that follows from others is not proven at its length:
        `Surveyor.prove` compares it with a capture there.

        Raises:
            CannotTraceError: at a length, not even the states could be made.
        """
        lengths = sorted(self.programs)
        whole = [length for length in lengths if length % _PADDED == 0]
        return self._survey(whole) | self._survey([length for length in lengths if length % _PADDED])

    def survey_at(self, length: int) -> Curve:
        """Return the curve at one length, from captures there."""
        return Surveyor(self.programs[length]).survey(self.batch_size, self.terms)

    def _survey(self, lengths: Sequence[int]) -> dict[int, Curve]:
        if len(lengths) <= LEAST_LENGTHS:
            return {length: self.survey_at(length) for length in lengths}
        longest = self.survey_at(lengths[-1])
        if isinstance(longest.growth, Growth) and _follows_from_growth(longest):
            try:
                return self._grown(lengths, longest, longest.growth)
            except CannotTraceError:
                middle = len(lengths) // 2
                return self._survey(lengths[:middle]) | self._survey(lengths[middle:])
        return {length: self.survey_at(length) for length in lengths[:-1]} | {lengths[-1]: longest}

    def _grown(self, lengths: Sequence[int], longest: Curve, growth: Growth) -> dict[int, Curve]:
        last = len(lengths) - 1
        chosen = [lengths[round(last * part / (LEAST_LENGTHS - 1))] for part in range(LEAST_LENGTHS - 1)]
        sizes = growth.sizes if growth.degree > 1 else growth.sizes[:2]
        growths = _growths_of({length: self.programs[length] for length in chosen}, sizes)
        shapes = grow_by_length({**growths, lengths[-1]: growth})
        between = {
            length: replace(longest, growth=shapes.at(length), captured={}, proofs={}) for length in lengths[:-1]
        }
        return {**between, lengths[-1]: longest}


def _follows_from_growth(curve: Curve) -> bool:
    """Whether how the step grows is all there is to know of it: nothing depends on values, is drawn, or comes later."""
    others = curve.variants, curve.drawn, curve.ceiling, curve.floor, curve.unfrozen, curve.stopped, curve.gaps
    return curve.method == "fake" and not any(others) and not curve.compiles


# -- traces at any shape, of which the whole epoch is replayed


@dataclass(frozen=True)
class ShapeTraces:
    """The trace of a step at any shape.

    Attributes:
        known: by length, how the step grows there with the batch size, if it was captured at that length.
        regions: how it grows with both, up to a length; the shortest lengths first.
    """

    known: Mapping[int, Growth]
    regions: tuple[tuple[int, ShapeGrowth], ...] = ()

    def at(self, shape: Shape) -> Trace:
        """The trace at a shape."""
        if shape.length in self.known:
            return self.known[shape.length].at(shape.batch_size)
        region = next((each for longest, each in self.regions if shape.length <= longest), self.regions[-1][1])
        return region.at(shape.length).at(shape.batch_size)


@dataclass(frozen=True)
class ShapeSurveyor:
    """Captures a step at a few of its lengths, to follow it at all of them.

    Unlike the curves of a `LengthSurveyor`, traces between are not exact: kernels pad some lengths, which a polynomial
    does not. They are compared with a capture at the longest length.

    Attributes:
        program_at: the step on batches of a length.
        sizes: the batch sizes to capture at; one if no other is asked for.
    """

    program_at: Callable[[int], Program]
    sizes: tuple[int, ...]

    def survey(self, lengths: Collection[int]) -> ShapeTraces:
        """Return the traces at some lengths, and all between.

        Raises:
            CannotTraceError: the step runs differently at many of the lengths, or not at all.
        """
        wanted = sorted({*lengths})
        known: dict[int, Growth] = {}
        if len(wanted) <= _MOST_CAPTURED:
            self._capture(wanted, known)
            return ShapeTraces(known)
        self._capture([*_spread(wanted[0], wanted[-1]), wanted[-1]], known)
        found = ShapeTraces({}, tuple(self._regions(wanted[0], wanted[-1], known, _MOST_HALVED)))
        if not found.regions:
            raise CannotTraceError("the step runs differently at many of these lengths")
        predicted, captured = found.at(Shape(self.sizes[-1], wanted[-1])), known[wanted[-1]].template
        if abs(_allocated(predicted) / _allocated(captured) - 1) > _NEAR:
            raise CannotTraceError(f"what the step allocates at length {wanted[-1]} does not follow from other lengths")
        return replace(found, known=known)

    def _regions(
        self, shortest: int, longest: int, known: dict[int, Growth], halved: int
    ) -> list[tuple[int, ShapeGrowth]]:
        """Fit the step between two lengths; if it runs differently at some of them, in parts, where these can be."""
        points = _spread(shortest, longest)
        self._capture(points, known)
        try:
            return [(longest, grow_by_length({length: known[length] for length in points}))]
        except CannotTraceError:
            middle = math.isqrt(shortest * longest)
            if not halved or middle - shortest < LEAST_LENGTHS:
                return []  # the next region stands in for it
            first = self._regions(shortest, middle, known, halved - 1)
            return [*first, *self._regions(middle, longest, known, halved - 1)]

    def _capture(self, lengths: Collection[int], known: dict[int, Growth]) -> None:
        """Capture the step at the lengths that are not known yet."""
        known |= _growths_of({length: self.program_at(length) for length in lengths if length not in known}, self.sizes)


def _growths_of(programs: Mapping[int, Program], sizes: tuple[int, ...]) -> dict[int, Growth]:
    """Capture the step at some lengths and sizes, side by side, and return how it grows at each length."""
    found: dict[int, Growth] = {}
    with captures_of(*programs.values()) as captures:
        for program, size in product(programs.values(), sizes):
            captures.start(program, size, "fake")
        for length, program in programs.items():
            try:
                traces = [capture(program, size, "fake") for size in sizes]
            except CaptureFailedError as error:
                raise CannotTraceError(f"at length {length} {error}") from error
            alone = Growth(traces[0], sizes, {}, {}, first_alike([traces[0].kernels]))
            found[length] = grow(traces) if len(traces) > 1 else alone
    return found


_MOST_CAPTURED = 6  # lengths
_MOST_HALVED = 2  # regions
_GRAINS = (64, 8, 1)  # lengths that kernels do not pad, where there are enough of them
_NEAR = 0.01


def _spread(shortest: int, longest: int) -> list[int]:
    grain = next(each for each in _GRAINS if (longest - shortest) // each >= LEAST_LENGTHS or each == 1)
    first, last = up(shortest, grain) // grain, longest // grain
    return [grain * round(first + (last - first) * part / (LEAST_LENGTHS - 1)) for part in range(LEAST_LENGTHS)]


def _allocated(trace: Trace) -> int:
    return sum(event.nbytes for event in trace.events if event.action == "alloc" and event.case in ("", "point"))


MOST_SECONDS = 30.0  # of a replay
_TO_FIT = (4, 8)  # batch sizes, from which others follow


def epoch_of(
    program_at: Callable[[int], Program],
    settings: AllocatorSettings,
    shapes: Sequence[Shape],
    padding: Padding | None = None,
    *,
    most_steps: float = math.inf,
    most_seconds: float = math.inf,
) -> Epoch:
    """Replay an epoch, and after that the same batches in random orders, until nothing new happens.

    Args:
        program_at: the step on batches of a length.
        settings: the allocator's, with the capacity, if it is known.
        shapes: the batches of an epoch, in the order that they come.
        padding: how the samples may be padded further (default: to multiples of 64).
        most_steps: how many batches there are in all.
        most_seconds: of the replay, `MOST_SECONDS` at most.

    Raises:
        CannotTraceError: the step runs differently at many of the lengths, or it is not known how it recurs.
    """
    sizes = {shape.batch_size for shape in shapes}
    surveyor = ShapeSurveyor(program_at, tuple(sizes) if len(sizes) == 1 else _TO_FIT)
    lengths = {shape.length for shape in shapes}
    padding = padding or to_multiples(max(lengths))
    traces = surveyor.survey({*lengths, *map(padding.pad, lengths)})
    longest = max(shapes, key=lambda shape: (shape.batch_size * shape.length, shape.length))
    run: Iterable[Shape] = chain(shapes, in_random_order(shapes))
    run = run if most_steps == math.inf else islice(run, int(most_steps))
    return replay_epoch(
        run, traces.at, settings, most_seconds=min(most_seconds, MOST_SECONDS), longest=longest, padding=padding
    )
