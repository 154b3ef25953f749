"""`estimate`: what a model takes at a batch size, asked by anyone without a running Trainer."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_memguard import CannotTraceError, MemGuardError, estimate
from lightning_memguard.units import MIB

LIGHTNINGS = (lightning.pytorch, pytorch_lightning)
BATCH = torch.ones(16, 4)


@pytest.fixture(params=LIGHTNINGS, ids=lambda package: package.__name__)
def pl(request: pytest.FixtureRequest) -> Any:
    """Both packages that Lightning comes in; their classes are unrelated."""
    return request.param


def sum_of_outputs(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def one_weight() -> nn.Module:
    """128 bytes; 16 bytes of input and 32 of output a sample."""
    return nn.Linear(4, 8, bias=False)


def lightning_module(pl: Any, **methods: Any) -> Any:
    """The same weight, step and optimizer as a LightningModule."""

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


@pytest.mark.parametrize("n", [16, 100])
def test_a_plain_module_is_stepped_in_pytorchs_own_loop(n):
    """Gradients are dropped before the forward pass, so at its end there are none."""
    footprint = estimate(one_weight(), BATCH, batch_size=n, step=sum_of_outputs, optimizer=momentum, device="cpu")
    assert nonzero(footprint.parts) == {
        "parameters": 128,
        "optimizer_state": 128,
        "batch": 16 * n,
        "temporaries": 32 * n,
        "activations": 8,
    }
    assert (footprint.batch_size, footprint.device, footprint.phase) == (n, "cpu", "forward")
    assert (footprint.method, footprint.notes) == ("fake", ())


def test_on_the_cpu_the_device_holds_the_tensors_and_nothing_else():
    footprint = estimate(one_weight(), BATCH, step=sum_of_outputs, device="cpu")
    assert footprint.peak_device_bytes == footprint.peak_reserved_bytes == footprint.peak_allocated_bytes


def test_without_a_size_it_is_the_batchs_own():
    footprint = estimate(one_weight(), BATCH, step=sum_of_outputs, device="cpu")
    assert (footprint.batch_size, footprint.parts["batch"]) == (16, BATCH.nbytes)


@pytest.mark.parametrize("kind", ["real", "meta", "fake"])
def test_the_example_may_be_real_meta_or_fake(kind):
    with FakeTensorMode():
        fake = torch.empty(16, 4)
    batch = {"real": BATCH, "meta": BATCH.to("meta"), "fake": fake}[kind]
    footprint = estimate(one_weight(), {"x": batch}, step=lambda model, b: model(b["x"]).sum(), device="cpu")
    assert footprint.parts["batch"] == BATCH.nbytes


def test_a_model_without_memory_can_be_asked_about():
    """Built on the meta device: 4 MiB of weights, as much of gradients, and Adam's two averages and counter."""
    with torch.device("meta"):
        model = nn.Linear(1024, 1024, bias=False)
    footprint = estimate(model, torch.empty(1, 1024), step=sum_of_outputs, optimizer=torch.optim.Adam, device="cpu")
    assert footprint.parts["parameters"] == 4 * MIB
    assert footprint.parts["gradients"] == 4 * MIB
    assert footprint.parts["optimizer_state"] == 2 * 4 * MIB + 4


def test_precision_is_lightnings_word():
    full, mixed = (
        estimate(one_weight(), BATCH, step=sum_of_outputs, device="cpu", precision=precision)
        for precision in ("32-true", "bf16-mixed")
    )
    assert full.parts["parameters"] == mixed.parts["parameters"] == 128
    assert mixed.peak_allocated_bytes < full.peak_allocated_bytes


# A LightningModule


@pytest.mark.parametrize("n", [16, 100])
def test_a_lightning_module_is_stepped_in_lightnings_order(pl, n):
    """The last step's gradients still stand at the end of the next forward pass: 128 bytes that a plain loop drops."""
    footprint = estimate(lightning_module(pl), BATCH, batch_size=n, device="cpu")
    assert nonzero(footprint.parts) == {
        "parameters": 128,
        "gradients": 128,
        "optimizer_state": 128,
        "batch": 16 * n,
        "temporaries": 32 * n + 4,
    }
    assert (footprint.batch_size, footprint.phase) == (n, "forward")
    assert (footprint.method, footprint.notes) == ("fake", ())


def test_a_lightning_modules_precision_is_the_trainers(pl):
    full, mixed = (estimate(lightning_module(pl), BATCH, device="cpu", precision=p) for p in ("32-true", "bf16-mixed"))
    assert full.parts["parameters"] == mixed.parts["parameters"] == 128
    assert mixed.peak_allocated_bytes < full.peak_allocated_bytes


