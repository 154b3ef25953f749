"""batch_size="fastest": the smallest size that is about as fast as any, on all ranks alike."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_memguard.core.decision.decision import Request
from lightning_memguard.core.replay.seconds import Speed
from lightning_memguard.training.facts.ranks import Attempt
from lightning_memguard.training.planning.search import smallest_fast
from lightning_memguard.training.run import choose as choose_module
from lightning_memguard.training.run.choose import choose
from lightning_memguard.training.run.measuring import Measuring
from tests.training.facts.test_ranks import ranks

pytestmark = pytest.mark.usefixtures("taped")

SLOW_LAUNCHES = Speed({"float32": 1e15}, ((0.0, 1e15),), 1.0, (0.5, 2.0))
LOADED = Speed({"float32": 1e6}, ((0.0, 1e15),), 0.0, (0.5, 2.0))


@pytest.mark.parametrize(("fixed", "size"), [(0.0, 3), (100.0, 582), (1e9, 597)])
def test_the_smallest_size_within_three_percent_of_the_best_is_found(fixed: float, size: int) -> None:
    request = Request(1, min_batch_size=2, multiple_of=3)

    def seconds_at(n: int) -> float:
        return fixed + n

    found = smallest_fast(seconds_at, request, 600)
    times = {n: seconds_at(n) / n for n in range(3, 601, 3)}
    assert found == min(n for n, time in times.items() if time <= 1.03 * min(times.values()))
    if fixed != 100.0:
        assert abs(found - size) <= 15


@pytest.mark.captures
@pytest.mark.usefixtures("captured_once")
@pytest.mark.parametrize(
    ("speed", "size", "limit"),
    [(SLOW_LAUNCHES, 98, "time"), (LOADED, 10, "time"), (None, 100, "dataset")],
    ids=["launches", "work", "unknown"],
)
def test_a_run_gets_the_smallest_fast_size(
    tuned: Any, trainer: Any, small: Any, dataset: TensorDataset, speed: Speed | None, size: int, limit: str
) -> None:
    """Launches cost the same at any size, so only large batches are fast; work alone costs the same for each sample."""
    with mock.patch.object(choose_module, "speed_here", return_value=speed):
        found = tuned(trainer(), small(), dataset, batch_size="fastest").decision
    assert found.limited_by == limit
    assert abs(found.batch_size - size) <= 6
    assert ("at most 3% faster" in found.reason) == (limit == "time")
    assert any("is not known" in note for note in found.notes) == (speed is None)


def test_without_being_asked_the_largest_is_chosen_and_nothing_is_measured(
    tuned: Any, trainer: Any, small: Any, dataset: TensorDataset
) -> None:
    with mock.patch.object(choose_module, "speed_here", side_effect=AssertionError):
        assert tuned(trainer(), small(), dataset).decision.batch_size == 100


def test_ranks_that_find_other_sizes_take_the_smallest_and_look_no_further(
    tuned: Any, trainer: Any, small: Any, dataset: TensorDataset
) -> None:
    known = tuned(trainer(), small(), dataset)
    profile = replace(known.profile, request=replace(known.profile.request, prefers_fast=True))
    asked: list[Request] = []

    class Planner:
        def choose(self, profile: Any) -> Attempt[Any]:
            asked.append(profile.request)
            size = 64 if profile.request.prefers_fast else profile.request.max_batch_size
            limit = "time" if profile.request.prefers_fast else "max_batch_size"
            return Attempt((replace(known.decision, batch_size=size, limited_by=limit), profile))

    class Two(type(ranks())):  # type: ignore[misc]
        def gather(self, mine: Any) -> list[Any]:
            return [mine, ("", None) if isinstance(mine[0], str) else (32, 0, "time", None)]

    decision, _ = choose(profile, Two(size=2), Planner())  # type: ignore[arg-type]
    assert (decision.batch_size, decision.limited_by) == (32, "time")
    assert [each.prefers_fast for each in asked] == [True, False]


def test_the_speed_of_this_machine_is_measured_in_a_child_on_all_threads() -> None:
    from lightning_memguard.core.capture import predict

    torch.ones(600, 600) @ torch.ones(600, 600)  # threads that a child lacks
    with mock.patch.object(predict, "cpu_speed", torch.get_num_threads):
        predict._cpu_speed.cache_clear()
        found = predict.speed_here(None)
        predict._cpu_speed.cache_clear()
    assert found == torch.get_num_threads()


def test_steps_are_timed_from_batch_to_batch_but_the_first_and_what_comes_between(monkeypatch: Any) -> None:
    """Two batches a step: those of the first are left out, and a validation from 6 to 106."""
    clock = iter((0.0, 4.0, 5.0, 6.0, 106.0, 107.0, 109.0))
    monkeypatch.setattr("lightning_memguard.training.run.measuring.time.perf_counter", lambda: next(clock))
    run = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), accumulate_grad_batches=2)
    measuring = Measuring(run, None)  # type: ignore[arg-type]
    assert measuring.step_seconds is None
    for batch_idx, trains in ((0, True), (1, True), (2, True), (0, False), (3, True), (4, True), (5, True)):
        measuring.at_batch(None, batch_idx, trains=trains, last=False, largest=False)
    assert measuring.step_seconds == 2 * (1.0 + 2.0) / 2
    measuring.restart()
    assert measuring.step_seconds is None
