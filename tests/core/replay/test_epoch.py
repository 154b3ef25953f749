"""Steps of several shapes in one allocator: what the cache grows to, and what keeps it smaller."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice, repeat

import pytest

from lightning_memguard.core.replay.epoch import Epoch, EpochRun, Shape, in_random_order, replay_epoch, to_multiples
from lightning_memguard.core.replay.footprint import footprint
from lightning_memguard.core.replay.recurring import RecurringStep, StepSequence
from lightning_memguard.core.replay.replay import Steps
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.units import GIB, MIB

WEIGHTS = 100 * MIB
go_on = Steps.go_on


def trace_at(shape: Shape) -> Trace:
    """Two steps: activations of a length, a gradient that the next step frees, and what the loop keeps of a batch."""
    events = [Event("alloc", 0, WEIGHTS, "parameters", "setup")]
    for step in (0, 1):
        kept, activations, gradient = (10 * step + place for place in (1, 2, 3))
        nbytes = shape.batch_size * shape.length * MIB
        events.append(Event("alloc", activations, 8 * nbytes, "activations", step=step))
        if step:
            events.append(Event("free", 1, nbytes, "batch", step=1))
        events.append(Event("alloc", kept, nbytes, "batch", step=step))
        if step:
            events.append(Event("free", 3, WEIGHTS, "gradients", step=1))
        events.append(Event("alloc", gradient, WEIGHTS, "gradients", step=step))
        events.append(Event("free", activations, 8 * nbytes, "activations", step=step))
    events += [Event("free", 11, nbytes), Event("free", 13, WEIGHTS), Event("free", 0, WEIGHTS)]
    ends = {event.block: event for event in events if event.action == "alloc"}
    return Trace(shape.batch_size, "cuda", "fake", tuple(ends[each.block]._replace(**_of(each)) for each in events))


def _of(event: Event) -> dict[str, object]:
    return {"action": event.action, "step": event.step}


def shapes(*lengths: int) -> list[Shape]:
    return [Shape(1, length) for length in lengths]


def reserved(steps: list[Shape], settings: AllocatorSettings) -> int:
    """As a training that really has these steps would reserve it, written out."""
    steps_, events = Steps(Trace(0, "cuda", "fake", ()), settings), [Event("alloc", 0, WEIGHTS)]
    for number, (_, length) in enumerate([steps[0], *steps], 1):
        events.append(Event("alloc", 10 * number, 8 * length * MIB))
        events += [Event("free", 10 * number - 9, 0)] * (number > 1)
        events.append(Event("alloc", 10 * number + 1, length * MIB))
        events += [Event("free", 10 * number - 8, 0)] * (number > 1)
        events += [Event("alloc", 10 * number + 2, WEIGHTS), Event("free", 10 * number, 0)]
    for _ in steps_.go_on(events):
        pass
    assert steps_.allocator
    return steps_.allocator.peak_reserved_bytes


@pytest.mark.parametrize("settings", [AllocatorSettings(), AllocatorSettings(expandable_segments=True)])
def test_a_run_of_steps_reserves_what_such_a_training_would(settings: AllocatorSettings):
    draw = random.Random(0)
    for _ in range(20):
        run = shapes(*(draw.randint(3, 60) for _ in range(12)))
        assert replay_epoch(run, trace_at, settings).run.peak_reserved_bytes == reserved(run, settings)


def test_the_cache_grows_past_the_longest_step_and_other_ways_keep_it_smaller():
    run = shapes(20, 30, 40, 50, 60)
    found = replay_epoch(run, trace_at, AllocatorSettings(), longest=run[-1], padding=to_multiples(60))
    alone = footprint(trace_at(run[-1]), AllocatorSettings())
    by_change = {each.change: each.peak_reserved_bytes for each in found.others}
    assert found.run.grew_at == 5
    assert found.run.peak_reserved_bytes > 2 * alone.peak_reserved_bytes
    assert by_change["padded to multiples of 64"] == alone.peak_reserved_bytes
    assert by_change["with the longest batch first"] == alone.peak_reserved_bytes
    assert by_change["with expandable_segments:True"] < 0.6 * found.run.peak_reserved_bytes
    assert found.remedy
    assert found.remedy.change.startswith("padded")
    assert found.text.startswith("over an epoch of lengths 20..60 the cache grows to 1.8 GiB by step 5 (")


def test_within_a_capacity_the_cache_is_released_until_a_step_does_not_fit():
    run = shapes(20, 30, 40, 50, 60)
    released = replay_epoch(run, trace_at, AllocatorSettings(capacity_bytes=GIB), padding=to_multiples(60))
    assert released.fits
    assert released.run.retries > 0
    assert released.run.peak_reserved_bytes <= GIB
    assert "releases of the cache in 100 steps" in released.text
    fails = replay_epoch(run, trace_at, AllocatorSettings(capacity_bytes=500 * MIB))
    assert fails.run.failed_at == 3
    assert fails.remedy is None
    assert "step 3 runs out of memory" in fails.text


@pytest.mark.parametrize("capacity_bytes", [None, 620 * MIB, GIB])
def test_a_step_that_finds_the_allocator_as_another_did_is_not_replayed_again(
    capacity_bytes: int | None, monkeypatch: pytest.MonkeyPatch
):
    settings, replays = AllocatorSettings(capacity_bytes=capacity_bytes), list[Steps]()

    def found() -> Epoch:
        run = islice(in_random_order(shapes(20, 31, 33)), 300)
        return replay_epoch(run, trace_at, settings, longest=Shape(1, 33), padding=to_multiples(33))

    monkeypatch.setattr(Steps, "go_on", lambda self, events: replays.append(self) or go_on(self, events))
    epoch = found()
    few = len(replays)
    monkeypatch.setattr(Steps, "state_with", lambda *_: object())
    assert found() == epoch
    assert few < (len(replays) - few) / 2


def test_it_ends_when_nothing_new_happens_or_the_time_is_up():
    settled = replay_epoch(repeat(Shape(1, 20)), trace_at, AllocatorSettings())
    assert settled.settled
    assert settled.run.steps == 201
    cut = replay_epoch(in_random_order(shapes(20, 30)), trace_at, AllocatorSettings(), most_seconds=0)
    assert (cut.run.steps, cut.settled) == (1, False)


def test_a_step_that_frees_what_it_does_not_leave_is_refused():
    events = (
        Event("alloc", 0, 100),
        Event("free", 0, 100, step=1),
        Event("alloc", 1, 50, step=1),
        Event("free", 1, 50),
    )
    trace = Trace(1, "cuda", "fake", events)
    with pytest.raises(CannotTraceError, match="how the step recurs"):
        replay_epoch(shapes(1, 2), lambda _: trace, AllocatorSettings())


def test_what_a_trace_never_frees_is_left_to_the_next_step():
    whole = trace_at(Shape(1, 9))
    ended = replace(whole, events=whole.events[:-3])  # as that of a Trainer's step, which keeps its gradients
    one, other = RecurringStep.of(whole), RecurringStep.of(ended)
    assert one
    assert other
    assert (one.left, one.taken) == (other.left, other.taken)
    assert [*one.events] == [*other.events]


def test_what_a_step_leaves_is_freed_if_the_next_one_knows_nothing_of_it():
    one, other = RecurringStep.of(trace_at(Shape(1, 9))), RecurringStep.of(trace_at(Shape(1, 9)))
    assert one
    assert other
    left, taken = ({block: ("other", *name) for block, name in each.items()} for each in (other.left, other.taken))
    unlike = RecurringStep(other.until, other.events, left, taken)
    sequence = StepSequence()
    live = set[int]()
    for step in (one, unlike, one, one):
        for event in sequence.events_of(step):
            (live.add if event.action == "alloc" else live.remove)(event.block)
    assert len(live) == 3


def test_a_footprint_holds_the_epoch_and_a_budget_is_compared_without_what_gives_way():
    alone = footprint(trace_at(Shape(1, 60)), AllocatorSettings())
    found = alone.over(replay_epoch(shapes(20, 30, 40, 50, 60), trace_at, AllocatorSettings()))
    assert found.epoch
    assert found.high
    assert found.high.reserved_bytes == found.epoch.run.peak_reserved_bytes
    assert found.most_device_bytes == alone.most_device_bytes
    assert found.notes[-1] == found.epoch.text


def test_a_footprint_whose_epoch_fails_takes_more_than_the_capacity():
    alone, within = footprint(trace_at(Shape(1, 60)), AllocatorSettings()), AllocatorSettings(capacity_bytes=700 * MIB)
    epoch = replay_epoch(shapes(20, 30, 40, 50, 60), trace_at, within)
    found = alone.over(epoch)
    assert epoch.run.failed_at
    assert found.most_device_bytes == epoch.run.peak_reserved_bytes > 700 * MIB
    assert alone.over(replace(epoch, run=replace(epoch.run, failed_at=None))).most_device_bytes <= 820 * MIB


def test_of_the_ways_that_help_one_that_costs_little_is_named():
    def run(change: str, gib: int, releases: int = 0, failed_at: int | None = None) -> EpochRun:
        return EpochRun(change, "", 100, gib * GIB, 1, 0, releases, failed_at)

    others = run("a", 20), run("b", 9), run("c", 1, releases=3), run("d", 1, failed_at=7)
    assert Epoch(1, 2, run("", 30), others).remedy == others[1]
    assert Epoch(1, 2, run("", 9), others[:2]).remedy is None
    assert Epoch(1, 2, run("", 9, failed_at=2), others[:1]).remedy == others[0]
