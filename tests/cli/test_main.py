"""The command line: what it answers, what it refuses, and with which words and exit status.

Each test runs `main` in this process, on models so small that a second is enough.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_memguard.cli.commands import plan as plan_command
from lightning_memguard.cli.main import BAD_USE, DOES_NOT_FIT, FITS, main
from lightning_memguard.cli.names import build, load
from lightning_memguard.core.device.process import process_bytes
from lightning_memguard.core.gpus import find
from lightning_memguard.core.replay.epoch import Epoch, EpochRun
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.run import profile
from lightning_memguard.units import MIB
from tests.training.planning.test_on_ranks import INSTALLED

pytestmark = pytest.mark.usefixtures("taped")

NET = ["net:Net", "--args", "width=64"]
DATA = ["--datamodule", "net:Data"]
LINEAR = ["torch.nn:Linear", "--args", "in_features=512", "out_features=512"]
BATCH = ["--input-shape", "8,512", "--target-shape", "8,512:float32"]

SOURCE = """
    import pytorch_lightning as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    print("imported")

    class Net(pl.LightningModule):
        def __init__(self, width: int, depth: int = 1):
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(32, width), *[nn.Linear(width, width) for _ in range(depth)])
        def training_step(self, batch, batch_idx):
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    class Example(Net):
        example_input_array = torch.zeros(16, 32)

    class Named(Net):
        def training_step(self, batch, batch_idx):
            return self.net(batch["x"]).sum() + batch["mask"].sum()

    class NeedsMemory(Net):
        def __init__(self):
            super().__init__(8)
            self.rates = [float(rate) for rate in torch.linspace(0, 1, 3)]

    class NeedsValues(Net):
        def training_step(self, batch, batch_idx):
            scale = self.net[0].weight.detach().numpy().sum()
            return super().training_step(batch, batch_idx) * float(scale)

    class Breaks(Net):
        def __init__(self):
            super().__init__(8)
            self.share = 1 / 0

    class Data(pl.LightningDataModule):
        def __init__(self, batch_size: int = 4):
            super().__init__()
            self.batch_size = batch_size
        def train_dataloader(self):
            data = TensorDataset(torch.zeros(1000, 32), torch.zeros(1000, dtype=torch.long))
            return DataLoader(data, batch_size=self.batch_size)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with somebody's project, as the place to be in."""
    (tmp_path / "net.py").write_text(textwrap.dedent(SOURCE), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delitem(sys.modules, "net", raising=False)
    yield tmp_path
    sys.modules.pop("net", None)


def answered(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = FITS) -> Any:
    """Run a command and read its JSON, which must be all that is on stdout."""
    assert main([*arguments, "--json"]) == status, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = FITS) -> str:
    assert main(list(arguments)) == status, capsys.readouterr().err
    return capsys.readouterr().out


