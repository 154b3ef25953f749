"""How wide bounds have to be: other ways to make them, on the published runs and on those that were kept aside.

Every run of `accuracy.py` is replayed with other choices of workspaces, and bounds are made of the replays in several
ways. For each: how many measured peaks they hold, and their median width in percent of what was measured. Nothing is
chosen on the runs kept aside.

- today: the lowest and highest replay, the share of the cache, and what CUDA loads late, all of them added.
- without the cache: the same without the share of the cache.
- next plans alone: workspaces between those of the first four plans that cuDNN names; no range from its table.
- drawn: replays in which each convolution takes cuDNN's first plan with a probability of 0.89, as often as versions
  agree on it, else another that is possible; the lowest and highest of 24, without the share of the cache.
- roots: the three parts as if they were independent: the root of the sum of their squares.
- constant: as many percent to each side of the likely figure.

Then the language models that today's bounds do not hold, with a first batch of fewer tokens, which leaves blocks that
are too small for the next batch.

    python benchmarks/bounds.py                # all, 10 to 20 minutes on one core
    python benchmarks/bounds.py --only RegNet  # some models
"""

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import hypot
from multiprocessing import Pool
from typing import Any

from accuracy import TOKENS, captured, is_image, published
from lightning_memguard.core.replay.footprint import _FRAGMENTATION
from lightning_memguard.core.replay.replay import Replay, within_capacity
from lightning_memguard.core.trace.trace import CASES, Event

AGREEING = 0.89  # of 4,520 first choices of cuDNN 9.8 and 9.19
DRAWS = 24
PLANS = 4
LENGTHS = (TOKENS, 127, 120, 110, 96, 64)

Question = tuple[str, int, int, int, tuple[int, ...]]  # operator, three cases, the plans' workspaces in order
Bounds = tuple[int, int]


@dataclass(frozen=True)
class Replays:
    """What one run reserves, by choice of workspaces, and what was measured; bytes."""

    is_image: bool
    measured: int
    setup: int
    late: tuple[int, int, int]
    cached: int  # the part of the likely reserve that is not allocated
    room: int  # left of the capacity
    point: int
    cases: Bounds
    plans: Bounds
    drawn: Bounds

    def is_held(self, bounds: Bounds) -> bool:
        return bounds[0] <= self.measured + self.setup and self.measured <= bounds[1]


def questions(events: tuple[Event, ...]) -> tuple[dict[int, int], list[Question]]:
    """Which of the uncertain workspaces each block is, and what is known of these."""
    number: dict[int, int] = {}
    found: list[dict[str, Any]] = []
    last = len(CASES)
    for event in events:
        if not event.case:
            last = len(CASES)
        elif event.action == "alloc":
            place = CASES.index(event.case)
            if place <= last:
                found.append({"operator": event.operator, "plans": event.otherwise})
            last = place
            number[event.block] = len(found) - 1
            found[-1][event.case] = event.nbytes
    return number, [(each["operator"], *(each.get(case, 0) for case in CASES), each["plans"]) for each in found]


def with_workspaces(events: tuple[Event, ...], size_of: Callable[[Question], int]) -> tuple[Event, ...]:
    """The events with one size for each uncertain workspace; the same for the same question."""
    number, known = questions(events)
    sizes = {question: size_of(question) for question in dict.fromkeys(known)}
    first: dict[int, int] = {}
    kept = []
    for event in events:
        if not event.case:
            kept.append(event)
        elif first.setdefault(number[event.block], event.block) == event.block:
            nbytes = sizes[known[number[event.block]]]
            kept += [event._replace(nbytes=nbytes, case="")] if nbytes else []
    return tuple(kept)


def plans(question: Question) -> tuple[int, ...]:
    """Workspaces of the first plans, and none where copies are not counted."""
    _, _, point, _, named = question
    return (point, *named[:PLANS]) if named and named[0] != point else named[:PLANS] or (point,)


def drawn(question: Question, generator: random.Random) -> int:
    _, low, point, high, named = question
    others = sorted({low, high, *named[:PLANS]} - {point})
    return point if not others or generator.random() < AGREEING else generator.choice(others)


