"""The largest batch, not the first: what is predicted from, how many samples were drawn, and the later warnings."""

from __future__ import annotations

import multiprocessing
import queue
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset

from lightning_memguard import CannotTraceError, MemGuard
from lightning_memguard.core.batch.batches import EPOCHS, Epoch
from lightning_memguard.core.capture import capture
from lightning_memguard.core.capture.capture import FIRST
from lightning_memguard.core.capture.predict import StepFailsError, predict
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.decision.decision import Budget, Request
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.training.data import samples
from lightning_memguard.training.data.copies import copy_for_reading
from lightning_memguard.training.data.loaders import source_of
from lightning_memguard.training.planning.search import largest_that_runs


def draw(loader: Any) -> samples.LoaderSamples:
    fixed = bool(source_of(loader, "the loader").fixed_because)
    return samples.draw(loader, fixed=fixed)


def of_lengths(*lengths: int) -> Any:
    return [torch.ones(length, dtype=torch.long) for length in lengths]


def pad(items: Any) -> torch.Tensor:
    return pad_sequence(list(items), batch_first=True)


# -- the largest of the samples


class Planned(Sampler[list[int]]):
    """Batches as they are."""

    def __init__(self, *batches: list[int]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


@pytest.mark.parametrize(
    ("lengths", "given", "differ"),
    [
        ((5, 9, 3, 7), {"batch_size": 2}, True),
        ((5, 5, 5), {"batch_size": 2}, False),
        ((5, 5, 5), {"batch_sampler": Planned([0, 1], [2])}, False),  # in their samples alone
        ((5, 9, 3, 7), {"batch_sampler": Planned([0, 1], [2, 3])}, True),
        ((5, 9, 3, 7), {"batch_sampler": Planned([0, 2, 3], [1])}, True),  # as many tokens, about
    ],
)
def test_batches_that_differ_in_length_are_known(lengths: Any, given: Any, differ: bool) -> None:
    assert draw(DataLoader(of_lengths(*lengths), collate_fn=pad, **given)).differ == differ


def test_a_cache_that_may_grow_over_them_is_noted() -> None:
    (note,) = samples.note_on_cache(AllocatorSettings())
    assert "memguard plan TARGET --length" in note
    assert samples.note_on_cache(AllocatorSettings(expandable_segments=True)) == ()
    assert samples.note_on_cache(AllocatorSettings(kind="exact")) == ()


def test_draws_of_a_loader_in_order_are_batches_that_it_gives() -> None:
    """The first ones hold the longest samples, with those that come next to them in the data and with no others."""
    lengths = [1, 2, 9, 3, 4, 5, 8, 6]
    draws = draw(DataLoader(of_lengths(*lengths), batch_size=2, collate_fn=lambda items: items)).batches.draws
    assert draws is not None
    drawn = [[len(each) for each in draws.batch(2, number)] for number in range(5)]
    assert drawn[0] == [9, 3]
    assert all(each in ([1, 2], [9, 3], [4, 5], [8, 6]) for each in drawn)


@pytest.mark.parametrize("fake", [True, False])
def test_memory_of_the_datasets_own_is_known_in_a_batch(monkeypatch: pytest.MonkeyPatch, fake: bool) -> None:
    """Images of different sizes come as they are, in a list; labels are stacked."""
    monkeypatch.setattr("lightning_memguard.training.data.draws.in_child", lambda: True)

    def together(items: list[tuple[torch.Tensor, int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
        return [image for image, _ in items], torch.tensor([label for _, label in items])

    pairs: Any = [(torch.ones(2 + i), i) for i in range(4)]
    batches = draw(DataLoader(pairs, batch_size=2, collate_fn=together)).batches
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        images, labels = replace(batches, draw=1).fake(2) if fake else batches.real(2, torch.device("cpu"))
        held = replace(batches, draw=int(fake)).held((images, labels), 2, fake=fake)
    assert [*map(id, held)] == [*map(id, images)]


def lengths_of_largest(loader: Any, size: int, weights: tuple[float, float], steps: int | None) -> list[int]:
    """Return the sum of the lengths in the largest batch of the least, the middle and the largest of the epochs."""
    draws = draw(loader).batches.draws
    assert draws is not None
    return [sum(map(len, draws.largest_of_epoch(size, Epoch(place, weights, steps)))) for place in (0, 10, EPOCHS - 1)]


@pytest.mark.parametrize(("weights", "steps"), [((1.0, 0.0), None), ((1.0, 0.0), 2), ((0.0, 1.0), None)])
def test_the_largest_batch_of_an_epoch_is_a_matter_of_chance(weights: tuple[float, float], steps: int | None) -> None:
    lengths = [*range(1, 40), 100]
    loader = DataLoader(of_lengths(*lengths), batch_size=4, shuffle=True, collate_fn=lambda items: items)
    least, middle, most = lengths_of_largest(loader, 4, weights, steps)
    assert most <= 100 + 39 + 38 + 37
    if weights[0]:
        assert least <= middle <= most
    if steps is None:
        assert least > 100, "the largest sample is in some batch of each epoch"
    elif steps == 2:
        assert least < 100, "but not of its first batches"


def test_the_largest_batch_of_a_loader_that_does_not_shuffle_is_known() -> None:
    lengths = [1, 2, 9, 3, 8, 5, 4, 6]
    loader = DataLoader(of_lengths(*lengths), batch_size=2, collate_fn=lambda items: items)
    assert lengths_of_largest(loader, 2, (1.0, 0.0), None) == [13, 13, 13]
    assert lengths_of_largest(loader, 2, (1.0, 0.0), 2) == [12, 12, 12]
    assert lengths_of_largest(loader, 4, (0.0, 1.0), None) == [15, 15, 15]


def program_of(loader: Any, step: Any = None) -> LoopProgram:
    """A step of one layer on a loader's batches, which are lists of samples."""
    return LoopProgram(
        nn.Linear(1, 8), draw(loader).batches, step, lambda each: torch.optim.SGD(each, lr=0.1), torch.device("cpu")
    )


def of_lists(*lengths: int, shuffle: bool = True) -> Any:
    return DataLoader(of_lengths(*lengths), batch_size=4, shuffle=shuffle, collate_fn=lambda items: items)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[int]], list[int]]], None]:
    """Have nothing captured: a function says from the lengths in a batch what a step keeps, in bytes."""

    def write(bytes_of: Callable[[list[int]], list[int]]) -> None:
        def step(program: Any, size: int, method: Any, variant: Any = FIRST, **_: object) -> Trace:
            epoch = variant.epoch and variant.epoch._replace(steps=program.steps_of_epoch(size))
            with FakeTensorMode(allow_non_fake_inputs=True):
                lengths = [len(each) for each in program.of_draw(variant.number, epoch).batches.fake(size)]
            sizes = enumerate(bytes_of(lengths))
            return Trace(size, "cpu", method, tuple(Event("alloc", block, nbytes) for block, nbytes in sizes))

        monkeypatch.setattr(capture, "capture_here", step)

    return write


