"""torch.compile on fake tensors: what its programs allocate, and the private names of torch that this takes."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from lightning_memguard import estimate
from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import Epoch
from lightning_memguard.core.capture import predict
from lightning_memguard.core.capture.capture import FIRST, Captures, OutOfTimeError, Variant
from lightning_memguard.core.capture.curve import Curve, Terms
from lightning_memguard.core.capture.predict import Prediction, Surveyor
from lightning_memguard.core.capture.program import _to_be_hooked
from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.core.decision.decision import Budget, Decision, Request
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.simulation import compiled, compiled_cuda
from lightning_memguard.core.simulation.compiled import NOTE
from lightning_memguard.core.simulation.compiled_cuda import compiling_for
from lightning_memguard.core.simulation.fake import fake_copy
from lightning_memguard.core.simulation.fake_cuda import FakeCudaMode, simulated_cuda
from lightning_memguard.core.trace.growth import grow
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.planning import search
from lightning_memguard.training.planning.search import largest_that_runs

pytestmark = pytest.mark.exact

CPU = torch.device("cpu")
MIB = 1 << 20


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


def planned(model: nn.Module, step: Any = lambda m, x: m(x).sum()) -> Any:
    """Captured in this process, as in a child: what torch sets up to compile is set up once."""
    with mock.patch("lightning_memguard.core.capture.capture.in_child", return_value=True):
        return estimate(model, torch.ones(256, 64), step=step, optimizer=torch.optim.AdamW, device="cpu")


# -- torch's private names: a version that renames one fails here


def test_the_compilers_of_kernels_are_known():
    from torch._inductor.async_compile import AsyncCompile

    assert {"cpp_pybinding", "triton", "multi_kernel"} <= {
        name for name in compiled.COMPILERS if hasattr(AsyncCompile, name)
    }
    assert list(inspect.signature(AsyncCompile.wait).parameters) == ["self", "scope"]


def test_what_is_patched_takes_what_it_took():
    from torch._functorch.partitioners import functionalize_rng_ops
    from torch._inductor import codecache, output_code

    assert list(inspect.signature(functionalize_rng_ops).parameters)[1:3] == ["fw_module", "bw_module"]
    assert list(inspect.signature(codecache.write).parameters)[:3] == ["content", "extension", "extra"]
    assert list(inspect.signature(codecache.PyCodeCache.load_by_key_path).parameters)[:4] == [
        "key",
        "path",
        "linemap",
        "attrs",
    ]
    assert "return write(source_code" in inspect.getsource(codecache.PyCodeCache.write)
    assert "open(graph.cache_path)" in inspect.getsource(output_code)


def test_the_stance_is_asked_whenever_something_compiled_is_called():
    notes: list[str] = []
    with torch.compiler.set_stance("force_eager"), compiled.noting(notes.append):
        torch.ones(2) + 1
        assert notes == []
        torch.compile(lambda x: x + 1)(torch.ones(2))
    assert set(notes) == {NOTE}


# -- copies


class WithLoss(nn.Sequential):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).sum()


def test_a_copy_of_a_module_is_compiled_as_it_is():
    module: Any = WithLoss(*small_net())
    module[0].compile(backend="eager")
    module.loss = torch.compile(module.loss, backend="eager")
    with FakeTensorMode() as mode:
        copy: Any = fake_copy(module, mode, CPU)
        x = torch.ones(2, copy[0].in_features)
        with torch.compiler.set_stance("force_eager"):
            assert mode.is_our_fake(copy.loss(x))  # not the user's weights, which raise here
            assert mode.is_our_fake(copy[0]._compiled_call_impl(x))
    assert hasattr(copy.loss, "_torchdynamo_orig_callable")
    assert hasattr(copy[0]._compiled_call_impl, "_torchdynamo_orig_callable")
    assert copy[2]._compiled_call_impl is None


# -- a compiled step


@pytest.fixture(scope="module")
def as_written() -> Any:
    return planned(small_net())


@pytest.fixture(scope="module")
def as_compiled() -> Any:
    return planned(torch.compile(small_net()))


def test_a_compiled_step_is_what_inductor_makes_of_it(as_written, as_compiled):
    assert (as_compiled.method, as_compiled.notes) == ("compiled", ())
    assert as_compiled.high.allocated_bytes == as_compiled.peak_allocated_bytes
    before, after = ({event.operator for event in found.trace} for found in (as_written, as_compiled))
    assert "aten.gelu.default" in before
    assert "aten.gelu.default" not in after  # it is inside a kernel
    assert "aten.empty_strided.default" in after  # as Inductor's programs allocate


def test_kernels_that_are_chosen_by_their_speed_give_a_range(as_compiled):
    found = planned(torch.compile(small_net(), mode="max-autotune"))
    largest_product = 256 * 64 * 4
    assert found.peak_allocated_bytes == as_compiled.peak_allocated_bytes
    assert found.high.allocated_bytes == found.peak_allocated_bytes + largest_product
    assert [note.partition(" ")[0] for note in found.notes] == ["max-autotune"]


def test_a_backend_that_fails_leaves_the_step_as_written(as_written):
    def broken(graph: object, inputs: object) -> Any:
        raise ZeroDivisionError("by design")

    found = planned(torch.compile(small_net(), backend=broken))
    assert (found.method, found.peak_allocated_bytes) == ("fake", as_written.peak_allocated_bytes)
    assert NOTE in found.notes
    assert any("torch.compile could not run" in note and "by design" in note for note in found.notes)


class Branching(nn.Module):
    """Goes on after a break of its graph if a count says so that the graph writes, or what it computes of the batch."""

    steps: torch.Tensor

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.reads = reads
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(self.up(x))
        self.steps += 1
        if self.reads:
            goes_on = self.steps > 1 if self.reads == "a count" else y.sum() > -1e9
        else:
            torch._dynamo.graph_break()
            goes_on = True
        return self.down(y.exp() * y if goes_on else y)


def logged(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).sum()
    if loss.isnan():
        raise ValueError
    loss.item()
    return loss


def branching(reads: str = "") -> Any:
    return planned(torch.compile(Branching(reads)), logged)


@pytest.fixture(scope="module")
def broken() -> Any:
    return branching()


@pytest.mark.parametrize(
    ("reads", "is_real"), [pytest.param("a count", False, marks=pytest.mark.long), ("the batch", True)]
)
def test_a_compiled_step_reads_the_values_that_it_reads_as_written(broken, reads, is_real):
    found = branching(reads)
    assert (found.method, found.peak_allocated_bytes) == ("compiled", broken.peak_allocated_bytes)
    assert any("could not run on fake tensors" in note for note in found.notes) == is_real


class Recomputing(nn.Module):
    """Draws random numbers in a checkpoint, and the same again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.5), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)  # type: ignore[no-any-return]


