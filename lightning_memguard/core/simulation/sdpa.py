"""Scaled dot product attention on a pretended CUDA GPU: which kernel it takes, and the call of it.

Without a GPU torch falls back to plain matrix products, whose memory grows with the square of the sequence's length; a
GPU usually takes another kernel. Paths are below aten/src/ATen/native/transformers unless they say otherwise. Read for
torch 2.9 to 2.13; the operators' fake kernels were run on 2.11 and 2.13. What the kernels allocate inside is in
`lightning_memguard.core.kernels.attention`. Nested tensors have a `scaled_dot_product_attention` of their own.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.foreign import aten as _aten
from lightning_memguard.core.kernels.attention import is_strictly_deterministic
from lightning_memguard.errors import CannotTraceError

_HALF = (torch.float16, torch.bfloat16)
_NEWEST = (12, 1)  # `check_sm_version` in cuda/sdp_utils.cpp: no fused kernel takes a newer GPU


# -- the choice

_BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # `at::SDPBackend` in aten/src/ATen/SDPBackend.h
_DEFAULT_ORDER = ["flash", "efficient", "math", "cudnn"]
_CUDNN_FIRST = ["cudnn", "flash", "efficient", "math"]

# What the wheels on PyPI require for Linux: `nvidia-cudnn-cu13`.
_CUDNN_OF_WHEELS: dict[tuple[int, ...], int] = {(2, 11): 91_900, (2, 12): 92_000, (2, 13): 92_000}


@functools.cache
def cudnn_version() -> int:
    """The cuDNN a training here would run with: this build's own, else that of torch's wheels of the same version."""
    return torch.backends.cudnn.version() or _CUDNN_OF_WHEELS.get(port.VERSION, max(_CUDNN_OF_WHEELS.values()))


@dataclass(frozen=True)
class Attention:
    """Arguments of the choice: `sdp_params` in sdp_utils_cpp.h, the GPU's compute capability, and its cuDNN.

    All but the last two are the arguments of `torch.nn.functional.scaled_dot_product_attention`, in its order. The
    choice reads only shapes, strides and dtypes of tensors. ``cudnn`` is a version such as ``91900``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    capability: tuple[int, int] = field(kw_only=True)
    cudnn: int = field(kw_only=True, default_factory=cudnn_version)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        """`input_requires_grad`."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)

    @property
    def lengths(self) -> tuple[int, int]:
        """Lengths of the query and of the key."""
        return self.query.shape[-2], self.key.shape[-2]

    def fits(self, oldest: tuple[int, int], *dtypes: torch.dtype) -> bool:
        """`check_tensor_shapes`, `check_nonzero_sequence_lengths_dense`, `check_sm_version`, `check_tensor_dtype`."""
        dense_4d = all(tensor.dim() == 4 for tensor in self.inputs) and all(self.lengths)
        one_dtype = self.query.dtype in dtypes and self.query.dtype == self.key.dtype == self.value.dtype
        return dense_4d and oldest <= self.capability <= _NEWEST and one_dtype

    def has_unit_strides(self, *, ignore_single: bool) -> bool:
        """`check_last_dim_stride_equals_1_dense`."""
        unit = all(tensor.stride(-1) == 1 for tensor in self.inputs) or (ignore_single and self.query.shape[-1] == 1)
        return unit and (self.attn_mask is None or self.attn_mask.stride(-1) == 1)

    def has_heads(self, *, grouped: bool, same_heads: bool = True) -> bool:
        """`check_batch_size_and_num_heads_dense` and `check_grouped_query_attention`."""
        samples, of_keys, of_values = (tensor.shape[0] for tensor in self.inputs)  # numbers, or torch.compile's symbols
        if not samples == of_keys == of_values:
            return False
        heads, of_key, of_value = (tensor.shape[-3] for tensor in self.inputs)
        if self.enable_gqa and grouped:
            return heads % of_key == 0 and (of_key == of_value if same_heads else heads % of_value == 0)
        return heads == of_key == of_value


def choose(call: Attention) -> str:
    """The kernel a GPU takes: ``"flash"``, ``"efficient"``, ``"cudnn"`` or ``"math"``.

    `select_sdp_backend` in cuda/sdp_utils.cpp, with the backends that are enabled now, in their order of now.

    Raises:
        CannotTraceError: no enabled backend takes these tensors; a real run would fail as well.
    """
    for name in _order(call.capability, call.cudnn):
        if _KERNELS[name].enabled() and _KERNELS[name].takes(call):
            return name
    major, minor = call.capability
    raise CannotTraceError(
        f"No attention backend that is enabled takes a query of shape {tuple(call.query.shape)} and dtype "
        f"{call.query.dtype} on compute capability {major}.{minor}: `scaled_dot_product_attention` would fail there, "
        "too. Enable another one (`torch.nn.attention.sdpa_kernel`)."
    )


def _order(capability: tuple[int, int], cudnn: int) -> list[str]:
    """`priority_order`: what the user set (`sdpa_kernel(..., set_priority=True)`), else the GPU's default.

    The default is set once in a process, for the GPU that is there. On Hopper it looks as if a user had put cuDNN
    first, but a user who does that usually disables other backends too.
    """
    order = [_BACKENDS[i] for i in port.attention_order() if i in _BACKENDS]
    if order == _DEFAULT_ORDER or (order == _CUDNN_FIRST and all(kernel.enabled() for kernel in _KERNELS.values())):
        # `check_prefer_cudnn_attention`: only with a cuDNN that 2.11's wheels bring
        wanted = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1" and cudnn > 91_500
        return _CUDNN_FIRST if wanted and capability[0] in (9, 10) and capability[1] in (0, 3) else _DEFAULT_ORDER
    return order


def _takes_flash(call: Attention) -> bool:
    """`can_use_flash_attention`."""
    width, capability = call.query.shape[-1], call.capability
    # `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`
    constrained = call.trains and ((8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1))
    return (
        call.attn_mask is None
        and call.fits((8, 0), *_HALF)
        and width == call.key.shape[-1] == call.value.shape[-1]
        and width <= 256
        and (not constrained or width <= 192 or (width > 224 and call.dropout_p == 0))
        and not (call.is_causal and call.lengths[0] != call.lengths[1])
        and call.has_heads(grouped=True)
        and call.has_unit_strides(ignore_single=True)
    )


def _takes_efficient(call: Attention) -> bool:
    """`can_use_mem_efficient_attention`. Grouped queries came with 2.14."""
    half, capability = call.query.dtype in _HALF, call.capability
    dtypes = (torch.float16, torch.float32) if capability < (8, 0) else (*_HALF, torch.float32)
    # `minimum_gemm_alignment`, in elements
    alignment = (8 if half else 4) if capability >= ((7, 0) if half else (8, 0)) else 1
    # `check_data_ptr_alignment_mem_efficient`, from pull request 184258: merged in May 2026, so in 2.13
    unchecked = port.VERSION < (2, 13) or capability < (8, 0)
    widths = [tensor.shape[-1] for tensor in call.inputs]
    return (
        call.fits((5, 0), *dtypes)
        and widths[0] == widths[1]
        and all(width > 0 and width % alignment == 0 for width in widths)
        and (unchecked or all(tensor.storage_offset() % alignment == 0 for tensor in call.inputs))
        and call.has_unit_strides(ignore_single=False)
        and call.has_heads(grouped=port.VERSION >= (2, 14))
    )


def _takes_cudnn(call: Attention) -> bool:
    """`can_use_cudnn_attention`, `check_cudnn_dropout` (from 2.12 on) and `check_cudnn_tensor_shapes`."""
    if is_strictly_deterministic() or call.cudnn < 90_000 or not call.fits((8, 0), *_HALF):
        return False
    coarse = port.VERSION >= (2, 12) and not (call.dropout_p * 16).is_integer()
    if call.dropout_p != 0 and (coarse or 91_100 < call.cudnn < 91_400 or call.lengths[0] == 1):
        return False
    widths = call.query.shape[-1], call.value.shape[-1]
    hopper = call.capability == (9, 0) and call.cudnn >= 91_000
    blackwell = call.capability[0] == 10 and call.cudnn >= 91_100 and widths == (192, 128)  # pull request 172621
    limit = 256 if hopper else 192 if blackwell else 128
    return (
        _cudnn_takes_mask(call)
        and all(width <= limit and width % 8 == 0 for width in widths)
        and call.lengths[1] != 1
        and call.has_unit_strides(ignore_single=True)
        and call.has_heads(grouped=True, same_heads=False)
    )


def _cudnn_takes_mask(call: Attention) -> bool:
    """`check_attn_mask_shape`."""
    mask = call.attn_mask
    if mask is None or mask.requires_grad or mask.dim() not in (2, 4):
        return mask is None
    full = (*call.query.shape[:2], *call.lengths)[-mask.dim() :]
    return all(size in (1, whole) for size, whole in zip(mask.shape, full, strict=True))


# -- the call


def attend(call: Attention) -> Tensor:
    """Attention of fake ``cuda`` tensors by the kernel that a GPU takes, so that autograd keeps what it keeps there.

    Around the kernel it does as `scaled_dot_product_attention` in attention.cpp, and as autocast.
    """
    if not torch.is_autocast_enabled("cuda"):
        return _KERNELS[choose(call)].run(call)
    query, key, value = map(_autocast, call.inputs)
    mask = None if call.attn_mask is None else _autocast(call.attn_mask)
    call = replace(call, query=query, key=key, value=value, attn_mask=mask)
    with torch.autocast("cuda", enabled=False):
        return _KERNELS[choose(call)].run(call)


def _autocast(tensor: Tensor) -> Tensor:
    """`cached_cast` in aten/src/ATen/autocast_mode.cpp: this function is on its list for lower precision."""
    if not tensor.is_floating_point() or tensor.dtype == torch.float64 or not tensor.is_cuda:
        return tensor
    return tensor.to(torch.get_autocast_dtype("cuda"))


def _run(operator: str, *args: object, **kwargs: object) -> Tensor:
    """The first result; the others are autograd's."""
    return getattr(_aten, operator)(*args, **kwargs)[0]  # type: ignore[no-any-return]


