"""The copy's step runs in Lightning's own order, and nothing of it is seen outside."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.simulation.compiled import NOTE
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.adapter.shadow import _call_after_step
from lightning_memguard.training.run.tune import Tuning
from tests.long import long_but


def phases(trace: Trace) -> list[str]:
    return [phase for phase, _ in itertools.groupby(event.phase for event in trace)]


def trace_of(tuning: Tuning) -> Trace:
    assert tuning.profile is not None
    return tuning.profile.prediction.trace_at(10)


@pytest.mark.usefixtures("at_own_size")
def test_forward_comes_before_zero_grad(trainer: Any, small: Any, dataset: TensorDataset, tuned: Any) -> None:
    """Last step's gradients are alive while the next forward pass runs: Lightning's closure, not PyTorch's loop."""
    trace = trace_of(tuned(trainer(), small(), dataset))
    assert trace.method == "fake"
    second = [event for event in trace if event.step == 1]
    assert phases(Trace(10, "cpu", "fake", tuple(second)))[:3] == ["forward", "zero_grad", "backward"]
    freed = {event.phase for event in second if event.action == "free" and event.part == "gradients"}
    assert freed == {"zero_grad"}


@pytest.mark.usefixtures("at_own_size")
def test_accumulated_gradients_are_kept_for_the_next_batch(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any
) -> None:
    """With four batches a step, gradients are freed once every step, not once every batch."""
    trace = trace_of(tuned(trainer(accumulate_grad_batches=4), small(), dataset))
    freed = [event.step for event in trace if event.action == "free" and event.part == "gradients"]
    assert set(freed) == {2}, "two micro-batches represent four: the second step begins with the third"


@pytest.mark.usefixtures("at_own_size")
def test_clipping_takes_its_norms(trainer: Any, small: Any, dataset: TensorDataset, tuned: Any) -> None:
    operators = {event.operator for event in trace_of(tuned(trainer(gradient_clip_val=1.0), small(), dataset))}
    assert any("norm" in operator for operator in operators)
    assert not any("norm" in event.operator for event in trace_of(tuned(trainer(), small(), dataset)))


