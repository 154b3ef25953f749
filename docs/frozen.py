"""Train the head of a network whose convolutions are frozen, in bfloat16: a training of the gallery."""

from __future__ import annotations

from itertools import pairwise

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard


class FrozenBackbone(pl.LightningModule):
    """Four convolutions that have learned already, and a head that has not."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 32, 64, 64, 128]
        layers = [(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU()) for a, b in pairwise(sizes)]
        self.backbone = nn.Sequential(*(layer for pair in layers for layer in pair)).requires_grad_(False)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(128 * 4 * 4, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch of images."""
        images, labels = batch
        return F.cross_entropy(self.head(self.backbone(images)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the head."""
        return torch.optim.AdamW(self.head.parameters())


if __name__ == "__main__":
    data = TensorDataset(torch.rand(4000, 3, 64, 64), torch.randint(10, (4000,)))
    pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=0.25,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[MemGuard(batch_size="largest", budget="192MiB", min_steps_per_epoch=10)],
    ).fit(FrozenBackbone(), DataLoader(data, 16))
