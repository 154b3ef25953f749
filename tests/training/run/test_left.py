"""What batches leave behind within an epoch is named first where a run does not fit because of it."""

from __future__ import annotations

import inspect

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from lightning_memguard import DoesNotFitError, MemGuard
from tests.training.quiet import quiet_trainer

pytestmark = pytest.mark.usefixtures("without_advice")

DATA = torch.rand(2048, 64)


class Carries(pl.LightningModule):
    """Carries its state to the next batch with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.GRUCell(64, 256)
        self.out = torch.nn.Linear(256, 1)
        self.h: torch.Tensor | None = None

    def training_step(self, batch, _):
        h = self.h if self.h is not None and len(self.h) == len(batch) else batch.new_zeros(len(batch), 256)
        for _ in range(8):
            h = self.cell(batch, h)
        self.h = h
        return self.out(h.detach()).sum()

    def on_train_epoch_end(self):
        self.h = None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


class Appends(pl.LightningModule):
    """Appends what it computed to a list, cleared at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(64, 8192)
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch, _):
        out = self.net(batch)
        self.seen.append(out.detach())
        return out.sum()

    def on_train_epoch_end(self):
        self.seen.clear()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


class Collects(Appends):
    """Trains nothing: its step keeps what it computed and returns None, and the epoch's end joins it."""

    def configure_optimizers(self):
        return None

    def training_step(self, batch, _):
        with torch.no_grad():
            self.seen.append(self.net(batch))

    def on_train_epoch_end(self):
        torch.cat(self.seen).mean()
        self.seen.clear()


class Predicts(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(64, 8192)

    def predict_step(self, batch, _):
        return self.net(batch)


def trainer(folder, guard: MemGuard) -> pl.Trainer:
    return quiet_trainer(guard, default_root_dir=folder)


def line_of(cls: type, text: str) -> int:
    lines, first = inspect.getsourcelines(cls)
    return first + next(place for place, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("kind", "holder", "put", "remedy"),
    [
        pytest.param(Carries, "self.h", "self.h = h", "`.detach()`", marks=pytest.mark.long),
        (Appends, "self.seen", ".append(", "Keep less there"),
    ],
)
def test_a_refusal_names_the_attribute_its_line_and_the_remedy_first(tmp_path, kind, holder, put, remedy):
    with pytest.raises(DoesNotFitError) as caught:
        trainer(tmp_path, MemGuard(budget="48MiB")).fit(kind(), DataLoader(DATA, 64))
    first = str(caught.value).partition(". Batch size")[0]
    assert first.startswith(
        f"What each training batch leaves in `{holder}` (test_left.py:{line_of(kind, put)}) adds up"
    )
    assert remedy in first


def test_a_refusal_names_what_is_less_than_half_if_the_rest_would_fit(tmp_path):
    class WithHead(Appends):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(4096, 4096)  # as large as what an epoch of 256 samples leaves, three times

        def training_step(self, batch, _):
            return super().training_step(batch, _) + self.head.weight.sum()

    with pytest.raises(DoesNotFitError) as caught:
        trainer(tmp_path, MemGuard(budget="144MiB")).fit(WithHead(), DataLoader(DATA[:1024], 64))
    assert str(caught.value).startswith("What each training batch leaves in `self.seen`"), caught.value


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.parametrize("by_hand", [False, True])
def test_what_a_step_that_returns_none_keeps_of_an_epoch_is_predicted(tmp_path, by_hand):
    guard, module = MemGuard("check", budget="1GiB"), Collects()
    module.automatic_optimization = not by_hand
    trainer(tmp_path, guard).fit(module, DataLoader(DATA, 64))
    kept = len(DATA) * 8192 * 4
    assert 2 * kept < guard.decision.footprint.peak_allocated_bytes < 2.1 * kept, "once more while it is joined"
    assert any("Collects.on_train_epoch_end takes" in note for note in guard.decision.notes)


def test_predictions_that_do_not_fit_are_named_with_the_argument_that_keeps_none_with_which_they_fit(tmp_path):
    with pytest.raises(DoesNotFitError, match="return_predictions=False keeps none"):
        trainer(tmp_path, MemGuard(budget="40MiB")).predict(Predicts(), DataLoader(DATA, 64))
    for keeps in (True, False):
        guard = MemGuard("check", budget="40MiB")
        trainer(tmp_path, guard).predict(Predicts(), DataLoader(DATA, 64), return_predictions=keeps)
        assert ("return_predictions=False" in "".join(guard.decision.notes[:1])) is keeps
        assert guard.decision.fits is not keeps
