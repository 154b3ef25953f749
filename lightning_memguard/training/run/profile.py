"""Profile of a run before anything is decided: its data, its budget, and the predicted memory of its steps.

The data is read, and the steps are captured, in children: whatever the user's code moves there ends with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lightning_memguard.core.capture.capture import Captures
from lightning_memguard.core.capture.curve import Curve, Terms
from lightning_memguard.core.capture.predict import Prediction, Surveyor, predict_largest
from lightning_memguard.core.capture.recorder import part_bytes
from lightning_memguard.core.decision.decision import Budget, HostUse, LimitedBy, Request, largest_that, verdict
from lightning_memguard.core.range import Range
from lightning_memguard.core.replay.epoch import Epoch as CacheEpoch
from lightning_memguard.core.replay.footprint import Doubt, Footprint, Peak, Turn
from lightning_memguard.core.replay.learned import Learned
from lightning_memguard.core.replay.recurring import LaterSteps
from lightning_memguard.core.replay.replay import within_capacity
from lightning_memguard.core.replay.validated import validated
from lightning_memguard.core.trace.kept import Kept, fit_kept
from lightning_memguard.core.trace.trace import PARTIAL, WORTH_A_NOTE, Note, Trace
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.adapter import callbacks
from lightning_memguard.training.adapter.epoch_end import runs_here
from lightning_memguard.training.data.loaders import LoaderInfo, batches_taken
from lightning_memguard.training.data.samples import note_on_cache
from lightning_memguard.training.data.workers import ranks_of_host
from lightning_memguard.training.facts.ranks import Attempt, attempt
from lightning_memguard.training.facts.run_facts import RunFacts
from lightning_memguard.training.run.host_side import HostSide
from lightning_memguard.training.run.reading import Reading, Run
from lightning_memguard.training.run.saving import Saving
from lightning_memguard.units import format_bytes


@dataclass(frozen=True)
class ValidationRun:
    """A fit's validation, at a batch size of its own; ``is_fixed`` if that cannot be changed."""

    prediction: Curve
    batch_size: int
    unit: int
    is_fixed: bool

    @property
    def footprint(self) -> Footprint:
        """Memory of the validation at its batch size."""
        return self.prediction.footprint_at(self.batch_size)