@pytest.mark.parametrize("shuffle", [True, False])
def test_uneven_samples_are_predicted_with_the_range_of_epochs(shuffle: bool, written: Any) -> None:
    """A step whose memory goes with its samples' lengths and with the square of the longest."""
    written(lambda lengths: [4 * sum(lengths), 4 * len(lengths) * max(lengths) ** 2])
    program = program_of(of_lists(*range(10, 60), shuffle=shuffle))
    found = predict(program, 4, AllocatorSettings.for_device("cpu", {})).footprint_at(4)
    assert (found.method, re.split("[,;]", found.notes[0])[0]) == (
        "fake",
        "samples differ in size: predicted for the largest batch of an epoch",
    )
    assert ("drawn at random" in found.notes[0]) == shuffle
    if not shuffle:
        assert found.lowest == found.highest
        return
    assert found.low is not None
    assert found.high is not None
    assert found.low.allocated_bytes < found.peak_allocated_bytes < found.high.allocated_bytes
    assert found.high.allocated_bytes < 1.1 * found.low.allocated_bytes, "the longest sample is in each epoch"


def by_sample(model: nn.Module, items: list[torch.Tensor]) -> torch.Tensor:
    """A loop over the samples, as every detector's matcher is."""
    return sum((model(each.float()[:, None]).square().mean() for each in items), start=torch.zeros(()))


