"""What a step takes and what there is decide how many bytes of its activations stay."""

from __future__ import annotations

import pytest

from lightning_memguard.training.offload.policy import Demand, Room, kept_bytes

ROOM = Room(free_bytes=100, usable_bytes=95)


def test_a_step_that_fits_at_most_keeps_everything() -> None:
    assert kept_bytes(Demand(80, 95), ROOM, None) is None


def test_a_step_that_likely_fits_keeps_what_it_is_likely_to_save() -> None:
    """90, of which 40 are saved: were the prediction right, all of them could stay."""
    demand = Demand(90, 120)
    assert kept_bytes(demand, ROOM, (50, 60)) == 100 - 50
    assert not demand.must_move(ROOM)


def test_a_step_that_does_not_fit_keeps_what_the_margin_leaves() -> None:
    demand = Demand(150, 160)
    assert kept_bytes(demand, ROOM, (40, 50)) == 95 - 50
    assert demand.must_move(ROOM)


@pytest.mark.parametrize("rest", [None, (95, 95), (200, 300)])
def test_nothing_stays_if_there_is_no_room_or_it_is_not_known(rest: tuple[int, int] | None) -> None:
    assert kept_bytes(Demand(150, 160), ROOM, rest) == 0


def test_what_was_measured_needs_no_margin() -> None:
    assert kept_bytes(Demand(90, 99, measured=True), ROOM, None) is None
    assert kept_bytes(Demand(90, 101, measured=True), ROOM, (10, 10)) == 90


def test_only_what_depends_on_the_batch_grows_with_it() -> None:
    """20 of 80 are weights: a batch of twice the size takes 20 + 2 x 60, half of one 20 + 30."""
    assert Demand(80, 80, 20, 2.0).scaled(80) == 140
    assert kept_bytes(Demand(80, 80, 20, 2.0), ROOM, (30, 30)) == 95 - (20 + 2 * 10)
    assert kept_bytes(Demand(150, 150, 20, 0.5), ROOM, None) is None
