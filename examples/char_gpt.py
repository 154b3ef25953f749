"""Train a small GPT to write Python, character by character, at the batch size that MemGuard chooses.

It trains on the source of Python's standard library, so nothing is downloaded.

    python examples/char_gpt.py                                   # about a minute on two cores
    python examples/char_gpt.py --steps 500                       # nearly one pass over the text: five minutes
    python examples/char_gpt.py --device cuda --budget 2GiB

Here the batch size belongs to a LightningDataModule, and the learning rate schedule is as long as the training.
MemGuard chooses before either is used: the loader is created with the chosen size, and
`trainer.estimated_stepping_batches` already includes it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_memguard import MemGuard

CONTEXT = 128  # characters the model sees at once
CHARACTERS = 4_000_000  # of the standard library's source


def standard_library_text() -> str:
    """The first CHARACTERS of the top-level modules of the standard library, without their few non-ASCII characters."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return "".join(file.read_text(encoding="ascii", errors="ignore") for file in files)[:CHARACTERS]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of CONTEXT characters, each with the window one character later as the target."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


class SourceCode(pl.LightningDataModule):
    """The standard library as windows of characters."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()  # MemGuard sets `hparams.batch_size`, and the logger records the chosen size
        text = standard_library_text()
        self.vocabulary = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.vocabulary)}
        self.windows = Windows(torch.tensor([numbers[character] for character in text]))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.windows, batch_size=self.hparams["batch_size"], shuffle=True)


class Block(nn.Module):
    """Causal attention, then a feedforward layer for each character."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feedforward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        return x + self.feedforward(self.feedforward_norm(x))

    def _attend(self, x: Tensor) -> Tensor:
        heads = self.queries_keys_values(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(*heads.unbind(2), dropout_p=dropout, is_causal=True)
        return self.projection(attended.transpose(1, 2).flatten(2))


class CharGPT(pl.LightningModule):
    """A GPT over characters."""

    def __init__(
        self,
        vocabulary_size: int,
        *,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.1,
        learning_rate: float = 5e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.characters = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary_size)

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.characters(text) + self.positions(positions))))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        text, following = batch
        loss = F.cross_entropy(self(text).flatten(0, 1), following.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        rate = self.hparams["learning_rate"]
        optimizer = torch.optim.AdamW(self.parameters(), lr=rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.inference_mode()
    def write(self, start: Sequence[int], length: int) -> list[int]:
        """Continue from ``start`` for ``length`` characters, sampling each by its probability."""
        was_training = self.training
        self.eval()
        generator = torch.Generator().manual_seed(0)
        text = torch.tensor([start])
        for _ in range(length):
            probabilities = self(text[:, -CONTEXT:])[:, -1].softmax(dim=-1)
            text = torch.cat([text, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
        self.train(was_training)  # a model in eval mode would train without dropout, and take less memory
        return text[0].tolist()


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    pl.seed_everything(0)
    data = SourceCode()
    model = CharGPT(len(data.vocabulary))

    print_sample("Before", model, data.vocabulary)
    trainer = pl.Trainer(
        # however many samples its steps then see: `max_steps` would keep the batch size otherwise
        callbacks=[MemGuard(budget=options.budget, batch_size="largest", min_steps_per_epoch=None)],
        accelerator=options.device,
        devices=1,
        max_epochs=1,
        max_steps=options.steps,
        gradient_clip_val=1.0,
        logger=False,  # no logs, see quickstart.py for those; MemGuard writes its report to the folder memguard/
        enable_checkpointing=False,
    )
    trainer.fit(model, datamodule=data)
    print(f"\nLoss after {trainer.global_step} steps: {float(trainer.callback_metrics['loss']):.2f}")
    print_sample("After", model, data.vocabulary)


def print_sample(title: str, model: CharGPT, vocabulary: Sequence[str], start: str = "def ", length: int = 240) -> None:
    numbers = model.write([vocabulary.index(character) for character in start], length)
    print(f"\n{title}:\n" + "".join(vocabulary[number] for number in numbers) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="512MiB", help="memory the training may take (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=100, help="number of steps, if the text is long enough (default: %(default)s)"
    )
    parser.add_argument(
        "--device", default="cpu", help="the Trainer's accelerator, such as cpu or cuda (default: %(default)s)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
