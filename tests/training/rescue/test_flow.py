"""How each operator carries samples: row by row, or refused by name and line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memguard.training.rescue.sample_layout import get

Function = Callable[..., Any]

DRAWN = torch.Generator().manual_seed(1)
X = torch.randn(6, 4, dtype=torch.float64, generator=DRAWN)
TABLE = torch.randn(5, 4, dtype=torch.float64, generator=DRAWN)
BATCH = {
    "x": X,
    "images": torch.randn(6, 2, 4, 4, dtype=torch.float64, generator=DRAWN),
    "texts": torch.randn(6, 5, 4, dtype=torch.float64, generator=DRAWN),
    "classes": torch.tensor([0, 3, 1, 2, 2, 0]),
    "mask": torch.tensor([True, False, True, True, False, True]),
}


class Weighted(nn.Module):
    """Scales features; its layers are for the functions of the tables."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 4))
        self.matrix = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)
        self.group_norm = nn.GroupNorm(2, 2)
        self.instance_norm = nn.InstanceNorm2d(2, affine=True)
        self.batch_norm = nn.BatchNorm1d(4)
        self.layer_norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.lstm, self.gru = nn.LSTM(4, 3, batch_first=True), nn.GRU(4, 3, batch_first=True)
        self.register_buffer("running", torch.zeros(4))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.flip(0)


