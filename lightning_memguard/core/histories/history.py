"""A memory snapshot -> History: what an allocator did, recorded by PyTorch or predicted, and its replay.

This file changes when PyTorch changes what ``torch.cuda.memory._dump_snapshot`` writes. Read as of torch 2.0 to 2.13.
A history usually begins in the middle of a process: what was allocated then follows from the segments at its end, by
undoing its entries.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from lightning_memguard.core.histories import pickles
from lightning_memguard.core.replay.addresses import DESCENDING_FROM
from lightning_memguard.core.replay.allocator import SMALL_LIMIT, SMALL_SEGMENT, Allocator, Block
from lightning_memguard.core.replay.settings import LARGE_SEGMENT, ROUNDUP_INTERVALS, UNLIMITED, AllocatorSettings
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import MIB, format_bytes

Stack = tuple[str, ...]
"""Place in the code that requested a block, innermost first, as ``file:line:function``."""


class HistoryEntry(NamedTuple):
    """One action of the allocator, by PyTorch's names; ``stack`` is an index into `History.stacks`.

    Of ``oom``, a request that was refused, ``address`` is what the device had free.
    """

    action: str
    address: int
    nbytes: int
    stream: int
    stack: int


_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class HeldBlock(NamedTuple):
    """A block that is allocated: its size is the allocator's, which may exceed what was requested."""

    address: int
    nbytes: int
    requested_bytes: int
    stack: int = -1


