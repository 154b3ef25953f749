"""Sorts, scans and sampling on CUDA, which run CUB's algorithms."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_memguard.core.kernels.arguments import CudaCall, Rules, after, dimension, moments
from lightning_memguard.core.kernels.cub import RADIX_DIGITS, aliased, radix_sort, scan, select, tile_states
from lightning_memguard.core.kernels.cuda_reductions import INT_MAX, reduction
from lightning_memguard.core.kernels.layout import (
    LONG,
    TensorLayout,
    copy_bytes,
    is_non_overlapping_and_dense,
    is_ordered,
)
from lightning_memguard.core.trace.scratch import FLOAT, NONE, Block, ByteRange, CudaTarget, Scratch, nbytes

RULES = Rules[CudaTarget]()


@RULES.of("sort")
def _sort(call: CudaCall) -> Scratch:
    """`sort_cuda_kernel` (Sort.cpp) and `launch_stable_sort_kernel` (SortStable.cu).

    Rows up to 4096 are sorted in place of the results; larger ones by CUB, alone or many at once.
    """
    x = call["self"]
    dim = dimension(call["dim"], x)
    if not x.dim() or not x.numel() or x.shape[dim] <= 4096:
        return NONE
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
        most = max(_sorts(rows, chosen, x.element_size(), call.target), key=_likely)
        ordered = (nbytes(result), result.numel() * LONG, *most)
    return after((copy_bytes(x), *_topk_counts(rows, length, x.element_size(), call.target)), ordered)


def _likely(blocks: Iterable[Block]) -> int:
    return sum(block.point if isinstance(block, ByteRange) else block for block in blocks)


_LONG_ROWS = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))


def _topk_counts(rows: int, length: int, itemsize: int, gpu: CudaTarget) -> tuple[int, ...]:
    """`mbtopk::launch`, if `should_use_multiblock` chooses it by the number of rows and their length."""
    if length < next((least for most, least in _LONG_ROWS if rows <= most), 400):
        return ()
    resident = 65_536 // (40 * 256) * 256 * gpu.multiprocessors  # `get_items_per_thread`: 40 registers a thread
    items = 256 * max(4, min(64, -(-rows * length // resident)))
    blocks = rows * -(-length // items)
    radix = max(FLOAT, itemsize)
    singles = (rows * itemsize, rows * FLOAT, 2 * rows * FLOAT, 2 * rows * radix)
    return (*singles, blocks * RADIX_DIGITS * 2, blocks * FLOAT, blocks * FLOAT, tile_states(blocks, 1024, 16))


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
    return after((cast, copy, scan(count, itemsize)))


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


@RULES.of("multinomial")
def _multinomial(call: CudaCall) -> Scratch:
    """`multinomial_out` (aten/src/ATen/native/Distributions.cpp): one race of exponentials, else running sums."""
    x, samples, gpu = call["self"], call["num_samples"], call.target
    if call["replacement"] and samples != 1:
        return after((nbytes(x),) * 3)
    itemsize, length = x.element_size(), x.shape[-1] if x.dim() else 1
    if samples == 1:
        dims = frozenset({x.dim() - 1}) if x.dim() else frozenset()
        return after((nbytes(x), *reduction(TensorLayout.contiguous(x.shape, itemsize), dims, 16, gpu)))
    counts = _topk_counts(x.numel() // length, length, itemsize, gpu) if x.numel() else ()
    return after((nbytes(x), call.result.numel() * itemsize, *counts))
