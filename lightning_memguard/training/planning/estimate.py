"""`estimate`: the footprint of a model at a batch size, for anyone without a running Trainer.

It is not in core/, because a LightningModule is stepped in Lightning's order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

import lightning_memguard.report.page  # noqa: F401 - which shows footprints in notebooks
from lightning_memguard.core.capture.program import Context
from lightning_memguard.core.replay.epoch import Shape
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.training.facts.ranks import warn
from lightning_memguard.training.planning.by_name import FineTuning, subject_by_name
from lightning_memguard.training.planning.epochs import BatchOfLength, at_length, whole_lengths, with_epoch
from lightning_memguard.training.planning.subject import (
    MakeOptimizer,
    Step,
    Subject,
    is_lightning,
    on_ranks,
    predicted,
    subject_of,
)
from lightning_memguard.training.planning.target import target_of

if TYPE_CHECKING:
    from pytorch_lightning.strategies import Strategy


def estimate(
    model: nn.Module | None = None,
    batch: object = None,
    *,
    hf: str | FineTuning | None = None,
    batch_size: int | None = None,
    lengths: Iterable[int] | None = None,
    step: Step | None = None,
    optimizer: MakeOptimizer | None = None,
    context: Context | None = None,
    device: str = "cuda",
    precision: str = "32-true",
    training: bool = True,
    strategy: str | Strategy = "auto",
    devices: int = 1,
    num_nodes: int = 1,
    measured: str | os.PathLike[str] | None = None,
) -> Footprint:
    """Predict the memory of one training step, or of one inference.

    Args:
        model: a LightningModule, stepped in Lightning's order by its ``training_step`` and ``configure_optimizers``; or
            any ``nn.Module`` together with ``step`` and ``optimizer``, stepped in PyTorch's canonical loop
            (``zero_grad``, forward, backward, ``step``). Only a copy without memory runs.
        batch: an example batch: real, meta or fake tensors in any nesting.
        hf: in place of a model and a batch, a language model of Hugging Face by its name, or how it is fine-tuned: a
            `lightning_memguard.training.planning.by_name.FineTuning`. Nothing is fetched. It needs the extra ``hf``.
        batch_size: the number of samples to predict for (default: the batch's own).
        lengths: of the batches of an epoch, in the order that they come, such as those of a batch sampler: dimension 1
            of a batch's first tensor that has one; for any other layout, ``batch`` is a function ``(length) -> batch``.
            The footprint is that of the longest, and on a GPU it says what the cache grows to over the epoch
            (`Footprint.epoch`).
        step: ``(model, batch) -> loss``, or ``loss, logits`` where a loop's variables keep those; for a plain module.
        optimizer: ``(parameters) -> Optimizer``; for a plain module (default: none, gradients only).
        context: ``() -> context manager`` that the step and its backward pass run in, such as
            ``torch.distributed.tensor.parallel.loss_parallel``; for a plain module.
        device: ``"cpu"``; ``"cuda"`` for the GPU that is there, or, if there is none, for an A100, with a warning; or
            a GPU by name, such as ``"NVIDIA H200"`` or ``"RTX 4090"``, which need not be there.
        precision: one of Lightning's names, such as ``"bf16-mixed"``.
        training: False for one inference forward under ``torch.no_grad``: ``step`` if given; of a LightningModule
            ``predict_step``, or ``validation_step`` if only that is its own; else ``model(batch)``.
        strategy: how it is trained on several devices. Of a LightningModule as a Trainer takes it: a name, such as
            ``"ddp"``, ``"fsdp"`` or ``"deepspeed_stage_3"``, or one of Lightning's strategies. Of a plain module as
            Fabric takes it: ``"ddp"``, ``"fsdp"``, or its `DDPStrategy`, `FSDPStrategy` or `ModelParallelStrategy`.
        devices: how many devices on each node; there need not be any.
        num_nodes: how many nodes.
        measured: a file of measurements (``memguard history`` names it), perhaps of another machine: what runs of
            this step measured on such a GPU corrects the prediction.

    Returns:
        The footprint at ``batch_size``; under a ``strategy``, that of the rank that holds most.

    Raises:
        MemGuardError: an argument is unknown, a plain module comes without ``step``, or ``measured`` cannot be read.
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
    wanted = None if lengths is None else whole_lengths(lengths)
    batch_at: BatchOfLength | None = batch if wanted and callable(batch) else None
    if hf is not None:
        subject = _by_name(hf, model, batch, batch_size, step, optimizer, precision, training=training)
        return _estimated(subject, device, measured, wanted)
    if wanted and batch_at:
        batch = batch_at(max(wanted))
    loop: dict[str, Any] = {"step": step, "optimizer": optimizer, "context": context}
    subject = _of_module(model, batch, batch_size, precision, loop, training=training)
    if (strategy, devices, num_nodes) != ("auto", 1, 1):
        subject = on_ranks(subject, strategy, devices, num_nodes)
    return _estimated(subject, device, measured, wanted, batch_at)


def _of_module(
    model: nn.Module | None,
    batch: object,
    batch_size: int | None,
    precision: str,
    loop: dict[str, Any],
    *,
    training: bool,
) -> Subject:
    if model is None:
        raise MemGuardError("Pass a model and an example batch, or a language model by its name: hf=.")
    if training and is_lightning(model) and any(each is not None for each in loop.values()):
        raise MemGuardError(
            "A LightningModule brings its own training_step, backward and configure_optimizers: leave out step, "
            "optimizer and context."
        )
    if batch is None:
        raise CannotTraceError("There is no batch to size by: pass an example batch.")
    return subject_of(model, batch, batch_size=batch_size, precision=precision, training=training, **loop)


def _by_name(
    hf: str | FineTuning,
    model: nn.Module | None,
    batch: object,
    batch_size: int | None,
    step: Step | None,
    optimizer: MakeOptimizer | None,
    precision: str,
    *,
    training: bool,
) -> Subject:
    if (model, batch, step) != (None, None, None) or not training:
        raise MemGuardError("hf= brings its own model, batch and step, and is a training: leave out the others.")
    tuning = hf if isinstance(hf, FineTuning) else FineTuning(hf)
    return subject_by_name(tuning, batch_size=batch_size or 1, precision=precision, optimizer=optimizer)


def _estimated(
    subject: Subject,
    device: str,
    measured: str | os.PathLike[str] | None,
    lengths: Sequence[int] | None,
    batch_at: BatchOfLength | None = None,
) -> Footprint:
    target, size = target_of(device, subject.model).talking(subject.communicators), subject.batch_size
    for note in target.notes:
        warn(f"estimate: {note}.", stacklevel=3)
    file = None if measured is None else Path(measured)
    batches = [Shape(size, length) for length in lengths or ()]
    subject = at_length(subject, max(batches).length, batch_at) if batches else subject
    prediction = predicted(subject, target, capacity_bytes=target.capacity_bytes, measured=file)
    found, trace = prediction.footprint_at(size), prediction.own_trace_at(size)
    trace = replace(trace.only("point"), kernels=(), scratch_spans=())
    found = replace(found, trace=trace, settings=prediction.curve.settings)
    return with_epoch(found, subject, target, prediction.curve.settings, batches, batch_at)
