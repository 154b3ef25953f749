"""A model and its batch -> what fits a device, available or in the catalogue.

The stages of `lightning_memguard.training.run.tune`, for anyone who has a model and no run: the model and the data are
read once, then predicted for each device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_memguard.core.capture.capture import CaptureFailedError, Captures, isolated
from lightning_memguard.core.capture.predict import Prediction, StepFailsError
from lightning_memguard.core.capture.program import without_memory
from lightning_memguard.core.decision.decision import Budget, Decision, Limits, Request, decide
from lightning_memguard.core.layers.layers import LayerTable, layer_table
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.errors import CannotTraceError, DoesNotFitError, MemGuardError
from lightning_memguard.report.page import html_of
from lightning_memguard.training.planning.search import largest_that_runs, with_retries
from lightning_memguard.training.planning.subject import Subject, lightning_program, predicted
from lightning_memguard.training.planning.target import target_and_budget, target_of
from lightning_memguard.units import counted, format_bytes

_MOST_SAMPLES = 1_000_000  # no training takes more at once


@dataclass(frozen=True)
class Plan:
    """Batch sizes and their memory on one device.

    Attributes:
        asked: the decision at the size asked for, with its ``footprint`` and the device's ``budget``.
        largest: the largest size that fits; None if none does, or other sizes are not known.
        prediction: the memory at any size.
        reason: why there is no ``largest``, in plain words.
        too_large: the error behind ``reason`` if no size fits.
        request: the sizes that were considered; None if only one is known.
        ranks: how many processes train, each on a batch of its own.
    """

    asked: Decision
    footprint: Footprint
    budget: Budget
    largest: Decision | None
    prediction: Prediction
    reason: str = ""
    too_large: DoesNotFitError | None = None
    request: Request | None = None
    ranks: int = 1

    def _repr_html_(self) -> str:
        return html_of(self.asked, *filter(None, [self.largest]))

    @property
    def fits(self) -> bool:
        """Whether the size asked for fits."""
        return self.asked.fits

    @property
    def share(self) -> float:
        """The share of the budget that the size asked for may take."""
        return self.footprint.most_device_bytes / self.budget.free_bytes if self.budget.free_bytes else math.inf


def plan_on(subject: Subject, device: str, limits: Limits | None = None, measured: Path | None = None) -> Plan:
    """Find out whether a subject fits a device, and the largest batch size that does.

    Args:
        subject: the model, its batch and its settings.
        device: ``"cpu"``, ``"cuda"``, or the name of a GPU, which need not be there.
        limits: what the batch size is chosen from.
        measured: a file of measurements that corrects the prediction, see `estimate`.

    Raises:
        MemGuardError: the device is unknown, the budget is more than it has, or the file cannot be read.
        CannotTraceError: the step cannot be predicted.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_memguard.training.planning.subject import subject_of
        >>> subject = subject_of(nn.Linear(64, 64), torch.zeros(8, 64), step=lambda m, x: m(x).sum())
        >>> plan = plan_on(subject, "T4", Limits(max_batch_size=64))
        >>> plan.fits, plan.largest.batch_size, plan.budget.device
        (True, 64, 'Tesla T4')
    """
    size, limits = subject.batch_size, limits or Limits()
    with Captures(most=1 if subject.few else None):  # one child learns how the step grows with its layers
        prediction, budget = predict_on(subject, device, limits, measured)
        known, proven = prediction.curve, prediction.proven_at(size)
        if proven.curve.compiles:
            prediction = proven
        elif proven is not prediction:
            # A single sample differs from how other sizes grow: tensors of length 1 need no copies to be contiguous.
            # Other sizes still come from the growth, which is proven when it is used.
            prediction = Prediction(prediction.program, known.with_captured(size, proven.curve.captured[size]))
        request = request_of(subject, limits)
        asked = decide(prediction.footprint_at, budget, replace(request, free_to_choose=False))
        asked = with_retries(asked, prediction)
        assert asked.footprint is not None
        other_sizes = prediction.curve.scalable
        reason = subject.fixed_because or ("" if other_sizes else "the step runs at no other size that was tried")
        plan = Plan(asked, asked.footprint, budget, None, prediction, reason, ranks=subject.ranks)
        if reason:
            return plan
        plan = replace(plan, request=request)
        try:
            return replace(plan, largest=_largest(prediction, budget, request, asked))
        except DoesNotFitError as error:
            too_large = error.with_traceback(None)  # which would hold on to the search
            return replace(plan, too_large=too_large, reason=f"{error}{_started_anyway(prediction, budget, request)}")
        except StepFailsError as error:
            return replace(plan, reason=str(error))


def request_of(subject: Subject, limits: Limits) -> Request:
    """Return the request for the largest batch size within some limits.

    Raises:
        MemGuardError: the data has fewer samples than the smallest size allowed.
    """
    dataset_size = subject.loader_info.dataset_size if subject.loader_info else None
    if dataset_size is not None and limits.min_batch_size > dataset_size:
        raise MemGuardError(
            f"min_batch_size={limits.min_batch_size} is above the {counted(dataset_size, 'sample')} that a rank draws "
            "from: no batch size is left to choose."
        )
    request = limits.request(
        subject.batch_size,
        unit=subject.unit,
        dataset_size=dataset_size,
        accumulate_grad_batches=subject.trainer.get("accumulate_grad_batches", 1),
        ranks=subject.ranks,
    )
    return replace(request, max_batch_size=limits.max_batch_size or _MOST_SAMPLES)


def _largest(prediction: Prediction, budget: Budget, request: Request, asked: Decision) -> Decision:
    """The largest size that fits; it agrees with the size asked for where peaks dip, as another kernel is chosen."""
    size = asked.batch_size
    if not asked.fits and size > request.smallest_batch_size and size <= (request.max_batch_size or size):
        below, _ = largest_that_runs(prediction, budget, replace(request, max_batch_size=size - 1))
        return replace(below, limited_by="memory" if below.limited_by == "max_batch_size" else below.limited_by)
    largest, _ = largest_that_runs(prediction, budget, request)
    if not asked.fits or largest.limited_by != "memory" or largest.batch_size > size:
        return largest
    if size > (request.max_batch_size or size):
        return replace(largest, limited_by="max_batch_size")
    drawn = size <= (request.dataset_size or size) and not size % request.multiple_of
    return replace(asked, limited_by="memory") if drawn else replace(largest, limited_by="dataset")


def _started_anyway(prediction: Prediction, budget: Budget, request: Request) -> str:
    """On the CPU, the range for the process itself stops no run: say so."""
    smallest = prediction.footprint_at(request.smallest_batch_size)
    if prediction.program.device.type != "cpu" or smallest.peak_device_bytes > budget.usable_bytes:
        return ""
    return (
        f" The tensors of batch size {smallest.batch_size} need {format_bytes(smallest.peak_device_bytes)}, so "
        "MemGuard would still train at it, and warn if the process passes its budget."
    )


def predict_on(
    subject: Subject, device: str, limits: Limits | None = None, measured: Path | None = None
) -> tuple[Prediction, Budget]:
    """Capture the step as it would run on a device, and read what that offers.

    Raises:
        CannotTraceError: the step cannot be predicted.
    """
    target, budget = target_and_budget(device, limits or Limits(), subject.model)
    target = target.talking(subject.communicators)
    return predicted(subject, target, scalable=not subject.fixed_because, measured=measured), budget


def layers_on(subject: Subject, device: str) -> LayerTable:
    """The table by layer of a subject, at its batch size, as its kernels on a device keep it.

    Raises:
        CannotTraceError: the model cannot be run on a copy.
    """
    target, size = target_of(device), subject.batch_size
    if not subject.runs_in_lightning:
        batch = without_memory(subject.batches, size)
        return isolated(lambda: layer_table(subject.model, batch, batch_size=size, step=subject.step, gpu=target.gpu))
    program = lightning_program(subject, target)
    try:
        return isolated(lambda: program.layer_table(size))
    except CaptureFailedError as error:
        raise CannotTraceError(
            f"The layers of {type(subject.model).__name__} are not known, as a copy of its step did not run on "
            f"fake tensors ({error}). The batch: {subject.shapes}."
        ) from error
