"""Lightning's private names, and those that moved between its versions, each behind a function that says what it means.

Nothing of either Lightning package is imported until a function needs it. `tests/training/facts/test_lightning_port.py`
states what each function has to return. Checked on Lightning 2.5.0 up to `foreign.NEWEST_TESTED`, Fabric's on 2.6.6.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.optim.swa_utils import AveragedModel
from torch.utils.data import BatchSampler, DataLoader

from lightning_memguard.training.facts.lightning_types import lightning_of

if TYPE_CHECKING:
    from lightning_fabric.strategies.fsdp import FSDPStrategy
    from pytorch_lightning import LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.callbacks import (
        LearningRateFinder,
        ModelPruning,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
    from pytorch_lightning.utilities import CombinedLoader
    from torch import nn

# -- a Trainer's settings


def detects_anomaly(trainer: Trainer) -> bool:
    """Read whether autograd looks for anomalies."""
    return trainer._detect_anomaly


def divides_samples(trainer: Trainer) -> bool:
    """Read whether the samples of loaders are divided among the ranks."""
    return trainer._accelerator_connector.use_distributed_sampler


def check_interval(trainer: Trainer) -> int | float | None:
    """Read the interval of validation in batches or as a share of an epoch; None if it is a time.

    Lightning 2.6 then sets no such attribute.
    """
    return getattr(trainer, "val_check_interval", None)


def data_source(loop: Any) -> Any:
    """Find where a loop gets its loaders; ``instance`` and ``name`` are an object and its hook."""
    return loop._data_source


def intercept_loaders(loop: Any, change: Callable[[Callable[[], object]], object]) -> Callable[[], None]:
    """Make a loop use the loaders that ``change`` returns; ``change`` gets the function that makes the loop's own.

    Returns:
        A function that gives the loop its own data source back.
    """
    source = data_source(loop)
    source.dataloader = functools.partial(change, source.dataloader)
    return lambda: vars(source).pop("dataloader", None)


def stage_named(name: str, package: ModuleType) -> Any:
    """Make the stage that Lightning passes to ``setup``; it is a string with a value of its own."""
    return importlib.import_module(f"{package.__name__}.trainer.states").TrainerFn(name)


def log_dir_of(trainer: Trainer) -> Any:
    """Read ``trainer.log_dir`` without asking the other ranks."""
    alone = SimpleNamespace(broadcast=lambda folder: folder)
    read: Any = inspect.getattr_static(type(trainer), "log_dir").fget
    return read(SimpleNamespace(loggers=trainer.loggers, default_root_dir=trainer.default_root_dir, strategy=alone))


# -- a Trainer's loops


def logging_step(trainer: Trainer) -> int:
    """Find the step that ``self.log`` writes an epoch's metrics at, so that all curves share one axis.

    Lightning counts one less while it logs them, to stay on the epoch's last step.
    """
    return max(0, int(trainer.fit_loop.epoch_loop._batches_that_stepped) - 1)


def logged_values(trainer: Trainer) -> Any:
    """Find what ``self.log`` has collected in a fit, by its keys; ``batch`` is the last one."""
    return trainer.fit_loop.epoch_loop._results


def accumulates(trainer: Trainer) -> bool:
    """Know whether a batch that runs leaves its step to a later one."""
    return trainer.fit_loop._should_accumulate()


def call_module_hook(trainer: Trainer, module: LightningModule, hook: str) -> Any:
    """Call a module's hook as the loops do, in the place where ``self.log`` expects to be called."""
    call = importlib.import_module(f"{lightning_of(module).__name__}.trainer.call")
    return call._call_lightning_module_hook(trainer, hook, pl_module=module)


def leave_numbers(trainer: Trainer) -> None:
    """Keep a fit from turning what it logs into numbers, which needs values."""
    kind = type(trainer._logger_connector)
    trainer._logger_connector.__class__ = type("QuietConnector", (kind,), {"should_update_logs": False})


