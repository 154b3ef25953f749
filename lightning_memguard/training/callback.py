"""MemGuard: Lightning's hooks in order; the arithmetic is elsewhere."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any, Literal

from lightning_memguard.core.capture import gradients_of, part_bytes, states_of
from lightning_memguard.core.decision import Decision, check_settings
from lightning_memguard.core.device import KEPT_FREED_RATIO, PeakMeter, return_freed_memory
from lightning_memguard.core.record import EpochRecord
from lightning_memguard.errors import MemGuardError
from lightning_memguard.report.table import last_line, print_decision, why
from lightning_memguard.training import loaders
from lightning_memguard.training.step import logging_step
from lightning_memguard.training.tune import Wishes, tune
from lightning_memguard.units import format_bytes, parse_bytes

_STEPS_TO_LOOK_AT = 4  # optimizers stepped in turn each have a step of their own


def _callback_classes() -> tuple[type, ...]:
    """The Callback classes of whichever Lightning is installed: ``lightning``, ``pytorch_lightning`` or both.

    They are unrelated classes; a callback that is both works in both Trainers.
    """
    found: list[type] = []
    failures: list[Exception] = []
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found.append(importlib.import_module(package).Callback)
        except Exception as error:  # noqa: BLE001, PERF203 - not installed, or broken by something it imports
            failures.append(error)
    if not found:
        raise ImportError("Neither `lightning` nor `pytorch-lightning` can be imported; install one.") from failures[0]
    return tuple(found)


class MemGuard(*_callback_classes()):  # type: ignore[misc]
    """Predict the memory of a training step, choose the largest batch size that fits, and log predicted beside actual.

    Args:
        mode: ``"tune"`` chooses the batch size; ``"check"`` predicts, warns where it does not fit, and changes nothing.
        budget: what the training may take on its device: bytes, or text such as ``"24GiB"`` (default: what the device
            has free).
        margin: share of the budget to keep free, in [0, 1).
        min_batch_size: the smallest batch size to choose.
        max_batch_size: the largest batch size to choose.
        multiple_of: choose multiples of this only.
        keep_effective_batch_size: set ``accumulate_grad_batches`` so that batch size x accumulation x ranks comes as
            close to this as it can without passing it.

    Attributes:
        decision: the batch size and why, once a fit has been set up; else None.
        records: predicted beside measured, one for each epoch of the last fit.

    Raises:
        MemGuardError: an argument is out of its range.
        DoesNotFitError: at setup, in mode ``"tune"``, where even ``min_batch_size`` does not fit.

    Example:
        >>> trainer = Trainer(callbacks=[MemGuard()])  # doctest: +SKIP
        >>> trainer.fit(model, train_dataloaders=loader)  # doctest: +SKIP
    """

    def __init__(
        self,
        mode: Literal["tune", "check"] = "tune",
        *,
        budget: int | str | None = None,
        margin: float = 0.05,
        min_batch_size: int = 1,
        max_batch_size: int | None = None,
        multiple_of: int = 1,
        keep_effective_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if mode not in ("tune", "check"):
            raise MemGuardError(f"mode={mode!r} is unknown; choose 'tune' or 'check'.")
        check_settings(margin, min_batch_size, max_batch_size, multiple_of, keep_effective_batch_size)
        nbytes = None if budget is None else parse_bytes(budget)
        self._wishes = Wishes(
            mode, nbytes, margin, min_batch_size, max_batch_size, multiple_of, keep_effective_batch_size
        )
        self.decision: Decision | None = None
        self.records: list[EpochRecord] = []
        self._meter: PeakMeter | None = None
        self._undo: list[Callable[[], None]] = []
        self._gradient_bytes: list[int] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Predict and choose, before the model reaches its device."""
        if stage != "fit":
            return
        self.records = []
        device = trainer.strategy.root_device
        self._meter = PeakMeter(device)
        tuning = tune(trainer, pl_module, self._wishes)
        self.decision = tuning.decision
        if tuning.found is not None and self.decision.outcome == "tuned":
            self._undo.append(loaders.apply(trainer, pl_module, self.decision.batch_size))
        if self._wishes.mode == "tune" and self.decision.would_overrun(KEPT_FREED_RATIO):
            self._undo.append(return_freed_memory(device))
        if self._wishes.keep_effective_batch_size and self.decision.outcome in ("tuned", "kept"):
            trainer.accumulate_grad_batches = self.decision.accumulate_grad_batches
        if trainer.is_global_zero:
            _tell(self.decision)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start measuring, now that the model is on its device."""
        if self._meter is not None and self.decision is not None and self.decision.footprint is not None:
            model = {"model": [*pl_module.parameters(), *pl_module.buffers()]}
            self._meter.start(part_bytes(model, trainer.strategy.root_device.type)["model"])

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Measure each epoch for itself."""
        self._gradient_bytes.clear()
        if self._meter is not None:
            self._meter.restart()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Look at the gradients while they are there: validation clears them. A few steps will do."""
        if self._meter is not None and len(self._gradient_bytes) < _STEPS_TO_LOOK_AT:
            gradients = {"gradients": gradients_of(trainer.optimizers, pl_module)}
            self._gradient_bytes.append(part_bytes(gradients, trainer.strategy.root_device.type)["gradients"])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Record and log predicted beside measured."""
        if (
            self._meter is None
            or self.decision is None
            or self.decision.footprint is None
            or self.decision.budget is None
        ):
            return
        parts = {
            "parameters": pl_module.parameters(),
            "buffers": pl_module.buffers(),
            "optimizer_state": states_of(trainer.optimizers),
        }
        seen = part_bytes(parts, trainer.strategy.root_device.type)
        measured = self._meter.read({**seen, "gradients": max(self._gradient_bytes, default=0)})
        footprint, budget = self.decision.footprint, self.decision.budget
        record = EpochRecord(trainer.current_epoch, self.decision.batch_size, footprint, measured, budget.free_bytes)
        self.records.append(record)
        self._log_record(trainer, pl_module, record)

    def _log_record(self, trainer: Any, pl_module: Any, record: EpochRecord) -> None:
        metrics = record.as_metrics()
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=logging_step(trainer))
        if not trainer.barebones:
            watched = {name: metrics[name] for name in ("memguard/predicted_peak_gib", "memguard/actual_peak_gib")}
            pl_module.log_dict(watched, logger=False, on_step=False, on_epoch=True)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Say how near the prediction came."""
        if self.records and trainer.is_global_zero:
            print(last_line(self.records))  # noqa: T201 - the one line the design asks for

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the Trainer as it was."""
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the Trainer as it was."""
        if stage == "fit":
            self._close()

    def _close(self) -> None:
        if self._meter is not None:
            self._meter.close()
        for undo in reversed(self._undo):
            undo()
        self._meter = None
        self._undo.clear()


def _tell(decision: Decision) -> None:
    """Print the table; warn where the guard could not do what was asked, or the training will not fit."""
    print_decision(decision)
    if decision.footprint is None or decision.budget is None:
        warnings.warn(f"MemGuard changed nothing: {decision.reason}", stacklevel=2)
    elif not decision.fits:
        warnings.warn(
            f"{why(decision)} It is predicted to need {format_bytes(decision.footprint.peak_device_bytes)}; "
            f"{decision.budget.device} offers {format_bytes(decision.budget.usable_bytes)} after the margin "
            f"({decision.budget.source}).",
            stacklevel=2,
        )
    elif decision.reason:
        warnings.warn(" ".join([why(decision), *decision.footprint.notes]), stacklevel=2)
