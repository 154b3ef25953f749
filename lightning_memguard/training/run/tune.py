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
from lightning_memguard.training.adapter.ranks import Ranks, Tried, shared, tried
from lightning_memguard.training.adapter.run_facts import Role, read_run_facts
from lightning_memguard.training.data import loaders
from lightning_memguard.training.data.loaders import LoaderInfo
from lightning_memguard.training.data.samples import RunSamples, sample
from lightning_memguard.training.planning.advise import Advised, remedies_tried
from lightning_memguard.units import format_bytes


@dataclass(frozen=True)
class Wishes:
    """MemGuard's settings, checked; see there."""

    mode: str
    budget_bytes: int | None
    margin: float
    min_batch_size: int
    max_batch_size: int | None
    multiple_of: int
    keep_effective_batch_size: int | None


@dataclass(frozen=True)
class Side:
    """What a fit runs beside its training steps: validation, at a batch size of its own."""

    found: LoaderInfo
    prediction: Prediction
    batch_size: int

    @property
    def footprint(self) -> Footprint:
        """Its memory at its size."""
        return self.prediction.footprint_at(self.batch_size)


@dataclass(frozen=True)
class Look:
    """All that was found out about a run before anything is decided.

    Attributes:
        found: its data.
        prediction: its memory at any size.
        budget: what its device offers to this rank.
        request: what was asked for, and what stands in the way.
        side: the fit's validation; None where there is none, or none could be predicted.
        validation: the fit's validation data, predicted or not.
        held_bytes: what of this training lies on the device already.
        avoids_one: a last batch of one sample may fail.
        extra: blocks that came to light after the steps were predicted, by part.
        notes: what had to be assumed, in plain words.
    """

    found: LoaderInfo
    prediction: Prediction
    budget: Budget
    request: Request
    side: Side | None = None
    validation: LoaderInfo | None = None
    held_bytes: int = 0
    avoids_one: bool = False
    extra: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def trace_at(self, batch_size: int) -> Trace:
        """The events behind `footprint_at`."""
        side = self._higher_side(batch_size)
        trace = side.prediction.own_trace_at(side.batch_size) if side else self.prediction.own_trace_at(batch_size)
        return trace.plus(self.extra)

    def _higher_side(self, batch_size: int) -> Side | None:
        """Validation, where it takes more than the training step."""
        step, side = self.prediction.footprint_at(batch_size), self.side
        return side if side and side.footprint.most_device_bytes > step.most_device_bytes else None

    def footprint_at(self, batch_size: int) -> Footprint:
        """The memory of the run at a batch size: of its training step, or of validation where that takes more."""
        step, side = self.prediction.footprint_at(batch_size), self._higher_side(batch_size)
        most = step
        if side is not None:
            note = f"the peak stands in validation, at its batch size of {side.batch_size}"
            most = replace(side.footprint, batch_size=batch_size)
            most = replace(most, notes=(note, *step.notes, *most.notes))
        for part, nbytes in self.extra.items():
            most = most.plus(nbytes, part)
        return replace(most, notes=tuple(dict.fromkeys((*most.notes, *self.notes))))


@dataclass(frozen=True)
class Tuning:
    """What came of a run's tune. ``look`` is None where the guard stepped aside."""

    decision: Decision
    role: Role = "train"
    look: Look | None = None
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def prediction(self) -> Prediction | None:
        """The memory of the run's step at any size."""
        return self.look.prediction if self.look else None


_ROLES: dict[str, Role] = {"fit": "train", "validate": "validate", "test": "test", "predict": "predict"}
_MOST_ROUNDS = 5
_ADVICE_SECONDS = 20.0  # the run is lost already: who waits for it should soon know why


