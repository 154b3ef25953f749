"""A Decision in one sentence: the batch size, and what set it, or whether it fits. Printed, logged and shown alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.replay import Retries
from lightning_memguard.units import counted, format_bytes, share_of

if TYPE_CHECKING:
    from lightning_memguard.core.decision.decision import Budget, Decision, HostUse, LimitedBy
    from lightning_memguard.core.decision.record import EpochRecord

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
        return (
            f"{batch} is unchanged, and whether it fits is unknown{': ' if reason else ''}{reason}. Without "
            f"its activations it takes {share_of(footprint.peak_device_bytes, budget.usable_bytes)} usable."
        )
    because = f"{': ' if decision.outcome == 'tuned' else '; unchanged because '}{reason}" if reason else ""
    if decision.verdict == "does not fit":
        return f"{batch} {_why_not(decision, footprint, because)}."
    return _why_it_fits(decision, batch, because)


def _why_it_fits(decision: Decision, batch: str, because: str) -> str:
    (footprint, budget), asked = prediction_of(decision), decision.requested_batch_size
    fits = f"{batch}{_was(decision)} fits: {share_of(footprint.most_device_bytes, budget.usable_bytes)}"
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
    if not decision.was_set:
        return f' (none was set; batch_size="keep" insists on {asked})'
    return f" (was {batch_sizes(decision, asked)})" if decision.batch_size != asked else ""


def _up_to(decision: Decision) -> str:
    """Say how large a batch would fit, and the argument that chooses it; empty if that is no more, or unknown."""
    largest = decision.largest_batch_size
    if largest is None or largest <= decision.batch_size or decision.loader_batch_sizes:
        return ""
    about = largest - largest % 10 ** max(0, len(str(largest)) - 2) if largest >= _ROUNDED else largest
    return f" Up to {about:,} would{'' if decision.outcome == 'checked' else _LARGEST}."


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
    if decision.retries:
        return f"does NOT fit with all that the allocator caches: it {retries_words(decision.retries)}{because}"
    return f"does NOT fit{', even without its activations' if footprint.is_partial else ''}{because}"


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
        return "the largest that fits" if many == 1 else f"the largest multiple of {many} that fits"
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


_PARTS = {"prefetched": "prefetched batches", "pinned": "pinned batches", "workers": "worker processes"}


def batch_sizes(record: Decision | EpochRecord, batch_size: int) -> str:
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
