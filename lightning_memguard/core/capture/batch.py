"""Which dimensions of a batch grow with the batch size, and a batch of n.

A batch is any nesting of tensors, arrays, dicts, lists, tuples, dataclasses and objects with attributes. Two batches of
the same samples at different sizes tell what grows; with one batch alone, the dimension that equals its size does.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import FunctionType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memguard.core.trace.trace import Shapes
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


def shapes_of(tree: Any) -> Shapes:
    """Shapes of all tensors of a nesting, in order; a nested tensor has none."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(tree) if not tensor.is_nested)


def batch_bytes(tree: Any) -> int:
    """Bytes of all tensors of a nesting, as their shapes say."""
    dense = (part for tensor in tensors_in(tree) for part in (tensor.unbind() if tensor.is_nested else (tensor,)))
    return sum(tensor.numel() * tensor.element_size() for tensor in dense)


def batch_size_of(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor, as Lightning's own rule says.

    Packed sequences and graphs, whose first dimension holds many rows a sample, know their number themselves.

    Raises:
        CannotTraceError: there is no tensor with a dimension in it.
    """
    if isinstance(batch, PackedSequence):
        return _rows(batch)[0]
    graphs = getattr(batch, "num_graphs", None)
    if isinstance(graphs, int) and graphs:
        return graphs
    for tensor in tensors_in(batch):
        if tensor.dim():
            return int(tensor.size(0))  # a nested tensor has no shape
    raise CannotTraceError(
        f"The batch holds no tensor to size it by: it is {_describe(batch)}. "
        "Return tensors from the dataset or the collate function to have the step predicted."
    )


class KnownValues(torch.Tensor):
    """Whole numbers that are known where all else is fake, since they follow from the batch size alone.

    What is worked out from them alone is known too; together with fake tensors they are as fake as those.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        alone = all(isinstance(leaf, cls) for leaf in leaves if isinstance(leaf, torch.Tensor))
        known = alone and func not in _FACTORIES and not _moves(func, args, kwargs or {})
        args, kwargs = tree_map(_plain if known else _plain_or_int, (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            if func is _pad_packed and isinstance(args[0], FakeTensor):
                return _padded(*args)
            if not known:
                return func(*args, **kwargs)
            with unset_fake_temporarily():
                return tree_map(_known, func(*args, **kwargs))


# These take numbers for sizes: what they make is as fake as all else.
_FACTORIES = frozenset(
    getattr(torch, name) for name in ("arange", "empty", "eye", "full", "ones", "rand", "randn", "randperm", "zeros")
)


_pad_packed = torch._VF._pad_packed_sequence  # what `pad_packed_sequence` calls, in torch 2.9 to 2.13


def _moves(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    wanted = [*(args[1:2] if func is torch.Tensor.to else ()), kwargs.get("device")]
    devices = [torch.device(where) for where in wanted if isinstance(where, (str, torch.device))]
    return func is torch.Tensor.cuda or any(device.type != "cpu" for device in devices)


def _known(value: Any) -> Any:
    whole = type(value) is torch.Tensor and not value.is_floating_point()
    return value.as_subclass(KnownValues) if whole else value


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, KnownValues) else value


def _plain_or_int(value: Any) -> Any:
    return int(value) if isinstance(value, KnownValues) and not value.dim() else _plain(value)


def _padded(
    data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, padding: float, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_pad_packed_sequence`` in Python, as ATen/native/PackedSequence.cpp has it: that writes into memory."""
    rows: list[int] = sizes.tolist()
    output = data.new_full((length, rows[0], *data.shape[1:]), padding)
    start = offset = 0
    for step, row in enumerate(rows, start=1):
        if step == len(rows) or rows[step] != row:
            taken = (step - start) * row
            part = data[offset : offset + taken].view(step - start, row, *data.shape[1:])
            output[start:step, :row].copy_(part)
            start, offset = step, offset + taken
    with unset_fake_temporarily():
        lengths = (sizes.unsqueeze(1) > torch.arange(rows[0])).sum(0).as_subclass(KnownValues)
    return (output.transpose(0, 1) if batch_first else output), lengths


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
        return _Blend(self, batch_size, None, build=build)(self.small, self.large)

    def fake(self, batch_size: int, device: torch.device | None = None) -> Any:
        """A batch without memory; call it under the fake mode.

        Args:
            batch_size: number of samples.
            device: where its tensors live (default: where the example's do).
        """
        return _Blend(self, batch_size, device)(self.small, self.large)

    def real(self, batch_size: int, device: torch.device) -> Any:
        """A batch of real tensors, the example's values repeated or cut to size; those that count samples count on."""
        return _Blend(self, batch_size, device, real=True)(self.small, self.large)


class _Blend:
    """Makes one batch of ``n`` samples: fake, real where ``real`` is set, or of what ``build`` gives."""

    def __init__(
        self,
        family: Batches,
        n: int,
        device: torch.device | None,
        *,
        real: bool = False,
        build: Build | None = None,
    ) -> None:
        self.family = family
        self.n = n
        self.device = device
        self.real = real
        self.build = build
        tensors = {id(tensor): tensor for tensor in tensors_in(family.small)}.values()
        self.holders = Counter(_storage_of(tensor) for tensor in tensors if _size_is_known(tensor))
        self.bases: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}
        self.made: dict[int, torch.Tensor] = {}  # what is in a batch twice is made once

    def __call__(self, small: Any, large: Any) -> Any:
        for kind, blend in self.BY_KIND.items():
            if isinstance(small, kind) and isinstance(large, kind):
                return blend(self, small, large)
        mine, theirs = _open(small), _open(large)
        if mine is None or theirs is None:
            return small
        if mine.keys() == theirs.keys():
            return _close(small, {key: self(mine[key], theirs[key]) for key in mine})
        if isinstance(small, _LISTS) and small:
            return _close(small, dict(enumerate(self._entries(small, max(0, self._line(len(small), len(large)))))))
        raise CannotTraceError(
            f"A batch of {self.family.small_size} and one of {self.family.large_size} samples have different keys: "
            f"{sorted(map(str, mine))} against {sorted(map(str, theirs))}."
        )

    def _line(self, small: int, large: int) -> int:
        gap = self.family.large_size - self.family.small_size
        rise, rest = divmod((large - small) * (self.n - self.family.small_size), gap)
        if rest:
            raise CannotTraceError(
                f"A dimension is {small} at {self.family.small_size} samples and {large} at {self.family.large_size}: "
                "it grows in no straight line."
            )
        return small + rise

    def _shape(self, small: Sequence[int], large: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._line(a, b) for a, b in zip(small, large, strict=True))

    # -- tensors

    def _tensor(self, small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
        if self.build is not None and not _size_is_known(small):
            return small
        _refuse_unknown_size(small)
        if id(small) not in self.made:
            self.made[id(small)] = self._made(self._shape(small.shape, large.shape), small, large)
        return self._placed(self.made[id(small)], small)

    def _placed(self, tensor: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
        """On its device, as a leaf that asks for gradients where the example does."""
        if self.build is not None:
            return tensor
        with torch.no_grad():
            tensor = tensor.to(self.device or _device_of(example))
        return tensor.requires_grad_() if example.requires_grad else tensor

    def _made(self, shape: tuple[int, ...], small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
        if self.build is not None:
            return self.build(shape, small)
        with unset_fake_temporarily():
            counted = _counted(small, large, self.family, self.n)
        if counted is not None and not self.real and counted.dim() == 1:
            return counted.as_subclass(KnownValues)
        tensor = self._laid_out(shape, small)
        if self.real:
            values = _repeated(shape, small) if counted is None else counted
            _once(tensor).copy_(_once(values, tensor))
        return tensor

    def _laid_out(self, shape: tuple[int, ...], example: torch.Tensor) -> torch.Tensor:
        """A tensor whose dimensions lie in memory as the example's do; views of one storage stay views of one."""
        storage = _storage_of(example)
        shared = self.holders[storage] > 1
        where = _device_of(example)
        if example.is_contiguous() and not shared:
            return torch.empty(shape, dtype=example.dtype, device=where)
        length = example.untyped_storage().nbytes() // example.element_size()
        layout = _layout(shape, example, length, shared=shared)
        if layout is None:
            return torch.empty(shape, dtype=example.dtype, device=where)
        numel, stride, offset = layout
        key = (storage, example.dtype, numel)
        if key not in self.bases:
            self.bases[key] = torch.empty(numel, dtype=example.dtype, device=where)
        return self.bases[key].as_strided(shape, stride, offset)

    # -- what is no plain tensor

    def _array(self, small: np.ndarray, large: np.ndarray) -> np.ndarray:
        array = small
        for dim, size in enumerate(self._shape(small.shape, large.shape)):
            array = np.take(array, range(size), axis=dim, mode="wrap") if size != small.shape[dim] else array
        return array

    def _packed(self, small: PackedSequence, large: PackedSequence) -> PackedSequence:
        """The rows at each step follow from the batch size; those of the data are their sum."""
        rows = self._rows(_rows(small), _rows(large))
        shape = (sum(rows), *self._shape(small.data.shape[1:], large.data.shape[1:]))
        data = self._placed(self._made(shape, small.data, small.data), small.data)
        with unset_fake_temporarily():
            sizes, order = torch.tensor(rows), torch.arange(rows[0])
        if not self.real:
            sizes, order = sizes.as_subclass(KnownValues), order.as_subclass(KnownValues)
        orders = (small.sorted_indices, small.unsorted_indices)
        return PackedSequence(data, sizes, *[None if o is None else order.clone().to(data.device) for o in orders])

    def _rows(self, small: list[int], large: list[int]) -> list[int]:
        """Rows at each step, or, where no line leads there, as if all samples were as long as the longest."""
        if self.n == self.family.small_size:
            return small
        if len(small) == len(large):
            try:
                rows = [self._line(a, b) for a, b in zip(small, large, strict=True)]
            except CannotTraceError:
                rows = []
            if rows and min(rows) >= 1:
                return rows
        return [self.n] * max(len(small), len(large))

    def _entries(self, examples: Sequence[Any], count: int) -> list[Any]:
        """A list with one entry a sample: the tensors of those that are alike lie side by side in one block."""
        kinds = len(examples)
        stacked = [
            map_tensors(example, partial(self._stack, len(range(place, count, kinds))))
            for place, example in enumerate(examples)
        ]
        return [_entry(stacked[index % kinds], index // kinds) for index in range(count)]

    def _stack(self, rows: int, example: torch.Tensor) -> torch.Tensor:
        _refuse_unknown_size(example)
        shape = (rows, *example.shape)
        if self.build is not None:
            return self.build(shape, example.unsqueeze(0))
        tensor = torch.empty(shape, dtype=example.dtype, device=_device_of(example))
        if self.real:
            tensor.copy_(_repeated(shape, example.detach().unsqueeze(0)))
        return self._placed(tensor, example)

    BY_KIND: ClassVar[dict[type, Callable[[_Blend, Any, Any], Any]]] = {
        torch.Tensor: _tensor,
        np.ndarray: _array,
        PackedSequence: _packed,
        bool: lambda _, small, __: small,
        int: _line,
    }


def _size_is_known(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _refuse_unknown_size(tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise CannotTraceError(
            "The batch holds a nested tensor: its bytes depend on how long its parts are. "
            "Return a padded tensor and its lengths, or a PackedSequence, to have the step predicted."
        )
    if tensor.layout is not torch.strided:
        raise CannotTraceError(
            f"The batch holds a tensor of layout {tensor.layout}: its bytes depend on its values. "
            "Return a dense tensor to have the step predicted."
        )


def _is_known(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _repeated(shape: tuple[int, ...], example: torch.Tensor) -> torch.Tensor:
    """The example's values, repeated or cut to a shape."""
    if not _is_known(example):
        return torch.zeros(shape, dtype=example.dtype)
    tensor = example.detach()
    for dim, size in enumerate(shape):
        index = torch.arange(size, device=tensor.device) % tensor.shape[dim]
        tensor = tensor.index_select(dim, index)
    return tensor


def _once(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """The part of a tensor that is no repetition where it, or ``like``, was expanded."""
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        tensor = tensor if stride or not tensor.shape[dim] else tensor.narrow(dim, 0, 1)
    return tensor


def _counted(small: torch.Tensor, large: torch.Tensor, family: Batches, n: int) -> torch.Tensor | None:
    """The values of a tensor that counts samples: a graph batch's ``batch``, ``ptr`` or ``edge_index``; else None."""
    whole = not (small.is_floating_point() or small.is_complex() or small.dtype is torch.bool)
    if not whole or small is large or not (_is_known(small) and _is_known(large)) or small.dtype != large.dtype:
        return None
    growing = [dim for dim, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b]
    if not growing:
        return _proportional(small, large, family, n)
    if len(growing) > 1:
        return None
    mine, theirs = small.movedim(growing[0], 0), large.movedim(growing[0], 0)
    rows, rest = divmod(len(theirs) - len(mine), family.large_size - family.small_size)
    head = len(theirs) - rows * family.large_size  # as the 0 that `ptr` begins with
    if rest or rows < 1 or head < 0 or family.large_size < 2:
        return None
    first, second = theirs[head : head + rows], theirs[head + rows : head + 2 * rows]
    step = (second - first).unique()
    if step.numel() != 1 or not step.item():
        return None

    def at(count: int) -> torch.Tensor:
        blocks = first + step * torch.arange(count, dtype=first.dtype).view(-1, *(1,) * first.dim())
        return torch.cat([theirs[:head], blocks.flatten(0, 1)])

    told = torch.equal(at(family.large_size), theirs) and torch.equal(at(family.small_size), mine)
    return at(n).movedim(0, growing[0]) if told else None


def _proportional(small: torch.Tensor, large: torch.Tensor, family: Batches, n: int) -> torch.Tensor | None:
    each = small // family.small_size
    if torch.equal(small, large) or not torch.equal(each * family.small_size, small):
        return None
    return each * n if torch.equal(each * family.large_size, large) else None


def _layout(
    shape: tuple[int, ...], example: torch.Tensor, length: int, *, shared: bool
) -> tuple[int, list[int], int] | None:
    """Length of the storage, strides and offset of a tensor that lies in its storage as the example does in its own.

    The example is taken for a part of a dense tensor, whose sizes the quotients of its strides tell; that one grows as
    the example does. None where it is no such part.
    """
    strides: tuple[int, ...] = example.stride()
    dims = sorted((dim for dim in range(example.dim()) if strides[dim]), key=lambda dim: -strides[dim])
    if not dims or not example.numel():
        return None
    offset, outer = int(example.storage_offset()), length
    sizes: list[int] = []
    starts: list[int] = []
    for dim in dims:
        size, rest = divmod(outer, strides[dim])
        start, offset = divmod(offset, strides[dim])
        if (rest and sizes) or start + example.shape[dim] > size:
            return None
        sizes.append(size)
        starts.append(start)
        outer = strides[dim]
    if not shared and sizes[0] >= 2 * (starts[0] + example.shape[dims[0]]):  # a few rows of a dataset's own tensor
        sizes[0], starts[0] = example.shape[dims[0]], 0
    stride, step = [0] * example.dim(), outer
    for dim, size, start in reversed([*zip(dims, sizes, starts, strict=True)]):
        stride[dim] = step
        offset += start * step
        step *= size + shape[dim] - example.shape[dim]
    return step, stride, offset


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
        _refuse_unknown_size(tree)
        return torch.empty(_grown_shape(tree.shape, size), dtype=tree.dtype, device="meta")
    if isinstance(tree, np.ndarray):
        return np.lib.stride_tricks.as_strided(tree, _grown_shape(tree.shape, size), (0,) * tree.ndim)  # never read
    if isinstance(tree, PackedSequence):
        data = torch.empty((len(tree.data) + len(tree.batch_sizes), *tree.data.shape[1:]), device="meta")
        return PackedSequence(data, torch.tensor(_rows(tree)) + 1)
    parts = _open(tree)
    if parts is None:
        return tree
    grown = {key: _grown(value, size) for key, value in parts.items()}
    if type(tree) in (list, tuple) and len(tree) == size and size > 1 and not _holds_batch(tree, size):
        return type(tree)([*grown.values(), grown[0]])  # one entry a sample
    return _close(tree, grown)


def _grown_shape(shape: Sequence[int], size: int) -> list[int]:
    grown = list(shape)
    growing = next((dim for dim, length in enumerate(grown) if length == size), None)
    if growing is not None:
        grown[growing] += 1
    elif grown and size and grown[0] % size == 0:  # several rows a sample
        grown[0] += grown[0] // size
    return grown


def _rows(packed: PackedSequence) -> list[int]:
    """Rows at each step; as if all were equally long where the values are not known."""
    if _is_known(packed.batch_sizes):
        with unset_fake_temporarily():
            return packed.batch_sizes.tolist()
    steps = len(packed.batch_sizes)
    return [-(-len(packed.data) // steps)] * steps


def _holds_batch(tree: Any, size: int) -> bool:
    """Whether something inside has the batch's size, so that the container itself is no list of samples."""
    inner = (_open(tree) or {}).values()
    return any(size in tensor.shape for tensor in tensors_in(tree)) or any(
        type(value) in (list, tuple) and len(value) == size for value in inner
    )


def _storage_of(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata  # unlike `data_ptr`, fake storages have one too
    return address


def _device_of(tensor: torch.Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _describe(batch: Any) -> str:
    parts = _open(batch)
    if parts is None:
        return f"of type {type(batch).__name__}"
    kinds = ", ".join(sorted({type(value).__name__ for value in parts.values()}))
    return f"a {type(batch).__name__} of {kinds or 'nothing'}"


# -- containers

_LISTS = (list, tuple, UserList, deque)
_CLOSED = (str, bytes, int, float, complex, type, FunctionType, nn.Module, np.ndarray, type(None))


def _open(tree: Any) -> dict[Any, Any] | None:
    """The children of a container by key, or None for what is no container."""
    if isinstance(tree, (torch.Tensor, *_CLOSED)):
        return None
    if isinstance(tree, (dict, UserDict)):
        return dict(tree)
    if isinstance(tree, _LISTS):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree):
        names = [item.name for item in dataclasses.fields(tree)]
        return {name: getattr(tree, name) for name in names if hasattr(tree, name)}
    attributes = _attributes(tree)
    if any(_holds_tensor(value, 4) for value in attributes.values()):
        return attributes  # a mapping's too: torch_geometric's storage keeps numbers of its own beside what it maps
    return dict(tree) if isinstance(tree, Mapping) else None


def _attributes(thing: Any) -> dict[str, Any]:
    """What an object holds, in its dictionary and in its slots."""
    slots = [name for cls in type(thing).__mro__ for name in _slots(cls)]
    return {name: getattr(thing, name) for name in slots if hasattr(thing, name)} | getattr(thing, "__dict__", {})


def _slots(cls: type) -> Iterator[str]:
    names = cls.__dict__.get("__slots__", ())
    for name in (names,) if isinstance(names, str) else names:
        if not name.startswith("__"):
            yield name
        elif not name.endswith("__"):
            yield f"_{cls.__name__.lstrip('_')}{name}"


def _holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, _CLOSED) or not depth:
        return False
    if isinstance(value, (Mapping, UserDict)):
        inner: Any = value.values()
    else:
        inner = value if isinstance(value, _LISTS) else _attributes(value).values()
    return any(_holds_tensor(item, depth - 1) for item in inner)


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
    elif isinstance(tree, (UserList, deque)):
        clone.clear()
        clone.extend(parts.values())
    elif isinstance(tree, Mapping) and parts.keys() == tree.keys():
        try:
            for key, value in parts.items():
                clone[key] = value
        except (TypeError, AttributeError):
            return parts
    else:
        for name, value in parts.items():
            object.__setattr__(clone, name, value)
    return clone


def _entry(stacked: Any, row: int) -> Any:
    entry = map_tensors(stacked, itemgetter(row))
    return entry if isinstance(entry, torch.Tensor) else copy.copy(entry)
