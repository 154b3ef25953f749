"""Copies of a loader at another batch size: whether that is possible, and how. The user's own is never changed."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from lightning_memguard.core.batch.nesting import batch_size_of
from lightning_memguard.errors import CannotResizeLoaderError
from lightning_memguard.training.data.copies import (
    apart,
    copy_for_reading,
    preserve_state,
    refuse_one_shot,
    shallow_copy,
)
from lightning_memguard.training.facts.lightning_port import change_recorded_argument, recorded_arguments

_MAX_COUNTED = 1 << 16  # batches


def batch_size_setting(loader: object) -> int:
    """The batch size that a loader is set to; 0 if it has none."""
    size = getattr(loader, "batch_size", 0)
    if isinstance(loader, DataLoader):
        size = size or getattr(loader.batch_sampler, "batch_size", 0)
    return size if type(size) is int else 0


def is_built_in(sampler: object, *classes: type) -> bool:
    """Whether a sampler is exactly of one of torch's classes, or of torchdata's class of that name."""
    kind = type(sampler)
    from_torchdata = kind.__module__.startswith("torchdata.stateful_dataloader")
    return kind in classes or (from_torchdata and kind.__name__ in [each.__name__ for each in classes])


def makes_own_batches(loader: object) -> bool:
    """Whether the user's code makes the batches, so that only that code knows how many there are."""
    return not (isinstance(loader, DataLoader) and is_built_in(loader.batch_sampler, BatchSampler))


def drops_last(loader: object) -> bool:
    """Whether an epoch leaves out a last batch that is not full."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return bool(getattr(loader if batch_sampler is None else batch_sampler, "drop_last", False))


def why_fixed(loader: object, origin: str, *, recreated: bool) -> str:
    """Why a loader's batch size cannot be changed; empty if it can. ``recreated``: Lightning constructs it again."""
    if not isinstance(loader, DataLoader):
        kind = f"{type(loader).__module__.partition('.')[0]}'s {type(loader).__name__}"
        if not batch_size_setting(loader) or isinstance(loader, Iterator):
            return f"{origin} is {kind}, not a torch DataLoader, and has no `batch_size` to change"
        follows = _follows_its_size(loader)
        return "" if follows else f"{origin} is {kind}, whose batches do not follow its `batch_size`"
    if loader.batch_sampler is None:
        return f"{origin} has batch_size=None: its dataset makes the batches itself"
    own = makes_own_batches(loader)
    if own and not _follows_its_size(loader):
        return f"{origin} has a batch sampler of its own ({type(loader.batch_sampler).__name__}) that sets the size"
    if own or not recreated or recorded_arguments(loader) is None or _takes_batch_size(loader):
        return ""
    name = type(loader).__name__
    return f"{origin} is a {name}, which Lightning constructs again and which does not take `batch_size`"


def _follows_its_size(loader: Any) -> bool:
    """Whether the user's own code makes batches of the size that its attribute says, and counts them by that."""
    try:
        return apart(lambda: _makes_batches_of_its_size(loader))
    except Exception:  # noqa: BLE001 - it may be written in any way; what cannot be tried is left alone
        return False


def _makes_batches_of_its_size(loader: Any) -> bool:
    with preserve_state(loader):
        refuse_one_shot(loader)
        if [first_batch_size(loader, size) for size in (2, 3)] != [2, 3]:
            return False
        size = batch_size_setting(loader)
        if isinstance(loader, DataLoader):
            doubled = trial_at(loader, 2 * size)
            count = len(doubled) if hasattr(doubled, "__len__") else 0
            return not 0 < count <= _MAX_COUNTED or sum(1 for _ in itertools.islice(doubled, count + 1)) == count
        return not hasattr(loader, "__len__") or len(trial_at(loader, size)) <= len(trial_at(loader, 1)) // size + 1


