"""Every kind of data that Lightning takes, through the real Trainer: sized, or left alone with a reason."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_memguard import MemGuard
from lightning_memguard.training.data import loaders as loaders_of_run
from lightning_memguard.training.facts.run_facts import read_run_facts
from tests.long import long_but
from tests.training.data.test_loaders import Planned
from tests.training.quiet import quiet_trainer

pytestmark = [
    pytest.mark.usefixtures("taped"),
    pytest.mark.filterwarnings("ignore::pytorch_lightning.utilities.warnings.PossibleUserWarning"),
]


def numbered(count: int = 100) -> TensorDataset:
    """Samples that carry their index, to show the order in which they came."""
    return TensorDataset(torch.arange(float(count)).unsqueeze(1).expand(count, 4).contiguous())


def rows(batch: Any) -> list[int]:
    """Indices of the samples in a batch, in all of its tensors."""
    if isinstance(batch, torch.Tensor):
        return batch[:, 0].long().tolist() if batch.dim() == 2 else []
    values = batch.values() if isinstance(batch, dict) else batch or ()
    return [row for value in values for row in rows(value)]


def module_of(package: str = "pytorch_lightning") -> Any:
    theirs = importlib.import_module(package)

    class Noting(theirs.LightningModule):  # type: ignore[misc,name-defined]
        """Records the samples of every batch it is given."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 4)
            self.batches: list[list[int]] = []
            self.shapes: list[Any] = []
            self.evaluated: list[int] = []

        def _loss(self, batch: Any) -> torch.Tensor:
            tensors = [batch] if isinstance(batch, torch.Tensor) else list(flat(batch))
            return sum((self.net(tensor).pow(2).mean() for tensor in tensors), torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.batches.append(rows(batch) if is_real(self) else [])
            self.shapes.append([len(tensor) for tensor in flat(batch)])
            return self._loss(batch)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.evaluated.append(len(next(flat(batch))))

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.evaluated.append(len(next(flat(batch))))
            return self.net(next(flat(batch)))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Noting()


def is_real(module: Any) -> bool:
    return type(module.trainer).__name__ == "Trainer"


def flat(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    else:
        for value in batch.values() if isinstance(batch, dict) else batch or ():
            yield from flat(value)


trainer_of = partial(quiet_trainer, num_sanity_val_steps=0)


def fitted(data: Any, size: int | None = None, *, package: str = "pytorch_lightning", **settings: Any) -> Any:
    """The module after a seeded fit: guarded where a size is given, else as the user's own run would be."""
    guards = [MemGuard(batch_size="largest", min_batch_size=size, max_batch_size=size)] if size else []
    module = module_of(package)
    torch.manual_seed(7)
    trainer = trainer_of(*guards, package=package, **settings)
    if isinstance(data, pl.LightningDataModule):
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, train_dataloaders=data)
    return module


# -- the same batches as a run that was given the size by hand


class Forgetful(DataLoader[Any]):
    """A subclass whose constructor asks for what it does not keep."""

    def __init__(self, dataset: Any, secret: str, **settings: Any) -> None:
        assert secret
        super().__init__(dataset, **settings)


class Strides(Sampler[list[int]]):
    """A batch sampler of the user's own that makes batches of its size lazily; its epoch shifts their start."""

    def __init__(self, count: int, batch_size: int) -> None:
        self.count = count
        self.batch_size = batch_size
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        order = [(index + 10 * self.epoch) % self.count for index in range(self.count)]
        for start in range(0, self.count, self.batch_size):
            yield order[start : start + self.batch_size]

    def __len__(self) -> int:
        return math.ceil(self.count / self.batch_size)


class Halves(BatchSampler):
    """A subclass of torch's own."""


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, count: int = 60) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        return (torch.full((4,), float(index)) for index in range(start, self.count, step))


class Sized(Stream):
    def __len__(self) -> int:
        return self.count


