"""A small module, a small trainer: what most tests of the training room need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.training.tune import Tuning, tune


class Small(pl.LightningModule):
    """Two layers; ``step_of`` may replace what the step does after the loss."""

    def __init__(self, width: int = 64, **attributes: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
        for name, value in attributes.items():
            setattr(self, name, value)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


@pytest.fixture
def small() -> type[Small]:
    return Small


@pytest.fixture
def dataset() -> TensorDataset:
    """One hundred samples of 16 features and a class."""
    return TensorDataset(torch.randn(100, 16), torch.randint(0, 4, (100,)))


@pytest.fixture
def trainer() -> Callable[..., pl.Trainer]:
    def make(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
        quiet: dict[str, Any] = {
            "accelerator": "cpu",
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        return pl.Trainer(**{**quiet, **settings}, callbacks=list(callbacks))

    return make


@pytest.fixture
def tuned() -> Callable[..., Tuning]:
    """Everything that happens at setup, without the fit."""

    def run(trainer: pl.Trainer, module: pl.LightningModule, dataset: TensorDataset, **wishes: Any) -> Tuning:
        trainer.strategy.connect(module)
        trainer._data_connector.attach_data(module, DataLoader(dataset, batch_size=10))
        return tune(trainer, module, MemGuard(**wishes)._wishes)

    return run
