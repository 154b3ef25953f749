"""Tensors in any nesting of dicts, lists, tuples, arrays, dataclasses and objects with attributes."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from lightning_memguard.core.torch_port import FakeTensor, unset_fake_temporarily
from lightning_memguard.core.trace.trace import Shapes
from lightning_memguard.errors import CannotTraceError

LISTS = (list, tuple, UserList, deque)
_LEAVES = (str, bytes, int, float, complex, type, FunctionType, nn.Module, np.ndarray, type(None))


def map_tensors(tree: object, function: Callable[[torch.Tensor], object]) -> Any:
    """Rebuild a nesting with each of its tensors replaced; everything that is not a container passes through."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    children = children_of(tree)
    if children is None:
        return tree
    return rebuilt(tree, {key: map_tensors(value, function) for key, value in children.items()})


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """All tensors of a nesting, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    else:
        for value in (children_of(tree) or {}).values():
            yield from tensors_in(value)


def shapes_of(tree: object) -> Shapes:
    """Shapes of all tensors of a nesting, in order; a nested tensor has none."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(tree) if not tensor.is_nested)


def batch_bytes(tree: object) -> int:
    """Bytes of all tensors of a nesting, by their shapes."""
    dense = (part for tensor in tensors_in(tree) for part in (tensor.unbind() if tensor.is_nested else (tensor,)))
    return sum(tensor.numel() * tensor.element_size() for tensor in dense)


TENSOR_OBJECT_BYTES = 600
"""The object of a tensor, without its data: a view of a row takes 516 bytes of malloc and 80 of Python (torch 2.13)."""


def object_bytes(tree: object) -> int:
    """Bytes of the objects that a nesting is made of, without the data of its tensors and arrays."""
    if isinstance(tree, torch.Tensor):
        return TENSOR_OBJECT_BYTES
    if isinstance(tree, np.ndarray):
        return _ARRAY_OBJECT_BYTES
    plain = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, LISTS) else ()
    return sys.getsizeof(tree) + sum(map(object_bytes, (children_of(tree) or {}).values() or plain))


_ARRAY_OBJECT_BYTES = 160


def growth_sizes(shapes: Shapes, nbytes: int, *, alone: bool = True) -> list[float]:
    """Return the numbers that a step's memory may grow with: the bytes of a batch, and products of its dimensions.

    Samplers often make batches of equal bytes, many short samples or a few long ones. Attention takes the elements
    times a length, a contrastive loss their number squared: the worst batch is the largest in one of these. ``alone``:
    a dimension by itself counts too.
    """
    sizes: list[float] = [nbytes]
    for shape in shapes:
        elements = math.prod(shape)
        sizes += [*(shape if alone else ()), elements, *[elements * length for length in shape]]
    return sizes


def batch_size_of(batch: object) -> int:
    """The number of samples in a batch: the first dimension of its first tensor, as Lightning's own rule says.

    Packed sequences and graphs, whose first dimension holds many rows a sample, know their number themselves.

    Raises:
        CannotTraceError: no tensor in it has a dimension.
    """
    if isinstance(batch, PackedSequence):
        return rows_of(batch)[0]
    graphs = getattr(batch, "num_graphs", None)
    if isinstance(graphs, int) and graphs:
        return graphs
    for tensor in tensors_in(batch):
        if tensor.dim():
            return int(tensor.size(0))  # a nested tensor has no shape
    children, kind = children_of(batch), type(batch).__name__
    names = ", ".join(sorted({type(value).__name__ for value in (children or {}).values()}))
    what = f"of type {kind}" if children is None else f"a {kind} of {names or 'nothing'}"
    raise CannotTraceError(
        f"The batch holds no tensor to size it by: it is {what}. "
        "Return tensors from the dataset or the collate function to have the step predicted."
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its bytes follow from its shape: not sparse, nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def is_known(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def rows_of(packed: PackedSequence) -> list[int]:
    """Rows at each step; as if all were equally long if the values are not known."""
    if is_known(packed.batch_sizes):
        with unset_fake_temporarily():
            return packed.batch_sizes.tolist()
    steps = len(packed.batch_sizes)
    return [-(-len(packed.data) // steps)] * steps


def children_of(tree: object) -> dict[Any, Any] | None:
    """The children of a container by key, or None for what is not a container."""
    if isinstance(tree, (torch.Tensor, *_LEAVES)):
        return None
    if isinstance(tree, (dict, UserDict)):
        return dict(tree)
    if isinstance(tree, LISTS):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree):
        names = [item.name for item in dataclasses.fields(tree)]
        return {name: getattr(tree, name) for name in names if hasattr(tree, name)}
    attributes = _attributes(tree)
    if any(_holds_tensor(value, 4) for value in attributes.values()):  # deeper ones are not the batch's: a dataset's
        return attributes  # a mapping's too: torch_geometric's storage has attributes apart from what it maps
    return dict(tree) if isinstance(tree, Mapping) else None


def _attributes(thing: object) -> dict[str, Any]:
    """Return the attributes of an object, from its dictionary and its slots."""
    slots = [name for cls in type(thing).__mro__ for name in _slot_names(cls)]
    return {name: getattr(thing, name) for name in slots if hasattr(thing, name)} | getattr(thing, "__dict__", {})


def _slot_names(cls: type) -> Iterator[str]:
    names = cls.__dict__.get("__slots__", ())
    for name in (names,) if isinstance(names, str) else names:
        if not name.startswith("__"):
            yield name
        elif not name.endswith("__"):
            yield f"_{cls.__name__.lstrip('_')}{name}"


def _holds_tensor(value: object, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, _LEAVES) or not depth:
        return False
    if not isinstance(value, LISTS):
        value = (value if isinstance(value, Mapping) else _attributes(value)).values()
    return any(_holds_tensor(item, depth - 1) for item in value)


def rebuilt(tree: object, children: dict[Any, Any]) -> Any:
    """Return a container of the same kind with other children."""
    if isinstance(tree, tuple):
        return type(tree)(*children.values()) if hasattr(tree, "_fields") else tuple(children.values())
    if isinstance(tree, list):
        return list(children.values())
    if type(tree) is dict:
        return children
    clone: Any = copy.copy(tree)
    if isinstance(tree, UserDict):
        clone.data = children
    elif isinstance(tree, (UserList, deque)):
        clone.clear()
        clone.extend(children.values())
    elif isinstance(tree, Mapping) and children.keys() == tree.keys():
        try:
            for key, value in children.items():
                clone[key] = value
        except (TypeError, AttributeError):
            return children
    else:
        own = getattr(clone, "__dict__", {})
        for name, value in children.items():
            if name in own:  # though a property without a setter may have its name
                own[name] = value
            else:
                object.__setattr__(clone, name, value)
    return clone