def check_of_a_library(reads: compiled.Reads, *answer: float) -> float | None:
    return reads.note(ITEM, str, *answer) if answer else reads.given(ITEM, str)


def step_of_a_library(reads: compiled.Reads, *answer: float) -> float | None:
    return reads.note(ITEM, str, *answer) if answer else reads.given(ITEM, str)


ITEM = torch.ops.aten._local_scalar_dense.default


def test_what_a_library_reads_where_it_compiles_is_not_taken_for_what_its_optimizer_reads():
    """As written, a check is read before the optimizer's step; compiled, it is not, and no line is the model's."""
    written = compiled.Reads()
    check_of_a_library(written, 0.0)
    step_of_a_library(written, 1.0)
    assert step_of_a_library(compiled.Reads(written.noted)) == 1.0
    assert check_of_a_library(compiled.Reads(written.noted)) == 0.0


def test_a_checkpoint_inside_of_a_compiled_module_is_recomputed():
    found = planned(torch.compile(Recomputing()))
    assert (found.method, found.notes) == ("compiled", ())
    made = [event for event in found.trace if (event.action, event.nbytes) == ("alloc", 256 * 256 * 4)]
    assert made
    assert not [event for event in made if event.part == "activations"]


# -- a step compiled for a GPU that is not there

GPU = "NVIDIA A100-SXM4-40GB"


