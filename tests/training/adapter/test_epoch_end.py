"""The module's own hooks at the end of an epoch are predicted with what the epoch leaves, or named with a bound."""

from __future__ import annotations

import copy

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader
from torchmetrics import CatMetric

from lightning_memguard import DoesNotFitError, MemGuard
from lightning_memguard.training.adapter.epoch_end import only_computes
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


class Plain(Collects):
    def validation_step(self, batch, _):
        return self.net(batch)

    def on_validation_epoch_end(self):
        pass


class ReadsAgain(Plain):
    def on_train_epoch_end(self):
        for batch in self.trainer.train_dataloader:
            self.net(batch)


class Joins(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.joined = 0

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append(outputs)

    def on_validation_epoch_end(self, trainer, module):
        joined = torch.cat(self.seen)
        self.joined += len(joined) > 0
        self.seen.clear()


class JoinsInDictionary(Joins):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, list[torch.Tensor]] = {"out": []}

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.kept["out"].append(outputs.flatten(1))

    def on_validation_epoch_end(self, trainer, module):
        self.joined += torch.stack(self.kept["out"]).dim() > 0
        self.kept["out"].clear()


class JoinsInFile(Joins):
    def on_validation_epoch_end(self, trainer, module):
        torch.save(torch.cat(self.seen), "/dev/null")
        self.seen.clear()


class Reference(pl.Callback):
    def on_sanity_check_end(self, trainer, module):
        self.reference = torch.zeros(8, 512, 512)


def fit(module: pl.LightningModule, folder, guard: MemGuard, *callbacks: pl.Callback) -> MemGuard:
    data = DataLoader(torch.rand(1024, 32), 64)
    quiet_trainer(guard, *callbacks, default_root_dir=folder).fit(module, data, data)
    return guard


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.parametrize(
    ("kind", "callback", "least_mib", "hook"),
    [
        ("Collects", "", 40, "on_validation_epoch_end"),
        ("InDictionary", "", 40, "on_validation_epoch_end"),
        ("Fitted", "", 48, "on_validation_start"),
        *(("Plain", name, 16, "on_validation_epoch_end") for name in ("Joins", "JoinsInDictionary", "JoinsByMetric")),
    ],
)
def test_what_a_hook_joins_or_fits_is_predicted(tmp_path, kind, callback, least_mib, hook):
    callbacks = [globals()[callback]()] if callback else []
    record = fit(globals()[kind](), tmp_path, MemGuard("check"), *callbacks).records[0]
    assert record.measured.peak_bytes > least_mib * MIB
    assert record.error_ratio == pytest.approx(0, abs=0.05)
    assert record.predicted.module == f"{callback or kind}.{hook}"
    assert all(each.joined == 2 for each in callbacks), "after the sanity check and validation: a copy of it ran"


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.parametrize(
    ("kind", "callback", "words"),
    [
        ("ByHand", "", "ByHand.on_validation_epoch_end was not run on a copy"),
        ("AtEpochEnd", "", "AtEpochEnd.on_train_epoch_end"),
        ("FittedSlowly", "", "FittedSlowly.on_validation_start was not run on a copy (it makes"),
        ("Plain", "JoinsInFile", "JoinsInFile.on_validation_epoch_end"),
    ],
    ids=["needs values", "at the end of training", "a long loop", "does more than compute"],
)
def test_a_hook_that_is_not_run_on_a_copy_is_named_with_a_bound(tmp_path, kind, callback, words):
    guard = fit(globals()[kind](), tmp_path, MemGuard("check"), *([globals()[callback]()] if callback else []))
    assert any(words in note for note in guard.decision.notes)
    if not callback:
        assert guard.records[0].measured.peak_bytes <= guard.decision.footprint.most_device_bytes


