"""A model, its data and its settings, read once -> the program that runs its step on any device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn
from torch.optim import Optimizer

from lightning_memguard.core.batch.batches import Batches, batches_from_one
from lightning_memguard.core.batch.nesting import tensors_in
from lightning_memguard.core.capture.capture import quiet
from lightning_memguard.core.capture.predict import Prediction, predict
from lightning_memguard.core.capture.program import (
    Context,
    FewLayers,
    LoopProgram,
    Program,
    check_precision,
    without_memory,
)
from lightning_memguard.core.decision.decision import check_count
from lightning_memguard.core.device.measurements import Store, learned_from
from lightning_memguard.core.gpus import Gpu, is_named
from lightning_memguard.core.layers.layers import run_model
from lightning_memguard.core.replay.learned import Learned
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.simulation.fake_cuda import simulated_cuda
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.data.loaders import LoaderInfo, find
from lightning_memguard.training.data.samples import note_on_cache, sample
from lightning_memguard.training.facts.lightning_port import data_source
from lightning_memguard.training.facts.lightning_types import is_a, lightning_of
from lightning_memguard.training.facts.run_facts import data_ranks, read_run_facts
from lightning_memguard.training.planning.target import Target
from lightning_memguard.training.strategies import deepspeed, fabric
from lightning_memguard.training.strategies.sharded import CAPTURED, Layout, communicators
from lightning_memguard.units import counted, format_bytes

if TYPE_CHECKING:
    from pytorch_lightning import LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.strategies import Strategy

    from lightning_memguard.core.capture.program import Change

Step = Callable[[Any, Any], Any]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
_OF_RANKS = ("strategy", "devices", "num_nodes")


@dataclass(frozen=True)
class Subject:
    """Model, data and settings to plan for, read once for all devices.

    Attributes:
        model: a LightningModule, or any module with ``step``, ``optimizer`` and ``context``; see `estimate` for these.
        batches: its batches, of any size; ``batch_size`` is the size asked for.
        trainer: more settings of a Trainer, such as ``{"accumulate_grad_batches": 4}``.
        loader_info: the loaders that the batches were drawn from, if any.
        unit: only multiples of this are batch sizes of these loaders.
        strategy: one that shards, or Fabric's; None for any other, which is among the Trainer's settings.
        devices: how many processes train together on each of ``nodes``.
        changes: done to each copy of a LightningModule before it is recorded.
        notes: assumptions, in plain words.
        differ: whether batches of its data differ in size, see `RunSamples`.
        few: the model with fewer layers, see `LoopProgram`.
    """

    model: nn.Module
    batches: Batches
    batch_size: int
    precision: str = "32-true"
    trainer: Mapping[str, Any] = field(default_factory=dict)
    step: Step | None = None
    optimizer: MakeOptimizer | None = None
    context: Context = nullcontext
    training: bool = True
    datamodule: LightningDataModule | None = None
    loader_info: LoaderInfo | None = None
    unit: int = 1
    strategy: Strategy | None = None
    devices: int = 1
    nodes: int = 1
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    differ: bool = False
    few: FewLayers | None = None

    @property
    def layout(self) -> Layout | None:
        """The ranks of a strategy that shards, of which one is captured."""
        return Layout.of(self.strategy, self.devices, self.nodes)

    @property
    def ranks(self) -> int:
        """How many processes train together, each on samples of its own."""
        return data_ranks(self.strategy, self.devices * self.nodes, self.devices)

    @property
    def communicators(self) -> int:
        """How many groups of ranks this one talks to."""
        return communicators(self.strategy) if self.devices * self.nodes > 1 else 0

    @property
    def runs_in_lightning(self) -> bool:
        """Whether Lightning's own loops run its step."""
        return self.training and is_lightning(self.model)

    @property
    def shapes(self) -> str:
        """The batch at that size in words, as ``8 x 3 x 224 x 224 float32``."""
        tensors = tensors_in(without_memory(self.batches, self.batch_size))
        return ", ".join(f"{' x '.join(map(str, each.shape)) or 'scalar'} {str(each.dtype)[6:]}" for each in tensors)

    @property
    def fixed_because(self) -> str:
        """Why its batch size cannot be changed, in plain words; empty if it can."""
        return self.loader_info.fixed_because if self.loader_info else ""


# -- reading


