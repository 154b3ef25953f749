"""Options that several commands share. What reads devices imports torch on use."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from lightning_memguard.errors import MemGuardError


def add_target(parser: argparse.ArgumentParser) -> None:
    """Describe the model and its batch; read by `lightning_memguard.cli.inputs.read_subject`."""
    text = (
        "module:Class or path/to/file.py:Class of a LightningModule or any torch.nn.Module, or a function that returns "
        "one; not needed if --config names it"
    )
    parser.add_argument("target", nargs="?", metavar="TARGET", help=text)
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    repeated: dict[str, Any] = {"action": "append", "default": []}
    add = parser.add_argument_group("the model").add_argument
    add("--args", **several, metavar="NAME=VALUE", help="arguments of TARGET: width=128 'sizes=[1, 2]'")
    text = "model, data, optimizer, and the Trainer's precision, accumulation, clipping, devices and strategy"
    add("--config", metavar="FILE", help=f"a LightningCLI YAML file: {text}")
    add("--precision", metavar="NAME", help="as in a Trainer: 32-true, bf16-mixed, 16-mixed, bf16-true")
    text = "replaces the model's own: torch.optim.SGD,momentum=0.9, or adamw (default for a plain module: AdamW)"
    add("--optimizer", metavar="NAME[,K=V]", help=text)
    add("--loss", metavar="NAME", help="for a plain module: torch.nn.functional:mse_loss (default: by type of target)")
    text = "how it is trained on several devices, as in a Trainer: ddp, fsdp, deepspeed_stage_2, deepspeed_stage_3"
    add("--strategy", metavar="NAME", help=text)
    add("--devices-per-node", type=whole_number(1), metavar="N", help="devices on each node (default: 1)")
    add("--num-nodes", type=whole_number(1), metavar="N", help="nodes that train together (default: 1)")
    text = "under ModelParallelStrategy: ranks with samples of their own, over which FSDP2 shards"
    add("--data-parallel", type=whole_number(1), metavar="N", help=text)
    text = "under ModelParallelStrategy: ranks that share their samples (default: 1)"
    add("--tensor-parallel", type=whole_number(1), metavar="N", help=text)
    add("--accumulate", type=whole_number(1), metavar="N", help="batches per optimizer step (accumulate_grad_batches)")
    title = "the batch (default: the module's example_input_array or train_dataloader)"
    add = parser.add_argument_group(title).add_argument
    text = "8,3,224,224 or 8,128:int64, the batch size first; repeatable"
    add("--input-shape", **repeated, metavar="SHAPE", help=text)
    add("--target-shape", **repeated, metavar="SHAPE", help="shape of the targets; 8:int64:10 is ten classes")
    add("--input", **several, metavar="NAME=SHAPE", help="a batch by name: input_ids=8,512:int64 labels=8,512:int64")
    add("--datamodule", metavar="module:Class", help="a LightningDataModule to draw samples from")
    add("--data-args", **several, metavar="NAME=VALUE", help="arguments of --datamodule")
    add("--batch-size", type=whole_number(1), metavar="N", help="the size to predict (default: the size of the batch)")


def add_device(parser: argparse.ArgumentParser, note: str) -> None:
    """Describe the devices; ``note`` says how this command uses them."""
    text = f"cpu, cuda, or a GPU by name, such as 'RTX 4090', even one this machine does not have; {note}"
    parser.add_argument("--device", action="append", default=[], metavar="NAME", help=text)


def devices_here() -> list[str]:
    """The devices of this machine, the CPU first."""
    import torch

    here = ["cpu"]
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        here += [f"{kind}:{index}" for index in range(module.device_count())] if module.is_available() else []
    return [*here, "mps"] if torch.backends.mps.is_available() else here


def default_devices() -> list[str]:
    """The accelerators of this machine, or else some common ones."""
    return devices_here()[1:] or ["T4", "RTX 3090", "RTX 4090", "A100 80GB", "H100"]


def one_device(named: Sequence[str], default: str | None = None) -> str:
    """The device of a command that takes only one."""
    from lightning_memguard.training.planning.target import check_device

    if len(named) > 1:
        raise MemGuardError(f"--device is given {len(named)} times; this command takes only one.")
    device = named[0] if named else default or default_devices()[0]
    check_device(device)
    return device


def whole_number(least: int) -> Callable[[str], int]:
    """Return a parser of arguments that accepts whole numbers of ``least`` or more."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return read
