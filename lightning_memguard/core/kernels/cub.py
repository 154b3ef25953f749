"""Temporary storage of CUB's sorts, scans and selections, which PyTorch takes from its caching allocator.

Read in CCCL 3.0 (CUDA 13.0); CUB itself gave these sizes without a GPU, for capability 7.5, 8.0, 9.0, 10.0 and 12.0.
"""

from __future__ import annotations

from lightning_memguard.core.kernels.layout import LONG
from lightning_memguard.core.trace.scratch import FLOAT, Block, ByteRange, CudaTarget, up

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
        return ByteRange(buffers + spine, buffers + 4 * spine, buffers + 8 * spine)
    second = count if passes > 1 else 0
    portion = _RADIX_PORTION // tile * tile
    portions = -(-count // portion)
    bins, lookback = portions * passes * RADIX_DIGITS * LONG, -(-min(count, portion) // tile) * RADIX_DIGITS * FLOAT
    return aliased(bins, lookback, second * key, second * value, portions * passes * FLOAT)


def tile_states(count: int, tile: int, word: int) -> int:
    """`ScanTileState::AllocationSize` (cub/agent/single_pass_scan_operators.cuh): a word for each tile, and 32 more."""
    return up((-(-count // tile) + 32) * word, 256) + 511 if count else 0


def scan(count: int, itemsize: int) -> int:
    """Temporary storage of `DeviceScan`, whose input is cut at 2^30 (aten/src/ATen/cuda/cub.cuh, `inclusive_scan`)."""
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
    return ByteRange(each, 4 * each, 8 * each)
