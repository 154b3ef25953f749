"""A run that goes on from a checkpoint keeps its batch size while it fits, and says so where it does not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.training.run import resume
from lightning_memguard.training.run.tune import GuardSettings, Tuning
from lightning_memguard.units import KIB

pytestmark = pytest.mark.usefixtures("taped")

SMALL, LARGE = 60 * KIB, 400 * KIB


class Sized(pl.LightningModule):
    """Knows its batch size, and notes what it was at each turn."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        self.sizes: list[int] = []
        self.at_configure = self.state_at_start = -1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append(len(batch[0]))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_start(self) -> None:
        self.at_start = self.batch_size, self.hparams["batch_size"]
        self.state_at_start = len(self.optimizers().state)

    def configure_optimizers(self) -> Any:
        self.at_configure = self.batch_size
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(200, 16, generator=generator), torch.randint(0, 4, (200,), generator=generator)
        )
        return DataLoader(data, batch_size=self.batch_size)


def fit(trainer: Any, guard: MemGuard | None, *, ckpt_path: Any = None, size: int = 4, **settings: Any) -> Any:
    torch.manual_seed(0)
    module = Sized(size)
    run = trainer(*[guard] if guard else [], **{"max_epochs": 2, **settings})
    run.fit(module, ckpt_path=ckpt_path)
    return run, module


@pytest.fixture
def resumed(tuned: Any, trainer: Any) -> Callable[..., Tuning]:
    """A run as it is set up, from a checkpoint that another has saved, or that has nothing of ours; nothing trains."""

    def go_on(saved: Tuning | None, *, size: int = 4, guard: dict[str, Any] | None = None, **settings: Any) -> Tuning:
        guard = {"batch_size": "largest", **(guard or {})}
        own = tuned(trainer(**{"max_epochs": 3, **settings}), module := Sized(size), module.train_dataloader(), **guard)
        checkpoint = {resume.KEY: resume.saved_state(saved)} if saved else {"loops": {"fit_loop": {}}}
        sizes = resume.saved_in(checkpoint, size)
        assert sizes is not None
        return resume.resume(own, sizes, MemGuard(**guard)._settings)

    return go_on


@pytest.fixture
def first(tuned: Any, trainer: Any) -> Callable[..., Tuning]:
    """The run that has saved a checkpoint."""
    return lambda size=4, **guard: tuned(
        trainer(max_epochs=2), module := Sized(size), module.train_dataloader(), **guard
    )


def test_the_size_is_in_the_checkpoint_and_loads_without_any_code(begun: Any, tmp_path: Path) -> None:
    guard, module, checkpoint = MemGuard(), Sized(), {}
    guard._last_fit = run = begun(module, module.train_dataloader(), batch_size="largest", budget=SMALL)
    guard.on_save_checkpoint(run.trainer, module, checkpoint)
    torch.save(checkpoint, tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)[resume.KEY]
    assert saved["batch_size"] == run.decision.batch_size > 4


@pytest.mark.parametrize("steps", [3, 11], ids=["in the first epoch", "in the second"])
def test_a_resume_within_an_epoch_goes_on_as_a_run_of_that_size_by_hand_does(
    trainer: Any, tmp_path: Path, steps: int
) -> None:
    """Steps, epochs, weights and optimizer state are those of the same interruption without a guard, bit for bit."""
    guard = MemGuard(batch_size="largest", budget=SMALL)
    run, _ = fit(trainer, guard, max_steps=steps)
    size = guard.decision.batch_size
    assert 4 < size < 100
    run.save_checkpoint(tmp_path / "guarded.ckpt")
    plain, _ = fit(trainer, None, max_steps=steps, size=size)
    plain.save_checkpoint(tmp_path / "plain.ckpt")

    again = MemGuard(batch_size="largest", budget=LARGE)
    resumed, module = fit(trainer, again, ckpt_path=tmp_path / "guarded.ckpt", max_epochs=4)
    by_hand, theirs = fit(trainer, None, ckpt_path=tmp_path / "plain.ckpt", max_epochs=4, size=size)
    assert (again.decision.batch_size, again.decision.limited_by) == (size, "checkpoint")
    assert module.sizes == theirs.sizes
    assert (module.at_configure, *module.at_start) == (size, size, size)
    assert module.state_at_start == theirs.state_at_start == 4
    assert (resumed.global_step, resumed.current_epoch) == (by_hand.global_step, by_hand.current_epoch)
    for mine, other in zip(module.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_size_that_no_longer_fits_is_changed_and_said_out_loud(begun: Any, first: Any) -> None:
    large, module = first(budget=LARGE), Sized()
    run = begun(module, module.train_dataloader(), batch_size="largest", budget=SMALL)
    with pytest.warns(UserWarning, match=rf"trained at batch size {large.decision.batch_size}; that needs .* offers"):
        run.load({resume.KEY: resume.saved_state(large)})
    assert module.batch_size == run.decision.batch_size < large.decision.batch_size
    assert run.decision.fits


def test_a_limit_given_by_hand_outweighs_the_checkpoint(first: Any, resumed: Any) -> None:
    decision = resumed(first(budget=SMALL), guard={"budget": SMALL, "max_batch_size": 8}).decision
    assert "max_batch_size=8 forbids it" in decision.because
    assert decision.batch_size == 8


def test_a_checkpoint_from_before_the_guard_is_counted_in_batches_of_the_loader(resumed: Any) -> None:
    """Batch 20 of 50 is where 80 samples end only while batches are of 4; ``min_batch_size`` insists on larger ones."""
    decision = resumed(None, guard={"budget": LARGE}).decision
    assert decision.batch_size == 4
    assert "the one the checkpoint was trained with (min_batch_size insists" in decision.reason
    decision = resumed(None, guard={"budget": LARGE, "min_batch_size": 5}).decision
    assert "trained at batch size 4; min_batch_size=5 forbids it" in decision.because
    assert decision.batch_size > 4


def test_a_batch_size_that_was_set_outweighs_the_checkpoint(first: Any, resumed: Any) -> None:
    """A run that grew was asked to; the next one is not, and the warning has both sizes."""
    decision = resumed(first(max_batch_size=20), guard={"batch_size": "auto"}).decision
    assert "trained at batch size 20; this run's loader has 4" in decision.because
    assert decision.batch_size == 4


def test_a_division_goes_on_if_it_still_fits(first: Any, resumed: Any) -> None:
    """Batches are counted in pieces, and the next run would not need as many."""
    before = first(200, batch_size="auto", budget=SMALL)
    ours, theirs = (
        before.decision,
        resumed(before, size=200, guard={"batch_size": "auto", "budget": 2 * SMALL}).decision,
    )
    assert (theirs.batch_size, theirs.accumulate_grad_batches) == (ours.batch_size, ours.accumulate_grad_batches)
    assert ours.batch_size * ours.accumulate_grad_batches == 200 > ours.batch_size


def test_accumulation_goes_on_with_the_size(first: Any, resumed: Any) -> None:
    before = first(batch_size="auto", budget=SMALL, keep_effective_batch_size=96)
    decision = resumed(before, guard={"budget": LARGE}).decision
    assert decision.accumulate_grad_batches == before.decision.accumulate_grad_batches > 1


def test_a_resume_under_a_guard_that_only_checks_changes_nothing(begun: Any, first: Any) -> None:
    module, saved = Sized(), resume.saved_state(first(budget=SMALL))
    run = begun(module, module.train_dataloader(), mode="check")
    before = run.tuning
    run.load({resume.KEY: saved})
    assert saved["batch_size"] > 4
    assert run.tuning is before
    assert (run.decision.batch_size, module.batch_size) == (4, 4)


class WithTest(Sized):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))

    def test_dataloader(self) -> Any:
        return self.train_dataloader()


