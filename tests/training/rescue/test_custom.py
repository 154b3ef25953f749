"""Backward passes that users wrote are followed: per sample, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


class Rounded(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x * weight).round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad.sum(0)


class Product(torch.autograd.Function):
    """A layer by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, (x * grad).sum(0)


class Centered(Rounded):
    """Its gradient is centered over the batch."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad - grad.mean(0), grad.sum(0)


class Reversing(Rounded):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.flip(0), grad.sum(0)


class Sliced(Rounded):
    """The first five rows are all of a part."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad[:5] *= 2
        return grad, grad.sum(0)


class Clamped(Rounded):
    """The gradient of a weight is clamped: of parts, it would be clamped for each."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad.sum(0).clamp(-1, 1)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(4, 4), nn.Parameter(torch.linspace(0.5, 2.0, 4))


def step_of(function: Any) -> Any:
    return lambda module, batch: function.apply(module.first(batch["x"]) * 3, module.scale).square().sum() / 6


@pytest.mark.parametrize("function", [Rounded, Product])
def test_a_function_of_each_sample_is_equal_in_parts(steps: Any, function: Any) -> None:
    steps(Weighted).check(step_of(function), {"x": X}, 4, 3)


@pytest.mark.parametrize("function", [Centered, Reversing, Sliced, Clamped])
def test_a_function_whose_gradient_mixes_samples_is_refused(steps: Any, function: Any) -> None:
    reason = steps(Weighted).refusal(step_of(function), {"x": X})
    assert any(
        words in reason
        for words in ("flip mixes", "slice takes", "mean over", "a custom autograd function", "clamp of a part")
    )


def test_in_a_part_of_one_sample_it_cannot_be_seen(steps: Any) -> None:
    reason = steps(Weighted).refusal(step_of(Rounded), {"x": X}, 1)
    assert "the backward pass of Rounded, a custom autograd function, for one sample alone" in reason


REVERSE = Reversing.apply  # as many programs keep it, for a name


def test_a_function_that_was_given_a_name_before_is_followed_too(steps: Any) -> None:
    def step(module: Any, batch: Any) -> torch.Tensor:
        return REVERSE(module.first(batch["x"]) * 3, module.scale).square().sum() / 6

    steps(Weighted).refusal(step, {"x": X})
