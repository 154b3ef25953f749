"""Batches by predicted memory next to a fixed batch size and to budgets of tokens: samples a second, peak, over budget.

Text under attention that is written out, spectrograms under convolutions, and sets, of lengths drawn from long-tailed
distributions, are trained for an epoch on the CPU under a budget. The peak is that of the tensors as PyTorch's profiler
counts them (`shared/truth.py`), over the whole fit; the seconds are the processor's in another fit, on one thread and
without the profiler, with what it takes to collate and to start.

    python benchmarks/lengths.py          # a few minutes on one core
    python benchmarks/lengths.py text     # one of them
    python benchmarks/lengths.py --ranks  # by predicted memory on two ranks of DDP, each a process of its own
"""

import argparse
import itertools
import json
import math
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler

from lightning_memguard import LengthBatchSampler, batch_sizes
from shared.truth import QUIET, peak_of, profiled, quieten

MIB = 2**20
Batches = list[list[int]]


class Text(nn.Module):
    """A causal language model whose attention is written out."""

    def __init__(self, width: int = 64, heads: int = 4, tokens: int = 500) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.place = nn.Embedding(tokens, width), nn.Embedding(512, width)
        self.head = nn.Linear(width, tokens)
        self.attention = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(2)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        count, length = ids.shape
        x = self.embed(ids) + self.place(torch.arange(length))
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            query, key, value = (
                each.view(count, length, self.heads, -1).transpose(1, 2) for each in attention(x).chunk(3, dim=-1)
            )
            scores = (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).masked_fill(later, float("-inf"))
            x = x + (F.dropout(scores.softmax(-1), 0.1) @ value).transpose(1, 2).reshape(x.shape)
            x = x + mlp(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Speech(nn.Module):
    """Convolutions over spectrograms of 80 channels."""

    def __init__(self) -> None:
        super().__init__()
        widths = itertools.pairwise((80, 128, 128, 128))
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Conv1d(a, b, 5, padding=2), nn.BatchNorm1d(b), nn.GELU()) for a, b in widths)
        )
        self.head = nn.Linear(128, 30)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(sound).mean(-1)).square().mean()


class Points(nn.Module):
    """Sets of points, each of which looks at all others."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.look, self.leave = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        x = self.enter(points).relu()
        x = x + (x @ self.look(x).transpose(1, 2) / 8).softmax(-1) @ x
        return self.leave(x.amax(1)).square().mean()


@dataclass(frozen=True)
class Case:
    """A dataset and its model; ``lengths`` are those that sizes are asked for."""

    name: str
    model: Callable[[], nn.Module]
    sample: Callable[[int], torch.Tensor]
    dim: int
    lengths: Sequence[int]
    typical: int
    budget: str
    count: int

    def drawn(self) -> list[int]:
        """Lengths of the samples."""
        draw = random.Random(0)
        lengths = (int(draw.lognormvariate(math.log(self.typical), 0.7)) for _ in range(self.count))
        return [min(max(each, 8), self.lengths[-1]) for each in lengths]

    def collate(self, samples: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pad to the longest."""
        longest = max(each.shape[self.dim - 1] for each in samples)
        padding = [(0, 0) * (each.dim() - self.dim) + (0, longest - each.shape[self.dim - 1]) for each in samples]
        return torch.stack([F.pad(each, pad) for each, pad in zip(samples, padding, strict=True)])


CASES = (
    Case("text", Text, lambda n: torch.arange(n) % 500, 1, (32, 64, 96, 128, 192, 256, 384, 512), 90, "200MiB", 800),
    Case("speech", Speech, lambda n: torch.ones(80, n), 2, (50, 100, 200, 300, 400, 600, 800), 150, "150MiB", 1500),
    Case("sets", Points, lambda n: torch.ones(n, 8), 1, (32, 64, 128, 192, 256, 512, 1024), 120, "150MiB", 2000),
)


class Module(pl.LightningModule):
    """Trains the model of a case."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Listed(Sampler[list[int]]):
    """Batches as they are."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def of_fixed_size(lengths: Sequence[int], size: int) -> Batches:
    order = random.Random(1).sample(range(len(lengths)), len(lengths))
    return [order[first : first + size] for first in range(0, len(order), size)]


def of_tokens(lengths: Sequence[int], budget: int) -> Batches:
    """Sorted samples, as many as the budget holds once they are padded, in random order."""
    batches: Batches = [[]]
    for sample in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[sample] > budget:
            batches.append([])
        batches[-1].append(sample)
    return random.Random(1).sample(batches, len(batches))


