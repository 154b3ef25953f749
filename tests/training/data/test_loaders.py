"""Facts that are read from a loader, and that reading it takes nothing away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_memguard import CannotResizeLoaderError, CannotTraceError
from lightning_memguard.training.data import loaders, samples
from lightning_memguard.training.data.resizing import resize
from lightning_memguard.training.facts.lightning_port import data_source, set_batch_size
from lightning_memguard.training.facts.run_facts import read_run_facts


def described(loader: Any) -> loaders.Source:
    return loaders.source_of(loader, "the loader")


def resized(loader: Any, batch_size: int) -> Any:
    return resize(loader, batch_size, described(loader).fixed_because)


def drawn(loader: Any) -> Any:
    return samples.draw(loader, fixed=bool(described(loader).fixed_because)).batches


def test_a_sampler_decides_what_is_drawn_and_how_much_there_is() -> None:
    dataset = TensorDataset(torch.arange(100.0).unsqueeze(1))
    loader = DataLoader(dataset, batch_size=4, sampler=SubsetRandomSampler([7, 8, 9]))
    source = described(loader)
    assert source.dataset_size == 3
    assert set(drawn(source.loader).small[0].flatten().tolist()) <= {7.0, 8.0, 9.0}


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.zeros(5) for _ in range(1000))


def test_an_iterable_dataset_is_sampled_by_a_fresh_iterator() -> None:
    source = described(DataLoader(Stream(), batch_size=4))
    assert source.dataset_size is None
    assert drawn(source.loader).fake(7).shape == (7, 5)
    assert len(next(iter(resized(source.loader, 6)))) == 6


class Named(DataLoader[Any]):
    """A subclass whose constructor asks for what it does not keep."""

    def __init__(self, dataset: Any, secret: str, **settings: Any) -> None:
        assert secret
        super().__init__(dataset, **settings)
        self.mood = "fine"


def test_a_resized_loader_keeps_everything_but_its_size(dataset: TensorDataset) -> None:
    loader = Named(dataset, "once", batch_size=8, shuffle=True, drop_last=True)
    larger = resized(loader, 30)
    assert type(larger) is Named
    assert (larger.mood, larger.sampler, larger.drop_last) == ("fine", loader.sampler, True)
    assert [len(x) for x, _ in larger] == [30, 30, 30]
    assert loader.batch_size == 8
    assert len(next(iter(loader))[0]) == 8


class Planned(Sampler[list[int]]):
    """A batch sampler that made its batches beforehand: its attribute is a memory, not a setting."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.plan = [list(range(start, start + batch_size)) for start in range(0, 100, batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.plan)


def test_loaders_without_a_size_of_their_own_say_so(dataset: TensorDataset) -> None:
    planned = DataLoader(dataset, batch_sampler=Planned(5))
    for loader, why in ((DataLoader(dataset, batch_size=None), "batch_size=None"), (planned, "Planned")):
        assert why in described(loader).fixed_because
        with pytest.raises(CannotResizeLoaderError, match="pass a DataLoader with `batch_size=`"):
            resized(loader, 4)
    assert "not a torch DataLoader" in described([torch.zeros(2, 16)]).fixed_because


def test_where_no_sample_can_be_read_the_first_failure_is_the_reason() -> None:
    """A dataset whose connection broke at the first sample says so there; what follows is another error."""

    class Broken(Dataset[torch.Tensor]):
        reads = 0

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            type(self).reads += 1
            raise OSError("connection refused" if type(self).reads == 1 else "already closed")

    with pytest.raises(OSError, match="connection refused"):
        drawn(DataLoader(Broken(), batch_size=4))


def test_a_batch_without_a_tensor_is_refused() -> None:
    words: Any = ["to", "be"]
    with pytest.raises(CannotTraceError, match="holds no tensor"):
        drawn(DataLoader(words, batch_size=2))


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_an_epoch(dataset: TensorDataset, drop_last: bool) -> None:
    loader = DataLoader(dataset, batch_size=8, drop_last=drop_last)
    assert described(loader).batches(8) == len(loader)


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.train = TensorDataset(torch.randn(100, 16), torch.randint(0, 4, (100,)))

    def train_dataloader(self) -> Any:
        self.asked = True
        return DataLoader(self.train, batch_size=self.hparams["batch_size"])


def test_a_size_is_set_wherever_it_is_kept(small: Any) -> None:
    """Module attribute, datamodule hyperparameter, and the copy of it that loggers get."""
    module, data = small(batch_size=8), Data()
    set_back = set_batch_size(module, data, 48)
    assert module.batch_size == 48
    assert data.hparams["batch_size"] == data.hparams_initial["batch_size"] == 48
    set_back()
    assert (module.batch_size, data.hparams["batch_size"], data.hparams_initial["batch_size"]) == (8, 8, 8)


def test_a_size_that_its_owner_has_changed_since_is_not_set_back(small: Any) -> None:
    module = small(batch_size=8)
    set_back = set_batch_size(module, None, 48)
    module.batch_size = 5
    set_back()
    assert module.batch_size == 5


def test_a_loader_hook_is_called_on_a_copy(trainer: Any) -> None:
    data = Data()
    data.setup("fit")
    fit = trainer()
    fit.fit_loop._data_source.instance = data
    info = loaders.find(read_run_facts(fit), "train")
    assert (info.batch_size, info.origin) == (8, "the datamodule's train_dataloader()")
    assert not hasattr(data, "asked")


def test_a_setup_that_reads_its_trainer_runs_on_the_copy_and_its_loggers_are_silent(trainer: Any, small: Any) -> None:
    seen = []

    class Reads(small):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            seen.append(self.trainer.strategy.root_device.type)
            self.logger.log_metrics({"setup": 1.0})
            self.trainer.logger.experiment.watch(self)

        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.zeros(8, 16)), batch_size=4)

    run, module = trainer(logger=CSVLogger(".")), Reads()
    run.strategy.connect(module)
    module.trainer = run
    data_source(run.fit_loop).instance = module
    assert loaders.find(read_run_facts(run), "train").batch_size == 4
    assert (seen, run.logger.experiment.metrics) == (["cpu"], [])


def test_a_loader_hook_that_fails_leaves_torchs_classes_as_they_were(trainer: Any, small: Any) -> None:
    """Lightning records a loader's arguments with patches that it removes only if nothing was raised."""

    class Fails(small):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            raise ValueError("no data today")

    before = DataLoader.__init__, BatchSampler.__init__
    run = trainer()
    run.strategy.connect(Fails())
    data_source(run.fit_loop).instance = run.lightning_module
    with pytest.raises(ValueError, match="no data today"):
        loaders.find(read_run_facts(run), "train")
    assert (DataLoader.__init__, BatchSampler.__init__) == before
