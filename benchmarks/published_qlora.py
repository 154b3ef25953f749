"""QLoRA and LoRA steps that others measured on a T4, and what MemGuard predicts without a GPU and without weights.

The measurements are fitcheck's (github.com/Anassbzdd/fitcheck at 83aea542, PyPI fitcheck-llm 0.3.1, its folder
data/measurements): `max_memory_allocated`, `max_memory_reserved` and the process's bytes of one step each. Its step is
a function that keeps its output, with the logits, until the optimizer has stepped; weights of 16 bits (4 with QLoRA),
adapters of 32, AdamW, checkpointing without reentry, keys and values repeated for grouped queries. Weights are moved to
the GPU by four threads while they are quantized, or one after the other, as the code of the row's version of
transformers has it; it is a race, so the same step was 6,984 and 6,996 MiB there.

    python benchmarks/published_qlora.py                  # all: each row, then median, p90, worst and the share inside
    python benchmarks/published_qlora.py TinyLlama eager  # those whose label contains one of these
"""

from __future__ import annotations

import os
import statistics
import sys
import warnings
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_memguard import Footprint, estimate
from lightning_memguard.core.foreign import patched
from lightning_memguard.core.simulation import quantized
from lightning_memguard.training.planning.by_name import FineTuning, model_of

MIB = 2**20
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class Row(NamedTuple):
    """A step: model, bits of its weights, rank, batch, length, attention; what was measured, in MiB; and threads."""

    model: str
    bits: int
    rank: int
    batch: int
    length: int
    attention: str
    allocated: float
    reserved: float
    process: float
    threads: int = 4

    @property
    def label(self) -> str:
        kind = "QLoRA" if self.bits else "LoRA"
        return f"{self.model.split('/')[1]} {kind} r{self.rank} {self.batch}x{self.length} {self.attention}"


