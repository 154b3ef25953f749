"""Predictions for DeepSpeed's ZeRO against DeepSpeed itself, on CPU tensors under a fake process group.

DeepSpeed runs on a CPU (``DS_ACCELERATOR=cpu``), and torch's fake process group lets one process be one rank of any
number: collectives return at once, and everything that a rank allocates is real. The peak of its second and later
steps, as PyTorch's profiler sees it, is compared with the prediction, phase by phase. What this cannot show: CUDA
streams, and offload, whose two sides are one device here. Needs ``deepspeed`` (``DS_BUILD_OPS=0 pip install
--no-build-isolation deepspeed``); without it, the cases are predicted alone.

    python benchmarks/deepspeed_truth.py                   # all cases
    python benchmarks/deepspeed_truth.py stage3 stage2_fp32
"""

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _EventType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.planning.subject import trainer_for
from lightning_memguard.training.strategies import deepspeed

TOKENS, WORDS, SAMPLES, STEPS = 64, 1000, 8, 3
LIGHTNINGS = {"contiguous_gradients": True, "overlap_comm": True, "reduce_scatter": True}
SMALL = {**LIGHTNINGS, "reduce_bucket_size": 1_000_000, "sub_group_size": int(1e12)}
TIGHT = {"stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 400_000}
LIVE = {"stage3_max_reuse_distance": 500_000, "stage3_max_live_parameters": 1_500_000}

Case = tuple[int, str, dict[str, Any], dict[str, Any]]  # ranks, precision, zero_optimization, options of the model
CASES: dict[str, Case] = {
    "stage1": (4, "bf16-mixed", {"stage": 1, **SMALL}, {}),
    "stage1_no_overlap": (4, "bf16-mixed", {"stage": 1, **SMALL, "overlap_comm": False}, {}),
    "stage1_accumulated": (4, "bf16-mixed", {"stage": 1, **SMALL}, {"accumulate": 2}),
    "stage2": (4, "bf16-mixed", {"stage": 2, **SMALL}, {}),
    "stage2_fp32": (2, "32-true", {"stage": 2, **SMALL}, {}),
    "stage2_defaults": (8, "bf16-mixed", {"stage": 2}, {}),
    "stage2_buckets": (8, "bf16-mixed", {"stage": 2, **SMALL, "reduce_bucket_size": 300_000}, {}),
    "stage2_loose": (4, "bf16-mixed", {"stage": 2, **SMALL, "contiguous_gradients": False}, {}),
    "stage2_accumulated": (4, "bf16-mixed", {"stage": 2, **SMALL}, {"accumulate": 2}),
    "stage2_groups": (4, "bf16-mixed", {"stage": 2, **SMALL}, {"groups": True}),
    "stage3": (4, "bf16-mixed", {"stage": 3, **SMALL}, {}),
    "stage3_two": (2, "bf16-mixed", {"stage": 3, **SMALL, **TIGHT}, {}),
    "stage3_tight": (4, "bf16-mixed", {"stage": 3, **SMALL, **TIGHT, **LIVE}, {}),
    "stage3_fp32": (8, "32-true", {"stage": 3, **SMALL, **TIGHT, **LIVE}, {}),
    "stage3_subgroups": (4, "bf16-mixed", {"stage": 3, **SMALL, "sub_group_size": 200_000}, {}),
    "stage3_checkpointed": (4, "bf16-mixed", {"stage": 3, **SMALL, **TIGHT, **LIVE}, {"checkpointed": True}),
    "stage3_accumulated": (4, "bf16-mixed", {"stage": 3, **SMALL, **TIGHT}, {"accumulate": 2}),
    "stage3_groups": (8, "bf16-mixed", {"stage": 3, **SMALL, **TIGHT}, {"groups": True}),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, width = x.shape
        heads = [
            each.view(samples, tokens, 4, -1).transpose(1, 2) for each in self.inputs(self.first(x)).chunk(3, dim=-1)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(samples, tokens, width)
        x = x + self.outputs(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(pl.LightningModule):
    """A small GPT, of 3.7 million parameters."""

    def __init__(self, *, checkpointed: bool = False, groups: bool = False, width: int = 256) -> None:
        super().__init__()
        self.checkpointed, self.groups = checkpointed, groups
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places(torch.arange(TOKENS, device=words.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, WORDS), words.view(-1))

    def training_step(self, words: torch.Tensor, _: int) -> torch.Tensor:
        return self(words)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if not self.groups:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        large = [p for p in self.parameters() if p.dim() > 1]
        small = [p for p in self.parameters() if p.dim() == 1]
        return torch.optim.AdamW([{"params": large}, {"params": small, "weight_decay": 0.0}], lr=1e-3)


class DeepSpeedStrategy:
    """Stands for Lightning's, which refuses a CPU; it keeps DeepSpeed's own configuration."""

    def __init__(self, zero: dict[str, Any]) -> None:
        self.config = {"zero_optimization": zero}


def model_of(options: dict[str, Any]) -> Gpt:
    return Gpt(**{name: value for name, value in options.items() if name != "accumulate"})


def predicted(case: Case) -> tuple[dict[str, int], int]:
    """The peak of each phase, from the second step on, and for which rank: the one that holds most."""
    ranks, precision, zero, options = case
    model = model_of(options)
    trainer = trainer_for(model, "32-true", None, accumulate_grad_batches=options.get("accumulate", 1))
    program = LightningProgram(
        trainer,
        model,
        batches_from_one(torch.zeros(SAMPLES, TOKENS, dtype=torch.long)),
        torch.device("cpu"),
        batches_per_epoch=lambda _: 100,
        strategy=DeepSpeedStrategy(zero),  # type: ignore[arg-type]
        ranks=ranks,
        precision=precision,
    )
    recorder = Recorder("cpu")
    engines: list[deepspeed.Engine] = []
    take_over = deepspeed.Engine.take_over

    def keep(engine: deepspeed.Engine, optimizers: list[torch.optim.Optimizer]) -> None:
        engines.append(engine)
        take_over(engine, optimizers)

    with mock.patch.object(deepspeed.Engine, "take_over", keep):
        program.run(recorder, SAMPLES, fake=True)
    live, peaks = 0, dict.fromkeys(("forward", "backward", "optimizer"), 0)
    first = options.get("accumulate", 1)
    for event in recorder.trace(SAMPLES, "fake").events:
        live += event.nbytes if event.action == "alloc" else -event.nbytes
        if event.step >= first and event.phase in peaks:
            peaks[event.phase] = max(peaks[event.phase], live)
    return peaks, engines[0].rank


def measured(case: Case, rank: int) -> dict[str, int]:
    """The same of DeepSpeed."""
    os.environ.update(
        DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(case[0]), MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29511",
    )  # fmt: skip
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks, precision, zero, options = case
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    import deepspeed as library

    library.utils.logging.logger.setLevel("ERROR")
    library.init_distributed("fake", dist_init_required=False)
    accumulate = options.get("accumulate", 1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulate,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        **({"bf16": {"enabled": True}} if precision.startswith("bf16") else {}),
    }
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model = model_of(options)
        engine, *_ = library.initialize(
            config=config,
            model=model,
            model_parameters=[*model.parameters()],
            optimizer=model.configure_optimizers(),
            dist_init_required=False,
        )
        for step in range(STEPS * accumulate):
            later = "later " if step >= accumulate else "first "
            words = torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
            with record_function(later + "forward"):
                loss = engine(words)
            with record_function(later + "backward"):
                engine.backward(loss)
            with record_function(later + "optimizer"):
                engine.step()
    return peaks_of(profiled)


def peaks_of(profiled: Any) -> dict[str, int]:
    found: list[tuple[int, int, str]] = []
    todo = [(event, "") for event in profiled.profiler.kineto_results.experimental_event_tree()]
    while todo:
        event, phase = todo.pop()
        begins = event.name.startswith(("later ", "first "))
        todo += [(child, event.name if begins else phase) for child in event.children]
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.alloc_size, phase))
    live, peaks = 0, dict.fromkeys(("forward", "backward", "optimizer"), 0)
    for _, nbytes, phase in sorted(found, key=lambda each: each[0]):
        live += nbytes
        if phase.startswith("later "):
            peaks[phase[6:]] = max(peaks[phase[6:]], live)
    return peaks


def main(names: list[str]) -> None:
    if names[:1] == ["--measure"]:
        print(json.dumps(measured(CASES[names[1]], int(names[2]))))
        return
    there = importlib.util.find_spec("deepspeed") is not None
    for name in names or CASES:
        try:
            ours, rank = predicted(CASES[name])
        except Exception as error:  # noqa: BLE001 - the other cases go on
            print(f"{name:22} fails: {error}", flush=True)
            continue
        line = f"{name:22}" + "".join(f" {phase} {nbytes:>12,}" for phase, nbytes in ours.items())
        if there:
            command = [sys.executable, "-W", "ignore", str(Path(__file__)), "--measure", name, str(rank)]
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            if answer.returncode:
                line += f"  DeepSpeed failed: {answer.stderr.strip().splitlines()[-1]}"
            else:
                truth = json.loads(answer.stdout.strip().splitlines()[-1])
                line += "  off by " + ", ".join(f"{ours[phase] - truth[phase]:+,}" for phase in ours)
        print(line, flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
