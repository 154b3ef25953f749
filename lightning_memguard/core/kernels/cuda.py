"""Scratch that CUDA kernels take inside one operator, by operator, each rule with its source in PyTorch.

It comes from the caching allocator: contiguous copies, partial sums of reductions, temporary storage of CUB's sorts
and scans, tensors that a kernel makes for itself. Read in the sources of PyTorch 2.9 to 2.11 and of CCCL 3.0 (CUDA
13.0), whose sizes CUB itself was asked for without a GPU, for compute capability 7.5, 8.0, 9.0, 10.0 and 12.0; none of
this was recorded on a GPU. Paths are those of PyTorch, from aten/src/ATen/native/cuda on unless they begin with aten.

Attention has rules of its own (`lightning_memguard.core.kernels.attention`), and so have recurrent layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from lightning_memguard.core.trace.scratch import FLOAT, NONE, Block, ByteRange, CudaTarget, Moment, Scratch, nbytes, up

Rule = Callable[[Sequence[Any], Mapping[str, Any], Sequence[Any], CudaTarget], Scratch]

LONG = 8  # bytes of an int64, the type of indices


# -- arguments


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage") and hasattr(value, "element_size")


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif _is_tensor(value):
            yield value


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor has strides, and sizes that are known numbers."""
    return (
        not tensor.is_nested
        and str(tensor.layout) == "torch.strided"
        and all(isinstance(size, int) for size in tensor.shape)
    )


