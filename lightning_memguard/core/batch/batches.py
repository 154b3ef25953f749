"""Batches of n samples, made from two example batches that show which dimensions grow with the batch size.

A batch is any nesting of tensors, arrays, dicts, lists, tuples, dataclasses and objects with attributes. Two batches of
the same samples at different sizes show what grows; with a single batch, the dimension that equals its size does.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.batch.nesting import (
    LISTS,
    batch_size_of,
    children_of,
    is_dense,
    is_known,
    map_tensors,
    rebuilt,
    rows_of,
    tensors_in,
)
from lightning_memguard.core.torch_port import unset_fake_temporarily
from lightning_memguard.errors import CannotTraceError

Build = Callable[[tuple[int, ...], torch.Tensor], torch.Tensor]
"""(shape, example) -> a tensor of that shape, like the example in everything else."""


class Draws(Protocol):
    """Batches of real samples, as the user's own code makes them.

    Attributes:
        multiple: batch sizes are multiples of this.
        stay: whether a batch may hold tensors whose memory is the dataset's own.
        is_whole: whether they are of all samples, in the order in which each epoch has them.
    """

    multiple: int
    stay: bool = False
    is_whole: bool = False

    def has(self, batch_size: int) -> bool:
        """Whether there are batches of this size."""

    def batch(self, batch_size: int, draw: int) -> Any:
        """The batch of a draw, the same each time."""

    def several(self, batch_size: int, count: int) -> Iterator[Any]:
        """Batches as they come in training, of this size as far as that can be chosen."""
        return (self.batch(batch_size, draw) for draw in range(1, 1 + count))

    def measures(self, batch_size: int, draw: int) -> tuple[int, int]:  # noqa: ARG002
        """Bytes of a draw's samples, and their number times the square of the largest; 0 if unknown.

        With draw 0, of batches of the largest sample alone.
        """
        return 0, 0

    def largest_of_epoch(self, batch_size: int, epoch: Epoch) -> Any:
        """The largest batch of one epoch, by `measures`."""
        return self.batch(batch_size, epoch.place)

    def held(self, batch: object) -> list[torch.Tensor]:  # noqa: ARG002
        """Tensors of a batch whose memory is the dataset's own, before the batch and after it."""
        return []


class Epoch(NamedTuple):
    """One of `EPOCHS` simulated epochs.

    Attributes:
        place: in the order of their largest batches.
        weights: bytes of memory for each of a batch's two `measures`.
        steps: how many batches the epoch has; None if unknown: those that all samples make.
    """

    place: int
    weights: tuple[float, float]
    steps: int | None = None


EPOCHS = 20  # so that all but 1 in 20 have their largest batch in between


