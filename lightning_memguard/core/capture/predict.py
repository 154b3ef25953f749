"""The stages joined: a program that can run one step -> its footprint at any batch size.

The ways to capture a step are here, best first; every trace says how it was captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_memguard.core.capture.capture import CaptureFailedError, Captures, capture, captures_of
from lightning_memguard.core.capture.compiled import NOTE
from lightning_memguard.core.capture.program import Program
from lightning_memguard.core.replay.footprint import Footprint, footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.growth import Growth, grow
from lightning_memguard.core.trace.packed import PackedGrowth, PackedTraces
from lightning_memguard.core.trace.trace import Method, Shapes, Trace
from lightning_memguard.errors import CannotTraceError

# Powers of two, so that a step that divides its batch runs; above 2, so that batch norm and pairs do; small, since the
# real run allocates them. The fourth is run only to check a square.
FAKE_SIZES = (4, 8, 16, 32)
REAL_SIZES = (2, 4, 8)
_WAYS: tuple[Method, ...] = ("fake", "worst-case", "real")


class StepFailsError(CannotTraceError):
    """The step runs at some batch sizes and raises at another, as one that pairs its samples does at an odd one."""


@dataclass(frozen=True)
class Prediction:
    """What is known of a program's memory: its footprint at any size, or at the sizes that can be captured.

    Attributes:
        program: what runs.
        settings: the allocator's rules.
        method: how the step was captured.
        growth: how the events grow; None where the step runs differently at different sizes, so that each is captured.
        context_bytes: what the process takes on its device outside the allocator.
        scalable: False where only the sizes in ``traces`` are known.
        notes: what had to be assumed, in plain words.
        traces: those captured to predict from, by batch size.
        share: a trace -> what one process has of it, where several divide it.
        seen: the batches that the step was given where it was captured, by batch size: shapes and bytes.
        compiles: whether the step calls what torch.compile compiles, which ``growth`` and ``traces`` have as written.
        compiled: the same step captured as it is compiled, by batch size; `proven_at` adds to them. Between them
            footprints are estimates.
    """

    program: Program
    settings: AllocatorSettings
    method: Method
    growth: Growth | PackedGrowth | None
    context_bytes: int | tuple[int, int, int] = 0
    scalable: bool = True
    notes: tuple[str, ...] = ()
    traces: Mapping[int, Trace] = field(default_factory=dict)
    share: Callable[[Trace], Trace] | None = None
    seen: dict[int, tuple[Shapes, int] | None] = field(default_factory=dict, compare=False)
    compiles: bool = False
    compiled: Mapping[int, Trace] = field(default_factory=dict)
    # What it was asked for so far; a copy starts with its own.
    _known_traces: dict[int, Trace] = field(init=False, repr=False, compare=False, default_factory=dict)
    _known_footprints: dict[int, Footprint] = field(init=False, repr=False, compare=False, default_factory=dict)

    def packed(self) -> Prediction:
        """The same in little memory, slower to ask. Captures that the growth reproduces are let go."""
        growth = PackedGrowth.of(self.growth) if isinstance(self.growth, Growth) else self.growth
        compiled = PackedTraces(self.compiled)
        return replace(self, growth=growth, traces=PackedTraces({} if growth else self.traces), compiled=compiled)

    def uncompiled(self) -> Prediction:
        """The same as if torch.compile did nothing."""
        return replace(self, compiles=False, compiled={})

    def trace_at(self, batch_size: int) -> Trace:
        """The step's events at one batch size."""
        if batch_size in self.compiled:
            return self.compiled[batch_size]
        if self.method == "states":
            return replace(next(iter(self.traces.values())), batch_size=batch_size)
        if batch_size in self.traces:
            return self.traces[batch_size]
        if self.growth is not None:
            return self.growth.at(batch_size)
        if batch_size not in self._known_traces:
            self._known_traces[batch_size] = self._captured_at(batch_size)
        return self._known_traces[batch_size]

    def _captured_at(self, batch_size: int, method: Method | None = None) -> Trace:
        trace = capture(self.program, batch_size, method or self.method)
        self.seen[batch_size] = trace.batch
        return trace

    def expected_batch(self, batch_size: int) -> tuple[Shapes, int]:
        """Shapes and bytes of the batch that the step was given, else of what its loaders give."""
        return self.seen.get(batch_size) or self.program.expected_batch(batch_size)

    def own_trace_at(self, batch_size: int) -> Trace:
        """The same as one process has them."""
        trace = self.trace_at(batch_size)
        return self.share(trace) if self.share else trace

    def footprint_at(self, batch_size: int) -> Footprint:
        """The memory of the step at one batch size."""
        known = self._known_footprints
        if batch_size not in known and self.compiled and batch_size not in self.compiled:
            known[batch_size] = self._estimate_at(batch_size)
        if batch_size not in known:
            found = footprint(self.own_trace_at(batch_size), self.settings, self.context_bytes)
            known[batch_size] = replace(found, notes=tuple(dict.fromkeys((*self.notes, *found.notes))))
        return known[batch_size]

    def _estimate_at(self, batch_size: int) -> Footprint:
        """The compiled step at a size between or beyond those captured: peaks are close to lines.

        From one size alone, it grows as the step as written does.
        """
        near, *others = sorted(self.compiled, key=lambda size: abs(size - batch_size))
        at_near = self.footprint_at(near)
        if others:
            rise = self.footprint_at(others[0]).peak_allocated_bytes - at_near.peak_allocated_bytes
            more = rise * (batch_size - near) // (others[0] - near)
        else:
            eager = self.uncompiled()
            here, there = eager.footprint_at(batch_size).peak_allocated_bytes, eager.footprint_at(near)
            static = sum(at_near.parts[part] for part in ("parameters", "buffers", "optimizer_state"))
            ratio = (at_near.peak_allocated_bytes - static) / max(1, there.peak_allocated_bytes - static)
            more = int(ratio * (here - there.peak_allocated_bytes))
        return replace(at_near.plus(more, "activations"), batch_size=batch_size)

    def proven_at(self, batch_size: int) -> Prediction:
        """Capture the step at this size: as it is compiled, if it is, else to compare it with the growth.

        Returns:
            This prediction if the two agree, or there is nothing to compare; else one that captures each size. For a
            step that is compiled, one that knows this size.

        Raises:
            StepFailsError: the step does not run at this size, though it did at others.
        """
        if batch_size in self.compiled:
            return self
        if self.compiles:
            try:
                trace = self._captured_at(batch_size, "compiled")
            except CaptureFailedError as error:
                why = replace(self.uncompiled(), notes=(*self.notes, _reason("compiled", error)))
                return why.proven_at(batch_size)
            return replace(self, compiled={**self.compiled, batch_size: trace})
        if self.growth is None or self.method not in ("fake", "worst-case") or batch_size in self.traces:
            return self
        try:
            proof = self._captured_at(batch_size)
        except CaptureFailedError as error:
            raise StepFailsError(f"at batch size {batch_size} {_reason(self.method, error)}") from error
        if proof.events == self.growth.at(batch_size).events:
            return self
        sizes = list(self.growth.sizes)
        note = f"at batch size {batch_size} the step allocates otherwise than at {sizes}; each size was captured"
        return replace(self, growth=None, notes=(*self.notes, note), traces={**self.traces, batch_size: proof})


