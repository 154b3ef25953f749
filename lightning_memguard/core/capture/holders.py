"""Which attribute holds a tensor, and which line of the user's code puts it there: objects are walked from named roots.

Python knows who refers to an object, but not by which name; so the walk goes forward, from what the user can name.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import linecache
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

_MOST_OBJECTS = 50_000
_SAMPLED = 256  # entries of a long container that are looked at
_WORTH_SEEING = 256  # bytes of a text
# Trainers, loops, loggers and optimizers lead everywhere.
_SKIPPED = {"lightning", "pytorch_lightning", "lightning_fabric", "torch", "rich", "lightning_memguard"}
_WALKED = (nn.Module, Dataset, DataLoader)
_CACHED = type(functools.lru_cache(len))
_PLAIN = (bool, int, float, complex, type(None))
_SHARED = (dict, list, set, deque)  # variables of files and of classes that may grow


@dataclass(frozen=True)
class Holder:
    """An attribute or variable that holds memory, as its user would write it.

    Attributes:
        name: such as ``"self.outputs"``.
        attribute: the last part of the name.
        owner: the object with that attribute, or the function that closes over that variable.
    """

    name: str
    attribute: str = ""
    owner: object = field(default=None, compare=False, repr=False)


class Holding(NamedTuple):
    """Memory that was found: a tensor, an array, a text, or the entries of a container.

    ``nbytes`` counts those like it, if only some entries of a container were looked at. ``in_graph`` if a tensor is
    held by the graph of another.
    """

    holder: Holder
    thing: object
    nbytes: float
    in_graph: bool


def holdings(roots: Mapping[str, object]) -> Iterator[Holding]:
    """Walk all that named objects hold, nearest first; each tensor and array comes once."""
    queue: deque[tuple[Holder, object, float, bool]] = deque()
    queue.extend((Holder(name, name), root, 1.0, False) for name, root in roots.items())
    seen: dict[int, object] = {}  # kept alive, so that none of them is another's address
    while queue and len(seen) < _MOST_OBJECTS:
        holder, thing, weight, in_graph = queue.popleft()
        if isinstance(thing, Tensor):
            storage = _storage_of(thing)
            if storage is not None and storage._cdata not in seen:
                seen[storage._cdata] = storage
                yield Holding(holder, thing, weight * storage.nbytes(), in_graph)
        if id(thing) in seen or isinstance(thing, _PLAIN):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, np.ndarray) and thing.base is None:
            yield Holding(holder, thing, weight * thing.nbytes, in_graph)
        elif isinstance(thing, (str, bytes, bytearray)):
            if len(thing) >= _WORTH_SEEING:
                yield Holding(holder, thing, weight * sys.getsizeof(thing), in_graph)
        elif isinstance(thing, (dict, list, tuple, set, frozenset, deque)):
            count, few = len(thing), list(islice(thing.values() if isinstance(thing, dict) else thing, _SAMPLED))
            plain = sum(map(sys.getsizeof, (each for each in few if isinstance(each, _PLAIN))))
            weight *= max(1.0, count / _SAMPLED)
            if not isinstance(thing, tuple):
                yield Holding(holder, thing, weight * plain + sys.getsizeof(thing), in_graph)
            queue.extend((holder, each, weight, in_graph) for each in few)
        else:
            queue.extend(
                (*found, weight, in_graph or hasattr(type(thing), "next_functions")) for found in _in(holder, thing)
            )


def _in(holder: Holder, thing: Any) -> Iterator[tuple[Holder, object]]:
    """What an object holds, each with the name it is known by."""
    if isinstance(thing, Tensor):
        yield from ((holder, each) for each in (thing.grad_fn, getattr(thing, "_base", None)) if each is not None)
    elif isinstance(thing, np.ndarray):
        yield holder, thing.base
    elif hasattr(type(thing), "next_functions"):
        yield from ((holder, node) for node, _ in thing.next_functions if node is not None)
        yield from ((holder, saved) for saved in _saved_by(thing))
    elif isinstance(thing, FunctionType):
        where = f"{thing.__qualname__.replace('.<locals>', '')}()"
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        for name, cell in cells:
            with contextlib.suppress(ValueError):  # an empty cell
                yield Holder(name if name == "self" else f"{name} in {where}", name, thing), cell.cell_contents
        yield Holder(f"a default argument of {where}", "", thing), (thing.__defaults__, thing.__kwdefaults__)
    elif isinstance(thing, functools.partial):
        yield holder, (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, MethodType):
        yield Holder(type(thing.__self__).__name__), thing.__self__
        yield holder, thing.__func__
    elif isinstance(thing, _CACHED):
        name = thing.__wrapped__.__name__
        yield from (
            (Holder(f"the cache of {name}()", name, thing.__wrapped__), each) for each in gc.get_referents(thing)
        )
    elif isinstance(thing, ModuleType):
        values = {name: each for name, each in vars(thing).items() if isinstance(each, (*_SHARED, Tensor, _CACHED))}
        yield from ((Holder(name, name, thing), each) for name, each in values.items() if not name.startswith("__"))
    elif _is_walked(thing):
        yield from _attributes_of(holder, thing)


def _is_walked(thing: object) -> bool:
    package = type(thing).__module__.partition(".")[0]
    is_walked = package not in _SKIPPED and not isinstance(thing, (type, BuiltinFunctionType))
    return isinstance(thing, _WALKED) or (is_walked and package not in sys.stdlib_module_names)


def _attributes_of(holder: Holder, thing: object) -> Iterator[tuple[Holder, object]]:
    values = dict(getattr(thing, "__dict__", {}))
    for name in ("_parameters", "_buffers", "_modules") if isinstance(thing, nn.Module) else ():
        values |= values.pop(name, {})
    for cls in users_classes(type(thing)):
        slots = vars(cls).get("__slots__", ())
        values |= {name: getattr(thing, name, None) for name in ([slots] if isinstance(slots, str) else slots)}
        shared = {name: each for name, each in vars(cls).items() if isinstance(each, (*_SHARED, _CACHED))}
        values = {**{name: each for name, each in shared.items() if not name.startswith("__")}, **values}
    for name, value in values.items():
        yield Holder(f"{holder.name}.{name}" if holder.name else name, name, thing), value


def users_classes(cls: type) -> list[type]:
    """A class and those it inherits from that are the user's own."""
    return [each for each in cls.__mro__ if each.__module__.partition(".")[0] not in {*_SKIPPED, "builtins"}]