def fit(case: Case, samples: Sequence[torch.Tensor], sampler: Sampler[list[int]], **trainer: Any) -> None:
    torch.manual_seed(0)
    loader = DataLoader(samples, batch_sampler=sampler, collate_fn=case.collate)  # type: ignore[arg-type]
    pl.Trainer(accelerator="cpu", max_epochs=1, **QUIET, **trainer).fit(Module(case.model()), loader)


def run(case: Case) -> None:
    started = time.perf_counter()
    sizes = batch_sizes(
        Module(case.model()),
        lambda length: torch.stack([case.sample(length)] * 4),
        lengths=case.lengths,
        budget=case.budget,
        device="cpu",
    )
    seconds = time.perf_counter() - started
    lengths, budget = case.drawn(), int(case.budget.removesuffix("MiB"))
    samples = [case.sample(length) for length in lengths]
    longest = case.lengths[-1]
    middle = next(length for length in case.lengths if length >= case.typical)
    ways: dict[str, Any] = {
        f"{sizes[longest]} samples": Listed(of_fixed_size(lengths, sizes[longest])),
        f"{sizes[longest] * longest} tokens (fit at {longest})": Listed(of_tokens(lengths, sizes[longest] * longest)),
        f"{sizes[middle] * middle} tokens (fit at {middle})": Listed(of_tokens(lengths, sizes[middle] * middle)),
        "by predicted memory": LengthBatchSampler(lengths, sizes),
    }
    print(
        f"{case.name}: {len(lengths)} samples of {min(lengths)} to {max(lengths)}, budget {case.budget}; sizes {sizes}"
    )
    print(f"  found in {seconds:.1f} s")
    for name, sampler in ways.items():
        batches = list(sampler)
        once = sorted(itertools.chain(*batches)) == list(range(len(lengths)))
        peak = peak_of(profiled(lambda sampler=sampler: fit(case, samples, sampler)))[1] / MIB
        started = time.process_time()
        fit(case, samples, sampler)
        rate = len(lengths) / (time.process_time() - started)
        verdict = "over" if peak > budget else "within"
        print(
            f"  {name:36} {len(batches):4} batches {rate:7.1f} samples/s  peak {peak:6.1f} MiB  {verdict}  once: {once}"
        )


RANKS = 2


def run_on_ranks(case: Case) -> None:
    """Start a process for each rank, as torchrun does, and compare what they say."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    known |= {"TORCHELASTIC_RUN_ID": "lengths", "GROUP_RANK": 0, "OMP_NUM_THREADS": 1}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", case.name],
            env=os.environ | {key: str(value) for key, value in (known | {"RANK": rank, "LOCAL_RANK": rank}).items()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    once = sorted(itertools.chain(*(each["samples"] for each in said))) == list(range(case.count))
    seconds, budget = max(each["seconds"] for each in said), int(case.budget.removesuffix("MiB"))
    peaks = [each["peak"] / MIB for each in said]
    print(
        f"{case.name}, {RANKS} ranks: batches {[each['batches'] for each in said]}, every sample once: {once}, "
        f"{case.count / seconds:.1f} samples/s of processor, peaks {', '.join(f'{each:.1f}' for each in peaks)} MiB of "
        f"{budget}: {'over' if max(peaks) > budget else 'within'}",
        flush=True,
    )


def run_rank(case: Case) -> None:
    """Train one rank's batches, and print a line of JSON."""
    examples = {"strategy": "ddp", "devices": RANKS, "device": "cpu", "budget": case.budget, "lengths": case.lengths}
    sizes = batch_sizes(Module(case.model()), lambda at: torch.stack([case.sample(at)] * 4), **examples)
    lengths, rank = case.drawn(), int(os.environ["RANK"])
    sampler = LengthBatchSampler(lengths, sizes, num_replicas=RANKS, rank=rank)
    batches, samples = list(sampler), [case.sample(length) for length in lengths]
    ddp = {"strategy": "ddp", "devices": RANKS, "use_distributed_sampler": False}
    peak = peak_of(profiled(lambda: fit(case, samples, sampler, **ddp)))[1]
    started = time.process_time()
    fit(case, samples, sampler, **ddp)
    seconds = time.process_time() - started
    own = [*itertools.chain(*batches)]
    print(json.dumps({"samples": own, "batches": len(batches), "peak": peak, "seconds": seconds}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="text, speech, sets (default: all)")
    parser.add_argument("--ranks", action="store_const", const=run_on_ranks, default=run, dest="how")
    parser.add_argument("--rank", action="store_const", const=run_rank, dest="how", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    quieten()
    for case in CASES:
        if not options.cases or case.name in options.cases:
            options.how(case)


if __name__ == "__main__":
    main()
