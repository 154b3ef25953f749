"""A run that has not started -> its Decision: the stages of `lightning_memguard.core`, joined for a Trainer."""

from __future__ import annotations

import functools
import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from torch.nn.modules.batchnorm import _BatchNorm

from lightning_memguard.core.capture.fake_cuda import gpu_of
from lightning_memguard.core.capture.predict import Prediction, predict
from lightning_memguard.core.capture.recorder import part_bytes
from lightning_memguard.core.decision.advice import shortlist, what_would_fit
from lightning_memguard.core.decision.decision import Budget, Decision, Limits, Request, decide
from lightning_memguard.core.device.budget import read_budget
from lightning_memguard.core.device.context import context_bytes
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import OPTIONAL_PARTS, Trace
from lightning_memguard.errors import CannotTraceError, DoesNotFitError, MemGuardError
from lightning_memguard.training.adapter import callbacks, sharded
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.adapter.ranks import Attempt, Ranks, attempt, shared
from lightning_memguard.training.adapter.run_facts import ROLES, Role, RunFacts, Stage, read_run_facts
from lightning_memguard.training.data.loaders import LoaderInfo, find, largest_for, leaves_one, loaders_at
from lightning_memguard.training.data.samples import RunSamples, sample
from lightning_memguard.training.planning.advise import Advised, try_remedies
from lightning_memguard.training.planning.search import largest_that_runs
from lightning_memguard.units import format_bytes

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer


@dataclass(frozen=True)
class GuardSettings(Limits):
    """MemGuard's settings, checked; see there."""

    mode: Literal["tune", "check"] = "tune"


@dataclass(frozen=True)
class ValidationRun:
    """A fit's validation, at a batch size of its own."""

    loader_info: LoaderInfo
    prediction: Prediction
    batch_size: int

    @property
    def footprint(self) -> Footprint:
        """Its memory at its size."""
        return self.prediction.footprint_at(self.batch_size)


@dataclass(frozen=True)
class RunProfile:
    """All that is known of a run before anything is decided.

    Attributes:
        budget: what its device offers to this rank.
        request: what was asked for, and what prevents it.
        validation: the fit's validation; None where there is none, or none could be predicted.
        validation_info: the fit's validation data, predicted or not.
        held_bytes: what of this training is on the device already.
        callback_bytes: what other callbacks hold there, without Lightning's averages.
        avoids_single_sample: whether a last batch of one sample may fail.
        extra: bytes found after the steps were predicted, by part.
        notes: what had to be assumed, in plain words.
    """

    facts: RunFacts
    loader_info: LoaderInfo
    prediction: Prediction
    budget: Budget
    request: Request
    validation: ValidationRun | None = None
    validation_info: LoaderInfo | None = None
    held_bytes: int = 0
    callback_bytes: int = 0
    avoids_single_sample: bool = False
    extra: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def trace_at(self, batch_size: int) -> Trace:
        """The events behind `footprint_at`."""
        most = self._larger_validation(batch_size)
        trace = most.prediction.own_trace_at(most.batch_size) if most else self.prediction.own_trace_at(batch_size)
        return trace.plus(self.extra)

    def _larger_validation(self, batch_size: int) -> ValidationRun | None:
        """Validation, where it takes more than the training step."""
        step, validation = self.prediction.footprint_at(batch_size), self.validation
        return validation if validation and validation.footprint.most_device_bytes > step.most_device_bytes else None

    def footprint_at(self, batch_size: int) -> Footprint:
        """The memory of the run at a batch size: of its training step, or of validation where that takes more."""
        most, validation = self.prediction.footprint_at(batch_size), self._larger_validation(batch_size)
        if validation is not None:
            note = f"the peak is in validation, at its batch size of {validation.batch_size}"
            notes = (note, *most.notes, *validation.footprint.notes)
            most = replace(validation.footprint, batch_size=batch_size, notes=notes)
        for part, nbytes in self.extra.items():
            most = most.plus(nbytes, part)
        return replace(most, notes=tuple(dict.fromkeys((*most.notes, *self.notes))))


@dataclass(frozen=True)
class Tuning:
    """The result of `tune`. ``profile`` is None where the run was not tuned; ``decision.reason`` says why."""

    decision: Decision
    role: Role = "train"
    profile: RunProfile | None = None
    ranks: Ranks = field(default_factory=Ranks)


_MOST_ROUNDS = 5
_ADVICE_SECONDS = 20.0  # the run cannot start: its user should soon know why


