"""Trace -> Timeline: live bytes by part while the step runs, for pictures; and the blocks at its peak, by line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise

from lightning_memguard.core.replay.replay import alive_at_peak, within_capacity
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


# -- the peak, by the line of code that requested the blocks

_NOT_OF_A_LINE = ("parameters", "buffers", "gradients", "optimizer_state", "batch", *OPTIONAL_PARTS)


@dataclass(frozen=True)
class LineShare:
    """Bytes that one line of code has requested, or that belong to one part.

    ``part`` is that of most of the bytes, ``line`` is ``"<file>:<line>:<function>"`` or empty for a part that no line
    has requested, and ``modules`` have run the line, the one with most bytes first. ``actual_bytes`` are those of the
    blocks that are really there; None if that is not recorded.
    """

    nbytes: int
    part: str
    line: str = ""
    modules: tuple[str, ...] = ()
    actual_bytes: int | None = None


def shares_at_peak(trace: Trace, settings: AllocatorSettings) -> list[LineShare]:
    """Return the lines and parts that hold the memory at the peak of a trace, the largest first.

    >>> EXACT = AllocatorSettings(kind="exact")
    >>> step = [Event("alloc", 0, 512, "parameters"), Event("alloc", 1, 2048, "activations", source="net.py:7:forward")]
    >>> [(share.nbytes, share.part, share.line) for share in shares_at_peak(Trace(1, "cpu", "fake", step), EXACT)]
    [(2048, 'activations', 'net.py:7:forward'), (512, 'parameters', '')]
    """
    parts, modules = defaultdict[str, Counter[str]](Counter), defaultdict[str, Counter[str]](Counter)
    trace = trace.only("point")
    for event, nbytes in within_capacity(trace, settings, lambda s: alive_at_peak(s.trace.events, list(s)))[1]:
        key = "" if event.part in _NOT_OF_A_LINE else event.source
        parts[key or event.part][event.part] += nbytes
        if key:
            modules[key][event.module] += nbytes
    shares = []
    for key, of_key in parts.items():
        ran = tuple(module for module, _ in modules[key].most_common() if module) if key in modules else ()
        shares.append(LineShare(of_key.total(), of_key.most_common(1)[0][0], key if key in modules else "", ran))
    return sorted(shares, key=lambda share: -share.nbytes)
