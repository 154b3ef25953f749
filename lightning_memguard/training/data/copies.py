"""Copies of the user's datasets, samplers and loaders to read from, so that nothing of the user's is consumed or moved.

A run's data is read in a forked child, with which all that moves ends. Where none can be forked, and in a plan, files
are opened, generators draw and counters advance here: on copies, or what moves is set back, or reading is refused.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import io
import multiprocessing.queues
import queue
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase, synchronized
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from lightning_memguard.core.capture.capture import isolated
from lightning_memguard.core.foreign import LIBRARIES
from lightning_memguard.core.isolation.pool import can_fork, is_forked
from lightning_memguard.core.objects import closed_over, package_of, users_classes, walk
from lightning_memguard.core.simulation.fake import isolated_rng
from lightning_memguard.errors import CannotTraceError

T = TypeVar("T")

_MAX_DEPTH = 6  # of what is copied: what lies deeper is shared
_MAX_SEARCHED = 100  # entries of a container that are looked into
_MAX_COPIED = 100_000  # entries of a container, or bytes in shared memory, that are copied


def refuse_one_shot(loader: object) -> None:
    """Refuse an iterator, or what holds one: a batch drawn here would be lost to the training.

    A forked child may move what is in its memory; it refuses what is outside of it.

    Raises:
        CannotTraceError: ``loader`` is one, or holds one.
    """
    if isinstance(loader, Iterator) and not is_forked():
        raise CannotTraceError(
            f"the data is a {type(loader).__name__}, which can be read only once: drawing a sample would take it from "
            "the training. Pass something that makes a new iterator in `__iter__`, such as a DataLoader"
        )
    refuse_held_iterators(loader)


def refuse_held_iterators(holder: object) -> None:
    """Refuse a loader or dataset that holds, at any depth, a running iterator that cannot be set back."""
    found = walk([(type(holder).__name__, holder)], _named_members, itemgetter(1), _MAX_COPIED)
    for label, value in islice(found, 1, None):
        if _is_read_once(value):
            raise CannotTraceError(
                f"{label} is a {type(value).__name__}, which can be read only once: "
                "drawing a sample would take it from the training. Make the iterator in `__iter__`."
            )


def _named_members(found: tuple[str, object]) -> Iterator[tuple[str, object]]:
    """Objects that an object refers to, each with what it is called."""
    name, thing = found
    if isinstance(thing, _LEAVES):
        return
    own = {} if isinstance(thing, (type, types.FunctionType)) else getattr(thing, "__dict__", {})
    for attribute, value in own.items():
        yield f"{type(thing).__name__}.{attribute}", value
    for value in _members(thing):
        yield f"what {thing.__name__} reads" if isinstance(thing, types.FunctionType) else name, value


def _is_read_once(thing: object) -> bool:
    if isinstance(thing, _QUEUES):
        return True
    is_file = isinstance(thing, io.IOBase)
    if not isinstance(thing, Iterator) or _is_of_torch(thing) or (is_forked() and not is_file):
        return False
    return not (is_file and _can_seek(thing))


_QUEUES = (queue.Queue, queue.SimpleQueue, multiprocessing.queues.Queue, multiprocessing.queues.SimpleQueue)
_LEAVES = (str, bytes, int, float, complex, types.NoneType, types.ModuleType, torch.Tensor, np.ndarray)


def _is_of_torch(thing: object) -> bool:
    """Whether it is an iterator of torch's own, as a DataLoader with persistent workers keeps: it begins again."""
    return type(thing).__module__.startswith(("torch.", "torchdata."))


def _can_seek(file: Any) -> bool:
    with contextlib.suppress(ValueError):  # a closed file
        try:
            return bool(file.seekable() and file.tell() >= 0)
        except OSError:  # text that is read line by line
            return is_forked()
    return True


def apart(work: Callable[[], T]) -> T:
    """Run work that calls the user's code where it moves nothing: in a child, if this is not one and there can be one.

    Raises:
        Exception: that code raised.
    """
    return work() if is_forked() or not can_fork() else isolated(work)


def shallow_copy(thing: T) -> T:
    """A copy that shares all attributes; when it is deleted, nothing is closed that the original still needs."""
    clone, kind = copy.copy(thing), type(thing)
    if clone is not thing and hasattr(kind, "__del__"):
        names = {"__slots__": (), "__module__": kind.__module__, "__doc__": kind.__doc__, "__del__": lambda _: None}
        clone.__class__ = type(kind.__name__, (kind,), names)
    return clone


def copy_for_reading(thing: T) -> T:
    """Copy a dataset or sampler and what it is made of: files are opened and counters advance in the copy alone."""
    clone: T = _copy_for_reading(thing, {}, _MAX_DEPTH)
    return clone


