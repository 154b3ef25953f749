"""Which attribute holds a tensor, and which line of the user's code puts it there: objects are walked from named roots.

Python knows who refers to an object, but not by which name; so the walk goes forward, from what the user can name.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import inspect
import re
import sys
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.batch.nesting import is_dense
from lightning_memguard.core.foreign import LIBRARIES

_MOST_OBJECTS = 50_000
_SAMPLED = 256  # entries of a long container that are looked at
# Trainers, loops, loggers and optimizers lead everywhere.
LEAD_EVERYWHERE = LIBRARIES | {"rich", "builtins"}
_PYTHONS = sys.stdlib_module_names - {"__main__"}
_DATA = (Dataset, DataLoader)
_CACHED = type(functools.lru_cache(len))
_PLAIN = (bool, int, float, complex, type(None))
_SHARED = (dict, list, set, deque, _CACHED)  # variables of files and of classes that may grow


@dataclass(frozen=True)
class Holder:
    """An attribute or variable, as its user would write it; ``owner`` is the object or function that it belongs to."""

    name: str
    attribute: str = ""
    owner: object = field(default=None, compare=False, repr=False)


class Holding(NamedTuple):
    """A tensor, an array, a text, or a container, and its bytes.

    If only some entries of a container were looked at, the bytes of one count for others, too. ``in_graph`` if the
    graph of another tensor holds it.
    """

    holder: Holder
    thing: object
    nbytes: float
    in_graph: bool


def holdings(roots: Mapping[str, object]) -> Iterator[Holding]:
    """Walk all that named objects hold, nearest first; each tensor and array comes once."""
    queue: deque[tuple[Holder, Any, float, bool]] = deque()
    queue.extend((Holder(name, name), root, 1.0, False) for name, root in roots.items())
    seen: dict[int, object] = {}  # kept alive, so that none of them is another's address
    while queue and len(seen) < _MOST_OBJECTS:
        holder, thing, weight, in_graph = queue.popleft()
        if isinstance(thing, Tensor) and thing.layout is torch.strided and not thing.is_nested:
            storage = thing.untyped_storage()
            if port.storage_id(storage) not in seen:
                seen[port.storage_id(storage)] = storage
                yield Holding(holder, thing, weight * storage.nbytes(), in_graph)
        if id(thing) in seen or isinstance(thing, _PLAIN):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, np.ndarray) and thing.base is None:
            yield Holding(holder, thing, weight * thing.nbytes, in_graph)
        elif isinstance(thing, (str, bytes, bytearray)):
            yield Holding(holder, thing, weight * sys.getsizeof(thing), in_graph)
        elif isinstance(thing, (dict, list, tuple, set, frozenset, deque)):
            few = list(islice(thing.values() if isinstance(thing, dict) else thing, _SAMPLED))
            plain = sum(sys.getsizeof(each) for each in few if isinstance(each, _PLAIN))
            nbytes, more = weight * sys.getsizeof(thing), weight * max(1.0, len(thing) / _SAMPLED)
            yield Holding(holder, thing, nbytes + more * plain, in_graph)
            queue.extend((holder, each, more, in_graph) for each in few)
        else:
            inside = in_graph or _is_node(thing)
            with contextlib.suppress(Exception):  # users' objects may raise anything
                queue.extend((*found, weight, inside) for found in _in(holder, thing))


def _is_node(thing: object) -> bool:
    return hasattr(type(thing), "next_functions")


def _in(holder: Holder, thing: Any) -> Iterator[tuple[Holder, object]]:
    """Yield the objects that an object holds, each with the name it is known by."""
    if isinstance(thing, Tensor):
        yield from ((holder, each) for each in (thing.grad_fn, port.base_of(thing)))
    elif isinstance(thing, np.ndarray):
        yield holder, thing.base
    elif _is_node(thing):
        yield from ((holder, each) for each in (*(node for node, _ in thing.next_functions), *_saved_by(thing)))
    elif isinstance(thing, FunctionType):
        where = f" in {thing.__qualname__.replace('.<locals>', '')}()"
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty one
                yield Holder(name + where * (name != "self"), name, thing), cell.cell_contents
    elif isinstance(thing, (functools.partial, MethodType)):
        yield from ((holder, each) for each in gc.get_referents(thing))
    elif isinstance(thing, _CACHED):
        name = thing.__wrapped__.__name__
        cache = Holder(f"the cache of {name}()", name, thing.__wrapped__)
        yield from ((cache, each) for each in gc.get_referents(thing))
    elif isinstance(thing, ModuleType):
        yield from ((Holder(name, name, thing), each) for name, each in _shared_of(thing).items())
    elif _is_walked(thing):
        values: dict[str, Any] = {}
        for cls in users_classes(type(thing)):
            slots = vars(cls).get("__slots__", ())
            values |= {name: getattr(thing, name, None) for name in ([slots] if isinstance(slots, str) else slots)}
            values |= _shared_of(cls)
        values |= dict(getattr(thing, "__dict__", {}))
        for name in ("_parameters", "_buffers", "_modules") if isinstance(thing, nn.Module) else ():
            values |= values.pop(name, {})
        yield from ((Holder(f"{holder.name}.{name}", name, thing), value) for name, value in values.items())


def _shared_of(thing: object) -> dict[str, object]:
    named = vars(thing).items()
    return {name: each for name, each in named if isinstance(each, _SHARED) and not name.startswith("__")}


def _is_walked(thing: object) -> bool:
    is_users = bool(users_classes(type(thing))) and not isinstance(thing, (type, BuiltinFunctionType))
    return isinstance(thing, (nn.Module, *_DATA)) or is_users


def users_classes(cls: type) -> list[type]:
    """A class and those it inherits from that belong to neither Python, torch nor Lightning."""
    names = ((each, each.__module__.partition(".")[0]) for each in cls.__mro__)
    return [each for each, name in names if name not in LEAD_EVERYWHERE and name not in _PYTHONS]


def users_members(cls: type) -> dict[str, Any]:
    """Return by name what a class has of the user's own code, inherited or not."""
    return {name: member for each in reversed(users_classes(cls)) for name, member in vars(each).items()}


