"""``memguard doctor``: what this installation can do, to read or to paste into an issue."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator

from lightning_memguard._version import __version__
from lightning_memguard.cli import tables
from lightning_memguard.cli.commands.devices import budget_of
from lightning_memguard.cli.options import devices_here
from lightning_memguard.cli.status import progress
from lightning_memguard.core.decision.decision import Budget
from lightning_memguard.units import format_bytes

HELP = "show versions, devices and settings, and what MemGuard cannot do with them: what an issue asks for"

_PACKAGES = ("torch", "pytorch-lightning", "lightning", "nvidia-ml-py")
_OPTIONAL = ("tensorboard", "transformers", "peft", "accelerate", "bitsandbytes", "torchao", "deepspeed")
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")


def run(options: argparse.Namespace) -> bool:
    """Print one row for each thing asked."""
    with progress() as say:
        say("loading torch")
        found = dict(_rows())
    if options.json:
        tables.print_json(found)
    else:
        width = max(map(len, found))
        for name, value in found.items():
            tables.terminal().print(f"{name:<{width}}  {value}", soft_wrap=True)
    return True


def _rows() -> Iterator[tuple[str, str]]:
    import torch

    from lightning_memguard.core import foreign
    from lightning_memguard.core.device.measurements import Store, cudnn_settings, default_path
    from lightning_memguard.core.device.nvml import driver_version
    from lightning_memguard.core.kernels import cudnn
    from lightning_memguard.training.offload.tiers import folder

    yield "lightning-memguard", __version__
    yield "Python", f"{platform.python_version()}, {platform.platform()}"
    for name in (*_PACKAGES, *_OPTIONAL):
        if version := _version_of(name):
            yield name, version
        elif name in _PACKAGES:
            yield name, "not installed"
    yield "tested up to", foreign.untested() or foreign.newest_tested()
    yield "private names", foreign.gaps() or "all are there"
    yield "CUDA", torch.version.cuda or "not in this build of torch"
    yield "NVIDIA driver", _answer_of(driver_version)
    for device in devices_here():
        budget = budget_of(device)
        if isinstance(budget, Budget):
            free, total = format_bytes(budget.free_bytes), format_bytes(budget.total_bytes)
            yield f"device {device}", f"{budget.device}: {free} of {total} free ({budget.source})"
        else:
            yield f"device {device}", budget
    for variable in _VARIABLES:
        if variable in os.environ:
            yield variable, os.environ[variable]
    if torch.backends.cudnn.is_available():
        yield "cuDNN", cudnn_settings()
    asked = cudnn.version()
    yield "cuDNN to ask", str(asked) if asked else "none: workspaces of convolutions come from a table"
    store = Store(default_path())
    measured, damaged = store.read()
    yield "measurements", f"{len(measured)} in {store.path}" + (f" ({damaged} damaged lines)" if damaged else "")
    yield "offloads to files in", _answer_of(folder)


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _answer_of(ask: Callable[[], object]) -> str:
    """Return the answer as text, else the error: a driver, a library or a folder can be missing."""
    from lightning_memguard.core.foreign import reason_of

    try:
        return str(ask())
    except Exception as error:  # noqa: BLE001 - drivers raise errors of any type
        return reason_of(error)
