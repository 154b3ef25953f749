"""A run that has not started -> its Decision: the stages of `lightning_memguard.core`, joined for a Trainer."""

from __future__ import annotations

import functools
import gc
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from lightning_memguard.core.capture.batch import map_tensors
from lightning_memguard.core.capture.fake_cuda import gpu_of
from lightning_memguard.core.capture.predict import Prediction, StepFailsError, predict
from lightning_memguard.core.capture.recorder import part_bytes
from lightning_memguard.core.decision.advice import shortlist, what_would_fit
from lightning_memguard.core.decision.decision import Budget, Decision, Request, decide, without_rule_of_thumb
from lightning_memguard.core.device.budget import read_budget
from lightning_memguard.core.device.context import context_bytes
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import OPTIONAL_PARTS, Trace
from lightning_memguard.errors import CannotTraceError, DoesNotFitError, MemGuardError
from lightning_memguard.training.adapter import callbacks, sharded
from lightning_memguard.training.adapter.program import LightningProgram, Stage
from lightning_memguard.training.adapter.ranks import Attempt, Ranks, attempt, shared
from lightning_memguard.training.data import loaders
from lightning_memguard.training.data.loaders import LoaderInfo, Role, Sampled
from lightning_memguard.training.planning.advise import Advised, remedies_tried
from lightning_memguard.units import format_bytes


@dataclass(frozen=True)
class GuardSettings:
    """MemGuard's settings, checked; see there."""

    mode: str
    budget_bytes: int | None
    margin: float
    min_batch_size: int
    max_batch_size: int | None
    multiple_of: int
    keep_effective_batch_size: int | None


@dataclass(frozen=True)
class ValidationRun:
    """What a fit runs beside its training steps: validation, at a batch size of its own."""

    loader_info: LoaderInfo
    prediction: Prediction
    batch_size: int

    @property
    def footprint(self) -> Footprint:
        """Its memory at its size."""
        return self.prediction.footprint_at(self.batch_size)


@dataclass(frozen=True)
class RunProfile:
    """All that was found out about a run before anything is decided.

    Attributes:
        loader_info: its data.
        prediction: its memory at any size.
        budget: what its device offers to this rank.
        request: what was asked for, and what stands in the way.
        validation: the fit's validation; None where there is none, or none could be predicted.
        validation_info: the fit's validation data, predicted or not.
        held_bytes: what of this training lies on the device already.
        avoids_one: a last batch of one sample may fail.
        extra: blocks that came to light after the steps were predicted, by part.
        notes: what had to be assumed, in plain words.
    """

    loader_info: LoaderInfo
    prediction: Prediction
    budget: Budget
    request: Request
    validation: ValidationRun | None = None
    validation_info: LoaderInfo | None = None
    held_bytes: int = 0
    avoids_one: bool = False
    extra: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def trace_at(self, batch_size: int) -> Trace:
        """The events behind `footprint_at`."""
        validation = self._larger_validation(batch_size)
        trace = (
            validation.prediction.own_trace_at(validation.batch_size)
            if validation
            else self.prediction.own_trace_at(batch_size)
        )
        return trace.plus(self.extra)

    def _larger_validation(self, batch_size: int) -> ValidationRun | None:
        """Validation, where it takes more than the training step."""
        step, validation = self.prediction.footprint_at(batch_size), self.validation
        return validation if validation and validation.footprint.most_device_bytes > step.most_device_bytes else None

    def footprint_at(self, batch_size: int) -> Footprint:
        """The memory of the run at a batch size: of its training step, or of validation where that takes more."""
        step, validation = self.prediction.footprint_at(batch_size), self._larger_validation(batch_size)
        most = step
        if validation is not None:
            note = f"the peak stands in validation, at its batch size of {validation.batch_size}"
            most = replace(validation.footprint, batch_size=batch_size)
            most = replace(most, notes=(note, *step.notes, *most.notes))
        for part, nbytes in self.extra.items():
            most = most.plus(nbytes, part)
        return replace(most, notes=tuple(dict.fromkeys((*most.notes, *self.notes))))


