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
from lightning_memguard.core.device.context import outside_bytes
from lightning_memguard.core.device.host import or_none, status_bytes
from lightning_memguard.core.device.malloc import trim_heap
from lightning_memguard.core.device.nvml import nvml_memory_of
from lightning_memguard.core.device.tensor_counter import TensorCounter

_SAMPLING_SECONDS = 0.01


class PeakMeter:
    """Measures the most memory that a training takes on its ``device``, epoch by epoch.

    On a GPU that is the allocator's own peak since `start`, over all epochs, plus what NVML reports outside of it;
    PyTorch's counters are the user's, and not reset. On the CPU it is the peak of its tensors in the steps that are
    counted (`TensorCounter`), and of the process: how far its resident memory rose above its value at `start`, plus the
    model, which was there before. It never raises into a training: what cannot be read is 0 bytes with the source
    ``"unknown"``.

    >>> meter = PeakMeter(torch.device("cpu"))
    >>> meter.start(already_held_bytes=0)
    >>> meter.restart()
    >>> meter.read({}).peak_bytes >= 0
    True
    >>> meter.close()
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gauge: _Gauge | None = None
        self.tensors: TensorCounter | None = None

    def start(self, already_held_bytes: int) -> None:
        """Measure the baseline; ``already_held_bytes`` of the training are on the device now, the model's above all."""
        self.close()
        self._gauge = or_none(_open_gauge, self._device, already_held_bytes)
        if self._device.type == "cpu":
            self.tensors = or_none(TensorCounter, already_held_bytes)

    def restart(self) -> None:
        """Begin an epoch: forget the peak so far, but for a GPU's."""
        if self._gauge is not None and not or_none(self._gauge.restart):
            self.close()
        if self.tensors is not None:
            self.tensors.restart()

    def read(self, parts: Mapping[str, int]) -> Measured:
        """Read the peak since the last `restart`, on a GPU since `start`; ``parts`` are bytes that the caller read."""
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


def _open_gauge(device: torch.device, held_bytes: int) -> _Gauge:
    if device.type == "cpu":
        trim_heap()
        process = psutil.Process()
        return or_none(_HighWaterGauge, held_bytes) or _SampledGauge(
            lambda: int(process.memory_info().rss), held_bytes - process.memory_info().rss, "resident memory"
        )
    if device.type == "mps":
        return _SampledGauge(torch.mps.driver_allocated_memory, 0, "torch.mps driver memory")
    return _AllocatorGauge(device)


class _Gauge:
    """One way to read a peak. ``restart`` returns True: `or_none` makes None of an error."""

    def restart(self) -> bool:
        raise NotImplementedError

    def read(self) -> Measured:
        raise NotImplementedError

    def close(self) -> None:
        pass


class _AllocatorGauge(_Gauge):
    """PyTorch's counters of its allocator's peaks, which are the user's: they are read, and never reset.

    A peak is the highest since the gauge was opened, over all epochs. A counter that has moved since shows it. If one
    stands at what the process took earlier, that hides what is lower: the allocated peak is then unknown, and the
    reserved one is what is reserved now, as nothing was released meanwhile, or what was seen at most. What is outside
    of the allocator only grows, so its last value is its peak.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch = torch.get_device_module(device)
        stats = self._torch.memory_stats(device)
        self._allocated = _Highest(stats.get("allocated_bytes.all.peak", 0))
        self._reserved = _Highest(stats.get("reserved_bytes.all.peak", 0))
        self.restart()

    def restart(self) -> bool:
        self._counts = self._failures(self._torch.memory_stats(self._device))
        return True

    def _failures(self, stats: Mapping[str, int]) -> tuple[int, int]:
        return stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0)

    def read(self) -> Measured:
        stats = self._torch.memory_stats(self._device)
        retries, ooms = (now - before for now, before in zip(self._failures(stats), self._counts, strict=True))
        allocated = self._allocated.read(stats["allocated_bytes.all.peak"])
        now, peak = stats["reserved_bytes.all.current"], stats["reserved_bytes.all.peak"]
        reserved = self._reserved.read(peak, now) or 0
        outside, source = 0, f"torch.{self._device.type}"
        if self._device.type == "cuda":
            outside, seen_by = outside_bytes(self._device, or_none(nvml_memory_of, self._device))
            source += f" + {seen_by}" if outside else f" reserved, {seen_by}"
        return Measured(reserved + outside, source, {}, allocated, reserved, retries, ooms)


class _Highest:
    """The highest value of one of PyTorch's peaks from now on, even if it is reset."""

    def __init__(self, counter: int) -> None:
        self._hides_below, self._highest = counter, 0

    def read(self, counter: int, now: int = 0) -> int | None:
        """Read the counter, and what is there now, if it is known; None if the counter has not moved."""
        self._highest = max(self._highest, now, 0 if counter == self._hides_below else counter)
        return self._highest or None


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
