"""The stages joined: from a program that can run a step to its footprint at any size, in the best way that works."""

from __future__ import annotations

import copy
import math
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import Batches, batches_from_one
from lightning_memguard.core.capture import capture as capturing
from lightning_memguard.core.capture import predict as predicting
from lightning_memguard.core.capture import recorder
from lightning_memguard.core.capture.capture import (
    FIRST,
    CaptureFailedError,
    Captures,
    OutOfTimeError,
    Variant,
    capture_here,
)
from lightning_memguard.core.capture.predict import Prediction, StepFailsError, capture, predict
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.capture.storages import Storages
from lightning_memguard.core.device.out_of_memory import ran_out_of_memory
from lightning_memguard.core.isolation import pool
from lightning_memguard.core.isolation.pool import StoppedError
from lightning_memguard.core.range import Range
from lightning_memguard.core.replay.footprint import footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.simulation.faking import ValueNeededError
from lightning_memguard.core.trace.trace import WORTH_A_NOTE, Trace
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.units import KIB
from tests import tape
from tests.long import long_but

pytestmark = pytest.mark.usefixtures("here")
CPU = torch.device("cpu")
EXACT, CUDA = AllocatorSettings(kind="exact"), AllocatorSettings()
ON_H200 = {"device": torch.device("cuda"), "gpu": gpus.find("NVIDIA H200")}


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


def program_of(step: Callable[[Any, Any], Any] = plain, samples: int = 16, **options: Any) -> LoopProgram:
    """One weight of 4 x 8 floats (128 bytes); 16 bytes of input and 32 of output a sample."""
    options.setdefault("model", None)
    options["model"] = options["model"] or nn.Linear(4, 8, bias=False)
    options = {"batches": batches_from_one(torch.ones(samples, 4)), "optimizer": momentum, "device": CPU, **options}
    return LoopProgram(step=step, **options)


def predicted(step: Callable[[Any, Any], Any] = plain, batch_size: int = 16, **options: Any) -> Prediction:
    return predict(program_of(step, **options), batch_size, EXACT)


class Script:
    """In place of captures: what each of them returns or raises, of the traces of `plain` on a tape.

    Attributes:
        asked: the batch sizes that were asked for.
        time_is_up: called as `Captures` calls what it is given, has each later capture come after the deadline.
    """

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.step: Callable[[Trace, str, Variant], Trace] = lambda trace, method, variant: trace
        self.is_late: Callable[[int, str, Variant], bool] = lambda size, method, variant: False

    def time_is_up(self, *_: object) -> int:
        self.is_late = lambda size, method, variant: True
        return 0

    def trace(self, task: Any) -> Trace:
        _, size, method, variant = task
        if self.is_late(size, method, variant):
            raise OutOfTimeError("time was up (max_setup_seconds)")
        self.asked.append(size)
        trace = tape.read("one_weight").growth.at(size)
        try:
            return replace(self.step(trace, method, variant), method=method, seconds=0.001)
        except Exception as error:
            raise capturing._failure(error) from error


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(Captures, "_whole", lambda _, task: script.trace(task))
    return script


def for_real(trace: Trace, method: str, variant: Variant) -> Trace:
    """The step reads a value."""
    if method in ("fake", "worst-case"):
        raise ValueNeededError("the step compares the value of a tensor")
    return trace


def by_value(trace: Trace, method: str, variant: Variant) -> Trace:
    """Real steps, each with as many blocks of 32 bytes a sample as its draw says."""
    trace = for_real(trace, method, variant)
    for _ in range(variant.number):
        trace = making(trace, "activations", 32 * trace.batch_size)
    return trace


def making(trace: Trace, part: str, nbytes: int) -> Trace:
    """The trace with a block that its forward pass makes, and that stays."""
    made, *events = trace.plus({part: nbytes}).events
    return replace(trace.plus({part: nbytes}), events=(made._replace(phase="forward"), *events))


# Weight, momentum and gradient; the batch, and the gradient of the output, one number that is expanded, as the product
# copies it; the loss and its gradient.
def peak(n: int) -> int:
    return 128 + 128 + 128 + n * (16 + 32) + 4 + 4


# A plain module in PyTorch's own loop


def test_the_footprint_at_any_size_is_the_sum_one_does_by_hand():
    prediction = predicted()
    for n in (16, 17, 100, 4096):
        footprint = prediction.footprint_at(n)
        assert footprint.peak_allocated_bytes == peak(n)
        assert {part: nbytes for part, nbytes in footprint.parts.items() if nbytes} == {
            "parameters": 128,
            "gradients": 128,
            "optimizer_state": 128,
            "batch": 16 * n,
            "workspaces": 32 * n,
            "activations": 8,
        }
        known = (footprint.batch_size, footprint.phase, footprint.method, footprint.notes)
        assert known == (n, "backward", "fake", ())


def test_without_an_optimizer_there_are_gradients_alone():
    trace = capture(program_of(optimizer=None), 2, "fake")
    parts = {"parameters", "batch", "temporaries", "activations", "gradients", "workspaces"}
    assert {event.part for event in trace} == parts


def test_an_inference_keeps_nothing_for_a_backward_pass_and_drops_nothing_out():
    """Each of three tanh in a row: a result dies with the next: two of 32 bytes a sample at once."""
    module = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Dropout(0.5), nn.Tanh(), nn.Tanh(), nn.Tanh())
    program = program_of(lambda model, x: model(x), model=module, training=False)
    made = {event.operator for event in capture(program, 2, "fake") if event.action == "alloc" and event.module}
    assert made == {"aten.mm.default", "aten.tanh.default"}
    footprint = predict(program, 2, EXACT).footprint_at(100)
    assert {part: nbytes for part, nbytes in footprint.parts.items() if nbytes} == {
        "parameters": 128,
        "batch": 16 * 100,
        "temporaries": 2 * 32 * 100,
    }
    assert module.training


