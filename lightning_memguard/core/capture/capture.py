"""One run of a program under a recorder -> its trace, captured in a forked child; several at the same time.

If a child cannot answer, the step runs in this process, as far as that can be put back as it was.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic, process_time
from typing import Any, TypeVar, cast

import torch
from typing_extensions import Self, override

from lightning_memguard.core.batch.batches import Epoch
from lightning_memguard.core.capture.counters import Due
from lightning_memguard.core.capture.leftovers import without_collections
from lightning_memguard.core.capture.program import FewLayers, Program, device_to_run_on
from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.core.capture.storages import line_behind
from lightning_memguard.core.device.host import host_bytes
from lightning_memguard.core.device.out_of_memory import causes_of, ran_out_of_memory
from lightning_memguard.core.foreign import reason_of
from lightning_memguard.core.isolation.pool import Children, StoppedError, in_child, is_forked, tell
from lightning_memguard.core.kernels import onednn
from lightning_memguard.core.simulation import compiled, quantized
from lightning_memguard.core.simulation.constants import Luck
from lightning_memguard.core.simulation.driver import NEEDS_GPU, leave_driver_alone
from lightning_memguard.core.simulation.fake import isolated_rng, run_on_one_thread, seed_all
from lightning_memguard.core.simulation.faking import ValueNeededError
from lightning_memguard.core.simulation.value_sizes import public_name
from lightning_memguard.core.torch_port import DataDependentOutputException, DynamicOutputShapeException
from lightning_memguard.core.trace.loading import with_loading
from lightning_memguard.core.trace.trace import OF_VALUES, TIME_WAS_UP, Answers, Method, Note, Shares, Trace
from lightning_memguard.errors import CannotTraceError, MemGuardError

T = TypeVar("T")
Request = TypeVar("Request", bound=Hashable)

_VALUE_NEEDED = (ValueNeededError, DataDependentOutputException, DynamicOutputShapeException)
_MOST_SECONDS_TO_GO_ON = 20.0  # a slower step is not captured again with its counters moved
# What CUDA and autograd say in a child whose parent used them.
_REFUSED_BY_DRIVER = ("in forked subprocess", "CUDA error: initialization error", "HIP error: initialization error")
_NOT_AFTER_A_FORK = (*_REFUSED_BY_DRIVER, "fork-based multiprocessing", NEEDS_GPU)


@dataclass(frozen=True)
class Variant:
    """One of several captures at a size, if memory depends on values.

    Attributes:
        number: of the real batches, and of the random numbers that the step draws; those of 0 are the run's own.
        shares: how large the results are whose size depends on values.
        epoch: of which the real batch is the largest, in place of the one with that number.
        answers: what the step reads of its tensors' values, if it runs compiled.
        saving: the share of what compiled graphs would save for the backward pass that they may; None: as set.
        any_shape: whether it is compiled for batches of any shape, as once others have come.
        luck: which random numbers it draws, if it reads their values.
        room_bytes: of all tensors together, past which each request raises; None: only what no device could grant does.
    """

    number: int = 0
    shares: Shares = ()
    epoch: Epoch | None = None
    answers: Answers = ()
    saving: float | None = None
    any_shape: bool = False
    room_bytes: int | None = None
    luck: Luck = ""


FIRST = Variant()
_Task = tuple[int, int, Method, Variant]  # the program's place, the batch size, the way, which of several


class CaptureFailedError(CannotTraceError):
    """The step raised, or ended the process it ran in.

    ``value_needed`` tells that it needed a value that fake tensors lack, ``out_of_memory`` that this machine had too
    little; ``reason`` leaves out where that was.
    """

    def __init__(self, text: str, reason: str = "", *, value_needed: bool = False, out_of_memory: bool = False) -> None:
        super().__init__(text)
        self.reason = reason or text
        self.value_needed, self.out_of_memory = value_needed, out_of_memory


class OutOfTimeError(CaptureFailedError):
    """The deadline came before the capture ended, or began."""


class WaitsError(CannotTraceError):
    """The step waits for what no copy of a process has, so any other capture would wait as well."""


def _failure(error: BaseException) -> CaptureFailedError:
    """Describe what a piece of work raised by an error that can be sent, and holds no frames."""
    if isinstance(error, CaptureFailedError):
        known = {"value_needed": error.value_needed, "out_of_memory": error.out_of_memory}
        return CaptureFailedError(str(error), error.reason, **known)
    lines, place = str(error).strip().splitlines() or ["no message"], line_behind(error)
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    refused = any(each in first for each in _REFUSED_BY_DRIVER)
    first = NEEDS_GPU if refused else first
    ours = refused or isinstance(error, MemGuardError)
    reason = first.removesuffix(".") if ours else reason_of(error, first[:200])
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        reason = f"{public_name(error.func)} needs the values of a tensor"
    text = f"{reason}, at {place}" if place else reason
    out_of_memory = any(map(ran_out_of_memory, causes_of(error)))
    return CaptureFailedError(text, reason, value_needed=_needs_value(error), out_of_memory=out_of_memory)


def _needs_value(error: BaseException) -> bool:
    """Whether a value that fake tensors lack is behind an error, however the user's code wrapped it."""
    return any(isinstance(each, _VALUE_NEEDED) for each in causes_of(error))