def tune(trainer: Any, module: Any, wishes: Wishes, stage: Stage = "fit") -> Tuning:
    """Predict a run's memory and choose its batch size; change nothing. All ranks must call it.

    Raises:
        DoesNotFitError: ``mode`` is ``"tune"`` and even the smallest size does not fit, on some rank.
    """
    try:
        ranks = Ranks.of(trainer)
        look = ranks.agree(tried(lambda: _look(trainer, module, wishes, stage)))
        look = replace(look, budget=shared(ranks, look.budget, trainer.strategy.root_device, look.held_bytes))
        free = all(ranks.gather(look.request.free_to_choose))
        look = replace(look, request=replace(look.request, free_to_choose=free))
        try:
            tuning = choose(Tuning(_aside(trainer, "nothing was decided"), _ROLES[stage], look, ranks), wishes)
        except DoesNotFitError as error:
            raise _advised(error, look) from None
        return _without_samples(tuning)
    except CannotTraceError as error:
        return Tuning(_aside(trainer, str(error)), _ROLES[stage])
    finally:
        gc.collect()  # what captures leave in cycles would stand beside the training


def _without_samples(tuning: Tuning) -> Tuning:
    """Let go of the samples drawn: they have said what they had to say, and would stand in memory while it trains."""
    look = tuning.look
    if look is None:
        return tuning
    side = look.side and replace(look.side, prediction=_with_shapes_alone(look.side.prediction))
    return replace(tuning, look=replace(look, prediction=_with_shapes_alone(look.prediction), side=side))


def _with_shapes_alone(prediction: Prediction) -> Prediction:
    program = prediction.program
    assert isinstance(program, LightningProgram)
    if prediction.growth is None or prediction.method == "real":  # another size may still have to be run
        return prediction
    attempt = tried(
        lambda: tuple(replace(each, small=_bare(each.small), large=_bare(each.large)) for each in program.families)
    )
    if attempt.value is None:  # a kind of tensor without a meta copy
        return prediction
    batches = attempt.value if isinstance(program.batches, tuple) else attempt.value[0]
    return replace(prediction, program=replace(program, batches=batches))


def _bare(batch: Any) -> Any:
    return map_tensors(batch, lambda each: each.to("meta"))


def choose(tuning: Tuning, wishes: Wishes) -> Tuning:
    """Choose a batch size from what is known, the same on all ranks. All ranks must call it.

    Raises:
        DoesNotFitError: even the smallest size does not fit, on some rank.
        CannotTraceError: the ranks come to no size that runs on all of them.
    """
    look, ranks = tuning.look, tuning.ranks
    assert look is not None
    asked = look
    for _ in range(_MOST_ROUNDS):
        decision, look = ranks.agree(tried(functools.partial(_choice, asked, wishes)))
        sizes = ranks.gather((decision.batch_size, decision.validation_batch_size or 0))
        least, least_val = min(size for size, _ in sizes), min(size for _, size in sizes)
        if all(size == (least, least_val) for size in sizes):
            return replace(tuning, decision=_said(decision, sizes, tuning), look=look)
        capped = replace(asked.request, max_batch_size=least) if asked.request.free_to_choose else asked.request
        asked = replace(asked, request=capped, side=_smaller(asked.side, least_val))
    raise CannotTraceError(f"the ranks came to no common batch size (their last: {sizes})")


def looked_again(trainer: Any, module: Any, tuning: Tuning, wishes: Wishes) -> Tuning:
    """Count what other callbacks took since, and choose again where that takes room. All ranks must call it."""
    look, ranks = tuning.look, tuning.ranks
    if look is None:
        return tuning
    device = trainer.strategy.root_device
    program = look.prediction.program
    assert isinstance(program, LightningProgram)
    held = tried(lambda: callbacks.held_bytes(trainer, module, device, averaging=False)).value or 0
    extra = held - dict(program.resident_blocks)["callbacks"]
    if max(ranks.gather(extra)) <= 0:
        return tuning
    look = replace(look, extra={"callbacks": max(extra, 0)})
    larger = replace(
        tuning, look=look, decision=replace(tuning.decision, footprint=look.footprint_at(tuning.decision.batch_size))
    )
    if not look.request.free_to_choose:
        return larger
    look = replace(look, request=replace(look.request, max_batch_size=tuning.decision.batch_size))
    try:
        again = choose(replace(tuning, look=look), wishes)
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


