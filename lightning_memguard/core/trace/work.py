"""Operators of a step as the work they do, FLOPs and bytes: the record that its time is predicted from."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

COMMUNICATION, TRANSFER = "communication", "transfer"
CONVOLUTION = " convolution"  # after a number format
SPECIAL, RANDOM = "special functions", "random numbers"


class Work(NamedTuple):
    """Equal calls of one operator: what each computes and moves.

    Attributes:
        kind: the number format that a product computes in, such as ``"float16"`` or ``"tf32 convolution"``; what else
            a CPU is slow at (``"special functions"``, ``"random numbers"``); ``"communication"`` for what is sent to
            other ranks; ``"transfer"`` for activations that wait on the host; empty for all else, whose time its bytes
            decide.
        flops: floating point operations of a call; a multiply-add is two, and a special function or random number one.
        nbytes: bytes that a call reads and writes, or sends.
        updates: whether the optimizer runs it, once a step, and not each batch.
        calls: how many such calls there are.
    """

    kind: str
    flops: float
    nbytes: float
    updates: bool = False
    calls: int = 1


Group = tuple[tuple[Work, ...], int]
"""One call at each captured size, and how many such calls there are."""


def groups_of(works: Sequence[Sequence[Work]]) -> tuple[Group, ...]:
    """Group the calls of a step that are the same at each of several batch sizes.

    Args:
        works: by size, the calls in order.

    Returns:
        The groups; without an order that all sizes share, those of the last size alone.
    """
    outlines = {tuple((each.kind, each.updates) for each in work) for work in works}
    return tuple(Counter(zip(*(works if len(outlines) == 1 else works[-1:]), strict=True)).items())


@dataclass(frozen=True)
class WorkAt(Sequence[Work]):
    """The calls at another batch size, worked out when they are read: on the line or square through the captured ones.

    A call that is known at one size alone grows in proportion, but for the optimizer's.
    """

    groups: Sequence[Group]
    sizes: Sequence[int]
    batch_size: int

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, place: Any) -> Any:
        return self._calls[place]

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._calls,)

    @functools.cached_property
    def _calls(self) -> tuple[Work, ...]:
        at = functools.partial(_at, sizes=self.sizes, batch_size=self.batch_size)
        return tuple(
            last._replace(
                flops=at([each.flops for each in calls], fixed=last.updates),
                nbytes=at([each.nbytes for each in calls], fixed=last.updates),
                calls=times,
            )
            for calls, times in self.groups
            for last in calls[-1:]
        )


def _at(values: Sequence[float], sizes: Sequence[int], batch_size: int, *, fixed: bool) -> float:
    """Lagrange's polynomial through the values of up to three sizes."""
    if len(values) == 1:
        return values[0] if fixed else values[0] * batch_size / sizes[-1]
    known = list(zip(sizes, values, strict=True))[-3:]
    return max(0.0, sum(value * _share(size, [n for n, _ in known if n != size], batch_size) for size, value in known))


def _share(size: int, others: Sequence[int], batch_size: int) -> float:
    return math.prod((batch_size - other) / (size - other) for other in others)
