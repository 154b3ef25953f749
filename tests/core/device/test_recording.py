"""The allocator's own snapshot."""

from __future__ import annotations

import inspect

import pytest
import torch

from lightning_memguard.core.device.recording import ActualSnapshot


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """The calls to torch's recording of its allocator's history."""
    asked: list[tuple] = []
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled, **_: asked.append(("record", enabled))
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: asked.append(("write", path)))
    return asked


def test_an_actual_snapshot_records_until_it_is_saved(calls, tmp_path):
    recording = ActualSnapshot(torch.device("cuda"))
    assert calls == [("record", "all")]
    recording.save(tmp_path / "step.pickle")
    assert calls[1:] == [("write", str(tmp_path / "step.pickle")), ("record", None)]


def test_a_history_that_the_user_records_goes_on(calls, monkeypatch, tmp_path):
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    ActualSnapshot(torch.device("cuda")).save(tmp_path / "step.pickle")
    assert calls == [("write", str(tmp_path / "step.pickle"))]


def test_canary_what_is_asked_of_the_allocators_history():
    """Private in torch 2.11 to 2.15."""
    given = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert next(iter(given)) == "enabled"
    assert {"stacks", "device"} <= set(given)
    assert next(iter(inspect.signature(torch.cuda.memory._dump_snapshot).parameters)) == "filename"
    assert hasattr(torch._C, "_cuda_isHistoryEnabled") or not torch.backends.cuda.is_built()
