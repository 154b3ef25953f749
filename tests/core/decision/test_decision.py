"""The largest batch size that fits, and the sentence that says why it is that one."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_memguard.core.decision.decision import (
    Budget,
    Decision,
    Limits,
    Request,
    decide,
    largest_that,
    largest_within,
)
from lightning_memguard.core.replay.epoch import Epoch, EpochRun
from lightning_memguard.core.replay.footprint import Footprint, Peak
from lightning_memguard.core.trace.trace import OPTIONAL_PARTS, PARTS
from lightning_memguard.errors import DoesNotFitError, MemGuardError
from lightning_memguard.units import GIB
from tests import tape


def footprints(peak_bytes: Callable[[int], int]) -> Callable[[int], Footprint]:
    """Footprints on a device; the allocator's own peaks are smaller, so that a test sees which one is compared."""

    def footprint_at(n: int) -> Footprint:
        peak = peak_bytes(n)
        return Footprint(n, "cuda", peak // 2, peak // 2, peak, {"activations": peak // 2})

    return footprint_at


ONE_BYTE_EACH = footprints(lambda n: n)


def budget_of(usable_bytes: int) -> Budget:
    """A tenth as much again is kept free, so that a test sees which number a peak is compared with."""
    margin = usable_bytes // 10
    return Budget(10 * usable_bytes, usable_bytes + margin, margin, "nvml", "cuda:0")


def chosen(usable_bytes: int, peak: Callable[[int], Footprint] = ONE_BYTE_EACH, **request: object) -> Decision:
    return decide(peak, budget_of(usable_bytes), Request(**{"batch_size": 8, **request}))


# The largest that fits


@pytest.mark.parametrize("usable", [1, 2, 3, 7, 8, 9, 100, 1023, 1024, 1025])
def test_at_a_byte_a_sample_it_is_the_number_of_usable_bytes(usable):
    assert chosen(usable).batch_size == usable


def test_the_margin_stays_free():
    budget = Budget(total_bytes=1000, free_bytes=100, margin_bytes=5, source="given")
    assert budget.usable_bytes == 95
    assert decide(ONE_BYTE_EACH, budget, Request(8)).batch_size == 95


def test_a_flat_stretch_before_the_steep_one_misleads_nobody():
    """Optimizer state alone makes the peak up to 50 samples; a line through the first sizes would promise any size."""
    kinked = footprints(lambda n: max(1000, 20 * n))
    assert chosen(1300, kinked).batch_size == 65


@pytest.mark.parametrize("name", ["mlp", "masked", "cnn_gpu", "lstm_gpu", "gpt_gpu"])
def test_of_a_real_step_what_is_chosen_fits_at_most_and_one_more_sample_does_not(name):
    """Also where it has a range, and kernels that change their ways between the sizes."""
    known = tape.read(name)
    at_300 = known.footprint_at(300)
    assert at_300.lowest.device_bytes <= at_300.peak_device_bytes <= at_300.highest.device_bytes
    size = chosen(at_300.most_device_bytes, known.footprint_at).batch_size
    assert size >= 300
    assert known.footprint_at(size).most_device_bytes <= at_300.most_device_bytes
    assert known.footprint_at(size + 1).most_device_bytes > at_300.most_device_bytes


def test_a_decision_carries_the_footprint_at_its_size_and_the_budget():
    decision = chosen(100)
    assert decision.footprint == ONE_BYTE_EACH(100)
    assert decision.budget == budget_of(100)
    assert decision.fits


def test_few_sizes_are_looked_at_even_of_a_million():
    """Doubling up and halving down: 20 sizes or so each way."""
    asked = []

    def footprint_at(n: int) -> Footprint:
        asked.append(n)
        return ONE_BYTE_EACH(n)

    assert chosen(700_001, footprint_at).batch_size == 700_001
    assert len(asked) < 50


def test_min_max_and_multiples_bound_the_choice():
    assert chosen(100, max_batch_size=30).batch_size == 30
    assert chosen(100, multiple_of=8).batch_size == 96
    assert chosen(100, multiple_of=8, max_batch_size=30).batch_size == 24
    assert (
        chosen(100, multiple_of=8, min_batch_size=97, max_batch_size=200, peak=footprints(lambda _: 1)).batch_size
        == 200
    )


def test_the_smallest_size_allowed_is_rounded_up_to_a_multiple():
    with pytest.raises(DoesNotFitError, match=r"^Batch size 24 needs"):
        chosen(23, min_batch_size=17, multiple_of=8)


def test_no_batch_is_larger_than_the_dataset():
    assert chosen(100, dataset_size=60).batch_size == 60
    assert chosen(100, dataset_size=60, multiple_of=32).batch_size == 32


@given(
    lines=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 40)), min_size=1, max_size=3),
    usable=st.integers(1, 2000),
    least=st.integers(1, 40),
    most=st.none() | st.integers(1, 120),
    multiple=st.sampled_from((1, 1, 2, 3, 8)),
    dataset=st.integers(1, 120),
)
def test_it_is_what_trying_every_size_would_find(lines, usable, least, most, multiple, dataset):
    """Any peak that grows and has kinks; any bounds that leave a size."""
    peak = footprints(lambda n: max(fixed + each * n for fixed, each in lines))
    highest = min(dataset, most or dataset)
    allowed = [n for n in range(least, highest + 1) if n % multiple == 0]
    assume(allowed)
    fitting = [n for n in allowed if peak(n).peak_device_bytes <= usable]
    request = {"min_batch_size": least, "max_batch_size": most, "multiple_of": multiple, "dataset_size": dataset}
    if not fitting:
        with pytest.raises(DoesNotFitError):
            chosen(usable, peak, **request)
        return
    decision = chosen(usable, peak, **request)
    assert decision.batch_size == max(fitting)
    assert (decision.limited_by == "memory") == (max(fitting) < max(allowed))


