"""Run by test_layouts_of_ranks.py: fits that shard, on gloo processes; each rank writes what it saw."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch._C._profiler import _EventType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.core.isolation import pool
from lightning_memguard.core.range import NOTHING
from lightning_memguard.training.data import loaders
from lightning_memguard.training.run import choose, reading
from lightning_memguard.units import KIB
from tests.training.quiet import quiet_trainer

BUDGET = 1200 * KIB
STEPS = 10  # of fits that are measured
PLAIN = torch.Tensor, nn.Parameter
Seen = dict[str, Any]


class Block(nn.Module):
    """A block whose sizes two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(33, 256), nn.Linear(256, 33)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Module(pl.LightningModule):
    BLOCKS = 3

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(self.BLOCKS)))
        self.sizes: list[int] = []
        self.world_sizes: list[int] = []

    def configure_model(self) -> None:
        if hasattr(self, "parallel"):
            return
        self.parallel = True
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        for block in self.blocks:
            if tensor.size() > 1:
                parallelize_module(block, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if data.size() > 1:
                fully_shard(block, mesh=data)
        if data.size() > 1:
            fully_shard(self.blocks, mesh=data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append(len(batch[0]))
        assert self.trainer.world_size == len(self.trainer.strategy.parallel_devices), "on the copy too"
        loss = self(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def strategy(data: int, tensor: int) -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor, process_group_backend="gloo")


class Peak(pl.Callback):
    """The least peak of a rank's tensors in any step from the third on, without what gloo takes for itself.

    The profiler watches one thread, and does not see what gloo's threads free: of 3,000 all-reduces of 4 MiB, 200 are
    never freed by its events, while without it the process does not grow. So what outlives the step after its own is
    taken for freed unless a tensor lies there in the end, and the step that this affects least is the one that counts.
    """

    def __init__(self) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.bytes = 0

    def setup(self, *_: Any, **__: Any) -> None:
        self.profiler.start()

    def on_train_batch_start(self, *_: Any) -> None:
        with record_function("step begins"):
            pass

    def on_fit_end(self, *_: Any) -> None:
        self.profiler.stop()
        held = {each.untyped_storage().data_ptr() for each in gc.get_objects() if type(each) in PLAIN}
        todo = [(event, False) for event in self.profiler.profiler.kineto_results.experimental_event_tree()]
        events = []
        while todo:
            event, inside = todo.pop()
            inside = inside or event.name.startswith("c10d::")
            todo += [(child, inside) for child in event.children]
            if event.tag == _EventType.Allocation:
                fields = event.extra_fields
                events.append((event.start_time_ns, fields.alloc_size, fields.ptr, inside))
            elif event.name == "step begins":
                events.append((event.start_time_ns, 0, 0, False))
        peaks, alive = [0], dict[int, tuple[int, int]]()  # the step and the bytes of a block
        for _, nbytes, address, inside in sorted(events):
            step = len(peaks) - 1
            if nbytes > 0 and not inside:
                alive[address] = step, nbytes
            elif nbytes < 0:
                alive.pop(address, None)
            elif not nbytes:
                alive = {block: known for block, known in alive.items() if block in held or known[0] >= step}
                peaks.append(0)
            peaks[-1] = max(peaks[-1], sum(nbytes for _, nbytes in alive.values()))
        self.bytes = min(peaks[3:])


def trainer_of(layout: ModelParallelStrategy, callbacks: list[Any], devices: int, **settings: Any) -> pl.Trainer:
    return quiet_trainer(*callbacks, **{"devices": devices, "strategy": layout, "limit_train_batches": 4, **settings})


def data_of(size: int) -> DataLoader:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(4000, 33)), batch_size=size)


def module_of(make: type[Module] = Module) -> Module:
    torch.manual_seed(0)
    return make()


def locals_of(module: nn.Module) -> list[torch.Tensor]:
    return [getattr(p, "_local_tensor", p).detach().clone() for p in module.parameters()]


class OneBlock(Module):
    BLOCKS = 1