@torch.library.custom_op("memguard_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def masked_features(x: torch.Tensor) -> torch.Tensor:
    out = x * 2
    out[:, torch.tensor([True, False, True, False])] = x[:, :2]
    return out


ROWS: dict[str, Function] = {
    # element by element
    "relu": lambda x: x.relu(),
    "arithmetic with itself": lambda x: (x * x + 1) / (x.abs() + 2) - x,
    "a value for each feature": lambda x: x + torch.arange(4.0),
    "where": lambda x: torch.where(x > 0, x, x.exp()),
    "clamp": lambda x: x.clamp(-1, 1),
    "masked_fill": lambda x: x.masked_fill(x > 0, 2.0),
    "in place": lambda x: x.clone().mul_(2).add_(1),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "maximum": lambda x: torch.maximum(x, -x),
    "cast": lambda x: x.float().double(),
    "float of a comparison": lambda x: (x > 0).double() * x,
    "logsigmoid": F.logsigmoid,
    "threshold, softplus, gelu": lambda x: F.threshold(F.softplus(F.gelu(x)), 0.1, 0.0),
    "zeros_like, ones_like": lambda x: x + torch.zeros_like(x) + torch.ones_like(x),
    # shapes
    "unsqueeze, squeeze": lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(1).squeeze(-1),
    "transpose": lambda x: x.t().contiguous().t() * 2,
    "permute": lambda x: x[:, None].permute(2, 1, 0).permute(2, 0, 1),
    "view and back": lambda x: x.view(x.shape[0], 2, 2).reshape(x.shape[0], -1),
    "flatten samples and features": lambda x: x.view(-1).exp().view(-1, 4),
    "expand": lambda x: x[:, None].expand(-1, 3, 4) * 2,
    "repeat": lambda x: x.repeat(1, 2),
    "repeat_interleave of features": lambda x: x.repeat_interleave(2, dim=1),
    "stack of views": lambda x: torch.stack([x, x * 2], 1),
    "cat of features": lambda x: torch.cat([x, x.exp()], -1),
    "cat of views, as contrastive learning has it": lambda x: torch.cat([x, x * 2]).exp().chunk(2)[1],
    "a token in front of each": lambda x: torch.cat([torch.zeros(x.shape[0], 1), x], 1),
    "slice of features": lambda x: x[:, 1:3],
    "select of a feature": lambda x: x[:, 0].unsqueeze(1) * x,
    "split, chunk, unbind of features": lambda x: sum(x.split(2, 1)[0].unbind(1)).unsqueeze(1) + x.chunk(2, 1)[1],
    "pad of features": lambda x: F.pad(x, (1, 2)),
    "new_zeros by a size": lambda x: x.new_zeros(x.shape[0], 2) + x[:, :2],
    "zeros by a size": lambda x: torch.zeros(len(x), 4, dtype=x.dtype) + x,
    "unfold": lambda x: x.unfold(1, 2, 1),
    # along features
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(1),
    "cumsum, flip, roll": lambda x: x.cumsum(1).flip(1).roll(1, 1),
    "sort, topk": lambda x: x.sort(dim=1).values[:, :2] + x.topk(2, dim=1).values,
    "gather": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, x.argmax(1, keepdim=True), 1.0) * x,
    "normalize": lambda x: F.normalize(x, dim=1),
    "mean, var, std of features": lambda x: x.mean(1, keepdim=True) + x.var(1, keepdim=True) * x.std(1, keepdim=True),
    "norm, logsumexp, prod of features": lambda x: (x.norm(dim=1) + x.logsumexp(1) + x.prod(1)).unsqueeze(1),
    "max, median of features": lambda x: (x.max(1).values + x.median(1).values + x.amin(1)).unsqueeze(1),
    "glu": F.glu,
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "index of features by constants": lambda x: x[:, torch.tensor([0, 2])],
    "the entry of each sample's class": lambda x: x[torch.arange(len(x)), x.argmax(1)].unsqueeze(1),
    "index_select of features": lambda x: x.index_select(1, torch.tensor([3, 0])),
    "one_hot": lambda x: F.one_hot(x.argmax(1), 4) * x,
    "one_hot of as many classes as the whole batch has": lambda x: F.one_hot(x.argmax(1)) * x,
    "embedding": lambda x: F.embedding(x.argmax(1), TABLE) * x,
    "a table's rows": lambda x: TABLE[x.argmax(1)] * x,
    # products
    "matmul with a constant": lambda x: x @ TABLE.T,
    "linear": lambda x: F.linear(x, TABLE),
    "einsum": lambda x: torch.einsum("bi,oi->bo", x, TABLE),
    "outer product of each": lambda x: torch.bmm(x[:, :, None], x[:, None]),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.exp(), dim=1).unsqueeze(1),
    # reductions, whose value is the whole batch's
    "minus the mean": lambda x: x - x.mean(0).detach(),
    "divided by the largest": lambda x: x / x.detach().abs().max(),
    "sums of rows that are all alike": lambda x: x * x.detach().mean(0).expand_as(x).sum(),
    "sums of as many rows": lambda x: x * x.detach().mean(0).expand(len(x), 4).sum(),
    "the size in each row": lambda x: x / torch.full((len(x), 1), len(x)) + x.new_full((len(x), 4), fill_value=len(x)),
    "distances to a codebook": lambda x: torch.cdist(x, TABLE),
    "a norm over constants": lambda x: F.normalize(x.detach(), p=1, dim=0) * x,
    "features of a mask": masked_features,
    "a row for some samples": lambda x: x.index_put((x[:, 0] > 0,), torch.arange(4).to(x)),
    "copies of features": lambda x: x.index_copy(1, torch.tensor([2, 0]), x[:, :2].exp()),
    "places of some samples": lambda x: x.new_zeros(x.shape).index_add(0, (at := (x[:, 0] > 0).nonzero()[:, 0]), x[at]),
    "the size in a number": lambda x: x / len(x) + x * x.shape[0] ** 0.5,
}
LAYERS: dict[str, Function] = {
    "convolution": lambda m, b: m.convolution(b["images"]),
    "pooling": lambda m, b: F.max_pool2d(m.convolution(b["images"]), 2) + F.avg_pool2d(m.convolution(b["images"]), 2),
    "adaptive pooling": lambda m, b: F.adaptive_avg_pool2d(m.convolution(b["images"]), 1).flatten(1),
    "upsampling": lambda m, b: F.interpolate(m.convolution(b["images"]), scale_factor=2, mode="bilinear"),
    "nearest upsampling": lambda m, b: F.interpolate(m.convolution(b["images"]), scale_factor=2),
    "pixel shuffle": lambda m, b: F.pixel_shuffle(m.convolution(b["images"]), 2),
    "group norm": lambda m, b: m.group_norm(b["images"]),
    "instance norm": lambda m, b: m.instance_norm(b["images"]),
    "layer norm": lambda m, b: m.layer_norm(b["texts"]),
    "batch norm in eval mode": lambda m, b: m.batch_norm.eval()(b["x"]),
    "attention": lambda m, b: m.attention(b["texts"], b["texts"], b["texts"], need_weights=False)[0],
    "attention weights": lambda m, b: m.attention(b["texts"], b["texts"], b["texts"])[1],
    "scaled_dot_product_attention": lambda m, b: F.scaled_dot_product_attention(
        b["texts"] * m.scale, *[b["texts"]] * 2
    ),
    "samples in place of heads": lambda m, b: F.scaled_dot_product_attention(
        b["texts"][None] * m.scale, *[b["texts"][None]] * 2
    ),
    "transformer layer": lambda m, b: m.encoder(b["texts"]),
    "transformer layer with padding": lambda m, b: m.encoder(b["texts"], src_key_padding_mask=b["texts"][..., 0] > 1),
    "LSTM": lambda m, b: m.lstm(b["texts"])[0],
    "gaussian_nll_loss": lambda m, b: F.gaussian_nll_loss(b["x"] * m.scale, b["x"], b["x"].exp()),
    "entries of some samples": lambda m, b: (b["texts"] * m.scale)[
        (b["texts"][..., 0] > 0).nonzero(as_tuple=True)
    ].sum(),
}
REFUSED: dict[str, tuple[Function, str]] = {
    "similarities": (lambda x: x @ x.T, "mm mixes samples"),
    "einsum of two samples": (lambda x: torch.einsum("ai,bi->ab", x, x), "mixes samples"),
    "distances between samples": (lambda x: torch.cdist(x, x), "mixes samples"),
    "differences between samples": (lambda x: (x[:, None] - x[None]).sum(1), "sub combines different samples"),
    "a mask of attention by place": (
        lambda x: F.scaled_dot_product_attention(*[x[None, :, None]] * 3, attn_mask=TABLE[None, : len(x), :1, None]),
        "mixes samples",
    ),
    "roll": (lambda x: x.roll(1, 0), "roll mixes samples"),
    "flip": (lambda x: x.flip(0), "flip mixes samples"),
    "sort": (lambda x: x.sort(dim=0).values, "sort mixes samples"),
    "topk": (lambda x: x.topk(2, dim=0).values.sum(), "topk mixes samples"),
    "softmax over samples": (lambda x: x.softmax(0), "softmax mixes samples"),
    "cumsum over samples": (lambda x: x.cumsum(0), "cumsum mixes samples"),
    "a permutation": (lambda x: x[torch.randperm(len(x))], "mixes samples|differs"),
    "the first sample": (lambda x: x[0] * 2, "select takes single samples out of the batch"),
    "each sample in a loop": (lambda x: sum(row for row in x), "unbind takes single samples out of the batch"),
    "the first four": (lambda x: x[:4], "slice takes some of the samples"),
    "the last four": (lambda x: x[-4:], "slice takes some of the samples"),
    "the first half": (lambda x: x[: len(x) // 2], "slice takes some of the samples"),
    "every other sample": (lambda x: x[::2], "slice takes some of the samples"),
    "chunks of samples": (lambda x: x.chunk(2)[0], "split takes some of the samples"),
    "a product over samples": (lambda x: x.prod(0), "prod over the samples"),
    "a median over samples": (lambda x: x.median(), "median over the samples"),
    "the place of the largest": (lambda x: x * x.argmax(0), "argmax over the samples"),
    "a reshape through samples": (
        lambda x: x.reshape(4, -1),
        "view cuts through the samples|view depends on|runs something else",
    ),
    "rows of no sample": (lambda x: torch.cat([x, TABLE]), "cat puts rows of no sample next to samples"),
    "padding with samples": (lambda x: F.pad(x, (0, 0, 0, 1)), "pad_nd adds rows of no sample"),
    "places as numbers": (lambda x: x * torch.arange(len(x))[:, None], "takes places of samples within the batch"),
    "a value of one sample": (lambda x: x * float(x.exp()[1, 1]), "takes single samples out of the batch"),
    "values of samples": (lambda x: x * max(x.sum(1).tolist()), "tolist reads values of single samples"),
    "NumPy": (lambda x: torch.from_numpy(x.detach().numpy() * 2) * x, "reads values of single samples outside"),
    "whether any sample": (lambda x: x * (x > 0).sum(1).equal(x.sum(1)), "reads values of single samples"),
    "coins of given probability": (
        lambda x: x * torch.bernoulli(x.detach().sigmoid()),
        "bernoulli draws random numbers",
    ),
    "a generator of its own": (
        lambda x: x * torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype),
        "draws from a generator of its own",
    ),
    "as_strided": (lambda x: x.as_strided((2, 2), (1, 1)), "as_strided"),
    "unique": (lambda x: x.unique().sum() * x, "unique"),
    "sums of places": (lambda x: x.nonzero()[:, 0].sum() * x, "sum takes places of samples"),
    "the place of one": (lambda x: x[(x[:, 0] > 0).nonzero()[0, 0]] * x, "select takes single samples|IndexError"),
    "constants that are added to": (
        lambda x: torch.zeros(6, 4).to(x).index_add(0, (at := (x[:, 0] > 0).nonzero()[:, 0]), x[at]),
        "index_add mixes samples",
    ),
    "rows of a table": (lambda x: torch.eye(6, 4).index_select(0, torch.arange(len(x))), "index_select mixes samples"),
    "places of features": (lambda x: x[(x.T > 0).nonzero()[:, 0]], "nonzero mixes samples"),
    "a row of the whole batch for each sample": (
        lambda x: x + x.mean(0).expand_as(x),
        "value of the whole batch for each sample, with its gradient",
    ),
    "distances of constants": (lambda x: torch.cdist(TABLE, x), "mixes samples"),
    "histogram": (lambda x: torch.histc(x.detach()).sum() * x, "histc"),
    "covariance": (lambda x: torch.cov(x.T).sum() * x, "mixes|combines|over the samples"),
    "correlation of samples": (lambda x: torch.corrcoef(x).sum() * x, "mixes|combines|refused|with its gradient|over"),
    "eigenvalues of the batch": (lambda x: torch.linalg.svdvals(x).sum() * x, "svd"),
    "a hook on a tensor": (lambda x: _hooked(x * 2), "register_hook changes what the backward pass does"),
    "a gradient inside": (lambda x: torch.autograd.grad(x.sum(), x)[0], "gradients of its own"),
    "a custom function": (
        lambda x: Reversed.apply(x * 1),
        "Reversed, a custom autograd function|flip mixes samples",
    ),
    "an operator of another library": (torch.ops.memguard_tests.doubled, "memguard_tests::doubled mixes"),
    "a reduction in a checkpoint": (
        lambda x: checkpoint(lambda y: y / y.sum(), x, use_reentrant=False),
        "a reduction over samples inside of an activation checkpoint",
    ),
    "a batch's mean with its gradient": (lambda x: (x - x.mean(0)).exp(), "value of the whole batch for each sample"),
}


def _hooked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda grad: grad.clamp(-1, 1))
    return x


