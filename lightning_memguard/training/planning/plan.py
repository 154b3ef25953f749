"""A model and its batch -> what fits a device, whether the device is here or in the catalogue.

The stages of `lightning_memguard.training.run.tune`, for anyone who has a model and no run: the model and the data are
read once, then each device is asked about.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lightning_memguard.core import gpus
from lightning_memguard.core.capture.batch import Batches, batches_from_one, tensors_in
from lightning_memguard.core.capture.predict import Prediction, StepFailsError, predict
from lightning_memguard.core.capture.program import PRECISIONS, Program
from lightning_memguard.core.capture.recorder import part_bytes
from lightning_memguard.core.decision.decision import Budget, Decision, Request, check_count, check_settings, decide
from lightning_memguard.core.device.budget import read_budget
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.layers.layers import LayerTable, layer_table, run_model
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.errors import CannotTraceError, DoesNotFitError, MemGuardError
from lightning_memguard.training.adapter import sharded
from lightning_memguard.training.adapter.lightning_types import lightning_of
from lightning_memguard.training.adapter.loader_access import set_data_source
from lightning_memguard.training.adapter.program import LightningProgram, quiet
from lightning_memguard.training.adapter.run_facts import read_run_facts
from lightning_memguard.training.data.loaders import LoaderInfo, find
from lightning_memguard.training.data.samples import sample
from lightning_memguard.training.planning.estimate import Target, is_lightning, program_of, target_of, trainer_for
from lightning_memguard.units import format_bytes

Step = Callable[[Any, Any], Any]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Subject:
    """What is planned for, looked at once for all devices.

    Attributes:
        model: a LightningModule, or any module with ``step``.
        batches: its batches, of any size.
        batch_size: the size asked for.
        precision: one of Lightning's names.
        trainer: more settings of a Trainer.
        step: ``(model, batch) -> loss`` of a plain module.
        optimizer: ``(parameters) -> Optimizer`` of a plain module.
        training: False for one inference.
        datamodule: the LightningDataModule, if any.
        found: the loaders that the batches were drawn from, if any.
        unit: only multiples of this are batch sizes of these loaders.
        strategy: one that shards the states; None for any other, which stands among the Trainer's settings.
        ranks: how many processes train together.
        notes: what had to be assumed, in plain words.
    """

    model: Any
    batches: Batches
    batch_size: int
    precision: str = "32-true"
    trainer: Mapping[str, Any] = field(default_factory=dict)
    step: Step | None = None
    optimizer: MakeOptimizer | None = None
    training: bool = True
    datamodule: Any = None
    found: LoaderInfo | None = None
    unit: int = 1
    strategy: Any = None
    ranks: int = 1
    notes: tuple[str, ...] = ()

    @property
    def shapes(self) -> str:
        """The batch at that size in words, as ``8 x 3 x 224 x 224 float32``."""
        tensors = tensors_in(_without_memory(self.batches, self.batch_size))
        return ", ".join(f"{' x '.join(map(str, each.shape)) or 'scalar'} {str(each.dtype)[6:]}" for each in tensors)


@dataclass(frozen=True)
class Limits:
    """What a plan may choose from; see `plan`."""

    margin: float = 0.05
    budget_bytes: int | None = None
    min_batch_size: int = 1
    max_batch_size: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        check_settings(self.margin, self.min_batch_size, self.max_batch_size, self.multiple_of, None)


@dataclass(frozen=True)
class Plan:
    """What fits one device.

    Attributes:
        asked: the size asked for, held against the device.
        largest: the largest size that fits; None where none does, or other sizes are not known.
        prediction: the memory at any size.
        gpu: the GPU planned for; None for any other device.
        reason: why there is no ``largest``, in plain words.
        seconds: what it took to find out.
    """

    asked: Decision
    largest: Decision | None
    prediction: Prediction
    gpu: Gpu | None = None
    reason: str = ""
    seconds: float = 0.0

    @property
    def footprint(self) -> Footprint:
        """The memory at the size asked for."""
        assert self.asked.footprint is not None
        return self.asked.footprint

    @property
    def budget(self) -> Budget:
        """What the device offers."""
        assert self.asked.budget is not None
        return self.asked.budget

    @property
    def fits(self) -> bool:
        """Whether the size asked for fits."""
        return self.asked.fits

    @property
    def share(self) -> float:
        """The share of the device's memory that the size asked for may take."""
        return self.footprint.most_device_bytes / self.budget.total_bytes if self.budget.total_bytes else math.inf


