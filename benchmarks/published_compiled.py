"""Compiled steps that others measured on GPUs, as written and as compiled, and what MemGuard predicts without a GPU.

The compiler that is asked is the one installed here; those of the figures were older, and their figures of the step as
written tell whether it is built as theirs was.

lightning-thunder @e6aa1e003, examples/lit-gpt: open_llama_3b, two texts of 2,048 tokens in bfloat16, SGD, under Fabric,
which gives the logits in float32; A100 with 40 GB, torch 2.3.0.dev20240225, mode "reduce-overhead" (CUDA graphs);
`max_memory_allocated`. torch 2.2.0.dev20231102 (@0014c5a1a) took 0.3 % less of both.

torchtune @7d470bfae, README: Llama 3.2 3B, two packed texts of 4,096 tokens in bfloat16, AdamW, blocks and loss
compiled; A100, torch 2.6 or older; peak active. Its attention to packed texts is FlexAttention; here it is causal.

torchtitan, benchmarks/llama3_h100_202412_torchtitan.md @31a17bfda: Llama 3.1 8B, two texts of 8,192 tokens, FSDP2 and
selective checkpointing on 8 and 128 H100 with 96 GB, each block compiled; torch 1963fc8 (2024-12-23); reserved. The
model is that of `examples/fsdp.py`, for H200, which have the same kernels and do not run short either.

    python benchmarks/published_compiled.py               # each row: some minutes on two cores
    python benchmarks/published_compiled.py thunder torchtitan_8
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_memguard import Footprint, estimate
from shared.process import script
from shared.truth import quieten

MIB = 1 << 20


class Shape(NamedTuple):
    width: int
    layers: int
    heads: int
    groups: int
    hidden: int
    vocabulary: int
    tokens: int


class Norm(nn.Module):
    """RMSNorm in plain operators, as both write it; ``upcast``: in float32."""

    def __init__(self, width: int, *, upcast: bool) -> None:
        super().__init__()
        self.scale, self.upcast = nn.Parameter(torch.ones(width)), upcast

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if self.upcast else x
        return self.scale * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).type_as(x)


def rotated_halves(x: Tensor, turns: Tensor) -> Tensor:
    """lit-gpt's; ``turns``: cosines and sines."""
    first, second = x.chunk(2, -1)
    return (x * turns[0] + torch.cat((-second, first), -1) * turns[1]).type_as(x)


