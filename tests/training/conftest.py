"""A small module, a small trainer: what most tests of the training room need."""

from __future__ import annotations

import gc
import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.core.capture import capture
from lightning_memguard.core.capture.curve import Curve, Terms
from lightning_memguard.core.capture.predict import Surveyor
from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.range import NOTHING
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.data import samples
from lightning_memguard.training.facts.lightning_port import preserve_loader_classes
from lightning_memguard.training.planning import advise
from lightning_memguard.training.run import choose, guarded_run
from lightning_memguard.training.run.guarded_run import GuardedRun
from lightning_memguard.training.run.tune import Tuning, tune
from tests.training.quiet import quiet_trainer


class Small(pl.LightningModule):
    """Two layers; ``step_of`` may replace what the step does after the loss."""

    def __init__(self, width: int = 64, **attributes: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
        for name, value in attributes.items():
            setattr(self, name, value)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


@pytest.fixture(autouse=True)
def _nothing_to_look_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out reports and pictures, a tenth of the time of a small fit, but where they are or may matter."""
    if request.path.name not in ("test_nothing_touched.py", "test_run_report.py"):
        monkeypatch.setattr(guarded_run.GuardedRun, "_show", lambda *_: None)


@pytest.fixture(autouse=True)
def _loader_classes_stay() -> Iterator[None]:
    """Take back Lightning's patches of loaders, which stay where a ``train_dataloader`` raises."""
    with preserve_loader_classes():
        yield


# Tests about children, or that tell copies in children from the original: folders, files, and tests of other files.
IN_CHILDREN = {
    *("test_layouts_of_ranks.py", "test_nothing_moves.py", "test_nothing_touched.py"),
    "test_a_plain_loader_is_trained_at_the_chosen_size",
    "test_a_run_that_passes_its_budget_warns_after_two_batches_with_the_size_that_would_not_have",
    "test_a_short_run_is_predicted_at_its_own_size_with_what_was_left_out",
    "test_ctrl_c_goes_on_without_a_prediction_once_that_was_offered",
    "test_on_a_terminal_one_line_follows_what_is_captured_and_goes_away",
    "test_operators_that_collate_on_many_threads_do_not_stop_a_child",
    "test_setup_ends_in_time_and_uses_what_it_knows_then",
    "test_tensors_that_the_dataset_keeps_are_not_the_batchs_own",
    "test_the_speed_of_this_machine_is_measured_in_a_child_on_all_threads",
    "test_what_takes_long_is_announced_once",
    "test_what_the_copy_does_is_not_seen",
}


@pytest.fixture(autouse=True)
def _captured_here(request: pytest.FixtureRequest) -> None:
    """Captures run in this process, for a third of the time that children take."""
    names = {request.path.parent.name, request.path.name, request.node.name.partition("[")[0]}
    if not names & IN_CHILDREN:
        request.getfixturevalue("here")


@pytest.fixture(autouse=True)
def _time_to_draw_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too, the number of samples drawn is what ends the drawing, unless a test is about time."""
    monkeypatch.setattr(samples, "MOST_SECONDS", math.inf)


@pytest.fixture(autouse=True)
def _few_samples_drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of the samples are drawn, as most tests have some thousands of equal ones, which take long to read."""
    if request.path.name != "test_samples.py":
        monkeypatch.setattr(samples, "MOST_SAMPLES", 256)


@pytest.fixture(autouse=True)
def _time_to_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a survey cut short because the training is, which a busy machine would do to some."""
    monkeypatch.setattr(choose, "LEAST_SECONDS", math.inf)


@pytest.fixture(autouse=True)
def _no_bytes_besides_tensors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small modules under budgets of a few MiB: what a process takes besides would be most of these."""
    if request.path.name != "test_kept_budget.py":
        monkeypatch.setattr("lightning_memguard.training.run.reading.process_bytes", lambda *_: NOTHING)


@pytest.fixture(autouse=True)
def of_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings here have few steps: batches may grow until an epoch has one."""
    defaults = {**MemGuard.__init__.__kwdefaults__, "min_steps_per_epoch": None}
    monkeypatch.setattr(MemGuard.__init__, "__kwdefaults__", defaults)


@pytest.fixture
def small() -> type[Small]:
    return Small


class Wide(pl.LightningModule):
    """Wide enough that 0.1 % of its memory is more than a few scalars: 1.3 MB of weights."""

    def __init__(self, adam: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        self.adam = adam

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        if self.adam:
            return torch.optim.Adam(self.parameters())
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


@pytest.fixture
def wide() -> type[Wide]:
    return Wide


@pytest.fixture
def wide_data() -> TensorDataset:
    """256 samples for `Wide`."""
    return TensorDataset(torch.randn(256, 128), torch.randint(0, 10, (256,)))


@pytest.fixture
def dataset() -> TensorDataset:
    """One hundred samples of 16 features and a class."""
    return TensorDataset(torch.randn(100, 16), torch.randint(0, 4, (100,)))


@pytest.fixture
def trainer() -> Callable[..., pl.Trainer]:
    return quiet_trainer


@pytest.fixture
def tuned() -> Callable[..., Tuning]:
    """Everything that happens at setup of a run that may grow, without the fit.

    ``data`` is a dataset, which is loaded by ten samples, or loaders, or a data module.
    """

    def run(trainer: pl.Trainer, module: pl.LightningModule, data: Any, **settings: Any) -> Tuning:
        trainer.strategy.connect(module)
        if isinstance(data, pl.LightningDataModule):
            trainer._data_connector.attach_data(module, datamodule=data)
        else:
            loaders = DataLoader(data, batch_size=10) if isinstance(data, Dataset) else data
            trainer._data_connector.attach_data(module, loaders)
        return tune(trainer, module, MemGuard(**{"batch_size": "largest", **settings})._settings)

    return run


@pytest.fixture
def decided(tuned: Callable[..., Tuning], trainer: Callable[..., pl.Trainer]) -> Callable[..., Decision]:
    """The decision for a run that starts; ``settings`` are its Trainer's, and all else is the guard's."""

    def run(data: Any, settings: dict[str, Any] | None = None, module: Any = None, **guard: Any) -> Decision:
        return tuned(trainer(**(settings or {})), module or Small(), data, **{"batch_size": "auto", **guard}).decision

    return run


_survey = Surveyor.survey


def _survey_at_own_size(surveyor: Surveyor, batch_size: int, terms: Terms, *, scalable: bool = True) -> Curve:
    return _survey(surveyor, batch_size, terms, scalable=False)


@pytest.fixture
def at_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is captured as it will run, and at no other size, in a test that asks for no other."""
    monkeypatch.setattr(Surveyor, "survey", _survey_at_own_size)


@pytest.fixture(scope="module")
def _captured() -> dict[object, Trace]:
    return {}


@pytest.fixture
def captured_once(_captured: dict[object, Trace], monkeypatch: pytest.MonkeyPatch, here: None) -> None:
    """A step is captured once for all tests of a file: by its module, what its Trainer does, and its batch's shapes."""
    own = capture.capture_here

    def once(program: Any, batch_size: int, method: Any, variant: Any = capture.FIRST, **how: Any) -> Trace:
        trainer, module = program.trainer, program.module
        run = trainer.max_epochs, trainer.max_steps, trainer.precision, program.batches_per_step, program.stage
        others = *map(type, trainer.callbacks), program.callback_bytes, bool(program.around)
        values = [
            (name, value) for name, value in vars(module).items() if isinstance(value, bool | int | float | str | type)
        ]
        asked = program.expected_batch(batch_size), batch_size, method, variant, *how.items()
        key = type(module), repr(module), *values, *run, *others, *asked
        if program.changes:
            return own(program, batch_size, method, variant, **how)
        if key not in _captured:
            _captured[key] = own(program, batch_size, method, variant, **how)
        return _captured[key]

    monkeypatch.setattr(capture, "capture_here", once)


@pytest.fixture
def begun() -> Iterator[Callable[..., GuardedRun]]:
    """A guarded fit at its first step: the test says which batches come, and what happens; nothing trains."""
    runs: list[GuardedRun] = []

    def begin(module: pl.LightningModule, loader: Any, **settings: Any) -> GuardedRun:
        trainer = quiet_trainer()
        trainer.strategy.connect(module)
        trainer._data_connector.attach_data(module, loader)
        run = GuardedRun(trainer, module, MemGuard(**settings)._settings, "fit", None, WeakKeyDictionary())
        runs.append(run)
        run.apply()
        run.announce()
        run.start()
        run.start_measuring()
        return run

    yield begin
    for run in runs:
        if hasattr(run, "trainer"):  # else the test has closed it
            run.close()


@pytest.fixture
def not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's parts are looked for in itself: they are there before it trains."""
    monkeypatch.setattr(LightningProgram, "inspect", lambda program, examine: examine(program.module, "self"))


@pytest.fixture
def without_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal tries no remedies, each of which is a capture."""
    monkeypatch.setattr(advise, "try_remedies", lambda *_, **__: advise.AdviceReport(()))


@pytest.fixture
def as_measured(
    request: pytest.FixtureRequest, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Decision]:
    """A run is predicted; then it runs unguarded, and PyTorch's profiler sees the same peak within 0.1 %.

    ``run`` takes a Trainer; ``callbacks`` and ``plugins`` are made for each of the two. Long tests capture other sizes
    too, from which the step must follow.
    """
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    truth = importlib.import_module("shared.truth")

    def check(
        run: Callable[[Any], object],
        *callbacks: Callable[[], Any],
        plugins: Callable[[], Any] | None = None,
        error: float = 0.001,
        **settings: Any,
    ) -> Decision:
        def made(*guards: Any) -> Any:
            more = {"plugins": [plugins()]} if plugins else {}
            return trainer(*guards, *(make() for make in callbacks), **settings, **more)

        guard = MemGuard("check")
        with pytest.MonkeyPatch.context() as patches:
            if not request.node.get_closest_marker("long"):
                patches.setattr(Surveyor, "survey", _survey_at_own_size)
            run(made(guard))
        decision = guard.decision
        assert decision is not None
        assert decision.footprint is not None, decision.reason
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run(made())
        _, measured = truth.peak_of(truth.memory_events(profiler))
        assert abs(decision.footprint.peak_allocated_bytes / measured - 1) <= error, (
            f"predicted {decision.footprint.peak_allocated_bytes:,} in {decision.footprint.phase}, "
            f"measured {measured:,}: {dict(decision.footprint.parts)}"
        )
        return decision

    return check
