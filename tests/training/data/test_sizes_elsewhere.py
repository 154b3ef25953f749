"""A number that equals the batch size, does not follow it and is read in a step keeps the batch size."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_memguard.training.data.sizes_elsewhere import held_elsewhere

pytestmark = pytest.mark.usefixtures("taped")

BATCH_SIZE = 64


class Sampler:
    def __init__(self, sample_size: int) -> None:
        self.sample_size = sample_size

    def draw(self) -> torch.Tensor:
        return torch.rand(self.sample_size, 4)


class Unread:
    def __init__(self, sample_size: int) -> None:
        self.sample_size = sample_size

    def draw(self) -> torch.Tensor:
        return torch.rand(2, 4)


class Loss(nn.Module):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() / self.batch_size


class Net(pl.LightningModule):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


class Drawing(Net):
    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.sum() + self.sampler.draw().sum()


class Forecaster(Net):
    def fit(self, data: Any) -> Any:  # as of scikit-learn: called by the user, before there is a trainer
        return self.loader(data)

    def loader(self, data: Any) -> Any:
        return torch.utils.data.DataLoader(data, batch_size=self.valid_batch_size)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.sum()


class Helped(Forecaster):
    def validation_step(self, batch: torch.Tensor) -> torch.Tensor:
        return average_of(self, batch)

    def average(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.sum() / self.valid_batch_size


def average_of(module: Any, batch: torch.Tensor) -> Any:
    return module.average(batch)


class Property(Forecaster):
    @property
    def share(self) -> float:
        return 1 / self.valid_batch_size

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("share", self.share)


class Averaging(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.loader([])


class Configured(Net):
    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.sum() / self.cfg.data.batch_size


class Keyed(Net):
    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.sum() / self.config["batch_size"]


class Followed(Net):
    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.sum() / self.batch_size


class OfGlobal(Net):
    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.sum() / BATCH_SIZE


class ForLoader(Net):
    def train_dataloader(self) -> int:
        return BATCH_SIZE


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a sampler": (
        lambda: Drawing(sampler=Sampler(64)),
        "`sampler.sample_size` is 64 too and would not follow",
    ),
    "a sampler of another size": (lambda: Drawing(sampler=Sampler(32)), ""),
    "a sampler whose size no step reads": (lambda: Drawing(sampler=Unread(64)), ""),
    "a loss": (lambda: Net(loss=Loss(64)), "`loss.batch_size` is 64 too"),
    "a configuration": (
        lambda: Configured(cfg=Namespace(data=Namespace(batch_size=64))),
        "`cfg.data.batch_size` is 64",
    ),
    "a dictionary": (lambda: Keyed(config={"batch_size": 64}), "`config.batch_size` is 64"),
    "a configuration that no step reads": (lambda: Followed(cfg={"batch_size": 64}, batch_size=64), ""),
    "the module's own": (lambda: Followed(batch_size=64), ""),
    "a width": (lambda: Net(net=nn.Linear(64, 64), hidden=64), ""),
    "a size of a method that no hook reaches": (lambda: Forecaster(valid_batch_size=64), ""),
    "a size behind a function that a hook calls": (lambda: Helped(valid_batch_size=64), "`valid_batch_size` is 64"),
    "a size behind a property that a hook reads": (lambda: Property(valid_batch_size=64), "`valid_batch_size` is 64"),
    "a global": (OfGlobal, "`BATCH_SIZE` is 64"),
    "a global of the loader": (ForLoader, ""),
}


@pytest.mark.parametrize(("build", "expected"), CASES.values(), ids=CASES)
def test_what_holds_the_batch_size_too_is_named(build: Callable[[], nn.Module], expected: str) -> None:
    reason = held_elsewhere(build(), 64)
    assert reason.startswith(expected)
    assert bool(reason) is bool(expected)


def test_a_method_that_a_callback_calls_is_reached() -> None:
    module = Forecaster(valid_batch_size=64)
    assert not held_elsewhere(module, 64, [pl.Callback()])
    assert "Forecaster.loader" in held_elsewhere(module, 64, [Averaging()])


def test_a_run_keeps_its_size_and_says_why(trainer: Any, tuned: Any, small: Any, dataset: Any) -> None:
    module = small()
    module.loss_of = Loss(10)
    decision = tuned(trainer(), module, dataset, budget="1GiB").decision
    assert decision.outcome == "kept"
    assert "`loss_of.batch_size` is 10 too" in decision.reason
