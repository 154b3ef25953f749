"""The saved-tensor hooks of an `Offload` in a thread: put on, taken off, and out of the way of those who forbid hooks.

`torch.func`'s transforms, and users by `torch.autograd.graph.disable_saved_tensors_hooks`, raise while hooks are on.
While hooks of ours are on, both pop them instead, and push them again when they end. The functions of torch are looked
up at each call: a capture replaces them (`lightning_memguard.core.simulation.backward`). Checked on torch 2.13.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from lightning_memguard.core.foreign import patched
from lightning_memguard.core.simulation.backward import hooks_of_saved_tensors

Pair = tuple[Callable[[torch.Tensor], object], Callable[[Any], torch.Tensor]]


def put_on(pair: Pair) -> str:
    """Put hooks on in this thread; the result says why they are not: others are on, or forbidden."""
    if hooks_of_saved_tensors() is not None:
        return "other saved-tensor hooks are on already, which would no longer see any tensor"
    try:
        torch._C._autograd._push_saved_tensors_default_hooks(*pair)
    except RuntimeError as error:  # the words of the one who forbids them
        return f"saved-tensor hooks are forbidden here: {error}"
    _yielding.begin(pair)
    return ""


def take_off(pair: Pair) -> None:
    """Take hooks off; hooks that the user put on after them, and left, stay on."""
    autograd, others, top = torch._C._autograd, list[Pair](), None
    if not _yielding.end(pair):
        while (top := hooks_of_saved_tensors()) is not None and top[0] is not pair[0]:
            others.append(top)
            autograd._pop_saved_tensors_default_hooks()
        if top is not None:
            autograd._pop_saved_tensors_default_hooks()
        for other in reversed(others):
            autograd._push_saved_tensors_default_hooks(*other)


class _Yielding:
    """Has those who forbid hooks pop ours instead of raising, while any are on."""

    def __init__(self) -> None:
        self.on: list[Pair] = []  # in all threads
        self.popped = threading.local()
        self.lock = threading.RLock()
        self.patches = contextlib.ExitStack()

    def begin(self, pair: Pair) -> None:
        with self.lock:
            if not self.on:
                autograd = torch._C._autograd
                self.disable, self.enable = autograd._saved_tensors_hooks_disable, autograd._saved_tensors_hooks_enable
                ours = {"_saved_tensors_hooks_disable": self._disable, "_saved_tensors_hooks_enable": self._enable}
                self.patches.enter_context(patched(autograd, **ours))
            self.on.append(pair)

    def end(self, pair: Pair) -> bool:
        """Forget a pair; the result tells whether it is popped at the moment."""
        with self.lock:
            self.on = [each for each in self.on if each is not pair]
            if not self.on:
                self.patches.close()
        popped = getattr(self.popped, "pairs", [])
        if pair in popped:
            popped.remove(pair)
            return True
        return False

    def _disable(self, *args: Any, **kwargs: Any) -> None:
        top = hooks_of_saved_tensors()
        ours = [pair for pair in self.on if top is not None and pair[0] is top[0]]
        if ours and args[1:2] != (False,) and kwargs.get("fail_if_non_empty", True):
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self.popped.pairs = [*getattr(self.popped, "pairs", []), ours[0]]
        self.disable(*args, **kwargs)

    def _enable(self) -> None:
        self.enable()
        for pair in getattr(self.popped, "pairs", []):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)
        self.popped.pairs = []


_yielding = _Yielding()
