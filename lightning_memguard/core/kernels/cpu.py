"""Scratch that CPU kernels take inside one operator, by operator.

It comes from PyTorch's allocator: oneDNN's copies in its own blocked layout (`cpu_alloc` in
aten/src/ATen/native/mkldnn/IDeepRegistration.cpp), buffers for each thread, contiguous copies. Each rule names the
function it describes; `benchmarks/cpu_scratch.py` measures them all against the profiler's memory events (recorded on
torch 2.13, x86-64 with AVX-512, one and two threads).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_memguard.core.trace.scratch import (
    FLOAT,
    NONE,
    CpuTarget,
    Scratch,
    is_channels_last,
    is_dense,
    nbytes,
    up,
)

Rule = Callable[[Sequence[Any], Mapping[str, Any], Sequence[Any], CpuTarget], Scratch]

_TRANSPOSE_TILE = 60 * 60  # `copy_transpose_valid` in aten/src/ATen/native/Copy.cpp: one square tile a copy


def _is_transposed(tensor: Any) -> bool:
    """A transposed matrix that is copied tile by tile (`copy_transpose_valid`, aten/src/ATen/native/Copy.cpp)."""
    return (
        tensor.dim() == 2
        and tensor.stride(0) == 1
        and tensor.stride(1) == tensor.shape[0]
        and tensor.numel() >= _TRANSPOSE_TILE
        and not tensor.is_contiguous()
    )


# -- convolutions: oneDNN in its blocked layout, or im2col


@dataclass(frozen=True)
class _Conv:
    """A convolution's arguments, as `_select_conv_backend` in aten/src/ATen/native/Convolution.cpp sees them."""

    x: Any
    weight: Any
    stride: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int
    padding: Sequence[int]

    def takes_onednn(self, host: CpuTarget) -> bool:
        """`use_mkldnn` in aten/src/ATen/native/Convolution.cpp."""
        kernel = self.weight.shape[2:]
        if self.transposed and any(o >= s for o, s in zip(self.output_padding, self.stride, strict=True)):
            return False
        plain = not any(s != 1 for s in self.stride) and not any(d != 1 for d in self.dilation)
        if host.threads == 1 and all(k == 1 for k in kernel[-2:]) and plain and self.x.shape[0] < 16:
            return False
        large = self.x.shape[0] > 1 or math.prod(self.x.shape[:4]) > 20480
        return self.groups > 1 or all(k > 3 for k in kernel[-2:]) or large

    @property
    def few_channels(self) -> bool:
        """The first layer's images stay as they are: oneDNN has kernels that read their plain layout."""
        return self.groups == 1 and not self.transposed

    def blocked(self, tensor: Any, host: CpuTarget) -> int:
        """Bytes of an activation in the blocked layout, its channels padded (nChw16c, or nChw8c where that divides)."""
        channels, block = tensor.shape[1], host.channel_block
        if channels % block and not (channels > block and channels % 8 == 0):
            channels = up(channels, block)
        return int(nbytes(tensor) // tensor.shape[1] * channels)

    def blocked_weight(self, host: CpuTarget, *, pads_input: bool = True) -> int:
        if self.groups > 1:
            return nbytes(self.weight)
        out, into = (up(size, host.channel_block) for size in self.weight.shape[:2])
        return int(out * (into if pads_input else self.weight.shape[1]) * math.prod(self.weight.shape[2:]) * FLOAT)

    def scatter(self, small: Any, large: Any, host: CpuTarget) -> int:
        """The scratchpad of oneDNN where a stride spreads a small image over a large one.

        That is the backward pass of a strided convolution, and the forward pass of a transposed one. Each thread has
        a buffer of the small image with its rim; recorded with `benchmarks/cpu_scratch.py` for square images of even
        sides, 20 KiB a thread more at odd ones.
        """
        if not any(s > 1 for s in self.stride) or self.groups > 1 or small.dim() != 4:
            return 0
        kernel, stride, pad = self.weight.shape[-1], self.stride[-1], self.padding[-1]
        rows, columns = small.shape[2:]
        rim = (kernel - 1 - pad) // stride + (large.shape[2] - 1 + pad) // stride - (rows - 1)
        image = up((rows + rim) * (columns + rim) * small.shape[1] * FLOAT, 16_384)
        return int(12_288 + (128 if self.transposed else 0) + host.threads * (24 + 8_192 + image))

    def im2col(self, spatial: Any) -> int:
        """`slow_conv2d` and its kin unfold the input, unless the kernel is 1 x 1 (ConvolutionMM2d.cpp)."""
        kernel = math.prod(self.weight.shape[2:])
        columns = self.x.shape[0] * self.x.shape[1] * kernel * math.prod(spatial.shape[2:])
        return 0 if kernel == 1 else int(columns * self.x.element_size())


def _is_known(tensor: Any) -> bool:
    """Float32 and float64 have rules; oneDNN's lower precisions were not measured."""
    return bool(tensor.is_floating_point()) and tensor.element_size() >= FLOAT


def _convolution(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], host: CpuTarget) -> Scratch:
    """`mkldnn_convolution` (aten/src/ATen/native/mkldnn/Conv.cpp): input, weight and result in oneDNN's layout."""
    x, weight, _, stride, padding, dilation, transposed, output_padding, groups = args[:9]
    conv, y = _Conv(x, weight, stride, dilation, transposed, output_padding, groups, padding), results[0]
    if not _is_known(x):
        return NONE
    if x.element_size() != FLOAT or not conv.takes_onednn(host):
        return Scratch(after=(conv.im2col(y),))
    if is_channels_last(x) or is_channels_last(weight):
        return Scratch(after=(conv.blocked_weight(host),))
    block = host.channel_block
    few_in = conv.few_channels and x.shape[1] < block
    inputs = 0 if few_in else conv.blocked(x, host)
    result = nbytes(y) if transposed and y.shape[1] < block else conv.blocked(y, host)
    weights = conv.blocked_weight(host, pads_input=not few_in)
    scatter = conv.scatter(x, y, host) if transposed else 0
    return Scratch(before=(inputs + weights + result + scatter,), after=(result + (nbytes(y) if transposed else 0),))


