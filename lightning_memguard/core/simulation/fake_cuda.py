"""A simulated CUDA: steps run on fake ``cuda`` tensors on machines without a GPU, on every build of torch.

Three things are missing there. A CPU-only build has no device guard for CUDA. Python's `torch.cuda` reports no device,
so autocast, gradient scaling and users' code turn themselves off. And some operators ask the driver which kernel to use
(batch norm, RNNs, attention); here the choice of the target GPU is made instead.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.overrides import TorchFunctionMode

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.foreign import added, aten, gaps, nothing, patched
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.isolation.pool import is_forked
from lightning_memguard.core.simulation import cudnn_rnn, quantized, sdpa, streams
from lightning_memguard.core.simulation.constants import KnownFakeMode, known_value
from lightning_memguard.core.simulation.driver import answered, guard_no_device, has_driver, known_device
from lightning_memguard.core.simulation.fake import Function
from lightning_memguard.core.simulation.faking import ValueNeededError
from lightning_memguard.core.torch_port import FakeTensor, FakeTensorMode, OpOverload
from lightning_memguard.errors import CannotTraceError

FAKE_DEVICE = torch.device("cuda", 0)  # the only device under `simulated_cuda`, whichever is trained on


class FakeCudaMode(KnownFakeMode):
    """Fake tensors that never touch a device, whatever `torch.cuda` reports."""

    @property
    def avoid_device_init(self) -> bool:
        """Return True: no device is initialized."""
        return True

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator; in a child, on fake tensors in place of those on the GPU itself, which it cannot use."""
        kwargs = kwargs or {}
        if has_driver() and is_forked():
            args, kwargs = port.tree_map_only(Tensor, self._fake_of, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _fake_of(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor) or not tensor.is_cuda:
            return tensor
        fake = self.from_tensor(tensor)
        fake.fake_device = FAKE_DEVICE
        return fake


def can_simulate_cuda() -> bool:
    """Whether this torch exposes device guards and what autograd saved (2.11 to 2.15 do)."""
    return not gaps("cuda")


def _guard_cuda() -> None:
    """Register a device guard for CUDA that does nothing: in a CPU-only build, which has none, and in a child."""
    if not can_simulate_cuda():
        raise CannotTraceError(f"{gaps('cuda')}. Install torch 2.11 or newer, or predict for device='cpu'.")
    if not has_driver() or is_forked():
        guard_no_device()
    if not has_driver():
        _have_kernels()


@functools.cache
def _have_kernels() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that a kernel is replaced, if one takes the operator apart
        for name in WITH_KERNEL:
            _KERNELS.impl(name, nothing, "CUDA")


# Operators that call others, and have a kernel for CUDA of their own (`native_functions.yaml` of torch 2.11 to 2.14). A
# build without CUDA takes them apart, below autograd, where no mode sees them; given any kernel, it does not.
WITH_KERNEL = ("_fused_rms_norm", "mish_backward", "silu_backward")
_KERNELS = Library("aten", "IMPL")  # which must live


@contextmanager
def simulated_cuda(gpu: Gpu) -> Iterator[None]:
    """Simulate a GPU in the context: fake ``cuda`` tensors work, and `torch.cuda` reports one device like ``gpu``.

    Patches functions of `torch.cuda`, `torch.nn.functional` and `torch` for the whole process: no other thread may use
    torch meanwhile.

    Args:
        gpu: the GPU to simulate. A device that is present is not touched.

    Raises:
        CannotTraceError: this build of torch cannot simulate CUDA.
    """
    _guard_cuda()
    with suppress(RuntimeError):  # its first call checks the GPU: for one that needs an older cuDNN, rules are enough
        torch.backends.cudnn.version()
    with ExitStack() as exits:
        exits.enter_context(answered(lambda *_: (gpu.memory_bytes, gpu.memory_bytes)))
        exits.enter_context(port.gpu_initialized_by(nothing))
        answers = _torch_cuda_of(gpu)
        for home, named in ((torch.cuda, answers), (torch.accelerator, _torch_accelerator_of(answers))):
            for name, answer in named.items():
                exits.enter_context(patched(home, **{name: answer}))
        exits.enter_context(port.gpus_not_initialized())
        exits.enter_context(port.real_kernels_run_by(_on_host))
        alike = {name: answers[name] for name in ("current_device", "device_count", "is_initialized")}
        exits.enter_context(patched(torch.cuda.random, **alike))
        exits.enter_context(quantized.cuda_simulated())
        # A fake tensor on the host is as good as pinned, which torch cannot fake.
        pinned = {"pin_memory": lambda tensor, *_, **__: tensor, "record_stream": streams.record_stream}
        exits.enter_context(patched(torch.Tensor, **pinned))
        for home, name, _ in _PATCHED:  # functions of `torch.nn.functional` call these outside of any mode
            if hasattr(home, name):
                exits.enter_context(patched(home, **{name: _overriding(getattr(home, name))}))
        exits.enter_context(added(torch._C, **_convolutions()))
        _simulated.append(gpu)
        exits.callback(_simulated.pop)
        yield


def _on_host(own: Function) -> Function:
    """Run the kernel of an operator that has no fake one on the host, on zeros; its results are on the GPU."""

    def run(mode: FakeTensorMode, func: OpOverload, flat: Sequence[object], spec: Any, error: RuntimeError) -> Any:
        devices = {each.device for each in flat if isinstance(each, FakeTensor) and each.device.type == "cuda"}
        if len(devices) != 1 or any(isinstance(each, torch.device) for each in flat):
            return own(mode, func, flat, spec, error)
        (device,) = devices
        given = dict[int, FakeTensor]()

        def real(each: object) -> object:
            if not isinstance(each, FakeTensor):
                return each
            tensor = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype).zero_()
            given[id(tensor)] = each
            return tensor

        def fake(each: Tensor) -> Tensor:
            there = given.get(id(each))
            meta = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
            return FakeTensor(mode, meta, device) if there is None else there

        with port.no_dispatch():
            args, kwargs = port.tree_unflatten([real(each) for each in flat], spec)
            return port.tree_map_only(Tensor, fake, func(*args, **kwargs))

    return run


