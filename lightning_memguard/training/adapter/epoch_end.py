"""The module's own hook at the end of an epoch, run on its copy with what a whole epoch leaves in its lists.

Only the first batches ran; what the others would have appended is the last entry again, which takes no memory here: it
was counted before.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_memguard.core.capture.holders import users_classes
from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.core.foreign import patched
from lightning_memguard.training.facts.lightning_types import lightning_of

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_MOST_BATCHES = 1 << 14  # a hook that goes through more of them one by one would take long
COPIES = 2  # of what is kept, at most, if the hook cannot be run: joined, and computed with


class Lists:
    """Lists of a module that grow by each batch: attributes, and lists in dictionaries that are attributes."""

    def __init__(self, module: nn.Module) -> None:
        self._before = {id(each): len(each) for each in _lists_of(module)}

    def fill(self, module: nn.Module, batches: int, in_all: int) -> None:
        """Repeat what the last of ``batches`` appended, as if there had been ``in_all``."""
        for each in [*_lists_of(module)] if batches else []:
            grown = len(each) - self._before.get(id(each), 0)
            if grown > 0 and grown % batches == 0:
                each.extend(each[-(grown // batches) :] * max(0, in_all - batches))


def _lists_of(module: nn.Module) -> Iterator[list[Any]]:
    for owner in module.modules():
        for value in [*vars(owner).values()]:
            for each in [value, *value.values()] if isinstance(value, dict) else [value]:
                if type(each) is list:
                    yield each


def has_own(owner: object, hook: str) -> bool:
    """Whether the user's code has this hook."""
    return any(hook in vars(cls) for cls in users_classes(type(owner)))


def run_hook(
    trainer: Trainer, module: LightningModule, hook: str, recorder: Recorder, lists: Lists, batches: int, in_all: int
) -> None:
    """Run a hook at the end of an evaluation, as Lightning calls it; if it raises, count copies of what is kept."""
    if not has_own(module, hook):
        return
    call = importlib.import_module(f"{lightning_of(module).__name__}.trainer.call")
    name, kept = f"{type(module).__name__}.{hook}", recorder.alive_bytes
    try:
        if in_all > _MOST_BATCHES:
            raise OverflowError(f"{in_all} batches")  # noqa: TRY301
        lists.fill(module, batches, in_all)
        with patched(recorder, module=name):
            call._call_lightning_module_hook(trainer, hook, pl_module=module)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything, and often needs values here
        why = str(error).strip().partition("\n")[0][:120] or type(error).__name__
        recorder.assumptions[f"{name} was not run on a copy ({why}): at most, it copies what the epoch left"] = None
        recorder.expect(COPIES * max(0, kept), "activations", at_most=True)
