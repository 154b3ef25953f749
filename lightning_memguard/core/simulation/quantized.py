"""Quantized weights and low-bit optimizers of bitsandbytes on fake tensors.

A packed weight is a parameter of bitsandbytes' own class. The scales that belong to it are attributes, which no module
registers. Its kernels are Python around C functions that are called by address and allocate nothing through torch.
So such a parameter becomes fake with all that it holds, and its kernels run around a library that does nothing: what
they allocate shows, and the choices that they make by GPU are made. Checked on bitsandbytes 0.50.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.foreign import nothing, patched
from lightning_memguard.core.torch_port import (
    DisableTorchFunctionSubclass,
    FakeTensor,
    OpOverload,
    unset_fake_temporarily,
)
from lightning_memguard.core.trace.loading import Weight

_LIBRARY = "bitsandbytes"


def _is_theirs(thing: object) -> bool:
    return type(thing).__module__.partition(".")[0] == _LIBRARY


# -- what quantized weights hold


def held_by(module: nn.Module) -> list[Tensor]:
    """Return the tensors of quantization states, which are neither parameters nor buffers."""
    if _LIBRARY not in sys.modules:
        return []
    owners = (*filter(_is_theirs, module.parameters()), *module.modules())
    states = (value for owner in owners for value in vars(owner).values() if _is_state(value, owner))
    return [tensor for state in states for tensor in _tensors_of(state)]


def _is_state(value: object, owner: object) -> bool:
    if isinstance(value, Tensor):
        return isinstance(owner, Tensor)
    return _is_theirs(value) and not isinstance(value, nn.Module)


def _tensors_of(state: object) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    else:
        for value in vars(state).values():
            if isinstance(value, Tensor) or _is_state(value, state):
                yield from _tensors_of(value)


def is_imported() -> bool:
    """Know whether this process may hold weights that bitsandbytes quantized."""
    return _LIBRARY in sys.modules


def weights_of(module: nn.Module) -> list[Weight]:
    """Describe the parameters of a module, if transformers quantized a model in it; else none."""
    marks = ("is_loaded_in_4bit", "is_loaded_in_8bit")
    path, model = next((each for each in module.named_modules() if any(map(vars(each[1]).get, marks))), ("", None))
    if model is None:
        return []
    dtype, start = getattr(getattr(model, "config", None), "dtype", None) or torch.float16, f"{path}." if path else ""
    found = []
    for name, parameter in module.named_parameters():
        bits = {"Params4bit": 4, "Int8Params": 8}.get(type(parameter).__name__, 0)
        state = getattr(parameter, "quant_state", None)
        loads = name.startswith(start) and not parameter.requires_grad
        size = (parameter.shape if state is None else state.shape).numel() * dtype.itemsize
        found.append(Weight(name.removeprefix(start).replace(".base_layer", "") if loads else "", size, bits))
    return found


def loading_threads() -> int:
    """How many threads move weights while transformers quantizes them: its ``GLOBAL_WORKERS`` before 5.4, then none."""
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    return 4 if version.startswith(("5.0.", "5.1.", "5.2.", "5.3.")) else 0


def fakes_of(module: nn.Module, fake: Callable[[Tensor], Tensor], mode: Any, device: torch.device) -> dict[int, object]:
    """Make fake copies of a module's quantized parameters and of the states that they hold.

    A parameter that is not quantized yet is, as bitsandbytes does when it is moved.

    Args:
        module: any module.
        fake: makes a fake copy of a tensor on the device.
        mode: the mode of fake tensors.
        device: where the copy trains.

    Returns:
        The copies by the ``id`` of what they are copies of.
    """
    copies: dict[int, object] = {}
    for parameter in filter(_is_theirs, module.parameters()):
        with DisableTorchFunctionSubclass():
            data: Tensor = parameter.data
        if parameter.is_cuda or getattr(parameter, "bnb_quantized", not data.is_floating_point()):
            made = _of_class(type(parameter), fake(data), requires_grad=parameter.requires_grad)
            vars(made).update({name: _copied(value, fake, copies) for name, value in vars(parameter).items()})
        else:
            with mode:
                data = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device="cpu")
                waiting = _of_class(type(parameter), data, requires_grad=parameter.requires_grad)
                vars(waiting).update({**vars(parameter), **_without_module(parameter)})
                made = waiting.to(device)
        vars(made).update(_without_module(made))
        copies[id(parameter)] = made
    return copies


def share_states(module: nn.Module) -> None:
    """Let the modules of a copy hold the states of their weights, which FSDP takes off the weights."""
    if is_imported():
        for child in filter(_is_theirs, module.modules()):
            for parameter in child.parameters(recurse=False):
                if (state := getattr(parameter, "quant_state", None)) is not None:
                    vars(child)["quant_state"] = state


def _without_module(parameter: Tensor) -> dict[str, object]:
    """The attribute by which a weight tells its module that it was quantized; the copy has none to tell."""
    return {"module": None} if "module" in vars(parameter) else {}


def _copied(value: object, fake: Callable[[Tensor], Tensor], copies: dict[int, object]) -> object:
    if isinstance(value, Tensor):
        return fake(value)
    if not _is_theirs(value) or isinstance(value, nn.Module):
        return value
    if id(value) not in copies:
        copies[id(value)] = state = copy.copy(value)
        vars(state).update({name: _copied(each, fake, copies) for name, each in vars(value).items()})
    return copies[id(value)]


@functools.cache
def _fake_class(kind: type[Tensor]) -> type[Tensor]:
    make: Any = type(kind)
    own = {"__module__": kind.__module__, "data": property(DATA.__get__, set_data)}
    return make(kind.__name__, (kind, FakeTensor), own)  # type: ignore[no-any-return]


DATA: Any = Tensor.data


def set_data(tensor: FakeTensor, data: object) -> None:
    """Set the ``data`` of a fake tensor; torch leaves its device as it was."""
    DATA.__set__(tensor, data)
    if isinstance(data, FakeTensor):
        tensor.fake_device = data.fake_device


def _of_class(kind: type[Tensor], fake: Tensor, *, requires_grad: bool) -> Tensor:
    """Make a fake tensor one of a class of parameters, with its methods."""
    fake = fake.detach()
    fake.__class__ = _fake_class(kind)
    return fake.requires_grad_(requires_grad)


# -- running their code on fake tensors


class _Inert:
    """A C library whose functions do nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*_: object) -> int:
            return 0

        return function


