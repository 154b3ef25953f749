"""A predicted and an actual step are compared request by request."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_memguard.core.histories.compare import Difference, aligned, compare, compare_files
from lightning_memguard.core.histories.history import History, histories_of
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.replay.snapshot import snapshot
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.errors import MemGuardError
from lightning_memguard.report.comparison import comparison_text
from lightning_memguard.units import KIB, MIB


def history(*steps: list[tuple[int, str]], start: int = 0, code: str = "model.py:7:forward") -> History:
    """Steps whose requests are all held to their ends, as a snapshot has them."""
    events = [Event("alloc", 0, start, "parameters", "setup")] if start else []
    for step, requests in enumerate(steps):
        taken = [
            Event(
                "alloc", 1000 * (step + 1) + place, size, "activations", "forward", step, "net", operator, 0, "", code
            )
            for place, (size, operator) in enumerate(requests)
        ]
        events += [*taken, *(each._replace(action="free") for each in taken)]
    (found,) = histories_of(snapshot(Trace(8, "cuda", "fake", tuple(events)), AllocatorSettings()))
    return found


def recorded(found: History) -> History:
    return replace(found, predicted=False)


STEP = [((place % 7 + 1) * 4 * KIB, f"aten.op{place % 5}.default") for place in range(60)]
MORE = (64 * KIB, "aten.scatter_.src")


def test_equal_steps_have_no_difference() -> None:
    found = compare(history(STEP, STEP, start=MORE[0]), recorded(history(STEP, STEP, STEP, start=MORE[0])))
    assert found.differences == ()
    assert found.equal_requests == found.predicted_requests == found.actual_requests == len(STEP)
    assert found.predicted_peak_bytes == found.actual_peak_bytes == MORE[0] + sum(size for size, _ in STEP)
    assert found.predicted_before_bytes == MORE[0]


def test_a_request_that_only_one_has_is_named_with_its_effect_on_the_peak() -> None:
    longer = [*STEP[:30], MORE, *STEP[30:]]
    (difference,) = compare(history(STEP, longer), recorded(history(STEP))).differences
    assert (difference.kind, difference.operator) == ("only predicted", "aten::scatter_")
    assert (difference.nbytes, difference.count, difference.peak_bytes) == (MORE[0], 1, -MORE[0])
    (difference,) = compare(history(STEP, STEP), recorded(history(longer))).differences
    assert (difference.kind, difference.peak_bytes) == ("only actual", MORE[0])


def test_a_device_without_a_history_is_compared_by_what_it_holds(tmp_path: Path) -> None:
    """Memory ran out at our peak: one block is missing, and another program's is there."""
    ours = history(STEP, STEP)
    taken = [Event("alloc", place, size, "activations") for place, (size, _) in enumerate([*STEP[1:], MORE])]
    alone = snapshot(Trace(8, "cuda", "fake", tuple(taken)), AllocatorSettings())
    alone["device_traces"] = [[]]
    assert list(histories_of(alone)) == []
    (theirs,) = histories_of(alone, held=True)
    found = compare(ours, theirs)
    assert found.equal_requests == len(STEP) - 1
    assert found.actual_peak_bytes == sum(size for size, _ in STEP[1:]) + MORE[0]
    assert {(each.kind, each.nbytes, each.count) for each in found.differences} == {
        ("only actual", MORE[0], 1),
        ("only predicted", STEP[0][0], 1),
    }
    path = tmp_path / "actual.pickle"
    path.write_bytes(pickle.dumps(alone, protocol=4))
    ours_path = tmp_path / "ours.pickle"
    ours_path.write_bytes(
        pickle.dumps(snapshot(Trace(8, "cuda", "fake", tuple(taken)), AllocatorSettings()), protocol=4)
    )
    assert "allocations are alike" in comparison_text(compare_files(ours_path, path))


