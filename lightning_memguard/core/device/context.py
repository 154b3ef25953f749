"""What a process takes on its GPU outside PyTorch's allocator: CUDA's context and libraries."""

from __future__ import annotations

import torch

from lightning_memguard.core.device.asking import indexed, or_none
from lightning_memguard.core.device.nvml import nvml_room_of
from lightning_memguard.core.device.room import Room
from lightning_memguard.units import GIB

_LARGEST_CONTEXT_BYTES = 2 * GIB
"""More than this outside PyTorch's allocator is not one process's context and libraries (107 to 1343 MB were seen)."""

_UNMEASURED_CONTEXT_BYTES = 555_000_000
"""A context that cannot be measured: the largest that was seen with CUDA's lazy loading (11.7 and newer)."""


def context_bytes(device: torch.device) -> int:
    """Measure what this process takes on ``device`` outside PyTorch's allocator: CUDA's context and libraries.

    Opens the context where it is not up yet, and sees what that took. Read the budget and open a `PeakMeter` before.
    """
    if device.type != "cuda":
        return 0
    before = or_none(before_context, device)
    or_none(torch.cuda.synchronize, device)  # the cheapest call that opens a context; it allocates nothing
    return context_now(before, or_none(nvml_room_of, device), reserved_bytes(device))


def reserved_bytes(device: torch.device) -> int:
    """What PyTorch's allocator holds on the device."""
    return or_none(lambda: torch.get_device_module(device).memory_reserved(device)) or 0


def context_is_up(device: torch.device) -> bool:
    """Whether this process has a CUDA context on the device."""
    if not torch.cuda.is_initialized():
        return False
    # Private in torch 2.9 to 2.13 (torch/csrc/cuda/Module.cpp); without it, the context of a torch in use is likely up.
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return ask is None or bool(ask(indexed(device).index))


def before_context(device: torch.device) -> Room | None:
    """What NVML says of the device while no context of ours is up; None where one is."""
    return None if context_is_up(device) else nvml_room_of(device)


def context_now(before: Room | None, now: Room | None, reserved_bytes: int) -> int:
    """`outside_allocator_bytes`, or the largest context that was seen where it cannot be measured."""
    return outside_allocator_bytes(before, now, reserved_bytes)[0] or _UNMEASURED_CONTEXT_BYTES


def outside_allocator_bytes(before: Room | None, now: Room | None, reserved_bytes: int) -> tuple[int, str]:
    """Tell what the process takes on its GPU outside PyTorch's allocator, and how that is known.

    Where the device was read before the context was up, it is what has gone since, less what the allocator reserved.
    Else it is all that processes hold on the device, less that: right for a process that has the device to itself. A
    figure that no context and its libraries have is other processes' doing, and nothing is said then.

    Args:
        before: the device before this process had a context there, or None.
        now: the device now, or None where it does not say.
        reserved_bytes: what this process's allocator has reserved now.

    Returns:
        Bytes and the words for the source; 0 bytes where it cannot be told.
    """
    if before is not None and now is not None:
        taken = before.free_bytes - now.free_bytes - reserved_bytes
        if 0 < taken <= _LARGEST_CONTEXT_BYTES:
            return taken, "nvml"
    if now is not None and now.used_bytes is not None:
        taken = now.used_bytes - reserved_bytes
        if 0 < taken <= _LARGEST_CONTEXT_BYTES:
            return taken, "nvml, whole device"
    return 0, "context not seen"


# CUDA's context and the libraries that load with it take memory outside the allocator. Seen on consumer and workstation
# cards: 107 to 555 MB; on a V100 some 300 MB with lazy loading (CUDA 11.7 and newer), 1343 MB without, which no build
# of a supported torch has. Used only where no device is there to measure it.
CONTEXT_BYTES = (107_000_000, 300_000_000, 555_000_000)
