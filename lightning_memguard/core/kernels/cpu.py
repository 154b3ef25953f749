"""Scratch that CPU kernels take inside one operator, by operator.

It comes from PyTorch's allocator: oneDNN's copies in its own blocked layout (`cpu_alloc` in
aten/src/ATen/native/mkldnn/IDeepRegistration.cpp), buffers for each thread, contiguous copies. Each rule names the
function it describes; `tests/core/kernels/test_cpu.py` compares them with the profiler's memory events.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial

from lightning_memguard.core.kernels import onednn
from lightning_memguard.core.kernels.arguments import CpuCall, Rules, after, dtype_of, moments, operands
from lightning_memguard.core.kernels.layout import (
    contiguous_strides,
    copy_bytes,
    is_half,
    is_ordered,
    steps_of,
    transposing_tile_bytes,
)
from lightning_memguard.core.range import Range
from lightning_memguard.core.trace.scratch import FLOAT, NONE, CpuTarget, Scratch, Tensor, nbytes, up

RULES = Rules[CpuTarget]()


# -- matrix products: copies of strided operands, and the scratchpads of oneDNN in half precision

_Layout = tuple[Sequence[int], Sequence[int]]  # sizes and strides
_FACTORS = ("mat1 mat2", "batch1 batch2", "mat vec", "self mat2", "self vec", "self tensor")
_SMALL = 16 * 16 * 16  # multiplications: fewer are not worth oneDNN (`mkldnn_gemm`, `checksize`)


def half_kind(tensor: Tensor, host: CpuTarget) -> onednn.Kind | None:
    """The type that oneDNN computes in (`use_mkldnn_bf16_matmul` and `..._fp16_...` in mkldnn/Matmul.cpp)."""
    if not tensor.is_floating_point() or tensor.element_size() != FLOAT // 2:
        return None
    kind: onednn.Kind = "bf16" if dtype_of(tensor) == "bfloat16" else "f16"
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
        # Strides are as `normalize_last_dims` (aten/src/ATen/native/CPUBlas.cpp) leaves them.
        layouts = [
            ((across, down), (down, 1) if across == 1 else stride[::-1])
            for (down, across), stride in (layouts[1], layouts[0], layouts[2])
        ]
    return after((*copies, *_scratchpad(kind, layouts, alpha, beta, call.target)))


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


# -- normalization


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether an image batch has its channels innermost, and is not contiguous."""
    is_turned = tensor.dim() == 4 and not tensor.is_contiguous()
    return is_turned and is_ordered(tensor.shape, tensor.stride(), channels_last=True)


@RULES.of("native_batch_norm")
def _batch_norm(call: CpuCall) -> Scratch:
    """`batch_norm_cpu_collect_stats_channels_last_impl` and `..._contiguous_impl` (cpu/batch_norm_kernel.cpp).

    Sums of each channel, for each thread where the channels are the innermost dimension.
    """
    x = call["input"]
    by_thread = call["training"] and (x.dim() == 2 or _is_channels_last(x))
    return Scratch(after=(x.shape[1] * FLOAT * (2 + call.target.threads if by_thread else 2),))


@RULES.of("native_batch_norm_backward")
def _batch_norm_backward(call: CpuCall) -> Scratch:
    """`batch_norm_backward_cpu_template` (aten/src/ATen/native/Normalization.cpp): the input's gradient twice."""
    grad, x, weight = call["grad_out"], call["input"], call["weight"]
    alike = (grad.is_contiguous() and x.is_contiguous()) or (_is_channels_last(grad) and _is_channels_last(x))
    taken = x if call["output_mask"][0] and alike else weight
    return NONE if taken is None else Scratch(after=(nbytes(taken),))


# `layer_norm_cpu` (aten/src/ATen/native/layer_norm.cpp)
RULES.of("native_layer_norm")(lambda call: after((copy_bytes(call["input"]), copy_bytes(call["weight"]))))


@RULES.of("native_layer_norm_backward")
def _layer_norm_backward(call: CpuCall) -> Scratch:
    """`LayerNormBackwardKernelImplInternal` (aten/src/ATen/native/cpu/layer_norm_kernel.cpp): sums of each thread."""
    x = call["input"]
    copies = copy_bytes(call["grad_out"]) + copy_bytes(x)
    sums = 2 * call.target.threads * math.prod(call["normalized_shape"]) * x.element_size()
    return Scratch(after=(copies + sums * any(call["output_mask"][1:]),))


