"""`estimate`: the footprint of a model at a batch size, for anyone without a running Trainer.

It stands here, and not in core/, because a LightningModule is stepped in Lightning's order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lightning_memguard.core.allocator import AllocatorSettings
from lightning_memguard.core.batch import Batches, batches_from_one
from lightning_memguard.core.device import context_bytes
from lightning_memguard.core.estimate import PRECISIONS, LoopProgram, Program, predict
from lightning_memguard.core.footprint import Footprint
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.training.step import LightningProgram, lightning_of, quiet


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
        device: ``"cpu"``, or ``"cuda"`` where one is there.
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
    target = _device(device)
    batches = batches_from_one(batch)
    size = batches.small_size if batch_size is None else batch_size
    if type(size) is not int or size < 1:
        raise MemGuardError(f"batch_size={batch_size!r} is no count; give an int of 1 or more.")
    program = _program(model, batches, step, optimizer, target, precision, training)
    settings = AllocatorSettings.for_device(target.type, os.environ)
    prediction = predict(program, size, settings, context_bytes=context_bytes(target), scalable=False)
    if prediction.method == "states":
        raise CannotTraceError(f"The step cannot be predicted: {'; '.join(prediction.notes)}.")
    return prediction.footprint_at(size)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise MemGuardError(f"device={name!r} is no torch device; give 'cpu' or 'cuda'.") from error
    if device.type not in ("cpu", "cuda", "mps", "xpu"):
        raise MemGuardError(f"device={name!r} trains nothing; give 'cpu' or 'cuda'.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CannotTraceError(f"device={name!r} needs a CUDA device, and torch finds none here; give device='cpu'.")
    return device


def _program(
    model: Any,
    batches: Batches,
    step: Callable[[Any, Any], Any] | None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
    device: torch.device,
    precision: str,
    training: bool,
) -> Program:
    lightning = _is_lightning(model)
    if lightning and training:
        if step is not None or optimizer is not None:
            raise MemGuardError(
                "A LightningModule brings its own training_step and configure_optimizers: leave out step and optimizer."
            )
        return LightningProgram(_trainer(model, precision), model, batches, device, batches_per_epoch=lambda _: 1)
    if step is None and training:
        raise MemGuardError(f"A {type(model).__name__} is no LightningModule: give step=(model, batch) -> loss.")
    return LoopProgram(model, batches, step or _inference(model, lightning), optimizer, device, precision, training)


def _is_lightning(model: Any) -> bool:
    try:
        return isinstance(model, lightning_of(model).LightningModule)
    except CannotTraceError:
        return False


def _trainer(model: Any, precision: str) -> Any:
    """A Trainer to read settings from; it never runs."""
    pl = lightning_of(model)
    if precision not in PRECISIONS:
        raise MemGuardError(f"precision={precision!r} is unknown; choose one of {', '.join(PRECISIONS)}.")
    with quiet():
        return pl.Trainer(
            accelerator="cpu",
            devices=1,
            precision=precision,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )


def _inference(model: Any, lightning: bool) -> Callable[[Any, Any], Any]:
    if lightning:
        base = lightning_of(model).LightningModule
        for hook in ("predict_step", "validation_step"):
            if getattr(type(model), hook) is not getattr(base, hook):
                return lambda twin, batch: getattr(twin, hook)(batch, 0)
    return lambda twin, batch: twin(batch)
