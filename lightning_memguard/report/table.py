"""The table at setup and the line at the end: Decision and records -> text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from lightning_memguard.core.decision import Budget, Decision
from lightning_memguard.core.footprint import Footprint
from lightning_memguard.core.record import EpochRecord
from lightning_memguard.units import format_bytes

_METHODS = {
    "fake": "a traced step, no memory taken",
    "worst-case": "a traced step; where its size depends on values, the largest",
    "real": "a real step at small sizes, on a copy",
    "states": "parameters, gradients and optimizer state alone; activations are missing",
}


def print_decision(decision: Decision, console: Console | None = None) -> None:
    """Print what was predicted, how much, and why this batch size."""
    console = console or Console(highlight=False)
    if decision.footprint is None or decision.budget is None:
        console.print(f"MemGuard stepped aside: {decision.reason}", markup=False)
        return
    console.print(_table(decision.footprint, decision.budget))
    console.print(_peak(decision.footprint), markup=False)
    console.print(why(decision), markup=False)
    for note in decision.footprint.notes:
        console.print(f"Note: {note}.", markup=False)


def _table(footprint: Footprint, budget: Budget) -> Table:
    kind = footprint.phase if footprint.phase in ("validation", "test", "prediction") else "training"
    table = Table(title=f"MemGuard: memory of a {kind} step", title_justify="left", title_style="bold")
    table.add_column("Part at the peak")
    table.add_column(f"Predicted at batch size {footprint.batch_size}", justify="right")
    table.add_column("Share", justify="right")
    for part, nbytes in footprint.parts.items():
        if nbytes:
            table.add_row(
                part.replace("_", " "), format_bytes(nbytes), f"{nbytes / footprint.peak_allocated_bytes:.0%}"
            )
    table.add_section()
    table.add_row("Peak of tensors", format_bytes(footprint.peak_allocated_bytes), "100%")
    if footprint.peak_device_bytes != footprint.peak_allocated_bytes:
        table.add_row("Reserved by the allocator", format_bytes(footprint.peak_reserved_bytes), "")
        table.add_row("On the device, all in all", format_bytes(footprint.peak_device_bytes), "")
    if footprint.most_device_bytes > footprint.peak_device_bytes:  # what is held against the budget
        table.add_row("On the device at most", format_bytes(footprint.most_device_bytes), "")
    table.add_row(f"Budget on {budget.device} ({budget.source})", format_bytes(budget.free_bytes), "")
    share = budget.margin_bytes / budget.free_bytes if budget.free_bytes else 0
    table.add_row(f"Usable after a margin of {share:.0%}", format_bytes(budget.usable_bytes), "")
    return table


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
