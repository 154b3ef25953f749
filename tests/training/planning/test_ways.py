"""The ways to see so many samples a step: what fits, what none other beats, and that it was captured as it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_memguard import MemGuardError, ways_to_train
from lightning_memguard.core.decision.decision import Limits
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.planning import ways as ways_module
from lightning_memguard.training.planning.layouts import shardings_for
from lightning_memguard.training.planning.subject import Subject, predicted, subject_of
from lightning_memguard.training.planning.target import target_of
from lightning_memguard.training.planning.ways import TrainingWay, Ways, _accumulating, _beats, find_ways
from lightning_memguard.units import MIB
from tests.training.planning.test_advise import Stacked, batch, write_out
from tests.training.planning.test_layouts import Blocky

pytestmark = pytest.mark.usefixtures("all_here")


def subject(precision: str = "bf16-true", **settings: Any) -> Subject:
    return subject_of(Stacked(), batch(), precision=precision, **settings)


@pytest.fixture(scope="module")
def tight(all_here: None) -> Ways:
    """On a GPU that has 48 MiB for tensors, next to its context of at most 555 MB."""
    limits = Limits(margin=0.0, budget_bytes=555_000_000 + 48 * MIB)
    return find_ways(subject(), 512, ["RTX 4090"], limits)


def test_where_all_fits_the_step_is_not_divided_and_each_number_format_has_its_best_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_out(monkeypatch.setattr)
    found = find_ways(subject("32-true"), 64, ["RTX 4090"], prices={"4090": 0.5}).ways
    assert {(way.batch_size, way.accumulate_grad_batches) for way in found} == {(64, 1)}
    assert not any("checkpointing" in name for way in found for name in way.changes)  # costs time, and saves nothing
    costs = [way.dollars_per_million for way in found]
    assert costs == sorted(costs)
    for way in found:
        assert way.seconds_per_sample
        assert way.dollars_per_million == pytest.approx(way.seconds_per_sample.likely * 1e6 / 3600 * 0.5)
        assert not any(_beats(other, way) for other in found)


def test_where_little_fits_batches_are_accumulated_and_what_is_offered_fits_as_its_own_prediction_says(
    tight: Ways,
) -> None:
    assert {way.samples for way in tight.ways} == {512}
    assert all(way.footprint.most_device_bytes <= way.budget.usable_bytes for way in tight.ways)
    assert any(way.accumulate_grad_batches > 1 for way in tight.ways)
    way = tight.ways[0]
    module, trainer = Stacked(checkpointed=bool(way.changes)), {"accumulate_grad_batches": way.accumulate_grad_batches}
    settings = {"precision": "bf16-true", "batch_size": way.batch_size, "trainer": trainer}
    alone = predicted(subject_of(module, batch(), **settings), target_of("RTX 4090"))
    expected = alone.footprint_at(way.batch_size)
    assert way.footprint.most_device_bytes == expected.most_device_bytes
    assert way.footprint.step_seconds == expected.step_seconds


def test_a_device_for_which_nothing_fits_is_named(taped: None, not_copied: None) -> None:
    with pytest.raises(MemGuardError, match="divides 7 samples"):
        find_ways(subject(), 7, ["T4"], Limits(multiple_of=2))
    found = find_ways(subject(), 8, ["T4"], Limits(budget_bytes=100 * MIB))
    assert found == Ways((), ("nothing that was tried fits Tesla T4",))


def test_a_step_that_cannot_run_is_an_error(played: Any) -> None:
    def states_alone(trace: Trace) -> Trace:
        if trace.method != "states":
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        return trace

    played(states_alone)
    with pytest.raises(CannotTraceError, match="the step as it is"):
        find_ways(subject_of(torch.nn.Linear(3, 3), torch.zeros(8, 4), step=lambda m, x: m(x).sum()), 8, ["T4"])
    with pytest.raises(MemGuardError, match="it is not a training"):
        find_ways(subject_of(torch.nn.Linear(4, 3), torch.zeros(8, 4), training=False), 8, ["T4"])


def test_several_devices_train_by_each_strategy_of_theirs(
    taped: None, not_copied: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways_module, "shardings_for", lambda *asked: [*shardings_for(*asked)][::2][:2])
    settings = {"strategy": "fsdp", "devices": 2}
    found = find_ways(
        subject_of(Blocky(), torch.zeros(8, 256), precision="bf16-true", trainer=settings), 64, ["H100"]
    ).ways
    assert {way.ranks for way in found} == {2}
    assert {way.samples for way in found} == {64}
    assert {way.changes[0] for way in found} <= {"DDP", "FSDP"}


def test_a_plain_module_is_planned_from_python(taped: None) -> None:
    model = torch.nn.Linear(64, 64)
    found = ways_to_train(model, torch.zeros(8, 64), 32, devices=["T4"], step=lambda m, x: m(x).sum())
    assert all(isinstance(way, TrainingWay) and way.samples == 32 for way in found)


def test_a_step_that_accumulates_keeps_the_gradients_of_the_batch_before() -> None:
    """20 bytes of gradients are freed before the next batch allocates 7 bytes of activations, then gradients again."""
    events = [
        Event("alloc", 0, 20, "gradients"), Event("free", 0, 20, "gradients", step=1),
        Event("alloc", 1, 7, step=1), Event("alloc", 2, 20, "gradients", step=1), Event("free", 1, 7, step=1),
    ]  # fmt: skip
    found = _accumulating(Trace(4, "cpu", "fake", tuple(events)))
    assert [(event.action, event.block) for event in found.events] == [("alloc", 0), ("alloc", 1), ("free", 1)]