# What set it


def test_memory_is_the_limit_where_one_more_would_not_fit():
    assert chosen(100).limited_by == "memory"


def test_the_dataset_is_the_limit_where_memory_would_allow_more():
    assert chosen(100, dataset_size=60).limited_by == "dataset"


def test_max_batch_size_is_the_limit_where_memory_and_data_would_allow_more():
    assert chosen(100, max_batch_size=30, dataset_size=60).limited_by == "max_batch_size"


def test_the_effective_batch_size_is_the_limit_where_one_batch_makes_it():
    assert chosen(100, keep_effective_batch_size=64).limited_by == "request"


def test_memory_is_the_limit_where_both_bounds_meet_at_the_next_multiple():
    assert chosen(100, multiple_of=8, max_batch_size=104).limited_by == "memory"
    assert chosen(100, multiple_of=8, max_batch_size=103).limited_by == "max_batch_size"


@pytest.mark.parametrize(("asked", "outcome"), [(100, "kept"), (8, "tuned"), (200, "tuned")])
def test_a_choice_that_equals_the_request_is_kept_and_any_other_tuned(asked, outcome):
    decision = chosen(100, batch_size=asked)
    assert (decision.outcome, decision.requested_batch_size, decision.batch_size) == (outcome, asked, 100)


@pytest.mark.parametrize(("usable", "fits"), [(8, True), (7, False)])
def test_a_size_that_is_not_ours_to_choose_is_predicted_and_left(usable, fits):
    decision = chosen(usable, batch_size=8, free_to_choose=False, max_batch_size=2, accumulate_grad_batches=3)
    assert (decision.batch_size, decision.accumulate_grad_batches) == (8, 3)
    assert (decision.outcome, decision.limited_by) == ("checked", "request")
    assert decision.fits is fits


