"""Two gloo processes on this machine that shard one model: both are tuned to one size that fits, or neither is."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn

from lightning_memguard import CannotTraceError
from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.capture import capture
from lightning_memguard.core.replay.replay import Replay, replay
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.facts.run_facts import read_run_facts
from lightning_memguard.training.strategies.sharded import Layout
from lightning_memguard.units import KIB
from tests.forks import of_both_ranks
from tests.training.quiet import quiet_trainer
from tests.training.strategies import two_shards

USABLE = 1200 * KIB * 0.95
Seen = dict[str, Any]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Seen, Seen]]:
    """Observations of each rank in the scenarios of the program, run once."""
    return of_both_ranks(two_shards.main, tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def seen_long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Seen, Seen]]:
    return of_both_ranks(two_shards.long_main, tmp_path_factory.mktemp("long_shards"))


@pytest.mark.parametrize(
    ("fixture", "scenario"), [("seen", "fsdp"), pytest.param("seen_long", "tensor", marks=pytest.mark.long)]
)
def test_both_ranks_take_the_largest_size_that_fits_and_train_as_at_a_size_set_by_hand(
    request: pytest.FixtureRequest, fixture: str, scenario: str
) -> None:
    here, there = request.getfixturevalue(fixture)[scenario]
    assert here["size"] == there["size"] > 2
    for rank in (here, there):
        assert (rank["outcome"], rank["method"], rank["notes"], rank["alike"]) == ("tuned", "fake", [], True)
        assert rank["peak"] <= USABLE < rank["larger"]
        assert set(rank["sizes"]) == {rank["size"]}
    largest = max(here["measured"], there["measured"])
    assert here["peak"] * 0.999 <= largest <= here["peak"] * 1.03  # gloo's threads may free a block a step late


def test_what_a_rank_gathers_of_the_others_has_a_name(seen: dict[str, tuple[Seen, Seen]]) -> None:
    """One of three blocks, whose 33 rows are padded to 34."""
    gathered = 4 * (256 * 33 + 256 + 34 * 256 + 34)
    for rank in seen["fsdp"]:
        assert rank["parts"]["gathered"] == gathered
        assert rank["parts"]["parameters"] == 3 * gathered // 2


def test_a_rank_that_fails_leaves_both_as_they_were(seen: dict[str, tuple[Seen, Seen]]) -> None:
    for rank in seen["one fails"]:
        assert (rank["outcome"], rank["reason"]) == ("stepped aside", "rank 1: ZeroDivisionError: only here")
        assert (rank["error"], rank["sizes"]) == ("", [2] * 4)


def test_a_rank_whose_activations_are_elsewhere_trains_as_all_others(seen: dict[str, tuple[Seen, Seen]]) -> None:
    for rank in seen["one offloads"]:
        assert (rank["error"], rank["alike"], rank["offloaded"]) == ("", True, [4])


def test_a_second_fit_is_tuned_unless_its_module_is_sharded_already(seen: dict[str, tuple[Seen, Seen]]) -> None:
    for rank in seen["fsdp"]:
        second, again, validated = (rank["later"][name] for name in ("second", "again", "validated"))
        assert {name: rank[name] for name in second} == second
        assert again["outcome"] == "stepped aside"
        assert again["sizes"] == [2] * len(second["sizes"])
        for run, size in ((again, 2), (validated, 3)):
            kept = f"its parameters are sharded already, as an earlier run has left them; batch size {size} is kept"
            assert run["reason"] == kept
            assert run["size"] == size


def test_the_effective_batch_counts_ranks_with_samples_of_their_own(seen: dict[str, tuple[Seen, Seen]]) -> None:
    """Two ranks that share each sample."""
    for rank in seen["effective"]:
        assert rank["size"] * rank["accumulate"] == 240


@pytest.mark.long
def test_validation_is_predicted_next_to_it(seen_long: dict[str, tuple[Seen, Seen]]) -> None:
    for rank in seen_long["validates"]:
        assert (rank["outcome"], rank["notes"], rank["error"]) == ("tuned", [], "")
        assert rank["size"] == seen_long["plain"][0]["size"]


@pytest.mark.long
def test_a_step_that_runs_out_is_not_done_again(seen_long: dict[str, tuple[Seen, Seen]]) -> None:
    for rank in seen_long["runs out"]:
        assert (rank["error"], rank["sizes"]) == (
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            [2] * 3,
        )
        assert "done again" not in " ".join(rank["error_notes"])


@pytest.mark.long
def test_a_fit_goes_on_at_the_size_of_a_checkpoint_of_shards_and_says_so(
    seen_long: dict[str, tuple[Seen, Seen]],
) -> None:
    for rank in seen_long["resumes"]:
        assert rank["size"] == rank["before"] == seen_long["plain"][0]["size"]
        assert set(rank["sizes"]) == {rank["size"]}
    first, _ = seen_long["resumes"]
    *_, last = first["printed"].split(": batch size ")
    assert last.startswith(f"{first['size']} (was 2)")


@pytest.mark.long
def test_a_check_leaves_the_size_as_it_is(seen_long: dict[str, tuple[Seen, Seen]]) -> None:
    for rank in seen_long["check"]:
        assert (rank["outcome"], rank["method"], rank["sizes"]) == ("checked", "fake", [2] * 4)


# FSDP1, which Lightning refuses on a CPU: one rank on a simulated GPU


class Wide(pl.LightningModule):
    """Two layers of a mebibyte each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def replayed(strategy: Any, devices: int, **settings: Any) -> Replay:
    trainer = quiet_trainer(**settings)
    program = LightningProgram(
        trainer,
        Wide(),
        batches_from_one(torch.zeros(8, 512)),
        torch.device("cuda", 0),
        gpu=gpus.find("A100-SXM4-40GB"),
        strategy=strategy,
        layout=Layout.of(strategy, devices, 1),
    )
    return replay(capture(program, 8, "fake"), AllocatorSettings())


