"""Memory of an LSTM layer on the CPU: oneDNN runs it, and torch's fake kernel knows only half of its results.

Checked on torch 2.13 and 2.14 (oneDNN 3.12). ``at::lstm`` runs ``aten::mkldnn_rnn_layer`` for each layer and direction
(`use_mkldnn` in aten/src/ATen/native/RNN.cpp). Its fake kernel (torch/_meta_registrations.py) returns an empty
workspace, though the real one outweighs all else that the layer keeps for the backward pass, and one tensor for both
bias gradients. oneDNN's reordered weights and its scratchpads come out of torch's allocator too (`cpu_alloc` in
aten/src/ATen/native/mkldnn/IDeepRegistration.cpp). GRU, plain RNN, and LSTM with projections, in float64 or of packed
sequences have no such path: torch runs them through linear operators, step by step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.foreign import aten
from lightning_memguard.core.kernels.layout import copy_bytes
from lightning_memguard.core.simulation.fake import training_threads
from lightning_memguard.core.simulation.faking import by_name
from lightning_memguard.core.torch_port import FakeTensor, OpOverload
from lightning_memguard.core.trace.scratch import nbytes, up

_FORWARD, _BACKWARD = aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default
_Arguments = Mapping[str, Any]

_PAGE = 4096  # `set_offsets` in oneDNN, src/cpu/rnn/rnn_utils.cpp
_ALIGNMENT = 128  # `default_alignment` in oneDNN, src/common/memory_tracking.hpp
_GATES = 4
_FLOAT = 4  # oneDNN accumulates in float32 and so are all gradients


def fake_result(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Tensor, ...] | None:
    """Return the results of an LSTM layer or its backward pass, each a fake tensor of its own in its true size.

    None for any other operator, for real tensors and for other devices, where torch knows better.
    """
    if func not in (_FORWARD, _BACKWARD):
        return None
    given = by_name(func, args, kwargs)
    x, hx, hidden = given["input"], given["hx_"], given["hidden_size"]
    if not isinstance(x, FakeTensor) or x.device.type != "cpu":
        return None
    if func is _FORWARD:
        training = torch.is_grad_enabled()  # what `mkldnn_rnn_layer` itself asks
        workspace = x.new_empty((_workspace_bytes(_layer(given)) if training else 0,), dtype=torch.uint8)
        states = hx.new_empty(hx.shape), given["cx_"].new_empty(given["cx_"].shape)
        return x.new_empty((*x.shape[:2], hidden)), *states, workspace
    bias = (_GATES * hidden,)
    shapes = (x.shape, given["weight1"].shape, given["weight2"].shape, bias, bias, hx.shape, given["cx_tmp"].shape)
    return tuple(x.new_empty(shape, dtype=torch.float32) for shape in shapes)


def scratch_bytes(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    """How far the bytes alive inside an LSTM layer, or its backward pass, rise above its results.

    The kernel takes them from torch's CPU allocator and gives them back; 0 for every other operator or device.
    """
    if func not in (_FORWARD, _BACKWARD):
        return 0
    given = by_name(func, args, kwargs)
    scratch = _forward_scratch if func is _FORWARD else _backward_scratch
    return scratch(given) if given["input"].device.type == "cpu" else 0


# -- the layer


@dataclass(frozen=True)
class _Layer:
    steps: int
    batch: int
    inputs: int
    hidden: int
    element: int  # bytes of a number: 4 in float32, 2 in bfloat16


def _layer(given: _Arguments) -> _Layer:
    x = given["input"]
    return _Layer(x.shape[0], x.shape[1], x.shape[2], given["hidden_size"], x.element_size())


# -- what torch allocates around oneDNN: aten/src/ATen/native/mkldnn/RNN.cpp, include/ideep/operators/lstm.hpp


def _forward_scratch(given: _Arguments) -> int:
    """`mkldnn_rnn_layer`: the sum of both biases (or zeros), then oneDNN's copies of the weights and its scratchpad."""
    layer, training = _layer(given), torch.is_grad_enabled()
    weights = copy_bytes(given["weight0"]) + copy_bytes(given["weight1"])
    bias = _GATES * layer.hidden * layer.element
    return weights + bias + _forward_weights_bytes(layer, training) + _forward_scratchpad_bytes(layer, training)


def _backward_scratch(given: _Arguments) -> int:
    """`mkldnn_rnn_layer_backward`: gradients that are missing, strided or not in float32, and what oneDNN takes.

    oneDNN's own bias gradient is left out: when the second result of that size is cloned from the first, it is gone.
    """
    layer = _layer(given)
    states = (given["output"], given["hx_"], given["cx_tmp"])
    grads = (given["grad_output"], given["grad_hy"], given["grad_cy"])
    taken = sum(nbytes(x) if grad is None else copy_bytes(grad) for grad, x in zip(grads, states, strict=True))
    if layer.element != _FLOAT:
        taken += sum(state.numel() * _FLOAT for state in states)
    if port.storage_id(given["hx_"].untyped_storage()) == port.storage_id(given["cx_tmp"].untyped_storage()):
        taken += nbytes(given["cx_tmp"])
    weights = copy_bytes(given["weight1"]) + copy_bytes(given["weight2"])
    bias = _GATES * layer.hidden * layer.element
    return taken + weights + bias + _backward_weights_bytes(layer) + _backward_scratchpad_bytes(layer)


# -- which of its kernels oneDNN takes: `init_brgemm`, else `init_ref`, in oneDNN, src/cpu/rnn/ref_rnn.cpp


