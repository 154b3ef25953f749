"""A step at shapes not surveyed, byte by byte: the trace that follows from four lengths next to a captured one.

Thirteen models are captured without a GPU at 4 and 8 samples of 128, 192, 256 and 512 (tokens, frames, points, or a
quarter of a picture's side), fitted (`lightning_memguard/core/trace/lengths.py`), and compared at five other shapes.

    python benchmarks/length_grid.py                 # for an A100; two minutes on one core
    python benchmarks/length_grid.py --device cpu
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from lengths import Points, Speech
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.capture import Captures, capture
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.trace.growth import grow
from lightning_memguard.core.trace.lengths import grow_by_length
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.planning.target import Target, target_of

SURVEYED, SIZES = (128, 192, 256, 512), (4, 8)
OTHERS = ((6, 160), (24, 224), (16, 320), (5, 384), (32, 301))


class Block(nn.Module):
    def __init__(self, width: int, *, fused: bool, causal: bool) -> None:
        super().__init__()
        self.fused, self.causal = fused, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        count, length, _ = x.shape
        heads = (each.view(count, length, 4, -1).transpose(1, 2) for each in self.inputs(self.first(x)).chunk(3, -1))
        query, key, value = heads
        if self.fused:
            found = F.scaled_dot_product_attention(query, key, value, mask, is_causal=self.causal)
        else:
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(later, float("-inf"))
            found = F.dropout(scores.softmax(-1), 0.1) @ value
        x = x + self.output(found.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(self, *, fused: bool, width: int = 128) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(1000, width), nn.Embedding(4096, width), nn.Linear(width, 1000)
        self.blocks = nn.ModuleList(Block(width, fused=fused, causal=True) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Encoder(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(1000, width), nn.Embedding(4096, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(Block(width, fused=True, causal=False) for _ in range(2))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, mask.bool()[:, None, None, :])
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1))


class LSTM(nn.Module):
    def __init__(self, *, packed: bool) -> None:
        super().__init__()
        self.packed, self.embed, self.head = packed, nn.Embedding(500, 64), nn.Linear(192, 500)
        self.layers = nn.LSTM(64, 96, 2, batch_first=True, bidirectional=True)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x: Any = self.embed(batch[0])
        if self.packed:
            x = nn.utils.rnn.pack_padded_sequence(x, batch[1], batch_first=True)
        x, _ = self.layers(x)
        return self.head(nn.utils.rnn.pad_packed_sequence(x, batch_first=True)[0] if self.packed else x)


class Wave(nn.Module):
    """Convolutions with strides over sound, then an encoder, as wav2vec 2.0 has them."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = nn.Conv1d(1, 64, 10, 5), nn.Conv1d(64, 64, 4, 2), nn.Conv1d(64, 64, 4, 2)
        self.net = nn.Sequential(*(nn.Sequential(each, nn.GELU()) for each in convolutions))
        self.encoder, self.head = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), nn.Linear(64, 30)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.net(sound[:, None]).transpose(1, 2)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = {"down": (3, 16), "deeper": (16, 32), "middle": (32, 32), "up": (64, 16), "last": (32, 16)}
        self.parts = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())
                for name, (a, b) in widths.items()
            }
        )
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        at = self.parts
        first = at["down"](picture)
        second = at["deeper"](F.max_pool2d(first, 2))
        x = at["middle"](F.max_pool2d(second, 2))
        x = at["up"](torch.cat([F.interpolate(x, scale_factor=2), second], 1))
        return self.out(at["last"](torch.cat([F.interpolate(x, scale_factor=2), first], 1)))


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        nodes, edges = batch
        return self.second(edges @ self.first(edges @ nodes).relu())


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(800, 64), nn.Linear(64, 800)
        self.net = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.net(x, x, tgt_mask=mask))