@dataclass(frozen=True)
class Tuning:
    """What came of a run's tune. ``look`` is None where the guard stepped aside."""

    decision: Decision
    role: Role = "train"
    profile: RunProfile | None = None
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def prediction(self) -> Prediction | None:
        """The memory of the run's step at any size."""
        return self.profile.prediction if self.profile else None


_ROLES: dict[str, Role] = {"fit": "train", "validate": "validate", "test": "test", "predict": "predict"}
_MOST_ROUNDS = 5
_ADVICE_SECONDS = 20.0  # the run is lost already: who waits for it should soon know why


def tune(trainer: Any, module: Any, settings: GuardSettings, stage: Stage = "fit") -> Tuning:
    """Predict a run's memory and choose its batch size; change nothing. All ranks must call it.

    Raises:
        DoesNotFitError: ``mode`` is ``"tune"`` and even the smallest size does not fit, on some rank.
    """
    try:
        ranks = Ranks.of(trainer)
        profile = ranks.agree(attempt(lambda: _profile_run(trainer, module, settings, stage)))
        profile = replace(
            profile, budget=shared(ranks, profile.budget, trainer.strategy.root_device, profile.held_bytes)
        )
        free = all(ranks.gather(profile.request.free_to_choose))
        profile = replace(profile, request=replace(profile.request, free_to_choose=free))
        try:
            tuning = choose(Tuning(_not_tuned(trainer, "nothing was decided"), _ROLES[stage], profile, ranks), settings)
        except DoesNotFitError as error:
            raise _with_advice(error, profile) from None
        return _without_samples(tuning)
    except CannotTraceError as error:
        return Tuning(_not_tuned(trainer, str(error)), _ROLES[stage])
    finally:
        gc.collect()  # what captures leave in cycles would stand beside the training


def _without_samples(tuning: Tuning) -> Tuning:
    """Let go of the samples drawn: they have said what they had to say, and would stand in memory while it trains."""
    profile = tuning.profile
    if profile is None:
        return tuning
    validation = profile.validation and replace(
        profile.validation, prediction=_with_shapes_alone(profile.validation.prediction)
    )
    return replace(
        tuning, profile=replace(profile, prediction=_with_shapes_alone(profile.prediction), validation=validation)
    )


def _with_shapes_alone(prediction: Prediction) -> Prediction:
    program = prediction.program
    assert isinstance(program, LightningProgram)
    if prediction.growth is None or prediction.method == "real":  # another size may still have to be run
        return prediction
    result = attempt(
        lambda: tuple(
            replace(each, small=_without_storage(each.small), large=_without_storage(each.large))
            for each in program.families
        )
    )
    if result.value is None:  # a kind of tensor without a meta copy
        return prediction
    batches = result.value if isinstance(program.batches, tuple) else result.value[0]
    return replace(prediction, program=replace(program, batches=batches))


def _without_storage(batch: Any) -> Any:
    return map_tensors(batch, lambda each: each.to("meta"))


def choose(tuning: Tuning, settings: GuardSettings) -> Tuning:
    """Choose a batch size from what is known, the same on all ranks. All ranks must call it.

    Raises:
        DoesNotFitError: even the smallest size does not fit, on some rank.
        CannotTraceError: the ranks come to no size that runs on all of them.
    """
    profile, ranks = tuning.profile, tuning.ranks
    assert profile is not None
    asked = profile
    for _ in range(_MOST_ROUNDS):
        decision, profile = ranks.agree(attempt(functools.partial(_choice, asked, settings)))
        sizes = ranks.gather((decision.batch_size, decision.validation_batch_size or 0))
        least, least_val = min(size for size, _ in sizes), min(size for _, size in sizes)
        if all(size == (least, least_val) for size in sizes):
            return replace(tuning, decision=_with_common_limit(decision, sizes, tuning), profile=profile)
        capped = replace(asked.request, max_batch_size=least) if asked.request.free_to_choose else asked.request
        asked = replace(asked, request=capped, validation=_smaller(asked.validation, least_val))
    raise CannotTraceError(f"the ranks came to no common batch size (their last: {sizes})")


