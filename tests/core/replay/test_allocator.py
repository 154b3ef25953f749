"""How PyTorch hands out device memory, one rule at a time, in sums one can do in the head."""

from __future__ import annotations

from bisect import insort
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memguard.core.replay.allocator import Allocator, Block
from lightning_memguard.core.replay.replay import Replay, replay
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import GIB, KIB, MIB

DEFAULT = AllocatorSettings(segments_descend=False)
EXPANDABLE = AllocatorSettings(expandable_segments=True)
EXACT = AllocatorSettings(kind="exact")


def trace_of(*events: Event) -> Trace:
    return Trace(batch_size=1, device="cuda", method="fake", events=events)


def take(block: int, nbytes: int, part: str = "temporaries") -> Event:
    return Event("alloc", block, nbytes, part)


def give(block: int) -> Event:
    return Event("free", block, 0)


def allocator(**options: object) -> Allocator:
    return Allocator(replace(DEFAULT, **options))


def alloc(device: Allocator, nbytes: int, stream: int = 0) -> Block:
    block = device.alloc(nbytes, stream)
    assert block is not None
    return block


def sizes(device: Allocator) -> list[list[tuple[int, str]]]:
    """Every segment as its blocks: how large, and whether used or free."""
    return [
        [(block.size_bytes, "used" if block.allocated else "free") for block in segment.blocks]
        for segment in device.segments()
    ]


# Rounding and segments


@pytest.mark.parametrize(
    ("nbytes", "size"), [(1, 512), (512, 512), (513, 1024), (1000, 1024), (MIB, MIB), (3 * MIB + 1, 3 * MIB + 512)]
)
def test_requests_are_rounded_up_to_512_bytes(nbytes, size):
    assert alloc(allocator(), nbytes).size_bytes == size


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_a_request_decides_how_large_a_segment_is_reserved(nbytes, segment):
    device = allocator()
    alloc(device, nbytes)
    assert device.reserved_bytes == segment


def test_a_request_that_just_misses_10_mib_before_rounding_gets_its_own_segment():
    device = allocator()
    alloc(device, 10 * MIB - 1)
    assert device.reserved_bytes == 10 * MIB


def test_large_segment_size_replaces_the_20_mib():
    device = allocator(large_segment_size_bytes=64 * MIB)
    alloc(device, 2 * MIB)
    assert device.reserved_bytes == 64 * MIB
    alloc(device, 70 * MIB)
    assert device.reserved_bytes == (64 + 70) * MIB


def test_an_empty_tensor_costs_nothing():
    device = allocator()
    block = alloc(device, 0)
    assert (device.allocated_bytes, device.reserved_bytes, device.segments()) == (0, 0, ())
    device.free(block)
    assert device.allocated_bytes == 0


def test_small_and_large_requests_never_share_a_segment():
    device = allocator()
    device.free(alloc(device, 20 * MIB))
    alloc(device, KIB)
    assert sizes(device) == [[(20 * MIB, "free")], [(KIB, "used"), (2 * MIB - KIB, "free")]]


# Splitting and joining


def test_the_small_pool_splits_off_even_512_bytes():
    device = allocator()
    alloc(device, MIB)
    alloc(device, MIB - 512)
    assert sizes(device) == [[(MIB, "used"), (MIB - 512, "used"), (512, "free")]]


def test_the_large_pool_keeps_a_rest_of_1_mib_in_the_block_and_counts_it_as_allocated():
    device = allocator()
    block = alloc(device, 11 * MIB)
    assert (block.size_bytes, block.requested_bytes) == (12 * MIB, 11 * MIB)
    assert device.allocated_bytes == 12 * MIB


def test_the_large_pool_splits_off_a_rest_above_1_mib():
    device = allocator()
    alloc(device, 11 * MIB - 512)
    assert sizes(device) == [[(11 * MIB - 512, "used"), (MIB + 512, "free")]]


def test_a_freed_block_joins_both_free_neighbours():
    device = allocator()
    first, second, third = (alloc(device, 4 * MIB) for _ in range(3))
    device.free(first)
    device.free(third)
    assert sizes(device) == [[(4 * MIB, "free"), (4 * MIB, "used"), (12 * MIB, "free")]]
    device.free(second)
    assert sizes(device) == [[(20 * MIB, "free")]]


