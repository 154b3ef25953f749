"""Everything this package raises on purpose; all of it shares one parent."""

from __future__ import annotations

from copy import copy


class MemGuardError(Exception):
    """Parent of every error that lightning-memguard raises."""


class DoesNotFitError(MemGuardError):
    """Raised if even the smallest batch size allowed needs more than the budget offers.

    Attributes:
        needed_bytes: bytes that a step needs at that batch size, at most; 0 if unknown.
        usable_bytes: bytes that the device offers after the margin; 0 if unknown.
        largest_part: the part with the most bytes at the peak, such as ``"activations"``, or ``"context"`` for what the
            device's own context and libraries take; empty if unknown.
        rule_of_thumb: the usual way to shrink that part.
        way_out: how to get more room on the device.
        advice: remedies that need less, the least change of the training first, each an
            `lightning_memguard.core.decision.advice.Advice`; empty if nothing was tried.
        advice_text: the advice in words.
        rank: the rank that it does not fit on; None with one process.
    """

    def __init__(
        self,
        finding: str = "",
        *,
        needed_bytes: int = 0,
        usable_bytes: int = 0,
        largest_part: str = "",
        rule_of_thumb: str = "",
        way_out: str = "",
        advice: tuple[object, ...] = (),
    ) -> None:
        super().__init__(finding)
        self.needed_bytes, self.usable_bytes, self.largest_part = needed_bytes, usable_bytes, largest_part
        self.rule_of_thumb, self.way_out = rule_of_thumb, way_out
        self.advice, self.advice_text = advice, ""
        self.rank: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        if self.advice:
            todo = f" You can {self.way_out}." if self.way_out else ""
        else:
            todo = f" {self.rule_of_thumb}, or {self.way_out}." if self.rule_of_thumb else ""
        return f"{where}{super().__str__()}{todo}" + (f"\n{self.advice_text}" if self.advice_text else "")

    def led_by(self, text: str) -> DoesNotFitError:
        """Return the error with a sentence before its own."""
        other = copy(self)
        other.args = (f"{text} {super().__str__()}",)
        return other

    def with_advice(self, advice: tuple[object, ...], text: str = "") -> DoesNotFitError:
        """Return the error with ``advice``, written out as ``text``, in place of the rule of thumb."""
        other = copy(self)
        other.advice, other.advice_text = advice, text
        return other

    def on_rank(self, rank: int) -> DoesNotFitError:
        """Return the error with the rank it comes from in its text."""
        other = copy(self)
        other.rank = rank
        return other


class CannotTraceError(MemGuardError):
    """A training step could not be followed far enough to predict its memory."""


class CannotResizeLoaderError(MemGuardError):
    """The training data has no batch size that could be changed."""
