"""Memory inside operators of libraries: seen if they are implemented in Python, else reported as unseen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture import kernel_scratch
from lightning_memguard.core.capture.capture import capture_here
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.trace.trace import Trace

pytestmark = pytest.mark.exact


@torch.library.custom_op("memguard_tests::repeat_and_sum", mutates_args=())
def repeat_and_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    large = x.unsqueeze(1).expand(-1, 32, -1).contiguous()
    return (large * 2).sum(1) @ weight


@repeat_and_sum.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


repeat_and_sum.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

_library = torch.library.Library("memguard_tests", "FRAGMENT")
_library.define("opaque(Tensor x) -> Tensor")
_library.impl("opaque", lambda x: x + (x.data_ptr() != 0), "CPU")
_library.impl("opaque", torch.empty_like, "Meta")
for _name, _key in (("on_this_device", "CPU"), ("anywhere", "CompositeExplicitAutograd")):
    _library.define(f"{_name}(Tensor x) -> Tensor")
    _library.impl(_name, lambda x: x.repeat(64, 1)[: len(x)].clone(), _key)
    _library.impl(_name, torch.empty_like, "Meta")


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return repeat_and_sum(x, self.weight).pow(2).sum()


class Registered(Custom):
    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(torch.ops.memguard_tests, self.operator)((x @ self.weight).detach()).sum() + self.weight.sum()


class Opaque(Custom):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.memguard_tests.opaque((x @ self.weight).detach()).sum() + self.weight.sum()


def captured(model: nn.Module, method: str) -> Trace:
    program = LoopProgram(
        model,
        batches_from_one(torch.zeros(8, 16)),
        lambda model, x: model(x),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        torch.device("cpu"),
    )
    return capture_here(program, 8, method)


def peak_bytes(trace: Trace) -> int:
    live = peak = 0
    for event in trace.events:
        live += event.nbytes if event.action == "alloc" else -event.nbytes
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("method", ["fake", "real"])
@pytest.mark.usefixtures("here")
def test_what_an_operator_implemented_in_python_allocates_is_seen(method):
    """Twice 8 x 32 x 16 floats, the weight, two batches and the loss of the step before: the profiler's peak, too."""
    trace = captured(Custom(), method)
    assert peak_bytes(trace) == 2 * 16384 + 1024 + 2 * 512 + 4
    assert trace.notes == ()


@pytest.mark.usefixtures("here")
def test_an_operator_that_cannot_be_looked_into_is_said_to_be_unseen():
    assert captured(Opaque(), "fake").notes == (
        "what memguard_tests::opaque allocates inside is not seen: it is not implemented in Python",
    )


class Nearest(Custom):
    """`cdist` computes by a product where there are more than 25 rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distances = torch.cdist((x @ self.weight).repeat(16, 1), self.weight.detach().repeat(4, 1))
        return distances.min(1).values.sum()


@pytest.mark.parametrize("method", ["fake", "real"])
@pytest.mark.usefixtures("here")
def test_distances_by_a_product_hold_padded_copies_of_both_inputs(method):
    trace = captured(Nearest(), method)
    padded = [
        event.nbytes for event in trace.events if event.operator == "aten.cat.default" and event.action == "alloc"
    ]
    assert padded == 2 * [128 * 18 * 4, 64 * 18 * 4]


@pytest.mark.parametrize("operator", ["on_this_device", "anywhere"])
@pytest.mark.usefixtures("here")
def test_a_kernel_that_was_registered_in_python_is_looked_into(operator):
    trace = captured(Registered(operator), "fake")
    assert trace.notes == ()
    assert any(event.nbytes == 64 * 512 for event in trace.events)


_library.define("roomy(Tensor x, bool fails=False) -> Tensor")
_library.impl("roomy", lambda x, fails=False: _roomy(x) if x.data_ptr() and not fails else x[100], "CPU")
_library.impl("roomy", lambda x, fails=False: torch.empty_like(x), "Meta")


def _roomy(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(8, 1)[: len(x)].clone()


class Roomy(Custom):
    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.memguard_tests.roomy((x @ self.weight).detach(), self.fails).sum() + self.weight.sum()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.usefixtures("here")
def test_an_operator_that_cannot_be_looked_into_is_asked_in_a_process_of_its_own(fails, monkeypatch):
    """Eight copies of 512 bytes while it runs, next to its result."""
    monkeypatch.setattr(kernel_scratch, "in_child", lambda: True)
    trace = captured(Roomy(fails=fails), "fake")
    taken = {event.nbytes for event in trace.events if event.part == "workspaces"}
    unseen = "what memguard_tests::roomy allocates inside is not seen: it is not implemented in Python"
    assert (taken, trace.notes) == ((set(), (unseen,)) if fails else ({8 * 512}, ()))
