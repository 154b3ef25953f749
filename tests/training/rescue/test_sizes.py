"""Sizes of a part are the whole batch's as numbers, and the part's as shapes."""

from __future__ import annotations

import copy
import math
import operator
import pickle

import numpy as np
import pytest
import torch

from lightning_memguard.training.rescue.sample_layout import Refused
from lightning_memguard.training.rescue.sizes import Size, as_shape, plain, sizes_in

SIX = Size(6, 2)  # six samples, two of them in the part


@pytest.mark.parametrize(
    ("calculate", "whole", "part"),
    [
        (lambda n: n + 1, 7, 3),
        (lambda n: 1 + n, 7, 3),
        (lambda n: n - 1, 5, 1),
        (lambda n: 8 - n, 2, 6),
        (lambda n: n * 4, 24, 8),
        (lambda n: 4 * n, 24, 8),
        (lambda n: n // 2, 3, 1),
        (lambda n: 12 // n, 2, 6),
        (lambda n: n % 4, 2, 2),
        (lambda n: 9 % n, 3, 1),
        (lambda n: -n, -6, -2),
        (lambda n: n * n, 36, 4),
        (lambda n: n * 4 // 8, 3, 1),
    ],
)
def test_arithmetic_keeps_both_sizes(calculate, whole, part):
    size = calculate(SIX)
    assert type(size) is Size
    assert (int(size), size.part) == (whole, part)


@pytest.mark.parametrize(
    ("calculate", "whole"),
    [
        (lambda n: n / 4, 1.5),
        (lambda n: 3 / n, 0.5),
        (lambda n: n * 0.5, 3.0),
        (lambda n: n**2, 36),
        (lambda n: divmod(n, 4), (1, 2)),
        (math.log2, math.log2(6)),
        (math.sqrt, math.sqrt(6)),
        (math.ceil, 6),
        (int, 6),
        (float, 6.0),
        (str, "6"),
        (lambda n: f"{n:03d}", "006"),
        (np.float32, np.float32(6)),
        (lambda n: np.ones(2) * n, np.full(2, 6.0)),
        (lambda n: max(n, 3), 6),
        (operator.index, 6),
        (range, range(6)),
        (bool, True),
        (lambda n: [1, 2, 3, 4, 5, 6, 7][n], 7),
        (lambda n: torch.tensor(float(n)).item(), 6.0),
    ],
)
def test_as_a_number_it_is_the_whole_batchs(calculate, whole):
    assert np.all(calculate(SIX) == whole)


def test_comparisons_are_those_of_the_whole_batch():
    assert SIX > 5
    assert SIX == 6
    assert not SIX < 3
    assert SIX != 2
    assert Size(6, 3) == SIX


def test_division_by_zero_in_the_part_alone_leaves_the_whole_batchs_number():
    size = 7 // (Size(6, 2) - 2)
    assert (type(size), size) == (int, 1)


def test_division_by_zero_of_the_whole_batch_is_an_error():
    with pytest.raises(ZeroDivisionError):
        7 // (Size(6, 2) - 6)


def test_a_size_is_not_looked_up_in_a_dict_since_the_whole_batch_is_equal_to_it():
    for look_up in (lambda: {6: "whole"}.get(SIX), lambda: SIX in {6: None}, lambda: SIX in {6, 7}):
        with pytest.raises(Refused, match="in a dict, a set or a cache"):
            look_up()


def test_copies_to_other_processes_are_plain_numbers():
    assert type(pickle.loads(pickle.dumps(SIX))) is int
    assert type(copy.deepcopy(SIX)) is int
    assert type(plain(SIX)) is int
    assert plain("six") == "six"


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (SIX, 2),
        ((SIX, 4), (2, 4)),
        ([SIX, [SIX * 2]], [2, [4]]),
        (torch.Size([3, SIX]), (3, 2)),
        (slice(None, SIX), slice(None, 2)),
        (slice(SIX, SIX * 2, 1), slice(2, 4, 1)),
    ],
)
def test_as_a_shape_it_is_the_parts(value, shape):
    assert sizes_in(value)
    assert as_shape(value) == shape
    assert not sizes_in(as_shape(value))


@pytest.mark.parametrize("value", [6, "6", (6, 4), [None], slice(0, 6), None, 6.0])
def test_other_arguments_are_passed_on_as_they_are(value):
    assert not sizes_in(value)
    assert as_shape(value) == value


def test_numbers_that_lost_their_class_do_not_fit_as_shapes():
    """They are the whole batch's, and raise instead of being silently wrong."""
    with pytest.raises(RuntimeError):
        torch.zeros(2, 4).view(int(SIX), 4)
