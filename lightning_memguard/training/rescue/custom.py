"""Backward passes that users wrote (``torch.autograd.Function``): followed while they run, or refused.

PyTorch's own derivatives treat samples as their operators do, and are linear. A user's need not be: it may average over
the batch, or clamp the gradient of a weight. So its operators are followed as those of the forward pass are, from the
gradients of what it returned. It must return rows for what was rows, and sums for weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_memguard.core.foreign import patched
from lightning_memguard.training.rescue.flow import Flow
from lightning_memguard.training.rescue.reductions import AllReduce
from lightning_memguard.training.rescue.sample_layout import Layout, Refused

_NEVER = ("CheckpointFunction", "BackwardHookFunction")  # they run other people's code in their backward pass


@dataclass(frozen=True)
class CustomCall:
    """A call of a user's function, and how samples lie in what it took and returned."""

    name: str
    node: Any
    inputs: list[Layout | None]
    outputs: list[Layout | None]
    returned: list[torch.Tensor]


class CustomFunctions:
    """The user's functions that a pass runs; see `watched` and `followed`."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._calls: list[CustomCall] = []
        self._proven: set[int] = set()  # places of calls whose backward pass was followed

    @property
    def any(self) -> bool:
        """Whether there were some."""
        return bool(self._calls)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the user's functions that run forward.

        Raises:
            Refused: one of them is known to run other code in its backward pass.
        """
        self._calls = []
        own = torch.autograd.Function.__dict__["apply"]  # a class method of Python's, or of C's from torch 2.14 on

        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            out = own.__get__(None, cls)(*args, **kwargs)
            if cls is AllReduce:
                return out
            outs = [
                each for each in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(each, torch.Tensor)
            ]
            node = next((each.grad_fn for each in outs if each.grad_fn is not None), None)
            if node is None:
                return out
            if cls.__name__ in _NEVER:
                raise Refused(f"{cls.__name__} runs code of its own in the backward pass")
            known = self._flow.known
            inputs = [known(each) if isinstance(each, torch.Tensor) else None for each in args]
            self._calls.append(CustomCall(cls.__name__, node, inputs, [*map(known, outs)], outs))
            return out

        with patched(torch.autograd.Function, apply=classmethod(apply)):
            yield

    def refuse_unseen(self, loss: torch.Tensor) -> None:
        """Look for users' functions in a loss's graph.

        Raises:
            Refused: one of them was not seen forward, as its ``apply`` was looked up before the step; or two parts
                share a largest value that has a gradient.
        """
        known = {call.node for call in self._calls}
        seen, todo = set[Any](), list[Any]([loss.grad_fn])
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if isinstance(node, AllReduce._backward_cls):
                if node.tied:  # type: ignore[attr-defined]
                    raise Refused("two parts have the same largest value, and its gradient belongs to both")
            elif isinstance(node, torch.autograd.function.BackwardCFunction) and node not in known:
                name = type(node).__name__.removesuffix("Backward")
                raise Refused(f"the backward pass of {name}, a custom autograd function, may mix samples")
            todo += [each for each, _ in node.next_functions]

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the user's functions while they run backward.

        Raises:
            Refused: a part has a single sample, in which it cannot be seen where samples lie.
        """
        handles = []
        for place, call in enumerate(self._calls):
            if self._flow.samples == 1:
                if place not in self._proven:
                    raise Refused(f"the backward pass of {call.name}, a custom autograd function, for one sample alone")
                continue
            handles.append(call.node.register_prehook(lambda grads, call=call: self._begin(call, grads)))
            handles.append(call.node.register_hook(lambda grads, _, c=call, p=place: self._end(p, c, grads)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._calls = []

    def _begin(self, call: CustomCall, grads: tuple[torch.Tensor | None, ...]) -> None:
        flow = self._flow
        for grad, layout in zip(grads, call.outputs, strict=False):
            if grad is None:
                continue
            if layout is None or layout.kind not in ("rows", "constant"):
                raise Refused(f"{call.name}, a custom autograd function, returns values of the whole batch")
            flow.put(grad, layout if layout.kind == "rows" else Layout("sum"))
        flow.idle, flow.custom_returned = False, [*zip(call.returned, call.outputs, strict=True)]

    def _end(self, place: int, call: CustomCall, grads: tuple[torch.Tensor | None, ...]) -> None:
        flow = self._flow
        flow.idle, flow.custom_returned = True, None
        for grad, layout in zip(grads, call.inputs, strict=False):
            if grad is None:
                continue
            found = flow.known(grad)
            if layout is not None and layout.kind == "rows":
                same = found is not None and found.is_aligned(layout)
            else:
                same = found is not None and found.kind == "sum"
            if not same:
                raise Refused(f"the backward pass of {call.name}, a custom autograd function, mixes samples")
        self._proven.add(place)
