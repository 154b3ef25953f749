"""Train a small digit classifier twice: at its own batch size, made to fit, and at the largest that fits.

The data are 1,797 handwritten digits that come with scikit-learn: nothing is downloaded, no GPU is needed, and it takes
about a minute on two cores. In a clone, `make demo` runs it; elsewhere, install
MemGuard and scikit-learn, then:

    python quickstart.py                      # a budget of 256 MiB
    python quickstart.py --batch-size 256     # does not fit: divided, with accumulated gradients
    python quickstart.py --budget 1GiB        # larger batches, and fewer steps per epoch
    python quickstart.py --budget 2MiB        # not enough for a single digit: an error reports it

MemGuard needs two lines: `guard = MemGuard(...)` and `callbacks=[guard]`. In your own training, leave `budget` out:
MemGuard then uses what the device has free.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_memguard import EpochRecord, MemGuard

SIDE = 48  # pixels; the digits come as 8 x 8, too small for a convolution's activations to matter

# On a CPU, "measured" is how far the memory of the whole process rises: the tensors, and some 5 to 15 MiB that Python
# and PyTorch use while they run. That is about 4 % of 256 MiB, and about 10 % of 64 MiB.
BUDGET = "256MiB"


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Handwritten digits, each resized to SIDE x SIDE on access."""

    def __init__(self, *, train: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
        self.images = torch.tensor(parts[0 if train else 1], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        self.labels = torch.tensor(parts[2 if train else 3])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = F.interpolate(self.images[index].unsqueeze(0), size=(SIDE, SIDE), mode="bilinear")
        return image.squeeze(0), self.labels[index]


class DigitClassifier(pl.LightningModule):
    """Two convolutions with batch norm, then a linear layer."""

    def __init__(self, learning_rate: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Conv2d(1, 64, kernel_size=5, padding=2, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(6),  # 48 x 48 -> 8 x 8
            nn.Conv2d(64, 64, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(64 * 4 * 4, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        correct = (self(images).argmax(dim=1) == labels).float().mean()
        self.log("val/accuracy", correct, prog_bar=True)  # Lightning averages over the batches

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["learning_rate"])


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    print("MemGuard(): your batch size, made to fit; nothing else changes\n", flush=True)
    train(MemGuard(budget=options.budget), options)
    print('\nMemGuard(batch_size="largest"): the largest that fits\n', flush=True)
    # A training that matters keeps 50 steps an epoch, the default; here, the largest batch is to be seen.
    train(MemGuard(batch_size="largest", min_steps_per_epoch=None, budget=options.budget), options)
    print("\nTo view the logs, run this and open the address that it prints:")
    print(f"    {tensorboard()} --logdir {options.logdir}")


def train(guard: MemGuard, options: argparse.Namespace) -> None:
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        callbacks=[guard],
        max_epochs=options.epochs,
        accelerator="cpu",
        logger=TensorBoardLogger(options.logdir, name="digits", default_hp_metric=False),
        log_every_n_steps=1,
    )
    trainer.fit(
        DigitClassifier(),
        train_dataloaders=DataLoader(Digits(train=True), batch_size=options.batch_size, shuffle=True),
        val_dataloaders=DataLoader(Digits(train=False), batch_size=16),  # keeps its size
    )

    print(f"\nAccuracy on unseen digits: {float(trainer.callback_metrics['val/accuracy']):.1%}")
    print_records(guard.records)


def print_records(records: Sequence[EpochRecord]) -> None:
    """Predicted and measured memory of every epoch: the same numbers as in TensorBoard."""
    print("\nepoch  batch size  predicted   measured   error")
    for record in records:
        predicted_mib = record.predicted.peak_device_bytes / 2**20
        measured_mib = record.measured.peak_bytes / 2**20
        print(
            f"{record.epoch:5}  {record.batch_size:10}  {predicted_mib:5.0f} MiB  {measured_mib:5.0f} MiB  "
            + (f"{record.error_ratio:+6.1%}" if record.has_error else "")
        )


def tensorboard() -> Path:
    """The command of the TensorBoard in this environment."""
    program = Path(sys.executable).with_name("tensorboard")
    return program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default=BUDGET, help="memory the training may take (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="of the loader (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the data (default: %(default)s)")
    parser.add_argument("--logdir", default="lightning_logs", help="folder of the logs (default: %(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