@dataclass(frozen=True)
class HeldSegment:
    """A segment, or a run of mapped pages of an expandable one, and the blocks that are allocated in it."""

    address: int
    nbytes: int
    stream: int
    small: bool
    expandable: bool
    blocks: tuple[HeldBlock, ...] = ()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks."""
        return sum(block.nbytes for block in self.blocks)

    def continues(self, before: HeldSegment) -> bool:
        """Whether it is the rest of a run of mapped pages."""
        mine = self.expandable, self.small, self.stream, self.address
        return mine == (True, before.small, before.stream, before.address + before.nbytes) and before.expandable


@dataclass(frozen=True)
class History:
    """Requests and frees of an allocator on one device.

    Attributes:
        settings: the allocator's, as far as the snapshot has them.
        start: the segments before the first entry, by address.
        entries: the allocator's actions, in order.
        stacks: the table of stacks.
        predicted: whether `lightning_memguard.core.replay.snapshot.save_snapshot` wrote it.
        device: the index of the device.
    """

    settings: AllocatorSettings
    start: tuple[HeldSegment, ...]
    entries: tuple[HistoryEntry, ...]
    stacks: tuple[Stack, ...]
    predicted: bool = False
    device: int = 0

    @property
    def start_bytes(self) -> int:
        """Bytes allocated before the first entry."""
        return sum(segment.allocated_bytes for segment in self.start)

    @property
    def start_reserved_bytes(self) -> int:
        """Bytes reserved before the first entry."""
        return sum(segment.nbytes for segment in self.start)

    @property
    def reserved_bytes(self) -> tuple[int, ...]:
        """Bytes reserved before the first entry and after each."""
        changes = (_RESERVED.get(entry.action, 0) * entry.nbytes for entry in self.entries)
        return tuple(accumulate(changes, initial=self.start_reserved_bytes))

    @property
    def refused_at(self) -> int | None:
        """The place of the last request that ran out of memory."""
        return max((place for place, entry in enumerate(self.entries) if entry.action == "oom"), default=None)

    @property
    def ran_short_at_bytes(self) -> int | None:
        """The least that could not be reserved, so that the cache was released instead; None if that never happened."""
        reserved = self.reserved_bytes
        short = (each for each in _releases(self) if each[1].under_pressure)
        return min((reserved[place] + self.entries[release.end].nbytes for place, release in short), default=None)


# -- reading


_MOST_UNPACKED = 100  # times the bytes of a .gz; snapshots compress to a tenth or a fiftieth
_MOST_BYTES = 1 << 48  # of a request or a segment
_MOST_TEXT = 1000  # characters of a file's or a function's name


def read_histories(path: str | os.PathLike[str], *, held: bool = False) -> tuple[History, ...]:
    """Read a memory snapshot: a history for each device that has one.

    Args:
        path: a pickle of ``torch.cuda.memory._dump_snapshot`` or ``guard.save_snapshot``, or the same as JSON
            (``.json``, ``.json.gz``) with entries ``[action, addr, size, stream, index into frames]`` and a table
            ``frames``. No class is ever loaded from it.
        held: a device that holds blocks and has no history counts too, without entries.

    Raises:
        MemGuardError: the file cannot be read, is not such a snapshot, or asks for a class.
    """
    source = Path(path)
    try:
        content = _content(source)
        snapshot = json.loads(content) if content[:1] == b"{" else pickles.loads(content)
        histories = _histories_in(snapshot, len(content), held=held)
    except MemGuardError as error:
        raise MemGuardError(f"{source} was not read: {error}") from None
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise MemGuardError(f"{source} cannot be read ({error.strerror}).") from error
        raise MemGuardError(
            f"{source} cannot be read as a memory snapshot ({type(error).__name__}: {error})."
        ) from error
    if not histories:
        raise MemGuardError(
            f"{source} holds no history; record one with torch.cuda.memory._record_memory_history() before the step."
        )
    return histories


def _content(source: Path) -> bytes:
    if source.suffix != ".gz":
        return source.read_bytes()
    most = 4 * MIB + _MOST_UNPACKED * source.stat().st_size
    with gzip.open(source) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise MemGuardError(f"it unpacks to more than {format_bytes(most)}, which a memory snapshot does not.")
    return content


def _histories_in(snapshot: object, nbytes: int, *, held: bool) -> tuple[History, ...]:
    if not isinstance(snapshot, Mapping) or "segments" not in snapshot or "device_traces" not in snapshot:
        raise MemGuardError("it is not what torch.cuda.memory._dump_snapshot writes.")
    lists = (*snapshot["device_traces"], *(each["blocks"] for each in snapshot["segments"]))
    if sum(map(len, (*lists, *(snapshot.get("frames") or ())))) > nbytes:
        raise MemGuardError("it repeats its own parts more often than it has bytes, which a memory snapshot does not.")
    return tuple(histories_of(snapshot, held=held))


def histories_of(snapshot: Mapping[str, Any], *, held: bool = False) -> Iterator[History]:
    """The histories in what ``torch.cuda.memory._snapshot()`` returns, one for each device that has one.

    ``held``: a device that holds blocks and has no history counts too.
    """
    stacks = _Stacks(snapshot.get("frames"))
    settings = _settings(snapshot.get("allocator_settings") or {})
    for device, trace in enumerate(snapshot["device_traces"]):
        entries = [_entry(entry, stacks) for entry in trace]
        known = tuple(entry for entry in entries if entry.action in _ACTIONS)
        segments = [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]
        if not known and not (held and segments):
            continue
        if any(tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0) for segment in segments):
            raise MemGuardError("it has private pools (CUDA graphs, torch.cuda.MemPool), which are not replayed.")
        end = [_segment(segment, stacks) for segment in segments]
        expandable = settings.expandable_segments or any(segment.expandable for segment in end)
        lowest = min(segment.address for segment in end) if end else known[0].address
        settings_here = replace(settings, expandable_segments=expandable, segments_descend=lowest >= DESCENDING_FROM)
        start = _undone(end, known, Allocator(settings_here))
        notes = (stacks.rows[entry.stack] for entry in entries if entry.action == "snapshot")
        predicted = any(frame.startswith(_OURS) for stack in notes for frame in stack[:1])
        yield History(settings_here, start, known, tuple(stacks.rows), predicted, device)


# What the allocator did; "snapshot" and annotations of users are left out.
_ACTIONS = frozenset(("alloc", "free_requested", "free_completed", "oom", *_RESERVED))
_OURS = "predicted by lightning-memguard"


class _Stacks:
    """The stacks of a snapshot, each once."""

    def __init__(self, table: Sequence[Sequence[str]] | None) -> None:
        self.rows: list[Stack] = [tuple(_text(frame) for frame in stack) for stack in table or ()]
        self._numbers = {stack: number for number, stack in enumerate(self.rows)}
        self._seen: dict[int, int] = {}  # by identity: a pickle holds equal stacks once
        self._frames: dict[int, str] = {}

    def number(self, frames: int | Sequence[Mapping[str, Any]] | None) -> int:
        if isinstance(frames, int):
            return frames if -1 <= frames < len(self.rows) else -1
        if not frames:
            return -1
        if id(frames) not in self._seen:
            stack = tuple(map(self._frame, frames))
            if stack not in self._numbers:
                self._numbers[stack] = len(self.rows)
                self.rows.append(stack)
            self._seen[id(frames)] = self._numbers[stack]
        return self._seen[id(frames)]

    def _frame(self, frame: Mapping[str, Any]) -> str:
        if id(frame) not in self._frames:
            place = _text(frame["filename"]), str(int(frame["line"])), _text(frame["name"])
            self._frames[id(frame)] = ":".join(place)
        return self._frames[id(frame)]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise MemGuardError(f"it has a {type(value).__name__} for text.")
    return value[:_MOST_TEXT]


def _number(value: object, what: str, most: int = 1 << 64) -> int:
    if type(value) is not int or not 0 <= value < most:
        shown = f"{value:.3g}" if isinstance(value, (int, float)) else f"a {type(value).__name__}"
        raise MemGuardError(f"it has {what} of {shown}, which is no number that PyTorch writes there.")
    return value


def _entry(entry: Any, stacks: _Stacks) -> HistoryEntry:
    if isinstance(entry, Mapping):
        where = entry.get("device_free", 0) if entry["action"] == "oom" else entry.get("addr", 0)
        entry = entry["action"], where, entry.get("size", 0), entry.get("stream", 0), entry.get("frames")
    action, where, nbytes, stream, frames = entry
    where, nbytes = _number(where, "an address"), _number(nbytes, "a size", _MOST_BYTES)
    return HistoryEntry(_text(action), where, nbytes, _number(stream, "a stream"), stacks.number(frames))


def _segment(segment: Mapping[str, Any], stacks: _Stacks) -> HeldSegment:
    begin, nbytes = _number(segment["address"], "an address"), _number(segment["total_size"], "a size", _MOST_BYTES)
    held, address = [], begin
    for block in segment["blocks"]:
        size = _number(block["size"], "a size", _MOST_BYTES)
        if block["state"] in ("active_allocated", "active_pending_free", "active_awaiting_free"):
            if "frames" in block:
                frames = block["frames"]
            else:  # torch 2.0 keeps the stack of a block in its history
                frames = (block.get("history") or [{}])[0].get("frames")
            requested = _number(block.get("requested_size", size), "a size", size + 1)
            held.append(HeldBlock(address, size, requested, stacks.number(frames)))
        address += size
    if address != begin + nbytes:
        raise MemGuardError(f"it contradicts itself: the segment at {begin:#x} is not as large as its blocks.")
    small, expandable = segment["segment_type"] == "small", bool(segment.get("is_expandable"))
    return HeldSegment(begin, nbytes, _number(segment["stream"], "a stream"), small, expandable, tuple(held))


def _settings(given: Mapping[str, Any]) -> AllocatorSettings:
    """The settings as PyTorch read them; what it does not list follows from the variable, as it was set."""
    largest = given.get("max_split_size", -1)
    divisions = given.get("roundup_power2_divisions") or {}
    rounded = tuple(int(value) for _, value in sorted(divisions.items(), key=lambda item: int(item[0])))
    variable = next((text for name, text in given.items() if name.endswith("ALLOC_CONF")), "")
    return replace(
        AllocatorSettings.for_device("cuda", {"PYTORCH_CUDA_ALLOC_CONF": variable}),
        expandable_segments=bool(given.get("expandable_segments", False)),
        max_split_size_bytes=largest if 0 < largest < 1 << 62 else None,
        garbage_collection_threshold=float(given.get("garbage_collection_threshold", 0.0)),
        roundup_power2_divisions=rounded if len(rounded) == ROUNDUP_INTERVALS else (0,) * ROUNDUP_INTERVALS,
    )


# -- stacks


def operator_of(stack: Stack) -> str:
    """The torch operator that requested a block, such as ``"aten::addmm"``; the innermost that does more than allocate.

    A recorded stack shows operators only if it was recorded with C++ frames; else this is empty.
    """
    names = [found[1] for frame in stack if (found := _OPERATOR.search(frame))]
    working = [name for name in names if not _ONLY_ALLOCATE.match(name)]
    return f"aten::{(working or names)[0]}" if names else ""


def line_of(stack: Stack) -> str:
    """The innermost line of Python outside of torch, as ``file:line:function``; empty if there is none."""
    for frame in stack:
        file, _, rest = frame.partition(".py:")
        if rest and not _TORCH.search(file) and not rest.endswith(_INSIDE_TORCH):
            return frame
    return ""


def allocated_by_line(snapshot: Mapping[str, Any], device: int) -> Counter[str]:
    """Return the bytes allocated at the end of a snapshot, by the line of `line_of` that requested them."""
    stacks, found = _Stacks(snapshot.get("frames")), Counter[str]()
    for segment in snapshot["segments"]:
        for block in _segment(segment, stacks).blocks if segment.get("device", 0) == device else ():
            found[line_of(stacks.rows[block.stack]) if block.stack >= 0 else ""] += block.nbytes
    return found


def without_folders(line: str) -> str:
    """A line of `line_of` by its file's name alone, to show to others."""
    return line.replace("\\", "/").rpartition("/")[2]


