"""DeepSpeed's own engine as one rank of several: the truth is its own steps, as Lightning runs them."""

from __future__ import annotations

import copy
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.planning.estimate import estimate
from lightning_memguard.training.planning.subject import trainer_for
from lightning_memguard.training.planning.target import target_of
from lightning_memguard.training.strategies import deepspeed
from lightning_memguard.training.strategies.deepspeed import (
    fullest_rank,
    refuse_partitioned,
    with_whole_parameters,
    without_kernels,
)
from lightning_memguard.training.strategies.sharded import Layout
from tests.scripts import benchmark
from tests.training.planning.test_on_ranks import BATCH, INSTALLED, Deep


@pytest.fixture(scope="module")
def truth() -> Any:
    return benchmark("deepspeed_truth")


# -- its own steps

# The peaks of DeepSpeed 0.19.8 itself, as `benchmarks/deepspeed_truth.py` measures them with PyTorch's profiler.
# Without what operators allocate and free inside: that depends on the processor and the number of threads.
MEASURED = {
    "stage1_accumulated": {"forward": 49_220_876, "backward": 50_244_882, "optimizer": 29_507_616},
    "stage2": {"forward": 37_845_004, "backward": 41_106_194, "optimizer": 29_507_616},
    "stage2_buckets": {"forward": 32_313_100, "backward": 33_337_106, "optimizer": 18_443_808},
    "stage2_groups": {"forward": 37_845_008, "backward": 41_106_198, "optimizer": 31_963_684},
    "stage2_offload": {"forward": 44_425_484, "backward": 47_686_674, "optimizer": 32_400_312},
    "stage3": {"forward": 48_276_109, "backward": 44_556_951, "optimizer": 27_819_701},
    "stage3_tight": {"forward": 39_312_017, "backward": 40_336_023, "optimizer": 27_819_701},
    "stage3_called": {"forward": 36_157_073, "backward": 37_181_079, "optimizer": 27_819_701},
    "stage3_fp16": {"forward": 43_532_945, "backward": 44_556_951, "optimizer": 27_819_701},
    "stage3_offload": {"forward": 47_220_877, "backward": 48_244_883, "optimizer": 27_820_109},
}


# The others are compared by `make long`, and all cases by the benchmark.
QUICK = {"stage2_groups", "stage3_tight"}


@INSTALLED
@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.long) for c in MEASURED])
def test_peaks_are_those_of_deepspeed(truth: Any, case: str) -> None:
    """All but three scalars that DeepSpeed makes of the gradients' norm."""
    predicted, _ = truth.predicted(truth.CASES[case], scratch=False)
    for phase, nbytes in MEASURED[case].items():
        assert nbytes - predicted[phase] == (12 if phase == "optimizer" else 0), phase


@INSTALLED
@pytest.mark.long
def test_peaks_are_those_of_steps_on_this_processor(truth: Any) -> None:
    """With the scratch of its operators."""
    predicted, rank = truth.predicted(truth.CASES["stage2"])
    measured, _ = truth.measured_apart("stage2", rank)
    assert [measured[phase] - predicted[phase] for phase in truth.PHASES] == [0, 0, 12]


def program(truth: Any, model: nn.Module, zero: dict[str, Any], device: str = "cpu", **more: Any) -> LightningProgram:
    strategy = truth.strategy_of((4, "bf16-mixed", zero, {}))
    target = target_of(device)
    return LightningProgram(
        trainer_for(model, "32-true", None),
        model,  # type: ignore[arg-type]
        batches_from_one(torch.zeros(8, truth.TOKENS, dtype=torch.long)),
        target.device,
        batches_per_epoch=lambda _: 100,
        gpu=target.gpu,
        strategy=strategy,
        layout=Layout.of(strategy, 4, 1),
        ranks=4,
        precision="bf16-mixed",
        **more,
    )


def allocated(program: LightningProgram, part: str) -> list[int]:
    recorder = Recorder(program.device.type)
    program.run(recorder, 8, fake=True)
    events = recorder.trace(8, "fake").events
    return [event.nbytes for event in events if (event.action, event.part) == ("alloc", part)]


@INSTALLED
@pytest.mark.parametrize(("stage", "share"), [(2, 1), (3, 4)])
def test_validation_gathers_what_a_rank_does_not_hold(truth: Any, stage: int, share: int) -> None:
    """A rank holds all bfloat16 parameters or, with ZeRO 3, a fourth; the rest is gathered."""

    class Validated(truth.Gpt):  # type: ignore[misc,name-defined]
        def validation_step(self, words: torch.Tensor, _: int) -> torch.Tensor:
            return self(words)

    model = Validated()
    zero = {"stage": stage, **truth.TIGHT}
    if stage == 3:
        held = sum(allocated(program(truth, model, zero, "T4", stage="validate"), "parameters"))
        assert held == pytest.approx(2 * sum(p.numel() for p in model.parameters()) / share, abs=64)
    gathered = allocated(program(truth, model, zero, "T4", stage="validate"), "gathered")
    assert bool(gathered) == (stage == 3)


