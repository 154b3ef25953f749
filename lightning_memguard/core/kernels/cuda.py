"""CUDA kernels without a file of their own: images, lists of tensors, Fourier transforms, copies between devices."""

from __future__ import annotations

from lightning_memguard.core.kernels.arguments import CudaCall, Rules, after
from lightning_memguard.core.kernels.layout import (
    accumulator_bytes,
    copies_of,
    copy_bytes,
    is_channels_last,
    is_non_overlapping_and_dense,
)
from lightning_memguard.core.trace.scratch import NONE, ByteRange, CudaTarget, Scratch, nbytes

RULES = Rules[CudaTarget]()


# -- pooling, resizing, padding: copies of layout

# Pooling takes its tensors in the layout of the pooled one (``suggest_memory_format``).
RULES.of("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d")(copies_of("self", like="self"))
RULES.of("max_pool2d_with_indices_backward")(copies_of("grad_output", "self", "indices", like="self"))
RULES.of("avg_pool2d_backward")(copies_of("grad_output", "self", like="self"))
RULES.of("_adaptive_avg_pool2d_backward")(copies_of("grad_output", like="self"))

# The rest make their first argument contiguous.
RULES.of("roll", "im2col", "col2im")(copies_of("self"))
RULES.of("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")(copies_of("self"))
RULES.of("max_pool3d_with_indices", "avg_pool3d", "_adaptive_avg_pool3d")(copies_of("self"))
RULES.of("adaptive_max_pool2d", "adaptive_max_pool3d", "upsample_nearest1d")(copies_of("self"))
RULES.of("max_pool3d_with_indices_backward", "avg_pool3d_backward")(copies_of("grad_output"))
RULES.of("_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward")(copies_of("grad_output"))
RULES.of("adaptive_max_pool3d_backward", "upsample_nearest1d_backward")(copies_of("grad_output"))
RULES.of("upsample_nearest3d_backward", "upsample_linear1d_backward")(copies_of("grad_output"))
RULES.of("upsample_bicubic2d_backward", "upsample_trilinear3d_backward")(copies_of("grad_output"))
RULES.of("reflection_pad1d_backward", "reflection_pad2d_backward")(copies_of("grad_output"))
RULES.of("replication_pad2d_backward")(copies_of("grad_output"))


@RULES.of("upsample_nearest2d", "upsample_nearest2d_backward", "upsample_bilinear2d_backward")
def _resized(call: CudaCall) -> Scratch:
    """`upsample_nearest2d_out_cuda_template` (UpSampleNearest2d.cu) and its backward pass, and that of bilinear.

    Channels last has a kernel of its own from four channels on; else both sides are made contiguous.
    """
    x, y = call.first, call.result
    if is_channels_last(x) and is_channels_last(y) and x.shape[1] >= 4:
        return NONE
    return after((copy_bytes(x), copy_bytes(y)))


@RULES.of("upsample_nearest3d", "_upsample_nearest_exact3d")
def _resized_volume(call: CudaCall) -> Scratch:
    """`upsample_nearest3d_out_cuda_template` (UpSampleNearest3d.cu): both sides are made contiguous."""
    return after((copy_bytes(call.result), copy_bytes(call.first)))


# -- lists of tensors

_CHUNK = 65_536  # `kChunkSize` in MultiTensorApply.cuh


def _foreach_partials(call: CudaCall, itemsize: int) -> Scratch:
    """Return the partial results: for every tensor as many as the longest has chunks."""
    tensors = call["self"]
    chunks = max((-(-tensor.numel() // _CHUNK) for tensor in tensors), default=0)
    return after((len(tensors) * chunks * itemsize,))


# `foreach_tensor_norm_cuda` and `foreach_tensor_max_cuda` (ForeachReduceOp.cu)
RULES.of("_foreach_norm")(lambda call: _foreach_partials(call, accumulator_bytes(call.result)))
RULES.of("_foreach_max")(lambda call: _foreach_partials(call, call.result.element_size()))


# -- Fourier transforms


@RULES.of("_fft_r2c", "_fft_c2c", "_fft_c2r")
def _fft(call: CudaCall) -> Scratch:
    """`_fft_r2c_cufft` and others (SpectralOps.cpp): cuFFT's workspace; `_fft_c2r_cufft` copies its input first.

    cuFFT documents no formula; between nothing and twice the larger side is what it takes for lengths whose factors
    are small.
    """
    x = call["self"]
    size = max(nbytes(x), nbytes(call.result))
    copy = nbytes(x) if "last_dim_size" in call.arguments else 0  # cuFFT would write over it
    return after((copy, ByteRange(0, size, 2 * size))) if size else NONE


# -- copies between devices


@RULES.of("copy_")
def _copy(call: CudaCall) -> Scratch:
    """`copy_kernel_cuda` (Copy.cu): none on one device; between host and device, copies of what is not contiguous."""
    target, source = call["self"], call["src"]
    if target.device.type == source.device.type:
        return NONE
    alike = target.dtype == source.dtype and target.shape == source.shape
    if alike and target.stride() == source.stride() and is_non_overlapping_and_dense(target):
        return NONE
    if target.device.type == "cuda":
        return after((copy_bytes(target),))
    return after((nbytes(target) if source.dtype != target.dtype else copy_bytes(source),))
