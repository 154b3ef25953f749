"""Predict the memory of a step in Hugging Face's own Trainer, and compare it with what the fit takes.

The model has random weights, and nothing is downloaded. (`pip install transformers accelerate`)

    python examples/hf_trainer.py                  # trains on the CPU, or on the GPU that is there
    python examples/hf_trainer.py --budget 100MiB  # too little: saved activations go to the host, for the same step

A model by its name, for a GPU that is not there:

    memguard plan --hf meta-llama/Llama-3.1-8B --lora r=16 --nf4 --seq 2048 --checkpointing --device "RTX 4090"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lightning_memguard.training.hf.callback import MemGuardCallback

LENGTH = 128  # tokens
SIZES = LlamaConfig(
    vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, use_cache=False
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", help="memory that the training may take, such as 8GiB (default: what is free)")
    parser.add_argument("--batch-size", type=int, default=8, help="texts of a step (default: %(default)s)")
    options = parser.parse_args(arguments)
    tokens = torch.randint(SIZES.vocab_size, (64, LENGTH))
    texts = [{"input_ids": text, "labels": text} for text in tokens]
    settings = TrainingArguments(
        "hf_trainer",
        num_train_epochs=1,
        per_device_train_batch_size=options.batch_size,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    guard = MemGuardCallback(budget=options.budget)
    trainer = Trainer(LlamaForCausalLM(SIZES), settings, train_dataset=texts, callbacks=[guard])
    print(f"Trained {trainer.train().global_step} steps at batch size {options.batch_size}.")


if __name__ == "__main__":
    main()
