"""The recorder of real trainings, as far as it can be shown without a GPU, and the check of recorded histories."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import io
import json
import subprocess
import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from lightning_memguard.core.replay.settings import AllocatorSettings

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MIB = 1 << 20


@pytest.fixture(scope="module")
def benchmarks() -> Any:
    """Import a benchmark script or one of their shared modules, by name; they import each other as scripts do."""
    sys.path.insert(0, str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        if name.startswith("shared."):
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    yield load
    sys.path.remove(str(BENCHMARKS))


def started(code: str) -> subprocess.Popen[str]:
    """A training's process, as the recorder starts it."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def recorder(benchmarks, monkeypatch, tmp_path):
    """Record children given as code, in place of trainings; returns what was written."""
    module = benchmarks("record")
    out = tmp_path / "made.json"

    def record(codes, minutes=1.0, again=False, clock=()):
        if clock:
            monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=iter(clock).__next__))
        monkeypatch.setattr(module, "conditions", lambda options: "here")
        monkeypatch.setattr(module, "start", lambda name, options: started(codes[name]))
        options = argparse.Namespace(minutes=minutes, case_minutes=1.0, reserve=0.1, ahead=2, again=again)
        module.record(list(codes), out, options)
        return module.read(out)["cases"]

    return record


TRAINS = 'print(input() and \'{"max_reserved": null, "seconds": 0.1}\')'