def by_function(function: Function) -> Callable[[nn.Module, Any], Any]:
    """A step that sums the squares of what a function makes of scaled samples, and returns it, too."""

    def step(module: nn.Module, batch: Any) -> Any:
        out = function(batch["x"] * module.scale)
        return out.square().sum(), out

    return step


def by_layer(function: Function) -> Callable[[nn.Module, Any], Any]:
    def step(module: nn.Module, batch: Any) -> Any:
        out = function(module, batch)
        return out.square().sum(), out

    return step


@pytest.mark.parametrize("function", ROWS.values(), ids=ROWS)
def test_what_treats_each_sample_by_itself_is_equal_in_parts(steps: Any, function: Function) -> None:
    """In values, joined sample by sample, and in gradients; in parts of four and two, and of one."""
    steps(Weighted).check(by_function(function), {"x": X}, 4, 1)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layers_that_treat_each_sample_by_itself_are_equal_in_parts(steps: Any, layer: Function) -> None:
    steps(Weighted).check(by_layer(layer), BATCH, 4)


# What is refused, and need not be. (`xfail` is strict: where one is done, its mark goes.)
NEEDLESS: dict[str, tuple[Function, str]] = {
    "rows that are written to": (
        lambda m, b: _written(b["x"] * m.scale, (b["classes"] == 2).nonzero()[:, 0]),
        "C++ drops the first dimension of what is written if it is one, so that the parts run different operators",
    ),
    "a norm over samples": (
        lambda m, b: F.normalize(b["x"] * m.scale, dim=0), "a value of the whole batch for each sample, with a gradient"
    ),
}  # fmt: skip


