"""Run one training step and watch every storage: what was allocated, when, for what, and when it died.

A dispatch mode sees each operator's results; a weak reference's finalizer tells when a storage is gone. Both work alike
on fake and on real tensors, so the same recorder serves every way in `lightning_memguard.core.capture.predict`.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_memguard.core.capture import cudnn_rnn, fake, fake_cuda, mkldnn_lstm
from lightning_memguard.core.capture.backward import graph_task, walking
from lightning_memguard.core.capture.schema import by_name
from lightning_memguard.core.kernels import table
from lightning_memguard.core.kernels.arguments import Call, Rule
from lightning_memguard.core.trace.scratch import NONE, CpuTarget, CudaTarget, Scratch
from lightning_memguard.core.trace.trace import Event, Kernel, Method, ScratchSpan, Trace, moments_of, scratch_events
from lightning_memguard.errors import CannotTraceError

_device_of = torch.ops.prim.device.default
_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd
_ACTIVATION_PHASES = ("forward", "transfer")


class Recorder(TorchDispatchMode):
    """Watches the storages of one device type while a step runs under it.

    Whoever runs the step says where it stands (`mark`) and whose a tensor is (`label`); the recorder does the rest.

    Args:
        device_type: only storages on this type of device are recorded.
        worst_case: give operators whose result depends on values their largest result, instead of failing.
        kernel_target: the GPU whose kernels' scratch is counted, where the device is one.
    """

    def __init__(self, device_type: str, *, worst_case: bool = False, kernel_target: CudaTarget | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.worst_case = worst_case
        self.assumptions: dict[str, None] = {}
        self.phase = "setup"
        self.step = 0
        self.module = ""
        self.source: str | None = None  # of the forward pass, while the backward pass runs; None to look at the stack
        self._rows: list[tuple[Any, ...]] = []
        self._parts: dict[int, str] = {}
        self._live: dict[int, int] = {}  # address of the storage -> its block
        self._bytes: list[int] = []  # by block
        self._kept_bytes = 0
        self._stream = 0
        self._scratch_blocks = 0  # numbered below zero: how many there are may change with the batch size
        self._kernels: list[Kernel] = []
        self._scratch_spans: list[ScratchSpan] = []
        self._storage_bytes: dict[int, int] = {}  # by block, as its storage says
        self._on: CpuTarget | CudaTarget | None = kernel_target
        if device_type == "cpu" and kernel_target is None:
            self._on = CpuTarget(torch.get_num_threads(), _channel_block())
        self._finalizers: list[weakref.finalize[Any, Any]] = []
        self._cublas: set[bool] = set()  # where a handle is open: in the backward pass or not
        self._task = -1
        self._looking = True
        self.ran_backward = False

    # -- what the runner of the step tells

    def mark(self, phase: str, step: int | None = None) -> None:
        """Say where in the step the run stands now."""
        if phase == "backward":
            self._keep_activations()
        self.phase = phase
        self.module, self.source = "", None
        self.step = self.step if step is None else step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look away while something is made that is no part of the step, such as its example batch."""
        self._looking = False
        try:
            yield
        finally:
            self._looking = True

    def label(self, tensors: Iterable[Any], part: str) -> None:
        """Say what these tensors are for; a block that already has a part keeps it."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                block = self._watch(tensor, "")
                if block is not None:
                    self._parts.setdefault(block, part)

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """What is taken inside comes from another stream's pool, whose free memory no other stream takes."""
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def keep(self, nbytes: int, part: str) -> None:
        """Count a block that stands there from now to the end, though no tensor of the step is behind it."""
        if nbytes:
            self._parts[self._take(nbytes, "")] = part
            self._kept_bytes += nbytes

    @property
    def alive_bytes(self) -> int:
        """What stands there now."""
        return self._kept_bytes + sum(self._bytes[block] for block in self._live.values())

    # -- what torch tells

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _device_of and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # asked for at every turn, and slow to answer through all modes
        kwargs = kwargs or {}
        if not self._looking:
            return func(*args, **kwargs)
        task = graph_task()
        if task != self._task:
            if self._task == -1:  # and not a backward pass inside one, as reentrant checkpointing runs
                self.ran_backward = True
                self._keep_activations()
            self._task = task
        known = fake.known_result(func, args)
        if known is not None:
            return known
        if torch.is_inference_mode_enabled() and _is_composed(func):
            with self:  # elsewhere autograd takes it apart, before it comes here
                return func._op_dk(_COMPOSED, *args, **kwargs)
        if fake.only_writes(func, args):
            self._note(func, args, kwargs, None)
            return None
        try:
            out = self._known_better(func, args, kwargs)
            if out is None:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not self.worst_case:
                raise
            out = fake.worst_case_result(func, args, kwargs)
            self.assumptions[fake.assumption(func)] = None
        self._note(func, args, kwargs, out)
        return out

    def _known_better(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator whose fake kernel in torch knows less than we do, else None."""
        if self.device_type == "cpu":
            return mkldnn_lstm.fake_result(func, args, kwargs)
        out = cudnn_rnn.fake_result(func, args, kwargs)
        if out is not None:
            self.assumptions[cudnn_rnn.NOTE] = None
        return out

    def _note(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        """Record what an operator took: scratch before its results, the results, and scratch while they are alive."""
        name = str(func)
        results = list(_tensors(out))
        if isinstance(self._on, CudaTarget) and table.takes_cublas(name):
            self._open_cublas(name, self._on)
        elsewhere = bool(results) and results[0].device.type != self.device_type
        rule = None if elsewhere else self._rule(name)
        scratch = NONE
        if rule and self._on:
            call = Call(by_name(func, args, kwargs), results, self._on)
            scratch = rule(call)
            self._kernels.append(_kernel(name, rule, call))
            self._scratch(scratch, -1, name)
        # a real storage tells its own size
        kept = scratch.kept if results and isinstance(results[0], FakeTensor) else 0
        for place, tensor in enumerate(results):
            self._watch(tensor, name, kept)
            kept = 0
            if rule:
                self._scratch(scratch, place, name)
        if rule:
            self._scratch(scratch, None, name)
        self._take_inside(mkldnn_lstm.scratch_bytes(func, args, kwargs), name)

    def _rule(self, name: str) -> Rule[Any] | None:
        namespace, _, operator = name.partition(".")
        return table.rule(operator.partition(".")[0], self._on) if namespace == "aten" else None

    # -- the book

    def _watch(self, tensor: torch.Tensor, operator: str, kept_bytes: int = 0) -> int | None:
        if tensor.device.type != self.device_type:
            return None
        if self._task != -1 and tensor.layout is not torch.strided:
            return None  # `refuse_sparse` has better words for a gradient
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
            raise CannotTraceError(f"The step makes {kind}, whose bytes depend on values. Use dense tensors instead.")
        storage = tensor.untyped_storage()
        address = storage._cdata
        nbytes = storage.nbytes()
        block = self._live.get(address)
        if block is not None:
            if nbytes == self._storage_bytes[block]:
                return block
            self._forget(address, block)  # the storage was resized in place: a new allocation behind the same object
        if not nbytes:
            return None
        block = self._take(nbytes + kept_bytes, operator)
        self._storage_bytes[block] = nbytes
        self._live[address] = block
        self._finalizers.append(weakref.finalize(storage, self._forget, address, block))
        return block

    def _take(self, nbytes: int, operator: str) -> int:
        block = len(self._bytes)
        self._bytes.append(nbytes)
        here = self._where(), self.step, self.module, operator, self._stream, "", self.line()
        self._rows.append(("alloc", block, *here))
        return block

    def _forget(self, address: int, block: int) -> None:
        if self._live.get(address) == block:
            del self._live[address]
            self._rows.append(("free", block, self._where(), self.step, self.module, "", 0, "", ""))

    def _open_cublas(self, operator: str, kernel_target: CudaTarget) -> None:
        """Forward and backward pass run in threads of their own, each with a cuBLAS handle and its workspace."""
        in_backward = self._task != -1
        if in_backward not in self._cublas:
            self._cublas.add(in_backward)
            nbytes = table.cublas_workspace_bytes(kernel_target.compute_capability, os.environ)
            if nbytes:
                self._parts[self._take(nbytes, operator)] = "workspaces"

    def _take_inside(self, nbytes: int, operator: str) -> None:
        """A block that lives inside one operator, and grows with the batch size as its results do."""
        if nbytes:
            block = self._take(nbytes, operator)
            self._parts[block] = "workspaces"
            self._rows.append(("free", block, self._where(), self.step, self.module, operator, 0, "", ""))

    def _scratch(self, scratch: Scratch, place: int | None, operator: str) -> None:
        """Take blocks that live inside the operator that ran last, and give them back."""
        start = len(self._rows)
        like = Event("alloc", 0, 0, "workspaces", self._where(), self.step, self.module, operator, source=self.line())
        events = scratch_events(moments_of(scratch, place), -1 - self._scratch_blocks, like)
        self._scratch_blocks += len(events) // 2
        self._rows += events
        self._scratch_spans.append(ScratchSpan(start, len(self._rows), len(self._kernels) - 1, place, like))

    def line(self) -> str:
        """The line of the model's code that runs now, or ran when what is computed backward now ran forward."""
        return _line() if self.source is None else self.source

    def _where(self) -> str:
        return "backward" if self._task != -1 and self.phase in _ACTIVATION_PHASES else self.phase

    def _keep_activations(self) -> None:
        """What the forward pass made and the backward pass still finds alive is an activation."""
        for block in self._live.values():
            self._parts.setdefault(block, "activations")

    def trace(self, batch_size: int, method: Method, notes: Iterable[str] = ()) -> Trace:
        """Close the book: the events so far, each with its part."""
        for finalizer in self._finalizers:
            finalizer.detach()
        parts, sizes = self._parts, self._bytes
        events = tuple(
            row
            if isinstance(row, Event)
            else Event._make((*row[:2], sizes[row[1]], parts.get(row[1], "temporaries"), *row[2:]))
            for row in self._rows
        )
        notes = (*notes, *self.assumptions)
        return Trace(
            batch_size, self.device_type, method, events, notes, tuple(self._kernels), tuple(self._scratch_spans)
        )


@functools.cache
def _is_composed(func: Any) -> bool:
    """Whether an operator's kernel calls others, as ``conv2d`` calls ``convolution``. Checked on torch 2.11 to 2.13.

    Its kernel in C++, as it really runs; ``func.decompose`` has other ways for some, ``gru`` among them.
    """
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSED))