def recheck(trainer: Any, module: Any, tuning: Tuning, settings: GuardSettings) -> Tuning:
    """Count what other callbacks took since, and choose again where that takes room. All ranks must call it."""
    profile, ranks = tuning.profile, tuning.ranks
    if profile is None:
        return tuning
    device = trainer.strategy.root_device
    program = profile.prediction.program
    assert isinstance(program, LightningProgram)
    held = attempt(lambda: callbacks.held_bytes(trainer, module, device, averaging=False)).value or 0
    extra = held - dict(program.resident_blocks)["callbacks"]
    if max(ranks.gather(extra)) <= 0:
        return tuning
    profile = replace(profile, extra={"callbacks": max(extra, 0)})
    larger = replace(
        tuning,
        profile=profile,
        decision=replace(tuning.decision, footprint=profile.footprint_at(tuning.decision.batch_size)),
    )
    if not profile.request.free_to_choose:
        return larger
    profile = replace(profile, request=replace(profile.request, max_batch_size=tuning.decision.batch_size))
    try:
        again = choose(replace(tuning, profile=profile), settings)
    except MemGuardError:  # it may run out of memory now, and a fit that is under way is not ours to end
        return larger
    decision = again.decision
    if decision.batch_size == tuning.decision.batch_size:
        return replace(again, decision=replace(tuning.decision, footprint=decision.footprint))
    reason = f"other callbacks have taken {format_bytes(extra)} on the device since setup"
    return replace(
        again,
        decision=replace(
            decision, requested_batch_size=tuning.decision.requested_batch_size, limited_by="memory", reason=reason
        ),
    )


def _with_common_limit(decision: Decision, sizes: list[tuple[int, int]], tuning: Tuning) -> Decision:
    """Where another rank held this one back, its size is not limited by what limits the choice here."""
    original = tuning.profile.request if tuning.profile else None
    if len(sizes) == 1 or original is None or decision.limited_by != "max_batch_size":
        return decision
    held_back = original.max_batch_size is None or decision.batch_size < original.max_batch_size
    return replace(decision, limited_by="memory") if held_back else decision


def _with_advice(error: DoesNotFitError, profile: RunProfile) -> DoesNotFitError:
    """The same error with what would make it fit on this rank, where that can be told; no rank waits for another."""
    found = attempt(lambda: _remedies(profile)).value
    if not found or not found.advice:
        return error
    best = what_would_fit(shortlist(found.advice), found.not_tried)
    return DoesNotFitError(f"{without_rule_of_thumb(str(error))}\n{best}", advice=found.advice)


def _remedies(profile: RunProfile) -> Advised | None:
    """None where it is another rank that it does not fit on, or validation alone."""
    size, usable = profile.request.smallest_batch_size, profile.budget.usable_bytes
    if profile.prediction.footprint_at(size).most_device_bytes <= usable:
        return None
    return remedies_tried(profile.prediction, size, profile.budget, most_seconds=_ADVICE_SECONDS)


# -- looking


