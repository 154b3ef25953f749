"""Memory that a process's children take: batches that workers put in shared memory, and pages of their own."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import psutil

from lightning_memguard.core.device.host import status_bytes
from lightning_memguard.core.device.memory_info import or_none

_MOST_SHARE = 0.005  # of the run's time may go into reading the pages of processes


class ChildrenMeter:
    """Measures what a process's children and shared memory come to take in addition to the process, as its peak.

    Nothing counts it for us, so it is read at moments: shared memory by `read_shared`, which takes microseconds; pages
    by `read_pages`, which walks page tables and is left out when it would take more than 0.5 % of the time. Linux only;
    elsewhere it is 0 bytes. What was there when the meter is made, such as the server of `forkserver`, is not counted;
    what other processes put in /dev/shm meanwhile is.

    >>> meter = ChildrenMeter()
    >>> meter.read_shared()
    >>> meter.peak_bytes >= 0
    True
    """

    def __init__(self, process: int | None = None) -> None:
        self._process = psutil.Process(process)
        self._shared_before = _shared_bytes()
        self._begun, self._spent = time.monotonic(), 0.0
        self._mapped = 0  # of shared memory, by the process itself
        self._shared = self._pages = 0
        self._pages_before = or_none(self._own_pages) or 0

    @property
    def peak_bytes(self) -> int:
        """The most that was read since `restart`, without shared memory that the process has mapped itself."""
        return max(0, self._shared - self._mapped) + self._pages

    def restart(self) -> None:
        """Forget the peak so far."""
        self._shared = self._pages = 0

    def read_shared(self) -> None:
        """Read what lies in shared memory now."""
        self._shared = max(self._shared, _shared_bytes() - self._shared_before)

    def read_pages(self) -> None:
        """Read the pages that the children do not share with the process, if there is time for it."""
        now = time.monotonic()
        if self._spent > _MOST_SHARE * (now - self._begun):
            return
        pages = or_none(self._own_pages)
        if pages is not None:
            self._pages = max(self._pages, pages - self._pages_before)
        self._spent += time.monotonic() - now

    def _own_pages(self) -> int:
        program = self._process.exe()  # a logger's service, say, runs another
        children = [each.pid for each in self._process.children(recursive=True) if or_none(each.exe) == program]
        if not children:
            return 0
        own = _rollup(self._process.pid)
        self._mapped = status_bytes(Path(f"/proc/{self._process.pid}"))["RssShmem"]
        # each process has its share of a page that several have: the sum is what all of them take
        shares = [own, *(or_none(_rollup, pid) or {"Pss_Anon": 0} for pid in children)]
        return max(0, sum(share["Pss_Anon"] for share in shares) - own["Anonymous"])


def collected_bytes() -> int:
    """In a forked child, return the bytes of pages that a garbage collection writes to, so that they are copied.

    A collection counts the references to all objects that Python tracks. In the parent it leaves as much to children
    that were forked before. 0 if it cannot be read.
    """
    gc.unfreeze()
    gc.collect()
    pages = or_none(_rollup, os.getpid())
    return pages["Private_Dirty"] if pages else 0


def _shared_bytes() -> int:
    usage = or_none(psutil.disk_usage, "/dev/shm")  # noqa: S108 - nothing is written there
    return int(usage.used) if usage else 0


def _rollup(pid: int) -> dict[str, int]:
    """The sums over a process's pages, in bytes (man 5 proc_pid_smaps)."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
