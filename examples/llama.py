"""Plan the training of a Llama-shaped model for GPUs that you do not have. Nothing is downloaded or allocated.

The model is Hugging Face's `LlamaForCausalLM`, built from its configuration (`pip install transformers`). The default
is the size of a Llama 3.2 1B, 1.2 billion parameters.

    memguard plan examples/llama.py:Llama --datamodule examples/llama.py:Tokens --precision bf16-true \\
        --device T4 --device "RTX 3090" --device "RTX 4090" --device "A100 80GB" --device H100 --advise

Set any other size with `--args`, such as `--args hidden_size=4096 layers=32 heads=32 key_value_heads=32
intermediate_size=11008 vocabulary_size=32000 tied=False` for a Llama 2 7B; and any other batch with `--data-args`,
or without the datamodule:

    memguard plan examples/llama.py:Llama --input input_ids=4,2048:int64 --input labels=4,2048:int64 --device H100

Run as a script, it prints the memory of a step on one GPU at a few text lengths:

    python examples/llama.py --device H100
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memguard import estimate

GIB = 1 << 30


class Llama(pl.LightningModule):
    """A Llama of any size, trained to predict the next token."""

    def __init__(
        self,
        *,
        vocabulary_size: int = 128_256,
        hidden_size: int = 2048,
        intermediate_size: int = 8192,
        layers: int = 16,
        heads: int = 32,
        key_value_heads: int = 8,
        tied: bool = True,
        checkpointing: bool = False,
        learning_rate: float = 2e-5,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        sizes = LlamaConfig(
            vocab_size=vocabulary_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            tie_word_embeddings=tied,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(sizes)
        if checkpointing:
            self.model.gradient_checkpointing_enable()

    def forward(self, **batch: Tensor) -> Tensor:
        return self.model(**batch).logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens: their memory does not depend on their values."""

    def __init__(self, texts: int, length: int, vocabulary_size: int) -> None:
        self.texts, self.length, self.vocabulary_size = texts, length, vocabulary_size

    def __len__(self) -> int:
        return self.texts

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocabulary_size, (self.length,), generator=generator)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


class Tokens(pl.LightningDataModule):
    """Batches as a tokenizer and Hugging Face's collator would return them."""

    def __init__(
        self, batch_size: int = 1, length: int = 1024, vocabulary_size: int = 128_256, texts: int = 100_000
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.texts = Texts(texts, length, vocabulary_size)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.texts, batch_size=self.hparams["batch_size"], shuffle=True)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with torch.device("meta"):  # a model without memory: a billion parameters on a laptop
        model = Llama(layers=options.layers)
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters, bf16-true, on {options.device}:")
    for length in options.lengths:
        tokens = torch.empty(1, length, dtype=torch.int64, device="meta")
        batch = {"input_ids": tokens, "labels": tokens}
        footprint = estimate(model, batch, device=options.device, precision="bf16-true")
        peak = footprint.peak_device_bytes / GIB
        print(f"  {length:6} tokens: {peak:6.1f} GiB, most of it {footprint.largest_part.replace('_', ' ')}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="H100", help="a GPU by name, present or not (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=16, help="number of layers (default: %(default)s)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 2048], help="tokens per text (default: 512 2048)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
