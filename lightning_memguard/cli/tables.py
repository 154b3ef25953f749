"""Answers of the command line: records -> tables for people, and plain data for programs."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console

from lightning_memguard.core.decision.decision import Budget, Decision, needed_words, prediction_of, retries_words
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.histories.history import line_of, operator_of, without_folders
from lightning_memguard.report.decision_table import new_table, setup_text
from lightning_memguard.report.page_data import budget_data, footprint_data, layer_data, picked
from lightning_memguard.report.words import ACCURACY, duration, time_range
from lightning_memguard.units import counted, format_bytes, format_count, signed

if TYPE_CHECKING:
    from pathlib import Path

    from lightning_memguard.core.decision.advice import Advice
    from lightning_memguard.core.device.measurements import Measurement
    from lightning_memguard.core.histories.alternatives import Alternative
    from lightning_memguard.core.histories.history import History, Holder, OutOfMemory, Stack
    from lightning_memguard.core.layers.layers import Layer, LayerTable
    from lightning_memguard.core.replay.epoch import Epoch
    from lightning_memguard.training.planning.layouts import Fit
    from lightning_memguard.training.planning.lengths import AtLength
    from lightning_memguard.training.planning.plan import Plan
    from lightning_memguard.training.planning.subject import Subject
    from lightning_memguard.training.planning.ways import TrainingWay, Ways


def terminal() -> Console:
    """Return the console that tables go to; if it is not a terminal, ``COLUMNS`` sets its width (default: 140)."""
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "140") or 140)
    return Console(highlight=False, markup=False, width=width)


def print_json(answer: object) -> None:
    """Print data for programs."""
    print(json.dumps(answer, indent=2, allow_nan=False))


def headline(subject: Subject) -> str:
    """Describe the model, the step and the example batch in one line."""
    kind = "training" if subject.training else "inference"
    accumulate = subject.trainer.get("accumulate_grad_batches", 1)
    more = f", gradients accumulated over {accumulate} batches" if accumulate != 1 else ""
    if subject.training and subject.optimizer is not None:
        more += f", with {getattr(getattr(subject.optimizer, 'func', subject.optimizer), '__name__', 'its optimizer')}"
    if subject.devices * subject.nodes > 1:
        more += f", one of {subject.devices * subject.nodes:,} ranks"
    held = Counter[str]()
    for each in subject.model.parameters():
        held[str(each.dtype).removeprefix("torch.")] += each.numel() * each.is_floating_point()
    most = max(held, key=held.__getitem__, default="float32")  # adapters of a bfloat16 model may be in float32
    numbers = f"in {most}" if subject.precision == "32-true" and most != "float32" else f"at {subject.precision}"
    return f"{type(subject.model).__name__}, {kind} {numbers}{more}; example batch: {subject.shapes}."


def print_plan(plan: Plan, console: Console, kind: str) -> None:
    """One device: the table by part, whether it fits, and the largest batch size for a ``kind`` of step."""
    console.print(setup_text(plan.asked, kind), markup=False, soft_wrap=True)
    console.print(_largest_words(plan))


def print_plans(plans: Sequence[Plan], console: Console) -> None:
    """Print several devices, a row each, and the assumptions behind them."""
    size, each = plans[0].footprint.batch_size, " a rank" if plans[0].ranks > 1 else ""
    at_size, at_largest = f"Predicted at {size}", "Predicted at largest"
    headings = "Budget", at_size, "Share", "Fits", f"Largest batch{each}", at_largest, "Its step"
    title = f"MemGuard: batch size {size}{each}, on each of these devices alone"
    table = new_table(title, "Device", *(f">{heading}" for heading in headings))
    for plan in plans:
        budget, fits = format_bytes(plan.budget.free_bytes), "yes" if plan.fits else "NO"
        seconds = plan.largest.footprint.step_seconds if plan.largest and plan.largest.footprint else None
        predicted = needed_words(plan.footprint).replace(", ", "\n")  # a terminal may be 80 wide
        step = duration(seconds.likely) if seconds else ""
        table.add_row(plan.budget.device, budget, predicted, f"{plan.share:.0%}", fits, *_largest(plan), step)
    console.print(table)
    share = plans[0].budget.margin_share
    console.print(f"Fits: the prediction's upper bound is within the budget minus a {share:.0%} margin.")
    for plan in plans:
        if plan.asked.retries:
            console.print(f"On {plan.budget.device} it {retries_words(plan.asked.retries)}.")
        if plan.asked.setting:
            console.print(f"On {plan.budget.device} it fits with {plan.asked.setting} in the environment.")
    limits = {_within(plan) for plan in plans if plan.largest and plan.largest.limited_by != "memory"}
    if limits:
        console.print(f"+: the largest {' or '.join(sorted(limits))}; memory is not the limit.")
    for line in dict.fromkeys(_largest_words(plan) for plan in plans if plan.reason):
        console.print(line)
    print_notes((note for plan in plans for note in plan.footprint.notes), console)


def print_notes(notes: Iterable[str], console: Console) -> None:
    """Print the assumptions behind a prediction, each once."""
    for note in dict.fromkeys(notes):
        console.print(f"Note: {note}.")


def _largest_words(plan: Plan) -> str:
    """One sentence: the largest batch size of those that a limit leaves, or why there is none."""
    largest, request = plan.largest, plan.request
    if largest is None or largest.footprint is None:
        least = request.smallest_batch_size if request and plan.too_large else 1
        none = f"No batch size{f' of {least} or more' if least > 1 else ''} fits"
        reason = plan.reason[0].lower() + plan.reason[1:]
        return f"{none if plan.too_large else 'Largest batch size unknown'}: {reason.rstrip('.')}."
    size = largest.batch_size
    in_all = "" if plan.ranks == 1 else f" a rank, {size * plan.ranks:,} in all"
    return f"Largest batch size {_within(plan)}: {size}{in_all}, which needs {needed_words(largest.footprint)}."


def _within(plan: Plan) -> str:
    """Say of which sizes the largest is the largest: a size asked for may be above a limit, and fit."""
    limit = plan.largest.limited_by if plan.largest else ""
    if limit == "max_batch_size" and plan.request:
        return f"of {plan.request.max_batch_size} or less"
    return {"memory": "that fits", "dataset": "with this dataset"}.get(limit, f"with {limit}")


def _largest(plan: Plan) -> tuple[str, str]:
    if plan.largest is None or plan.largest.footprint is None:
        return "none" if plan.too_large else "unknown", ""
    return _of_decision(plan.largest)


def _of_decision(largest: Decision) -> tuple[str, str]:
    more = "" if largest.limited_by == "memory" else "+"
    return f"{largest.batch_size}{more}", needed_words(prediction_of(largest)[0]).replace(", ", "\n")


def plan_data(plan: Plan) -> dict[str, Any]:
    """A plan for programs."""
    largest = plan.largest
    return {
        "device": plan.budget.device,
        **picked(plan, "fits", "share", "ranks"),
        "budget": budget_data(plan.budget),
        "asked": footprint_data(plan.footprint),
        "retries": vars(plan.asked.retries) if plan.asked.retries else None,
        "setting": plan.asked.setting or None,
        "largest_batch_size": largest.batch_size if largest else None,
        "largest_in_all": largest.batch_size * plan.ranks if largest else None,
        "limited_by": largest.limited_by if largest else None,
        "largest": footprint_data(largest.footprint) if largest and largest.footprint else None,
        "why_no_largest": plan.reason or None,
        "accumulate_grad_batches": plan.asked.accumulate_grad_batches,
    }


def print_advice(advice: Sequence[Advice], on: Plan, console: Console) -> None:
    """Print the remedies that make the step fit or need less, the largest saving first."""
    from lightning_memguard.core.decision.advice import larger_batch

    size, device = on.footprint.batch_size, on.budget.device
    if not advice:
        console.print(f"No remedy saves memory at batch size {size} on {device}.")
        return
    title = f"What would need less memory at batch size {size} on {device} (each predicted by tracing it)"
    table = new_table(title, "Remedy", ">At most", ">Saves", ">Fits", ">Time", "Costs", no_wrap=True)
    for each in advice:
        peak, saved = format_bytes(each.footprint.most_device_bytes), format_bytes(each.saved_bytes)
        time = "" if each.time_ratio is None else signed(each.time_ratio - 1, 0)
        table.add_row(" + ".join(each.remedies), peak, saved, "yes" if each.fits else "NO", time, "; ".join(each.costs))
    console.print(table)
    if not any(each.fits for each in advice):
        console.print(f"None of these makes it fit on {device}.")
    for each in filter(larger_batch, advice):
        console.print(f"With {' + '.join(each.remedies)}: {larger_batch(each).lower()}".rstrip())
    console.print("How to apply them:")
    _print_how(console, *(pair for each in advice for pair in zip(each.remedies, each.how, strict=True)))


def advice_data(each: Advice) -> dict[str, Any]:
    """One remedy for programs."""
    return {**vars(each), "footprint": footprint_data(each.footprint)}


def print_lengths(subject: Subject, found: Sequence[AtLength], console: Console) -> None:
    """Print the largest batch size at each length, a row each."""
    console.print(headline(subject))
    each = " a rank" if subject.ranks > 1 else ""
    columns = "Device", ">Budget", ">Length", f">Largest batch{each}", ">Predicted at largest"
    table = new_table("MemGuard: the largest batch size at each length", *columns)
    for at in found:
        largest = _of_decision(at.largest) if at.largest else ("none", "")
        table.add_row(at.budget.device, format_bytes(at.budget.free_bytes), f"{at.length}", *largest)
    console.print(table)
    share = found[0].budget.margin_share
    console.print(f"The prediction's upper bound is within the budget minus a {share:.0%} margin.")
    if limits := {at.largest.limited_by for at in found if at.largest and at.largest.limited_by != "memory"}:
        console.print(f"+: the largest with {' or '.join(sorted(limits))}; memory is not the limit.")
    for at in found:
        if at.too_large:
            console.print(f"At length {at.length} on {at.budget.device}: {at.too_large}", soft_wrap=True)
    notes = (note for at in found if at.largest for note in prediction_of(at.largest)[0].notes)
    print_notes((*notes, *subject.notes), console)


def length_data(at: AtLength) -> dict[str, Any]:
    """The largest batch size at a length for programs; 0 if not even one sample fits."""
    largest = footprint_data(prediction_of(at.largest)[0]) if at.largest else None
    return {**picked(at, "length", "batch_size"), "largest": largest, "budget": budget_data(at.budget)}


def print_epochs(epochs: Mapping[str, Epoch | str], console: Console) -> None:
    """Print what the cache of each device grows to over an epoch, and what keeps it smaller; or why it is unknown."""
    for device, epoch in epochs.items():
        if isinstance(epoch, str):
            console.print(f"On {device}, what the cache grows to over an epoch is not known: {epoch}", soft_wrap=True)
            continue
        batches = "with batches of these sizes, each padded to its longest sample"
        console.print(f"On {device}, {batches}: {epoch.text}.", soft_wrap=True)
        if epoch.remedy and (epoch.run.retries or not epoch.fits):
            console.print(f"To avoid that, {epoch.remedy.how}.", soft_wrap=True)


def epochs_data(epochs: Mapping[str, Epoch | str]) -> dict[str, Any]:
    """By device, the epoch for programs; or why it is not known."""
    return {device: epoch if isinstance(epoch, str) else asdict(epoch) for device, epoch in epochs.items()}


def print_ways(found: Ways, console: Console) -> None:
    """Print the ways to train with so many samples a step, the best first, and how to write them."""
    ways = found.ways
    if ways:
        ranks, priced = ways[0].ranks, any(way.dollars_per_million is not None for way in ways)
        title = f"Ways to see {ways[0].samples:,} samples a step{f' on {ranks} devices' if ranks > 1 else ''}"
        each = " a rank" if ranks > 1 else ""
        columns = "Device", f">Batch{each}", ">Batches a step", "With", ">At most", ">Usable", ">Time a sample"
        table = new_table(title, *columns, *([">Cost of 1M samples"] if priced else ()), no_wrap=True)
        for way in ways:
            figures = [format_bytes(n) for n in (way.footprint.most_device_bytes, way.budget.usable_bytes)]
            seconds, dollars = way.seconds_per_sample, way.dollars_per_million
            figures.append(time_range(seconds) if seconds else "unknown")
            figures += ["unknown" if dollars is None else f"${dollars:,.2f}"] * priced
            with_ = " + ".join(way.changes) or "as it is"
            table.add_row(way.device, f"{way.batch_size}", f"{way.accumulate_grad_batches}", with_, *figures)
        console.print(table)
        console.print(f"Times are those of a step by its samples, without loading data; {ACCURACY}.")
        _print_how(console, *(pair for way in ways for pair in zip(way.changes, way.how, strict=True)))
        for name, cost in {pair: None for way in ways for pair in zip(way.changes, way.costs, strict=True)}:
            console.print(f"  {name} costs: {cost}", soft_wrap=True)
    for text in found.left_out:
        console.print(f"Left out: {text}.", soft_wrap=True)


def way_data(way: TrainingWay) -> dict[str, Any]:
    """A way to train for programs; its time in seconds and its cost in dollars."""
    seconds = way.seconds_per_sample
    return {
        **picked(way, "device", "ranks", "batch_size", "accumulate_grad_batches", "samples", "changes", "how", "costs"),
        "seconds_per_sample": seconds and seconds.as_dict(),
        "dollars_per_million_samples": way.dollars_per_million,
        "footprint": footprint_data(way.footprint),
        "budget": budget_data(way.budget),
    }


def print_layouts(layouts: Sequence[Fit], console: Console) -> None:
    """The cheapest way to train on so many devices, a line each, and what to write for it."""
    if not layouts:
        return
    console.print("The cheapest way to train on several, each predicted by tracing it:")
    for fit in layouts:
        console.print(f"  {fit}", soft_wrap=True)
    _print_how(console, *((fit.name, fit.how) for fit in layouts if fit.name))


def _print_how(console: Console, *pairs: tuple[str, str]) -> None:
    """Print the code to write for each name, without line breaks, to be copied."""
    for name, how in dict(pairs).items():
        console.print(f"  {name}: {how}", soft_wrap=True)


MOST_HOLDERS = 5  # that are shown


def print_alternatives(
    history: History,
    rows: Sequence[Alternative],
    capacity_bytes: int | None,
    console: Console,
    failure: OutOfMemory | None = None,
    named: bool = False,
) -> None:
    """A history as recorded and under other settings: what each reserves, and where the free memory is."""
    recorded, compared = rows[0].replay, rows[rows[-1].laid_out_again].replay
    device = f"Device {history.device}: " if named else ""
    kind = "Predicted" if history.predicted else "Recorded"
    begins = f"; {format_bytes(history.start_bytes)} were allocated before" if history.start else ""
    console.print(f"{device}{kind} history of {len(history.entries):,} entries{begins}.")
    if failure:
        for line in _failure_words(failure):
            console.print(line, soft_wrap=True)
    limit = capacity_bytes or (failure.capacity_bytes if failure else None)
    within = f" within {format_bytes(limit)}" if limit else ""
    columns = ("Setting", ">Peak reserved", ">Change", ">Cached", ">Fragmented", *([">Fits"] if limit else ()))
    table = new_table(f"{device}Peak reserved under allocator settings{within}", *columns)
    for row in rows:
        figures = _alternative(row, compared.peak_reserved_bytes)
        table.add_row(_setting_words(row, history.settings.text), *figures[: len(columns) - 1])
    console.print(table)
    if failure and limit:
        console.print(_what_saves(rows, limit, is_recorded=not capacity_bytes), soft_wrap=True)
    for note in _history_notes(history, capacity_bytes, laid_out_again=rows[-1].laid_out_again):
        console.print(f"Note: {note}", soft_wrap=True)
    console.print(
        f"Allocated at most: {format_bytes(recorded.peak_allocated_bytes)}.\n"
        "Cached: in segments without a block, given back when memory is short.\n"
        "Fragmented: free within segments that hold a block.\n"
        "A setting is given as PYTORCH_ALLOC_CONF=KEY:VALUE (PYTORCH_CUDA_ALLOC_CONF before torch 2.9); garbage "
        "collection works only with torch.cuda.set_per_process_memory_fraction below 1.",
        soft_wrap=True,
    )
    if compared.pinned_bytes:
        console.print("Blocks that kept most of the fragmented memory at the peak:")
    for where, blocks, held, kept in _by_place(compared.holders)[:MOST_HOLDERS]:
        if not kept:
            break
        text = f"{format_bytes(kept)} by {counted(blocks, 'block')} of {format_bytes(held)} in total"
        console.print(f"  {text}: {where}", soft_wrap=True)


def _alternative(row: Alternative, compared_bytes: int) -> tuple[str, ...]:
    found = row.replay
    change = signed(found.peak_reserved_bytes / max(1, compared_bytes) - 1) if row.setting else ""
    reserved, cached, pinned = map(format_bytes, (found.peak_reserved_bytes, found.cached_bytes, found.pinned_bytes))
    times = "once" if found.retries == 1 else f"{found.retries:,} times"
    released = f", after releasing its cache {times}" if found.retries else ""
    return reserved, change, cached, pinned, f"{'yes' if row.fits else 'NO'}{released}"


def _history_notes(history: History, capacity_bytes: int | None, *, laid_out_again: bool) -> Iterator[str]:
    if laid_out_again:
        yield (
            f"the record begins with {format_bytes(history.start_reserved_bytes)} reserved and never reserves more, so "
            "it does not show how they became fragmented. Rows after the first begin with the blocks of its start, "
            "laid out again. Record from the start of the process to compare more."
        )
    short = history.ran_short_at_bytes
    if short and capacity_bytes and capacity_bytes >= short:
        yield (
            f"when recorded, at most {format_bytes(max(history.reserved_bytes))} were reserved; {format_bytes(short)} "
            'seem not to have fit, as the cache was released. For "as it was" to be what happened, pass a --capacity '
            "below that."
        )


def _setting_words(row: Alternative, own: str) -> str:
    if row.setting:
        return row.setting if row.was in ("", row.setting) else f"{row.setting} instead of {row.was}"
    return f"as it was{f': {own}' if own else ''}{', laid out again' if row.laid_out_again else ''}"


def _failure_words(failure: OutOfMemory) -> Iterator[str]:
    """Say where and why a request was refused, and who held the memory."""
    earlier = f", after {counted(failure.earlier, 'earlier failure')}" if failure.earlier else ""
    reserved, allocated = format_bytes(failure.reserved_bytes), format_bytes(failure.allocated_bytes)
    piece, free = format_bytes(failure.largest_free_bytes), format_bytes(failure.entry.address)
    asked, capacity = format_bytes(failure.entry.nbytes), format_bytes(failure.capacity_bytes)
    unused = failure.capacity_bytes - failure.allocated_bytes
    where = _place(failure.stack, "an operator that was not recorded")
    yield f"It ran out of memory at entry {failure.place + 1:,}{earlier}: {asked} for {where}."
    pieces = f"the largest free piece there was {piece}"
    yield f"{reserved} were reserved then, {allocated} of them allocated; {pieces}, and the device had {free} free."
    if failure.missing_bytes <= failure.entry.address:
        limit = f"a limit of at most {capacity} was set (torch.cuda.set_per_process_memory_fraction)"
        yield f"That is enough, so {limit}, or the history is not whole."
    elif failure.entry.nbytes > unused:
        less = format_bytes(failure.entry.nbytes - unused)
        yield f"It could reserve {capacity}: no setting makes room, at least {less} less would have to be allocated."
    else:
        pieces = f"{format_bytes(unused)} were not allocated, but in pieces"
        yield f"Of the {capacity} that it could reserve, {pieces}: it was short by {format_bytes(failure.short_bytes)}."
    yield "Blocks that held most of the memory then:"
    for where, blocks, held, _ in sorted(_by_place(failure.holders), key=lambda row: -row[2])[:MOST_HOLDERS]:
        yield f"  {format_bytes(held)} in {counted(blocks, 'block')}: {where}"


def _what_saves(rows: Sequence[Alternative], limit: int, *, is_recorded: bool) -> str:
    """Which settings serve the request that was refused, or how much less would."""
    best = min(rows, key=lambda row: row.replay.peak_reserved_bytes)
    if is_recorded and rows[0].fits:
        return "Note: replayed, the recorded settings serve what was refused, so others may not have helped either."
    saved = [_setting_words(row, "") for row in rows if row.fits]
    if saved:
        return f"It would have been served: {'; '.join(saved)}."
    with_it = f"; with {_setting_words(best, '')}, it is short by" if best.setting else ": it is short by"
    return f"No setting serves it{with_it} {format_bytes(best.replay.peak_reserved_bytes - limit)}."


def _place(stack: Stack, unknown: str = "allocated before the history, or operator not recorded") -> str:
    return " at ".join(filter(None, (operator_of(stack), without_folders(line_of(stack))))) or unknown


def _by_place(holders: Sequence[Holder]) -> list[tuple[str, int, int, int]]:
    """Group blocks by the place of their request: count, bytes, and free bytes they keep; most free bytes first."""
    places: dict[str, tuple[int, int, int]] = {}
    for each in holders:
        where = _place(each.stack)
        blocks, held, free = places.get(where, (0, 0, 0))
        places[where] = blocks + each.blocks, held + each.allocated_bytes, free + each.free_bytes
    return sorted(((where, *figures) for where, figures in places.items()), key=lambda row: -row[3])


def print_layers(table: LayerTable, console: Console, depth: int | None = None) -> None:
    """The table by layer, and its totals. Rows deeper than ``depth`` are added up in the one above them."""
    headings = ("Output", "Parameters", "Trainable", "Weights", "Saved for\nbackward", "FLOPs", "Multiply-\nadds")
    title = f"MemGuard: layers at batch size {table.batch_size}"
    columns = ("Layer", "Type", *(f">{heading}" for heading in headings))
    shown = new_table(title, *columns, box=SIMPLE_HEAD, pad_edge=False)
    for layer in table:
        if depth is None or layer.depth <= depth:
            shown.add_row(*_layer(layer, table.within(layer.name) if layer.depth == depth else None))
    shown.add_section()
    shown.add_row("Total", "", "", *_figures(table))
    console.print(shown)
    print_notes(table.notes, console)


def _layer(layer: Layer, below: LayerTable | None) -> tuple[str, ...]:
    """A row; with everything ``below`` the layer in it if that has no rows of its own."""
    output = "x".join(map(str, layer.output_shape)) if layer.output_shape else ""
    name = f"{'  ' * max(layer.depth - 1, 0)}{layer.name.rpartition('.')[2] or '(all)'}"
    if layer.shared_with:
        return name, layer.type, f"as {layer.shared_with}", "", "", "", "", "", ""
    counted = below or layer
    *weights, saved, flops, multiply_adds = _figures(counted)
    weights = weights if counted.parameters else ["", "", ""]
    return name, layer.type, output, *weights, saved if counted.activation_bytes else "", flops, multiply_adds


def _figures(of: Layer | LayerTable) -> tuple[str, ...]:
    weights = f"{of.parameters:,}", f"{of.trainable_parameters:,}", format_bytes(of.parameter_bytes)
    return *weights, format_bytes(of.activation_bytes), format_count(of.flops), format_count(of.multiply_adds)


def layers_data(table: LayerTable, depth: int | None = None) -> dict[str, Any]:
    """The table by layer for programs."""
    totals = "parameters", "trainable_parameters", "parameter_bytes", "buffer_bytes", "activation_bytes", "flops"
    layers = [layer_data(layer) for layer in table if depth is None or layer.depth <= depth]
    return {**picked(table, "batch_size", *totals, "multiply_adds", "notes"), "layers": layers}


def print_gpus(gpus: Iterable[Gpu], console: Console) -> None:
    """The catalogue, or part of it."""
    table = new_table("GPUs to plan for", "Name", ">Memory", ">Compute capability", ">Multiprocessors", "Aliases")
    for gpu in gpus:
        memory, capability = format_bytes(gpu.memory_bytes), ".".join(map(str, gpu.compute_capability))
        table.add_row(gpu.name, memory, capability, str(gpu.multiprocessors), ", ".join(gpu.aliases))
    console.print(table)


def print_budgets(budgets: Mapping[str, Budget | str], console: Console) -> None:
    """Print the memory of this machine's devices and its source; for a device that cannot be read, the reason."""
    table = new_table("Devices on this machine", "Device", "Name", ">Memory", ">Free", "Source")
    for name, budget in budgets.items():
        if isinstance(budget, str):
            table.add_row(name, "", "", "", budget)
        else:
            total, free = format_bytes(budget.total_bytes), format_bytes(budget.free_bytes)
            table.add_row(name, budget.device, total, free, budget.source)
    console.print(table)


def print_measurements(found: Sequence[Measurement], damaged: int, path: Path, console: Console) -> None:
    """Print what fits on GPUs have measured, the latest last."""
    if not found:
        console.print(f"{path} holds no measurement; a fit on a GPU writes some.", soft_wrap=True)
        return
    heads = "Time", "Module", "GPU", "Precision", ">Batch size"
    figures = ">Predicted", ">Measured", ">Measured / predicted"
    table = new_table(f"Measurements in {path}", *heads, *figures, "Step")
    for each in found:
        peaks = format_bytes(each.predicted_bytes), format_bytes(each.measured_bytes)
        ratio = signed(each.measured_bytes / each.predicted_bytes - 1)
        when, gpu = each.time[:16].replace("T", " "), each.setting.gpu
        table.add_row(when, each.module, gpu, each.precision, str(each.batch_size), *peaks, ratio, each.step)
    console.print(table)
    if damaged:
        console.print(f"{counted(damaged, 'line')} cannot be read; `memguard history --clear` deletes the file.")