class Fetching(Dataset[torch.Tensor]):
    """Fetches many samples at once."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


LOADERS: dict[str, Any] = {
    "in order": lambda size: DataLoader(numbered(), batch_size=size),
    "shuffled": lambda size: DataLoader(numbered(), batch_size=size, shuffle=True),
    "shuffled by a generator": lambda size: DataLoader(
        numbered(), batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "drop_last": lambda size: DataLoader(numbered(), batch_size=size, shuffle=True, drop_last=True),
    "a subclass": lambda size: Forgetful(numbered(), "once", batch_size=size, shuffle=True),
    "weighted": lambda size: DataLoader(numbered(), size, sampler=WeightedRandomSampler([1.0] * 100, 60)),
    "a sampler by hand": lambda size: DataLoader(
        numbered(), size, sampler=DistributedSampler(numbered(), num_replicas=2, rank=1)
    ),
    "the built-in batch sampler": lambda size: DataLoader(
        numbered(), batch_sampler=BatchSampler(RandomSampler(numbered()), size, False)
    ),
    "a subclass of the batch sampler": lambda size: DataLoader(
        numbered(), batch_sampler=Halves(SequentialSampler(numbered()), size, True)
    ),
    "a batch sampler": lambda size: DataLoader(numbered(), batch_sampler=Strides(100, size)),  # type: ignore[arg-type]
    "a stream": lambda size: DataLoader(Stream(), batch_size=size),
    "a stream with a length": lambda size: DataLoader(Sized(), batch_size=size),
    "many at once": lambda size: DataLoader(Fetching(), batch_size=size, shuffle=True),
    "a stateful loader": lambda size: StatefulDataLoader(numbered(), batch_size=size, shuffle=True),
    "a stateful loader of a stream": lambda size: StatefulDataLoader(Stream(), batch_size=size),
    "a dict": lambda size: {"a": DataLoader(numbered(), size, shuffle=True), "b": DataLoader(numbered(60), size)},
    "a nesting": lambda size: [DataLoader(numbered(), size), {"b": (DataLoader(numbered(60), size),)}],
    **{
        mode: lambda size, mode=mode: CombinedLoader(
            [DataLoader(numbered(), size, shuffle=True), DataLoader(numbered(60), size)], mode
        )
        for mode in ("min_size", "max_size", "max_size_cycle")
    },
}


# A generator, a sampler, a batch sampler, a stream, samples fetched at once, a loader's state, several loaders.
QUICK = (
    *("shuffled by a generator", "a subclass", "weighted", "a subclass of the batch sampler", "a batch sampler"),
    *("a stream with a length", "many at once", "a stateful loader", "a nesting", "max_size_cycle"),
)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__`")
@pytest.mark.parametrize("kind", long_but(QUICK, LOADERS))
def test_a_run_is_the_one_that_a_size_by_hand_would_give(kind: str) -> None:
    """Same samples in the same batches, two epochs long; and the user's own loader goes on at its own size."""
    torch.manual_seed(1)  # torchdata draws its sampler's seed when the loader is made
    mine = LOADERS[kind](4)
    guarded = fitted(mine, 20, max_epochs=2)
    torch.manual_seed(1)
    by_hand = fitted(LOADERS[kind](20), max_epochs=2)
    assert guarded.batches == by_hand.batches
    assert guarded.shapes == by_hand.shapes
    assert any(20 in shape for shape in guarded.shapes)
    if isinstance(mine, DataLoader):
        assert len(next(flat(next(iter(mine))))) == 4


@pytest.mark.parametrize("kind", ["a batch sampler", "min_size"])
def test_the_same_in_the_other_package(kind: str) -> None:
    combined = importlib.import_module("lightning.pytorch.utilities").CombinedLoader
    made = []
    for size in (4, 20):
        torch.manual_seed(1)
        made.append(LOADERS[kind](size))
    mine, theirs = [combined(each.flattened, kind) for each in made] if kind == "min_size" else made
    guarded = fitted(mine, 20, package="lightning.pytorch")
    assert guarded.batches == fitted(theirs, package="lightning.pytorch").batches


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_give_the_same_batches(persistent: bool) -> None:
    def loader(size: int) -> Any:
        return DataLoader(numbered(), size, shuffle=True, num_workers=2, persistent_workers=persistent)

    assert fitted(loader(4), 25, max_epochs=2).batches == fitted(loader(25), max_epochs=2).batches


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_stream_shared_by_workers(kind: Any) -> None:
    assert fitted(kind(Stream(), 4, num_workers=2), 10).batches == fitted(kind(Stream(), 10, num_workers=2)).batches


