"""How long a survey may take: a share of the run that it is for, as far as its first traces tell."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from pytorch_lightning.callbacks import Timer
from torch.utils.data import TensorDataset

from lightning_memguard import MemGuard, MemGuardError
from lightning_memguard.core.replay.seconds import Speed
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.core.trace.work import Work
from lightning_memguard.training.run import choose, setup_seconds
from lightning_memguard.training.run.choose import Planner

ONE_A_SECOND = Speed({"float32": 1.0}, ((0.0, 1.0),), 0.0, (1.0, 1.0))


def trace(size: int, seconds: float, method: Any = "fake") -> Trace:
    return Trace(size, "cpu", method, (), work=(Work("float32", seconds, 0.0),))


def run_of(batches: int | None, *, epochs: int | None = 1, steps: int = -1, trains: bool = True) -> Any:
    trainer = SimpleNamespace(max_epochs=epochs, max_steps=steps)
    info = SimpleNamespace(batches=lambda _: batches)
    facts = SimpleNamespace(is_rehearsal=False, limits={"train": 1.0}, accumulate_grad_batches=2)
    program, no_validation = SimpleNamespace(trainer=trainer, trains=trains), {"validation_info": None}
    return SimpleNamespace(
        program=program, loader_info=info, facts=facts, evaluation=SimpleNamespace(value=None), **no_validation
    )


@pytest.mark.parametrize(
    ("run", "batches"),
    [
        (run_of(10), 10),
        (run_of(10, epochs=3), 30),
        (run_of(10, epochs=-1), math.inf),
        (run_of(10, epochs=-1, steps=4), 8),
        (run_of(None, epochs=1000, steps=4), 8),
        (run_of(None), math.inf),
        (run_of(10, epochs=3, steps=4, trains=False), 10),
    ],
)
def test_a_run_ends_after_its_epochs_or_steps(run: Any, batches: float) -> None:
    run.loader_info.role = "train"
    assert setup_seconds.batches_of(run, 8) == batches


@pytest.mark.parametrize(
    ("step", "batches", "seconds"),
    [(1.0, 100, 20.0), (1.0, 10, 5.0), (0.4, 100, 8.0), (0.4, 1000, 15.0), (0.4, None, 15.0), (2.0, None, math.inf)],
)
def test_it_is_a_fifth_of_the_run_and_less_before_fast_steps(step: float, batches: int | None, seconds: float) -> None:
    run = run_of(batches)
    run.loader_info.role = "train"
    found = setup_seconds.setup_seconds([trace(8, step)], run, 8, ONE_A_SECOND)
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(("batches", "spent", "seconds"), [(10, 9.0, 5.0), (600, 9.0, 12.0), (None, 9.0, 15.0)])
def test_before_a_trace_a_step_takes_a_share_of_what_its_capture_does(
    batches: int | None, spent: float, seconds: float
) -> None:
    run = run_of(batches)
    run.loader_info.role = "train"
    assert setup_seconds.setup_seconds([], run, 8, None, spent) == pytest.approx(seconds)


def test_a_time_limit_and_validations_count() -> None:
    run = run_of(1000)
    run.loader_info.role = "train"
    run.program.trainer.callbacks = [Timer(timedelta(seconds=40))]
    assert setup_seconds.setup_seconds([trace(8, 1.0)], run, 8, ONE_A_SECOND) == pytest.approx(8.0)
    run = run_of(10)
    run.loader_info.role = "train"
    run.validation_info = SimpleNamespace(batches=lambda _: 300, role="val")
    run.evaluation = SimpleNamespace(value=SimpleNamespace(batch_size=8))
    run.facts.limits["val"], run.facts.check_val_every_n_epoch = 1.0, 2
    assert setup_seconds._of_validation(run) == pytest.approx(300 / 3 / 2)
    assert setup_seconds.batches_of(run, 8, 50) == 10 + 50


def test_the_time_of_a_step_is_that_of_its_work_else_what_a_real_one_took() -> None:
    seconds = setup_seconds._step_seconds
    assert seconds([trace(4, 1.0), trace(8, 1.5)], 16, ONE_A_SECOND) == pytest.approx(2.5)
    assert seconds([trace(4, 1.0), trace(8, 9.0, "real")], 16, ONE_A_SECOND) == pytest.approx(18.0), "one way alone"
    real = Trace(4, "cpu", "real", (), seconds=0.5)
    assert seconds([real], 16, ONE_A_SECOND) == seconds([real], 16, None) == 2.0
    assert seconds([trace(4, 1.0)], 16, None) is None


def test_a_short_run_is_predicted_at_its_own_size_with_what_was_left_out(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tuned(trainer(), small(), dataset, batch_size="auto", max_setup_seconds=None).decision
    with monkeypatch.context() as patch:  # from the beginning, since captures may be quick
        patch.setattr(Planner, "_soon", lambda _, traces, __: 0.0 if traces else math.inf)
        cut = tuned(trainer(), small(), dataset, batch_size="auto").decision
    assert cut.batch_size == whole.batch_size == 10
    assert cut.footprint.peak_allocated_bytes == whole.footprint.peak_allocated_bytes
    assert any("time was up" in note for note in cut.footprint.notes)
    assert not any("time was up" in note for note in whole.footprint.notes)


@pytest.mark.parametrize(
    ("settings", "hurries"),
    [
        ({}, True),
        ({"batch_size": "keep"}, True),
        ({"batch_size": "largest"}, False),
        ({"keep_effective_batch_size": 64}, False),
        ({"max_setup_seconds": 60}, False),
    ],
)
def test_who_asks_for_a_size_or_sets_a_time_has_it(
    settings: Any, hurries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "LEAST_SECONDS", 5.0)
    monkeypatch.setattr(choose, "MOST_IF_FAST", 1000.0)
    planner = object.__new__(Planner)
    planner._settings, planner._started = MemGuard(**settings)._settings, time.monotonic() - 100.0
    planner._used_before, planner._begun, planner._was_hurried = time.process_time(), planner._started, False
    planner._most_seconds, planner._speed, planner._gpu = None, ONE_A_SECOND, None
    planner._reading, planner._run = SimpleNamespace(batch_size=8), None  # type: ignore[assignment]
    with mock.patch.object(choose, "setup_seconds", return_value=7.0), mock.patch.object(Planner, "_known_run"):
        assert (planner._soon([trace(8, 1.0)], 6.0) < math.inf) == hurries
        assert not planner._was_hurried


def test_the_speed_of_this_machine_is_measured_only_in_a_long_setup() -> None:
    planner = object.__new__(Planner)
    planner._started, planner._used_before, planner._most_seconds = time.monotonic(), time.process_time(), None
    planner._settings = MemGuard()._settings
    with mock.patch.object(choose, "speed_here") as measured:
        assert planner._soon([trace(8, 1.0)], 4.0) == math.inf
    assert not measured.called


def test_it_is_a_number_or_one_of_two_words() -> None:
    assert MemGuard()._settings.most_setup_seconds == 60.0
    assert MemGuard(max_setup_seconds=None)._settings.most_setup_seconds == math.inf
    for wrong in ("long", 0, True):
        with pytest.raises(MemGuardError, match="is no time"):
            MemGuard(max_setup_seconds=wrong)  # type: ignore[arg-type]
