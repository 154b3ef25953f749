"""`estimate`: what a model takes at a batch size, asked by anyone without a running Trainer."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
import re
from dataclasses import replace
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lightning_memguard import CannotTraceError, MemGuardError, estimate
from lightning_memguard.cli.tables import headline
from lightning_memguard.core import gpus
from lightning_memguard.core.device.process import process_bytes
from lightning_memguard.core.trace.trace import PARTS
from lightning_memguard.training.planning.subject import subject_of
from lightning_memguard.training.planning.target import target_of
from lightning_memguard.units import GIB, MIB
from tests.profiled import measured_peak

LIGHTNINGS = (lightning.pytorch, pytorch_lightning)
BATCH = torch.ones(16, 4)


@pytest.fixture(params=LIGHTNINGS, ids=lambda package: package.__name__)
def either(request: pytest.FixtureRequest) -> Any:
    """Both packages that Lightning comes in; their classes are unrelated."""
    return request.param


@pytest.fixture
def pl() -> Any:
    return pytorch_lightning


def sum_of_outputs(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def one_weight() -> nn.Module:
    """128 bytes; 16 bytes of input and 32 of output a sample."""
    return nn.Linear(4, 8, bias=False)


def lightning_module(pl: Any, **methods: Any) -> Any:
    """A LightningModule with the same weight, step and optimizer as a LightningModule."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = one_weight()
            self.batch_size = 16

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return sum_of_outputs(self, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return momentum(self.parameters())

    for name, method in methods.items():
        setattr(Module, name, method)
    return Module()


def nonzero(parts: Any) -> dict[str, int]:
    return {part: nbytes for part, nbytes in parts.items() if nbytes}


# A plain module


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return one_weight()


def fake_batch() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(16, 4)


@pytest.mark.parametrize(
    ("model", "batch", "n"),
    [
        pytest.param(one_weight, BATCH, None, id="of the batch's own size"),
        (one_weight, BATCH, 100),
        pytest.param(on_meta, BATCH.to("meta"), None, id="model and batch without memory"),
        pytest.param(one_weight, fake_batch(), None, id="a fake batch"),
    ],
)
def test_a_plain_module_is_stepped_in_pytorchs_own_loop(model, batch, n):
    """The peak is in the product that makes the weight's gradient: it copies the output's, one number expanded."""
    given = {"step": lambda model, b: model(b["x"]).sum(), "optimizer": momentum}
    footprint = estimate(model(), {"x": batch}, batch_size=n, **given, device="cpu")
    n = n or len(BATCH)
    assert nonzero(footprint.parts) == {
        "parameters": 128,
        "gradients": 128,
        "optimizer_state": 128,
        "batch": 16 * n,
        "workspaces": 32 * n,
        "activations": 8,
    }
    assert (footprint.batch_size, footprint.device, footprint.phase) == (n, "cpu", "backward")
    assert (footprint.method, footprint.notes) == ("fake", ())


class InPlace(torch.optim.Adam):
    """Keeps the gradients' memory, as ``zero_grad(set_to_none=False)`` does."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("kind", [torch.optim.Adam, InPlace])
@pytest.mark.parametrize("trained", [1, 2], ids=["of one layer", "of both layers"])
def test_gradients_are_cleared_by_the_optimizer_as_the_profiler_sees_it(kind, trained):
    """Those of parameters that it does not have stay."""
    batch = torch.ones(512, 128)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return kind([*parameters][-2 * trained :])

    def train() -> None:
        real = model()
        real_optimizer = optimizer(real.parameters())
        for _ in range(3):
            real_optimizer.zero_grad()
            given = batch.clone()
            sum_of_outputs(real, given).backward()
            real_optimizer.step()

    found = estimate(model(), batch, step=sum_of_outputs, optimizer=optimizer, device="cpu")
    assert abs(found.peak_allocated_bytes - measured_peak(train)) <= 64


@pytest.mark.usefixtures("taped")
def test_on_the_cpu_the_device_holds_the_tensors_and_at_most_what_a_process_takes_besides():
    model = one_weight()
    footprint = estimate(model, BATCH, step=sum_of_outputs, device="cpu")
    assert footprint.peak_device_bytes == footprint.peak_reserved_bytes == footprint.peak_allocated_bytes
    _, _, most = process_bytes(model.parameters(), torch.get_num_threads())
    assert footprint.most_device_bytes - footprint.peak_device_bytes == most


def test_a_context_is_around_the_step_and_its_backward_pass_alone():
    """128 bytes of weight; inside, a tensor of 4 KiB is alive."""

    @contextlib.contextmanager
    def holding():
        held = torch.ones(1024)
        yield
        del held

    given = {"step": sum_of_outputs, "optimizer": momentum, "device": "cpu"}
    plain, inside = (estimate(one_weight(), BATCH, **given, **more) for more in ({}, {"context": holding}))
    assert inside.peak_allocated_bytes == plain.peak_allocated_bytes + 4096
    assert inside.phase == "backward"
    with pytest.raises(MemGuardError, match="context"):
        estimate(one_weight(), BATCH, **given, context=3)


class Replacing(torch.optim.Optimizer):
    """Puts new memory behind the parameters, as optimizers do that write ``p.data = ...``."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - 0.1 * p.grad


def test_parameters_that_an_optimizer_replaces_are_parameters() -> None:
    model = nn.Linear(64, 64, bias=False)
    footprint = estimate(model, torch.ones(1, 64), step=sum_of_outputs, optimizer=Replacing, device="cpu")
    assert footprint.parts["parameters"] >= 64 * 64 * 4


# A LightningModule


@pytest.mark.parametrize("n", [16, 100])
def test_a_lightning_module_is_stepped_in_lightnings_order(either, n):
    """The peak is in the same product; the loss takes 8 bytes more than in a plain loop."""
    footprint = estimate(lightning_module(either), BATCH, batch_size=n, device="cpu")
    assert nonzero(footprint.parts) == {
        "parameters": 128,
        "gradients": 128,
        "optimizer_state": 128,
        "batch": 16 * n,
        "workspaces": 32 * n,
        "activations": 12,
        "temporaries": 4,
    }
    assert (footprint.batch_size, footprint.phase) == (n, "backward")
    assert (footprint.method, footprint.notes) == ("fake", ())


def test_precision_is_lightnings_word(pl):
    for model, how in ((one_weight(), {"step": sum_of_outputs}), (lightning_module(pl), {})):
        full, mixed = (estimate(model, BATCH, device="cpu", precision=p, **how) for p in ("32-true", "bf16-mixed"))
        assert full.parts["parameters"] == mixed.parts["parameters"] == 128
        assert mixed.peak_allocated_bytes < full.peak_allocated_bytes


def test_step_and_optimizer_of_a_lightning_module_are_its_own(either):
    for argument in ({"step": sum_of_outputs}, {"optimizer": momentum}, {"context": contextlib.nullcontext}):
        with pytest.raises(MemGuardError) as error:
            estimate(lightning_module(either), BATCH, device="cpu", **argument)
        assert str(error.value) == (
            "A LightningModule brings its own training_step, backward and configure_optimizers: leave out step, "
            "optimizer and context."
        )


def test_a_step_that_has_to_run_for_real_runs_at_small_sizes_alone():
    """Who asks what a GPU needs for a huge batch may sit at a laptop."""
    sizes = []

    def step(model: Any, batch: torch.Tensor) -> torch.Tensor:
        if not isinstance(batch, FakeTensor):
            sizes.append(len(batch))
        return needs_a_value(model, batch)

    footprint = estimate(one_weight(), BATCH, batch_size=10_000, step=step, device="cpu")
    assert (footprint.method, footprint.batch_size) == ("real", 10_000)
    assert max(sizes) <= 16


# Inference


def one_more(model: Any, batch: torch.Tensor, index: int = 0) -> torch.Tensor:
    """Two tensors of 32 bytes a sample at once."""
    return model.layer(batch) + 1


def not_asked(model: Any, batch: torch.Tensor, index: int) -> torch.Tensor:
    raise AssertionError("asked although there is a predict_step")


HALF = {"step": lambda model, batch: model(batch[:8])}
INFERENCES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "calls a plain module": (one_weight, {}, 32 * 16),
    "calls a LightningModule": (lambda: lightning_module(pytorch_lightning), {}, 32 * 16),
    "of either package": (lambda: lightning_module(lightning.pytorch), {}, 32 * 16),
    "predicts": (lambda: lightning_module(pytorch_lightning, predict_step=one_more), {}, 2 * 32 * 16),
    "validates": (lambda: lightning_module(pytorch_lightning, validation_step=one_more), {}, 2 * 32 * 16),
    "predicts before it validates": (
        lambda: lightning_module(pytorch_lightning, predict_step=one_more, validation_step=not_asked),
        {},
        2 * 32 * 16,
    ),
    "has a step of its own": (one_weight, HALF, 32 * 8),
    "has a step of its own in a LightningModule": (lambda: lightning_module(pytorch_lightning), HALF, 32 * 8),
}


