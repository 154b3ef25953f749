"""Ask a driver or an operating system that may have no answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


# Asking


def or_none(ask: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
    """The answer, or None where there is none: no library, no driver, no permission, not on this device."""
    try:
        return ask(*args, **kwargs)
    except Exception:  # noqa: BLE001 - drivers fail in ways of their own, and none of them may stop a training
        return None


def indexed(device: torch.device) -> torch.device:
    """The device with its index: ``cuda`` means the current one."""
    if ":" in str(device):
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())
