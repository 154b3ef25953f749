"""Small training programs, a row each, that do in a step what people do: normalizers, state, hooks, forms of batches.

A program is a function of the module and of fields of the batch, by their names (`FIELDS`), or of `batch`, the whole
batch, and of `i`, its index. It returns what `training_step` returns. `programs` registers it, as a decorator or with
lambdas, along with a net, further state, a form of the batch, an optimizer, or settings of the Trainer.
"""

from __future__ import annotations

import collections
import inspect
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader

STEPS, BATCH, TOKENS, WORDS, CLASSES = 8, 8, 7, 12, 3
LENGTHS = ([7, 7, 7, 7, 2, 1, 3, 1], [1, 2, 1, 7, 5, 7, 3, 1], [7] * 8, [3, 1, 6, 2, 7, 7, 1, 4])
GAPS = ([7, 7, 7, 7, 1, 2, 0, 0], [0, 0, 0, 0, 5, 7, 3, 1], [0, 0, 3, 0, 7, 7, 0, 1], [2, 0, 0, 0, 0, 0, 0, 0])
POSITIVE = ([1, 1, 0, 1, 0, 0, 0, 0], [0] * 8, [0, 0, 0, 0, 1, 0, 1, 1], [0, 1, 0, 0, 0, 0, 0, 0])


def wants(step: Callable[..., Any]) -> list[str]:
    """The names of a step's positional arguments."""
    parameters = inspect.signature(step).parameters.values()
    return [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]


@dataclass(frozen=True)
class Program:
    """A training of a small module; see `programs`."""

    name: str
    step: Callable[..., Any]
    net: Callable[[], nn.Module]
    make: Callable[[Any], None] | None = None  # adds to the module
    form: Callable[[dict[str, Any]], Any] | None = None  # of the batch
    uses: str = ""  # fields of the batch, where the step has `batch`
    adam: bool = False
    settings: dict[str, Any] = field(default_factory=dict)  # of the Trainer
    precisions: tuple[str, ...] = ("32-true", "64-true")
    end: Callable[[Any], None] | None = None  # of an epoch
    hooks: dict[str, Callable[..., Any]] = field(default_factory=dict)  # methods of the module

    seed = 0

    @property
    def fields(self) -> list[str]:
        """The fields of the batch that it uses."""
        return self.uses.split() or [name for name in wants(self.step) if name in FIELDS]

    def training(self, steps: int) -> tuple[pl.LightningModule, DataLoader]:
        """Build the module, and the batches of so many steps of its optimizer."""
        data = DATA[: steps * BATCH * self.settings.get("accumulate_grad_batches", 1)]
        return type("Module", (Module,), dict(self.hooks))(self), DataLoader(data, BATCH, collate_fn=self.collate)

    def collate(self, items: list[dict[str, torch.Tensor]]) -> Any:
        """Build a batch of samples."""
        batch = {name: torch.stack([item[name] for item in items]) for name in self.fields}
        return self.form(batch) if self.form else batch


class Module(pl.LightningModule):
    """A program's net, state, and optimizer."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.net = program, program.net()
        self.wants = wants(program.step)[1:]
        if program.make:
            program.make(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        given = {"batch": batch, "i": batch_idx}
        result = self.program.step(self, *(given[n] if n in given else batch[n] for n in self.wants))
        loss = result["loss"] if isinstance(result, dict) else result
        if loss is not None:
            self.log("loss", loss, on_step=True, on_epoch=True)
        return result

    def on_train_epoch_end(self) -> None:
        if self.program.end:
            self.program.end(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = [p for p in self.parameters() if p.requires_grad]
        if self.program.adam:
            return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.01}]
        return torch.optim.SGD([group for group in groups if group["params"]], lr=0.02, momentum=0.9)


def samples(batches: int) -> list[dict[str, torch.Tensor]]:
    """Draw the samples of a training: the same ones for all programs."""
    drawn, count = torch.Generator().manual_seed(1), batches * BATCH

    def pattern(rows: tuple[list[int], ...]) -> torch.Tensor:
        return torch.tensor([rows[place % len(rows)] for place in range(batches)]).flatten()

    lens, present = pattern(LENGTHS), pattern(GAPS)
    mask, gaps = (torch.arange(TOKENS) < each.unsqueeze(1) for each in (lens, present))
    words = torch.randint(1, WORDS, (count, TOKENS), generator=drawn)
    found = {
        **{name: torch.randn(count, 6, generator=drawn) for name in ("x", "z", "neg")},
        "y": torch.randint(CLASSES, (count,), generator=drawn),
        "w": torch.rand(count, generator=drawn) + 0.1,
        "seq": torch.randn(count, TOKENS, 6, generator=drawn),
        "img": torch.randn(count, 3, 8, 8, generator=drawn),
        "ids": words * mask,
        "tags": torch.randint(CLASSES, (count, TOKENS), generator=drawn).masked_fill(~gaps, -100),
        "mask": mask.float(),
        "gaps": gaps.float(),
        "lens": lens,
        "pos": pattern(POSITIVE).float(),
    }
    return [{name: values[place] for name, values in found.items()} for place in range(count)]


DATA = samples(STEPS * 3)
FIELDS = set(DATA[0])
PROGRAMS: dict[str, Program] = {}


def mlp(inputs: int = 6, outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def programs(**options: Any) -> Callable[..., Any]:
    """Register a function, or the functions given by name, as programs."""

    def register(*decorated: Callable[..., Any], **steps: Callable[..., Any]) -> Any:
        for name, step in (*((step.__name__, step) for step in decorated), *steps.items()):
            assert name not in PROGRAMS, name
            PROGRAMS[name] = Program(name, step, **{"net": mlp, **options})
        return decorated[0] if decorated else None

    return register


# What follows is a table of programs, most of them a row:
# fmt: off


def ce(s: Any, x: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(s.net(x), y, **options)


def each(s: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(s.net(x), y, reduction="none")


def tokens(s: Any, seq: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(s.net(seq).transpose(1, 2), tags, reduction="none")


def entropy(s: Any, seq: torch.Tensor) -> torch.Tensor:  # a loss for each token
    return -s.net(seq).log_softmax(-1)[..., 0]


def masked(s: Any, seq: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
    return (entropy(s, seq) * gaps).sum() / gaps.sum().clamp(min=1)


def contrastive(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.normalize(a, dim=1) @ F.normalize(b, dim=1).T, torch.arange(len(a)))


def kl(out: torch.Tensor) -> torch.Tensor:
    return 0.5 * (out[:, :1] ** 2 + out[:, 1:2].exp() - out[:, 1:2] - 1)


def focal(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(out, y, reduction="none")
    return (1 - (-loss).exp()) ** 2 * loss


def buffer(**values: Any) -> Callable[[Any], None]:
    return lambda s: [s.register_buffer(name, value.clone()) for name, value in values.items()] and None


def attributes(**makers: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda s: [setattr(s, name, maker()) for name, maker in makers.items()] and None


class Plain:
    """State that is not a tensor's."""

    value = 1.0


