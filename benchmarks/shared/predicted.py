"""What lightning_memguard predicts for the cases of the zoo, through a Trainer as a user would ask.

cd benchmarks
python -m shared.predicted mlp --optimizer adam --batch-size 64            # the prediction, as JSON
python -m shared.predicted mlp --optimizer adam --batch-size 64 --budget 1000000000   # the size it chooses
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from shared.truth import QUIET, quieten, run_module
from shared.zoo import Case, case_named

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
        guard = MemGuard(mode="tune", budget=budget_bytes, margin=0.0, min_steps_per_epoch=None)
        length = LENGTH_TO_CHOOSE_FROM
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
    lines = run_module("shared.predicted", arguments, f"The prediction for {case.name}")
    return [Predicted(**json.loads(line)) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--optimizer", nargs="+", help="default: the case's first")
    parser.add_argument("--batch-size", nargs="+", type=int, help="default: the case's middle size")
    parser.add_argument("--threads", type=int, help="torch.set_num_threads: some kernels' scratch depends on it")
    parser.add_argument("--budget", type=int, help="bytes; with it, MemGuard chooses the batch size")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    case = case_named(arguments.case)
    for optimizer in arguments.optimizer or case.optimizers[:1]:
        for batch_size in arguments.batch_size or case.batch_sizes[1:2]:
            print(json.dumps(asdict(predict_here(case, optimizer, batch_size, arguments.budget))), flush=True)


if __name__ == "__main__":
    main()
