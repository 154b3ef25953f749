"""Advice as records, and as a person reads it."""

from __future__ import annotations

import pytest

from lightning_memguard.core.decision.advice import Advice, in_order, shortlist, text, what_would_fit
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.units import GIB


def advice(*remedies: str, saves: int, fits: bool = True) -> Advice:
    """Advice whose remedies are letters: ``a`` changes the training less than ``b``."""
    need = 10 - saves
    footprint = Footprint(8, "cuda", need * GIB, need * GIB, need * GIB)
    how, costs = (tuple(f"{word} {name}" for name in remedies) for word in ("use", "pay"))
    return Advice(remedies, how, costs, footprint, saves * GIB, fits, places=tuple(map(ord, remedies)))


def names(several: tuple[Advice, ...]) -> list[str]:
    return ["+".join(each.remedies) for each in several]


def test_a_line_says_what_how_much_how_and_at_what_cost():
    assert text(advice("a", "b", saves=3)) == "a + b: 7.0 GiB, 3.0 GiB less, fits. use a; use b. Costs: pay a; pay b."


def test_a_line_says_where_it_is_not_enough():
    assert "1.0 GiB less, does not fit" in text(advice("a", saves=1, fits=False))


def test_what_fits_is_named_from_the_least_change_of_the_training_and_the_rest_by_what_it_saves():
    fitting = [advice("d", saves=9), advice("a", "d", saves=9), advice("c", saves=3), advice("a", "b", saves=5)]
    others = [advice("a", saves=1, fits=False), advice("b", "e", saves=2, fits=False), advice("e", saves=2, fits=False)]
    assert names(in_order([*others, *fitting])) == ["a+b", "c", "d", "a+d", "e", "b+e", "a"]
    assert names(shortlist([*others, *fitting], 3)) == ["a+b", "c", "d"]


def test_where_none_fits_those_that_come_nearest_are_read():
    several = [
        advice("a", saves=2, fits=False),
        advice("a", "b", saves=5, fits=False),
        advice("c", saves=1, fits=False),
    ]
    assert names(shortlist(several, 2)) == ["a+b", "a"]


@pytest.mark.parametrize(
    ("fits", "headline"),
    [(True, "What would make it fit ("), (False, "Nothing that was tried makes it fit; what comes nearest (")],
)
def test_the_headline_says_whether_any_of_it_helps(fits: bool, headline: str):
    lines = what_would_fit([advice("a", saves=2, fits=fits)])
    assert lines.startswith(headline)
    assert lines.splitlines()[1:] == [f"  - {text(advice('a', saves=2, fits=fits))}"]


@pytest.mark.parametrize(("count", "words"), [(1, "1 more was not tried"), (3, "3 more were not tried")])
def test_what_was_not_tried_is_said(count: int, words: str):
    assert what_would_fit([advice("a", saves=2)], count).endswith(f"  ({words}, for lack of time)")


def test_no_advice_is_no_text():
    assert not what_would_fit([], 3)
