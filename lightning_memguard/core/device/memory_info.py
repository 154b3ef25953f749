"""How much memory one source reports for a device. Sources may fail: a driver, a library or a file can be missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True)
class MemoryInfo:
    """Report of one source on a device, in bytes.

    ``used_bytes`` is the memory of processes, without the driver's own; None if the source does not report it.
    """

    total_bytes: int
    free_bytes: int
    source: str
    used_bytes: int | None = None


def least_free(infos: Iterable[MemoryInfo | None]) -> MemoryInfo | None:
    """The one with the least free memory; None if no source answered."""
    return min((info for info in infos if info), key=lambda info: info.free_bytes, default=None)


def or_none(ask: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
    """Call a source; None if it fails: no library, no driver, no permission, or not supported on this device."""
    try:
        return ask(*args, **kwargs)
    except Exception:  # noqa: BLE001 - drivers raise errors of any type, and none of them may stop a training
        return None