# What a model's own code is called through, or calls.
_NOT_THE_MODEL = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_memguard", "contextlib"}
_END_OF_THE_STEP = "lightning_memguard.core.capture.predict"  # further out is whoever asked for a capture


def _line() -> str:
    """The innermost line of the stack that is the model's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == _END_OF_THE_STEP:
            return ""
        if _is_the_models(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _tensors(out: object) -> Iterator[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        inside = getattr(out, "__tensor_flatten__", None)  # a jagged tensor's values and offsets
        if inside is None:
            yield out
        else:
            yield from _tensors([getattr(out, name) for name in inside()[0]])
    elif isinstance(out, (list, tuple)):
        for item in out:
            yield from _tensors(item)


def _channel_block() -> int:
    """Channels that oneDNN keeps side by side on this processor."""
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _kernel(name: str, rule: Rule[Any], call: Call[Any]) -> Kernel:
    """A call whose numbers are apart from the rest, so that its rule can be asked again with other numbers."""
    numbers: list[int] = []
    arguments, results = (_emptied(tuple(values), numbers) for values in (call.arguments.values(), call.results))
    again = _AskAgain(rule, tuple(call.arguments), arguments, results, call.target)
    return Kernel(name, tuple(numbers), (arguments, results), again)


@dataclass(frozen=True)
class _AskAgain:
    """A rule, and the arguments and results of one call with all numbers taken out."""

    rule: Rule[Any]
    names: tuple[str, ...]
    arguments: tuple[object, ...]
    results: tuple[object, ...]
    target: CpuTarget | CudaTarget

    def __call__(self, numbers: Sequence[int]) -> Scratch:
        left = iter(numbers)
        arguments = dict(zip(self.names, _filled(self.arguments, left), strict=True))
        return self.rule(Call(arguments, _filled(self.results, left), self.target))


class _Hole(NamedTuple):
    """In place of a whole number, or of a tensor with this many dimensions and this dtype."""

    dimensions: int = -1
    dtype: torch.dtype | None = None


def _emptied(value: object, numbers: list[int]) -> Any:
    if isinstance(value, torch.Tensor):
        numbers += value.shape
        numbers += value.stride()
        return _Hole(value.dim(), value.dtype)
    if type(value) is int:
        numbers.append(value)
        return _Hole()
    if isinstance(value, (list, tuple)):
        return tuple([_emptied(item, numbers) for item in value])
    return value


def _filled(value: object, numbers: Iterator[int]) -> Any:
    if isinstance(value, _Hole):
        if value.dtype is None:
            return next(numbers)
        shape = [next(numbers) for _ in range(value.dimensions)]
        stride = [next(numbers) for _ in range(value.dimensions)]
        return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return [_filled(item, numbers) for item in value]
    return value


def _is_the_models(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _NOT_THE_MODEL


def line_behind(error: BaseException) -> str:
    """The innermost line of the model's own that an error came through, as ``file:line``; empty where there is none."""
    for frame, lineno in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_the_models(frame):
            return f"{frame.f_code.co_filename}:{lineno}"
    return ""


