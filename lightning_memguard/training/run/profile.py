"""Profile of a run before anything is decided: its data, its budget, and the predicted memory of its steps.

The data is read, and the steps are captured, in children: whatever the user's code moves there ends with them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_memguard.core.batch.batches import Batches
from lightning_memguard.core.batch.nesting import is_dense, tensors_in
from lightning_memguard.core.capture.capture import Captures
from lightning_memguard.core.capture.curve import Curve, Terms
from lightning_memguard.core.capture.holders import tensors_of
from lightning_memguard.core.capture.predict import Prediction, Surveyor, predict_largest
from lightning_memguard.core.capture.recorder import part_bytes
from lightning_memguard.core.decision.decision import Budget, HostUse, LimitedBy, Request, decide, largest_that, verdict
from lightning_memguard.core.device.budget import read_budget
from lightning_memguard.core.device.process import process_bytes
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.isolation.sending import packed, unpacked
from lightning_memguard.core.range import NOTHING, Range
from lightning_memguard.core.replay.epoch import Epoch as CacheEpoch
from lightning_memguard.core.replay.footprint import Doubt, Footprint, Peak
from lightning_memguard.core.replay.learned import Learned
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.simulation.fake import storage_address
from lightning_memguard.core.simulation.fake_cuda import gpu_of
from lightning_memguard.core.torch_port import AnyBatchNorm
from lightning_memguard.core.trace.growth import grow
from lightning_memguard.core.trace.kept import Kept, fit_kept
from lightning_memguard.core.trace.trace import OPTIONAL_PARTS, PARTIAL, WORTH_A_NOTE, Note, Trace
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.adapter import callbacks
from lightning_memguard.training.adapter.epoch_end import runs_here
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.data.loaders import LoaderInfo, epoch_size_for, find, largest_for, limit_of, loaders_at
from lightning_memguard.training.data.samples import RunSamples, note_on_cache, sample
from lightning_memguard.training.data.set_sizes import is_kept_as_one
from lightning_memguard.training.data.sizes_elsewhere import counts_steps, held_elsewhere
from lightning_memguard.training.data.workers import Workers, host_budgets, ranks_of_host, workers_of
from lightning_memguard.training.facts.lightning_types import shards
from lightning_memguard.training.facts.ranks import Attempt, attempt
from lightning_memguard.training.facts.run_facts import RunFacts
from lightning_memguard.training.run.guard_settings import GuardSettings
from lightning_memguard.units import format_bytes

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

    from lightning_memguard.training.strategies.sharded import Layout


@dataclass(frozen=True)
class Evaluation:
    """Program of a fit's validation, and its own batch size."""

    program: LightningProgram
    batch_size: int


