"""The stages joined: a program that can run one step -> the curve of its memory by batch size.

The ways to capture a step are here, best first; every trace says how it was captured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
    WaitsError,
    capture,
    captures_of,
    trusted_child,
)
from lightning_memguard.core.capture.curve import Curve, Gap, Proof, Terms
from lightning_memguard.core.capture.program import Program, device_to_run_on
from lightning_memguard.core.device.host import available_memory
from lightning_memguard.core.device.speed import cpu_speed, speed_of
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.isolation.pool import processors
from lightning_memguard.core.range import NOTHING, Range
from lightning_memguard.core.replay.footprint import Footprint, footprint
from lightning_memguard.core.replay.seconds import Speed
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.simulation.compiled_cuda import timing_bytes
from lightning_memguard.core.simulation.value_sizes import LEAST
from lightning_memguard.core.trace.growth import Growth, extrapolate, grow
from lightning_memguard.core.trace.trace import (
    NOT_COMPILED,
    OF_VALUES,
    PARTIAL,
    RUN,
    WORTH_A_NOTE,
    Method,
    Shapes,
    Trace,
)
from lightning_memguard.errors import CannotTraceError

# Powers of two, so that a step that divides its batch runs; above 2, so that batch norm and pairs do; small, since the
# real run allocates them. The fourth is run only to check a square.
FAKE_SIZES = (4, 8, 16, 32)
REAL_SIZES = (2, 4, 8)
VARIANTS = tuple(map(Variant, range(4)))  # at each size
_UNEVEN_DRAWS = range(1, 9)  # if the samples differ in size
_SEEDS = tuple(map(Variant, range(1, 9)))  # if the step draws random numbers
LUCKS = (Variant(luck="least"), Variant(luck="most"))  # if the step reads the values of random numbers
_TELLING = 3  # of them tell whether sizes depend on them
SHARED_VARIANTS = tuple(map(Variant, range(8)))  # at one small size; three of a slow step
_SLOW_SECONDS = 1.0
_WAYS: tuple[Method, ...] = ("fake", "worst-case")
_CHECKED = 3  # sizes that check how a step grows
_CLEARLY = 1.01  # times as much as real batches take: such a worst case is not predicted
_MOST_SECONDS = 20.0  # for a real run, as far as that is known beforehand
_TOO_SLOW_SECONDS = 60.0  # the smallest real run; after a slower one, no other is made
_MOST_PROBED_BYTES = 4 << 30  # of the worst case, for a real run of unknown length


class StepFailsError(CannotTraceError):
    """The step runs at some batch sizes and raises at another, as one that pairs its samples does at an odd one."""


@dataclass(frozen=True)
class Surveyor:
    """Runs the step of a program, in children and until a deadline; what it returns are curves.

    Children and deadline are those of the `Captures` that are open for the program.
    """

    program: Program

    def survey(self, batch_size: int, terms: Terms, *, scalable: bool = True) -> Curve:
        """Capture a step in the best way that works: fake, worst case, real, states alone.

        If real batches take clearly less than the worst case, the prediction uses the share of it that they take.

        Args:
            batch_size: the size asked for; it is the one captured if small sizes fail.
            terms: what turns a trace into a footprint; speed and accumulation are those of the program.
            scalable: False to capture ``batch_size`` alone.

        Raises:
            CannotTraceError: not even the states could be made.
        """
        program = self.program
        with captures_of(program) as captures:
            captures.stopped = ""
            known = Curve(terms_of(program, terms), "states", scalable=scalable)
            found = _predicted(captures, program, known, batch_size)
            if captures.stopped and not found.stopped:
                unchecked = found.growth is not None and len(found.growth.sizes) < _CHECKED
                note = f"{captures.stopped}: captures that would have checked the prediction were left out"
                stopped = captures.stopped if unchecked or found.is_of_one_draw else ""
                found = replace(found, notes=(*found.notes, note), stopped=stopped)
            found = self._with_unfrozen(found, known, batch_size)
            traces = {size: several[0] for size, several in found.captured.items()}
            if not any(trace.has_note("uncompiled") for trace in traces.values()):
                return found
            found = replace(found, as_written=True)
            if not _is_compiled_for(program):
                return replace(found, notes=(*found.notes, "torch.compile is followed on CPUs and NVIDIA's GPUs only"))
            near = min(traces, key=lambda size: abs(size - batch_size))
            if found.method != "states" and (not found.variants or found.of_uneven_batches):
                found = replace(found, reads=traces[near].answers, as_written=False)
            return found if scalable else self.prove(found, batch_size)

    def _with_unfrozen(self, found: Curve, known: Curve, batch_size: int) -> Curve:
        unfrozen = self.program.unfrozen()
        if unfrozen is None:
            return found
        with captures_of(unfrozen) as others, contextlib.suppress(CannotTraceError):
            found = replace(found, unfrozen=_predicted(others, unfrozen, known, batch_size))
        if found.unfrozen is None or found.unfrozen.method in PARTIAL:
            return replace(found, notes=(*found.notes, _NOT_UNFROZEN))
        return found

    def extend(self, curve: Curve, batch_size: int) -> Curve:
        """Return the curve with what it needs to be asked at a size: captures there, or why there are none.

        Raises:
            CaptureFailedError: the step cannot be captured there, and is not known at any other size.
        """
        later = curve.unfrozen
        if later is not None and not later.knows(batch_size) and (unfrozen := self.program.unfrozen()):
            curve = replace(curve, unfrozen=Surveyor(unfrozen).extend(later, batch_size))
        if curve.knows(batch_size) or batch_size in curve.gaps:
            return curve
        if curve.method in RUN and not _may_run(curve, batch_size):
            why = "the step was not run: it would take too long, or too much"
            return self._with_gap(curve, batch_size, Gap("not run", why))
        try:
            return curve.with_captured(batch_size, self._captured(curve, batch_size))
        except CaptureFailedError as error:
            is_late = isinstance(error, OutOfTimeError)
            if not curve.captured or not (curve.scalable or curve.method in RUN or is_late):
                raise
            gap = Gap("not run" if error.out_of_memory else "failed", _reason(curve.method, error))
            return self._with_gap(curve, batch_size, Gap("late", str(error)) if is_late else gap)

    def _with_gap(self, curve: Curve, batch_size: int, gap: Gap) -> Curve:
        """Note why there is no capture; the sizes to extrapolate from get all variants."""
        for size in dict.fromkeys(curve.near(batch_size)):
            if not curve.knows(size):
                with contextlib.suppress(CaptureFailedError):
                    curve = curve.with_captured(size, self._captured(curve, size))
        return replace(curve, gaps={**curve.gaps, batch_size: gap})

    def _captured(self, curve: Curve, batch_size: int) -> tuple[Trace, ...]:
        with captures_of(self.program) as captures:
            return _traces_of(captures, self.program, batch_size, curve.method, curve.variants or (FIRST,))

    def prove(self, curve: Curve, batch_size: int) -> Curve:
        """Capture the step at this size: as it is compiled, if it is, else to compare it with the growth.

        Returns:
            The curve, confirmed, if the two agree or if there is nothing to compare; else one without the growth, so
            that each size is captured. For a compiled step, one that has a trace of this size.

        Raises:
            StepFailsError: the step does not run at this size, though it did at others.
        """
        if curve.compiles and batch_size not in curve.compiled:
            return self._with_compiled(curve, batch_size)
        gap, is_real = curve.gaps.get(batch_size), curve.method in OF_VALUES
        if gap and gap.kind == "failed":
            raise StepFailsError(f"at batch size {batch_size} {gap.why}")
        is_known = curve.growth is None or batch_size in curve.captured or batch_size in curve.compiled
        may_run = curve.method not in RUN or _may_run(curve, batch_size)
        cannot_run = is_real and not (self.program.is_real_at(batch_size) and may_run)
        if curve.growth is None or is_known or cannot_run:
            return curve
        try:
            proof, *_ = self._captured(curve, batch_size)
        except OutOfTimeError as error:
            note = f"{error}: the step was not captured at batch size {batch_size}"
            return replace(curve, notes=(*curve.notes, note))
        except CaptureFailedError as error:
            if is_real and error.out_of_memory:
                return curve
            raise StepFailsError(f"at batch size {batch_size} {_reason(curve.method, error)}") from error
        if proof.events == curve.growth.at(batch_size).events:
            return curve.confirmed_by(proof)
        note = f"memory at batch size {batch_size} is off the line through others: each size is predicted by itself"
        return replace(curve.with_captured(batch_size, (proof,)), growth=None, notes=(*curve.notes, note))

    def _with_compiled(self, curve: Curve, batch_size: int) -> Curve:
        one = replace(curve.likely_variant or FIRST, answers=curve.reads or ())
        try:
            trace = capture(self.program, batch_size, "compiled", one)
        except CaptureFailedError as error:
            why = _reason("compiled", error)
            return self.prove(replace(curve.uncompiled(), as_written=True, notes=(*curve.notes, why)), batch_size)
        found = replace(curve.confirmed_by(trace), compiled={**curve.compiled, batch_size: (trace,)})
        try:
            if not self.program.changes_shape(batch_size):
                return found
            again = capture(self.program, batch_size, "compiled", replace(one, any_shape=True))
        except Exception as error:  # noqa: BLE001 - the user's collate function may raise anything
            note = f"{_NOT_AGAIN}: {error}"
            return replace(found, notes=(*found.notes, note))
        return replace(found, compiled={**curve.compiled, batch_size: (trace, again)})


_NOT_AGAIN = "what torch.compile makes of the step once batches of other shapes have come was not captured"
_NOT_UNFROZEN = (
    "parameters that are frozen now may be trained in a later epoch, which takes more: that is not predicted"
)


def terms_of(program: Program, terms: Terms) -> Terms:
    """Return the terms with the speed and the accumulation of a program."""
    return replace(
        terms,
        speed=partial(speed_here, program.gpu),
        batches_per_step=program.batches_per_step or 1,
        timing_bytes=timing_bytes(program.gpu.kernel_target) if program.gpu else 0,
    )


class Prediction:
    """A curve, and the program behind it, which is run where the curve needs a capture of its own.

    Attributes:
        program: what runs.
        curve: what is known of it; each size that is asked for extends it.
    """

    def __init__(self, program: Program, curve: Curve) -> None:
        self.program = program
        self.curve = curve

    def extended_to(self, batch_size: int) -> Curve:
        """Return the curve once it can be asked at a size."""
        self.curve = Surveyor(self.program).extend(self.curve, batch_size)
        return self.curve

    def footprint_at(self, batch_size: int) -> Footprint:
        """The memory of the step at one batch size."""
        return self.extended_to(batch_size).footprint_at(batch_size)

    def trace_at(self, batch_size: int) -> Trace:
        """The step's events at one batch size; if memory depends on values, those of the largest variant."""
        return self.extended_to(batch_size).trace_at(batch_size)

    def own_trace_at(self, batch_size: int) -> Trace:
        """Return the trace of the step with the bytes that are held throughout."""
        return self.extended_to(batch_size).own_trace_at(batch_size)

    def expected_batch(self, batch_size: int) -> tuple[Shapes, int]:
        """Shapes and bytes of the batch that the step was given, else of what its loaders give."""
        return self.curve.batch_at(batch_size) or self.program.expected_batch(batch_size)

    def proven_at(self, batch_size: int) -> Prediction:
        """Return itself once a capture at this size agrees, else what that capture makes of it; see `Surveyor.prove`.

        Raises:
            StepFailsError: the step does not run at this size, though it did at others.
        """
        proven = Surveyor(self.program).prove(self.curve, batch_size)
        if replace(proven, proofs=self.curve.proofs) != self.curve:
            return Prediction(self.program, proven)
        self.curve = proven
        return self


