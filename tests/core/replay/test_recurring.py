"""The steps after a trace's own: the same requests find other blocks in the cache, and so other allocated peaks."""

from __future__ import annotations

import itertools

import pytest

from lightning_memguard.core.replay.footprint import footprint
from lightning_memguard.core.replay.recurring import LaterSteps
from lightning_memguard.core.replay.replay import Replay, Steps
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.units import MIB

CUDA = AllocatorSettings()


def training(steps: int, *, batches: int = 1) -> Trace:
    """A step frees the gradient of the one before, and takes 2, 11 and 12 MiB, of which 12 are its gradient.

    Its third step finds 12 MiB cached twice, in segments of their own. The block of 2 splits one of them. That of 11
    gets the other one whole, as no more than 1 MiB would be left, which counts as allocated.

    ``batches``: the backward passes of a step, of which the last makes the gradient.
    """
    blocks, events, gradient = itertools.count(), list[Event](), list[Event]()
    for place in range(steps * batches):
        if place % batches == 0:
            events += [event._replace(action="free", step=place) for event in gradient]
        two, eleven, twelve = (
            Event("alloc", next(blocks), mib * MIB, part, "forward", step=place, operator=str(mib))
            for mib, part in ((2, "activations"), (11, "activations"), (12, "gradients"))
        )
        is_last = (place + 1) % batches == 0
        gradient = [twelve] if is_last else []
        events += [two, eleven, *gradient, two._replace(action="free"), eleven._replace(action="free")]
    return Trace(1, "cuda", "fake", tuple(events))


@pytest.mark.parametrize("batches", [1, 2])
def test_a_later_step_may_have_a_higher_peak_than_the_two_that_were_captured(batches: int) -> None:
    def peak_of(steps: int) -> int:
        return Replay.of(Steps(training(steps, batches=batches), CUDA)).peak_allocated_bytes

    later = LaterSteps.of(Steps(training(2, batches=batches), CUDA), batches)
    assert later.replay.peak_allocated_bytes == peak_of(6)
    assert sum(later.replay.parts.values()) == later.replay.peak_allocated_bytes
    if batches == 1:
        assert (peak_of(2), peak_of(3), peak_of(6)) == (25 * MIB, 26 * MIB, 26 * MIB)
        assert later.peaks == (25 * MIB, 26 * MIB, 26 * MIB)  # and so on


def test_a_footprint_has_the_step_with_most_and_a_range_of_what_they_differ_by() -> None:
    found = footprint(training(2), CUDA)
    assert found.peak_allocated_bytes == 26 * MIB
    (steps,) = (doubt for doubt in found.doubts if doubt.kind == "steps")
    assert [peak.allocated_bytes // MIB for peak in steps.peaks] == [25, 27]


def test_one_step_is_not_repeated_as_its_first_blocks_stay() -> None:
    """Parameters and the optimizer's state are taken in the first step, and never again."""
    alone = training(1)
    assert LaterSteps.of(Steps(alone, CUDA)).replay == Replay.of(Steps(alone, CUDA))
    assert not any(doubt.kind == "steps" for doubt in footprint(alone, CUDA).doubts)


def test_the_batch_that_came_last_is_a_batch_though_no_step_has_used_it() -> None:
    """A Trainer moves the next batch to the device before it lets go of the last."""
    events = list[Event]()
    for step, (block, before) in enumerate([(0, None), (1, 0), (2, 1)]):
        part = "batch" if step < 2 else "temporaries"
        events.append(Event("alloc", block, 3 * MIB, part, "transfer", step=max(0, step - 1), operator="_to_copy"))
        if before is not None:
            events.append(Event("free", before, 3 * MIB, "batch", "forward", step=step - 1))
    work = Event("alloc", 9, 5 * MIB, "activations", "forward", step=1)
    trace = Trace(1, "cuda", "fake", (*events[:-2], work, work._replace(action="free"), *events[-2:]))
    later = LaterSteps.of(Steps(trace, CUDA))
    assert later.replay.parts == {"batch": 3 * MIB, "activations": 5 * MIB}
