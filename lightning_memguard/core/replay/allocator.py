"""PyTorch's caching allocator, without the memory.

This file changes when PyTorch changes how it allocates device memory. Names in brackets at a rule, such as
[get_free_block], are functions of c10/cuda/CUDACachingAllocator.cpp (class DeviceCachingAllocator) unless another file
is named; they were read as of torch 2.9 to 2.13. Not replayed: private pools of CUDA graphs and ``torch.cuda.MemPool``.
What ``record_stream`` keeps, a trace says (`core/simulation/streams.py`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, takewhile
from operator import attrgetter
from typing import Literal, NamedTuple

from lightning_memguard.core.replay.addresses import AscendingAddresses, DescendingAddresses
from lightning_memguard.core.replay.settings import OWN_SEGMENT_FROM, ROUNDUP_INTERVALS, UNLIMITED, AllocatorSettings
from lightning_memguard.core.trace.scratch import up
from lightning_memguard.units import MIB

# c10/core/AllocatorConfig.h: kMinBlockSize, kSmallSize, kSmallBuffer, kRoundLarge
BLOCK_UNIT = 512  # every block is a multiple of this
SMALL_LIMIT = 1 * MIB  # requests up to this come from the small pool
SMALL_SEGMENT = 2 * MIB  # what the small pool reserves at a time
OWN_SEGMENT_UNIT = 2 * MIB  # a segment for one large request is rounded up to this

# An expandable segment reserves addresses for 9/8 of the device (ExpandableSegment) and grows within them. Addresses
# cost nothing and the replay may not know the device, so it takes more of them than any device has memory.
_ADDRESSES_PER_SEGMENT = 1 << 48


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A piece of device memory that is allocated, cached, or (in expandable segments) not mapped yet.

    What `Allocator.alloc` returns and `Allocator.free` takes. The blocks of a segment are linked by address.
    """

    pool: BlockPool
    address: int
    size_bytes: int
    mapped: bool = True
    allocated: bool = False
    requested_bytes: int = 0
    idle_since: int = 0
    previous: Block | None = None
    next: Block | None = None

    @property
    def is_split(self) -> bool:
        """Whether the block shares its segment with others."""
        return self.previous is not None or self.next is not None


class BlockPool:
    """The cached blocks of one size class (small or large) on one stream.

    PyTorch keeps all streams of a size class in one sorted set and compares the stream first; a list for each stream
    gives the same order.
    """

    __slots__ = ("cached", "page_bytes", "small", "smallest_rest_bytes", "stream", "unmapped")

    def __init__(self, small: bool, stream: int, settings: AllocatorSettings) -> None:
        self.small = small
        self.stream = stream
        self.page_bytes = SMALL_SEGMENT if small else settings.large_segment_size_bytes
        # The least that is split off a block and kept [should_split]: in the large pool it must exceed 1 MiB.
        self.smallest_rest_bytes = BLOCK_UNIT if small or settings.expandable_segments else SMALL_LIMIT + 1
        self.cached: list[tuple[int, int, Block]] = []  # (size, address, block), sorted [BlockComparatorSize]
        self.unmapped: list[Block] = []  # sorted by address [BlockComparatorAddress]


@dataclass(frozen=True)
class SegmentInfo:
    """A segment as ``torch.cuda.memory._snapshot`` would show it, until the next request: adjacent blocks."""

    address: int
    stream: int
    segment_type: Literal["small", "large"]
    blocks: tuple[Block, ...]

    @property
    def total_bytes(self) -> int:
        """Device memory that the segment holds."""
        return sum(block.size_bytes for block in self.blocks)


class SegmentAction(NamedTuple):
    """Record of PyTorch on device memory that is reserved or released: ``segment_alloc``, ``segment_unmap``, ..."""

    action: str
    address: int
    nbytes: int
    stream: int


