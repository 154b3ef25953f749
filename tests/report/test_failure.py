"""Words during a run about a batch that is larger than predicted, and of a step that ran out of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_memguard.core.decision.decision import Budget
from lightning_memguard.core.decision.record import Measured
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.trace.kept import Kept
from lightning_memguard.report.failure import (
    Failure,
    Larger,
    Outside,
    announcement,
    note,
    overrun_words,
    steps_explain,
)
from lightning_memguard.units import GIB, MIB

FOOTPRINT = Footprint(8, "cpu", 4 * GIB, 4 * GIB, 4 * GIB, {"activations": 4 * GIB}, "forward", notes=("a guess",))
STATES = replace(FOOTPRINT, method="states", notes=("the step could not run on a copy",))
BUDGET = Budget(8 * GIB, 8 * GIB, 0, "host", "CPU")
LARGER = Larger(((8, 20),), ((8, 10),), FOOTPRINT, BUDGET)
TOO_LITTLE = replace(BUDGET, free_bytes=2 * GIB)
FAILURE = Failure(FOOTPRINT, Measured(6 * GIB, "rss"), TOO_LITTLE, None, ((8, 10),), ((8, 10),), 4)


@pytest.mark.parametrize(
    ("footprint", "budget", "need", "end"),
    [
        (FOOTPRINT, BUDGET, "to need 4.0 GiB;", "It fits."),
        (FOOTPRINT, replace(BUDGET, free_bytes=GIB), "to need 4.0 GiB;", "truncate long samples."),
        (STATES, BUDGET, "to need at least 4.0 GiB;", "Whether it fits is unknown, as its activations are."),
        (STATES, replace(BUDGET, free_bytes=GIB), "to need at least 4.0 GiB;", "truncate long samples."),
    ],
)
def test_a_larger_batch_is_said_to_fit_only_where_that_is_known(footprint, budget, need, end):
    text = announcement(replace(LARGER, footprint=footprint, budget=budget), "train", 3)
    assert text.startswith("Training batch 3 has [8, 20], larger than the [8, 10] of the prediction.")
    assert need in text
    assert text.endswith(end)


def test_out_of_memory_after_a_whole_prediction():
    lines = note(replace(FAILURE, measured=Measured(3 * GIB, "rss"))).splitlines()
    assert lines[0].startswith("MemGuard predicted a peak of 4.0 GiB in the forward pass at batch size 8;")
    assert lines[-2:] == [
        "Note on the prediction: a guess.",
        "Batch size 4 would have fit: set max_batch_size=4, or raise `margin`.",
    ]


@pytest.mark.parametrize(("measured", "now", "explained"), [(6, 8, False), (9, 8, True), (6, 5, True)])
def test_no_size_is_advised_if_the_figures_do_not_explain_the_error(measured, now, explained):
    """As for a tensor of a size that was computed wrongly."""
    now = replace(BUDGET, free_bytes=now * GIB)
    text = note(replace(FAILURE, budget=BUDGET, budget_now=now, measured=Measured(measured * GIB, "rss")))
    assert ("do not explain the error, as what was predicted and measured fits in 8.0 GiB" in text) is not explained
    assert ("would have fit" in text) is explained


H100 = Budget(81_079 * MIB, 81_079 * MIB, 4_053 * MIB, "nvml", "NVIDIA H100 80GB HBM3 (cuda:0)")


def test_what_this_process_keeps_is_not_said_to_be_other_processes():
    """An H100 alone: 59.7 GiB of a step that failed are offered again, 1 GiB of outputs in a list is not."""
    now = replace(H100, free_bytes=H100.free_bytes - GIB)
    text = note(replace(FAILURE, budget=H100, budget_now=now, elsewhere={"`Net.outputs`": GIB}, own_bytes=GIB))
    assert "offered 79.2 GiB at setup (nvml); now it offers 78.2 GiB of 79.2 GiB to this run (nvml), and other" in text
    assert "other processes hold 0 B." in text


def test_a_peak_whose_context_was_not_seen_is_compared_with_what_is_reserved():
    predicted = replace(FOOTPRINT, device="cuda", peak_device_bytes=5 * GIB, doubts=())
    measured = Measured(3 * GIB, "torch.cuda reserved, context not seen", {}, 2 * GIB, 3 * GIB)
    text = note(replace(FAILURE, predicted=predicted, measured=measured))
    assert text.startswith("MemGuard predicted a reserved peak of 4.0 GiB in the forward pass at batch size 8; the mea")


@pytest.mark.parametrize(("now", "is_named"), [(3 * GIB, True), (2 * GIB + GIB // 16, False)])
def test_what_has_grown_between_steps_is_named_if_it_is_more_than_noise(now, is_named):
    text = note(replace(FAILURE, between_steps=[(1, 2 * GIB), (64, now)]))
    grown = "Between steps, this process held 2.0 GiB after step 1 and 3.0 GiB after step 64: 1.0 GiB more."
    assert (grown in text) is is_named
    assert ("Between steps" in text) is is_named


@pytest.mark.parametrize(
    ("size", "larger", "end"),
    [
        (
            0,
            None,
            "Not even one sample would have fit: use bf16-mixed precision, activation checkpointing, or a smaller",
        ),
        (None, None, "Which batch size would have fit is unknown: try a smaller one."),
        (3, FOOTPRINT, "For batches like it, batch size 3 would have fit: set max_batch_size=3, or raise `margin`, or"),
        (0, FOOTPRINT, "For batches like it, not even one sample would have fit: use bf16-mixed precision, activation"),
    ],
)
def test_what_would_have_fit_is_said_of_batches_like_the_one_that_failed(size, larger, end):
    failed = replace(FAILURE, measured=Measured(3 * GIB, "rss"), would_fit=size, larger=larger)
    advice = note(failed).splitlines()[-1]
    assert advice.startswith(end)
    assert ("truncate long samples" in advice) == (larger is not None)


@pytest.mark.parametrize(
    ("size", "larger", "end"),
    [
        (5, None, "Batch size 5 would have stayed within it: set max_batch_size=5, or raise `margin`."),
        (5, LARGER, "For batches like it, batch size 5 would have stayed within it: set max_batch_size=5, or raise"),
        (0, LARGER, "For batches like it, not even one sample would have stayed within it: use bf16-mixed precision"),
        (None, LARGER, "Lower the batch size, or raise `margin`, or truncate long samples."),
    ],
)
def test_a_passed_budget_is_compared_with_the_largest_batch(size, larger, end):
    text = overrun_words(FOOTPRINT, Measured(9 * GIB, "rss"), BUDGET, size, larger)
    assert end in text
    assert ("for a batch of [8, 20] 4.0 GiB were predicted" in text) == (larger is not None)


def test_no_batch_size_is_advised_for_memory_that_is_left_behind():
    kept = (Kept("self.outputs", "model.py:41", False, "step", True, 262144),)
    text = overrun_words(FOOTPRINT, Measured(9 * GIB, "rss"), BUDGET, None, None, kept)
    assert text.endswith("It grows by what is left behind in `self.outputs` (model.py:41), as reported before.")


def test_what_libraries_hold_is_no_more_of_a_peak_than_what_its_tensors_leave():
    measured = Measured(6 * GIB, "tensors", process_bytes=9 * GIB, where="a training step")

    def words(**held: int) -> str:
        return overrun_words(FOOTPRINT, measured, BUDGET, None, None, outside=Outside(held))

    text = words(libraries=8 * GIB)
    assert "tensors of a step took 6.0 GiB, and 3.0 GiB are outside of them (now: libraries 3.0 GiB)" in text
    assert "(now: objects 1.0 GiB, freed 2.0 GiB)" in words(objects=GIB, freed=2 * GIB)
    assert "(now: objects 3.0 GiB)" in words(objects=3 * GIB, freed=2 * GIB), "no more than all that is outside"


def test_what_is_gone_by_now_is_not_attributed_to_what_is_there():
    measured = Measured(GIB, "tensors", process_bytes=9 * GIB, where="a training step")
    outside = Outside({"libraries": GIB}, within_until=4, hooks=("Export.on_train_batch_end",))
    text = overrun_words(FOOTPRINT, measured, BUDGET, None, None, outside=outside)
    assert "Most of it is gone by now, and came after batch 4: Export.on_train_batch_end may have taken it" in text


def test_a_peak_is_no_steps_if_what_stayed_explains_it():
    measured = Measured(9 * GIB, "tensors", process_bytes=9 * GIB, where="a training step")
    assert steps_explain(FOOTPRINT, measured)
    assert not steps_explain(FOOTPRINT, measured, 5 * GIB)
    outside = Outside({"`self.seen` (model.py:4)": 5 * GIB}, stayed_bytes=5 * GIB)
    text = overrun_words(FOOTPRINT, measured, BUDGET, None, None, outside=outside)
    assert "of a step took 4.0 GiB, and 5.0 GiB are outside of them (now: `self.seen` (model.py:4) 5.0 GiB)" in text


def test_where_the_data_sets_the_sizes_of_its_batches_none_is_advised():
    bucket = replace(FOOTPRINT, batch="3 x 512")
    text = note(replace(FAILURE, predicted=bucket, would_fit=None))
    assert "for a batch of 3 x 512" in text
    assert "lower the sampler's token budget or bucket width, or use bf16-mixed precision" in text
    overrun = overrun_words(bucket, Measured(9 * GIB, "rss"), BUDGET, None, None)
    assert overrun.endswith("Lower the sampler's token budget or bucket width, or raise `margin`.")
    larger = announcement(replace(LARGER, footprint=bucket, budget=replace(BUDGET, free_bytes=GIB)), "train", 3)
    assert larger.endswith("lower the sampler's token budget or bucket width or truncate long samples.")


def test_out_of_memory_where_activations_were_unknown_names_no_size_that_would_have_fit():
    """The states take the same at any size: the largest size that they fit at is not one that the step fits at."""
    text = note(replace(FAILURE, predicted=STATES, would_fit=7))
    assert "MemGuard predicted 4.0 GiB without activations, which are unknown;" in text
    assert "Note on the prediction: the step could not run on a copy." in text
    assert text.endswith("Which batch size would have fit is unknown: try a smaller one.")
    assert "7" not in text