def both(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    """One plan as JSON, which agrees with the exit status, and as text."""
    return planned(capsys, *arguments)[1:]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, Any, str]:
    """What is planned, with what `both` returns of it."""
    with mock.patch.object(plan_command, "_print_json", wraps=plan_command._print_json) as printed:
        status = main(["plan", *arguments, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] == (status == FITS)
    subject, plans, adviser, advice, *_ = printed.call_args.args
    plan_command._print(subject, plans, adviser, advice, files=())
    return subject, answer, " ".join(capsys.readouterr().out.split())


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that is refused, and return its words: on stderr, without a traceback."""
    assert main(list(arguments)) == BAD_USE
    answer = capsys.readouterr()
    assert not answer.out
    assert "Traceback" not in answer.err
    return answer.err


# -- plan


def test_a_plan_says_for_each_device_whether_it_fits_and_the_largest_batch(capsys) -> None:
    answer = answered(capsys, "plan", *NET, *DATA, "--device", "T4", "--device", "cpu")
    t4, cpu = answer["devices"]
    assert (answer["model"], answer["batch_size"], answer["fits"]) == ("Net", 4, True)
    assert (t4["device"], t4["budget"]["source"]) == ("Tesla T4", "catalogue")
    assert t4["budget"]["usable_bytes"] == t4["budget"]["total_bytes"] - int(0.05 * t4["budget"]["total_bytes"])
    assert (t4["largest_batch_size"], t4["limited_by"]) == (1000, "dataset")
    assert cpu["asked"]["parts_bytes"]["optimizer_state"] > 2 * cpu["asked"]["parts_bytes"]["parameters"] - 1


@pytest.mark.captures
@pytest.mark.parametrize("leaves_room", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_plan_is_what_the_callback_would_decide(capsys, monkeypatch, leaves_room: bool) -> None:
    """If the process itself leaves no room for tensors, the callback takes the smallest batch, and warns."""
    import pytorch_lightning as pl

    from lightning_memguard import MemGuard
    from lightning_memguard.cli.names import load

    outside = process_bytes([torch.empty(64, 64)], torch.get_num_threads())[2]
    budget = str((outside if leaves_room else 0) + 300 * 1024)
    status = FITS if leaves_room else DOES_NOT_FIT
    monkeypatch.setattr(profile, "_BATCHES_OF_OBJECTS", 0)  # of samples, which a plan does not collate
    arguments = ("plan", *NET, *DATA, "--device", "cpu", "--budget", budget, "--margin", "0")
    answer = answered(capsys, *arguments, status=status)
    guard = MemGuard(batch_size="largest", budget=int(budget), margin=0.0, min_steps_per_epoch=None)
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[guard],
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(load("net:Net")(64), datamodule=load("net:Data")())
    (plan,) = answer["devices"]
    if leaves_room:
        assert plan["largest_batch_size"] == guard.decision.batch_size > 1
        assert plan["largest"]["peak_device_bytes"] == guard.decision.footprint.peak_device_bytes
        assert plan["limited_by"] == guard.decision.limited_by == "memory"
    else:
        assert plan["largest_batch_size"] is None
        assert "still train at it, and warn" in plan["why_no_largest"].partition("batch size 1 ")[2]
        assert guard.decision.batch_size == 1


def test_the_exit_status_is_1_where_no_device_fits_and_0_where_one_does(capsys) -> None:
    small = ["--device", "cpu", "--budget", "1MiB"]
    answer, text = both(capsys, *LINEAR, *BATCH, *small)
    assert not answer["fits"]
    assert answer["devices"][0]["largest_batch_size"] is None
    assert "needs" in answer["devices"][0]["why_no_largest"]
    assert "does NOT fit" in text
    budget = ["--budget", "560MiB", "--batch-size", "600000"]
    assert not answered(capsys, "plan", *LINEAR, *BATCH, "--device", "T4", *budget, status=DOES_NOT_FIT)["fits"]


def test_one_device_is_shown_by_part_and_several_in_a_row_each(capsys) -> None:
    one = shown(capsys, "plan", *LINEAR, *BATCH, "--device", "T4", "--max-batch-size", "64")
    assert "optimizer state" in one
    assert "MemGuard: batch size 8 fits: " in one
    assert "Largest batch size of 64 or less: 64, which needs" in one
    several = shown(capsys, "plan", *LINEAR, *BATCH, "--device", "T4", "--device", "RTX 4090", "--max-batch-size", "64")
    assert "batch size 8, on " in several
    assert "NVIDIA GeForce RTX 4090" in several
    assert "64+" in several
    assert "+: the largest of 64 or less; memory is not the limit." in several


def said(plan: dict[str, Any], text: str) -> None:
    """Check that the text of a plan for one device agrees with its JSON, and both with the budget."""
    asked, largest, usable = plan["asked"], plan["largest"], plan["budget"]["usable_bytes"]
    assert plan["fits"] == (asked["most_device_bytes"] <= usable)
    assert (f"batch size {asked['batch_size']} fits: " in text) == plan["fits"]
    if largest is None:
        assert ("No batch size" in text) != ("Largest batch size unknown" in text)
        return
    size = largest["batch_size"]
    of = {"memory": "that fits", "dataset": "with this dataset"}.get(plan["limited_by"], r"of \d+ or less")
    assert re.search(rf"Largest batch size {of}: {size}\b", text), text
    assert largest["most_device_bytes"] <= usable
    if plan["limited_by"] == "memory":
        assert (size >= asked["batch_size"]) == plan["fits"]


SHAPES = ["--input-shape", "8,32", "--target-shape", "8:int64"]


@pytest.mark.parametrize(
    "arguments",
    [
        [*NET, *DATA, "--device", "T4", "--batch-size", "512", "--max-batch-size", "256"],
        pytest.param([*NET, *DATA, "--device", "T4", "--batch-size", "2000"], marks=pytest.mark.long),
        [*NET, *DATA, "--device", "T4", "--batch-size", "512", "--devices-per-node", "4", "--strategy", "ddp"],
        pytest.param([*NET, *DATA, "--device", "cpu", "--batch-size", "1", "--budget", "1MiB"], marks=pytest.mark.long),
        [*NET, *SHAPES, "--min-batch-size", "60000", "--device", "cpu", "--budget", "20MiB"],
        [*NET, *DATA, "--device", "H100", "--margin", "0", "--budget", "900MiB", "--batch-size", "112"],
        [*NET, *DATA, "--device", "H100", "--margin", "0", "--budget", "900MiB", "--batch-size", "111"],
        [*NET, *DATA, "--device", "T4", "--max-batch-size", "1"],
    ],
    ids=lambda arguments: " ".join(arguments[3:]),
)
def test_a_plan_agrees_with_itself(capsys, played, arguments: list[str]) -> None:
    """Also where another kernel takes 12 MiB less from 112 samples on, and where one sample is refused."""

    def uneven(trace: Any) -> Any:
        if trace.batch_size == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        return trace.plus({"workspaces": 12 * MIB * (trace.batch_size < 112)})

    if "900MiB" in arguments or arguments[-1] == "1":
        played(uneven)
    answer, text = both(capsys, *arguments)
    said(answer["devices"][0], text)


def test_a_table_of_several_devices_compares_with_the_budget_and_says_what_is_unknown(capsys, played) -> None:
    def only_eight(trace: Any) -> Any:
        assert trace.batch_size == 8
        return trace

    devices = ["--device", "T4", "--device", "H100", "--device", "T4"]
    played(lambda trace: trace.plus({"activations": MIB * trace.batch_size}))
    budget = ["--budget", "400MiB", "--batch-size", "800"]
    text = shown(capsys, "plan", *NET, *DATA, *devices, *budget, status=DOES_NOT_FIT)
    assert "batch size 800, on each of these devices alone" in text
    assert re.search(r"NVIDIA H100 80GB HBM3 │ 400.0 MiB │ +[\d.]+ [MG]iB │ +\d+% │ +NO │", text)
    assert "within the budget minus a 5% margin" in text
    played(only_eight)
    text = shown(capsys, "plan", *NET, *SHAPES, "--device", "T4", "--device", "H100")
    assert text.count("│  yes │       unknown │") == 2


@pytest.mark.captures
def test_overrides_reach_the_step(capsys) -> None:
    def parts(*options: str) -> dict[str, int]:
        return answered(capsys, "plan", *NET, *DATA, "--device", "cpu", "--max-batch-size", "8", *options)["devices"][
            0
        ]["asked"]["parts_bytes"]

    plain = parts()
    assert parts("--optimizer", "torch.optim.SGD")["optimizer_state"] == 0
    momentum = parts("--optimizer", "sgd,momentum=0.9")["optimizer_state"]
    assert momentum == plain["parameters"]
    assert parts("--precision", "bf16-true")["parameters"] * 2 == plain["parameters"]
    assert parts("--batch-size", "8")["batch"] == 2 * plain["batch"]
    assert parts("--data-args", "batch_size=2")["batch"] * 2 == plain["batch"]
    inference = parts("--inference")
    assert (inference["gradients"], inference["parameters"]) == (0, plain["parameters"])


def test_accumulation_leaves_the_gradients_through_the_forward_pass(capsys) -> None:
    alone = answered(capsys, "plan", *NET, *DATA, "--device", "cpu", "--batch-size", "1000")
    twice = answered(capsys, "plan", *NET, *DATA, "--device", "cpu", "--batch-size", "1000", "--accumulate", "2")
    assert twice["devices"][0]["accumulate_grad_batches"] == 2
    assert twice["devices"][0]["asked"]["peak_device_bytes"] > alone["devices"][0]["asked"]["peak_device_bytes"]


@pytest.mark.parametrize(
    ("target", "batch"),
    [
        (["net:Example", "--args", "width=16", "--target-shape", "16:int64:10"], "16 x 32 float32, 16 int64"),
        (["net:Named", "--args", "width=16", "--input", "x=4,32", "--input", "mask=4"], "4 x 32 float32, 4 float32"),
        (["net.py:NeedsMemory", "--input-shape", "6,32", "--target-shape", "6:int64"], "6 x 32 float32, 6 int64"),
        ([*NET, "--input-shape", "6x32", "--target-shape", "(6,):int"], "6 x 32 float32, 6 int64"),
        ([*NET, "--input-shape", "[6, 32]:torch.float32", "--target-shape", "6:int64:9"], "6 x 32 float32, 6 int64"),
        ([*NET, "--input-shape", "6 32", "--target-shape", "6:9"], "6 x 32 float32, 6 int64"),
    ],
    ids=["example_input_array", "by name", "a class that cannot be made without memory", "x", "brackets", "spaces"],
)
def test_batches_are_made_from_what_was_typed(capsys, target: list[str], batch: str) -> None:
    assert answered(capsys, "plan", *target, "--device", "cpu", "--max-batch-size", "32")["batch"] == batch


@pytest.mark.captures
def test_a_step_that_wants_values_is_run_with_a_model_that_has_memory(capsys) -> None:
    answer = answered(capsys, "plan", "net:NeedsValues", "--args", "width=8", *DATA, "--device", "cpu")
    assert answer["devices"][0]["asked"]["method"] == "real"


@pytest.mark.captures
def test_advice_is_given_on_the_device_that_it_does_not_fit(capsys) -> None:
    budget = 3 * MIB + process_bytes([torch.empty(512, 512)], torch.get_num_threads())[2]
    options = ["--optimizer", "adam", "--device", "cpu", "--budget", str(budget), "--advise"]
    answer = answered(capsys, "plan", *LINEAR, *BATCH, *options, status=DOES_NOT_FIT)
    assert answer["advice_on"] == "CPU"
    assert any(each["fits"] and each["saved_bytes"] > 0 for each in answer["advice"])


def test_a_lightning_cli_config_is_read_with_its_optimizer_and_trainer(capsys, project: Path) -> None:
    pytest.importorskip("jsonargparse")
    settings = """
        seed_everything: 1
        trainer:
          accelerator: gpu
          devices: 2
          num_nodes: 2
          strategy: ddp
          precision: bf16-mixed
          accumulate_grad_batches: 3
          logger: {class_path: pytorch_lightning.loggers.WandbLogger}
        model: {class_path: net.Net, init_args: {width: 256}}
        data: {class_path: net.Data, init_args: {batch_size: 8}}
        optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1, momentum: 0.9}}
        ckpt_path: null
    """
    (project / "config.yaml").write_text(textwrap.dedent(settings), encoding="utf-8")
    subject, answer, _ = planned(capsys, "--config", "config.yaml", "--device", "H100")
    assert (answer["batch_size"], answer["precision"]) == (8, "bf16-mixed")
    assert answer["devices"][0]["accumulate_grad_batches"] == 3
    assert answer["devices"][0]["ranks"] == 4
    assert answer["devices"][0]["largest_batch_size"] == 250  # a quarter of the samples to each
    assert subject.trainer["strategy"] == "ddp"
    optimizer = subject.model.configure_optimizers()
    assert (type(optimizer), optimizer.defaults["momentum"]) == (torch.optim.SGD, 0.9)


@INSTALLED
@pytest.mark.captures
@pytest.mark.long  # as tests/training/planning/test_on_ranks.py
def test_a_plan_on_several_nodes_is_that_of_a_rank_and_of_all(capsys) -> None:
    on_sixteen = ("--strategy", "deepspeed_stage_2", "--devices-per-node", "8", "--num-nodes", "2")
    answer = answered(capsys, "plan", *NET, *DATA, *on_sixteen, "--device", "H100")
    plan = answer["devices"][0]
    assert plan["ranks"] == 16
    assert plan["largest_batch_size"] == 63  # of 1000 samples
    assert plan["largest_in_all"] == 63 * 16
    assert plan["asked"]["parts_bytes"]["communication"] > 0


@pytest.fixture
def not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's blocks are looked for in itself."""
    monkeypatch.setattr(LightningProgram, "inspect", lambda program, examine: examine(program.module, "self"))


