"""Real batches of the samples that were drawn, at any size, as the user's own collate function makes them."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from lightning_memguard.core.batch.batches import EPOCHS, Draws, Epoch
from lightning_memguard.core.batch.nesting import batch_bytes, is_dense, map_tensors, tensors_in
from lightning_memguard.core.isolation.pool import in_child
from lightning_memguard.core.simulation.fake import storage_address
from lightning_memguard.training.facts.lightning_port import arrange

if TYPE_CHECKING:
    from pytorch_lightning.utilities import CombinedLoader

_LARGEST_IN = 3  # so many draws hold the largest samples, as some batch of the training does; others hold any

_MOST_CHOSEN = 1 << 16  # samples of an epoch that is simulated


@dataclass(frozen=True)
class CollatedDraws(Draws):
    """Batches collated of samples.

    Attributes:
        collate: the loader's own function.
        samples: what it is given.
        largest: those of them that are the longest in some dimension.
        unit: batch sizes are multiples of this, with ``factor`` samples for each.
        factor: see ``unit``.
        multiple: batch sizes that the collate function takes are multiples of this.
        in_order: whether the sampler decides which samples come together.
        is_whole: whether these are all samples, in the order in which each epoch has them.
        stay: whether the dataset gives the same tensors each time; others go with their batch.
    """

    collate: Callable[[list[Any]], Any]
    samples: Sequence[Any]
    largest: Sequence[Any]
    unit: int
    factor: int
    multiple: int
    in_order: bool
    is_whole: bool = False
    stay: bool = False

    @override
    def has(self, batch_size: int) -> bool:
        return batch_size % self.unit == 0

    @override
    def batch(self, batch_size: int, draw: int) -> Any:
        return self._collated(self._chosen(self._count(batch_size), draw))

    @override
    def measures(self, batch_size: int, draw: int) -> tuple[int, int]:
        pool, sizes = self._pool
        known = {id(each): size for each, size in zip(pool, sizes.tolist(), strict=True)}
        count, largest = self._count(batch_size), int(sizes.max())
        chosen = [known[id(each)] for each in self._chosen(count, draw)] if draw else [largest] * count
        return sum(chosen), count * max(chosen) ** 2

    @override
    def largest_of_epoch(self, batch_size: int, epoch: Epoch) -> Any:
        (pool, sizes), count, (of_bytes, of_squares) = self._pool, self._count(batch_size), epoch.weights
        steps = min(epoch.steps or max(1, len(pool) // count), max(1, _MOST_CHOSEN // count))
        found = list[tuple[float, list[int]]]()
        for number in range(EPOCHS):
            order = self._order(number, steps * count).reshape(steps, count)
            batches = sizes[order]
            grown = of_bytes * batches.sum(1) + of_squares * count * batches.max(1) ** 2
            found.append((float(grown.max()), order[grown.argmax()].tolist()))
        _, chosen = sorted(found)[epoch.place]
        return self._collated([pool[place] for place in chosen])

    def _order(self, number: int, length: int) -> np.ndarray:
        """Places in the pool as an epoch begins; samples in order begin anywhere, unless all are known."""
        if self.in_order:
            start = 0 if self.is_whole else number * len(self.samples) // EPOCHS
            return np.arange(start, start + length) % len(self.samples)
        shuffled, count = np.random.default_rng(number).permutation, len(self._pool[0])
        return np.concatenate([shuffled(count) for _ in range(-(-length // count))])[:length]

    @functools.cached_property
    def _pool(self) -> tuple[list[Any], np.ndarray]:
        """All samples that are known, and their bytes."""
        known = set(map(id, self.samples))
        pool = [*self.samples, *(each for each in self.largest if id(each) not in known)]
        return pool, np.array([batch_bytes(each) for each in pool])

    def _count(self, batch_size: int) -> int:
        return batch_size // self.unit * self.factor

    def _chosen(self, count: int, draw: int) -> list[Any]:
        largest = set(map(id, self.largest)) if self.in_order else set[int]()
        places = [place for place, each in enumerate(self.samples) if id(each) in largest]  # as far as they were kept
        chosen = self._in_order(count, draw, places) if self.in_order else self._by_chance(count, draw)
        if draw < _LARGEST_IN and not places:
            known = set(map(id, chosen))
            missing = [each for each in self.largest[: max(1, count // 2)] if id(each) not in known]
            chosen = [*missing, *chosen[len(missing) :]]
        return chosen

    def _collated(self, chosen: list[Any]) -> Any:
        batch = self.collate(chosen)
        return batch if self.stay and in_child() else _apart_from(chosen, batch)  # a step may write to it

    @override
    def held(self, batch: object) -> list[torch.Tensor]:
        own = _storages_of(self.samples) if self.stay else set()
        return [tensor for tensor in tensors_in(batch) if _is_in(own, tensor)]

    def _in_order(self, count: int, number: int, places: Sequence[int]) -> list[Any]:
        """A batch with the first of the largest samples, one with the second, ...; then one by its own number."""
        start = (places[number] // count if number < len(places) else number) * count % len(self.samples)
        return [*itertools.islice(itertools.cycle(self.samples), start, start + count)]

    def _by_chance(self, count: int, number: int) -> list[Any]:
        generator, chosen = random.Random(number), list[Any]()  # noqa: S311 - nothing is kept secret
        while len(chosen) < count:
            chosen += generator.sample(self.samples, min(count - len(chosen), len(self.samples)))
        return chosen


@dataclass(frozen=True)
class TakenDraws(Draws):
    """Batches as a loader gave them, by their size; the largest comes first."""

    batches: dict[int, list[Any]] = field(default_factory=dict)
    multiple: int = 1

    @override
    def has(self, batch_size: int) -> bool:
        return batch_size in self.batches

    @override
    def batch(self, batch_size: int, draw: int) -> Any:
        known = self.batches[batch_size]
        return map_tensors(known[draw % len(known)], lambda tensor: tensor.clone())

    @override
    def several(self, batch_size: int, count: int) -> Iterator[Any]:
        known = [*itertools.chain.from_iterable(self.batches.values())]
        return iter(random.Random(0).sample(known, min(count, len(known))))  # noqa: S311 - the same each time


@dataclass(frozen=True)
class ArrangedDraws(Draws):
    """Batches of several loaders together, as Lightning combines them."""

    combined: CombinedLoader | None
    each: Sequence[Draws]
    multiple: int

    @property
    def stay(self) -> bool:  # type: ignore[override]
        """Whether one of them may hold the dataset's own tensors."""
        return any(draws.stay for draws in self.each)

    @override
    def has(self, batch_size: int) -> bool:
        return all(draws.has(batch_size) for draws in self.each)

    @override
    def batch(self, batch_size: int, draw: int) -> Any:
        return arrange(self.combined, [draws.batch(batch_size, draw) for draws in self.each])

    @override
    def several(self, batch_size: int, count: int) -> Iterator[Any]:
        drawn = (draws.several(batch_size, count) for draws in self.each)
        return (arrange(self.combined, [*together]) for together in zip(*drawn, strict=False))

    @override
    def measures(self, batch_size: int, draw: int) -> tuple[int, int]:
        nbytes, squares = zip(*(draws.measures(batch_size, draw) for draws in self.each), strict=True)
        return sum(nbytes), sum(squares)

    @override
    def largest_of_epoch(self, batch_size: int, epoch: Epoch) -> Any:
        return arrange(self.combined, [draws.largest_of_epoch(batch_size, epoch) for draws in self.each])

    @override
    def held(self, batch: object) -> list[torch.Tensor]:
        return [tensor for draws in self.each for tensor in draws.held(batch)]


def _apart_from(samples: Sequence[Any], batch: object) -> Any:
    """The batch with copies of the samples' own tensors, which are kept here: in a training they go with it."""
    kept = _storages_of(samples)
    if not any(_is_in(kept, tensor) for tensor in tensors_in(batch)):
        return batch
    return map_tensors(batch, lambda tensor: tensor.clone() if _is_in(kept, tensor) else tensor)


def share_memory(first: object, second: object) -> bool:
    """Whether a tensor in one is in the same memory as one in the other."""
    return bool(_storages_of([first]) & _storages_of([second]))


def _storages_of(samples: Sequence[Any]) -> set[int]:
    return {storage_address(tensor) for tensor in tensors_in(list(samples)) if is_dense(tensor)}


def _is_in(storages: set[int], tensor: torch.Tensor) -> bool:
    return is_dense(tensor) and storage_address(tensor) in storages