class Relative(nn.Module):
    """Adds a bias for each distance of two tokens to scores that are written out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bias, self.head = nn.Embedding(500, 64), nn.Embedding(65, 1), nn.Linear(64, 500)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        place, x = torch.arange(ids.shape[1], device=ids.device), self.embed(ids)
        distance = (place[:, None] - place).clamp(-32, 32) + 32
        return self.head((x @ x.mT / 8 + self.bias(distance)[..., 0]).softmax(-1) @ x)


class Case(NamedTuple):
    model: nn.Module
    batch: Callable[[int, int], Any]
    loss: Callable[[Any, Any], torch.Tensor]
    precision: str = "32-true"


def ids(count: int, length: int) -> torch.Tensor:
    return torch.zeros(count, length, dtype=torch.long)


def named(count: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": ids(count, length), "attention_mask": ids(count, length) + 1, "labels": ids(count, 1)[:, 0]}


def with_lengths(count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return ids(count, length), torch.full((count,), length)


def pictures(count: int, quarter: int) -> torch.Tensor:
    return torch.empty(count, 3, 4 * quarter, 4 * quarter, device="meta")


def next_token(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def own_token(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch[0].flatten())


def label(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch).float(), batch["labels"])


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).float().square().mean()


CASES = {
    "GPT, attention written out": Case(GPT(fused=False), ids, next_token, "bf16-mixed"),
    "GPT, SDPA, bf16-mixed": Case(GPT(fused=True), ids, next_token, "bf16-mixed"),
    "GPT, SDPA, float32": Case(GPT(fused=True), ids, next_token),
    "encoder with a mask, SDPA": Case(Encoder(), named, label, "16-mixed"),
    "LSTM": Case(LSTM(packed=False), with_lengths, own_token),
    "LSTM, packed": Case(LSTM(packed=True), with_lengths, own_token),
    "1-d convolutions": Case(Speech(), lambda n, at: torch.zeros(n, 80, at), lambda model, batch: model(batch)),
    "strided convolutions, encoder": Case(Wave(), lambda n, at: torch.zeros(n, 40 * at), square, "bf16-mixed"),
    "U-Net": Case(UNet(), pictures, square),
    "sets that look at each other": Case(Points(), lambda n, at: torch.zeros(n, at, 8), lambda model, b: model(b)),
    "dense graph network": Case(Graph(), lambda n, at: (torch.zeros(n, at, 16), torch.zeros(n, at, at)), square),
    "translator": Case(Translator(), ids, next_token, "bf16-mixed"),
    "relative positions": Case(Relative(), ids, next_token),
}


def compare(case: Case, target: Target) -> tuple[int, list[str]]:
    """The number of events, and for each shape whether all are the same."""

    def program(length: int) -> LoopProgram:
        batches = batches_from_one(case.batch(2, length), 2)
        rest = target.device, case.precision, True, target.gpu
        return LoopProgram(case.model, batches, case.loss, torch.optim.AdamW, *rest)

    programs = {length: program(length) for length in (*SURVEYED, *(length for _, length in OTHERS))}
    found, events = [], 0
    with Captures(*programs.values()):
        shapes = grow_by_length({at: grow([capture(programs[at], size, "fake") for size in SIZES]) for at in SURVEYED})
        for size, length in OTHERS:
            predicted, captured = shapes.at(length).at(size).events, capture(programs[length], size, "fake").events
            events = len(captured)
            off = sum(mine != theirs for mine, theirs in zip(predicted, captured, strict=False))
            found.append("same" if predicted == captured else f"{off} of {events} differ")
    return events, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="A100 80GB")
    target = target_of(parser.parse_args().device)
    torch.set_num_threads(1)
    print(f"{target.gpu.name if target.gpu else target.device}; shapes {', '.join(f'{n} x {at}' for n, at in OTHERS)}")
    for name, case in CASES.items():
        started = time.perf_counter()
        try:
            events, found = compare(case, target)
        except CannotTraceError as error:
            print(f"{name:32} not fitted: {error}")
            continue
        print(f"{name:32} {events:5} events  {', '.join(found)}  {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
