"""Ways to train on several devices of a kind: the cheapest that fits, on how many, at which batch size.

Each way is run on a copy of the step, as its strategy sets it up. On half as many devices, no way is tried that was too
large on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    """One way to train on several devices.

    Attributes:
        name: what it is called.
        how: what to write.
        subject: (devices on a node, nodes) -> what is planned for.
    """

    name: str
    how: str
    subject: Callable[[int, int], Subject]


@dataclass(frozen=True)
class Fit:
    """The cheapest way that fits so many devices; or none.

    Attributes:
        ranks: how many devices.
        device: their name.
        name: of the way; empty if none fits.
        how: what to write.
        batch_size: the largest of a rank.
        in_all: samples of all ranks.
        peak_bytes: what a rank needs at it.
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
    """Find the cheapest way that fits on all devices of a subject, on half of them, and so on, until none fits.

    Args:
        subject: what is trained, on ``devices`` of ``nodes``.
        device: the name of a GPU.
        limits: what the batch size is chosen from.
        say: called with what is tried.
    """
    ways = [*ways_to_train(subject, device)]
    ranks, first = subject.devices * subject.nodes, 0
    while ranks and ways:
        on_node = min(ranks, subject.devices)
        for place in range(first, len(ways)):
            say(f"{ways[place].name} on {ranks} x {device}")
            found = _fit(ways[place], ranks, on_node, device, limits)
            if found is not None:
                first = place
                yield found
                break
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
    size = chosen.batch_size
    peak = chosen.footprint.peak_device_bytes
    return Fit(ranks, device, way.name, way.how, size, size * subject.ranks, peak)


# -- the ways


def ways_to_train(subject: Subject, device: str) -> Iterator[Way]:
    """All that apply to a model, from the one that communicates and computes least."""
    if is_a(subject.strategy, "ModelParallelStrategy"):
        yield from _meshes(subject, device)
    elif is_a(subject.strategy, "DeepSpeedStrategy"):
        yield from _stages(subject, device)
    else:
        yield from _shardings(subject, device)


def _meshes(subject: Subject, device: str) -> Iterator[Way]:
    """Data and tensor sizes, for a module whose ``configure_model`` shards it over a mesh."""
    kind = lightning_of(subject.model).strategies.ModelParallelStrategy
    blocks = _largest_blocks(subject, device)
    tensor = 1
    while tensor <= subject.devices:
        for checkpointed in (False, True) if blocks else (False,):
            yield Way(
                f"ModelParallelStrategy with tensor size {tensor}" + _WITH_CHECKPOINTING * checkpointed,
                f"ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size={tensor})",
                _on_mesh(_with(subject, blocks if checkpointed else None), kind, tensor),
            )
        tensor *= 2


def _on_mesh(subject: Subject, kind: Any, tensor: int) -> Callable[[int, int], Subject]:
    def on(devices: int, nodes: int) -> Subject:
        if devices % tensor:
            raise MemGuardError(f"{devices} devices do not divide into groups of {tensor}.")
        return on_ranks(subject, kind(devices * nodes // tensor, tensor), devices, nodes)

    return on


def _stages(subject: Subject, device: str) -> Iterator[Way]:
    """DeepSpeed's, by Lightning's names; a configuration of one's own is not carried over."""
    blocks = _largest_blocks(subject, device)
    ways = [*((f"deepspeed_stage_{stage}", None) for stage in (1, 2, 3)), ("deepspeed_stage_3_offload", blocks)]
    if blocks:
        ways.insert(3, ("deepspeed_stage_3", blocks))
    for name, checkpointed in ways:
        what = name + _WITH_CHECKPOINTING * bool(checkpointed)
        yield Way(what, f'Trainer(strategy="{name}")', _named(_with(subject, checkpointed), name))


def _named(subject: Subject, strategy: str) -> Callable[[int, int], Subject]:
    return lambda devices, nodes: on_ranks(subject, strategy, devices, nodes)


def _with(subject: Subject, checkpointed: Blocks | None) -> Subject:
    return replace(subject, changes=(checkpoint_blocks(checkpointed.paths),)) if checkpointed else subject


def _shardings(subject: Subject, device: str) -> Iterator[Way]:
    """Yield the ways to shard that need no other code than a Trainer's strategy."""
    strategies = lightning_of(subject.model).strategies
    subject = replace(subject, strategy=None)
    yield Way("DDP", 'Trainer(strategy="ddp")', _named(subject, "ddp"))
    blocks = _largest_blocks(subject, device)
    try:
        kind = type(subject.model.get_submodule(blocks.paths[0])) if blocks else None
    except AttributeError:  # ``configure_model`` makes it
        kind = None
    wrapped: dict[str, Any] = {"auto_wrap_policy": {kind}} if kind else {}
    checkpointed: dict[str, Any] = {"activation_checkpointing_policy": {kind}} if kind else {}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("FSDP SHARD_GRAD_OP", {"sharding_strategy": "SHARD_GRAD_OP"}),
        ("FSDP", {}),
        *([("FSDP" + _WITH_CHECKPOINTING, checkpointed)] if kind else []),
        ("FSDP" + _WITH_CHECKPOINTING * bool(kind) + " and offload to the CPU", {**checkpointed, "cpu_offload": True}),
    ]
    for name, settings in kinds:
        given = {**wrapped, **settings}

        def on(devices: int, nodes: int, given: dict[str, Any] = given) -> Subject:
            return on_ranks(subject, strategies.FSDPStrategy(**given), devices, nodes)

        yield Way(name, f"FSDPStrategy({', '.join(f'{key}={_code(value)}' for key, value in given.items())})", on)


_WITH_CHECKPOINTING = " with checkpointing"


def _code(value: object) -> str:
    return f"{{{', '.join(each.__name__ for each in value)}}}" if isinstance(value, set) else repr(value)


def _largest_blocks(subject: Subject, device: str) -> Blocks | None:
    """The repeated blocks of which there are most; of a module that no strategy has wrapped."""
    structure = program_of(subject, target_of(device)).inspect(Structure.of)
    return max(structure.blocks, key=lambda blocks: len(blocks.paths), default=None)