def one_value_a_sample(model: nn.Module, items: list[torch.Tensor]) -> torch.Tensor:
    """Batch norm over as many values as samples, which refuses one."""
    means = torch.stack([model(each.float()[:, None]).mean() for each in items])
    return nn.functional.batch_norm(means[:, None], None, None, training=True).sum()


def spread(model: nn.Module, items: list[torch.Tensor]) -> torch.Tensor:
    if len(items) < 3:
        raise ValueError("no spread of so few")
    return model(torch.cat(items).float()[:, None]).std()


def two_at_least(lengths: list[int]) -> list[int]:
    """As `one_value_a_sample`, written out: a block for each sample."""
    if len(lengths) < 2:
        raise ValueError("no norm of one value")
    return [32 * each for each in lengths]


@pytest.mark.parametrize(
    "step",
    [two_at_least, *(pytest.param(each, marks=pytest.mark.long) for each in (by_sample, one_value_a_sample, spread))],
)
def test_uneven_samples_keep_their_growth_and_begin_at_the_least_size_that_runs(step: Any, written: Any) -> None:
    torch.manual_seed(0)
    if step is two_at_least:
        written(step)
    prediction = predict(program_of(of_lists(*range(10, 60)), step), 4, AllocatorSettings.for_device("cpu", {}))
    assert prediction.curve.scalable
    usable = prediction.footprint_at(9).most_device_bytes
    found, proven = largest_that_runs(prediction, Budget(usable, usable, 0, "given"), Request(4, max_batch_size=16))
    assert 7 <= found.batch_size <= 10
    assert found.batch_size in proven.curve.proofs
    least = Request(4, max_batch_size=1)
    if step is not by_sample:
        with pytest.raises(StepFailsError, match="at batch size 1 the step could not run"):
            largest_that_runs(prediction, Budget(usable, usable, 0, "given"), least)


