"""Formulas of autograd on plain tensors, if they take another code path on tensor subclasses.

A formula that asks `areAnyTensorSubclassLike` (aten/src/ATen/TensorSubclassLikeUtils.h) takes every tensor for a
subclass under a dispatch mode, and then writes to a new tensor what it writes in place on plain ones, or takes a way
that needs no values. Read in torch/csrc/autograd/FunctionsManual.cpp and aten/src/ATen/native of torch 2.11 to 2.13;
`tests/core/simulation/test_plain.py` compares what many functions allocate with PyTorch's profiler, so that it finds a
formula that is missing here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.foreign import aten as _aten
from lightning_memguard.core.torch_port import OpOverload

# A formula that calls one of these on a tensor of zeros that it has just made does so in place on plain tensors.
_IN_PLACE: dict[OpOverload, OpOverload] = {
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter.value: _aten.scatter_.value,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.index_add.default: _aten.index_add_.default,
    _aten.index_fill.int_Scalar: _aten.index_fill_.int_Scalar,
    _aten.index_fill.int_Tensor: _aten.index_fill_.int_Tensor,
    _aten.index_put.default: _aten.index_put_.default,
    _aten.masked_scatter.default: _aten.masked_scatter_.default,
    _aten.put.default: _aten.put_.default,
}
# The same, of certain formulas on any tensor that they have made.
_IN_PLACE_OF: dict[str, dict[OpOverload, OpOverload]] = {
    "ClampBackward0": {
        _aten.logical_and.default: _aten.logical_and_.default,
        _aten.logical_or.default: _aten.logical_or_.default,
        _aten.masked_fill.Scalar: _aten.masked_fill_.Scalar,  # here and below: from torch 2.14 on
    },
    **{
        name: {_aten.masked_fill.Scalar: _aten.masked_fill_.Scalar}
        for name in (
            *(f"{function}Backward0" for function in ("Maximum", "Minimum", "Fmax", "Fmin")),
            *(f"{function}Backward1" for function in ("ClampMin", "ClampMax")),
        )
    },
    # These make a new tensor on plain tensors as well.
    "ScatterReduceBackward0": {},
    "IndexReduceBackward0": {},
}


def in_place(node: Any) -> dict[OpOverload, OpOverload]:
    """Map operators to those that a node's formula calls on plain tensors instead, in place on tensors it has made."""
    return _IN_PLACE_OF.get(node.name(), _IN_PLACE)


_Formula = Callable[..., tuple[Tensor | None, ...]]
_FORMULAS: dict[str, _Formula] = {}


def formula(node: Any) -> _Formula | None:
    """How a node computes its gradients from plain tensors, if that is not what it does under a dispatch mode."""
    return None if torch.is_grad_enabled() else _FORMULAS.get(node.name())


def _of(*names: str) -> Callable[[_Formula], _Formula]:
    def add(function: _Formula) -> _Formula:
        _FORMULAS.update(dict.fromkeys(names, function))
        return function

    return add


def _of_first(first: str, node: Any, grad: Tensor) -> Tensor:
    """`mm_mat1_grad` of a product whose first matrix has this name; the gradient is laid out as the matrix."""
    other, sizes = port.saved_by(node, "mat2"), port.saved_by(node, f"{first}_sym_sizes")
    turned = tuple(port.saved_by(node, f"{first}_sym_strides")) == (1, sizes[0])
    return other.mm(grad.t()).t() if turned else grad.mm(other.t())


def _of_second(first: str, node: Any, grad: Tensor) -> Tensor:
    """`mm_mat2_grad`, likewise."""
    other = port.saved_by(node, first)
    turned = tuple(port.saved_by(node, "mat2_sym_strides")) == (1, port.saved_by(node, "mat2_sym_sizes")[0])
    return grad.t().mm(other).t() if turned else other.t().mm(grad)


def _of_divisor(node: Any, grad: Tensor) -> Tensor:
    """`div_tensor_other_backward`; here and below, what one expression makes lives until it ends, as in C++."""
    other, negated = port.saved_by(node, "other"), -grad
    ratio = port.saved_by(node, "self") / other
    slope = ratio / other
    found: Tensor = negated * slope.conj()
    return found


def _of_tanh(node: Any, grad: Tensor) -> Tensor:
    doubled = -2 * port.saved_by(node, "output").conj()
    slope = doubled * port.saved_by(node, "grad_output")
    found: Tensor = grad.conj() * slope
    return found


