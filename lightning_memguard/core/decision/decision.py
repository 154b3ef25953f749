"""Footprint + Budget -> Decision: the largest batch size that fits, and why that one."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.recurring import Retries
from lightning_memguard.core.shown import Shown
from lightning_memguard.core.trace.kept import Kept, RunsOut
from lightning_memguard.core.trace.scratch import up
from lightning_memguard.core.trace.trace import NOT_COMPILED, TIME_WAS_UP, is_note
from lightning_memguard.errors import DoesNotFitError, MemGuardError
from lightning_memguard.units import counted, format_bytes, share_of

Outcome = Literal["tuned", "kept", "checked", "stepped aside"]
"""``tuned``: the batch size was changed. ``kept``: it is what was asked for. ``checked``: ``mode="check"``: predicted,
nothing changed. ``stepped aside``: no prediction could be made."""

LimitedBy = Literal[
    "memory",
    "dataset",
    "max_batch_size",
    "request",
    "checkpoint",
    "max_steps",
    "scheduler",
    "drop_last",
    "last_batch",
    "min_steps_per_epoch",
    "shared_memory",
    "host_memory",
    "val_check_interval",
    "overfit_batches",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "time",
]
"""Reason why the batch size is not larger. ``request``: it was set, or MemGuard was not free to choose it.
``checkpoint``: the run goes on from one that was trained at it. ``max_steps``: the Trainer's steps would see more
samples. ``scheduler``: a schedule counts steps, and does not ask how many there will be. ``drop_last``: a larger one
leaves out samples that an epoch had. ``last_batch``: a larger one leaves a last batch of a single sample, which batch
norm refuses. ``min_steps_per_epoch``: a larger one leaves an epoch fewer optimizer steps. ``shared_memory``: the
loader's workers put batches in /dev/shm, which has no room for larger ones. ``host_memory``: the host has no memory for
what its workers make of larger batches. ``time``: larger ones are hardly faster. Names of the Trainer's arguments: with
larger batches, an epoch would have too few of them, or see more samples."""

Verdict = Literal["fits", "does not fit", "unknown"]
"""Whether a step is within the usable budget. ``unknown``: what is known of it is, but not all of it is known."""

_NO_LIMIT = 1 << 20  # an iterable dataset has no length; a million samples a step is beyond any use


@dataclass(frozen=True)
class Budget:
    """Memory that the training may take on its device, in bytes, and the source of that number.

    ``source`` is ``"nvml"``, ``"cuda"``, ``"host"`` (available memory), ``"cgroup"``, ``"rlimit"``, ``"mps"``,
    ``"xpu"``, ``"catalogue"`` (all memory of a GPU that is not on this machine) or ``"given"``.
    ``usable_bytes`` is ``free_bytes - margin_bytes``. ``device`` names the device in words.
    """

    total_bytes: int
    free_bytes: int
    margin_bytes: int
    source: str
    device: str = "cpu"

    @property
    def usable_bytes(self) -> int:
        """Bytes the predicted peak is compared with."""
        return self.free_bytes - self.margin_bytes

    @property
    def margin_share(self) -> float:
        """The margin as a share of what is free."""
        return self.margin_bytes / self.free_bytes if self.free_bytes else 0.0


@dataclass(frozen=True)
class HostUse:
    """Memory of the host that a run takes in addition to its own process at setup.

    On the CPU, host and device are one: the `Footprint` has all of it, and only what /dev/shm must hold is here.

    Attributes:
        parts: bytes by part: ``prefetched`` batches in shared memory, ``pinned`` copies of batches, ``workers`` (their
            processes), the buffer of a ``checkpoint``, and activations that are ``offloaded``.
        most_bytes: of all parts together, at most.
        budget: what the host offers; None on the CPU.
        shared_bytes: what is in /dev/shm at once.
        shared_budget: what /dev/shm offers; None without one.
        remedies: settings of loaders that would take less, with the bytes that they save, in plain words.
        of_saving: such settings of checkpoints.
        late_bytes: what may be in /dev/shm in addition for a moment: used batches, until their workers let go.
    """

    parts: Mapping[str, int]
    most_bytes: int
    budget: Budget | None
    shared_bytes: int
    shared_budget: Budget | None
    remedies: tuple[str, ...] = ()
    of_saving: tuple[str, ...] = ()
    late_bytes: int = 0

    @property
    def uses(self) -> tuple[tuple[int, Budget], ...]:
        """Bytes that are taken, each with the budget that must hold it."""
        held = (self.most_bytes, self.budget), (self.shared_bytes + self.late_bytes, self.shared_budget)
        return tuple((nbytes, of) for nbytes, of in held if nbytes and of)

    @property
    def overrun(self) -> tuple[int, Budget] | None:
        """Bytes that are more than a budget holds, and that budget; None if all of it fits."""
        return next(((nbytes, of) for nbytes, of in self.uses if nbytes > of.usable_bytes), None)


@dataclass(frozen=True)
class Limits:
    """The user's limits on the batch size.

    Attributes:
        margin: share of the device's memory to keep free.
        budget_bytes: what the training may take there; None for all that is free, or all of a GPU that is absent.
        min_batch_size: the smallest size to choose.
        max_batch_size: the largest, or None.
        multiple_of: only multiples of this are chosen.
        keep_effective_batch_size: samples per optimizer step over all ranks, or None.

    Raises:
        MemGuardError: one of them is out of its range, or two contradict each other.
    """

    margin: float = 0.05
    budget_bytes: int | None = None
    min_batch_size: int = 1
    max_batch_size: int | None = None
    multiple_of: int = 1
    keep_effective_batch_size: int | None = None

    def __post_init__(self) -> None:
        margin: object = self.margin
        if not isinstance(margin, (int, float)) or not 0 <= margin < 1:
            raise MemGuardError(
                f"margin={margin!r} is outside [0, 1); it is the share of the budget to keep free, such as 0.05."
            )
        for name in ("min_batch_size", "max_batch_size", "multiple_of", "keep_effective_batch_size"):
            value = getattr(self, name)
            if value is not None or name in ("min_batch_size", "multiple_of"):
                check_count(name, value)
        smallest = up(self.min_batch_size, self.multiple_of)
        if self.max_batch_size is not None and smallest > self.max_batch_size:
            least, most = f"min_batch_size={self.min_batch_size}", f"max_batch_size={self.max_batch_size}"
            why = f"{least} is above {most}"
            if self.multiple_of > 1:
                why = f"multiple_of={self.multiple_of} has no multiple from {least} to {most}"
            raise MemGuardError(f"No batch size is left to choose: {why}.")

    def request(
        self, batch_size: int, *, unit: int, dataset_size: int | None, accumulate_grad_batches: int, ranks: int
    ) -> Request:
        """The request of a run whose batch sizes must be multiples of ``unit``; see `Request`."""
        least, most, effective = self.min_batch_size, self.max_batch_size, self.keep_effective_batch_size
        multiple_of = math.lcm(self.multiple_of, unit)
        return Request(batch_size, least, most, multiple_of, dataset_size, effective, accumulate_grad_batches, ranks)


@dataclass(frozen=True)
class Request:
    """Batch size that was asked for, and the limits on choosing another.

    Attributes:
        batch_size: the loader's own.
        min_batch_size: the smallest size to choose.
        max_batch_size: the largest, or None.
        multiple_of: only multiples of this are chosen.
        dataset_size: the largest size that a rank's data allows, or None if that is unknown.
        keep_effective_batch_size: samples per optimizer step over all ranks, or None.
        accumulate_grad_batches: the Trainer's own.
        ranks: processes that train together.
        free_to_choose: False to predict at ``batch_size`` and change nothing.
        fixed_because: why the size is not free to choose, in plain words; empty if it is, or none was to be chosen.
        dataset_limit: what sets ``dataset_size``: the samples there are, or a setting that needs several batches.
        run_size: the largest size that ``run_limit`` allows, or None.
        prefers_fast: whether the smallest size that is about as fast as the fastest is chosen, instead of the largest.
        kept_by: why a batch size that fits is kept; None if it may grow. Other limits hold for sizes that are chosen.
        was_set: whether the loader's batch size was set.
        run_limit: what sets ``run_size``: `Limits.min_steps_per_epoch`, a setting that counts batches, shared memory.
    """

    batch_size: int
    min_batch_size: int = 1
    max_batch_size: int | None = None
    multiple_of: int = 1
    dataset_size: int | None = None
    keep_effective_batch_size: int | None = None
    accumulate_grad_batches: int = 1
    ranks: int = 1
    free_to_choose: bool = True
    fixed_because: str = ""
    dataset_limit: LimitedBy = "dataset"
    run_size: int | None = None
    run_limit: LimitedBy = "min_steps_per_epoch"
    prefers_fast: bool = False
    kept_by: LimitedBy | None = None
    was_set: bool = True

    @property
    def may_grow(self) -> bool:
        """Whether a batch size that fits may become larger."""
        return self.free_to_choose and self.kept_by is None

    @property
    def smallest_batch_size(self) -> int:
        """The smallest size there is to choose."""
        return up(self.min_batch_size, self.multiple_of)


@dataclass(frozen=True, repr=False)
class Decision(Shown):
    """The batch size, and why.

    Attributes:
        batch_size: samples per batch on each rank; the one to train with.
        requested_batch_size: the loader's own.
        accumulate_grad_batches: batches per optimizer step.
        outcome: see `Outcome`.
        footprint: predicted at ``batch_size``; None if no prediction could be made.
        budget: what the device offers; None if it was not read.
        limited_by: what keeps the batch size from being larger.
        because: why no size was chosen, why another than planned, or why no prediction could be made, in plain words;
            empty otherwise.
        largest_batch_size: the largest that memory and data allow; None if it is not known without further captures, or
            cannot be changed.
        was_set: whether the loader's batch size was set; a DataLoader that is made without one has 1.
        multiple_of: only multiples of this were chosen from.
        validation_batch_size: samples per batch in the fit's validation: as asked, or the largest that fits; None if
            validation was not predicted.
        steps_per_epoch: optimizer steps of an epoch at this size and accumulation; None if unknown, and outside a
            fit.
        requested_steps_per_epoch: the same as requested.
        requested_accumulate_grad_batches: the Trainer's own.
        loader_batch_sizes: of each loader, if there are several; ``batch_size`` is the smallest of them.
        host: what the run takes of the host, if its worker processes or checkpoints take any.
        kept: what each batch leaves behind, the most first.
        runs_out_at: when what outlives its epoch fills the budget; None if it does not while the fit runs.
        retries: how a step runs that does not fit with all that the allocator caches; None if it fits, or if it fails.
        setting: of PyTorch's allocator, as in the environment, with which a step would fit that does not; else empty.
    """

    batch_size: int
    requested_batch_size: int
    accumulate_grad_batches: int
    outcome: Outcome
    footprint: Footprint | None
    budget: Budget | None
    limited_by: LimitedBy
    because: str = ""
    largest_batch_size: int | None = None
    was_set: bool = True
    multiple_of: int = 1
    validation_batch_size: int | None = None
    steps_per_epoch: int | None = None
    requested_steps_per_epoch: int | None = None
    requested_accumulate_grad_batches: int = 1
    loader_batch_sizes: tuple[int, ...] = ()
    host: HostUse | None = None
    kept: tuple[Kept, ...] = ()
    runs_out_at: RunsOut | None = None
    retries: Retries | None = None
    setting: str = ""

    @property
    def reason(self) -> str:
        """The batch size, and what set it, or whether it fits: the sentence that is printed."""
        return sentence_of(self)

    def __repr__(self) -> str:
        shown = ("batch_size", "accumulate_grad_batches", "largest_batch_size", "outcome", "limited_by", "reason")
        return f"Decision({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def pieces(self) -> int:
        """Equal pieces into which each of the loader's batches is divided, with their gradients accumulated; else 1."""
        asked, pieces = self.requested_batch_size, self.requested_batch_size // max(1, self.batch_size)
        batches, before = self.accumulate_grad_batches, self.requested_accumulate_grad_batches
        return pieces if pieces * self.batch_size == asked and pieces * before == batches else 1

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions of the prediction, in plain words without a full stop; `because` is not repeated."""
        return tuple(note for note in (self.footprint.notes if self.footprint else ()) if note not in self.because)

    @property
    def verdict(self) -> Verdict:
        """Whether the run fits its device and the host; ``unknown`` if not all of its memory was predicted."""
        if self.footprint is None or self.budget is None:
            return "unknown"
        if self.host and self.host.overrun:
            return "does not fit"
        return verdict(self.footprint, self.budget)

    @property
    def fits(self) -> bool:
        """Whether the step is known to fit the usable budget; see `verdict`."""
        return self.verdict == "fits"

    @property
    def is_tight(self) -> bool:
        """Whether the batch size was cut, or a step is not known to leave a tenth of what the device has free."""
        if self.footprint is None or self.budget is None or not self.fits:
            return True
        most = _TIGHT * self.budget.free_bytes
        return self.batch_size < self.requested_batch_size or self.footprint.most_device_bytes > most

    def would_overrun(self, ratio: float) -> bool:
        """Whether a peak ``ratio`` times the predicted one would pass the whole budget, margin included."""
        if self.footprint is None or self.budget is None:
            return False
        return self.footprint.most_device_bytes * ratio > self.budget.free_bytes


_TIGHT = 0.9


def verdict(footprint: Footprint, budget: Budget) -> Verdict:
    """Whether a step fits a budget, as far as its memory is known."""
    if footprint.most_device_bytes > budget.usable_bytes:
        cut = footprint.is_cut and footprint.lowest.device_bytes <= budget.usable_bytes
        return "unknown" if cut else "does not fit"
    return "unknown" if footprint.is_partial else "fits"


# -- in one sentence: printed, logged and shown alike

_LIMITS: dict[LimitedBy, str] = {
    "dataset": "limited by the size of the dataset, not by memory",
    "max_batch_size": "limited by max_batch_size, not by memory",
    "request": "keeps the effective batch size",
    "checkpoint": "the one the checkpoint was trained with (min_batch_size insists on a larger one)",
    "max_steps": "with larger batches, max_steps would see more samples (min_steps_per_epoch=None allows it)",
    "scheduler": "a schedule counts steps without `estimated_stepping_batches`, and larger batches would leave it "
    "fewer (min_steps_per_epoch=None allows it)",
    "drop_last": "with drop_last=True, a larger one leaves out samples that an epoch had",
    "time": "larger ones are predicted to be at most 3% faster a sample",
    "last_batch": "a larger one leaves a last batch of a single sample, which batch norm refuses",
}


def sentence_of(decision: Decision) -> str:
    """The batch size, and what set it, or whether it fits; of a run that was not tuned, the reason alone."""
    if decision.footprint is None or decision.budget is None:
        return decision.because
    reason, (footprint, budget) = decision.because.rstrip("."), prediction_of(decision)
    now = batch_sizes(decision, decision.batch_size)
    batch = f"the largest of the batches drawn ({footprint.batch})" if footprint.batch else f"batch size {now}"
    if decision.verdict == "unknown":
        least, most = footprint.peak_device_bytes, footprint.most_device_bytes
        how = {"cut": "It takes at least", "states": "Without its activations it takes"}.get(footprint.method)
        takes = f"{how or 'It takes'} {share_of(least, budget.usable_bytes)} usable"
        takes += "" if how else f", or up to {format_bytes(most)}"
        return f"{batch} is unchanged, and whether it fits is unknown{': ' if reason else ''}{reason}. {takes}."
    because = f"{': ' if decision.outcome == 'tuned' else '; unchanged because '}{reason}" if reason else ""
    if decision.verdict == "does not fit":
        return f"{batch} {_why_not(decision, footprint, because)}.{_up_to(decision)}"
    without = _WITHOUT_VALIDATION if any(is_note(each, "no validation") for each in footprint.notes) else ""
    unseen = _AS_WRITTEN if footprint.is_as_written else _OUT_OF_TIME
    return _why_it_fits(decision, batch, because) + (unseen if footprint.is_cut else without)


def _why_it_fits(decision: Decision, batch: str, because: str) -> str:
    (footprint, budget), asked = prediction_of(decision), decision.requested_batch_size
    fits = f"{batch}{_was(decision)} fits: {share_of(footprint.most_shown_bytes, budget.usable_bytes)}"
    if decision.outcome == "checked" or (because and decision.outcome != "tuned"):
        return f"{fits}{because}.{_up_to(decision)}"
    size, batches, before = (
        decision.batch_size,
        decision.accumulate_grad_batches,
        decision.requested_accumulate_grad_batches,
    )
    if size < asked and batches > before:
        seen, all_before = size * batches, asked * before
        samples = f"{seen} samples as before" if seen == all_before else f"{seen} samples instead of {all_before}"
        was = f"(was {batch_sizes(decision, asked)}, which does not fit)"
        return f"{batch} {was}: gradients of {batches} batches make a step, {samples}."
    if decision.limited_by == "request" and size == asked and batches == before:
        return f"{fits}.{_up_to(decision)}"
    accumulated = f", with gradients accumulated over {batches} batches" if batches > 1 else ""
    fewer = _fewer_steps(decision)
    fewer = f"; {fewer}" if fewer and decision.limited_by != "min_steps_per_epoch" else ""
    return f"{fits}; {decision.because.rstrip('.') or _limit(decision)}{accumulated}{fewer}."


def _was(decision: Decision) -> str:
    """Say which batch size it was, if it changed; that none was set, if none was."""
    asked = decision.requested_batch_size
    if decision.outcome != "tuned":
        return ""
    if not decision.was_set:
        return f' (none was set; batch_size="keep" insists on {asked})'
    return f" (was {batch_sizes(decision, asked)})" if decision.batch_size != asked else ""


def _up_to(decision: Decision) -> str:
    """Say how large a batch would fit, and the argument that grows to it; empty if that is no other, or unknown."""
    largest, size, fits = decision.largest_batch_size, decision.batch_size, decision.fits
    if not largest or largest == size or (largest < size) == fits or decision.loader_batch_sizes:
        return ""
    rounded = largest - largest % 10 ** max(0, len(str(largest)) - 2) if largest >= _ROUNDED else largest
    about = "" if rounded == largest else "about "
    return f" Up to {about}{rounded:,} would{_LARGEST if fits and decision.outcome != 'checked' else ''}."


_WITHOUT_VALIDATION = " Validation is not included: what it takes is unknown."
_OUT_OF_TIME = f" {TIME_WAS_UP.capitalize()} before captures checked that."
_AS_WRITTEN = f" {NOT_COMPILED.capitalize()}."
_ROUNDED = 1000
_LARGEST = ' (batch_size="largest")'


def _why_not(decision: Decision, footprint: Footprint, because: str) -> str:
    if decision.host and decision.host.overrun:
        nbytes, of = decision.host.overrun
        room, remedies = format_bytes(of.usable_bytes), _host_remedies(decision.host, of)
        parts = decision.host.parts if of is decision.host.budget else {}
        *others, last = map(part_words, parts or ("prefetched batches",))
        takers = f"{', '.join(others)} and {last}" if others else last
        need = f"{takers} are predicted to take up to {format_bytes(nbytes)}, and {room} are usable there"
        return f"does NOT fit {of.device}{because}: {need}. Remedies: {remedies}"
    if footprint.phase == "checkpoint":
        return f"does NOT fit while a checkpoint is saved{because}"
    if footprint.epoch and not footprint.epoch.fits:
        remedy = footprint.epoch.remedy
        return f"does NOT fit{because}: {footprint.epoch.text}{f'. To make it fit, {remedy.how}' if remedy else ''}"
    would = f", but would with {decision.setting} in the environment" if decision.setting else ""
    if decision.retries:
        return f"does NOT fit with all that the allocator caches{would}: it {retries_words(decision.retries)}{because}"
    return f"does NOT fit{would}{', even without its activations' if footprint.method == 'states' else ''}{because}"


def retries_words(retries: Retries) -> str:
    """Say how a step runs that does not fit with all that the allocator caches."""
    if retries.per_step:
        return f"runs, but empties the cache {'each step' if retries.per_step >= 1 else 'every few steps'}"
    return f"runs, but empties the cache {counted(retries.at_first, 'time')} in its first steps"


def _fewer_steps(decision: Decision) -> str:
    """Say how many optimizer steps an epoch has left at a larger batch size; empty if all, or if that is unknown."""
    now, before, asked = decision.steps_per_epoch, decision.requested_steps_per_epoch, decision.requested_batch_size
    if decision.batch_size <= asked or not now or not before or now >= before:
        return ""
    least = "min_steps_per_epoch allows no fewer; " if decision.limited_by == "min_steps_per_epoch" else ""
    steps = counted(now, "optimizer step")
    return f"an epoch has {steps} instead of {before} ({least}max_batch_size={asked} keeps all)"


def _limit(decision: Decision) -> str:
    limit, many = decision.limited_by, decision.multiple_of
    if limit == "memory":
        return "no larger one does" if many == 1 else f"no larger multiple of {many} does"
    if limit == "min_steps_per_epoch":
        steps = decision.steps_per_epoch
        its = f"than its {counted(steps, 'optimizer step')}" if steps else "optimizer steps, whose number is unknown"
        fewer = f"larger batches leave an epoch fewer {its} (min_steps_per_epoch=None allows it)"
        return _fewer_steps(decision) or fewer
    if limit in ("shared_memory", "host_memory") and decision.host:
        of = decision.host.shared_budget if limit == "shared_memory" else decision.host.budget
        if of is not None:
            free, remedies = format_bytes(of.free_bytes), _host_remedies(decision.host, of)
            return f"larger batches, as workers prefetch them, do not fit {of.device} ({free} free): {remedies}"
    too = "has too few of them for it" if limit == "val_check_interval" else "would have more samples, or no batch"
    return _LIMITS.get(limit, f"limited by {limit}: with larger batches, an epoch {too}")


def _host_remedies(host: HostUse, of: Budget) -> str:
    more = ("--shm-size gives a container more",) if of is host.shared_budget else host.of_saving
    return "; ".join((*host.remedies, *more))


def part_words(part: str) -> str:
    """The name of a part for a person: ``"optimizer state"``."""
    return _PARTS.get(part, part.replace("_", " "))


_PARTS = {
    "prefetched": "prefetched batches",
    "pinned": "pinned batches",
    "workers": "worker processes",
    "offloaded": "activations",
}


class _OfLoaders(Protocol):
    @property
    def batch_size(self) -> int: ...
    @property
    def loader_batch_sizes(self) -> tuple[int, ...]: ...


def batch_sizes(record: _OfLoaders, batch_size: int) -> str:
    """Write a batch size; of several loaders, all of theirs: ``"8 + 16"``.

    Args:
        record: the sizes of the loaders.
        batch_size: the smallest of them, as chosen or as requested: they keep their ratio.
    """
    scaled = (str(size * batch_size // record.batch_size) for size in record.loader_batch_sizes)
    return " + ".join(scaled) or str(batch_size)


def prediction_of(decision: Decision) -> tuple[Footprint, Budget]:
    """The prediction and the budget behind a decision to be shown; of a run that is not tuned, nothing is shown."""
    assert decision.footprint is not None
    assert decision.budget is not None
    return decision.footprint, decision.budget


# -- the choice


def decide(footprint_at: Callable[[int], Footprint], budget: Budget, request: Request) -> Decision:
    """Choose the largest batch size whose predicted peak fits the budget; one that is kept if it fits, is kept.

    Args:
        footprint_at: batch size -> footprint. Peaks grow with the size.
        budget: what the device offers.
        request: what was asked for.

    Raises:
        DoesNotFitError: even the smallest size allowed does not fit.
        MemGuardError: the effective batch size asked for is below the smallest size allowed.
    """
    asked, batches, step = request.batch_size, request.accumulate_grad_batches, request.multiple_of

    def bytes_at(size: int) -> int:
        return footprint_at(size).most_device_bytes

    def decided(size: int, accumulate: int, outcome: Outcome, limited_by: LimitedBy) -> Decision:
        return Decision(
            size,
            asked,
            accumulate,
            outcome,
            footprint_at(size),
            budget,
            limited_by,
            multiple_of=step,
            was_set=request.was_set,
            requested_accumulate_grad_batches=batches,
        )

    if not request.free_to_choose:
        return decided(asked, batches, "checked", "request")
    fits = request.kept_by is not None and bytes_at(asked) <= budget.usable_bytes
    allowed = asked <= (request.max_batch_size or asked)
    if request.kept_by and fits and allowed and request.keep_effective_batch_size is None:
        return decided(asked, batches, "kept", request.kept_by)
    lowest, highest, bound = _range(request, fits=fits)
    any_fits = bytes_at(lowest) <= budget.usable_bytes
    size = largest = largest_within(lowest, highest, step, bytes_at, budget.usable_bytes) if any_fits else lowest
    accumulate = batches
    shrinks = size < asked and allowed and (request.kept_by or asked <= highest)
    is_cut = shrinks and footprint_at(min(largest + step, highest) if any_fits else lowest).is_cut
    if is_cut and verdict(footprint_at(asked), budget) == "unknown":  # no batch shrinks for that
        because = NOT_COMPILED if footprint_at(asked).is_as_written else _CUT
        return replace(decided(asked, batches, "kept", "request"), because=because)
    if not any_fits:
        raise _does_not_fit(footprint_at(lowest), budget, request)
    if request.keep_effective_batch_size is not None:
        size, accumulate = _split(largest, request, request.keep_effective_batch_size)
    at_bound: LimitedBy = bound if largest + step > highest else "memory"
    return decided(size, accumulate, "kept" if size == asked else "tuned", at_bound if size == largest else "request")


_CUT = f"{TIME_WAS_UP} before captures could tell"


def _range(request: Request, *, fits: bool) -> tuple[int, int, LimitedBy]:
    """The smallest and largest size to choose from, in steps of ``multiple_of``, and what sets the largest.

    ``fits``: whether a batch size that is kept fits; the smallest to choose is no larger than that one.
    """
    step, lowest, effective = request.multiple_of, request.smallest_batch_size, request.keep_effective_batch_size
    bounds: dict[LimitedBy, int | None] = {
        "memory": _NO_LIMIT,
        request.run_limit: request.run_size,
        request.dataset_limit: request.dataset_size,
        "max_batch_size": request.max_batch_size,
        "request": None if effective is None else effective // request.ranks,
    }
    if request.kept_by:
        lowest, bounds[request.kept_by if fits else "memory"] = min(lowest, request.batch_size), request.batch_size
    highest, bound = min(((most, name) for name, most in bounds.items() if most is not None), key=lambda pair: pair[0])
    if effective is not None and lowest * request.ranks > effective:
        raise MemGuardError(
            f"keep_effective_batch_size={effective} is below the smallest batch there is: {lowest} samples on each of "
            f"{request.ranks} ranks. Lower `min_batch_size` or `multiple_of`, or raise `keep_effective_batch_size`."
        )
    return lowest, max(highest // step * step, lowest), bound


def largest_within(
    lowest: int, highest: int, step: int, bytes_at: Callable[[int], int], usable: int, first: int = 0
) -> int:
    """The largest size that fits; ``lowest`` does. The search begins at ``first``, if that lies between the two ends.

    Peaks are close to lines, so a line through two sizes tells which to look at next, and a few are enough; every other
    time the gap is halved. The search ends at two neighbors, one that fits and one that does not.
    """
    good, bad, before, above = lowest, highest + step, lowest, 0  # ``above``: bytes at ``bad``, if they are known
    halves = False
    if lowest < first < highest:
        at_first = bytes_at(first)
        good, bad, above = (lowest, first, at_first) if at_first > usable else (first, bad, above)
    while bad - good > step:
        at_good = bytes_at(good)
        slope = (above - at_good) / (bad - good) if above else (at_good - bytes_at(before)) / max(1, good - before)
        reach = _FARTHEST * (good - lowest + step)
        ahead = min(reach, int((usable - at_good) / slope)) if slope > 0 else reach
        if halves and above:
            ahead = (bad - good) // 2
        trial = good + min(max(step, ahead // step * step), bad - good - step)
        found, halves = bytes_at(trial), not halves
        if found > usable:
            bad, above = trial, found
        else:
            before, good = good, trial
            if bad - good > step and ahead < reach and bytes_at(good + step) > usable:
                break
    return good


_FARTHEST = 32  # times as far as it came so far


def largest_that(holds: Callable[[int], bool], good: int, most: int) -> int:
    """The largest number up to ``most`` for which it holds; ``most`` is tried first, then the gap is halved.

    Args:
        holds: whether it holds for a number; if it fails for one, it fails for all larger ones.
        good: a number for which it is believed to hold; it is not tried.
        most: the largest number to consider.

    Example:
        >>> largest_that(lambda number: number * number <= 50, good=1, most=100)
        7
    """
    if most <= good or holds(most):
        return most
    return good + bisect_left(range(good + 1, most), True, key=lambda number: not holds(number))


def _split(largest: int, request: Request, effective: int) -> tuple[int, int]:
    """Size and accumulation whose product over all ranks comes nearest to the effective size, and not above it.

    A size down to half the largest is taken if it comes nearer; no smaller one can, as two of its batches fit in one.
    """
    nearly = range(largest, max(request.smallest_batch_size, largest // 2) - 1, -request.multiple_of)
    total, size = max((size * request.ranks * max(1, effective // (size * request.ranks)), size) for size in nearly)
    return size, total // (size * request.ranks)


CONTEXT = "context"  # of a device, and its libraries: no part of a step
_RULES_OF_THUMB = {
    "parameters": "Use a smaller model, shard it across devices",
    "buffers": "Use smaller buffers, keep them off the device",
    "gradients": "Freeze part of the model, shard it across devices",
    "optimizer_state": "Use an optimizer with less state (SGD, Adafactor), shard it across devices",
    "activations": "Use bf16-mixed precision, activation checkpointing or smaller inputs",
    "batch": "Use smaller inputs",
    "temporaries": "Use bf16-mixed precision or smaller inputs",
    "workspaces": "Use smaller inputs",
    "callbacks": "Use fewer callbacks that keep copies of the model on the device, such as StochasticWeightAveraging",
    "checkpoint": "Use save_weights_only=True in ModelCheckpoint",
    "gathered": "Shard smaller layers by themselves, reshard them after the forward pass",
    "prefetched": "Set prefetch_factor=1 in DataLoader, use fewer workers",
    "workers": "Use fewer workers",
    CONTEXT: "Use a GPU with more memory: no setting of the training makes its context smaller",
    "communication": "Set gradient_as_bucket_view=True in DDPStrategy, freeze part of the model",
}


def _does_not_fit(footprint: Footprint, budget: Budget, request: Request) -> DoesNotFitError:
    need, usable, part = footprint.most_device_bytes, budget.usable_bytes, footprint.largest_part
    outside, where = footprint.outside_bytes, ""
    if footprint.is_evaluation:
        where = f" in {footprint.phase}{footprint.module and f' ({footprint.module})'}"
    largest = f"{part.replace('_', ' ')}, {format_bytes(footprint.parts[part])}"
    if outside > footprint.parts[part]:
        part, largest = CONTEXT, f"the device's context and libraries, {format_bytes(outside)}"
    return DoesNotFitError(
        f"Batch size {footprint.batch_size} needs {needed_words(footprint)}{where}; {budget.device} offers "
        f"{format_bytes(usable)} after a {budget.margin_share:.0%} margin ({format_bytes(budget.free_bytes)} "
        f"{'given' if budget.source == 'given' else f'free, source: {budget.source}'}), short by "
        f"{format_bytes(need - usable)}. The largest part is {largest}.{_unknown(footprint)}",
        needed_bytes=need,
        usable_bytes=usable,
        largest_part=part,
        rule_of_thumb=_RULES_OF_THUMB[part],
        way_out=_way_out(need, budget) + (", or lower `min_batch_size`" if request.min_batch_size > 1 else ""),
    )


def _unknown(footprint: Footprint) -> str:
    """Say how many bytes are not known in advance, if they are more than any part."""
    unsure = footprint.most_device_bytes - footprint.peak_device_bytes
    if unsure <= max(footprint.outside_bytes, footprint.parts[footprint.largest_part]):
        return ""
    return f" Up to {format_bytes(unsure)} more cannot be known in advance."


def needed_words(footprint: Footprint) -> str:
    """The predicted peak, and its upper bound, which is what a budget is compared with, if that is more."""
    peak, most = format_bytes(footprint.peak_device_bytes), format_bytes(footprint.most_device_bytes)
    return peak if peak == most else f"{peak}, at most {most}"


def _way_out(need: int, budget: Budget) -> str:
    if need <= budget.free_bytes:
        return "lower `margin`"
    if budget.source == "given":
        return "raise `budget`"
    return "free memory held by other processes" if need <= budget.total_bytes else "use a device with more memory"


def check_count(name: str, value: object) -> None:
    """Check a number of samples or batches that a user gave.

    Raises:
        MemGuardError: it is not a whole number of 1 or more.
    """
    if type(value) is not int or value < 1:
        raise MemGuardError(f"{name}={value!r} is not a count; pass an int of 1 or more.")
