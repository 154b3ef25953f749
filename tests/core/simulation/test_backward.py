"""The backward pass walked in Python does what autograd's engine does: same gradients, same memory, same errors."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function, Variable
from torch.autograd.function import BackwardCFunction, FunctionCtx, once_differentiable
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.data import DataLoader

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.core.simulation import backward, fake_cuda
from lightning_memguard.core.simulation.backward import graph_task, walking
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.training.adapter.program import LightningProgram
from tests.scripts import benchmark
from tests.training.quiet import quiet_trainer

pytestmark = pytest.mark.exact

Scenario = Callable[[], Any]

# The zoo, event by event


def zoo_cases() -> list[Any]:
    cases = benchmark("shared/zoo").CASES
    marks = {case.name: () if case in cases[::3] else pytest.mark.long for case in cases}
    return [pytest.param(case, id=case.name, marks=marks[case.name]) for case in cases]


def traced_case(case: Any, *, walked: bool) -> Trace:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.manual_seed(0)
    size = case.batch_sizes[0]
    trainer = quiet_trainer(devices=1, **case.trainer_kwargs)
    module = case.build(case.optimizers[0])
    batch = next(iter(DataLoader(case.dataset(size), batch_size=size)))
    program = LightningProgram(
        trainer, module, batches_from_one(batch), torch.device("cpu"), batches_per_epoch=lambda _: 100
    )
    recorder = Recorder("cpu", worst_case=True)
    entered: list[str] = []

    def enter(metadata: dict[str, Any]) -> None:
        recorder.module, recorder.source, _ = metadata.get("memguard", (recorder.module, recorder.source, None))
        entered.append(recorder.module)

    engine_alone = mock.patch.object(fake_cuda, "can_simulate_cuda", return_value=False)  # else it walks
    with engine_alone, walking(enter, as_plain=False) if walked else contextlib.nullcontext():
        program.run(recorder, size, fake=True)
    assert bool(entered) == walked
    return recorder.trace(size, "fake")


@pytest.mark.parametrize("case", zoo_cases())
def test_a_walk_leaves_the_same_events_as_the_engine(case: Any) -> None:
    engine, walk = traced_case(case, walked=False), traced_case(case, walked=True)
    assert any(event.phase == "backward" for event in engine.events)
    first = next((pair for pair in zip(engine.events, walk.events, strict=False) if pair[0] != pair[1]), None)
    assert first is None
    assert len(walk.events) == len(engine.events)


# Real tensors, bit for bit

SECOND_TIME = "Trying to backward through the graph a second time"


def leaf(*shape: int, **kwargs: Any) -> torch.Tensor:
    return torch.randn(shape, **kwargs).requires_grad_()


def grads(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
    return [tensor.grad for tensor in tensors]


def mixed(tensor: torch.Tensor) -> torch.Tensor:
    """A scalar whose gradient differs at every element."""
    return (tensor * torch.linspace(0.5, 1.5, tensor.numel()).view(tensor.shape)).sum()


def failure(function: Callable[[], Any], message: str) -> str:
    """The type of the error, and whether its message is right."""
    try:
        function()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}, {message in str(error)}"
    return "nothing was raised"


def described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    flags = (value.dtype, tuple(value.shape), value.stride(), value.requires_grad, value.grad_fn is None)
    return (*flags, bytes(value.detach().reshape(-1).view(torch.uint8).tolist()))


def ran(function: Scenario) -> list[Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [described(value) for value in tree_leaves(function())]


def check_both(function: Scenario, as_plain: bool) -> None:
    entered: list[Any] = []
    engine = ran(function)
    with walking(entered.append, as_plain=as_plain):
        walk = ran(function)
    assert entered, "the walk did not run"
    assert engine, "the scenario returned nothing to compare"
    assert walk == engine


# - what operators do


class Operators:
    def leaves_used_several_times() -> Any:
        w, x = leaf(4, 4), leaf(4, 4)
        mixed((x @ w).tanh() @ w * w + x).backward()
        return grads(w, x)

    def broadcast_operands() -> Any:
        row, column, scalar, x = leaf(5), leaf(4, 1), leaf(), leaf(3, 4, 5)
        mixed(x * row + column / (1 + scalar.square()) - row).backward()
        return grads(row, column, scalar, x)

    def residual_additions() -> Any:
        x, layers = leaf(3, 4), [nn.Linear(4, 4) for _ in range(4)]
        y = x
        for layer in layers:
            y = y + layer(y).tanh()
        mixed(y).backward()
        return grads(x, *(p for layer in layers for p in layer.parameters()))

    def in_place_operators_on_views() -> Any:
        x, w = leaf(4, 6), leaf(6)
        y = x * 1.5
        y[1].mul_(w)
        y.view(-1)[::3].add_(w[:2].repeat(4))
        y.t()[0] = w[:4]
        y[:, 2:4].sigmoid_()
        mixed(y).backward()
        return grads(x, w)

    def in_place_activations() -> Any:
        layers = [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Hardtanh(inplace=True), nn.Linear(4, 4)]
        x = leaf(3, 4)
        mixed(F.leaky_relu_(nn.Sequential(*layers)(x), 0.1)).backward()
        return grads(x, *nn.Sequential(*layers).parameters())

    def an_in_place_sum_of_branches() -> Any:
        x, w = leaf(3, 4), leaf(4, 4)
        y = x @ w
        y += x
        y += y.detach().cos() * w[0]
        mixed(y.relu_()).backward()
        return grads(x, w)

    def split_and_joined_tensors() -> Any:
        x, y = leaf(4, 6), leaf(4, 6)
        a, b, c = x.chunk(3, dim=1)
        d, e = y.split([2, 4], dim=1)
        first, *_, last = y.unbind(0)
        joined = torch.cat((a * b, c, d, e.square()), dim=1)
        stacked = torch.stack((first * last, x[0], last))
        (mixed(joined) + mixed(stacked)).backward()
        return grads(x, y)

    def a_split_of_which_parts_are_not_used() -> Any:
        x = leaf(4, 6)
        parts = x.exp().split(2, dim=1)
        mixed(parts[1]).backward()
        return grads(x)

    def indexed_and_embedded_tensors() -> Any:
        embedding, x = nn.Embedding(7, 4, padding_idx=2), leaf(5, 4)
        tokens = torch.tensor([[0, 2, 3], [3, 3, 6]])
        y = embedding(tokens) + x[torch.tensor([[0, 0, 1], [4, 3, 0]])]
        mixed(y.masked_fill(y > 1, 0.0) + x.gather(0, torch.tensor([[1, 1, 0, 2]]))).backward()
        return grads(embedding.weight, x)

    def casts_between_dtypes() -> Any:
        x, w, half = leaf(3, 4), leaf(4, 4, dtype=torch.float64), leaf(4, dtype=torch.bfloat16)
        mixed((x.double() @ w).float() * half + x.to(torch.bfloat16)).backward()
        return grads(x, w, half)

    def promoted_dtypes() -> Any:
        x, y, z = leaf(3, dtype=torch.float32), leaf(3, dtype=torch.float64), leaf(3, dtype=torch.complex64)
        (mixed(x * y) + (x * z).abs().sum()).backward()
        return [*grads(x, y), torch.view_as_real(z.grad)]

    def complex_values_in_a_real_leaf() -> Any:
        x, y = leaf(3), leaf(3)
        z = torch.complex(x, y).exp() * x
        mixed(z.abs()).backward()
        return grads(x, y)

    def networks_with_norms_convolutions_and_attention() -> Any:
        conv = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        attention = nn.MultiheadAttention(4, 2, batch_first=True)
        rnn, norm = nn.LSTM(4, 4, batch_first=True), nn.LayerNorm(4)
        x = conv(torch.randn(2, 3, 8, 8)).flatten(2).transpose(1, 2)
        x = norm(x + F.dropout(attention(x, x, x, need_weights=False)[0], 0.5))
        mixed(rnn(x)[0]).backward()
        return [p.grad for part in (conv, attention, rnn, norm) for p in part.parameters()]

    def autocast() -> Any:
        layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4))
        with torch.autocast("cpu", torch.bfloat16):
            y = layers(torch.randn(3, 4)) + layers(torch.randn(3, 4))
        mixed(y.float()).backward()
        return grads(*layers.parameters())

    def a_gradient_that_is_not_strided() -> Any:
        embedding = nn.Embedding(7, 4, sparse=True)
        mixed(embedding(torch.tensor([0, 3, 3]))).backward()
        return [embedding.weight.grad.is_sparse, embedding.weight.grad.to_dense()]

    def gradients_laid_out_unlike_their_parameters() -> Any:
        conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        strided, x = torch.empty_strided((3, 4), (1, 5)).normal_().requires_grad_(), leaf(4, 3)
        mixed(conv(torch.randn(2, 3, 6, 6))).backward()
        (mixed(strided.exp()) + mixed(x.t() * strided)).backward()
        return grads(conv.weight, conv.bias, strided, x)

    def many_leaves_ready_at_once() -> Any:
        leaves, order = [leaf(2) for _ in range(23)], []
        for place, tensor in enumerate(leaves):
            tensor.register_post_accumulate_grad_hook(lambda _, place=place: order.append(place))
        mixed(torch.stack(leaves).exp() + torch.stack(leaves[::-1])).backward()
        return [order, grads(*leaves)]

    def leaves_of_unequal_depth_end_in_the_engines_order() -> Any:
        leaves, order = [leaf(2) for _ in range(9)], []
        y = torch.zeros(2)
        for place, tensor in enumerate(leaves):
            tensor.register_post_accumulate_grad_hook(lambda _, place=place: order.append(place))
            y = torch.stack((y * tensor, tensor, leaves[(5 * place) % 9])).sum(0)
        mixed(y).backward()
        return [order, grads(*leaves)]


# - ways to start a backward pass


class Starts:
    def grad_of_leaves_and_of_what_was_computed() -> Any:
        x, w, unused = leaf(3, 4), leaf(4, 4), leaf(2)
        hidden = (x @ w).tanh()
        out = mixed(hidden.square() + hidden)
        found = torch.autograd.grad(out, [hidden, x, unused, w, hidden], allow_unused=True)
        return [found, grads(x, w)]

    def grad_of_one_output_of_several() -> Any:
        x = leaf(4, 6)
        a, b, c = x.exp().chunk(3, dim=1)
        return torch.autograd.grad(mixed(a * b * c), [b, a, x])

    def grad_leaves_other_paths_alone() -> Any:
        x, w, called = leaf(3), leaf(3), []
        y = x.exp()
        z = y * w
        w.register_hook(lambda grad: called.append("w"))
        x.register_hook(lambda grad: called.append("x"))
        return [torch.autograd.grad(mixed(z), [y]), called, grads(x, w)]

    def grad_of_several_outputs() -> Any:
        x, w = leaf(3), leaf(3)
        first, second, third = x * w, (x + w).exp(), x.sum()
        return torch.autograd.grad(
            [first, second, third], [w, x], [torch.tensor([1.0, 2.0, 3.0]), torch.full((3,), 0.5), None]
        )

    def grad_with_batched_outputs_of_zero_for_the_unused() -> Any:
        x, unused = leaf(3), leaf(2)
        return torch.autograd.grad(mixed(x.exp()), [x, unused], allow_unused=True, materialize_grads=True)

    def grad_of_an_input_itself_an_output() -> Any:
        x = leaf(3)
        y = x.exp()
        return torch.autograd.grad([mixed(y), y], [y, x], [None, torch.ones(3)])

    def an_unused_input_is_an_error() -> Any:
        x, unused = leaf(3), leaf(3)
        return [
            failure(
                lambda: torch.autograd.grad(mixed(x.exp()), [x, unused]), "appears to not have been used in the graph"
            ),
            torch.autograd.grad(mixed(x.sin()), [x]),
        ]

    def backward_from_several_tensors() -> Any:
        x, w = leaf(3), leaf(3)
        torch.autograd.backward([(x * w).sum(), (x + w).exp()], [None, torch.tensor([1.0, 2.0, 3.0])])
        return grads(x, w)

    def backward_from_a_leaf() -> Any:
        x = leaf(3)
        x.backward(torch.tensor([1.0, 2.0, 3.0]))
        return grads(x)

    def backward_into_chosen_inputs() -> Any:
        x, w, other = leaf(3, 4), leaf(4, 4), leaf(4)
        hidden = (x @ w).tanh()
        mixed(hidden * other + x).backward(inputs=[w, hidden])
        return grads(x, w, other, hidden)

    def double_backward() -> Any:
        x, w = leaf(3, 4), leaf(4, 4)
        first = torch.autograd.grad(mixed((x @ w).tanh() * w[:3]), [x, w], create_graph=True)
        mixed(first[0] * first[1][:3]).backward()
        return [first, grads(x, w)]

    def third_derivatives() -> Any:
        x = leaf(3)
        y, found = mixed(x**5), []
        for _ in range(3):
            (slope,) = torch.autograd.grad(y, x, create_graph=True)
            found.append(slope)
            y = mixed(slope)
        return found

    def gradient_penalty() -> Any:
        net = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))
        x = leaf(3, 4)
        out = net(x)
        (slope,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True, retain_graph=True)
        (out.mean() + ((slope.norm(2, dim=1) - 1) ** 2).mean()).backward()
        return [grads(x), grads(*net.parameters())]

    def backward_with_create_graph_leaves_gradients_with_history() -> Any:
        x = leaf(3)
        mixed(x**3).backward(create_graph=True)
        first = x.grad
        (second,) = torch.autograd.grad(mixed(first), x)
        mixed(x**2).backward(create_graph=True)
        return [first, second, x.grad]

    def a_retained_graph_runs_again() -> Any:
        x, w = leaf(3, 4), leaf(4, 4)
        out = mixed((x @ w).relu_().tanh())
        out.backward(retain_graph=True)
        first = [grad.clone() for grad in grads(x, w)]
        out.backward()
        return [first, grads(x, w)]

    def a_second_pass_over_a_freed_graph_is_an_error() -> Any:
        x = leaf(3)
        hidden = x.exp()
        out = mixed(hidden)
        out.backward()
        once = x.grad.clone()
        again = mixed(hidden)
        return [failure(out.backward, SECOND_TIME), failure(again.backward, SECOND_TIME), once]

    def gradients_add_up_over_passes() -> Any:
        w, x = leaf(4, 4), leaf(3, 4)
        for _ in range(3):
            mixed((x @ w).sin()).backward()
        return grads(w, x)

    def a_gradient_kept_from_before_is_added_to_in_place() -> Any:
        w = leaf(3)
        mixed(w.exp()).backward()
        kept = w.grad
        mixed(w.sin()).backward()
        return [kept, kept is w.grad]

    def a_given_gradient_is_not_changed() -> Any:
        x, given = leaf(3), torch.tensor([1.0, 2.0, 3.0])
        (x + x).backward(given)
        (x * 1.5).backward(given)
        return [given, grads(x)]

    def a_gradient_of_zero_dimensions_expands() -> Any:
        x, y = leaf(3, 4), leaf(3, 4)
        (x + y + x).sum().backward()
        return grads(x, y)

    def a_wrong_dtype_of_the_given_gradient_is_cast() -> Any:
        x = leaf(3)
        (x * 2).backward(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
        return grads(x)

    def constants_take_no_gradient() -> Any:
        x = leaf(3)
        with torch.no_grad():
            y = x * 2
        mixed(y * x + x.detach()).backward()
        return [grads(x), y]


# - custom functions


class TwoIn(Function):
    """Several outputs, arguments that are no tensors, a result that needs no gradient."""

    @staticmethod
    def forward(ctx, scale, x, name, y, flag=None):
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        rounded = x.round()
        ctx.mark_non_differentiable(rounded)
        return x * y * scale, rounded, x + y

    @staticmethod
    def backward(ctx, product, rounded, total):
        x, y = ctx.saved_tensors
        assert not rounded.any()
        return None, product * y * ctx.scale + total, None, product * x * ctx.scale + total, None


class Partly(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        return x.exp(), y.exp()

    @staticmethod
    def backward(ctx, x, y):
        return x * ctx.saved_tensors[0], None


class Unmaterialized(Function):
    seen: list[str] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        Unmaterialized.seen.append(f"{first is None} {second is None}")
        return second * 3 if first is None else first * 2


class Materialized(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x.double() * 3

    @staticmethod
    def backward(ctx, first, second):
        assert not first.any()
        return first + second.float()


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0] ** 2


class Cube(Function):
    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0] ** 2


class Doubled(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Broken(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("The backward pass is broken.")


class Inner(Function):
    """Makes a graph of its own on the way, so that its node is not the last one made when it saves."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            y = inner.exp().sin()
        ctx.save_for_backward(inner, y)
        return y.detach()

    @staticmethod
    def backward(ctx, grad):
        inner, y = ctx.saved_tensors
        with torch.enable_grad():
            again = inner.exp().sin()
        assert torch.equal(again, y)
        return torch.autograd.grad(again, inner, grad)


