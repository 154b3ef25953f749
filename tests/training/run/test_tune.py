"""From a fit that has not started to its decision, and every way to end without one."""

from __future__ import annotations

import io
import re
import sys
import warnings
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import DoesNotFitError, MemGuard, MemGuardError
from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.predict import predict
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.decision.decision import Budget, Request
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.training.run import choose, progress
from lightning_memguard.training.run import tune as tuning_module
from lightning_memguard.units import GIB, KIB


@pytest.mark.usefixtures("taped")
def test_a_step_that_pairs_its_samples_gets_an_even_size(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any, played: Any
) -> None:
    """The largest size that fits is odd, and the step raises there: a size that the step can run is chosen."""

    def paired(trace: Trace) -> Trace:
        if trace.batch_size % 2:
            raise ValueError("samples come in pairs")
        return trace

    free = tuned(trainer(), small(), dataset, max_batch_size=51).decision
    played(paired)
    of_pairs = tuned(trainer(), small(), dataset, max_batch_size=51).decision
    assert (free.batch_size, of_pairs.batch_size) == (51, 50)


def test_a_step_that_grows_otherwise_is_captured_where_it_is_asked(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any, played: Any
) -> None:
    """Above 40 samples the step takes as much again: the choice keeps below, since the budget has no room for it."""
    played(lambda trace: trace.plus({"activations": 1000 * KIB if trace.batch_size > 40 else 16}))
    decision = tuned(trainer(), small(), dataset, budget=1000 * KIB, margin=0.0).decision
    assert decision.batch_size == 40
    assert decision.limited_by == "memory"
    assert "each size is predicted by itself" in " ".join(decision.footprint.notes)


def with_free(monkeypatch: pytest.MonkeyPatch, free: int, margin: int) -> None:
    """Let the device have so many bytes free."""
    budget = Budget(free, free, margin, "host", "this host")
    monkeypatch.setattr("lightning_memguard.training.run.reading.read_budget", lambda *_, **__: budget)


