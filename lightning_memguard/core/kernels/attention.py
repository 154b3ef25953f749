"""Scaled dot product attention on a CUDA to pretend with: which kernel a GPU takes, the call of it, and its scratch.

The reason to change is PyTorch's choice among its attention kernels, and what those kernels allocate. Without a GPU
torch falls back to plain matrix products, whose memory grows with the square of the sequence's length; a GPU as a rule
takes another kernel. Each rule names the function it was read from; paths are below aten/src/ATen/native/transformers
unless they say otherwise. Read for torch 2.9 to 2.13; the operators' fake kernels were run on 2.11 and 2.13.

Nested tensors never come here: they have a `scaled_dot_product_attention` of their own.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memguard.core.trace.scratch import FLOAT, NONE, Block, ByteRange, CudaTarget, Moment, Scratch, nbytes, up
from lightning_memguard.errors import CannotTraceError

Rule = Callable[[Sequence[Any], Mapping[str, Any], Sequence[Any], CudaTarget], Scratch]

_aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_NEWEST = (12, 1)  # `check_sm_version` in cuda/sdp_utils.cpp: no fused kernel takes a newer GPU


# -- the choice

_MAJOR, _MINOR = torch.__version__.split(".")[:2]
_TORCH = int(_MAJOR), int(_MINOR)

_BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # `at::SDPBackend` in aten/src/ATen/SDPBackend.h
_DEFAULT_ORDER = ["flash", "efficient", "math", "cudnn"]
_CUDNN_FIRST = ["cudnn", "flash", "efficient", "math"]

# What the wheels on PyPI require for Linux: `nvidia-cudnn-cu12` up to 2.10, `nvidia-cudnn-cu13` from 2.11 on.
_CUDNN_OF_WHEELS = {(2, 9): 91_002, (2, 10): 91_002, (2, 11): 91_900, (2, 12): 92_000, (2, 13): 92_000}


@functools.cache
def cudnn_version() -> int:
    """The cuDNN a training here would run with: this build's own, else that of torch's wheels of the same version."""
    return torch.backends.cudnn.version() or _CUDNN_OF_WHEELS.get(_TORCH, max(_CUDNN_OF_WHEELS.values()))


@dataclass(frozen=True)
class _Call:
    """What the choice depends on: `sdp_params` in sdp_utils_cpp.h, the GPU and its cuDNN."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    capability: tuple[int, int]
    cudnn: int

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        """`input_requires_grad`."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)

    @property
    def lengths(self) -> tuple[int, int]:
        return self.query.shape[-2], self.key.shape[-2]

    def is_dense_4d(self) -> bool:
        """`check_tensor_shapes` and `check_nonzero_sequence_lengths_dense`."""
        return all(tensor.dim() == 4 for tensor in self.inputs) and all(self.lengths)

    def has_dtype(self, *allowed: torch.dtype) -> bool:
        """`check_tensor_dtype`."""
        return self.query.dtype in allowed and self.query.dtype == self.key.dtype == self.value.dtype

    def has_unit_strides(self, *, ignore_single: bool) -> bool:
        """`check_last_dim_stride_equals_1_dense`."""
        unit = all(tensor.stride(-1) == 1 for tensor in self.inputs)
        unit = unit or (ignore_single and self.query.shape[-1] == 1)
        return unit and (self.mask is None or self.mask.stride(-1) == 1)

    def has_heads(self, *, grouped: bool, same_heads: bool = True) -> bool:
        """`check_batch_size_and_num_heads_dense` and `check_grouped_query_attention`."""
        if len({tensor.shape[0] for tensor in self.inputs}) > 1:
            return False
        heads, of_key, of_value = (tensor.shape[-3] for tensor in self.inputs)
        if self.enable_gqa and grouped:
            return heads % of_key == 0 and (of_key == of_value if same_heads else heads % of_value == 0)
        return heads == of_key == of_value


def choose(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    *,
    gpu: CudaTarget,
    cudnn: int | None = None,
) -> str:
    """Tell which kernel a GPU takes: ``"flash"``, ``"efficient"``, ``"cudnn"`` or ``"math"``.

    `select_sdp_backend` in cuda/sdp_utils.cpp, with the backends that are enabled now and their order of now.

    Args:
        query: as of `torch.nn.functional.scaled_dot_product_attention`, like the next six; only shapes, strides and
            dtypes are looked at.
        key: as above.
        value: as above.
        attn_mask: as above.
        dropout_p: as above.
        is_causal: as above.
        enable_gqa: as above.
        gpu: the GPU.
        cudnn: its version of cuDNN, such as ``91900``; that of this build or its wheels if left out.

    Raises:
        CannotTraceError: no backend that is enabled takes these tensors, in a real run no more than here.
    """
    cudnn = cudnn_version() if cudnn is None else cudnn
    return _choose(_Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, gpu.compute_capability, cudnn))


def _choose(call: _Call) -> str:
    for name in _order(call.capability, call.cudnn):
        if _ENABLED[name]() and _TAKES[name](call):
            return name
    major, minor = call.capability
    raise CannotTraceError(
        f"No attention backend that is enabled takes a query of shape {tuple(call.query.shape)} and dtype "
        f"{call.query.dtype} on compute capability {major}.{minor}: `scaled_dot_product_attention` would fail there, "
        "too. Enable another one (`torch.nn.attention.sdpa_kernel`)."
    )


def _order(capability: tuple[int, int], cudnn: int) -> list[str]:
    """`priority_order`: what the user set (`sdpa_kernel(..., set_priority=True)`), else the GPU's default.

    The default is set once in a process, for the GPU that is there. On Hopper that looks as if a user had put cuDNN
    first, who as a rule forbids others in the same breath.
    """
    ids = torch._C._get_sdp_priority_order()
    order = [_BACKENDS[i] for i in ids if i in _BACKENDS]
    if order == _DEFAULT_ORDER or (order == _CUDNN_FIRST and all(enabled() for enabled in _ENABLED.values())):
        return _CUDNN_FIRST if _prefers_cudnn(capability, cudnn) else _DEFAULT_ORDER
    return order


_ENABLED: dict[str, Callable[[], bool]] = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}


def _prefers_cudnn(capability: tuple[int, int], cudnn: int) -> bool:
    """`check_prefer_cudnn_attention`: on by default in 2.9; from 2.10 on only with a cuDNN that 2.11's wheels bring."""
    if _TORCH < (2, 10):
        asked = os.environ.get("TORCH_CUDNN_SDPA_PREFERRED") != "0"
        return asked and cudnn >= 90_900 and capability in ((9, 0), (10, 0))
    asked = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    return asked and cudnn > 91_500 and capability[0] in (9, 10) and capability[1] in (0, 3)


