"""Run one training step and watch every storage: what was allocated, when, for what, and when it was freed.

A dispatch mode sees each operator's results; a weak reference's finalizer runs when a storage is freed. Both work the
same on fake and on real tensors, so one recorder serves every method in `lightning_memguard.core.capture.predict`.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType, MethodWrapperType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_memguard.core.batch.nesting import batch_bytes, is_dense, shapes_of, tensors_in
from lightning_memguard.core.capture.counters import Counters, Due
from lightning_memguard.core.foreign import aten as _aten
from lightning_memguard.core.foreign import find, patched
from lightning_memguard.core.isolation.pool import beat
from lightning_memguard.core.kernels import table
from lightning_memguard.core.kernels.arguments import Call, operands
from lightning_memguard.core.simulation import (
    compiled,
    cudnn_rnn,
    fake,
    fake_cuda,
    fast_paths,
    mkldnn_lstm,
    one_rank,
    sdpa,
    streams,
)
from lightning_memguard.core.simulation.backward import graph_task, in_place, masked, walking
from lightning_memguard.core.simulation.constants import forget_written
from lightning_memguard.core.simulation.fake import Function, by_name, training_threads
from lightning_memguard.core.simulation.value_sizes import ValueSizes
from lightning_memguard.core.trace.kept import Kept
from lightning_memguard.core.trace.scratch import NONE, CpuTarget, CudaTarget, Scratch
from lightning_memguard.core.trace.trace import (
    CASES,
    WAITS,
    Event,
    Kernel,
    ScratchSpan,
    Trace,
    moments_of,
    scratch_events,
)
from lightning_memguard.errors import CannotTraceError, MemGuardError

if TYPE_CHECKING:
    from lightning_memguard.core.trace.trace import Action, Method, Shapes, Shares

_device_of = torch.ops.prim.device.default
_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd
_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
_FUSED_RMS_NORM = _aten._fused_rms_norm.default
_DROPOUT = _aten.native_dropout.default
_ADD, _ADD_ = _aten.add.Tensor, _aten.add_.Tensor
_DISTANCES = _aten._euclidean_dist.default  # `cdist` by a product, of copies of both inputs
_ACTIVATION_PHASES = ("forward", "transfer")
_OF_A_STEP = ("", "activations", "temporaries")


def this_cpu(threads: int) -> CpuTarget:
    """Return the properties of this machine's CPU that scratch depends on."""
    channel_block = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8  # oneDNN's
    asked = [getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", None) for kind in ("bf16", "fp16")]
    asked += [getattr(torch.cpu, f"_is_amx_{kind}_supported", None) for kind in ("tile", "fp16")]  # torch 2.11 to 2.13
    return CpuTarget(threads, channel_block, *(ask is not None and bool(ask()) for ask in asked))


def _with_flags(target: CudaTarget) -> CudaTarget:
    """The target as torch is set now; a model's hooks may set it."""
    cudnn: Any = torch.backends.cudnn
    return replace(
        target,
        deterministic=torch.are_deterministic_algorithms_enabled() or cudnn.deterministic,
        tf32=cudnn.conv.fp32_precision == "tf32",  # ``allow_tf32`` raises if convolutions and RNNs differ
        benchmark=cudnn.benchmark,
        cudnn=sdpa.cudnn_version(),
    )


class Recorder(TorchDispatchMode):
    """Watches the storages of one device type while a step runs under it.

    The code that runs the step sets the phase (`mark`) and what a tensor is for (`label`); the recorder does the rest.

    Args:
        device_type: only storages on this type of device are recorded.
        worst_case: return the largest result of operators whose result depends on values, instead of failing.
        kernel_target: the GPU whose kernels' scratch is counted, if the device is one.
        compiled: whether what the step compiles runs compiled, see `lightning_memguard.core.simulation.compiled`.
        shares: how large such results were in another run, in place of the largest.
        due: where counters are moved to after the steps, which then run on.
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
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type, self.worst_case, self.compiled = device_type, worst_case, compiled
        self.counters = Counters(due, active=not compiled)
        self.assumptions: dict[str, None] = {}
        self._value_sizes = ValueSizes(shares)
        self.phase, self.step, self.module = "setup", 0, ""
        self.source: str | None = None  # of the forward pass, while the backward pass runs; None: read the stack
        self._rows: list[Event] = []  # an empty part is filled in at the end
        self._parts: dict[int, str] = {}
        self._live: dict[int, int] = {}  # address of the storage -> its block
        self._bytes: list[int] = []  # by block
        self._kept_bytes = 0
        self._expected: list[tuple[str, str, int]] = []
        self._stream = 0
        self._streams: dict[int, int] = {}  # by block, if it is not the default one
        self.waiting = streams.Waiting(self.block_of_another, self.wait, self.come_back)
        self._scratch_blocks = 0  # numbered below zero: how many there are may change with the batch size
        self._kernels: list[Kernel] = []
        self._scratch_spans: list[ScratchSpan] = []
        self._storage_bytes: dict[int, int] = {}  # by block, without what the operator keeps
        self._on: CpuTarget | CudaTarget | None = kernel_target
        if device_type == "cpu" and kernel_target is None:
            self._on = this_cpu(training_threads())
        self._references: list[weakref.ref[torch.UntypedStorage]] = []
        self._line: str | None = None  # of the operator that is noted now, once it was asked for
        self._cublas: set[bool] = set()  # if a handle is open: in the backward pass or not
        self._graph_task = -1
        self._recording = True
        self.ran_backward = False
        self._batch: tuple[Shapes, int] | None = None
        self._batches: list[set[int]] = []  # the blocks of each batch
        self.kept: tuple[Kept, ...] = ()
        self._held_at = self._asked_until = 0
        self._autotuned = False
        self.in_linear: int | None = None  # while it runs, the first block that it may have made
        self._below_autograd = False
        self._first_of_node = 0  # the first block that the node of the backward pass that runs now may have made
        self._largest_product = 0

    # -- called by the code that runs the step

    def mark(self, phase: str, step: int | None = None) -> None:
        """Set the phase of the step, and the number of the step if it changes."""
        if phase == "backward":
            self._keep_activations()
        self.phase = phase
        if isinstance(self._on, CudaTarget):
            self._on = _with_flags(self._on)
        self.module, self.source = "", None
        if step is not None:
            self.step = step
            self.waiting.begin_step(step)

    def paused(self) -> AbstractContextManager[Any]:
        """Record nothing while something is made that is not part of the step, such as its example batch."""
        return patched(self, _recording=False)

    def label(self, tensors: Iterable[object], part: str) -> None:
        """Set the part that these tensors belong to; a block that already has one keeps it."""
        with torch._C.DisableTorchFunction():
            for tensor in _tensors([*tensors]):
                block = self._watch(tensor, "")
                if block is not None:
                    self._parts.setdefault(block, part)

    def label_held_by(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Label what optimizers hold: parameters, which a step may give other memory (``p.data = ...``), and states."""
        for optimizer in optimizers:
            self.label((p for group in optimizer.param_groups for p in group["params"]), "parameters")
        self.label(states_of(optimizers), "optimizer_state")

    def on_stream(self, stream: int) -> AbstractContextManager[Any]:
        """Record allocations made inside in the pool of another stream, whose free memory no other stream uses."""
        return patched(self, _stream=stream)

    def note_batch(self, batch: object) -> None:
        """Note a batch that the step is given; of several the largest."""
        self.label(tensors_in(batch), "batch")
        with torch._C.DisableTorchFunction():
            blocks = {self._watch(tensor, "") for tensor in _tensors([*tensors_in(batch)])}
        self._batches.append({block for block in blocks if block is not None})
        known, nbytes = self._batch, batch_bytes(batch)
        if known is None or nbytes > known[1]:
            self._batch = shapes_of(batch), nbytes

    def enter_node(self) -> None:
        """A node of the backward pass begins."""
        self._first_of_node = len(self._bytes)

    def running_linear(self) -> AbstractContextManager[Any]:
        """Mark that a Linear runs, maybe inside another: it adds its bias in place, except under a dispatch mode."""
        return patched(self, in_linear=len(self._bytes))

    def note_made(self, tensor: Tensor, operator: str) -> None:
        """Record a tensor that no operator made, in a step."""
        if self._recording and self.phase != "setup":
            self._watch(tensor, operator)

    def note_resized(self, storage: torch.UntypedStorage) -> None:
        """Record a storage that was resized in place: how FSDP frees what it gathered, and allocates it again."""
        if not self._recording or storage.device.type not in (self.device_type, "meta"):
            return
        address, nbytes = storage._cdata, storage.nbytes()
        block = self._live.get(address)
        if block is not None and nbytes != self._storage_bytes[block]:
            self._parts[block] = "gathered"
            self._forget(address, block)
            block = None
        if block is None and nbytes:
            self._hold(storage, self._take(nbytes, "storage.resize_", "gathered"), nbytes)

    def block_of_another(self, tensor: Tensor, stream: int) -> int | None:
        """The block behind a tensor that is recorded, if it is not this stream's."""
        block = self._live.get(tensor.untyped_storage()._cdata)
        return None if block is None or self._streams.get(block, 0) == stream else block

    def wait(self, block: int) -> int:
        """A block that was freed waits, at most, for another stream; returns one that waits in its place."""
        waiting = len(self._bytes)
        self._bytes.append(self._bytes[block])
        self._parts[waiting] = self._parts.get(block, "temporaries")
        self._add_row("alloc", waiting, WAITS, self._streams.get(block, 0), case="high")
        return waiting

    def come_back(self, waiting: int) -> None:
        """Free the placeholder of a block that waited for a stream."""
        self._add_row("free", waiting, WAITS, case="high")

    def mark_held(self) -> None:
        """Mark this moment: memory that the run holds on its device throughout was allocated before it."""
        self._held_at = len(self._rows)

    def keep(self, nbytes: int, part: str) -> None:
        """Count a block that is held from now to the end, without a tensor of the step."""
        if nbytes:
            self._take(nbytes, "", part)
            self._kept_bytes += nbytes

    def expect(self, nbytes: int, part: str, *, at_most: bool = False) -> None:
        """Count a block that later steps find besides what was recorded, or find at most; at least, it is not there."""
        self._expected += [(case, part, nbytes) for case in (CASES[2:] if at_most else CASES[1:])]

    def hold(self, tensor: Tensor) -> None:
        """Watch a tensor without counting it: `keep` or `expect` counted its memory, or it is not the step's."""
        self._watch(tensor, "", -tensor.untyped_storage().nbytes())

    @property
    def alive_bytes(self) -> int:
        """Bytes that are allocated now."""
        return self._kept_bytes + sum(self._bytes[block] for block in self._live.values())

    def note_autotuning(self) -> None:
        """Note that kernels of products and convolutions may be chosen by torch.compile for their speed from now on."""
        self._autotuned = True
        self.assumptions[_AUTOTUNED] = None

    def newly_allocated_bytes(self, phase: str) -> int:
        """Return the bytes that operators allocated in one phase since the last call, freed or not."""
        rows, self._asked_until = self._rows[self._asked_until :], len(self._rows)
        new = (row for row in rows if row.action == "alloc" and row.phase == phase and row.operator != WAITS)
        return sum(row.nbytes for row in new if self._parts.get(row.block) != "communication")

    @property
    def alive_without_batch(self) -> int:
        """Bytes alive now without the batch, which may have another size than the one before."""
        kept = set[int]().union(*self._batches[:-1]).difference(*self._batches[-1:])  # Lightning holds the last one
        batch = (block for block in self._live.values() if self._parts.get(block) == "batch" and block not in kept)
        return self.alive_bytes - sum(self._bytes[block] for block in batch)

    def left_by(self, steps: range) -> dict[int, tuple[int, str]]:
        """Return what batches of these numbers left behind: bytes and line of code, by the address of the storage."""
        batches = set[int]().union(*(self._batches[step] for step in steps))
        addresses = {block: address for address, block in self._live.items()}
        made = (row for row in self._rows if row.action == "alloc" and row.block in addresses)
        return {
            addresses[row.block]: (row.nbytes, row.source)
            for row in made
            if row.block in batches or (row.step in steps and self._parts.get(row.block, "") in _OF_A_STEP)
        }

    # -- called by torch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which takes time; `watching` skips it for a step that is compiled

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles nothing under a mode that says otherwise."""
        return True

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func is _device_of and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # very frequent, and slow through all modes
        kwargs = kwargs or {}
        if one_rank.any_wrapped(types):
            return NotImplemented
        if not self._recording:
            return func(*args, **kwargs)
        beat()
        task = graph_task()
        if task != self._graph_task:
            if self._graph_task == -1:  # and not a backward pass inside one, as reentrant checkpointing runs
                self.ran_backward = True
                self._keep_activations()
            self._graph_task = task
        known = fake.known_result(func, args, kwargs)
        if known is not None:
            return known
        args, written = masked(func, args), in_place(func)
        if (written is not None and self._is_of_this_node(args[0])) or self._is_bias_of_linear(func, args):
            func = written or _ADD_
        taken_apart = self._taken_apart(func)
        if taken_apart is not None:
            return taken_apart(*args, **kwargs)
        if fake.only_writes(func, args):
            forget_written(func, args, kwargs)
            out = None
        else:
            out = self._result(func, args, kwargs)
        self._line = ""
        try:
            with torch._C.DisableTorchFunction():
                self._note(func, args, kwargs, out)
        finally:
            self._line = None
        return out

    def _is_of_this_node(self, tensor: Tensor) -> bool:
        """Whether the node of the backward pass that runs now made a tensor's storage."""
        return self._live.get(tensor.untyped_storage()._cdata, -1) >= self._first_of_node

    def _is_bias_of_linear(self, func: OpOverload, args: tuple[Any, ...]) -> bool:
        """Whether a Linear adds its bias to a product that it has made, which is in place on plain tensors."""
        if self.in_linear is None or func is not _ADD or args[1].dim() != 1 or args[0].dim() < _BATCHED:
            return False
        return self._live.get(args[0].untyped_storage()._cdata, -1) >= self.in_linear

    def _result(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        try:
            out = self._custom_result(func, args, kwargs) if fake.is_custom(func) else None
            if out is None:
                out = self._fake_result(func, args, kwargs)
            if out is None:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not self.worst_case:
                raise
            out = self._value_sizes.result(func, self.line(), args, kwargs)
            if not self._value_sizes.are_given:
                self.assumptions[fake.assumption(func)] = None
        else:
            self._value_sizes.note(func, self.line, args, out)
        return out

    @contextmanager
    def _inside_kernel(self) -> Iterator[None]:
        """Run a kernel in Python without autograd; autocast applies only if it has not cast the arguments."""
        below = patched(self, _below_autograd=True)
        with torch.overrides.enable_reentrant_dispatch(), torch._C._AutoDispatchBelowAutograd(), below, self:
            yield

    def _taken_apart(self, func: OpOverload) -> Callable[..., object] | None:
        """Return what an operator runs that reaches the recorder whole but calls others that allocate; else None.

        Below autograd, and in inference mode, nothing else decomposes such operators, ``conv2d`` for example.
        """
        fast_path = fast_paths.implementation(func)
        if fast_path is not None:
            return self._inside_kernel()(fast_path)
        if func is _DISTANCES:
            return self._as_called(view=True)(functools.partial(func._op_dk, _EXPLICIT))
        if (self._below_autograd or torch.is_inference_mode_enabled()) and _is_composed(func, self.device_type):
            return self._as_called(view=_returns_view(func))(functools.partial(func._op_dk, _COMPOSED))
        return None

    @contextmanager
    def _as_called(self, *, view: bool) -> Iterator[None]:
        """Views of a weight, inside an operator, tell that the weight requires gradients."""
        with nullcontext() if view else torch.overrides.enable_reentrant_dispatch(), self:
            yield

    def _custom_result(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Run what an operator implemented in Python runs, to see what it allocates; None for others."""
        if not any(tensor.device.type == self.device_type for tensor in _tensors([args, *kwargs.values()])):
            return None
        implementation = fake.python_implementation(func, self.device_type)
        if implementation is not None:
            try:
                with self._inside_kernel(), fake.without_addresses():
                    return implementation(*args, **kwargs)
            except fake.NoAddressError:
                pass
            except (DataDependentOutputException, DynamicOutputShapeException, MemGuardError):
                raise  # it runs on real tensors
            except Exception:
                if not any(isinstance(tensor, FakeTensor) for tensor in _tensors([args, *kwargs.values()])):
                    raise
        self.assumptions[fake.unseen(func)] = None
        return None

    def _fake_result(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """The result of an operator whose fake kernel in torch is less exact than ours, else None."""
        out = fake.laid_out(func, args, kwargs)
        if out is not None:
            return out
        if self.device_type == "cpu":
            return mkldnn_lstm.fake_result(func, args, kwargs)
        out = cudnn_rnn.fake_result(func, args, kwargs)
        if out is not None:
            self.assumptions[cudnn_rnn.NOTE] = None
        return out

    def _note(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        """Record what an operator allocated: scratch, results, and scratch next to the results."""
        name, namespace, short = _names(func)
        results = [out] if type(out) is FakeTensor or type(out) is Tensor else list(_tensors(out))
        if self._autotuned and results and short in _TIMED:
            self._largest_product = max(self._largest_product, results[0].numel() * results[0].element_size())
        elsewhere = bool(results) and results[0].device.type != self.device_type
        if namespace == "c10d" and short in _EXCHANGES:
            self.label([max(_tensors(list(args[:2])), key=torch.Tensor.numel)], "communication")
        rule = table.rule(short, self._on) if namespace in ("aten", "fsdp") and not elsewhere else None
        scratch = NONE
        if rule and self._on:
            call = Call(by_name(func, args, kwargs), results or list(_tensors(kwargs.get("out"))), self._on)
            scratch = rule(call)
            if scratch is NONE and short in table.BY_TYPES:
                rule = None  # very frequent
            else:
                self._kernels.append(_kernel(name, call))
                self._scratch(scratch, -1, name)
        # a real storage has its true size
        kept = scratch.kept if results and isinstance(results[0], FakeTensor) else 0
        for place in _order_made(func, results):
            self._watch(results[place], name, kept)
            kept = 0
            if rule:
                self._scratch(scratch, place, name)
        if isinstance(self._on, CudaTarget) and table.takes_cublas(name):
            self._open_cublas(name, self._on)
        if rule:
            self._scratch(scratch, None, name)
        inside = mkldnn_lstm.scratch_bytes(func, args, kwargs)
        if inside:  # it grows with the batch size as the results do
            self._add_row("free", self._take(inside, name, "workspaces"), name)

    # -- the events

    def _watch(self, tensor: Tensor, operator: str, kept_bytes: int = 0) -> int | None:
        if tensor.device.type != self.device_type:
            return None
        if tensor.layout is torch.sparse_coo and not isinstance(tensor, FakeTensor):
            with no_dispatch():
                parts = tensor._indices(), tensor._values()
            return [self._watch(part, operator) for part in parts][-1]
        if self._graph_task != -1 and tensor.layout is not torch.strided:
            return None  # `refuse_sparse` has a better message for a gradient
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
        return self._hold(storage, self._take(nbytes + kept_bytes, operator), nbytes)

    def _hold(self, storage: torch.UntypedStorage, block: int, nbytes: int) -> int:
        address = storage._cdata
        self._storage_bytes[block] = nbytes
        self._live[address] = block
        self._references.append(weakref.ref(storage, functools.partial(self._forget, address, block)))
        return block

    def _take(self, nbytes: int, operator: str, part: str = "") -> int:
        block = len(self._bytes)
        self._bytes.append(nbytes)
        if part:
            self._parts[block] = part
        stream = self._stream_in_use()
        if stream:
            self._streams[block] = stream
        self._add_row("alloc", block, operator, stream, self.line())
        return block

    def _stream_in_use(self) -> int:
        return self._stream or streams.in_use()

    def _add_row(
        self, action: Action, block: int, operator: str, stream: int = 0, source: str = "", case: str = ""
    ) -> None:
        where = self._where(), self.step, self.module, operator
        self._rows.append(Event(action, block, self._bytes[block], "", *where, stream, case, source))

    def _forget(self, address: int, block: int, _: object = None) -> None:
        if self._live.get(address) == block:
            del self._live[address]
            self._add_row("free", block, "")
            self.waiting.free(block)

    def _open_cublas(self, operator: str, kernel_target: CudaTarget) -> None:
        """Forward and backward pass run in different threads, each with a cuBLAS handle and its workspace."""
        in_backward = self._graph_task != -1
        if in_backward not in self._cublas:
            self._cublas.add(in_backward)
            nbytes = table.cublas_workspace_bytes(kernel_target.compute_capability, os.environ)
            if nbytes:
                self._take(nbytes, operator, "workspaces")

    def _scratch(self, scratch: Scratch, place: int | None, operator: str) -> None:
        """Allocate blocks that live inside the operator that ran last, and free them."""
        start = len(self._rows)
        where, stream = (self._where(), self.step, self.module, operator), self._stream_in_use()
        like = Event("alloc", 0, 0, "workspaces", *where, stream, source=self.line())
        events = scratch_events(moments_of(scratch, place), -1 - self._scratch_blocks, like)
        self._scratch_blocks += len(events) // 2
        self._rows += events
        self._scratch_spans.append(ScratchSpan(start, len(self._rows), len(self._kernels) - 1, place, like))

    def line(self) -> str:
        """The line of the model's code that runs now; in the backward pass, the line of its forward pass."""
        if self.source is not None:
            return self.source
        if not self._line:
            line = _line_of_the_model(sys._getframe(1))
            if self._line is None:
                return line
            self._line = line
        return self._line

    def _where(self) -> str:
        return "backward" if self._graph_task != -1 and self.phase in _ACTIVATION_PHASES else self.phase

    def _keep_activations(self) -> None:
        """Label blocks that are still held when the backward pass starts as activations, if they have no part yet."""
        for block in self._live.values():
            self._parts.setdefault(block, "activations")

    def trace(self, batch_size: int, method: Method, notes: Iterable[str] = ()) -> Trace:
        """Stop recording: the events so far, each with its part."""
        self._references.clear()
        events = tuple(
            row if row.part else row._replace(part=self._parts.get(row.block, "temporaries")) for row in self._rows
        )
        kernels, spans, held_at = tuple(self._kernels), tuple(self._scratch_spans), self._held_at
        first = len(self._bytes)
        expected = [
            Event("alloc", first + index, nbytes, part, "setup", case=case)
            for index, (case, part, nbytes) in enumerate(self._expected)
        ]
        if self._largest_product:
            where = "workspaces", "setup"
            expected.append(Event("alloc", first + len(expected), self._largest_product, *where, case="high"))
            kernels = spans = ()
        later = len(expected)
        events = (*events[:held_at], *expected, *events[held_at:])
        spans = tuple(
            span._replace(start=span.start + later, end=span.end + later) if span.start >= held_at else span
            for span in spans
        )
        assumed, shares = (*notes, *self.assumptions), self._value_sizes.noted
        read = batch_size, self.device_type, method, events, assumed, kernels, spans, self._batch, held_at, shares
        return Trace(*read, kept=self.kept)


_AUTOTUNED = (
    "max-autotune chooses kernels by their speed: predicted with those of the default mode, and at most with one more "
    "result of the largest matrix product or convolution"
)
_EXCHANGES = ("_allgather_base_", "_reduce_scatter_base_")  # of a rank's part with all parts
_TIMED = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution", "_convolution_pointwise", "_mkl_linear"))


@functools.cache
def _is_composed(func: OpOverload, device_type: str) -> bool:
    """Whether an operator's kernel calls others, as ``conv2d`` calls ``convolution``. Checked on torch 2.11 to 2.13.

    True for a kernel in C++, which is what really runs; ``func.decompose`` differs for some, such as ``gru``.
    """
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    own = device_type == "cuda" and func is _FUSED_RMS_NORM  # builds for the CPU alone do not know of it
    return has_kernel(name, _COMPOSED) and not (own or has_kernel(name, device_type.upper()))


def _order_made(func: OpOverload, results: Sequence[Tensor]) -> Sequence[int]:
    """The places of an operator's results in the order in which they are allocated: dropout's mask comes first."""
    return (1, 0) if func is _DROPOUT and len(results) > 1 else range(len(results))


@functools.cache
def _returns_view(func: OpOverload) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)


# Packages around the model's own code.
_NOT_THE_MODEL = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_memguard", "contextlib"}
_END_OF_THE_STEP = "lightning_memguard.core.capture.capture"  # callers of it are not the model


def _line_of_the_model(frame: FrameType | None) -> str:
    while frame is not None and (name := frame.f_globals.get("__name__", "")) != _END_OF_THE_STEP:
        if _is_of_the_model(str(name)):
            return sys.intern(f"{frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_code.co_name}")
        frame = frame.f_back
    return ""


@functools.cache
def _is_of_the_model(name: str) -> bool:
    return name.partition(".")[0] not in _NOT_THE_MODEL


@functools.cache
def _names(func: OpOverload) -> tuple[str, str, str]:
    """An operator's full name, its namespace, and its name in that."""
    name = str(func)
    namespace, short, *_ = name.split(".")
    return name, namespace, short


def _tensors(out: object, *, inside: bool = True) -> Iterator[Tensor]:
    for tensor in operands(out):
        names = getattr(tensor, "__tensor_flatten__", None)  # of a jagged tensor's values and offsets, a DTensor's part
        if names is None or not inside:
            yield tensor
        else:
            yield from _tensors([getattr(tensor, name) for name in names()[0]])


def _kernel(name: str, call: Call[Any]) -> Kernel:
    """A call whose numbers are apart from the rest, so that its rule can be asked again with other numbers."""
    numbers: list[int] = []
    arguments, results = (
        _extract_numbers(tuple(values), numbers) for values in (call.arguments.values(), call.results)
    )
    again = _RuleTemplate(name.split(".")[1], tuple(call.arguments), arguments, results, call.target)
    return Kernel(name, tuple(numbers), (arguments, results), again)


@dataclass(frozen=True)
class _RuleTemplate:
    """A rule by its operator, and the arguments and results of one call with all numbers taken out."""

    operator: str
    names: tuple[str, ...]
    arguments: tuple[object, ...]
    results: tuple[object, ...]
    target: CpuTarget | CudaTarget

    def __call__(self, numbers: Sequence[int]) -> Scratch:
        left = iter(numbers)
        arguments = dict(zip(self.names, _restore_numbers(self.arguments, left), strict=True))
        rule = table.rule(self.operator, self.target)
        return rule(Call(arguments, _restore_numbers(self.results, left), self.target)) if rule else NONE


class _Placeholder(NamedTuple):
    """Placeholder for a whole number, or for a tensor with this many dimensions and this dtype."""

    dimensions: int = -1
    dtype: torch.dtype | None = None


def _extract_numbers(value: object, numbers: list[int]) -> Any:
    if isinstance(value, torch.Tensor):
        numbers += value.shape
        numbers += value.stride()
        return _Placeholder(value.dim(), value.dtype)
    if type(value) is int:
        numbers.append(value)
        return _Placeholder()
    if isinstance(value, (list, tuple)):
        return tuple([_extract_numbers(item, numbers) for item in value])
    if isinstance(value, float):
        return "nan" if math.isnan(value) else float(value)  # one nan is not another's equal
    return value if isinstance(value, _PLAIN) else type(value).__name__


# What can be sent between processes and compared there; no rule reads anything else.
_PLAIN = (bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _restore_numbers(value: object, numbers: Iterator[int]) -> Any:
    if isinstance(value, _Placeholder):
        if value.dtype is None:
            return next(numbers)
        shape = [next(numbers) for _ in range(value.dimensions)]
        stride = [next(numbers) for _ in range(value.dimensions)]
        return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return [_restore_numbers(item, numbers) for item in value]
    return value


def line_behind(error: BaseException) -> str:
    """The innermost line of the model's own code in an error's traceback, as ``file:line``; empty if there is none."""
    for frame, lineno in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_of_the_model(str(frame.f_globals.get("__name__", ""))):
            return f"{frame.f_code.co_filename}:{lineno}"
    return ""


def call_with_overrides(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Call a function of torch, or ours in place of one that fake tensors or a simulated GPU do not support."""
    return (fake_cuda if fake_cuda.is_overridden(func, args) else fake).call(func, args, kwargs)


_RNNS = tuple(find(f"torch._VF.{name}") for name in ("gru", "lstm", "rnn_tanh", "rnn_relu"))
_WITH_LINEAR = frozenset((F.linear, F.multi_head_attention_forward, *_RNNS))
_BATCHED = 3  # dimensions: a Linear adds its bias to rows within their product


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
        elif func in _WITH_LINEAR and forward_ad._current_level < 0:  # without tangents; checked on torch 2.13
            with self.recorder.running_linear():
                out = call_with_overrides(func, args, kwargs or {})
        elif func is Tensor.item:
            return self.recorder.counters.read_out(call_with_overrides(func, args, kwargs or {}))
        else:
            out = call_with_overrides(func, args, kwargs or {})
        if type(out) is FakeTensor or type(out) is Tensor:
            self._follow(_node_of(out))
        else:
            for tensor in _tensors(out, inside=not one_rank.is_wrapped(out)):
                self._follow(_node_of(tensor))
        return out

    def _follow(self, node: Any) -> None:
        if node is not None and "memguard" not in node.metadata:
            metadata = node.metadata
            metadata["memguard"] = self.recorder.module, self.recorder.line()
            if not self.walked:
                node.register_prehook(lambda _: self.enter_node(metadata))

    def enter_node(self, metadata: dict[str, Any]) -> None:
        """Note the module and line of a node; the walk calls this before each node of a backward pass."""
        self.recorder.enter_node()
        here = metadata.get("memguard")
        if here is not None:
            self.recorder.module, self.recorder.source = here


def _node_of(tensor: Tensor) -> Any:
    """The node that made a tensor; None for a view that was written to without gradients, of which torch raises."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


_WRAPPERS = ("", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def written_path(path: str) -> str:
    """A module's path without what FSDP, activation checkpointing and torch.compile put between it and its parent."""
    return ".".join(name for name in path.split(".") if name not in _WRAPPERS)


@contextmanager
def watching(recorder: Recorder, module: nn.Module) -> Iterator[None]:
    """Record everything that happens inside, with the paths of ``module``'s children.

    The module's parameters and buffers count as allocated at the start. Hooks on all modules of the process are
    registered, and `lightning_memguard.core.simulation.backward.walking` patches torch: no other thread may use it.
    """
    paths = {id(child): written_path(name) for name, child in module.named_modules()}
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
        recorder.label(module.parameters(), "parameters")
        recorder.label(module.buffers(), "buffers")
        on_cpu = recorder.device_type == "cpu"
        if on_cpu:
            recorder.label(_unregistered(module), "buffers")
        # Under a dispatch mode the engine adds gradients out of place, without one in place: the walk does the latter.
        walked = fake_cuda.simulated_gpu() is not None or (on_cpu and fake_cuda.can_simulate_cuda())
        exits.enter_context(streams.watched(recorder.waiting))
        paths_mode = _ModulePaths(recorder, walked=walked)
        if walked:
            exits.enter_context(walking(paths_mode.enter_node))
        if recorder.compiled:
            dispatch = torch.compiler.disable(Recorder.__torch_dispatch__)
            exits.enter_context(patched(Recorder, __torch_dispatch__=dispatch))
            exits.enter_context(compiled.compiling(recorder.note_autotuning))
        else:
            exits.enter_context(compiled.noting(lambda note: recorder.assumptions.update({note: None})))
            exits.enter_context(patched(torch, get_rng_state=_watched(recorder, torch.get_rng_state)))
            exits.enter_context(one_rank.watched(recorder.note_resized, recorder.paused))
            exits.enter_context(paths_mode)
            exits.enter_context(fast_paths.taken())
        exits.enter_context(recorder)
        yield


def _unregistered(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules keep as they are: unlike buffers, they are not moved to a GPU."""
    for each in module.modules():
        yield from (value for value in vars(each).values() if isinstance(value, Tensor) and is_dense(value))


def _watched(recorder: Recorder, make: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A function that makes a tensor without an operator, as a checkpoint keeps the state of the random generator."""

    def watched() -> Tensor:
        tensor = make()
        recorder.note_made(tensor, make.__name__)
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
    leaves = [tree_leaves(dict(optimizer.state)) for optimizer in optimizers]
    return [leaf for group in leaves for leaf in group if isinstance(leaf, Tensor)]


def part_bytes(parts: Mapping[str, Iterable[Tensor]], device_type: str) -> dict[str, int]:
    """Bytes of the storages behind these tensors, each storage counted once, on one type of device."""
    seen: set[int] = set()
    totals: dict[str, int] = {}
    for part, tensors in parts.items():
        totals[part] = 0
        for tensor in _tensors([*tensors]):
            if tensor.device.type == device_type and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
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
