"""The host of a run whose device is another: what it must hold limits the batch size, and is recorded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.core.decision.decision import Budget
from lightning_memguard.core.device.host import MemoryInfo
from lightning_memguard.report.decision_table import setup_text, warning_of
from lightning_memguard.training.data import workers
from lightning_memguard.training.run import reading
from lightning_memguard.units import GIB, MIB
from tests.forks import on_ranks

pytestmark = pytest.mark.usefixtures("taped")

FEATURES = 64 * 1024  # 256 KiB a sample


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, 8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-5)


def fitted(guard: MemGuard, *callbacks: Any, size: int = 2, **loader: Any) -> MemGuard:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        callbacks=[guard, *callbacks],
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.zeros(1, FEATURES).expand(200, FEATURES)), size, **loader))
    return guard


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host beside the device, as a GPU has it, with so many bytes free."""

    def offer(nbytes: int) -> None:
        def budgets(*_: object) -> tuple[Budget, Budget]:
            return Budget(2 * nbytes, nbytes, 0, "host", "the host"), Budget(GIB, GIB, 0, "statvfs", "/dev/shm")

        monkeypatch.setattr(reading, "host_budgets", budgets)
        monkeypatch.setattr(workers, "collected_bytes", lambda: 0)

    return offer


def test_what_workers_prepare_must_fit_the_host(host: Any) -> None:
    """One worker: three batches in shared memory, at most four more and 32 MiB of its own, old weights (2 MiB)."""
    host(34 * MIB + 7 * 20 * MIB // 4 + MIB // 2)
    guard = fitted(MemGuard(batch_size="largest", min_steps_per_epoch=None, budget="1GiB"), num_workers=1)
    decision = guard.decision
    assert (decision.batch_size, decision.limited_by) == (20, "host_memory")
    assert decision.host.parts["prefetched"] == 15 * MIB
    assert "prefetched" not in decision.footprint.parts
    assert "At most on the host, which has 69.5 MiB free" in setup_text(decision)
    assert "do not fit the host (69.5 MiB free): prefetch_factor=1 needs 5.0 MiB less" in decision.reason
    metrics = guard.records[0].as_metrics()
    assert metrics["memguard/host_predicted_gib"] == sum(decision.host.parts.values()) / GIB
    # A worker has its own copies of pages of the tests' process, which is larger the more tests it has run.
    assert 5 * MIB / GIB < metrics["memguard/host_actual_gib"] < 1


def test_a_checkpoint_is_written_to_the_hosts_memory_first(host: Any, tmp_path: Path) -> None:
    host(GIB)
    guard = fitted(MemGuard("check", budget="1GiB"), ModelCheckpoint(tmp_path))
    (file,) = tmp_path.glob("*.ckpt")
    assert guard.decision.host.parts == {"checkpoint": pytest.approx(file.stat().st_size, rel=0.01)}


def test_one_rank_of_a_host_saves_for_all(
    host: Any, tuned: Any, trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four ranks is compared with a fourth of the host."""
    host(GIB)
    monkeypatch.setattr(pl.strategies.SingleDeviceStrategy, "num_processes", 4, raising=False)
    run, data = trainer(ModelCheckpoint(tmp_path), enable_checkpointing=True), TensorDataset(torch.zeros(20, FEATURES))
    decision = tuned(run, Net(), data, mode="check", budget="1GiB").decision
    assert decision.host.most_bytes == decision.host.parts["checkpoint"] // 4


def test_a_host_that_is_too_small_is_a_warning_and_no_refusal(
    host: Any, tuned: Any, trainer: Any, tmp_path: Path
) -> None:
    host(MIB)
    run, data = trainer(ModelCheckpoint(tmp_path), enable_checkpointing=True), TensorDataset(torch.zeros(20, FEATURES))
    decision = tuned(run, Net(), DataLoader(data, 2, num_workers=1), budget="1GiB").decision
    words = r"does NOT fit the host.*checkpoint .* usable there.*save_weights_only=True"
    assert re.search(words, warning_of(decision))
    assert (decision.batch_size, decision.fits) == (2, False)


def test_on_the_cpu_one_budget_holds_all(tmp_path: Path) -> None:
    """In a process of its own: workers would keep memory that earlier tests have left in this one."""
    on_ranks(1, measure_with_a_worker, tmp_path)


def measure_with_a_worker(*_: object) -> None:
    guard = MemGuard(batch_size="largest", min_steps_per_epoch=None, budget="4GiB", host_budget="200MiB", margin=0)
    decision = fitted(guard, num_workers=1, multiprocessing_context="fork").decision
    assert decision.budget.free_bytes == 200 * MIB
    assert decision.footprint.most_device_bytes <= 200 * MIB
    assert decision.footprint.parts["prefetched"] == 2 * decision.batch_size * MIB // 4
    record = guard.records[0]
    assert record.measured.peak_bytes < 200 * MIB
    assert "memguard/host_actual_gib" not in record.as_metrics()


def test_each_rank_of_a_host_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    class Facts:
        device = torch.device("cuda")
        strategy = type("Strategy", (), {"num_processes": 4})

    monkeypatch.setattr(workers, "available_memory", lambda: MemoryInfo(80 * GIB, 40 * GIB, "cgroup"))
    monkeypatch.setattr(workers, "shared_memory", lambda: None)
    facts: Any = Facts()
    budget, shared = workers.host_budgets(facts, None, 0.1)
    assert (budget.free_bytes, budget.usable_bytes, budget.source, shared) == (10 * GIB, 9 * GIB, "cgroup", None)
    given, _ = workers.host_budgets(facts, 6 * GIB, 0.0)
    assert (given.free_bytes, given.source) == (6 * GIB, "given")
