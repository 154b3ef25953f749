"""A simulated CUDA: what `torch.cuda` reports for it, which kernels it uses, and that it leaves nothing behind."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_memguard import estimate
from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.predict import capture
from lightning_memguard.core.capture.program import LoopProgram, tensors
from lightning_memguard.core.capture.recorder import Recorder, watching
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.kernels import table
from lightning_memguard.core.kernels.arguments import Call
from lightning_memguard.core.kernels.attention import SEEDS_ON_DEVICE
from lightning_memguard.core.kernels.templates import kernel_of
from lightning_memguard.core.simulation import driver, fake_cuda
from lightning_memguard.core.simulation.backward import walking
from lightning_memguard.core.simulation.fake_cuda import FAKE_DEVICE, FakeCudaMode, simulated_cuda, simulated_gpu
from lightning_memguard.core.trace.scratch import NONE
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.errors import CannotTraceError

pytestmark = pytest.mark.usefixtures("here")

H200 = gpus.find("NVIDIA H200")
V100 = gpus.find("V100")


class Operators(TorchDispatchMode):
    """Names of the operators that are called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removeprefix("aten.").partition(".")[0])
        return func(*args, **(kwargs or {}))

    def __contains__(self, name: str) -> bool:
        return name in self.names


@contextmanager
def simulating(gpu: Gpu = H200) -> Iterator[Operators]:
    """Inside, a step runs as it does while it is captured, and nothing records it."""
    with tensors(fake=True, gpu=gpu), walking(), Operators() as seen:
        yield seen


def captured(
    model: nn.Module,
    batch: Any,
    step: Callable[[Any, Any], torch.Tensor] = lambda model, x: model(x).float().square().mean(),
    optimizer: Any = None,
    gpu: Gpu = H200,
    **options: Any,
) -> Trace:
    """Two steps of a plain module on a simulated GPU."""
    program = LoopProgram(model, batches_from_one(batch), step, optimizer, torch.device("cuda"), gpu=gpu, **options)
    return capture(program, 4, "fake")


def operators_of(trace: Trace) -> set[str]:
    return {event.operator.removeprefix("aten.").partition(".")[0] for event in trace if event.operator}


# What torch.cuda reports


@pytest.mark.parametrize("gpu", [H200, gpus.find("RTX 4090"), V100], ids=lambda gpu: gpu.name)
def test_torch_speaks_of_one_device_like_the_gpu(gpu: Gpu) -> None:
    with simulated_cuda(gpu):
        assert torch.cuda.is_available()
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
        assert torch.cuda.get_device_capability() == torch.cuda.get_device_capability(0) == gpu.compute_capability
        assert torch.cuda.get_device_name("cuda:0") == gpu.name
        facts = torch.cuda.get_device_properties(0)
        assert (facts.name, (facts.major, facts.minor)) == (gpu.name, gpu.compute_capability)
        assert (facts.total_memory, facts.multi_processor_count) == (gpu.memory_bytes, gpu.multiprocessors)
        assert torch.cuda.mem_get_info() == (gpu.memory_bytes, gpu.memory_bytes)
        assert torch.cuda.memory_allocated() == torch.cuda.max_memory_reserved("cuda") == 0
        assert simulated_gpu() is gpu


def patched_names() -> dict[str, Any]:
    """All that could be left behind: torch's Python functions for CUDA, and those that choose a kernel."""
    homes = {"cuda": torch.cuda, "torch": torch, "nn.functional": F, "_VF": torch._VF, "fake": fake_tensor}
    named = {
        f"{home}.{name}": getattr(module, name)
        for home, module in homes.items()
        for name in (*dir(module), *(["lstm", "gru", "rnn_tanh", "rnn_relu"] if home == "_VF" else []))
        if callable(getattr(module, name, None)) and not name.startswith("__")
    }
    return {
        **named,
        "apply": nn.Module._apply,
        "engine": torch.autograd.Variable._execution_engine,
        "graph task": torch._C._current_graph_task_id,
        "foreach": list(sys.modules["torch.optim.optimizer"]._foreach_supported_types),
        "stance": torch._dynamo.eval_frame._stance.stance,
        "available": torch.cuda.is_available(),
        "devices": torch.cuda.device_count(),
        "initialized": torch.cuda.is_initialized(),
    }


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """The first fake step makes torch import more, which changes it too."""
    with simulating():
        torch.ones(3, device="cuda")


def differing(before: dict[str, Any]) -> list[str]:
    after = patched_names()
    return [name for name in {*before, *after} if before.get(name) != after.get(name)]


