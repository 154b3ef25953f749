"""The module's own hooks at the end of an epoch are predicted with what the epoch leaves, or named with a bound."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from lightning_memguard import DoesNotFitError, MemGuard
from lightning_memguard.units import MIB
from tests.training.quiet import quiet_trainer


class Collects(pl.LightningModule):
    """Each of 16 validation batches leaves 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(32, 4096)
        self.outs: list[torch.Tensor] = []

    def training_step(self, batch, _):
        return self.net(batch).sum()

    def validation_step(self, batch, _):
        self.outs.append(self.net(batch))

    def on_validation_epoch_end(self):
        joined = torch.cat(self.outs).softmax(-1)
        self.log("entropy", -(joined * joined.log()).sum(-1).mean())
        self.outs.clear()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


class InDictionary(Collects):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, list[torch.Tensor]] = {"out": []}

    def validation_step(self, batch, _):
        self.kept["out"].append(self.net(batch))

    def on_validation_epoch_end(self):
        joined = torch.stack(self.kept["out"])
        self.log("spread", (joined - joined.mean()).abs().max())
        self.kept["out"].clear()


class ByHand(Collects):
    """Needs values, which no copy on fake tensors has."""

    def on_validation_epoch_end(self):
        joined = torch.cat(self.outs)
        if joined.sum().item() != 0:
            self.log("mean", joined.mean())
        self.outs.clear()


class AtEpochEnd(Collects):
    def training_step(self, batch, _):
        out = self.net(batch)
        self.outs.append(out.detach())
        return out.sum()

    def validation_step(self, batch, _):
        pass

    def on_validation_epoch_end(self):
        pass

    def on_train_epoch_end(self):
        torch.cat(self.outs).mean()
        self.outs.clear()


class Joins(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append(batch)

    def on_validation_epoch_end(self, trainer, module):
        torch.cat(self.seen)
        self.seen.clear()


def fit(module: pl.LightningModule, folder, guard: MemGuard, *callbacks: pl.Callback) -> MemGuard:
    data = DataLoader(torch.rand(1024, 32), 64)
    quiet_trainer(guard, *callbacks, default_root_dir=folder).fit(module, data, data)
    return guard


@pytest.mark.parametrize("kind", [Collects, InDictionary])
def test_what_a_hook_joins_is_predicted(tmp_path, kind):
    record = fit(kind(), tmp_path, MemGuard("check")).records[0]
    assert record.measured.peak_bytes > 40 * MIB
    assert record.error_ratio == pytest.approx(0, abs=0.05)
    assert record.predicted.module == f"{kind.__name__}.on_validation_epoch_end"


def test_a_hook_that_needs_values_is_named_with_a_bound(tmp_path):
    guard = fit(ByHand(), tmp_path, MemGuard("check"))
    assert any("ByHand.on_validation_epoch_end was not run on a copy" in note for note in guard.decision.notes)
    assert guard.records[0].measured.peak_bytes <= guard.decision.footprint.most_device_bytes


def test_a_hook_at_the_end_of_training_is_within_the_bound_and_named(tmp_path):
    guard = fit(AtEpochEnd(), tmp_path, MemGuard("check"))
    assert guard.records[0].measured.peak_bytes <= guard.decision.footprint.most_device_bytes
    assert any("AtEpochEnd.on_train_epoch_end" in note for note in guard.decision.notes)


def test_a_callback_that_joins_what_it_collected_is_named(tmp_path):
    guard = fit(AtEpochEnd(), tmp_path, MemGuard("check"), Joins())
    assert any("Joins.on_validation_epoch_end" in note for note in guard.decision.notes)


def test_a_refusal_names_the_list_that_the_hook_joins(tmp_path):
    with pytest.raises(DoesNotFitError) as caught:
        fit(Collects(), tmp_path, MemGuard(budget="40MiB"))
    assert "`self.outs`" in str(caught.value).partition("Batch size")[0]
    assert "in validation (Collects.on_validation_epoch_end)" in str(caught.value)
