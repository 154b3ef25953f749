"""The Trainer's settings: each trains as it would without the guard, and those that cost memory are predicted."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard, MemGuardError

pytestmark = pytest.mark.usefixtures("taped")


class Counted(pl.LightningModule):
    """Notes the size of each batch it is given, and the number of the optimizer's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 4)
        self.sizes: list[int] = []
        self.evaluated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append(len(batch[0]))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.append(len(batch[0]))

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def tuned_to_twenty(trainer: Any, dataset: TensorDataset, *, size: int = 20, **settings: Any) -> Counted:
    """Trained from loaders of 4 with a guard that is to choose 20, or ``size``; validated at 10."""
    module, guard = Counted(), MemGuard(batch_size="largest", max_batch_size=20)
    trainer(guard, **settings).fit(module, DataLoader(dataset, batch_size=4), DataLoader(dataset, batch_size=10))
    assert guard.decision.batch_size == size
    return module


# -- what costs memory, held against PyTorch's own count


def fit(make: Callable[[], Any], data: TensorDataset, batch_size: int = 64) -> Callable[[Any], object]:
    return lambda trainer: trainer.fit(make(), DataLoader(data, batch_size=batch_size))


@pytest.mark.captures
def test_accumulated_gradients_are_there_during_the_backward_pass(wide: Any, wide_data: Any, as_measured: Any) -> None:
    decision = as_measured(fit(wide, wide_data), accumulate_grad_batches=2)
    assert decision.footprint.phase == "backward"
    assert decision.footprint.parts["gradients"] > 1_300_000


@pytest.mark.captures
def test_a_schedule_of_accumulation_is_predicted_at_its_largest(wide: Any, wide_data: Any, as_measured: Any) -> None:
    """The second epoch accumulates; the peak is there, and the first epoch alone would not show it."""
    scheduler = pl.callbacks.GradientAccumulationScheduler
    alone = as_measured(fit(wide, wide_data), lambda: scheduler({0: 1}), max_epochs=2)
    later = as_measured(fit(wide, wide_data), lambda: scheduler({0: 1, 1: 4}), max_epochs=2)
    assert later.footprint.peak_allocated_bytes > alone.footprint.peak_allocated_bytes + 1_000_000


@pytest.mark.captures
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"},
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
        {"detect_anomaly": True, "accumulate_grad_batches": 2},
    ],
    ids=["norms", "values", "anomalies"],
)
def test_clipping_and_the_detection_of_anomalies_are_predicted(
    wide: Any, wide_data: Any, as_measured: Any, settings: dict[str, Any]
) -> None:
    """The latter compares every gradient with itself, and holds the answer for a moment: a byte for each number."""
    as_measured(fit(wide, TensorDataset(*wide_data[:32]), 8), **settings)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On several, a product in bfloat16 or float16 takes scratch that is not predicted (README, Limits)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CPU_INFO = Path("/proc/cpuinfo")
AVX512_FP16 = pytest.mark.skipif(
    CPU_INFO.exists() and "avx512_fp16" in CPU_INFO.read_text(),
    reason="with AVX512-FP16, oneDNN's float16 products take scratch that is not predicted (docs/coverage.md)",
)


@pytest.mark.captures
@pytest.mark.parametrize(
    "precision",
    ["32-true", "64-true", "bf16-true", pytest.param("16-true", marks=AVX512_FP16), "bf16-mixed", "16-mixed"],
)
@pytest.mark.usefixtures("one_thread")
def test_each_precision_of_a_cpu(wide: Any, wide_data: Any, as_measured: Any, precision: str) -> None:
    # a bfloat16 or float16 product takes scratch of oneDNN's on some processors
    error = 0.01 if precision in ("bf16-true", "16-true") else 0.001
    decision = as_measured(fit(wide, wide_data, 128), precision=precision, error=error)
    weights = {"32-true": 4, "64-true": 8, "bf16-true": 2, "16-true": 2, "bf16-mixed": 4, "16-mixed": 4}[
        precision
    ] * 333_834
    assert decision.footprint.parts["parameters"] == weights
    assert decision.footprint.method == "fake"


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.captures
@pytest.mark.parametrize(
    ("plugin", "byte_width"),
    [
        (lambda: pl.plugins.MixedPrecision("bf16-mixed", "cpu"), 4),
        (lambda: pl.plugins.HalfPrecision("bf16-true"), 2),
        (pl.plugins.DoublePrecision, 8),
    ],
    ids=["mixed", "half", "double"],
)
def test_precision_as_a_plugin(
    trainer: Any, wide: Any, wide_data: TensorDataset, plugin: Callable[[], Any], byte_width: int
) -> None:
    """The user's plugin is read, and not used up: the run trains with it after."""
    guard, module = MemGuard("check"), wide()
    trainer(guard, plugins=[plugin()], max_steps=1).fit(module, DataLoader(wide_data, batch_size=64))
    assert guard.decision.footprint.parts["parameters"] == 333_834 * byte_width


def test_a_schedule_of_accumulation_leaves_no_effective_batch_size_to_keep(trainer: Any) -> None:
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})
    guard = MemGuard(max_batch_size=10, keep_effective_batch_size=40)
    with pytest.raises(MemGuardError, match="keep_effective_batch_size=40 and a GradientAccumulationScheduler"):
        guard.setup(trainer(guard, scheduler), Counted(), "fit")


