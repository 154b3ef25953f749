"""How large results are whose size depends on values: noted in a real run, and given to a fake one.

A mask keeps a share of what it is given, whatever the batch size; so a few real batches tell how much it keeps of a
larger one, on any device. Without a real run it keeps everything.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memguard.core.foreign import aten as _aten
from lightning_memguard.core.kernels.arguments import operands
from lightning_memguard.core.simulation.faking import ValueNeededError
from lightning_memguard.core.torch_port import OpOverload, unset_fake_temporarily
from lightning_memguard.core.trace.trace import Note, Share, Shares

LEAST: Shares = ((("", ""), (((0,) * 64, 1),)),)  # each result as small as it can be: of no element


class ValueSizes:
    """The shares of one run.

    Args:
        given: those of another run, which are handed out in their order.
    """

    def __init__(self, given: Shares = ()) -> None:
        self._given = dict(given)
        self.are_given = bool(given)
        self._asked: Counter[tuple[str, str]] = Counter()
        self._noted: defaultdict[tuple[str, str], list[Share]] = defaultdict(list)

    @property
    def noted(self) -> Shares:
        """Return the shares of each call, by operator and line."""
        return tuple((key, tuple(shares)) for key, shares in self._noted.items())

    def note(self, func: OpOverload, line: Callable[[], str], args: Sequence[Any], out: object) -> None:
        """Note how large a real result is."""
        if not _is_sized(func):
            return
        key = str(func), line()
        self._asked[key] += 1
        share_of = _RULES[func].share_of if func in _RULES else None
        self._noted[key].append(share_of(args, out) if share_of else _sizes_of(out))

    def result(self, func: OpOverload, line: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """A fake result as large as that of the same call of the other run; else of the largest of its calls.

        Raises:
            ValueNeededError: the step asks for a value.
        """
        if self._given == dict(LEAST):
            return result_of(func, args, kwargs, LEAST[0][1][0])
        key = str(func), line
        shares, place = self._given.get(key, ()), self._asked[key]
        self._asked[key] += 1
        return result_of(func, args, kwargs, shares[place] if place < len(shares) else max(shares, default=None))


def result_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], share: Share | None = None) -> object:
    """The fake result of an operator whose size depends on values: of a share, or the largest.

    Raises:
        ValueNeededError: no such bound is known, or the step asks for the value itself.
    """
    if share is not None and not share[1]:
        return _of_sizes(share, func, args)
    if func not in _RULES:
        raise ValueNeededError(f"{public_name(func)} needs the values of its input, which only a real run can give.")
    return _RULES[func].result(share, *args, **kwargs)


def assumption(func: OpOverload) -> str:
    """Return the note on the size that `result_of` assumes for an operator without a share."""
    if func is _aten.bincount.default:
        return f"{public_name(func)} was assumed to return as many bins as its minlength"
    return Note("largest result", f"{public_name(func)} was assumed to return its largest result")


def public_name(func: Any) -> str:
    """Return an operator's name as users write it: ``"torch.unique"`` for ``aten._unique2`` and ``aten.unique_dim``."""
    if func in _IN_WORDS:
        return _IN_WORDS[func]
    name = str(getattr(func, "overloadpacket", func)).removeprefix("aten.")
    if "." in name:  # of another library
        return name
    public = name.strip("_").rstrip("0123456789").replace("linalg_", "linalg.")
    return f"torch.{public if hasattr(torch, public) else public.removesuffix('_dim')}"


_IN_WORDS = {
    _aten.index.Tensor: "indexing with a mask",
    _aten._local_scalar_dense.default: "`.item()` or `bool()`",
}


