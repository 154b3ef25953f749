"""Matrix products on the CPU: copies of strided operands, and the scratchpads of oneDNN in half precision."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_memguard.core.kernels import onednn
from lightning_memguard.core.kernels.arguments import CpuCall, Rules, after
from lightning_memguard.core.kernels.layout import contiguous_strides
from lightning_memguard.core.trace.scratch import FLOAT, NONE, CpuTarget, Scratch, nbytes

if TYPE_CHECKING:
    from torch import Tensor

RULES = Rules[CpuTarget]()
_SMALL = 16 * 16 * 16  # multiplications: fewer are not worth oneDNN (`mkldnn_gemm`, `checksize`)


def _half(tensor: Tensor, host: CpuTarget) -> onednn.Kind | None:
    """The type that oneDNN computes in (`use_mkldnn_bf16_matmul` and `..._fp16_...` in mkldnn/Matmul.cpp)."""
    if not tensor.is_floating_point() or tensor.element_size() != FLOAT // 2:
        return None
    kind: onednn.Kind = "bf16" if "bfloat16" in str(tensor.dtype) else "f16"
    return kind if (host.bf16 if kind == "bf16" else host.fp16) else None


def _scratchpad(operands: list[onednn.Matrix], alpha: float, beta: float, host: CpuTarget) -> tuple[int, int]:
    """`mkldnn_gemm` and `mkldnn_matmul` (aten/src/ATen/native/mkldnn/Matmul.cpp): scratchpad, and alpha as a tensor."""
    x, weight, y = operands
    taken = onednn.matmul(x, weight, y, float(alpha), float(beta), host.threads)
    return (taken.scratchpad if taken else 0), (FLOAT if alpha != 1 else 0)


def _lines(tensor: Tensor) -> tuple[int, int] | None:
    """Strides of a matrix that BLAS can read, or None where it is copied (`addmm_impl_cpu_`, LinearAlgebra.cpp)."""
    (rows, columns), (down, across) = tensor.shape, tensor.stride()
    if across == 1 and down >= max(1, columns):
        return down, 1
    if down == 1 and across >= max(1, rows):
        return 1, across
    return None


def product_bytes(
    like: Tensor,
    shape: tuple[int, int],
    stride: tuple[int, int],
    other_shape: tuple[int, int],
    other_stride: tuple[int, int],
    alpha: float,
    host: CpuTarget,
) -> int:
    """What `gemm` (CPUBlas.cpp) takes for a product in half precision that is added to a contiguous result."""
    kind = _half(like, host)
    (rows, inner), columns = shape, other_shape[1]
    if kind is None or rows * inner * columns <= _SMALL:
        return 0
    x, weight = onednn.Matrix(shape, stride, kind, True), onednn.Matrix(other_shape, other_stride, kind, True)
    y = onednn.Matrix((rows, columns), (columns * like.shape[1], 1), kind, True)
    return sum(_scratchpad([x, weight, y], alpha, 1, host))


@RULES.of("mm", "addmm", "addmm_")
def _product(call: CpuCall) -> Scratch:
    """`addmm_impl_cpu_` (aten/src/ATen/native/LinearAlgebra.cpp), and `gemm` (CPUBlas.cpp) in half precision."""
    left, right = (call["self"], call["mat2"]) if "mat1" not in call.arguments else (call["mat1"], call["mat2"])
    if left.dim() != 2 or not left.numel() or not right.numel():
        return NONE
    alpha, beta = (call.get("alpha"), call.get("beta")) if "mat1" in call.arguments else (1, 0)
    lines = [_lines(tensor) for tensor in (left, right)]
    copies = [0 if line else nbytes(tensor) for line, tensor in zip(lines, (left, right), strict=True)]
    (rows, inner), columns = left.shape, right.shape[1]
    kind = _half(left, call.target)
    if kind is None or rows * inner * columns <= _SMALL or not alpha:
        return after(copies)
    strides = [line or contiguous_strides(tensor.shape) for line, tensor in zip(lines, (left, right), strict=True)]
    x = onednn.Matrix((rows, inner), tuple(strides[0]), kind, fixed=True)
    weight = onednn.Matrix((inner, columns), tuple(strides[1]), kind, fixed=True)
    y = onednn.Matrix((rows, columns), (columns, 1), kind, fixed=True)
    if columns == 1:  # the result is a column as it is a row: the product of the transposed
        x, weight, y = (_transposed(each) for each in (weight, x, y))
    return after((*copies, *_scratchpad([x, weight, y], alpha, beta or 0, call.target)))


def _transposed(matrix: onednn.Matrix) -> onednn.Matrix:
    """With strides as `normalize_last_dims` (aten/src/ATen/native/CPUBlas.cpp) leaves them."""
    (rows, columns), (down, across) = matrix.shape, matrix.stride
    if columns == 1:
        down, across = 1, rows
    return matrix._replace(shape=(columns, rows), stride=(across, down))


@RULES.of("bmm", "baddbmm", "baddbmm_", "mv", "addmv", "addmv_", "dot")
def _batched(call: CpuCall) -> Scratch:
    """`mkldnn_matmul` (aten/src/ATen/native/mkldnn/Matmul.cpp), in half precision alone."""
    names = {"batch1": "batch2", "mat": "vec"}
    name = next((each for each in names if each in call.arguments), "self")
    other = names.get(name) or next(each for each in ("mat2", "vec", "tensor") if each in call.arguments)
    left, right = call[name], call[other]
    adds = name != "self"
    alpha, beta = (call["alpha"], call["beta"]) if adds else (1, 0)
    kind = _half(left, call.target)
    work = left.numel() * (right.shape[-1] if right.dim() > 1 else 1)
    if left.dim() == 3 and (kind is None or work <= _SMALL):
        return after(_single_copies(left, right))
    if kind is None or work <= _SMALL or not alpha:
        return NONE
    x, copy = _operand(left, kind, row=True)
    weight, other_copy = _operand(right, kind, row=False)
    shape = (*x.shape[:-1], weight.shape[-1])
    y = onednn.Matrix(shape, contiguous_strides(shape), kind, fixed=True)
    return after((copy, other_copy, *_scratchpad([x, weight, y], alpha, beta, call.target)))


def _single_copies(left: Tensor, right: Tensor) -> list[int]:
    """`bmm_out_or_baddbmm_` (LinearAlgebra.cpp): matrices that BLAS cannot read are multiplied, and copied, singly."""
    if left.shape[0] == 0 or left[0].numel() * right.shape[-1] < 400:
        return []
    return [0 if _lines(tensor[0]) else nbytes(tensor) // tensor.shape[0] for tensor in (left, right)]


def _operand(tensor: Tensor, kind: onednn.Kind, *, row: bool) -> tuple[onednn.Matrix, int]:
    """A matrix, and bytes of its copy: none where it is contiguous or transposed (`is_mkldnn_optimized_format`)."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    if len(shape) == 1:
        shape, stride = ((1, *shape), (shape[0] * stride[0], *stride)) if row else ((*shape, 1), (*stride, 1))
    dense = contiguous_strides(shape)
    if all(size == 1 or have == want for size, have, want in zip(shape, stride, dense, strict=True)):
        return onednn.Matrix(shape, dense, kind, fixed=True), 0
    turned = (math.prod(shape[-2:]),) * (len(shape) - 2) + (1, shape[-2])
    if stride == turned:
        return onednn.Matrix(shape, turned, kind, fixed=True), 0
    return onednn.Matrix(shape, dense, kind, fixed=True), nbytes(tensor)