@dataclass(frozen=True)
class Batches:
    """Batches of one kind at any size, real or fake.

    Attributes:
        small: a batch of ``small_size`` samples.
        large: the same samples repeated to ``large_size``.
        small_size: number of samples in ``small``.
        large_size: number of samples in ``large``.
        draws: batches of other samples; None if there are no others.
        draw: which of them the real ones are; above 0, fake ones are as these.
        epoch: of which they are the largest instead.
        kinds: if the data sets the sizes of its batches, those of which one takes the most memory.
        keep_value: called with each tensor of a fake batch, which is then as a real one, and with that one's; or None.
    """

    small: Any
    large: Any
    small_size: int
    large_size: int
    draws: Draws | None = None
    draw: int = 0
    epoch: Epoch | None = None
    kinds: tuple[Batches, ...] = ()
    keep_value: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    def is_real_at(self, batch_size: int) -> bool:
        """Whether a real batch of this size is one that the user's own code made."""
        if self.has_draws(batch_size):
            return True
        return batch_size == self.small_size and all(map(is_known, tensors_in(self.small)))

    def has_draws(self, batch_size: int) -> bool:
        """Whether there are batches of other samples at this size."""
        return self.draws is not None and self.draws.has(batch_size)

    @property
    def multiple(self) -> int:
        """Batch sizes are multiples of this."""
        return self.draws.multiple if self.draws else 1

    @functools.cached_property
    def constants(self) -> dict[int, float]:
        """Numbers that fill a tensor of integers in all real batches, by the ``id`` of that tensor in ``small``.

        A mask is one if nothing is padded; libraries ask whether it masks anything. A single example does not prove
        that its values stay, so it has none.
        """
        if not self.has_draws(self.small_size):
            return {}
        with unset_fake_temporarily():
            mine = [*tensors_in(self.small)]
            found = _constants_in(mine, [*tensors_in(self.large)])
            for draw in range(_DRAWS_OF_CONSTANTS):
                if found:
                    same = _constants_in(mine, [*tensors_in(replace(self, draw=draw).drawn(self.small_size))])
                    found = {key: number for key, number in found.items() if key in same}
            return found

    def of(self, batch_size: int, build: Build) -> Any:
        """A batch of ``batch_size`` samples whose tensors come from ``build``."""
        return _Scaler(self, batch_size, build=build).scale(self.small, self.large)

    def fake(self, batch_size: int, device: torch.device | None = None) -> Any:
        """A batch without memory, on a device (default: the example's); call it under the fake mode."""
        if self.keep_value or (self.draw and self.has_draws(batch_size)):
            with unset_fake_temporarily():
                batch = self.real(batch_size, torch.device("cpu"))
            as_it_is = replace(self, small=batch, large=batch, small_size=batch_size, large_size=batch_size + 1)
            scaled = _Scaler(as_it_is, batch_size, device, drawn=True).scale(batch, batch)
            if self.keep_value:
                for fake, real in zip(tensors_in(scaled), tensors_in(batch), strict=True):
                    self.keep_value(fake, real)
            return scaled
        return _Scaler(self, batch_size, device).scale(self.small, self.large)

    def drawn(self, batch_size: int) -> Any:
        """The batch of the draw, on the CPU."""
        assert self.draws is not None
        with unset_fake_temporarily():
            if self.epoch:
                return self.draws.largest_of_epoch(batch_size, self.epoch)
            return self.draws.batch(batch_size, self.draw)

    def held(self, batch: object, batch_size: int, *, fake: bool) -> list[torch.Tensor]:
        """Tensors of a batch whose memory is the dataset's own; of a fake one, where a real one has such tensors."""
        if self.draws is None or not (self.draws.stay and self.has_draws(batch_size)):
            return []
        real = self.drawn(batch_size) if fake else batch
        own = set(map(id, self.draws.held(real)))
        return [mine for mine, theirs in zip(tensors_in(batch), tensors_in(real), strict=False) if id(theirs) in own]

    def real(self, batch_size: int, device: torch.device) -> Any:
        """A batch of real tensors: one of samples that were drawn, at a place in the draw.

        If there is none of this size, the example's values are repeated or cut; those that count samples go on.
        """
        if self.has_draws(batch_size):
            batch = self.drawn(batch_size)
            return batch if device.type == "cpu" else map_tensors(batch, lambda tensor: tensor.to(device))
        return _Scaler(self, batch_size, device, real=True).scale(self.small, self.large)


