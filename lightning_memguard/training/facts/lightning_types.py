"""Lightning's types, recognized by the names of an object's classes.

Names, since two packages define each class, and older ones lack some.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, TypeGuard

from lightning_memguard.errors import CannotTraceError

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy


def is_a(thing: object, *names: str) -> bool:
    """Whether an object is of a class of one of these names, or of a child of one."""
    return any(cls.__name__ in names for cls in type(thing).__mro__)


def wraps_in_ddp(strategy: object) -> TypeGuard[DDPStrategy]:
    """Whether training under this strategy wraps the module in DistributedDataParallel."""
    return is_a(strategy, "DDPStrategy") and not is_a(strategy, "DeepSpeedStrategy", "XLAStrategy")


def shards(strategy: object) -> bool:
    """Whether a strategy divides the module among its ranks."""
    return is_a(strategy, "FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


def is_deepspeeds(value: object) -> bool:
    """Whether an object is DeepSpeed's engine or a ZeRO optimizer."""
    return type(value).__module__.startswith("deepspeed.")


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
