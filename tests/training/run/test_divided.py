"""A loader's batch that does not fit: in pieces, whose gradients add up to those of the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import Decision, MemGuard
from lightning_memguard.core.capture.capture import OutOfTimeError
from lightning_memguard.report.decision_table import warning_of
from lightning_memguard.training.run import choose
from lightning_memguard.training.run.profile import RunProfile

pytestmark = pytest.mark.usefixtures("captured_once", "taped")

KIB = 1 << 10


class Deep(pl.LightningModule):
    """Layers of 128 x 128 whose activations take most of the memory of a few hundred samples."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(128) if kind == "batch norm" else nn.Identity()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4)), norm)
        self.kind = kind
        self.automatic_optimization = kind != "manual"
        self.validated_at: list[int] = []
        self.batch_size = 600
        self.counted = 0.0, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - 1).square().mean()
        if self.kind == "manual":
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated_at.append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        if self.kind == "LBFGS":
            return torch.optim.LBFGS(self.parameters(), max_iter=2, history_size=1)
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        if self.kind == "counted":
            optimizer.param_groups[0]["lr"] *= self.batch_size / 600
            steps = 2400 // self.batch_size // self.trainer.accumulate_grad_batches
            self.counted = steps, self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
        if self.kind != "scheduled":
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]


@pytest.fixture
def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(2400, 128, generator=generator))


Fit = Callable[..., tuple[pl.Trainer, Deep, list[str]]]


@pytest.fixture
def fit(trainer: Any, data: TensorDataset) -> Fit:
    def run(
        *callbacks: Any, size: int = 600, kind: str = "", drop_last: bool = False, **settings: Any
    ) -> tuple[pl.Trainer, Deep, list[str]]:
        made, module = trainer(*callbacks, num_sanity_val_steps=0, **settings), Deep(kind)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            made.fit(module, DataLoader(data, size, drop_last=drop_last), DataLoader(data, 100))
        return made, module, [str(each.message) for each in told if "do not fit" in str(each.message)]

    return run


def decided(guard: MemGuard) -> Decision:
    assert guard.decision is not None
    return guard.decision


@pytest.mark.captures
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"accumulate_grad_batches": 2, "kind": "counted"},
        pytest.param({"limit_train_batches": 3, "val_check_interval": 2}, marks=pytest.mark.long),
        {"val_check_interval": 2, "check_val_every_n_epoch": None, "max_epochs": 2},
        pytest.param({"val_check_interval": 0.5}, marks=pytest.mark.long),
        pytest.param({"max_steps": 3}, marks=pytest.mark.long),
        {"drop_last": True, "size": 504, "kind": "scheduled"},
        pytest.param({"limit_train_batches": 0.9, "kind": "scheduled"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_training_is_the_same(fit: Fit, settings: dict[str, Any]) -> None:
    plain, expected, _ = fit(**settings)
    guard = MemGuard(budget=1300 * KIB)
    run, module, told = fit(guard, **settings)
    assert decided(guard).batch_size < 600
    assert decided(guard).pieces > 1
    assert decided(guard).limited_by == "memory"
    assert decided(guard).steps_per_epoch == decided(guard).requested_steps_per_epoch
    assert run.global_step == plain.global_step
    assert module.validated_at == expected.validated_at
    assert (module.counted, module.batch_size) == (expected.counted, expected.batch_size)
    torch.testing.assert_close(dict(module.named_parameters()), dict(expected.named_parameters()))
    assert not told
    names = ("accumulate_grad_batches", "limit_train_batches", "val_check_interval")
    assert [getattr(run, name) for name in names] == [getattr(plain, name) for name in names], "as they were"


@pytest.mark.captures
def test_a_setup_that_took_its_share_has_more_where_the_batch_does_not_fit(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A survey cut short cannot tell a size that fits; its upper bounds would refuse this run."""
    monkeypatch.setattr(choose, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(choose, "setup_seconds", lambda *_: 0.0)
    guard = MemGuard(budget=1300 * KIB)
    fit(guard)
    assert decided(guard).pieces > 1
    assert decided(guard).reason.endswith("600 samples as before.")


@pytest.mark.captures
def test_gradients_that_cannot_be_captured_count_on_top(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time for a second capture, each optimizer step sees what it saw."""

    def time_was_up(_: RunProfile) -> RunProfile:
        raise OutOfTimeError("time was up")

    fit(known := MemGuard(budget=1300 * KIB))
    monkeypatch.setattr(RunProfile, "accumulating", time_was_up)
    fit(guard := MemGuard(budget=1300 * KIB))
    assert decided(guard).reason.endswith("600 samples as before.")
    assert decided(guard).batch_size <= decided(known).batch_size
    assert any("count on top" in note for note in decided(guard).notes)
    assert guard.records[-1].measured.peak_bytes <= guard.records[-1].predicted.highest.device_bytes


def test_what_is_said(trainer: Any, tuned: Any, data: TensorDataset) -> None:
    def decided(size: int, kind: str = "") -> Decision:
        settings = {"batch_size": "auto", "budget": 300 * KIB}
        return tuned(trainer(), Deep(kind), DataLoader(data, size), **settings).decision

    decision = decided(600, "batch norm")
    size, pieces = decision.batch_size, decision.pieces
    words = f"gradients of {pieces} batches make a step, 600 samples as before"
    assert decision.reason == f"batch size {size} (was 600, which does not fit): {words}."
    assert f"batch norm sees {size} samples at a time instead of 600" in decision.notes
    assert decided(601).reason.endswith("samples instead of 601.")


@pytest.mark.parametrize(
    ("kind", "callbacks", "because"),
    [
        ("manual", (), "manual optimization accumulates no gradients"),
        pytest.param("LBFGS", (), "LBFGS accumulates no gradients", marks=[pytest.mark.captures, pytest.mark.long]),
        ("", (GradientAccumulationScheduler({0: 1}),), "a GradientAccumulationScheduler sets the accumulation"),
    ],
)
def test_what_cannot_be_accumulated_is_cut_with_a_warning(
    fit: Fit, kind: str, callbacks: tuple[Any, ...], because: str
) -> None:
    guard = MemGuard(budget=(1300 if kind != "LBFGS" else 6000) * KIB)
    run, _, told = fit(guard, *callbacks, kind=kind, size=600 if kind != "LBFGS" else 2400, max_steps=2)
    assert decided(guard).batch_size < decided(guard).requested_batch_size
    assert run.accumulate_grad_batches == 1
    assert len(told) == 1
    assert f"each optimizer step sees {decided(guard).batch_size}: {because}" in told[0]


@pytest.mark.parametrize("limits", [{"keep_effective_batch_size": None}, {"max_batch_size": 500}], ids=str)
def test_who_asks_for_smaller_steps_has_them(
    trainer: Any, tuned: Any, data: TensorDataset, limits: dict[str, Any]
) -> None:
    decision = tuned(trainer(), Deep(), DataLoader(data, 600), batch_size="auto", budget=300 * KIB, **limits).decision
    assert decision.batch_size < 600
    assert decision.accumulate_grad_batches == 1
    assert "do not fit" not in warning_of(decision)
