"""MemGuard in a real Trainer: what it chooses, what it leaves, what it says."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
import subprocess
import sys
import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_utilities.core import rank_zero
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import DoesNotFitError, MemGuard, MemGuardError
from lightning_memguard.training.run import callback
from lightning_memguard.training.run.guarded_run import GuardedRun
from lightning_memguard.units import KIB
from tests.long import long_but

pytestmark = pytest.mark.usefixtures("taped")


def sizes_seen(module: Any) -> list[int]:
    return [int(size) for size in module.sizes]


class Sized(pl.LightningModule):
    """Notes the size of each batch it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 4)
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append(len(batch[0]))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Lost(Sized):
    """Its loss is not a number."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * math.nan


@pytest.mark.parametrize("program", ["pytorch_lightning", "lightning.pytorch"])
def test_messages_stay_those_of_the_lightning_that_the_program_imports(
    monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """The packages share one logger for messages, and each sets it as it is imported."""
    monkeypatch.setattr(rank_zero, "log", "the program's")
    for package in {"pytorch_lightning", "lightning.pytorch"} - {program}:
        monkeypatch.delitem(sys.modules, package)

    def import_module(name: str) -> Any:
        if name == rank_zero.__name__:
            return rank_zero
        if name not in sys.modules:
            rank_zero.log = warnings.formatwarning = name
        return SimpleNamespace(Callback=type(name, (), {}))

    monkeypatch.setattr(callback.importlib, "import_module", import_module)
    shown = warnings.formatwarning
    assert len(callback._callback_classes()) == 2
    assert (rank_zero.log, warnings.formatwarning) == ("the program's", shown)


@pytest.mark.captures
@pytest.mark.parametrize("kind", [Sized, Lost])
def test_a_plain_loader_is_trained_at_the_chosen_size(trainer: Any, dataset: TensorDataset, kind: type[Sized]) -> None:
    module, guard = kind(), MemGuard(batch_size="largest", max_batch_size=40)
    loader = DataLoader(dataset, batch_size=4)
    trainer(guard, detect_anomaly=False).fit(module, train_dataloaders=loader)
    assert (guard.decision.requested_batch_size, guard.decision.batch_size) == (4, 40)
    assert sizes_seen(module) == [40, 40, 20]
    assert loader.batch_size == 4


def test_a_budget_sets_the_size_and_the_peak_keeps_within_it(decided: Any, dataset: TensorDataset) -> None:
    loader = DataLoader(dataset, batch_size=2)
    decision = decided(loader, batch_size="largest", budget=60 * KIB, margin=0.0)
    assert decision.limited_by == "memory"
    assert decision.footprint.peak_device_bytes <= 60 * KIB
    assert 2 < decision.batch_size < 100


@pytest.mark.usefixtures("without_advice")
def test_too_small_a_budget_stops_the_fit_before_it_starts(trainer: Any, small: Any, dataset: TensorDataset) -> None:
    module = small()
    with pytest.raises(DoesNotFitError, match=r"Batch size 1 needs .*; .* offers 19.0 KiB after a 5% margin"):
        trainer(MemGuard(budget=20 * KIB)).fit(module, train_dataloaders=DataLoader(dataset, batch_size=2))


def test_check_changes_nothing_and_warns_where_it_does_not_fit(trainer: Any, dataset: TensorDataset) -> None:
    module, guard = Sized(), MemGuard(mode="check", budget=1 * KIB)
    with pytest.warns(UserWarning, match="batch size 50 does NOT fit"):
        trainer(guard).fit(module, train_dataloaders=DataLoader(dataset, batch_size=50))
    assert sizes_seen(module) == [50, 50]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_both_packages_train_guarded(package: str, dataset: TensorDataset) -> None:
    theirs = importlib.import_module(package)

    class Module(theirs.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(16, 4)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    guard = MemGuard(batch_size="largest", max_batch_size=20)
    trainer = theirs.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=[guard], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), train_dataloaders=DataLoader(dataset, batch_size=4))
    assert trainer.num_training_batches == 5
    assert [record.epoch for record in guard.records] == [0, 1]


def test_a_batch_of_more_samples_than_there_are_stays_as_it_is(trainer: Any, dataset: TensorDataset) -> None:
    """Schedules and rates that follow the size, and an epoch without a full batch, are those of the user."""
    module, guard = OwnLoader(batch_size=400), MemGuard(batch_size="largest")
    trainer(guard, max_epochs=1).fit(module, train_dataloaders=DataLoader(dataset, 400))
    assert (guard.decision.batch_size, guard.decision.limited_by) == (100, "dataset")
    assert module.size_while_training == 400
    skipped = Sized()
    trainer(MemGuard(batch_size="largest"), max_epochs=1).fit(
        skipped, train_dataloaders=DataLoader(dataset, 400, drop_last=True)
    )
    assert skipped.sizes == []


def test_a_small_loader_makes_no_other_loaders_batches_smaller(trainer: Any, dataset: TensorDataset) -> None:
    class Both(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch[1], batch_idx)

    module, few = Both(), TensorDataset(*dataset[:5])
    trainer(MemGuard(batch_size="largest", max_batch_size=20)).fit(
        module, [DataLoader(few, 20), DataLoader(dataset, 20)]
    )
    assert sizes_seen(module)[:5] == [20] * 5


class OwnLoader(Sized):
    """Builds its data and its net in setup, and its loader in a hook."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = None  # type: ignore[assignment]

    def setup(self, stage: str) -> None:
        self.data = TensorDataset(torch.randn(60, 16), torch.randint(0, 4, (60,)))
        self.net = nn.Linear(16, 4)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.hparams["batch_size"], shuffle=True)

    def on_train_start(self) -> None:
        self.size_while_training = self.hparams_initial["batch_size"]