def test_step_and_optimizer_of_a_lightning_module_are_its_own(pl):
    for argument in ({"step": sum_of_outputs}, {"optimizer": momentum}):
        with pytest.raises(MemGuardError) as error:
            estimate(lightning_module(pl), BATCH, device="cpu", **argument)
        assert str(error.value) == (
            "A LightningModule brings its own training_step and configure_optimizers: leave out step and optimizer."
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


def test_an_inference_has_neither_gradients_nor_states():
    footprint = estimate(one_weight(), BATCH, device="cpu", training=False)
    assert nonzero(footprint.parts) == {"parameters": 128, "batch": 16 * 16, "temporaries": 32 * 16}


def test_an_inference_of_a_lightning_module_calls_it(pl):
    footprint = estimate(lightning_module(pl), BATCH, device="cpu", training=False)
    assert nonzero(footprint.parts) == {"parameters": 128, "batch": 16 * 16, "temporaries": 32 * 16}


@pytest.mark.parametrize("hook", ["predict_step", "validation_step"])
def test_an_inference_runs_the_hook_that_a_lightning_module_has(pl, hook):
    """This one adds one to its output: two tensors of 32 bytes a sample at once."""

    def step(self: Any, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layer(batch) + 1

    footprint = estimate(lightning_module(pl, **{hook: step}), BATCH, device="cpu", training=False)
    assert footprint.parts["temporaries"] == 2 * 32 * 16


def test_predicting_goes_before_validating(pl):
    def predict_step(self: Any, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layer(batch)

    def validation_step(self: Any, batch: torch.Tensor, index: int) -> torch.Tensor:
        raise AssertionError("asked although there is a predict_step")

    module = lightning_module(pl, predict_step=predict_step, validation_step=validation_step)
    assert estimate(module, BATCH, device="cpu", training=False).parts["temporaries"] == 32 * 16


def test_an_inference_can_have_a_step_of_its_own(pl):
    for model in (one_weight(), lightning_module(pl)):
        footprint = estimate(model, BATCH, device="cpu", training=False, step=lambda m, batch: m(batch[:8]))
        assert footprint.parts["temporaries"] == 32 * 8


# At the door


def refused(kind: type[Exception], message: str) -> pytest.RaisesExc:
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


def test_a_plain_module_needs_a_step():
    with refused(MemGuardError, "A Linear is no LightningModule: give step=(model, batch) -> loss."):
        estimate(one_weight(), BATCH, device="cpu")


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, "4", True])
def test_a_batch_size_is_a_count(batch_size):
    with refused(MemGuardError, f"batch_size={batch_size!r} is no count; give an int of 1 or more."):
        estimate(one_weight(), BATCH, batch_size=batch_size, step=sum_of_outputs, device="cpu")


def test_an_unknown_device_is_refused_by_name():
    with pytest.raises(MemGuardError, match=r"^device='warp drive' is "):
        estimate(one_weight(), BATCH, step=sum_of_outputs, device="warp drive")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_that_is_not_there_is_said_so():
    with pytest.raises(CannotTraceError, match=r"^device='cuda' needs a CUDA device, and torch finds none here"):
        estimate(one_weight(), BATCH, step=sum_of_outputs)


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

    reason = "The step cannot be predicted: the step could not run on a copy (KeyError: 'image')."
    with refused(CannotTraceError, reason):
        estimate(lightning_module(pl, training_step=training_step), BATCH, device="cpu")
    with refused(CannotTraceError, reason):
        estimate(one_weight(), BATCH, step=lambda m, b: training_step(m, b, 0), device="cpu")


# What it leaves as it was


def needs_a_value(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Goes for real, on a copy: dropout draws, and the weights of the copy change."""
    loss = nn.functional.dropout(model(batch)).sum()
    if loss.item() > 1e9:
        raise ValueError("diverged")
    return loss


def world() -> list[Any]:
    """What a process has one of."""
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        nn.Module._apply,
        nn.modules.module._global_forward_hooks.copy(),
    ]


@pytest.mark.parametrize("step", [sum_of_outputs, needs_a_value])
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_model_batch_and_random_state_stay_as_they_were(pl, step, precision):
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
        estimate(module, batch, batch_size=32, device="cpu", precision=precision),
        estimate(plain, batch, batch_size=32, step=step, optimizer=momentum, device="cpu"),
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
