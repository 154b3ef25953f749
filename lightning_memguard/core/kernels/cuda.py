"""CUDA kernels without a file of their own: products, losses, images, lists of tensors, Fourier transforms, copies."""

from __future__ import annotations

from functools import partial

from lightning_memguard.core.kernels.arguments import CudaCall, Rules, after, is_on_host, is_torch, moments
from lightning_memguard.core.kernels.cuda_reductions import mean_blocks, reduction
from lightning_memguard.core.kernels.layout import (
    LONG,
    TensorLayout,
    accumulator_bytes,
    broadcast_numel,
    copies_of,
    copy_bytes,
    is_channels_last,
    is_non_overlapping_and_dense,
    steps_of,
)
from lightning_memguard.core.range import Range
from lightning_memguard.core.trace.scratch import NONE, CudaTarget, Scratch, Tensor, nbytes

RULES = Rules[CudaTarget]()


# -- matrix products and distances: copies of what cuBLAS cannot read as it is


@RULES.of("mm", "addmm", "_addmm_activation", "_scaled_mm", "_scaled_mm_v2")
def _mm(call: CudaCall) -> Scratch:
    """`addmm_out_cuda_impl` (Blas.cpp), `_scaled_gemm` (ScaledBlas.cpp)."""
    left = call["mat1" if "mat1" in call.arguments else "self"]
    return after((_matrix(left), _matrix(call["mat2"])))


def _matrix(tensor: Tensor) -> int:
    """`prepare_matrix_for_cublas` (cuBlasCommonArgs.h): a copy of what is neither dense nor has one stride of 1."""
    ready = tensor.dim() != 2 or is_non_overlapping_and_dense(tensor) or steps_of(tensor.shape, tensor.stride())
    return 0 if ready else nbytes(tensor)


@RULES.of("bmm", "baddbmm")
def _bmm(call: CudaCall) -> Scratch:
    """`bmm_out_cuda_impl` (Blas.cpp): the result's layout says how the operands are read."""
    names = ("batch1", "batch2") if "batch1" in call.arguments else ("self", "mat2")
    left, right, out = (*map(call.__getitem__, names), call.result)
    if {left.dim(), right.dim(), out.dim()} != {3} or not (left.numel() and right.numel() and out.numel()):
        return NONE
    transposed = not (out.stride(1) == 1 and (out.shape[2] == 1 or out.stride(2) >= max(1, out.shape[1])))
    lead = 1 if transposed else 2
    first, second = (right, left) if transposed else (left, right)
    rows, columns, inner = out.shape[2 if transposed else 1], out.shape[lead], first.shape[lead]
    return after((_batch_matrix(first, transposed, rows, inner), _batch_matrix(second, transposed, inner, columns)))


def _batch_matrix(tensor: Tensor, transposed: bool, rows: int, columns: int) -> int:
    """`prepare_batch_matrix_for_cublas` (Blas.cpp): a copy of matrices that cuBLAS could not step through."""
    _, down, across = tensor.stride()
    if steps_of((rows, columns), (across, down) if transposed else (down, across)):
        return 0
    return 0 if tensor.is_contiguous() and down and across else nbytes(tensor)


