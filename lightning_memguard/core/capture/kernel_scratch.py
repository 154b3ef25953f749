"""Scratch that kernels take inside the operators of a step, by the rules for the CPU or the GPU that it runs on.

A CPU operator without a rule, of a C++ library or one of torch's own that factorizes matrices, is run once, on zeros.
Whatever it does (crash, hang, fail) ends with its process, which is a child of a child: never does it run in the
training's own.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.capture.storages import Storages, plain_tensors
from lightning_memguard.core.foreign import aten as _aten
from lightning_memguard.core.isolation.pool import in_child
from lightning_memguard.core.kernels import table
from lightning_memguard.core.kernels.arguments import Call
from lightning_memguard.core.kernels.attention import SEEDS_ON_DEVICE
from lightning_memguard.core.kernels.rnn import dropout_state_bytes
from lightning_memguard.core.kernels.templates import kernel_of
from lightning_memguard.core.simulation import mkldnn_lstm, sdpa
from lightning_memguard.core.simulation.backward import graph_task
from lightning_memguard.core.simulation.fake import training_threads
from lightning_memguard.core.simulation.faking import by_name
from lightning_memguard.core.torch_port import FakeTensor, OpOverload, no_dispatch, tree_leaves, tree_map_only
from lightning_memguard.core.trace.scratch import NONE, CpuTarget, CudaTarget, Scratch
from lightning_memguard.core.trace.trace import Kernel, ScratchSpan, moments_of, scratch_events

_DROPOUT = _aten.native_dropout.default
# The order in which results are allocated, if it is not theirs: on CUDA, and of dropout's mask everywhere.
_ALLOCATED = {
    _DROPOUT: (1, 0),
    _aten._embedding_bag.default: (2, 1, 0, 3),
    _aten._embedding_bag_forward_only.default: (2, 1, 0, 3),
    _aten._thnn_fused_lstm_cell.default: (2, 0, 1),
    _aten._thnn_fused_gru_cell.default: (1, 0),
}
if SEEDS_ON_DEVICE:
    _ALLOCATED[_aten._scaled_dot_product_efficient_attention.default] = (2, 3, 0, 1)
_EXCHANGES = ("_allgather_base_", "_reduce_scatter_base_")  # of a rank's part with all parts
_TIMED = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution", "_convolution_pointwise", "_mkl_linear"))

_PADDED = {torch.float16: (8, 64), torch.bfloat16: (8, 64), torch.float32: (4, 4)}  # the least of any GPU in gpus.csv


def this_cpu(threads: int) -> CpuTarget:
    """Return the properties of this machine's CPU that scratch depends on."""
    channel_block = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8  # oneDNN's
    asked = [getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", None) for kind in ("bf16", "fp16")]
    asked += [getattr(torch.cpu, f"_is_amx_{kind}_supported", None) for kind in ("tile", "fp16")]  # torch 2.11 to 2.13
    return CpuTarget(threads, channel_block, *(ask is not None and bool(ask()) for ask in asked))


class KernelScratch:
    """Records the results of operators, with what their kernels take next to them.

    Args:
        storages: where they are recorded.
        target: the GPU whose kernels' scratch is counted; None for this machine's CPU, if the step runs on it.
    """

    def __init__(self, storages: Storages, target: CudaTarget | None) -> None:
        self._storages = storages
        self.target: CpuTarget | CudaTarget | None = target
        if storages.device_type == "cpu" and target is None:
            self.target = this_cpu(training_threads())
        self.kernels: list[Kernel] = []
        self.spans: list[ScratchSpan] = []
        self._blocks = 0  # numbered below zero: how many there are may change with the batch size
        self._cublas: set[tuple[bool, int]] = set()  # if a handle is open: in the backward pass or not, on a stream
        self._cublas_lt: set[tuple[bool, int]] = set()  # likewise
        self._has_dropout_state = False  # of cuDNN's RNNs, one for the process
        self.is_autotuned = False
        self.largest_product = 0
        self.may_pad = False  # torch.compile pads matrices by their speed
        self.padded = 0
        self.inside = 0  # the operator that is noted next, where it was asked

    def begin_phase(self) -> None:
        """Read the flags that a model's hooks may have set."""
        cudnn: Any = torch.backends.cudnn
        if isinstance(self.target, CudaTarget):
            self.target = replace(
                self.target,
                deterministic=torch.are_deterministic_algorithms_enabled() or cudnn.deterministic,
                tf32=cudnn.conv.fp32_precision == "tf32",  # ``allow_tf32`` raises if convolutions and RNNs differ
                benchmark=cudnn.benchmark,
                cudnn=sdpa.cudnn_version(),
            )

    def note(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        """Record what an operator allocated: scratch, results, and scratch next to the results."""
        storages, (name, namespace, short) = self._storages, _names(func)
        results = [out] if type(out) is FakeTensor or type(out) is Tensor else list(plain_tensors(out))
        self._note_compiled(short, args, results)
        elsewhere = bool(results) and results[0].device.type != storages.device_type
        if namespace == "c10d" and short in _EXCHANGES:
            storages.label([max(plain_tensors(list(args[:2])), key=torch.Tensor.numel)], "communication")
        rule = table.rule(short, self.target) if namespace in ("aten", "fsdp") and not elsewhere else None
        scratch = NONE
        if short == "_cudnn_rnn" and isinstance(self.target, CudaTarget):
            self._open_dropout(name, by_name(func, args, kwargs), self.target)
        if rule and self.target:
            call = Call(by_name(func, args, kwargs), results or list(plain_tensors(kwargs.get("out"))), self.target)
            scratch = rule(call)
            if scratch is NONE and short in table.BY_TYPES:
                rule = None  # very frequent
            else:
                self.kernels.append(kernel_of(name, call))
                self._scratch(scratch, -1, name)
        # a real storage has its true size
        kept = scratch.kept if results and isinstance(results[0], FakeTensor) else 0
        order = _ALLOCATED.get(func, ()) if func is _DROPOUT or storages.device_type == "cuda" else ()
        for place in order if len(order) == len(results) else range(len(results)):
            storages.watch(results[place], name, kept)
            kept = 0
            if rule:
                self._scratch(scratch, place, name)
        if isinstance(self.target, CudaTarget) and table.takes_cublas(name):
            self._open_cublas(name, self.target, uses_lt=table.takes_cublas_lt(name, args, kwargs))
        if rule:
            self._scratch(scratch, None, name)
        inside, self.inside = self.inside or mkldnn_lstm.scratch_bytes(func, args, kwargs), 0
        if _is_asked(func) and isinstance(self.target, CpuTarget):
            inside = asked_bytes(func, args, kwargs) or 0
        if inside:  # it grows with the batch size as the results do
            storages.add_row("free", storages.take(inside, name, "workspaces"), name)

    def _note_compiled(self, short: str, args: tuple[Any, ...], results: Sequence[Tensor]) -> None:
        """Keep what torch.compile's choices depend on."""
        if self.is_autotuned and results and short in _TIMED:
            self.largest_product = max(self.largest_product, results[0].numel() * results[0].element_size())
        if self.may_pad and results and short in ("mm", "addmm", "bmm"):
            self._note_padded(args, results[0])

    def _note_padded(self, args: tuple[Any, ...], out: Tensor) -> None:
        """`can_pad` and `is_mm_compute_bound` in torch/_inductor/fx_passes/pad_mm.py: copies of all three matrices."""
        first, second = args[-2:]
        rows, inner, columns = sizes = (*first.shape[-2:], second.shape[-1])
        multiple, least_work = _PADDED.get(out.dtype, (1, 0))
        work = rows * inner * columns / (rows * inner + inner * columns + rows * columns or 1)  # for each number
        if work > least_work and any(size % multiple for size in sizes if size != 1):
            self.padded = max(self.padded, sum(each.numel() * each.element_size() for each in (first, second, out)))

    def _open_cublas(self, operator: str, kernel_target: CudaTarget, *, uses_lt: bool) -> None:
        """Forward and backward pass run in different threads; each has a cuBLAS handle, and a workspace, a stream."""
        capability, storages = kernel_target.compute_capability, self._storages
        own, lt = table.cublas_workspace_bytes(capability, os.environ), table.cublas_lt(capability, os.environ)
        if not table.keeps_workspaces():
            storages.take_for_a_moment(lt.nbytes if uses_lt else own, "workspaces")
            return
        handle = graph_task() != -1, storages.stream
        if handle not in self._cublas:
            self._cublas.add(handle)
            if own:
                storages.take(own, operator, "workspaces")
        if uses_lt and handle not in self._cublas_lt:
            self._cublas_lt.add(handle)
            if lt.is_sure and lt.nbytes:
                storages.take(lt.nbytes, operator, "workspaces")
            else:
                storages.expect(lt.nbytes, "workspaces", at_most=True)

    def _open_dropout(self, operator: str, given: Mapping[str, Any], kernel_target: CudaTarget) -> None:
        """`get_dropout_state` (aten/src/ATen/native/cudnn/RNN.cpp): made by the first layers that need it, and kept."""
        if given["dropout"] and given["train"] and not self._has_dropout_state:
            self._has_dropout_state = True
            self._storages.take(dropout_state_bytes(kernel_target), operator, "workspaces")

    def _scratch(self, scratch: Scratch, place: int | None, operator: str) -> None:
        """Allocate blocks that live inside the operator that ran last, and free them."""
        like, start = self._storages.like(operator), len(self._storages.rows)
        events = scratch_events(moments_of(scratch, place), -1 - self._blocks, like)
        self._blocks += len(events) // 2
        self._storages.rows += events
        self.spans.append(ScratchSpan(start, len(self._storages.rows), len(self.kernels) - 1, place, like))


@functools.cache
def _names(func: OpOverload) -> tuple[str, str, str]:
    """An operator's full name, its namespace, and its name in that."""
    name = str(func)
    namespace, short, *_ = name.split(".")
    return name, namespace, short


# -- operators without a rule, which are asked

_MOST_SECONDS = 5
_MOST_BYTES = 256 << 20  # that an operator reads
_known: dict[str, int | None] = {}


def _is_asked(func: OpOverload) -> bool:
    """Whether an operator of torch's own is asked: one that factorizes, and has no rule."""
    short = func.overloadpacket.__name__
    return func.namespace == "aten" and short.lstrip("_").startswith("linalg_") and short not in table.CPU


def asked_bytes(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the most bytes that an operator holds next to its results; None if that is unknown."""
    read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in read)
    if not in_child() or nbytes > _MOST_BYTES or any(tensor.device.type != "cpu" for tensor in read):
        return None
    key = f"{func} {tree_map_only(Tensor, lambda x: (x.shape, x.stride(), x.dtype), (args, kwargs))}"
    if key not in _known:
        _known[key] = _asked(func, args, kwargs)
    return _known[key]


def _asked(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.alarm(_MOST_SECONDS)
            os.write(writer, str(_measured(func, args, kwargs)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        answer = answers.read()  # ends with the process
    os.waitpid(child, 0)
    return int(answer) if answer else None


def _measured(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Run an operator under torch's profiler, which sees each block."""
    with no_dispatch(), port.below_autograd():
        args, kwargs = tree_map_only(
            Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_(), (args, kwargs)
        )
        port.count_blocks()
        results = func(*args, **kwargs)
        blocks = port.counted_blocks()
        del results
    return max(0, *accumulate(blocks)) - sum(blocks)
