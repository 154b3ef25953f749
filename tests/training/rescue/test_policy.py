"""How large parts are, and when a batch is tried as a whole again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_memguard.training.rescue.policy import Policy, Rescue, Samples

SIZE = 8
BATCH, SMALLER = torch.zeros(SIZE, 4), torch.zeros(SIZE - 1, 4)
FAILED = Samples(SIZE, SIZE * 16)


def failed_once(**settings: Any) -> Policy:
    """A policy after one batch that failed and was done in two parts."""
    policy = Policy(**settings)
    policy.failed(0)
    policy.rescued(0, FAILED, policy.most_samples(FAILED), ())
    return policy


def steps_in_parts(policy: Policy) -> int:
    """How many batches go in parts until one is tried as a whole."""
    return next(step for step in range(1000) if not policy.at_once(BATCH))


def test_batches_are_whole_until_one_fails() -> None:
    assert Policy().at_once(BATCH) == 0


def test_a_batch_that_fails_is_halved() -> None:
    assert Policy().most_samples(FAILED) == 4
    assert Policy().most_samples(Samples(7, 112)) == 4


def test_a_part_that_fails_is_halved_and_later_batches_start_there() -> None:
    policy = Policy()
    policy.most_samples(FAILED)
    assert policy.smaller(Samples(4, 64)) == 2
    policy.rescued(0, FAILED, 2, ())
    assert policy.most_samples(FAILED) == 2


@pytest.mark.parametrize(("fitting", "at_once"), [(3, 3), (6, 4), (0, 1), (None, 4)])
def test_the_first_parts_are_as_large_as_predicted_to_fit_and_a_half_at_most(fitting: int | None, at_once: int) -> None:
    assert Policy(fitting=lambda _: fitting).most_samples(FAILED) == at_once


def test_after_a_failure_sixteen_batches_go_in_parts_and_the_next_is_tried_whole() -> None:
    policy = failed_once()
    assert policy.at_once(BATCH) == 4
    assert steps_in_parts(policy) == 15


def test_where_it_fails_again_it_takes_four_times_as_long_until_the_next_trial() -> None:
    policy = failed_once()
    steps_in_parts(policy)
    policy.most_samples(FAILED)
    assert steps_in_parts(policy) == 64


def test_where_it_fits_again_batches_are_whole_from_then_on() -> None:
    policy = failed_once()
    steps_in_parts(policy)
    policy.ran_whole(BATCH)
    assert [policy.at_once(BATCH) for _ in range(3)] == [0, 0, 0]
    policy.most_samples(FAILED)
    assert steps_in_parts(policy) == 16


def test_smaller_batches_are_whole_all_the_while() -> None:
    policy = failed_once()
    assert policy.at_once(SMALLER) == 0
    policy.ran_whole(SMALLER)
    assert policy.at_once(BATCH) == 4


def test_larger_batches_go_in_parts_of_the_bytes_that_fit() -> None:
    policy = failed_once()
    assert policy.at_once(torch.zeros(SIZE, 8)) == 2


def test_a_batch_that_is_not_predicted_to_fit_now_is_not_tried() -> None:
    asked: list[int] = []

    def fits_now(nbytes: int) -> bool:
        asked.append(nbytes)
        return len(asked) == 2

    policy = failed_once(fits_now=fits_now)
    assert steps_in_parts(policy) == 16 + 1 + 16
    assert asked == [128, 128]


def test_a_batch_announced_as_too_large_goes_in_parts_of_the_share_that_fits() -> None:
    policy = Policy()
    assert policy.expect(BATCH, 0.3) == 2
    assert policy.at_once(BATCH) == 2
    assert policy.at_once(SMALLER) == 0


@pytest.mark.parametrize(("batch", "share"), [(BATCH, 0.0), (BATCH, -1.0), (BATCH[:1], 0.5)])
def test_where_no_share_or_a_single_sample_fits_nothing_is_expected(batch: torch.Tensor, share: float) -> None:
    policy = Policy()
    assert policy.expect(batch, share) == 0
    assert policy.at_once(batch) == 0


def test_steps_are_counted_by_epoch_and_said() -> None:
    said: list[Rescue] = []
    policy = failed_once(notify=said.append)
    policy.failed(3)
    assert (policy.failures, policy.steps) == ({0, 3}, {0})
    assert said == [Rescue(SIZE, 4, ())]
    policy.restart()
    assert (policy.failures, policy.steps) == (set(), set())
    assert policy.at_once(BATCH) == 4
