"""The arguments of a call that a dispatch mode sees, by their names in the operator's schema."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch._ops import OpOverload


@functools.cache
def _defaults(operator: OpOverload) -> dict[str, Any]:
    """The names of all arguments in order, with their defaults; None where there is none."""
    return {argument.name: argument.default_value for argument in operator._schema.arguments}


def by_name(operator: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Any]:
    """An operator's arguments by name, in the order of its schema, defaults filled in."""
    defaults = _defaults(operator)
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