def _kept(share: Share | None, size: int, place: int = 0) -> int:
    """Return how many of so many elements a result has: as large a share as in the other run, rounded up, or all."""
    if share is None or place >= len(share[0]):
        return size
    return min(size, -(-share[0][place] * size // max(1, share[1])))


@functools.cache
def _is_sized(func: OpOverload) -> bool:
    """Whether the values that an operator reads say how large its result is."""
    return func in _RULES or torch.Tag.dynamic_output_shape in func.tags


_NEXT = -1  # between the sizes of results


def _sizes_of(out: object) -> Share:
    """The sizes of a result that no rule follows: they hold for the very same values, and are a share of nothing."""
    sizes = [(*each.shape, _NEXT) for each in operands(out)]
    return tuple(itertools.chain.from_iterable(sizes)), 0


def _of_sizes(share: Share, func: OpOverload, args: Sequence[Any]) -> object:
    """Results of these sizes; all but the first are indices and counts."""
    shapes: list[list[int]] = [[]]
    for size in share[0]:
        if size == _NEXT:
            shapes.append([])
        else:
            shapes[-1].append(size)
    kinds = [torch.long if func is _aten.bincount.default else args[0].dtype, *[torch.long] * len(shapes)]
    made = [args[0].new_empty(shape, dtype=kind) for shape, kind in zip(shapes[:-1], kinds, strict=False)]
    return tuple(made) if len(made) > 1 else made[0]


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _share_of_index(args: Sequence[Any], _: object) -> Share:
    masks = [index for index in args[1] if _is_mask(index)]
    return tuple(int(mask.count_nonzero()) for mask in masks), max((mask.numel() for mask in masks), default=1)


def _index(share: Share | None, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Index with each boolean mask as the indices of so many of its elements; torch's fake kernel does the rest."""
    expanded: list[Tensor | None] = []
    masks = 0
    for each in indices:
        if each is not None and _is_mask(each):
            expanded += [each.new_empty((_kept(share, each.numel(), masks),), dtype=torch.long)] * each.dim()
            masks += 1
        else:
            expanded.append(each)
    return _aten.index.Tensor(x, expanded)  # type: ignore[no-any-return]


def _unique(share: Share | None, x: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor, Tensor]:
    size = (_kept(share, x.numel()),)
    return x.new_empty(size), x.new_empty(x.shape, dtype=torch.long), x.new_empty(size, dtype=torch.long)


def _bincount(_: Share | None, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Values above ``minlength`` would add bins; those who pass it have none, such as torchmetrics counting classes."""
    if not minlength:
        raise ValueNeededError(
            "torch.bincount without `minlength` has as many bins as its largest value, which only a real run knows."
        )
    return x.new_empty((minlength,), dtype=torch.long if weights is None else torch.double)


def _pack(share: Share | None, x: Tensor, _: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Pack samples, all as long as the longest without a share. The rows at each step are real: the step reads them."""
    steps, most = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    known = len(share[0]) if share else 0
    sizes = [max(1, _kept(share, most, step * known // steps)) for step in range(steps)]
    with unset_fake_temporarily():
        rows = torch.tensor(sizes, dtype=torch.long)
    return x.new_empty((sum(sizes), *x.shape[2:])), rows


class _Rule(NamedTuple):
    """How to note a real result: counts, and the number that they are of; and how to make a fake one."""

    share_of: Callable[[Sequence[Any], Any], Share] | None
    result: Callable[..., object]


_RULES: dict[OpOverload, _Rule] = {
    _aten.bincount.default: _Rule(None, _bincount),
    _aten.nonzero.default: _Rule(
        lambda args, out: ((len(out),), args[0].numel()),
        lambda share, x: x.new_empty((_kept(share, x.numel()), x.dim()), dtype=torch.long),
    ),
    _aten.masked_select.default: _Rule(
        lambda args, out: ((len(out),), torch.broadcast_shapes(args[0].shape, args[1].shape).numel()),
        lambda share, x, mask: x.new_empty(_kept(share, torch.broadcast_shapes(x.shape, mask.shape).numel())),
    ),
    _aten.index.Tensor: _Rule(_share_of_index, _index),
    _aten._unique2.default: _Rule(lambda args, out: ((len(out[0]),), args[0].numel()), _unique),
    _aten._pack_padded_sequence.default: _Rule(lambda _, out: (tuple(out[1].tolist()), int(out[1][0])), _pack),
}
