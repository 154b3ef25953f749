"""Parameters of tests, of which `make test` runs some and `make long` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long_but(kept: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """Mark all parameters but the kept ones as long; each of those must be there. A tuple is several parameters."""
    every = list(every)
    assert all(each in every for each in kept), [each for each in kept if each not in every]
    values = [each if isinstance(each, tuple) else (each,) for each in every]
    marks = [() if each in kept else pytest.mark.long for each in every]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]