class RunsOut(Module):
    """Its third batch does not fit, on any rank."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss


def fit(
    guard: MemGuard, layout: ModelParallelStrategy, devices: int, make: type[Module] = Module, **settings: Any
) -> tuple[Seen, Module]:
    """One fit on all ranks; what this one saw of it."""
    module, error, notes = module_of(make), "", list[str]()
    trainer = trainer_of(layout, [guard], devices, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, data_of(2), data_of(2) if settings.get("limit_val_batches") else None)
        except Exception as failure:  # noqa: BLE001 - the test asks which
            error, notes = f"{type(failure).__name__}: {failure}", getattr(failure, "__notes__", [])
    return {
        **seen_of(guard),
        "error": error,
        "error_notes": notes,
        "sizes": module.sizes,
        "warned": [str(each.message) for each in caught],
    }, module


def seen_of(guard: MemGuard) -> Seen:
    decision = guard.decision
    if decision is None:
        return {}
    footprint = decision.footprint
    return {
        "outcome": decision.outcome, "size": decision.batch_size, "accumulate": decision.accumulate_grad_batches,
        "reason": decision.reason, "method": footprint and footprint.method,
        "peak": footprint and footprint.peak_allocated_bytes, "parts": footprint and dict(footprint.parts),
        "notes": footprint and footprint.notes,
    }  # fmt: skip


def by_hand(size: int, data: int, tensor: int) -> tuple[list[torch.Tensor], int]:
    """The weights after a fit at a size that was set by hand, and its peak."""
    module, peak = module_of(), Peak()
    trainer_of(strategy(data, tensor), [peak], data * tensor, limit_train_batches=STEPS).fit(module, data_of(size))
    return locals_of(module), peak.bytes


def tuned(data: int, tensor: int) -> Seen:
    """A fit that is tuned, next to fits by hand at its size and at 10 % more; and later runs of its Trainer."""
    guard, module = MemGuard(batch_size="largest", budget=BUDGET), module_of()
    trainer = trainer_of(strategy(data, tensor), [guard], data * tensor, limit_train_batches=STEPS, limit_val_batches=2)
    trainer.fit(module, data_of(2))
    seen = {**seen_of(guard), "sizes": module.sizes}
    weights, peak = by_hand(seen["size"], data, tensor)
    alike = all(map(torch.equal, weights, locals_of(module)))
    larger = by_hand(-(-seen["size"] * 11 // 10), data, tensor)[1]
    return {**seen, "alike": alike, "measured": peak, "larger": larger, "later": later_runs(trainer, guard)}


def later_runs(trainer: pl.Trainer, guard: MemGuard) -> dict[str, Seen]:
    """A second module, and the same once more: it is sharded by then."""
    module, seen = module_of(), {}
    for name in ("second", "again"):
        module.sizes.clear()
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, data_of(2))
        seen[name] = {**seen_of(guard), "sizes": [*module.sizes]}
    trainer.validate(module, data_of(3), verbose=False)
    return {**seen, "validated": seen_of(guard)}


def one_fails() -> Seen:
    failing = mock.patch.object(choose, "read_run", side_effect=ZeroDivisionError("only here"))
    with failing if os.environ["LOCAL_RANK"] == "1" else mock.patch.object(choose, "read_run", choose.read_run):
        return fit(MemGuard(batch_size="largest", budget=BUDGET), strategy(2, 1), 2)[0]


def one_offloads() -> Seen:
    """A fit in which one rank keeps its activations elsewhere, next to one without MemGuard."""
    whole = module_of(OneBlock)
    trainer_of(strategy(2, 1), [], 2).fit(whole, data_of(2))
    guard = MemGuard(max_batch_size=2, offload="always" if os.environ["LOCAL_RANK"] == "1" else "never")
    seen, module = fit(guard, strategy(2, 1), 2, OneBlock)
    alike = all(map(torch.equal, locals_of(whole), locals_of(module)))
    return {**seen, "alike": alike, "offloaded": [record.offloaded for record in guard.records]}


def resumes(folder: Path) -> Seen:
    """A checkpoint of shards, and a fit with twice the budget that goes on from it."""
    module, guard = module_of(), MemGuard(batch_size="largest", budget=BUDGET)
    trainer = trainer_of(strategy(2, 1), [guard], 2)
    trainer.fit(module, data_of(2))
    trainer.save_checkpoint(folder / "shards")
    module, other = module_of(), MemGuard(batch_size="largest", budget=2 * BUDGET)
    logging.getLogger("lightning_memguard").addHandler(logging.StreamHandler(printed := io.StringIO()))
    trainer_of(strategy(2, 1), [other], 2, max_epochs=2).fit(module, data_of(2), ckpt_path=folder / "shards")
    return {**seen_of(other), "before": seen_of(guard)["size"], "sizes": module.sizes, "printed": printed.getvalue()}


def scenarios() -> dict[str, Callable[[], Seen]]:
    effective = {"budget": BUDGET, "keep_effective_batch_size": 240}
    return {
        "fsdp": lambda: tuned(2, 1),
        "one fails": one_fails,
        "one offloads": one_offloads,
        "effective": lambda: fit(MemGuard(**effective), strategy(1, 2), 2, OneBlock)[0],
    }


def long_scenarios(folder: Path) -> dict[str, Callable[[], Seen]]:
    largest = {"batch_size": "largest", "budget": BUDGET}
    return {
        "tensor": lambda: tuned(1, 2),
        "runs out": lambda: fit(MemGuard(mode="tune", max_batch_size=2), strategy(2, 1), 2, RunsOut)[0],
        "plain": lambda: fit(MemGuard(**largest), strategy(2, 1), 2)[0],
        "validates": lambda: fit(MemGuard(**largest), strategy(2, 1), 2, limit_val_batches=2)[0],
        "resumes": lambda: resumes(folder),
        "check": lambda: fit(MemGuard(mode="check", budget=BUDGET), strategy(2, 1), 2)[0],
    }


def main(rank: int, folder: Path) -> None:
    write(rank, folder, scenarios())


def long_main(rank: int, folder: Path) -> None:
    write(rank, folder, long_scenarios(folder))


def write(rank: int, folder: Path, runs: dict[str, Callable[[], Seen]]) -> None:
    MemGuard.__init__.__kwdefaults__["min_steps_per_epoch"] = None  # epochs of a few steps
    for home in (loaders, choose):
        home.spoiled_by = lambda *_: None  # type: ignore[attr-defined]  # limits only end these fits early
    pool.processors = lambda: 1  # each rank captures in one child at a time: together they have two
    reading.process_bytes = lambda *_: NOTHING  # type: ignore[assignment]  # it would be most of the budget
    seen = {name: run() for name, run in runs.items()}
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
