"""Quantized weights and low-bit optimizers: predicted on fake tensors, and compared with PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from typing_extensions import Self

from lightning_memguard import estimate
from lightning_memguard.core.capture.storages import plain_tensors
from lightning_memguard.core.simulation import quantized
from tests.profiled import measured_peak

WIDTH, BATCH = 128, 16
Make = Callable[[int, int], nn.Module]


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"an extra that is not installed: {name}")


class Adapted(nn.Module):
    """Two frozen layers, quantized or not, with a low-rank adapter that is trained."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.up, self.down = make(WIDTH, 4 * WIDTH), make(4 * WIDTH, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)
        for parameter in (*self.up.parameters(), *self.down.parameters()):
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x))) + self.b(self.a(x))


def network(make: Make) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(make), Adapted(make))


def plain(i: int, o: int) -> nn.Module:
    return nn.Linear(i, o, bias=False)


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in parameters if each.requires_grad])


def predicted(model: nn.Module, make: Any = adamw, device: str = "cpu", **settings: Any) -> Any:
    return estimate(model, torch.ones(BATCH, WIDTH), step=loss_of, optimizer=make, device=device, **settings)


def measured(model: nn.Module, make: Any = adamw) -> int:
    """The most bytes of tensors that three real steps take; the model's own are there before."""
    model, batch = model.to("cpu"), torch.ones(BATCH, WIDTH)
    held = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in plain_tensors([*model.parameters(), *quantized.held_by(model)])
    }
    optimizer = make(model.parameters())

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            given = batch.clone()
            loss_of(model, given).backward()
            optimizer.step()

    return sum(held.values()) + measured_peak(train)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_4_bit_model_with_adapters_takes_what_the_profiler_counts(
    kind: str, nested: bool, dtype: torch.dtype
) -> None:
    bnb = library("bitsandbytes")

    def make(i: int, o: int) -> nn.Module:
        return bnb.nn.Linear4bit(i, o, bias=False, compute_dtype=dtype, compress_statistics=nested, quant_type=kind)

    found = predicted(network(make))
    assert found.method == "fake"
    assert found.peak_allocated_bytes == measured(network(make))


def test_an_8_bit_model_takes_what_the_profiler_counts() -> None:
    bnb = library("bitsandbytes")

    def make(i: int, o: int) -> nn.Module:
        return bnb.nn.Linear8bitLt(i, o, bias=False, has_fp16_weights=False, threshold=0.0)

    found = predicted(network(make))
    assert found.method == "fake"
    assert found.peak_allocated_bytes == measured(network(make))


def test_columns_with_outliers_are_a_range_on_a_gpu() -> None:
    """At most, each layer keeps its input once more, of 4 bytes, for the backward pass."""
    bnb = library("bitsandbytes")

    def model(threshold: float) -> nn.Module:
        return network(lambda i, o: bnb.nn.Linear8bitLt(i, o, bias=False, has_fp16_weights=False, threshold=threshold))

    without, found = predicted(model(0.0), device="T4"), predicted(model(6.0), device="T4")
    assert {without.method, found.method} == {"fake"}
    inputs = 2 * BATCH * (WIDTH + 4 * WIDTH) * 4
    assert without.peak_allocated_bytes <= found.peak_allocated_bytes < without.peak_allocated_bytes + inputs / 10
    assert found.highest.allocated_bytes > found.peak_allocated_bytes + inputs / 2
    assert without.highest.allocated_bytes < without.peak_allocated_bytes + inputs / 5
    assert any("outliers" in note for note in found.notes)
    assert not any("outliers" in note for note in without.notes)


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "AdEMAMix8bit", "PagedAdamW8bit", "AdamW", "LAMB"])
def test_optimizers_of_bitsandbytes_take_what_the_profiler_counts(name: str) -> None:
    kind = getattr(library("bitsandbytes").optim, name)
    maps = 2048  # which the optimizer makes with itself, before the profiler looks, and the prediction counts
    found = predicted(network(plain), lambda parameters: kind([*parameters], lr=1e-3))
    assert found.method == "fake"
    assert -64 <= found.peak_allocated_bytes - measured(network(plain), lambda ps: kind([*ps], lr=1e-3)) <= maps


@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"]
)
def test_weights_of_torchao_take_what_the_profiler_counts(config: str) -> None:
    quantization = library("torchao.quantization")

    def make() -> nn.Module:
        model = network(plain)
        quantization.quantize_(model, getattr(quantization, config)(), lambda _, path: path.endswith(("up", "down")))
        return model

    found = predicted(make())
    assert found.method == "fake"
    assert found.parts["parameters"] < 300_000  # one byte each and the scales; 4 would be 1,064,960
    assert abs(found.peak_allocated_bytes - measured(make())) <= 64  # a scale that is freed a moment earlier


def test_an_optimizer_on_the_host_leaves_its_states_there_and_gradients_as_long_as_they_are_copied() -> None:
    kind = library("torchao.optim").CPUOffloadOptimizer
    layers, weight = 6, WIDTH * WIDTH * 4
    parts = {
        offload: predicted(
            nn.Sequential(*[plain(WIDTH, WIDTH) for _ in range(layers)]),
            lambda parameters, offload=offload: kind([*parameters], offload_gradients=offload),
            device="T4",
        ).parts
        for offload in (False, True)
    }
    assert [each.get("optimizer_state", 0) for each in parts.values()] == [0, 0]
    assert [each["parameters"] for each in parts.values()] == [layers * weight] * 2
    assert parts[False]["gradients"] + parts[False].get("temporaries", 0) >= layers * weight
    assert parts[True].get("gradients", 0) + parts[True].get("temporaries", 0) < 2 * weight


