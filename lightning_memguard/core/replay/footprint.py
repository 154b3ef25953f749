"""Replay + overheads -> Footprint: the bytes one training step needs at one batch size."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from lightning_memguard.core.range import NOTHING, Range
from lightning_memguard.core.replay.epoch import Epoch
from lightning_memguard.core.replay.recurring import LaterSteps
from lightning_memguard.core.replay.replay import Replay, within_capacity
from lightning_memguard.core.replay.seconds import Timing
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.replay.snapshot import save_snapshot
from lightning_memguard.core.shown import Shown
from lightning_memguard.core.trace.trace import OPTIONAL_PARTS, PARTIAL, PARTS, WAITS, Event, Method, Trace
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import format_bytes


@dataclass(frozen=True)
class Peak:
    """The three figures of a peak, in bytes; see `Footprint`."""

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int

    @property
    def outside_bytes(self) -> int:
        """See `Footprint.outside_bytes`."""
        return self.device_bytes - self.reserved_bytes

    @classmethod
    def extreme(cls, peaks: Iterable[Peak], of: Callable[[Iterable[int]], int]) -> Peak:
        """The ``min`` or ``max`` of each figure: larger blocks can leave a smaller reserve, by filling gaps better."""
        return cls(*map(of, zip(*map(astuple, peaks), strict=True)))

    def fragmented(self, nbytes: int) -> Peak:
        """The peak with this much more in the cache, or less if negative; what is allocated stays reserved."""
        more = max(nbytes, self.allocated_bytes - self.reserved_bytes)
        return Peak(self.allocated_bytes, self.reserved_bytes + more, self.device_bytes + more)

    def plus(self, nbytes: int) -> Peak:
        """The peak with a block that is always allocated."""
        return Peak(*(figure + nbytes for figure in astuple(self)))


DoubtKind = Literal[
    "unknown blocks",
    "process",
    "addresses",
    "cache",
    "steps",
    "lengths",
    "values",
    "epochs",
    "shapes",
    "draws",
    "least results",
    "unchecked",
    "compiled",
    "one draw",
    "layouts",
    "later epochs",
    "other work",
    "workers",
    "measurements",
]


@dataclass(frozen=True)
class Doubt:
    """Why a peak is not known exactly, and what else it may be; a footprint's range holds all of its doubts.

    ``unknown blocks``: the size of some blocks. ``process``: what is outside the allocator. ``addresses``: in which
    order the driver gives them to segments. ``cache``: what the allocator caches. ``steps``: which of the
    blocks that it has cached each step gets. ``lengths``: what it caches over an epoch of them.
    ``values``: the batches drawn differ. ``epochs``: their largest batches do. ``shapes``: torch.compile compiles again
    for other shapes. ``draws``: the step draws sizes.
    ``least results``: how large results are. ``unchecked``: no capture has shown how the step grows to this size.
    ``compiled``: nor what torch.compile makes of it. ``one draw``: no capture had other values. ``layouts``: the step
    ran on the CPU. ``later epochs``: more of the model may be trained. ``other work``: validation, or training, may
    have the peak instead. ``workers``: what their processes take. ``measurements``: what runs like it have taken.
    """

    kind: DoubtKind
    peaks: tuple[Peak, ...]

    def plus(self, least: int, most: int) -> Doubt:
        """The doubt if a block of such a size is always allocated."""
        low, high = Peak.extreme(self.peaks, min), Peak.extreme(self.peaks, max)
        return Doubt(self.kind, (low.plus(least), high.plus(most)))


class Turn(NamedTuple):
    """Two works that take turns, replayed, so that each finds what the other has left in the allocator's cache.

    ``likely`` is the replay of both, ``other`` the same with segments at other addresses.
    """

    likely: Replay
    other: Replay


@dataclass(frozen=True)
class Footprint(Shown):
    """The memory of a training step at one batch size, in bytes.

    Attributes:
        batch_size: number of samples in the batch.
        device: what it was predicted for, such as ``"cpu"`` or ``"cuda"``.
        peak_allocated_bytes: as ``torch.cuda.max_memory_allocated()`` reports it; on the CPU the peak of live tensors.
        peak_reserved_bytes: as ``torch.cuda.max_memory_reserved()`` reports it; on the CPU the same as allocated.
        peak_device_bytes: as nvidia-smi reports it (reserved + context and libraries); on the CPU the same as
            allocated. This is compared with a budget.
        parts: bytes alive at the peak by part; they sum to ``peak_allocated_bytes``.
        phase: where the peak is: ``"forward"``, ``"backward"``, ``"optimizer"``, ...
        module: dotted path of the module that was running at the peak, or empty.
        operator: the torch operator at the peak.
        method: how it was obtained, see `lightning_memguard.core.trace.trace.Method`.
        notes: assumptions, in plain words.
        doubts: why the peak is not known exactly, and what else it may be; empty if it is, which a cache's never is.
        yielding_bytes: how much of ``high`` gives way when memory runs short: what the allocator has cached, and
            workspaces for which PyTorch then takes another plan of cuDNN. A budget is compared with what is left.
        trace: the events it was computed from, if they were kept, as `estimate` does.
        settings: the rules of the allocator they were replayed by.
        batch: the shape of the batch, such as ``"3 x 512"``, if the data sets its size; else empty.
        epoch: what the cache grows to over an epoch of batches of several lengths, if these are known.
        correction_bytes: how much larger the peak on the device is by earlier measurements; negative if it is smaller.
        learned_from: these measurements in words, such as ``"3 earlier runs on this GPU"``; empty without any.
        timing: what `step_seconds` is computed from; None if the step was not run.
        seconds_ratio: how many times as long steps took in these measurements as predicted.
    """

    batch_size: int
    device: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_device_bytes: int
    parts: Mapping[str, int] = field(default_factory=dict)
    phase: str = ""
    module: str = ""
    operator: str = ""
    method: Method = "fake"
    notes: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    yielding_bytes: int = 0
    trace: Trace | None = field(default=None, repr=False, compare=False)
    settings: AllocatorSettings | None = field(default=None, repr=False, compare=False)
    batch: str = ""
    epoch: Epoch | None = None
    correction_bytes: int = 0
    learned_from: str = ""
    timing: Timing | None = field(default=None, repr=False, compare=False)
    seconds_ratio: float = 1.0

    def __repr__(self) -> str:
        peak, most = format_bytes(self.peak_device_bytes), format_bytes(self.most_device_bytes)
        parts = {part: format_bytes(nbytes) for part, nbytes in self.parts.items() if nbytes}
        shown = {"batch_size": self.batch_size, "device": self.device, "peak": peak, "at_most": most, "parts": parts}
        shown |= {name: getattr(self, name) for name in ("phase", "module", "method", "notes")}
        return f"Footprint({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def step_seconds(self) -> Range[float] | None:
        """Seconds of an optimizer step, all its batches included: at least, most likely, at most.

        A roofline (`lightning_memguard.core.replay.seconds`) from what the operators compute and move, and the peaks
        of a GPU of the catalogue; for the CPU those of this machine, which takes a third of a second to measure. It
        does not include loading data, or other processes. None for another GPU, or a step that could not be run.
        How far off it is: docs/accuracy.
        """
        step = self.timing.step if self.timing else None
        return step and step.scaled(self.seconds_ratio)

    @property
    def peak(self) -> Peak:
        """The likely peak's three figures."""
        return Peak(self.peak_allocated_bytes, self.peak_reserved_bytes, self.peak_device_bytes)

    @property
    def low(self) -> Peak | None:
        """The least that the peak may be, never above it; None if it is known exactly."""
        return self.lowest if self.doubts else None

    @property
    def high(self) -> Peak | None:
        """The most, never below it; None if it is known exactly."""
        return self.highest if self.doubts else None

    @functools.cached_property
    def lowest(self) -> Peak:
        """`low`, or the peak if that is known exactly."""
        least = Peak.extreme((self.peak, *(peak for doubt in self.doubts for peak in doubt.peaks)), min)
        return Peak(*(max(0, figure) for figure in astuple(least)))

    @functools.cached_property
    def highest(self) -> Peak:
        """`high`, or the peak if that is known exactly."""
        return Peak.extreme((self.peak, *(peak for doubt in self.doubts for peak in doubt.peaks)), max)

    @property
    def most_device_bytes(self) -> int:
        """Bytes compared with a budget: `peak_device_bytes`, or `high` without `yielding_bytes` if that is more."""
        return max(self.peak_device_bytes, self.highest.device_bytes - self.yielding_bytes)

    @property
    def is_cut(self) -> bool:
        """Whether captures that would have shown more are missing: left out at the deadline, or failed."""
        return any(doubt.kind in ("unchecked", "compiled", "one draw") for doubt in self.doubts)

    @property
    def is_as_written(self) -> bool:
        """Whether the step runs compiled, and no capture has shown what that takes."""
        return any(doubt.kind == "compiled" for doubt in self.doubts)

    @property
    def most_shown_bytes(self) -> int:
        """The most bytes on the device, for people: the likely ones if, without captures, a bound says nothing."""
        most = self.most_device_bytes
        return self.peak_device_bytes if self.is_cut and most > _SAYS_NOTHING * self.peak_device_bytes else most

    @property
    def is_partial(self) -> bool:
        """Whether the step could not be run, or not to its end: the peak is more than predicted."""
        return self.method in PARTIAL

    @property
    def outside_bytes(self) -> int:
        """Bytes of the process on its device outside the allocator: CUDA's context and libraries."""
        return self.peak_device_bytes - self.peak_reserved_bytes

    @property
    def is_evaluation(self) -> bool:
        """Whether the peak is in validation, test or prediction."""
        return self.phase in ("validation", "test", "prediction")

    def doubted(self, kind: DoubtKind, *peaks: Peak, note: str = "") -> Footprint:
        """The footprint if its peak may also be one of these. Every range is made of such doubts."""
        notes = (*self.notes, note) if note else self.notes
        return replace(self, doubts=(*self.doubts, Doubt(kind, peaks)), notes=notes)

    def or_allocated_by(self, other: Footprint) -> Footprint:
        """The footprint if other work of the run allocates more than this, of which more is cached."""
        if other.peak_allocated_bytes <= self.peak_allocated_bytes:
            return self
        least, likely, most = (each.allocated_bytes for each in (other.lowest, other.peak, other.highest))

        def raised(peak: Peak) -> Peak:
            return replace(peak, allocated_bytes=max(peak.allocated_bytes, least))

        doubts = (Doubt(each.kind, tuple(map(raised, each.peaks))) for each in self.doubts)
        found = replace(self, peak_allocated_bytes=likely, parts=other.parts, doubts=tuple(doubts))
        ends = (replace(found.peak, allocated_bytes=nbytes) for nbytes in (least, most) if nbytes != likely)
        doubt = Doubt("other work", tuple(ends))
        return replace(found, doubts=(*found.doubts, doubt)) if doubt.peaks else found

    def in_turn(self, turn: Turn, alone: Peak) -> Footprint:
        """The footprint of work that takes turns with other work. What the allocator caches more gives way.

        ``alone`` is the peak of this work by its replay alone.
        """
        likely, at = turn.likely, turn.likely.peak_event
        allocated, reserved = (likely.peak_allocated_bytes, likely.peak_reserved_bytes)
        less, more = allocated - alone.allocated_bytes, reserved - alone.reserved_bytes

        def moved(peak: Peak) -> Peak:
            return replace(peak, allocated_bytes=peak.allocated_bytes + less).fragmented(more)

        parts = self.parts
        if alone.allocated_bytes == self.peak_allocated_bytes:  # nothing else was added
            parts = {part: likely.parts.get(part, 0) for part in dict.fromkeys((*self.parts, *likely.parts))}
        peak, other = moved(self.peak), turn.other
        figures = dict(zip(_FIGURES, astuple(peak), strict=True))
        found = replace(self, **figures, parts=parts)
        if at is not None:
            found = replace(found, phase=at.phase, module=at.module, operator=at.operator)
        device = other.peak_reserved_bytes + self.outside_bytes
        turned = Peak(other.peak_allocated_bytes, other.peak_reserved_bytes, device)
        doubts = tuple(Doubt(each.kind, tuple(map(moved, each.peaks))) for each in self.doubts)
        found = replace(found, doubts=doubts).doubted("addresses", turned)
        most = max(peak.device_bytes, self.most_device_bytes)
        return replace(found, yielding_bytes=max(0, found.highest.device_bytes - most))

    def between_steps(self, less: int, more: int) -> Footprint:
        """The footprint if a later step may have an allocated peak that is so much lower, or higher."""
        low, high = self.lowest, self.highest
        most = max(high.allocated_bytes, min(high.allocated_bytes + more, high.reserved_bytes))
        ends = replace(low, allocated_bytes=low.allocated_bytes - less), replace(high, allocated_bytes=most)
        return self.doubted("steps", *ends) if less or more else self

    def or_at_most(self, other: Footprint, note: str) -> Footprint:
        """The footprint if other work of the run, whose likely peak is lower, may take more than this one at most."""
        most = max(self.most_device_bytes, other.most_device_bytes)
        found = self.doubted("other work", Peak.extreme((self.peak, other.highest), max), note=note)
        return replace(found, yielding_bytes=found.highest.device_bytes - most)

    def plus(self, nbytes: int, part: str) -> Footprint:
        """The footprint with a block that is always allocated; a negative number takes that much away."""
        return self._plus(nbytes, nbytes, nbytes, part)

    def plus_range(self, nbytes: Range[int], part: str) -> Footprint:
        """The footprint with memory of a part that is always allocated."""
        found = self._plus(*nbytes, part)
        doubt = Doubt("workers", (self.peak,)).plus(nbytes.low, nbytes.high)
        return found if nbytes.is_exact else replace(found, doubts=(*found.doubts, doubt))

    def _plus(self, low: int, likely: int, high: int, part: str) -> Footprint:
        allocated, reserved, device = astuple(self.peak.plus(likely))
        return replace(
            self,
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            peak_device_bytes=device,
            parts={**self.parts, part: self.parts.get(part, 0) + likely},
            doubts=tuple(doubt.plus(low, high) for doubt in self.doubts),
        )

    def plus_outside(self, most_bytes: int) -> Footprint:
        """The footprint with memory outside of the allocator, of which only the most is known."""
        peak = self.highest
        return self.doubted("process", replace(peak, device_bytes=peak.device_bytes + most_bytes))

    def reserved_alone(self) -> Footprint:
        """The footprint with what PyTorch's allocator reserves as the total: without context and libraries."""

        def alone(peak: Peak) -> Peak:
            return replace(peak, device_bytes=peak.reserved_bytes)

        doubts = tuple(Doubt(each.kind, tuple(map(alone, each.peaks))) for each in self.doubts)
        return replace(self, peak_device_bytes=self.peak_reserved_bytes, doubts=doubts)

    def save_snapshot(self, path: str | os.PathLike[str]) -> Path:
        """Write the predicted step as a PyTorch memory snapshot, see `lightning_memguard.core.replay.snapshot`.

        Args:
            path: the file to write, usually ``*.pickle``; an existing one is replaced.

        Returns:
            The path.

        Raises:
            MemGuardError: the file cannot be written, or the step's events were not kept: the guard keeps those
                of a fit, see `MemGuard.save_snapshot`.
        """
        if self.trace is None or self.settings is None:
            raise MemGuardError(
                "This footprint does not keep the events of the step; `estimate(...)` returns one that does. For a "
                "fit, call `guard.save_snapshot(path)`."
            )
        return save_snapshot(self.trace, self.settings, path)

    def over(self, epoch: Epoch) -> Footprint:
        """The footprint of an epoch of batches, of which this is the largest.

        What is cached gives way if it has to; if a step fails even so, it takes more than the capacity.
        """
        reserved = max(epoch.run.peak_reserved_bytes, self.highest.reserved_bytes)
        more = reserved - self.highest.reserved_bytes
        found = self.doubted("lengths", self.highest.fragmented(more), note=epoch.text)
        yields = self.yielding_bytes + more
        if not epoch.fits:
            yields = min(yields, found.highest.reserved_bytes - epoch.run.peak_reserved_bytes)
        return replace(found, epoch=epoch, yielding_bytes=yields)

    @property
    def largest_part(self) -> str:
        """Name of the part with most bytes at the peak."""
        return max(self.parts, key=lambda part: self.parts[part]) if self.parts else ""


