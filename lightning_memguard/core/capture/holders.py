"""Which attribute holds a tensor, and which line of the user's code puts it there: objects are walked from named roots.

Python knows who refers to an object, but not by which name; so the walk goes forward, from what the user can name.
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import re
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.batch.nesting import is_dense
from lightning_memguard.core.objects import (
    COMPUTE,
    DATA,
    PLAIN,
    closed_over,
    function_of,
    is_users,
    package_of,
    tensors_held,
    users_classes,
    users_members,
    walk,
)

_SAMPLED = 256  # entries of a long container that are looked at
_CACHED = type(functools.lru_cache(len))
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
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


_Found = tuple[Holder, Any, float, bool]  # a thing, how many it stands for, and whether a graph holds it


def holdings(roots: Mapping[str, object]) -> Iterator[Holding]:
    """Walk all that named objects hold, nearest first; each tensor and array comes once."""
    begun: Iterator[_Found] = ((Holder(name, name), root, 1.0, False) for name, root in roots.items())
    storages: dict[int, object] = {}  # kept alive, so that none of them is another's address
    for holder, thing, weight, in_graph in walk(begun, _inside, itemgetter(1)):
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage() if is_dense(thing) else None
            if storage is None or port.storage_id(storage) in storages:
                continue
            storages[port.storage_id(storage)] = storage
            nbytes: float = storage.nbytes()
        elif isinstance(thing, np.ndarray) and thing.base is None:
            nbytes = thing.nbytes
        elif isinstance(thing, (str, bytes, bytearray)):
            nbytes = sys.getsizeof(thing)
        elif isinstance(thing, _CONTAINERS):
            few, more = _sample(thing)
            nbytes = sys.getsizeof(thing) + more * sum(sys.getsizeof(each) for each in few if isinstance(each, PLAIN))
        else:
            continue
        yield Holding(holder, thing, weight * nbytes, in_graph)


def _sample(container: Collection[object]) -> tuple[list[object], float]:
    """Some entries of a container, and how many each stands for."""
    entries = container.values() if isinstance(container, dict) else container
    return list(islice(entries, _SAMPLED)), max(1.0, len(container) / _SAMPLED)


def _inside(found: _Found) -> Iterator[_Found]:
    holder, thing, weight, in_graph = found
    if isinstance(thing, _CONTAINERS):
        few, more = _sample(thing)
        yield from ((holder, each, weight * more, in_graph) for each in few if not isinstance(each, PLAIN))
    else:
        below = in_graph or _is_node(thing)
        yield from ((*each, weight, below) for each in _in(holder, thing) if not isinstance(each[1], PLAIN))


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
        for name, value in closed_over(thing):
            yield Holder(name + where * (name != "self"), name, thing), value
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


def _is_walked(thing: object) -> bool:
    return isinstance(thing, (nn.Module, *DATA)) or is_users(thing)


def _shared_of(thing: object) -> dict[str, object]:
    named = vars(thing).items()
    return {name: each for name, each in named if isinstance(each, _SHARED) and not name.startswith("__")}


def names_in(function: object) -> tuple[set[str], set[str], set[str]]:
    """Return the names of globals and attributes that a function's code reads, and of those that it sets or deletes.

    Functions inside it count. There are none in what has no code, as a builtin.
    """
    code = getattr(function_of(function), "__code__", function)
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
            function = function_of(todo.pop())
            if not isinstance(function, FunctionType) or id(function) in seen or package_of(function) in COMPUTE:
                continue
            seen.add(id(function))
            yield function
            of_globals, attributes, _ = names_in(function)
            todo += [each for name in attributes for each in self._members.get(name, ())]
            todo += [function.__globals__.get(name) for name in of_globals]

    def names(self, hook: str) -> set[str]:
        """All names in a hook and in what it calls."""
        return set[str]().union(*(names for each in self.called_by(hook) for names in names_in(each)))


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
    """Return the tensors that a module holds besides parameters and buffers: unlike these, they do not go to a GPU.

    They are in lists, objects and modules that it did not register, as a frozen teacher in ``self.teacher = [net]``, or
    attributes of parameters. Data that it holds is left out.
    """
    owners = (*module.modules(), *module.parameters())
    held = ({k: v for k, v in vars(each).items() if k not in _REGISTERED} for each in owners)
    return filter(is_dense, tensors_held(*held, but=owners))


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
    members = (function_of(member) for each in users_classes(cls) for member in vars(each).values())
    return (each for each in members if isinstance(each, FunctionType))


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
