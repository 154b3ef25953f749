"""Freed memory goes back: with glibc, each test in a process of its own, whose heap nobody else has used."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from lightning_memguard.core.device import malloc
from lightning_memguard.core.device.host import status_bytes
from lightning_memguard.units import KIB, MIB
from tests.forks import CONTEXT

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc"
)


def resident() -> int:
    return status_bytes(Path("/proc/self"))["RssAnon"]


def in_a_child(work: Callable[[], int]) -> int:
    """MiB that the work answers, in a process whose heap has no holes of earlier tests: they would be taken first."""
    read, write = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_answer, args=(work, write))
    process.start()
    write.close()
    found: int = read.recv()
    process.join()
    return found // MIB


def _answer(work: Callable[[], int], write: Connection) -> None:
    torch.set_num_threads(1)
    write.send(work())


def _leave_holes() -> list[torch.Tensor]:
    """A heap as an earlier training leaves it: large blocks were freed between small ones that stay."""
    libc = malloc._glibc()
    libc.mallopt(malloc._GLIBC_MMAP, malloc.LARGEST_IN_HEAP_BYTES)
    libc.mallopt(malloc._GLIBC_TRIM, 2 * malloc.LARGEST_IN_HEAP_BYTES)
    blocks = [torch.ones(2 * MIB // 4 if at % 2 else KIB) for at in range(60)]
    return blocks[::2]


def _kept_by_a_training() -> int:
    before = resident()
    tensors = [torch.ones(MIB // 4) for _ in range(30)]
    assert resident() - before > 29 * MIB
    del tensors
    return resident() - before


def _after_holes() -> int:
    held = _leave_holes()
    malloc.return_freed_memory(CPU)
    kept = _kept_by_a_training()
    return kept if held else 0


def test_what_a_training_frees_goes_back_although_an_earlier_one_left_holes() -> None:
    assert in_a_child(_after_holes) == 0


def _of_activations() -> int:
    malloc.return_freed_memory(CPU)
    before = resident()
    tensors = [torch.ones(600 * KIB // 4) for _ in range(60)]
    between = [torch.ones(KIB) for _ in range(60)]
    del tensors
    return resident() - before if between else 0


def test_activations_of_some_hundred_kibibytes_go_back_too() -> None:
    assert in_a_child(_of_activations) == 0


def _undone() -> int:
    held = _leave_holes()
    malloc.return_freed_memory(CPU)()
    kept = _kept_by_a_training()
    return kept if held else 0


def test_undone_glibc_may_use_the_holes_again() -> None:
    assert in_a_child(_undone) >= 20


def test_the_user_s_own_thresholds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "33554432")
    monkeypatch.setattr(malloc, "_glibc", lambda: pytest.fail("malloc was touched"))
    malloc.return_freed_memory(CPU)()


def test_the_heap_is_trimmed_again_only_after_fifty_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, trimmed = [100.0], []

    def trim() -> None:
        trimmed.append(now[0])
        now[0] += 0.5

    monkeypatch.setattr(malloc, "trim_heap", trim)
    monkeypatch.setattr(malloc, "monotonic", lambda: now[0])
    trimmer = malloc.Trimmer()
    for at in (100.0, 101.0, 125.4, 125.6):
        now[0] = at
        trimmer()
    assert trimmed == [100.0, 125.6]
