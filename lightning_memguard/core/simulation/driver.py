"""Answers to what Python asks of a GPU, without its driver: in forked children for good, and while one is simulated.

A process that was forked from one that uses CUDA must not reach the driver: each call raises "initialization error",
and one in a function of C++ that may not raise ends the process. So the answers are given where Python ends, in place
of the functions of C++: code that has imported a function of `torch.cuda` by its name gets them too. Below Python,
PyTorch asks the driver for the current device only if it does not know it, so a child sets it
(`targetDeviceIndex` in c10/cuda/CUDAFunctions.cpp), and for the properties of a device only once (`gpu_of` has).
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.library import Library

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.foreign import gaps, patched
from lightning_memguard.core.simulation import streams
from lightning_memguard.errors import CannotTraceError

_CUDA, _META, _LAZY = 1, 14, 17  # c10::DeviceType (torch/headeronly/core/DeviceType.h)
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_REGISTER = "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
_SET_ASKING = "_ZN3c104cuda9_internal20setHasPrimaryContextEPFbaE"
_MAYBE_SET_DEVICE = "_ZN3c104cuda14MaybeSetDeviceEa"

known_device = [0]  # the index of the GPU whose properties this process has asked for last
_for_good: list[object] = []  # what must live as long as the process


def has_driver() -> bool:
    """Whether this build of torch would call a GPU's driver."""
    return torch.version.cuda is not None or torch.version.hip is not None


@functools.cache
def guard_no_device() -> None:
    """Register a device guard for CUDA that does nothing, for good.

    Every build can make such a guard, but only in place of one that counts no devices
    (`c10::impl::ensureCUDADeviceGuardSet`). The lazy backend's counts none, so it takes that place for a moment,
    registered by `c10::impl::registerDeviceGuard` as a build with CUDA registers its own. The guard stays for the
    process: fake tensors may outlive the capture, and nothing else in a build without CUDA uses it.
    """
    folder = Path(torch.__file__).parent / "lib"
    paths = [path for name in ("libc10.so", "libc10.dylib", "c10.dll") if (path := folder / name).exists()]
    try:
        library = ctypes.CDLL(str(paths[0]))
        registry = (ctypes.c_void_p * (_LAZY + 1)).in_dll(library, _REGISTRY)
        register = getattr(library, _REGISTER)
    except (IndexError, OSError, AttributeError, ValueError) as error:
        raise CannotTraceError(
            f"This build of torch ({torch.__version__}) has no CUDA and cannot simulate it ({error}). Install a build "
            "with CUDA (it needs no GPU), or predict for device='cpu'."
        ) from error
    register.argtypes, register.restype = [ctypes.c_int8, ctypes.c_void_p], None
    if (has_driver() or registry[_CUDA] in (None, registry[_META])) and registry[_LAZY] is not None:
        register(_CUDA, registry[_LAZY])
        port.count_devices_again()
    if registry[_CUDA] in (None, registry[_LAZY]):
        register(_CUDA, registry[_META])  # its device is "meta": `.to("cuda")` then needs an index


def leave_driver_alone() -> None:
    """Keep this process, a child, from calling the driver, for good."""
    if not has_driver() or _for_good:
        return
    _for_good.append(stack := ExitStack())
    with suppress(AttributeError):  # a torch that has moved a name goes on to be asked, and refuses
        stack.enter_context(answered(_refuse_memory))
        stack.enter_context(port.gpu_initialized_by(_refuse_device))
    if not gaps("cuda"):
        with suppress(CannotTraceError):
            guard_no_device()
    pinning = Library("aten", "IMPL")
    pinning.impl("is_pinned", lambda _, device=None: False, "CPU")  # noqa: ARG005 - called by that name
    pinning.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")  # noqa: ARG005
    _for_good.append(pinning)


def _tell_device(index: int) -> None:
    """Tell PyTorch which device is current, and that none has a context that would have to be asked."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10_cuda.so"))
    set_asking, set_device = getattr(library, _SET_ASKING), getattr(library, _MAYBE_SET_DEVICE)
    set_asking(_HAS_NO_CONTEXT)
    set_device(ctypes.c_int8(index))


_HAS_NO_CONTEXT = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int8)(lambda _: False)


def _refuse_memory(*_: object) -> Any:
    raise CannotTraceError("it asks for the free memory of the GPU, which a copy of a process cannot know")


def _refuse_device(*_: object) -> None:
    """Refuse tensors on the GPU itself; what asks about it has its answers."""
    if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch.cuda"):
        raise CannotTraceError(NEEDS_GPU)


NEEDS_GPU = "it needs the GPU itself, which a copy of a process cannot use"


@contextmanager
def answered(memory: Callable[..., tuple[int, int]]) -> Iterator[None]:
    """Answer in place of the functions of C++ that ask a GPU: one device, nothing allocated, no work to wait for.

    Args:
        memory: returns the bytes that the GPU has free, and has.
    """
    if _for_good:
        with suppress(OSError, AttributeError):  # a build for AMD's GPUs, or a torch that has moved these functions
            _tell_device(known_device[0])
    runtime = SimpleNamespace(cudaMemGetInfo=memory)
    generators = (torch.Generator(),) * _MOST_DEVICES  # real ones belong to the driver
    given = patched(torch.cuda, cudart=lambda: runtime, default_generators=generators)
    with port.gpu_answers(memory), streams.replaced(), given:
        yield


_MOST_DEVICES = 64  # of a process
