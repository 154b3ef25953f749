"""Bytes as people write them, and bytes as people read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import GIB, KIB, MIB, TIB, format_bytes, parse_bytes


def test_each_binary_unit_is_1024_of_the_one_below():
    assert (KIB, MIB, GIB, TIB) == (1024, 1024 * KIB, 1024 * MIB, 1024 * GIB)


# Reading


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *[("7", 7), ("7B", 7), ("3KiB", 3 * 1024), ("5 MiB", 5 * MIB), ("24GiB", 24 * GIB), ("2 TiB", 2 * TIB)],
        *[("3KB", 3_000), ("800 MB", 800_000_000), ("24GB", 24_000_000_000), ("2TB", 2_000_000_000_000)],
        *[("1.5KiB", 1536), (".5 MiB", MIB // 2), ("0.7KiB", 716), ("1.9", 1), ("1.001KB", 1001)],
        *[("9007199254740993", 2**53 + 1), (2**53 + 1, 2**53 + 1)],  # beyond a float's reach
    ],
)
def test_units_with_an_i_are_powers_of_1024_others_of_1000_and_a_fraction_of_a_byte_is_dropped(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["24gib", "24 GIB", "  24GiB  ", "24\tGiB", "24.0GiB", "2_4GiB"])
def test_case_blanks_and_underscores_do_not_matter(text):
    assert parse_bytes(text) == 24 * GIB


@pytest.mark.parametrize(
    "text", ["", "GiB", "24 GB/s", "24XiB", "-1GiB", "1,5GiB", "1e9", "1.GiB", "_1GiB", "24 Gi B", "\u0663GiB"]
)
def test_text_that_is_not_a_quantity_is_refused_with_three_that_are(text):
    expected = f"{text!r} is not a quantity of bytes; pass an int, or text such as '24GiB', '800MB' or '512 MiB'."
    with pytest.raises(MemGuardError, match=f"^{re.escape(expected)}$"):
        parse_bytes(text)


@pytest.mark.parametrize("quantity", [None, True, 1.5, ["24GiB"], 0, -3, "0", "0GiB", "0.5B", "0.0001KiB"])
def test_nothing_less_and_what_is_neither_int_nor_text_is_refused(quantity):
    positive = "positive " if isinstance(quantity, (int, str)) and quantity is not True else ""
    expected = f"{quantity!r} is not a {positive}number of bytes; pass an int, or text such as '24GiB'."
    with pytest.raises(MemGuardError, match=f"^{re.escape(expected)}$"):
        parse_bytes(quantity)


# Writing


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (MIB, "1.0 MiB"),
        (25_757_220_864, "24.0 GiB"),
        (1000 * GIB, "1000.0 GiB"),
        (3 * TIB, "3.0 TiB"),
        (5000 * TIB, "5000.0 TiB"),
    ],
)
def test_the_largest_unit_that_leaves_a_one_before_the_point_is_written(nbytes, text):
    assert format_bytes(nbytes) == text


def test_a_shortfall_is_written_like_what_it_falls_short_of():
    assert (format_bytes(-1536), format_bytes(-7)) == ("-1.5 KiB", "-7 B")


def test_1024_of_a_unit_is_one_of_the_next():
    assert format_bytes(MIB - 1) == "1.0 MiB"


# Both


@given(st.integers(1, 2**50))
def test_what_was_written_reads_back_within_five_percent(nbytes):
    """One decimal behind a number that is at least 1 errs by 0.05 at most."""
    assert abs(parse_bytes(format_bytes(nbytes)) - nbytes) <= nbytes / 20


@given(st.integers(1, 1023), st.sampled_from(("B", "KiB", "MiB", "GiB", "TiB")))
def test_whole_units_come_back_to_the_byte(count, unit):
    written = format_bytes(parse_bytes(f"{count} {unit}"))
    assert parse_bytes(written) == parse_bytes(f"{count}{unit}")
    assert written in (f"{count} {unit}", f"{count}.0 {unit}")
