"""A checkpoint holds what Lightning's `dump_checkpoint` would, and the user's own callbacks may save one."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_memguard import MemGuard
from lightning_memguard.units import MIB
from tests.training.quiet import quiet_trainer

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("at_own_size")]


class Net(pl.LightningModule):
    """4 MiB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024, bias=False)

    def training_step(self, batch, _):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


class WithTeacher(Net):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = [torch.nn.Linear(2048, 2048, bias=False)]


class WithCache(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4 * MIB), persistent=False)


class SavesHalf(Net):
    """Leaves a head of 16 MiB out of what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(2048, 2048, bias=False)

    def on_save_checkpoint(self, checkpoint):
        del checkpoint["state_dict"]["head.weight"]


class Whole(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4 * MIB))


class Saver(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        self.save(trainer)

    def save(self, trainer):
        trainer.save_checkpoint("own.ckpt")


class NeverSaves(pl.Callback):
    def by_hand(self, trainer):
        trainer.save_checkpoint("own.ckpt")


def fit(module: pl.LightningModule, folder, *callbacks: pl.Callback) -> MemGuard:
    guard = MemGuard("check")
    saves = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    trainer = quiet_trainer(guard, *callbacks, enable_checkpointing=saves, default_root_dir=folder)
    trainer.fit(module, DataLoader(torch.rand(16, 1024), 8))
    return guard


@pytest.mark.parametrize(("kind", "mib"), [(WithTeacher, 4), (WithCache, 4), (SavesHalf, 4), (Whole, 20)])
def test_what_a_checkpoint_holds_is_what_its_file_holds(tmp_path, kind, mib):
    guard = fit(kind(), tmp_path, ModelCheckpoint(tmp_path))
    (file,) = tmp_path.glob("*.ckpt")
    assert file.stat().st_size == pytest.approx(mib * MIB, rel=0.01)
    assert guard.decision.footprint.parts["checkpoint"] == mib * MIB


@pytest.mark.parametrize("saves", [True, False])
def test_a_callback_that_saves_is_counted_and_named_and_a_method_that_no_hook_reaches_is_not(
    tmp_path, monkeypatch, saves
):
    monkeypatch.chdir(tmp_path)
    decision = fit(Net(), tmp_path, Saver() if saves else NeverSaves()).decision
    assert decision.footprint.parts.get("checkpoint") == (4 * MIB if saves else None)
    assert any("Saver.on_train_epoch_end saves the training" in note for note in decision.notes) is saves


class Data(pl.LightningDataModule):
    """8 MiB of samples, which `save_hyperparameters` puts into each checkpoint."""

    def __init__(self, samples: torch.Tensor) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(self.hparams.samples, 8)


def test_data_among_the_hyperparameters_of_a_datamodule_is_in_each_checkpoint(tmp_path):
    guard = MemGuard("check")
    trainer = quiet_trainer(
        guard, ModelCheckpoint(tmp_path), enable_checkpointing=True, default_root_dir=tmp_path, limit_train_batches=2
    )
    trainer.fit(Net(), datamodule=Data(torch.rand(2048, 1024)))
    (file,) = tmp_path.glob("*.ckpt")
    assert file.stat().st_size == pytest.approx(12 * MIB, rel=0.01)
    assert guard.decision.footprint.parts["checkpoint"] == 12 * MIB
    assert any('`self.save_hyperparameters(ignore=["samples"])`' in note for note in guard.decision.notes)