def test_what_the_process_takes_beside_its_tensors_is_added_and_gives_bounds_where_it_was_not_measured(script):
    bare, with_context, unmeasured = (
        predict(program_of(), 16, EXACT, context_bytes=extra).footprint_at(16)
        for extra in (Range.exactly(0), Range.exactly(1000), Range(1000, 2000, 3000))
    )
    assert with_context == replace(bare, peak_device_bytes=bare.peak_device_bytes + 1000)
    assert unmeasured.low is not None
    assert unmeasured.high is not None
    assert [each.outside_bytes for each in (unmeasured.low, unmeasured, unmeasured.high)] == [1000, 2000, 3000]
    assert unmeasured.most_device_bytes == unmeasured.peak_reserved_bytes + 3000


def test_bf16_mixed_keeps_weights_of_four_bytes_and_computes_in_two():
    trace = capture(program_of(precision="bf16-mixed"), 2, "fake")
    taken = [(event.part, event.phase, event.nbytes) for event in trace if event.action == "alloc" and event.step == 0]
    assert ("parameters", "setup", 128) in taken
    # The weight (4 x 8), the batch (2 x 4), the output (2 x 8) and the loss, in two bytes each.
    assert [nbytes for part, phase, nbytes in taken if phase == "forward"] == [64, 16, 32, 2]
    assert ("gradients", "backward", 128) in taken


@pytest.mark.parametrize(
    ("precision", "nbytes"), [("32-true", 128), ("bf16-true", 64), ("16-true", 64), ("64-true", 256)]
)
def test_true_precision_is_that_of_the_weights(precision, nbytes):
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x.to(next(model.parameters()).dtype)).sum()

    parts = predicted(step, precision=precision).footprint_at(16).parts
    assert (parts["parameters"], parts["optimizer_state"]) == (nbytes, nbytes)


def test_a_tensor_that_a_module_keeps_without_registering_it_stays_on_the_host():
    module = nn.Linear(4, 8)
    module.grid = torch.zeros(100)
    assert [predicted(model=module, **where).footprint_at(16).parts["buffers"] for where in ({}, ON_H200)] == [400, 0]


def test_an_unknown_precision_is_refused_with_the_known_ones():
    with pytest.raises(MemGuardError) as error:
        program_of(precision="bf16")
    assert str(error.value) == (
        "precision='bf16' is unknown; choose one of 16-mixed, 16-true, 32-true, 64-true, bf16-mixed, bf16-true."
    )


def test_the_loops_own_name_for_the_batch_keeps_it_alive_until_the_next():
    """`for batch in loader:` holds it through backward and step, even where no gradient needs it."""
    trace = capture(program_of(lambda model, x: model.weight.sum() + 0 * x.sum()), 2, "fake")
    dies = [event.phase for event in trace if event.action == "free" and event.part == "batch" and event.step == 0]
    assert dies in ([], ["zero_grad"])


# The ways to capture a step


def needs_a_value(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).sum()
    if loss.item() > 1e9:
        loss = loss.tanh()
    return loss


def keeps_by_mask(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)[x[:, 0] > 0].sum()


def raises(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such column\nand more lines")


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_mask_is_given_its_worst_case_and_a_note_says_so(on_gpu):
    where, settings = (ON_H200, CUDA) if on_gpu else ({}, EXACT)
    prediction = predict(program_of(keeps_by_mask, **where), 16, settings)
    assert prediction.curve.method == "worst-case"
    assert prediction.footprint_at(100_000).notes == ("indexing with a mask was assumed to return its largest result",)
    if not on_gpu:
        found = prediction.footprint_at(100)
        assert found.notes == (), "too few bytes"
        assert found.low is not None
        assert found.low.allocated_bytes == found.peak_allocated_bytes - 99 * 32, "no rows"


def refuses(x: torch.Tensor) -> torch.Tensor:
    if x.max() > 3:
        raise ValueError(f"{x} is too large")
    if not (x < 5).all():
        raise ValueError
    if torch.isnan(x).any():
        warnings.warn("a value is NaN", stacklevel=1)
    if torch.isinf(x.sum()):
        return x * 0
    torch.distributions.Normal(x, x.exp())  # which checks its arguments
    return x


def may_refuse_or_double(x: torch.Tensor) -> torch.Tensor:
    if x.max() > 3:
        if len(x) > 9:
            raise ValueError
        x = x * 2
    return x


@pytest.mark.parametrize(("reads", "method"), [(refuses, "fake"), (may_refuse_or_double, "real")])
def test_what_a_step_only_refuses_needs_no_values(reads, method):
    """A training goes on where its arguments are valid."""
    prediction = predicted(lambda model, x: plain(model, reads(x)))
    assert prediction.curve.method == method
    if method == "fake":
        (note,) = prediction.footprint_at(4).notes
        first = refuses.__code__.co_firstlineno
        lines = ", ".join(f"{__file__}:{first + line}" for line in (1, 3, 5))
        assert note == f"checks of values are assumed to find no error, NaN or infinity: {lines} and others"


def test_the_worst_case_of_a_mask_is_what_a_mask_of_ones_really_takes():
    """The example is all ones, so that a real step keeps every row."""
    program = program_of(keeps_by_mask)
    worst, real = (
        [event[2:] for event in capture(program, 16, method) if event.phase in ("forward", "backward")]
        for method in ("worst-case", "real")
    )
    assert 16 * 32 in [nbytes for nbytes, *_, operator, _, _, _, _ in worst if operator == "aten.index.Tensor"]
    assert worst == real


def test_a_part_of_the_step_under_inference_mode_takes_what_it_takes_under_no_grad():
    """A teacher's forward pass: its operators come whole, and their kernels' scratch counts all the same."""

    def step(guard):
        def run(model, x):
            with guard():
                model(x)
            return model(x).sum()

        return run

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3))
    batch = batches_from_one(torch.zeros(4, 3, 16, 16))
    under = [
        capture(LoopProgram(model, batch, step(guard), None, torch.device("cpu")), 8, "fake").events
        for guard in (torch.no_grad, torch.inference_mode)
    ]
    taken = [[(event.nbytes, event.part) for event in events if event.action == "alloc"] for events in under]
    assert taken[0] == taken[1]
    assert any(part == "workspaces" for _, part in taken[1])