def test_blocks_of_two_segments_never_join():
    device = allocator()
    for block in [alloc(device, 20 * MIB), alloc(device, 20 * MIB)]:
        device.free(block)
    alloc(device, 40 * MIB)
    assert device.reserved_bytes == 80 * MIB


def test_freeing_twice_is_our_own_mistake():
    device = allocator()
    block = alloc(device, KIB)
    device.free(block)
    with pytest.raises(AssertionError, match="freed twice"):
        device.free(block)


# Which cached block serves a request


def test_the_smallest_block_that_fits_is_taken():
    device = allocator()
    large, small = alloc(device, 40 * MIB), alloc(device, 30 * MIB)
    device.free(large)
    device.free(small)
    assert alloc(device, 25 * MIB).address == small.address


def test_of_equal_blocks_the_lowest_is_taken():
    for descend in (False, True):
        device = allocator(segments_descend=descend)
        blocks = [alloc(device, 30 * MIB) for _ in range(3)]
        for block in (blocks[2], blocks[0], blocks[1]):
            device.free(block)
        assert alloc(device, 30 * MIB).address == blocks[2 if descend else 0].address


def test_a_block_too_small_is_passed_over_and_a_new_segment_reserved():
    device = allocator()
    device.free(alloc(device, 30 * MIB))
    alloc(device, 30 * MIB + 1)
    assert device.reserved_bytes == (30 + 32) * MIB


def test_memory_freed_on_one_stream_does_not_serve_another():
    device = allocator()
    device.free(alloc(device, 30 * MIB, stream=0))
    alloc(device, 30 * MIB, stream=7)
    assert device.reserved_bytes == 60 * MIB
    assert [segment.stream for segment in device.segments()] == [0, 7]
    alloc(device, 30 * MIB, stream=0)
    assert device.reserved_bytes == 60 * MIB


# roundup_power2_divisions


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [
        (5 * MIB, 5 * MIB),  # 4, 5, 6, 7, 8 MiB are the steps
        (5 * MIB + 1, 6 * MIB),
        (7 * MIB + 1, 8 * MIB),
        (8 * MIB, 8 * MIB),
        (8 * MIB + 1, 10 * MIB),
        (2049, 2560),  # 2048, 2560, 3072, ...
        (1025, 1536),  # too small to divide by four: the usual 512
    ],
)
def test_four_divisions_round_up_to_quarters_of_a_power_of_two(nbytes, size):
    assert allocator(roundup_power2_divisions=(4,) * 16).rounded(nbytes) == size


