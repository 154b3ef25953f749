"""Earlier measurements of a step -> its footprint, corrected, and with a narrower range near the sizes measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_memguard.core.replay.footprint import Footprint, Peak

# Of published runs of one step on one GPU (`benchmarks/accuracy.py`, the half of the models that these were chosen on):
# nine of ten corrected peaks are this near to the measured one if the sizes are, and a correction helps up to the far
# distance, in doublings of the batch size. Beyond it, kernels may be others.
_NEAR, _FAR = 0.25, 1.0
_WIDTH = 0.035


@dataclass(frozen=True)
class Sighting:
    """A peak on the device that was predicted, without any correction, and the one that was measured, in bytes."""

    batch_size: int
    predicted_bytes: int
    measured_bytes: int
    runs: int = 1

    @property
    def ratio(self) -> float:
        """``measured / predicted``."""
        return self.measured_bytes / self.predicted_bytes


@dataclass(frozen=True)
class Learned:
    """What is known from earlier runs of a step on a GPU.

    Attributes:
        step: the signature of the step, see `lightning_memguard.core.trace.signature`.
        sightings: what was measured, one for each batch size.
        where: the GPU, in words.
        notes: on what could not be used, for the footprint's.
    """

    step: str
    sightings: tuple[Sighting, ...] = ()
    where: str = "this GPU"
    notes: tuple[str, ...] = ()

    def corrected(self, footprint: Footprint) -> Footprint:
        """Correct the reserved and total peak of a footprint, and its range, by the measurements at the nearest sizes.

        Near them the whole error is corrected; the farther away, the less, and the more of the predicted range stays.
        """
        size, footprint = footprint.batch_size, replace(footprint, notes=(*footprint.notes, *self.notes))
        near = sorted(self.sightings, key=lambda each: _distance(each, size))
        if not near or footprint.is_partial or footprint.correction_bytes:
            return footprint
        doubt = (_distance(near[0], size) - _NEAR) / (_FAR - _NEAR)
        if doubt >= 1:
            return footprint
        doubt = max(0.0, doubt)
        before = footprint.peak_device_bytes
        peak = int(before * self._ratio(size) ** (1 - doubt))
        low = footprint.low.device_bytes if footprint.low else before
        high = footprint.high.device_bytes if footprint.high else before
        low = min(peak, int((1 - doubt) * (1 - _WIDTH) * peak + doubt * low))
        high = max(peak, int((1 - doubt) * (1 + _WIDTH) * peak + doubt * high))
        used = [each for each in near if _distance(each, size) < _FAR]
        return replace(
            _with_peak(footprint, peak),
            low=_moved(footprint.low or _peak(footprint), low),
            high=_moved(footprint.high or _peak(footprint), high),
            yielding_bytes=min(footprint.yielding_bytes, high - peak),
            correction_bytes=peak - before,
            learned_from=f"{(runs := sum(each.runs for each in used))} earlier run{'s' * (runs > 1)} on {self.where}",
        )

    def _ratio(self, size: int) -> float:
        """The ratio at a size: between two that were measured, on a line over the logarithm of the size."""
        below = max((s for s in self.sightings if s.batch_size <= size), key=lambda s: s.batch_size, default=None)
        above = min((s for s in self.sightings if s.batch_size >= size), key=lambda s: s.batch_size, default=None)
        if below is None or above is None or below is above:
            return (below or above or self.sightings[0]).ratio
        place = _distance(below, size) / (_distance(below, size) + _distance(above, size))
        return math.exp((1 - place) * math.log(below.ratio) + place * math.log(above.ratio))


def range_after(measured_bytes: int) -> tuple[int, int]:
    """The range of the peak of later epochs of a run that has taken this many bytes so far."""
    return int((1 - _WIDTH) * measured_bytes), int((1 + _WIDTH) * measured_bytes)


def _distance(sighting: Sighting, size: int) -> float:
    return abs(math.log2(size / sighting.batch_size))


def _peak(footprint: Footprint) -> Peak:
    return Peak(footprint.peak_allocated_bytes, footprint.peak_reserved_bytes, footprint.peak_device_bytes)


def _moved(peak: Peak, device_bytes: int) -> Peak:
    reserved = peak.reserved_bytes + device_bytes - peak.device_bytes
    return Peak(min(peak.allocated_bytes, reserved), reserved, device_bytes)


def _with_peak(footprint: Footprint, device_bytes: int) -> Footprint:
    """Return the footprint with another peak: what is reserved differs, and what is allocated if that no longer fits.

    Less scratch than predicted is the likely cause; what is missing beyond it is taken from what comes and goes.
    """
    moved = _moved(_peak(footprint), device_bytes)
    parts, missing = dict(footprint.parts), footprint.peak_allocated_bytes - moved.allocated_bytes
    for part in ("workspaces", "temporaries", "activations", *parts):
        less = min(missing, parts.get(part, 0))
        missing -= less
        if less:
            parts[part] -= less
    return replace(
        footprint,
        peak_allocated_bytes=moved.allocated_bytes,
        peak_reserved_bytes=moved.reserved_bytes,
        peak_device_bytes=device_bytes,
        parts=parts,
    )
