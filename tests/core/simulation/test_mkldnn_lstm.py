"""An LSTM on fake tensors takes what the same LSTM really takes on this processor, byte for byte."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.core.simulation import mkldnn_lstm
from tests.profiled import measured_peak

pytestmark = pytest.mark.exact

FORWARD = torch.ops.aten.mkldnn_rnn_layer.default

ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")
BF16 = pytest.mark.skipif(
    not (torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    or torch.cpu._is_amx_tile_supported(),
    reason="bfloat16 is counted to the byte for AVX512-BF16 without AMX",
)

STEPS, INPUTS, HIDDEN = 5, 12, 24


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Kernels this small only wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class LSTMRecorder(Recorder):
    """Holds the rules for LSTM layers against the profiler, whatever else the recorder has learnt."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = mkldnn_lstm.fake_result(func, args, kwargs or {})
        if out is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in out:
            self.watch(tensor, str(func))
        inside = mkldnn_lstm.scratch_bytes(func, args, kwargs or {})
        if inside:
            self.add_row("free", self.take(inside, str(func), "workspaces"), str(func))
        return out


def predicted_peak(run: Callable[[], None], before: list[torch.Tensor]) -> int:
    recorder = LSTMRecorder("cpu")
    recorder.label(before, "parameters")
    with recorder:
        run()
    events = recorder.trace(1, "fake").events
    changes = [event.nbytes if event.action == "alloc" else -event.nbytes for event in events]
    return max(accumulate(changes)) - sum(changes[: len(before)])


Step = Callable[[nn.Module, torch.Tensor], None]


def train(module: nn.Module, x: torch.Tensor) -> None:
    out, _ = module(x)
    out.square().mean().backward()


def both_peaks(build: Callable[[], nn.Module], shape: tuple[int, ...], step: Step = train) -> tuple[int, int]:
    """The predicted and the measured peak of a step, over what is there before: the parameters and the batch."""

    def peak(mode: AbstractContextManager[Any], predict: bool) -> int:
        with mode:
            module = build()
            x = torch.randn(shape, dtype=next(module.parameters()).dtype)
            before = [*module.parameters(), x]
            return (
                predicted_peak(lambda: step(module, x), before) if predict else measured_peak(lambda: step(module, x))
            )

    return peak(FakeTensorMode(), True), peak(nullcontext(), False)


@ONEDNN
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_layers", "dropout"), [(1, 0.0), (2, 0.0), (2, 0.3)])
def test_a_training_step_peaks_as_measured(num_layers, dropout, bidirectional, batch_first):
    """The workspace of each layer and direction stays until its backward pass, whose scratch makes the peak."""
    settings = {
        "num_layers": num_layers,
        "dropout": dropout,
        "bidirectional": bidirectional,
        "batch_first": batch_first,
    }
    for batch in (1, 6, 32):
        shape = (batch, STEPS, INPUTS) if batch_first else (STEPS, batch, INPUTS)
        predicted, measured = both_peaks(lambda: nn.LSTM(INPUTS, HIDDEN, **settings), shape)
        assert predicted == measured, f"at batch size {batch}"


def last_state(module: nn.Module, x: torch.Tensor) -> None:
    """Gradients of the output are missing: the kernel makes zeros for them."""
    _, (hidden, cell) = module(x)
    (hidden.sum() + cell.sum()).backward()


def one_tensor_for_both_states(module: nn.Module, x: torch.Tensor) -> None:
    """The kernel clones the cell state where it shares its storage with the hidden state."""
    state = x.new_zeros(module.num_layers, x.shape[1], module.hidden_size)
    out, _ = module(x, (state, state))
    out.sum().backward()


def input_with_gradient(module: nn.Module, x: torch.Tensor) -> None:
    out, _ = module(x * 2 + next(module.parameters()).sum())
    out[-1].sum().backward()


def without_gradients(module: nn.Module, x: torch.Tensor) -> None:
    """In inference there is no workspace; oneDNN keeps its states in the scratchpad."""
    with torch.no_grad():
        module(x)


WAYS = [last_state, one_tensor_for_both_states, input_with_gradient, without_gradients]


