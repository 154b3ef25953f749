"""The batch size in a checkpoint, and a fit that resumes from one: it keeps the size if that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.training.facts.lightning_port import epochs_saved
from lightning_memguard.training.facts.ranks import Attempt, attempt
from lightning_memguard.training.run.guard_settings import GuardSettings
from lightning_memguard.training.run.profile import RunProfile
from lightning_memguard.training.run.tune import Tuning
from lightning_memguard.units import format_bytes

KEY = "lightning_memguard"  # in the checkpoint, next to Lightning's own keys


@dataclass(frozen=True)
class SavedSizes:
    """Batch sizes that a checkpoint holds of the run that wrote it."""

    batch_size: int
    accumulate_grad_batches: int
    ranks: int
    validation_batch_size: int | None = None


def saved_state(tuning: Tuning) -> dict[str, int | None]:
    """Return the state for a checkpoint: plain numbers, so that it loads with ``weights_only=True``."""
    decision, ranks = tuning.decision, tuning.ranks.size
    sizes = decision.batch_size, decision.accumulate_grad_batches, ranks, decision.validation_batch_size
    return asdict(SavedSizes(*sizes))


def saved_in(checkpoint: Mapping[str, Any], own_size: int) -> SavedSizes | None:
    """Read a checkpoint of a fit; None if it holds none. One without our entry was trained at the loader's own size."""
    state = checkpoint.get(KEY)
    if isinstance(state, Mapping) and isinstance(state.get("batch_size"), int):
        return SavedSizes(**{name: state[name] for name in SavedSizes.__annotations__ if name in state})
    return SavedSizes(own_size, 0, 0) if checkpoint.get("loops") else None


def is_over(checkpoint: Mapping[str, Any], max_epochs: int | None, max_steps: int) -> bool:
    """Whether a fit that resumes from a checkpoint has no step left."""
    epochs, steps = epochs_saved(checkpoint), int(checkpoint.get("global_step", 0))
    return -1 < (-1 if max_epochs is None else max_epochs) <= epochs or -1 < max_steps <= steps


def resume(tuning: Tuning, saved: SavedSizes, settings: GuardSettings) -> Tuning:
    """Resume at the checkpoint's batch size, if all ranks can and the settings allow it. All ranks must call this."""
    profile, ranks = tuning.profile, tuning.ranks
    # as when a LearningRateFinder restores the checkpoint that it saved
    if profile is None or asdict(saved) == saved_state(tuning):
        return tuning
    if profile.request.kept_by == "request" and saved.batch_size == tuning.decision.batch_size:
        return tuning
    extended = attempt(lambda: profile.extended_to(saved.batch_size)).value or profile
    result = attempt(lambda: extended.footprint_at(saved.batch_size))
    mine = _obstacle(saved.batch_size, settings, result, profile)
    obstacle = next(filter(None, ranks.gather(mine)), "")
    before = f"the checkpoint was trained at batch size {saved.batch_size}"
    if not obstacle and not _is_same_step(saved, profile):
        obstacle = f"this run's loader has {profile.request.batch_size}"
    if obstacle:
        if tuning.decision.batch_size == saved.batch_size:
            return tuning
        return replace(tuning, decision=replace(tuning.decision, because=f"{before}; {obstacle}"))
    decision = _kept(tuning.decision, profile, saved, settings)
    return replace(tuning, profile=extended, decision=replace(decision, footprint=result.unwrap()))


def _is_same_step(saved: SavedSizes, profile: RunProfile) -> bool:
    """Whether a batch size that was set is that of the checkpoint, or its batches were divided; or none is kept."""
    request = profile.request
    seen = saved.batch_size * max(1, saved.accumulate_grad_batches)
    is_divided = saved.batch_size < request.batch_size and seen == request.batch_size * request.accumulate_grad_batches
    return request.kept_by != "request" or saved.batch_size == request.batch_size or is_divided


def _obstacle(size: int, settings: GuardSettings, footprint: Attempt[Footprint], profile: RunProfile) -> str:
    most, budget = profile.request.dataset_size, profile.budget
    if settings.max_batch_size is not None and size > settings.max_batch_size:
        return f"max_batch_size={settings.max_batch_size} forbids it"
    if size < settings.min_batch_size:
        return f"min_batch_size={settings.min_batch_size} forbids it"
    if most is not None and size > max(most, profile.request.batch_size):
        return f"this run's data and limits allow {most} at most"
    if footprint.value is None:
        return footprint.reason
    need, usable = footprint.value.most_device_bytes, budget.usable_bytes
    if need <= usable or footprint.value.is_cut:
        return ""
    return f"that needs {format_bytes(need)} and {budget.device} offers {format_bytes(usable)}"


def _kept(decision: Decision, profile: RunProfile, saved: SavedSizes, settings: GuardSettings) -> Decision:
    effective, ranks = settings.keep_effective_batch_size, profile.request.ranks
    accumulate = profile.request.accumulate_grad_batches
    if effective:
        accumulate = max(1, effective // (saved.batch_size * ranks))
    elif saved.accumulate_grad_batches and saved.ranks == ranks:
        accumulate = saved.accumulate_grad_batches
    return replace(
        decision,
        batch_size=saved.batch_size,
        accumulate_grad_batches=accumulate,
        outcome="kept" if saved.batch_size == profile.request.batch_size else "tuned",
        limited_by="checkpoint",
        validation_batch_size=saved.validation_batch_size or decision.validation_batch_size,
    )
