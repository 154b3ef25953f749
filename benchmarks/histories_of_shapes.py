"""CUDA memory histories of one step on several shapes, replayed as recorded and as predicted from one of the shapes.

A recorded process repeats a step: its allocations and frees, by the stacks that asked for them, come again and again.
Where the step pads its input by one pixel, two of its sizes tell the dimensions of that shape. All other shapes are
these doubled, and every size of a step on them is predicted from those of the smallest shape: in proportion to the
pixels, padded or not. What is no such step stays as recorded. Both histories are replayed with addresses of their own.

    python benchmarks/histories_of_shapes.py FILE ...    # *.pickle or *.json.gz, as of `benchmarks/histories.py`
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_memguard.core.histories.history import History, HistoryEntry, Replaying, read_histories
from lightning_memguard.core.replay.allocator import Allocator

Dims = tuple[int, ...]
_LEAST_STEPS = 4


def steps_of(history: History) -> list[list[int]]:
    """Places of the entries of each step, of the kind of step that most entries belong to."""
    asked = [place for place, each in enumerate(history.entries) if each.action in ("alloc", "free_requested")]
    best: list[list[int]] = []
    for stack, count in Counter(e.stack for e in history.entries if e.action == "alloc").most_common(12):
        if count < _LEAST_STEPS:
            continue
        begins = [n for n, at in enumerate(asked) if (e := history.entries[at]).action == "alloc" and e.stack == stack]
        spans = [asked[one:other] for one, other in itertools.pairwise(begins)]
        kinds = Counter(_kind(history, span) for span in spans)
        kind = kinds.most_common(1)[0][0]
        found = [span for span in spans if _kind(history, span) == kind]
        best = max(best, found, key=lambda steps: sum(map(len, steps)))
    return best


def _kind(history: History, span: Sequence[int]) -> tuple[tuple[str, int], ...]:
    return tuple((history.entries[at].action, history.entries[at].stack) for at in span)


def sizes_of(history: History, step: Sequence[int]) -> list[int]:
    return [entry.nbytes for at in step if (entry := history.entries[at]).action == "alloc"]


def dims_of(padded: int, plain: int) -> Iterator[tuple[int, Dims]]:
    """Bytes of a pixel, and dimensions, of which a tensor has the one size, and padded by some pixels the other."""
    for each in (4 * channels for channels in range(128, 0, -1)):
        if plain % each == 0 and padded % each == 0:
            count = plain // each
            for a in (n for n in range(2, math.isqrt(count) + 1) if count % n == 0):
                rest = ((b, count // a // b) for b in range(a, math.isqrt(count // a) + 1) if count // a % b == 0)
                ways: list[Dims] = [(a, count // a), *((a, *others) for others in rest)]
                yield from ((each, dims) for dims in ways if _pads(dims, each, padded))


def _pads(dims: Dims, pixel: int, padded: int) -> bool:
    return any(pixel * math.prod(size + 2 * pad for size in dims) == padded for pad in _PADS)


_PADS = 1, 2, 3  # of kernels of 3, 5 and 7


def doubled(dims: Dims, pixel: int, padded: int) -> Dims | None:
    """The dimensions, each doubled some times, that make the padded size; the most even first."""
    ways = itertools.product(range(6), repeat=len(dims))
    for powers in sorted(ways, key=lambda each: max(each) - min(each)):
        found = tuple(size << power for size, power in zip(dims, powers, strict=True))
        if _pads(found, pixel, padded):
            return found
    return None


def predicted(history: History, steps: list[list[int]]) -> tuple[History, int, int, list[Dims]]:
    """The history with all steps as they follow from one on the smallest shape; allocations, and those that differ."""
    template = min((sizes_of(history, step) for step in steps), key=lambda sizes: sizes[0])
    padded, starts = template[0], {sizes_of(history, step)[0] for step in steps}
    candidates = (found for plain in dict.fromkeys(template[1:]) for found in dims_of(padded, plain))
    pixel, dims = next((px, dims) for px, dims in candidates if all(doubled(dims, px, each) for each in starts))
    entries, other, all_, shapes = [*history.entries], 0, 0, list[Dims]()
    changed = dict[int, int]()
    for step in steps:
        recorded = sizes_of(history, step)
        shape = doubled(dims, pixel, recorded[0])
        assert shape
        shapes.append(shape)
        ratio = math.prod(shape) // math.prod(dims)
        of_pixels = [size % math.prod(dims) == 0 for size in template]
        grown = [size * ratio if grows else size for size, grows in zip(template, of_pixels, strict=True)]
        sizes = [recorded[0] if size == padded else more for size, more in zip(template, grown, strict=True)]
        for at, size in zip([at for at in step if entries[at].action == "alloc"], sizes, strict=True):
            changed[at] = size
            all_, other = all_ + 1, other + (size != entries[at].nbytes)
    held = dict[int, int]()  # by address
    for at, entry in enumerate(entries):
        if entry.action == "alloc":
            held[entry.address] = changed.get(at, entry.nbytes)
            entries[at] = entry._replace(nbytes=held[entry.address])
        elif entry.action in ("free_requested", "free_completed"):
            entries[at] = HistoryEntry(entry.action, entry.address, held.get(entry.address, entry.nbytes), *entry[3:])
    return replace(history, entries=tuple(entries)), all_, other, shapes


def reserved(history: History) -> int:
    replaying = Replaying(history, Allocator(history.settings))
    replaying.asks_again_at = None
    return replaying.run().peak_reserved_bytes


def main() -> None:
    for name in sys.argv[1:]:
        for history in read_histories(Path(name)):
            steps = steps_of(history)
            shapes = {sizes_of(history, step)[0] for step in steps}
            if len(shapes) < 2:
                print(f"{Path(name).name}: {len(steps)} steps of {len(shapes)} shape")
                continue
            try:
                made, all_, other, dims = predicted(history, steps)
            except StopIteration:
                print(f"{Path(name).name}: {len(steps)} parts of {len(shapes)} sizes, no padded step")
                continue
            recorded, own, ours = max(history.reserved_bytes), reserved(history), reserved(made)
            seen = ", ".join(f"{n} x {'x'.join(map(str, each))}" for each, n in Counter(dims).items())
            print(
                f"{Path(name).name}: {len(steps)} steps ({seen}); {all_ - other} of {all_} sizes equal; reserved MiB: "
                f"recorded {recorded / 2**20:,.0f}, replayed {own / 2**20:,.0f} ({own / recorded - 1:+.2%}), "
                f"predicted from the smallest shape {ours / 2**20:,.0f} ({ours / recorded - 1:+.2%})"
            )


if __name__ == "__main__":
    main()
