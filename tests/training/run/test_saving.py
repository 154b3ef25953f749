"""Checkpoints on the CPU: the buffer that Lightning writes them to, and what a resumed run holds while it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO, async_plugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.units import MIB
from tests.forks import on_ranks

pytestmark = pytest.mark.usefixtures("taped")

WEIGHTS = 4 * (1024 * 1024 + 1024) * 4


class Layers(pl.LightningModule):
    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
        self.optimizer = optimizer

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=1e-5)


def fit(
    guard: MemGuard, module: Layers, *callbacks: Any, path: Any = None, epochs: int = 1, **options: Any
) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        callbacks=[guard, *callbacks],
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(64, 1024)), 16), ckpt_path=path)
    return trainer


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.captures
@pytest.mark.usefixtures("at_own_size")
@pytest.mark.parametrize(
    ("optimizer", "settings", "states"),
    [
        (torch.optim.Adam, {}, 2),
        (torch.optim.Adam, {"save_weights_only": True}, 2),
        (torch.optim.SGD, {"every_n_train_steps": 2}, 0),
    ],
)
def test_the_buffer_is_as_large_as_the_file(tmp_path: Path, optimizer: Any, settings: Any, states: int) -> None:
    guard = MemGuard("check", budget="1GiB")
    fit(guard, Layers(optimizer), ModelCheckpoint(dirpath=tmp_path, **settings))
    file, *_ = tmp_path.glob("*.ckpt")  # the thread may not have come to remove that of the first epoch
    footprint = guard.decision.footprint
    assert footprint.phase == "checkpoint"
    assert footprint.parts["checkpoint"] == pytest.approx(file.stat().st_size, rel=0.005)
    kept = footprint.parts["checkpoint"] + (2 + states) * WEIGHTS  # with weights and gradients
    assert footprint.peak_allocated_bytes == pytest.approx(kept, rel=0.001)


def test_a_thread_saves_a_copy_while_training_goes_on(tmp_path: Path) -> None:
    """In a process of its own, as the next one."""
    on_ranks(1, measure_while_a_thread_saves, tmp_path)


def measure_while_a_thread_saves(_: int, tmp_path: Path) -> None:
    plain, guard = MemGuard("check", budget="1GiB"), MemGuard("check", budget="1GiB")
    fit(plain, Layers())
    fit(guard, Layers(), ModelCheckpoint(dirpath=tmp_path), epochs=2, plugins=[AsyncCheckpointIO()])
    file, *_ = tmp_path.glob("*.ckpt")  # the thread may not have come to remove that of the first epoch
    footprint, step = guard.decision.footprint, plain.decision.footprint
    assert footprint.parts["checkpoint"] == pytest.approx(2 * file.stat().st_size, rel=0.005)
    assert footprint.peak_allocated_bytes - footprint.parts["checkpoint"] == step.peak_allocated_bytes
    copies = 1.8 if hasattr(async_plugin, "_clone_tensor") else 0.8  # older ones write what is being trained
    assert guard.records[-1].measured.peak_bytes > step.peak_allocated_bytes + copies * file.stat().st_size


def test_the_measured_peak_holds_what_is_saved_after_an_epoch(tmp_path: Path) -> None:
    """In a process of its own: this one has memory of earlier tests, which a fit would use again."""
    on_ranks(1, measure_what_is_saved, tmp_path)


def measure_what_is_saved(_: int, folder: Path) -> None:
    guard = MemGuard("check", budget="1GiB")
    fit(guard, Layers(), ModelCheckpoint(dirpath=folder), epochs=2)
    first, last = (record.measured.peak_bytes for record in guard.records)
    assert last >= 0.97 * guard.decision.footprint.peak_allocated_bytes
    assert first < last + MIB


class SavesMore(Layers):
    """Has a cache that it does not save, and makes copies of its weights for each checkpoint."""

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD)
        self.register_buffer("cache", torch.zeros(MIB), persistent=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["copies"] = [{name: each.clone() for name, each in self.state_dict().items()} for _ in range(2)]


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.captures
def test_what_a_hook_makes_for_the_checkpoint_is_there_next_to_its_buffer(tmp_path: Path) -> None:
    guard = MemGuard("check", budget="1GiB")
    fit(guard, SavesMore(), ModelCheckpoint(dirpath=tmp_path))
    (file,) = tmp_path.glob("*.ckpt")
    footprint = guard.decision.footprint
    assert file.stat().st_size == pytest.approx(3 * WEIGHTS, rel=0.005)
    assert footprint.parts["checkpoint"] == pytest.approx(3 * WEIGHTS, rel=0.005)
    assert footprint.parts["temporaries"] == 2 * WEIGHTS
    assert footprint.peak_allocated_bytes == pytest.approx((2 + 3 + 2) * WEIGHTS + 4 * MIB, rel=0.005)


@pytest.mark.parametrize("callbacks", [(), (ModelCheckpoint(save_top_k=0),)], ids=["none", "none of them saved"])
def test_without_a_checkpoint_the_step_is_predicted(callbacks: Any, trainer: Any, tuned: Any) -> None:
    run, data = trainer(*callbacks, enable_checkpointing=bool(callbacks)), TensorDataset(torch.randn(8, 1024))
    assert tuned(run, Layers(), data, mode="check", budget="1GiB").decision.footprint.phase == "optimizer"


@pytest.mark.captures
def test_a_step_that_fits_is_not_refused_for_its_checkpoint(tmp_path: Path) -> None:
    guard = MemGuard(batch_size="largest", budget="95MiB", max_batch_size=16)
    with pytest.warns(
        UserWarning, match=r"does NOT fit while a checkpoint is saved\. .*save_weights_only=True\) needs 32"
    ):
        fit(guard, Layers(), ModelCheckpoint(dirpath=tmp_path))
    assert guard.decision.verdict == "does not fit"
    assert guard.decision.reason == "batch size 16 does NOT fit while a checkpoint is saved."


def test_a_resumed_run_is_measured_without_the_checkpoint_that_it_was_loaded_from(tmp_path: Path) -> None:
    fit(MemGuard("check"), Layers()).save_checkpoint(tmp_path / "last.ckpt")
    guard = MemGuard("check")
    fit(guard, Layers(), path=tmp_path / "last.ckpt", epochs=2)
    (record,) = guard.records
    assert record.measured.peak_bytes >= 0.97 * record.predicted.peak_allocated_bytes
