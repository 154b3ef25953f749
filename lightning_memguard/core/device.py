"""Ask the device: what a training may take of it (-> Budget), and what it took (-> Measured).

Reason to change: a driver, an operating system or PyTorch answers in another way. Every source may fail to answer; then
the next one is asked, and ``source`` names the one that spoke.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import psutil
import torch

from lightning_memguard.core.decision import Budget
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.pretend import can_pretend
from lightning_memguard.core.record import Measured
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import GIB, format_bytes

_P = ParamSpec("_P")
_T = TypeVar("_T")

_LARGEST_CONTEXT_BYTES = 2 * GIB
"""More than this outside PyTorch's allocator is not one process's context and libraries (107 to 1343 MB were seen)."""

_UNMEASURED_CONTEXT_BYTES = 555_000_000
"""A context that cannot be measured: the largest that was seen with CUDA's lazy loading (11.7 and newer)."""

_NO_LIMIT_BYTES = 1 << 60
"""Control groups v1 spell "no limit" as the largest multiple of a page below 2**63."""

_SAMPLING_SECONDS = 0.01


@dataclass(frozen=True)
class Room:
    """What one source says of a device, in bytes.

    ``used_bytes`` is what processes hold, without the driver's own share; None where the source does not say.
    """

    total_bytes: int
    free_bytes: int
    source: str
    used_bytes: int | None = None


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
    name = _or_none(lambda: torch.get_device_module(device).get_device_name(device))
    return f"{name} ({_or_none(_indexed, device) or device})" if name else str(device)


def gpu_of(device: torch.device) -> Gpu | None:
    """What PyTorch says of the CUDA GPU behind ``device``; None for any other device, AMD's too.

    None as well on a torch too old for it to be pretended: its own engine then runs the fake step, without our rules.
    """
    if device.type != "cuda" or torch.version.hip is not None or not can_pretend():
        return None
    facts = torch.cuda.get_device_properties(device)
    return Gpu(facts.name, facts.total_memory, (facts.major, facts.minor), facts.multi_processor_count)


def context_bytes(device: torch.device) -> int:
    """Measure what this process takes on ``device`` outside PyTorch's allocator: CUDA's context and libraries.

    Opens the context where it is not up yet, and sees what that took. Read the budget and open a `PeakMeter` before.
    """
    if device.type != "cuda":
        return 0
    before = _or_none(_before_context, device)
    _or_none(torch.cuda.synchronize, device)  # the cheapest call that opens a context; it allocates nothing
    return _context_now(before, _or_none(_nvml_room_of, device), _reserved_bytes(device))


def _too_large(budget: int, room: Room, name: str) -> str:
    return (
        f"budget={format_bytes(budget)} was asked for, and {name} has {format_bytes(room.free_bytes)} of "
        f"{format_bytes(room.total_bytes)} free ({room.source}). The budget stays as given, and the training may run "
        f"out of memory: lower `budget`, free memory on the device, or leave `budget` out."
    )


def _room(device: torch.device, held_bytes: int) -> Room | None:
    """What the process may take in all, from the first source that answers."""
    if device.type == "cpu":
        rooms = (_or_none(host_room), _or_none(cgroup_room), _or_none(rlimit_room))
        return _with_own(_smallest(rooms), held_bytes)
    if device.type == "mps":
        return _with_own(_or_none(_mps_room), held_bytes)
    if device.type == "cuda":
        return _or_none(_cuda_room, device, held_bytes)
    return _with_own(_or_none(_torch_room, device), _own_bytes(device, held_bytes))


def _smallest(rooms: tuple[Room | None, ...]) -> Room | None:
    return min((room for room in rooms if room), key=lambda room: room.free_bytes, default=None)


def _with_own(room: Room | None, own_bytes: int) -> Room | None:
    """Count what is the training's already as free for it."""
    return room and replace(room, free_bytes=max(0, min(room.free_bytes + own_bytes, room.total_bytes)))


