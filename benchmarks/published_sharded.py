"""Predictions of one rank of sharded trainings that others published, and for a thousand GPUs. Needs no GPU.

torchtitan: ``benchmarks/llama3_h100_202412_torchtitan.md`` of pytorch/torchtitan @b5bcd76c6: max reserved over ranks,
on H100 with 96 GB; here H200, which has the same kernels and does not run short either. The model is that of
`examples/fsdp.py`. The row of 70B was measured with torch.compile and float8: it is compared with the same training
without them.

Lightning's FSDP guide: docs/source-pytorch/advanced/model_parallel/fsdp.rst trains a transformer of 1,009 M parameters
on 2 A100 under several strategies, on one sentence of 35 words, and prints ``torch.cuda.memory_summary``: allocated.

Lightning's two examples of tensor parallelism with FSDP2, as written: `examples/fabric/tensor_parallel` and
`examples/pytorch/tensor_parallel` of Lightning-AI/pytorch-lightning, 2 x 2 ranks. Their README has 36.73 GB, printed by
``torch.cuda.max_memory_reserved`` when that was written (c8059d7bfd); the 17.95 GB of Fabric's are of a first version,
whose optimizer had not been given the sharded parameters.

    python benchmarks/published_sharded.py                 # all rows but the examples
    python benchmarks/published_sharded.py 8B ranks FULL_SHARD
    python benchmarks/published_sharded.py fabric pytorch --examples ../pytorch-lightning/examples
"""

import argparse
import importlib
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.demos import Transformer
from pytorch_lightning.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn

from lightning_memguard import estimate
from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.capture import capture
from lightning_memguard.core.replay.replay import replay
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.strategies.sharded import Layout
from shared.process import script
from shared.truth import QUIET, quieten

MIB = 1 << 20
# size, checkpointing, batch, data x tensor parallel, devices and nodes, published MiB
TORCHTITAN: dict[str, tuple[str, str, int, tuple[int, int], tuple[int, int], int]] = {
    "8B": ("8B", "selective", 2, (8, 1), (8, 1), 84_378),
    "70B": ("70B", "full", 16, (32, 8), (8, 32), 73_626),
    "ranks": ("70B", "full", 1, (128, 8), (8, 128), 0),
}
# settings of the strategy, printed MiB
GUIDE: dict[str, tuple[dict[str, Any], int]] = {
    "NO_SHARD": ({"sharding_strategy": "NO_SHARD"}, 19_296),
    "SHARD_GRAD_OP": ({"sharding_strategy": "SHARD_GRAD_OP"}, 11_772),
    "FULL_SHARD": ({}, 9_627),
    "offload": ({"cpu_offload": True}, 2_790),
}
EXAMPLES = dict.fromkeys(("pytorch", "fabric"), int(36.73e9 / MIB))
WORDS, LENGTH, RANKS = 33_278, 35, 2
LAYERS = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}


def reserved_by_torchtitan(name: str) -> tuple[str, int]:
    size, checkpointing, batch, (data, tensor), (devices, nodes), _ = TORCHTITAN[name]
    with torch.device("meta"):
        model = script(Path(__file__).parents[1] / "examples" / "fsdp.py").Llama(size, checkpointing=checkpointing)
    tokens = torch.empty(batch, 8192, dtype=torch.int64, device="meta")
    strategy = ModelParallelStrategy(data, tensor)
    found = estimate(model, tokens, strategy=strategy, devices=devices, num_nodes=nodes, device="H200")
    return f"{size}, {data} x {tensor} ranks: reserved", found.peak_reserved_bytes


class LanguageModel(pl.LightningModule):
    """The guide's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=WORDS, nlayers=32, nhid=4096, ninp=1024, nhead=64)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        words, target = batch
        return nn.functional.nll_loss(self.model(words, target), target.view(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def allocated_in_the_guide(name: str) -> tuple[str, int]:
    with torch.device("meta"):
        module = LanguageModel()
    strategy = FSDPStrategy(auto_wrap_policy=LAYERS, **GUIDE[name][0])
    sentence = torch.zeros(1, LENGTH, dtype=torch.long)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, **QUIET)
    batches = batches_from_one((sentence, sentence.clone()))
    rank = {"gpu": gpus.find("A100-SXM4-40GB"), "strategy": strategy, "layout": Layout.of(strategy, RANKS, 1)}
    program = LightningProgram(trainer, module, batches, torch.device("cuda", 0), **rank)
    return f"{name}: allocated", replay(capture(program, 1, "fake"), AllocatorSettings()).peak_allocated_bytes


def reserved_by_an_example(kind: str, folder: Path) -> tuple[str, int]:
    sys.path.insert(0, str(folder / kind / "tensor_parallel"))
    train = importlib.import_module("train")
    batch, ranks = torch.zeros(8, 129, dtype=torch.long), {"devices": 4, "device": "A100-SXM4-80GB"}
    own = {"data_parallel_size": 2, "tensor_parallel_size": 2}
    with torch.device("meta"):
        model = train.Llama3() if kind == "pytorch" else train.Transformer(train.ModelArgs(vocab_size=32000))
    if kind == "pytorch":
        found = estimate(model, batch, strategy=train.ModelParallelStrategy(**own), **ranks)
        return "the example under a Trainer: reserved", found.peak_reserved_bytes
    output = torch.empty(0)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        nonlocal output  # which the example's loop holds until the next one is there
        inputs, labels = batch[:, :-1], batch[:, 1:]
        output = model(inputs)
        return nn.functional.cross_entropy(output.reshape(-1, output.size(-1)), labels.reshape(-1))

    strategy = train.ModelParallelStrategy(parallelize_fn=train.parallelize, **own)
    optimizer = partial(torch.optim.AdamW, lr=3e-3, foreach=True)
    given = {"step": step, "context": train.loss_parallel, "optimizer": optimizer, "strategy": strategy}
    return "the example under Fabric: reserved", estimate(model, batch, **given, **ranks).peak_reserved_bytes


def main() -> None:
    rows = [*TORCHTITAN, *GUIDE]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ROW", help=", ".join([*rows, *EXAMPLES]))
    parser.add_argument("--examples", type=Path, help="the folder of that name in a clone of Lightning's repository")
    options = parser.parse_args()
    quieten()
    for name in options.names or rows:
        started = time.monotonic()
        if name in EXAMPLES:
            what, nbytes = reserved_by_an_example(name, options.examples)
        else:
            what, nbytes = reserved_by_torchtitan(name) if name in TORCHTITAN else allocated_in_the_guide(name)
        seconds = time.monotonic() - started
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        published = EXAMPLES.get(name) or (TORCHTITAN.get(name) or GUIDE[name])[-1]
        versus = f", published {published:,} ({nbytes / MIB / published - 1:+.2%})" if published else ""
        print(
            f"{what} {nbytes / MIB:,.0f} MiB{versus}; {seconds:.0f} s; children so far: "
            f"{usage.ru_utime + usage.ru_stime:.0f} s of processor time, {usage.ru_maxrss >> 10} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
