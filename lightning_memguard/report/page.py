"""Report -> a page to look at, ``memguard_report.html``, and beside it all of its data, ``memguard_report.json``.

This file changes when the page should look different. The page holds everything it needs: it loads nothing, runs
without scripts (they only read out the timeline under the pointer), and its text stays text at any width, since the
pictures are stretched while words stand over them as HTML.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memguard.core.decision.decision import Budget, Decision
from lightning_memguard.core.decision.record import EpochRecord
from lightning_memguard.core.replay.allocator import Allocator, Block
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.errors import MemGuardError
from lightning_memguard.report.colors import COLOURS
from lightning_memguard.report.data import budget_data, footprint_data, layer_data
from lightning_memguard.report.table import totals_of, why
from lightning_memguard.units import GIB, KIB, MIB, TIB, format_bytes, format_count

if TYPE_CHECKING:
    from lightning_memguard.core.layers.layers import Layer, LayerTable

PAGE_NAME = "memguard_report.html"
DATA_NAME = "memguard_report.json"

_COLUMNS = 480  # of the timeline: about what a screen can show, and some 60 KB of page
_EPOCHS_SHOWN = 24
_LAYERS_SHOWN = 400
_LAYERS_AT_ONCE = 40  # more are scrolled


@dataclass(frozen=True)
class CurvePoint:
    """The peak at one batch size.

    Attributes:
        batch_size: number of samples in the batch.
        peak_device_bytes: see `Footprint`.
        most_device_bytes: the same with everything uncertain at its largest: what is held against the budget.
    """

    batch_size: int
    peak_device_bytes: int
    most_device_bytes: int

    @classmethod
    def of(cls, footprint: Footprint) -> CurvePoint:
        """The point of a footprint."""
        return cls(footprint.batch_size, footprint.peak_device_bytes, footprint.most_device_bytes)


@dataclass(frozen=True)
class Report:
    """All that the page shows; what is empty or None is left out of it.

    Attributes:
        title: what the page is about, such as the name of the model.
        decision: the batch size, and why.
        trace: the events of the step at that size.
        settings: the rules of the allocator to replay it by; goes with ``trace``.
        curve: peaks at several batch sizes, see `curve_of`.
        records: predicted beside measured, by epoch.
        layers: the table by layer.
    """

    title: str
    decision: Decision
    trace: Trace | None = None
    settings: AllocatorSettings | None = None
    curve: Sequence[CurvePoint] = ()
    records: Sequence[EpochRecord] = ()
    layers: LayerTable | None = None

    def __post_init__(self) -> None:
        if (self.trace is None) != (self.settings is None):
            raise MemGuardError("A report's trace needs the allocator's settings to be replayed by, and the other way.")
        for point in self.curve:
            if point.batch_size < 1 or not 0 <= point.peak_device_bytes <= point.most_device_bytes:
                raise MemGuardError(
                    f"{point} is no point of a curve: a batch size is 1 or more, and bytes are 0 or more and at most "
                    "`most_device_bytes`."
                )


def write_report(directory: str | os.PathLike[str], report: Report) -> tuple[Path, Path]:
    """Write the page and its data; those of an earlier call are replaced.

    Args:
        directory: where; made if it is not there.
        report: what to show.

    Returns:
        Paths of the page and of the data.

    Raises:
        MemGuardError: the directory cannot be made or written to.
    """
    folder = Path(directory)
    shown = _Shown.of(report)
    files = {PAGE_NAME: page(shown), DATA_NAME: json.dumps(data(shown), indent=1, allow_nan=False)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            unfinished = folder / f".{name}.{os.getpid()}"
            unfinished.write_text(content, encoding="utf-8")
            unfinished.replace(folder / name)  # whoever has the page open never reads half of it
    except OSError as error:
        raise MemGuardError(
            f"The report cannot be written to {folder} ({error.strerror or error}); give a directory that you may "
            "write to."
        ) from error
    return folder / PAGE_NAME, folder / DATA_NAME


def curve_of(footprint_at: Callable[[int], Footprint], decision: Decision, points: int = 16) -> tuple[CurvePoint, ...]:
    """Peaks around the chosen batch size: from small ones to a third beyond it, and the size that was asked for.

    Args:
        footprint_at: batch size -> footprint; it is asked ``points`` times or so.
        decision: the batch size.
        points: how many sizes.
    """
    if decision.footprint is None:
        return ()
    last = max(math.ceil(decision.batch_size * 4 / 3), decision.requested_batch_size, 2)
    sizes = {max(1, round(last * place / points)) for place in range(1, points + 1)}
    sizes |= {1, decision.batch_size, decision.requested_batch_size} - {0}
    return tuple(CurvePoint.of(footprint_at(size)) for size in sorted(sizes))


# -- the timeline


@dataclass(frozen=True)
class PhaseSpan:
    """A stretch of events of one step and phase, ``first`` to ``last``, and the most bytes that were alive in it."""

    step: int
    phase: str
    first: int
    last: int
    peak_bytes: int


@dataclass(frozen=True)
class Timeline:
    """Live bytes by part, in columns; each shows the moment of its events at which most was alive.

    So the highest column is the peak, to the byte. What a block is larger than was asked for belongs to its part.

    Attributes:
        event_count: events behind the columns.
        positions: by column, the position of the event it shows.
        events: by column, that event.
        parts: by part, bytes alive in each column; parts without any are left out.
        reserved: by column, bytes the allocator held; empty where that is what is alive.
        spans: the phases, in order.
    """

    event_count: int
    positions: tuple[int, ...] = ()
    events: tuple[Event, ...] = ()
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reserved: tuple[int, ...] = ()
    spans: tuple[PhaseSpan, ...] = ()

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes alive in each column."""
        return tuple(map(sum, zip(*self.parts.values(), strict=True)))

    @property
    def peak_column(self) -> int:
        """The column of the peak."""
        totals = self.totals
        return totals.index(max(totals))