@dataclass(frozen=True)
class Run:
    """Objects of a run that stay in its own process.

    Attributes:
        program: its step.
        evaluation: its validation, if it is a fit with one; or why that is not known.
        validation_info: the data of that validation, predicted or not.
    """

    facts: RunFacts
    loader_info: LoaderInfo
    program: LightningProgram
    evaluation: Attempt[Evaluation]
    validation_info: LoaderInfo | None

    def detached(self) -> Run:
        """Return what is known of the data, which can be sent."""
        nothing: Any = None
        known = self.validation_info and self.validation_info.detached()
        return Run(nothing, self.loader_info.detached(), nothing, Attempt(), known)

    def learn(self, run: Run) -> None:
        """Know what was found of the same data elsewhere."""
        self.loader_info.learn(run.loader_info)
        if self.validation_info and run.validation_info:
            self.validation_info.learn(run.validation_info)

    def accumulating(self) -> Run:
        """Return the run with gradients of earlier batches in its step; itself if it has them."""
        if (self.program.accumulate_grad_batches or 1) > 1:
            return self
        return replace(self, program=replace(self.program, accumulate_grad_batches=2))

    def of_kinds(self, training: Curve, validation: Curve | None = None) -> Run:
        """Return the run with its programs on the kinds of batches that are predicted."""
        run, evaluation = replace(self, program=self.program.of_kind(training.kind)), self.evaluation.value
        if validation is None or evaluation is None:
            return run
        program = evaluation.program.of_kind(validation.kind)
        return replace(run, evaluation=Attempt(replace(evaluation, program=program)))

    def with_programs(self, change: Callable[[LightningProgram], LightningProgram]) -> Run:
        """Return the run with its programs changed."""
        evaluation = self.evaluation
        if evaluation.value is not None:
            evaluation = Attempt(replace(evaluation.value, program=change(evaluation.value.program)))
        return replace(self, program=change(self.program), evaluation=evaluation)


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
        workers: processes that prepare its batches; None if there are none.
        kept_bytes: memory of this process that forked workers keep while training changes it.
        between: bytes on the CPU between two steps by part, without the module's own.
        collates: whether a batch is there twice while it is collated, in this process.
        objects_per_sample: bytes of Python objects of each sample that is collated in this process, on the CPU.
        checkpoint: bytes of the host to save the weights and the optimizer state of another device.
        saved_parts: parts of the training that its checkpoints hold.
        unsaved_bytes: of the parameters and buffers, what its checkpoints do not hold; below 0 if they hold more.
        made_to_save_bytes: of tensors that a hook makes for a checkpoint.
        notes_on_saving: what had to be assumed of its checkpoints.
        host: what the host offers; None on the CPU, where it is the device.
        shared: what /dev/shm offers; None without one.
        notes: what had to be assumed, in plain words.
        kept: what each batch leaves behind.
        trims: whether glibc is made to return freed blocks while it runs.
        differ: whether its batches differ in size; what its GPU then caches over an epoch is known in ``epochs``.
        epochs: by batch size, epochs that were replayed.
    """

    run: Run
    prediction: Curve
    budget: Budget
    request: Request
    validation: ValidationRun | None = None
    avoids_single_sample: bool = False
    extra: Mapping[str, int] = field(default_factory=dict)
    workers: Workers | None = None
    kept_bytes: int = 0
    between: tuple[tuple[str, int], ...] = ()
    collates: bool = False
    objects_per_sample: int = 0
    checkpoint: tuple[int, int] = (0, 0)
    saved_parts: tuple[str, ...] = ()
    unsaved_bytes: int = 0
    made_to_save_bytes: int = 0
    notes_on_saving: tuple[str, ...] = ()
    host: Budget | None = None
    shared: Budget | None = None
    notes: tuple[str, ...] = ()
    kept: tuple[Kept, ...] = ()
    trims: bool = False
    differ: bool = False
    epochs: Mapping[int, CacheEpoch] = field(default_factory=dict)

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
        """Validation, if its likely peak is larger than the step's; its most, if one of the two is not known."""
        step, validation = self.prediction.footprint_at(batch_size), self.validation
        if validation is None:
            return None
        ranks = [(each.peak_device_bytes, each.most_device_bytes) for each in (validation.footprint, step)]
        if step.is_partial or validation.footprint.is_partial:
            ranks = [rank[::-1] for rank in ranks]
        return validation if ranks[0] > ranks[1] else None

    def footprint_at(self, batch_size: int) -> Footprint:
        """The memory of the run at a batch size: of its training step, or of validation if that takes more."""
        most, validation = self._step_at(batch_size), self._larger_validation(batch_size)
        if self.collates and validation is None:
            batch = self.step.expected_batch(batch_size)[1]
            collating = self._between_steps(most, "collate", batch=batch, temporaries=batch)
            most = max(most, collating, key=lambda each: each.most_device_bytes)
        objects = self._object_bytes(batch_size) if validation is None else 0
        if validation is not None:
            note = f"the peak is in validation, at its batch size of {validation.batch_size}"
            notes = (note, *most.notes, *validation.footprint.notes)
            most = _joined(replace(validation.footprint, batch_size=batch_size, notes=notes), most, "a training step")
        elif self.validation is not None:
            most = _joined(most, self.validation.footprint, "validation")
        most = self.with_extra(most.plus_outside(objects) if objects else most)
        if objects >= WORTH_A_NOTE and objects > _WORTH_A_NOTE * most.peak_device_bytes:
            note = f"at most, {format_bytes(objects)} are objects of the samples, which are collated in this process"
            most = replace(most, notes=(*most.notes, note))
        return replace(most, notes=tuple(dict.fromkeys((*most.notes, *self.notes))))

    @property
    def note_on_cache(self) -> tuple[str, ...]:
        """Note that the cache of its device may grow over an epoch; see `note_on_cache`."""
        return note_on_cache(self.prediction.settings) if self.differ else ()

    def _step_at(self, batch_size: int) -> Footprint:
        """The memory of the training step, with what is cached over an epoch.

        An epoch that fails is taken to fail with batches that are a little smaller, too.
        """
        step, epochs = self.prediction.footprint_at(batch_size), self.epochs
        near = min((size for size, each in epochs.items() if not each.fits and _NEAR * size < batch_size), default=0)
        epoch = epochs.get(batch_size) or epochs.get(near)
        if epoch:
            return step.over(epoch)
        return replace(step, notes=(*step.notes, *self.note_on_cache))

    def saving_at(self, batch_size: int) -> Footprint | None:
        """The memory of the run while a checkpoint is saved, as far as that is on its device. None if nothing is.

        Lightning writes a checkpoint to a buffer of the host first, at the end of an epoch or of a step; a thread does
        it from a copy on the device, while training goes on. Checked on 2.5.0 (which made no such copy) to 2.6.6.
        """
        saved, step = self.saved_parts, self.prediction.footprint_at(batch_size)
        copies = callbacks.copies_saved(self.facts)
        if saved and copies and not self.run.program.layout:
            buffers = 1 if self.facts.device.type == "cpu" else 0
            content = sum(step.parts.get(part, 0) for part in saved) - self.unsaved_bytes
            copied = max(0, content) * (copies + buffers)
            return replace(self.with_extra(step.plus(copied, "checkpoint")), phase="checkpoint")
        if not saved or not self.between:
            return None
        parts = self._between_steps(step, "checkpoint").parts
        buffer = max(0, sum(parts.get(part, 0) for part in saved) - self.unsaved_bytes)
        more = {"checkpoint": buffer, "temporaries": self.made_to_save_bytes}
        saving = self.with_extra(self._between_steps(step, "checkpoint", **more))
        return replace(saving, notes=(*saving.notes, *self.notes_on_saving))

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
        if self.workers and not self.host:
            ahead = self.workers.ahead_bytes(footprint.batch_size, self._validation_size)
            own = self._workers_bytes(footprint.batch_size)
            footprint = footprint.plus(ahead, "prefetched").plus_range(own, "workers")
        return footprint

    def with_objects(self, step: Footprint) -> Footprint:
        """A training step with the objects of the samples that are collated for it."""
        objects = self._object_bytes(step.batch_size)
        return step.plus_outside(objects) if objects else step

    def _object_bytes(self, batch_size: int) -> int:
        return _BATCHES_OF_OBJECTS * self.objects_per_sample * batch_size

    @property
    def _validation_size(self) -> int:
        return self.validation.batch_size if self.validation else 0

    def _workers_bytes(self, batch_size: int) -> Range[int]:
        if self.workers is None:
            return NOTHING
        return self.workers.own_bytes(batch_size, self._validation_size) + Range.exactly(self.kept_bytes)

    def host_at(self, batch_size: int) -> HostUse | None:
        """Memory of the host that a batch size takes; None if that is nothing, or all of it is the device's."""
        shared = self.workers.shared_bytes(batch_size, self._validation_size) if self.workers else 0
        if self.host is None and not shared:
            return None
        _, likely, most = self._workers_bytes(batch_size)
        pinned = self.workers.pinned_bytes(batch_size, self._validation_size) if self.workers else 0
        saved, of_states = sum(self.checkpoint), self.checkpoint[1]
        moved = self.prediction.trace_at(batch_size).moved_bytes if self.run.program.around else 0
        parts = {"prefetched": shared, "pinned": pinned, "workers": likely, "checkpoint": saved, "offloaded": moved}
        present = {part: nbytes for part, nbytes in parts.items() if nbytes}
        if not present:
            return None
        remedies = self.workers.remedies(batch_size, self._validation_size) if self.workers else ()
        less = {"ModelCheckpoint(save_weights_only=True)": of_states}
        if self.run.program.layout:
            less['a sharded checkpoint (state_dict_type="sharded", save_distributed_checkpoint=True)'] = saved
        of_saving = tuple(f"{how} needs {format_bytes(nbytes)} less" for how, nbytes in less.items() if nbytes)
        others = saved - saved // ranks_of_host(self.facts)  # of ranks that save nothing, which have a share each
        whole = sum(present.values()) + most - likely - others
        return HostUse(present if self.host else {}, whole, self.host, shared, self.shared, remedies, of_saving)

    def within_host(self) -> Request:
        """The request, with the largest size, at least the loader's own, at which the host holds what workers take."""
        request = self.request
        if self.workers is None or not request.free_to_choose:
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


