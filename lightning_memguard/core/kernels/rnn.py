"""RNNs on CUDA that cuDNN runs: the reserve space, the workspace, and copies of what has samples first.

Only a device tells the size of the two spaces (`cudnnGetRNNTempSpaceSizes`). These formulas were found in 82 layers on
an H100 (cuDNN 9.19), of one input size and two hidden sizes: they give the reserve of all to the byte, and the
workspace of 52; the others are within 13 %. Of 92 other layers, in `benchmarks/recordings/calls/`, all have that
reserve but for 24 bytes; projections and dropout in both directions, and kernels for small hidden sizes, were found in
half of them. Of the other half, 55 of 56 calls are in their range, and half of them within 1.5 % of their peak.
"""

from __future__ import annotations

from lightning_memguard.core.kernels.arguments import CudaCall, Rules, after, dtype_of, moments
from lightning_memguard.core.kernels.layout import is_ordered
from lightning_memguard.core.range import Range
from lightning_memguard.core.trace.scratch import NONE, CudaTarget, Scratch, Tensor, nbytes, up

RULES = Rules[CudaTarget]()

LSTM = 2  # cudnnRNNMode_t; 0 and 1 are RNN, 3 is GRU
_GATES = {0: 1, 1: 1, LSTM: 4, 3: 3}
_KEPT = {0: 2, 1: 2, LSTM: 6, 3: 7}  # numbers of a cell for the backward pass, by its hidden size, with its output
_PROJECTED, _MASK_BYTES = 3, 16  # numbers of a projected cell, by its size; a layer's mask is of whole ones
_RANDOM_STATE_BYTES, _THREADS = 24, {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}
# The workspace, by kind: numbers of a cell by its hidden size; how many more if that is of whole tiles (256 was
# measured, of 320 or more none had them), for each direction of an LSTM or a GRU and for both of an RNN; how many more
# at most.
_WORKED = {0: 4, 1: 4, LSTM: 5, 3: 4}
_TILE, _MOST_TILED, _TILED, _MOST = 64, 256, {0: 13, 1: 13, LSTM: 1, 3: 2}, {0: 13, 1: 13, LSTM: 3, 3: 3}
_MOST_SMALL, _OF_SMALL_SEQUENCE = 17, {0: 6, 1: 6, LSTM: 8, 3: 6}  # of the kernels for small hidden sizes
_OF_SEQUENCE, _OF_LAYER_BYTES = 10, 8 << 20


