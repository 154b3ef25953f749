"""A model and the lengths of its samples -> the largest batch size that fits at each length."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_memguard.core.batch.batches import Batches, batch_of_length, batches_from_one
from lightning_memguard.core.batch.nesting import batch_size_of
from lightning_memguard.core.capture.capture import Captures
from lightning_memguard.core.capture.curve import Curve, Terms
from lightning_memguard.core.capture.lengths import LengthSurveyor
from lightning_memguard.core.capture.predict import Prediction, StepFailsError
from lightning_memguard.core.capture.program import Context
from lightning_memguard.core.decision.decision import Budget, Decision, Limits, Request, check_count
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.errors import CannotTraceError, DoesNotFitError, MemGuardError
from lightning_memguard.training.facts.ranks import warn
from lightning_memguard.training.planning.plan import request_of
from lightning_memguard.training.planning.search import largest_that_runs
from lightning_memguard.training.planning.subject import (
    MakeOptimizer,
    Step,
    Subject,
    on_ranks,
    program_of,
    subject_of,
)
from lightning_memguard.training.planning.target import target_and_budget, target_of
from lightning_memguard.units import parse_bytes

if TYPE_CHECKING:
    from pytorch_lightning.strategies import Strategy

BatchOfLength = Callable[[int], Any]


@dataclass(frozen=True)
class AtLength:
    """The largest batch size at one length.

    Attributes:
        length: the length of each sample.
        budget: what the device offers.
        largest: the decision; None if not even one sample fits.
        too_large: the error, if so.
    """

    length: int
    budget: Budget
    largest: Decision | None
    too_large: DoesNotFitError | None = None

    @property
    def batch_size(self) -> int:
        """The size; 0 if not even one sample fits."""
        return self.largest.batch_size if self.largest else 0


def batch_sizes(
    model: nn.Module,
    batch: object,
    *,
    lengths: Iterable[int],
    budget: int | str | None = None,
    margin: float = 0.05,
    max_batch_size: int | None = None,
    step: Step | None = None,
    optimizer: MakeOptimizer | None = None,
    context: Context | None = None,
    device: str = "cuda",
    precision: str = "32-true",
    strategy: str | Strategy = "auto",
    devices: int = 1,
    num_nodes: int = 1,
) -> dict[int, int]:
    """Find the largest batch size that fits at each length.

    Text, speech and sets differ in length from batch to batch, and memory grows with samples times length, or with
    samples times its square. The sizes are what a `lightning_memguard.LengthBatchSampler` takes.

    Args:
        model: a LightningModule, or any ``nn.Module`` with ``step`` and ``optimizer``; as `lightning_memguard.estimate`
            takes it. Only a copy without memory runs.
        batch: an example batch, whose length is dimension 1 of its first tensor that has one; each tensor of that
            length, such as ``input_ids``, ``attention_mask`` and ``labels``, is repeated or cut to the others. For any
            other layout, a function: ``(length) -> batch``.
        lengths: those to find sizes for.
        budget: what the training may take on its device: bytes, or text such as ``"24GiB"`` (default: what is free
            there, or all memory of a GPU that is not there).
        margin: share of the budget to keep free.
        max_batch_size: the largest size to choose.
        step: ``(model, batch) -> loss``; for a plain module.
        optimizer: ``(parameters) -> Optimizer``; for a plain module.
        context: see `lightning_memguard.estimate`; for a plain module.
        device: ``"cpu"``, ``"cuda"``, or a GPU by name, which need not be there.
        precision: one of Lightning's names, such as ``"bf16-mixed"``.
        strategy: how it is trained on several devices, such as ``"ddp"``; see `lightning_memguard.estimate`.
        devices: how many devices on each node.
        num_nodes: how many nodes.

    Returns:
        By length, the largest batch size whose predicted peak fits, at most, on each rank; 0 where not even one sample
        does. Each is checked by a capture of the step at that size and length.

    Raises:
        MemGuardError: an argument is unknown, or no length was given.
        DoesNotFitError: one sample of the shortest length does not fit.
        CannotTraceError: the step cannot be predicted at one of the lengths.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000))
        >>> batch = torch.zeros(4, 128, dtype=torch.long)
        >>> loss = lambda model, ids: nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        >>> sizes = batch_sizes(
        ...     model, batch, lengths=[128, 256], budget="1GiB", step=loss, optimizer=torch.optim.AdamW, device="T4"
        ... )
        >>> sizes[128] >= 2 * sizes[256] > 0
        True
    """
    wanted = _checked(lengths)
    batch_at: BatchOfLength = batch if callable(batch) else partial(batch_of_length, batch)
    example = batch_at(wanted[0]) if callable(batch) else batch
    if example is None:
        raise CannotTraceError("There is no batch to size by: pass an example batch, or a function of the length.")
    given: dict[str, Any] = {"step": step, "optimizer": optimizer, "context": context}
    subject = subject_of(model, example, precision=precision, **given)
    if (strategy, devices, num_nodes) != ("auto", 1, 1):
        subject = on_ranks(subject, strategy, devices, num_nodes)
    limits = Limits(margin, None if budget is None else parse_bytes(budget), max_batch_size=max_batch_size)
    found = largest_at_lengths(subject, wanted, device, limits, batch_at)
    for note in target_of(device).notes:
        warn(f"batch_sizes: {note}.", stacklevel=2)
    if found[0].too_large and not any(each.largest for each in found):
        raise found[0].too_large.led_by(f"At length {wanted[0]}, the shortest, not even one sample fits.")
    return {each.length: each.batch_size for each in found}


def _checked(lengths: Iterable[object]) -> list[int]:
    found = set[int]()
    for each in lengths:
        length = int(each) if isinstance(each, Integral) else 0  # NumPy's are whole numbers too
        check_count("lengths", length or each)
        found.add(length)
    if not found:
        raise MemGuardError("lengths is empty; pass the lengths to find batch sizes for, such as [128, 256, 512].")
    return sorted(found)


def largest_at_lengths(
    subject: Subject, lengths: Iterable[int], device: str, limits: Limits, batch_at: BatchOfLength | None = None
) -> list[AtLength]:
    """Find the largest batch size at each length, and its memory.

    Args:
        subject: the model and its settings.
        lengths: those to look at.
        device: see `batch_sizes`.
        limits: what the batch sizes are chosen from.
        batch_at: length -> an example batch (default: the subject's own, see `batch_of_length`).

    Returns:
        The shortest length first.

    Raises:
        MemGuardError: the device is unknown, or the budget is more than it has.
        CannotTraceError: the step cannot be predicted at one of the lengths.
    """
    batch_at = batch_at or partial(batch_of_length, subject.batches.small)
    target, budget = target_and_budget(device, limits, subject.model)
    target = target.talking(subject.communicators)
    terms = Terms(AllocatorSettings.for_device(target.device.type, os.environ), target.context_bytes)
    subjects = {length: replace(subject, batches=_batches(batch_at, length)) for length in sorted(set(lengths))}
    programs = {length: program_of(each, target) for length, each in subjects.items()}
    surveyor = LengthSurveyor(programs, subject.batch_size, terms)
    request = request_of(subject, limits)
    with Captures(*programs.values()):
        curves = dict(sorted(surveyor.survey().items()))
        return [_at_length(surveyor, length, curve, budget, request) for length, curve in curves.items()]


def _batches(batch_at: BatchOfLength, length: int) -> Batches:
    batch = batch_at(length)
    return batches_from_one(batch, batch_size_of(batch))


def _at_length(surveyor: LengthSurveyor, length: int, curve: Curve, budget: Budget, request: Request) -> AtLength:
    """Choose the size at one length. A curve that followed from other lengths, and does not hold, is surveyed here."""
    if curve.method == "states":
        raise CannotTraceError(f"The step cannot be predicted at length {length}: {'; '.join(curve.notes)}.")
    program, follows = surveyor.programs[length], curve.growth is not None and not curve.captured
    too_large = None
    try:
        decision, proven = largest_that_runs(Prediction(program, curve), budget, request)
    except DoesNotFitError as error:
        too_large = error.with_traceback(None)  # which would hold on to the search
    except StepFailsError as error:
        raise CannotTraceError(f"The step cannot be predicted at length {length}: {error}.") from error
    if follows and (too_large or proven.curve.growth is None):
        return _at_length(surveyor, length, surveyor.survey_at(length), budget, request)
    return AtLength(length, budget, None if too_large else decision, too_large)
