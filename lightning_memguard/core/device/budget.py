"""What a training may take of its device -> Budget."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from lightning_memguard.core.decision.decision import Budget
from lightning_memguard.core.device.asking import indexed, or_none
from lightning_memguard.core.device.context import context_is_up, context_now, reserved_bytes
from lightning_memguard.core.device.host import cgroup_room, host_room, rlimit_room
from lightning_memguard.core.device.nvml import GpuFacts, gpu_facts_of, nvml_room
from lightning_memguard.core.device.room import Room, smallest
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import format_bytes

# What may be taken


def read_budget(
    device: torch.device, *, budget: int | None = None, margin: float = 0.05, already_held_bytes: int = 0
) -> Budget:
    """Read what a training may take on ``device`` in all, held against `Footprint.peak_device_bytes`.

    That is what is free, and what is this training's already: what PyTorch's allocator keeps cached, the model where it
    lies on the device, and the context where it is up. Other tensors of this process are in the way like any others.

    A context that is up has no size that one could read for sure (NVML's figures by process are missing or wrong in
    containers and under WSL). It needs none: it stands on both sides, so `context_bytes` is counted as ours here and
    as needed in the Footprint, and a wrong figure cancels out. Libraries that load later are left to the margin.

    Args:
        device: where the training will run.
        budget: bytes the user allows it, or None for what the device has free.
        margin: share of the budget to keep free, 0 to 1.
        already_held_bytes: bytes of the model (parameters and buffers) that lie on ``device`` now.

    Returns:
        The budget. Where ``budget`` is more than the device has free, it is kept, and a warning says so.

    Raises:
        MemGuardError: the device does not say what it has, and no ``budget`` was given.

    >>> read_budget(torch.device("cpu"), budget=8 * GIB, margin=0.25).usable_bytes == 6 * GIB
    True
    """
    name, room = device_name(device), _room(device, already_held_bytes)
    if budget is not None:
        if room is not None and budget > room.free_bytes:
            warnings.warn(_too_large(budget, room, name), UserWarning, stacklevel=2)
        room = Room(room.total_bytes if room else budget, budget, "given")
    if room is None:
        raise MemGuardError(
            f"{name} was asked how much memory it has free, and neither its driver nor PyTorch could tell. "
            f"Check that PyTorch can use it, or set `budget`, such as budget='24GiB'."
        )
    return Budget(room.total_bytes, room.free_bytes, int(room.free_bytes * margin), room.source, name)


def device_name(device: torch.device) -> str:
    """Name a device in words, such as ``"NVIDIA H200 (cuda:0)"`` or ``"CPU"``."""
    if device.type == "cpu":
        return "CPU"
    if device.type == "mps":
        return "Apple GPU (mps)"
    name = or_none(lambda: torch.get_device_module(device).get_device_name(device))
    return f"{name} ({or_none(indexed, device) or device})" if name else str(device)


def _too_large(budget: int, room: Room, name: str) -> str:
    return (
        f"budget={format_bytes(budget)} was asked for, and {name} has {format_bytes(room.free_bytes)} of "
        f"{format_bytes(room.total_bytes)} free ({room.source}). The budget stays as given, and the training may run "
        f"out of memory: lower `budget`, free memory on the device, or leave `budget` out."
    )


def _room(device: torch.device, held_bytes: int) -> Room | None:
    """What the process may take in all, from the first source that answers."""
    if device.type == "cpu":
        rooms = (or_none(host_room), or_none(cgroup_room), or_none(rlimit_room))
        return _with_own(smallest(rooms), held_bytes)
    if device.type == "mps":
        return _with_own(or_none(_mps_room), held_bytes)
    if device.type == "cuda":
        return or_none(_cuda_room, device, held_bytes)
    return _with_own(or_none(_torch_room, device), _own_bytes(device, held_bytes))


def _with_own(room: Room | None, own_bytes: int) -> Room | None:
    """Count what is the training's already as free for it."""
    return room and replace(room, free_bytes=max(0, min(room.free_bytes + own_bytes, room.total_bytes)))


# A GPU's memory


def _cuda_room(device: torch.device, held_bytes: int) -> Room | None:
    gpu = gpu_facts_of(device)
    if gpu.integrated:
        # NVML answers NotSupported on GB10 and Jetson, and mem_get_info says MemFree, which leaves out the page cache.
        room = host_room()
    else:
        room = nvml_room(gpu) or or_none(_torch_room, device) or _host_room_within(gpu)
    # Asked after the sources: mem_get_info opens the context, and what it says is without it.
    context = context_now(None, room, reserved_bytes(device)) if context_is_up(device) else 0
    return _capped(device, _with_own(room, _own_bytes(device, held_bytes) + context), held_bytes)


def _torch_room(device: torch.device) -> Room:
    free, total = torch.get_device_module(device).mem_get_info(device)
    return Room(total, free, device.type)


def _mps_room() -> Room:
    total = torch.mps.recommended_max_memory()
    return Room(total, total - torch.mps.driver_allocated_memory(), "mps")


def _host_room_within(gpu: GpuFacts) -> Room:
    """The last resort of a GPU whose drivers say nothing but its size."""
    host = host_room()
    return replace(host, total_bytes=gpu.total_bytes, free_bytes=min(host.free_bytes, gpu.total_bytes))


def _own_bytes(device: torch.device, held_bytes: int) -> int:
    """What the allocator caches, and what of its allocations is the model."""
    allocated = or_none(lambda: torch.get_device_module(device).memory_allocated(device)) or 0
    return reserved_bytes(device) - allocated + min(held_bytes, allocated)


def _capped(device: torch.device, room: Room | None, held_bytes: int) -> Room | None:
    """Keep to torch.cuda.set_per_process_memory_fraction: the allocator refuses to go past it."""
    fraction = or_none(torch.cuda.get_per_process_memory_fraction, device)
    if room is None or fraction is None or fraction >= 1:
        return room
    others = max(0, torch.cuda.memory_allocated(device) - held_bytes)
    return replace(room, free_bytes=max(0, min(room.free_bytes, int(fraction * room.total_bytes) - others)))
