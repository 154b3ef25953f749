"""Lightning's private names around loaders: where a loop gets them, and how several are combined.

Each function was checked on Lightning 2.5.0 to 2.6.6.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader

from lightning_memguard.core.torch_port import tree_unflatten
from lightning_memguard.training.facts.lightning_types import lightning_of
from lightning_memguard.training.facts.run_facts import LOOPS, Role

if TYPE_CHECKING:
    from pytorch_lightning import LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.utilities import CombinedLoader

_PATCHED = [f"__{old}{name}__" for old in ("", "old__") for name in ("init", "setattr", "delattr")]


def call_loader_hook(owner: LightningModule | LightningDataModule, hook: str) -> Any:
    """Call ``train_dataloader`` or a similar hook as Lightning would: it records how the loader was constructed."""
    connector = importlib.import_module(f"{lightning_of(owner).__name__}.trainer.connectors.data_connector")
    record = connector._replace_dunder_methods
    with preserve_loader_classes(), record(DataLoader, "dataset"), record(BatchSampler):
        return getattr(owner, hook)()


def stage_named(name: str, package: ModuleType) -> Any:
    """The stage that Lightning passes to ``setup``: a string with a value of its own."""
    return importlib.import_module(f"{package.__name__}.trainer.states").TrainerFn(name)


@contextmanager
def preserve_loader_classes() -> Iterator[None]:
    """Leave torch's loader classes as they were.

    Lightning patches them while it calls a hook (`_replace_dunder_methods`). Its patches stay if it does so again
    inside such a call, as a capture may, and if an exception is raised in between.
    """
    classes = [cls for base in (DataLoader, BatchSampler) for cls in _with_subclasses(base)]
    before = [(cls, name, vars(cls).get(name)) for cls in classes for name in _PATCHED]
    try:
        yield
    finally:
        for cls, name, value in before:
            if value is not None:
                setattr(cls, name, value)
            elif name in vars(cls):
                delattr(cls, name)


def _with_subclasses(cls: type[Any]) -> list[type[Any]]:
    return [cls, *(below for each in cls.__subclasses__() for below in _with_subclasses(each))]


def set_data_source(trainer: Trainer, owner: object) -> None:
    """Set, on a Trainer that never runs, whose ``train_dataloader`` a fit would call."""
    trainer.fit_loop._data_source.instance = owner


def intercept_loaders(
    trainer: Trainer, role: Role, change: Callable[[Callable[[], object]], object]
) -> Callable[[], None]:
    """Make a loop use the loaders that ``change`` returns; ``change`` gets the function that makes the loop's own.

    Returns:
        A function that gives the loop its own data source back.
    """
    source: Any = LOOPS[role](trainer)._data_source
    source.dataloader = functools.partial(change, source.dataloader)
    return lambda: vars(source).pop("dataloader", None)


def combine(loaders: object, mode: str, package: ModuleType) -> CombinedLoader:
    """The CombinedLoader that Lightning makes of a loader or a nesting of them; a copy if it is one already."""
    cls: type[CombinedLoader] = importlib.import_module(f"{package.__name__}.utilities.combined_loader").CombinedLoader
    return copy.copy(loaders) if isinstance(loaders, cls) else cls(loaders, mode)  # type: ignore[arg-type]


def mode_of(combined: CombinedLoader) -> str:
    """How several loaders are combined."""
    return combined._mode


def arrange(combined: CombinedLoader | None, items: Iterable[object]) -> Any:
    """One item for each loader, in the nesting of the loaders."""
    assert combined is not None
    return tree_unflatten(items, combined._spec)


def recorded_arguments(made: object) -> set[str] | None:
    """Names of the arguments that Lightning recorded when a hook constructed a loader; None if it recorded none.

    From these it constructs the loader again, with another sampler.
    """
    kwargs = vars(made).get("__pl_saved_kwargs")
    return None if kwargs is None else {*kwargs, *vars(made).get("__pl_saved_arg_names", ())}


def change_recorded_argument(made: object, name: str, value: object) -> None:
    """Change one recorded argument of a loader: Lightning constructs it again with that value."""
    saved = vars(made)
    names = saved.get("__pl_saved_arg_names", ())
    if name in names:
        args = list(saved["__pl_saved_args"])
        args[names.index(name)] = value
        saved["__pl_saved_args"] = tuple(args)
    else:
        saved["__pl_saved_kwargs"] = {**saved["__pl_saved_kwargs"], name: value}


def hyperparameters_of(owner: object) -> list[MutableMapping[str, Any]]:
    """Return what ``save_hyperparameters`` stored, and the copy of it that loggers get; empty if it was not called."""
    both = (getattr(owner, name, None) for name in ("_hparams", "_hparams_initial"))
    return [hparams for hparams in both if hparams is not None]


def set_batch_size(
    module: LightningModule, datamodule: LightningDataModule | None, batch_size: int
) -> Callable[[], None]:
    """Set ``batch_size`` wherever module or datamodule keeps one: attribute, hparams, and the copy that loggers get.

    Returns:
        A function that sets back what still has this size.
    """
    undo = ExitStack()
    for owner in (module, *([] if datamodule is None else [datamodule])):
        before = getattr(owner, "batch_size", None)
        if isinstance(before, int):
            with suppress(AttributeError):  # a property without a setter follows something else
                setattr(owner, "batch_size", batch_size)  # noqa: B010 - neither class declares one
                undo.callback(_set_attribute_back, owner, batch_size, before)
        for hparams in hyperparameters_of(owner):
            if "batch_size" in hparams:
                undo.callback(_set_item_back, hparams, batch_size, hparams["batch_size"])
                hparams["batch_size"] = batch_size
    return undo.close


def _set_attribute_back(owner: object, ours: int, before: int) -> None:
    if getattr(owner, "batch_size", None) == ours:
        setattr(owner, "batch_size", before)  # noqa: B010 - as above


def _set_item_back(hparams: MutableMapping[str, Any], ours: int, before: object) -> None:
    if hparams.get("batch_size") == ours:
        hparams["batch_size"] = before
