"""Traces of a step with 1, 2 and 3 equal layers -> the trace of the same step with any number of them.

Each further layer adds the same rows at the same places: its parameters, its forward pass, its backward pass. Their
numbers (of blocks, layers, positions) go up or down by as much from layer to layer. A trace that comes out wrong is
refused: each block is allocated once, and freed with its size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from lightning_memguard.core.trace.scratch import NONE, Scratch
from lightning_memguard.core.trace.trace import Event, ScratchSpan, Trace
from lightning_memguard.errors import CannotTraceError

DEPTHS = (1, 2, 3)  # layers
BASE = DEPTHS[1]  # layers of the traces at other batch sizes
_MOST_COMPARED = 400  # rows


class _Row(NamedTuple):
    """One event, or another item of a trace.

    ``token`` is the same in each layer; so is ``exact``, except for what all layers have together. ``numbers`` go up
    or down from layer to layer.
    """

    token: Hashable
    exact: Hashable
    numbers: tuple[float, ...]


_Rows = list[_Row]
_Item = Event | ScratchSpan
_Piece = tuple[int, int, bool]
"""Start and end of some rows with `BASE` layers, and whether each further layer repeats them."""


@dataclass(frozen=True)
class _Growth:
    """How the rows of one kind grow with the layers, by their place with `BASE` layers.

    Attributes:
        tokens: of the rows.
        pieces: all rows, in order.
        by_depth: how far their numbers go with each layer that the model has more.
        by_layer: how far they go from one repetition to the next.
        of_all: places of rows that are of all layers together.
    """

    tokens: list[Hashable]
    pieces: list[_Piece]
    by_depth: np.ndarray[Any, Any]
    by_layer: np.ndarray[Any, Any]
    of_all: set[int]

    def at(self, rows: _Rows, depth: int) -> Iterator[tuple[int, list[Any]]]:
        """Return the rows of a model with so many layers: the place of each in these, and its numbers."""
        numbers = np.array([row.numbers for row in rows]) + (depth - BASE) * self.by_depth
        for start, end, repeats in self.pieces:
            times = np.arange(depth - DEPTHS[0] if repeats else 1)[:, None, None]
            for repeated in (numbers[start:end] + times * self.by_layer[start:end]).tolist():
                yield from zip(range(start, end), repeated, strict=True)


@dataclass(frozen=True)
class _OfAll:
    """The rule of a kernel that takes all layers' tensors, which no batch size changes."""

    nbytes: int

    def __call__(self, _: Sequence[int]) -> Scratch:
        return Scratch(after=((self.nbytes,),)) if self.nbytes else NONE


@dataclass(frozen=True)
class Deepening:
    """How the trace of a step grows with the layers of its model; see `deepening_of`.

    Attributes:
        layers: the path of a layer without its number, such as ``"model.layers."``.
        growths: of events with spans, kernels and work.
    """

    layers: str
    growths: tuple[_Growth, ...]

    def fits(self, trace: Trace) -> bool:
        """Whether a trace with `BASE` layers is of the same step, at any batch size."""
        kinds = zip(self.growths, _rows_of(trace, self.layers), strict=True)
        return all(growth.tokens == [row.token for row in rows] for growth, rows in kinds)

    def at(self, trace: Trace, depth: int) -> Trace:
        """Return the trace with so many layers, from one with `BASE` layers that it `fits`.

        Raises:
            CannotTraceError: a block would be allocated twice, or freed with another size.
        """
        kinds = zip(self.growths, _rows_of(trace, self.layers), strict=True)
        items, kernels, work = (growth.at(rows, depth) for growth, rows in kinds)
        known, called = _items(trace), [at for at, _ in kernels]
        found = [self._item(known[at], *numbers) for at, numbers in items]
        deeper = replace(
            trace,
            events=tuple([item for item in found if isinstance(item, Event)]),
            scratch_spans=tuple([item for item in found if isinstance(item, ScratchSpan)]),
            kernels=tuple([trace.kernels[at] for at in called]),
            work=tuple([trace.work[at]._replace(flops=flops, nbytes=size) for at, (flops, size) in work]),
        )
        _check(deeper.events)
        return self._with_kernels_of_all(deeper, called)

    def _item(self, item: _Item, first: int, second: int, layer: int, kernel: int, place: int) -> _Item:
        if isinstance(item, ScratchSpan):
            like = self._of_layer(item.like, layer)
            return ScratchSpan(first, second, kernel, None if item.place is None else place, like)
        return self._of_layer(Event(item.action, first, second, *item[3:]), layer)

    def _of_layer(self, event: Event, layer: int) -> Event:
        if layer < 0:
            return event
        path = event.module[len(self.layers) :].lstrip("0123456789")
        return event._replace(module=f"{self.layers}{layer}{path}")

    def _with_kernels_of_all(self, trace: Trace, places: list[int]) -> Trace:
        """Have kernels that take all layers' tensors ask for what they take in the trace."""
        of_all = {number for number, at in enumerate(places) if at in self.growths[1].of_all}
        kernels = list(trace.kernels)
        for start, end, number, place, _ in trace.scratch_spans:
            if number in of_all:
                taken = [event.nbytes for event in trace.events[start:end] if event.action == "alloc"]
                if taken and (place is not None or len(taken) > 1):
                    raise CannotTraceError("a kernel of all layers' tensors takes more than one block")
                kernels[number] = replace(kernels[number], numbers=(), rest=(), scratch=_OfAll(sum(taken)))
        return replace(trace, kernels=tuple(kernels))


