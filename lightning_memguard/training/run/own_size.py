"""The batch size that a hook gives its loaders later in a run, in place of the one at setup: they keep it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.training.data.loaders import divided
from lightning_memguard.training.facts.ranks import attempt, say

if TYPE_CHECKING:
    from lightning_memguard.training.run.batch_monitor import BatchWatch
    from lightning_memguard.training.run.profile import RunProfile


@dataclass
class OwnSize:
    """The size, and what follows from it; ``size`` is 0 while loaders are as decided."""

    size: int = 0

    def note(self, size: int, decision: Decision, *, speaks: bool) -> bool:
        """Note the size that loaders were made at, 0 for the decided one; return whether it is another than before."""
        if size == self.size:
            return False
        self.size = size
        if size and speaks:
            asked = decision.requested_batch_size
            say(f"MemGuard: the loader has batch size {size} now, not {asked} as at setup, and keeps it.")
        return True

    def batch_size(self, decision: Decision) -> int:
        """The batch size now."""
        return self.size or decision.batch_size

    def pieces(self, decision: Decision) -> int:
        """How many of the batches now make one of the loader's own."""
        return 1 if self.size else decision.pieces

    def settings(self, decision: Decision, profile: RunProfile) -> Mapping[str, object]:
        """Settings of the Trainer: the batches of a hook's own size are not pieces of larger ones."""
        scaled = divided(profile.facts, profile.loader_info, decision.requested_batch_size, self.pieces(decision))
        own, decided = decision.requested_accumulate_grad_batches, decision.accumulate_grad_batches
        return {
            "accumulate_grad_batches": own if self.size else decided,
            "limit_train_batches": scaled.limits["train"],
            "val_check_interval": scaled.val_check_interval,
        }

    def footprint(self, decision: Decision, profile: RunProfile | None, watch: BatchWatch | None) -> Footprint | None:
        """The prediction at that size, on batches like the last that was larger than expected."""
        if not self.size or profile is None:
            return decision.footprint
        if watch is not None and watch.largest:
            return watch.largest[0].footprint
        return attempt(lambda: profile.footprint_at(self.size)).value or decision.footprint