@pytest.mark.long
def test_a_recording_is_written_and_continued(benchmarks, monkeypatch, tmp_path, capsys):
    record, out = benchmarks("record"), tmp_path / "cpu.json"
    command = ["record.py", "--accelerator", "cpu", "--batch-size", "2", "--only", "gan_adam"]
    command += ["--case-minutes", "9", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    record.main()
    assert capsys.readouterr().out.startswith("0 recorded already, 1 to go")
    recording = json.loads(out.read_text())
    assert recording["machine"]["gpu"] is None
    case = recording["cases"]["gan_adam"]
    assert (case["batch_size"], case["max_reserved"]) == (2, None)
    assert case["training"]["optimizer"] == "adam"

    record.main()
    assert capsys.readouterr().out.startswith("1 recorded already, 0 to go\n")
    assert json.loads(out.read_text()) == recording


def test_a_run_out_of_time_leaves_the_rest_for_the_next_run(recorder, capsys):
    assert recorder({"one": TRAINS, "two": TRAINS}, minutes=0.0) == {}
    assert "time is up with 2 to go" in capsys.readouterr().out


def test_a_training_that_fails_is_recorded_as_failed(benchmarks):
    child = started("input(); raise MemoryError('no room')")
    assert benchmarks("record").finish(child, 30) == {"failed": "MemoryError: no room"}


def test_a_training_that_hangs_is_stopped(benchmarks):
    child = started("import time; input(); time.sleep(60)")
    assert benchmarks("record").finish(child, 0.5) == {"failed": "took more than 0.5 s"}


def test_after_a_training_that_fails_the_next_one_runs(recorder):
    found = recorder({"one": "input(); raise MemoryError('no room')", "two": TRAINS})
    assert found["one"] == {"failed": "MemoryError: no room", "conditions": "here"}
    assert found["two"] == {"max_reserved": None, "seconds": 0.1, "conditions": "here"}


def test_a_failure_is_retried_only_on_request(recorder, capsys):
    recorder({"one": "input(); raise ValueError('no')"})
    recorder({"one": TRAINS})
    assert "1 recorded already, 0 to go" in capsys.readouterr().out
    assert "failed" not in recorder({"one": TRAINS}, again=True)["one"]


def test_a_training_cut_short_by_the_deadline_is_left_for_the_next_run(recorder, capsys):
    clock = (0.0, 0.0, 59.5, 60.0)  # at the start, before each training, after the second
    found = recorder({"one": TRAINS, "two": "import time; input(); time.sleep(600)"}, clock=clock)
    assert list(found) == ["one"]
    assert "time is up with 1 to go" in capsys.readouterr().out


def test_figures_of_other_conditions_are_recorded_again(benchmarks):
    record = benchmarks("record")
    recording = {"cases": {"mlp": {"conditions": "NVIDIA A, torch 2"}}}
    assert record.is_recorded(recording, "mlp", "NVIDIA A, torch 2", again=False)
    assert not record.is_recorded(recording, "mlp", "NVIDIA B, torch 2", again=False)


def test_out_of_memory_within_a_training_keeps_what_was_measured_so_far(benchmarks, monkeypatch):
    record, corpus, truth = (benchmarks(name) for name in ("record", "shared.corpus", "shared.truth"))

    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(512, 10)

        def forward(self, x):
            raise MemoryError("no room")

    by_name = {case.name: case for case in corpus.corpus()}
    greedy = dataclasses.replace(by_name["mlp"], network=Greedy)
    monkeypatch.setattr(corpus, "corpus", lambda: (greedy,))
    monkeypatch.setattr(truth, "quieten", lambda: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("go 60\n"))
    found = record.train("mlp", "cpu", 2)
    assert (found["failed"], found["out_of_memory"]) == ("MemoryError: no room", True)
    assert found["until_then"]["steps"] == []
    json.dumps(found)


def test_a_child_without_its_parent_does_not_train(benchmarks, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(SystemExit):
        benchmarks("record").wait_for_go(benchmarks("accuracy").torch)


def test_a_recording_is_never_half_written(benchmarks, tmp_path):
    record = benchmarks("record")
    path = tmp_path / "some.json"
    record.write(path, {"cases": {"one": 1}})
    with pytest.raises(TypeError):
        record.write(path, {"cases": {"two": object()}})
    assert json.loads(path.read_text()) == {"cases": {"one": 1}}


def test_the_corpus_is_large_and_its_names_are_unique(benchmarks):
    cases = benchmarks("shared.corpus").corpus()
    assert len(cases) >= 60
    assert len({case.name for case in cases}) == len(cases)
    assert sum(case.history for case in cases) >= 10
    assert {case.family for case in cases} >= {"cnn", "transformer", "unet", "lstm", "gan"}


def test_events_are_numbered_in_order_of_appearance(benchmarks):
    snapshot = {
        "device_traces": [
            [
                {"action": "segment_alloc", "addr": 4096, "size": 2 * MIB, "stream": 7},
                {"action": "alloc", "addr": 4096, "size": 100, "stream": 7},
                {"action": "free_completed", "addr": 4096, "size": 100, "stream": 0},
            ]
        ]
    }
    assert benchmarks("record").events(snapshot) == [
        ["segment_alloc", 0, 2 * MIB, 0],
        ["alloc", 0, 100, 0],
        ["free_completed", 0, 100, 1],
    ]


def test_addresses_and_segments_are_relative_to_the_lowest(benchmarks):
    record = benchmarks("record")
    entries = [{"action": "alloc", "addr": 8192}, {"action": "oom"}, {"action": "alloc", "addr": 4096}]
    blocks = [{"size": 512, "requested_size": 100, "state": "active_allocated"}]
    held = {"segment_type": "small", "blocks": blocks, "total_size": 2 * MIB}
    snapshot = {
        "device_traces": [entries],
        "segments": [{"address": 9, "stream": 3, **held}, {"address": 5, "stream": 0, **held}],
    }
    assert record.addresses(snapshot) == [4096, -1, 0]
    assert record.segments(snapshot) == [
        [2 * MIB, "small", 0, [[512, 100, "active_allocated"]]],
        [2 * MIB, "small", 1, [[512, 100, "active_allocated"]]],
    ]


def test_a_recorded_history_is_compared_with_our_segments(benchmarks):
    accuracy = benchmarks("accuracy")
    settings = AllocatorSettings.for_device("cuda", {})
    small = [["segment_alloc", 0, 2 * MIB, 0], ["alloc", 0, 1000, 0], ["alloc", 1, 2000, 0]]
    assert accuracy.replay_history(small, settings) == (2, 0)
    freed = [*small, ["free_requested", 0, 1000, 0], ["free_completed", 0, 1000, 0], ["alloc", 0, 900, 0]]
    assert accuracy.replay_history(freed, settings) == (3, 0)
    other = [["segment_alloc", 0, 20 * MIB, 0], ["alloc", 0, 1000, 0]]
    assert accuracy.replay_history(other, settings) == (1, 1)
    large = [["segment_alloc", 0, 20 * MIB, 0], ["alloc", 0, 2 * MIB, 0], ["free_completed", 0, 2 * MIB, 0]]
    emptied = [*large, ["segment_free", 0, 20 * MIB, 0], *small]
    assert accuracy.replay_history([*emptied, ["alloc", 2, 1000, 0]], settings) == (4, 3), "room was made"
    emptied = [*emptied[:4], ["alloc", 0, 0, 0], *small]
    assert accuracy.replay_history(emptied, settings) == (4, 0), "`torch.cuda.empty_cache` was called"


def test_a_training_of_the_corpus_is_predicted_for_the_gpu_it_was_recorded_on(benchmarks):
    machine = {
        "gpu": "NVIDIA H200",
        "total_memory": 140 << 30,
        "compute_capability": [9, 0],
        "multiprocessors": 132,
        "environ": {},
    }
    case = {"batch_size": 4, "max_allocated": 1 << 30, "max_reserved": 2 << 30, "history": None}
    found = benchmarks("accuracy").predict_recorded(("gan", case, machine))
    assert 0 < found.predicted_allocated <= found.predicted_reserved
    assert found.fits