ROWS = [
    Row("Qwen/Qwen2.5-7B", 4, 16, 1, 1024, "eager", 10584.77, 11746, 11886.88),
    Row("deepseek-ai/deepseek-coder-1.3b-instruct", 4, 16, 1, 1024, "eager", 1975.49, 2274, 2414.88),
    Row("mistralai/Mistral-7B-v0.3", 4, 16, 1, 1024, "sdpa", 6056.28, 6400, 6540.88),
    Row("Qwen/Qwen2.5-1.5B", 4, 16, 1, 1024, "eager", 4235.78, 5060, 5200.88),
    Row("meta-llama/Llama-3.2-3B", 4, 16, 1, 1024, "eager", 5498.54, 6212, 6352.88),
    Row("meta-llama/Llama-3.2-3B", 4, 16, 1, 1024, "sdpa", 5495.04, 6268, 6408.88),
    Row("Qwen/Qwen2.5-1.5B", 4, 32, 1, 2048, "eager", 6850.05, 7584, 7724.88),
    Row("Qwen/Qwen2.5-1.5B", 0, 32, 1, 2048, "eager", 7410.32, 8122, 8262.88),
    Row("Qwen/Qwen2.5-1.5B", 0, 32, 1, 2048, "sdpa", 7402.32, 7766, 7906.88),
    Row("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 4, 32, 1, 1024, "sdpa", 1843.07, 2034, 2174.88),
    Row("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 4, 32, 2, 1024, "eager", 2873.71, 3624, 3764.88),
    Row("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 4, 32, 4, 1024, "eager", 4589.61, 6172, 6312.88),
    Row("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 4, 32, 4, 1024, "sdpa", 3895.61, 4886, 5026.88),
    Row("Qwen/Qwen2.5-1.5B", 0, 32, 2, 1024, "eager", 7405.81, 7910, 8050.88),
    Row("Qwen/Qwen2.5-1.5B", 4, 32, 2, 1024, "sdpa", 6827.67, 7400, 7540.88, threads=0),
    Row("HuggingFaceTB/SmolLM2-1.7B", 4, 32, 4, 1024, "eager", 5297.27, 6996, 7136.88, threads=0),
    Row("HuggingFaceTB/SmolLM2-1.7B", 0, 32, 4, 1024, "eager", 6536.75, 7734, 7874.88),
    Row("HuggingFaceTB/SmolLM2-1.7B", 4, 32, 4, 1024, "sdpa", 5281.27, 5940, 6080.88, threads=0),
    Row("HuggingFaceTB/SmolLM2-1.7B", 0, 32, 4, 1024, "sdpa", 6528.75, 7094, 7234.88),
    Row("HuggingFaceTB/SmolLM2-135M", 4, 32, 2, 512, "eager", 1067.19, 1192, 1332.88, threads=0),
    Row("HuggingFaceTB/SmolLM2-135M", 4, 32, 2, 512, "sdpa", 1063.81, 1194, 1334.88, threads=0),
    Row("HuggingFaceTB/SmolLM2-135M", 0, 32, 2, 512, "sdpa", 1026.92, 1070, 1210.88),
    Row("HuggingFaceTB/SmolLM2-360M", 4, 32, 1, 4096, "sdpa", 4017.84, 4518, 4658.88, threads=0),
    Row("HuggingFaceTB/SmolLM2-360M", 0, 32, 1, 4096, "sdpa", 3754.78, 3912, 4052.88),
    Row("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 0, 32, 2, 1024, "eager", 3518.08, 4226, 4366.88),
    Row("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 4, 32, 2, 2048, "eager", 6650.99, 7840, 7980.88, threads=0),
    Row("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 0, 32, 2, 2048, "eager", 6616.12, 7662, 7802.88),
    Row("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 4, 32, 2, 2048, "sdpa", 3895.87, 4750, 4890.88, threads=0),
    Row("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 0, 32, 2, 2048, "sdpa", 4354.12, 4696, 4836.88),
    Row("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 4, 32, 2, 512, "eager", 1850.32, 2216, 2356.88, threads=0),
    Row("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 0, 32, 2, 512, "eager", 2757.19, 2908, 3048.88),
    Row("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 4, 32, 2, 512, "sdpa", 1849.32, 2054, 2194.88, threads=0),
    Row("Qwen/Qwen2.5-1.5B", 4, 32, 2, 1024, "eager", 6831.00, 7372, 7513.00),
]


def predict(row: Row) -> Footprint:
    tuning = FineTuning(
        row.model,
        lora=row.rank,
        targets=ATTENTION,
        bits=row.bits,
        checkpointing=True,
        attention=row.attention,
    )
    kept: list[Any] = []

    def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        kept.append(model(input_ids=ids, labels=ids))
        return kept[-1].loss

    def make(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=1e-4)
        made.register_step_post_hook(lambda *_: kept.pop().loss.detach_())
        return made

    def context() -> Any:
        return sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)

    batch = torch.zeros(row.batch, row.length, dtype=torch.long)
    model = model_of(tuning, torch.float16)
    return estimate(model, batch, step=step, optimizer=make, context=context, device="Tesla T4")


def main(wanted: list[str]) -> None:
    from transformers.integrations import sdpa_attention

    warnings.filterwarnings("ignore")
    sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    errors: dict[str, list[float]] = {"allocated": [], "reserved": [], "process": []}
    inside = []
    print(f"{'step':48} {'allocated':>22} {'reserved':>22} {'process':>22}  at most  seconds")
    for row in ROWS:
        if wanted and not any(each in row.label for each in wanted):
            continue
        start = sum(os.times()[:4])
        with patched(quantized, loading_threads=lambda row=row: row.threads):
            found = predict(row)
        pairs = {
            "allocated": (found.peak_allocated_bytes / MIB, row.allocated),
            "reserved": (found.peak_reserved_bytes / MIB, row.reserved),
            "process": (found.peak_device_bytes / MIB, row.process),
        }
        columns = []
        for name, (predicted, measured) in pairs.items():
            errors[name].append(100 * (predicted / measured - 1))
            columns.append(f"{predicted:6.0f} / {measured:6.0f} {errors[name][-1]:+6.2f}%")
        inside.append(row.process <= found.most_device_bytes / MIB)
        seconds = sum(os.times()[:4]) - start
        print(f"{row.label:48} {' '.join(columns)}  {'yes' if inside[-1] else 'NO':7} {seconds:6.1f}", flush=True)
    for name, found_errors in errors.items():
        size = sorted(map(abs, found_errors))
        p90 = size[min(len(size) - 1, int(0.9 * len(size)))]
        print(f"{name}: median {statistics.median(size):.2f} %, p90 {p90:.2f} %, worst {size[-1]:.2f} %")
    print(f"{sum(inside)} of {len(inside)} processes took at most what the prediction says at most")


if __name__ == "__main__":
    main(sys.argv[1:])
