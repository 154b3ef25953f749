"""Matrix products and distances on CUDA: copies of what cuBLAS cannot read as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_memguard.core.kernels.arguments import CudaCall, Rules, after, moments
from lightning_memguard.core.kernels.cuda_reductions import reduction
from lightning_memguard.core.kernels.layout import (
    TensorLayout,
    accumulator_bytes,
    copy_bytes,
    is_non_overlapping_and_dense,
    steps_of,
)
from lightning_memguard.core.trace.scratch import NONE, CudaTarget, Scratch, nbytes

if TYPE_CHECKING:
    from torch import Tensor

RULES = Rules[CudaTarget]()


@RULES.of("mm", "addmm", "_addmm_activation")
def _mm(call: CudaCall) -> Scratch:
    """`addmm_out_cuda_impl` (Blas.cpp)."""
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
    return after((copy_bytes(call["grad"]), copy_bytes(left), copy_bytes(right), pairs, *reduced))
