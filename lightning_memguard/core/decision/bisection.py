"""The largest number for which something holds, found in few trials."""

from __future__ import annotations

from collections.abc import Callable


def largest_that(holds: Callable[[int], bool], good: int, most: int) -> int:
    """The largest number up to ``most`` for which it holds; ``most`` is tried first, then the gap is halved.

    Args:
        holds: whether it holds for a number; where it fails for one, it fails for all larger ones.
        good: a number for which it is believed to hold; it is not tried.
        most: the largest number to consider.

    Example:
        >>> largest_that(lambda number: number * number <= 50, good=1, most=100)
        7
    """
    if most <= good or holds(most):
        return most
    bad = most
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good
