"""What a step needs at one batch size: a replayed trace, and what stands outside of it."""

from __future__ import annotations

import pytest

from lightning_memguard.core.allocator import AllocatorSettings
from lightning_memguard.core.footprint import Footprint, footprint
from lightning_memguard.core.trace import PARTS, Event, Trace
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
    found = footprint(trace_of(*STEP, device="cuda"), CUDA, context_bytes=300 * MIB)
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