_NEAR = 0.75


# -- reading and predicting


@dataclass(frozen=True)
class Reading:
    """A run as it is read, before its steps are captured."""

    run: Run
    batch_size: int
    request_of: Callable[[str], Request]
    budget: Budget
    avoids_single_sample: bool
    notes: tuple[str, ...]
    differ: bool
    process_bytes: Range[int]
    workers: Workers | None
    host: Budget | None
    shared: Budget | None
    fresh: bool
    object_bytes: int
    insists: bool

    def request_on(self, traces: Collection[Trace], fixed: str) -> Request:
        """The request, once it is known whether a schedule counts steps."""
        request, program = self.request_of(fixed), self.run.program
        if self.insists or not program.trains or not request.may_grow:
            return request
        counts = any(trace.counts_steps for trace in traces) or attempt(lambda: counts_steps(program.module)).value
        return replace(request, kept_by="scheduler") if counts else request

    def next_size(self, traces: Sequence[Trace]) -> int:
        """The batch size that will be chosen, as far as two traces tell: what a GPU's context takes is left out."""
        run = self.run
        prediction = Curve(Terms(self.rules, self.process_bytes), "fake", grow(traces))
        request = self.request_on(traces, run.loader_info.fixed_because)
        return decide(prediction.footprint_at, self.budget, request).batch_size

    @property
    def rules(self) -> AllocatorSettings:
        """Rules of the allocator on the run's device."""
        return AllocatorSettings.for_device(self.run.facts.device.type, os.environ)


