"""Report -> its pictures: the peak versus the batch size, and live memory through the step, as SVG in HTML.

The pictures stretch to any width. Words are placed over them as HTML, so text stays text.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from html import escape
from itertools import groupby

from lightning_memguard.core.decision.decision import Budget, Decision, part_words
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.timeline import PhaseSpan, Timeline
from lightning_memguard.report.page_data import CurvePoint, shown_parts
from lightning_memguard.report.words import COLORS, round_step, ticks
from lightning_memguard.units import format_bytes

_OTHER = "#8a8f98"  # the color of a part without one


def swatch(part: str) -> str:
    """A square in the color of a part."""
    return f'<i class="swatch" style="background:{COLORS.get(part, _OTHER)}"></i>'


def row(head: object, *cells: object) -> str:
    """A row of a table."""
    return f'<tr><th scope="row">{head}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def table(kind: str, heads: Sequence[str], rows: str, caption: str = "") -> str:
    """A table of this class, with a body of rows, and a caption for screen readers."""
    cells = "".join(f'<th scope="col">{head}</th>' for head in heads)
    hidden = f'<caption class="hidden">{caption}</caption>' if caption else ""
    return f'<table class="{kind}">{hidden}<thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table>'


def _as_table(heads: Sequence[str], rows: str) -> str:
    return f'<details><summary>As a table</summary><div class="scroll">{table("", heads, rows)}</div></details>'


# The peak versus the batch size


def curve(points: Sequence[CurvePoint], decision: Decision, footprint: Footprint, budget: Budget) -> str:
    """The peak versus the batch size, as a section of the page; empty if there are not two points."""
    if len(points) < 2:
        return ""
    sizes, peaks, bounds = zip(*sorted(map(astuple, points)), strict=True)
    usable, is_far = format_bytes(budget.usable_bytes), budget.usable_bytes > 3 * max(bounds)  # would flatten the curve
    axis = _Axis.up_to(max(bounds) if is_far else max(*bounds, budget.free_bytes))
    chosen, peak, asked = decision.batch_size, footprint.peak_device_bytes, decision.requested_batch_size
    last = max(sizes[-1], chosen)

    def path(values: Sequence[int]) -> list[str]:
        return [f"{1000 * size / last:.1f},{axis.y(nbytes):.1f}" for size, nbytes in zip(sizes, values, strict=True)]

    def dot(size: int, nbytes: int, kind: str) -> str:
        place = f"left:{100 * size / last:.2f}%;bottom:{100 * nbytes / axis.top:.2f}%"
        return f'<span class="dot {kind}" style="{place}"></span>'

    legend = [('<i class="key dot chosen"></i>', "chosen")]
    lines = f'<path class="drop" d="M{1000 * chosen / last:.1f} 0V1000"/>'
    marks = dot(chosen, peak, "chosen") + _label(chosen / last, 0.06, f"{chosen}: {format_bytes(peak)}", "chosen")
    if asked != chosen and asked in sizes:
        legend.append(('<i class="key dot asked"></i>', f"requested ({asked})"))
        marks += dot(asked, peaks[sizes.index(asked)], "asked")
    if peaks != bounds:
        legend.append(('<i class="key area"></i>', "up to the upper bound"))
        lines = f'<polygon class="band" points="{" ".join([*path(bounds), *path(peaks)[::-1]])}"/>{lines}'
        lines += f'<polyline class="curve thin" points="{" ".join(path(bounds))}"/>'
    if is_far:
        legend.append(("", f"usable: {usable}, far above"))
    else:
        limits, limit_label = _limits(budget, axis)
        lines, marks = lines + limits, limit_label + marks
    of_what = "allocated memory" if footprint.device == "cpu" else "total on device"
    label = (
        f"Predicted peak on the device by batch size, from {sizes[0]} to {sizes[-1]}; {format_bytes(peak)} at the "
        f"chosen {chosen}; {usable} are usable."
    )
    named = range(0, last + 1, math.ceil(round_step(last / 4)))
    names = "".join(f'<span style="left:{100 * size / last:.2f}%">{size}</span>' for size in named)
    rows = "".join(row(size, *map(format_bytes, both)) for size, *both in zip(sizes, peaks, bounds, strict=True))
    return f"""<section><h2>Peak by batch size</h2><p class="sub">Predicted peak: {of_what}.</p>