def predict(
    program: Program,
    batch_size: int,
    settings: AllocatorSettings,
    *,
    context_bytes: int | tuple[int, int, int] = 0,
    scalable: bool = True,
) -> Prediction:
    """Capture a step in the best way that works: fake, worst case, real at small sizes, states alone.

    Args:
        program: what runs.
        batch_size: the size asked for; it is the one captured where small sizes fail.
        settings: the allocator's rules.
        context_bytes: what the process takes on its device outside the allocator.
        scalable: False to capture ``batch_size`` alone.

    Raises:
        CannotTraceError: not even the states could be made.
    """
    with captures_of(program) as captures:
        found = _predicted(captures, program, batch_size, settings, context_bytes, scalable)
        if not any(NOTE in trace.notes for trace in found.traces.values()):
            return found
        if program.device.type != "cpu":
            return replace(found, notes=(*found.notes, "torch.compile is followed on the CPU only"))
        found = replace(found, compiles=found.method in ("fake", "worst-case"))
        return found if scalable else found.proven_at(batch_size)


def _predicted(
    captures: Captures,
    program: Program,
    batch_size: int,
    settings: AllocatorSettings,
    context_bytes: int | tuple[int, int, int],
    scalable: bool,
) -> Prediction:
    why_not: dict[str, str] = {}  # the same happens in several ways of capturing: it is said once
    value_needed = True
    for method in _WAYS:
        if method == "worst-case" and not value_needed:
            continue  # it would fail in the same way
        try:
            traces, growth = _traces_and_growth(captures, program, batch_size, method, scalable)
        except CannotTraceError as error:  # the step failed, or no two sizes of it agree
            why_not[str(error)] = _reason(method, error)
            value_needed = isinstance(error, CaptureFailedError) and error.value_needed
        else:
            known = {trace.batch_size: trace for trace in traces}
            scalable = scalable and (growth is not None or len(known) > 1)
            seen = {trace.batch_size: trace.batch for trace in traces}
            notes = tuple(why_not.values()) if method == "real" else ()
            return Prediction(program, settings, method, growth, context_bytes, scalable, notes, known, seen=seen)
    try:
        states = capture(program, batch_size, "states")
    except CaptureFailedError as error:
        raise CannotTraceError("; ".join([*why_not.values(), _reason("states", error)])) from error
    notes = tuple(why_not.values())
    return Prediction(program, settings, "states", None, context_bytes, False, notes, {batch_size: states})