def timeline_of(trace: Trace, settings: AllocatorSettings, columns: int = _COLUMNS) -> Timeline:
    """What is alive while the step runs, by part.

    Args:
        trace: the events; blocks whose size is not known exactly have their most likely one.
        settings: the rules of the allocator to replay by; where the step does not fit their capacity, without one.
        columns: at most so many.
    """
    trace = trace.only("point")
    walked = list(_walked(trace, settings))
    if len(walked) < len(trace):
        walked = list(_walked(trace, replace(settings, capacity_bytes=None)))
    live = dict.fromkeys(COLOURS, 0)
    total, best = 0, -1
    shown: list[tuple[int, list[int], int]] = []
    totals: list[int] = []
    column = -1
    for position, (part, change, reserved) in enumerate(walked):
        live[part] = live.get(part, 0) + change
        total += change
        totals.append(total)
        into = position * min(columns, len(trace)) // len(trace)
        if into != column:
            column, best = into, -1
            shown.append((position, [], 0))
        if total > best:
            best = total
            shown[-1] = position, list(live.values()), reserved
    width = len(live)
    rows = [values + [0] * (width - len(values)) for _, values, _ in shown]
    parts = {part: tuple(row[at] for row in rows) for at, part in enumerate(live)}
    return Timeline(
        len(trace),
        tuple(position for position, _, _ in shown),
        tuple(trace.events[position] for position, _, _ in shown),
        {part: values for part, values in parts.items() if any(values)},
        tuple(reserved for _, _, reserved in shown) if settings.kind == "cuda" else (),
        tuple(_spans(trace.events, totals)),
    )


def _walked(trace: Trace, settings: AllocatorSettings) -> Iterator[tuple[str, int, int]]:
    """By event, the part and what it adds to the live bytes, and what is reserved then; ends where one does not fit."""
    allocator = Allocator(settings) if settings.kind == "cuda" else None
    blocks: dict[int, tuple[str, int, Block | None]] = {}
    reserved = 0
    for event in trace.events:
        if event.action == "alloc":
            block = allocator.alloc(event.nbytes, event.stream) if allocator else None
            if allocator and block is None:
                return
            change = block.size_bytes if block else event.nbytes
            part = event.part
            blocks[event.block] = part, change, block
        else:
            part, change, block = blocks.pop(event.block)
            change = -change
            if allocator and block:
                allocator.free(block)
        reserved = allocator.reserved_bytes if allocator else reserved + change
        yield part, change, reserved


def _spans(events: Sequence[Event], totals: Sequence[int]) -> Iterator[PhaseSpan]:
    first = 0
    for (step, phase), group in groupby(events, key=lambda event: (event.step, event.phase)):
        last = first + len(list(group)) - 1
        yield PhaseSpan(step, phase, first, last, max(totals[first : last + 1]))
        first = last + 1


# -- the data


@dataclass(frozen=True)
class _Shown:
    """A report with its timeline worked out, for the page and the data alike."""

    report: Report
    timeline: Timeline

    @classmethod
    def of(cls, report: Report) -> _Shown:
        trace, settings = report.trace, report.settings
        timeline = timeline_of(trace, settings) if trace and settings else Timeline(0)
        return cls(report, timeline)


def data(shown: _Shown) -> dict[str, Any]:
    """What the page shows, as plain data with the unit of every quantity in its name."""
    report = shown.report
    decision = report.decision
    return {
        "title": report.title,
        "decision": {
            "batch_size": decision.batch_size,
            "requested_batch_size": decision.requested_batch_size,
            "accumulate_grad_batches": decision.accumulate_grad_batches,
            "validation_batch_size": decision.validation_batch_size,
            "outcome": decision.outcome,
            "limited_by": decision.limited_by,
            "reason": decision.reason,
            "fits": decision.fits,
        },
        "footprint": footprint_data(decision.footprint) if decision.footprint else None,
        "budget": budget_data(decision.budget) if decision.budget else None,
        "timeline": _timeline_data(shown.timeline),
        "curve": [vars(point) for point in report.curve],
        "epochs": [_record_data(record) for record in report.records],
        "layers": [layer_data(layer) for layer in report.layers or ()],
        "layers_batch_size": report.layers.batch_size if report.layers else None,
    }


def _timeline_data(timeline: Timeline) -> dict[str, Any] | None:
    if not timeline.parts:
        return None
    return {
        "event_count": timeline.event_count,
        "event_positions": timeline.positions,
        "parts_bytes": dict(timeline.parts),
        "reserved_bytes": timeline.reserved or None,
        "modules": [event.module for event in timeline.events],
        "operators": [event.operator for event in timeline.events],
        "phases": [
            {
                "step": span.step,
                "phase": span.phase,
                "first_event": span.first,
                "last_event": span.last,
                "peak_bytes": span.peak_bytes,
            }
            for span in timeline.spans
        ],
    }