# As `at::_ops::addmm::call` in recorded stacks, and as `aten.addmm.default` in predicted ones.
_OPERATOR = re.compile(r"(?:at::_ops::|:aten\.)(\w+?)(?:_out)?(?:::|\.|$)")
_ONLY_ALLOCATE = re.compile(
    r"(?:new_)?(?:empty|zeros|ones|full)|resize_|zero_|clone|contiguous|_to_copy|to(?:_|$)|copy_|fill_"
)
_TORCH = re.compile(r"[/\\](?:torch|lightning|pytorch_lightning|lightning_fabric|einops)[/\\]")
_INSIDE_TORCH = ("_call_impl", "_wrapped_call_impl")


# -- the state before the first entry


def _undone(
    end: Sequence[HeldSegment], entries: Sequence[HistoryEntry], allocator: Allocator
) -> tuple[HeldSegment, ...]:
    """Work out the segments before the entries from those after them."""
    segments = {segment.address: replace(segment, blocks=()) for segment in end}
    live = {block.address: block for segment in end for block in segment.blocks}
    addresses = sorted(live)
    for place in range(len(entries) - 1, -1, -1):
        action, address, nbytes, stream, _ = entries[place]
        taken = action in ("alloc", "segment_alloc")
        if nbytes and (taken or action in ("free_completed", "segment_free")):
            there = live if action in ("alloc", "free_completed") else segments
            if (address in there) is not taken:
                raise MemGuardError(
                    f"it contradicts itself: entry {place + 1:,} ({action} of {format_bytes(nbytes)} at {address:#x}) "
                    "does not agree with what follows. Was it edited, or put together from several?"
                )
        if action == "alloc" and address in live:
            del live[address]
            at = bisect_left(addresses, address)
            del addresses[at]
            if at and address not in segments and not allocator.settings.expandable_segments:
                # Had there been free memory up to this address, it would have been taken from its start.
                before = addresses[at - 1]
                live[before] = live[before]._replace(nbytes=address - before)
        elif action == "free_completed" and nbytes:
            live[address] = HeldBlock(address, allocator.rounded(nbytes), nbytes)
            insort(addresses, address)
        elif action == "segment_alloc":
            segments.pop(address, None)
        elif action == "segment_free":
            segments[address] = HeldSegment(address, nbytes, stream, nbytes == SMALL_SEGMENT, False)
        elif action == "segment_map":
            _cut_out(segments, address, nbytes)
        elif action == "segment_unmap":
            segments[address] = HeldSegment(address, nbytes, stream, nbytes % LARGE_SEGMENT != 0, True)
    ordered = sorted(segments.values(), key=lambda segment: segment.address)
    requests = {(each.address, allocator.rounded(each.nbytes)) for each in entries if each.action == "alloc"}
    kinds = sorted({(address, size <= SMALL_LIMIT) for address, size in requests})  # whether of the small pool
    return tuple(_filled(_joined(ordered), sorted(live.values()), allocator, kinds))


