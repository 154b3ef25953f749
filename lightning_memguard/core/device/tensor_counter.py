"""How much memory the CPU tensors of this process take: PyTorch's allocator reports each block to a profiler.

While a window is open, torch's legacy profiler collects these reports and nothing else: operators are not recorded.
That costs some 2 microseconds a block, so a run opens windows around a few steps. What tensors take as a window opens
is how much glibc has given out (`mallinfo2`) since the counter was made.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from time import perf_counter

import torch

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.device.host import or_none
from lightning_memguard.units import MIB

SHARE_OF_TIME = 0.01
"""The time that windows may take of a run, once each kind of step was counted a few times."""

FREED = "freed, and kept by the C library"
_WINDOWS_ALWAYS = 4

_HEAP_NOISE_BYTES = MIB  # objects, texts and tables that come and go between windows
_ERRORS_ONLY = 2  # of c10's log: it warns of a block that is freed and was allocated before the window


class TensorCounter:
    """Counts CPU tensors in windows; without a counter on this system, no window opens.

    A window closes by itself if the process forks, or if the user's code starts a profiler in this thread.

    Args:
        held_bytes: what the run's tensors take now.

    Attributes:
        peaks: the most in bytes, by the kind of step: since `restart`, or before if no window was on that kind since.
    """

    def __init__(self, held_bytes: int) -> None:
        self.peaks: dict[str, int] = {}
        self._fresh: set[str] = set()  # kinds that were counted since `restart`
        self._works = is_available()
        self._zero = self._zero_at_start = (_given_out() - held_bytes) if self._works else 0
        self._kind: str | None = None  # of the open window
        self._thread = self._log_level = 0
        self._at_open = 0  # of tensors
        self._started = perf_counter()
        self._seconds = 0.0  # that windows took
        self._opened = Counter[str]()  # how often, by kind

    def restart(self) -> None:
        """Forget the peak so far."""
        self.flush()
        self._fresh.clear()

    def be_due(self) -> None:
        """Let the next windows open, whatever time windows have taken."""
        self._opened.clear()

    def flush(self) -> None:
        """Count what an open window has seen so far."""
        if self._kind is not None:
            self.mark(self._kind)

    @property
    def is_open(self) -> bool:
        """Whether a window is open."""
        return self._kind is not None

    def mark(self, kind: str, known_bytes: Callable[[], int] | None = None) -> None:
        """Begin another kind of step: close a window that is open, and open one.

        None opens if windows took their share of the time, or while the user's code profiles. ``known_bytes`` adds up
        the tensors that are known to be there: if malloc has given out about as much, what is more is no tensor.
        """
        goes_on = self.is_open
        self.close()
        few = self._opened[kind] < _WINDOWS_ALWAYS
        is_due = goes_on or few or self._seconds < SHARE_OF_TIME * (perf_counter() - self._started)
        if self._works and is_due and not port.is_profiling():
            self._opened[kind] += not goes_on
            if known_bytes is not None:
                more = _given_out() - self._zero - known_bytes()
                self._zero += more if more < _HEAP_NOISE_BYTES else 0
            self._works = bool(or_none(self._open, kind))

    def _open(self, kind: str) -> bool:
        self._at_open = _given_out() - self._zero
        self._log_level = _start()
        self._kind, self._thread = kind, threading.get_ident()
        _open_counters.append(self)
        for module, name in port.profilers_begin_by():
            setattr(module, name, _close_first(getattr(module, name), self))
        return True

    def close(self) -> None:
        """Close the open window, if there is one in this thread."""
        if self._kind is None or self._thread != threading.get_ident():
            return
        started, kind = perf_counter(), self._kind
        blocks, self._kind = _stop(self._log_level), None
        _open_counters.remove(self)
        for module, name in port.profilers_begin_by():
            setattr(module, name, getattr(module, name).__wrapped__)
        peak = self._at_open + max(0, *accumulate(blocks), 0)
        self.peaks[kind] = max(peak, self.peaks[kind] if kind in self._fresh else 0)
        self._fresh.add(kind)
        # what else the process was given meanwhile belongs to no tensor: modules that were imported, caches, texts
        grown = _given_out() - self._zero - self._at_open
        self._zero += max(0, grown - sum(blocks))
        self._seconds += perf_counter() - started + _SECONDS_A_BLOCK * len(blocks)

    def others(self, tensor_bytes: int) -> dict[str, int]:
        """Bytes that malloc holds now beyond these tensors and what it had given out when the counter was made."""
        return {
            "kept by libraries and objects": _given_out() - self._zero_at_start - tensor_bytes,
            FREED: _asks()[0]().fordblks,
        }


_SECONDS_A_BLOCK = 1e-6
_open_counters: list[TensorCounter] = []


def _before_fork() -> None:
    for counter in [*_open_counters]:  # a child would record on, without end
        counter.close()


@functools.cache
def is_available() -> bool:
    """Whether blocks can be counted here: with glibc's ``mallinfo2``, and PyTorch's own allocator on top of it."""
    if sys.platform != "linux":
        return False

    def counts() -> bool:
        before = _given_out()
        level = _start()
        block = torch.empty(MIB, dtype=torch.uint8)
        grown, blocks = _given_out() - before, _stop(level)
        return MIB <= grown < 2 * MIB and block.nbytes in blocks

    works = not port.is_profiling() and bool(or_none(counts))
    if works:
        os.register_at_fork(before=_before_fork)
    return works


# -- glibc, and the profiler


class _Heap(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


@functools.cache
def _asks() -> tuple[Callable[[], _Heap], ctypes.c_int]:
    """Return glibc's function, and the least severity that c10 logs."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Heap
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    return ask, ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level")


def _given_out() -> int:
    """Bytes that malloc has given out and that were not freed."""
    heap = _asks()[0]()
    return int(heap.uordblks + heap.hblkhd)


def _start() -> int:
    """Start to collect; return the severity that c10 logged."""
    level = _asks()[1]
    before, level.value = level.value, max(level.value, _ERRORS_ONLY)
    port.count_blocks(operators=False)
    return before


def _stop(log_level: int) -> list[int]:
    """Return the bytes of each block that was allocated, and less than zero of each that was freed."""
    blocks = port.counted_blocks(operators=False)
    _asks()[1].value = log_level
    return blocks


def _close_first(start: Callable[..., object], counter: TensorCounter) -> Callable[..., object]:
    @functools.wraps(start)
    def close_and_start(*arguments: object, **named: object) -> object:
        counter.close()
        return start(*arguments, **named)

    return close_and_start
