"""Convolutions on the CPU: oneDNN in layouts of its own, or unfolded images and a matrix product.

What oneDNN takes is asked of it (`onednn`). Where it cannot be asked, formulas hold for float32: recorded on torch
2.13, x86-64 with AVX-512.
"""

from __future__ import annotations

import math

from lightning_memguard.core.kernels import onednn
from lightning_memguard.core.kernels.arguments import CpuCall, Rules, dtype_of, moments
from lightning_memguard.core.kernels.layout import (
    as_images,
    contiguous_strides,
    in_image,
    is_ordered,
    suggests_channels_last,
)
from lightning_memguard.core.trace.scratch import FLOAT, NONE, CpuTarget, Scratch, Tensor, nbytes, up

RULES = Rules[CpuTarget]()
_Layout = tuple[tuple[int, ...], tuple[int, ...]]


class _Conv:
    """A convolution, as `_select_conv_backend` in aten/src/ATen/native/Convolution.cpp sees it."""

    def __init__(self, call: CpuCall) -> None:
        self.x: Tensor = call["input"]
        self.weight: Tensor = call["weight"]
        self.groups: int = call["groups"]
        self.transposed: bool = call["transposed"]
        self.host = call.target
        self.stride, self.dilation = (in_image(call[name], self.x, 1) for name in ("stride", "dilation"))
        self.padding, self.output_padding = (in_image(call[name], self.x, 0) for name in ("padding", "output_padding"))

    @property
    def takes_onednn(self) -> bool:
        """`use_mkldnn` in aten/src/ATen/native/Convolution.cpp."""
        shape, kernel = as_images(self.x)[0], self.weight.shape[2:]
        wide = self.transposed and any(o >= s for o, s in zip(self.output_padding, self.stride, strict=True))
        if not self.x.is_floating_point() or self.x.element_size() > FLOAT or wide:
            return False
        if self.x.element_size() < FLOAT:
            return self.host.bf16 if self._kind == "bf16" else self.host.fp16
        plain = {*self.stride, *self.dilation} == {1}
        square = all(k == 1 for k in ((1, *kernel) if len(kernel) == 1 else kernel)[-2:])
        if self.host.threads == 1 and square and plain and shape[0] < 16:
            return False
        large = shape[0] > 1 or math.prod(shape[:4]) > 20480
        return self.groups > 1 or (len(kernel) > 1 and all(k > 3 for k in kernel[-2:])) or large

    @property
    def _kind(self) -> onednn.Kind:
        if self.x.element_size() == FLOAT:
            return "f32"
        return "bf16" if dtype_of(self.x) == "bfloat16" else "f16"

    @property
    def is_channels_last(self) -> bool:
        """`mkldnn_conv_use_channels_last` and `thnn_conv_use_channels_last` (aten/src/ATen/native/ConvUtils.h)."""
        if self.x.dim() == 5 and not self.takes_onednn:
            return False
        tensors = [self.weight, *([] if self.x.dim() == 3 else [self.x])]  # `_convolution` makes sequences contiguous
        return any(suggests_channels_last(*as_images(tensor)) for tensor in tensors)

    def copy(self, tensor: Tensor) -> int:
        """Bytes of ``contiguous`` in the layout of the images."""
        shape, stride = as_images(tensor)
        return 0 if is_ordered(shape, stride, channels_last=self.is_channels_last) else nbytes(tensor)

    # -- asked of oneDNN

    def ask(self, operation: onednn.Operation, result: Tensor, bias: bool) -> onednn.Taken | None:
        """Ask oneDNN for the memory of the convolution, or of one of its gradients."""
        window = onednn.Window(self.stride, self.padding, self.dilation, self.output_padding, self.transposed)
        x, y = (self._matrix(tensor) for tensor in (self.x, result))
        return onednn.convolution(operation, x, self._weight_matrix(), y, bias, window, self.host.threads)

    def _matrix(self, tensor: Tensor) -> onednn.Matrix:
        shape, stride = self._laid_out(tensor)
        return onednn.Matrix(shape, stride, self._kind, self.is_channels_last)

    def _laid_out(self, tensor: Tensor) -> _Layout:
        shape, _ = as_images(tensor)
        if not self.is_channels_last:
            return shape, contiguous_strides(shape)
        inner = contiguous_strides((shape[0], *shape[2:], shape[1]))
        return shape, (inner[0], inner[-1], *inner[1:-1])

    def _weight_matrix(self) -> onednn.Matrix:
        """`make_grouped_weights` in ideep's tensor.hpp; inputs come first where the convolution is transposed."""
        shape, stride = self._laid_out(self.weight)
        first, second = (shape[0], stride[0]), (shape[1], stride[1])
        lead = [first, second] if not self.transposed else [second, first]
        if self.groups > 1:
            each = shape[0] // self.groups
            group, part = (self.groups, each * stride[0]), (each, stride[0])
            lead = [group, part, second] if not self.transposed else [group, second, part]
        rest = [*lead, *zip(shape[2:], stride[2:], strict=True)]
        return onednn.Matrix(tuple(size for size, _ in rest), tuple(step for _, step in rest), self._kind)

    # -- formulas, in float32

    def formula(self, y: Tensor) -> onednn.Taken:
        """Estimate its memory if oneDNN cannot be asked: everything in blocked layouts, no scratchpad."""
        blocked = nbytes(self.weight)
        if self.groups == 1:
            out, into = (up(size, self.host.channel_block) for size in self.weight.shape[:2])
            blocked = out * into * math.prod(self.weight.shape[2:]) * FLOAT
        weights = onednn.Piece(blocked, False, False, 0)
        if self.is_channels_last:
            return onednn.Taken(onednn.NO_COPY, weights, onednn.NO_COPY, 0)
        x, result = (onednn.Piece(self._blocked(tensor), False, False, 0) for tensor in (self.x, y))
        return onednn.Taken(x, weights, result, 0)

    def _blocked(self, tensor: Tensor) -> int:
        """Bytes of an activation in the blocked layout, its channels padded (nChw16c, or nChw8c where that divides)."""
        channels, block = tensor.shape[1], self.host.channel_block
        padded = channels if channels > block and channels % 8 == 0 else up(channels, block)
        return nbytes(tensor) // channels * padded

    # -- unfolded images

    def slow(self, y: Tensor, *, backward: bool) -> tuple[int, int]:
        """Bytes of the unfolded images of one group, and of that group's input where it is copied.

        `slow_conv2d` and `slow_conv3d` (ConvolutionMM2d.cpp, ConvolutionMM3d.cpp) unfold the whole batch unless the
        kernel is one pixel, as `slow_conv_transpose2d` (NaiveConvolutionTranspose2d.cpp) does in the forward pass;
        others one sample at a time (NaiveDilatedConvolution.cpp, NaiveConvolutionTranspose3d.cpp).
        """
        x, images = self.x, self.x.dim() < 5
        kernel, dilated = math.prod(self.weight.shape[2:]), any(d > 1 for d in self.dilation)
        if self.transposed:
            samples, channels = x.shape[0] if images and not backward else 1, self.weight.shape[1]
            spatial = x.shape[2:]
        else:
            samples, channels, spatial = 1 if dilated else x.shape[0], self.weight.shape[1], y.shape[2:]
        moves = {*self.stride} == {1} and {*self.padding} == {0}
        is_view = kernel == 1 and moves and not (dilated or self.transposed)
        unfolded = 0 if is_view else samples * channels * kernel * math.prod(spatial) * x.element_size()
        # Whether the channels of one group are not contiguous (`subtensor` in Convolution.cpp).
        apart = self.groups > 1 and (x.shape[0] > 1 or (self.is_channels_last and math.prod(x.shape[2:]) > 1))
        return unfolded, nbytes(x) // self.groups if apart else 0