def _convolution_backward(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], host: CpuTarget) -> Scratch:
    """`mkldnn_convolution_backward`: first the input's gradient, then the weight's, each in oneDNN's layout."""
    grad, x, weight, _bias, stride, padding, dilation, transposed, output_padding, groups, mask = args[:11]
    conv = _Conv(x, weight, stride, dilation, transposed, output_padding, groups, padding)
    if not _is_known(x):
        return NONE
    if x.element_size() != FLOAT or not conv.takes_onednn(host):
        return Scratch(after=(conv.im2col(grad),))
    copy = 0 if is_dense(grad) else nbytes(grad)
    if is_channels_last(x) or is_channels_last(weight):
        return Scratch(after=(copy + 2 * conv.blocked_weight(host),))
    bias = grad.shape[1] * FLOAT if mask[2] else 0
    grad_x = nbytes(x) if mask[0] else 0
    moments: list[int] = []
    if mask[0]:
        moments += [copy + moment for moment in _backward_data(conv, grad, host)]
    if mask[1]:
        moments += [copy + grad_x + bias + moment for moment in _backward_weight(conv, grad, host, bias)]
    return Scratch(before=tuple(moments))


def _backward_data(conv: _Conv, grad: Any, host: CpuTarget) -> tuple[int, int]:
    block, x = host.channel_block, conv.x
    few_out = conv.groups == 1 and conv.transposed and grad.shape[1] < block
    strided = any(s > 1 for s in conv.stride) and not conv.transposed
    inputs = nbytes(x) if strided and x.shape[1] < block else conv.blocked(x, host)
    weights = conv.blocked_weight(host, pads_input=not few_out)
    incoming = 0 if few_out else conv.blocked(grad, host)
    scatter = conv.scatter(grad, x, host) if strided else 0
    return incoming + weights + inputs + scatter, inputs + nbytes(x) * (2 if strided else 1)


def _backward_weight(conv: _Conv, grad: Any, host: CpuTarget, bias: int) -> tuple[int, int]:
    block, x = host.channel_block, conv.x
    few_in = conv.few_channels and x.shape[1] < block
    few_out = conv.groups == 1 and conv.transposed and grad.shape[1] < block
    inputs = conv.blocked(x, host)
    if few_in and x.shape[1] <= 8:
        inputs = nbytes(x) if x.shape[1] == 8 else 0
    weights = conv.blocked_weight(host, pads_input=not (few_in and x.shape[1] <= 8))
    if few_out:
        weights = nbytes(conv.weight)
    incoming = 0 if few_out else conv.blocked(grad, host)
    return incoming + inputs + weights, weights + nbytes(conv.weight) + bias


# -- normalisation


def _batch_norm(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], host: CpuTarget) -> Scratch:
    """`batch_norm_cpu_collect_stats_channels_last_impl` and `..._contiguous_impl` (cpu/batch_norm_kernel.cpp).

    Sums of each channel, for each thread where the channels are the innermost dimension.
    """
    x, training = args[0], args[5]
    by_thread = training and (x.dim() == 2 or is_channels_last(x))
    return Scratch(after=(x.shape[1] * FLOAT * (2 + host.threads if by_thread else 2),))


def _batch_norm_backward(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CpuTarget) -> Scratch:
    """`batch_norm_backward_cpu_template` (aten/src/ATen/native/Normalization.cpp): the input's gradient twice."""
    grad, x, weight, mask = args[0], args[1], args[2], args[9]
    alike = (grad.is_contiguous() and x.is_contiguous()) or (is_channels_last(grad) and is_channels_last(x))
    if mask[0] and alike:
        return Scratch(after=(nbytes(x),))
    return Scratch(after=(nbytes(weight),)) if weight is not None else NONE


def _layer_norm_backward(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], host: CpuTarget) -> Scratch:
    """`LayerNormBackwardKernelImplInternal` (aten/src/ATen/native/cpu/layer_norm_kernel.cpp): sums of each thread."""
    copies = sum(nbytes(tensor) for tensor in args[:2] if not tensor.is_contiguous())
    return Scratch(after=(copies + 2 * host.threads * math.prod(args[2]) * FLOAT,))


