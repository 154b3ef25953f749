"""Memory of a process on its GPU outside PyTorch's allocator: CUDA's context and libraries, NCCL's buffers."""

from __future__ import annotations

import torch

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.device.host import MemoryInfo, or_none
from lightning_memguard.core.device.nvml import nvml_memory_of, with_index
from lightning_memguard.core.range import Range
from lightning_memguard.units import GIB, MIB

UNKNOWN_CONTEXT_BYTES = 900_000_000
"""Counted as the context of a device that is there and cannot be asked: about an H100's, the largest."""

# More than this outside PyTorch's allocator is not one process's context and libraries (107 to 1343 MB measured).
_LARGEST_CONTEXT_BYTES = 2 * GIB


def context_bytes(device: torch.device) -> int:
    """Measure what this process holds on ``device`` outside PyTorch's allocator: CUDA's context and libraries.

    Creates the context if there is none yet, and measures what that takes. Read the budget and open a `PeakMeter`
    before.
    """
    if device.type != "cuda":
        return 0
    before = or_none(memory_before_context, device)
    or_none(torch.cuda.synchronize, device)  # the cheapest call that creates a context; it allocates nothing
    return context_bytes_between(before, or_none(nvml_memory_of, device), reserved_bytes(device))


def reserved_bytes(device: torch.device) -> int:
    """Return the bytes that PyTorch's allocator has reserved on the device."""
    return or_none(lambda: torch.get_device_module(device).memory_reserved(device)) or 0


def has_context(device: torch.device) -> bool:
    """Whether this process has a CUDA context on the device."""
    if not torch.cuda.is_initialized():
        return False
    return port.has_primary_context(with_index(device).index)


def memory_before_context(device: torch.device) -> MemoryInfo | None:
    """Read NVML's report on the device before this process has a context there; None if it has one."""
    return None if has_context(device) else nvml_memory_of(device)


def context_bytes_between(before: MemoryInfo | None, now: MemoryInfo | None, reserved_bytes: int) -> int:
    """`outside_allocator_bytes`; if unknown, `UNKNOWN_CONTEXT_BYTES`."""
    return outside_allocator_bytes(before, now, reserved_bytes)[0] or UNKNOWN_CONTEXT_BYTES


def outside_allocator_bytes(before: MemoryInfo | None, now: MemoryInfo | None, reserved_bytes: int) -> tuple[int, str]:
    """Compute what the process holds on its GPU outside PyTorch's allocator, and how that is known.

    If the device was read before the context was created, it is the free memory lost since, less what the allocator
    reserved. Else it is all that processes hold on the device, less that: right for a process that has the device to
    itself. A figure too large for a context and its libraries comes from other processes, and counts as unknown.

    Args:
        before: the device before this process had a context there, or None.
        now: the device now, or None if it does not report its memory.
        reserved_bytes: what this process's allocator has reserved now.

    Returns:
        Bytes and the source in words; 0 bytes if unknown.
    """
    lost = before.free_bytes - now.free_bytes if before and now else None
    used = now.used_bytes if now else None
    for taken, source in ((lost, "nvml"), (used, "nvml, whole device")):
        if taken is not None and 0 < taken - reserved_bytes <= _LARGEST_CONTEXT_BYTES:
            return taken - reserved_bytes, source
    return 0, "context not seen"


# -- NCCL: the buffers of its connections

# Each connection of a channel to a peer holds a buffer for each protocol on its receiving side (`computeBuffSizes` in
# NCCL's src/init.cc: 4 MiB Simple, NCCL_LL128_BUFF_SIZE 4.7 MiB, NCCL_LL_BUFF_SIZE 0.5 MiB; 10 MiB when rounded up to
# CUDA's granularity) and 2 MiB on its sending side: the two sizes that NVIDIA/nccl#1685 counted on 8 H100.
_CONNECTION_BYTES = (10 + 2) * MIB

# Channels, and connections of each. Over NVLink: ring and tree on 24 channels are 576 MiB (544 MB for two, 688 MB for
# four A100 in NVIDIA/nccl#964); at most ring and a branching tree on all that there are. What there is of both follows
# the bandwidth (NVIDIA/nccl#864): over PCIe, a ring on two to four channels.
_LEAST = 2, 1
_NVLINK, _MOST_NVLINK = (24, 2), (32, 3)
_PCIE, _MOST_PCIE = (4, 2), (16, 3)
_WITH_NVLINK = ((7, 0), (8, 0), (9, 0), (10, 0), (10, 3))  # compute capabilities; such cards come without it too


def nccl_bytes(communicators: int, compute_capability: tuple[int, int]) -> Range[int]:
    """Return the bytes that so many communicators take on each of their GPUs: at least, most likely, at most.

    A communicator is made by the first collective of a process group. Beyond two nodes it takes no more with more ranks
    (NVIDIA/nccl#864). Not counted: send and receive between all pairs, NVLink SHARP, and registered user buffers.
    """
    linked = compute_capability in _WITH_NVLINK
    likely, most = (_NVLINK, _MOST_NVLINK) if linked else (_PCIE, _MOST_PCIE)
    least, usual, largest = (channels * each * _CONNECTION_BYTES for channels, each in (_LEAST, likely, most))
    return Range(least, usual, largest).scaled(communicators)
