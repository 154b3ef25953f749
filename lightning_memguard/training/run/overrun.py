"""A fit on the CPU that passes its budget: once, what it took and what would have kept it within."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_memguard.core.capture.holders import Holder, holdings, roots_of, use_of
from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.decision.record import Measured
from lightning_memguard.core.device.tensor_counter import FREED
from lightning_memguard.core.objects import users_members
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.torch_port import storage_id
from lightning_memguard.report.failure import Outside, overrun_words, steps_explain
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.training.run.batch_monitor import BatchWatch, size_within_budget
from lightning_memguard.training.run.measuring import Measuring
from lightning_memguard.units import MIB

_STEPS_TO_LOOK_AT = 3
_MOST_NAMED = 3
_AROUND_STEPS = ("on_train_batch", "on_before", "on_after")


class OverrunWatch:
    """Compares measured peaks with the budget until one is above it; a GPU's allocator holds no more than there is.

    Attributes:
        checks: whether it still compares.
        again_at: the batch before which a peak is compared again that no counted step explained.
    """

    def __init__(self, measuring: Measuring, *, checks: bool) -> None:
        self._measuring = measuring
        self.checks = checks
        self.again_at: int | None = None
        self._within_until: int | None = None  # the last batch before which the run was within its budget

    def note(
        self,
        decision: Decision,
        footprint: Footprint | None,
        watch: BatchWatch | None,
        measured: Measured,
        owners: Sequence[Any],
        batch: object = None,
        batch_idx: int | None = None,
    ) -> str:
        """Return what to say of a peak, measured at the start of a batch or after an epoch; empty if it is within.

        ``owners`` are the module and what else may hold memory, as callbacks.
        """
        budget = decision.budget
        if not self.checks or footprint is None or budget is None or watch is None or not decision.fits:
            return ""
        if measured.taken_bytes <= budget.free_bytes:
            self._within_until = batch_idx
            return ""
        larger, outside = watch.largest and watch.largest[0], self._measuring.outside_tensors(batch)
        stayed = self._measuring.stayed_bytes - outside.get(FREED, 0)
        known = larger.footprint if larger else footprint
        explains = steps_explain(known, measured, stayed)
        if batch_idx is not None and self.again_at is None and not explains:
            self.again_at = batch_idx + _STEPS_TO_LOOK_AT
            self._measuring.count_again()
            return ""
        self.checks = False
        kept = decision.kept if decision.runs_out_at else ()
        size = None if kept or not explains else attempt(lambda: size_within_budget(watch, known, measured)).value
        found = None
        if not explains:
            held = attempt(lambda: largest_held(*owners)).value or {}
            hooks = [f"{type(each).__name__}.{name}" for each in owners for name in users_members(type(each))]
            around = [each for each in hooks if each.partition(".")[2].startswith(_AROUND_STEPS)]
            found = Outside({**held, **outside}, watch.shapes_seen, stayed, self._within_until, around)
        return overrun_words(footprint, measured, budget, size, larger, kept, found)


def largest_held(module: nn.Module, *others: object) -> dict[str, int]:
    """Return the bytes that attributes hold besides parameters, buffers and gradients, those with the most first."""
    own = [each for tensor in (*module.parameters(), *module.buffers()) for each in (tensor, tensor.grad)]
    known = {storage_id(each.untyped_storage()) for each in own if each is not None}
    nbytes, holders = Counter[str](), dict[str, Holder]()
    for holder, thing, size, _ in holdings(roots_of(module, others)):
        if not (isinstance(thing, Tensor) and storage_id(thing.untyped_storage()) in known):
            nbytes[holder.name] += int(size)
            holders[holder.name] = holder
    most = [(holders[name], size) for name, size in nbytes.most_common(_MOST_NAMED) if size >= MIB]
    placed = ((holder, use_of(holder, (module, *others)).line, size) for holder, size in most)
    return {f"`{holder.name}`{line and f' ({line})'}": size for holder, line, size in placed}