def deepening_of(traces: Sequence[Trace], layers: str) -> Deepening:
    """Find out how the trace of a step grows with the layers of its model.

    Args:
        traces: with `DEPTHS` layers, at one batch size.
        layers: the path of the list of layers, such as ``"model.layers"``.

    Raises:
        CannotTraceError: layers differ, or all of them together make something that may grow with the batch.
    """
    layers += "."
    base = traces[DEPTHS.index(BASE)]
    if any(
        (each.notes, each.kept, each.batch) != (base.notes, base.kept, base.batch) or each.held_at for each in traces
    ):
        raise CannotTraceError("further layers change more than events")
    growths = tuple(map(_growth_of, *(_rows_of(trace, layers) for trace in traces)))
    items, kernels, work = growths
    phases = [item.phase for at, item in enumerate(_items(base)) if isinstance(item, Event) and at in items.of_all]
    phases += [span.like.phase for span in base.scratch_spans if span.kernel in kernels.of_all]
    if {*phases} - {"setup", "optimizer"} or not all(base.work[at].updates for at in work.of_all):
        raise CannotTraceError("what all layers make together may grow with the batch")
    return Deepening(layers, growths)


# -- rows


def _items(trace: Trace) -> list[_Item]:
    """The events, and the spans of scratch each before the event that it begins with."""
    found, done = list[_Item](), 0
    for span in trace.scratch_spans:
        found += [*trace.events[done : span.start], span]
        done = max(done, span.start)
    return [*found, *trace.events[done:]]


def _rows_of(trace: Trace, layers: str) -> tuple[_Rows, _Rows, _Rows]:
    """The rows of items, kernels and work."""
    makers: dict[tuple[int, str], Hashable] = {}  # by block and case

    def row(item: _Item) -> _Row:
        event = item if isinstance(item, Event) else item.like
        action, block, nbytes, part, phase, step, module, operator, stream, case, source, otherwise = event
        layer = -1
        if module.startswith(layers):
            number, dot, path = module[len(layers) :].partition(".")
            module, layer = f"{layers}*{dot}{path}", int(number)
        if isinstance(item, ScratchSpan):
            place = -1 if item.place is None else item.place
            token: Hashable = (module, operator, phase, step, item.place is None, min(place, 0))
            return _Row(token, None, (item.start, item.end, layer, item.kernel, place))
        if action == "alloc":
            makers[block, case] = module, operator
        made = makers.get((block, case))
        token = (action, part, phase, step, module, operator, made, stream, case, source, otherwise)
        return _Row(token, nbytes, (block, nbytes, layer, 0, 0))

    return (
        [row(item) for item in _items(trace)],
        [_Row(kernel.operator, (kernel.numbers, kernel.rest), (0,)) for kernel in trace.kernels],
        [_Row((each.kind, each.updates, each.calls), each[1:3], each[1:3]) for each in trace.work],
    )