def test_what_one_of_them_holds_for_longer_is_named() -> None:
    def held(until_the_end: bool) -> History:
        first, *others = (Event("alloc", place, size) for place, size in enumerate((MORE[0], KIB, MORE[0])))
        freed = first._replace(action="free")
        events = (first, *others, freed) if until_the_end else (first, freed, *others)
        (found,) = histories_of(snapshot(Trace(8, "cuda", "fake", events), AllocatorSettings()))
        return recorded(found)

    (difference,) = compare(held(False), held(True)).differences
    assert (difference.kind, difference.nbytes, difference.peak_bytes) == ("held at the peak", MORE[0], MORE[0])


def test_what_was_there_before_counts_as_requested_in_both() -> None:
    large = 40_960_000  # takes 41,943,040 bytes of a segment: less than 1 MiB is not split off
    whole = snapshot(Trace(8, "cuda", "fake", (Event("alloc", 0, large), Event("alloc", 1, KIB))), AllocatorSettings())
    (predicted,) = histories_of(whole)
    trace = whole["device_traces"][0]
    first = next(place for place, entry in enumerate(trace) if entry["action"] == "alloc")
    (actual,) = histories_of({**whole, "device_traces": [trace[first + 1 :]]})
    assert actual.start_bytes > large
    found = compare(predicted, actual)
    assert found.actual_before_bytes == large
    assert found.actual_peak_bytes == found.predicted_peak_bytes == large + KIB


def test_a_history_that_begins_within_a_step_is_compared_from_there_on() -> None:
    events = [Event("alloc", place, (place + 1) * KIB) for place in range(60)]
    whole = snapshot(Trace(8, "cuda", "fake", tuple(events)), AllocatorSettings())
    (actual,) = histories_of({**whole, "device_traces": [whole["device_traces"][0][10:]]})
    (predicted,) = histories_of(whole)
    found = compare(predicted, recorded(actual))
    assert found.differences == ()
    assert (found.equal_requests, found.predicted_left_out) == (51, 9)
    assert found.predicted_before_bytes == found.actual_before_bytes > 0
    assert found.predicted_peak_bytes == found.actual_peak_bytes


def test_a_step_begins_at_its_first_request_though_others_follow_that() -> None:
    (first, _), (second, _), *_ = STEP
    other = [(first, ""), MORE, MORE, (second, ""), MORE, *STEP[2:]]
    before = [(size * 3, operator) for size, operator in STEP]
    found = compare(history(STEP), recorded(history(before, before, other, start=MORE[0])))
    assert (found.equal_requests, found.actual_requests) == (len(STEP), len(STEP) + 3)
    assert found.actual_before_bytes == MORE[0]
    assert {(each.kind, each.nbytes, each.count) for each in found.differences} == {("only actual", MORE[0], 3)}
    assert "peak reserved " in comparison_text(found)
    assert found.actual_reserved_bytes == 4 * MIB


def test_the_report_has_code_only_where_it_is_asked_for() -> None:
    secret = "/home/someone/secret.py:3:forward"
    found = compare(history(STEP, [*STEP, MORE], code=secret), recorded(history(STEP, code=secret)))
    assert "aten::scatter_, secret.py:3:forward" in comparison_text(found)
    assert "someone" not in comparison_text(found)
    text = comparison_text(found.without_lines())
    assert "secret" not in text
    effect, unit, count, nbytes, *which, operator = text.splitlines()[-1].split()
    assert (effect, unit, count, nbytes, operator) == ("-64.0", "KiB", "1", "65,536", "aten::scatter_")
    assert which == ["predicted", "only"]
    assert text.splitlines()[-2].endswith("operator")
    assert comparison_text(found).splitlines()[-2].endswith("operator, line")


def test_the_largest_effect_comes_first_with_and_without_lines() -> None:
    of_one = Difference("only predicted", "aten::bmm", "a.py:1:f", 3 * KIB, 1, -3 * KIB)
    of_two = [Difference("only predicted", "aten::mul", f"a.py:{line}:f", 2 * KIB, 1, -2 * KIB) for line in (2, 3)]
    found = replace(compare(history(STEP), recorded(history(STEP))), differences=(of_one, *of_two))
    assert [each.peak_bytes for each in found.without_lines().differences] == [-4 * KIB, -3 * KIB]