# A GPU's memory


def _cuda_room(device: torch.device, held_bytes: int) -> Room | None:
    gpu = _gpu_facts_of(device)
    if gpu.integrated:
        # NVML answers NotSupported on GB10 and Jetson, and mem_get_info says MemFree, which leaves out the page cache.
        room = host_room()
    else:
        room = nvml_room(gpu) or _or_none(_torch_room, device) or _host_room_within(gpu)
    # Asked after the sources: mem_get_info opens the context, and what it says is without it.
    context = _context_now(None, room, _reserved_bytes(device)) if _context_is_up(device) else 0
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
    allocated = _or_none(lambda: torch.get_device_module(device).memory_allocated(device)) or 0
    return _reserved_bytes(device) - allocated + min(held_bytes, allocated)


def _reserved_bytes(device: torch.device) -> int:
    return _or_none(lambda: torch.get_device_module(device).memory_reserved(device)) or 0


def _capped(device: torch.device, room: Room | None, held_bytes: int) -> Room | None:
    """Keep to torch.cuda.set_per_process_memory_fraction: the allocator refuses to go past it."""
    fraction = _or_none(torch.cuda.get_per_process_memory_fraction, device)
    if room is None or fraction is None or fraction >= 1:
        return room
    others = max(0, torch.cuda.memory_allocated(device) - held_bytes)
    return replace(room, free_bytes=max(0, min(room.free_bytes, int(fraction * room.total_bytes) - others)))


def _context_is_up(device: torch.device) -> bool:
    if not torch.cuda.is_initialized():
        return False
    # Private in torch 2.9 to 2.13 (torch/csrc/cuda/Module.cpp); without it, the context of a torch in use is likely up.
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return ask is None or bool(ask(_indexed(device).index))


def _before_context(device: torch.device) -> Room | None:
    return None if _context_is_up(device) else _nvml_room_of(device)


def _context_now(before: Room | None, now: Room | None, reserved_bytes: int) -> int:
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


def _gpu_facts_of(device: torch.device) -> GpuFacts:
    index = _indexed(device).index
    return gpu_facts(index, torch.cuda.get_device_properties(index), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _nvml_room_of(device: torch.device) -> Room | None:
    return nvml_room(_gpu_facts_of(device))


def nvml_room(gpu: GpuFacts) -> Room | None:
    """Read a GPU's memory from NVML; None where NVML does not answer, or not for this GPU."""
    return None if torch.version.hip else _or_none(_ask_nvml, gpu)


def _ask_nvml(gpu: GpuFacts) -> Room | None:
    import pynvml

    pynvml.nvmlInit()
    try:
        for find, name in _nvml_handles(pynvml, gpu):
            room = _or_none(_nvml_memory, pynvml, find, name)
            if room is not None and _is_of(room, name, gpu):
                return _as_cuda_sees_it(room, gpu)
        return None
    finally:
        _or_none(pynvml.nvmlShutdown)


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
    newer = _or_none(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2))
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


# The host's memory


def host_room() -> Room:
    """Read what the host has available: free, or in use for what it can drop."""
    memory = psutil.virtual_memory()
    return Room(memory.total, memory.available, "host")


def cgroup_room(root: Path = Path("/")) -> Room | None:
    """Read what the process's control group leaves it: the least of its groups up to the top; None without a limit.

    Args:
        root: where ``proc`` and the mount points lie.
    """
    return _smallest(tuple(_group_room(folder) for folder in _group_folders(root)))


def _group_folders(root: Path) -> Iterator[Path]:
    """The folders of the process's memory groups, v1 and v2, each with those above it."""
    lines = (root / "proc/self/cgroup").read_text().splitlines()
    groups = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    for mounted, mount_point, names in _group_mounts(root):
        path = next((path for key, path in groups.items() if names in key.split(",")), None)
        if path is not None:
            top = root / mount_point.lstrip("/")
            folder = top / _below(path, mounted)
            yield from (at for at in (folder, *folder.parents) if at.is_relative_to(top))