_SAYS_NOTHING = 4  # times as much
_FIGURES = "peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes"  # of a footprint, as `Peak` has them


def footprint(
    trace: Trace, settings: AllocatorSettings, context_bytes: Range[int] = NOTHING, batches_per_step: int = 1
) -> Footprint:
    """Replay a trace and add the memory outside the allocator.

    Args:
        trace: the events of the step, in bytes requested.
        settings: the rules of the allocator to replay by.
        context_bytes: what the process takes on its device outside the allocator (CUDA's context and libraries).
        batches_per_step: batches of an optimizer step.
    """
    least, likely, most = context_bytes
    later = within_capacity(trace.only("point"), settings, functools.partial(LaterSteps.of, batches=batches_per_step))
    result = later.replay
    at = result.peak_event
    shown = (*PARTS, *(part for part in OPTIONAL_PARTS if part in result.parts))
    found = Footprint(
        batch_size=trace.batch_size,
        device=trace.device,
        peak_allocated_bytes=result.peak_allocated_bytes,
        peak_reserved_bytes=result.peak_reserved_bytes,
        peak_device_bytes=result.peak_reserved_bytes + likely,
        parts={part: result.parts.get(part, 0) for part in shown},
        phase=at.phase if at else "",
        module=at.module if at else "",
        operator=at.operator if at else "",
        method=trace.method,
        notes=trace.notes,
    )
    unknown = {event.case for event in trace.events} - {""}
    cases = ("high",) if unknown == {"high"} else ("low", "high") if unknown else ()  # "low" may be "point"
    if not cases and least == most and settings.kind == "exact":
        return found
    replays = [result, *(_replay(trace, case, settings) for case in cases)]
    firm = max(result.peak_reserved_bytes, _firm_bytes(trace, result, replays[-1], settings))
    addresses_matter = settings.kind == "cuda" and not settings.expandable_segments
    if addresses_matter and any(event.case == "first" for event in trace.events):
        replays += [_replay(trace, case, settings) for case in ("first", "backward")]
    found = found.doubted("unknown blocks" if cases else "process", *_peaks(replays, (least, most)))
    if addresses_matter:
        other = replace(settings, segments_descend=not settings.segments_descend)
        turned = [_replay(trace, case, other) for case in ("point", *cases)]
        found = found.doubted("addresses", *_peaks(turned, (least, most)))
    if settings.kind == "cuda":  # which may cache less or more, as a few blocks elsewhere make it do
        less, more = (int(share * found.peak_allocated_bytes) for share in (LESS_CACHED, MORE_CACHED))
        if settings.capacity_bytes is not None:
            more = min(more, max(0, settings.capacity_bytes - found.highest.reserved_bytes))
        found = found.doubted("cache", found.lowest.fragmented(-less), found.highest.fragmented(more))
    first, least = later.peaks[0], min(later.peaks)
    found = found.between_steps(first - least, max(later.peaks) - least)
    return replace(found, yielding_bytes=found.highest.reserved_bytes - firm)