class Functions:
    def a_function_of_several_outputs_and_other_arguments() -> Any:
        x, y = leaf(3), leaf(3)
        product, rounded, total = TwoIn.apply(2.0, x, "name", y * 3, None)
        (mixed(product) + mixed(total) + rounded.sum()).backward()
        return grads(x, y)

    def a_function_of_which_one_output_is_not_used() -> Any:
        x, y = leaf(3), leaf(3)
        mixed(TwoIn.apply(2.0, x, "name", y)[2].exp()).backward()
        return grads(x, y)

    def a_function_of_which_one_argument_needs_no_gradient() -> Any:
        x, y = torch.randn(3), leaf(3)
        mixed(TwoIn.apply(2.0, x, "name", y, True)[0]).backward()
        return grads(x, y)

    def a_function_that_gives_no_gradient() -> Any:
        x, y = leaf(3), leaf(3)
        a, b = Partly.apply(x.sin(), y.sin())
        (mixed(a) + mixed(b) + mixed(x)).backward()
        return grads(x, y)

    def a_function_that_takes_missing_gradients_as_none() -> Any:
        x = leaf(3)
        Unmaterialized.seen = []
        mixed(Unmaterialized.apply(x)[1]).backward()
        mixed(Unmaterialized.apply(x)[0]).backward()
        return [Unmaterialized.seen, grads(x)]

    def a_function_that_takes_missing_gradients_as_zeros() -> Any:
        x = leaf(3)
        mixed(Materialized.apply(x)[1]).backward()
        return grads(x)

    def a_function_differentiable_once() -> Any:
        x = leaf(3)
        mixed(Once.apply(x)).backward()
        (slope,) = torch.autograd.grad(mixed(Once.apply(x)), x, create_graph=True)
        return [grads(x), slope, failure(mixed(slope).backward, "")]

    def a_function_differentiated_twice() -> Any:
        x = leaf(3)
        (slope,) = torch.autograd.grad(mixed(Cube.apply(x)), x, create_graph=True)
        mixed(slope).backward()
        return [slope, grads(x)]

    def a_function_frees_what_it_saved() -> Any:
        x = leaf(3)
        out = mixed(Cube.apply(x))
        out.backward(retain_graph=True)
        out.backward()
        total = x.grad.clone()
        return [failure(out.backward, SECOND_TIME), total]

    def a_function_that_changes_its_argument() -> Any:
        x = leaf(3)
        y = x * 1.5
        mixed(Doubled.apply(y) * y).backward()
        return grads(x)

    def a_backward_pass_inside_a_function() -> Any:
        x = leaf(3)
        out = mixed(Inner.apply(x * 2).tanh())
        out.backward(retain_graph=True)
        out.backward()
        total = x.grad.clone()
        return [total, failure(out.backward, SECOND_TIME)]

    def an_error_in_a_backward_pass_comes_through() -> Any:
        x = leaf(3)
        failed = failure(mixed(Broken.apply(x)).backward, "The backward pass is broken.")
        mixed(x.exp()).backward()
        return [failed, torch._C._current_graph_task_id(), grads(x)]