def test_afterwards_torch_is_as_it_was() -> None:
    before = patched_names()
    with simulated_cuda(H200):
        assert "cuda.is_available" in differing(before), "the comparison sees nothing"
    assert differing(before) == []
    assert simulated_gpu() is None


def test_a_whole_estimate_leaves_nothing_patched_or_initialized_though_the_step_failed() -> None:
    before = patched_names()
    estimate(nn.Linear(4, 4), torch.ones(4, 4), step=lambda m, x: m(x).sum(), device="NVIDIA H200")
    assert differing(before) == []
    with pytest.raises(KeyError), simulating():
        raise KeyError("image")
    with pytest.raises(CannotTraceError, match="KeyError: 'image'"):
        estimate(nn.Linear(4, 4), {"x": torch.ones(4, 4)}, step=lambda m, x: x["image"], device="NVIDIA H200")
    assert differing(before) == []
    assert simulated_gpu() is None


def test_one_gpu_inside_another_gives_way_to_it_again() -> None:
    with simulated_cuda(H200):
        with simulated_cuda(V100):
            assert (torch.cuda.get_device_capability(), simulated_gpu()) == ((7, 0), V100)
        assert (torch.cuda.get_device_capability(), simulated_gpu()) == ((9, 0), H200)


def test_a_cuda_tensor_that_is_no_fake_one_is_not_to_be_had() -> None:
    if torch.cuda.is_available():
        pytest.skip("here it is to be had")
    with simulated_cuda(H200), pytest.raises((RuntimeError, AssertionError, NotImplementedError)):
        torch.zeros(3, device="cuda")


# Canaries of the build at hand


def test_this_build_can_be_given_a_guard_for_cuda() -> None:
    """Without one, an index of a device is asked of a driver that is not there."""
    with simulated_cuda(H200), FakeCudaMode():
        made = torch.empty(3, device="cuda")
        moved = torch.empty(3).to(FAKE_DEVICE)
        assert made.device == moved.device == (made + moved).device == FAKE_DEVICE
        assert torch.empty(3, device="cuda:0").device == FAKE_DEVICE


def test_a_build_that_hides_its_registry_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this build needs no guard")
    monkeypatch.setattr(driver, "_REGISTRY", "no such symbol")
    driver.guard_no_device.cache_clear()
    try:
        with (
            pytest.raises(CannotTraceError, match=rf"^This build of torch \({re.escape(torch.__version__)}\) has no"),
            simulated_cuda(H200),
        ):
            pass
    finally:
        monkeypatch.undo()
        driver.guard_no_device.cache_clear()
    assert simulated_gpu() is None


# Moving things there


def test_tensors_and_modules_move_there() -> None:
    with simulating():
        x = torch.ones(2, 3)
        assert x.to("cuda").device == x.cuda().device == x.to("cuda:0").device == FAKE_DEVICE
        assert x.to("cuda", torch.bfloat16, non_blocking=True).dtype == torch.bfloat16
        assert x.cuda().cpu().device.type == "cpu"
        assert torch.zeros(3, device="cuda").new_ones(2).device == FAKE_DEVICE
        module = nn.BatchNorm1d(3).to("cuda")
        assert {tensor.device for tensor in (*module.parameters(), *module.buffers())} == {FAKE_DEVICE}
        assert nn.Linear(3, 3).cuda().weight.device == FAKE_DEVICE
        assert module(x.cuda()).device == FAKE_DEVICE


def test_a_number_made_there_keeps_its_value() -> None:
    """Lightning sends a loader's length to the device, and asks for it there."""
    with simulating():
        count = torch.tensor(3, device="cuda")
        assert isinstance(count, FakeTensor)
        assert count.device == FAKE_DEVICE
        assert int(count) == count.item() == 3
        assert list(range(count)) == [0, 1, 2]


@pytest.mark.usefixtures("here")
def test_a_step_may_ask_for_cuda_and_wait_for_it() -> None:
    seen = []

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        weight = torch.ones(8, device=device)
        loss = (model(x.to(device)) * weight).sum()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.accelerator.current_stream().wait_event(torch.cuda.Event())
        assert torch.accelerator.current_accelerator().type == device
        seen.append((device, loss.device.type, torch.cuda.memory_allocated()))
        return loss

    found = estimate(nn.Linear(4, 8), torch.ones(4, 4), step=step, device="NVIDIA H200")
    assert found.method == "fake"
    assert seen == [("cuda", "cuda", 0)] * 2


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts(dtype: torch.dtype) -> None:
    with simulating(), torch.autocast("cuda", dtype):
        assert torch.is_autocast_enabled("cuda")
        x = torch.ones(2, 3, device="cuda")
        out = nn.Linear(3, 4, device="cuda")(x)
        assert out.dtype == dtype
        assert F.softmax(out, -1).dtype == torch.float32