def answered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch's, and answer in its place what a fake tensor or a pretended GPU cannot."""
    return (fake_cuda if fake_cuda.is_pretended_op(func, args) else fake).call(func, args, kwargs)


class _ModulePaths(TorchFunctionMode):
    """Tells the recorder which module runs, in the forward pass and, by hooks on graph nodes, in the backward pass."""

    def __init__(self, recorder: Recorder, *, walked: bool) -> None:
        super().__init__()
        self.recorder = recorder
        self.walked = walked

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = answered(func, args, kwargs or {})
        for tensor in _tensors(out):
            self._follow(tensor.grad_fn)
        return out

    def _follow(self, node: Any) -> None:
        if node is not None and "memguard" not in node.metadata:
            node.metadata["memguard"] = here = self.recorder.module, self.recorder.line()
            if not self.walked:
                node.register_prehook(self._enter(here))

    def _enter(self, here: tuple[str, str]) -> Callable[[Any], None]:
        def enter(_: Any) -> None:
            self.recorder.module, self.recorder.source = here

        return enter

    def enter_node(self, metadata: dict[str, Any]) -> None:
        """Called by a walk of the graph before each node."""
        here = metadata.get("memguard")
        if here is not None:
            self.recorder.module, self.recorder.source = here


@contextmanager
def watching(recorder: Recorder, module: nn.Module) -> Iterator[None]:
    """Record everything that happens inside, with the paths of ``module``'s children.

    The module's parameters and buffers count as allocated at the start.
    """
    paths = {id(child): name for name, child in module.named_modules()}
    stack: list[str] = []

    def enter(child: nn.Module, _: Any) -> None:
        stack.append(recorder.module)
        recorder.module = paths.get(id(child), recorder.module)

    def leave(*_: Any) -> None:
        recorder.module = stack.pop() if stack else ""

    with ExitStack() as exits:
        before = nn.modules.module.register_module_forward_pre_hook(enter)
        exits.callback(before.remove)
        after = nn.modules.module.register_module_forward_hook(leave, always_call=True)
        exits.callback(after.remove)
        if fake.is_compiled(module):
            recorder.assumptions["what torch.compile would fuse was run eagerly: an upper bound"] = None
        recorder.label(module.parameters(), "parameters")
        recorder.label(module.buffers(), "buffers")
        # The engine adds gradients out of place under a dispatch mode, in place without one: the walk knows better.
        is_fake = isinstance(next(module.parameters(), None), FakeTensor)
        walked = fake_cuda.gpu_of_now() is not None or (is_fake and fake_cuda.can_pretend())
        paths_mode = _ModulePaths(recorder, walked=walked)
        if walked:
            exits.enter_context(walking(paths_mode.enter_node))
        exits.enter_context(paths_mode)
        exits.enter_context(recorder)
        yield


