"""Which of some batches may take the most memory: sizes of a batch that a step's memory grows with.

Samplers often make batches of equal bytes, some of many short samples and some of a few long ones. Attention over the
long ones takes more, a contrastive loss over the many. Which it is, their captures show.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from operator import le

from lightning_memguard.core.trace.trace import Shapes

_Product = tuple[int, ...]  # places among the dimensions of all tensors of a batch
BYTES: _Product = ()
_MOST_LARGE = 8
_MOST_DIMENSIONS = 12  # of which those of one tensor are multiplied with the others'


class Extremes:
    """The largest of each size in the batches seen: bytes, dimensions, and products of dimensions."""

    def __init__(self) -> None:
        self._most: dict[_Product, float] = {}
        self._large: list[tuple[tuple[int, ...], list[int], int]] = []

    def add(self, shapes: Shapes, nbytes: int, *, ahead: float = 1.0) -> list[_Product]:
        """Add a batch and return the sizes in which it is the largest, which others must now exceed ``ahead`` times."""
        ranks, lengths = tuple(map(len, shapes)), [*itertools.chain.from_iterable(shapes)]
        for others, largest, most in self._large:  # most batches are within one of these
            if others == ranks and nbytes <= most and all(map(le, lengths, largest)):
                return []
        sizes = {places: math.prod([lengths[at] for at in places]) for places in _products(ranks)}
        sizes[BYTES] = nbytes
        larger = {places: size * ahead for places, size in sizes.items() if size > self._most.get(places, -1)}
        self._most.update(larger)
        if larger:
            self._large = [(ranks, lengths, nbytes), *self._large[:_MOST_LARGE]]
        return [*larger]


@lru_cache
def _products(ranks: tuple[int, ...]) -> tuple[_Product, ...]:
    """Dimensions, elements of each tensor, and these times a dimension or all but the first again, as attention has."""
    ends = [0, *itertools.accumulate(ranks)]
    tensors = [tuple(range(*each)) for each in itertools.pairwise(ends) if each[0] < each[1]]
    few = ends[-1] <= _MOST_DIMENSIONS
    squares = ((*own, *own[1:]) for own in tensors)
    with_others = ((*own, place) for own in tensors for place in (range(ends[-1]) if few else own))
    return tuple(dict.fromkeys([*squares, *with_others, *tensors, *((place,) for place in range(ends[-1]))]))