def _record_data(record: EpochRecord) -> dict[str, Any]:
    measured = record.measured
    return {
        "epoch": record.epoch,
        "batch_size": record.batch_size,
        "predicted_peak_device_bytes": record.predicted.peak_device_bytes,
        "predicted_parts_bytes": dict(record.predicted.parts),
        "measured_peak_bytes": measured.peak_bytes,
        "measured_source": measured.source,
        "measured_parts_bytes": dict(measured.parts),
        "measured_peak_allocated_bytes": measured.peak_allocated_bytes,
        "measured_peak_reserved_bytes": measured.peak_reserved_bytes,
        "error_ratio": record.error_ratio if measured.peak_bytes else None,
        "headroom_bytes": record.headroom_bytes,
    }


# -- the page


def page(shown: _Shown) -> str:
    """The page as HTML."""
    report = shown.report
    decision, footprint, budget = report.decision, report.decision.footprint, report.decision.budget
    sections = [_headline(decision)]
    if footprint is not None and budget is not None:
        sections.append(f'<div class="pair">{_setup(footprint, budget)}{_curve(report.curve, decision, budget)}</div>')
    sections += [_timeline(shown.timeline, report), _epochs(report.records), _layers(report.layers)]
    return _PAGE.format(
        title=escape(report.title),
        style=_STYLE,
        body="\n".join(filter(None, sections)),
        data=DATA_NAME,
        script=_SCRIPT if shown.timeline.parts else "",
    )


def _headline(decision: Decision) -> str:
    footprint, budget = decision.footprint, decision.budget
    if footprint is None or budget is None:
        reason = escape(decision.reason or "nothing was predicted")
        return f'<p class="lead">MemGuard stepped aside and changed nothing: {reason}.</p>'
    share = footprint.most_device_bytes / budget.usable_bytes if budget.usable_bytes > 0 else math.inf
    asked = decision.requested_batch_size
    accumulated = decision.accumulate_grad_batches
    size = f"was {asked}" if asked != decision.batch_size else "as asked"
    tiles = [
        ("Batch size", f"{decision.batch_size}", size + (f", {accumulated} accumulated" if accumulated > 1 else "")),
        (
            "Predicted peak",
            format_bytes(footprint.peak_device_bytes),
            f"at most {format_bytes(footprint.most_device_bytes)}"
            if footprint.most_device_bytes > footprint.peak_device_bytes
            else f"on {footprint.device}",
        ),
        ("Usable", format_bytes(budget.usable_bytes), f"of {format_bytes(budget.free_bytes)} on {budget.device}"),
        ("Used of it", f"{share:.1%}" if math.isfinite(share) else "none", "fits" if decision.fits else "does NOT fit"),
    ]
    cells = "".join(
        f'<div class="tile{" bad" if note == "does NOT fit" else ""}"><dt>{escape(name)}</dt>'
        f"<dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in tiles
    )
    notes = "".join(f'<p class="note">Note: {escape(note)}.</p>' for note in footprint.notes)
    return f'<p class="lead">{escape(why(decision))}</p><dl class="tiles">{cells}</dl>{notes}'


def _setup(footprint: Footprint, budget: Budget) -> str:
    rows = []
    for part, colour in COLOURS.items():
        nbytes = footprint.parts.get(part, 0)
        if nbytes:
            share = nbytes / footprint.peak_allocated_bytes
            rows.append(
                f'<tr><th scope="row">{_swatch(part)}{_words(part)}</th><td>{format_bytes(nbytes)}</td>'
                f'<td class="meter">{_meter(share, colour)}<span>{_percent(share)}</span></td></tr>'
            )
    totals = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{format_bytes(nbytes)}</td><td></td></tr>'
        for name, nbytes in totals_of(footprint, budget)
    )
    return f"""<section><h2>At the peak, batch size {footprint.batch_size}</h2>
<p class="sub">{_peak_words(footprint)}</p>
<table class="setup"><caption class="hidden">Predicted bytes at the peak, by part, and the budget</caption>
<thead><tr><th scope="col">Part</th><th scope="col">Predicted</th><th scope="col">Share</th></tr></thead>
<tbody>{"".join(rows)}</tbody><tbody class="sums">{totals}</tbody></table></section>"""


def _peak_words(footprint: Footprint) -> str:
    phase = f"{footprint.phase} pass" if footprint.phase in ("forward", "backward") else footprint.phase or "step"
    module = f" of <code>{escape(footprint.module)}</code>" if footprint.module else ""
    operator = f" (<code>{escape(footprint.operator)}</code>)" if footprint.operator else ""
    return f"Where most is alive: in the {escape(phase)}{module}{operator}."


def _percent(share: float) -> str:
    return "&lt;1%" if 0 < share < 0.005 else f"{share:.0%}"


def _words(part: str) -> str:
    return escape(part.replace("_", " "))


def _swatch(part: str) -> str:
    return f'<i class="swatch" style="background:{COLOURS.get(part, "#8a8f98")}"></i>'


def _meter(share: float, colour: str = "var(--line)", mark: float | None = None) -> str:
    """A bar; it only repeats what stands beside it as a number, so it is hidden from those who listen."""
    width = f"{100 * min(max(share, 0), 1):.1f}%"
    tick = "" if mark is None else f'<b style="left:{100 * min(max(mark, 0), 1):.1f}%"></b>'
    return f'<span class="bar" aria-hidden="true"><i style="width:{width};background:{colour}"></i>{tick}</span>'


# The curve of the peak against the batch size