def test_divisions_differ_by_the_size_of_the_request():
    divisions = AllocatorSettings.for_device(
        "cuda", {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[4:2,8:4,16:0,>:1]"}
    ).roundup_power2_divisions
    device = allocator(roundup_power2_divisions=divisions)
    assert device.rounded(3 * MIB + 1) == 4 * MIB  # halves, as for 4 MiB
    assert device.rounded(5 * MIB) == 6 * MIB
    assert device.rounded(9 * MIB) == 10 * MIB  # quarters
    assert device.rounded(17 * MIB + 1) == 17 * MIB + 512  # none
    assert device.rounded(100 * GIB + 1) == 100 * GIB + 512


# max_split_size


def test_an_oversize_block_is_not_split():
    device = allocator(max_split_size_bytes=40 * MIB)
    device.free(alloc(device, 50 * MIB))
    assert alloc(device, 41 * MIB).size_bytes == 50 * MIB


def test_an_oversize_block_is_kept_from_smaller_requests():
    device = allocator(max_split_size_bytes=40 * MIB)
    device.free(alloc(device, 40 * MIB))
    alloc(device, 39 * MIB)
    assert device.reserved_bytes == (40 + 40) * MIB  # 39 MiB round up to a segment of 40


def test_an_oversize_request_wastes_less_than_20_mib_of_a_block():
    device = allocator(max_split_size_bytes=40 * MIB)
    device.free(alloc(device, 60 * MIB))
    assert alloc(device, 40 * MIB).size_bytes == 40 * MIB
    assert alloc(device, 40 * MIB + 512).size_bytes == 60 * MIB


def test_max_non_split_rounding_allows_more_waste():
    device = allocator(max_split_size_bytes=40 * MIB, max_non_split_rounding_bytes=30 * MIB)
    device.free(alloc(device, 60 * MIB))
    assert alloc(device, 40 * MIB).size_bytes == 60 * MIB


def test_blocks_below_the_limit_are_split_as_ever():
    device = allocator(max_split_size_bytes=40 * MIB)
    device.free(alloc(device, 30 * MIB))
    alloc(device, 20 * MIB)
    assert sizes(device) == [[(20 * MIB, "used"), (10 * MIB, "free")]]


# A full device


def test_at_capacity_wholly_free_segments_are_given_back_and_the_request_tried_again():
    device = allocator(capacity_bytes=50 * MIB)
    device.free(alloc(device, 30 * MIB))
    alloc(device, 40 * MIB)
    assert (device.reserved_bytes, device.retries) == (40 * MIB, 1)
    assert device.peak_reserved_bytes == 40 * MIB


def test_a_segment_in_use_cannot_be_given_back():
    device = allocator(capacity_bytes=50 * MIB)
    alloc(device, 2 * MIB)
    device.free(alloc(device, 10 * MIB))
    assert device.alloc(40 * MIB) is None
    assert (device.reserved_bytes, device.retries) == (20 * MIB, 1)


def test_giving_back_takes_both_pools_and_every_stream():
    device = allocator(capacity_bytes=44 * MIB)
    for nbytes, stream in ((KIB, 0), (KIB, 1), (20 * MIB, 0), (20 * MIB, 1)):
        device.free(alloc(device, nbytes, stream))
    assert device.reserved_bytes == 44 * MIB
    alloc(device, 44 * MIB, stream=2)
    assert len(device._segments) == 1


def test_of_the_oversize_blocks_the_smallest_that_suffices_goes_first():
    device = allocator(max_split_size_bytes=20 * MIB, capacity_bytes=200 * MIB)
    blocks = [alloc(device, mib * MIB) for mib in (90, 60, 30)]
    for block in blocks:
        device.free(block)
    alloc(device, 40 * MIB)  # 60 would waste 20 or more, so a new segment is needed, and 220 MiB are too many
    assert [segment.total_bytes // MIB for segment in device.segments()] == [90, 30, 40]
    assert device.retries == 0


def test_where_no_single_oversize_block_suffices_several_go_largest_first():
    device = allocator(max_split_size_bytes=20 * MIB, capacity_bytes=100 * MIB)
    for block in [alloc(device, mib * MIB) for mib in (20, 30, 40)]:
        device.free(block)
    alloc(device, 60 * MIB)
    assert [segment.total_bytes // MIB for segment in device.segments()] == [20, 60]
    assert device.retries == 0


def test_where_oversize_blocks_do_not_suffice_the_whole_cache_goes():
    device = allocator(max_split_size_bytes=20 * MIB, capacity_bytes=70 * MIB)
    small = alloc(device, KIB)
    for block in (small, alloc(device, 30 * MIB)):
        device.free(block)
    alloc(device, 60 * MIB)
    assert (len(device._segments), device.retries) == (1, 1)


# Garbage collection


def collecting(**options: object) -> Allocator:
    return allocator(
        **{
            "capacity_bytes": 100 * MIB,
            "garbage_collection_threshold": 0.6,
            "per_process_memory_fraction": 0.9,
            **options,
        }
    )


def with_one_old_and_one_young_block(device: Allocator) -> Allocator:
    """Reserve 76 MiB, all free: 20 for long, 40 and 16 only just."""
    old, young = alloc(device, 20 * MIB), alloc(device, 40 * MIB)
    device.free(old)
    for _ in range(5):  # five searches later
        device.free(alloc(device, 15 * MIB, stream=1))
    device.free(young)
    return device


def test_above_the_threshold_the_longest_unused_segment_is_given_back_first():
    device = with_one_old_and_one_young_block(collecting())
    alloc(device, 22 * MIB, stream=2)
    assert 20 * MIB not in [segment.total_bytes for segment in device.segments()]
    assert 40 * MIB in [segment.total_bytes for segment in device.segments()]
    assert device.retries == 0


def test_below_the_threshold_nothing_is_collected():
    device = with_one_old_and_one_young_block(collecting(garbage_collection_threshold=0.8))
    alloc(device, 22 * MIB, stream=2)
    assert 20 * MIB in [segment.total_bytes for segment in device.segments()]


def test_collection_goes_on_until_the_excess_is_gone():
    device = with_one_old_and_one_young_block(collecting(garbage_collection_threshold=0.1))
    alloc(device, 22 * MIB, stream=2)
    assert device.reserved_bytes == 22 * MIB


def test_small_requests_do_not_make_large_blocks_older():
    device = collecting()
    first, second = alloc(device, 20 * MIB), alloc(device, 40 * MIB)
    device.free(first)
    for _ in range(5):
        device.free(alloc(device, KIB))
    device.free(second)
    alloc(device, 22 * MIB, stream=2)  # 2 MiB too many: both are of average age, so both go
    assert [segment.total_bytes // MIB for segment in device.segments()] == [2, 22]


def test_without_a_memory_fraction_pytorch_collects_nothing():
    device = with_one_old_and_one_young_block(collecting(per_process_memory_fraction=1.0))
    alloc(device, 22 * MIB, stream=2)
    assert 20 * MIB in [segment.total_bytes for segment in device.segments()]


# Expandable segments


def test_an_expandable_segment_grows_by_pages():
    device = Allocator(EXPANDABLE)
    alloc(device, 30 * MIB)
    assert sizes(device) == [[(30 * MIB, "used"), (10 * MIB, "free")]]
    alloc(device, 30 * MIB)
    assert sizes(device) == [[(30 * MIB, "used"), (30 * MIB, "used")]]
    assert len(device._segments) == 1


def test_an_expandable_segment_of_the_small_pool_has_pages_of_2_mib():
    device = Allocator(EXPANDABLE)
    for _ in range(3):
        alloc(device, MIB)
    assert sizes(device) == [[(MIB, "used"), (MIB, "used"), (MIB, "used"), (MIB, "free")]]


def test_large_segment_size_is_the_page_of_the_large_pool():
    device = allocator(expandable_segments=True, large_segment_size_bytes=64 * MIB)
    alloc(device, 65 * MIB)
    assert device.reserved_bytes == 128 * MIB


def test_an_expandable_segment_splits_off_even_512_bytes():
    device = Allocator(EXPANDABLE)
    assert alloc(device, 20 * MIB - 512).size_bytes == 20 * MIB - 512


def test_each_pool_and_stream_has_an_expandable_segment_of_its_own():
    device = Allocator(EXPANDABLE)
    for stream in (0, 1):
        alloc(device, KIB, stream)
        alloc(device, 2 * MIB, stream)
    assert (len(device._segments), device.reserved_bytes) == (4, 2 * (2 + 20) * MIB)


def test_a_hole_is_taken_before_the_end_that_could_grow():
    device = Allocator(EXPANDABLE)
    hole, _ = alloc(device, 15 * MIB), alloc(device, 15 * MIB)  # then 10 MiB at the end
    device.free(hole)
    assert alloc(device, 5 * MIB).address == hole.address


def test_pages_inside_free_blocks_are_given_back_at_capacity():
    device = allocator(expandable_segments=True, capacity_bytes=80 * MIB)
    low, _, high = alloc(device, 30 * MIB), alloc(device, 20 * MIB), alloc(device, 30 * MIB)
    device.free(low)
    device.free(high)
    alloc(device, 40 * MIB, stream=1)
    # 0-30 and 50-80 are free: the pages 0-20 and 60-80 go.
    assert sizes(device) == [
        [(10 * MIB, "free"), (20 * MIB, "used"), (10 * MIB, "free")],
        [(40 * MIB, "used")],
    ]
    assert (device.reserved_bytes, device.retries) == (80 * MIB, 1)


def test_addresses_given_back_are_mapped_again_lowest_first():
    device = allocator(expandable_segments=True, capacity_bytes=80 * MIB)
    low, _, high = alloc(device, 40 * MIB), alloc(device, 20 * MIB), alloc(device, 20 * MIB)
    device.free(low)
    device.free(high)
    other = alloc(device, 20 * MIB, stream=1)
    assert device.reserved_bytes == 40 * MIB
    assert other.address > high.address
    assert alloc(device, 40 * MIB).address == low.address
    assert device.reserved_bytes == 80 * MIB


def test_an_oversize_stretch_of_an_expandable_segment_goes_by_pages_too():
    device = allocator(expandable_segments=True, max_split_size_bytes=20 * MIB, capacity_bytes=80 * MIB)
    stretch, _ = alloc(device, 60 * MIB), alloc(device, 20 * MIB)
    device.free(stretch)
    assert alloc(device, 40 * MIB).address == stretch.address  # 60 would waste 20 or more: unmapped, then mapped anew
    assert (device.reserved_bytes, device.retries) == (60 * MIB, 1)


def test_a_wholly_free_expandable_segment_vanishes_at_capacity():
    device = allocator(expandable_segments=True, capacity_bytes=40 * MIB)
    device.free(alloc(device, 40 * MIB))
    alloc(device, 40 * MIB, stream=1)
    assert len(device._segments) == 1


def test_with_a_memory_fraction_room_for_a_whole_segment_is_asked_for_even_where_a_page_is_there():
    full = {"expandable_segments": True, "capacity_bytes": 40 * MIB}
    for fraction, fits in ((1.0, True), (0.5, False)):
        device = allocator(**full, per_process_memory_fraction=fraction)
        alloc(device, 15 * MIB)
        assert (device.alloc(25 * MIB) is not None) is fits


# Replaying a trace


def test_an_empty_trace_holds_nothing():
    for how in (DEFAULT, EXPANDABLE, EXACT):
        assert replay(trace_of(), how) == Replay(peak_allocated_bytes=0, peak_reserved_bytes=0)


def test_a_replay_finds_the_peak_and_what_it_consists_of():
    events = (
        take(0, 30 * MIB, "parameters"),
        take(1, 20 * MIB, "activations"),
        take(2, 10 * MIB, "temporaries"),
        give(2),
        take(3, 5 * MIB, "gradients"),
        give(1),
        take(4, 12 * MIB, "temporaries"),
    )
    held = replay(trace_of(*events), DEFAULT)
    assert held.peak_allocated_bytes == 60 * MIB
    assert held.parts == {"parameters": 30 * MIB, "activations": 20 * MIB, "temporaries": 10 * MIB}
    assert held.peak_event is events[2]
    assert held.peak_reserved_bytes == 60 * MIB  # 5 MiB came from the freed 10, 12 MiB from the freed 20


def test_the_first_of_equal_peaks_is_the_one_reported():
    events = (take(0, MIB), give(0), take(1, MIB))
    assert replay(trace_of(*events), DEFAULT).peak_event is events[0]


def test_an_unsplit_rest_belongs_to_the_part_of_its_block():
    held = replay(trace_of(take(0, 11 * MIB, "batch"), take(1, 20 * MIB, "parameters")), DEFAULT)
    assert held.parts == {"batch": 12 * MIB, "parameters": 20 * MIB}


def test_a_part_without_bytes_is_not_among_the_parts():
    held = replay(trace_of(take(0, 0, "buffers"), take(1, 512, "batch"), give(0)), DEFAULT)
    assert held.parts == {"batch": 512}


def test_a_replay_stops_at_the_first_event_that_does_not_fit():
    events = (take(0, 30 * MIB, "parameters"), take(1, 30 * MIB, "activations"), take(2, 512))
    held = replay(trace_of(*events), replace(DEFAULT, capacity_bytes=50 * MIB))
    assert held.out_of_memory_event is events[1]
    assert (held.peak_allocated_bytes, held.parts) == (30 * MIB, {"parameters": 30 * MIB})


def test_near_the_limit_a_replay_gives_the_cache_back_and_fits():
    events = (take(0, 30 * MIB), give(0), take(1, 40 * MIB))
    tight = replay(trace_of(*events), replace(DEFAULT, capacity_bytes=40 * MIB))
    assert tight.out_of_memory_event is None
    assert tight.peak_reserved_bytes == 40 * MIB
    assert replay(trace_of(*events), DEFAULT).peak_reserved_bytes == 70 * MIB


def test_streams_of_a_trace_are_kept_apart():
    events = (Event("alloc", 0, 10 * MIB, stream=0), Event("free", 0, 10 * MIB), Event("alloc", 1, 10 * MIB, stream=3))
    assert replay(trace_of(*events), DEFAULT).peak_reserved_bytes == 20 * MIB


def test_exact_memory_is_neither_rounded_nor_cached():
    events = (take(0, 1000, "parameters"), take(1, 7, "batch"), give(1), take(2, 5, "gradients"))
    held = replay(trace_of(*events), EXACT)
    assert held == Replay(1007, 1007, {"parameters": 1000, "batch": 7}, peak_event=events[1])


def test_exact_memory_has_a_limit_too():
    events = (take(0, 100, "parameters"), take(1, 50), give(1), take(2, 51))
    held = replay(trace_of(*events), replace(EXACT, capacity_bytes=150))
    assert held.out_of_memory_event is events[3]
    assert held.peak_allocated_bytes == 150


# Reading the environment


def read(text: str) -> AllocatorSettings:
    return AllocatorSettings.for_device("cuda", {"PYTORCH_ALLOC_CONF": text})


def test_without_a_variable_the_defaults_hold():
    assert AllocatorSettings.for_device("cuda", {}) == AllocatorSettings()


def test_the_cpu_is_exact_whatever_the_variable_says():
    environ = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert AllocatorSettings.for_device("cpu", environ) == EXACT


def test_every_option_is_read_and_blanks_mean_nothing():
    assert read(
        "large_segment_size_mb:32, max_split_size_mb : 128, max_non_split_rounding_mb:40, expandable_segments:True,"
        "garbage_collection_threshold:0.8, per_process_memory_fraction:0.5, roundup_power2_divisions:8,"
    ) == AllocatorSettings(
        expandable_segments=True,
        roundup_power2_divisions=(8,) * 16,
        max_split_size_bytes=128 * MIB,
        max_non_split_rounding_bytes=40 * MIB,
        garbage_collection_threshold=0.8,
        per_process_memory_fraction=0.5,
        large_segment_size_bytes=32 * MIB,
    )


def test_the_old_variable_wins_over_the_new_one_even_when_empty():
    new = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}
    for old in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        assert (
            AllocatorSettings.for_device("cuda", {**new, old: "max_split_size_mb:64"}).max_split_size_bytes == 64 * MIB
        )
        assert AllocatorSettings.for_device("cuda", {**new, old: ""}) == AllocatorSettings()


def test_keys_that_decide_nothing_here_are_passed_over():
    text = "pinned_use_background_threads:True,some_list:[1:2,3:4],backend:native,max_split_size_mb:64,tomorrow:1"
    assert read(text) == replace(AllocatorSettings(), max_split_size_bytes=64 * MIB)


@pytest.mark.parametrize(
    ("text", "divisions"),
    [
        ("[256:1,512:2,1024:4,>:8]", [1] * 8 + [1, 2, 4] + [8] * 5),
        ("[64:8,256:4]", [8] * 6 + [8, 0, 4] + [0] * 7),  # 128 is not named and gets none
        ("[131072:2,>:4]", [2] * 16),  # the last interval has no end
        ("[>:4]", [0] + [4] * 15),
        ("[]", [0] * 16),
    ],
)
def test_a_list_of_divisions_is_stored_by_power_of_two_mib(text, divisions):
    assert list(read(f"roundup_power2_divisions:{text}").roundup_power2_divisions) == divisions


def test_a_number_ends_where_its_digits_end():
    assert read("max_split_size_mb:128MB").max_split_size_bytes == 128 * MIB
    assert read("garbage_collection_threshold:8e-1,").garbage_collection_threshold == 0.8


def test_minus_one_is_as_large_as_a_number_gets():
    device = Allocator(read("max_split_size_mb:-1"))
    device.free(alloc(device, 400 * MIB))
    alloc(device, 100 * MIB)
    assert device.reserved_bytes == 400 * MIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_split_size_mb:19", "expected a whole number of MiB, at least 20"),
        ("large_segment_size_mb:40,max_split_size_mb:30", "expected a whole number of MiB, at least 40"),
        ("max_non_split_rounding_mb:10", "expected a whole number of MiB, at least 20"),
        ("large_segment_size_mb:10", "expected a whole number of MiB, at least 11"),
        ("max_split_size_mb:many", "sets max_split_size_mb:many; expected a whole number of MiB"),
        ("expandable_segments:true", "sets expandable_segments:true; expected True or False"),
        ("garbage_collection_threshold:1.0", "expected a number between 0 and 1"),
        ("garbage_collection_threshold:high", "expected a number between 0 and 1"),
        ("per_process_memory_fraction:1.5", "expected a number from 0 to 1"),
        ("roundup_power2_divisions:3", "expected powers of two"),
        ("roundup_power2_divisions:0", "expected powers of two"),
        ("roundup_power2_divisions:[300:1]", "expected powers of two"),
        ("roundup_power2_divisions:[256]", "expected powers of two"),
        ("backend:cudaMallocAsync", "cannot be replayed"),
        ("backend:mine", "expected native or cudaMallocAsync"),
        ("max_split_size_mb=128", "expected key:value"),
        ("max_split_size_mb:", "expected key:value"),
        ("roundup_power2_divisions:[256:1", "expected key:value"),
        ("expandable_segments:True,,", "but found ','"),
    ],
)
def test_what_pytorch_would_refuse_is_refused_with_what_was_expected(text, expected):
    with pytest.raises(MemGuardError, match=r"^PYTORCH_ALLOC_CONF ") as refusal:
        read(text)
    assert expected in str(refusal.value)


# Any trace, any settings


def request_sizes() -> st.SearchStrategy[int]:
    edges = (0, 1, 512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB, 40 * MIB)
    return st.sampled_from(edges) | st.integers(0, 4 * KIB) | st.integers(0, 3 * MIB) | st.integers(0, 60 * MIB)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Blocks of all sizes on two streams, freed in any order; some are never freed."""
    live: list[Event] = []
    events: list[Event] = []
    parts = st.sampled_from(("parameters", "activations", "temporaries"))
    for block in range(draw(st.integers(0, 40))):
        for _ in range(draw(st.integers(0, min(len(live), 3)))):
            taken = live.pop(draw(st.integers(0, len(live) - 1)))
            events.append(taken._replace(action="free"))
        taken = Event("alloc", block, draw(request_sizes()), draw(parts), stream=draw(st.sampled_from((0, 0, 5))))
        live.append(taken)
        events.append(taken)
    return trace_of(*events)


def caching_settings() -> st.SearchStrategy[AllocatorSettings]:
    return st.builds(
        AllocatorSettings,
        capacity_bytes=st.none() | st.integers(0, 400 * MIB),
        expandable_segments=st.booleans(),
        roundup_power2_divisions=st.sampled_from(((0,) * 16, (4,) * 16, (1, 2, 4, 8) * 4)),
        max_split_size_bytes=st.sampled_from((None, 32 * MIB, 50 * MIB)),
        max_non_split_rounding_bytes=st.sampled_from((None, 50 * MIB)),
        garbage_collection_threshold=st.sampled_from((0.0, 0.3, 0.8)),
        per_process_memory_fraction=st.sampled_from((1.0, 0.9)),
        large_segment_size_bytes=st.sampled_from((20 * MIB, 12 * MIB, 32 * MIB)),
        segments_descend=st.booleans(),
    )


def assert_well_formed(device: Allocator) -> None:
    """Segments lie apart, their blocks end to end; no two free blocks touch; the totals are what the blocks say."""
    segments = device.segments()
    for segment in segments:
        assert segment.blocks[0].address == segment.address
        for low, high in pairwise(segment.blocks):
            assert low.address + low.size_bytes == high.address
            assert low.allocated or high.allocated, "free neighbours were not joined"
    for before, after in pairwise(segments):
        assert before.address + before.total_bytes <= after.address
    blocks = [block for segment in segments for block in segment.blocks]
    assert device.reserved_bytes == sum(block.size_bytes for block in blocks)
    assert device.allocated_bytes == sum(block.size_bytes for block in blocks if block.allocated)
    assert all(block.requested_bytes <= block.size_bytes and block.size_bytes % 512 == 0 for block in blocks)
    pools = [*device._small_pools.values(), *device._large_pools.values()]
    cached = [entry for pool in pools for entry in pool.cached]
    assert sorted(entry[1] for entry in cached) == [block.address for block in blocks if not block.allocated]
    assert all(entry[:2] == (entry[2].size_bytes, entry[2].address) for entry in cached)
    assert all(pool.cached == sorted(pool.cached, key=lambda entry: entry[:2]) for pool in pools)


@given(traces(), caching_settings())
def test_segments_stay_tiled_joined_and_within_capacity(trace, how):
    device = Allocator(how)
    blocks: dict[int, Block] = {}
    for event in trace:
        if event.action == "free":
            if event.block in blocks:  # else it did not fit
                device.free(blocks.pop(event.block))
        elif (block := device.alloc(event.nbytes, event.stream)) is not None:
            blocks[event.block] = block
        assert_well_formed(device)
        assert device.allocated_bytes <= device.reserved_bytes <= device.peak_reserved_bytes
        assert how.capacity_bytes is None or device.peak_reserved_bytes <= how.capacity_bytes
    for block in blocks.values():
        device.free(block)
    assert device.allocated_bytes == 0
    assert_well_formed(device)


@given(traces(), caching_settings() | st.builds(AllocatorSettings, kind=st.just("exact")))
def test_parts_sum_to_the_peak_and_the_peak_is_reserved(trace, how):
    held = replay(trace, how)
    assert sum(held.parts.values()) == held.peak_allocated_bytes <= held.peak_reserved_bytes
    assert (held.peak_event is None) == (held.peak_allocated_bytes == 0)
    if how.capacity_bytes is not None:
        assert held.peak_reserved_bytes <= how.capacity_bytes
    else:
        assert held.out_of_memory_event is None


@given(traces())
def test_the_exact_peak_is_the_plain_sum_of_live_bytes(trace):
    live: dict[int, int] = {}
    peak = 0
    for event in trace:
        if event.action == "alloc":
            live[event.block] = event.nbytes
        else:
            del live[event.block]
        peak = max(peak, sum(live.values()))
    held = replay(trace, EXACT)
    assert (held.peak_allocated_bytes, held.peak_reserved_bytes) == (peak, peak)


@given(traces(), st.sampled_from((DEFAULT, EXPANDABLE)))
def test_any_capacity_from_the_unlimited_peak_on_changes_nothing(trace, how):
    free = replay(trace, how)
    assert replay(trace, replace(how, capacity_bytes=free.peak_reserved_bytes)) == free


class NaiveAllocator:
    """The default rules once more with nothing clever: free stretches of (size, address), looked at one by one."""

    def __init__(self) -> None:
        self.scratch_spans: dict[tuple[bool, int], list[tuple[int, int]]] = {}
        self.ends_at: list[int] = []  # where segments end: stretches do not join across
        self.reserved = 0

    def alloc(self, nbytes: int, stream: int) -> tuple[tuple[bool, int], int, int]:
        size = (nbytes + 511) // 512 * 512
        small = size <= MIB
        free = self.scratch_spans.setdefault((small, stream), [])
        fitting = [stretch for stretch in free if stretch[0] >= size]
        if not fitting:
            segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            fitting = [(segment, self.reserved)]
            free += fitting
            self.reserved += segment
            self.ends_at.append(self.reserved)
        length, start = min(fitting)
        free.remove((length, start))
        rest = length - size
        if rest > (0 if small else MIB):
            free.append((rest, start + size))
            length = size
        return (small, stream), start, length

    def free(self, kind: tuple[bool, int], start: int, length: int) -> None:
        free = self.scratch_spans[kind]
        for size, address in list(free):
            if address + size == start and start not in self.ends_at:
                free.remove((size, address))
                start, length = address, length + size
            elif start + length == address and address not in self.ends_at:
                free.remove((size, address))
                length += size
        insort(free, (length, start))


@given(traces())
def test_every_block_lies_where_a_naive_allocator_puts_it(trace):
    device, naive = Allocator(DEFAULT), NaiveAllocator()
    first_address = device._addresses.take(0)
    blocks = {}
    for event in trace:
        if event.nbytes == 0:
            continue
        if event.action == "free":
            ours, theirs = blocks.pop(event.block)
            device.free(ours)
            naive.free(*theirs)
        else:
            ours, theirs = alloc(device, event.nbytes, event.stream), naive.alloc(event.nbytes, event.stream)
            blocks[event.block] = ours, theirs
            _, start, length = theirs
            assert (ours.address, ours.size_bytes) == (first_address + start, length)
        assert device.reserved_bytes == naive.reserved