def _torch_cuda_of(gpu: Gpu) -> dict[str, Function]:
    """Functions of `torch.cuda` on a machine with this GPU."""
    major, minor = gpu.compute_capability
    properties = SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.multiprocessors,
        max_threads_per_multi_processor=2048 if (major, minor) in ((7, 0), (8, 0), (9, 0), (10, 0)) else 1536,
        **_OF_ALL_GPUS,
    )
    return {
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (major, minor),
        "get_device_name": lambda *_: gpu.name,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (gpu.memory_bytes, gpu.memory_bytes),
        "is_initialized": lambda: True,
        **streams.functions(),
        **dict.fromkeys(_COMMANDS, lambda *_: None),
        **dict.fromkeys((*_COUNTERS, *_RESETS), lambda *_, **__: 0),
    }


def _torch_accelerator_of(answers: dict[str, Function]) -> dict[str, Function]:
    """Functions of `torch.accelerator`: objects of their own, as Dynamo has a table of both modules' functions."""
    alike = "is_available", "device_count", "current_stream", "set_stream", "synchronize", *_COUNTERS, *_RESETS
    return {
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": functools.partial(answers["current_device"]),
        "set_device_index": functools.partial(answers["set_device"]),
        **{name: functools.partial(answers[name]) for name in alike if hasattr(torch.accelerator, name)},
    }


def _convolutions() -> dict[str, Function]:
    """How fake tensors, and Inductor with them, know the layout of a convolution's results.

    Without a device torch gives none to cuDNN in bfloat16, and in a build without CUDA none at all: see
    `_select_conv_backend` in aten/src/ATen/native/Convolution.cpp, `cudnn_conv_suggest_memory_format` in ConvUtils.h.
    """
    c: Any = torch._C
    if not (hasattr(c, "_select_conv_backend") and hasattr(c, "_conv_determine_backend_memory_format")):
        return {}
    select, layout_of, backends = c._select_conv_backend, c._conv_determine_backend_memory_format, c._ConvBackend
    slow = {backend for name, backend in backends.__members__.items() if name.startswith("Slow")}

    def has_channels_last(*tensors: Tensor) -> bool:
        orders = {port.suggested_format(each) for each in tensors if each.dtype != torch.float64}
        return not orders <= {torch.contiguous_format}

    def select_backend(*args: Any, **kwargs: Any) -> Any:
        x, weight = args[:2] or (kwargs["input"], kwargs["weight"])
        found = select(*args, **kwargs)
        is_depthwise = found in (backends.CudaDepthwise2d, backends.CudaDepthwise3d)
        runs_cudnn = has_channels_last(x, weight) if is_depthwise else found in slow
        return backends.Cudnn if x.is_cuda and torch.backends.cudnn.enabled and runs_cudnn else found

    def layout(x: Tensor, weight: Tensor, backend: object) -> torch.memory_format:
        if backend not in (backends.Cudnn, backends.CudnnTranspose):
            return layout_of(x, weight, backend)  # type: ignore[no-any-return]
        last = torch.channels_last if x.dim() == _IMAGES else torch.channels_last_3d
        return last if has_channels_last(x, weight) else torch.contiguous_format

    return {"_select_conv_backend": select_backend, "_conv_determine_backend_memory_format": layout}


_IMAGES = 4  # dimensions
_COMMANDS = ("set_device", "empty_cache", "manual_seed", "manual_seed_all")
_COUNTERS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_RESETS = ("reset_peak_memory_stats", "reset_max_memory_allocated")
_OF_ALL_GPUS = {"warp_size": 32, "gcnArchName": "", "is_integrated": 0, "is_multi_gpu_board": 0}