def _curve(points: Sequence[CurvePoint], decision: Decision, budget: Budget) -> str:
    footprint = decision.footprint
    if len(points) < 2 or footprint is None:
        return ""
    points = sorted(points, key=lambda point: point.batch_size)
    last = max(points[-1].batch_size, decision.batch_size)
    highest = max(point.most_device_bytes for point in points)
    above = budget.usable_bytes > 3 * highest  # a budget far away would press the curve flat
    axis = _Axis.up_to(highest if above else max(highest, budget.free_bytes))

    def at(size: int, nbytes: int) -> str:
        return f"{1000 * size / last:.1f},{1000 * (1 - nbytes / axis.top):.1f}"

    line = " ".join(at(point.batch_size, point.peak_device_bytes) for point in points)
    most = [at(point.batch_size, point.most_device_bytes) for point in points]
    uncertain = any(point.most_device_bytes > point.peak_device_bytes for point in points)
    back = [at(point.batch_size, point.peak_device_bytes) for point in reversed(points)]
    band = f'<polygon class="band" points="{" ".join([*most, *back])}"/>' if uncertain else ""
    edge = f'<polyline class="curve thin" points="{" ".join(most)}"/>' if uncertain else ""
    marks = [_dot(decision.batch_size / last, footprint.peak_device_bytes / axis.top, "chosen")]
    marks.append(
        _label(
            decision.batch_size / last,
            0.06,  # below the curve, where nothing else is
            f"{decision.batch_size}: {format_bytes(footprint.peak_device_bytes)}",
            "chosen",
        )
    )
    asked = next((point for point in points if point.batch_size == decision.requested_batch_size), None)
    if asked is not None and asked.batch_size != decision.batch_size:
        marks.append(_dot(asked.batch_size / last, asked.peak_device_bytes / axis.top, "asked"))
    limits = "" if above else _limits(budget, axis)
    rule = f'<path class="drop" d="M{1000 * decision.batch_size / last:.1f} 0V1000"/>'
    rows = "".join(
        f'<tr><th scope="row">{point.batch_size}</th><td>{format_bytes(point.peak_device_bytes)}</td>'
        f"<td>{format_bytes(point.most_device_bytes)}</td></tr>"
        for point in points
    )
    legend = [('<i class="key dot chosen"></i>', "chosen")]
    if len(marks) > 2:
        legend.append(('<i class="key dot asked"></i>', f"asked for ({decision.requested_batch_size})"))
    if uncertain:
        legend.append(('<i class="key area"></i>', "up to everything uncertain at its largest"))
    if above:
        legend.append(("", f"usable: {format_bytes(budget.usable_bytes)}, far above"))
    of_what = "peak of tensors" if footprint.device == "cpu" else "on the device, all in all"
    said = (
        f"Predicted peak on the device against the batch size, from {points[0].batch_size} to {points[-1].batch_size}; "
        f"{format_bytes(footprint.peak_device_bytes)} at the chosen {decision.batch_size}; "
        f"{format_bytes(budget.usable_bytes)} are usable."
    )
    return f"""<section><h2>Peak against batch size</h2><p class="sub">Predicted {of_what}.</p>
<figure><div class="plot curve-plot">{axis.labels()}<div class="area"><svg viewBox="0 0 1000 1000"
preserveAspectRatio="none" role="img" aria-label="{escape(said)}">{axis.lines()}{band}{rule}{limits}{edge}
<polyline class="curve" points="{line}"/></svg>{_limit_labels(budget, axis) if limits else ""}{"".join(marks)}</div>
{_size_axis(last)}</div>{_legend(legend)}</figure>
<details><summary>As a table</summary><div class="scroll"><table><thead><tr><th scope="col">Batch size</th>
<th scope="col">Peak on the device</th><th scope="col">At most</th></tr></thead><tbody>{rows}</tbody></table></div>
</details></section>"""


def _limits(budget: Budget, axis: _Axis) -> str:
    free, usable = (1000 * (1 - nbytes / axis.top) for nbytes in (budget.free_bytes, budget.usable_bytes))
    return (
        f'<rect class="margin" x="0" width="1000" y="{free:.1f}" height="{max(usable - free, 0):.1f}"/>'
        f'<path class="limit" d="M0 {usable:.1f}H1000"/><path class="limit thin" d="M0 {free:.1f}H1000"/>'
    )


def _limit_labels(budget: Budget, axis: _Axis) -> str:
    free, usable = budget.free_bytes / axis.top, budget.usable_bytes / axis.top
    text = f"budget {format_bytes(budget.free_bytes)}" + (
        f", usable {format_bytes(budget.usable_bytes)}" if usable < free else ""
    )
    return f'<span class="label limit" style="bottom:{100 * free:.1f}%">{text}</span>'


def _size_axis(last: int) -> str:
    step = math.ceil(_nice(last / 4))
    ticks = range(0, last + 1, step)
    marks = "".join(f'<span style="left:{100 * tick / last:.2f}%">{tick}</span>' for tick in ticks)
    return f'<div class="x-axis" aria-hidden="true">{marks}</div><div class="x-name">batch size</div>'


def _dot(x: float, y: float, kind: str) -> str:
    return f'<span class="dot {kind}" style="left:{100 * x:.2f}%;bottom:{100 * y:.2f}%"></span>'


def _label(x: float, y: float, text: str, kind: str) -> str:
    """Words beside a point, on the side of it that has room."""
    side = "left" if x > 0.5 else "right"
    return f'<span class="label {kind} {side}" style="left:{100 * x:.2f}%;bottom:{100 * y:.2f}%">{escape(text)}</span>'


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    return f'<ul class="legend">{"".join(f"<li>{key}{escape(text)}</li>" for key, text in entries)}</ul>'


