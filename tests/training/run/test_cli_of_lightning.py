"""LightningCLI: MemGuard and its settings from the command line and from YAML, in both packages."""

from __future__ import annotations

import importlib
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard, MemGuardError
from tests.long import long_but

pytestmark = pytest.mark.usefixtures("taped")

pytest.importorskip("jsonargparse")

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=1",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]


def cli(package: str, *arguments: str, run: bool = True) -> Any:
    theirs = importlib.import_module(package)
    lightning_cli = importlib.import_module(f"{package}.cli").LightningCLI

    class Model(theirs.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, width), nn.Linear(width, 4))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Data(theirs.LightningDataModule):  # type: ignore[misc,name-defined]
        def __init__(self, batch_size: int = 4) -> None:
            super().__init__()
            self.batch_size = batch_size

        def train_dataloader(self) -> Any:
            data = TensorDataset(torch.randn(100, 16), torch.randint(0, 4, (100,)))
            return DataLoader(data, batch_size=self.batch_size)

    return lightning_cli(
        Model, Data, run=run, args=[*(["fit"] if run else []), *QUIET, *arguments], save_config_callback=None
    )


def guard_of(made: Any) -> MemGuard:
    (guard,) = (callback for callback in made.trainer.callbacks if isinstance(callback, MemGuard))
    return guard


NAMES = ["MemGuard", "lightning_memguard.MemGuard"]


@pytest.mark.parametrize(
    ("package", "name"), long_but([*zip(PACKAGES, NAMES, strict=True)], itertools.product(PACKAGES, NAMES))
)
def test_a_guard_from_the_command_line(package: str, name: str) -> None:
    """By its name where the script imports it, and by its dotted path where it does not."""
    settings = ("budget=24GiB", "max_batch_size=20", "batch_size=largest")
    made = cli(package, f"--trainer.callbacks={name}", *(f"--trainer.callbacks.{each}" for each in settings))
    decision = guard_of(made).decision
    assert (decision.budget.free_bytes, decision.budget.source) == (24 * 2**30, "given")
    assert (decision.requested_batch_size, decision.batch_size) == (4, 20)
    assert made.trainer.num_training_batches == 5


@pytest.mark.captures
@pytest.mark.usefixtures("at_own_size")
@pytest.mark.parametrize("package", PACKAGES)
def test_an_optimizer_from_the_command_line_is_predicted_and_none_of_the_copys_business(package: str) -> None:
    settings = ["--trainer.callbacks=MemGuard", "--trainer.callbacks.max_batch_size=20"]
    made = cli(package, *settings, "--optimizer=Adam", "--optimizer.lr=0.01")
    parts = guard_of(made).decision.footprint.parts  # type: ignore[union-attr]
    assert parts["optimizer_state"] >= 2 * parts["parameters"]
    (optimizer,) = made.trainer.optimizers
    assert not optimizer._optimizer_step_post_hooks
    assert {float(state["step"]) for state in optimizer.state.values()} == {made.trainer.global_step}


@pytest.mark.parametrize("package", PACKAGES)
def test_next_to_another_callback(package: str) -> None:
    arguments = ["--trainer.callbacks+=ModelSummary", "--trainer.callbacks+=MemGuard", "--trainer.callbacks.margin=0.2"]
    assert guard_of(cli(package, *arguments, run=False))._settings.margin == 0.2


def test_bytes_and_mode_are_told_apart_from_text() -> None:
    arguments = ["--trainer.callbacks=MemGuard", "--trainer.callbacks.mode=check", "--trainer.callbacks.budget=1000000"]
    settings = guard_of(cli("pytorch_lightning", *arguments, run=False))._settings
    assert (settings.mode, settings.budget_bytes) == ("check", 1_000_000)


@pytest.mark.parametrize("package", PACKAGES)
def test_help_comes_from_the_docstring(package: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli(package, "--trainer.callbacks.help=MemGuard")
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "share of the budget to keep free, in [0, 1)" in shown
    assert "what the training may take on its device: bytes, or text such as" in shown
    for argument in ("mode", "budget", "margin", "min_batch_size", "max_batch_size", "multiple_of"):
        assert f".{argument} " in shown
    assert "keep_effective_batch_size" in shown


@pytest.mark.parametrize("package", PACKAGES)
def test_a_config_round_trip(package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of ``--print_config`` makes the same guard again."""
    settings = ["--trainer.callbacks.budget=24GiB", "--trainer.callbacks.multiple_of=8"]
    with pytest.raises(SystemExit):
        cli(package, "--trainer.callbacks=MemGuard", *settings, "--print_config")
    config = tmp_path / "config.yaml"
    config.write_text(capsys.readouterr().out)
    assert "MemGuard" in config.read_text()
    made = cli(package, "--config", str(config))
    settings = guard_of(made)._settings
    assert (settings.budget_bytes, settings.multiple_of, settings.mode) == (24 * 2**30, 8, "tune")
    assert guard_of(made).decision is not None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("margin=2.0", r"margin=2.0 is outside \[0, 1\)"),
        ("budget=lots", "'lots' is not a quantity of bytes"),
        ("mode=guess", "guess"),
        ("max_batch_size=-3", "max_batch_size=-3 is not a count"),
        ("no_such_setting=1", "no_such_setting"),
    ],
)
def test_a_bad_value_is_told(setting: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, MemGuardError, ValueError)) as refused:
        cli("pytorch_lightning", "--trainer.callbacks=MemGuard", f"--trainer.callbacks.{setting}")
    text = f"{refused.value} {capsys.readouterr().err}"
    assert re.search(message, text), text


def test_two_guards_are_one_too_many() -> None:
    two = ["--trainer.callbacks+=MemGuard", "--trainer.callbacks+=MemGuard"]
    with pytest.raises(Exception, match=r"MemGuard") as refused:
        cli("pytorch_lightning", *two)
    assert isinstance(refused.value, MemGuardError), type(refused.value)
    assert "keep one" in str(refused.value)


@pytest.mark.long
def test_nothing_of_ours_is_imported_for_a_dotted_path() -> None:
    """The path is enough: a script without any import of ours may name it in its YAML."""
    script = f"""
import sys
try:
    from pytorch_lightning.cli import LightningCLI
    from pytorch_lightning.demos.boring_classes import BoringModel
except ModuleNotFoundError:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel
assert "lightning_memguard" not in sys.modules
made = LightningCLI(BoringModel, run=False, save_config_callback=None,
                    args={[*QUIET, "--trainer.callbacks=lightning_memguard.MemGuard"]!r})
assert any(type(each).__name__ == "MemGuard" for each in made.trainer.callbacks)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_an_installed_package_may_add_it_to_every_trainer(package: str, tmp_path: Path, monkeypatch: Any) -> None:
    """As docs/howto.md says, by Lightning's entry point; this package itself adds none."""
    trainer = importlib.import_module(package).Trainer
    assert not any(isinstance(each, MemGuard) for each in trainer(accelerator="cpu", logger=False).callbacks)
    folder = tmp_path / "ours-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n", encoding="utf-8")
    factory = f"[{package}.callbacks_factory]\nmemguard = lightning_memguard:MemGuard\n"
    (folder / "entry_points.txt").write_text(factory, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert sum(isinstance(each, MemGuard) for each in trainer(accelerator="cpu", logger=False).callbacks) == 1