def names_in(function: object) -> tuple[set[str], set[str], set[str]]:
    """Return the names of globals and attributes that a function's code reads, and of those that it sets or deletes.

    Functions inside it count. There are none in what has no code, as a builtin.
    """
    code = getattr(getattr(function, "__func__", getattr(function, "fget", function)), "__code__", function)
    found = set[str](), set[str](), set[str]()
    for each in dis.get_instructions(code) if isinstance(code, CodeType) else ():
        if isinstance(each.argval, CodeType):
            for here, inside in zip(found, names_in(each.argval), strict=True):
                here.update(inside)
        elif each.opcode in dis.hasname:
            sets, is_global = each.opname.startswith(("STORE", "DELETE")), each.opname.startswith(_FROM_GLOBALS)
            found[2 if sets else not is_global].add(each.argval)
    return found


class UsersCode:
    """The code that a user wrote of an object, and of others that it may call: by name, as nothing runs."""

    def __init__(self, owner: object, *others: object) -> None:
        self._owner, self._things = owner, (owner, *others)
        self._members: dict[str, list[Any]] = {}
        for cls in dict.fromkeys(map(type, self._things)):
            for name, member in users_members(cls).items():
                self._members.setdefault(name, []).append(member)

    def attributes(self, hook: str) -> set[str]:
        """The names that the objects have, or that the owner, the first other or what the hook calls sets."""
        near = [member for each in self._things[:2] for member in users_members(type(each)).values()]
        written = (names_in(each)[2] for each in (*near, *self.called_by(hook)))
        held = [vars(each) for each in self._things]
        registered = (each.get(kind, ()) for each in held for kind in _REGISTERED)
        return {*self._members}.union(*held, *registered, *written)

    def called_by(self, hook: str) -> Iterator[FunctionType]:
        """Yield the user's function of this name, and those that it calls."""
        todo: list[Any] = [users_members(type(self._owner)).get(hook), getattr(self._owner, "__dict__", {}).get(hook)]
        seen = set[int]()
        while todo:
            member = todo.pop()
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if not isinstance(function, FunctionType) or id(function) in seen or is_of(function, _NOT_FOLLOWED):
                continue
            seen.add(id(function))
            yield function
            of_globals, attributes, _ = names_in(function)
            todo += [each for name in attributes for each in self._members.get(name, ())]
            todo += [function.__globals__.get(name) for name in of_globals]

    def names(self, hook: str) -> set[str]:
        """All names in a hook and in what it calls."""
        return set[str]().union(*(names for each in self.called_by(hook) for names in names_in(each)))


def is_of(thing: object, packages: Container[str]) -> bool:
    """Whether a module, class or function is of one of these packages."""
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return str(name).partition(".")[0] in packages


_NOT_FOLLOWED = LEAD_EVERYWHERE | _PYTHONS | {"torchmetrics", "numpy", "sklearn"}
_FROM_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT", "IMPORT_NAME")


def _saved_by(node: object) -> Iterator[object]:
    yield getattr(node, "__dict__", None)
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                yield getattr(node, name)
            except RuntimeError:  # freed by the backward pass
                return


def roots_of(module: nn.Module, others: Iterable[object] = ()) -> dict[str, object]:
    """A module, other objects by the names of their classes, and the files they were written in."""
    roots: dict[str, object] = {"self": module}
    for each in filter(_is_walked, others):
        name = type(each).__name__
        roots[name if name not in roots else f"{name} {len(roots)}"] = each
    files = {cls.__module__ for root in roots.values() for cls in users_classes(type(root))}
    return roots | {name: sys.modules[name] for name in files if name in sys.modules}


