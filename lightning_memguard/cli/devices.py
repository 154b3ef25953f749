"""The devices a command answers for. torch is imported on use."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_memguard.errors import MemGuardError

COMMON_GPUS = ("T4", "RTX 3090", "RTX 4090", "A100 80GB", "H100")
"""Planned for if this machine has no GPU and none is named."""


def devices_here() -> list[str]:
    """The devices of this machine, the CPU first."""
    import torch

    here = ["cpu"]
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        here += [f"{kind}:{index}" for index in range(module.device_count())] if module.is_available() else []
    return [*here, "mps"] if torch.backends.mps.is_available() else here


def default_devices() -> list[str]:
    """The accelerators of this machine, or else some common ones."""
    return devices_here()[1:] or list(COMMON_GPUS)


def one_device(named: Sequence[str], default: str | None = None) -> str:
    """The device of a command that takes only one.

    Raises:
        MemGuardError: several are named, or the name is unknown.
    """
    from lightning_memguard.training.planning.plan import check_device

    if len(named) > 1:
        raise MemGuardError(f"--device is given {len(named)} times; this command takes only one.")
    device = named[0] if named else default or default_devices()[0]
    check_device(device)
    return device
