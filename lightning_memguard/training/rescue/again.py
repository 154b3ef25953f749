"""A step that runs out of memory -> the same step in parts of its batch, or its error with a note that says why not.

Training steps are guarded inside of the closure that Lightning passes to the optimizer: it runs ``training_step``,
``zero_grad`` and the backward pass, so everything around it (clipping, scaling, the step, the hooks) happens once.
Steps of validation and test are guarded where the strategy calls them.

A failed attempt's gradients are undone without a copy made in advance. If the batch is the first to accumulate, they
are cleared again. Later in an accumulation, autograd has added a parameter's gradient as a whole or not at all
(AccumulateGrad runs once for each parameter): those that have theirs keep it, and the parts compute the others.

Private names of Lightning were checked on 2.5.0 to 2.6.6.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_memguard.core.batch.nesting import batch_bytes
from lightning_memguard.core.foreign import reason_of
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.facts.lightning_types import is_a, lightning_of
from lightning_memguard.training.rescue.cut import Cut, cuts_for, part_of
from lightning_memguard.training.rescue.memory import free, ran_out_of_memory, release
from lightning_memguard.training.rescue.other_ranks import (
    Gradients,
    OtherRanks,
    clears_otherwise,
    hooks_once,
    without_gradients,
)
from lightning_memguard.training.rescue.parts import Passes, Step
from lightning_memguard.training.rescue.policy import Policy, Samples
from lightning_memguard.training.rescue.sample_layout import Refused
from lightning_memguard.training.rescue.sizes import plain
from lightning_memguard.training.rescue.state import Noted, StepState

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

_EVALUATIONS = ("validation_step", "test_step")  # of a strategy, which calls the module's


class TrainingStep(Step):
    """A step of automatic optimization."""

    def __init__(self, again: TrainingAgain, closure: Any, gradients: Gradients | None) -> None:
        self.kwargs, self.optimizer, self.batch_idx = closure.call
        super().__init__(again, self.kwargs.get("batch"), self.batch_idx)
        self.again: TrainingAgain = again
        self.closure = self.ran = closure
        self.gradients = gradients  # before it, if it accumulates
        self.begun: Gradients | None = None  # before the backward pass that runs
        self.zeroed = self.had_hooks = False
        self.theirs: set[torch.Tensor] = set()  # parameters that have the gradient of the samples that run

    def obstacle(self, error: BaseException | None) -> str:  # noqa: D102
        if error is not None:
            raised_in = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
            self.had_hooks = getattr(self.closure._backward_fn, "__code__", None) in raised_in
            self.zeroed = self.had_hooks or getattr(self.closure._zero_grad_fn, "__code__", None) in raised_in
            self.theirs = self.gradients.written() if self.gradients else set()
        if "batch" not in self.kwargs:
            return "its training_step takes an iterator instead of a batch"
        if any(is_a(optimizer, "LBFGS") for optimizer in self.again.trainer.optimizers):
            return "LBFGS takes several passes a step, and its search would see their rounding"
        if self.zeroed and clears_otherwise(self.again.module):
            return "its optimizer_zero_grad, which has run, may do more than clear gradients"
        if error is not None:
            return self.again.ranks.obstacle(in_backward=self.had_hooks)
        return self.again.ranks.obstacle_of_strategy()

    def before_parts(self) -> None:
        """Clear the gradients, as the step would have; hooks are called once."""
        zero, module = self.closure._zero_grad_fn, self.again.trainer.lightning_module
        self.noted.put_back()
        if zero is not None and self.zeroed:
            module.optimizer_zero_grad(self.again.trainer.current_epoch, self.batch_idx, self.optimizer)
        elif zero is not None:
            zero()
        elif not self.failed and self.gradients is not None:
            self.gradients.keep()
        self.zeroed = True
        self.noted = self.again.note(self.batch, draws=True)  # with what the hooks have changed

    def before_whole(self) -> None:
        """Put back what accumulated before."""
        if self.gradients is not None:
            self.gradients.put_back()

    def forward(self, batch: object, *, final: bool, is_last: bool) -> Any:  # noqa: D102
        self.begun = None
        kwargs = type(self.kwargs)(self.kwargs)
        kwargs["batch"] = batch
        self.ran = self.again.make(kwargs, self.optimizer, self.batch_idx)
        with torch.enable_grad(), self.again.ranks.alone(final and is_last), self.logging(wanted=final and is_last):
            return self.ran._step_fn()

    def losses(self, result: Any) -> list[torch.Tensor]:  # noqa: D102
        return [] if result.closure_loss is None else [result.closure_loss]

    def outputs(self, result: Any) -> Any:  # noqa: D102
        self.result = result
        return result.extra

    def backward(self, result: Any, share: float, *, is_last: bool) -> None:  # noqa: D102
        if self.ran._backward_fn is None or result.closure_loss is None:
            return
        self.begun = Gradients(self.again.parameters)
        with ExitStack() as around:
            around.enter_context(torch.enable_grad())
            around.enter_context(hooks_once(self.again.calls, share, is_last=is_last, again=self.had_hooks))
            around.enter_context(without_gradients(self.theirs))
            around.enter_context(self.again.ranks.alone(is_last))
            around.enter_context(self.again.ranks.sending())
            self.ran._backward_fn(result.closure_loss * share)
        result.closure_loss = None

    @contextlib.contextmanager
    def smaller(self, start: int, stop: int) -> Iterator[int]:
        """Parameters that got the gradient of all these samples keep it; smaller parts compute the others'."""
        written, before = self.begun.written() if self.begun else set(), self.theirs
        self.theirs = before | written
        try:
            with super().smaller(start, stop) as most:
                yield most
        finally:
            self.theirs = before

    def finished(self) -> Any:  # noqa: D102
        self.result.closure_loss = None
        self.result.extra = self.passes.result()
        self.again.state.replace_numbers(plain)
        return self.result