# -- normalizers, masks, terms that come later, batches changed in place, hooks, hidden state

programs()(
    retinanet_clamp=lambda s, x, y, pos: (focal(s.net(x), y) * (1 + pos)).sum() / pos.sum().clamp(min=1),
    max_one_item=lambda s, x, y, pos: (each(s, x, y) * pos).sum() / max(1, int(pos.sum())),
    max_one_python=lambda s, x, y, pos: (each(s, x, y) * pos).sum() / max(pos.sum(), 1),
    detr_as_tensor=lambda s, x, y, pos: (each(s, x, y) * pos).sum() / torch.as_tensor([float(pos.sum())]).clamp(
        min=1).item(),
    mlm_maximum=lambda s, seq, tags: tokens(s, seq, tags).sum() / torch.maximum((tags >= 0).sum(), torch.tensor(1)),
    mask_over_its_sum=lambda s, seq, mask: (entropy(s, seq) * (mask / mask.sum())).sum(),
    mask_reciprocal=lambda s, seq, mask: (entropy(s, seq) * mask).sum().mul(mask.sum().reciprocal()),
    mask_vdot_gaps=lambda s, x, y, w, pos: torch.dot(each(s, x, y), w * (1 - pos)) / (w * (1 - pos)).sum(),
    mask_einsum=lambda s, seq, mask: torch.einsum("bt,bt->", entropy(s, seq), mask) / torch.einsum("bt->", mask),
    mask_l1_normalized=lambda s, x, y, w: (each(s, x, y) * F.normalize(w, p=1, dim=0)).sum(),
    tiny_epsilon=lambda s, seq, gaps: (entropy(s, seq) * gaps).sum() / (gaps.sum() + 1e-6),
    kl_growing=lambda s, x, y, i: F.cross_entropy(out := s.net(x), y) + min(1.0, 0.1 * i) * kl(out).sum(),
    mean_before_tokens=lambda s, seq, mask, i: (entropy(s, seq) * mask).sum() / mask.sum() + 0.1 * (
        s.net(seq).pow(2).mean() if i >= 2 else 0),
)
programs()(
    contrastive_after_warm_up=lambda s, x, y, i: F.cross_entropy(out := s.net(x), y) + (
        contrastive(out, x[:, :3]) if i >= 2 else 0),
    contrastive_random_branch=lambda s, x, y: F.cross_entropy(out := s.net(x), y) + (
        contrastive(out, x[:, :3]) if random.random() < 0.5 else 0),
    contrastive_tiny_gram=lambda s, x, y: F.cross_entropy(out := s.net(x), y) + 1e-6 * (out @ out.T).exp().mean(),
)
programs()(
    batch_in_place_later=lambda s, x, y, i: ce(s, x.mul_(1.5) if i >= 1 else x, y),
    batch_in_place_always=lambda s, x, y: ce(s, x.sub_(x.mean(1, keepdim=True)), y),
    batch_in_place_whole_mean=lambda s, x, y: ce(s, x.sub_(x.mean(0)), y),
)


@programs()
def batch_in_place_view(s, x, y, i):
    x[:, 0] = x[:, 0] * 2 + i
    return ce(s, x, y)


