"""Sizes that depend on the number of samples: to Python the whole batch's number, to PyTorch the part's shape."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_memguard.training.rescue.sample_layout import refuse

if TYPE_CHECKING:
    from typing_extensions import Self


_KEEPS_BY_SHAPE = ("/einops/", "/torch/")  # what these look up follows from shapes alone


class Size(int):
    """A size of a part's tensor, such as its first dimension.

    Its value is the size for the whole batch, so whatever reads it as a number (arithmetic, comparisons, ``math``,
    NumPy, ``int()``) computes what the whole step would compute. Functions of torch get `part` as a shape. A number
    that lost its class on the way is the whole batch's, and a shape of that size raises: it is never silently wrong.

    Attributes:
        part: the size of this part's tensor.
        arranged: the arrangement of its samples; see `Layout`.
    """

    part: int
    arranged: int = 0

    def __new__(cls, whole: int, part: int) -> Self:  # noqa: D102
        self = super().__new__(cls, whole)
        self.part = part
        return self

    def __hash__(self) -> int:
        caller = sys._getframe(1).f_code.co_filename
        if not any(library in caller for library in _KEEPS_BY_SHAPE):
            raise refuse("it looks the number of samples up in a dict, a set or a cache")
        return hash((Size, int(self), self.part))  # unlike the whole batch's, of which their caches may hold shapes

    def __eq__(self, other: object) -> bool:
        return int(self) == other

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


def _lift(name: str) -> Callable[[Size, Any], Any]:
    own = getattr(int, name)

    def method(self: Size, other: object) -> Any:
        whole = own(int(self), int(other) if isinstance(other, Size) else other)
        if type(whole) is not int:
            return whole
        try:
            part = own(self.part, other.part if isinstance(other, Size) else other)
        except (ArithmeticError, ValueError):  # only the part divides by zero, or shifts by less than nothing
            return whole
        return Size(whole, part)

    return method


for _name in ["add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod"]:
    setattr(Size, f"__{_name}__", _lift(f"__{_name}__"))
setattr(Size, "__neg__", lambda self: Size(operator.neg(int(self)), -self.part))  # noqa: B010 - as its siblings above


def as_shape(value: Any) -> Any:
    """A function's argument with each `Size` in it replaced by the part's."""
    kind = type(value)
    if kind is Size:
        return value.part
    if kind is slice:
        return slice(as_shape(value.start), as_shape(value.stop), as_shape(value.step))
    if isinstance(value, (list, tuple)) and sizes_in(value):
        return [as_shape(each) for each in value] if kind is list else tuple(as_shape(each) for each in value)
    return value


def sizes_in(value: Any) -> bool:
    """Whether an argument holds a `Size`."""
    kind = type(value)
    if kind is Size:
        return True
    if kind is slice:
        return Size in (type(value.start), type(value.stop), type(value.step))
    return isinstance(value, (list, tuple)) and any(sizes_in(each) for each in value)


def plain(value: object) -> Any:
    """A number, or a shape, without this class."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple, torch.Size) and sizes_in(value):
        return type(value)(plain(each) for each in value)
    return int(value) if type(value) is Size else value
