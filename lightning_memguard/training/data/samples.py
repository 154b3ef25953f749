"""The largest of the samples that a loader will give, drawn without taking one from the training.

Not the first batch but the worst one decides whether a training runs out of memory. What is looked at is bounded
(`MOST_SAMPLES`, `MOST_SECONDS`), and the prediction says how far it looked.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import random
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from lightning_memguard.core.capture.batch import Batches, batch_bytes, batch_size_of, batches_from_one, tensors_in
from lightning_memguard.core.capture.fake import isolated_rng
from lightning_memguard.errors import CannotTraceError

MOST_SAMPLES = 4096  # spread evenly over what the sampler gives, from end to end
MOST_SECONDS = 1.0  # after which it is enough, once LEAST_SAMPLES were seen
LEAST_SAMPLES = 16
_MOST_INDICES = 1 << 20  # how much of a sampler's order is read to spread them over
_AT_ONCE = 64  # what a dataset that fetches many samples at once is asked for
_BEYOND = "a larger one would take more, and is announced when it comes"
_COUNTS = (1, 2, 4, 8)  # of a sample, to collate it alone: some collate functions want pairs
_SIZES = ((4, 5, 1), (4, 6, 2), (4, 8, 4), (8, 16, 8), (2, 4, 2))  # two to collate at, and the step they stand for
_MOST_MIXED = 16  # samples stacked together, each the longest in something


@dataclass(frozen=True)
class Drawn:
    """What was drawn from one loader.

    Attributes:
        batches: batches of any size made of the largest samples.
        note: how far was looked, where a larger sample may lie beyond; empty where all were seen or all are alike.
        unit: its collate function was seen to take multiples of this only.
        samples: how many there are, where the end of the data was seen; else None.
    """

    batches: Batches
    note: str = ""
    unit: int = 1
    samples: int | None = None


def draw(loader: Any, *, fixed: bool = False, unit: int = 1, factor: int = 1) -> Drawn:
    """Draw samples from a loader and collate the largest of them at two sizes: that tells what grows.

    Args:
        loader: a torch DataLoader, or any iterable of batches; it is not consumed.
        fixed: its batches are taken as they come.
        unit: the batch sizes that will be asked for are multiples of this.
        factor: samples in one of its batches for each unit of the batch size.

    Raises:
        CannotTraceError: no sample could be drawn without consuming the data, or a batch holds no tensor.
    """
    with unmoved(loader):
        return _largest_batch(loader) if fixed else _largest_samples(loader, unit, factor)


# -- of a loader whose batches are not ours to make


def _batches(loader: Any) -> Iterator[tuple[Any, int]]:
    """Batches as they come, each with the number of samples in it; 0 where nobody knows."""
    if not isinstance(loader, DataLoader):
        refuse_one_shot(loader)
        yield from ((batch, 0) for batch in shallow(loader))
        return
    collate = shallow(loader.collate_fn)
    if loader.batch_sampler is None:  # the dataset makes the batches: what it gives at one index is one
        yield from ((collate(batch), 0) for batch in _samples(loader, _indices(loader)))
    elif isinstance(loader.dataset, IterableDataset):
        stream = _samples(loader, _indices(loader))
        size = loader.batch_size or 1
        while items := list(itertools.islice(stream, size)):
            yield collate(items), len(items)
    else:
        planned = list(_until_late(map(list, itertools.islice(shallow(loader.batch_sampler), _MOST_INDICES))))
        for place in _spread(len(planned)):
            yield collate(list(_samples(loader, planned[place]))), len(planned[place])


def _largest_batch(loader: Any) -> Drawn:
    largest, most, seen, samples, sizes, all_seen = None, 0, 0, 0, set(), True
    started = time.monotonic()
    for batch, count in _batches(loader):
        if seen and (samples >= MOST_SAMPLES or time.monotonic() - started > MOST_SECONDS):
            all_seen = False
            break
        nbytes = batch_bytes(batch)
        size = count or batch_size_of(batch)
        if largest is None or nbytes > batch_bytes(largest):
            largest, most = batch, size
        sizes.add(nbytes)
        seen, samples = seen + 1, samples + size
    if largest is None:
        raise CannotTraceError("the data is empty: there is no batch to predict from")
    note = "" if all_seen or len(sizes) == 1 else f"predicted for the largest of {seen} batches; {_BEYOND}"
    return Drawn(batches_from_one(largest, most), note, samples=samples if all_seen else None)


# -- of a loader whose batches can be made at any size


def _largest_samples(loader: DataLoader[Any], unit: int, factor: int) -> Drawn:
    indices = _indices(loader)
    worst = _Worst(shallow(loader.collate_fn))
    started = time.monotonic()
    stopped = False
    for item in _samples(loader, indices):
        worst.look_at(item)
        stopped = worst.seen >= LEAST_SAMPLES and time.monotonic() - started > MOST_SECONDS
        if stopped:
            break
    if worst.failure is not None and not worst.seen:
        raise worst.failure
    if not worst.seen:
        raise CannotTraceError("the dataset is empty: there is no sample to predict from")
    if isinstance(loader.dataset, IterableDataset):
        all_seen = not stopped and worst.seen < len(indices)
        which = f"the first {worst.seen} samples"
    else:
        all_seen = not stopped and _are_all(indices, loader)
        which = f"{worst.seen} samples"
    note = "" if all_seen or not worst.vary else f"predicted for the largest of {which}; {_BEYOND}"
    batches, step = worst.batches(unit, factor)
    return Drawn(batches, note, unit * step, worst.seen if all_seen else None)


class _Worst:
    """Keeps the largest sample seen, and those that are longest in one of their dimensions."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate
        self.seen = 0
        self.vary = False
        self.failure: Exception | None = None
        self._largest: tuple[int, Any] = (-1, None)
        self._longest: dict[int, tuple[int, Any]] = {}
        self._counts: tuple[int, ...] = _COUNTS

    def look_at(self, item: Any) -> None:
        """Look at one sample; one that cannot be collated cannot be in a batch."""
        try:
            batch = self._alone(item)
        except Exception as error:  # noqa: BLE001 - a collate function may raise anything
            self.failure = error
            return
        self.seen += 1
        nbytes = batch_bytes(batch)
        self.vary |= self.seen > 1 and nbytes != self._largest[0]
        if nbytes > self._largest[0]:
            self._largest = (nbytes, item)
        for place, length in enumerate(
            length for tensor in tensors_in(batch) if not tensor.is_nested for length in tensor.shape
        ):
            if length > self._longest.get(place, (-1, None))[0]:
                self._longest[place] = (length, item)

    def _alone(self, item: Any) -> Any:
        for count in self._counts:
            try:
                batch = self.collate([item] * count)
            except Exception as error:  # noqa: BLE001 - as above
                failure = error
                continue
            self._counts = (count,)  # lengths are compared between batches of as many samples
            return batch
        raise failure

    def batches(self, unit: int, factor: int) -> tuple[Batches, int]:
        """Stack the largest sample; or several, where padding each to the longest of all takes more.

        Returns:
            The batches, and of what the collate function takes multiples.
        """
        stacked, step = self._stacked([self._largest[1]], unit, factor)
        batch_size_of(stacked.small)  # refuses a batch without tensors
        mixed = list({id(item): item for _, item in self._longest.values()}.values())[:_MOST_MIXED]
        if len(mixed) > 1:
            with contextlib.suppress(Exception):  # samples of different kinds may not go into one batch
                together, their_step = self._stacked(mixed, unit, factor)
                if _bytes_a_sample(together) > _bytes_a_sample(stacked):
                    return together, their_step
        return stacked, step

    def _stacked(self, items: list[Any], unit: int, factor: int) -> tuple[Batches, int]:
        times = -(-len(items) // (_SIZES[0][0] * factor))  # as many that each of the items is in it
        for small, large, step in _SIZES:
            sizes = small * times, small * times + (large - small)
            try:
                made = [self.collate(_repeated(items, size * factor)) for size in sizes]
            except Exception as error:  # noqa: BLE001 - a collate function may raise anything at an odd size
                failure = error
                continue
            return Batches(made[0], made[1], sizes[0] * unit, sizes[1] * unit), step
        raise failure


def _bytes_a_sample(batches: Batches) -> float:
    return batch_bytes(batches.small) / batches.small_size


def _repeated(items: list[Any], count: int) -> list[Any]:
    return list(itertools.islice(itertools.cycle(items), count))


# -- which samples are looked at


def _indices(loader: DataLoader[Any]) -> list[Any]:
    """What the loader may be given, `MOST_SAMPLES` at most, spread over all of it; the ends first."""
    if isinstance(loader.dataset, IterableDataset):
        return [None] * MOST_SAMPLES
    order = _order(loader)
    return [order[place] for place in _spread(len(order))]


def _order(loader: DataLoader[Any]) -> list[Any] | range:
    """The samples that an epoch may hold: of a sampler that draws anew each time, all that it draws from."""
    sampler = sampler_of(loader)
    if loader.batch_sampler is not None and not built_in(loader.batch_sampler):
        flat = itertools.chain.from_iterable(shallow(loader.batch_sampler))
        return list(_until_late(itertools.islice(flat, _MOST_INDICES)))
    if type(sampler) in (SequentialSampler, RandomSampler) or _is_stateful_random(sampler):
        return range(len(sampler.data_source))
    if type(sampler) is DistributedSampler:
        return range(len(sampler.dataset))  # type: ignore[arg-type]
    return list(_until_late(itertools.islice(iter(shallow(sampler)), _MOST_INDICES)))


def _until_late(things: Iterator[Any]) -> Iterator[Any]:
    started = time.monotonic()
    for thing in things:
        yield thing
        if time.monotonic() - started > MOST_SECONDS:
            return


def built_in(batch_sampler: Any) -> bool:
    """Whether a batch sampler is torch's own, or torchdata's: the size and nothing else makes its batches."""
    kind = type(batch_sampler)
    return kind is BatchSampler or (kind.__name__ == "BatchSampler" and _of_torchdata(batch_sampler))


def sampler_of(loader: DataLoader[Any]) -> Any:
    """What gives a loader its samples: a loader that was handed its batch sampler has another, unused, of its own."""
    return loader.batch_sampler.sampler if built_in(loader.batch_sampler) else loader.sampler  # type: ignore[union-attr]


def _is_stateful_random(sampler: Any) -> bool:
    return type(sampler).__name__ == "RandomSampler" and _of_torchdata(sampler)


def _of_torchdata(thing: Any) -> bool:
    return type(thing).__module__.startswith("torchdata.stateful_dataloader")


def _spread(count: int) -> list[int]:
    """Places in a sequence, from end to end: the ends first, then ever finer, so that it may be left at any time."""
    kept = min(count, MOST_SAMPLES)
    if kept < 3:
        return list(range(kept))[::-1]
    places = [place * (count - 1) // (kept - 1) for place in range(kept)]
    bits = (kept - 1).bit_length()
    inner = sorted(range(1, kept - 1), key=lambda place: int(f"{place:0{bits}b}"[::-1], 2))
    return [places[-1], places[0], *(places[place] for place in inner)]


def _are_all(indices: list[Any], loader: DataLoader[Any]) -> bool:
    """Whether no epoch can hold another sample than these."""
    sampler = sampler_of(loader)
    if type(sampler) is SubsetRandomSampler and (loader.batch_sampler is None or built_in(loader.batch_sampler)):
        return len(indices) == len(sampler)
    with contextlib.suppress(TypeError, NotImplementedError):
        return len(set(indices)) == len(loader.dataset)  # type: ignore[arg-type]
    return False


def _samples(loader: DataLoader[Any], indices: list[Any]) -> Iterator[Any]:
    """The dataset's samples at these indices; those that cannot be read are left out, unless it is all of them."""
    dataset = shallow(loader.dataset)
    _refuse_held_iterators(dataset)
    if isinstance(dataset, IterableDataset):
        yield from itertools.islice(iter(dataset), len(indices))
        return
    failure, any_read = None, False
    for some in _chunks(indices) if getattr(dataset, "__getitems__", None) else ([index] for index in indices):
        try:
            items = dataset.__getitems__(some) if len(some) > 1 else [dataset[some[0]]]
        except Exception as error:  # noqa: BLE001 - a dataset may raise anything
            failure = error
            continue
        any_read = True
        yield from items
    if failure is not None and not any_read:
        raise failure


def _chunks(indices: list[Any]) -> Iterator[list[Any]]:
    start, size = 0, 1
    while start < len(indices):
        yield indices[start : start + size]
        start, size = start + size, min(size * 2, _AT_ONCE)


# -- nothing of the user's is consumed or moved


def refuse_one_shot(loader: Any) -> None:
    """An iterator gives its batches once: one looked at is lost to the training.

    Raises:
        CannotTraceError: ``loader`` is one, or holds one.
    """
    if isinstance(loader, Iterator):
        raise CannotTraceError(
            f"the data is a {type(loader).__name__}, which can be read only once: drawing a sample would take it from "
            "the training. Pass something that makes a new iterator in `__iter__`, such as a DataLoader"
        )
    _refuse_held_iterators(loader)


def _refuse_held_iterators(dataset: Any) -> None:
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, Dataset) and value is not dataset and not isinstance(value, Iterator):
            _refuse_held_iterators(value)
        elif isinstance(value, Iterator) and not _can_seek(value):
            raise CannotTraceError(
                f"{type(dataset).__name__}.{name} is a {type(value).__name__}, which can be read only once: "
                "drawing a sample would take it from the training. Make the iterator in `__iter__`."
            )


def _can_seek(thing: Any) -> bool:
    with contextlib.suppress(ValueError):  # a closed file
        return isinstance(thing, io.IOBase) and thing.seekable()
    return True


_DEPTH = 6
_FEW = 100  # entries of a container that are looked into
_MANY = 100_000  # entries of a container that is copied


def shallow(thing: Any) -> Any:
    """Copy a dataset or sampler and what it is made of, so that files opened and counters moved are not the user's."""
    return _shallow(thing, {}, _DEPTH)


def _shallow(thing: Any, known: dict[int, Any], depth: int) -> Any:
    if id(thing) in known:
        return known[id(thing)]
    if isinstance(thing, types.MethodType):
        return types.MethodType(thing.__func__, _shallow(thing.__self__, known, depth))
    if type(thing) in (list, dict, set, deque):
        return _copied_container(thing, known, depth)
    whole = depth == _DEPTH or isinstance(thing, (Dataset, Sampler))
    if depth < 0 or not (whole or _is_plain(thing)) or not hasattr(thing, "__dict__") or _is_code(thing):
        return thing
    try:
        clone = copied(thing)
        known[id(thing)] = clone
        for name, value in list(vars(clone).items()):
            clone.__dict__[name] = _shallow(value, known, depth - 1)
    except Exception:  # noqa: BLE001 - a thing that refuses to be copied is read as it is
        return thing
    return clone


def _copied_container(thing: Any, known: dict[int, Any], depth: int) -> Any:
    if len(thing) > _MANY or depth < 0:
        return thing
    clone = known[id(thing)] = copy.copy(thing)
    if len(thing) <= _FEW and not isinstance(thing, set):
        for key, value in list(thing.items() if isinstance(thing, dict) else enumerate(thing)):
            clone[key] = _shallow(value, known, depth - 1)
    return clone


def _is_code(thing: Any) -> bool:
    return isinstance(thing, (type, types.ModuleType, types.FunctionType, torch.Tensor, torch.nn.Module, np.ndarray))


def _is_plain(thing: Any) -> bool:
    """Whether an object of the user's is no more than its attributes: its class says nothing of copying."""
    kind = type(thing)
    if kind.__module__.partition(".")[0] in ("torch", "lightning", "pytorch_lightning", "builtins"):
        return False
    names = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__")
    return all(getattr(kind, name, None) is getattr(object, name, None) for name in names)


def copied(thing: Any) -> Any:
    """A copy that shares all attributes; that it goes away closes nothing that the original still needs."""
    clone = copy.copy(thing)
    if clone is not thing and hasattr(type(thing), "__del__"):
        kind = type(thing)
        names = {"__slots__": (), "__module__": kind.__module__, "__doc__": kind.__doc__, "__del__": lambda _: None}
        clone.__class__ = type(kind.__name__, (kind,), names)
    return clone


_Restore = Callable[[], object]


@contextlib.contextmanager
def unmoved(*things: Any) -> Iterator[None]:
    """Give global random state back as it was, and the generators and open files that hang on these objects."""
    restores = [restore for thing in things for restore in _restores(thing, _DEPTH, set())]
    with isolated_rng():
        try:
            yield
        finally:
            for restore in restores:
                restore()


def _restores(thing: Any, depth: int, seen: set[int]) -> Iterator[_Restore]:
    if id(thing) in seen or depth < 0:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Generator):
        state = thing.get_state()
        yield lambda: thing.set_state(state)
    elif isinstance(thing, np.random.Generator):
        bits = copy.deepcopy(thing.bit_generator.state)
        yield lambda: setattr(thing.bit_generator, "state", bits)
    elif isinstance(thing, np.random.RandomState):
        legacy = thing.get_state()
        yield lambda: thing.set_state(legacy)
    elif isinstance(thing, random.Random):
        python = thing.getstate()
        yield lambda: thing.setstate(python)
    elif isinstance(thing, io.IOBase):
        with contextlib.suppress(OSError, ValueError):
            position = thing.tell()
            yield lambda: thing.seek(position)
    else:
        for value in _members(thing):
            yield from _restores(value, depth - (not _is_code(value)), seen)


def _members(thing: Any) -> Iterable[Any]:
    if isinstance(thing, (list, tuple, dict)):
        values = thing.values() if isinstance(thing, dict) else thing
        return values if len(thing) <= _FEW else ()
    if isinstance(thing, types.MethodType):
        return (thing.__self__, thing.__func__)
    if isinstance(thing, functools.partial):
        return (thing.func, *thing.args, *thing.keywords.values())
    if isinstance(thing, types.FunctionType):
        return _used_by(thing)
    if _is_code(thing):
        return ()
    own = [vars(type(thing)).get(name) for name in ("__getitem__", "__getitems__", "__iter__", "__call__")]
    return (*getattr(thing, "__dict__", {}).values(), *(each for each in own if isinstance(each, types.FunctionType)))


def _used_by(function: types.FunctionType) -> Iterator[Any]:
    """What a function closes over, and the generators and files among the globals that it names."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            yield cell.cell_contents
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random, io.IOBase)):
            yield value