@pytest.mark.usefixtures("at_own_size")
def test_both_optimizers_of_a_manual_step_are_seen_twice(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any
) -> None:
    class Alternating(small):  # type: ignore[misc,valid-type]
        """The second optimizer steps every third batch."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            for optimizer in (first, second) if batch_idx % 3 == 2 else (first,):
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.net[0].parameters()), torch.optim.Adam(self.net[2].parameters())

    trace = trace_of(tuned(trainer(), Alternating(), dataset))
    assert max(event.step for event in trace) >= 5
    states = sum(event.nbytes for event in trace if event.part == "optimizer_state" and event.action == "alloc")
    weights = sum(event.nbytes for event in trace if event.part == "parameters")
    assert states == 2 * weights + 4 * 4, "two moments of each weight, and a step count of each of four tensors"


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_the_precision_plugin_counts(
    trainer: Any, small: Any, dataset: TensorDataset, tuned: Any, precision: str
) -> None:
    trace = trace_of(tuned(trainer(precision=precision), small(), dataset))
    weights = sum(event.nbytes for event in trace if event.part == "parameters")
    assert weights == (16 * 64 + 64 + 64 * 4 + 4) * {"bf16-mixed": 4, "bf16-true": 2, "64-true": 8}[precision]


class Nosy(pl.LightningModule):
    """Reads its trainer, writes to its logger, prints, and appends."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 4)
        self.seen: list[object] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        print("a step")
        self.seen.append(batch_idx)
        assert self.trainer.mine == "kept"
        assert self.trainer.max_epochs == 1
        assert self.trainer.checkpoint_callback is not None
        assert self.trainer.ckpt_path == "last.ckpt"
        self.trainer.save_checkpoint("from_the_step.ckpt")
        self.logger.experiment.add_scalar("x", 1.0, self.global_step)
        self.logger.log_metrics({"y": 1.0})
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_the_copy_does_is_not_seen(
    trainer: Any, dataset: TensorDataset, tuned: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[object] = []

    class Writing(pl.loggers.logger.DummyLogger):  # type: ignore[name-defined,misc]
        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            written.append(args)

    fit = trainer(logger=Writing(), enable_checkpointing=True, default_root_dir=tmp_path)
    fit.mine, fit.ckpt_path = "kept", "last.ckpt"
    module = Nosy()
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    weights = [parameter.clone() for parameter in module.parameters()]
    capsys.readouterr()
    tuning = tuned(fit, module, dataset, mode="check")
    assert trace_of(tuning).method == "fake"
    assert capsys.readouterr().out == ""
    assert (written, module.seen, list(tmp_path.iterdir())) == ([], [], [])
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert all(torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.trainer is fit


class Compiled(pl.LightningModule):
    """Compiles a part of itself, in the ways that people do."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.calls = 0
        if by == "net":
            self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]
        elif by == "Module.compile":
            self.net.compile(backend="eager")
        elif by == "method":
            self.loss = torch.compile(self.loss, backend="eager")  # type: ignore[method-assign]
        elif by == "function":
            self.loss = torch.compile(lambda x, y: self.plain(y=y, x=x), backend="eager")  # type: ignore[method-assign]

    def plain(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(self.net(x), y)

    loss = plain

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(*batch)  # without `self.log`, which Dynamo of torch 2.13 fails at

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.usefixtures("at_own_size")
@pytest.mark.parametrize(
    "by", long_but(["trainer.fit", "method"], ["trainer.fit", "net", "Module.compile", "method", "function"])
)
def test_what_is_compiled_runs_on_the_copy_as_written_and_compiled(
    trainer: Any, dataset: TensorDataset, tuned: Any, by: str
) -> None:
    """Compiled functions are bound to the user's module, and a deep copy shares functions."""

    def bytes_of(trace: Trace) -> list[tuple[str, int]]:
        return [(event.action, event.nbytes) for event in trace]

    eager = trace_of(tuned(trainer(), Compiled("plain"), dataset, mode="check"))
    module = Compiled(by)
    if by == "trainer.fit":  # what fit(torch.compile(module)) does first
        pl.utilities.compile.from_compiled(torch.compile(module, backend="eager"))
    tuning = tuned(trainer(), module, dataset, mode="check")
    assert tuning.profile is not None
    trace = tuning.profile.prediction.uncompiled().trace_at(10)
    assert trace.notes == (NOTE,)
    assert (trace.method, bytes_of(trace)) == ("fake", bytes_of(eager))
    assert (trace_of(tuning).method, trace_of(tuning).notes) == ("compiled", ())
    norm = next(child for child in module.modules() if isinstance(child, nn.BatchNorm1d))
    assert (module.calls, int(norm.num_batches_tracked)) == (0, 0)  # type: ignore[arg-type]
    assert not norm.running_mean.any()  # type: ignore[union-attr]
    assert all(parameter.grad is None for parameter in module.parameters())


class OwnTrainer(pl.Trainer):
    def rate(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])


class Reading(pl.LightningModule):
    """Reads what people read in a step; ``reads`` are compared with those of the real run."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.net = nn.Linear(16, 4)
        self.read = read
        self.other: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        kept.append((type(self.trainer) is OwnTrainer, self.read(self)))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.training_step((batch[0], batch[1]), batch_idx)
        return self.net(batch[0])  # type: ignore[no-any-return]

    validation_step = predict_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Marked(pl.Callback):
    mark = "mine"
    started = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.started += 1


class OwnData(pl.LightningDataModule):
    def __init__(self, batch_size: int = 5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.classes = 4

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.randn(100, 16), torch.randint(0, 4, (100,)))
        return DataLoader(data, batch_size=self.hparams["batch_size"])

    predict_dataloader = train_dataloader


kept: list[tuple[bool, Any]] = []

_READS = {
    "log_dir": lambda self: self.trainer.log_dir,
    "the logger's log_dir": lambda self: (self.logger.log_dir, self.logger.name, self.logger.version),
    "the logger's class": lambda self: isinstance(self.logger, pl.loggers.CSVLogger),
    "the second logger": lambda self: (len(self.loggers), self.trainer.loggers[1].save_dir),
    "the experiment's folder": lambda self: self.logger.experiment.log_dir,
    "the dataset": lambda self: len(self.trainer.train_dataloader.dataset),
    "the loader": lambda self: (self.trainer.train_dataloader.batch_size, len(self.trainer.train_dataloader)),
    "the datamodule": lambda self: (self.trainer.datamodule.classes, self.trainer.datamodule.hparams.batch_size),
    "a callback": lambda self: next(c for c in self.trainer.callbacks if isinstance(c, Marked)).mark,
    "log_every_n_steps": lambda self: self.trainer.log_every_n_steps,
    "a method of one's own Trainer": lambda self: self.trainer.rate(),
    "the Trainer by another name": lambda self: self.other.optimizers[0].param_groups[0]["lr"],
}


@pytest.mark.parametrize("calls", [False, True], ids=["reads", "a call of the experiment"])
def test_a_step_reads_what_it_reads_in_the_run(tmp_path: Any, calls: bool) -> None:
    """Differences here made a step fail on the copy, or take another branch."""
    loggers = [pl.loggers.CSVLogger(tmp_path, name="csv"), pl.loggers.TensorBoardLogger(tmp_path, name="board")]
    callback, guard = Marked(), MemGuard(batch_size="largest", max_batch_size=20)
    fit = OwnTrainer(
        accelerator="cpu", max_epochs=1, logger=loggers, callbacks=[callback, guard], log_every_n_steps=7,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    reads = {**_READS, "an optimizer of the script's Trainer": lambda _: len(fit.optimizers[0].param_groups)}
    if calls:
        reads = {"a call of the experiment": lambda self: self.logger.experiment.config.update({"x": 1}) and None}
        names = dict.fromkeys(("log_metrics", "log_hparams", "save"), lambda *_: None)
        loggers[0]._experiment = SimpleNamespace(config={}, log_dir=str(tmp_path), **names)  # type: ignore[assignment]
    module = Reading(lambda self: {name: repr(read(self)) for name, read in reads.items()})
    module.other = fit
    kept.clear()
    fit.fit(module, datamodule=OwnData())
    assert guard.decision is not None
    assert guard.decision.footprint is not None
    assert (guard.decision.footprint.method, guard.decision.batch_size) == ("fake", 20)
    for name in reads:
        real = {read[name] for is_real, read in kept if is_real}
        copies = {read[name] for is_real, read in kept if not is_real}
        assert len(real) == 1
        assert real <= copies, f"{name}: at the size that was chosen, the copy reads the same"
        assert len(copies) == 1 or name in ("the loader", "the datamodule"), name
    assert callback.started == 5
    if calls:
        assert loggers[0].experiment.config == {"x": 1}, "once, in the run"


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.parametrize("stage", ["predict", "validate"])
def test_loaders_of_an_evaluation_have_a_length(trainer: Any, dataset: TensorDataset, stage: str) -> None:
    guard, name = (
        MemGuard(batch_size="largest", max_batch_size=20),
        {"predict": "predict_dataloaders", "validate": "val_dataloaders"}[stage],
    )
    kept.clear()
    module = Reading(lambda self: len(getattr(self.trainer, name)))
    getattr(trainer(guard), stage)(module, DataLoader(dataset, batch_size=4))
    assert 25 in {count for _, count in kept}, "the real loader of 100 samples"
    assert guard.decision is not None
    assert guard.decision.batch_size == 4, "an evaluation is never grown"


class FrozenFirst(pl.LightningModule):
    """Two layers, of which the first is trained from the second epoch on, if at all."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net[2].parameters())


class Unfreezing(FrozenFirst):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.net[0].parameters())})


