"""Train on texts of which a few are very long, with a batch size that suits the others.

The batch size is the user's own, and was chosen by looking at ordinary texts. A limit on the address space (Linux)
stands for a GPU that is full: in a few batches the forward or the backward pass really runs out of memory. MemGuard
does these steps again in parts of their batch, with the same gradients, and the run goes on.

    python examples/long_tail.py                      # rescued: under a minute on two cores
    python examples/long_tail.py --on-oom raise       # ends with the error and a note
"""

from __future__ import annotations

import argparse
import random
import resource
from collections.abc import Sequence

import psutil
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_memguard import MemGuard

WORDS = 500
BATCH = 32
ROOM = 90 << 20  # bytes that the training may take


class Texts(Dataset[tuple[Tensor, int]]):
    """Numbers for words; the class is whether the text begins with one of the first half of all words."""

    def __init__(self, count: int) -> None:
        numbers = random.Random(3)
        lengths = [min(700, max(4, round(numbers.lognormvariate(3.7, 0.8)))) for _ in range(count)]
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
        self.attention, self.head = nn.Linear(32, 96), nn.Linear(32, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        texts, labels = batch
        query, key, value = self.attention(self.embedding(texts)).chunk(3, dim=-1)
        scores = (query @ key.mT).masked_fill((texts == 0).unsqueeze(1), -1e9)
        loss = F.cross_entropy(self.head((torch.softmax(scores, dim=-1) @ value)[:, 0]), labels)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Limit(pl.Callback):
    """Limits the memory of this process once the training starts."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="in an epoch")
    parser.add_argument("--on-oom", choices=["split", "raise"], help="default: split where it is the same step")
    options = parser.parse_args(arguments)
    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)  # each thread reserves address space of its own
    guard = MemGuard(max_batch_size=BATCH, on_oom=options.on_oom)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[guard, Limit()],
    )
    trainer.fit(Classifier(), DataLoader(Texts(BATCH * options.steps), BATCH, collate_fn=pad))
    for record in guard.records:
        print(f"Epoch {record.epoch}: {record.rescued} of {options.steps} steps rescued")
    print(f"Loss {float(trainer.callback_metrics['loss_epoch']):.3f}")


if __name__ == "__main__":
    main()
