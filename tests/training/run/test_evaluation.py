"""Validation, test and prediction: predicted as they run, within a fit and on their own."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.utilities import dim_zero_cat

from lightning_memguard import MemGuard
from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.units import KIB
from tests.long import long_but

WEIGHTS = 4 * 333_834  # of `Wide`
OUTPUT = 4 * 512  # of its first layer, for one sample


class Evaluated(nn.Module):
    """Steps to mix into `Wide`; what ``keeps`` asks for piles up."""

    keeps = False
    sizes: list[int]

    def on_validation_epoch_start(self) -> None:
        self.outputs: list[torch.Tensor] = []

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.keeps:
            self.outputs.append(self.net[:2](batch[0]))
        else:
            self.loss(batch)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net[:2](batch[0])

    def on_validation_epoch_end(self) -> None:
        self.outputs.clear()

    on_test_epoch_end = on_validation_epoch_end


@pytest.fixture
def evaluated(wide: Any) -> Any:
    """A module class that can be evaluated."""
    return type("EvaluatedWide", (Evaluated, wide), {})


@pytest.fixture
def keeping(evaluated: Any) -> Any:
    """One that keeps an output of every batch to the end of the epoch."""
    return type("Keeping", (evaluated,), {"keeps": True})


def run(stage: str, make: Callable[[], Any], *data: TensorDataset, size: int = 64) -> Callable[[Any], object]:
    more: dict[str, Any] = {} if stage == "predict" else {"verbose": False}
    return lambda trainer: getattr(trainer, stage)(make(), [DataLoader(each, batch_size=size) for each in data], **more)


def fit(
    make: Callable[[], Any], data: TensorDataset, validation: Any, size: int, batch_size: int = 64
) -> Callable[[Any], object]:
    return lambda trainer: trainer.fit(
        make(), DataLoader(data, batch_size=batch_size), DataLoader(validation, batch_size=size)
    )


@pytest.fixture
def many() -> TensorDataset:
    """2048 samples for `Wide`."""
    return TensorDataset(torch.randn(2048, 128), torch.randint(0, 10, (2048,)))


# -- alone, held against PyTorch's own count


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_each_stage_alone(evaluated: Any, wide_data: Any, as_measured: Any, stage: str) -> None:
    decision = as_measured(run(stage, evaluated, wide_data))
    assert decision.footprint.phase == {"validate": "validation", "test": "test", "predict": "prediction"}[stage]
    assert decision.footprint.parts["gradients"] == 0
    assert decision.footprint.parts["optimizer_state"] == 0


class Images(pl.LightningModule):
    """Its operators come to a recorder whole under inference_mode, and taken apart elsewhere: convolutions, a GRU."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.Conv2d(16, 3, 1))
        self.rows = nn.GRU(256, 32, batch_first=True) if recurrent else None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self.images(batch[0]) if self.rows is None else self.rows(batch[0].flatten(2))[0]
        self.log("mean", found.mean())


@pytest.mark.parametrize(
    ("recurrent", "inference_mode"),
    long_but([(False, True), (True, False)], itertools.product([False, True], [True, False])),
)
def test_scratch_inside_kernels_counts_in_validation(as_measured: Any, recurrent: bool, inference_mode: bool) -> None:
    data = TensorDataset(torch.randn(96, 3, 16, 16), torch.zeros(96))
    decision = as_measured(run("validate", lambda: Images(recurrent), data, size=32), inference_mode=inference_mode)
    assert recurrent or decision.footprint.parts["workspaces"] > 0