def _peaks(replays: Iterable[Replay], outside: Iterable[int]) -> Iterable[Peak]:
    of_each = [(each.peak_allocated_bytes, each.peak_reserved_bytes) for each in replays]
    return (Peak(*peak, peak[1] + nbytes) for peak in of_each for nbytes in outside)


def _firm_bytes(trace: Trace, likely: Replay, largest: Replay, settings: AllocatorSettings) -> int:
    """The reserved peak if what is not known is as large as possible, but for blocks that give way."""
    yields = {_gives_way(event) for event in trace.events if event.case}
    if yields == {True, False}:
        events = tuple(e for e in trace.events if e.case in ("", "point" if _gives_way(e) else "high"))
        firm = replace(trace, events=events, kernels=(), scratch_spans=())
        return within_capacity(firm, settings, Replay.of).peak_reserved_bytes
    return (likely if yields == {True} else largest).peak_reserved_bytes


def _gives_way(event: Event) -> bool:
    """Whether a block is of another size, or not there, when memory is short."""
    return bool(event.otherwise) or event.operator == WAITS


# Shares of the allocated peak by which measured runs are below and above all replays of their step: chosen on the runs
# of half of the published CNNs, and shown on those of the others (`benchmarks/accuracy.py`).
LESS_CACHED, MORE_CACHED = 0.05, 0.025


def _replay(trace: Trace, case: str, settings: AllocatorSettings) -> Replay:
    return within_capacity(trace.only(case), settings, Replay.of)