def first_batch_size(loader: Iterable[Any], batch_size: int) -> int:
    """How many samples the first batch has when a loader, or a DataLoader's batch sampler, is set to a size."""
    batches = iter(trial_at(loader, batch_size))
    return len(list(next(batches, ()))) if isinstance(loader, DataLoader) else batch_size_of(next(batches))


def _takes_batch_size(made: object) -> bool:
    """Whether Lightning can pass a batch size when it constructs a loader again."""
    recorded = recorded_arguments(made) or ()
    return "batch_size" in recorded or "batch_size" in inspect.signature(type(made).__init__).parameters


def trial_at(loader: Iterable[Any], batch_size: int) -> Any:
    """Return a copy of a loader or its sampler at another size; reading it changes no state of the user's."""
    if isinstance(loader, DataLoader):
        return _sampler_at(copy_for_reading(loader.batch_sampler), batch_size)
    return _copy_at(copy_for_reading(loader), batch_size)


def resize(loader: Iterable[Any], batch_size: int, fixed_because: str) -> Iterable[Any]:
    """A loader like this one at another batch size, over the same dataset and sampler.

    A subclass keeps its type and attributes: its constructor does not run again.

    Raises:
        CannotResizeLoaderError: the size cannot be changed, for the reason that `why_fixed` gave.
    """
    if fixed_because:
        reason = f"{fixed_because[0].upper()}{fixed_because[1:]}"
        raise CannotResizeLoaderError(f"{reason}; pass a DataLoader with `batch_size=`.")
    if batch_size_setting(loader) == batch_size:
        return loader
    if not isinstance(loader, DataLoader):
        return _copy_at(loader, batch_size)  # type: ignore[no-any-return]
    clone = shallow_copy(loader)
    batch_sampler: Any = loader.batch_sampler
    # DataLoader refuses to have these set after construction; a copy has not been iterated yet
    if is_built_in(batch_sampler, BatchSampler):
        resized = type(batch_sampler)(batch_sampler.sampler, batch_size, batch_sampler.drop_last)
        vars(clone).update(batch_size=batch_size, batch_sampler=resized)
    else:
        vars(clone).update(batch_sampler=_sampler_at(batch_sampler, batch_size))
    vars(clone).update(_iterator=None)
    _record_batch_size(clone, batch_size)
    return clone


def _sampler_at(batch_sampler: object, batch_size: int) -> Any:
    """A batch sampler of another size that is the same in all else: attributes set on one are set on the other."""
    kind = type(batch_sampler)
    if type(getattr(batch_sampler, "batch_size", None)) is not int:
        raise CannotResizeLoaderError(f"A {kind.__name__} has no `batch_size` to change.")
    if "batch_size" not in vars(batch_sampler):  # it does something of its own when it is set
        return _copy_at(batch_sampler, batch_size)
    fixed = property(lambda _: batch_size, lambda *_: None)
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "batch_size": fixed, "__del__": lambda _: None}
    clone: Any = object.__new__(type(kind.__name__, (kind,), names))
    clone.__dict__ = vars(batch_sampler)  # one state: an epoch set on the user's own is set here too
    if recorded_arguments(clone) is not None:  # but not what Lightning recorded, which has a size in it
        clone.__dict__ = dict(vars(batch_sampler))
        _record_batch_size(clone, batch_size)
    return clone


def _record_batch_size(made: object, batch_size: int) -> None:
    """Record this size among the arguments with which Lightning constructs a loader or batch sampler again."""
    recorded = recorded_arguments(made)
    if recorded is not None and ("batch_size" in recorded or (not makes_own_batches(made) and _takes_batch_size(made))):
        change_recorded_argument(made, "batch_size", batch_size)


def _copy_at(loader: Any, batch_size: int) -> Any:
    clone = shallow_copy(loader)
    if clone is loader:
        raise CannotResizeLoaderError(f"A {type(loader).__name__} cannot be copied.")
    clone.batch_size = batch_size
    return clone
