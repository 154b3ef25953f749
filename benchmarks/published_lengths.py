"""LoRA runs over texts of many lengths that others measured on an A100: one batch, and the epoch replayed.

The measurements are those of ms-swift (github.com/modelscope/ms-swift at cdb169b78, docs/source_en/LLM/Benchmark.md):
`torch.cuda.max_memory_reserved` after an epoch of single texts of cls-fudan-news-zh, without those longer than the
limit. Its 4,959 lengths are not published but for their mean and deviation (3,234.4 and 2,547.5 tokens of Qwen, 91 to
19,548), so the range over three distributions is predicted: gamma, lognormal, and all lengths alike. The step is
that of the time (torch 2.1, transformers 4.36, FlashAttention 2): weights and adapters of 16 bits under autocast,
rank 8 at the queries, keys and values, layers computed again in the backward pass, logits and their shifted copy in 32
bits, and their argmax.

    python benchmarks/published_lengths.py                     # both models: an hour on one core
    python benchmarks/published_lengths.py yi-6b-chat --steps 50
"""

from __future__ import annotations

import argparse
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers

from lightning_memguard.core.capture.capture import Captures
from lightning_memguard.core.capture.lengths import ShapeSurveyor
from lightning_memguard.core.replay.epoch import Shape, replay_epoch
from lightning_memguard.core.replay.footprint import footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.training.planning.epochs import at_length
from lightning_memguard.training.planning.subject import program_of, subject_of
from lightning_memguard.training.planning.target import target_of

GIB = 2**30
MEAN, DEVIATION, SHORTEST = 3234.4, 2547.5, 91
MEASURED = {  # GiB, by the limit of the lengths
    "yi-6b-chat": {512: 13.72, 1024: 15.44, 2048: 16.95, 4096: 28.25},
    "openbuddy-zephyr-7b-chat": {512: 14.99, 1024: 16.57, 2048: 19.89, 4096: 23.29},
}
_SAME = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096}
CONFIGS = {
    "yi-6b-chat": {**_SAME, "vocab_size": 64000, "intermediate_size": 11008, "num_key_value_heads": 4},
    "openbuddy-zephyr-7b-chat": {**_SAME, "vocab_size": 36608, "intermediate_size": 14336, "num_key_value_heads": 8},
}
_SPREAD = math.sqrt(math.log(1 + (DEVIATION / MEAN) ** 2))
DRAWS: dict[str, Callable[[random.Random, int], float]] = {
    "gamma": lambda draw, _: draw.gammavariate((MEAN / DEVIATION) ** 2, DEVIATION**2 / MEAN),
    "lognormal": lambda draw, _: draw.lognormvariate(math.log(MEAN) - _SPREAD**2 / 2, _SPREAD),
    "uniform": lambda draw, most: draw.uniform(SHORTEST, most),
}


def model_of(name: str) -> torch.nn.Module:
    config = transformers.LlamaConfig(**CONFIGS[name])  # Mistral's layers allocate alike: no window is this short
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
        adapters = peft.LoraConfig(r=8, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj"])
        return peft.get_peft_model(model, adapters, autocast_adapter_dtype=False).train()  # type: ignore[no-any-return]


def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    whole = model.base_model.model
    logits = whole.lm_head(whole.model(input_ids=ids)[0]).float()
    shifted, labels = logits[..., :-1, :].contiguous(), ids[..., 1:].contiguous()
    loss = F.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels.view(-1))
    (logits.argmax(dim=2)[..., :-1] == labels).float().mean()
    return loss


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=1e-4)


def lengths(kind: str, most: int, steps: int) -> Iterator[int]:
    draw = random.Random(0)
    found = 0
    while found < steps:
        length = int(DRAWS[kind](draw, most))
        if SHORTEST <= length <= most:
            found += 1
            yield length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    target, settings = target_of("A100 80GB"), AllocatorSettings.for_device("cuda", {})
    loop: dict[str, Any] = {"step": step, "optimizer": optimizer}
    context = {"context": lambda: torch.autocast("cuda", torch.bfloat16)}
    print(f"GiB reserved: measured; predicted for one batch of the limit; over {options.steps} texts by distribution")
    for name in options.models or MEASURED:
        started = time.process_time()
        limits, batch = MEASURED[name], torch.zeros(1, 64, dtype=torch.long)
        subject = subject_of(model_of(name), batch, precision="32-true", **loop, **context)
        with Captures():
            surveyor = ShapeSurveyor(lambda at, of=subject: program_of(at_length(of, at), target), (1,))
            shapes = surveyor.survey(range(SHORTEST, max(limits) + 1))
        print(f"{name}: surveyed at {len(shapes.known)} lengths in {time.process_time() - started:.0f} s of processor")
        for most, measured in limits.items():
            one = footprint(shapes.at(Shape(1, most)), settings).peak_reserved_bytes / GIB
            print(f"  up to {most}: measured {measured:5.2f}; one batch {one:5.2f} ({one / measured - 1:+.1%})", end="")
            for kind in DRAWS:
                drawn = [Shape(1, length) for length in lengths(kind, most, options.steps)]
                run = replay_epoch(drawn, shapes.at, replace(settings, capacity_bytes=None), most_seconds=1e9).run
                reserved = run.peak_reserved_bytes / GIB
                print(
                    f"; {kind} {reserved:5.2f} ({reserved / measured - 1:+.1%}, step {run.grew_at})", end="", flush=True
                )
            print(f"; {time.process_time() - started:.0f} s")


if __name__ == "__main__":
    main()
