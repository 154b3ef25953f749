"""The batches of a run's data -> what the cache of its GPU grows to over an epoch of them."""

from __future__ import annotations

from dataclasses import replace

from lightning_memguard.core.batch.batches import batch_of_length, batches_from_one, length_of
from lightning_memguard.core.batch.nesting import batch_size_of, shapes_of
from lightning_memguard.core.capture.lengths import epoch_of
from lightning_memguard.core.replay.epoch import Epoch, Shape
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.adapter.program import LightningProgram


def epoch_of_run(
    program: LightningProgram, batch_size: int, settings: AllocatorSettings, *, most_steps: float, most_seconds: float
) -> Epoch | None:
    """Replay the batches that were drawn of a run's data, in random orders; None if they are all alike.

    Args:
        program: the run's step, with its draws.
        batch_size: the size of its batches.
        settings: the allocator's, with the capacity.
        most_steps: how many batches the run has.
        most_seconds: of the replay.

    Raises:
        CannotTraceError: the batches differ in more than one length, or none can be drawn; or see `epoch_of`.
    """
    batches, *others = program.families
    if others or batches.draws is None or not batches.has_draws(batch_size):
        raise CannotTraceError("no other batches can be drawn")
    drawn = [(batch_size_of(each), each) for each in batches.draws.several(batch_size, int(min(_DRAWN, most_steps)))]
    shapes = [Shape(size, length_of(each)) for size, each in drawn]
    if len({*shapes}) < 2:
        return None
    size, example = max(drawn, key=lambda pair: length_of(pair[1]))
    if any(_per_sample(batch_of_length(example, length_of(each)), size) != _per_sample(each, n) for n, each in drawn):
        raise CannotTraceError("the batches differ in more than the length that is dimension 1")

    def program_at(length: int) -> LightningProgram:
        return replace(program, batches=batches_from_one(batch_of_length(example, length), size))

    return epoch_of(program_at, settings, shapes, most_steps=most_steps, most_seconds=most_seconds)


_DRAWN = 40  # batches


def _per_sample(batch: object, size: int) -> list[tuple[float, ...]]:
    return [(shape[0] / size, *shape[1:]) for shape in shapes_of(batch) if shape]