def reserve_bytes(
    mode: int, cells: int, hidden: int, layers: int, *, itemsize: int, projected: int, dropped: int
) -> int:
    """Bytes that the forward pass keeps.

    Args:
        mode: cuDNN's number of the kind of layer.
        cells: steps of all sequences together.
        hidden: the hidden size, in both directions together if there are two.
        layers: one above the other; the output of the last is not in it.
        itemsize: bytes of a number.
        projected: size of an LSTM's output, in both directions together, if it is not the hidden size; else 0.
        dropped: steps of all sequences with dropout between layers, in each direction, of which it keeps a bit for each
            number: packed ones count as long as the longest.
    """
    mask = (layers - 1) * up(dropped * (projected or hidden) // 8, _MASK_BYTES)
    numbers = layers * (_KEPT[mode] * hidden + _PROJECTED * projected) - hidden
    return cells * numbers * itemsize + mask + 256


def dropout_state_bytes(target: CudaTarget) -> int:
    """`cudnnDropoutGetStatesSize`: a state for each thread that the GPU can run; 6,488,064 bytes on an H100."""
    return target.multiprocessors * _THREADS.get(target.compute_capability, 2048) * _RANDOM_STATE_BYTES


def _workspace(call: CudaCall, *, forward: bool) -> Range[int]:
    """Numbers of the cells and of each sequence, the weights, and 8 MiB for each layer; without training, too."""
    x, hx, mode, layers = call["input"], call["hx"], call["mode"], call["num_layers"]
    hidden, itemsize, directions = call["hidden_size"], x.element_size(), 2 if call["bidirectional"] else 1
    cells = x.shape[0] if call["batch_sizes"] else x.shape[0] * x.shape[1]
    width = hidden * directions
    weights = _GATES[mode] * width * (x.shape[-1] + hidden + (layers - 1) * (width + hidden))
    fixed = directions * layers * _OF_LAYER_BYTES + 8 * hx.shape[1] + 256
    of_cell = (_WORKED[mode] + 2 * (directions - 1)) * width + x.shape[-1]
    of_sequence = (_OF_SEQUENCE + 2 * (directions - 1)) * layers * width
    of_cell += width if call["dropout"] and call["train"] and layers > 1 else 0
    more, most = cells * width * itemsize, _MOST[mode]
    is_tiled = not (hidden % _TILE or hidden > _MOST_TILED or call["batch_sizes"] or dtype_of(x) == "bfloat16")
    tiled = _TILED[mode] * more // (directions if _GATES[mode] == 1 else 1) if is_tiled else 0
    if _is_small(call, forward=forward):
        most = _MOST_SMALL
        if directions == 1:
            of_cell, of_sequence, tiled = _of_small_cell(call), _OF_SMALL_SEQUENCE[mode] * layers * width, 0
    point = (cells * of_cell + hx.shape[1] * of_sequence + weights) * itemsize + fixed
    return Range(0, point + tiled, point + most * more)


def _is_small(call: CudaCall, *, forward: bool) -> bool:
    """`use_rnn_persist_small_h` and `get_algo` (aten/src/ATen/native/cudnn/RNN.cpp); in bfloat16 it was not seen."""
    if call["batch_sizes"] or call["proj_size"] or dtype_of(call["input"]) == "bfloat16":
        return False
    simple, gated = (384, 192) if forward else (256, 128)
    return bool(call["hidden_size"] <= (simple if _GATES[call["mode"]] == 1 else gated))


def _of_small_cell(call: CudaCall) -> int:
    """Numbers of a cell in the kernels for small hidden sizes: found in eight layers of one direction."""
    hidden, width, mode = call["hidden_size"], call["input"].shape[-1], call["mode"]
    if mode == LSTM:
        return int(21 * hidden + width)
    if _GATES[mode] == 1:
        return int(13 * hidden + 2 * width + max(hidden, width))
    return int(18 * hidden + 2 * width + (max(hidden, width) if call["num_layers"] > 1 else 0))


def _copy_bytes(tensor: Tensor, call: CudaCall) -> int:
    """Bytes of a contiguous copy with time first."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    if call["batch_first"] and not call["batch_sizes"]:
        shape, stride = (shape[1], shape[0], *shape[2:]), (stride[1], stride[0], *stride[2:])
    return 0 if is_ordered(shape, stride) else nbytes(tensor)


def _is_valid(call: CudaCall) -> bool:
    shaped = call["input"].dim() == (2 if call["batch_sizes"] else 3) and call["hx"].dim() == 3
    return shaped and call["mode"] in _GATES


@RULES.of("_cudnn_rnn")
def _forward(call: CudaCall) -> Scratch:
    """`_cudnn_rnn` (aten/src/ATen/native/cudnn/RNN.cpp)."""
    if not _is_valid(call):
        return NONE
    return after((_copy_bytes(call["input"], call), _workspace(call, forward=True)))


@RULES.of("_cudnn_rnn_backward")
def _backward(call: CudaCall) -> Scratch:
    """`_cudnn_rnn_backward` (RNN.cpp): the input's and the states' gradients, then the weights'."""
    if not _is_valid(call):
        return NONE
    x, output, states = call["input"], call["output"], [each for each in (call["hx"], call["cx"]) if each is not None]
    given = call["grad_hy"], call["grad_cy"]
    zeros = [nbytes(state) for state, grad in zip(states, given, strict=False) if grad is None]
    grad = output if call["grad_output"] is None else call["grad_output"]
    copies, workspace = (_copy_bytes(x, call), _copy_bytes(grad, call)), _workspace(call, forward=False)
    between = {len(states): moments([(*zeros, *copies, workspace)])}
    return Scratch(after=moments([(*zeros, copies[0], workspace)]), between=between)
