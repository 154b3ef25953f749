"""The allocator's settings that cost nothing to change, and what a history would have reserved under each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_memguard.core.histories.history import History, HistoryReplay, replay_history
from lightning_memguard.core.replay.settings import SETTINGS


@dataclass(frozen=True)
class Alternative:
    """A history under other settings.

    Attributes:
        setting: as it is written in the variable; empty for those of the record.
        replay: what it would have held.
        fits: whether that is within the capacity; None if none was given.
        was: what the record has in place of the setting.
        laid_out_again: whether it starts from the blocks of the record in segments of its own.
    """

    setting: str
    replay: HistoryReplay
    fits: bool | None
    was: str = ""
    laid_out_again: bool = False


def alternatives(
    history: History, settings: Sequence[str] | None = None, capacity_bytes: int | None = None
) -> tuple[Alternative, ...]:
    """A history as recorded, and under each of some settings.

    One that never reserves more than at its start does not tell how its segments came to be. Then the record's settings
    are replayed a second time, and all others too, from the blocks of the start laid out again.

    Args:
        history: recorded or predicted.
        settings: as they are written in the variable; one replaces those of the record. None: those that change it.
        capacity_bytes: what the process may reserve; the allocator gives its cache back before it exceeds that.

    Returns:
        The record's own settings first, then the others in their order.
    """
    own = history.settings
    if settings is None:
        opposite = ("expandable_segments:False",) if own.expandable_segments else ()
        settings = [text for text in (*opposite, *SETTINGS) if own.with_setting(text) != own]
    again = bool(history.start) and max(history.reserved_bytes) == history.start_reserved_bytes
    tried = [("", False), *[("", True)] * again, *((text, again) for text in settings)]
    return tuple(_alternative(history, text, capacity_bytes, again) for text, again in tried)


def _alternative(history: History, text: str, capacity_bytes: int | None, again: bool) -> Alternative:
    settings, was = history.settings.with_setting(text), history.settings.replaced_by(text)
    if capacity_bytes is not None:
        within = replace(settings.collecting(), capacity_bytes=capacity_bytes)
        found = replay_history(history, within, laid_out_again=again)
        if found.out_of_memory_entry in (None, history.refused_at):
            return Alternative(text, found, found.out_of_memory_entry is None, was, again)
    fits = None if capacity_bytes is None else False
    return Alternative(text, replay_history(history, settings, laid_out_again=again), fits, was, again)