def _takes_flash(call: _Call) -> bool:
    """`can_use_flash_attention`."""
    width = call.query.shape[-1]
    return (
        call.mask is None
        and call.is_dense_4d()
        and width == call.key.shape[-1] == call.value.shape[-1]
        and width <= 256
        and (8, 0) <= call.capability <= _NEWEST
        and _flash_has_backward(call)
        and not (call.is_causal and call.lengths[0] != call.lengths[1])
        and call.has_dtype(*_HALF)
        and call.has_heads(grouped=True)
        and call.has_unit_strides(ignore_single=True)
    )


def _flash_has_backward(call: _Call) -> bool:
    """`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`."""
    width, capability = call.query.shape[-1], call.capability
    if not call.trains or not ((8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)):
        return True
    return width <= 192 or (width > 224 and call.dropout_p == 0)


def _takes_efficient(call: _Call) -> bool:
    """`can_use_mem_efficient_attention`. Grouped queries came with 2.14."""
    if not call.is_dense_4d():
        return False
    dtypes = (torch.float16, torch.float32) if call.capability < (8, 0) else (*_HALF, torch.float32)
    alignment = _gemm_alignment(call.query.dtype, call.capability)
    widths = call.query.shape[-1], call.key.shape[-1], call.value.shape[-1]
    return (
        (5, 0) <= call.capability <= _NEWEST
        and widths[0] == widths[1]
        and all(width > 0 and width % alignment == 0 for width in widths)
        and _is_aligned(call, alignment)
        and call.has_unit_strides(ignore_single=False)
        and call.has_heads(grouped=False)
        and call.has_dtype(*dtypes)
    )


