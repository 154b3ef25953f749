"""Operator and arguments -> the floating point operations it runs, and the bytes it moves.

Products by the formulas of torch's own counter where these are right; gradients of convolutions by ours, since torch
counts those of a grouped one up to twice.
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/flop_counter.py (`flop_registry`)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.foreign import aten
from lightning_memguard.core.kernels.arguments import dtype_of, operands
from lightning_memguard.core.torch_port import OpOverload
from lightning_memguard.core.trace.work import COMMUNICATION, CONVOLUTION, RANDOM, SPECIAL, Work

_Shape = Sequence[int]


def _attention(query: _Shape, key: _Shape, value: _Shape, *_: object, **__: object) -> int:
    """Queries by keys, then the scores by values; heads of keys and values may be fewer, each for several queries."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(_: _Shape, query: _Shape, key: _Shape, value: _Shape, *__: object, **___: object) -> int:
    """The scores again, and four products: of the gradients of scores, queries, keys and values."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _lstm(x: _Shape, weight_ih: _Shape, weight_hh: _Shape, *_: object, **__: object) -> int:
    """One layer in one direction: its input (steps, batch, inputs) by one weight, its state by another."""
    return 2 * math.prod(x[:-1]) * (math.prod(weight_ih) + math.prod(weight_hh))


def _cudnn_rnn(x: _Shape, weights: Sequence[_Shape], *_: object, **__: object) -> int:
    """All layers: every weight that is a matrix is multiplied once for each step and sample."""
    return 2 * math.prod(x[:-1]) * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def _convolution_backward(grad: _Shape, x: _Shape, weight: _Shape, *rest: Any, **_: object) -> int:
    """The gradient of the input costs as much as the forward pass, and so does that of the weight."""
    wanted: int = sum(rest[-1][:2])
    images = x if rest[_TRANSPOSED] else grad
    return wanted * 2 * images[0] * math.prod(images[2:]) * math.prod(weight)


_TRANSPOSED = 4  # place of ``transposed`` after the weight


# Products that torch's counter does not know, or counts otherwise. Each rule gets shapes in place of tensors.
FLOPS: dict[Any, Callable[..., int]] = {
    getattr(aten, name): rule
    for name, rule in (
        ("convolution_backward", _convolution_backward),
        ("_scaled_dot_product_cudnn_attention", _attention),
        ("_scaled_dot_product_efficient_attention", _attention),
        ("_scaled_dot_product_flash_attention", _attention),
        ("_scaled_dot_product_flash_attention_for_cpu", _attention),
        # torch's own rule refuses fewer heads of keys and values
        ("_scaled_dot_product_cudnn_attention_backward", _attention_backward),
        ("_scaled_dot_product_efficient_attention_backward", _attention_backward),
        ("_scaled_dot_product_flash_attention_backward", _attention_backward),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", _attention_backward),
        ("_scaled_dot_product_fused_attention_overrideable", _attention),
        ("mkldnn_rnn_layer", _lstm),
        ("mkldnn_rnn_layer_backward", lambda *args, **_: 2 * _lstm(*args)),
        ("_cudnn_rnn", _cudnn_rnn),
        ("_cudnn_rnn_backward", lambda *args, **_: 2 * _cudnn_rnn(*args)),
        ("mv", lambda matrix, *_, **__: 2 * math.prod(matrix)),
        ("addmv", lambda _, matrix, *__, **___: 2 * math.prod(matrix)),
        ("dot", lambda vector, *_, **__: 2 * math.prod(vector)),
    )
}

# A rule of torch's gets tensors, with its own decorator around it that takes their shapes.
_TORCH_FLOPS: dict[Any, Callable[..., int]] = flop_registry

# Operators that read their largest input twice: for its statistics, then for its values. Batch norms do so in training.
_TWICE = ("batch_norm_backward", "native_group_norm", "_batch_norm_with_update")
_IF_TRAINING, _TRAINING = ("native_batch_norm", "cudnn_batch_norm"), 5  # place of the argument
_GATHERS = ("embedding", "index", "index_select", "gather", "_embedding_bag", "embedding_renorm_")
_RANDOM = (
    *("native_dropout", "bernoulli", "multinomial"),
    *("uniform", "normal", "rand", "randn", "rand_like", "randn_like"),
)
_SPECIAL = (
    *("exp", "log", "pow", "sin", "cos", "erf", "tanh", "sigmoid", "log_sigmoid_forward", "logsumexp"),
    *("gelu", "silu", "mish", "elu", "softplus", "softmax", "log_softmax", "binary_cross_entropy_with_logits"),
)
_LEAST_CHANNELS = 8  # of each group: a tensor core multiplies blocks of 8 or 16 of them


def work_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: object, *, tf32: bool) -> Work | None:
    """Return the work of one call; None if there is none, as for a view.

    Args:
        func: the operator.
        args: its arguments, fake or real.
        kwargs: its named arguments.
        out: what it returned.
        tf32: whether convolutions of float32 compute in TF32.
    """
    moves = _moves(func)
    if not moves:
        return None
    given, results = list(operands((args, tuple(kwargs.values())))), list(operands(out))
    if moves == COMMUNICATION:
        times = 2 if "allreduce" in func.name().replace("_", "") else 1  # reduced to parts, and gathered
        return Work(COMMUNICATION, 0, times * max((_nbytes(tensor) for tensor in (*given, *results)), default=0))
    made = sum(map(_nbytes, results))
    read = made if moves == "gather" else sum(map(_nbytes, given))
    if moves == "twice" or (moves == "if training" and args[_TRAINING]):
        read += max(map(_nbytes, given), default=0)
    rule = FLOPS.get(func.overloadpacket)
    if rule is not None:
        flops = rule(
            *map(_shapes, args), **{name: _shapes(value) for name, value in kwargs.items()}, out_shape=_shapes(out)
        )
    elif func.overloadpacket in _TORCH_FLOPS:
        flops = _TORCH_FLOPS[func.overloadpacket](*args, **kwargs, out_val=out)
    elif read + made:
        kind = _slow_kind(func)
        return Work(kind, max(t.numel() for t in (*given, *results)) if kind else 0, read + made)
    else:
        return None
    return Work(_kind(func, given, tf32=tf32), flops, read + made)


@functools.cache
def _slow_kind(func: OpOverload) -> str:
    """Whether elements take a CPU longer than their bytes do."""
    name = port.schema_of(func).name.removeprefix("aten::").removesuffix("_backward").strip("_")
    return RANDOM if name in _RANDOM else SPECIAL if name in _SPECIAL else ""


def _shapes(value: object) -> Any:
    """A value with the shapes of tensors in place of them."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return [_shapes(each) for each in value] if isinstance(value, (list, tuple)) else value


