"""The cheapest way to train on several devices, and the fewest devices that there is a way for."""

from __future__ import annotations

import pytest
import torch
from pytorch_lightning.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn

from lightning_memguard.core.decision.decision import Limits
from lightning_memguard.training.planning import layouts
from lightning_memguard.training.planning.layouts import Fit, Way, fitting_layouts, shardings_for
from lightning_memguard.training.planning.subject import Subject, subject_of
from tests.training.planning.test_on_ranks import INSTALLED, Deep

pytestmark = pytest.mark.usefixtures("not_copied")


class Blocky(Deep):
    """Four blocks of a class of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(4)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(256, 256), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class ShardsItself(Blocky):
    def configure_model(self) -> None:
        """Not at all, as its names are enough."""


def on_eight(strategy: object = "fsdp", kind: type[Blocky] = Blocky) -> Subject:
    return subject_of(kind(), torch.zeros(8, 256), trainer={"strategy": strategy, "devices": 4, "num_nodes": 2})


def test_ways_of_a_plain_module_are_strategies_of_the_trainer(here: None) -> None:
    ways = {way.name: way for way in shardings_for(on_eight(), "T4")}
    assert [*ways] == [
        "DDP",
        "FSDP SHARD_GRAD_OP",
        "FSDP",
        "FSDP with checkpointing",
        "FSDP with checkpointing and offload to the CPU",
    ]
    how = ways["FSDP with checkpointing"].how
    assert how == "FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing_policy={Block})"
    subject = ways["FSDP"].subject(4, 1)
    assert isinstance(subject.strategy, FSDPStrategy)
    assert (subject.devices, subject.nodes, subject.ranks) == (4, 1, 4)


def test_ways_of_a_module_that_shards_itself_are_meshes(here: None) -> None:
    subject = on_eight(ModelParallelStrategy(data_parallel_size=8, tensor_parallel_size=1), ShardsItself)
    ways = [*shardings_for(subject, "T4")]
    assert [way.name.removeprefix("ModelParallelStrategy with ") for way in ways] == [
        *("tensor size 1", "tensor size 1 with checkpointing", "tensor size 2", "tensor size 2 with checkpointing"),
        *("tensor size 4", "tensor size 4 with checkpointing"),
    ]
    split = ways[2].subject(4, 2)
    assert (split.ranks, len(split.changes)) == (4, 0)
    assert len(ways[3].subject(4, 2).changes) == 1


@INSTALLED
def test_ways_of_deepspeed_are_its_stages(here: None) -> None:
    ways = {way.name: way for way in shardings_for(on_eight("deepspeed_stage_2"), "T4")}
    assert [*ways] == [
        *("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_3 with checkpointing"),
        "deepspeed_stage_3_offload with checkpointing",
    ]


def test_fewer_devices_start_with_the_way_that_more_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three ways fits on eight and four, the third on two, and none on one."""
    tried: list[tuple[str, int]] = []
    enough = {"small": 99, "middle": 4, "large": 2}
    ways = [Way(name, "", lambda devices, nodes: on_eight()) for name in enough]

    def fit(way: Way, ranks: int, on_node: int, device: str, limits: Limits | None) -> Fit | None:
        tried.append((way.name, ranks))
        return Fit(ranks, device, way.name, batch_size=3, in_all=3 * ranks) if ranks >= enough[way.name] else None

    monkeypatch.setattr(layouts, "shardings_for", lambda *_: ways)
    monkeypatch.setattr(layouts, "_fit", fit)
    found = [*fitting_layouts(on_eight(), "T4")]
    assert [(each.ranks, each.name) for each in found] == [(8, "middle"), (4, "middle"), (2, "large"), (1, "")]
    assert tried == [
        *(("small", 8), ("middle", 8), ("middle", 4), ("middle", 2), ("large", 2), ("large", 1)),
    ]
    assert str(found[0]) == "8 x T4: middle, batch 3 a rank (24 in all, 0 B)"
    assert str(found[-1]) == "1 x T4: no"


@pytest.mark.parametrize(
    ("strategy", "name"), [("fsdp", "DDP"), pytest.param("deepspeed_stage_2", "deepspeed_stage_1", marks=INSTALLED)]
)
def test_a_way_is_planned_on_its_ranks(taped: None, strategy: str, name: str) -> None:
    first = next(fitting_layouts(on_eight(strategy), "T4", Limits(max_batch_size=16)))
    assert (first.ranks, first.name, first.batch_size, first.in_all) == (8, name, 16, 128)
