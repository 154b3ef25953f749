"""Memory of the Trainer's other callbacks on the device: averages of the model to come, and tensors they hold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.capture.capture import isolated
from lightning_memguard.core.capture.holders import UsersCode, tensors_of
from lightning_memguard.core.capture.recorder import Recorder, part_bytes
from lightning_memguard.core.objects import tensors_held, users_classes, users_members
from lightning_memguard.core.simulation.constants import suppose
from lightning_memguard.core.simulation.fake import real_copy
from lightning_memguard.core.torch_port import FakeTensor, tree_leaves
from lightning_memguard.core.trace.trace import WORTH_A_NOTE
from lightning_memguard.training.facts import lightning_port as lightning
from lightning_memguard.training.facts.lightning_types import is_a
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.training.facts.run_facts import RunFacts
from lightning_memguard.units import format_bytes

if TYPE_CHECKING:
    from pytorch_lightning import Callback

_PACKAGES = ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks")
# Each keeps one copy of the whole module from its setup on; by name, since older Lightnings lack the first.
_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")
_SCHEDULER = "GradientAccumulationScheduler"
OPTIMIZER = "optimizer_state"


class Average:
    """The average that a callback of Lightning will keep of a module, here of its copy, whose recorder sees it too.

    The callback's settings are read, nothing is changed.
    """

    def __init__(self, callback: Callback, module_copy: nn.Module) -> None:
        self.between_epochs = _averages(callback) == "StochasticWeightAveraging"
        self._callback: Any = callback
        self._module_copy = module_copy
        self._copy = real_copy(module_copy)
        self.tensors = [*self._copy.parameters(), *self._copy.buffers()]

    @torch.no_grad()
    def update(self) -> None:
        """Average as the callback does once it has begun: between epochs, or after each optimizer step."""
        if self.between_epochs:
            lightning.average_between_epochs(self._callback, self._copy, self._module_copy, _Count(1))
            return
        # an AveragedModel would copy the module, and what data it holds, once more
        average = lightning.averaged_model(self._callback, nn.Module())
        average.module = self._copy
        del average.n_averaged
        average.n_averaged = _Count(1)
        average.update_parameters(self._module_copy)


class Pruner:
    """A `ModelPruning` that prunes a copy of the module, whose recorder sees it."""

    def __init__(self, callback: Any, module: nn.Module, module_copy: nn.Module, recorder: Recorder) -> None:
        self._callback = copy.copy(callback)
        paths = {id(each): path for path, each in module.named_modules()}
        pruned = lightning.pruned_parameters(callback)
        named = [(module_copy.get_submodule(paths[id(each)]), name) for each, name in pruned]
        lightning.prune_others(self._callback, named)
        with recorder.paused():
            self._callback.setup(None, module_copy, "fit")  # names all weights if none were named, and may copy them
        for tensor in held_in(vars(self._callback), module_copy):
            recorder.hold(tensor)  # those that the user's callback has were counted

    @torch.no_grad()
    def run(self) -> None:
        """Prune as at the end of the first epoch, and take as many weights for pruned as that prunes."""
        amount = self._callback.amount
        lightning.prune(self._callback, 0)
        for module, name in lightning.pruned_parameters(self._callback):
            mask = getattr(module, f"{name}_mask", None)
            if isinstance(mask, FakeTensor) and isinstance(amount, float):
                suppose(mask, lambda ones: ones.view(-1)[: round(amount * ones.numel())].zero_())


class _Count(int):
    """How many models were averaged: a tensor in Lightning, which could not be read in a copy on fake tensors."""

    def to(self, *_: object) -> int:
        return int(self)


def averages(callbacks: Iterable[Callback], device: torch.device, module_copy: nn.Module) -> list[Average]:
    """The averages that Lightning's callbacks keep on this type of device, each kept of the copy."""
    return [Average(callback, module_copy) for callback in callbacks if _device_type(callback, device) == device.type]


def _averages(callback: Callback) -> str:
    """The averaging class of Lightning that a callback is an instance of; empty for any other."""
    for cls in type(callback).__mro__:
        if cls.__name__ in _AVERAGING and cls.__module__.startswith(_PACKAGES):
            return cls.__name__
    return ""


def _device_type(callback: Any, device: torch.device) -> str:
    """Return the type of the device on which a callback keeps its average; empty if it keeps none."""
    kind = _averages(callback)
    wanted = lightning.average_device(callback) if kind else None
    # None: where the module says that it is, which Lightning sets before `setup` (trainer/call.py), though its
    # parameters are elsewhere until later
    return torch.device(wanted or device).type if kind else ""


def accumulation(facts: RunFacts) -> int:
    """The most batches that are accumulated in any epoch, by the Trainer or a GradientAccumulationScheduler."""
    schedulers: list[Any] = [callback for callback in facts.callbacks if is_a(callback, _SCHEDULER)]
    return int(max([facts.accumulate_grad_batches, *(max(each.scheduling.values()) for each in schedulers)]))


