"""Two gloo processes on this machine: one size for both, or neither run is tuned; none waits forever."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memguard import CannotTraceError, DoesNotFitError
from lightning_memguard.core.decision.decision import Budget
from lightning_memguard.training.facts import ranks as ranks_module
from lightning_memguard.training.facts.ranks import Attempt, Ranks
from tests.forks import of_both_ranks
from tests.training.facts import two_ranks

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
Seen = dict[str, Any]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Seen, Seen]]:
    """Observations of each rank in the scenarios of the program, run once."""
    return of_both_ranks(two_ranks.main, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def seen_long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Seen, Seen]]:
    return of_both_ranks(two_ranks.long_main, tmp_path_factory.mktemp("long_ranks"))


@pytest.mark.parametrize(
    ("fixture", "scenario"), [("seen", "budgets"), pytest.param("seen_long", "swapped", marks=pytest.mark.long)]
)
def test_the_smallest_of_what_each_rank_can_hold_is_chosen_by_all(
    request: pytest.FixtureRequest, fixture: str, scenario: str
) -> None:
    """100 KiB on one rank and 200 KiB on the other, whichever it is: the size that 100 KiB hold."""
    here, there = request.getfixturevalue(fixture)[scenario]
    assert here["size"] == there["size"] == request.getfixturevalue("seen")["budgets"][0]["size"]
    assert 4 < here["size"] < 100
    assert here["limited_by"] == there["limited_by"] == "memory"
    assert here["fits"]
    assert there["fits"]
    batches = -(-200 // here["size"])
    assert here["sizes"][:-1] == there["sizes"][:-1] == [here["size"]] * (batches - 1)
    assert sum(here["sizes"]) == sum(there["sizes"]) == 200


def test_the_buckets_that_ranks_exchange_are_counted(seen: dict[str, tuple[Seen, Seen]]) -> None:
    """1,348 float32 parameters: one bucket of all gradients."""
    for rank in seen["budgets"]:
        assert rank["parts"]["communication"] >= 4 * 1348


def test_if_one_rank_fails_to_predict_none_tunes_the_run(seen: dict[str, tuple[Seen, Seen]]) -> None:
    for rank in seen["one fails"]:
        assert rank["error"] == ""
        assert rank["outcome"] == "stepped aside"
        assert rank["reason"] == "rank 1: ZeroDivisionError: only here"
        assert rank["sizes"] == [4] * 50


def test_a_rank_that_nothing_fits_stops_all_before_they_start(seen: dict[str, tuple[Seen, Seen]]) -> None:
    for rank in seen["one too small"]:
        assert rank["error"].startswith("DoesNotFitError: rank 1: Batch size 1 needs")
        assert rank["sizes"] == []


def test_the_effective_batch_counts_all_ranks(seen: dict[str, tuple[Seen, Seen]]) -> None:
    here, there = seen["effective"]
    assert (here["size"], here["accumulate"]) == (there["size"], there["accumulate"])
    assert here["size"] * here["accumulate"] * 2 == 256


def test_all_ranks_divide_a_batch_that_one_of_them_cannot_hold(seen: dict[str, tuple[Seen, Seen]]) -> None:
    for rank in seen["divided"]:
        assert rank["size"] < 100
        assert rank["size"] * rank["accumulate"] == 200
        assert rank["limited_by"] == "memory"
        assert len(rank["sizes"]) == 200 / rank["size"]


def test_ranks_on_one_host_share_what_it_has_free(seen: dict[str, tuple[Seen, Seen]]) -> None:
    here, there = seen["whole"]
    assert here["device"] == there["device"] == "CPU, shared by 2 ranks"
    assert here["free"] == there["free"] > 0


def test_only_rank_zero_speaks(seen: dict[str, tuple[Seen, Seen]]) -> None:
    here, there = seen["check"]
    assert [text for text in here["warned"] if "does NOT fit" in text]
    assert not [text for text in there["warned"] if "MemGuard" in text or "does NOT fit" in text]
    assert here["outcome"] == there["outcome"] == "checked"


def test_a_resume_keeps_the_size_on_all_ranks(seen: dict[str, tuple[Seen, Seen]]) -> None:
    for first, again in zip(seen["budgets"], seen["resume"], strict=True):
        assert again["size"] == first["size"]
        assert again["limited_by"] == "checkpoint"
        assert again["step"] == 2 * first["step"]


@pytest.mark.long  # that a guard can be pickled, test_guard_settings.py shows in no time
def test_spawned_ranks_choose_alike(tmp_path: Path) -> None:
    """``ddp_spawn``: the guard is pickled to processes that were not there before."""
    program = tmp_path / "spawned.py"
    program.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(two_ranks.__file__).parent)!r})\n"
        "from two_ranks import MemGuard, KIB, Module, pl, DataLoader, TensorDataset, torch, count_tensors_alone\n"
        "count_tensors_alone()\n"
        "class Telling(Module):\n"
        "    def on_train_end(self):\n"
        f"        with open({str(tmp_path)!r} + f'/rank{{self.trainer.global_rank}}', 'w') as seen:\n"
        "            seen.write(f'{self.sizes[0]} {len(self.sizes)}')\n"
        "if __name__ == '__main__':\n"
        "    data = TensorDataset(torch.randn(1000, 16), torch.randint(0, 4, (1000,)))\n"
        "    trainer = pl.Trainer(accelerator='cpu', devices=2, strategy='ddp_spawn', max_epochs=1, logger=False,\n"
        "        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,\n"
        "        callbacks=[MemGuard(batch_size='largest', budget=100 * KIB)])\n"
        "    trainer.fit(Telling(), DataLoader(data, batch_size=4))\n"
    )
    words = [sys.executable, program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)]
    assert told[0] == told[1]
    assert int(told[0].split()[0]) > 4


# -- in one process


def test_one_rank_asks_no_other() -> None:
    assert Ranks().gather("mine") == ["mine"]
    assert Ranks().agree(Attempt(5)) == 5


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_a_reason_that_nobody_reads_is_in_the_log_of_those_who_look(caplog, level: int) -> None:
    with caplog.at_level(level, "lightning_memguard"):
        assert ranks_module.attempt(lambda: 1 / 0) == Attempt(reason="ZeroDivisionError: division by zero")
        assert ranks_module.attempt(lambda: 1) == Attempt(1)
    assert ("ZeroDivisionError: division by zero" in caplog.text) == (level == logging.DEBUG)


class Others(Ranks):
    """Ranks whose other values come from the test."""

    others: tuple[Any, ...] = ()

    def gather(self, mine: Any) -> list[Any]:
        return [mine, *self.others]


def ranks(*others: Any) -> Ranks:
    made = Others(size=1 + len(others))
    object.__setattr__(made, "others", others)
    return made


def test_what_does_not_fit_elsewhere_outweighs_what_failed_elsewhere() -> None:
    with pytest.raises(DoesNotFitError, match="rank 2: too large"):
        ranks(("broken", None), ("too large", DoesNotFitError("too large"))).agree(Attempt(5))
    with pytest.raises(CannotTraceError, match="rank 1: broken"):
        ranks(("broken", None)).agree(Attempt(5))


def test_a_shared_device_is_divided_and_what_is_ones_own_stays() -> None:
    """1,000 bytes free besides the 100 of this rank's model, 900 besides another's: 450 more for each."""
    name = ranks_module._name(torch.device("cpu"), 0)
    budget = Budget(10_000, 1100, 110, "host", "CPU")
    mine = ranks_module.shared(ranks((name, 900, "host")), budget, torch.device("cpu"), held_bytes=100)
    assert (mine.free_bytes, mine.margin_bytes, mine.device) == (550, 55, "CPU, shared by 2 ranks")


@pytest.mark.parametrize("other", [(("elsewhere", "cpu"), 900, "host"), (("here", "cpu"), 900, "given")])
def test_another_machine_and_a_given_budget_are_not_shared(other: Any) -> None:
    budget = Budget(10_000, 1100, 110, "host", "CPU")
    assert ranks_module.shared(ranks(other), budget, torch.device("cpu"), held_bytes=0) == budget


@pytest.mark.parametrize(
    ("fixture", "scenario", "plain"),
    [
        ("seen", "one offloads", "whole"),
        pytest.param("seen_long", "both offload", "whole", marks=pytest.mark.long),
        pytest.param("seen_long", "one offloads, accumulated", "whole, accumulated", marks=pytest.mark.long),
    ],
)
def test_ranks_whose_activations_are_elsewhere_train_as_all_others(
    request: pytest.FixtureRequest, fixture: str, scenario: str, plain: str
) -> None:
    """To the bit: the other rank sees the same collectives, buffers and parameters without a gradient included."""
    seen = request.getfixturevalue(fixture)
    for rank, whole in zip(seen[scenario], seen[plain], strict=True):
        assert (rank["error"], rank["step"]) == ("", whole["step"])
        assert rank["state"] == whole["state"]
        assert (whole["offloaded"], rank["offloaded"]) == ([0], [8])
