"""The fast paths of attention on a GPU: by a fused kernel where there is one."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_memguard import estimate

pytestmark = pytest.mark.exact


@pytest.mark.parametrize(("make", "fused"), [(lambda: layer(64, 4), True), (lambda: layer(48, 4), False)])
def test_an_encoder_layer_in_evaluation(make: Callable[[], nn.Module], fused: bool) -> None:
    """Heads of 12 numbers have no fused kernel: there, a score for each pair of places is kept."""
    model, x = make(), torch.randn(8, 512, 64 if fused else 48)
    footprint = estimate(model, x, device="RTX 3090", training=False)
    scores = 8 * 4 * 512 * 512 * 4
    assert footprint.method == "fake", footprint.notes
    assert (footprint.parts["temporaries"] > scores) is not fused


def layer(width: int, heads: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, heads, 2 * width, batch_first=True).eval()