def validates_mid_step(facts: RunFacts, batches_a_step: int) -> bool:
    """Whether a fit may validate between two batches of one optimizer step, while gradients are there.

    At the end of an epoch it may not: the last batch is always followed by a step, and then gradients are cleared.
    """
    every = facts.val_check_interval
    return batches_a_step > 1 and not (isinstance(every, float) and every == 1.0)


def saved_parts(facts: RunFacts, own: Mapping[str, bool]) -> tuple[str, ...]:
    """Name the parts of a training that the checkpoints of a fit hold on this rank; empty if none are saved.

    ``own`` are the user's `hooks_that_save`.
    """
    saving = _saving(facts)
    if facts.stage != "fit" or facts.is_rehearsal or facts.global_rank or not (saving or own):
        return ()
    weights = "parameters", "buffers"
    weights_only = [bool(getattr(each, "save_weights_only", False)) for each in saving]
    return weights if all((*weights_only, *own.values())) else (*weights, OPTIMIZER)


def hooks_that_save(facts: RunFacts, module: nn.Module) -> dict[str, bool]:
    """The user's own methods that save the training as a fit runs, by name, and whether they save weights only.

    That is a checkpoint, or what they write to a buffer in memory; ``torch.save`` to a file needs none.
    """
    found: dict[str, bool] = {}
    for owner in (module, *facts.callbacks):
        code = UsersCode(owner)
        for hook in [each for each in users_members(type(owner)) if each.startswith("on_") or each.endswith("_step")]:
            names = code.names(hook)
            if names >= _TO_MEMORY:
                found[f"{type(owner).__name__}.{hook}"] = not any("optimizer" in each for each in names)
            elif "save_checkpoint" in names:
                constants = tree_leaves([each.__code__.co_consts for each in code.called_by(hook)])
                found[f"{type(owner).__name__}.{hook}"] = "weights_only" in constants
    return found


_TO_MEMORY = {"BytesIO", "save", "state_dict"}


def unsaved_bytes(module: nn.Module, datamodule: object = None) -> tuple[int, int]:
    """Bytes of a module that are not in its checkpoint, and bytes that a hook makes for it alone.

    The first are of tensors that it does not register, or that are not persistent; below 0 if it saves more than it
    holds, as hyperparameters of its datamodule. What the user's own code decides (an override of ``state_dict``, a
    hook) is asked in a child. 0 if it raises.
    """
    held = tensors_of(module)
    held += [each for each in tree_leaves(dict(getattr(module, "hparams", {}))) if isinstance(each, torch.Tensor)]
    data = [*held_in(getattr(datamodule, "hparams", None))]

    def saved() -> tuple[int, int]:
        content: dict[str, Any] = {"state_dict": module.state_dict(), "hparams": dict(getattr(module, "hparams", {}))}
        module.on_save_checkpoint(content)  # type: ignore[operator]
        found = [*tree_leaves(content)]
        found += [
            each for leaf in found if isinstance(leaf, nn.Module) for each in (*leaf.parameters(), *leaf.buffers())
        ]
        tensors = [*data, *(each for each in found if isinstance(each, torch.Tensor))]
        own, both = (part_bytes({"": [*held, *data, *more]}, "cpu")[""] for more in ((), tensors))
        return part_bytes({"": tensors}, "cpu")[""], both - own

    classes = {cls for each in module.modules() for cls in users_classes(type(each))}
    is_plain = not any(name in vars(cls) for cls in classes for name in _DECIDES)
    is_plain &= not any(map(port.has_state_dict_hooks, module.modules()))
    found = attempt(saved if is_plain else lambda: isolated(saved)).value
    return (part_bytes({"": held}, "cpu")[""] - found[0], found[1]) if found else (0, 0)


def notes_on_hyperparameters(*owners: object) -> tuple[str, ...]:
    """Name the hyperparameters that hold tensors worth a note: each checkpoint of a fit holds them, too."""
    notes = []
    for owner in owners:
        hparams = getattr(owner, "hparams", None)
        nbytes = _tensor_bytes(hparams)
        if isinstance(hparams, dict) and nbytes >= WORTH_A_NOTE:
            name = max(hparams, key=lambda each: _tensor_bytes(hparams[each]))
            notes.append(
                f"each checkpoint holds {format_bytes(nbytes)} of hyperparameters of {type(owner).__name__}: "
                f'`self.save_hyperparameters(ignore=["{name}"])` leaves out the most'
            )
    return tuple(notes)


def _tensor_bytes(thing: object) -> int:
    return part_bytes({"": [*held_in(thing)]}, "cpu")[""]


_DECIDES = ("state_dict", "on_save_checkpoint", "get_extra_state", "_save_to_state_dict")


