"""The recorder of real trainings, as far as it can be shown without a GPU, and the check of recorded histories."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_memguard.core.allocator import AllocatorSettings

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MIB = 1 << 20


@pytest.fixture(scope="module")
def benchmarks() -> Any:
    """Import a benchmark by name; they import each other as scripts do."""
    sys.path.insert(0, str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    yield load
    sys.path.remove(str(BENCHMARKS))


def run(*arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / "record.py"), "--accelerator", "cpu", "--batch-size", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def started(code: str) -> subprocess.Popen[str]:
    """A training's process, as the recorder starts it."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
def test_a_recording_is_written_and_gone_on_with(tmp_path):
    out = tmp_path / "cpu.json.gz"
    first = run("--only", "gan", "--out", str(out), "--ahead", "1")
    assert first.startswith("0 recorded already, 3 to go")
    again = run("--only", "gan", "--out", str(out))
    assert again == "3 recorded already, 0 to go\n"


@pytest.mark.slow
def test_time_that_is_up_leaves_the_rest_for_the_next_run(tmp_path):
    out = tmp_path / "cpu.json"
    told = run("--only", "gan", "--out", str(out), "--minutes", "0.1", "--reserve", "10")
    assert "time is up with 3 to go" in told
    assert not out.exists()


def test_a_training_that_fails_is_recorded_as_failed(benchmarks):
    child = started("input(); raise MemoryError('no room')")
    assert benchmarks("record").finish(child, 30) == {"failed": "MemoryError: no room"}


def test_a_training_that_hangs_is_given_up(benchmarks):
    child = started("import time; input(); time.sleep(60)")
    assert benchmarks("record").finish(child, 0.5) == {"failed": "took more than 0.5 s"}


def test_a_recording_is_never_half_written(benchmarks, tmp_path):
    record = benchmarks("record")
    path = tmp_path / "some.json"
    record.write(path, {"cases": {"one": 1}})
    with pytest.raises(TypeError):
        record.write(path, {"cases": {"two": object()}})
    assert json.loads(path.read_text()) == {"cases": {"one": 1}}


def test_the_corpus_is_large_and_its_names_are_unique(benchmarks):
    cases = benchmarks("corpus").corpus()
    assert len(cases) >= 60
    assert len({case.name for case in cases}) == len(cases)
    assert sum(case.history for case in cases) >= 10
    assert {case.family for case in cases} >= {"cnn", "transformer", "unet", "lstm", "gan"}


def test_events_are_numbered_as_they_come(benchmarks):
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


def test_a_recorded_history_is_held_against_our_segments(benchmarks):
    accuracy = benchmarks("accuracy")
    settings = AllocatorSettings.for_device("cuda", {})
    small = [["segment_alloc", 0, 2 * MIB, 0], ["alloc", 0, 1000, 0], ["alloc", 1, 2000, 0]]
    assert accuracy.replay_history(small, settings) == (2, 0)
    freed = [*small, ["free_requested", 0, 1000, 0], ["free_completed", 0, 1000, 0], ["alloc", 0, 900, 0]]
    assert accuracy.replay_history(freed, settings) == (3, 0)
    other = [["segment_alloc", 0, 20 * MIB, 0], ["alloc", 0, 1000, 0]]
    assert accuracy.replay_history(other, settings) == (1, 1)


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