def _profile_run(trainer: Any, module: Any, settings: GuardSettings, stage: Stage) -> RunProfile:
    """Look at the data, draw samples, capture the steps, read the budget."""
    device = trainer.strategy.root_device
    found = loaders.find(trainer, _ROLES[stage])
    sampled = loaders.sample(found)
    size = found.batch_size or sampled.batches[0].small_size
    allocator = AllocatorSettings.for_device(device.type, os.environ)
    program = _program(trainer, module, found, sampled.batches, settings, stage)
    shards = sharded.shards_of(trainer.strategy, trainer.world_size)
    prediction = predict(program, size, allocator, scalable=not (found.fixed_because or shards))
    if shards:
        prediction = sharded.divide_by_rank(prediction, shards)
    notes = list(sampled.notes)
    validation, validation_info = None, Attempt[LoaderInfo]()
    if stage == "fit" and trainer.enable_validation:
        validation_info = attempt(lambda: loaders.find(trainer, "val"))
        result = attempt(lambda: _validation_run(validation_info.unwrap(), prediction, allocator))
        validation = result.value
        if result.reason:
            notes.append(f"validation was not predicted: {result.reason}")
    gc.collect()  # what predicting has loaded and left behind is out of the way before memory is read
    held = _held_bytes(trainer, module)
    budget = read_budget(device, budget=settings.budget_bytes, margin=settings.margin, already_held_bytes=held)
    # after the budget, which counts a context that is up as ours: measuring it opens it
    context = context_bytes(device)
    prediction = replace(prediction, context_bytes=context, _footprints={})
    if validation is not None:
        validation = replace(
            validation, prediction=replace(validation.prediction, context_bytes=context, _footprints={})
        )
    request = _request(trainer, found, sampled, prediction, settings, size, shards)
    ones = any(isinstance(each, _BatchNorm) for each in module.modules())
    return RunProfile(
        found, prediction, budget, request, validation, validation_info.value, held, ones, notes=tuple(notes)
    )


def _held_bytes(trainer: Any, module: Any) -> int:
    """What of this training lies on the device already: it counts as free, since it is predicted as needed."""
    device = trainer.strategy.root_device
    own = part_bytes({"model": [*module.parameters(), *module.buffers()]}, device.type)["model"]
    return own + callbacks.held_bytes(trainer, module, device, averaging=True)


def _program(
    trainer: Any, module: Any, found: LoaderInfo, batches: tuple[Any, ...], settings: GuardSettings, stage: Stage
) -> LightningProgram:
    device = trainer.strategy.root_device
    sized = found.dataset_size is not None
    effective = settings.keep_effective_batch_size and stage == "fit"
    return LightningProgram(
        trainer,
        module,
        batches if stage != "fit" else batches[0],
        device,
        batches_per_epoch=found.batches if sized else None,
        datamodule=trainer.datamodule,
        # where accumulation is the guard's to set, gradients stand through the next forward pass: the larger case
        accumulate_grad_batches=2 if effective else callbacks.accumulation(trainer),
        gpu=gpu_of(device),
        stage=stage,
        resident_blocks=(("callbacks", callbacks.held_bytes(trainer, module, device, averaging=False)),),
        strategy=trainer.strategy,
    )


def _validation_run(found: LoaderInfo, training: Prediction, allocator: AllocatorSettings) -> ValidationRun:
    """Predict the fit's validation, beside all that training leaves standing."""
    batches = loaders.sample(found).batches
    size = found.batch_size or batches[0].small_size
    trace = next(iter(training.traces.values()))
    program = training.program
    assert isinstance(program, LightningProgram)
    accumulate = program.accumulate_grad_batches or 1
    program = replace(
        program,
        batches=batches,
        batches_per_epoch=found.batches if found.dataset_size is not None else None,
        stage="validate",
        setup_stage="fit",
        resident_blocks=tuple(
            _alive_between_steps(trace, gradients=callbacks.validates_mid_step(program.trainer, accumulate))
        ),
    )
    prediction = predict(program, size, allocator, scalable=False)
    return ValidationRun(found, replace(prediction, share=training.share), size)


def _alive_between_steps(trace: Trace, *, gradients: bool) -> Iterator[tuple[str, int]]:
    """What is on the device between two training steps beside the module, by part; validation clears the gradients."""
    parts = {"optimizer_state", *OPTIONAL_PARTS, *(["gradients"] if gradients else [])}
    alive = {event.block: event for event in trace.events if event.action == "alloc" and event.part in parts}
    for event in trace.events:
        if event.action == "free":
            alive.pop(event.block, None)
    yield from ((event.part, event.nbytes) for event in alive.values())


