"""`estimate`: the footprint of a model at a batch size, for anyone without a running Trainer.

It stands here, and not in core/, because a LightningModule is stepped in Lightning's order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_memguard.core import gpus
from lightning_memguard.core.capture.batch import Batches, batches_from_one
from lightning_memguard.core.capture.fake_cuda import gpu_of, pretended_cuda
from lightning_memguard.core.capture.predict import predict
from lightning_memguard.core.capture.program import PRECISIONS, LoopProgram, Program
from lightning_memguard.core.decision.decision import check_count
from lightning_memguard.core.device.context import CONTEXT_BYTES, context_bytes
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.training.adapter.lightning_types import lightning_of
from lightning_memguard.training.adapter.program import LightningProgram, quiet


def estimate(
    model: Any,
    batch: Any,
    *,
    batch_size: int | None = None,
    step: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    device: str = "cuda",
    precision: str = "32-true",
    training: bool = True,
) -> Footprint:
    """Predict the memory of one training step, or of one inference.

    Args:
        model: a LightningModule, stepped in Lightning's order by its ``training_step`` and ``configure_optimizers``; or
            any ``nn.Module`` together with ``step`` and ``optimizer``, stepped in PyTorch's canonical loop
            (``zero_grad``, forward, backward, ``step``). Only a copy without memory runs.
        batch: an example batch: real, meta or fake tensors in any nesting.
        batch_size: the number of samples to predict for (default: the batch's own).
        step: ``(model, batch) -> loss``; for a plain module.
        optimizer: ``(parameters) -> Optimizer``; for a plain module (default: none, gradients only).
        device: ``"cpu"``; ``"cuda"`` for the GPU that is there, or, where there is none, for one like an A100; or a
            GPU by name, such as ``"NVIDIA H200"`` or ``"RTX 4090"``, which need not be there.
        precision: one of Lightning's names, such as ``"bf16-mixed"``.
        training: False for one inference forward under ``torch.no_grad``: ``step`` where given; of a LightningModule
            ``predict_step``, or ``validation_step`` where only that is its own; else ``model(batch)``.

    Returns:
        The footprint at ``batch_size``.

    Raises:
        MemGuardError: an argument is unknown, or a plain module comes without ``step``.
        CannotTraceError: the batch holds no tensor, or the step cannot be run on a copy.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(1024, 1024)
        >>> batch = torch.zeros(8, 1024)
        >>> footprint = estimate(
        ...     model, batch, batch_size=64, step=lambda m, x: m(x).sum(), optimizer=torch.optim.Adam, device="cpu"
        ... )
        >>> footprint.parts["optimizer_state"] == 2 * footprint.parts["parameters"] + 2 * 4
        True
    """
    for argument, given, shape in (
        ("step", step, "(model, batch) -> loss"),
        ("optimizer", optimizer, "(parameters) -> it"),
    ):
        if given is not None and not callable(given):
            raise MemGuardError(f"{argument}= is a {type(given).__name__}; give a class or a function: {shape}.")
    target = target_of(device)
    batches = batches_from_one(batch)
    size = batches.small_size if batch_size is None else batch_size
    check_count("batch_size", size)
    program = program_of(model, batches, step, optimizer, target, precision, training)
    settings = replace(
        AllocatorSettings.for_device(target.device.type, os.environ), capacity_bytes=target.capacity_bytes
    )
    prediction = predict(program, size, settings, context_bytes=target.context_bytes, scalable=False)
    if prediction.method == "states":
        raise CannotTraceError(f"The step cannot be predicted: {'; '.join(prediction.notes)}.")
    found = prediction.footprint_at(size)
    trace = replace(prediction.own_trace_at(size).only("point"), kernels=(), scratch_spans=())
    return replace(found, notes=(*found.notes, *target.notes), trace=trace, settings=prediction.settings)


@dataclass(frozen=True)
class Target:
    """What to predict for; ``capacity_bytes`` is None where the memory is not known or not to be filled."""

    device: torch.device
    gpu: Gpu | None = None
    context_bytes: int | tuple[int, int, int] = 0
    capacity_bytes: int | None = None
    notes: tuple[str, ...] = ()


_STAND_IN = "NVIDIA A100-SXM4-80GB"


def target_of(name: str) -> Target:
    """What a device's name means: one that is here, or a GPU of the catalogue.

    Args:
        name: see ``device`` of `estimate`.

    Raises:
        MemGuardError: it names no device, or none that trains.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        return _planned(gpus.find(name))
    if device.type not in ("cpu", "cuda", "mps", "xpu"):
        raise MemGuardError(f"device={name!r} trains nothing; give 'cpu', 'cuda' or the name of a GPU.")
    if device.type != "cuda":
        return Target(device)
    if torch.cuda.is_available():
        return Target(device, gpu_of(device), context_bytes(device))
    note = f"no CUDA device is here: predicted for one like the {_STAND_IN}; give `device` the name of yours"
    return replace(_planned(gpus.find(_STAND_IN)), capacity_bytes=None, notes=(note,))


def _planned(gpu: Gpu) -> Target:
    return Target(torch.device("cuda"), gpu, CONTEXT_BYTES, gpu.memory_bytes - CONTEXT_BYTES[1])


def program_of(
    model: Any,
    batches: Batches,
    step: Callable[[Any, Any], Any] | None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
    target: Target,
    precision: str,
    training: bool,
) -> Program:
    """What `estimate` runs: a module's step in Lightning's order, in PyTorch's loop, or an inference."""
    lightning = is_lightning(model)
    if lightning and training:
        if step is not None or optimizer is not None:
            raise MemGuardError(
                "A LightningModule brings its own training_step and configure_optimizers: leave out step and optimizer."
            )
        trainer = trainer_for(model, precision, target.gpu)
        return LightningProgram(trainer, model, batches, target.device, batches_per_epoch=lambda _: 1, gpu=target.gpu)
    if step is None and training:
        raise MemGuardError(f"A {type(model).__name__} is no LightningModule: give step=(model, batch) -> loss.")
    run = step or _inference(model, lightning)
    return LoopProgram(model, batches, run, optimizer, target.device, precision, training, target.gpu)


def is_lightning(model: Any) -> bool:
    """Whether it is a LightningModule, of either package."""
    try:
        return isinstance(model, lightning_of(model).LightningModule)
    except CannotTraceError:
        return False


def trainer_for(model: Any, precision: str, gpu: Gpu | None, **settings: Any) -> Any:
    """A Trainer to read settings from; it never runs, and needs no device.

    Args:
        model: a LightningModule, whose package the Trainer comes from.
        precision: one of `PRECISIONS`.
        gpu: what it shall train on; None for the CPU.
        settings: more of a Trainer's arguments.
    """
    pl = lightning_of(model)
    if precision not in PRECISIONS:
        raise MemGuardError(f"precision={precision!r} is unknown; choose one of {', '.join(PRECISIONS)}.")
    chosen: dict[str, Any] = {"precision": precision}
    if gpu is not None and precision.endswith("-mixed"):
        with pretended_cuda(gpu):  # or its gradient scaler turns itself off
            chosen = {"plugins": [pl.plugins.MixedPrecision(precision, "cuda")]}
    with quiet():
        return pl.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"devices": 1, "max_epochs": 1, **chosen, **settings},
        )


def _inference(model: Any, lightning: bool) -> Callable[[Any, Any], Any]:
    if lightning:
        base = lightning_of(model).LightningModule
        for hook in ("predict_step", "validation_step"):
            if getattr(type(model), hook) is not getattr(base, hook):
                return lambda module_copy, batch: getattr(module_copy, hook)(batch, 0)
    return lambda module_copy, batch: module_copy(batch)
