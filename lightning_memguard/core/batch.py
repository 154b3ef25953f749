"""Which dimensions of a batch grow with the batch size, and a batch of n.

A batch is any nesting of tensors, dicts, lists, tuples, dataclasses and objects with attributes. Two batches of the
same samples at different sizes tell what grows; with one batch alone, the dimension that equals its size does.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lightning_memguard.errors import CannotTraceError

Build = Callable[[tuple[int, ...], torch.Tensor], torch.Tensor]
"""(shape, example) -> a tensor of that shape, like the example in everything else."""


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Rebuild a nesting with each of its tensors replaced; everything that is no container passes through."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    parts = _open(tree)
    if parts is None:
        return tree
    return _close(tree, {key: map_tensors(value, function) for key, value in parts.items()})


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors of a nesting, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    else:
        for value in (_open(tree) or {}).values():
            yield from tensors_in(value)


def batch_bytes(tree: Any) -> int:
    """Bytes of all tensors of a nesting, as their shapes say."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(tree))


def batch_size_of(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor, as Lightning's own rule says.

    Raises:
        CannotTraceError: there is no tensor with a dimension in it.
    """
    for tensor in tensors_in(batch):
        if tensor.dim():
            return int(tensor.shape[0])
    raise CannotTraceError(
        f"The batch holds no tensor to size it by: it is {_describe(batch)}. "
        "Return tensors from the dataset or the collate function to have the step predicted."
    )


@dataclass(frozen=True)
class Batches:
    """A family of batches of one kind: any size, real or fake.

    Attributes:
        small: a batch of ``small_size`` samples.
        large: the same samples repeated to ``large_size``.
        small_size: number of samples in ``small``.
        large_size: number of samples in ``large``.
    """

    small: Any
    large: Any
    small_size: int
    large_size: int

    def of(self, batch_size: int, build: Build) -> Any:
        """A batch of ``batch_size`` samples whose tensors come from ``build``."""
        return self._blend(self.small, self.large, batch_size, build)

    def fake(self, batch_size: int, device: torch.device | None = None) -> Any:
        """A batch without memory; call it under the fake mode.

        Args:
            batch_size: number of samples.
            device: where its tensors live (default: where the example's do).
        """

        def build(shape: tuple[int, ...], example: torch.Tensor) -> torch.Tensor:
            tensor = torch.empty(shape, dtype=example.dtype, device=device or _device_of(example))
            return _in_format(tensor, example).requires_grad_(example.requires_grad)

        return self.of(batch_size, build)

    def real(self, batch_size: int, device: torch.device) -> Any:
        """A batch of real tensors, the example's values repeated or cut to size."""

        def build(shape: tuple[int, ...], example: torch.Tensor) -> torch.Tensor:
            if example.is_meta or isinstance(example, FakeTensor):
                return torch.zeros(shape, dtype=example.dtype, device=device)
            tensor = example.detach()
            for dim, size in enumerate(shape):
                index = torch.arange(size, device=tensor.device) % tensor.shape[dim]
                tensor = tensor.index_select(dim, index)
            return _in_format(tensor.to(device), example).requires_grad_(example.requires_grad)

        return self.of(batch_size, build)

    def _blend(self, small: Any, large: Any, n: int, build: Build) -> Any:
        if isinstance(small, torch.Tensor) and isinstance(large, torch.Tensor):
            return build(tuple(self._line(a, b, n) for a, b in zip(small.shape, large.shape, strict=True)), small)
        if _counts(small) and _counts(large) and small != large:
            return self._line(small, large, n)
        mine, theirs = _open(small), _open(large)
        if mine is None or theirs is None:
            return small
        if mine.keys() == theirs.keys():
            return _close(small, {key: self._blend(mine[key], theirs[key], n, build) for key in mine})
        if isinstance(small, (list, tuple)) and small:  # one entry a sample
            length = max(0, self._line(len(small), len(large), n))
            values = [self._blend(value, value, n, build) for value in small]
            return type(small)([copy.copy(values[i % len(values)]) for i in range(length)])
        raise CannotTraceError(
            f"A batch of {self.small_size} and one of {self.large_size} samples have different keys: "
            f"{sorted(map(str, mine))} against {sorted(map(str, theirs))}."
        )

    def _line(self, small: int, large: int, n: int) -> int:
        slope, rest = divmod(large - small, self.large_size - self.small_size) if large != small else (0, 0)
        if rest:
            raise CannotTraceError(
                f"A dimension is {small} at {self.small_size} samples and {large} at {self.large_size}: "
                "it grows in no straight line."
            )
        return small + slope * (n - self.small_size)


def batches_from_one(batch: Any, batch_size: int | None = None) -> Batches:
    """The family of one example batch: per tensor the first dimension that equals the batch size grows.

    Args:
        batch: real, meta or fake tensors in any nesting.
        batch_size: the number of samples in it (default: `batch_size_of`).

    Raises:
        CannotTraceError: the batch holds no tensor with a dimension.
    """
    size = batch_size_of(batch) if batch_size is None else batch_size
    return Batches(batch, _grown(batch, size), size, size + 1)


def _grown(tree: Any, size: int) -> Any:
    if isinstance(tree, torch.Tensor):
        shape = list(tree.shape)
        growing = next((dim for dim, length in enumerate(shape) if length == size), None)
        if growing is not None:
            shape[growing] += 1
        elif shape and size and shape[0] % size == 0:  # several rows a sample
            shape[0] += shape[0] // size
        return torch.empty(shape, dtype=tree.dtype, device="meta", requires_grad=tree.requires_grad)
    parts = _open(tree)
    if parts is None:
        return tree
    grown = {key: _grown(value, size) for key, value in parts.items()}
    if type(tree) in (list, tuple) and len(tree) == size and size > 1 and not _holds_batch(tree, size):
        return type(tree)([*grown.values(), grown[0]])  # one entry a sample
    return _close(tree, grown)


def _holds_batch(tree: Any, size: int) -> bool:
    """Whether something inside has the batch's size, so that the container itself is no list of samples."""
    inner = (_open(tree) or {}).values()
    return any(size in tensor.shape for tensor in tensors_in(tree)) or any(
        type(value) in (list, tuple) and len(value) == size for value in inner
    )


def _in_format(tensor: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """The tensor in the example's memory format: channels last where the example is."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(example.dim())
    if wanted is None or example.is_contiguous() or not example.is_contiguous(memory_format=wanted):
        return tensor
    return tensor.contiguous(memory_format=wanted)


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _device_of(tensor: torch.Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _describe(batch: Any) -> str:
    parts = _open(batch)
    if parts is None:
        return f"of type {type(batch).__name__}"
    kinds = ", ".join(sorted({type(value).__name__ for value in parts.values()}))
    return f"a {type(batch).__name__} of {kinds or 'nothing'}"


def _open(tree: Any) -> dict[Any, Any] | None:
    """The children of a container by key, or None for what is no container."""
    if isinstance(tree, (Mapping, UserDict)):
        return dict(tree)
    if isinstance(tree, Sequence) and not isinstance(tree, (str, bytes)):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    attributes = getattr(tree, "__dict__", None)
    if attributes and not callable(tree) and any(isinstance(v, torch.Tensor) for v in attributes.values()):
        return dict(attributes)
    return None


def _close(tree: Any, parts: dict[Any, Any]) -> Any:
    """The same kind of container around other children."""
    if isinstance(tree, tuple):
        return type(tree)(*parts.values()) if hasattr(tree, "_fields") else tuple(parts.values())
    if isinstance(tree, list):
        return list(parts.values())
    if type(tree) is dict:
        return parts
    clone = copy.copy(tree)
    if isinstance(tree, UserDict):
        clone.data = parts
    elif isinstance(tree, Mapping):
        try:
            for key, value in parts.items():
                clone[key] = value
        except (TypeError, AttributeError):
            return parts
    elif isinstance(tree, Sequence):
        return tree
    else:
        for name, value in parts.items():
            object.__setattr__(clone, name, value)
    return clone
