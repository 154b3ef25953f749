"""Everything this package raises on purpose; all of it shares one parent."""

from __future__ import annotations

from typing import Any


class MemGuardError(Exception):
    """Parent of every error that lightning-memguard raises."""


class DoesNotFitError(MemGuardError):
    """Even the smallest batch size allowed needs more than the budget offers.

    Attributes:
        advice: what would take less, most saved first, each an `lightning_memguard.core.decision.advice.Advice`; empty
            where nothing was tried.
    """

    def __init__(self, message: str = "", *, advice: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.advice = advice


class CannotTraceError(MemGuardError):
    """A training step could not be followed far enough to predict its memory."""


class CannotResizeLoaderError(MemGuardError):
    """The training data has no batch size that could be changed."""