class UserCode(Children[Request, T]):
    """Children that run the user's code, for several requests at once; what it raises is raised here.

    If a child is lost, its request runs once more in this process: use it for work that has children of its own.
    After the deadline (of `time.monotonic`) no child works on, and nothing is begun in this process.
    """

    def __init__(
        self, work: Callable[[Request], T], most: int | None = None, *, deadline: Callable[[], float] = lambda: math.inf
    ) -> None:
        super().__init__(work, most, begin=_begin, deadline=deadline)

    @override
    def start(self, *requests: Request) -> None:
        if not in_child():
            super().start(*requests)

    @override
    def ask(
        self, request: Request, *, here_too: bool = False, with_note: Callable[[T, str], T] = lambda result, _: result
    ) -> T:
        """Wait for a result.

        Args:
            request: what for; it need not have been started.
            here_too: whether the work may be done in this process whatever became of the child.
            with_note: a result that comes from this process, and a note that says so -> the result with it.

        Raises:
            CaptureFailedError: it raised, or ended the process.
            OutOfTimeError: it had not ended at the deadline.
            WaitsError: it waits for a thread, and this process has none of those either.
        """
        if in_child():
            return _value(self._handle(request))
        answer = self.answer(request)
        if answer.lost and monotonic() > self._deadline():
            raise OutOfTimeError(TIME_WAS_UP)
        lost, here, result = answer.lost, answer.here or here_too, cast("T | CaptureFailedError", answer.value)
        if isinstance(result, CaptureFailedError) and failed_for_fork(result) and not is_forked():
            lost, here = str(result), True
        if lost and here:
            with quiet():
                note = f"the step was captured in this process, not in a child: {lost}"
                return with_note(_value(self._handle(request)), note)
        if lost:
            raise (WaitsError if answer.waits else CaptureFailedError)(lost)
        return _value(result)

    @override
    def _handle(self, request: Request) -> T | CaptureFailedError:
        try:
            return self._work(request)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
            return _failure(error)


def trusted_child(
    work: Callable[[Request], T],
    while_waiting: Callable[[], object] = lambda: None,
    *,
    deadline: Callable[[], float] = lambda: math.inf,
    reaches_out: bool = False,
) -> Children[Request, T]:
    """A child for work of ours, which may take long and may have children of its own."""
    how: dict[str, Any] = {"begin": _begin_alone, "reaches_out": reaches_out, "while_waiting": while_waiting}
    return Children(work, most=1, trusted=True, deadline=deadline, **how)


def failed_for_fork(error: BaseException) -> bool:
    """Whether CUDA or autograd refuses what was asked of it because its process was forked."""
    return any(text in str(error) for text in _NOT_AFTER_A_FORK)


def isolated(work: Callable[[], T]) -> T:
    """Run a function that calls the user's code in a child, and return its result.

    Raises:
        CaptureFailedError: it raised, or ended the process.
    """
    with UserCode[int, T](lambda _: work(), most=1) as child:
        return child.ask(0)


