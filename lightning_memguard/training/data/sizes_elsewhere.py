"""The batch size in places that do not follow the loader's: a step that reads one is another step at another size.

Read from the code, not proven: a number is taken for the batch size if it is equal to it, is named like it, and code
that the run reaches reads it: of the class that holds it, or naming its holder. What a hook or ``forward`` names is
reached, and so on; what runs before the training is not.
"""

from __future__ import annotations

import inspect
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from lightning_memguard.core.objects import closed_over, function_of, users_classes, walk
from lightning_memguard.training.facts.lightning_port import HYPERPARAMETERS, HYPERPARAMETERS_LOGGED

_IS_NAMED_SO = re.compile(r"(batch|sample)s?_?size|(num|n)_(samples|batch)|^bs$", re.IGNORECASE).search
_RUNS_BEFORE = re.compile(
    r"__|.*dataloader$|setup$|prepare_data$|configure_|add_\w*arg|extra_repr$|(on_)?(save|load)_"
).match
_CONFIGURATIONS = (Mapping, Namespace, SimpleNamespace)
_MOST_DEPTH, _MOST_OBJECTS = 3, 20_000


def held_elsewhere(module: nn.Module, batch_size: int, callbacks: Iterable[object] = ()) -> str:
    """Say what holds the batch size as well, and where a step reads it; empty if nothing is known to.

    ``module.batch_size`` and ``module.hparams.batch_size`` follow: MemGuard sets them. ``callbacks`` may call methods
    of the module.
    """
    code = _reached(_classes(module), {each for callback in callbacks for each in users_classes(type(callback))})
    for path, holder, holder_name, name in _numbers(module, code, batch_size):
        own = {*_functions(*users_classes(type(holder)))} if not isinstance(holder, _CONFIGURATIONS) else set[object]()
        for function, names in code.items():
            if name in names and (function in own or (holder_name and holder_name in names)):
                place = f"{Path(function.__code__.co_filename).name}:{function.__code__.co_firstlineno}"
                return f"`{path}` is {batch_size} too and would not follow; {function.__qualname__} ({place}) reads it"
    return ""


def counts_steps(module: nn.Module) -> bool:
    """Whether a method of the user's modules sets learning rates by the number of steps, as a warm-up by hand does."""
    names = (_names_in(function.__code__) for kind in _classes(module) for function in _functions(kind))
    return any({"global_step", "param_groups"} <= each for each in names)


def _numbers(
    module: nn.Module, code: Mapping[FunctionType, set[str]], batch_size: int
) -> Iterator[tuple[str, object, str, str]]:
    """Integers that are named like the batch size, and equal to it: path, holder, the holder's name, own name."""
    roots: list[_Held] = [(path, child, path.rpartition(".")[2], 0) for path, child in module.named_modules()]
    for function, names in code.items():
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            if type(value) is int and value == batch_size and _IS_NAMED_SO(name):
                yield name, Namespace(), name, name
            elif _may_hold(value):
                roots.append((name, value, name, _MOST_DEPTH))
    for found in walk(roots, _held_by, itemgetter(1), _MOST_OBJECTS):
        holder, holder_name = found[1:3]
        for here, value, name, _ in _members(found):
            follows = name == "batch_size" and (holder is module or found[0] == "hparams")
            if type(value) is int and value == batch_size and _IS_NAMED_SO(name) and not follows:
                yield here, holder, holder_name, name


_Held = tuple[str, object, str, int]  # the path of an object, itself, its own name, and how deep it is held


def _held_by(found: _Held) -> Iterator[_Held]:
    inside = _members(found) if found[3] < _MOST_DEPTH else ()
    return (each for each in inside if each[2] != HYPERPARAMETERS_LOGGED and _may_hold(each[1]))


def _members(found: _Held) -> Iterator[_Held]:
    path, holder, _, depth = found
    for name, value in _items(holder):
        shown = "hparams" if name == HYPERPARAMETERS else name
        yield f"{path}.{shown}" if path else shown, value, shown, depth + 1


def _items(holder: object) -> list[tuple[str, Any]]:
    with suppress(Exception):  # of the user's own mapping
        items = dict(holder) if isinstance(holder, Mapping) else vars(holder)
        return [(name, value) for name, value in items.items() if isinstance(name, str)]
    return []


def _may_hold(value: object) -> bool:
    """Whether a value is a configuration, or an object of the user's other than a module, which is walked anyway."""
    if isinstance(value, (nn.Module, Tensor, type, ModuleType, FunctionType)):
        return False
    return isinstance(value, _CONFIGURATIONS) or bool(users_classes(type(value)) and hasattr(value, "__dict__"))


def _classes(module: nn.Module) -> set[type]:
    """The user's classes of a module, of its children, and of objects that they hold."""
    held = (value for child in module.modules() for value in vars(child).values() if _may_hold(value))
    return {each for holder in (*module.modules(), *held) for each in users_classes(type(holder))}


def _functions(*kinds: type) -> Iterator[FunctionType]:
    return (function for kind in kinds for _, function in _named_functions(kind))


def _named_functions(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for name, member in vars(kind).items():
        function = inspect.unwrap(function_of(member))
        if isinstance(function, FunctionType) and (not _RUNS_BEFORE(name) or name == "__call__"):
            yield name, function


def _reached(kinds: set[type], callers: set[type]) -> dict[FunctionType, set[str]]:
    """Functions of some classes that a run reaches, with what they name; those of ``callers`` reach but are not asked.

    It begins with what overrides or completes a class of a library, which calls it.
    """
    named: dict[str, list[FunctionType]] = {}
    begun = list[FunctionType]()
    for kind in kinds | callers:
        bases = [base for base in kind.__mro__[:-1] if base not in users_classes(kind)]
        for name, function in _named_functions(kind):
            named.setdefault(name, []).append(function)
            if name == "__call__" or any(hasattr(base, name) for base in bases):
                begun.append(function)
    reached: dict[FunctionType, set[str]] = {}
    while begun:
        function = begun.pop()
        if function not in reached:
            names = reached[function] = _names_in(function.__code__)
            called = (function.__globals__.get(name) for name in names)
            closed = (each for _, each in closed_over(function))
            begun += (each for each in (*closed, *called) if isinstance(each, FunctionType))
            begun += (each for name in names for each in named.get(name, ()))
    asked = {*_functions(*kinds)}
    return {function: names for function, names in reached.items() if function in asked}


def _names_in(code: CodeType) -> set[str]:
    """Attributes, globals and keys that code names, without the names of arguments that it passes."""
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}.union(*inner)
