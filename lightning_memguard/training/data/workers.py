"""Batches that worker processes put in shared memory, which has a limit of its own."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
from torch.utils.data import DataLoader

from lightning_memguard.core.batch.batches import Batches
from lightning_memguard.core.batch.nesting import batch_bytes
from lightning_memguard.training.data.loaders import LoaderInfo

_HELD = 2  # batches that have left the queue: the one trained on, and the one that Lightning fetches ahead


def free_shared_memory() -> int | None:
    """Return the bytes free in /dev/shm, through which PyTorch's workers send tensors; None without such a folder.

    Docker gives a container 64 MiB of it.
    """
    try:
        return int(psutil.disk_usage("/dev/shm").free)  # noqa: S108 - nothing is written there
    except OSError:
        return None


def bytes_in_flight(info: LoaderInfo, batches: Batches | Sequence[Batches], batch_size: int) -> int:
    """Return the shared memory of a loop's batches: those that workers were asked for, and those given out."""
    loaders = [source.loader for source in info.sources]
    workers = [each for each in loaders if isinstance(each, DataLoader) and each.num_workers]
    asked = max((each.num_workers * (each.prefetch_factor or 2) + _HELD for each in workers), default=0)
    every = [batches] if isinstance(batches, Batches) else batches
    return int(asked * max((_bytes_at(each, batch_size) for each in every), default=0))


def _bytes_at(batches: Batches, batch_size: int) -> float:
    small, large = batch_bytes(batches.small), batch_bytes(batches.large)
    a_sample = (large - small) / max(1, batches.large_size - batches.small_size)
    return small + a_sample * (batch_size - batches.small_size)
