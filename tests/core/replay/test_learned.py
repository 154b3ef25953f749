"""What was measured at some sizes corrects a footprint near them, and no further than it can be trusted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_memguard.core.replay.footprint import Doubt, Footprint, Peak
from lightning_memguard.core.replay.learned import Learned, Sighting
from lightning_memguard.core.replay.seconds import Speed, Timing
from lightning_memguard.core.trace.work import Work
from lightning_memguard.report.words import step_words

PARTS = {"parameters": 300, "activations": 500, "workspaces": 100}


def predicted(size: int, device: int = 1200, low: int = 1100, high: int = 1600, **more: object) -> Footprint:
    """900 allocated, 1,000 reserved, 200 outside the allocator."""
    return Footprint(
        size, "cuda", 900, device - 200, device, PARTS, yielding_bytes=300,
        doubts=(Doubt("process", (Peak(850, low - 200, low), Peak(1200, high - 200, high))),), **more,
    )  # fmt: skip


def learned(**measured: float) -> Learned:
    """By batch size, the measured share of the predicted peak."""
    return Learned("step", tuple(Sighting(int(size[1:]), 1200, int(1200 * share)) for size, share in measured.items()))


def test_near_a_measured_size_the_whole_error_is_corrected_and_the_range_is_narrow() -> None:
    found = learned(n64=1.1).corrected(predicted(70))
    assert (found.peak_device_bytes, found.peak_reserved_bytes, found.peak_allocated_bytes) == (1320, 1120, 900)
    assert 0.94 * 1320 < found.low.device_bytes < 1320 < found.high.device_bytes < 1.06 * 1320
    assert found.correction_bytes == 120
    assert found.learned_from == "1 earlier run on this GPU"
    assert found.outside_bytes == 200
    assert found.most_device_bytes <= found.high.device_bytes


def test_a_range_of_the_context_does_not_widen_what_is_reserved() -> None:
    """The measurement is of the total; that the context may be 100 or 300 is no doubt about the allocator."""
    before = replace(predicted(64), doubts=(Doubt("process", (Peak(900, 1000, 1100), Peak(900, 1000, 1300))),))
    found = learned(n64=1.0).corrected(before)
    assert found.low == Peak(900, 952, 1152)
    assert found.high == Peak(900, 1048, 1248)


def test_far_away_nothing_is_corrected() -> None:
    before = predicted(512)
    assert learned(n64=1.1).corrected(before) == before


def test_between_near_and_far_the_correction_fades_and_the_range_widens() -> None:
    sizes = [64, 80, 90, 100, 120]
    found = [learned(n64=1.1).corrected(predicted(size)) for size in sizes]
    peaks = [each.peak_device_bytes for each in found]
    widths = [each.high.device_bytes - each.low.device_bytes for each in found if each.high and each.low]
    assert peaks == sorted(peaks, reverse=True)
    assert widths == sorted(widths)
    assert 1200 < peaks[-1] < peaks[0] == 1320


def test_between_two_measured_sizes_the_ratio_is_between_theirs() -> None:
    both = learned(n64=1.0, n81=1.2)
    assert [both.corrected(predicted(size)).peak_device_bytes for size in (64, 81)] == [1200, 1440]
    assert 1300 < both.corrected(predicted(72)).peak_device_bytes < 1330
    assert both.corrected(predicted(72)).learned_from == "2 earlier runs on this GPU"


def test_a_range_always_brackets_its_point() -> None:
    """Whatever was measured, and however far away."""
    for share in (0.3, 0.8, 1.0, 1.3, 3.0):
        for size in (1, 20, 40, 50, 60, 64, 70, 90, 120, 180, 1000):
            found = learned(n64=share).corrected(predicted(size))
            assert found.low.device_bytes <= found.peak_device_bytes <= found.high.device_bytes
            assert sum(found.parts.values()) == found.peak_allocated_bytes <= found.peak_reserved_bytes
            assert min(found.parts.values()) >= 0


def test_less_than_is_allocated_takes_scratch_first() -> None:
    found = learned(n64=0.85).corrected(predicted(64))
    assert found.peak_device_bytes == 1020
    assert found.peak_allocated_bytes == found.peak_reserved_bytes == 820
    assert found.parts == {"parameters": 300, "activations": 500, "workspaces": 20}


def test_an_exact_prediction_gets_a_range_once_it_was_measured() -> None:
    found = learned(n64=1.02).corrected(Footprint(64, "cuda", 900, 1000, 1200, PARTS))
    assert found.low.device_bytes < 1224 < found.high.device_bytes


@pytest.mark.parametrize("footprint", [predicted(64, method="states"), predicted(64, correction_bytes=5)])
def test_what_is_partial_or_was_corrected_stays(footprint: Footprint) -> None:
    assert learned(n64=1.1).corrected(footprint) == footprint


def test_the_time_of_a_step_is_corrected_by_the_middle_of_those_measured() -> None:
    known = [Sighting(64, 1200, 1200, 1, ratio) for ratio in (1.5, 1.2, None, 3.0)]
    timed = predicted(64, timing=Timing((Work("", 0, 100),), lambda: Speed({}, ((0.0, 10.0),), 0.0, (0.5, 2.0))))
    assert timed.step_seconds == (5.0, 10.0, 20.0)
    found = Learned("step", tuple(known)).corrected(timed)
    assert found.step_seconds == (7.5, 15.0, 30.0)
    assert step_words(found).startswith("7.5 s to 30 s without loading data, corrected by 4 earlier runs on this GPU")
    assert Learned("step", known[2:3]).corrected(timed).step_seconds == timed.step_seconds


def test_nothing_measured_changes_nothing() -> None:
    assert Learned("step").corrected(predicted(64)) == predicted(64)
