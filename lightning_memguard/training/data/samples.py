"""The largest of the samples that a run's loaders will give, drawn without taking one from the training.

Not the first batch but the largest one decides whether a training runs out of memory. How many samples are drawn is
bounded (`MOST_SAMPLES`, `MOST_SECONDS`, `SLOW_SECONDS`), and the prediction says how many that were.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeVar

import torch
import torch.utils.data as torch_data
from torch.utils.data import DataLoader, IterableDataset

from lightning_memguard.core.batch.batches import Batches, batches_from_one
from lightning_memguard.core.batch.nesting import (
    batch_bytes,
    batch_size_of,
    growth_sizes,
    map_tensors,
    object_bytes,
    shapes_of,
    tensors_in,
)
from lightning_memguard.core.isolation.pool import beat, reaches_out
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Shapes
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.training.data import copies
from lightning_memguard.training.data.copies import copy_for_reading, preserve_state
from lightning_memguard.training.data.draws import ArrangedDraws, CollatedDraws, TakenDraws, share_memory
from lightning_memguard.training.data.loaders import LoaderInfo, Source
from lightning_memguard.training.data.resizing import is_built_in, makes_own_batches, trial_at
from lightning_memguard.training.facts.lightning_port import arrange
from lightning_memguard.training.facts.ranks import attempt

T = TypeVar("T")

MOST_SAMPLES = 4096  # spread evenly over what the sampler gives, from end to end
MOST_SECONDS = 1.0  # after which it is enough, once LEAST_SAMPLES were drawn
LEAST_SAMPLES = 16
SLOW_SECONDS = 5.0  # after which fewer, two at least, have to be enough
_MOST_INDICES = 1 << 20  # how much of a sampler's order is read to spread them over
_AT_ONCE = 64  # what a dataset that fetches many samples at once is asked for
_BEYOND = "a larger one may take more, and a warning names a batch that is predicted to exceed it"
_COUNTS = (1, 2, 4, 8)  # of a sample, to collate it alone: some collate functions want pairs
_SIZES = ((4, 5, 1), (4, 6, 2), (4, 8, 4), (8, 16, 8), (2, 4, 2))  # two to collate at, and the multiple they stand for
_MOST_KINDS = 6  # batches whose sizes a sampler sets that are captured
_MOST_TOGETHER = 9  # of several loaders
_MOST_MIXED = 16  # samples stacked together, each the longest in some dimension
_KEPT_BYTES = 64 << 20  # of samples that are kept, to make real batches of
_KEPT_SAMPLES = 1024  # Python keeps the pages of such objects once they are gone: 1.1 MiB of 4,096 pairs of tensors
_KEPT_IN_ORDER = 256  # of those that a sampler of the user's own puts next to each other


@dataclass(frozen=True)
class RunSamples:
    """Samples drawn from the data of a run.

    Attributes:
        batches: batches of any size; one kind for each loader whose batches come in turn.
        batch_size: the loaders' own, or that of the first batch if it is unknown.
        notes: how many samples were drawn, if larger ones may follow.
        unit: batch sizes must be multiples of this for the loaders and their collate functions.
        ends: how many samples each loader's data without a length has, if its end was reached.
        fresh: whether each sample is made when it is asked for, so that a batch is there twice while it is collated.
        object_bytes: of the objects that a sample is made of, without its data.
        differ: whether batches of as many samples differ in size, as those of texts do in length.
    """

    batches: tuple[Batches, ...]
    batch_size: int
    notes: tuple[str, ...]
    unit: int = 1
    ends: tuple[int | None, ...] = ()
    fresh: bool = False
    object_bytes: int = 0
    differ: bool = False


@dataclass(frozen=True)
class LoaderSamples:
    """Samples drawn from one loader; ``samples`` is their number, if the end of the data was reached."""

    batches: Batches
    note: str = ""
    unit: int = 1
    samples: int | None = None
    fresh: bool = False
    object_bytes: int = 0
    differ: bool = False


def note_on_cache(settings: AllocatorSettings) -> tuple[str, ...]:
    """Say what is not predicted of batches that differ in length, if a cache is kept that may grow over them."""
    return () if settings.kind != "cuda" or settings.expandable_segments else (_MAY_GROW,)


_MAY_GROW = (
    "the batches differ in size, and one that repeats is predicted: over an epoch, what the GPU caches may grow beyond "
    "it; `memguard plan TARGET --length 128 512`, or `estimate(model, batch, lengths=[128, 512])`, says by how much"
)


def sample(info: LoaderInfo) -> RunSamples:
    """Draw from each loader, without consuming it, and combine what Lightning combines.

    Raises:
        CannotTraceError: no sample could be drawn without consuming the data, or a batch holds no tensor.
    """
    try:
        drawn = [_draw_from(info, source) for source in info.sources]
    except MemGuardError as error:
        raise CannotTraceError(f"{info.origin}: {error}") from error
    except Exception as error:
        raise CannotTraceError(f"no sample could be drawn ({type(error).__name__}: {error})") from error
    notes = tuple(dict.fromkeys(each.note for each in drawn if each.note))
    ends = tuple(each.samples for each in drawn)
    unit = math.lcm(info.unit, *(each.unit for each in drawn))
    batches = _combine(info, [each.batches for each in drawn])
    fresh = any(each.fresh for each in drawn)
    objects = sum(each.object_bytes for each in drawn)
    differ = any(each.differ for each in drawn)
    return RunSamples(batches, info.batch_size or batches[0].small_size, notes, unit, ends, fresh, objects, differ)


def _draw_from(info: LoaderInfo, source: Source) -> LoaderSamples:
    if info.fixed_because:
        return draw(source.loader, fixed=True)
    if isinstance(source.loader, DataLoader):
        return draw(source.loader, unit=info.unit, factor=info.factor(source))
    with preserve_state(source.loader):
        return draw(trial_at(source.loader, max(source.batch_size, 4)), fixed=True)


def _combine(info: LoaderInfo, drawn: Sequence[Batches]) -> tuple[Batches, ...]:
    known = _arranged(info, drawn)
    if not info.fixed_because or len(known) > 1 or not any(each.kinds for each in drawn):
        return tuple(replace(each, kinds=()) for each in known)
    few = int(_MOST_TOGETHER ** (1 / len(drawn)))
    together = itertools.product(*(each.kinds[:few] or (each,) for each in drawn))
    return (replace(known[0], kinds=tuple(_arranged(info, each)[0] for each in together)),)


def _arranged(info: LoaderInfo, drawn: Sequence[Batches]) -> tuple[Batches, ...]:
    size = info.batch_size or drawn[0].small_size
    if len(drawn) > 1 and info.fixed_because:  # each at its own size, whatever is asked
        drawn = [Batches(each.small, each.small, size, size + 1) for each in drawn]
    if info.mode == "sequential":
        return tuple(drawn)
    most = max(drawn, key=lambda each: each.small_size)
    small, large = (
        arrange(info.combined, [_batch_at(each, size) for each in drawn]) for size in (most.small_size, most.large_size)
    )
    draws = [each.draws for each in drawn if each.draws]
    multiple = math.lcm(*(each.multiple for each in draws))
    together = ArrangedDraws(info.combined, draws, multiple) if len(draws) == len(drawn) else None
    return (Batches(small, large, most.small_size, most.large_size, together),)


def _batch_at(batches: Batches, size: int) -> Any:
    """A batch of a size, the one that was drawn if it is of this size."""
    known = {batches.large_size: batches.large, batches.small_size: batches.small}
    return known[size] if size in known else batches.real(size, torch.device("cpu"))


def draw(loader: Iterable[Any], *, fixed: bool = False, unit: int = 1, factor: int = 1) -> LoaderSamples:
    """Draw samples from a loader, without consuming it, and collate the largest at two sizes, which shows what grows.

    If its size is ``fixed``, its batches are taken as they come. Otherwise batches are made for multiples of
    ``unit``, with ``factor`` samples for each unit.

    Raises:
        CannotTraceError: no sample could be drawn without consuming the data, or a batch holds no tensor.
    """
    copies.refuse_one_shot(loader)
    with preserve_state(loader):
        if fixed or not isinstance(loader, DataLoader):
            return _largest_batch(loader)
        return _largest_samples(loader, unit, factor)


def _largest_batch(loader: Iterable[Any]) -> LoaderSamples:
    """Sample a loader whose batches are taken as they come."""
    seen, samples, all_seen = 0, 0, True
    most = dict[int, tuple[float, Any, int]]()  # by place among `growth_sizes`: the size, the batch, its samples
    taken, taken_bytes = dict[int, list[Any]](), 0
    started, seen_shapes = time.monotonic(), set[tuple[int, Shapes]]()
    for batch, count in _batches(loader):
        many = samples >= MOST_SAMPLES and seen >= LEAST_SAMPLES
        if seen > 1 and (many or time.monotonic() - started > MOST_SECONDS):
            all_seen = False
            break
        nbytes, size = batch_bytes(batch), count or batch_size_of(batch)
        taken_bytes += nbytes
        seen_shapes.add((size, shapes_of(batch)))
        if taken_bytes <= _KEPT_BYTES:
            taken.setdefault(size, []).append(batch)
        numbers = enumerate(growth_sizes(shapes_of(batch), nbytes))
        larger = {place: number for place, number in numbers if place not in most or number > most[place][0]}
        if larger and 0 not in larger and taken_bytes > _KEPT_BYTES:
            batch = map_tensors(batch, lambda tensor: tensor.to("meta"))  # noqa: PLW2901
        most |= {place: (number, batch, size) for place, number in larger.items()}
        seen, samples = seen + 1, samples + size
    if not seen:
        raise CannotTraceError("the data is empty: there is no batch to predict from")
    different = {id(batch): _taken(batch, size, taken) for _, batch, size in most.values()}
    kinds = tuple(different.values())[:_MOST_KINDS]
    note = f"predicted for the largest of {seen} batches drawn{'' if all_seen else f'; {_BEYOND}'}"
    note = note if kinds[1:] or not all_seen else ""
    ended = samples if all_seen else None
    return LoaderSamples(replace(kinds[0], kinds=kinds), note, samples=ended, differ=_differ(seen_shapes))


def _differ(shapes: set[tuple[int, Shapes]]) -> bool:
    """Whether batches of these samples and shapes differ in more than their samples."""
    of_samples = {tuple(shape[1:] for shape in each) for _, each in shapes}
    return len(of_samples) > 1 or len(shapes) > len({size for size, _ in shapes})


def _taken(batch: object, size: int, others: dict[int, list[Any]]) -> Batches:
    """A batch as it was taken; those of its size are other draws of it."""
    draws = TakenDraws({**others, size: [batch, *others.get(size, [])]})
    has_values = not any(tensor.is_meta for tensor in tensors_in(batch))
    return replace(batches_from_one(batch, size), draws=draws if has_values else None)


def _batches(loader: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """Batches as they come, each with the number of samples in it; 0 if unknown."""
    if not isinstance(loader, DataLoader):
        _refuse_from_elsewhere(loader)
        yield from _alive((batch, 0) for batch in copy_for_reading(loader))
        return
    collate = copy_for_reading(loader.collate_fn)
    if loader.batch_sampler is None:  # the dataset makes the batches: what it gives at one index is one
        yield from ((collate(batch), 0) for batch in _read(loader, _indices(loader)))
    elif isinstance(loader.dataset, IterableDataset):
        stream = _read(loader, _indices(loader))
        while items := list(itertools.islice(stream, loader.batch_size or 1)):
            yield collate(items), len(items)
    else:
        planned = _within_time(map(list, copy_for_reading(loader.batch_sampler)))
        by_count = sorted(range(len(planned)), key=lambda place: len(planned[place]))  # the fewest may be the longest
        for place in dict.fromkeys([*by_count[-1:], *by_count[:1], *_spread(len(planned))]):
            yield collate(list(_read(loader, planned[place]))), len(planned[place])


def _largest_samples(loader: DataLoader[Any], unit: int, factor: int) -> LoaderSamples:
    """Sample a loader whose batches can be made at any size."""
    indices = _indices(loader)
    largest = _LargestSamples(copy_for_reading(loader.collate_fn))
    stopped, started = False, time.monotonic()
    for index, item in zip(indices, _read(loader, indices), strict=False):
        largest.add(item, index)
        seconds = time.monotonic() - started
        if stopped := largest.seen > 1 and seconds > (MOST_SECONDS if largest.seen >= LEAST_SAMPLES else SLOW_SECONDS):
            break
    if not largest.seen:
        raise largest.failure or CannotTraceError("the dataset is empty: there is no sample to predict from")
    stream = isinstance(loader.dataset, IterableDataset)
    all_seen = not stopped and (largest.seen < len(indices) if stream else _are_all(indices, loader))
    drawn = f"{'the first ' if stream else ''}{largest.seen} samples"
    note = "" if all_seen or not largest.vary else f"predicted for the largest of {drawn}; {_BEYOND}"
    batches, multiple = largest.batches(unit, factor)
    in_order = stream or _decides_what_comes_together(loader)
    sequential = not makes_own_batches(loader) and is_built_in(_sampler_of(loader), torch_data.SequentialSampler)
    if in_order and not stream and not sequential:
        next_to_each_other = list(_order(loader)[: min(len(largest.kept(sort=False)), _KEPT_IN_ORDER)])
        kept = _within_time(_read(loader, next_to_each_other))
    else:
        kept = largest.kept(sort=not stream and in_order)
    index, first = largest.first
    kept_by_dataset = not stream and bool(attempt(lambda: share_memory(first, *_read(loader, [index]))).value)
    stay = kept_by_dataset and bool(attempt(lambda: share_memory(largest.collate([first]), first)).value)
    whole, multiple = sequential and all_seen and len(kept) == largest.seen, unit * multiple
    draws = CollatedDraws(largest.collate, kept, largest.largest, unit, factor, multiple, in_order, whole, stay)
    samples = largest.seen if all_seen else None
    objects = object_bytes(first) * factor // unit
    fresh = not kept_by_dataset
    return LoaderSamples(replace(batches, draws=draws), note, multiple, samples, fresh, objects, largest.vary)


class _LargestSamples:
    """Keeps the largest of the samples added, and those that are longest in one of their dimensions."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate
        self.seen = 0
        self.vary = False
        self.failure: Exception | None = None
        self._kept: list[tuple[Any, object]] = []  # with their indices
        self._kept_bytes = 0
        self._most_bytes = -1
        self._largest: object = None
        self._longest: dict[int, tuple[int, object]] = {}
        self._counts: tuple[int, ...] = _COUNTS

    def add(self, item: object, index: object) -> None:
        """Compare one sample with the others; one that cannot be collated cannot be in a batch."""
        try:
            batch = self._collate_alone(item)
        except Exception as error:  # noqa: BLE001 - a collate function may raise anything
            self.failure = self.failure or error
            return
        self.seen += 1
        nbytes = batch_bytes(batch)
        self._kept_bytes += nbytes // self._counts[0]
        if not self._kept or (self._kept_bytes <= _KEPT_BYTES and len(self._kept) < _KEPT_SAMPLES):
            self._kept.append((index, item))
        self.vary |= self.seen > 1 and nbytes != self._most_bytes
        if nbytes > self._most_bytes:
            self._most_bytes, self._largest = nbytes, item
        for place, length in enumerate(itertools.chain.from_iterable(shapes_of(batch))):
            if length > self._longest.get(place, (-1, None))[0]:
                self._longest[place] = (length, item)

    @property
    def first(self) -> tuple[Any, object]:
        """The first of those kept, after its index."""
        return self._kept[0]

    def kept(self, *, sort: bool) -> list[object]:
        """The samples to make other batches of, as they came or sorted by their indices."""
        return [item for _, item in (sorted(self._kept, key=itemgetter(0)) if sort else self._kept)]

    def _collate_alone(self, item: object) -> Any:
        for count in self._counts:
            try:
                batch = self.collate([item] * count)
            except Exception as error:  # noqa: BLE001 - as above
                failure = error
                continue
            self._counts = (count,)  # lengths are compared between batches of as many samples
            return batch
        raise failure

    @property
    def largest(self) -> list[object]:
        """The largest, and those that are the longest in some dimension; none if all are alike."""
        return list({id(item): item for item in (self._largest, *self._mixed)}.values()) if self.vary else []

    @property
    def _mixed(self) -> list[object]:
        return list({id(item): item for _, item in self._longest.values()}.values())[:_MOST_MIXED]

    def batches(self, unit: int, factor: int) -> tuple[Batches, int]:
        """Stack the largest sample; or several, if padding each to the longest of all takes more.

        Returns:
            The batches, and the multiple that the collate function takes.
        """
        stacked, multiple = self._stack([self._largest], unit, factor)
        batch_size_of(stacked.small)  # refuses a batch without tensors
        if len(self._mixed) > 1:
            with contextlib.suppress(Exception):  # samples of different kinds may not go into one batch
                together, their_multiple = self._stack(self._mixed, unit, factor)
                if _bytes_per_sample(together) > _bytes_per_sample(stacked):
                    return together, their_multiple
        return stacked, multiple

    def _stack(self, items: list[object], unit: int, factor: int) -> tuple[Batches, int]:
        times = -(-len(items) // (_SIZES[0][0] * factor))  # enough that each of the items is in it
        for small, large, multiple in _SIZES:
            sizes = small * times, small * times + (large - small)
            try:
                batches = [self.collate([*itertools.islice(itertools.cycle(items), size * factor)]) for size in sizes]
            except Exception as error:  # noqa: BLE001 - a collate function may raise anything at an odd size
                failure = error
                continue
            return Batches(batches[0], batches[1], sizes[0] * unit, sizes[1] * unit), multiple
        raise failure


def _bytes_per_sample(batches: Batches) -> float:
    return batch_bytes(batches.small) / batches.small_size


def _indices(loader: DataLoader[Any]) -> list[Any]:
    """Return indices for the loader's dataset, `MOST_SAMPLES` at most, spread over all of it; the ends first."""
    if isinstance(loader.dataset, IterableDataset):
        return [None] * MOST_SAMPLES
    order = _order(loader)
    return [order[place] for place in _spread(len(order))]


def _order(loader: DataLoader[Any]) -> Sequence[Any]:
    """The samples that an epoch may hold: of a sampler that draws again each time, all that it draws from."""
    if loader.batch_sampler is not None and makes_own_batches(loader):
        return _within_time(itertools.chain.from_iterable(copy_for_reading(loader.batch_sampler)))
    sampler = _sampler_of(loader)
    if is_built_in(sampler, torch_data.SequentialSampler, torch_data.RandomSampler):
        return range(len(sampler.data_source))
    if type(sampler) is torch_data.DistributedSampler:
        return range(len(sampler.dataset))  # type: ignore[arg-type]
    return _within_time(iter(copy_for_reading(sampler)))


def _decides_what_comes_together(loader: DataLoader[Any]) -> bool:
    """Whether the sampler does: in the data's order, or as one that puts a few samples of each class into a batch."""
    if makes_own_batches(loader):
        return True
    by_chance = (torch_data.RandomSampler, torch_data.SubsetRandomSampler, torch_data.WeightedRandomSampler)
    return not is_built_in(_sampler_of(loader), *by_chance, torch_data.DistributedSampler)


def _within_time(things: Iterator[T]) -> list[T]:
    """The first of them, as many as come before a limit of time and number."""
    taken, started = [], time.monotonic()
    for thing in itertools.islice(things, _MOST_INDICES):
        taken.append(thing)
        if time.monotonic() - started > MOST_SECONDS:
            break
    return taken


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler that a loader uses: if it was given a batch sampler, its own sampler is unused."""
    return loader.sampler if makes_own_batches(loader) else loader.batch_sampler.sampler  # type: ignore[union-attr]


def _spread(count: int) -> list[int]:
    """Places in a sequence, from end to end: the ends first, then ever finer, so that one may stop at any time.

    Each is drawn from its stretch: a fixed stride would meet the same few samples of a dataset that repeats itself.
    """
    kept = min(count, MOST_SAMPLES)
    if kept < 3:
        return list(range(kept))[::-1]
    starts, drawn = [place * (count - 1) // (kept - 1) for place in range(kept)], random.Random(0)  # noqa: S311 - no secret
    places = [0, *(drawn.randrange(*stretch) for stretch in itertools.pairwise(starts[1:])), count - 1]
    bits = (kept - 1).bit_length()
    inner = sorted(range(1, kept - 1), key=lambda place: int(f"{place:0{bits}b}"[::-1], 2))
    return [places[-1], places[0], *(places[place] for place in inner)]


def _are_all(indices: list[Any], loader: DataLoader[Any]) -> bool:
    """Whether no epoch can hold another sample than these."""
    sampler = _sampler_of(loader)
    own_batches = loader.batch_sampler is not None and makes_own_batches(loader)
    if type(sampler) is torch_data.SubsetRandomSampler and not own_batches:
        return len(indices) == len(sampler)
    with contextlib.suppress(TypeError, NotImplementedError):
        return len(set(indices)) == len(loader.dataset)  # type: ignore[arg-type]
    return False


def _read(loader: DataLoader[Any], indices: list[Any]) -> Iterator[Any]:
    """The dataset's samples at these indices; those that cannot be read are left out, unless it is all of them."""
    dataset: Any = copy_for_reading(loader.dataset)
    if isinstance(dataset, IterableDataset):
        _refuse_from_elsewhere(dataset)
        yield from _alive(itertools.islice(iter(dataset), len(indices)))
        return
    failure, any_read = None, False
    for some in _chunks(indices) if getattr(dataset, "__getitems__", None) else ([index] for index in indices):
        try:
            items = dataset.__getitems__(some) if len(some) > 1 else [dataset[some[0]]]
        except Exception as error:  # noqa: BLE001 - a dataset may raise anything
            failure = failure or error
            continue
        any_read = True
        yield from _alive(items)
    if failure is not None and not any_read:
        raise failure


_READ_AGAIN = ("datasets", "litdata", "streaming", "torchdata", "webdataset", "wids")  # packages whose streams can be


def _refuse_from_elsewhere(stream: object) -> None:
    """Refuse a stream that cannot be read without a connection or new files: who sends it may send each batch once."""
    homes = {each.__module__.partition(".")[0] for each in type(stream).__mro__}
    if reaches_out() and not homes & {*_READ_AGAIN}:
        raise CannotTraceError(
            f"{type(stream).__name__} cannot be read in a copy of this process that has no connections and writes no "
            "files; what it reads may come only once, so no sample is drawn"
        )


def _alive(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, with a sign of life at each."""
    for item in items:
        beat()
        yield item


def _chunks(indices: list[Any]) -> Iterator[list[Any]]:
    start, size = 0, 1
    while start < len(indices):
        yield indices[start : start + size]
        start, size = start + size, min(size * 2, _AT_ONCE)
