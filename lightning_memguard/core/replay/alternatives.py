"""The allocator's settings that cost nothing to change, and what a history would have reserved under each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from lightning_memguard.core.replay.history import History, HistoryReplay, replay_history
from lightning_memguard.core.replay.settings import AllocatorSettings

VARIABLE = "PYTORCH_ALLOC_CONF"  # torch 2.9 or newer; before, PYTORCH_CUDA_ALLOC_CONF

# As they are written in the variable. Garbage collection needs a memory fraction below 1 besides.
SETTINGS = (
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "garbage_collection_threshold:0.8",
)
# Of these, those that neither take time nor need anything else.
NO_COST_SETTINGS = ("expandable_segments:True", "max_split_size_mb:128", "max_split_size_mb:512")


def under(settings: AllocatorSettings, text: str) -> AllocatorSettings:
    """Settings with one more, on the same device."""
    changed = AllocatorSettings.for_device("cuda", {VARIABLE: text})
    values = {name: value for name, value in asdict(changed).items() if value != getattr(AllocatorSettings(), name)}
    return replace(settings, **values)


@dataclass(frozen=True)
class Alternative:
    """A history under other settings.

    Attributes:
        setting: as it is written in the variable; empty for those of the record.
        replay: what it would have held.
        fits: whether that is within the capacity; None if none was given.
    """

    setting: str
    replay: HistoryReplay
    fits: bool | None


def alternatives(
    history: History, settings: Sequence[str] = SETTINGS, capacity_bytes: int | None = None
) -> tuple[Alternative, ...]:
    """A history as recorded, and under each of some settings.

    Args:
        history: recorded or predicted.
        settings: as they are written in the variable; one replaces those of the record.
        capacity_bytes: what the process may reserve; the allocator gives its cache back before it exceeds that.

    Returns:
        The record's own settings first, then the others in their order.
    """
    named = [("", history.settings), *((text, under(AllocatorSettings(), text)) for text in settings)]
    return tuple(_alternative(history, text, found, capacity_bytes) for text, found in named)


def _alternative(history: History, text: str, settings: AllocatorSettings, capacity_bytes: int | None) -> Alternative:
    if capacity_bytes is None:
        return Alternative(text, replay_history(history, settings), None)
    share = min(settings.per_process_memory_fraction, 0.999 if settings.garbage_collection_threshold else 1.0)
    within = replace(settings, capacity_bytes=capacity_bytes, per_process_memory_fraction=share)
    found = replay_history(history, within)
    if found.out_of_memory_entry is None:
        return Alternative(text, found, True)
    return Alternative(text, replay_history(history, settings), False)
