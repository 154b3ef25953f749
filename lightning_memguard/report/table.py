"""The table at setup and the line at the end: Decision and records -> text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from lightning_memguard.core.decision.decision import Budget, Decision
from lightning_memguard.core.decision.record import EpochRecord
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.units import format_bytes

Row = tuple[str, str, str]
"""A part, or what all of them come to; its size; its share."""

_METHODS = {
    "fake": "a traced step, no memory taken",
    "worst-case": "a traced step; where its size depends on values, the largest",
    "real": "a real step at small sizes, on a copy",
    "states": "parameters, gradients and optimizer state alone; activations are missing",
}


def print_decision(decision: Decision, console: Console | None = None, kind: str = "training") -> None:
    """Print what was predicted, how much, and why this batch size.

    Args:
        decision: what was predicted and chosen.
        console: where (default: the terminal).
        kind: what runs, where its phase does not say so.
    """
    console = console or Console(highlight=False)
    if decision.footprint is None or decision.budget is None:
        console.print(f"MemGuard stepped aside: {decision.reason}", markup=False)
        return
    console.print(_table(decision.footprint, decision.budget, kind))
    console.print(_peak(decision.footprint), markup=False)
    console.print(why(decision), markup=False)
    for note in decision.footprint.notes:
        console.print(f"Note: {note}.", markup=False)


def _title(footprint: Footprint, kind: str) -> str:
    kind = footprint.phase if footprint.is_evaluation else kind
    return f"MemGuard: memory of {'an' if kind[0] in 'aeiou' else 'a'} {kind} step"


def _table(footprint: Footprint, budget: Budget, kind: str) -> Table:
    table = Table(title=_title(footprint, kind), title_justify="left", title_style="bold")
    part, *figures = _heading(footprint)
    table.add_column(part)
    for figure in figures:
        table.add_column(figure, justify="right")
    for row in _part_rows(footprint):
        table.add_row(*row)
    table.add_section()
    for row in _total_rows(footprint, budget):
        table.add_row(*row)
    return table


def _heading(footprint: Footprint) -> Row:
    return "Part at the peak", f"Predicted at batch size {footprint.batch_size}", "Share"


def _part_rows(footprint: Footprint) -> list[Row]:
    return [
        (part.replace("_", " "), format_bytes(nbytes), f"{nbytes / footprint.peak_allocated_bytes:.0%}")
        for part, nbytes in footprint.parts.items()
        if nbytes
    ]


def _total_rows(footprint: Footprint, budget: Budget) -> list[Row]:
    totals = totals_of(footprint, budget)
    return [(name, format_bytes(nbytes), "100%" if name == totals[0][0] else "") for name, nbytes in totals]


def totals_of(footprint: Footprint, budget: Budget) -> list[tuple[str, int]]:
    """What the parts come to on the device, and what there is of it, in bytes under their names."""
    totals = [("Peak of tensors", footprint.peak_allocated_bytes)]
    if footprint.peak_device_bytes != footprint.peak_allocated_bytes:
        totals.append(("Reserved by the allocator", footprint.peak_reserved_bytes))
        totals.append(("Context and libraries", footprint.outside_bytes))
        totals.append(("On the device, all in all", footprint.peak_device_bytes))
    if footprint.most_device_bytes > footprint.peak_device_bytes:  # what is held against the budget
        totals.append(("On the device at most", footprint.most_device_bytes))
    totals.append((f"Budget on {budget.device} ({budget.source})", budget.free_bytes))
    totals.append((f"Usable after a margin of {budget.margin_share:.0%}", budget.usable_bytes))
    return totals


def setup_rows(decision: Decision) -> tuple[Row, list[Row]]:
    """The table and the sentences under it as rows of text, under their heading, for loggers that show tables."""
    footprint, budget = decision.footprint, decision.budget
    if footprint is None or budget is None:
        return ("", "MemGuard stepped aside", ""), [("Why", decision.reason, "")]
    sentences = [("Peak", _peak(footprint), ""), ("Batch size", why(decision), "")]
    notes = [("Note", f"{note}.", "") for note in footprint.notes]
    return _heading(footprint), [*_part_rows(footprint), *_total_rows(footprint, budget), *sentences, *notes]


def markdown(decision: Decision, kind: str = "training") -> str:
    """What `print_decision` prints, as Markdown.

    Args:
        decision: what was predicted and chosen.
        kind: what runs, where its phase does not say so.
    """
    footprint, budget = decision.footprint, decision.budget
    if footprint is None or budget is None:
        return f"### MemGuard stepped aside\n\n{_escaped(decision.reason)}\n"
    lines = [
        _markdown_row(_heading(footprint)),
        "| :--- | ---: | ---: |",
        *map(_markdown_row, _part_rows(footprint)),
        *(_markdown_row([f"**{cell}**" if cell else "" for cell in row]) for row in _total_rows(footprint, budget)),
    ]
    title = f"### {_title(footprint, kind)}"
    below = [_peak(footprint), *(f"Note: {note}." for note in footprint.notes)]
    # What matters most stands on top: viewers such as TensorBoard's show ten lines of a text.
    return "\n\n".join([title, _escaped(why(decision)), "\n".join(lines), *map(_escaped, below)]) + "\n"


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _escaped(text: str) -> str:
    """Names such as ``__init__`` stay as they are written; what stands in backticks needs no care."""
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([\\*_<\[|])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


def _peak(footprint: Footprint) -> str:
    """Where the peak stands, and how that is known."""
    place = f"{footprint.phase} pass" if footprint.phase in ("forward", "backward") else footprint.phase
    module = f" of {footprint.module}" if footprint.module else ""
    return f"Peak in the {place}{module}; {_METHODS[footprint.method]}."


def why(decision: Decision) -> str:
    """One sentence: the batch size, and what set it."""
    reason = decision.reason.rstrip(".")
    if decision.footprint is None or decision.budget is None:
        return f"Batch size left as it is: {reason}."
    size, asked = decision.batch_size, decision.requested_batch_size
    change = f"Batch size {size} (was {asked})" if size != asked else f"Batch size {size}, as asked"
    if decision.outcome == "tuned" and reason:
        return f"{change}: {reason}."
    if decision.outcome == "checked" or reason:
        fits = "fits" if decision.fits else "does NOT fit"
        return f"Batch size {size} {fits}" + (f"; it stays because {reason}." if reason else ".")
    many = decision.multiple_of
    reasons = {
        "memory": "the largest that fits" if many == 1 else f"the largest multiple of {many} that fits",
        "dataset": "as large as the dataset allows; memory would allow more",
        "max_batch_size": "max_batch_size; memory would allow more",
        "request": "it keeps the effective batch size",
        "checkpoint": "the checkpoint was trained at it, and it fits",
    }
    accumulate = decision.accumulate_grad_batches
    return f"{change}: {reasons[decision.limited_by]}" + (
        f", with {accumulate} batches accumulated." if accumulate > 1 else "."
    )


def last_line(records: Sequence[EpochRecord]) -> str:
    """One line for the end of a fit: predicted against measured."""
    worst = max(records, key=lambda record: record.measured.peak_bytes)
    predicted = f"MemGuard: predicted {format_bytes(worst.predicted.peak_device_bytes)}"
    epochs = f"batch size {worst.batch_size}, {len(records)} epoch{'s' if len(records) != 1 else ''}."
    if not worst.measured.peak_bytes:
        return f"{predicted}; nothing could be measured ({worst.measured.source}); {epochs}"
    measured = f"measured {format_bytes(worst.measured.peak_bytes)} at most ({worst.measured.source})"
    over = f", {format_bytes(-worst.headroom_bytes)} over the budget" if worst.headroom_bytes < 0 else ""
    return f"{predicted}, {measured}, {worst.error_ratio:+.1%}{over}; {epochs}"
