"""Optimizers of libraries: what they keep for each parameter, and what a step takes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from field.own import Gpt
from field.pattern import Run, Step, classifier, classify, mlp, next_token, pattern, tokens, vectors

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


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


@pattern("pytorch-optimizer", sizes=(4, 16))
def library_muon() -> Run:
    from pytorch_optimizer import Muon

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        return Muon(
            [
                {"params": [p for p in parameters if p.ndim == 2], "use_muon": True},
                {"params": [p for p in parameters if p.ndim != 2], "use_muon": False},
            ],
            lr=1e-3,
        )

    return Run(lambda: Step(Gpt(depth=2), next_token, optimizer), tokens(64))


@pattern("pytorch-optimizer", sizes=(16, 64))
def shampoo() -> Run:
    from pytorch_optimizer import Shampoo

    return trained_by(lambda p: Shampoo(p, lr=1e-3))


@pattern("pytorch-optimizer", sizes=(16, 64))
def adafactor_and_lookahead() -> Run:
    from pytorch_optimizer import AdaFactor, Lookahead

    return trained_by(lambda p: Lookahead(AdaFactor(p, lr=1e-3), k=2))


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
def torch_optimizer_adabelief() -> Run:
    from torch_optimizer import AdaBelief

    return trained_by(lambda p: AdaBelief(p, lr=1e-3))


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
