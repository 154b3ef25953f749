"""Progress of a command, shown on stderr once it takes longer than a second."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status

Say = Callable[[str], None]
"""Function that is called with the next step in words, such as ``"reading the model"``."""

_PATIENCE_SECONDS = 1.0


@contextmanager
def progress() -> Iterator[Say]:
    """Show what is being done; what other code prints goes to stderr too, and its warnings nowhere."""
    line = _Line()
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield line.say
    finally:
        line.close()


class _Line:
    """One line that changes on a terminal; elsewhere a line each."""

    def __init__(self) -> None:
        self.text = self.shown = ""
        self.status: Status | None = None
        self.stream = sys.stderr
        self.lock = threading.Lock()
        self.started = time.monotonic()
        self.timer = threading.Timer(_PATIENCE_SECONDS, self._show)
        self.timer.daemon = True
        self.timer.start()

    def say(self, text: str) -> None:
        self.text = text
        if time.monotonic() - self.started >= _PATIENCE_SECONDS:
            self._show()

    def _show(self) -> None:
        with self.lock:
            if self.text == self.shown:
                return
            self.shown = self.text
            if not self.stream.isatty():
                print(f"memguard: {self.text} ...", file=self.stream, flush=True)
            elif self.status is None:
                from rich.console import Console

                self.status = Console(stderr=True, highlight=False).status(f"{self.text} ...")
                self.status.start()
            else:
                self.status.update(f"{self.text} ...")

    def close(self) -> None:
        self.timer.cancel()
        with self.lock:
            if self.status is not None:
                self.status.stop()
            self.text = self.shown
