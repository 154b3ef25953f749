"""A model and the shapes of its batches -> what the cache of a GPU grows to over an epoch of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

from lightning_memguard.core.batch.batches import Batches, batch_of_length, batches_from_one
from lightning_memguard.core.batch.nesting import batch_size_of
from lightning_memguard.core.capture.lengths import epoch_of
from lightning_memguard.core.decision.decision import check_count
from lightning_memguard.core.replay.epoch import Epoch, Padding, Shape
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.training.planning.subject import Subject, program_of
from lightning_memguard.training.planning.target import Target

BatchOfLength = Callable[[int], Any]


def whole_lengths(lengths: Iterable[object]) -> list[int]:
    """Check lengths that were passed, and return them in their order.

    Raises:
        MemGuardError: there are none, or one is not a whole number above 0.
    """
    found = list[int]()
    for each in lengths:
        length = int(each) if isinstance(each, Integral) else 0  # NumPy's are whole numbers too
        check_count("lengths", length or each)
        found.append(length)
    if not found:
        raise MemGuardError("lengths is empty; pass the lengths of the samples, such as [128, 256, 512].")
    return found


def at_length(subject: Subject, length: int, batch_at: BatchOfLength | None = None) -> Subject:
    """Return the subject on batches of a length.

    Args:
        subject: the model and its settings.
        length: the length of each sample.
        batch_at: length -> an example batch (default: the subject's own, see `batch_of_length`).
    """
    batch = (batch_at or partial(batch_of_length, subject.batches.small))(length)
    batches: Batches = batches_from_one(batch, batch_size_of(batch))
    return replace(subject, batches=batches, differ=False)


def replayed_epoch(
    subject: Subject,
    target: Target,
    settings: AllocatorSettings,
    shapes: Sequence[Shape],
    *,
    batch_at: BatchOfLength | None = None,
    padding: Padding | None = None,
) -> Epoch | None:
    """Replay an epoch of a subject on a device, see `epoch_of`; None without a cache, or if all batches are alike."""
    if settings.kind != "cuda" or len({*shapes}) < 2:
        return None
    return epoch_of(lambda length: program_of(at_length(subject, length, batch_at), target), settings, shapes, padding)


def with_epoch(
    footprint: Footprint,
    subject: Subject,
    target: Target,
    settings: AllocatorSettings,
    shapes: Sequence[Shape],
    batch_at: BatchOfLength | None = None,
) -> Footprint:
    """Return the footprint of the largest batch of an epoch with what the cache grows to, or a note that says why not.

    Args:
        footprint: that of the largest batch.
        subject: the model and its settings.
        target: the device.
        settings: its allocator's, with the capacity, if it is known.
        shapes: the batches, in the order that they come.
        batch_at: see `at_length`.
    """
    if footprint.method != "fake" or subject.fixed_because:
        return footprint
    try:
        epoch = replayed_epoch(subject, target, settings, shapes, batch_at=batch_at)
    except CannotTraceError as error:
        return replace(footprint, notes=(*footprint.notes, f"{UNKNOWN}: {error}"))
    return footprint.over(epoch) if epoch else footprint


UNKNOWN = "what the cache grows to over an epoch of these lengths is not known"
