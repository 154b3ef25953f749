"""A step of validation or test that runs out of memory, done again in parts of its batch, and their results joined."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_memguard.core.capture.batch import batch_bytes
from lightning_memguard.core.capture.split import even_parts, join, part_of
from lightning_memguard.training.adapter.closure import buffers_were_sent, free, release, samples_in, wrapper_of
from lightning_memguard.training.adapter.logged import Journal, Noted, StepState
from lightning_memguard.training.adapter.same_step import SameStep

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_STEPS = ("validation_step", "test_step")  # of a strategy, which calls the module's


@dataclass(frozen=True)
class EvaluationPolicy:
    """What decides, and what is notified.

    Attributes:
        is_memory: whether an exception says that memory ran out.
        same: how steps are taken in parts.
        allows: why a step must not be, in plain words; empty where it may be.
        rescued: called once a step is done, with the samples of its batch, and of the largest part.
    """

    is_memory: Callable[[BaseException], bool]
    same: Callable[[], SameStep]
    allows: Callable[[], str]
    rescued: Callable[[int, int], None]


class EvaluationGuard:
    """Does steps again in parts where they run out of memory, between `install` and `remove`.

    Attributes:
        refused: why the last step that ran out of memory was not done again.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, policy: EvaluationPolicy) -> None:
        self.refused = ""
        self._trainer: Any = trainer
        self._policy = policy
        self._state = StepState(trainer, module)
        self._too_large_bytes, self._fitting = math.inf, 1.0  # of batches, and the share of them that ran at once

    def install(self) -> None:
        """Guard the steps from now on."""
        strategy = self._trainer.strategy
        for name in _STEPS:
            setattr(strategy, name, partial(self._step, getattr(strategy, name)))

    def remove(self) -> None:
        """Leave the strategy as it was."""
        for name in _STEPS:
            vars(self._trainer.strategy).pop(name, None)

    def _step(self, own: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        if self._too_large_bytes < math.inf and batch_bytes(batch) >= self._too_large_bytes:
            return self._in_parts(own, batch, *rest)
        try:
            noted = self._state.note(self._trainer._results)
        except Exception:  # noqa: BLE001 - the step runs all the same
            return own(batch, *rest)
        try:
            return own(batch, *rest)
        except Exception as error:
            if not self._takes(error, batch, *rest):
                raise
        self._state.put_back(noted)
        buffers_were_sent(wrapper_of(self._trainer))
        free(self._trainer.strategy.root_device)
        self._too_large_bytes = min(self._too_large_bytes, batch_bytes(batch))
        return self._in_parts(own, batch, *rest)

    def _takes(self, error: BaseException, batch: Any, *rest: Any) -> bool:
        if not self._policy.is_memory(error):
            return False
        try:
            self.refused = self._policy.allows() or self._obstacle(batch, *rest)
        except Exception as failure:  # noqa: BLE001 - the user's error is the one to be raised
            self.refused = f"{type(failure).__name__}: {failure}"
        if not self.refused:
            release(error)
        return not self.refused

    def _obstacle(self, batch: Any, _: Any = 0, dataloader_idx: int = 0) -> str:
        same, trainer = self._policy.same(), self._trainer
        if dataloader_idx:
            return "only the step on the first loader's batches was tried in parts"
        samples, cut = samples_in(batch, same.cut)
        if samples < 2:
            return "its batch is a single sample" if samples else "its batch cannot be cut by sample"
        part_of(batch, cut, samples, 0, 1)
        if trainer.world_size > 1 and (wrapper_of(trainer) is None or same.collectives):
            return "it talks to the other ranks"
        return ""

    def _in_parts(self, own: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        same, trainer = self._policy.same(), self._trainer
        samples, cut = samples_in(batch, same.cut)
        journal, outputs, counts = Journal(trainer._results), [], []

        def run(start: int, stop: int, most: int) -> None:
            for first, last in even_parts(start, stop, most):
                part, noted = part_of(batch, cut, samples, first, last), self._state.note(trainer._results)
                journal.begin(part, last - first)
                try:
                    outputs.append(own(part, *rest))
                    counts.append(last - first)
                except Exception as error:
                    self._undo(journal, noted)
                    if last - first == 1 or not self._policy.is_memory(error):
                        raise
                    release(error)
                else:
                    continue
                buffers_were_sent(wrapper_of(trainer))
                free(trainer.strategy.root_device, again=True)
                run(first, last, math.ceil((last - first) / 2))

        try:
            run(0, samples, max(1, int(samples * min(self._fitting, 0.5))))
            journal.end(same.rules)
        finally:
            journal.end()
        self._fitting = max(counts) / samples
        self._policy.rescued(samples, max(counts))
        return join(outputs, counts, same.rules, "output")

    def _undo(self, journal: Journal, noted: Noted) -> None:
        journal.drop()
        self._state.put_back(noted)
