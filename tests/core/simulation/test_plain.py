"""Formulas that do something else under a dispatch mode are predicted as they are on plain tensors.

Each function below, forward and backward, is compared with PyTorch's profiler around the same on real tensors. A
formula that begins to ask `areAnyTensorSubclassLike` fails here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memguard.core.capture.program import tensors
from lightning_memguard.core.capture.recorder import Recorder, watching
from lightning_memguard.core.simulation.fake import fake_copy
from tests.profiled import measured_peak

pytestmark = pytest.mark.exact

COLUMNS = torch.zeros(40, 30, dtype=torch.long)
ROWS = torch.tensor([0, 2, 2])
ONES, MASK = torch.ones(40, 50), torch.ones(40, 50, dtype=torch.bool)
FEW, CLASSES = torch.zeros(40, 3, dtype=torch.long), torch.zeros(40, dtype=torch.long)
PAIR, WEIGHT = torch.tensor([0, 2]), torch.ones(50)

# Those that ask today, in torch 2.11 to 2.13.
BRANCHING: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda x: x[ROWS],
    "index of two": lambda x: x[ROWS, ROWS],
    "index of columns": lambda x: x[:, ROWS],
    "gather": lambda x: x.gather(1, COLUMNS),
    "take_along_dim": lambda x: torch.take_along_dim(x, COLUMNS, 1),
    "take": lambda x: x.take(ROWS),
    "index_select": lambda x: x.index_select(1, ROWS),
    "max along": lambda x: x.max(1)[0],
    "min along": lambda x: x.min(1, keepdim=True)[0],
    "median along": lambda x: x.median(1)[0],
    "nanmedian along": lambda x: x.nanmedian(1)[0],
    "mode": lambda x: x.mode(1)[0],
    "topk": lambda x: x.topk(5, 1)[0],
    "sort": lambda x: x.sort(1)[0],
    "cummax": lambda x: x.cummax(1)[0],
    "cummin": lambda x: x.cummin(1)[0],
    "prod": lambda x: x.prod(),
    "prod along": lambda x: x.prod(1),
    "prod along, kept": lambda x: x.prod(-2, keepdim=True),
    "cumprod": lambda x: x.cumprod(-1),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "median": lambda x: x.median(),
    "masked_select": lambda x: x.masked_select(MASK),
    "trace": lambda x: x[:, :40].trace(),
    "clamp": lambda x: x.clamp(x.flip(0) * 0.5, x.flip(0)),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, ONES),
    "bce with weights": lambda x: F.binary_cross_entropy_with_logits(x, ONES, weight=WEIGHT, pos_weight=WEIGHT),
    "linear of a view": lambda x: F.linear(x.view(4, 10, 50).transpose(0, 1), torch.ones(7, 50), torch.ones(7)),
    "linear of a view of images": lambda x: F.linear(
        x.view(2, 2, 10, 50).transpose(1, 2), torch.ones(7, 50), torch.ones(7)
    ),
}
# Some of the many that do not.
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x.view(2, 2, 10, 50), torch.ones(7, 50), torch.ones(7)),
    "scatter": lambda x: x.scatter(1, FEW, x[:, :3]),
    "scatter_add": lambda x: x.scatter_add(1, FEW, x[:, :3]),
    "scatter_reduce": lambda x: x.scatter_reduce(1, FEW, x[:, :3], "amax"),
    "scatter_reduce, product": lambda x: x.scatter_reduce(1, FEW, x[:, :3], "prod"),
    "index_reduce": lambda x: x.index_reduce(0, PAIR, x[:2], "amax"),
    "index_add": lambda x: x.index_add(0, PAIR, x[:2]),
    "index_copy": lambda x: x.index_copy(0, PAIR, x[:2]),
    "index_fill": lambda x: x.index_fill(0, PAIR, 0.0),
    "index_put": lambda x: x.index_put((PAIR,), x[:2]),
    "put": lambda x: x.put(PAIR, x[0, :2]),
    "masked_fill": lambda x: x.masked_fill(x > 0.7, 0.0),
    "where": lambda x: torch.where(x > 0.7, x, x.flip(0)),
    "amax": lambda x: x.amax(1),
    "aminmax": lambda x: x.aminmax(dim=1)[0],
    "cumsum": lambda x: x.cumsum(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "std": lambda x: x.std(1),
    "norm": lambda x: x.norm(),
    "norm 3": lambda x: x.norm(3),
    "norm inf": lambda x: x.norm(float("inf")),
    "norm along": lambda x: x.norm(dim=1),
    "cosine similarity": lambda x: F.cosine_similarity(x, x.flip(0)),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "fmin": lambda x: torch.fmin(x, x.flip(0)),
    "clamp_min": lambda x: x.clamp_min(x.flip(0)),
    "pow": lambda x: x.pow(x.flip(0)),
    "copysign": lambda x: torch.copysign(x, x.flip(0)),
    "repeat": lambda x: x.repeat(2, 1),
    "as_strided": lambda x: x.as_strided((5, 5), (50, 1)),
    "diagonal": lambda x: x.diagonal(),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), x.softmax(-1)),
    "poisson": lambda x: F.poisson_nll_loss(x, ONES, full=True),
    "cross entropy": lambda x: F.cross_entropy(x, CLASSES, label_smoothing=0.1),
    "max_pool": lambda x: F.max_pool2d(x.view(4, 10, 5, 10), 2),
    "embedding": lambda x: F.embedding(ROWS, x),
    "pad": lambda x: F.pad(x.view(4, 10, 50), (1, 2), mode="reflect"),
}
CASES = {**BRANCHING, **OTHERS}


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.rand(40, 50) + 0.5)


def asked_for(
    layer: Callable[..., Tensor], of_input: bool, shape: tuple[int, ...], *sizes: tuple[int, ...]
) -> Callable[[Tensor], Tensor]:
    """A step that asks for the gradient of a layer's input, or of its weight alone, before its backward pass."""

    def function(x: Tensor) -> Tensor:
        weights = [torch.ones(size, requires_grad=True) for size in sizes]
        out = layer(x.requires_grad_().view(shape), *weights)
        (found,) = torch.autograd.grad(loss_of(out), x if of_input else weights[0], retain_graph=True)
        return out * found.norm().detach()

    return function