def test_a_module_that_makes_its_own_loader_and_layers(trainer: Any) -> None:
    module, guard = OwnLoader(), MemGuard(batch_size="largest", max_batch_size=20)
    trainer(guard).fit(module)
    assert sizes_seen(module) == [20, 20, 20]
    assert module.size_while_training == 20
    assert module.hparams["batch_size"] == module.hparams_initial["batch_size"] == 4


class FixedHook(OwnLoader):
    """The hook writes its size down, and reads it from nowhere."""

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, 4)


def test_a_hook_with_a_size_of_its_own_is_resized(trainer: Any) -> None:
    module, guard = FixedHook(), MemGuard(batch_size="largest", max_batch_size=30)
    fit = trainer(guard, reload_dataloaders_every_n_epochs=1, max_epochs=2)
    fit.fit(module)
    assert sizes_seen(module) == [30, 30, 30, 30]


class Locked(TensorDataset):
    """Cannot be open twice, as LMDB cannot."""

    is_open = False

    def __init__(self) -> None:
        super().__init__(torch.randn(60, 16), torch.randint(0, 4, (60,)))
        assert not Locked.is_open
        Locked.is_open = True

    def __del__(self) -> None:
        Locked.is_open = False


class Opening(pl.LightningDataModule):
    """Opens its data in the hooks."""

    def train_dataloader(self) -> Any:
        return DataLoader(Locked(), 4, shuffle=True)


@pytest.mark.parametrize(
    "settings", [{"batch_size": "largest", "max_batch_size": 20}, {"max_batch_size": 4}, {"mode": "check"}]
)
def test_what_a_hook_made_for_us_is_gone_before_the_run_makes_its_own(
    trainer: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Locked, "is_open", False)
    module, guard = Sized(), MemGuard(**settings)
    trainer(guard).fit(module, datamodule=Opening())
    assert guard.decision is not None
    assert guard.decision.footprint is not None
    assert sizes_seen(module)[:2] == [settings.get("max_batch_size", 4)] * 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_a_hook_that_works_only_once_says_that_we_called_it(
    trainer: Any, dataset: TensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no child can be forked: a child's call leaves the run's own the first."""
    monkeypatch.setattr("lightning_memguard.training.data.copies.can_fork", lambda: False)
    loaders = [DataLoader(dataset, batch_size=4)]
    data = pl.LightningDataModule()
    data.train_dataloader = loaders.pop  # type: ignore[method-assign]
    with pytest.raises(IndexError) as error:
        trainer(MemGuard()).fit(Sized(), datamodule=data)
    note = "MemGuard called the datamodule's train_dataloader() once before. If it works only once, pass the loader."
    assert error.value.__notes__ == [note]


class Layers(Sized):
    """Is built in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Linear(16, 4)


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.captures
def test_a_module_built_in_configure_model(trainer: Any, dataset: TensorDataset) -> None:
    module, guard = Layers(), MemGuard(mode="check")
    trainer(guard).fit(module, train_dataloaders=DataLoader(dataset, batch_size=10))
    assert guard.decision.footprint.parts["parameters"] == (16 * 4 + 4) * 4
    assert guard.decision.footprint.method == "fake"


class MadeOf(Sized):
    """Its layers come from a function, in ``setup`` or before."""

    def __init__(self, make: Any, *, late: bool = False) -> None:
        super().__init__()
        self.late, self.make = late, make
        self.net = nn.Identity() if late else make()

    def setup(self, stage: str) -> None:
        self.net = self.make() if self.late else self.net

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def known_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))


