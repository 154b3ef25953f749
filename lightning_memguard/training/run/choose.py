"""Profile of a run -> its batch size, equal on all ranks; chosen in a child, which leaves nothing behind."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from lightning_memguard.core.capture.capture import Captures, Variant, capture, failed_for_fork, trusted_child
from lightning_memguard.core.capture.curve import Curve
from lightning_memguard.core.capture.predict import Prediction, Surveyor, speed_here
from lightning_memguard.core.decision.decision import Budget, Decision, LimitedBy, Request, decide, needed_words
from lightning_memguard.core.isolation.pool import Children, is_forked
from lightning_memguard.core.replay.epoch import Epoch
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.seconds import Speed
from lightning_memguard.core.replay.settings import VARIABLE
from lightning_memguard.core.trace.trace import TIME_WAS_UP, Trace
from lightning_memguard.errors import CannotTraceError, DoesNotFitError, MemGuardError
from lightning_memguard.training.adapter.callbacks import schedules_accumulation
from lightning_memguard.training.adapter.no_collectives import no_collectives
from lightning_memguard.training.data.loaders import leaves_one, leaves_out, spoiled_by
from lightning_memguard.training.facts.ranks import Attempt, Ranks, attempt, failed
from lightning_memguard.training.planning.search import largest_that_runs, setting_that_saves, smallest_fast
from lightning_memguard.training.run.epochs import epoch_of_run
from lightning_memguard.training.run.freed import trims, with_freed_blocks
from lightning_memguard.training.run.guard_settings import GuardSettings
from lightning_memguard.training.run.profile import MOST_IN_A_BATCH, RunProfile, ValidationRun, profile_of
from lightning_memguard.training.run.progress import SetupLine
from lightning_memguard.training.run.reading import HandedRun, Reading, Run, RunReader, read_run
from lightning_memguard.training.run.setup_seconds import LEAST_SECONDS, MOST_IF_FAST, batches_of, setup_seconds
from lightning_memguard.units import format_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

_MOST_ROUNDS = 5
_MOST_EPOCHS = 4  # that are replayed until one fits
_READ, _PROFILE = "read", "profile"  # requests of a planner's child

Choice = tuple[Decision, RunProfile]


@dataclass(frozen=True)
class _Read:
    """The end of an attempt to read a run: its batch size, or a reason.

    Attributes:
        is_final: whether it would end alike anywhere.
        only_here: whether no child can do it.
    """

    size: Attempt[int]
    is_final: bool = True
    only_here: bool = False


class Planner:
    """Reads a run, predicts and chooses for it, in a child of its own that has children for the captures.

    What the user's loaders and hooks do there, and what their data keeps, ends with that child. Traces are large; here
    none of them ever is in the run's own process, where they would take memory while it trains. If there can be no
    child, the same is done here.

    Args:
        settings: of the guard.
        known: the run as it is to be read, or its profile if that is known already.
        line: the status line of the setup; it is closed at the end.
    """

    def __init__(self, settings: GuardSettings, known: RunReader | RunProfile, line: SetupLine) -> None:
        self._settings, self._line = settings, line
        # known before the child is made, so both processes have it
        self._reader = known if isinstance(known, RunReader) else None
        self._gpu = known.gpu if isinstance(known, RunReader) else known.run.program.gpu
        self._threads = torch.get_num_threads()  # a child has one
        self._speed = speed_here(self._gpu) if settings.batch_size == "fastest" else None
        self._started, self._used_before = time.monotonic(), time.process_time()
        self._deadline = self._started + settings.most_setup_seconds
        # what is worked out, in the child, or here if there can be none
        self._run: Run | None = known.run if isinstance(known, RunProfile) else None
        self._reading: Reading | None = None
        self._profile = known if isinstance(known, RunProfile) else None
        self._captures: Captures | None = None
        self._begun = self._started  # with the captures, once the data is read, which may take long
        self._most_seconds: float | None = None  # of a survey, once that is known
        self._was_hurried = False  # whether a survey has ended early because it had taken its share of the run
        # the child, as this process sees it
        self._reading_ends = math.inf  # while it reads
        self._only_here = False  # what a child cannot do
        self._lost = ""  # why the child ended before it had answered
        self._open = ExitStack()
        self._child = self._new_child()

    def _new_child(self, *, reaches_out: bool = False) -> Children[RunProfile | str, object]:
        def show() -> None:
            self._line.show(self._child.doing)

        # the captures have a deadline of their own
        how: dict[str, Any] = {"while_waiting": show, "deadline": lambda: self._reading_ends}
        return trusted_child(self._work, **how, reaches_out=reaches_out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()
        self._open.close()
        self._line.close()

    def read(self) -> Attempt[int]:
        """Have the data read; return its batch size, and begin to predict.

        A child that is cut off reads it. If that fails, one that may write new files and connect to other machines
        does; this process only if there can be no child, or CUDA is in use, which no child can use. If it waits for a
        thread, or until the deadline, it is not read: here, that thread would give what is the training's.
        """
        done = self._read_apart() or self._read_apart(reaches_out=True) or self._read()
        if done.size.value is not None:
            self._child.start(_PROFILE)
        return done.size

    def _read_apart(self, *, reaches_out: bool = False) -> _Read | None:
        """Have a child read; None if it may be possible elsewhere, after which the child is gone."""
        self._child.close()
        if self._only_here:
            return None
        self._child = self._new_child(reaches_out=reaches_out)
        self._reading_ends = max(self._deadline, self._started + LEAST_SECONDS)
        answer = self._child.answer(_READ)
        is_late, self._reading_ends = time.monotonic() > self._reading_ends, math.inf
        done = cast("_Read | None", answer.value)
        if done is None and (answer.waits or not answer.here):
            done = _Read(Attempt(reason=f"its data was not read: {TIME_WAS_UP if is_late else answer.lost}"))
        self._only_here = done is None or done.only_here
        if done is not None and (done.is_final or (reaches_out and not done.only_here)):
            return done
        self._child.close()
        return None

    def _read(self) -> _Read:
        try:
            with no_collectives() if is_forked() else nullcontext():
                self._reading = read_run(cast("RunReader", self._reader))
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            is_ours = all(isinstance(each, MemGuardError) for each in (error, error.__cause__ or error))
            return _Read(failed(error), is_ours, only_here=failed_for_fork(error))
        self._run = self._reading.run
        return _Read(Attempt(self._reading.batch_size))

    def profile(self) -> Attempt[RunProfile]:
        """All that is known of the run once its steps were captured."""
        answer = self._child.answer(_PROFILE)
        self._lost = answer.lost
        done = cast("Attempt[tuple[RunProfile, HandedRun]]", self._work(_PROFILE) if answer.lost else answer.value)
        if done.value is None:
            return Attempt(None, done.reason, done.too_large)
        profile, handed = done.value
        if self._run is None and self._reader is not None:
            self._run = self._reader.run_of(handed)
        return Attempt(profile.attached_to(self._known_run))

    @property
    def _known_run(self) -> Run:
        if self._run is None:
            raise CannotTraceError(f"the process that had read its data ended early: {self._lost}")
        return self._run

    def choose(self, profile: RunProfile) -> Attempt[Choice]:
        """Return this rank's choice and the profile behind it."""
        answer = cast("Attempt[Choice]", self._child.ask(profile.detached()))
        if answer.value is None:
            return answer
        decision, chosen = answer.value
        run = self._known_run.accumulating() if decision.accumulate_grad_batches > 1 else self._known_run
        return replace(answer, value=(decision, chosen.attached_to(run)))

    def _work(self, asked: RunProfile | str) -> object:
        """Answer in the child: with a choice from what is known, with that itself, or with the reading of the run."""
        if is_forked():
            self._used_before = 0.0
        if isinstance(asked, RunProfile):
            return attempt(lambda: self._choose_from(asked))
        return self._read() if asked == _READ else attempt(self._handed_profile)

    def _handed_profile(self) -> tuple[RunProfile, HandedRun]:
        profile = self._captured_profile()
        on_kinds = profile.attached_to(profile.run).run  # of batches that are predicted
        return profile.detached(), HandedRun.of(on_kinds)

    def _captured_profile(self) -> RunProfile:
        run = self._known_run
        if self._captures is None:
            evaluation = run.evaluation.value
            programs = [run.program, *([evaluation.program] if evaluation else [])]
            programs = [each for program in programs for each in program.kinds or (program,)]
            programs += [each.accumulating for each in programs if each.trains and self._settings.divides]
            next_size = self._reading.next_size if self._reading else None
            asked = self._reading.request_of("") if self._reading else None
            own_first = asked is not None and bool(asked.kept_by or not asked.free_to_choose)
            until: dict[str, Any] = {"deadline": self._deadline, "soon": self._soon}
            captures = Captures(*programs, next_size=next_size, own_first=own_first, **until)
            self._captures = self._open.enter_context(captures)
            self._begun = time.monotonic()
        if self._profile is None and self._reading is not None:
            self._profile = profile_of(self._reading, self._captures)
            if self._was_hurried and self._settings.mode == "tune" and self._profile.exceeds_as_set:
                # more captures may show what fits
                self._most_seconds = math.inf
                self._profile = profile_of(self._reading, self._captures)
        return cast("RunProfile", self._profile)

    def _soon(self, traces: Sequence[Trace], used: float) -> float:
        """The moment at which the survey has taken its share of the run; most end before it has to be worked out.

        Seconds are the processor's, ``used`` by a child and by this process, as a busy machine delays the run as well.
        """
        now = time.monotonic()
        is_early = self._spent(used) < LEAST_SECONDS and now < self._started + MOST_IF_FAST
        if self._most_seconds is None and is_early:
            return math.inf
        until = self._share_ends(traces, used)
        self._was_hurried = self._was_hurried or until < now
        return until

    def _spent(self, used: float) -> float:
        return time.process_time() - self._used_before + used

    def _share_ends(self, traces: Sequence[Trace], used: float = 0.0) -> float:
        """The moment at which setup has taken its share of the run."""
        if not self._settings.hurries:
            return math.inf
        now, spent, most = time.monotonic(), self._spent(used), self._most_seconds
        if most is None:
            size = self._reading.batch_size if self._reading else cast("RunProfile", self._profile).request.batch_size
            speed = attempt(lambda: self._speed or speed_here(self._gpu, self._threads)).value if traces else None
            known = attempt(lambda: setup_seconds(traces, self._known_run, size, speed, used)).value
            most = math.inf if known is None else known
            self._most_seconds = most if traces else None
        by_processor = now + most - spent
        by_clock = max(self._started + max(most, MOST_IF_FAST), self._begun + LEAST_SECONDS)
        return min(by_processor, by_clock)

    def _choose_from(self, known: RunProfile) -> Choice:
        """Choose from a profile; if no size is sure to fit, a run that may go well all the same is not stopped."""
        self._captured_profile()  # with its captures open
        profile = known.unpacked().attached_to(self._known_run)
        try:
            decision, chosen = self._chosen_by_epochs(profile)
        except DoesNotFitError:
            lenient = None if profile.budget.source == "given" else _lenient(profile)
            if lenient is None:
                raise
            decision, chosen = self._chosen(lenient)
            if lenient.budget != profile.budget:
                decision = replace(decision, budget=profile.budget, because=_may_run(decision, profile.budget))
                chosen = replace(chosen, budget=profile.budget)
        return decision, chosen.detached()

    def _chosen_by_epochs(self, profile: RunProfile) -> Choice:
        """Choose; an epoch is replayed at each size that is chosen, until one fits or rounds are up.

        If none of the sizes fits, the error says why the smallest does not.
        """
        decision, chosen = self._chosen(profile)
        for _ in range(_MOST_EPOCHS):
            epochs = self._with_epoch(chosen, decision)
            if epochs == profile.epochs:
                break
            profile = replace(profile, epochs=epochs)
            try:
                decision, chosen = self._chosen(profile)
            except DoesNotFitError as error:
                raise _naming(epochs[min(epochs)], error) from None
        return decision, chosen

    def _with_epoch(self, chosen: RunProfile, decision: Decision) -> Mapping[int, Epoch]:
        """Return the epochs that are known, with one of the batches that were chosen, as far as there is time."""
        size, step, run = decision.batch_size, chosen.prediction, chosen.run
        known = step.method == "fake" and not (step.compiles or step.drawn or step.stopped)
        if not known or not chosen.note_on_cache or not run.program.trains or size in chosen.epochs:
            return chosen.epochs
        left = min(self._deadline, self._share_ends([*step.surveyed.values()])) - time.monotonic()
        if left < 0:
            return chosen.epochs
        highest = chosen.footprint_at(size).highest
        outside = highest.device_bytes - highest.reserved_bytes + sum(chosen.extra.values())
        settings = replace(step.settings, capacity_bytes=max(0, chosen.budget.usable_bytes - outside))
        limits = {"most_steps": batches_of(run, size), "most_seconds": left / 2}
        epoch = attempt(lambda: epoch_of_run(run.program, size, settings, **limits)).value
        return {**chosen.epochs, size: epoch} if epoch else chosen.epochs

    def _chosen(self, profile: RunProfile) -> Choice:
        decision, chosen = _own_choice(profile, self._settings)
        if profile.request.prefers_fast and profile.request.may_grow and decision.footprint:
            decision, chosen = _fast((decision, chosen), profile, self._settings, self._speed)
        largest = _largest(chosen)
        if self._settings.divides and self._is_cut(decision, profile.request):
            decision, chosen = _divided((decision, chosen), profile, self._settings)
        decision = replace(decision, largest_batch_size=largest)
        if self._gpu is None and self._settings.batch_size != "fastest" and decision.footprint:
            # the CPU's speed would have to be measured, in every fit
            decision = replace(decision, footprint=replace(decision.footprint, timing=None))
        return decision, chosen

    def _is_cut(self, decision: Decision, asked: Request) -> bool:
        """Whether memory, of this rank or another, makes a batch smaller than asked for."""
        most = self._settings.max_batch_size
        by_memory = decision.limited_by in ("memory", "max_batch_size", "last_batch")
        is_allowed = most is None or asked.batch_size <= most
        return asked.free_to_choose and by_memory and is_allowed and decision.batch_size < asked.batch_size


