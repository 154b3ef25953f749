"""Run as it is read before its steps are captured: its settings, its data and samples, what its device offers.

The data is read in a child: whatever the user's code moves there ends with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_memguard.core.batch.batches import Batches
from lightning_memguard.core.batch.nesting import is_dense, tensors_in
from lightning_memguard.core.capture.curve import Curve, Terms
from lightning_memguard.core.capture.holders import tensors_of
from lightning_memguard.core.capture.recorder import part_bytes
from lightning_memguard.core.decision.decision import Budget, LimitedBy, Request, decide
from lightning_memguard.core.device.budget import read_budget
from lightning_memguard.core.device.process import process_bytes
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.isolation.sending import packed, unpacked
from lightning_memguard.core.range import NOTHING, Range
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.simulation.fake import storage_address
from lightning_memguard.core.simulation.fake_cuda import gpu_of
from lightning_memguard.core.torch_port import AnyBatchNorm
from lightning_memguard.core.trace.growth import grow
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.training.adapter import callbacks
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.data.loaders import LoaderInfo, epoch_size_for, find, largest_for, limit_of, loaders_at
from lightning_memguard.training.data.samples import RunSamples, sample
from lightning_memguard.training.data.set_sizes import is_kept_as_one
from lightning_memguard.training.data.sizes_elsewhere import counts_steps, held_elsewhere
from lightning_memguard.training.data.workers import Workers, host_budgets, workers_of
from lightning_memguard.training.facts.lightning_types import shards
from lightning_memguard.training.facts.ranks import Attempt, attempt
from lightning_memguard.training.facts.run_facts import RunFacts
from lightning_memguard.training.run.guard_settings import GuardSettings

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
    """Objects of a run that stay in its own process. A child that has read it sends a `HandedRun` of it.

    Attributes:
        facts: its settings.
        loader_info: its data.
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
        """Return what is known of the data, which can be sent; the rest is None until `RunProfile.attached_to`."""
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
        program = self.program.accumulating
        return self if program is self.program else replace(self, program=program)

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
class Reading:
    """A run as a `RunReader` reads it, before its steps are captured.

    Attributes:
        batch_size: the size to capture at: the loader's, or one that was kept elsewhere.
        request_of: returns what was asked for, given why the size cannot be changed; empty if it can.
        budget: what its device offers to this rank.
        avoids_single_sample: whether a last batch of one sample may fail.
        notes: what had to be assumed of its data.
        differ: whether its batches differ in size.
        process_bytes: see `process_bytes`; nothing if the device is not the CPU.
        workers: processes that prepare its batches; None if there are none.
        host: what the host offers; None on the CPU, where it is the device.
        shared: what /dev/shm offers; None without one.
        fresh: whether its samples are made when they are asked for, so that a batch of them is there twice.
        object_bytes: bytes of Python objects of a sample.
        insists: whether the user asked for a batch size whatever it does to the steps of an epoch.
    """

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
    """Part of a run, read in a child, that its own process gets.

    Attributes:
        batches: those of its step and of its validation, without the samples that make others; packed.
        evaluation: the batch size of its validation, or why there is none.
    """

    loader_info: LoaderInfo
    validation_info: LoaderInfo | None
    batches: bytes
    evaluation: Attempt[int]

    @classmethod
    def of(cls, run: Run) -> HandedRun:
        """Take what can be sent of a run."""
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


def _layout_of(strategy: object) -> Layout | None:
    """The ranks of a strategy that shards, else None."""
    if not shards(strategy):
        return None
    from lightning_memguard.training.strategies.sharded import Layout

    return Layout.of(strategy)