@pytest.mark.parametrize(
    ("build", "inputs", "batch", "step"),
    [
        *(
            pytest.param(lambda bias=bias: nn.LSTM(INPUTS, HIDDEN, 2, bias=bias), INPUTS, 8, step, marks=ONEDNN)
            for step, bias in itertools.product(WAYS, (True, False))
        ),
        *(  # widths that need padding, and widths that do not
            pytest.param(lambda pair=pair: nn.LSTM(*pair), pair[0], 3, train, marks=ONEDNN)
            for pair in [(1, 64), (1, 1), (300, 1), (64, 64), (17, 192)]
        ),
        # what has no path of its own needs no rule
        (lambda: nn.GRU(INPUTS, HIDDEN, 2, bidirectional=True, dropout=0.3), INPUTS, 8, train),
        (lambda: nn.RNN(INPUTS, HIDDEN, 2, nonlinearity="relu", bidirectional=True), INPUTS, 8, train),
        (lambda: nn.RNN(INPUTS, HIDDEN), INPUTS, 8, train),
        (lambda: nn.LSTM(INPUTS, HIDDEN, proj_size=8), INPUTS, 8, train),
        (lambda: nn.LSTM(INPUTS, HIDDEN, dtype=torch.float64), INPUTS, 8, train),
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_other_layers_and_ways_to_use_one_peak_as_measured(build, inputs, batch, step):
    has_avx2 = torch.backends.cpu.get_cpu_capability() != "DEFAULT" and os.environ.get("ONEDNN_MAX_CPU_ISA") != "SSE41"
    if step is without_gradients and not has_avx2:
        pytest.skip("inference packs its weights in a way that is not counted where there is no AVX2")
    predicted, measured = both_peaks(build, (STEPS, batch, inputs), step)
    assert predicted == measured


def train_in_autocast(module: nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(x)
    out.float().sum().backward()


@ONEDNN
@BF16
@pytest.mark.parametrize("batch", [2, 9])
@pytest.mark.parametrize(("step", "dtype"), [(train, torch.bfloat16), (train_in_autocast, torch.float32)])
def test_bfloat16(step, dtype, batch, monkeypatch):
    """The blocked kernels have a workspace of half the numbers' bytes, and gradients in float32 all the same."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX512_CORE":  # oneDNN then does as on a processor without bfloat16
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    predicted, measured = both_peaks(lambda: nn.LSTM(INPUTS, HIDDEN, 2, dtype=dtype), (STEPS, batch, INPUTS), step)
    assert predicted == measured


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@ONEDNN
def test_fake_tensors_reach_the_layer_that_real_ones_reach():
    """If a torch stops to do so, an LSTM has to be sent there by hand."""
    with FakeTensorMode():
        module, x = nn.LSTM(INPUTS, HIDDEN, 2), torch.randn(STEPS, 3, INPUTS)
        with Watch() as watch:
            train(module, x)
    assert watch.seen.count(FORWARD) == 2
    assert watch.seen.count(torch.ops.aten.mkldnn_rnn_layer_backward.default) == 2


@ONEDNN
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BF16)])
def test_the_workspace_is_what_onednn_asks_for(dtype):
    for steps, batch, inputs, hidden in (
        (1, 1, 1, 1),
        (7, 8, 32, 64),
        (5, 3, 300, 64),
        (5, 2, 64, 300),
        (2, 130, 16, 20),
    ):
        state = torch.zeros(batch, hidden, dtype=dtype)
        weights = [torch.zeros(4 * hidden, n, dtype=dtype) for n in (inputs, hidden)]
        bias = torch.zeros(4 * hidden, dtype=dtype)
        x = torch.zeros(steps, batch, inputs, dtype=dtype)
        settings = (False, [], 2, hidden, 1, True, False, False, True)
        workspace = FORWARD(x, *weights, bias, bias, state, state.clone(), *settings)[3]
        layer = mkldnn_lstm._Layer(steps, batch, inputs, hidden, dtype.itemsize)
        assert mkldnn_lstm._workspace_bytes(layer) == workspace.numel()


def test_a_workspace_in_sums_one_can_do_in_the_head():
    """Seven areas of whole pages: gates; hidden states, twice; cell states; gradients of layer, step and cell."""
    layer = mkldnn_lstm._Layer(steps=1, batch=16, inputs=64, hidden=64, element=4)
    gates = 5  # 16 rows of 4 x 64 numbers, padded to 272 since 256 would alias in the cache: 17,408 bytes
    hidden = 1  # 16 x 64 numbers
    states = 4  # 16 x 64 numbers, before and after the step, below and above the layer
    assert mkldnn_lstm._workspace_bytes(layer) == (gates + hidden + 5 * states) * 4096


def test_the_rules_leave_the_rest_to_torch():
    x = torch.zeros(2, 2)
    assert mkldnn_lstm.fake_result(torch.ops.aten.add.Tensor, (x, x), {}) is None
    assert mkldnn_lstm.scratch_bytes(torch.ops.aten.add.Tensor, (x, x), {}) == 0
