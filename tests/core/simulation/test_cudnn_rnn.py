"""RNNs that run through cuDNN: one operator for all layers, whose weights' gradients lie in one buffer."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_memguard import estimate
from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.predict import capture
from lightning_memguard.core.capture.program import LoopProgram, tensors
from lightning_memguard.core.capture.recorder import Recorder, watching
from lightning_memguard.core.kernels.rnn import LSTM, dropout_state_bytes, reserve_bytes
from lightning_memguard.core.simulation import cudnn_rnn
from lightning_memguard.core.trace.scratch import CudaTarget
from lightning_memguard.core.trace.trace import Event, Trace
from tests.long import long_but

pytestmark = [
    pytest.mark.usefixtures("here"),
    pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]

H200 = gpus.find("NVIDIA H200")
TIMES, SAMPLES, FEATURES, HIDDEN = 5, 4, 6, 8
WHOLE, KINDS = (TIMES, SAMPLES, FEATURES), (nn.LSTM, nn.GRU, nn.RNN)

OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "batch first": {"batch_first": True},
    "both directions": {"bidirectional": True},
    "two layers": {"num_layers": 2},
    "two layers both ways": {"num_layers": 2, "bidirectional": True},
    "dropout between layers": {"num_layers": 2, "dropout": 0.5},
    "no bias": {"bias": False},
}
LAYERS = [(kind, name) for kind in KINDS for name in OPTIONS]


def sum_of_output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)[0].float().sum()


def shapes_of(out: Any) -> list[tuple[int, ...]]:
    if isinstance(out, torch.Tensor):
        return [tuple(out.shape)]
    return [shape for item in out for shape in shapes_of(item)]


@functools.cache
def steps(kind: type[nn.RNNBase], samples: int = SAMPLES, precision: str = "32-true", **options: Any) -> Trace:
    """Two steps of such a layer on a pretended H200, captured once; samples go first."""
    batches = batches_from_one(torch.ones(samples, TIMES, FEATURES))
    of = kind(FEATURES, HIDDEN, batch_first=True, **options), batches, sum_of_output, None, torch.device("cuda")
    return capture(LoopProgram(*of, precision, gpu=H200), samples, "fake")


def weights_of(kind: type[nn.RNNBase], **options: Any) -> int:
    return sum(parameter.nbytes for parameter in kind(FEATURES, HIDDEN, **options).parameters())


def taken(trace: Trace, operator: str, step: int = 0) -> list[Event]:
    name = f"aten.{operator}.default"
    return [e for e in trace if e.action == "alloc" and e.operator == name and e.step == step]


def states(shape: tuple[int, ...], kind: type[nn.Module], device: str) -> Any:
    hidden = torch.zeros(shape, device=device)
    return (hidden, hidden.clone()) if kind is nn.LSTM else hidden


# What comes out


def shapes_there_and_here(model: nn.Module, *batch: Any) -> list[list[tuple[int, ...]]]:
    """Shapes of the output and of the last states: on a pretended GPU, and really on the CPU."""
    here = shapes_of(model(*(torch.ones(shape) for shape in batch)))
    with tensors(fake=True, gpu=H200), watching(Recorder("cuda", kernel_target=H200.kernel_target), model):
        there = shapes_of(model.to("cuda")(*(torch.ones(shape, device="cuda") for shape in batch)))
    return [there, here]


@pytest.mark.parametrize(
    ("kind", "options", "shape"),
    [
        *(pytest.param(kind, OPTIONS[name], WHOLE, id=f"{kind.__name__}, {name}") for kind, name in LAYERS),
        *((nn.LSTM, {"proj_size": 3, **more}, WHOLE) for more in ({}, {"bidirectional": True}, {"num_layers": 2})),
        *(pytest.param(kind, {}, WHOLE[::2], id=f"{kind.__name__}, one sequence") for kind in KINDS),
    ],
)
def test_output_and_states_are_shaped_as_the_real_ones(kind: Any, options: Any, shape: tuple[int, ...]) -> None:
    there, here = shapes_there_and_here(kind(FEATURES, HIDDEN, **options), shape)
    assert there == here


# How it gets there


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("kind", "name"), long_but(LAYERS[::4], LAYERS))
def test_a_whole_step_runs_on_fake_tensors_through_one_operator(kind: Any, name: str, training: bool) -> None:
    found = estimate(
        kind(FEATURES, HIDDEN, **OPTIONS[name]),
        torch.ones(SAMPLES, TIMES, FEATURES),
        step=sum_of_output,
        optimizer=torch.optim.Adam,
        device="NVIDIA H200",
        training=training,
    )
    assert (found.method, found.notes) == ("fake", (cudnn_rnn.NOTE,))
    assert sum(found.parts.values()) == found.peak_allocated_bytes


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *itertools.product(KINDS, ({}, {"num_layers": 2, "bidirectional": True})),
        *((nn.LSTM, {"proj_size": 3, **more}) for more in ({}, {"num_layers": 2, "bidirectional": True})),
    ],
)
def test_all_layers_are_one_operator_there_and_back_whose_weights_gradients_are_one_buffer(
    kind: Any, options: Any
) -> None:
    trace = steps(kind, **options)
    operators = {e.operator for e in trace if e.operator}
    assert {"aten._cudnn_rnn.default", "aten._cudnn_rnn_backward.default"} <= operators
    assert not operators & {"aten.addmm.default", "aten.mm.default", "aten.sigmoid.default", "aten.tanh.default"}
    made = [e for e in taken(trace, "_cudnn_rnn_backward") if e.part == "gradients"]
    assert [e.nbytes for e in made] == [weights_of(kind, **options)]


def test_gradients_are_views_shaped_as_their_weights() -> None:
    model = nn.LSTM(FEATURES, HIDDEN, 2)
    with tensors(fake=True, gpu=H200), watching(Recorder("cuda", kernel_target=H200.kernel_target), model):
        model.to("cuda")
        model(torch.ones(TIMES, SAMPLES, FEATURES, device="cuda"))[0].sum().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        assert all(isinstance(grad, FakeTensor) for grad in grads)
        assert [grad.shape for grad in grads] == [parameter.shape for parameter in model.parameters()]
        assert len({grad.untyped_storage()._cdata for grad in grads}) == 1
        offsets = [grad.storage_offset() for grad in grads]
        sizes = [grad.numel() for grad in grads]
        assert offsets == [sum(sizes[:place]) for place in range(len(sizes))]


def test_the_reserve_grows_with_samples_and_layers_and_lives_until_the_backward_pass() -> None:
    def reserve(samples: int, layers: int) -> int:
        trace = steps(nn.LSTM, samples, num_layers=layers)
        (largest,) = {max(e.nbytes for e in taken(trace, "_cudnn_rnn") if e.part == "activations")}
        return largest

    one = SAMPLES * TIMES * HIDDEN * 4
    assert reserve(SAMPLES, 1) >= 4 * one, "the four gates at least"
    assert reserve(SAMPLES, 2) > reserve(2 * SAMPLES, 1) > 1.9 * reserve(SAMPLES, 1)


@pytest.mark.parametrize(
    ("mode", "layers", "hidden", "itemsize", "dropout", "nbytes"),
    [
        (LSTM, 2, 650, 4, True, 234_957_056),
        (LSTM, 2, 650, 4, False, 234_291_456),
        (LSTM, 2, 650, 2, True, 117_811_456),
        (LSTM, 3, 2 * 256, 4, False, 285_212_928),
        (3, 2, 650, 4, False, 276_889_856),
        (1, 3, 2 * 650, 4, False, 212_992_256),
    ],
)
def test_a_reserve_is_that_of_a_measured_layer(mode, layers, hidden, itemsize, dropout, nbytes) -> None:
    """64 sequences of 128 steps on an H100, in both directions where the hidden size is doubled."""
    dropped = 64 * 128 if dropout else 0
    found = reserve_bytes(mode, 64 * 128, hidden, layers, itemsize=itemsize, projected=0, dropped=dropped)
    assert found == nbytes
    assert dropout_state_bytes(CudaTarget((9, 0), 132)) == 6_488_064


@pytest.mark.parametrize(
    ("mode", "cells", "hidden", "layers", "itemsize", "projected", "dropped", "nbytes"),
    [
        (LSTM, 3360, 256, 2, 2, 128, 0, 24_084_736),
        (LSTM, 4000, 300, 3, 2, 150, 4000, 51_750_272),
        (3, 4000, 2 * 1024, 3, 4, 0, 2 * 4000, 659_456_256),
        (1, 4864, 2 * 1024, 4, 2, 0, 2 * 6400, 149_291_264),  # packed: 32 sequences of up to 200 steps
    ],
)
def test_a_reserve_counts_projections_and_dropout(
    mode, cells, hidden, layers, itemsize, projected, dropped, nbytes
) -> None:
    """In `benchmarks/recordings/calls/h100.json.gz`."""
    options = {"itemsize": itemsize, "projected": projected, "dropped": dropped}
    assert reserve_bytes(mode, cells, hidden, layers, **options) == nbytes


@pytest.mark.parametrize(
    ("layer", "shape", "likely", "off"),
    [  # measured on an H100
        (nn.LSTM(512, 650), (128, 64, 512), 145_411_392, 0),
        (nn.LSTM(512, 650, 3, bidirectional=True), (128, 64, 512), 482_568_832, 0),
        (nn.LSTM(512, 650, 2, dropout=0.2), (128, 16, 512), 79_357_504, 0),
        (nn.LSTM(512, 256, 2), (128, 64, 512), 92_144_384, 0.02),
        (nn.GRU(512, 650, 2), (128, 64, 512), 139_619_616, 0.02),
        (nn.GRU(512, 256, 3), (128, 64, 512), 100_860_672, 0.02),
        (nn.RNN(512, 256, 2, bidirectional=True), (128, 64, 512), 281_805_568, 0.06),
        # in `benchmarks/recordings/calls/h100.json.gz`: small hidden sizes have a kernel of their own
        (nn.GRU(40, 96), (100, 128, 40), 101_411_072, 0),
        (nn.GRU(64, 128), (16, 8, 64), 9_953_600, 0),
        (nn.LSTM(300, 96, 2, dropout=0.1).eval(), (150, 8, 300), 28_846_656, 0),
        (nn.LSTM(128, 1024, 2), (70, 16, 128), 94_028_160, 0),
        (nn.LSTM(512, 512, 2, dropout=0.3).eval(), (50, 32, 512), 54_526_464, 0),
    ],
    ids=str,
)
def test_a_workspace_is_that_of_a_recorded_layer(
    layer: nn.Module, shape: tuple[int, ...], likely: int, off: float
) -> None:
    with tensors(fake=True, gpu=H200), torch.set_grad_enabled(layer.training):
        recorder = Recorder("cuda", kernel_target=H200.kernel_target)
        x = torch.empty(*shape, device="cuda")
        with watching(recorder, layer):
            layer.to("cuda")(x)
    trace = recorder.trace(shape[1], "fake").only("point")
    sizes = [e.nbytes for e in trace if e.part == "workspaces" and e.action == "alloc"]
    assert any(abs(size / likely - 1) <= off for size in sizes), sizes


def test_what_the_recorded_backward_pass_takes_is_taken() -> None:
    """Copies of what has samples first, twice the workspace, zeros for the states' gradients; no second reserve."""
    trace = steps(nn.LSTM)
    x, state, weights = TIMES * SAMPLES * FEATURES * 4, SAMPLES * HIDDEN * 4, 4 * HIDDEN * (FEATURES + HIDDEN + 2) * 4
    output = TIMES * SAMPLES * HIDDEN * 4
    workspace = 21 * output + x + 8 * state + weights - 8 * HIDDEN * 4 + (8 << 20) + 8 * SAMPLES + 256  # no bias
    found = [e.nbytes for e in taken(trace, "_cudnn_rnn_backward") if e.case in ("", "point")]
    states = [x, state, state]
    assert found == [*states, state, state, x, output, workspace, weights, state, state, x, workspace]
    assert [e.nbytes for e in taken(trace, "clone") if e.phase == "backward" and e.nbytes > weights] == []