def _request(
    trainer: Any,
    found: LoaderInfo,
    sampled: Sampled,
    prediction: Prediction,
    settings: GuardSettings,
    size: int,
    shards: sharded.Shards | None,
) -> Request:
    fit = found.role == "train"
    fixed = found.fixed_because or (f"{shards.strategy} is predicted in part only" if shards else "")
    largest = loaders.largest_for(trainer, found)
    return Request(
        batch_size=size,
        min_batch_size=settings.min_batch_size,
        max_batch_size=settings.max_batch_size,
        multiple_of=math.lcm(settings.multiple_of, found.unit, sampled.unit),
        dataset_size=sampled.samples if largest is None else largest,
        keep_effective_batch_size=settings.keep_effective_batch_size if fit else None,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        ranks=trainer.world_size,
        free_to_choose=settings.mode == "tune" and prediction.scalable and not fixed,
        fixed_because=fixed or ("" if prediction.scalable else "the memory of other batch sizes is not known"),
    )


# -- choosing


def _choice(profile: RunProfile, settings: GuardSettings) -> tuple[Decision, RunProfile]:
    """This rank's choice, and what it stands on once its size was captured as proof."""
    validation = _fitting(profile)
    profile = replace(profile, validation=validation)
    decision, proven = _proven(profile)
    if validation is not None:
        decision = replace(decision, validation_batch_size=validation.batch_size)
    if settings.mode == "tune" and not profile.request.free_to_choose:
        decision = replace(decision, outcome="kept", reason=profile.request.fixed_because)
    return decision, proven


def _proven(profile: RunProfile) -> tuple[Decision, RunProfile]:
    """Decide, and prove the size; where the step does not run at it, a size divisible by 2, 4, ... may do."""
    for power in range(5):
        even = replace(profile.request, multiple_of=math.lcm(profile.request.multiple_of, 1 << power))
        decision = _without_a_last_one(decide(profile.footprint_at, profile.budget, even), profile, even)
        try:
            prediction = profile.prediction.proven_at(decision.batch_size)
        except StepFailsError as error:
            failure = error
            continue
        if prediction is profile.prediction:
            return decision, profile
        proven = replace(profile, prediction=prediction)
        return _without_a_last_one(decide(proven.footprint_at, profile.budget, even), proven, even), proven
    raise failure


def _without_a_last_one(decision: Decision, profile: RunProfile, request: Request) -> Decision:
    """The next smaller size where the last batch of an epoch would be a single sample, which batch norm refuses."""
    if not (profile.avoids_one and request.free_to_choose):
        return decision
    size = decision.batch_size
    while loaders.leaves_one(profile.loader_info, size) and size - request.multiple_of >= request.min_batch_size:
        size -= request.multiple_of
    if size == decision.batch_size:
        return decision
    smaller = decide(profile.footprint_at, profile.budget, replace(request, max_batch_size=size))
    return replace(smaller, limited_by=decision.limited_by)


def _fitting(profile: RunProfile) -> ValidationRun | None:
    """Validation at its own batch size, or where that does not fit, at the largest that does."""
    validation = profile.validation
    if validation is None or not profile.request.free_to_choose or validation.loader_info.fixed_because:
        return validation
    if validation.footprint.most_device_bytes <= profile.budget.usable_bytes:
        return validation
    known = validation.prediction
    scaled = predict(known.program, validation.batch_size, known.settings, context_bytes=known.context_bytes)
    scaled = replace(scaled, share=known.share)
    request = Request(
        validation.batch_size, max_batch_size=validation.batch_size, multiple_of=validation.loader_info.unit
    )
    if not scaled.scalable:
        return validation
    try:
        size = decide(scaled.footprint_at, profile.budget, request).batch_size
    except MemGuardError:  # not even one sample, of training neither
        size = validation.loader_info.unit
    return replace(validation, prediction=scaled, batch_size=size)


def _smaller(validation: ValidationRun | None, batch_size: int) -> ValidationRun | None:
    if validation is None or validation.batch_size <= batch_size or not batch_size:
        return validation
    return replace(validation, batch_size=batch_size)


def _not_tuned(trainer: Any, reason: str) -> Decision:
    return Decision(0, 0, trainer.accumulate_grad_batches, "stepped aside", None, None, "request", reason)
