"""One training step, watched storage by storage: what was allocated, when, for what, and when it died."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.predict import capture
from lightning_memguard.core.capture.program import LoopProgram, tensors
from lightning_memguard.core.capture.recorder import (
    Recorder,
    gradients_of,
    part_bytes,
    refuse_sparse,
    states_of,
    watching,
)
from lightning_memguard.core.capture.storages import plain_tensors
from lightning_memguard.core.replay.replay import replay
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.simulation import fake_cuda, sdpa
from lightning_memguard.core.simulation.fake import fake_copy, real_copy
from lightning_memguard.core.trace.scratch import CudaTarget
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.errors import CannotTraceError
from tests.profiled import blocks_of, measured_peak

pytestmark = pytest.mark.exact

CPU = torch.device("cpu")


class TwoLayers(nn.Module):
    """4 -> 8 -> 2 without biases: weights of 128 and 64 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 8, bias=False)
        self.relu = nn.ReLU()
        self.head = nn.Linear(8, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.relu(self.hidden(x)))


class Schedule:
    """An object with a tensor, like a noise scheduler of diffusers."""

    def __init__(self, model: nn.Module) -> None:
        self.alphas, self.model = torch.zeros(3), model


@contextmanager
def recording(device_type: str = "cpu", *, worst_case: bool = False) -> Iterator[Recorder]:
    """A recorder at work in a forward pass on fake tensors, with no module to watch."""
    with tensors(fake=True):
        recorder = Recorder(device_type, worst_case=worst_case)
        recorder.mark("forward")
        with watching(recorder, nn.Module()):
            yield recorder


def traced(
    module: nn.Module,
    make_batch: Callable[[], torch.Tensor],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    *,
    fake: bool = True,
    steps: int = 1,
) -> Trace:
    """A few steps of a copy of the module: zero_grad, forward, backward, optimizer."""
    with tensors(fake=fake) as mode:
        module_copy = fake_copy(module, mode, CPU) if mode else real_copy(module)
        optimizers = [make_optimizer(module_copy.parameters())] if make_optimizer else []
        recorder = Recorder("cpu")
        with watching(recorder, module_copy):
            for step in range(steps):
                recorder.mark("zero_grad", step=step)
                module_copy.zero_grad()
                recorder.mark("forward")
                batch = make_batch()
                recorder.label([batch], "batch")
                loss = module_copy(batch).sum()
                del batch
                recorder.mark("backward")
                loss.backward()
                recorder.label(gradients_of(optimizers, module_copy), "gradients")
                recorder.mark("optimizer")
                for optimizer in optimizers:
                    optimizer.step()
                recorder.label(states_of(optimizers), "optimizer_state")
            recorder.mark("end")
        return recorder.trace(2, "fake" if fake else "real")


def lines(trace: Trace | Iterable[Any], step: int = 0) -> list[str]:
    """Each event as text, such as "+128 parameters in setup"; what falls apart after the run is left out."""
    signs = {"alloc": "+", "free": "-"}
    return [
        f"{signs[event.action]}{event.nbytes} {event.part} in {event.phase}"
        for event in trace
        if event.step == step and event.phase != "end"
    ]


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def empty_batch() -> torch.Tensor:
    return torch.empty(2, 4)


# A whole step, by hand

FIRST_STEP = [
    "+128 parameters in setup",  # hidden.weight: 4 x 8 floats
    "+64 parameters in setup",  # head.weight: 8 x 2
    "+32 batch in forward",  # 2 x 4
    "+64 temporaries in forward",  # hidden(x): 2 x 8, which only relu needs
    "+64 activations in forward",  # relu's result, which backward needs
    "-64 temporaries in forward",
    "+16 temporaries in forward",  # head's result: 2 x 2
    "+4 activations in forward",  # the loss
    "-16 temporaries in forward",
    "+4 activations in backward",  # the ones that backward starts from
    "+64 gradients in backward",  # of head.weight
    "+16 workspaces in backward",  # the product copies the gradient of head's result, one number that is expanded
    "-16 workspaces in backward",
    "+64 temporaries in backward",  # of relu's result
    "+16 workspaces in backward",
    "-16 workspaces in backward",
    "+64 temporaries in backward",  # of hidden's result
    "-64 temporaries in backward",
    "-64 activations in backward",  # relu's result is needed no more
    "+128 gradients in backward",  # of hidden.weight
    "-64 temporaries in backward",
    "-32 batch in backward",
    "-4 activations in backward",
    "+128 optimizer_state in optimizer",  # momentum of hidden.weight
    "+64 optimizer_state in optimizer",  # and of head.weight
]