def speed_here(gpu: Gpu | None, threads: int | None = None) -> Speed | None:
    """How fast a GPU is; for None this machine's CPU with so many threads (torch's now), measured in a child.

    The measurement takes memory, of which a run that is measured later must not see anything.
    """
    return speed_of(gpu) if gpu else _cpu_speed(threads or torch.get_num_threads())


@functools.cache
def _cpu_speed(threads: int) -> Speed:
    def measure(_: int) -> Speed:
        # A new thread starts others of its own: those of the process that was forked are not there.
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
            return pool.submit(cpu_speed).result()

    with trusted_child(measure) as child:
        return child.ask(threads)


def predict(
    program: Program,
    batch_size: int,
    settings: AllocatorSettings,
    *,
    context_bytes: Range[int] = NOTHING,
    scalable: bool = True,
) -> Prediction:
    """Capture a step under an allocator's rules, see `Surveyor.survey`; ``context_bytes`` are outside the allocator."""
    curve = Surveyor(program).survey(batch_size, Terms(settings, context_bytes), scalable=scalable)
    return Prediction(program, curve)


def predict_largest(program: Program, asked: int, terms: Terms, *, scalable: bool) -> tuple[int, Curve]:
    """Survey the step on the kind of batch that takes the most, and return its batch size: ``asked`` if that sets it.

    Raises:
        CannotTraceError: not even the states could be made.
    """
    kinds = program.kinds
    if not kinds:
        return asked, Surveyor(program).survey(asked, terms, scalable=scalable)
    sizes = [each.families[0].small_size for each in kinds]
    for each, size in zip(kinds, sizes, strict=True):
        with captures_of(each) as captures:
            captures.start(each, size, "fake")
    traces = [_capture_to_compare(each, size, terms) for each, size in zip(kinds, sizes, strict=True)]
    nbytes = [footprint(trace, terms.settings).most_device_bytes for trace in traces]
    place = nbytes.index(max(nbytes))
    found = Surveyor(kinds[place]).survey(sizes[place], terms, scalable=False)
    batches = (trace.batch or each.expected_batch(trace.batch_size) for trace, each in zip(traces, kinds, strict=True))
    return sizes[place], replace(found, kinds=tuple(batches), kind=place)