@pytest.mark.parametrize("name", INFERENCES)
def test_an_inference_has_neither_gradients_nor_states_and_runs_the_hook_that_there_is(name):
    model, how, temporaries = INFERENCES[name]
    footprint = estimate(model(), BATCH, device="cpu", training=False, **how)
    assert nonzero(footprint.parts) == {"parameters": 128, "batch": 16 * 16, "temporaries": temporaries}


# At the door


def refused(kind: type[Exception], message: str) -> pytest.RaisesExc:
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


def test_a_plain_module_needs_a_step():
    with refused(MemGuardError, "A Linear is not a LightningModule: give step=(model, batch) -> loss."):
        estimate(one_weight(), BATCH, device="cpu")


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, "4", True])
def test_a_batch_size_is_a_count(batch_size):
    with refused(MemGuardError, f"batch_size={batch_size!r} is not a count; pass an int of 1 or more."):
        estimate(one_weight(), BATCH, batch_size=batch_size, step=sum_of_outputs, device="cpu")


def test_an_unknown_device_is_refused_by_name():
    message = (
        "The catalogue has no GPU called 'warp drive'. No name in it is similar. "
        "Write it as nvidia-smi prints it, or plan for one with the same memory and architecture."
    )
    with refused(MemGuardError, message):
        estimate(one_weight(), BATCH, step=sum_of_outputs, device="warp drive")