@pytest.mark.parametrize("keeps", [True, False])
def test_tensors_that_the_dataset_keeps_are_not_the_batchs_own(keeps: bool) -> None:
    """A step on values runs on them: they take nothing, where a dataset that makes them again has them made."""

    class Lists(Dataset[Any]):
        samples = of_lengths(500, 700, 600)

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return self.samples[index] if keeps else self.samples[index].clone()

    class Reads(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.weight * sum(sample.sum().item() for sample in batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    guard = MemGuard("check")
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[guard])
    trainer.fit(Reads(), DataLoader(Lists(), batch_size=3, collate_fn=lambda items: items))
    assert guard.decision is not None
    footprint = guard.decision.footprint
    assert footprint is not None
    assert (footprint.method, footprint.parts["batch"]) == ("real", 0 if keeps else 8 * (500 + 700 + 600))


def test_the_longest_sample_fills_the_whole_batch() -> None:
    """Every row is as long as the longest, in a batch of any size."""
    drawn = draw(DataLoader(of_lengths(3, 9, 4), batch_size=2, collate_fn=pad))
    assert drawn.batches.fake(50).shape == (50, 9)
    assert drawn.note == ""  # all three were seen


def test_padding_gives_the_longest_of_each_dimension() -> None:
    """One sample is longest in its text, another in its image, a third in its sound: a batch of them has all three."""

    def sample(text: int, image: int, sound: int) -> Any:
        return torch.zeros(text), torch.zeros(3, image), torch.zeros(sound)

    def together(items: Any) -> dict[str, torch.Tensor]:
        texts, images, sounds = zip(*items, strict=True)
        return {
            "text": pad(texts),
            "image": pad([image.T for image in images]),
            "sound": pad(sounds),
        }

    data: Any = [sample(5, 5, 5), sample(90, 5, 5), sample(5, 40, 5), sample(5, 5, 70)]
    batches = draw(DataLoader(data, batch_size=2, collate_fn=together)).batches
    shapes = {name: tuple(tensor.shape) for name, tensor in batches.fake(10).items()}
    assert shapes == {"text": (10, 90), "image": (10, 40, 3), "sound": (10, 70)}


def test_more_longest_samples_than_a_small_batch_holds() -> None:
    """Ten tensors a sample, each sample longest in another one: all of them count."""

    def sample(longest: int) -> Any:
        return [torch.zeros(30 if place == longest else 2) for place in range(10)]

    def together(items: Any) -> list[torch.Tensor]:
        return [pad(column) for column in zip(*items, strict=True)]

    data: Any = [sample(longest) for longest in range(10)]
    batches = draw(DataLoader(data, batch_size=2, collate_fn=together)).batches
    assert [tuple(tensor.shape) for tensor in batches.fake(7)] == [(7, 30)] * 10


class Lengths(Dataset[torch.Tensor]):
    """Each sample is as long as its index, so they are sorted by length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(index % self.count + 1)


@pytest.mark.parametrize("shuffle", [False, True])
def test_data_sorted_by_length_shows_its_longest(shuffle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More samples than are drawn: both ends of the data are among them, and the note says that they are a part."""
    monkeypatch.setattr(samples, "MOST_SECONDS", 60.0)  # a busy machine reads fewer
    drawn = draw(DataLoader(Lengths(20_000), batch_size=2, collate_fn=pad, shuffle=shuffle))
    assert drawn.batches.fake(2).shape == (2, 20_000)
    assert drawn.note.startswith("predicted for the largest of 4096 samples; a larger one may take more")


def test_data_that_repeats_itself_shows_its_longest() -> None:
    """64 samples, over and over: every 176th of them would be one of four."""

    class Repeated(Lengths):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.ones(9 if index % 64 == 37 else 1)

    assert draw(DataLoader(Repeated(720_720), batch_size=2, collate_fn=pad)).batches.fake(2).shape == (2, 9)


def test_slow_data_is_drawn_from_end_to_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four samples a second, and five seconds."""
    read: list[int] = []

    class Slow(Lengths):
        def __getitem__(self, index: int) -> torch.Tensor:
            read.append(index)
            return super().__getitem__(index)

    monkeypatch.setattr(samples, "time", SimpleNamespace(monotonic=lambda: len(read) / 4))
    monkeypatch.setattr(samples, "MOST_SECONDS", 5.0)
    drawn = draw(DataLoader(Slow(1000), batch_size=2, collate_fn=pad))
    assert len(read) == 22  # the first twice, to see whether the dataset keeps it
    assert drawn.batches.fake(2).shape == (2, 1000)
    assert drawn.note.startswith("predicted for the largest of 21 samples; a larger one")


@pytest.mark.parametrize(("slow_seconds", "count"), [(60.0, 16), (-1.0, 2)])
def test_of_slow_data_sixteen_samples_are_drawn_and_fewer_if_they_take_seconds(
    slow_seconds: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "MOST_SECONDS", -1.0)
    monkeypatch.setattr(samples, "SLOW_SECONDS", slow_seconds)
    drawn = draw(DataLoader(Lengths(1000), batch_size=2, collate_fn=pad))
    assert drawn.note.startswith(f"predicted for the largest of {count} samples; a larger one")
    assert drawn.batches.fake(2).shape[0] == 2


def test_a_sampler_that_draws_again_each_epoch_is_predicted_on_all_it_draws_from() -> None:
    """Ten of a thousand an epoch: other epochs have other samples."""
    data = Lengths(1000)
    drawn = draw(DataLoader(data, 2, sampler=RandomSampler(data, num_samples=10), collate_fn=pad))
    assert drawn.batches.fake(2).shape == (2, 1000)


def test_a_stream_says_that_it_saw_the_first_samples() -> None:
    class Growing(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.ones(1 + index // 1000) for index in range(1_000_000))

    drawn = draw(DataLoader(Growing(), batch_size=2, collate_fn=pad))
    assert drawn.note.startswith("predicted for the largest of the first 4096 samples")
    assert drawn.batches.fake(2).shape == (2, 5)


def test_of_batches_made_by_the_user_the_largest_is_taken_wherever_it_is() -> None:
    class Sorted(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[start, start + 1] for start in range(0, 20_000, 2)])

    loader = DataLoader(Lengths(20_000), batch_sampler=Sorted(), collate_fn=pad)  # type: ignore[arg-type]
    drawn = draw(loader)
    assert drawn.batches.small.shape == (2, 20_000)
    assert "batches drawn; a larger one" in drawn.note


# -- collate functions with requirements


@pytest.mark.parametrize(("of", "unit"), [(2, 2), (4, 4), (8, 8)])
def test_a_collate_function_that_wants_multiples(of: int, unit: int) -> None:
    def groups(items: Any) -> torch.Tensor:
        if not items or len(items) % of:
            raise ValueError(f"{len(items)} is not a multiple of {of}")
        return torch.stack(items)

    drawn = draw(DataLoader(of_lengths(3, 3, 3), batch_size=8, collate_fn=groups))
    assert drawn.unit == unit
    assert drawn.batches.fake(16).shape == (16, 3)


def test_a_collate_function_that_refuses_a_single_sample() -> None:
    def several(items: Any) -> torch.Tensor:
        assert len(items) > 1
        return torch.stack(items)

    drawn = draw(DataLoader(of_lengths(3, 3), batch_size=2, collate_fn=several))
    assert (drawn.unit, tuple(drawn.batches.fake(5).shape)) == (1, (5, 3))


def test_samples_that_cannot_be_read_are_left_out() -> None:
    class Broken(Lengths):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index % 2:
                raise OSError("truncated image")
            return super().__getitem__(index)

    assert draw(DataLoader(Broken(9), batch_size=2, collate_fn=pad)).batches.fake(2).shape == (2, 9)


def test_many_samples_fetched_at_once_are_asked_for_a_few_at_first() -> None:
    asked: list[int] = []

    class Many(Lengths):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            asked.append(len(indices))
            return [torch.ones(4) for _ in indices]

    draw(DataLoader(Many(300), batch_size=2))
    assert asked[:4] == [2, 4, 8, 16]
    assert max(asked) == 64


# -- nothing of the user's is consumed or moved

SHARED = np.random.default_rng(5)


class Touchy(Dataset[torch.Tensor]):
    """Everything that reading can move: an open file, counters, lists, and generators, also global ones."""

    def __init__(self, path: Path) -> None:
        self.file = path.open()
        self.reads = 0
        self.shared_reads = multiprocessing.Value("i", 0)
        self.log: list[int] = []
        self.counts = {"reads": 0}
        self.transform = Jitter()
        self.closed = False

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        self.shared_reads.value += 1
        self.log.append(index)
        self.counts["reads"] += 1
        line = float(self.file.readline())
        return self.transform(torch.full((3,), line + SHARED.normal()))

    def __del__(self) -> None:
        self.file.close()


class Jitter:
    def __init__(self) -> None:
        self.calls = 0
        self.random = torch.Generator().manual_seed(1)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return tensor + torch.rand(3, generator=self.random)


class Collating:
    def __init__(self) -> None:
        self.calls = 0
        self.random = np.random.RandomState(3)

    def collate(self, items: Any) -> torch.Tensor:
        self.calls += 1
        return torch.stack(items) * float(self.random.rand())


def test_nothing_that_reading_could_move_has_moved() -> None:
    """Files keep their place and stay open although the copy that was read from closes its own when it is deleted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lines")
        path.write_text("\n".join(map(str, range(1000))))
        data, collating, generator = Touchy(path), Collating(), torch.Generator()
        data.file.readline()

        def state() -> list[Any]:
            return [
                data.file.tell(), data.reads, data.shared_reads.value, list(data.log), dict(data.counts),
                data.transform.calls, data.transform.random.get_state().tolist(), collating.calls,
                str(collating.random.get_state()), generator.get_state().tolist(), str(SHARED.bit_generator.state),
                torch.get_rng_state().tolist(), str(np.random.get_state()),
            ]  # fmt: skip

        before = state()
        loader = DataLoader(data, batch_size=4, collate_fn=collating.collate, shuffle=True, generator=generator)
        assert draw(loader).batches is not None
        assert state() == before
        assert data.file.readline() == "1\n"


def test_a_stream_over_an_open_file_is_read_and_wound_back() -> None:
    class Lines(IterableDataset[torch.Tensor]):
        def __init__(self, path: Path) -> None:
            self.file = path.open()

        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.full((2,), float(line)) for line in self.file)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lines")
        path.write_text("\n".join(map(str, range(100))))
        data = Lines(path)
        assert draw(DataLoader(data, batch_size=4)).batches.fake(3).shape == (3, 2)
        assert [int(sample[0]) for sample in data] == list(range(100))


