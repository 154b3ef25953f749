"""Remedies that make a step fit, each with its predicted memory and its cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_memguard.core.decision.decision import needed_words
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.units import format_bytes, signed


@dataclass(frozen=True)
class Advice:
    """One remedy, or two together, and the step's memory with them.

    Attributes:
        remedies: their names, such as ``"bf16-mixed"``.
        how: what to write for each, such as ``'Trainer(precision="bf16-mixed")'``.
        costs: what each costs in accuracy, time or behavior, in plain words.
        footprint: the memory of the step with them; with accumulation, of a step on the smaller batches.
        saved_bytes: how much less that is than the step as it is.
        fits: whether it is within the budget.
        batch_sizes: the largest that fits with them, and as it is (0 if none does); None if none was looked for.
        time_ratio: the likely time of a step with them by that of the step as it is, on the same samples; None if
            either is not known.
        places: the place of each in the order of remedies, which begins with what changes the training least.
    """

    remedies: tuple[str, ...]
    how: tuple[str, ...]
    costs: tuple[str, ...]
    footprint: Footprint
    saved_bytes: int
    fits: bool
    batch_sizes: tuple[int, int] | None = None
    places: tuple[int, ...] = ()
    time_ratio: float | None = None


def text(advice: Advice) -> str:
    """Write advice for a person, in one line: what, how much, how, at what cost.

    Example:
        >>> footprint = Footprint(8, "cuda", 5 << 30, 5 << 30, 5 << 30)
        >>> text(Advice(("fused",), ("Adam(..., fused=True)",), ("none",), footprint, 1 << 30, True))
        'fused: 5.0 GiB, 1.0 GiB less, fits. Adam(..., fused=True). Costs: none.'
    """
    need = needed_words(advice.footprint)
    verdict = "fits" if advice.fits else "does not fit"
    time = "" if advice.time_ratio is None else f"{signed(advice.time_ratio - 1, 0)} time a sample"
    return (
        f"{' + '.join(advice.remedies)}: {need}, {format_bytes(advice.saved_bytes)} less, {verdict}. "
        f"{'; '.join(advice.how)}. {larger_batch(advice)}Costs: "
        f"{'; '.join(filter(None, (*advice.costs, time)))}."
    )


def larger_batch(advice: Advice) -> str:
    """Say which larger batch size fits now, in one sentence and a space; empty if none does."""
    size, now = advice.batch_sizes or (0, 0)
    return f"Batch size {size} instead of {now or 'none'}. " if size > now else ""


def in_order(advice: Iterable[Advice]) -> tuple[Advice, ...]:
    """Sort as a colleague would: what fits, the least change of the training first; then what comes nearest to fitting.

    A pair changes as much as the stronger of its two remedies, and a little more.
    """

    def key(each: Advice) -> tuple[bool, list[int], int, int]:
        change = sorted(each.places, reverse=True) if each.fits else []
        return not each.fits, change, -each.saved_bytes, len(each.remedies)

    return tuple(sorted(advice, key=key))


def shortlist(advice: Iterable[Advice], most: int = 4) -> tuple[Advice, ...]:
    """The few worth reading: of those that fit, the first; if none fits, those that come closest."""
    known = in_order(advice)
    return (tuple(each for each in known if each.fits) or known)[:most]


def what_would_fit(advice: Sequence[Advice], not_tried: int = 0) -> str:
    """Write a shortlist under its headline, as an error shows it; empty if there is no advice."""
    if not advice:
        return ""
    fitting = any(each.fits for each in advice)
    headline = "What would make it fit" if fitting else "Nothing that was tried makes it fit; what comes nearest"
    lines = [f"{headline} (each predicted by running the step on a copy):", *(f"  - {text(each)}" for each in advice)]
    were = "was" if not_tried == 1 else "were"
    return "\n".join([*lines, f"  ({not_tried} more {were} not tried, for lack of time)"] if not_tried else lines)