@dataclass(frozen=True)
class _Axis:
    """Bytes upwards from 0: the top of the picture, and where lines with a label stand."""

    top: float
    ticks: tuple[tuple[float, str], ...]

    @classmethod
    def up_to(cls, nbytes: int) -> _Axis:
        unit, name = next(
            ((unit, name) for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if nbytes >= unit),
            (1, "B"),
        )
        top = max(nbytes, 1) * 1.1
        step = _nice(top / unit / 5)
        count = int(top / unit / step)
        return cls(top, tuple((index * step * unit, f"{index * step:g} {name}") for index in range(count + 1)))

    def lines(self) -> str:
        places = (f"M0 {1000 * (1 - nbytes / self.top):.1f}H1000" for nbytes, _ in self.ticks)
        return f'<path class="grid" d="{"".join(places)}"/>'

    def labels(self) -> str:
        marks = (
            f'<span style="bottom:{100 * nbytes / self.top:.2f}%">{text if nbytes else "0"}</span>'
            for nbytes, text in self.ticks
        )
        return f'<div class="y-axis" aria-hidden="true">{"".join(marks)}</div>'


def _nice(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(step, 1e-9)))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * 0.999)


# The timeline


def _timeline(timeline: Timeline, report: Report) -> str:
    if not timeline.parts:
        return ""
    totals = timeline.totals
    axis = _Axis.up_to(max(*totals, *timeline.reserved))
    order = [*(part for part in COLOURS if part in timeline.parts), *(set(timeline.parts) - set(COLOURS))]
    # Each part is drawn as all up to it, the whole stack first, so that it covers all but its own stripe.
    heights = [0] * len(totals)
    layers = []
    for part in order:
        heights = [height + nbytes for height, nbytes in zip(heights, timeline.parts[part], strict=True)]
        layers.append(f'<path fill="{COLOURS.get(part, "#8a8f98")}" d="{_steps(heights, axis.top)}Z"/>')
    reserved = f'<path class="reserved" d="{_outline(timeline.reserved, axis.top)}"/>' if timeline.reserved else ""
    peak = timeline.peak_column
    at = (peak + 0.5) / len(totals)
    borders = "".join(
        f"M{len(totals) * span.first / timeline.event_count:.2f} 0V1000"
        for span in timeline.spans[1:]
        if span.last + 1 - span.first > timeline.event_count / 60  # moving a batch is over in a moment
    )
    legend = [(_swatch(part), part.replace("_", " ")) for part in order]
    if timeline.reserved:
        legend.append(('<i class="key line"></i>', "reserved by the allocator"))
    steps = len({span.step for span in timeline.spans})
    many = {1: "one step", 2: "two steps"}.get(steps, f"{steps} steps")
    batch_size = report.trace.batch_size if report.trace else report.decision.batch_size
    said = (
        f"Live bytes by part over {timeline.event_count} allocations and frees of {many}. The peak, "
        f"{format_bytes(totals[peak])}, stands in step {timeline.events[peak].step + 1}, {timeline.events[peak].phase}."
    )
    grouped = (
        ""
        if timeline.event_count == len(totals)
        else f" Each column shows the highest moment of about {timeline.event_count / len(totals):.0f} events."
    )
    return f"""<section><h2>Live memory through {many}, batch size {batch_size}</h2>
<p class="sub">From left to right {timeline.event_count} allocations and frees in their order, not in time.{grouped}</p>
<figure id="timeline"><div class="plot">{axis.labels()}<div class="area" tabindex="0" role="group"
aria-label="Timeline; left and right arrow keys read it out"><svg viewBox="0 0 {len(totals)} 1000"
preserveAspectRatio="none" role="img" aria-label="{escape(said)}">{_scaled(axis.lines(), len(totals))}
<g class="stack">{"".join(reversed(layers))}</g><path class="border" d="{borders}"/>{reserved}</svg>
{_label(at, totals[peak] / axis.top, f"peak {format_bytes(totals[peak])}", "peak")}
<span class="cursor" hidden></span></div>{_phases(timeline)}</div>{_legend(legend)}
<p class="readout" aria-live="polite">Point at the picture to read it out.</p></figure>{_phase_table(timeline)}
<script type="application/json" id="timeline-data">{_script_data(timeline, order)}</script></section>"""


def _scaled(svg: str, width: int) -> str:
    return f'<g transform="scale({width / 1000:.4f} 1)">{svg}</g>'


def _steps(values: Sequence[int], top: float) -> str:
    """An area under steps one unit wide, down to the axis."""
    return f"M0 1000V{_step_path(values, top)}V1000"


def _outline(values: Sequence[int], top: float) -> str:
    return f"M0 {_step_path(values, top)}"


def _step_path(values: Sequence[int], top: float) -> str:
    """Starting with a height: then right for each run of equal ones, and up or down to the next."""
    runs = [(height, len(list(run))) for height, run in groupby(f"{1000 * (1 - value / top):.0f}" for value in values)]
    return "V".join(f"{height}h{length}" for height, length in runs)


