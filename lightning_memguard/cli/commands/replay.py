"""``memguard replay``: a recorded or predicted history under other allocator settings."""

from __future__ import annotations

import argparse
from typing import Any

from lightning_memguard.cli import tables
from lightning_memguard.cli.status import progress
from lightning_memguard.core.gpus import find
from lightning_memguard.core.replay.alternatives import SETTINGS, Alternative, alternatives
from lightning_memguard.core.replay.history import History, Holder, line_of, operator_of, read_histories
from lightning_memguard.core.replay.settings import check_replayed
from lightning_memguard.errors import MemGuardError
from lightning_memguard.report.data import picked
from lightning_memguard.units import parse_bytes

HELP = "replay a memory snapshot under other allocator settings"
EPILOG = (
    "SNAPSHOT is what torch.cuda.memory._dump_snapshot or `memguard snapshot` wrote. Only plain values are read from "
    "it: a file that names a class is refused."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("snapshot", metavar="SNAPSHOT", help="the file, usually *.pickle")
    parser.add_argument(
        "--setting",
        action="append",
        metavar="KEY:VALUE",
        help=f"a value of PYTORCH_ALLOC_CONF to try; may be repeated (default: {', '.join(SETTINGS)})",
    )
    parser.add_argument(
        "--capacity",
        metavar="SIZE",
        help="what the process may reserve, such as 22GiB, or a GPU such as 'RTX 4090' (its memory, less 300 MB for "
        "CUDA's context): would it have been enough?",
    )


def run(options: argparse.Namespace) -> bool:
    """Replay, and print a table for each device in the file. False if nothing fits the capacity."""
    capacity = _capacity(options.capacity) if options.capacity else None
    for setting in options.setting or ():
        check_replayed(setting)
    with progress() as say:
        say("reading the snapshot")
        histories = read_histories(options.snapshot)
        say("replaying it")
        found = [(history, alternatives(history, options.setting or SETTINGS, capacity)) for history in histories]
    if options.json:
        tables.print_json([_data(history, rows, capacity) for history, rows in found])
    else:
        for history, rows in found:
            tables.print_alternatives(history, rows, capacity, tables.terminal())
    return capacity is None or all(any(row.fits for row in rows) for _, rows in found)


def _capacity(text: str) -> int:
    try:
        return parse_bytes(text)
    except MemGuardError:
        from lightning_memguard.core.device.context import CONTEXT_BYTES  # here: it imports torch

        return find(text).memory_bytes - CONTEXT_BYTES[1]


def _data(history: History, rows: tuple[Alternative, ...], capacity: int | None) -> dict[str, Any]:
    return {
        "predicted": history.predicted,
        "entries": len(history.entries),
        "start_allocated_bytes": history.start_bytes,
        "start_reserved_bytes": history.start_reserved_bytes,
        "capacity_bytes": capacity,
        "settings": [_row(row) for row in rows],
    }


def _row(row: Alternative) -> dict[str, Any]:
    peaks = picked(row.replay, "peak_allocated_bytes", "peak_reserved_bytes", "cached_bytes", "retries")
    holders = [_holder(holder) for holder in row.replay.holders[: tables.MOST_HOLDERS]]
    known = {"setting": row.setting or None, **peaks, "fragmented_bytes": row.replay.pinned_bytes}
    return {**known, "fits": row.fits, "held_by": holders}


def _holder(holder: Holder) -> dict[str, Any]:
    place = {"operator": operator_of(holder.stack) or None, "line": line_of(holder.stack) or None}
    return {**place, **picked(holder, "blocks", "allocated_bytes", "free_bytes")}