def _flash(call: Attention) -> Tensor:
    """Heads are padded to a multiple of eight (`pad_last_dim`), and cut back after (`post_process_flash_output`)."""
    width = call.query.shape[-1]
    scale = 1 / math.sqrt(width) if call.scale is None else call.scale
    padded = [_aten.pad(tensor, [0, -width % 8]) if width % 8 else tensor for tensor in call.inputs]
    out = _run("_scaled_dot_product_flash_attention", *padded, call.dropout_p, call.is_causal, False, scale=scale)
    return _aten.slice(out, -1, 0, width) if width % 8 else out


def _efficient(call: Attention) -> Tensor:
    bias = _additive(call)
    if bias is not None:
        # `preprocess_mask`: rows of the mask start at multiples of eight elements, or it is padded and cut
        if bias.stride(-1) != 1 or any(stride % 8 for stride in bias.stride()[:-1]):
            width = bias.shape[-1]
            bias = _aten.slice(_aten.pad(bias, [0, 8 - width % 8]), -1, 0, width)
        bias = bias.expand(*call.query.shape[:3], call.key.shape[2])
    options = (bias, call.trains, call.dropout_p, call.is_causal)
    return _run("_scaled_dot_product_efficient_attention", *call.inputs, *options, scale=call.scale)


def _cudnn(call: Attention) -> Tensor:
    bias = _additive(call, hidden=-65504.0, device="cpu")
    options = (bias, call.trains, call.dropout_p, call.is_causal, False)
    return _run("_scaled_dot_product_cudnn_attention", *call.inputs, *options, scale=call.scale)