@pytest.mark.parametrize(("dtype", "copies"), [(torch.bfloat16, 1), (torch.float16, 0)])
def test_weights_that_torch_does_not_flatten_are_copied_into_one_buffer(dtype: torch.dtype, copies: int) -> None:
    model = nn.LSTM(FEATURES, HIDDEN, batch_first=True).to(dtype)
    batches = batches_from_one(torch.ones(SAMPLES, TIMES, FEATURES, dtype=dtype))
    program = LoopProgram(model, batches, sum_of_output, None, torch.device("cuda"), gpu=H200)
    trace = capture(program, SAMPLES, "fake")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert [event.nbytes for event in taken(trace, "_cudnn_rnn")].count(weights) == copies


def test_an_inference_keeps_no_reserve() -> None:
    program = LoopProgram(
        nn.LSTM(FEATURES, HIDDEN, batch_first=True),
        batches_from_one(torch.ones(SAMPLES, TIMES, FEATURES)),
        sum_of_output,
        None,
        torch.device("cuda"),
        training=False,
        gpu=H200,
    )
    results = [e.nbytes for e in taken(capture(program, SAMPLES, "fake"), "_cudnn_rnn") if e.part != "workspaces"]
    assert results == [SAMPLES * TIMES * HIDDEN * 4, SAMPLES * HIDDEN * 4, SAMPLES * HIDDEN * 4]


