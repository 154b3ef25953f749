"""What a child sends may be of classes that were made inside of a function, if its parent has them too."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass

import pytest

from lightning_memguard.core.isolation.pool import Children
from lightning_memguard.core.isolation.sending import packed, unpacked


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_classes_and_functions_of_a_function_come_back() -> None:
    @dataclass
    class Batch:
        x: list[int]

    def double(number: int) -> int:
        return 2 * number

    with Children[int, bytes](lambda number: packed((Batch([number]), double)), most=1) as pool:
        batch, function = unpacked(pool.answer(3).value or b"")
    assert batch == Batch([3])
    assert type(batch) is Batch
    assert function is double


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_those_that_the_child_made_do_not() -> None:
    def make(_: int) -> bytes:
        class Made:
            pass

        return packed(Made())

    with Children[int, bytes](make, most=1) as pool:
        data = pool.answer(0).value or b""
    with pytest.raises(pickle.UnpicklingError, match="made in the child"):
        unpacked(data)
