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
from lightning_memguard.core.simulation.faking import by_name
from lightning_memguard.core.torch_port import FakeTensor, OpOverload

_FORWARD, _BACKWARD = _aten._cudnn_rnn.default, _aten._cudnn_rnn_backward.default

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t

# Numbers that a cell keeps for the backward pass, in units of its hidden size: the gates, and the states between them.
# cuDNN gives the true size only on a device (`cudnnGetRNNTempSpaceSizes`), so this is an estimate, and a note says so.
_KEPT = {0: 2, 1: 2, 2: 6, 3: 5}
NOTE = "the reserve space of cuDNN's RNNs was estimated: only a device tells its size"


def takes_cudnn(x: torch.Tensor) -> bool:
    """`cudnn_is_acceptable` (aten/src/ATen/native/Cudnn.cpp); bfloat16 comes here as float32 under autocast."""
    return torch.backends.cudnn.enabled and x.numel() > 0 and x.dtype in (torch.half, torch.float, torch.double)


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
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, hx, *weights = (tensor.to(dtype) for tensor in (x, hx, *weights))
        cx = None if cx is None else cx.to(dtype)
    state = x.new_empty((_DROPOUT_STATE_BYTES,), dtype=torch.uint8) if dropout and train else None
    weight = (weights, (4 if biases else 2) + bool(projected), weights[0].detach())
    options = (mode, hidden, projected, layers, batch_first, dropout, train, bidirectional, sizes, state)
    with torch.autocast("cuda", enabled=False):
        output, hy, cy, *_ = _aten._cudnn_rnn(x, *weight, hx, cx, *options)
    return (output, hy, cy) if cx is not None else (output, hy)


_DROPOUT_STATE_BYTES = 1_572_864  # cudnnDropoutGetStatesSize: one curand state of 48 B for each of 32,768 threads


def fake_result(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Any, ...] | None:
    """Return the results of cuDNN's RNN or its backward pass in their true sizes; None for any other operator."""
    if func not in (_FORWARD, _BACKWARD) or not isinstance(args[0], FakeTensor):
        return None
    given = by_name(func, args, kwargs)
    return _forward(given) if func is _FORWARD else _backward(given)


def _forward(given: Mapping[str, Any]) -> tuple[Any, ...]:
    x, hx, cx, sizes = given["input"], given["hx"], given["cx"], given["batch_sizes"]
    directions = 2 if given["bidirectional"] else 1
    width = (given["proj_size"] or given["hidden_size"]) * directions
    output = x.new_empty((*x.shape[:-1], width))
    cells = x.shape[0] if sizes else math.prod(x.shape[:2])
    kept = cells * given["num_layers"] * directions * given["hidden_size"] * _KEPT[given["mode"]] * x.element_size()
    reserve = x.new_empty((kept if given["train"] else 0,), dtype=torch.uint8)
    cy = x.new_empty((0,)) if cx is None else cx.new_empty(cx.shape)
    return output, hx.new_empty(hx.shape), cy, reserve, given["weight_buf"]


def _backward(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """`_cudnn_rnn_backward`: the weights' gradients are views of one buffer, like the weights themselves."""
    x, hx, cx, weights = given["input"], given["hx"], given["cx"], given["weight"]
    states = x.new_empty(x.shape), hx.new_empty(hx.shape), None if cx is None else cx.new_empty(cx.shape)
    grads: list[torch.Tensor] = []
    if given["output_mask"][3]:
        buffer = x.new_empty((sum(weight.numel() for weight in weights),))
        offset = 0
        for weight in weights:
            grads.append(buffer.as_strided(weight.shape, weight.stride(), offset))
            offset += weight.numel()
    return *states, grads
