"""The user's objects: whose code a thing is, and what objects hold; each answered here once.

A list of packages elsewhere answers another question, which stands above it.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from argparse import Namespace
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_memguard.core.foreign import LIBRARIES

T = TypeVar("T")

_PYTHONS = sys.stdlib_module_names - {"__main__"}
AROUND = LIBRARIES | {"rich"} | _PYTHONS
"""Packages around the user's code: Python's, torch's, Lightning's and ours. Their objects lead everywhere."""
COMPUTE = AROUND | {"torchmetrics", "numpy", "sklearn"}
"""And those whose objects may be the user's, as a metric is, but whose code is known to compute and to count only."""

_INSTALLED = re.compile(r"site-packages|dist-packages|[/\\]lib[/\\]python")
MOST_OBJECTS = 50_000
PLAIN = (bool, int, float, complex, type(None))
DATA = (Dataset, DataLoader)
_RECORDS = (Namespace, SimpleNamespace)


# -- whose code it is


def module_of(thing: object) -> str:
    """The name of the module that a frame, class, function or object is from."""
    if isinstance(thing, FrameType):
        return str(thing.f_globals.get("__name__", ""))
    return str(thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None))


def package_of(thing: object) -> str:
    """The package that a module, frame, class, function or object is from."""
    return module_of(thing).partition(".")[0]


def users_classes(cls: type) -> list[type]:
    """A class and those it inherits from that belong to neither Python, torch nor Lightning."""
    return [each for each in cls.__mro__ if package_of(each) not in AROUND]


def users_members(cls: type) -> dict[str, Any]:
    """Return by name what a class has of the user's own code, inherited or not."""
    return {name: member for each in reversed(users_classes(cls)) for name, member in vars(each).items()}


def is_users(thing: object) -> bool:
    """Whether an object, other than a class or a tensor, is of a class that the user's code or its packages define."""
    return _is_users(type(thing))  # type: ignore[arg-type]  # classes are hashable, but for odd metaclasses


@functools.lru_cache(1024)  # a notebook's classes come and go
def _is_users(kind: type) -> bool:
    return bool(users_classes(kind)) and not issubclass(kind, (type, Tensor))


def is_users_line(frame: FrameType) -> bool:
    """Whether a frame runs the user's code, even from a file that is named as one of Python's, such as ``code.py``."""
    return _is_users_line(module_of(frame), frame.f_code.co_filename)


@functools.cache
def _is_users_line(module: str, file: str) -> bool:
    package = module.partition(".")[0]
    is_pythons = is_installed(file) or file.startswith("<")  # a frozen one
    return package not in AROUND or (package in _PYTHONS and not is_pythons)


def function_of(member: object) -> Any:
    """The function behind a method, a property or a member of a class; another thing as it is."""
    return getattr(member, "__func__", None) or getattr(member, "fget", None) or member


def is_installed(file: str) -> bool:
    """Whether a file was installed, as Python's own and those of packages are."""
    return bool(_INSTALLED.search(file))


# -- what objects hold


def walk(
    roots: Iterable[T],
    inside: Callable[[T], Iterable[T]],
    of: Callable[[T], object] = lambda each: each,
    most: int = MOST_OBJECTS,
) -> Iterator[T]:
    """Yield roots and what they hold, nearest first, each object once.

    ``inside`` says what one holds. With names or places next to objects, ``of`` returns the object.
    """
    queue, seen = deque(roots), dict[int, object]()  # what was seen is kept alive: no other gets its address
    while queue and len(seen) < most:
        each = queue.popleft()
        if id(of(each)) not in seen:
            seen[id(of(each))] = of(each)
            yield each
            with contextlib.suppress(Exception):  # users' objects may raise anything
                queue.extend(inside(each))


def closed_over(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the values that a function closes over, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not filled yet
            yield name, cell.cell_contents


def entries_of(thing: object) -> list[object]:
    """The entries of a container, without texts and numbers; none for other things."""
    values: Iterable[object] = thing if isinstance(thing, (list, tuple, set, frozenset, deque, UserList)) else ()
    values = thing.values() if isinstance(thing, (dict, UserDict)) else values
    return [each for each in values if not isinstance(each, (*PLAIN, str, bytes))]


def held_by(thing: object) -> list[object]:
    """Objects that a container, a module or a user's object holds. Data is left out: it is there without a training."""
    if isinstance(thing, torch.jit.ScriptModule):  # they are not in its dictionary
        return [*thing.parameters(), *thing.buffers()]
    is_data = isinstance(thing, DATA) or hasattr(type(thing), "train_dataloader")
    if isinstance(thing, (nn.Module, *_RECORDS)) or (is_users(thing) and not is_data):
        return [getattr(thing, "__dict__", None)]
    return entries_of(thing)


def tensors_held(*roots: object, but: Iterable[object] = ()) -> Iterator[Tensor]:
    """Yield the tensors that roots hold, at any depth, without what ``but`` holds alone."""
    left_out = {id(each) for each in but}
    found = walk(roots, lambda thing: (each for each in held_by(thing) if id(each) not in left_out))
    return (each for each in found if isinstance(each, Tensor))