def lazy_layers() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(64), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(4))


def scripted_layers() -> Any:
    return torch.jit.script(known_layers())


@pytest.mark.captures
@pytest.mark.usefixtures("at_own_size")
def test_lazy_and_scripted_layers_are_predicted(trainer: Any, dataset: TensorDataset) -> None:
    """Lazy ones take as much as others; from its second run on, a scripted step keeps more for its backward pass."""

    def peak(module: Any) -> int:
        guard = MemGuard("check")
        trainer(guard, max_epochs=1).fit(module, DataLoader(dataset, batch_size=40))
        assert (guard.decision.batch_size, guard.decision.footprint.method) == (40, "fake")
        return guard.decision.footprint.peak_allocated_bytes

    known = peak(MadeOf(known_layers))
    assert peak(MadeOf(lazy_layers, late=True)) == known
    assert peak(MadeOf(scripted_layers)) > known


def test_schedules_see_the_chosen_size(trainer: Any, dataset: TensorDataset) -> None:
    """A schedule that reads ``estimated_stepping_batches`` plans for the real number of steps."""

    class Scheduled(Sized):
        def configure_optimizers(self) -> Any:
            self.planned = self.trainer.estimated_stepping_batches
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.planned)]

    module = Scheduled()
    trainer(MemGuard(batch_size="largest", max_batch_size=25), max_epochs=3).fit(
        module, train_dataloaders=DataLoader(dataset, batch_size=2)
    )
    assert module.planned == 12


