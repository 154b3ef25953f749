"""Time and memory of the process that predicts large models for a GPU that is not there.

The models' definitions are real; their weights are never allocated. Needs torchvision and transformers; needs no GPU.

    python benchmarks/large.py             # ResNet-50, BERT-large, GPT-2 small and a Llama 7B, each in its own process
    python benchmarks/large.py llama_7b    # one of them, in this process
"""

import argparse
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_memguard import estimate
from lightning_memguard.units import format_bytes

GPU = "NVIDIA H200"
GOALS = {"resnet50": 3, "bert_large": 5, "gpt2_small": 4, "llama_7b": 15}  # seconds


def resnet50() -> tuple[nn.Module, Any, Callable[[Any, Any], Any]]:
    import torchvision

    batch = torch.empty(32, 3, 224, 224), torch.empty(32, dtype=torch.long)
    return torchvision.models.resnet50(), batch, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])


def bert_large() -> tuple[nn.Module, Any, Callable[[Any, Any], Any]]:
    import transformers

    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return transformers.BertForMaskedLM(config), tokens(8, 512), language_model


def gpt2_small() -> tuple[nn.Module, Any, Callable[[Any, Any], Any]]:
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config()), tokens(8, 1024), language_model


def llama_7b() -> tuple[nn.Module, Any, Callable[[Any, Any], Any]]:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig()), tokens(1, 2048), language_model


def tokens(samples: int, length: int) -> torch.Tensor:
    return torch.empty(samples, length, dtype=torch.long)


def language_model(model: Any, batch: Any) -> Any:
    return model(input_ids=batch, labels=batch).loss


MODELS = {build.__name__: build for build in (resnet50, bert_large, gpt2_small, llama_7b)}


def predict(name: str) -> None:
    """Build one model on the meta device, and predict its step with AdamW."""
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        model, batch, step = MODELS[name]()
    model.train()
    started = time.perf_counter()
    found = estimate(model, batch, step=step, optimizer=torch.optim.AdamW, device=GPU)
    seconds = time.perf_counter() - started
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)
    print(
        f"{name:<12}{seconds:>6.1f} s (goal {GOALS[name]:>2}){format_bytes(resident):>12} resident"
        f"{format_bytes(found.peak_allocated_bytes):>12} allocated"
        f"{format_bytes(found.peak_reserved_bytes):>12} reserved"
        f"  in {found.phase} at {found.operator} ({found.method})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=MODELS)
    arguments = parser.parse_args()
    if arguments.model:
        predict(arguments.model)
        return
    print(f"Predicted for the {GPU} with AdamW in float32, on {torch.get_num_threads()} threads:", flush=True)
    for name in MODELS:
        subprocess.run([sys.executable, __file__, name], check=True)


if __name__ == "__main__":
    main()