def test_an_epoch_that_fails_does_not_fit_and_what_makes_it_fit_is_named():
    run = EpochRun("", "", 9, 101, 1, 0, 0, 9)
    epoch = Epoch(1, 9, run, (replace(run, change="with a", how="set a", failed_at=None),))
    found = chosen(100, lambda n: ONE_BYTE_EACH(n).over(epoch), free_to_choose=False)
    assert found.verdict == "does not fit"
    assert "does NOT fit: over an epoch of lengths 1..9 step 9 runs out of memory" in found.reason
    assert "To make it fit, set a." in found.reason


def test_what_was_not_predicted_does_not_count_as_fitting():
    assert not Decision(8, 8, 1, "stepped aside", None, budget_of(100), "request").fits
    assert not Decision(8, 8, 1, "stepped aside", ONE_BYTE_EACH(8), None, "request").fits


# The effective batch size


def test_without_one_accumulation_is_left_as_it_is():
    assert chosen(100, accumulate_grad_batches=3).accumulate_grad_batches == 3


@pytest.mark.parametrize(
    ("usable", "ranks", "effective", "size", "accumulate"),
    [
        (100, 1, 64, 64, 1),  # it fits as one batch
        (16, 1, 64, 16, 4),  # four of the largest make it
        (16, 2, 64, 16, 2),  # two on each of two ranks
        (33, 1, 64, 32, 2),  # one sample less than the largest makes it exactly
        (23, 1, 67, 22, 3),  # nothing makes 67; 66 is the nearest
        (100, 3, 64, 21, 1),  # 21 on each of three ranks are 63
    ],
)
def test_size_times_accumulation_times_ranks_comes_near_it(usable, ranks, effective, size, accumulate):
    decision = chosen(usable, keep_effective_batch_size=effective, ranks=ranks)
    assert (decision.batch_size, decision.accumulate_grad_batches) == (size, accumulate)


def test_it_comes_as_near_as_any_size_that_fits_can():
    """60 fit at once; two batches of 50 make the 100 that were asked for, one of 60 only 60."""
    decision = chosen(60, keep_effective_batch_size=100)
    assert decision.batch_size * decision.accumulate_grad_batches == 100


@given(
    usable=st.integers(1, 300),
    effective=st.integers(1, 300),
    ranks=st.integers(1, 4),
    multiple=st.sampled_from((1, 2, 8)),
)
def test_the_product_never_passes_the_effective_size_and_falls_short_by_less_than_half(
    usable, effective, ranks, multiple
):
    assume(usable >= multiple and effective >= multiple * ranks)
    decision = chosen(usable, keep_effective_batch_size=effective, ranks=ranks, multiple_of=multiple)
    product = decision.batch_size * decision.accumulate_grad_batches * ranks
    assert effective / 2 < product <= effective
    assert decision.batch_size % multiple == 0
    assert decision.fits


@given(usable=st.integers(1, 300), times=st.integers(1, 20))
def test_a_multiple_of_the_largest_size_is_made_of_batches_of_that_size(usable, times):
    decision = chosen(usable, keep_effective_batch_size=times * usable)
    assert (decision.batch_size, decision.accumulate_grad_batches) == (usable, times)


# Nothing fits


def test_the_error_says_what_was_asked_what_was_found_and_what_to_try():
    parts = {"parameters": 8 * GIB, "optimizer_state": 24 * GIB, "activations": GIB}
    needs = Footprint(1, "cuda", 33 * GIB, 40 * GIB, 41 * GIB, parts)
    budget = Budget(24 * GIB, 20 * GIB, 1 * GIB, "nvml", "cuda:0")
    with pytest.raises(DoesNotFitError) as error:
        decide(lambda n: needs, budget, Request(batch_size=64))
    assert str(error.value) == (
        "Batch size 1 needs 41.0 GiB; cuda:0 offers 19.0 GiB after a 5% margin (20.0 GiB free, source: "
        "nvml), short by 22.0 GiB. "
        "The largest part is optimizer state, 24.0 GiB. Use an optimizer with less state (SGD, Adafactor), "
        "shard it across devices, or use a device with more memory."
    )