@RULES.of("convolution")
def _convolution(call: CpuCall) -> Scratch:
    """`mkldnn_convolution` (aten/src/ATen/native/mkldnn/Conv.cpp): input, weight and result in oneDNN's layout."""
    conv, x, y = _Conv(call), call["input"], call.result
    if not x.is_floating_point() or x.dim() < 3 or not x.numel():
        return NONE
    copies = conv.copy(x) + conv.copy(conv.weight)
    if not conv.takes_onednn:
        return _slow(conv, y, copies, bias=call["bias"] is not None)
    taken = conv.ask("forward", y, call["bias"] is not None) or conv.formula(y)
    source, weights = taken.source, taken.weights
    held = [copies, taken.scratchpad, source.copied]
    stages = [[*held, source.reorder], [*held, weights.copied, weights.reorder], [*held, weights.copied]]
    if conv.is_channels_last:  # the result is allocated first
        return Scratch(after=moments([*stages[:2], [*stages[2], taken.destination.copied]]))
    stages[2].append(taken.destination.nbytes)
    return Scratch(before=moments(stages), after=moments([[copies, *_dense(taken.destination, nbytes(y))]]))


def _slow(conv: _Conv, y: Tensor, copies: int, *, bias: bool) -> Scratch:
    """`_convolution` in Convolution.cpp: each group by itself, and then all of them in one tensor."""
    unfolded, narrowed = conv.slow(y, backward=False)
    ones = kept = 0
    if conv.transposed and conv.x.dim() == 5:
        ones = math.prod(y.shape[2:]) * y.element_size() if bias else 0
        kept = max(0, (nbytes(conv.x) - nbytes(y)) // conv.groups)  # it begins as `empty_like` of the input
    if conv.groups == 1:
        return Scratch(after=moments([[copies, unfolded, ones]]), kept=kept)
    results = nbytes(y) + kept * conv.groups
    return Scratch(before=moments([[copies, results, narrowed, unfolded, ones]]), after=moments([[copies, results]]))


def _slow_backward(conv: _Conv, call: CpuCall, copies: int) -> Scratch:
    """`convolution_backward` in Convolution.cpp, likewise."""
    grad, mask = call["grad_output"], call["output_mask"]
    unfolded, narrowed = conv.slow(grad, backward=True)
    if conv.groups == 1:
        # `fgrad_input` of `slow_conv3d` is never a view.
        columns = nbytes(conv.x) if mask[0] and not unfolded and conv.x.dim() == 5 else 0
        bias = grad.shape[1] * grad.element_size() if mask[2] and any(d > 1 for d in conv.dilation) else 0
        after = moments([[copies, unfolded, 0 if conv.transposed else bias]])
        return Scratch(between={0: moments([[copies, columns]])} if columns else {}, after=after)
    parts = sum(map(nbytes, call.results))
    narrowed += nbytes(grad) // conv.groups if narrowed else 0
    return Scratch(before=moments([[copies, parts, narrowed, unfolded]]), after=moments([[copies, parts]]))


def _dense(piece: onednn.Piece, nbytes: int) -> tuple[int, ...]:
    """`mkldnn_to_dense` (aten/src/ATen/native/mkldnn/MKLDNNConversions.cpp), beyond its result.

    The result has oneDNN's order of dimensions where that is not blocked, and is then made contiguous.
    """
    return piece.nbytes, nbytes if piece.strided and not piece.given else piece.reorder


@RULES.of("convolution_backward")
def _convolution_backward(call: CpuCall) -> Scratch:
    """`mkldnn_convolution_backward`: first the input's gradient, then the weight's, each in oneDNN's layout."""
    conv, grad, x, mask = _Conv(call), call["grad_output"], call["input"], call["output_mask"]
    if not x.is_floating_point() or x.dim() < 3 or not x.numel():
        return NONE
    copies = conv.copy(grad) + conv.copy(x) + conv.copy(conv.weight)
    if not conv.takes_onednn:
        return _slow_backward(conv, call, copies)
    stages = _input_stages(conv, grad) if mask[0] else []
    if mask[1] or mask[2]:
        grad_x = nbytes(x) if mask[0] else 0
        stages += [[grad_x, *stage] for stage in _weight_stages(conv, grad, bias=mask[2])]
    return Scratch(before=moments([copies, *stage] for stage in stages))


def _input_stages(conv: _Conv, grad: Tensor) -> list[list[int]]:
    """`convolution_backward_data::compute_v2` in ideep's conv.hpp, moment by moment."""
    taken = conv.ask("input", grad, False) or conv.formula(grad)
    incoming, weights, image = taken.destination, taken.weights, taken.source
    held = [incoming.copied + weights.copied]
    first = [[incoming.copied, incoming.reorder], [*held, weights.reorder]]
    if conv.is_channels_last:  # the gradient is allocated first
        result = nbytes(conv.x)
        stages = [*first, [*held, image.copied, taken.scratchpad]]
        return [[result, *stage] for stage in stages]
    return [*first, [*held, image.nbytes, taken.scratchpad], [*_dense(image, nbytes(conv.x)), nbytes(conv.x)]]


def _weight_stages(conv: _Conv, grad: Tensor, *, bias: bool) -> list[list[int]]:
    """`convolution_backward_weights::compute_impl` in ideep's conv.hpp, moment by moment."""
    taken = conv.ask("weight", grad, bias) or conv.formula(grad)
    incoming, image, weights = taken.destination, taken.source, taken.weights
    dense, bias_bytes = nbytes(conv.weight), grad.shape[1] * grad.element_size() if bias else 0
    held = [incoming.copied + image.copied]
    turned = dense if conv.is_channels_last and math.prod(conv.weight.shape[2:]) > 1 else 0
    return [
        [incoming.copied, incoming.reorder],
        [*held, image.reorder],
        [*held, weights.nbytes, taken.scratchpad, bias_bytes],
        [2 * bias_bytes, dense, *_dense(weights, dense)],
        [2 * bias_bytes, dense, weights.nbytes, turned],
    ]
