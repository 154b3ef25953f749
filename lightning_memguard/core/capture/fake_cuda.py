"""A CUDA to pretend with: steps run on fake ``cuda`` tensors on machines without a GPU, on every build of torch.

Three things are missing there. A CPU-only build has no device guard for CUDA. Python's `torch.cuda` says there is no
device, so autocast, gradient scaling and users' code turn themselves off. And some operators ask the driver which
kernel to take (batch norm, RNNs, attention); the choice the target GPU would make is made here instead.

Private names of torch are read here as in `lightning_memguard.core.capture.fake`. Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from lightning_memguard.core.capture import cudnn_rnn, sdpa
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.errors import CannotTraceError

_aten = torch.ops.aten

FAKE_DEVICE = torch.device("cuda", 0)  # the one device that `pretended_cuda` speaks of, whichever is trained on

_CUDA, _META, _LAZY = 1, 14, 17  # c10::DeviceType (torch/headeronly/core/DeviceType.h)
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_REGISTER = "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"


class FakeCudaMode(FakeTensorMode):
    """Fake tensors that never touch a device, whatever `torch.cuda` says."""

    @property
    def avoid_device_init(self) -> bool:
        """Whether devices must be left alone: always."""
        return True


def can_pretend() -> bool:
    """Whether this torch shows what it takes: guards for CUDA, and what autograd has saved (2.11 and 2.13 do)."""
    return hasattr(torch._C, "_ensureCUDADeviceGuardSet") and hasattr(torch._C._autograd.SavedTensor, "data")


@functools.cache
def _guard_cuda() -> None:
    """Give a CPU-only build the device guard that it lacks for CUDA: one that does nothing.

    Every build can make such a guard, but does so only in place of one that counts no devices
    (`c10::impl::ensureCUDADeviceGuardSet`). The lazy backend's is such a one, so it stands in for a moment, put there
    by `c10::impl::registerDeviceGuard` as a build with CUDA puts its own. The guard stays for the process: fake tensors
    may outlive the capture, and nothing else in a build without CUDA ever asks for it.
    """
    if not can_pretend():
        raise CannotTraceError(
            f"A CUDA that is not there cannot be pretended on torch {torch.__version__}: install 2.11 or newer, or "
            "predict for device='cpu'."
        )
    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    folder = Path(torch.__file__).parent / "lib"
    paths = [path for name in ("libc10.so", "libc10.dylib", "c10.dll") if (path := folder / name).exists()]
    try:
        library = ctypes.CDLL(str(paths[0]))
        registry = (ctypes.c_void_p * (_LAZY + 1)).in_dll(library, _REGISTRY)
        register = getattr(library, _REGISTER)
    except (IndexError, OSError, AttributeError, ValueError) as error:
        raise CannotTraceError(
            f"This build of torch ({torch.__version__}) has no CUDA, and gives no way to pretend one ({error}). "
            "Install a build with CUDA (it needs no GPU), or predict for device='cpu'."
        ) from error
    register.argtypes, register.restype = [ctypes.c_int8, ctypes.c_void_p], None
    if registry[_CUDA] in (None, registry[_META]) and registry[_LAZY] is not None:
        register(_CUDA, registry[_LAZY])
        torch._C._ensureCUDADeviceGuardSet()
    if registry[_CUDA] in (None, registry[_LAZY]):
        register(_CUDA, registry[_META])  # its device is "meta": `.to("cuda")` then needs an index


@contextmanager
def pretended_cuda(gpu: Gpu) -> Iterator[None]:
    """Inside, fake ``cuda`` tensors work and `torch.cuda` speaks of one device like ``gpu``.

    Args:
        gpu: what to pretend. A device that is really there is not touched.

    Raises:
        CannotTraceError: this build of torch cannot be brought to it.
    """
    _guard_cuda()
    major, minor = gpu.compute_capability
    properties = SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.multiprocessors,
        warp_size=32,
        max_threads_per_multi_processor=2048 if (major, minor) in ((7, 0), (8, 0), (9, 0), (10, 0)) else 1536,
        gcnArchName="",
        is_integrated=0,
        is_multi_gpu_board=0,
    )
    says: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_device_capability": lambda *_: (major, minor),
        "get_device_name": lambda *_: gpu.name,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (gpu.memory_bytes, gpu.memory_bytes),
        "manual_seed": lambda *_: None,
        "manual_seed_all": lambda *_: None,
        **dict.fromkeys(_COUNTERS, lambda *_, **__: 0),
    }
    with ExitStack() as exits:
        for name, answer in says.items():
            exits.enter_context(mock.patch.object(torch.cuda, name, answer))
        exits.enter_context(mock.patch.object(fake_tensor, "init_gpu_context"))
        for home, name in _WHERE_ASKED:  # functions of `torch.nn.functional` call these unseen by any mode
            exits.enter_context(mock.patch.object(home, name, _instead_of(getattr(home, name))))
        _pretended.append(gpu)
        exits.callback(_pretended.pop)
        yield


_COUNTERS = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
)

_pretended: list[Gpu] = []  # the one whose kernels are chosen now, last


def gpu_of_now() -> Gpu | None:
    """The GPU that is pretended now."""
    return _pretended[-1] if _pretended else None


def is_pretended_op(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether `call` knows better than torch which kernel the pretended GPU would take."""
    if not _pretended or not args:
        return False
    if func is torch.tensor:
        return type(args[0]) is int
    return func in _INSTEAD and isinstance(args[0], FakeTensor) and args[0].is_cuda


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the kernel that the pretended GPU would take in place of a torch function."""
    if func is torch.tensor:
        return _count(*args, **kwargs)
    return _INSTEAD[func](_pretended[-1], func, *args, **kwargs)


def _count(value: int, **kwargs: Any) -> torch.Tensor:
    """A number that goes to the device, such as the length of a loader, and is asked for there: fake, but known."""
    tensor = torch.tensor(value, **kwargs)
    if isinstance(tensor, FakeTensor):
        with unset_fake_temporarily():
            tensor.constant = torch.tensor(value)
    return tensor


# -- batch norm


def _batch_norm(
    _: Gpu,
    func: Any,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """`_select_batch_norm_backend` (aten/src/ATen/native/Normalization.cpp), which a CPU-only build answers wrongly."""
    args = (x, weight, bias, running_mean, running_var, training, momentum, eps)
    if torch.version.cuda is None and cudnn_enabled and _takes_cudnn_batch_norm(*args[:6]):
        return _aten.cudnn_batch_norm(*args)[0]  # type: ignore[no-any-return]
    return func(*args, cudnn_enabled)  # type: ignore[no-any-return]


def _takes_cudnn_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
) -> bool:
    if weight is None or bias is None or x.dim() < 3 or (running_mean is None) != (running_var is None):
        return False
    if running_mean is None and not training:
        return False
    if torch.bfloat16 in (x.dtype, weight.dtype) or (x.dtype == torch.half and weight.dtype != torch.float):
        return False
    return x.shape[0] <= (880_801 if training else 65_535)


# -- root mean square norm


def _rms_norm(
    _: Gpu, func: Any, x: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """`rms_norm_symint` (aten/src/ATen/native/layer_norm.cpp): the fused kernel, which a CPU-only build leaves out."""
    if torch.version.cuda is not None or (weight is not None and weight.dtype != x.dtype):
        return func(x, shape, weight, eps)  # type: ignore[no-any-return]
    return _FusedRmsNorm.apply(x, list(shape), weight, eps)  # type: ignore[no-untyped-call, no-any-return]


class _FusedRmsNorm(torch.autograd.Function):
    """The fused kernel with its gradient: autograd of a build without such a kernel takes it apart."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out, rstd = _aten._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.shape, ctx.eps = shape, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, rstd, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a gradient's gradient torch takes it apart, too
            inputs = [tensor for tensor in (x, weight) if tensor is not None and tensor.requires_grad]
            out = _aten._fused_rms_norm(x, ctx.shape, weight, ctx.eps)[0]
            grads = iter(torch.autograd.grad(out, inputs, grad, create_graph=True))
            return tuple(next(grads) if needed else None for needed in ctx.needs_input_grad)
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        grad_x, grad_weight = _aten._fused_rms_norm_backward(grad, x, ctx.shape, rstd, weight, mask)
        return grad_x, None, grad_weight, None


