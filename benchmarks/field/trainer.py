"""What the Trainer itself can do: averages of weights, several loaders, truncated backpropagation, schedules."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from pytorch_lightning.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from field.own import Gpt
from field.pattern import (
    Run,
    Samples,
    Step,
    adam,
    classifier,
    classify,
    data,
    images,
    mlp,
    next_token,
    pattern,
    tokens,
    vectors,
)


@pattern(sizes=(16, 64))
def stochastic_weight_averaging() -> Run:
    return Run(
        classifier(lambda: mlp(64, 384)),
        vectors(64),
        {"callbacks": [StochasticWeightAveraging(1e-3, swa_epoch_start=1)], "max_epochs": 3},
    )


@pattern(sizes=(16, 64))
def averaged_model() -> Run:
    class Averaged(Step):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.average = torch.optim.swa_utils.AveragedModel(
                self.network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
            )

        def on_train_batch_end(self, *_: Any) -> None:
            self.average.update_parameters(self.network)

        def configure_optimizers(self) -> Any:
            return adam(self.network.parameters())

    return Run(lambda: Averaged(mlp(64, 384), classify), vectors(64))


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


@pattern(sizes=(8, 32), steps=4)
def accumulation_and_clipping() -> Run:
    return Run(
        lambda: Step(Gpt(depth=2), next_token), tokens(64), {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    )


@pattern(sizes=(16, 64), steps=4)
def accumulation_schedule() -> Run:
    return Run(
        classifier(lambda: mlp(64, 384)),
        vectors(64),
        {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})], "max_epochs": 2},
    )


class Stream(IterableDataset):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[i] for i in range(len(self.samples)))


@pattern(sizes=(16, 64))
def unsized_stream() -> Run:
    """An IterableDataset without a length, limited by the Trainer."""
    samples = [(torch.randn(3, 32, 32), i % 10) for i in range(64)]
    return Run(
        classifier(lambda: nn.Sequential(nn.Flatten(), mlp(3 * 1024, 64))),
        lambda batch_size, batches: DataLoader(
            Stream(Samples(samples, 2 * batch_size * batches)), batch_size=batch_size
        ),
    )


@pattern(sizes=(16, 64))
def two_loaders() -> Run:
    """Labeled and unlabeled images in one step."""

    def loss(network: nn.Module, batch: Any) -> Tensor:
        labeled, unlabeled = batch["labeled"], batch["unlabeled"]
        target = network(unlabeled[0]).softmax(-1).detach()
        noisy = network(unlabeled[0] + 0.1 * torch.randn_like(unlabeled[0]))
        return F.cross_entropy(network(labeled[0]), labeled[1]) + F.cross_entropy(noisy, target)

    one, two = images(32), images(32)
    return Run(
        lambda: Step(nn.Sequential(nn.Flatten(), mlp(3 * 1024, 64)), loss),
        lambda batch_size, batches: {"labeled": one(batch_size, batches), "unlabeled": two(2 * batch_size, batches)},
    )


@pattern(sizes=(16, 64))
def metrics_and_validation() -> Run:
    class Measured(Step):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)
            self.area = torchmetrics.AUROC("multiclass", num_classes=10, thresholds=20)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self.network(batch[0])
            self.log("accuracy", self.accuracy(logits, batch[1]), on_step=True, on_epoch=True)
            self.area.update(logits.softmax(-1), batch[1])
            self.log("area", self.area, on_step=False, on_epoch=True)
            return F.cross_entropy(logits, batch[1])

    return Run(lambda: Measured(mlp(64, 384), None), vectors(64))


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


@pattern(sizes=(16, 64))
def double_precision() -> Run:
    return Run(classifier(lambda: mlp(64, 384)), vectors(64), {"precision": "64-true"})


@pattern(sizes=(4, 16))
def bf16_mixed_convolutions() -> Run:
    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, 1, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )

    return Run(classifier(network), images(32), {"precision": "bf16-mixed"})


@pattern(sizes=(16, 64))
def gradient_hooks_and_logging() -> Run:
    """Norms of all gradients are logged at each step."""

    class Logged(Step):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = {f"norm/{n}": p.grad.norm() for n, p in self.named_parameters() if p.grad is not None}
            self.log_dict(norms)

    return Run(lambda: Logged(mlp(64, 384), classify), vectors(64), {"gradient_clip_val": 1.0})