@pytest.mark.usefixtures("not_copied")
def test_fewer_ranks_share_all_of_the_dataset(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_command, "_advise", lambda plans, _: (plans[0], ()))
    on_four = ("--strategy", "ddp", "--devices-per-node", "4", "--device", "T4")
    layouts = answered(capsys, "plan", *NET, *DATA, *on_four, "--advise")["layouts"]
    assert [(each["batch_size"], each["in_all"]) for each in layouts] == [(250, 1000), (500, 1000), (1000, 1000)]


def test_sizes_of_a_mesh_have_to_be_those_of_the_devices(capsys, project: Path) -> None:
    text = refused(capsys, "plan", *NET, *DATA, "--data-parallel", "4", "--tensor-parallel", "2")
    assert "--data-parallel 4 x --tensor-parallel 2 is not the number of devices, 1" in text


def test_a_module_that_does_not_shard_itself_is_told_what_to_try(capsys, project: Path) -> None:
    text = refused(capsys, "plan", *NET, *DATA, "--data-parallel", "2", "--devices-per-node", "2")
    assert "configure_model" in text
    assert "Net has none: add one that calls fully_shard or parallelize_module, or try the strategy fsdp." in text
    text = refused(capsys, "plan", *LINEAR, *BATCH, "--data-parallel", "2", "--devices-per-node", "2")
    assert "Linear is a plain module: try --strategy fsdp" in text