def test_an_iterator_held_further_inside_is_left_alone() -> None:
    class Inner(Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.source = iter(of_lengths(*[3] * 20))

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> torch.Tensor:
            return next(self.source)

    inner = Inner()
    with pytest.raises(CannotTraceError, match=r"Inner\.source is a list_iterator"):
        draw(DataLoader(torch.utils.data.Subset(inner, range(10)), batch_size=2))
    assert len(list(inner.source)) == 20


def test_datasets_that_refer_to_each_other() -> None:
    class Paired(Lengths):
        other: Any = None

    one, two = Paired(5), Paired(5)
    one.other, two.other = two, one
    clone = copy_for_reading(one)
    assert clone is not one
    assert clone.other.other is clone


# -- while it trains


class Tagger(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 2)
        self.randoms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.randoms.append(float(torch.rand(())) if type(self.trainer) is pl.Trainer else 0.0)
        return self.head(self.embedding(batch)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Later(Dataset[torch.Tensor]):
    """The samples that are read first, at setup, are short; those of the training come in these lengths."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.trains = False

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(self.lengths[index] if self.trains else 10, dtype=torch.long)


class Begin(pl.Callback):
    def __init__(self, data: Later) -> None:
        self.data = data

    def on_train_start(self, *_: Any) -> None:
        self.data.trains = True


def trained(trainer: Any, *lengths: int) -> tuple[int, Tagger]:
    """How many batches were announced in a training, and the module."""
    data, module = Later(*lengths), Tagger()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl.seed_everything(1)
        trainer(MemGuard("check"), Begin(data)).fit(module, DataLoader(data, batch_size=1))
    return sum("larger than the" in str(each.message) for each in caught), module


@pytest.fixture
def said(begun: Any, played: Any, recwarn: pytest.WarningsRecorder) -> Callable[..., list[str]]:
    """What is announced of texts of these lengths, of a step that follows their bytes."""

    def announce(*lengths: int, **settings: Any) -> list[str]:
        played(lambda trace: trace.plus({"activations": 10_000 * trace.batch[1]}))
        run = begun(Tagger(), DataLoader(of_lengths(*[10] * 8), batch_size=1), mode="check", **settings)
        for batch_idx, length in enumerate(lengths):
            run.check_batch("train", torch.ones(1, length, dtype=torch.long), batch_idx, len(lengths))
        return [str(each.message) for each in recwarn if "larger than the" in str(each.message)]

    return announce


def test_a_larger_batch_is_reported_once_and_again_only_when_a_tenth_larger(said: Any) -> None:
    found = said(10, 30, 30, 32, 33, 34, 20, 50)
    assert [text.split(" larger")[0] for text in found] == [
        "MemGuard: Training batch 1 has [1, 30],",
        "MemGuard: Training batch 5 has [1, 34],",
        "MemGuard: Training batch 7 has [1, 50],",
    ]
    assert "larger than the [1, 10] of the prediction. It is predicted to need " in found[0]
    assert found[0].endswith("It fits.")


def test_a_larger_batch_that_may_not_fit(said: Any) -> None:
    (text,) = said(10, 400, budget="2MiB")
    assert text.endswith("It may run out of memory: lower the batch size or truncate long samples.")


def test_a_warning_moves_no_random_state(trainer: Any) -> None:
    count, loud = trained(trainer, 10, 30, 90, 300)
    assert count == 3
    module = Tagger()
    pl.seed_everything(1)
    trainer().fit(module, DataLoader(Later(10, 30, 90, 300), batch_size=1))
    assert loud.randoms == module.randoms


@pytest.mark.usefixtures("taped")
def test_a_warning_that_fails_leaves_the_training_alone(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no prediction today")

    monkeypatch.setattr("lightning_memguard.training.run.batch_monitor.predict", broken)
    _, module = trained(trainer, 10, 30, 90)
    assert len(module.randoms) == 3


def test_all_samples_alike_need_no_note() -> None:
    assert draw(DataLoader(TensorDataset(torch.zeros(9000, 3)), batch_size=4)).note == ""


@pytest.mark.parametrize("kind", [queue.Queue, multiprocessing.get_context("spawn").SimpleQueue])
def test_a_queue_that_a_dataset_reads_from_is_left_full(kind: Any) -> None:
    class Queued(IterableDataset[torch.Tensor]):
        def __init__(self) -> None:
            self.queue = kind()
            self.queue.put(1.0)

        def __iter__(self) -> Iterator[torch.Tensor]:
            while not self.queue.empty():
                yield torch.tensor([self.queue.get()])

    data = Queued()
    with pytest.raises(CannotTraceError, match=r"queue is a .*Queue, which can be read only once"):
        draw(DataLoader(data))
    assert not data.queue.empty()


# -- real batches


def test_a_real_batch_is_collated_of_real_samples_at_any_size() -> None:
    """Boxes with the number of their image, which no repeated batch would have."""

    def collate(items: Any) -> Any:
        return torch.cat([torch.stack([torch.full((len(boxes),), float(place)), boxes]) for place, boxes in items], 1)

    data: Any = [torch.full((1 + index % 5,), float(index)) for index in range(40)]
    numbered = DataLoader(data, batch_size=4, collate_fn=lambda items: collate(enumerate(items)))
    batches = draw(numbered).batches
    for size in (3, 17):
        for number in (0, 1):
            place, value = replace(batches, draw=number).real(size, torch.device("cpu"))
            assert place.unique().tolist() == list(range(size))
            assert len(value.unique()) == size, "each sample comes once"
    assert 5 in torch.bincount(batches.real(3, torch.device("cpu"))[0].long()), "a largest one is among them"


def test_draws_differ_and_each_is_the_same_again() -> None:
    batches = draw(DataLoader(TensorDataset(torch.arange(100.0)), batch_size=4)).batches

    def values(number: int) -> Any:
        return replace(batches, draw=number).real(8, torch.device("cpu"))[0].tolist()

    assert values(1) == values(1)
    assert len({tuple(values(number)) for number in range(4)}) == 4


def test_a_sampler_of_the_users_own_decides_which_samples_come_together() -> None:
    class FourOfEachClass(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([index for label in range(5) for index in range(label, 100, 5)][::-1])

        def __len__(self) -> int:
            return 100

    data = TensorDataset(torch.arange(100) % 5)
    batches = draw(DataLoader(data, batch_size=4, sampler=FourOfEachClass())).batches
    assert batches.real(4, torch.device("cpu"))[0].tolist() == [4, 4, 4, 4]


def test_tensors_of_a_sample_are_copied_into_a_batch_of_them() -> None:
    data: Any = [torch.ones(3), torch.ones(4)]
    batches = draw(DataLoader(data, batch_size=2, collate_fn=list)).batches
    for tensor in batches.real(2, torch.device("cpu")):
        assert tensor.data_ptr() not in [item.data_ptr() for item in data]


def test_samples_are_let_go_of_with_the_batches() -> None:
    batches = draw(DataLoader(TensorDataset(torch.arange(100.0)), batch_size=4)).batches
    assert batches.is_real_at(7)
    program: Any = LoopProgram(nn.Linear(1, 1), batches, lambda model, x: model(x), None, torch.device("cpu"))
    assert not program.without_samples().is_real_at(7)


def test_samples_kept_are_few_and_from_all_of_the_data() -> None:
    """Objects leave pages behind that Python keeps: of 4,096 pairs of tensors 1.1 MiB, of 1,024 0.5."""
    batches = draw(DataLoader(TensorDataset(torch.arange(10_000.0)), batch_size=4)).batches
    (values,) = batches.real(4096, torch.device("cpu"))
    assert len(values.unique()) == 1024
    assert values.min() == 0
    assert values.max() == 9999
    assert torch.diff(values.unique()).max() < 20
