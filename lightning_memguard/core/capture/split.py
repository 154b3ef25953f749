"""A batch -> parts of some of its samples; the results of a step on each part -> the result of one step on the batch.

How a batch is cut follows from two batches of different sizes, never from the numbers of one: a mask of 32 x 32 is not
cut because there are 32 samples too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_memguard.core.capture.batch import children_of, is_dense, rebuilt
from lightning_memguard.errors import CannotTraceError

Rule = Literal["rows", "mean", "sum", "max", "min", "last", "average"]
"""How results of parts become that of the batch: rows are concatenated, numbers are combined.

A mean is one over samples; an average has the weights that the parts of the loss have.
"""

_NUMBERS: tuple[Rule, ...] = ("mean", "sum", "max", "min", "last")  # where several hold, the first is taken
_COUNTS: tuple[Rule, ...] = ("sum", "mean", "max", "min", "last")  # such as hits, of which there may be none

_RELATIVE, _ABSOLUTE = 1e-4, 1e-7


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
        raise CannotTraceError(f"a part of the batch is a {type(small).__name__} or a {type(large).__name__}")
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


def part_of(batch: Any, cut: Cut, size: int, start: int, stop: int) -> Any:
    """The samples from ``start`` to ``stop`` of a batch of ``size``.

    Raises:
        CannotTraceError: the batch is not like those that ``cut`` was made from.
    """
    match cut.kind:
        case "rows":
            return _part_of_rows(batch, cut, size, start, stop)
        case "entries":
            _expect(isinstance(batch, (list, tuple)) and len(batch) == cut.rows * size)
            return batch[cut.rows * start : cut.rows * stop]
        case "count":
            _expect(batch == cut.rows * size)
            return cut.rows * (stop - start)
        case "inside":
            children = children_of(batch) or {}
            _expect([*children] == [key for key, _ in cut.children])
            return rebuilt(
                batch, {key: part_of(children[key], child, size, start, stop) for key, child in cut.children}
            )
    return batch


def _part_of_rows(batch: Any, cut: Cut, size: int, start: int, stop: int) -> Any:
    _expect(isinstance(batch, (torch.Tensor, np.ndarray)) and cut.dim < len(batch.shape))
    _expect(batch.shape[cut.dim] == cut.rows * size)
    index = (*[slice(None)] * cut.dim, slice(cut.rows * start, cut.rows * stop))
    part = batch[index]
    # code that calls `view` on a batch relies on its being contiguous
    return part.contiguous() if isinstance(part, torch.Tensor) and batch.is_contiguous() else part


def _expect(holds: bool) -> None:
    if not holds:
        raise CannotTraceError("the batch is not like the ones seen before training")


def size_of(batch: Any, cut: Cut) -> int:
    """The number of samples in a batch; 0 where it is not like those that ``cut`` was made from."""
    if cut.kind == "rows":
        shape = getattr(batch, "shape", ())
        return int(shape[cut.dim]) // cut.rows if cut.dim < len(shape) else 0
    if cut.kind == "entries":
        return len(batch) // cut.rows if isinstance(batch, (list, tuple)) else 0
    children = (children_of(batch) or {}) if cut.kind == "inside" else {}
    return next((size_of(children[key], child) for key, child in cut.children if key in children and _cuts(child)), 0)


# -- results


@dataclass(frozen=True)
class Rules:
    """How results are combined, by name; where a name is unknown, `default` tells."""

    by_name: dict[str, Rule] = field(default_factory=dict)

    def of(self, name: str, default: Rule = "mean") -> Rule:
        """The rule of a result."""
        return self.by_name.get(name, default)


def rule_of(whole: Any, parts: Sequence[Any], counts: Sequence[int], weights: Sequence[float] = ()) -> Rule | None:
    """The rule by which results of parts give that of the whole batch; None where none of them does."""
    if _are_rows(parts, counts):
        return "rows"
    for rule in _COUNTS if isinstance(whole, torch.Tensor) and not whole.is_floating_point() else _NUMBERS:
        if is_close(whole, combine(parts, counts, rule)):
            return rule
    if weights and is_close(whole, combine(parts, weights, "average")):
        return "average"
    return None


def _are_rows(parts: Sequence[Any], counts: Sequence[int]) -> bool:
    shapes = [tuple(getattr(part, "shape", ())) for part in parts]
    return all(shape[:1] == (count,) for shape, count in zip(shapes, counts, strict=True))


def is_close(one: Any, other: Any) -> bool:
    """Whether two results are the same but for rounding."""
    mine, theirs = torch.as_tensor(one, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64)
    return mine.shape == theirs.shape and torch.allclose(mine, theirs, rtol=_RELATIVE, atol=_ABSOLUTE)


def combine(parts: Sequence[Any], counts: Sequence[float], rule: Rule) -> Any:
    """Combine the results of parts of so many samples each."""
    numbers = all(isinstance(part, (torch.Tensor, int, float)) for part in parts)
    shapes = {tuple(getattr(part, "shape", ()))[rule == "rows" :] for part in parts}
    if rule == "last" or not numbers or len(shapes) > 1:
        return parts[-1]
    if rule == "rows":
        return torch.cat(list(parts))
    if rule in ("max", "min"):
        stacked = torch.stack([torch.as_tensor(part) for part in parts])
        return stacked.amax(0) if rule == "max" else stacked.amin(0)
    total = sum(counts)
    weights = [count / total if rule in ("mean", "average") else 1 for count in counts]
    combined: Any = sum(part * weight for part, weight in zip(parts, weights, strict=True))
    return combined.to(parts[0].dtype) if isinstance(parts[0], torch.Tensor) else combined


def join(
    outputs: Sequence[Any], counts: Sequence[int], rules: Rules, name: str = "", weights: Sequence[float] = ()
) -> Any:
    """What a step returned for each part, as it returns it for the batch: rows and entries one after the other."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        rule = rules.of(name, "rows" if _are_rows(outputs, counts) else "mean")
        return combine(outputs, weights if rule == "average" else counts, rule)
    if type(first) in (list, tuple) and [*map(len, outputs)] == [*counts]:
        return type(first)(entry for each in outputs for entry in each)
    children = children_of(first)
    if children is None or any((children_of(each) or {}).keys() != children.keys() for each in outputs):
        rule = rules.of(name, "last")
        return combine(outputs, weights if rule == "average" else counts, rule)
    every = [children_of(each) or {} for each in outputs]
    joined = {key: join([each[key] for each in every], counts, rules, f"{name}.{key}", weights) for key in children}
    return rebuilt(first, joined)


def are_alike(one: Any, other: Any) -> bool:
    """Whether two results of a step are the same but for rounding."""
    if isinstance(one, (torch.Tensor, int, float)) and isinstance(other, (torch.Tensor, int, float)):
        return is_close(one, other)
    mine, theirs = children_of(one), children_of(other)
    if mine is None or theirs is None:
        return type(one) is type(other) and bool(one == other)
    return mine.keys() == theirs.keys() and all(are_alike(value, theirs[key]) for key, value in mine.items())


def numbers_in(output: Any, name: str = "") -> dict[str, Any]:
    """The numbers in what a step returned, by the names that `join` asks its rules for."""
    if isinstance(output, (torch.Tensor, int, float)) and not isinstance(output, bool):
        return {name: output}
    return {
        inner: value
        for key, child in (children_of(output) or {}).items()
        for inner, value in numbers_in(child, f"{name}.{key}").items()
    }


def even_parts(start: int, stop: int, most: int) -> list[tuple[int, int]]:
    """The fewest parts of at most so many samples, as even as can be."""
    count = math.ceil((stop - start) / max(1, most))
    places = [start + (stop - start) * place // count for place in range(count + 1)]
    return list(pairwise(places))
