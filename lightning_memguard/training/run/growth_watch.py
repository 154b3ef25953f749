"""Memory measured between epochs -> what grows from one to the next, and the epoch at which memory ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_memguard.core.capture.holders import Holder, holdings, roots_of, use_of
from lightning_memguard.core.device.host import available_memory, status_bytes
from lightning_memguard.core.device.malloc import trim_heap
from lightning_memguard.core.device.memory_info import or_none
from lightning_memguard.units import MIB

_NAMED_BYTES, _NAMED_SHARE = MIB, 0.3  # growth of an epoch that is looked at; an attribute explains so much of it
_UNNAMED_BYTES, _UNNAMED_SHARE = 4 * MIB, 0.01  # without an attribute, so much at least, and so much of what is free
_UNNAMED_EPOCHS = 4  # one after the other
_STEADY = 0.7  # a cache that fills grows less each time


@dataclass(frozen=True)
class Grown:
    """Memory that grows from epoch to epoch, and ends in epoch ``end``, counted from 0.

    ``holder`` and ``line`` are empty if unknown; ``on_host`` if it is the host's memory of a run on another device.
    """

    nbytes: int
    holder: str
    line: str
    on_host: bool
    end: int


class GrowthWatch:
    """Measures memory before each epoch, and looks for what holds it once it has grown.

    Args:
        device: of the run.
        module: of the run.
        others: what else may hold memory: callbacks, the datamodule, datasets.
    """

    def __init__(self, device: torch.device, module: nn.Module, others: Iterable[object]) -> None:
        self._device, self._others = device, tuple(others)
        self._roots = roots_of(module, self._others)
        self._measured: list[dict[bool, int]] = []  # before each epoch, on the host or not
        self._peaks: list[int] = []  # of the epoch before each
        self._held: dict[int, dict[bool, Counter[Holder]]] = {}  # bytes by attribute, before some epochs
        self._harmless: Counter[bool] = Counter()  # growth that all epochs fit

    def note(self, peak_bytes: int, free_bytes: int, epoch: int, epochs: float) -> Grown | None:
        """Note what is there before an epoch; return what grows so that the epochs to come do not all fit.

        Args:
            peak_bytes: of the last epoch, on the device.
            free_bytes: of the device at the start of the run.
            epoch: the one that begins.
            epochs: how many there are.
        """
        self._measured.append(self._measure())
        self._peaks.append(peak_bytes)
        done = len(self._measured) - 1
        if done < 2:
            self._held[done] = self._look()
            return None
        for on_host in self._measured[-1]:
            rate = self._rate(on_host)
            if rate < max(_NAMED_BYTES, 1.5 * self._harmless[on_host]):
                continue
            if done not in self._held:
                self._held[done] = self._look()
            found = self._named(on_host, rate)
            if found is None and not self._goes_on(on_host, free_bytes):
                continue
            room, rise = free_bytes - peak_bytes, (peak_bytes - self._peaks[1]) // (done - 1)
            if on_host:
                room, rise = (free.free_bytes if (free := available_memory()) else free_bytes), rate
            end = epoch + max(0, room) // max(rate, rise)
            if end < epochs and not (found and self._most_to_come(found, on_host) <= room):
                line = use_of(found, self._others).line if found else ""
                return Grown(rate, found.name if found else "", line, on_host, end)
            self._harmless[on_host] = rate
        return None

    def _measure(self) -> dict[bool, int]:
        status = or_none(lambda: status_bytes(Path("/proc/self"))) or {}
        host = status.get("RssAnon") or int(psutil.Process().memory_info().rss)
        if self._device.type == "cpu":
            return {False: host}
        return {False: int(torch.get_device_module(self._device).memory_allocated(self._device)), True: host}

    def _rate(self, on_host: bool) -> int:
        """Bytes that each epoch but the first left behind; 0 if the last two did not both grow."""
        before = [each[on_host] for each in self._measured]
        if min(before[-1] - before[-2], before[-2] - before[-3]) <= 0:
            return 0
        return (before[-1] - before[1]) // (len(before) - 2)

    def _look(self) -> dict[bool, Counter[Holder]]:
        found: dict[bool, Counter[Holder]] = {False: Counter(), True: Counter()}
        for holder, thing, nbytes, _ in holdings(self._roots):
            elsewhere = not isinstance(thing, torch.Tensor) or thing.device.type == "cpu"
            found[elsewhere and self._device.type != "cpu"][holder] += int(nbytes)
        return found

    def _named(self, on_host: bool, rate: int) -> Holder | None:
        """The attribute that grew the most, if it grew in each of the last two epochs and explains the growth."""
        done = len(self._measured) - 1
        if done - 1 not in self._held or done - 2 not in self._held:
            return None
        now, before, earlier = (self._held[epoch][on_host] for epoch in (done, done - 1, done - 2))
        steps = {holder: (now[holder] - before[holder], before[holder] - earlier[holder]) for holder in now}
        steady = {
            holder: last for holder, (last, first) in steps.items() if last > 0 < first and last > _STEADY * first
        }
        most = max(steady, key=steady.__getitem__, default=None)
        return most if most and sum(steady.values()) > _NAMED_SHARE * rate else None

    def _goes_on(self, on_host: bool, free_bytes: int) -> bool:
        """Whether memory grew by as much in each of the last epochs, beyond what an allocator does."""
        if self._device.type == "cpu" or on_host:
            trim_heap()
            self._measured[-1] = self._measure()
        last = [each[on_host] for each in self._measured[-_UNNAMED_EPOCHS - 1 :]]
        rises = [now - before for before, now in pairwise(last)]
        least = max(_UNNAMED_BYTES, _UNNAMED_SHARE * free_bytes, _STEADY * max(rises))
        return len(rises) == _UNNAMED_EPOCHS and min(rises) > least

    def _most_to_come(self, holder: Holder, on_host: bool) -> float:
        """Bytes that a dataset's cache may still take, with an entry for each sample; infinite for all others."""
        owner: Any = holder.owner
        samples, entries = or_none(lambda: len(owner)), or_none(lambda: len(getattr(owner, holder.attribute)))
        if not isinstance(owner, Dataset) or not samples or not entries or entries > samples:
            return math.inf
        return self._held[len(self._measured) - 1][on_host][holder] * (samples / entries - 1)