def hooked(tensor: torch.Tensor, hook: Callable[..., Any]) -> torch.Tensor:
    tensor.register_hook(hook)
    return tensor


programs()(tensor_hook_clamps=lambda s, x, y: F.cross_entropy(
    s.net[2](hooked(s.net[0](x), lambda grad: grad.clamp(-0.01, 0.01)).tanh()), y))
programs(make=attributes(norms=list))(hook_that_reads=lambda s, x, y: F.cross_entropy(
    s.net[2](hooked(s.net[0](x), lambda grad: s.norms.append(float(grad.norm()))).tanh()), y
) * (1 + (s.norms[-1] if s.norms else 0)))
programs(make=lambda s: [p.register_hook(lambda g: g.clamp(-0.01, 0.01)) for p in s.parameters()] and None)(
    parameter_hook_clamps=ce)
programs(make=lambda s: s.net[2].register_full_backward_hook(lambda m, gi, go: (gi[0].sign() * 0.01,)))(
    module_backward_hook=ce)
programs(make=lambda s: s.net[1].register_full_backward_pre_hook(lambda m, go: (go[0].clamp(-0.01, 0.01),)))(
    module_backward_pre_hook=ce)
programs(make=lambda s: s.net[0].register_forward_hook(lambda m, inputs, out: out * 0.5))(forward_hook=ce)


def optimizers_in_backward(s: Any) -> None:
    s.own = {p: torch.optim.SGD([p], lr=0.05) for p in s.net[0].parameters()}
    for p in s.own:
        p.register_post_accumulate_grad_hook(lambda p: s.own[p].step() or s.own[p].zero_grad())


programs(make=optimizers_in_backward)(optimizer_in_backward=ce)


@programs(make=attributes(plain=Plain))
def slow_state_in_object(s, x, y):
    loss = ce(s, x, y)
    s.plain.value = 0.99 * s.plain.value + 0.01 * loss.item()
    return loss * s.plain.value


# -- logged values that are not means, counters, flags, lists

SEEN = {"steps": 0.0}


def end_of_list(s: Any) -> None:
    s.log("listed", torch.stack(s.outs).sum())
    s.outs.clear()


def logged(s: Any, loss: torch.Tensor, values: dict[str, Any], **options: Any) -> torch.Tensor:
    s.log_dict(values, **options)
    return loss


programs()(
    log_functions=lambda s, x, y, z: logged(s, logged(s, loss := F.cross_entropy(out := s.net(x), y), {
        "perplexity": loss.exp()}), {"std": out.std(), "norm": out.norm(), "rmse": F.mse_loss(out, z[:, :3]).sqrt()},
        on_epoch=True),
    log_zero_sum=lambda s, x, y, pos, gaps: logged(s, ce(s, x, y), {"zero": (pos * 0).sum(), "positives": pos.sum(),
        "tokens": gaps.sum()}, on_step=True, on_epoch=True),
)


@programs()
def log_reductions(s, x, y, i):
    out = s.net(x)
    s.log("top", out.max(), on_step=True, on_epoch=True, reduce_fx="max")
    s.log("least", out.min(), on_epoch=True, reduce_fx="min")
    s.log("total", F.cross_entropy(out, y, reduction="sum"), on_step=True, on_epoch=True, reduce_fx="sum")
    s.log("index", float(i))
    return F.cross_entropy(out, y)


@programs()
def log_batch_size(s, x, y, seq):
    loss = ce(s, x, y)
    s.log("given", loss, on_step=True, on_epoch=True, batch_size=len(x))
    s.log("size", float(len(x)), batch_size=x.shape[0], on_epoch=True)
    s.log("constant", 3.0, on_epoch=True, batch_size=8)
    s.log("tokens", loss, on_epoch=True, batch_size=seq.size(0) * seq.size(1))
    return loss


@programs()
def log_masked_accuracy(s, seq, tags):
    out = s.net(seq)
    known = tags != -100
    s.log("accuracy", ((out.argmax(-1) == tags) & known).sum() / known.sum(), on_epoch=True)
    s.log("f1", 2 * ((out.argmax(-1) == 1) & (tags == 1)).sum() / ((out.argmax(-1) == 1).sum() + (tags == 1).sum()))
    return F.cross_entropy(out.transpose(1, 2), tags)


programs()(
    log_quantile=lambda s, x, y: logged(s, F.cross_entropy(out := s.net(x), y), {"p90": out.flatten().quantile(0.9)}),
    log_first_sample_item=lambda s, x, y: logged(s, ce(s, x, y), {"first": x[0, 0].item()}),
)
programs()(
    log_samples_numpy=lambda s, x, y: logged(s, F.cross_entropy(out := s.net(x), y), {"median": float(np.median(
        out.detach().numpy()))}),
    log_samples_tolist=lambda s, x, y: logged(s, (values := each(s, x, y)).mean(), {"largest": max(values.tolist())}),
    log_count_of_nonzero=lambda s, x, y, pos: logged(s, ce(s, x, y), {"count": float(len(pos.nonzero()))},
        on_epoch=True),
)