def test_the_effective_batch_size_is_kept_by_accumulation(trainer: Any, dataset: TensorDataset) -> None:
    guard = MemGuard(max_batch_size=10, keep_effective_batch_size=40)
    fit = trainer(guard)
    fit.fit(Sized(), train_dataloaders=DataLoader(dataset, batch_size=4))
    assert guard.decision.batch_size * guard.decision.accumulate_grad_batches == 40
    assert fit.global_step == 3, "ten batches, four a step"
    assert fit.accumulate_grad_batches == 1, "as it was before the run"


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.captures
def test_records_and_metrics_once_an_epoch(trainer: Any, dataset: TensorDataset) -> None:
    """The design's names are in the row of the epoch's own metrics, with its step; other callbacks can watch them."""

    class Kept(pl.loggers.logger.DummyLogger):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[tuple[int, dict[str, float]]] = []

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            self.rows.append((step, metrics))

    class Logging(Sized):
        def log(self, name: str, value: Any) -> None:  # type: ignore[override]
            assert not name.startswith("memguard")
            super().log(name, value, on_step=True, on_epoch=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert not [name for name in self.trainer.fit_loop.epoch_loop._results if "memguard" in name]
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    logger, guard = Kept(), MemGuard(mode="check")
    stop = pl.callbacks.EarlyStopping("memguard/actual_peak_gib", patience=100)
    fit = trainer(guard, stop, logger=logger, max_epochs=3, log_every_n_steps=1)
    fit.fit(Logging(), train_dataloaders=DataLoader(dataset, batch_size=50))
    rows = [(step, row) for step, row in logger.rows if "memguard/headroom_gib" in row]
    assert [(step, row["epoch"], "loss_epoch" in row) for step, row in rows] == [(1, 0, 1), (3, 1, 1), (5, 2, 1)]
    assert "memguard/error_pct" in rows[0][1], "tensors are compared with tensors, however few they are"
    record, row = guard.records[-1], rows[-1][1]
    assert row["memguard/batch_size"] == 50
    assert row["memguard/predicted_peak_gib"] * 2**30 == record.predicted.peak_device_bytes
    assert row["memguard/parts/parameters_gib"] * 2**30 == record.measured.parts["parameters"] == 272
    assert {"memguard/predicted_peak_gib", "memguard/actual_peak_gib"} <= fit.callback_metrics.keys()


def test_the_trainer_gets_its_own_data_source_back(trainer: Any, dataset: TensorDataset) -> None:
    """A second fit without the guard's choice trains at the loader's own size."""
    guard, module = MemGuard(batch_size="largest", max_batch_size=50), Sized()
    fit = trainer(guard)
    before = type(fit.fit_loop._data_source)
    fit.fit(module, train_dataloaders=DataLoader(dataset, batch_size=4))
    assert type(fit.fit_loop._data_source) is before
    fit.callbacks.remove(guard)
    fit.fit_loop.max_epochs = 2
    module.sizes.clear()
    fit.fit(module, train_dataloaders=DataLoader(dataset, batch_size=20))
    assert set(sizes_seen(module)) == {20}


# -- bad input: each a clear message, nothing lost


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": -1}, "^budget=-1 is not a positive number of bytes"),
        ({"budget": "lots"}, "^budget='lots' is not a quantity of bytes"),
        ({"host_budget": 2.5e9}, "^host_budget=2500000000.0 is not a number of bytes"),
        ({"learn": "no"}, "learn='no' is unknown; pass True or False"),
        ({"margin": 1.0}, r"margin=1.0 is outside \[0, 1\)"),
        ({"margin": -0.1}, r"margin=-0.1 is outside \[0, 1\)"),
        ({"min_batch_size": 8, "max_batch_size": 4}, "min_batch_size=8 is above max_batch_size=4"),
        ({"multiple_of": 0}, "multiple_of=0 is not a count"),
        ({"mode": "guess"}, "mode='guess' is unknown"),
        ({"batch_size": "fast"}, "batch_size='fast' is unknown"),
        ({"prefer": "smallest_fast"}, r'prefer=.* is gone: pass batch_size="largest" or "fastest"'),
        ({"keep_effective_batch_size": "if smaller"}, "pass a number of samples, 'if_smaller' or None"),
        ({"host_budget": 64}, "host_budget=64 is 64 bytes"),
        *[({"min_steps_per_epoch": wrong}, "min_steps_per_epoch=.* is not a count") for wrong in (0, -1, 1.5, "50")],
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MemGuardError, match=message):
        MemGuard(**settings)


def test_a_budget_beyond_the_device_is_warned_of(begun: Any, dataset: TensorDataset) -> None:
    with pytest.warns(UserWarning, match="TiB"):
        begun(Sized(), DataLoader(dataset, batch_size=50), mode="check", budget="900TiB")


def test_an_empty_dataset(begun: Any) -> None:
    empty = TensorDataset(torch.zeros(0, 16), torch.zeros(0, dtype=torch.long))
    with pytest.warns(UserWarning, match="is empty: there is no sample"):
        begun(Sized(), DataLoader(empty, batch_size=4))


