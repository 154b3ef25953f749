"""`estimate` and plans on several ranks, none of which are there."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_memguard import MemGuardError, estimate
from lightning_memguard.core.decision.decision import Limits
from lightning_memguard.training.planning.plan import plan_on
from lightning_memguard.training.planning.subject import on_ranks, subject_of
from lightning_memguard.training.strategies.deepspeed import is_installed

INSTALLED = pytest.mark.skipif(not is_installed(), reason="DeepSpeed is not installed (pip install deepspeed)")
WIDTH, PARAMETERS = 256, 4 * 256 * 256
BATCH = torch.zeros(8, WIDTH)


class Deep(pl.LightningModule):
    """Four layers of 256 x 256."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), foreach=False)


class Sharded(Deep):
    """`Deep` under FSDP2."""

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        for layer in self.layers:
            fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(self, mesh=mesh["data_parallel"])


@pytest.mark.parametrize("ranks", [2, 8])
def test_each_rank_of_fsdp2_holds_its_share(ranks: int, here: None) -> None:
    strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    found = estimate(Sharded(), BATCH, strategy=strategy, devices=ranks, device="cpu")
    assert found.parts["parameters"] == 4 * PARAMETERS // ranks
    assert found.parts["optimizer_state"] >= 2 * 4 * PARAMETERS // ranks
    assert found.parts["gathered"] >= 4 * WIDTH * WIDTH


@INSTALLED
@pytest.mark.parametrize(
    ("name", "parameters", "states"),
    [
        pytest.param("deepspeed_stage_1", 4, 12 / 8, marks=pytest.mark.long),
        ("deepspeed_stage_2", 4, 12 / 8),
        ("deepspeed_stage_3", 4 / 8, 12 / 8),
        ("deepspeed_stage_2_offload", 4, 0),
        ("deepspeed_stage_3_offload", 0, 0),
    ],
)
def test_deepspeed_is_planned_by_name(name: str, parameters: float, states: float, here: None) -> None:
    """Bytes per parameter: what the step runs with, and the optimizer's float32 copy and two moments, over 8 ranks."""
    found = estimate(Deep(), BATCH, strategy=name, devices=4, num_nodes=2, device="T4", precision="32-true")
    assert found.parts.get("parameters", 0) == parameters * PARAMETERS
    assert found.parts.get("optimizer_state", 0) == pytest.approx(states * PARAMETERS, abs=64)
    assert found.parts["communication"] >= 200_000_000 * 4  # Lightning's bucket


@INSTALLED
def test_a_plan_counts_all_ranks(taped: None) -> None:
    subject = on_ranks(subject_of(Deep(), BATCH), "deepspeed_stage_2", devices=4, nodes=2)
    plan = plan_on(subject, "T4", Limits(max_batch_size=512))
    assert (plan.largest.batch_size, plan.ranks, plan.asked.fits) == (512, 8, True)


def test_ranks_of_a_tensor_parallel_group_share_their_samples() -> None:
    strategy = ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=2)
    assert on_ranks(subject_of(Sharded(), BATCH), strategy, devices=8, nodes=1).ranks == 4


def test_an_unknown_strategy_is_refused_by_name() -> None:
    with pytest.raises(MemGuardError, match=r"strategy=.fsdp_9. is not one of Lightning.s: .*deepspeed_stage_3"):
        estimate(Deep(), BATCH, strategy="fsdp_9", devices=2, device="cpu")
