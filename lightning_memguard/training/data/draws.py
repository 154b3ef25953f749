"""Real batches of the samples that were drawn, at any size, as the user's own collate function makes them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_memguard.core.batch.batches import Draws
from lightning_memguard.core.batch.nesting import is_dense, map_tensors, tensors_in
from lightning_memguard.core.isolation.pool import in_child
from lightning_memguard.core.simulation.fake import storage_address
from lightning_memguard.training.adapter.loader_access import arrange

if TYPE_CHECKING:
    from pytorch_lightning.utilities import CombinedLoader

_LARGEST_IN = 3  # so many draws hold the largest samples, as some batch of the training does; others hold any


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
        stay: whether the dataset gives the same tensors each time; others go with their batch.
    """

    collate: Callable[[list[Any]], Any]
    samples: Sequence[Any]
    largest: Sequence[Any]
    unit: int
    factor: int
    multiple: int
    in_order: bool
    stay: bool = False

    @override
    def has(self, batch_size: int) -> bool:
        return batch_size % self.unit == 0

    @override
    def batch(self, batch_size: int, draw: int) -> Any:
        count = batch_size // self.unit * self.factor
        largest = set(map(id, self.largest)) if self.in_order else set[int]()
        places = [place for place, each in enumerate(self.samples) if id(each) in largest]  # as far as they were kept
        chosen = self._in_order(count, draw, places) if self.in_order else self._by_chance(count, draw)
        if draw < _LARGEST_IN and not places:
            known = set(map(id, chosen))
            missing = [each for each in self.largest[: max(1, count // 2)] if id(each) not in known]
            chosen = [*missing, *chosen[len(missing) :]]
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


@dataclass(frozen=True)
class ArrangedDraws(Draws):
    """Batches of several loaders together, as Lightning combines them."""

    combined: CombinedLoader
    each: Sequence[Draws]
    multiple: int

    @override
    def has(self, batch_size: int) -> bool:
        return all(draws.has(batch_size) for draws in self.each)

    @override
    def batch(self, batch_size: int, draw: int) -> Any:
        return arrange(self.combined, [draws.batch(batch_size, draw) for draws in self.each])

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