def _capture_to_compare(program: Program, batch_size: int, terms: Terms) -> Trace:
    """Capture a step, to compare its size with that of others: without memory, if that is possible."""
    for method in _WAYS:
        with contextlib.suppress(CaptureFailedError):
            return capture(program, batch_size, method)
    return Surveyor(program).survey(batch_size, terms, scalable=False).trace_at(batch_size)


def _predicted(captures: Captures, program: Program, known: Curve, batch_size: int) -> Curve:
    why_not = dict[str, str]()  # the same happens in several ways: it is reported once
    value_needed = True
    for method in _WAYS:
        if not value_needed:
            continue  # it would fail in the same way
        try:
            traces, growth = _traces_and_growth(captures, program, batch_size, method, known.scalable)
        except OutOfTimeError as error:
            return _stopped(captures, program, known, batch_size, method, [*why_not.values(), str(error)])
        except WaitsError as error:
            raise CannotTraceError(_reason("real", error)) from error
        except CannotTraceError as error:  # the step failed, or no two sizes of it agree
            why_not[str(error)] = _reason(method, error)
            value_needed = isinstance(error, CaptureFailedError) and error.value_needed
        else:
            found = _from_some(known, method, traces, growth)
            if traces[0].has_note("values later") and device_to_run_on(program, fake=False).type == program.device.type:
                with contextlib.suppress(CannotTraceError):
                    return _real(captures, program, known, batch_size, "real")
            found = _uneven(program, found, batch_size) or _drawn(captures, program, found)
            if method == "worst-case":
                return _sampled(captures, program, found, batch_size) or _with_least(captures, program, found)
            return found
    found_by = _by_values(captures, program, known, batch_size, why_not) if value_needed and program.gpu else None
    return found_by or _for_real(captures, program, known, batch_size, why_not)