def test_a_strategy_for_several_devices_needs_their_number(capsys, project: Path) -> None:
    for name in ("fsdp", "ddp"):
        text = refused(capsys, "plan", *NET, *DATA, "--strategy", name)
        assert f"The strategy {name} is for several devices" in text
        assert "--devices-per-node" in text


def test_a_config_that_does_not_fit_the_class_says_where(capsys, project: Path) -> None:
    pytest.importorskip("jsonargparse")
    (project / "config.yaml").write_text("model: {width: wide}\ndata: {batch_size: 4}\n", encoding="utf-8")
    text = refused(capsys, "plan", "net:Net", *DATA, "--config", "config.yaml")
    assert "config.yaml" in text
    assert "width" in text


def test_a_trainer_that_cannot_be_made_is_reported(capsys, project: Path) -> None:
    pytest.importorskip("jsonargparse")
    settings = "trainer: {strategy: carrier_pigeon}\nmodel: {class_path: net.Net, init_args: {width: 8}}\n"
    (project / "config.yaml").write_text(settings, encoding="utf-8")
    assert "carrier_pigeon" in refused(capsys, "plan", "--config", "config.yaml", *BATCH)


# -- the other commands


def test_layers_shows_each_layer(capsys) -> None:
    answer = answered(capsys, "layers", *NET, *DATA)
    parameters = 32 * 64 + 64 + 64 * 64 + 64
    assert answer["parameters"] == parameters
    assert [layer["name"] for layer in answer["layers"]] == ["", "net", "net.0", "net.1"]
    text = shown(capsys, "layers", *NET, *DATA, "--depth", "1")
    assert f"{parameters:,}" in text
    assert "net.0" not in text


