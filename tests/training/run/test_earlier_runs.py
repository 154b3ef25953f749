"""A simulated life on a GPU: fit, store, fit again. The CPU stands in, with a share of the prediction as its peak."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.core.decision import record
from lightning_memguard.core.decision.decision import Decision, Limits
from lightning_memguard.core.decision.record import EpochRecord, Measured
from lightning_memguard.core.device.measurements import Setting, Store, default_path
from lightning_memguard.core.device.meter import PeakMeter
from lightning_memguard.core.range import NOTHING
from lightning_memguard.report.decision_table import setup_text
from lightning_memguard.report.page import page
from lightning_memguard.report.page_data import Report
from lightning_memguard.training.planning.plan import plan_on
from lightning_memguard.training.planning.subject import subject_of
from lightning_memguard.training.run import earlier_runs, reading
from lightning_memguard.training.run.tune import tune
from tests.forks import CONTEXT
from tests.training.quiet import quiet_trainer

pytestmark = pytest.mark.usefixtures("taped")

H200 = Setting("NVIDIA H200", "570.86.15", "2.13.0+cu130", "13.0", "91900", "")
BUDGET = 1 << 20


class Net(pl.LightningModule):
    def __init__(self, width: int = 512, optimizer: Any = torch.optim.Adam) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 10))
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=1e-4)


@dataclass
class Gpu:
    """What the simulated GPU is, and the share that it takes of what is predicted without correction."""

    setting: Setting = H200
    share: float = 1.2
    guard: MemGuard = field(default_factory=MemGuard)
    retries: int = 0
    outside: int = 1  # of the allocator

    def measured(self, *_: object) -> Measured:
        decision = self.guard.decision
        peak = int(self.share * (decision.footprint.peak_device_bytes - decision.footprint.correction_bytes))
        return Measured(peak, "simulated", {}, peak // 2, peak - self.outside, self.retries, 0)

    def run(self, net: Any = None, size: int = 64, *, precision: str = "32-true", **settings: Any) -> Decision:
        """Check a fit, and store what an epoch of it measures, without training."""
        trainer, module = quiet_trainer(precision=precision, max_steps=8), net or Net()
        self.guard = MemGuard("check", **{"budget": BUDGET, **settings})
        trainer.strategy.connect(module)
        trainer._data_connector.attach_data(
            module, DataLoader(TensorDataset(torch.randn(3 * size, 128), torch.zeros(3 * size).long()), batch_size=size)
        )
        tuning = tune(trainer, module, self.guard._settings)
        decision = tuning.decision
        assert decision.footprint is not None
        assert tuning.profile is not None
        self.guard._last_run = mock.Mock(decision=decision)
        record = EpochRecord(0, size, decision.footprint, self.measured(), BUDGET)
        tuning.earlier.remember(record, decision, tuning.profile, precision, type(module).__name__)
        return decision

    def fit(self, mode: Any = "tune", net: Any = None, size: int = 64, **settings: Any) -> Decision:
        trainer = {name: settings.pop(name) for name in ("max_epochs", "max_steps", "precision") if name in settings}
        samples = settings.pop("samples", 3 * size)
        self.guard = MemGuard(mode, **{"batch_size": "largest", "budget": BUDGET, **settings})
        data = TensorDataset(torch.randn(samples, 128), torch.zeros(samples, dtype=torch.long))
        data = (
            data
            if mode == "check"
            else TensorDataset(torch.randn(1, 128).expand(60_000, 128), torch.zeros(60_000).long())
        )
        pl.Trainer(**{
            "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False, "max_steps": 8,
            "enable_progress_bar": False, "enable_model_summary": False, "callbacks": [self.guard], **trainer,
        }).fit(net or Net(), DataLoader(data, batch_size=size))  # fmt: skip
        assert self.guard.decision is not None
        return self.guard.decision


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    """A GPU whose user has an empty cache folder."""
    made = Gpu()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(earlier_runs, "setting_of", lambda device: made.setting)
    monkeypatch.setattr(PeakMeter, "read", made.measured)
    monkeypatch.setattr(record, "_OBJECTS_BYTES", 0)  # Python's own, on the CPU
    monkeypatch.setattr("lightning_memguard.training.run.profile._BATCHES_OF_OBJECTS", 0)  # of samples there
    return made


def stored() -> list[Any]:
    return Store(default_path()).read()[0]


def test_the_next_fit_is_given_what_really_fits(gpu: Gpu) -> None:
    first = gpu.fit()
    assert gpu.guard.records[0].measured.peak_bytes > first.budget.usable_bytes  # 20 % more than predicted
    (kept,) = stored()
    assert (kept.batch_size, kept.module, kept.precision, kept.setting) == (first.batch_size, "Net", "32-true", H200)
    assert kept.measured_bytes == pytest.approx(1.2 * kept.predicted_bytes, rel=1e-3)
    second = gpu.fit()
    assert second.batch_size < first.batch_size
    assert 0.9 * second.budget.usable_bytes < gpu.guard.records[0].measured.peak_bytes <= second.budget.usable_bytes
    assert abs(gpu.guard.records[0].error_ratio) < 0.03
    assert "from 1 earlier run on this GPU" in setup_text(second)
    third = gpu.fit()
    assert third.batch_size == pytest.approx(second.batch_size, rel=0.05)
    assert "from 2 earlier runs on this GPU" in setup_text(third)


class RunsOut(Net):
    """Runs out of memory in its third step, though it was predicted to fit."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and type(self.trainer) is pl.Trainer:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(batch, batch_idx)


