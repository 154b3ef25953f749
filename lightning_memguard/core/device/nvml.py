"""NVML: which of its devices is the one that torch means, and how much memory it reports for it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from lightning_memguard.core.device.host import MemoryInfo, or_none


@dataclass(frozen=True)
class GpuFacts:
    """Facts that torch and the environment report about one GPU: enough to find it in NVML.

    Attributes:
        total_bytes: its memory as CUDA sees it; on MIG that of the slice.
        uuids: its names in NVML's spelling (``GPU-...``, ``MIG-...``), the most likely first.
        pci_bus_id: such as ``"00000000:3B:00.0"``; empty if unknown.
        nvml_index: its index in NVML, if ``CUDA_VISIBLE_DEVICES`` shows it; else None.
        integrated: it shares the host's memory.
    """

    total_bytes: int
    uuids: tuple[str, ...] = ()
    pci_bus_id: str = ""
    nvml_index: int | None = None
    integrated: bool = False


def with_index(device: torch.device) -> torch.device:
    """The device with its index: ``cuda`` means the current one."""
    if ":" in str(device):
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def gpu_facts(index: int, properties: Any, visible_devices: str | None) -> GpuFacts:
    """Gather what identifies a GPU: its index and properties in torch, and ``CUDA_VISIBLE_DEVICES`` if it is set."""
    total, integrated = int(properties.total_memory), bool(getattr(properties, "is_integrated", False))
    entries = dict(enumerate(map(str.strip, (visible_devices or "").split(","))))
    entry = str(index) if visible_devices is None else entries.get(index, "")
    if entry.startswith("MIG-"):
        # Its PCI bus and index are those of the whole GPU, not of the slice.
        return GpuFacts(total, (entry,), integrated=integrated)
    uuid = getattr(properties, "uuid", None)
    uuids = (f"GPU-{uuid}", f"MIG-{uuid}") if uuid else ()  # torch omits the prefix
    nvml_index = int(entry) if entry.isdecimal() else None
    parts: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    pci_bus_id = "" if None in parts else "{:08X}:{:02X}:{:02X}.0".format(*parts)  # an older torch does not have it
    return GpuFacts(total, uuids, pci_bus_id, nvml_index, integrated)


def gpu_facts_of(device: torch.device) -> GpuFacts:
    """Facts of the GPU that torch means by ``device``."""
    index = with_index(device).index
    return gpu_facts(index, torch.cuda.get_device_properties(index), os.environ.get("CUDA_VISIBLE_DEVICES"))


def driver_version() -> str:
    """Return the version of NVIDIA's driver, such as ``"570.86.15"``.

    Raises:
        pynvml.NVMLError: NVML does not answer.
    """
    with _nvml() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion())


@contextmanager
def _nvml() -> Iterator[ModuleType]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        or_none(pynvml.nvmlShutdown)


def nvml_memory_of(device: torch.device) -> MemoryInfo | None:
    """`nvml_memory` of the GPU that torch means by ``device``."""
    return nvml_memory(gpu_facts_of(device))


def nvml_memory(gpu: GpuFacts) -> MemoryInfo | None:
    """Read a GPU's memory from NVML; None if NVML does not answer, or not for this GPU."""
    return None if torch.version.hip else or_none(_ask_nvml, gpu)


def _ask_nvml(gpu: GpuFacts) -> MemoryInfo | None:
    with _nvml() as nvml:
        found = _found(nvml, gpu)
        if found is None:
            return None
        handle, memory = found
        own = or_none(_own_bytes, nvml, handle)
    total = min(memory.total_bytes, gpu.total_bytes)  # as CUDA sees it
    return replace(memory, total_bytes=total, free_bytes=min(memory.free_bytes, total), own_bytes=own)


def _own_bytes(nvml: ModuleType, handle: object) -> int | None:
    """Read what NVML names of this process; nothing in containers with process ids of their own, or under WSL."""
    entries = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return sum(each.usedGpuMemory for each in entries if each.pid == os.getpid()) or None


def _found(nvml: ModuleType, gpu: GpuFacts) -> tuple[object, MemoryInfo] | None:
    """Find NVML's handle of a GPU, and what it reports of its memory."""
    for find, name in _nvml_handles(nvml, gpu):
        handle = or_none(find, name)
        memory = or_none(_memory_of, nvml, handle) if handle is not None else None
        if memory is None:
            continue
        # NVML's total is 1 to 2% above CUDA's, a whole GPU's far above that of its MIG slice, whose name is unique.
        alike = math.isclose(memory.total_bytes, gpu.total_bytes, rel_tol=0.1)
        if alike or str(name).startswith("MIG-"):
            return handle, memory
    return None


def _nvml_handles(pynvml: ModuleType, gpu: GpuFacts) -> Iterator[tuple[Callable[[str | int], object], str | int]]:
    """Ways to find it, the safest first: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER change what an index means."""
    for uuid in gpu.uuids:
        yield pynvml.nvmlDeviceGetHandleByUUID, uuid
    if gpu.pci_bus_id:
        yield pynvml.nvmlDeviceGetHandleByPciBusId, gpu.pci_bus_id
    if gpu.nvml_index is not None:
        yield pynvml.nvmlDeviceGetHandleByIndex, gpu.nvml_index


def _memory_of(pynvml: ModuleType, handle: object) -> MemoryInfo:
    newer = or_none(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2))
    if newer is not None:
        return MemoryInfo(newer.total, newer.free, "nvml", newer.used)
    older = pynvml.nvmlDeviceGetMemoryInfo(handle)  # before driver 510; its `used` includes the driver's share
    return MemoryInfo(older.total, older.free, "nvml")
