"""Earlier measurements of a step -> its footprint, corrected, and with a narrower range near the sizes measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_memguard.core.replay.footprint import Doubt, Footprint, Peak

# Distances, in doublings of the batch size, up to which a measurement is trusted wholly and at all, and half the width
# of the range near it. They were chosen on published runs of half of the models (`benchmarks/shared/lives.py`): beyond
# a doubling, a correction does not make the error of the others smaller, as their kernels are others.
_NEAR, _FAR = 0.25, 1.0
_WIDTH = 0.04


@dataclass(frozen=True)
class Sighting:
    """A peak on the device that was predicted, without any correction, and the one that was measured, in bytes.

    ``seconds_ratio`` is the measured time of a step by the predicted one, if both are known.
    """

    batch_size: int
    predicted_bytes: int
    measured_bytes: int
    runs: int = 1
    seconds_ratio: float | None = None

    @property
    def ratio(self) -> float:
        """``measured / predicted``."""
        return self.measured_bytes / self.predicted_bytes


@dataclass(frozen=True)
class Learned:
    """Measurements of earlier runs of a step on a GPU.

    Attributes:
        step: the signature of the step, see `lightning_memguard.core.trace.trace.signature_of`.
        sightings: what was measured, one for each batch size.
        where: the GPU, in words.
        notes: on what could not be used, for the footprint's.
    """

    step: str
    sightings: tuple[Sighting, ...] = ()
    where: str = "this GPU"
    notes: tuple[str, ...] = ()

    def corrected(self, footprint: Footprint) -> Footprint:
        """Correct the reserved and total peak of a footprint, its range and time, by measurements at the nearest sizes.

        Near them the whole error is corrected; the farther away, the less, and the more of the predicted range stays.
        Measurements that disagree widen the range to hold what each of them tells.
        """
        size, footprint = footprint.batch_size, replace(footprint, notes=(*footprint.notes, *self.notes))
        used = [each for each in self.sightings if _distance(each, size) < _FAR]
        if not used or footprint.is_partial or footprint.correction_bytes:
            return footprint
        doubt = max(0.0, min(_distance(each, size) for each in used) - _NEAR) / (_FAR - _NEAR)
        before, ratios = footprint.peak_device_bytes, [each.ratio for each in used]
        peak = int(before * self._ratio(size) ** (1 - doubt))
        least, most = (1 - _WIDTH) * min(ratios) * before, (1 + _WIDTH) * max(ratios) * before
        low = min(peak, int((1 - doubt) * least + doubt * footprint.lowest.device_bytes))
        high = max(peak, int((1 - doubt) * most + doubt * footprint.highest.device_bytes))
        runs = sum(each.runs for each in used)
        times = sorted(each.seconds_ratio for each in used if each.seconds_ratio)
        found = _with_peak(footprint, peak)
        ends = _end(found, footprint.lowest, low), _end(found, footprint.highest, high)
        return replace(
            found,
            doubts=(Doubt("measurements", ends),),
            yielding_bytes=min(footprint.yielding_bytes, high - peak),
            correction_bytes=peak - before,
            seconds_ratio=times[len(times) // 2] if times else 1.0,
            learned_from=f"{runs} earlier run{'s' * (runs > 1)} on {self.where}",
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


def _end(found: Footprint, before: Peak, device_bytes: int) -> Peak:
    """An end of the range: a measurement narrows the total, of which context and libraries are the likely ones."""
    return _moved(replace(found.peak, allocated_bytes=before.allocated_bytes), device_bytes)


def _moved(peak: Peak, device_bytes: int) -> Peak:
    reserved = peak.reserved_bytes + device_bytes - peak.device_bytes
    return Peak(min(peak.allocated_bytes, reserved), reserved, device_bytes)


def _with_peak(footprint: Footprint, device_bytes: int) -> Footprint:
    """Return the footprint with another peak: what is reserved differs, and what is allocated if that no longer fits.

    Less scratch than predicted is the likely cause; what is missing beyond it is taken from what comes and goes.
    """
    moved = _moved(footprint.peak, device_bytes)
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