causal_attention = partial(nn.functional.scaled_dot_product_attention, is_causal=True)


class Attending(nn.Module):
    """Attends in bfloat16, and computes the sine of a cosine of a product whose width is odd."""

    def __init__(self, attend: Any = causal_attention) -> None:
        super().__init__()
        self.packed, self.out, self.attend = nn.Linear(128, 3 * 128), nn.Linear(128, 1001), attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (2, 64)).transpose(1, 2) for each in self.packed(x).chunk(3, -1))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)).cos().sin()


def attending(model: nn.Module) -> Any:
    batch = torch.ones(4, 256, 128, dtype=torch.bfloat16)
    return estimate(model, batch, step=lambda m, x: m(x).sum(), device=GPU, precision="bf16-true")


@pytest.fixture(scope="module")
def on_gpu() -> Any:
    return attending(torch.compile(Attending(), mode="reduce-overhead"))


def test_a_step_compiled_for_a_gpu_fuses_what_is_not_a_kernel_of_its_libraries(on_gpu):
    written, operators = attending(Attending()), {event.operator for event in on_gpu.trace}
    assert (written.method, on_gpu.method) == ("fake", "compiled")
    assert "aten._scaled_dot_product_flash_attention.default" in operators
    assert not operators & {"aten.cos.default", "aten.sin.default", "aten.bmm.default"}
    kept = [sum(each.nbytes for each in found.trace if is_wide(each)) for found in (written, on_gpu)]
    assert kept == [2 * WIDE, WIDE]  # the product and its cosine; the product alone


@pytest.mark.parametrize(("attend", "tables"), [(flex_attention, True), (torch.compile(flex_attention), False)])
def test_flexible_attention_makes_its_table_of_scores_where_it_is_not_compiled(attend, tables):
    found = attending(Attending(attend))
    assert found.method == "compiled"  # torch compiles it to run its formula
    assert any(event.nbytes == 4 * 2 * 256 * 256 * 4 for event in found.trace) is tables


WIDE = 4 * 256 * 1001 * 2  # bytes


def is_wide(event: Event) -> bool:
    """Whether a result of the model's last layer is kept for the backward pass of the second step."""
    return (event.action, event.nbytes, event.part, event.step) == ("alloc", WIDE, "activations", 1)


