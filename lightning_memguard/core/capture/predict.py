"""The stages joined: a program that can run one step -> its footprint at any batch size.

The ladder of ways to capture a step lives here, best rung first; every trace says which rung it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from lightning_memguard.core.capture.fake import ValueNeededError
from lightning_memguard.core.capture.program import Program, device_to_run_on
from lightning_memguard.core.capture.recorder import (
    Recorder,
    line_behind,
)
from lightning_memguard.core.replay.footprint import Footprint, footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.growth import Growth, grow
from lightning_memguard.core.trace.trace import Method, Trace
from lightning_memguard.errors import CannotTraceError

# Powers of two, so that a step that divides its batch runs; above 2, so that batch norm and pairs do; small, since the
# real rung allocates them. The fourth is asked only to check a square.
FAKE_SIZES = (4, 8, 16, 32)
REAL_SIZES = (2, 4, 8)

_VALUE_NEEDED = (ValueNeededError, DataDependentOutputException, DynamicOutputShapeException)


class StepFailsError(CannotTraceError):
    """The step runs at some batch sizes and raises at another, as one that pairs its samples does at an odd one."""


@dataclass
class Prediction:
    """What is known of a program's memory: its footprint at any size, or at the sizes that can be captured.

    Attributes:
        program: what runs.
        settings: the allocator's rules.
        method: the rung of the ladder that carried.
        growth: how the events grow; None where the step runs differently at different sizes, so that each is captured.
        context_bytes: what the process takes on its device outside the allocator.
        scalable: False where nothing is known of other sizes than those in ``traces``.
        notes: what had to be assumed, in plain words.
        traces: those captured so far, by batch size.
        share: what one process has of a trace, where several divide it.
    """

    program: Program
    settings: AllocatorSettings
    method: Method
    growth: Growth | None
    context_bytes: int | tuple[int, int, int] = 0
    scalable: bool = True
    notes: tuple[str, ...] = ()
    traces: dict[int, Trace] = field(default_factory=dict)
    share: Callable[[Trace], Trace] | None = None
    _footprints: dict[int, Footprint] = field(default_factory=dict)

    def trace_at(self, batch_size: int) -> Trace:
        """The step's events at one batch size."""
        if self.method == "states":
            return replace(next(iter(self.traces.values())), batch_size=batch_size)
        if batch_size not in self.traces and self.growth is not None:
            return self.growth.at(batch_size)
        if batch_size not in self.traces:
            self.traces[batch_size] = capture(self.program, batch_size, self.method)
        return self.traces[batch_size]

    def own_trace_at(self, batch_size: int) -> Trace:
        """The same as one process has them."""
        trace = self.trace_at(batch_size)
        return self.share(trace) if self.share else trace

    def footprint_at(self, batch_size: int) -> Footprint:
        """The memory of the step at one batch size."""
        if batch_size not in self._footprints:
            found = footprint(self.own_trace_at(batch_size), self.settings, self.context_bytes)
            self._footprints[batch_size] = replace(found, notes=(*dict.fromkeys((*self.notes, *found.notes)),))
        return self._footprints[batch_size]

    def proven_at(self, batch_size: int) -> Prediction:
        """Capture the step at this very size and hold the growth against it.

        Returns:
            This prediction if the capture agrees, or had nothing to say; else one that captures every size asked for.

        Raises:
            StepFailsError: the step does not run at this size, though it did at others.
        """
        if self.growth is None or self.method not in ("fake", "worst-case") or batch_size in self.traces:
            return self
        try:
            proof = capture(self.program, batch_size, self.method)
        except Exception as error:
            raise StepFailsError(f"at batch size {batch_size} {_reason(self.method, error)}") from error
        if proof.events == self.growth.at(batch_size).events:
            return self
        note = (
            f"the step at batch size {batch_size} did not grow as at {list(self.growth.sizes)}: each size was captured"
        )
        return replace(
            self, growth=None, notes=(*self.notes, note), traces={**self.traces, batch_size: proof}, _footprints={}
        )


