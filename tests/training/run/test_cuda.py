"""A run on a CUDA device: predicted versus the device's own counters. Skipped where there is none."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.training.run import earlier_runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch finds none here"),
]


@pytest.fixture(autouse=True)
def no_earlier_peak() -> None:
    """Let PyTorch's counters show this test's peak: MemGuard does not reset them."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def peak_of(snapshot: Path) -> int:
    """The most bytes that were asked for and not given back, in a snapshot's own trace."""
    live, sizes, peak = 0, {}, 0
    for entry in pickle.loads(snapshot.read_bytes())["device_traces"][0]:
        if entry["action"] == "alloc":
            sizes[entry["addr"]] = entry["size"]
            live += entry["size"]
        elif entry["action"] == "free_completed":
            live -= sizes.pop(entry["addr"], 0)
        peak = max(peak, live)
    return peak


def test_the_actual_snapshot_is_next_to_the_predicted_one(trainer: Any, small: Any, tmp_path: Path) -> None:
    """Memory from before the recording (the model, its first batch) is in the predicted one alone."""
    data = TensorDataset(torch.randn(65536, 16), torch.randint(0, 4, (65536,)))
    guard = MemGuard("check")
    guard.save_snapshot(tmp_path / "step.pickle")
    trainer(guard, accelerator="gpu", devices=1).fit(small(), DataLoader(data, batch_size=16384))
    predicted, actual = peak_of(tmp_path / "step.pickle"), peak_of(tmp_path / "step_actual.pickle")
    before = 4 * (16 * 64 + 64 + 64 * 4 + 4) + 16384 * (16 * 4 + 8)
    assert actual + before == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_allocated_peak_is_near_the_allocators_own(trainer: Any, small: Any, precision: str) -> None:
    """Within 5 % of ``max_memory_allocated``, at 1024 features where parameters and activations both matter."""

    class Wide(small):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(16, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 4)
            )

    data = TensorDataset(torch.randn(8192, 16), torch.randint(0, 4, (8192,)))
    guard = MemGuard("check")
    torch.cuda.reset_peak_memory_stats()  # as a user does to see the peak of one fit
    trainer(guard, accelerator="gpu", devices=1, precision=precision).fit(
        Wide(), train_dataloaders=DataLoader(data, batch_size=2048)
    )
    (record,) = guard.records
    assert record.measured.peak_allocated_bytes == torch.cuda.max_memory_allocated()
    assert record.measured.peak_reserved_bytes == torch.cuda.max_memory_reserved()
    assert record.predicted.method == "fake"
    assert record.predicted.peak_allocated_bytes == pytest.approx(record.measured.peak_allocated_bytes, rel=0.05)


def test_the_second_fit_learns_from_the_first(
    trainer: Any, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prediction is nearer to what is measured, in a range that holds it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(earlier_runs, "reserved_bytes", lambda device: 0)  # by the tests before, in this process
    data = TensorDataset(torch.randn(65536, 16), torch.randint(0, 4, (65536,)))
    records = []
    for _ in range(2):
        guard = MemGuard("check")
        trainer(guard, accelerator="gpu", devices=1).fit(small(), DataLoader(data, batch_size=16384))
        records += guard.records
    first, second = records
    assert second.predicted.learned_from == "1 earlier run on this GPU"
    assert abs(second.error_ratio) <= max(abs(first.error_ratio), 0.01)
    low, high = second.predicted.lowest.device_bytes, second.predicted.highest.device_bytes
    assert low <= second.measured.peak_bytes <= high
