"""A step that runs out of memory is done again in parts of its batch: the same step, or not at all."""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics
from pytorch_lightning.loops.optimization import automatic
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memguard import MemGuard, MemGuardError
from lightning_memguard.training.rescue import again, parts
from lightning_memguard.training.rescue.memory import ran_out_of_memory
from lightning_memguard.training.rescue.reductions import AllReduce
from lightning_memguard.training.rescue.rescuer import Rescuer
from lightning_memguard.units import MIB
from tests.training.rescue.test_cut import Fields

BATCH = 6
NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."
needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes since Python 3.11")


def samples_of(x: torch.Tensor) -> int:
    """How many samples a part really has: to the step it seems to be the whole batch."""
    with torch._C.DisableTorchFunction():
        return int(x.shape[0])


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError(NO_MEMORY)


Loss = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


class Net(pl.LightningModule):
    """Runs out of memory in batches of more than ``most`` samples; ``fails`` says where.

    ``loss`` is a function of the module, of what the layers return and of the classes.
    """

    def __init__(
        self, most: int = 99, fails: str = "forward", loss: Loss | None = None, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), norm or nn.GELU(), nn.Linear(32, 4))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.most, self.fails, self.process = most, fails, os.getpid()  # copies in children never fail
        self.of_loss, self.plants, self.handle = loss, False, None
        self.steps, self.outs, self.average, self.counts = 0, [], 0.0, {"steps": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = self.read(batch)
        self.plants = self.is_too_large(x)
        if self.plants and self.fails == "forward":
            out_of_memory()
        out = self.net(x)
        if self.plants and self.fails == "end":
            out_of_memory()
        loss = self.of_loss(self, out, y) if self.of_loss else F.cross_entropy(out, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("highest", out.max(), on_epoch=True, reduce_fx="max")
        self.accuracy(out, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def read(self, batch: Any) -> Any:
        return batch

    def is_too_large(self, x: torch.Tensor) -> bool:
        return samples_of(x) > self.most and os.getpid() == self.process

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Fail once the gradient of a parameter is there, or is about to be: the last layer's first."""
        if self.plants and self.fails == "mid backward":
            self.handle = self.net[0].weight.register_hook(out_of_memory)
        elif self.plants and "gradient" in self.fails:
            weight = self.net[2 if self.fails == "first gradient" else 0].weight
            self.handle = weight.register_post_accumulate_grad_hook(out_of_memory)
        try:
            super().backward(loss, *args, **kwargs)
        finally:
            if self.handle is not None:
                self.handle.remove()
                self.handle = None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Rescue(pl.Callback):
    """The rescue alone, without a prediction: what it announces, and how many steps it did."""

    def __init__(self, *, lenient: bool = False) -> None:
        self.lenient, self.said, self.rescued, self.failed, self.refused = lenient, [], 0, 0, ""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.rescuer = Rescuer(trainer, module, self.said.append, lenient=self.lenient)
        self.rescuer.install()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        policy = self.rescuer.policy
        self.rescued, self.failed = len(policy.steps), len(policy.failures)
        self.rescuer.close()

    def on_exception(self, *_: Any) -> None:
        self.refused = self.rescuer.refused
        self.rescuer.close()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if not trainer.training and not trainer.sanity_checking:
            self.on_train_start(trainer, module)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.training and not trainer.sanity_checking:
            self.rescuer.close()


def data(batches: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batches * BATCH, 16, generator=generator)
    y = torch.randint(0, 4, (batches * BATCH,), generator=generator)
    return DataLoader(TensorDataset(x, y), BATCH)


@dataclass
class Trained:
    """Results that a training leaves behind."""

    weights: torch.Tensor
    logged: dict[str, float]
    optimizer: list[torch.Tensor]
    drawn: torch.Tensor
    module: Any
    trainer: Any


def fit(trainer: Any, module: Any, *callbacks: Any, loader: Any = None, **settings: Any) -> Trained:
    made = trainer(*callbacks, **settings)
    made.fit(module, loader or data())
    logged = {name: float(value) for name, value in made.callback_metrics.items() if "memguard" not in name}
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    states = [value for state in made.optimizers[0].state.values() for value in state.values()]
    return Trained(weights, logged, [each for each in states if each is not None], torch.rand(3), module, made)


def seeded(kind: Any, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return kind(*args, **kwargs)


def check(trainer: Any, make: Callable[[int], Any], most: int = 2, loader: Any = None, **settings: Any) -> Trained:
    """A training whose batches all fail is the one whose batches are whole."""
    expected = fit(trainer, seeded(make, 99), loader=loader, **settings)
    rescue = Rescue()
    found = fit(trainer, seeded(make, most), rescue, loader=loader, **settings)
    assert rescue.rescued == len(found.trainer.train_dataloader)
    close = {"rtol": 0, "atol": 1e-12 if found.weights.dtype == torch.float64 else 1e-6}
    if "bf16" in str(settings.get("precision")):
        close["atol"] = 5e-3
    torch.testing.assert_close(found.weights, expected.weights, **close)
    torch.testing.assert_close(found.optimizer, expected.optimizer, rtol=0, atol=close["atol"] * 10)
    assert found.logged == pytest.approx(expected.logged, rel=1e-2 if close["atol"] > 1e-3 else 1e-5)
    assert torch.equal(found.drawn, expected.drawn)
    return found


def refusal(trainer: Any, module: Any, loader: Any = None, **settings: Any) -> str:
    """Why a step is not done in parts; the error of the whole batch is raised, and no gradient is left."""
    rescue = Rescue()
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        fit(trainer, module, rescue, loader=loader, **settings)
    assert all(parameter.grad is None for parameter in module.parameters())
    return rescue.refused


# -- the same training


@pytest.mark.parametrize(
    ("most", "fails", "settings"),
    [
        (3, "forward", {}),
        (2, "forward", {}),
        (1, "mid backward", {}),
        (3, "end", {}),
        (2, "mid backward", {}),
        (3, "first gradient", {}),
        (2, "last gradient", {}),
        (2, "mid backward", {"accumulate_grad_batches": 3}),
        (2, "last gradient", {"accumulate_grad_batches": 2}),
        (1, "first gradient", {"accumulate_grad_batches": 4}),
        (2, "forward", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (2, "forward", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (2, "mid backward", {"precision": "bf16-mixed"}),
        (2, "mid backward", {"precision": "64-true"}),
    ],
)
def test_weights_and_logged_values_are_those_of_whole_batches(
    trainer: Any, most: int, fails: str, settings: dict[str, Any]
) -> None:
    """Every batch of six fails; and so do its parts of three where at most two fit."""
    check(trainer, lambda limit: Net(limit, fails), most, **settings)


def weighted(module: Any, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A sum of means over different numbers of elements."""
    return F.cross_entropy(out, y) + out[y > 1].square().mean() + 1e-3 * module.net[0].weight.square().sum()


def counting(module: Any, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    module.steps += 1
    module.counts["steps"] += 1
    module.average = 0.9 * module.average + 0.1 * float(out.mean())
    module.last = len(out)
    return F.cross_entropy(out, y) * (0.5 + module.average) / module.steps


def keeping(module: Any, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(out, y)
    module.outs.append({"out": out.detach(), "y": y, "loss": loss.detach()})
    module.last = out.detach()
    return loss


def logging(module: Any, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(out, y)
    module.log("perplexity", loss.exp())
    module.log("norm", out.norm(), on_epoch=True, on_step=False)
    module.log_dict({"std": out.std(), "rmse": F.mse_loss(out, out * 2).sqrt(), "n": float(len(out))})
    module.log("hits", (out.argmax(-1) == y).sum().float(), reduce_fx="sum", on_epoch=True, batch_size=len(out))
    return loss


def with_slow_term(module: Any, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A term that is there from the second step on, and a branch on the value of the loss."""
    loss = F.cross_entropy(out, y)
    if module.global_step > 0:
        loss = loss + 0.1 * out.var(0).sqrt().mean() - 0.1 * out.softmax(-1).mean(0).clamp(min=1e-6).log().mean()
    return loss * 2 if loss.item() > 1.3 else loss


LOSSES: dict[str, Loss] = {
    "a sum over the batch's size": lambda _, out, y: F.cross_entropy(out, y, reduction="sum") / len(out),
    "means over different numbers of elements": weighted,
    "counters and averages in attributes": counting,
    "results in a list": keeping,
    "logged norm, std, rmse, sum": logging,
    "a term after a warm-up and a branch": with_slow_term,
    "a mask's sum that is clamped": lambda _, out, y: (
        (F.cross_entropy(out, y, reduction="none") * (y == 3)).sum() / (y == 3).sum().clamp(min=1)
    ),
    "random numbers": lambda _, out, y: F.cross_entropy(out + 0.1 * torch.randn_like(out), y) * torch.rand(1).item(),
    "the sum of a loss and its norm": lambda _, out, y: F.cross_entropy(out, y) + 0.1 * out.norm(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_steps_of_many_kinds_are_the_same_in_parts(trainer: Any, loss: Loss) -> None:
    check(trainer, lambda most: Net(most, loss=loss), max_epochs=2)


@pytest.mark.parametrize(
    "norm", [lambda: nn.Dropout(0.5), lambda: nn.LayerNorm(32), lambda: nn.Sequential(nn.Dropout(0.2), nn.ReLU())]
)
@pytest.mark.parametrize("most", [3, 1])
def test_dropout_draws_the_masks_of_the_whole_batch(trainer: Any, norm: Any, most: int) -> None:
    check(trainer, lambda limit: Net(limit, "mid backward", norm=norm()), most)


def test_a_step_that_draws_though_earlier_ones_did_not_is_refused(trainer: Any) -> None:
    """Before the third step the state of random numbers is not noted; before the fourth it is."""

    def drawing_from(step: int) -> Loss:
        def loss(module: Any, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            is_late = module.global_step + 1 >= step
            return F.cross_entropy(out + 0.1 * torch.randn_like(out) if is_late else out, y)

        return loss

    class Late(Net):
        def is_too_large(self, x: torch.Tensor) -> bool:
            return self.global_step == 2 and super().is_too_large(x)

    rescue = Rescue()
    with pytest.raises(torch.OutOfMemoryError):
        fit(trainer, Late(3, loss=drawing_from(3)), rescue, max_epochs=2)
    assert "draws random numbers, whose states before are not known" in rescue.refused
    check(trainer, lambda most: Late(most, loss=drawing_from(2)), max_epochs=2)


def test_attributes_are_those_of_whole_batches(trainer: Any) -> None:
    """Each step counts once; what single samples left in a list is joined; a size is the whole batch's."""
    counted = check(trainer, lambda most: Net(most, loss=counting)).module
    assert (counted.steps, counted.counts, counted.last) == (4, {"steps": 4}, BATCH)
    kept = check(trainer, lambda most: Net(most, loss=keeping)).module
    assert [each["out"].shape for each in kept.outs] == [(BATCH, 4)] * 4
    assert torch.equal(torch.cat([each["y"] for each in kept.outs]), data().dataset.tensors[1])  # type: ignore[attr-defined]
    assert kept.last.shape == (BATCH, 4)


def test_sizes_that_a_step_keeps_are_plain_numbers_after_it(trainer: Any) -> None:
    module = fit(trainer, Net(3, loss=counting), Rescue()).module
    assert type(module.last) is int
    assert {BATCH: "found"}.get(module.last)


def test_what_a_hook_before_the_backward_pass_counts_is_kept(trainer: Any) -> None:
    class Before(Net):
        def on_before_backward(self, loss: torch.Tensor) -> None:
            self.steps += 1

    assert fit(trainer, Before(3), Rescue()).module.steps == 4


def test_what_a_hook_after_the_backward_pass_counts_is_kept(trainer: Any) -> None:
    class After(Net):
        def on_after_backward(self) -> None:
            self.steps += 1

    assert fit(trainer, After(3), Rescue()).module.steps == 4


def test_what_a_step_returns_besides_its_loss_is_joined(trainer: Any) -> None:
    class Returning(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "x": batch[0], "mean": batch[0].mean(), "size": len(batch[0]), "text": "as is"}

    class Outputs(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
            assert torch.equal(outputs["x"], batch[0])
            assert outputs["mean"] == pytest.approx(float(batch[0].mean()))
            assert (outputs["size"], type(outputs["size"]), outputs["text"]) == (BATCH, int, "as is")
            module.seen = True

    assert fit(trainer, Returning(2), Rescue(), Outputs()).module.seen


class Counting(pl.Callback):
    """How often each hook of a step is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_before_zero_grad(self, *_: Any) -> None:
        self.calls.append("zero_grad")

    def on_before_backward(self, *_: Any) -> None:
        self.calls.append("before backward")

    def on_after_backward(self, *_: Any) -> None:
        self.calls.append("after backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.calls.append("optimizer")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.calls.append("end")
        assert outputs["loss"].dim() == 0


@pytest.mark.parametrize("fails", ["forward", "mid backward"])
def test_hooks_around_a_step_are_called_once(trainer: Any, fails: str) -> None:
    whole, rescued = Counting(), Counting()
    fit(trainer, seeded(Net), whole, accumulate_grad_batches=2)
    fit(trainer, seeded(Net, 2, fails), rescued, Rescue(), accumulate_grad_batches=2)
    assert sorted(rescued.calls) == sorted(whole.calls)


def test_gradients_scaled_by_nothing_would_make_another_training(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above: they would see it."""
    monkeypatch.setattr(AllReduce, "backward", staticmethod(lambda ctx, grad: (grad, None, None, None, None)))
    with pytest.raises(AssertionError, match="not close"):
        check(trainer, Net)


def test_gradients_that_a_failed_attempt_left_would_count_twice(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another control: later in an accumulation, parameters that have their gradient must keep it."""
    monkeypatch.setattr(again.Gradients, "written", lambda _: set())
    with pytest.raises(AssertionError, match="not close"):
        check(trainer, lambda most: Net(most, "last gradient"), accumulate_grad_batches=4)


# -- forms of batches


Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024 - users have them


def popped(batch: dict[str, torch.Tensor]) -> Any:
    y = batch.pop("y")
    return batch["x"], y


FORMS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "tuple": (lambda x, y: (x, y), lambda batch: batch),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda batch: (batch["x"], batch["y"])),
    "dict that is emptied": (lambda x, y: {"x": x, "y": y}, popped),
    "nested": (lambda x, y: {"inputs": [{"x": x}], "y": (y,)}, lambda b: (b["inputs"][0]["x"], b["y"][0])),
    "named tuple": (Pair, lambda batch: (batch.x, batch.y)),
    "dataclass": (Fields, lambda batch: (batch.x, batch.y)),
    "with a size": (lambda x, y: (x, y, len(x)), lambda batch: (batch[0] * batch[2] / 6, batch[1])),
    "with a shared matrix of as many rows": (
        lambda x, y: {"x": x, "y": y, "matrix": torch.arange(36.0).view(6, 6) / 36},
        lambda b: (torch.cat([x := b["x"], x[:, :6] @ b["matrix"]], 1)[:, 6:], b["y"]),
    ),
    "with names": (lambda x, y: (x, y, [f"text {n}" for n in range(len(x))]), lambda batch: batch[:2]),
}


class Former(Net):
    def __init__(self, most: int, form: str) -> None:
        super().__init__(most)
        self.form = FORMS[form][1]

    def read(self, batch: Any) -> Any:
        return self.form(batch)


@pytest.mark.parametrize("form", FORMS)
def test_batches_of_many_forms_are_cut_by_sample(trainer: Any, form: str) -> None:
    def collate(samples: list[Any]) -> Any:
        return FORMS[form][0](torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))

    loader = DataLoader(data(2).dataset, BATCH, collate_fn=collate)
    check(trainer, lambda most: Former(most, form), loader=loader)


# -- texts, whose tokens count


class Padded(Net):
    """Predicts each of a text's tokens; what is padded or masked is left out of the mean, in one of several ways."""

    def __init__(self, most: int, how: str) -> None:
        super().__init__(most)
        self.how = how
        self.net = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, _ = batch
        if self.is_too_large(tokens):
            out_of_memory()
        loss = self.mean(self.net(tokens), tokens)
        self.log("loss", loss, on_epoch=True)
        return {"loss": loss, "again": loss.detach()}

    def mean(self, out: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.how == "ignored":
            return F.cross_entropy(out.mT, tokens, ignore_index=0)
        losses, mask = F.cross_entropy(out.mT, tokens, reduction="none"), tokens != 0
        if self.how == "divided":
            return (losses * mask).sum() / mask.sum()
        return losses[mask].mean() + (out.square().mean() if self.how == "two" else 0)


@pytest.mark.parametrize("how", ["ignored", "divided", "selected", "two"])
@pytest.mark.parametrize("most", [3, 2])
def test_tokens_count_as_in_the_whole_batch(trainer: Any, how: str, most: int) -> None:
    """Texts are of different lengths, and the first three of the second batch have no token at all."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, 20, (4 * BATCH, 7), generator=generator)
    lengths = torch.randint(1, 8, (4 * BATCH,), generator=generator)
    lengths[BATCH : BATCH + 3] = 0
    tokens[torch.arange(7) >= lengths[:, None]] = 0
    check(trainer, lambda limit: Padded(limit, how), most, loader=DataLoader(TensorDataset(tokens, lengths), BATCH))


# -- refused


def reverse(out: torch.Tensor) -> torch.Tensor:
    return out.flip(0)


class Writing(Net):
    def read(self, batch: Any) -> Any:
        batch[0].mul_(2)
        return batch


class Manual(Net):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        return loss


class Searching(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class Hooked(Net):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net[0].weight.register_hook(lambda grad: grad.clamp(-1, 1))


class Iterating(Net):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "contrastive": (
        lambda: Net(3, loss=lambda _, out, y: F.cross_entropy(out @ out.T, torch.arange(len(out)))),
        "mm mixes samples (test_rescuer.py:",
    ),
    "another sample": (lambda: Net(3, loss=lambda _, out, y: (out - reverse(out)).square().mean()), "`return out.flip"),
    "a small term": (lambda: Net(3, loss=lambda _, out, y: out.mean() + 1e-6 * out.sort(0).values[0, 0]), "sort mixes"),
    "batch norm": (lambda: Net(3, norm=nn.BatchNorm1d(32)), "batch norm in training mode normalizes by the statistics"),
    "single samples": (lambda: Net(3, loss=lambda _, out, y: out.mean() * max(out[:, 0].tolist())), "tolist reads"),
    "a hook": (lambda: Hooked(3), "a hook works on the gradient of `net.0.weight`"),
    "manual optimization": (lambda: Manual(3), "calls the optimizers itself"),
    "LBFGS": (lambda: Searching(3), "LBFGS takes several passes a step"),
    "a batch that is written to": (lambda: Writing(3), "it changed its batch in place before it failed"),
    "one sample": (lambda: Net(0), "one sample may fit, but not the forward pass of two"),
}


@pytest.mark.parametrize(("module", "why"), REFUSED.values(), ids=REFUSED)
def test_what_would_not_be_the_same_step_raises_with_the_reason(trainer: Any, module: Any, why: str) -> None:
    assert why in refusal(trainer, module())


def test_a_batch_of_one_sample_is_not_done_in_parts(trainer: Any) -> None:
    assert "its batch is a single sample" in refusal(trainer, Net(0), DataLoader(data().dataset, 1))


def test_state_is_as_before_where_a_step_is_refused(trainer: Any) -> None:
    """Also what the parts did before they met what mixes samples."""

    def loss(module: Any, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        module.steps += 1
        module.outs.append(1)
        return out.flip(0).mean()

    module = Net(3, loss=loss)
    before = torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).clone()
    refusal(trainer, module)
    assert (module.steps, module.outs) == (0, [])
    assert torch.equal(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]), before)
    assert not module.accuracy.tp


def test_asked_for_by_name_batch_norm_goes_on_and_says_what_changes(trainer: Any) -> None:
    rescue = Rescue(lenient=True)
    fit(trainer, Net(4, norm=nn.BatchNorm1d(32)), rescue, loader=DataLoader(data().dataset, 7))
    assert rescue.rescued == 3
    (said,) = rescue.said
    assert "not the same step (batch norm normalizes each part by its own statistics)" in said


def test_asked_for_by_name_batch_norm_goes_on_in_even_parts(trainer: Any) -> None:
    rescue = Rescue(lenient=True)
    fit(trainer, Net(4, norm=nn.BatchNorm1d(32)), rescue, loader=DataLoader(data().dataset, 8))
    assert rescue.rescued == 3


def test_asked_for_by_name_what_is_unknown_is_refused_all_the_same(trainer: Any) -> None:
    rescue = Rescue(lenient=True)
    with pytest.raises(torch.OutOfMemoryError):
        fit(trainer, REFUSED["contrastive"][0](), rescue)
    assert "mm mixes samples" in rescue.refused


# -- back to whole batches


class Once(Net):
    """Fails as a whole in the steps of some places only."""

    def __init__(self, *places: int) -> None:
        super().__init__(3)
        self.places = places

    def is_too_large(self, x: torch.Tensor) -> bool:
        self.samples = samples_of(x)
        return self.samples > 3 and self.trainer.fit_loop.epoch_loop.batch_idx in self.places


class Sizes(pl.Callback):
    """How many samples the first backward pass of each step has."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_before_backward(self, trainer: Any, module: Any, *_: Any) -> None:
        self.sizes.append(module.samples)


def test_after_sixteen_steps_in_parts_a_whole_batch_is_tried_again(trainer: Any) -> None:
    rescue, seen = Rescue(), Sizes()
    fit(trainer, Once(1), rescue, seen, loader=data(20))
    assert seen.sizes == [6, *[3] * 17, 6, 6]
    assert (rescue.rescued, rescue.failed) == (17, 1)
    assert len(rescue.said) == 1


def test_a_trial_that_fails_is_done_in_parts_and_counted(trainer: Any) -> None:
    rescue, seen = Rescue(), Sizes()
    fit(trainer, Once(1, 18), rescue, seen, loader=data(20))
    assert seen.sizes == [6, *[3] * 19]
    assert (rescue.rescued, rescue.failed) == (19, 2)


# -- never worse than without


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (parts.Passes, "learn"),
        (parts.Passes, "run"),
        (parts, "join"),
        (again.TrainingStep, "obstacle"),
        (again.TrainingStep, "finished"),
        (again, "cuts_for"),
        (again, "free"),
        (again.Noted, "put_back"),
    ],
)
def test_an_error_of_our_own_never_replaces_the_users(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("ours")

    monkeypatch.setattr(where, name, broken)
    rescue, module = Rescue(), Net(3, loss=keeping)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        fit(trainer, module, rescue)
    assert "KeyError: 'ours'" in rescue.refused


def test_an_error_of_our_own_before_a_step_is_said_once_and_training_goes_on(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("ours")

    expected = fit(trainer, seeded(Net))
    monkeypatch.setattr(again.StepState, "note", broken)
    rescue = Rescue()
    found = fit(trainer, seeded(Net), rescue)
    assert torch.equal(found.weights, expected.weights)
    (said,) = rescue.said
    assert "will not do steps that run out of memory again in parts: KeyError: 'ours'" in said


class Renamed(automatic.Closure):
    """As a later Lightning may have it, with another name for what clears the gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clear = vars(self).pop("_zero_grad_fn")

    def closure(self, *_: Any, **__: Any) -> Any:
        output = self._step_fn()
        if self._clear is not None:
            self._clear()
        if self._backward_fn is not None:
            self._backward_fn(output.closure_loss)
        return output


def test_where_lightning_renames_what_clears_gradients_training_goes_on(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fit(trainer, seeded(Net))
    monkeypatch.setattr(automatic, "Closure", Renamed)
    rescue = Rescue()
    found = fit(trainer, seeded(Net), rescue)
    assert torch.equal(found.weights, expected.weights)
    (said,) = rescue.said
    assert "_zero_grad_fn" in said
    with pytest.raises(torch.OutOfMemoryError):
        fit(trainer, Net(3), Rescue())


def test_where_lightning_renames_what_makes_closures_training_goes_on(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = automatic._AutomaticOptimization
    source = textwrap.dedent(inspect.getsource(loop.run)).replace("_make_closure", "_closure_of")
    names = vars(automatic).copy()
    exec("from __future__ import annotations\n" + source, names)
    monkeypatch.setattr(loop, "_closure_of", loop._make_closure, raising=False)
    monkeypatch.setattr(loop, "run", names["run"])
    monkeypatch.delattr(loop, "_make_closure")
    rescue = Rescue()
    fit(trainer, Net(), rescue)
    (said,) = rescue.said
    assert "_make_closure" in said


def test_other_errors_are_left_alone(trainer: Any) -> None:
    class Broken(Net):
        def read(self, batch: Any) -> Any:
            if self.trainer.fit_loop.epoch_loop.batch_idx == 2:
                raise RuntimeError("not of memory")
            return batch

    with pytest.raises(RuntimeError, match="not of memory"):
        fit(trainer, Broken(), Rescue())


def test_a_part_that_raises_another_error_raises_that_of_memory(trainer: Any) -> None:
    def loss(_: Any, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise ValueError("of the user's")

    assert "raises ValueError: of the user's (test_rescuer.py:" in refusal(trainer, Net(3, loss=loss))


def test_the_trainer_is_left_as_it_was(trainer: Any) -> None:
    found = fit(trainer, Net(3), Rescue())
    assert "_make_closure" not in vars(found.trainer.fit_loop.epoch_loop.automatic_optimization)
    assert not {"validation_step", "test_step"} & vars(found.trainer.strategy).keys()
    assert not found.module._forward_pre_hooks
    assert len.__module__ == "builtins"


# -- with a prediction


def test_a_run_counts_and_announces_what_it_rescues(trainer: Any) -> None:
    guard = MemGuard(max_batch_size=BATCH)
    with pytest.warns(UserWarning, match=r"training batch of 6 samples ran out .* at most 3 samples, with") as told:
        fit(trainer, Net(3), guard, max_epochs=2)
    assert [(record.batch_size, record.rescued, record.out_of_memory) for record in guard.records] == [
        (6, 4, 1),
        (6, 4, 0),
    ]
    assert guard.records[0].as_metrics()["memguard/rescued_steps"] == 4
    assert len([each for each in told if "ran out of memory" in str(each.message)]) == 1


@needs_notes
def test_the_note_says_why_a_step_was_refused(trainer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            fit(trainer, REFUSED["contrastive"][0](), MemGuard(max_batch_size=BATCH))
    (note,) = caught.value.__notes__
    assert "MemGuard predicted a peak" in note
    assert "The step was not done again in parts of its batch: mm mixes samples (test_rescuer.py:" in note


def test_asked_for_by_name_a_warning_says_what_changes(trainer: Any) -> None:
    guard = MemGuard(max_batch_size=7, on_oom="split")
    with pytest.warns(UserWarning, match=r'not the same step \(batch norm .*\): on_oom="split" asks for it'):
        fit(trainer, Net(4, norm=nn.BatchNorm1d(32)), guard, loader=DataLoader(data().dataset, 7))
    assert guard.records[0].rescued == 3


@pytest.mark.parametrize("settings", [{"on_oom": "raise"}, {"mode": "check", "on_oom": "split"}])
def test_a_run_that_was_not_to_be_rescued_is_not_guarded(trainer: Any, settings: dict[str, Any]) -> None:
    class Loop(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
            assert "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)

    with pytest.raises(torch.OutOfMemoryError):
        fit(trainer, Net(3), MemGuard(max_batch_size=BATCH, **settings), Loop())


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(MemGuardError, match="on_oom='ignore' is unknown"):
        MemGuard(on_oom="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, expected: bool) -> None:
    assert ran_out_of_memory(error) == expected


class Tokens(pl.LightningModule):
    """Embeds and averages; what a step takes grows with the longest of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 32), nn.Linear(32, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.head(self.embedding(batch).mean(1)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Growing(IterableDataset[torch.Tensor]):
    """A stream whose last texts are longer than all that a guard looks at."""

    def __iter__(self) -> Any:
        lengths = [10] * 5000 + [400] * 300
        return (torch.arange(length) % 100 for length in lengths)


def test_a_batch_announced_as_too_large_is_run_in_parts(trainer: Any) -> None:
    """100 texts of 400 tokens are predicted to take 10 MiB in the forward and the backward pass."""
    guard = MemGuard(budget=4 * MIB, margin=0.0, max_batch_size=100)
    pad = nn.utils.rnn.pad_sequence
    with pytest.warns(UserWarning, match=r"Training batch 50 has \[100, 400\].*It runs \d+ samples at a time"):
        trainer(guard).fit(Tokens(), DataLoader(Growing(), 100, collate_fn=lambda each: pad(each, batch_first=True)))
    assert (guard.records[0].rescued, guard.records[0].out_of_memory) == (3, 0)


# -- validation and test


class Evaluated(Net):
    """Evaluates batches of more than ``most`` samples into an error; ``logs`` and ``returns`` say what of."""

    def __init__(self, most: int = 99, logs: Any = None, returns: Any = None) -> None:
        super().__init__()
        self.limit = most
        self.logs, self.returns = logs or F.cross_entropy, returns
        self.evaluated = torchmetrics.Accuracy("multiclass", num_classes=4)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        self.evaluated.update(out, y)
        self.log("value", self.logs(out, y))
        self.log("evaluated", self.evaluated)
        if samples_of(x) > self.limit and os.getpid() == self.process:
            out_of_memory()
        return self.returns(out) if self.returns else None

    test_step = validation_step


# Lightning's default for validation, which runs after the sanity check of each fit.
INFERENCE = pytest.param(3, {})


class Outputs(pl.Callback):
    """Keeps what evaluation returns."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append(outputs)


@pytest.mark.parametrize(
    ("logs", "returns"),
    [
        (None, None),
        (None, lambda out: {"rows": out, "sum": out.sum(), "norm": torch.linalg.norm(out), "n": len(out)}),
        (lambda out, _: torch.linalg.norm(out), None),
        (lambda out, y: F.mse_loss(out, F.one_hot(y, 4).float()).sqrt() + out.std(), lambda out: out.argmax(-1)),
    ],
    ids=["nothing", "rows", "norm", "rmse"],
)
@pytest.mark.parametrize(("most", "settings"), [(2, {"inference_mode": False}), INFERENCE])
def test_an_evaluation_in_parts_logs_and_returns_what_it_does_as_a_whole(
    trainer: Any, logs: Any, returns: Any, most: int, settings: dict[str, Any]
) -> None:
    results = []
    for limit in (99, most):
        module, seen, rescue = seeded(Evaluated, limit, logs, returns), Outputs(), Rescue()
        made = trainer(seen, rescue, limit_val_batches=1.0, **settings)
        (logged,) = made.validate(module, data(), verbose=False)
        results.append((logged, seen.outputs))
        assert "validation_step" not in vars(made.strategy)
    (whole, outputs), (in_parts, joined) = results
    (said,) = rescue.said
    assert (
        f"validation or test batch of 6 samples ran out of memory. It was run again in parts of at most {most}" in said
    )
    assert in_parts == pytest.approx(whole)
    assert len(joined) == len(outputs) == 4
    torch.testing.assert_close(joined, outputs)


def test_the_validation_of_a_fit_and_a_test_are_rescued(trainer: Any) -> None:
    module = seeded(Evaluated, 3)
    guard = MemGuard(max_batch_size=BATCH)
    settings: dict[str, Any] = {"limit_val_batches": 1.0, "inference_mode": False}
    made = trainer(guard, num_sanity_val_steps=1, **settings)
    with pytest.warns(UserWarning, match="validation or test batch of 6 samples .* at most 3 samples"):
        made.fit(module, data(), data())
    whole = trainer(**settings)
    whole.fit(seeded(Evaluated), data(), data())
    assert made.callback_metrics["value"] == pytest.approx(float(whole.callback_metrics["value"]))
    (tested,) = made.test(module, data(), verbose=False)
    (other,) = whole.test(whole.lightning_module, data(), verbose=False)
    assert tested == pytest.approx(other)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda: Evaluated(3, logs=lambda out, _: out.flip(0).mean()), "flip mixes samples (test_rescuer.py:"),
        (lambda: Evaluated(0), "not the forward pass of two"),
        (lambda: Evaluated(3, returns=lambda out: out.tolist()), "tolist reads values of single samples"),
    ],
    ids=["mixes", "one sample", "values"],
)
def test_an_evaluation_that_cannot_be_joined_raises_with_the_reason(trainer: Any, module: Any, why: str) -> None:
    rescue = Rescue()
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        trainer(rescue, limit_val_batches=1.0, inference_mode=False).validate(module(), data(), verbose=False)
    assert why in rescue.refused