def plan(
    model: Any,
    batch: Any = None,
    *,
    device: str = "cuda",
    batch_size: int | None = None,
    precision: str = "32-true",
    step: Step | None = None,
    optimizer: MakeOptimizer | None = None,
    datamodule: Any = None,
    trainer: Mapping[str, Any] | None = None,
    training: bool = True,
    margin: float = 0.05,
    budget: int | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    multiple_of: int = 1,
) -> Plan:
    """Tell whether a training fits a device, and the largest batch size that does.

    Args:
        model: see `lightning_memguard.training.planning.estimate.estimate`; it may live on the meta device.
        batch: an example batch; None to draw one from ``datamodule``, or from the module's own ``train_dataloader``.
        device: ``"cpu"``, ``"cuda"``, or the name of a GPU, which need not be there.
        batch_size: the number of samples asked for (default: the batch's, or the loader's).
        precision: one of Lightning's names, such as ``"bf16-mixed"``.
        step: ``(model, batch) -> loss``; for a plain module.
        optimizer: ``(parameters) -> Optimizer``; in place of a LightningModule's own.
        datamodule: a LightningDataModule, prepared and set up by this call.
        trainer: more settings of a Trainer, such as ``{"accumulate_grad_batches": 4}``.
        training: False for one inference.
        margin: share of the device's memory to keep free.
        budget: bytes that the training may take there; None for all that is free, or, of a GPU that is not here, all.
        min_batch_size: the smallest size to choose.
        max_batch_size: the largest.
        multiple_of: only multiples of this are chosen.

    Raises:
        MemGuardError: an argument is unknown, or contradicts another.
        CannotTraceError: the step cannot be predicted.

    Example:
        >>> found = plan(
        ...     nn.Linear(64, 64), torch.zeros(8, 64), step=lambda m, x: m(x).sum(), device="T4", max_batch_size=64
        ... )
        >>> found.fits, found.largest.batch_size, found.budget.device
        (True, 64, 'Tesla T4')
    """
    limits = Limits(margin, budget, min_batch_size, max_batch_size, multiple_of)
    subject = look(
        model,
        batch,
        batch_size=batch_size,
        precision=precision,
        step=step,
        optimizer=optimizer,
        datamodule=datamodule,
        trainer=trainer,
        training=training,
    )
    return plan_on(subject, device, limits)


# -- looking at the model and its data


def look(
    model: Any,
    batch: Any = None,
    *,
    batch_size: int | None = None,
    precision: str = "32-true",
    step: Step | None = None,
    optimizer: MakeOptimizer | None = None,
    datamodule: Any = None,
    trainer: Mapping[str, Any] | None = None,
    training: bool = True,
) -> Subject:
    """Look at what shall be planned for, once for all devices; see `plan`."""
    if batch_size is not None:
        check_count("batch_size", batch_size)
    if precision not in PRECISIONS:
        raise MemGuardError(f"precision={precision!r} is unknown; choose one of {', '.join(PRECISIONS)}.")
    settings = dict(trainer or {})
    if not is_lightning(model):
        if settings:
            raise MemGuardError(f"A {type(model).__name__} has no Trainer to set {', '.join(settings)} for.")
        if training and step is None:
            raise MemGuardError(f"A {type(model).__name__} is no LightningModule: give step=(model, batch) -> loss.")
    elif step is not None:
        raise MemGuardError("A LightningModule brings its own training_step: leave out step.")
    elif optimizer is not None:
        model, optimizer = with_optimizer(model, optimizer), None
    settings, strategy, ranks = _together(model, settings)
    subject = Subject(
        model,
        Batches(None, None, 1, 2),
        batch_size or 1,
        precision,
        settings,
        step,
        optimizer,
        training,
        datamodule,
        strategy=strategy,
        ranks=ranks,
    )
    if batch is None:
        return _with_loader(subject, batch_size)
    batches = batches_from_one(batch)
    return replace(subject, batches=batches, batch_size=batch_size or batches.small_size)