def rotated_pairs(x: Tensor, turns: Tensor) -> Tensor:
    """torchtune's, in float32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosines, sines = turns[..., : even.shape[-1]]
    return torch.stack([even * cosines - odd * sines, odd * cosines + even * sines], -1).flatten(-2).type_as(x)


class Block(nn.Module):
    def __init__(self, shape: Shape, rotated: Callable[[Tensor, Tensor], Tensor], *, fused: bool) -> None:
        super().__init__()
        self.of_head, self.rotated = shape.width // shape.heads, rotated
        self.repeats = shape.heads // shape.groups
        self.widths = [shape.width, *[shape.groups * self.of_head] * 2]
        packed = [sum(self.widths)] if fused else self.widths
        self.projections = nn.ModuleList(nn.Linear(shape.width, width, bias=False) for width in packed)
        self.norms = nn.ModuleList(Norm(shape.width, upcast=not fused) for _ in range(2))
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        normed = self.norms[0](x)
        parts = [each(normed) for each in self.projections]
        if len(parts) == 1:  # of each head its query, key and value
            parts = [each.reshape(x.shape) for each in parts[0].unflatten(-1, (-1, 3, self.of_head)).unbind(-2)]
        query, key, value = (each.unflatten(-1, (-1, self.of_head)).transpose(1, 2) for each in parts)
        query, key = self.rotated(query, turns), self.rotated(key, turns)
        if self.repeats > 1:
            key, value = (each.repeat_interleave(self.repeats, 1) for each in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    def __init__(self, shape: Shape, rotated: Callable[[Tensor, Tensor], Tensor], *, fused: bool, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, rotated, fused=fused) for _ in range(shape.layers))
        self.norm = Norm(shape.width, upcast=not fused)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.register_buffer("turns", torch.zeros(2, shape.tokens, shape.width // shape.heads), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, self.turns)
        return self.head(self.norm(x))


def loss_of(model: Any, tokens: Tensor, compute: Any = F.cross_entropy) -> tuple[Tensor, Tensor]:
    logits = model(tokens).float()
    return compute(logits.flatten(0, 1), tokens.flatten()), logits


def in_bfloat16(build: Callable[[], nn.Module]) -> nn.Module:
    """A model without memory, whose rotations stay in float32."""
    with torch.device("meta"):
        model = build().bfloat16()
    model.turns = model.turns.float()
    return model


def thunder(*, compiled: bool) -> Footprint:
    shape = Shape(3200, 26, 32, 32, 8640, 32_000, 2048)
    model = in_bfloat16(lambda: Decoder(shape, rotated_halves, fused=True, tied=False))
    if compiled:
        model = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    tokens = torch.zeros(2, 2048, dtype=torch.long)
    return estimate(model, tokens, step=loss_of, optimizer=sgd, device="A100-SXM4-40GB")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=6e-4, weight_decay=0.1, foreach=False)


def torchtune(*, compiled: bool) -> Footprint:
    shape = Shape(3072, 28, 24, 8, 8192, 128_256, 4096)
    model, compute = in_bfloat16(lambda: Decoder(shape, rotated_pairs, fused=False, tied=True)), F.cross_entropy
    if compiled:
        compute = torch.compile(compute)
        for block in model.blocks:
            block.compile()

    def step(model: Any, tokens: Tensor) -> Tensor:
        return loss_of(model, tokens, compute)[0]  # its recipe deletes the logits

    tokens = torch.zeros(2, 4096, dtype=torch.long)
    return estimate(model, tokens, step=step, optimizer=torch.optim.AdamW, device="A100-SXM4-80GB")


class Checkpointed(nn.Module):
    """A block with its checkpoint, as torchtitan compiles it: the graph has both."""

    def __init__(self, block: nn.Module, context: Any) -> None:
        super().__init__()
        self.block, self.context = block, context

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        how = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(self.block, x, angles, context_fn=self.context, **how)


def torchtitan(nodes: int, *, compiled: bool) -> Footprint:
    example = script(Path(__file__).parents[1] / "examples" / "fsdp.py")

    class Titan(example.Llama):
        def _parallelize(self, data: Any, tensor: Any) -> None:
            wrapped = [Checkpointed(block, example.every_other_product) for block in self.blocks]
            self.blocks = nn.ModuleList(torch.compile(each, fullgraph=True) if compiled else each for each in wrapped)
            super()._parallelize(data, tensor)

    with torch.device("meta"):
        model, tokens = Titan("8B", checkpointing="none"), torch.empty(2, 8192, dtype=torch.int64)
    ranks = {"strategy": ModelParallelStrategy(8 * nodes, 1), "devices": 8, "num_nodes": nodes}
    return estimate(model, tokens, device="H200", **ranks)


class Row(NamedTuple):
    """What predicts it, whether the figures are reserved memory, and they: as written and as compiled, in MiB."""

    predict: Callable[..., Footprint]
    reserved: bool
    figures: tuple[float, float]


def torchtitan_8(*, compiled: bool) -> Footprint:
    return torchtitan(1, compiled=compiled)


def torchtitan_128(*, compiled: bool) -> Footprint:
    return torchtitan(16, compiled=compiled)


ROWS = {
    "thunder": Row(thunder, False, (23_155.2, 19_979.5)),
    "torchtune": Row(torchtune, False, (61_440, 52_224)),
    "torchtitan_8": Row(torchtitan_8, True, (84_378, 78_848)),
    "torchtitan_128": Row(torchtitan_128, True, (68_608, 63_488)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ROW", help=", ".join(ROWS))
    options = parser.parse_args()
    quieten()
    errors: list[tuple[float, ...]] = []
    print(f"torch {torch.__version__}; MiB\n{'row':<24}{'predicted':>10}{'figure':>10}{'off':>8}  range; seconds")
    for name in options.names or ROWS:
        row, offs = ROWS[name], []
        for compiled, figure in zip((False, True), row.figures, strict=True):
            started = time.monotonic()
            found = row.predict(compiled=compiled)
            assert (found.method == "compiled") == compiled, found.notes
            mib, low, high = (
                (peak.reserved_bytes if row.reserved else peak.allocated_bytes) / MIB
                for peak in (found.peak, found.lowest, found.highest)
            )
            offs.append(100 * (mib / figure - 1))
            print(
                f"{name:<15}{'compiled' if compiled else 'written':<9}{mib:>10,.0f}{figure:>10,.0f}{offs[-1]:>+7.1f}%  "
                f"{low:,.0f} to {high:,.0f}; {time.monotonic() - started:.0f} s",
                flush=True,
            )
        # A step predicted as written would have been compared with the compiled figure.
        errors.append((*map(abs, offs), abs((1 + offs[0] / 100) * row.figures[0] / row.figures[1] * 100 - 100)))
    for place, what in enumerate(("written", "compiled", "compiled steps predicted as written")):
        found = [each[place] for each in errors]
        print(f"{what}: median {statistics.median(found):.1f} %, worst {max(found):.1f} %")


if __name__ == "__main__":
    main()