def tune(trainer: Trainer, module: LightningModule, settings: GuardSettings, stage: Stage = "fit") -> Tuning:
    """Predict a run's memory and choose its batch size; change nothing. All ranks must call it.

    Raises:
        DoesNotFitError: ``mode`` is ``"tune"`` and even the smallest size does not fit, on some rank.
    """
    try:
        facts = attempt(lambda: _facts_of(trainer, stage)).unwrap()
        ranks = Ranks.of(facts)
        profile = ranks.agree(attempt(lambda: _profile_run(trainer, module, settings, facts)))
        profile = replace(profile, budget=shared(ranks, profile.budget, facts.device, profile.held_bytes))
        free = all(ranks.gather(profile.request.free_to_choose))
        profile = replace(profile, request=replace(profile.request, free_to_choose=free))
        try:
            decision, profile = choose(profile, ranks, settings)
        except DoesNotFitError as error:
            raise _with_advice(error, profile) from None
        return Tuning(decision, facts.role, _without_samples(profile), ranks)
    except CannotTraceError as error:
        accumulate = trainer.accumulate_grad_batches
        return Tuning(Decision(0, 0, accumulate, "stepped aside", None, None, "request", str(error)), ROLES[stage])
    finally:
        gc.collect()  # captures leave cycles, which would take memory while it trains


def _without_samples(profile: RunProfile) -> RunProfile:
    """Let go of the samples drawn: they are not needed any more, and would take memory while it trains."""
    validation = profile.validation
    if validation is not None:
        validation = replace(validation, prediction=_with_shapes_alone(validation.prediction))
    return replace(profile, prediction=_with_shapes_alone(profile.prediction), validation=validation)


def _with_shapes_alone(prediction: Prediction) -> Prediction:
    if prediction.growth is None or prediction.method == "real":  # another size may still have to be run
        return prediction
    program = attempt(prediction.program.without_samples).value  # None for a kind of tensor without a meta copy
    return replace(prediction, program=program) if program else prediction


def _with_advice(error: DoesNotFitError, profile: RunProfile) -> DoesNotFitError:
    """The same error with what would make it fit on this rank, where that is known; no rank waits for another."""
    advised = attempt(lambda: _remedies(profile)).value
    if not advised or not advised.advice:
        return error
    return error.with_advice(advised.advice, what_would_fit(shortlist(advised.advice), advised.not_tried))


def _remedies(profile: RunProfile) -> Advised | None:
    """None where another rank is too small, or validation alone does not fit."""
    size, usable = profile.request.smallest_batch_size, profile.budget.usable_bytes
    if profile.prediction.footprint_at(size).most_device_bytes <= usable:
        return None
    return try_remedies(profile.prediction, size, profile.budget, most_seconds=_ADVICE_SECONDS)


def recheck(tuning: Tuning, others: Iterable[Callback], module: LightningModule, settings: GuardSettings) -> Tuning:
    """Count memory that other callbacks took since setup; choose again if needed. All ranks must call it."""
    profile, ranks, before = tuning.profile, tuning.ranks, tuning.decision
    if profile is None:
        return tuning
    device = profile.facts.device
    held = attempt(lambda: callbacks.held_bytes(others, module, device, averaging=False)).value
    extra = (held or 0) - profile.callback_bytes
    if max(ranks.gather(extra)) <= 0:
        return tuning
    profile = replace(profile, extra={"callbacks": max(extra, 0)})
    larger = replace(before, footprint=profile.footprint_at(before.batch_size))
    if not profile.request.free_to_choose:
        return replace(tuning, profile=profile, decision=larger)
    capped = replace(profile, request=replace(profile.request, max_batch_size=before.batch_size))
    try:
        decision, chosen = choose(capped, ranks, settings)
    except MemGuardError:  # it may run out of memory now, but MemGuard does not end a fit that has started
        return replace(tuning, profile=profile, decision=larger)
    if decision.batch_size == before.batch_size:
        decision = replace(before, footprint=decision.footprint)
    else:
        reason = f"other callbacks have taken {format_bytes(extra)} on the device since setup"
        requested = before.requested_batch_size
        decision = replace(decision, requested_batch_size=requested, limited_by="memory", reason=reason)
    return replace(tuning, profile=chosen, decision=decision)


# -- what is known of a run


def _facts_of(trainer: Trainer, stage: Stage) -> RunFacts:
    facts = read_run_facts(trainer, stage)
    if callbacks.finds_batch_size(facts.callbacks):
        raise CannotTraceError("BatchSizeFinder chooses its batch size, by trial")
    return facts


