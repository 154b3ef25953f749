"""Lightning's types, recognized by the names of an object's classes.

Names, since two packages define each class, and older ones lack some.
"""

from __future__ import annotations

import importlib
from typing import Any

from lightning_memguard.errors import CannotTraceError


def is_a(thing: object, *names: str) -> bool:
    """Whether an object is of a class of one of these names, or of a child of one."""
    return any(cls.__name__ in names for cls in type(thing).__mro__)


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def lightning_of(thing: object) -> Any:
    """The Lightning package (``lightning.pytorch`` or ``pytorch_lightning``) that an object's class comes from.

    Raises:
        CannotTraceError: neither package defines any of its classes.
    """
    for cls in type(thing).__mro__:
        for package in _PACKAGES:
            if cls.__module__ == package or cls.__module__.startswith(package + "."):
                return importlib.import_module(package)
    raise CannotTraceError(f"{type(thing).__qualname__} comes from neither `lightning` nor `pytorch_lightning`.")
