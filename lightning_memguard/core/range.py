"""A quantity that is not known exactly."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from typing_extensions import Self, override

N = TypeVar("N", bound=float)


class Range(tuple[N, N, N], Generic[N]):
    """Bytes or seconds: at least, most likely, at most. The likely figure is never outside, and none is below zero.

    >>> Range(3, 2, 5) + Range(-1, 1, 1)
    Range(2, 3, 6)
    """

    __slots__ = ()

    def __new__(cls, low: N, likely: N, high: N) -> Self:
        """Widen the ends to hold the likely figure."""
        likely = max(likely, _none_of(likely))
        return super().__new__(cls, (max(min(low, likely), _none_of(likely)), likely, max(likely, high)))

    @classmethod
    def exactly(cls, figure: N) -> Self:
        """A figure that is known."""
        return cls(figure, figure, figure)

    @property
    def low(self) -> N:
        """The least."""
        return self[0]

    @property
    def likely(self) -> N:
        """The most likely figure."""
        return self[1]

    @property
    def high(self) -> N:
        """The most."""
        return self[2]

    @property
    def is_exact(self) -> bool:
        """Whether it is known."""
        return self[0] == self[2]

    def as_dict(self) -> dict[str, N]:
        """The figures by name."""
        return {"low": self[0], "likely": self[1], "high": self[2]}

    def scaled(self, factor: N) -> Range[N]:
        """Each of the three, times a factor."""
        figures: Any = (each * factor for each in self)
        return Range(*figures)

    @override
    def __add__(self, other: Range[N]) -> Range[N]:  # type: ignore[override]  # of quantities, not of tuples
        figures: Any = (mine + its for mine, its in zip(self, other, strict=True))
        return Range(*figures)

    def __bool__(self) -> bool:
        return self[2] > 0

    def __getnewargs__(self) -> tuple[N, N, N]:
        return self[0], self[1], self[2]

    @override
    def __repr__(self) -> str:
        return f"Range{tuple(self)}"


def _none_of(figure: N) -> N:
    return type(figure)(0)


NOTHING = Range(0, 0, 0)
