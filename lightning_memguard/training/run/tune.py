"""A run that has not started -> its Decision: the stages of `lightning_memguard.core`, joined for a Trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from lightning_memguard.core.decision.advice import shortlist, what_would_fit
from lightning_memguard.core.decision.decision import Decision, LimitedBy, Request
from lightning_memguard.core.device.context import context_bytes
from lightning_memguard.core.device.malloc import trim_heap
from lightning_memguard.core.device.process import LESS
from lightning_memguard.core.range import NOTHING, Range
from lightning_memguard.core.trace.kept import MOST_EPOCHS, MOST_STEPS, Kept, left_words, runs_out
from lightning_memguard.core.trace.trace import OF_VALUES
from lightning_memguard.errors import CannotTraceError, DoesNotFitError, MemGuardError
from lightning_memguard.training.adapter import callbacks
from lightning_memguard.training.data.loaders import batches_taken, divided
from lightning_memguard.training.facts.lightning_types import is_a, shards
from lightning_memguard.training.facts.ranks import Ranks, attempt, shared
from lightning_memguard.training.facts.run_facts import ROLES, Role, RunFacts, Stage, read_run_facts, takes_steps
from lightning_memguard.training.run.choose import Choice, Planner, choose
from lightning_memguard.training.run.earlier_runs import EarlierRuns
from lightning_memguard.training.run.guard_settings import GuardSettings
from lightning_memguard.training.run.profile import RunProfile
from lightning_memguard.training.run.progress import SetupLine
from lightning_memguard.training.run.reading import RunReader
from lightning_memguard.units import format_bytes

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer

    from lightning_memguard.training.adapter.program import LightningProgram
    from lightning_memguard.training.planning.advise import AdviceReport


@dataclass(frozen=True)
class Tuning:
    """The result of `tune`. ``profile`` is None if the run was not tuned; ``decision.because`` says why.

    ``earlier`` is what this GPU has measured.
    """

    decision: Decision
    role: Role = "train"
    profile: RunProfile | None = None
    ranks: Ranks = field(default_factory=Ranks)
    earlier: EarlierRuns = field(default_factory=EarlierRuns)


_ADVICE_SECONDS = 20.0  # the run cannot start: its user should soon know why


def tune(trainer: Trainer, module: LightningModule, settings: GuardSettings, stage: Stage = "fit") -> Tuning:
    """Predict a run's memory and choose its batch size; change nothing. All ranks must call it.

    Raises:
        DoesNotFitError: ``mode`` is ``"tune"`` and even the smallest size does not fit, on some rank.
    """
    size, ranks = 0, Ranks()  # of the loader, until it is known
    speaks = trainer.is_global_zero and stage == "fit" and takes_steps(trainer)
    line = SetupLine(speaks=speaks, most_seconds=settings.most_setup_seconds)
    try:
        facts = attempt(lambda: _facts_of(trainer, stage)).unwrap()
        ranks = Ranks.of(facts)
        reader = ranks.agree(attempt(lambda: RunReader.of(trainer, module, settings, facts)))
        process_bytes = reader.process_bytes
        with Planner(settings, reader, line) as planner:
            size = ranks.agree(planner.read())
            if shards(facts.strategy):  # on all ranks alike
                from lightning_memguard.training.strategies.sharded import refuse_sharded

                refuse_sharded(module)
            context = attempt(lambda: process_bytes or context_bytes(facts.device))
            profile = ranks.agree(planner.profile()).with_context(ranks.agree(context))
            profile = replace(profile, budget=shared(ranks, profile.budget, facts.device, reader.held_bytes))
            earlier = EarlierRuns.of(facts, reader.held_bytes, wanted=settings.learns)
            profile = profile.learning(ranks.gather(attempt(partial(earlier.learned, profile)).value)[0])
            asked = profile.request
            answers = ranks.gather((asked.free_to_choose, asked.fixed_because, asked.kept_by, asked.was_set))
            profile = replace(profile, request=_common(asked, answers))
            try:
                decision, profile = _choose(profile, ranks, planner)
            except DoesNotFitError as error:
                raise _with_advice(_naming_what_is_left(error, profile), profile) from None
        tuning = with_steps(Tuning(decision, facts.role, _without_samples(profile), ranks, earlier))
        del profile
        trim_heap()  # of the samples drawn
        return tuning
    except (CannotTraceError, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt):
            if ranks.size > 1 or not line.is_shown:  # the others would wait; no one was told what Ctrl-C does
                raise
            error = CannotTraceError("Ctrl-C ended the prediction")
        reason = f"{str(error).rstrip('.')}; batch size {size} is kept" if size else str(error)
        accumulate = trainer.accumulate_grad_batches
        return Tuning(Decision(size, size, accumulate, "stepped aside", None, None, "request", reason), ROLES[stage])


def _choose(profile: RunProfile, ranks: Ranks, planner: Planner) -> Choice:
    """Choose a batch size; on the CPU, the range for the process itself is no reason to refuse tensors that fit.

    If that range leaves no room, the run gets the smallest batch size, and warns if it passes its budget.
    """
    try:
        return choose(profile, ranks, planner)
    except DoesNotFitError:
        if profile.facts.device.type != "cpu":
            raise
    asked = profile.request
    smallest = replace(profile, request=replace(asked, max_batch_size=asked.smallest_batch_size), objects_per_sample=0)
    try:
        decision, chosen = choose(smallest.with_context(LESS), ranks, planner)
    except DoesNotFitError:
        decision, chosen = choose(smallest.with_context(NOTHING), ranks, planner)
    return replace(decision, limited_by="memory"), replace(chosen, request=asked)


def _common(request: Request, answers: Sequence[tuple[bool, str, LimitedBy | None, bool]]) -> Request:
    """A request that is free if it is on all ranks, and may grow if it may on all."""
    free = all(is_free for is_free, *_ in answers)
    elsewhere = next((f"rank {rank}: {why}" for rank, (_, why, *_) in enumerate(answers) if why), "")
    kept_by = next((kept_by for *_, kept_by, _ in answers if kept_by), None)
    was_set = any(was_set for *_, was_set in answers)
    fixed = request.fixed_because or elsewhere
    return replace(request, free_to_choose=free, fixed_because=fixed, kept_by=kept_by, was_set=was_set)


def with_steps(tuning: Tuning) -> Tuning:
    """Return the tuning with each loader's size, and a fit's optimizer steps an epoch, as decided and as requested."""
    profile, decision = tuning.profile, tuning.decision
    if profile is None:
        return tuning
    info = profile.loader_info
    sizes = tuple(info.size_of(source, decision.batch_size) for source in info.sources if source.batch_size)
    decision = replace(decision, loader_batch_sizes=sizes if len(sizes) == len(info.sources) > 1 else ())
    if tuning.role != "train":
        return replace(tuning, decision=attempt(lambda: _noting_what_is_left(decision, profile)).value or decision)

    def steps(batch_size: int, accumulate: int, pieces: int = 1) -> int | None:
        facts = divided(profile.facts, info, decision.requested_batch_size, pieces)
        batches = batches_taken(facts, info, batch_size)
        return None if batches is None else math.ceil(batches / accumulate)

    now = attempt(lambda: steps(decision.batch_size, decision.accumulate_grad_batches, decision.pieces)).value
    asked = attempt(lambda: steps(decision.requested_batch_size, profile.request.accumulate_grad_batches)).value
    decision = replace(decision, steps_per_epoch=now, requested_steps_per_epoch=asked)
    return replace(tuning, decision=attempt(lambda: _with_what_is_left(decision, profile)).value or decision)


def _with_what_is_left(decision: Decision, profile: RunProfile) -> Decision:
    """Return the decision of a fit with what its steps leave behind, and when memory runs out of it."""
    footprint, budget, facts, info = decision.footprint, decision.budget, profile.facts, profile.run.validation_info
    if footprint is None or budget is None or not profile.kept:
        return decision
    trainer, size = profile.run.program.trainer, decision.batch_size
    settings = divided(facts, profile.loader_info, decision.requested_batch_size, decision.pieces)
    batches = batches_taken(settings, profile.loader_info, size)
    of_step = sum(each.bytes_at(size) for each in profile.kept if each.lasts and each.when == "step")
    of_epoch = of_step * (batches or 0)
    if info is not None:
        size = decision.validation_batch_size or info.batch_size
        left = sum(each.bytes_at(size) for each in profile.kept if each.lasts and each.when == "validation")
        interval, every = facts.val_check_interval, facts.check_val_every_n_epoch
        times = 1 / interval if isinstance(interval, float) else (batches or 1) / (interval or 1)
        often = times if every is None else max(1, int(times)) / every
        of_epoch += int(left * (batches_taken(facts, info, size) or 0) * often)
    decision = _noting_what_is_left(decision, profile)
    room = budget.free_bytes - footprint.peak_device_bytes
    epochs = MOST_EPOCHS if trainer.max_epochs is None or trainer.max_epochs < 0 else trainer.max_epochs
    steps = MOST_STEPS if trainer.max_steps < 0 else trainer.max_steps * decision.accumulate_grad_batches
    return replace(decision, kept=profile.kept, runs_out_at=runs_out(room, of_step, of_epoch, batches, epochs, steps))


def _without_samples(profile: RunProfile) -> RunProfile:
    """Return the profile without the samples drawn; if another size may still be captured, their values stay."""
    known = profile.prediction
    scales = known.growth is not None or known.method in OF_VALUES

    def without_samples(program: LightningProgram) -> LightningProgram:
        if not scales:
            return program.without_draws()
        return attempt(program.without_samples).value or program  # a kind of tensor may have no meta copy

    return profile.attached_to(profile.run.with_programs(without_samples))


def _with_advice(error: DoesNotFitError, profile: RunProfile) -> DoesNotFitError:
    """Return the error with remedies for this rank, if there are any; no rank waits for another."""

    def remedies() -> AdviceReport | None:
        from lightning_memguard.training.planning.advise import try_remedies

        size, budget = profile.request.smallest_batch_size, profile.budget
        counted = _as_refused(profile, size)
        if counted.prediction.footprint_at(size).most_device_bytes <= budget.usable_bytes:
            return None  # another rank is too small, or validation alone does not fit
        request = replace(profile.request, batch_size=size)
        return try_remedies(counted.step, size, budget, most_seconds=_ADVICE_SECONDS, request=request)

    advised = attempt(remedies).value
    if not advised or not advised.advice:
        return error
    return error.with_advice(advised.advice, what_would_fit(shortlist(advised.advice), advised.not_tried))


def _noting_what_is_left(decision: Decision, profile: RunProfile) -> Decision:
    """Return a decision that does not fit with a note on what batches leave behind, if that is most of it."""
    known = decision.footprint
    if known is None or decision.verdict != "does not fit":
        return decision
    said = _what_is_left(profile, decision.batch_size, known.peak_device_bytes)
    return replace(decision, footprint=replace(known, notes=(said, *known.notes))) if said else decision


def _naming_what_is_left(error: DoesNotFitError, profile: RunProfile) -> DoesNotFitError:
    """Return the error led by what batches leave behind within an epoch, if that is most of what is needed."""

    def find() -> str:
        size = profile.request.smallest_batch_size
        return _what_is_left(profile, size, profile.footprint_at(size).peak_device_bytes)

    said = attempt(find).value
    return error.led_by(f"{said[0].upper()}{said[1:]}.") if said else error


def _what_is_left(profile: RunProfile, size: int, needed_bytes: int) -> str:
    """Say what batches leave behind in an epoch, and what keeps less; or empty, if that matters little.

    It matters if it is most of so many bytes, or if what is needed would fit without it.
    """
    facts, validation, of_epoch = profile.facts, profile.run.validation_info, dict[Kept, int]()
    for each in profile.kept:
        info, batch = profile.loader_info, size
        if each.when == "validation" and validation is not None:
            info, batch = validation, profile.validation.batch_size if profile.validation else validation.batch_size
        of_epoch[each] = each.bytes_at(batch) * (batches_taken(facts, info, batch) or 0)
    most = max(of_epoch, key=of_epoch.__getitem__, default=None)
    copied = profile.validation is not None and profile.validation.footprint.module.endswith("_epoch_end")
    if most is None:
        return ""
    rest, usable = needed_bytes - of_epoch[most], profile.budget.usable_bytes
    if (_COPIED_TIMES if copied else 2) * of_epoch[most] < needed_bytes and not rest <= usable < needed_bytes:
        return ""
    return left_words(most, format_bytes(of_epoch[most]))


_COPIED_TIMES = 8  # what a hook joins, and computes of it, is several times what was left


def _as_refused(profile: RunProfile, size: int) -> RunProfile:
    """Return the profile with a step that takes what the error says: no range of a process, but callbacks and workers.

    So the figures of the error and of its remedies add up.
    """
    on_cpu = profile.facts.device.type == "cpu"
    known = replace(profile.with_context(NOTHING), objects_per_sample=0) if on_cpu else profile
    step, context = known.prediction.footprint_at(size), known.prediction.terms.context_bytes
    whole = known.with_extra(step)
    likely = whole.peak_device_bytes - step.peak_device_bytes
    most = whole.highest.device_bytes - step.highest.device_bytes
    return known.with_context(context + Range(min(likely, most), likely, max(likely, most)))


def recheck(tuning: Tuning, others: Iterable[Callback], module: LightningModule, settings: GuardSettings) -> Tuning:
    """Count memory that other callbacks took since setup; choose again if needed. All ranks must call it."""
    profile, ranks, before = tuning.profile, tuning.ranks, tuning.decision
    if profile is None:
        return tuning
    device = profile.facts.device
    held = partial(callbacks.held_bytes, [*others], module, device)
    others_bytes, with_averages = attempt(lambda: (held(averaging=False), held(averaging=True))).value or (0, 0)
    extra = others_bytes - profile.run.program.callback_bytes
    if before.footprint:  # what hooks keep was predicted
        extra -= max(0, before.footprint.parts.get("callbacks", 0) - with_averages + extra)
    if max(ranks.gather(extra)) <= 0:
        return tuning
    profile = replace(profile, extra={"callbacks": max(extra, 0)})
    larger = replace(before, footprint=profile.footprint_at(before.batch_size))
    if not profile.request.free_to_choose:
        return replace(tuning, profile=profile, decision=larger)
    most = replace(profile.request, max_batch_size=before.batch_size, prefers_fast=False)
    capped = replace(profile, request=most)
    try:
        line = SetupLine(speaks=False, most_seconds=settings.most_setup_seconds)
        with Planner(settings, capped, line) as planner:
            decision, chosen = choose(capped, ranks, planner)
    except MemGuardError:  # it may run out of memory now, but MemGuard does not end a fit that has started
        return replace(tuning, profile=profile, decision=larger)
    if decision.batch_size == before.batch_size:
        decision = replace(before, footprint=decision.footprint)
    else:
        because = f"other callbacks have taken {format_bytes(extra)} on the device since setup"
        requested = before.requested_batch_size
        decision = replace(decision, requested_batch_size=requested, limited_by="memory", because=because)
    return with_steps(replace(tuning, profile=chosen, decision=decision))


def _facts_of(trainer: Trainer, stage: Stage) -> RunFacts:
    facts = read_run_facts(trainer, stage)
    if any(is_a(callback, "BatchSizeFinder") for callback in facts.callbacks):  # `Tuner.scale_batch_size` adds one
        raise CannotTraceError("BatchSizeFinder chooses its batch size, by trial")
    return facts
