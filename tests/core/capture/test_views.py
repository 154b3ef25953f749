"""Views that are written to without gradients, and complex parameters, which optimizers see as real ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.capture import capture_here
from lightning_memguard.core.capture.program import LoopProgram

pytestmark = pytest.mark.exact


class Decayed(nn.Module):
    """As prototypes and codebooks are updated."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight[0].mul_(0.9)
        return self.linear(x).sum()


class Spectral(nn.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x)[:, :8] @ self.weight, n=16).pow(2).sum()


@pytest.mark.parametrize("model", [Decayed, Spectral])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.usefixtures("here")
def test_a_step_on_fake_tensors_allocates_what_it_allocates_on_real_ones(model, foreach):
    program = LoopProgram(
        model(),
        batches_from_one(torch.zeros(8, 16)),
        lambda model, x: model(x),
        lambda parameters: torch.optim.Adam(parameters, foreach=foreach),
        torch.device("cpu"),
    )
    assert capture_here(program, 8, "fake").events == capture_here(program, 8, "real").events