@dataclass(frozen=True, eq=False)
class RunProfile:
    """All that is known of a run before anything is decided.

    Attributes:
        run: what of it stays in its own process.
        prediction: the memory of its step.
        budget: what its device offers to this rank.
        request: what was asked for, and what prevents it.
        validation: the fit's validation; None if there is none, or none could be predicted.
        avoids_single_sample: whether a last batch of one sample may fail.
        extra: bytes found after the steps were predicted, by part.
        between: bytes on the CPU between two steps by part, without the module's own.
        collates: whether a batch is there twice while it is collated, in this process.
        objects_per_sample: bytes of Python objects of each sample that is collated in this process, on the CPU.
        saving: its checkpoints.
        host: what of it is on the host, next to its steps.
        notes: what had to be assumed, in plain words.
        kept: what each batch leaves behind.
        trims: whether glibc is made to return freed blocks while it runs.
        differ: whether its batches differ in size; what its GPU then caches over an epoch is known in ``epochs``.
        epochs: by batch size, epochs that were replayed.
        turns: by batch size, its training and its validation that were replayed one after the other.
        left: bytes that a validation has left behind and that are there while the run trains, at least and most likely.
    """

    run: Run
    prediction: Curve
    budget: Budget
    request: Request
    validation: ValidationRun | None = None
    avoids_single_sample: bool = False
    extra: Mapping[str, int] = field(default_factory=dict)
    between: tuple[tuple[str, int], ...] = ()
    collates: bool = False
    objects_per_sample: int = 0
    saving: Saving = field(default_factory=Saving)
    host: HostSide = field(default_factory=HostSide)
    notes: tuple[str, ...] = ()
    kept: tuple[Kept, ...] = ()
    trims: bool = False
    differ: bool = False
    epochs: Mapping[int, CacheEpoch] = field(default_factory=dict)
    turns: Mapping[int, Turn] = field(default_factory=dict)
    left: tuple[int, int] = (0, 0)

    @property
    def facts(self) -> RunFacts:
        """The settings of the run."""
        return self.run.facts

    @property
    def loader_info(self) -> LoaderInfo:
        """The data of the run."""
        return self.run.loader_info

    def detached(self) -> RunProfile:
        """Return the profile as a value that can be sent, without the objects of the run's own process."""
        return replace(self._with_predictions(Curve.packed), run=self.run.detached())

    def unpacked(self) -> RunProfile:
        """Return the profile with its predictions unpacked, to be asked at many sizes."""
        return self._with_predictions(Curve.unpacked)

    def attached_to(self, run: Run) -> RunProfile:
        """Return the profile with the run's own objects; undoes `detached`."""
        run.learn(self.run)
        validation = self.validation.prediction if self.validation else None
        return replace(self, run=run.of_kinds(self.prediction, validation))

    @property
    def step(self) -> Prediction:
        """Its step, to be asked at sizes that need a capture."""
        return Prediction(self.run.program, self.prediction)

    @property
    def evaluation(self) -> Prediction | None:
        """The fit's validation, to be asked at sizes that need a capture."""
        if self.validation is None:
            return None
        return Prediction(self.run.evaluation.unwrap().program, self.validation.prediction)

    def extended_to(self, batch_size: int) -> RunProfile:
        """Return the profile once its step can be asked at a size."""
        return replace(self, prediction=self.step.extended_to(batch_size))

    def with_context(self, nbytes: Range[int]) -> RunProfile:
        """Return the profile with other bytes of the process on its device outside the allocator."""
        return self._with_predictions(lambda each: each.on_terms(context_bytes=nbytes))

    def learning(self, learned: Learned | None) -> RunProfile:
        """Return the profile with what earlier runs of its training step have measured."""
        return replace(self, prediction=self.prediction.on_terms(learned=learned))

    @property
    def exceeds_as_set(self) -> bool:
        """Whether the run is not known to fit at its own batch size, and is likely not to."""
        asked = attempt(lambda: verdict(self.footprint_at(self.request.batch_size), self.budget))
        return asked.value in (None, "does not fit")

    def accumulating(self) -> RunProfile:
        """Return the profile of the run if it accumulates gradients, which its step keeps from batch to batch."""
        run, validation = self.run.accumulating(), self.validation
        if run is self.run:
            return self
        step = Surveyor(run.program).survey(self.request.batch_size, self.prediction.terms)
        if step.method == "cut":
            raise CannotTraceError(step.stopped)
        if validation is not None:
            validation = replace(validation, prediction=_next_to(step, run, validation.prediction))
        return replace(self, run=run, prediction=step, validation=validation)

    def _with_predictions(self, change: Callable[[Curve], Curve]) -> RunProfile:
        validation = self.validation
        if validation is not None:
            validation = replace(validation, prediction=change(validation.prediction))
        return replace(self, prediction=change(self.prediction), validation=validation)

    def trace_at(self, batch_size: int) -> Trace:
        """The events behind `footprint_at`."""
        most = self._larger_validation(batch_size)
        trace = most.prediction.own_trace_at(most.batch_size) if most else self.prediction.own_trace_at(batch_size)
        return trace.plus(self.extra)

    def _larger_validation(self, batch_size: int) -> ValidationRun | None:
        """Return validation if it takes more than the step: by the likely peak, or by the most if one is partial."""
        step, validation = self.prediction.footprint_at(batch_size), self.validation
        if validation is None:
            return None
        turn = self.turns.get(batch_size)
        if turn and turn.likely.peak_event:
            return validation if turn.likely.peak_event.phase == "validation" else None
        is_partial = step.is_partial or validation.footprint.is_partial

        def rank(each: Footprint) -> tuple[int, int]:
            likely, most = each.peak_device_bytes, each.most_device_bytes
            return (most, likely) if is_partial else (likely, most)

        return validation if rank(validation.footprint) > rank(step) else None

    def footprint_at(self, batch_size: int) -> Footprint:
        """The memory of the run at a batch size: of its training step, or of validation if that takes more."""
        found, turn = self._larger_at(batch_size), self.turns.get(batch_size)
        if turn:
            found = found.in_turn(turn, self._by_replay()._larger_at(batch_size).peak)  # noqa: SLF001 - its own
        if self._larger_validation(batch_size):
            found = self.with_extra(found)
        else:
            found = self._noting_objects(self.with_extra(self.with_objects(found)))
        return replace(found, notes=tuple(dict.fromkeys((*found.notes, *self.notes))))

    def _larger_at(self, batch_size: int) -> Footprint:
        step, larger = self._step_at(batch_size), self._larger_validation(batch_size)
        if larger is None:
            found = self._collating(step)
            return _joined(found, self.validation.footprint, "validation") if self.validation else found
        note = f"the peak is in validation, at its batch size of {larger.batch_size}"
        notes = (note, *step.notes, *larger.footprint.notes)
        validation = replace(larger.footprint, batch_size=batch_size, notes=notes)
        return _joined(validation, step, "a training step")

    def _by_replay(self) -> RunProfile:
        """Return the profile without what is known from elsewhere."""
        return replace(self, prediction=self.prediction.on_terms(learned=None), left=(0, 0))

    def _collating(self, step: Footprint) -> Footprint:
        """Return a step, or the collation of its batch in this process if that takes more."""
        if not self.collates:
            return step
        batch = self.step.expected_batch(step.batch_size)[1]
        collating = self._between_steps(step, "collate", batch=batch, temporaries=batch)
        return max(step, collating, key=lambda each: each.most_device_bytes)

    def taking_turns_at(self, batch_size: int) -> RunProfile:
        """Return the profile once training and validation are replayed in turn at a size, if both are known.

        Only the chosen size is worth it: a budget is compared with what does not give way, which stays.
        """
        step, validation = self.prediction, self.validation
        on_gpu = step.settings.kind == "cuda" and self.run.program.trains and not self.differ
        if not on_gpu or validation is None:
            return self
        if any(each.method in PARTIAL or each.variants or each.drawn for each in (step, validation.prediction)):
            return self
        if any(each.stays for each in self.kept):  # no step finds what the one before has found
            return self
        alone = self.footprint_at(batch_size)
        room = self.budget.usable_bytes - alone.highest.outside_bytes - sum(self.extra.values())
        trace = self._validated(step.own_trace_at(batch_size), validation)
        if alone.most_device_bytes > self.budget.usable_bytes:
            return self
        settings = replace(step.settings, capacity_bytes=max(0, room))
        replayed = partial(LaterSteps.of, batches=step.terms.batches_per_step)
        turned = replace(settings, segments_descend=not settings.segments_descend)
        likely, other = (within_capacity(trace, each, replayed).replay for each in (settings, turned))
        fits = likely.peak_reserved_bytes <= room
        return replace(self, turns={**self.turns, batch_size: Turn(likely, other)}) if fits else self

    def _validated(self, training: Trace, validation: ValidationRun) -> Trace:
        facts, batches = self.facts, self.prediction.terms.batches_per_step
        return validated(
            training,
            validation.prediction.trace_at(validation.batch_size),
            batches,
            checked=bool(facts.sanity_steps),
            again=not _validates_once(self.run),
            clears_gradients=not callbacks.validates_mid_step(facts, batches),
        )

    def _noting_objects(self, whole: Footprint) -> Footprint:
        objects = self._object_bytes(whole.batch_size)
        if objects < WORTH_A_NOTE or objects <= _WORTH_A_NOTE * whole.peak_device_bytes:
            return whole
        note = f"at most, {format_bytes(objects)} are objects of the samples, which are collated in this process"
        return replace(whole, notes=(*whole.notes, note))

    @property
    def note_on_cache(self) -> tuple[str, ...]:
        """Note that the cache of its device may grow over an epoch; see `note_on_cache`."""
        return note_on_cache(self.prediction.settings) if self.differ else ()

    def _step_at(self, batch_size: int) -> Footprint:
        """The memory of the training step, with what is cached over an epoch.

        An epoch that fails at a size is taken to fail from three quarters of that size on.
        """
        step, epochs = self.prediction.footprint_at(batch_size), self.epochs
        if any(self.left):
            least, likely = (step.plus(nbytes, "activations") for nbytes in self.left)
            note = f"a validation leaves {format_bytes(self.left[1])} behind, which are there while the run trains"
            step = likely.doubted("other work", least.lowest, note=note)
        failed = [size for size, each in epochs.items() if not each.fits and _FAILS_FROM * size < batch_size]
        epoch = epochs.get(batch_size) or epochs.get(min(failed, default=0))
        if epoch:
            return step.over(epoch)
        return replace(step, notes=(*step.notes, *self.note_on_cache))

    def saving_at(self, batch_size: int) -> Footprint | None:
        """The memory of the run while a checkpoint is saved, as far as that is on its device. None if nothing is.

        Lightning writes a checkpoint to a buffer of the host first, at the end of an epoch or of a step; a thread does
        it from a copy on the device, while training goes on. Checked on 2.5.0 (which made no such copy) to 2.6.6.
        """
        saving, step = self.saving, self.prediction.footprint_at(batch_size)
        copies = callbacks.copies_saved(self.facts)
        if saving.parts and copies and not self.run.program.layout:  # by a thread, next to a step
            buffers = 1 if self.facts.device.type == "cpu" else 0  # where the host is the device
            copied = saving.content_bytes(step.parts) * (copies + buffers)
            return replace(self.with_extra(step.plus(copied, "checkpoint")), phase="checkpoint")
        if not saving.parts or not self.between:
            return None
        # between two steps, whose buffer counts where the host is the device
        buffer = saving.content_bytes(self._between_steps(step, "checkpoint").parts)
        more = {"checkpoint": buffer, "temporaries": saving.made_bytes}
        found = self.with_extra(self._between_steps(step, "checkpoint", **more))
        return replace(found, notes=(*found.notes, *saving.notes))

    def _between_steps(self, step: Footprint, phase: str, **more: int) -> Footprint:
        """The memory between two steps on the CPU, with ``more`` by part."""
        parts = {part: nbytes if part in ("parameters", "buffers") else 0 for part, nbytes in step.parts.items()}
        for part, nbytes in (*self.between, *more.items()):
            parts[part] = parts.get(part, 0) + nbytes
        whole = sum(parts.values())
        most = Peak(whole, whole, whole + step.highest.outside_bytes)
        return replace(
            step,
            peak_allocated_bytes=whole,
            peak_reserved_bytes=whole,
            peak_device_bytes=whole,
            parts=parts,
            phase=phase,
            module="",
            operator="",
            doubts=(Doubt("process", (most,)),) if step.doubts else (),
        )

    def with_extra(self, footprint: Footprint) -> Footprint:
        """A footprint with what was found after the steps were predicted; on the CPU, with what workers take."""
        for part, nbytes in self.extra.items():
            footprint = footprint.plus(nbytes, part)
        return self.host.with_workers(footprint, self._validation_size)

    def with_objects(self, step: Footprint) -> Footprint:
        """A training step with the objects of the samples that are collated for it."""
        objects = self._object_bytes(step.batch_size)
        return step.plus_outside(objects) if objects else step

    def _object_bytes(self, batch_size: int) -> int:
        return _BATCHES_OF_OBJECTS * self.objects_per_sample * batch_size

    @property
    def _validation_size(self) -> int:
        return self.validation.batch_size if self.validation else 0

    def host_at(self, batch_size: int) -> HostUse | None:
        """Memory of the host that a batch size takes; None if that is nothing, or all of it is the device's."""
        moved = self.prediction.trace_at(batch_size).moved_bytes if self.run.program.around else 0
        held = {"checkpoint": sum(self.saving.on_host), "offloaded": moved}
        less = self.saving.remedies(sharded=bool(self.run.program.layout))
        return self.host.use_at(batch_size, self._validation_size, held, less)

    def within_host(self) -> Request:
        """The request, with the largest size, at least the loader's own, at which the host holds what workers take."""
        request = self.request
        if self.host.workers is None or not request.free_to_choose:
            return request
        most = request.run_size or MOST_IN_A_BATCH
        size = largest_that(lambda size: self._short_of(size) is None, request.batch_size, most)
        limit = self._short_of(size + 1) if size < most else None
        return replace(request, run_size=size, run_limit=limit) if limit else request

    def _short_of(self, batch_size: int) -> LimitedBy | None:
        host = self.host_at(batch_size)
        if host is None or host.overrun is None:
            return None
        return "shared_memory" if host.overrun[1] is host.shared_budget else "host_memory"