def _layout_of(strategy: object) -> Layout | None:
    """The ranks of a strategy that shards, else None."""
    if not shards(strategy):
        return None
    from lightning_memguard.training.strategies.sharded import Layout

    return Layout.of(strategy)


@dataclass(frozen=True)
class RunReader:
    """A run that is to be read: its objects, and what its own process knows of its device.

    Attributes:
        budget: what the device offers.
        held_bytes: this training's bytes that are there already.
        process_bytes: see `process_bytes`; nothing if the device is not the CPU.
        callback_bytes: bytes that other callbacks hold on the device.
    """

    trainer: Trainer
    module: LightningModule
    settings: GuardSettings
    facts: RunFacts
    budget: Budget
    held_bytes: int
    process_bytes: Range[int]
    gpu: Gpu | None
    callback_bytes: int

    @classmethod
    def of(cls, trainer: Trainer, module: LightningModule, settings: GuardSettings, facts: RunFacts) -> RunReader:
        """Read the device."""
        device = facts.device
        return cls(
            trainer,
            module,
            settings,
            facts,
            *_budget(module, facts, settings),
            process_bytes(module.parameters(), torch.get_num_threads()) if device.type == "cpu" else NOTHING,
            gpu_of(device),
            callbacks.held_bytes(facts.callbacks, module, device, averaging=False),
        )

    def program(self, info: LoaderInfo, batches: tuple[Batches, ...]) -> LightningProgram:
        """The run's step on batches of its data."""
        facts, settings, is_fit = self.facts, self.settings, self.facts.stage == "fit"
        program = LightningProgram(
            self.trainer,
            self.module,
            batches[0] if is_fit and batches else batches,
            facts.device,
            batches_per_epoch=info.batches_per_epoch if info.is_counted else None,
            datamodule=facts.datamodule,
            # if MemGuard sets the accumulation, gradients are there through the next forward pass: the larger case
            accumulate_grad_batches=(
                2 if settings.keep_effective_batch_size and is_fit else callbacks.accumulation(facts)
            ),
            gpu=self.gpu,
            stage=facts.stage,
            callback_bytes=self.callback_bytes,
            strategy=facts.strategy,
            layout=_layout_of(facts.strategy),
            loaders_at=partial(loaders_at, facts, info),
        )
        always = is_fit and settings.mode == "tune" and settings.offload == "always"
        if not always:
            return program
        from lightning_memguard.training.offload.predicted import offloaded

        return offloaded(program)

    def evaluation(
        self, training: LightningProgram, info: LoaderInfo, batches: tuple[Batches, ...]
    ) -> LightningProgram:
        """A fit's validation on batches of its data, next to its training."""
        return replace(
            training,
            batches=batches,
            batches_per_epoch=info.batches_per_epoch,
            stage="validate",
            setup_stage="fit",
            callback_bytes=0,
            loaders_at=partial(loaders_at, self.facts, info),
        )

    def run_of(self, handed: HandedRun) -> Run:
        """The run in this process, if a child has read it."""
        info, validation_info = handed.loader_info, handed.validation_info
        batches, *of_validation = attempt(lambda: unpacked(handed.batches)).value or [()]
        program, size = self.program(info, batches), handed.evaluation.value
        evaluation = Attempt[Evaluation](reason=handed.evaluation.reason)
        if validation_info is not None and size is not None:
            its_program = self.evaluation(program, validation_info, *(of_validation or [()]))
            evaluation = Attempt(Evaluation(its_program, size))
        return Run(self.facts, info, program, evaluation, validation_info)