class EvaluationStep(Step):
    """A step of validation or test."""

    def __init__(self, again: Again, own: Callable[..., Any], batch: object, rest: tuple[Any, ...]) -> None:
        super().__init__(again, batch, int(rest[0]) if rest else 0)
        self.again: Again = again
        self.own, self.rest = own, rest

    def obstacle(self, error: BaseException | None) -> str:  # noqa: ARG002, D102
        return self.again.ranks.obstacle(in_backward=False)

    def forward(self, batch: object, *, final: bool, is_last: bool) -> Any:  # noqa: D102
        with self.logging(wanted=final and is_last):
            return self.own(batch, *self.rest)


@dataclass(eq=False)
class Again:
    """Does steps again in parts where they run out of memory.

    Attributes:
        policy: how large parts are, and which batches are not tried as a whole.
        cut: how batches are cut, as far as is known.
        announce: warns of something.
        lenient: go on where the difference is of a known kind.
        refused: why the last step that ran out of memory was not done again.
    """

    trainer: Any
    module: LightningModule
    policy: Policy
    cut: Cut | None
    announce: Callable[[str], None]
    lenient: bool
    refused: str = field(default="", init=False)
    broken: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.device = self.trainer.strategy.root_device
        self.state = StepState(self.trainer, self.module)
        self.ranks = OtherRanks(self.trainer, self.module)

    def run(self, batch: object, whole: Callable[[], Any], make: Callable[[], Step]) -> Any:
        """Run a step, in parts if it has to be.

        Args:
            batch: its batch.
            whole: runs it as Lightning does.
            make: describes it; called if it is to be run in parts.
        """
        if self.broken:
            return whole()
        has_limit, noted = self.policy.too_large_bytes < math.inf, None
        if has_limit and (at_once := self._quietly(lambda: self.policy.at_once(batch), 0)):
            planned = self._quietly(make, None)
            done, result = self._planned(planned, at_once) if planned else (False, None)
            if done:
                return result
        try:
            noted = self.note(batch)
        except Exception as error:  # noqa: BLE001 - see `_quietly`
            self._breaks(error)
        try:
            result = whole()
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            step = self._quietly(make, None)
            if step is None or not self._takes(step, noted, error):
                raise
            failed = error
        else:
            if has_limit or self.state.is_thorough:
                self._quietly(lambda: self._succeeded(batch), None)
            return result
        return self._again(step, failed)

    def part_of(self, step: Step, start: int, stop: int) -> Samples:
        """Facts about some samples of a step's batch."""
        samples, cut = next(cuts_for(step.batch, self.cut))
        nbytes = batch_bytes(part_of(step.batch, cut, samples, start, stop))
        return Samples(stop - start, nbytes)

    def note(self, batch: object, *, draws: bool = False) -> Noted:
        """Note the state before a step."""
        if self.ranks.are_many:
            self.ranks.begin()
        return self.state.note(self.trainer._results, batch, draws=draws)

    def _succeeded(self, batch: object) -> None:
        self.state.watch()
        self.policy.ran_whole(batch)

    def _quietly(self, work: Callable[[], Any], otherwise: object) -> Any:
        """Do something of ours, which must not stop a training that has enough memory."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001
            self._breaks(error)
            return otherwise

    def _breaks(self, error: Exception) -> None:
        if not self.broken:
            self.broken = True
            self.announce(f"MemGuard will not do steps that run out of memory again in parts: {reason_of(error)}")

    # -- after a failure

    def _takes(self, step: Step, noted: Noted | None, error: BaseException) -> bool:
        """Whether a step that raised is to be done again; if so, what it made is held no more."""
        try:
            self.policy.failed(step.place)
            self.refused = self._obstacle(step, noted, error)
        except BaseException as failure:  # noqa: BLE001 - the user's error is the one to be raised
            self.refused = f"{type(failure).__name__}: {failure}"
        if not self.refused:
            release(error)
        return not self.refused

    def _obstacle(self, step: Step, noted: Noted | None, error: BaseException) -> str:
        if noted is None:
            return "what it changes could not be noted before it"
        step.failed, step.noted = True, noted
        obstacle = step.obstacle(error) or self.state.obstacle(step.noted)
        if obstacle:
            return obstacle
        step.noted.put_back()
        return self._obstacle_of_batch(step)

    def _obstacle_of_batch(self, step: Step) -> str:
        try:
            samples, _ = next(cuts_for(step.batch, self.cut))
        except CannotTraceError as error:
            return f"its batch cannot be cut by sample: {error}"
        return "" if samples > 1 else "its batch is a single sample"

    def _again(self, step: Step, error: BaseException) -> Any:
        """Do a step that failed again.

        Raises:
            BaseException: the step's own error, if it turns out that parts would make another step, or if a single
                sample does not fit.
        """
        try:
            self.ranks.failed()
            free(self.device)
            whole = self.part_of(step, 0, next(cuts_for(step.batch, self.cut))[0])
            return self._in_parts(step, self.policy.most_samples(whole))
        except Refused as refused:
            self.refused = str(refused)
        except KeyboardInterrupt:
            raise
        except BaseException as failure:  # noqa: BLE001 - see above
            memory = ran_out_of_memory(failure)
            self.refused = "not even one sample fits" if memory else f"{type(failure).__name__}: {failure}"
            release(failure)
        self._quietly(step.noted.put_back, None)
        raise error.with_traceback(None)

    def _planned(self, step: Step, at_once: int) -> tuple[bool, Any]:
        """Do a step in parts from the start, because it would run out of memory; False if it has to be whole."""
        noted = self._quietly(lambda: self.note(step.batch, draws=True), None)
        if noted is None:
            return False, None
        step.noted = noted
        try:
            if step.obstacle(None) or self._obstacle_of_batch(step):
                return False, None
            self.ranks.send_buffers()
            return True, self._in_parts(step, at_once)
        except (Exception, Refused) as error:
            if self.ranks.has_sent:
                if isinstance(error, Exception):
                    raise
                reason = f"a batch that would run out of memory could not be done in parts: {error}"
                raise torch.OutOfMemoryError(reason) from None
            release(error)
            step.before_whole()
        self._quietly(step.noted.put_back, None)
        return False, None

    def _in_parts(self, step: Step, most: int) -> Any:
        """Run all passes; what was refused before a gradient was written may be cut in another way."""
        reason: Refused | None = None
        for samples, cut in cuts_for(step.batch, self.cut):
            passes = Passes(step, cut, samples, self.module, lenient=self.lenient)
            learned = False
            try:
                at_once = passes.learn(min(most, samples - 1))
                learned = True
                step.before_parts()
                passes.run(at_once)
                result = step.finished()
                self._quietly(self.state.watch, None)
                self.policy.rescued(step.place, self.part_of(step, 0, passes.total), passes.largest, passes.changes)
                return result
            except BaseException as error:
                passes.undo()
                if learned or not isinstance(error, Refused):
                    raise
                reason = reason or error
            finally:
                self._quietly(passes.close, None)
        raise reason or Refused("its batch cannot be cut by sample")

    @abstractmethod
    def install(self) -> None:
        """Guard the steps from now on."""

    @abstractmethod
    def close(self) -> None:
        """Leave the Trainer as it was."""


class TrainingAgain(Again):
    """Repeats training steps, between `install` and `close`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loop: Any = self.trainer.fit_loop.epoch_loop.automatic_optimization
        self.parameters = [each for each in self.module.parameters() if each.requires_grad]
        self.calls = importlib.import_module(f"{lightning_of(self.module).__name__}.trainer.call")  # calls hooks

    def install(self) -> None:
        """Guard the steps from now on."""
        self.make = self._loop._make_closure
        self._loop._make_closure = self._make
        self.ranks.install()

    def close(self) -> None:
        """Leave the Trainer as it was."""
        vars(self._loop).pop("_make_closure", None)
        self.ranks.close()

    def _make(self, *call: object) -> Any:
        closure = self.make(*call)
        if not self.broken:
            try:
                closure.__class__ = _guarded(type(closure))  # type: ignore[arg-type]
                closure.guard, closure.call = self, call
            except Exception as error:  # noqa: BLE001 - see `_quietly`
                self._breaks(error)
        return closure

    def step_of(self, closure: Any) -> Any:
        """Run the step of a closure."""
        try:
            gradients = Gradients(self.parameters) if closure._zero_grad_fn is None else None
        except Exception as error:  # noqa: BLE001 - see `_quietly`
            self._breaks(error)
            return closure.whole()
        return self.run(closure.call[0].get("batch"), closure.whole, partial(TrainingStep, self, closure, gradients))


@lru_cache
def _guarded(closure: Any) -> Any:
    """Return a class of closures whose steps are guarded."""
    whole = closure.closure

    def guarded(self: Any, *_: object, **__: object) -> Any:
        return self.guard.step_of(self)

    return type(closure.__name__, (closure,), {"closure": guarded, "whole": whole})


class EvaluationAgain(Again):
    """Repeats steps of validation and test."""

    def install(self) -> None:
        """Guard the steps from now on."""
        strategy = self.trainer.strategy
        for name in _EVALUATIONS:
            setattr(strategy, name, partial(self._run, getattr(strategy, name)))
        self.ranks.install()

    def close(self) -> None:
        """Leave the strategy as it was."""
        for name in _EVALUATIONS:
            vars(self.trainer.strategy).pop(name, None)
        self.ranks.close()

    def _run(self, own: Callable[..., Any], batch: object, *rest: object) -> Any:
        return self.run(batch, partial(own, batch, *rest), partial(EvaluationStep, self, own, batch, rest))
