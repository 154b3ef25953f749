"""MemGuard: Lightning's hooks, each forwarded to the current run."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.decision.record import EpochRecord
from lightning_memguard.core.device.out_of_memory import ran_out_of_memory
from lightning_memguard.core.foreign import gaps, reason_of, untested
from lightning_memguard.errors import MemGuardError
from lightning_memguard.training.facts.ranks import attempt, say, warn
from lightning_memguard.training.facts.run_facts import ROLES
from lightning_memguard.training.run.guard_settings import GuardSettings
from lightning_memguard.units import KIB, parse_bytes

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from torch import Tensor
    from torch.optim import Optimizer

    from lightning_memguard.report.page import Page
    from lightning_memguard.training.run.guarded_run import GuardedRun

# What predicts. It reads the insides of torch and Lightning, so it is imported when a run is set up, and may fail then.
_ENGINE = "lightning_memguard.training.run.guarded_run"
_say_once = functools.cache(say)
_WHILE_COUNTING = ("on_before_backward", "on_train_batch_end")  # skipped at other batches
_NOT_USED = ("on_before_zero_grad", "on_after_backward", *_WHILE_COUNTING)


_LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[type, ...]:
    """The Callback class of each Lightning that is installed: ``lightning``, ``pytorch_lightning`` or both.

    They are unrelated classes; a callback that is both works in both Trainers. A program may have mapped one package
    onto the other, or made one class inherit from the other.
    """
    classes: list[type] = []
    failures: list[Exception] = []
    of_program = sys.modules.keys() & {*_LIGHTNINGS}
    for package in _LIGHTNINGS:
        try:
            with nullcontext() if package in of_program or not of_program else _messages_kept():
                classes.append(importlib.import_module(package).Callback)
        except Exception as error:  # noqa: BLE001, PERF203 - not installed, or broken by something it imports
            failures.append(error)
    if not classes:
        raise ImportError("Neither `lightning` nor `pytorch-lightning` can be imported; install one.") from failures[0]
    unlike = list(dict.fromkeys(classes))
    return tuple(each for each in unlike if not any(issubclass(other, each) for other in unlike if other is not each))


@contextmanager
def _messages_kept() -> Iterator[None]:
    """Keep the logger and the form of warnings of the Lightning that the program imports: the other takes over both."""
    both, shown = importlib.import_module("lightning_utilities.core.rank_zero"), warnings.formatwarning
    before = dict(vars(both))
    try:
        yield
    finally:
        vars(both).update(before)
        warnings.formatwarning = shown


_Hook = TypeVar("_Hook", bound=Callable[..., None])


def _guarded(hook: _Hook) -> _Hook:
    """A hook that raises nothing of ours: what fails is warned of once a run, and the run goes on.

    ``setup`` may refuse a run with a `MemGuardError`, before it starts.
    """

    @functools.wraps(hook)
    def call(self: MemGuard, *arguments: Any, **named: object) -> None:
        try:
            hook(self, *arguments, **named)
        except Exception as error:
            if hook.__name__ == "setup":
                attempt(self._close)
                if isinstance(error, MemGuardError):
                    raise
            if hook.__name__ not in self._failed and arguments[0].is_global_zero:
                self._failed.add(hook.__name__)
                without = f"MemGuard failed in {hook.__name__}, and the run goes on without what that does"
                warn(f"{without}: {reason_of(error)}")

    return cast("_Hook", call)


_REPLACED = {
    "prefer": 'pass batch_size="largest" or "fastest"',
    "on_oom": "steps are no longer repeated in parts; `offload` runs a batch that will not fit whole, with its "
    'activations on the host: "if_needed" (the default), "always" or "never"',
}


def _refuse(replaced: dict[str, object]) -> None:
    """Say what became of an argument of earlier versions.

    Raises:
        MemGuardError: there is one.
        TypeError: there is an argument that never existed.
    """
    for name, value in replaced.items():
        if name not in _REPLACED:
            raise TypeError(f"MemGuard.__init__() got an unexpected keyword argument {name!r}")
        raise MemGuardError(f"{name}={value!r} is gone: {_REPLACED[name]}.")


def _batches_to_evaluate(trainer: Trainer) -> list[int | float]:
    if trainer.sanity_checking:
        return trainer.num_sanity_val_batches
    kind = "predict" if trainer.predicting else "test" if trainer.testing else "val"
    return getattr(trainer, f"num_{kind}_batches")  # type: ignore[no-any-return]


def _parsed(name: str, budget: int | str | None) -> int | None:
    nbytes = None if budget is None else parse_bytes(budget, name)
    if nbytes is not None and nbytes < KIB:
        raise MemGuardError(f"{name}={budget!r} is {nbytes} bytes, too small to train in; is '{budget}MiB' meant?")
    return nbytes


class MemGuard(*_callback_classes()):  # type: ignore[misc]
    """Predict the memory of a training step, make the batch size fit, and log predicted next to actual.

    Args:
        mode: ``"tune"`` makes the batch size fit, or chooses it; ``"check"`` predicts, warns if it does not fit, and
            changes nothing.
        batch_size: ``"auto"`` keeps a batch size that was set: if it fits, nothing about the training changes; if not,
            the batch is divided and gradients are accumulated. If none was set (a DataLoader has 1 then), it chooses as
            ``"largest"`` does. ``"keep"`` keeps 1, too. ``"largest"`` chooses the largest batch size that fits and
            leaves an epoch ``min_steps_per_epoch``; ``"fastest"`` the smallest of those whose predicted time a sample
            is within 3 % of the best, where that is known. Validation, test and prediction never get larger batches
            than they were given.
        budget: what the training may take on its device: bytes, or text such as ``"24GiB"`` (default: what the device
            has free).
        host_budget: what batches that workers have ready, these processes and the writing of a checkpoint may take of
            the host, on top of what the process takes at setup: bytes or text (default: what the host, its control
            group and /dev/shm have free). On the CPU it is one with ``budget``.
        margin: share of the budget to keep free, in [0, 1).
        min_batch_size: the smallest batch size to choose.
        max_batch_size: the largest batch size to train with.
        multiple_of: choose multiples of this only.
        min_steps_per_epoch: the batch size does not grow so far that an epoch has fewer optimizer steps than this, or
            than it has anyway: fewer steps train less. Nor does it grow with ``max_steps``, or with a schedule that
            counts steps and does not read ``estimated_stepping_batches``. ``None`` for no such limit. It is not asked
            if ``keep_effective_batch_size`` is a number.
        keep_effective_batch_size: samples that each optimizer step sees. ``"if_smaller"``: if the loader's batch does
            not fit, it is divided, and gradients are accumulated over the pieces, so that a step sees the samples that
            it had. A number: batch size and ``accumulate_grad_batches`` are set so that batch size x accumulation x
            ranks comes as close to it as it can without passing it, with the largest batches that fit. ``None``: the
            accumulation stays as it is.
        max_setup_seconds: how long predictions may take before the run starts. After that, the decision is made from
            what is known, with a range and a note: the loader's own batch size, which is captured first, and of a step
            that was stopped what it takes at least. A batch shrinks only if even the least does not fit, and the run is
            measured and watched as any other. ``"auto"``: a fifth of what the run is predicted to take, at least 5
            seconds of the processor and at most 60, or 15 before steps of less than half a second; 60 for
            ``"largest"``, ``"fastest"`` and a number of ``keep_effective_batch_size``. ``None`` for as long as it
            takes.
        offload: what becomes of a training batch that will not fit. ``"if_needed"``: its step runs whole, once, and
            keeps the activations that exceed the device in host memory until its backward pass: the same operators on
            the same tensors, slower by the transfers. ``"always"``: each step does, which lets larger batches fit.
            ``"never"``: it raises the device's own error, as it always does with ``mode="check"``.
        learn: store what a fit on a GPU measures in a file in your cache folder, and correct predictions of the same
            step by what earlier runs measured; see ``memguard history``. Nothing leaves the machine.

    Attributes:
        decision: the batch size of the last run and why, once one has been set up; else None.
        records: predicted and measured memory, one for each epoch of the last fit.
        evaluations: the same of the last ``"validate"``, ``"test"`` and ``"predict"``, by these names.

    Raises:
        MemGuardError: an argument is out of its range; or, at setup, the Trainer has two MemGuards.
        DoesNotFitError: at setup, in mode ``"tune"``, if even ``min_batch_size`` cannot fit.

    Example:
        >>> trainer = Trainer(callbacks=[MemGuard()])  # doctest: +SKIP
        >>> trainer.fit(model, train_dataloaders=loader)  # doctest: +SKIP
    """

    def __init__(
        self,
        mode: Literal["tune", "check"] = "tune",
        *,
        batch_size: Literal["auto", "keep", "largest", "fastest"] = "auto",
        budget: int | str | None = None,
        host_budget: int | str | None = None,
        margin: float = 0.05,
        min_batch_size: int = 1,
        max_batch_size: int | None = None,
        multiple_of: int = 1,
        min_steps_per_epoch: int | None = 50,
        keep_effective_batch_size: int | Literal["if_smaller"] | None = "if_smaller",
        offload: Literal["if_needed", "always", "never"] = "if_needed",
        max_setup_seconds: float | Literal["auto"] | None = "auto",
        learn: bool = True,
        **replaced: object,
    ) -> None:
        given = dict(locals())
        super().__init__()
        _refuse(replaced)
        self._given = {name: given[name] for name in _DEFAULTS}
        if mode not in ("tune", "check"):
            raise MemGuardError(f"mode={mode!r} is unknown; choose 'tune' or 'check'.")
        if batch_size not in ("auto", "keep", "largest", "fastest"):
            raise MemGuardError(
                f"batch_size={batch_size!r} is unknown; choose 'auto', 'keep', 'largest' or 'fastest', and "
                "pass numbers to the DataLoader."
            )
        if offload not in ("if_needed", "always", "never"):
            raise MemGuardError(f"offload={offload!r} is unknown; choose 'if_needed', 'always' or 'never'.")
        effective = None if keep_effective_batch_size == "if_smaller" else keep_effective_batch_size
        if isinstance(effective, str):
            raise MemGuardError(
                f"keep_effective_batch_size={effective!r} is unknown; pass a number of samples, 'if_smaller' or None."
            )
        limits = margin, _parsed("budget", budget), min_batch_size, max_batch_size, multiple_of, effective
        self._settings = GuardSettings(
            *limits,
            mode=mode,
            offload=offload,
            batch_size=batch_size,
            min_steps_per_epoch=min_steps_per_epoch,
            max_setup_seconds=max_setup_seconds,
            host_budget_bytes=_parsed("host_budget", host_budget),
            divides=keep_effective_batch_size == "if_smaller",
            learns=learn,
        )
        self.records: list[EpochRecord] = []
        self.evaluations: dict[str, EpochRecord] = {}
        self._run: GuardedRun | None = None
        self._last_run: GuardedRun | None = None
        self._last_fit: GuardedRun | None = None
        self._known_decision: Decision | None = None  # of a copy, which has no run
        self._folders: MutableMapping[Trainer, Path] | None = None  # of Trainers without a logger
        self._failed: set[str] = set()  # hooks whose failure was announced in this run
        self._snapshot_path: Path | None = None  # asked for before the run
        self._counts = False  # whether the hooks of `_WHILE_COUNTING` are on
        self._skip(*_NOT_USED)

    def _skip(self, *hooks: str) -> None:
        """Make Lightning skip hooks, unless a subclass has its own.

        Lightning calls a callback's hook if it is callable (``_call_callback_hooks`` in trainer/call.py, checked on
        2.5.0 to 2.6.6). Its own work around each call, even of an empty hook, takes longer than ours at a batch.
        """
        for hook in hooks:
            owner = next(cls for cls in type(self).__mro__ if hook in vars(cls))
            if issubclass(MemGuard, owner):
                setattr(self, hook, None)

    @property
    def decision(self) -> Decision | None:
        """The batch size and why; None before the first run was set up."""
        return self._last_run.decision if self._last_run else self._known_decision

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in self._given.items() if value != _DEFAULTS[name])
        return f"{type(self).__name__}({', '.join(shown)})" + (f": {self.decision.reason}" if self.decision else "")

    def __getstate__(self) -> dict[str, Any]:
        """Copies know the decision and the records, and have no run: that belongs to one Trainer in one process."""
        runs = dict.fromkeys(("_run", "_last_run", "_last_fit", "_folders"))
        return {**vars(self), **runs, "_known_decision": self.decision}

    def save_snapshot(self, path: str | os.PathLike[str]) -> Path:
        """Write the predicted step as a PyTorch memory snapshot; on CUDA, the actual one of the same steps next to it.

        It opens in https://pytorch.org/memory_viz and with ``python -m torch.cuda._memory_viz``. Called before the
        first run, it is written when that starts. The actual snapshot can only be recorded while a run trains: of its
        first two optimizer steps, or of the next two if this is called from a hook.

        Args:
            path: the file to write, usually ``*.pickle``; an existing one is replaced. The actual snapshot is next
                to it, its name ending in ``_actual``.

        Returns:
            The path.

        Raises:
            MemGuardError: the file cannot be written, or MemGuard did not tune the run.
        """
        path = Path(path)
        if self._last_run is None:
            self._snapshot_path = path
            return path
        if self._run:
            self._run.record_to(path)
        return self._last_run.save_snapshot(path)

    def report(self) -> Page:
        """Return the report page of the last run, which a notebook shows in place, while the run trains and after it.

        Raises:
            MemGuardError: there was no run yet, or it writes no files.
        """
        if self._last_run is None:
            raise MemGuardError("There is no report before the first run.")
        return self._last_run.page()

    def compare(self, path: str | os.PathLike[str], *, lines: bool = False) -> str:
        """The predicted step next to the actual one, request by request, as text; for a fit on CUDA.

        Call `save_snapshot` with the same path before the fit, and this after it.

        Args:
            path: the predicted snapshot; the actual one is next to it.
            lines: name lines of your code, too.

        Returns:
            The peaks, how many requests are equal, and what differs: by operator, with its effect on the peak.

        Raises:
            MemGuardError: there is no actual snapshot, or one of them cannot be read.
        """
        from lightning_memguard.core.histories.compare import compare_files
        from lightning_memguard.report.comparison import comparison_text
        from lightning_memguard.training.run.guarded_run import actual_path

        actual = actual_path(Path(path))
        if not actual.exists():
            raise MemGuardError(
                f"There is no actual step to compare with ({actual}); call guard.save_snapshot({str(path)!r}) before a "
                "fit on CUDA, which then records it."
            )
        found = compare_files(path, actual)
        return comparison_text(found if lines else found.without_lines())

    # -- Lightning's hooks: before a run

    @_guarded
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Predict and choose, before the model reaches its device."""
        stage = getattr(stage, "value", stage)  # Lightning passes an enumeration
        self._check(trainer, stage)
        if stage not in ROLES:
            return
        self._close()
        self._failed.clear()
        if stage == "fit":
            self.records = []
            self._last_fit = None
        self.evaluations.pop(stage, None)
        if trainer.is_global_zero and (newer := untested()):
            _say_once(newer)
        engine = attempt(lambda: importlib.import_module(_ENGINE))
        if engine.value is None:
            kept = 0, 0, trainer.accumulate_grad_batches
            self._last_run = None
            self._known_decision = Decision(*kept, "stepped aside", None, None, "request", engine.reason)
            if trainer.is_global_zero:
                warn(f"MemGuard did not tune this run: {engine.reason}", stacklevel=3)
            return
        folders = self._folders = self._folders or WeakKeyDictionary()
        run: GuardedRun = engine.value.GuardedRun(
            trainer, pl_module, self._settings, stage, self._snapshot_path, folders
        )
        self._run = self._last_run = run
        if run.trains:
            self._last_fit, self.records = run, run.records
        run.apply()
        if run.is_decided:
            run.announce()
        missing = gaps("every run", "lightning", "logging", "operators", trainer=trainer)
        if missing and trainer.is_global_zero and run.decision.outcome != "stepped aside":
            warn(f"MemGuard does less in this run: {missing}.", stacklevel=3)

    def _check(self, trainer: Trainer, stage: str) -> None:
        guards = sum(isinstance(callback, MemGuard) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if guards > 1:
            raise MemGuardError(f"The Trainer has {guards} MemGuards, which would undo each other's work: keep one.")
        effective = self._settings.keep_effective_batch_size if self._settings.mode == "tune" else None
        if stage != "fit" or not effective:
            return
        from lightning_memguard.training.adapter.callbacks import schedules_accumulation

        if schedules_accumulation(trainer.callbacks):  # type: ignore[attr-defined]
            raise MemGuardError(
                f"keep_effective_batch_size={effective} and a GradientAccumulationScheduler would each set the "
                "accumulation: remove one."
            )

    @_guarded
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the batch size, so that a resumed fit can keep it."""
        run = self._last_fit
        if run and run.tuning.profile is not None:
            from lightning_memguard.training.run import resume

            checkpoint[resume.KEY] = resume.saved_state(run.tuning)

    @_guarded
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Resume a fit at its checkpoint's batch size if it fits."""
        if self._run:
            self._run.load(checkpoint)

    @_guarded
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table, now that the weights of any checkpoint are loaded."""
        if self._run:
            if not self._run.is_decided:
                self._run.announce()
            self._run.start()

    @_guarded
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring, now that any checkpoint is out of memory."""
        if self._run:
            self._run.start_measuring()

    @_guarded
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring, if there was no sanity check."""
        if self._run:
            self._run.start_measuring()
            self._run.watch_growth()

    @_guarded
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring if only validation (or test, or prediction) runs."""
        if self._run and not self._run.trains:
            self._run.start()
            self._run.start_measuring()

    on_test_start = on_predict_start = on_validation_start

    # -- Lightning's hooks: during a run

    @_guarded
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure each epoch by itself."""
        self.__dict__.pop("on_before_optimizer_step", None)  # see `_skip`
        if self._run:
            self._run.start_epoch()

    @_guarded
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Warn of a batch that is larger than predicted."""
        if self._run:
            self._run.start_batch(batch, batch_idx)
            self._run.check_batch("train", batch, batch_idx, trainer.num_training_batches)
            if self._run.measuring.is_counting != self._counts:
                self._counts = not self._counts
                if self._counts:
                    for hook in _WHILE_COUNTING:
                        self.__dict__.pop(hook, None)
                else:
                    self._skip(*_WHILE_COUNTING)

    @_guarded
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Count tensors afresh, if this step's are counted."""
        if self._run:
            self._run.measuring.count_backward()

    @_guarded
    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Count no tensors while many samples are collated."""
        if self._run:
            self._run.measuring.end_batch(self._run.decision.batch_size)

    @_guarded
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Warn of a batch of validation, test or prediction that is larger than predicted."""
        if self._run:
            batches = _batches_to_evaluate(trainer)
            self._run.check_batch("val", batch, batch_idx, batches[dataloader_idx] if batches else 0)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    @_guarded
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count what the hooks at the end of a validation take."""
        if self._run:
            self._run.measuring.count_hooks_of_validation()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    @_guarded
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Measure the gradients in the first steps of an epoch."""
        if not (self._run and self._run.measuring.measure_gradients()):
            self._skip("on_before_optimizer_step")

    @_guarded
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record and log predicted next to measured."""
        if self._run:
            self._run.end_epoch()

    # -- Lightning's hooks: when a run is over

    @_guarded
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print how close the prediction came."""
        if self._run:
            self._run.summarize()

    @_guarded
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record a run that only validates, tests or predicts."""
        run = self._run
        if run:
            run.measuring.stop_counting()
        if run and not run.trains and (record := run.end_evaluation()):
            self.evaluations[run.stage] = record

    on_test_end = on_predict_end = on_validation_end

    @_guarded
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Add to an error of memory what was predicted and what would have fit; leave the Trainer as it was."""
        try:
            no_run = "MemGuard made no prediction." if ran_out_of_memory(exception) else ""
            run = self._run
            text = attempt(lambda: run.note_on(exception)).value if run else no_run
            if text and sys.version_info >= (3, 11):
                exception.add_note(text)
            elif text:
                warn(text)
        finally:
            self._close()

    @_guarded
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the Trainer as it was."""
        self._close()
        self._snapshot_path = None
        for name in ("log", "log_dict"):  # methods of the module, which Lightning sets on each callback of a run
            self.__dict__.pop(name, None)

    def _close(self) -> None:
        run, self._run = self._run, None
        if run:
            run.close()


_PARAMETERS = inspect.signature(MemGuard.__init__).parameters.values()
_DEFAULTS = {each.name: each.default for each in _PARAMETERS if each.default is not each.empty}
