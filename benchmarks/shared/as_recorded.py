"""A history, replayed at the recorded addresses of its segments and compared with the record, action by action."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_memguard.core.histories.history import RESERVING, History, HistoryReplay, Replaying
from lightning_memguard.core.replay.allocator import Allocator, Block, BlockPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memguard.core.histories.history import HistoryEntry, Release
    from lightning_memguard.core.replay.settings import AllocatorSettings


@dataclass
class Differences:
    """How a replay at recorded addresses compares with the record: how much is equal, and how much is not."""

    allocations: int = 0
    other_addresses: int = 0
    segments: int = 0
    other_segments: int = 0
    releases: int = 0
    other_releases: int = 0

    @property
    def total(self) -> int:
        """All that is not equal."""
        return self.other_addresses + self.other_segments + self.other_releases


def replay_as_recorded(history: History) -> tuple[HistoryReplay, Differences]:
    """Replay a history with the recorded addresses of segments, and compare the replay with the record."""
    allocator = _AtRecordedAddresses(history.settings)
    comparing = _Comparing(history, allocator)
    comparing.asks_again_at = None
    return comparing.run(), allocator.differences


class _AtRecordedAddresses(Allocator):
    """An allocator that the device gives the recorded addresses."""

    def __init__(self, settings: AllocatorSettings) -> None:
        super().__init__(settings)
        self.expected: list[tuple[int, int]] = []  # address and bytes of what the record reserves next
        self.differences = Differences()

    def _new_address(self, nbytes: int) -> int:
        if not self.expected:
            return super()._new_address(nbytes)
        self._addresses.hold(self.expected[0][0], nbytes)
        return self.expected[0][0]

    def _new_segment(self, pool: BlockPool, nbytes: int, mapped: bool) -> Block:
        block = super()._new_segment(pool, nbytes, mapped)
        if mapped:
            self._compare_reserved(nbytes)
        return block

    def _map(self, block: Block, nbytes: int) -> Block | None:
        before = self.reserved_bytes
        mapped = super()._map(block, nbytes)
        self._compare_reserved(self.reserved_bytes - before)
        return mapped

    def _compare_reserved(self, nbytes: int) -> None:
        equal = bool(self.expected) and self.expected.pop(0)[1] == nbytes
        self.differences.segments += equal
        self.differences.other_segments += not equal


class _Comparing(Replaying):
    allocator: _AtRecordedAddresses

    def served(self, block: Block, address: int) -> None:
        differences = self.allocator.differences
        differences.allocations += 1
        differences.other_addresses += block.address != address and block.size_bytes > 0
        differences.other_segments += len(self.allocator.expected)
        self.allocator.expected.clear()

    def other(self, action: str, address: int, nbytes: int) -> None:
        if action in RESERVING:
            self.allocator.expected.append((address, nbytes))

    def release(self, entries: Sequence[HistoryEntry], release: Release) -> None:
        recorded, differences = self.allocator, self.allocator.differences
        if recorded.settings.expandable_segments:
            before = recorded.reserved_bytes
            recorded.empty_cache()
            equal = before - recorded.reserved_bytes == sum(entry.nbytes for entry in entries)
            differences.releases += equal * len(entries)
            differences.other_releases += (not equal) * len(entries)
            return
        free = {segment.address: segment.total_bytes for segment in recorded.segments() if _is_free(segment.blocks)}
        equal_ones = [entry.address for entry in entries if free.pop(entry.address, None) == entry.nbytes]
        differences.releases += len(equal_ones)
        differences.other_releases += len(entries) - len(equal_ones)
        if release.is_whole:
            differences.other_releases += len(free)
        for address in equal_ones:
            recorded._release(recorded._segments[address])


def _is_free(blocks: Sequence[Block]) -> bool:
    return len(blocks) == 1 and not blocks[0].allocated