ASKED = {
    "convolution": (F.conv2d, (2, 4, 10, 25), (8, 4, 3, 3), (8,)),
    "linear": (F.linear, (40, 50), (30, 50), (30,)),
    "linear of 3 dimensions": (F.linear, (4, 10, 50), (30, 50), (30,)),
    "linear without a bias": (F.linear, (40, 50), (30, 50)),
    "matmul": (torch.matmul, (4, 10, 50), (4, 50, 30)),
    "multiplication": (torch.mul, (40, 50), (40, 50)),
    "division": (torch.div, (40, 50), (40, 50)),
    "the slope of tanh": (lambda x, w: torch.autograd.grad(x.tanh(), x, w, create_graph=True)[0], (40, 50), (40, 50)),
    "that of sigmoid": (lambda x, w: torch.autograd.grad(x.sigmoid(), x, w, create_graph=True)[0], (40, 50), (40, 50)),
    "layer norm": (lambda x, *weights: F.layer_norm(x, (50,), *weights), (40, 50), (50,), (50,)),
    "group norm": (lambda x, *weights: F.group_norm(x, 2, *weights), (2, 4, 10, 25), (4,), (4,)),
    "batch norm": (lambda x, *w: F.batch_norm(x, None, None, *w, training=True), (2, 4, 10, 25), (4,), (4,)),
}
ASKED_FOR = {
    f"the {'input' if of_input else 'weight'} of {name}": asked_for(layer, of_input, *sizes)
    for name, (layer, *sizes) in ASKED.items()
    for of_input in (True, False)
}


def loss_of(out: Tensor) -> Tensor:
    return (out * out).sum()


def peak_of(function: Callable[[Tensor], Tensor]) -> int:
    holder = Holder()
    function(holder.x.detach())  # what torch makes once
    return measured_peak(lambda: loss_of(function(holder.x)).backward())


def predicted_peak(function: Callable[[Tensor], Tensor]) -> int:
    recorder = Recorder("cpu", worst_case=True)
    with tensors(fake=True) as mode:
        assert mode is not None
        copy = fake_copy(Holder(), mode, torch.device("cpu"))
        with watching(recorder, copy):
            recorder.mark("forward")
            loss = loss_of(function(copy.x))  # type: ignore[arg-type]
            recorder.mark("backward")
            loss.backward()
    events = [event for event in recorder.trace(1, "fake").only("point") if event.part != "parameters"]
    return max(accumulate((1 if event.action == "alloc" else -1) * event.nbytes for event in events))


@pytest.mark.parametrize("name", [*CASES, *ASKED_FOR])
def test_a_step_takes_what_the_profiler_measures(name: str) -> None:
    torch.manual_seed(0)
    function = {**CASES, **ASKED_FOR}[name]
    measured, predicted = peak_of(function), predicted_peak(function)
    assert abs(predicted - measured) <= 16, predicted - measured  # numbers that a kernel reads