def _gemm_alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """`minimum_gemm_alignment`, in elements."""
    bits = 16 if dtype in _HALF else 32
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and bits == 16)
    return 128 // bits if tensor_cores else 1


def _is_aligned(call: _Call, alignment: int) -> bool:
    """`check_data_ptr_alignment_mem_efficient`, of pull request 184258: merged in May 2026, so in 2.13."""
    if _TORCH < (2, 13) or call.capability < (8, 0):
        return True
    return all(tensor.storage_offset() % alignment == 0 for tensor in call.inputs)


def _takes_cudnn(call: _Call) -> bool:
    """`can_use_cudnn_attention`."""
    return (
        not _is_strictly_deterministic()
        and call.cudnn >= 90_000
        and call.is_dense_4d()
        and (8, 0) <= call.capability <= _NEWEST
        and call.has_dtype(*_HALF)
        and _cudnn_takes_mask(call)
        and _cudnn_takes_dropout(call)
        and _cudnn_takes_widths(call)
        and call.lengths[1] != 1
        and call.has_unit_strides(ignore_single=True)
        and call.has_heads(grouped=True, same_heads=False)
    )


def _is_strictly_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _cudnn_takes_mask(call: _Call) -> bool:
    """`check_attn_mask_shape`."""
    mask = call.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    full = (*call.query.shape[:2], *call.lengths)[-mask.dim() :]
    return all(size in (1, whole) for size, whole in zip(mask.shape, full, strict=True))


def _cudnn_takes_dropout(call: _Call) -> bool:
    """The head of `can_use_cudnn_attention`, `check_cudnn_dropout` (from 2.12 on) and `check_cudnn_tensor_shapes`."""
    if call.dropout_p == 0:
        return True
    coarse = _TORCH >= (2, 12) and not (call.dropout_p * 16).is_integer()
    return not (91_100 < call.cudnn < 91_400 or coarse or call.lengths[0] == 1)


def _cudnn_takes_widths(call: _Call) -> bool:
    """`check_cudnn_tensor_shapes`; 192 beside 128 on Blackwell is of pull request 172621, in 2.11."""
    widths = call.query.shape[-1], call.value.shape[-1]
    limit = 128
    if call.capability == (9, 0) and call.cudnn >= 91_000:
        limit = 256
    elif call.capability[0] == 10 and call.cudnn >= 91_100 and widths == (192, 128) and _TORCH >= (2, 11):
        limit = 192
    return all(width <= limit and width % 8 == 0 for width in widths)


_TAKES: dict[str, Callable[[_Call], bool]] = {
    "flash": _takes_flash,
    "efficient": _takes_efficient,
    "cudnn": _takes_cudnn,
    "math": lambda _: True,
}


# -- the call


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    gpu: CudaTarget,
) -> torch.Tensor:
    """Attention by the kernel that a GPU takes, so that autograd keeps what it would keep there.

    Stands in for `torch.nn.functional.scaled_dot_product_attention`; what it does before and after the kernel is
    `scaled_dot_product_attention` in attention.cpp, and the casts of autocast.

    Args:
        query: as of `torch.nn.functional.scaled_dot_product_attention`, like the next seven: fake ``cuda`` tensors.
        key: as above.
        value: as above.
        attn_mask: as above.
        dropout_p: as above.
        is_causal: as above.
        scale: as above.
        enable_gqa: as above.
        gpu: the GPU.

    Returns:
        What that function would return.
    """
    casting = torch.is_autocast_enabled("cuda")
    if casting:
        query, key, value = _autocast(query), _autocast(key), _autocast(value)
        attn_mask = None if attn_mask is None else _autocast(attn_mask)
    call = _Call(
        query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, gpu.compute_capability, cudnn_version()
    )
    with torch.autocast("cuda", enabled=False) if casting else nullcontext():
        return _CALLS[_choose(call)](call, scale)


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """`cached_cast` in aten/src/ATen/autocast_mode.cpp: this function is on its list for lower precision."""
    if not tensor.is_floating_point() or tensor.dtype == torch.float64 or not tensor.is_cuda:
        return tensor
    return tensor.to(torch.get_autocast_dtype("cuda"))


