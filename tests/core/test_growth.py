"""A step's trace at a size nobody ran, from traces at a few sizes: each event's bytes are fitted, never the peak."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memguard.core.growth import grow
from lightning_memguard.core.trace import Event, Trace
from lightning_memguard.errors import CannotTraceError


def trace_at(batch_size: int, *nbytes: int) -> Trace:
    """One block for each number of bytes."""
    return Trace(batch_size, "cpu", "fake", tuple(Event("alloc", block, size) for block, size in enumerate(nbytes)))


def sizes_of(trace: Trace) -> list[int]:
    return [event.nbytes for event in trace]


def refused(message: str) -> pytest.RaisesExc:
    return pytest.raises(CannotTraceError, match=f"^{re.escape(message)}$")


# How bytes grow


def test_what_belongs_to_the_model_stays():
    growth = grow([trace_at(2, 100), trace_at(4, 100)])
    assert sizes_of(growth.at(1000)) == [100]
    assert growth.degree == 0


def test_what_belongs_to_a_sample_grows_with_every_sample():
    growth = grow([trace_at(2, 10 + 2 * 3), trace_at(4, 10 + 4 * 3)])
    assert sizes_of(growth.at(100)) == [10 + 100 * 3]
    assert growth.degree == 1


def test_a_third_size_on_the_line_keeps_it_a_line():
    growth = grow([trace_at(n, 10 + n * 3) for n in (2, 4, 8)])
    assert sizes_of(growth.at(100)) == [310]
    assert growth.degree == 1


@pytest.mark.parametrize("sizes", [(2, 4, 8), (2, 4, 8, 16)])
def test_where_samples_meet_samples_a_third_size_finds_the_square_and_a_fourth_agrees(sizes):
    growth = grow([trace_at(n, 10 + 3 * n + 5 * n * n) for n in sizes])
    assert sizes_of(growth.at(100)) == [10 + 300 + 50_000]
    assert growth.degree == 2


def test_each_event_grows_in_its_own_way():
    growth = grow([trace_at(n, 100, 3 * n, 5 * n * n, 7 * n) for n in (2, 4, 8)])
    assert sizes_of(growth.at(10)) == [100, 30, 500, 70]
    assert growth.degree == 2


def test_a_cube_passes_for_a_square_at_three_sizes_and_is_found_out_at_four():
    """Why a fourth size is captured wherever a square was found."""
    cubes = [trace_at(n, n**3) for n in (2, 4, 8, 16)]
    assert grow(cubes[:3]).degree == 2
    with refused(
        "The bytes of alloc by nothing in the step (forward) follow no line or square of the batch size: "
        "8 B at 2, 64 B at 4, 512 B at 8, 4096 B at 16."
    ):
        grow(cubes)


def test_bytes_that_jump_follow_no_line_or_square():
    """A kernel that works in blocks of eight samples: no polynomial says what it takes at 12."""
    with pytest.raises(CannotTraceError, match="follow no line or square"):
        grow([trace_at(n, nbytes) for n, nbytes in ((2, 8), (4, 8), (8, 8), (16, 16))])


def test_bytes_that_shrink_with_the_batch_are_refused():
    with pytest.raises(CannotTraceError, match="follow no line or square of the batch size: 30 B at 2, 10 B at 4"):
        grow([trace_at(2, 30), trace_at(4, 10)])


def test_half_bytes_round_up():
    """A mask of 12 bits a sample: 3 bytes for two samples, 4.5 for three."""
    growth = grow([trace_at(2, 3), trace_at(4, 6)])
    assert sizes_of(growth.at(3)) == [5]


def test_a_line_that_would_go_below_nothing_ends_at_nothing():
    """20 a sample, less 30: 10 below nothing at one sample."""
    growth = grow([trace_at(2, 10), trace_at(4, 50)])
    assert sizes_of(growth.at(1)) == [0]


# What else comes along


def test_a_block_is_given_back_at_the_size_it_was_taken():
    def taken_and_given(n: int) -> Trace:
        return Trace(n, "cpu", "fake", (Event("alloc", 0, 3 * n), Event("free", 0, 3 * n)))

    grown = grow([taken_and_given(2), taken_and_given(4)]).at(100)
    assert [(event.action, event.nbytes) for event in grown] == [("alloc", 300), ("free", 300)]


def test_all_but_the_bytes_is_carried_over():
    event = Event("alloc", 7, 8, "activations", "backward", 1, "encoder.0", "aten.relu.default", 5)
    small = Trace(2, "cuda", "worst-case", (event,), ("a note",))
    large = Trace(4, "cuda", "worst-case", (event._replace(nbytes=16),), ("a note",))
    assert grow([small, large]).at(100) == Trace(100, "cuda", "worst-case", (event._replace(nbytes=400),), ("a note",))


def test_the_order_of_the_captures_does_not_matter():
    small, middle, large = (trace_at(n, 10 + n * 3, n * n) for n in (2, 4, 8))
    assert grow([large, small, middle]) == grow([small, middle, large])


def test_the_sizes_captured_are_remembered_smallest_first():
    assert grow([trace_at(8, 80), trace_at(2, 20)]).sizes == (2, 8)


# Steps that cannot be compared


def test_one_size_tells_nothing_of_another():
    with refused("Growth needs traces at two batch sizes or more; got [4]."):
        grow([trace_at(4, 100)])


def test_the_same_size_twice_is_one_size():
    with refused("Growth needs traces at two batch sizes or more; got [4]."):
        grow([trace_at(4, 100), trace_at(4, 100)])


def test_a_step_that_calls_another_operator_is_refused_by_both_names():
    def step(n: int, operator: str) -> Trace:
        event = Event("alloc", 0, n, phase="backward", module="head", operator=operator)
        return Trace(n, "cpu", "fake", (event,))

    with refused(
        "The step runs differently at batch sizes 2 and 4: alloc by aten.mm.default in head (backward) in one is "
        "alloc by aten.bmm.default in head (backward) in the other."
    ):
        grow([step(2, "aten.mm.default"), step(4, "aten.bmm.default")])


def test_a_step_with_more_events_at_another_size_is_refused():
    with refused("The step runs differently at batch sizes 2 and 8: 1 events against 2."):
        grow([trace_at(2, 10), trace_at(4, 10), trace_at(8, 10, 10)][::2])


@pytest.mark.parametrize(
    "change",
    [
        {"action": "free"},
        {"block": 1},
        {"part": "activations"},
        {"phase": "backward"},
        {"step": 1},
        {"module": "head"},
        {"operator": "aten.mm.default"},
        {"stream": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_events_may_differ_in_their_bytes_alone(change):
    small, large = trace_at(2, 10), trace_at(4, 20)
    other = replace(large, events=(large.events[0]._replace(**change),))
    assert grow([small, large]).degree == 1
    with pytest.raises(CannotTraceError, match="runs differently at batch sizes 2 and 4"):
        grow([small, other])


# Any polynomials

quantities = st.integers(0, 10**6)
polynomials = st.lists(st.tuples(quantities, quantities, quantities), min_size=1, max_size=8)
batch_sizes = st.integers(1, 512)


def polynomial_trace(coefficients: list[tuple[int, int, int]], n: int) -> Trace:
    return trace_at(n, *(a + b * n + c * n * n for a, b, c in coefficients))


@given(polynomials, st.sets(batch_sizes, min_size=3, max_size=5), batch_sizes)
@settings(deadline=None)
def test_growth_gives_back_what_it_was_made_from_and_any_size_between_or_beyond(coefficients, sizes, n):
    growth = grow([polynomial_trace(coefficients, size) for size in sizes])
    for size in sizes:
        assert growth.at(size) == polynomial_trace(coefficients, size)
    assert growth.at(n) == polynomial_trace(coefficients, n)


@given(
    st.lists(st.tuples(quantities, quantities), min_size=4, max_size=4), st.sets(batch_sizes, min_size=4, max_size=4)
)
@settings(deadline=None)
def test_whatever_the_bytes_growth_gives_its_traces_back_or_refuses(nbytes, sizes):
    """It never stands for a trace that it does not reproduce."""
    traces = [trace_at(n, *pair) for n, pair in zip(sizes, nbytes, strict=True)]
    try:
        growth = grow(traces)
    except CannotTraceError:
        return
    assert [growth.at(trace.batch_size) for trace in traces] == traces