def subject_of(
    model: nn.Module,
    batch: object = None,
    *,
    batch_size: int | None = None,
    precision: str = "32-true",
    step: Step | None = None,
    optimizer: MakeOptimizer | None = None,
    context: Context | None = None,
    datamodule: LightningDataModule | None = None,
    trainer: Mapping[str, Any] | None = None,
    training: bool = True,
) -> Subject:
    """Read what to plan for, once for all devices; the arguments are the fields of `Subject`.

    Without a ``batch``, one is drawn from ``datamodule``, which is prepared and set up, or from the module's own
    ``train_dataloader``. Without a ``batch_size``, it is the batch's or the loader's. ``model`` may be on the meta
    device, and ``optimizer`` may replace a LightningModule's own. ``strategy``, ``devices`` and ``num_nodes`` are among
    the settings of ``trainer``, for a plain module as well.

    Raises:
        MemGuardError: an argument is unknown, or contradicts another.
        CannotTraceError: no batch can be drawn.
    """
    shapes: dict[str, tuple[object, str]] = {"step": (step, "(model, batch) -> loss")}
    shapes |= {"optimizer": (optimizer, "(parameters) -> it"), "context": (context, "() -> a context manager")}
    for argument, (given, shape) in shapes.items():
        if given is not None and not callable(given):
            raise MemGuardError(f"{argument}= is a {type(given).__name__}; give a class or a function: {shape}.")
    if batch_size is not None:
        check_count("batch_size", batch_size)
    check_precision(precision)
    if not is_lightning(model):
        others = [name for name in trainer or {} if name not in _OF_RANKS]
        if others:
            raise MemGuardError(f"A {type(model).__name__} has no Trainer to set {', '.join(others)} for.")
    elif training and (step, context) != (None, None):
        raise MemGuardError("A LightningModule brings its own training_step and backward: leave out step and context.")
    elif training and optimizer is not None:
        model, optimizer = _with_optimizer(model, optimizer), None
    batches = Batches(None, None, 1, 2) if batch is None else batches_from_one(batch)
    size = batch_size or batches.small_size
    context = context or nullcontext
    subject = Subject(model, batches, size, precision, {}, step, optimizer, context, training, datamodule)
    subject = _with_trainer(subject, trainer or {})
    return _with_loader(subject, batch_size) if batch is None else subject


def _with_loader(subject: Subject, batch_size: int | None) -> Subject:
    """Return the subject with batches drawn from the datamodule, or from the module's own loader."""
    model, datamodule = subject.model, subject.datamodule
    if datamodule is None and not is_lightning(model):
        raise MemGuardError(f"A {type(model).__name__} brings no data: give an example batch, or a datamodule.")
    trainer = trainer_for(subject.model, subject.precision, None, **subject.trainer)
    if datamodule is not None:
        datamodule.prepare_data()
        datamodule.trainer = trainer
        datamodule.setup("fit")
    data_source(trainer.fit_loop).instance = model if datamodule is None else datamodule
    facts = read_run_facts(trainer)
    if subject.strategy is not None:
        divides = subject.ranks > 1 and subject.trainer.get("use_distributed_sampler", True)
        facts = replace(facts, data_ranks=subject.ranks, uses_distributed_sampler=divides)
    loader_info = find(facts, "train")
    sampled = sample(loader_info)
    known = sampled.batch_size
    if loader_info.fixed_because and batch_size not in (None, known):
        raise MemGuardError(
            f"batch_size={batch_size} was asked for, and {loader_info.fixed_because}: its batches hold {known}. Leave "
            "batch_size out, or give an example batch in place of the loader."
        )
    drawn: dict[str, Any] = {"batches": sampled.batches[0], "unit": sampled.unit}
    drawn |= {"notes": sampled.notes, "differ": sampled.differ}
    return replace(subject, batch_size=batch_size or known, loader_info=loader_info, **drawn)


def _with_optimizer(model: LightningModule, optimizer: MakeOptimizer) -> LightningModule:
    """A LightningModule that shares all with this one but its ``configure_optimizers``; this one stays as it was."""

    def configure_optimizers(self: LightningModule) -> Optimizer:
        return optimizer([each for each in self.parameters() if each.requires_grad])

    kind = type(model)
    other = kind.__new__(kind)
    other.__dict__.update(model.__dict__)
    other.__class__ = type(kind.__name__, (kind,), {"configure_optimizers": configure_optimizers})
    other.__dict__.pop("configure_optimizers", None)  # as LightningCLI puts one on the object
    return other


