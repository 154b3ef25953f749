"""What lightning_memguard predicts for the cases of the zoo, through a Trainer as a user would ask."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from shared.truth import QUIET, quieten
from shared.zoo import Case

SCRIPT = Path(__file__).parents[1] / "predicted.py"  # what a fresh process runs
LENGTH_TO_CHOOSE_FROM = 1_000_000  # samples: no choice is limited by the dataset


@dataclass(frozen=True)
class Predicted:
    """What MemGuard decided for one training."""

    case: str
    optimizer: str
    batch_size: int  # the one it trains at: the one asked for, or the one chosen
    peak_bytes: int
    parts: dict[str, int]
    phase: str
    method: str
    wall_seconds: float  # the whole fit of one batch


def predict_here(case: Case, optimizer: str, batch_size: int, budget_bytes: int | None = None) -> Predicted:
    """Fit one batch in this process with MemGuard in mode "check"; given a budget, let it choose the size."""
    from lightning_memguard import MemGuard  # here, so that the truth can be measured without it
    from lightning_memguard.core.device.process import process_bytes

    quieten()
    started = time.perf_counter()
    torch.manual_seed(0)
    module = case.build(optimizer)
    if budget_bytes is None:
        guard, length = MemGuard(mode="check"), batch_size * 3 * case.period
    else:
        budget_bytes += process_bytes(module.parameters(), torch.get_num_threads())[2]  # it is measured by its tensors
        guard, length = MemGuard(mode="tune", budget=budget_bytes, margin=0.0), LENGTH_TO_CHOOSE_FROM
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=1,
        **QUIET,
        callbacks=[guard],
        **case.trainer_kwargs,
    )
    trainer.fit(module, train_dataloaders=DataLoader(case.dataset(length), batch_size=batch_size))
    if guard.decision is None or guard.decision.footprint is None:
        raise RuntimeError(f"MemGuard made no prediction for {case.name} with {optimizer} at batch size {batch_size}.")
    footprint = guard.decision.footprint
    return Predicted(
        case=case.name,
        optimizer=optimizer,
        batch_size=guard.decision.batch_size,
        peak_bytes=footprint.peak_allocated_bytes,
        parts=dict(footprint.parts),
        phase=footprint.phase,
        method=footprint.method,
        wall_seconds=time.perf_counter() - started,
    )


def predict_all(
    case: Case,
    optimizers: Sequence[str],
    batch_sizes: Sequence[int],
    threads: int | None = None,
    budget_bytes: int | None = None,
) -> list[Predicted]:
    """Predict for every optimizer and batch size, one after another in one fresh process."""
    arguments = [case.name, "--optimizer", *optimizers, "--batch-size", *map(str, batch_sizes)]
    arguments += ["--threads", str(threads)] if threads else []
    arguments += ["--budget", str(budget_bytes)] if budget_bytes else []
    process = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise RuntimeError(f"The prediction for {case.name} failed:\n{process.stderr[-2000:]}")
    return [Predicted(**json.loads(line)) for line in process.stdout.splitlines() if line.startswith("{")]