@pytest.mark.usefixtures("here")
def test_a_step_that_branches_on_a_value_runs_for_real_at_small_sizes():
    prediction = predicted(needs_a_value)
    assert (prediction.curve.method, prediction.curve.scalable) == ("real", True)
    assert prediction.curve.growth is not None
    assert prediction.curve.growth.sizes == (2, 4, 8, 16), "the last is the example's own"
    assert len(prediction.curve.notes) == 1
    assert "(The step compares the value of a tensor" in prediction.curve.notes[0]


def test_no_larger_size_runs_for_real_even_where_the_answer_is_for_one(script):
    script.step = for_real
    prediction = predicted(batch_size=100_000)
    assert prediction.footprint_at(100_000).method == "real"
    assert prediction.proven_at(100_000) is prediction
    assert max(script.asked) <= 16


def test_a_real_run_takes_what_a_fake_one_would_however_large_the_example():
    """The example is 16 kB; what is asked for is 16 samples, 1 kB in all."""
    prediction = predicted(needs_a_value, samples=1000)
    assert prediction.curve.method == "real"
    assert prediction.footprint_at(16).peak_allocated_bytes == peak(16)


@pytest.mark.children
def test_a_real_run_leaves_weights_and_random_state_as_they_were():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
    weights, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert predicted(needs_a_value, model=model).curve.method == "real"
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.grad for p in model.parameters()] == [None, None]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_step_that_raises_leaves_the_states_alone_which_any_size_has_and_says_why(on_gpu):
    where, settings, block = (ON_H200, CUDA, 512) if on_gpu else ({}, EXACT, 128)
    prediction = predict(program_of(raises, **where), 16, settings)
    assert (prediction.curve.method, prediction.curve.scalable) == ("states", False)
    line = raises.__code__.co_firstlineno + 1
    assert prediction.curve.notes == (
        f"the step could not run on a copy (ValueError: no such column, at {__file__}:{line})",
    )
    assert {part: nbytes for part, nbytes in prediction.footprint_at(16).parts.items() if nbytes} == {
        "parameters": block,
        "gradients": block,
        "optimizer_state": block,
    }
    assert prediction.footprint_at(4096) == replace(prediction.footprint_at(16), batch_size=4096)


def test_where_not_even_the_optimizer_can_be_made_both_reasons_are_given(script):
    def no_optimizer(trace: Trace, method: str, variant: Variant) -> Trace:
        raise RuntimeError("no such optimizer" if method == "states" else "no such column")

    script.step = no_optimizer
    with pytest.raises(CannotTraceError) as error:
        predicted()
    place = f"{__file__}:{no_optimizer.__code__.co_firstlineno + 1}"
    assert str(error.value) == (
        f"the step could not run on a copy (RuntimeError: no such column, at {place}); "
        f"the optimizer could not run on a copy (RuntimeError: no such optimizer, at {place})"
    )


def test_one_size_alone_is_captured_where_the_batch_cannot_be_resized(script):
    prediction = predict(program_of(), 16, EXACT, scalable=False)
    assert (prediction.curve.scalable, prediction.curve.growth, list(prediction.curve.captured)) == (False, None, [16])
    assert prediction.footprint_at(16).peak_allocated_bytes == peak(16)


# How it grows


def test_three_small_sizes_are_run_and_no_other_whatever_is_asked(script):
    prediction = predicted()
    for n in (1, 16, 100, 10**6):
        assert prediction.footprint_at(n).peak_allocated_bytes == peak(n)
    assert script.asked == [4, 8, 16]


def test_a_square_is_checked_at_a_fourth_size(script):
    script.step = lambda trace, *_: trace.plus({"activations": 4 * trace.batch_size**2})
    prediction = predicted()
    assert prediction.curve.growth is not None
    assert prediction.curve.growth.degree == 2
    assert script.asked == [4, 8, 16, 32]
    assert prediction.footprint_at(1000).peak_allocated_bytes == peak(1000) + 4 * 1000**2


