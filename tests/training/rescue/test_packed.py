"""Samples that are sorted, or packed, part by part: aligned with what is in the same order, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

Function = Callable[..., Any]

DRAWN = torch.Generator().manual_seed(3)
BATCH = {
    "x": torch.randn(6, 5, 4, dtype=torch.float64, generator=DRAWN),
    "lengths": torch.tensor([2, 5, 1, 3, 3, 4]),
    "tags": torch.randint(3, (6, 5), generator=DRAWN),
    "classes": torch.tensor([0, 2, 1, 1, 0, 2]),
    "ones": torch.tensor([1, 2, 1, 2, 1, 2]),
    "w": torch.rand(6, dtype=torch.float64, generator=DRAWN),
}
DESCENDING = {**BATCH, "lengths": torch.tensor([5, 4, 3, 3, 2, 1])}
LISTED = {**BATCH, "lengths": BATCH["lengths"].tolist()}


class Recurrent(nn.Module):
    def __init__(self, kind: Any = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 4))
        self.layer = kind(4, 3, **{"batch_first": True, **options})
        self.head = nn.Linear(6 if options.get("bidirectional") else 3, 3)


def pack(module: Any, batch: Any, lengths: Any = None, *, enforce_sorted: bool = False) -> PackedSequence:
    lengths = batch["lengths"] if lengths is None else lengths
    return pack_padded_sequence(batch["x"] * module.scale, lengths, batch_first=True, enforce_sorted=enforce_sorted)


def last_states(module: Any, batch: Any, **options: Any) -> Any:
    states = module.layer(pack(module, batch, **options))[1]
    states = states[0] if isinstance(states, tuple) else states
    return module.head(torch.cat(states.unbind(0)[-2:], 1) if module.layer.bidirectional else states[-1])


def by_class(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(out, batch["classes"])


def padded(module: Any, batch: Any, total_length: int | None = None) -> Any:
    """The mean over time depends on how long the longest sequence of the whole batch is."""
    out, lengths = pad_packed_sequence(module.layer(pack(module, batch))[0], True, total_length=total_length)
    return module.head(out).mean(1).square().sum(), (out, lengths)


def tokens(module: Any, batch: Any, **options: Any) -> Any:
    targets = pack_padded_sequence(batch["tags"], batch["lengths"], batch_first=True, enforce_sorted=False)
    return F.cross_entropy(module.head(module.layer(pack(module, batch))[0].data), targets.data, **options)


def given_states(module: Any, batch: Any) -> Any:
    state = batch["x"][None, :, 0, :3].contiguous()
    return by_class(module.head(module.layer(pack(module, batch), (state, state * 0.5))[1][1][-1]), batch)


def replaced(module: Any, batch: Any) -> Any:
    packed = pack(module, batch)
    packed = PackedSequence(packed.data.tanh(), packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    return by_class(module.head(module.layer(packed._replace(data=packed.data * 2))[1][0][-1]), batch)


def by_hand(module: Any, batch: Any) -> Any:
    lengths, order = batch["lengths"].sort(descending=True)
    packed = pack(module, {"x": batch["x"][order]}, lengths.tolist(), enforce_sorted=True)
    out, _ = pad_packed_sequence(module.layer(packed)[0], batch_first=True)
    inverse = torch.zeros_like(order)
    inverse[order] = torch.arange(len(order))
    back = torch.zeros_like(batch["x"][..., :3])
    back[order] = out
    return by_class(module.head(out[inverse].sum(1) + back.sum(1)), batch), out[order.argsort()]


def unpaired(module: Any, batch: Any) -> Any:
    lengths, order = batch["lengths"].sort(descending=True)
    packed = pack(module, {"x": batch["x"][order]}, lengths, enforce_sorted=True)
    return by_class(module.head(module.layer(packed)[1][0][-1]), batch)


def of_two_lengths(module: Any, batch: Any) -> Any:
    """Both have as many tokens, of other samples."""
    first, second = pack(module, batch, batch["ones"]), pack(module, batch, 3 - batch["ones"])
    return (first.data * second.data).sum()


def of_packed(function: Function) -> Function:
    """A step of a packed sequence's tensors."""
    return lambda module, batch: function(*pack(module, batch))


