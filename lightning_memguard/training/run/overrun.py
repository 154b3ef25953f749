"""A fit on the CPU that passes its budget: once, what it took and what would have kept it within."""

from __future__ import annotations

from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.decision.record import Measured
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.report.failure import overrun_words, steps_explain
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.training.run.batch_monitor import BatchWatch, size_within_budget
from lightning_memguard.training.run.measuring import Measuring

_STEPS_TO_LOOK_AT = 3


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

    def note(
        self,
        decision: Decision,
        footprint: Footprint | None,
        watch: BatchWatch | None,
        measured: Measured,
        batch: object = None,
        batch_idx: int | None = None,
    ) -> str:
        """Return what to say of a peak, measured at the start of a batch or after an epoch; empty if it is within."""
        budget = decision.budget
        if not self.checks or footprint is None or budget is None or watch is None or not decision.fits:
            return ""
        if measured.taken_bytes <= budget.free_bytes:
            return ""
        if batch_idx is not None and self.again_at is None and not steps_explain(footprint, measured):
            self.again_at = batch_idx + _STEPS_TO_LOOK_AT
            self._measuring.count_again()
            return ""
        self.checks = False
        kept = decision.kept if decision.runs_out_at else ()
        size = None if kept else attempt(lambda: size_within_budget(watch, footprint, measured)).value
        larger, outside = watch.largest and watch.largest[0], self._measuring.outside_tensors(batch)
        return overrun_words(footprint, measured, budget, size, larger, kept, outside, watch.shapes_seen)
