"""Matrix products on the CPU: copies of strided operands, and the scratchpads of oneDNN in half precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from lightning_memguard.core.kernels import onednn
from lightning_memguard.core.kernels.arguments import CpuCall, Rules, after
from lightning_memguard.core.kernels.layout import contiguous_strides, is_ordered, steps_of
from lightning_memguard.core.trace.scratch import FLOAT, NONE, CpuTarget, Scratch, Tensor, nbytes

RULES = Rules[CpuTarget]()
_Layout = tuple[Sequence[int], Sequence[int]]  # sizes and strides
_FACTORS = ("mat1 mat2", "batch1 batch2", "mat vec", "self mat2", "self vec", "self tensor")
_SMALL = 16 * 16 * 16  # multiplications: fewer are not worth oneDNN (`mkldnn_gemm`, `checksize`)


def half_kind(tensor: Tensor, host: CpuTarget) -> onednn.Kind | None:
    """The type that oneDNN computes in (`use_mkldnn_bf16_matmul` and `..._fp16_...` in mkldnn/Matmul.cpp)."""
    if not tensor.is_floating_point() or tensor.element_size() != FLOAT // 2:
        return None
    kind: onednn.Kind = "bf16" if "bfloat16" in str(tensor.dtype) else "f16"
    return kind if (host.bf16 if kind == "bf16" else host.fp16) else None


def _scratchpad(
    kind: onednn.Kind, layouts: Iterable[_Layout], alpha: float, beta: float, host: CpuTarget
) -> tuple[int, int]:
    """`mkldnn_gemm` and `mkldnn_matmul` (aten/src/ATen/native/mkldnn/Matmul.cpp): scratchpad, and alpha as a tensor."""
    x, weight, y = (onednn.Matrix(tuple(shape), tuple(stride), kind, fixed=True) for shape, stride in layouts)
    taken = onednn.matmul(x, weight, y, float(alpha), float(beta), host.threads)
    return (taken.scratchpad if taken else 0), (FLOAT if alpha != 1 else 0)


def _factors(call: CpuCall) -> tuple[Tensor, Tensor, float, float]:
    """The factors, by their names in the schema, and what the product and the sum are scaled by."""
    left, right = next(names for names in map(str.split, _FACTORS) if call.arguments.keys() >= {*names})
    alpha, beta = (1, 0) if left == "self" else (call["alpha"], call["beta"])
    return call[left], call[right], alpha, beta


def product_bytes(like: Tensor, left: _Layout, right: _Layout, alpha: float, host: CpuTarget) -> int:
    """Scratch of `gemm` (CPUBlas.cpp) for a product in half precision that is added to a contiguous result."""
    kind = half_kind(like, host)
    (rows, inner), columns = left[0], right[0][1]
    if kind is None or rows * inner * columns <= _SMALL:
        return 0
    result = (rows, columns), (columns * like.shape[1], 1)
    return sum(_scratchpad(kind, (left, right, result), alpha, 1, host))


@RULES.of("mm", "addmm", "addmm_")
def _product(call: CpuCall) -> Scratch:
    """`addmm_impl_cpu_` (aten/src/ATen/native/LinearAlgebra.cpp), and `gemm` (CPUBlas.cpp) in half precision."""
    left, right, alpha, beta = _factors(call)
    if left.dim() != 2 or not left.numel() or not right.numel():
        return NONE
    lines = [steps_of(tensor.shape, tensor.stride()) for tensor in (left, right)]
    copies = [0 if line else nbytes(tensor) for line, tensor in zip(lines, (left, right), strict=True)]
    (rows, inner), columns = left.shape, right.shape[1]
    kind = half_kind(left, call.target)
    if kind is None or rows * inner * columns <= _SMALL or not alpha:
        return after(copies)
    strides = [line or contiguous_strides(tensor.shape) for line, tensor in zip(lines, (left, right), strict=True)]
    layouts: list[_Layout] = [(left.shape, strides[0]), (right.shape, strides[1]), ((rows, columns), (columns, 1))]
    if columns == 1:  # the result is a column as it is a row: the product of the transposed
        layouts = [_transposed(layouts[place]) for place in (1, 0, 2)]
    return after((*copies, *_scratchpad(kind, layouts, alpha, beta, call.target)))


def _transposed(layout: _Layout) -> _Layout:
    """With strides as `normalize_last_dims` (aten/src/ATen/native/CPUBlas.cpp) leaves them."""
    (rows, columns), (down, across) = layout
    return (columns, rows), (rows, 1) if columns == 1 else (across, down)


@RULES.of("bmm", "baddbmm", "baddbmm_", "mv", "addmv", "addmv_", "dot")
def _batched(call: CpuCall) -> Scratch:
    """`mkldnn_matmul` (aten/src/ATen/native/mkldnn/Matmul.cpp), in half precision alone."""
    left, right, alpha, beta = _factors(call)
    kind = half_kind(left, call.target)
    work = left.numel() * (right.shape[-1] if right.dim() > 1 else 1)
    if left.dim() == 3 and (kind is None or work <= _SMALL):
        return after(_single_copies(left, right))
    if kind is None or work <= _SMALL or not alpha:
        return NONE
    x, copy = _operand(left, row=True)
    weight, other_copy = _operand(right, row=False)
    shape = (*x[0][:-1], weight[0][-1])
    layouts = (x, weight, (shape, contiguous_strides(shape)))
    return after((copy, other_copy, *_scratchpad(kind, layouts, alpha, beta, call.target)))


def _single_copies(left: Tensor, right: Tensor) -> list[int]:
    """`bmm_out_or_baddbmm_` (LinearAlgebra.cpp): matrices that BLAS cannot read are multiplied, and copied, singly."""
    if left.shape[0] == 0 or left[0].numel() * right.shape[-1] < 400:
        return []
    return [
        0 if steps_of(tensor.shape[1:], tensor.stride()[1:]) else nbytes(tensor) // tensor.shape[0]
        for tensor in (left, right)
    ]


def _operand(tensor: Tensor, *, row: bool) -> tuple[_Layout, int]:
    """A matrix, and bytes of its copy: none where it is contiguous or transposed (`is_mkldnn_optimized_format`)."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    if len(shape) == 1:
        shape, stride = ((1, *shape), (shape[0] * stride[0], *stride)) if row else ((*shape, 1), (*stride, 1))
    is_dense = is_ordered(shape, stride)
    turned = (math.prod(shape[-2:]),) * (len(shape) - 2) + (1, shape[-2])
    if not is_dense and stride == turned:
        return (shape, turned), 0
    return (shape, contiguous_strides(shape)), 0 if is_dense else nbytes(tensor)
