"""The largest batch size that fits and runs: what is passed over, and the words for it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from lightning_memguard.core.capture import capture
from lightning_memguard.core.capture.curve import Curve, Terms
from lightning_memguard.core.capture.predict import Prediction, StepFailsError
from lightning_memguard.core.decision.decision import Budget, Decision, Limits, Request
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.training.planning.plan import plan_on
from lightning_memguard.training.planning.search import largest_that_runs
from lightning_memguard.training.planning.subject import subject_of
from lightning_memguard.units import MIB

BUDGET = Budget(100, 100, 0, "given", "CPU")


class Steps:
    """Stands for a prediction: a byte for each sample, and a step that runs at multiples of some number."""

    curve = Curve(Terms(AllocatorSettings(kind="exact")), "real")

    def __init__(self, runs_at: int = 1) -> None:
        self.runs_at = runs_at

    def footprint_at(self, n: int) -> Footprint:
        return Footprint(n, "cpu", n, n, n)

    def proven_at(self, n: int) -> Steps:
        if n % self.runs_at:
            raise StepFailsError(f"at batch size {n} the step could not run")
        return self


def largest(steps: Steps, **settings: Any) -> Decision:
    return largest_that_runs(
        cast("Prediction", steps), BUDGET, Request(8), footprint_at=lambda known, n: known.footprint_at(n), **settings
    )[0]


def test_a_size_passed_over_for_its_last_batch_is_not_called_the_largest_that_fits() -> None:
    decision = largest(Steps(), refused_by=lambda size: "last_batch" if size > 97 else None)
    assert (decision.batch_size, decision.limited_by) == (97, "last_batch")
    assert decision.reason == (
        "batch size 97 (was 8) fits: 97 of 100 B; a larger one leaves a last batch of a single sample, which batch "
        "norm refuses."
    )
    assert largest(Steps()).limited_by == "memory"


def test_a_step_that_runs_at_a_multiple_gets_one() -> None:
    decision = largest(Steps(8))
    assert (decision.batch_size, decision.multiple_of) == (96, 8)


def test_where_the_step_fails_at_each_size_the_first_failure_is_the_reason() -> None:
    """It is of the largest size that fits; those after it are of sizes that were tried in its place."""
    with pytest.raises(StepFailsError, match="at batch size 100 the step could not run"):
        largest(Steps(101))


def test_a_plan_says_of_a_size_that_only_runs_by_emptying_the_cache_how_often_it_does(
    monkeypatch: pytest.MonkeyPatch, here: None
) -> None:
    """Sixty blocks of 1 MiB and one of 60 MiB are never there together, but the allocator caches both."""

    def written(program: Any, batch_size: int, *_: object, **__: object) -> Trace:
        blocks = [
            Event("alloc", block, MIB, step=step) for step in (0, 1) for block in range(100 * step, 100 * step + 60)
        ]
        large = [Event("alloc", 200 + step, 60 * MIB, step=step) for step in (0, 1)]
        parts = (each for step in (0, 1) for each in (blocks[60 * step : 60 * step + 60], large[step : step + 1]))
        events = [event for part in parts for event in (*part, *(each._replace(action="free") for each in part))]
        return Trace(batch_size, program.device.type, "fake", tuple(events))

    monkeypatch.setattr(capture, "capture_here", written)
    subject = subject_of(torch.nn.Linear(8, 8), torch.zeros(8, 8), step=lambda model, batch: model(batch).sum())
    whole = plan_on(subject, "T4")
    assert whole.fits
    assert whole.asked.retries is None
    most = whole.footprint.most_device_bytes
    short, too_short = (plan_on(subject, "T4", Limits(0.0, most - mib * MIB)).asked for mib in (30, 80))
    assert (short.fits, too_short.fits) == (False, False)
    assert short.reason.endswith("it runs, but empties the cache each step.")
    assert too_short.retries is None
