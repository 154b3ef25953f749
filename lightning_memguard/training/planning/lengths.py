"""A model and the lengths of its samples -> the largest batch size that fits at each length."""

from __future__ import annotations

import os
import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_memguard.core.batch.batches import batch_of_length
from lightning_memguard.core.capture.capture import Captures
from lightning_memguard.core.capture.curve import Curve, Terms
from lightning_memguard.core.capture.lengths import LengthSurveyor
from lightning_memguard.core.capture.predict import Prediction, StepFailsError
from lightning_memguard.core.capture.program import Context
from lightning_memguard.core.decision.decision import Budget, Decision, Limits, Request
from lightning_memguard.core.replay.epoch import Epoch, Padding, Shape
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.errors import CannotTraceError, DoesNotFitError
from lightning_memguard.training.facts.ranks import warn
from lightning_memguard.training.planning.epochs import BatchOfLength, at_length, replayed_epoch, whole_lengths
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

    Memory grows with samples times length, or with samples times its square. The sizes are what a
    `lightning_memguard.LengthBatchSampler` takes. A warning says if a GPU's cache, which keeps the blocks of other
    lengths, would fill the budget over an epoch of these, and what avoids that.

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
    wanted = sorted({*whole_lengths(lengths)})
    batch_at: BatchOfLength = batch if callable(batch) else partial(batch_of_length, batch)
    example = batch_at(wanted[0]) if callable(batch) else batch
    if example is None:
        raise CannotTraceError("There is no batch to size by: pass an example batch, or a function of the length.")
    given: dict[str, Any] = {"step": step, "optimizer": optimizer, "context": context}
    subject = subject_of(model, example, precision=precision, **given)
    if (strategy, devices, num_nodes) != ("auto", 1, 1):
        subject = on_ranks(subject, strategy, devices, num_nodes)
    limits = Limits(margin, None if budget is None else parse_bytes(budget, "budget"), max_batch_size=max_batch_size)
    found = largest_at_lengths(subject, wanted, device, limits, batch_at)
    if found[0].too_large and not any(each.largest for each in found):
        raise found[0].too_large.led_by(f"At length {wanted[0]}, the shortest, not even one sample fits.")
    for warning in _warnings_of(subject, found, device, batch_at):
        warn(f"batch_sizes: {warning}", stacklevel=2)
    return {each.length: each.batch_size for each in found}


def _warnings_of(subject: Subject, found: Sequence[AtLength], device: str, batch_at: BatchOfLength) -> Iterator[str]:
    """Say what is assumed, and what goes wrong over an epoch of these sizes, as far as that is known."""
    yield from (f"{note}." for note in target_of(device).notes)
    with suppress(CannotTraceError):
        epoch = epoch_at_sizes(subject, found, device, batch_at)
        if epoch and (epoch.run.retries or not epoch.fits):
            yield f"{epoch.text}.{f' To avoid it, {epoch.remedy.how}.' if epoch.remedy else ''}"


def largest_at_lengths(
    subject: Subject, lengths: Iterable[int], device: str, limits: Limits, batch_at: BatchOfLength | None = None
) -> list[AtLength]:
    """Find the largest batch size at each length, and its memory.

    Args:
        subject: the model and its settings.
        lengths: those to look at.
        device: see `batch_sizes`.
        limits: what the batch sizes are chosen from.
        batch_at: see `at_length`.

    Returns:
        The shortest length first.

    Raises:
        MemGuardError: the device is unknown, or the budget is more than it has.
        CannotTraceError: the step cannot be predicted at one of the lengths.
    """
    target, budget = target_and_budget(device, limits, subject.model)
    target = target.talking(subject.communicators)
    terms = Terms(AllocatorSettings.for_device(target.device.type, os.environ), target.context_bytes)
    programs = {length: program_of(at_length(subject, length, batch_at), target) for length in sorted({*lengths})}
    surveyor = LengthSurveyor(programs, subject.batch_size, terms)
    request = request_of(subject, limits)
    with Captures(*programs.values()):
        curves = dict(sorted(surveyor.survey().items()))
        return [_at_length(surveyor, length, curve, budget, request) for length, curve in curves.items()]


def epoch_at_sizes(
    subject: Subject, found: Sequence[AtLength], device: str, batch_at: BatchOfLength | None = None
) -> Epoch | None:
    """Replay an epoch of batches as `lightning_memguard.LengthBatchSampler` makes them of these sizes.

    As many batches are of each size, each padded to its longest sample, which is of any length down to the next
    shorter one that has a size; the shortest go down to half.

    Args:
        subject: the model and its settings.
        found: the sizes, the shortest length first.
        device: see `batch_sizes`.
        batch_at: see `at_length`.

    Returns:
        What the cache grows to within the budget; None without a cache, or if there is one shape alone.

    Raises:
        CannotTraceError: it is not known; see `replayed_epoch`.
    """
    sized = [at for at in found if at.largest and at.largest.footprint]
    target = target_of(device).talking(subject.communicators)
    settings = AllocatorSettings.for_device(target.device.type, os.environ)
    if settings.kind != "cuda" or not sized:
        return None
    draw, lengths = random.Random(0), [at.length for at in sized]  # noqa: S311 - the same each time
    shapes = list[Shape]()
    for at, shorter in zip(sized, [lengths[0] // 2, *lengths], strict=False):
        drawn = [draw.randint(shorter + 1, at.length) for _ in range(_DRAWN - 1)]
        shapes += [Shape(at.batch_size, length) for length in (*drawn, at.length)]
    outside = max(at.largest.footprint.outside_bytes for at in sized if at.largest and at.largest.footprint)
    settings = replace(settings, capacity_bytes=sized[0].budget.usable_bytes - outside)
    draw.shuffle(shapes)
    how = "pad each batch to the length that its size is for"
    padding = Padding("to the known lengths", how, lambda length: lengths[bisect_left(lengths, length)])
    return replayed_epoch(subject, target, settings, shapes, batch_at=batch_at, padding=padding)


_DRAWN = 40  # batches of each size


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
