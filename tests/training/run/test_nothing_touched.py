"""A guarded training is the training itself: weights, random state, optimizer, metrics, data order, bit for bit."""

from __future__ import annotations

import copy
import ctypes
import functools
import importlib
import itertools
import math
import os
import random
import sqlite3
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_memguard import MemGuard
from tests.long import long_but

pytestmark = pytest.mark.contract


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Draws from every random generator a dataset may use, its own included, and counts its reads."""

    def __init__(self, length: int = 96) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(length, 3, 8, 8, generator=generator)
        self.y = torch.randint(0, 5, (length,), generator=generator)
        self.own = np.random.default_rng(7)
        self.own_torch = torch.Generator().manual_seed(3)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        noise = self.own.normal() + random.random() + np.random.rand() + torch.rand(()).item()
        noise += torch.rand((), generator=self.own_torch).item()
        return self.x[index] * noise, self.y[index]


def module_class(pl: Any) -> Any:
    class Everything(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, reads_values: bool) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.reads_values = reads_values
            self.net = nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(288, 5)
            )
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(5)
            self.losses: list[float] = []
            self.batches: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            logits = self.net(x)
            loss = nn.functional.cross_entropy(logits, y)
            if self.reads_values and loss > 1e9:
                loss = loss * 0
            self.accuracy(logits, y)
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("accuracy", self.accuracy)
            self.losses.append(loss.item())
            self.batches.append(len(x))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return Everything


def train(pl: Any, batch_size: int, callbacks: list[Any], *, reads_values: bool = False) -> dict[str, Any]:
    """Three epochs from one seed, and everything that could tell two runs apart."""
    pl.seed_everything(1, verbose=False)
    module = module_class(pl)(reads_values)
    dataset = Augmented()
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(5))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=3,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train_dataloaders=loader)
    return {
        "weights": copy.deepcopy(module.state_dict()),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "metrics": {name: v for name, v in trainer.callback_metrics.items() if not name.startswith("memguard/")},
        "losses": module.losses,
        "batches": module.batches,
        "reads": dataset.reads,
        "own generators": (dataset.own.bit_generator.state, dataset.own_torch.get_state()),
        "random state": (random.getstate(), np.random.get_state(), torch.get_rng_state()),
        "hparams": dict(module.hparams),
        "trainer": (trainer.global_step, trainer.current_epoch, trainer.accumulate_grad_batches),
    }


def assert_same(mine: Any, theirs: Any, where: str = "") -> None:
    assert type(mine) is type(theirs), where
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), where
        for key in mine:
            assert_same(mine[key], theirs[key], f"{where}/{key}")
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs), where
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(a, b, f"{where}/{index}")
    elif isinstance(mine, (torch.Tensor, np.ndarray)):
        assert bool((mine == theirs).all()), where
    else:
        assert mine == theirs, where


@functools.cache
def unguarded(pl: Any, batch_size: int, *, reads_values: bool = False) -> dict[str, Any]:
    """The same training without a guard, run once: nothing but its arguments may matter."""
    return train(pl, batch_size, [], reads_values=reads_values)


@pytest.mark.parametrize(
    ("pl", "reads_values"),
    long_but(
        [(lightning.pytorch, False), (pytorch_lightning, True)],
        itertools.product([lightning.pytorch, pytorch_lightning], [False, True]),
    ),
)
def test_checking_leaves_no_trace(pl: Any, reads_values: bool) -> None:
    guard = MemGuard(mode="check")
    guarded = train(pl, 24, [guard], reads_values=reads_values)
    assert guard.decision.footprint.method == ("real" if reads_values else "worst-case")
    assert_same(guarded, unguarded(pl, 24, reads_values=reads_values))


LOSSES: list[int] = []


class Counter(pytorch_lightning.Callback):
    calls = 0


class Busy(pytorch_lightning.LightningModule):
    """Its step does much beside its loss, with what no copy of it can own; at other sizes it crashes."""

    def __init__(self, counter: Counter, connection: sqlite3.Connection, fails: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.counter, self.connection, self.fails = counter, connection, fails
        self.rows = Path("rows.csv").open("w")  # noqa: SIM115
        self.numbers = iter(range(1000))
        self.batches = iter(DataLoader(range(100)))
        self.outer = [nn.BatchNorm1d(4), nn.Parameter(torch.zeros(1))]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.fails and len(batch) != 6:
            ctypes.string_at(0)
        LOSSES.append(len(batch))
        self.counter.calls += 1
        self.connection.execute("INSERT INTO sizes VALUES (?)", (len(batch),))
        print(len(batch), file=self.rows, flush=True)
        with Path("names.txt").open("a") as names:
            print("a step", file=names)
        print("a step")
        next(self.numbers)
        next(self.batches)
        norm, parameter = self.outer
        norm(torch.ones(2, 4))
        parameter.sum().backward()
        random.random()
        math.steps = getattr(math, "steps", 0) + 1  # type: ignore[attr-defined]
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("fails", [False, True], ids=["runs", "crashes at other sizes"])
@pytest.mark.parametrize("guards", [[], [MemGuard(mode="check")]], ids=["without", "checked"])
def test_what_a_step_does_beside_its_loss_is_done_once_a_batch(
    guards: list[Any], fails: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    LOSSES.clear()
    monkeypatch.setattr(math, "steps", 0, raising=False)
    counter, connection = Counter(), sqlite3.connect("rows.db", isolation_level=None)
    connection.execute("CREATE TABLE sizes (size)")
    module = Busy(counter, connection, fails)
    random.seed(1)
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[*guards, counter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.ones(24, 4), batch_size=6))
    drawn = random.getstate()
    random.seed(1)
    for _ in range(4):
        random.random()
    norm, parameter = module.outer
    assert LOSSES == [6] * 4
    assert counter.calls == 4
    assert connection.execute("SELECT size FROM sizes").fetchall() == [(6,)] * 4
    assert Path("rows.csv").read_text() == "6\n" * 4
    assert Path("names.txt").read_text() == "a step\n" * 4
    assert capfd.readouterr().out.splitlines().count("a step") == 4
    assert next(module.numbers) == 4
    assert next(module.batches).item() == 4
    assert norm.num_batches_tracked == 4
    assert parameter.grad == 4
    assert drawn == random.getstate()
    assert math.steps == 4  # type: ignore[attr-defined]
    for guard in guards:
        assert guard.decision is not None
        assert guard.decision.footprint is not None
    module.rows.close()
    connection.close()


class Policy(pytorch_lightning.LightningModule):
    """Trains on what its own network chose."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.rollouts, self.last = nn.Linear(4, 2), 0, torch.zeros(8, 2)

    def train_dataloader(self) -> Any:
        return DataLoader(Rollouts(self), batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        state, action = batch
        return torch.nn.functional.cross_entropy(self.net(state), action)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rollouts(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.policy.rollouts += 1
        states = torch.rand(8, 4)
        with torch.no_grad():
            self.policy.last.copy_(self.policy.net(states))
        return zip(states, self.policy.last.numpy().argmax(1), strict=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_samples_may_come_from_the_model() -> None:
    guard, policy = MemGuard(), Policy()
    pytorch_lightning.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=[guard], logger=False, enable_checkpointing=False
    ).fit(policy)
    assert guard.decision.footprint is not None
    assert (guard.decision.batch_size, policy.rollouts) == (4, 2)


def test_a_tuned_run_is_the_run_with_that_size() -> None:
    guard = MemGuard(batch_size="largest", max_batch_size=40, multiple_of=8)
    tuned = train(pytorch_lightning, 16, [guard])
    assert (guard.decision.batch_size, guard.decision.limited_by) == (40, "max_batch_size")
    assert tuned["batches"] == [40, 40, 16] * 3
    assert_same(tuned, unguarded(pytorch_lightning, 40))


def test_the_comparison_can_fail() -> None:
    """Another batch size makes a difference, so that equality above means something."""
    with pytest.raises(AssertionError):
        assert_same(unguarded(pytorch_lightning, 40), unguarded(pytorch_lightning, 32))


@pytest.mark.parametrize("mode", ["check", "tune"])
def test_warnings_that_lightning_gives_once_are_not_used_up(mode: Any) -> None:
    """They are for the user, who is not told of what runs on a copy."""
    pl = pytorch_lightning

    class Sloppy(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("count", torch.tensor(batch_idx), on_epoch=True)
            return None

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for module in ("utilities.data", "trainer.connectors.logger_connector.result"):
        importlib.import_module(f"{pl.__name__}.{module}").warning_cache.clear()
    importlib.import_module(f"{pl.__name__}.loops.optimization.automatic").Closure.warning_cache.clear()
    data = DataLoader([{"x": torch.ones(4), "more": torch.ones(3, 4)} for _ in range(8)], 4, collate_fn=_ambiguous)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[MemGuard(mode, batch_size="largest")], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(Sloppy(), data)
    said = " ".join(str(each.message) for each in found)
    assert "`training_step` returned `None`" in said
    assert "from an ambiguous collection" in said
    assert "the value needs to be floating" in said


def _ambiguous(items: list[Any]) -> Any:
    return {"x": torch.stack([item["x"] for item in items]), "more": torch.cat([item["more"] for item in items])}
