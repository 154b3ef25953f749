"""Compiled steps that others measured on GPUs, as written and as compiled, and what MemGuard predicts without a GPU.

The compiler that is asked is the one installed here; those of the figures were older, and their figures of the step as
written tell whether it is built as theirs was.

lightning-thunder @e6aa1e003, examples/lit-gpt: open_llama_3b, two texts of 2,048 tokens in bfloat16, SGD, under Fabric,
which gives the logits in float32; A100 with 40 GB, torch 2.3.0.dev20240225, mode "reduce-overhead" (CUDA graphs);
`max_memory_allocated`. torch 2.2.0.dev20231102 (@0014c5a1a) took 0.3 % less of both.

Its benchmarks/benchmark_litgpt.py: LitGPT's models with few layers on H100 with 80 GB, texts of 4,096 tokens in
bfloat16, AdamW. Issue 474 (2024-06): Llama-2-13B, two texts. Issue 1426 (2024-12): Mistral-7B-v0.1, one text, DDP on
8 GPUs; GB, `max_memory_allocated` of a run, the first step included.

torchtune @1814feb17 (2024-11-18), README: Llama 3.2 3B, two packed texts of 4,096 tokens in bfloat16, AdamW; A100,
torch 2.5; peak active. Its attention to packed texts is FlexAttention, which it compiles by itself in all rows.
"Compile" is each block; its recipe drops what `compile_loss` returns, so the loss is compiled only if it is in chunks.
The optimizer is taken to be fused: one that is not takes 30 GiB in each row, and the last figure is 24.9.

torchtitan, benchmarks/llama3_h100_202412_torchtitan.md @31a17bfda: Llama 3.1 8B, two texts of 8,192 tokens, FSDP2 and
selective checkpointing on 8 and 128 H100 with 96 GB, each block compiled; torch 1963fc8 (2024-12-23); reserved. The
model is that of `examples/fsdp.py`, for H200, which have the same kernels and do not run short either. "float8": by
torchao's linear layers (@eab345c, here the version that is installed), whose weights are gathered in float8.

The same model on 8 H100, started by torchtitan's script, which sets expandable segments. "one": one text of 8,192
tokens, pull request 808 of torchtitan (2025-01); "abs": while checkpoints kept `aten.abs`, by commit 7a04053a7 of that
branch, without the workaround in torchao that took 8 GiB off and is gone again. "short": one text of 4,096 tokens, pull
request 778 and README of torchao's prototype/float8nocompile @105f1ad7f; what the former calls "No AC" is full
checkpointing by the latter, whose float8 without checkpoints (46.64) is left out: it does not say how weights are cast.
"summer": pull requests 2594 and 2595 of torchao (2025-07), one text of 8,192 tokens, torch's own norms, loss compiled.

torchtitan, results.tsv of branch autoresearch-parallelize/may19-qwen3-14b @df248332b: Qwen3-14B, texts of 4,096 tokens,
FSDP2 on eight B200, cross entropy in eight chunks, blocks and loss compiled, no checkpointing; torch
2.13.0a0+git85cb48a; expandable segments; reserved, in tenths of GiB after ten steps, the first one included. "saving"
is `activation_memory_budget`: 0.8, 0.9 and 0.95 gave the same figure.

    python benchmarks/published_compiled.py               # each row: some minutes on two cores
    python benchmarks/published_compiled.py thunder torchtitan_8
"""

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from lightning_memguard import Footprint, estimate
from shared.process import script
from shared.truth import quieten

MIB = 1 << 20
EXAMPLE = script(Path(__file__).parents[1] / "examples" / "fsdp.py")


class Shape(NamedTuple):
    width: int
    layers: int
    heads: int
    groups: int
    hidden: int
    vocabulary: int
    tokens: int

    @property
    def of_head(self) -> int:
        return self.width // self.heads


