"""Requests that have other sizes to fall back to, as a convolution has cuDNN's other plans."""

from lightning_memguard.core.replay.replay import Steps, replay
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.units import MIB

OTHERWISE = (400 * MIB, 300 * MIB, 30 * MIB, 0)


def workspace(block: int, action: str = "alloc") -> Event:
    return Event(action, block, 400 * MIB, "workspaces", otherwise=OTHERWISE)


def sizes(*events: Event, capacity: int | None) -> list[int]:
    """The MiB that each event adds."""
    return [
        change // MIB for change in Steps(Trace(1, "cuda", "fake", events), AllocatorSettings(capacity_bytes=capacity))
    ]


def test_a_workspace_that_fits_is_taken():
    assert sizes(workspace(0), workspace(0, "free"), capacity=None) == [400, -400]
    assert sizes(workspace(0), workspace(0, "free"), capacity=400 * MIB) == [400, -400]


def test_where_it_does_not_fit_the_next_plan_that_does_is_taken():
    assert sizes(workspace(0), workspace(0, "free"), capacity=350 * MIB) == [300, -300]
    assert sizes(workspace(0), workspace(0, "free"), capacity=299 * MIB) == [30, -30]
    assert sizes(workspace(0), workspace(0, "free"), capacity=1 * MIB) == [0, 0]


def test_the_plan_that_fit_is_kept_even_where_the_first_would_fit_again():
    held = Event("alloc", 1, 200 * MIB)
    events = (held, workspace(0), workspace(0, "free"), held._replace(action="free"), workspace(2))
    assert sizes(*events, capacity=520 * MIB) == [200, 300, -300, -200, 300]


def test_with_no_plan_left_it_is_out_of_memory():
    event = workspace(0)._replace(otherwise=(300 * MIB,))
    found = replay(Trace(1, "cuda", "fake", (event,)), AllocatorSettings(capacity_bytes=100 * MIB))
    assert found.out_of_memory_event == event
