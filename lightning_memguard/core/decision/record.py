"""Predicted + measured -> EpochRecord: how close the prediction was, once an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.units import GIB, MIB

TENSORS, PROCESS = "tensors", "peak resident memory"
"""Sources on the CPU: what PyTorch's allocator counts, and what the system counts of the process."""

TRAINING, VALIDATION = "a training step", "a validation step"
AFTER = AFTER_VALIDATION, AFTER_EPOCH = "hooks at the end of validation", "hooks at the end of an epoch"
"""Work whose tensors are counted: `Measured.where`."""

_OBJECTS_BYTES = 4 * MIB  # on the CPU, as in `core.device.process`


@dataclass(frozen=True)
class Measured:
    """Memory that the training took according to the device itself, in bytes.

    ``peak_bytes`` is the counter that `Footprint.peak_device_bytes` predicts; ``source`` names the counter: on a GPU
    the device's, or if context and libraries cannot be seen, PyTorch's allocator's (`is_reserved`); on the CPU the
    tensors of some steps, counted by PyTorch's allocator. ``process_bytes`` is on the CPU
    the peak of the whole process, whose heap, objects and libraries take more; None if ``peak_bytes`` is that.
    ``where`` names the work that had the peak, if that is known. ``parts`` holds the parts whose true size is readable
    (parameters, buffers, gradients, optimizer state), each from the real tensors.
    ``peak_allocated_bytes`` and ``peak_reserved_bytes`` are the caching allocator's since the run began, if the device
    has one and the counter shows it: one that stands higher, from earlier work of the process, is not reset. So are
    ``alloc_retries`` (how often it released its cache to make room) and ``ooms`` (requests that failed even so).
    ``step_seconds`` is the mean time of an optimizer step, without the first of the epoch; None if there were too few.
    ``host_bytes`` are those of the host since the first step, with worker processes and what is in shared memory;
    None on the CPU, and if nothing of the kind was predicted.
    """

    peak_bytes: int
    source: str
    parts: Mapping[str, int] = field(default_factory=dict)
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None
    host_bytes: int | None = None
    step_seconds: float | None = None
    process_bytes: int | None = None
    where: str = ""

    @property
    def taken_bytes(self) -> int:
        """Bytes that a budget must hold: those of the process, if they were measured as well."""
        return max(self.peak_bytes, self.process_bytes or 0)

    @property
    def is_reserved(self) -> bool:
        """Whether the peak is what PyTorch's allocator reserved; the device's context and libraries come on top."""
        return self.peak_bytes == self.peak_reserved_bytes

    def on_device(self, predicted: Footprint) -> int:
        """Bytes that a budget must hold, with the predicted context and libraries if these were not seen."""
        return self.taken_bytes + (predicted.outside_bytes if self.is_reserved else 0)

    def of_process(self) -> Measured:
        """The measurement with the peak of the process as its peak: a checkpoint's buffer is not a tensor."""
        if self.process_bytes is None:
            return self
        return replace(self, peak_bytes=self.process_bytes, source=PROCESS, process_bytes=None, where="")