# -- attention


def _attention(gpu: Gpu, _: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return sdpa.attend(sdpa.Attention(*args, **kwargs, capability=gpu.compute_capability))


# -- recurrent layers


def _rnn(_: Gpu, func: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    return cudnn_rnn.call(func, *args) if cudnn_rnn.takes_cudnn(args[0]) else func(*args)


_RNNS = ("lstm", "gru", "rnn_tanh", "rnn_relu")

_WHERE_ASKED = (
    (torch, "batch_norm"),
    (torch.nn.functional, "scaled_dot_product_attention"),
    (torch, "rms_norm"),
    *((torch._VF, name) for name in _RNNS),
)


def _instead_of(func: Any) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        return call(func, args, kwargs) if is_pretended_op(func, args) else func(*args, **kwargs)

    return functools.wraps(func)(ask)


_INSTEAD: dict[Any, Callable[..., Any]] = {
    torch.batch_norm: _batch_norm,
    torch.nn.functional.scaled_dot_product_attention: _attention,
    torch.rms_norm: _rms_norm,
    **{getattr(torch, name): _rnn for name in _RNNS},
}


def gpu_of(device: torch.device) -> Gpu | None:
    """What PyTorch says of the CUDA GPU behind ``device``; None for any other device, AMD's too.

    None as well on a torch too old for it to be pretended: its own engine then runs the fake step, without our rules.
    """
    if device.type != "cuda" or torch.version.hip is not None or not can_pretend():
        return None
    facts = torch.cuda.get_device_properties(device)
    return Gpu(facts.name, facts.total_memory, (facts.major, facts.minor), facts.multi_processor_count)