def _profile_run(trainer: Trainer, module: LightningModule, settings: GuardSettings, facts: RunFacts) -> RunProfile:
    """Look at the data, draw samples, capture the steps, read the budget."""
    is_fit, device, loader_info = facts.stage == "fit", facts.device, find(facts, facts.role)
    samples = sample(loader_info)
    size = loader_info.batch_size or samples.batches[0].small_size
    callback_bytes = callbacks.held_bytes(facts.callbacks, module, device, averaging=False)
    program = LightningProgram(
        trainer,
        module,
        samples.batches[0] if is_fit else samples.batches,
        device,
        batches_per_epoch=_batches_per_epoch(loader_info),
        datamodule=facts.datamodule,
        # where MemGuard sets the accumulation, gradients are there through the next forward pass: the larger case
        accumulate_grad_batches=2 if settings.keep_effective_batch_size and is_fit else callbacks.accumulation(facts),
        gpu=gpu_of(device),
        stage=facts.stage,
        resident_blocks=(("callbacks", callback_bytes),),
        strategy=facts.strategy,
        loaders_at=functools.partial(loaders_at, facts, loader_info),
    )
    shards = sharded.shards_of(facts.strategy, facts.world_size)
    fixed = loader_info.fixed_because or (f"{shards.strategy} is predicted in part only" if shards else "")
    prediction = predict(program, size, AllocatorSettings.for_device(device.type, os.environ), scalable=not fixed)
    if shards:
        prediction = sharded.divide_by_rank(prediction, shards)
    fixed = fixed or ("" if prediction.scalable else "the memory of other batch sizes is not known")
    validation_info, attempted = Attempt[LoaderInfo](), Attempt[ValidationRun]()
    if is_fit and facts.validates:
        validation_info = attempt(lambda: find(facts, "val"))
        attempted = attempt(lambda: _validation(validation_info.unwrap(), facts, program, prediction))
    budget, held = _budget(module, facts, settings)
    # after the budget, which counts an open context as ours: measuring it opens it
    context, validation = context_bytes(device), attempted.value
    notes = (f"validation was not predicted: {attempted.reason}",) if attempted.reason else ()
    if validation is not None:
        validation = replace(validation, prediction=replace(validation.prediction, context_bytes=context))
    return RunProfile(
        facts,
        loader_info,
        replace(prediction, context_bytes=context),
        budget,
        _request(facts, loader_info, samples, settings, size, fixed),
        validation,
        validation_info.value,
        held,
        callback_bytes,
        avoids_single_sample=any(isinstance(each, _BatchNorm) for each in module.modules()),
        notes=(*samples.notes, *notes),
    )


def _budget(module: LightningModule, facts: RunFacts, settings: GuardSettings) -> tuple[Budget, int]:
    """What the device offers, and what of this training is there already: predicted as needed, it counts as free."""
    gc.collect()  # what predicting has loaded and left behind is gone before memory is read
    held = part_bytes({"model": [*module.parameters(), *module.buffers()]}, facts.device.type)["model"]
    held += callbacks.held_bytes(facts.callbacks, module, facts.device, averaging=True)
    margin, given = settings.margin, settings.budget_bytes
    return read_budget(facts.device, budget=given, margin=margin, already_held_bytes=held), held


def _batches_per_epoch(loader_info: LoaderInfo) -> Callable[[int], int | None] | None:
    return loader_info.batches if loader_info.dataset_size is not None else None


def _validation(info: LoaderInfo, facts: RunFacts, program: LightningProgram, training: Prediction) -> ValidationRun:
    """Predict the fit's validation, next to everything that training keeps."""
    batches = sample(info).batches
    size = info.batch_size or batches[0].small_size
    gradients = callbacks.validates_mid_step(facts, program.accumulate_grad_batches or 1)
    program = replace(
        program,
        batches=batches,
        batches_per_epoch=_batches_per_epoch(info),
        stage="validate",
        setup_stage="fit",
        loaders_at=functools.partial(loaders_at, facts, info),
        resident_blocks=tuple(_alive_between_steps(next(iter(training.traces.values())), gradients=gradients)),
    )
    prediction = predict(program, size, training.settings, scalable=False)
    return ValidationRun(info, replace(prediction, share=training.share), size)