def test_the_catalogue_is_listed_and_filtered(capsys) -> None:
    names = [gpu["name"] for gpu in answered(capsys, "gpus", "a100")]
    assert "NVIDIA A100-SXM4-80GB" in names
    assert all("A100" in name for name in names)
    assert "Tesla T4" in shown(capsys, "gpus")


def test_doctor_says_what_an_issue_asks_for(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    found = answered(capsys, "doctor")
    assert found["torch"] == torch.__version__
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert "free" in found["device cpu"]
    text = shown(capsys, "doctor")
    assert all(f"{name} " in text for name in found)


def test_doctor_names_a_private_name_that_is_missing(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._neg_view")
    assert "does not have torch._neg_view" in answered(capsys, "doctor")["private names"]


def test_devices_says_what_is_free_and_by_which_source(capsys) -> None:
    cpu = answered(capsys, "devices")[0]
    assert cpu["device"] == "cpu"
    assert 0 < cpu["free_bytes"] <= cpu["total_bytes"]
    assert cpu["source"] in ("host", "cgroup", "rlimit")
    assert "CPU" in shown(capsys, "devices")


def test_a_snapshot_is_written_and_says_how_to_open_it(capsys, project: Path) -> None:
    text = shown(capsys, "snapshot", *NET, *DATA, "--device", "H100", "-o", "step.pickle")
    assert "pytorch.org/memory_viz" in text
    assert "Note: " not in text
    if not torch.cuda.is_available():
        text = shown(capsys, "snapshot", *NET, *DATA, "--device", "cuda", "-o", "step.pickle")
        assert "Note: no CUDA device is available: predicted for an NVIDIA A100-SXM4-80GB" in " ".join(text.split())
    assert pickle.loads((project / "step.pickle").read_bytes())["segments"]


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, all_here: None) -> Path:
    """A folder with snapshots of the step, and of that of a deeper net."""
    folder = tmp_path_factory.mktemp("captured")
    (folder / "net.py").write_text(textwrap.dedent(SOURCE), encoding="utf-8")
    for name, more in {"step": (), "deeper": ("depth=2",)}.items():
        target = [f"{folder / 'net.py'}:Net", "--args", "width=64", *more, "--datamodule", f"{folder / 'net.py'}:Data"]
        assert main(["snapshot", *target, "--device", "T4", "-o", str(folder / f"{name}.pickle")]) == FITS
    return folder


@pytest.fixture
def snapshots(captured: Path, project: Path) -> Path:
    """The folder in which they were made; they are where a test runs, too."""
    for path in captured.glob("*.pickle"):
        shutil.copy(path, project)
    return captured


def test_a_snapshot_is_replayed_under_other_settings(capsys, snapshots: Path) -> None:
    text = shown(capsys, "replay", "step.pickle")
    assert "Predicted history of" in text
    assert "expandable_segments:True" in text
    places = [line.partition(" in total: ")[2] for line in text.splitlines() if " in total: " in line]
    assert any("net.py:" in place for place in places)
    assert len(set(places)) == len(places)
    assert str(snapshots) not in text
    (history,) = answered(capsys, "replay", "step.pickle", "--setting", "max_split_size_mb:64", "--capacity", "T4")
    assert [row["setting"] for row in history["settings"]] == [None, "max_split_size_mb:64"]
    assert all(row["fits"] for row in history["settings"])
    assert history["capacity_bytes"] == find("T4").capacity_bytes
    for typo in ("expandable_segment:True", "PYTORCH_ALLOC_CONF=expandable_segments:True"):
        assert "is not a setting that is replayed" in refused(capsys, "replay", "step.pickle", "--setting", typo)
    assert "none.pickle cannot be read (No such file or directory)." in refused(capsys, "replay", "none.pickle")
    assert main(["replay", "step.pickle", "--capacity", "1MiB"]) == DOES_NOT_FIT
    assert "NO" in capsys.readouterr().out
    assert "PYTORCH_ALLOC_CONF sets max_split_size_mb:1" in refused(
        capsys, "replay", "step.pickle", "--setting", "max_split_size_mb:1"
    )


def test_a_capacity_that_the_process_did_not_have_is_noted(capsys, project: Path) -> None:
    first, second, small, large = 1 << 32, 2 << 32, 40 * MIB, 44 * MIB
    released = ["alloc", "free_requested", "free_completed", "segment_free"]
    entries = [[action, first, small, 0, -1] for action in ["segment_alloc", *released]]
    entries += [[action, second, large, 0, -1] for action in ("segment_alloc", "alloc")]
    block = {"size": large, "state": "active_allocated", "frames": []}
    segment = {"address": second, "total_size": large, "stream": 0, "segment_type": "large", "blocks": [block]}
    content = {"segments": [segment], "device_traces": [entries], "frames": []}
    (project / "step.json").write_text(json.dumps(content), encoding="utf-8")
    note = "at most 44.0 MiB were reserved; 84.0 MiB seem not to have fit"
    assert note in shown(capsys, "replay", "step.json", "--capacity", "100MiB")
    assert note not in shown(capsys, "replay", "step.json", "--capacity", "80MiB")


def test_a_history_that_ran_out_of_memory_says_why_and_what_would_have_helped(capsys, project: Path) -> None:
    first, size, third = 1 << 32, 60 * MIB, 20 * MIB
    actions = [("segment_alloc", 0, size), *((action, 0, size) for action in ("alloc", "free_requested"))]
    actions += [("free_completed", 0, size), *(("alloc", third * place, third) for place in range(3))]
    actions += [("free_requested", third, third), ("free_completed", third, third)]
    entries = [[action, first + at, nbytes, 0, 0] for action, at, nbytes in actions] + [
        ["oom", 25 * MIB, 30 * MIB, 0, 1]
    ]
    blocks = [{"size": third, "state": "inactive" if place == 1 else "active_allocated"} for place in range(3)]
    segment = {"address": first, "total_size": size, "stream": 0, "segment_type": "large", "blocks": blocks}
    frames = [["/code/net.py:3:forward"], ["??:0:at::_ops::bmm::call", "/code/net.py:7:forward"]]
    content = {"segments": [segment], "device_traces": [[], entries], "frames": frames}
    content["segments"][0]["device"] = 1
    (project / "oom.json").write_text(json.dumps(content), encoding="utf-8")
    text = shown(capsys, "replay", "oom.json")
    for line in (
        "Device 1: Recorded history of 10 entries.",
        "It ran out of memory at entry 10: 30.0 MiB for aten::bmm at net.py:7:forward.",
        "60.0 MiB were reserved then, 40.0 MiB of them allocated; the largest free piece there was 20.0 MiB, and the ",
        "Of the 85.0 MiB that it could reserve, 45.0 MiB were not allocated, but in pieces: it was short by 5.0 MiB.",
        "  40.0 MiB in 2 blocks: net.py:3:forward",
        "It would have been served: expandable_segments:True.",
    ):
        assert line in text
    assert main(["replay", "oom.json", "--setting", "max_split_size_mb:128"]) == DOES_NOT_FIT
    assert "No setting serves it: it is short by 5.0 MiB." in capsys.readouterr().out
    (found,) = answered(capsys, "replay", "oom.json")
    assert (found["device"], found["capacity_bytes"]) == (1, 85 * MIB)
    assert (found["out_of_memory"]["operator"], found["out_of_memory"]["short_bytes"]) == ("aten::bmm", 5 * MIB)


@pytest.mark.usefixtures("snapshots")
def test_two_snapshots_are_compared(capsys) -> None:
    found = answered(capsys, "compare", "step.pickle", "deeper.pickle")
    assert found["equal_requests"] > 0
    assert found["actual_requests"] > found["predicted_requests"]
    assert not any(each["line"] for each in found["differences"])
    assert "net.py:" in shown(capsys, "compare", "step.pickle", "deeper.pickle", "--lines")


@pytest.mark.parametrize("command", ["replay", "compare"])
def test_a_snapshot_that_names_a_class_is_refused(capsys, project: Path, command: str) -> None:
    (project / "step.pickle").write_bytes(pickle.dumps(Path("anything")))
    text = refused(capsys, command, *["step.pickle"] * (1 if command == "replay" else 2))
    assert "a memory snapshot holds only plain values" in text


def test_a_report_is_written(capsys, project: Path) -> None:
    shown(capsys, "plan", *NET, *DATA, "--device", "T4", "--report", "out")
    assert "net.0" in (project / "out" / "memguard_report.html").read_text(encoding="utf-8")


# -- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope.models:Net"], ["no module 'nope'", "looked in"]),
        (["nope.py:Net"], ["no file nope.py", "net.py"]),
        (["net:Nets", *DATA], ["no 'Nets'", "Did you mean Net"]),
        (["torch.nn.Linear"], ["Did you mean torch.nn:Linear?"]),
        (["net:Net", *DATA], ["net:Net needs width", "width=..."]),
        (["net:Net", "--args", "widht=3", *DATA], ["no argument 'widht'", "Did you mean width?"]),
        (["net:Breaks", *DATA], ["ZeroDivisionError: division by zero", "self.share = 1 / 0", "net.py:"]),
        ([*NET], ["Pass a batch", "--input-shape", "--datamodule"]),
        ([*LINEAR], ["Pass a batch", "--input-shape"]),
        ([*LINEAR, "--input-shape", "8,0"], ["'8,0' is not a shape", "the batch size first", "8,3,224,224"]),
        ([*LINEAR, "--input-shape", "8,512:flot32"], ["'flot32' is not a data type", "Did you mean float32"]),
        ([*LINEAR, "--input-shape", "8,512", "--target-shape", "8:int46"], ["'int46'", "Did you mean int64"]),
        ([*LINEAR, "--input-shape", "8,512", "--target-shape", "7:int64"], ["a batch of 8", "one of 7"]),
        ([*NET, *DATA, "--min-batch-size", "1001"], ["min_batch_size=1001 is above the 1000 samples"]),
        ([*LINEAR, *BATCH, "--device", "H1000"], ["no GPU called 'H1000'", "H100"]),
        ([*LINEAR, *BATCH, "--device", "meta"], ["'meta'"]),
        ([*LINEAR, *BATCH, "--optimizer", "sgdd"], ["no 'sgdd'"]),
        ([*LINEAR, *BATCH, "--optimizer", "sgd,moment=1"], ["no argument 'moment'", "momentum"]),
        ([*LINEAR, *BATCH, "--precision", "fp8"], ["precision='fp8' is unknown"]),
        ([*LINEAR, *BATCH, "--budget", "lots"], ["'lots' is not a quantity"]),
        ([*LINEAR, *BATCH, "--device", "T4", "--budget", "20GiB"], ["20.0 GiB is more than the Tesla T4 has"]),
        ([*LINEAR, *BATCH, "--margin", "5"], ["margin=5.0 is outside"]),
        ([*LINEAR, *BATCH, "--batch-size", "0"], ["'0' is not a whole number"]),
        ([*LINEAR, *BATCH, "--device", "cpu", "--report", "net.py/out"], ["cannot be written", "net.py"]),
        (["--config", "nope.yaml"], ["nope.yaml cannot be read"]),
        (["--args", *NET], ["Pass a TARGET", "before the options"]),
    ],
    ids=lambda value: " ".join(value)[:40] if value and isinstance(value, list) else None,
)
def test_bad_usage_is_explained(capsys, arguments: list[str], words: list[str]) -> None:
    text = refused(capsys, "plan", *arguments)
    for word in words:
        assert word in text, text


