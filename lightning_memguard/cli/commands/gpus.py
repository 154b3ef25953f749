"""``memguard gpus``: the catalogue of GPUs."""

from __future__ import annotations

import argparse

from lightning_memguard.cli import tables
from lightning_memguard.core.gpus import catalogue, find

HELP = "list the GPUs that can be planned for"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("filter", nargs="?", default="", metavar="FILTER", help="words in the name, such as 'a100'")


def run(options: argparse.Namespace) -> bool:
    """Print the GPUs whose names contain all words of the filter."""
    words = options.filter.lower().replace("-", " ").split()
    names = {gpu: " ".join((gpu.name, *gpu.aliases)).lower().replace("-", " ") for gpu in catalogue()}
    matching = [gpu for gpu, name in names.items() if all(word in name for word in words)]
    matching = matching or [find(options.filter)]  # raises an error that names similar ones
    if options.json:
        tables.print_json([vars(gpu) for gpu in matching])
    else:
        tables.print_gpus(matching, tables.terminal())
    return True