def _saving(facts: RunFacts) -> list[Any]:
    checkpoints: list[Any] = [callback for callback in facts.callbacks if is_a(callback, "Checkpoint")]
    return [each for each in checkpoints if getattr(each, "save_top_k", 1) or getattr(each, "save_last", False)]


def copies_saved(facts: RunFacts) -> int:
    """How many copies of its tensors a thread that writes checkpoints is given at once; 0 if none writes them."""
    if not is_a(getattr(facts.strategy, "checkpoint_io", None), "AsyncCheckpointIO"):
        return 0
    files = ((getattr(each, "save_top_k", 1) != 0, getattr(each, "save_last", None) is True) for each in _saving(facts))
    return sum(map(sum, files))


def schedules_accumulation(callbacks: Iterable[Callback]) -> bool:
    """Whether a callback sets the accumulation by epoch, so that nothing else may."""
    return any(is_a(callback, _SCHEDULER) for callback in callbacks)


def learning_rates_tried(callbacks: Iterable[Callback]) -> int:
    """How many learning rates a callback of Lightning, or ``Tuner.lr_find``, will try: one a step; 0 without."""
    finders: list[Any] = [callback for callback in callbacks if is_a(callback, "LearningRateFinder")]
    return max(map(lightning.rates_of, finders), default=0)


def held_bytes(callbacks: Iterable[Callback], module: nn.Module, device: torch.device, *, averaging: bool) -> int:
    """Bytes of tensors that other callbacks hold on this type of device now, without the module's own.

    ``averaging`` counts those of Lightning's averaging callbacks too.
    """
    own = [*module.parameters(), *module.buffers()]
    counted = (callback for callback in callbacks if averaging or not _averages(callback))
    held = held_in([vars(callback) for callback in counted], module)
    return part_bytes({"own": own, "held": held}, device.type)["held"]


def held_in(thing: object, *but: nn.Module) -> Iterator[torch.Tensor]:
    """Return the tensors that an object holds, without scores and counters, and without those of some modules."""
    return (each for each in tensors_held(thing, but=but) if each.dim())


# -- parameters that are trained later

_LATER_HOOKS = (
    *("on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end"),
    *("on_validation_epoch_end", "on_validation_end"),
    *("on_sanity_check_start", "on_sanity_check_end", "on_train_start"),
)
_COMPUTES = (
    *("no_grad", "inference_mode", "eval", "backward", "deepcopy", "forward", "predict_step", "topk", "sample"),
    *("cat", "concat", "stack", "vstack", "hstack"),  # which join what was collected
    *("rand", "randn", "zeros", "ones", "empty", "full", "tensor", "from_numpy"),
    "BytesIO",  # which it may save to
)
_UNFREEZES = ("requires_grad", "requires_grad_", "unfreeze")


def may_unfreeze(callbacks: Iterable[object], module: nn.Module, max_epochs: int | None) -> bool:
    """Whether a hook of the run may let parameters be trained that are frozen in its first steps."""
    if max_epochs == 1:
        return False
    if any(is_a(callback, "BaseFinetuning") for callback in callbacks):
        return True
    is_frozen = any(not parameter.requires_grad for parameter in module.parameters())
    codes = map(UsersCode, (module, *callbacks))
    names = (name for code in codes for hook in _LATER_HOOKS for name in code.names(hook))
    return is_frozen and any(name in _UNFREEZES or name.startswith("unfreeze") for name in names)


def notes_on_profiler(profiler: object) -> tuple[str, ...]:
    """Say that a profiler of the Trainer takes memory of its own."""
    if not is_a(profiler, "PyTorchProfiler"):
        return ()
    return ("what PyTorchProfiler records is not included: without a schedule, each operator of the run",)


def hooks_that_compute(callbacks: Iterable[object], but: Callable[[object, str], bool] = lambda *_: False) -> list[str]:
    """Hooks of callbacks outside Lightning that run a model, copy one or make tensors while a fit lasts, by name.

    ``but`` tells which are predicted.
    """
    return [
        f"{type(callback).__name__}.{hook}"
        for callback in callbacks
        for hook in _LATER_HOOKS
        if not UsersCode(callback).names(hook).isdisjoint(_COMPUTES) and not but(callback, hook)
    ]


def unfreeze(module_copy: Any) -> None:
    """Train all parameters of a copy, even those that its optimizers are not given."""
    module_copy.requires_grad_(True)
    configure = module_copy.configure_optimizers

    def configure_all() -> Any:
        configured = configure()
        optimizers = [leaf for leaf in tree_leaves(configured) if isinstance(leaf, Optimizer)]
        held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        missing = [p for p in module_copy.parameters() if id(p) not in held]
        if optimizers and missing:
            optimizers[0].add_param_group({"params": missing})
        return configured

    module_copy.configure_optimizers = configure_all
