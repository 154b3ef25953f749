"""Trace -> a memory snapshot in PyTorch's own format: the predicted step, for the viewers made for measured ones.

This file changes when PyTorch changes what ``torch.cuda.memory._snapshot`` returns, or what its viewers read of it:
pytorch.org/memory_viz (``torch/utils/viz/MemoryViz.js``) and ``python -m torch.cuda._memory_viz``. Read as of torch 2.9
to 2.14.
"""

from __future__ import annotations

import os
import pickle
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from lightning_memguard.core.replay.allocator import Allocator, Block
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.errors import MemGuardError

# The viewer's reader of pickles knows protocols 2 to 4 and no byte strings, sets or classes: plain dicts alone.
_PICKLE_PROTOCOL = 4
_FIRST_ADDRESS = 1 << 21
_ADDRESS_UNIT = 512

_Frame = dict[str, Any]
_Entry = dict[str, Any]


@dataclass(frozen=True)
class _Stretch:
    """Device memory that lies end to end and came from one segment."""

    address: int
    size_bytes: int
    stream: int
    segment_type: Literal["small", "large"]


def save_snapshot(trace: Trace, settings: AllocatorSettings, path: str | os.PathLike[str]) -> Path:
    """Write the predicted step as a memory snapshot, as ``torch.cuda.memory._dump_snapshot`` does a measured one.

    It opens in https://pytorch.org/memory_viz and with ``python -m torch.cuda._memory_viz trace_plot FILE -o FILE``.

    Args:
        trace: the events of the step, in bytes asked for. Blocks whose size is not known exactly have their most likely
            one.
        settings: the rules of the allocator to replay by; where the step does not fit their capacity, it is replayed
            without one.
        path: the file to write, usually ``*.pickle``; an existing one is replaced.

    Returns:
        The path.

    Raises:
        MemGuardError: the file cannot be written.

    >>> import tempfile
    >>> step = (Event("alloc", 0, 1000, "parameters"), Event("alloc", 1, 4000), Event("free", 1, 4000))
    >>> folder = tempfile.mkdtemp()
    >>> save_snapshot(Trace(8, "cuda", "fake", step), AllocatorSettings(), f"{folder}/step.pickle").name
    'step.pickle'
    """
    target = Path(path)
    content = pickle.dumps(snapshot(trace, settings), protocol=_PICKLE_PROTOCOL)
    try:
        target.write_bytes(content)
    except OSError as error:
        raise MemGuardError(
            f"The snapshot cannot be written to {target} ({error.strerror}); give a file in a folder that is there and "
            "that you may write to."
        ) from error
    return target


