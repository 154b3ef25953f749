"""Reductions over samples have the whole batch's value in each part, and the gradients of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memguard.training.rescue.reductions import AllReduce, Totals
from lightning_memguard.training.rescue.sample_layout import Refused

Function = Callable[..., Any]

DRAWN = torch.Generator().manual_seed(3)
X = torch.randn(6, 4, dtype=torch.float64, generator=DRAWN)
MASK = torch.zeros(6, 5, dtype=torch.bool)
MASK[4, 1] = MASK[5, :4] = True  # nothing in the first part
BATCH = {
    "x": X,
    "classes": torch.tensor([0, 3, 1, 2, 2, 0]),
    "ignoring": torch.tensor([-100, -100, -100, -100, 2, 0]),
    "texts": torch.randn(6, 5, 4, dtype=torch.float64, generator=DRAWN),
    "mask": MASK,
    "labels": torch.randint(0, 4, (6, 5), generator=DRAWN).masked_fill(~MASK, -100),
    "target": torch.randn(6, 4, dtype=torch.float64, generator=DRAWN),
    "signs": torch.tensor([1.0, -1, 1, 1, -1, -1], dtype=torch.float64),
}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 4))


def of_samples(function: Function) -> Callable[[nn.Module, Any], Any]:
    """A step whose loss is the sum of what a function reduces scaled samples to, and which returns that."""

    def step(module: nn.Module, batch: Any) -> Any:
        out = function(batch["x"] * module.scale)
        return out.sum(), out

    return step


def test_a_contribution_counts_once_however_the_loss_is_shared() -> None:
    """Parts of 1 and 3 of 4 samples: the loss is scaled by 1/4 and 3/4, a contribution's gradient by 4 and 4/3."""
    own, totals = torch.tensor([1.0], requires_grad=True), Totals()
    totals.add(0, "sum", own, pending=False, samples=4)
    for share in (0.25, 0.75):
        (AllReduce.apply(own, torch.tensor([5.0]), share, totals.found[0], False).square() * share).backward()
    assert own.grad.tolist() == [2 * 5.0 * 2]  # twice d(5 * 5), once for each part


def test_totals_are_known_once_all_samples_have_contributed() -> None:
    totals = Totals()
    totals.begin()
    totals.add(0, "sum", torch.tensor(1.0), pending=False, samples=2)
    totals.add(0, "sum", torch.tensor(2.0), pending=False, samples=1)
    totals.add(1, "max", torch.tensor(7.0), pending=True, samples=2)
    totals.add(1, "max", torch.tensor(4.0), pending=True, samples=1)
    assert not totals.learn(3)
    assert totals.known == {0: torch.tensor(3.0)}
    totals.begin()
    for place, kind, value in ((0, "sum", 1.0), (1, "max", 7.0)):
        totals.add(place, kind, torch.tensor(value), pending=False, samples=2)
        totals.add(place, kind, torch.tensor(value + 1), pending=False, samples=1)
    assert totals.learn(3)
    assert totals.known == {0: torch.tensor(3.0), 1: torch.tensor(8.0)}


def test_reductions_that_wait_for_each_other_are_refused() -> None:
    totals = Totals()
    totals.begin()
    totals.add(0, "sum", torch.tensor(1.0), pending=True, samples=2)
    with pytest.raises(Refused, match="in a circle"):
        totals.learn(2)


def test_a_part_that_computes_something_else_when_it_runs_again_is_refused() -> None:
    totals = Totals()
    totals.begin()
    totals.add(0, "sum", torch.tensor(1.0), pending=False, samples=2)
    totals.learn(2)
    totals.begin()
    totals.add(0, "sum", torch.tensor(1.5), pending=False, samples=2)
    with pytest.raises(Refused, match="something else when it is run again"):
        totals.check()


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: x.sum(),
        lambda x: x.sum(0),
        lambda x: x.sum(dim=0, keepdim=True),
        lambda x: x.sum((0, 1)),
        lambda x: x.nansum(),
        lambda x: x.mean(),
        lambda x: x.mean(0),
        lambda x: x.mean((0, 1), keepdim=True),
        lambda x: torch.mean(x, dim=0, dtype=torch.float64),
        lambda x: x.mean(axis=0),
        lambda x: x.var(),
        lambda x: x.var(0),
        lambda x: x.var(0, unbiased=False),
        lambda x: x.var(dim=0, correction=2),
        lambda x: torch.var(x, False),
        lambda x: x.std(),
        lambda x: x.std(0, keepdim=True),
        lambda x: torch.stack(torch.var_mean(x, 0)),
        lambda x: torch.stack(torch.std_mean(x)),
        lambda x: x.norm(),
        lambda x: x.norm(dim=0),
        lambda x: x.norm(p=1),
        lambda x: x.norm(3, 0),
        lambda x: x.norm(math.inf),
        torch.linalg.norm,
        lambda x: torch.linalg.vector_norm(x, 2, 0),
        lambda x: x.logsumexp(0),
        lambda x: x.logsumexp((0, 1)),
        lambda x: x.amax(0),
        lambda x: x.amin(),
        lambda x: x.max() - x.min(),
        lambda x: x.T @ x,
        lambda x: torch.einsum("bi,bj->ij", x, x),
        lambda x: torch.dot(x[:, 0], x[:, 1]),
        lambda x: (x > 0).sum() * x.mean(),
        lambda x: (x > 0).any().double() * (x > -9).all() * x.sum(),
        lambda x: torch.count_nonzero(x > 0) * x.sum(),
        lambda x: x.square().mean().sqrt(),
        lambda x: x.sum() / len(x),
        lambda x: x.sum() / (x > 0.5).sum().clamp(min=1),
        lambda x: x.exp().mean(0).log().clamp(max=1.0).sum() * x.std().item(),
        lambda x: x.softmax(-1).mean(0).pow(2).sum().sqrt() + x.mean().exp(),
    ],
)
def test_a_reduction_has_the_whole_batchs_value_and_gradient(steps: Any, reduce: Function) -> None:
    steps(Scaled).check(of_samples(reduce), {"x": X}, 4, 1)