_simulated: list[Gpu] = []  # the innermost last


def simulated_gpu() -> Gpu | None:
    """The GPU that is simulated now."""
    return _simulated[-1] if _simulated else None


def is_overridden(func: Function, args: tuple[Any, ...]) -> bool:
    """Whether `call` chooses the kernel that the simulated GPU would use, in place of torch."""
    if not _simulated or not args:
        return False
    return func in _OVERRIDES and isinstance(args[0], FakeTensor) and args[0].is_cuda


def call(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Call the kernel that the simulated GPU would use in place of a torch function."""
    return _OVERRIDES[func](_simulated[-1], func, *args, **kwargs)


def _batch_norm(
    _: Gpu,
    func: Function,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """`_select_batch_norm_backend` (aten/src/ATen/native/Normalization.cpp), which is wrong in a CPU-only build."""
    args = (x, weight, bias, running_mean, running_var, training, momentum, eps)
    takes_cudnn = (
        torch.version.cuda is None
        and cudnn_enabled
        and not (weight is None or bias is None or x.dim() < 3)
        and (running_mean is None) == (running_var is None)
        and (training or running_mean is not None)
        and torch.bfloat16 not in (x.dtype, weight.dtype)
        and not (x.dtype == torch.half and weight.dtype != torch.float)
        and x.shape[0] <= (880_801 if training else 65_535)
    )
    return aten.cudnn_batch_norm(*args)[0] if takes_cudnn else func(*args, cudnn_enabled)  # type: ignore[no-any-return]


def _attention(gpu: Gpu, _: Function, *args: Any, **kwargs: Any) -> Tensor:
    return sdpa.attend(sdpa.Attention(*args, **kwargs, capability=gpu.compute_capability))


def _rnn(_: Gpu, func: Function, *args: Any) -> tuple[Tensor, ...]:
    return cudnn_rnn.call(func, *args) if cudnn_rnn.takes_cudnn(args[0]) else func(*args)


def _ctc_loss(
    _: Gpu,
    func: Function,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: object,
    target_lengths: object,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """``ctc_loss`` of ATen/native/LossCTC.cpp, which reads the lengths of samples from the device.

    If they are unknown, the longest target is as long as all are padded.
    """
    padded = targets.shape[1] if targets.dim() > 1 else None
    inputs, outputs = _length_list(input_lengths, log_probs.shape[0]), _length_list(target_lengths, padded)
    losses: Tensor = func(log_probs, targets, inputs, outputs, blank, _NO_REDUCTION, zero_infinity)
    if reduction == _MEAN:
        return (losses / losses.new_tensor(outputs).clamp_min(1)).mean()
    return losses if reduction == _NO_REDUCTION else losses.sum()


def _length_list(lengths: Any, most: int | None) -> list[int]:
    value = known_value(lengths) if isinstance(lengths, FakeTensor) else lengths
    if value is not None:
        return value.reshape(-1).tolist() if isinstance(value, Tensor) else [*value]
    if most is None:
        raise ValueNeededError("`ctc_loss` needs the lengths of its targets, which only a real run can give.")
    return [most] * lengths.numel()


_NO_REDUCTION, _MEAN = 0, 1  # `torch.nn._reduction`

_PATCHED: tuple[tuple[ModuleType, str, Function], ...] = (
    (torch, "batch_norm", _batch_norm),
    (torch, "ctc_loss", _ctc_loss),
    (torch.nn.functional, "scaled_dot_product_attention", _attention),
    *((port.recurrent_functions(), name, _rnn) for name in port.RECURRENT),
)
# By torch's own function: a user may have put a wrapper in its place.
_OVERRIDES = {port.own_function(name): override for _, name, override in _PATCHED}


class _Overriding(TorchFunctionMode):
    """Mode in which a user's wrapper around one of these functions calls the kernel of the simulated GPU."""

    def __torch_function__(
        self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        return call(func, args, kwargs or {}) if is_overridden(func, args) else func(*args, **(kwargs or {}))


def _overriding(func: Function) -> Function:
    def ask(*args: object, **kwargs: object) -> object:
        if is_overridden(func, args):
            return call(func, args, kwargs)
        with nullcontext() if func in _OVERRIDES else _Overriding():
            return func(*args, **kwargs)

    return functools.wraps(func)(ask)


def gpu_of(device: torch.device) -> Gpu | None:
    """The CUDA GPU behind ``device`` as PyTorch reports it; None for any other device, including AMD's.

    None also on a torch too old to simulate it: torch's own engine then runs the fake step, without our rules.
    """
    if device.type != "cuda" or torch.version.hip is not None or not can_simulate_cuda():
        return None
    facts = torch.cuda.get_device_properties(device)
    known_device[0] = device.index or 0
    return Gpu(facts.name, facts.total_memory, (facts.major, facts.minor), facts.multi_processor_count)
