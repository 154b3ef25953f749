"""NVML: which of its devices is the one that torch means, and what it says of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_memguard.core.device.asking import indexed, or_none
from lightning_memguard.core.device.room import Room


@dataclass(frozen=True)
class GpuFacts:
    """What torch and the environment say of one GPU: enough to find it in NVML.

    Attributes:
        total_bytes: its memory as CUDA sees it; on MIG that of the slice.
        uuids: its names in NVML's spelling (``GPU-...``, ``MIG-...``), the likeliest first.
        pci_bus_id: such as ``"00000000:3B:00.0"``; empty where unknown.
        nvml_index: its index in NVML, as far as ``CUDA_VISIBLE_DEVICES`` lets one tell; else None.
        integrated: it shares the host's memory.
    """

    total_bytes: int
    uuids: tuple[str, ...] = ()
    pci_bus_id: str = ""
    nvml_index: int | None = None
    integrated: bool = False


# NVML: which of its devices is the one that torch means, and what it says of it


def gpu_facts(index: int, properties: Any, visible_devices: str | None) -> GpuFacts:
    """Gather what names a GPU.

    Args:
        index: torch's index of it.
        properties: what `torch.cuda.get_device_properties` says.
        visible_devices: the environment's ``CUDA_VISIBLE_DEVICES``, or None.
    """
    total, integrated = int(properties.total_memory), bool(getattr(properties, "is_integrated", False))
    entry = _visible_entry(index, visible_devices)
    if entry.startswith("MIG-"):
        # Its PCI bus and index are those of the whole GPU, which must not be mistaken for the slice.
        return GpuFacts(total, (entry,), integrated=integrated)
    uuid = getattr(properties, "uuid", None)
    uuids = (f"GPU-{uuid}", f"MIG-{uuid}") if uuid else ()  # torch leaves the prefix away
    nvml_index = int(entry) if entry.isdecimal() else None
    return GpuFacts(total, uuids, _pci_bus_id(properties), nvml_index, integrated)


def _visible_entry(index: int, visible_devices: str | None) -> str:
    """The device's own name in CUDA_VISIBLE_DEVICES; its index where that is not set."""
    if visible_devices is None:
        return str(index)
    entries = visible_devices.split(",")
    return entries[index].strip() if index < len(entries) else ""


def _pci_bus_id(properties: Any) -> str:
    """NVML's spelling of the bus id, where this torch's properties have it."""
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = [part for part in parts if part is not None]
    return "{:08X}:{:02X}:{:02X}.0".format(*known) if len(known) == 3 else ""


def gpu_facts_of(device: torch.device) -> GpuFacts:
    """Facts of the GPU that torch means by ``device``."""
    index = indexed(device).index
    return gpu_facts(index, torch.cuda.get_device_properties(index), os.environ.get("CUDA_VISIBLE_DEVICES"))


def nvml_room_of(device: torch.device) -> Room | None:
    """`nvml_room` of the GPU that torch means by ``device``."""
    return nvml_room(gpu_facts_of(device))


def nvml_room(gpu: GpuFacts) -> Room | None:
    """Read a GPU's memory from NVML; None where NVML does not answer, or not for this GPU."""
    return None if torch.version.hip else or_none(_ask_nvml, gpu)


def _ask_nvml(gpu: GpuFacts) -> Room | None:
    import pynvml

    pynvml.nvmlInit()
    try:
        for find, name in _nvml_handles(pynvml, gpu):
            room = or_none(_nvml_memory, pynvml, find, name)
            if room is not None and _is_of(room, name, gpu):
                return _as_cuda_sees_it(room, gpu)
        return None
    finally:
        or_none(pynvml.nvmlShutdown)


def _nvml_handles(pynvml: Any, gpu: GpuFacts) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    """Ways to the handle, the surest first: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER change what an index means."""
    for uuid in gpu.uuids:
        yield pynvml.nvmlDeviceGetHandleByUUID, uuid
    if gpu.pci_bus_id:
        yield pynvml.nvmlDeviceGetHandleByPciBusId, gpu.pci_bus_id
    if gpu.nvml_index is not None:
        yield pynvml.nvmlDeviceGetHandleByIndex, gpu.nvml_index


def _nvml_memory(pynvml: Any, find: Callable[[Any], Any], name: Any) -> Room:
    handle = find(name)
    newer = or_none(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2))
    if newer is not None:
        return Room(newer.total, newer.free, "nvml", newer.used)
    older = pynvml.nvmlDeviceGetMemoryInfo(handle)  # before driver 510; its `used` holds the driver's share too
    return Room(older.total, older.free, "nvml")


def _is_of(room: Room, name: Any, gpu: GpuFacts) -> bool:
    """Whether the sizes agree. NVML's total is 1 to 2% above CUDA's; a whole GPU's is far above that of its MIG slice.

    The name of a slice is nobody else's, so its size needs no check.
    """
    return str(name).startswith("MIG-") or math.isclose(room.total_bytes, gpu.total_bytes, rel_tol=0.1)


def _as_cuda_sees_it(room: Room, gpu: GpuFacts) -> Room:
    total = min(room.total_bytes, gpu.total_bytes)
    return replace(room, total_bytes=total, free_bytes=min(room.free_bytes, total))
