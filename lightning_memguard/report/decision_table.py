"""The table at setup and the line at the end: Decision and records -> text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.box import HEAVY_HEAD, Box
from rich.table import Table

from lightning_memguard.core.decision.decision import Budget, Decision, batch_sizes, part_words, prediction_of
from lightning_memguard.core.decision.record import EpochRecord
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.report.words import (
    at_size,
    duration,
    measured_words,
    peak_range,
    peak_words,
    size_of,
    step_words,
)
from lightning_memguard.units import counted, format_bytes, signed

Row = tuple[str, str, str]
"""A part or a total, its size, its share; mypy names what a further column changes, except the rule of `markdown`."""

_METHODS = {
    "compiled": "traced on fake tensors as torch.compile compiles it, no memory allocated",
    "fake": "traced on fake tensors, no memory allocated",
    "worst-case": "traced on fake tensors; sizes that depend on values are assumed to be the largest possible",
    "sampled": "traced on fake tensors; sizes that depend on values are those of real batches",
    "valued": "traced on fake tensors that know the values of real batches, and of random numbers",
    "answered": "traced on fake tensors; what the step reads of them is read in real steps, run on a copy",
    "real": "from real steps, run on a copy",
    "cut": "From part of a step, as time was up: it needs more than this",
    "states": "Without activations, which are unknown: the step needs more than this",
}


def new_table(title: str, *columns: str, box: Box = HEAVY_HEAD, pad_edge: bool = True, no_wrap: bool = False) -> Table:
    """A table with ``columns`` of these headings; ``>`` in front right-aligns one, ``no_wrap`` applies to these."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box, pad_edge=pad_edge)
    for column in columns:
        right = column.startswith(">")
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(column.removeprefix(">"), justify=justify, overflow="fold", no_wrap=right and no_wrap)
    return table


def setup_text(
    decision: Decision, kind: str = "training", *, explain: bool = True, most_parts: int | None = None
) -> str:
    """Write what was predicted, and why this batch size, as Lightning's `ModelSummary` writes its table.

    Args:
        decision: what was predicted and chosen.
        kind: what runs, if the phase of the peak does not say so.
        explain: False to leave out why this batch size, if a warning says it.
        most_parts: lines for parts and notes together, at most; the smallest parts share one, and of the notes the
            first is shown. None for all.
    """
    footprint, budget = prediction_of(decision)
    totals, notes = _total_lines(decision, footprint, budget, kind), [f"Note: {note}." for note in decision.notes]
    if most_parts is not None and len(notes) > 1:
        notes = [f"{notes[0]} More in `guard.decision.notes`."]
    rows = [
        _heading(decision, footprint),
        *_part_rows(footprint, None if most_parts is None else most_parts - len(notes)),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"  | {name:<{widths[0]}} | {size:>{widths[1]}} | {share:>{widths[2]}}" for name, size, share in rows]
    rule, chosen = "-" * max(map(len, lines)), [f"MemGuard: {decision.reason}"] if explain else []
    return "\n".join([lines[0], rule, *lines[1:], rule, *totals, *chosen, *notes])


def evaluation_text(decision: Decision, kind: str) -> str:
    """Write in one line whether a validation, test or prediction fits, and its batch size."""
    kind = {"validate": "validation", "predict": "prediction"}.get(kind, kind)
    return f"MemGuard: in {kind}, {decision.reason}"


def _total_lines(decision: Decision, footprint: Footprint, budget: Budget, kind: str) -> list[str]:
    peak, most, how = footprint.peak_device_bytes, footprint.most_shown_bytes, _METHODS[footprint.method]
    words = how
    if not footprint.is_partial:
        at_most = f" (at most {format_bytes(most)})" if most > peak else ""
        in_copy = "" if footprint.method in ("fake", "compiled") else f"; {how}"
        step = "" if footprint.phase in ("checkpoint", "collate") else " step"
        learned = f"; from {footprint.learned_from}" if footprint.learned_from else ""
        words = f"Peak of {_kind(footprint, kind)}{step}{at_most}, in the {peak_words(footprint)}{in_copy}{learned}"
    if peak != footprint.peak_allocated_bytes:
        allocated, reserved = map(format_bytes, (footprint.peak_allocated_bytes, footprint.peak_reserved_bytes))
        outside = format_bytes(footprint.outside_bytes)
        words += f": allocated {allocated}, reserved {reserved}, context and libraries {outside}"
    offer = f"{format_bytes(budget.free_bytes)} on {budget.device} ({budget.source})"
    usable = f"Usable of {offer}, after a {budget.margin_share:.0%} margin"
    lines = [(peak, words), (budget.usable_bytes, usable), *_host_lines(decision)]
    shown = [(format_bytes(nbytes), words) for nbytes, words in lines]
    if footprint.step_seconds and not footprint.is_evaluation:
        seconds = footprint.step_seconds
        shown.append((duration(seconds.likely), f"An optimizer step, likely ({step_words(footprint)})"))
    width = max(len(size) for size, _ in shown)
    return [f"{size:<{width}}  {words}" for size, words in shown]


