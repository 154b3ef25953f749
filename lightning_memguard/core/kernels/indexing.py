"""Embeddings and indexing on CUDA, whose gradients are summed by sorting the indices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lightning_memguard.core.kernels.arguments import (
    CudaCall,
    Rules,
    after,
    dimension,
    dtype_of,
    is_on_host,
    moments,
    operands,
)
from lightning_memguard.core.kernels.layout import LONG, accumulator_bytes, broadcast_numel, copies_of, copy_bytes
from lightning_memguard.core.kernels.sorting import radix_sort, reduce_all, scan, select
from lightning_memguard.core.range import Range
from lightning_memguard.core.trace.scratch import FLOAT, NONE, Block, CudaTarget, Scratch, Tensor, nbytes

RULES = Rules[CudaTarget]()


# -- embeddings

# `embedding_symint` (aten/src/ATen/native/Embedding.cpp): ``indices.reshape(-1)``
RULES.of("embedding")(copies_of("indices"))


@RULES.of("embedding_dense_backward")
def _embedding_backward(call: CudaCall) -> Scratch:
    """`embedding_dense_backward_cuda` (Embedding.cu): by sorting from 3073 indices on, else without."""
    grad, indices, by_frequency = call["grad_output"], call["indices"], call["scale_grad_by_freq"]
    copies, count, index = (copy_bytes(indices), copy_bytes(grad)), indices.numel(), indices.element_size()
    if (count <= 3072 and not by_frequency) or call.result.dim() != 2:
        return after(copies)
    counts = (*copies, *(count * index,) * 3, select(count, call.target)) if by_frequency else ()
    return _sum_by_sorting(call, grad, copies, counts)


@RULES.of("_embedding_bag_backward", "_embedding_bag_dense_backward")
def _embedding_bag_backward(call: CudaCall) -> Scratch:
    """`embedding_bag_backward_cuda_sum_avg` (EmbeddingBag.cu); the maximum's gradient takes nothing."""
    grad, indices = call["grad"], call["indices"]
    if call.get("sparse"):
        return NONE
    if call["mode"] == 2 or not indices.numel() or call.result.dim() != 2:  # 2 is the maximum
        return after((copy_bytes(grad),))
    return _sum_by_sorting(call, grad, (copy_bytes(grad), copy_bytes(indices)))


def _sum_by_sorting(call: CudaCall, grad: Tensor, copies: tuple[int, ...], counts: tuple[Block, ...] = ()) -> Scratch:
    """`embedding_backward_cuda_kernel` (EmbeddingBackwardKernel.cu), after the indices are sorted with their places.

    Ten rows of one index are summed at a time, and those sums are added up.
    """
    indices, gpu = call["indices"], call.target
    count, index = indices.numel(), indices.element_size()
    rows, width = call.result.shape
    places: tuple[Block, ...] = (*copies, count * index, count * index)
    sort = (*places, count * index, radix_sort(count, index, index, gpu))
    segments = min(count, rows)
    pieces = count // 10 + segments
    held = (*places, count * index if call["scale_grad_by_freq"] else 0, count * index, LONG)
    starts = (*held, segments * index, segments * index)
    chosen = (*held, count * index, select(count, gpu))
    sums = (*starts, LONG, pieces * index, pieces * width * accumulator_bytes(grad))
    return Scratch(before=moments((sort, counts)), after=moments((chosen, (*starts, scan(segments, index)), sums)))


# -- indexing


def _is_mask(tensor: Tensor) -> bool:
    return dtype_of(tensor) in ("bool", "uint8")


