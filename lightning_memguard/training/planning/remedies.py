"""The remedies: what may make a step take less memory, each a change to the program that runs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_memguard.core.capture.capture import isolated
from lightning_memguard.core.capture.predict import Prediction
from lightning_memguard.core.capture.program import LoopProgram, Program, SwapOptimizer, without_memory
from lightning_memguard.core.capture.storages import written_path
from lightning_memguard.core.layers.layers import LayerTable, layer_table
from lightning_memguard.core.simulation import compiled
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.training.offload.predicted import offloaded
from lightning_memguard.training.planning.structure import Blocks, Structure, code_of

_BLOCKS_TRIED = 2  # groups of repeated blocks whose checkpointing is tried
_FIRST_WITH_BF16 = (8, 0)  # compute capability; older GPUs are given float16
_MOST_SHARES = 10  # a batch is halved fewer times than this
_DEGREES = (0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)  # times the bytes that are missing: what a block saves is a guess
_GRAIN = 1024  # parts of what is missing that the search counts in


@dataclass(frozen=True)
class Remedy:
    """One thing to change: its name, what to write, its cost in accuracy, time or behavior, and ``apply``.

    Two of one ``kind`` are not combined. Its batches are ``share`` times smaller. ``saving`` is for what a compiled
    step compiles: the share of what its graphs would save for the backward pass that they may.
    """

    name: str
    kind: str
    how: str
    cost: str
    apply: Callable[[Program], Program]
    share: int = 1
    saving: float | None = None


Family = tuple[Remedy, ...]
"""One remedy, or the degrees of one, from the mildest to the strongest."""


def families_for(prediction: Prediction, batch_size: int, usable_bytes: int | None = None) -> list[Family]:
    """Return all remedies that apply, in the order to try and name them: what changes the training least comes first.

    Where a step does not fit ``usable_bytes``, activation checkpointing has degrees.
    """
    program = prediction.program
    halves = list(precisions(program))
    if not program.trains:
        return [(remedy,) for remedy in halves]
    structure, on_cuda = program.inspect(Structure.of), program.device.type == "cuda"
    mixed = [remedy for remedy in halves if remedy.name.endswith("-mixed")]
    order = (
        *(offloading(program), *_FASTER_OPTIMIZERS, *_bucket_views(program)),
        *(mixed if on_cuda else ()),
        *_degrees_of_checkpointing(structure, prediction, batch_size, usable_bytes),
        *_accumulation(program, batch_size),
        *(() if on_cuda else mixed),  # processors have few kernels for it
        *(_ADAPTIVE_OPTIMIZERS if on_cuda else _ADAPTIVE_OPTIMIZERS[1:]),  # the kernels with 8 bits run on CUDA
        *(remedy for remedy in halves if remedy not in mixed),
        *(_SGD, *_freezing(structure)),
    )
    return [each if isinstance(each, tuple) else (each,) for each in order]


def budgets_of_graphs() -> Family:
    """Limits to what compiled graphs save for the backward pass, below the user's own."""
    return tuple(
        Remedy(
            f"activation_memory_budget {share}",
            "compiler",
            f"torch._functorch.config.activation_memory_budget = {share} before anything is compiled",
            "none but time: the compiler has operators computed again that it would save, those with the least FLOPs",
            lambda program: program,
            saving=share,
        )
        for share in _BUDGETS
        if share < compiled.share_saved()
    )


_BUDGETS = (0.9, 0.75, 0.5, 0.25, 0.0)  # of what is saved without one; 0: inputs alone


def precisions(program: Program) -> Iterator[Remedy]:
    """Half precision, in part or everywhere."""
    now = program.precision_in_use
    bits = "bf16" if program.gpu is None or program.gpu.compute_capability >= _FIRST_WITH_BF16 else "16"
    digits, scaled = ("3", "") if bits == "bf16" else ("3 to 4", ", and losses are scaled")
    costs = {
        f"{bits}-mixed": f"matrix products and their results have {digits} decimal digits instead of 7{scaled}",
        f"{bits}-true": f"weights and optimizer state have {digits} decimal digits too, so small updates are lost",
    }
    for name, cost in costs.items():
        if now in ("32-true", "32") or (name.endswith("-true") and not now.endswith("-true")):
            how = program.setting("precision", name)
            yield Remedy(name, "precision", how, cost, methodcaller("edited", precision=name))