def _for_real(captures: Captures, program: Program, known: Curve, batch_size: int, why_not: dict[str, str]) -> Curve:
    """Predict from real runs; if there are none, the states alone."""
    try:
        return _real(captures, program, replace(known, notes=tuple(why_not.values())), batch_size, "real")
    except OutOfTimeError as error:
        return _stopped(captures, program, known, batch_size, "real", [*why_not.values(), str(error)])
    except CannotTraceError as error:
        why_not[str(error)] = _reason("real", error)
    try:
        states = capture(program, batch_size, "states")
    except CaptureFailedError as error:
        raise CannotTraceError("; ".join([*why_not.values(), _reason("states", error)])) from error
    return replace(known, scalable=False, notes=tuple(why_not.values()), captured={batch_size: (states,)})


def _by_values(
    captures: Captures, program: Program, known: Curve, batch_size: int, why_not: dict[str, str]
) -> Curve | None:
    """Predict a step that reads values for a GPU, of which a real run on the CPU would tell other layouts.

    None if it fails all the same; ``why_not`` then has the reasons.
    """
    most: Curve | None = None
    for method in ("valued", "answered"):
        try:
            if method == "answered":
                return _real(captures, program, known, batch_size, method)
            traces, growth = _traces_and_growth(captures, program, batch_size, method, known.scalable)
        except OutOfTimeError as error:  # noqa: PERF203 - there are two
            if most is None:
                return _stopped(captures, program, known, batch_size, method, [*why_not.values(), str(error)])
        except CannotTraceError as error:
            why_not[str(error)] = _reason(method, error)
        else:
            most = _valued(captures, program, _from_some(known, method, traces, growth), batch_size)
            if not traces[0].has_note("largest result"):
                return most
    return most and _with_least(captures, program, most)


