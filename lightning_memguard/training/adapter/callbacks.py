"""What the Trainer's other callbacks have on the device: copies of the model to come, and tensors they hold by now.

Private names of Lightning are read here as in `lightning_memguard.training.adapter.program`. Checked on 2.5.0 to 2.6.6.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_memguard.core.capture.fake import real_copy
from lightning_memguard.core.capture.recorder import part_bytes
from lightning_memguard.training.adapter.lightning_types import is_a

_PACKAGES = ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks")
# Each keeps one copy of the whole module from its setup on; by name, since older Lightnings lack the first.
_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")
_DEPTH = 4  # of containers within a callback


class Average:
    """The average that a callback of Lightning's will keep of a module, kept of the module's copy instead.

    Args:
        callback: the user's; its settings are read, nothing is changed.
        copy: on its device, and watched: the average's bytes are seen as they are taken.
    """

    def __init__(self, callback: Any, module_copy: nn.Module) -> None:
        self.between_epochs = _averages(callback) == "StochasticWeightAveraging"
        self._callback = callback
        self._module_copy = module_copy
        self._copy = real_copy(module_copy)
        self.tensors = [*self._copy.parameters(), *self._copy.buffers()]

    @torch.no_grad()
    def update(self) -> None:
        """What the callback does once it has begun to average: between epochs, or after each optimizer step."""
        if self.between_epochs:
            self._callback.update_parameters(self._copy, self._module_copy, _Count(1), self._callback._avg_fn)
            return
        # an AveragedModel would copy the module, and what data it holds, once more
        average: Any = AveragedModel(nn.Module(), use_buffers=self._callback._use_buffers, **self._callback._kwargs)
        average.module = self._copy
        del average.n_averaged
        average.n_averaged = _Count(1)
        average.update_parameters(self._module_copy)


class _Count(int):
    """How many models were averaged so far: a tensor there, which a copy on fake tensors could not read."""

    def to(self, *_: object) -> int:
        return int(self)


def averages(trainer: Any, device: torch.device, module_copy: nn.Module) -> list[Average]:
    """The averages that Lightning's callbacks keep on this type of device, each kept of the copy."""
    return [Average(callback, module_copy) for callback in trainer.callbacks if _where(callback, device) == device.type]


def _averages(callback: Any) -> str:
    """The averaging class of Lightning that a callback is one of; empty for any other."""
    for cls in type(callback).__mro__:
        if cls.__name__ in _AVERAGING and cls.__module__.startswith(_PACKAGES):
            return cls.__name__
    return ""


def _where(callback: Any, device: torch.device) -> str:
    kind = _averages(callback)
    if not kind:
        return ""
    wanted = callback._device  # None: where the module is, at setup or once averaging starts
    if wanted is None:
        return "cpu" if kind == "WeightAveraging" else device.type
    return torch.device(wanted).type


def accumulation(trainer: Any) -> int:
    """The most batches that are accumulated in any epoch, by the Trainer or a GradientAccumulationScheduler."""
    planned = [max(callback.scheduling.values()) for callback in _schedulers(trainer)]
    return int(max([trainer.accumulate_grad_batches, *planned]))


def validates_mid_step(trainer: Any, batches_a_step: int) -> bool:
    """Whether a fit may validate between two batches of one optimizer step, so that gradients stand beside it.

    At the end of an epoch it may not: the last batch is always followed by a step, and then gradients are cleared.
    """
    every = trainer.val_check_interval
    return batches_a_step > 1 and not (isinstance(every, float) and every == 1.0)


def schedules_accumulation(trainer: Any) -> bool:
    """Whether a callback sets the accumulation by epoch, so that nobody else may."""
    return bool(_schedulers(trainer))


def _schedulers(trainer: Any) -> list[Any]:
    return [callback for callback in trainer.callbacks if is_a(callback, "GradientAccumulationScheduler")]


def held_bytes(trainer: Any, module: nn.Module, device: torch.device, *, averaging: bool) -> int:
    """Bytes of tensors that other callbacks hold on this type of device now, the module's own left out.

    Args:
        trainer: whose callbacks.
        module: the module that trains.
        device: where it will.
        averaging: count those of Lightning's averaging callbacks too.
    """
    own = {"own": [*module.parameters(), *module.buffers()]}
    seen = {id(trainer), id(module)}
    held = [
        tensor
        for callback in trainer.callbacks
        if averaging or not _averages(callback)
        for tensor in _tensors(vars(callback), _DEPTH, seen)
    ]
    return part_bytes({**own, "held": held}, device.type)["held"]


def _tensors(thing: Any, depth: int, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(thing) in seen or depth < 0:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield from [thing] if thing.dim() else []  # a score or a counter is nobody's memory
    elif isinstance(thing, nn.Module):
        yield from (*thing.parameters(), *thing.buffers())
    elif isinstance(thing, dict):
        for value in list(thing.values()):
            yield from _tensors(value, depth - 1, seen)
    elif isinstance(thing, (list, tuple, set)):
        for value in list(thing):
            yield from _tensors(value, depth - 1, seen)
    elif depth and type(thing).__module__.partition(".")[0] not in _NOT_LOOKED_INTO:
        yield from _tensors(getattr(thing, "__dict__", None), depth - 1, seen)


# Trainers, loops, progress bars and loggers lead everywhere.
_NOT_LOOKED_INTO = {
    "builtins",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "torch",
    "rich",
    "lightning_memguard",
}