def _checked(rule: Rule, needs: int = 1) -> Rule:
    """The door: what is no plain tensor, or comes with fewer of them than the rule needs, has no scratch we know."""

    def checked(args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
        tensors = list(_tensors((*args, *kwargs.values(), *results)))
        enough = len(args) >= needs and all(map(_is_tensor, (*args[:needs], *results)))
        if not enough or not results or not all(map(_is_plain, tensors)):
            return NONE
        return rule(args, kwargs, results, gpu)

    return checked


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _flag(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, *, default: bool = False) -> bool:
    value = _argument(args, kwargs, place, name, default)
    return bool(value) if isinstance(value, int) else default


def _tensor(args: Sequence[Any], place: int) -> Any:
    """An argument that is a tensor, or None."""
    return args[place] if len(args) > place and _is_tensor(args[place]) else None


def _flags(args: Sequence[Any], place: int, count: int) -> list[bool]:
    """Which gradients are asked for (``output_mask``): all, where that is not said."""
    mask = args[place] if len(args) > place and isinstance(args[place], (list, tuple)) else ()
    return [*(bool(flag) for flag in mask), *[True] * count][:count]


def _dimension(value: Any, tensor: Any) -> int:
    dimension = value if isinstance(value, int) else -1
    return dimension % tensor.dim() if tensor.dim() else 0


def _dimensions(value: Any, count: int) -> frozenset[int]:
    """The dimensions that are reduced: all, where none is named."""
    if isinstance(value, int) and not isinstance(value, bool) and count:
        return frozenset({value % count})
    if isinstance(value, (list, tuple)) and value and count:
        return frozenset(dimension % count for dimension in value if isinstance(dimension, int))
    return frozenset(range(count))


# -- moments


def _alive(blocks: Iterable[Block]) -> tuple[Block, ...]:
    return tuple(block for block in blocks if block)


def _moments(moments: Iterable[Iterable[Block]]) -> tuple[Moment, ...]:
    return tuple(alive for alive in map(_alive, moments) if alive)


def _after(*moments: Iterable[Block], kept: int = 0) -> Scratch:
    """Scratch beside the results, moment by moment; blocks of nothing are left out."""
    taken = _moments(moments)
    return Scratch(after=taken, kept=kept) if taken or kept else NONE


# -- layouts


def _ordered(shape: Sequence[int], stride: Sequence[int], order: Iterable[int]) -> bool:
    """Whether elements lie side by side in this order of dimensions, the fastest first."""
    expected = 1
    for dimension in order:
        if shape[dimension] == 1:
            continue
        if stride[dimension] != expected:
            return False
        expected *= shape[dimension]
    return True


def _is_dense(tensor: Any) -> bool:
    """`is_non_overlapping_and_dense` (c10/core/Contiguity.h): contiguous in some order of its dimensions."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if tensor.numel() < 2:
        return True
    by_stride = sorted(range(len(shape)), key=lambda dimension: (stride[dimension], shape[dimension]))
    return _ordered(shape, stride, by_stride)


def _channels_last_order(count: int) -> tuple[int, ...]:
    return (1, *range(count - 1, 1, -1), 0)


def _suggests_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """`is_channels_last_strides_2d` and `..._3d` (c10/core/MemoryFormat.h): what `suggest_memory_format` goes by."""
    if len(shape) not in (4, 5) or stride[1] == 0:
        return False
    least = 0
    for dimension in _channels_last_order(len(shape)):
        if shape[dimension] == 0 or stride[dimension] < least or (dimension == 0 and least == stride[1]):
            return False
        least = stride[dimension] * max(shape[dimension], 1)
    return True


def _is_channels_last(tensor: Any) -> bool:
    return _suggests_channels_last(tuple(tensor.shape), tuple(tensor.stride()))


def _copy(tensor: Any, channels_last: bool = False) -> int:
    """Bytes of what ``contiguous(memory_format)`` makes of a tensor: none where it is so already."""
    if not _is_tensor(tensor):
        return 0
    count = tensor.dim()
    order = _channels_last_order(count) if channels_last and count in (4, 5) else range(count - 1, -1, -1)
    return 0 if not tensor.numel() or _ordered(tensor.shape, tensor.stride(), order) else nbytes(tensor)


def _accumulates(tensor: Any) -> int:
    """`acc_type` (aten/src/ATen/AccumulateType.h): bytes of the type that sums are kept in."""
    return max(FLOAT, tensor.element_size()) if tensor.is_floating_point() else int(tensor.element_size())


# -- CUB's temporary storage


def _aliased(*sizes: int) -> int:
    """`AliasTemporaries` (cub/util_temporary_storage.cuh): several allocations in one, each at 256 bytes."""
    return sum(up(size, 256) for size in sizes) + 255


_RADIX_DIGITS = 256
_RADIX_PORTION = (1 << 28) - 1
_SINGLE_TILE = 2304  # items that one block sorts by itself, with keys or values of eight bytes; 4864 with four

# Items of a tile of `DeviceRadixSort` by bytes of a key, from compute capability 7.5, 8.0 and 9.0 on
# (cub/device/dispatch/tuning/tuning_radix_sort.cuh); none where the older algorithm is taken.
_PAIR_TILES: dict[int, tuple[int, int, int]] = {8: (2816, 3840, 4608), 4: (2816, 3072, 5376), 2: (0, 0, 5632)}
_PAIR_TILES[1] = (0, 0, 3456)
_KEY_TILES: dict[int, tuple[int, int, int]] = {8: (2816, 3840, 5760), 4: (5888, 8064, 6912)}


def _generation(gpu: CudaTarget) -> int:
    """Which of CUB's tunings: from 7.5, from 8.0, from 9.0 on."""
    return min(2, max(0, gpu.compute_capability[0] - 7))


def _radix_sort(count: int, key: int, value: int, gpu: CudaTarget, bits: int | None = None) -> Block:
    """Temporary storage of `DeviceRadixSort` (cub/device/dispatch/dispatch_radix_sort.cuh, `InvokeOnesweep`).

    Histograms, a lookback for each tile, second buffers of keys and values unless one pass is enough, counters.

    Args:
        count: items to sort.
        key: bytes of a key.
        value: bytes of a value; 0 without.
        gpu: what sorts them.
        bits: of a key that are looked at; all, where that is not said.
    """
    if count <= (_SINGLE_TILE if max(key, value) > FLOAT else 2 * _SINGLE_TILE + 256):
        return 1 if count else 0
    passes = -(-(key * 8 if bits is None else max(1, bits)) // 8)
    tile = (_PAIR_TILES if value else _KEY_TILES).get(key, (0, 0, 0))[_generation(gpu)]
    if not tile:
        spine = 5 * (128 if key > 1 else 32) * LONG * gpu.multiprocessors  # `InvokePasses`: digits of each block
        buffers = _aliased(count * key, count * value)
        return ByteRange(buffers + spine, buffers + 4 * spine, buffers + 8 * spine)
    second = count if passes > 1 else 0
    portion = _RADIX_PORTION // tile * tile
    portions = -(-count // portion)
    bins, lookback = portions * passes * _RADIX_DIGITS * LONG, -(-min(count, portion) // tile) * _RADIX_DIGITS * FLOAT
    return _aliased(bins, lookback, second * key, second * value, portions * passes * FLOAT)


def _tile_states(count: int, tile: int, word: int) -> int:
    """`ScanTileState::AllocationSize` (cub/agent/single_pass_scan_operators.cuh): a word for each tile, and 32 more."""
    return up((-(-count // tile) + 32) * word, 256) + 511 if count else 0


def _scan(count: int, itemsize: int) -> int:
    """Temporary storage of `DeviceScan`, whose input is cut at 2^30 (aten/src/ATen/cuda/cub.cuh, `inclusive_scan`)."""
    tile = {1: 3840, 2: 3840, 4: 1920}.get(itemsize, 896)
    return _tile_states(min(count, 1 << 30), tile, {1: 4, 2: 4, 4: 8}.get(itemsize, 16))


def _select(count: int, gpu: CudaTarget) -> int:
    """About the temporary storage of `DeviceSelect`, whose tiles differ by type: within 0.5 % of the items."""
    return _tile_states(count, (320, 1792, 3840)[_generation(gpu)], 16)


def _reduce_all(count: int, gpu: CudaTarget) -> Block:
    """Temporary storage of `DeviceReduce`: past one tile, a sum for each block, at most five times those that fit."""
    if count <= 4096:
        return 1 if count else 0
    each = 5 * FLOAT * gpu.multiprocessors
    return ByteRange(each, 4 * each, 8 * each)


# -- reductions: partial sums where several blocks share an output


@dataclass(frozen=True)
class _Layout:
    """A tensor to reduce: strides in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    offset: int = 0

    @staticmethod
    def of(tensor: Any, itemsize: int | None = None) -> _Layout:
        """A tensor's layout, or that of its copy in another type, which keeps the order where it is dense."""
        shape = tuple(tensor.shape)
        if itemsize is not None and not _is_dense(tensor):
            return _Layout.contiguous(shape, itemsize)
        offset = 0 if itemsize is not None else int(tensor.storage_offset())
        return _Layout(shape, tuple(tensor.stride()), itemsize or int(tensor.element_size()), offset)

    @staticmethod
    def contiguous(shape: Sequence[int], itemsize: int) -> _Layout:
        return _Layout(tuple(shape), _contiguous_strides(shape), itemsize)


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:] if shape else ()):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))[: len(shape)]


class _Loop(NamedTuple):
    """One dimension of a reduction: its size, and the strides of output (0 where reduced) and input."""

    size: int
    out: int
    into: int


def _comes_later(left: _Loop, right: _Loop) -> int:
    """`should_swap` in `TensorIteratorBase::reorder_dimensions` (aten/src/ATen/TensorIterator.cpp)."""
    if (left.out == 0) != (right.out == 0):
        return 1 if right.out == 0 else -1
    for mine, other in ((left.out, right.out), (left.into, right.into)):
        if mine and other:
            if mine != other:
                return 1 if mine > other else -1
            if left.size > right.size:
                return 1
    return 0


def _loops(x: _Layout, reduced: frozenset[int]) -> list[_Loop]:
    """Dimensions as a `TensorIterator` has them: reduced ones first, the fastest first, neighbours merged."""
    kept = [dimension for dimension in range(len(x.shape)) if dimension not in reduced]
    outs = dict(zip(kept, _contiguous_strides([x.shape[dimension] for dimension in kept]), strict=True))
    loops = [_Loop(x.shape[d], outs.get(d, 0), x.stride[d]) for d in reversed(range(len(x.shape)))]
    for start in range(1, len(loops)):
        place = start
        for before in range(start - 1, -1, -1):
            order = _comes_later(loops[before], loops[place])
            if order > 0:
                loops[before], loops[place] = loops[place], loops[before]
                place = before
            elif order < 0:
                break
    return _merged(loops)


def _merged(loops: list[_Loop]) -> list[_Loop]:
    """`TensorIteratorBase::coalesce_dimensions`."""
    merged = loops[:1]
    for loop in loops[1:]:
        last = merged[-1]
        follows = last.size * last.out == loop.out and last.size * last.into == loop.into
        if last.size == 1:
            merged[-1] = loop
        elif loop.size == 1 or follows:
            merged[-1] = last._replace(size=last.size * loop.size)
        else:
            merged.append(loop)
    return merged


_INT_MAX = (1 << 31) - 1


def _reduction(
    x: _Layout, reduced: frozenset[int], accumulator: int, gpu: CudaTarget, vector: int = 4, out: int | None = None
) -> tuple[int, ...]:
    """`gpu_reduce_kernel` (Reduce.cuh): partial results and semaphores, where several blocks share an output.

    An input past 2 GiB is reduced in halves; where results are no place to add up in (`AccumulationBuffer`), there is
    one for all halves.

    Args:
        x: what is reduced.
        reduced: its dimensions that go.
        accumulator: bytes of a partial result.
        gpu: what reduces it.
        vector: elements that one thread reads at once.
        out: bytes of a result; the accumulator's where not said.
    """
    if not math.prod(x.shape):
        return ()
    loops, halved = _loops(x, reduced), False
    while 1 + sum((loop.size - 1) * loop.into * x.itemsize for loop in loops) > _INT_MAX:
        far = max(range(len(loops)), key=lambda place: (loops[place].size - 1) * loops[place].into)
        loops[far] = loops[far]._replace(size=loops[far].size - loops[far].size // 2)
        halved = True
    config = _config(loops, x, gpu, vector)
    outputs = math.prod(x.shape[d] for d in range(len(x.shape)) if d not in reduced)
    shared = outputs * accumulator if halved and out is not None and out < accumulator else 0
    partial_results = accumulator * config.results
    semaphores = FLOAT * config.blocks if config.results else 0
    return tuple(size for size in (shared, partial_results, semaphores) if size)


class _Config(NamedTuple):
    """How a reduction is shared out: partial results in all, and blocks side by side."""

    results: int
    blocks: int


def _last_power(value: int) -> int:
    return 1 << (max(1, value).bit_length() - 1)


def _config(loops: list[_Loop], x: _Layout, gpu: CudaTarget, vector: int) -> _Config:
    """`setReduceConfig` (Reduce.cuh).

    Where the output's fastest dimension is the input's too, each partial result has room for a whole block of threads
    (`global_memory_size`): over 100 MB on large GPUs, as for the sum over rows that a bias' gradient is.
    """
    outputs = math.prod(loop.size for loop in loops if loop.out)
    inputs = math.prod(loop.size for loop in loops) // max(1, outputs)
    count = sum(loop.out == 0 for loop in loops)
    by_input = count == len(loops) or loops[0].into < loops[count].into
    wide, high = (inputs, outputs) if by_input else (outputs, inputs)
    fastest = 1 if not loops else loops[0].into if by_input else loops[count].into
    many = 1
    if fastest == 1 and by_input and count == 1 and wide >= 128:
        wide //= vector
    elif fastest == 1 and not by_input:
        many = _output_vector(loops, count, x.offset)
        wide //= many
    width, height = _block(wide, high, 512 // many)
    step = width if by_input else 1
    columns = 1 if by_input else width
    if -(-inputs // step) < min(16 * height, 256):
        return _Config(0, 0)
    step *= height
    each = -(-inputs // step)
    blocks = -(-(outputs // many) // columns)
    target = gpu.multiprocessors * (_threads(gpu) // (width * height))
    if each < 256 or blocks > target:
        return _Config(0, 0)
    shares = max(min(-(-target // blocks), -(-each // 16)), -(-each // 256))
    if shares < 2:
        return _Config(0, 0)
    return _Config(outputs * shares * (1 if by_input else width * many), blocks)


def _block(wide: int, high: int, most: int) -> tuple[int, int]:
    """`ReduceConfig::set_block_dimension`: threads along the fastest dimension, and across it."""
    wide = _last_power(wide) if wide < most else most
    high = _last_power(high) if high < most else most
    height = min(high, most // min(wide, 32))
    return min(wide, most // height), height


def _output_vector(loops: list[_Loop], count: int, offset: int) -> int:
    """`get_output_vec_size`: outputs that one thread reads side by side."""
    strides = [loop.into for place, loop in enumerate(loops) if place != count]
    size = 4
    for value in (offset, loops[count].size, *strides):
        while value % size:
            size //= 2
    return size


def _threads(gpu: CudaTarget) -> int:
    """Threads that a multiprocessor holds (CUDA C++ Programming Guide, technical specifications)."""
    major, minor = gpu.compute_capability
    if (major, minor) == (7, 5):
        return 1024
    return 1536 if (major == 8 and minor) or major in (11, 12) else 2048


def _is_half(tensor: Any) -> bool:
    return bool(tensor.is_floating_point()) and tensor.element_size() == 2


def _cast(x: Any, result: Any) -> int:
    """`make_reduction_from_out_ty` (aten/src/ATen/native/ReduceOpsUtils.h): a copy in the result's type.

    Half precision is added up into float32 as it is read; a mask that is counted becomes int64.
    """
    if x.dtype == result.dtype or (_is_half(x) and result.is_floating_point() and result.element_size() == FLOAT):
        return 0
    return int(x.numel() * result.element_size())


def _summed(x: Any, result: Any, dims: frozenset[int], gpu: CudaTarget) -> tuple[Block, ...]:
    """Blocks of a sum, or of what is alike: the copy in the result's type, and partial sums."""
    cast = _cast(x, result)
    layout = _Layout.of(x, result.element_size() if cast else None)
    accumulator = _accumulates(result if cast else x)
    return (cast, *_reduction(layout, dims, accumulator, gpu, out=result.element_size()))


def _sum(
    args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget, place: int = 1
) -> Scratch:
    """`sum_functor` and its kin (ReduceSumProdKernel.cu, ReduceMomentKernel.cu, ReduceNormKernel.cu)."""
    x = args[0]
    dims = _dimensions(_argument(args, kwargs, place, "dim"), x.dim())
    return _after(_summed(x, results[0], dims, gpu))


def _moments_of(args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`std_var_kernel_impl` (ReduceMomentKernel.cu): `WelfordData`, two elements read at once."""
    x = args[0]
    accumulator = 32 if _accumulates(x) > FLOAT else 16
    dims = _dimensions(_argument(args, kwargs, 1, "dim"), x.dim())
    return _after(_reduction(_Layout.of(x), dims, accumulator, gpu, 2, results[0].element_size()))


def _extreme(args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`max_launch_kernel` and its kin (ReduceMaxValuesKernel.cu, ReduceArgMaxKernel.cu): a value, or with its index."""
    x = args[0]
    if _tensor(args, 1) is not None:
        return NONE  # the larger of two tensors
    has_index = len(results) > 1 or results[0].dtype != x.dtype
    dims = _dimensions(_argument(args, kwargs, 1, "dim"), x.dim())
    accumulator = 16 if has_index else x.element_size()
    return _after(_reduction(_Layout.of(x), dims, accumulator, gpu, out=results[0].element_size()))


def _both_extremes(args: Sequence[Any], kwargs: Mapping[str, Any], _: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`aminmax_kernel` (ReduceAMinMaxKernel.cu): the smallest and the largest side by side."""
    x = args[0]
    dims = _dimensions(_argument(args, kwargs, 1, "dim"), x.dim())
    return _after(_reduction(_Layout.of(x), dims, 2 * x.element_size(), gpu, out=x.element_size()))


def _logical(args: Sequence[Any], kwargs: Mapping[str, Any], _: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`and_kernel_cuda` and `or_kernel_cuda` (ReduceLogicKernel.cu): the input is read in its own type."""
    x = args[0]
    return _after(_reduction(_Layout.of(x), _dimensions(_argument(args, kwargs, 1, "dim"), x.dim()), 1, gpu))


def _count_nonzero(args: Sequence[Any], kwargs: Mapping[str, Any], _: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`count_nonzero_cuda` (aten/src/ATen/native/TensorAdvancedIndexing.cpp): ``(self != 0).sum(dims)``."""
    x = args[0]
    dims = _dimensions(_argument(args, kwargs, 1, "dim"), x.dim())
    layout = _Layout.of(x, LONG)
    return _after((x.numel(), x.numel() * LONG, *_reduction(layout, dims, LONG, gpu)))


def _logsumexp(args: Sequence[Any], kwargs: Mapping[str, Any], _: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`logsumexp_out_impl` (aten/src/ATen/native/ReduceOps.cpp): maxima, and the input shifted by them."""
    x = args[0]
    dims, itemsize = _dimensions(_argument(args, kwargs, 1, "dim"), x.dim()), x.element_size()
    rows = math.prod(x.shape[d] for d in range(x.dim()) if d not in dims)
    maxima = rows * itemsize if x.numel() else 0
    layout = _Layout.of(x)
    shifted = _Layout.of(x, itemsize)
    return _after(
        (maxima, *_reduction(layout, dims, itemsize, gpu)),
        (maxima, maxima, rows),
        (maxima, nbytes(x), *_reduction(shifted, dims, _accumulates(x), gpu, out=itemsize)),
    )


# -- embeddings, and gradients of indexing, by sorting


def _bits(largest: int) -> int:
    """`get_num_bits` (aten/src/ATen/cuda/cub.h)."""
    return max(1, largest.bit_length())


def _by_segments(
    count: int, index: int, rows: int, width: int, grad: Any, gpu: CudaTarget
) -> Iterator[tuple[Block, ...]]:
    """`embedding_backward_cuda_kernel` (EmbeddingBackwardKernel.cu): moments beside the sorted and the old indices.

    Ten rows of one index are summed at a time, and those sums are added up.
    """
    segments = min(count, rows)
    pieces = count // 10 + segments
    offsets = (count * index, LONG)
    yield *offsets, count * index, _select(count, gpu)
    yield *offsets, segments * index, segments * index, _scan(segments, index)
    sums = pieces * width * _accumulates(grad)
    yield *offsets, segments * index, segments * index, LONG, pieces * index, sums


def _embedding_backward(
    args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget
) -> Scratch:
    """`embedding_dense_backward_cuda` (Embedding.cu): by sorting from 3073 indices on, else without."""
    grad, indices = args[:2]
    by_frequency = _flag(args, kwargs, 4, "scale_grad_by_freq")
    copies, count, index = (_copy(indices), _copy(grad)), indices.numel(), indices.element_size()
    if (count <= 3072 and not by_frequency) or results[0].dim() != 2:
        return _after(copies)
    rows, width = results[0].shape
    held: tuple[Block, ...] = (*copies, count * index, count * index)
    sort = (*held, count * index, _radix_sort(count, index, index, gpu))
    counts = ((*held, count * index, _select(count, gpu)),) if by_frequency else ()
    held = (*held, count * index) if by_frequency else held
    after = (held + moment for moment in _by_segments(count, index, rows, width, grad, gpu))
    return Scratch(before=_moments((sort, *counts)), after=_moments(after))


def _embedding_bag_backward(
    args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget
) -> Scratch:
    """`embedding_bag_backward_cuda_sum_avg` (EmbeddingBag.cu); the maximum's gradient takes nothing."""
    grad, indices = args[:2]
    mode = args[7] if len(args) > 7 else 0
    count, index = indices.numel(), indices.element_size()
    if mode == 2 or not count or results[0].dim() != 2:
        return _after((_copy(grad),))
    rows, width = results[0].shape
    by_frequency = _flag(args, kwargs, 6, "scale_grad_by_freq")
    held: tuple[Block, ...] = (_copy(grad), _copy(indices), count * index, count * index)
    sort = (*held, count * index, _radix_sort(count, index, index, gpu))
    held = (*held, count * index) if by_frequency else held
    after = (held + moment for moment in _by_segments(count, index, rows, width, grad, gpu))
    return Scratch(before=_moments((sort,)), after=_moments(after))


def _embedding(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`embedding_symint` (aten/src/ATen/native/Embedding.cpp): ``indices.reshape(-1)``."""
    return _after((_copy(_tensor(args, 1)),))


def _broadcast(tensors: Sequence[Any]) -> int:
    """Elements of what these tensors are broadcast to."""
    depth = max((tensor.dim() for tensor in tensors), default=0)
    sizes = ([1] * (depth - tensor.dim()) + list(tensor.shape) for tensor in tensors)
    shape = [0 if 0 in column else max(column) for column in zip(*sizes, strict=True)]
    return math.prod(shape) if tensors else 0


def _is_mask(tensor: Any) -> bool:
    return str(tensor.dtype) in ("torch.bool", "torch.uint8")


def _index_put(args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`index_put_with_sort_kernel` (Indexing.cu): gradients of indexing, which add up; others are put as they are.

    Indices are joined into one that is sorted with its places; on fewer bits than an int64 has, by the tensor's size.
    A mask's indices are as many as it has ones: anything up to its elements.
    """
    accumulates = _flag(args, kwargs, 3, "accumulate")
    indices = list(_tensors(args[1])) if len(args) > 1 and isinstance(args[1], (list, tuple)) else []
    values = _tensor(args, 2)
    if not indices or values is None or any(_is_mask(tensor) for tensor in indices):
        return _masked(args[0], indices, gpu)
    if not (accumulates or gpu.deterministic):
        return NONE
    return _put_by_sorting(args[0], args[1], values, results[0], gpu)


def _put_by_sorting(x: Any, indices: Sequence[Any], values: Any, result: Any, gpu: CudaTarget) -> Scratch:
    """The moments of `index_put_with_sort_kernel`, for one to several tensors of indices."""
    given = [place for place, index in enumerate(indices) if _is_tensor(index)]
    count = _broadcast([indices[place] for place in given])
    sliced = math.prod(x.shape[given[-1] + 1 :]) if given else 1
    apart = given != list(range(given[0], given[-1] + 1)) if given else False
    if apart:
        sliced = math.prod(size for place, size in enumerate(x.shape) if place not in given)
    long = count * LONG
    join = (long,) * (2 if len(given) == 1 else 3)
    before = math.prod(x.shape[: given[0]]) if given and not apart else 1
    expanded = before * count * sliced * values.element_size()
    copies = (_copy(x), nbytes(x) if apart else 0)
    placed = 0 if values.numel() * values.element_size() == expanded and not _copy(values) else expanded
    if not count or not sliced:
        return _after((*copies, *join, placed))
    sort = _radix_sort(count, LONG, LONG, gpu, _bits(max(0, x.numel() - 1) // sliced))
    held = (*copies, long, placed)
    moments = ((*copies, *join), (*held, long, long, long, sort))
    return _after(*moments) if nbytes(result) else NONE


def _nonzero_blocks(count: int, gpu: CudaTarget) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Before and after the result of `nonzero_cuda_out_impl` (Nonzero.cu): how many, and which."""
    return (FLOAT, _reduce_all(count, gpu)), (FLOAT, _select(count, gpu))


def _nonzero(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`nonzero_cuda_out_impl` (Nonzero.cu)."""
    count, copy = args[0].numel(), _copy(args[0])
    counted, chosen = _nonzero_blocks(count, gpu)
    if not count:
        return NONE
    return Scratch(before=((copy, *counted) if copy else counted,), after=_moments(((copy, *chosen),)))


def _masked(x: Any, indices: Sequence[Any], gpu: CudaTarget, chosen: int | None = None) -> Scratch:
    """`expandTensors` (aten/src/ATen/native/IndexingUtils.h): masks become indices of what they choose."""
    masks = [tensor for tensor in indices if _is_mask(tensor) and tensor.numel()]
    if not masks or not x.numel():
        return NONE
    before: list[tuple[Block, ...]] = []
    held: tuple[Block, ...] = ()
    for mask in masks:
        counted, copied = _nonzero_blocks(mask.numel(), gpu)
        places = mask.numel() * mask.dim() * LONG
        size: Block = ByteRange(0, places // 2, places) if chosen is None else chosen * mask.dim() * LONG
        before += [(*held, _copy(mask), *counted), (*held, _copy(mask), size, *copied)]
        held = (*held, size)
    return Scratch(before=_moments(before), after=_moments((held,)))


def _index(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`index_out` (aten/src/ATen/native/TensorAdvancedIndexing.cpp): masks become indices, which are read in place."""
    indices = list(_tensors(args[1])) if len(args) > 1 and isinstance(args[1], (list, tuple)) else []
    masks = [tensor for tensor in indices if _is_mask(tensor)]
    if len(masks) != 1 or len(indices) != 1:
        return _masked(args[0], indices, gpu)
    sliced = args[0].numel() // max(1, masks[0].numel())
    return _masked(args[0], indices, gpu, results[0].numel() // max(1, sliced))


def _masked_select(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`masked_select_out_cuda_impl` (IndexKernel.cpp): indexing by the mask."""
    mask = _tensor(args, 1)
    if mask is None or not mask.numel():
        return NONE
    counted, chosen = _nonzero_blocks(max(mask.numel(), args[0].numel()), gpu)
    places = results[0].numel() * max(mask.dim(), args[0].dim()) * LONG
    copy = nbytes(mask) if tuple(mask.shape) != tuple(args[0].shape) else _copy(mask)
    return Scratch(before=_moments(((copy, *counted), (copy, places, *chosen))), after=_moments(((places,),)))


def _masked_scatter(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`launch_masked_scatter_kernel` (IndexKernel.cu): a running count over the mask."""
    x, mask, source = args[0], _tensor(args, 1), _tensor(args, 2)
    held = (_copy(x), _copy(mask), _copy(source), x.numel() * LONG)
    return _after((*held, _scan(x.numel(), LONG)))


def _index_add(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`index_add_cuda_impl` (Indexing.cu): adds in place; put by sorting where results must not depend on order."""
    dimension, index, source = args[1] if len(args) > 1 else 0, _tensor(args, 2), _tensor(args, 3)
    if not gpu.deterministic or index is None or source is None or not args[0].dim():
        return NONE
    indices = [None] * _dimension(dimension, args[0]) + [index]
    put = _put_by_sorting(args[0], indices, source, results[0], gpu)
    scaled = nbytes(source)
    return _after(*((scaled, *(moment if isinstance(moment, tuple) else (moment,))) for moment in put.after))


# -- sorting and scans


def _sort(args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`sort_cuda_kernel` (Sort.cpp) and `launch_stable_sort_kernel` (SortStable.cu).

    Rows up to 4096 are sorted in place of the results; larger ones by CUB, alone or many at once.
    """
    x = args[0]
    dimension = _dimension(args[1] if len(args) > 1 else kwargs.get("dim", -1), x)
    if not x.dim() or not x.numel() or x.shape[dimension] <= 4096:
        return NONE
    copy = 0 if _is_dense(x) and x.stride(dimension) == 1 else nbytes(x)
    same = not copy and tuple(results[0].stride()) == tuple(x.stride())
    held = (copy, 0 if same else nbytes(x), 0 if same else x.numel() * LONG)
    sorts = _sorts(x.numel() // x.shape[dimension], x.shape[dimension], x.element_size(), gpu)
    return _after(*((*held, *moment) for moment in sorts))


def _sorts(rows: int, length: int, key: int, gpu: CudaTarget) -> tuple[tuple[Block, ...], ...]:
    """Moments of `launch_stable_sort_kernel` by the number of rows and their length."""
    if rows == 1 or length >= 1_000_000:
        return ((length * LONG, _radix_sort(length, key, LONG, gpu)),)
    count = min(rows * length, _INT_MAX // length * length)
    if rows < 128:
        places = (count * LONG, count * LONG)
        by_row = _radix_sort(count, LONG, 0, gpu, max(1, (rows - 1).bit_length()))
        return (*places, count * key, _radix_sort(count, key, LONG, gpu)), (*places, by_row)
    return ((count * LONG, _aliased(count * key, count * LONG)),)


def _topk(args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`launch_gather_topk_kernel` (TensorTopK.cu): for long rows, counts of digits in each block."""
    x = args[0]
    dimension = _dimension(_argument(args, kwargs, 2, "dim", -1), x)
    length = x.shape[dimension] if x.dim() else 1
    if not x.numel() or not length:
        return NONE
    rows, copy = x.numel() // length, _copy(x)
    chosen = results[0].shape[dimension] if results[0].dim() else 1
    ordered: tuple[Block, ...] = ()
    if chosen > 4096 and _flag(args, kwargs, 4, "sorted", default=True):
        most = max(_sorts(rows, chosen, x.element_size(), gpu), key=_likely)
        ordered = (nbytes(results[0]), results[0].numel() * LONG, *most)
    return _after((copy, *_topk_counts(rows, length, x.element_size(), gpu)), ordered)


def _likely(blocks: Iterable[Block]) -> int:
    return sum(block.point if isinstance(block, ByteRange) else block for block in blocks)


_LONG_ROWS = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))


def _topk_counts(rows: int, length: int, itemsize: int, gpu: CudaTarget) -> tuple[int, ...]:
    """`mbtopk::launch`, where `should_use_multiblock` says so by the number of rows and their length."""
    if length < next((least for most, least in _LONG_ROWS if rows <= most), 400):
        return ()
    resident = 65_536 // (40 * 256) * 256 * gpu.multiprocessors  # `get_items_per_thread`: 40 registers a thread
    items = 256 * max(4, min(64, -(-rows * length // resident)))
    blocks = rows * -(-length // items)
    radix = max(FLOAT, itemsize)
    singles = (rows * itemsize, rows * FLOAT, 2 * rows * FLOAT, 2 * rows * radix)
    return (*singles, blocks * _RADIX_DIGITS * 2, blocks * FLOAT, blocks * FLOAT, _tile_states(blocks, 1024, 16))


def _median(args: Sequence[Any], kwargs: Mapping[str, Any], _: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`median_impl` and `median_with_indices_impl` (Sorting.cpp): of all elements by sorting them, else a copy."""
    x = args[0]
    if len(args) > 1 or "dim" in kwargs:
        return _after((_copy(x),))
    length = x.numel()
    held = (_copy(x), nbytes(x), length * LONG)
    sorts = _sorts(1, length, x.element_size(), gpu) if length > 4096 else ((),)
    return _after(*((*held, *moment) for moment in sorts))


def _cumulative(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`scan_dim` (ScanUtils.cuh): CUB's scan for a single row, else a kernel that takes nothing.

    Before it the input is cast to the result's type (`impl_func_cum_ops`, aten/src/ATen/native/ReduceOps.cpp).
    """
    x, result = args[0], results[0]
    count, itemsize = x.numel(), result.element_size()
    if not count or not x.dim():
        return NONE
    cast = count * itemsize if x.dtype != result.dtype else 0
    dense = _Layout.of(x, itemsize) if cast else _Layout.of(x)
    copy = 0 if _ordered(dense.shape, dense.stride, range(len(dense.shape) - 1, -1, -1)) else count * itemsize
    if count != x.shape[_dimension(args[1] if len(args) > 1 else -1, x)]:
        return _after((cast, copy))
    if gpu.deterministic and result.is_floating_point():
        threads = 128 if itemsize >= 16 else 256 if itemsize >= 8 else 512
        return _after((cast, copy, min(gpu.multiprocessors, -(-count // (threads * 16))) * itemsize))
    return _after((cast, copy, _scan(count, itemsize)))


def _unique(args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`unique_cuda_template` and `compute_unique` (UniqueCub.cu): the result's storage stays as long as the input."""
    x = args[0]
    count, key = x.numel(), x.element_size()
    if not count:
        return NONE
    inverse = _flag(args, kwargs, 2, "return_inverse")
    counts = _flag(args, kwargs, 3, "return_counts")
    held: tuple[Block, ...] = (_copy(x), count * key)
    if inverse:
        places = (*held, count * LONG)
        before = ((*places, count * LONG, _radix_sort(count, key, LONG, gpu)),)
        held = (*places, count * LONG, count * LONG)
    else:
        before = ((*held, _radix_sort(count, key, 0, gpu)),)
    kept = max(0, count * key - nbytes(results[0]))
    last = (*held, count * LONG if counts else 0, LONG, _select(count, gpu))
    return Scratch(before=_moments(before), after=_moments((last,)), kept=kept)


def _multinomial(args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`multinomial_out` (aten/src/ATen/native/Distributions.cpp): one race of exponentials, else running sums."""
    x = args[0]
    samples = args[1] if len(args) > 1 and isinstance(args[1], int) else 1
    if _flag(args, kwargs, 2, "replacement") and samples != 1:
        return _after((nbytes(x),) * 3)
    if samples == 1:
        dims = frozenset({x.dim() - 1}) if x.dim() else frozenset()
        return _after((nbytes(x), *_reduction(_Layout.contiguous(x.shape, x.element_size()), dims, 16, gpu)))
    rows = x.numel() // max(1, x.shape[-1] if x.dim() else 1)
    length = x.shape[-1] if x.dim() else 1
    counts = _topk_counts(rows, length, x.element_size(), gpu) if x.numel() else ()
    return _after((nbytes(x), results[0].numel() * x.element_size(), *counts))


# -- normalisation


def _layer_norm(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`layer_norm_cuda` and `_fused_rms_norm_cuda` (layer_norm_kernel.cu): copies of what is not contiguous."""
    return _after([_copy(_tensor(args, place)) for place in (0, 2, 3)])


def _layer_norm_backward(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`LayerNormBackwardKernelImplInternal` (layer_norm_kernel.cu); weights' gradients of blocks of rows are summed."""
    grad, x, weight = args[0], args[1], _tensor(args, 5)
    mask = _flags(args, 7, 3)
    sums = 0 if weight is None else sum(mask[1:])
    return _norm_backward(grad, x, weight, args[2] if len(args) > 2 else (), sums, gpu) if results else NONE


def _rms_norm_backward(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`_fused_rms_norm_backward_cuda` (layer_norm_kernel.cu)."""
    weight = _tensor(args, 4)
    sums = int(weight is not None and _flags(args, 5, 2)[1])
    return _norm_backward(args[0], args[1], weight, args[2] if len(args) > 2 else (), sums, gpu) if results else NONE


def _norm_backward(grad: Any, x: Any, weight: Any, normalized: Any, sums: int, gpu: CudaTarget) -> Scratch:
    """`LaunchGammaBetaBackwardCUDAKernel`: for many short rows, gradients of blocks of rows, then their sum."""
    copies = (_copy(x), _copy(weight), _copy(grad))
    width = math.prod(normalized) if isinstance(normalized, (list, tuple)) else 0
    rows = x.numel() // width if width else 0
    if not (sums and rows > 64 * 1024 and width // 32 < gpu.multiprocessors // 2):
        return _after(copies)
    blocks = min(64 * 1024 // 2 // -(-width // 32), -(-rows // 32))
    size, last = weight.element_size(), weight.shape[-1]
    partials = (blocks * last * size,) * sums
    layout = _Layout.contiguous((blocks, last), size)
    reduced = _reduction(layout, frozenset({0}), _accumulates(weight), gpu, out=size)
    return _after((*copies, *partials, last * size, *reduced))


def _group_norm(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`GroupNormKernelImplInternal` (group_norm_kernel.cu): float32 statistics, a factor and a shift a channel."""
    if len(args) < 7 or not all(isinstance(size, int) for size in args[3:7]):
        return NONE
    x, weight, bias = args[0], _tensor(args, 1), _tensor(args, 2)
    batch, channels, image, groups = args[3:7]
    accumulator = _accumulates(x)
    statistics = batch * groups * accumulator if accumulator > x.element_size() else 0
    affine = image != 1 and (weight is not None or bias is not None)
    fused = batch * channels * accumulator if affine else 0
    return _after((_copy(x), statistics, statistics, fused, fused))


def _group_norm_backward(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`GroupNormBackwardKernelImplInternal` (group_norm_kernel.cu): sums of each channel, and three factors."""
    if len(args) < 9 or not all(isinstance(size, int) for size in args[5:9]):
        return NONE
    grad, x, weight = args[0], args[1], _tensor(args, 4)
    batch, channels, image, groups = args[5:9]
    channel, group = batch * channels * _accumulates(x), batch * groups * _accumulates(x)
    wants_input = _flags(args, 9, 3)[0]
    sums = () if image == 1 else (channel, channel)
    factors = (channel if image != 1 and weight is not None else 0, group, group) if wants_input else ()
    return _after((_copy(grad), *sums, *factors))


def _batch_norm_is_channels_last(tensor: Any) -> bool:
    """`batch_norm_use_channels_last_kernels` (Normalization.cu): rows of channels count too."""
    count = tensor.dim()
    if count < 2 or not tensor.numel():
        return False
    contiguous = _ordered(tensor.shape, tensor.stride(), range(count - 1, -1, -1))
    if contiguous:
        return bool(tensor.stride(1) == 1)
    return count in (4, 5) and _ordered(tensor.shape, tensor.stride(), _channels_last_order(count))


def _batch_norm_blocks(x: Any, sums: int) -> tuple[int, ...]:
    """`flexible_launch_configs` (Normalization.cuh): sums of blocks of rows, and semaphores, for channels last."""
    channels = x.shape[1]
    rows = x.numel() // channels
    wide = min(_last_power(channels), 32)
    high = min(_last_power(-(-rows // 16)), 512 // wide)
    if wide * high != 512:
        wide = min(_last_power(channels), 512 // high)
    blocks = min(-(-rows // (high * 16)), 128)
    if blocks < 8:
        return ()
    return sums * channels * blocks * _accumulates(x), -(-channels // wide) * FLOAT


def _batch_norm(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`batch_norm_mean_var` (Normalization.cu): by layout its own kernels, or `var_mean`."""
    x = args[0]
    training = next((value for value in args[3:] if isinstance(value, bool)), True)
    if not training or x.dim() < 2 or not x.numel():
        return NONE
    if _batch_norm_is_channels_last(x):
        return _after(_batch_norm_blocks(x, 4))
    if not _copy(x):
        return NONE
    dims = frozenset(range(x.dim())) - {1}
    return _after(_reduction(_Layout.of(x), dims, 32 if _accumulates(x) > FLOAT else 16, gpu, 2))


def _images_merge(tensor: Any) -> bool:
    """Whether a view can join the dimensions past the channels."""
    places = [place for place in range(2, tensor.dim()) if tensor.shape[place] != 1]
    return all(
        tensor.stride(first) == tensor.shape[second] * tensor.stride(second) for first, second in pairwise(places)
    )


def _batch_norm_backward(args: Sequence[Any], kwargs: Mapping[str, Any], _: Sequence[Any], __: CudaTarget) -> Scratch:
    """`batch_norm_backward_cuda` (Normalization.cu): one kernel for contiguous images, sums first for channels last."""
    grad, x = args[:2]
    if x.dim() < 2 or not x.numel():
        return NONE
    mask, training = _flags(args, 9, 3), _flag(args, kwargs, 7, "train", default=True)
    if not (training or mask[1] or mask[2]):
        return NONE
    if mask[0] and not _batch_norm_is_channels_last(x):
        return _after([0 if _images_merge(tensor) else nbytes(tensor) for tensor in (x, grad)])
    sums = (x.shape[1] * _accumulates(x),) * 2
    shared = _batch_norm_is_channels_last(x) and _batch_norm_is_channels_last(grad)
    blocks = _batch_norm_blocks(x, 2) if shared else ()
    return Scratch(before=((*sums, *blocks),), after=(sums,))


def cudnn_batch_norm_reserve_bytes(x: Any, gpu: CudaTarget) -> int | ByteRange:
    """What cuDNN's batch norm keeps for the backward pass, beside mean and variance: its fourth result.

    The size is `cudnnGetBatchNormalizationTrainingExReserveSpaceSize` with ``CUDNN_BATCHNORM_OPS_BN``, the only
    operation PyTorch asks for (aten/src/ATen/native/cudnn/BatchNorm.cpp, `_get_cudnn_batch_norm_reserve_space_size`).
    cuDNN's documentation says that the space carries what an activation needs for its gradient, a bit an element, and
    names no formula; without an activation there is nothing to carry. No source gives a number for this operation, so
    that mask stands as the upper bound for half precision in channels last, the one layout that the extended kernels
    (`CUDNN_BATCHNORM_SPATIAL_PERSISTENT`) are documented for.

    Args:
        x: the input, 4-D or 5-D.
        gpu: what it runs on.

    Returns:
        Bytes: 0 where the layout or the type has no such kernel, else a span from 0 on.
    """
    if not _is_half(x) or not _is_channels_last(x) or gpu.compute_capability < (6, 0):
        return 0
    return ByteRange(0, 0, up(-(-x.numel() // 8), 512))


def _cudnn_batch_norm(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`cudnn_batch_norm` (aten/src/ATen/native/cudnn/BatchNorm.cpp): an input that is dense in no order is copied."""
    return _after((_copy(args[0], _is_channels_last(args[0])),))


def _cudnn_batch_norm_backward(
    args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget
) -> Scratch:
    """`cudnn_batch_norm_backward`: the gradient in the input's layout."""
    x, grad = args[0], _tensor(args, 1)
    channels_last = _is_channels_last(x)
    return _after((_copy(x, channels_last), _copy(grad, channels_last)))


# -- losses and softmax


def _all(gpu: CudaTarget, count: int, itemsize: int) -> tuple[int, ...]:
    """Partial sums of a mean over all of a contiguous tensor."""
    return _reduction(_Layout.contiguous((count,), itemsize), frozenset({0}), max(FLOAT, itemsize), gpu, out=itemsize)


def _reduced_loss(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Any],
    gpu: CudaTarget,
    place: int = 2,
    losses: int = 1,
) -> Scratch:
    """Losses whose result was allocated for all elements, and then shrunk: its storage stays.

    `mse_loss_out` and `smooth_l1_loss_out` (aten/src/ATen/native/Loss.cpp) have the losses in a tensor beside it;
    `soft_margin_loss_out` and `binary_cross_entropy_out_cuda` (Loss.cu) in the result itself.
    """
    if not _flag(args, kwargs, place, "reduction", default=True) or not args[0].numel():
        return NONE
    itemsize = results[0].element_size()
    count = _broadcast([tensor for tensor in args[:2] if _is_tensor(tensor)])
    scratch = (count * itemsize,) if losses else (itemsize,)
    return _after((*scratch, *_all(gpu, count, itemsize)), kept=(count - 1) * itemsize)


def _loss_beside(args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`huber_loss` (aten/src/ATen/native/Loss.cpp): all losses, then their mean."""
    if not _flag(args, kwargs, 2, "reduction", default=True):
        return NONE
    size = nbytes(args[0])
    return _after((size, *_all(gpu, args[0].numel(), results[0].element_size())))


def _bce_with_logits(
    args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget
) -> Scratch:
    """`binary_cross_entropy_with_logits` (aten/src/ATen/native/Loss.cpp): log-sigmoids, and losses beside them."""
    x, size = args[0], nbytes(args[0])
    if not _flag(args, kwargs, 4, "reduction", default=True):
        return _after((size,))
    return _after((size, size, *_all(gpu, x.numel(), results[0].element_size())))


def _nll_loss(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`nll_loss_forward_out_cuda_template` (Loss.cu, NLLLoss2d.cu): contiguous copies."""
    return _after([_copy(_tensor(args, place)) for place in (0, 1, 2)])


def _nll_loss_backward(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`nll_loss_backward_out_cuda_template`, `nll_loss2d_backward_out_cuda_template`."""
    return _after([_copy(_tensor(args, place)) for place in (2, 3)])


def _softmax(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`host_softmax` (SoftMax.cu): ``contiguous()``."""
    return _after((_copy(args[0]),))


def _log_softmax_backward(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`host_softmax_backward` (SoftMax.cu): gradient and output, contiguous."""
    return _after((_copy(args[0]), _copy(_tensor(args, 1))))


def _softmax_backward(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`softmax_backward_cuda_out` (SoftMax.cu): ``grad * output``, which `host_softmax_backward` makes contiguous."""
    grad, output = args[0], _tensor(args, 1)
    product = grad.numel() * max(grad.element_size(), output.element_size() if output is not None else 0)
    turned = product if _is_dense(grad) and _copy(grad) else 0
    return _after((product, turned, _copy(output)))


def _safe_softmax(args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`_safe_softmax` (aten/src/ATen/native/SoftMax.cpp): a mask of what is minus infinity, and of whole rows."""
    x = args[0]
    if not x.numel():
        return NONE
    dimension = _dimension(_argument(args, kwargs, 1, "dim", -1), x)
    rows = x.numel() // (x.shape[dimension] if x.dim() else 1)
    reduced = _reduction(_Layout.of(x, 1), _dimensions(dimension, x.dim()), 1, gpu)
    return _after((_copy(x),), (x.numel(), rows, *reduced), (x.numel(), rows, results[0].element_size()))


def _ctc_loss(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], __: CudaTarget) -> Scratch:
    """`ctc_loss_gpu_template` (LossCTC.cu): lengths and offsets, one each a sample."""
    lengths = results[0].numel() * LONG
    return _after((_copy(_tensor(args, 1)), lengths, lengths, lengths))


def _ctc_loss_backward(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`ctc_loss_backward_gpu_template` (LossCTC.cu): the backward variables, as large as the forward ones."""
    alpha, likelihood = _tensor(args, 6), _tensor(args, 5)
    if alpha is None or likelihood is None:
        return NONE
    lengths = likelihood.numel() * LONG
    return _after((_copy(_tensor(args, 2)), nbytes(alpha), lengths, lengths, lengths))


# -- matrices


def _matrix(tensor: Any) -> int:
    """`prepare_matrix_for_cublas` (cuBlasCommonArgs.h): a copy of what is neither dense nor has one stride of 1."""
    if tensor is None or tensor.dim() != 2 or not tensor.numel() or _is_dense(tensor):
        return 0
    (rows, columns), (down, across) = tensor.shape, tensor.stride()
    if (down == 1 and across >= max(1, rows)) or (across == 1 and down >= max(1, columns)):
        return 0
    return nbytes(tensor)


def _mm(
    args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget, places: tuple[int, int] = (0, 1)
) -> Scratch:
    """`addmm_out_cuda_impl` (Blas.cpp); cuBLAS' own workspace is opened elsewhere."""
    return _after([_matrix(_tensor(args, place)) for place in places])


def _batch_matrix(tensor: Any, transposed: bool, rows: int, columns: int) -> int:
    """`prepare_batch_matrix_for_cublas` (Blas.cpp): a copy of matrices that cuBLAS could not step through."""
    stride = tensor.stride()
    fast, lead = (2, 1) if transposed else (1, 2)
    if stride[fast] == 1 and stride[lead] >= max(1, rows):
        return 0
    if stride[lead] == 1 and stride[fast] >= max(1, columns):
        return 0
    return 0 if tensor.is_contiguous() and stride[1] and stride[2] else nbytes(tensor)


def _bmm(
    args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], __: CudaTarget, places: tuple[int, int] = (0, 1)
) -> Scratch:
    """`bmm_out_cuda_impl` (Blas.cpp): the result's layout says how the operands are read."""
    left, right, out = _tensor(args, places[0]), _tensor(args, places[1]), results[0]
    if left is None or right is None or {left.dim(), right.dim(), out.dim()} != {3}:
        return NONE
    if not (left.numel() and right.numel() and out.numel()):
        return NONE
    transposed = not (out.stride(1) == 1 and (out.shape[2] == 1 or out.stride(2) >= max(1, out.shape[1])))
    lead = 1 if transposed else 2
    first, second = (right, left) if transposed else (left, right)
    rows, columns, inner = out.shape[2 if transposed else 1], out.shape[lead], first.shape[lead]
    return _after((_batch_matrix(first, transposed, rows, inner), _batch_matrix(second, transposed, inner, columns)))


def _euclidean_dist(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`_euclidean_dist` (aten/src/ATen/native/Distance.cpp): both sets widened by their norms and ones."""
    left, right = args[0], _tensor(args, 1)
    if right is None or not (left.dim() and right.dim()):
        return NONE
    sides = [(nbytes(x), nbytes(x) // x.shape[-1] if x.shape[-1] else 0) for x in (left, right)]
    (first, norms), (second, others) = sides
    ends = (norms, norms, others, others)
    wide = first + 2 * norms, second + 2 * others
    before = ((first, norms), (norms, norms, second, others), (*ends, first, wide[0]), (*ends, *wide))
    return Scratch(before=_moments(before), after=_moments((wide,)))


def _cdist_backward(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`cdist_backward_kernel_impl` (DistanceKernel.cu): what each pair adds, then its sum."""
    left, right = _tensor(args, 1), _tensor(args, 2)
    if left is None or right is None or left.dim() < 2 or right.dim() < 2:
        return NONE
    rows, others, width = left.shape[-2], right.shape[-2], left.shape[-1]
    batch = results[0].numel() // max(1, rows * width)
    layout = _Layout.contiguous((batch, others, rows, width), left.element_size())
    reduced = _reduction(layout, frozenset({1}), _accumulates(left), gpu)
    pairs = batch * others * rows * width * left.element_size()
    return _after((_copy(_tensor(args, 0)), _copy(left), _copy(right), pairs, *reduced))


# -- convolutions: copies of layout; cuDNN's own workspace is a hook


def _workspace(operation: str, args: Sequence[Any], gpu: CudaTarget) -> Block:
    """What cuDNN takes for one convolution, in its own choice of algorithm, which only a device can tell.

    Its tensor cores work on channels-last images. Where the tensors are not, the weight's gradient is computed on
    transposed copies of the image, its gradient and the weight's, kept in the workspace: so measured on VGG-16
    (`benchmarks/accuracy.py`: 480 to 684 images of 86 x 86 on an RTX 3060, within 1 % with these copies, 6 to 8 % too
    low without). The other two operations may take such copies, and were not seen to: their point is nothing.
    Convolutions of one pixel are plain matrix products, and took none where they could be seen.

    Args:
        operation: ``"forward"``, ``"data"`` (the input's gradient) or ``"filter"`` (the weight's).
        args: those of `aten.convolution` (forward), or of `aten.convolution_backward`.
        gpu: what it runs on, and how the algorithm is chosen.
    """
    forward = operation == "forward"
    if len(args) < (9 if forward else 10) or not isinstance(args[8 if forward else 9], int):
        return 0
    x, weight = args[0 if forward else 1], args[1 if forward else 2]
    groups = args[8 if forward else 9]
    tensor_cores = gpu.compute_capability >= (8, 0) if x.element_size() == FLOAT else x.element_size() < FLOAT
    if (
        not tensor_cores
        or (x.element_size() == FLOAT and not gpu.tf32)
        or groups > 1
        or _takes_channels_last(x, weight)
    ):
        return 0
    if math.prod(weight.shape[2:]) == 1 or x.shape[1] % 4:
        return 0
    copies = nbytes(x) + nbytes(weight) + (_output_bytes(args) if forward else nbytes(args[0]))
    return ByteRange(0, copies if operation == "filter" else 0, copies)


def _output_bytes(args: Sequence[Any]) -> int:
    x, weight, stride, padding, dilation, transposed = args[0], args[1], args[3], args[4], args[5], args[6]
    if transposed:
        return int(nbytes(x) * math.prod(stride) * weight.shape[1] // x.shape[1])
    sides = [
        (side + 2 * p - d * (kernel - 1) - 1) // s + 1
        for side, kernel, s, p, d in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=False)
    ]
    return int(x.shape[0] * weight.shape[0] * math.prod(sides) * x.element_size())


def _as_images(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides; a sequence is an image one row high (`view4d` in aten/src/ATen/native/Convolution.cpp)."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if len(shape) == 3:
        return (*shape[:2], 1, shape[2]), (*stride[:2], shape[2] * stride[2], stride[2])
    return shape, stride


def _takes_channels_last(x: Any, weight: Any) -> bool:
    """`cudnn_conv_suggest_memory_format` (aten/src/ATen/native/ConvUtils.h): never for float64."""
    if x.element_size() == 8 or weight.element_size() == 8:
        return False
    return any(_suggests_channels_last(*_as_images(tensor)) for tensor in (x, weight))


def _layout_copy(tensor: Any, channels_last: bool) -> int:
    shape, stride = _as_images(tensor)
    count = len(shape)
    order = _channels_last_order(count) if channels_last and count in (4, 5) else range(count - 1, -1, -1)
    return 0 if not tensor.numel() or _ordered(shape, stride, order) else nbytes(tensor)


def _is_depthwise(x: Any, weight: Any, args: Sequence[Any]) -> bool:
    """`is_depthwise` (aten/src/ATen/native/Convolution.cpp), for the arguments of `aten.convolution_backward`."""
    if len(args) < 10 or not isinstance(args[9], int) or _flag(args, {}, 7, "transposed"):
        return False
    groups, channels = args[9], x.shape[1]
    return x.dim() in (4, 5) and groups > 1 and channels == groups and weight.shape[0] % channels == 0


def _convolution(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], gpu: CudaTarget) -> Scratch:
    """`cudnn_convolution_forward` (aten/src/ATen/native/cudnn/ConvShared.cpp): input and weight in one layout."""
    x, weight = args[0], _tensor(args, 1)
    if weight is None or x.dim() < 3 or not x.numel():
        return NONE
    channels_last = _takes_channels_last(x, weight)
    copies = (_layout_copy(x, channels_last), _layout_copy(weight, channels_last))
    return _after((*copies, _workspace("forward", args, gpu)))


def _convolution_backward(
    args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], gpu: CudaTarget
) -> Scratch:
    """`cudnn_convolution_backward` (aten/src/ATen/native/cudnn/ConvShared.cpp), then the bias' gradient as a sum.

    Input and gradient are brought into one layout for both; the weight for the input's gradient alone.
    """
    grad, x, weight = args[0], _tensor(args, 1), _tensor(args, 2)
    if x is None or weight is None or x.dim() < 3 or not x.numel():
        return NONE
    mask = _flags(args, 10, 3)
    channels_last = _takes_channels_last(x, weight)
    depthwise = not channels_last and _is_depthwise(x, weight, args)
    held = (_layout_copy(grad, channels_last), _layout_copy(x, channels_last) if mask[1] or depthwise else 0)
    stages: list[tuple[Block, ...]] = []
    if mask[0]:
        stages.append((*held, _layout_copy(weight, channels_last), _workspace("data", args, gpu)))
    if mask[1]:
        stages.append((*held, _workspace("filter", args, gpu)))
    if mask[2]:
        dims = frozenset(range(grad.dim())) - {1}
        layout = _Layout.of(grad)
        stages.append(tuple(_reduction(layout, dims, _accumulates(grad), gpu, out=grad.element_size())))
    last = len(stages) - 1
    between = {place: _moments((stage,)) for place, stage in enumerate(stages[:-1]) if _alive(stage)}
    after = _moments((stages[last],)) if stages and len(results) == len(stages) else _moments(stages)
    if len(results) != len(stages):
        between = {}
    return Scratch(after=after, between=between) if after or between else NONE


# -- pooling, resizing, padding: copies of layout


def _images(
    args: Sequence[Any],
    _: Mapping[str, Any],
    __: Sequence[Any],
    ___: CudaTarget,
    places: tuple[int, ...] = (0,),
    like: int = 0,
) -> Scratch:
    """Kernels of images, which take their tensors in the layout of one of them (``suggest_memory_format``)."""
    model = _tensor(args, like)
    channels_last = model is not None and _is_channels_last(model)
    return _after([_copy(_tensor(args, place), channels_last) for place in places])


def _contiguous(
    args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget, places: tuple[int, ...] = (0,)
) -> Scratch:
    """Kernels that begin with ``contiguous()`` of these arguments."""
    return _after([_copy(_tensor(args, place)) for place in places])


def _resized(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], __: CudaTarget) -> Scratch:
    """`upsample_nearest2d_out_cuda_template` (UpSampleNearest2d.cu) and its backward pass, and that of bilinear.

    Channels last has a kernel of its own from four channels on; else both sides are made contiguous.
    """
    x, y = args[0], results[0]
    if _is_channels_last(x) and _is_channels_last(y) and x.shape[1] >= 4:
        return NONE
    return _after((_copy(x), _copy(y)))


# -- lists of tensors


_CHUNK = 65_536  # `kChunkSize` in MultiTensorApply.cuh


def _foreach_norm(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], __: CudaTarget) -> Scratch:
    """`foreach_tensor_norm_cuda` (ForeachReduceOp.cu): for every tensor as many results as the longest has chunks."""
    tensors = list(_tensors(args[:1]))
    chunks = max((-(-tensor.numel() // _CHUNK) for tensor in tensors), default=0)
    partials = len(tensors) * chunks * _accumulates(results[0])
    return _after((partials,))


def _foreach_max(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], __: CudaTarget) -> Scratch:
    """`foreach_tensor_max_cuda` (ForeachReduceOp.cu)."""
    tensors = list(_tensors(args[:1]))
    chunks = max((-(-tensor.numel() // _CHUNK) for tensor in tensors), default=0)
    return _after((len(tensors) * chunks * results[0].element_size(),))


# -- Fourier transforms


def _fft(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], __: CudaTarget) -> Scratch:
    """`_fft_r2c_cufft` and its kin (aten/src/ATen/native/cuda/SpectralOps.cpp): cuFFT's workspace.

    cuFFT documents no formula; between nothing and twice the larger side is what it takes for lengths whose factors
    are small.
    """
    size = max(nbytes(args[0]), nbytes(results[0]))
    return _after((ByteRange(0, size, 2 * size),)) if size else NONE


def _fft_to_real(args: Sequence[Any], _: Mapping[str, Any], results: Sequence[Any], __: CudaTarget) -> Scratch:
    """`_fft_c2r_cufft`: cuFFT writes over its input, which is copied before."""
    size = max(nbytes(args[0]), nbytes(results[0]))
    return _after((nbytes(args[0]), ByteRange(0, size, 2 * size))) if size else NONE


# -- copies between devices


def _copied(args: Sequence[Any], _: Mapping[str, Any], __: Sequence[Any], ___: CudaTarget) -> Scratch:
    """`copy_kernel_cuda` (Copy.cu): none on one device; between host and device, copies of what is not contiguous."""
    target, source = args[0], _tensor(args, 1)
    if source is None or target.device.type == source.device.type:
        return NONE
    alike = target.dtype == source.dtype and tuple(target.shape) == tuple(source.shape)
    if alike and tuple(target.stride()) == tuple(source.stride()) and _is_dense(target):
        return NONE
    if target.device.type == "cuda":
        return _after((_copy(target),))
    return _after((target.numel() * target.element_size() if source.dtype != target.dtype else _copy(source),))


_RULES: dict[str, Rule] = {
    # reductions
    **dict.fromkeys(("sum", "mean", "prod", "nansum"), _sum),
    "linalg_vector_norm": partial(_sum, place=2),
    "norm": partial(_sum, place=2),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _moments_of),
    **dict.fromkeys(("amax", "amin", "max", "min", "argmax", "argmin"), _extreme),
    "aminmax": _both_extremes,
    **dict.fromkeys(("any", "all"), _logical),
    "count_nonzero": _count_nonzero,
    "logsumexp": _logsumexp,
    # embeddings and indexing
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag_dense_backward": _embedding_bag_backward,
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index_put),
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    **dict.fromkeys(("index_add", "index_add_"), _index_add),
    "nonzero": _nonzero,
    "masked_select": _masked_select,
    **dict.fromkeys(("masked_scatter", "masked_scatter_"), _masked_scatter),
    # sorting and scans
    "sort": _sort,
    "topk": _topk,
    **dict.fromkeys(("median", "nanmedian"), _median),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cumsum_", "cumprod_"), _cumulative),
    "_unique2": _unique,
    "multinomial": _multinomial,
    # normalisation
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"), _batch_norm
    ),
    "native_batch_norm_backward": _batch_norm_backward,
    "cudnn_batch_norm": _cudnn_batch_norm,
    "cudnn_batch_norm_backward": _cudnn_batch_norm_backward,
    # losses and softmax
    "mse_loss": _reduced_loss,
    "smooth_l1_loss": _reduced_loss,
    "soft_margin_loss": partial(_reduced_loss, losses=0),
    "binary_cross_entropy": partial(_reduced_loss, place=3, losses=0),
    "huber_loss": _loss_beside,
    "binary_cross_entropy_with_logits": _bce_with_logits,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll_loss),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_loss_backward),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    "_log_softmax_backward_data": _log_softmax_backward,
    "_softmax_backward_data": _softmax_backward,
    "_safe_softmax": _safe_softmax,
    "_ctc_loss": _ctc_loss,
    "_ctc_loss_backward": _ctc_loss_backward,
    # matrices
    "mm": _mm,
    "addmm": partial(_mm, places=(1, 2)),
    "_addmm_activation": partial(_mm, places=(1, 2)),
    "bmm": _bmm,
    "baddbmm": partial(_bmm, places=(1, 2)),
    "_euclidean_dist": _euclidean_dist,
    "_cdist_backward": _cdist_backward,
    # images
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"), _images),
    "max_pool2d_with_indices_backward": partial(_images, places=(0, 1, 7), like=1),
    "avg_pool2d_backward": partial(_images, places=(0, 1), like=1),
    "_adaptive_avg_pool2d_backward": partial(_images, places=(0,), like=1),
    **dict.fromkeys(("upsample_nearest2d", "upsample_nearest2d_backward", "upsample_bilinear2d_backward"), _resized),
    **dict.fromkeys(
        (
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
        ),
        _contiguous,
    ),
    # lists, transforms, copies
    "_foreach_norm": _foreach_norm,
    "_foreach_max": _foreach_max,
    **dict.fromkeys(("_fft_r2c", "_fft_c2c"), _fft),
    "_fft_c2r": _fft_to_real,
    "copy_": _copied,
}

_NEEDS = {
    "_foreach_norm": 0,
    "_foreach_max": 0,
    **dict.fromkeys((name for name in _RULES if "embedding" in name and "backward" in name), 2),
    **dict.fromkeys((name for name in _RULES if "norm" in name and name.endswith("backward")), 2),
    "mse_loss": 2,
}
"""How many of an operator's first arguments are tensors that its rule looks at: one, where that is not said."""

RULES: dict[str, Rule] = {name: _checked(rule, _NEEDS.get(name, 1)) for name, rule in _RULES.items()}

TAKES_NONE = frozenset(
    (
        "_amp_foreach_non_finite_check_and_unscale_",  # AmpKernels.cu
        "_amp_update_scale_",
        "_cdist_forward",  # DistanceKernel.cu, but for what `_euclidean_dist` takes
        "_embedding_bag",  # EmbeddingBag.cu
        "_embedding_bag_forward_only",
        "_foreach_add",  # Foreach*.cu: metadata travels with the launch, in the kernel's arguments
        "_foreach_addcdiv",
        "_foreach_addcmul",
        "_foreach_div",
        "_foreach_lerp",
        "_foreach_mul",
        "_foreach_sqrt",
        "_fused_adagrad_",
        "_fused_adam_",  # FusedAdamKernel.cu
        "_fused_adamw_",
        "_fused_sgd_",
        "_prelu_kernel_backward",  # ActivationPreluKernel.cu
        "_thnn_fused_gru_cell",  # RNN.cu
        "_thnn_fused_gru_cell_backward",
        "_thnn_fused_lstm_cell",
        "_thnn_fused_lstm_cell_backward_impl",
        "_to_copy",  # Copy.cu: conversions happen as elements are read
        "bernoulli_",
        "cat",  # Shape.cu: metadata travels with the launch
        "clone",
        "constant_pad_nd",
        "flip",  # TensorTransformations.cu
        "gather",  # ScatterGatherKernel.cu
        "gelu",
        "gelu_backward",
        "grid_sampler_2d",  # GridSampler.cu
        "grid_sampler_2d_backward",
        "index_select",  # Indexing.cu
        "kthvalue",  # Sorting.cpp
        "masked_fill",
        "native_dropout",  # Dropout.cu
        "native_dropout_backward",
        "scatter",
        "scatter_add",  # unless results must not depend on order
        "silu_backward",
        "stack",
        "threshold_backward",
        "upsample_bilinear2d",  # UpSampleBilinear2d.cu: strides are followed
        "where",
    )
)
"""Operators that were read, and take nothing from the allocator but their results."""