def test_an_epoch_set_on_the_users_own_batch_sampler_counts() -> None:
    """Users keep their batch sampler and set its epoch themselves."""

    class Setting(pl.Callback):
        def __init__(self, sampler: Strides) -> None:
            self.sampler = sampler

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.sampler.epoch = trainer.current_epoch

    sampler = Strides(100, 5)
    module = module_of()
    fit = trainer_of(
        MemGuard(batch_size="largest", max_batch_size=50),
        Setting(sampler),
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
    )
    fit.fit(module, DataLoader(numbered(), batch_sampler=sampler))  # type: ignore[arg-type]
    assert [batch[0] for batch in module.batches] == [0, 50, 10, 60]
    assert sampler.batch_size == 5


# -- several loaders


@pytest.mark.parametrize(("sizes", "most", "trained"), [((8, 32), 16, [16, 64]), ((24, 32), 40, [39, 52])])
def test_loaders_keep_their_ratio(sizes: tuple[int, int], most: int, trained: list[int]) -> None:
    module = module_of()
    loaders = [DataLoader(numbered(1000), size) for size in sizes]
    trainer_of(MemGuard(batch_size="largest", max_batch_size=most)).fit(module, loaders)
    assert module.shapes[0] == trained


def test_where_one_of_several_cannot_be_resized_all_are_kept() -> None:
    module, guard = module_of(), MemGuard(batch_size="largest")
    ready = TensorDataset(torch.zeros(20, 3, 4))
    loaders = {"a": DataLoader(numbered(), 8), "b": DataLoader(ready, batch_size=None)}
    with pytest.warns(UserWarning, match="batch_size=None"):
        trainer_of(guard).fit(module, loaders)
    assert module.shapes[0] == [8, 3]
    assert guard.decision is not None
    assert guard.decision.outcome == "kept"
    assert guard.decision.footprint is not None


@pytest.mark.parametrize("run", ["validate", "test", "predict"])
def test_an_evaluation_alone_keeps_the_sizes_of_its_loaders(run: str) -> None:
    module = module_of()
    loaders = [DataLoader(numbered(), 8), DataLoader(numbered(60), 8)]
    getattr(trainer_of(MemGuard(batch_size="largest")), run)(module, loaders)
    assert module.evaluated == [*[8] * 12, 4, *[8] * 7, 4]


# -- what cannot be sized is predicted, kept, and said


class Tokens(Sampler[list[int]]):
    """Batches of as many samples as a budget of tokens holds; the largest comes last."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(2)), list(range(3)), list(range(7))])


class Counted(Sampler[list[int]]):
    """Follows its attribute, but counted its batches beforehand: Lightning would stop short of the epoch's end."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.count = 100 // batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(start, start + self.batch_size)) for start in range(0, 100, self.batch_size)])

    def __len__(self) -> int:
        return self.count


class Feed:
    """Not a torch loader; follows its `batch_size`."""

    def __init__(self, batch_size: int, count: int = 60) -> None:
        self.batch_size = batch_size
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        for start in range(0, self.count, self.batch_size):
            yield torch.full((min(self.batch_size, self.count - start), 4), float(start))


class Deaf(Feed):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.zeros(6, 4) for _ in range(10))


class Plain:
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(6, 4)] * 2)


class Readable(Feed):
    """A loader that is itself an iterator."""

    def __init__(self) -> None:
        super().__init__(6)
        self.left = 5

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> torch.Tensor:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return torch.zeros(6, 4)


FIXED: dict[str, tuple[Any, str, list[int]]] = {
    "a plan": (lambda: DataLoader(numbered(), batch_sampler=Planned(25)), "Planned", [25] * 4),  # type: ignore[arg-type]
    "tokens": (lambda: DataLoader(numbered(), batch_sampler=Tokens()), "Tokens", [2, 3, 7]),  # type: ignore[arg-type]
    "a count": (lambda: DataLoader(numbered(), batch_sampler=Counted(50)), "Counted", [50, 50]),  # type: ignore[arg-type]
    "ready batches": (lambda: DataLoader(TensorDataset(torch.zeros(3, 5, 4)), batch_size=None), "=None", [5] * 3),
    "a deaf loader": (lambda: Deaf(8), "do not follow its `batch_size`", [6] * 10),
    "an iterator": (Readable, "can be read only once", [6] * 5),
    "a generator": (lambda: (torch.zeros(6, 4) for _ in range(3)), "can be read only once", [6] * 3),
    "what has no size": (Plain, "no `batch_size`", [6, 6]),
}