def gradients_of(optimizers: Iterable[torch.optim.Optimizer], module: nn.Module) -> list[torch.Tensor]:
    """The gradients that are alive now, of the module's parameters and of any others the optimizers hold."""
    parameters = {id(p): p for p in module.parameters()}
    for optimizer in optimizers:
        parameters |= {id(p): p for group in optimizer.param_groups for p in group["params"]}
    return [p.grad for p in parameters.values() if p.grad is not None]


def states_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The tensors in the optimizers' states."""
    leaves = [tree_leaves(dict(optimizer.state)) for optimizer in optimizers]
    return [leaf for group in leaves for leaf in group if isinstance(leaf, torch.Tensor)]


def part_bytes(parts: Mapping[str, Iterable[torch.Tensor]], device_type: str) -> dict[str, int]:
    """Bytes of the storages behind these tensors, each storage counted once, on one type of device."""
    seen: set[int] = set()
    totals: dict[str, int] = {}
    for part, tensors in parts.items():
        totals[part] = 0
        for tensor in tensors:
            if tensor.device.type == device_type and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    totals[part] += storage.nbytes()
    return totals


def refuse_sparse(tensors: Iterable[torch.Tensor]) -> None:
    """Sparse gradients have no size before their values are known."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise CannotTraceError(
                f"A gradient of shape {tuple(tensor.shape)} has layout {tensor.layout}: its size depends on its "
                "values. Use dense gradients (`sparse=False`) to have the step predicted."
            )