def of_weights(function: Function) -> Function:
    """A step of a number for each sample."""
    return lambda module, batch: function(batch["w"] * module.scale[0], batch)


def _seen_in_a_view(w: torch.Tensor) -> torch.Tensor:
    inverse = torch.zeros(len(w), dtype=torch.long)
    view = inverse.view(-1)
    inverse[torch.arange(len(w))] = torch.arange(len(w))
    return (view.to(w) * w).sum()


EQUAL: dict[str, tuple[Function, Any, dict[str, Any]]] = {
    "last states": (lambda m, b: by_class(last_states(m, b), b), BATCH, {}),
    "GRU": (lambda m, b: by_class(last_states(m, b), b), BATCH, {"kind": nn.GRU, "bidirectional": True}),
    "layers": (lambda m, b: by_class(last_states(m, b), b), BATCH, {"num_layers": 2, "bidirectional": True}),
    "RNN": (lambda m, b: by_class(last_states(m, b), b), BATCH, {"kind": nn.RNN}),
    "sorted": (lambda m, b: by_class(last_states(m, b, enforce_sorted=True), b), DESCENDING, {}),
    "lengths in the batch's list": (lambda m, b: by_class(last_states(m, b), b), LISTED, {}),
    "lengths as a list": (lambda m, b: by_class(last_states(m, b, lengths=b["lengths"].tolist()), b), BATCH, {}),
    "padded again": (padded, BATCH, {}),
    "padded to a length": (lambda m, b: padded(m, b, 7), BATCH, {"kind": nn.GRU}),
    "padded to the batch's": (lambda m, b: padded(m, b, b["x"].size(1)), BATCH, {"bidirectional": True}),
    "losses of tokens": (tokens, BATCH, {}),
    "weighted losses of tokens": (lambda m, b: tokens(m, b, weight=m.scale[1:].detach()), BATCH, {}),
    "masked in an order": (
        lambda m, b: (x := (b["x"] * m.scale)[b["w"].argsort()]).masked_fill(x > 0, 1.0).mean(), BATCH, {}
    ),
    "given states": (given_states, BATCH, {}),
    "replaced data": (replaced, BATCH, {}),
    "sorted by hand": (by_hand, BATCH, {}),
    "statistics of tokens": (
        lambda m, b: (out := m.layer(pack(m, b))[0].data).var(0).sum() + out.sum() / len(out) + out.amax(), BATCH, {}
    ),
    "sorted numbers": (of_weights(lambda w, _: w.sort(descending=True).values.square().mean()), BATCH, {}),
    "ranks that are undone": (
        of_weights(lambda w, b: (w[(o := w.argsort())].exp()[o.argsort()] * b["w"]).sum()), BATCH, {}
    ),
}  # fmt: skip
REFUSED: dict[str, tuple[Function, str]] = {
    "labels of another order": (unpaired, "nll_loss_forward combines samples in different orders"),
    "samples with sorted ones": (
        lambda m, b: (b["x"][pack(m, b).sorted_indices] * b["x"]).sum(), "mul combines samples in different orders"
    ),
    "sorted back the wrong way": (
        lambda m, b: m.layer(PackedSequence((p := pack(m, b))[0], p[1], p[3], p[2]))[1][0].sum(), "different orders"
    ),
    "packed by other lengths": (of_two_lengths, "mul combines samples in different orders"),
    "the first tokens": (of_packed(lambda data, *_: data[:3].sum()), "slice takes some of the samples"),
    "tokens that all parts have": (of_packed(lambda data, *_: data.narrow(0, 0, 1).sum()), "slice takes some of the"),
    "a sort into other tensors": (
        of_weights(lambda w, _: torch.sort(w.detach(), out=(torch.empty(0).to(w), torch.empty(0).long()))[0] @ w),
        "sort mixes samples",
    ),
    "a list that is compared": (lambda m, b: m.scale.sum() * (b["lengths"].tolist() == [2]), "reads entries of single"),
    "as many rows as tokens": (
        of_packed(lambda data, *_: data.detach().sum(0).expand(len(data), 4).sum() * data.sum()), "depends on how many"
    ),
    "places that are seen in a view": (of_weights(lambda w, _: _seen_in_a_view(w)), "places of samples were written"),
    "each first token": (of_packed(lambda data, sizes, *_: data[: int(sizes[0])].sum()), "takes some of the samples"),
    "sums of tokens so far": (of_packed(lambda data, *_: data.cumsum(0).exp().sum()), "cumsum mixes samples"),
    "a softmax over tokens": (of_packed(lambda data, *_: (data.softmax(0) * data).sum()), "softmax mixes samples"),
    "neighbors": (of_packed(lambda data, *_: data.diff(dim=0).square().sum()), "slice takes some of the samples"),
    "some tokens": (of_packed(lambda data, *_: data[data > 0].sum()), "takes some of the samples, in an order"),
    "dropout of tokens": (of_packed(lambda data, *_: F.dropout(data).sum()), "draws random numbers for each sample"),
    "how many go on": (of_packed(lambda data, sizes, *_: data.sum() / sizes.sum()), "sum takes how many samples"),
    "places as numbers": (of_packed(lambda data, _, at, __: data.sum() * at.sum()), "takes places of samples"),
    "one of them": (of_packed(lambda data, _, at, __: data.sum() * at[0]), "select takes places of samples"),
    "tokens that are returned": (of_packed(lambda data, *_: (data.sum(), data)), "in another order than the batch's"),
    "places that are returned": (of_weights(lambda w, _: (w.sum(), torch.arange(len(w)))), "returns places of samples"),
    "the largest": (of_weights(lambda w, _: w.sort().values[:3].sum()), "slice takes some of the samples"),
    "weights of ranks": (
        of_weights(lambda w, _: (w.sort().values * torch.linspace(0, 1, len(w))).sum()), "a row for each of them"
    ),
    "two that are sorted": (of_weights(lambda w, b: (w.sort()[0] * b["w"].sort()[0]).sum()), "different orders"),
    "random numbers": (
        of_weights(lambda w, _: ((s := w.sort()[0]) * torch.rand_like(s)).sum()), "rand_like draws random numbers"
    ),
    "some places": (of_weights(lambda w, _: w.sum() * torch.arange(len(w))[w > 0].sum()), "takes places of samples"),
    "no places": (of_weights(lambda w, _: w[torch.zeros_like(torch.arange(len(w)))].sum()), "index mixes samples"),
    "samples written over": (of_weights(lambda w, _: w.index_put((w.argsort(),), w).sum()), "index_put combines"),
    "a list that is sorted": (lambda m, b: m.scale.sum() * b["lengths"].tolist().sort(), "reads entries of single"),
    "a list that is read": (lambda m, b: m.scale.sum() * max(b["lengths"].tolist()), "reads entries of single samples"),
}  # fmt: skip


