"""By how many elements a step averages, as its operators are called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from lightning_memguard.core.capture.averages import Average, Averages

OUT = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
LABELS = torch.tensor([[0, 1, 2, -100, -100]] * 4)
MASK = LABELS >= 0


@pytest.mark.parametrize(
    ("loss", "average"),
    [
        (lambda: F.cross_entropy(OUT, LABELS), Average(12, 20)),
        (lambda: F.cross_entropy(OUT, LABELS.clamp(min=0)), Average(20, 20)),
        (lambda: F.cross_entropy(OUT[:, :, 0], LABELS[:, 0]), Average(4, 4)),
        (lambda: F.cross_entropy(OUT, LABELS, weight=torch.tensor([1.0, 0.5, 0.5])), Average(8, 20)),
        (lambda: (OUT[:, 0] * MASK).sum() / MASK.sum(), Average(12, None)),
        (OUT[:, 0][MASK].mean, Average(12, 12)),
        (lambda: OUT.sum() / 4, Average(4, 4)),
        (lambda: F.mse_loss(OUT, OUT + 1), Average(60, 60)),
        (lambda: F.binary_cross_entropy_with_logits(OUT, OUT.detach().sigmoid()), Average(60, 60)),
    ],
)
def test_what_a_loss_divides_by_is_noted(loss: Callable[[], torch.Tensor], average: Average) -> None:
    averages = Averages()
    with averages:
        loss()
    assert averages.found()[-1] == average
    assert average.is_full == (average.count == average.elements)


def test_means_of_each_sample_sums_and_metrics_are_not() -> None:
    averages = Averages()
    with averages:
        (OUT.detach().argmax(1) == LABELS).float().mean() / OUT.detach().sum()
        (OUT.mean(dim=(1, 2)) / OUT.std(dim=(1, 2))).sum()
        F.cross_entropy(OUT, LABELS, reduction="none")
    assert averages.found() == []