def test_a_fit_that_ran_out_of_memory_makes_the_next_one_smaller_until_one_has_run(gpu: Gpu) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        gpu.fit(net=RunsOut(), batch_size="largest")
    first = gpu.guard.decision
    (kept,) = stored()
    assert (kept.ran_out, kept.batch_size, kept.measured_bytes) == (True, first.batch_size, BUDGET)
    second = gpu.fit()
    assert second.batch_size < first.batch_size
    assert second.footprint is not None
    assert "from 1 earlier run on this GPU" in setup_text(second)


def test_the_signature_is_the_steps_whatever_its_batch_size(gpu: Gpu) -> None:
    for size in (2, 16, 63, 256):
        gpu.run(size=size)
    assert len({each.step for each in stored()}) == 1
    assert {each.batch_size for each in stored()} == {2, 16, 63, 256}


@pytest.mark.captures
@pytest.mark.usefixtures("captured_once")
@pytest.mark.parametrize(
    "change",
    [{"precision": "bf16-mixed"}, {"net": lambda: Net(optimizer=torch.optim.SGD)}, {"net": lambda: Net(width=520)}],
    ids=["precision", "optimizer", "model"],
)
def test_another_step_learns_nothing(gpu: Gpu, change: dict[str, Any]) -> None:
    gpu.run()
    decision = gpu.run(**{name: value() if callable(value) else value for name, value in change.items()})
    assert decision.footprint.learned_from == ""
    assert not decision.notes
    assert len({each.step for each in stored()}) == 2


@pytest.mark.parametrize(
    ("name", "value"), [("gpu", "NVIDIA A100-SXM4-80GB"), ("cudnn", "92000"), ("driver", "580.1"), ("torch", "2.14.0")]
)
def test_what_another_gpu_or_software_has_measured_is_not_used_and_the_run_says_so(
    gpu: Gpu, name: str, value: str
) -> None:
    gpu.run()
    gpu.setting = replace(H200, **{name: value})
    decision = gpu.run()
    assert decision.footprint.correction_bytes == 0
    (note,) = decision.notes
    assert note == f"1 earlier measurement of this step is not used: {name} {getattr(H200, name)} instead of {value}"


def test_damaged_lines_are_not_used_and_the_run_says_so(gpu: Gpu) -> None:
    gpu.run()
    default_path().write_text(default_path().read_text()[:-40] + "\n")
    decision = gpu.run()
    assert decision.footprint.learned_from == ""
    assert decision.notes == (f"1 line of {default_path()} cannot be read and is not used",)


def test_a_folder_that_cannot_be_written_changes_nothing(gpu: Gpu, tmp_path: Path) -> None:
    (tmp_path / "lightning-memguard").write_text("a file is in the way")
    decision = gpu.fit("check")
    assert decision.outcome == "checked"
    assert len(gpu.guard.records) == 1
    assert decision.notes == (f"The measurements in {default_path()} cannot be read: Not a directory",)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSPC, errno.EROFS])