# `GroupNormBackwardKernelImplInternal` (aten/src/ATen/native/cpu/group_norm_kernel.cpp)
RULES.of("native_group_norm_backward")(lambda call: Scratch(after=(2 * call["N"] * call["C"] * FLOAT,)))


# -- losses and softmax

_MEAN = 1  # `at::Reduction::Mean`
_BAG_MEAN, _BAG_MAX = 1, 2  # `EmbeddingBagMode`


def _reduced_loss(call: CpuCall, *, apart: bool, kept: bool) -> Scratch:
    """A loss with a reduction: the mean's divisor is a double, then a number in the type of the sum.

    Args:
        call: the operator and its arguments.
        apart: whether all losses are in a tensor of their own before they are reduced.
        kept: whether the result's storage stays as large as all losses.
    """
    x = call["self"]
    if not call["reduction"]:
        return NONE
    divisor = 8 + x.element_size() % 8 if call["reduction"] == _MEAN else 0
    return after((nbytes(x), divisor) if apart else (), kept=max(0, nbytes(x) - x.element_size()) if kept else 0)


# `mse_loss_out`, `smooth_l1_loss_out`, `huber_loss` and `binary_cross_entropy_out_cpu` (Loss.cpp)
RULES.of("mse_loss", "smooth_l1_loss")(partial(_reduced_loss, apart=True, kept=True))
RULES.of("huber_loss")(partial(_reduced_loss, apart=True, kept=False))
RULES.of("binary_cross_entropy")(partial(_reduced_loss, apart=False, kept=True))