@dataclass(frozen=True)
class HandedRun:
    """What the run's own process gets of a run that a child has read.

    Attributes:
        batches: those of its step and of its validation, without the samples that make others; packed.
        evaluation: the batch size of its validation, or why there is none.
    """

    loader_info: LoaderInfo
    validation_info: LoaderInfo | None
    batches: bytes
    evaluation: Attempt[int]

    @classmethod
    def of(cls, profile: RunProfile) -> HandedRun:
        """Take what can be sent of the run behind a profile."""
        run = profile.attached_to(profile.run).run  # on the kinds of batches that are predicted
        evaluation, known = run.evaluation.value, run.detached()
        programs = [run.program, *([evaluation.program] if evaluation else [])]
        batches = attempt(lambda: packed(tuple(_sendable(each).families for each in programs)))
        size = Attempt(evaluation.batch_size if evaluation else None, run.evaluation.reason)
        return cls(known.loader_info, known.validation_info, batches.value or b"", size)


_MOST_SENT = 64 << 20  # bytes of batches


def _sendable(program: LightningProgram) -> LightningProgram:
    """The program without samples; on batches that are known by their shapes alone if they are large."""
    alone = program.without_draws()
    batches = [batch for family in alone.families for batch in (family.small, family.large)]
    tensors = [each for batch in batches for each in tensors_in(batch) if is_dense(each)]
    storages = {storage_address(each): each.untyped_storage().nbytes() for each in tensors}
    return alone if sum(storages.values()) <= _MOST_SENT else alone.without_samples()