class Captures:
    """Captures of some programs, side by side in children that stay until this is closed.

    Inside the ``with`` block, `capture` finds its programs here. Others are added while there are no children.

    Args:
        programs: what is captured.
        next_size: from the traces of the first program at two batch sizes, the one that it is likely asked for next.
        deadline: the moment (of `time.monotonic`) after which captures raise `OutOfTimeError`. Predictions then have a
            note, and a range at sizes that were not captured.
        soon: from the traces of the first program so far, and the processor seconds of the busiest child, an earlier
            moment.
        own_first: whether each program is first captured at the size that is asked for.
        rough: two sizes tell how a step grows, and work that recurs later is left out; what is used is captured again.
        most: how many children capture at the same time (default: one for each processor).
    """

    def __init__(
        self,
        *programs: Program,
        next_size: Callable[[Sequence[Trace]], int] | None = None,
        deadline: float = math.inf,
        soon: Callable[[Sequence[Trace], float], float] = lambda *_: math.inf,
        own_first: bool = False,
        rough: bool = False,
        most: int | None = None,
    ) -> None:
        self.rough, self.own_first = rough, own_first
        self.deadline, self.soon = deadline, soon
        self._programs = list(programs)
        self._next_size = next_size
        self._children = UserCode[_Task, Trace](
            lambda task: capture_here(self._programs[task[0]], *task[1:], later=not rough), most, deadline=self._until
        )
        self._known: dict[_Task, Trace] = {}
        self._cut: dict[_Task, Trace] = {}
        self.stopped = ""  # why captures were left out, if the deadline came

    def _until(self) -> float:
        known = [trace for task, trace in self._known.items() if task[0] == 0]
        return min(self.deadline, self.soon(known, self._children.most_used))

    def start(self, program: Program, batch_size: int, method: Method, variant: Variant = FIRST) -> None:
        """Begin with a capture that will be asked for."""
        task = (self.place_of(program), batch_size, method, variant)
        if task not in self._known:
            self._children.start(task)

    def foresees(self, program: Program) -> bool:
        """Whether it knows which batch size is likely asked for next."""
        return self._next_size is not None and program is self._programs[0]

    def next_size(self, program: Program, traces: Sequence[Trace]) -> int:
        """The batch size that is likely asked for next; 0 if unknown."""
        if self._next_size is None or not self.foresees(program):
            return 0
        try:
            return self._next_size(traces)
        except Exception:  # noqa: BLE001 - what is wrong is found out in good time
            return 0

    def takes(self, program: Program) -> bool:
        """Whether it captures a program; one that is new only while there are no children, which would not know it."""
        if self.place_of(program) < 0 and not self._children.has_children:
            self._programs.append(program)
        return self.place_of(program) >= 0

    def place_of(self, program: Program) -> int:
        """Return the program's index among the programs; -1 if it is not one of them."""
        return next((place for place, each in enumerate(self._programs) if each is program), -1)

    def trace(self, program: Program, batch_size: int, method: Method, variant: Variant = FIRST) -> Trace:
        """Wait for a capture; see `capture`. What is asked for again is not run again."""
        task = (self.place_of(program), batch_size, method, variant)
        if task not in self._known:
            how = ", for real" if method == "real" else ""
            tell(f"the step at batch size {batch_size}{how}")
            try:
                self._known[task] = self._whole(task)
            except OutOfTimeError as error:
                self.stopped = str(error)
                raise
        return self._known[task]

    def _whole(self, task: _Task) -> Trace:
        trace = self._children.ask(task, with_note=_with_note)
        if trace.method == "cut":
            self._cut[task] = trace
            raise OutOfTimeError(TIME_WAS_UP)
        return trace

    def cut(self, program: Program, batch_size: int) -> Trace | None:
        """Return what a stopped capture of a program had recorded, at this batch size or a smaller one."""
        place = self.place_of(program)
        found = [trace for task, trace in self._cut.items() if task[0] == place and task[1] <= batch_size]
        return max(found, key=lambda trace: (trace.batch_size, len(trace)), default=None)

    def known(self, program: Program, method: Method) -> list[Trace]:
        """The traces of a program that were captured in one way, by batch size."""
        wanted = self.place_of(program), method, FIRST
        found = {task[1]: trace for task, trace in self._known.items() if (task[0], *task[2:]) == wanted}
        return [found[size] for size in sorted(found)]

    def __enter__(self) -> Self:
        if any(program.device.type == "cpu" for program in self._programs):
            onednn.library()  # found once for all children
        _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)
        self._children.close()