def choose(profile: RunProfile, ranks: Ranks, planner: Planner) -> Choice:
    """Choose a batch size from what is known, the same on all ranks. All ranks must call it.

    Raises:
        DoesNotFitError: even the smallest size does not fit, on some rank.
        CannotTraceError: the ranks come to no size that runs on all of them.
    """
    asked = profile
    limit: LimitedBy = "memory"
    for _ in range(_MOST_ROUNDS):
        decision, chosen = ranks.agree(planner.choose(asked))
        largest = decision.largest_batch_size
        mine = decision.batch_size, decision.validation_batch_size or 0, decision.limited_by, largest
        proposals = ranks.gather(mine)
        sizes = [(size, size_val) for size, size_val, *_ in proposals]
        least, least_val = min(size for size, _ in sizes), min(size for _, size in sizes)
        if all(size == (least, least_val) for size in sizes):
            most = profile.request.max_batch_size
            if len(sizes) > 1 and decision.limited_by == "max_batch_size" and (not most or decision.batch_size < most):
                decision = replace(decision, limited_by=limit)  # what limited the rank that set the size
            known = [most for *_, most in proposals if most is not None]
            return replace(decision, largest_batch_size=min(known) if len(known) == len(proposals) else None), chosen
        limit = "time" if (least, "time") in [(size, by) for size, _, by, _ in proposals] else limit
        capped = asked.request
        if capped.free_to_choose:
            capped = replace(capped, max_batch_size=least, prefers_fast=False)
        validation = asked.validation
        if validation is not None and validation.batch_size > least_val > 0:
            validation = replace(validation, batch_size=least_val)
        asked = replace(asked, request=capped, validation=validation)
    raise CannotTraceError(f"the ranks could not agree on a batch size (last proposals: {sizes})")