def _traces_and_growth(
    captures: Captures, program: Program, asked: int, method: Method, scalable: bool
) -> tuple[list[Trace], Growth | None]:
    """Traces at a few sizes, and their growth where they agree."""
    if method == "real":  # at small sizes whatever was asked, so only their growth is of use
        traces = _all_captured(captures, program, REAL_SIZES, method)
        return traces, grow(traces)
    if not scalable:
        return [capture(program, asked, method)], None
    traces, fourth_size = _captured(captures, program, asked, method)
    if not fourth_size:
        return traces, None
    likely = captures.next_size(program, traces[:2])
    if likely and likely not in [trace.batch_size for trace in traces]:
        with contextlib.suppress(CannotTraceError):  # it is that size that is special
            return _grown(program, [*traces[:2], capture(program, likely, method)], fourth_size, method)
    traces += _all_captured(captures, program, FAKE_SIZES[2:3], method) if len(traces) == 2 else []
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


def _captured(captures: Captures, program: Program, asked: int, method: Method) -> tuple[list[Trace], int]:
    """Traces at two sizes or three, and a fourth size; at the size asked for alone, and 0, where no others run."""
    sizes = FAKE_SIZES[:2] if captures.foresees else FAKE_SIZES[:3]
    try:
        return _all_captured(captures, program, sizes, method), FAKE_SIZES[3]
    except CaptureFailedError as error:
        if error.value_needed:
            raise
    try:
        return _all_captured(captures, program, [asked << doubling for doubling in range(3)], method), asked << 3
    except CaptureFailedError:  # the size asked for is the last that may run
        return [capture(program, asked, method)], 0


def _all_captured(captures: Captures, program: Program, sizes: Sequence[int], method: Method) -> list[Trace]:
    for size in sizes:
        captures.start(program, size, method)
    return [capture(program, size, method) for size in sizes]


def _reason(method: Method, error: CannotTraceError) -> str:
    ways = {
        "compiled": "torch.compile could not run on fake tensors",
        "fake": "the step could not run on fake tensors",
        "worst-case": "the step could not run on fake tensors, even assuming the largest result of each operator",
        "real": "the step could not run on a copy",
        "states": "the optimizer could not run on a copy",
    }
    return f"{ways[method]} ({str(error).removesuffix('.')})"
