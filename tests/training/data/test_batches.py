"""Kinds of batches that people train on: the size is chosen and trained, and its memory was predicted.

How a batch is put together is tested in tests/core/batch; here, one of each way to capture and to scale it.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, default_collate

from lightning_memguard import MemGuard
from lightning_memguard.core.isolation.pool import Children
from tests.long import long_but
from tests.profiled import measured_peak
from tests.training.quiet import quiet_trainer

FEATURES, WIDTH, CLASSES, STEPS, NODES = 32, 64, 4, 4, 5
SAMPLES, CHOSEN = 48, 24


# The batches


class Store(Mapping):
    """A mapping that is not a dict, with a number next to what it maps."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.mapping = tensors
        self.num_graphs = int(tensors["batch"].max()) + 1 if "batch" in tensors else 1

    def __getitem__(self, name: str) -> Any:
        return self.mapping[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.mapping)

    def __len__(self) -> int:
        return len(self.mapping)


class Graphs:
    """As torch_geometric's Batch: tensors in a store, called to iterate, the number of graphs kept."""

    def __init__(self, **tensors: Any) -> None:
        self._store = Store(tensors)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._store[name]

    def __call__(self, *names: str) -> Iterator[Any]:
        yield from (self._store[name] for name in names)

    @property
    def num_graphs(self) -> int:
        return self._store.num_graphs

    def to(self, device: Any, **how: Any) -> Graphs:
        self._store.mapping = {name: value.to(device, **how) for name, value in self._store.items()}
        return self


def collate_graphs(graphs: list[Graphs]) -> Graphs:
    firsts = torch.tensor([0, *(len(graph.x) for graph in graphs)]).cumsum(0)
    return Graphs(
        x=torch.cat([graph.x for graph in graphs]),
        edge_index=torch.cat([g.edge_index + first for g, first in zip(graphs, firsts, strict=False)], dim=1),
        y=torch.cat([graph.y for graph in graphs]),
        batch=torch.repeat_interleave(torch.tensor([len(graph.x) for graph in graphs])),
        ptr=firsts,
    )


class Boxed:
    """An object whose tensors are deeper than its attributes."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.fields = {"x": [x]}
        self.label = deque([y])


# The models


class Step(pl.LightningModule):
    """A network and a loss of its output; each kind of batch brings both."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def rnn(kind: Any, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return nn.ModuleDict({"rnn": kind(FEATURES, WIDTH, **options), "head": nn.Linear(WIDTH, CLASSES)})

    return make


def of(read: Callable[[Any], tuple[Any, Any]]) -> Callable[[Any, Any], torch.Tensor]:
    """The loss of a batch in which ``read`` finds features and classes."""

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        x, y = read(batch)
        return nn.functional.cross_entropy(net(x), y)

    return loss


def of_packed(net: Any, batch: Any) -> torch.Tensor:
    packed, y = batch
    out, _ = net["rnn"](packed)
    padded, lengths = pad_packed_sequence(out, batch_first=True)
    assert len(lengths) == len(y)
    return nn.functional.cross_entropy(net["head"](padded.mean(1)), y)


def of_padded(*, batch_first: bool) -> Callable[[Any, Any], torch.Tensor]:
    def loss(net: Any, batch: Any) -> torch.Tensor:
        x, lengths, y = batch
        out, _ = net["rnn"](pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=False))
        padded, _ = pad_packed_sequence(out, batch_first=batch_first)
        return nn.functional.cross_entropy(net["head"](padded.mean(int(batch_first))), y)

    return loss


def of_graphs(net: Any, graphs: Graphs) -> torch.Tensor:
    source, target = graphs.edge_index
    count = int(graphs.batch.max()) + 1
    sent = torch.zeros_like(graphs.x).index_add(0, target, graphs.x[source])
    pooled = torch.zeros(count, FEATURES, device=graphs.x.device).index_add(0, graphs.batch, graphs.x + sent)
    return nn.functional.cross_entropy(net(pooled), graphs.y)


# The kinds


