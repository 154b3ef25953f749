"""One run's steps that run out of memory: guarded in training, validation and test; counted, and announced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_memguard.report.failure import Larger, rescue_words
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.training.rescue.again import Again, EvaluationAgain, TrainingAgain
from lightning_memguard.training.rescue.cut import Cut
from lightning_memguard.training.rescue.policy import Policy, Rescue, Samples

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

_FIXED = ("parameters", "buffers", "gradients", "optimizer_state", "communication", "callbacks", "workspaces")
_MANUAL = "with manual optimization, training_step calls the optimizers itself"


@dataclass
class Rescuer:
    """Does steps again in parts where they run out of memory, between `install` and `close`.

    Attributes:
        announce: warns of something.
        lenient: go on where the difference is of a known kind.
        cuts: how batches are cut, by role (``"train"``, ``"val"``), as far as is known.
        fits_now: whether a training batch of so many bytes fits, by the prediction and what is free now.
        fitting: how many samples of a part that failed fit now; None if that is unknown.
    """

    trainer: Any
    module: LightningModule
    announce: Callable[[str], None]
    lenient: bool = False
    cuts: Mapping[Any, Cut] = field(default_factory=dict)
    fits_now: Callable[[int], bool] = lambda _: True
    fitting: Callable[[Samples], int | None] = lambda _: None

    def __post_init__(self) -> None:
        self._announced: set[str] = set()
        self._guards: dict[str, Again] = {}  # by role
        self.policy = Policy(self.fits_now, self.fitting, partial(self._say, "training"))

    def install(self) -> None:
        """Guard the steps from now on."""
        if self.trainer.state.fn == "fit" and self.module.automatic_optimization:
            self._guard("train", TrainingAgain, self.policy)
        self._guard("val", EvaluationAgain, Policy(notify=partial(self._say, "evaluation")))

    def _guard(self, role: str, kind: type[Again], policy: Policy) -> None:
        def install() -> None:
            cut = self.cuts.get(role)
            self._guards[role] = kind(self.trainer, self.module, policy, cut, self.announce, lenient=self.lenient)
            self._guards[role].install()

        if reason := attempt(install).reason:
            self.announce(f"MemGuard will not do steps that run out of memory again in parts: {reason}")

    def close(self) -> None:
        """Leave the Trainer as it was."""
        for guard in self._guards.values():
            attempt(guard.close)

    @property
    def refused(self) -> str:
        """Why the last step that ran out of memory was not done again; empty if none did."""
        if self.trainer.training and not self.module.automatic_optimization:
            return _MANUAL
        guard = self._guards.get("train" if self.trainer.training else "val")
        return guard.refused if guard else ""

    def expect(self, batch: object, larger: Larger) -> int:
        """Run batches like this one, announced as too large, in parts; how many samples at once, 0 for all."""
        if larger.verdict != "does not fit" or "train" not in self._guards:
            return 0
        footprint = larger.footprint
        fixed = footprint.outside_bytes + sum(footprint.parts.get(part, 0) for part in _FIXED)
        share = (larger.budget.usable_bytes - fixed) / max(1, footprint.most_device_bytes - fixed)
        return self.policy.expect(batch, share)

    def _say(self, kind: str, rescue: Rescue) -> None:
        if kind not in self._announced:
            self._announced.add(kind)
            of, evaluates = (rescue.samples, rescue.at_once, rescue.changes), kind == "evaluation"
            self.announce(rescue_words(*of, evaluates=evaluates, failed=rescue.failed))