def snapshot(trace: Trace, settings: AllocatorSettings) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot()`` would return at the end of the trace.

    ``size`` is what was asked for, as PyTorch records it, so a viewer's peak lies a little below
    ``peak_allocated_bytes``; each entry's ``allocated_size`` (ours; viewers pass over it) is what the allocator gave.
    Nothing takes time in a prediction, so no entry has a ``time_us``.

    Args:
        trace: see `save_snapshot`.
        settings: see `save_snapshot`.
    """
    trace = trace.only("point")
    book = _book(trace, settings)
    if book is None:
        book = _book(trace, replace(settings, capacity_bytes=None))
    assert book is not None, "without a capacity everything fits"
    return {
        "segments": book.segments(),
        "device_traces": [[*book.entries, _closing(trace)]],
        "allocator_settings": _settings(settings),
        "external_annotations": [],
    }


def _book(trace: Trace, settings: AllocatorSettings) -> _Exact | _Cached | None:
    """All that happens, written down; None where something does not fit the capacity."""
    book: _Exact | _Cached = _Exact() if settings.kind == "exact" else _Cached(settings)
    for event in trace.events:
        if event.action == "free":
            book.free(event)
        elif event.nbytes and not book.alloc(event):  # an empty tensor has no memory, and viewers no way to show it
            return None
    return book


class _Exact:
    """Memory that is neither rounded nor cached, as on the CPU: each block is a segment of its own."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self._live: dict[int, tuple[int, Event]] = {}
        self._next_address = _FIRST_ADDRESS

    def alloc(self, event: Event) -> bool:
        address = self._next_address
        self._next_address += -(-event.nbytes // _ADDRESS_UNIT) * _ADDRESS_UNIT
        self._live[event.block] = address, event
        self.entries += [_entry("segment_alloc", address, event), _allocated(address, event, event.nbytes)]
        return True

    def free(self, event: Event) -> None:
        if event.block not in self._live:
            return
        address, taken = self._live.pop(event.block)
        self.entries += [*_freed(address, taken, event, taken.nbytes), _entry("segment_free", address, taken)]

    def segments(self) -> list[dict[str, Any]]:
        return [
            _segment(_Stretch(address, event.nbytes, event.stream, "large"), [_block(address, event.nbytes, event)])
            for address, event in self._live.values()
        ]


class _Cached:
    """PyTorch's caching allocator; which segments came and went is seen by looking before and after."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self.entries: list[_Entry] = []
        self._allocator = Allocator(settings)
        self._live: dict[int, tuple[Block, Event]] = {}
        self._expandable = settings.expandable_segments
        self._scratch_spans: tuple[_Stretch, ...] = ()
        self._seen = 0, 0

    def alloc(self, event: Event) -> bool:
        block = self._allocator.alloc(event.nbytes, event.stream)
        if block is None:
            return False
        self._note_segments(block, event)
        self._live[event.block] = block, event
        self.entries.append(_allocated(block.address, event, block.size_bytes))
        return True

    def free(self, event: Event) -> None:
        if event.block not in self._live:
            return
        block, taken = self._live.pop(event.block)
        self.entries += _freed(block.address, taken, event, block.size_bytes)
        self._allocator.free(block)

    def segments(self) -> list[dict[str, Any]]:
        owner = {block.address: event for block, event in self._live.values()}
        return [
            _segment(
                _Stretch(found.address, found.total_bytes, found.stream, found.segment_type),
                [_block(block.address, block.size_bytes, owner.get(block.address)) for block in found.blocks],
                self._expandable,
            )
            for found in self._allocator.segments()
        ]

    def _note_segments(self, block: Block, event: Event) -> None:
        """Write down which segments came and went for a request, if any did."""
        seen = self._allocator.reserved_bytes, self._allocator.retries
        if seen == self._seen and self._holds(block):
            return
        self._seen = seen
        before = self._scratch_spans
        self._scratch_spans = tuple(
            sorted(
                (
                    _Stretch(found.address, found.total_bytes, found.stream, found.segment_type)
                    for found in self._allocator.segments()
                ),
                key=lambda stretch: stretch.address,
            )
        )
        went, came = ("segment_unmap", "segment_map") if self._expandable else ("segment_free", "segment_alloc")
        gone = [_entry(went, *_at(stretch, event)) for stretch in _without(before, self._scratch_spans)]
        self.entries += gone
        self.entries += [_entry(came, *_at(stretch, event)) for stretch in _without(self._scratch_spans, before)]

    def _holds(self, block: Block) -> bool:
        """Whether the block lies in a segment that is known; addresses are never used twice."""
        at = bisect_right(self._scratch_spans, block.address, key=lambda stretch: stretch.address) - 1
        return at >= 0 and block.address < self._scratch_spans[at].address + self._scratch_spans[at].size_bytes


def _at(stretch: _Stretch, event: Event) -> tuple[int, Event]:
    return stretch.address, event._replace(nbytes=stretch.size_bytes, stream=stretch.stream)


def _without(scratch_spans: Sequence[_Stretch], others: Sequence[_Stretch]) -> Iterator[_Stretch]:
    """What of some stretches no other covers; both are sorted by address and free of overlaps."""
    for stretch in scratch_spans:
        address, end = stretch.address, stretch.address + stretch.size_bytes
        for other in others:
            other_end = other.address + other.size_bytes
            if other_end <= address or other.address >= end:
                continue
            if other.address > address:
                yield replace(stretch, address=address, size_bytes=other.address - address)
            address = other_end
        if address < end:
            yield replace(stretch, address=address, size_bytes=end - address)


# The format


def _entry(action: str, address: int, event: Event) -> _Entry:
    return {
        "action": action,
        "addr": address,
        "size": event.nbytes,
        "stream": event.stream,
        "frames": _stack(event),
    }


def _allocated(address: int, event: Event, allocated_bytes: int) -> _Entry:
    return {**_entry("alloc", address, event), "category": event.part, "allocated_size": allocated_bytes}


def _freed(address: int, taken: Event, event: Event, allocated_bytes: int) -> list[_Entry]:
    """PyTorch asks and completes in two steps; with a single stream nothing comes between."""
    given = event._replace(nbytes=taken.nbytes, stream=taken.stream)
    return [
        {**_entry(action, address, given), "allocated_size": allocated_bytes}
        for action in ("free_requested", "free_completed")
    ]


def _closing(trace: Trace) -> _Entry:
    """PyTorch ends a snapshot's trace with this entry; the viewer fails where no entry has the category "unknown"."""
    frame = _frame(f"predicted by lightning-memguard at batch size {trace.batch_size}", "")
    return {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [frame], "category": "unknown"}


def _segment(stretch: _Stretch, blocks: list[dict[str, Any]], expandable: bool = False) -> dict[str, Any]:
    allocated = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    return {
        "device": 0,
        "address": stretch.address,
        "total_size": stretch.size_bytes,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(block["requested_size"] for block in blocks),
        "stream": stretch.stream,
        "segment_type": stretch.segment_type,
        "segment_pool_id": (0, 0),
        "is_expandable": expandable,
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, size_bytes: int, owner: Event | None) -> dict[str, Any]:
    return {
        "address": address,
        "size": size_bytes,
        "requested_size": owner.nbytes if owner else 0,
        "state": "active_allocated" if owner else "inactive",
        "frames": _stack(owner) if owner else [],
        **({"category": owner.part} if owner else {}),
    }


def _stack(event: Event) -> list[_Frame]:
    return _frames(event.step, event.phase, event.module, event.operator or event.part, event.source)


@lru_cache(maxsize=4096)
def _frames(step: int, phase: str, module: str, asked_by: str, source: str) -> list[_Frame]:
    """Where a block was asked for, innermost first, as a stack of files, lines and functions.

    Paths of modules go where files do: viewers drop functions by parts of their names, such as ``_start``. Equal stacks
    are one list, which a pickle holds once.
    """
    names = module.split(".") if module else []
    outer = [_frame(".".join(names[:depth]), "module") for depth in range(len(names) - 1, 0, -1)]
    return [
        _frame(module or "outside any module", asked_by),
        *([_line(source)] if source else []),
        *outer,
        _frame(f"step {step + 1}", phase),
    ]


def _line(source: str) -> _Frame:
    file, line, function = source.rsplit(":", 2)
    return _frame(file, function, int(line))


def _frame(filename: str, name: str, line: int = 0) -> _Frame:
    return {"filename": filename, "line": line, "name": name}


def _settings(settings: AllocatorSettings) -> dict[str, Any]:
    """The settings under the names of PyTorch's own snapshot."""
    return {
        "expandable_segments": settings.expandable_segments,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "max_split_size": settings.max_split_size_bytes or -1,
    }