def test_a_smaller_min_batch_size_is_advised_where_one_was_set():
    with pytest.raises(DoesNotFitError, match=r", or lower `min_batch_size`\.$"):
        chosen(10, min_batch_size=16)


def test_the_error_carries_its_numbers_through_a_pickle_as_ranks_pass_it_on():
    with pytest.raises(DoesNotFitError) as caught:
        chosen(10, min_batch_size=16)
    error = pickle.loads(pickle.dumps(caught.value.on_rank(1)))
    assert (error.needed_bytes, error.usable_bytes, error.largest_part) == (16, 10, "activations")
    assert str(error) == f"rank 1: {caught.value}"


@pytest.mark.parametrize("part", [*PARTS, *OPTIONAL_PARTS])
def test_each_part_that_may_be_the_largest_has_a_rule_of_thumb(part):
    with pytest.raises(DoesNotFitError, match=f"The largest part is {part.replace('_', ' ')}, 5 B") as caught:
        decide(lambda n: Footprint(n, "cuda", 9, 9, 9, {"activations": 4, part: 5}), budget_of(3), Request(8))
    assert len(caught.value.rule_of_thumb) > 15
    assert f" {caught.value.rule_of_thumb}, or free memory held by other processes." in str(caught.value)


def test_advice_takes_the_place_of_the_rule_of_thumb():
    with pytest.raises(DoesNotFitError) as caught:
        chosen(10, min_batch_size=16)
    assert "Use bf16-mixed precision" in str(caught.value)
    advised = caught.value.with_advice(("some advice",), "What would fit:\n  - this")
    assert "bf16-mixed" not in str(advised)
    assert str(advised).endswith(
        "You can free memory held by other processes, or lower `min_batch_size`.\nWhat would fit:\n  - this"
    )
    assert str(DoesNotFitError("too large")) == "too large"


def test_it_can_be_caught_as_any_error_of_ours():
    with pytest.raises(MemGuardError):
        chosen(10, min_batch_size=16)


# Settings


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"margin": 0},
        {"margin": 0.999},
        {"min_batch_size": 8, "max_batch_size": 8},
        {"min_batch_size": 5, "multiple_of": 8, "max_batch_size": 8},
        {"keep_effective_batch_size": 1},
    ],
)
def test_settings_at_the_edge_of_their_range_are_taken(settings):
    assert Limits(**settings)


@pytest.mark.parametrize("margin", [-0.01, 1, 1.5, float("nan"), "0.05", None])
def test_a_margin_is_a_share(margin):
    expected = f"margin={margin!r} is outside [0, 1); it is the share of the budget to keep free, such as 0.05."
    with pytest.raises(MemGuardError, match=f"^{re.escape(expected)}$"):
        Limits(margin=margin)


@pytest.mark.parametrize("name", ["min_batch_size", "max_batch_size", "multiple_of", "keep_effective_batch_size"])
@pytest.mark.parametrize("value", [0, -8, 8.0, "8", True])
def test_a_count_is_an_int_of_one_or_more_and_is_named_as_it_was_typed(name, value):
    with pytest.raises(
        MemGuardError, match=f"^{re.escape(f'{name}={value!r} is not a count; pass an int of 1 or more.')}$"
    ):
        Limits(**{name: value})


def test_bounds_that_leave_no_size_are_refused_at_once():
    expected = "multiple_of=8 has no multiple from min_batch_size=5 to max_batch_size=7."
    with pytest.raises(MemGuardError, match=f"^No batch size is left to choose: {re.escape(expected)}$"):
        Limits(min_batch_size=5, multiple_of=8, max_batch_size=7)


@pytest.mark.parametrize(
    ("need", "source", "advice"),
    [
        (10, "nvml", "lower `margin`"),
        (15, "nvml", "free memory held by other processes"),
        (40, "nvml", "use a device with more memory"),
        (15, "given", "raise `budget`"),
    ],
)
def test_the_advice_is_one_that_helps(need, source, advice):
    """The device has 24 bytes, 10 of them free and 2 of those kept by the margin."""
    needs = Footprint(1, "cuda", need, need, need, {"activations": need})
    with pytest.raises(DoesNotFitError, match=advice):
        decide(lambda n: needs, Budget(24, 10, 2, source, "cuda:0"), Request(batch_size=64))


