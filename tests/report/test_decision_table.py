"""Output for a person: the table before the training, the sentence under it, and one line after."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_memguard.core.decision.decision import Budget, Decision
from lightning_memguard.core.decision.record import EpochRecord, Measured
from lightning_memguard.core.replay.footprint import Doubt, Footprint, Peak
from lightning_memguard.core.replay.recurring import Retries
from lightning_memguard.core.trace.trace import PARTS
from lightning_memguard.report.decision_table import evaluation_text, last_line, markdown, setup_text, warning_of
from lightning_memguard.units import GIB, MIB

PARTS_OF_20_GIB = dict.fromkeys(PARTS, 0) | {
    "parameters": 2 * GIB,
    "gradients": 2 * GIB,
    "optimizer_state": 4 * GIB,
    "activations": 12 * GIB,
}
ON_CUDA = Footprint(
    96, "cuda", 20 * GIB, 21 * GIB, 22 * GIB, PARTS_OF_20_GIB, "backward", "encoder.layers.11", "aten.mm.default"
)
L4 = Budget(24 * GIB, 20 * GIB, GIB, "nvml", "NVIDIA L4 (cuda:0)")
TUNED = Decision(96, 32, 1, "tuned", ON_CUDA, replace(L4, free_bytes=24 * GIB), "memory")

STATES_ALONE = Footprint(
    96, "cuda", 7 * GIB, 7 * GIB, 8 * GIB, PARTS_OF_20_GIB | {"activations": 0}, "optimizer", method="states"
)

ON_CPU = Footprint(
    8, "cpu", 4 * MIB, 4 * MIB, 4 * MIB, dict.fromkeys(PARTS, 0) | {"parameters": MIB, "batch": 3 * MIB}, "optimizer"
)
HOST = Budget(64 * GIB, 10 * MIB, 0, "given", "CPU")
FITS = "fits: 22.0 of 23.0 GiB"
CHECKED = Decision(8, 8, 1, "checked", ON_CPU, HOST, "request")


# The table


def test_on_a_gpu_the_table_goes_from_parts_to_device_to_budget():
    assert (
        setup_text(TUNED)
        == """\
  | Part at the peak | Predicted at batch size 96 | Share
---------------------------------------------------------
  | parameters       |                    2.0 GiB |   10%
  | gradients        |                    2.0 GiB |   10%
  | optimizer state  |                    4.0 GiB |   20%
  | activations      |                   12.0 GiB |   60%
---------------------------------------------------------
22.0 GiB  Peak of a training step, in the backward pass of encoder.layers.11: allocated 20.0 GiB, reserved 21.0 GiB, \
context and libraries 1.0 GiB
23.0 GiB  Usable of 24.0 GiB on NVIDIA L4 (cuda:0) (nvml), after a 4% margin
MemGuard: batch size 96 (was 32) fits: 22.0 of 23.0 GiB; no larger one does."""
    )


def test_what_is_not_known_exactly_shows_what_is_compared_with_the_budget():
    high = Peak(20 * GIB, 21 * GIB, 22 * GIB + GIB // 2)
    bounded = replace(TUNED, footprint=replace(ON_CUDA, doubts=(Doubt("process", (high,)),)))
    assert "22.0 GiB  Peak of a training step (at most 22.5 GiB), in the backward" in setup_text(bounded)


def test_on_the_cpu_there_is_no_allocator_to_report_on():
    assert (
        setup_text(CHECKED)
        == """\
  | Part at the peak | Predicted at batch size 8 | Share
--------------------------------------------------------
  | parameters       |                   1.0 MiB |   25%
  | batch            |                   3.0 MiB |   75%
