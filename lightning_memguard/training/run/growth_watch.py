"""Memory measured between epochs -> what grows from one to the next, and the epoch at which memory runs out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_memguard.core.capture.holders import Holder, Use, holdings, roots_of, use_of
from lightning_memguard.core.device.host import available_memory, or_none, status_bytes
from lightning_memguard.core.device.malloc import trim_heap
from lightning_memguard.core.trace.kept import Kept, RunsOut
from lightning_memguard.units import MIB

_NAMED_BYTES, _NAMED_SHARE = MIB, 0.3  # growth of an epoch that is looked at; an attribute explains so much of it
_UNNAMED_BYTES, _UNNAMED_SHARE = 4 * MIB, 0.01  # without an attribute, so much at least, and so much of what is free
_UNNAMED_EPOCHS = 4  # one after the other
_CLEARLY = 1.5  # a peak that rises so much faster holds copies of what grows
_STEADY = 0.7  # a cache that fills grows less each time


class GrowthWatch:
    """Measures memory before each epoch of a run on a device, and looks for what holds it once it has grown.

    ``others`` may hold memory besides the module: callbacks, the datamodule, datasets.
    """

    def __init__(self, device: torch.device, module: nn.Module, others: Iterable[object]) -> None:
        self._device, self._others = device, tuple(others)
        self._roots = roots_of(module, self._others)
        self._measured: list[dict[bool, int]] = []  # before each epoch, on the host or not
        self._peaks: list[int] = []  # of the epoch before each
        self._held: dict[int, dict[bool, Counter[str]]] = {}  # bytes by attribute, before some epochs
        self._harmless: Counter[bool] = Counter()  # growth that all epochs fit

    def note(self, peak_bytes: int, free_bytes: int, epoch: int, epochs: float) -> tuple[Kept, RunsOut] | None:
        """Note what is there before an epoch; return what grows so that not all epochs fit, and when memory runs out.

        ``peak_bytes`` is of the last epoch, and ``free_bytes`` what the device had free at the start of the run.
        """
        done = len(self._measured)
        self._measured.append(self._measure())
        self._peaks.append(peak_bytes)
        if done < 2:
            self._look(done)
            return None
        for on_host in self._measured[-1]:
            rate = self._rate(on_host)
            if rate < max(_NAMED_BYTES, 1.5 * self._harmless[on_host]):
                continue
            holders = self._look(done)
            found = holders.get(self._named(on_host, rate, done))
            use = use_of(found, self._others) if found else Use(is_conditional=True)
            if (use.is_conditional or use.is_cleared) and not self._keeps_growing(on_host, free_bytes):
                continue
            room, rise = free_bytes - peak_bytes, (peak_bytes - self._peaks[1]) // (done - 1)
            if on_host:
                room, rise = (free.free_bytes if (free := available_memory()) else free_bytes), rate
            pace = rate
            if found is not None:  # a C library keeps freed blocks, more of them in the first epochs
                now, before = (self._held[each][on_host].total() for each in (done, done - 1))
                pace = (rate + max(0, now - before)) // 2
            end = epoch + max(0, room) // (rise if rise > _CLEARLY * pace else pace)
            if end < epochs and (found is None or self._most_to_come(found, on_host, done) > room):
                kept = Kept(found.name if found else "", use.line, False, "epoch", True, rate, on_host=on_host)
                return kept, RunsOut(end, 0)
            self._harmless[on_host] = rate
        return None

    def _measure(self) -> dict[bool, int]:
        host = (or_none(status_bytes, Path("/proc/self")) or {}).get("RssAnon") or psutil.Process().memory_info().rss
        if self._device.type == "cpu":
            return {False: host}
        return {False: torch.get_device_module(self._device).memory_allocated(self._device), True: host}

    def _rate(self, on_host: bool) -> int:
        """Bytes that each epoch but the first left behind; 0 if the last two did not both grow."""
        before = [each[on_host] for each in self._measured]
        grew = before[-1] > before[-2] > before[-3]
        return (before[-1] - before[1]) // (len(before) - 2) if grew else 0

    def _look(self, done: int) -> dict[str, Holder]:
        """Count what is held by attribute; the holders are not kept, since each keeps its owner alive."""
        self._held[done], holders = {False: Counter(), True: Counter()}, {}
        self._held.pop(done - 3, None)
        for holder, thing, nbytes, _ in holdings(self._roots):
            is_on_host = not isinstance(thing, torch.Tensor) or thing.device.type == "cpu"
            self._held[done][is_on_host and self._device.type != "cpu"][holder.name] += int(nbytes)
            holders[holder.name] = holder
        return holders

    def _named(self, on_host: bool, rate: int, done: int) -> str:
        """The attribute that grew the most, if it did in each of the last two epochs and explains it; else empty."""
        looks = [self._held[each][on_host] for each in (done - 2, done - 1, done) if each in self._held]
        steady = Counter[str]()
        for name in looks[-1] if len(looks) == 3 else ():
            first, last = (after[name] - before[name] for before, after in pairwise(looks))
            steady[name] = last if last > _STEADY * first > 0 else 0
        return steady.most_common(1)[0][0] if sum(steady.values()) > _NAMED_SHARE * rate else ""

    def _keeps_growing(self, on_host: bool, free_bytes: int) -> bool:
        """Whether memory grew by as much in each of the last epochs, beyond what an allocator does."""
        if self._device.type == "cpu" or on_host:
            trim_heap()
            self._measured[-1] = self._measure()
        rises = [b[on_host] - a[on_host] for a, b in pairwise(self._measured[-_UNNAMED_EPOCHS - 1 :])]
        least = max(_UNNAMED_BYTES, _UNNAMED_SHARE * free_bytes, _STEADY * max(rises))
        return len(rises) == _UNNAMED_EPOCHS and min(rises) > least

    def _most_to_come(self, holder: Holder, on_host: bool, done: int) -> float:
        """Bytes that a deque, or a dataset's cache with an entry for each sample, may still take; else infinite."""
        owner: Any = holder.owner
        value: Any = getattr(owner, holder.attribute, None)
        samples, entries = or_none(len, owner), or_none(len, value)
        most = getattr(value, "maxlen", None) or (samples if isinstance(owner, Dataset) else 0)
        if not most or not entries or entries > most:
            return math.inf
        return self._held[done][on_host][holder.name] * (most / entries - 1)