def replays(row: dict[str, str]) -> Replays:
    loop = captured(row)
    settings = replace(loop.settings, capacity_bytes=loop.capacity)

    def replayed(size_of: Callable[[Question], int]) -> Replay:
        events = with_workspaces(loop.trace.events, size_of)
        return within_capacity(replace(loop.trace, events=events, scratch_spans=()), settings, Replay.of)

    def reserved(size_of: Callable[[Question], int]) -> int:
        return replayed(size_of).peak_reserved_bytes

    def between(least: int, most: int) -> Bounds:
        return min(point.peak_reserved_bytes, least), max(point.peak_reserved_bytes, most)

    point = replayed(lambda question: question[2])
    generators = [random.Random(seed) for seed in range(DRAWS)]
    draws = [reserved(lambda question, each=each: drawn(question, each)) for each in generators]
    cases = between(reserved(lambda question: question[1]), reserved(lambda question: question[3]))
    return Replays(
        is_image=is_image(row),
        measured=int(row["measured_bytes"]),
        setup=loop.setup,
        late=loop.late,
        cached=point.peak_reserved_bytes - point.peak_allocated_bytes,
        room=max(0, loop.capacity - cases[1]),
        point=point.peak_reserved_bytes,
        cases=cases,
        plans=between(reserved(lambda question: min(plans(question))), reserved(lambda question: max(plans(question)))),
        drawn=between(min(draws), max(draws)),
    )


def added(run: Replays, span: Bounds, share: float) -> Bounds:
    cached = int(share * run.cached)
    return span[0] - cached + run.late[0], span[1] + min(cached, run.room) + run.late[2]


def roots(run: Replays, share: float) -> Bounds:
    least, likely, most = run.late
    below = hypot(run.point - run.cases[0], share * run.cached, likely - least)
    above = hypot(run.cases[1] - run.point, min(share * run.cached, run.room), most - likely)
    return int(run.point + likely - below), int(run.point + likely + above)


def constant(run: Replays, percent: int) -> Bounds:
    figure = run.point + run.late[1]
    return figure * (100 - percent) // 100, figure * (100 + percent) // 100


WAYS: dict[str, Callable[[Replays], Bounds]] = {
    "today": lambda run: added(run, run.cases, _FRAGMENTATION),
    "without the cache": lambda run: added(run, run.cases, 0),
    "next plans alone": lambda run: added(run, run.plans, _FRAGMENTATION),
    "drawn": lambda run: added(run, run.drawn, 0),
    **{f"roots, {share:.0%} of the cache": lambda run, share=share: roots(run, share) for share in (0.2, 0.3, 0.5)},
    **{f"constant, {percent} %": lambda run, percent=percent: constant(run, percent) for percent in (4, 6, 8)},
}

TODAY = WAYS["today"]


def show(title: str, runs: list[Replays]) -> None:
    print(f"\n{title}: {len(runs)} runs")
    for name, way in WAYS.items():
        found = [(run, way(run)) for run in runs]
        held = sum(run.is_held(bounds) for run, bounds in found)
        width = statistics.median(100 * (bounds[1] - bounds[0]) / run.measured for run, bounds in found)
        print(f"  {name:<24}{held:>4} held ({held / len(runs):4.0%}), median width {width:5.1f} %")


def reserved_after(task: tuple[dict[str, str], int]) -> int:
    """What a run reserves after a first batch of so many tokens."""
    row, first = task
    loop = captured(row, first)
    settings = replace(loop.settings, capacity_bytes=loop.capacity)
    return within_capacity(loop.trace.only("point"), settings, Replay.of).peak_reserved_bytes


def show_lengths(rows: list[dict[str, str]], pool: Any) -> None:
    print("\nReserved after a first batch of as many tokens, MiB")
    print(f"{'model':<26}{'batch':>5}{'measured':>10}{''.join(f'{length:>8}' for length in LENGTHS)}")
    found = pool.map(reserved_after, [(row, length) for row in rows for length in LENGTHS])
    for place, row in enumerate(rows):
        figures = found[place * len(LENGTHS) :][: len(LENGTHS)]
        cells = "".join(f"{figure >> 20:>8}" for figure in figures)
        print(f"{row['model']:<26}{row['batch']:>5}{int(row['measured_bytes']) >> 20:>10}{cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="captures at a time")
    arguments = parser.parse_args()
    with Pool(arguments.jobs) as pool:
        for title, name in (("Published", "published_runs"), ("Kept aside", "published_runs_aside")):
            rows = published(name, arguments.only)
            runs = pool.map(replays, rows, chunksize=4)
            for kind, chosen in (("all", runs), ("CNNs", [run for run in runs if run.is_image])):
                if chosen:
                    show(f"{title}, {kind}", chosen)
            short = [r for r, run in zip(rows, runs, strict=True) if not is_image(r) and not run.is_held(TODAY(run))]
            if short:
                show_lengths(short, pool)


if __name__ == "__main__":
    main()
