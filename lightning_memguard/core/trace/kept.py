"""Memory that each step leaves behind, the attribute that holds it, and the epoch at which it fills what is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Kept:
    """Memory that each batch, or each epoch, leaves behind.

    Attributes:
        holder: the attribute or variable that holds it, such as ``"self.outputs"``; empty if unknown.
        line: the file and line that put it there, or made it: ``"model.py:41"``; empty if unknown.
        has_graph: whether tensors are held with their autograd graph.
        when: what leaves it: each batch of training or of validation, or each epoch.
        lasts: whether it outlives the epoch, as far as the code tells; else it is counted for one epoch.
        fixed_bytes: of each batch, whatever its size.
        sample_bytes: in addition, of each sample.
        on_host: whether it is the host's memory of a run on another device.
        stays: whether what a validation leaves is there until the next one, next to training.
    """

    holder: str
    line: str
    has_graph: bool
    when: Literal["step", "validation", "epoch"]
    lasts: bool
    fixed_bytes: int
    sample_bytes: float = 0.0
    on_host: bool = False
    stays: bool = False

    def bytes_at(self, batch_size: int) -> int:
        """Bytes that a batch of a size leaves behind."""
        return int(self.fixed_bytes + self.sample_bytes * batch_size)


def places(kept: Iterable[Kept]) -> str:
    """Name the attributes that hold memory, and their lines: ``" in `self.outputs` (model.py:41)"``."""

    def place(of: Kept) -> str:
        if not of.holder:
            return f"of {of.line}"
        return f"in `{of.holder}`{of.line and f' ({of.line})'}"

    return f" {', '.join(place(each) for each in kept if each.holder or each.line)}".rstrip()


RETURNED = "the list that `trainer.predict` returns"
"""The holder of what `predict` keeps of each batch."""


def remedy(of: Kept) -> str:
    """Say how to keep less, in one sentence without a full stop."""
    if of.holder == RETURNED:
        return "return_predictions=False keeps none"
    if of.has_graph:
        return "`.detach()` what is kept, which holds its graph"
    if of.holder.startswith("the cache of"):
        return "Give that cache a `maxsize`"
    return "Keep less there (`.item()`)"


def left_words(of: Kept, nbytes: str) -> str:
    """Say that what batches leave behind in one place adds up to so many bytes in an epoch, and what keeps less."""
    who = "training batch" if of.when == "step" else "batch"
    where = f" in {RETURNED}" if of.holder == RETURNED else places([of])
    return f"what each {who} leaves{where} adds up to {nbytes} in an epoch: {remedy(of)}"


def fit_kept(captured: Iterable[tuple[int, Sequence[Kept]]]) -> tuple[Kept, ...]:
    """Combine what was found at several batch sizes: bytes that grow with the batch size are by the sample."""
    ordered = sorted(captured) or [(1, ())]
    (small, less), (large, more) = ordered[0], ordered[-1]
    before = {(each.holder, each.line): each.fixed_bytes for each in less}
    slopes = [(each.fixed_bytes - before.get((each.holder, each.line), 0)) / max(1, large - small) for each in more]
    pairs = zip(more, (max(0.0, slope) for slope in slopes), strict=True)
    return tuple(
        replace(each, fixed_bytes=int(each.fixed_bytes - slope * large), sample_bytes=slope) for each, slope in pairs
    )


@dataclass(frozen=True)
class RunsOut:
    """The training batch at which memory runs out, and its epoch, both counted from 0."""

    epoch: int
    step: int


# A run that sets no end itself is assumed to end here: a metric's list of four bytes a step is not a leak.
MOST_EPOCHS, MOST_STEPS = 10_000, 100_000_000


def runs_out(
    room_bytes: int, step_bytes: int, epoch_bytes: int, batches: int | None, epochs: float, steps: float
) -> RunsOut | None:
    """Find when memory that is left behind for good fills the room; None if the run ends before that.

    Each training batch leaves ``step_bytes``, and each epoch ``epoch_bytes`` in all. At the peak of the first epoch,
    which includes what it leaves, ``room_bytes`` are free. ``batches`` of an epoch is None if unknown.
    """
    if batches is None or not epoch_bytes:
        step = max(0, room_bytes) // step_bytes if step_bytes else steps
        return RunsOut(0, int(step)) if step < steps else None
    epoch = max(0, room_bytes // epoch_bytes + 1)
    over = epoch * epoch_bytes - room_bytes  # at the end of that epoch
    step = max(0, batches - 1 - ((over - 1) // step_bytes if step_bytes else 0))
    return RunsOut(epoch, step) if epoch < epochs and epoch * batches + step < steps else None
