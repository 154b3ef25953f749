"""Parts, counts, ranges and peaks in words, and the colors of parts: the same in every table, picture and page."""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_memguard.core.decision.record import Measured
from lightning_memguard.core.range import Range
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.trace.trace import OPTIONAL_PARTS, PARTS
from lightning_memguard.units import GIB, KIB, MIB, TIB, format_bytes

# The color of each part of the memory, in the order they are stacked: what stays allocated is at the bottom, what comes
# and goes on top. Most colors are those of Okabe and Ito, which color-blind people can tell apart; neighbors also
# differ in lightness.
COLORS = {
    "parameters": "#0072b2",
    "buffers": "#8a8f98",
    "callbacks": "#7a5230",
    "communication": "#b8bec7",
    "optimizer_state": "#cc79a7",
    "gradients": "#e69f00",
    "gathered": "#56356e",
    "checkpoint": "#f0a8a0",
    "workers": "#3d4a5c",
    "prefetched": "#c9b458",
    "activations": "#009e73",
    "batch": "#e3cb00",
    "temporaries": "#d55e00",
    "workspaces": "#56b4e9",
}
assert set(COLORS) == {*PARTS, *OPTIONAL_PARTS}


def at_size(footprint: Footprint) -> str:
    """The batch size that a footprint is for, or its batch, if the data's own sampler sets the sizes."""
    return f"for a batch of {footprint.batch}" if footprint.batch else f"at batch size {footprint.batch_size}"


def size_of(footprint: Footprint) -> str:
    """Name the setting that a step's memory grows with."""
    return "the sampler's token budget or bucket width" if footprint.batch else "the batch size"


def with_stage(name: str, stage: str) -> str:
    """The name of a file, or of what a logger shows: a fit's as it is, those of an evaluation next to it.

    >>> with_stage("memguard_setup.md", "test")
    'memguard_setup_test.md'
    """
    stem, dot, kind = name.partition(".")
    return name if stage == "fit" else f"{stem}_{stage}{dot}{kind}"


def byte_range(low_bytes: int, high_bytes: int) -> str:
    """Write a range of bytes, with the unit once if both ends share it.

    >>> byte_range(94_371_840, 125_829_120)
    '90.0 to 120.0 MiB'
    """
    low, high = format_bytes(low_bytes), format_bytes(high_bytes)
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(f' {unit}') else low} to {high}"


def duration(seconds: float) -> str:
    """Write a time with three digits.

    >>> duration(0.0123), duration(1.5), duration(4e-05)
    ('12.3 ms', '1.5 s', '40 us')
    """
    unit, name = next(((unit, name) for unit, name in ((1, "s"), (1e-3, "ms")) if seconds >= unit), (1e-6, "us"))
    number = seconds / unit
    return f"{number:,.0f} {name}" if number >= 100 else f"{number:.3g} {name}"


def time_range(seconds: Range[float]) -> str:
    """Write a predicted time: ``"12.3 ms (9.8 to 15.4)"``, ``"0.9 s (700 ms to 1.2 s)"``."""
    low, likely, high = map(duration, seconds)
    if len({each.split()[-1] for each in (low, likely, high)}) == 1:
        low, high = low.split()[0], high.split()[0]
    return f"{likely} ({low} to {high})"


def step_words(footprint: Footprint) -> str:
    """The range of the time of a step, and how far to trust it; empty if no time is known."""
    if footprint.step_seconds is None:
        return ""
    low, _, high = map(duration, footprint.step_seconds)
    corrected = f", corrected by {footprint.learned_from}" if footprint.seconds_ratio != 1 else ""
    return f"{low} to {high} without loading data{corrected}; {ACCURACY}"


ACCURACY = "how far off such times were: docs/accuracy"


def ticks(span_bytes: float) -> tuple[tuple[float, str], ...]:
    """Return up to six round numbers of bytes for an axis, from 0 up to a span, each with its words.

    >>> [words for _, words in ticks(2_200_000_000)]
    ['0', '0.5 GiB', '1 GiB', '1.5 GiB', '2 GiB']
    """
    units = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    unit, name = next(((unit, name) for unit, name in units if span_bytes >= unit), (1, "B"))
    step = round_step(span_bytes / unit / 5)
    marks = (step * index for index in range(int(span_bytes / unit / step) + 1))
    return tuple((mark * unit, f"{mark:g} {name}" if mark else "0") for mark in marks)


def round_step(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(step, 1e-9)))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * 0.999)


def measured_words(measured: Measured) -> str:
    """The measured peak and its counter: ``"40.6 MiB (tensors; the process took 104.1 MiB)"``."""
    return f"{format_bytes(measured.peak_bytes)} ({source_words(measured)})"


def source_words(measured: Measured) -> str:
    """The counter of a measured peak, and what the whole process took if that was measured as well."""
    process = measured.process_bytes
    return f"{measured.source}; the process took {format_bytes(process)}" if process else measured.source


def bounds_of(footprint: Footprint) -> tuple[int, int] | None:
    """The least and the most bytes that the peak on the device can be; None if it is known exactly."""
    low, high = footprint.low, footprint.high
    return (low.device_bytes, high.device_bytes) if low and high else None


def peak_range(footprint: Footprint) -> str:
    """The predicted peak on the device, and its bounds if they differ: ``"100.0 MiB (90.0 to 120.0 MiB)"``."""
    if footprint.is_partial:
        return f"at least {format_bytes(footprint.peak_device_bytes)}"
    point, bounds = footprint.peak_device_bytes, bounds_of(footprint) or ()
    if len({format_bytes(nbytes) for nbytes in (point, *bounds)}) == 1:
        return format_bytes(point)
    return f"{format_bytes(point)} ({byte_range(*bounds)})"


_PLACES = {
    "forward": "forward pass",
    "backward": "backward pass",
    "checkpoint": "saving of a checkpoint",
    "collate": "collating of a batch",
}


def peak_words(footprint: Footprint, code: Callable[[str], str] = str) -> str:
    """Name the place of the peak: ``"backward pass of encoder.layers.11"``.

    Args:
        footprint: the memory of a step.
        code: marks up the name of the module.
    """
    phase = footprint.phase or "step"
    place = _PLACES.get(phase, phase)
    return f"{place} of {code(footprint.module)}" if footprint.module else place