def test_a_device_that_trains_nothing_is_refused():
    with refused(MemGuardError, "device='meta' does not train; pass 'cpu', 'cuda' or the name of a GPU."):
        estimate(one_weight(), BATCH, step=sum_of_outputs, device="meta")


@pytest.mark.parametrize(("name", "near"), [("RTX 4099", "RTX 4090"), ("H20000", "NVIDIA H200")])
def test_an_unknown_gpu_is_refused_with_those_near_it(name, near):
    with pytest.raises(
        MemGuardError, match=rf"^The catalogue has no GPU called '{name}'. Similar names: .*{near} \("
    ) as error:
        estimate(one_weight(), BATCH, step=sum_of_outputs, device=name)
    assert "GiB)" in str(error.value)


def test_an_unknown_precision_is_refused_with_the_known_ones():
    with pytest.raises(MemGuardError, match=r"^precision='half' is unknown; choose one of 16-mixed, 16-true, 32-true"):
        estimate(one_weight(), BATCH, step=sum_of_outputs, device="cpu", precision="half")


def test_an_unknown_precision_of_a_lightning_module_is_refused_likewise(pl):
    with pytest.raises(MemGuardError, match=r"^precision='half'"):
        estimate(lightning_module(pl), BATCH, device="cpu", precision="half")


def test_a_batch_without_a_tensor_is_refused():
    with pytest.raises(CannotTraceError, match=r"^The batch holds no tensor to size it by: it is a dict of int, str"):
        estimate(one_weight(), {"text": "a cat", "label": 3}, step=sum_of_outputs, device="cpu")


def test_a_step_that_raises_is_refused_with_its_reason(pl):
    def training_step(self: Any, batch: torch.Tensor, index: int) -> torch.Tensor:
        raise KeyError("image")

    place = f"{__file__}:{training_step.__code__.co_firstlineno + 1}"
    reason = f"The step cannot be predicted: the step could not run on a copy (KeyError: 'image', at {place})."
    with pytest.raises(CannotTraceError, match=f"^{re.escape(reason)}"):
        estimate(lightning_module(pl, training_step=training_step), BATCH, device="cpu")
    with pytest.raises(CannotTraceError, match=f"^{re.escape(reason)}"):
        estimate(one_weight(), BATCH, step=lambda m, b: training_step(m, b, 0), device="cpu")


