"""Predictions for DeepSpeed against real steps of Lightning and DeepSpeed, on CPU tensors under a fake process group.

DeepSpeed runs on a CPU (``DS_ACCELERATOR=cpu``), and torch's fake process group lets one process be one rank of any
number: collectives return at once, and everything that a rank allocates is real. The peak of its second and later
steps, as PyTorch's profiler sees it, is compared with the prediction, phase by phase; once more without what operators
allocate and free inside, which depends on the processor. What this cannot show: CUDA streams, and offload, whose two
sides are one device here. Needs ``deepspeed`` (``pip install deepspeed``).

    python benchmarks/deepspeed_truth.py                   # all cases
    python benchmarks/deepspeed_truth.py stage3 stage2_fp32
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DeepSpeedStrategy
from torch import nn
from torch._C._profiler import _EventType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.planning.subject import trainer_for
from lightning_memguard.training.strategies import deepspeed
from lightning_memguard.training.strategies.sharded import Layout

TOKENS, WORDS, SAMPLES, STEPS = 64, 1000, 8, 3
PHASES = ("forward", "backward", "optimizer")
LIGHTNINGS = {"contiguous_gradients": True, "overlap_comm": True, "reduce_scatter": True}
SMALL = {**LIGHTNINGS, "reduce_bucket_size": 1_000_000, "sub_group_size": int(1e12)}
TIGHT = {"stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 400_000}
LIVE = {"stage3_max_reuse_distance": 500_000, "stage3_max_live_parameters": 1_500_000}
ANY_OPTIMIZER = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
ANY_OPTIMIZER |= {"train_micro_batch_size_per_gpu": SAMPLES}
STATES = {"offload_optimizer": {"device": "cpu"}}
BOTH = {**STATES, "offload_param": {"device": "cpu"}}

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
    "stage3_called": (4, "bf16-mixed", {"stage": 3, **SMALL, **TIGHT, **LIVE}, {"called": True}),
    "stage3_fp16": (4, "16-mixed", {"stage": 3, **SMALL, **TIGHT}, {}),
    "stage3_offload": (4, "bf16-mixed", {"stage": 3, **SMALL, **TIGHT, **BOTH}, {}),
    "stage2_offload": (4, "bf16-mixed", {"stage": 2, **SMALL, **STATES}, {}),
    "stage2_fp16": (4, "16-mixed", {"stage": 2, **SMALL}, {}),
    "stage2_called": (4, "bf16-mixed", {"stage": 2, **SMALL}, {"called": True}),
    "stage3_frozen": (4, "bf16-mixed", {"stage": 3, **SMALL, **TIGHT}, {"frozen": True}),
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
        parts = self.inputs(self.first(x)).chunk(3, dim=-1)
        heads = [each.view(samples, tokens, 4, -1).transpose(1, 2) for each in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(samples, tokens, width)
        x = x + self.outputs(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(pl.LightningModule):
    """A small GPT, of 3.7 million parameters."""

    def __init__(
        self, width: int = 256, *, checkpointed: bool = False, groups: bool = False, called: bool = False, frozen=False
    ) -> None:
        super().__init__()
        self.checkpointed, self.groups, self.called = checkpointed, groups, called
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.words.requires_grad_(not frozen)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places(torch.arange(TOKENS, device=words.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, WORDS), words.view(-1))

    def training_step(self, words: torch.Tensor, _: int) -> torch.Tensor:
        # ``self(words)`` runs the hooks of stage 3 a second time: DeepSpeed then takes its order of modules for lost.
        return self(words) if self.called else self.forward(words)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if not self.groups:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        large = [p for p in self.parameters() if p.dim() > 1]
        small = [p for p in self.parameters() if p.dim() == 1]
        return torch.optim.AdamW([{"params": large}, {"params": small, "weight_decay": 0.0}], lr=1e-3)


def strategy_of(case: Case) -> DeepSpeedStrategy:
    """Lightning's own, with DeepSpeed's configuration."""
    return DeepSpeedStrategy(config={**ANY_OPTIMIZER, "zero_optimization": dict(case[2])}, loss_scale=1.0)


def model_of(options: dict[str, Any]) -> Gpt:
    return Gpt(**{name: value for name, value in options.items() if name != "accumulate"})


def predicted(case: Case, *, scratch: bool = True) -> tuple[dict[str, int], int]:
    """The peak of each phase, from the second step on, and for which rank: the one that holds most.

    Without ``scratch`` all but what operators take inside, which depends on the processor.
    """
    ranks, precision, _, options = case
    model = model_of(options)
    trainer = trainer_for(model, "32-true", None, accumulate_grad_batches=options.get("accumulate", 1))
    strategy = strategy_of(case)
    batches = batches_from_one(torch.zeros(SAMPLES, TOKENS, dtype=torch.long))
    rank = {"strategy": strategy, "layout": Layout.of(strategy, ranks, 1), "ranks": ranks, "precision": precision}
    given = trainer, model, batches, torch.device("cpu")
    program = LightningProgram(*given, batches_per_epoch=lambda _: 100, **rank)
    recorder = Recorder("cpu")
    fullest: list[int] = []
    find = deepspeed.fullest_rank

    def keep(*arguments: Any) -> int:
        fullest.append(find(*arguments))
        return fullest[0]

    with mock.patch.object(deepspeed, "fullest_rank", keep), with_fp16():
        program.run(recorder, SAMPLES, fake=True)
    live, peaks = 0, dict.fromkeys(PHASES, 0)
    first = options.get("accumulate", 1)
    for event in recorder.trace(SAMPLES, "fake").events:
        if event.part == "workspaces" and not scratch:
            continue
        live += event.nbytes if event.action == "alloc" else -event.nbytes
        if event.step >= first and event.phase in peaks:
            peaks[event.phase] = max(peaks[event.phase], live)
    return peaks, (fullest or [0])[0]


def with_fp16() -> contextlib.AbstractContextManager[object]:
    """DeepSpeed refuses fp16 on processors without its instructions; PyTorch has slower kernels for these."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    return mock.patch.object(CPU_Accelerator, "is_fp16_supported", return_value=True)