@pytest.fixture(scope="module")
def two_steps() -> Trace:
    return traced(TwoLayers(), empty_batch, momentum, steps=2)


def test_a_step_of_two_layers_event_by_event(two_steps):
    assert lines(two_steps) == FIRST_STEP


def test_the_second_step_drops_the_gradients_first_and_makes_no_state(two_steps):
    second = lines(two_steps, step=1)
    assert second[:3] == ["-128 gradients in zero_grad", "-64 gradients in zero_grad", "+32 batch in forward"]
    # The old loss lives until the new one takes its name.
    assert second[3:] == [*FIRST_STEP[3:9], "-4 activations in forward", *FIRST_STEP[9:23]]


def test_real_tensors_leave_the_same_events_as_fake_ones(two_steps):
    assert traced(TwoLayers(), empty_batch, momentum, steps=2, fake=False).events == two_steps.events


def test_a_trace_names_its_batch_size_device_and_method(two_steps):
    assert (two_steps.batch_size, two_steps.device, two_steps.method, two_steps.notes) == (2, "cpu", "fake", ())


def test_every_block_is_taken_once_and_given_back_at_most_once_at_its_size(two_steps):
    live: dict[int, int] = {}
    for event in two_steps:
        if event.action == "alloc":
            live[event.block] = event.nbytes
        else:
            assert live.pop(event.block) == event.nbytes


def test_activations_die_in_backward_in_the_order_opposite_to_their_making():
    """Three tanh of 2 x 3, 2 x 5 and 2 x 7 floats, each needed for its own gradient."""
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh())
    trace = traced(module, empty_batch)
    kept = [event for event in trace if event.part == "activations" and event.nbytes in (24, 40, 56)]
    assert [event.nbytes for event in kept if event.action == "alloc" and event.phase == "forward"] == [24, 40, 56]
    assert [event.nbytes for event in kept if event.action == "free" and event.phase == "backward"] == [56, 40, 24]


def test_all_that_an_optimizer_keeps_is_its_state():
    """Adam keeps two averages of each of two weights (192 bytes) and two counters of a float."""
    trace = traced(TwoLayers(), empty_batch, torch.optim.Adam)
    state = [event.nbytes for event in trace if event.part == "optimizer_state" and event.action == "alloc"]
    assert sorted(state) == [4, 4, 64, 64, 128, 128]


def test_buffers_are_separated_from_parameters():
    trace = traced(nn.BatchNorm1d(4, affine=False), lambda: torch.empty(2, 4, requires_grad=True))
    setup = [line for line in lines(trace) if line.endswith("setup")]
    assert setup == ["+16 buffers in setup", "+16 buffers in setup", "+8 buffers in setup"]


# The phases of a step


@pytest.mark.parametrize("fake", [True, False])
def test_weights_of_modules_that_are_not_registered_count_once(fake):
    """A frozen teacher in a list counts, as do networks in the ``__dict__`` of torchrl's losses; data does not."""
    student = TwoLayers()
    student.teacher = [TwoLayers()]
    vars(student)["critic"] = nn.Linear(5, 1, bias=False)
    student.schedule = Schedule(student)
    student.shown = {"weights": student.head.weight.data, "data": TensorDataset(torch.zeros(9))}
    trace = traced(student, empty_batch, fake=fake)
    assert [e.nbytes for e in trace if e.part == "buffers" and e.action == "alloc"] == [12, 20, 128, 64]


def test_an_operator_knows_the_module_it_ran_for_forward_and_backward(two_steps):
    of_modules = [each for each in two_steps if each.action == "alloc" and each.module and each.step == 0]
    made = [each for each in of_modules if each.part != "workspaces"]
    assert [(event.phase, event.module, event.operator) for event in made] == [
        ("forward", "hidden", "aten.mm.default"),
        ("forward", "relu", "aten.relu.default"),
        ("forward", "head", "aten.mm.default"),
        ("backward", "head", "aten.mm.default"),
        ("backward", "head", "aten.mm.default"),
        ("backward", "relu", "aten.threshold_backward.default"),
        ("backward", "hidden", "aten.mm.default"),
    ]


