"""Parts of a module that remedies work on: its repeated blocks and its head."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import nn

from lightning_memguard.core.capture.storages import written_path
from lightning_memguard.core.trace.trace import Trace

_SWITCH = "gradient_checkpointing"  # of a layer of Hugging Face's transformers
_LISTS = (nn.ModuleList, nn.Sequential)
_FEW_PATHS = 4  # are all named


@dataclass(frozen=True)
class Blocks:
    """Modules of one class, by path; ``how`` is an expression for all of them, ``switched`` if each has a switch."""

    name: str
    how: str
    paths: tuple[str, ...]
    switched: bool = False

    def how_for(self, root: str, paths: Sequence[str]) -> str:
        """An expression for some of them."""
        if self.how.startswith(root) and [*self.paths[: len(paths)]] == [*paths]:
            return f"{self.how}[:{len(paths)}]"
        if self.how.startswith(root) and [*self.paths[-len(paths) :]] == [*paths]:
            return f"{self.how}[{-len(paths)}:]"
        return f"({', '.join(code_of(root, path) for path in paths)},)"

    def held_bytes(self, trace: Trace) -> int:
        """Return the bytes kept in these blocks for the backward pass."""
        inside = {*map(written_path, self.paths)}
        return sum(
            event.nbytes
            for event in trace.events
            if event.action == "alloc"
            and event.part == "activations"
            and any(prefix in inside for prefix in itertools.accumulate(event.module.split("."), "{}.{}".format))
        )


@dataclass(frozen=True)
class Structure:
    """The parts of a module.

    Attributes:
        root: what its owner's code calls it.
        blocks: those that repeat.
        switches: the paths of the parts that have a switch for activation checkpointing.
        head: the path of the last child with parameters, if the others can be frozen: they have learned already, it
            seems, and are not frozen yet.
    """

    root: str
    blocks: tuple[Blocks, ...]
    switches: tuple[str, ...]
    head: str

    @classmethod
    def of(cls, module: nn.Module, root: str) -> Structure:
        """The structure of a module."""
        head = _head_of(module) if _is_pretrained(module) else ""
        return cls(root, tuple(_repeated_blocks(module, root)), tuple(_with_switch(module)), head)


def _with_switch(module: nn.Module) -> Iterator[str]:
    """Models of Hugging Face's transformers; in evaluation mode their switch does nothing."""
    found: list[str] = []
    for path, each in module.named_modules():
        has = callable(getattr(each, "gradient_checkpointing_enable", None)) and each.training
        inner = any(path.startswith(f"{outer}.") or not outer for outer in found)
        if has and not inner and getattr(each, "supports_gradient_checkpointing", True):
            found.append(path)
            if not getattr(each, "is_gradient_checkpointing", False):
                yield path


def _repeated_blocks(module: nn.Module, root: str) -> Iterator[Blocks]:
    """Children of one parent that share a class and have parts of their own; of one class anywhere, all together."""
    classes: dict[type[nn.Module], list[tuple[str, list[str]]]] = {}
    for path, parent in module.named_modules():
        for kind in {type(child): None for child in parent.children()}:
            paths = [f"{path}.{name}".lstrip(".") for name, child in parent.named_children() if type(child) is kind]
            if len(paths) < 2 or issubclass(kind, (nn.ModuleList, nn.ModuleDict)):
                continue
            if not any(True for at in paths for _ in module.get_submodule(at).children()):
                continue
            if kind is nn.Sequential:  # says nothing of what is in it: those of another parent differ
                yield _siblings(root, path, paths, parent, kind)
            else:
                classes.setdefault(kind, []).append((path, paths))
    for kind, groups in classes.items():
        paths = [path for path, each in module.named_modules() if type(each) is kind]
        path, first = groups[0]
        if len(groups) == 1 and len(first) == len(paths):
            yield _siblings(root, path, paths, module.get_submodule(path), kind)
        else:
            how = f"[m for m in {root}.modules() if type(m) is {kind.__name__}]"
            yield Blocks(f"the {len(paths)} {kind.__name__} modules", how, tuple(paths), hasattr(kind, _SWITCH))


def _siblings(root: str, path: str, paths: Sequence[str], parent: nn.Module, kind: type[nn.Module]) -> Blocks:
    """Children of one parent: a list of its own, or named one by one if they are few."""
    every = len(list(parent.children())) == len(paths)
    in_list = isinstance(parent, _LISTS)
    how = code_of(root, path) if every and in_list else f"({', '.join(code_of(root, each) for each in paths)})"
    if len(paths) <= _FEW_PATHS and not in_list:
        *first, last = map(written_path, paths)
        name = f"{', '.join(first)} and {last}"
    elif every:
        name = written_path(path) or root
    else:
        name = f"the {len(paths)} {kind.__name__} modules of {written_path(path) or root}"
    return Blocks(name, how, tuple(paths), hasattr(kind, _SWITCH))


def _is_pretrained(module: nn.Module) -> bool:
    """Whether weights were loaded, as far as that shows: some are frozen, or a model says where they come from."""
    found = [getattr(getattr(each, "config", None), "name_or_path", "") for each in module.modules()]  # transformers
    for name, value in (getattr(module, "hparams", None) or {}).items():
        found += [value] if re.search(r"pretrained|name_or_path$|weights$", str(name)) else []
    frozen = any(not parameter.requires_grad for parameter in module.parameters())
    return frozen or any(isinstance(each, (str, bool, Enum)) and bool(each) for each in found)


def _head_of(module: nn.Module, prefix: str = "") -> str:
    """The path of the last child with parameters, of the first parent that has several."""
    children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    if not children:
        return ""
    name, head = children[-1]
    if len(children) == 1 and not any(True for _ in module.parameters(recurse=False)):
        return _head_of(head, f"{prefix}{name}.")
    kept = {id(parameter) for parameter in head.parameters()}
    learns = any(parameter.requires_grad and id(parameter) not in kept for parameter in module.parameters())
    return f"{prefix}{name}" if learns else ""


def code_of(root: str, path: str) -> str:
    """Python's way to write a path: ``net.0`` of ``self`` is ``self.net[0]``."""
    names = filter(None, written_path(path).split("."))
    return root + "".join(f"[{name}]" if name.isdigit() else f".{name}" for name in names)