def test_a_step_that_cannot_be_predicted_is_refused_with_the_batch_that_it_was_given(capsys, played) -> None:
    def states_alone(trace: Any) -> Any:
        if trace.method != "states":
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        return trace

    played(states_alone)
    text = refused(capsys, "plan", *LINEAR, "--input-shape", "8,99", "--device", "T4")
    assert "cannot be predicted: the step could not run on a copy (RuntimeError: mat1 and mat2" in text
    assert "8 x 99 float32" in text


def test_a_snapshot_into_no_folder_is_refused_before_anything_runs(capsys) -> None:
    text = refused(capsys, "snapshot", *NET, *DATA, "-o", "nowhere/step.pickle")
    assert "no folder nowhere" in text
    assert "imported" not in text  # not even the user's module


def test_a_gpu_that_nothing_is_like_is_refused(capsys) -> None:
    assert "no GPU called 'zzz'" in refused(capsys, "gpus", "zzz")


# -- help


@pytest.mark.parametrize(
    "command", [[], ["plan"], ["layers"], ["snapshot"], ["replay"], ["compare"], ["gpus"], ["devices"], ["doctor"]]
)
def test_every_command_has_help(capsys, command: list[str]) -> None:
    assert main([*command, "--help"]) == 0
    assert "usage: memguard" in capsys.readouterr().out


