"""``memguard compare``: a predicted history next to a recorded one, request by request."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from lightning_memguard.cli import tables
from lightning_memguard.cli.status import progress
from lightning_memguard.core.histories.compare import compare_files
from lightning_memguard.report.comparison import comparison_text

HELP = "compare a predicted memory snapshot with a recorded one"
EPILOG = (
    "Write the first with `memguard snapshot` or guard.save_snapshot, the second with torch.cuda.memory._dump_snapshot "
    "around a step. Only plain values are read from them: a file that names a class is refused."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("predicted", metavar="PREDICTED", help="the predicted snapshot")
    parser.add_argument("actual", metavar="ACTUAL", help="the recorded snapshot")
    parser.add_argument("--lines", action="store_true", help="name lines of your code in the report")


def run(options: argparse.Namespace) -> bool:
    """Compare, and print the report."""
    with progress() as say:
        say("comparing the snapshots")
        found = compare_files(options.predicted, options.actual)
    if not options.lines:
        found = found.without_lines()
    if options.json:
        tables.print_json(asdict(found))
    else:
        tables.terminal().print(comparison_text(found), soft_wrap=True)
    return True
