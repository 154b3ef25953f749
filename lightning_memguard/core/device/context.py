"""Memory of a process on its GPU outside PyTorch's allocator: CUDA's context and libraries, NCCL's buffers."""

from __future__ import annotations

import torch
from torch import distributed as dist

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.device.host import MemoryInfo, or_none
from lightning_memguard.core.device.nvml import nvml_memory_of, with_index
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.range import NOTHING, Range
from lightning_memguard.units import GIB, MIB

# More than this outside PyTorch's allocator is not one process's context, libraries and NCCL buffers.
_LARGEST_BYTES = 2 * GIB


def context_bytes(device: torch.device) -> Range[int]:
    """Return what a training takes on ``device`` outside PyTorch's allocator: at least, most likely, at most.

    The context comes first, kernels and libraries when they are first used. On an H100 with torch 2.11 for CUDA 13.0
    (`benchmarks/recordings/h100.json.gz`) it was 527 MiB once the device was set, 619 after a first kernel, 641 at the
    end of a U-Net, 751 with cuBLAS (66 for each of the two threads that multiply matrices), 767 to 771 with cuDNN as
    well. So a measurement at setup is too low, and the catalogue's figures, from the end of trainings, are right. If
    this process holds more already, it is at least that; if it holds more than any training's context, the rest is
    NCCL's or another library's, and libraries may still load. Nothing creates a context here.
    """
    if device.type != "cuda":
        return NOTHING
    least, likely, most = _of_a_training(device)
    held = outside_bytes(device, or_none(nvml_memory_of, device))[0] if has_context(device) else 0
    if held > most:
        return Range(held, held + likely - least, held + most - least)
    return Range(max(least, held), max(likely, held), most)


def context_held(device: torch.device, now: MemoryInfo | None) -> int:
    """Return what this process holds outside PyTorch's allocator; if that is not seen, what a context takes at least.

    Args:
        device: a CUDA device.
        now: the device now, or None if it does not report its memory.
    """
    if device.type != "cuda" or not has_context(device):
        return 0
    return outside_bytes(device, now)[0] or _of_a_training(device).low


def outside_bytes(device: torch.device, now: MemoryInfo | None) -> tuple[int, str]:
    """Measure what this process holds on its GPU outside PyTorch's allocator, and say how that is known.

    NVML reports it of the process (the process's memory less what the allocator has reserved), or of the whole device:
    right for a process that has it to itself. Another one has a context of its own, so the device is not ours alone
    if there are two of the smallest. What can belong to another process counts as unknown.

    Args:
        device: a CUDA device.
        now: the device now, or None if it does not report its memory.

    Returns:
        Bytes and the source in words; 0 bytes if unknown.
    """
    least, _, most = _of_a_training(device)
    has_nccl = dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend()  # which has buffers, too,
    alone = _LARGEST_BYTES if has_nccl else max(2 * least, most)  # and refuses a GPU that another rank uses
    reserved = reserved_bytes(device)
    taken = (now.own_bytes, now.used_bytes) if now else (None, None)
    for nbytes, limit, source in zip(taken, (_LARGEST_BYTES, alone), ("nvml", "nvml, whole device"), strict=True):
        if nbytes is not None and 0 < nbytes - reserved <= limit:
            return nbytes - reserved, source
    return 0, "context not seen"


def _of_a_training(device: torch.device) -> Range[int]:
    """The catalogue's context of the GPU that is there, which need not be in it."""
    facts = torch.cuda.get_device_properties(device)
    capability = (0, 0) if torch.version.hip else (facts.major, facts.minor)
    return Gpu(facts.name, facts.total_memory, capability, facts.multi_processor_count).context_bytes


def reserved_bytes(device: torch.device) -> int:
    """Return the bytes that PyTorch's allocator has reserved on the device."""
    return or_none(lambda: torch.get_device_module(device).memory_reserved(device)) or 0


def has_context(device: torch.device) -> bool:
    """Whether this process has a CUDA context on the device."""
    if not torch.cuda.is_initialized():
        return False
    return port.has_primary_context(with_index(device).index)


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
