"""Values on their way from a forked child to its parent, with classes that no import would find there."""

from __future__ import annotations

import gc
import io
import pickle
import sys
from types import FunctionType
from typing import Any

from typing_extensions import override


def packed(value: object) -> bytes:
    """Pickle a value for the process that this one was forked from.

    Raises:
        Exception: something in it cannot be pickled.
    """
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the value, in the process that forked the one which packed it.

    Raises:
        Exception: it holds something that exists only there.
    """
    return pickle.loads(data)  # noqa: S301 - from our own child


class _Pickler(pickle.Pickler):
    """Pickles classes and functions that were made inside of a function by their address, which a fork keeps."""

    @override
    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, (type, FunctionType)) and not _is_importable(thing):
            return _found, (id(thing), thing.__qualname__)
        return NotImplemented


def _is_importable(thing: type | FunctionType) -> bool:
    found: Any = sys.modules.get(thing.__module__)
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is thing


def _found(address: int, name: str) -> Any:
    """Find a class or function among the objects that are alive: an address alone could be of anything."""
    for each in gc.get_objects():
        if id(each) == address and isinstance(each, (type, FunctionType)) and each.__qualname__ == name:
            return each
    raise pickle.UnpicklingError(f"{name} was made in the child")
