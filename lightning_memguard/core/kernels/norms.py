"""Normalization on CUDA: by layer, by group, by batch."""

from __future__ import annotations

import math
from itertools import pairwise

from lightning_memguard.core.kernels.arguments import CudaCall, Rules, after, is_torch
from lightning_memguard.core.kernels.cuda_reductions import last_power, moment_accumulator_bytes, reduction
from lightning_memguard.core.kernels.layout import (
    TensorLayout,
    accumulator_bytes,
    copies_of,
    copy_bytes,
    is_channels_last,
    is_ordered,
)
from lightning_memguard.core.trace.scratch import FLOAT, NONE, CudaTarget, Scratch, Tensor, nbytes

RULES = Rules[CudaTarget]()

# `layer_norm_cuda` and `_fused_rms_norm_cuda` (layer_norm_kernel.cu)
RULES.of("native_layer_norm", "_fused_rms_norm")(copies_of("input", "weight", "bias"))
# aten/src/ATen/native/cudnn/BatchNorm.cpp: inputs dense in no order are copied, gradients brought into their layout
RULES.of("cudnn_batch_norm", "cudnn_batch_norm_backward")(copies_of("input", "grad_output", like="input"))


@RULES.of("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(call: CudaCall) -> Scratch:
    """`LayerNormBackwardKernelImplInternal` and `_fused_rms_norm_backward_cuda` (layer_norm_kernel.cu).

    For many short rows `LaunchGammaBetaBackwardCUDAKernel` sums weights' gradients of blocks of rows, then adds those.
    """
    x, weight = call["input"], call["weight"]
    copies = (copy_bytes(x), copy_bytes(weight), copy_bytes(call["grad_out"]))
    sums = 0 if weight is None else sum(map(bool, call["output_mask"][1:]))
    width = math.prod(call["normalized_shape"])
    rows = x.numel() // width if width else 0
    if not (sums and rows > 64 * 1024 and width // 32 < call.target.multiprocessors // 2):
        return after(copies)
    blocks = min(64 * 1024 // 2 // -(-width // 32), -(-rows // 32))
    size, last = weight.element_size(), weight.shape[-1]
    partials = (blocks * last * size,) * sums
    layout = TensorLayout.contiguous((blocks, last), size)
    reduced = reduction(layout, frozenset({0}), accumulator_bytes(weight), call.target, out=size)
    return after((*copies, *partials, last * size, *reduced))


def _groups_keep_channels_last(call: CudaCall) -> bool:
    """Whether group norm has kernels for this order (seen in 2.15, not in 2.14)."""
    return is_torch(2, 15) and is_channels_last(call["input"])


@RULES.of("native_group_norm")
def _group_norm(call: CudaCall) -> Scratch:
    """`GroupNormKernelImplInternal` (group_norm_kernel.cu): float32 statistics, a factor and a shift a channel."""
    x, batch = call["input"], call["N"]
    accumulator = accumulator_bytes(x)
    statistics = batch * call["group"] * accumulator if accumulator > x.element_size() else 0
    affine = call["HxW"] != 1 and not (call["weight"] is None and call["bias"] is None)
    fused = batch * call["C"] * accumulator if affine else 0
    copy = copy_bytes(x, channels_last=_groups_keep_channels_last(call))
    return after((copy, statistics, statistics, fused, fused))


@RULES.of("native_group_norm_backward")
def _group_norm_backward(call: CudaCall) -> Scratch:
    """`GroupNormBackwardKernelImplInternal` (group_norm_kernel.cu): sums of each channel, and three factors.

    The input is made contiguous, too, from 2.14 on (seen in 2.14 and 2.15, not in 2.11).
    """
    accumulator, one_pixel = call["N"] * accumulator_bytes(call["input"]), call["HxW"] == 1
    channel, group = call["C"] * accumulator, call["group"] * accumulator
    sums = () if one_pixel else (channel, channel)
    channels_last = _groups_keep_channels_last(call)
    factor = 0 if one_pixel or channels_last or call["weight"] is None else channel
    factors = (group, group, factor) if call["output_mask"][0] else ()
    copied = ("input", "grad_out") if is_torch(2, 14) else ("grad_out",)
    return after((*(copy_bytes(call[name], channels_last=channels_last) for name in copied), *sums, *factors))


def _takes_channels_last(tensor: Tensor) -> bool:
    """`batch_norm_use_channels_last_kernels` (Normalization.cu): rows of channels count too."""
    count, shape, stride = tensor.dim(), tensor.shape, tensor.stride()
    if count < 2 or not tensor.numel():
        return False
    if is_ordered(shape, stride):
        return stride[1] == 1
    return count in (4, 5) and is_ordered(shape, stride, channels_last=True)


def _batch_norm_blocks(x: Tensor, sums: int) -> tuple[int, ...]:
    """`flexible_launch_configs` (Normalization.cuh): sums of blocks of rows, and semaphores, for channels last."""
    channels = x.shape[1]
    rows = x.numel() // channels
    wide = min(last_power(channels), 32)
    high = min(last_power(-(-rows // 16)), 512 // wide)
    if wide * high != 512:
        wide = min(last_power(channels), 512 // high)
    blocks = min(-(-rows // (high * 16)), 128)
    return (sums * channels * blocks * accumulator_bytes(x), -(-channels // wide) * FLOAT) if blocks >= 8 else ()


@RULES.of("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional")
def _batch_norm(call: CudaCall) -> Scratch:
    """`batch_norm_mean_var` (Normalization.cu): by layout its own kernels, or `var_mean`."""
    x = call["input"]
    if not call["training"] or x.dim() < 2 or not x.numel():
        return NONE
    if _takes_channels_last(x):
        return after(_batch_norm_blocks(x, 4))
    if not copy_bytes(x):
        return NONE
    dims = frozenset(range(x.dim())) - {1}
    return after(reduction(TensorLayout.of(x), dims, moment_accumulator_bytes(x), call.target, 2))


def _images_merge(tensor: Tensor) -> bool:
    """Whether a view can join the dimensions past the channels."""
    shape, stride = tensor.shape, tensor.stride()
    places = [place for place in range(2, tensor.dim()) if shape[place] != 1]
    return all(stride[first] == shape[second] * stride[second] for first, second in pairwise(places))


@RULES.of("native_batch_norm_backward")
def _batch_norm_backward(call: CudaCall) -> Scratch:
    """`batch_norm_backward_cuda` (Normalization.cu): one kernel for contiguous images, sums first for channels last."""
    grad, x, mask = call["grad_out"], call["input"], call["output_mask"]
    if x.dim() < 2 or not x.numel() or not (call["train"] or mask[1] or mask[2]):
        return NONE
    if mask[0] and not _takes_channels_last(x):
        return after([0 if _images_merge(tensor) else nbytes(tensor) for tensor in (x, grad)])
    sums = (x.shape[1] * accumulator_bytes(x),) * 2
    shared = _takes_channels_last(x) and _takes_channels_last(grad)
    blocks = _batch_norm_blocks(x, 2) if shared else ()
    return Scratch(before=((*sums, *blocks),), after=(sums,))
