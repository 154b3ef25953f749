"""Worker processes put batches in /dev/shm: a batch grows only as far as they fit there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import Decision, MemGuard
from lightning_memguard.training.run import profile

SAMPLE = 4 * 16 + 8  # bytes


class Validated(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def decided(
    trainer: Any, dataset: TensorDataset, size: int, validation: DataLoader[Any] | None, **loader: Any
) -> Decision:
    guard = MemGuard(margin=0.0)
    run = trainer(guard, max_steps=1, num_sanity_val_steps=0, limit_val_batches=0 if validation is None else 1)
    run.fit(Validated(), DataLoader(dataset, size, **loader), validation)
    assert guard.decision is not None
    return guard.decision


@pytest.mark.parametrize(
    ("loader", "in_flight"),
    [
        ({"num_workers": 1}, 4),
        ({"num_workers": 1, "prefetch_factor": 5, "persistent_workers": True}, 7),
        ({"num_workers": 2}, 6),
    ],
    ids=str,
)
def test_as_many_batches_fit_as_are_in_flight(
    trainer: Any, dataset: TensorDataset, monkeypatch: pytest.MonkeyPatch, loader: dict[str, Any], in_flight: int
) -> None:
    monkeypatch.setattr(profile, "free_shared_memory", lambda: in_flight * 30 * SAMPLE)
    found = decided(trainer, dataset, 4, None, **loader)
    assert (found.batch_size, found.limited_by) == (30, "shared_memory")
    assert decided(trainer, dataset, 50, None, **loader).batch_size == 50, "the loader's own size stays"


def test_without_workers_nothing_is_shared(
    trainer: Any, dataset: TensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "free_shared_memory", lambda: 1)
    assert decided(trainer, dataset, 4, None).limited_by == "dataset"


def test_the_workers_of_validation_take_their_share(
    trainer: Any, dataset: TensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "free_shared_memory", lambda: 4 * (30 + 10) * SAMPLE)
    validation = DataLoader(dataset, 10, num_workers=1)
    found = decided(trainer, dataset, 4, validation, num_workers=1)
    assert (found.batch_size, found.limited_by) == (30, "shared_memory")


PROGRAM = """
import warnings
warnings.filterwarnings("ignore")
import pytorch_lightning as pl, torch
from torch.utils.data import DataLoader, Dataset
from lightning_memguard import MemGuard

class Images(Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index): return torch.zeros(3, 64, 64)

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
    def training_step(self, batch, batch_idx):
        return (batch.mean() - self.weight).square()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

guard = MemGuard(min_steps_per_epoch=None)
pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    callbacks=[guard]).fit(Module(), DataLoader(Images(), 2, num_workers=2))
print("trained", guard.decision.batch_size, guard.decision.limited_by)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root on Linux can give a process a small /dev/shm"
)
def test_no_worker_dies_where_docker_gives_little(tmp_path: Path) -> None:
    """Under 16 MiB, 1,000 samples in one batch end a worker with a bus error."""
    mount = "mount -t tmpfs -o size=16m tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False, capture_output=True).returncode:
        pytest.skip("this machine gives a process no mounts of its own")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount}; exec {sys.executable} program.py"],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert "trained 54 shared_memory" in done.stdout, done.stderr[-2000:]