def _saved_by(node: Any) -> Iterator[object]:
    yield getattr(node, "__dict__", None)
    for name in _saved_names(type(node)):  # type: ignore[arg-type]
        try:
            yield getattr(node, name)
        except RuntimeError:  # noqa: PERF203 - freed by the backward pass
            return


@functools.cache
def _saved_names(cls: type) -> list[str]:
    names = [name for name in dir(cls) if name.startswith("_saved_")]
    return [*names, "saved_tensors"] if hasattr(cls, "saved_tensors") else names


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    return tensor.untyped_storage() if tensor.layout is torch.strided and not tensor.is_nested else None


def holder_of(tensor: Tensor, roots: Mapping[str, object]) -> Holding | None:
    """Find what holds a tensor's memory; None if that is not reached from these roots."""
    wanted = tensor.untyped_storage()._cdata
    each: Any
    for each in holdings(roots):
        if isinstance(each.thing, Tensor) and each.thing.untyped_storage()._cdata == wanted:
            return each  # type: ignore[no-any-return]
    return None


def roots_of(module: nn.Module, others: Iterable[object] = ()) -> dict[str, object]:
    """A module, other objects by the names of their classes, and the files they were written in."""
    roots: dict[str, object] = {"self": module}
    for each in filter(_is_walked, others):
        name = type(each).__name__
        roots[name if name not in roots else f"{name} {len(roots)}"] = each
    files = {cls.__module__ for root in roots.values() for cls in users_classes(type(root))}
    return roots | {name: sys.modules[name] for name in files if name in sys.modules}


# -- the line that puts it there


@dataclass(frozen=True)
class Use:
    """How the code around an attribute treats it.

    Attributes:
        line: the file and line that put something into it, such as ``"model.py:41"``; empty if not found.
        is_conditional: whether that depends on a comparison, as of ``batch_idx`` with a number.
        is_cleared: whether something empties it while a run goes on.
    """

    line: str = ""
    is_conditional: bool = False
    is_cleared: bool = False