def test_weights_that_are_stored_in_16_bits_are_sharded_by_fsdp() -> None:
    bnb = library("bitsandbytes")
    strategies = library("lightning_fabric.strategies")

    def make(i: int, o: int) -> nn.Module:
        return bnb.nn.Linear4bit(i, o, bias=False, compute_dtype=torch.bfloat16, quant_storage=torch.bfloat16)

    def parameters(**settings: Any) -> int:
        model, batch = network(make).to(torch.bfloat16), torch.ones(BATCH, WIDTH, dtype=torch.bfloat16)
        found = estimate(model, batch, step=loss_of, optimizer=adamw, device="T4", **settings)
        assert found.method == "fake"
        return found.parts["parameters"]

    packed, adapters = 2 * 2 * WIDTH * 4 * WIDTH // 2, 2 * 2 * WIDTH * 8 * 2
    strategy = strategies.FSDPStrategy(auto_wrap_policy={Adapted}, use_orig_params=True)
    assert parameters() - parameters(strategy=strategy, devices=2) == (packed + adapters) // 2


def test_before_and_after_quantization_and_on_meta_a_model_takes_the_same_on_a_gpu() -> None:
    bnb = library("bitsandbytes")

    def make(i: int, o: int) -> nn.Module:
        return bnb.nn.Linear4bit(i, o, bias=False, quant_type="nf4")

    with torch.device("meta"):
        without_memory = network(make)
    on_the_host, quantized_on_the_host = network(make), network(make).to("cpu")
    found = [predicted(each, device="T4") for each in (on_the_host, quantized_on_the_host, without_memory)]
    assert {each.method for each in found} == {"fake"}
    assert len({each.peak_allocated_bytes for each in found}) == 1
    weights = 2 * 2 * WIDTH * 4 * WIDTH
    assert weights / 2 < found[0].parts["parameters"] < weights * 0.7
    assert on_the_host[0].up.weight.dtype == torch.float32  # the user's own is as it was
    assert on_the_host[0].up.quant_state is None


def test_the_users_model_trains_after_a_prediction_as_before() -> None:
    bnb = library("bitsandbytes")

    def make(i: int, o: int) -> nn.Module:
        return bnb.nn.Linear4bit(i, o, bias=False, quant_type="nf4")

    def losses(predict: bool) -> list[float]:
        model = network(make).to("cpu")
        if predict:
            predicted(model, device="RTX 4090")
            predicted(model, device="cpu")
        optimizer, found = adamw(model.parameters()), []
        for _ in range(3):
            loss = loss_of(model, torch.ones(BATCH, WIDTH))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(predict=True) == losses(predict=False)
    maps = bnb.functional.name2qmap.values()
    assert not [each for each in maps if isinstance(each, torch._subclasses.FakeTensor)]


def test_paged_states_are_not_on_the_device_but_those_of_small_parameters() -> None:
    """States are paged from 100,000 elements on; their scales are not: 4 bytes for each 256 elements of a state."""
    optim = library("bitsandbytes").optim
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    batch = torch.ones(BATCH, 512)

    def states(name: str) -> int:
        make = lambda parameters: getattr(optim, name)([*parameters])  # noqa: E731
        return estimate(model, batch, step=loss_of, optimizer=make, device="A100").parts["optimizer_state"]

    weight, bias, maps = 512 * 512, 512, 2 * 1024
    assert states("PagedAdamW8bit") == 2 * (2 * 4 * weight // 256 + 2 * 4 * bias) + maps
    assert states("AdamW8bit") - states("PagedAdamW8bit") == 2 * 2 * weight


def test_on_a_gpu_an_optimizer_imported_where_it_is_made_is_followed() -> None:
    library("bitsandbytes")

    def make(parameters: Any) -> Any:
        from bitsandbytes.optim import PagedAdamW8bit

        return PagedAdamW8bit([*parameters])

    assert predicted(network(plain), make, device="A100").method == "fake"


def test_weights_may_be_quantized_in_configure_model() -> None:
    bnb = library("bitsandbytes")

    class Late(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = None

        def configure_model(self) -> None:
            if self.net is None:
                self.net = network(lambda i, o: bnb.nn.Linear4bit(i, o, bias=False, quant_type="nf4"))

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            return adamw(self.parameters())

    early = predicted(network(lambda i, o: bnb.nn.Linear4bit(i, o, bias=False, quant_type="nf4")), device="T4")
    found = estimate(Late(), torch.ones(BATCH, WIDTH), device="T4")
    assert found.method == "fake"
    assert found.parts["parameters"] == early.parts["parameters"]


class Tagged(nn.Parameter):
    """A class of parameters of one's own, as libraries make them."""

    def __new__(cls, data: torch.Tensor) -> Self:
        made = torch.Tensor._make_subclass(cls, data, True)
        made.tag = "mine"
        return made


def test_parameters_of_an_own_class_become_fake_in_configure_model() -> None:
    seen: list[object] = []

    class Late(pl.LightningModule):
        def configure_model(self) -> None:
            self.weight = Tagged(torch.ones(WIDTH, WIDTH))

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            seen.append((isinstance(self.weight, Tagged), self.weight.tag))
            return (batch @ self.weight).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    found = estimate(Late(), torch.ones(BATCH, WIDTH), device="T4")
    assert found.method == "fake"
    assert found.parts["parameters"] == found.parts["gradients"] == 4 * WIDTH * WIDTH
