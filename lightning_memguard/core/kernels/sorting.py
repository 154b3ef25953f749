"""Sorts, scans and sampling on CUDA, and the temporary storage of CUB's algorithms that they run.

PyTorch takes that from its caching allocator. Read in CCCL 3.0 (CUDA 13.0); CUB itself gave these sizes without a GPU,
for capability 7.5, 8.0, 9.0, 10.0 and 12.0.
"""

from __future__ import annotations

import math

from lightning_memguard.core.kernels.arguments import CudaCall, Rules, after, dimension, is_torch, moments
from lightning_memguard.core.kernels.cuda_reductions import INT_MAX, reduction
from lightning_memguard.core.kernels.layout import (
    LONG,
    TensorLayout,
    copy_bytes,
    is_half,
    is_non_overlapping_and_dense,
    is_ordered,
)
from lightning_memguard.core.range import Range
from lightning_memguard.core.trace.scratch import FLOAT, NONE, Block, CudaTarget, Scratch, likely_bytes, nbytes, up

RULES = Rules[CudaTarget]()


# -- temporary storage of CUB

RADIX_DIGITS = 256
_RADIX_PORTION = (1 << 28) - 1
_SINGLE_TILE = 2304  # items that one block sorts by itself, with keys or values of eight bytes; 4864 with four

# Items of a tile of `DeviceRadixSort` by bytes of a key, from compute capability 7.5, 8.0 and 9.0 on
# (cub/device/dispatch/tuning/tuning_radix_sort.cuh); 0 if the older algorithm is taken.
_PAIR_TILES = {8: (2816, 3840, 4608), 4: (2816, 3072, 5376), 2: (0, 0, 5632), 1: (0, 0, 3456)}
_KEY_TILES = {8: (2816, 3840, 5760), 4: (5888, 8064, 6912)}


def aliased(*sizes: int) -> int:
    """`AliasTemporaries` (cub/util_temporary_storage.cuh): several allocations in one, each at 256 bytes."""
    return sum(up(size, 256) for size in sizes) + 255


def _generation(gpu: CudaTarget) -> int:
    """Return the index of CUB's tuning: compute capability from 7.5, from 8.0, from 9.0 on."""
    return min(2, max(0, gpu.compute_capability[0] - 7))