@RULES.of("_euclidean_dist")
def _euclidean_dist(call: CudaCall) -> Scratch:
    """`_euclidean_dist` (aten/src/ATen/native/Distance.cpp): both sets widened by their norms and ones."""
    left, right = call["x1"], call["x2"]
    if not (left.dim() and right.dim()):
        return NONE
    sides = [(nbytes(x), nbytes(x) // x.shape[-1] if x.shape[-1] else 0) for x in (left, right)]
    (first, norms), (second, others) = sides
    ends = (norms, norms, others, others)
    wide = first + 2 * norms, second + 2 * others
    before = ((first, norms), (norms, norms, second, others), (*ends, first, wide[0]), (*ends, *wide))
    return Scratch(before=moments(before), after=moments((wide,)))


@RULES.of("_pdist_backward")
def _pdist_backward(call: CudaCall) -> Scratch:
    """`pdist_backward_kernel_impl` (DistanceKernel.cu): what each pair adds, then its sum."""
    x = call["self"]
    if x.dim() != 2 or x.shape[0] < 2 or not x.numel():
        return NONE
    rows, width = x.shape
    layout = TensorLayout.contiguous((rows - 1, rows, width), x.element_size())
    reduced = reduction(layout, frozenset({0}), accumulator_bytes(x), call.target)
    return after(((rows - 1) * nbytes(x), *reduced))


@RULES.of("_cdist_backward")
def _cdist_backward(call: CudaCall) -> Scratch:
    """`cdist_backward_kernel_impl` (DistanceKernel.cu): what each pair adds, then its sum."""
    left, right = call["x1"], call["x2"]
    if left.dim() < 2 or right.dim() < 2:
        return NONE
    rows, others, width = left.shape[-2], right.shape[-2], left.shape[-1]
    batch = call.result.numel() // max(1, rows * width)
    layout = TensorLayout.contiguous((batch, others, rows, width), left.element_size())
    reduced = reduction(layout, frozenset({1}), accumulator_bytes(left), call.target)
    pairs = batch * others * rows * width * left.element_size()
    return after((copy_bytes(call.first), copy_bytes(left), copy_bytes(right), pairs, *reduced))


# -- losses and softmax


def _shrunk_loss(call: CudaCall, *, in_result: bool = False) -> Scratch:
    """Losses whose result was allocated for all elements, and then shrunk: its storage stays.

    `mse_loss_out` and `smooth_l1_loss_out` (aten/src/ATen/native/Loss.cpp) have all losses in another tensor;
    `soft_margin_loss_out` and `binary_cross_entropy_out_cuda` (Loss.cu) in the result itself.
    """
    x = call["self"]
    if not call["reduction"] or not x.numel():
        return NONE
    itemsize = call.result.element_size()
    count = broadcast_numel(x, call["target"])
    scratch = itemsize if in_result else count * itemsize
    return after((scratch, *mean_blocks(count, itemsize, call.target)), kept=(count - 1) * itemsize)


RULES.of("mse_loss", "smooth_l1_loss")(_shrunk_loss)
RULES.of("soft_margin_loss", "binary_cross_entropy")(partial(_shrunk_loss, in_result=True))


@RULES.of("soft_margin_loss_backward")
def _soft_margin_backward(call: CudaCall) -> Scratch:
    """`soft_margin_loss_backward_out` (aten/src/ATen/native/Loss.cpp): the powers, of a product with the target."""
    size = broadcast_numel(call["self"], call["target"]) * call.result.element_size()
    return after((size, size), (size,))


@RULES.of("huber_loss", "binary_cross_entropy_with_logits")
def _mean_loss(call: CudaCall) -> Scratch:
    """Two losses in aten/src/ATen/native/Loss.cpp: log-sigmoids of logits; if reduced, all losses, then their mean."""
    x = call["self"]
    sigmoids = nbytes(x) if "pos_weight" in call.arguments else 0
    mean = mean_blocks(x.numel(), call.result.element_size(), call.target)
    return after((sigmoids, nbytes(x), *mean) if call["reduction"] else (sigmoids,))


# `nll_loss_forward_out_cuda_template` and `nll_loss_backward_out_cuda_template` (Loss.cu, NLLLoss2d.cu)
RULES.of("nll_loss_forward", "nll_loss2d_forward")(copies_of("self", "target", "weight"))
RULES.of("nll_loss_backward", "nll_loss2d_backward")(copies_of("target", "weight"))
# `host_softmax` and `host_softmax_backward` (SoftMax.cu)
RULES.of("_softmax", "_log_softmax")(copies_of("self"))
RULES.of("_log_softmax_backward_data")(copies_of("grad_output", "output"))


@RULES.of("_softmax_backward_data")
def _softmax_backward(call: CudaCall) -> Scratch:
    """`softmax_backward_cuda_out` (SoftMax.cu): ``grad * output``, which `host_softmax_backward` makes contiguous."""
    grad, output = call["grad_output"], call["output"]
    product = grad.numel() * max(grad.element_size(), output.element_size())
    turned = product if is_non_overlapping_and_dense(grad) and copy_bytes(grad) else 0
    return after((product, turned, copy_bytes(output)))


@RULES.of("_ctc_loss", "_ctc_loss_backward")
def _ctc_loss(call: CudaCall) -> Scratch:
    """`ctc_loss_gpu_template` and `ctc_loss_backward_gpu_template` (LossCTC.cu): lengths and offsets of each sample.

    The backward pass takes its variables too, as large as the forward ones.
    """
    log_alpha, losses = call.get("log_alpha"), call.get("neg_log_likelihood")
    lengths = (call.result if losses is None else losses).numel() * LONG
    variables = 0 if log_alpha is None else nbytes(log_alpha)
    return after((copy_bytes(call["targets"]), variables, lengths, lengths, lengths))


# -- pooling, resizing, padding: copies of layout

# Pooling takes its tensors in the layout of the pooled one (``suggest_memory_format``).
RULES.of("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d")(copies_of("self", like="self"))
RULES.of("max_pool2d_with_indices_backward")(copies_of("grad_output", "self", "indices", like="self"))
RULES.of("max_pool3d_with_indices")(copies_of("self", like="self"))
RULES.of("max_pool3d_with_indices_backward")(copies_of("grad_output", "indices", like="self"))
RULES.of("max_unpool2d")(copies_of("self", "indices"))
RULES.of("avg_pool2d_backward")(copies_of("grad_output", "self", like="self"))
RULES.of("_adaptive_avg_pool2d_backward")(copies_of("grad_output", like="self"))

# The rest make their first argument contiguous.
RULES.of("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")(copies_of("self"))
RULES.of("avg_pool3d", "_adaptive_avg_pool3d")(copies_of("self"))
RULES.of("adaptive_max_pool3d", "upsample_nearest1d")(copies_of("self"))
RULES.of("avg_pool3d_backward")(copies_of("grad_output"))
RULES.of("_adaptive_avg_pool3d_backward")(copies_of("grad_output"))
RULES.of("adaptive_max_pool3d_backward", "upsample_nearest1d_backward")(copies_of("grad_output"))
RULES.of("upsample_nearest3d_backward", "upsample_linear1d_backward")(copies_of("grad_output"))
RULES.of("upsample_bicubic2d_backward")(copies_of("grad_output"))
RULES.of("_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward")(copies_of("grad_output"))
RULES.of("reflection_pad1d_backward", "reflection_pad2d_backward")(copies_of("grad_output"))
RULES.of("replication_pad2d_backward")(copies_of("grad_output"))


@RULES.of("roll")
def _roll(call: CudaCall) -> Scratch:
    """`roll_cuda` (TensorTransformations.cu): one dimension after the other, each to a tensor that stays."""
    x = call["self"]
    more = max(0, len(call["dims"]) - 1)
    return after((copy_bytes(x), *(nbytes(x),) * more))


@RULES.of("im2col", "col2im")
def _columns(call: CudaCall) -> Scratch:
    """`im2col_cuda` (Im2Col.cu) and `col2im_cuda` (Col2Im.cu): the result begins as large as the input.

    If it is smaller, it keeps that storage. Seen in 2.11 to 2.15.
    """
    x, result = call["self"], call.result
    more = nbytes(x) - nbytes(result)
    return after((nbytes(x) if more < 0 else 0, copy_bytes(x)), kept=max(0, more))


@RULES.of("adaptive_max_pool2d", "adaptive_max_pool2d_backward")
def _adaptive_max_pool(call: CudaCall) -> Scratch:
    """`adaptive_max_pool2d_out_cuda` (AdaptiveMaxPooling2d.cu) and its backward pass: all are made contiguous."""
    inputs = [call.arguments[name] for name in ("self", "grad_output", "indices") if name in call.arguments]
    if "grad_output" in call.arguments:
        inputs = inputs[1:]
    return after([copy_bytes(each) for each in (*call.results, *inputs)])


@RULES.of("affine_grid_generator")
def _affine_grid(call: CudaCall) -> Scratch:
    """`affine_grid_generator` (aten/src/ATen/native/AffineGridGenerator.cpp): the grid that is moved."""
    theta, result = call["theta"], call.result
    if not result.numel() or not result.dim():
        return NONE
    return after((result.numel() // result.shape[-1] * (result.shape[-1] + 1) * theta.element_size(),))


@RULES.of("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
def _smoothed(call: CudaCall) -> Scratch:
    """`upsample_gen2d_aa_out_cuda_template` (UpSampleBilinear2d.cu): both sides are made contiguous."""
    return after((copy_bytes(call.result), copy_bytes(call.first)))


@RULES.of("upsample_nearest2d", "upsample_nearest2d_backward", "upsample_bilinear2d_backward")
def _resized(call: CudaCall) -> Scratch:
    """`upsample_nearest2d_out_cuda_template` (UpSampleNearest2d.cu) and its backward pass, and that of bilinear.

    Channels last has a kernel of its own from four channels on; else both sides are made contiguous.
    """
    x, y = call.first, call.result
    if is_channels_last(x) and is_channels_last(y) and x.shape[1] >= 4:
        return NONE
    return after((copy_bytes(x), copy_bytes(y)))


@RULES.of("upsample_trilinear3d_backward")
def _resized_linearly(call: CudaCall) -> Scratch:
    """`upsample_trilinear3d_backward_out_cuda_template` (UpSampleTrilinear3d.cu): both sides are made contiguous."""
    return after((copy_bytes(call.first), copy_bytes(call.result)))


@RULES.of("upsample_nearest3d", "_upsample_nearest_exact3d")
def _resized_volume(call: CudaCall) -> Scratch:
    """`upsample_nearest3d_out_cuda_template` (UpSampleNearest3d.cu): both sides are made contiguous."""
    return after((copy_bytes(call.result), copy_bytes(call.first)))


# -- lists of tensors

_CHUNK = 65_536  # `kChunkSize` in MultiTensorApply.cuh


def _foreach_partials(call: CudaCall, itemsize: int) -> Scratch:
    """Return the partial results: for every tensor as many as the longest has chunks.

    From 2.15 on, as many as each has, and where they begin (seen in 2.15, not in 2.14).
    """
    tensors = call["self"]
    chunks = [-(-tensor.numel() // _CHUNK) for tensor in tensors]
    if is_torch(2, 15):
        return after(((len(tensors) + 1) * LONG, sum(chunks) * itemsize))
    return after((len(tensors) * max(chunks, default=0) * itemsize,))


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
    return after((copy, Range(0, size, 2 * size))) if size else NONE


# -- copies between devices


@RULES.of("copy_")
def _copy(call: CudaCall) -> Scratch:
    """`copy_kernel_cuda` (Copy.cu): none on one device; between host and device, copies of what is not contiguous."""
    target, source = call["self"], call["src"]
    if is_on_host(target) == is_on_host(source):
        return NONE
    alike = target.dtype == source.dtype and target.shape == source.shape
    if alike and target.stride() == source.stride() and is_non_overlapping_and_dense(target):
        return NONE
    if not is_on_host(target):
        return after((copy_bytes(target),))
    return after((nbytes(target) if source.dtype != target.dtype else copy_bytes(source),))
