"""Which blocks to checkpoint so that a step just fits: memory by replay and by the profiler, and what is recomputed.

    python benchmarks/checkpointing.py     # a ResNet-50 and a GPT-2, three budgets each; torchvision, transformers

The budgets are a quarter, half and three quarters of the way from "all" to "none". Of the degrees that MemGuard
proposes for one, by group of blocks, the mildest that fits in a replay is taken. Each step runs for real on the CPU, in
a Trainer under PyTorch's profiler. Recomputed: the step's FLOPs beyond those of "none", by those of "all".
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard.core.capture.predict import predict
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.training.planning.remedies import Remedy, families_for
from lightning_memguard.training.planning.subject import program_of, subject_of
from lightning_memguard.training.planning.target import target_of
from shared.truth import QUIET, peak_of, profiled, quieten


def flops(footprint: Footprint) -> float:
    return sum(each.flops * each.calls for each in footprint.timing.work)


class Net(pl.LightningModule):
    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, list[torch.Tensor]], torch.Tensor]) -> None:
        super().__init__()
        self.net, self.loss, self.changes = net, loss, ()

    def configure_model(self) -> None:
        for change in self.changes:
            change(self)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def resnet50() -> tuple[Net, list[torch.Tensor]]:
    from torchvision.models import resnet50 as make

    net = Net(make(), lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]))
    return net, [torch.randn(8, 3, 96, 96), torch.randint(1000, (8,))]


def gpt2() -> tuple[Net, list[torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=4096, n_embd=256, n_head=4, n_layer=12, n_positions=128)
    net = Net(GPT2LMHeadModel(config), lambda net, batch: net(input_ids=batch[0], labels=batch[0]).loss)
    return net, [torch.randint(4096, (8, 128))]


def measured(make: Callable[[], tuple[Net, list[torch.Tensor]]], changes: tuple[Any, ...]) -> int:
    """The peak of a real fit of three steps."""
    batch = make()[1]
    loader = DataLoader(TensorDataset(*(each.repeat(3, *[1] * (each.dim() - 1)) for each in batch)), len(batch[0]))

    def train() -> None:
        module = make()[0]
        module.changes = changes
        pl.Trainer(accelerator="cpu", max_steps=3, **QUIET).fit(module, loader)

    return peak_of(profiled(train))[1]


def rows(make: Callable[[], tuple[Net, list[torch.Tensor]]]) -> Iterator[tuple[str, str, Footprint, tuple[Any, ...]]]:
    module, batch = make()
    program = program_of(subject_of(module, batch), target_of("cpu"))
    settings, size = AllocatorSettings.for_device("cpu", {}), len(batch[0])

    def with_it(remedy: Remedy | None) -> tuple[Footprint, tuple[Any, ...]]:
        changed = remedy.apply(program) if remedy else program
        return predict(changed, size, settings, scalable=False).footprint_at(size), changed.changes

    none = predict(program, size, settings, scalable=False)
    groups = [family for family in families_for(none, size) if family[0].kind == "checkpointing"]
    least = min((with_it(family[-1]) for family in groups), key=lambda each: each[0].peak_allocated_bytes)
    yield "", "none", none.footprint_at(size), ()
    most_bytes, least_bytes = (each.peak_allocated_bytes for each in (none.footprint_at(size), least[0]))
    for share in (0.25, 0.5, 0.75):
        budget = int(least_bytes + share * (most_bytes - least_bytes))
        fitting = []
        for degrees in [each for each in families_for(none, size, budget) if each[0].kind == "checkpointing"]:
            tried = ((remedy, *with_it(remedy)) for remedy in degrees)
            fitting += [*itertools.islice((each for each in tried if each[1].peak_allocated_bytes <= budget), 1)]
        remedy, *found = min(fitting, key=lambda each: flops(each[1]))
        yield f"{budget / 2**20:.1f} MiB", remedy.name.removeprefix("activation checkpointing of "), *found
    yield "", "all", *least


def main() -> None:
    quieten()
    print("| model | budget | checkpointed | by replay | by the profiler | recomputed |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for name in sys.argv[1:] or ["resnet50", "gpt2"]:
        found = [*rows(globals()[name])]
        least, most = flops(found[0][2]), flops(found[-1][2])
        for budget, blocks, footprint, changes in found:
            mine, theirs = footprint.peak_allocated_bytes, measured(globals()[name], changes)
            again = (flops(footprint) - least) / (most - least)
            print(f"| {name} | {budget} | {blocks} | {mine:,} | {theirs:,} ({mine / theirs - 1:+.2%}) | {again:.0%} |")


if __name__ == "__main__":
    main()
