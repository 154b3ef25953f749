"""The stages joined: a program that can run one step -> its footprint at any batch size.

The ways to capture a step are here, best first; every trace says how it was captured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from lightning_memguard.core.batch.batches import EPOCHS, Epoch
from lightning_memguard.core.capture.capture import (
    FIRST,
    CaptureFailedError,
    Captures,
    OutOfTimeError,
    Variant,
    capture,
    captures_of,
    needs_values_later,
    trusted_child,
)
from lightning_memguard.core.capture.leftovers import WORTH_A_NOTE
from lightning_memguard.core.capture.program import Program, device_to_run_on
from lightning_memguard.core.device.host import available_memory
from lightning_memguard.core.device.speed import cpu_speed, speed_of
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.isolation.pool import processors
from lightning_memguard.core.replay.footprint import Footprint, Peak, footprint
from lightning_memguard.core.replay.learned import Learned
from lightning_memguard.core.replay.seconds import Speed, Timing
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.simulation.compiled import NOTE
from lightning_memguard.core.simulation.value_sizes import ASSUMED, LEAST
from lightning_memguard.core.trace.growth import Growth, extrapolate, grow
from lightning_memguard.core.trace.packed import PackedGrowth, PackedTraces
from lightning_memguard.core.trace.trace import SIGNED_SIZE, Answers, Method, Shapes, Trace, signature_of
from lightning_memguard.core.trace.work import Work
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.units import format_bytes

# Powers of two, so that a step that divides its batch runs; above 2, so that batch norm and pairs do; small, since the
# real run allocates them. The fourth is run only to check a square.
FAKE_SIZES = (4, 8, 16, 32)
REAL_SIZES = (2, 4, 8)
VARIANTS = tuple(map(Variant, range(4)))  # at each size
_UNEVEN_DRAWS = range(1, 9)  # if the samples differ in size
SHARED_VARIANTS = tuple(map(Variant, range(8)))  # at one small size
_WAYS: tuple[Method, ...] = ("fake", "worst-case", "real")
_CHECKED = 3  # sizes that check how a step grows
_CLEARLY = 1.01  # times as much as real batches take: such a worst case is not predicted
_MOST_SECONDS = 20.0  # for a real run, as far as that is known beforehand
_TOO_SLOW_SECONDS = 60.0  # the smallest real run; after a slower one, no other is made
_MOST_PROBED_BYTES = 4 << 30  # of the worst case, for a real run of unknown length
_STATIC = ("parameters", "buffers", "optimizer_state")
_OUT_OF_MEMORY = ("can't allocate memory", "MemoryError", "not enough memory")


class StepFailsError(CannotTraceError):
    """The step runs at some batch sizes and raises at another, as one that pairs its samples does at an odd one."""


@dataclass(frozen=True)
class Prediction:
    """Memory of a program: its footprint at any size, or at the sizes that can be captured.

    Attributes:
        program: what runs.
        settings: the allocator's rules.
        method: how the step was captured.
        growth: how the events grow; None if the step runs differently at different sizes, so that each is captured.
        context_bytes: bytes of the process on its device outside the allocator.
        scalable: False if only the sizes in ``traces`` are known.
        notes: assumptions, in plain words.
        traces: the traces captured to predict from, by batch size.
        held: bytes on the device throughout in addition to the step, by part: during validation, those of the training.
        seen: the batches that the step was captured with, by batch size: shapes and bytes.
        compiles: whether the step calls code for torch.compile; ``growth`` and ``traces`` have it uncompiled.
        answers: what the step read as it ran as written, if it compiles something.
        compiled: traces of the compiled step, by batch size; `proven_at` adds to them. Between them footprints are
            estimates.
        variants: the captures at each size, if memory depends on values; the largest is in ``traces``.
        others: by batch size, the traces of all variants but the largest.
        ceiling: the largest possible memory, if that is known too.
        floor: the least possible memory, if ``growth`` is the largest.
        unfrozen: the step that trains all parameters, if frozen ones may be trained later.
        kinds: if the data sets the batch sizes, shapes and bytes of each kind of batch that was captured.
        kind: the place in ``kinds`` of the one that takes the most, which is predicted.
        stopped: why too few captures were made to check how the step grows, or what other values change.
        guessed: sizes that were asked for after the deadline.
        learned: what earlier runs of the step have measured.
    """

    program: Program
    settings: AllocatorSettings
    method: Method
    growth: Growth | PackedGrowth | None
    context_bytes: int | tuple[int, int, int] = 0
    scalable: bool = True
    notes: tuple[str, ...] = ()
    traces: Mapping[int, Trace] = field(default_factory=dict)
    held: tuple[tuple[str, int], ...] = ()
    seen: dict[int, tuple[Shapes, int] | None] = field(default_factory=dict, compare=False)
    compiles: bool = False
    answers: Answers = ()
    compiled: Mapping[int, Trace] = field(default_factory=dict)
    variants: tuple[Variant, ...] = ()
    others: Mapping[int, tuple[Trace, ...]] = field(default_factory=dict)
    ceiling: Growth | PackedGrowth | None = None
    floor: Growth | PackedGrowth | None = None
    unfrozen: Prediction | None = None
    kinds: tuple[tuple[Shapes, int], ...] = ()
    kind: int = 0
    stopped: str = ""
    guessed: set[int] = field(default_factory=set, compare=False)
    learned: Learned | None = None
    # What it was asked for so far; a copy starts with its own.
    _known_traces: dict[int, tuple[Trace, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)
    _known_footprints: dict[int, Footprint] = field(init=False, repr=False, compare=False, default_factory=dict)
    _failed: dict[int, CaptureFailedError] = field(init=False, repr=False, compare=False, default_factory=dict)

    def packed(self) -> Prediction:
        """Return the prediction in little memory, slower to ask, without captures that the growth reproduces."""
        all_growth = self.growth, self.ceiling, self.floor
        growth, ceiling, floor = (PackedGrowth.of(g) if isinstance(g, Growth) else g for g in all_growth)
        traces, others = ({}, {}) if growth else (dict(self.traces), dict(self.others))
        for size, known in {} if growth else self._known_traces.items():
            traces[size], others[size] = known[0], known[1:]
        packed = replace(self, growth=growth, ceiling=ceiling, floor=floor, compiled=PackedTraces(self.compiled))
        unfrozen = self.unfrozen.packed() if self.unfrozen else None
        return replace(packed, traces=PackedTraces(traces), others=PackedTraces(others), unfrozen=unfrozen)

    def unpacked(self) -> Prediction:
        """Return the prediction with its growth unpacked, to be asked at many sizes."""
        return replace(self, growth=self.growth.unpacked()) if isinstance(self.growth, PackedGrowth) else self

    def uncompiled(self) -> Prediction:
        """Return the prediction as if torch.compile did nothing."""
        return replace(self, compiles=False, compiled={})

    def trace_at(self, batch_size: int) -> Trace:
        """The step's events at one batch size; if memory depends on values, those of the largest variant."""
        return self._traces_at(batch_size)[0]

    def _traces_at(self, batch_size: int) -> tuple[Trace, ...]:
        """Return the trace of each variant, the largest first."""
        if batch_size in self.compiled:
            return (self.compiled[batch_size],)
        if self.method == "states":
            return (replace(next(iter(self.traces.values())), batch_size=batch_size),)
        if batch_size in self.traces and (batch_size in self.others or not self.variants):
            return (self.traces[batch_size], *self.others.get(batch_size, ()))
        if self.growth is not None:
            return (self.growth.at(batch_size),)
        if batch_size not in self._known_traces:
            self._known_traces[batch_size] = self._capture_or_extrapolate(batch_size)
        return self._known_traces[batch_size]

    def _capture_or_extrapolate(self, batch_size: int) -> tuple[Trace, ...]:
        if self.method != "real":
            try:
                return self._captured_at(batch_size)
            except OutOfTimeError as error:
                if not self.traces and not self._known_traces:
                    raise
                self.guessed.add(batch_size)
                return self._extrapolated_at(batch_size, str(error))
        if not self._can_run(batch_size):
            return self._extrapolated_at(batch_size, "there, the step was not run: it would take too long, or too much")
        try:
            return self._captured_at(batch_size)
        except CaptureFailedError as error:
            if not any(text in str(error) for text in _OUT_OF_MEMORY):
                self._failed[batch_size] = error
            return self._extrapolated_at(batch_size, f"there, {_reason(self.method, error)}")

    def _captured_at(self, batch_size: int) -> tuple[Trace, ...]:
        with captures_of(self.program) as captures:
            found = _traces_of(captures, self.program, batch_size, self.method, self.variants or (FIRST,))
        batches = [trace.batch for trace in found if trace.batch]
        self.seen[batch_size] = max(batches, key=lambda batch: batch[1], default=None)
        return found

    def _can_run(self, batch_size: int) -> bool:
        known = [*self.traces.values(), *(traces[0] for traces in self._known_traces.values())]
        return _may_run(known, batch_size)

    def _extrapolated_at(self, batch_size: int, why: str) -> tuple[Trace, ...]:
        """Extrapolate the traces from the sizes that ran: from the next larger one if there is one."""
        known = {*self.traces, *(size for size, traces in self._known_traces.items() if traces[0].seconds)}
        near = min((size for size in known if size >= batch_size), default=max(known))
        small = max((size for size in known if size < near), default=near)
        note = f"the memory at batch size {batch_size} is extrapolated from batch size {near}: {why}"
        return tuple(
            replace(trace, notes=(*trace.notes, note))
            for trace in (
                extrapolate(pair, batch_size)
                for pair in zip(self._all_variants_at(small), self._all_variants_at(near), strict=True)
            )
        )

    def _all_variants_at(self, batch_size: int) -> tuple[Trace, ...]:
        """Return the traces of all variants at a size that ran; captures those that ``traces`` and ``others`` lack."""
        if batch_size in self._known_traces:
            return self._known_traces[batch_size]
        known = (self.traces[batch_size], *self.others.get(batch_size, ()))
        if len(known) == len(self.variants or (FIRST,)):
            return known
        try:
            self._known_traces[batch_size] = self._captured_at(batch_size)
        except CaptureFailedError:
            self._known_traces[batch_size] = known * len(self.variants)
        return self._known_traces[batch_size]

    def expected_batch(self, batch_size: int) -> tuple[Shapes, int]:
        """Shapes and bytes of the batch that the step was given, else of what its loaders give."""
        return self.seen.get(batch_size) or self.program.expected_batch(batch_size)

    def own_trace_at(self, batch_size: int) -> Trace:
        """Return the trace of the step with the bytes in `held`."""
        return self.trace_at(batch_size).holding(self.held)

    def footprint_at(self, batch_size: int) -> Footprint:
        """The memory of the step at one batch size."""
        known = self._known_footprints
        if batch_size not in known and self.compiled and batch_size not in self.compiled:
            known[batch_size] = self._estimate_at(batch_size)
        if batch_size not in known:
            found = [self.footprint_of(trace) for trace in self._traces_at(batch_size)]
            most = max(found, key=lambda each: each.most_device_bytes)
            if any(variant.epoch for variant in self.variants) and len(found) > 1:
                most = sorted(found, key=lambda each: each.most_device_bytes)[len(found) // 2]
                most = most.widened(*(end for each in found for end in (each.lowest, each.highest)))
            elif len(found) > 1:
                most = _with_range(
                    most, found, self.footprint_of(self.ceiling.at(batch_size)) if self.ceiling else None
                )
            least = self.footprint_of(self.floor.at(batch_size)).lowest if self.floor else most.lowest
            most = most.widened(least) if least.allocated_bytes < most.lowest.allocated_bytes else most
            if self.floor and most.peak_allocated_bytes - most.lowest.allocated_bytes < WORTH_A_NOTE:
                most = replace(most, notes=tuple(note for note in most.notes if ASSUMED not in note))
            if batch_size in self.guessed or (self.stopped and batch_size not in self._captured_sizes):
                most = self._with_doubt(most)
            if self.stopped and self._is_of_one_draw:
                most = self._with_unknown_values(most)
            if self.unfrozen:
                most = _with_later(most, self.footprint_of(self.unfrozen.trace_at(batch_size)))
            batch = " x ".join(map(str, next(iter(self.expected_batch(batch_size)[0]), ()))) if self.kinds else ""
            if self.compiles:
                work = self.growth.at(batch_size).work if self.growth else ()
                most = replace(most, timing=self._timing(work) if work else None)
            most = replace(most, batch=batch, notes=tuple(dict.fromkeys((*self.notes, *most.notes))))
            known[batch_size] = self.learned.corrected(most) if self.learned else most
        return known[batch_size]

    @property
    def signature(self) -> str:
        """The step's signature, which no batch size changes; empty if its events are not known at every size."""
        if self.growth is None or self.compiles or self.variants:
            return ""
        return signature_of(self.growth.at(SIGNED_SIZE))

    @property
    def _captured_sizes(self) -> set[int]:
        return {*self.traces, *self._known_traces, *(self.growth.sizes if self.growth else ())} - self.guessed

    def _with_doubt(self, guessed: Footprint) -> Footprint:
        """Widen a footprint that no capture has checked: at most, the batch's share grows with the size squared."""
        near = max(self._captured_sizes)
        times = max(1.0, guessed.batch_size / near)
        grown = self.footprint_at(near)
        of_batch = grown.peak_allocated_bytes - sum(grown.parts[part] for part in _STATIC)
        more = grown.peak_allocated_bytes + int(of_batch * (times**2 - 1)) - guessed.highest.allocated_bytes
        note = f"not captured at this size: at most as if what belongs to the batch grew with its square from {near}"
        return guessed.widened(guessed.highest.plus(max(0, more)), note=note)

    @property
    def _is_of_one_draw(self) -> bool:
        """Whether the step was not compared among batches of other values."""
        return self.method in ("worst-case", "real") and not self.variants

    def _with_unknown_values(self, found: Footprint) -> Footprint:
        """Widen a footprint by what other values may change, since no capture has shown how much that is."""
        of_batch = found.peak_allocated_bytes - sum(found.parts[part] for part in _STATIC)
        if self.method == "real":
            other, most = found.highest.plus(of_batch), "as if what belongs to the batch took twice as much"
        else:
            other, most = found.lowest.plus(-of_batch), "with results as large as their operators can make them"
        return found.widened(other, note=f"other values were not tried: at most {most}")

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

    def footprint_of(self, trace: Trace) -> Footprint:
        """The memory and time of a trace of the step."""
        found = footprint(trace.holding(self.held), self.settings, self.context_bytes)
        return replace(found, timing=self._timing(trace.work)) if trace.work else found

    def _timing(self, work: Sequence[Work]) -> Timing:
        """Return how the step is timed; ``work`` is that of a batch as written."""
        speed = partial(speed_here, self.program.gpu)
        return Timing(work, speed, self.program.batches_per_step or 1, compiled=self.compiles)

    def proven_at(self, batch_size: int) -> Prediction:
        """Capture the step at this size: as it is compiled, if it is, else to compare it with the growth.

        Returns:
            This prediction if the two agree, or if there is nothing to compare; else a prediction that captures each
            size. For a compiled step, a prediction that has a trace of this size.

        Raises:
            StepFailsError: the step does not run at this size, though it did at others.
        """
        if self.compiles and batch_size not in self.compiled:
            return self._with_compiled(batch_size)
        if batch_size in self._failed:
            failure = self._failed[batch_size]
            raise StepFailsError(f"at batch size {batch_size} {_reason(self.method, failure)}") from failure
        is_known = batch_size in self.traces or batch_size in self.compiled
        cannot_run = self.method == "real" and not (self.program.is_real_at(batch_size) and self._can_run(batch_size))
        if self.growth is None or self.method == "states" or is_known or cannot_run:
            return self
        try:
            (proof,) = self._captured_at(batch_size)
        except OutOfTimeError as error:
            return replace(self, notes=(*self.notes, f"{error}: the step was not captured at batch size {batch_size}"))
        except CaptureFailedError as error:
            if self.method == "real" and any(text in str(error) for text in _OUT_OF_MEMORY):
                return self
            raise StepFailsError(f"at batch size {batch_size} {_reason(self.method, error)}") from error
        if proof.events == self.growth.at(batch_size).events:
            return self
        note = f"memory at batch size {batch_size} is off the line through others: each size is predicted by itself"
        return replace(self, growth=None, notes=(*self.notes, note), traces={**self.traces, batch_size: proof})

    def _with_compiled(self, batch_size: int) -> Prediction:
        try:
            trace = capture(self.program, batch_size, "compiled", Variant(answers=self.answers))
        except CaptureFailedError as error:
            eager = replace(self.uncompiled(), notes=(*self.notes, _reason("compiled", error)))
            return eager.proven_at(batch_size)
        self.seen[batch_size] = trace.batch
        return replace(self, compiled={**self.compiled, batch_size: trace})


def speed_here(gpu: Gpu | None) -> Speed | None:
    """How fast a GPU is; for None this machine's CPU with the threads that torch uses now, measured in a child.

    The measurement takes memory, of which a run that is measured later must not see anything.
    """
    return speed_of(gpu) if gpu else _cpu_speed(torch.get_num_threads())


@functools.cache
def _cpu_speed(threads: int) -> Speed:
    def measure(_: int) -> Speed:
        # A new thread starts others of its own: those of the process that was forked are not there.
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
            return pool.submit(cpu_speed, threads).result()

    with trusted_child(measure) as child:
        return child.ask(threads)


def _with_range(most: Footprint, found: Sequence[Footprint], ceiling: Footprint | None) -> Footprint:
    """Return the largest of several, with a range: from the least seen to the largest plus the spread of all."""
    points, lows, highs = ([getattr(each, name) for each in found] for name in ("peak", "lowest", "highest"))
    top, spread = Peak.extreme(highs, max), [max(each) - min(each) for each in zip(*map(astuple, points), strict=True)]
    beyond = Peak(*map(sum, zip(astuple(top), spread, strict=True)))
    if ceiling is not None:  # which is above all that was seen
        beyond = Peak.extreme((beyond, ceiling.highest), min)
    wide = most.widened(*lows, top, beyond)
    if wide.high == wide.low:
        return most
    seen = [format_bytes(of(each.allocated_bytes for each in points)) for of in (min, max)]
    note = f"the memory of a step depends on its batch: {seen[0]} to {seen[1]} in those drawn; the most is predicted"
    return replace(wide, notes=(*most.notes, *([note] if spread[0] >= WORTH_A_NOTE else [])))


_NOT_UNFROZEN = (
    "parameters that are frozen now may be trained in a later epoch, which takes more: that is not predicted"
)


def _with_later(now: Footprint, later: Footprint) -> Footprint:
    """Widen the footprint of the first epoch's step up to that of a step that trains all parameters."""
    more = format_bytes(max(now.highest.allocated_bytes, later.highest.allocated_bytes))
    note = f"parameters that are frozen now may be trained in a later epoch: with all of them, a step takes {more}"
    return now.widened(later.highest, note=note)


def predict(
    program: Program,
    batch_size: int,
    settings: AllocatorSettings,
    *,
    context_bytes: int | tuple[int, int, int] = 0,
    scalable: bool = True,
) -> Prediction:
    """Capture a step in the best way that works: fake, worst case, real, states alone.

    If real batches take clearly less than the worst case, the prediction uses the share of it that they take.

    Args:
        program: what runs.
        batch_size: the size asked for; it is the one captured if small sizes fail.
        settings: the allocator's rules.
        context_bytes: what the process takes on its device outside the allocator.
        scalable: False to capture ``batch_size`` alone.

    Raises:
        CannotTraceError: not even the states could be made.
    """
    with captures_of(program) as captures:
        captures.stopped = ""
        known = Prediction(program, settings, "states", None, context_bytes, scalable)
        found = _predicted(captures, known, batch_size)
        if captures.stopped and not found.stopped:
            unchecked = found.growth is not None and len(found.growth.sizes) < _CHECKED
            note = f"{captures.stopped}: captures that would have checked the prediction were left out"
            stopped = captures.stopped if unchecked or found._is_of_one_draw else ""
            found = replace(found, notes=(*found.notes, note), stopped=stopped)
        unfrozen = program.unfrozen()
        if unfrozen is not None:
            with captures_of(unfrozen) as others, contextlib.suppress(CannotTraceError):
                later = _predicted(others, replace(known, program=unfrozen), batch_size)
                found = replace(found, unfrozen=later)
            if found.unfrozen is None or found.unfrozen.method == "states":
                found = replace(found, notes=(*found.notes, _NOT_UNFROZEN))
        if not any(NOTE in trace.notes for trace in found.traces.values()):
            return found
        if program.device.type != "cpu":
            return replace(found, notes=(*found.notes, "torch.compile is followed on the CPU only"))
        near = min(found.traces, key=lambda size: abs(size - batch_size))
        compiles = found.method != "states" and not found.variants
        found = replace(found, compiles=compiles, answers=found.traces[near].answers)
        return found if scalable else found.proven_at(batch_size)


def predict_largest(
    program: Program, asked: int, settings: AllocatorSettings, *, scalable: bool
) -> tuple[int, Prediction]:
    """Predict the step on the kind of batch that takes the most, and return its batch size: ``asked`` if that sets it.

    Raises:
        CannotTraceError: not even the states could be made.
    """
    kinds = program.kinds
    if not kinds:
        return asked, predict(program, asked, settings, scalable=scalable)
    sizes = [each.families[0].small_size for each in kinds]
    for each, size in zip(kinds, sizes, strict=True):
        with captures_of(each) as captures:
            captures.start(each, size, "fake")
    traces = [_capture_to_compare(each, size, settings) for each, size in zip(kinds, sizes, strict=True)]
    nbytes = [footprint(trace, settings).most_device_bytes for trace in traces]
    place = nbytes.index(max(nbytes))
    found = predict(kinds[place], sizes[place], settings, scalable=False)
    batches = (trace.batch or each.expected_batch(trace.batch_size) for trace, each in zip(traces, kinds, strict=True))
    return sizes[place], replace(found, kinds=tuple(batches), kind=place)


def _capture_to_compare(program: Program, batch_size: int, settings: AllocatorSettings) -> Trace:
    """Capture a step, to compare its size with that of others: without memory, if that is possible."""
    for method in _WAYS[:2]:
        with contextlib.suppress(CaptureFailedError):
            return capture(program, batch_size, method)
    return predict(program, batch_size, settings, scalable=False).trace_at(batch_size)


def _predicted(captures: Captures, known: Prediction, batch_size: int) -> Prediction:
    program, why_not = known.program, dict[str, str]()  # the same happens in several ways: it is reported once
    value_needed = True
    for method in _WAYS:
        if method == "worst-case" and not value_needed:
            continue  # it would fail in the same way
        try:
            if method == "real":
                return _real(captures, replace(known, notes=tuple(why_not.values())), batch_size)
            traces, growth = _traces_and_growth(captures, program, batch_size, method, known.scalable)
        except OutOfTimeError as error:
            return _stopped(captures, known, method, [*why_not.values(), str(error)])
        except CannotTraceError as error:  # the step failed, or no two sizes of it agree
            why_not[str(error)] = _reason(method, error)
            value_needed = isinstance(error, CaptureFailedError) and error.value_needed
        else:
            found = _from(known, method, traces, growth)
            found = replace(found, scalable=known.scalable and (growth is not None or len(traces) > 1))
            if needs_values_later(traces[0]) and device_to_run_on(program, fake=False).type == program.device.type:
                with contextlib.suppress(CannotTraceError):
                    return _real(captures, known, batch_size)
            found = _uneven(found, batch_size) or found
            if method == "worst-case":
                return _sampled(captures, found, batch_size) or _with_least(captures, found)
            return found
    try:
        states = capture(program, batch_size, "states")
    except CaptureFailedError as error:
        raise CannotTraceError("; ".join([*why_not.values(), _reason("states", error)])) from error
    return replace(known, scalable=False, notes=tuple(why_not.values()), traces={batch_size: states})


def _stopped(captures: Captures, known: Prediction, method: Method, reasons: list[str]) -> Prediction:
    """Predict from what was captured until the deadline.

    Raises:
        CannotTraceError: nothing was captured.
    """
    traces = captures.known(known.program, method)
    if not traces:
        raise CannotTraceError("; ".join(reasons))
    growth = None
    if len(traces) > 1:
        with contextlib.suppress(CannotTraceError):
            growth = grow(traces)
    sizes = ", ".join(str(trace.batch_size) for trace in traces)
    notes = *known.notes, f"{reasons[-1]}: the step was captured at batch size {sizes} alone"
    return replace(_from(known, method, traces, growth), notes=notes, stopped=reasons[-1])


def _from(known: Prediction, method: Method, traces: Sequence[Trace], growth: Growth | None) -> Prediction:
    seen = {trace.batch_size: trace.batch for trace in traces}
    return replace(known, method=method, growth=growth, traces={t.batch_size: t for t in traces}, seen=seen)


# -- on real batches


def _real(captures: Captures, known: Prediction, batch_size: int) -> Prediction:
    """Predict from real runs at small sizes and at the requested one; if these do not agree, by a run at each size.

    Raises:
        CaptureFailedError: the step raised at the small sizes and at the requested one.
    """
    program = known.program
    sizes, variants = _small_sizes(program), VARIANTS[1:3]
    try:
        traces = [capture(program, sizes[0], "real")]
        seconds = traces[0].seconds
        if 2 * seconds > _TOO_SLOW_SECONDS:
            sizes, variants = sizes[:1], VARIANTS[1:2] if seconds < _TOO_SLOW_SECONDS else ()
        elif seconds * sizes[-1] > _MOST_SECONDS * sizes[0]:
            sizes, variants = sizes[:2], VARIANTS[1:2]
        traces += _all_captured(captures, program, sizes[1:][-1:], "real")  # the largest, if there are several
    except CaptureFailedError:
        if not program.is_real_at(batch_size):
            raise
        traces, sizes = _all_captured(captures, program, [batch_size], "real"), ()
    size, again = traces[-1].batch_size, list[Trace]()
    for variant in variants:
        captures.start(program, size, "real", variant)
    for variant in variants:
        with contextlib.suppress(CaptureFailedError):
            again.append(capture(program, size, "real", variant))
    found = _from(known, "real", traces, None)
    found = replace(found, scalable=known.scalable and (len(traces) > 1 or program.is_real_at(2 * batch_size)))
    if any(trace.events != traces[-1].events for trace in again):
        largest, *smaller = _traces_of(captures, program, size, "real", VARIANTS)
        return replace(found, variants=VARIANTS, traces={**found.traces, size: largest}, others={size: tuple(smaller)})
    with contextlib.suppress(CaptureFailedError):
        traces += _all_captured(captures, program, sizes[1:-1], "real")
    if batch_size not in found.traces and program.is_real_at(batch_size) and _may_run(traces, batch_size):
        with contextlib.suppress(CaptureFailedError):
            traces = [*traces, capture(program, batch_size, "real")]
    try:
        growth = grow(traces)
        if growth.degree == 2 and len(traces) < 4:  # any three sizes are on some square
            traces = [*traces, capture(program, 2 * traces[-1].batch_size, "real")]
            growth = grow(traces)
    except CannotTraceError:
        growth = None
    return replace(_from(found, "real", traces, growth), scalable=found.scalable)


def _small_sizes(program: Program) -> tuple[int, ...]:
    multiple = program.multiple
    return REAL_SIZES if REAL_SIZES[0] % multiple == 0 else tuple(multiple << doubling for doubling in range(3))


def _may_run(known: Sequence[Trace], batch_size: int) -> bool:
    """Whether a real run is expected to fit this machine and to end soon, from runs at other sizes."""
    ran = [trace for trace in known if trace.seconds]
    if not ran:
        return False
    largest = max(ran, key=lambda trace: trace.batch_size)
    if batch_size <= largest.batch_size:
        return True
    smaller = max((t for t in ran if t.batch_size < largest.batch_size), key=lambda t: t.batch_size, default=largest)
    seconds = largest.seconds * batch_size / largest.batch_size
    if smaller is not largest:  # what a step takes at any size does not grow
        rise = (largest.seconds - smaller.seconds) / (largest.batch_size - smaller.batch_size)
        seconds = min(seconds, largest.seconds + max(0.0, rise) * (batch_size - largest.batch_size))
    likely = extrapolate([smaller, largest], batch_size).only("point")
    return seconds <= _MOST_SECONDS and _most_alive(likely) <= _free_bytes()


def _free_bytes() -> int:
    """Bytes that each child may take."""
    free = available_memory()
    return free.free_bytes // processors() if free else _MOST_PROBED_BYTES


def _most_alive(trace: Trace) -> int:
    """The most bytes alive at once."""
    return max(accumulate(each.nbytes if each.action == "alloc" else -each.nbytes for each in trace.events), default=0)


def _traces_of(
    captures: Captures, program: Program, batch_size: int, method: Method, variants: Sequence[Variant]
) -> tuple[Trace, ...]:
    """The captures of these variants, the largest first."""
    found = _all_captured(captures, program, [batch_size], method, variants)
    return tuple(sorted(found, key=_most_alive, reverse=True))


def _uneven(known: Prediction, batch_size: int) -> Prediction | None:
    """Predict on batches as uneven as real ones; None if those need about as much as batches of the largest sample."""
    try:
        times, numbers = known.program.uneven_draws(batch_size, _UNEVEN_DRAWS)
        if times <= _CLEARLY:
            return None
        weights = _weights(known, batch_size, numbers)
        variants = tuple(Variant(1 + place, epoch=Epoch(place, weights)) for place in (0, EPOCHS // 2, EPOCHS - 1))
        what = f"{len(_UNEVEN_DRAWS)} drawn"
        if any(weights):
            whole = all(each.draws and each.draws.is_whole for each in known.program.families)
            what = "an epoch" if whole else f"an epoch, and the range is of {EPOCHS} epochs drawn at random"
        note = (
            f"samples differ in size: predicted for the largest batch of {what}; one of the largest sample alone would "
            f"be {times:.1f} times as large"
        )
        found = _by_variants(known, variants if any(weights) else tuple(map(Variant, numbers)), note)
        found.trace_at(batch_size)
    except Exception:  # noqa: BLE001 - the user's collate function may raise anything
        return None
    return found


def _weights(known: Prediction, batch_size: int, draws: Sequence[int]) -> tuple[float, float]:
    """Fit how a step's memory grows with a batch's `measures`: on batches of the largest sample, and on some draws."""
    measured = [(known.program.measures(size, 0), trace) for size, trace in known.traces.items()]
    for draw in draws:
        trace = capture(known.program, batch_size, known.method, Variant(draw))
        measured.append((known.program.measures(batch_size, draw), trace))
    rows = np.array([(1, *measures) for measures, _ in measured], dtype=float)
    scales = rows.max(0).clip(1)
    found = np.linalg.lstsq(rows / scales, np.array([_most_alive(trace) for _, trace in measured]))[0] / scales
    return max(0.0, float(found[1])), max(0.0, float(found[2]))


def _sampled(captures: Captures, worst: Prediction, batch_size: int) -> Prediction | None:
    """Predict with results that depend on values as large as in real batches; None if that is about the worst case."""
    program, size = worst.program, _small_sizes(worst.program)[-1]
    try:
        size = size if program.is_real_at(size) else batch_size
        most_probed = min(_MOST_PROBED_BYTES, _free_bytes())
        if not program.is_real_at(size) or worst.footprint_at(size).peak_allocated_bytes > most_probed:
            return None
        first = capture(program, size, "real")
        larger = batch_size > size and program.is_real_at(batch_size) and _may_run([first], batch_size)
        size = batch_size if larger else size
        if worst.variants:  # each has its own batches
            traces = [capture(program, size, "real", variant) for variant in worst.variants]
            variants = tuple(
                replace(variant, shares=trace.shares) for variant, trace in zip(worst.variants, traces, strict=True)
            )
        else:
            traces = [*_traces_of(captures, program, size, "real", SHARED_VARIANTS)]
            shares = [trace.shares for trace in (traces[0], traces[len(traces) // 2], traces[-1])]
            variants = tuple(Variant(shares=each) for each in dict.fromkeys(shares))
        if not any(variant.shares for variant in variants):
            return None
        note = (
            f"some tensors are as large as the values in a batch make them: predicted from {len(traces)} batches of "
            f"{size}, and larger ones are possible"
        )
        sampled = replace(_by_variants(worst, variants, note), method="sampled")
        likely = max(batch_size, captures.next_size(program, [*worst.traces.values()][:2]) if worst.growth else 0)
        found, most = sampled.footprint_at(likely), worst.footprint_at(likely)
    except CannotTraceError:
        return None
    if most.highest.allocated_bytes <= _CLEARLY * found.peak_allocated_bytes:
        return None
    is_small = most.highest.allocated_bytes - found.peak_allocated_bytes < WORTH_A_NOTE
    return replace(sampled, notes=worst.notes) if is_small else sampled


def _with_least(captures: Captures, worst: Prediction) -> Prediction:
    """Predict an upper bound with its lower end: results that depend on values, as small as they can be."""
    sizes, smallest = worst.growth.sizes if worst.growth else (), Variant(shares=LEAST)
    if any(ASSUMED in note for trace in worst.traces.values() for note in trace.notes):
        with contextlib.suppress(CannotTraceError):  # it may fail without elements
            return replace(worst, floor=grow(_all_captured(captures, worst.program, sizes, "worst-case", [smallest])))
    return worst


def _by_variants(known: Prediction, variants: tuple[Variant, ...], note: str) -> Prediction:
    """Capture some variants at each size; what was predicted so far is the most that they can take."""
    ceiling = known.ceiling or known.growth
    known = replace(known, growth=None, traces={}, ceiling=ceiling, scalable=known.scalable and ceiling is not None)
    return replace(known, variants=variants, notes=(*known.notes, note))


# -- on fake tensors


def _traces_and_growth(
    captures: Captures, program: Program, asked: int, method: Method, scalable: bool
) -> tuple[list[Trace], Growth | None]:
    """Traces at a few sizes, and their growth if they agree."""
    if not scalable:
        return [capture(program, asked, method)], None
    fourth_size = FAKE_SIZES[3]
    try:
        traces = _all_captured(captures, program, FAKE_SIZES[: 2 if captures.foresees or captures.rough else 3], method)
    except CaptureFailedError as error:
        if error.value_needed:
            raise
        try:
            traces = _all_captured(captures, program, [asked << doubling for doubling in range(3)], method)
            fourth_size = asked << 3
        except CaptureFailedError:  # the size asked for is the last that may run
            return [capture(program, asked, method)], None
    likely = captures.next_size(program, traces[:2])
    if likely and likely not in [trace.batch_size for trace in traces]:
        with contextlib.suppress(CannotTraceError):  # it is that size that is special
            return _grown(program, [*traces[:2], capture(program, likely, method)], fourth_size, method)
    if not captures.rough and len(traces) == 2:
        traces += _all_captured(captures, program, FAKE_SIZES[2:3], method)
    try:
        return _grown(program, traces, fourth_size, method)
    except CannotTraceError:
        return traces, None


def _grown(program: Program, traces: list[Trace], fourth_size: int, method: Method) -> tuple[list[Trace], Growth]:
    """The growth of traces, and those it is from: a square is checked at a fourth size."""
    growth = grow(traces)
    if growth.degree == 2:
        traces = [*traces, capture(program, fourth_size, method)]
        growth = grow(traces)
    return traces, growth


def _all_captured(
    captures: Captures, program: Program, sizes: Sequence[int], method: Method, variants: Sequence[Variant] = (FIRST,)
) -> list[Trace]:
    tasks = [(program, size, method, variant) for size in sizes for variant in variants]
    for task in tasks:
        captures.start(*task)
    return [capture(*task) for task in tasks]


def _reason(method: Method, error: CannotTraceError) -> str:
    ways = {
        "compiled": "torch.compile could not run on fake tensors",
        "fake": "the step could not run on fake tensors",
        "worst-case": "the step could not run on fake tensors, even assuming the largest result of each operator",
        "sampled": "the step could not run on fake tensors as large as real ones",
        "real": "the step could not run on a copy",
        "states": "the optimizer could not run on a copy",
    }
    return f"{ways[method]} ({str(error).removesuffix('.')})"