def read_run(reader: RunReader) -> Reading:
    """Read the data of a run, and draw samples.

    Raises:
        CannotTraceError: there is no data to predict from.
    """
    trainer, module, settings, facts = reader.trainer, reader.module, reader.settings, reader.facts
    is_fit, loader_info = facts.stage == "fit", find(facts, facts.role)
    samples = sample(loader_info)
    # Lightning fetches one batch ahead of a stream without a length
    loader_info = replace(loader_info, is_counted=loader_info.batches_per_epoch is not None).with_ends(samples.ends)
    elsewhere = attempt(lambda: held_elsewhere(module, loader_info.batch_size, facts.callbacks)).value or ""
    holders = module, facts.datamodule, *facts.callbacks
    was_set = loader_info.was_set or bool(attempt(lambda: is_kept_as_one(holders)).value)
    kept_by = _kept_by(facts, settings, was_set=was_set)
    is_kept = settings.mode != "tune" or elsewhere or kept_by
    size = (loader_info.full_size if is_kept else 0) or samples.batch_size
    program = reader.program(loader_info, samples.batches)
    validation_info, evaluation = Attempt[LoaderInfo](), Attempt[Evaluation]()
    if is_fit and facts.validates:
        validation_info = attempt(lambda: find(facts, "val"))
        evaluation = attempt(lambda: _evaluation(validation_info.unwrap(), reader, program))
    its = evaluation.value.program.families if evaluation.value else ()
    of_loops = (loader_info, samples.batches), (validation_info.value, its)
    workers = workers_of(facts, *of_loops, sized=loader_info.is_counted, epochs=trainer.max_epochs)
    host, in_shared = host_budgets(facts, settings.host_budget_bytes, settings.margin)
    return Reading(
        Run(facts, loader_info, program, evaluation, validation_info.value),
        size,
        lambda fixed: replace(
            _request(facts, loader_info, samples, settings, size, fixed or elsewhere),
            kept_by=kept_by,
            was_set=was_set,
        ),
        reader.budget,
        avoids_single_sample=any(isinstance(each, AnyBatchNorm) for each in module.modules()),
        notes=samples.notes,
        differ=samples.differ,
        process_bytes=reader.process_bytes,
        workers=workers,
        host=host,
        shared=in_shared,
        fresh=samples.fresh,
        object_bytes=samples.object_bytes,
        insists=settings.steps_to_keep is None,
    )


