"""Whether someone has set a batch size of 1, which a DataLoader also has if it is made without one.

A loader does not remember. Lightning does, of loaders that its hooks make; else an object that keeps the number tells,
or the code that makes loaders: if any of it passes a size that may be 1, one was set.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from lightning_memguard.core.objects import is_installed, walk
from lightning_memguard.training.facts.lightning_port import batch_sizes_of, recorded_arguments

_MOST_FILES = 500


def sets_its_size(loader: object) -> bool:
    """Whether the batch size of a loader, which is 1, was set, as far as the loader or the user's code tells."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return True  # a batch sampler, or another kind of loader, is made with a size
    kind = type(loader)
    if "batch_size" not in inspect.signature(kind.__init__).parameters:
        return True  # its author did
    recorded = recorded_arguments(loader)
    return "batch_size" in recorded if recorded is not None else any(_passes_size(text, kind) for text in _code())


def is_kept_as_one(owners: Iterable[object]) -> bool:
    """Whether a module, datamodule or callback (LightningCLI's, with its configuration) keeps a batch size of 1."""
    for owner in owners:
        sizes = [size for size in batch_sizes_of(owner) if type(size) is int]
        if 1 in sizes or _holds_one(getattr(owner, "config", None)):
            return True
    return False


def _holds_one(configuration: object) -> bool:
    held = walk([configuration], lambda each: _items(each).values())
    return any(_items(each).get("batch_size") == 1 for each in held)


def _items(configuration: object) -> Mapping[str, Any]:
    items = configuration if isinstance(configuration, Mapping) else getattr(configuration, "__dict__", None)
    return items if isinstance(items, Mapping) else {}


def _code() -> Iterator[str]:
    """The user's code: that which called the Trainer, of a notebook, and of the modules that are loaded."""
    frame: FrameType | None = inspect.currentframe()
    files = dict.fromkeys(getattr(module, "__file__", None) for module in [*sys.modules.values()])
    while frame is not None:
        files[frame.f_code.co_filename] = None
        frame = frame.f_back
    mine = Path(__file__).parents[2].as_posix()
    users = (file for file in files if isinstance(file, str) and not file.startswith((mine, "<frozen")))
    cells = getattr(sys.modules.get("__main__"), "In", ())
    yield from (cell for cell in cells if isinstance(cell, str))
    for file in [file for file in users if not is_installed(file)][:_MOST_FILES]:
        with suppress(Exception):
            yield "".join(linecache.getlines(file))


def _passes_size(text: str, kind: type) -> bool:
    """Whether code makes loaders of a class with a batch size that may be 1."""
    if not any(each.__name__ in text for each in kind.__mro__ if issubclass(each, DataLoader)):
        return False
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a cell of a notebook may have commands in it
        return True
    imports = (alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names)
    names = {kind.__name__, *(alias.asname for alias in imports if alias.name == kind.__name__ and alias.asname)}
    return any(isinstance(node, ast.Call) and _may_pass_one(node, names) for node in ast.walk(tree))


def _may_pass_one(call: ast.Call, names: set[str]) -> bool:
    if _name(call.func) not in names:
        makers = [at for at, each in enumerate(call.args[:1]) if _name(each) in names]  # partial(DataLoader, ...)
        if not makers:
            return False
        call = ast.Call(call.args[0], call.args[1:], call.keywords)
    given = [each.value for each in call.keywords if each.arg in (None, "batch_size")] + call.args[1:2]
    starred = any(isinstance(each, ast.Starred) for each in call.args)
    return starred or any(not isinstance(each, ast.Constant) or each.value == 1 for each in given)


def _name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
