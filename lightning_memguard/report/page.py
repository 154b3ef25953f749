"""Report -> a page to look at, ``memguard_report.html``, and next to it all of its data, ``memguard_report.json``.

An evaluation's are named after its stage, such as ``memguard_report_test.html``.

The page is complete in itself: it loads nothing, and it works without scripts, which only read out the timeline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_memguard.core.decision.decision import Budget, Decision, batch_sizes, part_words
from lightning_memguard.core.decision.record import EpochRecord
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.shown import Shown
from lightning_memguard.errors import MemGuardError
from lightning_memguard.report import charts
from lightning_memguard.report.decision_table import method_words, peaks_of, sentence, totals_of
from lightning_memguard.report.page_data import CurvePoint, Report, report_data
from lightning_memguard.report.words import COLORS, byte_range, peak_words, with_stage
from lightning_memguard.units import format_bytes, format_count, signed

if TYPE_CHECKING:
    from lightning_memguard.core.layers.layers import Layer, LayerTable

PAGE_NAME = "memguard_report.html"
DATA_NAME = "memguard_report.json"

_EPOCHS_SHOWN = 24
_LAYERS_SHOWN = 400
_LAYERS_AT_ONCE = 40  # more are scrolled


def write_report(directory: str | os.PathLike[str], report: Report, stage: str = "fit") -> tuple[Path, Path]:
    """Write the page and its data; those of an earlier call for this stage are replaced.

    Args:
        directory: where; created if it does not exist.
        report: what to show.
        stage: what runs; any but ``"fit"`` is part of the files' names.

    Returns:
        Paths of the page and of the data.

    Raises:
        MemGuardError: the directory cannot be created or written to.
    """
    folder = Path(directory)
    page_name, data_name = with_stage(PAGE_NAME, stage), with_stage(DATA_NAME, stage)
    data = json.dumps(report_data(report), indent=1, allow_nan=False)
    contents = {page_name: page(report, data_name), data_name: data}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            unfinished = folder / f".{name}.{os.getpid()}"
            unfinished.write_text(content, encoding="utf-8")
            unfinished.replace(folder / name)  # so that no reader ever gets half of it
    except OSError as error:
        raise MemGuardError(
            f"The report cannot be written to {folder} ({error.strerror or error}); give a directory that you may "
            "write to."
        ) from error
    return folder / page_name, folder / data_name


def page(report: Report, data_name: str = DATA_NAME) -> str:
    """The page as HTML, with a link to its data."""
    sections = [_decision(report.decision, report.curve)]
    sections += [charts.timeline(report.timeline), _epochs(report.records), _layers(report.layers)]
    return _asset("page.html").format(
        title=escape(report.title),
        style=_asset("page.css"),
        body="\n".join(filter(None, sections)),
        data=data_name,
        script="\n" + _asset("page.js") if report.timeline.parts else "",
    )


def _asset(name: str) -> str:
    return (files("lightning_memguard.report") / "assets" / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Page:
    """The page of a run; a notebook shows it in place.

    Attributes:
        path: the file.
    """

    path: Path

    def _repr_html_(self) -> str:
        content = escape(self.path.read_text("utf-8"))
        return f'<iframe srcdoc="{content}" style="width: 100%; height: 46rem; border: 0"></iframe>'


def html_of(*records: Decision | Footprint | LayerTable) -> str:
    """Return the page's parts for records, with a style that holds within them, for a notebook."""
    style = _asset("page.css").replace(":root", "&").replace("body {", "& {") + "& > * + * { margin-top: 1rem; }"
    return f'<style>.memguard {{ {style} }}</style><div class="memguard">{"".join(map(_part_of, records))}</div>'


Shown.html_of = html_of


def _part_of(record: Decision | Footprint | LayerTable) -> str:
    if isinstance(record, Decision):
        return _decision(record)
    return _setup(record, peaks_of(record)) if isinstance(record, Footprint) else _layers(record)


def _decision(decision: Decision, points: Sequence[CurvePoint] = ()) -> str:
    footprint, budget = decision.footprint, decision.budget
    if footprint is None or budget is None:
        reason = escape(decision.reason or "nothing was predicted")
        return f'<p class="lead">MemGuard did not tune this run: {reason}.</p>'
    setup = _setup(footprint, totals_of(decision, footprint, budget))
    curve = charts.curve(points, decision, footprint, budget)
    return f'{_headline(decision, footprint, budget)}\n<div class="pair">{setup}{curve}</div>'


