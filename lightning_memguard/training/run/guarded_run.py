"""One run under MemGuard, from its setup until it is over: what is open while it runs, and what it records."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch.optim import LBFGS

from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.decision.record import EpochRecord, Measured
from lightning_memguard.core.device.malloc import Trimmer, return_freed_memory
from lightning_memguard.core.device.meter import ActualSnapshot, save_snapshot_now
from lightning_memguard.core.device.out_of_memory import ran_out_of_memory
from lightning_memguard.core.replay.learned import range_after
from lightning_memguard.core.replay.snapshot import save_snapshot
from lightning_memguard.core.trace.kept import MOST_EPOCHS
from lightning_memguard.errors import MemGuardError
from lightning_memguard.report.decision_table import evaluation_text, last_line, setup_text, warning_of
from lightning_memguard.report.failure import announcement, kept_words, note, snapshot_words
from lightning_memguard.report.words import with_stage
from lightning_memguard.training.adapter.callbacks import learning_rates_tried
from lightning_memguard.training.adapter.metrics import forget_logged, log_epoch
from lightning_memguard.training.data.loaders import rewrite_loaders
from lightning_memguard.training.facts.lightning_port import logging_step, set_batch_size
from lightning_memguard.training.facts.ranks import attempt, explains, failed, say, warn
from lightning_memguard.training.facts.run_facts import Stage, takes_steps
from lightning_memguard.training.run.aftermath import held_elsewhere, oom_kills, worker_note
from lightning_memguard.training.run.batch_monitor import BatchWatch, failure
from lightning_memguard.training.run.growth_watch import GrowthWatch
from lightning_memguard.training.run.guard_settings import GuardSettings
from lightning_memguard.training.run.measuring import Measuring
from lightning_memguard.training.run.overrun import OverrunWatch
from lightning_memguard.training.run.own_size import OwnSize, configured_between
from lightning_memguard.training.run.profile import RunProfile
from lightning_memguard.training.run.resume import is_over, resume, saved_in
from lightning_memguard.training.run.tune import recheck, tune, with_steps
from lightning_memguard.units import counted

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

    from lightning_memguard.report.loggers import Boards
    from lightning_memguard.report.page import Page
    from lightning_memguard.report.page_data import Report
    from lightning_memguard.training.run.offloading import Offloading

T = TypeVar("T")

_MOST_PARTS = 4  # shown of a footprint, notes among them: twelve lines for a fit


@dataclass(eq=False, repr=False)
class GuardedRun:
    """Creating this tunes or checks the run; then the run is measured. All ranks must make one.

    ``records`` gets predicted and measured memory, epoch by epoch; ``snapshot`` is where the step's snapshot goes;
    ``folders`` holds where Trainers without a logger have their files.

    Raises:
        DoesNotFitError: see `tune`.
    """

    trainer: Trainer
    module: LightningModule
    settings: GuardSettings
    stage: Stage
    snapshot: InitVar[Path | None]
    folders: MutableMapping[Trainer, Path]
    records: list[EpochRecord] = field(default_factory=list, init=False)

    def __post_init__(self, snapshot: Path | None) -> None:
        self.device = self.trainer.strategy.root_device
        self.measuring = Measuring(self.trainer, self.module)
        self.tuning = tune(self.trainer, self.module, self.settings, self.stage)
        self._announced = self._is_over = False
        self._sized = False
        self._undo: list[Callable[[], None]] = []
        self._oom_kills = oom_kills()
        self._own = OwnSize()
        self._undo_sizes: list[Callable[[], None]] = []  # set in the module and the datamodule
        self._configures = False  # optimizers, as if batches were not divided
        self._watches: dict[str, BatchWatch | None] = {}  # by role
        self._folder: Path | None = None
        self._report: Report | None = None
        self._boards: Boards | None = None
        self._recorder = SnapshotRecorder(self.trainer, snapshot) if snapshot else None
        self._trim: Trimmer | None = None
        self._offloading: Offloading | None = None
        if self.decision.host:
            self.measuring.watch_children()
        self._growth: GrowthWatch | None = None
        self._measures = False
        self._overruns = OverrunWatch(self.measuring, checks=self.device.type == "cpu")

    @property
    def decision(self) -> Decision:
        """The batch size and why."""
        return self.tuning.decision

    @property
    def trains(self) -> bool:
        """Whether it is a fit."""
        return self.stage == "fit"

    @property
    def is_decided(self) -> bool:
        """Whether its decision is final at setup: a checkpoint may still change a fit's."""
        return not self.trains or self.tuning.profile is None

    # -- before the first step

    def apply(self) -> None:
        """Apply the decision to the run; its loaders are made later, and may be made several times."""
        profile = self.tuning.profile
        if profile is None:
            return
        tunes, validation = self.settings.mode == "tune", profile.run.validation_info
        free = tunes and profile.request.free_to_choose
        rewrite = partial(rewrite_loaders, self.trainer, profile.facts)
        self._undo.append(rewrite(profile.loader_info, self._batch_size if free else None, made=self._note_own_size))
        if validation is not None:
            own_size = validation.batch_size
            follows = free and not validation.fixed_because
            size = (lambda: self._validation_size(own_size)) if follows else None
            self._undo.append(rewrite(validation, size))
        if not tunes:
            return
        if profile.trims:
            self._undo.append(return_freed_memory(self.device))
            self._trim = Trimmer() if self.device.type == "cpu" else None
        self._follow()
        if self.decision.pieces > 1:
            self._undo.append(configured_between(self.module, self._begin_configuring, self._end_configuring))
        if self.trains and (said := _short_search_words(self.trainer, profile, self.decision)):
            self._warn(said)

    def _note_own_size(self, size: int) -> None:
        if self.trains and self._own.note(size, self.decision, speaks=self.trainer.is_global_zero):
            self._follow_steps()

    def _validation_size(self, own_size: int) -> int:
        """Return the size to make validation loaders with, 0 to leave them: at their own, whatever a hook reads now."""
        size = self.decision.validation_batch_size or own_size
        return size if size != own_size or self._sized else 0

    def _follow(self) -> None:
        """Set the batch size and accumulation that schedules and loggers read."""
        if self.decision.outcome == "tuned" or self._sized:
            undo = set_batch_size(self.module, self.trainer.datamodule, self._size_to_set)  # type: ignore[attr-defined]
            self._undo.append(undo)
            self._undo_sizes.append(undo)
            self._sized = True
        self._follow_steps()

    def _begin_configuring(self) -> None:
        """Have rates and schedules worked out from what was set: they are those of a step, not of its pieces."""
        self._configures = self.decision.pieces > 1
        if self._configures:
            self.trainer.accumulate_grad_batches = self.decision.requested_accumulate_grad_batches
            while self._undo_sizes:
                self._undo_sizes.pop()()

    def _end_configuring(self) -> None:
        if self._configures:
            self._configures = False
            self._follow()

    def _follow_steps(self) -> None:
        profile = self.tuning.profile
        if profile is None:
            return
        changes = self._own.changes(self.trainer, self.decision, profile) if self.trains else ()
        self._undo += [undo for change in changes if (undo := _changed(*change))]
        if self._watches:
            self._watch_batches(profile)

    def _batch_size(self) -> int:
        """Return the size to make loaders with, 0 to leave them as they are; checked again.

        Other callbacks now hold what they will hold.
        """
        self._end_configuring()  # as who counts steps there asks for the loaders
        reason = attempt(self._recheck).reason
        if reason:
            self._warn(f"MemGuard could not count what other callbacks hold: {reason}")
        size = self._size_to_set
        return 0 if size == self.decision.requested_batch_size else size

    @property
    def _size_to_set(self) -> int:
        """The batch size; the loader's own if that is more samples than there are: its batch is the same."""
        asked, size = self.decision.requested_batch_size, self.decision.batch_size
        return asked if size < asked and self.decision.limited_by == "dataset" else size

    def _recheck(self) -> None:
        if not self.trains:
            return
        before = self.decision
        self.tuning = recheck(self.tuning, self.trainer.callbacks, self.module, self.settings)  # type: ignore[attr-defined]
        if self.decision.batch_size != before.batch_size:
            self._follow()
            self._warn(warning_of(self.decision) or self.decision.reason)
        elif self.decision.verdict != before.verdict:
            self._warn(warning_of(self.decision))

    def load(self, checkpoint: dict[str, object]) -> None:
        """Resume a fit at its checkpoint's batch size if it fits; no optimizer and no loader exists yet."""
        profile = self.tuning.profile
        if not self.trains or profile is None or not profile.request.free_to_choose:
            return
        saved, before = saved_in(checkpoint, profile.request.batch_size), self.decision
        self._is_over = is_over(checkpoint, self.trainer.max_epochs, self.trainer.max_steps)
        if saved is not None:
            self.tuning = with_steps(resume(self.tuning, saved, self.settings))
            self._follow()
        if self._announced and self.decision != before:  # strategies that shard load it last
            self.announce()

    def announce(self) -> None:
        """Print the decision in a line, and in a table if memory is tight.

        It warns if MemGuard could not do what was asked; what that says is not printed as well.
        """
        self._announced = True
        self._undo_division_for_lbfgs()
        if self.trainer.is_global_zero and (not self.trains or (takes_steps(self.trainer) and not self._is_over)):
            warning = warning_of(self.decision)
            if self.trains and self.decision.footprint and (self.decision.is_tight or explains()):
                say(setup_text(self.decision, explain=not warning, most_parts=_MOST_PARTS))
            elif not warning:
                say(f"MemGuard: {self.decision.reason}" if self.trains else evaluation_text(self.decision, self.stage))
            for text in filter(None, (warning, kept_words(self.decision))):
                self._warn(text)

    def _undo_division_for_lbfgs(self) -> None:
        """Undo a division if optimizers, which exist only now, ask for a step's gradients many times, as LBFGS does."""
        if self.decision.pieces > 1 and any(isinstance(each, LBFGS) for each in self.trainer.optimizers):
            self.tuning = with_steps(replace(self.tuning, decision=_not_divided(self.decision)))
            self._follow()

    def start(self) -> None:
        """Show the decision, watch batches and steps, and write the snapshot that was asked for before a fit."""
        profile, recorder = self.tuning.profile, self._recorder
        if profile is not None:
            if self.decision.pieces > 1:
                self._own.schedules = [(each, each.frequency) for each in self.trainer.lr_scheduler_configs]
                self._follow_steps()
            if reason := attempt(lambda: self._show(profile)).reason:
                self._warn(f"MemGuard shows less of this run: {reason}")
            self._watch_batches(profile)
            self._offloading = attempt(lambda: self._start_offloading(profile)).value
        if self.trains and recorder is not None and self.trainer.is_global_zero:
            self._try_writing("snapshot", lambda: self.save_snapshot(recorder.path))

    def _start_offloading(self, profile: RunProfile) -> Offloading | None:
        settings, things = self.settings, (self.trainer, self.module, profile, self.measuring)
        if not self.trains or settings.mode != "tune" or settings.offload == "never":
            return None
        from lightning_memguard.training.run.offloading import Offloading

        return Offloading(*things, self._warn_on_any_rank, settings.offload)

    def start_measuring(self) -> None:
        """Start measuring, before the sanity check; what the model and its optimizers hold is the training's."""
        profile = self.tuning.profile
        if profile is None or self._measures:
            return
        if not (self.settings.mode == "tune" and profile.request.free_to_choose):
            self._recheck()  # as no loader has been rewritten, which triggers it
        host = self.decision.host
        self._measures = True
        self.measuring.start(on_host=bool(host and host.budget))

    def watch_growth(self) -> None:
        """Watch what grows from epoch to epoch: the training begins."""
        profile = self.tuning.profile
        if profile is None:
            return
        self._growth = attempt(lambda: _growth_watch(self.trainer, self.module, profile)).value

    def _watch_batches(self, profile: RunProfile) -> None:
        runs = {"train" if self.trains else "val": (profile.step, self._own.batch_size(self.decision))}
        if profile.validation is not None and profile.evaluation is not None:
            runs["val"] = (profile.evaluation, profile.validation.batch_size)
        self._watches = {role: attempt(partial(BatchWatch, profile, *run)).value for role, run in runs.items()}

    def _show(self, profile: RunProfile) -> None:
        """Show what is known before the first step, which may be the last."""
        from lightning_memguard.report.loggers import Boards
        from lightning_memguard.training.run.run_report import folder_of, report_of

        facts, title = profile.facts, type(self.module).__name__
        self._folder = self._try_writing("report", lambda: folder_of(self.trainer, facts, self.folders))
        if facts.leaves_files:
            self._boards = Boards(facts.loggers, self._folder, self.stage)
            self._boards.log_setup(self.decision, self.trainer.global_step)
        if self._folder is not None:
            self._report = self._try_writing("report", lambda: report_of(title, profile, self.decision))
        self._write_page()

    # -- at each batch

    def start_batch(self, batch: object, batch_idx: int) -> None:
        """Record the actual step if a snapshot of it was asked for; warn of a run that has passed its budget."""
        if self._recorder is not None and not self._recorder.goes_on():
            self._end_recording()
        if batch_idx.bit_count() == 1 or batch_idx == self._overruns.again_at:  # 1, 2, 4, 8, ...: early, and at no cost
            self.measuring.note_held()
            if self._overruns.checks and batch_idx > 1:
                self._warn_of_overrun(self.measuring.peak(), batch, batch_idx)

    def _end_recording(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            self._try_writing("snapshot", recorder.close)

    def _warn_of_overrun(self, measured: Measured, batch: object = None, batch_idx: int | None = None) -> None:
        decision, watch = self.decision, self._watches.get("train")
        known = decision, self._own.footprint(decision, self.tuning.profile, watch), watch
        owners = self.module, *self.trainer.callbacks, self.trainer.datamodule  # type: ignore[attr-defined]
        if said := self._overruns.note(*known, measured, owners, batch, batch_idx):
            self._warn(said)

    def check_batch(self, role: str, batch: object, batch_idx: int, batches: float) -> None:
        """Return to the system what collating a batch has freed; warn of a batch that is larger than predicted.

        ``batches`` there are in all.
        """
        if self._trim is not None:
            self._trim()
        watch, larger = self._watches.get(role), None
        try:
            larger = watch.larger(batch) if watch else None
        except Exception:  # noqa: BLE001 - a batch that cannot be examined is trained on all the same
            watch = self._watches[role] = None
        last, trains, largest = batch_idx + 1 == batches, role == "train", bool(watch and watch.is_largest)
        self.measuring.at_batch(batch, batch_idx, trains=trains, last=last, largest=largest)
        offloading = self._offloading if trains else None
        if watch is None:
            return
        if offloading is None:
            if larger is not None:
                self._warn(announcement(larger, role, batch_idx))
            return
        try:
            offloading.before(watch, batch, batch_idx, larger)
        except Exception as error:  # noqa: BLE001 - without it, the step runs as it would without MemGuard
            self._offloading = None
            offloading.close()
            self._warn_on_any_rank(f"MemGuard will not put activations on the host: {failed(error).reason}")

    # -- at each epoch

    def start_epoch(self) -> None:
        """Measure each epoch by itself; what follows an epoch, such as saving a checkpoint, counts in the next."""
        self.measuring.forget_gradients()
        self.measuring.stop_counting()
        if self._growth is not None and attempt(self._note_growth).reason:
            self._growth = None
        if self._offloading is not None:
            self._offloading.steps = 0
        forget_logged(self.trainer)

    def _note_growth(self) -> None:
        """Warn once of memory that grows from epoch to epoch, so that not all of them fit."""
        budget, watch, trainer = self.decision.budget, self._growth, self.trainer
        if budget is None or watch is None:
            return
        last = self.records[-1] if self.records else None
        peak = last.measured.on_device(last.predicted) if last else 0
        epochs = _epochs_of(trainer, self.decision.steps_per_epoch)
        grown = watch.note(peak, budget.free_bytes, trainer.current_epoch, epochs)
        if grown is not None:
            self._growth, said, known = None, self.decision.runs_out_at, self.decision.kept
            kept, end = grown
            has_graph = any(each.has_graph for each in known if each.holder == kept.holder)
            kept = replace(kept, has_graph=has_graph)
            decision = replace(self.decision, kept=(kept, *known), runs_out_at=end)
            self.tuning = replace(self.tuning, decision=decision)
            if said is None or end.epoch < said.epoch - 1:
                self._warn(kept_words(decision))

    def end_epoch(self) -> None:
        """Record and log predicted next to measured."""
        record = self._record()
        if record is None:
            return
        self.measuring.count_hooks_of_epoch()
        self.records.append(record)
        attempt(lambda: self._remember(record))
        self.measuring.restart()
        self._warn_of_overrun(record.measured)
        try:
            if not self.trainer.barebones:
                log_epoch(self.trainer, record.as_metrics())
            if self._boards is not None:
                self._boards.log_epoch(record, logging_step(self.trainer))
        finally:
            if len(self.records).bit_count() == 1:  # after 1, 2, 4, 8, ... epochs: some take no time
                self._write_page()

    def _remember(self, record: EpochRecord) -> None:
        """Store what was measured for later runs, if it is of whole steps: full batches, with the optimizer's state."""
        profile, watch, trainer = self.tuning.profile, self._watches.get("train"), self.trainer
        whole = watch is not None and watch.saw_whole and trainer.global_step >= 2 * len(trainer.optimizers)
        if profile is not None and whole and trainer.is_global_zero:
            precision, module = str(trainer.precision), type(self.module).__name__
            self.tuning.earlier.remember(record, self.decision, profile, precision, module)

    def end_evaluation(self) -> EpochRecord | None:
        """Make the record of a run that only validates, tests or predicts."""
        record = self._record()
        self.records[:] = [record] if record else []
        self.summarize()
        return record

    def _record(self) -> EpochRecord | None:
        decision = self.decision
        footprint = self._own.footprint(decision, self.tuning.profile, self._watches.get("train"))
        if footprint is None or decision.budget is None:
            return None
        measured, budget = self.measuring.peak_by_part(), decision.budget
        if footprint.phase == "checkpoint":
            measured = measured.of_process()
        measured = replace(measured, step_seconds=self.measuring.step_seconds)
        epoch, size = self.trainer.current_epoch, self._own.batch_size(decision)
        offers = budget.free_bytes, budget.margin_bytes
        own = self._offloading.steps if self._offloading else 0
        moved = max(self.tuning.ranks.gather(own)) if self.trains else 0
        on_host = sum(decision.host.parts.values()) if decision.host else 0
        again = _range_after(self.records)
        loaders = decision.loader_batch_sizes
        return EpochRecord(epoch, size, footprint, measured, *offers, moved, loaders, on_host, again)

    def summarize(self) -> None:
        """Print how close the prediction came; what the last epoch has left to be saved counts too."""
        if self.trains and self.records:
            self.records[-1] = self.records[-1].with_what_followed(self.measuring.peak_by_part())
        if self.records and self.trainer.is_global_zero:
            page = self._write_page()
            self.measuring.note_held()
            line = last_line(self.records, stayed_bytes=self.measuring.stayed_bytes)
            say(f"{line}{f' Full report: {page}' if page else ''}")

    # -- files

    def record_to(self, path: Path) -> None:
        """Record the actual steps from the next batch on, next to the snapshot of the predicted one."""
        if self._recorder is None:
            self._recorder = SnapshotRecorder(self.trainer, path)
        self._recorder.path = path

    def save_snapshot(self, path: Path) -> Path:
        """Write the predicted step; on ranks other than zero, nothing.

        Raises:
            MemGuardError: nothing was predicted, or the file cannot be written.
        """
        profile, decision = self.tuning.profile, self.decision
        if self.tuning.ranks.rank:
            return path
        if profile is None:
            raise MemGuardError(f"There is no predicted step to write: {decision.because}.")
        return save_snapshot(profile.trace_at(decision.batch_size), profile.prediction.settings, path)

    def page(self) -> Page:
        """Return the page that was written last.

        Raises:
            MemGuardError: there is none.
        """
        from lightning_memguard.report.page import PAGE_NAME, Page

        path = self._folder and self._folder / with_stage(PAGE_NAME, self.stage)
        if path is None or not path.exists():
            raise MemGuardError("This run has no report, because it writes no files.")
        return Page(path)

    def _write_page(self) -> Path | None:
        folder, report = self._folder, self._report
        if folder is None or report is None:
            return None
        from lightning_memguard.report.page import write_report

        report = replace(report, decision=self.decision, records=tuple(self.records))
        paths = self._try_writing("report", lambda: write_report(folder, report, self.stage))
        self._report = report if paths else None  # what failed once is not tried again
        return paths[0] if paths else None

    def _try_writing(self, what: str, write: Callable[[], T]) -> T | None:
        written = attempt(write)
        if written.reason:
            warn(f"MemGuard's {what} was not written: {written.reason}", stacklevel=3)
        return written.value

    def _warn(self, text: str) -> None:
        if self.trainer.is_global_zero:
            self._warn_on_any_rank(text)

    def _warn_on_any_rank(self, text: str) -> None:
        ranks = self.tuning.ranks
        text = text if ranks.size == 1 else f"Rank {ranks.rank}: {text}"
        warn(text if text.startswith("MemGuard") else f"MemGuard: {text}", stacklevel=4)

    # -- when it is over

    def note_on(self, error: BaseException) -> str:
        """Say why memory ran out, and what would have fit; empty for other errors."""
        if not ran_out_of_memory(error):
            return worker_note(error, self.decision.host, self._oom_kills)
        profile, footprint = self.tuning.profile, self.decision.footprint
        if profile is None or footprint is None:
            return f"MemGuard made no prediction: {self.decision.because}."
        trainer = self.trainer
        role = "val" if trainer.evaluating or trainer.predicting or trainer.validating else "train"
        watch = self._watches.get(role) or next(filter(None, self._watches.values()), None)
        watch = watch or BatchWatch(profile, profile.step, self.decision.batch_size)
        elsewhere = attempt(lambda: held_elsewhere(trainer, self.module, error)).value or {}
        measured, between = attempt(self.measuring.peak_by_part).value, self.measuring.between_steps
        failed = failure(watch, footprint, measured, elsewhere, between_steps=between)
        lines = [note(failed)]
        if role == "train" and self.trains:
            names = str(trainer.precision), type(self.module).__name__
            attempt(lambda: self.tuning.earlier.remember_failure(failed, profile, *names))
            if self._offloading is not None and self._offloading.why_not:
                lines.append(f"Its activations could not go to the host: {self._offloading.why_not}.")
        lines += filter(None, [attempt(self._save_failed_step).value])
        return "\n".join(lines)

    def _save_failed_step(self) -> str:
        """Write the predicted step, and on CUDA what the allocator holds; say where."""
        if self._folder is None or self.tuning.ranks.rank:
            return ""
        path = self.save_snapshot(self._folder / "memguard_out_of_memory.pickle")
        actual = save_snapshot_now(actual_path(path)) if self.device.type == "cuda" else None
        return snapshot_words(path, actual)

    def close(self) -> None:
        """Stop measuring and recording, and leave the Trainer and the user's objects as they were."""
        while self._undo:
            attempt(self._undo.pop())
        self._watches.clear()
        self._report = self._boards = self._growth = None
        attempt(self._end_recording)
        if self._offloading is not None:
            attempt(self._offloading.close)
        self.measuring.close()
        profile = self.tuning.profile
        if profile is not None:
            self.tuning = replace(self.tuning, profile=profile.detached())
        # a guard that is kept does not keep its run
        del self.trainer, self.module, self.measuring, self._offloading, self._overruns


def actual_path(path: Path) -> Path:
    """Return the path of the actual snapshot, next to the predicted one."""
    return path.with_name(f"{path.stem}_actual{path.suffix}")


class SnapshotRecorder:
    """Records what the allocator of a CUDA device does, from a batch on until two optimizer steps are over.

    ``path`` is that of the predicted step's snapshot; the actual one is written next to it.
    """

    def __init__(self, trainer: Trainer, path: Path) -> None:
        self.path = path
        self._trainer = trainer
        self._snapshot: ActualSnapshot | None = None
        self._first_step = 0

    def goes_on(self) -> bool:
        """Start, at the first call; return whether steps are still to be recorded."""
        trainer = self._trainer
        if self._snapshot is None:
            self._first_step = trainer.global_step
            if trainer.strategy.root_device.type == "cuda" and trainer.is_global_zero:
                self._snapshot = attempt(lambda: ActualSnapshot(trainer.strategy.root_device)).value
        return self._snapshot is not None and trainer.global_step < self._first_step + 2 * len(trainer.optimizers)

    def close(self) -> None:
        """Stop recording, and write the file."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.save(actual_path(self.path))


def _not_divided(decision: Decision) -> Decision:
    asked, size = decision.requested_batch_size, decision.batch_size
    because = f"{asked} samples do not fit, and each optimizer step sees {size}: LBFGS accumulates no gradients"
    return replace(decision, accumulate_grad_batches=decision.requested_accumulate_grad_batches, because=because)


def _epochs_of(trainer: Trainer, steps_per_epoch: int | None) -> int:
    """How many epochs a fit may have."""
    last, steps = trainer.max_epochs, trainer.max_steps
    epochs = MOST_EPOCHS if last is None or last < 0 else last
    return min(epochs, math.ceil(steps / steps_per_epoch)) if steps > 0 and steps_per_epoch else epochs


def _growth_watch(trainer: Trainer, module: LightningModule, profile: RunProfile) -> GrowthWatch:
    infos = filter(None, (profile.loader_info, profile.run.validation_info))
    loaders = (loader for info in infos for source in info.sources for loader in source.held)
    datasets = [getattr(loader, "dataset", None) for loader in loaders]
    others = [*trainer.callbacks, profile.facts.datamodule, *datasets]  # type: ignore[attr-defined]
    return GrowthWatch(trainer.strategy.root_device, module, others)


def _range_after(records: Sequence[EpochRecord]) -> tuple[int, int] | None:
    """The peak that another epoch on a GPU is expected to have, after those that were measured."""
    seen = [each.measured.peak_bytes for each in records if each.has_error and each.measured.peak_reserved_bytes]
    return range_after(max(seen)) if seen else None


def _changed(thing: object, name: str, value: object) -> Callable[[], None] | None:
    before = getattr(thing, name, value)  # Lightning 2.6 sets no val_check_interval if it is a time
    if before == value:
        return None
    setattr(thing, name, value)
    return partial(setattr, thing, name, before)


def _short_search_words(trainer: Trainer, profile: RunProfile, decision: Decision) -> str:
    """Say that a LearningRateFinder, which tries one rate a step, has too few of them until the epochs are over."""
    tried, epochs = learning_rates_tried(trainer.callbacks), trainer.max_epochs or -1  # type: ignore[attr-defined]
    batches = profile.loader_info.batches(decision.batch_size)
    if decision.batch_size <= decision.requested_batch_size or batches is None or epochs < 0:
        return ""
    steps = -(-batches // decision.accumulate_grad_batches) * epochs
    if steps >= tried:
        return ""
    return (
        f"LearningRateFinder tries {tried} learning rates, one a step, but at batch size {decision.batch_size} "
        f"this run has {counted(steps, 'step')}. Set `max_batch_size` in MemGuard, or train for more epochs."
    )