def test_a_batch_without_tensors(trainer: Any) -> None:
    class Words(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(torch.ones(len(batch), 16)).sum()

    words: Any = ["to", "be", "or", "not"]
    with pytest.warns(UserWarning, match="holds no tensor"):
        trainer(MemGuard()).fit(Words(), train_dataloaders=DataLoader(words, batch_size=2))


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.captures
def test_a_step_that_raises_on_the_copy_still_trains(trainer: Any, dataset: TensorDataset) -> None:
    class Picky(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if type(self.trainer) is not pl.Trainer:
                raise RuntimeError("only for the real thing")
            return super().training_step(batch, batch_idx)

    module, guard = Picky(), MemGuard(batch_size="largest")
    with pytest.warns(UserWarning, match="only for the real thing"):
        trainer(guard).fit(module, train_dataloaders=DataLoader(dataset, batch_size=50))
    assert sizes_seen(module) == [50, 50]
    assert guard.decision.footprint.method == "states"
    assert guard.decision.footprint.parts["gradients"] == 272


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.captures
def test_a_step_that_returns_none(trainer: Any, dataset: TensorDataset) -> None:
    class Nothing(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.sizes.append(len(batch[0]))
            return None

    module, guard = Nothing(), MemGuard("check")
    trainer(guard).fit(module, train_dataloaders=DataLoader(dataset, batch_size=50))
    assert sizes_seen(module) == [50, 50]
    assert "no backward pass" in " ".join(guard.decision.footprint.notes)


@pytest.mark.parametrize(
    ("settings", "returned"),
    [
        ({"budget": 60 * KIB, "margin": 0.0}, True),
        ({"budget": 60 * KIB, "margin": 0.0, "keep_effective_batch_size": 90}, True),
        ({"max_batch_size": 20}, False),
        ({"mode": "check", "budget": 60 * KIB}, False),
    ],
    ids=["memory is the limit", "an effective size below it", "plenty of memory", "check"],
)
def test_freed_memory_is_returned_only_where_what_is_kept_could_pass_the_budget(
    begun: Any,
    small: Any,
    dataset: TensorDataset,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    returned: bool,
) -> None:
    """Each time it is turned on it is turned off again when the fit is over."""
    calls: list[str] = []

    def turn_on(_: torch.device) -> Any:
        calls.append("on")
        return lambda: calls.append("off")

    monkeypatch.setattr("lightning_memguard.training.run.guarded_run.return_freed_memory", turn_on)
    run = begun(small(), DataLoader(dataset, batch_size=4), **{"batch_size": "largest", **settings})
    assert calls == (["on"] if returned else [])
    run.close()
    assert calls == (["on", "off"] if returned else [])


def test_a_subclass_may_have_hooks_that_the_guard_has_no_use_for(trainer: Any, dataset: TensorDataset) -> None:
    """Lightning skips them otherwise, which saves time at each batch."""

    class Counting(MemGuard):
        batches = 0

        def on_train_batch_end(self, *arguments: Any) -> None:
            super().on_train_batch_end(*arguments)
            self.batches += 1

    guard = Counting("check")
    trainer(guard).fit(Sized(), train_dataloaders=DataLoader(dataset, batch_size=25))
    assert guard.batches == 4
    assert guard.on_after_backward is None


# -- a failure of the guard's own


class Evaluated(Sized):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    test_step = predict_step = validation_step


_OUR_WORK = [name for name, value in vars(GuardedRun).items() if callable(value) and not name.startswith("__")]


@pytest.mark.parametrize("errors", ["default", "error"])
@pytest.mark.parametrize("stage", ["fit", "test"])
def test_what_fails_in_a_hook_of_ours_is_warned_of_once_and_stops_nothing(
    trainer: Any, dataset: TensorDataset, monkeypatch: pytest.MonkeyPatch, stage: str, errors: Any, capfd: Any
) -> None:
    """Everything fails, in every hook that a run calls; where warnings are errors, a line is written instead."""
    calls: list[str] = []

    def failing(name: str) -> Any:
        def fail(*_: Any) -> Any:
            calls.append(name)
            raise OSError(f"no {name} today")

        return fail

    for name in _OUR_WORK:
        monkeypatch.setattr(GuardedRun, name, failing(name))
    module, guard = Evaluated(), MemGuard(batch_size="largest", max_batch_size=40)
    run = trainer(guard, max_epochs=2, limit_val_batches=1)
    loader = DataLoader(dataset, batch_size=50)
    with warnings.catch_warnings(record=True) as found:
        warnings.filterwarnings(errors, message="MemGuard")
        run.fit(module, loader, loader) if stage == "fit" else run.test(module, loader, verbose=False)
    assert stage != "fit" or sizes_seen(module) == [50] * 4
    said = [str(each.message) for each in found if "MemGuard failed in" in str(each.message)]
    written = said if errors == "default" else capfd.readouterr().err.splitlines()
    lines = [line for line in written if "MemGuard" in line]
    assert [line for line in lines if "MemGuard failed in setup" in line]
    assert len(set(lines)) == len(lines)
    assert "apply" in calls


def test_every_hook_is_guarded() -> None:
    """The test above stops at setup; each hook by itself may find a run that fails."""

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise OSError(name)

    hooks = {name for name in vars(MemGuard) if name.startswith("on_") or name in vars(pl.Callback)}
    hooks = {name for name in hooks if not name.startswith("__")}
    assert hooks <= {*vars(pl.Callback)}, "a hook that Lightning does not call"
    run = pl.Trainer(accelerator="cpu", logger=False)
    assert {"setup", "on_fit_start", "on_train_batch_start", "on_save_checkpoint", "teardown"} <= hooks
    for hook in hooks:
        guard: Any = MemGuard(batch_size="largest")
        guard._run = guard._last_fit = Broken()
        call = functools.partial(getattr(MemGuard, hook), guard, run, pl.LightningModule(), *_arguments(hook))
        with pytest.warns(UserWarning, match=f"MemGuard failed in {getattr(MemGuard, hook).__name__}"):
            call()
        call()


def _arguments(hook: str) -> tuple[Any, ...]:
    if hook.endswith("_batch_start"):
        return None, 0
    more: dict[str, Any] = {"on_exception": MemoryError(), "setup": "fit", "teardown": "fit"}
    if hook in ("on_save_checkpoint", "on_load_checkpoint"):
        return ({},)
    if hook in ("on_before_optimizer_step", "on_before_backward"):
        return (None,)
    return (more[hook],) if hook in more else ()


def test_a_step_that_takes_the_iterator(trainer: Any, dataset: TensorDataset) -> None:
    """Lightning cannot tell the size of its batches, and refuses ``self.log`` without one."""

    class Iterating(Sized):
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
            batch, index, _ = next(dataloader_iter)
            return super().training_step(batch, index)

    module, guard = Iterating(), MemGuard("check")
    fit = trainer(guard, max_epochs=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit.fit(module, DataLoader(dataset, batch_size=50))
    assert sizes_seen(module) == [50] * 4
    assert not [each for each in found if "MemGuard failed" in str(each.message)]
    measured = guard.records[-1].measured.peak_bytes / 2**30
    assert 0 < fit.callback_metrics["memguard/actual_peak_gib"].item() <= measured  # its end counts too


# -- settings of the Trainer, and callbacks that try things


@pytest.mark.captures
@pytest.mark.skipif(not hasattr(pl.Trainer(logger=False), "_val_check_time_interval"), reason="not in this Lightning")
@pytest.mark.parametrize("every", long_but([{"hours": 1}], [timedelta(hours=1), "00:01:00:00", {"hours": 1}]), ids=str)
def test_validation_by_time(trainer: Any, dataset: TensorDataset, every: Any) -> None:
    """It may come between the two batches of a step, next to gradients."""
    guard, loader = MemGuard(batch_size="largest", max_batch_size=20), DataLoader(dataset, batch_size=4)
    trainer(guard, val_check_interval=every, accumulate_grad_batches=2).fit(Evaluated(), loader, loader)
    assert (guard.decision.batch_size, guard.decision.because) == (20, "")
    profile = guard._last_run.tuning.profile  # type: ignore[union-attr]
    assert profile.validation.prediction.footprint_at(4).parts["gradients"] == 272


class WithRate(OwnLoader):
    """Has all that a finder asks for; notes the sizes it is given."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__(batch_size)
        self.lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("by", ["callback", "Tuner"])
def test_a_search_for_a_batch_size_is_left_alone(trainer: Any, by: str) -> None:
    """Its trials would all run at the size that MemGuard chose."""
    found = {}
    for guards in ([], [MemGuard(batch_size="largest", max_batch_size=50)]):
        module = WithRate()
        finder = [pl.callbacks.BatchSizeFinder(max_trials=3, steps_per_trial=1)] if by == "callback" else []
        fit = trainer(*finder, *guards)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if by == "callback":
                fit.fit(module)
            else:
                pl.tuner.Tuner(fit).scale_batch_size(module, max_trials=3, steps_per_trial=1)
        found[len(guards)] = module.hparams["batch_size"], sizes_seen(module)
        lines = [str(each.message) for each in said if "BatchSizeFinder chooses its batch size" in str(each.message)]
        assert len(lines) == len(guards)
    assert found[0] == found[1]


@pytest.mark.parametrize("by", ["callback", "Tuner"])
def test_a_search_for_a_learning_rate_is_no_resume(trainer: Any, dataset: TensorDataset, by: str) -> None:
    """It restores a checkpoint that it saved; and it tries one rate a step, while there are any."""
    guard, module = MemGuard(batch_size="largest"), WithRate()
    fit = trainer(*([pl.callbacks.LearningRateFinder()] if by == "callback" else []), guard, max_epochs=6)
    with pytest.warns(UserWarning, match=r"tries 100 learning rates, .* at batch size 60 this run has 6 steps"):
        fit.fit(module) if by == "callback" else pl.tuner.Tuner(fit).lr_find(module)
    assert (guard.decision.batch_size, guard.decision.limited_by, guard.decision.because) == (60, "dataset", "")


class Staged(Sized):
    def setup(self, stage: Any) -> None:
        self.stages = [*getattr(self, "stages", []), stage.value]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(100, 16), torch.randint(0, 4, (100,))), batch_size=4)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])


@pytest.mark.captures
def test_setup_gets_the_stage_as_lightning_passes_it(trainer: Any) -> None:
    module, guard = Staged(), MemGuard(batch_size="largest", max_batch_size=20)
    trainer(guard, limit_val_batches=1).fit(module)
    assert (guard.decision.outcome, guard.decision.batch_size, guard.decision.because) == ("tuned", 20, "")
    assert guard.decision.validation_batch_size == 4
    assert module.stages == ["fit"]


# What is shown


@pytest.mark.parametrize(
    ("level", "budget", "most"), [(logging.INFO, None, 2), (logging.INFO, 100 * KIB, 12), (logging.WARNING, None, 0)]
)
def test_a_fit_takes_two_lines_or_twelve_and_an_evaluation_two_unless_the_level_silences_both(
    trainer: Any,
    small: Any,
    dataset: TensorDataset,
    caplog: pytest.LogCaptureFixture,
    level: int,
    budget: Any,
    most: int,
) -> None:
    """A table comes with the first line where memory is tight."""

    def lines() -> list[str]:
        messages = [record.getMessage() for record in caplog.records if record.name == "lightning_memguard"]
        return "\n".join(messages).splitlines()

    module = small(validation_step=lambda batch: None, test_step=lambda batch: None)
    module.net = nn.Sequential(nn.BatchNorm1d(16), *module.net)
    with caplog.at_level(level, "lightning_memguard"):
        run = trainer(MemGuard(batch_size="largest", budget=budget, margin=0.0), max_epochs=3)
        run.fit(module, DataLoader(dataset, 4), DataLoader(dataset, 4))
        shown = lines()
        assert most // 2 <= len(shown) <= most
        assert len(shown) - len(set(shown)) == (most == 12), "the table has two rules"
        caplog.clear()
        run.test(module, DataLoader(dataset, 4), verbose=False)
        assert len(lines()) == min(2, most)


ALIASES = {
    "one package under both names": 'sys.modules["pytorch_lightning"] = lightning.pytorch',
    "the other way round": 'import pytorch_lightning; sys.modules["lightning.pytorch"] = pytorch_lightning',
    "a class that inherits from the other": (
        'shim = types.ModuleType("pytorch_lightning"); sys.modules["pytorch_lightning"] = shim\n'
        'shim.Callback = type("Callback", (lightning.pytorch.Callback,), {})'
    ),
    "a package without callbacks": 'sys.modules["pytorch_lightning"] = types.ModuleType("pytorch_lightning")',
}


IN_FORKS = """
import os, sys, types
import lightning.pytorch

failed = []
for name, lines in {aliases!r}.items():
    child = os.fork()
    if child == 0:
        exec(lines)
        from lightning_memguard import MemGuard
        MemGuard()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
assert not failed, failed
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs to fork")
def test_one_lightning_package_may_stand_for_the_other() -> None:
    """Each in a fork of a process that has imported only one: the import takes longer than the rest."""
    subprocess.run([sys.executable, "-c", IN_FORKS.format(aliases=ALIASES)], check=True)