def test_an_evaluation_does_not_take_the_size_of_training(trainer: Any, tmp_path: Path) -> None:
    """It keeps its own; and a checkpoint that is saved after one keeps that of training."""
    guard = MemGuard(batch_size="largest", max_batch_size=16)
    run, _ = fit(trainer, guard)
    run.save_checkpoint(tmp_path / "a.ckpt")
    module, tests = WithTest(), MemGuard(batch_size="largest", max_batch_size=40)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tested = trainer(tests, limit_test_batches=0.2)
        tested.test(module, ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert (set(module.sizes), tests.decision.batch_size) == ({4}, 4)  # type: ignore[union-attr]
    assert not [each for each in said if "checkpoint was trained" in str(each.message)]
    run.test(WithTest(), verbose=False)
    run.save_checkpoint(tmp_path / "b.ckpt")
    assert torch.load(tmp_path / "b.ckpt", weights_only=True)[resume.KEY]["batch_size"] == 16


def test_a_size_at_which_a_limit_leaves_no_batch_is_not_resumed(first: Any, resumed: Any) -> None:
    """A tenth of two batches is none, and Lightning refuses the run."""
    decision = resumed(first(max_batch_size=100), limit_train_batches=0.1).decision
    assert "batch size 100; this run's data and limits allow 22 at most" in decision.because
    assert decision.batch_size == 20  # no more samples than two batches of 4


def test_what_a_fit_sets_is_put_back(trainer: Any, tmp_path: Path) -> None:
    """The checkpoints and logs of the run have the size that it ran at."""
    guard = MemGuard(max_batch_size=20, keep_effective_batch_size=80)
    keeper = pl.callbacks.ModelCheckpoint(tmp_path, filename="during")
    module = Sized()
    run = trainer(guard, keeper, enable_checkpointing=True)
    run.fit(module)
    assert module.sizes[0] == 20
    assert (module.batch_size, module.hparams["batch_size"], run.accumulate_grad_batches) == (4, 4, 1)
    saved = torch.load(tmp_path / "during.ckpt", weights_only=False)
    assert saved["hyper_parameters"]["batch_size"] == 20


def test_what_a_fit_sets_is_put_back_after_an_error_too(trainer: Any) -> None:
    class Fails(pl.Callback):
        def on_train_start(self, run: pl.Trainer, pl_module: Any) -> None:
            raise ValueError(pl_module.batch_size)

    module = Sized()
    with pytest.raises(ValueError, match="20"):
        trainer(MemGuard(batch_size="largest", max_batch_size=20), Fails()).fit(module)
    assert module.batch_size == module.hparams["batch_size"] == 4


SETTINGS = GuardSettings()


def test_only_a_checkpoint_of_a_fit_ties_a_run_to_the_loaders_size() -> None:
    assert resume.saved_in({"loops": {"fit_loop": {}}}, 4) == resume.SavedSizes(4, 0, 0)
    assert resume.saved_in({"state_dict": {}}, 4) is None


def test_a_damaged_entry_is_ignored() -> None:
    assert resume.saved_in({resume.KEY: {"batch_size": "many"}}, 4) is None
