"""RNN layers on CUDA that cuDNN runs: the operator that is called, and its results.

Read in aten/src/ATen/native/cudnn/RNN.cpp and RNN.cpp. Without a GPU torch would take the layers apart step by step;
its fake kernel knows no size of the reserve space, and none of the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_memguard.core.foreign import aten as _aten
from lightning_memguard.core.kernels.rnn import reserve_bytes
from lightning_memguard.core.simulation.faking import by_name
from lightning_memguard.core.torch_port import FakeTensor, OpOverload

_FORWARD, _BACKWARD = _aten._cudnn_rnn.default, _aten._cudnn_rnn_backward.default

_FLATTENED = (torch.half, torch.float, torch.double)  # `CUDNN_TENSOR_DTYPES` in torch/backends/cudnn/__init__.py
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t

NOTE = "the reserve space and workspace of cuDNN's RNNs were estimated: only a device tells their sizes"


def takes_cudnn(x: torch.Tensor) -> bool:
    """`cudnn_is_acceptable` (aten/src/ATen/native/TensorProperties.cpp); an H100 ran bfloat16 with it, too."""
    return torch.backends.cudnn.enabled and x.numel() > 0 and x.is_floating_point()


def call(func: Callable[..., Any], *args: Any) -> tuple[torch.Tensor, ...]:
    """``torch.lstm`` or another RNN as `_cudnn_impl` (aten/src/ATen/native/RNN.cpp) runs it: output and last states."""
    mode = _MODES[func.__name__]
    if isinstance(args[3], (list, tuple)):  # packed: data, batch_sizes, states, weights, ...
        x, batch_sizes, states, weights, biases, layers, dropout, train, bidirectional = args
        sizes, batch_first = batch_sizes.tolist(), False
    else:
        x, states, weights, biases, layers, dropout, train, bidirectional, batch_first = args
        sizes = []
    hx, cx = states if mode == _MODES["lstm"] else (states, None)
    projected = hx.shape[2] if cx is not None and cx.shape[2] != hx.shape[2] else 0
    hidden = cx.shape[2] if cx is not None else hx.shape[2]
    buffer = weights[0].detach() if weights[0].dtype in _FLATTENED else None
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, hx, *weights = (tensor.to(dtype) for tensor in (x, hx, *weights))
        cx = None if cx is None else cx.to(dtype)
    weight = (weights, (4 if biases else 2) + bool(projected), buffer)
    options = (mode, hidden, projected, layers, batch_first, dropout, train, bidirectional, sizes, None)
    with torch.autocast("cuda", enabled=False):
        output, hy, cy, *_ = _aten._cudnn_rnn(x, *weight, hx, cx, *options)
    return (output, hy, cy) if cx is not None else (output, hy)


def fake_result(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Any, ...] | None:
    """Return the results of cuDNN's RNN or its backward pass in their true sizes; None for any other operator."""
    if func not in (_FORWARD, _BACKWARD) or not isinstance(args[0], FakeTensor):
        return None
    given = by_name(func, args, kwargs)
    return _forward(given) if func is _FORWARD else _backward(given)


def _forward(given: Mapping[str, Any]) -> tuple[Any, ...]:
    x, hx, cx = given["input"], given["hx"], given["cx"]
    directions = 2 if given["bidirectional"] else 1
    width = (given["proj_size"] or given["hidden_size"]) * directions
    output = _like(given, width)
    kept = reserve_bytes(
        *(given["mode"], math.prod(x.shape[:-1]), given["hidden_size"] * directions, given["num_layers"]),
        itemsize=x.element_size(),
        projected=given["proj_size"] * directions,
        dropped=directions * _steps(given) if given["dropout"] else 0,
    )
    reserve = x.new_empty((kept if given["train"] else 0,), dtype=torch.uint8)
    cy = x.new_empty((0,)) if cx is None else cx.new_empty(cx.shape)
    buffer = given["weight_buf"]
    if buffer is None:  # the weights are copied into one
        buffer = x.new_empty((sum(weight.numel() for weight in given["weight"]),))
    return output, hx.new_empty(hx.shape), cy, reserve, buffer


def _steps(given: Mapping[str, Any]) -> int:
    """Steps of all sequences, if each is as long as the longest."""
    sizes = given["batch_sizes"]
    return len(sizes) * sizes[0] if sizes else math.prod(given["input"].shape[:-1])


def _like(given: Mapping[str, Any], width: int) -> torch.Tensor:
    """A new tensor shaped as the input but for its width: time is first in memory."""
    x: torch.Tensor = given["input"]
    if given["batch_first"] and not given["batch_sizes"]:
        return x.new_empty((x.shape[1], x.shape[0], width)).transpose(0, 1)
    return x.new_empty((*x.shape[:-1], width))


def _backward(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """`_cudnn_rnn_backward`: the weights' gradients are views of one buffer, like the weights themselves."""
    x, hx, cx, weights = given["input"], given["hx"], given["cx"], given["weight"]
    states = _like(given, x.shape[-1]), hx.new_empty(hx.shape), None if cx is None else cx.new_empty(cx.shape)
    grads: list[torch.Tensor] = []
    if given["output_mask"][3]:
        buffer = x.new_empty((sum(weight.numel() for weight in weights),))
        offset = 0
        for weight in weights:
            grads.append(buffer.as_strided(weight.shape, weight.stride(), offset))
            offset += weight.numel()
    return *states, grads