class Allocator:
    """PyTorch's caching allocator, without the memory.

    Args:
        settings: of kind ``"cuda"``.

    Attributes:
        allocated_bytes, reserved_bytes: now; ``peak_reserved_bytes`` so far.
        segment_actions: segments, or pages of one, that were reserved and released, by PyTorch's names, in order.
        retries: how often the whole cache was released to make room for one request.

    >>> allocator = Allocator(AllocatorSettings())
    >>> block = allocator.alloc(700)
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (1024, 2097152)
    >>> allocator.free(block)
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (0, 2097152)
    """

    def __init__(self, settings: AllocatorSettings) -> None:
        assert settings.kind == "cuda", "exact memory needs no allocator"
        self.settings = settings
        self.allocated_bytes = self.reserved_bytes = self.peak_reserved_bytes = self.retries = 0
        self.segment_actions: list[SegmentAction] = []
        self._expandable = settings.expandable_segments
        self._capacity = UNLIMITED if settings.capacity_bytes is None else settings.capacity_bytes
        self._oversize_from = settings.max_split_size_bytes or UNLIMITED
        self._oversize_waste = settings.max_non_split_rounding_bytes or settings.large_segment_size_bytes
        self._split_below = UNLIMITED if self._expandable else self._oversize_from
        self._rounds_to_divisions = any(divisions > 1 for divisions in settings.roundup_power2_divisions)
        self._torch_enforces_limit = settings.per_process_memory_fraction < 1.0
        keeps_limit = self._torch_enforces_limit and settings.capacity_bytes is not None
        self._collects_garbage = keeps_limit and settings.garbage_collection_threshold > 0.0 and not self._expandable
        self._large_searches = 0  # the clock by which garbage collection measures the age of blocks

        self._small_pools: dict[int, BlockPool] = {}
        self._large_pools: dict[int, BlockPool] = {}
        # First block of every segment by address; blocks join into the lower one, so it never changes.
        self._segments: dict[int, Block] = {}
        descending = settings.segments_descend and not self._expandable
        self._addresses = DescendingAddresses() if descending else AscendingAddresses()
        self._nothing = Block(BlockPool(True, 0, settings), 0, 0)

    def alloc(self, nbytes: int, stream: int = 0) -> Block | None:
        """The block that serves a request, or None if it does not fit the capacity even with the cache released."""
        if nbytes == 0:  # PyTorch gives no memory to an empty tensor [NativeCachingAllocator::allocate]
            return self._nothing
        size = self.rounded(nbytes)
        pool = self._pool(size, stream)
        block = self._best_fit(pool, size) or self._reserve(pool, size)
        if block is None:
            return None
        # An unsplit rest counts as allocated [should_split, alloc_found_block].
        if block.size_bytes - size >= pool.smallest_rest_bytes and size < self._split_below:
            self._cache(_cut(block, size))
        block.allocated = True
        block.requested_bytes = nbytes
        self.allocated_bytes += block.size_bytes
        return block

    def alloc_beyond(self, nbytes: int, stream: int) -> Block:
        """The block that serves a request that was refused, on a device as large as that takes."""
        capacity, self._capacity = self._capacity, UNLIMITED
        block = self.alloc(nbytes, stream)
        self._capacity = capacity
        assert block is not None
        return block

    def free(self, block: Block) -> None:
        """Put a block back into the cache, joined with free neighbors [free_block]."""
        if block is self._nothing:
            return
        assert block.allocated, "freed twice"
        block.allocated = False
        block.requested_bytes = 0
        self.allocated_bytes -= block.size_bytes
        self._cache(self._joined(block))

    def segments(self) -> tuple[SegmentInfo, ...]:
        """All segments, by address [snapshot]; an expandable segment is shown as its runs of mapped blocks."""
        runs = (
            tuple(run)
            for _, first in sorted(self._segments.items())
            for mapped, run in groupby(_chain(first), key=lambda block: block.mapped)
            if mapped
        )
        return tuple(
            SegmentInfo(run[0].address, run[0].pool.stream, "small" if run[0].pool.small else "large", run)
            for run in runs
        )

    @property
    def state(self) -> Hashable:
        """All that later requests depend on: allocators in equal states, with equal settings, serve them equally."""
        segments = tuple(
            (address, first.pool.small, first.pool.stream, *map(_state_of, _chain(first)))
            for address, first in sorted(self._segments.items())
        )
        age = self._large_searches if self._collects_garbage else 0
        return segments, self._addresses.state, age

    def empty_cache(self) -> None:
        """Release every segment, or page, that is entirely free [emptyCache, release_cached_blocks]."""
        for pool in (*self._large_pools.values(), *self._small_pools.values()):
            for *_, block in tuple(pool.cached):
                if self._expandable:
                    self._unmap(block)
                elif not block.is_split:
                    self._release(block)

    def adopt(
        self, address: int, nbytes: int, stream: int, allocated: Iterable[tuple[int, int]], *, small: bool
    ) -> list[Block]:
        """Take over a segment, or a run of mapped pages, as another allocator left it; in ascending order.

        Args:
            address: where it begins.
            nbytes: its size.
            stream: whose pool it belongs to.
            allocated: address and bytes of the blocks in it that are allocated, ascending.
            small: whether it is of the small pool.

        Returns:
            The allocated blocks.
        """
        pool = self._pool(SMALL_LIMIT if small else SMALL_LIMIT + 1, stream)
        if self._expandable:
            run = self._mapped_run(pool, address, nbytes)
        else:
            run = self._segments[address] = Block(pool, address, nbytes)
            self._addresses.hold(address, nbytes)
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        rest: Block | None = run
        taken: list[Block] = []
        for begin, size in allocated:
            assert rest is not None, "the blocks are more than the segment"
            if begin > rest.address:
                after = _cut(rest, begin - rest.address)
                self._cache(rest)
                rest = after
            block, rest = rest, _cut(rest, size) if size < rest.size_bytes else None
            block.allocated, block.requested_bytes = True, size
            self.allocated_bytes += size
            taken.append(block)
        if rest is not None:
            self._cache(rest)
        return taken

    def _mapped_run(self, pool: BlockPool, address: int, nbytes: int) -> Block:
        """Add mapped pages to the expandable segment that ends before them; if its pool differs, to a new one."""
        last = max(self._segments, default=None)
        if last is None or self._segments[last].pool is not pool:
            run = self._segments[address] = Block(pool, address, _ADDRESSES_PER_SEGMENT, mapped=False)
            self._addresses.hold(address, _ADDRESSES_PER_SEGMENT)
        else:
            *_, run = _chain(self._segments[last])
            self._take(run)
            if address > run.address:
                after = _cut(run, address - run.address)
                self._cache(run)
                run = after
        self._cache(_cut(run, nbytes))
        run.mapped = True
        return run

    # Serving a request

    def rounded(self, nbytes: int) -> int:
        """The size of the block a request gets, unless a rest is too small to be split off [round_size]."""
        if self._rounds_to_divisions:
            interval = min(max(nbytes.bit_length() - SMALL_LIMIT.bit_length(), 0), ROUNDUP_INTERVALS - 1)
            divisions = self.settings.roundup_power2_divisions[interval]
            if divisions > 1 and nbytes > BLOCK_UNIT * divisions:
                # [roundup_power2_next_division]; a power of two is a multiple of its own steps and stays the same.
                step = (1 << (nbytes.bit_length() - 1)) // divisions
                return up(nbytes, step)
        return up(nbytes, BLOCK_UNIT)

    def _pool(self, size: int, stream: int) -> BlockPool:
        """The cache that serves a block of this size [get_pool]."""
        small = size <= SMALL_LIMIT
        pools = self._small_pools if small else self._large_pools
        if stream not in pools:
            pools[stream] = BlockPool(small, stream, self.settings)
        return pools[stream]

    def _best_fit(self, pool: BlockPool, size: int) -> Block | None:
        """Take the smallest cached block that is large enough, the lowest of several [get_free_block]."""
        if self._collects_garbage and not pool.small:
            self._large_searches += 1
        cached = pool.cached
        at = bisect_left(cached, (size, 0))
        if at == len(cached):
            return None
        if self._expandable:  # the best fit counts what a block could grow to: move on while that decreases
            while at + 1 < len(cached) and _expandable_bytes(cached[at + 1][2]) < _expandable_bytes(cached[at][2]):
                at += 1
        block = cached[at][2]
        # An oversize block serves only oversize requests, and of these only those that waste little of it.
        if size < self._oversize_from <= block.size_bytes:
            return None
        if size >= self._oversize_from and block.size_bytes >= size + self._oversize_waste:
            return None
        del cached[at]
        return block

    def _reserve(self, pool: BlockPool, size: int) -> Block | None:
        """A block from the device; if that is full, after releasing first some and then all of the cache [malloc]."""
        if self._collects_garbage:
            self._collect_garbage()
        block = self._new_block(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._new_block(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._new_block(pool, size)
        return block

    def _new_block(self, pool: BlockPool, size: int) -> Block | None:
        """A new block, if it fits: in a new segment, or in new pages of an expandable one [alloc_block]."""
        # What is reserved if no cached block serves [get_allocation_size].
        segment_bytes = pool.page_bytes if size < OWN_SEGMENT_FROM else up(size, OWN_SEGMENT_UNIT)
        if self._expandable:
            # PyTorch compares its own limit with a whole segment; the device needs only the missing pages to fit.
            refused = self._torch_enforces_limit and not self._fits(segment_bytes)
            return None if refused else self._grow(pool, size)
        if not self._fits(segment_bytes):
            return None
        block = self._new_segment(pool, segment_bytes, mapped=True)
        self._note("segment_alloc", block, segment_bytes)
        return block

    def _fits(self, nbytes: int) -> bool:
        return self.reserved_bytes + nbytes <= self._capacity

    def _note(self, action: str, block: Block, nbytes: int) -> None:
        """Count bytes that are reserved, or less than none that are released."""
        self.segment_actions.append(SegmentAction(action, block.address, abs(nbytes), block.pool.stream))
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _new_segment(self, pool: BlockPool, nbytes: int, mapped: bool) -> Block:
        address = self._new_address(nbytes)
        block = self._segments[address] = Block(pool, address, nbytes, mapped)
        return block

    def _new_address(self, nbytes: int) -> int:
        return self._addresses.take(nbytes)

    # The cache

    def _cache(self, block: Block) -> None:
        """Put a free block into the cache, or if it is unmapped, among those without pages [insert_into_blocks]."""
        if block.mapped:
            insort(block.pool.cached, (block.size_bytes, block.address, block))
            block.idle_since = self._large_searches
        else:
            insort(block.pool.unmapped, block, key=lambda unmapped: unmapped.address)

    def _take(self, block: Block) -> None:
        """Undo `_cache`."""
        if block.mapped:
            cached = block.pool.cached
            del cached[bisect_left(cached, (block.size_bytes, block.address))]
        else:
            block.pool.unmapped.remove(block)

    def _joined(self, block: Block) -> Block:
        """Join a block with the neighbors that are free and, like it, mapped or not [try_merge_blocks]."""
        after = block.next
        if after is not None and not after.allocated and after.mapped is block.mapped:
            self._take(after)
            _absorb_next(block, after)
        before = block.previous
        if before is not None and not before.allocated and before.mapped is block.mapped:
            self._take(before)
            _absorb_next(before, block)
            return before
        return block

    # Releasing memory

    def _collect_garbage(self) -> None:
        """Release the segments that were unused longest, if the threshold is passed [garbage_collect_cached_blocks].

        Age is the number of searches of the large pool since the block was freed. Each round releases all that are at
        least of average age, even past the goal.
        """
        excess = self.reserved_bytes - int(self.settings.garbage_collection_threshold * self._capacity)
        idle = [block for pool in self._large_pools.values() for *_, block in pool.cached if not block.is_split]
        while idle and excess > 0:
            newest = self._large_searches - sum(self._large_searches - block.idle_since for block in idle) / len(idle)
            for block in idle:
                if block.idle_since <= newest:
                    excess -= block.size_bytes
                    self._release(block)
            idle = [block for block in idle if block.idle_since > newest]

    def _release_oversize(self, pool: BlockPool, size: int) -> bool:
        """Release the one oversize block that makes enough room, else several, largest first.

        True if that is enough [release_available_cached_blocks].
        """
        if self.settings.max_split_size_bytes is None or self._expandable:
            return False
        wanted = max(size, self._oversize_from)
        at = bisect_left(pool.cached, (wanted, 0))
        if at < len(pool.cached):
            self._release(pool.cached[at][2])
            return True
        released = 0
        while released < wanted and pool.cached and pool.cached[-1][0] >= self._oversize_from:
            released += pool.cached[-1][0]
            self._release(pool.cached[-1][2])
        return released >= wanted

    def _release(self, block: Block) -> None:
        """Release a segment that is one free block [release_block]."""
        self._take(block)
        del self._segments[block.address]
        self._addresses.give_back(block.address, block.size_bytes)
        self._note("segment_free", block, -block.size_bytes)

    # Expandable segments

    def _grow(self, pool: BlockPool, size: int) -> Block | None:
        """Map pages behind a free block until it is large enough [try_allocate_expandable_block]."""
        start = self._expandable_block(pool, size)
        block = start if start.mapped else self._map(start, min(size, start.size_bytes))
        while block is not None and block.next is not None and block.size_bytes < size:
            block = self._map(block.next, min(size - block.size_bytes, block.next.size_bytes))
        if block is not None:
            self._take(block)
        return block

    def _expandable_block(self, pool: BlockPool, size: int) -> Block:
        """The start of the lowest free addresses that can hold the size, mapped or not [find_expandable_block]."""
        for unmapped in pool.unmapped:
            before = unmapped.previous
            first = before if before is not None and not before.allocated else unmapped
            free = takewhile(lambda block: not block.allocated, _chain(first))
            if sum(block.size_bytes for block in free) >= size:
                return first
        page = pool.page_bytes
        first = self._new_segment(pool, _ADDRESSES_PER_SEGMENT // page * page, mapped=False)
        self._cache(first)
        return first

    def _map(self, block: Block, nbytes: int) -> Block | None:
        """Back the first bytes of an unmapped block with pages, if they fit [map_block, ExpandableSegment::map]."""
        pages_bytes = up(nbytes, block.pool.page_bytes)
        if not self._fits(pages_bytes):
            return None
        self._take(block)
        if pages_bytes < block.size_bytes:
            self._cache(_cut(block, pages_bytes))
        block.mapped = True
        self._note("segment_map", block, pages_bytes)
        block = self._joined(block)
        self._cache(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Release the pages that are entirely inside a free block [unmap_block, ExpandableSegment::unmap]."""
        page, first = block.pool.page_bytes, block
        while first.previous is not None:
            first = first.previous
        base = first.address
        begin = base + up(block.address - base, page)
        end = base + (block.address + block.size_bytes - base) // page * page
        if begin >= end:
            return
        self._take(block)
        if begin > block.address:
            after = _cut(block, begin - block.address)
            self._cache(block)
            block = after
        if end < block.address + block.size_bytes:
            self._cache(_cut(block, end - begin))
        block.mapped = False
        self._note("segment_unmap", block, begin - end)
        block = self._joined(block)
        if block.is_split:
            self._cache(block)
        else:  # [release_expandable_segment]
            del self._segments[block.address]


_state_of = attrgetter("size_bytes", "allocated", "mapped")


def _cut(block: Block, nbytes: int) -> Block:
    """Shorten a block, and return the rest as its new neighbor."""
    rest = Block(block.pool, block.address + nbytes, block.size_bytes - nbytes, block.mapped)
    rest.previous, rest.next = block, block.next
    if block.next is not None:
        block.next.previous = rest
    block.next = rest
    block.size_bytes = nbytes
    return rest


def _absorb_next(block: Block, after: Block) -> None:
    block.size_bytes += after.size_bytes
    block.next = after.next
    if after.next is not None:
        after.next.previous = block


def _expandable_bytes(block: Block) -> int:
    after = block.next
    return block.size_bytes + (after.size_bytes if after is not None and not after.mapped else 0)


def _chain(block: Block | None) -> Iterator[Block]:
    """A block and all after it in its segment."""
    while block is not None:
        yield block
        block = block.next
