"""The loaders of a run: what they are, which batch sizes suit them, and having a run take its batches at one size."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_memguard.core.decision.decision import LimitedBy, largest_that
from lightning_memguard.core.isolation.pool import is_forked
from lightning_memguard.core.simulation.fake import fake_copy, shared_copy
from lightning_memguard.core.torch_port import FakeTensorMode
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.adapter import stand_ins
from lightning_memguard.training.data import resizing
from lightning_memguard.training.data.copies import apart, preserve_state
from lightning_memguard.training.data.set_sizes import sets_its_size
from lightning_memguard.training.facts import lightning_port as lightning
from lightning_memguard.training.facts.lightning_types import lightning_of
from lightning_memguard.training.facts.ranks import warn
from lightning_memguard.training.facts.run_facts import LIMIT_NAMES, LOOPS, Role, RunFacts

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from pytorch_lightning.utilities import CombinedLoader


@dataclass(frozen=True)
class Source:
    """One loader, as the run would use it.

    Attributes:
        held: the loader alone, or nothing while the run makes its own.
        batch_size: samples per batch; 0 if it has no such setting.
        fixed_because: why the batch size cannot be changed; empty if it can.
        ranks: how many the Trainer will spread its samples over.
        end: how many samples a stream without a length has, if its end was reached.
        is_torch: whether it is a DataLoader.
        drops_last: whether an epoch leaves out a last batch that is not full.
        own_batches: whether the user's code makes the batches; then ``counts`` has how many at which size, as asked.
        was_set: whether someone has set the batch size.
    """

    held: list[Iterable[Any]]
    batch_size: int
    fixed_because: str = ""
    ranks: int = 1
    end: int | None = None
    is_torch: bool = True
    drops_last: bool = False
    own_batches: bool = False
    counts: dict[int, int | None] = field(default_factory=dict, compare=False)
    was_set: bool = True

    @property
    def loader(self) -> Iterable[Any]:
        """A loader like the run's; not to be iterated."""
        return self.held[0]

    def detached(self) -> Source:
        """Return what is known of the loader, without it."""
        known = copy.copy(self)
        vars(known).update(held=[], dataset_size=self.dataset_size)
        return known

    @functools.cached_property
    def dataset_size(self) -> int | None:
        """Samples that can be in one batch of this rank, at most all of an epoch's; None if unknown."""
        with preserve_state(self.loader), contextlib.suppress(TypeError, NotImplementedError):
            if not isinstance(self.loader, DataLoader):
                return None if self.fixed_because else len(resizing.trial_at(self.loader, 1))
            if isinstance(self.loader.dataset, IterableDataset):
                return self.largest_of_stream(len(self.loader.dataset))  # type: ignore[arg-type]
            sampler = getattr(self.loader.batch_sampler, "sampler", self.loader.sampler)
            ranks = 1 if isinstance(sampler, DistributedSampler) else self.ranks
            size = -(-len(sampler) // ranks)  # type: ignore[arg-type]
            if self.fixed_because or not resizing.makes_own_batches(self.loader):
                return size
            return apart(lambda: largest_that(self._fills_a_batch, self.batch_size, size))
        return None if self.end is None or self.fixed_because else self.largest_of_stream(self.end)

    def _fills_a_batch(self, batch_size: int) -> bool:
        """Whether a batch sampler of the user's own fills its first batch at a size."""
        with contextlib.suppress(Exception):
            return resizing.first_batch_size(self.loader, batch_size) == batch_size
        return False

    def largest_of_stream(self, count: int) -> int:
        """The largest batch that a stream of so many samples fills; each worker fills batches of its own."""
        split = self.is_torch and self.drops_last
        workers = max(1, self.loader.num_workers) if split else 1  # type: ignore[attr-defined]
        return max(count // workers, min(self.batch_size, count))

    def batches(self, batch_size: int) -> int | None:
        """Batches an epoch on this rank at a batch size, or None if unknown."""
        if self.own_batches and batch_size not in self.counts and self.held:
            self.counts[batch_size] = self._counted(batch_size)
        count = self.counts.get(batch_size)
        if count is not None or (self.own_batches and self.fixed_because):
            return count
        if self.dataset_size is None or not batch_size:
            return None
        full, rest = divmod(self.dataset_size, batch_size)
        return full + (1 if rest and not self.drops_last else 0)

    def _counted(self, batch_size: int) -> int | None:
        """Count by the user's own code; None if that cannot."""
        with preserve_state(self.loader), contextlib.suppress(Exception):
            at: Any = self.loader if self.fixed_because else resizing.trial_at(self.loader, batch_size)
            return -(-len(at) // (self.ranks if isinstance(at, DataLoader) else 1))
        return None


@dataclass(frozen=True)
class LoaderInfo:
    """The data of a run: one loader, or several whose batches are combined or come in turn.

    Attributes:
        combined: the loader or loaders as Lightning's CombinedLoader; a copy, not to be iterated. None in a process
            that has not read them.
        mode: how Lightning combines several: ``"max_size_cycle"``, ``"min_size"``, ``"max_size"`` or ``"sequential"``.
        sources: its loaders, in order.
        origin: where it comes from, in words.
        role: what the run uses them for.
        is_counted: whether Lightning knows how many batches there are.
    """

    combined: CombinedLoader | None
    mode: str
    sources: tuple[Source, ...]
    origin: str
    role: Role = "train"
    is_counted: bool = True

    def detached(self) -> LoaderInfo:
        """Return what is known of the data, without its loaders."""
        return replace(self, combined=None, sources=tuple(source.detached() for source in self.sources))

    def learn(self, info: LoaderInfo) -> None:
        """Know the counts of batches that were found elsewhere for the same loaders."""
        for mine, theirs in zip(self.sources, info.sources, strict=True):
            mine.counts.update(theirs.counts)

    def with_ends(self, ends: Iterable[int | None]) -> LoaderInfo:
        """Return the data with the length of streams whose end was reached."""
        known = zip(self.sources, ends, strict=True)
        return replace(self, sources=tuple(replace(source, end=end) for source, end in known))

    def let_go(self) -> None:
        """Let go of the loaders: a hook may be about to make them again, with all the data that they hold."""
        if self.combined is not None:
            self.combined.flattened = [None] * len(self.sources)
        for source in self.sources:
            source.held.clear()

    def adopt(self, info: LoaderInfo) -> None:
        """Hold the loaders that the run has made, be they as many or not."""
        for source, made in zip(self.sources, itertools.cycle(info.sources)):
            source.held[:] = made.held

    @property
    def batch_size(self) -> int:
        """Samples a batch; of several loaders, the smallest: the others keep their ratio to it. 0 if unknown."""
        return min((source.batch_size for source in self.sources if source.batch_size), default=0)

    @property
    def was_set(self) -> bool:
        """Whether someone has set the batch size of any loader: the others keep their ratio to it."""
        return any(source.was_set for source in self.sources)

    @property
    def full_size(self) -> int:
        """Samples in a full batch: a single loader may have fewer in all than its batch size."""
        most = self.dataset_size if len(self.sources) == 1 else None
        return min(self.batch_size, most or self.batch_size)

    @property
    def unit(self) -> int:
        """Unit whose multiples keep the loaders' batch sizes in ratio; 1 for one loader, or several of one size."""
        return self.batch_size // (math.gcd(*(source.batch_size for source in self.sources)) or 1) or 1

    @property
    def fixed_because(self) -> str:
        """Why the batch size cannot be changed; empty if it can."""
        mixed = len(self.sources) > 1 and not all(each.is_torch for each in self.sources)
        known = next((source.fixed_because for source in self.sources if source.fixed_because), "")
        return known or (f"{self.origin} combines loaders that are not all torch DataLoaders" if mixed else "")

    @property
    def dataset_size(self) -> int | None:
        """The largest batch size that the data of this rank can fill, or None if unknown."""
        known = [
            source.dataset_size * self.batch_size // source.batch_size if self.batch_size else source.dataset_size
            for source in self.sources
            if source.dataset_size is not None and (source.batch_size or not self.batch_size)
        ]
        return min(known, default=None)

    def factor(self, source: Source) -> int:
        """How many samples a loader's batch has for each `unit` of the batch size."""
        return source.batch_size * self.unit // self.batch_size if self.batch_size else 1

    def size_of(self, source: Source, batch_size: int) -> int:
        """The batch size of one loader at a batch size of the whole."""
        return batch_size * self.factor(source) // self.unit

    def batches(self, batch_size: int) -> int | None:
        """Batches an epoch on this rank at a batch size, or None if unknown."""
        known = [count for count in self.counts(batch_size) if count is not None]
        return self.combined_count(known) if len(known) == len(self.sources) else None

    @property
    def batches_per_epoch(self) -> Callable[[int], int | None] | None:
        """`batches`, if the data has a size."""
        return self.batches if self.dataset_size is not None else None

    def counts(self, batch_size: int) -> list[int | None]:
        """Batches an epoch of each loader at a batch size of the whole."""
        return [source.batches(self.size_of(source, batch_size)) for source in self.sources]

    def combined_count(self, counts: list[int]) -> int:
        """Batches of the whole if its loaders have so many each."""
        return min(counts) if self.mode == "min_size" else sum(counts) if self.mode == "sequential" else max(counts)


def find(facts: RunFacts, role: Role) -> LoaderInfo:
    """Find the loaders of a run that has not started.

    Raises:
        CannotTraceError: there is none, its hook cannot run on a copy, or its dataset is empty.
    """
    owner, hook, package = facts.sources[role].instance, facts.sources[role].hook, lightning_of(facts.strategy)
    with preserve_state(owner):
        if isinstance(owner, package.LightningDataModule):
            loader, origin = _call_loader_hook(copy.copy(owner), hook), f"the datamodule's {hook}()"
        elif isinstance(owner, package.LightningModule):
            # data may come from the model, as a rollout does; outside of a child, the copy has no memory
            module: Any = shared_copy(owner) if is_forked() else fake_copy(owner, FakeTensorMode(), torch.device("cpu"))
            with contextlib.suppress(RuntimeError):  # a plan's module has no Trainer
                module.trainer = quiet = stand_ins.QuietTrainer(owner.trainer.fit_loop.trainer)  # noqa: F841 - held weakly
            module.setup(stage=lightning.stage_named("fit" if role in ("train", "val") else role, package))
            loader, origin = _call_loader_hook(module, hook), f"the module's {hook}()"
        else:
            loader = owner
            origin = f"fit({role}_dataloaders=...)" if role in ("train", "val") else f"{role}(dataloaders=...)"
    if loader is None:
        raise CannotTraceError(f"{origin} returned no loader: there is no batch to predict from.")
    info = info_of(facts, loader, origin, role)
    if info.dataset_size == 0:
        raise CannotTraceError(f"The dataset behind {origin} is empty: there is no sample to predict from.")
    return info


def _call_loader_hook(owner: Any, hook: str) -> Any:
    with lightning.recording_loaders(owner):
        return getattr(owner, hook)()


def info_of(facts: RunFacts, loaders: object, origin: str, role: Role) -> LoaderInfo:
    """Read a loader, or a nesting of loaders, that a run was given."""
    combined = lightning.combine(
        loaders, "max_size_cycle" if role == "train" else "sequential", lightning_of(facts.strategy)
    )
    ranks = facts.data_ranks if facts.uses_distributed_sampler else 1
    recreated = ranks > 1 or role == "predict" or facts.overfit_batches > 0
    sources = (source_of(loader, origin, ranks, recreated=recreated) for loader in combined.flattened)
    return LoaderInfo(combined, lightning.mode_of(combined), tuple(sources), origin, role)


def source_of(loader: Iterable[Any], origin: str, ranks: int = 1, *, recreated: bool = False) -> Source:
    """Read one loader; Lightning divides its samples among ``ranks``, or recreates it for another reason."""
    with preserve_state(loader):
        fixed, size = resizing.why_fixed(loader, origin, recreated=recreated), resizing.batch_size_setting(loader)
        is_torch = isinstance(loader, DataLoader)
        return Source(
            [loader],
            size,
            fixed,
            ranks if is_torch else 1,
            is_torch=is_torch,
            drops_last=resizing.drops_last(loader),
            own_batches=resizing.makes_own_batches(loader),
            was_set=size != 1 or sets_its_size(loader),
        )


def _has_length(source: Source) -> bool:
    with contextlib.suppress(TypeError, NotImplementedError):
        return len(source.loader) >= 0  # type: ignore[arg-type]
    return False


def largest_for(facts: RunFacts, info: LoaderInfo) -> int | None:
    """The largest batch size that a run's data can fill, and at which the Trainer still finds enough batches.

    With fewer batches an epoch, Lightning refuses an int ``val_check_interval`` above their number, and a share in
    ``limit_train_batches`` (or ``limit_val_batches``, ...) that rounds down to no batch of a loader. Checked on 2.5.0
    to 2.6.6.
    """
    most = info.dataset_size
    if most is None or not info.batch_size or info.fixed_because:
        return most
    if len(info.sources) > 1:
        most = max(most, info.batch_size)  # a loader with fewer samples does not make the others' batches smaller
    limit, interval, needed = facts.limits[info.role], facts.val_check_interval, 1
    if info.role == "train" and isinstance(interval, int) and facts.check_val_every_n_epoch is not None:
        # Lightning does not know where a stream ends
        needed = interval if facts.limits["val"] > 0 and all(map(_has_length, info.sources)) else 1

    def has_enough_batches(size: int) -> bool:
        counts = [1 << 62 if count is None else count for count in info.counts(size)]
        limited = [int(count * limit) if isinstance(limit, float) else min(count, limit) for count in counts]
        return min(limited, default=0) > 0 and info.combined_count(limited) >= needed

    if has_enough_batches(info.batch_size):
        return largest_that(has_enough_batches, info.batch_size, most)
    return largest_that(has_enough_batches, 1, info.batch_size) if has_enough_batches(1) else info.batch_size


def limit_of(facts: RunFacts, info: LoaderInfo, largest: int | None) -> LimitedBy:
    """Name the limit behind `largest_for`: the dataset, or a Trainer's argument that needs more batches."""
    if largest is None or largest == info.dataset_size:
        return "dataset"
    limit, counts = facts.limits[info.role], info.counts(largest + 1)
    if isinstance(limit, float) and any(count and not int(count * limit) for count in counts):
        return "overfit_batches" if facts.overfit_batches else LIMIT_NAMES[info.role]
    return "val_check_interval" if info.role == "train" and isinstance(facts.val_check_interval, int) else "dataset"


def spoiled_by(facts: RunFacts, info: LoaderInfo, batch_size: int, min_steps: int | None) -> LimitedBy | None:
    """Return what forbids a batch size, since an epoch would not be as it should be; None if nothing does.

    An epoch keeps ``min_steps`` optimizer steps, or those that it has at the loader's own size if these are fewer or of
    an unknown number; and if a limit counts batches, it sees no more samples than there.
    """
    if batch_size <= info.batch_size:
        return None
    counts_steps = info.role == "train" and min_steps is not None
    taken, own = (batches_taken(facts, info, size) for size in (batch_size, info.batch_size))
    if taken is None or own is None:
        return "min_steps_per_epoch" if counts_steps else None
    if own != info.batches(info.batch_size) and taken * batch_size > own * info.batch_size:
        return "overfit_batches" if facts.overfit_batches else LIMIT_NAMES[info.role]
    steps, own_steps = (math.ceil(count / facts.accumulate_grad_batches) for count in (taken, own))
    return "min_steps_per_epoch" if counts_steps and steps < min(min_steps or 0, own_steps) else None


def epoch_size_for(facts: RunFacts, info: LoaderInfo, min_steps: int | None) -> tuple[int | None, LimitedBy]:
    """Return the largest useful batch size that leaves an epoch as it should be, None if any does, and what sets it."""
    own, most = info.batch_size, info.dataset_size or _MANY
    if not own or info.fixed_because:
        return None, "min_steps_per_epoch"
    size = largest_that(lambda size: spoiled_by(facts, info, size, min_steps) is None, own, max(own, most))
    limit = spoiled_by(facts, info, size + 1, min_steps) if size < most else None
    if limit == "min_steps_per_epoch" and not any(each.drops_last for each in info.sources):
        # the smallest size that makes as few batches: the last one is as full
        count = batches_taken(facts, info, size) or 0
        size = own + bisect_left(range(own, size), True, key=lambda at: (batches_taken(facts, info, at) or 0) <= count)
    return (size, limit) if limit else (None, "min_steps_per_epoch")


_MANY = 1 << 20  # samples of a dataset without a length


def batches_taken(facts: RunFacts, info: LoaderInfo, batch_size: int) -> int | None:
    """Batches of an epoch that the Trainer takes at a batch size, without ``fast_dev_run``; None if unknown."""
    count, limit = info.batches(batch_size), 1.0 if facts.is_rehearsal else facts.limits[info.role]
    if count is None:
        return limit if isinstance(limit, int) else None
    return int(count * limit) if isinstance(limit, float) else min(count, limit)


def divided(facts: RunFacts, info: LoaderInfo, batch_size: int, pieces: int) -> RunFacts:
    """Return the settings of a fit whose batches of a size are divided; see `RunFacts.divided`.

    Without a last batch of fewer samples, an epoch ends on a whole step: pieces of what was left out are left out.
    """
    scaled, count, limit = facts.divided(pieces), batches_taken(facts, info, batch_size), facts.limits["train"]
    is_whole = all(each.drops_last for each in info.sources) or (isinstance(limit, float) and limit < 1)
    if pieces == 1 or facts.is_rehearsal or count is None or not is_whole or len(info.sources) > 1:
        return scaled
    return replace(scaled, limits={**scaled.limits, "train": count * pieces})


def leaves_one(info: LoaderInfo, batch_size: int) -> bool:
    """Whether an epoch would end on a single sample, which batch norm refuses, and would not at the user's own size."""

    def rest(source: Source, size: int) -> int:
        samples = None if source.drops_last else source.dataset_size
        return (samples or 0) % size if size > 1 else 0

    sources = [source for source in info.sources if rest(source, source.batch_size) != 1]
    return any(rest(source, info.size_of(source, batch_size)) == 1 for source in sources)


def leaves_out(info: LoaderInfo, batch_size: int) -> bool:
    """Whether ``drop_last`` leaves out samples at a larger batch size that an epoch has at the user's own."""

    def seen(source: Source, size: int) -> int:
        return (source.batches(size) or 0) * size

    dropping = [source for source in info.sources if source.drops_last]
    larger = [(source, size) for source in dropping if (size := info.size_of(source, batch_size)) > source.batch_size]
    return any(seen(source, size) < seen(source, source.batch_size) for source, size in larger)


def rewrite_loaders(
    trainer: Trainer,
    facts: RunFacts,
    known: LoaderInfo,
    batch_size: Callable[[], int] | None,
    *,
    made: Callable[[int], object] = lambda _: None,
) -> Callable[[], None]:
    """Make a run take batches of another size, whenever its loaders are made.

    Loaders that a hook makes at a size of its own, as for larger pictures from some epoch on, are left at that.

    Args:
        trainer: of the run, before MemGuard sets any batch size.
        facts: its settings.
        known: the loaders as they were read at setup, which are freed; without ``batch_size``, that is all.
        batch_size: asked for the size whenever the loaders are made.
        made: told the size of such loaders, and 0 of others.

    Returns:
        A function that gives the Trainer its own data source back, for when the run is over.
    """
    owner = facts.sources[known.role].instance
    before, settings = _own_settings(owner), list[tuple[int, int]]()

    def change(make_loaders: Callable[[], object]) -> object:
        size = batch_size() if batch_size else 0
        if not settings:  # what is set later is the user's
            settings.extend(zip(before, _own_settings(owner), strict=False))
        known.let_go()
        try:
            loaders = make_loaders()
        except Exception as error:
            was_here = known.combined is not None
            if sys.version_info >= (3, 11) and was_here and known.origin.endswith("dataloader()"):
                error.add_note(f"MemGuard called {known.origin} once before. If it works only once, pass the loader.")
            raise
        return _resize_all(facts, loaders, known, size, settings, made)

    return lightning.intercept_loaders(LOOPS[known.role](trainer), change)


def _own_settings(owner: object) -> list[int]:
    """Batch sizes that a module or datamodule is set to, which its hooks may read; 0 in place of others."""
    return [each if type(each) is int else 0 for each in lightning.batch_sizes_of(owner)]


def _resize_all(
    facts: RunFacts,
    loaders: object,
    known: LoaderInfo,
    batch_size: int,
    settings: Sequence[tuple[int, int]],
    made: Callable[[int], object],
) -> object:
    """The loaders at a size, if one is given; unchanged if a hook now gives others, that cannot be resized.

    A hook that gives loaders of another size than at setup has decided that, unless it follows one of the ``settings``,
    as it was then and as MemGuard has set it.
    """
    try:
        info, asked = info_of(facts, loaders, "the loader", known.role), known.batch_size
        known.adopt(info)
        own, size = info.batch_size, batch_size or asked
        is_as_before = own in (asked, size) or any(then and own * then == asked * now for then, now in settings)
        made(0 if is_as_before else own)
        if not is_as_before and asked:
            return loaders
        if not batch_size or (batch_size < info.batch_size and batch_size == info.full_size):
            return loaders
        sized = [(source.loader, info.size_of(source, batch_size)) for source in info.sources]
        resized = [resizing.resize(loader, size, info.fixed_because) for loader, size in sized]
    except Exception as error:  # noqa: BLE001 - what the user's hook gave is trained with as it is
        if batch_size:
            warn(f"MemGuard left the {known.role} loader as it is: {error}", stacklevel=1)
        return loaders
    combined: Any = info.combined
    combined.flattened = resized
    return combined if isinstance(loaders, type(combined)) else lightning.arrange(combined, resized)


def loaders_at(facts: RunFacts, known: LoaderInfo, role: Role, batch_size: int) -> object:
    """A run's loaders for its step to read, nested as they were given; None if the run has none.

    Those that are known are at a batch size, others at their own.
    """
    if role != known.role and {role, known.role} != {"val", "validate"}:
        if {role, known.role} == {"train", "val"}:
            with contextlib.suppress(Exception):  # of the user's hook
                info = find(facts, role)
                return lightning.arrange(info.combined, [source.loader for source in info.sources])
        return None
    if known.combined is None or not all(source.held for source in known.sources):
        known = find(facts, known.role)
    fixed = bool(known.fixed_because)
    sized = [(source.loader, known.size_of(source, batch_size)) for source in known.sources]
    own = [loader if fixed else resizing.resize(loader, size, "") for loader, size in sized]
    return lightning.arrange(known.combined, own)