_FAILS_FROM = 0.75


# -- predicting


def profile_of(reading: Reading, captures: Captures) -> RunProfile:
    """Capture the steps of a run, and its validation next to them.

    Raises:
        CannotTraceError: not even what stays could be predicted.
    """
    run, size = reading.run, reading.batch_size
    evaluation = run.evaluation.value
    if captures.own_first and not run.program.kinds:
        captures.start(run.program, size, "fake")
    if evaluation and not evaluation.program.kinds:
        captures.start(evaluation.program, evaluation.batch_size, "fake")
    fixed = run.loader_info.fixed_because
    size, prediction = predict_largest(run.program, size, Terms(reading.rules), scalable=not fixed)
    run = run.of_kinds(prediction)
    if not prediction.scalable:
        fixed = "; ".join(filter(None, (_why_one_size(prediction, asked=not fixed), fixed)))
    validation = attempt(lambda: _validation(run, prediction)) if evaluation else Attempt(reason=run.evaluation.reason)
    trace, plain = next(iter(prediction.surveyed.values()), None), not (run.program.layout or prediction.kinds)
    on_cpu = trace is not None and plain and run.facts.device.type == "cpu" and run.program.trains
    between = tuple(trace.alive_between_steps(gradients=True)) if on_cpu and trace else ()
    own_loop = bool(reading.workers and reading.workers.loop)
    curves = (prediction, *([validation.value.prediction] if validation.value else []))
    kept = tuple(kept for each in curves for kept in _kept_by_batches(each))
    return RunProfile(
        run,
        prediction,
        reading.budget,
        replace(reading.request_on(prediction.surveyed.values(), fixed), batch_size=size),
        validation=validation.value,
        avoids_single_sample=reading.avoids_single_sample,
        between=between,
        collates=reading.fresh and not own_loop and bool(between),
        objects_per_sample=reading.object_bytes if on_cpu and not own_loop else 0,
        saving=Saving.of(run, prediction, counts_host=reading.host is not None),
        host=HostSide(
            workers=reading.workers,
            kept_bytes=_kept_by_workers(reading, between),
            budget=reading.host,
            shared=reading.shared,
            ranks=ranks_of_host(run.facts),
        ),
        notes=(*reading.notes, *_notes_on_validation(validation), *_notes_on_callbacks(run)),
        kept=kept,
        differ=reading.differ,
        left=attempt(lambda: _left_by_validation(run, kept)).value or (0, 0),
    )


