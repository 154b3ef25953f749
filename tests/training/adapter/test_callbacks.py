"""Other callbacks' memory: copies of the model, teachers and other tensors, each counted once."""

from __future__ import annotations

import copy
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.profilers import PyTorchProfiler, SimpleProfiler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.training.adapter.callbacks import averages, hooks_that_compute, notes_on_profiler

WEIGHTS = 4 * 333_834  # of `Wide`


def fit(make: Callable[[], Any], data: TensorDataset) -> Callable[[Any], object]:
    return lambda trainer: trainer.fit(make(), DataLoader(data, batch_size=64))


def averaging(name: str) -> Any:
    cls = getattr(pl.callbacks, name, None)
    if cls is None:
        pytest.skip(f"this Lightning has no {name}")
    return cls


def decided(trainer: Any, module: Any, data: TensorDataset, *callbacks: Any, **settings: Any) -> Decision:
    guard = MemGuard(**{"batch_size": "largest", **settings})
    trainer(guard, *callbacks).fit(module, DataLoader(data, batch_size=64))
    assert guard.decision is not None
    assert guard.decision.footprint is not None
    return guard.decision


# -- Lightning's own averages


@pytest.mark.parametrize("name", ["WeightAveraging", "EMAWeightAveraging"])
def test_an_average_and_what_its_update_takes(wide: Any, wide_data: Any, as_measured: Any, name: str) -> None:
    """Its copy is there throughout; the peak is where the largest weight is averaged."""
    decision = as_measured(fit(wide, wide_data), averaging(name))
    assert decision.footprint.parts["callbacks"] == WEIGHTS
    assert decision.footprint.phase == "averaging"
    assert decision.footprint.method == "fake"


def test_stochastic_averaging_between_epochs(wide: Any, wide_data: Any, as_measured: Any) -> None:
    """No batch is there during its update."""
    decision = as_measured(
        fit(wide, wide_data), lambda: pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1), max_epochs=3
    )
    assert decision.footprint.parts["callbacks"] == WEIGHTS
    assert decision.footprint.parts["batch"] == 0


@pytest.mark.parametrize("name", ["WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging"])
def test_an_average_on_another_device_takes_nothing_here(trainer: Any, name: str) -> None:
    def copies(run: Any, device: torch.device) -> int:
        return len(averages(run.callbacks, device, nn.Linear(1, 1)))

    first = [0.01] if name == "StochasticWeightAveraging" else []
    run = trainer(averaging(name)(*first, device="cpu"))
    assert copies(run, torch.device("cpu")) == 1
    assert copies(run, torch.device("cuda")) == 0
    run = trainer(averaging(name)(*first, device=torch.device("cuda", 0)))
    assert copies(run, torch.device("cuda", 0)) == 1
    assert copies(run, torch.device("cpu")) == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_average_of_no_device_is_where_the_module_says_that_it_is_at_setup(device: str) -> None:
    """Lightning says so before it moves the module."""
    average = averaging("WeightAveraging")()
    if average._device is not None:
        pytest.skip("in this Lightning it has a device")
    assert len(averages([average], torch.device(device), nn.Linear(1, 1))) == 1


@pytest.mark.usefixtures("at_own_size")
def test_an_average_that_leaves_buffers_alone(trainer: Any, wide: Any, wide_data: TensorDataset) -> None:
    class Normed(wide):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net.append(nn.BatchNorm1d(10))

    average = averaging("WeightAveraging")(use_buffers=False)
    footprint = decided(trainer, Normed(), wide_data, average, mode="check").footprint
    assert footprint is not None
    assert footprint.method == "fake"
    assert footprint.parts["callbacks"] == WEIGHTS + 4 * 4 * 10 + 8, "the copy has the buffers all the same"


# -- what users write


