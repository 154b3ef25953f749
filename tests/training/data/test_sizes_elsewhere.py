"""A number that equals the batch size, does not follow it and is read in a step keeps the batch size."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memguard import MemGuard
from lightning_memguard.training.data.sizes_elsewhere import held_elsewhere

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


class Net(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


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
        lambda: Net(sampler=Sampler(64)),
        "`sampler.sample_size` is 64 too and would not follow",
    ),
    "a sampler of another size": (lambda: Net(sampler=Sampler(32)), ""),
    "a sampler whose size no step reads": (lambda: Net(sampler=Unread(64)), ""),
    "a loss": (lambda: Net(loss=Loss(64)), "`loss.batch_size` is 64 too"),
    "a configuration": (
        lambda: Configured(cfg=Namespace(data=Namespace(batch_size=64))),
        "`cfg.data.batch_size` is 64",
    ),
    "a dictionary": (lambda: Keyed(config={"batch_size": 64}), "`config.batch_size` is 64"),
    "a configuration that no step reads": (lambda: Followed(cfg={"batch_size": 64}, batch_size=64), ""),
    "the module's own": (lambda: Followed(batch_size=64), ""),
    "a width": (lambda: Net(net=nn.Linear(64, 64), hidden=64), ""),
    "a global": (OfGlobal, "`BATCH_SIZE` is 64"),
    "a global of the loader": (ForLoader, ""),
}


@pytest.mark.parametrize(("build", "expected"), CASES.values(), ids=CASES)
def test_what_holds_the_batch_size_too_is_named(build: Callable[[], nn.Module], expected: str) -> None:
    reason = held_elsewhere(build(), 64)
    assert reason.startswith(expected)
    assert bool(reason) is bool(expected)


def test_a_run_keeps_its_size_and_says_why(trainer: Any, small: Any, dataset: Any) -> None:
    guard, module = MemGuard(budget="1GiB"), small()
    module.loss_of = Loss(10)
    trainer(guard).fit(module, torch.utils.data.DataLoader(dataset, batch_size=10))
    assert guard.decision.outcome == "kept"
    assert "`loss_of.batch_size` is 10 too" in guard.decision.reason
