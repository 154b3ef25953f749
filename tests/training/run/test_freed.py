"""Freed blocks that glibc keeps are in the upper bound of a fit on the CPU, or glibc is made to return them."""

from __future__ import annotations

import sys

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from lightning_memguard import MemGuard
from lightning_memguard.core.device.malloc import KEPT_FREED_RATIO
from lightning_memguard.units import MIB
from tests.training.quiet import quiet_trainer

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap"),
    pytest.mark.usefixtures("at_own_size"),
]

HIDDEN_BYTES = 64 * 2048 * 4
STEPS = 40


class KeepsLosses(pl.LightningModule):
    """Each step leaves a loss: four bytes, which lie behind blocks of 512 KiB that the step frees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(32, 2048)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch, _):
        loss = self.net(batch).relu().square().mean()
        self.losses.append(loss)
        return loss

    def on_train_epoch_end(self):
        self.losses.clear()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class KeepsGraphs(KeepsLosses):
    def training_step(self, batch, _):
        self.losses.append(self.net(batch).relu().square().sum())
        return super().training_step(batch, _)


class Saves(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/own.ckpt")


class SavesWeights(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/own.ckpt", weights_only=True)


class Wide(KeepsLosses):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1024, 2048)

    def training_step(self, batch, _):
        return self.net(batch).square().mean()


def loader(width=32):
    return DataLoader(torch.rand(64 * STEPS, width), 64)


@pytest.fixture
def predicted(tuned, trainer):
    """The footprint of a fit that starts."""

    def predict(module, *callbacks, width=32):
        run = trainer(*callbacks, limit_train_batches=STEPS)
        return tuned(run, module, loader(width), batch_size="auto", mode="check").decision.footprint

    return predict


@pytest.mark.parametrize(
    ("kind", "words"), [(KeepsLosses, "freed blocks that the C library keeps"), (KeepsGraphs, "nodes of the graphs")]
)
def test_freed_blocks_behind_what_each_step_leaves_are_in_the_upper_bound_and_the_nodes_of_graphs_that_stay(
    predicted, monkeypatch, kind, words
):
    monkeypatch.setattr("lightning_memguard.training.run.freed.WORTH_A_NOTE", 1)
    footprint = predicted(kind())
    assert footprint.highest.outside_bytes >= STEPS * HIDDEN_BYTES
    assert any(words in note for note in footprint.notes)


def test_they_are_returned_where_they_could_pass_the_budget(tmp_path, monkeypatch):
    called = []
    name = "lightning_memguard.training.run.guarded_run.return_freed_memory"
    monkeypatch.setattr(name, lambda device: called.append(device) or (lambda: None))
    guard = MemGuard(budget="22MiB")
    quiet_trainer(guard, default_root_dir=tmp_path, limit_train_batches=STEPS).fit(KeepsLosses(), loader())
    footprint = guard.decision.footprint
    assert footprint.most_device_bytes * KEPT_FREED_RATIO < 22 * MIB, "the ratio alone would not return them"
    assert called == [torch.device("cpu")]
    assert not any("freed blocks" in note for note in footprint.notes)


@pytest.mark.parametrize("saver", [Saves, SavesWeights])
def test_what_steps_have_freed_lies_next_to_a_checkpoint_at_most_if_that_is_the_peak_or_not(predicted, saver):
    footprint = predicted(Wide(), saver(), width=1024)
    weights = 1025 * 2048 * 4
    assert footprint.highest.outside_bytes > weights
    assert footprint.phase == ("checkpoint" if saver is Saves else "optimizer")
    if saver is Saves:  # with gradients, Adam, and the file
        assert footprint.peak_allocated_bytes == pytest.approx(7 * weights, rel=0.01)
