"""The picture of an epoch: which bars are in it, that they are as long as they should be, and where the limit is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_memguard.core.decision.decision import Budget, Decision
from lightning_memguard.core.decision.record import EpochRecord, Measured
from lightning_memguard.core.replay.footprint import Doubt, Footprint, Peak
from lightning_memguard.core.trace.trace import PARTS
from lightning_memguard.report.figure import Group, Picture, draw, groups_of, picture_of_epoch, picture_of_setup
from lightning_memguard.report.words import COLORS
from lightning_memguard.units import GIB, MIB

FOOTPRINT = Footprint(
    8,
    "cpu",
    100 * MIB,
    100 * MIB,
    100 * MIB,
    dict.fromkeys(PARTS, 0)
    | {"parameters": 10 * MIB, "gradients": 4 * MIB, "activations": 80 * MIB, "temporaries": 6 * MIB},
)
READ = {"parameters": 10 * MIB, "buffers": 0, "gradients": 10 * MIB, "optimizer_state": 0}
RECORD = EpochRecord(3, 8, FOOTPRINT, Measured(110 * MIB, "resident memory", READ), 200 * MIB, 10 * MIB)
BLUE = tuple(bytes.fromhex(COLORS["parameters"][1:]))
RED = (0xB3, 0x26, 0x1E)


def columns_of(image, color, at_least=1):
    """Columns of a color from left to right, above the legend."""
    pixels = image.load()
    rows = range(image.height - 90)
    return [x for x in range(image.width) if sum(pixels[x, y] == color for y in rows) >= at_least]


# Which bars


def test_a_part_whose_size_was_read_has_its_own_bar_and_what_cannot_be_attributed_is_one_bar():
    parameters, rest, peak = groups_of(FOOTPRINT, RECORD.measured)
    assert parameters == Group("parameters", (("parameters", 10 * MIB),), (("parameters", 10 * MIB),))
    assert rest.name == "everything else"
    assert dict(rest.predicted) == {"gradients": 4 * MIB, "activations": 80 * MIB, "temporaries": 6 * MIB}
    assert rest.measured == (("not attributed", 100 * MIB),)
    assert dict(peak.predicted) == {part: nbytes for part, nbytes in FOOTPRINT.parts.items() if nbytes}
    assert peak.measured == (("parameters", 10 * MIB), ("not attributed", 100 * MIB))


def test_gradients_that_are_only_partly_alive_at_the_peak_are_not_compared_with_all_of_them():
    all_there = replace(FOOTPRINT, parts={**FOOTPRINT.parts, "gradients": 10 * MIB, "activations": 74 * MIB})
    assert "gradients" not in [group.name for group in groups_of(FOOTPRINT, RECORD.measured)]
    assert "gradients" in [group.name for group in groups_of(all_there, RECORD.measured)]


def test_on_a_gpu_the_allocators_own_peak_separates_tensors_from_what_else_is_on_the_device():
    footprint = replace(FOOTPRINT, peak_reserved_bytes=110 * MIB, peak_device_bytes=600 * MIB)
    measured = Measured(590 * MIB, "nvml", READ, peak_allocated_bytes=96 * MIB, peak_reserved_bytes=108 * MIB)
    by_name = {group.name: group for group in groups_of(footprint, measured)}
    assert list(by_name) == ["parameters", "everything else", "cache, context", "peak"]
    assert by_name["everything else"].measured == (("not attributed", 86 * MIB),)
    assert by_name["cache, context"].predicted == (("cache, context", 500 * MIB),)
    assert by_name["cache, context"].measured == (("cache, context", 494 * MIB),)


@pytest.mark.parametrize("allocated", [None, 0, 96 * MIB, 700 * MIB])
@pytest.mark.parametrize("device", [100 * MIB, 600 * MIB])
def test_the_bars_of_the_peak_add_up_to_what_was_predicted_and_measured(allocated, device):
    footprint = replace(FOOTPRINT, peak_device_bytes=device)
    measured = Measured(590 * MIB, "nvml", READ, peak_allocated_bytes=allocated)
    *others, peak = groups_of(footprint, measured)
    assert sum(nbytes for _, nbytes in peak.predicted) == device
    assert sum(nbytes for group in others for _, nbytes in group.predicted) == device
    if allocated is None or 10 * MIB <= allocated <= 590 * MIB:  # others contradict themselves
        assert sum(nbytes for _, nbytes in peak.measured) == 590 * MIB
        assert sum(nbytes for group in others for _, nbytes in group.measured) == 590 * MIB


def test_before_anything_is_measured_each_part_has_one_bar():
    decision = Decision(8, 4, 1, "tuned", FOOTPRINT, Budget(GIB, 200 * MIB, 10 * MIB, "given"), "memory")
    picture = picture_of_setup(decision)
    assert [group.name for group in picture.groups] == ["parameters", "gradients", "activations", "temporaries", "peak"]
    assert all(group.measured is None for group in picture.groups)
    assert (picture.limit_bytes, picture.usable_bytes) == (200 * MIB, 190 * MIB)


def test_where_nothing_could_be_measured_the_picture_says_so():
    picture = picture_of_epoch(replace(RECORD, measured=Measured(0, "unknown", READ)))
    assert picture.figures == "predicted 100.0 MiB, not measured"
    assert all(group.measured is None for group in picture.groups)


def test_the_lines_on_top_say_what_the_bars_add_up_to():
    footprint = replace(FOOTPRINT, doubts=(Doubt("process", (Peak(1, 1, 90 * MIB), Peak(1, 110 * MIB, 120 * MIB))),))
    picture = picture_of_epoch(replace(RECORD, predicted=footprint))
    assert picture.title == "Epoch 3, batch size 8"
    assert picture.figures == "predicted 100.0 MiB (90.0 to 120.0 MiB), measured 110.0 MiB (-9.1%)"
    assert picture.bounds == (90 * MIB, 120 * MIB)


# How it is drawn


def test_bars_and_the_limit_share_one_scale():
    half = (Group("parameters", (("parameters", 100 * MIB),)),)
    image = draw(replace(picture_of_epoch(RECORD), groups=half))
    blue, line = columns_of(image, BLUE), columns_of(image, RED, at_least=20)  # the words above it are not as high
    assert sum(line) / len(line) - blue[0] == pytest.approx(2 * (blue[-1] - blue[0] + 1), abs=3)


def test_a_limit_far_away_leaves_the_bars_long():
    near, far = (replace(RECORD, budget_bytes=limit) for limit in (200 * MIB, 80 * GIB))
    assert picture_of_epoch(far).span_bytes == pytest.approx(1.5 * 110 * MIB)
    assert len(columns_of(draw(picture_of_epoch(far)), BLUE)) >= len(columns_of(draw(picture_of_epoch(near)), BLUE))


def test_a_measured_bar_is_hatched():
    picture = picture_of_epoch(RECORD)
    only = replace(picture, groups=(Group("parameters", (("parameters", 0),), (("parameters", 50 * MIB),)),))
    pixels = draw(only).load()
    row = [pixels[x, 175] for x in range(180, 240)]
    assert row.count((255, 255, 255)) > 10
    assert row.count(BLUE) > 10


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 3 * MIB, 999 * GIB, 1 << 50])
@pytest.mark.parametrize("limit", [0, 1, 5 * MIB, 1 << 50])
def test_any_size_can_be_drawn(nbytes, limit):
    bar = (("activations", nbytes),)
    picture = Picture(
        "t", "f", "s", (Group("everything else", bar, bar), Group("peak", bar)), limit, 0, (nbytes // 2, nbytes)
    )
    image = draw(picture)
    assert image.mode == "RGB"
    assert image.width == 800