def _with_note(trace: Trace, note: str) -> Trace:
    return replace(trace, notes=(*trace.notes, note))


_open: list[Captures] = []


def captures_of(*programs: Program) -> contextlib.AbstractContextManager[Captures]:
    """The captures that are open for programs; else new ones, which are closed at the end, or at the same deadline."""
    known = next((each for each in _open if all(map(each.takes, programs))), None)
    if known:
        return contextlib.nullcontext(known)
    return Captures(*programs, deadline=_open[-1].deadline, soon=_open[-1].soon) if _open else Captures(*programs)


def capture(program: Program, batch_size: int, method: Method, variant: Variant = FIRST) -> Trace:
    """Run the program once under a recorder.

    Raises:
        CaptureFailedError: the user's code raised, or needs what cannot be known, or ended the process.
    """
    with captures_of(program) as captures:
        return captures.trace(program, batch_size, method, variant)


def _begin_alone() -> None:
    run_on_one_thread()  # the others did not come along, and would be waited for
    leave_driver_alone()


def _begin() -> None:
    _begin_alone()
    save = cast("Any", torch.save)

    def save_to_objects_alone(content: object, file: object, *args: object, **kwargs: object) -> None:
        if not isinstance(file, str | os.PathLike):  # the C++ writer of a file would be refused
            save(content, file, *args, **kwargs)

    torch.save = cast("Any", save_to_objects_alone)


def _value(result: T | CaptureFailedError) -> T:
    if isinstance(result, CaptureFailedError):
        raise result
    return result


def capture_here(
    program: Program, batch_size: int, method: Method, variant: Variant = FIRST, *, later: bool = True
) -> Trace:
    """Capture a step in this process; ``later``: with what recurs later.

    Raises:
        CannotTraceError: the recorder saw something whose size depends on values.
        Exception: whatever the user's own code raised.
    """
    trace = _captured(program, batch_size, method, variant, later=later)
    if not quantized.is_imported():  # to inspect a program is to set it up once more
        return trace
    weights = program.inspect(lambda module, _: quantized.weights_of(module))
    return with_loading(trace, weights, quantized.loading_threads()) if weights else trace


def _captured(program: Program, batch_size: int, method: Method, variant: Variant, *, later: bool) -> Trace:
    few = program.few
    if few and few.known is not None and method == "fake" and variant == FIRST:
        try:
            return _of_few_layers(program, few, batch_size)
        except CannotTraceError:
            few.known = None
    if method != "answered":
        return _with_later(program, batch_size, method, variant, later=later)
    ran, recorder = _recorded(program, batch_size, "real", variant)
    if ran.method == "cut":
        return ran
    variant = replace(variant, answers=recorder.reads.noted, shares=ran.shares, luck="")
    trace = _with_later(program, batch_size, method, variant, later=later)
    return replace(trace, seconds=ran.seconds + trace.seconds)


def _with_later(program: Program, batch_size: int, method: Method, variant: Variant, *, later: bool) -> Trace:
    """Capture a step; if it does more later and ``later`` is set, until then."""
    trace, recorder = _recorded(program, batch_size, method, variant)
    due = recorder.counters.due if trace.method != "cut" else None
    if due is None or not later or trace.seconds > _MOST_SECONDS_TO_GO_ON:
        return trace
    try:
        longer, recorder = _recorded(program, batch_size, method, variant, due)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything at steps that are not yet its turn
        why = "it needs values" if _needs_value(error) else str(error)[:200] or type(error).__name__
        note = f"what else a step may do at {due.place} was not captured: {why}"
        return _with_note(trace, Note("values later", note) if _needs_value(error) else note)
    if longer.method == "cut" or not recorder.counters.differ(longer):
        return trace
    longer = replace(longer, seconds=trace.seconds, recurs=True)
    return _with_note(longer, f"the peak is at {due.place}") if recorder.counters.peaks_later(longer) else longer