def test_dropout_between_layers_keeps_cudnns_state_of_random_numbers() -> None:
    with_dropout, without = (
        {e.nbytes for e in steps(nn.LSTM, num_layers=2, **dropout) if e.action == "alloc"}
        for dropout in ({"dropout": 0.5}, {})
    )
    assert dropout_state_bytes(H200.kernel_target) in with_dropout - without


# Precision


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_under_autocast_it_computes_in_two_bytes_and_keeps_weights_of_four(kind: Any, precision: str) -> None:
    trace, weights = steps(kind, precision=precision), weights_of(kind)
    assert taken(trace, "_cudnn_rnn")[0].nbytes == SAMPLES * TIMES * HIDDEN * 2
    assert sum(e.nbytes for e in trace if e.part == "parameters" and e.action == "alloc") == weights
    gradients = [e.nbytes for e in trace if e.part == "gradients" and e.action == "alloc" and e.step == 0]
    assert sum(gradients) == weights


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_cudnn_takes_these_types(dtype: torch.dtype) -> None:
    assert cudnn_rnn.takes_cudnn(torch.ones(2, dtype=dtype))
    with torch.backends.cudnn.flags(enabled=False):
        assert not cudnn_rnn.takes_cudnn(torch.ones(2, dtype=dtype))


def test_cudnn_takes_no_other_types_and_nothing_empty() -> None:
    assert not cudnn_rnn.takes_cudnn(torch.ones(2, dtype=torch.int64))
    assert not cudnn_rnn.takes_cudnn(torch.ones(0))