def _kept_by(facts: RunFacts, settings: GuardSettings, *, was_set: bool) -> LimitedBy | None:
    """Return why a batch size that fits is kept; None if it may grow."""
    by_steps = settings.keep_effective_batch_size  # the samples of a step are set: its batches may be any
    if facts.stage != "fit" or settings.batch_size == "keep":
        return "request"
    if settings.batch_size == "auto" and was_set and not by_steps:
        return "request"
    return "max_steps" if facts.max_steps > 0 and settings.steps_to_keep is not None else None


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
    notes: tuple[str, ...] = ()
    if validation.reason:
        notes = (Note("no validation", f"validation was not predicted: {validation.reason}"),)
    if validation.value and validation.value.prediction.method in PARTIAL:
        why = "; ".join(validation.value.prediction.notes)
        notes = (Note("no validation", f"the memory of validation's activations is unknown: {why}"),)
    computing = callbacks.hooks_that_compute(run.facts.callbacks, but=partial(runs_here, module=run.program.module))
    hooks = ", ".join(computing)
    notes += (f"memory that callbacks take as they run is measured, not predicted: {hooks}",) if hooks else ()
    notes += callbacks.notes_on_profiler(getattr(run.program.trainer, "profiler", None))
    trace, plain = next(iter(prediction.surveyed.values()), None), not (run.program.layout or prediction.kinds)
    on_cpu = trace is not None and plain and run.facts.device.type == "cpu" and run.program.trains
    between = tuple(_alive_between_steps(trace, gradients=True)) if on_cpu and trace else ()
    module = run.program.module
    savers = callbacks.hooks_that_save(run.facts, module)
    saved = callbacks.saved_parts(run.facts, savers)
    unsaved, made = (0, 0)
    datamodule = getattr(run.program.trainer, "datamodule", None)
    if saved and not run.program.layout:
        unsaved, made = callbacks.unsaved_bytes(module, datamodule)
    return RunProfile(
        run,
        prediction,
        reading.budget,
        replace(reading.request_on(prediction.surveyed.values(), fixed), batch_size=size),
        validation.value,
        reading.avoids_single_sample,
        workers=reading.workers,
        kept_bytes=_kept_by_workers(reading, between),
        between=between,
        collates=reading.fresh and not (reading.workers and reading.workers.loop) and bool(between),
        objects_per_sample=reading.object_bytes if on_cpu and not (reading.workers and reading.workers.loop) else 0,
        checkpoint=_checkpoint_bytes(run, prediction, saved, unsaved) if reading.host else (0, 0),
        saved_parts=saved,
        unsaved_bytes=unsaved,
        made_to_save_bytes=made,
        notes_on_saving=(
            *((f"{', '.join(savers)} saves the training, whose buffer in memory is included",) if savers else ()),
            *callbacks.notes_on_hyperparameters(module, datamodule),
        )
        if saved
        else (),
        host=reading.host,
        shared=reading.shared,
        notes=(*reading.notes, *notes),
        kept=tuple(
            kept
            for each in (prediction, *([validation.value.prediction] if validation.value else []))
            for kept in fit_kept((trace.batch_size, trace.kept) for trace in each.surveyed.values())
        ),
        differ=reading.differ,
    )


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


def _checkpoint_bytes(run: Run, training: Curve, saved: Sequence[str], unsaved: int) -> tuple[int, int]:
    """Bytes of the host for saving weights and optimizer state: a buffer, and under sharding what is gathered first."""
    trace = next(iter(training.surveyed.values()), None)
    layout = run.program.layout
    if not saved or trace is None or (layout and layout.saves_shards):
        return 0, 0
    model = run.program.module
    weights = max(0, part_bytes({"model": tensors_of(model)}, "cpu")["model"] - unsaved)
    step = training.footprint_at(trace.batch_size)
    own = max(1, step.parts["parameters"] + step.parts["buffers"])
    state = sum(nbytes for part, nbytes in _alive_between_steps(trace, gradients=False) if part in saved)
    whole = (2 if layout else 1) * (weights or own * (layout.ranks if layout else 1))
    return whole, int(whole * state / own)


def _why_one_size(prediction: Curve, *, asked: bool) -> str:
    """Why a step's memory is known at one batch size or at none; empty if others were not ``asked`` for."""
    if prediction.method in PARTIAL:
        return prediction.stopped or "; ".join(prediction.notes) or "the step could not be run"
    if not asked:
        return ""
    sizes = ", ".join(map(str, prediction.surveyed))
    ran = f"the step runs at batch size {sizes}" if sizes else "the step runs at the batch size asked for"
    return f"{ran}, but not at the others that were tried"