def test_an_operator_knows_its_line_of_the_models_code_forward_and_backward():
    class Doubled(TwoLayers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.hidden(x)
            return self.head(hidden * 2)

    first = Doubled.forward.__code__.co_firstlineno
    program = LoopProgram(
        Doubled(), batches_from_one(empty_batch()), lambda m, x: m(x).sum(), momentum, torch.device("cpu")
    )
    trace = capture(program, 8, "fake")
    ran = {
        (event.phase, event.operator, event.source.rpartition("/")[2])
        for event in trace
        if event.action == "alloc" and event.operator in ("aten.mm.default", "aten.mul.Tensor")
    }
    assert ran == {
        ("forward", "aten.mm.default", f"test_recorder.py:{first + 1}:forward"),
        ("forward", "aten.mul.Tensor", f"test_recorder.py:{first + 2}:forward"),
        ("forward", "aten.mm.default", f"test_recorder.py:{first + 2}:forward"),
        ("backward", "aten.mm.default", f"test_recorder.py:{first + 2}:forward"),
        ("backward", "aten.mul.Tensor", f"test_recorder.py:{first + 2}:forward"),
        ("backward", "aten.mm.default", f"test_recorder.py:{first + 1}:forward"),
    }
    assert {event.source for event in trace if event.phase in ("optimizer", "transfer", "setup")} == {""}


def test_a_line_of_pythons_own_library_is_not_the_models():
    with recording() as recorder:
        copied = copy.deepcopy(torch.empty(4))
    made = [event.source.rpartition("/")[2] for event in recorder.trace(1, "fake") if event.action == "alloc"]
    assert [source.partition(":")[0] for source in made] == ["test_recorder.py"] * 2
    assert len(copied) == 4


def test_nested_modules_have_dotted_paths():
    """After its child has run, operators are the module's own again."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.inner(x)).exp()

    trace = traced(nn.Sequential(nn.Sequential(Residual())), empty_batch)
    ran = [(event.module, event.operator) for event in trace if event.action == "alloc" and event.phase == "forward"]
    assert ran[1:4] == [
        ("0.0.inner", "aten.mm.default"),
        ("0.0", "aten.add.Tensor"),
        ("0.0", "aten.exp.default"),
    ]


def test_outside_any_module_there_is_no_path(two_steps):
    assert {event.module for event in two_steps if event.phase == "optimizer"} == {""}


def test_a_module_whose_operators_give_several_tensors_is_known_in_backward_too():
    """The halves of a split are put together again in backward, for the module that split."""

    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.split(2, dim=1)

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Linear(4, 4)
            self.halves = Halves()
            self.head = nn.Bilinear(2, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(*self.halves(self.hidden(x)))

    trace = traced(Gated(), empty_batch)
    assert [event.module for event in trace if event.operator == "aten.cat.default"] == ["halves"]


def test_a_backward_pass_without_a_mark_is_seen():
    """A module that steps by hand calls backward in the middle of its forward pass."""
    with recording() as recorder:
        x = torch.empty(4, requires_grad=True)
        (x * x).sum().backward()
    made = {event.operator: event.phase for event in recorder.trace(1, "fake") if event.action == "alloc"}
    assert made["aten.sum.default"] == "forward"
    assert made["aten.mul.Tensor"] == "backward"


class Scaled(nn.Module):
    """Divides and multiplies by numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (batch / 3).exp() * (self.weight / 8 * 2.5)


@pytest.mark.parametrize("walked", [False, True])
def test_a_number_that_a_product_keeps_is_a_tensor_until_its_backward_pass(
    walked: bool, monkeypatch: pytest.MonkeyPatch
):
    """No operator makes it, and no hooks on saved tensors are given it."""
    monkeypatch.setattr(fake_cuda, "can_simulate_cuda", lambda: walked)
    events = traced(Scaled(), lambda: torch.ones(2, 4)).events
    numbers = [event for event in events if "Backward0" in event.operator]
    frees = [event for event in events if event.action == "free"]
    assert [(event.operator, event.nbytes, event.part) for event in numbers] == [
        ("DivBackward0", 8, "activations"),
        ("MulBackward0", 8, "activations"),
    ]
    assert [event.phase for event in frees if event.block in {each.block for each in numbers}] == ["backward"] * 2


def test_the_profiler_sees_the_number_that_a_product_keeps():
    x = torch.ones(4, requires_grad=True)
    kept = []
    assert sum(nbytes for _, nbytes in blocks_of(lambda: kept.append(x / 8))) == 8 + 4 * 4, "and the result"


@pytest.mark.parametrize("reentrant", [False, True])  # fmt: skip
def test_gradients_are_gradients_with_checkpointing_too(reentrant):
    """The weights are 128, 512 and 128 bytes; the middle one's activations are computed again in backward."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 8, bias=False)
            self.middle = nn.Linear(8, 16, bias=False)
            self.last = nn.Linear(16, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(lambda y: torch.relu(self.middle(y)), self.first(x), use_reentrant=reentrant)
            return self.last(x)

    trace = traced(Checkpointed(), empty_batch)
    gradients = [event.nbytes for event in trace if event.part == "gradients" and event.action == "alloc"]
    assert sorted(gradients) == [128, 128, 512]


# What counts as one block


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_keeps_the_state_of_the_random_generator_until_it_runs_again(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.second, self.first(x), use_reentrant=reentrant)

    before = torch.get_rng_state
    trace = traced(Checkpointed(), lambda: torch.zeros(8, 4))
    events = [(event.action, event.phase) for event in trace.events if event.nbytes == before().nbytes]
    # What runs again is seeded as before, and the generator is given back as it was.
    assert events[:3] == [("alloc", "forward"), ("alloc", "backward"), ("free", "backward")]
    assert events[3:] == ([] if reentrant else [("free", "backward")]), "a function's context lives as long as its node"
    assert torch.get_rng_state is before


def views(_: Recorder) -> None:
    x = torch.empty(4, 4)
    rows, turned = x[:2], x.t()
    del x
    torch.empty(1)
    del rows
    del turned


def resized(_: Recorder) -> None:
    x = torch.empty(4)
    x.resize_(100)


def of_no_bytes(_: Recorder) -> None:
    x = torch.empty(0, 4)
    assert (x + 1).numel() == 0


def a_slice(recorder: Recorder) -> None:
    x = torch.empty(1000)[:1]
    recorder.label([x], "batch")


def until_backward(recorder: Recorder) -> None:
    x = torch.empty(4)
    recorder.mark("backward")
    y = torch.empty(8)
    del x, y


def of_two_parts(recorder: Recorder) -> None:
    x = torch.empty(4)
    recorder.label([x], "gradients")
    recorder.label([x, x.view(2, 2)], "optimizer_state")
    recorder.label([None, "no tensor", 3], "batch")


@pytest.mark.parametrize(
    ("run", "blocks"),
    [
        pytest.param(views, "+64 +4 -4 -64 temporaries", id="views of one storage count once and die with the last"),
        pytest.param(a_slice, "+4000 -4000 batch", id="a slice counts as the whole storage that it keeps alive"),
        pytest.param(resized, "+16 -16 +400 -400 temporaries", id="what is resized in place is allocated again"),
        pytest.param(of_no_bytes, "", id="an empty tensor is no block"),
        pytest.param(
            until_backward, "+16 activations +32 temporaries -16 activations -32 temporaries",
            id="what lives when backward begins is an activation, and what comes then is not",
        ),
        pytest.param(of_two_parts, "+16 -16 gradients", id="a block keeps the first part it was given"),
    ],
)  # fmt: skip
def test_a_storage_is_a_block_from_its_first_tensor_to_its_last(run, blocks):
    with recording() as recorder:
        run(recorder)
    signs = {"alloc": "+", "free": "-"}
    of_parts = itertools.groupby(recorder.trace(1, "fake"), lambda event: event.part)
    found = [[*(f"{signs[event.action]}{event.nbytes}" for event in several), part] for part, several in of_parts]
    assert " ".join(itertools.chain(*found)) == blocks


def test_writing_in_place_takes_nothing():
    with recording() as recorder:
        x = torch.empty(4)
        before = len(recorder.trace(1, "fake"))
        x.add_(1).mul_(x).relu_().copy_(x)
        x[:2] = 0
        assert len([event for event in recorder.trace(1, "fake") if event.nbytes == 16]) == before


@pytest.mark.parametrize("fake", [True, False])
def test_a_tangent_of_zero_takes_nothing(fake):
    class Tangent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, tangent = torch.func.jvp(self.layer, (x,), (torch.ones_like(x),))
            return out * tangent

    trace = traced(Tangent(), lambda: torch.zeros(8, 64), fake=fake)
    zeros = [event.nbytes for event in trace.events if "zerotensor" in event.operator and event.action == "alloc"]
    assert zeros == [4, 4], "of the weight and of the bias"


def test_every_tensor_of_a_result_is_seen_nested_or_not():
    with recording() as recorder:
        values, indices = torch.empty(3, 4).max(dim=0)  # 4 floats, 4 longs
        kept = torch._foreach_add([torch.empty(5), torch.empty(6)], 1.0)
    assert (len(values), len(indices), len(kept)) == (4, 4, 2)
    assert [event.nbytes for event in recorder.trace(1, "fake") if event.action == "alloc"] == [
        48,
        16,
        32,
        20,
        24,
        20,
        24,
    ]


def test_only_the_devices_own_storages_are_recorded():
    with recording("cuda") as recorder:
        here, there = torch.empty(4), torch.empty(8, device="cuda")
    assert (here.device.type, there.device.type) == ("cpu", "cuda")
    assert lines(recorder.trace(1, "fake"))[0] == "+32 temporaries in forward"
    assert {event.nbytes for event in recorder.trace(1, "fake")} == {32}


# Unknown values


def test_where_a_result_depends_on_values_the_recorder_gives_up():
    with recording(), pytest.raises(DynamicOutputShapeException):
        torch.empty(4).nonzero()


def test_in_the_worst_case_a_mask_keeps_everything_and_a_note_states_it():
    with recording(worst_case=True) as recorder:
        kept = torch.empty(6, 2)[torch.empty(6, dtype=torch.bool)]
    trace = recorder.trace(1, "worst-case")
    assert tuple(kept.shape) == (6, 2)
    assert trace.notes == ("indexing with a mask was assumed to return its largest result",)


def test_reading_a_loss_to_log_it_does_not_end_the_run():
    with recording():
        loss = torch.empty(4).sum()
        assert f"loss {loss.item():.1f}, {float(loss):.1f}" == "loss 1.0, 1.0"


def test_a_copy_that_the_step_makes_of_a_module_counts():
    """An average of the weights: 192 bytes more, without a gradient or a state."""
    with tensors(fake=True) as mode:
        module_copy = fake_copy(TwoLayers(), mode, CPU)
        recorder = Recorder("cpu")
        with watching(recorder, module_copy):
            average = copy.deepcopy(module_copy)
        trace = recorder.trace(1, "fake")
    assert len(list(average.parameters())) == 2
    assert [event.nbytes for event in trace if event.action == "alloc"] == [128, 64, 128, 64]


# Counting what is really there


def test_bytes_of_tensors_are_bytes_of_their_storages_each_once():
    table = torch.zeros(100)
    parts = {"parameters": [table, table[:10]], "buffers": [table[50:], torch.zeros(3)]}
    assert part_bytes(parts, "cpu") == {"parameters": 400, "buffers": 12}
    assert part_bytes(parts, "cuda") == {"parameters": 0, "buffers": 0}


def test_gradients_are_those_of_the_module_and_of_whatever_else_is_optimized():
    module, loose = nn.Linear(1, 1, bias=False), nn.Parameter(torch.ones(1))
    frozen = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([module.weight, loose, frozen], lr=0.1)
    (module.weight.sum() + loose.sum()).backward()
    assert [id(gradient) for gradient in gradients_of([optimizer], module)] == [id(module.weight.grad), id(loose.grad)]


def test_a_sparse_gradient_has_no_size_to_predict():
    with FakeTensorMode():
        gradient = torch.sparse_coo_tensor(torch.zeros(1, 2, dtype=torch.long), torch.zeros(2, 3), (10, 3))
    refuse_sparse([torch.zeros(3), torch.eye(3).to_sparse()])
    with pytest.raises(CannotTraceError) as error:
        refuse_sparse([gradient])
    assert str(error.value) == (
        "A gradient of shape (10, 3) has layout torch.sparse_coo: its size depends on its values, which only a real "
        "run has."
    )


# The proof: PyTorch's own CPU allocator, as its profiler hears it


@pytest.mark.parametrize(
    ("make_optimizer", "batch_size", "phase", "unseen_bytes"),
    [
        (momentum, 2, "backward", 0),
        (momentum, 300, "backward", 0),
        (torch.optim.Adam, 300, "backward", 0),
        # Adam divides by a Python number, which PyTorch makes a tensor of 8 bytes, then of 4, inside the operator.
        (torch.optim.Adam, 2, "optimizer", 8 + 4),
        (torch.optim.Adafactor, 300, "backward", 0),
        (torch.optim.Adafactor, 2, "optimizer", 0),
        (partial(torch.optim.Adafactor, foreach=True, weight_decay=0.1), 2, "optimizer", 0),
    ],
)
def test_the_peak_is_the_one_the_profiler_measures_to_the_byte(make_optimizer, batch_size, phase, unseen_bytes):
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))

    def batch() -> torch.Tensor:
        return torch.empty(batch_size, 64)

    def train() -> None:
        module = model()
        optimizer = make_optimizer(module.parameters())
        for _ in range(2):
            module.zero_grad()
            x = batch()
            loss = module(x).sum()
            del x
            loss.backward()
            optimizer.step()

    predicted = replay(traced(model(), batch, make_optimizer, steps=2), AllocatorSettings(kind="exact"))
    train()  # what PyTorch allocates once and keeps is not the step's
    assert 0 <= measured_peak(train) - predicted.peak_allocated_bytes <= unseen_bytes
    assert predicted.peak_event.phase == phase


def test_what_cudnn_may_do_is_read_when_a_phase_begins():
    """A model's hooks may set it, and Lightning's Trainer does."""
    recorder = Recorder("cuda", kernel_target=CudaTarget((9, 0), 132))
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True, allow_tf32=False):
        recorder.mark("forward")
    known = CudaTarget((9, 0), 132, cudnn=sdpa.cudnn_version())
    assert recorder._scratch.target == replace(known, deterministic=True, tf32=False, benchmark=True)
    recorder.mark("backward")
    assert recorder._scratch.target == known


def test_wrappers_are_left_out_of_the_paths_of_modules() -> None:
    inner = nn.Sequential(nn.Linear(4, 4))
    wrapped = nn.ModuleDict({"_fsdp_wrapped_module": nn.ModuleDict({"net": inner})})
    recorder = Recorder("cpu")
    with watching(recorder, wrapped):
        inner(torch.ones(2, 4))
    products = [event for event in recorder.trace(2, "real") if event.operator == "aten.addmm.default"]
    assert [event.module for event in products if event.action == "alloc"] == ["net.0"]


class InFloat8(torch.Tensor):
    """A wrapper that asks for its scale's value to name its tensors, as torchao's weights do."""

    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Any:
        self = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)
        self.values, self.scale = data, scale
        return self

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> Any:
        return NotImplemented

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return (["values", "scale"] if self.scale else ["values"]), None


def test_the_tensors_of_a_wrapper_are_known_without_a_value() -> None:
    with FakeTensorMode():
        wrapper = InFloat8(torch.ones(4), torch.ones(()))
        assert list(map(id, plain_tensors(wrapper))) == [id(wrapper.values), id(wrapper.scale)]


class WithOwn(nn.Module):
    """Has parameters and a buffer of its own besides its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(3))
        self.layers = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(4, 5))
        self.register_buffer("mask", torch.ones(7))


def test_a_module_has_its_memory_in_the_order_in_which_it_is_moved() -> None:
    module, moved = WithOwn(), list[int]()
    module._apply(lambda tensor: moved.append(tensor.data_ptr()) or tensor)
    recorder = Recorder("cpu")
    with watching(recorder, module):
        pass
    held = [event.nbytes for event in recorder.trace(1, "fake")]
    tensors = {each.data_ptr(): each.nbytes for each in (*module.parameters(), *module.buffers())}
    assert held == [tensors[address] for address in moved]