def _of_few_layers(program: Program, few: FewLayers, batch_size: int) -> Trace:
    """The trace of a step from those of the same model with fewer layers.

    Raises:
        CannotTraceError: it does not follow from them.
    """
    from lightning_memguard.core.trace.depth import BASE, DEPTHS, deepening_of  # of no training that runs

    def with_layers(count: int) -> Trace:
        shallow = replace(program, model=few.models[DEPTHS.index(count)], few=None)  # type: ignore[type-var]
        trace, recorder = _recorded(shallow, batch_size, "fake", FIRST)
        if recorder.counters.due is not None:
            raise CannotTraceError("work recurs")
        return trace

    base, started = with_layers(BASE), process_time()
    known = next((each for each in few.known or () if each.fits(base)), None)
    if known is None:
        known = deepening_of([base if count == BASE else with_layers(count) for count in DEPTHS], few.path)
        few.known = [*(few.known or ()), known]
    return replace(known.at(base, few.depth), seconds=base.seconds + process_time() - started)


def _recorded(
    program: Program, batch_size: int, method: Method, variant: Variant, due: Due | None = None
) -> tuple[Trace, Recorder]:
    """Record a step, and further ones if counters are due to be moved; a scripted step, in a second run.

    A request for more than the device has raises, as there; a step that does not catch it is recorded as if it did not.
    """
    run = partial(_run, program, batch_size, method, variant)
    recorder = _new_recorder(program, method, variant, due)
    try:
        trace = run(recorder)
    except Exception:
        if not recorder.refused or variant.room_bytes is not None:
            raise
        recorder = _new_recorder(program, method, variant, due, refuses=False)
        trace = run(recorder)
    if recorder.scripted and trace.method != "cut":
        recorder = _new_recorder(program, method, variant, due, refuses=not math.isinf(recorder.device_bytes))
        trace = run(recorder)
    return trace, recorder


def _new_recorder(
    program: Program, method: Method, variant: Variant, due: Due | None, *, refuses: bool = True
) -> Recorder:
    where, gpu = device_to_run_on(program, fake=method != "real").type, program.gpu
    recorder = Recorder(
        where,
        worst_case=method in ("worst-case", "sampled", "valued", "answered"),
        kernel_target=gpu.kernel_target if gpu else None,
        compiled=method == "compiled",
        shares=variant.shares,
        due=due,
        answers=variant.answers,
        seed=variant.number if method == "valued" else None,
        luck=variant.luck,
    )
    if refuses and where == "cpu":
        recorder.device_bytes = host_bytes()
    elif refuses and gpu:
        recorder.device_bytes = gpu.memory_bytes
    recorder.room_bytes = math.inf if variant.room_bytes is None else variant.room_bytes
    return recorder


def _run(program: Program, batch_size: int, method: Method, variant: Variant, recorder: Recorder) -> Trace:
    """Run a step under a recorder."""
    started = process_time()
    if method == "states":
        program.run_states(recorder)
    else:
        with isolated_rng(), without_collections():
            if variant.number:
                seed_all(variant.number)
            epoch = variant.epoch and variant.epoch._replace(steps=program.steps_of_epoch(batch_size))
            try:
                with compiled.saving(variant.saving), compiled.for_any_shape(active=variant.any_shape):
                    drawn = program.of_draw(variant.number, epoch)
                    (drawn.with_values() if method in OF_VALUES else drawn).run(
                        recorder, batch_size, fake=method != "real"
                    )
            except StoppedError:
                recorder.keep_activations()
                return recorder.trace(batch_size, "cut")
    recorder.note_refused()
    trace = replace(recorder.trace(batch_size, method), seconds=process_time() - started)
    if recorder.device_type != program.device.type:
        where = recorder.device_type.upper()
        note = f"the step ran on the {where}, whose kernels may keep other tensors than the GPU's"
        trace = _with_note(replace(trace, device=program.device.type), note)
    return trace


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what a copy prints, warns or logs: the real run will repeat it."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)
