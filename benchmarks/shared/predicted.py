"""Predictions of lightning_memguard for the cases of the zoo, through a Trainer as a user would ask."""

import time
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from shared.truth import QUIET, quieten
from shared.zoo import Case

LENGTH_TO_CHOOSE_FROM = 1_000_000  # samples: no choice is limited by the dataset


@dataclass(frozen=True)
class Predicted:
    """The decision of MemGuard for one training."""

    case: str
    optimizer: str
    batch_size: int  # the one it trains at: the one asked for, or the one chosen
    peak_bytes: int
    parts: dict[str, int]
    phase: str
    method: str
    wall_seconds: float  # the whole fit of one batch


def program_of(
    module: Any, batch: Any, device: str, precision: Any = "32-true", gpu: Any = None, **settings: Any
) -> Any:
    """The training of a module, for a prediction without a Trainer's own loop around it."""
    from lightning_memguard.core.batch.batches import batches_from_one
    from lightning_memguard.training.adapter.program import LightningProgram
    from lightning_memguard.training.planning.subject import trainer_for

    trainer = trainer_for(module, precision, gpu, **settings)
    given = trainer, module, batches_from_one(batch), torch.device(device)
    return LightningProgram(*given, batches_per_epoch=lambda _: 100, gpu=gpu)


class OneBatch(pl.Callback):
    """Ends the training after a batch; with `limit_train_batches`, MemGuard would keep the batch size."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        trainer.should_stop = True


def predict_here(case: Case, optimizer: str, batch_size: int, budget: int | None = None) -> Predicted:
    """Fit one batch in this process with MemGuard in mode "check"; given a budget, let it choose the size."""
    from lightning_memguard import MemGuard  # here, so that the truth can be measured without it
    from lightning_memguard.core.device.process import process_bytes

    quieten()
    started = time.perf_counter()
    torch.manual_seed(0)
    module = case.build(optimizer)
    if budget is None:
        guard, length = MemGuard(mode="check"), batch_size * 3 * case.period
    else:
        budget += process_bytes(module.parameters(), torch.get_num_threads())[2]  # it is measured by its tensors
        guard = MemGuard(mode="tune", budget=budget, margin=0.0, min_steps_per_epoch=None)
        length = LENGTH_TO_CHOOSE_FROM
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **QUIET}
    trainer = pl.Trainer(**settings, callbacks=[guard, OneBatch()], **case.trainer_kwargs)
    trainer.fit(module, train_dataloaders=DataLoader(case.dataset(length), batch_size=batch_size))
    if guard.decision is None or guard.decision.footprint is None:
        raise RuntimeError(f"MemGuard made no prediction for {case.name} with {optimizer} at batch size {batch_size}.")
    found = guard.decision.footprint
    return Predicted(
        *(case.name, optimizer, guard.decision.batch_size, found.peak_allocated_bytes, dict(found.parts)),
        *(found.phase, found.method, time.perf_counter() - started),
    )