def _run(operator: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The first result; the others are autograd's."""
    return getattr(_aten, operator)(*args, **kwargs)[0]  # type: ignore[no-any-return]


def _flash(call: _Call, scale: float | None) -> torch.Tensor:
    """Heads are padded to a multiple of eight (`pad_last_dim`), and cut back after (`post_process_flash_output`)."""
    width = call.query.shape[-1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    padded = [_aten.pad(tensor, [0, -width % 8]) if width % 8 else tensor for tensor in call.inputs]
    out = _run("_scaled_dot_product_flash_attention", *padded, call.dropout_p, call.is_causal, False, scale=scale)
    return _aten.slice(out, -1, 0, width) if width % 8 else out


def _efficient(call: _Call, scale: float | None) -> torch.Tensor:
    bias = _additive(call)
    if bias is not None:
        bias = _aligned_bias(bias).expand(*call.query.shape[:3], call.key.shape[2])
    with _SeedsOnHost():  # type: ignore[no-untyped-call]
        return _run(_EFFICIENT, *call.inputs, bias, call.trains, call.dropout_p, call.is_causal, scale=scale)


def _aligned_bias(mask: torch.Tensor) -> torch.Tensor:
    """`preprocess_mask`: rows of the mask start at multiples of eight elements, or it is padded and cut."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    width = mask.shape[-1]
    return _aten.slice(_aten.pad(mask, [0, 8 - width % 8]), -1, 0, width)  # type: ignore[no-any-return]


_EFFICIENT = "_scaled_dot_product_efficient_attention"


class _SeedsOnHost(TorchDispatchMode):
    """Gives the efficient kernel's random seed and offset where it has them: on the host, unless a graph is captured.

    Note [Seed and Offset Device] in cuda/attention.cu; torch's fake kernel puts them on the GPU.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not getattr(_aten, _EFFICIENT).default:
            return out
        return *out[:2], *(torch.empty((), dtype=torch.long, device="cpu") for _ in out[2:])


def _cudnn(call: _Call, scale: float | None) -> torch.Tensor:
    bias = _additive(call, hidden=-65504.0, device="cpu")
    options = (bias, call.trains, call.dropout_p, call.is_causal, False)
    return _run("_scaled_dot_product_cudnn_attention", *call.inputs, *options, scale=scale)


def _math(call: _Call, scale: float | None) -> torch.Tensor:
    """Torch's own, in plain operators.

    One differs while somebody watches: the mask is added to a new tensor, not in place
    (`areAnyTensorSubclassLike` in attention.cpp). The peak, in the softmax that follows, is the same.
    """
    options = (_additive(call), call.dropout_p, call.is_causal, None)
    return _run("_scaled_dot_product_attention_math", *call.inputs, *options, scale=scale, enable_gqa=call.enable_gqa)


def _additive(call: _Call, hidden: float = -math.inf, device: str | None = None) -> torch.Tensor | None:
    """`convert_boolean_attn_mask`, and `convert_boolean_attn_mask_cudnn` with its finite number from the host."""
    mask = call.mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    number = torch.scalar_tensor(hidden, dtype=call.query.dtype, device=device or mask.device)
    return _aten.where.ScalarSelf(mask, 0.0, number)  # type: ignore[no-any-return]


_CALLS: dict[str, Callable[[_Call, float | None], torch.Tensor]] = {
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
    "math": _math,
}


# -- scratch: what the operators have in common


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    """An argument that has a default; torch leaves it out where it has that value."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def _rows_first_copy(tensor: Any) -> int:
    """Bytes of the copy that brings ``(batch, heads, rows, width)`` into the order of batch, rows, heads, width."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else nbytes(tensor)


def _after(*moments: tuple[Block, ...]) -> Scratch:
    alive: tuple[Moment, ...] = tuple(tuple(block for block in moment if block) for moment in moments)
    return Scratch(after=tuple(moment for moment in alive if moment))


# -- scratch: flash


def _flash_width(width: int) -> int:
    """`head_size_rounded` in cuda/flash_attn/flash_api.cpp."""
    return up(width, 32 if width <= 128 else 64)


def _flash_forward(args: Sequence[Any], kwargs: Mapping[str, Any], _: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`mha_fwd` and `set_params_splitkv` (cuda/flash_attn/flash_api.cpp): results of each part of the keys.

    Keys are split where there are too few blocks of 64 queries to fill the GPU.
    """
    query, key = args[:2]
    if not query.numel() or _argument(args, kwargs, 3, "dropout_p", 0.0):
        return NONE
    batch, heads, rows, width = query.shape
    columns = 256 if width <= 64 else 128 if width <= 128 else 64
    blocks = batch * heads * -(-rows // 64)
    splits = _flash_splits(blocks, 2 * gpu.multiprocessors, -(-key.shape[2] // columns))
    if splits == 1:
        return NONE
    sums = splits * batch * heads * rows * FLOAT
    return _after((sums, sums * _flash_width(width)))


def _flash_splits(blocks: int, slots: int, key_blocks: int) -> int:
    """`num_splits_heuristic` (cuda/flash_attn/flash_api.cpp): the fewest splits within 85% of the best occupancy."""
    if blocks >= 0.8 * slots:
        return 1
    efficiency: dict[int, float] = {}
    for splits in range(1, min(128, slots, key_blocks) + 1):
        if splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1)):
            waves = blocks * splits / slots
            efficiency[splits] = waves / math.ceil(waves)
    best = max(efficiency.values())
    return next(splits for splits, value in efficiency.items() if value >= 0.85 * best)


def _flash_backward(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`_flash_attention_backward` (cuda/attention_backward.cu) and `mha_bwd` (cuda/flash_attn/flash_api.cpp).

    Copies of what is not in the kernel's order, row sums, the query's gradient in float32 (once for each wave of blocks
    if it must be deterministic), and where heads share a key its gradients for every head.
    """
    grad, query, key, _value, out = args[:5]
    copies = _rows_first_copy(grad), _rows_first_copy(out)
    batch, heads, rows, width = query.shape
    if not batch:
        return NONE
    rows = up(rows, 128)
    sums = batch * heads * rows * FLOAT
    waves = -(-gpu.multiprocessors // (batch * heads)) if _is_strictly_deterministic() else 1
    accumulated = waves * sums * _flash_width(width)
    expanded = batch * heads * key.shape[2] * width * query.element_size() if key.shape[1] != heads else 0
    return _after((*copies, sums, accumulated, expanded, expanded))


# -- scratch: memory-efficient


def _efficient_forward(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`_efficient_attention_forward` (cuda/attention.cu): the result in float32, unless registers hold it.

    `kNeedsOutputAccumulatorBuffer` in cuda/mem_eff_attention/kernel_forward.h: they hold heads of up to 128.
    """
    query, _key, value = args[:3]
    if query.dtype not in _HALF or max(query.shape[-1], value.shape[-1]) <= 128:
        return NONE
    return _after((math.prod(query.shape[:3]) * value.shape[-1] * FLOAT,))


@dataclass(frozen=True)
class _Tile:
    """One kernel of the backward pass: `AttentionBackwardKernel` in cuda/mem_eff_attention/kernel_backward.h."""

    rows: int
    columns: int
    in_registers: bool  # whether the key's and the value's gradients are summed up there


def _tile(half: bool, width: int, dropout: bool, capability: tuple[int, int]) -> _Tile:
    """The first kernel of cuda/mem_eff_attention/kernels/cutlassB.h that takes these heads and fits shared memory.

    The list is made by `generate_kernels.py` beside it. What shared memory the large tiles need was not computed, but
    taken from the comments there: they fit the data center's GPUs, not 7.5, 8.6 and 8.9; 12.0 has no more than those.
    """
    little_memory = capability in ((7, 5), (8, 6), (8, 9)) or capability >= (12, 0)
    if not half:
        return _Tile(128 if capability >= (8, 0) and width > 64 and not little_memory else 64, 64, in_registers=False)
    if width <= 64 or capability < (7, 0):
        return _Tile(64, 64, in_registers=width <= 64)
    if width <= 96 and not dropout and capability in ((8, 6), (8, 9)):
        return _Tile(128, 64, in_registers=True)
    if width <= 128 and little_memory:
        return _Tile(64, 64, in_registers=False)
    return _Tile(128, 128 if width <= 128 and capability >= (8, 0) else 64, in_registers=width <= 128)


def _efficient_backward(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`_efficient_attention_backward` (cuda/attention_backward.cu): a copy, row sums (delta), and a workspace.

    Row sums are made by the kernel, or before it by plain operators with their temporaries, which are gone before the
    workspace comes. Gradients of the query, the key, the value and the mask are allocated before all of it.
    """
    grad, query, key, value = args[:4]
    capability = gpu.compute_capability
    half = query.dtype in _HALF
    tile = _tile(half, max(query.shape[-1], value.shape[-1]), bool(args[9]), capability)
    copy = _rows_first_copy(grad)
    sums = math.prod(query.shape[:3]) * FLOAT
    workspace = _efficient_workspace(query, key, value, tile, capability)
    if half and (tile.in_registers or not (7, 0) <= capability < (7, 5)):  # `kKernelComputesDelta`
        return _after((copy, sums, workspace))
    product = sums * value.shape[-1]
    casts = (product, product) if half else ()
    return _after((copy, *casts, product, sums, sums), (copy, sums, workspace))


def _efficient_workspace(query: Any, key: Any, value: Any, tile: _Tile, capability: tuple[int, int]) -> int:
    """`Params::workspace_size` in cuda/mem_eff_attention/kernel_backward.h, in bytes."""
    batch, heads, rows, width = query.shape
    half = query.dtype in _HALF
    elements = 0
    if half or capability >= (7, 0):  # `kNeedsAccumGradQ`
        header = 16  # `GradQTempStorage` begins with a lock and a counter
        tiles = -(-rows // tile.rows) * -(-width // tile.columns)
        elements += tiles * (header // FLOAT + tile.rows * tile.columns)
    if half and not tile.in_registers:  # `kNeedsAccumGradK` and `...V`
        splits = _efficient_splits(batch * heads, key.shape[2], tile.columns, capability)
        elements += splits * tile.columns * (up(width, tile.rows) + up(value.shape[-1], tile.rows))
    return int(batch * heads * up(elements, 4) * FLOAT)


def _efficient_splits(pairs: int, columns: int, block: int, capability: tuple[int, int]) -> int:
    """Parts the keys are worked in where each needs a place of its own (cuda/attention_backward.cu)."""
    if capability < (7, 0) or _is_strictly_deterministic() or (pairs >= 256 and columns <= 2 * block):
        return 1
    return max(1, min(-(-columns // block), 200 // pairs))


# -- scratch: cuDNN


def _cudnn_forward(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`run_cudnn_SDP_fprop` (aten/src/ATen/native/cudnn/MHA.cpp) asks the plan for its workspace.

    Nobody outside of cuDNN knows it. A fused kernel needs none; at most it keeps its result in float32 once.
    """
    query, _key, value = args[:3]
    return _after((ByteRange(0, 0, math.prod(query.shape[:3]) * value.shape[-1] * FLOAT),))


def _cudnn_backward(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`run_cudnn_SDP_bprop` (aten/src/ATen/native/cudnn/MHA.cpp) asks the plan for its workspace.

    What is known of it comes from `CompositeSDPABackwardNode` in cudnn-frontend: row sums in float32, the query's
    gradient in float32, and where heads share a key its gradients for every head. At most those are in float32, too.
    """
    grad, query, key, value = args[:4]
    batch, heads, rows, width = query.shape
    sums = batch * heads * rows * FLOAT
    for_every_head = batch * heads * key.shape[2] * (width + value.shape[-1])
    point = sums + sums * width
    if not heads == key.shape[1] == value.shape[1]:
        point += for_every_head * query.element_size()
    copy = 0 if grad.stride(-1) == 1 else nbytes(grad)
    return _after((copy, ByteRange(sums, point, sums + sums * width + for_every_head * FLOAT)))


# -- scratch: plain operators


def _safe_softmax(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], __: CudaTarget) -> Scratch:
    """`_safe_softmax` (attention.cpp): the softmax, which places are minus infinity, which rows are; two numbers."""
    x, result = args[0], results[0]
    number = result.element_size()
    return _after((nbytes(result), number, x.numel(), x.numel() // max(1, x.shape[args[1]]), number))


RULES: dict[str, Rule] = {
    "_safe_softmax": _safe_softmax,
    "_scaled_dot_product_cudnn_attention": _cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_scaled_dot_product_efficient_attention": _efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention": _flash_forward,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
}