def _lenient(profile: RunProfile) -> RunProfile | None:
    """Return the profile of a run that may go well though no size is sure to fit, so that one is chosen; else None."""
    request, budget = profile.request, profile.budget
    if attempt(lambda: _catches_refusals(profile)).value:
        caught = "the step catches that memory runs out, and goes on"
        return replace(profile, request=replace(request, free_to_choose=False, fixed_because=caught))
    smallest = profile.footprint_at(request.smallest_batch_size)
    if smallest.lowest.device_bytes > budget.free_bytes:
        return None
    # it may run within the margin, or with less than the upper bound
    return replace(profile, budget=replace(budget, free_bytes=smallest.most_device_bytes, margin_bytes=0))


def _may_run(decision: Decision, budget: Budget) -> str:
    needed, free = decision.footprint and needed_words(decision.footprint), format_bytes(budget.free_bytes)
    return f"it needs {needed}, and {free} are free, so it may run all the same"


def _catches_refusals(profile: RunProfile) -> bool:
    """Whether the step, with no more room than its GPU has free, catches that memory runs out."""
    step, program, size = profile.prediction, profile.run.program, profile.request.batch_size
    if program.gpu is None or step.method not in ("fake", "worst-case"):
        return False
    room = profile.budget.free_bytes - profile.footprint_at(size).lowest.outside_bytes
    return capture(program, size, step.method, Variant(room_bytes=room)).has_note("refused")


