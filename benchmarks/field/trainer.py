"""Plain torch as people write it, what the Trainer itself can do, and optimizers of libraries."""

# Rows of tables, and names of libraries imported when they are called:
# fmt: off

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.func import functional_call

from field.pattern import Net, Step, adamw, classed, classify, data, mlp, noise, of, pattern, regress, row

ROWS = (16, 64)


@pattern("torch", (64, 256), "", lambda: classed(64))
def moe_by_where() -> Net:
    def mix(m: Net, x: Tensor) -> Tensor:
        weights, chosen = m.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for index, expert in enumerate(m.experts):
            rows, slots = torch.where(chosen == index)
            out[rows] += weights[rows, slots, None] * expert(x[rows])
        return m.head(out)

    experts = nn.ModuleList(mlp(64, 256, 64, 1) for _ in range(8))
    return Net(mix, gate=nn.Linear(64, 8), experts=experts, head=nn.Linear(64, 10))


row("lbfgs_grows", "torch", ROWS, "", lambda: mlp(64, 256, 1), lambda: noise((64,), (1,)), regress,
    lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4, history_size=20), steps=24)


def residual(network: nn.Module, batch: Any) -> Tensor:
    x = batch[0].requires_grad_()
    u = network(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (ddu,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
    return (du[:, 1:2] - ddu[:, :1]).square().mean()


row("pinn_by_autograd", "torch", (32, 128), "", lambda: nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64),
    nn.Tanh(), nn.Linear(64, 1)), lambda: noise((2,), (1,)), residual)


def inner_loop(network: nn.Module, batch: Any) -> Tensor:
    """Each sample is a task; the inner gradient is differentiated."""
    total = torch.zeros(())
    for x, y in zip(*batch, strict=True):
        parameters = dict(network.named_parameters())
        inner = F.cross_entropy(functional_call(network, parameters, (x[:5],)), y[:5])
        slopes = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), slopes, strict=True)}
        total = total + F.cross_entropy(functional_call(network, fast, (x[5:],)), y[5:])
    return total / len(batch[0])


row("maml_inner_loop", "torch", (4, 8), "", lambda: mlp(64, 128), lambda: data(
    lambda _: (torch.randn(20, 64), torch.randint(10, (20,)))), inner_loop)


class ByHand(Step):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.automatic_optimization = False


class Truncated(ByHand):
    """Hidden states are carried from batch to batch, and pieces of a batch are trained one by one."""

    def __init__(self) -> None:
        super().__init__(nn.LSTM(16, 64, batch_first=True), None)
        self.head = nn.Linear(64, 16)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, state = self.optimizers(), None
        for x, y in zip(batch[0].split(10, 1), batch[1].split(10, 1), strict=True):
            out, state = self.network(x, state)
            state = tuple(s.detach() for s in state)
            optimizer.zero_grad()
            self.manual_backward(F.mse_loss(self.head(out), y))
            optimizer.step()


class Measured(Step):
    """An exact AUROC keeps all scores of the epoch."""

    def __init__(self) -> None:
        super().__init__(mlp(64, 128, 100), None)
        self.area = torchmetrics.AUROC("multiclass", num_classes=100)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.network(batch[0])
        self.area.update(logits.detach(), batch[1])
        self.log("area", self.area, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch[1])


class Finetuned(Step):
    """A frozen backbone that is trained from the second epoch on."""

    def __init__(self) -> None:
        super().__init__(mlp(64, 384), classify)
        self.network[:-1].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.network.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.network[:-1].parameters())})


row("truncated_backpropagation", "torch", (8, 32), "", Truncated, lambda: noise((40, 16), (40, 16)), steps=4)
row("metric_that_keeps_batches", "torchmetrics", ROWS, "", Measured, lambda: classed(64, classes=100), steps=40)
row("gradual_unfreezing", "torch", ROWS, "", Finetuned, lambda: classed(64), steps=6, max_epochs=2)
# Lightning's callback, with its defaults: it keeps what the weights were.
row("pruned_each_epoch", "torch", ROWS, "", lambda: mlp(64, 1024), lambda: classed(64), steps=4, max_epochs=3,
    callbacks=[pl.callbacks.ModelPruning("l1_unstructured", amount=0.3)])

# Optimizers ----------------------------------------------------------------------------------------------------------


class Free(Step):
    def on_train_epoch_start(self) -> None:
        self.optimizers().train()


class Sharp(ByHand):
    """Two passes a step, by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(self.loss(self.network, batch))
        optimizer.first_step(zero_grad=True)
        self.manual_backward(self.loss(self.network, batch))
        optimizer.second_step(zero_grad=True)


class Hessian(ByHand):
    """Second derivatives: the backward pass keeps its graph."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self.network, batch), create_graph=True)
        optimizer.step()


Choice = Callable[..., Any]


