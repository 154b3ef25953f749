"""The table at setup and the line at the end: Decision and records -> text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.table import Table

from lightning_memguard.core.decision.decision import Budget, Decision
from lightning_memguard.core.decision.record import EpochRecord
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.report.words import counted, part_words, peak_words
from lightning_memguard.units import format_bytes

Row = tuple[str, str, str]
"""A part or a total, its size, its share."""

_METHODS = {
    "fake": "traced on fake tensors, no memory allocated",
    "worst-case": "traced on fake tensors; sizes that depend on values are assumed to be the largest possible",
    "real": "from real steps at small batch sizes, run on a copy",
    "states": "parameters, gradients and optimizer state only, without activations",
}


def new_table(title: str, *columns: str, box: Box = HEAVY_HEAD, pad_edge: bool = True, no_wrap: bool = False) -> Table:
    """A table with ``columns`` of these headings; ``>`` in front right-aligns one, ``no_wrap`` applies to these."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box, pad_edge=pad_edge)
    for column in columns:
        right = column.startswith(">")
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(column.removeprefix(">"), justify=justify, overflow="fold", no_wrap=right and no_wrap)
    return table


def print_decision(decision: Decision, console: Console | None = None, kind: str = "training") -> None:
    """Print what was predicted, and why this batch size.

    Args:
        decision: what was predicted and chosen.
        console: where (default: the terminal).
        kind: what runs, if the phase of the peak does not say so.
    """
    console = console or Console(highlight=False)
    footprint, budget = decision.footprint, decision.budget
    if footprint is None or budget is None:
        console.print(f"MemGuard did not tune this run: {decision.reason}", markup=False)
        return
    part, predicted, share = _heading(footprint)
    table = new_table(_title(footprint, kind), part, f">{predicted}", f">{share}")
    for row in _part_rows(footprint):
        table.add_row(*row)
    table.add_section()
    for row in _total_rows(footprint, budget):
        table.add_row(*row)
    console.print(table)
    for line in (_peak(footprint), why(decision), *_notes(footprint)):
        console.print(line, markup=False)


def _title(footprint: Footprint, kind: str) -> str:
    kind = footprint.phase if footprint.is_evaluation else kind
    return f"MemGuard: memory of {'an' if kind[0] in 'aeiou' else 'a'} {kind} step"


def _heading(footprint: Footprint) -> Row:
    return "Part at the peak", f"Predicted at batch size {footprint.batch_size}", "Share"


def _part_rows(footprint: Footprint) -> list[Row]:
    return [
        (part_words(part), format_bytes(nbytes), f"{nbytes / footprint.peak_allocated_bytes:.0%}")
        for part, nbytes in footprint.parts.items()
        if nbytes
    ]


def _total_rows(footprint: Footprint, budget: Budget) -> list[Row]:
    (name, allocated), *others = totals_of(footprint, budget)
    return [(name, format_bytes(allocated), "100%"), *((name, format_bytes(nbytes), "") for name, nbytes in others)]


def totals_of(footprint: Footprint, budget: Budget) -> list[tuple[str, int]]:
    """What the parts add up to on the device, and what the device offers, in bytes under their names."""
    totals = [("Peak allocated", footprint.peak_allocated_bytes)]
    if footprint.peak_device_bytes != footprint.peak_allocated_bytes:
        totals.append(("Peak reserved", footprint.peak_reserved_bytes))
        totals.append(("Context and libraries", footprint.outside_bytes))
        totals.append(("Total on device", footprint.peak_device_bytes))
    if footprint.most_device_bytes > footprint.peak_device_bytes:  # what is compared with the budget
        totals.append(("Total on device, at most", footprint.most_device_bytes))
    totals.append((f"Budget on {budget.device} ({budget.source})", budget.free_bytes))
    totals.append((f"Usable after {budget.margin_share:.0%} margin", budget.usable_bytes))
    return totals


def _notes(footprint: Footprint) -> list[str]:
    return [f"Note: {note}." for note in footprint.notes]


