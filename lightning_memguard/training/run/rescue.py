"""A step that ran out of memory -> whether it is done again in parts, how large these are, and what is reported."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning_memguard.core.capture.batch import batch_bytes, batch_size_of
from lightning_memguard.core.device.budget import read_budget
from lightning_memguard.report.failure import Larger, Rescued, rescue_words
from lightning_memguard.training.adapter.closure import Part, Policy, StepGuard
from lightning_memguard.training.adapter.evaluation import EvaluationGuard, EvaluationPolicy
from lightning_memguard.training.adapter.lightning_types import is_a
from lightning_memguard.training.adapter.ranks import attempt
from lightning_memguard.training.adapter.same_step import Probe, SameStep, unknown
from lightning_memguard.training.run.batch_monitor import BatchWatch, ran_out_of_memory, would_fit

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_OFTEN = 0.1  # share of an epoch's steps done in parts; where it is more, the next epoch takes smaller batches
_FIXED = ("parameters", "buffers", "gradients", "optimizer_state", "communication", "callbacks", "workspaces")


def _unless_by_name(changes: Sequence[str]) -> str:
    return f'{"; ".join(changes)}. MemGuard(on_oom="split") does it all the same' if changes else ""


def guard_evaluation(
    trainer: Trainer, module: LightningModule, probe: Probe | None, announce: Callable[[str], None], *, by_name: bool
) -> EvaluationGuard:
    """Do steps of validation and test again in parts where they run out of memory, from now on; see `Rescuer`."""
    announced: list[bool] = []

    @functools.cache
    def same() -> SameStep:
        return probe.result() if probe else unknown("nothing was predicted")

    def rescued(samples: int, at_once: int) -> None:
        if not announced:
            announced.append(True)
            announce(rescue_words(Rescued(samples, at_once, same().changes, same().draws, evaluates=True)))

    policy = EvaluationPolicy(
        ran_out_of_memory, same, lambda: "" if by_name else _unless_by_name(same().changes), rescued
    )
    guard = EvaluationGuard(trainer, module, policy)
    guard.install()
    return guard


class Rescuer:
    """Does training steps again in parts where they run out of memory.

    Args:
        trainer: the Trainer.
        module: its module.
        probe: what finds out whether it is the same step; None where nothing could.
        by_name: whether the user has asked for it, the same step or not.
        watch: what is known of the run's batches, once it trains.
        announce: warns of something.

    Attributes:
        steps: how many steps were done in parts since `restart`.
        refused: why the last step that ran out of memory was not; empty where none did.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        probe: Probe | None,
        watch: Callable[[], BatchWatch | None],
        announce: Callable[[str], None],
        *,
        by_name: bool,
    ) -> None:
        self.steps = 0
        self._trainer = trainer
        self._probe = probe
        self._by_name = by_name
        self._watch = watch
        self._announce = announce
        self._device = trainer.strategy.root_device
        self._too_large_bytes = math.inf  # batches from this size on are run in parts at once
        self._fitting_bytes = 0.0  # the largest part that ran, or is predicted to
        self._most_parts = 1
        self._said = False
        policy = Policy(ran_out_of_memory, self.obstacle, self._most_samples, self._ran, self._rescued)
        same = probe.found if probe else None
        self._guard = StepGuard(trainer, module, same or unknown("nothing was predicted"), policy)

    def install(self) -> None:
        """Guard the steps from now on."""
        self._guard.install()

    def restart(self) -> None:
        """An epoch begins."""
        self.steps, self._most_parts = 0, 1

    def parts_to_take(self, batches: int) -> int:
        """How many batches of the next epoch are to take the place of one, after an epoch of so many batches.

        0 where the steps of such batches, accumulated, would be others.
        """
        if not self.steps:
            return 1
        if self._same.weighting != "mean" or self._same.counted:
            return 0
        return self._most_parts if self.steps > _OFTEN * batches else 1

    def close(self) -> None:
        """Leave the Trainer as it was."""
        attempt(self._guard.remove)
        if self._probe:
            self._probe.close()

    @property
    def refused(self) -> str:
        """Why a step that ran out of memory was not done again."""
        own = self._trainer.training and not self._trainer.lightning_module.automatic_optimization
        return self.obstacle() if own else self._guard.refused

    @property
    def _same(self) -> SameStep:
        if self._probe is not None:
            self._guard.follow(self._probe.result())
            self._probe = None
        return self._guard.same

    def obstacle(self) -> str:
        """Why steps are not done again in parts; empty where they are."""
        changes = [*self._same.changes]
        if any(is_a(optimizer, "LBFGS") for optimizer in self._trainer.optimizers):
            changes.append("LBFGS takes several passes a step, and its search would see their rounding")
        return "" if self._by_name else _unless_by_name(changes)

    # -- before a step

    def plan(self, batch: Any) -> None:
        """Have a batch run in parts that is as large as one that did not fit."""
        self._guard.at_once = 0
        if self._too_large_bytes < math.inf and (nbytes := batch_bytes(batch)) >= self._too_large_bytes:
            self._guard.at_once = self._within(batch_size_of(batch), nbytes)

    def expect(self, batch: Any, larger: Larger) -> int:
        """Run batches like this one, announced as too large, in parts; how many samples at once, 0 for all."""
        if larger.verdict != "does not fit" or self.obstacle():
            return 0
        footprint, samples, nbytes = larger.footprint, batch_size_of(batch), batch_bytes(batch)
        fixed = footprint.outside_bytes + sum(footprint.parts.get(part, 0) for part in _FIXED)
        share = (larger.budget.usable_bytes - fixed) / max(1, footprint.most_device_bytes - fixed)
        if samples < 2 or share <= 0:
            return 0
        self._too_large_bytes = min(self._too_large_bytes, nbytes)
        self._fitting_bytes = max(self._fitting_bytes, nbytes * share)
        self.plan(batch)
        self._said |= not (self._same.changes or self._same.draws)
        return self._guard.at_once

    def _within(self, samples: int, nbytes: int) -> int:
        """How many samples of a batch of so many bytes fit, as far as is known."""
        fitting = int(samples * self._fitting_bytes / max(1, nbytes))
        return max(1, min(fitting, math.ceil(samples / 2)))

    # -- after a failure

    def _most_samples(self, failed: Part) -> int:
        half = math.ceil(failed.samples / 2)
        if failed.samples < failed.of:
            self._fitting_bytes = min(self._fitting_bytes, failed.nbytes / 2)
            return half
        self._too_large_bytes = min(self._too_large_bytes, failed.nbytes)
        if self._fitting_bytes:
            return self._within(failed.samples, failed.nbytes)
        return attempt(lambda: self._predicted(failed)).value or half

    def _predicted(self, failed: Part) -> int | None:
        """The samples that the prediction says will fit now, if memory grows with the bytes of a batch."""
        watch = self._watch()
        if watch is None:
            return None
        budget = watch.profile.budget
        now = attempt(lambda: read_budget(self._device, margin=budget.margin_share)).value
        size = would_fit(watch, min(now or budget, budget, key=lambda each: each.usable_bytes), 1.0)
        if size is None:
            return 1
        fitting = watch.prediction.expected_batch(size)[1]
        return max(1, min(int(failed.samples * fitting / max(1, failed.nbytes)), math.ceil(failed.samples / 2)))

    def _ran(self, part: Part) -> None:
        self._fitting_bytes = max(self._fitting_bytes, part.nbytes)

    def _rescued(self, batch: Part, largest: int) -> None:
        self.steps += 1
        self._most_parts = max(self._most_parts, math.ceil(batch.samples / largest))
        if not self._said:
            self._said = True
            same = self._same
            self._announce(rescue_words(Rescued(batch.samples, largest, same.changes, draws=same.draws)))
