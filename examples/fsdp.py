"""A Llama on several devices: FSDP2 and tensor parallelism under Lightning's ModelParallelStrategy, with MemGuard.

Run as a script, it trains a small one on two processes of this machine's CPU; MemGuard chooses the batch size, the same
on both, that fits into a budget:

    python examples/fsdp.py
    python examples/fsdp.py --budget 300MiB --tensor-parallel 2

Planned, it needs none of the devices. The shapes are those of Llama 3.1; the model, its checkpointing and its sharding
are laid out as torchtitan lays out its own:

    memguard plan examples/fsdp.py:Llama --args size=8B checkpointing=selective --input-shape 2,8192:int64:128256 \\
        --devices-per-node 8 --data-parallel 8 --device H100
    memguard plan examples/fsdp.py:Llama --args size=70B checkpointing=full --input-shape 16,8192:int64:128256 \\
        --devices-per-node 8 --num-nodes 128 --data-parallel 128 --tensor-parallel 8 --device H100
"""

from __future__ import annotations

import argparse
import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, Dataset

from lightning_memguard import MemGuard

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    width: int
    layers: int
    heads: int
    groups: int
    hidden: int
    vocabulary: int = 128_256


SHAPES = {
    "tiny": Shape(128, 4, 4, 2, 512, 1000),
    "8B": Shape(4096, 32, 32, 8, 14_336),
    "70B": Shape(8192, 80, 64, 8, 28_672),
    "405B": Shape(16_384, 126, 128, 8, 53_248),
}