def _written(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[rows] = x[rows].exp()
    return out


@pytest.mark.parametrize(
    "layer",
    [pytest.param(layer, marks=pytest.mark.xfail(reason=why), id=name) for name, (layer, why) in NEEDLESS.items()],
)
def test_what_is_refused_and_need_not_be(steps: Any, layer: Function) -> None:
    steps(Weighted).check(by_layer(layer), BATCH, 4)


@pytest.mark.parametrize(
    "inside",
    [
        lambda x, module: (x @ module.matrix).relu(),
        lambda x, module: module.encoder(x[:, None])[:, 0],
        lambda x, module: F.dropout(x @ module.matrix, 0.3),
        lambda x, module: (x @ module.matrix).exp() * (x @ module.matrix * x.shape[0]).sin(),
    ],
    ids=["layers", "transformer", "dropout", "size"],
)
def test_code_in_activation_checkpoints_runs_again_as_it_did(steps: Any, inside: Function) -> None:
    def step(module: Any, batch: Any) -> Any:
        return checkpoint(inside, batch["x"], module, use_reentrant=False).square().mean()

    steps(Weighted).check(step, {"x": X}, 4)


def test_activation_checkpoints_in_parts_of_one_sample_are_refused(steps: Any) -> None:
    def step(module: Any, batch: Any) -> Any:
        return checkpoint(lambda x: (x @ module.matrix).relu(), batch["x"], use_reentrant=False).mean()

    assert "checkpoints in a part of one sample" in steps(Weighted).refusal(step, {"x": X}, 1)


@pytest.mark.parametrize(("function", "why"), REFUSED.values(), ids=REFUSED)
def test_what_mixes_samples_is_refused_by_name(steps: Any, function: Function, why: str) -> None:
    for most in (4, 1):
        reason = steps(Weighted).refusal(by_function(function), {"x": X}, most)
        assert any(each in reason for each in why.split("|")), reason


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a * b,
        lambda a, b: torch.where(a > 0, a, b),
        F.cosine_similarity,
        lambda a, b: torch.addmm(a, b, TABLE[:4]),
        lambda a, b: a.gather(1, (b > 0).long()),
        lambda a, b: TABLE[(a[:, 0] > 0).long(), (b[:, 0] > 0).long()],
        lambda a, b: b.narrow(0, 0, 1) + 0 * a.sum(),
    ],
    ids=["product", "where", "similarity", "addmm", "gather", "table", "first"],
)
def test_rows_are_aligned_only_if_each_part_has_as_many(steps: Any, function: Function) -> None:
    """The first three samples have none and one row, then two and one: a single row would be repeated."""
    first, second = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1, 0, 1]]).bool()
    batch = {"x": torch.cat([X, X[:2]]), "first": first, "second": second}

    def step(module: Any, batch: Any) -> Any:
        x = batch["x"] * module.scale
        return function(x[batch["first"]], x[batch["second"]]).square().sum()

    assert steps(Weighted).whole(step, batch).outputs["loss"] > 0
    reason = steps(Weighted).refusal(step, batch, 3)
    assert "combines different samples" in reason or "slice takes some of the samples" in reason


