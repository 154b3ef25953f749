"""A training step that runs out of memory is done again in parts of its batch: the same step, or not at all."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memguard import MemGuard, MemGuardError
from lightning_memguard.units import MIB

BATCH = 6


def samples_of(x: torch.Tensor) -> int:
    """How many samples a part really has: to the step it seems to be the whole batch."""
    with torch._C.DisableTorchFunction():
        return int(x.shape[0])


class Net(pl.LightningModule):
    """Runs out of memory in batches of more than ``most`` samples, in the forward pass or after a gradient."""

    def __init__(self, most: int = 99, *, late: bool = False, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), norm or nn.GELU(), nn.Linear(32, 4))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.most, self.late, self.process = most, late, os.getpid()  # copies in children never fail

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        out = self.net(x)
        if samples_of(x) > self.most and os.getpid() == self.process:
            if not self.late:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            self.fail_after_a_gradient()
        loss = self.loss(out, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("highest", out.max(), on_epoch=True, reduce_fx="max")
        self.accuracy(out, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def fail_after_a_gradient(self) -> None:
        def fail(_: torch.Tensor) -> None:
            handle.remove()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        handle = self.net[0].weight.register_hook(fail)

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Summed(Net):
    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out, y, reduction="sum") / BATCH


class Contrastive(Net):
    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out @ out.T, torch.arange(len(out)))


class Keeping(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.kept = [*getattr(self, "kept", []), len(batch[0])]
        return super().training_step(batch, batch_idx)


class Manual(Net):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        return loss


class Searching(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class Counting(pl.Callback):
    """How often each hook of a step is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_before_zero_grad(self, *_: Any) -> None:
        self.calls.append("zero_grad")

    def on_before_backward(self, *_: Any) -> None:
        self.calls.append("before backward")

    def on_after_backward(self, *_: Any) -> None:
        self.calls.append("after backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.calls.append("optimizer")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.calls.append("end")
        assert outputs["loss"].dim() == 0


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8 * BATCH, 16, generator=generator), torch.randint(0, 4, (8 * BATCH,), generator=generator)
    return DataLoader(TensorDataset(x, y), BATCH)


def fit(trainer: Any, module: Any, *callbacks: Any, **settings: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Parameters and what was logged."""
    made = trainer(*callbacks, **settings)
    made.fit(module, data())
    logged = {name: float(value) for name, value in made.callback_metrics.items() if "memguard" not in name}
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]), logged


def seeded(kind: Any, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return kind(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "late", "settings"),
    [
        (Net, False, {}),
        (Net, True, {}),
        (Summed, True, {}),
        (Net, True, {"accumulate_grad_batches": 3}),
        (Net, False, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (Net, True, {"precision": "16-true"}),
    ],
)
def test_weights_and_logged_values_are_those_of_whole_batches(
    trainer: Any, kind: Any, late: bool, settings: dict[str, Any]
) -> None:
    """Every batch of six fails, and so do its parts of three."""
    half = settings.get("precision") == "16-true"
    if half:
        settings = {"precision": "bf16-mixed"}
    expected, logged = fit(trainer, seeded(kind), **settings)
    guard = MemGuard(max_batch_size=BATCH)
    found, relogged = fit(trainer, seeded(kind, 2, late=late), guard, **settings)
    assert [record.rescued for record in guard.records] == [8]
    assert guard.records[0].as_metrics()["memguard/rescued_steps"] == 8
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-3 if half else 1e-6)
    assert relogged == pytest.approx(logged, rel=1e-2 if half else 1e-5)


def test_gradients_accumulated_before_are_lost_without_putting_them_back(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: it would see them."""
    expected, _ = fit(trainer, seeded(Net), accumulate_grad_batches=3)
    monkeypatch.setattr(StepGuard, "_gradients", lambda self: ([], []))
    found, _ = fit(trainer, seeded(Net, 2, late=True), MemGuard(max_batch_size=BATCH), accumulate_grad_batches=3)
    assert (found - expected).abs().max() > 1e-3


def test_parts_that_are_not_weighted_make_another_step(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = fit(trainer, seeded(Net))
    monkeypatch.setattr(_Run, "_weight", lambda self, *_: 1.0)
    found, _ = fit(trainer, seeded(Net, 3), MemGuard(max_batch_size=BATCH))
    assert (found - expected).abs().max() > 1e-3


def test_hooks_around_a_step_are_called_once(trainer: Any) -> None:
    whole, rescued = Counting(), Counting()
    fit(trainer, seeded(Net), whole, accumulate_grad_batches=2)
    fit(trainer, seeded(Net, 2, late=True), rescued, MemGuard(max_batch_size=BATCH), accumulate_grad_batches=2)
    assert sorted(rescued.calls) == sorted(whole.calls)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes since Python 3.11")
@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda: Net(3, norm=nn.BatchNorm1d(32)), "batch norm (the layer `net.1`) would normalize each part"),
        (lambda: Contrastive(3), "neither a mean nor the sum"),
        (lambda: Keeping(3), "sets the attribute `kept` of the module"),
        (lambda: Manual(3), "calls the optimizers itself"),
        (lambda: Searching(3), "LBFGS"),
    ],
)
def test_what_would_not_be_the_same_step_raises_with_the_reason(trainer: Any, module: Any, why: str) -> None:
    guard, made = MemGuard(max_batch_size=BATCH), module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            fit(trainer, made, guard)
    (note,) = caught.value.__notes__
    assert "MemGuard predicted a peak" in note
    assert why in note
    assert all(parameter.grad is None for parameter in made.parameters())