def test_a_gradient_scaler_stays_enabled_and_scales() -> None:
    with simulating():
        scaler = torch.amp.GradScaler("cuda")
        assert scaler.is_enabled()
        model = nn.Linear(3, 4, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = scaler.scale(model(torch.ones(2, 3, device="cuda")).sum())
        assert loss.device == FAKE_DEVICE
        loss.backward()
        scaler.unscale_(optimizer)
        assert model.weight.grad is not None


# Which kernel is taken


def batch_norms(seen: Operators) -> set[str]:
    return {name for name in seen.names if "batch_norm" in name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 8])
def test_cudnn_keeps_images_in_channels_last(dtype: torch.dtype, groups: int) -> None:
    with simulating():
        layer = nn.Conv2d(8, 8, 3, groups=groups, device="cuda", dtype=dtype)
        x = torch.randn(2, 8, 6, 6, device="cuda", dtype=dtype, requires_grad=True)
        assert layer(x).is_contiguous()
        layer.to(memory_format=torch.channels_last)
        y = layer(x)
        for each in (y, *torch.autograd.grad(y.sum(), (x, layer.weight))):
            assert each.is_contiguous(memory_format=torch.channels_last)


def test_batch_norm_of_images_is_cudnns() -> None:
    with simulating() as seen:
        nn.BatchNorm2d(3, device="cuda")(torch.ones(2, 3, 4, 4, device="cuda")).sum().backward()
        assert batch_norms(seen) == {"cudnn_batch_norm", "cudnn_batch_norm_backward"}


@pytest.mark.parametrize(
    ("shape", "options", "dtype"),
    [
        ((2, 3, 4, 4), {}, torch.bfloat16),
        ((2, 3, 4, 4), {"affine": False}, torch.float32),
        ((4, 3), {}, torch.float32),
    ],
    ids=["of bfloat16", "without a weight", "without space"],
)
def test_batch_norm_that_cudnn_does_not_take_is_torchs_own(
    shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    with simulating() as seen:
        norm = kind(3, device="cuda", **options)
        norm(torch.ones(shape, device="cuda", dtype=dtype, requires_grad=True)).sum().backward()
        assert batch_norms(seen) == {"native_batch_norm", "native_batch_norm_backward"}


def test_batch_norm_obeys_the_users_switch_for_cudnn() -> None:
    with simulating() as seen, torch.backends.cudnn.flags(enabled=False):
        nn.BatchNorm2d(3, device="cuda")(torch.ones(2, 3, 4, 4, device="cuda"))
        assert batch_norms(seen) == {"native_batch_norm"}


def test_root_mean_square_norm_is_one_kernel() -> None:
    with simulating() as seen:
        nn.RMSNorm(8, device="cuda")(torch.ones(2, 8, device="cuda")).sum().backward()
        assert "_fused_rms_norm" in seen
        assert "_fused_rms_norm_backward" in seen
        assert "rsqrt" not in seen


@pytest.fixture(scope="module")
def layers(all_here: None) -> Trace:
    """A product, two norms with a weight or without, and a dropout."""
    norms = nn.RMSNorm(64), nn.RMSNorm(64, elementwise_affine=False)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), *norms, nn.Dropout(0.1))
    return captured(model, torch.ones(4, 64), lambda m, x: m(x).sum())


def test_root_mean_square_norm_keeps_its_input_and_one_float_a_row(layers: Trace) -> None:
    """Of the second norm, the input is what the first returns."""
    kept = [e.nbytes for e in layers if e.part == "activations" and e.action == "alloc" and "rms" in e.operator]
    assert kept == [4 * 64 * 4, 4 * 4, 4 * 4] * 2


