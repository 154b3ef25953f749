"""Have a run take its batches at a chosen size: its loaders as they are made, and every setting that holds the size."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_memguard.training.adapter.loader_access import arrange, hyperparameters_of, intercept_loaders
from lightning_memguard.training.adapter.run_facts import Role, RunFacts
from lightning_memguard.training.data.loaders import info_of
from lightning_memguard.training.data.resizing import resize

if TYPE_CHECKING:
    from pytorch_lightning import LightningDataModule, LightningModule, Trainer


def rewrite_loaders(trainer: Trainer, facts: RunFacts, role: Role, batch_size: Callable[[], int]) -> Callable[[], None]:
    """Have a run take its batches at a size, asked for whenever its loaders are made.

    Returns:
        A function that gives the Trainer its own data source back, for when the run is over.
    """

    def change(make_loaders: Callable[[], object]) -> object:
        size = batch_size()
        return _resize_all(facts, make_loaders(), role, size)

    return intercept_loaders(trainer, role, change)


def _resize_all(facts: RunFacts, loaders: object, role: Role, batch_size: int) -> object:
    """The loaders at a size; unchanged where a hook now gives others, that cannot be resized."""
    try:
        info = info_of(facts, loaders, "the loader", role)
        sized = [(source.loader, info.size_of(source, batch_size)) for source in info.sources]
        resized = [resize(loader, size, info.fixed_because) for loader, size in sized]
    except Exception as error:  # noqa: BLE001 - what the user's hook gave is trained with as it is
        warnings.warn(f"MemGuard left the {role} loader as it is: {error}", stacklevel=2)
        return loaders
    info.combined.flattened = resized
    return info.combined if isinstance(loaders, type(info.combined)) else arrange(info.combined, resized)


def set_batch_size(module: LightningModule, datamodule: LightningDataModule | None, batch_size: int) -> None:
    """Set ``batch_size`` wherever module or datamodule keeps one: attribute, hparams, and the copy that loggers get."""
    for owner in (module, *([] if datamodule is None else [datamodule])):
        if isinstance(getattr(owner, "batch_size", None), int):
            with contextlib.suppress(AttributeError):  # a property without a setter follows something else
                setattr(owner, "batch_size", batch_size)  # noqa: B010 - neither class declares one
        for hparams in hyperparameters_of(owner):
            if "batch_size" in hparams:
                hparams["batch_size"] = batch_size
