"""Batches are cut by sample, as two of different sizes show, or one of them as a guess."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.rescue.cut import (
    WHOLE,
    Cut,
    Entries,
    cut_of,
    cuts_for,
    even_parts,
    part_of,
    size_of,
    uneven_parts,
)
from lightning_memguard.training.rescue.sample_layout import Refused


def batch(size: int) -> dict[str, Any]:
    rows = torch.arange(size)
    return {
        "x": rows.repeat(3, 1),
        "pairs": rows.repeat_interleave(2),
        "mask": torch.ones(4, 4),
        "names": [f"text {row}" for row in range(size)],
        "array": np.arange(size),
        "count": size,
        "kind": "train",
    }


def test_what_grows_with_the_batch_is_cut_and_the_rest_is_kept() -> None:
    """A mask of 4 x 4 is whole in each part of four samples too."""
    cut = cut_of(batch(3), batch(5), 3, 5)
    whole = batch(4)
    part = part_of(whole, cut, 4, 1, 3)
    assert size_of(whole, cut) == 4
    assert part["x"].tolist() == [[1, 2]] * 3
    assert part["pairs"].tolist() == [1, 1, 2, 2]
    assert part["mask"] is whole["mask"]
    assert part["names"] == ["text 1", "text 2"]
    assert part["array"].tolist() == [1, 2]
    assert (part["count"], part["kind"]) == (2, "train")


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (torch.ones(3, 3), torch.ones(5, 5)),  # which of the two dimensions holds samples?
        (torch.ones(4), torch.ones(6)),  # one row more than there are samples
        (torch.ones(3), torch.ones(5, 1)),
        ({"a": torch.ones(3)}, {"b": torch.ones(5)}),
        (torch.ones(3).to_sparse(), torch.ones(5).to_sparse()),
        (torch.ones(7), torch.ones(7)),  # nothing grows
    ],
)
def test_what_cannot_be_cut_by_sample_is_refused(small: Any, large: Any) -> None:
    with pytest.raises(CannotTraceError):
        cut_of(small, large, 3, 5)


def test_texts_are_cut_by_text_however_long_the_longest_is() -> None:
    short, long = torch.arange(24).view(3, 8), torch.ones(5, 13)
    assert part_of(short, cut_of(short, long, 3, 5), 3, 1, 2).tolist() == [[*range(8, 16)]]
    with pytest.raises(CannotTraceError, match="which dimension"):
        cut_of(torch.ones(3, 6), torch.ones(5, 10), 3, 5)


def test_a_batch_of_another_kind_is_refused() -> None:
    cut = cut_of((torch.ones(3), torch.ones(3, 2)), (torch.ones(5), torch.ones(5, 2)), 3, 5)
    with pytest.raises(CannotTraceError, match="not like the ones seen"):
        part_of((torch.ones(4), torch.ones(6, 2)), cut, 4, 0, 2)
    with pytest.raises(CannotTraceError, match="not like the ones seen"):
        part_of([torch.ones(4)], cut, 4, 0, 2)
    assert part_of("anything", WHOLE, 4, 0, 2) == "anything"


def test_parts_are_as_even_as_can_be_and_the_first_the_largest() -> None:
    assert even_parts(0, 8, 3) == [(0, 3), (3, 6), (6, 8)]
    assert even_parts(4, 6, 1) == [(4, 6)]


def test_what_parts_make_of_a_piece_takes_its_place() -> None:
    cut = cut_of(batch(3), batch(5), 3, 5)
    part = part_of(batch(4), cut, 4, 1, 3, lambda piece, of: (of.kind, of.dim, of.rows, len(np.atleast_1d(piece))))
    assert part["x"] == ("rows", 1, 1, 3)
    assert part["pairs"] == ("rows", 0, 2, 4)
    assert part["names"] == ("entries", 0, 1, 2)
    assert part["count"] == ("count", 0, 1, 1)


@pytest.mark.parametrize("read", [list, lambda names: names[0], lambda names: "a" in names, reversed, min])
def test_entries_of_single_samples_may_be_passed_on_and_not_read(read: Any) -> None:
    with pytest.raises(Refused, match=r"entries of single samples from a list \(test_cut.py:"):
        read(Entries(["a", "b"]))


# -- of one batch


Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024 - users have them


@dataclass
class Fields:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "train"


X, Y = torch.arange(12.0).view(4, 3), torch.arange(4)


@pytest.mark.parametrize(
    ("whole", "x_of"),
    [
        (X, lambda part: part),
        ((X, Y), lambda part: part[0]),
        ([X, Y], lambda part: part[0]),
        ({"x": X, "y": Y}, lambda part: part["x"]),
        ({"a": {"b": (Y, [X])}}, lambda part: part["a"]["b"][1][0]),
        (Pair(X, Y), lambda part: part.x),
        (Fields(X, Y), lambda part: part.x),
    ],
    ids=["tensor", "tuple", "list", "dict", "nested", "named tuple", "dataclass"],
)
def test_a_single_batch_is_cut_by_its_size_in_containers_of_its_own(whole: Any, x_of: Any) -> None:
    ((samples, cut),) = cuts_for(whole, None)
    part = part_of(whole, cut, samples, 1, 3)
    assert samples == 4
    assert type(part) is type(whole)
    assert x_of(part).tolist() == X[1:3].tolist()


def test_a_square_matrix_that_may_be_shared_is_cut_first_and_then_not() -> None:
    whole = {"x": X, "bias": torch.eye(4)}
    (first, second) = [part_of(whole, cut, samples, 0, 2) for samples, cut in cuts_for(whole, None)]
    assert first["bias"].shape == (2, 4)
    assert second["bias"] is whole["bias"]
    assert second["x"].shape == (2, 3)


def test_what_was_known_before_training_comes_first() -> None:
    known = cut_of({"x": X[:2], "bias": torch.eye(4)}, {"x": X[:3], "bias": torch.eye(4)}, 2, 3)
    assert [*cuts_for({"x": X, "bias": torch.eye(4)}, known)] == [(4, known)]


def test_a_batch_unlike_those_seen_before_training_is_cut_by_itself() -> None:
    known = cut_of([Y[:2]], [Y[:3]], 2, 3)
    assert [samples for samples, _ in cuts_for({"x": X}, known)] == [4]


def test_a_cut_by_column_is_one_along_the_second_dimension() -> None:
    cut = cut_of(torch.ones(5, 2), torch.ones(5, 3), 2, 3)
    assert cut == Cut("rows", 1)
    assert size_of(torch.ones(5, 4), cut) == 4


# -- sizes of parts


@pytest.mark.parametrize(
    ("total", "most", "sizes"),
    [
        (6, 4, [4, 2]),
        (7, 4, [4, 3]),
        (6, 3, [3, 2, 1]),
        (8, 4, [3, 3, 2]),
        (6, 5, [4, 2]),
        (6, 2, [2, 2, 1, 1]),
        (4, 1, [1, 1, 1, 1]),
        (2, 1, [1, 1]),
        (6, 6, [6]),
    ],
)
def test_parts_differ_in_size_unless_they_are_single_samples(total: int, most: int, sizes: list[int]) -> None:
    """A dependence on the size of a part shows if two sizes differ."""
    parts = uneven_parts(10, 10 + total, most)
    assert [stop - start for start, stop in parts] == sizes
    assert [parts[0][0], *(stop for _, stop in parts)] == [10 + sum(sizes[:place]) for place in range(len(sizes) + 1)]


@pytest.mark.parametrize("total", range(2, 40))
def test_parts_cover_all_samples_and_hold_no_more_than_they_may(total: int) -> None:
    for most in range(1, total):
        parts = uneven_parts(0, total, most)
        assert [sample for start, stop in parts for sample in range(start, stop)] == [*range(total)]
        sizes = {stop - start for start, stop in parts}
        assert max(sizes) <= most
        assert len(sizes) > 1 or sizes == {1}
