"""A LightningCLI's configuration file -> the model, the data and the Trainer's settings that it asks for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_memguard.cli.names import load, make, users_code
from lightning_memguard.errors import MemGuardError
from lightning_memguard.training.facts.lightning_types import lightning_of

if TYPE_CHECKING:
    from pytorch_lightning import LightningDataModule
    from pytorch_lightning.cli import LightningCLI

_STEP = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "detect_anomaly", "inference_mode")
_LENGTH = ("max_epochs", "max_steps", "max_time", "overfit_batches", "limit_train_batches")
_RANKS = ("devices", "num_nodes", "strategy", "sync_batchnorm", "use_distributed_sampler")
_SETTINGS = (*_STEP, *_LENGTH, *_RANKS, "reload_dataloaders_every_n_epochs")
# Of the subcommand that saved the file.
_NOT_OURS = ("seed_everything", "ckpt_path", "weights_only", "return_predictions", "verbose")


@dataclass(frozen=True)
class Config:
    """Settings of a LightningCLI config: the model with its optimizer, the data, the Trainer's settings for memory."""

    model: nn.Module
    datamodule: LightningDataModule | None = None
    precision: str = "32-true"
    trainer: Mapping[str, Any] = field(default_factory=dict)


def read_config(path: str, model_class: type | None, data_class: type | None, *, meta: bool) -> Config:
    """Read a LightningCLI's YAML file with LightningCLI itself.

    The file has class paths, or the arguments of the classes that the user's own LightningCLI is made with.
    """
    try:
        import jsonargparse
        import yaml
    except ImportError as error:
        raise MemGuardError(f"--config needs {error.name}: pip install 'jsonargparse[signatures]'.") from error
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise MemGuardError(f"--config {path} cannot be read: {error}.") from error
    if not isinstance(content, Mapping):
        raise MemGuardError(f"--config {path} has no settings; pass the YAML file of a LightningCLI.")
    content = dict(content.get("fit") or content)
    trainer = content.get("trainer") or {}
    settings = {key: trainer[key] for key in _SETTINGS if trainer.get(key) is not None}
    plain = {key: value for key, value in content.items() if key not in (*_NOT_OURS, "trainer")}
    plain["trainer"] = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    with users_code(f"--config {path}"):
        try:
            cli = _read(plain, content, model_class, data_class, meta=meta)
        except jsonargparse.ArgumentError as error:
            raise MemGuardError(f"--config {path}: {_first_lines(error)}{_no_data(content, data_class)}") from error
    read = cli.config_init.get("trainer") or {}
    settings |= {key: read[key] for key in plain["trainer"]}
    return Config(cli.model, cli.datamodule, str(trainer.get("precision") or "32-true"), settings)


def _read(
    plain: dict[str, Any], content: Mapping[str, Any], model_class: type | None, data_class: type | None, *, meta: bool
) -> LightningCLI:
    lightning = _package(content, model_class)
    base = importlib.import_module(f"{lightning.__name__}.cli").LightningCLI

    class Reader(base):  # type: ignore[misc,valid-type]
        """Makes the model and the data, and no Trainer."""

        def before_instantiate_classes(self) -> None:
            if meta:
                self.parser.add_instantiator(_without_memory, lightning.LightningModule, subclasses=True, prepend=True)

        def instantiate_trainer(self, **_: object) -> None:
            return None

    parsing = {"args": plain, "parser_kwargs": {"exit_on_error": False}}
    nothing_else = {"run": False, "save_config_callback": None, "seed_everything_default": False}
    return Reader(model_class, data_class, **parsing, **nothing_else)


def _first_lines(error: Exception) -> str:
    """Return the parser's message, without the settings that it prints after it."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(line.strip() for line in lines[:_MOST_LINES])


def _no_data(content: Mapping[str, Any], data_class: type | None) -> str:
    """Name the class that is missing, if the file has the settings of data and no class for them."""
    data = content.get("data")
    if data_class is not None or not isinstance(data, Mapping) or "class_path" in data:
        return ""
    return ". The file does not name the class of the settings under `data:`; pass it as --datamodule module:Data."


_MOST_LINES = 3
_NO_CLASS = (
    "The configuration names no model: pass the classes that your LightningCLI is made with, TARGET and --datamodule. "
    "For LightningCLI(Net, Data): memguard plan package.module:Net --datamodule package.module:Data --config FILE."
)


def _without_memory(kind: type, **given: object) -> nn.Module:
    given.pop("applied_instantiation_links", None)
    return make(kind, given, kind.__name__)


def _package(content: Mapping[str, Any], model_class: type | None) -> Any:
    """The Lightning package that the model comes from."""
    if model_class is None:
        section = content.get("model")
        name = section.get("class_path") if isinstance(section, Mapping) else section
        if not isinstance(name, str) or "." not in name:
            raise MemGuardError(_NO_CLASS)
        model_class = load(":".join(name.rsplit(".", 1)))
    if not inspect.isclass(model_class):
        raise MemGuardError("With --config, TARGET must be a class, as for LightningCLI itself, not a function.")
    return lightning_of(model_class.__new__(model_class))
