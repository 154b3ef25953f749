"""The memory of a step at one batch size: a replayed trace, and the bytes outside of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memguard.core.range import NOTHING, Range
from lightning_memguard.core.replay.footprint import LESS_CACHED, MORE_CACHED, Footprint, Peak, footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.scratch import Plans
from lightning_memguard.core.trace.trace import PARTS, Event, Trace, scratch_events
from lightning_memguard.units import MIB

EXACT = AllocatorSettings(kind="exact")
CUDA = AllocatorSettings()

# 1000 bytes of model, 200 of batch and 300 of activations make 1500; in the backward pass the batch is gone and 400
# bytes of gradient come: 1700, the peak. The activations go before 100 bytes of optimizer state come: 1500 again.
STEP = (
    Event("alloc", 0, 1000, "parameters", "setup"),
    Event("alloc", 1, 200, "batch", "transfer"),
    Event("alloc", 2, 300, "activations", "forward", module="encoder", operator="aten.relu.default"),
    Event("free", 1, 200, "batch", "forward"),
    Event("alloc", 3, 400, "gradients", "backward", module="head", operator="aten.mm.default"),
    Event("free", 2, 300, "activations", "backward"),
    Event("alloc", 4, 100, "optimizer_state", "optimizer"),
)


def trace_of(*events: Event, device: str = "cpu") -> Trace:
    return Trace(8, device, "fake", events)


def test_the_peak_is_what_was_alive_at_once():
    found = footprint(trace_of(*STEP), EXACT)
    assert found.peak_allocated_bytes == 1000 + 300 + 400


def test_the_parts_are_what_was_alive_then_and_sum_to_the_peak():
    found = footprint(trace_of(*STEP), EXACT)
    assert {part: nbytes for part, nbytes in found.parts.items() if nbytes} == {
        "parameters": 1000,
        "gradients": 400,
        "activations": 300,
    }
    assert sum(found.parts.values()) == found.peak_allocated_bytes


def test_every_part_is_named_in_one_order_even_where_it_holds_nothing():
    assert tuple(footprint(trace_of(*STEP), EXACT).parts) == PARTS


def test_it_says_where_the_peak_stands():
    found = footprint(trace_of(*STEP), EXACT)
    assert (found.phase, found.module, found.operator) == ("backward", "head", "aten.mm.default")


def test_the_largest_part_is_the_one_to_save_on():
    assert footprint(trace_of(*STEP), EXACT).largest_part == "parameters"


def test_on_the_cpu_nothing_is_rounded_reserved_or_added():
    found = footprint(trace_of(*STEP), EXACT)
    assert found.peak_reserved_bytes == found.peak_device_bytes == found.peak_allocated_bytes


def test_on_cuda_the_peak_is_looked_for_among_blocks_rounded_to_512():
    """200 bytes of batch weigh as much as 400 of gradient there, so the forward pass reaches the peak first."""
    found = footprint(trace_of(*STEP, device="cuda"), CUDA)
    assert {part: nbytes for part, nbytes in found.parts.items() if nbytes} == {
        "parameters": 1024,
        "activations": 512,
        "batch": 512,
    }
    assert (found.peak_allocated_bytes, found.phase) == (1024 + 512 + 512, "forward")


def test_on_cuda_the_device_holds_what_is_reserved_and_the_context_beside_it():
    found = footprint(trace_of(*STEP, device="cuda"), CUDA, context_bytes=Range.exactly(300 * MIB))
    assert found.peak_reserved_bytes == 2 * MIB
    assert found.peak_device_bytes == 302 * MIB


@pytest.mark.parametrize("method", ["fake", "worst-case", "real", "states"])
def test_it_says_which_way_it_was_obtained_and_for_what(method):
    found = footprint(Trace(8, "cuda:1", method, STEP, ("a mask keeps everything",)), EXACT)
    assert (found.batch_size, found.device) == (8, "cuda:1")
    assert (found.method, found.notes) == (method, ("a mask keeps everything",))


def test_a_step_that_takes_nothing_has_no_peak_to_place():
    found = footprint(trace_of(), EXACT)
    assert (found.peak_device_bytes, found.phase, found.module, found.operator) == (0, "", "", "")
    assert sum(found.parts.values()) == 0


def test_without_parts_none_is_the_largest():
    assert Footprint(8, "cpu", 0, 0, 0).largest_part == ""


# What is not known exactly


def with_scratch(*moments, model: int = 1000) -> Trace:
    """A model, and an operator that takes scratch."""
    held = Event("alloc", 0, model, "parameters", "setup")
    return trace_of(held, *scratch_events(moments, -1, held._replace(phase="forward", operator="aten.convolution")))


def test_where_all_is_known_there_are_no_bounds():
    found = footprint(with_scratch(300), EXACT, context_bytes=Range.exactly(50))
    assert (found.low, found.high) == (None, None)
    assert found.most_device_bytes == found.peak_device_bytes == 1000 + 300 + 50


def test_a_workspace_of_unknown_size_gives_three_peaks():
    found = footprint(with_scratch(Range(0, 300, 900)), EXACT)
    assert (found.low, found.peak_allocated_bytes, found.high) == (Peak(1000, 1000, 1000), 1300, Peak(1900, 1900, 1900))
    assert found.most_device_bytes == 1900


def test_the_parts_are_those_of_the_likely_case():
    found = footprint(with_scratch(Range(0, 300, 900)), EXACT)
    assert (found.parts["workspaces"], sum(found.parts.values())) == (300, found.peak_allocated_bytes)


def test_certain_scratch_beside_the_unknown_is_in_all_three():
    found = footprint(with_scratch((50, Range(1, 2, 3))), EXACT)
    assert (found.low.allocated_bytes, found.peak_allocated_bytes, found.high.allocated_bytes) == (1051, 1052, 1053)


def test_a_context_of_unknown_size_is_added_to_each_peak():
    found = footprint(with_scratch(Range(0, 300, 900)), EXACT, context_bytes=Range(10, 20, 40))
    assert (found.low.device_bytes, found.peak_device_bytes, found.high.device_bytes) == (1010, 1320, 1940)
    assert (found.low.reserved_bytes, found.high.reserved_bytes) == (1000, 1900)


def test_a_context_of_unknown_size_alone_gives_bounds_too():
    found = footprint(with_scratch(300), EXACT, context_bytes=Range(10, 20, 40))
    assert (found.low, found.high) == (Peak(1300, 1300, 1310), Peak(1300, 1300, 1340))
    assert (found.peak_device_bytes, found.most_device_bytes) == (1320, 1340)


def test_a_context_whose_bounds_are_equal_is_known():
    found = footprint(with_scratch(300), EXACT, context_bytes=Range(20, 20, 20))
    assert (found.low, found.high, found.most_device_bytes) == (None, None, 1320)


def test_the_least_or_most_of_two_peaks_takes_each_figure_by_itself():
    one, other = Peak(1, 20, 300), Peak(10, 2, 400)
    assert [Peak.extreme((one, other), of) for of in (min, max)] == [Peak(1, 2, 300), Peak(10, 20, 400)]


blocks = st.integers(0, 64 * MIB)
spans = st.lists(blocks, min_size=3, max_size=3).map(lambda sizes: Range(*sorted(sizes)))
moments = st.one_of(blocks, spans, st.lists(st.one_of(blocks, spans), max_size=3).map(tuple))


@given(st.lists(moments, min_size=1, max_size=6), st.sampled_from([EXACT, CUDA]))
def test_bounds_never_cross_the_point(scratch, settings):
    """A larger block can leave a smaller reserve, so that the cases need not come out in order by themselves."""
    found = footprint(with_scratch(*scratch, model=3 * MIB), settings, context_bytes=Range(1, 2, 3))
    low, high = found.low, found.high
    assert low.allocated_bytes <= found.peak_allocated_bytes <= high.allocated_bytes
    assert low.reserved_bytes <= found.peak_reserved_bytes <= high.reserved_bytes
    assert low.device_bytes < found.peak_device_bytes < high.device_bytes
    assert high.device_bytes == found.most_device_bytes + found.yielding_bytes
    assert (low.device_bytes, high.device_bytes) == (low.reserved_bytes + 1, high.reserved_bytes + 3)


def test_where_a_larger_block_leaves_a_smaller_reserve_the_larger_context_still_stands():
    """Blocks up to 1 MiB share segments of 2, beside the 20 of the model; one byte more fits into those 20."""
    found = footprint(with_scratch(Range(0, 1, MIB + 1), model=3 * MIB), CUDA, context_bytes=Range(10, 20, 30))
    alone = footprint(with_scratch(MIB + 1, model=3 * MIB), CUDA)
    assert alone.peak_reserved_bytes == 20 * MIB < found.peak_reserved_bytes == 22 * MIB
    assert found.yielding_bytes == int(MORE_CACHED * (3 * MIB + 512))
    assert found.high == Peak(4 * MIB + 512, 22 * MIB, 22 * MIB + 30).fragmented(found.yielding_bytes)
    assert found.low == Peak(3 * MIB, 20 * MIB, 20 * MIB + 10).fragmented(-int(LESS_CACHED * (3 * MIB + 512)))


CACHING = (Event("alloc", 0, 20 * MIB), Event("free", 0, 20 * MIB), Event("alloc", 1, 40 * MIB))


@pytest.mark.parametrize(("context", "outside"), [((50, 50, 50), (50, 50)), ((10, 20, 30), (10, 30))])
def test_what_a_run_may_have_more_in_its_cache_is_in_its_range_but_not_held_against_a_budget(context, outside):
    """It would be given back: 40 MiB are allocated of 60 reserved, since they find no place in the first 20."""
    found = footprint(trace_of(*CACHING, device="cuda"), CUDA, Range(*context))
    less, more = int(LESS_CACHED * 40 * MIB), int(MORE_CACHED * 40 * MIB)
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (40 * MIB, 60 * MIB)
    assert found.low == Peak(40 * MIB, 60 * MIB - less, 60 * MIB - less + outside[0])
    assert found.high == Peak(40 * MIB, 60 * MIB + more, 60 * MIB + more + outside[1])
    assert (found.yielding_bytes, found.most_device_bytes) == (more, 60 * MIB + outside[1])


def test_a_workspace_that_has_other_sizes_is_not_held_against_a_budget():
    """PyTorch takes another plan of cuDNN where the largest does not fit."""
    certain, other = Range(0, 30 * MIB, 90 * MIB), Plans(Range(0, 20 * MIB, 50 * MIB), (20 * MIB, 0))
    found = footprint(with_scratch(other, model=40 * MIB), CUDA)
    assert found.high.allocated_bytes == 90 * MIB
    assert found.most_device_bytes == found.peak_device_bytes == 60 * MIB
    both = footprint(with_scratch((certain, other), model=40 * MIB), CUDA)
    assert (both.high.allocated_bytes, both.most_device_bytes) == (180 * MIB, 150 * MIB)


def test_the_cache_grows_no_further_than_the_device():
    settings = AllocatorSettings(capacity_bytes=60 * MIB + 10)
    found = footprint(trace_of(*CACHING, device="cuda"), settings, context_bytes=Range(10, 20, 30))
    assert found.yielding_bytes == 10
    assert found.high == Peak(40 * MIB, 60 * MIB + 10, 60 * MIB + 40)


def test_a_peak_never_has_less_reserved_than_allocated():
    assert Peak(40, 60, 70).fragmented(-30) == Peak(40, 40, 50)


def test_a_workspace_of_the_first_forward_pass_is_a_scenario_of_its_own():
    """One block more of 60 MiB, freed before the others come, serves 30 MiB that would take a segment of their own."""
    first = Plans(NOTHING, (), 60 * MIB)
    held = Event("alloc", 0, 3 * MIB, "parameters", "setup")
    pass_ = held._replace(phase="forward", operator="aten.convolution.default")
    later = [Event("alloc", 1, 40 * MIB), Event("free", 1, 40 * MIB), Event("alloc", 2, 60 * MIB)]
    trace = trace_of(held, *scratch_events((first,), -1, pass_), *later, device="cuda")
    assert [event.case for event in trace.events if event.block < 0] == ["first", "first"]
    assert len(trace.only("point").events) == len(trace.events) - 2
    found = footprint(trace, CUDA)
    assert found.peak_reserved_bytes == 120 * MIB  # 20, 40 and 60
    less = int(LESS_CACHED * found.peak_allocated_bytes)
    assert found.low.reserved_bytes == 80 * MIB - less  # 40 are cut from 60, which then serve 60


def test_workspaces_of_the_backward_pass_alone_are_a_scenario():
    """One of the forward pass leaves a segment for two blocks that join again; two segments of their own do not."""
    copies = Plans(Range(0, 60 * MIB, 60 * MIB), (60 * MIB, 0))
    held = Event("alloc", 0, 3 * MIB, "parameters", "setup")
    forward = held._replace(phase="forward", operator="aten.convolution.default", part="workspaces")
    backward = forward._replace(phase="backward", operator="aten.convolution_backward.default")
    blocks = [Event(action, block, 30 * MIB) for action in ("alloc", "free") for block in (1, 2)]
    before = scratch_events((copies._replace(first=60 * MIB),), -1, forward)
    trace = trace_of(held, *before, *blocks, *scratch_events((copies,), -9, backward), device="cuda")
    found = footprint(trace, CUDA)
    more = int(MORE_CACHED * found.peak_allocated_bytes)
    assert [found.peak_reserved_bytes, found.highest.reserved_bytes] == [80 * MIB, 140 * MIB + more]


def test_a_run_allocates_the_most_that_any_of_its_work_does():
    """Here a step allocates more than validation, of which more is cached."""
    step = Footprint(8, "cuda", 90, 100, 110, {"activations": 90}, "backward")
    step = step.doubted("unknown blocks", Peak(80, 100, 110), Peak(95, 100, 110))
    validation = Footprint(8, "cuda", 50, 150, 160, {"temporaries": 50}, "validation")
    run = validation.doubted("cache", Peak(50, 140, 150), Peak(50, 160, 170)).or_allocated_by(step)
    assert (run.peak, run.phase, run.parts) == (Peak(90, 150, 160), "validation", {"activations": 90})
    assert (run.lowest, run.highest) == (Peak(80, 140, 150), Peak(95, 160, 170))
    assert step.or_allocated_by(validation) is step


def test_a_footprint_prints_in_one_readable_line():
    found = footprint(trace_of(Event("alloc", 0, 3 * MIB, "activations", "forward", module="net.0")), EXACT)
    assert repr(found.plus_outside(MIB)) == (
        "Footprint(batch_size=8, device='cpu', peak='3.0 MiB', at_most='4.0 MiB', parts={'activations': '3.0 MiB'}, "
        "phase='forward', module='net.0', method='fake', notes=())"
    )


def test_addresses_that_the_driver_may_give_in_another_order_are_in_the_range():
    """Two free blocks of 40 MiB, one of them half of a segment of 80 that is asked for as a whole later."""
    taken = [Event("alloc", 0, 40 * MIB), Event("alloc", 1, 80 * MIB), Event("free", 1, 80 * MIB)]
    tie = [Event("alloc", 2, 40 * MIB), Event("free", 0, 40 * MIB), Event("alloc", 3, 40 * MIB)]
    whole = [Event("free", 2, 40 * MIB), Event("alloc", 4, 80 * MIB)]
    trace = trace_of(*taken, *tie, *whole, device="cuda")
    likely = []
    for settings in (CUDA, replace(CUDA, segments_descend=False)):
        found = footprint(trace, settings)
        likely.append(found.peak_reserved_bytes // MIB)
        more = int(MORE_CACHED * 120 * MIB)
        assert (found.low.reserved_bytes, found.high.reserved_bytes) == (120 * MIB, 200 * MIB + more)
    assert likely == [200, 120]