class Ranked(torchmetrics.Metric):
    """Keeps every score of an epoch, and compares them at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("scores", default=[], dist_reduce_fx="cat")

    def update(self, scores: torch.Tensor) -> None:
        self.scores.append(scores)

    def compute(self) -> torch.Tensor:
        scores = dim_zero_cat(self.scores)
        return (scores.exp() - scores.mean()).mean()


class Scored(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(128, 256)
        self.ranked = Ranked()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scores = self.net(batch[0])
        self.ranked.update(scores.detach())
        self.log("ranked", self.ranked, on_step=False, on_epoch=True)
        return scores.square().mean()

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("stage", "size"),
    long_but([("fit", 128), ("validate", 1024)], [("fit", 64), ("fit", 128), ("validate", 64), ("validate", 1024)]),
)
def test_a_metric_of_a_whole_epoch_is_computed_at_its_end(many: Any, as_measured: Any, stage: str, size: int) -> None:
    """Next to what its steps left: all scores, joined and compared."""

    def evaluate(trainer: Any) -> None:
        getattr(trainer, stage)(Scored(), DataLoader(many, batch_size=size))

    assert as_measured(evaluate, max_epochs=1).footprint.phase == "epoch end"


class Sequences(pl.LightningModule):
    """Layers that add a bias inside another operator, or that one operator runs where there are no gradients."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed = kind, nn.Linear(48, 64)
        layer: dict[str, Any] = {"dim_feedforward": 128, "batch_first": True}
        self.gru = nn.GRU(64, 64, bidirectional=True, batch_first=True) if kind == "gru" else None
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, **layer, norm_first=kind == "gelu"), 2)
        if kind == "gelu":
            self.encoder.layers.apply(lambda layer: setattr(layer, "activation_relu_or_gelu", 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.gru is not None:
            return self.gru(x)[0]
        if self.kind == "cross":
            return self.attention(x, x * 2, x * 2)[0]
        if self.kind == "self":
            return self.attention(x, x, x)[0]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.kind == "masked" else None
        return self.encoder(x, mask=mask, is_causal=mask is not None)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self(batch[0]).float().mean())


@pytest.mark.parametrize(
    ("kind", "precision"),
    long_but(
        [("gru", "32-true"), ("cross", "32-true"), ("encoder", "bf16-mixed"), ("masked", "bf16-mixed")],
        itertools.product(["gru", "self", "cross", "encoder", "masked", "gelu"], ["32-true", "bf16-mixed"]),
    ),
)
def test_what_runs_inside_one_operator(as_measured: Any, kind: str, precision: str) -> None:
    data = TensorDataset(torch.randn(64, 8 if kind == "gru" else 32, 48))  # the profiler sees each step of a GRU
    as_measured(run("validate", lambda: Sequences(kind), data, size=32), precision=precision)


@pytest.mark.parametrize(
    ("stage", "size", "settings"),
    [
        ("validate", 32, {"inference_mode": False}),
        ("validate", 256, {"inference_mode": True}),
        ("test", 32, {"limit_test_batches": 3}),
        ("test", 32, {"limit_test_batches": 0.5}),
        pytest.param("validate", 32, {"inference_mode": True}, marks=pytest.mark.long),
        pytest.param("validate", 128, {"inference_mode": True}, marks=pytest.mark.long),
    ],
)
def test_outputs_that_are_kept_stand_there_once_for_every_batch_that_limits_leave(
    keeping: Any, wide_data: Any, as_measured: Any, stage: str, size: int, settings: dict[str, Any]
) -> None:
    """Also where there are fewer batches than it takes to see that they pile up."""
    as_measured(run(stage, keeping, wide_data, size=size), **settings)


def test_several_loaders_one_after_the_other(keeping: Any, wide_data: Any, as_measured: Any) -> None:
    one = as_measured(run("validate", keeping, wide_data, size=32))
    two = as_measured(run("validate", keeping, wide_data, wide_data, size=32))
    more = two.footprint.peak_allocated_bytes - one.footprint.peak_allocated_bytes
    assert more == 256 * OUTPUT


@pytest.mark.parametrize("returned", [True, False])
def test_predictions_that_are_returned(
    trainer: Any, evaluated: Any, wide_data: Any, as_measured: Any, returned: bool
) -> None:
    """Lightning gathers them on the CPU, where this run's memory is counted; unless set not to."""

    def predict(run: Any) -> None:
        run.predict(evaluated(), DataLoader(wide_data, batch_size=32), return_predictions=returned)

    decision = as_measured(predict)
    parts = decision.footprint.parts
    assert (sum(parts.values()) - parts["parameters"] > 256 * OUTPUT) is returned


def test_gradients_within_a_validation_step(wide: Any, wide_data: Any, as_measured: Any) -> None:
    """Under ``torch.enable_grad``, as for a gradient penalty, the step is one with a backward pass."""

    class Penalty(wide):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            with torch.enable_grad():
                self.loss(batch).backward()
            self.zero_grad()

    decision = as_measured(run("validate", Penalty, wide_data, size=128), inference_mode=False)
    assert decision.footprint.phase == "backward" or decision.footprint.parts["activations"] > 0


# -- within a fit


@pytest.mark.parametrize("case", ["momentum", "Adam", "an average", "outputs that are kept"])
def test_a_fit_whose_peak_stands_in_validation(
    evaluated: Any, keeping: Any, wide_data: Any, many: Any, as_measured: Any, case: str
) -> None:
    """The optimizer's state is there too, and an average; the gradients have been cleared."""
    average, adam = getattr(pl.callbacks, "WeightAveraging", None), case == "Adam"
    if case == "an average" and average is None:
        pytest.skip("this Lightning has no WeightAveraging")
    callbacks = [average] if case == "an average" else []
    kind, size = (keeping, 128) if case == "outputs that are kept" else (evaluated, 2048)
    decision = as_measured(fit(lambda: kind(adam), wide_data, many, size), *callbacks)
    assert decision.footprint.phase == "validation"
    assert decision.footprint.parts["optimizer_state"] == (2 * WEIGHTS + 6 * 4 if adam else WEIGHTS)
    assert decision.footprint.parts["gradients"] == 0
    assert decision.footprint.parts.get("callbacks", 0) == WEIGHTS * len(callbacks)
    assert any(f"validation, at its batch size of {size}" in note for note in decision.footprint.notes)


@pytest.mark.parametrize(
    ("interval", "gradients"), [({}, 0), ({"val_check_interval": 3}, WEIGHTS)], ids=["epoch's end", "within a step"]
)
def test_accumulated_gradients_are_there_during_validation_within_a_step_and_gone_by_the_end_of_an_epoch(
    evaluated: Any, wide_data: Any, many: Any, as_measured: Any, interval: dict[str, int], gradients: int
) -> None:
    decision = as_measured(fit(evaluated, wide_data, many, 2048), accumulate_grad_batches=2, **interval)
    assert decision.footprint.parts["gradients"] == gradients


class Noting(pl.LightningModule):
    """Notes the sizes of its batches, by stage."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.net = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10))
        self.trained: list[int] = []
        self.validated: list[int] = []
        self.data = TensorDataset(torch.randn(100, 128), torch.randint(0, 10, (100,)))

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained.append(len(batch[0]))
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(len(batch[0]))
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.batch_size)


@pytest.mark.usefixtures("taped")
def test_validation_stays_at_its_own_size(trainer: Any) -> None:
    """Though the module's `batch_size`, which its validation loader reads, is that of training meanwhile."""
    module, guard = Noting(batch_size=5), MemGuard(batch_size="largest", max_batch_size=50)
    trainer(guard, num_sanity_val_steps=0).fit(module)
    assert module.batch_size == 5, "put back"
    assert module.trained == [50, 50]
    assert module.validated == [5] * 20
    assert guard.decision.validation_batch_size == 5


@pytest.mark.usefixtures("taped")
def test_a_validation_batch_that_does_not_fit_is_made_smaller(trainer: Any, many: TensorDataset) -> None:
    module, guard = Noting(), MemGuard(batch_size="largest", budget=600 * KIB, margin=0.0)
    trainer(guard, num_sanity_val_steps=0).fit(
        module, DataLoader(many, batch_size=8), DataLoader(many, batch_size=2048)
    )
    decision = guard.decision
    assert decision.validation_batch_size is not None
    assert 1 < decision.validation_batch_size < 2048
    assert max(module.validated) == decision.validation_batch_size
    assert sum(module.validated) == 2048
    assert decision.footprint.peak_device_bytes <= 600 * KIB
    assert decision.batch_size > 8, "training takes what is left to it all the same"


@pytest.mark.usefixtures("at_own_size")
def test_a_validation_step_that_reads_values_drags_nothing_down(trainer: Any, many: TensorDataset) -> None:
    """It is run for real on a copy; the training step is still traced without memory."""

    class Branching(Noting):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.diverged = bool(self.loss(batch) > 1e9)

    guard = MemGuard("check")
    trainer(guard).fit(Branching(), DataLoader(many, batch_size=64), DataLoader(many, batch_size=1024))
    profile = guard._last_run.tuning.profile
    assert profile.prediction.method == "fake"
    assert profile.validation.prediction.method == "real"
    assert profile.validation.footprint.parts["batch"] == 1024 * (128 * 4 + 8), "and is known at its own size"


# -- runs of their own, in both packages


def module_of(package: Any) -> Any:
    class Module(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(16, 4)
            self.sizes: list[int] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.sizes.append(len(batch[0]))
            self.log("seen", batch[0][:, 0].sum(), reduce_fx="sum")

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.sizes.append(len(batch[0]))
            return batch[0][:, 0]  # type: ignore[no-any-return]

    return Module()


def datamodule_of(package: Any, dataset: Any) -> Any:
    class Data(package.LightningDataModule):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            self.dataset = dataset

        def val_dataloader(self) -> Any:
            return DataLoader(self.dataset, batch_size=4)

        test_dataloader = predict_dataloader = val_dataloader

    return Data()


@pytest.mark.usefixtures("taped")
@pytest.mark.parametrize(
    ("package", "data", "stage"),
    [
        ("lightning.pytorch", "datamodule", "validate"),
        ("pytorch_lightning", "loader", "test"),
        ("lightning.pytorch", "datamodule", "predict"),
    ],
)
def test_what_is_evaluated_alone_keeps_its_batches(package: str, stage: str, data: str) -> None:
    """Also where training would be asked to grow: predictions pair with the batches of the data."""
    theirs = importlib.import_module(package)
    x = torch.arange(100.0)[:, None].expand(100, 16).contiguous()
    dataset = TensorDataset(x, torch.zeros(100, dtype=torch.long))
    module, guard = module_of(theirs), MemGuard(batch_size="largest")
    trainer = theirs.Trainer(
        accelerator="cpu", logger=False, callbacks=[guard], enable_progress_bar=False, enable_model_summary=False
    )
    given = {"datamodule": datamodule_of(theirs, dataset)}
    if data == "loader":
        given = {"dataloaders": DataLoader(dataset, batch_size=4)}
    result = getattr(trainer, stage)(module, **given)
    assert module.sizes == [4] * 25
    decision: Decision | None = guard.decision
    assert (decision.requested_batch_size, decision.batch_size, decision.outcome) == (4, 4, "kept")
    assert (list(guard.evaluations), guard.records) == ([stage], [])
    if stage == "predict":
        assert torch.cat(result).tolist() == list(range(100))
    else:
        assert result[0]["seen"] == sum(range(100))


@pytest.mark.usefixtures("taped")
def test_two_runs_of_one_trainer_are_tuned_each_for_itself(trainer: Any, many: TensorDataset) -> None:
    module, guard = Noting(), MemGuard(budget=600 * KIB, margin=0.0)
    run = trainer(guard)
    run.fit(module, DataLoader(many, batch_size=2048))
    first = guard.decision
    module.validated.clear()
    run.validate(module, DataLoader(many, batch_size=2048), verbose=False)
    second = guard.decision
    assert second.batch_size > first.batch_size, "without gradients and activations there is room for more"
    assert module.validated[0] == second.batch_size


class Cast(pl.LightningModule):
    """Under autocast, copies of its weights are most of what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):  # Lightning's own keeps no copies
            return self.layers(x)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch).square().mean()

    test_step = training_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("stage", "inference_mode"),
    long_but(
        [("validate", True), ("test", True), ("predict", False)],
        itertools.product(["validate", "test", "predict"], [True, False]),
    ),
)
def test_autocast_keeps_copies_of_weights_where_the_loop_has_it_keep_them(
    as_measured: Any, stage: str, inference_mode: bool
) -> None:
    samples = torch.randn(16, 512)

    def run(trainer: Any) -> None:
        getattr(trainer, stage)(Cast(), DataLoader(samples, batch_size=8))  # type: ignore[arg-type]

    as_measured(run, inference_mode=inference_mode)


@pytest.mark.usefixtures("at_own_size")
def test_what_waits_for_the_garbage_collector_is_not_kept_of_each_batch(
    evaluated: Any, many: Any, trainer: Any
) -> None:
    class Rings(evaluated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            ring = [torch.zeros(len(batch[0]), 1000)]
            ring.append(ring)

    guard = MemGuard(mode="check")
    run("validate", Rings, many)(trainer(guard))
    footprint = guard.decision.footprint
    left = footprint.peak_allocated_bytes - footprint.low.allocated_bytes
    assert left == 64 * 4000
    assert footprint.high.allocated_bytes - footprint.low.allocated_bytes == 32 * left


@pytest.mark.usefixtures("at_own_size")
def test_a_training_whose_sizes_depend_on_values_has_its_validation_predicted(trainer: Any) -> None:
    """Binary metrics check which labels there are; that needs no real step."""

    class Binary(Noting):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = torchmetrics.classification.BinaryAccuracy()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.accuracy(self.loss(batch).expand(len(batch[1])), batch[1])
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.accuracy(self.loss(batch).expand(len(batch[1])), batch[1])

    guard, data = MemGuard(mode="check"), TensorDataset(torch.randn(40, 128), torch.arange(40) % 2)
    trainer(guard).fit(Binary(), DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
    footprint = guard.decision.footprint
    assert footprint.method in ("worst-case", "sampled")
    assert not any("not predicted" in note or "could not run" in note for note in footprint.notes)


# -- which of the two has the peak


@pytest.mark.parametrize("empties", [False, True])
def test_what_a_validation_leaves_is_there_in_the_next_epoch(
    evaluated: Any, wide_data: Any, as_measured: Any, empties: bool
) -> None:
    class Keeps(evaluated):
        def on_validation_epoch_start(self) -> None:
            self.outputs = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.outputs.append(self.net[:2](batch[0]).repeat(1, 5))

        def on_validation_epoch_end(self) -> None:
            if empties:
                self.outputs.clear()

    found = as_measured(fit(lambda: Keeps(adam=True), wide_data, wide_data, 64), max_epochs=2).footprint
    assert any("behind, which are there while the run trains" in note for note in found.notes) is not empties


def test_validation_that_may_take_more_hides_no_step_that_likely_does(
    evaluated: Any, wide_data: Any, as_measured: Any
) -> None:
    """A hook that asks for a value may copy the 2.5 MiB that the epoch left, and does not."""

    class Asks(evaluated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.outputs.append(self.net[:2](batch[0]).repeat(1, 5))

        def on_validation_epoch_end(self) -> None:
            if self.outputs[0].sum().item() >= 0:
                self.outputs.clear()

    found = as_measured(fit(lambda: Asks(adam=True), wide_data, wide_data, 64)).footprint
    assert not found.is_evaluation
    assert found.most_device_bytes >= 3 * WEIGHTS + 2 * 5 * 256 * OUTPUT > found.peak_device_bytes