class Norm(nn.Module):
    """RMSNorm in plain operators, as lit-gpt and torchtune write it; ``upcast``: in float32."""

    def __init__(self, width: int, *, upcast: bool) -> None:
        super().__init__()
        self.scale, self.upcast = nn.Parameter(torch.ones(width)), upcast

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if self.upcast else x
        return self.scale * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).type_as(x)


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


class Block(nn.Module):
    """A block of each model; the kinds differ in how they attend."""

    def __init__(self, shape: Shape, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.shape = shape
        self.norms = nn.ModuleList(norm(shape.width) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(shape.width, each, bias=False) for each in self.widths())
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def widths(self) -> list[int]:
        return [heads * self.shape.of_head for heads in (self.shape.heads, self.shape.groups, self.shape.groups)]

    def forward(self, x: Tensor, *around: Any) -> Tensor:
        x = x + self.out(self.attend(self.norms[0](x), *around).flatten(2))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def projected(self, x: Tensor) -> Iterator[Tensor]:
        return (each(x).unflatten(-1, (-1, self.shape.of_head)) for each in self.projections)

    def attend(self, x: Tensor, *around: Any) -> Tensor:
        raise NotImplementedError


class OfLitGpt(Block):
    """One projection, with each group's queries, key and value."""

    def widths(self) -> list[int]:
        return [(self.shape.heads + 2 * self.shape.groups) * self.shape.of_head]

    def attend(self, x: Tensor, *around: Any) -> Tensor:
        (packed,), (cosines, sines) = (each(x) for each in self.projections), around[0]
        groups, of_head = self.shape.groups, self.shape.of_head
        repeats = self.shape.heads // groups
        packed = packed.unflatten(-1, (groups, repeats + 2, of_head)).permute(0, 2, 3, 1, 4)
        query, key, value = packed.split((repeats, 1, 1), 2)
        if repeats > 1:
            key, value = key.expand_as(query), value.expand_as(query)
        query, key, value = (each.reshape(len(x), -1, *each.shape[-2:]) for each in (query, key, value))
        query, key = (turned(each, cosines, sines).type_as(x) for each in (query, key))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class OfTorchtune(Block):
    """Pairs are turned by the angles of each token's place in its text."""

    def attend(self, x: Tensor, *around: Any) -> Tensor:
        turns, places, mask = around
        query, key, value = self.projected(x)
        query, key = (self.turned(each, turns[places]).transpose(1, 2) for each in (query, key))
        key, value = (self.repeated(each) for each in (key, value.transpose(1, 2)))
        return attend_flexibly(query, key, value, mask).transpose(1, 2).contiguous()

    def turned(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        turns = turns.view(-1, pairs.size(1), 1, pairs.size(3), 2)
        even = pairs[..., 0] * turns[..., 0] - pairs[..., 1] * turns[..., 1]
        odd = pairs[..., 1] * turns[..., 0] + pairs[..., 0] * turns[..., 1]
        return torch.stack([even, odd], -1).flatten(3).type_as(x)

    def repeated(self, x: Tensor) -> Tensor:
        samples, groups, tokens, of_head = x.shape
        repeats = self.shape.heads // groups
        return x.unsqueeze(2).expand(samples, groups, repeats, tokens, of_head).flatten(1, 2)


compiled_flex = torch.compile(flex_attention, dynamic=False)


@torch.compiler.disable(recursive=False)
def attend_flexibly(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    return compiled_flex(query, key, value, block_mask=mask)


class OfQwen(Block):
    """Norms of queries and keys; tokens come with their places."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, partial(nn.RMSNorm, eps=1e-6))
        self.head_norms = nn.ModuleList(nn.RMSNorm(shape.of_head, eps=1e-6) for _ in range(2))

    def attend(self, x: Tensor, *around: Any) -> Tensor:
        turns, places = around
        query, key, value = self.projected(x)
        query, key = (norm(each) for norm, each in zip(self.head_norms, (query, key), strict=True))
        (samples, tokens, _), width = x.shape, turns.shape[-1]
        places = places.view(samples, tokens, 1, 1).expand(samples, tokens, 1, width)
        of_tokens = torch.gather(turns[None, :, None].expand(samples, -1, -1, -1), 1, places)
        cosines, sines = of_tokens.chunk(2, -1)
        query, key = (turned(each.float(), cosines, sines).type_as(x) for each in (query, key))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).contiguous()


class Decoder(nn.Module):
    """In bfloat16 and without memory; its rotations stay in float32."""

    def __init__(self, shape: Shape, block: type[Block], turns: tuple[int, ...], *, upcast: bool, tied: bool) -> None:
        super().__init__()
        norm = partial(Norm, upcast=upcast)
        with torch.device("meta"):
            self.words = nn.Embedding(shape.vocabulary, shape.width)
            self.blocks = nn.ModuleList(block(shape, norm) for _ in range(shape.layers))
            self.norm, self.head = norm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)
            self.bfloat16().register_buffer("turns", torch.zeros(turns), persistent=False)
        if tied:
            self.head.weight = self.words.weight
        self.checkpointed, self.ends_in_head = False, True

    def forward(self, tokens: Tensor, *around: Any) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=False) if self.checkpointed else block
            x = run(x, self.turns, *around)
        x = self.norm(x)
        return self.head(x) if self.ends_in_head else x


def thunder(*, compiled: bool) -> Footprint:
    shape = Shape(3200, 26, 32, 32, 8640, 32_000, 2048)
    model = Decoder(shape, OfLitGpt, (2, 2048, shape.of_head), upcast=False, tied=False)
    if compiled:
        model = torch.compile(model, fullgraph=True, mode="reduce-overhead")

    def step(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(tokens).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits

    tokens = torch.zeros(2, 2048, dtype=torch.long)
    return estimate(model, tokens, step=step, optimizer=sgd, device="A100-SXM4-40GB")


def litgpt(shape: Shape, layers: int, *, compiled: bool, texts: int, **ranks: Any) -> Footprint:
    model = Decoder(shape._replace(layers=layers), OfLitGpt, (2, 4096, shape.of_head), upcast=True, tied=False)
    model.turns = model.turns.bfloat16()

    def step(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(tokens).flatten(0, 1)
        return F.cross_entropy(logits, tokens.flatten(), ignore_index=-1), logits

    tokens, optimizer = torch.zeros(texts, 4096, dtype=torch.long), partial(torch.optim.AdamW, fused=True)
    model = torch.compile(model) if compiled else model
    return estimate(model, tokens, step=step, optimizer=optimizer, device="H100", **ranks)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=6e-4, weight_decay=0.1, foreach=False)


def torchtune(*, compiled: bool, chunks: int = 1, checkpointed: bool = False) -> Footprint:
    shape = Shape(3072, 28, 24, 8, 8192, 128_256, 4096)
    model = Decoder(shape, OfTorchtune, (4096, 64, 2), upcast=True, tied=True)
    model.checkpointed, model.ends_in_head = checkpointed, chunks == 1

    def compute(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="sum")

    if compiled:
        for block in model.blocks:
            block.compile()
        compute = torch.compile(compute) if chunks > 1 else compute

    def step(model: Any, batch: Any) -> Tensor:
        tokens, places, texts = batch

        def of_one_text(sample: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (texts[sample, query] == texts[sample, key])

        mask = create_block_mask(of_one_text, 2, None, shape.tokens, shape.tokens, device=texts.device)
        if chunks == 1:
            logits = model(tokens, places, mask).float()
            return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())  # its recipe deletes the logits
        parts = [model.head(each).flatten(0, 1) for each in model(tokens, places, mask).chunk(chunks, 1)]
        labels = (each.flatten() for each in tokens.chunk(chunks, 1))
        return sum(compute(each, of) for each, of in zip(parts, labels, strict=True)) / tokens.numel()

    tokens = torch.zeros(2, 4096, dtype=torch.long)
    batch = (tokens, tokens.clone(), tokens.clone())
    optimizer = partial(torch.optim.AdamW, fused=True)
    return estimate(model, batch, step=step, optimizer=optimizer, device="A100-SXM4-80GB")


class Checkpointed(nn.Module):
    """A block with its checkpoint, as torchtitan compiles it: the graph has both."""

    def __init__(self, block: nn.Module, **how: Any) -> None:
        super().__init__()
        self.block, self.how = block, how

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return checkpoint(self.block, x, angles, use_reentrant=False, preserve_rng_state=False, **self.how)


def selective(*also: Any) -> Callable[[nn.Module, int], nn.Module]:
    """Keep every other matrix product and what else is named."""
    return lambda block, _: Checkpointed(block, context_fn=partial(EXAMPLE.every_other_product, also))


LARGEST, SIZES = torch.ops.aten.max.default, torch.ops.aten.abs.default
CHECKPOINTS: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "none": lambda block, _: block,
    "full": lambda block, _: Checkpointed(block),
    "second": lambda block, place: Checkpointed(block) if place % 2 else block,
    "selective": selective(LARGEST),
    "abs": selective(LARGEST, SIZES),
}


def torchtitan(
    *,
    compiled: bool,
    nodes: int = 1,
    texts: int = 2,
    tokens: int = 8192,
    checkpoints: str = "selective",
    float8: str = "",
    compiles_loss: bool = False,
    norms_of_2024: bool = True,
) -> Footprint:
    class Titan(EXAMPLE.Llama):
        def _parallelize(self, data: Any, tensor: Any) -> None:
            if norms_of_2024:
                for name, norm in [(name, each) for name, each in self.named_modules() if isinstance(each, nn.RMSNorm)]:
                    self.set_submodule(name, Norm(*norm.normalized_shape, upcast=True))
            if float8:
                convert_to_float8(self, float8)
            wrapped = [CHECKPOINTS[checkpoints](block, place) for place, block in enumerate(self.blocks)]
            self.blocks = nn.ModuleList(torch.compile(each, fullgraph=True) if compiled else each for each in wrapped)
            super()._parallelize(data, tensor)

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            if float8 == "gathered":
                importlib.import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(self)

        def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
            return loss_of(self(tokens), tokens)

    loss_of = torch.compile(mean_of_losses) if compiled and compiles_loss else mean_of_losses
    with torch.device("meta"):
        model, batch = Titan("8B", tokens=tokens), torch.empty(texts, tokens, dtype=torch.int64)
    ranks = {"strategy": ModelParallelStrategy(8 * nodes, 1), "devices": 8, "num_nodes": nodes}
    return estimate(model, batch, device="H200", **ranks)


def convert_to_float8(model: nn.Module, recipe: str) -> None:
    """Let torchao compute all products but the last one in float8; "gathered": of weights that come in float8 too."""
    ao = importlib.import_module("torchao.float8")
    gathered = ao.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    config = gathered if recipe == "gathered" else ao.Float8LinearConfig.from_recipe_name(recipe)
    ao.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "head")


def mean_of_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class GivenGradient(torch.autograd.Function):
    """A loss that has made the gradient of the last hidden states already."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0], None, None


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")


class Qwen(EXAMPLE.Llama):
    """Qwen3-14B as torchtitan shards it, whose loss is made chunk by chunk with its gradients."""

    SHAPE, CHUNKS = Shape(5120, 40, 40, 8, 17_408, 151_936, 4096), 8

    def __init__(self, dtype: torch.dtype, *, compiled: bool) -> None:
        super().__init__("tiny")
        self.kept, self.compiled = dtype, compiled

    def configure_model(self) -> None:
        if self.words is not None:
            return
        shape = self.SHAPE
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(OfQwen(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.to(self.kept).register_buffer("turns", torch.zeros(shape.tokens, 2 * shape.of_head), persistent=False)
        self.compute = torch.compile(sum_of_losses) if self.compiled else sum_of_losses
        for block in self.blocks if self.compiled else ():
            block.compile(fullgraph=True)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for each in (*self.blocks, self.head, self):
            fully_shard(each, mesh=self.device_mesh["data_parallel"], mp_policy=policy)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, self.turns, places)
        return self.norm(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, labels, places = batch
        hidden = self(tokens, places)
        chunks = [each.contiguous().requires_grad_() for each in hidden.detach().chunk(self.CHUNKS, 1)]
        gradient = torch.zeros_like(hidden, dtype=torch.float32)
        loss = hidden.new_zeros((), dtype=torch.float32)
        self._keep_head(True)
        for chunk, of_chunk, into in zip(
            chunks, labels.chunk(self.CHUNKS, 1), gradient.chunk(self.CHUNKS, 1), strict=True
        ):
            self.head.set_requires_gradient_sync(chunk is chunks[-1], recurse=False)
            logits = self.head(chunk)  # its name keeps them, as there, while the next are made
            part = self.compute(logits, of_chunk) / tokens.numel()
            loss = loss + part.detach()
            part.backward()
            into.copy_(chunk.grad.float())
            chunk.grad = None
        self._keep_head(False)
        self.head.reshard()
        return GivenGradient.apply(hidden, gradient.to(hidden.dtype), loss)

    def _keep_head(self, kept: bool) -> None:
        self.head.set_reshard_after_forward(not kept)
        self.head.set_reshard_after_backward(not kept)


def qwen(*, compiled: bool, texts: int = 4, dtype: torch.dtype = torch.float32, saving: float = 1.0) -> Footprint:
    with torch.device("meta"):
        model, tokens = Qwen(dtype, compiled=compiled), torch.empty(texts, 4096, dtype=torch.int64)
    batch, ranks = (tokens, tokens.clone(), tokens.clone()), {"strategy": ModelParallelStrategy(8, 1), "devices": 8}
    saved = torch._functorch.config.patch(activation_memory_budget=saving)
    with saved, setting("PYTORCH_ALLOC_CONF", "expandable_segments:True"):
        return estimate(model, batch, device="NVIDIA B200", **ranks)


@contextmanager
def setting(variable: str, value: str) -> Iterator[None]:
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before


class Row(NamedTuple):
    """A published row: its prediction, whether figures are reserved memory, and they: as written, compiled; in MiB."""

    predict: Callable[..., Footprint]
    reserved: bool
    figures: tuple[float | None, float | None]


def by_its_script(**how: Any) -> Footprint:
    with setting("PYTORCH_ALLOC_CONF", "expandable_segments:True"):
        return torchtitan(texts=1, **how)


half = partial(qwen, dtype=torch.bfloat16)
short = partial(by_its_script, tokens=4096)
summer = partial(by_its_script, compiles_loss=True, norms_of_2024=False)
llama = partial(litgpt, Shape(5120, 40, 40, 40, 13_824, 32_000, 4096), texts=2)
mistral = partial(litgpt, Shape(4096, 32, 32, 8, 14_336, 32_000, 4096), texts=1, strategy="ddp", devices=8)
GIB, GB = 1024, 1e9 / MIB  # in MiB
ROWS = {
    "thunder": Row(thunder, False, (23_155.2, 19_979.5)),
    "llama_2": Row(partial(llama, 2), False, (None, 11.33 * GB)),
    "llama_4": Row(partial(llama, 4), False, (None, 18.35 * GB)),
    "llama_10": Row(partial(llama, 10), False, (None, 39.43 * GB)),
    "llama_20": Row(partial(llama, 20), False, (None, 74.56 * GB)),
    "mistral_2": Row(partial(mistral, 2), False, (None, 8.18 * GB)),
    "mistral_4": Row(partial(mistral, 4), False, (None, 12.88 * GB)),
    "mistral_16": Row(partial(mistral, 16), False, (None, 41.68 * GB)),
    "torchtune": Row(torchtune, False, (60.0 * GIB, 51.0 * GIB)),
    "torchtune_chunks": Row(partial(torchtune, chunks=8), False, (None, 42.9 * GIB)),
    "torchtune_full": Row(partial(torchtune, chunks=8, checkpointed=True), False, (None, 24.9 * GIB)),
    "torchtitan_8": Row(partial(torchtitan, nodes=1), True, (84_378, 78_848)),
    "torchtitan_128": Row(partial(torchtitan, nodes=16), True, (68_608, 63_488)),
    "torchtitan_8_float8": Row(partial(torchtitan, float8="gathered"), True, (None, 76.8 * GIB)),
    "torchtitan_128_float8": Row(partial(torchtitan, nodes=16, float8="gathered"), True, (None, 61.8 * GIB)),
    "one": Row(by_its_script, True, (None, 47.65 * GIB)),
    "one_float8": Row(partial(by_its_script, float8="gathered"), True, (None, 47.32 * GIB)),
    "one_rows": Row(partial(by_its_script, float8="rowwise"), True, (None, 47.77 * GIB)),
    "one_rows_abs": Row(partial(by_its_script, float8="rowwise", checkpoints="abs"), True, (None, 66.81 * GIB)),
    "short": Row(partial(short, checkpoints="none"), True, (53.12 * GIB, None)),
    "short_second": Row(partial(short, checkpoints="second"), True, (40.6 * GIB, None)),
    "short_full": Row(partial(short, checkpoints="full"), True, (28.07 * GIB, 28.07 * GIB)),
    "short_full_float8": Row(partial(short, checkpoints="full", float8="tensorwise"), True, (None, 28.03 * GIB)),
    "summer_float8": Row(partial(summer, float8="gathered"), True, (None, 36.68 * GIB)),
    "summer_rows": Row(partial(summer, float8="rowwise"), True, (None, 37.19 * GIB)),
    "summer_rows_but_weights": Row(partial(summer, float8="rowwise_with_gw_hp"), True, (None, 37.13 * GIB)),
    "qwen": Row(qwen, True, (173.9 * GIB, 153.7 * GIB)),
    "qwen_bf16": Row(half, True, (160.7 * GIB, 140.3 * GIB)),
    "qwen_bf16_5": Row(partial(half, texts=5), True, (None, 168.7 * GIB)),
    "qwen_bf16_6_saving": Row(partial(half, texts=6, saving=0.9), True, (None, 146.2 * GIB)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ROW", help=", ".join(ROWS))
    options = parser.parse_args()
    quieten()
    offs: dict[str, list[float]] = {what: [] for what in ("written", "compiled", "compiled steps predicted as written")}
    print(f"torch {torch.__version__}; MiB\n{'row':<28}{'predicted':>10}{'figure':>10}{'off':>8}  range; seconds")
    for name in options.names or ROWS:
        row, written = ROWS[name], 0.0
        for compiled, figure in zip((False, True), row.figures, strict=True):
            if compiled and not figure:
                continue
            started = time.monotonic()
            found = row.predict(compiled=compiled)
            assert found.method == "compiled" or not compiled, found.notes
            mib, low, high = (
                (peak.reserved_bytes if row.reserved else peak.allocated_bytes) / MIB
                for peak in (found.peak, found.lowest, found.highest)
            )
            if figure:
                offs["compiled" if compiled else "written"].append(100 * (mib / figure - 1))
            if compiled and figure:
                offs["compiled steps predicted as written"].append(100 * (written / figure - 1))
            written = mib
            print(
                f"{name:<19}{'compiled' if compiled else 'written':<9}{mib:>10,.0f}{figure or 0:>10,.0f}"
                f"{100 * (mib / figure - 1) if figure else 0:>+7.1f}%  {low:,.0f} to {high:,.0f}; "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
    for what, each in offs.items():
        if each:
            sizes = sorted(map(abs, each))
            print(f"{what}: median {statistics.median(sizes):.1f} %, worst {sizes[-1]:.1f} % of {len(each)}")


if __name__ == "__main__":
    main()
