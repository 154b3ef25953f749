"""A step that does not fit with all that the allocator caches: how often it releases the cache."""

from __future__ import annotations

import random

import pytest

from lightning_memguard.core.replay.recurring import Retries, retries_within
from lightning_memguard.core.replay.replay import Steps, replay
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.units import KIB, MIB


def training(seed: int, steps: int) -> tuple[list[Event], list[int]]:
    """A training of random blocks, whose gradients live until the next step, and where each step ends."""
    draw = random.Random(seed)
    sizes = [draw.choice((700 * KIB, 3 * MIB, 14 * MIB, 40 * MIB)) + draw.randrange(MIB) for _ in range(24)]
    keeps = [draw.random() < 0.2 for _ in sizes]
    lives = [draw.randrange(1, 8) for _ in sizes]
    events, ends, left = [Event("alloc", 0, 50 * MIB, "parameters")], [], list[Event]()
    for step in range(steps):
        events += [event._replace(action="free", step=step) for event in left]
        left, due = [], dict[int, list[Event]]()
        for place, nbytes in enumerate(sizes):
            kept = keeps[place]
            taken = Event("alloc", 1 + step * 100 + place, nbytes, "gradients" if kept else "temporaries", step=step)
            events.append(taken)
            (left if kept else due.setdefault(place + lives[place], [])).append(taken)
            events += [event._replace(action="free") for event in due.pop(place, [])]
        events += [event._replace(action="free") for events_due in due.values() for event in events_due]
        ends.append(len(events))
    return [*events, *(event._replace(action="free") for event in (*left, events[0]))], ends


def counted(events: list[Event], ends: list[int], capacity: int, settings: AllocatorSettings) -> Retries | None:
    """The retries of a training that really has so many steps."""
    steps = Steps(
        Trace(1, "cuda", "fake", tuple(events)), AllocatorSettings(**{**vars(settings), "capacity_bytes": capacity})
    )
    seen = [steps.allocator.retries for _ in steps]
    if steps.out_of_memory_event:
        return None
    first = seen[ends[-5] - 1]
    return Retries(first, (seen[ends[-1] - 1] - first) / 4)


@pytest.mark.parametrize("settings", [AllocatorSettings(), AllocatorSettings(expandable_segments=True)])
def test_two_steps_tell_how_a_training_of_twelve_runs(settings: AllocatorSettings) -> None:
    outcomes = set()
    for seed in range(40):
        two = Trace(1, "cuda", "fake", tuple(training(seed, 2)[0]))
        peak = replay(two, settings)
        for share in (0.0, 0.3, 0.6, 0.9):
            capacity = int(peak.peak_allocated_bytes * (1 - share) + peak.peak_reserved_bytes * share)
            found = retries_within(two, settings, capacity)
            assert found == counted(*training(seed, 12), capacity, settings)
            outcomes.add(found and (found.at_first > 0, found.per_step > 0))
        assert retries_within(two, settings, peak.peak_reserved_bytes) == Retries(
            0, 0.0
        )  # as every size that is chosen
    assert {None, (True, False)} <= outcomes


def test_small_and_large_blocks_in_turn_release_each_others_cache_in_each_step():
    """Forty blocks of 1 MiB take 40 MiB in small segments; the large one of 40 MiB cannot use them."""
    step = [Event(action, block, MIB) for action in ("alloc", "free") for block in range(40)]
    step += [Event("alloc", 40, 40 * MIB), Event("free", 40, 40 * MIB)]
    trace = Trace(1, "cuda", "fake", tuple(step))
    assert retries_within(trace, AllocatorSettings(), 80 * MIB) == Retries(0, 0.0)
    assert retries_within(trace, AllocatorSettings(), 60 * MIB).per_step == 2


def test_a_step_that_grows_is_not_repeated():
    kept = (
        Event("alloc", 0, MIB),
        Event("alloc", 1, MIB, step=1),
        Event("free", 0, MIB, step=1),
        Event("alloc", 2, MIB, step=1),
    )
    assert retries_within(Trace(1, "cuda", "fake", kept), AllocatorSettings(), 80 * MIB) is None
