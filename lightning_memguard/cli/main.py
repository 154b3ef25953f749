"""The command line: ``memguard plan``, ``layers``, ``snapshot``, ``replay``, ``compare``, ``gpus``, ``history``, ...

The parser and the dispatch. torch and Lightning are imported when a command needs them, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Sequence

from lightning_memguard._version import __version__
from lightning_memguard.cli.commands import compare, devices, doctor, gpus, history, layers, plan, replay, snapshot
from lightning_memguard.errors import CannotTraceError, MemGuardError

FITS, DOES_NOT_FIT, BAD_USE, INTERRUPTED = 0, 1, 2, 130
_MANY_OBJECTS = 200_000  # made before garbage is looked for: imports and traces make more, and none of them is garbage

_HOW_TO_DESCRIBE = (
    "If this is not the batch the step expects: --input-shape and --target-shape make a pair of tensors, --input "
    "NAME=SHAPE makes a dict, --datamodule draws a batch from your data. The first size of a shape is the batch size."
)
_EPILOG = """\
examples:
  memguard plan examples/char_gpt.py:CharGPT --args vocabulary_size=96 \\
      --datamodule examples/char_gpt.py:SourceCode --device "RTX 4090" --device H100
  memguard plan torchvision.models:resnet50 --input-shape 32,3,224,224 --target-shape 32:int64:1000 \\
      --optimizer torch.optim.SGD,momentum=0.9 --precision bf16-mixed --device T4
  memguard plan --config config.yaml --batch-size 64 --json
  memguard layers my_project.models:Net --input-shape 8,1,28,28 --target-shape 8:int64:10

exit status: 0 if it fits some device (or the command is done), 1 if it fits none, 2 for bad usage or an error
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments of ``memguard`` (default: those of this process).

    Returns:
        The exit status: 0 if it fits, or is done; 1 if it does not fit; 2 for bad usage or an error.
    """
    collected_after = gc.get_threshold()
    gc.set_threshold(_MANY_OBJECTS, *collected_after[1:])
    try:
        options = _parser().parse_args(argv)
        return FITS if options.run(options) else DOES_NOT_FIT
    except SystemExit as error:  # argparse has printed what is wrong
        return error.code if isinstance(error.code, int) else BAD_USE
    except MemGuardError as error:
        hint = f"\n{_HOW_TO_DESCRIBE}" if isinstance(error, CannotTraceError) else ""
        print(f"memguard: {error}{hint}", file=sys.stderr)
        return BAD_USE
    except KeyboardInterrupt:
        print("memguard: stopped.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FITS
    except Exception:  # noqa: BLE001 - Python's own status, 1, is that of a training that fits no device
        traceback.print_exc()
        return BAD_USE
    finally:
        gc.set_threshold(*collected_after)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memguard",
        description="Predicts how much memory a training run needs before it starts, even on GPUs you do not have.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"memguard {__version__}")
    parser.set_defaults(run=lambda _: print(parser.format_help(), end="") is None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (plan, layers, snapshot, replay, compare, gpus, devices, doctor, history):
        name, text = command.__name__.rpartition(".")[2], command.HELP
        epilog = getattr(command, "EPILOG", None)
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=epilog)
        added.set_defaults(run=command.run)
        added.add_argument("--json", action="store_true", help="print JSON, and nothing else, to stdout")
        if hasattr(command, "add_arguments"):
            command.add_arguments(added)
    return parser
