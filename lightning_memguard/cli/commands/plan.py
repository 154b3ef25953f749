"""``memguard plan``: whether a training fits one or more devices, and the largest batch size that does."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memguard.cli import fine_tuning, tables
from lightning_memguard.cli.options import add_device, add_target, default_devices, whole_number
from lightning_memguard.cli.status import Say, progress
from lightning_memguard.core.replay.timeline import timeline_of
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.report.page import write_report
from lightning_memguard.report.page_data import Report, curve_of
from lightning_memguard.units import counted, parse_bytes

if TYPE_CHECKING:
    from lightning_memguard.core.decision.advice import Advice
    from lightning_memguard.core.decision.decision import Limits
    from lightning_memguard.core.replay.epoch import Epoch
    from lightning_memguard.training.planning.by_name import Largest
    from lightning_memguard.training.planning.layouts import Fit
    from lightning_memguard.training.planning.lengths import AtLength
    from lightning_memguard.training.planning.plan import Plan
    from lightning_memguard.training.planning.subject import Subject
    from lightning_memguard.training.planning.ways import Ways

HELP = "check whether a step fits one or more devices, and find the largest batch size that does"
EPILOG = "Exit status: 0 if it fits some device, 1 if it fits none, 2 for bad usage or an error."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add_target(parser)
    fine_tuning.add_arguments(parser)
    add_device(parser, "repeatable (default: the GPUs of this machine, or some common ones)")
    add = parser.add_argument_group("limits").add_argument
    add("--margin", type=float, default=0.05, help="share of the memory to keep free (default: 0.05)")
    add("--budget", metavar="BYTES", help="memory the run may use on each device, such as 20GiB")
    add("--min-batch-size", type=whole_number(1), default=1, metavar="N", help="smallest to choose (default: 1)")
    add("--max-batch-size", type=whole_number(1), metavar="N", help="largest to choose (default: 1000000)")
    text = "find the ways to train with N samples a step, by their memory, time and cost, instead of the largest batch"
    add("--target-batch", type=whole_number(1), metavar="N", help=text)
    text = "find the largest batch size at each of these lengths (dimension 1 of the batch) instead of at its own"
    add("--length", type=whole_number(1), nargs="+", default=[], metavar="N", help=text)
    text = "dollars an hour of one device, such as H100=2.50, for --target-batch; repeatable"
    add("--price", action="append", default=[], metavar="NAME=DOLLARS", help=text)
    text = "also find the largest length that fits each device at this batch size; with --hf, or rank of adapters"
    add("--largest", nargs="+", choices=("batch", "length", "rank"), default=[], help=text)
    add = parser.add_argument_group("prediction and output").add_argument
    add("--inference", action="store_true", help="predict a forward pass under no_grad instead of a training step")
    add("--advise", action="store_true", help="suggest changes that save memory, each with its predicted peak")
    add("--measured", metavar="FILE", help="correct by the measurements of a machine, see `memguard history`")
    add("--report", metavar="DIR", help="write memguard_report.html, for the first device, to DIR")


def run(options: argparse.Namespace) -> bool:
    """Plan, and print the answer; whether it fits some device."""
    with progress() as say:
        print_answer = _find(options, say)
    return print_answer()


def _find(options: argparse.Namespace, say: Say) -> Callable[[], bool]:
    """Plan, and return what prints the answer."""
    say("loading torch and Lightning")
    from lightning_memguard.cli.inputs import read_subject, with_memory_if_needed
    from lightning_memguard.core.decision.decision import Limits
    from lightning_memguard.training.planning.plan import plan_on
    from lightning_memguard.training.planning.target import check_device

    _check(options)
    budget = None if options.budget is None else parse_bytes(options.budget, "--budget")
    limits = Limits(options.margin, budget, options.min_batch_size, options.max_batch_size)
    measured = Path(options.measured) if options.measured else None
    devices = list(dict.fromkeys(options.device or default_devices()))
    for device in devices:
        check_device(device)
    tuning = fine_tuning.read(options)
    if tuning is not None:
        say("making the model")
    subject = read_subject(options, say) if tuning is None else fine_tuning.subject_for(options, tuning)
    if options.length:
        return _find_lengths(options, subject, devices, limits, say)
    if options.target_batch is not None:
        return _find_ways(options, subject, devices, limits, say)
    plans = []
    for device in devices:
        say(f"tracing the step on {device}")
        plan_it = partial(plan_on, device=device, limits=limits, measured=measured)
        if tuning is None:
            subject, plan = with_memory_if_needed(options, subject, say, plan_it)
        else:
            plan = plan_it(subject)
        plans.append(plan)
    largest = fine_tuning.largest(options, tuning, subject, devices, limits, say)
    adviser, advice = _advise(plans, say) if options.advise and plans else (None, ())
    layouts = _layouts(subject, adviser, limits, say) if adviser else ()
    files = _report(options, subject, plans[0], say) if options.report and plans else ()

    def print_answer() -> bool:
        if options.json:
            _print_json(subject, plans, adviser, advice, layouts, largest)
        else:
            _print(subject, plans, adviser, advice, files)
            fine_tuning.print_largest(largest, tables.terminal())
            tables.print_layouts(layouts, tables.terminal())
        return any(plan.fits for plan in plans)

    return print_answer


def _check(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other, and a report that could not be written."""
    if options.report is not None:
        _check_folder(options.report)
    if options.target_batch is None and options.price:
        raise MemGuardError("--price is the cost of the ways that --target-batch finds.")
    for name, value in (("--target-batch", options.target_batch), ("--length", options.length)):
        if value and (options.advise or options.measured or options.report):
            raise MemGuardError(f"{name} goes without --advise, --measured and --report: leave them out.")
    if options.largest and (options.length or options.target_batch):
        raise MemGuardError("--largest is found at one batch size: leave out --length and --target-batch.")
    if "rank" in options.largest and options.hf is None:
        raise MemGuardError("--largest rank is of a model by its name: pass --hf NAME.")
    if options.seq and options.length:
        raise MemGuardError("--seq is one length, and --length are several: pass one.")
    if options.target_batch is not None and options.length:
        raise MemGuardError("--length and --target-batch ask for different tables: pass one.")


