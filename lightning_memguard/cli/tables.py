"""What the command line answers with: records -> tables for people, and plain data for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_memguard.core.decision.decision import Budget, Decision, without_rule_of_thumb
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.layers.textbook import ratio_to_peak
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.report.data import budget_data, footprint_data, layer_data
from lightning_memguard.report.table import print_decision
from lightning_memguard.units import format_bytes, format_count

if TYPE_CHECKING:
    from lightning_memguard.core.decision.advice import Advice
    from lightning_memguard.core.layers.layers import Layer, LayerTable
    from lightning_memguard.core.layers.textbook import TextbookSum, WeightMemory
    from lightning_memguard.training.planning.plan import Plan

# -- plan


def print_plan(plan: Plan, console: Console, kind: str = "training", *, advised: bool = False) -> None:
    """One device: the table by part, whether it fits, and the largest batch of a ``kind`` of step."""
    print_decision(plan.asked, console, kind)
    console.print(largest_words(plan, advised=advised), markup=False)


def print_plans(plans: Sequence[Plan], console: Console, *, advised: bool = False) -> None:
    """Several devices, a row each, and what had to be assumed."""
    size = plans[0].footprint.batch_size
    table = Table(
        title=f"MemGuard: batch size {size} on {len(plans)} devices", title_justify="left", title_style="bold"
    )
    table.add_column("Device", overflow="fold")
    for column in ("Memory", f"Predicted at {size}", "Share", "Fits", "Largest batch", "Predicted there"):
        table.add_column(column, justify="right")
    for plan in plans:
        table.add_row(
            plan.budget.device,
            format_bytes(plan.budget.total_bytes),
            _in_cell(plan.footprint),
            f"{plan.share:.0%}",
            "yes" if plan.fits else "NO",
            _largest(plan),
            _point(plan.largest),
        )
    console.print(table)
    share = plans[0].budget.margin_share
    console.print(f"Fits: the largest it may take is within the device's memory less a margin of {share:.0%}.")
    for reason in dict.fromkeys(plan.reason for plan in plans if plan.reason):
        console.print(f"No largest batch: {_told(reason, advised)}", markup=False)
    for note in dict.fromkeys(note for plan in plans for note in plan.footprint.notes):
        console.print(f"Note: {note}.", markup=False)


def largest_words(plan: Plan, *, advised: bool = False) -> str:
    """One sentence: the largest batch, and what sets it; better advice than a rule of thumb may follow."""
    if plan.largest is None or plan.largest.footprint is None:
        return f"No largest batch: {_told(plan.reason, advised)}"
    reasons = {
        "memory": "more does not fit",
        "dataset": "the dataset has no more; memory would allow it",
        "max_batch_size": "no more were asked about; memory would allow it",
    }
    why = reasons.get(plan.largest.limited_by, plan.largest.limited_by)
    return f"Largest batch: {plan.largest.batch_size}, which takes {_range(plan.largest.footprint)}; {why}."


def _told(reason: str, advised: bool) -> str:
    reason = without_rule_of_thumb(reason) if advised else reason
    return f"{reason.rstrip('.')}."


def _largest(plan: Plan) -> str:
    if plan.largest is None:
        return "none"
    return f"{plan.largest.batch_size}{'' if plan.largest.limited_by == 'memory' else '+'}"


def _point(decision: Decision | None) -> str:
    return format_bytes(decision.footprint.peak_device_bytes) if decision and decision.footprint else ""


def _in_cell(footprint: Footprint) -> str:
    """The same on two short lines: a terminal may be 80 wide."""
    point, more, spread = _range(footprint).partition(" (")
    return f"{point}\n{spread.removesuffix(')')}" if more else point


def _range(footprint: Footprint) -> str:
    point = format_bytes(footprint.peak_device_bytes)
    if footprint.low is None or footprint.high is None:
        return point
    low, high = format_bytes(footprint.low.device_bytes), format_bytes(footprint.high.device_bytes)
    if low == point == high:
        return point
    number, _, unit = low.partition(" ")
    return f"{point} ({number if high.endswith(f' {unit}') else low} to {high})"


def plan_data(plan: Plan) -> dict[str, Any]:
    """The same for programs."""
    return {
        "device": plan.budget.device,
        "fits": plan.fits,
        "share": round(plan.share, 6),
        "budget": budget_data(plan.budget),
        "asked": footprint_data(plan.footprint),
        "largest_batch_size": plan.largest.batch_size if plan.largest else None,
        "limited_by": plan.largest.limited_by if plan.largest else None,
        "largest": _footprint_of(plan.largest),
        "why_no_largest": plan.reason or None,
        "accumulate_grad_batches": plan.asked.accumulate_grad_batches,
        "seconds": round(plan.seconds, 3),
    }


def _footprint_of(decision: Decision | None) -> dict[str, Any] | None:
    return footprint_data(decision.footprint) if decision and decision.footprint else None


# -- advice


def print_advice(advice: Sequence[Advice], on: Plan, console: Console) -> None:
    """What would make it fit, or take less: the most saved first."""
    size, device = on.footprint.batch_size, on.budget.device
    if not advice:
        console.print(f"No remedy was found that takes less than {_range(on.footprint)} on {device}.", markup=False)
        return
    title = f"What would take less at batch size {size} on {device} (each predicted by a capture of its own)"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("Remedy", overflow="fold")
    for column in ("Predicted", "Saves", "Fits"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("Costs", overflow="fold")
    for each in advice:
        table.add_row(
            " + ".join(each.remedies),
            format_bytes(each.footprint.peak_device_bytes),
            format_bytes(each.saved_bytes),
            "yes" if each.fits else "NO",
            "; ".join(each.costs),
        )
    console.print(table)
    if not any(each.fits for each in advice):
        console.print(f"None of these makes it fit on {device}.", markup=False)
    console.print("How:")
    known = {name: how for each in advice for name, how in zip(each.remedies, each.how, strict=True)}
    for name, how in known.items():
        console.print(f"  {name}: {how}", soft_wrap=True)  # to be copied


def advice_data(each: Advice) -> dict[str, Any]:
    """One remedy for programs."""
    return {
        "remedies": list(each.remedies),
        "how": list(each.how),
        "costs": list(each.costs),
        "saved_bytes": each.saved_bytes,
        "fits": each.fits,
        "footprint": footprint_data(each.footprint),
    }


# -- layers


def print_layers(table: LayerTable, console: Console, depth: int | None = None) -> None:
    """The table by layer, and its totals. Rows deeper than ``depth`` are added up in the one above them."""
    title = f"MemGuard: layers at batch size {table.batch_size}"
    shown = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("Layer", overflow="fold")
    shown.add_column("Type", overflow="fold")
    for column in ("Output", "Parameters", "Trainable", "Weights", "Kept for\nbackward", "FLOPs", "Multiply-\nadds"):
        shown.add_column(column, justify="right", overflow="fold")
    for layer in table:
        if depth is None or layer.depth <= depth:
            shown.add_row(*_layer(layer, table.within(layer.name) if layer.depth == depth else None))
    shown.add_section()
    shown.add_row(
        "Total",
        "",
        "",
        f"{table.parameters:,}",
        f"{table.trainable_parameters:,}",
        format_bytes(table.parameter_bytes),
        format_bytes(table.activation_bytes),
        format_count(table.flops),
        format_count(table.multiply_adds),
    )
    console.print(shown)
    for note in table.notes:
        console.print(f"Note: {note}.", markup=False)


def _layer(layer: Layer, below: LayerTable | None) -> tuple[str, ...]:
    """A row; with all ``below`` it in it where those have no rows of their own."""
    output = "x".join(map(str, layer.output_shape)) if layer.output_shape else ""
    name = f"{'  ' * max(layer.depth - 1, 0)}{layer.name.rpartition('.')[2] or '(all)'}"
    if layer.shared_with:
        return name, layer.type, f"as {layer.shared_with}", "", "", "", "", "", ""
    counted = below or layer
    return (
        name,
        layer.type,
        output,
        f"{counted.parameters:,}" if counted.parameters else "",
        f"{counted.trainable_parameters:,}" if counted.parameters else "",
        format_bytes(counted.parameter_bytes) if counted.parameters else "",
        format_bytes(counted.activation_bytes) if counted.activation_bytes else "",
        format_count(counted.flops),
        format_count(counted.multiply_adds),
    )


def print_textbook(
    sums: Sequence[TextbookSum], training: Footprint, inference: Footprint | None, why_not: str, console: Console
) -> None:
    """The classical sums beside the traced peaks of a training step and of an inference."""
    table = Table(
        title=f"The textbook beside the trace, at batch size {training.batch_size}",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("Sum", overflow="fold")
    table.add_column("Formula", overflow="fold")
    table.add_column("Bytes", justify="right", no_wrap=True)
    table.add_column("Of the training peak", justify="right")
    traced = {"traced training step": training, **({"traced inference": inference} if inference else {})}
    rows = [
        *((each.name, each.formula, each.total_bytes) for each in sums),
        *((name, "", footprint.peak_allocated_bytes) for name, footprint in traced.items()),
    ]
    for name, formula, nbytes in rows:
        ratio = ratio_to_peak(training, nbytes)
        table.add_row(name, formula, format_bytes(nbytes), f"{ratio:.2f}", end_section=name == sums[-1].name)
    console.print(table)
    for each in sums:
        console.print(f"{each.name} takes for granted: {'; '.join(each.assumptions)}.", markup=False)
    if why_not:
        console.print(f"No inference was predicted: {why_not.rstrip('.')}.", markup=False)


def print_weights(memory: Iterable[WeightMemory], console: Console) -> None:
    """The weights at several types of number."""
    table = Table(title="Weights alone", title_justify="left", title_style="bold")
    for column in ("Type of number", "All", "Trainable"):
        table.add_column(column, justify="left" if column == "Type of number" else "right")
    for each in memory:
        table.add_row(each.element, format_bytes(each.total_bytes), format_bytes(each.trainable_bytes))
    console.print(table)


def layers_data(table: LayerTable, depth: int | None = None) -> dict[str, Any]:
    """The table by layer for programs."""
    return {
        "batch_size": table.batch_size,
        "parameters": table.parameters,
        "trainable_parameters": table.trainable_parameters,
        "parameter_bytes": table.parameter_bytes,
        "buffer_bytes": table.buffer_bytes,
        "activation_bytes": table.activation_bytes,
        "flops": table.flops,
        "multiply_adds": table.multiply_adds,
        "layers": [layer_data(layer) for layer in table if depth is None or layer.depth <= depth],
        "notes": list(table.notes),
    }


def sum_data(each: TextbookSum, training: Footprint) -> dict[str, Any]:
    """A classical sum for programs."""
    return {
        "name": each.name,
        "formula": each.formula,
        "terms": dict(each.terms),
        "total_bytes": each.total_bytes,
        "ratio_to_peak": ratio_to_peak(training, each.total_bytes),
        "assumptions": list(each.assumptions),
    }


# -- gpus and devices


def print_gpus(gpus: Iterable[Gpu], console: Console) -> None:
    """The catalogue, or part of it."""
    table = Table(title="GPUs to plan for", title_justify="left", title_style="bold")
    table.add_column("Name", overflow="fold")
    for column in ("Memory", "Compute capability", "Multiprocessors"):
        table.add_column(column, justify="right")
    table.add_column("Also called", overflow="fold")
    for gpu in gpus:
        capability = ".".join(map(str, gpu.compute_capability))
        table.add_row(
            gpu.name, format_bytes(gpu.memory_bytes), capability, str(gpu.multiprocessors), ", ".join(gpu.aliases)
        )
    console.print(table)


def gpu_data(gpu: Gpu) -> dict[str, Any]:
    """A GPU for programs."""
    return {
        "name": gpu.name,
        "memory_bytes": gpu.memory_bytes,
        "compute_capability": list(gpu.compute_capability),
        "multiprocessors": gpu.multiprocessors,
        "aliases": list(gpu.aliases),
    }


def print_budgets(budgets: Mapping[str, Budget | str], console: Console) -> None:
    """What the devices of this machine have, and who said so; text stands for one that could not tell."""
    table = Table(title="What this machine has", title_justify="left", title_style="bold")
    table.add_column("Device")
    table.add_column("Name", overflow="fold")
    for column in ("Memory", "Free for a training"):
        table.add_column(column, justify="right")
    table.add_column("Said by", overflow="fold")
    for name, budget in budgets.items():
        if isinstance(budget, str):
            table.add_row(name, "", "", "", budget)
        else:
            total, free = format_bytes(budget.total_bytes), format_bytes(budget.free_bytes)
            table.add_row(name, budget.device, total, free, budget.source)
    console.print(table)