def _group_norm_backward(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CpuTarget) -> Scratch:
    """`GroupNormBackwardKernelImplInternal` (aten/src/ATen/native/cpu/group_norm_kernel.cpp)."""
    return Scratch(after=(2 * args[5] * args[6] * FLOAT,))


# -- losses and softmax


def _reduced_loss(args: Sequence[Any], kwargs: Mapping[str, Any], _: Sequence[Any], __: CpuTarget) -> Scratch:
    """`mse_loss` and its kin reduce into the tensor that held the losses, which keeps its storage (Loss.cpp)."""
    place = 3 if len(args) > 3 else 2
    reduction = args[place] if len(args) > place else kwargs.get("reduction", 1)
    return Scratch(kept=nbytes(args[0]) - args[0].element_size()) if reduction else NONE


def _bce_with_logits(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CpuTarget) -> Scratch:
    """`binary_cross_entropy_with_logits` (aten/src/ATen/native/Loss.cpp)."""
    return Scratch(after=(2 * nbytes(args[0]) + 3 * FLOAT,))


def _safe_softmax(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CpuTarget) -> Scratch:
    """`_safe_softmax` (aten/src/ATen/native/SoftMax.cpp): a mask of what is minus infinity, and of whole rows."""
    x = args[0]
    return Scratch(after=(x.numel() + x.numel() // x.shape[args[1]] + FLOAT,))


def _logsumexp(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], __: CpuTarget) -> Scratch:
    """`logsumexp_out_impl` (aten/src/ATen/native/ReduceOps.cpp): the shifted input."""
    return Scratch(after=(nbytes(args[0]) + nbytes(results[0]),))


# -- attention


def _attention_split(query: Any, key: Any) -> tuple[int, int]:
    """Rows and columns of one tile (`flash_attention_kernel`, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""
    length = query.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[2])


def _attention(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], host: CpuTarget) -> Scratch:
    """`cpu_flash_attention`: a tile of scores, its row sums and its result, for each thread."""
    rows, columns = _attention_split(args[0], args[1])
    return Scratch(after=(host.threads * (rows * columns + 2 * rows + rows * args[0].shape[3]) * FLOAT,))


def _attention_backward(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], host: CpuTarget) -> Scratch:
    """`cpu_flash_attention_backward`: two tiles for each thread, and a copy of a gradient that is not in order."""
    grad, query, key = args[:3]
    rows, columns = _attention_split(query, key)
    copy = 0 if grad.transpose(1, 2).is_contiguous() else nbytes(grad)
    return Scratch(after=(copy + host.threads * rows * columns * 2 * FLOAT + rows * FLOAT,))


# -- copies


def _contiguous_first(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CpuTarget) -> Scratch:
    """Kernels that begin with ``contiguous()`` of their first tensor."""
    tensor = args[0]
    if is_dense(tensor):
        return NONE
    tile = _TRANSPOSE_TILE * tensor.element_size() if _is_transposed(tensor) else 0
    return Scratch(after=(nbytes(tensor) + tile,))


def _clone(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], __: CpuTarget) -> Scratch:
    return _tile(args[0], results[0])


def _copy(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CpuTarget) -> Scratch:
    return _tile(args[1], args[0])


def _tile(source: Any, target: Any) -> Scratch:
    """`copy_transpose_valid` (aten/src/ATen/native/Copy.cpp): a tile that turns a transposed matrix."""
    if _is_transposed(source) and target.is_contiguous() and source.dtype == target.dtype:
        return Scratch(after=(_TRANSPOSE_TILE * source.element_size(),))
    return NONE


def _im2col(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CpuTarget) -> Scratch:
    return Scratch(after=(nbytes(args[0]),))


def _upsample(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], __: CpuTarget) -> Scratch:
    """Small images are turned to channels last and back (aten/src/ATen/native/cpu/UpSampleKernel.cpp)."""
    x, y = args[0], results[0]
    if is_channels_last(x) or y.shape[-1] + y.shape[-2] > 128:
        return NONE
    return Scratch(after=(nbytes(x) + nbytes(y),))


RULES: dict[str, Rule] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm_backward": _group_norm_backward,
    "mse_loss": _reduced_loss,
    "smooth_l1_loss": _reduced_loss,
    "binary_cross_entropy": _reduced_loss,
    "binary_cross_entropy_with_logits": _bce_with_logits,
    "_safe_softmax": _safe_softmax,
    "logsumexp": _logsumexp,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "clone": _clone,
    "copy_": _copy,
    "im2col": _im2col,
    "upsample_nearest2d": _upsample,
    "upsample_bilinear2d": _upsample,
    **dict.fromkeys(
        (
            "_log_softmax",
            "_softmax",
            "_log_softmax_backward_data",
            "_softmax_backward_data",
            "gelu_backward",
            "embedding_dense_backward",
            "max_pool2d_with_indices_backward",
            "avg_pool2d_backward",
            "_adaptive_avg_pool2d_backward",
            "upsample_nearest2d_backward",
            "upsample_bilinear2d_backward",
        ),
        _contiguous_first,
    ),
}