@dataclass(frozen=True)
class EpochRecord:
    """Predicted and measured, for one epoch.

    ``margin_bytes`` of the budget were to be kept free. ``offloaded`` steps kept saved
    activations on the host.
    ``loader_batch_sizes`` are those of each loader, if there are several. ``predicted_host_bytes`` is `HostUse.parts`
    together. ``expected_bytes`` is the range that the epochs before this one leave for the peak of the device; None for
    the first, and on the CPU.
    """

    epoch: int
    batch_size: int
    predicted: Footprint
    measured: Measured
    budget_bytes: int
    margin_bytes: int = 0
    offloaded: int = 0
    loader_batch_sizes: tuple[int, ...] = ()
    predicted_host_bytes: int = 0
    expected_bytes: tuple[int, int] | None = None

    def with_what_followed(self, measured: Measured) -> EpochRecord:
        """Return the record with the peaks of what followed the epoch, where they are higher."""
        known = self.measured
        measured = measured if known.process_bytes is not None else measured.of_process()
        if _order(measured) > _order(known):
            figures = "peak_bytes", "source", "where", "parts", "peak_allocated_bytes", "peak_reserved_bytes"
            known = replace(known, **{name: getattr(measured, name) for name in figures})
        process = max(known.process_bytes or 0, measured.process_bytes or 0) or None
        host = max(known.host_bytes or 0, measured.host_bytes or 0) if known.host_bytes is not None else None
        return replace(self, measured=replace(known, process_bytes=process, host_bytes=host))

    @property
    def compared(self) -> Footprint:
        """The prediction of what was measured: without context and libraries if these were not seen."""
        return self.predicted.reserved_alone() if self.measured.is_reserved else self.predicted

    @property
    def has_error(self) -> bool:
        """Whether the two peaks compare: one was measured, a whole step was predicted, and it is not too small.

        If the process was measured in place of its tensors, up to 4 to some 12 MiB are outside of these
        (`process_bytes`), and each worker has pages of its own. If that is more than a tenth of the predicted peak, an
        error of -80 % would compare tensors with Python's objects and threads.
        """
        predicted, outside = self.predicted, self.predicted.parts.get("workers", 0)
        if self.measured.process_bytes is None:
            outside += max(_OBJECTS_BYTES, predicted.high.outside_bytes if predicted.high else 0)
        is_small = predicted.device == "cpu" and outside > 0.1 * predicted.peak_device_bytes
        return bool(self.measured.peak_bytes) and not predicted.is_partial and not is_small

    @property
    def error_ratio(self) -> float:
        """``predicted / measured - 1``; positive when the prediction was too high. NaN without `has_error`.

        Both are totals on the device, or both are what PyTorch's allocator reserved (`Measured.is_reserved`).
        """
        return self.compared.peak_device_bytes / self.measured.peak_bytes - 1 if self.has_error else float("nan")

    @property
    def headroom_bytes(self) -> int:
        """Bytes of the budget that the measured peak left, margin included; negative if it went over."""
        return self.budget_bytes - self.measured.on_device(self.predicted)

    def as_metrics(self) -> dict[str, float]:
        """The values to log, by their public names (unit in the key).

        Bounds are there only if the prediction has some, the error only with `has_error`. ``stacked`` is each part on
        top of those below it, for charts that can draw lines and no areas.
        """
        predicted = self.compared
        metrics = {
            "memguard/predicted_peak_gib": predicted.peak_device_bytes / GIB,
            "memguard/actual_peak_gib": self.measured.peak_bytes / GIB,
            "memguard/headroom_gib": self.headroom_bytes / GIB,
            "memguard/batch_size": float(self.batch_size),
            "memguard/limit_gib": self.budget_bytes / GIB,
            "memguard/usable_gib": (self.budget_bytes - self.margin_bytes) / GIB,
            "memguard/offloaded_steps": float(self.offloaded),
        }
        if self.has_error:
            metrics["memguard/error_pct"] = 100 * self.error_ratio
        if self.measured.process_bytes is not None:
            metrics["memguard/process_peak_gib"] = self.measured.process_bytes / GIB
        if self.measured.host_bytes is not None:
            metrics["memguard/host_predicted_gib"] = self.predicted_host_bytes / GIB
            metrics["memguard/host_actual_gib"] = self.measured.host_bytes / GIB
        if self.measured.step_seconds is not None:
            metrics["memguard/step_seconds"] = self.measured.step_seconds
            if predicted.step_seconds:
                metrics["memguard/predicted_step_seconds"] = predicted.step_seconds.likely
        bounds = predicted.low and predicted.high and (predicted.low.device_bytes, predicted.high.device_bytes)
        for name, nbytes in zip(("low", "high"), self.expected_bytes or bounds or (), strict=False):
            metrics[f"memguard/predicted_{name}_gib"] = nbytes / GIB
        if self.measured.alloc_retries is not None:
            metrics["memguard/alloc_retries"] = float(self.measured.alloc_retries)
        metrics |= {f"memguard/parts/{part}_gib": nbytes / GIB for part, nbytes in predicted.parts.items()}
        present = {part: nbytes for part, nbytes in predicted.parts.items() if nbytes}
        heights = accumulate(present.values())
        return metrics | {
            f"memguard/stacked/{part}_gib": height / GIB for part, height in zip(present, heights, strict=True)
        }


def _order(measured: Measured) -> tuple[int, int]:
    """Sort key of peaks: of two with the same reserved bytes, the one whose context was seen is higher."""
    return measured.peak_reserved_bytes or measured.peak_bytes, measured.peak_bytes