class Ema(pl.Callback):
    """Deep-copies the module at a moment of its choice, and averages in place."""

    def __init__(self, when: str, module: Any = None) -> None:
        self.when = when
        self.average: Any = copy.deepcopy(module)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.when == "setup":
            self.average = copy.deepcopy(pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.when == "on_fit_start":
            self.average = copy.deepcopy(pl_module)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for mine, theirs in zip(self.average.parameters(), pl_module.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


def test_where_nothing_is_to_be_chosen_a_late_average_is_counted_too(
    wide: Any, wide_data: Any, as_measured: Any
) -> None:
    decision = as_measured(fit(wide, wide_data), lambda: Ema("on_fit_start"))
    assert decision.footprint.parts["callbacks"] == WEIGHTS


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.parametrize(("when", "guard_first"), [("__init__", True), ("setup", True), ("on_fit_start", False)])
def test_an_average_of_the_users_own_is_counted_once(
    trainer: Any, wide: Any, wide_data: TensorDataset, when: str, guard_first: bool
) -> None:
    """Whenever it copies, and whichever callback comes first: by the time the loaders are made it is there."""
    module, guard = wide(), MemGuard(batch_size="largest", max_batch_size=64)
    callbacks = [guard, Ema(when, module if when == "__init__" else None)]
    trainer(*(callbacks if guard_first else callbacks[::-1])).fit(module, DataLoader(wide_data, batch_size=64))
    assert guard.decision is not None
    assert guard.decision.footprint is not None
    assert guard.decision.footprint.parts["callbacks"] == WEIGHTS


def test_an_average_that_comes_late_makes_the_batch_smaller(trainer: Any, wide: Any, wide_data: TensorDataset) -> None:
    """When it copies, the size was chosen and shown: a warning says that it has changed, and why."""
    settings = {"budget": 5_900_000, "margin": 0.05}
    alone = decided(trainer, wide(), wide_data, **settings)

    class Sized(wide):  # type: ignore[misc]
        first_size = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.first_size = self.first_size or len(batch[0])
            return super().training_step(batch, batch_idx)

    module = Sized()
    with pytest.warns(UserWarning, match="other callbacks have taken 1.3 MiB on the device since setup") as warned:
        late = decided(trainer, module, wide_data, Ema("on_fit_start"), **settings)
    named = [int(size) for each in warned for size in re.findall(r"set max_batch_size=(\d+)", str(each.message))]
    assert all(size < late.batch_size for size in named)
    assert late.batch_size < alone.batch_size
    assert module.first_size == late.batch_size
    assert late.limited_by == "memory"
    assert late.footprint is not None
    assert late.budget is not None
    assert late.footprint.parts["callbacks"] == WEIGHTS
    assert late.footprint.peak_allocated_bytes <= late.budget.usable_bytes


class Teacher(pl.Callback):
    """Holds a module and tensors, in containers too, the same ones twice."""

    def __init__(self) -> None:
        self.teacher = nn.Linear(700, 700)
        self.again = [self.teacher]
        self.queue = {"keys": [torch.zeros(1000, 100), torch.zeros(1000, 100)]}
        self.view = self.queue["keys"][0][:10]


def test_a_teacher_and_a_queue_are_counted_once(wide: Any, wide_data: Any, as_measured: Any) -> None:
    decision = as_measured(fit(wide, wide_data), Teacher)
    assert decision.footprint.parts["callbacks"] == 4 * (700 * 700 + 700 + 2 * 1000 * 100)


# -- pruning


@pytest.mark.parametrize(("method", "epochs"), [("l1_unstructured", 2), ("random_unstructured", 1)])
def test_pruning_at_the_end_of_epochs(wide: Any, wide_data: Any, as_measured: Any, method: str, epochs: int) -> None:
    """All weights are sorted at the end of an epoch, and masks and pruned copies stay."""
    decision = as_measured(
        fit(wide, wide_data), lambda: pl.callbacks.ModelPruning(method, amount=0.5), max_epochs=epochs
    )
    assert decision.footprint.phase == "pruning"


@pytest.mark.usefixtures("at_own_size")
def test_pruning_that_cannot_be_followed_is_named(trainer: Any, wide: Any, wide_data: Any) -> None:
    class OwnPruning(pl.callbacks.ModelPruning):
        def apply_pruning(self, amount: Any) -> None:
            if not torch.is_grad_enabled() and type(self._parameters_to_prune[0][0].weight) is nn.Parameter:
                return
            raise RuntimeError("it needs a server")

    guard = MemGuard("check")
    with pytest.raises(RuntimeError, match="it needs a server"):
        trainer(guard, OwnPruning("l1_unstructured", amount=0.5)).fit(wide(), DataLoader(wide_data, batch_size=64))
    assert guard.decision.footprint.method == "fake"
    assert "what ModelPruning takes is not predicted (it needs a server)" in guard.decision.footprint.notes


# -- callbacks of others


class Samples(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.draw(pl_module)

    def draw(self, module: Any) -> None:
        with torch.no_grad():
            module.net(torch.ones(2, 128))


class Writes(Samples):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            torch.save(pl_module.net(torch.ones(2, 128)), os.devnull)


class Prints(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.callback_metrics.get("loss")


class Holds(pl.Callback):
    def __init__(self, module: Any) -> None:
        self.module = module
        self.weights = list(module.parameters())
        self.best = torch.tensor(0.5)


@pytest.mark.usefixtures("at_own_size")
def test_callbacks_that_run_the_model_are_named_and_what_is_the_modules_is_not_counted_for_one(
    trainer: Any, wide: Any, wide_data: Any
) -> None:
    def compute(*_: object) -> None:
        torch.ones(1).requires_grad_().backward()

    def save(trainer: Any, module: Any) -> None:
        torch.save(module.state_dict(), io.BytesIO())

    by_lambda = pl.callbacks.LambdaCallback(on_train_batch_end=compute, on_train_epoch_end=save)
    others = Samples(), Prints(), by_lambda, pl.callbacks.EarlyStopping("loss"), pl.callbacks.Timer()
    assert sorted(hooks_that_compute(others)) == [
        "LambdaCallback.on_train_batch_end",
        "LambdaCallback.on_train_epoch_end",
        "Samples.on_train_epoch_end",
    ]
    module = wide()
    made = Samples(), Writes(), Holds(module), pl.callbacks.Timer()
    decision = decided(trainer, module, wide_data, *made, mode="check")
    note = "memory that callbacks take as they run is measured, not predicted: Writes.on_train_epoch_end"
    assert decision.footprint is not None
    assert note in decision.notes + decision.footprint.notes, "what Samples does is predicted"
    assert "callbacks" not in decision.footprint.parts, "nor is what holds no bytes named as a part"


def test_lightnings_own_callbacks_are_predicted_or_take_nothing() -> None:
    """Each is in the table of docs/coverage.md."""
    text = (Path(__file__).parents[3] / "docs" / "coverage.md").read_text()
    missing = [name for name in pl.callbacks.__all__ if f"`{name}`" not in text]
    assert not missing


def test_a_profiler_that_keeps_operators_is_named_once_it_is_there():
    assert notes_on_profiler(SimpleProfiler()) == notes_on_profiler(None) == ()
    assert "PyTorchProfiler" in notes_on_profiler(PyTorchProfiler())[0]