def test_a_size_taken_for_the_effective_size_is_not_called_the_largest_that_fits():
    """60 fit; 50 twice make exactly the 100 asked for."""
    fitting = Footprint(60, "cpu", 1, 1, 1, {"activations": 1})
    decision = decide(
        lambda n: fitting if n <= 60 else Footprint(n, "cpu", 9, 9, 9, {"activations": 9}),
        Budget(4, 4, 0, "given"),
        Request(batch_size=8, keep_effective_batch_size=100),
    )
    assert (decision.batch_size, decision.accumulate_grad_batches, decision.limited_by) == (50, 2, "request")


# The search behind it


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 63, 64, 99, 100, 1000])
def test_it_finds_the_largest_number_that_holds(limit):
    assert largest_that(lambda number: number <= limit, 1, 100) == min(limit, 100)


@pytest.mark.parametrize("first", [0, 8, 48, 56, 96, 104])
def test_a_search_by_bytes_ends_at_the_same_size_wherever_it_begins(first: int) -> None:
    tried = list[int]()
    found = largest_within(8, 96, 8, lambda size: tried.append(size) or size * size, 2500, first)
    assert found == 48
    assert all(size % 8 == 0 and 8 <= size <= 96 for size in tried)


def test_it_tries_the_largest_first_and_few_others():
    """A thousand numbers take one try where all hold, and at most ten more where some do not."""
    tried: list[int] = []
    assert largest_that(lambda number: not tried.append(number), 1, 1000) == 1000
    assert tried == [1000]
    tried.clear()
    assert largest_that(lambda number: not tried.append(number) and number <= 300, 1, 1000) == 300
    assert len(tried) <= 11


def test_the_number_believed_good_is_not_tried():
    assert largest_that(lambda number: False, 5, 9) == 5


# A survey that a deadline cut short


def cut(n: int) -> Footprint:
    """Captured up to 8 samples, a byte each; beyond, as much as if all of it grew with the square."""
    found = ONE_BYTE_EACH(n)
    return found if n <= 8 else found.doubted("unchecked", found.peak.plus(n * n // 8 - n))


def test_a_deadline_shrinks_no_batch() -> None:
    decision = chosen(100, cut, batch_size=64)
    assert (decision.batch_size, decision.outcome, decision.limited_by) == (64, "kept", "request")
    assert (decision.verdict, decision.fits) == ("unknown", False)
    assert decision.reason == (
        "batch size 64 is unchanged, and whether it fits is unknown: time was up (max_setup_seconds) before captures "
        "could tell. It takes 64 of 100 B usable, or up to 512 B."
    )


def test_what_even_the_least_disproves_is_shrunk_after_a_deadline_too() -> None:
    assert chosen(100, cut, batch_size=200).batch_size == 28, "28 x 28 / 8 = 98"


def test_after_a_deadline_a_batch_grows_as_far_as_the_most_fits() -> None:
    assert chosen(100, cut, batch_size=16).batch_size == 28


def test_a_batch_that_the_user_limits_is_not_kept_beyond_the_limit() -> None:
    assert chosen(100, cut, batch_size=64, max_batch_size=32).batch_size == 28


def test_where_not_even_the_smallest_fits_for_sure_a_deadline_keeps_what_was_asked_for() -> None:
    def nothing_captured(n: int) -> Footprint:
        return ONE_BYTE_EACH(n).doubted("one draw", Peak(1000, 1000, 1000))

    assert chosen(100, nothing_captured, batch_size=64).batch_size == 64
    with pytest.raises(DoesNotFitError):
        chosen(100, footprints(lambda n: n + 1000), batch_size=64)
