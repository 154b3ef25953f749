"""Spans of a file or of a buffer: which are taken, and which can be taken again."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

ROUND_BYTES = 4096  # a page: no two tensors share one, so that nothing is read in order to be written


class Space:
    """Free spans by offset: the first that is large enough is taken, and neighbors merge.

    ``freed`` takes spans back from finalizers, which may run inside any other call: the next `take` merges them.

    >>> space = Space(3 * ROUND_BYTES)
    >>> first, second = space.take(10), space.take(2 * ROUND_BYTES)
    >>> first, second, space.take(1)
    (0, 4096, None)
    >>> space.freed.append((first, 10))
    >>> space.take(5)
    0
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size  # None: it grows
        self.end = 0  # all from here on was never taken
        self.freed: deque[tuple[int, int]] = deque()
        self._free: list[tuple[int, int]] = []  # from, to; in order, with something taken between any two

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a span of this many bytes; None if there is none."""
        while self.freed:
            self._give_back(*self.freed.popleft())
        length = _rounded(nbytes)
        for place, (start, end) in enumerate(self._free):
            if end - start >= length:
                self._free[place : place + 1] = [(start + length, end)] if end - start > length else []
                return start
        if self.size is not None and self.end + length > self.size:
            return None
        start, self.end = self.end, self.end + length
        return start

    def _give_back(self, start: int, nbytes: int) -> None:
        end = start + _rounded(nbytes)
        place = bisect_left(self._free, (start, end))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == start:
            place -= 1
            start = self._free.pop(place)[0]
        if end == self.end:
            self.end = start
        else:
            self._free.insert(place, (start, end))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ROUND_BYTES) * ROUND_BYTES
