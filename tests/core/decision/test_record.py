"""Predicted and measured, once an epoch, and the names under which both are logged."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_memguard.core.decision.record import EpochRecord, Measured
from lightning_memguard.core.replay.footprint import Doubt, Footprint, Peak
from lightning_memguard.core.replay.seconds import Speed, Timing
from lightning_memguard.core.trace.trace import PARTS
from lightning_memguard.core.trace.work import Work
from lightning_memguard.report.decision_table import last_line
from lightning_memguard.report.figure import picture_of_epoch
from lightning_memguard.units import GIB, MIB


def record_of(predicted_bytes: int, measured_bytes: int, budget_bytes: int = 8 * GIB) -> EpochRecord:
    """The allocator's own peaks are smaller than the device's, so that a test sees which one is compared."""
    parts = dict.fromkeys(PARTS, 0) | {"parameters": GIB, "activations": GIB // 2}
    footprint = Footprint(32, "cuda", predicted_bytes // 4, predicted_bytes // 2, predicted_bytes, parts)
    measured = Measured(measured_bytes, "nvml", {}, measured_bytes // 4, measured_bytes // 2)
    return EpochRecord(3, 32, footprint, measured, budget_bytes, margin_bytes=GIB // 2)


@pytest.mark.parametrize(("predicted", "measured", "ratio"), [(3, 2, 0.5), (2, 2, 0.0), (1, 2, -0.5)])
def test_the_error_is_predicted_over_measured_less_one(predicted, measured, ratio):
    assert record_of(predicted * GIB, measured * GIB).error_ratio == ratio


def of_bert(outside: int) -> EpochRecord:
    """``bert_16-mixed`` on an H100, recorded next to other processes: with or without what NVML saw of this one."""
    reserved, high, measured = 3_330_277_376, 3_405_085_222, 3_332_374_528
    context = 789_000_000
    doubt = Doubt("process", (Peak(GIB, high, high + context),))
    predicted = Footprint(
        32, "cuda", 2_908_427_776, reserved, reserved + context, dict.fromkeys(PARTS, 0), doubts=(doubt,)
    )
    source = "torch.cuda + nvml" if outside else "torch.cuda reserved, context not seen"
    found = Measured(measured + outside, source, {}, 2_910_645_760, measured)
    return EpochRecord(0, 32, predicted, found, 76_134_410_496)


def test_where_the_context_was_not_seen_reserved_is_compared_with_reserved():
    record = of_bert(outside=0)
    assert record.error_ratio == pytest.approx(-0.0006, abs=1e-4)  # not +23 %
    assert last_line([record]).startswith(
        "MemGuard: predicted a reserved peak of 3.1 GiB (at most 3.2 GiB), measured 3.1 GiB (torch.cuda reserved, "
        "context not seen): -0.1%;"
    )
    assert "predicted 3.1 GiB (3.1 to 3.2 GiB), measured 3.1 GiB (-0.1%)" in picture_of_epoch(record).figures
    metrics = record.as_metrics()
    for key, nbytes in (("predicted_peak", 3_330_277_376), ("actual_peak", 3_332_374_528)):
        assert metrics[f"memguard/{key}_gib"] == nbytes / GIB
    assert metrics["memguard/predicted_high_gib"] == 3_405_085_222 / GIB
    # a budget must hold the context all the same
    assert record.headroom_bytes == 76_134_410_496 - 3_332_374_528 - 789_000_000


def test_where_the_context_was_seen_the_totals_are_compared():
    record = of_bert(outside=787_480_576)
    assert record.error_ratio == pytest.approx(-0.0001, abs=1e-4)
    assert "predicted a peak of 3.8 GiB (at most 3.9 GiB), measured 3.8 GiB (torch.cuda + nvml)" in last_line([record])
    assert record.headroom_bytes == 76_134_410_496 - 3_332_374_528 - 787_480_576


@pytest.mark.parametrize(("first", "then"), [(0, 787_480_576), (787_480_576, 0), (0, 0)])
def test_what_followed_an_epoch_never_mixes_two_counters(first, then):
    """Other processes may come or go meanwhile; of the same reserved bytes, the peak whose context was seen stays."""
    known = of_bert(first).with_what_followed(of_bert(then).measured)
    assert known.measured == of_bert(max(first, then)).measured
    reserved = 4 * GIB
    higher = replace(of_bert(then).measured, peak_bytes=reserved + then, peak_reserved_bytes=reserved)
    assert of_bert(first).with_what_followed(higher).measured == higher


def test_where_nothing_was_measured_there_is_no_error_to_report():
    assert math.isnan(record_of(3 * GIB, 0).error_ratio)


@pytest.mark.parametrize(
    ("device", "peak_mib", "outside_mib", "has_error"),
    [
        ("cpu", 39, 0, False),
        ("cpu", 40, 0, True),
        ("cpu", 119, 12, False),
        ("cpu", 120, 12, True),
        ("cuda", 1, 0, True),
    ],
)
def test_a_step_too_small_to_compare_with_a_process_has_both_figures_and_no_error(
    device, peak_mib, outside_mib, has_error
):
    """On the CPU a process holds up to 4 to 12 MiB outside of tensors."""
    peak, most = peak_mib * MIB, (peak_mib + outside_mib) * MIB
    predicted = Footprint(
        8, device, peak, peak, peak, doubts=(Doubt("process", (Peak(peak, peak, peak), Peak(peak, peak, most))),)
    )
    record = EpochRecord(0, 8, predicted, Measured(peak + 9 * MIB, "VmHWM"), GIB)
    assert record.has_error is has_error
    assert ("memguard/error_pct" in record.as_metrics()) is has_error
    assert ("%" in last_line([record])) is has_error
    assert ("%" in picture_of_epoch(record).figures) is has_error
    with_workers = replace(predicted, parts={"workers": peak // 5})
    assert replace(record, predicted=with_workers).has_error is (has_error and device == "cuda")
    assert {f"{peak_mib}.0 MiB", f"{peak_mib + 9}.0 MiB"} <= set(re.findall(r"[\d.]+ MiB", last_line([record])))


def test_headroom_is_what_the_measured_peak_left_of_the_budget():
    assert record_of(7 * GIB, 5 * GIB, budget_bytes=8 * GIB).headroom_bytes == 3 * GIB
    assert record_of(7 * GIB, 9 * GIB, budget_bytes=8 * GIB).headroom_bytes == -GIB


def test_the_metrics_have_their_public_names_and_their_unit_in_the_key():
    assert record_of(6 * GIB, 4 * GIB, budget_bytes=8 * GIB).as_metrics() == {
        "memguard/predicted_peak_gib": 6.0,
        "memguard/actual_peak_gib": 4.0,
        "memguard/error_pct": 50.0,
        "memguard/headroom_gib": 4.0,
        "memguard/batch_size": 32.0,
        "memguard/limit_gib": 8.0,
        "memguard/usable_gib": 7.5,
        "memguard/offloaded_steps": 0.0,
        "memguard/parts/parameters_gib": 1.0,
        "memguard/parts/buffers_gib": 0.0,
        "memguard/parts/gradients_gib": 0.0,
        "memguard/parts/optimizer_state_gib": 0.0,
        "memguard/parts/activations_gib": 0.5,
        "memguard/parts/batch_gib": 0.0,
        "memguard/parts/temporaries_gib": 0.0,
        "memguard/parts/workspaces_gib": 0.0,
        "memguard/stacked/parameters_gib": 1.0,
        "memguard/stacked/activations_gib": 1.5,
    }


def test_bounds_are_logged_where_the_prediction_has_some():
    record = record_of(6 * GIB, 4 * GIB)
    bounded = replace(record.predicted, doubts=(Doubt("process", (Peak(1, 2, 5 * GIB), Peak(1, 2, 7 * GIB))),))
    added = replace(record, predicted=bounded).as_metrics().items() - record.as_metrics().items()
    assert dict(added) == {"memguard/predicted_low_gib": 5.0, "memguard/predicted_high_gib": 7.0}


TIMING = Timing((Work("", 0, 6),), lambda: Speed({}, ((0.0, 2.0),), 0.0, (0.5, 2.0)))


def test_seconds_are_logged_where_they_were_measured():
    record = record_of(6 * GIB, 4 * GIB)
    record = replace(record, predicted=replace(record.predicted, timing=TIMING, seconds_ratio=1.5))
    assert "memguard/step_seconds" not in record.as_metrics()
    timed = replace(record, measured=replace(record.measured, step_seconds=4.0))
    added = dict(timed.as_metrics().items() - record.as_metrics().items())
    assert added == {"memguard/step_seconds": 4.0, "memguard/predicted_step_seconds": 4.5}
    assert "4 s a step, predicted 4.5 s; batch size" in last_line([timed])


def test_every_key_is_documented_and_every_documented_key_is_written():
    record = record_of(6 * GIB, 4 * GIB)
    bounded = replace(record.predicted, doubts=(Doubt("process", (Peak(1, 2, 5 * GIB), Peak(1, 2, 7 * GIB))),))
    record = replace(
        record, measured=replace(record.measured, alloc_retries=0, host_bytes=0, step_seconds=2.0, process_bytes=1)
    )
    written = {
        re.sub(r"/\w+_gib$", "/<part>_gib", key) if key.count("/") == 2 else key
        for key in replace(record, predicted=replace(bounded, timing=TIMING)).as_metrics()
    }
    table = (Path(__file__).parents[3] / "docs/logging.md").read_text().partition("| key |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(memguard/[^`]+)`", table)) == written


def test_loggers_get_floats_alone():
    assert {type(value) for value in record_of(6 * GIB, 4 * GIB).as_metrics().values()} == {float}
