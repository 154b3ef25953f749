"""Batch sizes of the user: one that a hook gives its loaders later in a run, and the one optimizers are made for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.foreign import added
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.training.data.loaders import divided
from lightning_memguard.training.facts.ranks import attempt, say

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.utilities.types import LRSchedulerConfig

    from lightning_memguard.training.run.batch_monitor import BatchWatch
    from lightning_memguard.training.run.profile import RunProfile


@dataclass
class OwnSize:
    """The size, and what follows from it.

    Attributes:
        size: 0 while loaders are as decided.
        schedules: learning rate schedules, with the frequencies that were set.
    """

    size: int = 0
    schedules: list[tuple[LRSchedulerConfig, int]] = field(default_factory=list)

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

    def changes(
        self, trainer: Trainer, decision: Decision, profile: RunProfile
    ) -> Iterator[tuple[object, str, object]]:
        """Yield what counts batches, with the name and the value of its setting.

        The batches of a hook's own size are not pieces of larger ones. Schedules that step after each batch follow the
        optimizer, which also steps at the end of an epoch.
        """
        pieces = 1 if self.size else decision.pieces
        scaled = divided(profile.facts, profile.loader_info, decision.requested_batch_size, pieces)
        own, decided = decision.requested_accumulate_grad_batches, decision.accumulate_grad_batches
        yield trainer, "accumulate_grad_batches", own if self.size else decided
        yield trainer, "limit_train_batches", scaled.limits["train"]
        yield trainer, "val_check_interval", scaled.val_check_interval
        for config, frequency in self.schedules:
            if config.interval == "step" and frequency > 1:
                yield config, "frequency", frequency * pieces

    def footprint(self, decision: Decision, profile: RunProfile | None, watch: BatchWatch | None) -> Footprint | None:
        """The prediction at that size, on batches like the last that was larger than expected."""
        if not self.size or profile is None:
            return decision.footprint
        if watch is not None and watch.largest:
            return watch.largest[0].footprint
        return attempt(lambda: profile.footprint_at(self.size)).value or decision.footprint


def configured_between(
    module: LightningModule, begin: Callable[[], object], end: Callable[[], object]
) -> Callable[[], None]:
    """Have functions called before and after a module's ``configure_optimizers``, once; return what undoes that."""
    configure, restore = module.configure_optimizers, ExitStack()

    @functools.wraps(configure)
    def configure_optimizers() -> object:
        attempt(restore.close)
        attempt(begin)
        try:
            return configure()
        finally:
            attempt(end)

    restore.enter_context(added(module, configure_optimizers=configure_optimizers))
    return restore.close