def _budget(module: LightningModule, facts: RunFacts, settings: GuardSettings) -> tuple[Budget, int]:
    """Read the budget, and this training's bytes that are there already: these are predicted, so they count as free."""
    on_cpu = facts.device.type == "cpu"
    own = tensors_of(module) if on_cpu else [*module.parameters(), *module.buffers()]
    held = part_bytes({"model": own}, facts.device.type)["model"]
    held += callbacks.held_bytes(facts.callbacks, module, facts.device, averaging=True)
    margin, given = settings.margin, settings.budget_bytes
    if facts.device.type == "cpu" and settings.host_budget_bytes is not None:
        given = min(given or settings.host_budget_bytes, settings.host_budget_bytes)
    return read_budget(facts.device, budget=given, margin=margin, already_held_bytes=held), held


def _evaluation(info: LoaderInfo, reader: RunReader, training: LightningProgram) -> Evaluation:
    samples = sample(info)
    return Evaluation(reader.evaluation(training, info, samples.batches), info.full_size or samples.batch_size)


def _validation(run: Run, training: Curve) -> ValidationRun:
    """Predict the fit's validation, next to everything that training keeps."""
    evaluation, info = run.evaluation.unwrap(), run.validation_info
    terms = Terms(training.settings)
    size, prediction = predict_largest(evaluation.program, evaluation.batch_size, terms, scalable=False)
    unit, is_fixed = (info.unit, bool(info.fixed_because)) if info else (1, True)
    return ValidationRun(_next_to(training, run, prediction), size, unit, is_fixed)


def _joined(larger: Footprint, other: Footprint, name: str) -> Footprint:
    """The footprint of which more is likely, up to the most of the other."""
    if other.is_partial or other.most_device_bytes <= larger.most_device_bytes:
        return larger
    return larger.or_at_most(other, f"at most, {name} takes {format_bytes(other.most_device_bytes)}")


def _next_to(training: Curve, run: Run, validation: Curve) -> Curve:
    gradients = callbacks.validates_mid_step(run.facts, run.program.accumulate_grad_batches or 1)
    # variants that depend on values have no trace of their own size
    trace = next(iter(training.surveyed.values()), None)
    trace = trace or Prediction(run.program, training).trace_at(run.loader_info.batch_size or 1)
    return validation.on_terms(held=tuple(_alive_between_steps(trace, gradients=gradients)))


def _alive_between_steps(trace: Trace, *, gradients: bool) -> Iterator[tuple[str, int]]:
    """Yield the bytes on the device between two training steps by part, without the module's own."""
    parts = {"optimizer_state", *OPTIONAL_PARTS, *(["gradients"] if gradients else [])}
    events = trace.only("high").events
    alive = {event.block: event for event in events if event.action == "alloc" and event.part in parts}
    for event in events:
        if event.action == "free":
            alive.pop(event.block, None)
    yield from ((event.part, event.nbytes) for event in alive.values())


def _request(
    facts: RunFacts, loader_info: LoaderInfo, samples: RunSamples, settings: GuardSettings, size: int, fixed: str
) -> Request:
    limits = settings
    if facts.stage != "fit":  # a limit of growth alone: what an evaluation gives does not depend on its batch size
        most = settings.max_batch_size and max(settings.max_batch_size, size)
        limits = replace(settings, keep_effective_batch_size=None, max_batch_size=most)
    largest = largest_for(facts, loader_info)
    request = limits.request(
        size,
        unit=samples.unit,
        dataset_size=largest,
        accumulate_grad_batches=facts.accumulate_grad_batches,
        ranks=facts.data_ranks,
    )
    free = settings.mode == "tune" and not fixed
    limit, min_steps = limit_of(facts, loader_info, largest), settings.steps_to_keep
    run_size, run_limit = epoch_size_for(facts, loader_info, min_steps)
    return replace(
        request,
        free_to_choose=free,
        prefers_fast=free and settings.batch_size == "fastest",
        fixed_because=fixed,
        dataset_limit=limit,
        run_size=run_size,
        run_limit=run_limit,
    )


MOST_IN_A_BATCH = 1 << 20
_WORTH_A_NOTE = 0.1
_BATCHES_OF_OBJECTS = 2  # that of the batch before is freed, and may stay in glibc's heap, in pieces