@dataclass
class _Scaler:
    """Makes one batch of ``n`` samples: fake, real if ``real`` is set, or of the tensors that ``build`` returns.

    Lengths and labels of a ``drawn`` batch are known, as those that count samples are of any.
    """

    family: Batches
    n: int
    device: torch.device | None = None
    real: bool = False
    drawn: bool = False
    build: Build | None = None
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)  # a tensor that is in a batch twice is made once
    storages: dict[tuple[int, torch.dtype, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.constants = {} if self.real or self.build else self.family.constants
        examples = {id(tensor): tensor for tensor in tensors_in(self.family.small)}.values()
        self.views = Counter(_storage_of(tensor) for tensor in examples if is_dense(tensor))

    def scale(self, small: object, large: object) -> Any:
        """Scale one item of a batch to ``n`` samples, given that item of the small and of the large batch."""
        match small, large:
            case torch.Tensor(), torch.Tensor():
                return self._tensor(small, large)
            case np.ndarray(), np.ndarray():
                return self._array(small, large)
            case PackedSequence(), PackedSequence():
                return self._packed(small, large)
            case bool(), bool():
                return small
            case int(), int():
                return self._length(small, large)
            case _:
                return self._container(small, large)

    def _container(self, small: object, large: object) -> Any:
        mine, theirs = children_of(small), children_of(large)
        if mine is None or theirs is None:
            return small
        if mine.keys() == theirs.keys():
            return rebuilt(small, {key: self.scale(mine[key], theirs[key]) for key in mine})
        if isinstance(small, LISTS) and small:
            count = max(0, self._length(len(mine), len(theirs)))
            return rebuilt(small, dict(enumerate(self._entries([*mine.values()], count))))
        raise CannotTraceError(
            f"A batch of {self.family.small_size} and one of {self.family.large_size} samples have different keys: "
            f"{sorted(map(str, mine))} versus {sorted(map(str, theirs))}."
        )

    def _length(self, small: int, large: int) -> int:
        sizes = self.family.small_size, self.family.large_size
        growth, rest = divmod((large - small) * (self.n - sizes[0]), sizes[1] - sizes[0])
        if rest:
            raise CannotTraceError(
                f"A dimension of the batch is {small} at {sizes[0]} samples and {large} at {sizes[1]}: it does not "
                "grow linearly."
            )
        return small + growth

    def _shape(self, small: Sequence[int], large: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._length(a, b) for a, b in zip(small, large, strict=True))

    def _tensor(self, small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
        if self.build is not None and not is_dense(small):
            return small
        _refuse_unknown_size(small)
        if id(small) not in self.tensors:
            self.tensors[id(small)] = self._make(self._shape(small.shape, large.shape), small, large)
        return self._place(self.tensors[id(small)], small)

    def _place(self, tensor: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
        """Move a tensor to its device, as a leaf that requires gradients if the example does."""
        if self.build is not None:
            return tensor
        with torch.no_grad():
            tensor = tensor.to(self.device or _device_of(example))
        return tensor.requires_grad_() if example.requires_grad else tensor

    def _make(self, shape: tuple[int, ...], small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
        if self.build is not None:
            return self.build(shape, small)
        with unset_fake_temporarily():
            continued = small if self.drawn and _is_whole(small) else _continued(small, large, self.family, self.n)
        if continued is not None and not self.real and continued.dim() == 1:
            return continued
        tensor = self._allocate(shape, small)
        if not self.real and id(small) in self.constants:
            return tensor.fill_(self.constants[id(small)])
        if self.real:
            values = _repeat(shape, small) if continued is None else continued
            _unexpanded(tensor, tensor).copy_(_unexpanded(values, tensor))
        return tensor

    def _allocate(self, shape: tuple[int, ...], example: torch.Tensor) -> torch.Tensor:
        """A tensor whose dimensions are ordered in memory as the example's; views of one storage stay views of one."""
        empty = partial(torch.empty, dtype=example.dtype, device=_device_of(example))
        storage = _storage_of(example)
        shared = self.views[storage] > 1
        layout = _layout(shape, example, shared=shared) if shared or not example.is_contiguous() else None
        if layout is None:
            return empty(shape)
        numel, stride, offset = layout
        key = (storage, example.dtype, numel)
        if key not in self.storages:
            self.storages[key] = empty(numel)
        return self.storages[key].as_strided(shape, stride, offset)

    def _array(self, small: np.ndarray, large: np.ndarray) -> np.ndarray:
        array = small
        for dim, size in enumerate(self._shape(small.shape, large.shape)):
            array = np.take(array, range(size), axis=dim, mode="wrap") if size != small.shape[dim] else array
        return array

    def _packed(self, small: PackedSequence, large: PackedSequence) -> PackedSequence:
        """The rows at each step follow from the batch size; the data has as many rows as all steps together."""
        rows = self._rows(rows_of(small), rows_of(large))
        shape = (sum(rows), *self._shape(small.data.shape[1:], large.data.shape[1:]))
        data = self._place(self._make(shape, small.data, small.data), small.data)
        with unset_fake_temporarily():
            sizes, order = torch.tensor(rows), torch.arange(rows[0])
        orders = (small.sorted_indices, small.unsorted_indices)
        return PackedSequence(data, sizes, *[None if o is None else order.clone().to(data.device) for o in orders])

    def _rows(self, small: list[int], large: list[int]) -> list[int]:
        """Rows at each step; if these do not grow linearly, as if all samples were as long as the longest."""
        if self.n == self.family.small_size:
            return small
        if len(small) == len(large):
            with contextlib.suppress(CannotTraceError):
                rows = self._shape(small, large)
                if rows and min(rows) >= 1:
                    return [*rows]
        return [self.n] * max(len(small), len(large))

    def _entries(self, examples: Sequence[object], count: int) -> list[Any]:
        """A list with one entry a sample: the tensors made from one example entry share a block."""
        kinds = len(examples)
        stacked = [
            map_tensors(example, partial(self._stack, len(range(place, count, kinds))))
            for place, example in enumerate(examples)
        ]
        entries = (map_tensors(stacked[index % kinds], itemgetter(index // kinds)) for index in range(count))
        return [entry if isinstance(entry, torch.Tensor) else copy.copy(entry) for entry in entries]

    def _stack(self, rows: int, example: torch.Tensor) -> torch.Tensor:
        _refuse_unknown_size(example)
        shape = (rows, *example.shape)
        if self.build is not None:
            return self.build(shape, example.unsqueeze(0))
        tensor = torch.empty(shape, dtype=example.dtype, device=_device_of(example))
        if self.real:
            tensor.copy_(_repeat(shape, example.detach().unsqueeze(0)))
        return self._place(tensor, example)


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


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


_DRAWS_OF_CONSTANTS = 8


def _constants_in(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> dict[int, float]:
    """Map the ``id`` of each tensor filled with one number to it, if its counterpart in ``others`` has that number."""
    if len(tensors) != len(others):
        return {}
    numbers = {id(mine): (_number_in(mine), _number_in(other)) for mine, other in zip(tensors, others, strict=True)}
    return {key: mine for key, (mine, other) in numbers.items() if mine is not None and mine == other}


def _number_in(tensor: torch.Tensor) -> float | None:
    """The one number in a tensor of integers."""
    if not (is_known(tensor) and is_dense(tensor) and tensor.device.type == "cpu" and tensor.numel()):
        return None
    if tensor.is_floating_point() or tensor.is_complex():
        return None
    first = tensor.flatten()[0]
    return first.item() if bool((tensor == first).all()) else None


def _repeat(shape: tuple[int, ...], example: torch.Tensor) -> torch.Tensor:
    """The example's values, repeated or cut to a shape."""
    if not is_known(example):
        return torch.zeros(shape, dtype=example.dtype)
    tensor = example.detach()
    for dim, size in enumerate(shape):
        index = torch.arange(size, device=tensor.device) % tensor.shape[dim]
        tensor = tensor.index_select(dim, index)
    return tensor


def _unexpanded(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One row of a tensor in each dimension in which ``like`` was expanded: all rows there are the same memory."""
    for dim, stride in enumerate(like.stride()):
        tensor = tensor if stride or not tensor.shape[dim] else tensor.narrow(dim, 0, 1)
    return tensor


def _continued(small: torch.Tensor, large: torch.Tensor, family: Batches, n: int) -> torch.Tensor | None:
    """The values of a tensor that counts samples: a graph batch's ``batch``, ``ptr`` or ``edge_index``; else None."""
    if (
        not _is_whole(small)
        or small is large
        or not (is_known(small) and is_known(large))
        or small.dtype != large.dtype
    ):
        return None
    growing = [dim for dim, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b]
    if not growing:  # multiples of the batch size
        each = small // family.small_size
        matches = torch.equal(each * family.small_size, small) and torch.equal(each * family.large_size, large)
        return each * n if matches and not torch.equal(small, large) else None
    if len(growing) > 1:
        return None
    mine, theirs = small.movedim(growing[0], 0), large.movedim(growing[0], 0)
    rows, rest = divmod(len(theirs) - len(mine), family.large_size - family.small_size)
    head = len(theirs) - rows * family.large_size  # such as the 0 that `ptr` begins with
    if rest or rows < 1 or head < 0 or family.large_size < 2:
        return None
    first, second = theirs[head : head + rows], theirs[head + rows : head + 2 * rows]
    step = (second - first).unique()
    if step.numel() != 1 or not step.item():
        return None

    def at(count: int) -> torch.Tensor:
        blocks = first + step * torch.arange(count, dtype=first.dtype).view(-1, *(1,) * first.dim())
        return torch.cat([theirs[:head], blocks.flatten(0, 1)])

    matches = torch.equal(at(family.large_size), theirs) and torch.equal(at(family.small_size), mine)
    return at(n).movedim(0, growing[0]) if matches else None


def _layout(shape: tuple[int, ...], example: torch.Tensor, *, shared: bool) -> tuple[int, list[int], int] | None:
    """Length of the storage, strides and offset of a tensor that is placed in its storage as the example is.

    The example is assumed to be a part of a dense tensor, whose sizes are the quotients of its strides; that one grows
    as the example does. None if it is not such a part.
    """
    strides: tuple[int, ...] = example.stride()
    dims = sorted((dim for dim in range(example.dim()) if strides[dim]), key=lambda dim: -strides[dim])
    if not dims or not example.numel():
        return None
    offset, outer = int(example.storage_offset()), example.untyped_storage().nbytes() // example.element_size()
    placed: list[tuple[int, int, int]] = []
    for dim in dims:
        size, rest = divmod(outer, strides[dim])
        start, offset = divmod(offset, strides[dim])
        if (rest and placed) or start + example.shape[dim] > size:
            return None
        placed.append((dim, size, start))
        outer = strides[dim]
    dim, size, start = placed[0]
    if not shared and size >= 2 * (start + example.shape[dim]):  # a few rows of a dataset's own tensor
        placed[0] = (dim, example.shape[dim], 0)
    stride, step = [0] * example.dim(), outer
    for dim, size, start in reversed(placed):
        stride[dim] = step
        offset += start * step
        step *= size + shape[dim] - example.shape[dim]
    return step, stride, offset


def batches_from_one(batch: object, batch_size: int | None = None) -> Batches:
    """Batches like one example: in each tensor the first dimension that equals the batch size grows.

    Args:
        batch: real, meta or fake tensors in any nesting.
        batch_size: the number of samples in it (default: `batch_size_of`).

    Raises:
        CannotTraceError: the batch holds no tensor with a dimension.
    """
    size = batch_size_of(batch) if batch_size is None else batch_size
    return Batches(batch, _with_one_more(batch, size), size, size + 1)


def length_of(batch: object) -> int:
    """The length of a batch's samples: dimension 1 of its first tensor that has one.

    Raises:
        CannotTraceError: none has.
    """
    for tensor in tensors_in(batch):
        if tensor.dim() > 1:
            return int(tensor.size(1))
    shapes = [tuple(tensor.shape) for tensor in tensors_in(batch)]
    raise CannotTraceError(
        f"The batch has no length: none of its tensors has a dimension 1, their shapes are {shapes}. Pass a function "
        "in place of the batch: (length) -> a batch of samples of that length."
    )


_MOST_EXAMPLE_BYTES = 1 << 28


def batch_of_length(batch: object, length: int) -> Any:
    """The batch with samples of another length; see `length_of`.

    Dimension 1 of each tensor that has the length there is repeated or cut, such as tokens, masks and labels. One that
    holds a whole number for each sample, and the length at most, holds the new length. One that would be very large has
    no values.
    """
    known = length_of(batch)

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() > 1 and tensor.shape[1] == known:
            shape = (tensor.shape[0], length, *tensor.shape[2:])
            if not is_known(tensor) or math.prod(shape) * tensor.element_size() > _MOST_EXAMPLE_BYTES:
                return torch.empty(shape, dtype=tensor.dtype, device="meta")
            return _repeat(shape, tensor).requires_grad_(tensor.requires_grad)
        holds_lengths = tensor.dim() == 1 and _is_whole(tensor) and is_known(tensor) and tensor.numel()
        return torch.full_like(tensor, length) if holds_lengths and int(tensor.max()) == known else tensor

    return batch if length == known else map_tensors(batch, resized)


def _with_one_more(tree: object, size: int) -> Any:
    """A batch of ``size`` samples with one more; its values are never read."""
    if isinstance(tree, torch.Tensor):
        _refuse_unknown_size(tree)
        return torch.empty(_grown_shape(tree.shape, size), dtype=tree.dtype, device="meta")
    if isinstance(tree, np.ndarray):
        return np.lib.stride_tricks.as_strided(tree, _grown_shape(tree.shape, size), (0,) * tree.ndim)
    if isinstance(tree, PackedSequence):
        data = torch.empty((len(tree.data) + len(tree.batch_sizes), *tree.data.shape[1:]), device="meta")
        return PackedSequence(data, torch.tensor(rows_of(tree)) + 1)
    children = children_of(tree)
    if children is None:
        return tree
    grown = {key: _with_one_more(value, size) for key, value in children.items()}
    if type(tree) in (list, tuple) and len(grown) == size and size > 1 and not _holds_batch(tree, size):
        grown[size] = grown[0]  # one entry a sample
    return rebuilt(tree, grown)


def _grown_shape(shape: Sequence[int], size: int) -> list[int]:
    grown = list(shape)
    if size in grown:
        grown[grown.index(size)] += 1
    elif grown and size and grown[0] % size == 0:  # several rows a sample
        grown[0] += grown[0] // size
    return grown


def _holds_batch(tree: object, size: int) -> bool:
    """Whether something inside has the batch's size, so that the container itself is not a list of samples."""
    inner = (children_of(tree) or {}).values()
    return any(size in tensor.shape for tensor in tensors_in(tree)) or any(
        type(value) in (list, tuple) and len(value) == size for value in inner
    )


def _storage_of(tensor: torch.Tensor) -> int:
    return port.storage_id(tensor.untyped_storage())


def _device_of(tensor: torch.Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device
