"""MemGuard's settings. `MemGuard` imports this file and no other of training/run/, until a run is set up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_memguard.core.decision.decision import Limits, check_count
from lightning_memguard.errors import MemGuardError

_MOST_SECONDS = 60.0  # of setup, whatever the run takes


@dataclass(frozen=True)
class GuardSettings(Limits):
    """MemGuard's settings, checked; see there."""

    mode: Literal["tune", "check"] = "tune"
    offload: Literal["if_needed", "always", "never"] = "if_needed"
    min_steps_per_epoch: int | None = 50
    max_setup_seconds: float | Literal["auto"] | None = "auto"
    host_budget_bytes: int | None = None
    divides: bool = True  # a batch that does not fit, and accumulates gradients
    batch_size: Literal["auto", "keep", "largest", "fastest"] = "auto"
    learns: bool = True  # from measurements of earlier runs, and for later ones

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_steps_per_epoch is not None:
            check_count("min_steps_per_epoch", self.min_steps_per_epoch)
        if type(self.learns) is not bool:
            raise MemGuardError(f"learn={self.learns!r} is unknown; pass True or False.")
        seconds = self.max_setup_seconds
        if seconds is not None and seconds != "auto" and not (type(seconds) in (int, float) and seconds > 0):
            raise MemGuardError(
                f'max_setup_seconds={seconds!r} is no time; pass seconds above 0, "auto", or None for no limit.'
            )

    @property
    def hurries(self) -> bool:
        """Whether setup takes no more than a share of the run; who asks for a size has it looked for."""
        keeps = self.batch_size in ("auto", "keep") and not isinstance(self.keep_effective_batch_size, int)
        return self.max_setup_seconds == "auto" and keeps

    @property
    def most_setup_seconds(self) -> float:
        """Seconds that predictions may take before the run starts; infinity for any."""
        seconds = self.max_setup_seconds
        return _MOST_SECONDS if seconds == "auto" else math.inf if seconds is None else seconds

    @property
    def steps_to_keep(self) -> int | None:
        """Optimizer steps that an epoch keeps; None if the user has set the samples of each."""
        return None if self.keep_effective_batch_size else self.min_steps_per_epoch