@pytest.mark.parametrize(("step", "batch", "options"), EQUAL.values(), ids=EQUAL)
def test_sorted_and_packed_samples_are_equal_in_parts(steps: Any, step: Function, batch: Any, options: Any) -> None:
    """In parts of four and two, of three, and of one."""
    steps(lambda: Recurrent(**options)).check(step, batch, 4, 3, 1)


@pytest.mark.parametrize(("step", "why"), REFUSED.values(), ids=REFUSED)
def test_what_mixes_sorted_or_packed_samples_is_refused(steps: Any, step: Function, why: str) -> None:
    for most in (4, 1):
        assert why in steps(Recurrent).refusal(step, BATCH, most)


def test_dropout_between_packed_layers_is_refused_unless_asked_for(steps: Any) -> None:
    made, step = steps(lambda: Recurrent(num_layers=2, dropout=0.3)), EQUAL["last states"][0]
    assert "lstm draws random numbers for each sample" in made.refusal(step, BATCH)
    assert made.in_parts(step, BATCH, 4, lenient=True).changes


def test_orders_that_are_one_in_some_parts_only_are_refused(steps: Any) -> None:
    """Both lengths are the same for the first four samples; what was packed by them may not be combined."""
    other = torch.where(torch.arange(6) < 4, BATCH["lengths"], 6 - BATCH["lengths"])

    def step(module: Any, batch: Any) -> Any:
        return (pack(module, batch).data.sum(0) * pack(module, batch, batch["other"]).data.sum(0)).sum()

    assert "sorts in another way in other parts" in steps(Recurrent).refusal(step, {**BATCH, "other": other})
