"""Scratch of scaled dot product attention on CUDA, kernel by kernel, and of its softmax on either device.

`lightning_memguard.core.simulation.sdpa` chooses among the kernels. Paths are below aten/src/ATen/native/transformers
unless they say otherwise. Read for torch 2.9 to 2.13.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.kernels.arguments import Call, CudaCall, Rules, after, dimensions
from lightning_memguard.core.kernels.cuda_reductions import reduction
from lightning_memguard.core.kernels.layout import LONG, TensorLayout, copy_bytes, is_half
from lightning_memguard.core.range import Range
from lightning_memguard.core.trace.scratch import (
    FLOAT,
    NONE,
    CpuTarget,
    CudaTarget,
    Scratch,
    Tensor,
    nbytes,
    up,
)

RULES = Rules[CudaTarget]()
EITHER = Rules[CpuTarget | CudaTarget]()

SEEDS_ON_DEVICE = port.VERSION >= (2, 14)
"""Whether the efficient kernel's random seed and offset are on the GPU outside CUDA graphs if there is no dropout (seen
in 2.14 and 2.15; else they are on the host, see Note [Seed and Offset Device] in cuda/attention.cu)."""


def is_strictly_deterministic() -> bool:
    """Whether operators that are not deterministic raise an error."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


# -- flash


def _flash_width(width: int) -> int:
    """`head_size_rounded` in cuda/flash_attn/flash_api.cpp."""
    return up(width, 32 if width <= 128 else 64)