def _left_by_validation(run: Run, kept: Iterable[Kept]) -> tuple[int, int]:
    """Bytes that a validation leaves for the training: at least those of the sanity check, which all epochs follow."""
    facts, info = run.facts, run.validation_info
    batches = info and batches_taken(facts, info, info.batch_size)
    of_batch = sum(each.bytes_at(info.batch_size) for each in kept if each.stays) if info else 0
    checked = int(min(facts.sanity_steps, batches or 0))
    return of_batch * checked, of_batch * (checked if _validates_once(run) else batches or 0)


def _validates_once(run: Run) -> bool:
    """Whether training ends with the first validation, but for a sanity check."""
    facts, each_epoch = run.facts, run.facts.check_val_every_n_epoch == 1
    return each_epoch and facts.val_check_interval == 1.0 and run.program.trainer.max_epochs == 1


def _notes_on_validation(validation: Attempt[ValidationRun]) -> Iterator[Note]:
    """Say what of validation is not in the prediction."""
    if validation.value and validation.value.prediction.method in PARTIAL:
        why = "; ".join(validation.value.prediction.notes)
        yield Note("no validation", f"the memory of validation's activations is unknown: {why}")
    elif validation.reason:
        yield Note("no validation", f"validation was not predicted: {validation.reason}")