def _phases(timeline: Timeline) -> str:
    """Under the picture, a lane of phases and below it one of steps; a name that has no room is not shown."""
    count = timeline.event_count
    lanes = []
    for kind, key in (("phase", lambda span: (span.step, span.first)), ("step", lambda span: span.step)):
        cells = []
        for _, group in groupby(timeline.spans, key=key):
            spans = list(group)
            name = spans[0].phase.replace("_", " ") if kind == "phase" else f"step {spans[0].step + 1}"
            left, width = spans[0].first / count, (spans[-1].last + 1 - spans[0].first) / count
            if width < 0.003:  # narrower than the gap between two
                continue
            cells.append(
                f'<div class="cell" style="left:{100 * left:.2f}%;width:{100 * width:.2f}%" title="{escape(name)}">'
                f"<span>{escape(name)}</span></div>"
            )
        lanes.append(f'<div class="lane {kind}">{"".join(cells)}</div>')
    return f'<div class="lanes" aria-hidden="true">{"".join(lanes)}</div>'


def _phase_table(timeline: Timeline) -> str:
    phases: dict[tuple[int, str], list[PhaseSpan]] = {}
    for span in timeline.spans:
        phases.setdefault((span.step, span.phase), []).append(span)
    rows = "".join(
        f'<tr><th scope="row">step {step + 1}, {escape(phase.replace("_", " "))}</th>'
        f"<td>{sum(span.last + 1 - span.first for span in spans)}</td>"
        f"<td>{format_bytes(max(span.peak_bytes for span in spans))}</td></tr>"
        for (step, phase), spans in phases.items()
    )
    return f"""<details><summary>As a table</summary><div class="scroll"><table><thead><tr><th scope="col">Phase</th>
<th scope="col">Allocations and frees</th><th scope="col">Most alive</th></tr></thead><tbody>{rows}</tbody></table>
</div></details>"""


def _script_data(timeline: Timeline, order: Sequence[str]) -> str:
    """What the script reads out, with each name once; ``<`` is written so that no text of a user's ends the script."""
    places, place_names = _numbered([" ".join(filter(None, (e.module, e.operator))) for e in timeline.events])
    phases, phase_names = _numbered([f"step {e.step + 1}, {e.phase}".replace("_", " ") for e in timeline.events])
    content = {
        "count": timeline.event_count,
        "events": timeline.positions,
        "parts": {part.replace("_", " "): timeline.parts[part] for part in order},
        "reserved": timeline.reserved,
        "phases": phases,
        "phase_names": phase_names,
        "places": places,
        "place_names": place_names,
    }
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


def _numbered(words: Sequence[str]) -> tuple[list[int], list[str]]:
    names = list(dict.fromkeys(words))
    number = {name: index for index, name in enumerate(names)}
    return [number[word] for word in words], names


# Predicted beside measured


def _epochs(records: Sequence[EpochRecord]) -> str:
    if not records:
        return ""
    shown = list(records)
    told = ""
    if len(shown) > _EPOCHS_SHOWN:
        worst = max(shown, key=lambda record: abs(record.error_ratio) if record.measured.peak_bytes else -1)
        latest = shown[-_EPOCHS_SHOWN + 1 :]
        shown = latest if worst in latest else [worst, *latest]
        told = f" {len(shown)} of {len(records)} epochs: the latest, and the one with the largest error."
    scale = max(max(record.measured.peak_bytes, record.predicted.peak_device_bytes) for record in shown) * 1.05 or 1

    def bar(record: EpochRecord) -> str:
        measured, predicted = record.measured.peak_bytes, record.predicted.peak_device_bytes
        return _meter(measured / scale, "var(--accent)", predicted / scale)

    rows = "".join(
        f'<tr><th scope="row">{record.epoch}</th><td class="narrow-off">{record.batch_size}</td>'
        f"<td>{format_bytes(record.predicted.peak_device_bytes)}</td>"
        f"<td>{format_bytes(record.measured.peak_bytes) if record.measured.peak_bytes else 'not known'}</td>"
        f"<td>{f'{record.error_ratio:+.1%}' if record.measured.peak_bytes else ''}</td>"
        f"<td>{format_bytes(record.headroom_bytes)}</td>"
        f'<td class="wide">{bar(record)}</td></tr>'
        for record in shown
    )
    sources = ", ".join(dict.fromkeys(escape(record.measured.source) for record in shown))
    return f"""<section><h2>Predicted beside measured</h2>
<p class="sub">Measured: {sources}. The bar is what was measured, the mark on it what was predicted.{told}</p>
<div class="scroll"><table class="epochs"><caption class="hidden">Predicted and measured peak by epoch</caption>
<thead><tr><th scope="col">Epoch</th><th scope="col" class="narrow-off">Batch size</th><th scope="col">Predicted</th>
<th scope="col">Measured</th><th scope="col">Error</th><th scope="col">Headroom</th>
<th scope="col" class="wide"><span class="hidden">Measured, and predicted on it</span></th></tr></thead>
<tbody>{rows}</tbody></table></div></section>"""


# By layer


def _layers(table: LayerTable | None) -> str:
    if table is None or not table.layers:
        return ""
    layers = table.layers
    most = max(layer.activation_bytes for layer in layers) or 1
    rows = "".join(_layer(layer, most) for layer in layers[:_LAYERS_SHOWN])
    told = f" The first {_LAYERS_SHOWN} of {len(layers)}." if len(layers) > _LAYERS_SHOWN else ""
    heads = ("Type", "Output", "Parameters", "Their bytes", "Kept for backward", "FLOPs, forward")
    names = "".join(f'<th scope="col">{head}</th>' for head in heads)
    scroll = "scroll tall" if len(layers) > _LAYERS_AT_ONCE else "scroll"
    return f"""<section><h2>By layer</h2><p class="sub">One forward pass at batch size {table.batch_size};
each row without what its children do.{told}</p>
<div class="{scroll}"><table class="layers"><thead><tr><th scope="col">Layer</th>{names}</tr></thead>
<tbody>{rows}</tbody></table></div></section>"""