def _said(decision: Decision, sizes: list[tuple[int, int]], tuning: Tuning) -> Decision:
    """Where another rank held this one back, its size is not limited by what limits the choice here."""
    original = tuning.look.request if tuning.look else None
    if len(sizes) == 1 or original is None or decision.limited_by != "max_batch_size":
        return decision
    held_back = original.max_batch_size is None or decision.batch_size < original.max_batch_size
    return replace(decision, limited_by="memory") if held_back else decision


def _advised(error: DoesNotFitError, look: Look) -> DoesNotFitError:
    """The same error with what would make it fit on this rank, where that can be told; no rank waits for another."""
    found = tried(lambda: _remedies(look)).value
    if not found or not found.advice:
        return error
    best = what_would_fit(shortlist(found.advice), found.not_tried)
    return DoesNotFitError(f"{without_rule_of_thumb(str(error))}\n{best}", advice=found.advice)


def _remedies(look: Look) -> Advised | None:
    """None where it is another rank that it does not fit on, or validation alone."""
    size, usable = look.request.smallest_batch_size, look.budget.usable_bytes
    if look.prediction.footprint_at(size).most_device_bytes <= usable:
        return None
    return remedies_tried(look.prediction, size, look.budget, most_seconds=_ADVICE_SECONDS)


# -- looking


def _look(trainer: Any, module: Any, wishes: Wishes, stage: Stage) -> Look:
    """Look at the data, draw samples, capture the steps, read the budget."""
    device = trainer.strategy.root_device
    found = loaders.find(read_run_facts(trainer, stage), _ROLES[stage])
    sampled = sample(found)
    size = found.batch_size or sampled.batches[0].small_size
    settings = AllocatorSettings.for_device(device.type, os.environ)
    program = _program(trainer, module, found, sampled.batches, wishes, stage)
    shards = sharded.shards_of(trainer.strategy, trainer.world_size)
    prediction = predict(program, size, settings, scalable=not (found.fixed_because or shards))
    if shards:
        prediction = sharded.divided(prediction, shards)
    notes = list(sampled.notes)
    side, validation = None, Tried[LoaderInfo]()
    if stage == "fit" and trainer.enable_validation:
        validation = tried(lambda: loaders.find(read_run_facts(trainer, stage), "val"))
        attempt = tried(lambda: _side(validation.got(), prediction, settings)) if validation.value else validation
        side = attempt.value if isinstance(attempt.value, Side) else None
        if attempt.reason:
            notes.append(f"validation was not predicted: {attempt.reason}")
    gc.collect()  # what predicting has loaded and left behind is out of the way before memory is read
    held = _held_bytes(trainer, module)
    budget = read_budget(device, budget=wishes.budget_bytes, margin=wishes.margin, already_held_bytes=held)
    # after the budget, which counts a context that is up as ours: measuring it opens it
    context = context_bytes(device)
    prediction = replace(prediction, context_bytes=context, _footprints={})
    if side is not None:
        side = replace(side, prediction=replace(side.prediction, context_bytes=context, _footprints={}))
    request = _request(trainer, found, sampled, prediction, wishes, size, shards)
    ones = any(isinstance(each, _BatchNorm) for each in module.modules())
    return Look(found, prediction, budget, request, side, validation.value, held, ones, notes=tuple(notes))


def _held_bytes(trainer: Any, module: Any) -> int:
    """What of this training lies on the device already: it counts as free, since it is predicted as needed."""
    device = trainer.strategy.root_device
    own = part_bytes({"model": [*module.parameters(), *module.buffers()]}, device.type)["model"]
    return own + callbacks.held_bytes(trainer, module, device, averaging=True)


def _program(
    trainer: Any, module: Any, found: LoaderInfo, batches: tuple[Any, ...], wishes: Wishes, stage: Stage
) -> LightningProgram:
    device = trainer.strategy.root_device
    sized = found.dataset_size is not None
    effective = wishes.keep_effective_batch_size and stage == "fit"
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


def _side(found: LoaderInfo, training: Prediction, settings: AllocatorSettings) -> Side:
    """Predict the fit's validation, beside all that training leaves standing."""
    batches = sample(found).batches
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
        resident_blocks=tuple(_standing(trace, gradients=callbacks.validates_mid_step(program.trainer, accumulate))),
    )
    prediction = predict(program, size, settings, scalable=False)
    return Side(found, replace(prediction, share=training.share), size)


