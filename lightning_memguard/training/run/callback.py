"""MemGuard: Lightning's hooks in order; the arithmetic is elsewhere."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning_memguard.core.capture.predict import Prediction
from lightning_memguard.core.capture.recorder import gradients_of, part_bytes, states_of
from lightning_memguard.core.decision.decision import Decision, check_settings
from lightning_memguard.core.decision.record import EpochRecord, Measured
from lightning_memguard.core.device.malloc import KEPT_FREED_RATIO, return_freed_memory
from lightning_memguard.core.device.meter import PeakMeter
from lightning_memguard.core.device.recording import ActualSnapshot
from lightning_memguard.core.replay.snapshot import save_snapshot
from lightning_memguard.errors import MemGuardError
from lightning_memguard.report.failure import announcement, note
from lightning_memguard.report.loggers import Boards
from lightning_memguard.report.table import last_line, print_decision, why
from lightning_memguard.training.adapter.callbacks import schedules_accumulation
from lightning_memguard.training.adapter.program import logging_step
from lightning_memguard.training.adapter.ranks import tried
from lightning_memguard.training.adapter.run_facts import read_run_facts
from lightning_memguard.training.data.rewrite import rewrite_loaders, set_batch_size
from lightning_memguard.training.run import batch_monitor, resume
from lightning_memguard.training.run.run_report import Page, boards_of, page_of
from lightning_memguard.training.run.tune import Tuning, Wishes, looked_again, tune
from lightning_memguard.units import KIB, format_bytes, parse_bytes

T = TypeVar("T")

_STEPS_TO_LOOK_AT = 4  # optimizers stepped in turn each have a step of their own
# Called at every batch, and of no use to us: Lightning skips a hook that is not callable, its context manager included,
# which takes longer than all we do at a batch.
_IDLE = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_train_batch_end")


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
        decision: the batch size and why, once a run has been set up; else None.
        records: predicted beside measured, one for each epoch of the last fit, or one for the last evaluation.

    Raises:
        MemGuardError: an argument is out of its range; or, at setup, the Trainer has two MemGuards.
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
        if nbytes is not None and nbytes < KIB:
            raise MemGuardError(f"budget={budget!r} is {nbytes} bytes, which no training fits; is '{budget}MiB' meant?")
        self._wishes = Wishes(
            mode, nbytes, margin, min_batch_size, max_batch_size, multiple_of, keep_effective_batch_size
        )
        self.records: list[EpochRecord] = []
        self._tuning: Tuning | None = None
        self._told = True
        self._sized = False
        self._meter: PeakMeter | None = None
        self._undo: list[Callable[[], None]] = []
        self._gradient_bytes: list[int] = []
        self._watches: dict[str, batch_monitor.BatchWatch] = {}
        self._page: Page | None = None
        self._boards: Boards | None = None
        self._snapshot: Path | None = None
        self._recording: ActualSnapshot | None = None

    @property
    def decision(self) -> Decision | None:
        """The batch size and why; None before the first run was set up."""
        return self._tuning.decision if self._tuning else None

    def save_snapshot(self, path: str | os.PathLike[str]) -> Path:
        """Write the predicted step as a PyTorch memory snapshot; on CUDA, the actual one of the same steps next to it.

        It opens in https://pytorch.org/memory_viz and with ``python -m torch.cuda._memory_viz``. Called before the
        first run, it is written when that starts. The actual snapshot can only be recorded while a run trains: of its
        first two optimizer steps, or of the next two where this is called from a hook.

        Args:
            path: the file to write, usually ``*.pickle``; an existing one is replaced. The actual snapshot lies beside
                it, its name ending in ``_actual``.

        Returns:
            The path.

        Raises:
            MemGuardError: the file cannot be written, or the guard had stepped aside.
        """
        tuning = self._tuning
        if tuning is None or self._meter is not None:
            self._snapshot = Path(path)
        if tuning is None or tuning.ranks.rank:
            return Path(path)
        if tuning.look is None:
            raise MemGuardError(f"There is no predicted step to write down: {tuning.decision.reason}.")
        return save_snapshot(tuning.look.trace_at(tuning.decision.batch_size), tuning.look.prediction.settings, path)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Predict and choose, before the model reaches its device."""
        guards = sum(isinstance(callback, MemGuard) for callback in trainer.callbacks)
        if guards > 1:
            raise MemGuardError(f"The Trainer has {guards} MemGuards, which would undo each other's work: keep one.")
        effective = self._wishes.keep_effective_batch_size if self._wishes.mode == "tune" else None
        if stage == "fit" and effective and schedules_accumulation(trainer):
            raise MemGuardError(
                f"keep_effective_batch_size={effective} and a GradientAccumulationScheduler would each set the "
                "accumulation: remove one."
            )
        if stage not in ("fit", "validate", "test", "predict"):
            return
        self._close()
        self._skip(*_IDLE)
        self.records = []
        self._meter = PeakMeter(trainer.strategy.root_device)
        self._told = self._sized = False
        self._tuning = tune(trainer, pl_module, self._wishes, stage)  # type: ignore[arg-type]
        self._apply(trainer, pl_module)
        if stage != "fit":
            self._tell(trainer)

    def _skip(self, *hooks: str) -> None:
        """Have Lightning pass over these hooks until the run is over, unless a subclass has its own."""
        for hook in hooks:
            if getattr(type(self), hook) in (getattr(base, hook) for base in (MemGuard, *MemGuard.__bases__)):
                self.__dict__[hook] = None

    def _apply(self, trainer: Any, pl_module: Any) -> None:
        """Have the run follow the decision; its loaders are made later, and may be made several times."""
        tuning = self._tuning
        assert tuning is not None
        decision, look = tuning.decision, tuning.look
        if look is None or self._wishes.mode != "tune":
            return
        if look.request.free_to_choose:
            size = functools.partial(self._size_of_the_run, trainer, pl_module)
            facts = read_run_facts(trainer)
            self._undo.append(rewrite_loaders(trainer, facts, tuning.role, size))
            if look.validation is not None and not look.validation.fixed_because:
                self._undo.append(rewrite_loaders(trainer, facts, "val", self._size_of_validation))
        if decision.would_overrun(KEPT_FREED_RATIO):
            self._undo.append(return_freed_memory(trainer.strategy.root_device))
        self._follow(trainer, pl_module)

    def _follow(self, trainer: Any, pl_module: Any) -> None:
        """Set what schedules and loggers read."""
        decision = self.decision
        assert decision is not None
        if decision.outcome == "tuned" or self._sized:
            set_batch_size(pl_module, trainer.datamodule, decision.batch_size)
            self._sized = True
        fit = self._tuning is not None and self._tuning.role == "train"
        if fit and decision.accumulate_grad_batches != trainer.accumulate_grad_batches:
            trainer.accumulate_grad_batches = decision.accumulate_grad_batches

    def _size_of_the_run(self, trainer: Any, pl_module: Any) -> int:
        """Asked for when the loaders are made: by then the other callbacks hold what they will hold."""
        tuning = self._tuning
        assert tuning is not None
        if tuning.role == "train":
            self._tuning = looked_again(trainer, pl_module, tuning, self._wishes)
            if self._tuning.decision.batch_size != tuning.decision.batch_size:
                self._follow(trainer, pl_module)
                if trainer.is_global_zero:
                    warnings.warn(why(self._tuning.decision), stacklevel=2)
        return self._tuning.decision.batch_size  # type: ignore[union-attr]

    def _size_of_validation(self) -> int:
        tuning = self._tuning
        assert tuning is not None
        assert tuning.look is not None
        assert tuning.look.validation is not None
        return tuning.decision.validation_batch_size or tuning.look.validation.batch_size

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Write the batch size down, so that a resume can keep it."""
        if self._tuning is not None and self._tuning.role == "train" and self._tuning.look is not None:
            checkpoint[resume.KEY] = resume.saved_state(self._tuning)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Go on at the checkpoint's batch size while it fits; no optimizer and no loader exists yet."""
        tuning = self._tuning
        if tuning is None or tuning.look is None or not tuning.look.request.free_to_choose:
            return
        saved = resume.saved_in(checkpoint, tuning.look.request.batch_size)
        if saved is not None:
            self._tuning = resume.resumed(tuning, saved, self._wishes)
            self._follow(trainer, pl_module)

    def _tell(self, trainer: Any) -> None:
        """Print the table, once a run; all that a checkpoint may change is known then."""
        if not self._told and self.decision is not None and trainer.is_global_zero:
            _tell(self.decision)
        self._told = True

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start measuring, now that the model is on its device."""
        self._tell(trainer)
        self._start(trainer, pl_module)
        wanted = self._snapshot
        if wanted is not None and trainer.is_global_zero:
            self._attempt("snapshot", lambda: self.save_snapshot(wanted))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count what the other callbacks hold by now, where no loader of ours has asked before."""
        tuning = self._tuning
        if tuning is None or tuning.role != "train" or tuning.look is None:
            return
        if self._wishes.mode != "tune" or not tuning.look.request.free_to_choose:
            self._tuning = looked_again(trainer, pl_module, tuning, self._wishes)
            if tuning.decision.fits and not self._tuning.decision.fits and trainer.is_global_zero:
                warnings.warn(why(self._tuning.decision), stacklevel=2)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """The same where only validation (or test, or prediction) runs."""
        if self._tuning is not None and self._tuning.role != "train":
            self._start(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start

    def _start(self, trainer: Any, pl_module: Any) -> None:
        tuning = self._tuning
        if self._meter is None or tuning is None or tuning.look is None or tuning.decision.footprint is None:
            return
        self._show(trainer, pl_module, tuning)  # first: on the CPU, what drawing loads would be measured as training's
        model = {"model": [*pl_module.parameters(), *pl_module.buffers()]}
        self._meter.start(part_bytes(model, trainer.strategy.root_device.type)["model"])
        role = "train" if tuning.role == "train" else "val"
        self._watch(role, tuning.look.prediction, tuning.decision.batch_size)
        if tuning.look.side is not None:
            self._watch("val", tuning.look.side.prediction, tuning.look.side.batch_size)

    def _show(self, trainer: Any, pl_module: Any, tuning: Tuning) -> None:
        """Show what is known before the first step, which may be the last."""
        self._boards = boards_of(trainer)
        if self._boards is not None:
            self._boards.log_setup(tuning.decision, trainer.global_step)
        self._page = self._attempt("report", lambda: page_of(trainer, pl_module, tuning))
        self._write_page()

    def _attempt(self, what: str, work: Callable[[], T]) -> T | None:
        """Do what no training shall fail for."""
        attempt = tried(work)
        if attempt.reason:
            warnings.warn(f"MemGuard's {what} was not written: {attempt.reason}", stacklevel=3)
        return attempt.value

    def _write_page(self) -> Path | None:
        page, decision = self._page, self.decision
        if page is None or decision is None:
            return None
        path = self._attempt("report", lambda: page.write(decision, self.records))
        self._page = page if path else None  # what failed once is not tried again
        return path

    def _watch(self, role: str, prediction: Prediction, batch_size: int) -> None:
        look = self._tuning.look if self._tuning else None
        watching = tried(lambda: batch_monitor.BatchWatch(look, prediction, batch_size)).value if look else None
        if watching is not None:
            self._watches[role] = watching

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Say so when a batch is larger than predicted."""
        if self._snapshot is not None:
            self._record_snapshot(trainer)
        self._see(trainer, "train", batch, batch_idx)

    def _record_snapshot(self, trainer: Any) -> None:
        """Record what the device's allocator does, from this batch on until two optimizer steps are over."""
        if self._recording is None:
            if trainer.strategy.root_device.type == "cuda" and trainer.is_global_zero:
                self._recording = tried(lambda: ActualSnapshot(trainer.strategy.root_device)).value
            self._recorded_from = trainer.global_step
        if self._recording is None:
            self._snapshot = None
        elif trainer.global_step >= self._recorded_from + 2 * len(trainer.optimizers):
            self._end_recording()

    def _end_recording(self) -> None:
        recording, path = self._recording, self._snapshot
        self._recording = self._snapshot = None
        if recording is not None and path is not None:
            self._attempt("snapshot", lambda: recording.save(path.with_name(f"{path.stem}_actual{path.suffix}")))

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """The same where nothing is trained."""
        self._see(trainer, "val", batch, batch_idx)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def _see(self, trainer: Any, role: str, batch: Any, batch_idx: int) -> None:
        watching = self._watches.get(role)
        if watching is None:
            return
        try:
            larger = watching.larger(batch)
        except Exception:  # noqa: BLE001 - a batch that cannot be looked at is trained on all the same
            del self._watches[role]
            return
        if larger is not None and trainer.is_global_zero:
            warnings.warn(announcement(larger, role, batch_idx), stacklevel=2)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Measure each epoch for itself."""
        self._gradient_bytes.clear()
        self.__dict__.pop("on_before_optimizer_step", None)
        if self._meter is not None:
            self._meter.restart()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Look at the gradients while they are there: validation clears them. A few steps will do."""
        if self._meter is not None and len(self._gradient_bytes) < _STEPS_TO_LOOK_AT:
            gradients = {"gradients": gradients_of(trainer.optimizers, pl_module)}
            self._gradient_bytes.append(part_bytes(gradients, trainer.strategy.root_device.type)["gradients"])
        else:
            self._skip("on_before_optimizer_step")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Record and log predicted beside measured."""
        record = self._record(trainer, pl_module)
        if record is not None:
            self.records.append(record)
            self._log_record(trainer, pl_module, record)
            if len(self.records).bit_count() == 1:  # after 1, 2, 4, 8, ... epochs: some are over in no time
                self._write_page()

    def _record(self, trainer: Any, pl_module: Any) -> EpochRecord | None:
        decision = self.decision
        if self._meter is None or decision is None or decision.footprint is None or decision.budget is None:
            return None
        measured, budget = self._measure(trainer, pl_module), decision.budget
        return EpochRecord(
            trainer.current_epoch,
            decision.batch_size,
            decision.footprint,
            measured,
            budget.free_bytes,
            budget.margin_bytes,
        )

    def _measure(self, trainer: Any, pl_module: Any) -> Measured:
        assert self._meter is not None
        parts = {
            "parameters": pl_module.parameters(),
            "buffers": pl_module.buffers(),
            "optimizer_state": states_of(trainer.optimizers),
        }
        seen = part_bytes(parts, trainer.strategy.root_device.type)
        return self._meter.read({**seen, "gradients": max(self._gradient_bytes, default=0)})

    def _log_record(self, trainer: Any, pl_module: Any, record: EpochRecord) -> None:
        metrics = record.as_metrics()
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=logging_step(trainer))
        if self._boards is not None:
            self._boards.log_epoch(record, logging_step(trainer))
        if not trainer.barebones:
            watched = {name: metrics[name] for name in ("memguard/predicted_peak_gib", "memguard/actual_peak_gib")}
            pl_module.log_dict(watched, logger=False, on_step=False, on_epoch=True)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Say how near the prediction came."""
        if self.records and trainer.is_global_zero:
            print(last_line(self.records))  # noqa: T201 - the one line the design asks for
            page = self._write_page()
            if page is not None:
                print(f"MemGuard: all of it in {page}")  # noqa: T201

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """The same where only validation (or test, or prediction) runs."""
        if self._tuning is not None and self._tuning.role != "train":
            record = self._record(trainer, pl_module)
            self.records = [record] if record is not None else []
            self.on_fit_end(trainer, pl_module)

    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Add to an out-of-memory error what was predicted and what would have fit; leave the Trainer as it was."""
        if batch_monitor.ran_out_of_memory(exception):
            text = tried(lambda: self._note(trainer, pl_module)).value
            _add_note(exception, text)
        self._close()

    def _note(self, trainer: Any, pl_module: Any) -> str:
        tuning = self._tuning
        if tuning is None or tuning.look is None or tuning.decision.footprint is None:
            reason = f": {tuning.decision.reason}" if tuning else ""
            return f"MemGuard had made no prediction{reason}."
        role = "val" if trainer.evaluating or trainer.predicting or trainer.validating else "train"
        watching = self._watches.get(role) or next(iter(self._watches.values()), None)
        watching = watching or batch_monitor.BatchWatch(tuning.look, tuning.look.prediction, tuning.decision.batch_size)
        measured = tried(lambda: self._measure(trainer, pl_module)).value
        device = trainer.strategy.root_device
        return note(batch_monitor.failure(watching, tuning.decision.footprint, device, measured))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the Trainer as it was."""
        self._close()
        self._snapshot = None

    def _close(self) -> None:
        if self._recording is not None:
            self._end_recording()
        self._page = self._boards = None
        if self._meter is not None:
            self._meter.close()
        for undo in reversed(self._undo):
            undo()
        self._meter = None
        self._undo.clear()
        self._watches.clear()
        for hook in (*_IDLE, "on_before_optimizer_step"):
            self.__dict__.pop(hook, None)


def _add_note(exception: BaseException, text: str | None) -> None:
    if text and sys.version_info >= (3, 11):
        exception.add_note(text)
    elif text:
        warnings.warn(text, stacklevel=3)


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