def _headline(decision: Decision, footprint: Footprint, budget: Budget) -> str:
    usable = budget.usable_bytes
    likely, most_share = (
        f"{nbytes / usable:.1%}" if usable > 0 else "none"
        for nbytes in (footprint.peak_device_bytes, footprint.most_shown_bytes)
    )
    asked, accumulated = decision.requested_batch_size, decision.accumulate_grad_batches
    size = f"was {batch_sizes(decision, asked)}" if asked != decision.batch_size else "as requested"
    most = f"on {footprint.device}"
    if footprint.is_partial:
        most = f"at least: {'time was up' if footprint.method == 'cut' else 'its activations are unknown'}"
    elif footprint.most_shown_bytes > footprint.peak_device_bytes:
        most = f"at most {format_bytes(footprint.most_shown_bytes)}"
    fits = {"unknown": "unknown whether it fits", "fits": "fits", "does not fit": "does NOT fit"}[decision.verdict]
    bad = {"Share used"} if decision.verdict == "does not fit" else set()
    bound = f"at most {most_share}: " if most_share != likely and not footprint.is_partial else ""
    tiles = [
        (
            "Batch size",
            batch_sizes(decision, decision.batch_size),
            size + (f", {accumulated} accumulated" if accumulated > 1 else ""),
        ),
        ("Predicted peak", format_bytes(footprint.peak_device_bytes), most),
        ("Usable", format_bytes(usable), f"of {format_bytes(budget.free_bytes)} on {budget.device}"),
        ("Share used", likely, bound + fits),
    ]
    cells = "".join(
        f'<div class="tile{" bad" if name in bad else ""}"><dt>{escape(name)}</dt>'
        f"<dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in tiles
    )
    notes = "".join(f'<p class="note">Note: {escape(note)}.</p>' for note in decision.notes)
    return f'<p class="lead">{escape(sentence(decision))}</p><dl class="tiles">{cells}</dl>{notes}'


def _setup(footprint: Footprint, sums: Sequence[tuple[str, int]]) -> str:
    parts = [(part, footprint.parts[part]) for part in COLORS if footprint.parts.get(part)]
    rows = "".join(_part(part, nbytes, nbytes / footprint.peak_allocated_bytes) for part, nbytes in parts)
    totals = "".join(charts.row(escape(name), format_bytes(nbytes), "") for name, nbytes in sums)
    operator = f" ({_code(footprint.operator)})" if footprint.operator else ""
    heading = f"At the peak, batch size {footprint.batch_size}"
    where = f"In the {peak_words(replace(footprint, phase=escape(footprint.phase)), _code)}{operator}."
    if footprint.is_partial:
        heading, where = "What is known", method_words(footprint)
    caption = "Predicted bytes at the peak, by part, and the budget"
    table = charts.table(
        "setup", ("Part", "Predicted", "Share"), f'{rows}</tbody><tbody class="sums">{totals}', caption
    )
    return f'<section><h2>{heading}</h2><p class="sub">{where}</p>{table}</section>'


def _part(part: str, nbytes: int, share: float) -> str:
    percent = "&lt;1%" if 0 < share < 0.005 else f"{share:.0%}"
    meter = f"{_meter(share, COLORS[part])}<span>{percent}</span>"
    return charts.row(charts.swatch(part) + part_words(part), format_bytes(nbytes), meter)


def _code(name: str) -> str:
    return f"<code>{escape(name)}</code>"


def _meter(share: float, color: str, mark: float | None = None) -> str:
    """A bar; it only repeats the number next to it, so it is hidden from screen readers."""
    width = f"{100 * min(max(share, 0), 1):.1f}%"
    tick = "" if mark is None else f'<b style="left:{100 * min(max(mark, 0), 1):.1f}%"></b>'
    return f'<span class="bar" aria-hidden="true"><i style="width:{width};background:{color}"></i>{tick}</span>'


# Predicted versus measured


