"""Losses and softmax on CUDA.

Paths are those of PyTorch, from aten/src/ATen/native/cuda on unless they begin with aten; read in PyTorch 2.9 to 2.11.
"""

from __future__ import annotations

from lightning_memguard.core.kernels.arguments import CudaCall, Rules, after
from lightning_memguard.core.kernels.layout import LONG, broadcast_numel, copy_bytes, is_dense
from lightning_memguard.core.kernels.reductions import mean_blocks
from lightning_memguard.core.trace.scratch import NONE, CudaTarget, Scratch, nbytes

RULES = Rules[CudaTarget]()


@RULES.of("mse_loss", "smooth_l1_loss")
def _shrunk_loss(call: CudaCall) -> Scratch:
    """`mse_loss_out` and `smooth_l1_loss_out` (aten/src/ATen/native/Loss.cpp): all losses in another tensor."""
    return _shrunk(call, in_result=False)


@RULES.of("soft_margin_loss", "binary_cross_entropy")
def _loss_in_result(call: CudaCall) -> Scratch:
    """`soft_margin_loss_out` and `binary_cross_entropy_out_cuda` (Loss.cu): all losses in the result itself."""
    return _shrunk(call, in_result=True)


def _shrunk(call: CudaCall, *, in_result: bool) -> Scratch:
    """Losses whose result was allocated for all elements, and then shrunk: its storage stays."""
    x = call["self"]
    if not call["reduction"] or not x.numel():
        return NONE
    itemsize = call.result.element_size()
    count = broadcast_numel(x, call["target"])
    scratch = itemsize if in_result else count * itemsize
    return after((scratch, *mean_blocks(count, itemsize, call.target)), kept=(count - 1) * itemsize)


@RULES.of("huber_loss")
def _huber_loss(call: CudaCall) -> Scratch:
    """`huber_loss` (aten/src/ATen/native/Loss.cpp): all losses, then their mean."""
    x = call["self"]
    if not call["reduction"]:
        return NONE
    return after((nbytes(x), *mean_blocks(x.numel(), call.result.element_size(), call.target)))


@RULES.of("binary_cross_entropy_with_logits")
def _bce_with_logits(call: CudaCall) -> Scratch:
    """`binary_cross_entropy_with_logits` (aten/src/ATen/native/Loss.cpp): log-sigmoids, then the losses too."""
    x = call["self"]
    if not call["reduction"]:
        return after((nbytes(x),))
    return after((nbytes(x), nbytes(x), *mean_blocks(x.numel(), call.result.element_size(), call.target)))


@RULES.of("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(call: CudaCall) -> Scratch:
    """`nll_loss_forward_out_cuda_template` (Loss.cu, NLLLoss2d.cu): contiguous copies."""
    return after([copy_bytes(call[name]) for name in ("self", "target", "weight")])


@RULES.of("nll_loss_backward", "nll_loss2d_backward")
def _nll_loss_backward(call: CudaCall) -> Scratch:
    """`nll_loss_backward_out_cuda_template`, `nll_loss2d_backward_out_cuda_template`."""
    return after([copy_bytes(call[name]) for name in ("target", "weight")])


@RULES.of("_softmax", "_log_softmax")
def _softmax(call: CudaCall) -> Scratch:
    """`host_softmax` (SoftMax.cu): ``contiguous()``."""
    return after((copy_bytes(call["self"]),))


@RULES.of("_log_softmax_backward_data")
def _log_softmax_backward(call: CudaCall) -> Scratch:
    """`host_softmax_backward` (SoftMax.cu): gradient and output, contiguous."""
    return after((copy_bytes(call["grad_output"]), copy_bytes(call["output"])))


@RULES.of("_softmax_backward_data")
def _softmax_backward(call: CudaCall) -> Scratch:
    """`softmax_backward_cuda_out` (SoftMax.cu): ``grad * output``, which `host_softmax_backward` makes contiguous."""
    grad, output = call["grad_output"], call["output"]
    product = grad.numel() * max(grad.element_size(), output.element_size())
    turned = product if is_dense(grad) and copy_bytes(grad) else 0
    return after((product, turned, copy_bytes(output)))


@RULES.of("_ctc_loss")
def _ctc_loss(call: CudaCall) -> Scratch:
    """`ctc_loss_gpu_template` (LossCTC.cu): lengths and offsets, one each a sample."""
    lengths = call.result.numel() * LONG
    return after((copy_bytes(call["targets"]), lengths, lengths, lengths))


@RULES.of("_ctc_loss_backward")
def _ctc_loss_backward(call: CudaCall) -> Scratch:
    """`ctc_loss_backward_gpu_template` (LossCTC.cu): the backward variables, as large as the forward ones."""
    lengths = call["neg_log_likelihood"].numel() * LONG
    return after((copy_bytes(call["targets"]), nbytes(call["log_alpha"]), lengths, lengths, lengths))
