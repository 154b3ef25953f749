"""A decision about one epoch -> what its run leaves behind, and the epoch at which that fills the device."""

from __future__ import annotations

import math
from dataclasses import replace

from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.trace.kept import runs_out
from lightning_memguard.training.data.loaders import batches_taken
from lightning_memguard.training.run.profile import RunProfile


def with_end(decision: Decision, profile: RunProfile) -> Decision:
    """Return the decision of a fit with what its steps leave behind, and when that ends it."""
    footprint, budget, facts, trainer = decision.footprint, decision.budget, profile.facts, profile.run.program.trainer
    if footprint is None or budget is None or not profile.kept:
        return decision
    batches = batches_taken(facts.divided(decision.pieces), profile.loader_info, decision.batch_size)
    lasting = [each for each in profile.kept if each.lasts]
    of_step = sum(each.bytes_at(decision.batch_size) for each in lasting if each.when == "step")
    of_epoch = of_step * (batches or 0)
    if profile.validation is not None and profile.run.validation_info is not None:
        size = decision.validation_batch_size or profile.validation.batch_size
        left = sum(each.bytes_at(size) for each in lasting if each.when == "validation")
        each_time = batches_taken(facts, profile.run.validation_info, size) or 0
        of_epoch += int(left * each_time * _validations(profile, batches or 1))
    epochs, steps = trainer.max_epochs, trainer.max_steps
    end = runs_out(
        budget.free_bytes - footprint.peak_device_bytes,
        of_step,
        of_epoch,
        batches,
        math.inf if epochs is None or epochs < 0 else epochs,
        math.inf if steps < 0 else steps * decision.accumulate_grad_batches,
    )
    return replace(decision, kept=profile.kept, runs_out_at=end)


def _validations(profile: RunProfile, batches: int) -> float:
    """How many validations an epoch has, on average."""
    interval, every = profile.facts.val_check_interval, profile.facts.check_val_every_n_epoch
    times = 1 / interval if isinstance(interval, float) else batches / interval if interval else 1.0
    return times if every is None else max(1, int(times)) / every
