"""One line that says what setup is doing, once that takes longer than a moment."""

from __future__ import annotations

import math
import sys
import time

from lightning_memguard.training.facts.ranks import is_heard, say

_PATIENCE_SECONDS = 2.0  # until it is shown
_EVERY_SECONDS = 0.2
_CLEAR = "\r\x1b[2K"  # ECMA-48: to the start of the line, and erase it
_BLANK = f"\r{' ' * 140}\r"  # notebooks know no more than the start of the line


class SetupLine:
    """The line, on a terminal and in a notebook with the capture that is going on; elsewhere once.

    Args:
        speaks: whether it is shown at all.
        most_seconds: after which setup goes on with what is known.
    """

    def __init__(self, *, speaks: bool, most_seconds: float) -> None:
        self._started, self._most_seconds = time.monotonic(), most_seconds
        self._due = self._started + _PATIENCE_SECONDS if speaks else math.inf
        self.is_shown = False

    def show(self, doing: str) -> None:
        """Show the line if it is due, with what is being done."""
        now = time.monotonic()
        if now < self._due or not is_heard():
            return
        self.is_shown, self._due = True, math.inf
        seconds = "" if math.isinf(self._most_seconds) else f"{self._most_seconds:.0f}"
        if not _eraser():
            most = f" (at most {seconds} s)" if seconds else ""
            say(f"MemGuard: predicting memory on a copy of the step{most}; Ctrl-C goes on without it ...")
            return
        most = f" of {seconds}" if seconds else ""
        doing = doing or "reading the data"
        text = f"MemGuard: predicting memory, {now - self._started:.0f}{most} s: {doing}; Ctrl-C goes on without it"
        sys.stderr.write(f"{_eraser()}{text}")
        sys.stderr.flush()
        self._due = now + _EVERY_SECONDS

    def close(self) -> None:
        """Erase it."""
        if self.is_shown:
            sys.stderr.write(_eraser())


def _eraser() -> str:
    """Return what erases a line of this process's output; empty if it stays."""
    if sys.stderr.isatty():
        return _CLEAR
    return _BLANK if type(sys.stderr).__module__.startswith("ipykernel.") else ""