def _layer(layer: Layer, most_bytes: int) -> str:
    name = layer.name.rpartition(".")[2] or "(the model)"
    shape = "x".join(map(str, layer.output_shape)) if layer.output_shape is not None else ""
    frozen = "" if layer.trainable_parameters == layer.parameters else " frozen"
    shared = f" as {layer.shared_with}" if layer.shared_with else ""
    kept = format_bytes(layer.activation_bytes) if layer.activation_bytes else ""
    bar = _meter(layer.activation_bytes / most_bytes, COLOURS["activations"]) if kept else ""
    return (
        f'<tr><th scope="row" title="{escape(layer.name)}" style="padding-left:{layer.depth}em">{escape(name)}</th>'
        f"<td>{escape(layer.type)}{escape(shared)}</td><td>{escape(shape)}</td>"
        f"<td>{f'{layer.parameters:,}' if layer.parameters else ''}{frozen}</td>"
        f"<td>{format_bytes(layer.parameter_bytes) if layer.parameter_bytes else ''}</td>"
        f'<td class="kept">{bar}<span>{kept}</span></td>'
        f"<td>{format_count(layer.flops)}</td></tr>"
    )


_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1b1f24; --soft: #59626d; --line: #d9dde3;
  --faint: #eef0f3; --accent: #0072b2; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1c2026; --text: #e7eaee; --soft: #a3adb8;
  --line: #38404a; --faint: #262c34; --accent: #56b4e9; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0; }
.lead { margin: 0 0 1rem; font-size: 1.05rem; } .note { margin: .5rem 0 0; color: var(--soft); font-size: .875rem; }
.sub { margin: .1rem 0 .75rem; color: var(--soft); font-size: .875rem; overflow-wrap: anywhere; }
code { font-size: .92em; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem 1.1rem 1.1rem;
  margin-top: 1rem; min-width: 0; }
.pair { display: grid; gap: 0 1rem; grid-template-columns: minmax(0, 1fr); }
@media (min-width: 900px) { .pair { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); } }
.pair > section:only-child { grid-column: 1 / -1; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .75rem; margin: 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .7rem .9rem; }
.tile dt { color: var(--soft); font-size: .8125rem; } .tile dd { margin: 0; font-size: 1.5rem; font-weight: 600;
  line-height: 1.3; } .tile small { display: block; font-size: .8125rem; font-weight: 400; color: var(--soft); }
.tile.bad dd, .tile.bad small { color: var(--bad); }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .5rem; text-align: right; font-weight: 400; border-bottom: 1px solid var(--faint);
  white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; } td:last-child, thead th:last-child { padding-right: 0; }
thead th { color: var(--soft); font-size: .8125rem; border-bottom-color: var(--line); }
.setup th:first-child { white-space: normal; } .setup .meter { width: 34%; }
.setup thead th:last-child { text-align: left; padding-left: 1rem; }
.setup .sums tr:first-child > * { border-top: 1px solid var(--line); font-weight: 600; }
td.meter { padding-left: 1rem; } .meter { text-align: left; } .meter span:last-child { display: inline-block;
  width: 3em; text-align: right; } .meter .bar { width: calc(100% - 3.2em); }
.bar { display: inline-block; position: relative; height: .6em; background: var(--faint); border-radius: 3px;
  vertical-align: baseline; } .bar i { display: block; height: 100%; border-radius: 3px; }
.bar b { position: absolute; top: -.25em; bottom: -.25em; width: 3px; margin-left: -1.5px; background: var(--text);
  border-radius: 2px; outline: 1px solid var(--card); }
.wide { width: 40%; min-width: 8rem; } .wide .bar { width: 100%; }
.epochs td.wide { padding-left: 1rem; }
.layers td:nth-child(2), .layers td:nth-child(3), .layers th:nth-child(2), .layers th:nth-child(3) { text-align: left; }
.layers .kept .bar { width: 5rem; margin-right: .6rem; }
.layers .kept span:last-child { display: inline-block; min-width: 5.2em; }
.scroll { overflow-x: auto; } .tall { max-height: 46rem; overflow-y: auto; }
.tall thead th { position: sticky; top: 0; background: var(--card); z-index: 1; }
details { margin-top: .75rem; } summary { color: var(--soft); font-size: .875rem; cursor: pointer; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
figure { margin: 0; } .swatch, .key { display: inline-block; width: .7em; height: .7em; border-radius: 2px;
  margin-right: .5em; }
.legend { display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; margin: .6rem 0 0; padding: 0; list-style: none;
  font-size: .8125rem; color: var(--soft); }
.plot { display: grid; grid-template-columns: 4.6rem minmax(0, 1fr); }
.plot .area { position: relative; height: clamp(220px, 32vw, 340px); border-bottom: 1px solid var(--soft); }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; display: block; overflow: visible; }
.y-axis { position: relative; } .y-axis span { position: absolute; right: .5rem; transform: translateY(50%);
  font-size: .75rem; color: var(--soft); white-space: nowrap; }
.x-axis, .x-name, .lanes { grid-column: 2; } .x-axis { position: relative; height: 1.4rem; }
.x-axis span { position: absolute; transform: translateX(-50%); font-size: .75rem; color: var(--soft); }
.x-name { text-align: center; font-size: .75rem; color: var(--soft); }
.grid { stroke: var(--line); fill: none; stroke-width: 1; vector-effect: non-scaling-stroke; }
.border { stroke: var(--text); opacity: .35; stroke-width: 1; stroke-dasharray: 2 3; fill: none;
  vector-effect: non-scaling-stroke; }