def test_a_step_that_runs_differently_at_each_size_is_captured_at_each_size_asked_for(script):
    script.step = lambda trace, *_: trace.plus({str(layer): 32 for layer in range(trace.batch_size // 4)})
    prediction = predicted()
    assert (prediction.curve.method, prediction.curve.growth, prediction.curve.scalable) == ("fake", None, True)
    before = len(script.asked)
    for _ in range(2):
        assert prediction.footprint_at(20).peak_allocated_bytes == peak(20) + 5 * 32
    assert script.asked[before:] == [20], "captured once"


def test_a_step_that_refuses_small_batches_is_run_at_the_size_asked_for_and_its_doubles(script):
    def twenty_or_more(trace: Trace, *_: Any) -> Trace:
        if trace.batch_size < 20:
            raise ValueError("too few samples")
        return trace

    script.step = twenty_or_more
    prediction = predicted(batch_size=24)
    assert prediction.curve.growth is not None
    assert prediction.curve.growth.sizes == (24, 48, 96)
    assert prediction.footprint_at(100).peak_allocated_bytes == peak(100)


def test_a_step_that_runs_at_one_size_alone_is_known_at_that_size_alone(script):
    def sixteen(trace: Trace, *_: Any) -> Trace:
        if trace.batch_size != 16:
            raise ValueError("not sixteen")
        return trace

    script.step = sixteen
    prediction = predicted()
    assert (prediction.curve.method, prediction.curve.scalable) == ("fake", False)
    assert prediction.footprint_at(16).peak_allocated_bytes == peak(16)


# The proof at the chosen size


def test_a_size_that_runs_as_it_grew_is_proven(script):
    prediction = predicted()
    assert prediction.proven_at(50) is prediction
    assert script.asked == [4, 8, 16, 50]


def test_a_size_that_was_captured_needs_no_proof(script):
    prediction = predicted()
    assert prediction.proven_at(16) is prediction
    assert script.asked == [4, 8, 16]


def test_a_size_that_runs_otherwise_puts_an_end_to_growth_and_a_note_says_so(script):
    script.step = lambda trace, *_: trace.plus({"activations": 32 * trace.batch_size * (trace.batch_size > 40)})
    grown = predicted()
    proven = grown.proven_at(50)
    assert proven.curve.growth is None
    assert proven.curve.notes == (
        "memory at batch size 50 is off the line through others: each size is predicted by itself",
    )
    assert proven.footprint_at(50).peak_allocated_bytes == peak(50) + 50 * 32
    assert proven.footprint_at(30).peak_allocated_bytes == peak(30)
    assert grown.footprint_at(50).peak_allocated_bytes == peak(50), "the first prediction was edited"


def test_a_size_at_which_the_step_raises_is_told_apart_from_one_that_grows_otherwise(script):
    def even(trace: Trace, *_: Any) -> Trace:
        if trace.batch_size % 2:
            raise ValueError("samples come in pairs")
        return trace

    script.step = even
    prediction = predicted()
    with pytest.raises(StepFailsError, match=r"at batch size 51 .* samples come in pairs"):
        prediction.proven_at(51)
    assert prediction.proven_at(50) is prediction


# A GPU that is not there


def on_an_h200(step: Callable[[Any, Any], Any] = plain, **options: Any) -> LoopProgram:
    return program_of(step, **ON_H200, **options)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:2"])
def test_a_step_for_cuda_runs_on_one_fake_device_whichever_is_meant(device):
    seen = []

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append({x.device, model.weight.device})
        return plain(model, x)

    trace = capture(replace(on_an_h200(step), device=torch.device(device)), 4, "fake")
    assert (trace.device, trace.notes) == ("cuda", ())
    assert seen == [{torch.device("cuda:0")}] * 2


def tries(x: torch.Tensor, size: int) -> int:
    """Return in how many parts a step goes on that asks for a buffer first."""
    try:
        torch.empty(size, dtype=torch.uint8, device=x.device)
    except RuntimeError as error:
        return 4 if ran_out_of_memory(error) else 3
    return 1


def in_parts(count: Callable[[torch.Tensor], int]) -> Callable[[Any, Any], torch.Tensor]:
    return lambda model, x: sum(model(part).sum() for part in x.chunk(count(x)))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("program", [program_of, on_an_h200])
def test_a_request_for_more_than_the_device_has_raises_and_a_step_that_catches_that_goes_on(program):
    parts = capture(program(in_parts(lambda x: tries(x, 1 << 46))), 16, "fake")
    known = capture(program(in_parts(lambda _: 4)), 16, "fake")
    assert [(event.action, event.nbytes) for event in parts.events] == [
        (event.action, event.nbytes) for event in known.events
    ]
    assert "64.0 TiB raises, and the step goes on: " in "".join(parts.notes)
    granted = capture(program(in_parts(lambda x: tries(x, 1 << 20))), 16, "fake")
    assert any(event.nbytes == 1 << 20 for event in granted.events)
    assert not granted.notes


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("program", [program_of, on_an_h200])
def test_a_step_that_catches_no_such_request_is_predicted_with_it(program):
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum() + torch.zeros(1 << 44, device=x.device).sum()

    trace = capture(program(step), 16, "fake")
    assert max(event.nbytes for event in trace.events) == 1 << 46
    assert not trace.has_note("refused")


@pytest.mark.usefixtures("here")
def test_with_less_room_than_a_step_takes_each_request_past_it_raises():
    def skips(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        try:
            return model(x.repeat(1000, 1)).sum()
        except torch.OutOfMemoryError:
            return model(x).sum()

    room = Variant(room_bytes=100 * KIB)
    assert capture(on_an_h200(skips), 4, "fake", room).has_note("refused")
    with pytest.raises(CaptureFailedError, match="out of memory"):
        capture(on_an_h200(lambda model, x: model(x.repeat(1000, 1)).sum()), 4, "fake", room)


@pytest.mark.usefixtures("here")
def test_without_a_limit_what_is_alive_is_not_added_up_at_each_request(monkeypatch: pytest.MonkeyPatch):
    asked = list[Storages]()
    monkeypatch.setattr(Storages, "alive_bytes", property(lambda self: asked.append(self) or 0))
    capture(on_an_h200(lambda model, x: sum(model(x + place).sum() for place in range(50))), 4, "fake")
    assert len(asked) < 50


def test_a_size_that_was_asked_for_is_not_replayed_again_once_a_capture_agrees():
    curve = tape.read("cnn_gpu")
    found = curve.footprint_at(48)
    assert curve.confirmed_by(curve.trace_at(48)).footprint_at(48) is found
    cut = replace(curve, stopped="time was up")
    asked = cut.footprint_at(4096)
    assert cut.confirmed_by(cut.trace_at(4096)).footprint_at(4096).high != asked.high


@pytest.mark.parametrize("n", [3, 100, 2048])
def test_growth_on_a_gpu_that_is_not_there_is_a_capture(n):
    grown = predict(on_an_h200(), 16, CUDA)
    assert grown.curve.growth is not None
    assert grown.trace_at(n).events == capture(on_an_h200(), n, "fake").events
    assert grown.proven_at(n) is grown


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_step_that_has_to_run_for_real_runs_on_the_cpu_there_and_a_note_says_so():
    prediction = predict(on_an_h200(runs_on_no_fake), 16, CUDA)
    found = prediction.footprint_at(100)
    assert (prediction.curve.method, found.device) == ("real", "cuda")
    assert "the step ran on the CPU, whose kernels may keep other tensors than the GPU's" in found.notes


def runs_on_no_fake(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:
        raise ValueError("no kernel")
    return plain(model, x)


def test_the_range_of_a_step_that_ran_on_the_cpu_for_a_gpu_holds_other_layouts():
    of_batch = {}
    for step in (plain, runs_on_no_fake):
        found = predict(on_an_h200(step), 16, CUDA).footprint_at(100)
        states = sum(found.parts[part] for part in ("parameters", "optimizer_state"))
        of_batch[step] = [peak.allocated_bytes - states for peak in (found.lowest, found.peak, found.highest)]
    least, likely, most = of_batch[runs_on_no_fake]
    assert least <= likely / 2
    assert most >= 2 * likely
    assert least < of_batch[plain][1] < most


# Values that a step reads for a GPU


def grown_if(is_grown: Callable[[torch.Tensor], Any]) -> Callable[[Any, Any], torch.Tensor]:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return plain(model, torch.cat([x, x]) if is_grown(x) else x)

    return step


@pytest.mark.parametrize(
    "drawn",
    [
        lambda _: torch.rand(1) < 0.05,
        lambda _: torch.rand(1) < 0.95,
        lambda x: torch.rand((), device=x.device).item() > 0.5,
        lambda x: x.new_empty(1).bernoulli_(0.5).bool().item(),
        lambda x: torch.rand_like(x[0, 0]) > 0.5,
        lambda _: torch.randint(0, 8, (1,)).tolist()[0] == 7,
    ],
)
def test_a_branch_on_a_random_number_is_predicted_both_ways(drawn):
    least, most = (predict(on_an_h200(grown_if(lambda _, grown=grown: grown)), 16, CUDA) for grown in (False, True))
    prediction = predict(on_an_h200(grown_if(drawn)), 16, CUDA)
    for size in (16, 1000):
        found = prediction.footprint_at(size)
        assert (prediction.curve.method, prediction.curve.growth is not None) == ("valued", True)
        assert found.lowest.allocated_bytes == least.footprint_at(size).lowest.allocated_bytes
        assert found.highest.allocated_bytes == most.footprint_at(size).highest.allocated_bytes


def test_a_size_that_the_batch_says_is_known_on_a_gpu_that_is_not_there():
    lengths = torch.tensor([1, 4, 2, 3] * 4)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        x, lengths = batch
        longest = lengths.max().item()
        return model(x[:, :longest].repeat(1, 4 // longest)).sum()

    batches = batches_from_one([torch.ones(16, 4), lengths])
    prediction = predict(on_an_h200(step, batches=batches), 16, CUDA)
    assert prediction.curve.method == "valued"
    fixed = predict(on_an_h200(lambda m, batch: m(batch[0][:, :4].repeat(1, 1)).sum(), batches=batches), 16, CUDA)
    for size in (16, 1000):
        assert prediction.footprint_at(size).peak == fixed.footprint_at(size).peak


@pytest.mark.parametrize(
    "computed",
    [
        lambda z: z.sum().item() > 1e9,
        lambda z: z.sum() > 1e9,
        lambda z: max(z.sum(1).tolist()) > 1e9,
        lambda z: z.detach().cpu().numpy().max() > 1e9,
        lambda z: torch.equal(z, z + 1),
        lambda z: torch.allclose(z, z + 1),
    ],
)
def test_values_that_a_step_computes_are_read_in_a_real_run_and_the_layouts_are_the_gpus(computed):
    def step_if(computed: Callable[[torch.Tensor], Any], model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        z = model(x)
        return z.tanh().sum() if computed(z[:1]) else z.sum()

    model = nn.Linear(4, 32, bias=False)  # of which fake tensors know no values
    steps = partial(step_if, computed), partial(step_if, lambda _: False)
    prediction, known = (predict(on_an_h200(each, model=model), 16, CUDA) for each in steps)
    assert prediction.curve.method == "answered"
    found, fixed = (each.footprint_at(1000).peak_allocated_bytes for each in (prediction, known))
    assert found == pytest.approx(fixed, abs=4 * KIB)


@pytest.mark.parametrize("known", [False, True])
def test_a_ctc_loss_whose_lengths_are_on_the_gpu_has_its_variables(known):
    """`log_alpha` of LossCTC.cu: two of each label and one more, of each sample and step."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        log_probs, labels = model(x).expand(5, -1, -1), torch.ones(len(x), 3, dtype=torch.long, device=x.device)
        lengths = torch.full((len(x),), 2, device=x.device) if known else x[:, 0].long()
        return nn.functional.ctc_loss(log_probs, labels, torch.full((len(x),), 5), lengths)

    prediction = predict(on_an_h200(step), 16, CUDA)
    made = [each.nbytes for each in prediction.trace_at(100).events if each.operator == "aten._ctc_loss.default"]
    assert prediction.curve.method == "fake"
    assert 4 * 100 * 5 * (2 * (2 if known else 3) + 1) in made


def test_sizes_that_a_step_computes_are_those_of_a_real_run_within_a_range():
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        z = model(x)
        counts = (z.detach()[:, 0] * 0 + 2).long()
        many = z.repeat_interleave(counts, dim=0)
        return many[: counts.sum().item()].tanh().sum()

    def fixed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).repeat_interleave(2, dim=0).tanh().sum()

    model = nn.Linear(4, 32, bias=False)
    prediction, fixed = (predict(on_an_h200(each, model=model), 16, CUDA) for each in (step, fixed))
    found, known = prediction.footprint_at(16), fixed.footprint_at(16)
    assert prediction.curve.method == "answered"
    assert any("other values were not tried" in note for note in found.notes)
    assert found.lowest.allocated_bytes < known.peak_allocated_bytes < found.highest.allocated_bytes


def test_states_alone_are_made_on_a_gpu_that_is_not_there():
    prediction = predict(on_an_h200(raises, optimizer=torch.optim.Adam), 16, CUDA)
    assert prediction.curve.method == "states"
    parts = prediction.footprint_at(16).parts
    assert (parts["parameters"], parts["optimizer_state"]) == (512, 1024)


def test_a_step_that_runs_otherwise_at_each_small_size_for_real_runs_at_the_size_asked_for(script):
    def branches(trace: Trace, *asked: Any) -> Trace:
        return for_real(trace, *asked).plus({"activations": 32} if trace.batch_size == 4 else {})

    script.step = branches
    prediction = predicted()
    assert (prediction.curve.method, prediction.curve.growth, prediction.curve.scalable) == ("real", None, True)
    assert [prediction.footprint_at(n).peak_allocated_bytes for n in (16, 20)] == [peak(16), peak(20)]


# Values of real batches


@dataclass(frozen=True)
class Drawn:
    """Batches of n samples, whose first value is the number of the draw."""

    multiple: int = 1

    def has(self, batch_size: int) -> bool:
        return True

    def batch(self, batch_size: int, draw: int) -> torch.Tensor:
        batch = torch.ones(batch_size, 4)
        batch[0, 0] = draw
        return batch


class Longer(Drawn):
    """As many features as the draw's number, but four at first."""

    def batch(self, batch_size: int, draw: int) -> torch.Tensor:
        return torch.ones(batch_size, draw or 4)


@pytest.mark.parametrize(("draws", "changes"), [(Drawn(), False), (Longer(), True)])
def test_batches_change_their_shape_where_some_of_those_drawn_have_another(draws, changes):
    batches = replace(batches_from_one(torch.ones(16, 4)), draws=draws)
    program = LoopProgram(nn.Linear(4, 4), batches, lambda model, x: model(x).sum(), None, torch.device("cpu"))
    assert program.changes_shape(16) is changes


def drawn() -> Batches:
    return replace(batches_from_one(torch.ones(16, 4)), draws=Drawn())


def more_layers_for_larger_values(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return sum(model(x).tanh().sum() for _ in range(1 + int(x[0, 0])))


@pytest.mark.usefixtures("here")
def test_where_memory_depends_on_values_the_largest_of_some_draws_is_predicted_with_a_range(monkeypatch):
    """Each tanh keeps 32 bytes a sample."""
    monkeypatch.setattr("lightning_memguard.core.capture.predict._MOST_SECONDS", math.inf)  # on a busy machine, too
    prediction = predicted(more_layers_for_larger_values, batches=drawn())
    assert (prediction.curve.method, prediction.curve.growth) == ("real", None)
    for n in (16, 20, 20_000):
        found = prediction.footprint_at(n)
        assert found.low is not None
        assert found.high is not None
        spread = found.peak_allocated_bytes - found.low.allocated_bytes
        assert spread == pytest.approx(3 * 32 * n, abs=3 * 8)
        assert found.high.allocated_bytes == found.most_device_bytes == found.peak_allocated_bytes + spread
        said = "the memory of a step depends on its batch: " in " ".join(found.notes)
        assert said == (spread >= WORTH_A_NOTE)
    assert said


def test_real_batches_of_every_size_come_from_the_draws(script):
    script.step = for_real
    prediction = predicted(batches=drawn())
    assert prediction.curve.growth is not None
    assert set(script.asked) == {2, 4, 8, 16}
    assert prediction.proven_at(24) is prediction
    assert 24 in script.asked


@pytest.mark.parametrize(("limit", "largest", "draws"), [("_MOST_SECONDS", 4, 4), ("_TOO_SLOW_SECONDS", 2, 0)])
def test_a_size_that_would_take_too_long_to_run_is_drawn_on_from_those_that_ran(
    script, monkeypatch, limit, largest, draws
):
    monkeypatch.setattr("lightning_memguard.core.capture.predict._MOST_SECONDS", 0.0)
    monkeypatch.setattr(f"lightning_memguard.core.capture.predict.{limit}", 0.0)
    script.step = by_value
    prediction = predicted(batches=drawn())
    assert len(prediction.curve.variants) == draws
    ran, beyond = (prediction.footprint_at(n) for n in (8, 8000))
    assert beyond.peak_allocated_bytes == pytest.approx(1000 * ran.peak_allocated_bytes, rel=0.5)
    assert f"the memory at batch size 8000 is extrapolated from batch size {largest}" in " ".join(beyond.notes)
    assert pickle.loads(pickle.dumps(prediction.curve.packed())).footprint_at(8000) == beyond
    assert max(script.asked) <= 4


def test_a_step_that_fails_for_real_at_the_chosen_size_says_so(script):
    def at_most_16(trace: Trace, *asked: Any) -> Trace:
        if trace.batch_size > 16:
            raise ValueError("too many")
        return by_value(trace, *asked)

    script.step = at_most_16
    prediction = predicted(batches=drawn())
    assert prediction.footprint_at(20).peak_allocated_bytes > prediction.footprint_at(16).peak_allocated_bytes
    with pytest.raises(StepFailsError, match="too many"):
        prediction.proven_at(20)


def keeps_half(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    kept = model(x)[x[:, 0] > 0]
    return kept.tanh().exp().sin().sum()


def test_a_mask_that_keeps_half_of_a_real_batch_is_given_half_of_any_size():
    batch = torch.ones(16, 4)
    batch[::2] = -1
    prediction = predicted(keeps_half, batches=batches_from_one(batch))
    assert prediction.curve.method == "sampled"
    found, real = prediction.trace_at(16), capture(prediction.program, 16, "real")
    assert [event[2:] for event in found if event.phase == "forward"] == [
        event[2:] for event in real if event.phase == "forward"
    ]
    tanh = [event.nbytes for event in prediction.trace_at(100) if event.operator == "aten.tanh.default"]
    assert tanh[0] == 32 * 50
    assert prediction.curve.ceiling is not None


# Random numbers that a step draws


def resizes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Makes 1 to 8 rows of each sample, as multi-scale training makes smaller and larger images of it."""
    return plain(model, x.repeat_interleave(random.randint(1, 8), 0))


def drops_layers(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return sum(model(x).tanh().sum() for layer in range(4) if layer == 0 or random.random() < 0.5)


def passes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return sum(model(x).tanh().sum() for _ in range(int(np.random.randint(1, 5))))


@pytest.mark.parametrize("step", long_but([drops_layers], [resizes, drops_layers, passes]))
def test_sizes_that_a_step_draws_are_predicted_at_their_largest_whatever_the_seed(step: Any) -> None:
    found = []
    for seed in (0, 3):
        random.seed(seed)
        np.random.seed(seed)
        prediction = predicted(step)
        assert prediction.proven_at(50) is prediction, "captured with the numbers that were predicted"
        found.append(prediction.footprint_at(50))
    first, second = found
    assert first == second
    assert [doubt.kind for doubt in first.doubts] == ["draws"]
    assert first.lowest.allocated_bytes < first.peak_allocated_bytes < first.highest.allocated_bytes
    assert "the memory of a step depends on random numbers that it draws" in first.notes[-1]


def test_the_largest_size_that_a_step_can_draw_is_within_its_range() -> None:
    def largest(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return plain(model, x.repeat_interleave(8, 0))

    found, most = predicted(resizes).footprint_at(50), predicted(largest).footprint_at(50)
    assert found.lowest.allocated_bytes < most.peak_allocated_bytes <= found.highest.allocated_bytes


def test_random_numbers_that_change_no_size_make_no_range(script) -> None:
    script.step = lambda trace, *_: replace(trace, draws=True)
    assert predicted().footprint_at(50).doubts == ()
    assert script.asked == [4, 8, 16, 4, 4, 4], "three seeds tell"


# What grows from step to step


class Remembers(torch.optim.SGD):
    """Keeps the last gradients, ``history_size`` at most, as LBFGS keeps pairs."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["history_size"] = 10

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("old", []).append(parameter.grad.clone())


def test_a_history_is_predicted_where_it_ends():
    found = predicted(optimizer=Remembers).footprint_at(16)
    assert found.parts["optimizer_state"] == 10 * 128, "two of them were there, the second of them after the peak"
    assert found.low is not None
    assert found.high is not None
    assert found.high.allocated_bytes == found.peak_allocated_bytes == found.low.allocated_bytes + 9 * 128
    assert "the optimizer's history grows to its `history_size`, by 1.1 KiB after two steps" in found.notes


def test_what_each_step_leaves_behind_is_reported():
    class Collects(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 8, bias=False)
            self.outputs: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            self.outputs.append(y.detach().clone())
            return y

    trace = capture(program_of(model=Collects()), 16, "fake")
    assert max(event.step for event in trace) == 3, "two more steps were looked at"
    assert "each step leaves 512 B behind; what more steps leave is not included" in trace.notes


# Until a deadline


@pytest.fixture
def time_is_up(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A function that lets 1,000 seconds pass."""

    def time_is_up(*_: object) -> int:
        for module in (pool, capturing):
            monkeypatch.setattr(module, "monotonic", lambda: monotonic() + 1000)
        return 0

    return time_is_up


def until_deadline(*programs: LoopProgram, **options: Any) -> Captures:
    return Captures(*programs, deadline=monotonic() + 900, **options)


def test_a_compiled_step_that_takes_too_long_is_not_said_to_have_failed() -> None:
    assert predicting._reason("compiled", OutOfTimeError("time was up (max_setup_seconds)")) == (
        "time was up (max_setup_seconds): what torch.compile makes of the step was not captured"
    )


@pytest.mark.children
def test_what_was_captured_until_the_deadline_is_used_with_a_range(time_is_up: Callable[..., int]) -> None:
    program = program_of()
    with until_deadline(program, next_size=time_is_up):
        prediction = predict(program, 64, EXACT).proven_at(64)
    assert prediction.curve.scalable
    assert (
        "time was up (max_setup_seconds): the step was captured at batch sizes 4 and 8 alone" in prediction.curve.notes
    )
    for found in (prediction.footprint_at(64), pickle.loads(pickle.dumps(prediction.curve.packed())).footprint_at(64)):
        assert (found.peak_allocated_bytes, found.low.allocated_bytes) == (peak(64), peak(64))
        assert found.high.allocated_bytes == peak(8) + 8 * 48 * (8**2 - 1), "48 bytes a sample"
        assert found.notes[-1].endswith("grew with its square from 8")
    assert prediction.footprint_at(8).high is None


def test_a_size_asked_for_after_the_deadline_is_extrapolated_with_a_range(script) -> None:
    prediction = predicted(batch_size=12)
    prediction.curve = replace(prediction.curve, growth=None)
    script.time_is_up()
    found = prediction.footprint_at(32)
    assert found.peak_allocated_bytes == peak(32)
    assert found.high.allocated_bytes == peak(16) + 16 * 48 * (2**2 - 1)
    assert any(
        note.endswith("extrapolated from batch size 16: time was up (max_setup_seconds)") for note in found.notes
    )


def test_a_proof_that_the_deadline_cuts_short_is_noted(script) -> None:
    prediction = predicted(batch_size=64)
    script.time_is_up()
    prediction = prediction.proven_at(64)
    assert prediction.curve.notes == ("time was up (max_setup_seconds): the step was not captured at batch size 64",)
    assert prediction.footprint_at(64).high is None


def test_real_steps_that_the_deadline_leaves_out_are_noted(script) -> None:
    script.step, script.is_late = for_real, lambda size, method, variant: variant != FIRST
    prediction = predicted(batch_size=64)
    found = prediction.footprint_at(64)
    assert (found.method, found.high.allocated_bytes > 8 * found.low.allocated_bytes) == ("real", True)
    captured = prediction.footprint_at(8)
    of_batch = captured.low.allocated_bytes - 256
    assert captured.high.allocated_bytes == captured.low.allocated_bytes + of_batch
    assert "other values were not tried: at most as if what belongs to the batch took twice as much" in captured.notes
    assert (
        "time was up (max_setup_seconds): captures that would have checked the prediction were left out" in found.notes
    )


def test_largest_results_that_the_deadline_lets_no_real_step_check_are_the_upper_end(script) -> None:
    """Real batches keep half of the samples."""

    def chosen(trace: Trace, method: str, variant: Variant) -> Trace:
        if method == "fake":
            raise ValueNeededError("which rows")
        kept = {"fake": 1.0, "worst-case": 1.0, "sampled": 0.5, "real": 0.5}[method]
        trace = trace.plus({"activations": int(4000 * trace.batch_size * kept)})
        return replace(trace, shares=((("", "aten.index.Tensor"), ()),) if method == "real" else ())

    script.step, script.is_late = chosen, lambda size, method, variant: method == "real"
    found = predicted().footprint_at(16)
    script.is_late = lambda size, method, variant: False
    whole = predicted().footprint_at(16)
    assert (found.method, whole.method) == ("worst-case", "sampled")
    assert found.low.allocated_bytes < whole.peak_allocated_bytes
    assert found.high.allocated_bytes >= whole.peak_allocated_bytes
    assert "other values were not tried: at most with results as large as their operators can make them" in found.notes


def test_what_a_deadline_leaves_open_is_bounded_by_what_grew_between_two_sizes(script) -> None:
    """Of 1 MiB that the step makes whatever its batch, none grows with the square; no range begins below zero."""
    script.step = lambda trace, *_: making(trace, "temporaries", 1 << 20)
    with until_deadline(program := program_of(), next_size=script.time_is_up):
        prediction = predict(program, 64, EXACT).proven_at(64)
    found = prediction.footprint_at(64)
    assert found.is_cut
    assert found.lowest.allocated_bytes <= peak(64) + (1 << 20) <= found.high.allocated_bytes < 2 << 20


def test_real_steps_that_the_deadline_leaves_out_at_the_size_asked_for_do_not_fail(script) -> None:
    script.step = by_value
    prediction = predicted(batches=drawn())
    script.time_is_up()
    found = prediction.footprint_at(20)
    assert prediction.proven_at(20) is prediction
    assert found.is_cut
    assert "extrapolated from batch size" in " ".join(found.notes)


@pytest.mark.children
def test_if_nothing_was_captured_until_the_deadline_nothing_but_that_is_known(
    time_is_up: Callable[..., int],
) -> None:
    program = program_of()
    with until_deadline(program):
        time_is_up()
        prediction = predict(program, 64, EXACT)
    found = prediction.footprint_at(64)
    assert (found.method, found.is_partial) == ("cut", True)
    assert prediction.curve.stopped == "time was up (max_setup_seconds)"


@pytest.mark.children
def test_once_time_is_short_a_step_is_captured_at_the_size_asked_for_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Value by value, too, after a small size: how it grows, and what other values change, is left out with a note."""
    monkeypatch.setattr(pool, "processors", lambda: 1)  # two children may answer at once

    def reading(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return plain(model, x) if x.sum().item() > 0 else model(x).mean()

    for step, method, first in ((plain, "fake", 1), (reading, "real", 2)):
        program = program_of(step)
        with Captures(
            program, own_first=True, soon=lambda traces, _, first=first: math.inf if len(traces) < first else -1.0
        ):
            prediction = predict(program, 16, EXACT)
            found = prediction.footprint_at(16)
            assert prediction.footprint_at(64).is_cut
        assert (found.method, found.peak_allocated_bytes) == (method, peak(16))
        assert 16 in prediction.curve.proven_sizes
        assert len(prediction.curve.proven_sizes) <= 2, "the one asked for, and at most another"
        assert any("time was up (max_setup_seconds)" in note for note in found.notes)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_wherever_a_capture_is_stopped_it_tells_the_least_or_a_later_step(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first optimizer step the least that it takes; after that, later steps are like the first."""
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 8))
    program = program_of(model=model, optimizer=make)
    ran = list[int]()

    def capture_until(operator: int) -> Trace:
        def beat() -> None:
            ran.append(operator)
            if len(ran) == operator:
                raise StoppedError

        ran.clear()
        monkeypatch.setattr(recorder, "beat", beat)
        return capture_here(program, 16, "fake", later=False)

    whole = footprint(capture_until(0), EXACT)
    operators, later = len(ran), 0
    for place in range(1, operators, max(1, operators // 6)):
        cut = capture_until(place)
        assert cut.method == "cut"
        like = cut.like_later(1)
        found = footprint(like or cut, EXACT)
        assert found.peak_allocated_bytes <= whole.peak_allocated_bytes
        if like is not None:
            later += 1
            assert found.peak_allocated_bytes == whole.peak_allocated_bytes
            assert found.lowest.allocated_bytes <= whole.peak_allocated_bytes <= found.highest.allocated_bytes
    assert later > 1
