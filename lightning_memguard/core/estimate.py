"""The stages joined: a program that can run one step -> its footprint at any batch size.

The ladder of ways to capture a step lives here, best rung first; every trace says which rung it came from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from lightning_memguard.core.allocator import AllocatorSettings
from lightning_memguard.core.batch import Batches, tensors_in
from lightning_memguard.core.capture import Recorder, gradients_of, line_behind, refuse_sparse, states_of, watching
from lightning_memguard.core.fake import ValueNeededError, fake_twin, faking, isolated_rng, real_twin
from lightning_memguard.core.footprint import Footprint, footprint
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.growth import Growth, grow
from lightning_memguard.core.pretend import FAKE_DEVICE, FakeCudaMode, pretended_cuda
from lightning_memguard.core.trace import Method, Trace
from lightning_memguard.errors import CannotTraceError, MemGuardError

# Powers of two, so that a step that divides its batch runs; above 2, so that batch norm and pairs do; small, since the
# real rung allocates them. The fourth is asked only to check a square.
FAKE_SIZES = (4, 8, 16, 32)
REAL_SIZES = (2, 4, 8)

_VALUE_NEEDED = (ValueNeededError, DataDependentOutputException, DynamicOutputShapeException)


class StepFailsError(CannotTraceError):
    """The step runs at some batch sizes and raises at another, as one that pairs its samples does at an odd one."""


class Program(Protocol):
    """A training that can run a few of its steps on a copy of itself, at any batch size."""

    @property
    def device(self) -> torch.device:
        """Where the training runs."""

    @property
    def gpu(self) -> Gpu | None:
        """The GPU behind ``device``, present or pretended; None where it is no CUDA device."""

    def run(self, recorder: Recorder, batch_size: int, *, fake: bool) -> None:
        """Run two optimizer steps (or one inference) under the recorder, on fake or on real tensors."""

    def run_states(self, recorder: Recorder) -> None:
        """Only make what stays: parameters, buffers, gradients, optimizer state."""


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
    chip = program.gpu.chip if program.gpu else None
    where = device_to_run_on(program, fake=method != "real")
    recorder = Recorder(where.type, worst_case=method == "worst-case", chip=chip)
    if method == "states":
        program.run_states(recorder)
    else:
        program.run(recorder, batch_size, fake=method != "real")
    trace = recorder.trace(batch_size, method)
    if where.type == program.device.type:
        return trace
    note = f"the step ran on the {where.type.upper()}, whose kernels may keep other tensors than the GPU's"
    return replace(trace, device=program.device.type, notes=(*trace.notes, note))


def device_to_run_on(program: Program, *, fake: bool) -> torch.device:
    """Where a copy of the training runs: the pretended GPU, its own device, or, where that is absent, the CPU."""
    if program.gpu is None:
        return program.device
    if fake:
        return FAKE_DEVICE
    return program.device if torch.cuda.is_available() else torch.device("cpu")


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


# -- a plain module in PyTorch's canonical loop

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_TRUE = {"32-true": None, "bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
PRECISIONS = tuple(sorted({*_AUTOCAST, *_TRUE}))


@dataclass(frozen=True)
class LoopProgram:
    """``zero_grad``, forward, backward, ``step``: the loop that PyTorch's tutorials write, over a plain module.

    Attributes:
        model: any module; only copies of it run.
        batches: batches of any size.
        step: ``(model, batch) -> loss``.
        optimizer: ``(parameters) -> Optimizer``, or None to keep gradients only.
        device: where it runs.
        gpu: the GPU behind it.
        precision: one of Lightning's names, such as ``"bf16-mixed"``.
        training: False for one forward under ``torch.no_grad``.
    """

    model: nn.Module
    batches: Batches
    step: Callable[[Any, Any], Any]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
    device: torch.device
    precision: str = "32-true"
    training: bool = True
    gpu: Gpu | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise MemGuardError(f"precision={self.precision!r} is unknown; choose one of {', '.join(PRECISIONS)}.")

    def run(self, recorder: Recorder, batch_size: int, *, fake: bool) -> None:
        """See `Program.run`."""
        with tensors(fake=fake, gpu=self.gpu) as mode:
            twin = self._twin(mode)
            optimizer = self.optimizer(twin.parameters()) if self.training and self.optimizer else None
            with watching(recorder, twin):
                recorder.label(states_of([optimizer] if optimizer else []), "optimizer_state")
                if self.training:
                    self._train(recorder, twin, optimizer, batch_size, fake)
                else:
                    twin.eval()
                    with torch.no_grad():
                        self._step(recorder, twin, self._next_batch(recorder, batch_size, fake))

    def run_states(self, recorder: Recorder) -> None:
        """See `Program.run_states`."""
        with tensors(fake=True, gpu=self.gpu) as mode:
            twin = self._twin(mode)
            optimizers = [self.optimizer(twin.parameters())] if self.optimizer else []
            with watching(recorder, twin):
                step_states(recorder, twin, optimizers)

    def _twin(self, mode: FakeTensorMode | None) -> nn.Module:
        if mode is None:
            refuse_meta(self.model)
        device = device_to_run_on(self, fake=mode is not None)
        twin = fake_twin(self.model, mode, device) if mode else real_twin(self.model).to(device)
        dtype = _TRUE.get(self.precision)
        return twin.to(dtype) if dtype else twin

    def _batch(self, batch_size: int, fake: bool) -> Any:
        make = self.batches.fake if fake else self.batches.real
        return make(batch_size, device_to_run_on(self, fake=fake))

    def _next_batch(self, recorder: Recorder, batch_size: int, fake: bool) -> Any:
        recorder.mark("transfer")
        with recorder.paused():
            batch = self._batch(batch_size, fake)
        recorder.label(tensors_in(batch), "batch")
        return batch

    def _step(self, recorder: Recorder, twin: nn.Module, batch: Any) -> Any:
        recorder.mark("forward")
        dtype = _AUTOCAST.get(self.precision)
        where = device_to_run_on(self, fake=isinstance(next(twin.parameters(), None), FakeTensor)).type
        with torch.autocast(where, dtype) if dtype else contextlib.nullcontext():
            return self.step(twin, batch)

    def _train(
        self, recorder: Recorder, twin: nn.Module, optimizer: torch.optim.Optimizer | None, batch_size: int, fake: bool
    ) -> None:
        optimizers = [optimizer] if optimizer else []
        for index in range(2):
            recorder.mark("zero_grad", step=index)
            twin.zero_grad()
            batch = self._next_batch(recorder, batch_size, fake)  # a loop variable: alive until the next one comes
            loss = self._step(recorder, twin, batch)
            recorder.mark("backward")
            loss.backward()
            gradients = gradients_of(optimizers, twin)
            refuse_sparse(gradients)
            recorder.label(gradients, "gradients")
            del gradients
            recorder.mark("optimizer")
            if optimizer:
                optimizer.step()
                recorder.label(states_of(optimizers), "optimizer_state")


def refuse_meta(module: nn.Module) -> None:
    """A module on the meta device has no weights to run with, and may be too large to be given any."""
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise CannotTraceError("its parameters are on the meta device, so there is nothing to run it with")


def step_states(recorder: Recorder, twin: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give each trainable parameter a gradient and step each optimizer once: all that stays, without a step."""
    recorder.mark("backward", step=0)
    held = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    for parameter in {id(p): p for p in (*twin.parameters(), *held)}.values():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    recorder.label(gradients_of(optimizers, twin), "gradients")
    recorder.mark("optimizer")
    for optimizer in optimizers:
        optimizer.step()
    recorder.label(states_of(optimizers), "optimizer_state")


@contextlib.contextmanager
def tensors(*, fake: bool, gpu: Gpu | None = None) -> Iterator[FakeTensorMode | None]:
    """Run what is inside on fake tensors, or on real ones; the random state is left as it was.

    Args:
        fake: which of the two.
        gpu: what fake ``cuda`` tensors pretend to live on.
    """
    with isolated_rng():
        if not fake:
            yield None
            return
        mode = (FakeCudaMode if gpu else FakeTensorMode)(allow_non_fake_inputs=True)
        with pretended_cuda(gpu) if gpu else contextlib.nullcontext(), faking(mode):
            yield mode
