"""The place of an event in a step: its phase, the module that runs, and the line of the model's code."""

from __future__ import annotations

import functools
import sys
import traceback
from types import FrameType

_ACTIVATION_PHASES = ("forward", "transfer")


class Place:
    """The place in a step that has been reached: its code sets the phase, hooks on its modules set the module."""

    def __init__(self) -> None:
        self.phase, self.step, self.module = "setup", 0, ""
        self.source: str | None = None  # of the forward pass, while the backward pass runs; None: read the stack
        self._line: str | None = None  # of the operator that is noted now, once it was asked for
        self._graph_task = -1

    def line(self) -> str:
        """The line of the model's code that runs now; in the backward pass, the line of its forward pass."""
        if self.source is not None:
            return self.source
        if not self._line:
            line = _line_of_the_model(sys._getframe(1))
            if self._line is None:
                return line
            self._line = line
        return self._line

    def where(self) -> str:
        """The phase; ``"backward"`` if a backward pass runs in the forward pass, too."""
        return "backward" if self._graph_task != -1 and self.phase in _ACTIVATION_PHASES else self.phase


# Packages around the model's own code.
_NOT_THE_MODEL = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_memguard", "contextlib"}
_END_OF_THE_STEP = "lightning_memguard.core.capture.capture"  # callers of it are not the model


def _line_of_the_model(frame: FrameType | None) -> str:
    while frame is not None and (name := frame.f_globals.get("__name__", "")) != _END_OF_THE_STEP:
        if _is_of_the_model(str(name)):
            return sys.intern(f"{frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_code.co_name}")
        frame = frame.f_back
    return ""


@functools.cache
def _is_of_the_model(name: str) -> bool:
    return name.partition(".")[0] not in _NOT_THE_MODEL


def line_that_checks() -> str:
    """The line that asks for values now, as ``file:line``; empty if it belongs to a library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (name := str(frame.f_globals.get("__name__", ""))).startswith(_MACHINERY):
        frame = frame.f_back
    own = frame is not None and _is_of_the_model(name) and "site-packages" not in frame.f_code.co_filename
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame and own else ""


# Between a line and the answer to it.
_MACHINERY = ("lightning_memguard.", "torch._ops", "torch._subclasses", "torch._compile", "torch.utils.")


def line_behind(error: BaseException) -> str:
    """The innermost line of the model's own code in an error's traceback, as ``file:line``; empty if there is none."""
    for frame, lineno in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_of_the_model(str(frame.f_globals.get("__name__", ""))):
            return f"{frame.f_code.co_filename}:{lineno}"
    return ""


_WRAPPERS = ("", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def written_path(path: str) -> str:
    """A module's path without what FSDP, activation checkpointing and torch.compile put between it and its parent."""
    return ".".join(name for name in path.split(".") if name not in _WRAPPERS)
