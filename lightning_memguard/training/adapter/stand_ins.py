"""Stand-ins of the user's loggers, callbacks and datamodule, which answer what a step reads and do nothing."""

from __future__ import annotations

import copy
import inspect
import os
from typing import TYPE_CHECKING, Any

from lightning_memguard.training.facts import lightning_port as lightning

if TYPE_CHECKING:
    from pytorch_lightning import LightningDataModule, Trainer
    from typing_extensions import Self


class StandIn:
    """Object of the user's class to ``isinstance``, with the attributes of the user's object."""

    def __init__(self, original: object) -> None:
        vars(self)["memguard_original"] = original

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(vars(self)["memguard_original"])

    def __getattr__(self, name: str) -> Any:
        if "memguard_original" not in vars(self):  # while it is copied
            raise AttributeError(name)
        return getattr(vars(self)["memguard_original"], name)


class IdleCallback(StandIn):
    """A callback without hooks: Lightning calls those that are callable."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        is_hook = callable(value) and (name.startswith("on_") or name in ("setup", "teardown"))
        return None if is_hook else value


class SilentLogger(StandIn):
    """A logger whose methods do nothing."""

    @property
    def experiment(self) -> SilentExperiment:
        """Replacement for the user's experiment, which is not created for this."""
        return SilentExperiment(lightning.experiment_of(vars(self)["memguard_original"]))

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return SilentExperiment(None) if callable(value) else value


class QuietTrainer(StandIn):
    """A Trainer to read from, whose loggers do nothing."""

    @property
    def loggers(self) -> list[SilentLogger]:
        """Replacements for the user's loggers."""
        return [SilentLogger(logger) for logger in vars(self)["memguard_original"].loggers]

    @property
    def logger(self) -> SilentLogger | None:
        """The first of them."""
        return next(iter(self.loggers), None)


class SilentExperiment:
    """Anything that a step may call, index or enter; numbers and text are those of the user's experiment."""

    def __init__(self, original: object) -> None:
        vars(self)["memguard_original"] = original

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "memguard_original" not in vars(self):
            raise AttributeError(name)
        try:
            value = getattr(vars(self)["memguard_original"], name, self)
        except Exception:  # noqa: BLE001 - a property of it may ask a server
            value = self
        is_plain = value is None or isinstance(value, (bool, int, float, str, os.PathLike))
        return value if is_plain else SilentExperiment(None)

    def __call__(self, *_: object, **__: object) -> SilentExperiment:  # noqa: D102 - as all of this, it does nothing
        return self

    def __getitem__(self, _: object) -> SilentExperiment:
        return self

    def __setitem__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def idle_datamodule(datamodule: LightningDataModule | None, batch_size: int) -> LightningDataModule | None:
    """A shallow copy to read from, whose hooks that prepare or clean up do nothing (they have run, or will)."""
    idle: Any = copy.copy(datamodule)
    if idle is not None:
        for hook in ("prepare_data", "setup", "teardown", "on_exception"):
            setattr(idle, hook, lambda *_, **__: None)
        lightning.copy_hyperparameters(idle)
        if isinstance(vars(idle).get("batch_size"), int):
            idle.batch_size = batch_size
        for hparams in lightning.hyperparameters_of(idle):
            if "batch_size" in hparams:
                hparams["batch_size"] = batch_size
    return idle  # type: ignore[no-any-return]


def attribute_of(trainer: Trainer, name: str, shadow: object) -> Any:
    """An attribute that the user has added to a Trainer; its methods and properties see the shadow Trainer."""
    found = inspect.getattr_static(trainer, name, None)
    if isinstance(found, property) and found.fget is not None:
        return found.fget(shadow)
    value = getattr(trainer, name)
    is_method = inspect.ismethod(value) and value.__self__ is trainer
    return value.__func__.__get__(shadow) if is_method else value