# - hooks


class Hooks:
    def hooks_on_tensors_change_gradients() -> Any:
        x, w = leaf(3), leaf(3)
        x.register_hook(lambda grad: grad * 2)
        x.register_hook(lambda grad: grad + 1)
        w.register_hook(lambda grad: None)
        hidden = x * w
        hidden.register_hook(lambda grad: grad * 3)
        gone = hidden.register_hook(lambda grad: grad * 100)
        gone_too = w.register_hook(lambda grad: grad * 100)
        gone.remove()
        gone_too.remove()
        mixed(hidden.exp() + hidden).backward()
        return grads(x, w)

    def hooks_on_the_outputs_of_one_node() -> Any:
        x, log = leaf(4, 6), []
        a, b, c = x.exp().chunk(3, dim=1)
        b.register_hook(lambda grad: log.append("b"))
        a.register_hook(lambda grad: grad * 2)
        mixed(a * b + c).backward()
        return [log, grads(x)]

    def hooks_run_when_a_pass_captures_them() -> Any:
        x = leaf(3)
        hidden = x.exp()
        hidden.register_hook(lambda grad: grad * 3)
        x.register_hook(lambda grad: grad * 5)
        return torch.autograd.grad(mixed(hidden), [hidden, x])

    def hooks_run_in_order() -> Any:
        x, w, log = leaf(3), leaf(3), []
        hidden = x * w
        out = hidden.exp() * w
        for name, tensor in (("x", x), ("w", w), ("hidden", hidden), ("out", out)):
            tensor.register_hook(lambda grad, name=name: log.append(name))
        for name, tensor in (("x", x), ("w", w)):
            tensor.register_post_accumulate_grad_hook(lambda tensor, name=name: log.append(f"{name} is there"))
        mixed(out).backward()
        return [log, grads(x, w)]

    def hooks_on_nodes_of_custom_functions() -> Any:
        x, log = leaf(3), []
        y = Cube.apply(x)
        y.grad_fn.register_hook(lambda inputs, outputs: (inputs[0] * 2,))
        y.grad_fn.register_hook(lambda inputs, outputs: log.append(len(outputs)))
        y.grad_fn.register_prehook(lambda outputs: (outputs[0] + 1,))
        gone = y.grad_fn.register_hook(lambda inputs, outputs: (inputs[0] * 100,))
        gone.remove()
        mixed(y).backward()
        return [log, grads(x)]

    def a_hook_set_before_an_in_place_operator() -> Any:
        x = leaf(3)
        y = x * 1.5
        y.register_hook(lambda grad: grad * 3)
        y.mul_(2)
        y.register_hook(lambda grad: grad + 1)
        mixed(y).backward()
        return grads(x)

    def gradients_retained_where_an_operator_in_place_follows() -> Any:
        x = leaf(3)
        y, gone = x * 1.5, x * 2.5
        gone.retain_grad()
        y.retain_grad()
        y.mul_(2)
        total = mixed(y.exp() + gone)
        del gone
        total.backward()
        return grads(x, y)

    def gradients_retained_over_two_passes_with_an_operator_in_place_between() -> Any:
        x = leaf(3)
        y = x * 1.5
        y.retain_grad()
        mixed(y).backward(retain_graph=True)
        y.mul_(2)
        mixed(y.sin()).backward()
        return grads(x, y)

    def retained_gradients() -> Any:
        x = leaf(3)
        hidden, other = x.exp(), x.sin()
        hidden.register_hook(lambda grad: grad * 2)
        hidden.retain_grad()
        hidden.retain_grad()
        other.retain_grad()
        out = mixed(hidden * other + hidden)
        out.backward(retain_graph=True)
        first = hidden.grad.clone()
        out.backward()
        return [first, hidden.retains_grad, grads(hidden, other, x)]

    def hooks_after_accumulation_may_use_and_drop_gradients() -> Any:
        net, seen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), []

        def step(parameter: torch.Tensor) -> None:
            seen.append(parameter.grad.clone())
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in net.parameters()]
        mixed(net(torch.randn(2, 3))).backward()
        handles[0].remove()
        mixed(net(torch.randn(2, 3))).backward()
        return [seen, list(net.parameters()), grads(*net.parameters())]

    def hooks_on_modules() -> Any:
        net, log = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), []

        def after(module: nn.Module, inward: Any, outward: Any) -> Any:
            log.extend((f"after {type(module).__name__}", *inward, *outward))
            return tuple(None if grad is None else grad * 2 for grad in inward)

        def before(module: nn.Module, outward: Any) -> Any:
            log.append(f"before {type(module).__name__}")
            return (outward[0] * 3,)

        for child in (*net, net):
            child.register_full_backward_hook(after)
            child.register_full_backward_pre_hook(before)
        x = leaf(3, 4)
        mixed(net(x)).backward()
        return [log, grads(x, *net.parameters())]

    def hooks_on_modules_whose_input_needs_no_gradient() -> Any:
        net, log = nn.Linear(4, 2), []
        net.register_full_backward_hook(lambda module, inward, outward: log.extend((inward[0] is None, *outward)))
        net.register_full_backward_pre_hook(lambda module, outward: log.extend(outward))
        mixed(net(torch.randn(3, 4))).backward()
        return [log, grads(*net.parameters())]

    def callbacks_at_the_end_of_a_pass() -> Any:
        x, log = leaf(3), []

        def hook(grad: torch.Tensor) -> None:
            Variable._execution_engine.queue_callback(lambda: log.append(x.grad is not None))
            Variable._execution_engine.queue_callback(lambda: log.append("last"))
            log.append("hook")

        y = x.exp()
        y.register_hook(hook)
        mixed(y).backward()
        mixed(x.sin()).backward()
        return [log, grads(x)]


