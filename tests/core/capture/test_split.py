"""Batches are cut by sample, as two of different sizes show; results of the parts become those of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_memguard.core.capture.split import (
    WHOLE,
    Rules,
    are_alike,
    combine,
    cut_of,
    even_parts,
    join,
    part_of,
    rule_of,
    size_of,
)
from lightning_memguard.errors import CannotTraceError


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
    assert part["x"].is_contiguous()
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


def test_parts_are_few_and_even() -> None:
    assert even_parts(0, 8, 3) == [(0, 2), (2, 5), (5, 8)]
    assert even_parts(4, 6, 9) == [(4, 6)]


def test_the_rule_of_a_number_is_the_one_that_gives_that_of_the_batch() -> None:
    values = torch.tensor([1.0, 4.0, 7.0])
    parts = [values[:1], values[1:]]
    for rule in ("mean", "sum", "max", "min"):
        of = {"mean": torch.mean, "sum": torch.sum, "max": torch.max, "min": torch.min}[rule]
        assert rule_of(of(values), [of(part) for part in parts], (1, 2)) == rule
    assert rule_of(values, parts, (1, 2)) == "rows"
    assert rule_of(values.std(), [part.sum() for part in parts], (1, 2)) is None


def test_what_no_rule_by_samples_gives_may_have_the_weights_of_the_loss() -> None:
    tokens = [1.0], [2.0, 6.0]  # means over one, and over two of three
    assert rule_of(3.0, [1.0, 4.0], (1, 2), (1 / 3, 2 / 3)) == "mean"
    whole = sum(map(sum, tokens)) / 4 + 1
    assert rule_of(whole, [1.0, 4.0], (1, 2)) is None
    assert rule_of(whole, [1.0, 4.0], (1, 2), (0.25, 0.75)) == "average"
    rules = Rules({"output": "average"})
    assert join([torch.tensor(1.0), torch.tensor(4.0)], [1, 2], rules, "output", [0.25, 0.75]) == whole


def test_numbers_that_are_none_are_counts_if_they_are_whole() -> None:
    none = torch.tensor(0)
    assert rule_of(none, [none, none], (1, 2)) == "sum"
    assert rule_of(none.float(), [none.float(), none.float()], (1, 2)) == "mean"


def test_results_are_alike_by_value_and_structure() -> None:
    rows = {"rows": torch.arange(3.0), "names": ["a", "b"], "mean": 1}
    assert are_alike(rows, {"rows": torch.arange(3.0) + 1e-9, "names": ["a", "b"], "mean": torch.tensor(1.0)})
    assert not are_alike(rows, rows | {"names": ["a", "c"]})
    assert not are_alike(rows, rows | {"rows": torch.arange(4.0)})
    assert not are_alike(rows, rows | {"more": None})
    assert are_alike(None, None)
    assert not are_alike(None, 0.0)


def test_outputs_are_joined_as_the_step_returns_them() -> None:
    parts = [
        {"rows": torch.tensor([1]), "mean": torch.tensor(1.0), "hits": torch.tensor(1), "texts": ["a"]},
        {"rows": torch.tensor([2, 3]), "mean": torch.tensor(4.0), "hits": torch.tensor(2), "texts": ["b", "c"]},
    ]
    joined = join(parts, (1, 2), Rules({"output.hits": "sum"}), "output")
    assert joined["rows"].tolist() == [1, 2, 3]
    assert joined["texts"] == ["a", "b", "c"]
    assert (joined["mean"].item(), joined["hits"].item()) == (3.0, 3)
    assert combine([torch.ones(2), torch.ones(3)], (1, 2), "mean").shape == (3,)  # not alike: the last
