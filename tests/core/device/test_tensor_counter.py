"""Tensors of the CPU, counted in windows: to the byte, in silence, and never in the way of the user's own profiler."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable

import pytest
import torch

from lightning_memguard.core.device import tensor_counter
from lightning_memguard.core.device.tensor_counter import TensorCounter
from lightning_memguard.units import MIB

pytestmark = pytest.mark.skipif(not tensor_counter.is_available(), reason="needs glibc's mallinfo2")


def taken(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_a_peak_between_two_moments_is_counted_to_the_byte():
    counter = TensorCounter(held_bytes=5 * MIB)
    counter.mark("step", lambda: 5 * MIB)
    kept = taken(1000)
    gone = taken(3 * MIB + 8)
    del gone
    counter.close()
    assert counter.peaks == {"step": 5 * MIB + 1000 + 3 * MIB + 8}
    assert kept.nbytes == 1000


def test_what_was_kept_while_no_window_was_open_counts_in_the_next():
    counter = TensorCounter(held_bytes=0)
    kept = [taken(2 * MIB) for _ in range(4)]
    counter.mark("step", lambda: 0)  # knows of none of them
    kept.append(taken(MIB))
    counter.close()
    assert 9 * MIB <= counter.peaks["step"] < 9.1 * MIB


def test_objects_that_come_between_windows_are_no_tensors():
    counter = TensorCounter(held_bytes=0)
    texts = ["x" * 5000 for _ in range(100)]
    counter.mark("step", lambda: 0)
    block = taken(777)
    counter.close()
    assert counter.peaks == {"step": 777}
    assert len(texts) == 100
    assert block.nbytes == 777


def test_a_block_from_before_the_window_is_freed_in_silence(capfd):
    old = taken(4 * MIB)
    counter = TensorCounter(held_bytes=4 * MIB)
    counter.mark("step")
    del old
    counter.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["kineto", "legacy"])
def test_a_profiler_that_the_users_code_starts_in_a_window_records_its_own(kind):
    counter = TensorCounter(held_bytes=0)
    counter.mark("step")
    if kind == "kineto":
        with torch.profiler.profile() as profiler:
            torch.ones(10).add(1)
        names = {event.name for event in profiler.events()}
    else:
        with torch.autograd.profiler_legacy.profile() as profiler:
            torch.ones(10).add(1)
        names = {event.name for event in profiler.function_events}
    assert "aten::add" in names
    assert not counter.is_open
    counter.mark("step")
    counter.close()


def test_no_window_opens_while_the_users_code_profiles():
    counter = TensorCounter(held_bytes=0)
    with torch.profiler.profile() as profiler:
        counter.mark("step")
        torch.ones(10).add(1)
        assert not counter.is_open
    assert "aten::add" in {event.name for event in profiler.events()}


def test_a_fork_closes_the_window(run_program: Callable[[str], object]):
    """A worker of a loader that was forked while one is open would record each of its blocks, and keep that."""
    child, parent = run_program(
        textwrap.dedent("""
        import json, os, torch
        from lightning_memguard.core.device.tensor_counter import TensorCounter
        counter = TensorCounter(held_bytes=0)
        counter.mark("step")
        if not (pid := os.fork()):
            os._exit(torch._C._autograd._profiler_enabled())
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), counter.is_open]))
        """)
    )
    assert (child, parent) == (0, False)
    assert os.getpid()


def test_windows_take_a_hundredth_of_the_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(tensor_counter, "perf_counter", lambda: now[0])
    counter = TensorCounter(held_bytes=0)
    for _ in range(4):
        counter.mark("step")
        counter.close()
    counter._seconds = 1.0
    now[0] = 99.0
    counter.mark("step")
    assert not counter.is_open
    counter.mark("another")
    assert counter.is_open
    counter.close()
    now[0] = 101.0
    counter.mark("step")
    assert counter.is_open
    counter.close()
