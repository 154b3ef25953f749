"""What a step may change is noted before each step, at little cost, and put back after a failure."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from lightning_memguard.training.adapter.closure import StepGuard
from lightning_memguard.training.adapter.logged import StepState
from lightning_memguard.training.adapter.same_step import SameStep


class Measured(nn.Module):
    """Has a metric that replaces its states, one that writes to them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.mean = torchmetrics.MeanMetric()
        self.register_buffer("seen", torch.zeros(1))
        self._current_fx_name = None

    def step(self) -> None:
        self.accuracy.update(torch.arange(4), torch.tensor([0, 1, 3, 3]))
        self.mean.update(torch.ones(3))
        self.seen += 1
        torch.rand(1)


def state_of(module: Measured) -> StepState:
    connector = SimpleNamespace(_current_fx=None)
    trainer: Any = SimpleNamespace(
        _logger_connector=connector, strategy=SimpleNamespace(root_device=torch.device("cpu"))
    )
    return StepState(trainer, module)  # type: ignore[arg-type]


@pytest.mark.parametrize("twice", [False, True])
def test_metrics_buffers_and_random_numbers_are_as_before(twice: bool) -> None:
    module = Measured()
    state = state_of(module)
    state.expect(buffers={"seen"})
    module.step()
    before = float(module.accuracy.compute()), float(module.mean.weight), float(module.seen), torch.get_rng_state()
    for _ in range(1 + twice):
        noted = state.note({})
        module.step()
        state.put_back(noted)
    after = float(module.accuracy.compute()), float(module.mean.weight), float(module.seen), torch.get_rng_state()
    assert after[:3] == before[:3]
    assert torch.equal(after[3], before[3])


def test_metrics_that_replace_their_states_are_not_copied() -> None:
    module = Measured()
    module.mean = None  # type: ignore[assignment]
    state = state_of(module)
    state.expect(draws=False, in_place=False)
    noted, kept = state.note({}), module.accuracy.tp
    module.accuracy.update(torch.arange(4), torch.arange(4))
    assert module.accuracy.tp is not kept
    state.put_back(noted)
    assert module.accuracy.tp is kept


def test_a_step_that_does_not_fail_costs_a_few_calls() -> None:
    """Steps take microseconds more, whatever the module: nothing is searched, and no object is made in advance."""
    module: Any = Measured()
    del module.accuracy, module.mean
    loop, connector = SimpleNamespace(_results={}), SimpleNamespace(_current_fx=None)
    loop.automatic_optimization = SimpleNamespace()
    strategy = SimpleNamespace(root_device=torch.device("cpu"), model=module)
    fit_loop = SimpleNamespace(epoch_loop=loop)
    trainer: Any = SimpleNamespace(_logger_connector=connector, strategy=strategy, fit_loop=fit_loop, world_size=1)
    module.__class__ = type("Module", (Measured,), {"__module__": "pytorch_lightning"})
    guard = StepGuard(trainer, module, SameStep(draws=False), policy=None)  # type: ignore[arg-type]
    calls: list[str] = []
    closure = SimpleNamespace(_zero_grad_fn=object())
    sys.setprofile(lambda _, event, __: calls.append(event) if "call" in event else None)
    try:
        guard.before(closure)
    finally:
        sys.setprofile(None)
    assert len(calls) <= 10