def _alive_between_steps(trace: Trace, *, gradients: bool) -> Iterator[tuple[str, int]]:
    """What is on the device between two training steps besides the module, by part; validation clears the gradients."""
    parts = {"optimizer_state", *OPTIONAL_PARTS, *(["gradients"] if gradients else [])}
    alive = {event.block: event for event in trace.events if event.action == "alloc" and event.part in parts}
    for event in trace.events:
        if event.action == "free":
            alive.pop(event.block, None)
    yield from ((event.part, event.nbytes) for event in alive.values())


def _request(
    facts: RunFacts, loader_info: LoaderInfo, samples: RunSamples, settings: GuardSettings, size: int, fixed: str
) -> Request:
    limits = settings if facts.stage == "fit" else replace(settings, keep_effective_batch_size=None)
    largest = largest_for(facts, loader_info)
    request = limits.request(
        size,
        unit=math.lcm(loader_info.unit, samples.unit),
        dataset_size=samples.samples if largest is None else largest,
        accumulate_grad_batches=facts.accumulate_grad_batches,
        ranks=facts.world_size,
    )
    return replace(request, free_to_choose=settings.mode == "tune" and not fixed, fixed_because=fixed)


# -- choosing


def choose(profile: RunProfile, ranks: Ranks, settings: GuardSettings) -> tuple[Decision, RunProfile]:
    """Choose a batch size from what is known, the same on all ranks. All ranks must call it.

    Raises:
        DoesNotFitError: even the smallest size does not fit, on some rank.
        CannotTraceError: the ranks come to no size that runs on all of them.
    """
    asked = profile
    for _ in range(_MOST_ROUNDS):
        decision, chosen = ranks.agree(attempt(functools.partial(_choice, asked, settings)))
        sizes = ranks.gather((decision.batch_size, decision.validation_batch_size or 0))
        least, least_val = min(size for size, _ in sizes), min(size for _, size in sizes)
        if all(size == (least, least_val) for size in sizes):
            return _with_common_limit(decision, sizes, profile.request), chosen
        capped = replace(asked.request, max_batch_size=least) if asked.request.free_to_choose else asked.request
        validation = asked.validation
        if validation is not None and validation.batch_size > least_val > 0:
            validation = replace(validation, batch_size=least_val)
        asked = replace(asked, request=capped, validation=validation)
    raise CannotTraceError(f"the ranks could not agree on a batch size (last proposals: {sizes})")


def _with_common_limit(decision: Decision, sizes: list[tuple[int, int]], request: Request) -> Decision:
    """Where another rank set the size, that rank's memory limits it, not ``max_batch_size``."""
    if len(sizes) == 1 or decision.limited_by != "max_batch_size":
        return decision
    held_back = request.max_batch_size is None or decision.batch_size < request.max_batch_size
    return replace(decision, limited_by="memory") if held_back else decision


def _choice(profile: RunProfile, settings: GuardSettings) -> tuple[Decision, RunProfile]:
    """This rank's choice, and what it is made from once the step was captured at its size."""
    validation = _fitting(profile)
    profile = replace(profile, validation=validation)
    decision, proven = largest_that_runs(
        profile.prediction,
        profile.budget,
        profile.request,
        footprint_at=lambda prediction, size: replace(profile, prediction=prediction).footprint_at(size),
        # a last batch of one sample, which batch norm refuses
        is_refused=lambda size: profile.avoids_single_sample and leaves_one(profile.loader_info, size),
    )
    if validation is not None:
        decision = replace(decision, validation_batch_size=validation.batch_size)
    if settings.mode == "tune" and not profile.request.free_to_choose:
        decision = replace(decision, outcome="kept", reason=profile.request.fixed_because)
    return decision, replace(profile, prediction=proven)


def _fitting(profile: RunProfile) -> ValidationRun | None:
    """Validation at its own batch size, or where that does not fit, at the largest that does."""
    validation, usable = profile.validation, profile.budget.usable_bytes
    if validation is None or not profile.request.free_to_choose or validation.loader_info.fixed_because:
        return validation
    if validation.footprint.most_device_bytes <= usable:
        return validation
    known, size, unit = validation.prediction, validation.batch_size, validation.loader_info.unit
    scaled = replace(predict(known.program, size, known.settings, context_bytes=known.context_bytes), share=known.share)
    if not scaled.scalable:
        return validation
    try:
        request = Request(size, max_batch_size=size, multiple_of=unit)
        size = decide(scaled.footprint_at, profile.budget, request).batch_size
    except MemGuardError:  # not even one sample fits, so training does not either
        size = unit
    return replace(validation, prediction=scaled, batch_size=size)