def _group_mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """For each hierarchy that holds memory groups: the part of it that is mounted, where, and its name in /proc."""
    # man 5 proc: id parent major:minor root mount-point options [tags ...] - type source super-options
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        mounted, mount_point = left.split()[3:5]
        kind, *_, options = right.split()
        if kind == "cgroup2":
            yield mounted, mount_point, ""
        elif kind == "cgroup" and "memory" in options.split(","):
            yield mounted, mount_point, "memory"


def _below(path: str, mounted: str) -> str:
    """Where ``path`` lies under what is mounted; a container's own group may be all that is mounted."""
    prefix = mounted.rstrip("/")
    inside = path == mounted or path.startswith(f"{prefix}/")
    return path[len(prefix) :].lstrip("/") if inside and ".." not in path.split("/") else ""


def _group_room(folder: Path) -> Room | None:
    """One group's limit less its use. Page cache that nobody used lately is dropped at need, so it is no use."""
    # Above memory.high a group is slowed down until it hardly runs; above the others it is killed.
    limit = _least_number(folder, "memory.max", "memory.high", "memory.limit_in_bytes")
    use = _least_number(folder, "memory.current", "memory.usage_in_bytes")
    if limit is None or use is None or limit >= _NO_LIMIT_BYTES:
        return None
    stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    # v1 sums up the groups below under `total_...`; v2 does so everywhere (kernel.org: cgroup-v1/memory.rst 5.2).
    droppable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return Room(limit, max(0, limit - max(0, use - droppable)), "cgroup")


def _least_number(folder: Path, *names: str) -> int | None:
    """The least of the numbers in these files; a file may be missing, or say ``max``."""
    texts = (_text(folder / name).strip() for name in names)
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def rlimit_room(process: Path = Path("/proc/self")) -> Room | None:
    """Read what the process's own limits leave it (``ulimit -v``, ``ulimit -d``); None without a limit, or off Linux.

    Args:
        process: the process's folder in ``/proc``.
    """
    import resource

    status = _status_bytes(process)
    uses = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))  # man 2 setrlimit
    rooms = ((resource.getrlimit(kind)[0], status[used]) for kind, used in uses)
    return _smallest(
        tuple(Room(limit, max(0, limit - used), "rlimit") for limit, used in rooms if limit != resource.RLIM_INFINITY)
    )


