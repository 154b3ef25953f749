"""A fit that has not started -> its Decision: the stages of `lightning_memguard.core`, joined for a Trainer."""

from __future__ import annotations

import gc
import math
import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_memguard.core.allocator import AllocatorSettings
from lightning_memguard.core.capture import part_bytes
from lightning_memguard.core.decision import Budget, Decision, Request, decide
from lightning_memguard.core.device import context_bytes, gpu_of, read_budget
from lightning_memguard.core.estimate import Prediction, StepFailsError, predict
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.training import loaders
from lightning_memguard.training.step import LightningProgram


@dataclass(frozen=True)
class Wishes:
    """MemGuard's settings, checked; see there."""

    mode: str
    budget_bytes: int | None
    margin: float
    min_batch_size: int
    max_batch_size: int | None
    multiple_of: int
    keep_effective_batch_size: int | None


@dataclass(frozen=True)
class Tuning:
    """What came of a fit's tune. ``prediction`` and ``found`` are None where the guard stepped aside."""

    decision: Decision
    found: loaders.Found | None = None
    prediction: Prediction | None = None


def tune(trainer: Any, module: Any, wishes: Wishes) -> Tuning:
    """Predict the fit's memory and choose its batch size; change nothing.

    Raises:
        DoesNotFitError: ``mode`` is ``"tune"`` and even the smallest size does not fit.
    """
    try:
        found, prediction = _predict(trainer, module, wishes)
        budget = _budget(trainer.strategy.root_device, module, wishes)
    except MemGuardError as error:
        return _step_aside(trainer, str(error))
    except Exception as error:  # noqa: BLE001 - a guard that fails must not fail the training it guards
        return _step_aside(trainer, f"{type(error).__name__}: {error}")
    # after the budget, which counts a context that is up as ours: measuring it opens it
    prediction = replace(prediction, context_bytes=context_bytes(trainer.strategy.root_device), _footprints={})
    try:
        return _decide(trainer, found, prediction, budget, wishes)
    except CannotTraceError as error:
        return _step_aside(trainer, str(error))


def _predict(trainer: Any, module: Any, wishes: Wishes) -> tuple[loaders.Found, Prediction]:
    """Look at the data, draw a sample, capture the step."""
    if trainer.world_size > 1:
        raise CannotTraceError(f"the fit runs on {trainer.world_size} devices, and this version tunes one")
    try:
        found = loaders.find(trainer)
        batches = loaders.sample(found)
    except MemGuardError:
        raise
    except Exception as error:
        raise CannotTraceError(f"no sample could be drawn ({type(error).__name__}: {error})") from error
    program = _program(trainer, module, found, batches, wishes)
    settings = AllocatorSettings.for_device(program.device.type, os.environ)
    size = found.batch_size or batches.small_size
    return found, predict(program, size, settings, scalable=not found.fixed_because)


def _budget(device: torch.device, module: Any, wishes: Wishes) -> Budget:
    """What the device offers, once all that predicting has loaded and left behind is out of the way."""
    gc.collect()
    held = part_bytes({"model": [*module.parameters(), *module.buffers()]}, device.type)["model"]
    return read_budget(device, budget=wishes.budget_bytes, margin=wishes.margin, already_held_bytes=held)


def _program(trainer: Any, module: Any, found: loaders.Found, batches: Any, wishes: Wishes) -> LightningProgram:
    sized = found.dataset_size is not None
    return LightningProgram(
        trainer,
        module,
        batches,
        trainer.strategy.root_device,
        batches_per_epoch=(lambda size: found.batches(size) or 0) if sized else None,
        datamodule=trainer.datamodule,
        # where accumulation is the guard's to set, gradients stand through the next forward pass: the larger case
        accumulate_grad_batches=2 if wishes.keep_effective_batch_size else None,
        gpu=gpu_of(trainer.strategy.root_device),
    )


def _decide(trainer: Any, found: loaders.Found, prediction: Prediction, budget: Budget, wishes: Wishes) -> Tuning:
    request = Request(
        batch_size=found.batch_size or next(iter(prediction.traces)),
        min_batch_size=wishes.min_batch_size,
        max_batch_size=wishes.max_batch_size,
        multiple_of=wishes.multiple_of,
        dataset_size=found.dataset_size,
        keep_effective_batch_size=wishes.keep_effective_batch_size,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        ranks=trainer.world_size,
        free_to_choose=wishes.mode == "tune" and prediction.scalable and not found.fixed_because,
    )
    decision, proven = _choose(prediction, budget, request)
    if wishes.mode == "tune" and not request.free_to_choose:
        why = found.fixed_because or "the memory of other batch sizes is not known"
        decision = replace(decision, outcome="kept", reason=why)
    return Tuning(decision, found, proven)


def _choose(prediction: Prediction, budget: Budget, request: Request) -> tuple[Decision, Prediction]:
    """Decide, and prove the size; where the step does not run at it, a size divisible by 2, 4, ... may do."""
    for power in range(5):
        even = replace(request, multiple_of=math.lcm(request.multiple_of, 1 << power))
        decision = decide(prediction.footprint_at, budget, even)
        try:
            proven = prediction.proven_at(decision.batch_size)
        except StepFailsError as error:
            failure = error
            continue
        return (decision if proven is prediction else decide(proven.footprint_at, budget, even)), proven
    raise failure


def _step_aside(trainer: Any, reason: str) -> Tuning:
    accumulate = trainer.accumulate_grad_batches
    return Tuning(Decision(0, 0, accumulate, "stepped aside", None, None, "request", reason))
