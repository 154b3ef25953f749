"""``memguard snapshot``: the predicted step as a file for PyTorch's memory viewer."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from shlex import quote

from lightning_memguard.cli import tables
from lightning_memguard.cli.options import add_device, add_target, one_device
from lightning_memguard.cli.status import progress
from lightning_memguard.core.replay.snapshot import save_snapshot
from lightning_memguard.errors import MemGuardError

HELP = "save the predicted step as a PyTorch memory snapshot"
EPILOG = "Open the file at https://pytorch.org/memory_viz or with `python -m torch.cuda._memory_viz`."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add_target(parser)
    add_device(parser, "what to predict for (default: the GPU of this machine, or a T4)")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="where to save it, usually step.pickle")


def run(options: argparse.Namespace) -> bool:
    """Trace the step, write it down, and say how to open the file."""
    target = Path(options.output)
    if not target.parent.is_dir():
        raise MemGuardError(f"-o {target}: there is no folder {target.parent}; create it, or write elsewhere.")
    with progress() as say:
        say("loading torch and Lightning")
        from lightning_memguard.cli.inputs import read_subject, with_memory_if_needed
        from lightning_memguard.training.planning.plan import predict_on

        device = one_device(options.device)
        subject = read_subject(options, say)
        say(f"tracing the step on {device}")
        predict_it = partial(predict_on, device=device)
        subject, (prediction, _) = with_memory_if_needed(options, subject, say, predict_it)
        trace = prediction.own_trace_at(subject.batch_size)
        path = save_snapshot(trace, prediction.curve.settings, target)
    if options.json:
        tables.print_json(
            {"path": str(path), "events": len(trace), "batch_size": subject.batch_size, "notes": prediction.curve.notes}
        )
        return True
    console = tables.terminal()
    console.print(tables.headline(subject))
    console.print(
        f"Wrote {path}: {len(trace):,} events, the predicted step at batch size {subject.batch_size} on {device}.\n"
        f"To open it, drop it on https://pytorch.org/memory_viz, or run\n"
        f"  python -m torch.cuda._memory_viz trace_plot {quote(str(path))} -o {quote(str(path.with_suffix('.html')))}",
        soft_wrap=True,
    )
    tables.print_notes(prediction.curve.notes, console)
    return True