def _status_bytes(process: Path) -> dict[str, int]:
    """The sizes in a process's status file, in bytes."""
    fields = (line.split() for line in (process / "status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if words[2:] == ["kB"]}


# What was taken


class PeakMeter:
    """Measures the most memory that a training takes on its device, epoch by epoch.

    On a GPU that is the allocator's own peak, and what NVML sees beside it. On the CPU it is how far the process's
    resident memory rose above what it was at `start`, and the model, which was there before. It never raises into a
    training: what cannot be read is 0 bytes with the source ``"unknown"``.

    Open it before the process has its context on the GPU, so that it can tell the context from other processes.

    Args:
        device: where the training runs.

    >>> meter = PeakMeter(torch.device("cpu"))
    >>> meter.start(already_held_bytes=0)
    >>> meter.restart()
    >>> meter.read({}).peak_bytes >= 0
    True
    >>> meter.close()
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = _or_none(_before_context, device) if device.type == "cuda" else None
        self._gauge: _Gauge | None = None

    def start(self, already_held_bytes: int) -> None:
        """Take the baseline.

        Args:
            already_held_bytes: bytes of the model (parameters and buffers) that lie on the device now.
        """
        self.close()
        self._gauge = _or_none(_open_gauge, self._device, already_held_bytes, self._before)

    def restart(self) -> None:
        """Forget the peak so far: an epoch begins."""
        if self._gauge is not None and not _or_none(self._gauge.restart):
            self.close()

    def read(self, parts: Mapping[str, int]) -> Measured:
        """Read the peak since the last `restart`.

        Args:
            parts: bytes of the parts whose true size the caller can read, such as parameters.
        """
        measured = _or_none(self._gauge.read) if self._gauge is not None else None
        return replace(measured or Measured(0, "unknown"), parts=dict(parts))

    def close(self) -> None:
        """Stop measuring; `start` begins anew."""
        if self._gauge is not None:
            self._gauge.close()
        self._gauge = None


class _Gauge(Protocol):
    def restart(self) -> bool: ...
    def read(self) -> Measured: ...
    def close(self) -> None: ...


def _open_gauge(device: torch.device, held_bytes: int, before: Room | None) -> _Gauge:
    if device.type == "cpu":
        _give_back_freed_memory()
        return _or_none(_HighWaterGauge, held_bytes) or _SampledGauge(
            _resident_bytes, held_bytes - _resident_bytes(), "resident memory"
        )
    if device.type == "mps":
        return _SampledGauge(torch.mps.driver_allocated_memory, 0, "torch.mps driver memory")
    return _AllocatorGauge(device, before)


class _AllocatorGauge:
    """PyTorch keeps its allocator's peaks; what lies outside it on the GPU only grows, so the last value will do."""

    def __init__(self, device: torch.device, before: Room | None) -> None:
        self._device, self._before = device, before
        self._torch = torch.get_device_module(device)
        self.restart()

    def restart(self) -> bool:
        self._torch.reset_peak_memory_stats(self._device)
        return True

    def read(self) -> Measured:
        allocated = self._torch.max_memory_allocated(self._device)
        reserved = self._torch.max_memory_reserved(self._device)
        now = _or_none(_nvml_room_of, self._device) if self._device.type == "cuda" else None
        outside, seen_by = outside_allocator_bytes(self._before, now, self._torch.memory_reserved(self._device))
        source = f"torch.{self._device.type} + {seen_by}" if outside else f"torch.{self._device.type}, {seen_by}"
        return Measured(reserved + outside, source, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved)

    def close(self) -> None:
        pass


class _HighWaterGauge:
    """The kernel's own mark of a process's peak resident memory, which the process may reset (Linux).

    Pages of mapped files are left out: PyTorch's libraries come in page by page while a first step runs (15 to 22 MiB),
    and the kernel drops such pages at need. There is no peak of theirs to read; it is taken that they stay once mapped.
    """

    def __init__(self, held_bytes: int, process: Path = Path("/proc/self")) -> None:
        self._held_bytes, self._process = held_bytes, process
        self._at_start = _status_bytes(process)
        self.restart()
        self.read()  # a kernel that lacks a field shall say so now

    def restart(self) -> bool:
        (self._process / "clear_refs").write_text("5")  # man 5 proc: sets VmHWM back to VmRSS
        return True

    def read(self) -> Measured:
        then, now = self._at_start, _status_bytes(self._process)
        mapped = max(0, now.get("RssFile", 0) - then.get("RssFile", 0))
        grown = max(0, now["VmHWM"] - then["VmRSS"] - mapped)
        return Measured(self._held_bytes + grown, "peak resident memory (VmHWM)")

    def close(self) -> None:
        pass


class _SampledGauge:
    """A counter without a peak of its own, read every 10 ms by a thread; shorter peaks can slip by, so it says so."""

    def __init__(self, ask: Callable[[], int], offset_bytes: int, counter: str) -> None:
        self._ask, self._offset_bytes, self._counter = ask, offset_bytes, counter
        self._peak_bytes = ask()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memguard-peak-meter", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._closed.wait(_SAMPLING_SECONDS):
            self._peak_bytes = max(self._peak_bytes, _or_none(self._ask) or 0)

    def restart(self) -> bool:
        self._peak_bytes = self._ask()
        return True

    def read(self) -> Measured:
        peak = max(self._peak_bytes, self._ask())
        return Measured(max(0, peak + self._offset_bytes), f"{self._counter}, sampled every 10 ms")

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=1)


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _give_back_freed_memory() -> None:
    """Have glibc return what the process has freed, so that the baseline holds nothing a training could quietly reuse.

    Where 660 MiB of small tensors had come and gone, a training with 400 MiB of tensors measured 160 MiB without this
    call and 505 with it. It took 40 to 120 ms there, and takes none in a process that has freed little. Where the C
    library is another (musl, macOS) or another allocator stands in for it, nothing happens.
    """
    if sys.platform == "linux":
        _or_none(lambda: ctypes.CDLL(None).malloc_trim(0))


class ActualSnapshot:
    """Records what the caching allocator of a CUDA device does from now on, with the stack of each request.

    Whoever records already goes on undisturbed; then only the file is written. Private functions of
    ``torch.cuda.memory``, checked on torch 2.11 to 2.15; `tests/core/test_device.py` says when they move.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded_by_others = torch._C._cuda_isHistoryEnabled()
        if not self._recorded_by_others:
            torch.cuda.memory._record_memory_history("all", stacks="python", device=device)

    def save(self, path: Path) -> Path:
        """Stop recording, and write all of it.

        Args:
            path: the file to write.
        """
        try:
            torch.cuda.memory._dump_snapshot(str(path))
        finally:
            if not self._recorded_by_others:
                torch.cuda.memory._record_memory_history(None, device=self._device)
        return path


# Keeping to it

KEPT_FREED_RATIO = 1.75
"""How far freed blocks that glibc keeps were seen to raise a CPU training above its tensors (see below)."""

_KEPT_FREED_BYTES = 1 << 20
_GLIBC_TRIM, _GLIBC_MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h, see man 3 mallopt
_GLIBC_LARGEST_BYTES = 32 << 20  # where glibc's own rule lets the threshold rise to (DEFAULT_MMAP_THRESHOLD_MAX)


def return_freed_memory(device: torch.device) -> Callable[[], None]:
    """Have freed host memory go back to the system at once, so that a CPU training takes what its tensors take.

    By its own rule glibc comes to keep freed blocks of up to 32 MiB, and what it keeps is seldom of the size asked for
    next: trainings of 380 MiB of tensors then held 630 to 670 MiB, and 385 to 405 with this (U-Net, GPT, CNN). It costs
    speed, since fresh memory comes in page by page. Does nothing on other devices, other C libraries, or where the
    user has set malloc's thresholds.

    Args:
        device: where the training runs.

    Returns:
        A function that lets glibc keep freed blocks again.
    """
    set_by_user = any("mmap_threshold" in f"{name}={value}".lower() for name, value in os.environ.items())
    if device.type != "cpu" or sys.platform != "linux" or set_by_user:
        return _nothing
    mallopt = _or_none(lambda: ctypes.CDLL(None).mallopt)
    if mallopt is None:
        return _nothing
    mallopt(_GLIBC_MMAP, _KEPT_FREED_BYTES)
    mallopt(_GLIBC_TRIM, 2 * _KEPT_FREED_BYTES)

    def undo() -> None:
        mallopt(_GLIBC_MMAP, _GLIBC_LARGEST_BYTES)
        mallopt(_GLIBC_TRIM, 2 * _GLIBC_LARGEST_BYTES)

    return undo


def _nothing() -> None:
    pass


# Asking


def _or_none(ask: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
    """The answer, or None where there is none: no library, no driver, no permission, not on this device."""
    try:
        return ask(*args, **kwargs)
    except Exception:  # noqa: BLE001 - drivers fail in ways of their own, and none of them may stop a training
        return None


def _indexed(device: torch.device) -> torch.device:
    """The device with its index: ``cuda`` means the current one."""
    if ":" in str(device):
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())
