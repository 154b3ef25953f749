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
        sample_bytes: of each sample, besides.
    """

    holder: str
    line: str
    has_graph: bool
    when: Literal["step", "validation", "epoch"]
    lasts: bool
    fixed_bytes: int
    sample_bytes: float = 0.0

    def bytes_at(self, batch_size: int) -> int:
        """Bytes that a batch of a size leaves behind."""
        return int(self.fixed_bytes + self.sample_bytes * batch_size)


def fit_kept(captured: Iterable[tuple[int, Sequence[Kept]]]) -> tuple[Kept, ...]:
    """Combine what was found at several batch sizes: bytes that grow with the batch size are by the sample."""
    (small, less), *_, (large, more) = ordered if len(ordered := sorted(captured)) > 1 else ordered * 2 or [(0, ())] * 2
    before = {(each.holder, each.line): each.fixed_bytes for each in less}
    fitted = []
    for each in more:
        rise = each.fixed_bytes - before.get((each.holder, each.line), 0)
        slope = max(0.0, rise / (large - small)) if large > small else 0.0
        fitted.append(replace(each, fixed_bytes=int(each.fixed_bytes - slope * large), sample_bytes=slope))
    return tuple(fitted)


@dataclass(frozen=True)
class RunsOut:
    """Moment at which memory ends: a training batch of an epoch, both counted from 0."""

    epoch: int
    step: int


def runs_out(
    room_bytes: int, step_bytes: int, epoch_bytes: int, batches: int | None, epochs: float, steps: float
) -> RunsOut | None:
    """Find when memory ends that is left behind for good; None if it lasts to the end of the run.

    Args:
        room_bytes: free next to the first epoch's peak, which includes what that epoch leaves if its length is known.
        step_bytes: left by each training batch.
        epoch_bytes: left by each epoch in all.
        batches: training batches of an epoch; None if unknown.
        epochs: how many there are at most.
        steps: how many training batches there are at most.
    """
    if not epoch_bytes and not step_bytes:
        return None
    if batches is None:
        last = max(0, room_bytes) // step_bytes if step_bytes else steps
        return RunsOut(0, int(last)) if last < steps else None
    epoch = max(0, room_bytes // max(1, epoch_bytes) + 1)
    over = epoch * epoch_bytes - room_bytes  # at the end of that epoch
    step = max(0, batches - 1 - (over - 1) // step_bytes) if step_bytes else batches - 1
    return RunsOut(epoch, step) if epoch < epochs and epoch * batches + step < steps else None
