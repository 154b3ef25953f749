"""The blocks to compute again in the backward pass so that a step just fits: the most bytes for the least computation.

A guess from the table by layer, of which several degrees are then captured; see `advise`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_memguard.core.capture.capture import isolated
from lightning_memguard.core.capture.program import LoopProgram, Program, without_memory
from lightning_memguard.core.layers.layers import LayerTable, layer_table
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.adapter.program import LightningProgram

_DEGREES = (0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)  # times the bytes that are missing: what a block saves is a guess
_GRAIN = 1024  # parts of what is missing that the search counts in


class BlockCost(NamedTuple):
    """A block by its path: bytes that it keeps besides its input, and FLOPs of its forward pass."""

    path: str
    nbytes: int
    flops: int


def table_for(program: Program, batch_size: int) -> LayerTable:
    """The table by layer of a program.

    Raises:
        CannotTraceError: it cannot be made.
    """
    if isinstance(program, LightningProgram):
        return isolated(lambda: program.layer_table(batch_size))
    if not isinstance(program, LoopProgram):
        raise CannotTraceError(f"{type(program).__name__} has no table by layer")
    batch = without_memory(program.families[0], batch_size)
    gpu, step = program.gpu, program.step
    return isolated(lambda: layer_table(program.model, batch, batch_size=batch_size, step=step, gpu=gpu))


def costs_of(table: LayerTable, paths: Sequence[str]) -> list[BlockCost]:
    """Return the bytes and FLOPs of each block; a checkpoint keeps its input, taken to be as large as its output."""
    found = []
    for path in paths:
        rows = [each for each in table.layers if each.name == path or each.name.startswith(f"{path}.")]
        kept, flops = (sum(getattr(row, of) for row in rows) for of in ("activation_bytes", "flops"))
        found.append(BlockCost(path, max(0, kept - sum(row.output_bytes for row in rows[:1])), flops))
    return found


def degrees(costs: Sequence[BlockCost], missing_bytes: int) -> Iterator[tuple[BlockCost, ...]]:
    """Sets of blocks that save about what is missing, from too few to more than enough; never all blocks."""
    chosen = (cheapest(costs, int(times * missing_bytes)) for times in _DEGREES)
    yield from (each for each in dict.fromkeys(chosen) if 0 < len(each) < len(costs))


def cheapest(costs: Sequence[BlockCost], nbytes: int) -> tuple[BlockCost, ...]:
    """The blocks that save so many bytes for the fewest FLOPs, the first ones among equals; empty if all save less.

    Blocks that run first are best: when these are computed again, the others have given back what they keep.

    >>> cheapest([BlockCost("a", 10, 9), BlockCost("b", 10, 2), BlockCost("c", 5, 1), BlockCost("d", 5, 1)], 15)
    (BlockCost(path='b', nbytes=10, flops=2), BlockCost(path='c', nbytes=5, flops=1))
    """
    best: dict[int, tuple[int, tuple[BlockCost, ...]]] = {0: (0, ())}
    for cost in costs:
        for saved, (flops, chosen) in [*best.items()]:
            more = min(_GRAIN, saved + math.ceil(cost.nbytes * _GRAIN / max(1, nbytes)))
            if flops + cost.flops < best.get(more, (math.inf,))[0]:
                best[more] = flops + cost.flops, (*chosen, cost)
    return best.get(_GRAIN, (0, ()))[1]
