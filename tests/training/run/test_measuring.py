"""Predicted and measured on the CPU: tensors next to tensors, and the process next to them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.core.device import tensor_counter
from lightning_memguard.units import KIB, MIB
from tests.training.quiet import quiet_trainer

pytestmark = [
    pytest.mark.skipif(not tensor_counter.is_available(), reason="needs glibc's mallinfo2"),
    pytest.mark.usefixtures("taped", "at_own_size"),
]


class Net(pl.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(20, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def training_step(self, batch, _):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def loader(count: int = 1280, size: int = 128) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(count, 20), torch.randn(count, 1)), size)


def fit(
    module: pl.LightningModule, folder, *callbacks: pl.Callback, epochs: int = 3, train=None, **settings
) -> MemGuard:
    guard = MemGuard("check", **settings)
    trainer = quiet_trainer(guard, *callbacks, max_epochs=epochs, default_root_dir=folder)
    trainer.fit(module, train or loader(), loader())
    return guard


@pytest.mark.captures
def test_optimizer_states_that_a_fit_has_left_are_no_part_of_the_test_after_it(tmp_path):
    class Tested(Net):
        test_step = Net.validation_step

    module, guard = Tested(width=1024), MemGuard()
    trainer = quiet_trainer(guard, default_root_dir=tmp_path)
    trainer.fit(module, loader())
    trainer.test(module, loader(), verbose=False)
    record = guard.evaluations["test"]
    assert abs(record.measured.peak_bytes - record.predicted.peak_device_bytes) < 4 * KIB
    assert record.measured.parts["optimizer_state"] == 0


@pytest.mark.captures
def test_tensors_of_a_small_run_are_measured_to_the_byte_and_compared(tmp_path, caplog):
    """The process takes some MiB more: that is another figure."""
    with caplog.at_level("INFO", "lightning_memguard"):
        guard = fit(Net(), tmp_path)
    for record in guard.records:
        assert abs(record.measured.peak_bytes - record.predicted.peak_device_bytes) < 4 * KIB
        assert record.predicted.peak_device_bytes < 200 * KIB
        assert record.has_error
        logged = record.as_metrics()
        low, high = logged["memguard/predicted_low_gib"], logged["memguard/predicted_high_gib"]
        assert 0.97 * low <= logged["memguard/actual_peak_gib"] <= high
    assert "(tensors; the process took " in caplog.text
    assert "too small to compare" not in caplog.text


class KeepsReference(Net):
    """Keeps a set of 40 MiB from its first validation batch, which is one of the sanity check."""

    def validation_step(self, batch, _):
        if not hasattr(self, "reference"):
            self.reference = torch.rand(10, 1024, 1024)


def test_what_the_sanity_check_leaves_is_measured(tmp_path):
    guard = fit(KeepsReference(), tmp_path, epochs=2)
    for record in guard.records:
        assert 40 * MIB < record.measured.peak_bytes < 41 * MIB
        assert record.measured.process_bytes > 40 * MIB


class WithTeacher(Net):
    """Keeps a frozen teacher of 16 MiB in a list, so that it is no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [torch.nn.Linear(2048, 2048).requires_grad_(False)]


@pytest.mark.captures
def test_what_the_module_holds_without_registering_it_is_measured(tmp_path):
    guard = fit(WithTeacher(), tmp_path, epochs=1)
    assert guard.records[0].error_ratio == pytest.approx(0, abs=0.005)


class Collects(Net):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []

    def validation_step(self, batch, _):
        self.outputs.append(torch.ones(MIB // 4))

    def on_validation_epoch_end(self):
        joined = torch.cat(self.outputs)
        joined.mul(2).add(1)
        self.outputs.clear()


def test_hooks_at_the_end_of_validation_are_measured_with_what_the_epoch_left(tmp_path):
    record = fit(Collects(), tmp_path, epochs=1).records[0]
    assert record.measured.where == "hooks at the end of validation"
    assert 40 * MIB <= record.measured.peak_bytes < 41 * MIB  # 10 outputs, joined, doubled, and one more


class Profiles(Net):
    def training_step(self, batch, index):
        with torch.profiler.profile() as profiler:
            loss = super().training_step(batch, index)
        self.seen = {event.name for event in profiler.events()}
        return loss


def test_a_profiler_in_the_step_is_not_disturbed(tmp_path):
    module = Profiles()
    guard = fit(module, tmp_path, epochs=1)
    assert "aten::linear" in module.seen
    assert guard.records


class Own(torch.utils.data.Dataset):
    def __len__(self):
        return 20_000

    def __getitem__(self, index):
        return torch.full((20,), float(index)), torch.tensor([float(index)])


def collated(folder: str) -> list[tuple[int, int, int]]:
    """Bytes of a process, predicted and at most, and what it took, of two trainings whose samples are collated."""
    found = []
    for data in (TensorDataset(torch.randn(20_000, 20), torch.randn(20_000, 1)), Own()):
        guard = fit(Net(), folder, epochs=2, train=DataLoader(data, 10_000), budget="100MiB")
        assert guard.records[-1].error_ratio == pytest.approx(0, abs=0.05)
        assert any("objects of the samples" in note for note in guard.decision.notes)
        footprint, process = guard.decision.footprint, max(each.measured.process_bytes for each in guard.records)
        found.append((footprint.peak_device_bytes, footprint.most_device_bytes, process))
    return found


@pytest.mark.long  # as `benchmarks/overhead.py process`
def test_collating_many_small_samples_is_within_the_range(tmp_path):
    """Each sample is two tensors: some 600 bytes an object, and the data is 84. In a process that nobody has used."""
    code = f"import json; from {__name__} import collated; print(json.dumps(collated({str(tmp_path)!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    for likely, most, process in json.loads(done.stdout.splitlines()[-1]):
        assert 1.3 * likely < process < most
