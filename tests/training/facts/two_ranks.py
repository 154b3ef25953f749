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
from lightning_memguard.training.run import profile, tune
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
    samples: int = 1000,
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
        return mock.patch.object(tune, "read_run", side_effect=ZeroDivisionError("only here"))
    return mock.patch.object(tune, "read_run", tune.read_run)


def one_fails() -> dict[str, Any]:
    with failing_on_rank_one():
        return fit(MemGuard())


def resume(folder: Path) -> dict[str, Any]:
    """Train at a size that one budget gives, and go on under another."""
    path = str(folder / "resume.ckpt")
    first = fit(MemGuard(budget=200 * KIB), save=path)
    again = fit(MemGuard(budget=800 * KIB), ckpt_path=path, max_epochs=2)
    return {"first": first, "again": again}


def samples_of(x: torch.Tensor) -> int:
    """How many samples a part really has: to the step it seems to be the whole batch."""
    with torch._C.DisableTorchFunction():
        return int(x.shape[0])


def is_real(module: Module) -> bool:
    """Whether it is the user's: copies in captures never fail."""
    return type(module.trainer) is pl.Trainer


class Failing(Module):
    """Runs out of memory on rank 0, on rank 1, on both, and on none, in turns; ``always``: in every batch of four."""

    def __init__(self, *, always: bool = False) -> None:
        super().__init__()
        self.always = always

    def on_train_batch_start(self, *_: Any) -> None:
        if not self.always and is_real(self):  # try each batch as a whole, whatever has failed before
            (guard,) = (each for each in self.trainer.callbacks if isinstance(each, MemGuard))
            guard._run._rescuer.policy.too_large_bytes = float("inf")  # type: ignore[union-attr]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        failing = ((), (0,), (1,), (0, 1))[batch_idx % 4]
        if (self.always or RANK in failing) and is_real(self):
            self.fail(samples_of(batch[0]))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def fail(self, samples: int) -> None:
        if samples == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")


class Again(Failing):
    """With a buffer, which DistributedDataParallel sends; the part of two samples fails too, when it is to count."""

    visits = 0  # of parts of two samples, since a whole batch: not the module's, whose state a rescue puts back

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def fail(self, samples: int) -> None:
        Again.visits = 0 if samples == 4 else Again.visits + (samples == 2)
        if samples == 4 or (samples == 2 and Again.visits == 2):
            raise torch.OutOfMemoryError("CUDA out of memory")


class InBackward(Failing):
    """Accumulates four batches, and runs out of memory once it has its first gradient: on rank 0 in the second, on
    rank 1 in the third, and, if it ``sends``, on both in the last, whose gradients are sent."""

    def __init__(self, *, sends: bool = False) -> None:
        super().__init__()
        self.sends, self.plants = sends, False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.plants = False
        loss = super().training_step(batch, batch_idx)
        self.plants = self.plants and (self.sends or batch_idx % 4 < 3)
        return loss

    def fail(self, samples: int) -> None:
        self.plants = samples == 4

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        hook = self.net[2].weight.register_post_accumulate_grad_hook(self.run_out)
        try:
            super().backward(loss, *args, **kwargs)
        finally:
            hook.remove()

    def run_out(self, _: torch.Tensor) -> None:
        if self.plants:
            raise torch.OutOfMemoryError("CUDA out of memory")


class Validating(Module):
    """With buffers, which DistributedDataParallel sends; in ``validation_step``, rank 0 runs out of memory."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
        self.fails = fails
        self.losses: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.fails and RANK == 0 and samples_of(batch[0]) == 4 and is_real(self):
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics.get("val_loss", 0.0)))


def validated(*, fails: bool) -> dict[str, Any]:
    """Two epochs, each with batches that are validated."""
    module = Validating(fails=fails)
    guard = MemGuard(mode="tune", max_batch_size=4)
    seen = fit(guard, module=module, samples=64, max_epochs=2, validates=True)
    return seen | {"losses": module.losses}


def rescued(module: Module, samples: int = 64, **settings: Any) -> dict[str, Any]:
    """A short training, and its parameters."""
    pl.seed_everything(0, verbose=False)
    module.load_state_dict(Module().state_dict(), strict=False)
    guard = MemGuard(max_batch_size=4)
    seen = fit(guard, module=module, samples=samples, **settings)
    seen["parameters"] = torch.cat([each.detach().flatten() for each in module.parameters()]).tolist()
    seen["counts"] = [[record.out_of_memory, record.rescued] for record in guard.records]
    return seen


def scenarios(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        "budgets": lambda: fit(MemGuard(budget=(100 if RANK == 0 else 200) * KIB)),
        "swapped": lambda: fit(MemGuard(budget=(200 if RANK == 0 else 100) * KIB)),
        "one fails": one_fails,
        "one too small": lambda: fit(MemGuard(budget=(800 if RANK == 0 else 1) * KIB)),
        "effective": lambda: fit(MemGuard(budget=100 * KIB, keep_effective_batch_size=256)),
        "divided": lambda: fit(MemGuard(budget=(800 if RANK == 0 else 100) * KIB), size=200),
        "shared": lambda: fit(MemGuard(max_batch_size=8)),
        "check": lambda: fit(MemGuard(mode="check", budget=1 * KIB)),
        "resume": lambda: resume(folder),
        "whole": lambda: rescued(Module()),
        "in turns": lambda: rescued(Failing()),
        "again": lambda: rescued(Again()),
        "always": lambda: rescued(Failing(always=True), samples=160, max_epochs=2),
        "validated": lambda: validated(fails=False),
        "validated in parts": lambda: validated(fails=True),
        "whole twice": lambda: rescued(Module(), samples=160, max_epochs=2),
        "whole, accumulated": lambda: rescued(Module(), accumulate_grad_batches=4),
        "accumulated": lambda: rescued(InBackward(), accumulate_grad_batches=4),
        "sent": lambda: rescued(InBackward(sends=True), samples=32, accumulate_grad_batches=4),
    }


def main(rank: int, folder: Path) -> None:
    global RANK  # noqa: PLW0603
    RANK = rank
    MemGuard.__init__.__kwdefaults__["min_steps_per_epoch"] = None  # epochs of a few steps
    count_tensors_alone()
    seen = run_all(scenarios(folder), in_children=("budgets", "one fails", "again"))
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))


def count_tensors_alone() -> None:
    """Count no other memory of a process, which would be most of these budgets."""
    profile.process_bytes = lambda *_: 0  # type: ignore[assignment]