@RULES.of("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _index_put(call: CudaCall) -> Scratch:
    """`index_put_with_sort_kernel` (Indexing.cu): gradients of indexing, which add up; others are put as they are.

    Indices are joined into one that is sorted with its places; on fewer bits than an int64 has, by the tensor's size.
    A mask's indices are as many as it has ones: anything up to its elements. A number from the host is filled in by the
    mask itself (`canDispatchToMaskedFill` in aten/src/ATen/native/TensorAdvancedIndexing.cpp; seen in 2.11 to 2.15).
    """
    indices, values = list(operands(call["indices"])), call["values"]
    from_host = values.numel() == 1 and is_on_host(values)
    if len(indices) == 1 and _is_mask(indices[0]) and from_host and not call["accumulate"]:
        return NONE
    if not indices or any(map(_is_mask, indices)):
        return _masked(call["self"], indices, call.target)
    if not (call["accumulate"] or call.target.deterministic):
        return NONE
    return after(*_put_by_sorting(call, call["indices"], values))


def _put_by_sorting(call: CudaCall, indices: Sequence[Tensor | None], values: Tensor) -> Iterator[tuple[Block, ...]]:
    """The moments of `index_put_with_sort_kernel`, for one or several tensors of indices."""
    x = call["self"]
    given = [place for place, index in enumerate(indices) if index is not None]
    count = broadcast_numel(*operands(indices))
    apart = given != list(range(given[0], given[-1] + 1))
    others = set(range(x.dim())) - set(given) if apart else range(given[-1] + 1, x.dim())
    sliced = math.prod(x.shape[place] for place in others)
    long = count * LONG
    join = (long,) * (2 if len(given) == 1 else 3)
    expanded = (1 if apart else math.prod(x.shape[: given[0]])) * count * sliced * values.element_size()
    copies = (copy_bytes(x), nbytes(x) if apart else 0)
    placed = 0 if nbytes(values) == expanded and not copy_bytes(values) else expanded
    if not count or not sliced:
        yield (*copies, *join, placed)
    elif nbytes(call.result):
        bits = (max(0, x.numel() - 1) // sliced).bit_length()  # `get_num_bits` (aten/src/ATen/cuda/cub.h)
        sort = radix_sort(count, LONG, LONG, call.target, bits)
        yield (*copies, *join)
        yield (*copies, long, placed, long, long, long, sort)


@RULES.of("index_add", "index_add_")
def _index_add(call: CudaCall) -> Scratch:
    """`index_add_cuda_impl` (Indexing.cu): adds in place; put by sorting if results must not depend on order."""
    x, source = call["self"], call["source"]
    if not call.target.deterministic or not x.dim():
        return NONE
    put = _put_by_sorting(call, [None] * dimension(call["dim"], x) + [call["index"]], source)
    return after(*((nbytes(source), *moment) for moment in put if any(moment)))


def _nonzero_blocks(count: int, gpu: CudaTarget) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Return the blocks that `nonzero_cuda_out_impl` (Nonzero.cu) takes before its result (to count) and after it."""
    return (FLOAT, reduce_all(count, gpu)), (FLOAT, select(count, gpu))


@RULES.of("nonzero")
def _nonzero(call: CudaCall) -> Scratch:
    """`nonzero_cuda_out_impl` (Nonzero.cu)."""
    x = call["self"]
    if not x.numel():
        return NONE
    counted, chosen = _nonzero_blocks(x.numel(), call.target)
    return Scratch(before=moments(((copy_bytes(x), *counted),)), after=moments(((copy_bytes(x), *chosen),)))


def _masked(x: Tensor, indices: Sequence[Tensor], gpu: CudaTarget, chosen: int | None = None) -> Scratch:
    """`expandTensors` (aten/src/ATen/native/IndexingUtils.h): masks become indices of what they choose."""
    masks = [tensor for tensor in indices if _is_mask(tensor) and tensor.numel()]
    if not masks or not x.numel():
        return NONE
    before: list[tuple[Block, ...]] = []
    held: tuple[Block, ...] = ()
    for mask in masks:
        counted, copied = _nonzero_blocks(mask.numel(), gpu)
        places = mask.numel() * mask.dim() * LONG
        size: Block = Range(0, places // 2, places) if chosen is None else chosen * mask.dim() * LONG
        before += [(*held, copy_bytes(mask), *counted), (*held, copy_bytes(mask), size, *copied)]
        held = (*held, size)
    return Scratch(before=moments(before), after=moments((held,)))


@RULES.of("index", "_unsafe_index")
def _index(call: CudaCall) -> Scratch:
    """`index_out` (aten/src/ATen/native/TensorAdvancedIndexing.cpp): masks become indices, which are read in place."""
    x, indices = call["self"], list(operands(call["indices"]))
    if len(indices) != 1 or not _is_mask(indices[0]):
        return _masked(x, indices, call.target)
    sliced = x.numel() // max(1, indices[0].numel())
    return _masked(x, indices, call.target, call.result.numel() // max(1, sliced))


@RULES.of("masked_select")
def _masked_select(call: CudaCall) -> Scratch:
    """`masked_select_out_cuda_impl` (IndexKernel.cpp): indexing by the mask."""
    x, mask = call["self"], call["mask"]
    if not mask.numel():
        return NONE
    counted, chosen = _nonzero_blocks(max(mask.numel(), x.numel()), call.target)
    places = call.result.numel() * max(mask.dim(), x.dim()) * LONG
    copy = nbytes(mask) if mask.shape != x.shape else copy_bytes(mask)
    return Scratch(before=moments(((copy, *counted), (copy, places, *chosen))), after=moments(((places,),)))


@RULES.of("unfold_backward")
def _unfold_backward(call: CudaCall) -> Scratch:
    """`unfold_backward_cuda_kernel` (UnfoldBackwardKernel.cu): a range along the dimension. Seen in 2.11 to 2.15."""
    result = call.result
    return after((result.shape[dimension(call["dim"], result)] * LONG,)) if result.dim() and result.numel() else NONE


@RULES.of("masked_scatter", "masked_scatter_")
def _masked_scatter(call: CudaCall) -> Scratch:
    """`launch_masked_scatter_kernel` (IndexKernel.cu): a running count over the mask."""
    x = call["self"]
    copies = (copy_bytes(x), copy_bytes(call["mask"]), copy_bytes(call["source"]))
    return after((*copies, x.numel() * LONG, scan(x.numel(), LONG)))
