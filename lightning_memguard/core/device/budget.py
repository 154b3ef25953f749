"""Free memory of a device -> the Budget of a training."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from lightning_memguard.core.decision.decision import Budget
from lightning_memguard.core.device.context import context_bytes, context_held, reserved_bytes
from lightning_memguard.core.device.host import MemoryInfo, available_memory, host_memory, or_none
from lightning_memguard.core.device.nvml import gpu_facts_of, nvml_memory, with_index
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import format_bytes


def read_budget(
    device: torch.device, *, budget: int | None = None, margin: float = 0.05, already_held_bytes: int = 0
) -> Budget:
    """Read what a training may take on ``device`` in total, to compare with `Footprint.peak_device_bytes`.

    That is what is free, and what this training already holds: what PyTorch's allocator keeps cached, the model if it
    is on the device, and the CUDA context if there is one. Other tensors of this process count as other memory.

    On CUDA the total is CUDA's: on an H100 NVML's 81,559 MiB less the 480 that the driver keeps, which NVML's free
    memory excludes. A process that is alone there is offered all 81,079 MiB before it has a context, and
    after: what is then free, 80,552, and its own context, 527. `Footprint.peak_device_bytes` counts the context with
    all libraries, 752, so PyTorch's allocator gets 80,327 either way. If the size of an existing context cannot be read
    (NVML's figures by process are missing in containers and under WSL), the least is counted, never more than is
    there.

    Args:
        device: where the training will run.
        budget: bytes the user allows it, or None for what the device has free.
        margin: share of the budget to keep free, 0 to 1.
        already_held_bytes: bytes of the model (parameters and buffers) that are on ``device`` now.

    Returns:
        The budget. If ``budget`` is more than the device has free, it is kept, and a warning says so.

    Raises:
        MemGuardError: the device does not report its memory, and no ``budget`` was given.

    >>> read_budget(torch.device("cpu"), budget=8 << 30, margin=0.25).usable_bytes == 6 << 30
    True
    """
    name, memory = device_name(device), _memory(device, already_held_bytes)
    if budget is not None:
        if memory is not None and budget > memory.free_bytes:
            warnings.warn(
                f"budget={format_bytes(budget)} is more than is free on {name}: {format_bytes(memory.free_bytes)} of "
                f"{format_bytes(memory.total_bytes)} ({memory.source}). The budget stays as given, and the training "
                "may run out of memory: lower `budget`, free memory on the device, or leave `budget` out.",
                stacklevel=2,
            )
        memory = MemoryInfo(memory.total_bytes if memory else budget, budget, "given")
    if memory is None:
        raise MemGuardError(
            f"The free memory of {name} is unknown: neither its driver nor PyTorch reports it. "
            f"Check that PyTorch can use the device, or set `budget`, such as budget='24GiB'."
        )
    return Budget(memory.total_bytes, memory.free_bytes, int(memory.free_bytes * margin), memory.source, name)


def device_name(device: torch.device) -> str:
    """Name a device in words, such as ``"NVIDIA H200 (cuda:0)"`` or ``"CPU"``."""
    if device.type == "cpu":
        return "CPU"
    if device.type == "mps":
        return "Apple GPU (mps)"
    name = or_none(lambda: torch.get_device_module(device).get_device_name(device))
    return f"{name} ({or_none(with_index, device) or device})" if name else str(device)


def _memory(device: torch.device, held_bytes: int) -> MemoryInfo | None:
    """Read the memory that the process may take in total, from the first source that answers."""
    if device.type == "cpu":
        return _with_own(available_memory(), held_bytes)
    if device.type == "mps":
        return _with_own(or_none(_mps_memory), held_bytes)
    if device.type == "cuda":
        return or_none(_cuda_memory, device, held_bytes)
    return _with_own(or_none(_torch_memory, device), _own_bytes(device, held_bytes))


def _with_own(memory: MemoryInfo | None, own_bytes: int) -> MemoryInfo | None:
    """Count what the training already holds as free for it."""
    return memory and replace(memory, free_bytes=max(0, min(memory.free_bytes + own_bytes, memory.total_bytes)))


def _cuda_memory(device: torch.device, held_bytes: int) -> MemoryInfo | None:
    gpu = gpu_facts_of(device)
    # NVML answers NotSupported on GB10 and Jetson, and mem_get_info reports MemFree, without the page cache.
    memory = host_memory() if gpu.integrated else nvml_memory(gpu) or or_none(_torch_memory, device)
    if memory is None:  # drivers that report nothing but the GPU's size
        host = host_memory()
        memory = replace(host, total_bytes=gpu.total_bytes, free_bytes=min(host.free_bytes, gpu.total_bytes))
    # The context is read after the sources: mem_get_info creates it, and its answer is without it.
    found = _with_own(memory, _own_bytes(device, held_bytes) + context_held(device, memory))
    fraction = or_none(torch.cuda.get_per_process_memory_fraction, device)
    if found is None or fraction is None or fraction >= 1:
        return found
    # The allocator refuses to reserve more than torch.cuda.set_per_process_memory_fraction; the context comes on top.
    others = max(0, torch.cuda.memory_allocated(device) - held_bytes)
    most = int(fraction * found.total_bytes) + context_bytes(device).likely - others
    return replace(found, free_bytes=max(0, min(found.free_bytes, most)))


def _torch_memory(device: torch.device) -> MemoryInfo:
    free, total = torch.get_device_module(device).mem_get_info(device)
    return MemoryInfo(total, free, device.type)


def _mps_memory() -> MemoryInfo:
    total = torch.mps.recommended_max_memory()
    return MemoryInfo(total, total - torch.mps.driver_allocated_memory(), "mps")


def _own_bytes(device: torch.device, held_bytes: int) -> int:
    """Return the bytes that the allocator caches, and those of its allocations that are the model."""
    allocated = or_none(lambda: torch.get_device_module(device).memory_allocated(device)) or 0
    return reserved_bytes(device) - allocated + min(held_bytes, allocated)
