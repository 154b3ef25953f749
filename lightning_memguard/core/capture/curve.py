"""Curve of a step's memory -> its footprint at any batch size: arithmetic on a value, which runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from lightning_memguard.core.range import NOTHING, Range
from lightning_memguard.core.replay.footprint import DoubtKind, Footprint, Peak, footprint
from lightning_memguard.core.replay.learned import Learned
from lightning_memguard.core.replay.seconds import Speed, Timing
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.as_written import least_if_compiled, most_more_if_compiled
from lightning_memguard.core.trace.growth import Growth, extrapolate
from lightning_memguard.core.trace.packed import PackedGrowth, PackedTraces
from lightning_memguard.core.trace.trace import (
    OF_VALUES,
    PARTIAL,
    SIGNED_SIZE,
    WORTH_A_NOTE,
    Answers,
    Method,
    Shapes,
    Trace,
    is_note,
    signature_of,
)
from lightning_memguard.core.trace.work import Work
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.units import format_bytes

if TYPE_CHECKING:
    from lightning_memguard.core.capture.capture import Variant

T = TypeVar("T")

_STATIC = ("parameters", "buffers", "optimizer_state")


@dataclass(frozen=True)
class Terms:
    """Everything that turns a trace into a footprint.

    Attributes:
        settings: the allocator's rules.
        context_bytes: bytes of the process on its device outside the allocator.
        held: bytes on the device throughout in addition to the step, by part: during validation, those of the training.
        learned: what earlier runs of the step have measured.
        speed: returns how fast the device is; None if that is not known.
        batches_per_step: batches of an optimizer step.
        timing_bytes: of a buffer with which compiled steps time their kernels.
    """

    settings: AllocatorSettings
    context_bytes: Range[int] = NOTHING
    held: tuple[tuple[str, int], ...] = ()
    learned: Learned | None = None
    speed: Callable[[], Speed | None] = lambda: None
    batches_per_step: int = 1
    timing_bytes: int = 0

    def footprint_of(self, trace: Trace, *, compiled: bool = False) -> Footprint:
        """The memory and time of a trace of the step."""
        found = footprint(trace.holding(self.held), self.settings, self.context_bytes, self.batches_per_step)
        return replace(found, timing=self.timing(trace.work, compiled=compiled)) if trace.work else found

    def if_compiled(self, found: Footprint, written: Trace) -> Footprint:
        """The footprint of a step as written, if it runs compiled and no capture has shown what that takes."""
        written = written.holding(self.held)
        least = footprint(least_if_compiled(written.only("low")), self.settings, self.context_bytes).lowest
        accumulates = self.batches_per_step > 1
        more = most_more_if_compiled(written.only("high"), self.timing_bytes, accumulates=accumulates)
        return found.doubted("compiled", least, found.highest.plus(more))

    def timing(self, work: Sequence[Work], *, compiled: bool) -> Timing:
        """Return how the step is timed; ``work`` is that of a batch as written."""
        return Timing(work, self.speed, self.batches_per_step, compiled=compiled)


class Proof(NamedTuple):
    """A capture at some size: shapes and bytes of its batch, if they were noted, and the processor time it took."""

    batch: tuple[Shapes, int] | None
    seconds: float


class Gap(NamedTuple):
    """Why there is no capture at a size that was asked for: the step failed, was not run, or time was up."""

    kind: Literal["failed", "not run", "late"]
    why: str

    @property
    def words(self) -> str:
        """The reason as the note of a footprint gives it."""
        return self.why if self.kind == "late" else f"there, {self.why}"


@dataclass(frozen=True)
class Curve:
    """Memory of a step by batch size, from traces of it. A value: it can be kept and sent, and runs nothing.

    A `Surveyor` makes it, and extends it to sizes that need a capture of their own.

    Attributes:
        terms: what turns a trace into a footprint.
        method: how the step was captured.
        growth: how the events grow; None if the step runs differently at different sizes, so that each is captured.
        captured: the traces captured to predict from, by batch size: one of each variant, the largest first.
        scalable: False if only the sizes in ``captured`` are known.
        notes: assumptions, in plain words.
        proofs: the sizes at which the step was captured.
        gaps: the sizes that were asked for and not captured.
        reads: what the step read as it ran as written, if it calls code for torch.compile; ``growth`` and ``captured``
            have it uncompiled. None if it compiles nothing.
        compiled: by batch size, the trace of the step compiled for its batch's shape, and if batches differ, of the one
            that torch.compile makes for any shape once a second one has come. Between sizes footprints are estimates.
        variants: the captures at each size, if memory depends on values.
        drawn: if the step draws sizes, how its events grow under other random numbers than those of ``growth``.
        ceiling: the largest possible memory, if that is known too.
        floor: the least possible memory, if ``growth`` is the largest.
        unfrozen: the step that trains all parameters, if frozen ones may be trained later.
        kinds: if the data sets the batch sizes, shapes and bytes of each kind of batch that was captured.
        kind: the place in ``kinds`` of the one that takes the most, which is predicted.
        as_written: whether it compiles something that no capture has shown compiled.
        stopped: why too few captures were made to check how the step grows, or what other values change.
    """

    terms: Terms
    method: Method
    growth: Growth | PackedGrowth | None = None
    captured: Mapping[int, tuple[Trace, ...]] = field(default_factory=dict)
    scalable: bool = True
    notes: tuple[str, ...] = ()
    proofs: Mapping[int, Proof] = field(default_factory=dict)
    gaps: Mapping[int, Gap] = field(default_factory=dict)
    reads: Answers | None = None
    compiled: Mapping[int, tuple[Trace, ...]] = field(default_factory=dict)
    variants: tuple[Variant, ...] = ()
    drawn: tuple[Growth | PackedGrowth, ...] = ()
    ceiling: Growth | PackedGrowth | None = None
    floor: Growth | PackedGrowth | None = None
    unfrozen: Curve | None = None
    kinds: tuple[tuple[Shapes, int], ...] = ()
    kind: int = 0
    as_written: bool = False
    stopped: str = ""
    # What it was asked for so far; a copy starts with its own.
    _known: dict[int, Footprint] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def settings(self) -> AllocatorSettings:
        """The allocator's rules."""
        return self.terms.settings

    @property
    def compiles(self) -> bool:
        """Whether the step calls code for torch.compile."""
        return self.reads is not None

    @property
    def of_uneven_batches(self) -> bool:
        """Whether the variants are batches of samples that differ in size, and nothing else."""
        return bool(self.variants) and not self.drawn and all(each.number and not each.shares for each in self.variants)

    @property
    def likely_variant(self) -> Variant | None:
        """The one of several that is predicted; None if they are not uneven batches."""
        return self._likely_of(self.variants) if self.of_uneven_batches else None

    def _likely_of(self, ascending: Sequence[T]) -> T:
        """Return of epochs' figures the middle one, of batches' the largest."""
        return ascending[len(ascending) // 2 if self.variants[0].epoch else -1]

    @property
    def surveyed(self) -> Mapping[int, Trace]:
        """The traces of the step on its first batch, by size; none if each variant has batches of its own."""
        if self.variants and self.method != "real" and not self.drawn:
            return {}
        return {size: traces[0] for size, traces in self.captured.items()}

    @property
    def signature(self) -> str:
        """The step's signature, which no batch size changes; empty if its events are not known at every size."""
        if self.growth is None or self.compiles or self.variants:
            return ""
        return signature_of(self.growth.at(SIGNED_SIZE))

    @property
    def proven_sizes(self) -> set[int]:
        """The sizes at which the step was captured."""
        return {*self.proofs, *self.captured, *(self.growth.sizes if self.growth else ())}

    # -- copies

    def packed(self) -> Curve:
        """Return the curve in little memory, slower to ask, without captures that the growth reproduces."""
        all_growth = self.growth, self.ceiling, self.floor, *self.drawn
        growth, ceiling, floor, *drawn = (PackedGrowth.of(g) if isinstance(g, Growth) else g for g in all_growth)
        packed = replace(self, growth=growth, ceiling=ceiling, floor=floor, compiled=PackedTraces.of(self.compiled))
        packed = replace(packed, drawn=tuple(filter(None, drawn)), unfrozen=self.unfrozen and self.unfrozen.packed())
        return replace(packed, captured=PackedTraces.of({} if growth else self.captured))

    def unpacked(self) -> Curve:
        """Return the curve with its growth unpacked, to be asked at many sizes, or its traces if it has none."""
        if isinstance(self.growth, PackedGrowth):
            return replace(self, growth=self.growth.unpacked())
        return replace(self, captured=dict(self.captured))

    def uncompiled(self) -> Curve:
        """Return the curve as if torch.compile did nothing."""
        return replace(self, reads=None, compiled={})

    def on_terms(self, **changes: object) -> Curve:
        """Return the curve with some of its terms changed."""
        return replace(self, terms=replace(self.terms, **changes))  # type: ignore[arg-type]

    def with_captured(self, batch_size: int, traces: tuple[Trace, ...]) -> Curve:
        """Return the curve with the traces of all variants at a size."""
        return replace(self._with_proof(batch_size, traces), captured={**self.captured, batch_size: traces})

    def confirmed_by(self, trace: Trace) -> Curve:
        """Return the curve with a proof at a size at which its growth was found to hold."""
        proven = self._with_proof(trace.batch_size, (trace,))
        if not (self.stopped or self.gaps or self.kinds):  # else a proof may narrow what was answered
            proven._known.update(self._known)
        return proven

    def _with_proof(self, batch_size: int, traces: Sequence[Trace]) -> Curve:
        batch = max((each.batch for each in traces if each.batch), key=lambda batch: batch[1], default=None)
        return replace(self, proofs={**self.proofs, batch_size: Proof(batch, traces[0].seconds)})

    # -- traces

    def knows(self, batch_size: int) -> bool:
        """Whether a trace at this size needs no capture."""
        is_captured = self._has_all_at(batch_size) or batch_size in self.compiled
        return is_captured or self.method in PARTIAL or self.growth is not None

    def _has_all_at(self, batch_size: int) -> bool:
        if batch_size not in self.captured:
            return False
        return not self.variants or len(self.captured[batch_size]) == len(self.variants)

    def trace_at(self, batch_size: int) -> Trace:
        """The step's events at one batch size; if memory depends on values, those of the largest variant."""
        return self._traces_at(batch_size)[0]

    def own_trace_at(self, batch_size: int) -> Trace:
        """Return the trace of the step with the bytes that are held throughout."""
        return self.trace_at(batch_size).holding(self.terms.held)

    def batch_at(self, batch_size: int) -> tuple[Shapes, int] | None:
        """Shapes and bytes of the batch that the step was given; None if they were not noted."""
        return self.proofs[batch_size].batch if batch_size in self.proofs else None

    def _traces_at(self, batch_size: int) -> tuple[Trace, ...]:
        """Return the trace of each variant, the largest first."""
        if batch_size in self.compiled:
            return self.compiled[batch_size]
        if self.method in PARTIAL:
            return (replace(next(iter(self.captured.values()))[0], batch_size=batch_size),)
        if self._has_all_at(batch_size) and not self.drawn:
            return self.captured[batch_size]
        if self.growth is not None:
            return tuple(growth.at(batch_size) for growth in (self.growth, *self.drawn))
        return self._extrapolated_at(batch_size)

    def near(self, batch_size: int) -> tuple[int, int]:
        """Two sizes that were captured, to extrapolate from: the next larger one if there is one, and one below it.

        Raises:
            CannotTraceError: none was.
        """
        if not self.captured:
            raise CannotTraceError(f"the step was not captured at batch size {batch_size}, or any other")
        near = min((size for size in self.captured if size >= batch_size), default=max(self.captured))
        return max((size for size in self.captured if size < near), default=near), near

    def _extrapolated_at(self, batch_size: int) -> tuple[Trace, ...]:
        small, near = self.near(batch_size)
        gap = self.gaps.get(batch_size) or Gap("not run", "the step was not captured")
        note = f"the memory at batch size {batch_size} is extrapolated from batch size {near}: {gap.words}"
        pairs = zip(self._variants_at(small), self._variants_at(near), strict=True)
        found = (extrapolate(pair, batch_size) for pair in pairs)
        return tuple(replace(trace, notes=(*trace.notes, note)) for trace in found)

    def _variants_at(self, batch_size: int) -> tuple[Trace, ...]:
        traces = self.captured[batch_size]
        return traces if self._has_all_at(batch_size) else traces[:1] * len(self.variants)

    # -- footprints

    def footprint_at(self, batch_size: int) -> Footprint:
        """The memory of the step at one batch size."""
        if batch_size not in self._known:
            is_between = bool(self.compiled) and batch_size not in self.compiled
            self._known[batch_size] = self._estimate_at(batch_size) if is_between else self._replayed_at(batch_size)
        return self._known[batch_size]

    def _replayed_at(self, batch_size: int) -> Footprint:
        """The memory of the step by its traces at a size, then made wider by each thing that they do not tell."""
        found = self._with_least_results(self._of_variants_at(batch_size))
        gap = self.gaps.get(batch_size)
        is_late = gap is not None and gap.kind == "late"
        is_unchecked = self.stopped and batch_size not in self.proven_sizes and not found.is_partial
        if is_late or is_unchecked:
            found = self._with_doubt(found)
        if self.stopped and self.is_of_one_draw:
            found = self._with_unknown_values(found)
        elif self.is_of_one_draw and any(is_note(note, "computed numbers") for note in found.notes):
            found = _from_half_to_twice(found, "values", "other values were not tried")
        if self.method == "real" and found.device != "cpu":
            found = _from_half_to_twice(found, "layouts", "kernels there may keep other tensors")
        if self.unfrozen:
            found = _with_later(found, self.footprint_of(self.unfrozen.trace_at(batch_size)))
        if self.as_written and not found.is_partial:
            found = self.terms.if_compiled(found, self.trace_at(batch_size))
        if self.compiles:
            work = self.growth.at(batch_size).work if self.growth else ()
            found = replace(found, timing=self.terms.timing(work, compiled=True) if work else None)
        notes = tuple(dict.fromkeys((*self.notes, *found.notes)))
        found = replace(found, batch=self._shape_at(batch_size), notes=notes)
        return self.terms.learned.corrected(found) if self.terms.learned else found

    def _of_variants_at(self, batch_size: int) -> Footprint:
        """The memory of the largest variant, or of the middle one of equally likely epochs; its range holds all."""
        found = [self.footprint_of(trace) for trace in self._traces_at(batch_size)]
        by_luck = sum(bool(variant.luck) for variant in self.variants)
        most = max(found[: -by_luck or None], key=lambda each: each.most_device_bytes)
        if batch_size in self.compiled:
            return self._with_uneven(_with_any_shape(most, found) if len(found) > 1 else most)
        if len(found) == 1:
            return most
        if by_luck:
            return _with_lucks(most, found)
        if any(variant.epoch for variant in self.variants):
            middle = sorted(found, key=lambda each: each.most_device_bytes)[len(found) // 2]
            return middle.doubted("epochs", *(end for each in found for end in (each.lowest, each.highest)))
        if self.drawn:
            return _with_drawn(most, found)
        ceiling = self.footprint_of(self.ceiling.at(batch_size)) if self.ceiling else None
        return _with_range(most, found, ceiling)

    def _with_least_results(self, found: Footprint) -> Footprint:
        """Widen a footprint of largest results down to the least; leave out their note if that changes little."""
        least = self.footprint_of(self.floor.at(found.batch_size)).lowest if self.floor else found.lowest
        if least.allocated_bytes < found.lowest.allocated_bytes:
            found = found.doubted("least results", least)
        least_bytes = found.lowest.allocated_bytes if self.floor else sum(found.parts[part] for part in _STATIC)
        if found.peak_allocated_bytes - least_bytes < WORTH_A_NOTE:
            found = replace(found, notes=tuple(note for note in found.notes if not is_note(note, "largest result")))
        return found

    def footprint_of(self, trace: Trace) -> Footprint:
        """The memory and time of a trace of the step."""
        return self.terms.footprint_of(trace, compiled=self.compiles)

    def _with_uneven(self, most: Footprint) -> Footprint:
        """Widen a compiled step by what its variants differ in as written."""
        traces = self.captured.get(most.batch_size, ()) if self.of_uneven_batches else ()
        sizes = sorted(self.footprint_of(trace).peak_allocated_bytes for trace in traces)
        if not sizes:
            return most
        likely = self._likely_of(sizes)
        return most.doubted("epochs", most.lowest.plus(sizes[0] - likely), most.highest.plus(sizes[-1] - likely))

    def _shape_at(self, batch_size: int) -> str:
        """The shape of the batch if the data sets its size, such as ``"3 x 512"``; else empty."""
        if not self.kinds:
            return ""
        shapes, _ = self.batch_at(batch_size) or self.kinds[self.kind]
        return " x ".join(map(str, next(iter(shapes), ())))

    def _with_doubt(self, guessed: Footprint) -> Footprint:
        """Widen a footprint that no capture has checked: at most, the batch's share grows with the size squared."""
        small, near = [0, *sorted(self.proven_sizes)][-2:]
        times = max(1.0, guessed.batch_size / near)
        grown = self.footprint_at(near)
        of_batch = _beyond_states(grown, grown.peak_allocated_bytes)
        if small:  # constants, and what an epoch leaves, do not differ between two sizes
            rise = grown.peak_allocated_bytes - self.footprint_at(small).peak_allocated_bytes
            of_batch = min(of_batch, max(0, rise) * near // (near - small))
        more = grown.peak_allocated_bytes + int(of_batch * (times**2 - 1)) - guessed.highest.allocated_bytes
        note = f"not captured at this size: at most as if what belongs to the batch grew with its square from {near}"
        return guessed.doubted("unchecked", guessed.highest.plus(max(0, more)), note=note)

    @property
    def is_of_one_draw(self) -> bool:
        """Whether the step was not compared among batches of other values."""
        return self.method in ("worst-case", *OF_VALUES) and not self.variants

    def _with_unknown_values(self, found: Footprint) -> Footprint:
        """Widen a footprint by what other values may change, since no capture has shown how much that is."""
        if self.method in OF_VALUES:
            of_batch = _beyond_states(found, found.peak_allocated_bytes)
            other, most = found.highest.plus(of_batch), "as if what belongs to the batch took twice as much"
        else:
            of_batch = _beyond_states(found, found.lowest.allocated_bytes)
            other, most = found.lowest.plus(-of_batch), "with results as large as their operators can make them"
        return found.doubted("one draw", other, note=f"other values were not tried: at most {most}")

    def _estimate_at(self, batch_size: int) -> Footprint:
        """Estimate the compiled step at a size between or beyond those captured: peaks are close to lines.

        If only one size was captured, it grows as the uncompiled step does.
        """
        near, *others = sorted(self.compiled, key=lambda size: abs(size - batch_size))
        at_near = self.footprint_at(near)
        if others:
            rise = self.footprint_at(others[0]).peak_allocated_bytes - at_near.peak_allocated_bytes
            more = rise * (batch_size - near) // (others[0] - near)
        else:
            eager = self.uncompiled()
            here, there = eager.footprint_at(batch_size).peak_allocated_bytes, eager.footprint_at(near)
            static = sum(at_near.parts[part] for part in _STATIC)
            ratio = (at_near.peak_allocated_bytes - static) / max(1, there.peak_allocated_bytes - static)
            more = int(ratio * (here - there.peak_allocated_bytes))
        return replace(at_near.plus(more, "activations"), batch_size=batch_size)


def _beyond_states(found: Footprint, allocated_bytes: int) -> int:
    """Bytes of a peak that are neither the model's nor its optimizer's."""
    return max(0, allocated_bytes - sum(found.parts[part] for part in _STATIC))


def _from_half_to_twice(found: Footprint, kind: DoubtKind, why: str) -> Footprint:
    """Widen a footprint by what nothing tells."""
    of_batch = _beyond_states(found, found.peak_allocated_bytes)
    ends = found.lowest.plus(-of_batch // 2), found.highest.plus(of_batch)
    return found.doubted(kind, *ends, note=f"{why}: as if what belongs to the batch took from half to twice as much")


def _with_range(most: Footprint, found: Sequence[Footprint], ceiling: Footprint | None) -> Footprint:
    """Return the largest of several, with a range: from the least seen to the largest plus the spread of all."""
    points, lows, highs = ([getattr(each, name) for each in found] for name in ("peak", "lowest", "highest"))
    top, spread = Peak.extreme(highs, max), [max(each) - min(each) for each in zip(*map(astuple, points), strict=True)]
    beyond = Peak(*map(sum, zip(astuple(top), spread, strict=True)))
    if ceiling is not None:  # which is above all that was seen
        beyond = Peak.extreme((beyond, ceiling.highest), min)
    wide = most.doubted("values", *lows, top, beyond)
    if wide.high == wide.low:
        return most
    seen = [format_bytes(of(each.allocated_bytes for each in points)) for of in (min, max)]
    note = f"the memory of a step depends on its batch: {seen[0]} to {seen[1]} in those drawn; the most is predicted"
    return replace(wide, notes=(*most.notes, *([note] if spread[0] >= WORTH_A_NOTE else [])))


def _with_any_shape(most: Footprint, found: Sequence[Footprint]) -> Footprint:
    """Return the larger of a step compiled for its own shapes and one compiled for any, with a range of both."""
    seen = [format_bytes(each.peak_allocated_bytes) for each in found]
    note = f"batches differ in shape: compiled for this one the step takes {seen[0]}, compiled again for any {seen[1]}"
    ends = [end for each in found for end in (each.lowest, each.highest)]
    differ = abs(found[0].peak_allocated_bytes - found[1].peak_allocated_bytes) >= WORTH_A_NOTE
    return most.doubted("shapes", *ends, note=f"{note}; the most is predicted" if differ else "")


def _with_drawn(most: Footprint, found: Sequence[Footprint]) -> Footprint:
    """Return the largest of several with a range: an epoch may draw more than was tried, by a share of their spread."""
    least = min(found, key=lambda each: each.most_device_bytes)
    beyond = (most.peak_allocated_bytes - least.peak_allocated_bytes) // _BEYOND
    seen = [format_bytes(each.peak_allocated_bytes) for each in (least, most)]
    note = f"the memory of a step depends on random numbers that it draws: {seen[0]} to {seen[1]} in those tried"
    return most.doubted("draws", least.lowest, most.highest.plus(beyond), note=note)


def _with_lucks(most: Footprint, found: Sequence[Footprint]) -> Footprint:
    """Return the largest of several, with a range down to and up to those of much luck."""
    ends = [end for each in found for end in (each.lowest, each.highest)]
    seen = [format_bytes(of(each.peak_allocated_bytes for each in found)) for of in (min, max)]
    note = f"the memory of a step depends on values that it reads, also of random numbers: {seen[0]} to {seen[1]}"
    return most.doubted("draws", *ends, note=note if seen[0] != seen[1] else "")


_BEYOND = 4  # captures under 8 seeds draw 16 times, and the largest of a few sizes is among them or close


def _with_later(now: Footprint, later: Footprint) -> Footprint:
    """Widen the footprint of the first epoch's step up to that of a step that trains all parameters."""
    more = format_bytes(max(now.highest.allocated_bytes, later.highest.allocated_bytes))
    note = f"parameters that are frozen now may be trained in a later epoch: with all of them, a step takes {more}"
    return now.doubted("later epochs", later.highest, note=note)
