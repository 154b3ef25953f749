"""What worker processes take is read from pages and from shared memory."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest

from lightning_memguard.core.device import children
from lightning_memguard.core.device.children import ChildrenMeter
from lightning_memguard.units import MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def hold(nbytes: int, ready: Event, done: Event) -> None:
    kept = np.ones(nbytes, np.uint8)
    ready.set()
    done.wait(60)
    assert len(kept) == nbytes


@contextmanager
def child(nbytes: int, work: Callable[[int, Event, Event], None] = hold) -> Iterator[None]:
    """A forked process that holds so many bytes."""
    context = get_context("fork")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=work, args=(nbytes, ready, done))
    process.start()
    assert ready.wait(60)
    yield
    done.set()
    process.join()


def test_pages_of_a_child_are_counted_and_those_that_it_shares_are_not() -> None:
    meter = ChildrenMeter()
    with child(64 * MIB):
        meter.read_pages()
    assert 64 * MIB <= meter.peak_bytes < 90 * MIB
    meter.restart()
    assert meter.peak_bytes == 0


def test_pages_that_the_process_rewrites_stay_with_its_child() -> None:
    pages = np.ones(64 * MIB, np.uint8)
    meter = ChildrenMeter()
    with child(1):
        pages += 1
        meter.read_pages()
    assert 64 * MIB <= meter.peak_bytes < 90 * MIB


def test_a_child_that_was_there_before_is_not_counted() -> None:
    with child(128 * MIB):
        meter = ChildrenMeter()
        with child(64 * MIB):
            meter.read_pages()
    assert 64 * MIB <= meter.peak_bytes < 90 * MIB


SHARED = Path("/dev/shm")


def share(nbytes: int, ready: Event, done: Event) -> None:
    """As PyTorch's workers do: the file has no name any more when it is filled."""
    with tempfile.TemporaryFile(dir=SHARED) as file:
        file.write(bytes(nbytes))
        file.flush()
        ready.set()
        done.wait(60)


def test_shared_memory_of_children_is_counted_and_that_of_other_programs_is_not() -> None:
    meter = ChildrenMeter()
    with tempfile.TemporaryDirectory(dir=SHARED) as folder:
        (Path(folder) / "file").write_bytes(bytes(8 * MIB))
        meter.read_shared()
        assert meter.peak_bytes < MIB
        with child(4 * MIB, share):
            meter.read_shared()
    assert 4 * MIB <= meter.peak_bytes < 5 * MIB
    meter.restart()
    meter.read_shared()
    assert meter.peak_bytes < MIB


def test_named_files_of_a_process_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    file = SHARED / f"torch_{os.getpid()}_test"
    used = iter([8 * MIB, 16 * MIB])  # whatever another program does with it meanwhile
    monkeypatch.setattr(children, "_shared_bytes", lambda: next(used))
    meter = ChildrenMeter()
    file.write_bytes(bytes(4 * MIB))
    try:
        meter.read_shared()
    finally:
        file.unlink()
    assert 4 * MIB <= meter.peak_bytes < 5 * MIB


def test_where_files_cannot_be_told_apart_all_of_shared_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([100, 150, 120])
    monkeypatch.setattr(children, "_shared_bytes", lambda: next(used))
    monkeypatch.setattr(ChildrenMeter, "_own_pages", lambda _: 0)  # children of earlier tests may be there
    meter = ChildrenMeter()
    monkeypatch.setattr(meter, "_own_shared", lambda: 1 // 0)
    meter.read_shared()
    meter.read_shared()
    assert meter.peak_bytes == 50


def test_reading_files_leaves_the_time_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter(range(100))
    monkeypatch.setattr(children, "_shared_bytes", lambda: next(used))
    pages = iter([0, 50 * MIB])
    monkeypatch.setattr(ChildrenMeter, "_own_pages", lambda _: next(pages))
    meter = ChildrenMeter()
    monkeypatch.setattr(meter, "_own_shared", lambda: time.sleep(0.05) or 0)
    for _ in range(4):
        meter.read_shared()
    meter.read_pages()
    assert meter.peak_bytes == 50 * MIB


def test_reading_pages_takes_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, reads = ChildrenMeter(), []

    def slow() -> int:
        reads.append(time.sleep(0.02))
        return 0

    monkeypatch.setattr(meter, "_own_pages", slow)
    for _ in range(1000):
        meter.read_pages()
    assert len(reads) == 1


def test_what_cannot_be_read_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = ChildrenMeter(os.getpid())
    monkeypatch.setattr(meter, "_own_pages", lambda: 1 // 0)
    meter.read_pages()
    assert meter.peak_bytes == 0