@pytest.mark.usefixtures("at_own_size")
def test_what_a_callback_makes_in_the_sanity_check_is_predicted(tmp_path):
    data = DataLoader(torch.rand(1024, 32), 64)
    quiet_trainer(guard := MemGuard("check"), Reference(), default_root_dir=tmp_path, num_sanity_val_steps=1).fit(
        Plain(), data, data
    )
    assert guard.records[0].error_ratio == pytest.approx(0, abs=0.05)
    assert guard.records[0].measured.peak_bytes > 8 * MIB


def test_a_hook_that_reads_data_or_writes_files_does_more_than_compute():
    assert only_computes(AtEpochEnd(), "on_train_epoch_end", Plain())
    assert only_computes(Joins(), "on_validation_epoch_end", Plain())
    assert not only_computes(JoinsInFile(), "on_validation_epoch_end", Plain())
    assert not only_computes(ReadsAgain(), "on_train_epoch_end", Plain())


@pytest.mark.usefixtures("without_advice")
def test_a_refusal_names_the_list_that_the_hook_joins(tmp_path):
    with pytest.raises(DoesNotFitError) as caught:
        fit(Collects(), tmp_path, MemGuard(budget="40MiB"))
    assert "`self.outs`" in str(caught.value).partition("Batch size")[0]
    assert "in validation (Collects.on_validation_epoch_end)" in str(caught.value)


class Stops(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = True
        trainer.callbacks = [*trainer.callbacks]


class StopsItself(Plain):
    def training_step(self, batch, _):
        self.trainer.should_stop = True
        return super().training_step(batch, _)


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.parametrize(("kind", "callbacks"), [(Plain, [Stops()]), (StopsItself, [])])
def test_a_hook_that_ends_the_run_does_not_end_the_capture(tmp_path, kind, callbacks):
    peaks = []
    for module, others in ((Plain(), []), (kind(), callbacks)):
        trainer = quiet_trainer(guard := MemGuard("check"), *others, default_root_dir=tmp_path)
        trainer.accumulate_grad_batches = 4
        trainer.fit(module, DataLoader(torch.rand(64, 32), 4))
        peaks.append(guard.decision.footprint.peak_allocated_bytes)
    assert peaks[0] == peaks[1]


class Fitted(Plain):
    """Keeps 16 MiB of an epoch, and is fitted in a hook of validation, by a method of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = Bank()

    def training_step(self, batch, _):
        self.bank.rows.append(self.net(batch).detach())

    def on_validation_start(self):
        if self.bank.rows:
            self.bank.fit()


class Bank(torch.nn.Module):
    more = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[torch.Tensor] = []

    def fit(self):
        rows = torch.vstack(self.rows)
        self.spread = (rows - rows.mean(0)).square().mean(0)
        for _ in range(self.more):
            self.spread = self.spread[:8] + 1
        self.rows.clear()


class FittedSlowly(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.bank.more = 3_000


class JoinsByMetric(Joins):
    def __init__(self) -> None:
        super().__init__()
        self.metric = CatMetric()

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.metric.update(outputs)

    def on_validation_epoch_end(self, trainer, module):
        self.joined += self.metric.compute().dim() > 0
        self.metric.reset()


class Best(pl.Callback):
    best = None

    def on_validation_epoch_end(self, trainer, module):
        self.best = copy.deepcopy(module.state_dict())


class BestByValue(Plain):
    best = None

    def on_validation_epoch_end(self):
        if not torch.rand(1).item() > 2:
            self.best = {name: value.clone() for name, value in self.state_dict().items()}


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.parametrize(("kind", "callbacks"), [(Plain, [Best()]), (BestByValue, [])])
def test_a_copy_of_the_weights_that_is_kept_is_counted(tmp_path, kind, callbacks):
    module = kind()
    module.net = torch.nn.Linear(2048, 2048)
    data = DataLoader(torch.rand(16, 2048), 4)
    trainer = quiet_trainer(guard := MemGuard("check"), *callbacks, default_root_dir=tmp_path, max_epochs=2)
    trainer.fit(module, data, data)
    assert guard.records[-1].predicted.parts["callbacks"] >= 16 * MIB
    assert guard.records[-1].error_ratio == pytest.approx(0, abs=0.05)