@pytest.mark.parametrize("kind", FIXED)
def test_what_cannot_be_sized_is_kept_with_a_reason(kind: str) -> None:
    """Every batch of the epoch arrives: none was consumed by sampling."""
    make, reason, sizes = FIXED[kind]
    module, guard = module_of(), MemGuard(batch_size="largest")
    with pytest.warns(UserWarning, match=reason):
        trainer_of(guard).fit(module, make())
    assert [shape[0] for shape in module.shapes] == sizes
    assert guard.decision is not None
    assert guard.decision.outcome == ("stepped aside" if "only once" in reason else "kept")


@pytest.mark.captures
def test_a_batch_sampler_of_variable_size_is_predicted_on_its_largest_batch(tuned: Any) -> None:
    loader: Any = DataLoader(numbered(), batch_sampler=Tokens())  # type: ignore[arg-type]
    footprint = tuned(trainer_of(), module_of(), loader, mode="check").decision.footprint
    assert footprint.parts["batch"] >= 7 * 4 * 4


def test_a_loader_that_is_not_torchs_but_follows_its_attribute_is_sized() -> None:
    feed = Feed(6)
    assert [shape[0] for shape in fitted(feed, 20).shapes] == [20, 20, 20]
    assert feed.batch_size == 6


# -- a tuned size never stops what would have run


def ran(loader: Any, guard: MemGuard | None = None, **settings: Any) -> Any:
    module = module_of()
    guard = guard or MemGuard(batch_size="largest")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_of(guard, **settings).fit(module, loader)
    assert guard.decision is not None
    return module, guard.decision


def test_an_interval_of_validation_leaves_as_many_batches() -> None:
    """Lightning refuses an int `val_check_interval` above the number of batches, validation or none."""
    module, decision = ran(DataLoader(numbered(), 4), val_check_interval=5)
    assert (decision.batch_size, decision.limited_by) == (24, "val_check_interval")
    assert (decision.steps_per_epoch, decision.requested_steps_per_epoch) == (5, 25)
    assert len(module.shapes) == 5


def test_a_stream_whose_end_lightning_does_not_know_has_no_interval_to_leave_room_for(tuned: Any) -> None:
    """Lightning trains 15 batches of 4 with an interval of 100, so no size is too large for it."""
    decision = tuned(trainer_of(val_check_interval=100), module_of(), DataLoader(Stream(60), 4)).decision
    assert (decision.batch_size, decision.limited_by) == (60, "dataset")


def test_a_share_that_needs_several_batches_is_the_limit_by_its_name(tuned: Any) -> None:
    for setting in ("limit_train_batches", "overfit_batches"):
        decision = tuned(trainer_of(**{setting: 0.2}), module_of(), DataLoader(numbered(), 4)).decision
        assert (decision.batch_size, decision.limited_by) == (20, setting)
        assert (decision.steps_per_epoch, decision.requested_steps_per_epoch) == (1, 5)


def test_a_dataset_is_the_limit_where_one_batch_holds_all_of_it(tuned: Any) -> None:
    decision = tuned(trainer_of(accumulate_grad_batches=2), module_of(), DataLoader(numbered(), 4)).decision
    assert (decision.batch_size, decision.limited_by) == (100, "dataset")
    assert (decision.steps_per_epoch, decision.requested_steps_per_epoch) == (1, 13)


def test_the_sizes_of_all_loaders_are_printed_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    _, decision = ran(
        {"a": DataLoader(numbered(), 4), "b": DataLoader(numbered(), 8)},
        MemGuard(batch_size="largest", max_batch_size=10),
    )
    assert (decision.batch_size, decision.loader_batch_sizes) == (10, (10, 20))
    for words in ("batch size 10 + 20 (was 4 + 8) fits: ", "batch size 10 + 20, 1 epoch"):
        assert words in caplog.text


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
def test_a_share_of_the_batches_leaves_one_of_each_loader(mode: Any) -> None:
    loaders = CombinedLoader([DataLoader(numbered(1000), 4), DataLoader(numbered(100), 4)], mode)
    module, decision = ran(loaders, limit_train_batches=0.1)
    # At 11, ten batches of the smaller: a tenth is one. With its two batches of 4, an epoch ends after 8 samples.
    assert (decision.batch_size, len(module.shapes)) == ((11, 9) if mode == "max_size_cycle" else (8, 1))


