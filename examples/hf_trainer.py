"""Find the batch size for Hugging Face's Trainer before it starts, with `estimate`. Nothing is downloaded.

`estimate` takes any module, with a function for its loss and one for its optimizer: here the model's own loss, and the
optimizer that the Trainer will create from its arguments. (`pip install transformers accelerate`)

    python examples/hf_trainer.py                              # trains on the CPU within 256 MiB
    python examples/hf_trainer.py --device "RTX 4090" --budget 22GiB  # plans for a GPU that is not there
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lightning_memguard import Footprint, estimate
from lightning_memguard.units import format_bytes, parse_bytes

LENGTH = 128  # tokens
SIZES = LlamaConfig(
    vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, use_cache=False
)


def predict(
    model: nn.Module, batch: dict[str, Tensor], size: int, settings: TrainingArguments, device: str
) -> Footprint:
    """Predict the memory of one step of the Trainer."""
    make, options = Trainer.get_optimizer_cls_and_kwargs(settings)

    def step(network: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return network(**inputs).loss

    optimizer = functools.partial(make, **options)
    return estimate(model, batch, batch_size=size, step=step, optimizer=optimizer, device=device)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or a GPU by name (default: %(default)s)")
    parser.add_argument("--budget", default="256MiB", help="memory that a step may take (default: %(default)s)")
    options = parser.parse_args(arguments)
    budget = parse_bytes(options.budget)
    settings: dict[str, Any] = {"output_dir": "hf_trainer", "max_steps": 3, "report_to": "none", "save_strategy": "no"}
    settings |= {"use_cpu": options.device == "cpu", "disable_tqdm": True}
    model = LlamaForCausalLM(SIZES)
    tokens = torch.randint(SIZES.vocab_size, (512, LENGTH))
    texts = [{"input_ids": text, "labels": text} for text in tokens]

    batch = {"input_ids": tokens[:4], "labels": tokens[:4]}
    size, fits = 0, None
    for larger in (2**power for power in range(1, 16)):
        footprint = predict(model, batch, larger, TrainingArguments(**settings), options.device)
        if footprint.most_device_bytes > budget:
            break
        size, fits = larger, footprint
    if fits is None:
        raise SystemExit(f"Not even two texts fit into {options.budget}.")
    peak = format_bytes(fits.peak_device_bytes)
    print(f"Batch size {size}: a predicted peak of {peak} on {options.device}, within {options.budget}.")
    if options.device == "cpu":
        trainer = Trainer(model, TrainingArguments(**settings, per_device_train_batch_size=size), train_dataset=texts)
        print(f"Trained {trainer.train().global_step} steps at batch size {size}.")


if __name__ == "__main__":
    main()
