"""Predictions for torchtitan's published trainings, from `examples/fsdp.py`, and for a thousand GPUs.

Truth: ``benchmarks/llama3_h100_202412_torchtitan.md`` of pytorch/torchtitan @b5bcd76c6: max reserved over ranks, on
H100 with 96 GB; here H200, which has the same kernels and does not run short either. The rows of 70B and 405B were
measured with torch.compile and float8, which are not predicted: they are compared with the same training without them.
The pipelines are divided as torchtitan did by default (its commit 9dec370): first and last stage have fewer layers, and
there are as many micro-batches as ranks.

    python benchmarks/torchtitan.py                 # all rows; those of 405B take minutes each
    python benchmarks/torchtitan.py 8B ranks
"""

import importlib.util
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_memguard import Footprint, estimate
from lightning_memguard.training.planning.pipeline import estimate_pipeline

MIB = 1 << 20
# size, checkpointing, batch, data x tensor parallel, devices and nodes, published MiB
ROWS: dict[str, tuple[str, str, int, tuple[int, int], tuple[int, int], int]] = {
    "8B": ("8B", "selective", 2, (8, 1), (8, 1), 84_378),
    "70B": ("70B", "full", 16, (32, 8), (8, 32), 73_626),
    "ranks": ("70B", "full", 1, (128, 8), (8, 128), 0),
}
# schedule, stages on each of 8 ranks, published MiB; FSDP2 x 8 and tensor parallelism x 8 within each stage
PIPELINES: dict[str, tuple[str, int, int]] = {
    "405B": ("1F1B", 1, 84_480),
    "405B-interleaved": ("Interleaved1F1B", 2, 74_445),
}
RANKS, TEXTS, TOKENS = 8, 32, 8192


def example() -> Any:
    path = Path(__file__).parents[1] / "examples" / "fsdp.py"
    specification = importlib.util.spec_from_file_location("fsdp_example", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["fsdp_example"] = module
    specification.loader.exec_module(module)
    return module


class Stage(nn.Module):
    """Some layers of the example's Llama; the first has its embedding, the last its head."""

    def __init__(self, llama: Any, layers: int, *, first: bool, last: bool) -> None:
        super().__init__()
        shape = llama.SHAPES["405B"]
        self.plan = {name: plan for name, plan in llama._OUTER_PLAN.items() if (first if name == "words" else last)}
        self.block_plan = llama._BLOCK_PLAN
        self.words = nn.Embedding(shape.vocabulary, shape.width) if first else nn.Identity()
        self.blocks = nn.ModuleList(llama.Block(shape) for _ in range(layers))
        self.norm = nn.RMSNorm(shape.width) if last else nn.Identity()
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if last else nn.Identity()
        turns = torch.empty(TOKENS, shape.width // shape.heads // 2, dtype=torch.complex64)
        self.register_buffer("angles", turns, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = checkpoint(block, x, self.angles, use_reentrant=False, preserve_rng_state=False)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def shard(stage: Any, mesh: Any) -> None:
    """As the example's, but gathered once for all micro-batches, as torchtitan does in a pipeline."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parallelize_module(stage, mesh["tensor_parallel"], stage.plan)
    for block in stage.blocks:
        parallelize_module(block, mesh["tensor_parallel"], stage.block_plan)
    for each in (*stage.blocks, stage):
        fully_shard(each, mesh=mesh["data_parallel"], mp_policy=policy, reshard_after_forward=False)


def pipeline(llama: Any, schedule: str, on_rank: int) -> Sequence[Footprint]:
    """The footprint of each rank of the 405B pipeline."""
    count = RANKS * on_rank
    fewest, more = divmod(llama.SHAPES["405B"].layers, count)
    layers = [fewest, *(fewest + (index < more) for index in range(count - 1))]
    with torch.device("meta"):
        stages = [Stage(llama, each, first=not index, last=index == count - 1) for index, each in enumerate(layers)]
        tokens = torch.empty(TEXTS, TOKENS, dtype=torch.int64)
    return estimate_pipeline(
        stages,
        (tokens, tokens.clone()),
        loss=lambda found, wanted: F.cross_entropy(found.flatten(0, 1).float(), wanted.flatten()),
        micro_batches=RANKS,
        schedule=schedule,
        ranks=RANKS,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, fused=True),
        device="H200",
        shard=shard,
        data_parallel_size=8,
        tensor_parallel_size=8,
        context=loss_parallel,
    )


def main(names: list[str]) -> None:
    llama = example()
    for name in names or (*ROWS, *PIPELINES):
        if name in PIPELINES:
            schedule, on_rank, published = PIPELINES[name]
            reserved = [found.peak_reserved_bytes / MIB for found in pipeline(llama, schedule, on_rank)]
            off = max(reserved) / published - 1
            each = ", ".join(f"{rank:,.0f}" for rank in reserved)
            print(f"405B, {schedule}: reserved {each} MiB; published at most {published:,} ({off:+.1%})", flush=True)
            continue
        size, checkpointing, batch, (data, tensor), (devices, nodes), published = ROWS[name]
        with torch.device("meta"):
            model = llama.Llama(size, checkpointing=checkpointing)
        tokens = torch.empty(batch, 8192, dtype=torch.int64, device="meta")
        started, strategy = time.monotonic(), ModelParallelStrategy(data, tensor)
        found = estimate(model, tokens, strategy=strategy, devices=devices, num_nodes=nodes, device="H200")
        seconds = time.monotonic() - started
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        reserved = found.peak_reserved_bytes / MIB
        versus = f", published {published:,} ({reserved / published - 1:+.1%})" if published else ""
        print(
            f"{size}, {data} x {tensor} ranks: reserved {reserved:,.0f} MiB{versus}; {seconds:.0f} s, of which "
            f"{usage.ru_utime + usage.ru_stime:.0f} s of processor time so far; {usage.ru_maxrss >> 10} MiB",
            flush=True,
        )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
