"""Modules that find their parameters in a global store, and arguments that are validated."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.predict import predict
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import AllocatorSettings

pytestmark = pytest.mark.usefixtures("here")
FEATURES = 256


def footprint_of(model: nn.Module, step: Any) -> Footprint:
    program = LoopProgram(model, batches_from_one(torch.ones(8, FEATURES)), step, torch.optim.Adam, torch.device("cpu"))
    return predict(program, 8, AllocatorSettings(kind="exact")).footprint_at(8)


class Store:
    """A store of parameters with the methods of Pyro's."""

    def __init__(self) -> None:
        self.params: dict[str, nn.Parameter] = {}

    def get_state(self) -> dict[str, Any]:
        return {"params": dict(self.params), "constraints": {}}

    @contextlib.contextmanager
    def scope(self, state: dict[str, Any]) -> Iterator[None]:
        before, self.params = self.params, dict(state["params"])
        try:
            yield
        finally:
            self.params = before


def test_a_parameter_that_is_looked_up_in_pyros_store_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    store, pyro = Store(), ModuleType("pyro")
    pyro.get_param_store = lambda: store  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyro", pyro)

    class Guide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.location = nn.Parameter(torch.zeros(FEATURES, FEATURES))
            store.params["location"] = self.location

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ store.params["location"]

    guide = Guide()
    found = footprint_of(guide, lambda model, x: model(x).sum())
    assert found.method == "fake"
    assert found.parts["optimizer_state"] == 2 * found.parts["parameters"] + 4
    assert found.parts["gradients"] == found.parts["parameters"]
    assert store.params["location"] is guide.location
    assert guide.location.grad is None


def test_arguments_that_distributions_validate_need_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile leaves it off in the whole process
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    def bound(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        location, scale = model(x).chunk(2, 1)
        posterior = Normal(location, scale.exp())
        return kl_divergence(posterior, Normal(0.0, 1.0)).sum() - posterior.log_prob(posterior.rsample()).sum()

    found = footprint_of(nn.Linear(FEATURES, FEATURES), bound)
    assert found.method == "fake"
    assert not found.notes