def _stopped(
    captures: Captures, program: Program, known: Curve, batch_size: int, method: Method, reasons: list[str]
) -> Curve:
    """Predict from what was captured until the deadline; if that is no whole step, from what of one was recorded."""
    with contextlib.suppress(CaptureFailedError):  # it may have ended meanwhile
        capture(program, batch_size, method)
    traces, cut = captures.known(program, method), captures.cut(program, batch_size)
    if cut and cut.batch_size == batch_size and program.batches_per_step:
        own = cut.like_later(program.batches_per_step)
        if own is not None:
            notes = *known.notes, f"{reasons[-1]}: the first step was captured, and later ones are taken to be alike"
            found = _from(known, method, [replace(own, method=method)], None)
            return replace(found, scalable=False, notes=notes, stopped=reasons[-1])
    if not traces:
        trace = replace(cut or Trace(batch_size, program.device.type, "cut", ()), batch_size=batch_size)
        phase = trace.events[-1].phase if trace.events else ""
        stopped = (
            f"{reasons[-1]}{f' in the {phase} pass of a captured step' if phase in ('forward', 'backward') else ''}"
        )
        trace = trace if phase else trace.holding([("parameters", program.held_bytes)])
        found = replace(known, method="cut", scalable=False, captured={batch_size: (trace,)})
        return replace(found, notes=(*reasons[:-1], stopped), stopped=stopped)
    growth = None
    if len(traces) > 1:
        with contextlib.suppress(CannotTraceError):
            growth = grow(traces)
    sizes = [str(trace.batch_size) for trace in traces]
    listed = " and ".join(filter(None, (", ".join(sizes[:-1]), sizes[-1])))
    notes = *known.notes, f"{reasons[-1]}: the step was captured at batch size{'s' * (len(sizes) > 1)} {listed} alone"
    return replace(_from(known, method, traces, growth), notes=notes, stopped=reasons[-1])


def _from_some(known: Curve, method: Method, traces: Sequence[Trace], growth: Growth | None) -> Curve:
    found = _from(known, method, traces, growth)
    return replace(found, scalable=known.scalable and (growth is not None or len(traces) > 1))


def _from(known: Curve, method: Method, traces: Sequence[Trace], growth: Growth | None) -> Curve:
    captured = {trace.batch_size: (trace,) for trace in traces}
    proofs = {trace.batch_size: Proof(trace.batch, trace.seconds) for trace in traces}
    return replace(known, method=method, growth=growth, captured=captured, proofs=proofs)


# -- on real batches


def _real(captures: Captures, program: Program, known: Curve, batch_size: int, method: Method) -> Curve:
    """Predict from real runs at small sizes and at the requested one; if these do not agree, by a run at each size.

    ``method`` is one of `RUN`.

    Raises:
        CaptureFailedError: the step raised at the small sizes and at the requested one.
    """
    variants, lucks = VARIANTS[1:3], LUCKS if method == "answered" else ()
    between = list[int]()  # sizes that are captured last, if the others agree
    try:
        smallest, *larger = _small_sizes(program)
        traces = [capture(program, smallest, method)]
        seconds = traces[0].seconds
        if program.is_real_at(batch_size) and _could_run(traces, batch_size):
            _own_first(captures, program, batch_size, method)
        if 2 * seconds > _TOO_SLOW_SECONDS:
            larger, variants = [], VARIANTS[1:2] if seconds < _TOO_SLOW_SECONDS else ()
        elif seconds * larger[-1] > _MOST_SECONDS * smallest:
            larger, variants = larger[:1], VARIANTS[1:2]
        *between, largest = larger or [smallest]
        traces += _all_captured(captures, program, [largest] if larger else [], method)
    except CaptureFailedError as error:
        if isinstance(error, OutOfTimeError) or not program.is_real_at(batch_size):
            raise
        traces, between = _all_captured(captures, program, [batch_size], method), []
    size, again, variants = traces[-1].batch_size, list[Trace](), (*variants, *lucks)
    for variant in variants:
        captures.start(program, size, method, variant)
    for variant in variants:
        with contextlib.suppress(CaptureFailedError):
            again.append(capture(program, size, method, variant))
    found = _from(known, method, traces, None)
    found = replace(found, scalable=known.scalable and (len(traces) > 1 or program.is_real_at(2 * batch_size)))
    if any(trace.events != traces[-1].events for trace in again):
        variants = (*VARIANTS, *lucks)
        found = found.with_captured(size, _traces_of(captures, program, size, method, variants))
        return replace(found, variants=variants)
    with contextlib.suppress(CaptureFailedError):
        traces += _all_captured(captures, program, between, method)
    if batch_size not in found.captured and program.is_real_at(batch_size) and _could_run(traces, batch_size):
        with contextlib.suppress(CaptureFailedError):
            traces = [*traces, capture(program, batch_size, method)]
    try:
        growth = grow(traces)
        if growth.degree == 2 and len(traces) < 4:  # any three sizes are on some square
            traces = [*traces, capture(program, 2 * traces[-1].batch_size, method)]
            growth = grow(traces)
    except CannotTraceError:
        growth = None
    return replace(_from(found, method, traces, growth), scalable=found.scalable)