def _with_loader(subject: Subject, batch_size: int | None) -> Subject:
    """With batches drawn from the datamodule, or the module's own loader."""
    model, datamodule = subject.model, subject.datamodule
    if datamodule is None and not is_lightning(model):
        raise MemGuardError(f"A {type(model).__name__} brings no data: give an example batch, or a datamodule.")
    owner = model if datamodule is None else datamodule
    trainer = _trainer(subject, None)
    if datamodule is not None:
        datamodule.prepare_data()
        datamodule.trainer = trainer
        datamodule.setup("fit")
    set_data_source(trainer, owner)
    found = find(read_run_facts(trainer), "train")
    sampled = sample(found)
    known = found.batch_size or sampled.batches[0].small_size
    if found.fixed_because and batch_size not in (None, known):
        raise MemGuardError(
            f"batch_size={batch_size} was asked for, and {found.fixed_because}: its batches hold {known}. Leave "
            "batch_size out, or give an example batch in place of the loader."
        )
    return replace(
        subject,
        batches=sampled.batches[0],
        batch_size=batch_size or known,
        found=found,
        unit=math.lcm(found.unit, sampled.unit),
        notes=sampled.notes,
    )


def with_optimizer(model: Any, optimizer: MakeOptimizer) -> Any:
    """A LightningModule that shares all with this one but its ``configure_optimizers``; this one stays as it was."""

    def configure_optimizers(self: Any) -> torch.optim.Optimizer:
        return optimizer([each for each in self.parameters() if each.requires_grad])

    kind: Any = type(model)
    other = kind.__new__(kind)
    other.__dict__.update(model.__dict__)
    other.__class__ = type(kind.__name__, (kind,), {"configure_optimizers": configure_optimizers})
    other.__dict__.pop("configure_optimizers", None)  # as LightningCLI puts one on the object
    return other


def _together(model: Any, settings: dict[str, Any]) -> tuple[dict[str, Any], Any, int]:
    """Settings of a Trainer that needs no device; a strategy that shards, which would need them; and how many train."""
    strategy = settings.pop("strategy", None) or "auto"
    count = _count(settings.pop("devices", 1))
    nodes = int(settings.pop("num_nodes", None) or 1)
    if isinstance(strategy, str) and strategy.startswith(("fsdp", "deepspeed")):
        with quiet():
            strategy = lightning_of(model).strategies.StrategyRegistry.get(strategy)
    if sharded.shards_of(strategy, count * nodes) is not None:
        return settings, strategy, count * nodes
    if (strategy, count, nodes) == ("auto", 1, 1):
        return settings, None, 1
    return {**settings, "strategy": strategy, "devices": count, "num_nodes": nodes}, None, count * nodes


def _count(devices: Any) -> int:
    """How many devices a Trainer's ``devices`` means; all there are count as one: nobody knows how many these are."""
    if devices in (None, "auto", -1, "-1"):
        return 1
    if isinstance(devices, str):
        return len(devices.split(",")) if "," in devices else int(devices)
    return devices if isinstance(devices, int) else len(devices)


def _trainer(subject: Subject, gpu: Gpu | None) -> Any:
    try:
        return trainer_for(subject.model, subject.precision, gpu, **subject.trainer)
    except MemGuardError:
        raise
    except Exception as error:
        told = ", ".join(f"{key}={value!r}" for key, value in subject.trainer.items())
        raise MemGuardError(
            f"No Trainer can be made with {told}: {str(error).strip() or type(error).__name__}"
        ) from error


# -- asking about a device