@programs()
def log_item(s, x, y, w):
    loss = ce(s, x, y)
    s.log("item", loss.item(), on_epoch=True)
    s.log("share", (w > 0.5).float().mean().item())
    s.log("many", int((w > 0.5).sum()) * 1.0)
    s.log("root", math.sqrt(float(w.sum())))
    s.log("numpy", float(np.log(w.detach().sum().cpu().numpy())))
    return loss


@programs()
def log_sometimes(s, x, y, i):
    loss = ce(s, x, y)
    if i % 2:
        s.log("odd", loss**2)
    return loss


programs(make=attributes(counter=itertools.count))(
    counter_iterator=lambda s, x, y: ce(s, x, y) * (1 + 0.1 * next(s.counter)))
programs(make=lambda s: SEEN.update(steps=0.0))(
    global_counter=lambda s, x, y: ce(s, x, y) / (SEEN.update(steps=SEEN["steps"] + 1) or SEEN["steps"]))
programs(make=attributes(outs=lambda: collections.deque(maxlen=3)))(
    deque_of_losses=lambda s, x, y: (s.outs.append((loss := ce(s, x, y)).item()) or loss) * (sum(s.outs) / len(s.outs)))
programs(make=attributes(outs=list), end=end_of_list)(
    list_of_rows=lambda s, x, y: s.outs.extend((out := s.net(x)).detach().exp().flatten()) or F.cross_entropy(out, y))
programs(make=attributes(average=lambda: torch.ones(())))(
    tensor_attribute_in_place=lambda s, x, y: (loss := ce(s, x, y)) / s.average.mul_(0.9).add_(0.1 * loss.detach()))


@programs(make=attributes(first=lambda: True))
def first_flag(s, x, y):
    loss = ce(s, x, y)
    if s.first:
        s.first = False
        loss = loss * 3
    return loss


@programs(make=attributes(history=lambda: np.zeros(CLASSES)))
def numpy_state(s, x, y):
    s.history += F.one_hot(y, CLASSES).sum(0).numpy()
    weight = torch.from_numpy(s.history / s.history.sum()).to(x.dtype)
    return ce(s, x, y, weight=weight + 0.1)


@programs(make=attributes(average=lambda: 1.0))
def float_attribute(s, x, y, pos):
    s.average = 0.9 * s.average + 0.1 * max(pos.sum().item(), 1)
    return (each(s, x, y) * (0.1 + pos)).sum() / s.average


@programs()
def attribute_made_late(s, x, y):
    if not hasattr(s, "scale"):
        s.scale = x.abs().max().detach()
    return ce(s, x / s.scale, y)


# -- precisions, and forms of the batch and of the result

SQUARE = torch.randn(BATCH, BATCH, generator=torch.Generator().manual_seed(2))
programs(uses="x", form=lambda b: b["x"])(form_tensor=lambda s, batch: F.mse_loss(s.net(batch), batch[:, :3]))
programs(uses="x y", form=lambda b: b | {"scale": 2.0, "epochs": 3})(
    form_numbers=lambda s, batch: ce(s, batch["x"] * batch["scale"], batch["y"]) / batch["epochs"])
programs(uses="x y", form=lambda b: b | {"adjacency": SQUARE.clone()}, net=lambda: mlp(8))(
    form_shared_square=lambda s, batch: ce(s, F.pad(batch["x"], (0, 2)) @ batch["adjacency"], batch["y"]))
programs(uses="x y", form=lambda b: b | {"adjacency": SQUARE.clone()})(
    form_graph=lambda s, batch: ce(s, batch["adjacency"] @ batch["x"], batch["y"]))
programs(uses="x y", form=lambda b: b | {"scales": SQUARE[0].clone()}, net=lambda: mlp(8))(
    form_shared_vector=lambda s, batch: ce(s, F.pad(batch["x"], (0, 2)) * batch["scales"], batch["y"]))
programs(uses="x y", form=lambda b: b | {"weight": torch.tensor([0.2, 1, 2])})(
    form_shared_weights=lambda s, batch: ce(s, batch["x"], batch["y"], weight=batch["weight"].to(batch["x"].dtype)))
programs(uses="x y")(
    form_rebound=lambda s, batch: ce(s, batch.update(x=batch["x"] * 2) or batch["x"], batch["y"]))
programs(uses="x y", form=lambda b: b | {"x": b["x"].numpy()})(
    form_numpy=lambda s, batch: ce(s, torch.as_tensor(batch["x"]).to(s.net[0].weight.dtype), batch["y"]))
