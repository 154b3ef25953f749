"""Trace -> a memory snapshot in PyTorch's own format: the predicted step, for the viewers of measured ones.

This file changes when PyTorch changes what ``torch.cuda.memory._snapshot`` returns, or what its viewers read of it:
pytorch.org/memory_viz (``torch/utils/viz/MemoryViz.js``) and ``python -m torch.cuda._memory_viz``. Read as of torch 2.9
to 2.14.
"""

from __future__ import annotations

import os
import pickle
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightning_memguard.core.replay.allocator import Block
from lightning_memguard.core.replay.replay import Steps, within_capacity
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.scratch import up
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.errors import MemGuardError

# The viewer's reader of pickles knows protocols 2 to 4, and no byte strings, sets or classes: only plain dicts.
_PICKLE_PROTOCOL = 4
_FIRST_ADDRESS = 1 << 21
_ADDRESS_UNIT = 512

_Frame = dict[str, Any]
_Entry = dict[str, Any]
_Block = dict[str, Any]


def save_snapshot(trace: Trace, settings: AllocatorSettings, path: str | os.PathLike[str]) -> Path:
    """Write the predicted step as a memory snapshot, as ``torch.cuda.memory._dump_snapshot`` does a measured one.

    It opens in https://pytorch.org/memory_viz and with ``python -m torch.cuda._memory_viz trace_plot FILE -o FILE``.

    Args:
        trace: the events of the step, in bytes requested; a block of uncertain size has its most likely one.
        settings: the rules of the allocator to replay by; if the step does not fit their capacity, it is replayed
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
            f"The snapshot cannot be written to {target} ({error.strerror}); give a file in an existing folder "
            "that you may write to."
        ) from error
    return target


def snapshot(trace: Trace, settings: AllocatorSettings) -> dict[str, Any]:
    """Return the dict that ``torch.cuda.memory._snapshot()`` would return at the end of the trace.

    ``size`` is the requested size, as PyTorch records it, so a viewer's peak is a little below
    ``peak_allocated_bytes``; each entry's ``allocated_size`` (ours; viewers ignore it) is the size of its block. A
    prediction has no times, so entries have no ``time_us``.

    Args:
        trace: see `save_snapshot`.
        settings: see `save_snapshot`.
    """
    trace = trace.only("point")
    recording = within_capacity(trace, settings, _Recording)
    # PyTorch ends a snapshot's trace with this entry; the viewer fails if no entry has the category "unknown".
    frame = _frame(f"predicted by lightning-memguard at batch size {trace.batch_size}", "")
    end = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [frame], "category": "unknown"}
    return {
        "segments": recording.segments(),
        "device_traces": [[*recording.entries, end]],
        "allocator_settings": {
            "expandable_segments": settings.expandable_segments,
            "garbage_collection_threshold": settings.garbage_collection_threshold,
            "max_split_size": settings.max_split_size_bytes or -1,
        },
        "external_annotations": [],
    }


class _Recording:
    """Record of a replay in PyTorch's format: the entries of its trace, and the segments at its end.

    Exact memory, as on the CPU, has no addresses; here each of its blocks is a segment of its own.
    """

    def __init__(self, steps: Steps) -> None:
        self.entries: list[_Entry] = []
        self._allocator = steps.allocator
        self._expandable = steps.allocator is not None and steps.allocator.settings.expandable_segments
        self._live: dict[int, tuple[int, int, Event]] = {}  # by number of the block: address, size, allocation
        self._next_address = _FIRST_ADDRESS
        for event, change in zip(steps.trace.events, steps, strict=False):
            if change > 0:
                self._alloc(event, change, steps.block)
            elif change < 0:  # an empty tensor has no memory, and viewers cannot show it
                self._free(event)

    def _alloc(self, event: Event, size_bytes: int, block: Block | None) -> None:
        if self._allocator is not None and block is not None:
            for action, begin, nbytes, stream in self._allocator.segment_actions:
                self.entries.append(_entry(action, begin, event._replace(nbytes=nbytes, stream=stream)))
            self._allocator.segment_actions.clear()
            address = block.address
        else:
            address = self._next_address
            self._next_address += up(event.nbytes, _ADDRESS_UNIT)
            self.entries.append(_entry("segment_alloc", address, event))
        self._live[event.block] = address, size_bytes, event
        self.entries.append({**_entry("alloc", address, event), "category": event.part, "allocated_size": size_bytes})

    def _free(self, event: Event) -> None:
        address, size_bytes, taken = self._live.pop(event.block)
        given = event._replace(nbytes=taken.nbytes, stream=taken.stream)
        for action in ("free_requested", "free_completed"):  # with a single stream nothing comes between them
            self.entries.append({**_entry(action, address, given), "allocated_size": size_bytes})
        if self._allocator is None:
            self.entries.append(_entry("segment_free", address, taken))

    def segments(self) -> list[dict[str, Any]]:
        live = self._live.values()
        if self._allocator is None:
            return [_segment("large", taken.stream, [_block(address, size, taken)]) for address, size, taken in live]
        owners = {address: taken for address, _, taken in live}
        segments = []
        for segment in self._allocator.segments():
            blocks = [_block(block.address, block.size_bytes, owners.get(block.address)) for block in segment.blocks]
            segments.append(_segment(segment.segment_type, segment.stream, blocks, self._expandable))
        return segments


# The format


def _entry(action: str, address: int, event: Event) -> _Entry:
    return {"action": action, "addr": address, "size": event.nbytes, "stream": event.stream, "frames": _stack(event)}


def _segment(kind: str, stream: int, blocks: list[_Block], expandable: bool = False) -> dict[str, Any]:
    allocated = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    return {
        "device": 0,
        "address": blocks[0]["address"],
        "total_size": sum(block["size"] for block in blocks),
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(block["requested_size"] for block in blocks),
        "stream": stream,
        "segment_type": kind,
        "segment_pool_id": (0, 0),
        "is_expandable": expandable,
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, size_bytes: int, owner: Event | None) -> _Block:
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
def _frames(step: int, phase: str, module: str, requested_by: str, source: str) -> list[_Frame]:
    """Return the stack of files, lines and functions that requested a block, innermost first.

    Paths of modules are written as files: viewers drop functions by parts of their names, such as ``_start``. Equal
    stacks are one list, which a pickle holds once.
    """
    names = module.split(".") if module else []
    line_of_code = [_frame(file, name, int(line)) for file, line, name in [source.rsplit(":", 2)]] if source else []
    outer = [_frame(".".join(names[:depth]), "module") for depth in range(len(names) - 1, 0, -1)]
    inner = _frame(module or "outside any module", requested_by)
    return [inner, *line_of_code, *outer, _frame(f"step {step + 1}", phase)]


def _frame(filename: str, name: str, line: int = 0) -> _Frame:
    return {"filename": filename, "line": line, "name": name}
