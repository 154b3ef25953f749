"""Everything this package raises on purpose; all of it shares one parent."""

from __future__ import annotations


class MemGuardError(Exception):
    """Parent of every error that lightning-memguard raises."""


class DoesNotFitError(MemGuardError):
    """Even the smallest batch size allowed needs more than the budget offers."""


class CannotTraceError(MemGuardError):
    """A training step could not be followed far enough to predict its memory."""


class CannotResizeLoaderError(MemGuardError):
    """The training data has no batch size that could be changed."""
