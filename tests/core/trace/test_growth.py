"""A step's trace at a size nobody ran, from traces at a few sizes: each event's bytes are fitted, never the peak."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.predict import capture
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.range import Range
from lightning_memguard.core.trace.growth import extrapolate, grow
from lightning_memguard.core.trace.scratch import Scratch
from lightning_memguard.core.trace.trace import CASES, Event, Kernel, ScratchSpan, Trace, moments_of, scratch_events
from lightning_memguard.errors import CannotTraceError
from tests import tape


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
        "What the step (forward) allocates is not linear or quadratic in the batch size: "
        "8 B at 2, 64 B at 4, 512 B at 8, 4096 B at 16."
    ):
        grow(cubes)


def test_bytes_that_jump_follow_no_line_or_square():
    """A kernel that works in blocks of eight samples: no polynomial says what it takes at 12."""
    with pytest.raises(CannotTraceError, match="is not linear or quadratic"):
        grow([trace_at(n, nbytes) for n, nbytes in ((2, 8), (4, 8), (8, 8), (16, 16))])


def test_bytes_that_shrink_with_the_batch_are_refused():
    with pytest.raises(CannotTraceError, match="is not linear or quadratic in the batch size: 30 B at 2, 10 B at 4"):
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


def test_a_step_that_calls_another_operator_is_refused_by_its_place_in_the_model():
    """The words are for whoever wrote the step: a module and a line, no events or blocks."""

    def step(n: int, operator: str) -> Trace:
        event = Event("alloc", 0, n, phase="backward", module="head", operator=operator, source="net.py:12:forward")
        return Trace(n, "cpu", "fake", (event,))

    with refused("The step runs differently at batch sizes 2 and 4: first in head (backward, at net.py:12)."):
        grow([step(2, "aten.mm.default"), step(4, "aten.bmm.default")])


def test_a_step_with_more_events_at_another_size_is_refused():
    with refused("The step runs differently at batch sizes 2 and 8: at one it allocates more often."):
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
def test_growth_gives_back_what_it_was_made_from_and_any_size_between_or_beyond(coefficients, sizes, n):
    growth = grow([polynomial_trace(coefficients, size) for size in sizes])
    for size in sizes:
        assert growth.at(size) == polynomial_trace(coefficients, size)
    assert growth.at(n) == polynomial_trace(coefficients, n)


@given(
    st.lists(st.tuples(quantities, quantities), min_size=4, max_size=4), st.sets(batch_sizes, min_size=4, max_size=4)
)
def test_whatever_the_bytes_growth_gives_its_traces_back_or_refuses(nbytes, sizes):
    """It never stands for a trace that it does not reproduce."""
    traces = [trace_at(n, *pair) for n, pair in zip(sizes, nbytes, strict=True)]
    try:
        growth = grow(traces)
    except CannotTraceError:
        return
    assert [growth.at(trace.batch_size) for trace in traces] == traces


# Scratch, which follows rules that no polynomial describes

Rule = Callable[[Sequence[int]], Scratch]
LIKE = Event("alloc", 0, 0, "workspaces", "backward", 0, "head", "aten.kernel.default")


def above(numbers: Sequence[int]) -> Scratch:
    """Nothing up to 100 elements, and a sort of them from 101 on: of unknown size, beside a copy."""
    count = numbers[0]
    return Scratch(after=((count, Range(count, 2 * count, 4 * count)), count // 3) if count > 100 else ())


def in_blocks(numbers: Sequence[int]) -> Scratch:
    """One buffer for each 64 elements, before the result."""
    return Scratch(before=(-(-numbers[0] // 64) * numbers[1],))


def ends(numbers: Sequence[int]) -> Scratch:
    """Split over the samples while these are few, then no more."""
    return Scratch(between={0: (4096 // numbers[0],)} if numbers[0] < 200 else {})


def step_with(n: int, *rules: Rule, numbers: Callable[[int], tuple[int, ...]] = lambda n: (5 * n, 8)) -> Trace:
    """A trace as a recorder writes it: a block of the model, and for each kernel its scratch around its result."""
    events = [Event("alloc", 0, 100, "parameters", "setup")]
    kernels: list[Kernel] = []
    scratch_spans: list[ScratchSpan] = []
    blocks = 0
    for index, rule in enumerate(rules):
        kernels.append(Kernel(f"aten.{rule.__name__}.default", numbers(n), "rest", rule))
        for place in (-1, 0, None):
            if place == 0:
                events.append(Event("alloc", 1 + index, 20 * n, "activations", operator="aten.kernel.default"))
            scratch = scratch_events(moments_of(rule(numbers(n)), place), -1 - blocks, LIKE)
            blocks += len(scratch) // 2
            scratch_spans.append(ScratchSpan(len(events), len(events) + len(scratch), index, place, LIKE))
            events += scratch
    return Trace(n, "cuda", "fake", tuple(events), kernels=tuple(kernels), scratch_spans=tuple(scratch_spans))


@pytest.mark.parametrize("n", [1, 4, 5, 16, 20, 21, 39, 40, 41, 1000])
@pytest.mark.parametrize(
    "rules",
    [(above,), (in_blocks,), (ends,), (above, in_blocks, ends, above)],
    ids=["from", "in steps", "until", "all"],
)
def test_a_rule_is_asked_again_at_every_size(rules: tuple[Rule, ...], n: int) -> None:
    """All captured sizes lie below the one from which `above` takes anything."""
    growth = grow([step_with(size, *rules) for size in (4, 8, 16)])
    assert growth.at(n) == step_with(n, *rules)
    assert growth.degree == 1


def test_scratch_may_be_there_at_some_of_the_sizes_that_were_captured() -> None:
    sizes = (10, 20, 30)  # 50, 100 and 150 elements
    traces = [step_with(n, above, ends) for n in sizes]
    assert len({len(trace) for trace in traces}) > 1
    growth = grow(traces)
    for n in (*sizes, 1, 21, 500):
        assert growth.at(n).events == step_with(n, above, ends).events


def test_what_a_rule_is_given_may_grow_with_the_square() -> None:
    def squares(n: int) -> tuple[int, ...]:
        return n * n, 7

    growth = grow([step_with(n, above, in_blocks, numbers=squares) for n in (2, 4, 8, 16)])
    assert growth.degree == 2
    assert growth.at(300) == step_with(300, above, in_blocks, numbers=squares)


def test_what_a_rule_is_given_must_grow_by_some_law() -> None:
    def jumps(n: int) -> tuple[int, ...]:
        return (64 if n < 16 else 8), 7

    with pytest.raises(
        CannotTraceError, match="is not linear or quadratic in the batch size: 64 B at 4, 64 B at 8, 8 B"
    ):
        grow([step_with(n, above, numbers=jumps) for n in (4, 8, 16)])


def test_a_kernel_that_is_given_something_else_at_another_size_is_refused() -> None:
    small, large = step_with(4, above), step_with(8, above)
    other = replace(large, kernels=(replace(large.kernels[0], rest="a flag"),))
    with refused("The step runs differently at batch sizes 4 and 8: an operator gets other arguments."):
        grow([small, other])


def test_without_a_rule_scratch_that_steps_is_refused() -> None:
    """Why kernels are kept at all."""
    traces = [replace(step_with(n, in_blocks), kernels=(), scratch_spans=()) for n in (4, 8, 16, 32)]
    with pytest.raises(CannotTraceError, match="is not linear or quadratic"):
        grow(traces)


@given(st.sets(st.integers(1, 60), min_size=3, max_size=4), st.integers(1, 400))
def test_whatever_sizes_were_captured_growth_is_a_capture_at_any_other(sizes: set[int], n: int) -> None:
    rules = (above, ends, in_blocks)
    assert grow([step_with(size, *rules) for size in sizes]).at(n) == step_with(n, *rules)


# A real step, on a GPU that is not here


@pytest.mark.parametrize("name", ["words_gpu", "words_bf16_gpu"])
def test_growth_from_a_few_samples_is_a_capture_of_thousands(name: str) -> None:
    """Seven words a sample: from 439 samples on there are more than 3072, and their gradients are sorted."""
    captured = tape.read(name)
    growth = grow([captured[n] for n in (4, 8, 16)])
    for n in (1, 438, 439, 4096):
        assert growth.at(n).events == captured[n].events
        assert growth.at(n).scratch_spans == captured[n].scratch_spans
        assert growth.at(n).kernels == captured[n].kernels


def test_those_thousands_take_scratch_that_a_few_do_not() -> None:
    """So that the test above can fail."""

    def sorts(n: int) -> bool:
        operator, events = "aten.embedding_dense_backward.default", tape.read("words_gpu")[n]
        return any(e.operator == operator and e.nbytes > 7 * n * 8 for e in events if e.part == "workspaces")

    assert not sorts(438)
    assert sorts(439)


def test_the_weights_that_autocast_casts_are_freed_in_one_order_at_every_size() -> None:
    """It clears its cache in the order of addresses: this many layers never come in the same one twice."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(25)))
    batches, gpu = batches_from_one(torch.zeros(4, 8)), gpus.find("A100 80GB")
    step = lambda model, batch: model(batch).sum()  # noqa: E731
    program = LoopProgram(model, batches, step, torch.optim.SGD, torch.device("cuda"), "bf16-mixed", gpu=gpu)
    small, larger, large = (capture(program, n, "fake") for n in (4, 8, 16))
    assert grow([small, larger]).at(16).events == large.events


