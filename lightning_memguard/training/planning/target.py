"""The name of a device -> what to predict for: an available device, or a GPU of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from lightning_memguard.core import gpus
from lightning_memguard.core.capture.recorder import part_bytes
from lightning_memguard.core.decision.decision import Budget, Limits
from lightning_memguard.core.device.budget import read_budget
from lightning_memguard.core.device.context import context_bytes, nccl_bytes
from lightning_memguard.core.device.process import process_bytes
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.range import NOTHING, Range
from lightning_memguard.core.simulation.fake_cuda import gpu_of
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import format_bytes


@dataclass(frozen=True)
class Target:
    """Device to predict for; ``capacity_bytes`` is None if the memory is not known or not to be filled."""

    device: torch.device
    gpu: Gpu | None = None
    context_bytes: Range[int] = NOTHING
    capacity_bytes: int | None = None
    notes: tuple[str, ...] = ()

    def talking(self, communicators: int) -> Target:
        """Return the target with the memory that NCCL takes for so many communicators."""
        if self.device.type != "cuda" or self.gpu is None or not communicators:
            return self
        taken = nccl_bytes(communicators, self.gpu.compute_capability)
        capacity = None if self.capacity_bytes is None else self.capacity_bytes - taken.likely
        return replace(self, context_bytes=self.context_bytes + taken, capacity_bytes=capacity)


_STAND_IN = "NVIDIA A100-SXM4-80GB"


def check_device(name: str) -> torch.device | Gpu:
    """The device that a name means, or the GPU of the catalogue.

    Raises:
        MemGuardError: it is neither a device of torch's that trains nor a GPU of the catalogue.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        return gpus.find(name)
    if device.type not in ("cpu", "cuda", "mps", "xpu"):
        raise MemGuardError(f"device={name!r} does not train; pass 'cpu', 'cuda' or the name of a GPU.")
    return device


def target_of(name: str, model: nn.Module | None = None) -> Target:
    """Return the target named by ``device`` of `lightning_memguard.training.planning.estimate.estimate`.

    Raises:
        MemGuardError: it is neither a device of torch's that trains nor a GPU of the catalogue.
    """
    device = check_device(name)
    if isinstance(device, Gpu):
        return Target(torch.device("cuda"), device, device.context_bytes, device.capacity_bytes)
    if device.type == "cpu" and model is not None:
        return Target(device, context_bytes=process_bytes(model.parameters(), torch.get_num_threads()))
    if device.type != "cuda":
        return Target(device)
    if torch.cuda.is_available():
        return Target(device, gpu_of(device), context_bytes(device))
    note = f"no CUDA device is available: predicted for an {_STAND_IN}; choose another GPU, or the CPU, by `device`"
    return replace(target_of(_STAND_IN), capacity_bytes=None, notes=(note,))


def target_and_budget(name: str, limits: Limits, model: nn.Module) -> tuple[Target, Budget]:
    """Return a target, and the budget that it offers to a training of a model.

    Raises:
        MemGuardError: the name is unknown, or the budget is more than a GPU that is not available has.
    """
    device = check_device(name)
    if isinstance(device, Gpu) or (device.type == "cuda" and not torch.cuda.is_available()):
        target = target_of(name)
        gpu, given = target.gpu, limits.budget_bytes
        assert gpu is not None
        free, source = (gpu.memory_bytes, "catalogue") if given is None else (given, "given")
        if free > gpu.memory_bytes:
            raise MemGuardError(
                f"budget={format_bytes(free)} is more than the {gpu.name} has: {format_bytes(gpu.memory_bytes)}. Give "
                "less, or a larger GPU."
            )
        return target, Budget(gpu.memory_bytes, free, int(free * limits.margin), source, gpu.name)
    held_bytes = part_bytes({"model": [*model.parameters(), *model.buffers()]}, device.type)["model"]
    budget = read_budget(device, budget=limits.budget_bytes, margin=limits.margin, already_held_bytes=held_bytes)
    return target_of(name, model), budget