def setup_rows(decision: Decision) -> tuple[Row, list[Row]]:
    """The table and the sentences under it as rows of text, under their heading, for loggers that show tables."""
    footprint, budget = decision.footprint, decision.budget
    if footprint is None or budget is None:
        return ("", "MemGuard did not tune this run", ""), [("Why", decision.reason, "")]
    sentences = [("Peak", _peak(footprint), ""), ("Batch size", why(decision), "")]
    notes = [("Note", f"{note}.", "") for note in footprint.notes]
    return _heading(footprint), [*_part_rows(footprint), *_total_rows(footprint, budget), *sentences, *notes]


def markdown(decision: Decision, kind: str = "training") -> str:
    """What `print_decision` prints, as Markdown.

    Args:
        decision: what was predicted and chosen.
        kind: what runs, if the phase of the peak does not say so.
    """
    footprint, budget = decision.footprint, decision.budget
    if footprint is None or budget is None:
        return f"### MemGuard did not tune this run\n\n{_escaped(decision.reason)}\n"
    lines = [
        _markdown_row(_heading(footprint)),
        "| :--- | ---: | ---: |",
        *map(_markdown_row, _part_rows(footprint)),
        *(_markdown_row(f"**{cell}**" if cell else "" for cell in row) for row in _total_rows(footprint, budget)),
    ]
    # The most important line comes first: viewers such as TensorBoard's show ten lines of a text.
    above = [f"### {_title(footprint, kind)}", _escaped(why(decision))]
    below = map(_escaped, (_peak(footprint), *_notes(footprint)))
    return "\n\n".join([*above, "\n".join(lines), *below]) + "\n"


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _escaped(text: str) -> str:
    """Names such as ``__init__`` stay as they are written; what is in backticks needs no care."""
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([\\*_<\[|])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


def _peak(footprint: Footprint) -> str:
    return f"Peak in the {peak_words(footprint)}; {_METHODS[footprint.method]}."


def why(decision: Decision) -> str:
    """One sentence: the batch size, and what set it."""
    reason = decision.reason.rstrip(".")
    if decision.footprint is None or decision.budget is None:
        return f"Batch size unchanged: {reason}."
    size, asked = decision.batch_size, decision.requested_batch_size
    change = f"Batch size {size} (was {asked})" if size != asked else f"Batch size {size}, as requested"
    if decision.outcome == "tuned" and reason:
        return f"{change}: {reason}."
    if decision.outcome == "checked" or reason:
        fits = "fits" if decision.fits else "does NOT fit"
        return f"Batch size {size} {fits}" + (f"; unchanged because {reason}." if reason else ".")
    many = decision.multiple_of
    reasons = {
        "memory": "the largest that fits" if many == 1 else f"the largest multiple of {many} that fits",
        "dataset": "limited by the size of the dataset; memory would allow more",
        "max_batch_size": "limited by max_batch_size; memory would allow more",
        "request": "keeps the effective batch size",
        "checkpoint": "the one the checkpoint was trained with, and it fits",
    }
    batches = decision.accumulate_grad_batches
    accumulated = f", with gradients accumulated over {batches} batches" if batches > 1 else ""
    return f"{change}: {reasons[decision.limited_by]}{accumulated}."


def last_line(records: Sequence[EpochRecord]) -> str:
    """One line for the end of a fit: predicted versus measured."""
    worst = max(records, key=lambda record: record.measured.peak_bytes)
    predicted, measured = format_bytes(worst.predicted.peak_device_bytes), worst.measured
    run = f"batch size {worst.batch_size}, {counted(len(records), 'epoch')}."
    if not measured.peak_bytes:
        return f"MemGuard: predicted a peak of {predicted}; no measurement ({measured.source}); {run}"
    over = f", {format_bytes(-worst.headroom_bytes)} over budget" if worst.headroom_bytes < 0 else ""
    return (
        f"MemGuard: predicted a peak of {predicted}, measured {format_bytes(measured.peak_bytes)} "
        f"({measured.source}): {worst.error_ratio:+.1%}{over}; {run}"
    )
