"""Losses and softmax on CUDA."""

from __future__ import annotations

from functools import partial

from lightning_memguard.core.kernels.arguments import CudaCall, Rules, after
from lightning_memguard.core.kernels.cuda_reductions import mean_blocks
from lightning_memguard.core.kernels.layout import (
    LONG,
    broadcast_numel,
    copies_of,
    copy_bytes,
    is_non_overlapping_and_dense,
)
from lightning_memguard.core.trace.scratch import NONE, CudaTarget, Scratch, nbytes

RULES = Rules[CudaTarget]()


def _shrunk_loss(call: CudaCall, *, in_result: bool = False) -> Scratch:
    """Losses whose result was allocated for all elements, and then shrunk: its storage stays.

    `mse_loss_out` and `smooth_l1_loss_out` (aten/src/ATen/native/Loss.cpp) have all losses in another tensor;
    `soft_margin_loss_out` and `binary_cross_entropy_out_cuda` (Loss.cu) in the result itself.
    """
    x = call["self"]
    if not call["reduction"] or not x.numel():
        return NONE
    itemsize = call.result.element_size()
    count = broadcast_numel(x, call["target"])
    scratch = itemsize if in_result else count * itemsize
    return after((scratch, *mean_blocks(count, itemsize, call.target)), kept=(count - 1) * itemsize)


RULES.of("mse_loss", "smooth_l1_loss")(_shrunk_loss)
RULES.of("soft_margin_loss", "binary_cross_entropy")(partial(_shrunk_loss, in_result=True))


@RULES.of("huber_loss", "binary_cross_entropy_with_logits")
def _mean_loss(call: CudaCall) -> Scratch:
    """Two losses in aten/src/ATen/native/Loss.cpp: log-sigmoids of logits; if reduced, all losses, then their mean."""
    x = call["self"]
    sigmoids = nbytes(x) if "pos_weight" in call.arguments else 0
    mean = mean_blocks(x.numel(), call.result.element_size(), call.target)
    return after((sigmoids, nbytes(x), *mean) if call["reduction"] else (sigmoids,))


# `nll_loss_forward_out_cuda_template` and `nll_loss_backward_out_cuda_template` (Loss.cu, NLLLoss2d.cu)
RULES.of("nll_loss_forward", "nll_loss2d_forward")(copies_of("self", "target", "weight"))
RULES.of("nll_loss_backward", "nll_loss2d_backward")(copies_of("target", "weight"))
# `host_softmax` and `host_softmax_backward` (SoftMax.cu)
RULES.of("_softmax", "_log_softmax")(copies_of("self"))
RULES.of("_log_softmax_backward_data")(copies_of("grad_output", "output"))


@RULES.of("_softmax_backward_data")
def _softmax_backward(call: CudaCall) -> Scratch:
    """`softmax_backward_cuda_out` (SoftMax.cu): ``grad * output``, which `host_softmax_backward` makes contiguous."""
    grad, output = call["grad_output"], call["output"]
    product = grad.numel() * max(grad.element_size(), output.element_size())
    turned = product if is_non_overlapping_and_dense(grad) and copy_bytes(grad) else 0
    return after((product, turned, copy_bytes(output)))


@RULES.of("_ctc_loss", "_ctc_loss_backward")
def _ctc_loss(call: CudaCall) -> Scratch:
    """`ctc_loss_gpu_template` and `ctc_loss_backward_gpu_template` (LossCTC.cu): lengths and offsets of each sample.

    The backward pass takes its variables too, as large as the forward ones.
    """
    log_alpha, losses = call.get("log_alpha"), call.get("neg_log_likelihood")
    lengths = (call.result if losses is None else losses).numel() * LONG
    variables = 0 if log_alpha is None else nbytes(log_alpha)
    return after((copy_bytes(call["targets"]), variables, lengths, lengths, lengths))
