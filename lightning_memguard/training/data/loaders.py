"""The loaders of a run, looked at; and the same loaders at another batch size. The user's own are never touched.

Private names of Lightning are read here and in `lightning_memguard.training.adapter`. Checked on 2.5.0 to 2.6.6.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_memguard.core.capture.batch import Batches, batch_size_of
from lightning_memguard.core.capture.fake import fake_copy, isolated_rng
from lightning_memguard.errors import CannotResizeLoaderError, CannotTraceError, MemGuardError
from lightning_memguard.training.adapter.lightning_types import lightning_of
from lightning_memguard.training.data import samples

Role = Literal["train", "val", "validate", "test", "predict"]
"""Which loaders: the fit's for training or for validation, or those of ``trainer.validate``, ``test``, ``predict``."""

# Checked on 2.5.0 to 2.6.6.
_LOOPS: dict[Role, Callable[[Any], Any]] = {
    "train": lambda trainer: trainer.fit_loop,
    "val": lambda trainer: trainer.fit_loop.epoch_loop.val_loop,
    "validate": lambda trainer: trainer.validate_loop,
    "test": lambda trainer: trainer.test_loop,
    "predict": lambda trainer: trainer.predict_loop,
}


@dataclass(frozen=True)
class Source:
    """One loader, looked at and not touched.

    Attributes:
        loader: a loader like the one the run will use; not to be iterated.
        batch_size: samples a batch; 0 where it tells none.
        fixed_because: why the batch size cannot be changed, in plain words; empty if it can.
        ranks: how many the Trainer will spread its samples over.
    """

    loader: Any
    batch_size: int
    fixed_because: str = ""
    ranks: int = 1

    @functools.cached_property
    def dataset_size(self) -> int | None:
        """Samples that can be in one batch of this rank, all of an epoch's at most; None where nobody knows."""
        with samples.unmoved(self.loader):
            return _dataset_size(self)

    def batches(self, batch_size: int) -> int | None:
        """Batches an epoch on this rank at a batch size, or None where nobody knows."""
        if not _sizes_itself(self.loader):
            return self._filled(batch_size)
        with samples.unmoved(self.loader), contextlib.suppress(Exception):
            at = self.loader if self.fixed_because else _probe(self.loader, batch_size)
            return -(-len(at) // (self.ranks if isinstance(at, DataLoader) else 1))
        return None if self.fixed_because else self._filled(batch_size)

    def _filled(self, batch_size: int) -> int | None:
        if self.dataset_size is None or not batch_size:
            return None
        whole, rest = divmod(self.dataset_size, batch_size)
        return whole + (1 if rest and not _drops_last(self.loader) else 0)


@dataclass(frozen=True)
class LoaderInfo:
    """The data of a run: one loader, or several that give a batch together or in turn.

    Attributes:
        combined: the loader or loaders as Lightning's CombinedLoader; a copy, not to be iterated.
        sources: its loaders, in order.
        origin: where it comes from, in words.
        role: what the run takes them for.
    """

    combined: Any
    sources: tuple[Source, ...]
    origin: str
    role: Role = "train"

    @property
    def mode(self) -> str:
        """How Lightning combines several: ``"max_size_cycle"``, ``"min_size"``, ``"max_size"`` or ``"sequential"``."""
        return str(self.combined._mode)

    @property
    def batch_size(self) -> int:
        """Samples a batch; of several loaders, the smallest: the others keep their ratio to it. 0 where unknown."""
        return min((source.batch_size for source in self.sources if source.batch_size), default=0)

    @property
    def unit(self) -> int:
        """Only multiples of this keep the loaders' batch sizes in ratio; 1 for one loader, or several alike."""
        return self.batch_size // (math.gcd(*(source.batch_size for source in self.sources)) or 1) or 1

    @property
    def fixed_because(self) -> str:
        """Why the batch size cannot be changed; empty if it can."""
        several = len(self.sources) > 1 and any(not isinstance(each.loader, DataLoader) for each in self.sources)
        known = next((source.fixed_because for source in self.sources if source.fixed_because), "")
        return known or (f"{self.origin} joins loaders that are not all torch DataLoaders" if several else "")

    @property
    def dataset_size(self) -> int | None:
        """The largest batch size that the data of this rank can fill, or None where nobody knows."""
        known = [
            source.dataset_size * self.batch_size // source.batch_size if self.batch_size else source.dataset_size
            for source in self.sources
            if source.dataset_size is not None and (source.batch_size or not self.batch_size)
        ]
        return min(known, default=None)

    def factor(self, source: Source) -> int:
        """How many samples a loader's batch has for each `unit` of the batch size."""
        return source.batch_size * self.unit // self.batch_size if self.batch_size else 1

    def batches(self, batch_size: int) -> int | None:
        """Batches an epoch on this rank at a batch size, or None where nobody knows."""
        known = [count for count in self.counts(batch_size) if count is not None]
        return self.together(known) if len(known) == len(self.sources) else None

    def counts(self, batch_size: int) -> list[int | None]:
        """Batches an epoch of each loader at a batch size of the whole."""
        return [source.batches(batch_size * self.factor(source) // self.unit) for source in self.sources]

    def together(self, counts: list[int]) -> int:
        """Batches that loaders with so many give together."""
        return min(counts) if self.mode == "min_size" else sum(counts) if self.mode == "sequential" else max(counts)


# -- looking


def find(trainer: Any, role: Role = "train") -> LoaderInfo:
    """Look up the loaders of a run that has not started.

    Raises:
        CannotTraceError: there is none, its hook cannot run on a copy, or its dataset is empty.
    """
    source = _LOOPS[role](trainer)._data_source
    pl = lightning_of(trainer)
    hook = f"{source.name}()"
    if isinstance(source.instance, pl.LightningDataModule):
        loader, origin = _ask(pl, copy.copy(source.instance), source.name), f"the datamodule's {hook}"
    elif isinstance(source.instance, pl.LightningModule):
        loader, origin = _ask(pl, _owner(source.instance, role), source.name), f"the module's {hook}"
    else:
        loader, origin = source.instance, _ORIGINS[role]
    if loader is None:
        raise CannotTraceError(f"{origin} gave no loader: there is no batch to predict from.")
    found = _found(trainer, loader, origin, role)
    if found.dataset_size == 0:
        raise CannotTraceError(f"The dataset behind {origin} is empty: there is no sample to predict from.")
    return found


def give(trainer: Any, owner: Any) -> None:
    """Tell a Trainer that never runs whose ``train_dataloader`` a fit would ask: a module's or a datamodule's."""
    trainer.fit_loop._data_source.instance = owner  # checked on 2.5.0 to 2.6.6


_ORIGINS: dict[Role, str] = {
    "train": "fit(train_dataloaders=...)",
    "val": "fit(val_dataloaders=...)",
    "validate": "validate(dataloaders=...)",
    "test": "test(dataloaders=...)",
    "predict": "predict(dataloaders=...)",
}


def _ask(pl: Any, owner: Any, hook: str) -> Any:
    """Call a loader hook on a copy, as Lightning would: it notes how the loader was made."""
    connector = importlib.import_module(f"{pl.__name__}.trainer.connectors.data_connector")
    replace = connector._replace_dunder_methods  # checked on 2.5.0 to 2.6.6
    with samples.unmoved(owner), replace(DataLoader, "dataset"), replace(BatchSampler):
        try:
            return getattr(owner, hook)()
        except Exception as error:  # noqa: BLE001 - raised through it, Lightning would leave its patches in place
            failure = error
    raise failure


def _owner(module: Any, role: Role) -> Any:
    """A copy of a module that makes its own loaders, set up for the run, its parameters without memory."""
    module_copy: Any = fake_copy(module, FakeTensorMode(), torch.device("cpu"))
    with isolated_rng():
        module_copy.setup("fit" if role in ("train", "val") else role)
    return module_copy


def _found(trainer: Any, tree: Any, origin: str, role: Role) -> LoaderInfo:
    combined = _combined(tree, "max_size_cycle" if role == "train" else "sequential", trainer)
    spread = trainer.world_size if trainer._accelerator_connector.use_distributed_sampler else 1
    remade = spread > 1 or role == "predict" or trainer.overfit_batches > 0
    sources = tuple(_source(loader, origin, spread, remade=remade) for loader in combined.flattened)
    return LoaderInfo(combined, sources, origin, role)


def _combined(tree: Any, mode: str, owner: Any) -> Any:
    """The collection that Lightning would make of it; a copy where it is one already."""
    cls = importlib.import_module(f"{lightning_of(owner).__name__}.utilities.combined_loader").CombinedLoader
    return copy.copy(tree) if isinstance(tree, cls) else cls(tree, mode)


def _source(loader: Any, origin: str, ranks: int = 1, *, remade: bool = False) -> Source:
    """Look at one loader; Lightning spreads its samples over ``ranks``, or makes it again for another reason."""
    with samples.unmoved(loader):
        if not isinstance(loader, DataLoader):
            return _foreign(loader, origin)
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 0) or 0
        fixed = _fixed_because(loader, origin, remade=remade)
        return Source(loader, size if type(size) is int else 0, fixed, ranks)


def _sizes_itself(loader: Any) -> bool:
    """Whether something of the user's own makes the batches, so that only it can tell how many there are."""
    if not isinstance(loader, DataLoader):
        return True
    return loader.batch_sampler is None or not samples.built_in(loader.batch_sampler)


def _drops_last(loader: Any) -> bool:
    planner = getattr(loader, "batch_sampler", None)
    return bool(getattr(loader if planner is None else planner, "drop_last", False))


def _fixed_because(loader: DataLoader[Any], origin: str, *, remade: bool) -> str:
    if loader.batch_sampler is None:
        return f"{origin} has batch_size=None: its dataset makes the batches itself"
    if not samples.built_in(loader.batch_sampler) and not _follows(loader.batch_sampler):
        return f"{origin} has a batch sampler of its own ({type(loader.batch_sampler).__name__}) that sets the size"
    if remade and not _can_be_remade(loader):
        return f"{origin} is a {type(loader).__name__}, which Lightning makes again and which takes no `batch_size`"
    return ""


def _can_be_remade(loader: DataLoader[Any]) -> bool:
    """Whether a loader made in a hook, which Lightning makes again from its arguments, can be given a size there."""
    if "__pl_saved_kwargs" not in loader.__dict__ or not samples.built_in(loader.batch_sampler):
        return True
    named = {*loader.__dict__["__pl_saved_kwargs"], *loader.__dict__.get("__pl_saved_arg_names", ())}
    return "batch_size" in named or "batch_size" in inspect.signature(type(loader).__init__).parameters


def _follows(batch_sampler: Any) -> bool:
    """Whether a batch sampler of the user's own gives batches of the size that its attribute says, and counts them."""
    try:
        if [_first_batch(batch_sampler, size) for size in (2, 3)] != [2, 3]:
            return False
        doubled = _sampler_at(samples.shallow(batch_sampler), batch_sampler.batch_size * 2)
        most = len(doubled) if hasattr(doubled, "__len__") else 0
        counted = sum(1 for _ in itertools.islice(doubled, most + 1)) if 0 < most <= _MOST_COUNTED else most
    except Exception:  # noqa: BLE001 - it may be written in any way; what cannot be tried is left alone
        return False
    return counted == most


def _first_batch(batch_sampler: Any, batch_size: int) -> int:
    return len(list(next(iter(_sampler_at(samples.shallow(batch_sampler), batch_size)), ())))


def _sampler_at(batch_sampler: Any, batch_size: int) -> Any:
    """The batch sampler, of another size and the same in all else: what the user sets on one, the other has."""
    made: Any
    kind = type(batch_sampler)
    if type(getattr(batch_sampler, "batch_size", None)) is not int:
        raise CannotResizeLoaderError(f"A {kind.__name__} has no `batch_size` to change.")
    if "batch_size" not in batch_sampler.__dict__:  # it does something of its own when it is set
        made = samples.copied(batch_sampler)
        made.batch_size = batch_size
        return made
    fixed = property(lambda _: batch_size, lambda *_: None)
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "batch_size": fixed, "__del__": lambda _: None}
    made = object.__new__(type(kind.__name__, (kind,), names))
    made.__dict__ = batch_sampler.__dict__  # one state: an epoch set on the user's own is set here too
    if "__pl_saved_kwargs" in made.__dict__:  # but not what Lightning noted, which has a size in it
        made.__dict__ = dict(batch_sampler.__dict__)
        _note_size(made, batch_size)
    return made


def _dataset_size(source: Source) -> int | None:
    loader = source.loader
    with contextlib.suppress(TypeError, NotImplementedError):
        if not isinstance(loader, DataLoader):
            return None if source.fixed_because else len(_probe(loader, 1))
        if isinstance(loader.dataset, IterableDataset):
            share = max(1, loader.num_workers) if _drops_last(loader) else 1  # each worker fills batches of its own
            return max(len(loader.dataset) // share, min(source.batch_size, len(loader.dataset)))  # type: ignore[arg-type]
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        share = 1 if isinstance(sampler, DistributedSampler) else source.ranks
        size = -(-len(sampler) // share)  # type: ignore[arg-type]
        return _largest_full(source, size) if _sizes_itself(loader) and not source.fixed_because else size
    return None


def _largest_full(source: Source, most: int) -> int:
    """The largest size at which a batch sampler of the user's own still fills its first batch."""

    def full(size: int) -> bool:
        with contextlib.suppress(Exception):
            return _first_batch(source.loader.batch_sampler, size) == size
        return False

    return _largest(source.batch_size, most, full)


def _largest(good: int, most: int, runs: Callable[[int], bool]) -> int:
    """The largest number that runs, up to ``most``; ``good`` is believed to."""
    if most <= good or runs(most):
        return most
    bad = most
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if runs(middle) else (good, middle)
    return good


_MOST_COUNTED = 1 << 16


def _foreign(loader: Any, origin: str) -> Source:
    """A loader of another library: sized by its attribute, if it listens to it."""
    kind = f"{type(loader).__module__.partition('.')[0]}'s {type(loader).__name__}"
    size = getattr(loader, "batch_size", 0)
    size = size if type(size) is int else 0
    fixed = f"{origin} is {kind}, not a torch DataLoader, and has no `batch_size` to change"
    if size and not isinstance(loader, Iterator):
        fixed = "" if _listens(loader) else f"{origin} is {kind}, whose batches do not follow its `batch_size`"
    return Source(loader, size, fixed)


def _listens(loader: Any) -> bool:
    try:
        samples.refuse_one_shot(loader)
        if [batch_size_of(next(iter(_probe(loader, size)))) for size in (2, 3)] != [2, 3]:
            return False
        if not hasattr(loader, "__len__"):
            return True
        one, own = len(_probe(loader, 1)), len(_probe(loader, loader.batch_size))
    except Exception:  # noqa: BLE001 - it may be written in any way; what cannot be tried is left alone
        return False
    return bool(own <= one // loader.batch_size + 1)


def _foreign_at(loader: Any, batch_size: int) -> Any:
    clone = samples.copied(loader)
    if clone is loader:
        raise CannotResizeLoaderError(f"A {type(loader).__name__} cannot be copied.")
    clone.batch_size = batch_size
    return clone


def _probe(loader: Any, batch_size: int) -> Any:
    """A loader at another size to try out, sharing nothing with the user's that reading it could move."""
    if isinstance(loader, DataLoader):
        return _sampler_at(samples.shallow(loader.batch_sampler), batch_size)
    return _foreign_at(samples.shallow(loader), batch_size)


def largest_for(trainer: Any, found: LoaderInfo) -> int | None:
    """The largest batch size that a run's data can fill, and at which the Trainer still finds enough batches.

    With fewer batches an epoch, Lightning refuses an int ``val_check_interval`` above their number, and a share in
    ``limit_train_batches`` (or ``limit_val_batches``, ...) that comes to none of a loader. Checked on 2.5.0 to 2.6.6.
    """
    most = found.dataset_size
    if most is None or not found.batch_size or found.fixed_because:
        return most
    limit = getattr(trainer, f"limit_{_LIMITS[found.role]}_batches")
    needed = 1
    interval = trainer.val_check_interval
    if found.role == "train" and isinstance(interval, int) and trainer.check_val_every_n_epoch is not None:
        needed = interval if trainer.limit_val_batches > 0 else 1

    def runs(size: int) -> bool:
        counts = [1 << 62 if count is None else count for count in found.counts(size)]
        limited = [int(count * limit) if isinstance(limit, float) else min(count, limit) for count in counts]
        return min(limited, default=0) > 0 and found.together(limited) >= needed

    return _largest(found.batch_size, most, runs) if runs(found.batch_size) else most


_LIMITS: dict[Role, str] = {"train": "train", "val": "val", "validate": "val", "test": "test", "predict": "predict"}


def leaves_one(found: LoaderInfo, batch_size: int) -> bool:
    """Whether an epoch would end on a single sample, which batch norm refuses, and would not at the user's own size."""

    def rest(source: Source, size: int) -> int:
        sized = None if _drops_last(source.loader) else source.dataset_size
        return (sized or 0) % max(1, size) if size > 1 else 0

    return any(
        rest(source, batch_size * found.factor(source) // found.unit) == 1 and rest(source, source.batch_size) != 1
        for source in found.sources
    )


# -- sampling


@dataclass(frozen=True)
class Sampled:
    """What was drawn from the data of a run.

    Attributes:
        batches: batches of any size, one kind for each loader that stands alone.
        notes: how far was looked for the largest sample.
        unit: batch sizes must be multiples of this for the loaders' collate functions.
        samples: the largest batch size that data without a length was seen to fill, where its end was seen.
    """

    batches: tuple[Batches, ...]
    notes: tuple[str, ...]
    unit: int = 1
    samples: int | None = None


def sample(found: LoaderInfo) -> Sampled:
    """Draw from each loader, without consuming it, and join what Lightning joins.

    Raises:
        CannotTraceError: no sample could be drawn without consuming the data, or a batch holds no tensor.
    """
    try:
        drawn = [_draw(found, source) for source in found.sources]
    except MemGuardError as error:
        raise CannotTraceError(f"{found.origin}: {error}") from error
    except Exception as error:
        raise CannotTraceError(f"no sample could be drawn ({type(error).__name__}: {error})") from error
    notes = tuple(dict.fromkeys(each.note for each in drawn if each.note))
    ends = [
        _without_length(each.samples, source) * found.unit // found.factor(source)
        for each, source in zip(drawn, found.sources, strict=True)
        if each.samples is not None and source.dataset_size is None and not source.fixed_because
    ]
    unit = math.lcm(*(each.unit for each in drawn))
    return Sampled(_joined(found, [each.batches for each in drawn]), notes, unit, min(ends, default=None))


def _without_length(count: int, source: Source) -> int:
    """The largest batch of a stream that was seen to end; each worker fills batches of its own."""
    dropped = isinstance(source.loader, DataLoader) and _drops_last(source.loader)
    share = count // max(1, source.loader.num_workers) if dropped else count
    return max(share, min(source.batch_size, count))


def _draw(found: LoaderInfo, source: Source) -> samples.Drawn:
    if found.fixed_because:
        return samples.draw(source.loader, fixed=True)
    if isinstance(source.loader, DataLoader):
        return samples.draw(source.loader, unit=found.unit, factor=found.factor(source))
    with samples.unmoved(source.loader):
        return samples.draw(_probe(source.loader, max(source.batch_size, 4)), fixed=True)


def _joined(found: LoaderInfo, drawn: list[Batches]) -> tuple[Batches, ...]:
    size = found.batch_size or drawn[0].small_size
    if len(drawn) > 1 and found.fixed_because:  # each at its own size, whatever is asked
        drawn = [Batches(each.small, each.small, size, size + 1) for each in drawn]
    if found.mode == "sequential":
        return tuple(drawn)
    first = max(drawn, key=lambda each: each.small_size)
    small, large = (
        tree_unflatten([_at(each, count) for each in drawn], found.combined._spec)
        for count in (first.small_size, first.large_size)
    )
    return (Batches(small, large, first.small_size, first.large_size),)


def _at(family: Batches, size: int) -> Any:
    """A batch of a size, the one that was drawn where it is of this size."""
    known = {family.large_size: family.large, family.small_size: family.small}
    return known[size] if size in known else family.real(size, torch.device("cpu"))


# -- resizing


def resized(loader: Any, batch_size: int, fixed_because: str = "") -> Any:
    """A loader like this one at another batch size, over the same dataset and sampler.

    A subclass keeps its type and attributes: nothing of its constructor runs again.

    Raises:
        CannotResizeLoaderError: the loader has no batch size that could be changed.
    """
    source = _source(loader, "the loader")
    reason = fixed_because or source.fixed_because
    if reason:
        raise CannotResizeLoaderError(f"{reason[0].upper()}{reason[1:]}; pass a DataLoader with `batch_size=`.")
    if source.batch_size == batch_size:
        return loader
    return _resized(loader, batch_size) if isinstance(loader, DataLoader) else _foreign_at(loader, batch_size)


def _resized(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    clone: Any = samples.copied(loader)
    planner: Any = loader.batch_sampler
    # DataLoader refuses to have these set after construction; a copy has not been iterated yet
    if samples.built_in(planner):
        clone.__dict__["batch_size"] = batch_size
        clone.__dict__["batch_sampler"] = type(planner)(planner.sampler, batch_size, planner.drop_last)
    else:
        clone.__dict__["batch_sampler"] = _sampler_at(planner, batch_size)
    clone.__dict__["_iterator"] = None
    _note_size(clone, batch_size)
    return clone  # type: ignore[no-any-return]


def _note_size(made: Any, batch_size: int) -> None:
    """Lightning notes how a hook made a loader, to make it again with another sampler (checked on 2.5.0 to 2.6.6)."""
    kwargs = made.__dict__.get("__pl_saved_kwargs")
    if kwargs is None:
        return
    names = made.__dict__.get("__pl_saved_arg_names", ())
    if "batch_size" in names:
        place = names.index("batch_size")
        args = made.__dict__["__pl_saved_args"]
        made.__dict__["__pl_saved_args"] = (*args[:place], batch_size, *args[place + 1 :])
    elif "batch_size" in kwargs or (
        samples.built_in(getattr(made, "batch_sampler", None))
        and "batch_size" in inspect.signature(type(made).__init__).parameters
    ):
        made.__dict__["__pl_saved_kwargs"] = {**kwargs, "batch_size": batch_size}


def apply(trainer: Any, role: Role, batch_size: Callable[[], int]) -> Callable[[], None]:
    """Have a run take its batches at a size, asked for whenever its loaders are made.

    Returns:
        A function that gives the Trainer its own data source back, for when the run is over.
    """
    loop = _LOOPS[role](trainer)
    before = loop._data_source

    class Resizing(type(before)):  # type: ignore[misc]
        def dataloader(self) -> Any:
            size = batch_size()
            return _all_resized(trainer, super().dataloader(), role, size)

    loop._data_source = Resizing(before.instance, before.name)

    def undo() -> None:
        if type(loop._data_source) is Resizing:
            loop._data_source = type(before)(loop._data_source.instance, before.name)

    return undo


def _all_resized(trainer: Any, tree: Any, role: Role, batch_size: int) -> Any:
    """The loaders at a size; as they are where a hook now gives others, that cannot be resized."""
    try:
        found = _found(trainer, tree, "the loader", role)
        loaders = [
            resized(source.loader, batch_size * found.factor(source) // found.unit, found.fixed_because)
            for source in found.sources
        ]
    except Exception as error:  # noqa: BLE001 - what the user's hook gave is trained with as it is
        warnings.warn(f"MemGuard left the {role} loader as it is: {error}", stacklevel=2)
        return tree
    found.combined.flattened = loaders
    if isinstance(tree, type(found.combined)):
        return found.combined
    return tree_unflatten(loaders, found.combined._spec)


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
