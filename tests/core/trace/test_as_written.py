"""Bounds of a compiled step that no capture has shown, from its trace as written."""

from __future__ import annotations

from lightning_memguard.core.replay.replay import replay
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.as_written import least_if_compiled, most_more_if_compiled
from lightning_memguard.core.trace.trace import Event, Trace

EXACT = AllocatorSettings(kind="exact")


def step() -> Trace:
    """As written: 100 of parameters, 30 saved, 20 freed in the forward pass, gradients of 60 and 40, a workspace."""
    events = [
        Event("alloc", 0, 100, "parameters", "setup"),
        Event("alloc", 1, 30, "activations", "forward"),
        Event("alloc", 2, 20, "temporaries", "forward"),
        Event("alloc", 3, 9, "workspaces", "forward"),
        Event("free", 3, 9, "workspaces", "forward"),
        Event("free", 2, 20, "temporaries", "forward"),
        Event("alloc", 4, 60, "gradients", "backward"),
        Event("alloc", 5, 35, "temporaries", "backward"),
        Event("free", 1, 30, "activations", "backward"),
        Event("free", 5, 35, "temporaries", "backward"),
        Event("alloc", 6, 40, "gradients", "backward"),
    ]
    return Trace(1, "cpu", "fake", tuple(events))


def test_at_the_least_what_stays_and_the_gradients_are_there():
    least = replay(least_if_compiled(step()), EXACT)
    assert least.parts == {"parameters": 100, "gradients": 100}


def test_at_the_most_the_forward_pass_saves_all_that_it_makes_and_the_largest_block_is_copied_twice():
    assert most_more_if_compiled(step(), 0, accumulates=False) == 20 + 2 * 35


def test_gradients_are_all_made_before_they_are_added_to_others():
    assert most_more_if_compiled(step(), 0, accumulates=True) == 20 + 2 * 35 + 60 + 40


def test_a_gpu_times_kernels_with_two_buffers():
    assert most_more_if_compiled(step(), 1000, accumulates=False) == 20 + 2 * 35 + 2 * 1000