<figure><div class="plot curve-plot">{axis.labels()}<div class="area"><svg viewBox="0 0 1000 1000"
preserveAspectRatio="none" role="img" aria-label="{escape(label)}">{axis.lines()}{lines}
<polyline class="curve" points="{" ".join(path(peaks))}"/></svg>{marks}</div>
<div class="x-axis" aria-hidden="true">{names}</div><div class="x-name">batch size</div></div>{_legend(legend)}</figure>
{_as_table(("Batch size", "Peak on the device", "At most"), rows)}</section>"""


def _limits(budget: Budget, axis: _Axis) -> tuple[str, str]:
    """The budget and what is usable of it: the lines, and their label."""
    free, usable = axis.y(budget.free_bytes), axis.y(budget.usable_bytes)
    lines = (
        f'<rect class="margin" x="0" width="1000" y="{free:.1f}" height="{max(usable - free, 0):.1f}"/>'
        f'<path class="limit" d="M0 {usable:.1f}H1000"/><path class="limit thin" d="M0 {free:.1f}H1000"/>'
    )
    less = f", usable {format_bytes(budget.usable_bytes)}" if budget.usable_bytes < budget.free_bytes else ""
    text = f"budget {format_bytes(budget.free_bytes)}{less}"
    return lines, f'<span class="label limit" style="bottom:{100 * budget.free_bytes / axis.top:.1f}%">{text}</span>'


# What both pictures need


@dataclass(frozen=True)
class _Axis:
    """Bytes upwards from 0: the top of the picture, and the lines with a label."""

    top: float
    ticks: tuple[tuple[float, str], ...]

    @classmethod
    def up_to(cls, nbytes: int) -> _Axis:
        top = max(nbytes, 1) * 1.1
        return cls(top, ticks(top))

    def y(self, nbytes: float) -> float:
        return 1000 * (1 - nbytes / self.top)

    def lines(self) -> str:
        places = (f"M0 {self.y(nbytes):.1f}H1000" for nbytes, _ in self.ticks)
        return f'<path class="grid" d="{"".join(places)}"/>'

    def labels(self) -> str:
        marks = (f'<span style="bottom:{100 * nbytes / self.top:.2f}%">{text}</span>' for nbytes, text in self.ticks)
        return f'<div class="y-axis" aria-hidden="true">{"".join(marks)}</div>'


def _label(x: float, y: float, text: str, kind: str) -> str:
    """Words next to a point, on the side with more room."""
    side = "left" if x > 0.5 else "right"
    return f'<span class="label {kind} {side}" style="left:{100 * x:.2f}%;bottom:{100 * y:.2f}%">{escape(text)}</span>'


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    return f'<ul class="legend">{"".join(f"<li>{key}{escape(text)}</li>" for key, text in entries)}</ul>'


# Live memory through the step


def timeline(shown: Timeline) -> str:
    """Live memory through the step, as a section of the page; empty if there is no timeline."""
    if not shown.parts:
        return ""
    totals, peak, count = shown.totals, shown.peak_column, shown.event_count
    axis = _Axis.up_to(max([*totals, *shown.reserved]))
    highest = format_bytes(totals[peak])
    legend = [(swatch(part), part_words(part)) for part in shown_parts(shown)]
    if shown.reserved:
        legend.append(('<i class="key line"></i>', "reserved by the allocator"))
    steps = len({span.step for span in shown.spans})
    many = {1: "one step", 2: "two steps"}.get(steps, f"{steps} steps")
    label = (
        f"Live bytes by part over {count} allocations and frees of {many}. The peak, {highest}, is in step "
        f"{shown.events[peak].step + 1}, {shown.events[peak].phase}."
    )
    grouped = f" Each column shows the highest moment of about {count / len(totals):.0f} events."
    order = f"{count} allocations and frees in order, not in time.{grouped if count > len(totals) else ''}"
    return f"""<section><h2>Live memory through {many}, batch size {shown.batch_size}</h2>
