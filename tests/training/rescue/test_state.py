"""State that a step changes is put back, and what cannot be put back is named."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

from lightning_memguard.training.rescue.state import StepState, random_states

COUNT = 0
TABLE: dict[str, int] = {}


class Slow:
    """A user's object with state in it."""

    def __init__(self) -> None:
        self.value = 1.0
        self.inner = SimpleNamespace(history=[1, 2])


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2))
        self.register_buffer("queue", torch.zeros(4))
        self.steps, self.warm = 0, False
        self.counts = {"a": 1}
        self.outputs: list[object] = []
        self.hidden = None
        self.slow, self.slotted = Slow(), Slotted()
        self.last = deque([1, 2], maxlen=2)
        self.by_class = defaultdict(list, {"x": [1]})
        self.order = OrderedDict(a=1, b=2)
        self.seen = {1}
        self.array = np.zeros(3)
        self.running = torch.zeros(2)
        self.generator, self.python = torch.Generator(), random.Random(0)
        self.numpy = np.random.default_rng(0)
        self.config = {"nested": {"list": [1, {"deep": 2}]}}
        self.itself = self.slow
        self.slow.cycle = self.slow


def trainer_stub() -> SimpleNamespace:
    return SimpleNamespace(
        _logger_connector=SimpleNamespace(_current_fx=None, _first_loop_iter=True),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def state(model: Model) -> StepState:
    return StepState(trainer_stub(), model)


def settled(state: StepState) -> None:
    """Some steps that change nothing."""
    for _ in range(4):
        state.note(None, None)
        state.watch()


def change(model: Model) -> None:
    """All of what a step may change in Python."""
    globals()["COUNT"] += 1
    TABLE["new"] = 1
    model.steps += 1
    model.warm = True
    model.counts["a"] += 1
    model.counts["b"] = 1
    model.outputs.append({"loss": 1})
    model.hidden = (torch.ones(1), torch.ones(1))
    model.slow.value = 2.0
    model.slow.inner.history[0] = 5
    model.slow.extra = 1
    model.slotted.value = 2
    model.last.append(3)
    model.by_class["y"].append(1)
    model.by_class["x"].append(2)
    model.order.move_to_end("a")
    model.seen.add(2)
    model.array[1] = 3
    model.running = model.running + 1
    torch.rand(2, generator=model.generator)
    model.python.random()
    model.numpy.random()
    model.config["nested"]["list"][1]["deep"] = 3
    model.surprise = 1
    model.net.eval()
    model.net[0].requires_grad_(False)


def facts(model: Model) -> object:
    return (
        *(COUNT, dict(TABLE), model.steps, model.warm, dict(model.counts), [*model.outputs], model.hidden),
        *(model.slow.value, [*model.slow.inner.history], sorted(vars(model.slow)), model.slotted.value, [*model.last]),
        *(copy.deepcopy(dict(model.by_class)), [*model.order], set(model.seen), model.array.tolist()),
        *(id(model.running), model.running.tolist(), model.generator.get_state().sum().item()),
        *(model.python.getstate(), str(model.numpy.bit_generator.state), copy.deepcopy(model.config)),
        *(hasattr(model, "surprise"), [each.training for each in model.modules()]),
        [each.requires_grad for each in model.parameters()],
    )


@pytest.mark.parametrize("steps", [0, 2, 5])
def test_python_state_is_put_back_again_and_again(model: Model, state: StepState, steps: int) -> None:
    for _ in range(steps):
        state.note(None, None)
        change(model)
        state.watch()
    before, held = facts(model), (model.counts, model.outputs, model.last, model.by_class, model.slow)
    noted = state.note(None, None)
    for _ in range(2):
        change(model)
        assert facts(model) != before
        assert state.obstacle(noted) == ""
        noted.put_back()
        assert facts(model) == before
    assert all(
        a is b for a, b in zip(held, (model.counts, model.outputs, model.last, model.by_class, model.slow), strict=True)
    )


def test_containers_that_appear_between_steps_are_noted(model: Model, state: StepState) -> None:
    settled(state)
    model.outputs, model.slow.log = [], {"x": [1]}
    model.counts["more"] = {"deep": [0]}
    noted = state.note(None, None)
    model.outputs.append(1)
    model.slow.log["x"].append(2)
    model.counts["more"]["deep"][0] = 7
    assert state.obstacle(noted) == ""
    noted.put_back()
    assert model.outputs == []
    assert model.slow.log == {"x": [1]}
    assert model.counts["more"] == {"deep": [0]}


class Equal:
    """An object that says it equals all of its kind."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = None


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Equal()


def test_a_new_object_that_was_not_noticed_is_an_obstacle(model: Model) -> None:
    """An object that equals the one before is taken for it; if a step fails then, its contents are not known."""
    model.part = Part()
    state = StepState(trainer_stub(), model)
    settled(state)
    model.part.settings = Equal()
    noted = state.note(None, None)
    assert "`self.part.settings` is new" in state.obstacle(noted)


def test_attributes_deleted_and_buffers_registered_by_a_step(model: Model, state: StepState) -> None:
    noted = state.note(None, None)
    del model.steps
    model.register_buffer("mask", torch.ones(2))
    queue, model.queue = model.queue, torch.ones(4)
    noted.put_back()
    assert model.steps == 0
    assert [name for name, _ in model.named_buffers()] == ["queue"]
    assert model.queue is queue


# -- tensors


def test_buffers_of_another_kind_of_batch_norm_stay(model: Model) -> None:
    """The code that runs the parts looks after its statistics."""

    class Own(nn.BatchNorm1d):
        pass

    model.norm = Own(3)
    state = StepState(trainer_stub(), model)
    noted = state.note(None, None)
    model.norm(torch.randn(4, 3))
    assert state.obstacle(noted) == ""
    noted.put_back()
    assert [*model.norm._buffers] == ["running_mean", "running_var", "num_batches_tracked"]


def test_a_small_buffer_changed_in_place_in_the_first_steps_is_put_back(model: Model, state: StepState) -> None:
    noted = state.note(None, None)
    model.queue += 1
    model.running.add_(1)
    assert state.obstacle(noted) == ""
    noted.put_back()
    assert model.queue.tolist() == [0] * 4
    assert model.running.tolist() == [0] * 2


@pytest.mark.parametrize(("name", "words"), [("queue", "the buffer `queue`"), ("running", "the tensor `self.running`")])
def test_tensors_known_to_change_are_copied_and_others_are_an_obstacle(
    model: Model, state: StepState, name: str, words: str
) -> None:
    settled(state)
    noted = state.note(None, None)
    getattr(model, name).add_(1)
    assert f"it changed {words} in place" in state.obstacle(noted)
    noted = state.note(None, None)  # from now on it is known
    getattr(model, name).add_(1)
    assert state.obstacle(noted) == ""
    noted.put_back()
    assert getattr(model, name).unique().tolist() == [1]


def test_a_large_buffer_that_steps_change_is_learned(model: Model) -> None:
    model.register_buffer("large", torch.zeros(100_000))
    state = StepState(trainer_stub(), model)
    noted = state.note(None, None)
    model.large[0] = 1
    assert "`large`" in state.obstacle(noted)
    state.watch()
    noted = state.note(None, None)
    model.large[1] = 1
    assert state.obstacle(noted) == ""
    noted.put_back()
    assert model.large.sum() == 1


def test_a_clamped_parameter_is_an_obstacle(model: Model, state: StepState) -> None:
    noted = state.note(None, None)
    with torch.no_grad():
        model.net[0].weight.clamp_(min=0)
    assert "the parameter `net.0.weight` in place" in state.obstacle(noted)


def test_batch_norm_is_left_out(model: Model) -> None:
    model.norm = nn.BatchNorm1d(3)
    state = StepState(trainer_stub(), model)
    noted = state.note(None, None)
    model.norm(torch.rand(4, 3))
    assert state.obstacle(noted) == ""
    assert not [*noted.tensors_left()]
    noted.put_back()
    assert model.norm.num_batches_tracked == 1


def test_states_of_metrics_are_put_back(model: Model) -> None:
    model.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    model.matrix = torchmetrics.ConfusionMatrix(task="multiclass", num_classes=3)
    model.cat, model.loose = torchmetrics.CatMetric(), [torchmetrics.MeanMetric()]
    state = StepState(trainer_stub(), model)

    def update() -> None:
        guess, truth = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2])
        model.accuracy(guess, truth)
        model.matrix.update(guess, truth)
        model.cat.update(torch.ones(2))
        model.loose[0].update(3.0)

    for _ in range(3):
        state.note(None, None)
        update()
        state.watch()
    metrics = (model.accuracy, model.matrix, model.cat, model.loose[0])
    before = [each.compute() for each in copy.deepcopy(metrics)]
    counts = [each._update_count for each in metrics]
    noted = state.note(None, None)
    update()
    assert state.obstacle(noted) == ""
    noted.put_back()
    assert [each._update_count for each in metrics] == counts
    assert all(torch.equal(each.compute(), value) for each, value in zip(metrics, before, strict=True))


def test_inference_tensors_are_copied(model: Model, state: StepState) -> None:
    with torch.inference_mode():
        model.running = torch.zeros(2)
    settled(state)
    noted = state.note(None, None)
    with torch.inference_mode():
        model.running += 1
    noted.put_back()
    assert model.running.tolist() == [0, 0]


def test_tensors_left_are_named_and_can_be_replaced(model: Model, state: StepState) -> None:
    model.outputs.append(torch.zeros(1))
    settled(state)
    noted = state.note(None, None)
    model.outputs += [torch.ones(1), {"loss": torch.ones(2)}]
    model.hidden = (torch.ones(3), torch.ones(4))
    model.slow.inner.tensor = torch.ones(5)
    model.net.features = torch.ones(6)  # not a user's class: not seen
    model.queue += 1
    left = [*noted.tensors_left()]
    names = {"self.outputs[1]", "self.outputs[2]['loss']", "self.hidden[0]", "self.hidden[1]", "self.queue"}
    assert {each.name for each in left} == names | {"self.slow.inner.tensor"}
    for each in left:
        each.replace(each.tensor * 7)
    assert [each[0].item() for each in model.hidden] == [7, 7]
    assert model.outputs[2]["loss"][0] == model.slow.inner.tensor[0] == model.queue[0] == 7
    assert model.outputs[0] == 0


# -- the batch


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor
    extra: list[int]


def test_containers_of_the_batch_are_put_back(state: StepState) -> None:
    x, y = torch.zeros(2), torch.ones(2)
    batch = {"x": x, "y": y, "pair": Pair(x, y, [1]), "tuple": ([x], 1)}
    noted = state.note(None, batch)
    for _ in range(2):
        batch.pop("y")
        batch["x"], batch["z"] = x + 1, 1
        batch["pair"].x = None
        batch["pair"].extra.append(2)
        batch["tuple"][0].clear()
        assert state.obstacle(noted) == ""
        noted.put_back()
        assert noted.batch is batch
        assert [*batch] == ["x", "y", "pair", "tuple"]
        assert batch["x"] is x
        assert batch["y"] is y
        assert batch["pair"] == Pair(x, y, [1])
        assert batch["tuple"][0][0] is x


def test_a_batch_changed_in_place_is_an_obstacle(state: StepState) -> None:
    batch = [{"image": torch.zeros(2)} for _ in range(300)]
    noted = state.note(None, batch)
    batch[0]["image"].mul_(2)
    assert "it changed its batch in place" in state.obstacle(noted)


def test_of_a_long_list_only_the_length_is_noted(model: Model, state: StepState) -> None:
    model.outputs = [0] * 20_000
    noted = state.note(None, None)
    model.outputs.append(1)
    assert state.obstacle(noted) == ""
    noted.put_back()
    assert len(model.outputs) == 20_000
    model.outputs.pop()
    assert "`self.outputs`" in state.obstacle(noted)


def test_outputs_that_grow_over_an_epoch_do_not_have_all_listed_again(
    model: Model, state: StepState, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(state)
    monkeypatch.setattr(state, "_list", pytest.fail)
    for _ in range(2):
        noted = state.note(None, None)
        model.outputs.append({"loss": torch.ones(1)})
        model.steps += 1
    noted = state.note(None, None)
    model.outputs[1]["loss"] = None
    noted.put_back()
    assert model.outputs[1]["loss"] == 1


def test_entries_of_long_containers_are_not_walked(model: Model) -> None:
    model.samples = [{"x": torch.zeros(1)} for _ in range(300)]
    model.more = [torch.zeros(1) for _ in range(300)]
    state = StepState(trainer_stub(), model)
    noted = state.note(None, None)
    assert len(noted.cells) < 50
    model.more[-1] += 1
    model.samples.pop()
    assert state.obstacle(noted) == ""
    noted.put_back()
    assert model.more[-1] == 0
    assert len(model.samples) == 300


# -- random numbers


def test_random_states_are_put_back_where_they_were_noted(state: StepState) -> None:
    noted = state.note(None, None)
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    noted.put_back()
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn
    assert not noted.unknown_draws()


def test_random_states_are_noted_only_if_steps_draw_from_them(state: StepState) -> None:
    settled(state)
    noted, before = state.note(None, None), random_states()
    assert len(noted.unknown_draws()) == 3
    assert random_states() == before
    np.random.rand()
    assert random_states() != before
    for _ in range(4):
        noted = state.note(None, None)
        random.random()
        torch.rand(1)
        state.watch()
    assert state.note(None, None).unknown_draws() == ["numpy"]


# -- Lightning


class Logs(pl.LightningModule):
    """Notes before each step, does it twice, and logs once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.accuracy = torchmetrics.MeanMetric()
        self.count, self.again, self.logged = 0, True, []

    def on_train_start(self) -> None:
        self.state = StepState(self.trainer, self)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self._once(batch)
        if self.again:
            noted = self.noted
            assert self.state.obstacle(noted) == ""
            noted.put_back()
            loss = self._once(batch)
        self.state.watch()
        return loss

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        results = self.trainer.fit_loop.epoch_loop._results
        object.__setattr__(self, "noted", None)
        object.__setattr__(self, "noted", self.state.note(results, batch))

    def _once(self, batch: torch.Tensor) -> torch.Tensor:
        self.trainer.fit_loop.epoch_loop._results.batch = batch
        self._current_fx_name = self.trainer._logger_connector._current_fx = "training_step"
        self.count += 1
        loss = self.net(nn.functional.dropout(batch)).square().mean()
        self.accuracy(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_step_done_twice_is_one_step_to_a_trainer(tmp_path: object) -> None:
    ends = []
    for again in (False, True):
        pl.seed_everything(1, verbose=False)
        model = Logs()
        model.again = again
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(model, DataLoader(torch.rand(12, 3), batch_size=4))
        ends.append(
            (model.net.weight.tolist(), model.count, {k: v.item() for k, v in trainer.callback_metrics.items()})
        )
    assert ends[0] == ends[1]
    assert ends[0][1] == 6
