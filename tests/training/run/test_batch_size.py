"""`MemGuard(batch_size=...)`: one that was set is kept, one that was not is chosen, and what keeps it from growing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.training.data.set_sizes import _passes_size, is_kept_as_one, sets_its_size
from lightning_memguard.units import KIB

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("taped")]

SETTINGS: Any = {"batch_size": 1}


def data(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 16), torch.zeros(count, dtype=torch.long))


class Data(pl.LightningDataModule):
    """Its hook makes a loader with these arguments."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def train_dataloader(self) -> Any:
        return DataLoader(data(100), **self.arguments)


# -- one that was set


def test_nothing_differs_if_it_fits(trainer: Any, small: Any, dataset: TensorDataset) -> None:
    weights, seen = [], []
    for guards in ((), (MemGuard(),)):
        torch.manual_seed(0)
        module, loader = small(batch_size=10), DataLoader(dataset, batch_size=10, shuffle=True)
        run = trainer(*guards, accumulate_grad_batches=2)
        run.fit(module, loader)
        weights.append([each.detach().clone() for each in module.parameters()])
        seen.append((run.train_dataloader is loader, run.accumulate_grad_batches, module.batch_size))
    assert all(map(torch.equal, *weights))
    assert seen[0] == seen[1] == (True, 2, 10)


def test_the_line_says_that_it_fits_and_what_would(decided: Any, dataset: TensorDataset) -> None:
    found = decided(DataLoader(dataset, batch_size=10))
    assert (found.batch_size, found.outcome, found.limited_by) == (10, "kept", "request")
    assert found.largest_batch_size == 100
    assert found.reason.startswith("batch size 10 fits: ")
    assert found.reason.endswith('. Up to 100 would (batch_size="largest").')
    assert repr(found).startswith("Decision(batch_size=10, accumulate_grad_batches=1, largest_batch_size=100, ")


def test_the_argument_chooses_what_the_line_promises(decided: Any, dataset: TensorDataset) -> None:
    kept = decided(DataLoader(dataset, batch_size=10), budget=60 * KIB)
    grown = decided(DataLoader(dataset, batch_size=10), budget=60 * KIB, batch_size="largest")
    assert 10 < grown.batch_size <= kept.largest_batch_size == grown.largest_batch_size < 100


def test_limits_of_a_chosen_size_leave_one_that_fits(decided: Any, dataset: TensorDataset) -> None:
    assert decided(DataLoader(dataset, batch_size=10), min_batch_size=20, multiple_of=8).batch_size == 10
    assert decided(DataLoader(dataset, batch_size=10), max_batch_size=8).batch_size == 8


def test_where_other_sizes_take_captures_nothing_is_promised(decided: Any, played: Any, dataset: TensorDataset) -> None:
    played(lambda trace: trace.plus({"activations": 1000 * KIB if trace.batch_size > 6 else 16}))
    found = decided(DataLoader(dataset, batch_size=10))
    assert (found.batch_size, found.largest_batch_size) == (10, None)
    assert "Up to" not in found.reason


def test_samples_of_a_step_that_were_asked_for_are_made_of_batches_that_fit(decided: Any) -> None:
    loader, settings = DataLoader(data(512), batch_size=32), {"accumulate_grad_batches": 4}
    found = decided(loader, settings, keep_effective_batch_size=128)
    assert (found.batch_size, found.accumulate_grad_batches) == (128, 1)
    found = decided(loader, settings, keep_effective_batch_size=128, batch_size="keep")
    assert (found.batch_size, found.accumulate_grad_batches) == (32, 4)


# -- one that was not


@pytest.mark.parametrize(
    ("arguments", "choice", "size"),
    [({}, "auto", 100), ({}, "keep", 1), ({"batch_size": 1}, "auto", 1), ({"batch_size": 1}, "largest", 100)],
)
def test_a_hook_tells_whether_a_size_was_set(
    decided: Any, arguments: dict[str, Any], choice: Any, size: int, small: Any
) -> None:
    found = decided(Data(**arguments), batch_size=choice)
    assert found.batch_size == size
    assert ('batch size 100 (none was set; batch_size="keep" insists on 1) fits' in found.reason) == (
        not arguments and choice == "auto"
    )


@pytest.mark.parametrize(
    ("code", "is_set"),
    [
        ("DataLoader(data, shuffle=True)", False),
        ("torch.utils.data.DataLoader(data)", False),
        ("DataLoader(data, batch_size=64)", False),  # another loader
        ("DataLoader(data, 64)", False),
        ("DataLoader(data, batch_size=1)", True),
        ("DataLoader(data, 1)", True),
        ("DataLoader(data, batch_size=size)", True),
        ("DataLoader(data, **options)", True),
        ("DataLoader(*arguments)", True),
        ("functools.partial(DataLoader, batch_size=1)(data)", True),
        ("from torch.utils.data import DataLoader as L\nL(data, batch_size=1)", True),
        ("Other(data, batch_size=1)  # DataLoader", False),
        ("!pip install DataLoader", True),  # not to be read
        ("x = 1", False),
    ],
)
def test_code_tells_whether_a_size_that_may_be_one_is_passed(code: str, is_set: bool) -> None:
    assert _passes_size(code, DataLoader) == is_set