def _growth_of(few: _Rows, base: _Rows, more: _Rows) -> _Growth:
    """Match the rows of one kind with `DEPTHS` layers."""
    pieces, first, second = list[_Piece](), list[int](), list[int]()
    at = taken = there = 0
    for place, length in (*_insertions(few, base, more), (len(few), 0)):
        start = at + place - taken
        pieces += [piece for piece in ((at, start, False), (start, start + length, True)) if piece[0] < piece[1]]
        more_of = there + start - at
        first += range(there, more_of + length)
        second += [*range(there, more_of), *range(more_of + length, more_of + 2 * length)]
        at, taken, there = start + length, place, more_of + 2 * length
    if there != len(more):
        raise CannotTraceError("a further layer does not add the same to each trace")
    numbers, later = (np.array([row.numbers for row in rows]) for rows in (base, more))
    of_all = {at for at, place in enumerate(first) if base[at].exact != more[place].exact}
    once, again = (later[np.array(places, dtype=int)] for places in (first, second))
    grown = _Growth([row.token for row in base], pieces, once - numbers, again - once, of_all)
    for rows, depth in ((few, DEPTHS[0]), (more, DEPTHS[2])):
        expected = [(grown.tokens[at], row) for at, row in grown.at(base, depth)]
        if expected != [(row.token, [*row.numbers]) for row in rows]:
            raise CannotTraceError("a further layer does not add the same to each trace")
    return grown


def _insertions(few: _Rows, base: _Rows, more: _Rows) -> list[tuple[int, int]]:
    """Return the places at which rows are inserted into the first to make the second, and the third, and how many.

    Raises:
        CannotTraceError: the rows differ in another way.
    """
    found, left, at, there = list[tuple[int, int]](), len(base) - len(few), 0, 0
    while there < len(base):
        start = 2 * there - at
        is_steady = at < len(few) and start < len(more) and _is_steady(few[at], base[there], more[start])
        if is_steady and few[at][:2] == base[there][:2]:
            at, there = at + 1, there + 1
            continue
        lengths = [n for n in range(0 if is_steady else 1, left + 1) if _is_twice(base, there, n, more, start)]
        same = {n: _same(few, at, base, there + n) if at < len(few) else (left == n, 0) for n in lengths}
        length = max(same, key=same.__getitem__, default=0)
        if same.get(length, (0, 0)) == (0, 0):
            raise CannotTraceError("a further layer does more than to add to the trace")
        if length:
            found.append((at, length))
            there, left = there + length, left - length
        else:  # of all layers together
            at, there = at + 1, there + 1
    return found


def _is_steady(few: _Row, base: _Row, more: _Row) -> bool:
    """Whether the numbers of a row go on as they began."""
    return all(2 * b == a + c for a, b, c in zip(few.numbers, base.numbers, more.numbers, strict=True))


def _is_twice(base: _Rows, at: int, length: int, more: _Rows, start: int) -> bool:
    """Whether so many rows from here on are, two times, also those of the others from their start on."""
    if start + 2 * length > len(more):
        return False
    again = (more[start + length + n][:2] == base[at + n][:2] for n in range(length))  # first, as it differs sooner
    return all(again) and all(more[start + n][:2] == base[at + n][:2] for n in range(length))


def _same(few: _Rows, at: int, more: _Rows, there: int) -> tuple[int, int]:
    """How many rows are exactly the same from here and from there on, and how many but for what all layers share."""
    pairs = zip(few[at : at + _MOST_COMPARED], more[there : there + _MOST_COMPARED], strict=False)
    alike = [row.exact == other.exact for row, other in takewhile(lambda pair: pair[0].token == pair[1].token, pairs)]
    return sum(alike), len(alike)


def _check(events: Sequence[Event]) -> None:
    alive: dict[tuple[int, str], int] = {}
    for event in events:
        where = event.block, event.case
        if event.action == "alloc" and where not in alive:
            alive[where] = event.nbytes
        elif event.action == "alloc" or alive.pop(where, -1) != event.nbytes:
            raise CannotTraceError("the blocks of many layers do not follow from those of few")
