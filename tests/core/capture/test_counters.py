"""Work that recurs later: the steps at which counters come to it are captured, too."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture import capture
from lightning_memguard.core.capture.counters import Counter, _like, _Numbers
from lightning_memguard.core.capture.predict import predict
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import AllocatorSettings

FEATURES = 256
WIDE = 40 * FEATURES * 4  # bytes a sample of what each k-th step makes
CPU = torch.device("cpu")


def footprint_of(model: nn.Module, optimizer: Any = torch.optim.SGD, batch_size: int = 16) -> Footprint:
    batches = batches_from_one(torch.ones(16, FEATURES))
    program = LoopProgram(model, batches, lambda m, x: m(x).sum(), optimizer, CPU)
    return predict(program, batch_size, AllocatorSettings(kind="exact")).footprint_at(batch_size)


class Held:
    """An object that a module holds, and that counts for it."""

    def __init__(self, calls: int) -> None:
        self.calls = calls


class Counts(nn.Module):
    """Makes something wide if a condition on its number of calls holds, which an object that it holds may count."""

    def __init__(self, condition: Any, *, count: str = "int", first: int = 0) -> None:
        super().__init__()
        self.head, self.condition = nn.Linear(FEATURES, 8), condition
        self.held: Any = Held(first) if count == "object" else None
        self.calls: Any = first
        if count == "tensor":
            del self.calls
            self.register_buffer("calls", torch.tensor(first))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counter = self.held or self
        if self.condition(counter.calls):
            x = x.repeat(1, 40)[:, :FEATURES]
        counter.calls += 1
        return self.head(x)


CONDITIONS = {
    "every 16 from 0": lambda n: n % 16 == 0 and n > 0,
    "every 16, the last": lambda n: (n + 1) % 16 == 0,
    "from 1000": lambda n: n >= 1000,
    "after 100": lambda n: n > 100,
    "once": lambda n: n == 300,
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "count"), [*itertools.product(CONDITIONS, ("int", "tensor")), ("every 16, the last", "object")]
)
def test_a_step_that_recurs_is_in_the_peak(name: str, count: str) -> None:
    always, never = (footprint_of(Counts(lambda _, value=value: value, count=count)) for value in (True, False))
    later = footprint_of(Counts(CONDITIONS[name], count=count))
    assert later.peak_allocated_bytes == always.peak_allocated_bytes > never.peak_allocated_bytes + 16 * WIDE // 2
    assert later.high is later.low is None
    assert any(note.startswith("the peak is at step ") for note in later.notes)


class Projects(torch.optim.SGD):
    """Decomposes gradients every 200 steps; the count is where ``place`` says."""

    def __init__(self, parameters: Any, place: str) -> None:
        super().__init__(parameters, 0.1)
        self.place = place

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                holder = {"state": self.state[parameter], "group": group, "attribute": vars(self)}[self.place]
                count = holder.setdefault("count", 0)
                if count and count % 200 == 0 and parameter.dim() > 1:
                    torch.ones(1000, 1000) + 1
                if self.place == "state" or parameter.dim() == 1:
                    holder["count"] += 1
        return super().step(closure)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("place", ["state", "group", "attribute"])
def test_an_optimizer_that_projects_every_200_steps_is_predicted_with_that_step(place: str) -> None:
    found = footprint_of(nn.Linear(FEATURES, 8), lambda p: Projects(p, place))
    plain = footprint_of(nn.Linear(FEATURES, 8), lambda p: torch.optim.SGD(p, 0.1))
    assert found.peak_allocated_bytes > plain.peak_allocated_bytes + 4_000_000
    assert any("the peak is at step 200 (test_counters.py:" in note for note in found.notes)
    assert found.phase == "optimizer"


@pytest.mark.usefixtures("here")
def test_radam_is_predicted_with_the_steps_that_rectify() -> None:
    """It rectifies from its sixth step on, if a number computed from the count of steps passes 5."""
    found = footprint_of(nn.Linear(FEATURES, 8), lambda p: torch.optim.RAdam(p, foreach=False))
    assert any("the peak is at step 1000 (radam.py:" in note for note in found.notes)


@pytest.mark.usefixtures("here")
def test_a_step_that_does_nothing_else_later_is_the_trace_that_it_was() -> None:
    def event_count(condition: Any) -> tuple[int, tuple[str, ...]]:
        batches = batches_from_one(torch.ones(16, FEATURES))
        model = Counts(condition)
        program = LoopProgram(model, batches, lambda m, x: m(x).sum(), torch.optim.SGD, CPU)
        trace = capture.capture_here(program, 8, "fake")
        return len(trace.events), trace.notes

    def prints(calls: int) -> bool:
        return calls % 100 == 0 and calls > 10**7

    assert event_count(prints) == event_count(lambda _: False)


@pytest.mark.usefixtures("here")
def test_what_raises_at_a_later_step_is_named_and_changes_nothing_else() -> None:
    table = [1.0] * 10

    class Looks(Counts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * table[self.calls]

    found = footprint_of(Looks(lambda n: n % 500 == 499))
    assert found.peak_allocated_bytes == footprint_of(Looks(lambda _: False)).peak_allocated_bytes
    assert any("at step 500 (test_counters.py:" in note and "list index out of range" in note for note in found.notes)


def test_a_counter_is_an_int_that_stays_one_in_sums_and_is_copied_as_a_plain_one() -> None:
    counter = _like(5, _Numbers())
    assert type(counter + 1) is type(1 + counter) is type(counter - 1) is Counter
    assert type(counter % 3) is type(copy.deepcopy(counter)) is int
    assert type(pickle.loads(pickle.dumps([counter]))[0]) is int
    assert counter + 1.5 == 6.5
    assert {counter: "five"}[5] == "five"
    assert pow(counter, 2, 7) == 4
    assert torch.full((counter,), counter + 0.5).shape == (5,)


def test_numbers_meet_where_all_of_them_come_to_their_turn() -> None:
    numbers = _Numbers({16: "a:1", 6: "b:2"}, {100: "c:3"})
    assert numbers.place(10**6) == (144, "c:3")
    assert numbers.place(60) == (48, "a:1")
    assert numbers.place(20) == (16, "a:1") or numbers.place(20) == (6, "b:2")
    assert numbers.place(3) == (0, "")


class Iterates(torch.optim.SGD):
    """Every 10 steps, iterates until a value is small, as roots of matrices are found."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            while state["count"] % 10 == 0:
                wide = torch.ones(1000, 1000) * parameter.sum()
                if wide.max() < 1e9:
                    break
        return super().step(closure)


@pytest.mark.usefixtures("here")
def test_a_later_step_that_needs_values_runs_for_real() -> None:
    found = footprint_of(nn.Linear(FEATURES, 8), lambda p: Iterates(p, 0.1))
    assert found.method == "real"
    assert found.peak_allocated_bytes > 8_000_000