<p class="sub">From left to right: {order}</p>
<figure id="timeline"><div class="plot">{axis.labels()}<div class="area" tabindex="0" role="group"
aria-label="Timeline; left and right arrow keys show its values"><svg viewBox="0 0 {len(totals)} 1000"
preserveAspectRatio="none" role="img" aria-label="{escape(label)}">{_stack(shown, axis)}</svg>
{_label((peak + 0.5) / len(totals), totals[peak] / axis.top, f"peak {highest}", "peak")}
<span class="cursor" hidden></span></div>{_lanes(shown)}</div>{_legend(legend)}
<p class="readout" aria-live="polite">Point at the picture to see its values.</p></figure>{_phase_table(shown)}
<script type="application/json" id="timeline-data">{_script_data(shown)}</script></section>"""


def _stack(shown: Timeline, axis: _Axis) -> str:
    """The parts on top of each other, the borders of phases, and the reserved bytes."""
    columns, count = len(shown.positions), shown.event_count
    # Each part is drawn together with all below it, the whole stack first, so that it covers all but its own stripe.
    heights = [0] * columns
    layers: list[str] = []
    for part in shown_parts(shown):
        heights = [height + nbytes for height, nbytes in zip(heights, shown.parts[part], strict=True)]
        layers.insert(0, f'<path fill="{COLORS.get(part, _OTHER)}" d="M0 1000V{_step_path(heights, axis)}V1000Z"/>')
    borders = "".join(
        f"M{columns * span.first_event / count:.2f} 0V1000"
        for span in shown.spans[1:]
        if span.event_count > count / 60  # moving a batch is over in a moment
    )
    reserved = f'<path class="reserved" d="M0 {_step_path(shown.reserved, axis)}"/>' if shown.reserved else ""
    return f"""<g transform="scale({columns / 1000:.4f} 1)">{axis.lines()}</g>
<g class="stack">{"".join(layers)}</g><path class="border" d="{borders}"/>{reserved}"""


def _step_path(values: Sequence[int], axis: _Axis) -> str:
    """Steps one unit wide: a height, then right for each run of equal ones, and up or down to the next."""
    runs = [(height, len(list(run))) for height, run in groupby(f"{axis.y(value):.0f}" for value in values)]
    return "V".join(f"{height}h{length}" for height, length in runs)


def _lanes(shown: Timeline) -> str:
    """Draw a lane of phases under the picture, and one of steps below it; a name without room is not shown."""
    phases = "".join(_cell(part_words(span.phase), [span], shown) for span in shown.spans)
    by_step = groupby(shown.spans, key=lambda span: span.step)
    steps = "".join(_cell(f"step {step + 1}", list(spans), shown) for step, spans in by_step)
    return f"""<div class="lanes" aria-hidden="true"><div class="lane phase">{phases}</div>\
<div class="lane step">{steps}</div></div>"""


def _cell(name: str, spans: Sequence[PhaseSpan], shown: Timeline) -> str:
    width = sum(span.event_count for span in spans) / shown.event_count
    if width < 0.003:  # narrower than the gap between two
        return ""
    place = f"left:{100 * spans[0].first_event / shown.event_count:.2f}%;width:{100 * width:.2f}%"
    return f'<div class="cell" style="{place}" title="{escape(name)}"><span>{escape(name)}</span></div>'


def _phase_table(shown: Timeline) -> str:
    counts: Counter[str] = Counter()
    peaks: dict[str, int] = {}
    for span in shown.spans:
        name = f"step {span.step + 1}, {escape(part_words(span.phase))}"
        counts[name] += span.event_count
        peaks[name] = max(peaks.get(name, 0), span.peak_bytes)
    rows = "".join(row(name, counts[name], format_bytes(peak)) for name, peak in peaks.items())
    return _as_table(("Phase", "Allocations and frees", "Peak"), rows)


def _script_data(shown: Timeline) -> str:
    """Return the script's data as JSON, with each name once; ``<`` is escaped so that no name can end the script."""
    places, place_names = _numbered([" ".join(filter(None, (e.module, e.operator))) for e in shown.events])
    phases, phase_names = _numbered([f"step {e.step + 1}, {part_words(e.phase)}" for e in shown.events])
    content = {
        "count": shown.event_count,
        "events": shown.positions,
        "parts": {part_words(part): shown.parts[part] for part in shown_parts(shown)},
        "reserved": shown.reserved,
        "phases": phases,
        "phase_names": phase_names,
        "places": places,
        "place_names": place_names,
    }
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


def _numbered(words: Sequence[str]) -> tuple[list[int], list[str]]:
    number = {word: index for index, word in enumerate(dict.fromkeys(words))}
    return [number[word] for word in words], list(number)
