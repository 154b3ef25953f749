"""Convolutions on CUDA, that cuDNN runs: copies into one layout, and the workspace."""

from __future__ import annotations

from lightning_memguard.core.kernels import cudnn
from lightning_memguard.core.kernels.arguments import CudaCall, Rules, after, dtype_of, moments
from lightning_memguard.core.kernels.cuda_reductions import reduction
from lightning_memguard.core.kernels.layout import (
    TensorLayout,
    accumulator_bytes,
    as_images,
    in_image,
    is_ordered,
    suggests_channels_last,
)
from lightning_memguard.core.range import Range
from lightning_memguard.core.trace.scratch import NONE, Block, CudaTarget, Plans, Scratch, Tensor, nbytes

RULES = Rules[CudaTarget]()


def _workspace(operation: cudnn.Operation, call: CudaCall) -> Block:
    """Return the workspace that cuDNN takes for one convolution, or for one of its gradients.

    The plan that its heuristics name first runs, and its workspace is the likely size (`run_single_conv` in
    aten/src/ATen/native/cudnn/Conv_v8.cpp); if that does not fit, the next one. With `torch.backends.cudnn.benchmark`
    all plans are tried, and the fastest stays. An H100 took what is asked for without one in nearly all recorded
    convolutions (`benchmarks/accuracy.py`). But versions of cuDNN choose differently (9.8 and 9.19 name the same plan
    first in 89 % of convolutions), so the range begins at the plan without a workspace, of which there always is one.
    """
    x, weight, gpu = call["input"], call["weight"], call.target
    channels_last = _takes_channels_last(x, weight)
    if _has_own_kernel(call, channels_last):
        return 0
    in_forward = operation == "forward"
    y = call.result if in_forward else call.first
    if call["transposed"]:
        operation, x, y = _TRANSPOSED[operation], y, x
    question = cudnn.Question(
        operation,
        x=as_images(x)[0],
        weight=as_images(weight)[0],
        y=as_images(y)[0],
        kind=dtype_of(x),
        channels_last=channels_last,
        padding=in_image(call["padding"], x, 0),
        stride=in_image(call["stride"], x, 1),
        dilation=in_image(call["dilation"], x, 1),
        capability=gpu.compute_capability,
        tf32=gpu.tf32,
        deterministic=gpu.deterministic,
        every=gpu.benchmark,
        multiprocessors=gpu.multiprocessors,
    )
    plans = cudnn.workspaces(question) or (cudnn.likely(question), 0)
    # For a weight's gradient in groups the first plan is one that not every layer can run.
    tried = 2 if operation == "weight" and call["groups"] > 1 else 1
    point, most = plans[0], max(plans if gpu.benchmark else plans[:tried])
    if gpu.compute_capability < cudnn.FIRST_CAPABILITY:  # measured runs on a V100 took 10 to 18 % more than without any
        most = max(most, cudnn.tensors_bytes(question))
    # In the first forward pass copies of the tensors are as plausible: with them, what RegNetY-400MF and VGG-19 have in
    # their cache on an RTX 3060 is 3.9 and 1.5 % off in place of 9.1 and 8.9, and RegNetX-400MF 11 in place of 0.5.
    first = cudnn.tensors_bytes(question) if in_forward else 0
    return Plans(Range(0, point, most), plans, first) if most or first else 0


_TRANSPOSED: dict[cudnn.Operation, cudnn.Operation] = {"forward": "input", "input": "forward", "weight": "weight"}


def _takes_channels_last(x: Tensor, weight: Tensor) -> bool:
    """`cudnn_conv_suggest_memory_format` (aten/src/ATen/native/ConvUtils.h): never for float64.

    A sequence is made contiguous before it is asked (`_convolution` in aten/src/ATen/native/Convolution.cpp).
    """
    if x.element_size() == 8 or weight.element_size() == 8:
        return False
    asked = (weight,) if x.dim() == _SEQUENCES else (x, weight)
    return any(suggests_channels_last(*as_images(tensor)) for tensor in asked)


_SEQUENCES = 3  # dimensions


def _copy_bytes(tensor: Tensor, channels_last: bool) -> int:
    ready = not tensor.numel() or is_ordered(*as_images(tensor), channels_last=channels_last)
    return 0 if ready else nbytes(tensor)


def _is_depthwise(call: CudaCall) -> bool:
    """`is_depthwise` (aten/src/ATen/native/Convolution.cpp)."""
    x, groups = call["input"], call["groups"]
    grouped = groups > 1 and x.shape[1] == groups and call["weight"].shape[0] % groups == 0
    return bool(grouped and not call["transposed"])


def _has_own_kernel(call: CudaCall, channels_last: bool) -> bool:
    """Whether a kernel of PyTorch's own runs: `use_cudnn_depthwise` (aten/src/ATen/native/Convolution.cpp)."""
    return _is_depthwise(call) and not channels_last and not _is_fast_in_cudnn(call)


def _is_fast_in_cudnn(call: CudaCall) -> bool:
    """`check_cudnn_depthwise_workload_with_filter` (Convolution.cpp): float16 images of 32 channels or more."""
    x, window = call["input"], as_images(call["weight"])[0][-2:]
    shape, stride = as_images(x)[0], in_image(call["stride"], x, 1)
    is_half = dtype_of(x) == "float16" and call.target.compute_capability >= (7, 0)
    if not is_half or len(shape) != 4 or shape[1] < 32 or set(call["dilation"]) != {1}:
        return False
    if shape[2] == 1 and stride[1] == 1:
        return True
    if stride not in ((1, 1), (2, 2)) or window not in ((1, 1), (3, 3), (5, 5)) or shape[3] < 7:
        return False
    return stride == (1, 1) or _is_fast_at_stride_2(shape, window[0])


def _is_fast_at_stride_2(shape: tuple[int, ...], window: int) -> bool:
    images, channels, _, columns = shape
    if window == 1:
        return columns <= 28 if images == 1 else images <= 16 and channels >= 128 and columns <= 7
    return images == 1 or channels >= 512 or (channels >= 256 and columns >= 28)


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

    Input and gradient are brought into one layout for both; the weight for the input's gradient alone. The copy of a
    sequence lives to the end.
    """
    grad, x, weight, mask = call["grad_output"], call["input"], call["weight"], call["output_mask"]
    if x.dim() < 3 or not x.numel():
        return NONE
    channels_last = _takes_channels_last(x, weight)
    depthwise = _has_own_kernel(call, channels_last)
    is_sequence = x.dim() == _SEQUENCES
    copied = _copy_bytes(x, channels_last) if mask[1] or depthwise or is_sequence else 0
    held = (copied, _copy_bytes(grad, channels_last))
    stages: list[tuple[Block, ...]] = []
    if mask[0]:
        stages.append((*held, _copy_bytes(weight, channels_last), _workspace("input", call)))
    if mask[1]:
        stages.append((*held, _workspace("weight", call)))
    if mask[2]:
        dims = frozenset(range(grad.dim())) - {1}
        taken = reduction(TensorLayout.of(grad), dims, accumulator_bytes(grad), call.target, out=grad.element_size())
        stages.append((copied, *taken) if is_sequence else taken)
    if len(call.results) != len(stages):
        return after(*stages)
    between = {place: moments((stage,)) for place, stage in enumerate(stages[:-1]) if any(stage)}
    return Scratch(after=moments(stages[-1:]), between=between)