def rotate(values: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of a head's features by an angle that grows with the position."""
    pairs = torch.view_as_complex(values.float().reshape(*values.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None]).flatten(3).type_as(values)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.of_head = shape.width // shape.heads
        self.repeats = shape.heads // shape.groups
        self.queries = nn.Linear(shape.width, shape.width, bias=False)
        self.keys = nn.Linear(shape.width, shape.groups * self.of_head, bias=False)
        self.values = nn.Linear(shape.width, shape.groups * self.of_head, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        queries, keys, values = (
            each(x).view(samples, tokens, -1, self.of_head) for each in (self.queries, self.keys, self.values)
        )
        queries, keys = rotate(queries, angles), rotate(keys, angles)
        keys, values = (self.repeat(each) for each in (keys, values))
        queries, keys, values = (each.transpose(1, 2) for each in (queries, keys, values))
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(samples, tokens, -1))

    def repeat(self, x: Tensor) -> Tensor:
        """The heads of keys or values as often as there are queries to each."""
        samples, tokens, groups, of_head = x.shape
        return (
            x[:, :, :, None]
            .expand(samples, tokens, groups, self.repeats, of_head)
            .reshape(samples, tokens, -1, of_head)
        )


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.ff_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention, self.ff = Attention(shape), FeedForward(shape)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.ff(self.ff_norm(x))


class Llama(pl.LightningModule):
    """A Llama of one of `SHAPES`, trained to predict the next token.

    Args:
        size: its name in `SHAPES`.
        checkpointing: what blocks keep for the backward pass: all, the results of every other matrix product and of
            attention, or their input alone.
        tokens: the longest text.
        batch_size: samples per batch on each rank; MemGuard sets another.
    """

    def __init__(
        self, size: str = "tiny", *, checkpointing: Checkpointing = "none", tokens: int = 8192, batch_size: int = 2
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.shape, self.tokens, self.checkpointing = SHAPES[size], tokens, checkpointing
        self.batch_size = batch_size
        self.words: nn.Embedding | None = None

    def configure_model(self) -> None:
        """Lightning calls it once the ranks know each other; on one device there is no mesh."""
        if self.words is not None:
            return
        shape = self.shape
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)
        of_head = shape.width // shape.heads
        speeds = 500_000.0 ** (-torch.arange(0, of_head, 2).float() / of_head)
        turns = torch.outer(torch.arange(self.tokens), speeds)
        self.register_buffer("angles", torch.polar(torch.ones_like(turns), turns), persistent=False)
        if self.device_mesh is not None:
            self._parallelize(self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"])

    def _parallelize(self, data: Any, tensor: Any) -> None:
        if tensor.size() > 1:
            parallelize_module(self, tensor, _OUTER_PLAN)
            for block in self.blocks:
                parallelize_module(block, tensor, _BLOCK_PLAN)
        if data.size() > 1:
            # parameters are kept in float32, gathered in bfloat16, and their gradients reduced in float32
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for place, block in enumerate(self.blocks):
                last = place == len(self.blocks) - 1  # it is needed again at once
                fully_shard(block, mesh=data, mp_policy=policy, reshard_after_forward=not last)
            fully_shard(self, mesh=data, mp_policy=policy)

    def forward(self, tokens: Tensor) -> Tensor:
        x, angles = self.words(tokens), self.angles[: tokens.shape[1]]
        for block in self.blocks:
            x = self._run(block, x, angles)
        return self.head(self.norm(x))

    def _run(self, block: nn.Module, x: Tensor, angles: Tensor) -> Tensor:
        if self.checkpointing == "none":
            return block(x, angles)
        how = {"context_fn": every_other_product} if self.checkpointing == "selective" else {}
        return checkpoint(block, x, angles, use_reentrant=False, preserve_rng_state=False, **how)

    def _splitting_loss(self) -> contextlib.AbstractContextManager[Any]:
        """Each rank of a tensor-parallel group computes the loss of its part of the vocabulary."""
        mesh = self.device_mesh
        return loss_parallel() if mesh is not None and mesh["tensor_parallel"].size() > 1 else contextlib.nullcontext()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        with self._splitting_loss():
            return F.cross_entropy(self(tokens).flatten(0, 1).float(), tokens.flatten())

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self._splitting_loss():
            super().backward(loss, *args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=self.device.type == "cuda")

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Texts(self.tokens, self.shape.vocabulary), batch_size=self.batch_size, shuffle=True)


class Texts(Dataset[Tensor]):
    """Random tokens: their memory does not depend on their values."""

    def __init__(self, tokens: int, vocabulary: int, texts: int = 4096) -> None:
        self.tokens, self.vocabulary, self.texts = tokens, vocabulary, texts

    def __len__(self) -> int:
        return self.texts

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(self.vocabulary, (self.tokens,), generator=torch.Generator().manual_seed(index))


def every_other_product(also: Sequence[Any] = ()) -> Any:
    """Selective checkpointing: keep the results of attention and of every other matrix product of a block.

    Args:
        also: other operators whose results are kept.
    """
    products: dict[bool, int] = defaultdict(int)

    def choose(context: Any, operator: Any, *_: object, **__: object) -> CheckpointPolicy:
        keeps = operator in _KEPT or operator in also
        if operator is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


_KEPT = {
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}

# Tensor parallelism: between blocks and in norms, each rank has a part of the text.
_OUTER_PLAN = {
    "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}
_BLOCK_PLAN = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
    **{f"attention.{name}": ColwiseParallel() for name in ("queries", "keys", "values")},
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "ff_norm": SequenceParallel(),
    "ff": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    **{f"ff.{name}": ColwiseParallel() for name in ("gate", "up")},
    "ff.down": RowwiseParallel(output_layouts=Shard(1)),
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    guard = MemGuard(budget=options.budget, batch_size="largest", min_steps_per_epoch=None)
    strategy = ModelParallelStrategy(
        data_parallel_size=2 // options.tensor_parallel,
        tensor_parallel_size=options.tensor_parallel,
        process_group_backend="gloo",
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=[guard],
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Llama(tokens=64))
    if guard.decision is not None and trainer.is_global_zero:
        ranks = "two ranks" if options.tensor_parallel == 1 else "one batch on two ranks"
        print(f"Trained {trainer.global_step} steps at batch size {guard.decision.batch_size} ({ranks}).")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="200MiB", help="memory that each rank may use (default: %(default)s)")
    parser.add_argument("--tensor-parallel", type=int, choices=(1, 2), default=1, help="ranks that share a batch")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default: %(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
