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

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.simulation.backward import hooks_of_saved_tensors

Pair = tuple[Callable[[torch.Tensor], object], Callable[[Any], Any]]


def put_on(pair: Pair) -> str:
    """Put hooks on in this thread; the result says why they are not: others are on, or forbidden."""
    if hooks_of_saved_tensors() is not None:
        return "other saved-tensor hooks are on already, which would no longer see any tensor"
    push, _ = port.putting_of_saved_hooks()
    _yielding.begin(pair)
    try:
        push(*pair)
    except RuntimeError as error:  # the words of the one who forbids them
        _yielding.end(pair)
        return f"saved-tensor hooks are forbidden here: {error}"
    return ""


def take_off(pair: Pair) -> None:
    """Take hooks off; hooks that the user put on after them, and left, stay on."""
    if _yielding.end(pair):
        return
    push, pop = port.putting_of_saved_hooks()
    others, top = list[Pair](), hooks_of_saved_tensors()
    while top is not None:
        pop()
        if top[0] is pair[0]:
            break
        others.append(top)
        top = hooks_of_saved_tensors()
    for other in reversed(others):
        push(*other)


class _Yielding:
    """Has those who forbid hooks pop ours instead of raising, while any are on."""

    def __init__(self) -> None:
        self.on: list[Pair] = []  # in all threads
        self.here = threading.local()  # those that are popped
        self.lock, self.patches = threading.RLock(), contextlib.ExitStack()

    def begin(self, pair: Pair) -> None:
        with self.lock:
            if not self.on:
                self.disable, self.enable = port.forbidding_of_saved_hooks()
                self.patches.enter_context(port.saved_hooks_forbidden_by(self._disable, self._enable))
            self.on.append(pair)

    def end(self, pair: Pair) -> bool:
        """Forget a pair; the result tells whether it is popped at the moment."""
        with self.lock:
            self.on.remove(pair)
            if not self.on:
                self.patches.close()
        popped = getattr(self.here, "popped", [])
        self.here.popped = [each for each in popped if each is not pair]
        return len(popped) > len(self.here.popped)

    def _disable(self, message: str, fail_if_non_empty: bool = True) -> None:
        top = hooks_of_saved_tensors()
        ours = [pair for pair in self.on if fail_if_non_empty and top is not None and pair[0] is top[0]]
        if ours:
            port.putting_of_saved_hooks()[1]()
            self.here.popped = [*getattr(self.here, "popped", []), ours[0]]
        self.disable(message, fail_if_non_empty)

    def _enable(self) -> None:
        self.enable()
        popped, self.here.popped = getattr(self.here, "popped", []), []
        for pair in popped:
            port.putting_of_saved_hooks()[0](*pair)


_yielding = _Yielding()
