"""A pattern: one way to train in PyTorch, as a real library or a real project does it, small enough for a CPU.

Most patterns are rows: a name, a library, two batch sizes, what is imported, a function of that which builds the
network, data, and how the loss follows. Where the library has more of its own, a function returns a `Run`. Nothing is
downloaded: weights and data are random, the structure is the library's own.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

PATTERNS: dict[str, "Pattern"] = {}
POOL = 64  # samples that a dataset owns; it returns them over and over


@dataclass(frozen=True)
class Run:
    """Everything that a Trainer needs: the module, built where it is measured, and its data, made before."""

    build: Callable[[], pl.LightningModule]
    data: Callable[[int, int], Any]  # batch size, number of batches -> loader or datamodule
    trainer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pattern:
    name: str
    library: str  # the distribution; "torch" for our own code
    make: Callable[[], Run]
    sizes: tuple[int, int]
    steps: int


def add(name: str, library: str, sizes: tuple[int, int], make: Callable[[], Run], steps: int = 3) -> None:
    assert name not in PATTERNS, name
    PATTERNS[name] = Pattern(name, library, make, sizes, steps)


def of(path: str) -> Any:
    """A name of a library that is only imported where it is used: `package.module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name) if name else importlib.import_module(module)


# Data ----------------------------------------------------------------------------------------------------------------


class Samples(Dataset):
    """A dataset of any length that owns a few samples."""

    def __init__(self, samples: Sequence[Any], length: int) -> None:
        self.samples = samples
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


def data(
    sample: Callable[[int], Any], collate: Callable[[list[Any]], Any] | None = None, **options: Any
) -> Callable[[int, int], DataLoader]:
    """Batches of samples, each made once by its number."""
    samples = [sample(index) for index in range(POOL)]
    return lambda batch_size, batches: DataLoader(
        Samples(samples, batch_size * batches), batch_size=batch_size, collate_fn=collate, **options
    )


def noise(*shapes: tuple[int, ...]) -> Callable[[int, int], DataLoader]:
    return data(lambda _: tuple(torch.randn(shape) for shape in shapes))


def classed(*shape: int, classes: int = 10) -> Callable[[int, int], DataLoader]:
    """A random tensor, and its class."""
    return data(lambda i: (torch.randn(shape), i % classes))


def images(side: int) -> Callable[[int, int], DataLoader]:
    return classed(3, side, side)


def tokens(length: int, vocabulary: int = 500) -> Callable[[int, int], DataLoader]:
    """Tokens and the next tokens."""
    return data(lambda _: (torch.randint(vocabulary, (length,)), torch.randint(vocabulary, (length,))))


def dictionary(**columns: Callable[[int], Any]) -> Callable[[int, int], DataLoader]:
    return data(lambda i: {name: column(i) for name, column in columns.items()})


# Modules -------------------------------------------------------------------------------------------------------------

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Any]
Loss = Callable[[nn.Module, Any], Tensor]


adam, adamw = (partial(cls, lr=1e-4) for cls in (torch.optim.Adam, torch.optim.AdamW))
sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


class Step(pl.LightningModule):
    """A network and how its loss follows from a batch: what most LightningModules are."""

    def __init__(self, network: nn.Module, loss: Loss, optimizer: MakeOptimizer = adam) -> None:
        super().__init__()
        self.network = network
        self.loss = loss
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.network, batch)

    def configure_optimizers(self) -> Any:
        return self.optimizer([p for p in self.parameters() if p.requires_grad])


def classify(network: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(network(x), y)


def regress(network: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(network(x), y)


def next_token(network: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(network(x).flatten(0, 1), y.flatten())


def row(
    name: str,
    library: str,
    sizes: tuple[int, int],
    imports: str,
    network: Callable[..., Any],
    samples: Callable[[], Any],
    loss: Loss = classify,
    optimizer: MakeOptimizer = adam,
    steps: int = 3,
    **trainer: Any,
) -> None:
    """A pattern. From what is imported before, `network` makes a network, one with its loss, or a LightningModule."""

    def make() -> Run:
        known, made = [of(path) for path in imports.split()], samples()

        def build() -> pl.LightningModule:
            found = network(*known)
            if hasattr(found, "training_step"):
                return found
            return Step(*found, optimizer) if isinstance(found, tuple) else Step(found, loss, optimizer)

        return Run(build, made, trainer)

    add(name, library, sizes, make, steps)


def pattern(*given: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A row whose network is a function; its name is the pattern's."""

    def register(network: Callable[..., Any]) -> Callable[..., Any]:
        library, sizes, imports, *rest = given
        row(network.__name__, library, sizes, imports, network, *rest, **options)
        return network

    return register


class Net(nn.Module):
    """Modules, and a function of them and of the batch."""

    def __init__(self, compute: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *batch: Any) -> Any:
        return self.compute(self, *batch)


def mlp(features: int = 64, width: int = 256, outputs: int = 10, depth: int = 2) -> nn.Sequential:
    sizes = [features, *[width] * depth]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, outputs))