def test_a_gradient_of_a_root_mean_square_norms_gradient_can_be_had() -> None:
    with simulating():
        norm, x = nn.RMSNorm(8, device="cuda"), torch.ones(2, 8, device="cuda", requires_grad=True)
        (slope,) = torch.autograd.grad(norm(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        assert norm.weight.grad is not None
        assert norm.weight.grad.shape == (8,)
        assert x.grad is not None


def test_dropout_keeps_one_mask_of_single_bytes(layers: Trace) -> None:
    """On the CPU it multiplies by a mask of floats instead. It comes before the result (`dropout_cuda`, Dropout.cu)."""
    made = [e.nbytes for e in layers if e.operator == "aten.native_dropout.default" and e.action == "alloc"]
    assert made == [4 * 64, 4 * 64 * 4] * 2


def test_cublas_takes_its_workspace_after_the_first_product(layers: Trace) -> None:
    """As a recorded history of a cold start shows."""
    made = [e for e in layers if e.operator == "aten.mm.default" and e.action == "alloc" and e.phase == "forward"]
    assert [event.part for event in made[:2]] == ["activations", "workspaces"]
    assert made[0].nbytes == 4 * 64 * 4


ATTENTIONS = {
    "the function": (
        nn.Linear(64, 192),
        lambda model, x: F.scaled_dot_product_attention(*model(x).view(-1, 128, 3, 4, 16).permute(2, 0, 3, 1, 4)),
    ),
    "nn.MultiheadAttention": (
        nn.MultiheadAttention(64, 4, batch_first=True),
        lambda model, x: model(x, x, x, need_weights=False)[0],
    ),
    "with weights": (nn.MultiheadAttention(64, 4, batch_first=True), lambda model, x: model(x, x, x)[0]),
    "nn.TransformerEncoderLayer": (
        nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
        lambda model, x: model(x),
    ),
}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_never_writes_its_scores_out_but_where_the_user_wants_weights(name: str, precision: str) -> None:
    """The math path would, and keep their softmax: 4 samples x 4 heads x 128 x 128 of them."""
    model, attend = ATTENTIONS[name]
    trace = captured(model, torch.ones(4, 128, 64), lambda m, x: attend(m, x).float().mean(), precision=precision)
    flash_or_efficient = {
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_cudnn_attention",
    }
    written_out = 4 * 4 * 128 * 128 in {e.nbytes // size for e in trace if e.part == "activations" for size in (2, 4)}
    if name == "with weights":
        assert "_softmax" in operators_of(trace)
        assert written_out
        return
    assert operators_of(trace) & flash_or_efficient
    assert not operators_of(trace) & {"_softmax", "_scaled_dot_product_attention_math"}
    assert not written_out


def test_optimizers_take_all_parameters_at_once() -> None:
    """`foreach` makes a temporary of the size of all weights together; on the CPU one of the largest is enough."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    trace = captured(model, torch.ones(4, 32), optimizer=torch.optim.Adam)
    made = [e for e in trace if e.phase == "optimizer" and e.step == 1 and e.action == "alloc"]
    assert any("_foreach" in e.operator for e in made)
    live = most = 0
    for event in trace:
        if event.phase == "optimizer" and event.step == 1 and event.part == "temporaries":
            live += event.nbytes if event.action == "alloc" else -event.nbytes
            most = max(most, live)
    assert most >= 4 * 32 * 32 * 4


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.Adagrad(p, fused=True),
        lambda p: torch.optim.AdamW(p, fused=True),
    ],
    ids=["SGD", "Adagrad", "AdamW"],
)
def test_fused_optimizers_step_without_temporaries(build: Any) -> None:
    try:
        trace = captured(nn.Linear(32, 32), torch.ones(4, 32), optimizer=build)
    except RuntimeError as error:
        if "supported devices" not in str(error):
            raise
        pytest.skip("this torch fuses no such step on CUDA")
    assert [e for e in trace if e.phase == "optimizer" and e.step == 1 and e.action == "alloc"] == []


class Attending(nn.Module):
    """Attention by the function of torch.nn.functional, as modules of transformers call it."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.out = nn.Linear(128, 3 * 128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [each.unflatten(-1, (2, 64)).transpose(1, 2) for each in self.inputs(x).chunk(3, -1)]
        return x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("by", [torch.Tensor.backward, torch.autograd.backward], ids=["tensor", "autograd"])
def test_a_users_wrapper_around_attention_takes_the_gpus_kernel_when_a_checkpoint_recomputes_it(by, monkeypatch):
    torchs = F.scaled_dot_product_attention

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Attending()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    def events() -> list[Any]:
        recorder = Recorder("cuda", kernel_target=H200.kernel_target)
        with tensors(fake=True, gpu=H200):
            model, x = Step().to(FAKE_DEVICE, torch.bfloat16), torch.ones(2, 64, 128).to(FAKE_DEVICE, torch.bfloat16)
            with watching(recorder, model):
                recorder.mark("forward")
                loss = model(x).sum()
                recorder.mark("backward")
                by(loss)
        return [event._replace(source="") for event in recorder.rows]

    plain = events()
    assert any("attention_backward" in event.operator for event in plain)

    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torchs(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrapper)
    assert events() == plain


def test_modules_of_torch_call_a_users_wrapper_around_attention(monkeypatch):
    torchs, calls = F.scaled_dot_product_attention, []

    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return torchs(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrapper)
    with simulating() as seen:
        attention = nn.MultiheadAttention(64, 1, batch_first=True).to(FAKE_DEVICE, torch.bfloat16)
        x = torch.ones(2, 32, 64, dtype=torch.bfloat16, device=FAKE_DEVICE)
        attention(x, x, x, need_weights=False)
    assert calls
    assert any(name.startswith(("_scaled_dot_product_cudnn", "_scaled_dot_product_flash")) for name in seen.names)


def test_every_operator_that_only_a_build_with_cuda_leaves_whole_has_a_kernel() -> None:
    text = Path(torchgen.__file__).parent.joinpath("packaged/ATen/native/native_functions.yaml").read_text()
    entries = {entry["func"].partition("(")[0]: entry for entry in yaml.load(text, Loader=yaml.CSafeLoader)}

    def keys(entry: dict[str, Any]) -> set[str]:
        own = {key.strip() for keys in entry.get("dispatch", {}) for key in keys.split(",")}
        return own | (keys(entries[entry["structured_delegate"]]) if "structured_delegate" in entry else set())

    found = {name for name, entry in entries.items() if {"CUDA", "CompositeImplicitAutograd"} <= keys(entry)}
    assert found == set(fake_cuda.WITH_KERNEL)


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.Mish()])
def test_an_activations_gradient_is_one_kernel(activation: nn.Module) -> None:
    with simulating() as seen:
        activation(torch.ones(2, 8, device="cuda", requires_grad=True)).sum().backward()
    assert f"{type(activation).__name__.lower()}_backward" in seen
    assert "sigmoid" not in seen


def test_cudnn_is_asked_for_its_version_while_no_gpu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's first call refuses GPUs that need an older cuDNN, such as a V100."""
    seen: list[bool] = []

    def version() -> int:
        seen.append(torch.cuda.is_available())
        if seen[0]:
            raise RuntimeError("cuDNN version 91900 is not compatible with devices with SM < 7.5")
        return 91900

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    with simulating(V100), watching(Recorder("cuda", kernel_target=V100.kernel_target), nn.Identity()):
        nn.Conv2d(3, 3, 3, device="cuda")(torch.ones(2, 3, 4, 4, device="cuda")).sum().backward()
    assert seen[0] is False


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_the_seed_of_efficient_attention_is_on_the_host(dropout_p: float) -> None:
    """From 2.14 on, with dropout alone."""

    def attend(model: Any, x: torch.Tensor) -> torch.Tensor:
        heads = model(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout_p).mean()

    trace = captured(nn.Linear(16, 16), torch.zeros(4, 32, 16), attend)
    seeds = [each for each in trace if "efficient_attention" in each.operator and each.nbytes == 8]
    assert any("efficient_attention" in each.operator for each in trace)
    assert bool(seeds) == (SEEDS_ON_DEVICE and not dropout_p)


def test_a_rule_that_is_asked_again_knows_which_tensors_are_on_the_host() -> None:
    kernel_target = H200.kernel_target
    copy = table.rule("copy_", kernel_target)
    assert copy is not None
    with tensors(fake=True, gpu=H200):
        target, source = torch.empty(64, 32, device="cuda").t(), torch.empty(32, 64)
        call = Call({"self": target, "src": source, "non_blocking": False}, [target], kernel_target)
        kernel = kernel_of("aten.copy_.default", call)
        first = copy(call)
    assert kernel.scratch(kernel.numbers) == first != NONE


@pytest.mark.parametrize("loss", [F.multi_margin_loss, F.multilabel_margin_loss])
def test_an_operator_without_a_fake_kernel_runs_on_the_host(loss: Callable[..., torch.Tensor]) -> None:
    """Torch would run it on the GPU itself, which a child cannot use."""
    labels = torch.zeros(64, dtype=torch.long) if loss is F.multi_margin_loss else torch.zeros(64, 32, dtype=torch.long)
    batch = torch.randn(64, 32), labels
    found = estimate(nn.Linear(32, 32), batch, step=lambda m, b: loss(m(b[0]), b[1]), device="H100")
    assert (found.method, found.notes) == ("fake", ())