class OnCpu(DeepSpeedStrategy):
    """Lightning's own, which refuses a CPU."""

    initializes = False

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0) if self.initializes else torch.device("cpu")

    def setup_environment(self) -> None:
        self.set_world_ranks()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def _setup_model_and_optimizer(self, *args: Any) -> Any:
        with mock.patch.object(self, "initializes", True):
            return super()._setup_model_and_optimizer(*args)


class Phases(pl.Callback):
    """Names the phases of each step to the profiler, as the prediction does."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate, self.batch, self.running = accumulate, 0, contextlib.ExitStack()

    def mark(self, phase: str) -> None:
        self.running.close()
        self.running.enter_context(record_function(("later " if self.batch >= self.accumulate else "first ") + phase))

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, index: int) -> None:
        self.batch = index
        self.mark("forward")

    def on_before_backward(self, *_: object) -> None:
        self.mark("backward")

    def on_after_backward(self, *_: object) -> None:
        self.mark("forward")

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.model.is_gradient_accumulation_boundary():
            self.mark("optimizer")

    def on_train_batch_end(self, *_: object) -> None:
        self.mark("end")


def measured(case: Case, rank: int) -> tuple[dict[str, int], dict[str, int]]:
    """The peaks of DeepSpeed, as Lightning runs it, with scratch and without."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(case[0]))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks, precision, _, options = case
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    import deepspeed as library

    library.init_distributed("fake", dist_init_required=False)
    accumulate = options.get("accumulate", 1)
    settings = {
        "precision": precision,
        "accumulate_grad_batches": accumulate,
        "limit_train_batches": STEPS * accumulate,
    }
    strategy = OnCpu(config=strategy_of(case).config, logging_level="ERROR", loss_scale=1.0)
    given = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "callbacks": [Phases(accumulate)], **settings}
    shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(strategy=strategy, **given, **dict.fromkeys(shown, False))
    with with_fp16(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        words = torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
        trainer.fit(model_of(options), DataLoader([words] * 100, batch_size=None))  # type: ignore[arg-type]
    return peaks_of(profiled), peaks_of(profiled, scratch=False)


def peaks_of(profiled: Any, *, scratch: bool = True) -> dict[str, int]:
    """The peaks of a profile; without ``scratch`` but for what an operator allocates and frees inside itself."""
    found: list[tuple[int, int, int, str, int]] = []  # time, address, bytes, phase, end of the operator
    todo = [(event, "", 0) for event in profiled.profiler.kineto_results.experimental_event_tree()]
    while todo:
        event, phase, end = todo.pop()
        phase = event.name if event.name.startswith(("later ", "first ")) else phase
        if event.tag == _EventType.TorchOp and not event.name.startswith(("aten::empty", "aten::resize_")):
            end = event.end_time_ns if event.name.startswith("aten::") else 0
        todo += [(child, phase, end) for child in event.children]
        memory = event.extra_fields
        if event.tag == _EventType.Allocation and memory.device.type == "cpu":
            found.append((event.start_time_ns, memory.ptr, memory.alloc_size, phase, end))
    live, peaks = 0, dict.fromkeys(PHASES, 0)
    found.sort(key=lambda each: each[0])
    inside = set() if scratch else {*_inside_an_operator(found)}
    for place, (_, _, nbytes, phase, _) in enumerate(found):
        if place not in inside:
            live += nbytes
            if phase.removeprefix("later ") in peaks:
                peaks[phase[6:]] = max(peaks[phase[6:]], live)
    return peaks


def _inside_an_operator(found: list[tuple[int, int, int, str, int]]) -> Iterator[int]:
    """The places of allocations that end within the operator that made them, and of their ends."""
    made: dict[int, int] = {}
    for place, (time, address, nbytes, _, _) in enumerate(found):
        if nbytes > 0:
            made[address] = place
        elif address in made:
            start = made.pop(address)
            if time <= found[start][4]:
                yield from (start, place)


def measured_apart(name: str, rank: int) -> Any:
    """Measure in a process of its own, which DeepSpeed and its accelerator are loaded for."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__)), "--measure", name, str(rank)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise RuntimeError(answer.stderr.strip().splitlines()[-1])
    return json.loads(answer.stdout.strip().splitlines()[-1])


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
            try:
                truth, without = measured_apart(name, rank)
            except RuntimeError as error:
                line += f"  DeepSpeed failed: {error}"
            else:
                line += "  off by " + ", ".join(f"{ours[phase] - truth[phase]:+,}" for phase in ours)
                ours, _ = predicted(CASES[name], scratch=False)
                line += "  without scratch " + ", ".join(
                    f"{nbytes:,} ({ours[phase] - nbytes:+,})" for phase, nbytes in without.items()
                )
        print(line, flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
