"""The one search for the largest number that holds."""

from __future__ import annotations

import pytest

from lightning_memguard.core.decision.bisection import largest_that


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 63, 64, 99, 100, 1000])
def test_it_finds_the_largest_number_that_holds(limit):
    assert largest_that(lambda number: number <= limit, 1, 100) == min(limit, 100)


def test_it_tries_the_largest_first_and_few_others():
    """A thousand numbers take one try where all hold, and at most ten more where some do not."""
    tried: list[int] = []
    assert largest_that(lambda number: not tried.append(number), 1, 1000) == 1000
    assert tried == [1000]
    tried.clear()
    assert largest_that(lambda number: not tried.append(number) and number <= 300, 1, 1000) == 300
    assert len(tried) <= 11


def test_the_number_believed_good_is_not_tried():
    assert largest_that(lambda number: False, 5, 9) == 5
