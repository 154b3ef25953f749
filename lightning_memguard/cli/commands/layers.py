"""``memguard layers``: the memory and FLOPs of each layer."""

from __future__ import annotations

import argparse

from lightning_memguard.cli import tables
from lightning_memguard.cli.options import add_device, add_target, one_device, whole_number
from lightning_memguard.cli.status import progress

HELP = "list the memory and FLOPs of each layer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add_target(parser)
    add_device(parser, "whose kernels to use (default: cpu)")
    text = "rows nested no deeper than this (default: all)"
    parser.add_argument("--depth", type=whole_number(0), metavar="N", help=text)


def run(options: argparse.Namespace) -> bool:
    """Run the layers on a copy without memory, and print them."""
    with progress() as say:
        say("loading torch and Lightning")
        from lightning_memguard.cli.inputs import read_subject
        from lightning_memguard.training.planning.plan import layers_on

        device = one_device(options.device, "cpu")
        subject = read_subject(options, say)
        say("running the layers")
        table = layers_on(subject, device)
    if options.json:
        answer = tables.layers_data(table, options.depth)
        tables.print_json(answer | {"model": type(subject.model).__name__, "device": device})
        return True
    console = tables.terminal()
    console.print(tables.headline(subject))
    tables.print_layers(table, console, options.depth)
    return True
