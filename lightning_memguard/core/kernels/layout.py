"""How tensors lie in memory: their order of dimensions, and the copies that kernels make to change it.

Memory formats are those of c10/core/MemoryFormat.h and c10/core/Contiguity.h in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from lightning_memguard.core.kernels.arguments import CudaCall, Rule, after
from lightning_memguard.core.trace.scratch import FLOAT, CudaTarget, Scratch, Tensor, nbytes

LONG = 8  # bytes of an int64, the type of indices


def is_ordered(shape: Sequence[int], stride: Sequence[int], *, channels_last: bool = False) -> bool:
    """Whether elements are contiguous in this memory format; channels last is one of 4 or 5 dimensions."""
    count = len(shape)
    if channels_last and count in (4, 5):
        return _is_in_order(shape, stride, _channels_last_order(count))
    return _is_in_order(shape, stride, range(count - 1, -1, -1))


def _channels_last_order(count: int) -> tuple[int, ...]:
    return (1, *range(count - 1, 1, -1), 0)


def _is_in_order(shape: Sequence[int], stride: Sequence[int], order: Iterable[int]) -> bool:
    """Whether elements are contiguous in this order of dimensions, the fastest first."""
    expected = 1
    for dimension in order:
        if shape[dimension] != 1 and stride[dimension] != expected:
            return False
        expected *= shape[dimension]
    return True


def is_non_overlapping_and_dense(tensor: Tensor) -> bool:
    """`is_non_overlapping_and_dense` (c10/core/Contiguity.h): contiguous in some order of its dimensions."""
    shape, stride = tensor.shape, tensor.stride()
    if tensor.numel() < 2:
        return True
    return _is_in_order(shape, stride, sorted(range(len(shape)), key=lambda each: (stride[each], shape[each])))


def suggests_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """`is_channels_last_strides_2d` and `..._3d` (c10/core/MemoryFormat.h), which `suggest_memory_format` follows."""
    if len(shape) not in (4, 5) or stride[1] == 0:
        return False
    least = 0
    for dimension in _channels_last_order(len(shape)):
        if shape[dimension] == 0 or stride[dimension] < least or (dimension == 0 and least == stride[1]):
            return False
        least = stride[dimension] * max(shape[dimension], 1)
    return True


def is_channels_last(tensor: Tensor) -> bool:
    """Whether ``suggest_memory_format`` is channels last."""
    return suggests_channels_last(tensor.shape, tensor.stride())


def copy_bytes(tensor: Tensor | None, *, channels_last: bool = False) -> int:
    """Bytes of what ``contiguous(memory_format)`` allocates: none if the tensor has that format."""
    if tensor is None or not tensor.numel() or is_ordered(tensor.shape, tensor.stride(), channels_last=channels_last):
        return 0
    return nbytes(tensor)


def copies_of(*names: str, like: str | None = None) -> Rule[CudaTarget]:
    """The rule of kernels that begin with ``contiguous()`` of these arguments, in the memory format one suggests."""

    def rule(call: CudaCall) -> Scratch:
        channels_last = like is not None and is_channels_last(call[like])
        return after([copy_bytes(call.get(name), channels_last=channels_last) for name in names])

    return rule


def as_images(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides; a sequence is an image one row high (`view4d` in aten/src/ATen/native/Convolution.cpp)."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    if len(shape) == 3:
        return (*shape[:2], 1, shape[2]), (*stride[:2], shape[2] * stride[2], stride[2])
    return shape, stride


def in_image(values: Sequence[int], x: Tensor, above: int) -> tuple[int, ...]:
    """One number for each dimension of the image; `as_images` puts one above those of a sequence."""
    each = tuple(values) if len(values) > 1 else (*values, 0)[:1] * (x.dim() - 2)
    return (above, *each) if x.dim() == 3 else each


def steps_of(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int] | None:
    """Strides of a matrix that BLAS can step through; None if it copies: one is 1, the other is long enough."""
    (rows, columns), (down, across) = shape, stride
    if across == 1 and down >= max(1, columns):
        return down, 1
    if down == 1 and across >= max(1, rows):
        return 1, across
    return None


_TILE = 60 * 60


def transposing_tile_bytes(source: Tensor) -> int:
    """`copy_transpose_valid` (aten/src/ATen/native/Copy.cpp): a transposed matrix is copied by one square tile."""
    turned = source.dim() == 2 and source.stride() == (1, source.shape[0])
    return _TILE * source.element_size() if turned and source.numel() >= _TILE and not source.is_contiguous() else 0


def is_half(tensor: Tensor) -> bool:
    """Whether numbers are float16 or bfloat16."""
    return tensor.is_floating_point() and tensor.element_size() == 2


def accumulator_bytes(tensor: Tensor) -> int:
    """`acc_type` (aten/src/ATen/AccumulateType.h): bytes of the type that sums are kept in."""
    return max(FLOAT, tensor.element_size()) if tensor.is_floating_point() else tensor.element_size()


@dataclass(frozen=True)
class TensorLayout:
    """A tensor to reduce: strides in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    offset: int = 0

    @staticmethod
    def of(tensor: Tensor, itemsize: int | None = None) -> TensorLayout:
        """A tensor's layout, or that of its copy in another type, which keeps the order if it is dense."""
        if itemsize is not None and not is_non_overlapping_and_dense(tensor):
            return TensorLayout.contiguous(tensor.shape, itemsize)
        offset = 0 if itemsize is not None else int(tensor.storage_offset())
        return TensorLayout(tuple(tensor.shape), tensor.stride(), itemsize or tensor.element_size(), offset)

    @staticmethod
    def contiguous(shape: Sequence[int], itemsize: int) -> TensorLayout:
        """The layout of a new tensor of this shape."""
        return TensorLayout(tuple(shape), contiguous_strides(shape), itemsize)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    return tuple(math.prod(max(size, 1) for size in shape[place:]) for place in range(1, len(shape) + 1))


def broadcast_numel(*tensors: Tensor) -> int:
    """Elements of what these tensors are broadcast to; 0 without any."""
    columns = zip_longest(*(reversed(tensor.shape) for tensor in tensors), fillvalue=1)
    return math.prod(0 if 0 in column else max(column) for column in columns) if tensors else 0
