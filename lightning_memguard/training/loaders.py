"""A sample from a loader, and the loader at another batch size; neither consumes the user's data or random state.

Private names of Lightning are read here and in `lightning_memguard.training.step` alone. Checked on 2.5.0 to 2.6.6.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import random
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from lightning_memguard.core.batch import Batches, batch_bytes, batch_size_of, batches_from_one
from lightning_memguard.core.fake import fake_twin, isolated_rng
from lightning_memguard.errors import CannotResizeLoaderError, CannotTraceError
from lightning_memguard.training.step import lightning_of

SAMPLES = 16  # how many samples are drawn; the prediction stands on the largest of them


@dataclass(frozen=True)
class Found:
    """The training data of a fit, looked at and not touched.

    Attributes:
        loader: a loader like the one the fit will use; not to be iterated.
        origin: where it comes from, in words.
        batch_size: samples a batch; 0 where the loader has no size.
        dataset_size: samples in an epoch on all ranks, or None where nobody knows.
        fixed_because: why the batch size cannot be changed, in plain words; empty if it can.
    """

    loader: Any
    origin: str
    batch_size: int
    dataset_size: int | None
    fixed_because: str = ""

    def batches(self, batch_size: int, ranks: int = 1) -> int | None:
        """Batches an epoch on each rank at a batch size, or None where nobody knows."""
        if self.dataset_size is None:
            return None
        samples = -(-self.dataset_size // ranks)
        whole, rest = divmod(samples, batch_size)
        return whole + (1 if rest and not getattr(self.loader, "drop_last", False) else 0)


# -- looking


def find(trainer: Any) -> Found:
    """Look up the training loader of a fit that has not started.

    Raises:
        CannotTraceError: there is none, its hook cannot run on a copy, or its dataset is empty.
    """
    source = trainer.fit_loop._data_source  # checked on 2.5.0 to 2.6.6
    pl = lightning_of(trainer)
    if isinstance(source.instance, pl.LightningDataModule):
        loader, origin = _ask(pl, copy.copy(source.instance), source.name), "the datamodule's train_dataloader()"
    elif isinstance(source.instance, pl.LightningModule):
        loader, origin = _ask(pl, _owner(source.instance), source.name), "the module's train_dataloader()"
    else:
        loader, origin = source.instance, "fit(train_dataloaders=...)"
    if loader is None:
        raise CannotTraceError(f"{origin} gave no loader: there is no batch to predict from.")
    found = _describe(loader, origin)
    if found.dataset_size == 0:
        raise CannotTraceError(f"The dataset behind {origin} is empty: there is no sample to predict from.")
    return found


def _ask(pl: Any, owner: Any, hook: str) -> Any:
    """Call a loader hook on a copy, as Lightning would: it notes how the loader was made."""
    connector = importlib.import_module(f"{pl.__name__}.trainer.connectors.data_connector")
    replace = connector._replace_dunder_methods  # checked on 2.5.0 to 2.6.6
    with isolated_rng(), replace(DataLoader, "dataset"), replace(BatchSampler):
        return getattr(owner, hook)()


def _owner(module: Any) -> Any:
    """A copy of a module that makes its own loaders, set up for the fit, its parameters without memory."""
    twin: Any = fake_twin(module, FakeTensorMode(), torch.device("cpu"))
    with isolated_rng():
        twin.setup("fit")
    return twin


def _describe(loader: Any, origin: str) -> Found:
    if not isinstance(loader, DataLoader):
        kind = f"{type(loader).__module__.partition('.')[0]}'s {type(loader).__name__}"
        raise CannotResizeLoaderError(
            f"{origin} is {kind}, not a torch DataLoader: it has no batch size to read or to change. "
            "Pass a DataLoader to have the batch size chosen."
        )
    fixed = _fixed_because(loader, origin)
    batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 0) or 0
    return Found(loader, origin, batch_size, _dataset_size(loader), fixed)


def _fixed_because(loader: DataLoader[Any], origin: str) -> str:
    if loader.batch_sampler is None:
        return f"{origin} has batch_size=None: its dataset makes the batches itself"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"{origin} has a batch sampler of its own ({type(loader.batch_sampler).__name__})"
    return ""


def _dataset_size(loader: DataLoader[Any]) -> int | None:
    source: Any = loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.sampler
    with contextlib.suppress(TypeError, NotImplementedError):
        return len(source)
    return None


# -- sampling


def sample(found: Found) -> Batches:
    """Draw a few samples and collate the largest of them at two sizes: that tells what grows.

    Raises:
        CannotTraceError: no sample could be drawn without consuming the data, or a batch holds no tensor.
    """
    loader = found.loader
    with isolated_rng(), _generators_kept(loader.dataset, loader.sampler, loader.batch_sampler, loader.generator):
        if loader.batch_sampler is None:
            return batches_from_one(loader.collate_fn(next(_samples(loader, [None]))))
        drawn = list(_samples(loader, _indices(loader)))
        if not drawn:
            raise CannotTraceError(f"The dataset behind {found.origin} is empty: there is no sample to predict from.")
        if found.fixed_because:
            batch = loader.collate_fn(drawn)
            return batches_from_one(batch, found.batch_size or batch_size_of(batch))
        largest = max(drawn, key=lambda item: batch_bytes(loader.collate_fn([item])))
        small, large = loader.collate_fn([largest] * 2), loader.collate_fn([largest] * 3)
        batch_size_of(small)  # refuses a batch without tensors
        return Batches(small, large, 2, 3)


def _indices(loader: DataLoader[Any]) -> list[Any]:
    """The first indices that a copy of the loader's sampler gives."""
    if isinstance(loader.dataset, IterableDataset):
        return [None] * SAMPLES
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return list(next(iter(_shallow(loader.batch_sampler))))
    return list(itertools.islice(iter(_shallow(loader.sampler)), SAMPLES))