def _accumulation(program: Program, batch_size: int) -> Iterator[Family]:
    now = program.batches_per_step
    shares = [1 << doubling for doubling in range(1, _MOST_SHARES) if 1 << doubling <= batch_size]
    if now and shares:
        yield tuple(
            Remedy(
                f"accumulation over {now * share} batches of {batch_size // share}",
                "batch size",
                f"batch_size={batch_size // share}, {program.setting('accumulate_grad_batches', now * share)}",
                f"{share} forward and backward passes for one, each on fewer samples (batch norm sees these alone)",
                methodcaller("edited", accumulate_grad_batches=now * share),
                share=share,
            )
            for share in shares
        )


def offloading(program: Program) -> Remedy:
    """Activations on the host."""
    how = "with lightning_memguard.offload_activations(model), or torch.autograd.graph.save_on_cpu(pin_memory=True)"
    place = "a temporary file" if program.device.type == "cpu" else "the host"
    return Remedy(
        f"activations on {place}",
        "offloading",
        'MemGuard(offload="always")' if isinstance(program, LightningProgram) else how,
        "none but time: the same step to the bit, each saved tensor moves there and back",
        offloaded,
    )


def _bucket_views(program: Program) -> Iterator[Remedy]:
    if program.with_bucket_views() is not None:
        yield Remedy(
            "gradient_as_bucket_view",
            "strategy",
            "DDPStrategy(gradient_as_bucket_view=True)",
            "none, unless your code calls detach_() on gradients",
            lambda each: each.with_bucket_views() or each,
        )


# -- other optimizers


def _optimizer(name: str, how: str, cost: str, swap: SwapOptimizer) -> Remedy:
    return Remedy(name, "optimizer", how, cost, methodcaller("with_optimizer", swap))


def _same_but(optimizer: Optimizer, name: str, value: bool) -> Optimizer:
    if name not in optimizer.defaults:
        raise CannotTraceError(f"{type(optimizer).__name__} has no {name}=")
    if all(group[name] is value for group in optimizer.param_groups):
        raise CannotTraceError(f"it has {name}={value} already")
    groups = [{k: v for k, v in group.items() if k not in ("fused", "foreach")} for group in optimizer.param_groups]
    make: Any = type(optimizer)
    other: Optimizer = make(groups, **{name: value})
    return other


def _adafactor_of(optimizer: Optimizer) -> Optimizer:
    if isinstance(optimizer, torch.optim.Adafactor):
        raise CannotTraceError("it is Adafactor already")
    return _of_class(torch.optim.Adafactor, optimizer)


def _plain_sgd(optimizer: Optimizer) -> Optimizer:
    if isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups):
        raise CannotTraceError("it is SGD without momentum already")
    return _of_class(torch.optim.SGD, optimizer)


def _eight_bit(optimizer: Optimizer) -> Optimizer:
    if "8bit" in type(optimizer).__name__.lower():
        raise CannotTraceError("its states have 8 bits already")
    if "adam" not in type(optimizer).__name__.lower():
        raise CannotTraceError(f"it is {type(optimizer).__name__}, and the one with 8 bits is Adam")
    return _of_class(EightBitAdam, optimizer)


def _of_class(make: Callable[[list[dict[str, Any]]], Optimizer], optimizer: Optimizer) -> Optimizer:
    """Another optimizer for the same groups of parameters, with its own defaults, and what schedulers read."""
    other = make([{"params": group["params"], "lr": group.get("lr", 1e-3)} for group in optimizer.param_groups])
    for mine, theirs in zip(other.param_groups, optimizer.param_groups, strict=True):
        mine.update({**theirs, **mine})
    return other


