"""A batch -> parts of some of its samples.

How a batch is cut follows from two batches of different sizes: a mask of 32 x 32 is not cut because there are 32
samples too. Where only one is known, it is a guess, which `flow` proves or refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.batch.nesting import batch_size_of, children_of, is_dense, rebuilt
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.rescue.sample_layout import refuse


@dataclass(frozen=True)
class Cut:
    """How a part of a batch follows from the batch.

    Attributes:
        kind: ``"rows"`` of a tensor or array along ``dim``; ``"entries"`` of a list; ``"count"``, a number that grows;
            ``"inside"`` a container, as ``children`` say; ``"whole"`` for what is the same in each part.
        rows: rows, entries, or the number's growth for each sample.
    """

    kind: Literal["whole", "rows", "entries", "count", "inside"]
    dim: int = 0
    rows: int = 1
    children: tuple[tuple[Any, Cut], ...] = ()


WHOLE = Cut("whole")


def cut_of(small: object, large: object, small_size: int, large_size: int) -> Cut:
    """How batches like these two are cut, from what grows from one to the other.

    Raises:
        CannotTraceError: a part of it cannot be cut by sample.
    """
    cut = _cut(small, large, small_size, large_size)
    if not _cuts(cut):
        raise CannotTraceError("nothing in the batch grows with its size")
    return cut


def _cut(small: Any, large: Any, few: int, many: int) -> Cut:
    if type(small) is not type(large):
        raise CannotTraceError(f"it holds a {type(small).__name__} or a {type(large).__name__}")
    if isinstance(small, PackedSequence) or isinstance(getattr(small, "num_graphs", None), int):
        raise CannotTraceError(f"a {type(small).__name__} cannot be cut by sample")
    if isinstance(small, (torch.Tensor, np.ndarray)):
        return _rows(small, large, few, many)
    if type(small) is int:
        return WHOLE if small == large else Cut("count", rows=_each(small, large, few, many))
    children, others = children_of(small), children_of(large)
    if children is None or others is None:
        return WHOLE
    if type(small) in (list, tuple) and len(children) != len(others):
        return Cut("entries", rows=_each(len(children), len(others), few, many))
    if children.keys() != others.keys():
        raise CannotTraceError("the keys of the batch depend on its size")
    inside = tuple((key, _cut(value, others[key], few, many)) for key, value in children.items())
    return Cut("inside", children=inside) if any(cut != WHOLE for _, cut in inside) else WHOLE


def _rows(small: Any, large: Any, few: int, many: int) -> Cut:
    if isinstance(small, torch.Tensor) and not (is_dense(small) and is_dense(large)):
        raise CannotTraceError("a sparse or nested tensor cannot be cut by sample")
    if len(small.shape) != len(large.shape):
        raise CannotTraceError("the dimensions of a tensor in the batch depend on its size")
    grown = [dim for dim, (mine, theirs) in enumerate(zip(small.shape, large.shape, strict=True)) if mine != theirs]
    if not grown:
        return WHOLE
    if len(grown) > 1:  # texts that are as long as the longest, too
        grown = [dim for dim in grown if small.shape[dim] * many == large.shape[dim] * few]
    if len(grown) != 1:
        raise CannotTraceError("which dimension of a tensor in the batch grows with its size cannot be determined")
    (dim,) = grown
    return Cut("rows", dim, _each(small.shape[dim], large.shape[dim], few, many))


def _each(small: int, large: int, few: int, many: int) -> int:
    each, rest = divmod(small, few)
    if rest or large != each * many or not each:
        raise CannotTraceError("a part of the batch does not grow in proportion to its size")
    return each


def _cuts(cut: Cut) -> bool:
    return cut.kind in ("rows", "entries") or any(_cuts(child) for _, child in cut.children)


Mark = Callable[[Any, Cut], Any]
"""Called with each piece that was cut out; returns what takes its place."""


def part_of(batch: Any, cut: Cut, size: int, start: int, stop: int, mark: Mark = lambda piece, _: piece) -> Any:
    """The samples from ``start`` to ``stop`` of a batch of ``size``, in containers of its own.

    Raises:
        CannotTraceError: the batch is not like those that ``cut`` was made from.
    """
    match cut.kind:
        case "rows":
            _expect(isinstance(batch, (torch.Tensor, np.ndarray)) and cut.dim < len(batch.shape))
            _expect(batch.shape[cut.dim] == cut.rows * size)
            index = (*[slice(None)] * cut.dim, slice(cut.rows * start, cut.rows * stop))
            return mark(batch[index], cut)
        case "entries":
            _expect(isinstance(batch, (list, tuple)) and len(batch) == cut.rows * size)
            return mark(batch[cut.rows * start : cut.rows * stop], cut)
        case "count":
            _expect(batch == cut.rows * size)
            return mark(cut.rows * (stop - start), cut)
        case "inside":
            children = children_of(batch) or {}
            _expect(children.keys() >= {key for key, _ in cut.children})
            cuts = dict(cut.children)
            return rebuilt(
                batch,
                {key: part_of(value, cuts.get(key, WHOLE), size, start, stop, mark) for key, value in children.items()},
            )
    inside = children_of(batch)
    return batch if inside is None else rebuilt(batch, inside)


class Entries(list[Any]):
    """The entries of a list that has one for each sample: they may be passed on, and not be read."""

    def _refuse(self, *_: object) -> NoReturn:
        raise refuse("it reads entries of single samples from a list")

    __iter__ = __getitem__ = __contains__ = __reversed__ = __add__ = index = count = pop = _refuse


def _expect(holds: bool) -> None:
    if not holds:
        raise CannotTraceError("the batch is not like the ones seen before training")


def size_of(batch: object, cut: Cut) -> int:
    """The number of samples in a batch; 0 where it is not like those that ``cut`` was made from."""
    if cut.kind == "rows":
        shape = getattr(batch, "shape", ())
        return int(shape[cut.dim]) // cut.rows if cut.dim < len(shape) else 0
    if cut.kind == "entries":
        return len(batch) // cut.rows if isinstance(batch, (list, tuple)) else 0
    children = (children_of(batch) or {}) if cut.kind == "inside" else {}
    return next((size_of(children[key], child) for key, child in cut.children if key in children and _cuts(child)), 0)


def cuts_for(batch: object, known: Cut | None) -> Iterator[tuple[int, Cut]]:
    """How many samples a batch has, and how it may be cut, the most likely way first.

    Raises:
        CannotTraceError: it cannot be cut by sample.
    """
    if known is not None:
        try:
            samples = size_of(batch, known)
            part_of(batch, known, samples, 0, min(1, samples))
        except CannotTraceError:
            pass
        else:
            yield samples, known
            return
    size = batch_size_of(batch)
    two = batches_from_one(batch, size)
    guess = cut_of(two.small, two.large, size, size + 1)
    yield size, guess
    shared = _without_squares(batch, guess, size)
    if shared != guess and _cuts(shared):
        yield size, shared


def _without_squares(batch: Any, cut: Cut, size: int) -> Cut:
    """The cut that leaves out square matrices, which may be the same for all samples."""
    if cut.kind == "rows" and list(batch.shape).count(size) > 1:
        return WHOLE
    if cut.kind == "inside":
        children = children_of(batch) or {}
        return replace(cut, children=tuple((key, _without_squares(children[key], c, size)) for key, c in cut.children))
    return cut


def even_parts(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """So many parts, as even as can be, the largest first."""
    size, more = divmod(stop - start, count)
    ends = [start + size * place + min(place, more) for place in range(count + 1)]
    return list(pairwise(ends))


def uneven_parts(start: int, stop: int, most: int) -> list[tuple[int, int]]:
    """Parts of at most so many samples, not all of one size: a number that depends on the size shows then.

    Parts of a single sample are the exception.
    """
    total, most = stop - start, max(1, most)
    count = math.ceil(total / most)
    if count > 1 and total == count * most and most > 1:
        count += 1  # all of them would have as many as they may
    parts = even_parts(start, stop, count)
    if count > 1 and total % count == 0 and total > count:
        parts = [(first + (first > start), last + (last < stop)) for first, last in parts]  # one from the last
    return parts