_inert: list[str] = []  # devices whose kernels run around such a library now
_waiting: list[Callable[[], None]] = []  # until bitsandbytes is imported


@contextmanager
def simulated() -> Iterator[None]:
    """Run bitsandbytes on fake tensors: its classes, caches and kernels for the CPU.

    Patches torch's ``Tensor._make_subclass`` and bitsandbytes for the whole process.
    """
    with port.subclasses_made_by(_making_fake), _around_nothing("cpu", _patches):
        yield


def cuda_simulated() -> AbstractContextManager[None]:
    """Run its kernels for CUDA on fake tensors; bitsandbytes imports them itself only if there is a GPU."""
    return _around_nothing("cuda", _cuda_patches)


@contextmanager
def _around_nothing(
    device_type: str, patches: Callable[[_Inert], Iterator[AbstractContextManager[Any]]]
) -> Iterator[None]:
    with ExitStack() as exits:

        def begin() -> None:
            with suppress(AttributeError, ImportError):  # of another version: its kernels are not looked into
                for patch in patches(_Inert()):
                    exits.enter_context(patch)
                _inert.append(device_type)
                exits.callback(_inert.remove, device_type)

        _waiting.append(begin)
        begin_if_imported()
        try:
            yield
        finally:
            _waiting[:] = [each for each in _waiting if each is not begin]


def begin_if_imported() -> None:
    """Patch bitsandbytes if it was imported since: many import it where they make an optimizer."""
    while _waiting and _LIBRARY in sys.modules:
        _waiting.pop(0)()


def _making_fake(make: Callable[..., Any]) -> Callable[..., Tensor]:
    def subclass(kind: type[Tensor], data: Tensor, require_grad: bool = False, **options: Any) -> Tensor:
        if not isinstance(data, FakeTensor) or issubclass(kind, FakeTensor):
            return make(kind, data, require_grad, **options)  # type: ignore[no-any-return]
        return _of_class(kind, data, requires_grad=require_grad)

    return subclass


def _patches(library: _Inert) -> Iterator[AbstractContextManager[Any]]:
    functional: Any = importlib.import_module(f"{_LIBRARY}.functional")
    make_map = functional.create_dynamic_map

    def dynamic_map(*args: Any, **kwargs: Any) -> Tensor:
        with unset_fake_temporarily(), torch.device("cpu"):
            return make_map(*args, **kwargs)  # type: ignore[no-any-return]

    yield patched(functional, name2qmap={}, create_dynamic_map=dynamic_map, lib=library)
    yield patched(functional, get_paged=_paged, fill=nothing, prefetch_tensor=nothing)
    update = functional.optimizer_update_32bit

    def without_norm(name: str, g: Tensor, p: Tensor, *args: object, max_unorm: float = 0.0, **kwargs: object) -> None:
        if max_unorm and isinstance(p, FakeTensor):  # LAMB and LARS pass it on as a number
            torch.norm(p.data.float())
            max_unorm = 0.0
        update(name, g, p, *args, max_unorm=max_unorm, **kwargs)

    yield patched(functional, optimizer_update_32bit=without_norm)
    yield patched(importlib.import_module(f"{_LIBRARY}.optim.optimizer"), sync_gpu=nothing)
    yield patched(importlib.import_module(f"{_LIBRARY}.backends.cpu.ops"), lib=library)


