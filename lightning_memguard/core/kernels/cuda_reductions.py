"""Reductions on CUDA: partial results if several blocks share an output, and copies in the result's type."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from lightning_memguard.core.kernels.arguments import CudaCall, Rules, after, dimensions, is_torch
from lightning_memguard.core.kernels.layout import LONG, TensorLayout, accumulator_bytes, contiguous_strides, is_half
from lightning_memguard.core.trace.scratch import FLOAT, NONE, CudaTarget, Scratch, Tensor, nbytes

RULES = Rules[CudaTarget]()


class _Loop(NamedTuple):
    """One dimension of a reduction: its size, and the strides of output (0 if reduced) and input."""

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


def _loops(x: TensorLayout, reduced: frozenset[int]) -> list[_Loop]:
    """Dimensions as a `TensorIterator` has them: reduced ones first, the fastest first, neighbours merged."""
    kept = [dimension for dimension in range(len(x.shape)) if dimension not in reduced]
    outs = dict(zip(kept, contiguous_strides([x.shape[dimension] for dimension in kept]), strict=True))
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


INT_MAX = (1 << 31) - 1


def reduction(
    x: TensorLayout, reduced: frozenset[int], accumulator: int, gpu: CudaTarget, vector: int = 4, out: int | None = None
) -> tuple[int, ...]:
    """`gpu_reduce_kernel` (Reduce.cuh): partial results and semaphores, if several blocks share an output.

    A partial result has ``accumulator`` bytes, a result has ``out``, and one thread reads ``vector`` elements at once.
    An input past 2 GiB is reduced in halves; if results are too small to add up in, one buffer is shared by all
    halves (`AccumulationBuffer`).
    """
    if not math.prod(x.shape):
        return ()
    loops, halved = _loops(x, reduced), False
    while 1 + sum((loop.size - 1) * loop.into * x.itemsize for loop in loops) > INT_MAX:
        far = max(range(len(loops)), key=lambda place: (loops[place].size - 1) * loops[place].into)
        loops[far] = loops[far]._replace(size=loops[far].size - loops[far].size // 2)
        halved = True
    results, blocks = _config(loops, x, gpu, vector)
    outputs = math.prod(x.shape[d] for d in range(len(x.shape)) if d not in reduced)
    shared = outputs * accumulator if halved and out is not None and out < accumulator else 0
    semaphores = FLOAT * blocks if results else 0
    return tuple(size for size in (shared, accumulator * results, semaphores) if size)


def last_power(value: int) -> int:
    """The largest power of two up to a number."""
    return 1 << (max(1, value).bit_length() - 1)


def _config(loops: list[_Loop], x: TensorLayout, gpu: CudaTarget, vector: int) -> tuple[int, int]:
    """`setReduceConfig` (Reduce.cuh): how many partial results in all, and how many blocks side by side.

    If the output's fastest dimension is the input's too, each partial result has room for a whole block of threads
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
        # `get_output_vec_size`: outputs that one thread reads side by side
        many = math.gcd(4, x.offset, *(loop.size if place == count else loop.into for place, loop in enumerate(loops)))
        wide //= many
    width, height = _block(wide, high, 512 // many)
    step, columns = (width, 1) if by_input else (1, width)
    if -(-inputs // step) < min(16 * height, 256):
        return 0, 0
    step *= height
    each = -(-inputs // step)
    blocks = -(-(outputs // many) // columns)
    target = gpu.multiprocessors * (_threads(gpu) // (width * height))
    if each < 256 or blocks > target:
        return 0, 0
    shares = max(min(-(-target // blocks), -(-each // 16)), -(-each // 256))
    if shares < 2:
        return 0, 0
    return outputs * shares * (1 if by_input else width * many), blocks


def _block(wide: int, high: int, most: int) -> tuple[int, int]:
    """`ReduceConfig::set_block_dimension`: threads along the fastest dimension, and across it."""
    wide = last_power(wide) if wide < most else most
    high = last_power(high) if high < most else most
    height = min(high, most // min(wide, 32))
    return min(wide, most // height), height


def _threads(gpu: CudaTarget) -> int:
    """Threads that a multiprocessor holds (CUDA C++ Programming Guide, technical specifications)."""
    major, minor = gpu.compute_capability
    if (major, minor) == (7, 5):
        return 1024
    return 1536 if (major == 8 and minor) or major in (11, 12) else 2048


def moment_accumulator_bytes(tensor: Tensor) -> int:
    """`WelfordData` (aten/src/ATen/native/SharedReduceOps.h): four numbers for each partial mean and variance."""
    return 32 if accumulator_bytes(tensor) > FLOAT else 16


@RULES.of("sum", "mean", "prod", "nansum", "linalg_vector_norm", "norm")
def _sum(call: CudaCall) -> Scratch:
    """`sum_functor` and others (ReduceSumProdKernel.cu, ReduceMomentKernel.cu, ReduceNormKernel.cu).

    `make_reduction_from_out_ty` (aten/src/ATen/native/ReduceOpsUtils.h): a copy in the result's type. Half precision is
    added up into float32 as it is read; a mask that is counted becomes int64.
    """
    x, result = call["self"], call.result
    itemsize, dims = result.element_size(), dimensions(call.get("dim"), x)
    as_read = x.dtype == result.dtype or (is_half(x) and result.is_floating_point() and itemsize == FLOAT)
    layout, accumulated = (TensorLayout.of(x), x) if as_read else (TensorLayout.of(x, itemsize), result)
    partials = reduction(layout, dims, accumulator_bytes(accumulated), call.target, out=itemsize)
    return after((0 if as_read else x.numel() * itemsize, *partials))


def _reduced(call: CudaCall, accumulator: int, vector: int = 4, out: int | None = None) -> Scratch:
    """An input that is reduced as it is, in its own type."""
    x = call["self"]
    return after(reduction(TensorLayout.of(x), dimensions(call.get("dim"), x), accumulator, call.target, vector, out))


# `std_var_kernel_impl` (ReduceMomentKernel.cu): `WelfordData`, two elements read at once
RULES.of("var", "std", "var_mean", "std_mean")(
    lambda call: _reduced(call, moment_accumulator_bytes(call["self"]), 2, call.result.element_size())
)
# `aminmax_kernel` (ReduceAMinMaxKernel.cu): the smallest and the largest side by side
RULES.of("aminmax")(lambda call: _reduced(call, 2 * call["self"].element_size(), out=call["self"].element_size()))
RULES.of("any")(partial(_reduced, accumulator=1))


@RULES.of("all")
def _all(call: CudaCall) -> Scratch:
    """`and_kernel_cuda` (ReduceLogicKernel.cu): partial results are in the input's type up to 2.13, then masks.

    Seen in 2.11, 2.14 and 2.15.
    """
    return _reduced(call, 1 if is_torch(2, 14) else call["self"].element_size())


@RULES.of("amax", "amin", "max", "min", "argmax", "argmin")
def _extreme(call: CudaCall) -> Scratch:
    """`max_launch_kernel` and others (ReduceMaxValuesKernel.cu, ReduceArgMaxKernel.cu): a value, or with its index."""
    x = call["self"]
    if call.get("other") is not None:
        return NONE  # the larger of two tensors
    has_index = len(call.results) > 1 or call.result.dtype != x.dtype
    return _reduced(call, 16 if has_index else x.element_size(), out=call.result.element_size())


@RULES.of("count_nonzero")
def _count_nonzero(call: CudaCall) -> Scratch:
    """`count_nonzero_cuda` (aten/src/ATen/native/TensorAdvancedIndexing.cpp): ``(self != 0).sum(dims)``."""
    x = call["self"]
    partial_sums = reduction(TensorLayout.of(x, LONG), dimensions(call["dim"], x), LONG, call.target)
    return after((x.numel(), x.numel() * LONG, *partial_sums))


@RULES.of("logsumexp")
def _logsumexp(call: CudaCall) -> Scratch:
    """`logsumexp_out_impl` (aten/src/ATen/native/ReduceOps.cpp): maxima, and the input shifted by them."""
    x, gpu = call["self"], call.target
    dims, itemsize = dimensions(call["dim"], x), x.element_size()
    rows = math.prod(x.shape[d] for d in range(x.dim()) if d not in dims)
    maxima = rows * itemsize if x.numel() else 0
    extremes = reduction(TensorLayout.of(x), dims, itemsize, gpu)
    sums = reduction(TensorLayout.of(x, itemsize), dims, accumulator_bytes(x), gpu, out=itemsize)
    return after((maxima, *extremes), (maxima, maxima, rows), (maxima, nbytes(x), *sums))


def mean_blocks(count: int, itemsize: int, gpu: CudaTarget) -> tuple[int, ...]:
    """Partial sums of a mean over all of a contiguous tensor."""
    return reduction(
        TensorLayout.contiguous((count,), itemsize), frozenset({0}), max(FLOAT, itemsize), gpu, out=itemsize
    )
