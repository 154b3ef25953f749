"""``memguard replay``: a recorded or predicted history under other allocator settings."""

from __future__ import annotations

import argparse
from typing import Any

from lightning_memguard.cli import tables
from lightning_memguard.cli.status import progress
from lightning_memguard.core.gpus import find
from lightning_memguard.core.histories.alternatives import Alternative, alternatives
from lightning_memguard.core.histories.history import (
    History,
    Holder,
    OutOfMemory,
    Stack,
    line_of,
    operator_of,
    out_of_memory,
    read_histories,
)
from lightning_memguard.core.replay.settings import SETTINGS, check_replayed
from lightning_memguard.errors import MemGuardError
from lightning_memguard.report.page_data import picked
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
        help=f"a value of PYTORCH_ALLOC_CONF to try in place of the record's; may be repeated (default: "
        f"{', '.join(SETTINGS)})",
    )
    parser.add_argument(
        "--capacity",
        metavar="SIZE",
        help="what the process may reserve, such as 22GiB, or a GPU such as 'RTX 4090' (its memory, less 300 MB for "
        "CUDA's context): would it have been enough? (default, if it ran out of memory: what it could reserve then)",
    )


def run(options: argparse.Namespace) -> bool:
    """Replay, and print a table for each device in the file. False if nothing fits what one of them may reserve."""
    capacity = _capacity(options.capacity) if options.capacity else None
    for setting in options.setting or ():
        check_replayed(setting)
    found = []
    with progress() as say:
        say("reading the snapshot")
        histories = read_histories(options.snapshot)
        say("replaying it")
        for history in histories:
            failure = out_of_memory(history)
            within = capacity or (failure.capacity_bytes if failure else None)
            found.append((history, alternatives(history, options.setting, within), failure))
    if options.json:
        tables.print_json([_data(*each, capacity) for each in found])
    else:
        named = len(found) > 1 or histories[0].device > 0
        for history, rows, failure in found:
            tables.print_alternatives(history, rows, capacity, tables.terminal(), failure, named)
    return all(any(row.fits is not False for row in rows) for _, rows, _ in found)


def _capacity(text: str) -> int:
    try:
        return parse_bytes(text)
    except MemGuardError:
        return find(text).capacity_bytes


def _data(
    history: History, rows: tuple[Alternative, ...], failure: OutOfMemory | None, capacity: int | None
) -> dict[str, Any]:
    return {
        **picked(history, "device", "predicted"),
        "entries": len(history.entries),
        "start_allocated_bytes": history.start_bytes,
        "start_reserved_bytes": history.start_reserved_bytes,
        "capacity_bytes": capacity or (failure.capacity_bytes if failure else None),
        "out_of_memory": _failure(failure) if failure else None,
        "settings": [_row(row) for row in rows],
    }


def _row(row: Alternative) -> dict[str, Any]:
    known = {"setting": row.setting or None, "was": row.was or None, "laid_out_again": row.laid_out_again}
    peaks = picked(row.replay, "peak_allocated_bytes", "peak_reserved_bytes", "cached_bytes", "retries")
    holders = [_holder(holder) for holder in row.replay.holders[: tables.MOST_HOLDERS]]
    return {**known, **peaks, "fragmented_bytes": row.replay.pinned_bytes, "fits": row.fits, "held_by": holders}


def _failure(failure: OutOfMemory) -> dict[str, Any]:
    asked = {"nbytes": failure.entry.nbytes, "device_free_bytes": failure.entry.address}
    sizes = "reserved_bytes", "allocated_bytes", "largest_free_bytes", "short_bytes"
    holders = sorted(failure.holders, key=lambda holder: -holder.allocated_bytes)[: tables.MOST_HOLDERS]
    known = {**_place(failure.stack), **picked(failure, "place", "earlier"), **asked, **picked(failure, *sizes)}
    return {**known, "held_by": [_holder(holder) for holder in holders]}


def _holder(holder: Holder) -> dict[str, Any]:
    return {**_place(holder.stack), **picked(holder, "blocks", "allocated_bytes", "free_bytes")}


def _place(stack: Stack) -> dict[str, Any]:
    return {"operator": operator_of(stack) or None, "line": line_of(stack) or None}
