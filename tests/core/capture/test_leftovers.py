"""Memory that batches leave in reference cycles: counted, as often as garbage may wait."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.leftovers import _BATCHES_OF_GARBAGE, without_collections
from lightning_memguard.core.capture.predict import predict
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.replay.settings import AllocatorSettings


class Ring:
    """Refers to itself, and so to what it keeps until Python collects garbage."""

    def __init__(self, kept: torch.Tensor) -> None:
        self.ring, self.kept = self, kept


def leaves_a_ring(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    Ring(torch.zeros(len(x), 1000))
    return model(x).sum()


def leaves_nothing(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.zeros(len(x), 1000)
    return model(x).sum()


@pytest.mark.usefixtures("here")
def test_garbage_of_one_batch_is_predicted_and_that_of_many_at_most() -> None:
    found = {}
    for step in (leaves_a_ring, leaves_nothing):
        batches = batches_from_one(torch.ones(16, 4))
        program = LoopProgram(nn.Linear(4, 8), batches, step, torch.optim.SGD, torch.device("cpu"))
        found[step] = predict(program, 16, AllocatorSettings(kind="exact")).footprint_at(64)
    ring, nothing = found[leaves_a_ring], found[leaves_nothing]
    kept = 64 * 4000
    assert nothing.low is nothing.high is None
    assert nothing.peak_allocated_bytes < 2 * kept
    assert ring.low is not None
    assert ring.high is not None
    assert ring.peak_allocated_bytes - ring.low.allocated_bytes == kept
    assert ring.high.allocated_bytes - ring.low.allocated_bytes == _BATCHES_OF_GARBAGE * kept
    assert "in reference cycles of Python objects" in " ".join(ring.notes)


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_left_as_it_was(is_on: bool) -> None:
    before = gc.isenabled(), gc.get_freeze_count()
    if not is_on:
        gc.disable()
    try:
        with without_collections():
            assert not gc.isenabled()
        assert gc.isenabled() == is_on
        assert gc.get_freeze_count() <= before[1]  # of what earlier tests have frozen, something may have gone
    finally:
        if before[0]:
            gc.enable()