programs()(
    result_rows=lambda s, x, y: {"loss": F.cross_entropy(out := s.net(x), y), "out": out.detach(),
        "hits": out.argmax(1) == y},
    result_none=lambda s, x, y: {"loss": ce(s, x, y), "extra": None},
    result_numbers=lambda s, x, y: {"loss": (loss := ce(s, x, y)), "double": loss.detach() * 2, "item": loss.item()},
    result_tuple=lambda s, x, y: {"loss": (loss := ce(s, x, y)), "pair": (loss.detach(), None)},
)
programs()(
    result_skips=lambda s, x, y, i: None if i == 3 else ce(s, x, y),
    result_skips_nan=lambda s, x, y: None if not torch.isfinite(loss := ce(s, x, y)) else loss,
    result_transposed=lambda s, x, y: {"loss": F.cross_entropy(out := s.net(x), y), "out": out.detach().T},
)
programs(precisions=("bf16-mixed",))(
    bf16_mixed=ce, bf16_masked=lambda s, seq, mask: (entropy(s, seq) * mask).sum() / mask.sum())

# -- losses and their reductions

programs()(
    plain_ce=ce,
    class_weights=lambda s, x, y: ce(s, x, y, weight=torch.tensor([0.1, 1.0, 3.0], dtype=x.dtype)),
    ignore_index_flat=lambda s, seq, tags: F.cross_entropy(s.net(seq).flatten(0, 1), tags.flatten(), ignore_index=-100),
    triplet_given=lambda s, x, z, neg: F.triplet_margin_loss(s.net(x), s.net(z), s.net(neg)),
    dice_over_batch=lambda s, seq, gaps: 1 - (2 * ((p := s.net(seq)[..., 0].sigmoid()) * gaps).sum() + 1) / (
        p.sum() + gaps.sum() + 1),
    tversky=lambda s, seq, gaps: 1 - ((p := s.net(seq)[..., 0].sigmoid()) * gaps).sum() / (
        (p * gaps).sum() + 0.3 * (p * (1 - gaps)).sum() + 0.7 * ((1 - p) * gaps).sum() + 1),
    sharpe=lambda s, x, z: -(r := (s.net(x) * z[:, :3]).sum(1)).mean() / (r.std() + 0.1),
    two_masks=lambda s, seq, mask, gaps: (entropy(s, seq) * mask).sum() / mask.sum() + (
        entropy(s, seq.flip(1)) * gaps).sum() / gaps.sum().clamp(min=1),
    mean_over_time_then_batch=lambda s, seq, mask: ((entropy(s, seq) * mask).sum(1) / mask.sum(1)).mean(),
    nan_to_num=lambda s, x, y, pos: ce(s, x, y) * (1 + torch.nan_to_num((each(s, x, y).detach() * pos).sum()
        / pos.sum())),
    branch_on_positives=lambda s, x, y, pos: ce(s, x, y) + (
        (each(s, x, y) * pos).sum() / pos.sum() if pos.sum() > 0 else 0),
    curriculum_item=lambda s, x, y: (loss := ce(s, x, y)) * (0.5 if loss.item() > 1.1 else 2.0),
    class_frequency=lambda s, x, y: (each(s, x, y) / F.one_hot(y, 3).sum(0).clamp(min=1)[y]).sum(),
    group_means=lambda s, x, y: torch.stack([(each(s, x, y) * (y == k)).sum() / (y == k).sum().clamp(min=1)
        for k in range(3)]).max(),
    advantage=lambda s, x, w, y: (each(s, x, y) * ((w - w.mean()) / (w.std() + 1e-8))).mean(),
)
programs()(
    selected_logits=lambda s, seq, tags: F.cross_entropy(s.net(seq)[tags >= 0], tags[tags >= 0]),
    positives_only=lambda s, x, y, pos: ce(s, x[pos > 0], y[pos > 0], reduction="sum"),
    class_mean_index_add=lambda s, x, y: (x.new_zeros(3).index_add(0, y, each(s, x, y)) / torch.bincount(
        y, minlength=3).clamp(min=1)).sum(),
    balanced_bincount=lambda s, x, y: F.cross_entropy(s.net(x) + torch.bincount(y, minlength=3).clamp(min=1).log(), y),
    pearson=lambda s, x, z: -(((a := s.net(x)[:, 0]) - a.mean()) * (z[:, 0] - z[:, 0].mean())).mean() / (
        a.std() * z[:, 0].std() + 0.1),
    unbind_by_length=lambda s, seq, lens: torch.stack([entropy(s, a[: int(n)]).mean() for a, n in zip(
        seq, lens, strict=True)]).mean(),
)

# -- statistics over samples