@INSTALLED
def test_layers_are_counted_with_all_their_parameters(truth: Any) -> None:
    """Between two steps of ZeRO 3, they hold none."""
    model = truth.Gpt()
    table = program(truth, model, {"stage": 3}).layer_table(8)
    assert sum(weight.elements for layer in table.layers for weight in layer.weights) == sum(
        p.numel() for p in model.parameters()
    )


@INSTALLED
@pytest.mark.parametrize("stage", [2, 3])
def test_what_stays_is_known_without_a_step(truth: Any, stage: int) -> None:
    model = truth.Gpt()
    recorder = Recorder("cpu")
    program(truth, model, {"stage": stage, **truth.SMALL}).run_states(recorder)
    events = recorder.trace(8, "fake").events
    states = [e.nbytes for e in events if (e.action, e.part) == ("alloc", "optimizer_state")]
    assert sum(states) == pytest.approx(
        3 * sum(p.numel() for p in model.parameters()), rel=0.001
    )  # 12 bytes, of 4 ranks


@INSTALLED
@pytest.mark.parametrize(("name", "device"), [("FusedAdam", "optimizer_state"), ("DeepSpeedCPUAdam", "")])
def test_deepspeeds_own_optimizers_are_predicted(truth: Any, name: str, device: str) -> None:
    """The second one steps on the host, if the optimizer is offloaded."""

    class Own(truth.Gpt):  # type: ignore[misc,name-defined]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            import deepspeed.ops.adam

            made: torch.optim.Optimizer = getattr(deepspeed.ops.adam, name)(self.parameters())
            return made

    zero = {"stage": 2, **truth.SMALL, **({} if device else truth.STATES)}
    assert bool(allocated(program(truth, Own(), zero, "T4"), "optimizer_state")) == bool(device)


# -- around the engine


def test_without_deepspeed_a_plan_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, here: None) -> None:
    monkeypatch.setattr(deepspeed, "is_installed", lambda: False)
    with pytest.raises(MemGuardError, match=r"strategy='deepspeed_stage_2': .*is not installed: pip install deepspeed"):
        estimate(Deep(), BATCH, strategy="deepspeed_stage_2", devices=4, device="cpu")
    with pytest.raises(CannotTraceError, match="pip install deepspeed"), deepspeed.deepspeed_on_fakes(4):
        pass


def test_a_partitioned_module_is_refused() -> None:
    module = torch.nn.Linear(2, 2)
    refuse_partitioned(module)
    module.weight.ds_tensor = torch.zeros(1)  # as `deepspeed.zero.Init` leaves it
    with pytest.raises(CannotTraceError, match="partitioned already"):
        refuse_partitioned(module)


def test_the_fullest_rank_is_the_one_whose_partitions_touch_most_elements() -> None:
    """The first of two ranks holds 56 of 100 + 6 + 6 elements, all of the first parameter, the second some of each."""
    parameters = [nn.Parameter(torch.zeros(count)) for count in (100, 6, 6)]
    assert fullest_rank(torch.optim.SGD(parameters, 0.1), 2) == 1
    assert fullest_rank(torch.optim.SGD(parameters[::-1], 0.1), 2) == 0


class Copied(deepspeed.ZeroMixin):
    """A strategy that another run has completed the configuration of."""

    zero_stage_3 = True

    def __init__(self, **zero: Any) -> None:
        self.config = {"gradient_accumulation_steps": 8, "bf16": {"enabled": True}, "zero_optimization": zero}
        self._config_initialized = True


def test_a_configuration_is_made_anew_and_nvme_counts_as_the_host() -> None:
    user = Copied(stage=3, offload_param={"device": "nvme", "nvme_path": "/fast"}, offload_optimizer={"device": "cpu"})
    own = copy.copy(user)
    own.prepare()
    assert own.config == {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    }
    assert not own._config_initialized
    assert user.config["zero_optimization"]["offload_param"]["device"] == "nvme"
    assert with_whole_parameters(user).config["zero_optimization"] == {"stage": 2}


def test_deepspeeds_optimizers_need_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the loading of kernels is replaced in each."""
    fused, host = types.ModuleType("fused_adam"), types.ModuleType("cpu_adam")
    fused.FusedAdamBuilder, fused.get_accelerator = fails, fails  # type: ignore[attr-defined]
    host.CPUAdamBuilder, host.get_accelerator = fails, fails  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam.fused_adam", fused)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam.cpu_adam", host)
    with without_kernels():
        assert fused.FusedAdamBuilder().load().multi_tensor_adam([], 1) is None
        assert fused.get_accelerator().IntTensor([0]).device.type == "cpu"
        assert host.CPUAdamBuilder().load().create_adam(0) is None
        assert host.get_accelerator is fails
    assert fused.FusedAdamBuilder is fails


def fails() -> None:
    raise AssertionError