def _is_brgemm(layer: _Layer, training: bool) -> bool:
    """Whether it takes the blocked kernels: never to train in float32; in bfloat16 if there are instructions for it.

    Left uncounted: on AMX some 16 KiB a thread; without AVX2, or AVX512-BF16, what inference packs its weights into.
    """
    if layer.element == _FLOAT:
        return not training and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return port.multiplies_bfloat16()


# -- weights in oneDNN's order: `set_expected_desc` in oneDNN, src/cpu/rnn/rnn_utils.cpp


def _forward_weights_bytes(layer: _Layer, training: bool) -> int:
    """Return the bytes of both weights with rows by input (ldigo, rows padded); a single row keeps torch's order.

    `brgemm_calc_n_block` (src/cpu/x64/rnn/rnn_brgemm_utils.cpp): two registers, four for a single row on AVX2.
    """
    sizes, columns, e = (layer.inputs, layer.hidden), _GATES * layer.hidden, layer.element
    if _is_brgemm(layer, training):
        wide = e != _FLOAT or torch.backends.cpu.get_cpu_capability().startswith("AVX512") or layer.batch == 1
        together = _FLOAT // e  # two numbers in bfloat16 go side by side
        return sum(up(size, together) for size in sizes) * _GATES * up(layer.hidden, 32 if wide else 16) * e
    return sum(size * _good_ld(columns, e) * e for size in sizes if size > 1)


def _backward_weights_bytes(layer: _Layer) -> int:
    """Return the bytes of both weights with rows by gate (ldgoi, torch's own order) and of their gradients.

    Blocked kernels (`_is_brgemm`) copy the weights, others only if rows need padding. The gradients come out with
    rows by input, to be reordered, and in float32.
    """
    sizes, columns, e = (layer.inputs, layer.hidden), _GATES * layer.hidden, layer.element
    diffs = sum(size * (_good_ld(columns, _FLOAT) if size > 1 else columns) * _FLOAT for size in sizes)
    if _is_brgemm(layer, training=True):
        return diffs + sum(up(size, 32) for size in sizes) * _GATES * up(layer.hidden, 2) * e
    padded = ((size, _good_ld(size, e)) for size in sizes)
    return diffs + sum(columns * row * e for size, row in padded if row != size)


# -- workspace and scratchpad: `init_conf`, `set_workspace_sizes` (rnn_utils.hpp), `set_offsets` (rnn_utils.cpp)


def _workspace_bytes(layer: _Layer) -> int:
    """Return the bytes kept for the backward pass, equal on all processors: gates, states, their gradients."""
    n, h, e = layer.batch, layer.hidden, layer.element
    cells = layer.steps * n
    states = 2 * (layer.steps + 1) * n  # below and above the layer, with the initial ones
    widest = max(layer.inputs, h)
    gates, before_projection = cells * _good_ld(_GATES * h, e) * e, cells * _good_ld(h, e) * e
    forward_states = states * _good_ld(widest, e) * e, states * h * e
    diff_states = states * _good_ld(widest, _FLOAT) * _FLOAT
    return _pages(gates, before_projection, *forward_states, diff_states, diff_states, states * h * _FLOAT)


def _forward_scratchpad_bytes(layer: _Layer, training: bool) -> int:
    n, h, e = layer.batch, layer.hidden, layer.element
    brgemm = _is_brgemm(layer, training)
    merged = n == 1 if brgemm else n < 128  # one product with the inputs of all steps; `merge_gemm_layer`
    gates = (layer.steps if merged else 1) * n * _good_ld(_GATES * h, _FLOAT) * _FLOAT
    space = _pages(gates, n * _good_ld(h, e) * e, n * _good_ld(h, _FLOAT) * _FLOAT if training else 0)
    if not training:  # what would have been the workspace
        states = 2 * (layer.steps + 1) * n
        space += _pages(states * _good_ld(max(layer.inputs, h), e) * e, states * h * e)
    fused = brgemm and layer.inputs == h and not (merged and layer.steps > 1)
    return _scratchpad(layer, space, _batches(2 * (2 if fused else 1)) if brgemm else 0)


def _backward_scratchpad_bytes(layer: _Layer) -> int:
    n, h, e = layer.batch, layer.hidden, layer.element
    brgemm = _is_brgemm(layer, training=True)
    gates = (1 if brgemm else layer.steps) * n * _good_ld(_GATES * h, e) * e
    space = _pages(gates, n * _good_ld(h, e) * e, n * _good_ld(h, _FLOAT) * _FLOAT)
    if not brgemm:
        return _scratchpad(layer, space)
    rows = up(n, 2)
    copies = 1 if n > 1 else training_threads()  # of one sample each thread transposes its own block: a bound
    blocks = (training_threads() * rows * 32 * e, copies * layer.inputs * rows * e, copies * h * rows * e)
    return _scratchpad(layer, space, _batches(_GATES + 1), *blocks)


def _scratchpad(layer: _Layer, space: int, *blocks: int) -> int:
    """`init_scratchpad` (src/cpu/rnn/ref_rnn.cpp): the space itself, four lists of pointers, and what brgemm adds."""
    pointers = (8, 8, 8, 8 * layer.element)
    return space + _PAGE + sum(block + _ALIGNMENT for block in (*pointers, *blocks) if block)


def _batches(blocks: int) -> int:
    return training_threads() * blocks * 40  # sizeof(brgemm_batch_element_t)


def _good_ld(size: int, element: int) -> int:
    """`get_good_ld`: rows begin on cache lines, yet not on multiples of 256 numbers."""
    line = 64 // element
    ld = up(size, line)
    return ld + line if ld % 256 == 0 else ld


def _pages(*sizes: int) -> int:
    return sum(up(size, _PAGE) for size in sizes)