def _epochs(records: Sequence[EpochRecord]) -> str:
    if not records:
        return ""
    shown = list(records)
    omitted = ""
    if len(shown) > _EPOCHS_SHOWN:
        worst = max(shown, key=lambda record: abs(record.error_ratio) if record.has_error else -1)
        latest = shown[-_EPOCHS_SHOWN + 1 :]
        shown = latest if worst in latest else [worst, *latest]
        omitted = f" {len(shown)} of {len(records)} epochs: the latest, and the one with the largest error."
    longest = max(max(record.measured.peak_bytes, record.compared.peak_device_bytes) for record in shown)
    counts = {head: count for head, count in _COUNTS.items() if any(map(count, records))}
    rows = "".join(_epoch(record, longest * 1.05 or 1, [of(record) for of in counts.values()]) for record in shown)
    process = ["Process"] if any(record.measured.process_bytes for record in shown) else []
    heads = ("Epoch", "Batch size", "Predicted", "Measured", "Error", *process, "Headroom", *counts)
    heads += ('<span class="hidden">Measured, and predicted on it</span>',)
    after = shown[-1].expected_bytes
    narrowed = f" After the epochs before it, the last was expected to take {byte_range(*after)}." if after else ""
    alone = " Both without the context, as other processes hide it." if any(map(_is_alone, shown)) else ""
    sources = ", ".join(dict.fromkeys(escape(record.measured.source) for record in shown))
    return f"""<section><h2>Predicted versus measured</h2>
<p class="sub">Measured: {sources}.{alone} <span class="wide">The bar is the measured peak, the mark on it the predicted
one.</span> {narrowed}{omitted}</p>
<div class="scroll">{charts.table("epochs", heads, rows, "Predicted and measured peak by epoch")}</div></section>"""


def _is_alone(record: EpochRecord) -> bool:
    return record.measured.is_reserved and record.predicted.outside_bytes > 0


_COUNTS: dict[str, Callable[[EpochRecord], int]] = {  # shown if not all are zero
    "Offloaded steps": lambda record: record.offloaded,
    "Cache emptied": lambda record: record.measured.alloc_retries or 0,
}


def _epoch(record: EpochRecord, scale: float, counts: Sequence[int]) -> str:
    measured, predicted = record.measured.peak_bytes, record.compared.peak_device_bytes
    return charts.row(
        record.epoch,
        batch_sizes(record, record.batch_size),
        format_bytes(predicted),
        format_bytes(measured) if measured else "unknown",
        signed(record.error_ratio) if record.has_error else "",
        *([format_bytes(record.measured.process_bytes)] if record.measured.process_bytes else []),
        format_bytes(record.headroom_bytes),
        *counts,
        _meter(measured / scale, "var(--accent)", predicted / scale),
    )


# By layer


def _layers(table: LayerTable | None) -> str:
    if table is None or not table.layers:
        return ""
    layers = table.layers
    most = max(layer.activation_bytes for layer in layers) or 1
    rows = "".join(_layer(layer, most) for layer in layers[:_LAYERS_SHOWN])
    omitted = f" The first {_LAYERS_SHOWN} of {len(layers)}." if len(layers) > _LAYERS_SHOWN else ""
    heads = ("Layer", "Type", "Output", "Parameters", "Parameter bytes", "Saved for backward", "FLOPs, forward")
    scroll = "scroll tall" if len(layers) > _LAYERS_AT_ONCE else "scroll"
    return f"""<section><h2>By layer</h2><p class="sub">One forward pass at batch size {table.batch_size};
each row excludes its children.{omitted}</p>
<div class="{scroll}">{charts.table("layers", heads, rows)}</div></section>"""


def _layer(layer: Layer, most_bytes: int) -> str:
    name = layer.name.rpartition(".")[2] or "(the model)"
    shape = "x".join(map(str, layer.output_shape)) if layer.output_shape is not None else ""
    frozen = "" if layer.trainable_parameters == layer.parameters else " frozen"
    shared = f" as {layer.shared_with}" if layer.shared_with else ""
    kept = format_bytes(layer.activation_bytes) if layer.activation_bytes else ""
    bar = _meter(layer.activation_bytes / most_bytes, COLORS["activations"]) if kept else ""
    return (
        f'<tr><th scope="row" title="{escape(layer.name)}" style="padding-left:{layer.depth}em">{escape(name)}</th>'
        f"<td>{escape(layer.type)}{escape(shared)}</td><td>{escape(shape)}</td>"
        f"<td>{f'{layer.parameters:,}' if layer.parameters else ''}{frozen}</td>"
        f"<td>{format_bytes(layer.parameter_bytes) if layer.parameter_bytes else ''}</td>"
        f'<td class="kept">{bar}<span>{kept}</span></td>'
        f"<td>{format_count(layer.flops)}</td></tr>"
    )