def leave_numbers_of_epochs(trainer: Trainer) -> None:
    """Keep an evaluation from turning what it logs into numbers, at the end of each loader."""
    trainer._logger_connector.update_eval_epoch_metrics = dict  # type: ignore[method-assign]


def count_batches_as(trainer: Trainer, counted: Callable[[int], int]) -> None:
    """Let a fit pass another index of its batch; ``counted`` gets its own."""
    loop = trainer.fit_loop.epoch_loop
    index = property(lambda loop: counted(loop.batch_progress.current.ready - 1))
    loop.__class__ = type("CountedLoop", (type(loop),), {"batch_idx": index})


def ask_no_rank(trainer: Trainer) -> None:
    """Keep a fit from asking the other ranks at each batch whether a signal ends it; since Lightning 2.6."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def use_strategy(trainer: Trainer, strategy: object) -> None:
    """Give a Trainer that is made another strategy."""
    trainer._accelerator_connector.strategy = strategy


def use_hooks_of(trainer: Trainer, datamodule: LightningDataModule) -> None:
    """Move batches with the hooks of a datamodule that was not passed to a run."""
    selector = trainer._data_connector._datahook_selector
    if selector is not None:
        selector.datamodule = datamodule


def epochs_saved(checkpoint: Mapping[str, Any]) -> int:
    """Count the epochs that were over when a checkpoint was saved."""
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {})
    return int(progress.get("current", {}).get("completed", 0))


# -- loaders


@contextmanager
def recording_loaders(owner: LightningModule | LightningDataModule) -> Iterator[None]:
    """Let Lightning record how loaders are constructed, as it does while it calls ``train_dataloader``."""
    record = importlib.import_module(
        f"{lightning_of(owner).__name__}.trainer.connectors.data_connector"
    )._replace_dunder_methods
    with preserve_loader_classes(), record(DataLoader, "dataset"), record(BatchSampler):
        yield


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


_PATCHED = [f"__{old}{name}__" for old in ("", "old__") for name in ("init", "setattr", "delattr")]


def _with_subclasses(cls: type[Any]) -> list[type[Any]]:
    return [cls, *(below for each in cls.__subclasses__() for below in _with_subclasses(each))]


def recorded_arguments(made: object) -> set[str] | None:
    """Name the arguments that Lightning recorded when a hook constructed a loader; None if it recorded none.

    From these it constructs the loader again, with another sampler.
    """
    kwargs = vars(made).get("__pl_saved_kwargs")
    return None if kwargs is None else {*kwargs, *vars(made).get("__pl_saved_arg_names", ())}


def change_recorded_argument(made: object, name: str, value: object) -> None:
    """Change one recorded argument of a loader; Lightning constructs it again with that value."""
    saved = vars(made)
    names = saved.get("__pl_saved_arg_names", ())
    if name in names:
        args = list(saved["__pl_saved_args"])
        args[names.index(name)] = value
        saved["__pl_saved_args"] = tuple(args)
    else:
        saved["__pl_saved_kwargs"] = {**saved["__pl_saved_kwargs"], name: value}


def combine(loaders: object, mode: str, package: ModuleType) -> CombinedLoader:
    """Make of a loader or a nesting of them the CombinedLoader that Lightning makes; a copy if it is one already."""
    cls: type[CombinedLoader] = importlib.import_module(f"{package.__name__}.utilities.combined_loader").CombinedLoader
    return copy.copy(loaders) if isinstance(loaders, cls) else cls(loaders, mode)  # type: ignore[arg-type]


def mode_of(combined: CombinedLoader) -> str:
    """Read how several loaders are combined."""
    return combined._mode


def arrange(combined: CombinedLoader | None, items: Iterable[object]) -> Any:
    """Put one item for each loader in the nesting of the loaders."""
    from lightning_memguard.core.torch_port import tree_unflatten  # `MemGuard` imports this file, and not that one

    assert combined is not None
    return tree_unflatten(items, combined._spec)


# -- modules


HYPERPARAMETERS, HYPERPARAMETERS_LOGGED = "_hparams", "_hparams_initial"
"""Attributes in which ``save_hyperparameters`` stores, and the copy of that which loggers get."""


def hyperparameters_of(owner: object) -> list[MutableMapping[str, Any]]:
    """Find what ``save_hyperparameters`` stored, and the copy of it that loggers get; empty if it was not called."""
    both = (getattr(owner, name, None) for name in (HYPERPARAMETERS, HYPERPARAMETERS_LOGGED))
    return [hparams for hparams in both if hparams is not None]


def batch_sizes_of(owner: object) -> list[object]:
    """Find each ``batch_size`` that an object keeps; attribute, hparams, and the copy that loggers get."""
    return [getattr(owner, "batch_size", None), *(each.get("batch_size") for each in hyperparameters_of(owner))]


def copy_hyperparameters(owner: object) -> None:
    """Give an object its own copies of the hyperparameters that it shares with the one that it was copied from."""
    for name in (HYPERPARAMETERS, HYPERPARAMETERS_LOGGED):
        if name in vars(owner):
            vars(owner)[name] = copy.copy(vars(owner)[name])


def set_batch_size(
    module: LightningModule, datamodule: LightningDataModule | None, batch_size: int
) -> Callable[[], None]:
    """Set ``batch_size`` wherever module or datamodule keeps one; see `batch_sizes_of`.

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


