"""Lengths of a dataset and the batch size that fits each -> batches of similar samples, each as large as fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle, islice
from math import ceil

import torch
from torch import distributed
from torch.utils.data import Sampler
from typing_extensions import override

from lightning_memguard.core.decision.decision import check_count
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import counted

_WINDOW = 10  # batches


class LengthBatchSampler(Sampler[list[int]]):
    """Batches of samples of similar length, each with as many samples as fit at that length.

    A sample is in a batch with others whose length has the same next known length, and such a batch has as many samples
    as fit at that length: pad it to its longest sample. In each epoch every sample is drawn once, in a new order, in
    which those of the most similar length among some ten batches come together, so that little is padded. Every rank
    gets the same number of batches, and in each step they are of about the same length; for this, a few batches are
    divided.

    Give it to the `DataLoader` as ``batch_sampler``, in plain PyTorch or in Lightning; on several devices, with
    ``Trainer(use_distributed_sampler=False)``, as it divides the samples among the ranks itself.

    Args:
        lengths: of each sample of the dataset, in order.
        batch_sizes: by length, the largest batch size that fits, as `lightning_memguard.batch_sizes` returns it.
        shuffle: whether samples and batches come in a new order each epoch; else the shortest come first.
        seed: of that order; the same on all ranks.
        num_replicas: how many ranks train together (default: as many as the process group has).
        rank: which of them this is (default: as the process group says).

    Raises:
        MemGuardError: a sample is longer than all known lengths, or not even one sample fits at its length.

    Example:
        >>> sampler = LengthBatchSampler([100, 30, 120, 20, 90, 25], {32: 4, 128: 2}, shuffle=False)
        >>> list(sampler)
        [[3, 5, 1], [4, 0], [2]]
    """

    def __init__(
        self,
        lengths: Iterable[int],
        batch_sizes: Mapping[int, int],
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.batch_sizes = dict(sorted(batch_sizes.items()))
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self._num_replicas, self._rank = num_replicas, rank
        self._lengths = [int(length) for length in lengths]
        self._buckets = _buckets(self._lengths, self.batch_sizes)
        self.sampler = _Samples(self, len(self._lengths))
        if num_replicas is not None:
            check_count("num_replicas", num_replicas)
        if not 0 <= self.rank < self.num_replicas:
            raise MemGuardError(f"rank={rank} is not one of {counted(self.num_replicas, 'rank')}; they count from 0.")

    @property
    def num_replicas(self) -> int:
        """How many ranks train together."""
        if self._num_replicas is not None:
            return self._num_replicas
        return distributed.get_world_size() if _has_process_group() else 1

    @property
    def rank(self) -> int:
        """Which of them this is."""
        if self._rank is not None:
            return self._rank
        return distributed.get_rank() if _has_process_group() else 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch: each has an order of its own. Lightning calls it; a loop of your own does so itself."""
        self.epoch = epoch

    def __len__(self) -> int:
        """How many batches this rank gets in an epoch."""
        batches = sum(ceil(len(samples) / size) for size, samples in self._buckets)
        return ceil(batches / self.num_replicas)

    @override
    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)

        def in_order(count: int) -> list[int]:
            return torch.randperm(count, generator=generator).tolist() if self.shuffle else list(range(count))

        batches: list[list[int]] = []
        for size, samples in self._buckets:
            order = [samples[place] for place in in_order(len(samples))]
            window = _WINDOW * size if self.shuffle else len(order)
            for first in range(0, len(order), window):
                order[first : first + window] = sorted(order[first : first + window], key=self._lengths.__getitem__)
            batches += [order[first : first + size] for first in range(0, len(order), size)]
        ranks = self.num_replicas
        batches = _divided(batches, ranks * len(self))
        steps = [batches[first : first + ranks] for first in range(0, len(batches), ranks)]
        for place in in_order(len(steps)):
            yield steps[place][self.rank]


class _Samples:
    """The samples of a batch sampler: Lightning sets the epoch here, and asks how many there are."""

    def __init__(self, batches: LengthBatchSampler, count: int) -> None:
        self._batches, self._count = batches, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._count))

    def set_epoch(self, epoch: int) -> None:
        self._batches.set_epoch(epoch)


def _has_process_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _buckets(lengths: list[int], batch_sizes: Mapping[int, int]) -> list[tuple[int, list[int]]]:
    """The samples by the next known length of each, and how many of them make a batch."""
    known = list(batch_sizes)
    for length, size in batch_sizes.items():
        check_count("A length of batch_sizes", length)
        if size:
            check_count(f"batch_sizes[{length}]", size)
    if not lengths or not known:
        raise MemGuardError(f"{'batch_sizes' if lengths else 'lengths'} is empty: there is nothing to make batches of.")
    found: dict[int, list[int]] = {length: [] for length in known}
    for sample, length in enumerate(lengths):
        if length > known[-1]:
            raise MemGuardError(
                f"Sample {sample} has length {length}, and the longest with a batch size is {known[-1]}. Truncate it, "
                f"leave it out, or ask batch_sizes for {max(lengths)} too."
            )
        found[known[bisect_left(known, length)]].append(sample)
    for length, samples in found.items():
        if samples and not batch_sizes[length]:
            raise MemGuardError(
                f"Not even one sample of length {length} fits, and {counted(len(samples), 'sample')} of the dataset "
                f"would be padded to it, such as sample {samples[0]} of length {lengths[samples[0]]}. Truncate them, "
                "leave them out, or ask batch_sizes for a length in between."
            )
    return [(batch_sizes[length], samples) for length, samples in found.items() if samples]


def _divided(batches: list[list[int]], count: int) -> list[list[int]]:
    """Divide the largest batches in two until there are so many; if none has two samples, some come twice."""
    while len(batches) < count:
        place = max(range(len(batches)), key=lambda at: len(batches[at]))
        largest = batches[place]
        if len(largest) == 1:
            return list(islice(cycle(batches), count))
        half = len(largest) // 2
        batches[place : place + 1] = [largest[:half], largest[half:]]
    return batches