MIB = 1024 * KIB


@pytest.mark.parametrize(
    ("settings", "parameters", "state"),
    [
        ({}, 2 * MIB // 4, MIB),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, 2 * MIB // 4, MIB),
        ({"sharding_strategy": "NO_SHARD"}, 2 * MIB, 4 * MIB),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}, MIB, 2 * MIB),
        ({"cpu_offload": True}, 0, 0),
    ],
)
def test_fsdp_holds_what_its_settings_leave_on_a_rank(settings: Any, parameters: int, state: int) -> None:
    found = replayed(FSDPStrategy(auto_wrap_policy={nn.Linear}, **settings), 4)
    assert found.parts.get("parameters", 0) == parameters
    assert found.parts.get("optimizer_state", 0) == pytest.approx(state, abs=4 * KIB)
    if settings.get("sharding_strategy") != "NO_SHARD":
        assert MIB <= found.parts["gathered"] <= 2 * MIB


def test_a_strategy_with_process_groups_of_its_own_is_not_captured() -> None:
    with pytest.raises(CannotTraceError, match="process groups of its own"):
        replayed(FSDPStrategy(process_group=object()), 2)


def test_ddp_has_no_layout() -> None:
    assert Layout.of(DDPStrategy(), 2, 1) is None


@pytest.mark.parametrize(("data", "tensor", "expected"), [(4, 2, 4), ("auto", 2, 4), (1, 8, 1)])
def test_ranks_that_share_a_tensor_share_their_samples(monkeypatch: Any, data: Any, tensor: int, expected: int) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False)
    strategy = ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor)
    strategy.parallel_devices = [torch.device("cpu")]
    monkeypatch.setattr(trainer._accelerator_connector, "strategy", strategy)
    monkeypatch.setattr(type(trainer), "world_size", 8)
    assert read_run_facts(trainer).data_ranks == expected
