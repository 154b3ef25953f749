"""Advice as records, and as a person reads it."""

from __future__ import annotations

import pytest

from lightning_memguard.core.decision.advice import Advice, by_savings, shortlist, text, what_would_fit
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.units import GIB


def advice(*remedies: str, saves: int, fits: bool = True) -> Advice:
    need = 10 - saves
    footprint = Footprint(8, "cuda", need * GIB, need * GIB, need * GIB)
    how, costs = (tuple(f"{word} {name}" for name in remedies) for word in ("use", "pay"))
    return Advice(remedies, how, costs, footprint, saves * GIB, fits)


def names(several: tuple[Advice, ...]) -> list[str]:
    return ["+".join(each.remedies) for each in several]


def test_a_line_says_what_how_much_how_and_at_what_cost():
    assert text(advice("a", "b", saves=3)) == "a + b: 7.0 GiB, 3.0 GiB less, fits. use a; use b. Costs: pay a; pay b."


def test_a_line_says_where_it_is_not_enough():
    assert "1.0 GiB less, does not fit" in text(advice("a", saves=1, fits=False))


def test_what_saves_most_comes_first_and_of_equals_the_single_remedy():
    several = [advice("a", saves=1), advice("b", "c", saves=3), advice("d", saves=3), advice("e", saves=2)]
    assert names(by_savings(several)) == ["d", "b+c", "e", "a"]


def test_of_those_that_fit_single_remedies_are_read_before_pairs():
    several = [advice("a", "b", saves=5), advice("a", saves=2), advice("c", saves=3), advice("d", saves=9, fits=False)]
    assert names(shortlist(several)) == ["c", "a", "a+b"]
    assert names(shortlist(several, 2)) == ["c", "a"]


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


def test_what_was_not_tried_is_said():
    assert what_would_fit([advice("a", saves=2)], 3).endswith("  (3 more were not tried, for lack of time)")


def test_no_advice_is_no_text():
    assert not what_would_fit([], 3)
