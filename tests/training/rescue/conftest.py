"""A step without a Trainer, and its gradients as a whole and in parts."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_memguard.training.rescue.cut import cuts_for
from lightning_memguard.training.rescue.parts import Passes
from lightning_memguard.training.rescue.sample_layout import Refused

Loss = Callable[[nn.Module, Any], Any]
"""A module and a batch -> a loss, or a loss and further results."""


class PlainStep:
    """The smallest step that `Passes` can run: a function of a module and a batch."""

    def __init__(self, module: nn.Module, loss: Loss, batch: Any) -> None:
        self.module, self.function, self.batch = module, loss, batch
        self.passes: Passes | None = None
        self.noted, self.failed = self, False  # it knows the state before it by itself
        self.states = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def put_back(self) -> None:
        torch.set_rng_state(self.states[0])
        random.setstate(self.states[1])
        np.random.set_state(self.states[2])

    def unknown_draws(self) -> list[str]:
        return []

    def forward(self, batch: Any, *, final: bool, is_last: bool) -> Any:
        result = self.function(self.module, batch)
        return result if isinstance(result, tuple) else (result, None)

    def losses(self, result: Any) -> list[torch.Tensor]:
        return [] if result[0] is None else [result[0]]

    def outputs(self, result: Any) -> Any:
        return {"loss": result[0], "more": result[1]}

    def backward(self, result: Any, share: float, *, is_last: bool) -> None:
        if result[0] is not None and result[0].requires_grad:
            (result[0] * share).backward()

    def tensors_left(self) -> list[Any]:
        return []

    @contextlib.contextmanager
    def smaller(self, start: int, stop: int) -> Iterator[int]:
        yield (stop - start + 1) // 2


@dataclass
class Done:
    """Results of a step: gradients by parameter, loss and further results, and what is drawn after it."""

    gradients: list[torch.Tensor | None]
    outputs: Any
    drawn: torch.Tensor
    changes: tuple[str, ...] = ()
    refused: str = ""


@dataclass
class Steps:
    """Runs steps of one module as a whole and in parts, from the same random numbers."""

    module: Callable[[], nn.Module] = field(default=lambda: nn.Linear(4, 3))
    dtype: torch.dtype = torch.float64

    def _ready(self) -> nn.Module:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        return self.module().to(self.dtype)

    def whole(self, loss: Loss, batch: Any) -> Done:
        step = PlainStep(self._ready(), loss, batch)
        result = step.forward(batch, final=True, is_last=True)
        step.backward(result, 1.0, is_last=True)
        return self._done(step, step.outputs(result))

    def in_parts(self, loss: Loss, batch: Any, most: int, *, lenient: bool = False) -> Done:
        """The step in parts of at most so many samples, or why not."""
        step = PlainStep(self._ready(), loss, batch)
        samples, cut = next(cuts_for(batch, None))
        passes = Passes(step, cut, samples, step.module, lenient=lenient)
        try:
            passes.run(passes.learn(most))
        except Refused as refused:
            passes.undo()
            return Done([], None, torch.empty(0), refused=str(refused))
        return self._done(step, passes.result(), passes.changes)

    def _done(self, step: PlainStep, outputs: Any, changes: tuple[str, ...] = ()) -> Done:
        gradients = [each.grad for each in step.module.parameters()]
        return Done(gradients, outputs, torch.get_rng_state(), changes)

    def check(self, loss: Loss, batch: Any, *mosts: int) -> None:
        """Whatever the parts are, the step is the same."""
        expected = self.whole(loss, batch)
        for most in mosts or (4, 2, 1):
            found = self.in_parts(loss, batch, most)
            assert not found.refused
            torch.testing.assert_close(found.gradients, expected.gradients)
            torch.testing.assert_close(_plain(found.outputs), _plain(expected.outputs))
            assert torch.equal(found.drawn, expected.drawn)

    def refusal(self, loss: Loss, batch: Any, most: int = 4) -> str:
        """Why a step is not done in parts."""
        reason = self.in_parts(loss, batch, most).refused
        assert reason, "it was done in parts"
        return reason


def _plain(outputs: Any) -> Any:
    """Results without the graph of the whole step."""
    if isinstance(outputs, dict):
        return {key: _plain(value) for key, value in outputs.items()}
    return outputs.detach() if isinstance(outputs, torch.Tensor) else outputs


@pytest.fixture
def steps() -> type[Steps]:
    return Steps