.reserved { stroke: var(--text); stroke-width: 1.5; fill: none; vector-effect: non-scaling-stroke; }
.curve { stroke: var(--accent); stroke-width: 2.5; fill: none; vector-effect: non-scaling-stroke;
  stroke-linejoin: round; }
.curve.thin { stroke-width: 1; } .band, .key.area { fill: var(--accent); background: var(--accent); opacity: .18; }
.limit { stroke: var(--bad); stroke-width: 2; fill: none; vector-effect: non-scaling-stroke; }
.limit.thin { stroke-width: 1; stroke-dasharray: 5 4; } .margin { fill: var(--bad); opacity: .1; }
.drop { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; vector-effect: non-scaling-stroke; }
.key.line { height: 0; width: 1.1em; border-top: 2px solid var(--text); border-radius: 0; vertical-align: middle; }
.dot { border-radius: 50%; width: 11px; height: 11px; background: var(--accent); border: 2px solid var(--card); }
span.dot { position: absolute; transform: translate(-50%, 50%); } .dot.asked { background: var(--card);
  border-color: var(--accent); } .key.dot { vertical-align: -1px; }
.label { position: absolute; font-size: .8125rem; white-space: nowrap; padding: 0 .3em; border-radius: 3px;
  line-height: 1.35; pointer-events: none; }
.label.left { transform: translate(calc(-100% - 8px), 50%); } .label.right { transform: translate(8px, 50%); }
.label.peak.left { transform: translate(calc(-100% - 5px), -1px); }
.label.peak.right { transform: translate(5px, -1px); }
.label.chosen, .label.peak { font-weight: 600; background: color-mix(in srgb, var(--card) 80%, transparent); }
.label.limit { left: 0; margin-bottom: 2px; padding-left: .4em; color: var(--bad); }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--text); pointer-events: none; }
.lane { position: relative; height: 1.35rem; margin-top: 2px; } .cell { position: absolute; top: 0; bottom: 0;
  container-type: inline-size; border-left: 2px solid var(--card); background: var(--faint); overflow: hidden; }
.cell:first-child { border-left: 0; } .cell span { display: block; text-align: center; font-size: .75rem;
  line-height: 1.35rem; color: var(--soft); white-space: nowrap; }
.lane.step .cell { background: none; border-top: 2px solid var(--line); }
@container (max-width: 3.6rem) { .cell span { display: none; } }
@media (max-width: 600px) { .plot { grid-template-columns: 3.9rem minmax(0, 1fr); }
  section { padding: .9rem .8rem; } main { padding: 1rem .7rem 2rem; } .lane.phase { height: 4.2rem; }
  .epochs .wide, .epochs .narrow-off { display: none; } th, td { padding-left: .3rem; padding-right: .3rem; }
  .layers .kept .bar { display: none; }
  @container (max-width: 3.6rem) { .lane.phase .cell span { display: block; writing-mode: vertical-rl; height: 100%;
    width: 100%; text-align: center; } .lane.phase .cell { display: grid; } }
  @container (max-width: .9rem) { .lane.phase .cell span { display: none; } } }
.readout { margin: .6rem 0 0; font-size: .8125rem; min-height: 3em; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
footer { margin-top: 1.25rem; color: var(--soft); font-size: .8125rem; }
@media print { body { background: none; } section { break-inside: avoid; } .tall { max-height: none; } }
"""

_SCRIPT = """
(() => {
  const shown = JSON.parse(document.getElementById("timeline-data").textContent);
  const area = document.querySelector("#timeline .area"), cursor = area.querySelector(".cursor");
  const readout = document.querySelector("#timeline .readout"), columns = shown.events.length;
  const bytes = (n) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"]; let u = 0;
    while (n >= 1024 && u < 4) { n /= 1024; u += 1; }
    return `${u ? n.toFixed(1) : n} ${units[u]}`;
  };
  let at = 0;
  const show = (column) => {
    at = Math.max(0, Math.min(columns - 1, column));
    const parts = Object.entries(shown.parts).map(([name, values]) => [name, values[at]]).filter(([, n]) => n);
    const total = parts.reduce((sum, [, n]) => sum + n, 0);
    const list = parts.sort((a, b) => b[1] - a[1]).map(([name, n]) => `${name} ${bytes(n)}`).join(", ");
    const held = shown.reserved.length ? `, ${bytes(shown.reserved[at])} reserved` : "";
    const place = shown.place_names[shown.places[at]];
    readout.textContent = `Event ${shown.events[at] + 1} of ${shown.count} (${shown.phase_names[shown.phases[at]]}` +
      `${place ? ": " + place : ""}): ${bytes(total)} alive${held}. ${list}.`;
    cursor.style.left = `${(100 * (at + 0.5)) / columns}%`;
    cursor.hidden = false;
  };
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    show(Math.floor((columns * (event.clientX - box.left)) / box.width));
  });
  area.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (by) { show(at + by); event.preventDefault(); }
  });
})();
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>MemGuard: {title}</title>
<style>{style}</style>
</head>
<body>
<main>
<header><h1>Memory of {title}</h1></header>
{body}
<footer>Predicted by lightning-memguard without taking the memory; all figures are in {data} beside this page.</footer>
</main>
<script>{script}</script>
</body>
</html>
"""