class EightBitAdam(Optimizer):
    """Optimizer with the state of ``bitsandbytes.optim.AdamW8bit``; for predictions only, since it updates nothing.

    Two moments of a byte an element, and for each 256 of them a float32 scale; 32 bits for tensors below 4096
    elements; two tables of 256 float32 for all. The update is one kernel that takes nothing. Read in bitsandbytes 0.49,
    ``Optimizer2State.init_state`` in bitsandbytes/optim/optimizer.py (blocks had 2048 elements before 0.45).
    """

    block_elements = 256
    min_8bit_elements = 4096

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.tables: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the states of parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = self._states_of(parameter)
        return loss

    def _states_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        small = parameter.numel() < self.min_8bit_elements
        dtype = torch.float32 if small else torch.uint8
        moments = {f"state{at}": torch.zeros_like(parameter, dtype=dtype) for at in (1, 2)}
        if small:
            return moments
        blocks = -(-parameter.numel() // self.block_elements)
        for at in (1, 2):
            if f"qmap{at}" not in self.tables:
                self.tables[f"qmap{at}"] = parameter.new_empty(256, dtype=torch.float32)
            moments[f"absmax{at}"] = parameter.new_zeros(blocks, dtype=torch.float32)
        return {**moments, **self.tables}


_FASTER_OPTIMIZERS = (
    _optimizer(
        "fused optimizer",
        "give the optimizer fused=True",
        "none: one kernel updates all parameters, most often faster",
        partial(_same_but, name="fused", value=True),
    ),
    _optimizer(
        "per-parameter optimizer",
        "give the optimizer foreach=False",
        "a slower optimizer step: one parameter after the other",
        partial(_same_but, name="foreach", value=False),
    ),
)
_ADAPTIVE_OPTIMIZERS = (
    _optimizer(
        "8-bit optimizer states",
        "bitsandbytes.optim.AdamW8bit(parameters, lr=...)",
        "moments are rounded to 8 bits in blocks, which rarely matters; needs the package bitsandbytes",
        _eight_bit,
    ),
    _optimizer(
        "Adafactor",
        "torch.optim.Adafactor(parameters, lr=...)",
        "keeps second moments by row and column and no momentum: another learning rate, a slower optimizer step",
        _adafactor_of,
    ),
)
_SGD = _optimizer(
    "SGD",
    "torch.optim.SGD(parameters, lr=...), without momentum",
    "no momentum and no step size of each parameter's own: another learning rate, slower or no convergence",
    _plain_sgd,
)


# -- changes to the module


def checkpointing(structure: Structure, trace: Trace | None = None) -> Iterator[Remedy]:
    """Activation checkpointing of repeated blocks: those that keep most in a trace come first, or else the most."""
    kind, cost = "checkpointing", "each block runs forward twice, once more in the backward pass"
    if structure.switches:
        call = "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
        name = ", ".join(written_path(path) or structure.root for path in structure.switches)
        how = "; ".join(f"{code_of(structure.root, path)}.{call}" for path in structure.switches)
        change = methodcaller("with_change", partial(_switch_on, paths=structure.switches))
        yield Remedy(f"activation checkpointing of {name}", kind, how, cost, change)
        return
    held = {blocks: blocks.held_bytes(trace) if trace else len(blocks.paths) for blocks in structure.blocks}
    for blocks in sorted(filter(held.get, held), key=lambda each: -held[each])[:_BLOCKS_TRIED]:
        how = (
            f"for block in {blocks.how}: "
            "block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"
        )
        change = methodcaller("with_change", partial(checkpoint_blocks, paths=blocks.paths))
        yield Remedy(f"activation checkpointing of {blocks.name}", kind, how, cost, change)


def _degrees_of_checkpointing(
    structure: Structure, prediction: Prediction, batch_size: int, usable_bytes: int | None
) -> Iterator[Family]:
    """Checkpointing of all blocks, and if there is a budget, before it of as few as may be enough."""
    missing = prediction.footprint_at(batch_size).most_device_bytes - (usable_bytes or math.inf)
    known = attempt(lambda: _table_for(prediction.program, batch_size)).value if missing > 0 else None
    for every in checkpointing(structure, prediction.trace_at(batch_size)):
        switched = (each for each in structure.blocks if each.switched) if structure.switches else ()
        fits = [each for each in structure.blocks if each.name == every.name.partition(" of ")[2]] or [*switched]
        if known is None or not fits:
            yield (every,)
            continue
        blocks = max(fits, key=lambda each: len(each.paths))
        costs = _costs_of(known, blocks.paths)
        # from too few blocks to more than enough, never all
        chosen = dict.fromkeys(cheapest(costs, int(times * int(missing))) for times in _DEGREES)
        some = (_of_some(structure, blocks, every, each, costs) for each in chosen if 0 < len(each) < len(costs))
        yield (*some, every)


def _of_some(
    structure: Structure, blocks: Blocks, every: Remedy, chosen: Sequence[BlockCost], costs: Sequence[BlockCost]
) -> Remedy:
    paths, flops = [each.path for each in chosen], sum(each.flops for each in costs)
    count, of_all = len(chosen), len(blocks.paths)
    again = sum(each.flops for each in chosen) / max(1, flops)
    others = [path for path in blocks.paths if path not in paths]
    if structure.switches:
        how = (
            f"{every.how}; for block in {blocks.how_for(structure.root, others)}: block.gradient_checkpointing = False"
        )
        change = partial(_switch_on, paths=structure.switches, but=tuple(others))
    else:
        how = every.how.replace(f"in {blocks.how}:", f"in {blocks.how_for(structure.root, paths)}:")
        change = partial(checkpoint_blocks, paths=tuple(paths))
    return Remedy(
        f"activation checkpointing of {count} of {of_all} blocks",
        every.kind,
        how,
        f"{count} of {of_all} blocks run forward twice, {again:.0%} of what all of them compute",
        methodcaller("with_change", change),
    )


def checkpoint_blocks(module_copy: nn.Module, paths: Sequence[str]) -> None:
    """Compute again in the backward pass what is inside these modules of a copy."""
    for path in paths:
        block: Any = module_copy.get_submodule(path)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _switch_on(module_copy: nn.Module, paths: Sequence[str], but: Sequence[str] = ()) -> None:
    for path in paths:
        model: Any = module_copy.get_submodule(path)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for path in but:
        block: Any = module_copy.get_submodule(path)
        block.gradient_checkpointing = False


def _freezing(structure: Structure) -> Iterator[Remedy]:
    root, head = structure.root, structure.head
    if head:
        yield Remedy(
            f"freezing all but {written_path(head)}",
            "freezing",
            f"{root}.requires_grad_(False); {code_of(root, head)}.requires_grad_(True)",
            f"only {written_path(head)} learns",
            methodcaller("with_change", partial(_freeze, head=head)),
        )


def _freeze(module_copy: nn.Module, head: str) -> None:
    module_copy.requires_grad_(False)
    module_copy.get_submodule(head).requires_grad_(True)
    for parameter in module_copy.parameters():
        if not parameter.requires_grad:
            parameter.grad = None  # of the batches before, if a plain loop accumulates


# -- the blocks to compute again so that a step just fits: a guess from the table by layer; several degrees are captured


class BlockCost(NamedTuple):
    """A block by its path: bytes that it keeps besides its input, and FLOPs of its forward pass."""

    path: str
    nbytes: int
    flops: int


def _table_for(program: Program, batch_size: int) -> LayerTable:
    if isinstance(program, LightningProgram):
        return isolated(lambda: program.layer_table(batch_size))
    if not isinstance(program, LoopProgram):
        raise CannotTraceError(f"{type(program).__name__} has no table by layer")
    batch = without_memory(program.families[0], batch_size)
    gpu, step = program.gpu, program.step
    return isolated(lambda: layer_table(program.model, batch, batch_size=batch_size, step=step, gpu=gpu))


def _costs_of(table: LayerTable, paths: Sequence[str]) -> list[BlockCost]:
    """Return the bytes and FLOPs of each block; a checkpoint keeps its input, taken to be as large as its output."""
    found = []
    for path in paths:
        rows = [each for each in table.layers if each.name == path or each.name.startswith(f"{path}.")]
        kept, flops = (sum(getattr(row, of) for row in rows) for of in ("activation_bytes", "flops"))
        found.append(BlockCost(path, max(0, kept - sum(row.output_bytes for row in rows[:1])), flops))
    return found


def cheapest(costs: Sequence[BlockCost], nbytes: int) -> tuple[BlockCost, ...]:
    """The blocks that save so many bytes for the fewest FLOPs, the first ones among equals; empty if all save less.

    Blocks that run first are best: when these are computed again, the others have given back what they keep.

    >>> cheapest([BlockCost("a", 10, 9), BlockCost("b", 10, 2), BlockCost("c", 5, 1), BlockCost("d", 5, 1)], 15)
    (BlockCost(path='b', nbytes=10, flops=2), BlockCost(path='c', nbytes=5, flops=1))
    """
    best: dict[int, tuple[int, tuple[BlockCost, ...]]] = {0: (0, ())}
    for cost in costs:
        for saved, (flops, chosen) in [*best.items()]:
            more = min(_GRAIN, saved + math.ceil(cost.nbytes * _GRAIN / max(1, nbytes)))
            if flops + cost.flops < best.get(more, (math.inf,))[0]:
                best[more] = flops + cost.flops, (*chosen, cost)
    return best.get(_GRAIN, (0, ()))[1]