def test_where_cudnn_is_off_the_layers_run_step_by_step() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        trace = steps.__wrapped__(nn.RNN)
    assert taken(trace, "_cudnn_rnn") == []
    assert len(taken(trace, "tanh")) == TIMES


# Packed sequences


def test_packed_sequences_reach_cudnn_with_their_lengths() -> None:
    """Three sequences of 3, 2 and 1 steps: six rows."""
    model = nn.LSTM(FEATURES, HIDDEN)
    with tensors(fake=True, gpu=H200) as mode, watching(Recorder("cuda", kernel_target=H200.kernel_target), model):
        assert mode is not None
        weights = [parameter.to("cuda") for parameter in model.parameters()]
        state = torch.zeros(1, 3, HIDDEN, device="cuda")
        output, hidden, cell = cudnn_rnn.call(
            torch.lstm,
            torch.ones(6, FEATURES, device="cuda"),
            _Lengths([3, 2, 1]),
            (state, state.clone()),
            weights,
            True,
            1,
            0.0,
            True,
            False,
        )
    assert shapes_of((output, hidden, cell)) == [(6, HIDDEN), (1, 3, HIDDEN), (1, 3, HIDDEN)]


class _Lengths:
    """Stands for ``batch_sizes``, whose values a step needs."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def tolist(self) -> list[int]:
        return self.sizes


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_in_the_step_all_samples_are_taken_to_be_as_long_as_the_longest(kind: Any) -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        output, _ = model(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))
        return nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0].sum()

    model = kind(FEATURES, HIDDEN, batch_first=True)
    found = estimate(model, torch.ones(SAMPLES, TIMES, FEATURES), step=step, device="NVIDIA H200")
    assert found.method == "worst-case"
