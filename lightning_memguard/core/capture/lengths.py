"""One step on batches of several lengths -> its curve at each of them, from captures at a few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_memguard.core.capture.capture import capture, captures_of
from lightning_memguard.core.capture.curve import Curve, Terms
from lightning_memguard.core.capture.predict import Surveyor
from lightning_memguard.core.capture.program import Program
from lightning_memguard.core.trace.growth import Growth, grow
from lightning_memguard.core.trace.lengths import LEAST_LENGTHS, grow_by_length
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
        for length in chosen:
            with captures_of(self.programs[length]) as captures:
                for size in sizes:
                    captures.start(self.programs[length], size, longest.method)
        growths = {lengths[-1]: growth}
        for length in chosen:
            growths[length] = grow([capture(self.programs[length], size, longest.method) for size in sizes])
        shapes = grow_by_length(growths)
        between = {
            length: replace(longest, growth=shapes.at(length), captured={}, proofs={}) for length in lengths[:-1]
        }
        return {**between, lengths[-1]: longest}


def _follows_from_growth(curve: Curve) -> bool:
    """Whether how the step grows is all there is to know of it: nothing depends on values, is drawn, or comes later."""
    others = curve.variants, curve.drawn, curve.ceiling, curve.floor, curve.unfrozen, curve.stopped, curve.gaps
    return curve.method == "fake" and not any(others) and not curve.compiles