def test_a_file_that_could_not_be_written_is_not_tried_again(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As on a network's file system that cannot lock, on a full disk, on one that is read only."""
    add = mock.Mock(side_effect=OSError(code, ""))
    monkeypatch.setattr(Store, "add", add)
    gpu.fit("check", max_epochs=3)
    assert len(gpu.guard.records) == 3
    add.assert_called_once()


def test_a_user_without_a_home_learns_nothing(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry in its list."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert gpu.fit("check").outcome == "checked"
    assert len(gpu.guard.records) == 1


def test_a_user_may_want_none_of_it(gpu: Gpu) -> None:
    gpu.run(learn=False)
    assert not default_path().exists()


@pytest.mark.parametrize(
    "disturbed",
    [{"retries": 2}, {"share": 0.0}, {"outside": 0}],
    ids=["cache emptied", "not measured", "context not seen"],
)
def test_a_run_that_tells_nothing_of_the_step_is_not_stored(gpu: Gpu, disturbed: dict[str, Any]) -> None:
    for name, value in disturbed.items():
        setattr(gpu, name, value)
    gpu.run()
    assert not stored()


def test_a_run_without_a_second_step_is_not_stored(gpu: Gpu) -> None:
    """Its peak is less than the next run's would be."""
    gpu.fit("check", max_epochs=2, max_steps=1)
    assert gpu.guard.records
    assert not stored()


def test_a_run_of_fewer_samples_than_its_batch_size_is_stored_at_their_number(gpu: Gpu) -> None:
    gpu.fit("check", max_epochs=2, samples=63)
    assert [each.batch_size for each in stored()] == [63]


def test_a_run_that_began_with_a_cache_is_not_stored(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after another fit in the same process: the allocator has reserved what that took."""
    monkeypatch.setattr(earlier_runs, "reserved_bytes", lambda device: 1 << 30)
    gpu.run()
    assert not stored()


def test_within_a_run_the_range_narrows_after_the_first_epoch(gpu: Gpu) -> None:
    gpu.fit("check", max_epochs=2)
    first, second = gpu.guard.records
    assert first.expected_bytes is None
    assert second.expected_bytes is not None
    low, high = second.expected_bytes
    assert low < first.measured.peak_bytes < high < 1.1 * low
    metrics = second.as_metrics()
    assert metrics["memguard/predicted_high_gib"] - metrics["memguard/predicted_low_gib"] == (high - low) / 2**30
    assert gpu.guard.decision is not None
    assert "the last was expected to take" in page(Report("Net", gpu.guard.decision, records=gpu.guard.records))
    assert len(stored()) == 1


def _fit_often(number: int, folder: Path) -> None:
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    torch.set_num_threads(1)
    made = Gpu(share=1.0 + number / 100)
    earlier_runs.setting_of = lambda device: H200  # type: ignore[assignment]
    reading.process_bytes = lambda *_: NOTHING  # type: ignore[assignment]
    PeakMeter.read = made.measured  # type: ignore[method-assign]
    record._OBJECTS_BYTES = 0
    for size in (8, 16):
        made.fit("check", size=size)


def test_two_trainings_at_once_store_all_that_they_measure(gpu: Gpu, tmp_path: Path) -> None:
    """In new processes: what this one has run must not matter."""
    runs = [CONTEXT.Process(target=_fit_often, args=(number, tmp_path)) for number in (1, 2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(240)
    assert [run.exitcode for run in runs] == [0, 0]
    assert sorted(each.batch_size for each in stored()) == [8, 8, 16, 16]
    assert all(json.loads(line) for line in default_path().read_text().splitlines())


@pytest.mark.captures
@pytest.mark.usefixtures("captured_once")
def test_a_plan_of_the_same_step_has_its_signature(gpu: Gpu) -> None:
    """So that what a run has measured corrects the plan for it."""
    gpu.run()
    batch = torch.randn(32, 128), torch.zeros(32, dtype=torch.long)
    plan = plan_on(subject_of(Net(), batch), "cpu", Limits(max_batch_size=64))
    assert {each.step for each in stored()} == {plan.prediction.curve.signature}
