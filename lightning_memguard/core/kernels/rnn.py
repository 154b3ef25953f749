"""RNNs on CUDA that cuDNN runs: the reserve space, the workspace, and copies of what has samples first.

Only a device tells the size of the two spaces (`cudnnGetRNNTempSpaceSizes`). The reserve is that of a recorded LSTM of
two layers to the byte (H100, cuDNN 9.19); its workspace was 2.4 % larger than it is here. GRU and RNN have their gates
in place of the LSTM's.
"""

from __future__ import annotations

from lightning_memguard.core.kernels.arguments import CudaCall, Rules, after, moments
from lightning_memguard.core.kernels.layout import is_ordered
from lightning_memguard.core.range import Range
from lightning_memguard.core.trace.scratch import NONE, CudaTarget, Scratch, Tensor, nbytes

RULES = Rules[CudaTarget]()

LSTM = 2  # cudnnRNNMode_t; 0 and 1 are RNN, 3 is GRU
_GATES = {0: 1, 1: 1, LSTM: 4, 3: 3}
_KEPT = {0: 2, 1: 2, LSTM: 6, 3: 5}  # numbers of a cell for the backward pass, by its hidden size, with its output
_RANDOM_STATE_BYTES, _THREADS = 24, {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}


def reserve_bytes(mode: int, cells: int, samples: int, width: int, layers: int) -> int:
    """Bytes that the forward pass keeps.

    Args:
        mode: cuDNN's number of the kind of layer.
        cells: steps of all sequences together.
        samples: sequences.
        width: bytes of the hidden size, in both directions if there are two.
        layers: one above the other; the output of the last is not in it.
    """
    states = 2 if mode == LSTM else 1
    return (cells * (layers * _KEPT[mode] - 1) + samples * layers * states) * width + 256


def dropout_state_bytes(target: CudaTarget) -> int:
    """`cudnnDropoutGetStatesSize`: a state for each thread that the GPU can run; 6,488,064 bytes on an H100."""
    return target.multiprocessors * _THREADS.get(target.compute_capability, 2048) * _RANDOM_STATE_BYTES


def _workspace(call: CudaCall) -> Range[int]:
    """Gradients of all gates, and one more number for each cell."""
    x, hx = call["input"], call["hx"]
    cells = x.shape[0] if call["batch_sizes"] else x.shape[0] * x.shape[1]
    width = call["hidden_size"] * (2 if call["bidirectional"] else 1) * x.element_size()
    point = cells * (_GATES[call["mode"]] * call["num_layers"] + 1) * width
    most = point + (cells + hx.shape[1]) * width
    return Range(0, point if call["train"] else 0, most)


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
    return after((_copy_bytes(call["input"], call), _workspace(call)))


@RULES.of("_cudnn_rnn_backward")
def _backward(call: CudaCall) -> Scratch:
    """`_cudnn_rnn_backward` (RNN.cpp): the input's and the states' gradients, then the weights'."""
    if not _is_valid(call):
        return NONE
    x, output, states = call["input"], call["output"], [each for each in (call["hx"], call["cx"]) if each is not None]
    given = call["grad_hy"], call["grad_cy"]
    zeros = [nbytes(state) for state, grad in zip(states, given, strict=False) if grad is None]
    grad = output if call["grad_output"] is None else call["grad_output"]
    copies, workspace = (_copy_bytes(x, call), _copy_bytes(grad, call)), _workspace(call)
    between = {len(states): moments([(*zeros, *copies, workspace)])}
    return Scratch(after=moments([(*zeros, copies[0], workspace)]), between=between)
