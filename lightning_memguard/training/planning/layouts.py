"""Ways to train on several devices of a kind: the cheapest that fits, on how many, at which batch size.

Each way is run on a copy of the step, as its strategy sets it up. On half as many devices, no way is tried that was too
large on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning_memguard.core.decision.decision import Limits
from lightning_memguard.errors import MemGuardError
from lightning_memguard.training.facts.lightning_types import is_a, lightning_of
from lightning_memguard.training.planning.plan import plan_on
from lightning_memguard.training.planning.remedies import checkpoint_blocks
from lightning_memguard.training.planning.structure import Blocks, Structure
from lightning_memguard.training.planning.subject import Subject, on_ranks, program_of
from lightning_memguard.training.planning.target import target_of
from lightning_memguard.units import format_bytes


@dataclass(frozen=True)
class Way:
    """One way to train on several devices: what to write for it, and (devices of a node, nodes) -> what to plan for."""

    name: str
    how: str
    subject: Callable[[int, int], Subject]


@dataclass(frozen=True)
class Fit:
    """The cheapest way that fits so many devices, at its largest batch size for a rank; without a name, none fits.

    ``in_all`` counts the samples of all ranks, ``peak_bytes`` is what a rank needs.
    """

    ranks: int
    device: str
    name: str = ""
    how: str = ""
    batch_size: int = 0
    in_all: int = 0
    peak_bytes: int = 0

    def __str__(self) -> str:
        """Such as ``8 x H100: FSDP with checkpointing, batch 6 a rank (48 in all, 71.2 GiB)``."""
        if not self.name:
            return f"{self.ranks} x {self.device}: no"
        sizes = f"{self.in_all:,} in all, {format_bytes(self.peak_bytes)}"
        return f"{self.ranks} x {self.device}: {self.name}, batch {self.batch_size} a rank ({sizes})"


def fitting_layouts(
    subject: Subject, device: str, limits: Limits | None = None, *, say: Callable[[str], object] = lambda _: None
) -> Iterator[Fit]:
    """Find the cheapest way that fits on all devices of a subject, on half of them, and so on, until none fits."""
    ways = [*shardings_for(subject, device)]
    ranks = subject.devices * subject.nodes
    while ranks:
        on_node = min(ranks, subject.devices)
        while ways:
            say(f"{ways[0].name} on {ranks} x {device}")
            found = _fit(ways[0], ranks, on_node, device, limits)
            if found is not None:
                yield found
                break
            ways = ways[1:]
        else:
            yield Fit(ranks, device)
            return
        ranks //= 2


def _fit(way: Way, ranks: int, on_node: int, device: str, limits: Limits | None) -> Fit | None:
    try:
        subject = way.subject(on_node, ranks // on_node)
        plan = plan_on(subject, device, limits)
    except MemGuardError:
        return None  # it does not run that way
    chosen = plan.largest or (plan.asked if plan.fits and not plan.too_large else None)
    if chosen is None or chosen.footprint is None:
        return None
    size, peak = chosen.batch_size, chosen.footprint.peak_device_bytes
    return Fit(ranks, device, way.name, way.how, size, size * subject.ranks, peak)


# -- the ways


def shardings_for(subject: Subject, device: str) -> Iterator[Way]:
    """All that apply to a model, from the one that communicates and computes least."""
    ways = _meshes if is_a(subject.strategy, "ModelParallelStrategy") else _stages
    if not is_a(subject.strategy, "ModelParallelStrategy", "DeepSpeedStrategy"):
        ways, subject = _shardings, replace(subject, strategy=None)
    structure = program_of(subject, target_of(device)).inspect(Structure.of)
    return ways(subject, max(structure.blocks, key=lambda each: len(each.paths), default=None))


_WITH_CHECKPOINTING = " with checkpointing"


def _with(subject: Subject, checkpointed: Blocks | None) -> Subject:
    changes = (partial(checkpoint_blocks, paths=checkpointed.paths),) if checkpointed else subject.changes
    return replace(subject, changes=changes)


def _meshes(subject: Subject, blocks: Blocks | None) -> Iterator[Way]:
    """Data and tensor sizes, for a module whose ``configure_model`` shards it over a mesh."""
    kind = lightning_of(subject.model).strategies.ModelParallelStrategy
    for tensor in (1 << power for power in range(subject.devices.bit_length())):
        for checkpointed in (None, blocks) if blocks else (None,):

            def on(devices: int, nodes: int, tensor: int = tensor, blocks: Blocks | None = checkpointed) -> Subject:
                if devices % tensor:
                    raise MemGuardError(f"{devices} devices do not divide into groups of {tensor}.")
                return on_ranks(_with(subject, blocks), kind(devices * nodes // tensor, tensor), devices, nodes)

            name = f"ModelParallelStrategy with tensor size {tensor}" + _WITH_CHECKPOINTING * bool(checkpointed)
            yield Way(name, f"ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size={tensor})", on)


def _stages(subject: Subject, blocks: Blocks | None) -> Iterator[Way]:
    """DeepSpeed's, by Lightning's names; a configuration of one's own is not carried over."""
    for name in ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"):
        yield _named(subject, name)
    if blocks:
        yield _named(subject, "deepspeed_stage_3", blocks)
    yield _named(subject, "deepspeed_stage_3_offload", blocks)


def _named(subject: Subject, strategy: str, checkpointed: Blocks | None = None, name: str = "") -> Way:
    return Way(
        (name or strategy) + _WITH_CHECKPOINTING * bool(checkpointed),
        f'Trainer(strategy="{strategy}")',
        lambda devices, nodes: on_ranks(_with(subject, checkpointed), strategy, devices, nodes),
    )


def _shardings(subject: Subject, blocks: Blocks | None) -> Iterator[Way]:
    """Yield the ways to shard that need no other code than a Trainer's strategy."""
    strategies = lightning_of(subject.model).strategies
    yield _named(subject, "ddp", name="DDP")
    try:
        kind = type(subject.model.get_submodule(blocks.paths[0])) if blocks else None
    except AttributeError:  # ``configure_model`` makes it
        kind = None
    checkpointed: dict[str, Any] = {"activation_checkpointing_policy": {kind}} if kind else {}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("FSDP SHARD_GRAD_OP", {"sharding_strategy": "SHARD_GRAD_OP"}),
        ("FSDP", {}),
        *([("FSDP" + _WITH_CHECKPOINTING, checkpointed)] if kind else []),
        ("FSDP" + _WITH_CHECKPOINTING * bool(kind) + " and offload to the CPU", {**checkpointed, "cpu_offload": True}),
    ]
    for name, settings in kinds:
        given: dict[str, Any] = {**({"auto_wrap_policy": {kind}} if kind else {}), **settings}

        def on(devices: int, nodes: int, given: dict[str, Any] = given) -> Subject:
            return on_ranks(subject, strategies.FSDPStrategy(**given), devices, nodes)

        yield Way(name, f"FSDPStrategy({', '.join(f'{key}={_code(value)}' for key, value in given.items())})", on)


def _code(value: object) -> str:
    return f"{{{', '.join(each.__name__ for each in value)}}}" if isinstance(value, set) else repr(value)