@RULES.of("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(call: CpuCall) -> Scratch:
    """`make_offset2bag` and `apply_bag_size` (EmbeddingBag.cpp).

    Where bags begin is marked, with one entry too many, and summed up in a block of its own. Means are divided by the
    size of each bag, at least one, in the type of the weights; of maxima, the places are first as many as bags.
    """
    out, bag_of, sizes = call.results[:3]
    if not bag_of.numel():
        return NONE
    marks = nbytes(bag_of) + bag_of.element_size()
    of_mean = nbytes(sizes), nbytes(sizes), len(sizes) * out.element_size()
    taken = {_BAG_MEAN: of_mean, _BAG_MAX: (nbytes(sizes),)}.get(call["mode"], ())
    return Scratch(between={1: moments(((marks,),))}, after=moments((taken,)), kept=bag_of.element_size())


@RULES.of("binary_cross_entropy_with_logits")
def _cross_entropy_with_logits(call: CpuCall) -> Scratch:
    """`binary_cross_entropy_with_logits` (Loss.cpp): log-sigmoids and their buffer, then all losses."""
    x, weight = call["self"], call["pos_weight"]
    numbers = 8 + FLOAT
    scaled = 0 if weight is None else nbytes(weight) + numbers
    first = (2 * nbytes(x) + scaled,)
    return Scratch(before=first, after=(2 * nbytes(x) + numbers if call["reduction"] else nbytes(x),))


# `soft_margin_loss_backward_out` (Loss.cpp): ``-target * self`` and its exponential
RULES.of("soft_margin_loss_backward")(lambda call: Scratch(before=moments([[3 * nbytes(call["self"])]])))
# `logsumexp_out_impl` (aten/src/ATen/native/ReduceOps.cpp): the shifted input
RULES.of("logsumexp")(lambda call: Scratch(after=(nbytes(call["self"]) + nbytes(call.result),)))


# -- sums


@RULES.of("sum", "nansum", "prod", "cumsum", "cumprod")
def _sum(call: CpuCall) -> Scratch:
    """`make_reduction_from_out_ty` (aten/src/ATen/native/ReduceOpsUtils.h): a copy in the result's type."""
    x, result = call["self"], call.result
    return NONE if x.dtype == result.dtype else after((x.numel() * result.element_size(),))


@RULES.of("mean")
def _mean(call: CpuCall) -> Scratch:
    """`mean` (aten/src/ATen/native/ReduceOps.cpp): half precision is added up in float32, in copies."""
    x, result = call["self"], call.result
    both_half = is_half(x) and is_half(result)
    return after((result.numel() * FLOAT, x.numel() * FLOAT)) if both_half else _sum(call)


# -- operands of different types

_POINTWISE = ("add", "sub", "mul", "div", "maximum", "minimum", "addcmul", "addcdiv", "lerp", "pow", "atan2")
_IN_PLACE = ("add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_", "lerp_")
BY_TYPES = frozenset((*_POINTWISE, *_IN_PLACE))
"""Operators whose rule answers `NONE` by the types of their tensors: at one size as at any other."""


@RULES.of(*_POINTWISE)
def _promoted(call: CpuCall) -> Scratch:
    """`TensorIteratorBase::compute_types` (aten/src/ATen/TensorIterator.cpp): copies in the type of the result."""
    tensors = {id(each): each for each in operands([*call.arguments.values()])}.values()
    result = call.result
    return after(
        [each.numel() * result.element_size() for each in tensors if each.dim() and each.dtype != result.dtype]
    )


@RULES.of(*_IN_PLACE)
def _promoted_in_place(call: CpuCall) -> Scratch:
    """Promote as above; a result of another type than the operands' is copied, too."""
    tensors = [each for each in operands([*call.arguments.values()]) if each.dim() and each.is_floating_point()]
    if len({each.dtype for each in tensors}) < 2:
        return NONE
    common = max(FLOAT, *(each.element_size() for each in tensors))  # bfloat16 and float16 meet in float32
    copies = (each for each in tensors if each.element_size() != common)
    return after([each.numel() * common * (2 if each is call["self"] else 1) for each in copies])


# -- attention


def _attention_split(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Rows and columns of one tile (`flash_attention_kernel`, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""
    length = query.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[2])


def _packs(call: CpuCall) -> bool:
    """`need_pack` in `cpu_flash_attention`, where AMX multiplies."""
    query, key, host = call["query"], call["key"], call.target
    is_bf16 = dtype_of(query) == "bfloat16"
    if not is_half(query) or not (host.amx_bf16 if is_bf16 else host.amx_fp16):
        return False
    rows, _ = _attention_split(query, key)
    (batch, heads, length, width), keys = query.shape, key.shape[2]
    if min(length, keys) < (64 if is_bf16 else 16):
        return False
    tiles = (batch * heads * -(-length // rows) + host.threads - 1) // host.threads
    products = tiles * rows * (min(length, keys) if call["is_causal"] else keys) * width
    return bool(products / (batch * key.shape[1] * keys * width) >= (4 if is_bf16 else 1))


@RULES.of("_scaled_dot_product_flash_attention_for_cpu")
def _attention(call: CpuCall) -> Scratch:
    """`cpu_flash_attention`: for each thread a tile of scores, its row sums and its result.

    Half precision has the scores twice; where it is packed for AMX, all keys and values too, and a tile of keys.
    """
    query, key, threads = call["query"], call["key"], call.target.threads
    rows, columns = _attention_split(query, key)
    width, size = query.shape[3], query.element_size()
    tile = threads * (rows * columns + 2 * rows + rows * width) * max(FLOAT, size)
    if not is_half(query):
        return Scratch(after=(tile,))
    if not _packs(call):
        return after((tile, threads * rows * columns * size))
    even_width, even_columns = up(width, 2), up(columns, 2)
    batch, heads, keys, _ = key.shape
    tail = (keys - 1) % columns + 1
    padded = (keys - 1) // columns * even_columns + up(tail, 2)
    packed = batch * heads * (even_width * keys + padded * width) * size
    query_tile = threads * rows * even_width * size if width % 2 else 0
    return after((tile, threads * rows * even_columns * size, packed, threads * columns * width * size, query_tile))


@RULES.of("_scaled_dot_product_flash_attention_for_cpu_backward")
def _attention_backward(call: CpuCall) -> Scratch:
    """`cpu_flash_attention_backward`: two tiles for each thread, and a copy of a gradient that is not in order.

    Half precision has the tiles twice, and adds to the three gradients by oneDNN, each thread for itself.
    """
    grad, query, threads = call["grad_out"], call["query"], call.target.threads
    rows, columns = _attention_split(query, call["key"])
    copy, size = copy_bytes(grad.transpose(1, 2)), query.element_size()
    numbers = max(FLOAT, size)
    tiles = threads * rows * columns * 2 * numbers + rows * numbers
    if not is_half(query):
        return Scratch(after=(copy + tiles,))
    product = _gradient_products(call, rows, columns)
    alike = Range(product, threads * product, threads * product) if threads > 1 and product else product
    return after((copy, tiles, threads * rows * columns * 2 * size, alike))


def _gradient_products(call: CpuCall, rows: int, columns: int) -> int:
    """The most that one product of a tile takes: of the value's, the query's and the key's gradient."""
    query, key = call["query"], call["key"]
    width = query.shape[3]
    inner = query.shape[1] * width  # gradients are made in the order of a linear layer's result
    most = 0
    for high in {rows, (query.shape[2] - 1) % rows + 1}:
        for wide in {columns, (key.shape[2] - 1) % columns + 1}:
            turned, tile = ((wide, high), (1, wide)), ((high, wide), (wide, 1))
            most = max(
                most,
                product_bytes(query, turned, ((high, width), (inner, 1)), 1, call.target),
                product_bytes(query, tile, ((wide, width), (key.stride(2), 1)), 0.5, call.target),
                product_bytes(query, turned, ((high, width), (query.stride(2), 1)), 0.5, call.target),
            )
    return most


# -- copies


@RULES.of("_log_softmax", "_softmax", "_log_softmax_backward_data", "_softmax_backward_data")
@RULES.of("embedding_dense_backward", "max_pool2d_with_indices_backward", "avg_pool2d_backward")
@RULES.of("_adaptive_avg_pool2d_backward", "upsample_nearest2d_backward", "upsample_bilinear2d_backward")
def _contiguous_first(call: CpuCall) -> Scratch:
    """Kernels that begin with ``contiguous()`` of their first tensor, if it is in neither of the orders they take."""
    copy = 0 if _is_channels_last(call.first) else copy_bytes(call.first)
    return Scratch(after=(copy + transposing_tile_bytes(call.first),)) if copy else NONE


@RULES.of("gelu_backward")
def _gelu_backward(call: CpuCall) -> Scratch:
    """`gelu_backward_out_cpu` (Activation.cpp): oneDNN computes where the input is contiguous, in its order."""
    x, grad, result = call["self"], call["grad_output"], call.result
    is_known = x.element_size() == FLOAT or half_kind(x, call.target)
    if not is_known or not x.is_contiguous() or x.numel() < 2 or call["approximate"] != "none":
        return NONE
    return after((copy_bytes(grad), copy_bytes(result)))


@RULES.of("clone", "copy_")
def _copy(call: CpuCall) -> Scratch:
    """`copy_transpose_valid` (aten/src/ATen/native/Copy.cpp): a tile that turns a transposed matrix."""
    source, target = (call["src"], call["self"]) if "src" in call.arguments else (call["self"], call.result)
    alike = target.is_contiguous() and source.dtype == target.dtype
    return after((transposing_tile_bytes(source),)) if alike else NONE


@RULES.of("chunk_cat")
def _chunk_cat(call: CpuCall) -> Scratch:
    """`_pad_chunk` (aten/src/ATen/native/TensorShape.cpp): FSDP2's gradients, where the ranks do not divide them.

    `cat` then copies each once more, one by one, where it has another dtype than the result.
    """
    dim, chunks = call["dim"], call["num_chunks"]
    copies: list[int] = []
    cast: list[int] = []
    blocks: list[list[int]] = []
    for tensor in call["tensors"]:
        size = tensor.shape[dim]
        padded = nbytes(tensor) // max(1, size) * up(size, chunks)
        copies.append(padded if padded > nbytes(tensor) else copy_bytes(tensor))
        cast.append(padded if tensor.dtype != call.result.dtype else 0)
        blocks.append([*copies, transposing_tile_bytes(tensor) if copies[-1] else 0])
    return after(*blocks, *([*copies, each] for each in cast if each))


@RULES.of("im2col", "col2im")
def _unfold(call: CpuCall) -> Scratch:
    """The result begins as large as the input, and keeps that memory if it needs less (Im2Col.cpp, Col2Im.cpp)."""
    begun, needed, copy = nbytes(call["self"]), nbytes(call.result), copy_bytes(call["self"])
    return Scratch(after=(copy + (begun if needed > begun else 0),), kept=max(0, begun - needed))


@RULES.of("upsample_nearest2d", "upsample_bilinear2d")
def _upsample(call: CpuCall) -> Scratch:
    """Small images are turned to channels last and back (aten/src/ATen/native/cpu/UpSampleKernel.cpp)."""
    x, y = call.first, call.result
    if _is_channels_last(x) or y.shape[-1] + y.shape[-2] > 128:
        return NONE
    return Scratch(after=(nbytes(x) + nbytes(y),))