def test_an_error_of_a_part_is_a_refusal(steps: Any) -> None:
    """Also where it comes after a value of the whole batch that is not known in the first round."""

    def step(module: Any, batch: Any) -> Any:
        return ((batch["x"] - batch["x"].mean(0)) * module.scale * torch.ones(6, 1)).sum()

    assert "a part of its batch raises RuntimeError: The size of" in steps(Weighted).refusal(step, {"x": X})


def test_a_refusal_names_the_line(steps: Any) -> None:
    reason = steps(Weighted).refusal(lambda module, batch: (batch["x"].flip(0) * module.scale).sum(), {"x": X})
    assert "flip mixes samples (test_flow.py:" in reason
    assert 'batch["x"].flip(0)' in reason


def test_batch_norm_in_training_mode_is_refused_unless_asked_for(steps: Any) -> None:
    made, step = steps(Weighted), by_layer(lambda module, batch: module.batch_norm(batch["x"]))
    assert "batch norm in training mode" in made.refusal(step, BATCH)
    found = made.in_parts(step, BATCH, 4, lenient=True)
    assert found.changes == ("batch norm normalizes each part by its own statistics",)


# -- layouts


@pytest.mark.parametrize(
    ("function", "kind", "dim", "outer", "inner"),
    [
        (lambda x: x, "rows", 0, 1, 1),
        (lambda x: x.t(), "rows", 1, 1, 1),
        (lambda x: x.reshape(-1), "rows", 0, 1, 4),
        (lambda x: x.t().reshape(-1), "rows", 0, 4, 1),
        (lambda x: torch.cat([x, x]), "rows", 0, 2, 1),
        (lambda x: x.repeat_interleave(3, 0), "rows", 0, 1, 3),
        (lambda x: x[x[:, 0] > 0], "rows", 0, 1, 1),
        (lambda x: torch.arange(len(x)), "order", 0, 1, 1),
        (lambda x: x.sum(), "whole", 0, 1, 1),
        (lambda x: x.mean(0), "whole", 0, 1, 1),
        (lambda x: x.max(), "whole", 0, 1, 1),
        (lambda x: torch.ones(3), "constant", 0, 1, 1),
        (lambda x: torch.ones(len(x)), "rows", 0, 1, 1),
    ],
)
def test_it_is_known_how_the_samples_lie(
    steps: Any, function: Function, kind: str, dim: int, outer: int, inner: int
) -> None:
    seen = []

    def step(module: nn.Module, batch: Any) -> torch.Tensor:
        out = function(batch["x"])
        layout = getattr(out, "_memguard_layout", (None, None))[1]
        seen.append((layout.kind, layout.dim, layout.outer, layout.inner))
        return module.scale.sum()

    steps(Weighted).in_parts(step, {"x": X}, 4)
    assert set(seen) == {(kind, dim, outer, inner)}