def plan_on(subject: Subject, device: str, limits: Limits | None = None) -> Plan:
    """Tell what of a subject fits one device; see `plan`."""
    started = time.monotonic()
    limits = limits or Limits()
    prediction, budget = predict_on(subject, device, limits)
    size = subject.batch_size
    with quiet():
        prediction = _captured_at(prediction, size)
    shown = replace(_request(subject, limits), free_to_choose=False)
    asked = decide(prediction.footprint_at, budget, shown)
    reason = _fixed_because(subject) or ("" if prediction.scalable else "the memory of other sizes is not known")
    largest = None
    if not reason:
        try:
            with quiet():
                largest = _largest(prediction, budget, _request(subject, limits))
        except DoesNotFitError as error:
            reason = str(error)
    gpu = prediction.program.gpu
    return Plan(asked, largest, prediction, gpu, reason, time.monotonic() - started)


def predict_on(subject: Subject, device: str, limits: Limits | None = None) -> tuple[Prediction, Budget]:
    """Capture the step as it would run on a device, and tell what that offers.

    Raises:
        CannotTraceError: the step cannot be predicted.
    """
    limits = limits or Limits()
    known = None if _is_elsewhere(device) else _read(subject, device, limits)  # before the context is measured
    target = target_of(device)
    budget = known or _of_catalogue(target, limits)
    settings = AllocatorSettings.for_device(target.device.type, os.environ)
    shards = sharded.shards_of(subject.strategy, subject.ranks)
    scalable = not (shards or _fixed_because(subject))
    with quiet():
        program = _program(subject, target)
        prediction = predict(
            program, subject.batch_size, settings, context_bytes=target.context_bytes, scalable=scalable
        )
    if prediction.method == "states":
        raise CannotTraceError(_only_states(subject, prediction))
    notes = tuple(dict.fromkeys((*prediction.notes, *target.notes, *subject.notes)))
    prediction = replace(prediction, notes=notes)
    return (sharded.divide_by_rank(prediction, shards) if shards else prediction), budget


def layers_on(subject: Subject, device: str) -> LayerTable:
    """The table by layer of a subject, at its batch size, as its kernels on a device keep it.

    Raises:
        CannotTraceError: the model cannot be run on a copy.
    """
    target, size = target_of(device), subject.batch_size
    with quiet():
        program = _program(subject, target)
        if not isinstance(program, LightningProgram):
            batch = _without_memory(subject.batches, size)
            return layer_table(subject.model, batch, batch_size=size, step=subject.step, gpu=target.gpu)
        try:
            return program.layer_table(size)
        except Exception as error:
            raise CannotTraceError(
                f"The layers of {type(subject.model).__name__} cannot be told, as a copy of its step did not run on "
                f"fake tensors ({type(error).__name__}: {str(error).strip()[:200]}). The batch: {subject.shapes}."
            ) from error


def _without_memory(batches: Batches, size: int) -> Any:
    return batches.of(size, lambda shape, like: torch.empty(shape, dtype=like.dtype, device="meta"))


def inference_of(subject: Subject) -> Subject:
    """The same model, in one inference on the same batch."""
    return replace(subject, training=False, trainer={}, step=_forward(subject), found=None, strategy=None, ranks=1)


def _forward(subject: Subject) -> Step | None:
    """How to run the model alone; None for a LightningModule that says so itself."""
    model, batch = subject.model, subject.batches.small
    if not is_lightning(model):
        return subject.step
    base = lightning_of(model).LightningModule
    if any(getattr(type(model), hook) is not getattr(base, hook) for hook in ("predict_step", "validation_step")):
        return None
    if type(model).forward is base.forward:  # it has none: its step is all it can run
        return run_model
    if isinstance(batch, Mapping):
        return lambda module_copy, given: module_copy(**given)
    if isinstance(batch, (list, tuple)) and len(batch) > 1:  # the last is what to learn
        return lambda module_copy, given: module_copy(*given[:-1])
    return None


def _program(subject: Subject, target: Target) -> Program:
    if not (subject.training and is_lightning(subject.model)):
        return program_of(
            subject.model,
            subject.batches,
            subject.step,
            subject.optimizer,
            target,
            subject.precision,
            subject.training,
        )
    found, trainer = subject.found, _trainer(subject, target.gpu)
    sized = found.batches if found is not None and found.dataset_size is not None else None
    return LightningProgram(
        trainer,
        subject.model,
        subject.batches,
        target.device,
        batches_per_epoch=_one_batch if found is None else sized,
        datamodule=subject.datamodule,
        gpu=target.gpu,
        strategy=subject.strategy or trainer.strategy,
    )


