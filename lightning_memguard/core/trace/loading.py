"""How transformers loads weights that it quantizes -> a trace in which they come to be as they do there.

A weight is on the GPU in 16 bits first; its quantized form takes new blocks, and the first is freed. What is left of
the free blocks decides where the step's tensors go. Read from ``convert_and_load_state_dict_in_model``,
``caching_allocator_warmup`` and ``Bnb4bitQuantize`` of transformers 5.0 to 5.24, ``_quantize`` of bitsandbytes 0.50
and ``prepare_model_for_kbit_training`` of peft 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

from lightning_memguard.core.trace.trace import Event, Trace

_PER_SCALE = 64  # weights of 4 bits for each scale, `BitsAndBytesConfig`'s block size


class Weight(NamedTuple):
    """A parameter before the step, in the order of the module's parameters.

    Attributes:
        name: in the checkpoint; empty if it was made after loading, as adapters are.
        nbytes: as it is loaded.
        bits: what it is quantized to; 0 if it is not.
    """

    name: str
    nbytes: int
    bits: int = 0


def with_loading(trace: Trace, weights: Sequence[Weight], threads: int) -> Trace:
    """Return a trace that begins with the loading of its parameters, if any of them are quantized.

    Args:
        trace: of a step on a GPU, at whose start the parameters are there.
        weights: a description of each parameter.
        threads: how many move weights to the GPU ahead of the one that quantizes them; 0 if that one moves them too.
    """
    places = [place for place, event in enumerate(trace.events) if (event.part, event.phase) == ("parameters", "setup")]
    known = [trace.events[place] for place in places]
    of_each, odd = divmod(len(known) - len(weights), sum(weight.bits > 0 for weight in weights) or 1)
    if trace.device != "cuda" or of_each < 1 or odd:
        return trace
    groups = iter([known[at : at + of_each] for at in range(len(weights), len(known), of_each)])
    finished = [[*next(groups), event] if w.bits else [event] for w, event in zip(weights, known, strict=False)]
    first = 1 + max(event.block for event in trace.events)
    loading = list(_loading(weights, finished, _order(weights, threads), first))
    taken, more = set(places), len(loading) - len(known)
    rest = [event for place, event in enumerate(trace.events) if place > places[0] and place not in taken]
    return replace(
        trace,
        events=(*trace.events[: places[0]], *loading, *rest),
        scratch_spans=tuple(s._replace(start=s.start + more, end=s.end + more) for s in trace.scratch_spans),
        held_at=trace.held_at + more if trace.held_at > places[-1] else trace.held_at,
    )


def _loading(
    weights: Sequence[Weight], finished: Sequence[list[Event]], order: Iterator[tuple[bool, int]], first: int
) -> Iterator[Event]:
    """Return the events of loading; numbers of blocks from ``first`` on are free."""

    def block(number: int, nbytes: int) -> tuple[Event, Event]:
        event = Event("alloc", first + number, nbytes, "temporaries", "setup")
        return event, event._replace(action="free")

    loaded = [(weight, final) for weight, (*_, final) in zip(weights, finished, strict=True) if weight.name]
    yield from block(0, sum(final.nbytes if weight.bits else weight.nbytes for weight, final in loaded))
    for is_moved, place in order:
        weight, (*states, final) = weights[place], finished[place]
        take, give_back = block(1 + place, weight.nbytes)
        as_it_is = not weight.bits and final.nbytes == weight.nbytes
        if is_moved:
            yield final if as_it_is else take
        elif weight.bits:
            # 8 bits: in 16 bits again, as it was moved to the host and back. Scales of scales: made from scales.
            again = 2 * final.nbytes if weight.bits == 8 else 8 * final.nbytes // _PER_SCALE if len(states) > 2 else 0
            begin, end = block(1 + len(weights), again)
            yield from (begin, final, *states, end, give_back)
    for place, (weight, (*_, final)) in enumerate(zip(weights, finished, strict=True)):
        if weight.name and not weight.bits and final.nbytes != weight.nbytes:  # cast to 32 bits
            yield from (final, block(1 + place, weight.nbytes)[1])
    yield from (final for weight, (*_, final) in zip(weights, finished, strict=True) if not weight.name)


def _order(weights: Sequence[Weight], threads: int) -> Iterator[tuple[bool, int]]:
    """When weights are moved (True), and when they are used: the place of each.

    A thread takes as long as the weight has bytes, and the others quantize in no time. How fast they really are
    changes from run to run, and what is reserved with it.
    """
    order = sorted((place for place, each in enumerate(weights) if each.name), key=lambda at: _key(weights[at].name))
    ready, free, moments = 0, [0] * threads, list[tuple[int, int, int]]()
    for number, place in enumerate(order):
        begun = heappop(free) if threads else ready
        heappush(free, begun + weights[place].nbytes)
        ready = max(ready, begun + weights[place].nbytes)
        moments += [(begun, 0, number), (ready, 1, number)]
    for _, is_used, number in sorted(moments) if threads else moments:
        yield not is_used, order[number]


def _key(name: str) -> list[tuple[int, int, str]]:
    """`dot_natural_key`: numbers before words, by their size."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"\.", name)]