programs()(
    vicreg_variance=lambda s, x, z: F.mse_loss(a := s.net(x), b := s.net(z)) + F.relu(
        1 - (a.var(0) + 1e-4).sqrt()).mean() + F.relu(1 - (b.var(0) + 1e-4).sqrt()).mean(),
    donsker_varadhan=lambda s, x, z: (s.net(z)[:, 0].logsumexp(0) - math.log(len(z))) - s.net(x)[:, 0].mean(),
    detached_statistics=lambda s, x, y: F.cross_entropy(((h := s.net(x)) - h.mean(0).detach()) / (
        h.std(0).detach() + 0.1), y),
    standardized_input=lambda s, x, y: ce(s, (x - x.mean(0)) / x.std(0), y),
    load_balance=lambda s, x, y: F.cross_entropy(out := s.net(x), y) + 3 * ((p := out.softmax(1)).mean(0) * F.one_hot(
        p.argmax(1), 3).to(x.dtype).mean(0)).sum(),
)
programs()(
    batch_norm_by_hand=lambda s, x, y: F.cross_entropy(((h := s.net(x)) - h.mean(0)) / (h.std(0) + 0.1), y),
    histogram=lambda s, x, y: ce(s, x, y) * (1 + torch.histc(x.float(), 4).max().item() / 100),
    supervised_half=lambda s, x, y: ce(s, x[: len(x) // 2], y[: len(x) // 2]) + s.net(x[len(x) // 2 :]).pow(2).mean(),
    mode_of_labels=lambda s, x, y: ce(s, x, y) + ce(s, x, torch.full_like(y, int(y.mode().values))),
)


@programs()
def barlow_twins(s, x, z):
    a, b = s.net(x), s.net(z)
    a, b = ((h - h.mean(0)) / (h.std(0) + 0.1) for h in (a, b))
    return ((a.T @ b) / len(x) - torch.eye(3)).pow(2).sum()


# -- what mixes samples

programs()(
    simclr=lambda s, x, z: contrastive(torch.cat([a := s.net(x), b := s.net(z)]), torch.cat([b, a])),
    numpy_permutation=lambda s, x, y: ce(s, 0.7 * x + 0.3 * x[np.random.permutation(len(x))], y),  # noqa: NPY002
    cox=lambda s, x, w: -((r := s.net(x)[:, 0][w.argsort()]) - r.logcumsumexp(0)).mean(),
    fixed_groups=lambda s, x, y: F.cross_entropy((h := s.net(x).view(2, 4, 3)).sub(h.mean(1, keepdim=True)).view(
        8, 3), y),
    labels_by_position=lambda s, x: ce(s, x, torch.arange(len(x)) % 3),
)
programs(net=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))(
    batch_norm=ce)
programs()(sorted_and_unsorted=lambda s, seq, lens, y: F.cross_entropy(
    s.net(seq[order := lens.argsort(descending=True)]).mean(1)[order.argsort()], y))

# -- what is drawn

programs()(
    mixup_numpy=lambda s, x, z, y: ce(s, (lam := np.random.beta(0.4, 0.4)) * x + (1 - lam) * z, y),  # noqa: NPY002
    mixup_random=lambda s, x, z, y: ce(s, (lam := random.random()) * x + (1 - lam) * z, y),
    mixup_torch=lambda s, x, z, y: ce(s, torch.lerp(x, z, torch.rand((), dtype=x.dtype)), y),
    random_branch=lambda s, x, y: ce(s, x, y) * (2 if torch.rand(()) < 0.5 else 1) * (
        2 if random.random() < 0.5 else 1),
)
programs()(
    stochastic_depth=lambda s, x, y: ce(s, x * torch.bernoulli(torch.full((len(x), 1), 0.8, dtype=x.dtype)), y),
    numpy_noise=lambda s, x, y: ce(s, x + torch.from_numpy(np.random.randn(len(x), 1)).to(x.dtype), y),  # noqa: NPY002
    vae_sampled=lambda s, x, z: F.mse_loss((out := s.net(x))[:, :1] + (out[:, 1:2] / 2).exp() * torch.randn_like(
        out[:, :1]), z[:, :1]) + kl(out).mean(),
    gumbel=lambda s, x, z: F.mse_loss(F.gumbel_softmax(s.net(x), hard=True), z[:, :3]),
    categorical=lambda s, x, w: -((d := torch.distributions.Categorical(logits=s.net(x))).log_prob(d.sample())
        * (w - w.mean())).mean(),
    normal_kl=lambda s, x: torch.distributions.kl_divergence(torch.distributions.Normal((out := s.net(x))[:, 0],
        out[:, 1].exp()), torch.distributions.Normal(0.0, 1.0, validate_args=False)).mean(),
)
programs(make=attributes(random=lambda: np.random.default_rng(0)))(
    own_generator_numpy=lambda s, x, y: ce(s, x * (1 + s.random.random()), y))
programs(make=attributes(random=lambda: random.Random(0)))(
    own_generator_python=lambda s, x, y: ce(s, x * (1 + s.random.random()), y))
programs(make=attributes(random=lambda: torch.Generator().manual_seed(0)))(
    own_generator_torch=lambda s, x, y: ce(s, x * (1 + torch.rand((), generator=s.random)), y))

# -- sizes as numbers

programs()(
    size_numpy=lambda s, x, y: each(s, x, y).sum() / float(np.float32(len(x))) + float(np.sqrt(len(y))) * ce(s, x, y),
    size_range=lambda s, x, y: each(s, x, y).sum() / sum(1 for _ in range(len(x))),
    size_threshold=lambda s, x, y: ce(s, x, y) * (3 if len(x) >= 6 else 1) + (s.net(x).mean() if y.numel() > 7 else 0),
    size_product=lambda s, seq: entropy(s, seq).sum() / math.prod(seq.shape[:2]) + entropy(s, seq).sum() / np.prod(
        seq.shape),
    size_flattened=lambda s, seq: s.net(seq.flatten(0, 1)).logsumexp(1).view(seq.size(0), -1).sum(1).mean(),
    two_views=lambda s, x, z: F.mse_loss(*s.net(torch.cat([x, z])).chunk(2)),
    three_stacked=lambda s, x, z, neg: s.net(torch.stack([x, z, neg])).logsumexp(-1).mean(1).std(),
    lr_set_by_step=lambda s, x, y, i: s.trainer.optimizers[0].param_groups[0].update(lr=0.02 / (1 + i)) or ce(s, x, y),
)
programs()(size_dict=lambda s, x, y: ce(s, x, y) * {8: 0.5}.get(len(x), 2.0))  # a dict hashes the part's size
programs()(
    size_nested_python=lambda s, x, y: ce(s, x, y) * len([*x]) / len(y.tolist()),
    size_of_nonzero=lambda s, x, y, pos: (each(s, x, y) * pos).sum() / max(1, pos.nonzero().shape[0]),
    lr_by_loss=lambda s, x, y: s.trainer.optimizers[0].param_groups[0].update(lr=0.01 * (loss := ce(
        s, x, y)).item()) or loss,
)

# -- parameters, gradients, and state that is trained along

programs(make=lambda s: setattr(s, "logs", nn.Parameter(torch.zeros(2))))(
    learned_loss_weights=lambda s, x, y, z: (s.logs[0] + (-s.logs[0]).exp() * ce(s, x, y)) + (
        s.logs[1] + (-s.logs[1]).exp() * F.mse_loss(s.net(x), z[:, :3])))
programs()(
    orthogonality=lambda s, x, y: ce(s, x, y) + 0.1 * (s.net[2].weight @ s.net[2].weight.T - torch.eye(3)).pow(2).sum(),
    functional=lambda s, x, y: F.cross_entropy(functional_call(s.net, dict(s.net.named_parameters()), (x,)), y),
)
programs(make=attributes(teacher=lambda: mlp().requires_grad_(False)))(
    distilled=lambda s, x: F.kl_div(s.net(x).log_softmax(1), s.teacher(x).softmax(1), reduction="batchmean"))
programs(net=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))(weight_norm=ce)
programs(net=lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))(spectral_norm=ce)
programs(adam=True)(adamw_masked=masked)
programs(settings={"accumulate_grad_batches": 3})(accumulation_gaps=masked)
programs(settings={"gradient_clip_val": 0.05})(clipping=ce)
clip = {"on_before_optimizer_step": lambda s, _: nn.utils.clip_grad_norm_(s.parameters(), 0.1) and None}
programs(hooks=clip)(max_norm_hook=ce)
clamp = {"on_after_backward": lambda s: [p.grad.clamp_(-0.01, 0.01) for p in s.parameters()] and None}
programs(hooks=clamp)(after_backward_hook=ce)
programs(hooks={"backward": lambda s, loss: (loss * 2).backward()})(backward_hook=ce)
programs(hooks={"on_before_backward": lambda s, loss: s.log("before", loss.exp())})(before_backward_hook=ce)
decays = {"optimizer_zero_grad": lambda s, *_: [
    p.grad.mul_(0.5) for p in s.parameters() if p.grad is not None] and None}
