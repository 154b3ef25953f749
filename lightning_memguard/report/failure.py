"""What came otherwise than predicted, in words: a larger batch; a step that ran out of memory."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memguard.core.decision.decision import Budget
from lightning_memguard.core.decision.record import Measured
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.trace.trace import Shapes
from lightning_memguard.units import format_bytes

_MOST_SHAPES = 6


@dataclass(frozen=True)
class Larger:
    """A batch that is larger than the one predicted from, and what it will take."""

    shapes: Shapes
    predicted_shapes: Shapes
    footprint: Footprint
    budget: Budget

    @property
    def fits(self) -> bool:
        """Whether it fits all the same."""
        return self.footprint.most_device_bytes <= self.budget.usable_bytes


def announcement(larger: Larger, role: str, batch_idx: int) -> str:
    """Say what a batch that is larger than predicted will take, and whether it fits."""
    need, budget = larger.footprint.most_device_bytes, larger.budget
    kind = "training" if role == "train" else "evaluation"
    fits = "it fits" if larger.fits else "it may run out of memory; lower the batch size or cut long samples"
    return (
        f"{kind.capitalize()} batch {batch_idx} has {_listed(larger.shapes)}, larger than the "
        f"{_listed(larger.predicted_shapes)} predicted from: predicted to take {format_bytes(need)} of the "
        f"{format_bytes(budget.usable_bytes)} that {budget.device} offers after the margin: {fits}."
    )


@dataclass(frozen=True)
class Failure:
    """An out-of-memory error, and what was known when it came.

    Attributes:
        predicted: the footprint that was decided on.
        measured: what the training had taken by then, or None where nothing tells.
        budget: what the device offered at setup.
        budget_now: what it offers now, or None where it does not say.
        shapes: of the batch that failed.
        predicted_shapes: of the batch predicted from.
        would_fit: the largest batch size that would have fitted; None if not even one sample would.
    """

    predicted: Footprint
    measured: Measured | None
    budget: Budget
    budget_now: Budget | None
    shapes: Shapes
    predicted_shapes: Shapes
    would_fit: int | None


def note(failure: Failure) -> str:
    """Say what was predicted and what came, what else is on the device, which batch it was, and what would have fit."""
    notes = [f"It had assumed: {text}." for text in failure.predicted.notes]
    words = [_predicted(failure), _room(failure), _batch(failure), *notes, _advice(failure)]
    return "\n".join(words)


def _predicted(failure: Failure) -> str:
    predicted = failure.predicted
    return (
        f"MemGuard predicted {format_bytes(predicted.peak_device_bytes)} at batch size {predicted.batch_size}"
        f"{_at_most(predicted)}, peak in {predicted.phase or 'the step'}; {_measured(failure.measured)}."
    )


def _at_most(predicted: Footprint) -> str:
    if predicted.most_device_bytes == predicted.peak_device_bytes:
        return ""
    return f" ({format_bytes(predicted.most_device_bytes)} at most)"


def _measured(measured: Measured | None) -> str:
    if measured is None or not measured.peak_bytes:
        return "what had been taken by then could not be measured"
    return f"{format_bytes(measured.peak_bytes)} had been taken by then ({measured.source})"


def _room(failure: Failure) -> str:
    budget, now = failure.budget, failure.budget_now
    then = f"{budget.device} offered {format_bytes(budget.free_bytes)} at setup ({budget.source})"
    if now is None:
        return f"{then}."
    others = max(0, now.total_bytes - now.free_bytes)
    return (
        f"{then}; now {format_bytes(now.free_bytes)} of its {format_bytes(now.total_bytes)} are this training's to "
        f"take ({now.source}), {format_bytes(others)} are taken by others."
    )


def _batch(failure: Failure) -> str:
    if not failure.shapes:
        return "No batch had been seen yet: memory ran out before the first step."
    shapes = _listed(failure.shapes)
    if failure.shapes == failure.predicted_shapes:
        return f"The batch was as predicted: {shapes}."
    return f"The batch had {shapes}; predicted from {_listed(failure.predicted_shapes)}."


def _listed(shapes: Shapes) -> str:
    listed = ", ".join(str(list(shape)) for shape in shapes[:_MOST_SHAPES])
    return listed + (f" and {len(shapes) - _MOST_SHAPES} more" if len(shapes) > _MOST_SHAPES else "")


def _advice(failure: Failure) -> str:
    if failure.would_fit is None:
        return (
            "Not even one sample would have fitted: use bf16-mixed precision, activation checkpointing, or a smaller "
            "model."
        )
    taken = failure.measured.peak_bytes if failure.measured else 0
    over = taken > failure.predicted.peak_device_bytes
    grown = " if steps take as much more than predicted as this one did" if over else ""
    return (
        f"A batch size of {failure.would_fit} would have fitted{grown}: set max_batch_size={failure.would_fit}, or "
        "raise `margin`."
    )
