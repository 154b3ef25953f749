"""Run one training step and watch every operator: a dispatch mode sees its results.

It works the same on fake and on real tensors, so one recorder serves every method in
`lightning_memguard.core.capture.predict`.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import MethodWrapperType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.capture.counters import Counters, Due
from lightning_memguard.core.capture.holders import unregistered_tensors
from lightning_memguard.core.capture.kernel_scratch import KernelScratch, asked_bytes
from lightning_memguard.core.capture.storages import Storages, line_that_checks, plain_tensors, written_path
from lightning_memguard.core.capture.work import work_of
from lightning_memguard.core.foreign import aten, patched
from lightning_memguard.core.isolation.pool import beat
from lightning_memguard.core.simulation import (
    compiled,
    compiled_cuda,
    constants,
    cudnn_rnn,
    fake,
    fake_cuda,
    faking,
    fast_paths,
    flex,
    mkldnn_lstm,
    one_rank,
    quantized,
    streams,
)
from lightning_memguard.core.simulation.backward import (
    NUMBER,
    frees_saved,
    graph_task,
    in_place,
    is_walked,
    masked,
    walking,
)
from lightning_memguard.core.simulation.compiled import NOTE, Reads
from lightning_memguard.core.simulation.constants import Luck, forget_written
from lightning_memguard.core.simulation.fake import Function
from lightning_memguard.core.simulation.value_sizes import ValueSizes, assumption
from lightning_memguard.core.torch_port import (
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    tree_leaves,
)
from lightning_memguard.core.trace.kept import Kept
from lightning_memguard.core.trace.scratch import CudaTarget
from lightning_memguard.core.trace.trace import WORTH_A_NOTE, Answers, Event, Method, Note, Shares, Trace
from lightning_memguard.core.trace.work import COMMUNICATION, RANDOM, SPECIAL, TRANSFER, Work
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.units import format_bytes

_device_of = torch.ops.prim.device.default
_ADD, _ADD_ = aten.add.Tensor, aten.add_.Tensor
_CLONE = aten.clone.default
_DISTANCES = aten._euclidean_dist.default  # `cdist` by a product, of copies of both inputs


class Recorder(Storages, TorchDispatchMode):
    """Watches the operators of a step that runs under it, and the storages that they make.

    The code that runs the step sets the phase (`mark`) and what a tensor is for (`label`); the recorder does the rest.

    Args:
        device_type: only storages on this type of device are recorded.
        worst_case: return the largest result of operators whose result depends on values, instead of failing.
        kernel_target: the GPU whose kernels' scratch is counted, if the device is one.
        compiled: whether what the step compiles runs compiled, see `lightning_memguard.core.simulation.compiled`.
        shares: how large such results were in another run, in place of the largest.
        due: where counters are moved to after the steps, which then run on.
        answers: what the step read as it ran as written, if it runs compiled; or as it ran for real.
        seed: of random numbers that fake tensors know.
        luck: which random numbers are drawn.
    """

    def __init__(
        self,
        device_type: str,
        *,
        worst_case: bool = False,
        kernel_target: CudaTarget | None = None,
        compiled: bool = False,
        shares: Shares = (),
        due: Due | None = None,
        answers: Answers = (),
        seed: int | None = None,
        luck: Luck = "",
    ) -> None:
        Storages.__init__(self, device_type)
        TorchDispatchMode.__init__(self)
        self.worst_case, self.compiled = worst_case, compiled
        self._seed, self._luck = seed, luck
        self.counters = Counters(due, active=not compiled)
        self.assumptions: dict[str, None] = {}
        self._checks: dict[str, None] = {}  # lines
        self._value_sizes, self.reads = ValueSizes(shares), Reads(answers)
        self._scratch = KernelScratch(self, kernel_target)
        self._scratch.may_pad = compiled and kernel_target is not None
        self.ran_backward = False
        self.draws = False  # random numbers of Python's or NumPy's
        self.scripted = False  # by TorchScript, which does otherwise in its first run
        self.kept: tuple[Kept, ...] = ()
        self.counts_steps = False  # a schedule; see `Trace`
        self._work: dict[bool, tuple[int, list[Work]]] = {}  # in which step; by whether the optimizer runs it
        self._first_steps: dict[bool, int] = {}
        self.flops: Counter[str] | None = None  # of products in the forward pass by module, if they are counted
        self.in_linear: int | None = None  # while it runs, the first block that it may have made
        self._below_autograd = False
        self._pool: set[int] = set()  # blocks of compiled programs
        self._copied = 0  # of what such a program is given
        self._first_of_node = 0  # the first block that the node of the backward pass that runs now may have made

    # -- called by the code that runs the step

    def mark(self, phase: str, step: int | None = None) -> None:
        """Set the phase of the step, and the number of the step if it changes."""
        if phase == "backward":
            self.keep_activations()
        self.phase = phase
        self._scratch.begin_phase()
        self.module, self.source = "", None
        if step is not None:
            self.step = step
            # The host is less than a step ahead of the GPU: a stream of commands holds about a thousand.
            self.give_back(lambda late: late.step < step - 1)

    def label_held_by(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Label what optimizers hold: parameters, which a step may give other memory (``p.data = ...``), and states."""
        quantized.begin_if_imported()
        for optimizer in optimizers:
            self.label((p for group in optimizer.param_groups for p in group["params"]), "parameters")
        self.label(states_of(optimizers), "optimizer_state")

    def follow(self, mode: object) -> None:
        """Read counters in known values of the step's fake tensors, too, and have them know random numbers."""
        self.counters.read(mode)
        if isinstance(mode, constants.KnownFakeMode):
            mode.seed, mode.luck = self._seed, self._luck

    def enter_node(self) -> None:
        """A node of the backward pass begins."""
        self._first_of_node = len(self._bytes)

    def peaks_inside(
        self, runs: Iterable[Callable[[], object]], most: int
    ) -> tuple[list[tuple[int, Exception | None]], int]:
        """Return the bytes that each call takes at most beyond those alive before all, and the error that ended it.

        The calls are made one after the other, and the last value is what they leave of their own. Nothing of it is
        recorded, and what they make is not known afterwards. One that makes or frees more than so many tensors ends.
        """
        rows, first, now, found = _Rows(), len(self._bytes), 0, list[tuple[int, Exception | None]]()
        with patched(self, rows=rows), patched(self._scratch, spans=[], kernels=[]):
            for run in runs:
                rows.clear()
                rows.most, peak, error = most, now, None
                try:
                    run()
                except Exception as raised:  # noqa: BLE001 - the user's code may raise anything
                    error = raised.with_traceback(None)
                for row in rows:
                    now += row.change if row.case != "high" else 0
                    peak = max(peak, now)
                found.append((peak, error))
        made = sum(self._bytes[block] for block in self._live.values() if block >= first)
        self._live = {address: block for address, block in self._live.items() if block < first}
        return found, made

    def note_autotuning(self) -> None:
        """Note that kernels of products and convolutions may be chosen by torch.compile for their speed from now on."""
        self._scratch.is_autotuned = True
        self.assume(_AUTOTUNED)

    def note_graphs(self) -> None:
        """Note that what torch.compile makes of the step runs as CUDA graphs, which keep memory to themselves."""
        self.assume(_GRAPHS)

    def room_below_peak(self) -> int:
        """How much less is allocated than was before: what torch.compile's copies may take."""
        now = peak = 0
        for row in self.rows:
            if row.case != "high":
                now += row.change
                peak = max(peak, now)
        return peak - now

    def pooled(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a compiled program that runs with its blocks known as those of the pool that CUDA graphs share."""

        def ran(args: Any) -> Any:
            given = set(map(self.block_behind, plain_tensors(list(args)))) - self._pool - {-1}  # the program frees them
            copied = [self._bytes[block] for block in given if self._parts.get(block) not in _NOT_COPIED]
            self._copied = max(self._copied, sum(copied))
            first = len(self._bytes)
            try:
                return call(args)
            finally:
                self._pool.update(range(first, len(self._bytes)))

        return ran

    def _chosen_bytes(self) -> int:
        """Return what a compiled step takes at most by choices that are made on a device."""
        scratch, apart = self._scratch, self._apart() if _GRAPHS in self.assumptions else 0
        if scratch.padded >= WORTH_A_NOTE:
            self.assume(_PADS)
        timed = compiled_cuda.timing_bytes(scratch.target) if self._pool else 0
        return max(scratch.largest_product, scratch.padded) + timed + apart

    def _apart(self) -> int:
        """Return what it takes at most that blocks of a pool and others cannot be in each other's place."""
        now, peaks = [0, 0], [0, 0, 0]
        for row in self.rows:
            if row.case != "high":
                place = row.block in self._pool
                now[place] += row.change
                peaks = list(map(max, peaks, (*now, sum(now))))
        return peaks[0] + peaks[1] - peaks[2] + self._copied

    def assume(self, note: str) -> None:
        """Note an assumption, once."""
        self.assumptions[note] = None

    def note_refused(self) -> None:
        """Note requests that no device could grant, and that the step went on from."""
        for line, nbytes in self.refused.items():
            where = line.rpartition(":")[0]
            self.assume(Note("refused", f"a request for {format_bytes(nbytes)} raises, and the step goes on: {where}"))

    def note_answer(self, tensor: object, answer: object) -> None:
        """Note a whole number of a tensor with unknown values that another run read: a size may depend on it."""
        if (
            self.reads.are_given
            and _is_whole(answer)
            and isinstance(tensor, FakeTensor)
            and constants.known_value(tensor) is None
        ):
            self.assume(_COMPUTED)

    def note_check(self) -> None:
        """Note that a check of values is assumed to find nothing wrong, if it is the user's own."""
        self._checks[line_that_checks()] = None

    # -- called by torch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # asking Dynamo takes time; `watching` has it skipped for a step that is compiled

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles nothing under a mode that says otherwise."""
        return True

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func is _device_of and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # very frequent, and slow through all modes
        kwargs = kwargs or {}
        if one_rank.any_wrapped(types):
            return NotImplemented
        if not (self._recording and isinstance(func, OpOverload)):
            return self._call(func, args, kwargs)
        beat()
        task = graph_task()
        if task != self._graph_task:
            if self._graph_task == -1:  # and not a backward pass inside one, as reentrant checkpointing runs
                self.ran_backward = True
                self.keep_activations()
            self._graph_task = task
        known = faking.known_result(func, args, kwargs)
        if known is not None:
            with DisableTorchFunction():
                self._note_work(func, args, kwargs, known)
            return known
        args, written = masked(func, args), in_place(func)
        of_this_node = written is not None and self.block_behind(args[0]) >= self._first_of_node
        if of_this_node or self._is_bias_of_linear(func, args):
            func = written or _ADD_
        taken_apart = self._taken_apart(func)
        if taken_apart is not None:
            return taken_apart(*args, **kwargs)
        if faking.only_writes(func, args):
            forget_written(func, args, kwargs)
            out = None
        else:
            out = self._result(func, args, kwargs)
        self._line = ""
        try:
            with DisableTorchFunction():
                self._scratch.note(func, args, kwargs, out)
                self._note_work(func, args, kwargs, out)
        finally:
            self._line = None
        return out

    def _call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if isinstance(func, OpOverload):
            return func(*args, **kwargs)
        with self:  # the operators that this one calls are recorded
            return port.eager_kernel(func)(*args, **kwargs)

    def _is_bias_of_linear(self, func: OpOverload, args: tuple[Any, ...]) -> bool:
        """Whether a Linear adds its bias to a product that it has made, which is in place on plain tensors."""
        if self.in_linear is None or func is not _ADD or not isinstance(args[1], Tensor):
            return False
        if args[1].dim() != 1 or args[0].dim() < _BATCHED:
            return False
        return self.block_behind(args[0]) >= self.in_linear

    def _result(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        try:
            ran = self._custom_result(func, args, kwargs) if faking.is_custom(func) else None
            out = ran[0] if ran else self._fake_result(func, args, kwargs)
            if out is None and not ran:
                out = self.reads.given(func, self.line)
                self.note_answer(args[0] if args else None, out)
            if out is None and not (ran and not port.schema_of(func).returns):
                lucky = self._luck and self._seed is None and constants.draws(func)
                out = constants.by_luck(self._luck, func, *args, **kwargs) if lucky else func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not self.worst_case:
                raise
            out = self._value_sizes.result(func, self.line(), args, kwargs)
            if not self._value_sizes.are_given:
                self.assume(assumption(func))
        else:
            self._value_sizes.note(func, self.line, args, out)
            self.reads.note(func, self.line, out)
        return out

    @contextmanager
    def _inside_kernel(self) -> Iterator[None]:
        """Run a kernel in Python without autograd; autocast applies only if it has not cast the arguments."""
        below = patched(self, _below_autograd=True)
        with torch.overrides.enable_reentrant_dispatch(), port.below_autograd(), below, self:
            yield

    def _taken_apart(self, func: OpOverload) -> Callable[..., object] | None:
        """Return what an operator runs that reaches the recorder whole but calls others that allocate; else None.

        Below autograd, and in inference mode, nothing else decomposes such operators, ``conv2d`` for example.
        """
        fast_path = fast_paths.IMPLEMENTED.get(func)
        if fast_path is not None:
            return self._inside_kernel()(fast_path)
        if func is _DISTANCES:
            return self._as_called(view=True)(port.kernel_of_any_device(func))
        if (self._below_autograd or torch.is_inference_mode_enabled()) and port.decomposes(func, self.device_type):
            returns_view = any(result.alias_info is not None for result in port.schema_of(func).returns)
            return self._as_called(view=returns_view)(port.decomposed(func))
        return None

    @contextmanager
    def _as_called(self, *, view: bool) -> Iterator[None]:
        """Record inside an operator; in one that returns a view, a weight's views know that it requires gradients."""
        with nullcontext() if view else torch.overrides.enable_reentrant_dispatch(), self:
            yield

    def _custom_result(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object] | None:
        """Run what an operator implemented in Python runs, to see what it allocates; None for others."""
        if not any(tensor.device.type == self.device_type for tensor in plain_tensors([args, *kwargs.values()])):
            return None
        implementation = port.python_kernel(func, self.device_type)
        if self.device_type == "cuda" and quantized.depends_on_outliers(func, args, kwargs):
            implementation = quantized.quantize_rows
            self.assume(quantized.OUTLIERS)
        if implementation is not None:
            try:
                addresses = quantized.addresses_for(func, self.device_type)
                with self._inside_kernel(), addresses or faking.without_addresses():
                    forget_written(func, args, kwargs)
                    out = implementation(*args, **kwargs)
                if self.device_type == "cuda" and (most := quantized.most_of_outliers(func, args, out)):
                    self.hold_at_most(*most)
                return (out,)
            except faking.NoAddressError:
                pass
            except (DataDependentOutputException, DynamicOutputShapeException, MemGuardError):
                raise  # it runs on real tensors
            except Exception:
                if not any(isinstance(tensor, FakeTensor) for tensor in plain_tensors([args, *kwargs.values()])):
                    raise
        inside = asked_bytes(func, args, kwargs) if self.device_type == "cpu" else None
        if inside is None:
            self.assume(faking.unseen(func))
        self._scratch.inside = inside or 0
        return None

    def _fake_result(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """The result of an operator whose fake kernel in torch is less exact than ours, else None."""
        if func in faking.FILLS_OUT and isinstance(kwargs["out"], FakeTensor):
            return kwargs["out"]
        out = faking.laid_out(func, args, kwargs)
        if out is not None:
            return out
        if self.device_type == "cpu":
            return mkldnn_lstm.fake_result(func, args, kwargs)
        if func is _CLONE and frees_saved("CudnnRnnBackward0"):
            return args[0]  # the formula copies the reserve unless the engine says that it frees it; a node has no say
        out = cudnn_rnn.fake_result(func, args, kwargs)
        if out is not None:
            self.assume(cudnn_rnn.NOTE)
        return out

    def trace(self, batch_size: int, method: Method, notes: Iterable[str] = ()) -> Trace:
        """Stop recording: the events so far, each with its part."""
        self._references.clear()
        events = tuple(
            row if row.part else row._replace(part=self._parts.get(row.block, "temporaries"))
            for row in _in_steady_order(self.rows)
        )
        kernels, spans, held_at = tuple(self._scratch.kernels), tuple(self._scratch.spans), self._held_at
        chosen = self._chosen_bytes() if self.compiled else 0
        if chosen:
            self.expect(chosen, "workspaces", at_most=True)
            kernels = spans = ()
        first = len(self._bytes)
        expected = [
            Event("alloc", first + index, nbytes, part, "setup", case=case)
            for index, (case, part, nbytes) in enumerate(self._expected)
        ]
        later = len(expected)
        events = (*events[:held_at], *expected, *events[held_at:])
        spans = tuple(
            span._replace(start=span.start + later, end=span.end + later) if span.start >= held_at else span
            for span in spans
        )
        assumed, shares = (*notes, *self.assumptions, *self._checked()), self._value_sizes.noted
        read = batch_size, self.device_type, method, events, assumed, kernels, spans, self._batch, held_at, shares
        answers = self.reads.noted if NOTE in self.assumptions else ()
        # The work of a batch, then of an optimizer step.
        work = tuple(itertools.chain.from_iterable(noted for _, (_, noted) in sorted(self._work.items())))
        made = Trace(*read, kept=self.kept, work=work, answers=answers)
        return replace(made, draws=self.draws, counts_steps=self.counts_steps)

    def _checked(self) -> Iterator[str]:
        lines = [line for line in self._checks if line]
        if lines:
            places = ", ".join(lines[:_LISTED]) + (" and others" if len(lines) > _LISTED else "")
            yield f"checks of values are assumed to find no error, NaN or infinity: {places}"

    def _note_work(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        noted = None if self.phase == "setup" else self._work_noted(updates=self.phase == "optimizer")
        counted = self.flops if graph_task() == -1 else None
        if noted is not None or counted is not None:
            target = self._scratch.target
            work = work_of(func, args, kwargs, out, tf32=isinstance(target, CudaTarget) and target.tf32)
            if work and noted is not None:
                noted.append(work._replace(updates=self.phase == "optimizer"))
            if work and counted is not None and work.kind not in (SPECIAL, RANDOM):
                counted[self.module] += int(work.flops)

    def _work_noted(self, *, updates: bool) -> list[Work] | None:
        """Return the list to note work in: of the second batch, or optimizer step, as the first ones make states."""
        first = self._first_steps.setdefault(updates, self.step)
        noted = self._work.setdefault(updates, (self.step, [])) if self.step != first else None
        return noted[1] if noted and noted[0] == self.step else None

    def note_sent(self, nbytes: int) -> None:
        """Note what a strategy sends to the other ranks once a step, if no operator of torch does."""
        noted = self._work_noted(updates=True)
        if noted is not None:
            noted.append(Work(COMMUNICATION, 0, nbytes, updates=True))

    def note_moved(self, nbytes: int) -> None:
        """Note activations that go to the host until their backward pass."""
        noted = self._work_noted(updates=False)
        if noted is not None:
            noted.append(Work(TRANSFER, 0, nbytes))


_LISTED = 3  # lines of checks
_COMPUTED = Note("computed numbers", "whole numbers that the step computes and reads are those of its first steps")

_AUTOTUNED = (
    "max-autotune chooses kernels by their speed: predicted with those of the default mode, and at most with one more "
    "result of the largest matrix product or convolution"
)

_GRAPHS = (
    "torch.compile records CUDA graphs, which keep their memory to themselves: predicted as without, and at most with "
    "all of it apart and their inputs twice"
)
_PADS = (
    "torch.compile may pad matrices whose sizes are not multiples of 8, by their speed: predicted without, and at most "
    "with copies of the largest"
)
_NOT_COPIED = ("parameters", "buffers")


def call_with_overrides(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Call a function of torch, or ours in place of one that fake tensors or a simulated GPU do not support."""
    return (fake_cuda if fake_cuda.is_overridden(func, args) else faking).call(func, args, kwargs)


_WITH_LINEAR = frozenset((F.linear, F.multi_head_attention_forward, *map(port.recurrent_function, port.RECURRENT)))
_WITH_NUMBER = frozenset(("MulBackward0", "DivBackward0"))  # which keep a number as a tensor that no operator makes
_BATCHED = 3  # dimensions: a Linear adds its bias to rows within their product


class _Rows(list[Event]):
    """Rows of code that may go on for long, as a loop over the pixels of an image."""

    most = 0

    @override
    def append(self, row: Event) -> None:
        if row.action == "alloc" and len(self) >= self.most:
            raise OverflowError("it makes too many tensors")
        super().append(row)


class _ModulePaths(TorchFunctionMode):
    """Sets the recorder's module and line: in the forward pass, and by hooks on graph nodes in the backward pass."""

    def __init__(self, recorder: Recorder, *, walked: bool) -> None:
        super().__init__()
        self.recorder, self.walked = recorder, walked

    def __torch_function__(
        self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if type(func) is MethodWrapperType:  # reads or sets an attribute: frequent, and overridden by no one
            out = func(*args)
        elif func in _WITH_LINEAR and not port.has_tangents():
            # Maybe inside another; it adds its bias in place, except under a dispatch mode.
            with patched(self.recorder, in_linear=len(self.recorder._bytes)):
                out = call_with_overrides(func, args, kwargs or {})
        elif func is Tensor.backward:  # runs without this mode, and `torch.autograd.backward` with it
            with self:
                _backward(*args, **(kwargs or {}))
            return None
        elif self.recorder.reads.follows(func, args):
            out = self.read(func, args, functools.partial(call_with_overrides, func, args, kwargs or {}))
            return self.recorder.counters.read_out(out) if func is Tensor.item else out
        else:
            out = call_with_overrides(func, args, kwargs or {})
        if type(out) is FakeTensor or type(out) is Tensor:
            self._follow(_node_of(out))
        else:
            for tensor in plain_tensors(out, inside=not one_rank.is_wrapped(out)):
                self._follow(_node_of(tensor))
        return out

    def read(self, func: Function, args: Sequence[Any], read: Callable[[], object]) -> object:
        """Read a value, or return what another run read."""
        out = self.recorder.reads.noting(func, self.recorder.line, read)
        self.recorder.note_answer(args[0], out)
        return out

    def _follow(self, node: Any) -> None:
        if node is not None and "memguard" not in node.metadata:
            metadata = node.metadata
            metadata["memguard"] = self.recorder.module, self.recorder.line(), self.recorder.stream
            if not self.walked:
                node.register_prehook(lambda _: self.enter_node(metadata))
            if self.recorder.device_type == "cpu" and node.name() in _WITH_NUMBER:
                self._keep_number(node)

    def _keep_number(self, node: Any) -> None:
        saved = next((each for each in port.saved_handles(node) if type(each) is Tensor and not each.dim()), None)
        if saved is not None and is_walked():  # a walk cannot free it: no hooks are given it
            node.metadata[NUMBER] = self.recorder.take_held(saved.untyped_storage().nbytes(), node.name())
        elif saved is not None:
            self.recorder.watch(saved, node.name())

    def enter_node(self, metadata: dict[str, Any]) -> None:
        """Note the module and line of a node; the walk calls this before each node of a backward pass."""
        self.recorder.enter_node()
        here = metadata.get("memguard")
        if here is not None:
            self.recorder.module, self.recorder.source, self.recorder.node_stream = here


def _backward(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | None = None,
) -> None:
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _node_of(tensor: Tensor) -> Any:
    """The node that made a tensor; None for a view that was written to without gradients, of which torch raises."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def _is_whole(answer: object) -> bool:
    """Whether an answer is a whole number, or a list or array of such."""
    if isinstance(answer, list):
        return any(map(_is_whole, answer[:1]))
    kind = getattr(getattr(answer, "dtype", None), "kind", "")
    return type(answer) is int or kind in ("i", "u")


def _listed(tensor: FakeTensor, paths: _ModulePaths, to_list: Callable[[FakeTensor], object]) -> object:
    return paths.read(Tensor.tolist, [tensor], functools.partial(to_list, tensor))


def _in_steady_order(rows: Sequence[Event]) -> Iterator[Event]:
    """Put casts that are freed at once in the order of their numbers.

    Autocast clears its cache of cast weights in the order of their addresses, which differs from run to run.
    """
    casts = {row.block for row in rows if row.operator == "aten._to_copy.default"}

    def place(row: Event) -> tuple[object, ...] | None:
        return row[4:] if row.action == "free" and row.block in casts else None

    for where, run in itertools.groupby(rows, place):
        together = list(run)
        yield from sorted(together, key=lambda row: row.block) if where else together


@contextmanager
def watching(recorder: Recorder, module: nn.Module) -> Iterator[None]:
    """Record everything that happens inside, with the paths of ``module``'s children.

    The module's parameters and buffers count as allocated at the start. Hooks on all modules of the process are
    registered, and `lightning_memguard.core.simulation.backward.walking` patches torch: no other thread may use it.
    """
    paths = {id(child): written_path(name) for name, child in module.named_modules()}
    recorder.scripted = any(isinstance(child, torch.jit.ScriptModule) for child in module.modules())
    stack: list[str] = []

    def enter(child: nn.Module, _: object) -> None:
        stack.append(recorder.module)
        recorder.module = paths.get(id(child), recorder.module)

    def leave(*_: object) -> None:
        recorder.module = stack.pop() if stack else ""

    with ExitStack() as exits:
        if not recorder.compiled:  # Dynamo would break its graphs at the hooks
            exits.enter_context(nn.modules.module.register_module_forward_pre_hook(enter))
            exits.enter_context(nn.modules.module.register_module_forward_hook(leave, always_call=True))
        for part, tensor in _in_order_of_moving(module):
            recorder.label([tensor], part)
        recorder.label(quantized.held_by(module), "parameters")
        on_cpu = recorder.device_type == "cpu"
        if on_cpu:
            recorder.label(unregistered_tensors(module), "buffers")
        # Under a dispatch mode the engine adds gradients out of place, without one in place: the walk does the latter.
        walked = fake_cuda.simulated_gpu() is not None or (on_cpu and fake_cuda.can_simulate_cuda())
        exits.enter_context(streams.watched(recorder))
        paths_mode = _ModulePaths(recorder, walked=walked)
        exits.enter_context(one_rank.watched(recorder.note_resized, recorder.paused))
        exits.enter_context(flex.watched(Recorder, fused=not recorder.compiled))
        if walked:
            exits.enter_context(walking(paths_mode.enter_node))
        if recorder.compiled:
            dispatch = torch.compiler.disable(Recorder.__torch_dispatch__)
            exits.enter_context(patched(Recorder, __torch_dispatch__=dispatch))
            exits.enter_context(compiled.compiling(recorder))
        else:
            exits.enter_context(compiled.noting(recorder.assume))
            exits.enter_context(patched(constants, note_check=recorder.note_check))
            exits.enter_context(patched(torch, get_rng_state=_watched(recorder, torch.get_rng_state)))
            exits.enter_context(paths_mode)
            if recorder.reads.are_given:  # this class makes lists without torch
                to_list = functools.partialmethod(_listed, paths_mode, FakeTensor.tolist)
                exits.enter_context(patched(FakeTensor, tolist=to_list))
            exits.enter_context(fast_paths.taken())
        exits.enter_context(recorder)
        before = fake.drawn_so_far()
        yield
        recorder.draws = recorder._seed is not None or fake.drawn_so_far() != before


def _in_order_of_moving(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers in the order in which `Module.to` allocates them."""
    for child in module.children():
        yield from _in_order_of_moving(child)
    yield from (("parameters", parameter) for parameter in module.parameters(recurse=False))
    yield from (("buffers", buffer) for buffer in module.buffers(recurse=False))


def _watched(recorder: Recorder, make: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A function that makes a tensor without an operator, as a checkpoint keeps the state of the random generator."""

    def watched() -> Tensor:
        tensor = make()
        if recorder._recording and recorder.phase != "setup":
            recorder.watch(tensor, make.__name__)
        return tensor

    return watched


def gradients_of(optimizers: Iterable[torch.optim.Optimizer], module: nn.Module) -> list[Tensor]:
    """The gradients that exist now, of the module's parameters and of others that the optimizers hold."""
    parameters = {id(p): p for p in module.parameters()}
    for optimizer in optimizers:
        parameters |= {id(p): p for group in optimizer.param_groups for p in group["params"]}
    return [p.grad for p in parameters.values() if p.grad is not None]


def states_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """The tensors in the optimizers' states."""
    leaves = tree_leaves([dict(optimizer.state) for each in optimizers for optimizer in _with_state(each)])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _with_state(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Find what has the states: an optimizer, or those that one without states holds, as torchao's for the host."""
    if hasattr(optimizer, "state"):
        yield optimizer
    else:
        yield from (each for each in tree_leaves(vars(optimizer)) if isinstance(each, torch.optim.Optimizer))


def part_bytes(parts: Mapping[str, Iterable[Tensor]], device_type: str) -> dict[str, int]:
    """Bytes of the storages behind these tensors, each storage counted once, on one type of device."""
    seen: set[int] = set()
    totals: dict[str, int] = {}
    for part, tensors in parts.items():
        totals[part] = 0
        for tensor in plain_tensors([each for each in tensors if not nn.parameter.is_lazy(each)]):
            if tensor.device.type == device_type and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if port.storage_id(storage) not in seen:
                    seen.add(port.storage_id(storage))
                    totals[part] += storage.nbytes()
    return totals


def refuse_sparse(tensors: Iterable[Tensor]) -> None:
    """Raise for sparse gradients without values, on which their size depends."""
    for tensor in tensors:
        if tensor.layout is not torch.strided and isinstance(tensor, FakeTensor):
            raise CannotTraceError(
                f"A gradient of shape {tuple(tensor.shape)} has layout {tensor.layout}: its size depends on its "
                "values, which only a real run has."
            )