def radix_sort(count: int, key: int, value: int, gpu: CudaTarget, bits: int | None = None) -> Block:
    """Temporary storage of `DeviceRadixSort` (cub/device/dispatch/dispatch_radix_sort.cuh, `InvokeOnesweep`).

    Histograms, a lookback for each tile, second buffers of keys and values unless one pass is enough, counters.
    Keys and values are given by their bytes, a value of 0 for keys alone; ``bits`` of a key are compared, else all.
    """
    if count <= (_SINGLE_TILE if max(key, value) > FLOAT else 2 * _SINGLE_TILE + 256):
        return 1 if count else 0
    passes = -(-(key * 8 if bits is None else max(1, bits)) // 8)
    tile = (_PAIR_TILES if value else _KEY_TILES).get(key, (0, 0, 0))[_generation(gpu)]
    if not tile:
        spine = 5 * (128 if key > 1 else 32) * LONG * gpu.multiprocessors  # `InvokePasses`: digits of each block
        buffers = aliased(count * key, count * value)
        return Range(buffers + spine, buffers + 4 * spine, buffers + 8 * spine)
    second = count if passes > 1 else 0
    portion = _RADIX_PORTION // tile * tile
    portions = -(-count // portion)
    bins, lookback = portions * passes * RADIX_DIGITS * LONG, -(-min(count, portion) // tile) * RADIX_DIGITS * FLOAT
    return aliased(bins, lookback, second * key, second * value, portions * passes * FLOAT)


def tile_states(count: int, tile: int, word: int) -> int:
    """`ScanTileState::AllocationSize` (cub/agent/single_pass_scan_operators.cuh): a word for each tile, and 32 more."""
    return up((-(-count // tile) + 32) * word, 256) + 511 if count else 0


def scan(count: int, itemsize: int, *, half: bool = False) -> int:
    """Temporary storage of `DeviceScan`, whose input is cut at 2^30 (aten/src/ATen/cuda/cub.cuh, `inclusive_scan`).

    Half precision is not a type that CUB knows, so its tiles are larger (seen in 2.11 to 2.15).
    """
    if half:
        return tile_states(min(count, 1 << 30), 7680, 16)
    tile = {1: 3840, 2: 3840, 4: 1920}.get(itemsize, 896)
    return tile_states(min(count, 1 << 30), tile, {1: 4, 2: 4, 4: 8}.get(itemsize, 16))


def select(count: int, gpu: CudaTarget) -> int:
    """About the temporary storage of `DeviceSelect`, whose tiles differ by type: within 0.5 % of the items."""
    return tile_states(count, (320, 1792, 3840)[_generation(gpu)], 16)


def reduce_all(count: int, gpu: CudaTarget) -> Block:
    """Temporary storage of `DeviceReduce`: past one tile, a sum for each block, at most five times those that fit."""
    if count <= 4096:
        return 1 if count else 0
    each = 5 * FLOAT * gpu.multiprocessors
    return Range(each, 4 * each, 8 * each)


# -- the rules


@RULES.of("sort")
def _sort(call: CudaCall) -> Scratch:
    """`sort_cuda_kernel` (Sort.cpp) and `launch_stable_sort_kernel` (SortStable.cu).

    Rows up to 4096 are sorted in place of the results, which begin as a range; larger ones by CUB, alone or many at
    once.
    """
    x = call["self"]
    dim = dimension(call["dim"], x)
    if not x.dim() or not x.numel():
        return NONE
    if x.shape[dim] <= 4096:
        return after((x.shape[dim] * LONG,)) if x.shape[dim] > 1 else NONE
    copy = 0 if is_non_overlapping_and_dense(x) and x.stride(dim) == 1 else nbytes(x)
    same = not copy and call.result.stride() == x.stride()
    held = (copy, 0 if same else nbytes(x), 0 if same else x.numel() * LONG)
    sorts = _sorts(x.numel() // x.shape[dim], x.shape[dim], x.element_size(), call.target)
    return after(*((*held, *moment) for moment in sorts))


def _sorts(rows: int, length: int, key: int, gpu: CudaTarget) -> tuple[tuple[Block, ...], ...]:
    """Moments of `launch_stable_sort_kernel` by the number of rows and their length."""
    if rows == 1 or length >= 1_000_000:
        return ((length * LONG, radix_sort(length, key, LONG, gpu)),)
    count = min(rows * length, INT_MAX // length * length)
    if rows < 128:
        places = (count * LONG, count * LONG)
        by_row = radix_sort(count, LONG, 0, gpu, (rows - 1).bit_length())
        return (*places, count * key, radix_sort(count, key, LONG, gpu)), (*places, by_row)
    return ((count * LONG, aliased(count * key, count * LONG)),)


@RULES.of("topk")
def _topk(call: CudaCall) -> Scratch:
    """`launch_gather_topk_kernel` (TensorTopK.cu): for long rows, counts of digits in each block."""
    x, result = call["self"], call.result
    if not x.numel():
        return NONE
    dim = dimension(call["dim"], x)
    length = x.shape[dim] if x.dim() else 1
    rows = x.numel() // length
    chosen = result.shape[dim] if result.dim() else 1
    ordered: tuple[Block, ...] = ()
    if chosen > 4096 and call["sorted"]:
        sorts = _sorts(rows, chosen, x.element_size(), call.target)
        most = max(sorts, key=lambda blocks: sum(map(likely_bytes, blocks)))
        ordered = (nbytes(result), result.numel() * LONG, *most)
    counts = (copy_bytes(x), *_topk_counts(rows, length, x.element_size(), call.target))
    return after(counts, counts, ordered)


_LONG_ROWS = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))


def _topk_counts(rows: int, length: int, itemsize: int, gpu: CudaTarget) -> tuple[int, ...]:
    """`mbtopk::launch`, if `should_use_multiblock` chooses it by the number of rows and their length.

    Two scans follow each other. Seen in 2.11 to 2.15.
    """
    if length < next((least for most, least in _LONG_ROWS if rows <= most), 400):
        return ()
    resident = 65_536 // (40 * 256) * 256 * gpu.multiprocessors  # `get_items_per_thread`: 40 registers a thread
    items = 256 * max(4, min(64, -(-rows * length // resident)))
    blocks = rows * -(-length // items)
    radix = max(FLOAT, itemsize)
    singles = (rows * itemsize, 2 * rows * FLOAT, 2 * rows * radix)
    counts = (blocks * RADIX_DIGITS * 2, rows * RADIX_DIGITS * FLOAT)
    return (*singles, *counts, blocks * FLOAT, blocks * FLOAT, tile_states(blocks, 1024, 16))


@RULES.of("median", "nanmedian")
def _median(call: CudaCall) -> Scratch:
    """`median_impl` and `median_with_indices_impl` (Sorting.cpp): of all elements by sorting them, else a copy."""
    x = call["self"]
    if call.get("dim") is not None:
        return after((copy_bytes(x),))
    length = x.numel()
    held = (copy_bytes(x), nbytes(x), length * LONG)
    sorts = _sorts(1, length, x.element_size(), call.target) if length > 4096 else ((),)
    return after(*((*held, *moment) for moment in sorts))


@RULES.of("cumsum", "cumprod", "logcumsumexp", "cumsum_", "cumprod_")
def _cumulative(call: CudaCall) -> Scratch:
    """`scan_dim` (ScanUtils.cuh): CUB's scan for a single row, else a kernel that takes nothing.

    Before it the input is cast to the result's type (`impl_func_cum_ops`, aten/src/ATen/native/ReduceOps.cpp).
    """
    x, result, gpu = call["self"], call.result, call.target
    count, itemsize = x.numel(), result.element_size()
    if not count or not x.dim():
        return NONE
    cast = count * itemsize if x.dtype != result.dtype else 0
    dense = TensorLayout.of(x, itemsize if cast else None)
    copy = 0 if is_ordered(dense.shape, dense.stride) else count * itemsize
    if count != x.shape[dimension(call["dim"], x)]:
        return after((cast, copy))
    if gpu.deterministic and result.is_floating_point():
        threads = 128 if itemsize >= 16 else 256 if itemsize >= 8 else 512
        return after((cast, copy, min(gpu.multiprocessors, -(-count // (threads * 16))) * itemsize))
    return after((cast, copy, scan(count, itemsize, half=is_half(result))))


@RULES.of("_unique2")
def _unique(call: CudaCall) -> Scratch:
    """`unique_cuda_template` and `compute_unique` (UniqueCub.cu): the result's storage stays as long as the input."""
    x, gpu = call["self"], call.target
    count, key = x.numel(), x.element_size()
    if not count:
        return NONE
    place = count * LONG if call["return_inverse"] else 0
    held = (copy_bytes(x), count * key, place, place)
    before = (*held, radix_sort(count, key, LONG if place else 0, gpu))
    kept = max(0, count * key - nbytes(call.result))
    last = (*held, place, count * LONG if call["return_counts"] else 0, LONG, select(count, gpu))
    return Scratch(before=moments((before,)), after=moments((last,)), kept=kept)


@RULES.of("randperm")
def _random_permutation(call: CudaCall) -> Scratch:
    """`randperm_out_cuda` (Randperm.cu): a range is sorted by random keys, of so many bits that few are equal.

    An int64 comes and goes before. Seen in 2.11 to 2.15.
    """
    count, itemsize = call["n"], call.result.element_size()
    if count < 2:
        return NONE
    bits = min(64, math.ceil(math.log2(count - (6 * count**2 + 1) / (12 * math.log(0.9)))))
    key = LONG if bits > 32 else FLOAT
    sort = radix_sort(count, key, itemsize, call.target, bits)
    return after((LONG,), (count * itemsize, count * key, count * key, sort))


@RULES.of("bernoulli")
def _bernoulli(call: CudaCall) -> Scratch:
    """`bernoulli_tensor_cuda_kernel` (DistributionTemplates.h): probabilities of half precision in float32."""
    x = call["self"]
    return after((x.numel() * FLOAT,)) if is_half(x) else NONE


@RULES.of("multinomial")
def _multinomial(call: CudaCall) -> Scratch:
    """`multinomial_out` (aten/src/ATen/native/Distributions.cpp): one race of exponentials, else running sums.

    For the race, checks of the probabilities are held, more of them from 2.14 on; the sums are of what is not scaled to
    one first from 2.15 on (seen in 2.11, 2.14 and 2.15).
    """
    x, samples, gpu = call["self"], call["num_samples"], call.target
    if call["replacement"] and samples != 1:
        held = (nbytes(x),) * (2 if is_torch(2, 15) else 3)
        single = x.dim() < 2 or x.shape[0] == 1
        return after((*held, scan(x.numel(), x.element_size(), half=is_half(x)) if single else 0))
    checks = (1,) * (4 if is_torch(2, 14) else 2)
    itemsize, length = x.element_size(), x.shape[-1] if x.dim() else 1
    if samples == 1:
        dims = frozenset({x.dim() - 1}) if x.dim() else frozenset()
        return after((*checks, nbytes(x), *reduction(TensorLayout.contiguous(x.shape, itemsize), dims, 16, gpu)))
    counts = _topk_counts(x.numel() // length, length, itemsize, gpu) if x.numel() else ()
    race = (*checks, nbytes(x), call.result.numel() * itemsize, *counts)
    return after(race, race)