--------------------------------------------------------
4.0 MiB   Peak of a training step, in the optimizer
10.0 MiB  Usable of 10.0 MiB on CPU (given), after a 0% margin
MemGuard: batch size 8 fits: 4.0 of 10.0 MiB."""
    )


def test_in_few_lines_the_smallest_parts_share_one_and_one_note_is_read():
    footprint = replace(ON_CUDA, notes=("it ends [early]", "it starts late"))
    lines = setup_text(replace(TUNED, footprint=footprint), most_parts=3).splitlines()
    assert len(lines) == 9
    assert lines[3] == "  | other parts      |                    8.0 GiB |   40%"
    assert lines[-1] == "Note: it ends [early]. More in `guard.decision.notes`."
    assert len(setup_text(TUNED, most_parts=4).splitlines()) == 10


def test_an_evaluation_takes_one_line():
    assert evaluation_text(CHECKED, "test") == ("MemGuard: in test, batch size 8 fits: 4.0 of 10.0 MiB.")


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("fake", "encoder.layers.11: allocated"),
        ("worst-case", "traced on fake tensors; sizes that depend on values are assumed to be the largest possible:"),
        (
            "sampled",
            "traced on fake tensors; sizes that depend on values are those of real batches:",
        ),
        ("real", "encoder.layers.11; from real steps, run on a copy: allocated"),
        ("cut", "From part of a step, as time was up: it needs more than this: allocated"),
        ("states", "Without activations, which are unknown: the step needs more than this: allocated"),
    ],
)
def test_under_the_table_it_says_how_the_numbers_were_obtained(method, words):
    assert words in setup_text(replace(TUNED, footprint=replace(ON_CUDA, method=method)))


def test_every_note_is_a_line_and_brackets_are_not_markup():
    notes = ("aten.index.Tensor was taken to give its largest result", "it saw x[bold]")
    assert setup_text(replace(CHECKED, footprint=replace(ON_CPU, notes=notes))).splitlines()[-3:] == [
        "MemGuard: batch size 8 fits: 4.0 of 10.0 MiB.",
        "Note: aten.index.Tensor was taken to give its largest result.",
        "Note: it saw x[bold].",
    ]


# The sentence


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, "batch size 96 (was 32) fits: 22.0 of 23.0 GiB; no larger one does."),
        ({"requested_batch_size": 96, "outcome": "kept"}, "batch size 96 fits: 22.0 of 23.0 GiB; no larger one does."),
        (
            {"limited_by": "dataset"},
            "batch size 96 (was 32) fits: 22.0 of 23.0 GiB; limited by the size of the dataset, not by memory.",
        ),
        (
            {"limited_by": "max_batch_size"},
            "batch size 96 (was 32) fits: 22.0 of 23.0 GiB; limited by max_batch_size, not by memory.",
        ),
        ({"limited_by": "request"}, "batch size 96 (was 32) fits: 22.0 of 23.0 GiB; keeps the effective batch size."),
        (
            {"accumulate_grad_batches": 4},
            f"batch size 96 (was 32) {FITS}; no larger one does, with gradients accumulated over 4 batches.",
        ),
        (
            {"limited_by": "val_check_interval"},
            (
                f"batch size 96 (was 32) {FITS}; limited by val_check_interval: with larger batches, an epoch has too "
                "few of them for it."
            ),
        ),
        (
            {"limited_by": "last_batch"},
            (
                f"batch size 96 (was 32) {FITS}; a larger one leaves a last batch of a single sample, which batch norm "
                "refuses."
            ),
        ),
        ({"outcome": "checked"}, "batch size 96 fits: 22.0 of 23.0 GiB."),
        (
            {"outcome": "checked", "because": 'mode="check" changes nothing'},
            'batch size 96 fits: 22.0 of 23.0 GiB; unchanged because mode="check" changes nothing.',
        ),
        (
            {"because": "other callbacks have taken 2.0 GiB", "budget": L4},
            "batch size 96 does NOT fit: other callbacks have taken 2.0 GiB.",
        ),
        (
            {"outcome": "kept", "because": "the step could not run on a copy (OSError: no)", "footprint": STATES_ALONE},
            (
                "batch size 96 is unchanged, and whether it fits is unknown: the step could not run on a copy "
                "(OSError: no). Without its activations it takes 8.0 of 23.0 GiB usable."
            ),
        ),
        (
            {"outcome": "checked", "footprint": STATES_ALONE, "budget": replace(L4, free_bytes=8 * GIB)},
            "batch size 96 does NOT fit, even without its activations.",
        ),
        ({"outcome": "checked", "budget": L4}, "batch size 96 does NOT fit."),
        (
            {"outcome": "checked", "budget": L4, "retries": Retries(3, 1.5)},
            "batch size 96 does NOT fit with all that the allocator caches: it runs, but empties the cache each step.",
        ),
        (
            {"outcome": "kept", "because": "the loader has batch_size=None"},
            "batch size 96 fits: 22.0 of 23.0 GiB; unchanged because the loader has batch_size=None.",
        ),
    ],
)
def test_one_sentence_says_the_size_and_what_set_it(change, sentence):
    assert replace(TUNED, **change).reason == sentence


def test_a_reason_that_ends_in_a_full_stop_gets_no_second_one():
    decision = replace(TUNED, outcome="kept", because="the batch holds no tensor.")
    assert decision.reason == "batch size 96 fits: 22.0 of 23.0 GiB; unchanged because the batch holds no tensor."


# What is not known


def test_where_activations_are_unknown_every_figure_is_a_least_one():
    """States alone fit nearly anywhere: that they do says nothing about the step."""
    decision = replace(TUNED, outcome="kept", requested_batch_size=96, because="it raises", footprint=STATES_ALONE)
    assert (decision.verdict, decision.fits) == ("unknown", False)
    text = setup_text(decision)
    assert "fits;" not in text
    assert "Part that is known" in text
    assert "8.0 GiB   Without activations, which are unknown: the step needs more than this: allocated 7.0 GiB" in text


def test_a_note_that_is_the_reason_is_read_once():
    cause = "the step could not run on a copy (OSError: no)"
    footprint = replace(STATES_ALONE, notes=(cause, "torch.compile is left out"))
    decision = replace(TUNED, outcome="kept", because=cause, footprint=footprint)
    text = setup_text(decision)
    assert text.count("OSError") == 1
    assert "Note: torch.compile is left out." in text
    assert markdown(decision).count("OSError") == 1


def test_names_in_a_reason_stay_as_they_are_in_markdown():
    decision = replace(TUNED, outcome="kept", because="a_b of [1] is *odd*")
    assert r"a\_b of \[1] is \*odd\*" in markdown(decision)


# Warnings


@pytest.mark.parametrize(
    ("change", "start"),
    [
        ({}, ""),
        ({"outcome": "checked", "because": 'mode="check" changes nothing'}, ""),
        ({"outcome": "checked", "because": "it raises", "footprint": STATES_ALONE}, ""),
        (
            {"outcome": "kept", "because": "the loader has no size"},
            "batch size 96 fits: 22.0 of 23.0 GiB; unchanged because the loader",
        ),
        ({"outcome": "kept", "because": "it raises", "footprint": STATES_ALONE}, "batch size 96 is unchanged, and"),
        ({"outcome": "checked", "budget": L4}, "batch size 96 does NOT fit. The run is predicted to need 22.0 GiB; NV"),
        ({"footprint": None, "because": "no loader"}, "MemGuard did not tune this run: no loader."),
    ],
)
def test_it_warns_where_something_is_to_be_done_about_it(change, start):
    warning = warning_of(replace(TUNED, **change))
    assert warning.startswith(start)
    assert bool(warning) == bool(start)


def test_what_is_said_in_a_warning_can_be_left_out_of_the_table():
    text = setup_text(TUNED, explain=False)
    assert "after a 4% margin" in text
    assert "batch size 96 (was 32)" not in text


def test_a_batch_that_does_not_fit_is_checked_and_the_largest_that_would_is_named():
    small, why = replace(HOST, free_bytes=3 * MIB), 'mode="check" changes nothing'
    assert replace(CHECKED, budget=small, because=why, largest_batch_size=5).reason == (
        'batch size 8 does NOT fit; unchanged because mode="check" changes nothing. Up to 5 would.'
    )


@pytest.mark.parametrize(("largest", "shown"), [(999, "999"), (1100, "1,100"), (8192, "about 8,100")])
def test_a_large_size_that_would_fit_is_rounded_and_said_to_be(largest, shown):
    assert replace(CHECKED, largest_batch_size=largest).reason.endswith(f". Up to {shown} would.")


def test_a_batch_that_fits_by_a_prediction_that_was_cut_short_says_so():
    cut = ON_CPU.doubted("one draw", Peak(5 * MIB, 5 * MIB, 5 * MIB))
    assert replace(CHECKED, footprint=cut).reason == (
        "batch size 8 fits: 5.0 of 10.0 MiB. Time was up (max_setup_seconds) before captures checked that."
    )


# The last line


def epoch(predicted: int, measured: int, batch_size: int = 96) -> EpochRecord:
    footprint = replace(ON_CUDA, peak_device_bytes=predicted)
    return EpochRecord(0, batch_size, footprint, Measured(measured, "nvml"), 23 * GIB)


def test_after_the_training_one_line_compares_predicted_and_measured():
    assert last_line([epoch(22 * GIB, 20 * GIB)]) == (
        "MemGuard: predicted a peak of 22.0 GiB, measured 20.0 GiB (nvml): +10.0%; batch size 96, 1 epoch."
    )


def test_the_last_line_has_the_bound_that_the_first_compares_with_the_budget():
    record = epoch(22 * GIB, 22 * GIB + MIB)
    record = replace(record, predicted=record.predicted.plus_outside(GIB))
    assert last_line([record]) == (
        "MemGuard: predicted a peak of 22.0 GiB (at most 23.0 GiB), measured 22.0 GiB (nvml): +0.0%; "
        "batch size 96, 1 epoch."
    )


def test_of_several_epochs_the_one_with_the_highest_peak_is_reported():
    records = [epoch(22 * GIB, 20 * GIB), epoch(22 * GIB, 44 * GIB, batch_size=64), epoch(22 * GIB, 21 * GIB)]
    assert last_line(records) == (
        "MemGuard: predicted a peak of 22.0 GiB, measured 44.0 GiB (nvml): -50.0%, 21.0 GiB over budget; "
        "batch size 64, 3 epochs."
    )


def test_what_stayed_after_the_first_step_explains_a_peak_above_all_that_was_predicted():
    more = epoch(22 * GIB, 44 * GIB)
    more = replace(more, predicted=replace(more.predicted, doubts=()))
    assert (
        ": -50.0%, of which up to 20.0 GiB came after the first step and stayed (data or results that are kept), "
        in (last_line([more], stayed_bytes=20 * GIB))
    )
    assert "of which up to 22.0 GiB came" in last_line([more], stayed_bytes=30 * GIB), "no more than was not predicted"
    for records, stayed in (([more], 2 * GIB), ([epoch(22 * GIB, 20 * GIB)], 20 * GIB)):
        assert "stayed" not in last_line(records, stayed_bytes=stayed)


def test_where_nothing_was_measured_no_error_is_reported():
    assert "nan" not in last_line([epoch(22 * GIB, 0)])


def test_what_was_predicted_without_activations_has_no_error():
    record = replace(epoch(0, 20 * GIB), predicted=STATES_ALONE)
    assert last_line([record]) == (
        "MemGuard: predicted 8.0 GiB without activations, measured 20.0 GiB (nvml) with them; batch size 96, 1 epoch."
    )


def test_what_a_stopped_step_tells_is_the_least():
    cut = replace(STATES_ALONE, method="cut")
    record = replace(epoch(0, 20 * GIB), predicted=cut)
    assert last_line([record]) == (
        "MemGuard: predicted at least 8.0 GiB, measured 20.0 GiB (nvml); batch size 96, 1 epoch."
    )


@pytest.mark.parametrize(("times", "words"), [(4, "4.0 MiB (at most 16.0 MiB)"), (100, "4.0 MiB,")])
def test_a_bound_that_says_nothing_is_not_shown(times: int, words: str) -> None:
    most = times * ON_CPU.peak_device_bytes
    cut = replace(ON_CPU, doubts=()).doubted("unchecked", Peak(most, most, most))
    assert f"predicted a peak of {words}" in last_line([replace(epoch(0, 20 * MIB), predicted=cut)])


def test_steps_that_kept_activations_on_the_host_are_counted():
    record = replace(epoch(22 * GIB, 20 * GIB), offloaded=8)
    assert last_line([record, epoch(22 * GIB, 19 * GIB)]).endswith(
        "batch size 96, 2 epochs, 8 steps with activations on the host."
    )


def test_a_cache_that_was_emptied_is_reported():
    records = [
        replace(each, measured=replace(each.measured, alloc_retries=3)) for each in [epoch(22 * GIB, 20 * GIB)] * 2
    ]
    assert last_line(records).endswith(
        "2 epochs, the allocator's cache emptied 6 times to make room: a smaller batch is faster."
    )