def mesh_of(module: object) -> object:
    """Find the device mesh that a strategy has given a module; None if it has given none."""
    return getattr(module, "_device_mesh", None)


def optimizers_of_cli(module: object) -> functools.partial[Any] | None:
    """Find the function with which LightningCLI has replaced ``configure_optimizers``; None if it has not."""
    found = getattr(vars(module).get("configure_optimizers"), "__func__", None)
    return found if isinstance(found, functools.partial) else None


# -- callbacks and loggers


def average_device(callback: WeightAveraging | StochasticWeightAveraging) -> Any:
    """Find the device on which an averaging callback keeps its average; None if that is the module's."""
    return callback._device


def average_between_epochs(
    callback: StochasticWeightAveraging, average: nn.Module, module: nn.Module, count: int
) -> None:
    """Average weights as StochasticWeightAveraging does between epochs."""
    callback.update_parameters(average, module, count, callback._avg_fn)  # type: ignore[arg-type]


def averaged_model(callback: WeightAveraging, empty: nn.Module) -> Any:
    """Make the averaged model of WeightAveraging; ``empty`` is put in the place of the module."""
    return AveragedModel(empty, use_buffers=callback._use_buffers, **callback._kwargs)


def pruned_parameters(callback: ModelPruning) -> Sequence[tuple[nn.Module, str]]:
    """Find the parameters that ModelPruning prunes, each with its module."""
    return callback._parameters_to_prune


def prune_others(callback: ModelPruning, parameters: Sequence[tuple[nn.Module, str]]) -> None:
    """Make ModelPruning prune other parameters, and say nothing."""
    vars(callback).update(_parameters_to_prune=parameters, _verbose=0)


def prune(callback: ModelPruning, epoch: int) -> None:
    """Prune as ModelPruning does at the end of an epoch."""
    callback._run_pruning(epoch)


def rates_of(finder: LearningRateFinder) -> int:
    """Count the learning rates that LearningRateFinder tries."""
    return int(finder._num_training_steps)


def experiment_of(logger: object) -> Any:
    """Find a logger's experiment without making it."""
    return vars(logger).get("_experiment")


# -- strategies


def optimizers_of(strategy: object) -> dict[str, Any]:
    """Find what a strategy knows of its optimizers, by attribute."""
    return {name: value for name, value in vars(strategy).items() if name in _OPTIMIZERS}


