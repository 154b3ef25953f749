"""The settings of one run, read from its Trainer once: later stages take these facts, never the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_memguard.core.decision.decision import LimitedBy
from lightning_memguard.training.facts import lightning_port as lightning
from lightning_memguard.training.facts.lightning_types import is_a

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningDataModule, Trainer
    from pytorch_lightning.loggers import Logger
    from pytorch_lightning.strategies import Strategy

Stage = Literal["fit", "validate", "test", "predict"]
Role = Literal["train", "val", "validate", "test", "predict"]
"""Role of loaders: training or validation of a fit, or that of ``trainer.validate``, ``test``, ``predict``."""

LIMIT_NAMES: dict[Role, LimitedBy] = {
    "train": "limit_train_batches",
    "val": "limit_val_batches",
    "validate": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}
ROLES: dict[Stage, Role] = {"fit": "train", "validate": "validate", "test": "test", "predict": "predict"}


@dataclass(frozen=True)
class DataSource:
    """Source of a loop's loaders: those given to the Trainer, or a hook of the module or datamodule."""

    instance: object
    hook: str  # such as "train_dataloader"


@dataclass(frozen=True)
class RunFacts:
    """The settings of one run; fields not listed here mean what they mean on the Trainer.

    Attributes:
        stage: what runs.
        device: the device of this process.
        data_ranks: how many ranks train on samples of their own; the others of ``world_size`` share those of one.
        accumulate_grad_batches: batches per optimizer step, as set now.
        max_steps: -1 for no limit, and in a rehearsal, which sets its own.
        validates: whether a fit runs validation.
        val_check_interval: None if validation comes by time, so that it may come at any batch.
        sanity_steps: ``num_sanity_val_steps``.
        check_val_every_n_epoch: None if the interval counts batches over all epochs.
        limits: ``limit_train_batches`` and similar, by role.
        uses_distributed_sampler: whether Lightning spreads each loader's samples over the processes.
        sources: where each loop gets its loaders.
        leaves_files: False for a trial (``fast_dev_run``, ``barebones``), and on ranks other than zero.
    """

    stage: Stage
    device: torch.device
    strategy: Strategy
    datamodule: LightningDataModule | None
    callbacks: tuple[Callback, ...]
    world_size: int
    data_ranks: int
    global_rank: int
    accumulate_grad_batches: int
    max_steps: int
    validates: bool
    val_check_interval: int | float | None
    check_val_every_n_epoch: int | None
    sanity_steps: int | float
    overfit_batches: int | float
    is_rehearsal: bool
    limits: Mapping[Role, int | float]
    uses_distributed_sampler: bool
    sources: Mapping[Role, DataSource]
    loggers: Sequence[Logger]
    default_root_dir: str
    leaves_files: bool

    @property
    def role(self) -> Role:
        """Role of the loaders that the run iterates over."""
        return ROLES[self.stage]

    def divided(self, pieces: int) -> RunFacts:
        """Return the settings of a fit whose batches are divided: those that count its batches count the pieces."""
        limit, every = self.limits["train"], self.val_check_interval
        scaled = every * pieces if isinstance(every, int) else every
        limits = {**self.limits, "train": limit * pieces if isinstance(limit, int) else limit}
        return replace(self, limits=limits, val_check_interval=scaled)


LOOPS: dict[Role, Callable[[Trainer], Any]] = {
    "train": lambda trainer: trainer.fit_loop,
    "val": lambda trainer: trainer.fit_loop.epoch_loop.val_loop,
    "validate": lambda trainer: trainer.validate_loop,
    "test": lambda trainer: trainer.test_loop,
    "predict": lambda trainer: trainer.predict_loop,
}


def read_run_facts(trainer: Trainer, stage: Stage = "fit") -> RunFacts:
    """Read a Trainer whose run is set up, or that never runs."""
    return RunFacts(
        stage=stage,
        device=trainer.strategy.root_device,
        strategy=trainer.strategy,
        datamodule=getattr(trainer, "datamodule", None),
        callbacks=tuple(getattr(trainer, "callbacks", ())),
        world_size=trainer.world_size,
        data_ranks=data_ranks(trainer.strategy, trainer.world_size),
        global_rank=trainer.global_rank,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        max_steps=-1 if trainer.fast_dev_run else trainer.max_steps,  # type: ignore[attr-defined]  # set by a connector
        validates=trainer.enable_validation,
        val_check_interval=lightning.check_interval(trainer),
        check_val_every_n_epoch=trainer.check_val_every_n_epoch,
        sanity_steps=trainer.num_sanity_val_steps,
        is_rehearsal=bool(trainer.fast_dev_run),  # type: ignore[attr-defined]  # set by a connector
        overfit_batches=trainer.overfit_batches,  # type: ignore[attr-defined]  # set by a connector
        limits={role: getattr(trainer, name) for role, name in LIMIT_NAMES.items()},
        uses_distributed_sampler=lightning.divides_samples(trainer),
        sources={role: _source(loop(trainer)) for role, loop in LOOPS.items()},
        loggers=trainer.loggers,
        default_root_dir=trainer.default_root_dir,
        # fast_dev_run is set by a connector
        leaves_files=trainer.is_global_zero and not (trainer.fast_dev_run or trainer.barebones),  # type: ignore[attr-defined]
    )


def takes_steps(trainer: Trainer) -> bool:
    """Whether a fit has any step to take, as far as its settings tell."""
    return trainer.max_epochs != 0 and trainer.max_steps != 0 and trainer.limit_train_batches != 0


def data_ranks(strategy: Any, world_size: int, devices: int = 0) -> int:
    """How many ranks train on samples of their own: those of a tensor-parallel group share theirs."""
    if not is_a(strategy, "ModelParallelStrategy"):
        return world_size
    tensor = lightning.tensor_ranks(strategy)
    return max(1, world_size // max(1, int((devices or strategy.num_processes) if tensor == "auto" else tensor)))


def _source(loop: Any) -> DataSource:
    source = lightning.data_source(loop)
    return DataSource(source.instance, source.name)