def _cut_out(segments: dict[int, HeldSegment], address: int, nbytes: int) -> None:
    """Remove pages from the runs of mapped ones that have them."""
    end = address + nbytes
    for begin, run in tuple(segments.items()):
        behind = begin + run.nbytes
        if begin < end and address < behind:
            del segments[begin]
            if address > begin:
                segments[begin] = replace(run, nbytes=address - begin)
            if end < behind:
                segments[end] = replace(run, address=end, nbytes=behind - end)


def _joined(segments: Sequence[HeldSegment]) -> Iterator[HeldSegment]:
    """Join adjacent runs of mapped pages of one stream."""
    last: HeldSegment | None = None
    for segment in segments:
        if last and segment.continues(last):
            last = replace(last, nbytes=last.nbytes + segment.nbytes)
            continue
        if last:
            yield last
        last = segment
    if last:
        yield last


def _filled(
    segments: Iterable[HeldSegment], live: Sequence[HeldBlock], allocator: Allocator, kinds: list[tuple[int, bool]]
) -> Iterator[HeldSegment]:
    """Put the blocks in their segments."""
    addresses = [block.address for block in live]
    placed = 0
    never_split = allocator.settings.max_split_size_bytes or UNLIMITED
    for segment in segments:
        end = segment.address + segment.nbytes
        inside = live[bisect_left(addresses, segment.address) : bisect_left(addresses, end)]
        placed += len(inside)
        small = segment.small
        if segment.expandable:
            at = bisect_left(kinds, (segment.address, False))
            if at < len(kinds) and kinds[at][0] < end:
                small = kinds[at][1]
        blocks = []
        for block, after in zip(inside, [*(block.address for block in inside[1:]), end], strict=False):
            # A free block of the large pool has more than 1 MiB: less is the rest of a block that was not split.
            gap = after - block.address - block.nbytes
            if gap < 0:
                raise MemGuardError(f"it contradicts itself: two blocks overlap at {after:#x}.")
            unsplit = not small and not segment.expandable and (gap <= SMALL_LIMIT or segment.nbytes >= never_split)
            blocks.append(block._replace(nbytes=block.nbytes + gap) if unsplit else block)
        yield replace(segment, small=small, blocks=tuple(blocks))
    if placed != len(live):
        raise MemGuardError("it contradicts itself: it frees blocks that are in no segment, or in two.")