def _host_lines(decision: Decision) -> list[tuple[int, str]]:
    """Bytes and words of what the run takes of the host, if it is worth a line."""
    uses = decision.host.uses if decision.host else ()
    tight = [(nbytes, of) for nbytes, of in uses if nbytes > _WORTH_A_LINE * of.free_bytes]
    return [(nbytes, f"At most on {of.device}, which has {format_bytes(of.free_bytes)} free") for nbytes, of in tight]


_WORTH_A_LINE = 0.1


def _kind(footprint: Footprint, kind: str) -> str:
    kind = footprint.phase if footprint.is_evaluation else kind
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _heading(decision: Decision, footprint: Footprint) -> Row:
    part = "Part that is known" if footprint.is_partial else "Part at the peak"
    sizes = batch_sizes(decision, footprint.batch_size)
    return part, f"Predicted {at_size(footprint) if footprint.batch else f'at batch size {sizes}'}", "Share"


def _part_rows(footprint: Footprint, most: int | None = None) -> list[Row]:
    """Return the parts that take memory; if they are more than ``most``, the smallest together."""
    parts = {part_words(part): nbytes for part, nbytes in footprint.parts.items() if nbytes}
    if most is not None and len(parts) > most:
        small = sorted(parts, key=parts.__getitem__)[: len(parts) - most + 1]
        parts["other parts"] = sum(parts.pop(name) for name in small)
    whole = footprint.peak_allocated_bytes
    return [(name, format_bytes(nbytes), f"{nbytes / whole:.0%}") for name, nbytes in parts.items()]


def _total_rows(decision: Decision, footprint: Footprint, budget: Budget) -> list[Row]:
    (name, allocated), *others = totals_of(decision, footprint, budget)
    return [(name, format_bytes(allocated), "100%"), *((name, format_bytes(nbytes), "") for name, nbytes in others)]


def totals_of(decision: Decision, footprint: Footprint, budget: Budget) -> list[tuple[str, int]]:
    """Return the totals on the device and the device's offer, in bytes under their names."""
    totals = peaks_of(footprint)
    totals.append((f"Budget on {budget.device} ({budget.source})", budget.free_bytes))
    totals.append((f"Usable after {budget.margin_share:.0%} margin", budget.usable_bytes))
    return [*totals, *((words, nbytes) for nbytes, words in _host_lines(decision))]


def peaks_of(footprint: Footprint) -> list[tuple[str, int]]:
    """Return the totals on the device, in bytes under their names."""
    least = ", at least" if footprint.is_partial else ""
    totals = [(f"Peak allocated{least}", footprint.peak_allocated_bytes)]
    if footprint.peak_device_bytes != footprint.peak_allocated_bytes:
        totals.append((f"Peak reserved{least}", footprint.peak_reserved_bytes))
        totals.append(("Context and libraries", footprint.outside_bytes))
        totals.append((f"Total on device{least}", footprint.peak_device_bytes))
    most = footprint.most_shown_bytes  # what is compared with the budget
    if most > footprint.peak_device_bytes and not footprint.is_partial:
        totals.append(("Total on device, at most", most))
    return totals


def setup_rows(decision: Decision) -> tuple[Row, list[Row]]:
    """The table and the sentences under it as rows of text, under their heading, for loggers that show tables."""
    footprint, budget = prediction_of(decision)
    sentences = [("Peak", method_words(footprint), ""), ("Batch size", sentence(decision), "")]
    notes = [("Note", f"{note}.", "") for note in decision.notes]
    return _heading(decision, footprint), [
        *_part_rows(footprint),
        *_total_rows(decision, footprint, budget),
        *sentences,
        *notes,
    ]