# Beyond what ran


def test_what_belongs_to_the_batch_is_drawn_on_by_a_line_and_the_rest_stays():
    def ran(batch_size: int, *blocks: int, scratch: int) -> Trace:
        """A weight, a kernel's scratch, and other blocks of the batch: another number of them at each size."""
        held = Event("alloc", 0, 100, "parameters", "setup"), Event("alloc", 1, scratch, "workspaces", operator="conv")
        events = (*held, *(Event("alloc", 2 + place, size) for place, size in enumerate(blocks)))
        return Trace(batch_size, "cpu", "real", (*events, Event("free", 1, scratch, "workspaces", "optimizer")))

    small, large = ran(2, 40, scratch=90), ran(4, 30, 30, scratch=100)

    def drawn_on(traces: list[Trace], batch_size: int) -> dict[str, list[int]]:
        return {case: sizes_of(extrapolate(traces, batch_size).only(case)) for case in CASES[:3]}

    assert drawn_on([large, small], 8) == {
        "low": [100, 120, 50, 50, 120],
        "point": [100, 120, 50, 50, 120],  # 20 more for two samples, 40 for four
        "high": [100, 200, 60, 60, 200],  # in proportion
    }
    assert drawn_on([large], 8) == {
        "low": [100, 100, 30, 30, 100],  # from one size alone: maybe not at all
        "point": [100, 200, 60, 60, 200],
        "high": [100, 200, 60, 60, 200],
    }
    assert drawn_on([small, large], 3)["point"] == [100, 95, 25, 25, 95]
    assert extrapolate([small, large], 4).events == large.events
