"""Addresses that CUDA's driver gives new segments: of several free blocks of one size, the allocator takes the lowest.

Read off recorded histories: docs/accuracy, *Addresses*.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_memguard.core.trace.scratch import up
from lightning_memguard.units import MIB

REGION_UNIT = 32 * MIB
_FIRST = 2 * MIB  # no address is 0
_TOP = 1 << 46

DESCENDING_FROM = 1 << 40
"""Segments at this address or above are those of a driver on Linux; on Windows, and in WSL, they lie below."""


class AscendingAddresses:
    """Each segment is above all before it, as on Windows and in WSL."""

    def __init__(self) -> None:
        self._next = _FIRST

    def take(self, nbytes: int) -> int:
        """Return the address of a new segment."""
        self._next += nbytes
        return self._next - nbytes

    def hold(self, address: int, nbytes: int) -> None:
        """Take over a segment that is there."""
        self._next = max(self._next, address + nbytes)

    def give_back(self, address: int, nbytes: int) -> None:
        """Do nothing: no address is used again."""

    @property
    def state(self) -> object:
        """All that later addresses depend on."""
        return self._next


@dataclass(eq=False)
class _Region:
    """Addresses that the driver has asked of the system, and what is free of them, ascending."""

    begin: int
    end: int
    free: list[tuple[int, int]] = field(default_factory=list)

    def cut(self, begin: int, end: int) -> None:
        """Take what is free of these addresses."""
        parts = (part for first, last in self.free for part in ((first, min(begin, last)), (max(end, first), last)))
        self.free = [(first, last) for first, last in parts if first < last]

    def join(self, begin: int, end: int) -> None:
        """Add free addresses."""
        for first, last in [each for each in self.free if begin in each or end in each]:
            self.free.remove((first, last))
            begin, end = min(begin, first), max(end, last)
        self.free = sorted([*self.free, (begin, end)])


class DescendingAddresses:
    """As on Linux: regions of whole 32 MiB, each at the highest free addresses; a segment fills the newest with room.

    So segments of 32 MiB and more mostly descend, and small ones ascend within what is left of a region.
    """

    def __init__(self) -> None:
        self._regions: list[_Region] = []  # the oldest first
        self._top = _TOP

    def take(self, nbytes: int) -> int:
        """Return the address of a new segment."""
        for region in reversed(self._regions):
            for begin, end in region.free:
                if end - begin >= nbytes:
                    region.cut(begin, begin + nbytes)
                    return begin
        region = self._new_region(up(nbytes, REGION_UNIT))
        region.cut(region.begin, region.begin + nbytes)
        return region.begin

    def hold(self, address: int, nbytes: int) -> None:
        """Take over a segment that is there; those below it are newer. To be called in ascending order."""
        known = any(region.begin <= address and address + nbytes <= region.end for region in self._regions)
        for region in self._regions:
            region.cut(address, address + nbytes)
        if not known:
            end = up(address + nbytes, REGION_UNIT)
            self._regions.insert(0, _Region(address, end, [(address, end)]))
            self._regions[0].cut(address, address + nbytes)
            self._top = min(self._top, address // REGION_UNIT * REGION_UNIT)

    def give_back(self, address: int, nbytes: int) -> None:
        """Free a segment's addresses; a region that is free as a whole goes back to the system."""
        region = next(each for each in self._regions if each.begin <= address < each.end)
        region.join(address, address + nbytes)
        if region.free == [(region.begin, region.end)]:
            self._regions.remove(region)

    @property
    def state(self) -> object:
        """All that later addresses depend on."""
        return self._top, tuple((each.begin, each.end, *each.free) for each in self._regions)

    def _new_region(self, nbytes: int) -> _Region:
        top = self._top
        for region in sorted(self._regions, key=lambda each: -each.begin):
            if region.end <= top:
                if top - region.end >= nbytes:
                    break
                top = region.begin
        self._regions.append(_Region(top - nbytes, top, [(top - nbytes, top)]))
        return self._regions[-1]