def x_and_y(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(FEATURES), torch.tensor(index % CLASSES)


def sequence(index: int, steps: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(steps or STEPS, FEATURES), torch.tensor(index % CLASSES)


def unequal(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return sequence(index, STEPS - index % 3)


def graph(index: int) -> Graphs:
    edges = torch.randint(0, NODES, (2, 3 * NODES))
    return Graphs(x=torch.randn(NODES, FEATURES), edge_index=edges, y=torch.tensor([index % CLASSES]))


def stacked(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def packed(samples: list[Any]) -> tuple[PackedSequence, torch.Tensor]:
    return pack_sequence([x for x, _ in samples], enforce_sorted=False), torch.stack([y for _, y in samples])


def padded(*, batch_first: bool) -> Callable[[list[Any]], Any]:
    def collate(samples: list[Any]) -> Any:
        x = pad_sequence([x for x, _ in samples], batch_first=batch_first)
        return x, torch.tensor([len(x) for x, _ in samples]), torch.stack([y for _, y in samples])

    return collate


def mixed(samples: list[Any]) -> dict[str, Any]:
    x, y = stacked(samples)
    return {
        "x": x,
        "y": y,
        "name": "training",
        "captions": [f"sample {place}" for place in range(len(samples))],
        "nothing": None,
        "count": len(samples),
        "weights": [0.5] * len(samples),
        "flag": True,
    }


def of_mixed(net: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    assert (batch["name"], batch["nothing"], batch["flag"]) == ("training", None, True)
    assert len(batch["captions"]) == len(batch["weights"]) == batch["count"] == len(batch["x"])
    losses = nn.functional.cross_entropy(net(batch["x"]), batch["y"], reduction="none")
    return (losses * torch.tensor(batch["weights"], device=losses.device)).sum() / batch["count"]


def tokens(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets are views of one tensor, as language models have them."""
    together = torch.stack(samples)
    return together[:, :-1], together[:, 1:]


@dataclass(frozen=True)
class Kind:
    """A dataset's samples, how they are collated, a network, its loss, and the method that must work."""

    sample: Callable[[int], Any]
    collate: Callable[[list[Any]], Any]
    loss: Callable[[Any, Any], torch.Tensor]
    net: Callable[[], nn.Module] = mlp
    method: str = "fake"


def flat(collate: Callable[[list[Any]], Any], read: Callable[[Any], Any]) -> Kind:
    return Kind(x_and_y, collate, of(read))


def nested(layout: torch.layout) -> Callable[[list[Any]], Any]:
    return lambda samples: (
        torch.nested.nested_tensor([x for x, _ in samples], layout=layout),
        torch.stack([y for _, y in samples]),
    )


def of_nested(net: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(torch.nested.to_padded_tensor(net(batch[0]), 0.0).mean(1), batch[1])


KINDS = {
    "jagged": Kind(sequence, nested(torch.jagged), of_nested, method="real"),
    "a nested dict": flat(
        lambda s: {"in": {"x": stacked(s)[0]}, "out": [{"y": stacked(s)[1]}]},
        lambda b: (b["in"]["x"], b["out"][0]["y"]),
    ),
    "an object with nested tensors": flat(
        lambda samples: Boxed(*stacked(samples)), lambda b: (b.fields["x"][0], b.label[0])
    ),
    "with text, numbers and None": Kind(x_and_y, mixed, of_mixed),
    "views of one tensor": Kind(
        lambda i: torch.randint(0, CLASSES, (400,)),
        tokens,
        lambda net, b: nn.functional.cross_entropy(net(b[0]).mT, b[1]),
        lambda: nn.Sequential(nn.Embedding(CLASSES, 2), nn.Linear(2, CLASSES)),
    ),
    "time first, transposed": Kind(
        sequence,
        lambda s: (stacked(s)[0].transpose(0, 1), stacked(s)[1]),
        lambda net, b: nn.functional.cross_entropy(net["head"](net["rnn"](b[0])[0].mean(0)), b[1]),
        rnn(nn.LSTM),
    ),
    "graphs counted by value": Kind(graph, collate_graphs, of_graphs),
    "packed, LSTM": Kind(sequence, packed, of_packed, rnn(nn.LSTM)),
    "packed in the step, GRU": Kind(
        sequence, padded(batch_first=False), of_padded(batch_first=False), rnn(nn.GRU), "worst-case"
    ),
    "packed in the step, unequal lengths": Kind(
        unequal, padded(batch_first=True), of_padded(batch_first=True), rnn(nn.RNN, batch_first=True), "sampled"
    ),
}

# A dict and an object are among the others too, and tests/core/batch has them deeper.
QUICK = [name for name in KINDS if name not in ("a nested dict", "an object with nested tensors")]
TUPLE = flat(default_collate, tuple)


class Collating:
    """Collates, and remembers how many samples each batch had."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate
        self.counts: list[int] = []

    def __call__(self, samples: list[Any]) -> Any:
        self.counts.append(len(samples))
        return self.collate(samples)


def fit(kind: Kind, batch_size: int, *callbacks: pl.Callback, **options: Any) -> Collating:
    """Train for an epoch, guarded or not."""
    torch.manual_seed(0)
    data = [kind.sample(index) for index in range(options.pop("samples", SAMPLES))]
    module = options.pop("module", Step)(kind.net(), kind.loss)
    collate = Collating(kind.collate)
    trainer = quiet_trainer(*callbacks)
    loader = DataLoader(data, batch_size=batch_size, collate_fn=collate)
    if "datamodule" in options:
        trainer.fit(module, datamodule=options["datamodule"](loader))
    else:
        trainer.fit(module, train_dataloaders=loader)
    return collate


def guarded(kind: Kind, **options: Any) -> tuple[Any, Collating]:
    guard = MemGuard(batch_size="largest", budget="1GiB", max_batch_size=CHOSEN)
    collate = fit(kind, 4, guard, **options)
    return guard.decision, collate


def test_operators_that_collate_on_many_threads_do_not_stop_a_child(monkeypatch):
    """Python's fork takes none of OpenMP's threads along, and OpenMP waits for them."""
    answers, result = [], Children.answer
    monkeypatch.setattr(Children, "answer", lambda *asked: answers.append(result(*asked)) or answers[-1])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        guarded(KINDS["graphs counted by value"])
    finally:
        torch.set_num_threads(before)
    assert answers
    assert not any(answer.lost for answer in answers)


# Predicted and measured


# The peak is exact to the byte; what a real training adds to it at most is a scalar or two of the Trainer's own.
EXACT = (
    *("jagged", "with text, numbers and None", "views of one tensor", "time first, transposed"),
    *("graphs counted by value", "packed, LSTM"),
)


def measured(kind: Kind, batch_size: int, **options: Any) -> int:
    """All samples as large as the first, and made before the profile begins: they are not a part of the training."""
    torch.manual_seed(0)
    samples = [kind.sample(0) for _ in range(SAMPLES)]
    gc.collect()
    return measured_peak(lambda: fit(replace(kind, sample=samples.__getitem__), batch_size, **options))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", long_but(QUICK, KINDS))
def test_the_size_is_chosen_and_trained_and_the_prediction_is_what_the_profiler_sees(name):
    decision, collate = guarded(KINDS[name])
    assert (decision.outcome, decision.batch_size) == ("tuned", CHOSEN), decision.reason
    assert collate.counts[-2:] == [CHOSEN, CHOSEN]
    assert decision.footprint.method == KINDS[name].method, decision.footprint.notes
    if name in EXACT:
        assert decision.footprint.peak_allocated_bytes == pytest.approx(measured(KINDS[name], CHOSEN), rel=1e-3)


# Hooks that change a batch on its way


def upsampled(batch: Any) -> Any:
    x, y = batch
    return x.repeat_interleave(8, dim=0), y.repeat_interleave(8, dim=0)


def doubled(batch: Any) -> Any:
    x, y = batch
    return torch.cat([x, x]).double().float(), torch.cat([y, y])


class Hooks:
    """Each hook makes the batch larger in its own way; modules and datamodules have the same hooks."""

    class Before:
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return upsampled(batch)

    class Transfer:
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return tuple(tensor.to(device) for tensor in upsampled(batch))

    class After:
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return doubled(upsampled(batch))


class Loading(pl.LightningDataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader


def hooked(hook: type, owner: str) -> dict[str, Any]:
    """Options of a fit in which the module or the datamodule has the hook."""
    if owner == "module":
        return {"module": type("HookedStep", (hook, Step), {})}
    return {"datamodule": type("HookedLoading", (hook, Loading), {})}


@pytest.fixture(scope="module")
def plain_bytes() -> int:
    return guarded(TUPLE)[0].footprint.peak_allocated_bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("hook", "owner"),
    [(Hooks.Before, "datamodule"), (Hooks.Transfer, "module"), (Hooks.After, "datamodule")],
)
def test_a_hook_that_changes_the_batch_counts(hook, owner, plain_bytes):
    options = hooked(hook, owner)
    decision, collate = guarded(TUPLE, **options)
    assert (decision.outcome, decision.batch_size, collate.counts[-1]) == ("tuned", CHOSEN, CHOSEN), decision.reason
    assert decision.footprint.peak_allocated_bytes > 2 * plain_bytes
    peak = measured(TUPLE, CHOSEN, **options)
    assert decision.footprint.peak_allocated_bytes == pytest.approx(peak, rel=1e-3)


# Batches whose sizes a sampler sets: 4,096 tokens each, or as many bytes


class Texts(pl.LightningModule):
    """Attention takes samples x length^2, a contrastive loss samples^2."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.embedding, self.head, self.of = nn.Embedding(100, 16), nn.Linear(16, 16), of

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.head(self.embedding(batch["ids"] if isinstance(batch, dict) else batch))
        if self.of == "attention":
            return (torch.softmax(x @ x.transpose(1, 2), -1) @ x).square().mean()
        z = x.mean(1)
        return (z @ z.T).exp().logsumexp(1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


BUCKETS = [(512, 8), (64, 64), (8, 512), (64, 64)]


class Feed:
    """A loader that is not torch's."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        self.batches = [torch.zeros(size, dtype=torch.long) for size in sizes]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.batches)


MADE: dict[str, Callable[[list[tuple[int, int]]], Any]] = {
    "a batch sampler": lambda sizes: DataLoader(
        [torch.zeros(length, dtype=torch.long) for count, length in sizes for _ in range(count)],  # type: ignore[arg-type]
        batch_sampler=[
            [*range(sum(n for n, _ in sizes[:place]), sum(n for n, _ in sizes[: place + 1]))]
            for place in range(len(sizes))
        ],
    ),
    "a stream of batches": lambda sizes: DataLoader(
        [torch.zeros(size, dtype=torch.long) for size in sizes],  # type: ignore[arg-type]
        batch_size=None,
    ),
    "two loaders": lambda sizes: {"ids": Feed(sizes), "others": Feed(sizes)},
}


def fit_texts(of: str, loader: Any, *callbacks: pl.Callback) -> list[str]:
    trainer = quiet_trainer(*callbacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Texts(of), loader)
    return [str(each.message) for each in caught if "batch" in str(each.message)]


@pytest.mark.parametrize(
    ("made", "of", "largest"),
    [
        ("a batch sampler", "attention", "8 x 512"),
        ("a stream of batches", "contrast", "512 x 8"),
        ("two loaders", "attention", "8 x 512"),
    ],
)
def test_of_batches_of_equal_bytes_the_one_that_takes_the_most_is_predicted(made, of, largest, caplog):
    caplog.set_level(logging.DEBUG, "lightning_memguard")  # with the table
    guard, loader = MemGuard(batch_size="largest", budget="1GiB"), MADE[made](BUCKETS)
    said = fit_texts(of, loader, guard)
    footprint = guard.decision.footprint
    assert footprint.batch == largest
    gc.collect()
    measured = measured_peak(lambda: fit_texts(of, loader))
    kept = 4 * 8 * 64 * 64  # batches that the data keeps: they are not a part of what is measured
    assert measured <= footprint.peak_allocated_bytes <= measured + kept
    assert not [text for text in said if "larger than" in text]
    assert f"Predicted for a batch of {largest}" in caplog.text
    assert "predicted for the largest of 4 batches drawn." in " ".join(caplog.text.split())


def test_one_that_takes_more_than_those_drawn_is_announced_once_and_no_batch_size_is_advised():
    """The batch has as many bytes as the others, in a stream of which the first 16 batches are drawn."""
    sizes = [(64, 64)] * 20 + [(20, 100)] + [(8, 512)] * 3
    guard = MemGuard(batch_size="largest", budget=6 << 20, margin=0.0)
    (text,) = [text for text in fit_texts("attention", Feed(sizes), guard) if "larger than" in text]
    assert text.startswith("MemGuard: Training batch 21 has [8, 512], larger than the [64, 64] of the prediction.")
    guard = MemGuard(batch_size="largest", budget=1 << 20, offload="never")
    said = " ".join(fit_texts("attention", MADE["a stream of batches"](sizes), guard))
    assert "the largest of the batches drawn (8 x 512) does NOT fit" in said
    assert "Lower the sampler's token budget or bucket width" in said
    assert "max_batch_size" not in said


# Batches that cannot be predicted


@pytest.mark.filterwarnings("ignore")
def test_what_depends_on_values_is_refused_with_a_reason_and_trains_unchanged():
    decision, collate = guarded(Kind(unequal, nested(torch.strided), of_nested))
    assert (decision.outcome, decision.footprint.method) == ("kept", "states")
    assert "a nested tensor: its bytes depend on how long" in decision.footprint.notes[0]
    assert collate.counts[-2:] == [4, 4]


@pytest.mark.filterwarnings("ignore")
def test_a_batch_of_arrays_alone_is_left_alone():
    kind = Kind(
        x_and_y,
        lambda s: {"x": np.stack([x.numpy() for x, _ in s])},
        lambda net, b: net(torch.from_numpy(b["x"])).mean(),
    )
    decision, collate = guarded(kind)
    assert decision.outcome == "stepped aside"
    assert "no tensor to size it by" in decision.reason
    assert collate.counts[-1] == 4