def _copy_for_reading(thing: object, copies: dict[int, Any], depth: int) -> Any:
    if id(thing) in copies:
        return copies[id(thing)]
    if isinstance(thing, types.MethodType):
        return types.MethodType(thing.__func__, _copy_for_reading(thing.__self__, copies, depth))
    if type(thing) in (list, dict, set, deque) or isinstance(thing, SynchronizedBase):
        return _copy_container(thing, copies, depth)
    wanted = depth == _MAX_DEPTH or isinstance(thing, (Dataset, Sampler)) or _is_plain(thing)
    if depth < 0 or not wanted or not hasattr(thing, "__dict__") or _is_code(thing):
        return thing
    try:
        clone = shallow_copy(thing)
        copies[id(thing)] = clone
        for name, value in list(vars(clone).items()):
            clone.__dict__[name] = _copy_for_reading(value, copies, depth - 1)
    except Exception:  # noqa: BLE001 - a thing that refuses to be copied is read as it is
        return thing
    return clone


def _copy_container(thing: Any, copies: dict[int, Any], depth: int) -> Any:
    if isinstance(thing, SynchronizedBase):  # in memory that workers share
        shared = thing.get_obj()
        return thing if ctypes.sizeof(shared) > _MAX_COPIED else synchronized(type(shared).from_buffer_copy(shared))
    if len(thing) > _MAX_COPIED or depth < 0:
        return thing
    clone = copies[id(thing)] = copy.copy(thing)
    if len(thing) <= _MAX_SEARCHED and not isinstance(thing, set):
        for key, value in list(thing.items() if isinstance(thing, dict) else enumerate(thing)):
            clone[key] = _copy_for_reading(value, copies, depth - 1)
    return clone


def _is_code(thing: object) -> bool:
    return isinstance(thing, (type, types.ModuleType, types.FunctionType, torch.Tensor, torch.nn.Module, np.ndarray))


def _is_plain(thing: object) -> bool:
    """Whether an object of the user's is just its attributes: its class does not define how it is copied."""
    kind = type(thing)
    if package_of(kind) in LIBRARIES | {"builtins"}:  # Python's other classes have a state, too, as an open archive
        return False
    names = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__")
    return all(getattr(kind, name, None) is getattr(object, name, None) for name in names)


@contextlib.contextmanager
def preserve_state(thing: object) -> Iterator[None]:
    """Afterwards, set back the global random state, and the generators and open files that an object refers to."""
    restores = [*filter(None, map(_restore, walk([thing], _members)))]
    with isolated_rng():
        try:
            yield
        finally:
            for restore in restores:
                restore()


def _restore(thing: object) -> Callable[[], object] | None:
    """Return a function that sets a generator or a file back to where it is; None for other things."""
    if isinstance(thing, (torch.Generator, np.random.RandomState)):
        return functools.partial(thing.set_state, thing.get_state())  # type: ignore[arg-type]
    if isinstance(thing, np.random.Generator):
        return functools.partial(setattr, thing.bit_generator, "state", copy.deepcopy(thing.bit_generator.state))
    if isinstance(thing, random.Random):
        return functools.partial(thing.setstate, thing.getstate())
    if isinstance(thing, io.IOBase):
        with contextlib.suppress(OSError, ValueError):
            return functools.partial(thing.seek, thing.tell())
    return None


def _members(thing: object) -> Iterable[object]:
    if isinstance(thing, (list, tuple, dict, set, deque)):
        values = thing.values() if isinstance(thing, dict) else thing
        return values if len(thing) <= _MAX_SEARCHED else ()
    if isinstance(thing, types.MethodType):
        return (thing.__self__, thing.__func__)
    if isinstance(thing, functools.partial):
        return (thing.func, *thing.args, *thing.keywords.values())
    if isinstance(thing, types.FunctionType):
        return _used_by(thing)
    if _is_code(thing):
        return ()
    kinds = users_classes(type(thing))
    of_classes = [value for kind in kinds for name, value in vars(kind).items() if name != "__init__"]
    methods = [value for value in of_classes if isinstance(value, types.FunctionType)]
    held = [value for value in of_classes if not _is_code(value) and not hasattr(type(value), "__get__")]
    return (*getattr(thing, "__dict__", {}).values(), *methods, *held)


def _used_by(function: types.FunctionType) -> Iterator[object]:
    """Yield the objects that a function closes over, and the generators and files among the globals that it names."""
    yield from (each for _, each in closed_over(function))
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (*_MOVED, Iterator)):
            yield value


_MOVED = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random, io.IOBase)
