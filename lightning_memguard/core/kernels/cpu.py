"""Scratch that CPU kernels take inside one operator, by operator.

It comes from PyTorch's allocator: oneDNN's copies in its own blocked layout (`cpu_alloc` in
aten/src/ATen/native/mkldnn/IDeepRegistration.cpp), buffers for each thread, contiguous copies. Each rule names the
function it describes; `benchmarks/cpu_scratch.py` measures them all against the profiler's memory events (recorded on
torch 2.13, x86-64 with AVX-512, one and two threads).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_memguard.core.kernels.arguments import CpuCall, Rules
from lightning_memguard.core.kernels.layout import copy_bytes
from lightning_memguard.core.trace.scratch import FLOAT, NONE, CpuTarget, Scratch, nbytes

if TYPE_CHECKING:
    from torch import Tensor

RULES = Rules[CpuTarget]()


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether an image batch has its channels innermost, and is not contiguous."""
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    _, channels, height, width = tensor.shape
    return tensor.stride() == (height * width * channels, 1, width * channels, channels)


def _dense_copy(tensor: Tensor) -> int:
    """Bytes of the copy of a tensor that is in neither of the two orders that kernels take."""
    return 0 if _is_channels_last(tensor) else copy_bytes(tensor)


# -- normalization


@RULES.of("native_batch_norm")
def _batch_norm(call: CpuCall) -> Scratch:
    """`batch_norm_cpu_collect_stats_channels_last_impl` and `..._contiguous_impl` (cpu/batch_norm_kernel.cpp).

    Sums of each channel, for each thread where the channels are the innermost dimension.
    """
    x = call["input"]
    by_thread = call["training"] and (x.dim() == 2 or _is_channels_last(x))
    return Scratch(after=(x.shape[1] * FLOAT * (2 + call.target.threads if by_thread else 2),))


@RULES.of("native_batch_norm_backward")
def _batch_norm_backward(call: CpuCall) -> Scratch:
    """`batch_norm_backward_cpu_template` (aten/src/ATen/native/Normalization.cpp): the input's gradient twice."""
    grad, x, weight = call["grad_out"], call["input"], call["weight"]
    alike = (grad.is_contiguous() and x.is_contiguous()) or (_is_channels_last(grad) and _is_channels_last(x))
    taken = x if call["output_mask"][0] and alike else weight
    return NONE if taken is None else Scratch(after=(nbytes(taken),))


@RULES.of("native_layer_norm_backward")
def _layer_norm_backward(call: CpuCall) -> Scratch:
    """`LayerNormBackwardKernelImplInternal` (aten/src/ATen/native/cpu/layer_norm_kernel.cpp): sums of each thread."""
    copies = copy_bytes(call["grad_out"]) + copy_bytes(call["input"])
    return Scratch(after=(copies + 2 * call.target.threads * math.prod(call["normalized_shape"]) * FLOAT,))


# `GroupNormBackwardKernelImplInternal` (aten/src/ATen/native/cpu/group_norm_kernel.cpp)
RULES.of("native_group_norm_backward")(lambda call: Scratch(after=(2 * call["N"] * call["C"] * FLOAT,)))


# -- losses and softmax


@RULES.of("mse_loss", "smooth_l1_loss", "binary_cross_entropy")
def _reduced_loss(call: CpuCall) -> Scratch:
    """Losses that are reduced into the tensor that held them all, which keeps its storage (Loss.cpp)."""
    x = call["self"]
    return Scratch(kept=nbytes(x) - x.element_size()) if call["reduction"] else NONE


# `binary_cross_entropy_with_logits` (aten/src/ATen/native/Loss.cpp)
RULES.of("binary_cross_entropy_with_logits")(lambda call: Scratch(after=(2 * nbytes(call["self"]) + 3 * FLOAT,)))
# `logsumexp_out_impl` (aten/src/ATen/native/ReduceOps.cpp): the shifted input
RULES.of("logsumexp")(lambda call: Scratch(after=(nbytes(call["self"]) + nbytes(call.result),)))


# -- attention


def _attention_split(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Rows and columns of one tile (`flash_attention_kernel`, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""
    length = query.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[2])


@RULES.of("_scaled_dot_product_flash_attention_for_cpu")
def _attention(call: CpuCall) -> Scratch:
    """`cpu_flash_attention`: a tile of scores, its row sums and its result, for each thread."""
    query = call["query"]
    rows, columns = _attention_split(query, call["key"])
    return Scratch(after=(call.target.threads * (rows * columns + 2 * rows + rows * query.shape[3]) * FLOAT,))


@RULES.of("_scaled_dot_product_flash_attention_for_cpu_backward")
def _attention_backward(call: CpuCall) -> Scratch:
    """`cpu_flash_attention_backward`: two tiles for each thread, and a copy of a gradient that is not in order."""
    grad = call["grad_out"]
    rows, columns = _attention_split(call["query"], call["key"])
    copy = copy_bytes(grad.transpose(1, 2))
    return Scratch(after=(copy + call.target.threads * rows * columns * 2 * FLOAT + rows * FLOAT,))


# -- copies

_TILE = 60 * 60  # `copy_transpose_valid` in aten/src/ATen/native/Copy.cpp: one square tile a copy


def _is_transposed(tensor: Tensor) -> bool:
    """A transposed matrix that is copied tile by tile (`copy_transpose_valid`, aten/src/ATen/native/Copy.cpp)."""
    turned = tensor.dim() == 2 and tensor.stride() == (1, tensor.shape[0])
    return turned and tensor.numel() >= _TILE and not tensor.is_contiguous()


@RULES.of("_log_softmax", "_softmax", "_log_softmax_backward_data", "_softmax_backward_data", "gelu_backward")
@RULES.of("embedding_dense_backward", "max_pool2d_with_indices_backward", "avg_pool2d_backward")
@RULES.of("_adaptive_avg_pool2d_backward", "upsample_nearest2d_backward", "upsample_bilinear2d_backward")
def _contiguous_first(call: CpuCall) -> Scratch:
    """Kernels that begin with ``contiguous()`` of their first tensor."""
    copy = _dense_copy(call.first)
    tile = _TILE * call.first.element_size() if copy and _is_transposed(call.first) else 0
    return Scratch(after=(copy + tile,)) if copy else NONE


@RULES.of("clone", "copy_")
def _copy(call: CpuCall) -> Scratch:
    """`copy_transpose_valid` (aten/src/ATen/native/Copy.cpp): a tile that turns a transposed matrix."""
    source, target = (call["src"], call["self"]) if "src" in call.arguments else (call["self"], call.result)
    if _is_transposed(source) and target.is_contiguous() and source.dtype == target.dtype:
        return Scratch(after=(_TILE * source.element_size(),))
    return NONE


RULES.of("im2col")(lambda call: Scratch(after=(nbytes(call["self"]),)))


@RULES.of("upsample_nearest2d", "upsample_bilinear2d")
def _upsample(call: CpuCall) -> Scratch:
    """Small images are turned to channels last and back (aten/src/ATen/native/cpu/UpSampleKernel.cpp)."""
    x, y = call.first, call.result
    if _is_channels_last(x) or y.shape[-1] + y.shape[-2] > 128:
        return NONE
    return Scratch(after=(nbytes(x) + nbytes(y),))
