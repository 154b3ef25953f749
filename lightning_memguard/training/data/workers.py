"""Worker processes of loaders: their batches in shared memory, and the memory of the processes themselves."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil
from torch.utils.data import DataLoader

from lightning_memguard.core.batch.batches import Batches
from lightning_memguard.core.batch.nesting import tensors_in
from lightning_memguard.core.capture.capture import isolated
from lightning_memguard.core.decision.decision import Budget
from lightning_memguard.core.device.children import collected_bytes
from lightning_memguard.core.device.host import MemoryInfo, available_memory, or_none
from lightning_memguard.core.range import Range
from lightning_memguard.training.data.loaders import LoaderInfo
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.training.facts.run_facts import RunFacts
from lightning_memguard.units import MIB, format_bytes

_PAGE = 4096

# A worker's own memory at least, most likely and at most, in addition to what it shares with its parent. Recorded on
# torch 2.13: forked in the configurations of `benchmarks/loaders.py`; spawned, 147 MiB if its dataset's file imports
# torch alone, 274 with Lightning. Its batch comes on top as often as the factors say, as samples and while it is
# collated: malloc keeps freed blocks of samples.
_FORKED, _SPAWNED = (8 * MIB, 14 * MIB, 32 * MIB), (140 * MIB, 200 * MIB, 290 * MIB)
_COLLATED = 1, 2, 4


def shared_memory() -> MemoryInfo | None:
    """Read /dev/shm, through which PyTorch's workers send tensors; None without such a folder.

    Docker gives a container 64 MiB of it. Both of torch.multiprocessing's sharing strategies put tensors there.
    """
    usage = or_none(psutil.disk_usage, "/dev/shm")  # noqa: S108 - nothing is written there
    return None if usage is None else MemoryInfo(usage.total, usage.free, "statvfs")


@dataclass(frozen=True)
class Flight:
    """Batches that one loop's worker processes were asked for, and those given out.

    Attributes:
        workers: how many there are.
        prefetch_factor: batches that each is asked for in advance.
        held: batches that have left the queue: the one in use, and the one that Lightning fetches ahead if it does not
            know how many there are.
        persists: whether the workers stay from epoch to epoch.
        forks: whether they begin as copies of this process.
        pins: whether batches are copied to pinned memory.
        tensors: bytes of each tensor of a batch in shared memory: without samples, and of each sample.
        samples: of an epoch, which all batches have together; None if that is unknown.
    """

    workers: int
    prefetch_factor: int
    held: int
    persists: bool
    forks: bool
    pins: bool
    tensors: tuple[tuple[float, float], ...]
    samples: int | None = None

    @property
    def asked(self) -> int:
        """Batches that workers have made, or are making."""
        return self.workers * self.prefetch_factor

    @property
    def late(self) -> int:
        """Batches that were used and may still take shared memory, on a busy machine: the last one of each worker.

        A thread of the worker sends its descriptor of the memory, and closes it a moment later: `_serve` in
        multiprocessing/resource_sharer.py. Until then it sends no other, so no worker is late with two.
        """
        return max(0, self.workers - self.held)

    def batch_bytes(self, size: int) -> float:
        """Shared memory of one batch."""
        return sum(fixed + of_sample * size for fixed, of_sample in self.tensors)

    def pinned_bytes(self, size: int) -> int:
        """Pinned copies of all batches; PyTorch rounds each tensor's block up to a power of two.

        `CachingHostAllocatorImpl::allocate` in ATen/core/CachingHostAllocator.h, torch 2.13.
        """
        blocks = (1 << (int(fixed + of_sample * size) - 1).bit_length() for fixed, of_sample in self.tensors)
        return (self.asked + self.held) * sum(blocks) if self.pins else 0

    def bytes_of(self, batches: int, size: int, *, used: int = 0) -> float:
        """Shared memory of so many batches, or of all that an epoch has left after those that were ``used``."""
        if self.samples is not None:
            batches = max(0, min(batches, -(-self.samples // max(1, size)) - used))
        return batches * self.batch_bytes(size)


def flight_of(info: LoaderInfo | None, batches: Sequence[Batches], *, pins: bool, sized: bool) -> Flight | None:
    """Return what a loop's workers have in flight; None without workers.

    Of several loaders, the one with most batches in advance counts for all.

    Args:
        info: the loop's data.
        batches: of each kind that there is.
        pins: whether its device is one that memory is pinned for.
        sized: whether Lightning knows how many batches there are.
    """
    loaders = [source.loader for source in info.sources] if info else []
    workers = [each for each in loaders if isinstance(each, DataLoader) and each.num_workers]
    if not workers or not batches:
        return None
    most = max(workers, key=lambda each: each.num_workers * (each.prefetch_factor or 2))
    largest = max(batches, key=lambda each: sum(_shared_bytes(each.large)) / each.large_size)
    small, large = _shared_bytes(largest.small), _shared_bytes(largest.large)
    if len(small) != len(large):  # a tensor for each sample, say
        small, large = [sum(small)], [sum(large)]
    more = max(1, largest.large_size - largest.small_size)
    slopes = [(of_large - of_small) / more for of_small, of_large in zip(small, large, strict=True)]
    context = most.multiprocessing_context or multiprocessing
    # asked without `allow_none`, it would be set from now on; the first of all is the default
    method = context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return Flight(
        most.num_workers,
        most.prefetch_factor or 2,
        1 if sized else 2,
        most.persistent_workers,
        method == "fork",
        pins and most.pin_memory,
        tuple((of_small - slope * largest.small_size, slope) for of_small, slope in zip(small, slopes, strict=True)),
        info.dataset_size if info else None,
    )


def _shared_bytes(batch: object) -> list[int]:
    """Bytes of a batch's tensors in shared memory, where each has whole pages."""
    dense = (tensor for tensor in tensors_in(batch) if not tensor.is_nested)
    return [-(-tensor.numel() * tensor.element_size() // _PAGE) * _PAGE for tensor in dense]


@dataclass(frozen=True)
class Workers:
    """Worker processes of a run: of the loop itself, and of a fit's validation.

    Attributes:
        loop: batches of the run's own loop.
        validation: batches of a fit's validation, at its own batch size.
        mid_epoch: whether validation runs while training's batches are in flight.
        collected: pages of this process that a garbage collection copies, which leaves them to forked workers.
        leaves: whether validation ends before its data, so that batches of it stay in flight: as after Lightning's
            sanity check, whose loader is dropped only when the next validation has begun.
    """

    loop: Flight | None
    validation: Flight | None
    mid_epoch: bool
    leaves: bool
    collected: int = 0

    def shared_bytes(self, size: int, validation_size: int) -> int:
        """The most that lies in shared memory; equal to what was recorded in `benchmarks/loaders.py`."""
        loop, flight = self.loop, self.validation
        training = loop.bytes_of(loop.asked + loop.held, size) if loop else 0.0
        if flight is None:
            return int(training)
        left = flight.bytes_of(flight.asked, validation_size, used=1) if self.leaves else 0.0
        new = 0.0 if flight.persists else flight.bytes_of(flight.asked, validation_size)
        validating = max(left + new, flight.bytes_of(flight.asked + flight.held, validation_size))
        if loop:
            validating += loop.bytes_of(loop.asked + loop.held - 1 if self.mid_epoch else 1, size)
        return int(max(training + left, validating))

    def late_bytes(self, size: int, validation_size: int) -> int:
        """What may lie there in addition for a moment."""
        flights = [(each, of) for each, of in ((self.loop, size), (self.validation, validation_size)) if each]
        known = ((each, of, each.asked + each.held) for each, of in flights)
        return int(sum(each.bytes_of(usual + each.late, of) - each.bytes_of(usual, of) for each, of, usual in known))

    def ahead_bytes(self, size: int, validation_size: int) -> int:
        """Shared memory without the batch that the process itself works on."""
        whole = self.shared_bytes(size, validation_size)
        return whole - int(self.loop.bytes_of(1, size) if self.loop else 0)

    def pinned_bytes(self, size: int, validation_size: int) -> int:
        """Pinned copies of batches in flight, which PyTorch keeps for later ones."""
        flights = (self.loop, size), (self.validation, validation_size)
        return sum(flight.pinned_bytes(of) for flight, of in flights if flight)

    def own_bytes(self, size: int, validation_size: int) -> Range[int]:
        """Memory of the processes that are alive together: at least, most likely, at most."""
        flights = [(self.loop, size)] if self.loop else []
        if self.validation:
            together = self.mid_epoch or self.leaves or self.validation.persists
            flights = [*(flights if together else []), (self.validation, validation_size)]
        forks = any(flight.forks for flight, _ in flights)
        least, likely, most = (
            (self.collected if forks and bound == 2 else 0)
            + sum(
                flight.workers * int((_FORKED if flight.forks else _SPAWNED)[bound] + times * flight.batch_bytes(of))
                for flight, of in flights
            )
            for bound, times in enumerate(_COLLATED)
        )
        return Range(least, likely, most)

    def remedies(self, size: int, validation_size: int) -> tuple[str, ...]:
        """Settings of loaders that would take less of the host, with the bytes of batches that they save."""

        def taken(workers: Workers) -> int:
            return workers.shared_bytes(size, validation_size) + workers.pinned_bytes(size, validation_size)

        def changed(change: Callable[[Flight], Flight]) -> Workers:
            return replace(
                self, loop=self.loop and change(self.loop), validation=self.validation and change(self.validation)
            )

        fewer = {
            "prefetch_factor=1": changed(lambda each: replace(each, prefetch_factor=1)),
            "one worker fewer": changed(lambda each: replace(each, workers=max(1, each.workers - 1))),
            "num_workers=0": changed(lambda each: replace(each, workers=0, held=0)),
        }
        saved = {how: taken(self) - taken(less) for how, less in fewer.items()}
        return tuple(f"{how} needs {format_bytes(less)} less" for how, less in saved.items() if less > 0)

    def keeps(self, *, begun: bool) -> bool:
        """Whether forked workers keep what is in this process's memory, which is copied as training changes it.

        Args:
            begun: ask for what an optimizer step leaves: only workers that begin later keep it.
        """
        loop = self.loop
        return loop is not None and loop.forks and not (begun and loop.persists)


def workers_of(
    facts: RunFacts,
    loop: tuple[LoaderInfo, Sequence[Batches]],
    validation: tuple[LoaderInfo | None, Sequence[Batches]],
    *,
    sized: bool,
    epochs: int | None,
) -> Workers | None:
    """Return the worker processes of a run of so many epochs; None if it has none. Arguments: see `flight_of`."""
    pins, its_info = facts.device.type != "cpu", validation[0]
    its_sized = its_info is not None and its_info.batches_per_epoch is not None
    own = flight_of(*loop, pins=pins, sized=sized)
    its = flight_of(*validation, pins=pins, sized=its_sized)
    if not own and not its:
        return None
    whole = isinstance(facts.val_check_interval, float) and facts.val_check_interval == 1.0
    limit = facts.limits["val"]
    again = epochs != 1 or not whole
    leaves = 0 < facts.sanity_steps < math.inf or (again and (isinstance(limit, int) or limit < 1))
    collected = attempt(lambda: isolated(collected_bytes)).value or 0
    return Workers(own, its, not whole, leaves, collected)


def ranks_of_host(facts: RunFacts) -> int:
    """How many ranks share this host."""
    return max(1, getattr(facts.strategy, "num_processes", 1))


def host_budgets(facts: RunFacts, budget: int | None, margin: float) -> tuple[Budget | None, Budget | None]:
    """Return this rank's share of what the host and /dev/shm offer; None for the host of a run on the CPU.

    Args:
        facts: of the run.
        budget: bytes of the host that the user allows it; None for what is available.
        margin: share to keep free.
    """
    ranks = ranks_of_host(facts)

    def share(memory: MemoryInfo | None, name: str) -> Budget | None:
        free = memory.free_bytes // ranks if memory else 0
        return Budget(memory.total_bytes, free, int(free * margin), memory.source, name) if memory else None

    given = MemoryInfo(budget, budget * ranks, "given") if budget else None
    host = None if facts.device.type == "cpu" else share(given or available_memory(), "the host")
    return host, share(shared_memory(), "/dev/shm")  # noqa: S108 - a name