def _cuda_patches(library: _Inert) -> Iterator[AbstractContextManager[Any]]:
    ops: Any = _cuda_kernels(library)
    tables = {
        name: {kind: (nothing,) * len(functions) for kind, functions in getattr(ops, name).items()}
        for name in ("str2optimizer32bit", "str2optimizer8bit_blockwise")
    }
    asked = {name: getattr(ops, name).__wrapped__ for name in ("_gpu_dispatch_props", "_gemm_4bit_use_custom_fn")}
    yield patched(ops, lib=library, _get_raw_stream=lambda _: 0, _cuda_device_of=lambda _: nullcontext(), **tables)
    yield patched(ops, **asked)  # their answers are cached by the index of a device, whichever GPU that is
    yield patched(ops.CUBLAS_Context, get_instance=lambda: SimpleNamespace(get_context=nothing))


def _cuda_kernels(library: _Inert) -> ModuleType:
    """Return the module of kernels for CUDA; bitsandbytes itself imports it only if there is a GPU."""
    with ExitStack() as exits:
        exits.enter_context(patched(importlib.import_module(f"{_LIBRARY}.cextension"), lib=library))
        exits.enter_context(port.raw_streams_added())
        return importlib.import_module(f"{_LIBRARY}.backends.cuda.ops")


def _paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """A paged tensor is managed memory of CUDA, outside of torch's allocator: as good as one on the host."""
    made: Any = torch.zeros(shape, dtype=dtype, device="cpu")
    made.is_paged, made.page_deviceid = True, device.index if device else 0
    return made  # type: ignore[no-any-return]


# -- columns with outliers, which 8-bit products compute in 16 bits

OUTLIERS = (
    "8-bit weights of bitsandbytes compute columns with outliers in 16 bits, and which these are depends on values: "
    "predicted with one column in 512, and at most with all"
)
_OUTLIERS_IN = 512  # columns; at most 7 of 4,096 or 5,120 in models of up to 13 billion parameters (LLM.int8, 2022)
_QUANTIZE, _MULTIPLY = "bitsandbytes::int8_vectorwise_quant", "bitsandbytes::int8_mixed_scaled_mm"


def quantize_rows(x: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """The kernel for CUDA that quantizes what a product is of, with so many columns of outliers."""
    stats = torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    if threshold <= 0.0:
        return out, stats, None
    outliers = x.abs() >= threshold
    _ = outliers.any(), outliers.any(dim=0)
    columns = torch.empty(max(1, x.shape[-1] // _OUTLIERS_IN), dtype=torch.int64, device=x.device)
    if len(stats) > 1:
        out[:, columns] = 0
    return out, stats, columns


def depends_on_outliers(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator looks for columns with outliers."""
    return func.name() == _QUANTIZE and bool((kwargs.get("threshold") or (*args, 0.0, 0.0)[1]) > 0)


def most_of_outliers(func: OpOverload, args: Sequence[Any], out: object) -> tuple[int, Tensor, int] | None:
    """Bytes of a product whose columns all have outliers, beyond those that were assumed; None for another operator.

    Returns:
        Bytes inside it, a tensor that it returns, and bytes that live as long as that one.
    """
    if func.name() != _MULTIPLY or not isinstance(out, tuple) or not isinstance(out[1], Tensor) or not out[1].numel():
        return None
    x, weight, kept = args[0], args[2], out[1]
    more = weight.numel() - weight.shape[0] * kept.shape[-1]  # copied, made of 32 bits twice, and of the input's
    return more * (1 + 4 + 4), kept, x.element_size() * (x.numel() - kept.numel())


def addresses_for(func: OpOverload, device_type: str) -> AbstractContextManager[None] | None:
    """Give each fake tensor an address, for a kernel whose C functions do nothing now; None for other kernels."""
    begin_if_imported()
    if func.namespace != _LIBRARY or device_type not in _inert:
        return None
    return patched(FakeTensor, data_ptr=lambda _: 0)