def _naming(epoch: Epoch, error: DoesNotFitError) -> DoesNotFitError:
    """Return the error of a run of which an epoch fails, with that and what makes it fit."""
    if epoch.fits:
        return error
    error.way_out = epoch.remedy.how if epoch.remedy else error.way_out
    return error.led_by(f"{epoch.text[0].upper()}{epoch.text[1:]}.")


def _fast(largest: Choice, profile: RunProfile, settings: GuardSettings, speed: Speed | None) -> Choice:
    """Return the choice at the smallest size that is about as fast as any up to this one; else this one, and why."""
    decision, chosen = largest

    def seconds_at(size: int) -> float | None:
        timing = chosen.prediction.footprint_at(size).timing
        step = timing and replace(timing, speed=lambda: speed).step
        return step.likely if step else None

    known = chosen.prediction.growth is not None and seconds_at(decision.batch_size)
    if not known:
        note = 'batch_size="fastest" chose the largest size that fits: how long a step takes is not known'
        footprint = decision.footprint and replace(decision.footprint, notes=(*decision.footprint.notes, note))
        return replace(decision, footprint=footprint), chosen
    request = profile.request
    grown = replace(request, min_batch_size=max(request.min_batch_size, request.batch_size))
    if grown.smallest_batch_size >= decision.batch_size:
        return largest
    size = smallest_fast(lambda size: seconds_at(size) or 0.0, grown, decision.batch_size)
    if size == decision.batch_size:
        return largest
    return _own_choice(replace(profile, request=replace(request, run_size=size, run_limit="time")), settings)