@RULES.of("_scaled_dot_product_flash_attention")
def _flash_forward(call: CudaCall) -> Scratch:
    """`mha_fwd` and `set_params_splitkv` (cuda/flash_attn/flash_api.cpp): results of each part of the keys.

    Keys are split if there are too few blocks of 64 queries to fill the GPU.
    """
    query, key = call["query"], call["key"]
    if not query.numel():
        return NONE
    if call["dropout_p"]:
        return after((2 * LONG,))  # the state of the random generator
    batch, heads, rows, width = query.shape
    columns = 256 if width <= 64 else 128 if width <= 128 else 64
    blocks = batch * heads * -(-rows // 64)
    splits = _flash_splits(blocks, 2 * call.target.multiprocessors, -(-key.shape[2] // columns))
    if splits == 1:
        return NONE
    sums = splits * batch * heads * rows * FLOAT
    return after((sums, sums * _flash_width(width)))


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


@RULES.of("_scaled_dot_product_flash_attention_backward")
def _flash_backward(call: CudaCall) -> Scratch:
    """`_flash_attention_backward` (cuda/attention_backward.cu) and `mha_bwd` (cuda/flash_attn/flash_api.cpp).

    Copies of what is not in the kernel's order, row sums, the query's gradient in float32 (once for each wave of blocks
    if it must be deterministic), and if heads share a key its gradients for every head.
    """
    query, key = call["query"], call["key"]
    batch, heads, rows, width = query.shape
    if not batch:
        return NONE
    copies = copy_bytes(call["grad_out"].transpose(1, 2)), copy_bytes(call["out"].transpose(1, 2))
    sums = batch * heads * up(rows, 128) * FLOAT
    waves = -(-call.target.multiprocessors // (batch * heads)) if is_strictly_deterministic() else 1
    accumulated = waves * sums * _flash_width(width)
    expanded = batch * heads * key.shape[2] * width * query.element_size() if key.shape[1] != heads else 0
    return after((*copies, sums, accumulated, expanded, expanded))


# -- memory-efficient


@RULES.of("_scaled_dot_product_efficient_attention")
def _efficient_forward(call: CudaCall) -> Scratch:
    """`_efficient_attention_forward` (cuda/attention.cu): the result in float32, unless registers hold it.

    `kNeedsOutputAccumulatorBuffer` in cuda/mem_eff_attention/kernel_forward.h: they hold heads of up to 128.
    """
    query, value = call["query"], call["value"]
    spills = is_half(query) and max(query.shape[-1], value.shape[-1]) > 128
    return after((math.prod(query.shape[:3]) * value.shape[-1] * FLOAT,)) if spills else NONE


@dataclass(frozen=True)
class _Tile:
    """One kernel of the backward pass: `AttentionBackwardKernel` in cuda/mem_eff_attention/kernel_backward.h."""

    rows: int
    columns: int
    in_registers: bool  # whether the key's and the value's gradients are summed up there


def _tile(half: bool, width: int, dropout: bool, capability: tuple[int, int]) -> _Tile:
    """The first kernel of cuda/mem_eff_attention/kernels/cutlassB.h that takes these heads and fits shared memory.

    The list is made by `generate_kernels.py` next to it. Seen for 7.5, 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0 in 2.11.
    """
    ampere = capability >= (8, 0)
    if not half:
        return _Tile(128 if ampere and width > 64 else 64, 64, in_registers=False)
    if width <= 64 or capability < (7, 0):
        return _Tile(64, 64, in_registers=width <= 64)
    if width > 128:
        return _Tile(128, 64, in_registers=False)
    narrow = not ampere or (width <= 96 and not dropout and capability in ((8, 6), (8, 9)))
    return _Tile(128, 64 if narrow else 128, in_registers=True)


@RULES.of("_scaled_dot_product_efficient_attention_backward")
def _efficient_backward(call: CudaCall) -> Scratch:
    """`_efficient_attention_backward` (cuda/attention_backward.cu): a copy, row sums (delta), and a workspace.

    Row sums are made by the kernel, or before it by plain operators with their temporaries, which are gone before the
    workspace comes. Gradients of the query, the key, the value and the mask are allocated before all of it; if heads
    share a key, those of the key and the value are made for every head (seen in 2.14 and 2.15).
    """
    query, key, value = call["query"], call["key"], call["value"]
    capability = call.target.compute_capability
    half = is_half(query)
    tile = _tile(half, max(query.shape[-1], value.shape[-1]), bool(call["dropout_p"]), capability)
    every_head = math.prod((*query.shape[:2], key.shape[2])) if key.shape[1] != query.shape[1] else 0
    expanded = (every_head * width * key.element_size() for width in (key.shape[-1], value.shape[-1]))
    held = copy_bytes(call["grad_out_"].transpose(1, 2)), *expanded
    sums = math.prod(query.shape[:3]) * FLOAT
    workspace = _efficient_workspace(query, key, value, tile, capability)
    if half and (tile.in_registers or not (7, 0) <= capability < (7, 5)):  # `kKernelComputesDelta`
        return after((*held, sums, workspace))
    products = (sums * value.shape[-1],) * (3 if half else 1)  # in half precision two of them are casts
    return after((*held, *products, sums, sums), (*held, sums, workspace))


def _efficient_workspace(query: Tensor, key: Tensor, value: Tensor, tile: _Tile, capability: tuple[int, int]) -> int:
    """`Params::workspace_size` in cuda/mem_eff_attention/kernel_backward.h, in bytes."""
    batch, heads, rows, width = query.shape
    half = is_half(query)
    elements = 0
    if half or capability >= (7, 0):  # `kNeedsAccumGradQ`
        tiles = -(-rows // tile.rows) * -(-width // tile.columns)
        elements += tiles * (16 // FLOAT + tile.rows * tile.columns)  # `GradQTempStorage`: a lock and a counter first
    if half and not tile.in_registers:  # `kNeedsAccumGradK` and `...V`
        splits = _efficient_splits(batch * heads, key.shape[2], tile.columns, capability)
        elements += splits * tile.columns * (up(width, tile.rows) + up(value.shape[-1], tile.rows))
    return batch * heads * up(elements, 4) * FLOAT


def _efficient_splits(pairs: int, columns: int, block: int, capability: tuple[int, int]) -> int:
    """Parts the keys are worked in if each needs a place of its own (cuda/attention_backward.cu)."""
    if capability < (7, 0) or is_strictly_deterministic() or (pairs >= 256 and columns <= 2 * block):
        return 1
    return max(1, min(-(-columns // block), 200 // pairs))


# -- cuDNN


@RULES.of("_scaled_dot_product_cudnn_attention")
def _cudnn_forward(call: CudaCall) -> Scratch:
    """`run_cudnn_SDP_fprop` (aten/src/ATen/native/cudnn/MHA.cpp) asks the plan for its workspace.

    cuDNN does not document it. A fused kernel needs none; at most it keeps its result in float32 once.
    """
    query, value = call["query"], call["value"]
    return after((Range(0, 0, math.prod(query.shape[:3]) * value.shape[-1] * FLOAT),))


@RULES.of("_scaled_dot_product_cudnn_attention_backward")
def _cudnn_backward(call: CudaCall) -> Scratch:
    """`run_cudnn_SDP_bprop` (aten/src/ATen/native/cudnn/MHA.cpp) asks the plan for its workspace.

    What is known of it comes from `CompositeSDPABackwardNode` in cudnn-frontend: row sums in float32, the query's
    gradient in float32, and if heads share a key its gradients for every head. At most those are in float32, too.
    """
    grad, query, key, value = call["grad_out"], call["query"], call["key"], call["value"]
    batch, heads, rows, width = query.shape
    sums = batch * heads * rows * FLOAT
    for_every_head = batch * heads * key.shape[2] * (width + value.shape[-1])
    point = sums + sums * width
    if not heads == key.shape[1] == value.shape[1]:
        point += for_every_head * query.element_size()
    copy = 0 if grad.stride(-1) == 1 else nbytes(grad)
    return after((copy, Range(sums, point, sums + sums * width + for_every_head * FLOAT)))


# -- plain operators, on the CPU as on CUDA


@EITHER.of("_safe_softmax")
def _safe_softmax(call: Call[CpuTarget | CudaTarget]) -> Scratch:
    """`_safe_softmax` (attention.cpp): which places are minus infinity, which rows are, and a zero.

    Not the softmax, which is the result: `where_out` reuses its storage. The profiler reports the same blocks for the
    CPU.
    """
    x, target = call["self"], call.target
    if not x.numel():
        return NONE
    dims = dimensions(call["dim"], x)
    rows = x.numel() // math.prod(x.shape[dim] for dim in dims)
    partials = reduction(TensorLayout.of(x, 1), dims, 1, target) if isinstance(target, CudaTarget) else ()
    found = ((x.numel(), rows, *partials),) if partials else ()
    return after((copy_bytes(x),), *found, (x.numel(), rows, call.result.element_size()))