def markdown(decision: Decision) -> str:
    """Return the table of `setup_text`, as Markdown."""
    footprint, budget = prediction_of(decision)
    lines = [
        _markdown_row(_heading(decision, footprint)),
        "| :--- | ---: | ---: |",
        *map(_markdown_row, _part_rows(footprint)),
        *(
            _markdown_row(f"**{cell}**" if cell else "" for cell in row)
            for row in _total_rows(decision, footprint, budget)
        ),
    ]
    # The most important line comes first: viewers such as TensorBoard's show ten lines of a text.
    above = [f"### MemGuard: memory of {_kind(footprint, 'training')} step", _escaped(sentence(decision))]
    below = map(_escaped, (method_words(footprint), *(f"Note: {note}." for note in decision.notes)))
    return "\n\n".join([*above, "\n".join(lines), *below]) + "\n"


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _escaped(text: str) -> str:
    """Names such as ``__init__`` stay as they are written; what is in backticks needs no care."""
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([\\*_<\[|])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


def sentence(decision: Decision) -> str:
    """Return the decision's sentence with a capital, for a place of its own."""
    return decision.reason[:1].upper() + decision.reason[1:]


def method_words(footprint: Footprint) -> str:
    """Say where the peak is and how it was obtained; of a partial prediction, what is missing."""
    if footprint.is_partial:
        return f"{_METHODS[footprint.method]}."
    learned = f"; corrected from {footprint.learned_from}" if footprint.learned_from else ""
    peak = f"Peak in the {peak_words(footprint)}; {_METHODS[footprint.method]}{learned}."
    seconds = None if footprint.is_evaluation else footprint.step_seconds
    time = f" A step likely takes {duration(seconds.likely)} ({step_words(footprint)})." if seconds else ""
    return peak + time


def warning_of(decision: Decision) -> str:
    """Return the warning for a user to act on: MemGuard did not do as asked, or the step may not fit. Else empty."""
    footprint, budget = decision.footprint, decision.budget
    if footprint is None or budget is None:
        return f"MemGuard did not tune this run: {decision.because.rstrip('.')}."
    if decision.verdict == "does not fit" and decision.host and decision.host.overrun:
        return decision.reason
    if decision.verdict == "does not fit":
        others = "bf16-mixed precision or activation checkpointing"
        remedy = f" Lower {size_of(footprint)}, or use {others}." if footprint.batch else ""
        saved, states = footprint.parts.get("checkpoint", 0), footprint.parts["optimizer_state"]
        if saved > footprint.parts["parameters"] + footprint.parts["buffers"]:
            less = format_bytes(states)
            remedy = f" ModelCheckpoint(save_weights_only=True) needs {less} less." if states else ""
        return (
            f"{decision.reason} The run is predicted to need {peak_range(footprint)}; {budget.device} offers "
            f"{format_bytes(budget.usable_bytes)} after the margin ({budget.source}).{remedy}"
        )
    return decision.reason if decision.because and decision.outcome != "checked" else ""


def last_line(records: Sequence[EpochRecord], *, stayed_bytes: int = 0) -> str:
    """One line for the end of a fit: predicted versus measured.

    ``stayed_bytes`` is how much more the run holds between two steps at its end than after its first step.
    """
    worst = max(records, key=lambda record: record.measured.taken_bytes)
    footprint, measured = worst.compared, worst.measured
    size, most = format_bytes(footprint.peak_device_bytes), format_bytes(footprint.most_shown_bytes)
    at_most = f" (at most {most})" if most != size else ""  # which the decision's line compares with the budget
    partial = {"cut": (f"at least {size}", ""), "states": (f"{size} without activations", " with them")}
    alone = "reserved " if footprint.outside_bytes < worst.predicted.outside_bytes else ""  # next to other processes
    predicted, with_them = partial.get(footprint.method, (f"a {alone}peak of {size}{at_most}", ""))
    offloaded = sum(record.offloaded for record in records)
    more = f", {counted(offloaded, 'step')} with activations on the host" if offloaded else ""
    size = f"batch size {batch_sizes(worst, worst.batch_size)}"
    emptied = sum(record.measured.alloc_retries or 0 for record in records)
    if emptied:
        more += f", the allocator's cache emptied {counted(emptied, 'time')} to make room: a smaller batch is faster"
    run = f"{f'largest batch {footprint.batch}' if footprint.batch else size}, {counted(len(records), 'epoch')}{more}."
    if not measured.peak_bytes:
        return f"MemGuard: predicted {predicted}; no measurement ({measured.source}); {run}"
    too_small = "" if worst.has_error else ", too small to compare"
    error = with_them if footprint.is_partial else too_small or f": {signed(worst.error_ratio)}"
    seconds, expected = measured.step_seconds, footprint.step_seconds
    if seconds:
        run = f"{duration(seconds)} a step{f', predicted {duration(expected.likely)}' if expected else ''}; {run}"
    over = f", {format_bytes(-worst.headroom_bytes)} over budget" if worst.headroom_bytes < 0 else ""
    peak = f"measured {measured_words(measured)}"
    missing, why = measured.peak_bytes - footprint.highest.device_bytes, ""
    if worst.has_error and 2 * stayed_bytes > missing > _WORTH_EXPLAINING * measured.peak_bytes:
        stayed = format_bytes(min(stayed_bytes, measured.peak_bytes - footprint.peak_device_bytes))
        why = f", of which up to {stayed} came after the first step and stayed (data or results that are kept)"
    return f"MemGuard: predicted {predicted}, {peak}{error}{why}{over}; {run}"


_WORTH_EXPLAINING = 0.1  # of a peak, above all that was predicted