def test_alone_it_prints_its_help(capsys) -> None:
    assert "usage: memguard" in shown(capsys)


def test_help_loads_neither_torch_nor_lightning() -> None:
    code = (
        "import sys; from lightning_memguard.cli.main import main; main(['--help']);"
        "[main([name, '--help']) for name in ('plan', 'layers', 'snapshot', 'replay', 'compare', 'gpus', 'devices')];"
        "main(['gpus', 'h100']);"
        "print(sorted({'torch', 'lightning', 'pytorch_lightning'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert answer.stdout.splitlines()[-1] == "[]"


def test_the_package_runs_as_a_module() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "lightning_memguard", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
    )
    assert answer.stdout.startswith("memguard ")


@pytest.mark.usefixtures("not_copied")
def test_the_ways_to_see_so_many_samples_are_printed_with_their_cost(project: Any, capsys: Any) -> None:
    options = ["plan", *NET, *DATA, "--target-batch", "64", "--device", "H100", "--precision", "bf16-true"]
    assert main([*options, "--price", "h100=$2.50"]) == FITS
    out = capsys.readouterr().out
    assert "Ways to see 64 samples a step" in out
    assert "Cost of 1M samples" in out
    assert main([*options, "--json"]) == FITS
    (way, *_) = json.loads(capsys.readouterr().out)["ways"]
    assert way["batch_size"] * way["accumulate_grad_batches"] == way["samples"] == 64
    assert 0 < way["seconds_per_sample"]["low"] < way["seconds_per_sample"]["likely"]
    assert way["dollars_per_million_samples"] is None
    assert main(["plan", *NET, *DATA, "--price", "H100=2"]) == BAD_USE
    assert main([*options, "--price", "H100"]) == BAD_USE
    assert main([*options, "--advise"]) == BAD_USE


