"""The memory that a training actually took: the peak that the device or the system counts, and PyTorch's snapshot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.decision.record import PROCESS, TENSORS, Measured
from lightning_memguard.core.device.context import memory_before_context, outside_allocator_bytes
from lightning_memguard.core.device.host import MemoryInfo, or_none, status_bytes
from lightning_memguard.core.device.malloc import trim_heap
from lightning_memguard.core.device.nvml import nvml_memory_of
from lightning_memguard.core.device.tensor_counter import TensorCounter

_SAMPLING_SECONDS = 0.01


class PeakMeter:
    """Measures the most memory that a training takes on its ``device``, epoch by epoch.

    On a GPU that is the allocator's own peak, plus what NVML reports outside of it. On the CPU it is the peak of its
    tensors in the steps that are counted (`TensorCounter`), and of the process: how far its resident memory rose above
    its value at `start`, plus the model, which was there before. It never raises into a training: what cannot be read
    is 0 bytes with the source ``"unknown"``.

    Open it before the process has its context on the GPU, so that it can tell the context from other processes.

    >>> meter = PeakMeter(torch.device("cpu"))
    >>> meter.start(already_held_bytes=0)
    >>> meter.restart()
    >>> meter.read({}).peak_bytes >= 0
    True
    >>> meter.close()
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = or_none(memory_before_context, device) if device.type == "cuda" else None
        self._gauge: _Gauge | None = None
        self.tensors: TensorCounter | None = None

    def start(self, already_held_bytes: int) -> None:
        """Measure the baseline; ``already_held_bytes`` of the training are on the device now, the model's above all."""
        self.close()
        self._gauge = or_none(_open_gauge, self._device, already_held_bytes, self._before)
        if self._device.type == "cpu":
            self.tensors = or_none(TensorCounter, already_held_bytes)

    def restart(self) -> None:
        """Forget the peak so far: an epoch begins."""
        if self._gauge is not None and not or_none(self._gauge.restart):
            self.close()
        if self.tensors is not None:
            self.tensors.restart()

    def read(self, parts: Mapping[str, int]) -> Measured:
        """Read the peak since the last `restart`, with the bytes of ``parts`` whose true size the caller can read."""
        measured, tensors = or_none(self._gauge.read) if self._gauge is not None else None, self.tensors
        measured = replace(measured or Measured(0, "unknown"), parts=dict(parts))
        if tensors is not None:
            or_none(tensors.flush)
        if tensors is None or not tensors.peaks:
            return measured
        where, peak = max(tensors.peaks.items(), key=lambda item: item[1])
        return replace(
            measured, peak_bytes=peak, source=TENSORS, process_bytes=measured.peak_bytes or None, where=where
        )

    def close(self) -> None:
        """Stop measuring; `start` begins again."""
        if self._gauge is not None:
            self._gauge.close()
        if self.tensors is not None:
            or_none(self.tensors.close)
        self._gauge = self.tensors = None


def _open_gauge(device: torch.device, held_bytes: int, before: MemoryInfo | None) -> _Gauge:
    if device.type == "cpu":
        trim_heap()
        process = psutil.Process()
        return or_none(_HighWaterGauge, held_bytes) or _SampledGauge(
            lambda: int(process.memory_info().rss), held_bytes - process.memory_info().rss, "resident memory"
        )
    if device.type == "mps":
        return _SampledGauge(torch.mps.driver_allocated_memory, 0, "torch.mps driver memory")
    return _AllocatorGauge(device, before)


class _Gauge:
    """One way to read a peak. ``restart`` returns True: `or_none` makes None of an error."""

    def restart(self) -> bool:
        raise NotImplementedError

    def read(self) -> Measured:
        raise NotImplementedError

    def close(self) -> None:
        pass