# -- numbers, branches, random numbers, writes


def test_a_branch_on_a_value_of_the_whole_batch_is_the_same_in_each_part(steps: Any) -> None:
    """Samples 4 and 5 sum up to less than zero, all six to more."""
    x = torch.tensor([[9.0], [9.0], [9.0], [9.0], [-9.0], [-9.0]], dtype=torch.float64)

    def step(module: nn.Module, batch: Any) -> torch.Tensor:
        out = module(batch["x"])
        return out.square().mean() if batch["x"].sum().item() > 0 else out.exp().mean()

    steps(lambda: nn.Linear(1, 1)).check(step, {"x": x})


def test_numbers_that_follow_from_sizes_are_the_whole_batchs(steps: Any) -> None:
    def step(module: nn.Module, batch: Any) -> Any:
        out = module(batch["x"])
        rows, columns = out.shape
        scale = 1 / rows if out.size(0) > 5 and len(out) == 6 else 100.0
        return out.sum() * scale / out.numel() * int(f"{rows}"), {"rows": rows, "columns": columns}

    steps().check(step, {"x": X})


def test_dropout_masks_are_those_of_the_whole_batch(steps: Any) -> None:
    def module() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    steps(module).check(lambda net, batch: net(batch["x"]).square().mean(), {"x": X})


