"""Memory that a process's children take: batches that workers put in shared memory, and pages of their own."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from lightning_memguard.core.device.host import or_none, status_bytes

_SHARED = "/dev/shm"  # noqa: S108 - nothing is written there
_MOST_SHARE = 0.005  # of the run's time may go into reading the pages of processes, and as much into their files
_FREE_SECONDS = 0.1  # in addition, for files


class ChildrenMeter:
    """Measures what a process's children and shared memory come to take in addition to the process, as its peak.

    Nothing counts it for us, so it is read at moments: shared memory by `read_shared`, pages by `read_pages`. Both walk
    through the processes, and each is left out when it would take more than 0.5 % of the time; `read_shared` walks only
    if /dev/shm holds more than before. Linux only; elsewhere it is 0 bytes. What was there when the meter is made, such
    as the server of `forkserver`, is not counted, nor is what other programs put in /dev/shm.

    >>> meter = ChildrenMeter()
    >>> meter.read_shared()
    >>> meter.peak_bytes >= 0
    True
    """

    def __init__(self, process: int | None = None) -> None:
        self._process = psutil.Process(process)
        self._shared_before = _shared_bytes()
        self._begun, self._spent, self._spent_on_files = time.monotonic(), 0.0, 0.0
        self._mapped = 0  # of shared memory, by the process itself
        self._shared = self._most = self._pages = 0  # the most that /dev/shm held, of any program
        self._pages_before = or_none(self._own_pages) or 0

    @property
    def peak_bytes(self) -> int:
        """The most that was read since `restart`, without shared memory that the process has mapped itself."""
        return max(0, self._shared - self._mapped) + self._pages

    def restart(self) -> None:
        """Forget the peak so far."""
        self._shared = self._most = self._pages = 0

    def read_shared(self) -> None:
        """Read how much of shared memory is of these processes now."""
        total = _shared_bytes() - self._shared_before
        now = time.monotonic()
        if total <= self._most or self._spent_on_files > _FREE_SECONDS + _MOST_SHARE * (now - self._begun):
            return
        self._most, own = total, or_none(self._own_shared)
        self._shared = max(self._shared, total if own is None else min(total, own))
        self._spent_on_files += time.monotonic() - now

    def read_pages(self) -> None:
        """Read the pages that the children do not share with the process, if there is time for it."""
        now = time.monotonic()
        if self._spent > _MOST_SHARE * (now - self._begun):
            return
        pages = or_none(self._own_pages)
        if pages is not None:
            self._pages = max(self._pages, pages - self._pages_before)
        self._spent += time.monotonic() - now

    def _own_shared(self) -> int:
        """Bytes of shared memory that the process has mapped, or that it and its children have as files."""
        files: dict[int, int] = {}
        for pid in (self._process.pid, *_descendants(self._process.pid)):
            files |= {status.st_ino: status.st_blocks * 512 for status in _files_in_shared_memory(pid)}
        return sum(files.values()) + status_bytes(Path(f"/proc/{self._process.pid}"))["RssShmem"]

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
    usage = or_none(psutil.disk_usage, _SHARED)
    return int(usage.used) if usage else 0


def _descendants(pid: int) -> Iterator[int]:
    """Processes that a process has started, and theirs; psutil would look at every process of the host."""
    threads = [*Path(f"/proc/{pid}/task").glob("*/children")]
    if not threads:
        raise FileNotFoundError(f"/proc/{pid}/task: this kernel lists no children, or the process is gone")
    for thread in threads:
        for child in map(int, thread.read_text().split()):
            yield from (child, *_descendants(child))


def _files_in_shared_memory(pid: int) -> Iterator[os.stat_result]:
    """Files in /dev/shm that a process has open, or that are named after it, as by the strategy "file_system"."""
    for file in (*Path(f"/proc/{pid}/fd").glob("*"), *Path(_SHARED).glob(f"torch_{pid}_*")):
        if file.name.startswith("torch_") or (or_none(os.readlink, file) or "").startswith(f"{_SHARED}/"):
            status = or_none(file.stat)
            if status:
                yield status


def _rollup(pid: int) -> dict[str, int]:
    """The sums over a process's pages, in bytes (man 5 proc_pid_smaps)."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