def test_rows_without_an_effect_do_not_fill_the_report() -> None:
    extra = [Difference("only actual", f"aten::op{number}", "", KIB, 1, 0) for number in range(50)]
    most = [replace(each, peak_bytes=MIB) for each in extra]
    found = replace(compare(history(STEP), recorded(history(STEP))), differences=(*most, *extra))
    assert comparison_text(found).splitlines()[-2:] == [
        "  ... and 20 more rows with +20.0 MiB in total",
        "  ... and 40 more rows without an effect",
    ]


def test_the_report_cautions_where_the_two_are_hardly_one_step() -> None:
    other = [(size * 2 + 8, operator) for size, operator in STEP[:30]] + STEP[30:]
    text = comparison_text(compare(history(STEP), recorded(history(other))))
    assert "They are only 50% of all: these may be two different steps." in text
    found = compare(history(STEP), recorded(history(STEP, STEP)))
    assert found.actual_left_out == len(STEP)
    text = comparison_text(found)
    assert "The actual history is longer: 60 of its allocations, before or after the best match, are left out." in text
    assert "two different steps" not in text
    assert "Note: " not in text
    assert "Note: both snapshots are predicted." in comparison_text(compare(history(STEP), history(STEP)))


def test_a_tiny_error_is_not_rounded_to_none() -> None:
    found = compare(history(STEP), recorded(history(STEP)))
    found = replace(found, predicted_peak_bytes=1000 * MIB, actual_peak_bytes=1000 * MIB + 4)
    assert "The predicted peak is less than 0.001% too low." in comparison_text(found)


def test_swapped_snapshots_are_refused(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "step.pickle", tmp_path / "step_actual.pickle"
    whole = snapshot(Trace(8, "cuda", "fake", (Event("alloc", 0, KIB),)), AllocatorSettings())
    trace = [entry for entry in whole["device_traces"][0] if entry["action"] != "snapshot"]
    ours.write_bytes(pickle.dumps(whole))
    theirs.write_bytes(pickle.dumps({**whole, "device_traces": [trace]}))
    assert compare_files(ours, theirs).differences == ()
    with pytest.raises(MemGuardError, match=r"step\.pickle was predicted and .*swap them"):
        compare_files(theirs, ours)


def test_the_report_says_what_is_not_of_the_step() -> None:
    found, more = compare(history(STEP), recorded(history(STEP))), 3 * KIB * KIB
    peak = found.actual_peak_bytes + more
    text = comparison_text(replace(found, actual_before_bytes=more, actual_peak_bytes=peak))
    assert "too low; what the step adds was predicted to the byte." in text
    assert "The actual step began with 3.0 MiB more than predicted, allocated before the step." in text
    assert "No allocation of the step differs." in text
    assert "The predicted peak is the actual one." in comparison_text(found)


def test_the_longest_common_subsequence_is_found() -> None:
    draw = random.Random(0)
    for _ in range(200):
        ours, theirs = ([draw.randrange(4) for _ in range(draw.randrange(15))] for _ in range(2))
        pairs = aligned(ours, theirs)
        assert all(ours[a] == theirs[b] for a, b in pairs)
        assert all(first[0] < second[0] and first[1] < second[1] for first, second in pairwise(pairs))
        assert len(pairs) == longest(ours, theirs)


def longest(ours: list[int], theirs: list[int]) -> int:
    table: Any = [[0] * (len(theirs) + 1) for _ in range(len(ours) + 1)]
    for a, mine in enumerate(ours):
        for b, yours in enumerate(theirs):
            table[a + 1][b + 1] = table[a][b] + 1 if mine == yours else max(table[a][b + 1], table[a + 1][b])
    return int(table[-1][-1])


@pytest.mark.parametrize("count", [0, 1])
def test_histories_with_almost_nothing_are_compared(count: int) -> None:
    found = compare(history(STEP[:1]), recorded(history(STEP[:count] or [(0, "")], start=512)))
    assert found.equal_requests == count
