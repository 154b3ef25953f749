"""Run by test_ranks.py: the same fits on two gloo processes of this machine; each rank writes what it saw."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.core.range import NOTHING
from lightning_memguard.training.run import choose, reading
from lightning_memguard.units import KIB
from tests.forks import run_all

RANK = 0


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append(len(batch[0]))
        assert self.trainer.world_size == 2, "on the copy too"
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def fit(
    guard: MemGuard,
    *,
    ckpt_path: str | None = None,
    save: str = "",
    module: Module | None = None,
    samples: int = 400,
    size: int = 4,
    validates: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """One fit on both ranks; what this one saw of it."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(samples, 16), torch.randint(0, 4, (samples,)))
    module = module or Module()
    trainer = pl.Trainer(**{
        "accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 1, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, **settings,
        "callbacks": [guard],
    })  # fmt: skip
    error, notes = "", list[str]()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            validation = DataLoader(data, batch_size=4) if validates else None
            trainer.fit(module, DataLoader(data, batch_size=size), validation, ckpt_path=ckpt_path)
            if save:
                trainer.save_checkpoint(save)
        except Exception as failure:  # noqa: BLE001 - the test asks which
            error, notes = f"{type(failure).__name__}: {failure}", getattr(failure, "__notes__", [])
    decision = guard.decision
    seen: dict[str, Any] = {
        "error": error, "notes": notes, "sizes": module.sizes, "step": trainer.global_step,
        "warned": [str(each.message) for each in told],
    }  # fmt: skip
    if decision is not None:
        seen |= {
            "outcome": decision.outcome, "size": decision.batch_size, "accumulate": decision.accumulate_grad_batches,
            "limited_by": decision.limited_by, "reason": decision.reason,
        }  # fmt: skip
        if decision.budget is not None and decision.footprint is not None:
            seen |= {
                "device": decision.budget.device, "free": decision.budget.free_bytes,
                "parts": dict(decision.footprint.parts), "fits": decision.fits,
            }  # fmt: skip
    return seen


def failing_on_rank_one() -> Any:
    """One rank's data, model or driver may fail where the other's does not."""
    if RANK == 1:
        return mock.patch.object(choose, "read_run", side_effect=ZeroDivisionError("only here"))
    return mock.patch.object(choose, "read_run", choose.read_run)


def one_fails() -> dict[str, Any]:
    with failing_on_rank_one():
        return fit(MemGuard(batch_size="largest"))


def budgets(folder: Path) -> dict[str, Any]:
    """Train at a size that one budget gives; `resume` goes on under another."""
    guard = MemGuard(batch_size="largest", budget=(100 if RANK == 0 else 200) * KIB)
    return fit(guard, save=str(folder / "resume.ckpt"))


def resume(folder: Path) -> dict[str, Any]:
    guard = MemGuard(batch_size="largest", budget=800 * KIB)
    return fit(guard, ckpt_path=str(folder / "resume.ckpt"), max_epochs=2)


class Normed(Module):
    """With batch norm, whose buffers DistributedDataParallel sends, and a layer that only every other batch uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
        self.other = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.net(batch[0])
        return nn.functional.cross_entropy(out if batch_idx % 2 else self.other(out), batch[1])


def offloaded(*ranks: int, **settings: Any) -> dict[str, Any]:
    """A short training in which the steps of some ranks keep their activations elsewhere, and its state."""
    guard, module = MemGuard(offload="always" if RANK in ranks else "never", max_batch_size=4), Normed()
    seen = fit(guard, module=module, samples=64, strategy="ddp_find_unused_parameters_true", **settings)
    state = torch.cat([each.detach().double().flatten() for each in module.state_dict().values()])
    return {**seen, "state": state.tolist(), "offloaded": [record.offloaded for record in guard.records]}


def scenarios(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        "budgets": lambda: budgets(folder),
        "one fails": one_fails,
        "one too small": lambda: fit(MemGuard(batch_size="largest", budget=(800 if RANK == 0 else 1) * KIB)),
        "effective": lambda: fit(MemGuard(budget=100 * KIB, keep_effective_batch_size=256)),
        "divided": lambda: fit(MemGuard(budget=(800 if RANK == 0 else 100) * KIB), size=200),
        "check": lambda: fit(MemGuard(mode="check", budget=1 * KIB)),
        "resume": lambda: resume(folder),
        "whole": offloaded,
        "one offloads": lambda: offloaded(1),
    }


def long_scenarios() -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        "swapped": lambda: fit(MemGuard(batch_size="largest", budget=(200 if RANK == 0 else 100) * KIB)),
        "whole": offloaded,
        "both offload": lambda: offloaded(0, 1),
        "whole, accumulated": lambda: offloaded(accumulate_grad_batches=2),
        "one offloads, accumulated": lambda: offloaded(0, accumulate_grad_batches=2),
    }


def main(rank: int, folder: Path) -> None:
    write(rank, folder, scenarios(folder))


def long_main(rank: int, folder: Path) -> None:
    write(rank, folder, long_scenarios())


def write(rank: int, folder: Path, runs: dict[str, Callable[[], dict[str, Any]]]) -> None:
    global RANK  # noqa: PLW0603
    RANK = rank
    MemGuard.__init__.__kwdefaults__["min_steps_per_epoch"] = None  # epochs of a few steps
    count_tensors_alone()
    seen = run_all(runs, in_children=("budgets", "one fails"))
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))


def count_tensors_alone() -> None:
    """Count no other memory of a process, which would be most of these budgets."""
    reading.process_bytes = lambda *_: NOTHING  # type: ignore[assignment]