@pytest.mark.captures
@mock.patch("lightning_memguard.training.planning.lengths.epoch_at_sizes", mock.Mock(return_value=None))
def test_the_largest_batch_at_each_length_is_printed(capsys: Any) -> None:
    shapes = ["--input-shape", "4,16,512", "--target-shape", "4,16,512:float32"]
    options = ["plan", *LINEAR, *shapes, "--device", "T4", "--budget", "1GiB", "--length", "1024", "8", "10000000"]
    assert main([*options, "--max-batch-size", "2000"]) == FITS
    out = capsys.readouterr().out
    assert "the largest batch size at each length" in out
    assert "2000+" in out
    assert "At length 10000000 on Tesla T4: Batch size 1 needs" in out
    assert main([*options, "--json"]) == FITS
    short, long, none = json.loads(capsys.readouterr().out)["lengths"]
    assert [each["length"] for each in (short, long, none)] == [8, 1024, 10_000_000]
    assert short["batch_size"] > 100 * long["batch_size"] > none["batch_size"] == 0
    assert main([*options[:-3], "10000000"]) == DOES_NOT_FIT
    assert main([*options, "--largest", "length"]) == BAD_USE
    assert main([*options, "--advise"]) == BAD_USE
    assert main([*options, "--target-batch", "8"]) == BAD_USE


def test_a_line_says_what_the_cache_grows_to_over_an_epoch_of_lengths(capsys: Any) -> None:
    shapes = ["--input-shape", "4,16,512", "--target-shape", "4,16,512:float32"]
    options = ["plan", *LINEAR, *shapes, "--device", "T4", "--budget", "600MiB", "--length", "512", "1024"]
    options += ["--max-batch-size", "4"]
    with mock.patch("lightning_memguard.core.capture.lengths.MOST_SECONDS", 0.3):
        assert main([*options, "--json"]) == FITS
    (epoch,) = json.loads(capsys.readouterr().out)["epochs"].values()
    assert epoch["run"]["steps"] >= 1
    assert epoch["run"]["peak_reserved_bytes"] < 600 << 20
    run = EpochRun("", "", 100, 5 << 20, 7, 3, 9, None)
    found = Epoch(8, 1024, run, (replace(run, change="with a", how="set a", retries=0, releases=0),))
    with mock.patch("lightning_memguard.training.planning.lengths.epoch_at_sizes", return_value=found):
        assert main(options) == FITS
    out = capsys.readouterr().out
    assert "On Tesla T4, with batches of these sizes" in out
    assert "fills 5.0 MiB, with 3.0 releases of the cache in 100 steps" in out
    assert "To avoid that, set a." in out
    refused = CannotTraceError("a reason")
    with mock.patch("lightning_memguard.training.planning.lengths.epoch_at_sizes", side_effect=refused):
        assert main(options) == FITS
    assert "over an epoch is not known: a reason" in capsys.readouterr().out


@pytest.mark.captures
def test_the_largest_length_of_any_model_fits_and_the_next_does_not(capsys: Any) -> None:
    def plan(length: int, *more: str) -> dict[str, Any]:
        shapes = ["--input-shape", f"4,{length},512", "--target-shape", f"4,{length},512:float32"]
        main(["plan", *LINEAR, *shapes, "--device", "T4", "--budget", "300MiB", "--json", *more])
        return json.loads(capsys.readouterr().out)

    (found,) = plan(16, "--largest", "length")["largest"]
    assert found["what"] == "length"
    assert found["largest"] % 128 == 0
    assert plan(found["largest"])["fits"]
    assert not plan(found["largest"] + 128)["fits"]
    assert main(["plan", *LINEAR, "--input-shape", "4,512", "--largest", "rank"]) == BAD_USE


def test_a_script_that_parses_arguments_finds_none_of_ours(project: Path) -> None:
    script = "import argparse, net\nargparse.ArgumentParser().parse_args()\nNet = net.Net\n"
    (project / "script.py").write_text(script, encoding="utf-8")
    typed = list(sys.argv)
    assert load("script.py:Net").__name__ == "Net"
    assert sys.argv == typed


def test_an_error_of_ours_is_not_the_status_of_a_training_that_does_not_fit(capsys) -> None:
    with mock.patch("lightning_memguard.cli.tables.print_gpus", side_effect=OSError("No space left on device")):
        assert main(["gpus"]) == BAD_USE
    assert "No space left on device" in capsys.readouterr().err


def test_an_instance_is_not_called_as_if_it_were_a_class() -> None:
    with pytest.raises(MemGuardError, match="net is a Linear; pass a class"):
        build(torch.nn.Linear(2, 2), {}, "net")
