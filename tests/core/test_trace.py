"""The first noun: a list of events that nobody changes any more."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from lightning_memguard.core.trace import PARTS, Event, Trace


def test_memory_is_for_one_of_eight_things():
    """These names stand in `Footprint.parts` and in the logged `memguard/parts/<part>_gib`."""
    assert PARTS == (
        "parameters",
        "buffers",
        "gradients",
        "optimizer_state",
        "activations",
        "batch",
        "temporaries",
        "workspaces",
    )


def test_an_event_says_three_things_and_the_rest_has_defaults():
    event = Event("alloc", 0, 512)
    assert event[3:] == ("temporaries", "forward", 0, "", "", 0)
    assert event.part in PARTS


def test_a_trace_is_its_events_in_order():
    first, second = Event("alloc", 0, 512), Event("free", 0, 512)
    trace = Trace(8, "cpu", "fake", (first, second))
    assert list(trace) == [first, second]
    assert len(trace) == 2


def test_a_later_stage_cannot_edit_a_trace():
    trace = Trace(8, "cpu", "fake", ())
    with pytest.raises(FrozenInstanceError):
        trace.batch_size = 16