def tensors_of(module: nn.Module) -> list[Tensor]:
    """List all tensors that a module holds: parameters, buffers, and `unregistered_tensors`."""
    return [*module.parameters(), *module.buffers(), *unregistered_tensors(module)]


def unregistered_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that a module holds besides parameters and buffers: unlike these, they do not go to a GPU.

    They are in lists, objects and modules that it did not register, as a frozen teacher in ``self.teacher = [net]``, or
    attributes of parameters. Data that it holds is left out.
    """
    owners = (*module.modules(), *module.parameters())
    queue: deque[Any] = deque({k: v for k, v in vars(each).items() if k not in _REGISTERED} for each in owners)
    seen: dict[int, object] = {id(each): each for each in owners}  # kept alive, as in `holdings`
    while queue and len(seen) < len(owners) + _MOST_OBJECTS:
        thing = queue.popleft()
        if isinstance(thing, (*_PLAIN, str)) or id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            if is_dense(thing):
                yield thing
        elif isinstance(thing, (list, tuple, set, frozenset, deque)):
            queue.extend(thing)
        elif isinstance(thing, dict):
            queue.extend(thing.values())
        elif isinstance(thing, nn.Module) or (
            _is_walked(thing) and not isinstance(thing, _DATA) and not hasattr(thing, "train_dataloader")
        ):
            queue.append(getattr(thing, "__dict__", {}))


_REGISTERED = ("_parameters", "_buffers", "_modules")


# -- the line that puts it there


class Use(NamedTuple):
    """How code treats an attribute: the line that puts something into it, such as ``"model.py:41"``.

    ``is_conditional`` if that depends on a comparison, as of ``batch_idx`` with a number; ``is_cleared`` if something
    empties it while a run goes on.
    """

    line: str = ""
    is_conditional: bool = False
    is_cleared: bool = False


_PUTS = "append|appendleft|add|extend|update|insert|setdefault|put|push"
_CLEARS = "clear|pop|popleft|popitem|remove|reset|flush"
_ONCE = {"", "__init__", "setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end"}
_FUNCTION = re.compile(r"\s*(?:async )?def (\w+)")
_COMPARES = re.compile(r"""\s*(el)?if .*([<>%]|\bin\b|[=!]=\s*[^"'\s])""")
_LEAVES = re.compile(r"(.*:)?\s*(return|continue|break|raise)\b")


def use_of(holder: Holder, roots: Iterable[object] = ()) -> Use:
    """Read how an attribute is filled and emptied: in the source of its owner, else of these roots."""
    found = Use()
    owners = (holder.owner, *(root for root in roots if not isinstance(root, ModuleType)))
    for owner in owners if holder.attribute else ():
        methods = [*_methods_of(type(owner))]
        for source in methods or [owner]:
            use = _use_in(source, re.escape(holder.attribute), is_method=bool(methods))
            found = (found if found.line else use)._replace(is_cleared=found.is_cleared or use.is_cleared)
    return found


def _methods_of(cls: type) -> Iterator[Any]:
    """Yield methods that a user wrote, by which code is found that was typed into a notebook; a class is not."""
    for member in (member for each in users_classes(cls) for member in vars(each).values()):
        method = getattr(member, "__func__", getattr(member, "fget", member))
        if isinstance(method, FunctionType):
            yield method


def _use_in(owner: Any, name: str, *, is_method: bool) -> Use:
    filled = rf"\b{name}\b(\[.*\])?\.({_PUTS})\(|\b{name}\[.*\]\s*=[^=]|\b{name}\s*[+|]=|\.{name}\(|def {name}\("
    itself = rf"\.{name}" if is_method else rf"\b{name}"  # a method's own variable is another
    puts = re.compile(rf"{filled}|{itself}\s*=[^=].*\b{name}\b(?!\[)")
    emptied = rf"\b{name}\b.*\.({_CLEARS})\(|del .*\b{name}\b|\b{name}\s*=[^=](?!.*\b{name}\b(?!\[))"
    clears = re.compile(rf"{emptied}|log(_dict)?\(.*\b{name}\b\s*[,)}}]")
    try:
        lines, first = inspect.getsourcelines(owner)
        file = Path(inspect.getsourcefile(owner) or "").name
    except (OSError, TypeError):
        return Use()
    use, function, guards = Use(), "", list[int]()
    for number, line in enumerate(lines, first or 1):
        code = line.partition("#")[0].rstrip()
        indent = len(code) - len(code.lstrip())
        if code and (match := _FUNCTION.match(code)):
            function, guards = match[1], []
        guards = [each for each in guards if each < indent] if code else guards
        if puts.search(code) and not use.line:
            use = use._replace(line=f"{file}:{number}", is_conditional=bool(guards))
        elif clears.search(code) and function not in _ONCE:
            use = use._replace(is_cleared=True)
        if _COMPARES.match(code):
            guards.append(indent)
        if guards and _LEAVES.match(code):
            guards.append(-1)  # to the end of the function
    return use
