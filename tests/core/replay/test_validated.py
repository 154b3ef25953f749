"""A fit that validates: training finds what validation has cached, and the other way around."""

from __future__ import annotations

import itertools

import pytest

from lightning_memguard.core.replay.footprint import Peak, Turn, footprint
from lightning_memguard.core.replay.replay import Replay, replay
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.replay.validated import validated
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.units import MIB

CUDA = AllocatorSettings()


def trace(sizes: dict[str, int], *, phase: str, steps: int = 2) -> Trace:
    """A model of 20 MiB; each step takes blocks by part, of which gradients stay until the next step frees them."""
    blocks, gradient = itertools.count(1), list[Event]()
    events = [Event("alloc", 0, 20 * MIB, "parameters", "setup")]
    for step in range(steps):
        freed = [event._replace(action="free", step=step) for event in gradient]
        made = [Event("alloc", next(blocks), mib * MIB, part, phase, step) for part, mib in sizes.items()]
        if step:
            made = [event for event in made if event.part != "workspaces"]  # which stay open
        gradient = [event for event in made if event.part == "gradients"]
        goes = [event._replace(action="free") for event in made if event.part in ("activations", "temporaries")]
        events += [*freed, *made, *goes]
    return Trace(1, "cuda", "fake", tuple(events), held_at=1)


TRAINING = trace({"workspaces": 32, "activations": 12, "gradients": 20}, phase="forward")
VALIDATION = trace({"workspaces": 32, "activations": 30, "temporaries": 30}, phase="validation")


def together(*, checked: bool = True, again: bool = True, clears_gradients: bool = True) -> Replay:
    joined = validated(TRAINING, VALIDATION, 1, checked=checked, again=again, clears_gradients=clears_gradients)
    return replay(joined, CUDA)


def test_training_and_validation_reserve_more_in_turn_than_either_alone() -> None:
    alone = [replay(each, CUDA).peak_reserved_bytes // MIB for each in (TRAINING, VALIDATION)]
    assert alone == [84, 112]
    assert replay(TRAINING, CUDA).peak_allocated_bytes == 84 * MIB
    assert together(checked=False, again=False).peak_reserved_bytes == 144 * MIB  # training's 12 and 20 stay cached
    assert together().peak_reserved_bytes == 112 * MIB  # a sanity check has cached what all that follows fits in


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_are_freed_before_a_validation_or_not(clears: bool) -> None:
    assert together(clears_gradients=clears).peak_allocated_bytes == (112 if clears else 132) * MIB


def test_a_workspace_that_stays_open_is_there_once() -> None:
    assert together().parts["workspaces"] == 32 * MIB
    assert together(checked=False).parts["workspaces"] == 32 * MIB


def test_a_step_that_does_not_recur_comes_once_before_a_validation() -> None:
    grows = trace({"optimizer_state": 4}, phase="forward")
    joined = validated(grows, VALIDATION, 1, checked=False, again=True, clears_gradients=True)
    assert replay(joined, CUDA).peak_allocated_bytes == (20 + 2 * 4 + 92) * MIB
    assert [each.step for each in joined] == sorted(each.step for each in joined)


def test_what_is_cached_in_addition_gives_way() -> None:
    alone, turn = footprint(TRAINING, CUDA), together(checked=False)
    found = alone.in_turn(Turn(turn, turn), alone.peak)
    assert found.peak == Peak(112 * MIB, turn.peak_reserved_bytes, turn.peak_reserved_bytes)
    assert found.parts["activations"] == 30 * MIB
    assert found.phase == "validation"
    assert sum(found.parts.values()) == found.peak_allocated_bytes
    assert found.lowest.reserved_bytes <= found.peak_reserved_bytes <= found.highest.reserved_bytes
    assert found.most_device_bytes == found.peak_device_bytes
