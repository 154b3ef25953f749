"""Epochs of mixed lengths on the CPU, where nothing is cached: the peak by the profiler next to the predicted range.

Five models are trained by a real Trainer on twelve batches of mixed lengths, each with four orders of lengths. Before,
`estimate(module, lengths=..., device="cpu")` predicts the peak from one batch, repeated or cut to the longest, or from
a function of the length. No states exist yet in an epoch's first step: its peak is lower where the longest comes first.

    python benchmarks/epochs_cpu.py     # a minute on one core
"""

import random
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from length_grid import LSTM, Encoder, label, own_token
from lengths import Module, Points, Speech, Text
from lightning_memguard import estimate
from shared.truth import QUIET, peak_of, profiled, quieten

MIB = 2**20
BATCHES, SAMPLES = 12, 8


class With(Module):
    """Trains a model by a loss of a batch."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        super().__init__(model)
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(self.model, batch)


class Made(Dataset[Any]):
    """Batches that are made when they are asked for."""

    def __init__(self, batch_at: Callable[[int], Any], lengths: list[int]) -> None:
        self.batch_at, self.lengths = batch_at, lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, place: int) -> Any:
        return self.batch_at(self.lengths[place])


def ids(at: int) -> torch.Tensor:
    return torch.arange(SAMPLES * at).view(SAMPLES, at) % 400


CASES: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[int], Any], int]] = {
    "text": (lambda: Module(Text()), ids, 400),
    "speech": (lambda: Module(Speech()), lambda at: torch.ones(SAMPLES, 80, at), 800),
    "sets": (lambda: Module(Points()), lambda at: torch.ones(SAMPLES, at, 8), 600),
    "LSTM": (lambda: With(LSTM(packed=False), own_token), lambda at: (ids(at), torch.full((SAMPLES,), at)), 200),
    "encoder with a mask": (
        lambda: With(Encoder(), label),
        lambda at: {"input_ids": ids(at), "attention_mask": torch.ones_like(ids(at)), "labels": torch.arange(8) % 2},
        400,
    ),
}


def main() -> None:
    torch.set_num_threads(1)
    quieten()
    inside = 0
    for name, (module, batch_at, longest) in CASES.items():
        for seed in range(4):
            draw = random.Random(seed)
            lengths = [draw.randint(8, longest) for _ in range(BATCHES)]
            example = batch_at if name == "speech" else batch_at(lengths[0])  # speech has channels first
            found = estimate(module(), example, device="cpu", lengths=lengths)
            loader = DataLoader(Made(batch_at, lengths), batch_size=None)
            trainer = {"accelerator": "cpu", "max_epochs": 1, **QUIET}

            def fit(module: Any = module, trainer: Any = trainer, loader: Any = loader) -> None:
                torch.manual_seed(0)
                pl.Trainer(**trainer).fit(module(), loader)

            peak = peak_of(profiled(fit))[1]
            low, high = found.lowest.allocated_bytes, found.highest.allocated_bytes
            inside += low <= peak <= high
            print(
                f"{name:20} {min(lengths):3}..{max(lengths):3}  predicted {found.peak_allocated_bytes / MIB:7.2f} MiB, "
                f"range {low / MIB:7.2f} to {high / MIB:7.2f} ({(high - low) / peak:.2%} wide), "
                f"measured {peak / MIB:7.2f} ({found.peak_allocated_bytes - peak:+,} bytes)",
                flush=True,
            )
    print(f"{inside} of {4 * len(CASES)} inside the range")


if __name__ == "__main__":
    main()