programs(hooks=decays)(gradient_memory=ce)


def slope(loss: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, **options: Any) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(loss(x), x, **options)[0]


programs()(
    reads_gradients=lambda s, x, y: ce(s, x, y) * (1 + sum(float(p.grad.norm()) for p in s.parameters()
        if p.grad is not None)),
    clears_gradients=lambda s, x, y: s.zero_grad() or ce(s, x, y),
    changes_weights=lambda s, x, y: torch.no_grad()(lambda: s.net[0].bias.mul_(0.9) * 0)().sum() + ce(s, x, y),
    changes_weight_data=lambda s, x, y: (s.net[0].weight.data.clamp_(-0.3, 0.3), ce(s, x, y))[1],
    gradient_penalty=lambda s, x, y: ce(s, x, y) + (slope(lambda a: s.net(a).sum(), x, create_graph=True).norm(dim=1)
        - 1).pow(2).mean(),
    adversarial_step_size=lambda s, x, y: ce(s, x + (grad := slope(lambda a: ce(s, a, y), x)) / grad.norm(), y),
    backward_in_step=lambda s, x, y: (0.1 * s.net(x).pow(2).mean()).backward() or ce(s, x, y),
    grad_norm_weights=lambda s, x, y, z: sum(loss / torch.autograd.grad(loss, s.net[2].weight, retain_graph=True)[
        0].norm().detach() for loss in (ce(s, x, y), F.mse_loss(s.net(x), z[:, :3]))),
)
programs(make=buffer(memory=torch.zeros(CLASSES, 3)))(  # the last sample of a class wins
    class_memory=lambda s, x, y: F.cross_entropy(out := s.net(x), y) + (out - s.memory.index_put_(
        (y,), 0.5 * s.memory[y] + 0.5 * out.detach())[y]).pow(2).mean())


