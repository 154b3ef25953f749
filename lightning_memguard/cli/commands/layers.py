"""``memguard layers``: the memory and FLOPs of each layer, and what the textbook would say."""

from __future__ import annotations

import argparse
from functools import partial

from lightning_memguard.cli import tables
from lightning_memguard.cli.options import add_device, add_target, one_device, whole_number
from lightning_memguard.cli.status import progress
from lightning_memguard.core.layers.textbook import MOMENTS, textbook_sums, weight_memory
from lightning_memguard.errors import MemGuardError
from lightning_memguard.report.page_data import footprint_data

HELP = "list the memory and FLOPs of each layer, and textbook estimates"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add_target(parser)
    add_device(parser, "whose kernels to use (default: cpu)")
    text = "rows nested no deeper than this (default: all)"
    parser.add_argument("--depth", type=whole_number(0), metavar="N", help=text)
    text = "sgd, momentum, adagrad, rmsprop, adam, adamw (default: that of --optimizer, or adam)"
    parser.add_argument("--textbook", metavar="NAME", help=f"the optimizer of the textbook estimates: {text}")


def run(options: argparse.Namespace) -> bool:
    """Run the layers, trace the step, and print the tables."""
    with progress() as say:
        say("loading torch and Lightning")
        from lightning_memguard.cli.inputs import read_subject, with_memory_if_needed
        from lightning_memguard.training.planning.plan import layers_on, predict_on
        from lightning_memguard.training.planning.subject import inference_of

        device = one_device(options.device, "cpu")
        moments = (options.textbook or _textbook_name(options.optimizer)).lower()
        if moments not in MOMENTS:
            raise MemGuardError(f"--textbook {moments!r} is unknown; choose one of {', '.join(MOMENTS)}.")
        subject = read_subject(options, say)
        say("running the layers")
        table = layers_on(subject, device)
        say(f"tracing the step on {device}")
        size = subject.batch_size
        predict_it = partial(predict_on, device=device)
        subject, (prediction, _) = with_memory_if_needed(options, subject, say, predict_it)
        training = prediction.footprint_at(size)
        inference, why_not = None, ""
        try:
            inference = predict_it(inference_of(subject))[0].footprint_at(size)
        except MemGuardError as error:
            why_not = str(error)
        sums = textbook_sums(table, optimizer=moments)
        weights = weight_memory(table.parameters, table.trainable_parameters)
    if options.json:
        answer = tables.layers_data(table, options.depth)
        answer |= {"model": type(subject.model).__name__, "device": device}
        answer["textbook"] = [tables.sum_data(each, training) for each in sums]
        answer["training"] = footprint_data(training)
        answer["inference"] = footprint_data(inference) if inference else None
        answer["weights"] = {each.element: [each.total_bytes, each.trainable_bytes] for each in weights}
        tables.print_json(answer)
        return True
    console = tables.terminal()
    console.print(tables.headline(subject))
    tables.print_layers(table, console, options.depth)
    tables.print_textbook(sums, training, inference, why_not, console)
    tables.print_weights(weights, console)
    tables.print_notes(training.notes, console)
    return True


def _textbook_name(optimizer: str | None) -> str:
    """Return the textbook's name for an optimizer; Adam if it has none, or no optimizer was given."""
    name, *settings = (optimizer or "adam").split(",")
    name = name.replace(":", ".").rpartition(".")[2].lower()
    if name == "sgd" and any(each.strip().startswith("momentum=") for each in settings):
        return "momentum"
    return name if name in MOMENTS else "adam"
