"""Train on texts of which a few are very long, with a batch size that suits the others.

The batch size is the user's own, and was chosen by looking at ordinary texts. A limit on the data of the process
stands for a GPU that is full: in a few batches the activations do not fit. MemGuard predicts these batches before they
run, and keeps what does not fit of their activations in a temporary file until the backward pass.

    python examples/long_tail.py                      # trains to the end: under a minute on two cores
    python examples/long_tail.py --offload never      # ends with the error and a note
    python examples/long_tail.py --late --without     # without MemGuard, and the only long text comes at step 3,000
"""

from __future__ import annotations

import argparse
import random
import resource
from collections.abc import Sequence
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_memguard import MemGuard

WORDS = 500
BATCH = 32
LATE = 3000  # the step whose batch has a long text
ROOM = 120 << 20  # bytes that the training may take


class Texts(Dataset[tuple[Tensor, int]]):
    """Numbers for words; the class is whether the text begins with one of the first half of all words."""

    def __init__(self, count: int, *, late: bool = False) -> None:
        numbers = random.Random(3)
        lengths = [min(400, max(4, round(numbers.lognormvariate(3.7, 0.7)))) for _ in range(count)]
        if late:
            lengths = [min(length, 24) for length in lengths]
            lengths[BATCH * LATE] = 400
        self.texts = [torch.tensor([numbers.randrange(1, WORDS) for _ in range(length)]) for length in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        text = self.texts[index]
        return text, int(text[0] < WORDS // 2)


def pad(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return pad_sequence([text for text, _ in items], batch_first=True), torch.tensor([label for _, label in items])


class Classifier(pl.LightningModule):
    """Attention takes memory by the square of the longest text in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32, padding_idx=0)
        self.layers, self.head = nn.ModuleList(nn.Linear(32, 96) for _ in range(6)), nn.Linear(32, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        texts, labels = batch
        state = self.embedding(texts)
        for layer in self.layers:
            query, key, value = layer(state).chunk(3, dim=-1)
            scores = (query @ key.mT).masked_fill((texts == 0).unsqueeze(1), -1e9)
            state = state + torch.softmax(scores, dim=-1) @ value
        loss = F.cross_entropy(self.head(state[:, 0]), labels)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class Limit(pl.Callback):
    """Limits the memory of this process once the training starts."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        status = Path("/proc/self/status").read_text()
        used = int(status.partition("VmData:")[2].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (used + ROOM, resource.RLIM_INFINITY))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="in an epoch")
    parser.add_argument("--offload", choices=["if_needed", "always", "never"], default="if_needed")
    parser.add_argument("--late", action="store_true", help=f"one epoch, whose only long text comes at step {LATE}")
    parser.add_argument("--without", action="store_true", help="train without MemGuard")
    options = parser.parse_args(arguments)
    steps, epochs = (LATE + 10, 1) if options.late else (options.steps, 2)
    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)  # each thread reserves address space of its own
    guard = MemGuard(offload=options.offload, budget=ROOM if options.late else None)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Limit()] if options.without else [guard, Limit()],
    )
    trainer.fit(Classifier(), DataLoader(Texts(BATCH * steps, late=options.late), BATCH, collate_fn=pad))
    for record in guard.records:
        print(f"Epoch {record.epoch}: {record.offloaded} of {steps} steps with activations in a file")
    print(f"Loss {float(trainer.callback_metrics['loss_epoch']):.3f}")


if __name__ == "__main__":
    main()
