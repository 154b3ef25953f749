"""Where new segments lie, as recorded histories have them."""

from itertools import pairwise

from lightning_memguard.core.replay.addresses import AscendingAddresses, DescendingAddresses
from lightning_memguard.units import MIB


def steps(*sizes: int) -> list[int]:
    """The MiB between the addresses of segments of these MiB."""
    addresses = DescendingAddresses()
    taken = [addresses.take(size * MIB) // MIB for size in sizes]
    return [after - before for before, after in pairwise(taken)]


def test_large_segments_descend_by_whole_regions() -> None:
    # an H100, a step's weights at 512 tokens: 128 MiB descend by 128, 80 by 96, 20 by 32
    assert steps(128, 128, 128, 80, 80, 20, 20, 128) == [-128, -128, -96, -96, -32, -32, -128]


def test_small_segments_fill_the_newest_region_that_has_room() -> None:
    # the same GPU at 256 tokens: 10 MiB go behind the newest of 40, 20 behind the one before, 10 behind the first 10
    assert steps(40, 40, 40, 10, 20, 10) == [-64, -64, 40, 64, -54]
    # another one: 2 MiB go behind 314, as many as there is room for, and then behind 158
    assert steps(158, 158, 314, 2, 2, 2, 2) == [-160, -320, 314, 2, 2, 160]


def test_addresses_of_a_region_that_is_free_as_a_whole_are_used_again() -> None:
    addresses = DescendingAddresses()
    high, low = addresses.take(64 * MIB), addresses.take(64 * MIB)
    small = addresses.take(2 * MIB)
    addresses.give_back(high, 64 * MIB)
    assert addresses.take(64 * MIB) == high
    addresses.give_back(low, 64 * MIB)
    addresses.give_back(high, 64 * MIB)
    assert addresses.take(128 * MIB) == low
    assert small < low


def test_a_segment_taken_over_is_not_given_out_again() -> None:
    addresses = DescendingAddresses()
    start = 1 << 45
    for place, size in ((0, 20), (20, 2), (22, 42), (96, 30)):  # the third lies across two regions
        addresses.hold(start + place * MIB, size * MIB)
    assert [(addresses.take(2 * MIB) - start) // MIB for _ in range(3)] == [126, -32, -30]


def test_on_windows_segments_ascend() -> None:
    addresses = AscendingAddresses()
    assert addresses.take(20 * MIB) < addresses.take(30 * MIB) < addresses.take(2 * MIB)
