"""Batches by predicted memory: as large as fits at their length, every sample once, as many on each rank."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed, nn
from torch.utils.data import DataLoader

from lightning_memguard import LengthBatchSampler, MemGuard, MemGuardError

pytestmark = pytest.mark.usefixtures("taped")

SIZES = {32: 20, 64: 10, 128: 5}
LENGTHS = [1 + 37 * place % 128 for place in range(300)]


def bucket(length: int) -> int:
    return min(known for known in SIZES if length <= known)


def test_batches_are_of_one_bucket_and_as_large_as_fits():
    batches = list(LengthBatchSampler(LENGTHS, SIZES))
    by_bucket: dict[int, list[int]] = {}
    for batch in batches:
        (known,) = {bucket(LENGTHS[sample]) for sample in batch}
        by_bucket.setdefault(known, []).append(len(batch))
    for known, counts in by_bucket.items():
        assert sorted(counts)[1:] == [SIZES[known]] * (len(counts) - 1)


def test_each_epoch_has_an_order_of_its_own_that_its_seed_tells():
    sampler = LengthBatchSampler(LENGTHS, SIZES, seed=3)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    assert sorted(itertools.chain(*second)) == list(range(300))
    assert list(LengthBatchSampler(LENGTHS, SIZES, seed=4)) == second == list(pickle.loads(pickle.dumps(sampler)))
    assert list(copy.deepcopy(sampler)) == second


def test_little_is_padded():
    lengths = [1 + 37 * place % 128 for place in range(3000)]
    batches = list(LengthBatchSampler(lengths, SIZES))
    padded = sum(len(batch) * max(lengths[sample] for sample in batch) for batch in batches)
    assert padded < 1.1 * sum(lengths)


def test_without_shuffling_the_shortest_samples_come_first():
    sampler = LengthBatchSampler([100, 30, 120, 20, 90, 25, 20], {128: 2, 32: 4}, shuffle=False)
    assert list(sampler) == [[3, 6, 5, 1], [4, 0], [2]]
    assert len(sampler) == 3
    assert list(sampler.sampler) == list(range(7))


@given(
    st.lists(st.integers(1, 128), min_size=1, max_size=60),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_every_sample_is_drawn_once_and_every_rank_has_as_many_batches(
    lengths: list[int], sizes: tuple[int, int, int], ranks: int, epoch: int
):
    fits = dict(zip(SIZES, sizes, strict=True))
    samplers = [LengthBatchSampler(lengths, fits, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    of_ranks = [list(sampler) for sampler in samplers]
    assert {len(batches) for batches in of_ranks} == {len(samplers[0])}
    batches = list(itertools.chain(*of_ranks))
    for batch in batches:
        (known,) = {bucket(lengths[sample]) for sample in batch}
        assert 0 < len(batch) <= fits[known]
    drawn = sorted(itertools.chain(*batches))
    assert sorted(set(drawn)) == list(range(len(lengths)))
    if len(drawn) > len(lengths):
        assert {len(batch) for batch in batches} == {1}  # none was left to divide


def test_in_each_step_the_ranks_have_batches_of_about_the_same_length():
    ranks = [list(LengthBatchSampler(LENGTHS, SIZES, num_replicas=2, rank=rank)) for rank in range(2)]
    steps = zip(*ranks, strict=True)
    apart = [step for step in steps if len({bucket(LENGTHS[batch[0]]) for batch in step}) > 1]
    assert len(apart) < len(SIZES)


def test_ranks_are_those_of_the_process_group_once_there_is_one(monkeypatch: pytest.MonkeyPatch):
    sampler = LengthBatchSampler(LENGTHS, SIZES)
    alone = list(sampler)
    for name, answer in {"is_initialized": True, "get_world_size": 2, "get_rank": 1}.items():
        monkeypatch.setattr(distributed, name, lambda answer=answer: answer)
    assert len(sampler) == len(list(sampler)) == -(-len(alone) // 2)
    assert list(sampler) == list(LengthBatchSampler(LENGTHS, SIZES, num_replicas=2, rank=1))


# What is refused


@pytest.mark.parametrize(
    ("lengths", "sizes", "words"),
    [
        ([5, 200, 300], SIZES, "Sample 1 has length 200, and the longest with a batch size is 128. .* for 300 too"),
        ([5, 40], {32: 4, 64: 0}, "Not even one sample of length 64 fits, and 1 sample .* sample 1 of length 40"),
        ([], SIZES, "lengths is empty"),
        ([5], {}, "batch_sizes is empty"),
        ([5], {32: -1}, r"batch_sizes\[32\]=-1 is not a count"),
    ],
)
def test_what_cannot_be_batched_is_refused(lengths: list[int], sizes: dict[int, int], words: str):
    with pytest.raises(MemGuardError, match=words):
        LengthBatchSampler(lengths, sizes)


def test_a_size_of_0_at_a_length_that_no_sample_needs_is_fine():
    assert list(LengthBatchSampler([5, 40], {64: 2, 4096: 0}, shuffle=False)) == [[0, 1]]


@pytest.mark.parametrize(("ranks", "rank"), [(2, 2), (1, -1)])
def test_a_rank_that_does_not_exist_is_refused(ranks: int, rank: int):
    with pytest.raises(MemGuardError, match=f"rank={rank} is not one of {ranks} rank"):
        LengthBatchSampler(LENGTHS, SIZES, num_replicas=ranks, rank=rank)


# In Lightning


class Texts(pl.LightningModule):
    """Notes the samples of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.seen: list[list[list[int]]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        numbers, ids = batch
        self.seen[-1].append(numbers.tolist())
        return nn.functional.cross_entropy(self.out(self.embed(ids)).flatten(0, 1), ids.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def collate(samples: list[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    numbers, texts = zip(*samples, strict=True)
    return torch.tensor(numbers), nn.utils.rnn.pad_sequence([*texts], batch_first=True)


@pytest.mark.parametrize(("divides", "guards"), [(True, True), (False, False)])
def test_it_trains_under_a_trainer_with_and_without_memguard(trainer: Any, divides: bool, guards: bool):
    """Each epoch has its order, which the Trainer sets; MemGuard leaves it as it is."""
    samples = [(number, torch.ones(length, dtype=torch.long)) for number, length in enumerate(LENGTHS)]
    sampler, module = LengthBatchSampler(LENGTHS, SIZES), Texts()
    callbacks = [MemGuard(batch_size="largest", budget="2GiB")] if guards else []
    fit = trainer(*callbacks, max_epochs=2, use_distributed_sampler=divides)
    fit.fit(module, DataLoader(samples, batch_sampler=sampler, collate_fn=collate))  # type: ignore[arg-type]
    for epoch, seen in enumerate(module.seen):
        sampler.set_epoch(epoch)
        assert seen == list(sampler)
    assert module.seen[0] != module.seen[1]