# -- replaying


@dataclass(frozen=True)
class Holder:
    """A stack that requested blocks, and the free memory in their segments, shared equally among the blocks there."""

    stack: Stack
    blocks: int
    allocated_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class HistoryReplay:
    """Memory that an allocator would have held while a history ran.

    Attributes:
        peak_allocated_bytes: as ``torch.cuda.max_memory_allocated()``.
        peak_reserved_bytes: as ``torch.cuda.max_memory_reserved()``.
        cached_bytes: when the reserved bytes became largest (or if they never grew, the allocated ones), in segments
            without a block, which the allocator gives back when memory is short.
        pinned_bytes: then, free within segments that hold a block: fragmentation.
        holders: the stacks behind the blocks, the one that keeps most free bytes first.
        retries: how often the whole cache was given back to make room.
        out_of_memory_entry: place of the first entry that did not fit the capacity, -1 for what was there before; the
            replay ends there. Of the requests that the record was refused, the last is asked again; it is served beyond
            the capacity, so that the peaks are what it takes.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    cached_bytes: int = 0
    pinned_bytes: int = 0
    holders: tuple[Holder, ...] = ()
    retries: int = 0
    out_of_memory_entry: int | None = None


def replay_history(
    history: History, settings: AllocatorSettings | None = None, *, laid_out_again: bool = False
) -> HistoryReplay:
    """Replay a history in an allocator with these settings and with addresses of its own for new segments.

    It starts from the recorded segments; with another kind of segments, from the blocks allocated then, laid out again.

    Args:
        history: see `read_histories`.
        settings: None for those of the record.
        laid_out_again: start from the blocks with any settings.
    """
    settings = settings or history.settings
    replaying = Replaying(history, Allocator(settings), laid_out_again)
    result = replaying.run()
    at_peak = Replaying(history, Allocator(settings), laid_out_again)
    at_peak.run(replaying.peak_at)
    cached, pinned, holders = at_peak.fragmentation()
    return replace(result, cached_bytes=cached, pinned_bytes=pinned, holders=holders)


@dataclass(frozen=True)
class OutOfMemory:
    """The last request that a recorded process was refused, and what it held then, its cache released.

    Attributes:
        entry, stack: of the request; its bytes are rounded, its address is what the device had free.
        place, earlier: its place in the history, and how many were refused before.
        reserved_bytes, allocated_bytes: of the process.
        largest_free_bytes: the largest free piece in segments of its pool.
        missing_bytes: what had to be reserved for it.
        holders: the stacks that requested what was allocated.
    """

    entry: HistoryEntry
    stack: Stack
    place: int
    earlier: int
    reserved_bytes: int
    allocated_bytes: int
    largest_free_bytes: int
    missing_bytes: int
    holders: tuple[Holder, ...]

    @property
    def capacity_bytes(self) -> int:
        """The most that the process could have reserved, in bytes."""
        return self.reserved_bytes + max(0, min(self.entry.address, self.missing_bytes - 1))

    @property
    def short_bytes(self) -> int:
        """By how much the device was too small."""
        return self.reserved_bytes + self.missing_bytes - self.capacity_bytes


def out_of_memory(history: History) -> OutOfMemory | None:
    """Why the last request that was refused did not fit; None if none was."""
    place = history.refused_at
    if place is None:
        return None
    entry, replaying = history.entries[place], Replaying(history, allocator := Allocator(history.settings))
    replaying.run(place - 1)
    allocated, before, holders = allocator.allocated_bytes, allocator.reserved_bytes, replaying.fragmentation()[-1]
    kind = "small" if entry.nbytes <= SMALL_LIMIT else "large"
    pool = (each for each in allocator.segments() if (each.stream, each.segment_type) == (entry.stream, kind))
    largest = max((block.size_bytes for each in pool for block in each.blocks if not block.allocated), default=0)
    allocator.alloc(entry.nbytes, entry.stream)
    return OutOfMemory(
        *(entry, history.stacks[entry.stack] if entry.stack >= 0 else (), place),
        *(sum(each.action == "oom" for each in history.entries[:place]), history.reserved_bytes[place], allocated),
        *(largest, allocator.reserved_bytes - before, holders),
    )


class Replaying:
    """One replay of a history."""

    def __init__(self, history: History, allocator: Allocator, laid_out_again: bool = False) -> None:
        self.history, self.allocator = history, allocator
        self.blocks: dict[int, tuple[Block, int]] = {}  # by recorded address: the block and its stack
        self.peak_at, self.asks_again_at, self.fits = -1, history.refused_at, True
        same_kind = allocator.settings.expandable_segments == history.settings.expandable_segments
        for segment in history.start:
            if same_kind and not laid_out_again:
                spans = [(block.address, block.nbytes) for block in segment.blocks]
                taken: list[Block | None] = [
                    *allocator.adopt(segment.address, segment.nbytes, segment.stream, spans, small=segment.small)
                ]
            else:
                taken = [allocator.alloc(block.nbytes, segment.stream) for block in segment.blocks]
            for block, held in zip(taken, segment.blocks, strict=True):
                if block is not None:
                    self.blocks[held.address] = block, held.stack
                self.fits &= block is not None
        capacity = allocator.settings.capacity_bytes
        if capacity is not None and allocator.reserved_bytes > capacity:
            allocator.empty_cache()
            self.fits &= allocator.reserved_bytes <= capacity

    def run(self, until: int | None = None) -> HistoryReplay:
        """Replay all entries up to one, or to the first that does not fit the capacity."""
        allocator = self.allocator
        entries = self.history.entries[: None if until is None else until + 1] if self.fits else ()
        releases = dict(_releases(self.history))
        used = peak_used = allocator.allocated_bytes
        peak_reserved, most_used_at = allocator.reserved_bytes, -1
        failed = None if self.fits else -1
        for place, (action, address, nbytes, stream, stack) in enumerate(entries):
            if action == "alloc" or place == self.asks_again_at:
                block = allocator.alloc(nbytes, stream)
                failed = place if block is None else None
                block = block or (allocator.alloc_beyond(nbytes, stream) if action == "oom" else None)
                if block is None:
                    break
                if used + block.size_bytes > peak_used:
                    peak_used, most_used_at = used + block.size_bytes, place
                if allocator.reserved_bytes > peak_reserved:
                    peak_reserved, self.peak_at = allocator.reserved_bytes, place
                self.blocks[address if action == "alloc" else -1] = block, stack
                if action == "alloc":
                    used += block.size_bytes
                    self.served(block, address)
                elif place != until:  # the record goes on without it
                    allocator.free(self.blocks.pop(-1)[0])
            elif action == "free_requested" and address in self.blocks:
                used -= self.blocks[address][0].size_bytes
            elif action == "free_completed" and address in self.blocks:
                allocator.free(self.blocks.pop(address)[0])
            elif place in releases:
                self.release(entries[place : releases[place].end], releases[place])
            else:
                self.other(action, address, nbytes)
        if self.peak_at < 0:
            self.peak_at = most_used_at
        return HistoryReplay(peak_used, peak_reserved, retries=allocator.retries, out_of_memory_entry=failed)

    def served(self, block: Block, address: int) -> None:
        """Do nothing more for a request that was served; ``address`` is where the record has it."""

    def other(self, action: str, address: int, nbytes: int) -> None:
        """Ignore an entry about the recorded device; the replay's own device decides."""

    def release(self, entries: Sequence[HistoryEntry], release: Release) -> None:  # noqa: ARG002
        """Release the cache as the record did, unless it did so for want of memory and the replay has a capacity."""
        if not (release.under_pressure and self.allocator.settings.capacity_bytes):
            self.allocator.empty_cache()

    def fragmentation(self) -> tuple[int, int, tuple[Holder, ...]]:
        """Bytes cached in free segments, and free in others; and the stacks of all blocks."""
        stacks = {block.address: stack for block, stack in self.blocks.values()}
        cached = pinned = 0
        held: defaultdict[int, list[float]] = defaultdict(lambda: [0, 0, 0.0])
        for segment in self.allocator.segments():
            taken = [block for block in segment.blocks if block.allocated]
            free = segment.total_bytes - sum(block.size_bytes for block in taken)
            if not taken:
                cached += free
                continue
            pinned += free
            for block in taken:
                row = held[stacks.get(block.address, -1)]
                row[0] += 1
                row[1] += block.size_bytes
                row[2] += free / len(taken)
        table = self.history.stacks
        holders = sorted(
            (
                Holder(table[stack] if stack >= 0 else (), int(blocks), int(nbytes), round(free))
                for stack, (blocks, nbytes, free) in held.items()
            ),
            key=lambda holder: -holder.free_bytes,
        )
        return cached, pinned, tuple(holders)


