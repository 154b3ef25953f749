"""The options of a fine-tuning by a model's name: ``--hf NAME --lora r=16 --nf4 --seq 2048``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_memguard.cli.options import whole_number
from lightning_memguard.cli.status import Say
from lightning_memguard.errors import MemGuardError

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_memguard.core.decision.decision import Limits
    from lightning_memguard.training.planning.by_name import FineTuning, Largest
    from lightning_memguard.training.planning.subject import Subject

_OF_OTHERS = ("target", "config", "args", "input_shape", "target_shape", "input", "datamodule", "loss", "strategy")
_OWN = ("lora", "nf4", "int8", "double_quant", "seq", "checkpointing", "attention", "trl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add = parser.add_argument_group("a language model by its name, in place of TARGET (the extra [hf])").add_argument
    text = "a repository on Hugging Face's hub, from the local cache or a built-in table; or the path of a config.json"
    add("--hf", metavar="NAME", help=text)
    text = "train adapters: r=16, or r=16,targets=q_proj+v_proj (default: all linear layers)"
    add("--lora", metavar="r=N", help=text)
    add("--nf4", action="store_true", help="4-bit weights of bitsandbytes (QLoRA)")
    add("--int8", action="store_true", help="8-bit weights of bitsandbytes")
    add("--double-quant", action="store_true", help="quantize the scales of 4-bit weights, too")
    add("--seq", type=whole_number(1), metavar="N", help="tokens of a sample (default: 1024)")
    add("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    add("--trl", action="store_true", help="the loss of TRL's SFTTrainer, in place of transformers' Trainer's")
    add("--attention", choices=("sdpa", "eager"), help="transformers' implementation (default: its own choice)")


def read(options: argparse.Namespace) -> FineTuning | None:
    """Return the fine-tuning that was asked for; None if none was."""
    from lightning_memguard.training.planning.by_name import FineTuning

    if options.hf is None:
        if own := [name for name in _OWN if getattr(options, name)]:
            raise MemGuardError(f"--{own[0].replace('_', '-')} is of a model by its name: pass --hf NAME.")
        return None
    if others := [name for name in _OF_OTHERS if getattr(options, name)]:
        raise MemGuardError(f"--hf brings its own model and batch: leave out {others[0].upper().replace('_', '-')}.")
    if options.nf4 and options.int8:
        raise MemGuardError("--nf4 and --int8 are two kinds of weights: pass one.")
    given = dict(_pair(each) for each in (options.lora or "r=0").split(","))
    if unknown := [name for name in given if name not in ("r", "targets")]:
        raise MemGuardError(f"--lora has no {unknown[0]!r}: write r=16, or r=16,targets=q_proj+v_proj.")
    if not given.get("r", "").isdecimal():
        raise MemGuardError(f"--lora {options.lora} has no rank: write r=16.")
    named = tuple(given.get("targets", "all-linear").split("+"))
    return FineTuning(
        options.hf,
        length=options.seq or max(options.length, default=1024),
        lora=int(given["r"]),
        targets=named[0] if named == ("all-linear",) else named,
        bits=4 if options.nf4 else 8 if options.int8 else 0,
        double_quantization=options.double_quant,
        checkpointing=options.checkpointing,
        attention=options.attention or "",
        trl=options.trl,
    )


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.strip(), value.strip()


def subject_for(options: argparse.Namespace, tuning: FineTuning) -> Subject:
    """Return what to plan for, with the optimizer, precision and accumulation of the other options."""
    from lightning_memguard.cli import names as typed
    from lightning_memguard.training.planning.by_name import subject_by_name, trainers_optimizer

    precision = options.precision or "bf16-true"
    optimizer = None
    if options.optimizer:
        optimizer = trainers_optimizer(options.optimizer) or typed.optimizer(options.optimizer)
    return subject_by_name(
        tuning,
        batch_size=options.batch_size or 1,
        precision=typed.PRECISIONS.get(precision, precision),
        optimizer=optimizer,
        accumulate=options.accumulate or 1,
    )


def largest(
    options: argparse.Namespace,
    tuning: FineTuning | None,
    subject: Subject,
    devices: Sequence[str],
    limits: Limits,
    say: Say,
) -> list[Largest]:
    """Find the largest of what was asked for on each device, by the model's name or of TARGET."""
    from lightning_memguard.core.batch.batches import length_of
    from lightning_memguard.training.planning.by_name import largest_of
    from lightning_memguard.training.planning.epochs import at_length

    def with_value(what: str, value: int) -> Subject:
        if tuning is None:
            return at_length(subject, value)
        return subject_for(options, replace(tuning, lora=value) if what == "rank" else replace(tuning, length=value))

    found = []
    for device in devices:
        for what in filter("batch".__ne__, options.largest):  # which the plan tells
            say(f"looking for the largest {what} on {device}")
            now = length_of(subject.batches.small) if what == "length" else tuning.lora if tuning else 0
            found.append(largest_of(what, now, partial(with_value, what), device, limits))
    return found


def print_largest(found: Sequence[Largest], console: Console) -> None:
    """Print a sentence for each."""
    for each in found:
        console.print(f"{each}.", soft_wrap=True)


def largest_data(each: Largest) -> dict[str, Any]:
    """The largest of something as ``--json`` prints it."""
    most = each.footprint.most_device_bytes
    return {"device": each.budget.device, "what": each.what, "largest": each.value, "at_most_bytes": most}