def _notes_on_callbacks(run: Run) -> Iterator[str]:
    """Say what callbacks and the profiler take that is not predicted."""
    hooks = callbacks.hooks_that_compute(run.facts.callbacks, but=partial(runs_here, module=run.program.module))
    if hooks:
        yield f"memory that callbacks take as they run is measured, not predicted: {', '.join(hooks)}"
    yield from callbacks.notes_on_profiler(getattr(run.program.trainer, "profiler", None))


def _kept_by_batches(curve: Curve) -> Iterable[Kept]:
    return fit_kept((trace.batch_size, trace.kept) for trace in curve.surveyed.values())


def _kept_by_workers(reading: Reading, between: Sequence[tuple[str, int]]) -> int:
    """Bytes of this process that forked workers keep: what training rewrites is copied first, as they still map it.

    Workers of later epochs begin with gradients and optimizer state, too. A checkpoint's state is not known here.
    """
    workers, program = reading.workers, reading.run.program
    if reading.run.facts.device.type != "cpu" or not program.trains or not workers or not workers.keeps(begun=False):
        return 0
    kept = part_bytes({"model": [*program.module.parameters()]}, "cpu")["model"]
    if workers.keeps(begun=True) and program.trainer.max_epochs != 1:
        kept += sum(nbytes for _, nbytes in between)
    return kept