def _math(call: Attention) -> Tensor:
    """Torch's own, in plain operators.

    One differs under a dispatch mode: the mask is added to a new tensor, not in place
    (`areAnyTensorSubclassLike` in attention.cpp). The peak, in the softmax that follows, is the same.
    """
    options = (_additive(call), call.dropout_p, call.is_causal, None)
    named = {"scale": call.scale, "enable_gqa": call.enable_gqa}
    return _run("_scaled_dot_product_attention_math", *call.inputs, *options, **named)


def _additive(call: Attention, hidden: float = -math.inf, device: str | None = None) -> Tensor | None:
    """`convert_boolean_attn_mask`, and `convert_boolean_attn_mask_cudnn` with its finite number from the host."""
    mask = call.attn_mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    number = torch.scalar_tensor(hidden, dtype=call.query.dtype, device=device or mask.device)
    return _aten.where.ScalarSelf(mask, 0.0, number)  # type: ignore[no-any-return]


class _Kernel(NamedTuple):
    enabled: Callable[[], bool]
    takes: Callable[[Attention], bool]
    run: Callable[[Attention], Tensor]


_KERNELS = {
    "flash": _Kernel(torch.backends.cuda.flash_sdp_enabled, _takes_flash, _flash),
    "efficient": _Kernel(torch.backends.cuda.mem_efficient_sdp_enabled, _takes_efficient, _efficient),
    "cudnn": _Kernel(torch.backends.cuda.cudnn_sdp_enabled, _takes_cudnn, _cudnn),
    "math": _Kernel(torch.backends.cuda.math_sdp_enabled, lambda _: True, _math),
}