def _small_sizes(program: Program) -> tuple[int, ...]:
    multiple = program.multiple
    return REAL_SIZES if REAL_SIZES[0] % multiple == 0 else tuple(multiple << doubling for doubling in range(3))


def _may_run(curve: Curve, batch_size: int) -> bool:
    ran = [traces[0] for traces in curve.captured.values()]
    grown = (replace(curve.trace_at(size), seconds=proof.seconds) for size, proof in curve.proofs.items())
    return _could_run(ran or [*grown], batch_size)


def _could_run(known: Sequence[Trace], batch_size: int) -> bool:
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
    return max(accumulate(each.change for each in trace.events), default=0)


def _traces_of(
    captures: Captures, program: Program, batch_size: int, method: Method, variants: Sequence[Variant]
) -> tuple[Trace, ...]:
    """The captures of these variants, the largest first, and those of much luck last."""
    found = zip(variants, _all_captured(captures, program, [batch_size], method, variants), strict=True)
    return tuple(trace for _, trace in sorted(found, key=lambda pair: (bool(pair[0].luck), -_most_alive(pair[1]))))


def _uneven(program: Program, known: Curve, batch_size: int) -> Curve | None:
    """Predict on batches as uneven as real ones; None if those need about as much as batches of the largest sample."""
    try:
        times, numbers = program.uneven_draws(batch_size, _UNEVEN_DRAWS)
        if times <= _CLEARLY:
            return None
        weights = _weights(program, known, batch_size, numbers)
        variants = tuple(Variant(1 + place, epoch=Epoch(place, weights)) for place in (0, EPOCHS // 2, EPOCHS - 1))
        what = f"{len(_UNEVEN_DRAWS)} drawn"
        if any(weights):
            whole = all(each.draws and each.draws.is_whole for each in program.families)
            what = "an epoch" if whole else f"an epoch, and the range is of {EPOCHS} epochs drawn at random"
        note = (
            f"samples differ in size: predicted for the largest batch of {what}; one of the largest sample alone would "
            f"be {times:.1f} times as large"
        )
        found = _by_variants(known, variants if any(weights) else tuple(map(Variant, numbers)), note)
        return Surveyor(program).extend(found, batch_size)
    except Exception:  # noqa: BLE001 - the user's collate function may raise anything
        return None


def _drawn(captures: Captures, program: Program, known: Curve) -> Curve:
    """Predict a step that draws sizes (of its images, of how many layers run) under several seeds.

    The one that takes the most is predicted, as an epoch draws far more often than captures do.
    """
    first = next(iter(known.captured.values()))[0]
    if known.growth is None or not first.draws:
        return known
    size, *others = known.growth.sizes[:3]
    try:
        found = _all_captured(captures, program, [size], known.method, _SEEDS[:_TELLING])
        if all(trace.events == known.captured[size][0].events for trace in found):
            return known  # it draws values, not sizes
        found += _all_captured(captures, program, [size], known.method, _SEEDS[_TELLING:])
        pairs = sorted(zip(map(_most_alive, found), _SEEDS, strict=True), key=lambda pair: pair[0])
        ends = [
            _all_captured(captures, program, [size, *others], known.method, [seed]) for _, seed in (pairs[0], pairs[-1])
        ]
        least, most = map(grow, ends)
    except CannotTraceError as error:
        note = f"the step draws random numbers, and what others change was not captured: {error}"
        return replace(known, notes=(*known.notes, note))
    return replace(_from(known, known.method, ends[1], most), drawn=(least,), variants=(pairs[-1][1],))


def _valued(captures: Captures, program: Program, known: Curve, batch_size: int) -> Curve:
    """Predict a step that reads values of its batch and of random numbers, others of which may change it.

    Of those tried the one that takes the most is predicted, as an epoch draws far more often than captures do.
    """
    uneven = _uneven(program, known, batch_size) if known.growth else None
    if uneven is not None:
        return uneven
    size, *others = known.growth.sizes[:3] if known.growth else (max(known.captured),)
    first = known.captured[size][0]
    try:
        found = _all_captured(captures, program, [size], known.method, (*_SEEDS[:_TELLING], *LUCKS))
        if all(trace.events == first.events for trace in found):
            return known
        if known.growth is not None:
            with contextlib.suppress(CannotTraceError):
                return _grown_by_luck(captures, program, known, [size, *others])
        variants = *VARIANTS, *LUCKS
        curve = replace(known, growth=None, captured={}, proofs={}, variants=variants)
        return curve.with_captured(size, _traces_of(captures, program, size, known.method, variants))
    except CannotTraceError as error:
        note = f"the step reads values, and what others change was not captured: {error}"
        return replace(known, notes=(*known.notes, note))


def _grown_by_luck(captures: Captures, program: Program, known: Curve, sizes: Sequence[int]) -> Curve:
    """Predict how a step grows under the seed of some that takes the most, and with the least and most luck."""
    seeds = (FIRST, *_SEEDS)
    found = _all_captured(captures, program, sizes[:1], known.method, seeds)
    _, seed = max(zip(map(_most_alive, found), seeds, strict=True), key=lambda pair: pair[0])
    traces, *ends = (_all_captured(captures, program, sizes, known.method, [variant]) for variant in (seed, *LUCKS))
    curve = _from(known, known.method, traces, grow(traces))
    return replace(curve, drawn=tuple(map(grow, ends)), variants=(seed, *LUCKS))


def _weights(program: Program, known: Curve, batch_size: int, draws: Sequence[int]) -> tuple[float, float]:
    """Fit how a step's memory grows with a batch's `measures`: on batches of the largest sample, and on some draws."""
    measured = [(program.measures(size, 0), trace) for size, trace in known.surveyed.items()]
    for draw in draws:
        trace = capture(program, batch_size, known.method, Variant(draw))
        measured.append((program.measures(batch_size, draw), trace))
    rows = np.array([(1, *measures) for measures, _ in measured], dtype=float)
    scales = rows.max(0).clip(1)
    found = np.linalg.lstsq(rows / scales, np.array([_most_alive(trace) for _, trace in measured]))[0] / scales
    return max(0.0, float(found[1])), max(0.0, float(found[2]))


def _sampled(captures: Captures, program: Program, worst: Curve, batch_size: int) -> Curve | None:
    """Predict with results that depend on values as large as in real batches; None if that is about the worst case."""
    size, upper = _small_sizes(program)[-1], Prediction(program, worst)
    try:
        size = size if program.is_real_at(size) else batch_size
        most_probed = min(_MOST_PROBED_BYTES, _free_bytes())
        if not program.is_real_at(size) or upper.footprint_at(size).peak_allocated_bytes > most_probed:
            return None
        first = capture(program, size, "real")
        larger = batch_size > size and program.is_real_at(batch_size) and _could_run([first], batch_size)
        size = batch_size if larger else size
        if worst.variants:  # each has its own batches
            traces = [capture(program, size, "real", variant) for variant in worst.variants]
            variants = tuple(
                replace(variant, shares=trace.shares) for variant, trace in zip(worst.variants, traces, strict=True)
            )
        else:
            drawn = SHARED_VARIANTS if first.seconds < _SLOW_SECONDS else SHARED_VARIANTS[:3]
            traces = [*_traces_of(captures, program, size, "real", drawn)]
            shares = [trace.shares for trace in (traces[0], traces[len(traces) // 2], traces[-1])]
            variants = tuple(Variant(shares=each) for each in dict.fromkeys(shares))
        if not any(variant.shares for variant in variants):
            return None
        note = (
            f"some tensors are as large as the values in a batch make them: predicted from {len(traces)} batches of "
            f"{size}, and larger ones are possible"
        )
        sampled = Prediction(program, replace(_by_variants(worst, variants, note), method="sampled"))
        likely = max(batch_size, captures.next_size(program, [*worst.surveyed.values()][:2]) if worst.growth else 0)
        found, most = sampled.footprint_at(likely), upper.footprint_at(likely)
    except CannotTraceError:
        return None
    if most.peak_allocated_bytes <= _CLEARLY * found.peak_allocated_bytes:
        return None
    is_small = most.peak_allocated_bytes - found.peak_allocated_bytes < WORTH_A_NOTE
    return replace(sampled.curve, notes=worst.notes) if is_small else sampled.curve


def _with_least(captures: Captures, program: Program, worst: Curve) -> Curve:
    """Predict an upper bound with its lower end: results that depend on values, as small as they can be."""
    sizes, smallest = worst.growth.sizes if worst.growth else (), Variant(shares=LEAST)
    if any(trace.has_note("largest result") for trace in worst.surveyed.values()):
        with contextlib.suppress(CannotTraceError):  # it may fail without elements
            return replace(worst, floor=grow(_all_captured(captures, program, sizes, worst.method, [smallest])))
    return worst


def _by_variants(known: Curve, variants: tuple[Variant, ...], note: str) -> Curve:
    """Capture some variants at each size; what was predicted so far is the most that they can take."""
    ceiling = known.ceiling or known.growth
    known = replace(known, growth=None, captured={}, proofs={}, ceiling=ceiling)
    return replace(known, variants=variants, notes=(*known.notes, note))


# -- on fake tensors


def _traces_and_growth(
    captures: Captures, program: Program, asked: int, method: Method, scalable: bool
) -> tuple[list[Trace], Growth | None]:
    """Traces at a few sizes, and their growth if they agree."""
    if not scalable:
        return [capture(program, asked, method)], None
    fourth_size, sizes = FAKE_SIZES[3], FAKE_SIZES[: 2 if captures.foresees(program) or captures.rough else 3]
    own = _own_first(captures, program, asked, method)
    also = list[_Task]()
    if own and own.has_note("uncompiled") and _is_compiled_for(program):  # which takes the longest
        also.append((program, asked, "compiled", replace(FIRST, answers=own.answers)))
    try:
        traces = _all_captured(captures, program, sizes, method, also=also)
    except CaptureFailedError as error:
        if error.value_needed or isinstance(error, OutOfTimeError):
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


def _own_first(captures: Captures, program: Program, asked: int, method: Method) -> Trace | None:
    """Capture the size asked for before the others, in case time runs out; if it fails there, others are tried."""
    if not captures.own_first:
        return None
    try:
        return capture(program, asked, method)
    except CaptureFailedError as error:
        if error.value_needed or isinstance(error, OutOfTimeError):
            raise
        return None


def _is_compiled_for(program: Program) -> bool:
    """Whether torch.compile is followed for the device of a program."""
    return program.device.type == "cpu" or program.gpu is not None


def _grown(program: Program, traces: list[Trace], fourth_size: int, method: Method) -> tuple[list[Trace], Growth]:
    """The growth of traces, and those it is from: a square is checked at a fourth size."""
    growth = grow(traces)
    if growth.degree == 2:
        traces = [*traces, capture(program, fourth_size, method)]
        growth = grow(traces)
    return traces, growth


_Task = tuple[Program, int, Method, Variant]


def _all_captured(
    captures: Captures,
    program: Program,
    sizes: Sequence[int],
    method: Method,
    variants: Sequence[Variant] = (FIRST,),
    also: Sequence[_Task] = (),
) -> list[Trace]:
    """Capture a step side by side at some sizes; and begin with others, which are asked for later."""
    tasks = [(program, size, method, variant) for size in sizes for variant in variants]
    for task in (*tasks, *also):
        captures.start(*task)
    return [capture(*task) for task in tasks]


def _reason(method: Method, error: CannotTraceError) -> str:
    ways = {
        "compiled": "torch.compile could not run on fake tensors",
        "fake": "the step could not run on fake tensors",
        "worst-case": "the step could not run on fake tensors, even assuming the largest result of each operator",
        "sampled": "the step could not run on fake tensors as large as real ones",
        "valued": "the step could not run on fake tensors that know the values of its batch",
        "answered": "the step could not run on fake tensors that know what a real run reads",
        "real": "the step could not run on a copy",
        "states": "the optimizer could not run on a copy",
    }
    why = str(error).removesuffix(".")
    if method == "compiled" and isinstance(error, OutOfTimeError):
        return f"{why}: {NOT_COMPILED}"
    return f"{ways[method]} ({why})"