class _AllocatorGauge(_Gauge):
    """PyTorch keeps its allocator's peaks; what is outside it on the GPU only grows, so its last value is its peak."""

    def __init__(self, device: torch.device, before: MemoryInfo | None) -> None:
        self._device, self._before = device, before
        self._torch = torch.get_device_module(device)
        self.restart()

    def restart(self) -> bool:
        self._torch.reset_peak_memory_stats(self._device)
        self._counts = self._failures()
        return True

    def _failures(self) -> tuple[int, int]:
        stats = self._torch.memory_stats(self._device)
        return stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0)

    def read(self) -> Measured:
        retries, ooms = (now - before for now, before in zip(self._failures(), self._counts, strict=True))
        allocated = self._torch.max_memory_allocated(self._device)
        reserved = self._torch.max_memory_reserved(self._device)
        now = or_none(nvml_memory_of, self._device) if self._device.type == "cuda" else None
        outside, seen_by = outside_allocator_bytes(self._before, now, self._torch.memory_reserved(self._device))
        source = f"torch.{self._device.type} + {seen_by}" if outside else f"torch.{self._device.type}, {seen_by}"
        return Measured(reserved + outside, source, {}, allocated, reserved, retries, ooms)


class _HighWaterGauge(_Gauge):
    """The kernel's own count of a process's peak resident memory, which the process may reset (Linux).

    Pages of mapped files are left out: PyTorch's libraries come in page by page while a first step runs (15 to 22 MiB),
    and the kernel drops such pages at need. They have no peak to read; we assume that they stay once mapped.
    """

    def __init__(self, held_bytes: int, process: Path = Path("/proc/self")) -> None:
        self._held_bytes, self._process = held_bytes, process
        self._at_start = status_bytes(process)
        self.restart()
        self.read()  # fails now on a kernel that lacks a field

    def restart(self) -> bool:
        (self._process / "clear_refs").write_text("5")  # man 5 proc: sets VmHWM back to VmRSS
        return True

    def read(self) -> Measured:
        then, now = self._at_start, status_bytes(self._process)
        mapped = max(0, now.get("RssFile", 0) - then.get("RssFile", 0))
        grown = max(0, now["VmHWM"] - then["VmRSS"] - mapped)
        return Measured(self._held_bytes + grown, PROCESS)


class _SampledGauge(_Gauge):
    """A counter without a peak of its own, read every 10 ms by a thread: shorter peaks can be missed."""

    def __init__(self, ask: Callable[[], int], offset_bytes: int, counter: str) -> None:
        self._ask, self._offset_bytes, self._counter = ask, offset_bytes, counter
        self._peak_bytes = ask()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memguard-peak-meter", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._closed.wait(_SAMPLING_SECONDS):
            self._peak_bytes = max(self._peak_bytes, or_none(self._ask) or 0)

    def restart(self) -> bool:
        self._peak_bytes = self._ask()
        return True

    def read(self) -> Measured:
        peak = max(self._peak_bytes, self._ask())
        return Measured(max(0, peak + self._offset_bytes), f"{self._counter}, sampled every 10 ms")

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=1)


def held_now(device: torch.device) -> int:
    """Read the bytes that are allocated on a device; on the CPU, the process's resident memory."""
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss)
    return int(torch.get_device_module(device).memory_allocated(device))


def allocated_now(device: torch.device) -> Mapping[str, int]:
    """Return the bytes that are allocated on a CUDA device, by the line that requested them, if that is recorded."""
    if device.type != "cuda" or not port.is_recording():
        return {}
    from lightning_memguard.core.histories.history import allocated_by_line

    return allocated_by_line(port.allocator_state(device), device.index or 0)


class ActualSnapshot:
    """Records what the caching allocator of a CUDA ``device`` does from now on, with the stack of each request.

    A recording that is already running goes on undisturbed; then only the file is written.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded_by_others = port.is_recording()
        if not self._recorded_by_others:
            port.record_history(device)

    def save(self, path: Path) -> Path:
        """Write the recording to the file ``path``, and stop it."""
        try:
            return save_snapshot_now(path)
        finally:
            if not self._recorded_by_others:
                port.record_history(self._device, None)


def save_snapshot_now(path: Path) -> Path:
    """Write what the caching allocator of CUDA holds to a file, and its history if that is being recorded."""
    port.write_allocator_state(str(path))
    return path