def _nbytes(tensor: Tensor) -> int:
    """Bytes behind a tensor: an expanded one has fewer than elements."""
    nbytes: int = tensor.numel() * tensor.element_size()
    return min(nbytes, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else nbytes


def _kind(func: OpOverload, given: Sequence[Tensor], *, tf32: bool) -> str:
    """The number format that a product computes in. Thin groups have no use for tensor cores."""
    kind = dtype_of(given[0])
    if not port.schema_of(func).name.startswith("aten::convolution"):
        tf32 = given[0].is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"
        return "tf32" if tf32 and kind == "float32" else kind
    x, weight = given[1:3] if port.schema_of(func).name.endswith("backward") else given[:2]
    if tf32 and kind == "float32":
        kind = "tf32"
    if weight.shape[1] < min(x.shape[1], _LEAST_CHANNELS):
        kind = "float32"
    return kind + CONVOLUTION


@functools.cache
def _moves(func: OpOverload) -> str:
    """How an operator moves bytes: not at all, or each operand once, or as one of the lists above."""
    namespace, _, name = port.schema_of(func).name.partition("::")
    if namespace in ("c10d", "_c10d_functional"):
        return COMMUNICATION if any(word in name for word in ("reduce", "gather", "all_to_all", "broadcast")) else ""
    if "empty" in name or name in ("_unsafe_view", "_reshape_alias", "lift_fresh", "detach"):
        return ""
    if any(result.alias_info is not None and not result.alias_info.is_write for result in port.schema_of(func).returns):
        return ""
    if name in _GATHERS:
        return "gather"
    if name in _IF_TRAINING:
        return "if training"
    return "twice" if any(name.endswith(part) for part in _TWICE) else "once"