RESERVING = frozenset(action for action, sign in _RESERVED.items() if sign > 0)
_RELEASING = frozenset(action for action, sign in _RESERVED.items() if sign < 0)


class Release(NamedTuple):
    """A run of entries that give segments or pages back: up to ``end``, and why."""

    end: int
    under_pressure: bool
    is_whole: bool


def _releases(history: History) -> Iterator[tuple[int, Release]]:
    """The runs of releases by their first entry.

    ``torch.cuda.empty_cache`` leaves the same entries as an allocator that makes room for a request. It was the latter
    if a reservation follows at once that was more than the process ever had without releasing, unless the stack says.
    """
    entries, settings, reserved = history.entries, history.settings, history.reserved_bytes
    most = max(reserved)
    partly = settings.max_split_size_bytes is not None or settings.garbage_collection_threshold > 0
    place = 0
    while place < len(entries):
        if entries[place].action not in _RELEASING:
            place += 1
            continue
        end = place
        while end < len(entries) and entries[end].action in _RELEASING:
            end += 1
        after = entries[end] if end < len(entries) else None
        stack = entries[place].stack
        asked_for = stack >= 0 and any(frame.endswith(":empty_cache") for frame in history.stacks[stack])
        short = (not asked_for and after is not None) and (
            after.action == "oom" or (after.action in RESERVING and reserved[place] + after.nbytes > most)
        )
        yield place, Release(end, short, is_whole=place > 0 and not partly)
        place = end