@pytest.mark.parametrize(
    "draw",
    [
        torch.rand_like,
        torch.randn_like,
        lambda x: torch.rand(x.shape[0], 1),
        lambda x: torch.randn(len(x), 4),
        lambda x: torch.rand(x.shape),
        lambda x: torch.empty_like(x).uniform_(),
        lambda x: torch.rand(4),
        lambda x: F.dropout(x, 0.3),
        lambda x: torch.randint(0, 9, (x.shape[0], 1)).double(),
    ],
)
def test_random_numbers_are_those_of_the_whole_batch(steps: Any, draw: Function) -> None:
    """Random numbers after the step are the same, too."""
    steps().check(lambda module, batch: (module(batch["x"]) * draw(batch["x"]).mean(-1, keepdim=True)).sum(), {"x": X})


def test_a_buffer_that_follows_values_of_the_whole_batch_is_written_once(steps: Any) -> None:
    def step(module: Any, batch: Any) -> Any:
        with torch.no_grad():
            module.running.mul_(0.9).add_(batch["x"].mean(0), alpha=0.1)
        return (batch["x"] * module.scale).sum(), module.running.clone()

    steps(Weighted).check(step, {"x": X})


def test_samples_written_into_a_buffer_are_refused(steps: Any) -> None:
    def step(module: Any, batch: Any) -> Any:
        with torch.no_grad():
            module.running[:2] = batch["x"][:, 0][:2]
        return (batch["x"] * module.scale).sum()

    assert "slice takes some of the samples" in steps(Weighted).refusal(step, {"x": X})


def test_a_tensor_that_differs_from_part_to_part_is_refused(steps: Any) -> None:
    made = [torch.tensor(float(n)) for n in range(99)]

    def step(module: Any, batch: Any) -> Any:
        return (batch["x"] * module.scale * made.pop()).sum()

    assert "differs from part to part" in steps(Weighted).refusal(step, {"x": X})


def test_a_part_that_runs_other_operators_is_refused(steps: Any) -> None:
    calls = []

    def step(module: Any, batch: Any) -> Any:
        calls.append(1)
        scaled = batch["x"] * module.scale
        return scaled.exp().sum() if len(calls) % 2 else scaled.tanh().sum()

    assert "depends on how many samples there are, or on their values" in steps(Weighted).refusal(step, {"x": X})


def test_a_hook_on_a_parameter_is_refused(steps: Any) -> None:
    class Hooked(Weighted):
        def __init__(self) -> None:
            super().__init__()
            self.scale.register_hook(lambda grad: grad.clamp(-1, 1))

    assert "`scale`" in steps(Hooked).refusal(by_function(torch.relu), {"x": X})


def test_a_loss_of_single_samples_is_refused(steps: Any) -> None:
    assert "the loss is that of single samples" in steps().refusal(lambda m, batch: m(batch["x"]), {"x": X})


def test_layouts_do_not_outlive_a_step(steps: Any) -> None:
    found = steps().in_parts(lambda m, batch: (m(batch["x"]).sum(), m(batch["x"])), {"x": X}, 4)
    assert get(found.outputs["more"], None) is None
    assert not hasattr(found.outputs["more"], "_memguard_layout")