# - checkpoints and hooks on what is saved


def block(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(width, width))


def checkpointed(*, reentrant: bool, nested: bool = False, early_stop: bool = True) -> Any:
    first, second, x = block(), block(), leaf(3, 4)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(second, x.tanh(), use_reentrant=reentrant) if nested else x + second(x.tanh())

    with contextlib.nullcontext() if reentrant else set_checkpoint_early_stop(early_stop):
        y = checkpoint(first, x * 1.5, use_reentrant=reentrant)
        y = checkpoint(inner, y, use_reentrant=reentrant) + checkpoint(inner, y.sin(), use_reentrant=reentrant)
    mixed(y).backward()
    return grads(x, *first.parameters(), *second.parameters())


class Saved:
    def reentrant_checkpoints() -> Any:
        return checkpointed(reentrant=True)

    def nested_reentrant_checkpoints() -> Any:
        return checkpointed(reentrant=True, nested=True)

    def checkpoints() -> Any:
        return checkpointed(reentrant=False)

    def checkpoints_without_early_stop() -> Any:
        return checkpointed(reentrant=False, early_stop=False)

    def nested_checkpoints() -> Any:
        return checkpointed(reentrant=False, nested=True)

    def nested_checkpoints_without_early_stop() -> Any:
        return checkpointed(reentrant=False, nested=True, early_stop=False)

    def checkpoints_of_leaves_one_after_the_other() -> Any:
        """The second one's input is saved when the last node is the first one's."""
        layer, first, second = block(), leaf(3, 4), leaf(3, 4)
        losses = [mixed(checkpoint(layer, x, use_reentrant=False)) for x in (first, second)]
        for loss in losses:
            loss.backward()
        return grads(first, second, *layer.parameters())

    def a_checkpoint_of_a_retained_graph() -> Any:
        layer, x = block(), leaf(3, 4)
        out = mixed(checkpoint(layer, x, use_reentrant=False))
        out.backward(retain_graph=True)
        out.backward()
        return grads(x, *layer.parameters())

    def a_checkpoint_twice_freed_is_an_error() -> Any:
        x = leaf(3, 4)
        out = mixed(checkpoint(lambda x: x.exp().sin(), x, use_reentrant=False))
        out.backward()
        return [failure(out.backward, ""), grads(x)]

    def callbacks_inside_a_reentrant_checkpoint() -> Any:
        x, log = leaf(3), []

        def inside(x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            if y.requires_grad:
                y.register_hook(lambda grad: queue("inside"))
            return y

        def queue(name: str) -> None:
            log.append(name)
            Variable._execution_engine.queue_callback(lambda: log.append(f"{name} is over"))

        y = x * 2
        y.register_hook(lambda grad: log.append("between"))
        out = checkpoint(inside, y, use_reentrant=True)
        out.register_hook(lambda grad: queue("outside"))
        mixed(out).backward()
        return [log, grads(x)]

    def saved_tensors_packed_by_the_user() -> Any:
        x, log = leaf(3), []

        def pack(tensor: torch.Tensor) -> Any:
            log.append("pack")
            return tensor.detach().numpy().copy()

        def unpack(packed: Any) -> torch.Tensor:
            log.append("unpack")
            return torch.from_numpy(packed) * 2

        with saved_tensors_hooks(pack, unpack):
            y = x.exp() * x
            with saved_tensors_hooks(lambda tensor: tensor + 1, lambda tensor: tensor):
                y = y.sin()
        out = mixed(y)
        out.backward(retain_graph=True)
        out.backward()
        return [log, grads(x)]

    def saved_tensors_kept_on_the_cpu() -> Any:
        net, x = block(), leaf(3, 4)
        with save_on_cpu():
            y = net(x).relu_()
        mixed(y).backward()
        return grads(x, *net.parameters())

    def saved_tensors_packed_inside_a_checkpoint() -> Any:
        x = leaf(3)

        def inside(x: torch.Tensor) -> torch.Tensor:
            with saved_tensors_hooks(lambda tensor: tensor * 1, lambda tensor: tensor * 2):
                return x.exp().sin()

        mixed(checkpoint(inside, x, use_reentrant=False)).backward()
        return grads(x)

    def gradients_by_torch_func() -> Any:
        net, x = block().eval(), leaf(3, 4)  # without random numbers
        parameters = dict(net.named_parameters())
        fixed = {name: parameter.detach() for name, parameter in parameters.items()}

        def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
            return mixed(functional_call(net, parameters, (x,)).tanh())  # which saves its own result

        a_sample = vmap(grad(loss), in_dims=(None, 0))(fixed, x.detach())
        slopes = vmap(grad(loss, argnums=1), in_dims=(None, 0))(parameters, x)
        out, tangent = jvp(lambda x: functional_call(net, parameters, (x,)), (x,), (torch.ones_like(x),))
        (slopes.square().sum() + (out * tangent).sum()).backward()
        return [a_sample, grads(x, *net.parameters())]

    def jacobians_by_torch_func() -> Any:
        """`vjp` differentiates with respect to a tensor whose transform is over."""
        net, x = block().eval(), leaf(3, 4)

        def loss(x: torch.Tensor) -> torch.Tensor:
            return mixed(net(x).tanh())

        first, second = vmap(jacrev(loss))(x), vmap(hessian(loss))(x)
        nothing = jacrev(lambda x: torch.ones(2))(x.detach())
        (first.square().sum() + second.square().sum()).backward()
        return [nothing, jacrev(jacrev(loss))(x.detach()), grads(x, *net.parameters())]


# Each runs once on the engine and once on the walk; what it returns must be the same.
SCENARIOS = [
    each for of in (Operators, Starts, Functions, Hooks, Saved) for each in vars(of).values() if callable(each)
]


@pytest.mark.parametrize("as_plain", [True, False], ids=["adding_in_place", "adding_out_of_place"])
@pytest.mark.parametrize("function", SCENARIOS, ids=lambda function: function.__name__)
def test_a_walk_gives_what_the_engine_gives(function: Scenario, as_plain: bool) -> None:
    check_both(function, as_plain)


# Memory on fake tensors


class Log(TorchDispatchMode):
    """The operators that ran, each with the storage of its first result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        result = next((leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)), None)
        if result is not None:
            self.calls.append((str(func), storage(result)))
        return out

    def count(self, operator: str) -> int:
        return sum(name == f"aten.{operator}" for name, _ in self.calls)

    def last(self, operator: str) -> int:
        return next(result for name, result in reversed(self.calls) if name == f"aten.{operator}")


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def watched(loss: torch.Tensor, **kwargs: Any) -> Log:
    """Run the backward pass, and see what ran."""
    with Log() as log:
        loss.backward(**kwargs)
    return log


def test_a_gradient_that_only_the_walk_holds_is_moved(fake: None) -> None:
    with walking():
        w, x = leaf(4), torch.randn(4)
        log = watched((w * x).sum())
    assert storage(w.grad) == log.last("mul.Tensor")
    assert log.count("clone.default") == log.count("copy_.default") == log.count("new_empty_strided.default") == 0


@pytest.mark.parametrize("hold", [list.append, lambda held, grad: held.append(grad.detach())], ids=["tensor", "alias"])
def test_a_gradient_that_others_hold_is_treated_as_by_the_engine(
    fake: None, hold: Callable[[list[Any], torch.Tensor], None]
) -> None:
    shared = []
    for walks in (contextlib.nullcontext(), walking()):
        held = []
        with walks:
            w, x = leaf(4), torch.randn(4)
            w.register_hook(lambda grad, held=held: hold(held, grad))
            (w * x).sum().backward()
        shared.append(storage(w.grad) == storage(held[0]))
    assert shared[0] == shared[1] == (hold is not list.append)


def test_a_gradient_for_two_leaves_is_copied_for_one_of_them(fake: None) -> None:
    taken = []
    for walks in (contextlib.nullcontext(), walking()):
        with walks:
            a, b, x = leaf(4), leaf(4), torch.randn(4)
            log = watched(((a + b) * x).sum())
        assert storage(a.grad) != storage(b.grad)
        taken.append([storage(grad) == log.last("mul.Tensor") for grad in (a.grad, b.grad)])
        assert log.count("new_empty_strided.default") == 1
    assert sorted(taken[0]) == [False, True]
    assert taken[0] == taken[1]


def test_an_expanded_gradient_is_copied(fake: None) -> None:
    with walking():
        w = leaf(4)
        log = watched(w.sum())
    assert w.grad.stride() == (1,)
    assert log.count("new_empty_strided.default") == log.count("copy_.default") == 1


def test_a_gradient_laid_out_otherwise_is_copied(fake: None) -> None:
    with walking():
        w, x = leaf(4, 3), torch.randn(3, 4)
        log = watched((w.t() * x).sum())
    assert w.grad.stride() == w.stride()
    assert storage(w.grad) == log.last("new_empty_strided.default")


def residual() -> torch.Tensor:
    w = leaf(4)
    y = w * torch.randn(4)
    return ((y + y.sin()) * torch.randn(4)).sum()


def test_a_second_gradient_is_added_in_place_where_the_first_is_alone(fake: None) -> None:
    with walking():
        loss = residual()
        log = watched(loss)
    assert (log.count("add_.Tensor"), log.count("add.Tensor")) == (1, 0)


def test_a_second_gradient_is_added_out_of_place_on_request(fake: None) -> None:
    with walking(as_plain=False):
        log = watched(residual())
    assert (log.count("add_.Tensor"), log.count("add.Tensor")) == (0, 1)


@pytest.mark.parametrize("alias", [False, True], ids=["tensor", "alias"])
def test_a_second_gradient_is_added_out_of_place_where_the_first_is_held(fake: None, alias: bool) -> None:
    held = []
    with walking():
        w = leaf(4)
        y = w * torch.randn(4)
        z = y + y.sin()
        z.register_hook(lambda grad: held.append(grad.view(2, 2) if alias else grad))
        log = watched((z * torch.randn(4)).sum())
    assert held
    assert (log.count("add_.Tensor"), log.count("add.Tensor")) == (0, 1)


def test_a_second_gradient_is_added_out_of_place_where_a_graph_is_made(fake: None) -> None:
    with walking(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log = watched(residual(), create_graph=True)
    assert log.count("add_.Tensor") == 0
    assert log.count("add.Tensor") == 1


def test_fake_tensors_get_the_engines_operators(fake: None) -> None:
    with Log() as engine:
        residual().backward()
    with Log() as walk, walking(as_plain=False):
        residual().backward()
    names = [[name for name, _ in log.calls if "detach" not in name] for log in (engine, walk)]
    assert names[0] == names[1]


class Lives:
    """Storages that are alive whenever a node is about to run: "#" is alive, "-" is gone."""

    def __init__(self) -> None:
        self.storages: list[weakref.ref[Any]] = []
        self.seen: list[str] = []

    def keep_watch(self, tensor: torch.Tensor) -> torch.Tensor:
        self.storages.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def enter(self, metadata: dict[str, Any]) -> None:
        self.seen.append(self.now())

    def now(self) -> str:
        return "".join("-" if ref() is None else "#" for ref in self.storages)


class Tanh(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


TANHS = pytest.mark.parametrize("tanh", [torch.tanh, Tanh.apply], ids=["operator", "function"])


@TANHS
def test_saved_tensors_die_when_their_node_has_run_and_not_before(
    fake: None, tanh: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    lives = Lives()
    with walking(lives.enter):
        x = leaf(4)
        loss = lives.keep_watch(tanh(lives.keep_watch(tanh(x)))).sum()
        loss.backward()
    # Before the sum, the second tanh, the first, and the leaf's accumulation.
    assert lives.seen == ["##", "##", "#-", "--"]
    assert lives.now() == "--"


@TANHS
def test_saved_tensors_live_on_with_a_retained_graph(fake: None, tanh: Callable[[torch.Tensor], torch.Tensor]) -> None:
    lives = Lives()
    with walking(lives.enter):
        x = leaf(4)
        loss = lives.keep_watch(tanh(lives.keep_watch(tanh(x)))).sum()
        loss.backward(retain_graph=True)
        assert lives.seen == ["##"] * 4
        assert lives.now() == "##"
        loss.backward()
        assert lives.now() == "--"


def test_saved_tensors_of_a_graph_without_a_backward_pass_die_with_it(fake: None) -> None:
    lives = Lives()
    with walking(lives.enter):
        loss = lives.keep_watch(leaf(4).tanh()).sum()
        assert lives.now() == "#"
        del loss
        assert lives.now() == "-"


def test_what_an_in_place_operator_on_a_view_saved_dies_when_it_has_run(fake: None) -> None:
    lives = Lives()
    with walking(lives.enter):
        x = leaf(4)
        y = x * 2
        lives.keep_watch(y)
        y[:2].tanh_()
        loss = y.sum()
        del y
        loss.backward()
    # Before the sum, CopySlices, the multiplication, and the leaf's accumulation.
    assert lives.seen == ["#", "#", "-", "-"]


def test_what_a_function_saved_after_other_nodes_were_made_dies_when_it_has_run(fake: None) -> None:
    lives = Lives()

    class Late(Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                y = x.detach().requires_grad_().exp().sin().detach()
            ctx.save_for_backward(lives.keep_watch(y))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    with walking(lives.enter):
        loss = Late.apply(leaf(4)).sum()
        loss.backward()
    # Before the sum, the function, and the leaf's accumulation.
    assert lives.seen == ["#", "#", "-"]


def test_what_hooks_of_the_users_packed_dies_when_its_node_has_run(fake: None) -> None:
    lives = Lives()
    with walking(lives.enter):
        x = leaf(4)
        with saved_tensors_hooks(lambda tensor: lives.keep_watch(tensor + 1), lambda tensor: tensor):
            y = x.tanh()
        loss = y.sum()
        loss.backward()
    assert lives.seen == ["#", "#", "-"]


@pytest.mark.parametrize("early_stop", [True, False])
def test_what_a_checkpoint_computes_again_dies_node_by_node(fake: None, early_stop: bool) -> None:
    lives = Lives()

    def inside(x: torch.Tensor) -> torch.Tensor:
        return lives.keep_watch(lives.keep_watch(x.tanh()).tanh())

    with walking(lives.enter), set_checkpoint_early_stop(early_stop):
        x = leaf(4)
        loss = checkpoint(inside, x, use_reentrant=False).sum()
        assert lives.now() == "--"
        loss.backward()
    assert lives.seen[:3] == ["--", "--", "--#" if early_stop else "--#-"]
    assert "#" not in lives.now()


# The queue


class Numbered:
    """A node of which only the number matters."""

    def __init__(self, number: int, name: int) -> None:
        self.number = number
        self.name = name

    def _sequence_nr(self) -> int:
        return self.number


class StlQueue:
    """libstdc++'s ``std::push_heap`` and ``std::pop_heap`` (bits/stl_heap.h), line by line, on a list."""

    def __init__(self) -> None:
        self.array: list[Numbered] = []

    def less(self, a: Numbered, b: Numbered) -> bool:
        return a.number < b.number

    def push_heap(self, first: list[Numbered], hole_index: int, top_index: int, value: Numbered) -> None:
        parent = int((hole_index - 1) / 2)
        while hole_index > top_index and self.less(first[parent], value):
            first[hole_index] = first[parent]
            hole_index = parent
            parent = int((hole_index - 1) / 2)
        first[hole_index] = value

    def adjust_heap(self, first: list[Numbered], hole_index: int, length: int, value: Numbered) -> None:
        top_index = hole_index
        second_child = hole_index
        while second_child < int((length - 1) / 2):
            second_child = 2 * (second_child + 1)
            if self.less(first[second_child], first[second_child - 1]):
                second_child -= 1
            first[hole_index] = first[second_child]
            hole_index = second_child
        if (length & 1) == 0 and second_child == int((length - 2) / 2):
            second_child = 2 * (second_child + 1)
            first[hole_index] = first[second_child - 1]
            hole_index = second_child - 1
        self.push_heap(first, hole_index, top_index, value)

    def push(self, node: Numbered) -> None:
        self.array.append(node)
        self.push_heap(self.array, len(self.array) - 1, 0, node)

    def pop(self) -> Numbered:
        if len(self.array) > 1:
            value = self.array[-1]
            self.array[-1] = self.array[0]
            self.adjust_heap(self.array, 0, len(self.array) - 1, value)
        return self.array.pop()


steps = st.lists(st.one_of(st.none(), st.integers(0, 5), st.integers(0, 2**64 - 1)), max_size=60)


@given(steps)
def test_the_queue_pops_the_latest_made_and_breaks_ties_like_libstdcxx(steps: list[int | None]) -> None:
    queue, reference = list[Any](), StlQueue()
    for name, number in enumerate([*steps, *[None] * len(steps)]):
        if number is not None:
            node = Numbered(number, name)
            heappush(queue, backward._Ready(node))
            reference.push(node)
        elif queue:
            highest = max(node.number for node in reference.array)
            popped = heappop(queue).node
            assert popped.number == highest
            assert popped is reference.pop()
        assert bool(queue) == bool(reference.array)


def test_ties_are_not_broken_by_age() -> None:
    """Were they, in either direction, a simpler queue would do."""
    queue: list[Any] = []
    for name in range(6):
        heappush(queue, backward._Ready(Numbered(7, name)))
    order = [heappop(queue).node.name for _ in range(6)]
    assert sorted(order) == list(range(6))
    assert order not in (list(range(6)), list(reversed(range(6))))


# What is patched, and put back

PATCHED = [
    (Variable, "_execution_engine"),
    (torch._C, "_current_graph_task_id"),
    (torch.Tensor, "register_hook"),
    (torch.Tensor, "retain_grad"),
    (FunctionCtx, "set_materialize_grads"),
    (BackwardCFunction, "register_hook"),
    (BackwardCFunction, "register_prehook"),
    (torch._C._autograd, "_push_saved_tensors_default_hooks"),
    (torch._C._autograd, "_pop_saved_tensors_default_hooks"),
    (torch._C._autograd, "_saved_tensors_hooks_disable"),
    (torch._C._autograd, "_saved_tensors_hooks_enable"),
]


def owned() -> list[Any]:
    return [vars(owner).get(name) for owner, name in PATCHED]


def saves_plainly() -> bool:
    """Whether saved tensors are free of hooks: autograd takes only one pair for each."""
    node = leaf(3).tanh().grad_fn
    try:
        node._raw_saved_result.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
    except RuntimeError:
        return False
    return True


def test_everything_is_patched_inside_a_walk_and_as_it_was_after_it() -> None:
    before = owned()
    assert saves_plainly()
    with walking():
        inside = owned()
        assert not saves_plainly()
    assert all(mine is not theirs for mine, theirs in zip(inside, before, strict=True))
    assert all(mine is theirs for mine, theirs in zip(owned(), before, strict=True))
    assert "register_hook" not in vars(BackwardCFunction)
    assert "register_prehook" not in vars(BackwardCFunction)
    assert saves_plainly()


def fail_in_forward() -> None:
    leaf(3).tanh()
    raise KeyError("stop")


def fail_in_backward() -> None:
    y = leaf(3).tanh()
    y.register_hook(lambda grad: {}[grad])
    y.sum().backward()


def fail_in_a_checkpoint() -> None:
    calls = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (x * (1 if len(calls) == 1 else calls[5])).tanh()

    checkpoint(inside, leaf(3), use_reentrant=False).sum().backward()


def fail_between_the_users_hooks() -> None:
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        fail_in_forward()


FAILURES = [fail_in_forward, fail_in_backward, fail_in_a_checkpoint, fail_between_the_users_hooks]


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
def test_everything_is_as_it_was_after_an_error_too(fail: Callable[[], None]) -> None:
    before = owned()
    with pytest.raises(LookupError), walking():
        fail()
    assert all(mine is theirs for mine, theirs in zip(owned(), before, strict=True))
    assert saves_plainly()
    assert graph_task() == torch._C._current_graph_task_id() == -1
    x = leaf(3)
    mixed(x.exp()).backward()
    assert x.grad is not None


def test_a_walk_inside_a_walk_puts_the_outer_one_back() -> None:
    with walking():
        outer = owned()
        with walking():
            assert owned()[0] is not outer[0]
        assert all(mine is theirs for mine, theirs in zip(owned(), outer, strict=True))
        x = leaf(3)
        mixed(x.exp()).backward()
    assert x.grad is not None


def test_the_number_of_the_pass_is_known_while_it_runs() -> None:
    seen = []

    def hook(grad: torch.Tensor) -> None:
        seen.append((graph_task(), torch._C._current_graph_task_id()))

    with walking():
        x = leaf(3)
        x.register_hook(hook)
        mixed(x.exp()).backward()
        mixed(x.exp()).backward()
        assert graph_task() == -1
    numbers = [number for number, _ in seen]
    assert len(set(numbers)) == 2
    assert all(number >= 0 and number == expected for number, expected in seen)


def test_a_pass_of_the_engines_own_has_its_number() -> None:
    seen = []
    x = leaf(3)
    x.register_hook(lambda grad: seen.append(graph_task()))
    mixed(x.exp()).backward()
    assert seen[0] >= 0
    assert graph_task() == -1