def test_a_loader_tells_where_it_can() -> None:
    class Own(DataLoader[Any]):
        def __init__(self, dataset: Any) -> None:
            super().__init__(dataset, batch_size=1)

    sampler = BatchSampler(SequentialSampler(data(4)), 1, drop_last=False)
    assert sets_its_size(DataLoader(data(4), batch_sampler=sampler))
    assert sets_its_size(Own(data(4)))
    assert sets_its_size(DataLoader(data(4)))  # code of this test passes sizes


def test_whoever_keeps_a_batch_size_of_one_has_set_it() -> None:
    class Keeps(pl.LightningModule):
        def __init__(self, batch_size: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    config = type("Config", (), {"config": {"data": {"init_args": {"batch_size": 1}}}})()
    assert is_kept_as_one([None, Keeps(1)])
    assert is_kept_as_one([config])
    assert not is_kept_as_one([Keeps(2), None, object()])


# -- what keeps it from growing


class Scheduled(pl.LightningModule):
    """Has a schedule."""

    def __init__(self, interval: str = "step", *, reads: bool = False, by_hand: bool = False) -> None:
        super().__init__()
        self.net, self.interval, self.reads = torch.nn.Linear(16, 4), interval, reads
        if by_hand:
            self.interval = "epoch"
            self.__class__ = ByHand

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches) if self.reads else 500
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
        return [optimizer], [{"scheduler": schedule, "interval": self.interval}]


class ByHand(Scheduled):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (self.trainer.global_step + 1) / 500)
        super().optimizer_step(epoch, batch_idx, optimizer, closure)


@pytest.mark.captures
@pytest.mark.parametrize(
    ("module", "settings", "least", "size", "limit"),
    [
        (Scheduled, {}, 2, 10, "scheduler"),
        (lambda: Scheduled(by_hand=True), {}, 2, 10, "scheduler"),
        (lambda: Scheduled("epoch"), {}, 2, 50, "min_steps_per_epoch"),
        (lambda: Scheduled(reads=True), {}, 2, 50, "min_steps_per_epoch"),
        (lambda: Scheduled("epoch"), {"max_steps": 3}, 2, 10, "max_steps"),
        (Scheduled, {"max_steps": 1}, None, 100, "dataset"),
    ],
    ids=["by steps", "by hand", "by epochs", "reads them", "max_steps", "insists"],
)
def test_a_run_that_counts_steps_does_not_grow(
    decided: Any, module: Any, settings: Any, least: int | None, size: int, limit: str, dataset: TensorDataset
) -> None:
    loader = DataLoader(dataset, batch_size=10)
    found = decided(loader, settings, module(), batch_size="largest", min_steps_per_epoch=least)
    assert (found.batch_size, found.limited_by) == (size, limit)
    assert ("min_steps_per_epoch=None allows it" in found.reason) == (size == 10)


def test_no_sample_is_left_out_that_an_epoch_had(decided: Any) -> None:
    """At 20, as without drop_last, an epoch of 50 steps would have 1000 samples instead of 1008."""
    found = decided(DataLoader(data(1010), 4, drop_last=True), batch_size="largest", min_steps_per_epoch=50)
    assert (found.batch_size, found.limited_by) == (18, "drop_last")


def test_a_multiple_of_eight_is_chosen_where_that_costs_little(decided: Any) -> None:
    sizes = {count: decided(DataLoader(data(count), 4), batch_size="largest", min_steps_per_epoch=50).batch_size
             for count in (5_000, 20_500)}  # fmt: skip
    assert sizes == {5_000: 100, 20_500: 408}


# -- what is printed


@pytest.mark.parametrize(("settings", "level", "lines"), [
    ({}, logging.INFO, 2), ({"max_epochs": 0}, logging.INFO, 0), ({"max_steps": 0}, logging.DEBUG, 0),
    ({"limit_train_batches": 0}, logging.INFO, 0), ({}, logging.DEBUG, 9),
])  # fmt: skip
def test_a_fit_that_fits_takes_two_lines(
    trainer: Any, small: Any, dataset: TensorDataset, caplog: Any, settings: Any, level: int, lines: int
) -> None:
    with caplog.at_level(level, "lightning_memguard"):
        trainer(MemGuard(), **settings).fit(small(), DataLoader(dataset, batch_size=10))
    said = [each.getMessage() for each in caplog.records if each.name == "lightning_memguard" and not each.exc_info]
    assert sum(len(text.splitlines()) for text in said) >= lines if lines > 2 else len(said) == lines


def test_a_guard_is_shown_in_one_line(begun: Any, small: Any, dataset: TensorDataset) -> None:
    guard = MemGuard("check", budget="1GiB", min_steps_per_epoch=50)
    assert repr(guard) == "MemGuard(mode='check', budget='1GiB')"
    guard._last_run = begun(small(), DataLoader(dataset, batch_size=10), mode="check", budget="1GiB")
    assert repr(guard) == f"MemGuard(mode='check', budget='1GiB'): {guard.decision.reason}"