LOSSES: dict[str, Function] = {
    "cross_entropy": lambda x, b, how: F.cross_entropy(x, b["classes"], reduction=how),
    "cross_entropy, smooth": lambda x, b, how: F.cross_entropy(x, b["classes"], reduction=how, label_smoothing=0.1),
    "cross_entropy, weighted": lambda x, b, how: F.cross_entropy(
        x, b["classes"], torch.tensor([1.0, 0.5, 2.0, 1.0], dtype=x.dtype), reduction=how
    ),
    "cross_entropy of probabilities": lambda x, b, how: F.cross_entropy(x, b["target"].softmax(-1), reduction=how),
    "cross_entropy of few": lambda x, b, how: F.cross_entropy(x, b["ignoring"], reduction=how),
    "cross_entropy of tokens": lambda x, b, how: F.cross_entropy(
        (b["texts"] + x[:, None]).mT, b["labels"], reduction=how
    ),
    "cross_entropy of flat tokens": lambda x, b, how: F.cross_entropy(
        (b["texts"] + x[:, None]).flatten(0, 1), b["labels"].flatten(), reduction=how
    ),
    "nll_loss": lambda x, b, how: F.nll_loss(x.log_softmax(-1), b["classes"], reduction=how),
    "mse_loss": lambda x, b, how: F.mse_loss(x, b["target"], reduction=how),
    "l1_loss": lambda x, b, how: F.l1_loss(x, b["target"], reduction=how),
    "smooth_l1_loss": lambda x, b, how: F.smooth_l1_loss(x, b["target"], reduction=how),
    "huber_loss": lambda x, b, how: F.huber_loss(x, b["target"], reduction=how),
    "binary_cross_entropy": lambda x, b, how: F.binary_cross_entropy(x.sigmoid(), b["target"].sigmoid(), reduction=how),
    "binary_cross_entropy_with_logits": lambda x, b, how: F.binary_cross_entropy_with_logits(
        x, b["target"].sigmoid(), pos_weight=torch.full((4,), 2.0, dtype=x.dtype), reduction=how
    ),
    "kl_div": lambda x, b, how: F.kl_div(x.log_softmax(-1), b["target"].softmax(-1), reduction=how),
    "poisson_nll_loss": lambda x, b, how: F.poisson_nll_loss(x, b["target"].exp(), reduction=how),
    "cosine_embedding_loss": lambda x, b, how: F.cosine_embedding_loss(x, b["target"], b["signs"], reduction=how),
    "margin_ranking_loss": lambda x, b, how: F.margin_ranking_loss(
        x[:, 0], b["target"][:, 0], b["signs"], margin=0.1, reduction=how
    ),
    "hinge_embedding_loss": lambda x, b, how: F.hinge_embedding_loss(x[:, 0], b["signs"], reduction=how),
    "soft_margin_loss": lambda x, b, how: F.soft_margin_loss(x[:, 0], b["signs"], reduction=how),
    "multilabel_soft_margin_loss": lambda x, b, how: F.multilabel_soft_margin_loss(
        x, (b["target"] > 0).to(x), reduction=how
    ),
    "triplet_margin_loss": lambda x, b, how: F.triplet_margin_loss(x, b["target"], b["texts"][:, 0], reduction=how),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("how", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_is_that_of_the_whole_batch(steps: Any, loss: Function, how: str) -> None:
    """In parts of which the first has no token at all."""

    def step(module: Any, batch: Any) -> Any:
        out = loss(batch["x"] * module.scale, batch, how)
        return out.sum(), out

    steps(Scaled).check(step, BATCH, 4)


def test_kl_div_by_batch_divides_by_the_whole_batch(steps: Any) -> None:
    def step(module: Any, batch: Any) -> Any:
        scaled = (batch["x"] * module.scale).log_softmax(-1)
        return F.kl_div(scaled, batch["target"].softmax(-1), reduction="batchmean")

    steps(Scaled).check(step, BATCH)


@pytest.mark.parametrize(
    "normalize",
    [
        lambda losses, mask: losses[mask].mean(),
        lambda losses, mask: losses[mask].sum() / mask.sum(),
        lambda losses, mask: (losses * mask).sum() / mask.sum().clamp(min=1),
        lambda losses, mask: (losses * mask).sum() / max(1, int(mask.sum())),
        lambda losses, mask: (losses * (mask / mask.sum())).sum(),
        lambda losses, mask: (losses * mask * (1 / mask.sum())).sum(),
        lambda losses, mask: torch.dot(losses.flatten(), (mask / mask.sum()).to(losses).flatten()),
        lambda losses, mask: torch.masked_select(losses, mask).mean(),
        lambda losses, mask: losses.masked_fill(~mask, 0).sum() / len(losses[mask]),
        lambda losses, mask: losses[mask].mean() + losses.mean(),
        lambda losses, mask: losses[mask].std() + losses[mask].numel() * losses.mean(),
        lambda losses, mask: losses[~mask].mean() if mask.sum() > 5 else losses[mask].sum() * 2,
    ],
)
def test_what_is_masked_is_averaged_over_the_whole_batch(steps: Any, normalize: Function) -> None:
    """The first part has no element that counts, which a mean of its own would divide by."""

    def step(module: Any, batch: Any) -> Any:
        losses = (batch["texts"] * module.scale).square().mean(-1)
        return normalize(losses, batch["mask"])

    steps(Scaled).check(step, BATCH, 4, 2)


@pytest.mark.parametrize("most", [4, 1])
@pytest.mark.parametrize(
    ("reduce", "why"),
    [
        (lambda x, b: F.ctc_loss(x[None].log_softmax(-1), b["classes"][:, None], *[torch.ones(6).long()] * 2), ""),
        (lambda x, b: F.mse_loss(x, b["target"], weight=torch.ones(4).double()), "the weighted mean of mse_loss"),
        (lambda x, b: F.mse_loss(x, b["target"], size_average=False), "mse_loss with size_average or reduce"),
        (lambda x, b: x.median(), "median over the samples"),
        (lambda x, b: x.quantile(0.5), ""),
        (lambda x, b: x.prod(), "prod over the samples"),
        (lambda x, b: x.norm(p=0), "a norm of order 0 over the samples"),
        (lambda x, b: torch.linalg.matrix_norm(x, 2), ""),
        (lambda x, b: x.argmax() * x.sum(), "argmax over the samples"),
    ],
)
def test_a_reduction_that_does_not_follow_from_sums_is_refused(
    steps: Any, reduce: Function, why: str, most: int
) -> None:
    assert why in steps(Scaled).refusal(lambda m, batch: reduce(batch["x"] * m.scale, batch), BATCH, most)


def test_a_largest_value_that_two_parts_share_is_refused_where_its_gradient_counts(steps: Any) -> None:
    x = torch.tensor([[1.0], [3.0], [2.0], [3.0]], dtype=torch.float64)

    def step(module: Any, batch: Any) -> Any:
        return (batch["x"] * module.scale[0]).amax()

    def detached(module: Any, batch: Any) -> Any:
        return (batch["x"] * module.scale[0]).sum() * batch["x"].amax()

    made = steps(Scaled)
    assert "two parts have the same largest value" in made.refusal(step, {"x": x}, 2)
    made.check(detached, {"x": x}, 2)
    made.check(step, {"x": x[:3]}, 2)


def test_many_reductions_that_follow_from_each_other_take_as_many_passes(steps: Any) -> None:
    """Each is the mean of what was divided by the one before."""

    def step(module: Any, batch: Any) -> Any:
        out = batch["x"] * module.scale
        first = out.square().mean()
        second = (out.detach() / first.item()).abs().mean()
        third = (out / second.item()).square().mean()
        return first + third, third

    steps(Scaled).check(step, {"x": X})


def test_reductions_in_a_chain_too_long_are_refused(steps: Any) -> None:
    def step(module: Any, batch: Any) -> Any:
        value = 1.0
        for _ in range(12):
            value = (batch["x"] / value).square().mean().item()
        return (batch["x"] * module.scale).sum() * value

    assert "depend on each other more than 8 times" in steps(Scaled).refusal(step, {"x": X})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_low_precision_are_added_up_in_double(steps: Any, dtype: torch.dtype) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(5)).to(dtype)
    made, step = steps(Scaled, dtype), of_samples(lambda x: x.square().mean())
    expected, found = made.whole(step, {"x": x}), made.in_parts(step, {"x": x}, 4)
    assert found.outputs["more"].dtype == dtype
    torch.testing.assert_close(found.outputs["more"], expected.outputs["more"].detach())
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=2e-2, atol=1e-2)


def test_without_its_share_a_gradient_would_be_another(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above: they would see it."""
    made, step = steps(Scaled), of_samples(lambda x: x.square().mean())
    expected = made.whole(step, {"x": X})
    monkeypatch.setattr(AllReduce, "backward", staticmethod(lambda ctx, grad: (grad, None, None, None, None)))
    found = made.in_parts(step, {"x": X}, 4)
    assert (found.gradients[0] - expected.gradients[0]).abs().max() > 0.1
