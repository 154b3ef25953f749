"""The fast paths of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``: what they allocate inside.

In evaluation without gradients these modules call one operator each, which a dispatch mode sees whole. Here they are
taken apart as their kernels are: aten/src/ATen/native/transformers/attention.cpp, transformer.cpp and
cuda/attention.cu. Read in torch 2.11 and 2.13.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memguard.core.foreign import aten, patched
from lightning_memguard.core.simulation import fake_cuda, sdpa
from lightning_memguard.core.torch_port import DisableTorchFunction, FakeTensor


@contextmanager
def taken() -> Iterator[None]:
    """Make modules take their fast paths even under a mode that overrides torch's functions.

    An encoder given a padding mask makes nested tensors of its values, which are unknown: there it stays as it is.
    """
    asked = torch.overrides.has_torch_function

    def has_torch_function(arguments: Iterable[Any]) -> bool:
        if sys._getframe(1).f_code not in _LAYERS:
            return asked(arguments)
        with DisableTorchFunction():
            return asked(arguments)

    with patched(torch.overrides, has_torch_function=has_torch_function):
        yield


_LAYERS = (nn.MultiheadAttention.forward.__code__, nn.TransformerEncoderLayer.forward.__code__)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    heads: int,
    weight: Tensor,
    bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`native_multi_head_attention_cpu` and `native_multi_head_attention_cuda`."""
    itself = query is key is value
    if query.is_cuda and itself and not need_weights and mask is None and width // heads % 8 == 0:
        out = _attend_fused(query, heads, weight, bias, out_weight, out_bias)
        if out is not None:
            return out, None
    packed = _transform_bias(_project(query, key, value, width, weight), bias, heads)
    q, k, v = (part.flatten(0, 1) for part in packed)
    scores = torch.bmm(q, k.transpose(1, 2)).view(*packed.shape[1:4], -1)
    if mask is None:
        aten._softmax.out(scores, -1, False, out=scores)
    else:
        scores = _masked_softmax(scores, mask.to(torch.bool), mask_type)
    found = torch.bmm(scores.flatten(0, 1), v, out=q).view(packed.shape[1:])
    if not need_weights:
        del scores
    out = found.transpose(1, 2).contiguous().view(-1, width)
    out = torch.addmm(out_bias, out, out_weight.t()).view(query.shape)
    if not need_weights:
        return out, None
    return out, scores.sum(1).div_(heads) if average else scores


def _attend_fused(
    x: Tensor, heads: int, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor
) -> Tensor | None:
    """Attend with a fused kernel, if the GPU has one for this; else None."""
    gpu = fake_cuda.simulated_gpu()
    if gpu is None:
        return None

    def split(packed: Tensor) -> Tensor:
        return packed.view(*x.shape[:2], heads, -1).transpose(1, 2)

    capability = gpu.compute_capability
    if sdpa.choose(sdpa.Attention(split(x), split(x), split(x), capability=capability)) not in ("flash", "efficient"):
        return None
    q, k, v = map(split, F.linear(x, weight, bias).chunk(3, -1))
    found = sdpa.attend(sdpa.Attention(q, k, v, capability=capability))
    return F.linear(found.transpose(1, 2).reshape(x.shape), out_weight, out_bias)


def _masked_softmax(scores: Tensor, mask: Tensor, mask_type: int | None) -> Tensor:
    """The operator, which has no fake kernel."""
    if isinstance(scores, FakeTensor):
        return torch.empty_like(scores)
    return aten._masked_softmax(scores, mask, 3, mask_type)  # type: ignore[no-any-return]


def _project(query: Tensor, key: Tensor, value: Tensor, width: int, weight: Tensor) -> Tensor:
    """`qkv_projection`."""
    if key is not value:
        inputs, weights = (query, key, value), weight.chunk(3)
    elif query is not key:
        inputs, weights = (query, key), weight.split([width, 2 * width])  # type: ignore[assignment]
    else:
        return query @ weight.t()
    return torch.cat([x @ part.t() for x, part in zip(inputs, weights, strict=True)], 2)


def _transform_bias(projected: Tensor, bias: Tensor, heads: int) -> Tensor:
    """`_transform_bias_rescale_qkv`: query, key and value are parts of one tensor."""
    batch, length, width = projected.shape
    packed = projected.new_empty((3, batch, heads, length, width // 3 // heads))
    split = projected.add_(bias).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    packed.copy_(split)[0].div_(math.sqrt(packed.shape[-1]))
    return packed


def _encode(
    x: Tensor,
    width: int,
    heads: int,
    weight: Tensor,
    bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    gelu: bool,
    norm_first: bool,
    eps: float,
    *parameters: Any,
) -> Tensor:
    """`transformer_encoder_layer_forward`."""
    norms, ffn = (parameters[:2], parameters[2:4]), parameters[4:8]
    mask, mask_type = (*parameters[8:], None, None)[:2]

    def norm(x: Tensor, place: int) -> Tensor:
        weight, bias = norms[place]
        return F.layer_norm(x, (width,), weight, bias, eps)

    first = norm(x, 0) if norm_first else x
    attention = (width, heads, weight, bias, out_weight, out_bias, mask, False, True, mask_type)
    first = aten._native_multi_head_attention(first, first, first, *attention)[0].add_(x)
    if not norm_first:
        first = norm(first, 0)
    rows = (norm(first, 1) if norm_first else first).view(-1, width)
    inner = aten._addmm_activation(ffn[1], rows, ffn[0].t(), use_gelu=gelu)
    out = torch.addmm(ffn[3], inner, ffn[2].t()).view(x.shape)
    del inner, rows
    out.add_(first)
    return out if norm_first else norm(out, 1)


IMPLEMENTED: dict[object, Callable[..., Any]] = {
    aten._native_multi_head_attention.default: _attend,
    aten._transformer_encoder_layer_fwd.default: _encode,
}
"""The functions that the operators of fast paths run."""
