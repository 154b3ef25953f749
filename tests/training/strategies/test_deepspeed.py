"""DeepSpeed's ZeRO: what its engine allocates, at the moments when it does; the truth is DeepSpeed's own steps."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.planning.subject import trainer_for
from lightning_memguard.training.strategies.deepspeed import Settings, refuse_partitioned, without_kernels

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def truth() -> Any:
    specification = importlib.util.spec_from_file_location("deepspeed_truth", BENCHMARKS / "deepspeed_truth.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["deepspeed_truth"] = module
    specification.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # as measured: scratch of products in bfloat16 depends on it
    yield module
    torch.set_num_threads(threads)
    del sys.modules["deepspeed_truth"]


class DeepSpeedStrategy:
    """Stands for Lightning's, which asks for the library at once; it keeps DeepSpeed's own configuration."""

    def __init__(self, **zero: Any) -> None:
        self.config = {"zero_optimization": zero}


# The peaks of DeepSpeed 0.19.8 itself, as `benchmarks/deepspeed_truth.py` measures them with PyTorch's profiler.
MEASURED = {
    "stage1_accumulated": {"forward": 49_220_878, "backward": 50_244_880, "optimizer": 29_507_614},
    "stage2": {"forward": 37_845_006, "backward": 41_803_792, "optimizer": 29_507_614},
    "stage2_buckets": {"forward": 32_313_102, "backward": 33_471_888, "optimizer": 18_443_806},
    "stage3": {"forward": 48_541_327, "backward": 44_556_949, "optimizer": 27_819_699},
    "stage3_tight": {"forward": 39_312_019, "backward": 40_336_021, "optimizer": 27_819_699},
}


# At these peaks there is scratch of products in bfloat16, which is another without AMX: 0.3 to 0.6 % of the peak.
WITH_AMX = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="its bytes were measured on a processor with AMX"
)
OF_ONE_PROCESSOR = {"stage2", "stage2_buckets", "stage3"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=WITH_AMX) if case in OF_ONE_PROCESSOR else case for case in MEASURED]
)
def test_peaks_are_those_of_deepspeed(truth: Any, case: str) -> None:
    """All but a few scalars: DeepSpeed's norm of the gradients, and the loss divided by the micro-batches."""
    predicted, _ = truth.predicted(truth.CASES[case])
    for phase, nbytes in MEASURED[case].items():
        assert 0 <= nbytes - predicted[phase] <= 64, phase


def test_defaults_are_deepspeeds_own() -> None:
    """Without a bucket size of Lightning's, two buckets of 500 million elements are taken only where they overlap."""
    settings = Settings.of(DeepSpeedStrategy(stage=2), "bf16-mixed", 8)
    assert settings is not None
    assert (settings.bucket, settings.overlap, settings.dtype) == (500_000_000, False, torch.bfloat16)
    of_three = Settings.of(DeepSpeedStrategy(stage=3, stage3_prefetch_bucket_size=7), "16-true", 8)
    assert of_three is not None
    assert (of_three.overlap, of_three.prefetch, of_three.dtype) == (True, 7, torch.float16)


def test_offload_is_read_where_the_stage_has_it() -> None:
    offloaded = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}
    second = Settings.of(DeepSpeedStrategy(stage=2, **offloaded), "32-true", 2)
    third = Settings.of(DeepSpeedStrategy(stage=3, **offloaded), "32-true", 2)
    assert second is not None
    assert third is not None
    assert (second.offloads_optimizer, second.offloads_parameters) == (True, False)
    assert (third.offloads_optimizer, third.offloads_parameters) == (True, True)


def test_a_partitioned_module_is_refused() -> None:
    module = torch.nn.Linear(2, 2)
    refuse_partitioned(module)
    module.weight.ds_tensor = torch.zeros(1)  # as `deepspeed.zero.Init` leaves it
    with pytest.raises(CannotTraceError, match="partitioned already"):
        refuse_partitioned(module)


def test_deepspeeds_optimizers_need_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each, only the loading of kernels is replaced."""
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


@pytest.mark.parametrize("strategy", [DeepSpeedStrategy(stage=0), DeepSpeedStrategy(), object()])
def test_others_have_no_engine(strategy: Any) -> None:
    assert Settings.of(strategy, "32-true", 8) is None


@pytest.mark.parametrize(("stage", "share"), [(2, 1), (3, 4)])
def test_validation_gathers_what_a_rank_does_not_hold(truth: Any, stage: int, share: int) -> None:
    """Of bfloat16 parameters, a rank holds all or, with ZeRO 3, a fourth; the largest layer is gathered."""

    class Validated(truth.Gpt):  # type: ignore[misc,name-defined]
        def validation_step(self, words: torch.Tensor, _: int) -> torch.Tensor:
            return self(words)

    model = Validated()
    program = LightningProgram(
        trainer_for(model, "32-true", None),
        model,
        batches_from_one(torch.zeros(8, truth.TOKENS, dtype=torch.long)),
        torch.device("cpu"),
        stage="validate",
        strategy=DeepSpeedStrategy(stage=stage, **truth.TIGHT),  # type: ignore[arg-type]
        ranks=4,
        precision="bf16-mixed",
    )
    recorder = Recorder("cpu")
    program.run(recorder, 8, fake=True)
    events = recorder.trace(8, "fake").events
    held = sum(event.nbytes for event in events if (event.action, event.part) == ("alloc", "parameters"))
    gathered = max((event.nbytes for event in events if event.part == "gathered"), default=0)
    assert held == pytest.approx(2 * sum(p.numel() for p in model.parameters()) / share, abs=64)
    assert gathered >= (2 * 4 * 256 * 256 if stage == 3 else 0)
    assert (gathered == 0) == (stage == 2)
