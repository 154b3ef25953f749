"""Trainings that leave memory behind, as users' do: each marks the line that keeps it, and names the attribute."""

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import CatMetric

BATCH, WIDTH, BATCHES = 256, 512, 32  # 512 KiB of hidden values a batch, 16 MiB an epoch
EVERYTHING: list[Tensor] = []


@dataclass(frozen=True)
class Leak:
    name: str
    attribute: str
    module: type[pl.LightningModule]
    dataset: Callable[[], Dataset[Any]] | None = None
    callback: type[pl.Callback] | None = None
    validates: bool = False


def random_data() -> TensorDataset:
    return TensorDataset(torch.rand(BATCH * BATCHES, WIDTH), torch.randint(0, 10, (BATCH * BATCHES,)))


def loader(dataset: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=BATCH)


class Plain(pl.LightningModule):
    """A training that keeps nothing; the others override `keep`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.losses, self.outputs, self.features, self.arrays, self.words = [], [], [], [], []
        self.history, self.logs = {}, defaultdict(list)
        self.collected = torch.empty(0, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.first(batch[0]).relu()
        self.keep(batch[0], hidden)
        return nn.functional.cross_entropy(self.last(hidden), batch[1])

    def keep(self, x: Tensor, hidden: Tensor) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class LossWithGraph(Plain):
    def keep(self, x, hidden):
        extra = self.first(x).exp().mean()
        self.losses.append(extra)  # kept


class OutputsInList(Plain):
    def keep(self, x, hidden):
        self.outputs.append(hidden.detach())  # kept


class OutputsWithGraph(Plain):
    def keep(self, x, hidden):
        self.outputs.append({"hidden": hidden, "mean": hidden.mean()})  # kept


class DictOfTensors(Plain):
    def keep(self, x, hidden):
        self.history[self.global_step] = hidden.detach()  # kept


class ListsInDict(Plain):
    def keep(self, x, hidden):
        self.logs["hidden"].append(hidden.detach())  # kept


class Concatenated(Plain):
    def keep(self, x, hidden):
        self.collected = torch.cat([self.collected, hidden.detach()])  # kept


class ClosureOfHook(Plain):
    def __init__(self):
        super().__init__()
        inputs_seen = []

        def remember(module, args, output):
            inputs_seen.append(args[0])  # kept

        self.last.register_forward_hook(remember)


class HookKeepsBatch(Plain):
    def __init__(self):
        super().__init__()
        self.first.register_forward_hook(lambda module, args, output: self.features.append(args[0]))  # kept


class Tracker:
    def __init__(self):
        self.values = []

    def update(self, value):
        self.values.append(value)  # kept


class OwnMetric(Plain):
    def __init__(self):
        super().__init__()
        self.tracker = Tracker()

    def keep(self, x, hidden):
        self.tracker.update(hidden.detach())


class NeverReset(Plain):
    def __init__(self):
        super().__init__()
        self.all_hidden = CatMetric()

    def keep(self, x, hidden):
        self.all_hidden.update(hidden.detach())  # kept


class NumpyCopies(Plain):
    def keep(self, x, hidden):
        self.arrays.append(hidden.detach().numpy().copy())  # kept


class PythonText(Plain):
    def keep(self, x, hidden):
        self.words.append(f"{hidden.mean().item():.6f}" * 65536)  # kept


class GlobalList(Plain):
    def keep(self, x, hidden):
        EVERYTHING.append(hidden.detach())  # kept


class ClassAttribute(Plain):
    shared_by_all: ClassVar[list[Tensor]] = []

    def keep(self, x, hidden):
        self.shared_by_all.append(hidden.detach())  # kept


class EachEpoch(Plain):
    def on_train_epoch_end(self):
        self.outputs.append(torch.ones(4 << 20))  # kept


class EachValidation(Plain):
    def validation_step(self, batch, batch_idx):
        self.outputs.append(self.first(batch[0]))  # kept


class KeepsBatches(pl.Callback):
    def __init__(self):
        self.batches = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(batch)  # kept


class Augmented(Dataset):
    """Keeps a new sample at each reading, as augmentations that are cached do."""

    def __init__(self):
        self.data, self.made = random_data(), []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        self.made.append(x + 1)  # kept
        return self.made[-1], y


class CachedByReading(Augmented):
    def __init__(self):
        super().__init__()
        self.cache, self.reads = {}, 0

    def __getitem__(self, index):
        self.reads += 1
        self.cache[self.reads, index] = self.data[index][0].numpy() * 2.0  # kept
        return self.cache[self.reads, index], self.data[index][1]


@functools.cache
def load_sample(reading: int) -> Tensor:  # kept
    return torch.ones(WIDTH) * reading


class CachedFunction(Augmented):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return load_sample(self.reads), self.data[index][1]


LEAKS = (
    Leak("loss with its graph", "self.losses", LossWithGraph),
    Leak("outputs in a list", "self.outputs", OutputsInList),
    Leak("outputs with their graph", "self.outputs", OutputsWithGraph),
    Leak("dict of tensors", "self.history", DictOfTensors),
    Leak("lists in a dict", "self.logs", ListsInDict),
    Leak("concatenated tensors", "self.collected", Concatenated),
    Leak("closure of a hook", "inputs_seen", ClosureOfHook),
    Leak("hook that keeps inputs", "self.features", HookKeepsBatch),
    Leak("metric of one's own", "self.tracker.values", OwnMetric),
    Leak("metric that is never reset", "self.all_hidden", NeverReset),
    Leak("numpy copies", "self.arrays", NumpyCopies),
    Leak("text", "self.words", PythonText),
    Leak("global list", "EVERYTHING", GlobalList),
    Leak("class attribute", "self.shared_by_all", ClassAttribute),
    Leak("each epoch", "self.outputs", EachEpoch),
    Leak("each validation", "self.outputs", EachValidation, validates=True),
    Leak("callback", "KeepsBatches.batches", Plain, callback=KeepsBatches),
    Leak("dataset: list", "Augmented.made", Plain, Augmented),
    Leak("dataset: dict of arrays", "CachedByReading.cache", Plain, CachedByReading),
    Leak("dataset: cached function", "load_sample()", Plain, CachedFunction),
)