@pytest.mark.parametrize(
    ("settings", "size"),
    [({"val_check_interval": 20}, 5), ({"limit_train_batches": 0.1}, 11), ({"val_check_interval": 500}, 50)],
    ids=str,
)
def test_where_the_loaders_own_size_breaks_a_limit_a_smaller_one_may_not(settings: Any, size: int) -> None:
    run = trainer_of(**settings)
    info = loaders_of_run.info_of(read_run_facts(run), DataLoader(numbered(), 50), "the loader", "train")
    assert loaders_of_run.largest_for(read_run_facts(run), info) == size


def test_a_batch_sampler_that_drops_what_is_short_is_left_a_full_batch() -> None:
    """Groups of thirty, from which only full batches are taken: at 31 an epoch would be empty."""

    class Groups(Strides):
        def __iter__(self) -> Iterator[list[int]]:
            for group in range(3):
                for start in range(group * 30, group * 30 + 31 - self.batch_size, self.batch_size):
                    yield list(range(start, start + self.batch_size))

        def __len__(self) -> int:
            return 3 * (30 // self.batch_size)

    module, decision = ran(DataLoader(numbered(), batch_sampler=Groups(100, 5)))  # type: ignore[arg-type]
    assert decision.batch_size == 30
    assert len(module.shapes) == 3


def test_workers_of_a_stream_can_each_fill_a_batch() -> None:
    module, decision = ran(DataLoader(Sized(60), 4, num_workers=2, drop_last=True))
    assert decision.batch_size == 30
    assert [shape[0] for shape in module.shapes] == [30, 30]


def test_loaders_are_made_again_each_epoch() -> None:
    class Data(pl.LightningDataModule):
        made = 0

        def train_dataloader(self) -> Any:
            self.made += 1
            return DataLoader(numbered(40 * self.made), batch_size=4)

    data = Data()
    module = fitted(data, 20, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert [shape[0] for shape in module.shapes] == [20] * 12
    assert data.made == 3


def test_a_loader_made_again_that_cannot_be_resized_trains_as_it_is() -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            if self.trainer is not None and self.trainer.current_epoch:
                return Plain()
            return DataLoader(numbered(40), batch_size=4)

    module = fitted(Data(), 20, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    assert [shape[0] for shape in module.shapes] == [20, 20, 6, 6]


def test_a_loader_that_lightning_makes_again_keeps_the_size() -> None:
    """`overfit_batches` rebuilds loaders from the arguments that Lightning recorded in the hook."""

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return Forgetful(numbered(), "once", batch_size=4, shuffle=True)

    assert [shape[0] for shape in fitted(Data(), 30, overfit_batches=2).shapes] == [30, 30]


def test_a_subclass_that_names_its_size_otherwise_is_left_alone_where_it_is_made_again() -> None:
    class Short(DataLoader[Any]):
        def __init__(self, dataset: Any, bs: int, **settings: Any) -> None:
            super().__init__(dataset, batch_size=bs, **settings)

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return Short(numbered(), 4, shuffle=True)

    with pytest.warns(UserWarning, match="does not take `batch_size`"):
        module = fitted(Data(), 30, overfit_batches=2)
    assert [shape[0] for shape in module.shapes] == [4, 4]
    assert [shape[0] for shape in fitted(Data(), 30).shapes] == [30, 30, 30, 10]


def test_without_lightnings_own_sampler() -> None:
    assert [shape[0] for shape in fitted(LOADERS["shuffled"](4), 50, use_distributed_sampler=False).shapes] == [50, 50]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_is_predicted_of_the_samples_that_there_are(trainer, small, dataset, drop_last):
    class Validated(small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])

    few = torch.utils.data.Subset(dataset, range(6))
    loaders = DataLoader(few, batch_size=1000), DataLoader(few, batch_size=1000, drop_last=drop_last)
    for mode in ("check", "tune"):
        guard = MemGuard(mode=mode, budget="1GiB")
        fit = trainer(guard, limit_val_batches=1.0, num_sanity_val_steps=0)
        fit.fit(Validated(), *loaders)
        assert guard.decision.footprint.batch_size == 6
        assert fit.num_val_batches == [0 if drop_last else 1]