class AllTrained(FrozenFirst):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.requires_grad_(True).parameters())


class NeverTrained(Unfreezing):
    """Its step fails once its frozen layer is trained."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if all(parameter.requires_grad for parameter in self.parameters()):
            raise RuntimeError("not on the copy")
        return super().training_step(batch, batch_idx)


def footprint_of(tuning: Tuning) -> Any:
    assert tuning.profile is not None
    return tuning.profile.prediction.footprint_at(10)


@pytest.mark.usefixtures("at_own_size")
def test_what_may_be_trained_later_is_in_the_range_or_noted_if_it_cannot_be_predicted(
    trainer: Any, dataset: TensorDataset, tuned: Any
) -> None:
    """The first epoch takes what a frozen layer takes; at most, a step takes what it does with all layers trained."""
    found, frozen, trained = (
        footprint_of(tuned(trainer(max_epochs=2), kind(), dataset)) for kind in (Unfreezing, FrozenFirst, AllTrained)
    )
    assert found.peak_allocated_bytes == frozen.peak_allocated_bytes < trained.peak_allocated_bytes
    assert found.low.allocated_bytes == frozen.peak_allocated_bytes
    assert found.high.allocated_bytes == trained.peak_allocated_bytes
    assert "frozen now may be trained" in found.notes[-1]
    assert footprint_of(tuned(trainer(max_epochs=1), Unfreezing(), dataset)).high == frozen.high
    never = footprint_of(tuned(trainer(max_epochs=2), NeverTrained(), dataset))
    assert any("that is not predicted" in note for note in never.notes)


class Wrapping(torch.optim.Optimizer):
    """Runs another optimizer, and not ``Optimizer.__init__``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        return self.inner.step()


@pytest.mark.parametrize("wraps", [True, False])
def test_each_step_is_noticed_once(wraps: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer: torch.optim.Optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer = Wrapping(optimizer) if wraps else optimizer
    stepped: list[object] = []
    _call_after_step(optimizer, stepped.append)
    for _ in range(2):
        optimizer.step(lambda: parameter.sum().backward())  # type: ignore[arg-type]
    assert stepped == [optimizer, optimizer]
    assert parameter[0] < 1


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(16), 0)] * 100)


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.parametrize(("limits", "at_a_time"), [({}, 2), ({"limit_train_batches": 4}, 1)])
def test_a_stream_is_prefetched_unless_its_batches_are_counted(
    trainer: Any, small: Any, tuned: Any, limits: dict[str, int], at_a_time: int
) -> None:
    """As Lightning does: next to the first batch is another, where it cannot know which is the last."""
    trace = trace_of(tuned(trainer(**limits), small(), Stream()))
    first = next(i for i, event in enumerate(trace.events) if event.phase == "forward" and event.part != "batch")
    batches = [event for event in trace.events[:first] if event.part == "batch" and event.nbytes == 10 * 16 * 4]
    assert len(batches) == at_a_time


@pytest.mark.parametrize(
    ("samples", "epochs", "changes"), [(80, 2, False), (83, 2, True), (83, 1, False), (81, 2, False)]
)
def test_batches_change_their_shape_where_an_epoch_ends_with_a_smaller_one_and_another_begins(samples, epochs, changes):
    trainer = pl.Trainer(accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False)
    batches, count = batches_from_one(torch.ones(8, 4)), lambda size: -(-samples // size)
    program = LightningProgram(trainer, pl.LightningModule(), batches, torch.device("cpu"), batches_per_epoch=count)
    assert program.changes_shape(8) is changes