def test_asked_for_by_name_it_says_what_changes(trainer: Any) -> None:
    guard = MemGuard(max_batch_size=BATCH, on_oom="split")
    with pytest.warns(UserWarning, match="not the same step .*batch norm"):
        fit(trainer, Net(3, norm=nn.BatchNorm1d(32)), guard)
    assert guard.records[0].rescued == 8


def test_random_numbers_are_mentioned_once(trainer: Any) -> None:
    guard = MemGuard(max_batch_size=BATCH)
    with pytest.warns(UserWarning, match="dropout masks") as told:
        fit(trainer, Net(3, norm=nn.Dropout(0.5)), guard)
    assert len([each for each in told if "rescued" in str(each.message)]) == 1


@pytest.mark.parametrize("settings", [{"on_oom": "raise"}, {"mode": "check", "on_oom": "split"}])
def test_a_run_that_was_not_to_be_rescued_is_not_guarded(trainer: Any, settings: dict[str, Any]) -> None:
    class Loop(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
            assert "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)

    with pytest.raises(torch.OutOfMemoryError):
        fit(trainer, Net(3), MemGuard(max_batch_size=BATCH, **settings), Loop())


def test_a_single_sample_that_does_not_fit_raises(trainer: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        fit(trainer, Net(0), MemGuard(max_batch_size=BATCH))


def test_other_errors_are_left_alone(trainer: Any) -> None:
    class Broken(Net):
        def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if self.trainer.fit_loop.epoch_loop.batch_idx == 2 and len(out) == BATCH:
                raise RuntimeError("not of memory")
            return super().loss(out, y)

    with pytest.raises(RuntimeError, match="not of memory"):
        fit(trainer, Broken(), MemGuard(max_batch_size=BATCH))


def test_the_trainer_is_left_as_it_was(trainer: Any) -> None:
    made = trainer(MemGuard(max_batch_size=BATCH))
    module = Net(3)
    made.fit(module, data())
    assert "_make_closure" not in vars(made.fit_loop.epoch_loop.automatic_optimization)
    assert not module._forward_pre_hooks


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(MemGuardError, match="on_oom='ignore' is unknown"):
        MemGuard(on_oom="ignore")  # type: ignore[arg-type]


# -- means over what is not padding


def out_of_memory(_: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


class Padded(Net):
    """Predicts each of a text's tokens; what is padded or masked is left out of the mean, in one of several ways."""

    def __init__(self, how: str, most: int = 99, *, late: bool = False) -> None:
        super().__init__(most, late=late)
        self.how = how
        self.net = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, _ = batch
        if samples_of(tokens) > self.most and os.getpid() == self.process and not self.late:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        hidden = self.net[0](tokens)
        if samples_of(tokens) > self.most and os.getpid() == self.process:
            hidden.register_hook(out_of_memory)  # the last layer has its gradients by then
        loss = self.mean(self.net[1](hidden), tokens)
        self.log("loss", loss, on_epoch=True)
        return {"loss": loss, "again": loss.detach()}

    def mean(self, out: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.how == "ignored":
            return nn.functional.cross_entropy(out.mT, tokens, ignore_index=0)
        losses, mask = nn.functional.cross_entropy(out.mT, tokens, reduction="none"), tokens != 0
        if self.how == "divided":
            return (losses * mask).sum() / mask.sum()
        more = out.square().mean() if self.how == "two" else 0
        return losses[mask].mean() + more


def texts(*, alike: bool) -> DataLoader[Any]:
    """Texts of different lengths; or the first ones, which MemGuard tries steps on, of the same."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, 20, (8 * BATCH, 7), generator=generator)
    lengths = torch.randint(1, 8, (8 * BATCH,), generator=generator)
    if alike:
        lengths[: 4 * BATCH] = 7
    tokens[torch.arange(7) >= lengths[:, None]] = 0
    return DataLoader(TensorDataset(tokens, lengths), BATCH)


@pytest.mark.parametrize(
    ("how", "alike", "late", "accumulate"),
    [
        ("ignored", False, False, 1),
        ("divided", False, True, 2),
        ("selected", False, False, 2),
        ("ignored", True, True, 1),
        ("selected", True, False, 1),
    ],
)
def test_parts_are_weighted_by_what_the_loss_averages_over(
    trainer: Any, how: str, alike: bool, late: bool, accumulate: int
) -> None:
    """Where the texts that the step was tried on are all as long, that shows only while parts run."""
    found = []
    for most in (99, 2):
        module, guard = seeded(Padded, how, most, late=late), MemGuard(max_batch_size=BATCH)
        made = trainer(guard, accumulate_grad_batches=accumulate, max_epochs=1 + alike)
        made.fit(module, texts(alike=alike))
        assert {record.batch_size for record in guard.records} == {BATCH}
        weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        found.append((weights, float(made.callback_metrics["loss_epoch"]), guard.records[0].rescued))
    (expected, loss, _), (weights, other, rescued) = found
    assert rescued == 8
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
    if not alike:  # else the step was found to log a mean over samples
        assert other == pytest.approx(loss, rel=1e-5)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes since Python 3.11")
@pytest.mark.parametrize(
    ("how", "alike", "why"),
    [
        ("two", False, "neither a mean nor the sum"),
        ("two", True, "means over different numbers of elements"),
        ("empty", False, "averages over no element of some samples"),
    ],
)
def test_means_over_different_numbers_of_elements_or_none_are_refused(
    trainer: Any, how: str, alike: bool, why: str
) -> None:
    module, loader = seeded(Padded, "ignored" if how == "empty" else how, 3), texts(alike=alike)
    if how == "empty":
        loader.dataset.tensors[0][-BATCH:-3] = 0  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            trainer(MemGuard(max_batch_size=BATCH), max_epochs=2).fit(module, loader)
    assert why in caught.value.__notes__[0]


# -- the next epoch


@pytest.mark.parametrize("accumulate", [1, 2])
def test_after_an_epoch_of_rescues_the_next_takes_smaller_batches_and_the_same_steps(
    trainer: Any, accumulate: int
) -> None:
    """Batches of six fail, and their parts of three fit: from then on two batches of three make a step."""
    settings: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    expected, _ = fit(trainer, seeded(Net), **settings)
    guard = MemGuard(max_batch_size=BATCH)
    made, module = trainer(guard, **settings), seeded(Net, 3)
    with pytest.warns(UserWarning, match=r"next epoch on: Batch size 3 \(was 6\): 8 of 8 steps of epoch 0 ran out of"):
        made.fit(module, data())
    found = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert [(record.batch_size, record.rescued) for record in guard.records] == [(6, 8), (3, 0), (3, 0)]
    assert [bool(record.resized_because) for record in guard.records] == [False, True, False]
    assert guard.decision.accumulate_grad_batches == 2 * accumulate
    assert (made.accumulate_grad_batches, made.reload_dataloaders_every_n_epochs) == (accumulate, 0)
    assert guard.decision.reason.startswith("8 of 8 steps")


@pytest.mark.parametrize(
    ("module", "settings", "callbacks"),
    [
        (lambda: Summed(3), {}, []),
        (lambda: Net(3), {"limit_train_batches": 8}, []),
        (lambda: Net(3), {}, [pl.callbacks.GradientAccumulationScheduler({0: 1, 9: 2})]),
    ],
    ids=["a summed loss", "a number of batches", "accumulation on a schedule"],
)
def test_where_smaller_batches_would_be_another_training_the_size_stays(
    trainer: Any, module: Any, settings: dict[str, Any], callbacks: list[Any]
) -> None:
    guard = MemGuard(max_batch_size=BATCH)
    fit(trainer, module(), guard, *callbacks, max_epochs=2, **settings)
    assert [(record.batch_size, record.rescued) for record in guard.records] == [(6, 8), (6, 8)]


# -- before it fails


class Tokens(pl.LightningModule):
    """Embeds and averages; what a step takes grows with the longest of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 32), nn.Linear(32, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.head(self.embedding(batch).mean(1)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Growing(IterableDataset[torch.Tensor]):
    """A stream whose last texts are longer than all that a guard looks at."""

    def __iter__(self) -> Any:
        lengths = [10] * 5000 + [400] * 300
        return (torch.arange(length) % 100 for length in lengths)


def test_a_batch_announced_as_too_large_is_run_in_parts(trainer: Any) -> None:
    """100 texts of 400 tokens are predicted to take 10 MiB in the forward and the backward pass."""
    guard = MemGuard(budget=4 * MIB, margin=0.0, max_batch_size=100)
    pad = nn.utils.rnn.pad_sequence
    with pytest.warns(UserWarning, match=r"Training batch 50 has \[100, 400\].*It runs \d+ samples at a time"):
        trainer(guard).fit(Tokens(), DataLoader(Growing(), 100, collate_fn=lambda each: pad(each, batch_first=True)))
    assert guard.records[0].rescued == 3


# -- validation and test


class Evaluated(Net):
    """Evaluates batches of more than ``most`` samples into an error; ``logs`` and ``returns`` say what of."""

    def __init__(self, most: int = 99, logs: Any = None, returns: Any = None) -> None:
        super().__init__()
        self.limit = most
        self.logs, self.returns = logs or nn.functional.cross_entropy, returns
        self.evaluated = torchmetrics.Accuracy("multiclass", num_classes=4)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        self.evaluated.update(out, y)
        self.log("value", self.logs(out, y))
        self.log("evaluated", self.evaluated)
        if samples_of(x) > self.limit and os.getpid() == self.process:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.returns(out) if self.returns else None

    test_step = validation_step


class Outputs(pl.Callback):
    """Keeps what evaluation returns."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append(outputs)


@pytest.mark.parametrize("returns", [None, lambda out: {"rows": out, "sum": out.sum()}], ids=["nothing", "rows"])
def test_an_evaluation_in_parts_logs_and_returns_what_it_does_as_a_whole(trainer: Any, returns: Any) -> None:
    results = []
    for most in (99, 2):
        module, seen = seeded(Evaluated, most, returns=returns), Outputs()
        made = trainer(seen, MemGuard(max_batch_size=BATCH), limit_val_batches=1.0)
        if most == 2:
            with pytest.warns(UserWarning, match="validation or test batch of 6 samples .* at most 2 samples"):
                (logged,) = made.validate(module, data(), verbose=False)
        else:
            (logged,) = made.validate(module, data(), verbose=False)
        results.append((logged, seen.outputs))
        assert "validation_step" not in vars(made.strategy)
    (whole, outputs), (parts, joined) = results
    assert parts == pytest.approx(whole)
    assert len(joined) == len(outputs) == 8
    if returns:
        assert joined[0]["rows"].shape == (6, 4)
        torch.testing.assert_close(joined, outputs)


def test_the_validation_of_a_fit_and_a_test_are_rescued(trainer: Any) -> None:
    module = seeded(Evaluated, 3)
    guard = MemGuard(max_batch_size=BATCH)
    made = trainer(guard, limit_val_batches=1.0, num_sanity_val_steps=1)
    made.fit(module, data(), data())
    whole = trainer(limit_val_batches=1.0)
    whole.fit(seeded(Evaluated), data(), data())
    assert made.callback_metrics["value"] == pytest.approx(float(whole.callback_metrics["value"]))
    (tested,) = made.test(module, data(), verbose=False)
    (other,) = whole.test(whole.lightning_module, data(), verbose=False)
    assert tested == pytest.approx(other)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes since Python 3.11")
@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda: Evaluated(3, logs=lambda out, _: torch.linalg.norm(out)), "`value`, which it logs, does not follow"),
        (lambda: Evaluated(3, returns=lambda out: {"norm": torch.linalg.norm(out)}), "what it returns cannot be"),
        (lambda: Evaluated(0), None),
    ],
    ids=["logs", "returns", "one sample"],
)
def test_an_evaluation_that_cannot_be_joined_raises_with_the_reason(trainer: Any, module: Any, why: str | None) -> None:
    made = trainer(MemGuard(max_batch_size=BATCH), limit_val_batches=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            made.validate(module(), data(), verbose=False)
    (note,) = caught.value.__notes__
    assert "MemGuard predicted a peak" in note
    assert why is None or why in note
