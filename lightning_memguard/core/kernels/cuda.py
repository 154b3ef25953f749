"""Scratch of the CUDA kernels without a file of their own: images, lists of tensors, Fourier transforms, copies.

Paths are those of PyTorch, from aten/src/ATen/native/cuda on unless they begin with aten; read in PyTorch 2.9 to 2.11.
None of the rules for CUDA was recorded on a GPU.
"""

from __future__ import annotations

from lightning_memguard.core.kernels.arguments import CudaCall, Rules, after
from lightning_memguard.core.kernels.layout import accumulator_bytes, copy_bytes, is_channels_last, is_dense
from lightning_memguard.core.trace.scratch import NONE, ByteRange, CudaTarget, Scratch, nbytes

RULES = Rules[CudaTarget]()


# -- pooling, resizing, padding: copies of layout


@RULES.of(
    "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward",
    "avg_pool2d",
    "avg_pool2d_backward",
    "_adaptive_avg_pool2d",
)
def _pooled(call: CudaCall) -> Scratch:
    """Kernels that take their tensors in the layout of the pooled one (``suggest_memory_format``)."""
    channels_last = is_channels_last(call["self"])
    names = ("grad_output", "self", "indices")
    return after([copy_bytes(call.get(name), channels_last=channels_last) for name in names])


@RULES.of("_adaptive_avg_pool2d_backward")
def _adaptive_pool_backward(call: CudaCall) -> Scratch:
    """The same, but the pooled tensor itself is not read."""
    return after((copy_bytes(call["grad_output"], channels_last=is_channels_last(call["self"])),))


@RULES.of(
    "roll",
    "im2col",
    "col2im",
    "max_pool3d_with_indices",
    "max_pool3d_with_indices_backward",
    "avg_pool3d",
    "avg_pool3d_backward",
    "_adaptive_avg_pool3d",
    "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d",
    "adaptive_max_pool3d_backward",
    "upsample_nearest1d",
    "upsample_nearest1d_backward",
    "upsample_nearest3d",
    "upsample_nearest3d_backward",
    "upsample_linear1d_backward",
    "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward",
    "reflection_pad1d",
    "reflection_pad1d_backward",
    "reflection_pad2d",
    "reflection_pad2d_backward",
    "replication_pad2d_backward",
)
def _contiguous(call: CudaCall) -> Scratch:
    """Kernels that begin with ``contiguous()`` of their first argument."""
    return after((copy_bytes(call.first),))


@RULES.of("upsample_nearest2d", "upsample_nearest2d_backward", "upsample_bilinear2d_backward")
def _resized(call: CudaCall) -> Scratch:
    """`upsample_nearest2d_out_cuda_template` (UpSampleNearest2d.cu) and its backward pass, and that of bilinear.

    Channels last has a kernel of its own from four channels on; else both sides are made contiguous.
    """
    x, y = call.first, call.result
    if is_channels_last(x) and is_channels_last(y) and x.shape[1] >= 4:
        return NONE
    return after((copy_bytes(x), copy_bytes(y)))


# -- lists of tensors


_CHUNK = 65_536  # `kChunkSize` in MultiTensorApply.cuh


@RULES.of("_foreach_norm")
def _foreach_norm(call: CudaCall) -> Scratch:
    """`foreach_tensor_norm_cuda` (ForeachReduceOp.cu)."""
    return _foreach_partials(call, accumulator_bytes(call.result))


@RULES.of("_foreach_max")
def _foreach_max(call: CudaCall) -> Scratch:
    """`foreach_tensor_max_cuda` (ForeachReduceOp.cu)."""
    return _foreach_partials(call, call.result.element_size())


def _foreach_partials(call: CudaCall, itemsize: int) -> Scratch:
    """For every tensor as many partial results as the longest has chunks."""
    tensors = call["self"]
    chunks = max((-(-tensor.numel() // _CHUNK) for tensor in tensors), default=0)
    return after((len(tensors) * chunks * itemsize,))


# -- Fourier transforms


@RULES.of("_fft_r2c", "_fft_c2c")
def _fft(call: CudaCall) -> Scratch:
    """`_fft_r2c_cufft` and others (SpectralOps.cpp): cuFFT's workspace.

    cuFFT documents no formula; between nothing and twice the larger side is what it takes for lengths whose factors
    are small.
    """
    size = max(nbytes(call["self"]), nbytes(call.result))
    return after((ByteRange(0, size, 2 * size),)) if size else NONE


@RULES.of("_fft_c2r")
def _fft_to_real(call: CudaCall) -> Scratch:
    """`_fft_c2r_cufft`: cuFFT writes over its input, which is copied before."""
    x = call["self"]
    size = max(nbytes(x), nbytes(call.result))
    return after((nbytes(x), ByteRange(0, size, 2 * size))) if size else NONE


# -- copies between devices


@RULES.of("copy_")
def _copy(call: CudaCall) -> Scratch:
    """`copy_kernel_cuda` (Copy.cu): none on one device; between host and device, copies of what is not contiguous."""
    target, source = call["self"], call["src"]
    if target.device.type == source.device.type:
        return NONE
    alike = target.dtype == source.dtype and target.shape == source.shape
    if alike and target.stride() == source.stride() and is_dense(target):
        return NONE
    if target.device.type == "cuda":
        return after((copy_bytes(target),))
    return after((target.numel() * target.element_size() if source.dtype != target.dtype else copy_bytes(source),))