def as_before_setup(strategy: object) -> dict[str, Any]:
    """Name what a setup has set in a strategy, as it is before that."""
    before: dict[str, Any] = {**dict.fromkeys(_SET_UP), **{name: [] for name in _OPTIMIZERS}}
    return {name: value for name, value in before.items() if name in vars(strategy)}


_OPTIMIZERS = ("_optimizers", "_lightning_optimizers", "lr_scheduler_configs")
_SET_UP = ("_lightning_module", "_model", "_launcher", "_device_mesh")


def tensor_ranks(strategy: ModelParallelStrategy) -> int | str:
    """Read how many ranks share each tensor; ``"auto"`` for all of a node."""
    return strategy._tensor_parallel_size


def mesh_dimensions(strategy: ModelParallelStrategy) -> int:
    """Count the dimensions of a mesh that have several ranks."""
    return (strategy._data_parallel_size != 1) + (strategy._tensor_parallel_size != 1)


def saves_shards(strategy: object) -> bool:
    """Read whether each rank of FSDP, or of a mesh, writes its own part of a checkpoint."""
    sharded = getattr(strategy, "_state_dict_type", "") == "sharded"
    return sharded or bool(getattr(strategy, "_save_distributed_checkpoint", False))


def ddp_arguments(strategy: DDPStrategy) -> Mapping[str, Any]:
    """Read the arguments that a strategy passes to DistributedDataParallel."""
    return strategy._ddp_kwargs


def with_ddp_arguments(strategy: DDPStrategy, **more: object) -> Any:
    """Copy a strategy, with other arguments for DistributedDataParallel."""
    other = copy.copy(strategy)
    other._ddp_kwargs = {**other._ddp_kwargs, **more}
    return other


def ddp_hook(strategy: object) -> Any:
    """Find the communication hook of DDPStrategy, or the wrapper around it; None without, as Fabric's always is."""
    return getattr(strategy, "_ddp_comm_wrapper", None) or getattr(strategy, "_ddp_comm_hook", None)


def syncs_batch_norm(strategy: DDPStrategy) -> bool:
    """Read whether batch norm is replaced by one that gathers statistics of all ranks."""
    return strategy._layer_sync is not None


class TellsWrapped:
    """Part of a strategy that shards; ``start`` is called with what FSDP has wrapped."""

    start: Callable[[Any], None]

    def _setup_model(self, model: nn.Module) -> nn.Module:
        wrapped: nn.Module = super()._setup_model(model)  # type: ignore[misc]
        self.start(wrapped)
        return wrapped


class TellsOptimizer:
    """Part of DeepSpeedStrategy; ``optimizer_made`` is called with the optimizer that will be given to the engine."""

    optimizer_made: Callable[[Any], None]

    def _init_optimizers(self) -> Any:
        optimizer, scheduler = super()._init_optimizers()  # type: ignore[misc]
        self.optimizer_made(optimizer)
        return optimizer, scheduler


def completes_again(strategy: DeepSpeedStrategy) -> bool:
    """Let DeepSpeedStrategy complete its configuration again; return whether it had done so."""
    had = strategy._config_initialized
    strategy._config_initialized = False
    return bool(had)


# -- Fabric


def fabric_module(package: str, module: nn.Module, strategy: object, original: nn.Module) -> Any:
    """Wrap a module as ``Fabric.setup`` does; its loss may be followed back without ``fabric.backward``."""
    wrapped: Any = importlib.import_module(f"{package}.wrappers")._FabricModule(
        module, strategy, original_module=original
    )
    wrapped._register_backward_hook = lambda tensor: tensor
    return wrapped


def inside_fabric_module(wrapped: Any) -> Any:
    """Find the module that Fabric's strategy has wrapped or sharded."""
    return wrapped._forward_module


def change_fsdp_arguments(strategy: FSDPStrategy, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Change the arguments that Fabric's FSDPStrategy passes to FSDP."""
    strategy._fsdp_kwargs = change(strategy._fsdp_kwargs)


PARTS = {"logging_step": ("logging",)}
"""The runs that need a function, if not every one."""
