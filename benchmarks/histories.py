"""CUDA memory histories that others recorded on their GPUs, replayed, and steps of known programs predicted.

A history is what ``torch.cuda.memory._dump_snapshot`` writes: every request of a process, with the address that the
caching allocator gave it. For each file in a folder (``*.pickle``, ``*.json.gz``; no class is ever loaded from one):

- replayed at the recorded addresses of new segments: how many allocations are at another address than recorded, how
  many segments are reserved that were not, how many are released that were not;
- replayed with addresses of its own: the peak reserved, compared with the recorded one;
- where the program is known (`shared/known_programs.py`): its step predicted blind, the peaks compared, and how many of
  the recorded ones lie within the predicted bounds.

`data/histories.csv` lists the histories: repository, commit, path, GPU, torch, and these figures.

    python benchmarks/histories.py FOLDER                # replay all, print a table
    python benchmarks/histories.py FOLDER --predict      # and predict the steps of known programs
    python benchmarks/histories.py FOLDER --predict --events --only NAME  # and say where the events differ
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_memguard.core.histories.history import History, Replaying, read_histories
from lightning_memguard.core.replay.allocator import Allocator
from lightning_memguard.errors import MemGuardError
from shared.as_recorded import Differences, replay_as_recorded


@dataclass(frozen=True)
class Replayed:
    """One history, and how its replays compare with it."""

    name: str
    found: Differences
    recorded_reserved_bytes: int
    own_reserved_bytes: int

    @property
    def counts(self) -> tuple[tuple[int, int], ...]:
        """Allocations, segments and releases, and how many of them are others than recorded."""
        found = self.found
        segments, releases = found.segments + found.other_segments, found.releases + found.other_releases
        pairs = (found.allocations, found.other_addresses), (segments, found.other_segments)
        return *pairs, (releases, found.other_releases)

    @property
    def reserved_error(self) -> float:
        return self.own_reserved_bytes / self.recorded_reserved_bytes - 1


def histories_in(folder: Path) -> Iterator[tuple[str, History]]:
    """Every history in a folder, by name; files that are none are named on stderr."""
    for path in sorted(path for path in folder.rglob("*") if path.name.endswith((".json.gz", ".pickle", ".pkl"))):
        try:
            found = read_histories(path)
        except MemGuardError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        name = str(path.relative_to(folder)).partition(".")[0]
        for number, history in enumerate(found):
            yield f"{name}:{number}" if number else name, history


def replayed(name: str, history: History) -> Replayed:
    found, own = replay_as_recorded(history)[1], Replaying(history, Allocator(history.settings))
    own.asks_again_at = None
    return Replayed(name, found, max(history.reserved_bytes), own.run().peak_reserved_bytes)


def print_replays(rows: list[Replayed]) -> None:
    width = max(len(row.name) for row in rows)
    print(f"{'history':{width}}  allocations  other  segments  other  releases  other  peak reserved  replayed")
    for row in rows:
        cells = "".join(
            f"  {all_:>{size},}  {other:>5,}" for size, (all_, other) in zip((11, 8, 8), row.counts, strict=True)
        )
        reserved = f"{row.recorded_reserved_bytes / 2**20:>9,.0f} MiB  {row.reserved_error:+8.2%}"
        print(f"{row.name:{width}}{cells}  {reserved}")
    equal = sum(row.own_reserved_bytes == row.recorded_reserved_bytes for row in rows)
    totals, others = ([sum(row.counts[kind][place] for row in rows) for kind in range(3)] for place in (0, 1))
    same = [total - other for total, other in zip(totals, others, strict=True)]
    print(
        f"\n{len(rows)} histories: {same[0]:,} of {totals[0]:,} allocations at the recorded address, {same[1]:,} of "
        f"{totals[1]:,} segments and {same[2]:,} of {totals[2]:,} releases as recorded; "
        f"peak reserved with addresses of its own equal in {equal} of {len(rows)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--predict", action="store_true", help="predict the steps of known programs too")
    parser.add_argument("--only", nargs="+", help="names of histories, or parts of them")
    parser.add_argument("--save", type=Path, help="a folder for the predicted snapshots")
    parser.add_argument("--events", action="store_true", help="and print where the events differ")
    arguments = parser.parse_args()
    found = [
        (name, history)
        for name, history in histories_in(arguments.folder)
        if not arguments.only or any(part in name for part in arguments.only)
    ]
    if not found:
        sys.exit(f"no histories in {arguments.folder}")
    print_replays([replayed(name, history) for name, history in found])
    if arguments.predict:
        print_predictions(found, events=arguments.events, save=arguments.save)


def print_predictions(histories: list[tuple[str, History]], *, events: bool, save: Path | None) -> None:
    from shared.known_programs import PROGRAMS, predicted  # here: it imports torch

    steps = []
    for name, history in histories:
        if name in PROGRAMS:
            steps.append(predicted(name, history, events=events, save=save))
            print("", *steps[-1].lines, sep="\n")
    if not steps:
        return
    print()
    for place, label in enumerate(("allocated", "reserved")):
        outside = [step.outside[place] for step in steps]
        width = statistics.median(step.widths[place] for step in steps)
        print(
            f"recorded peaks of {label} memory within the bounds: {outside.count(0)} of {len(steps)}; "
            f"at most {max(outside):.2%} outside; median width {width:.2%}"
        )


if __name__ == "__main__":
    main()