@pytest.mark.usefixtures("taped")
def test_a_run_that_needs_part_of_the_margin_is_warned_of_and_not_stopped(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    footprint = tuned(trainer(), small(), dataset, max_batch_size=1).decision.footprint
    most = footprint.most_device_bytes
    with_free(monkeypatch, most, 100)
    decision = tuned(trainer(), small(), dataset).decision
    assert (decision.batch_size, decision.verdict, decision.limited_by) == (1, "does not fit", "memory")
    assert decision.budget.usable_bytes == most - 100
    assert decision.reason.startswith("batch size 1 does NOT fit: it needs ")
    assert decision.reason.endswith(", so it may run all the same.")
    with_free(monkeypatch, footprint.lowest.device_bytes - 1, 0)
    monkeypatch.setattr(tuning_module, "_with_advice", lambda error, _: error)
    with pytest.raises(DoesNotFitError):
        tuned(trainer(), small(), dataset)


@pytest.mark.usefixtures("here")
def test_a_step_that_catches_that_memory_runs_out_is_not_stopped() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        try:
            return model(x.repeat(1000, 1)).sum()
        except torch.OutOfMemoryError:
            return model(x).sum()

    gpu = gpus.find("NVIDIA H200")
    batches = batches_from_one(torch.ones(4, 4))
    program = LoopProgram(nn.Linear(4, 8), batches, step, torch.optim.Adam, torch.device("cuda"), gpu=gpu)
    prediction = predict(program, 4, AllocatorSettings.for_device("cuda", {}))

    def lenient(program: LoopProgram) -> bool:
        run, known = SimpleNamespace(program=program), prediction.curve
        budget = Budget(GIB, 100 * KIB, 0, "nvml", gpu.name)
        stand_in: Any = SimpleNamespace(
            prediction=known, run=run, request=Request(4), budget=budget, footprint_at=known.footprint_at
        )
        return choose._catches_refusals(stand_in)

    assert lenient(program)
    assert not attempt(lambda: lenient(replace(program, step=lambda model, x: model(x.repeat(1000, 1)).sum()))).value
    assert not lenient(replace(program, step=lambda model, x: model(x).sum()))


@pytest.mark.parametrize(("patience", "times"), [(0.0, 1), (60.0, 0)])
def test_what_takes_long_is_announced_once(
    trainer: Any,
    small: Any,
    dataset: TensorDataset,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    patience: float,
    times: int,
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", patience)
    trainer(MemGuard("check")).fit(small(), DataLoader(dataset, batch_size=10))
    assert caplog.text.count("predicting memory on a copy of the step") == times


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_follows_what_is_captured_and_goes_away(
    trainer: Any, small: Any, dataset: TensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    trainer(MemGuard("check", max_setup_seconds=90)).fit(small(), DataLoader(dataset, batch_size=10))

    _, *lines, last = terminal.getvalue().split("\r\x1b[2K")
    assert all(re.match(r"MemGuard: predicting memory, \d+ of 90 s: [^\n]*$", line) for line in lines)
    assert any(": the step at batch size 4; Ctrl-C goes on without it" in line for line in lines)
    assert "predicting" not in last


@pytest.mark.parametrize("is_shown", [True, False])
def test_ctrl_c_goes_on_without_a_prediction_once_that_was_offered(
    trainer: Any, small: Any, dataset: TensorDataset, monkeypatch: pytest.MonkeyPatch, is_shown: bool
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0 if is_shown else 60.0)
    shown = progress.SetupLine.show

    def interrupted(line: progress.SetupLine, doing: str) -> None:
        shown(line, doing)
        if doing:  # once the data was read
            raise KeyboardInterrupt

    monkeypatch.setattr(progress.SetupLine, "show", interrupted)
    run = trainer(MemGuard(batch_size="largest"))
    if not is_shown:
        with pytest.raises(SystemExit):  # as Lightning ends a run
            run.fit(small(), DataLoader(dataset, batch_size=10))
        return
    with pytest.warns(UserWarning, match="did not tune this run: Ctrl-C ended the prediction; batch size 10 is kept"):
        run.fit(small(), DataLoader(dataset, batch_size=10))
    assert run.global_step == 10


def test_setup_ends_in_time_and_uses_what_it_knows_then(
    trainer: Any, small: Any, dataset: TensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is measured and watched all the same, and an error of memory is explained."""
    guard = MemGuard(max_setup_seconds=0.001)
    with pytest.warns(
        UserWarning, match=r"whether it fits is unknown: time was up \(max_setup_seconds\). It takes at le"
    ):
        trainer(guard).fit(module := small(), DataLoader(dataset, batch_size=10))
    (record,) = guard.records
    assert record.predicted.peak_allocated_bytes == sum(each.nbytes for each in module.parameters())
    assert record.measured.peak_bytes > record.predicted.peak_allocated_bytes
    assert (guard.decision.batch_size, guard.decision.outcome, record.has_error) == (10, "kept", False)
    module.on_train_batch_end = mock.Mock(side_effect=MemoryError)
    with pytest.raises(MemoryError) as raised, pytest.warns(UserWarning, match="time was up"):
        trainer(guard).fit(module, DataLoader(dataset, batch_size=10))
    if sys.version_info >= (3, 11):
        assert "MemGuard predicted at least" in "".join(raised.value.__notes__)
    with pytest.raises(MemGuardError, match="max_setup_seconds=0 is no time"):
        MemGuard(max_setup_seconds=0)


def without_a_store(trace: Trace) -> Trace:
    """A step that connects to something at the start of a fit, which a copy cannot; its states can be made."""
    if trace.method != "states":
        raise OSError("no feature store")
    return trace


@pytest.mark.parametrize("mode", ["tune", "check"])
def test_a_step_that_cannot_run_is_not_said_to_fit(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any, played: Any, mode: str
) -> None:
    """Its activations are unknown: that all else fits says little. The reason is the error, not what follows of it."""
    played(without_a_store)
    decision = tuned(trainer(), small(), dataset, mode=mode).decision
    assert decision.footprint.method == "states"
    assert (decision.outcome, decision.batch_size) == ("kept" if mode == "tune" else "checked", 10)
    assert (decision.verdict, decision.fits) == ("unknown", False)
    assert "OSError: no feature store" in decision.reason
    assert "whether it fits is unknown" in decision.reason


def test_states_that_are_too_large_alone_do_not_fit(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any, played: Any
) -> None:
    played(without_a_store)
    decision = tuned(trainer(), small(), dataset, mode="check", budget=1024, margin=0.0).decision
    footprint = decision.footprint
    assert (footprint.method, decision.verdict) == (
        "states",
        "does not fit" if footprint.most_device_bytes > 1024 else "unknown",
    )
    tight = replace(decision, budget=replace(decision.budget, free_bytes=footprint.most_device_bytes - 1))
    assert tight.verdict == "does not fit"


def test_validation_that_cannot_run_is_said_to_be_unknown(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any, played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains = lambda trace: any(event.phase == "optimizer" for event in trace)  # noqa: E731
    played(lambda trace: trace if trains(trace) else without_a_store(trace))
    monkeypatch.setattr(small, "validation_step", lambda *_: None, raising=False)
    monkeypatch.setattr(small, "val_dataloader", lambda _: DataLoader(dataset, batch_size=10), raising=False)
    decision = tuned(trainer(), small(), dataset).decision
    assert decision.outcome == "tuned"
    (note,) = [note for note in decision.footprint.notes if "validation" in note]
    assert note.startswith("the memory of validation's activations is unknown: the step could not run on")
    assert "no feature store" in note
    assert decision.reason.endswith("Validation is not included: what it takes is unknown.")


@pytest.mark.usefixtures("taped")
def test_a_check_says_why_nothing_changed_and_whether_it_could_have(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any
) -> None:
    assert tuned(trainer(), small(), dataset, mode="check").decision.because == 'mode="check" changes nothing'
    decision = tuned(trainer(), small(), DataLoader(dataset, batch_size=None), mode="check").decision
    assert decision.because == (
        'mode="check" changes nothing, and mode="tune" could not change it: fit(train_dataloaders=...) has '
        "batch_size=None: its dataset makes the batches itself"
    )


def test_a_rank_that_may_not_choose_tells_the_others_why() -> None:
    answers = [
        (True, "", None, True),
        (False, "its loader has no size", None, True),
        (False, "nor has this one", None, True),
    ]
    agreed = tuning_module._common(Request(8), answers)
    assert (agreed.free_to_choose, agreed.fixed_because) == (False, "rank 1: its loader has no size")
    own = Request(8, free_to_choose=False, fixed_because="nor has this one")
    assert tuning_module._common(own, answers).fixed_because == "nor has this one"
    assert tuning_module._common(Request(8), [(True, "", None, True)] * 2) == Request(8)
    kept = tuning_module._common(Request(8), [(True, "", None, False), (True, "", "request", True)])
    assert (kept.kept_by, kept.was_set) == ("request", True)


@pytest.mark.usefixtures("taped")
@pytest.mark.parametrize("data", ["own sampler", "too large", "no tensor", "fails"])
def test_a_sentence_is_in_the_table_or_in_a_warning_and_never_in_both(
    trainer: Any, small: Any, dataset: TensorDataset, caplog: pytest.LogCaptureFixture, played: Any, data: str
) -> None:
    module, loader, settings = small(), DataLoader(dataset, batch_size=10), {}
    if data == "own sampler":
        settings = {"batch_size": "largest"}
        loader = DataLoader(dataset, batch_sampler=[list(range(10))] * 3)  # type: ignore[arg-type]
    elif data == "too large":
        settings = {"mode": "check", "budget": 2048}
    elif data == "no tensor":
        loader = DataLoader(["a", "b"], batch_size=1)  # type: ignore[arg-type]
    else:
        played(without_a_store)
    guard = MemGuard(**settings)
    with warnings.catch_warnings(record=True) as caught, suppress(Exception):
        warnings.simplefilter("always")
        trainer(guard).fit(module, loader)
    said = [str(warning.message) for warning in caught if "lightning_memguard" in warning.filename]
    assert len(said) == 1
    printed = caplog.text
    for sentence in said[0].split(". "):
        assert sentence.rstrip(".") not in printed
    assert printed.count(guard.decision.reason) == 0


@pytest.mark.usefixtures("taped")
def test_where_nothing_is_to_be_done_the_table_explains_and_nothing_warns(
    begun: Any, small: Any, dataset: TensorDataset, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begun(small(), DataLoader(dataset, batch_size=10), batch_size="largest")
    assert not [warning for warning in caught if "MemGuard" in str(warning.message)]
    printed = caplog.text
    assert "MemGuard: batch size 100 (was 10) fits: " in printed
    assert "; limited by the size of the dataset, not by memory; an epoch has" in printed


@pytest.mark.usefixtures("taped")
@pytest.mark.parametrize("error", [MemGuardError("no driver"), ZeroDivisionError("a mistake of ours")])
def test_a_guard_that_fails_lets_the_training_go_on(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("lightning_memguard.training.run.reading.read_budget", fail)
    decision = tuned(trainer(), small(), dataset).decision
    assert decision.outcome == "stepped aside"
    assert str(error) in decision.reason
