"""The options of a command -> what to plan for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from lightning_memguard.cli import names as typed
from lightning_memguard.cli.config import Config, read_config
from lightning_memguard.cli.status import Say
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.training.facts.lightning_types import lightning_of
from lightning_memguard.training.planning.subject import Subject, inference_of, is_lightning, own_hook, subject_of

_T = TypeVar("_T")


def read_subject(options: argparse.Namespace, say: Say, *, meta: bool = True) -> Subject:
    """Make the model and its batch from the options of `add_target`; ``meta``: without memory if that works."""
    if options.target is None and options.config is None:
        raise MemGuardError(
            "Pass a TARGET (module:Class or path/to/file.py:Class) before the options, or --config of a LightningCLI."
        )
    say("making the model")
    batch = typed.batch(options.input_shape, options.target_shape, options.input)
    config = _config_of(options, meta=meta)
    model, datamodule = config.model, config.datamodule
    strategy = _model_parallel(model, options) if options.data_parallel or options.tensor_parallel else options.strategy
    given = {"strategy": strategy, "devices": options.devices_per_node, "num_nodes": options.num_nodes}
    given["accumulate_grad_batches"] = options.accumulate
    trainer = {**config.trainer, **{name: value for name, value in given.items() if value is not None}}
    _refuse_one_device(trainer)
    if batch is None and datamodule is None:
        batch = _own_batch(model, options.target_shape)
    step, optimizer = None, typed.optimizer(options.optimizer) if options.optimizer else None
    if not is_lightning(model):
        step = typed.step(options.loss, has_target=bool(options.target_shape) or datamodule is not None)
        optimizer = optimizer or typed.optimizer("torch.optim.AdamW")
    precision = options.precision or config.precision
    say("reading the data")
    with typed.users_code("Reading the data"):
        subject = subject_of(
            model,
            batch,
            batch_size=options.batch_size,
            precision=typed.PRECISIONS.get(precision, precision),
            step=step,
            optimizer=optimizer,
            datamodule=datamodule,
            trainer=trainer,
        )
    return inference_of(subject) if getattr(options, "inference", False) else subject


def _config_of(options: argparse.Namespace, *, meta: bool) -> Config:
    target = typed.load(options.target) if options.target else None
    data = typed.load(options.datamodule) if options.datamodule else None
    if options.config:
        if options.args or options.data_args:
            raise MemGuardError("--args and --data-args cannot be combined with --config: change them in that file.")
        return read_config(options.config, target, data, meta=meta)
    model = typed.make(target, typed.arguments(options.args), options.target, meta=meta)
    given = typed.arguments(options.data_args)
    return Config(model, typed.build(data, given, options.datamodule) if options.datamodule else None)


def _model_parallel(model: nn.Module, options: argparse.Namespace) -> Any:
    if options.strategy is not None:
        raise MemGuardError(
            f"--data-parallel and --tensor-parallel are those of ModelParallelStrategy: leave out --strategy "
            f"{options.strategy}."
        )
    if not is_lightning(model):
        raise MemGuardError(
            f"--data-parallel and --tensor-parallel shard a LightningModule by its configure_model, and "
            f"{type(model).__name__} is a plain module: try --strategy fsdp, or estimate() with Fabric's strategy."
        )
    sizes = options.data_parallel or 1, options.tensor_parallel or 1
    ranks = (options.devices_per_node or 1) * (options.num_nodes or 1)
    if sizes[0] * sizes[1] != ranks:
        raise MemGuardError(
            f"--data-parallel {sizes[0]} x --tensor-parallel {sizes[1]} is not the number of devices, {ranks}: set "
            "--devices-per-node and --num-nodes."
        )
    return lightning_of(model).strategies.ModelParallelStrategy(*sizes)


def _refuse_one_device(trainer: Mapping[str, Any]) -> None:
    strategy, devices, nodes = (trainer.get(name) for name in ("strategy", "devices", "num_nodes"))
    if strategy not in (None, "auto") and devices in (None, "auto", -1, "-1") and nodes in (None, 1):
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise MemGuardError(
            f"The strategy {name} is for several devices, and how many is not known here: pass --devices-per-node 8, "
            "for example, and --num-nodes if there are several."
        )


def _own_batch(model: nn.Module, targets: Sequence[str]) -> object:
    """The model's example input; None if it is a LightningModule with a loader of its own."""
    example = getattr(model, "example_input_array", None)
    if example is not None and targets:
        inputs = example if isinstance(example, (list, tuple)) else (example,)
        return (*inputs, *(typed.tensor(text, "--target-shape", "int64") for text in targets))
    if example is not None:
        return example
    if own_hook(model, "train_dataloader"):
        return None
    raise MemGuardError(
        "Pass a batch: --input-shape 8,3,224,224 (and --target-shape 8:int64), or --input name=8,512:int64 for a "
        "model with named inputs, or --datamodule module:Class."
    )


def with_memory_if_needed(
    options: argparse.Namespace, subject: Subject, say: Say, run: Callable[[Subject], _T]
) -> tuple[Subject, _T]:
    """Run; if the step must run for real, with a model that has memory."""
    try:
        return subject, run(subject)
    except CannotTraceError:
        if not typed.could_have_memory(subject.model):
            raise
    say("the step needs values: making the model again, with memory")
    subject = read_subject(options, say, meta=False)
    say("running the step at small batch sizes")
    return subject, run(subject)