def _standing(trace: Trace, *, gradients: bool) -> Iterator[tuple[str, int]]:
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
    sampled: RunSamples,
    prediction: Prediction,
    wishes: Wishes,
    size: int,
    shards: sharded.Shards | None,
) -> Request:
    fit = found.role == "train"
    fixed = found.fixed_because or (f"{shards.strategy} is predicted in part only" if shards else "")
    largest = loaders.largest_for(read_run_facts(trainer), found)
    return Request(
        batch_size=size,
        min_batch_size=wishes.min_batch_size,
        max_batch_size=wishes.max_batch_size,
        multiple_of=math.lcm(wishes.multiple_of, found.unit, sampled.unit),
        dataset_size=sampled.samples if largest is None else largest,
        keep_effective_batch_size=wishes.keep_effective_batch_size if fit else None,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        ranks=trainer.world_size,
        free_to_choose=wishes.mode == "tune" and prediction.scalable and not fixed,
        fixed_because=fixed or ("" if prediction.scalable else "the memory of other batch sizes is not known"),
    )


# -- choosing


def _choice(look: Look, wishes: Wishes) -> tuple[Decision, Look]:
    """This rank's choice, and what it stands on once its size was captured as proof."""
    side = _fitting(look)
    look = replace(look, side=side)
    decision, proven = _proven(look)
    if side is not None:
        decision = replace(decision, validation_batch_size=side.batch_size)
    if wishes.mode == "tune" and not look.request.free_to_choose:
        decision = replace(decision, outcome="kept", reason=look.request.fixed_because)
    return decision, proven


def _proven(look: Look) -> tuple[Decision, Look]:
    """Decide, and prove the size; where the step does not run at it, a size divisible by 2, 4, ... may do."""
    for power in range(5):
        even = replace(look.request, multiple_of=math.lcm(look.request.multiple_of, 1 << power))
        decision = _without_a_last_one(decide(look.footprint_at, look.budget, even), look, even)
        try:
            prediction = look.prediction.proven_at(decision.batch_size)
        except StepFailsError as error:
            failure = error
            continue
        if prediction is look.prediction:
            return decision, look
        proven = replace(look, prediction=prediction)
        return _without_a_last_one(decide(proven.footprint_at, look.budget, even), proven, even), proven
    raise failure


def _without_a_last_one(decision: Decision, look: Look, request: Request) -> Decision:
    """The next smaller size where the last batch of an epoch would be a single sample, which batch norm refuses."""
    if not (look.avoids_one and request.free_to_choose):
        return decision
    size = decision.batch_size
    while loaders.leaves_one(look.found, size) and size - request.multiple_of >= request.min_batch_size:
        size -= request.multiple_of
    if size == decision.batch_size:
        return decision
    smaller = decide(look.footprint_at, look.budget, replace(request, max_batch_size=size))
    return replace(smaller, limited_by=decision.limited_by)


def _fitting(look: Look) -> Side | None:
    """Validation at its own batch size, or where that does not fit, at the largest that does."""
    side = look.side
    if side is None or not look.request.free_to_choose or side.found.fixed_because:
        return side
    if side.footprint.most_device_bytes <= look.budget.usable_bytes:
        return side
    known = side.prediction
    scaled = predict(known.program, side.batch_size, known.settings, context_bytes=known.context_bytes)
    scaled = replace(scaled, share=known.share)
    request = Request(side.batch_size, max_batch_size=side.batch_size, multiple_of=side.found.unit)
    if not scaled.scalable:
        return side
    try:
        size = decide(scaled.footprint_at, look.budget, request).batch_size
    except MemGuardError:  # not even one sample, of training neither
        size = side.found.unit
    return replace(side, prediction=scaled, batch_size=size)


def _smaller(side: Side | None, batch_size: int) -> Side | None:
    if side is None or side.batch_size <= batch_size or not batch_size:
        return side
    return replace(side, batch_size=batch_size)


def _aside(trainer: Any, reason: str) -> Decision:
    return Decision(0, 0, trainer.accumulate_grad_batches, "stepped aside", None, None, "request", reason)
