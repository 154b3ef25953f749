"""Make glibc return freed memory to the system, so that a CPU training holds what its tensors hold."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from time import monotonic

import torch

from lightning_memguard.core.device.host import or_none

KEPT_FREED_RATIO = 1.75
"""How far the freed blocks that glibc keeps can raise a CPU training above its tensors (see `return_freed_memory`)."""

MMAPPED_BYTES = 128 << 10
"""Blocks from this size on get pages of their own, as in a new process (DEFAULT_MMAP_THRESHOLD_MIN of malloc.c).

With 1 MiB, a GPT-2 with adapters whose activations are 672 KiB each had 41 of 104 MiB of its heap freed and kept at
the peak: glibc up to 2.37 does not find a freed block again for an aligned request of the same size (its bug 14581).
"""

LARGEST_IN_HEAP_BYTES = 32 << 20
"""The most that glibc's own rule lets the threshold rise to (DEFAULT_MMAP_THRESHOLD_MAX)."""

_GLIBC_TRIM, _GLIBC_MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h, see man 3 mallopt
_LARGEST_HOLE_BYTES, _MOST_HOLES = 1 << 30, 10_000
_TRIMMING_SHARE = 0.02  # of a run's time


def trim_heap() -> None:
    """Return what the process has freed so far, so that a baseline holds nothing that a training could reuse unseen.

    After 660 MiB of small tensors had come and gone, a training with 400 MiB of tensors measured 160 MiB without this
    call and 505 with it. The call took 40 to 120 ms there, and takes no time in a process that has freed little. It
    does nothing with another C library (musl, macOS) or another allocator.
    """
    if sys.platform == "linux":
        or_none(lambda: ctypes.CDLL(None).malloc_trim(0))


def return_freed_memory(device: torch.device, *, fill_holes: bool = True) -> Callable[[], None]:
    """Make freed host memory go back to the system at once, so that a CPU training holds what its tensors hold.

    By default glibc comes to keep freed blocks of up to 32 MiB, and their sizes rarely match the next request:
    trainings with 380 MiB of tensors then held 630 to 670 MiB, and 385 to 405 with this (U-Net, GPT, CNN). It costs
    speed, since fresh memory comes in page by page. Does nothing if ``device`` is not the CPU, with other C libraries,
    or if the user has set malloc's thresholds.

    Args:
        device: of the training.
        fill_holes: take the free blocks of the heap, so that no tensor comes to lie there; they count against a limit
            of the process's own.

    Returns:
        A function that lets glibc keep freed blocks again.
    """
    set_by_user = any("mmap_threshold" in f"{name}={value}".lower() for name, value in os.environ.items())
    applies = device.type == "cpu" and sys.platform == "linux" and not set_by_user
    libc = or_none(_glibc) if applies else None
    if libc is None:
        return lambda: None

    def set_thresholds(nbytes: int) -> None:
        libc.mallopt(_GLIBC_MMAP, nbytes)
        libc.mallopt(_GLIBC_TRIM, 2 * nbytes)

    set_thresholds(MMAPPED_BYTES)
    gc.collect()  # what an earlier fit left in cycles would be freed while this one runs
    trim_heap()
    blocks = (or_none(_fill_holes, libc) if fill_holes else None) or []

    def undo() -> None:
        for block in blocks:
            libc.free(block)
        set_thresholds(LARGEST_IN_HEAP_BYTES)

    return undo


def _glibc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes, libc.sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_void_p], [ctypes.c_long]
    libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    return libc


def _fill_holes(libc: ctypes.CDLL) -> list[int]:
    """Allocate the large free blocks of the heap, which have no pages: an earlier fit left them there.

    glibc serves a request from a free block of the heap before it asks for pages (`_int_malloc`, malloc.c), whatever
    the thresholds are, and keeps what is then freed there: of 46 MiB of tensors, all, and none once these are taken.
    """
    blocks: list[int] = []
    nbytes = _LARGEST_HOLE_BYTES
    while nbytes >= MMAPPED_BYTES and len(blocks) < _MOST_HOLES:
        block = libc.malloc(nbytes)
        if block and block < libc.sbrk(0):  # mapped pages are above the heap
            blocks.append(block)
        else:
            libc.free(block)
            nbytes //= 2
    return blocks


class Trimmer:
    """Returns the heap's free pages again and again, for a fiftieth of the time at most.

    Collating 9,645 samples takes 27 MiB of small objects, and few that stay keep glibc from returning the others.
    """

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self) -> None:
        """Return them, unless that was done a short while ago."""
        started = monotonic()
        if started >= self._next:
            trim_heap()
            ended = monotonic()
            self._next = ended + (ended - started) / _TRIMMING_SHARE
