"""Steps that will not fit run whole, with activations on the host; a run that fits never sees a hook."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_memguard import MemGuard
from lightning_memguard.core.capture.curve import Curve
from lightning_memguard.core.replay.footprint import Doubt, Footprint, Peak
from lightning_memguard.training.data import samples
from lightning_memguard.training.offload import engine
from lightning_memguard.training.run import offloading
from lightning_memguard.units import KIB, MIB

pytestmark = pytest.mark.usefixtures("captured_once")


class Deep(pl.LightningModule):
    """Six layers that each save their input and their product; a norm mixes samples, and dropout draws.

    ``first`` is called with each batch and its number, but not on a copy.
    """

    def __init__(self, first: Callable[[torch.Tensor, int], object] = lambda *_: None) -> None:
        super().__init__()
        self.first = first
        layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
        self.net = nn.Sequential(*layers, nn.Linear(64, 4))
        self.hooked: list[bool] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if type(self.trainer) is pl.Trainer:
            self.first(batch, batch_idx)
        self.hooked.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
        loss = self.net(batch).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class ByHand(Deep):
    """The same with manual optimization, whose step holds the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def pad(items: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(items, batch_first=True).flatten(0, 1)


class Texts(IterableDataset[torch.Tensor]):
    """A stream of sequences of one row; after those that setup draws, one of more rows."""

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def __iter__(self) -> Iterator[torch.Tensor]:
        drawn = torch.Generator().manual_seed(1)
        return (torch.randn(self.longest if at == 640 else 1, 64, generator=drawn) for at in range(STEPS * SIZE))


def made_batches() -> DataLoader[Any]:
    """Batches that the data makes itself, so that their size cannot be changed."""
    drawn = torch.Generator().manual_seed(1)
    return DataLoader([torch.randn(SIZE, 64, generator=drawn) for _ in range(20)], batch_size=None)


SIZE, LONG = 64, 72  # a batch of the long one has 4,608 rows: a MiB in each of some thirty saved tensors
STEPS, LONG_AT = 14, 640 // SIZE
Train = Callable[..., tuple[dict[str, torch.Tensor], list[str], Deep]]


@pytest.fixture
def train(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train and return the weights, what was announced, and the module."""
    monkeypatch.setattr(samples, "MOST_SAMPLES", 256)

    def run(
        guard: MemGuard | None, data: int | DataLoader[Any] = 1, kind: Callable[[], Deep] = Deep, **settings: Any
    ) -> tuple[dict[str, torch.Tensor], list[str], Deep]:
        pl.seed_everything(0, verbose=False)
        module = kind()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = DataLoader(Texts(data), batch_size=SIZE, collate_fn=pad) if isinstance(data, int) else data
            trainer(*([guard] if guard else []), **settings).fit(module, loader)
        return module.state_dict(), [str(each.message) for each in caught if "MemGuard" in str(each.message)], module

    return run


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("kind", [Deep, pytest.param(ByHand, marks=pytest.mark.long)])
def test_a_batch_that_will_not_fit_runs_whole_with_activations_on_the_host(train: Train, kind: type[Deep]) -> None:
    guard = MemGuard(budget=12 * MIB, max_batch_size=SIZE)
    plain, _, _ = train(None, LONG, kind)
    weights, said, module = train(guard, LONG, kind)
    assert same(plain, weights)
    assert [record.offloaded for record in guard.records] == [1]
    assert module.hooked == [place == LONG_AT for place in range(STEPS)]
    (text,) = [each for each in said if "larger than" in each]
    assert "It runs whole, with what does not fit of its" in text
    assert text.endswith("of saved activations in a temporary file.")


class FewerOfMore(Deep):
    """Its hook gives batches of 512 rows: of 512 samples at first, then of 16 samples that have 32 rows each."""

    def train_dataloader(self) -> DataLoader[Any]:
        rows, size = ((1, 512), (32, 16))[min(1, self.trainer.current_epoch)]
        return DataLoader(torch.randn(20 * size, rows, 64), batch_size=size)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch.flatten(0, 1), batch_idx)


def test_what_larger_batches_have_taken_says_nothing_against_smaller_ones(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "_POLL_SECONDS", 0.0)
    module, guard = FewerOfMore(), MemGuard(budget=12 * MIB)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(guard, max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(module)
    assert [record.batch_size for record in guard.records] == [512, 16]
    assert not any(module.hooked)
    assert "It fits." in " ".join(str(each.message) for each in caught)


def test_it_is_said_if_even_the_host_does_not_help(train: Train) -> None:
    _, said, module = train(MemGuard(budget=2 * MIB, max_batch_size=SIZE), LONG)
    assert module.hooked[LONG_AT]
    (text,) = [each for each in said if "larger than" in each]
    assert "Even with its" in text
    assert "It may run out of memory: lower" in text


@pytest.mark.parametrize(
    "settings",
    [{"budget": 64 * MIB, "max_batch_size": SIZE}, {"budget": 12 * MIB, "max_batch_size": SIZE, "offload": "never"}],
)
def test_a_run_that_fits_or_does_not_want_it_never_sees_a_hook(train: Train, settings: Any) -> None:
    guard = MemGuard(**settings)
    _, _, module = train(guard, LONG)
    assert not any(module.hooked)
    assert guard.records[0].offloaded == 0


def test_check_mode_never_moves_anything(train: Train) -> None:
    _, _, module = train(MemGuard("check", budget=12 * MIB, offload="always"), LONG)
    assert not any(module.hooked)


def scaled(footprint: Footprint, factor: float) -> Footprint:
    """A prediction that many times the right one, whose upper bound is 40 % above it."""
    peak = footprint.peak
    allocated, reserved = int(peak.allocated_bytes * factor), int(peak.reserved_bytes * factor)
    high = Peak(*(int(1.4 * nbytes) for nbytes in (allocated, reserved, reserved)))
    return replace(
        footprint,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        peak_device_bytes=reserved,
        parts={name: int(nbytes * factor) for name, nbytes in footprint.parts.items()},
        doubts=(Doubt("unchecked", (high,)),),
    )


def test_a_prediction_that_was_too_low_moves_what_it_had_not_foreseen(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 % too low: what it says fits, and its upper bound does not; so the hooks are on until the peak is measured."""
    plain, _, _ = train(None, made_batches())
    right = MemGuard("check", budget="1GiB")
    train(right, made_batches())
    whole = right.decision.footprint.peak_device_bytes
    own = Curve.footprint_at
    monkeypatch.setattr(Curve, "footprint_at", lambda self, size: scaled(own(self, size), 0.7))
    guard = MemGuard(budget=int(0.8 * whole), margin=0.0)
    weights, said, module = train(guard, made_batches())
    assert same(plain, weights)
    assert all(module.hooked)
    assert guard.records[0].offloaded > 0
    assert sum("saved more activations than were predicted" in text for text in said) == 1


def test_a_peak_that_was_measured_needs_no_hooks(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its upper bound does not fit, but what the steps take does."""
    peak = offloading.Measuring.peak
    monkeypatch.setattr(offloading, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(
        offloading.Measuring, "peak", lambda self: replace(peak(self), peak_bytes=100 * KIB, process_bytes=None)
    )
    own = Curve.footprint_at
    monkeypatch.setattr(Curve, "footprint_at", lambda self, size: scaled(own(self, size), 1.0))
    right = MemGuard("check", budget="1GiB")
    train(right, made_batches())
    guard = MemGuard(budget=int(1.2 * right.decision.footprint.peak_device_bytes), margin=0.0)
    _, _, module = train(guard, made_batches())
    assert guard.records[0].offloaded == 0
    assert module.hooked[:2] == [True, True]
    assert not any(module.hooked[4:])


def test_memory_that_others_take_meanwhile_moves_activations(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the twelfth step on, a tenth of the memory is left."""
    plain, _, _ = train(None, made_batches())
    looks, own = [], offloading.read_budget

    def less_and_less(*args: Any, **kwargs: Any) -> Any:
        looks.append(1)
        found = own(*args, **kwargs)
        return replace(found, free_bytes=300 * KIB, margin_bytes=0) if len(looks) > 12 else found

    monkeypatch.setattr(offloading, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(offloading, "read_budget", less_and_less)
    weights, said, module = train(MemGuard(), made_batches())
    assert same(plain, weights)
    assert not any(module.hooked[:12])
    assert all(module.hooked[13:])
    (text,) = [each for each in said if "now offers" in each]
    assert "CPU now offers 300.0 KiB after the margin." in text


def test_always_lets_a_larger_batch_fit_and_trains_the_same_weights(trainer: Any, tuned: Any) -> None:
    """The choice of the batch size counts on the activations being elsewhere."""
    data = [torch.randn(64) for _ in range(600)]

    def trained(size: int, *guard: MemGuard) -> dict[str, torch.Tensor]:
        pl.seed_everything(0, verbose=False)
        module = Deep()
        trainer(*guard).fit(module, DataLoader(data, batch_size=size))
        return module.state_dict()

    size = tuned(trainer(), Deep(), DataLoader(data, batch_size=8), budget=2 * MIB).decision.batch_size
    guard = MemGuard(batch_size="largest", budget=2 * MIB, offload="always")
    weights, larger = trained(8, guard), guard.decision.batch_size
    assert larger > 1.5 * size
    assert same(trained(larger), weights)


@pytest.mark.usefixtures("taped")
def test_the_strategy_is_left_as_it_was(train: Train, trainer: Any) -> None:
    def stop(_: torch.Tensor, batch_idx: int) -> None:
        if batch_idx == 3:
            raise RuntimeError("the user's own")

    runner = trainer(MemGuard(budget=64 * MIB, offload="always"))
    with pytest.raises(RuntimeError, match="the user's own"):
        runner.fit(Deep(stop), made_batches())
    assert "training_step" not in vars(runner.strategy)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.usefixtures("taped")
def test_why_activations_cannot_move_is_in_the_note(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: torch.Tensor, _: int) -> None:
        if len(batch) > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine._Packer, "survey", lambda *_: "the disk is full")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(MemGuard(budget=12 * MIB, max_batch_size=SIZE), LONG, lambda: Deep(fail))
    assert "Its activations could not go to the host: the disk is full." in "\n".join(raised.value.__notes__)