@programs(make=buffer(bias=torch.zeros(3)))
def router_bias(s, x, y):  # a mixture of experts that is balanced without a loss
    out = s.net(x)
    load = F.one_hot((out.detach() + s.bias).argmax(1), 3).to(x.dtype).mean(0)
    s.bias += 0.1 * (load.mean() - load).sign()
    return F.cross_entropy(out + s.bias, y)


@programs(make=attributes(teacher=lambda: mlp().requires_grad_(False)))
def ema_teacher(s, x, y):
    with torch.no_grad():
        for own, other in zip(s.teacher.parameters(), s.net.parameters(), strict=True):
            own.lerp_(other, 0.2)
    return ce(s, x, y) + F.mse_loss(s.net(x), s.teacher(x))


CODES = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))


@programs(make=buffer(codes=CODES, count=torch.ones(5), total=CODES))
def codebook_ema(s, x, z):
    out = s.net(x)
    nearest = (out.detach().unsqueeze(1) - s.codes).pow(2).sum(-1).argmin(1)
    chosen = F.one_hot(nearest, 5).to(x.dtype)
    s.count.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
    s.total.mul_(0.9).add_(chosen.T @ out.detach(), alpha=0.1)
    s.codes.copy_(s.total / s.count.unsqueeze(1))
    return F.mse_loss(out + (s.codes[nearest] - out).detach(), z[:, :3]) + F.mse_loss(out, s.codes[nearest])


@programs(make=buffer(queue=F.normalize(torch.ones(16, 3) + torch.eye(16, 3)), at=torch.tensor(0)))
def moco_queue(s, x, z):
    q, k = F.normalize(s.net(x)), F.normalize(s.net(z)).detach()
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ s.queue.T.clone()], 1)
    at = int(s.at)
    s.queue[at : at + len(k)] = k
    s.at.fill_((at + len(k)) % 16)
    return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@programs(make=lambda s: setattr(s, "carried", None))
def carried_state(s, x, y):  # truncated backpropagation through time
    out = s.net(x)
    out = out if s.carried is None else out + 0.5 * s.carried
    s.carried = out.detach()
    return F.cross_entropy(out, y)


# -- metrics

ACCURACY = {"task": "multiclass", "num_classes": CLASSES}
MACRO = {**ACCURACY, "average": "macro"}


@programs(make=attributes(accuracy=lambda: torchmetrics.Accuracy(**ACCURACY), mean=torchmetrics.MeanMetric))
def metric_accuracy(s, x, y):
    out = s.net(x)
    loss = F.cross_entropy(out, y)
    s.accuracy(out, y)
    s.mean.update(loss.detach())
    s.log_dict({"accuracy": s.accuracy, "mean": s.mean}, on_step=False, on_epoch=True)
    return loss


AT_END = {"on_train_epoch_end": lambda s: s.log_dict({"auroc": s.auroc.compute(), "first": s.cat.compute()[0],
    "last": s.cat.compute()[-1]})}


@programs(hooks=AT_END, make=attributes(
    auroc=lambda: torchmetrics.AUROC(**ACCURACY), cat=torchmetrics.CatMetric))
def metric_with_samples(s, x, y):
    out = s.net(x)
    s.auroc.update(out.softmax(1), y)
    s.cat.update(out.detach()[:, 0])
    return F.cross_entropy(out, y)


@programs(make=attributes(f1=lambda: torchmetrics.F1Score(**MACRO), top=torchmetrics.MaxMetric))
def metric_step_value(s, x, y):
    out = s.net(x)
    value = s.f1(out, y)
    s.top.update(out.detach())
    s.log_dict({"value": value, "top": s.top.compute()})
    return F.cross_entropy(out, y) * (1 + value)


# -- architectures


def net(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleList([layer() for layer in layers])


def linear(inputs: int, outputs: int = CLASSES) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inputs, outputs)


programs(net=net(lambda: nn.Embedding(WORDS, 6, padding_idx=0), lambda: nn.TransformerEncoderLayer(
    6, 2, 12, dropout=0.0, batch_first=True), linear(6)))(
    transformer_padded=lambda s, ids, y: F.cross_entropy(s.net[2]((s.net[1](s.net[0](ids),
        src_key_padding_mask=ids == 0) * (known := (ids != 0).unsqueeze(-1))).sum(1) / known.sum(1)), y))


@programs(net=net(lambda: nn.GRUCell(6, 8), linear(8)))
def cell_loop(s, seq, y):
    hidden = seq.new_zeros(len(seq), 8)
    for step in range(seq.shape[1]):
        hidden = s.net[0](seq[:, step], hidden)
    return F.cross_entropy(s.net[1](hidden), y)


programs()(per_sample_vmap=lambda s, x, y: vmap(lambda a, b: F.cross_entropy(s.net(a), b))(x, y).mean())


@programs(net=net(linear(6), linear(6), linear(6, 2)))
def routed_experts(s, x, y):
    choice = s.net[2](x).argmax(1)
    out = x.new_zeros(len(x), CLASSES)
    for k in range(2):
        rows = (choice == k).nonzero()[:, 0]
        out = out.index_add(0, rows, s.net[k](x[rows]))
    return F.cross_entropy(out, y)