def _with_trainer(subject: Subject, settings: Mapping[str, Any]) -> Subject:
    """Return the subject with settings of a Trainer that needs no device; a strategy that shards is kept apart."""
    trainer, model = dict(settings), subject.model
    strategy: Any = trainer.pop("strategy", None) or "auto"
    devices, nodes = _count(trainer.pop("devices", 1)), int(trainer.pop("num_nodes", None) or 1)
    alone = (strategy, devices, nodes) == ("auto", 1, 1)
    if not is_lightning(model):
        strategy = None if alone else fabric.strategy_of(strategy)
    elif fabric.is_fabrics(strategy):
        raise MemGuardError(
            f"{type(strategy).__name__} is Fabric's, and a LightningModule is trained by a Trainer: give that of "
            f"{lightning_of(model).__name__}.strategies."
        )
    else:
        if isinstance(strategy, str) and strategy.startswith(("fsdp", "deepspeed")):
            strategy = _named_strategy(model, strategy)
        if is_a(strategy, "ModelParallelStrategy") and not own_hook(model, "configure_model"):
            raise MemGuardError(
                f"ModelParallelStrategy leaves it to configure_model to shard the module, and {type(model).__name__} "
                "has none: add one that calls fully_shard or parallelize_module, or try the strategy fsdp."
            )
        if not is_a(strategy, *CAPTURED, "DeepSpeedStrategy"):
            trainer |= {} if alone else {"strategy": strategy, "devices": devices, "num_nodes": nodes}
            strategy = None
    return replace(subject, trainer=trainer, strategy=strategy, devices=devices, nodes=nodes)


def on_ranks(subject: Subject, strategy: str | Strategy, devices: int, nodes: int) -> Subject:
    """Return the subject trained on so many devices of so many nodes.

    Raises:
        MemGuardError: it is not a training, or the strategy is unknown.
    """
    if not subject.training:
        raise MemGuardError("strategy, devices and num_nodes are those of a training, which this is not.")
    check_count("devices", devices)
    check_count("num_nodes", nodes)
    ranks = {"strategy": strategy, "devices": devices, "num_nodes": nodes}
    subject = _with_trainer(subject, {**subject.trainer, **ranks})
    info = subject.loader_info  # its data is divided among the ranks
    if info is None or not subject.trainer.get("use_distributed_sampler", True):
        return subject
    sources = tuple(replace(source, ranks=subject.ranks) for source in info.sources)
    return replace(subject, loader_info=replace(info, sources=sources))


def _named_strategy(model: nn.Module, name: str) -> Strategy:
    registry = lightning_of(model).strategies.StrategyRegistry
    if name not in registry:
        known = ", ".join(each for each in registry.available_strategies() if each.startswith(("fsdp", "deepspeed")))
        raise MemGuardError(f"strategy={name!r} is not one of Lightning's: {known}.")
    if name.startswith("deepspeed"):
        if not deepspeed.is_installed():
            raise MemGuardError(f"strategy={name!r}: {deepspeed.INSTALL}")
        deepspeed.load()
    with quiet():
        return registry.get(name)  # type: ignore[no-any-return]


def _count(devices: str | int | list[int] | None) -> int:
    """How many devices a Trainer's ``devices`` means; "all" count as one, since it is not known how many these are."""
    if isinstance(devices, str) and "," in devices:
        return len(devices.split(","))
    if isinstance(devices, (list, tuple)):
        return len(devices)
    return 1 if devices in (None, "auto", -1, "-1") else int(devices)


def is_lightning(model: object) -> TypeGuard[LightningModule]:
    """Whether it is a LightningModule, of either package."""
    try:
        return isinstance(model, lightning_of(model).LightningModule)
    except CannotTraceError:
        return False


# -- running


def program_of(subject: Subject, target: Target) -> Program:
    """Return the program of a subject on a device: a step in Lightning's order, or in PyTorch's loop, or an inference.

    Raises:
        MemGuardError: a plain module comes without ``step``, or no Trainer can be made with these settings.
    """
    if subject.runs_in_lightning:
        return lightning_program(subject, target)
    model = subject.model
    if subject.training and subject.step is None:
        raise MemGuardError(f"A {type(model).__name__} is not a LightningModule: give step=(model, batch) -> loss.")
    hook, device = own_hook(model, *_EVALUATES), target.device
    step = subject.step or (lambda each, batch: getattr(each, hook)(batch, 0) if hook else each(batch))
    loop = model, subject.batches, step, subject.optimizer, device, subject.precision, subject.training, target.gpu
    if subject.strategy is None:
        accumulated = subject.trainer.get("accumulate_grad_batches", 1)
        return LoopProgram(*loop, context=subject.context, accumulate_grad_batches=accumulated, few=subject.few)
    ranks: dict[str, Any] = {"strategy": subject.strategy, "devices": subject.devices, "nodes": subject.nodes}
    return fabric.FabricProgram(*loop, context=subject.context, **ranks)


