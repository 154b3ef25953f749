"""The same loader at another batch size: whether it can be had, and making it. The user's own is never changed."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from lightning_memguard.core.capture.batch import batch_size_of
from lightning_memguard.errors import CannotResizeLoaderError
from lightning_memguard.training.adapter.loader_access import change_recorded_argument, recorded_arguments
from lightning_memguard.training.data.copies import copy_for_reading, refuse_one_shot, shallow_copy

_MAX_COUNTED = 1 << 16  # batches


def batch_size_setting(loader: object) -> int:
    """The batch size that a loader is set to; 0 if it has none."""
    size = getattr(loader, "batch_size", 0)
    if isinstance(loader, DataLoader):
        size = size or getattr(loader.batch_sampler, "batch_size", 0)
    return size if type(size) is int else 0


def is_built_in(batch_sampler: object) -> bool:
    """Whether a batch sampler is torch's own, or torchdata's: nothing but the size decides its batches."""
    kind = type(batch_sampler)
    return kind is BatchSampler or (kind.__name__ == "BatchSampler" and is_of_torchdata(batch_sampler))


def is_of_torchdata(thing: object) -> bool:
    """Whether an object's class comes from torchdata."""
    return type(thing).__module__.startswith("torchdata.stateful_dataloader")


def makes_own_batches(loader: object) -> bool:
    """Whether the user's code makes the batches, so that only that code knows how many there are."""
    if not isinstance(loader, DataLoader):
        return True
    return loader.batch_sampler is None or not is_built_in(loader.batch_sampler)


def drops_last(loader: object) -> bool:
    """Whether an epoch leaves out a last batch that is not full."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return bool(getattr(loader if batch_sampler is None else batch_sampler, "drop_last", False))


# -- whether


def why_fixed(loader: object, origin: str, *, recreated: bool = False) -> str:
    """Why a loader's batch size cannot be changed, naming ``origin``; empty if it can.

    Args:
        loader: the loader; its state may move.
        origin: where it comes from, in words.
        recreated: Lightning will construct it again from its arguments.
    """
    if not isinstance(loader, DataLoader):
        return _why_foreign_is_fixed(loader, origin)
    if loader.batch_sampler is None:
        return f"{origin} has batch_size=None: its dataset makes the batches itself"
    if not is_built_in(loader.batch_sampler) and not _sampler_follows_its_size(loader.batch_sampler):
        return f"{origin} has a batch sampler of its own ({type(loader.batch_sampler).__name__}) that sets the size"
    recorded = recorded_arguments(loader) if recreated and is_built_in(loader.batch_sampler) else None
    if recorded is None or "batch_size" in recorded or _takes_batch_size(loader):
        return ""
    return f"{origin} is a {type(loader).__name__}, which Lightning makes again and which takes no `batch_size`"


def _takes_batch_size(made: object) -> bool:
    return "batch_size" in inspect.signature(type(made).__init__).parameters


def _sampler_follows_its_size(batch_sampler: Any) -> bool:
    """Whether a batch sampler of the user's makes batches of the size that its attribute says, and counts them."""
    try:
        if [first_batch_size(batch_sampler, size) for size in (2, 3)] != [2, 3]:
            return False
        doubled = _sampler_at(copy_for_reading(batch_sampler), batch_sampler.batch_size * 2)
        most = len(doubled) if hasattr(doubled, "__len__") else 0
        counted = sum(1 for _ in itertools.islice(doubled, most + 1)) if 0 < most <= _MAX_COUNTED else most
    except Exception:  # noqa: BLE001 - it may be written in any way; what cannot be tried is left alone
        return False
    return bool(counted == most)


def first_batch_size(batch_sampler: object, batch_size: int) -> int:
    """How many samples a batch sampler puts into its first batch when it is set to a size."""
    return len(list(next(iter(_sampler_at(copy_for_reading(batch_sampler), batch_size)), ())))


def _why_foreign_is_fixed(loader: object, origin: str) -> str:
    """The same for a loader that is not torch's: it is sized by its ``batch_size`` if its batches follow that."""
    kind = f"{type(loader).__module__.partition('.')[0]}'s {type(loader).__name__}"
    if not batch_size_setting(loader) or isinstance(loader, Iterator):
        return f"{origin} is {kind}, not a torch DataLoader, and has no `batch_size` to change"
    return (
        "" if _foreign_follows_its_size(loader) else f"{origin} is {kind}, whose batches do not follow its `batch_size`"
    )


def _foreign_follows_its_size(loader: Any) -> bool:
    try:
        refuse_one_shot(loader)
        if [batch_size_of(next(iter(trial_at(loader, size)))) for size in (2, 3)] != [2, 3]:
            return False
        if not hasattr(loader, "__len__"):
            return True
        one, own = len(trial_at(loader, 1)), len(trial_at(loader, loader.batch_size))
    except Exception:  # noqa: BLE001 - it may be written in any way; what cannot be tried is left alone
        return False
    return bool(own <= one // loader.batch_size + 1)


# -- making it


def trial_at(loader: Iterable[Any], batch_size: int) -> Any:
    """What makes a loader's batches, at another size and to be read: reading it moves nothing of the user's."""
    if isinstance(loader, DataLoader):
        return _sampler_at(copy_for_reading(loader.batch_sampler), batch_size)
    return _copy_at(copy_for_reading(loader), batch_size)


def resize(loader: Iterable[Any], batch_size: int, fixed_because: str) -> Iterable[Any]:
    """A loader like this one at another batch size, over the same dataset and sampler.

    A subclass keeps its type and attributes: its constructor does not run again.

    Args:
        loader: a torch DataLoader, or a loader with a ``batch_size`` that its batches follow.
        batch_size: samples a batch.
        fixed_because: why the size cannot be changed, as `why_fixed` says.

    Raises:
        CannotResizeLoaderError: the size cannot be changed.
    """
    if fixed_because:
        reason = f"{fixed_because[0].upper()}{fixed_because[1:]}"
        raise CannotResizeLoaderError(f"{reason}; pass a DataLoader with `batch_size=`.")
    if batch_size_setting(loader) == batch_size:
        return loader
    return _torch_at(loader, batch_size) if isinstance(loader, DataLoader) else _copy_at(loader, batch_size)


def _torch_at(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    clone = shallow_copy(loader)
    batch_sampler: Any = loader.batch_sampler
    # DataLoader refuses to have these set after construction; a copy has not been iterated yet
    if is_built_in(batch_sampler):
        resized = type(batch_sampler)(batch_sampler.sampler, batch_size, batch_sampler.drop_last)
        vars(clone).update(batch_size=batch_size, batch_sampler=resized)
    else:
        vars(clone).update(batch_sampler=_sampler_at(batch_sampler, batch_size))
    vars(clone).update(_iterator=None)
    _record_batch_size(clone, batch_size)
    return clone


def _sampler_at(batch_sampler: Any, batch_size: int) -> Any:
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
    """Have Lightning, which recorded how a hook constructed a loader or batch sampler, use this size as well."""
    recorded = recorded_arguments(made)
    if recorded is None:
        return
    if "batch_size" in recorded or (is_built_in(getattr(made, "batch_sampler", None)) and _takes_batch_size(made)):
        change_recorded_argument(made, "batch_size", batch_size)


def _copy_at(loader: Any, batch_size: int) -> Any:
    clone = shallow_copy(loader)
    if clone is loader:
        raise CannotResizeLoaderError(f"A {type(loader).__name__} cannot be copied.")
    clone.batch_size = batch_size
    return clone