def _of_sigmoid(node: Any, grad: Tensor) -> Tensor:
    doubled = -2 * port.saved_by(node, "output").conj()
    slope = doubled + 1
    product = grad.conj() * port.saved_by(node, "grad_output")
    found: Tensor = product * slope
    return found


# How a node computes each of its gradients, for ``autograd.grad`` of some inputs: the engine asks for those alone.
BY_RESULT: dict[str, tuple[Callable[[Any, Tensor], Tensor], ...]] = {
    "MulBackward0": (
        lambda node, grad: grad * port.saved_by(node, "other").conj(),
        lambda node, grad: grad * port.saved_by(node, "self").conj(),
    ),
    "DivBackward0": (lambda node, grad: grad / port.saved_by(node, "other").conj(), _of_divisor),
    # Of a second derivative: the gradients of a gradient, and of what the forward pass returned.
    "TanhBackwardBackward0": (
        lambda node, grad: _aten.tanh_backward(grad, port.saved_by(node, "output").conj()),
        _of_tanh,
    ),
    "SigmoidBackwardBackward0": (
        lambda node, grad: _aten.sigmoid_backward(grad, port.saved_by(node, "output").conj()),
        _of_sigmoid,
    ),
    "MmBackward0": (partial(_of_first, "self"), partial(_of_second, "self")),
    "AddmmBackward0": (lambda _, grad: grad, partial(_of_first, "mat1"), partial(_of_second, "mat1")),
    "BmmBackward0": (
        lambda node, grad: grad.bmm(port.saved_by(node, "mat2").transpose(1, 2)),
        lambda node, grad: port.saved_by(node, "self").transpose(1, 2).bmm(grad),
    ),
}


@_of("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")
def _evenly_distributed(node: Any, grad: Tensor) -> tuple[Tensor]:
    """`evenly_distribute_backward`; on the CPU as if no value were nan."""
    x, value = port.saved_by(node, "self"), port.saved_by(node, "result")
    if x.device.type != "cpu":
        missing = x.isnan()
        missing.logical_and_(value.isnan())
        mask = (x == value).logical_or_(missing)
        return (mask * (grad / mask.sum()),)
    value.isnan()
    mask = x == value
    return (grad.new_zeros(x.shape).masked_fill_(mask, grad / mask.sum()),)


@_of("ProdBackward0")
def _product(node: Any, grad: Tensor) -> tuple[Tensor]:
    """`prod_backward` of values without a zero."""
    x, result = port.saved_by(node, "self"), port.saved_by(node, "result")
    if x.dim() == 0:
        return (grad,)
    _ = x == 0
    del _
    return (grad * (result / x).conj(),)


@_of("ProdBackward1")
def _product_along(node: Any, grad: Tensor) -> tuple[Tensor]:
    """`prod_backward` along a dimension of values without a zero."""
    x, result, dim = (port.saved_by(node, name) for name in ("self", "result", "dim"))
    if x.dim() == 0:
        return (grad,)
    if not port.saved_by(node, "keepdim"):
        grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
    zeros = x == 0
    counts = zeros.sum(dim, keepdim=True)
    counts.sum()
    return (grad * (result / x).conj(),)


@_of("CumprodBackward0")
def _running_product(node: Any, grad: Tensor) -> tuple[Tensor]:
    """`cumprod_backward` of values without a zero."""
    x, dim = port.saved_by(node, "self"), port.saved_by(node, "dim")
    if x.numel() <= 1 or x.shape[dim] == 1:
        return (grad,)
    products = port.saved_by(node, "result").conj() * grad
    zeros = x == 0
    zeros.any()
    return (_summed_from_the_end(products, dim).div(x.conj()),)


def _summed_from_the_end(x: Tensor, dim: int) -> Tensor:
    """`reversed_cumsum`; in C++, what one expression makes lives until it ends."""
    turned = x.flip(dim)
    summed = turned.cumsum(dim)
    return summed.flip(dim)


@_of("BinaryCrossEntropyWithLogitsBackward0")
def _cross_entropy_with_logits(node: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """`binary_cross_entropy_with_logits_backward`."""
    x, target, weight, factor = (port.saved_by(node, name) for name in ("self", "target", "weight", "pos_weight"))
    if factor is None:
        found = x.sigmoid().sub_(target)
    else:
        scaled = factor * target
        found = scaled.add(1).sub_(target).mul_(x.sigmoid()).sub_(scaled)
    found.mul_(grad)
    if weight is not None:
        found.mul_(weight)
    if port.saved_by(node, "reduction") == _MEAN:
        found.div_(x.numel())
    return (found,)


_MEAN = 1  # at::Reduction::Mean
