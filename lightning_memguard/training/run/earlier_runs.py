"""Measurements of a step by earlier runs on this GPU and by this one: predictions learn from them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.decision.record import EpochRecord
from lightning_memguard.core.device.context import reserved_bytes
from lightning_memguard.core.device.measurements import (
    Measurement,
    Setting,
    Store,
    default_path,
    learned_from,
    setting_of,
)
from lightning_memguard.core.replay.learned import Learned
from lightning_memguard.errors import MemGuardError
from lightning_memguard.report.failure import Failure
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.units import counted

if TYPE_CHECKING:
    from lightning_memguard.core.replay.footprint import Footprint
    from lightning_memguard.training.facts.run_facts import RunFacts
    from lightning_memguard.training.run.profile import RunProfile

_CHANGED = 0.002  # of the peak: less is not worth another line
_OTHERS = 0.01  # of the peak: more that was reserved before the fit is not the step's


@dataclass
class EarlierRuns:
    """The file of measurements, for one run; each failure is silent but for the log: nothing depends on the file.

    Without ``setting`` or ``store`` there is nothing to learn from or for: the device is no GPU, the user does not want
    it, or has no home.
    """

    setting: Setting | None = None
    store: Store | None = None
    there_bytes: int = 0  # in the allocator before the fit, but for the model: what an earlier fit left in its cache
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    _stored_bytes: int = 0

    @classmethod
    def of(cls, facts: RunFacts, held_bytes: int, *, wanted: bool) -> EarlierRuns:
        """Find the file; read what this run's GPU, of which the training holds some bytes, and its software are."""
        if not wanted or facts.stage != "fit":
            return cls()
        there = reserved_bytes(facts.device) - held_bytes
        return attempt(lambda: cls(setting_of(facts.device), Store(default_path()), there)).value or cls()

    def learned(self, profile: RunProfile) -> Learned | None:
        """Return what was measured of this run's step on this GPU; None if there can be nothing."""
        if self.setting is None or self.store is None or not (step := profile.prediction.signature):
            return None
        try:
            found, damaged = self.store.read()
        except MemGuardError as error:
            return Learned(step, notes=(str(error).rstrip("."),))
        same = [each for each in found if each.step == step]
        ours = [each for each in same if each.setting == self.setting]
        notes = []
        if damaged:
            notes.append(f"{counted(damaged, 'line')} of {self.store.path} cannot be read and is not used")
        if same and not ours:
            change = self.setting.difference(same[-1].setting)
            notes.append(f"{counted(len(same), 'earlier measurement')} of this step is not used: {change}")
        return replace(learned_from(ours, step), notes=tuple(notes))

    def remember(
        self, record: EpochRecord, decision: Decision, profile: RunProfile, precision: str, module: str
    ) -> None:
        """Store what an epoch of whole steps has measured, if nothing else was there, and no step was offloaded."""
        learned, measured, predicted = profile.prediction.terms.learned, record.measured, record.predicted
        if learned is None or not record.has_error or predicted.is_evaluation:
            return
        disturbed = record.offloaded or measured.alloc_retries or measured.ooms or decision.kept
        reserved = measured.peak_reserved_bytes or 0
        alone = not measured.is_reserved and self.there_bytes <= _OTHERS * reserved
        if disturbed or not reserved or not alone:
            return
        if abs(measured.peak_bytes - self._stored_bytes) <= _CHANGED * measured.peak_bytes:
            return
        timed = predicted.timing.step if predicted.timing else None
        seconds = {
            "predicted_step_seconds": timed.likely if timed else 0.0,
            "step_seconds": measured.step_seconds or 0.0,
        }
        self._add(predicted, learned.step, (module, precision), measured.peak_bytes, reserved, **seconds)
        self._stored_bytes = measured.peak_bytes

    def remember_failure(self, failed: Failure, profile: RunProfile, precision: str, module: str) -> None:
        """Store that a step at this size ran out of memory, and what there was; a larger batch tells nothing of it."""
        learned, predicted = profile.prediction.terms.learned, failed.predicted
        there_was = min(each.free_bytes for each in (failed.budget, failed.budget_now) if each)
        if learned is not None and failed.larger is None and not predicted.is_evaluation and there_was > 0:
            self._add(predicted, learned.step, (module, precision), there_was, 0, ran_out=True)

    def _add(
        self, predicted: Footprint, step: str, names: tuple[str, str], measured: int, reserved: int, **more: Any
    ) -> None:
        if self.setting is None or self.store is None:
            return
        store, self.store = self.store, None  # what fails once is not tried again
        now, (module, precision) = datetime.now(timezone.utc).isoformat(timespec="seconds"), names
        without = predicted.peak_device_bytes - predicted.correction_bytes
        figures = predicted.batch_size, without, measured, reserved, predicted.parts.get("workspaces", 0)
        store.add(Measurement(self.run, now, module, step, precision, *figures, self.setting, **more))
        self.store = store
