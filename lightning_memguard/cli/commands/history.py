"""``memguard history``: what fits on this machine's GPUs have measured, which corrects later predictions."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from lightning_memguard.cli import tables
from lightning_memguard.cli.status import progress
from lightning_memguard.errors import MemGuardError

HELP = "list or clear what fits on this machine's GPUs have measured, by which later predictions are corrected"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("file", nargs="?", metavar="FILE", help="another file of measurements (default: this user's)")
    parser.add_argument("--clear", action="store_true", help="delete the file")


def run(options: argparse.Namespace) -> bool:
    """Print what the file holds, or delete it."""
    with progress() as say:
        say("loading torch")
        from lightning_memguard.core.device.measurements import Store, default_path

        store = Store(Path(options.file) if options.file else default_path())
    if options.file and not store.path.exists():
        raise MemGuardError(f"{store.path} does not exist.")
    found, damaged = store.read()
    if options.clear and options.file and not found:
        raise MemGuardError(f"{store.path} holds no measurement, so it was not deleted.")
    if options.clear:
        try:
            store.clear()
        except OSError as error:
            raise MemGuardError(f"{store.path} cannot be deleted: {error.strerror}.") from error
    if options.json:
        kept = [] if options.clear else [asdict(each) for each in found]
        tables.print_json({"file": str(store.path), "damaged_lines": damaged, "measurements": kept})
    elif options.clear:
        tables.terminal().print(f"Deleted {store.path} ({len(found)} measurements).", soft_wrap=True)
    else:
        tables.print_measurements(found, damaged, store.path, tables.terminal())
    return True