# What it leaves as it was


def needs_a_value(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Goes for real, on a copy: dropout draws, and the weights of the copy change."""
    loss = nn.functional.dropout(model(batch)).sum()
    if loss.item() > 1e9:
        loss = loss.tanh()
    return loss


def world() -> list[Any]:
    """State that a process has one of."""
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.cuda.is_initialized(),
        nn.Module._apply,
        nn.modules.module._global_forward_hooks.copy(),
    ]


@pytest.mark.parametrize(
    ("step", "precision", "device"),
    [
        *itertools.product((sum_of_outputs, needs_a_value), ("32-true", "64-true"), ("cpu",)),
        (sum_of_outputs, "32-true", "NVIDIA H200"),
    ],
)
def test_model_batch_and_random_state_stay_as_they_were(pl, step, precision, device):
    """Nor is CUDA started to plan for a GPU."""

    class Module(type(lightning_module(pl))):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            random.random()
            np.random.rand()
            self.seen = len(batch)
            self.log("loss", loss := step(self, batch.to(self.layer.weight.dtype)))
            return loss

    module, batch, plain = Module(), BATCH.clone(), one_weight()
    names = set(vars(module))
    weights = copy.deepcopy(module.state_dict()), copy.deepcopy(plain.state_dict())
    before = world()
    footprints = [
        estimate(module, batch, batch_size=32, device=device, precision=precision),
        estimate(plain, batch, batch_size=32, step=step, optimizer=momentum, device=device),
    ]
    assert {footprint.method for footprint in footprints} == {"fake" if step is sum_of_outputs else "real"}
    assert world() == before
    assert torch.equal(batch, BATCH)
    for model, state in ((module, weights[0]), (plain, weights[1])):
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        assert [p.grad for p in model.parameters()] == [None]
        assert model.training
    assert set(vars(module)) == names
    assert (module.batch_size, module._trainer) == (16, None)


@pytest.mark.usefixtures("taped")
def test_nothing_is_said_meanwhile(pl, caplog):
    """A Trainer is made to read settings from; its banner about GPUs would be about none that is used."""
    with caplog.at_level("INFO"):
        estimate(lightning_module(pl), BATCH, device="cpu")
    assert caplog.messages == []


def test_an_optimizer_that_was_made_already_is_refused():
    net = torch.nn.Linear(4, 4)
    made = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(MemGuardError, match=r"optimizer= is a SGD; give a class or a function"):
        estimate(net, torch.zeros(2, 4), step=lambda m, x: m(x).sum(), optimizer=made, device="cpu")


# A GPU that is not here

IMAGES = torch.ones(8, 3, 16, 16)
KIB = 1024
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def squares(model: Any, images: torch.Tensor) -> torch.Tensor:
    return model(images).float().square().mean()


def planned(model: Any = None, batch: Any = IMAGES, device: str = "NVIDIA H200", **options: Any) -> Any:
    """A step on fake tensors alone, with what holds for each: parts sum to the peak, bounds are around it."""
    options.setdefault("step", squares)
    found = estimate(model or small_net(), batch, device=device, **options)
    assert (found.method, found.device) == ("fake", "cuda")
    assert tuple(found.parts) == PARTS
    assert sum(found.parts.values()) == found.peak_allocated_bytes <= found.peak_reserved_bytes
    gpu = target_of(device).gpu
    assert found.outside_bytes == gpu.context_bytes.likely
    assert found.low.device_bytes < found.peak_device_bytes < found.high.device_bytes
    assert found.most_device_bytes == found.high.device_bytes - found.yielding_bytes
    return found


@pytest.mark.parametrize(("device", "kept"), [("NVIDIA H200", 2 * 32 * MIB), ("RTX 4090", 2 * (8 * MIB + 128 * 1024))])
def test_a_plain_module_on_a_gpu_that_is_not_here_is_summed_by_hand(device, kept):
    """Each block is rounded up to 512 bytes; alive are this loss and the last.

    GPUs differ by what their chips keep: both cuBLAS handles of an H200 keep 32 MiB. cuBLAS wants the sum's gradient
    (16 x 8 floats) written out.
    """
    found = planned(one_weight(), BATCH, device=device, step=sum_of_outputs, optimizer=momentum)
    assert nonzero(found.parts) == {
        "parameters": 512,
        "gradients": 512,
        "optimizer_state": 512,
        "activations": 2 * 512,
        "batch": 512,
        "workspaces": kept + 512,
    }
    assert (found.phase, found.operator, found.notes) == ("backward", "aten.mm.default", ())


@pytest.mark.usefixtures("taped")
def test_names_of_gpus_are_taken_as_people_write_them():
    assert planned(device="rtx-4090") == planned(device="NVIDIA GeForce RTX 4090")


@pytest.mark.usefixtures("taped")
@NO_CUDA
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3"])
def test_cuda_without_a_device_is_an_a100_and_a_warning_and_a_note_say_so(device):
    note = (
        "no CUDA device is available: predicted for an NVIDIA A100-SXM4-80GB; "
        "choose another GPU, or the CPU, by `device`"
    )
    with pytest.warns(UserWarning, match=f"^estimate: {note}.$") as warned:
        found = planned(device=device)
    assert [each.filename for each in warned] == [__file__]
    assert found.notes == (note,)
    assert replace(found, notes=()) == planned(device="NVIDIA A100-SXM4-80GB")


@pytest.mark.usefixtures("taped")
def test_no_gpu_is_too_small_for_the_prediction_itself():
    """16 GiB of tensors on a card of 12: it says what is needed."""
    found = planned(batch_size=1 << 25, device="RTX 3060")
    assert found.peak_device_bytes > 16 * GIB > gpus.find("RTX 3060").memory_bytes


OPTIMIZERS: dict[str, tuple[Any, int]] = {
    "nothing": (None, 0),
    "SGD": (torch.optim.SGD, 0),
    "SGD, fused": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), 1),
    "Adagrad": (torch.optim.Adagrad, 1),
    "Adam": (torch.optim.Adam, 2),
    "Adam, one by one": (lambda p: torch.optim.Adam(p, foreach=False), 2),
    "AdamW, fused": (lambda p: torch.optim.AdamW(p, fused=True), 2),
    "AdamW, capturable": (lambda p: torch.optim.AdamW(p, capturable=True), 2),
    "AdamW, fused and capturable": (lambda p: torch.optim.AdamW(p, fused=True, capturable=True), 2),
    "AdamW, AMSGrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_keeps_its_states_there(name):
    """Counters of steps are on the CPU, except for fused and capturable ones: 512 bytes each there."""
    build, copies = OPTIMIZERS[name]
    model = nn.Linear(64, 64)
    found = planned(model, torch.ones(8, 64), optimizer=build)
    on_gpu = name in ("AdamW, fused", "AdamW, capturable", "AdamW, fused and capturable")
    assert found.parts["parameters"] == 16 * KIB + 512
    assert found.parts["optimizer_state"] == copies * found.parts["parameters"] + (2 * 512 if on_gpu else 0)
    assert found.notes == ()


@pytest.fixture(scope="module")
def in_precision(all_here: None) -> Any:
    """The step of a LightningModule of a package with a wide layer, in a precision, each planned once."""

    @functools.cache
    def of(pl: Any, precision: str) -> Any:
        module = lightning_module(pl)
        module.layer = nn.Linear(256, 256, bias=False)
        return planned(module, torch.ones(512, 256), step=None, precision=precision)

    return of


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"])
def test_a_lightning_module_is_planned_in_each_precision_and_two_bytes_are_half_of_four(
    either, in_precision, precision
):
    full, found = in_precision(either, "32-true").parts, in_precision(either, precision)
    share = 2 if precision in ("bf16-true", "16-true") else 1
    assert share * found.parts["parameters"] == full["parameters"] == 256 * KIB
    assert share * found.parts["batch"] == full["batch"]
    assert share * found.parts["optimizer_state"] == full["optimizer_state"]
    assert found.notes == ()


def test_a_scaler_of_gradients_lives_on_the_gpu(pl, in_precision):
    """Half precision scales its loss: a factor and a counter, which bfloat16 does not have."""
    assert in_precision(pl, "16-mixed").peak_allocated_bytes > in_precision(pl, "bf16-mixed").peak_allocated_bytes


def test_channels_last_is_as_large():
    last = torch.channels_last
    found = planned(small_net().to(memory_format=last), IMAGES.to(memory_format=last))
    assert found.parts["batch"] == planned().parts["batch"] == IMAGES.nbytes


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_keeps_no_activations_of_its_inside(reentrant):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
    batch = torch.ones(512, 256)

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for part in model:
            x = checkpoint(part[1], part[0](x), use_reentrant=reentrant)
        return x.sum()

    def whole(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for at in range(0, 8, 4):
            x = checkpoint(model[at : at + 4], x, use_reentrant=reentrant)
        return x.sum()

    plain, lean = (planned(model, batch, step=run).peak_allocated_bytes for run in (step, whole))
    assert plain - lean > 2 * batch.nbytes


def test_a_gradient_of_a_gradient_can_be_penalised():
    def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum()

    for model, batch in ((nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), BATCH), (small_net(), IMAGES)):
        one, two = (planned(model, batch, step=step).peak_allocated_bytes for step in (sum_of_outputs, penalty))
        assert two > one


def test_sparse_gradients_are_those_of_a_real_run():
    found = estimate(
        nn.Embedding(50, 16, sparse=True),
        torch.zeros(4, 7, dtype=torch.long),
        step=squares,
        optimizer=torch.optim.SparseAdam,
        device="NVIDIA H200",
    )
    assert found.method == "real"
    assert found.parts["optimizer_state"] >= 2 * 50 * 16 * 4


def test_an_inference_there_has_neither_gradients_nor_states(pl):
    for model, batch in ((small_net(), IMAGES), (lightning_module(pl), BATCH)):
        found = planned(model, batch, step=None, training=False)
        assert found.phase == "forward"
        assert found.parts["gradients"] == found.parts["optimizer_state"] == 0


@pytest.mark.parametrize("keeps", [False, True])
def test_what_the_loop_keeps_is_counted_as_the_profiler_sees_it(keeps):
    """Logits of 4 x 128 x 2,000, that a loop's variable holds until the next forward pass has returned."""
    batch = torch.ones(4, 128, 16)

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1).exp(), torch.zeros(512, dtype=torch.long))

    def step(model: nn.Module, given: torch.Tensor) -> Any:
        logits = model(given)
        return (loss_of(logits), logits) if keeps else loss_of(logits)

    def train() -> None:
        real = nn.Linear(16, 2000)
        optimizer, logits = torch.optim.SGD(real.parameters()), None
        for _ in range(3):
            optimizer.zero_grad()
            if keeps:
                logits = real(batch)
                loss = loss_of(logits)
            else:
                loss = step(real, batch)
            loss.backward()
            optimizer.step()

    found = estimate(nn.Linear(16, 2000), batch, step=step, optimizer=torch.optim.SGD, device="cpu")
    assert abs(found.peak_allocated_bytes - found.parts["batch"] - measured_peak(train)) <= 64


@pytest.mark.parametrize(("dtype", "said"), [(torch.bfloat16, "in bfloat16"), (torch.float32, "at 32-true")])
def test_the_headline_says_what_the_parameters_are_in(dtype: torch.dtype, said: str) -> None:
    subject = subject_of(nn.Linear(4, 4).to(dtype), torch.zeros(2, 4, dtype=dtype), step=sum_of_outputs)
    assert headline(subject).startswith(f"Linear, training {said}; example batch: 2 x 4")


def test_the_headline_says_what_most_of_the_parameters_are_in() -> None:
    """Adapters of a bfloat16 model may be in float32."""
    model = nn.Sequential(nn.Linear(4, 64, dtype=torch.bfloat16), nn.Linear(64, 1))
    subject = subject_of(model, torch.ones(2, 4), step=sum_of_outputs)
    assert "in bfloat16" in headline(subject)
