"""The first noun: a list of events that nobody changes any more."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from lightning_memguard.core.range import Range
from lightning_memguard.core.trace.scratch import Scratch
from lightning_memguard.core.trace.trace import CASES, PARTS, Event, ScratchSpan, Trace, moments_of, scratch_events


def test_memory_is_for_one_of_eight_things():
    """Their names are in `Footprint.parts` and in the logged `memguard/parts/<part>_gib`."""
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
    assert event[3:] == ("temporaries", "forward", 0, "", "", 0, "", "", ())
    assert event.part in PARTS


def test_a_trace_is_its_events_in_order():
    first, second = Event("alloc", 0, 512), Event("free", 0, 512)
    trace = Trace(8, "cpu", "fake", (first, second))
    assert list(trace) == [first, second]
    assert len(trace) == 2


def test_what_a_run_holds_throughout_is_there_before_what_it_was_recorded_next_to():
    model, batch = Event("alloc", 3, 512, "parameters"), Event("alloc", 7, 64, "batch")
    trace = Trace(8, "cpu", "fake", (model, batch), held_at=1)
    held = trace.holding([("optimizer_state", 1024), ("gradients", 512)])
    assert list(held) == [
        model,
        Event("alloc", 8, 1024, "optimizer_state", "setup"),
        Event("alloc", 9, 512, "gradients", "setup"),
        batch,
    ]
    assert trace.holding([]) is trace
    assert next(iter(trace.plus({"callbacks": 8}))) == Event("alloc", 8, 8, "callbacks", "setup")


def test_workspaces_that_a_library_keeps_are_those_of_no_operator_alone():
    def event(action: str, block: int, nbytes: int, phase: str, part: str = "workspaces", case: str = "") -> Event:
        return Event(action, block, nbytes, part, phase, case=case)

    alive = event("alloc", 0, 32, "forward"), event("alloc", 1, 32, "backward"), event("alloc", 2, 8, "backward")
    others = event("free", 2, 8, "optimizer"), event("alloc", 3, 4, "setup"), event("alloc", 4, 2, "forward", "batch")
    unknown = event("alloc", 5, 16, "forward", case="high")
    trace = Trace(8, "cuda", "fake", (*alive, *others, unknown))
    assert trace.open_workspaces == {(False, 32): 1, (True, 32): 1}


def test_a_later_stage_cannot_edit_a_trace():
    trace = Trace(8, "cpu", "fake", ())
    with pytest.raises(FrozenInstanceError):
        trace.batch_size = 16


# Blocks whose size is not known exactly


def test_one_case_alone_has_what_is_certain_and_its_own():
    certain = Event("alloc", 0, 512)
    uncertain = {case: Event("alloc", 1 + place, nbytes, case=case) for place, (case, nbytes) in enumerate(SIZES)}
    stretch = ScratchSpan(1, 4, 0, None, certain)
    trace = Trace(8, "cuda", "fake", (certain, *uncertain.values()), scratch_spans=(stretch,))
    for case in CASES[:3]:
        alone = trace.only(case)
        assert alone.events == (certain, uncertain[case])
        assert alone.scratch_spans == (), "positions no longer hold"
    assert len(trace) == 4


SIZES = (("low", 0), ("point", 100), ("high", 300))


def test_where_all_is_certain_every_case_is_the_trace_itself():
    trace = Trace(8, "cpu", "fake", (Event("alloc", 0, 512),))
    assert all(trace.only(case) is trace for case in CASES)


# The events of scratch

LIKE = Event("alloc", 7, 1, "temporaries", "backward", 1, "head", "aten.mm.default", 5)


def written(*moments):
    return [(event.action, event.block, event.nbytes, event.case) for event in scratch_events(moments, -1, LIKE)]


def test_one_block_after_another_is_taken_and_given_back():
    assert written(100, 200) == [
        ("alloc", -1, 100, ""),
        ("free", -1, 100, ""),
        ("alloc", -2, 200, ""),
        ("free", -2, 200, ""),
    ]


def test_blocks_of_one_moment_are_alive_together_and_go_last_first():
    assert written((100, 200)) == [
        ("alloc", -1, 100, ""),
        ("alloc", -2, 200, ""),
        ("free", -2, 200, ""),
        ("free", -1, 100, ""),
    ]


def test_a_span_stands_once_for_each_case_but_not_where_it_takes_nothing():
    assert written(Range(0, 100, 300)) == [
        ("alloc", -1, 100, "point"),
        ("alloc", -2, 300, "high"),
        ("free", -2, 300, "high"),
        ("free", -1, 100, "point"),
    ]


def test_a_span_may_be_alive_with_a_certain_block():
    assert written((50, Range(1, 2, 3)))[:4] == [
        ("alloc", -1, 50, ""),
        ("alloc", -2, 1, "low"),
        ("alloc", -3, 2, "point"),
        ("alloc", -4, 3, "high"),
    ]


@pytest.mark.parametrize("moments", [(), (0,), ((0, 0),), ((),), (Range(0, 0, 0),)])
def test_nothing_is_no_event(moments):
    assert scratch_events(moments, -1, LIKE) == []


def test_no_number_is_given_twice_and_all_go_down_from_the_first():
    events = scratch_events((1, (2, 3), Range(4, 5, 6)), -10, LIKE)
    assert [event.block for event in events if event.action == "alloc"] == [-10, -11, -12, -13, -14, -15]
    assert sorted(e.block for e in events if e.action == "free") == sorted({e.block for e in events})


def test_scratch_stands_where_its_operator_does_and_is_a_workspace():
    for event in scratch_events((8,), -1, LIKE):
        assert event._replace(action="alloc", block=7, nbytes=1) == LIKE._replace(part="workspaces")


def test_a_kernels_moments_are_found_by_their_place_among_its_results():
    scratch = Scratch(before=(1,), after=(4,), between={0: (2,), 1: (3,)})
    assert [moments_of(scratch, place) for place in (-1, 0, 1, 2, None)] == [(1,), (2,), (3,), (), (4,)]