def _why_one_size(prediction: Curve, *, asked: bool) -> str:
    """Why a step's memory is known at one batch size or at none; empty if others were not ``asked`` for."""
    if prediction.method in PARTIAL:
        return prediction.stopped or "; ".join(prediction.notes) or "the step could not be run"
    if not asked:
        return ""
    sizes = ", ".join(map(str, prediction.surveyed))
    ran = f"the step runs at batch size {sizes}" if sizes else "the step runs at the batch size asked for"
    return f"{ran}, but not at the others that were tried"


def _validation(run: Run, training: Curve) -> ValidationRun:
    """Predict the fit's validation, next to everything that training keeps."""
    evaluation, info = run.evaluation.unwrap(), run.validation_info
    terms = Terms(training.settings)
    size, prediction = predict_largest(evaluation.program, evaluation.batch_size, terms, scalable=False)
    unit, is_fixed = (info.unit, bool(info.fixed_because)) if info else (1, True)
    return ValidationRun(_next_to(training, run, prediction), size, unit, is_fixed)


def _joined(larger: Footprint, other: Footprint, name: str) -> Footprint:
    """The footprint of which more is likely, up to the most of the other; what is allocated is that of either."""
    if other.is_partial:
        return larger
    larger = larger.or_allocated_by(other)
    if other.most_device_bytes <= larger.most_device_bytes:
        return larger
    return larger.or_at_most(other, f"at most, {name} takes {format_bytes(other.most_device_bytes)}")


def _next_to(training: Curve, run: Run, validation: Curve) -> Curve:
    gradients = callbacks.validates_mid_step(run.facts, run.program.accumulate_grad_batches or 1)
    # variants that depend on values have no trace of their own size
    trace = next(iter(training.surveyed.values()), None)
    trace = trace or Prediction(run.program, training).trace_at(run.loader_info.batch_size or 1)
    own = next((each.open_workspaces for each in validation.surveyed.values()), Counter())
    workspaces = (("workspaces", nbytes) for _, nbytes in (trace.open_workspaces - own).elements())
    return validation.on_terms(held=(*trace.alive_between_steps(gradients=gradients), *workspaces))


MOST_IN_A_BATCH = 1 << 20
_WORTH_A_NOTE = 0.1
_BATCHES_OF_OBJECTS = 2  # that of the batch before is freed, and may stay in glibc's heap, in pieces