def capture(program: Program, batch_size: int, method: Method) -> Trace:
    """Run the program once under a recorder.

    Raises:
        CannotTraceError: the recorder saw something whose size depends on values.
        Exception: whatever the user's own code raised.
    """
    kernel_target = program.gpu.kernel_target if program.gpu else None
    where = device_to_run_on(program, fake=method != "real")
    recorder = Recorder(where.type, worst_case=method == "worst-case", kernel_target=kernel_target)
    if method == "states":
        program.run_states(recorder)
    else:
        program.run(recorder, batch_size, fake=method != "real")
    trace = recorder.trace(batch_size, method)
    if where.type == program.device.type:
        return trace
    note = f"the step ran on the {where.type.upper()}, whose kernels may keep other tensors than the GPU's"
    return replace(trace, device=program.device.type, notes=(*trace.notes, note))


def predict(
    program: Program,
    batch_size: int,
    settings: AllocatorSettings,
    *,
    context_bytes: int | tuple[int, int, int] = 0,
    scalable: bool = True,
) -> Prediction:
    """Climb down the ladder until a rung carries: fake, worst case, real at small sizes, states alone.

    Args:
        program: what runs.
        batch_size: the size asked for; it is the one captured where small sizes fail.
        settings: the allocator's rules.
        context_bytes: what the process takes on its device outside the allocator.
        scalable: False to capture ``batch_size`` alone.

    Raises:
        CannotTraceError: not even the states could be made.
    """
    reasons: list[str] = []
    methods: list[Method] = ["fake", "worst-case", "real"]
    while methods:
        method = methods.pop(0)
        try:
            traces, growth = _grow_at(program, batch_size, method, scalable)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything on a copy
            reasons.append(_reason(method, error))
            if not _needs_value(error):
                methods = [later for later in methods if later == "real"]  # the worst case would fail alike
        else:
            known = {trace.batch_size: trace for trace in traces}
            notes = tuple(reasons[-1:]) if method == "real" else ()
            anywhere = scalable and (growth is not None or len(known) > 1)
            return Prediction(program, settings, method, growth, context_bytes, anywhere, notes, known)
    try:
        states = capture(program, batch_size, "states")
    except Exception as error:
        reasons.append(_reason("states", error))
        raise CannotTraceError("; ".join(reasons)) from error
    return Prediction(
        program, settings, "states", None, context_bytes, False, tuple(reasons[-1:]), {batch_size: states}
    )


def _grow_at(program: Program, asked: int, method: Method, scalable: bool) -> tuple[list[Trace], Growth | None]:
    """Traces at a few sizes, and their growth where they agree; at the size asked for alone where no other runs."""
    if not scalable and method != "real":  # a real run is kept small whatever was asked
        return [capture(program, asked, method)], None
    sizes: tuple[int, ...] = FAKE_SIZES if method != "real" else REAL_SIZES
    try:
        traces = [capture(program, size, method) for size in sizes[:3]]
    except Exception as error:
        if _needs_value(error) or method == "real":
            raise
        sizes = tuple(asked << doubling for doubling in range(4))
        try:
            traces = [capture(program, size, method) for size in sizes[:3]]
        except Exception:  # noqa: BLE001 - the size asked for is the last that may run
            return [capture(program, asked, method)], None
    try:
        growth = grow(traces)
        if growth.degree == 2 and len(sizes) > 3:
            traces.append(capture(program, sizes[3], method))
            growth = grow(traces)
    except CannotTraceError:
        if method == "real":
            raise
        return traces, None
    return traces, growth


def _reason(method: Method, error: BaseException) -> str:
    ways = {
        "fake": "the step could not run on fake tensors",
        "worst-case": "the step could not run on fake tensors, nor with the largest result of each operator",
        "real": "the step could not run on a copy",
        "states": "the optimizer could not run on a copy",
    }
    text = str(error).strip().splitlines()
    place = line_behind(error)
    where = f", at {place}" if place else ""
    return f"{ways[method]} ({type(error).__name__}: {text[0][:200] if text else 'no message'}{where})"


def _needs_value(error: BaseException | None) -> bool:
    """Whether a value that fake tensors lack is behind an error, however the user's code wrapped it."""
    while error is not None:
        if isinstance(error, _VALUE_NEEDED):
            return True
        error = error.__cause__ or error.__context__
    return False