class Float8Product(torch.autograd.Function):
    """A product in float8, forward and backward, as torchao computes it: saved in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return in_float8(x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return in_float8(gradient, weight), in_float8(gradient.t(), x)


def in_float8(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scale, a, b = a.new_ones((), dtype=torch.float32), a.contiguous(), b.t().contiguous().t()
    a, b = (each.to(torch.float8_e4m3fn) for each in (a, b))
    return torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)


class InFloat8(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Float8Product.apply(x, self.weight).sin()


def test_products_in_float8_are_compiled_with_the_workspaces_of_those_as_written():
    x = torch.ones(1024, 512, dtype=torch.bfloat16)
    layers = nn.Sequential(nn.Linear(512, 512, bias=False), InFloat8(512, 256, bias=False)).bfloat16()
    as_written, on_gpu = (
        estimate(model, x, step=lambda m, x: m(x).sum(), device="H100") for model in (layers, torch.compile(layers))
    )
    assert (as_written.method, on_gpu.method, on_gpu.notes) == ("fake", "compiled", ())
    opened, opened_compiled = (
        [event.nbytes for event in found.trace if event.part == "workspaces" and event.nbytes >= MIB]
        for found in (as_written, on_gpu)
    )
    assert opened == opened_compiled != []  # a handle of cuBLAS for each pass, or for each product (torch 2.15)
    assert "aten._to_copy.default" not in {event.operator for event in on_gpu.trace}


def test_what_only_a_device_can_decide_gives_a_range_with_notes(on_gpu):
    padded = (4 * 256 * 128 + 128 * 1001 + 4 * 256 * 1001) * 2  # both matrices and the product
    cache_of_an_a100, given_to_a_graph = 40 * MIB, 4 * 256 * 128 * 2
    above = on_gpu.high.allocated_bytes - on_gpu.peak_allocated_bytes
    assert above >= padded + cache_of_an_a100 + given_to_a_graph
    assert [re.findall("pad matrices|CUDA graphs", note) for note in on_gpu.notes] == [
        ["CUDA graphs"],
        ["pad matrices"],
    ]


def test_a_process_that_is_not_a_child_compiles_for_no_gpu():
    found = gpus.find(GPU)
    with pytest.raises(CannotTraceError, match="in a child process only"), compiling_for(found):
        pass


HEAD = """
@triton_heuristics.pointwise(
    size_hints={sizes}, {hint}
    inductor_meta={{'mutated_arg_names': ['in_out_ptr0'], 'optimize_mem': {spares}}},
)
@triton.jit
def triton_poi_fused_0(in_ptr0, in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
"""


@pytest.mark.parametrize(
    ("sizes", "hint", "ways"),
    [
        ({"x": 4096}, "", 2),
        ({"x": 64}, "", 1),
        ({"y": 64, "x": 64}, "", 6),
        ({"y": 64, "x": 64}, "tile_hint=TileHint.SQUARE,", 1),
        ({"z": 8, "y": 64, "x": 64}, "", 1),
    ],
)
def test_a_kernel_is_timed_in_as_many_ways_as_inductor_knows(sizes, hint, ways):
    source = HEAD.format(sizes=sizes, hint=hint, spares=False)
    assert compiled_cuda.ways_to_run(source) == ways
    assert compiled_cuda.ways_to_run(source.replace("pointwise", "reduction")) == 1
    assert compiled_cuda.changed_arguments(source) == ({1}, False)


@pytest.mark.parametrize("spares", [False, True])
def test_the_first_call_of_a_kernel_is_timed_on_copies_of_what_it_changes(spares):
    """In the backward pass there are copies only while more was allocated before."""
    gpu, source = gpus.find("NVIDIA H200"), HEAD.format(sizes={"x": 4096}, hint="", spares=spares)
    with simulated_cuda(gpu), FakeCudaMode(), Recorder("cuda", kernel_target=gpu.kernel_target) as recorder:
        kernel = compiled._Timed(source, gpu, recorder)
        x, changed = torch.empty(MIB, device="cuda"), torch.empty(MIB, device="cuda")
        for _ in range(2):
            kernel.run(x, changed, MIB, stream=0)
    sizes = [row.nbytes // MIB for row in recorder.trace(1, "fake") if row.action == "alloc"]
    assert sizes == [4, 4, 50, 50] if spares else sizes == [4, 4, *2 * [4, 50, 4]]


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build with CUDA knows")
def test_a_build_without_cuda_knows_the_layout_of_convolutions_on_a_gpu(monkeypatch):
    monkeypatch.setattr(compiled_cuda, "in_child", lambda: True)
    gpu = gpus.find(GPU)
    with simulated_cuda(gpu), compiling_for(gpu), FakeCudaMode():
        assert torch._dynamo.trace_rules.get_torch_obj_rule_map()  # which wants functions of their own
        for layout in (torch.channels_last, torch.contiguous_format):
            x = torch.empty(2, 8, 16, 16, device="cuda:0").to(memory_format=layout)
            weight = torch.empty(4, 8, 3, 3, device="cuda:0")
            assert nn.functional.conv2d(x, weight).is_contiguous(memory_format=layout)


MEASURE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from torch.profiler import ProfilerActivity, profile
from shared.truth import memory_events, peak_of
from test_compiled import small_net

model, batch = torch.compile(small_net()), torch.ones(256, 64)
optimizer = torch.optim.AdamW(model.parameters())
for index in range(2):
    optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
states = [value for state in optimizer.state.values() for value in state.values()]
held = sum(tensor.nbytes for tensor in (*model.parameters(), *states, batch))
print(held + peak_of(memory_events(profiler))[1])
"""


@pytest.mark.long  # `make compiled`
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on the CPU")
def test_a_compiled_step_is_as_large_as_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    here = Path(__file__)
    monkeypatch.setenv("PYTHONPATH", str(here.parent), prepend=":")
    command = [sys.executable, "-c", MEASURE, str(here.parents[3] / "benchmarks")]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    measured = int(answer.stdout.split()[-1])
    assert abs(planned(torch.compile(small_net())).peak_allocated_bytes - measured) <= 64


# -- the size that is chosen


def in_steps(captured: list[int], _: Surveyor, curve: Curve, batch_size: int) -> Curve:
    """Stands for a capture of a step that takes 1 MiB a sample as written, 2 MiB a sample and 3 MiB more compiled."""
    captured.append(batch_size)
    trace = trace_of(batch_size, (2 * batch_size + 3) * MIB)
    return replace(curve, compiled={**curve.compiled, batch_size: (trace,)})


def trace_of(batch_size: int, nbytes: int, *notes: str) -> Trace:
    return Trace(batch_size, "cpu", "fake", (Event("alloc", 0, nbytes, "activations"),), notes)


def test_a_size_is_chosen_by_few_captures_of_the_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = [trace_of(size, size * MIB, NOTE) for size in (4, 8)]
    rules = AllocatorSettings.for_device("cpu", {})
    captured: list[int] = []
    monkeypatch.setattr(Surveyor, "_with_compiled", lambda *given: in_steps(captured, *given))
    nothing: Any = None
    prediction = Prediction(nothing, Curve(Terms(rules), "fake", grow(traces), reads=()))
    budget = Budget(203 * MIB, 203 * MIB, 0, "given")
    decision, proven = largest_that_runs(prediction, budget, Request(8))
    assert decision.batch_size == 100
    assert decision.footprint is not None
    assert decision.footprint.peak_allocated_bytes == 203 * MIB
    assert 100 in proven.curve.compiled
    assert len(captured) <= 3
    monkeypatch.setattr(search, "_MOST_COMPILED", 0)
    decision, proven = largest_that_runs(prediction, budget, Request(8, max_batch_size=500))
    assert decision.batch_size < min(proven.curve.compiled)  # the next size is an estimate, too
    assert decision.limited_by == "memory"


def test_between_the_sizes_captured_a_compiled_step_is_on_a_line():
    rules = AllocatorSettings.for_device("cpu", {})
    traces = [trace_of(size, size * MIB, NOTE) for size in (4, 8)]
    known = {size: (trace_of(size, (2 * size + 3) * MIB),) for size in (10, 20)}
    curve = Curve(Terms(rules), "fake", grow(traces), reads=(), compiled=known)
    found = curve.footprint_at(14)
    assert (found.batch_size, found.peak_allocated_bytes) == (14, 31 * MIB)
    assert sum(found.parts.values()) == 31 * MIB
    assert curve.uncompiled().footprint_at(14).peak_allocated_bytes == 14 * MIB
    assert replace(curve, compiled={}).footprint_at(14).peak_allocated_bytes == 14 * MIB


def late(*_: object) -> Trace:
    raise OutOfTimeError("time was up")


def decided_as_written(monkeypatch: pytest.MonkeyPatch, usable: int, request: Request) -> Decision:
    """The decision on a step of 1 MiB a sample, if its capture as it is compiled comes too late."""
    monkeypatch.setattr(predict, "capture", late)
    monkeypatch.setattr(Surveyor, "_captured", late)
    traces = [trace_of(size, size * MIB, NOTE) for size in (4, 8)]
    nothing: Any = None
    prediction = Prediction(nothing, Curve(Terms(AllocatorSettings(kind="exact")), "fake", grow(traces), reads=()))
    return largest_that_runs(prediction, Budget(usable, usable, 0, "given"), request)[0]


def test_without_a_capture_of_the_compiled_step_the_range_is_what_a_compiler_may_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = decided_as_written(monkeypatch, 100 * MIB, Request(8, kept_by="request"))
    assert found.footprint is not None
    assert found.footprint.peak_allocated_bytes == 8 * MIB
    assert (found.footprint.lowest.allocated_bytes, found.footprint.highest.allocated_bytes) == (0, (8 + 2 * 8) * MIB)
    assert found.reason.endswith(" What torch.compile makes of the step was not captured.")


def test_the_compiled_step_is_captured_next_to_the_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the longest, and needs what the step as written reads."""
    begun: list[tuple[object, ...]] = []

    class Noted(Captures):
        def start(self, program: Any, batch_size: int, method: Any, variant: Variant = FIRST) -> None:
            begun.append(("start", batch_size, method, variant.answers))

    def waited_for(_: object, batch_size: int, method: str, *__: object) -> Trace:
        begun.append(("wait", batch_size, method))
        return replace(trace_of(batch_size, batch_size * MIB, NOTE), answers=(("line", (1.0,)),))

    monkeypatch.setattr(predict, "capture", waited_for)
    program: Any = SimpleNamespace(device=torch.device("cpu"))
    predict._traces_and_growth(Noted(program, own_first=True, rough=True), program, 64, "fake", True)
    own, *small, compiled_step = begun[:4]
    assert (own, small) == (("wait", 64, "fake"), [("start", 4, "fake", ()), ("start", 8, "fake", ())])
    assert compiled_step == ("start", 64, "compiled", (("line", (1.0,)),))


def test_what_a_compiler_may_change_shrinks_no_batch_that_was_set_and_grows_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = decided_as_written(monkeypatch, 10 * MIB, Request(8, kept_by="request"))
    assert (kept.batch_size, kept.outcome, kept.verdict) == (8, "kept", "unknown")
    assert "what torch.compile makes of the step was not captured" in kept.reason
    grown = decided_as_written(monkeypatch, 48 * MIB, Request(4))
    assert (grown.batch_size, grown.verdict) == (16, "fits")


def test_the_larger_of_a_step_compiled_for_its_shape_and_for_any_is_predicted():
    traces = [trace_of(size, size * MIB, NOTE) for size in (4, 8)]
    own, any_shape = (trace_of(8, mib * MIB) for mib in (20, 23))
    curve = Curve(Terms(AllocatorSettings.for_device("cpu", {})), "fake", grow(traces), reads=(), compiled={8: (own,)})
    found = replace(curve, compiled={8: (own, any_shape)}).packed().footprint_at(8)
    assert found.peak_allocated_bytes == found.highest.allocated_bytes == 23 * MIB
    assert found.lowest.allocated_bytes == 20 * MIB
    assert "compiled for this one the step takes 20.0 MiB, compiled again for any 23.0 MiB" in found.notes[-1]
    assert curve.footprint_at(8).lowest.allocated_bytes == 20 * MIB


def test_epochs_whose_batches_differ_widen_a_compiled_step_by_what_they_do_as_written():
    variants = tuple(Variant(1 + place, epoch=Epoch(place, (0.0, 0.0))) for place in range(3))
    written = tuple(trace_of(8, mib * MIB, NOTE) for mib in (12, 10, 9))
    curve = Curve(Terms(AllocatorSettings.for_device("cpu", {})), "fake", captured={8: written}, variants=variants)
    assert curve.likely_variant == variants[1]
    found = replace(curve, reads=(), compiled={8: (trace_of(8, 7 * MIB),)}).footprint_at(8)
    peaks = found.lowest.allocated_bytes, found.peak_allocated_bytes, found.highest.allocated_bytes
    assert peaks == (6 * MIB, 7 * MIB, 9 * MIB)


@pytest.mark.parametrize("active", [False, True])
def test_a_step_is_compiled_for_batches_of_any_shape(active):
    given: list[object] = []

    def noting(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        given.extend(inputs)
        return module.forward

    with compiled.for_any_shape(active=active):
        torch.compile(lambda x: x + 1, backend=noting)(torch.ones(6, 5))
    assert any(isinstance(each, torch.SymInt) for each in given) is active
    torch.compiler.reset()


def test_only_what_is_called_outside_of_compiled_code_is_given_hooks():
    layer = nn.Linear(2, 2)
    wrapped: Any = torch.compile(layer)
    written, as_compiles = (Recorder("cpu", compiled=compiles) for compiles in (False, True))
    assert _to_be_hooked(written, layer) is layer
    assert _to_be_hooked(as_compiles, wrapped) is wrapped
    assert _to_be_hooked(as_compiles, layer) is not layer
