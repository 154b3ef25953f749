"""Trace -> Timeline: live bytes by part while the step runs, for pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise

from lightning_memguard.core.replay.replay import within_capacity
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import OPTIONAL_PARTS, PARTS, Event, Trace

_COLUMNS = 480  # about what a screen can show, and some 60 KB of page


@dataclass(frozen=True)
class PhaseSpan:
    """Consecutive events of one step and phase, first to last, and the most bytes alive during them."""

    step: int
    phase: str
    first_event: int
    last_event: int
    peak_bytes: int

    @property
    def event_count(self) -> int:
        """Number of events."""
        return self.last_event + 1 - self.first_event


@dataclass(frozen=True)
class Timeline:
    """Live bytes by part, in columns; each column shows that one of its events at which most was alive.

    So the highest column is the peak, to the byte. If a block is larger than requested, the rest counts as its part.

    Attributes:
        event_count: events behind the columns.
        positions: by column, the position of the event it shows.
        events: by column, that event.
        parts: by part, bytes alive in each column; parts without any are left out.
        reserved: by column, bytes the allocator held; empty if that equals what is alive.
        spans: the phases, in order.
        batch_size: samples per batch of the step.
    """

    event_count: int
    positions: tuple[int, ...] = ()
    events: tuple[Event, ...] = ()
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reserved: tuple[int, ...] = ()
    spans: tuple[PhaseSpan, ...] = ()
    batch_size: int = 0

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes alive in each column."""
        return tuple(map(sum, zip(*self.parts.values(), strict=True)))

    @property
    def peak_column(self) -> int:
        """The column of the peak."""
        totals = self.totals
        return totals.index(max(totals))


def timeline_of(trace: Trace, settings: AllocatorSettings) -> Timeline:
    """Return the bytes alive while the step runs, by part.

    Args:
        trace: the events; a block whose size is not known exactly has its most likely one.
        settings: the rules of the allocator to replay by; if the step does not fit their capacity, it runs without one.
    """
    trace = trace.only("point")
    walked = within_capacity(trace, settings, lambda steps: [(change, steps.reserved_bytes) for change in steps])
    totals = list(accumulate(change for change, _ in walked))
    count, columns = len(trace), min(_COLUMNS, len(trace))
    starts = (-(-column * count // columns) for column in range(columns))
    positions = tuple(max(range(*span), key=totals.__getitem__) for span in pairwise((*starts, count)))
    shown: dict[int, dict[str, int]] = {position: {} for position in positions}  # what is alive there
    live = dict.fromkeys((*PARTS, *OPTIONAL_PARTS), 0)
    part_of: dict[int, str] = {}
    for position, (event, (change, _)) in enumerate(zip(trace.events, walked, strict=True)):
        if event.action == "alloc":
            part_of[event.block] = event.part
        part = part_of[event.block]
        live[part] = live.get(part, 0) + change
        if position in shown:
            shown[position] = dict(live)
    parts = {part: tuple(bytes_of.get(part, 0) for bytes_of in shown.values()) for part in live}
    return Timeline(
        len(trace),
        positions,
        tuple(trace.events[position] for position in positions),
        {part: values for part, values in parts.items() if any(values)},
        tuple(walked[position][1] for position in positions) if settings.kind == "cuda" else (),
        tuple(_spans(trace.events, totals)),
        trace.batch_size,
    )


def _spans(events: Sequence[Event], totals: Sequence[int]) -> Iterator[PhaseSpan]:
    first = 0
    for (step, phase), group in groupby(events, key=lambda event: (event.step, event.phase)):
        last = first + len(list(group)) - 1
        yield PhaseSpan(step, phase, first, last, max(totals[first : last + 1]))
        first = last + 1