def _samples(loader: DataLoader[Any], indices: list[Any]) -> Iterator[Any]:
    dataset = _shallow(loader.dataset)
    if isinstance(dataset, IterableDataset):
        _refuse_one_shot(dataset)
        yield from itertools.islice(iter(dataset), len(indices))
    elif indices == [None]:
        yield dataset[next(iter(_shallow(loader.sampler)))]
    elif getattr(dataset, "__getitems__", None):
        yield from dataset.__getitems__(indices)
    else:
        yield from (dataset[index] for index in indices)


def _refuse_one_shot(dataset: Any) -> None:
    for name, value in vars(dataset).items():
        if isinstance(value, (types.GeneratorType, Iterator)):
            raise CannotTraceError(
                f"{type(dataset).__name__}.{name} is a {type(value).__name__}, which can be read only once: "
                "drawing a sample would take it from the training. Make the iterator in `__iter__`."
            )


def _shallow(thing: Any) -> Any:
    """Copy a dataset or sampler and those it wraps, so that files opened and counters moved are not the user's."""
    try:
        clone = copy.copy(thing)
        for name, value in vars(clone).items():
            if isinstance(value, (Dataset, Sampler)) and value is not thing:
                clone.__dict__[name] = _shallow(value)
            elif isinstance(value, list) and value and all(isinstance(item, Dataset) for item in value):
                clone.__dict__[name] = [_shallow(item) for item in value]
    except Exception:  # noqa: BLE001 - a thing that refuses to be copied is read as it is
        return thing
    return clone


_Restore = Callable[[], object]


@contextlib.contextmanager
def _generators_kept(*owners: Any) -> Iterator[None]:
    """Give the random generators that hang on these objects back as they were."""
    restores = [restore for owner in owners for restore in _restores(owner, 4, set())]
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
    else:
        for value in _members(thing):
            yield from _restores(value, depth - 1, seen)


def _members(thing: Any) -> Iterable[Any]:
    if isinstance(thing, (list, tuple)):
        return thing if len(thing) <= 100 else ()
    if isinstance(thing, dict):
        return thing.values() if len(thing) <= 100 else ()
    return getattr(thing, "__dict__", {}).values()


# -- resizing


def resized(loader: Any, batch_size: int) -> Any:
    """A loader like this one at another batch size, over the same dataset and sampler.

    A subclass keeps its type and attributes: nothing of its constructor runs again.

    Raises:
        CannotResizeLoaderError: the loader has no batch size that could be changed.
    """
    if not isinstance(loader, DataLoader) or _fixed_because(loader, "the loader"):
        raise CannotResizeLoaderError(
            f"A {type(loader).__name__} has no batch size to change; pass a DataLoader with `batch_size=`."
        )
    if loader.batch_size == batch_size:
        return loader
    clone: Any = copy.copy(loader)
    # DataLoader refuses to have these set after construction; a copy has not been iterated yet
    clone.__dict__["batch_size"] = batch_size
    clone.__dict__["batch_sampler"] = BatchSampler(loader.sampler, batch_size, loader.drop_last)
    clone.__dict__["_iterator"] = None
    _note_size(clone, batch_size)
    return clone


def _note_size(loader: Any, batch_size: int) -> None:
    """Lightning notes how a hook made a loader, to make it again with another sampler (checked on 2.5.0 to 2.6.6)."""
    kwargs = loader.__dict__.get("__pl_saved_kwargs")
    if kwargs is None:
        return
    names = loader.__dict__.get("__pl_saved_arg_names", ())
    if "batch_size" in names:
        place = names.index("batch_size")
        args = loader.__dict__["__pl_saved_args"]
        loader.__dict__["__pl_saved_args"] = (*args[:place], batch_size, *args[place + 1 :])
    else:
        loader.__dict__["__pl_saved_kwargs"] = {**kwargs, "batch_size": batch_size}


def apply(trainer: Any, module: Any, batch_size: int) -> Callable[[], None]:
    """Have the fit train at this batch size: its loader, and every attribute that holds the size.

    Returns:
        A function that gives the Trainer its own data source back, for when the fit is over.
    """
    set_batch_size(trainer, module, batch_size)
    loop = trainer.fit_loop
    before = loop._data_source  # checked on 2.5.0 to 2.6.6

    class Resizing(type(before)):  # type: ignore[misc]
        def dataloader(self) -> Any:
            return resized(super().dataloader(), batch_size)

    loop._data_source = Resizing(before.instance, before.name)

    def undo() -> None:
        if type(loop._data_source) is Resizing:
            loop._data_source = type(before)(loop._data_source.instance, before.name)

    return undo


def set_batch_size(trainer: Any, module: Any, batch_size: int) -> None:
    """Set ``batch_size`` wherever module or datamodule keeps one: attribute, hparams, and what loggers get of them."""
    for holder in (module, trainer.datamodule):
        if holder is None:
            continue
        if isinstance(getattr(holder, "batch_size", None), int):
            with contextlib.suppress(AttributeError):  # a property without a setter follows something else
                holder.batch_size = batch_size
        for hparams in (getattr(holder, "_hparams", None), getattr(holder, "_hparams_initial", None)):
            if hparams is not None and "batch_size" in hparams:
                hparams["batch_size"] = batch_size