def _own_choice(profile: RunProfile, settings: GuardSettings) -> Choice:
    """Return this rank's choice, and its profile once the step was captured at the chosen size."""
    validation = _fitting_validation(profile)
    profile = replace(profile, validation=validation)
    profile = replace(profile, request=profile.within_host())

    def refused_by(size: int) -> LimitedBy | None:
        if profile.avoids_single_sample and leaves_one(profile.loader_info, size):
            return "last_batch"
        if profile.run.program.trains and leaves_out(profile.loader_info, size):
            return "drop_last"
        return spoiled_by(profile.facts, profile.loader_info, size, settings.steps_to_keep)

    decision, proven = largest_that_runs(
        profile.step,
        profile.budget,
        profile.request,
        footprint_at=lambda step, size: replace(profile, prediction=step.extended_to(size)).footprint_at(size),
        refused_by=refused_by,
        preferred=_MULTIPLE if settings.multiple_of == 1 else 1,
    )
    profile = replace(profile, prediction=proven.curve).taking_turns_at(decision.batch_size)
    if validation is not None:
        decision = replace(decision, validation_batch_size=validation.batch_size)
    if decision.batch_size in profile.turns:
        decision = replace(decision, footprint=profile.footprint_at(decision.batch_size))
    if decision.footprint is not None:
        decision = replace(decision, footprint=_with_setting_note(decision.footprint, proven.curve))
    saving = profile.saving_at(decision.batch_size)
    if saving and decision.footprint and saving.most_device_bytes > decision.footprint.most_device_bytes:
        decision = replace(decision, footprint=saving)
    decision = replace(decision, host=profile.host_at(decision.batch_size))
    profile = replace(profile, trims=settings.mode == "tune" and trims(decision, profile))
    decision = with_freed_blocks(decision, profile)
    if not profile.request.free_to_choose:
        decision = _unchanged(decision, profile.request, settings)
    return decision, profile


def _divided(cut: Choice, profile: RunProfile, settings: GuardSettings) -> Choice:
    """Divide the loader's batch into pieces with accumulated gradients; else keep the smaller batch, and say why."""
    request, (decision, chosen) = profile.request, cut
    asked, why_not = request.batch_size, ""
    if not profile.run.program.module.automatic_optimization:
        why_not = "manual optimization accumulates no gradients"
    elif schedules_accumulation(profile.facts.callbacks):
        why_not = "a GradientAccumulationScheduler sets the accumulation"
    if not why_not:
        effective = asked * request.accumulate_grad_batches * request.ranks
        try:
            kept = replace(_accumulating(profile), request=replace(request, keep_effective_batch_size=effective))
            divided, chosen = _own_choice(kept, settings)
        except DoesNotFitError:
            why_not = "accumulated gradients do not fit either"
        except MemGuardError as error:
            why_not = f"accumulated gradients could not be predicted ({error})"
        else:
            note = f"batch norm sees {divided.batch_size} samples at a time instead of {asked}"
            if profile.avoids_single_sample and divided.footprint:
                footprint = replace(divided.footprint, notes=(note, *divided.footprint.notes))
                divided = replace(divided, footprint=footprint)
            return replace(divided, limited_by=decision.limited_by), replace(chosen, request=request)
    because = f"{asked} samples do not fit, and each optimizer step sees {decision.batch_size}: {why_not}"
    return replace(decision, because=because), chosen