def _find_ways(
    options: argparse.Namespace, subject: Subject, devices: Sequence[str], limits: Limits, say: Say
) -> Callable[[], bool]:
    from lightning_memguard.cli.inputs import with_memory_if_needed
    from lightning_memguard.training.planning.ways import find_ways

    target, prices = options.target_batch, dict(map(_price, options.price))
    find = partial(find_ways, samples=target, devices=devices, limits=limits, prices=prices, say=say)
    subject, found = with_memory_if_needed(options, subject, say, find)
    return partial(_print_ways, subject, found, as_json=options.json)


def _find_lengths(
    options: argparse.Namespace, subject: Subject, devices: Sequence[str], limits: Limits, say: Say
) -> Callable[[], bool]:
    from lightning_memguard.cli.inputs import with_memory_if_needed
    from lightning_memguard.training.planning.lengths import epoch_at_sizes, largest_at_lengths

    found: list[AtLength] = []
    epochs: dict[str, Epoch | str] = {}
    for device in devices:
        say(f"tracing the step at {counted(len(options.length), 'length')} on {device}")
        find = partial(largest_at_lengths, lengths=options.length, device=device, limits=limits)
        if options.hf is None:
            subject, of_device = with_memory_if_needed(options, subject, say, find)
        else:
            of_device = find(subject)
        found += of_device
        say(f"replaying an epoch of these lengths on {device}")
        try:
            epoch = epoch_at_sizes(subject, of_device, device)
        except CannotTraceError as error:
            epochs[of_device[0].budget.device] = str(error)
        else:
            epochs |= {of_device[0].budget.device: epoch} if epoch else {}
    return partial(_print_lengths, subject, found, epochs, as_json=options.json)


def _print_lengths(
    subject: Subject, found: Sequence[AtLength], epochs: Mapping[str, Epoch | str], *, as_json: bool
) -> bool:
    if as_json:
        tables.print_json(
            {"lengths": [tables.length_data(each) for each in found], "epochs": tables.epochs_data(epochs)}
        )
    else:
        tables.print_lengths(subject, found, tables.terminal())
        tables.print_epochs(epochs, tables.terminal())
    return any(each.largest for each in found)