def predicted(
    subject: Subject,
    target: Target,
    *,
    scalable: bool = False,
    capacity_bytes: int | None = None,
    measured: Path | None = None,
) -> Prediction:
    """Capture the step as it would run on a device; correct it by a file of ``measured`` peaks, if there is one.

    Raises:
        CannotTraceError: the step cannot be predicted.
        MemGuardError: the file of measurements cannot be read.
    """
    settings = replace(AllocatorSettings.for_device(target.device.type, os.environ), capacity_bytes=capacity_bytes)
    program, size = program_of(subject, target), subject.batch_size
    prediction = predict(program, size, settings, context_bytes=target.context_bytes, scalable=scalable)
    curve = prediction.curve
    if curve.method == "states":
        states = prediction.footprint_at(size).peak_allocated_bytes
        raise CannotTraceError(
            f"The step cannot be predicted: {'; '.join(curve.notes)}. The batch it was given: {subject.shapes}. "
            f"What stays without it (parameters, gradients, optimizer state) is {format_bytes(states)}."
        )
    on_cache = note_on_cache(settings) if subject.differ else ()
    notes = tuple(dict.fromkeys((*curve.notes, *target.notes, *subject.notes, *on_cache)))
    learned = _learned(curve.signature, target.gpu, measured) if measured else None
    return Prediction(program, replace(curve, notes=notes).on_terms(learned=learned))


def _learned(step: str, gpu: Gpu | None, file: Path) -> Learned:
    """Return what a file of measurements tells of a step on a GPU, whatever software it ran on.

    Raises:
        MemGuardError: the file cannot be read.
    """
    if not file.exists():
        raise MemGuardError(f"{file} does not exist; `memguard history` says where a machine keeps its measurements.")
    found, damaged = Store(file).read()
    notes = [f"{counted(damaged, 'line')} of {file} cannot be read and is not used"] if damaged else []
    same = [each for each in found if step and each.step == step]
    ours = [each for each in same if gpu is not None and is_named(gpu, each.setting.gpu)]
    if not ours:
        there = ", ".join(sorted({each.setting.gpu for each in same}))
        notes.append(f"{file} has no measurement of this step on this GPU{f', but on {there}' if there else ''}")
    return replace(learned_from(ours, step, gpu.name if gpu else ""), notes=tuple(notes))


def lightning_program(subject: Subject, target: Target) -> LightningProgram:
    """The training step of a LightningModule."""
    model: Any = subject.model
    loader_info, trainer = subject.loader_info, trainer_for(model, subject.precision, target.gpu, **subject.trainer)
    return LightningProgram(
        trainer,
        model,
        subject.batches,
        target.device,
        batches_per_epoch=loader_info.batches_per_epoch if loader_info else lambda _: 1,
        datamodule=subject.datamodule,
        gpu=target.gpu,
        strategy=subject.strategy or trainer.strategy,
        changes=subject.changes,
        layout=subject.layout,
        ranks=subject.devices * subject.nodes,
    )


def trainer_for(model: nn.Module, precision: str, gpu: Gpu | None, **settings: object) -> Trainer:
    """A Trainer of the package of ``model`` to read settings from; it never runs, and needs no device.

    Raises:
        MemGuardError: the precision is unknown, or Lightning refuses the settings.
    """
    pl = lightning_of(model)
    check_precision(precision)
    chosen: dict[str, object] = {"precision": precision}
    if gpu is not None and precision.endswith("-mixed"):
        with simulated_cuda(gpu):  # or its gradient scaler turns itself off
            chosen = {"plugins": [pl.plugins.MixedPrecision(precision, "cuda")]}
    arguments = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **chosen, **settings}
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    try:
        with quiet():
            return pl.Trainer(**silent, **arguments)  # type: ignore[no-any-return]
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        reason = str(error).strip() or type(error).__name__
        raise MemGuardError(f"No Trainer can be made with {given}: {reason}") from error


# -- inference


def inference_of(subject: Subject) -> Subject:
    """Return the subject as one inference of its model on its batch."""
    step = _forward(subject)
    return replace(subject, training=False, trainer={}, step=step, loader_info=None, strategy=None, devices=1, nodes=1)


def _forward(subject: Subject) -> Step | None:
    """How to run the model alone; None for a LightningModule that says so itself."""
    model, batch = subject.model, subject.batches.small
    if not is_lightning(model) or own_hook(model, *_EVALUATES):
        return subject.step
    if not own_hook(model, "forward"):  # its step is all it can run
        return run_model
    if isinstance(batch, Mapping):
        return lambda module_copy, given: module_copy(**given)
    if isinstance(batch, (list, tuple)) and len(batch) > 1:  # the last is what to learn
        return lambda module_copy, given: module_copy(*given[:-1])
    return None


_EVALUATES = ("predict_step", "validation_step")


def own_hook(model: nn.Module, *hooks: str) -> str:
    """The first of these hooks that a LightningModule has of its own; empty if there is none."""
    base = lightning_of(model).LightningModule if is_lightning(model) else type(model)
    return next((hook for hook in hooks if getattr(type(model), hook, None) is not getattr(base, hook, None)), "")
