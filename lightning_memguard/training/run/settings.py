"""MemGuard's settings. `MemGuard` imports this file and no other of training/run/, until a run is set up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_memguard.core.decision.decision import Limits


@dataclass(frozen=True)
class GuardSettings(Limits):
    """MemGuard's settings, checked; see there."""

    mode: Literal["tune", "check"] = "tune"
    on_oom: Literal["split", "raise"] | None = None

    @property
    def splits(self) -> bool:
        """Whether a step that runs out of memory may be done in parts."""
        return self.mode == "tune" and self.on_oom != "raise"
