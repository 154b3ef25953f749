"""Lightning's FSDP guide, predicted without a GPU, against the peaks that it prints.

docs/source-pytorch/advanced/model_parallel/fsdp.rst trains a transformer of 1,009 M parameters on 2 A100 under several
strategies, on one sentence of 35 words, and prints ``torch.cuda.memory_summary``. Here one rank of each is captured on
fake tensors, and replayed.

    python benchmarks/fsdp_guide.py                          # all rows, about a minute each
    python benchmarks/fsdp_guide.py --only FULL_SHARD
"""

import argparse
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos import Transformer
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.capture import capture
from lightning_memguard.core.replay.replay import replay
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.strategies.sharded import Layout

LAYERS = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}
ROWS: dict[str, tuple[dict[str, Any], int]] = {
    "NO_SHARD": ({"sharding_strategy": "NO_SHARD"}, 19_296),
    "SHARD_GRAD_OP": ({"sharding_strategy": "SHARD_GRAD_OP"}, 11_772),
    "FULL_SHARD": ({}, 9_627),
    "offload": ({"cpu_offload": True}, 2_790),
}
WORDS, LENGTH, RANKS = 33_278, 35, 2


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


def predicted(module: LanguageModel, settings: dict[str, Any]) -> int:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    strategy = FSDPStrategy(auto_wrap_policy=LAYERS, **settings)
    sentence = torch.zeros(1, LENGTH, dtype=torch.long)
    program = LightningProgram(
        pl.Trainer(accelerator="cpu", **quiet),
        module,
        batches_from_one((sentence, sentence.clone())),
        torch.device("cuda", 0),
        gpu=gpus.find("A100-SXM4-40GB"),
        strategy=strategy,
        layout=Layout.of(strategy, RANKS, 1),
    )
    return replay(capture(program, 1, "fake"), AllocatorSettings()).peak_allocated_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=[*ROWS])
    names = parser.parse_args().only
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        module = LanguageModel()
    print(f"{'strategy':14} {'printed MiB':>11} {'predicted MiB':>13} {'error %':>8} {'seconds':>8}")
    for name in names:
        settings, printed = ROWS[name]
        started = time.perf_counter()
        ours = predicted(module, settings) / 2**20
        seconds = time.perf_counter() - started
        print(
            f"{name:14} {printed:>11,} {ours:>13,.1f} {100 * (ours / printed - 1):>+8.2f} {seconds:>8.1f}", flush=True
        )


if __name__ == "__main__":
    main()
