"""Plain torch as people write it, what the Trainer itself can do, and optimizers of libraries."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.func import functional_call

from field.pattern import (
    MakeOptimizer,
    Net,
    Run,
    Step,
    classifier,
    classify,
    data,
    mlp,
    pattern,
    regress,
    regression,
    vectors,
)


@pattern(sizes=(64, 256))
def moe_by_where() -> Run:
    def mix(m: Net, x: Tensor) -> Tensor:
        weights, chosen = m.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for index, expert in enumerate(m.experts):
            rows, slots = torch.where(chosen == index)
            out[rows] += weights[rows, slots, None] * expert(x[rows])
        return m.head(out)

    def network() -> Net:
        experts = nn.ModuleList(mlp(64, 256, 64, 1) for _ in range(8))
        return Net(mix, gate=nn.Linear(64, 8), experts=experts, head=nn.Linear(64, 10))

    return Run(classifier(network), vectors(64))


@pattern(steps=24, sizes=(16, 64))
def lbfgs_grows() -> Run:
    return Run(
        lambda: Step(mlp(64, 256, 1), regress, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4, history_size=20)),
        regression(64),
    )


@pattern(sizes=(32, 128))
def pinn_by_autograd() -> Run:
    def loss(network: nn.Module, batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        u = network(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
        return (du[:, 1:2] - ddu[:, :1]).square().mean()

    return Run(
        lambda: Step(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)), loss),
        regression(2),
    )


@pattern(sizes=(4, 8))
def maml_inner_loop() -> Run:
    """Each sample is a task; the inner gradient is differentiated."""

    def loss(network: nn.Module, batch: Any) -> Tensor:
        total = torch.zeros(())
        for x, y in zip(*batch, strict=True):
            parameters = dict(network.named_parameters())
            inner = F.cross_entropy(functional_call(network, parameters, (x[:5],)), y[:5])
            slopes = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), slopes, strict=True)}
            total = total + F.cross_entropy(functional_call(network, fast, (x[5:],)), y[5:])
        return total / len(batch[0])

    return Run(lambda: Step(mlp(64, 128), loss), data(lambda _: (torch.randn(20, 64), torch.randint(10, (20,)))))


@pattern(sizes=(8, 32), steps=4)
def truncated_backpropagation() -> Run:
    """Hidden states are carried from batch to batch, and pieces of a batch are trained one by one."""

    class Truncated(Step):
        def __init__(self) -> None:
            super().__init__(nn.LSTM(16, 64, batch_first=True), None)
            self.head = nn.Linear(64, 16)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, state = self.optimizers(), None
            for x, y in zip(batch[0].split(10, 1), batch[1].split(10, 1), strict=True):
                out, state = self.network(x, state)
                state = tuple(s.detach() for s in state)
                optimizer.zero_grad()
                self.manual_backward(F.mse_loss(self.head(out), y))
                optimizer.step()

    return Run(Truncated, data(lambda _: (torch.randn(40, 16), torch.randn(40, 16))))


@pattern("torchmetrics", sizes=(16, 64), steps=40)
def metric_that_keeps_batches() -> Run:
    """An exact AUROC keeps all scores of the epoch."""

    class Measured(Step):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.area = torchmetrics.AUROC("multiclass", num_classes=100)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self.network(batch[0])
            self.area.update(logits.detach(), batch[1])
            self.log("area", self.area, on_step=False, on_epoch=True)
            return F.cross_entropy(logits, batch[1])

    return Run(lambda: Measured(mlp(64, 128, 100), None), vectors(64, 100))


@pattern(sizes=(16, 64), steps=6)
def gradual_unfreezing() -> Run:
    """A frozen backbone that is trained from the second epoch on."""

    class Finetuned(Step):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.network[:-1].requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.network.requires_grad_(True)
                self.trainer.optimizers[0].add_param_group({"params": list(self.network[:-1].parameters())})

    return Run(lambda: Finetuned(mlp(64, 384), classify), vectors(64), {"max_epochs": 2})


@pattern(sizes=(16, 64), steps=4)
def pruned_each_epoch() -> Run:
    """Lightning's callback, with its defaults: it keeps what the weights were."""
    pruning = pl.callbacks.ModelPruning("l1_unstructured", amount=0.3)
    return Run(classifier(lambda: mlp(64, 1024)), vectors(64), {"max_epochs": 3, "callbacks": [pruning]})


# Optimizers -----------------------------------------------------------------------------------------------------------


def trained_by(optimizer: MakeOptimizer) -> Run:
    return Run(classifier(lambda: mlp(64, 384), optimizer), vectors(64))


@pattern("schedulefree", sizes=(16, 64))
def schedule_free() -> Run:
    import schedulefree

    class Free(Step):
        def on_train_epoch_start(self) -> None:
            self.optimizers().train()

    return Run(lambda: Free(mlp(64, 384), classify, lambda p: schedulefree.AdamWScheduleFree(p, lr=1e-3)), vectors(64))


@pattern("lion-pytorch", sizes=(16, 64))
def lion() -> Run:
    from lion_pytorch import Lion

    return trained_by(lambda p: Lion(p, lr=1e-4))


@pattern("pytorch-optimizer", sizes=(16, 64))
def sharpness_aware() -> Run:
    """Two passes a step, by hand."""
    from pytorch_optimizer import SAM

    class Sharp(Step):
        def __init__(self) -> None:
            super().__init__(mlp(64, 384), classify)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers(use_pl_optimizer=False)
            self.manual_backward(self.loss(self.network, batch))
            optimizer.first_step(zero_grad=True)
            self.manual_backward(self.loss(self.network, batch))
            optimizer.second_step(zero_grad=True)

        def configure_optimizers(self) -> Any:
            return SAM(self.network.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    return Run(Sharp, vectors(64))


@pattern("torch-optimizer", sizes=(16, 64))
def adahessian() -> Run:
    """Second derivatives: the backward pass keeps its graph."""
    from torch_optimizer import Adahessian

    class Hessian(Step):
        def __init__(self) -> None:
            super().__init__(mlp(64, 384), classify)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(self.network, batch), create_graph=True)
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return Adahessian(self.network.parameters(), lr=0.1)

    return Run(Hessian, vectors(64))


@pattern("bitsandbytes", sizes=(16, 64))
def adamw_8bit() -> Run:
    from bitsandbytes.optim import AdamW8bit

    return trained_by(lambda p: AdamW8bit(p, lr=1e-3))
