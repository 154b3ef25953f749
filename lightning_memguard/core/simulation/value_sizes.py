"""How large results are whose size depends on values: noted in a real run, and given to a fake one.

A mask keeps a share of what it is given, whatever the batch size; so a few real batches tell how much it keeps of a
larger one, on any device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lightning_memguard.core.foreign import aten as _aten
from lightning_memguard.core.simulation import fake
from lightning_memguard.core.trace.trace import Share, Shares


class ValueSizes:
    """The shares of one run.

    Args:
        given: those of another run, which are handed out in their order.
    """

    def __init__(self, given: Shares = ()) -> None:
        self._given = dict(given)
        self._asked: Counter[tuple[str, str]] = Counter()
        self._noted: defaultdict[tuple[str, str], list[Share]] = defaultdict(list)

    @property
    def are_given(self) -> bool:
        """Whether they are those of another run."""
        return bool(self._given)

    @property
    def noted(self) -> Shares:
        """Return the shares of each call, by operator and line."""
        return tuple((key, tuple(shares)) for key, shares in self._noted.items())

    def note(self, func: OpOverload, line: Callable[[], str], args: Sequence[Any], out: Any) -> None:
        """Note how large a real result is."""
        share_of = _SHARE_OF.get(func)
        if share_of is not None:
            self._noted[str(func), line()].append(share_of(args, out))

    def result(self, func: OpOverload, line: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """A fake result as large as that of the same call of the other run; else of the largest of its calls.

        Raises:
            ValueNeededError: the step asks for a value.
        """
        key = str(func), line
        shares, place = self._given.get(key, ()), self._asked[key]
        self._asked[key] += 1
        if not shares or func not in _RESULT:
            return fake.worst_case_result(func, args, kwargs)
        return _RESULT[func](shares[place] if place < len(shares) else max(shares), *args, **kwargs)


# -- noted: counts, and the number that they are of


def _share_of_index(args: Sequence[Any], _: object) -> Share:
    masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    kept = [int(index.count_nonzero()) for index in masks]
    return tuple(kept), max((index.numel() for index in masks), default=1)


_SHARE_OF: dict[OpOverload, Callable[[Sequence[Any], Any], Share]] = {
    _aten.nonzero.default: lambda args, out: ((len(out),), args[0].numel()),
    _aten.masked_select.default: lambda args, out: (
        (len(out),),
        torch.broadcast_shapes(args[0].shape, args[1].shape).numel(),
    ),
    _aten.index.Tensor: _share_of_index,
    _aten._unique2.default: lambda args, out: ((len(out[0]),), args[0].numel()),
    _aten._pack_padded_sequence.default: lambda _, out: (tuple(out[1].tolist()), int(out[1][0])),
}


# -- given


def _scaled(count: int, of: int, size: int) -> int:
    """Return ``count / of`` of another size, rounded up."""
    return min(size, -(-count * size // max(1, of)))


def _cut(share: Share, largest: Tensor) -> Tensor:
    (count,), of = share
    return largest.new_empty((_scaled(count, of, len(largest)), *largest.shape[1:]))


def _cut_result(func: OpOverload) -> Callable[..., Tensor]:
    return lambda share, *args, **kwargs: _cut(share, fake.worst_case_result(func, args, kwargs))  # type: ignore[arg-type]


def _unique(share: Share, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    values, inverse, counts = cast("tuple[Tensor, ...]", fake.worst_case_result(_aten._unique2.default, args, kwargs))
    return _cut(share, values), inverse, _cut(share, counts)


def _index(share: Share, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    counts, of = iter(share[0]), share[1]
    return fake.index(x, indices, lambda mask: _scaled(next(counts, of), of, mask.numel()))


def _pack(share: Share, x: Tensor, _: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    rows, of = share
    steps, most = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    sizes = [max(1, _scaled(rows[step * len(rows) // steps], of, most)) for step in range(steps)]
    with unset_fake_temporarily():
        known = torch.tensor(sizes)
    return x.new_empty((sum(sizes), *x.shape[2:])), known


_RESULT: dict[OpOverload, Callable[..., object]] = {
    _aten.nonzero.default: _cut_result(_aten.nonzero.default),
    _aten.masked_select.default: _cut_result(_aten.masked_select.default),
    _aten.index.Tensor: _index,
    _aten._unique2.default: _unique,
    _aten._pack_padded_sequence.default: _pack,
}