def _accumulating(profile: RunProfile) -> RunProfile:
    """Return the profile of the run with accumulated gradients; if they cannot be captured, they come on top."""
    try:
        return profile.accumulating()
    except MemGuardError as error:
        trained = (each for each in profile.run.program.module.parameters() if each.requires_grad)
        nbytes = sum(each.numel() * each.element_size() for each in trained)
        note = f"accumulated gradients were not captured ({error}), and count on top of the step's own"
        extra = {**profile.extra, "gradients": profile.extra.get("gradients", 0) + nbytes}
        return replace(profile, extra=extra, notes=(*profile.notes, note))


_MULTIPLE = 8  # which tensor cores are made for


def _largest(profile: RunProfile) -> int | None:
    """The largest batch size that memory and data allow; None if that takes captures, or no other can be set."""
    request, known = profile.request, profile.prediction
    is_fixed = bool(request.fixed_because) or not profile.run.program.trains
    if known.growth is None or known.compiles or known.stopped or not known.scalable or is_fixed:
        return None
    free = replace(request, free_to_choose=True, kept_by=None, run_size=None, max_batch_size=None, min_batch_size=1)
    asked = replace(profile, request=replace(free, keep_effective_batch_size=None))
    try:
        largest = decide(asked.footprint_at, asked.budget, asked.within_host()).batch_size
    except DoesNotFitError:
        return 0
    return largest if request.dataset_size is not None or largest < MOST_IN_A_BATCH else None


def _with_setting_note(footprint: Footprint, prediction: Curve) -> Footprint:
    """Return the footprint with a note if a setting of the allocator alone would make the step take clearly less."""
    known = None if footprint.is_evaluation else setting_that_saves(prediction, footprint.batch_size, _WORTH_A_NOTE)
    if known is None:
        return footprint
    text, saved = known
    now, need = (format_bytes(footprint.most_device_bytes - less) for less in (0, saved))
    note = f"with {VARIABLE}={text} in the environment, the same step needs at most {need} instead of {now}"
    return replace(footprint, notes=(*footprint.notes, note))


_WORTH_A_NOTE = 0.05  # of what the step needs


def _unchanged(decision: Decision, request: Request, settings: GuardSettings) -> Decision:
    """A decision to keep the batch size, with the reason; if a check could not tell more, that comes first."""
    if settings.mode == "tune":
        matters = request.kept_by is None or not decision.fits
        return replace(decision, outcome="kept", because=request.fixed_because if matters else "")
    if decision.verdict == "unknown":
        return replace(decision, because=request.fixed_because)
    could_not = f', and mode="tune" could not change it: {request.fixed_because}' if request.fixed_because else ""
    return replace(decision, because=f'mode="check" changes nothing{could_not}')


def _fitting_validation(profile: RunProfile) -> ValidationRun | None:
    """Validation at its own batch size, or if that does not fit, at the largest that does."""
    validation, usable = profile.validation, profile.budget.usable_bytes
    if validation is not None and profile.evaluation is not None:
        validation = replace(validation, prediction=profile.evaluation.extended_to(validation.batch_size))
    if validation is None or not profile.request.free_to_choose or validation.is_fixed:
        return validation
    if validation.footprint.most_device_bytes <= usable:
        return validation
    size, unit, program = validation.batch_size, validation.unit, profile.run.evaluation.unwrap().program
    scaled = Prediction(program, Surveyor(program).survey(size, validation.prediction.terms))
    if not scaled.curve.scalable:
        return validation
    try:
        request = Request(size, max_batch_size=size, multiple_of=unit)
        size = decide(scaled.footprint_at, profile.budget, request).batch_size
    except MemGuardError:  # not even one sample fits, so training does not either
        size = unit
    return replace(validation, prediction=scaled.extended_to(size), batch_size=size)