def _one_batch(_: int) -> int:
    return 1


def check_device(name: str) -> None:
    """Refuse a name that is no device, before anything is made for it.

    Raises:
        MemGuardError: it is neither a device of torch's nor a GPU of the catalogue.
    """
    try:
        kind = torch.device(name).type
    except (RuntimeError, TypeError):
        gpus.find(name)
        return
    if kind not in ("cpu", "cuda", "mps", "xpu"):
        target_of(name)  # which says what is wrong with it


def _is_elsewhere(device: str) -> bool:
    """Whether a name means a GPU that is not here."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        return True
    return kind == "cuda" and not torch.cuda.is_available()


def _read(subject: Subject, name: str, limits: Limits) -> Budget:
    device = torch.device(name)
    if device.type not in ("cpu", "cuda", "mps", "xpu"):
        target_of(name)  # says what is wrong with it
    own = {"model": [*subject.model.parameters(), *subject.model.buffers()]}
    held = part_bytes(own, device.type)["model"]
    return read_budget(device, budget=limits.budget_bytes, margin=limits.margin, already_held_bytes=held)


def _of_catalogue(target: Target, limits: Limits) -> Budget:
    gpu = target.gpu
    assert gpu is not None
    free, source = gpu.memory_bytes, "catalogue"
    if limits.budget_bytes is not None:
        free, source = limits.budget_bytes, "given"
    if free > gpu.memory_bytes:
        raise MemGuardError(
            f"budget={format_bytes(free)} is more than the {gpu.name} has: {format_bytes(gpu.memory_bytes)}. Give "
            "less, or a larger GPU."
        )
    return Budget(gpu.memory_bytes, free, int(free * limits.margin), source, gpu.name)


def _only_states(subject: Subject, prediction: Prediction) -> str:
    states = prediction.footprint_at(subject.batch_size).peak_allocated_bytes
    return (
        f"The step cannot be predicted: {'; '.join(prediction.notes)}. The batch it was given: {subject.shapes}. What "
        f"stays without it (parameters, gradients, optimizer state) is {format_bytes(states)}."
    )


def _fixed_because(subject: Subject) -> str:
    return subject.found.fixed_because if subject.found is not None else ""


_MOST_SAMPLES = 1_000_000  # no training takes more at once


def _request(subject: Subject, limits: Limits) -> Request:
    found = subject.found
    return Request(
        batch_size=subject.batch_size,
        min_batch_size=limits.min_batch_size,
        max_batch_size=limits.max_batch_size or _MOST_SAMPLES,
        multiple_of=math.lcm(limits.multiple_of, subject.unit),
        dataset_size=found.dataset_size if found is not None else None,
        accumulate_grad_batches=subject.trainer.get("accumulate_grad_batches", 1),
        ranks=subject.ranks,
    )


def _captured_at(prediction: Prediction, size: int) -> Prediction:
    """With the trace of one size as it was captured, should it differ from what the others let one expect.

    It does for a single sample, whose tensors of length 1 need no copies to lie in order. What the others grow like
    stands for all else, and is proven where it is used.
    """
    proven = prediction.proven_at(size)
    if proven is prediction:
        return prediction
    return replace(prediction, traces={**prediction.traces, size: proven.traces[size]})


def _largest(prediction: Prediction, budget: Budget, request: Request) -> Decision:
    """Decide, and prove the size; where the step does not run at it, one divisible by 2, 4, ... may do."""
    for power in range(5):
        even = replace(request, multiple_of=math.lcm(request.multiple_of, 1 << power))
        decision = decide(prediction.footprint_at, budget, even)
        try:
            proven = prediction.proven_at(decision.batch_size)
        except StepFailsError as error:
            failure = error
            continue
        return decision if proven is prediction else decide(proven.footprint_at, budget, even)
    raise failure