_PUTS = {"append", "appendleft", "add", "extend", "update", "insert", "setdefault", "put", "push"}
_CLEARS = {"clear", "pop", "popleft", "popitem", "remove", "reset", "flush"}
_ONCE = {
    "",
    "__init__",
    "setup",
    "teardown",
    *(f"on_{stage}_{end}" for stage in ("fit", "train") for end in ("start", "end")),
}


def use_of(holder: Holder, roots: Iterable[object] = ()) -> Use:
    """Read how an attribute is filled and emptied: in the source of its owner, else of these roots."""
    found = Use()
    for owner in (holder.owner, *(root for root in roots if not isinstance(root, ModuleType))):
        for file, tree in _sources_of(owner):
            use = _use_in(tree, holder.attribute)
            is_cleared = found.is_cleared or use.is_cleared
            first = found if found.line or not use.line else replace(use, line=f"{Path(file).name}:{use.line}")
            found = replace(first, is_cleared=is_cleared)
    return found


def _use_in(tree: ast.AST, attribute: str) -> Use:
    found = Use()
    for node, function, is_conditional in _nodes_of(tree, "", is_conditional=False):
        puts, clears = _effect(node, attribute)
        if clears and function not in _ONCE:
            found = replace(found, is_cleared=True)
        elif puts and not found.line:
            found = replace(found, line=str(node.lineno), is_conditional=is_conditional)
    return found


def _effect(node: Any, attribute: str) -> tuple[bool, bool]:
    """Whether a piece of code puts something into an attribute, and whether it empties it."""

    def names(*nodes: ast.AST) -> bool:
        return any(
            attribute in (getattr(n, "attr", ""), getattr(n, "id", "")) for each in nodes for n in ast.walk(each)
        )

    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method, inside = node.func.attr, names(node.func.value)
        given = [each for arg in node.args for each in (arg.values if isinstance(arg, ast.Dict) else [arg])]
        is_logged = method in ("log", "log_dict") and attribute in (getattr(each, "attr", "") for each in given)
        return method == attribute or (inside and method in _PUTS), is_logged or (inside and method in _CLEARS)
    if isinstance(node, ast.FunctionDef):
        return node.name == attribute and bool(node.decorator_list), False
    if isinstance(node, ast.Delete):
        return False, names(*node.targets)
    if isinstance(node, ast.AugAssign):
        return names(node.target), False
    if isinstance(node, ast.Assign) and names(*node.targets):
        into = any(isinstance(target, ast.Subscript) for target in node.targets)
        puts = into or (names(node.value) and not isinstance(node.value, ast.Subscript))
        return puts, not puts
    return False, False


def _nodes_of(node: ast.AST, function: str, *, is_conditional: bool) -> Iterator[tuple[Any, str, bool]]:
    """Each piece of code, the function it is in, and whether a comparison decides if it runs."""
    yield node, function, is_conditional
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        function, is_conditional = node.name, False
    under = is_conditional or (isinstance(node, ast.If) and _compares(node.test))
    for child in ast.iter_child_nodes(node):
        yield from _nodes_of(child, function, is_conditional=under)
        if isinstance(child, ast.If) and _compares(child.test) and isinstance(child.body[-1], _LEAVES):
            under = True


_LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)


def _compares(test: ast.AST) -> bool:
    compared = [node for node in ast.walk(test) if isinstance(node, ast.Compare)]
    texts = (node for node in compared if isinstance(getattr(node.comparators[-1], "value", None), (str, type(None))))
    return len(compared) > len(list(texts))


def _sources_of(owner: object) -> Iterator[tuple[str, ast.AST]]:
    """The file and source of a function with what is around it, of a module, or of an object's classes."""
    if isinstance(owner, FunctionType):
        file, line = owner.__code__.co_filename, owner.__code__.co_firstlineno
        around = (each for each in _parsed(file).body if _first_line(each) <= line <= (each.end_lineno or 0))
        yield from ((file, each) for each in around)
    elif isinstance(owner, ModuleType):
        yield getattr(owner, "__file__", None) or "", _parsed(getattr(owner, "__file__", None) or "")
    elif owner is not None:
        for cls in users_classes(type(owner)):
            file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
            own = (
                node for node in ast.walk(_parsed(file)) if isinstance(node, ast.ClassDef) and node.name == cls.__name__
            )
            yield from ((file, each) for each in own)


def _first_line(node: Any) -> int:
    return min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))


def _parsed(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])
