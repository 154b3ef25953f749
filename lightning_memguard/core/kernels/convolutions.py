"""Convolutions on CUDA, where cuDNN runs them: copies into one layout, and the workspace."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from lightning_memguard.core.kernels.arguments import CudaCall, Rules, after, moments
from lightning_memguard.core.kernels.layout import Layout, accumulator_bytes, is_ordered, suggests_channels_last
from lightning_memguard.core.kernels.reductions import reduction
from lightning_memguard.core.trace.scratch import FLOAT, NONE, Block, ByteRange, CudaTarget, Scratch, nbytes

if TYPE_CHECKING:
    from torch import Tensor

RULES = Rules[CudaTarget]()


def _workspace(operation: Literal["forward", "input", "weight"], call: CudaCall) -> Block:
    """What cuDNN takes for one convolution, or for one of its gradients: only a device knows the algorithm it chooses.

    Its tensor cores work on channels-last images. Where the tensors are not, the weight's gradient is computed on
    transposed copies of the image, its gradient and the weight's, kept in the workspace: so measured on VGG-16
    (`benchmarks/accuracy.py`: 480 to 684 images of 86 x 86 on an RTX 3060, within 1 % with these copies, 6 to 8 % too
    low without). The other two operations may take such copies, but were not seen to: their likely size is 0.
    Convolutions of one pixel are plain matrix products, and took none where they could be seen.
    """
    x, weight, gpu = call["input"], call["weight"], call.target
    tf32 = gpu.tf32 and gpu.compute_capability >= (8, 0)
    if x.element_size() > (FLOAT if tf32 else FLOAT // 2) or call["groups"] > 1 or _takes_channels_last(x, weight):
        return 0
    if math.prod(weight.shape[2:]) == 1 or x.shape[1] % 4:
        return 0
    y = nbytes(call.result if operation == "forward" else call.first)
    if operation == "forward" and call["transposed"]:
        y = nbytes(x) * math.prod(call["stride"]) * weight.shape[1] // x.shape[1]
    copies = nbytes(x) + nbytes(weight) + y
    return ByteRange(0, copies if operation == "weight" else 0, copies)


def _as_images(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides; a sequence is an image one row high (`view4d` in aten/src/ATen/native/Convolution.cpp)."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    if len(shape) == 3:
        return (*shape[:2], 1, shape[2]), (*stride[:2], shape[2] * stride[2], stride[2])
    return shape, stride


def _takes_channels_last(x: Tensor, weight: Tensor) -> bool:
    """`cudnn_conv_suggest_memory_format` (aten/src/ATen/native/ConvUtils.h): never for float64."""
    if x.element_size() == 8 or weight.element_size() == 8:
        return False
    return any(suggests_channels_last(*_as_images(tensor)) for tensor in (x, weight))


def _copy_bytes(tensor: Tensor, channels_last: bool) -> int:
    ready = not tensor.numel() or is_ordered(*_as_images(tensor), channels_last=channels_last)
    return 0 if ready else nbytes(tensor)


def _is_depthwise(call: CudaCall) -> bool:
    """`is_depthwise` (aten/src/ATen/native/Convolution.cpp)."""
    x, groups = call["input"], call["groups"]
    grouped = groups > 1 and x.shape[1] == groups and call["weight"].shape[0] % groups == 0
    return bool(grouped and x.dim() in (4, 5) and not call["transposed"])


@RULES.of("convolution")
def _convolution(call: CudaCall) -> Scratch:
    """`cudnn_convolution_forward` (aten/src/ATen/native/cudnn/ConvShared.cpp): input and weight in one layout."""
    x, weight = call["input"], call["weight"]
    if x.dim() < 3 or not x.numel():
        return NONE
    channels_last = _takes_channels_last(x, weight)
    copies = (_copy_bytes(x, channels_last), _copy_bytes(weight, channels_last))
    return after((*copies, _workspace("forward", call)))


@RULES.of("convolution_backward")
def _convolution_backward(call: CudaCall) -> Scratch:
    """`cudnn_convolution_backward` (aten/src/ATen/native/cudnn/ConvShared.cpp), then the bias' gradient as a sum.

    Input and gradient are brought into one layout for both; the weight for the input's gradient alone.
    """
    grad, x, weight, mask = call["grad_output"], call["input"], call["weight"], call["output_mask"]
    if x.dim() < 3 or not x.numel():
        return NONE
    channels_last = _takes_channels_last(x, weight)
    depthwise = not channels_last and _is_depthwise(call)
    held = (_copy_bytes(grad, channels_last), _copy_bytes(x, channels_last) if mask[1] or depthwise else 0)
    stages: list[tuple[Block, ...]] = []
    if mask[0]:
        stages.append((*held, _copy_bytes(weight, channels_last), _workspace("input", call)))
    if mask[1]:
        stages.append((*held, _workspace("weight", call)))
    if mask[2]:
        dims = frozenset(range(grad.dim())) - {1}
        stages.append(reduction(Layout.of(grad), dims, accumulator_bytes(grad), call.target, out=grad.element_size()))
    if len(call.results) != len(stages):
        return after(*stages)
    between = {place: moments((stage,)) for place, stage in enumerate(stages[:-1]) if any(stage)}
    return Scratch(after=moments(stages[-1:]), between=between)
