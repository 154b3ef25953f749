"""A hook that makes loaders at a batch size of its own, later in a run, has decided that: they keep it."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from tests.training.quiet import quiet_trainer

pytestmark = pytest.mark.usefixtures("taped")

EPOCHS = 3


class Grows(pl.LightningModule):
    """Larger pictures and smaller batches from epoch to epoch, as in progressive resizing."""

    def __init__(
        self, sizes: tuple[int, ...] = (8, 4, 2), pixels: tuple[int, ...] = (8, 16, 32), samples: int = 96
    ) -> None:
        super().__init__()
        self.samples = samples
        self.sizes, self.pixels = sizes, pixels
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        self.seen: list[int] = []

    @property
    def epoch(self) -> int:
        return min(self.trainer.current_epoch, EPOCHS - 1)

    def train_dataloader(self) -> Any:
        pixels = self.pixels[self.epoch]
        return DataLoader(TensorDataset(torch.rand(self.samples, 3, pixels, pixels)), self.sizes[self.epoch])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if index == 0:
            self.seen.append(len(batch[0]))
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Follows(Grows):
    """Loaders at the size that the module is set to, for half of it in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 8

    def train_dataloader(self) -> Any:
        size = 2 * self.batch_size if self.epoch < 2 else self.batch_size // 2
        return DataLoader(TensorDataset(torch.rand(192, 3, 8, 8)), size)


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 8

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.rand(96, 3, 8, 8)), self.batch_size)


class Curriculum(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.datamodule.batch_size = 6


def fit(module: Any, guard: MemGuard, data: Any = None, *more: Any) -> pl.Trainer:
    trainer: pl.Trainer = quiet_trainer(guard, *more, max_epochs=EPOCHS, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, datamodule=data)
    return trainer


def grown(most: int) -> MemGuard:
    return MemGuard(batch_size="largest", min_steps_per_epoch=None, max_batch_size=most)


@pytest.mark.filterwarnings("ignore:MemGuard")
def test_progressive_resizing_keeps_its_sizes() -> None:
    guard, module = grown(24), Grows()
    fit(module, guard)
    assert guard.decision.batch_size == 24
    assert module.seen == [24, 4, 2]
    assert [record.batch_size for record in guard.records] == [24, 4, 2]
    assert [record.predicted.batch_size for record in guard.records] == [24, 4, 2]


@pytest.mark.filterwarnings("ignore:MemGuard")
def test_a_size_that_comes_back_is_the_decided_one_again() -> None:
    module = Grows(sizes=(8, 4, 8), pixels=(8, 8, 8))
    fit(module, grown(24))
    assert module.seen == [24, 4, 24]


@pytest.mark.filterwarnings("ignore:MemGuard")
def test_a_size_that_is_set_between_epochs_is_kept() -> None:
    module, data = Grows(), Data()
    fit(module, grown(24), data, Curriculum())
    assert module.seen == [24, 6, 6]
    assert data.batch_size == 6


@pytest.mark.filterwarnings("ignore:MemGuard")
def test_a_loader_that_follows_the_size_of_its_module_is_as_decided() -> None:
    module = Follows()
    fit(module, grown(48))
    assert module.seen == [48, 48, 24]  # the module's size is 48: half of it is the hook's own wish


@pytest.mark.filterwarnings("ignore:MemGuard")
def test_gradients_are_not_accumulated_over_smaller_batches_of_its_own() -> None:
    steps = list[int]()

    class Count(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            steps.append(trainer.global_step)

    module = Grows(sizes=(480, 4, 4), pixels=(8, 8, 8), samples=480)
    guard = MemGuard(budget="200KiB", margin=0.0)
    fit(module, guard, None, Count())
    pieces = guard.decision.accumulate_grad_batches
    assert guard.decision.requested_batch_size == 480
    assert pieces > 1
    assert module.seen == [480 // pieces, 4, 4]
    assert steps == [1, 1 + 120, 1 + 240]