def low_rank(**options: Any) -> Choice:
    """Matrices in a group of their own, whose gradients are projected; the gap is the library's default."""

    def optimizer(cls: Any, parameters: Any) -> Any:
        groups: tuple[list[Any], list[Any]] = ([], [])
        for p in parameters:
            groups[p.ndim > 1].append(p)
        settings = {"params": groups[1], "rank": 32, "update_proj_gap": 200, "proj_type": "std", **options}
        return cls([{"params": groups[0]}, settings], lr=1e-3)

    return optimizer


def simple(**options: Any) -> Choice:
    return lambda cls, parameters: cls(parameters, **{"lr": 1e-3, **options})


def heavy(cls: Any, parameters: Any) -> Any:
    of("heavyball.utils").compile_mode = None
    return cls(parameters, lr=1e-3)


# library, the optimizer's path, how it is made, steps; the module, where it is another one
OPTIMIZERS: dict[str, tuple[str, str, Choice, int] | tuple[str, str, Choice, int, Any]] = {
    "schedule_free": ("schedulefree", "schedulefree:AdamWScheduleFree", simple(), 3, Free),
    "lion": ("lion-pytorch", "lion_pytorch:Lion", simple(lr=1e-4), 3),
    "sharpness_aware": ("pytorch-optimizer", "pytorch_optimizer:SAM", lambda cls, p: cls(p, torch.optim.SGD, lr=0.1,
        momentum=0.9), 3, Sharp),
    "adahessian": ("torch-optimizer", "torch_optimizer:Adahessian", simple(lr=0.1), 3, Hessian),
    "adamw_8bit": ("bitsandbytes", "bitsandbytes.optim:AdamW8bit", simple(), 3),
    "prodigy": ("prodigyopt", "prodigyopt:Prodigy", simple(lr=1.0), 4),
    "d_adaptation": ("dadaptation", "dadaptation:DAdaptAdam", simple(lr=1.0), 4),
    "ada_belief": ("adabelief-pytorch", "adabelief_pytorch:AdaBelief", simple(print_change_log=False), 8),
    "came": ("came-pytorch", "came_pytorch:CAME", simple(), 3),
    "madgrad": ("madgrad", "madgrad:MADGRAD", simple(), 3),
    "adan": ("adan-pytorch", "adan_pytorch:Adan", simple(), 3),
    "adam_mini": ("adam-mini", "adam_mini:Adam_mini", lambda cls, p: cls([(f"layer{i}", q) for i, q in enumerate(p)],
        verbose=False), 3),
    "apollo": ("apollo-torch", "apollo_torch:APOLLOAdamW", low_rank(proj="random", scale_type="channel", scale=1.0), 3),
    "galore": ("galore-torch", "galore_torch:GaLoreAdamW", low_rank(scale=0.25), 250),
    "heavyball_soap": ("heavyball", "heavyball:SOAP", heavy, 4),
    "heavyball_muon": ("heavyball", "heavyball:Muon", heavy, 3),
    "torchao_adamw_8bit": ("torchao", "torchao.optim:AdamW8bit", simple(), 3),
    "torch_adafactor": ("torch", "torch.optim:Adafactor", simple(), 3),
    "transformers_adafactor": ("transformers", "transformers:Adafactor", lambda cls, p: cls(
        p, scale_parameter=True, relative_step=True, warmup_init=True), 3),
}
for name, (library, path, choice, steps, *module) in OPTIMIZERS.items():
    row(name, library, ROWS, path, lambda cls, c=choice, m=(module or [Step])[0]: m(mlp(64, 384), classify,
        lambda parameters: c(cls, parameters)), lambda: classed(64), steps=steps)


class Averaged(Step):
    """Averages of weights."""

    def __init__(self, average: Callable[[Any], Any]) -> None:
        super().__init__(mlp(64, 384), classify)
        self.average = average(self.network)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update()


row("ema_of_lucidrains", "ema-pytorch", ROWS, "", lambda: Averaged(
    lambda n: of("ema_pytorch:EMA")(n, update_after_step=2, update_every=2)), lambda: classed(64), steps=8)
row("ema_of_parameters", "torch-ema", ROWS, "", lambda: Averaged(
    lambda n: of("torch_ema:ExponentialMovingAverage")(n.parameters(), decay=0.99)), lambda: classed(64), steps=8)


def lycoris(algorithm: str) -> Step:
    step = Step(mlp(64, 384).requires_grad_(False), classify, adamw)
    step.adapter = of("lycoris:create_lycoris")(step.network, 1.0, linear_dim=8, linear_alpha=4, algo=algorithm)
    step.adapter.apply_to()
    return step


row("lycoris_lokr", "lycoris-lora", ROWS, "", lambda: lycoris("lokr"), lambda: classed(64))
row("lycoris_loha", "lycoris-lora", ROWS, "", lambda: lycoris("loha"), lambda: classed(64))