def _price(text: str) -> tuple[str, float]:
    name, _, dollars = text.rpartition("=")
    try:
        return name, float(dollars.removeprefix("$"))
    except ValueError:
        raise MemGuardError(f"--price {text} is not NAME=DOLLARS, such as H100=2.50.") from None


def _print_ways(subject: Subject, found: Ways, *, as_json: bool) -> bool:
    if as_json:
        tables.print_json({"ways": [tables.way_data(way) for way in found.ways], "left_out": found.left_out})
    else:
        console = tables.terminal()
        console.print(tables.headline(subject))
        tables.print_ways(found, console)
    return bool(found.ways)


def _check_folder(path: str) -> None:
    """Refuse a report that could not be written, before minutes are spent on it."""
    existing = next(each for each in (Path(path).absolute(), *Path(path).absolute().parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise MemGuardError(f"--report {path} cannot be written: {existing} is not a folder that you may write to.")


def _advise(plans: Sequence[Plan], say: Say) -> tuple[Plan, Sequence[Advice]]:
    """Advice on the first device that the step does not fit, else on the smallest."""
    from lightning_memguard.training.planning.advise import try_remedies

    smallest = min(plans, key=lambda plan: plan.budget.usable_bytes)
    plan = next((plan for plan in plans if not plan.fits), smallest)
    say(f"tracing remedies on {plan.budget.device}")
    size = plan.footprint.batch_size
    return plan, try_remedies(plan.prediction, size, plan.budget, progress=say, request=plan.request).advice


def _layouts(subject: Subject, adviser: Plan, limits: Limits, say: Say) -> tuple[Fit, ...]:
    """The cheapest ways to train on all devices that were asked for, and on fewer."""
    from lightning_memguard.training.planning.layouts import fitting_layouts

    if subject.devices * subject.nodes == 1 or not subject.runs_in_lightning:
        return ()
    return tuple(fitting_layouts(subject, adviser.budget.device, limits, say=say))


def _report(options: argparse.Namespace, subject: Subject, plan: Plan, say: Say) -> tuple[Path, ...]:
    from lightning_memguard.training.planning.plan import layers_on

    say(f"writing a report on {plan.budget.device}")
    decision, prediction = plan.asked if options.batch_size else plan.largest or plan.asked, plan.prediction
    layers = None
    with suppress(CannotTraceError):
        shown = replace(subject, batch_size=decision.batch_size)
        layers = layers_on(shown, options.device[0] if options.device else plan.budget.device)
    timeline = timeline_of(prediction.own_trace_at(decision.batch_size), prediction.curve.settings)
    curve = curve_of(prediction.footprint_at, decision)
    return write_report(options.report, Report(type(subject.model).__name__, decision, timeline, curve, layers=layers))


def _print(
    subject: Subject, plans: Sequence[Plan], adviser: Plan | None, advice: Sequence[Advice], files: Sequence[Path]
) -> None:
    console = tables.terminal()
    console.print(tables.headline(subject))
    if len(plans) == 1:
        tables.print_plan(plans[0], console, "training" if subject.training else "inference")
    else:
        tables.print_plans(plans, console)
    if adviser is not None:
        tables.print_advice(advice, adviser, console)
    for path in files:
        console.print(f"Wrote {path}", soft_wrap=True)


def _print_json(
    subject: Subject,
    plans: Sequence[Plan],
    adviser: Plan | None,
    advice: Sequence[Advice],
    layouts: Sequence[Fit],
    largest: Sequence[Largest],
) -> None:
    answer: dict[str, Any] = {
        "model": type(subject.model).__name__,
        "training": subject.training,
        "precision": subject.precision,
        "batch_size": subject.batch_size,
        "batch": subject.shapes,
        "fits": any(plan.fits for plan in plans),
        "devices": [tables.plan_data(plan) for plan in plans],
    }
    if adviser is not None:
        answer["advice_on"] = adviser.budget.device
        answer["advice"] = [tables.advice_data(each) for each in advice]
        answer["layouts"] = [asdict(each) for each in layouts]
    if largest:
        answer["largest"] = [fine_tuning.largest_data(each) for each in largest]
    tables.print_json(answer)