# -- what does not: the training goes on as it would


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"overfit_batches": 3}, [4] * 3),  # not more samples
        ({"overfit_batches": 0.4}, [20] * 2),
        ({"fast_dev_run": True}, [20]),
        pytest.param({"fast_dev_run": 2}, [20] * 2, marks=LONG),  # as of one
        ({"limit_train_batches": 3}, [4] * 3),
        ({"limit_train_batches": 0.5}, [20] * 2),
        ({"barebones": True}, [20] * 5),
        ({"max_steps": 7, "max_epochs": -1}, [20] * 7),
        pytest.param({"max_steps": 3}, [20] * 3, marks=LONG),  # as of seven
        ({"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}, [20] * 10),
        pytest.param({"inference_mode": False}, [20] * 5, marks=LONG),
        ({"enable_checkpointing": True}, [20] * 5),
    ],
    ids=str,
)
def test_the_number_of_batches_is_that_of_the_chosen_size(
    trainer: Any, dataset: TensorDataset, tmp_path: Any, settings: dict[str, Any], sizes: list[int]
) -> None:
    bare = {"logger": None, "enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None}
    more = bare if settings.get("barebones") else {}
    module = tuned_to_twenty(trainer, dataset, size=sizes[0], default_root_dir=tmp_path, **{**more, **settings})
    assert module.sizes == sizes


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({"limit_val_batches": 0}, 0),
        pytest.param({"limit_val_batches": 3}, 2 + 3, marks=LONG),  # as of a half
        ({"limit_val_batches": 0.5}, 2 + 5),
        ({"num_sanity_val_steps": 0}, 10),
        ({"num_sanity_val_steps": -1}, 20),
        pytest.param({"num_sanity_val_steps": 0, "val_check_interval": 2}, 20, marks=LONG),  # as of a share
        ({"num_sanity_val_steps": 0, "val_check_interval": 0.4}, 20),
        ({"num_sanity_val_steps": 0, "val_check_interval": 7, "check_val_every_n_epoch": None, "max_epochs": 3}, 20),
    ],
    ids=str,
)
def test_validation_runs_as_often_as_it_is_told(
    trainer: Any, dataset: TensorDataset, settings: dict[str, Any], batches: int
) -> None:
    """Five batches of 20 an epoch; ten batches of 10 in each validation, at its own size."""
    assert tuned_to_twenty(trainer, dataset, **settings).evaluated == [10] * batches


@pytest.mark.parametrize("limit", [0, 2, 0.5], ids=str)
@pytest.mark.parametrize("stage", ["test", "predict"])
def test_limits_of_what_is_evaluated_alone(trainer: Any, dataset: TensorDataset, stage: str, limit: float) -> None:
    module, guard = Counted(), MemGuard(batch_size="largest", max_batch_size=10)
    run = trainer(guard, **{f"limit_{stage}_batches": limit})
    getattr(run, stage)(module, DataLoader(dataset, batch_size=4))
    assert module.evaluated == {0: [], 2: [4] * 2, 0.5: [4] * 12}[limit]


@pytest.mark.captures
@pytest.mark.usefixtures("captured_once")
@pytest.mark.parametrize("profiler", ["simple", "advanced", "pytorch"])
def test_profilers_see_the_run_alone(trainer: Any, dataset: TensorDataset, tmp_path: Any, profiler: str) -> None:
    """The profile has nothing of what the copy runs in setup."""
    made: Any = {
        "simple": pl.profilers.SimpleProfiler,
        "advanced": pl.profilers.AdvancedProfiler,
        "pytorch": pl.profilers.PyTorchProfiler,
    }[profiler](dirpath=tmp_path, filename="profile")
    module = tuned_to_twenty(trainer, dataset, profiler=made, limit_val_batches=0)
    assert module.sizes == [20] * 5
    if profiler == "simple":
        seen = made.recorded_durations["run_training_batch"]
        assert len(seen) == 5


@pytest.mark.parametrize("count", [0, 1, 2])
def test_every_logger_gets_the_records(trainer: Any, dataset: TensorDataset, tmp_path: Any, count: int) -> None:
    loggers = [pl.loggers.CSVLogger(tmp_path, name=f"{place}") for place in range(count)]
    tuned_to_twenty(trainer, dataset, logger=loggers or False)
    for logger in loggers:
        written = (tmp_path / logger.name / "version_0" / "metrics.csv").read_text()
        assert "memguard/predicted_peak_gib" in written


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_one_cycle_schedule_ends_with_the_training(trainer: Any, dataset: TensorDataset, accumulate: int) -> None:
    """It plans for exactly the steps that the tuned size leaves; one more would raise, fewer would not anneal."""

    class OneCycle(Counted):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.planned = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(self.planned))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module, guard = OneCycle(), MemGuard(batch_size="largest", max_batch_size=20)
    run = trainer(guard, max_epochs=3, accumulate_grad_batches=accumulate)
    run.fit(module, DataLoader(dataset, batch_size=4))
    assert module.planned == run.global_step == {1: 15, 2: 9}[accumulate]
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == module.planned


def test_a_guard_is_pickled_for_processes_that_are_spawned() -> None:
    guard = MemGuard("check", budget="1GiB", margin=0.1)
    assert pickle.loads(pickle.dumps(guard))._settings == guard._settings
