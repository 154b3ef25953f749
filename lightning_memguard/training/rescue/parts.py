"""One step on a batch -> the same step, run on one part of the batch after the other.

First the parts run forward, and nothing is saved for a backward pass, until each reduction over samples has the whole
batch's value. Then each part runs once more, with its backward pass. See `reductions` and `flow`.
"""

from __future__ import annotations

import gc
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_memguard.core.batch.nesting import children_of, map_tensors, rebuilt
from lightning_memguard.core.foreign import added, patched
from lightning_memguard.training.rescue.custom import CustomFunctions
from lightning_memguard.training.rescue.cut import Cut, Entries, even_parts, part_of, uneven_parts
from lightning_memguard.training.rescue.flow import Flow, by_storage
from lightning_memguard.training.rescue.memory import free, ran_out_of_memory, release
from lightning_memguard.training.rescue.other_ranks import Gradients, without_experiments
from lightning_memguard.training.rescue.reductions import Lengths, Reductions, Totals, lengths
from lightning_memguard.training.rescue.sample_layout import Layout, Refused, Waits, forget, join, refuse, refuse_after
from lightning_memguard.training.rescue.sizes import Size, plain
from lightning_memguard.training.rescue.state import Left, Noted, random_states

_ROUNDS = 8  # forward passes of a part, each of which reads values that the one before has made known
_SCRIPT = 2  # samples that show which dimension is theirs, where parts hold a single one


class Step:
    """One step on a batch, which can be run again; ``again`` is what repeats it, ``noted`` the state before it."""

    noted: Noted
    passes: Passes

    def __init__(self, again: Any, batch: object, place: int) -> None:
        self.again, self.batch, self.place = again, batch, place
        self.failed = False  # as a whole

    @abstractmethod
    def obstacle(self, error: BaseException | None) -> str:
        """Why it must not be run again by itself; empty if it may be. ``error`` is what it raised, if it was run."""

    @abstractmethod
    def forward(self, batch: object, *, final: bool, is_last: bool) -> Any:
        """Run a part forward; ``final`` where its backward pass follows, ``is_last`` where no other part does."""

    @contextmanager
    def logging(self, *, wanted: bool) -> Iterator[None]:
        """Log values of the whole batch, once: while the last part runs."""
        results, passes = self.again.trainer._results, self.passes
        if results is None:
            yield
            return
        log, reset = results.log, results.reset

        def logged(fx: str, name: str, value: object, *args: object, **kwargs: object) -> None:
            passes.check_number(f"the value that it logs as `{name}`", value)
            if wanted:
                with passes.flow.silent():
                    log(fx, name, value, *map(plain, args), **{key: plain(each) for key, each in kwargs.items()})

        def emptied(*args: object, **kwargs: object) -> None:
            with passes.flow.silent():
                reset(*args, **kwargs)

        with added(results, log=logged, reset=emptied), without_experiments(self.again.trainer.loggers):
            yield

    def losses(self, result: object) -> list[torch.Tensor]:  # noqa: ARG002
        """The tensors that are differentiated."""
        return []

    def outputs(self, result: object) -> Any:
        """The results that are joined."""
        return result

    def backward(self, result: object, share: float, *, is_last: bool) -> None:
        """Run the backward pass; the loss is scaled by the part's share of the samples."""

    def finished(self) -> Any:
        """Return the result of the whole step."""
        return self.passes.result()

    def before_parts(self) -> None:
        """The second passes begin."""

    def before_whole(self) -> None:
        """The step has to run as a whole after all."""

    @contextmanager
    def smaller(self, start: int, stop: int) -> Iterator[int]:
        """Some samples ran out of memory in their last pass: release it; how many of them to take at once."""
        free(self.again.device, again=True)
        self.again.ranks.failed()
        yield self.again.policy.smaller(self.again.part_of(self, start, stop))


@dataclass
class Part:
    """Results of a part, to be joined with those of the others."""

    outputs: Any
    left: list[tuple[Left, Layout]]


class Passes:
    """Runs a step in parts; used once.

    Args:
        step: what runs.
        cut: how its batch is cut.
        total: how many samples that has.
        module: whose parameters and buffers are the same in each part.
        lenient: go on where the difference is of a known kind; see `changes`.
    """

    def __init__(self, step: Step, cut: Cut, total: int, module: nn.Module, *, lenient: bool) -> None:
        self.step, self.cut, self.total = step, cut, total
        self.module = module
        self.flow = Flow(total, [*module.parameters(), *module.buffers()], lenient=lenient)
        self.totals = Totals()
        self.reductions = Reductions(self.flow, self.totals)
        self.custom = CustomFunctions(self.flow)
        self.step.passes = self
        self.parts: list[Part] = []
        self.largest = 0

    @property
    def changes(self) -> tuple[str, ...]:
        """How the step is not the same one; only where that was asked for."""
        return tuple(self.flow.changes)

    # -- first: what each reduction is

    def learn(self, most: int) -> int:
        """Run forward passes of at most so many samples until all reductions are known; return how many fitted.

        Raises:
            Refused: the step in parts would be, or might be, another step.
            BaseException: not even a part of one sample fits; the error that it raised.
        """
        for name, parameter in self.module.named_parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise Refused(f"a hook works on the gradient of `{name}`")
        if self.step.failed:
            norms = (each for each in self.module.modules() if isinstance(each, _BatchNorm))
            statistics = (buffer for each in norms for buffer in each.buffers())
            self.flow.noted = by_storage([*self.step.noted.tensors, *statistics])
        while True:
            try:
                self._learn(uneven_parts(0, self.total, most))
            except Exception as error:
                if most == 1 or not ran_out_of_memory(error):
                    raise
                release(error)
            else:
                return most
            gc.collect(1)
            most = math.ceil(most / 2)

    def _learn(self, parts: list[tuple[int, int]]) -> None:
        first = parts[0] if parts[0][1] > 1 else (0, min(_SCRIPT, self.total))
        for _ in range(_ROUNDS):
            self.totals.begin()
            if parts[0] != first:
                self._learn_apart(*first)
                self.totals.begin()
            for start, stop in parts:
                self._learn_from(start, stop, extends=(start, stop) == first)
            if self.totals.learn(self.total) and self.flow.script.complete:
                return
        raise Refused(f"its reductions over samples depend on each other more than {_ROUNDS} times")

    def _learn_apart(self, start: int, stop: int) -> None:
        """Run several samples, where each part is a single one: which dimension is theirs cannot be seen there."""
        try:
            self._learn_from(start, stop, extends=True)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            release(error)
            raise Refused("one sample may fit, but not the forward pass of two, which shows how samples lie") from None

    def _learn_from(self, start: int, stop: int, *, extends: bool) -> None:
        keeps_nothing = torch.autograd.graph.saved_tensors_hooks(lambda _: None, _refuse_backward)
        with keeps_nothing, self._pass(start, stop, extends=extends):
            try:
                result = self.step.forward(self._part(start, stop), final=False, is_last=False)
            except Waits:
                return
            except Exception as error:
                if self.flow.pending and not ran_out_of_memory(error):
                    return  # it may be a value that is not known yet
                raise
            self.flow.finish()
        self._inspect(result)

    def _inspect(self, result: object) -> None:
        """Refuse what the operators did not show."""
        for loss in self.step.losses(result):
            if self.flow.kind(loss) not in ("whole", "constant"):
                raise Refused("the loss is that of single samples")
            self.custom.refuse_unseen(loss)
        for each in self.step.noted.tensors_left():
            if self._joinable(each.tensor, f"keeps in `{each.name}`") and each.tensor.requires_grad:
                raise Refused(f"training_step keeps samples with their graph in `{each.name}`")

    def _joinable(self, tensor: torch.Tensor, what: str) -> Layout | None:
        """The layout of samples that outlive their part."""
        layout = self._samples_in(tensor)
        if layout is not None and not layout.is_joined:
            kind = "places of samples" if layout.kind == "order" else "samples in another order than the batch's"
            raise Refused(f"training_step {what} {kind}")
        return layout

    def check_number(self, what: str, value: object) -> None:
        """Refuse a value of single samples where one of the whole batch is expected."""
        if self.flow.kind(value) not in ("", "whole", "constant"):
            raise refuse(f"{what} is one of single samples")

    # -- then: the step

    def run(self, most: int) -> None:
        """Run each part forward and backward; see `learn`.

        Raises:
            Refused: a part computed something else than before.
            BaseException: what a part raised that is not due to memory, or that holds a single sample.
        """
        self.reductions.ties = self.totals.ties()
        self.totals.begin()
        self._range(0, self.total, most)
        self.totals.check()

    def _range(self, start: int, stop: int, most: int) -> None:
        same = uneven_parts(start, stop, most)  # those that were learned, unless they do not matter
        for first, last in same if self.flow.changes else even_parts(start, stop, math.ceil((stop - start) / most)):
            before = self.totals.copy()
            try:
                self._run_part(first, last)
            except Exception as error:
                if not ran_out_of_memory(error) or last - first == 1:
                    raise
                release(error)
            else:
                continue
            self.totals.found = before
            with self.step.smaller(first, last) as smaller:
                self._range(first, last, min(smaller, last - first - 1))

    def _run_part(self, start: int, stop: int) -> None:
        is_last = stop == self.total
        with self._pass(start, stop):
            result = self.step.forward(self._part(start, stop), final=True, is_last=is_last)
            self.flow.finish()
        self._inspect(result)
        outputs = map_tensors(self.step.outputs(result), lambda x: _Kept(x.detach(), self._joinable(x, "returns")))
        left = [(each, layout) for each in self.step.noted.tensors_left() if (layout := self._samples_in(each.tensor))]
        with self._backward():
            self.step.backward(result, (stop - start) / self.total, is_last=is_last)
        self.parts.append(Part(outputs, left))
        self.largest = max(self.largest, stop - start)

    def _samples_in(self, tensor: torch.Tensor) -> Layout | None:
        layout = self.flow.known(tensor)
        return layout if layout is not None and layout.has_samples else None

    def result(self) -> Any:
        """Return the result of the whole step, and put its changes into Python's state."""
        for places in zip(*(part.left for part in self.parts), strict=True):
            last, layout = places[-1]
            last.replace(join([each.tensor.detach() for each, _ in places], layout))
        self.flow.writes.clear()  # what the last part wrote is what the step writes
        return _joined([part.outputs for part in self.parts])

    def undo(self) -> None:
        """Make the tensors that outlive the step as they were before it."""
        self.flow.undo_writes()

    def close(self) -> None:
        """Take the layouts off the tensors that outlive the step: they would be saved with them."""
        outside = (*self.flow.script.outside.tensors(), *self.reductions.outside.tensors())
        left = (each.tensor for each in self.step.noted.tensors_left())
        for tensor in (*self.module.parameters(), *self.module.buffers(), *outside, *left):
            forget(tensor)

    # -- a pass

    def _part(self, start: int, stop: int) -> Any:
        """A part of the batch, which the step may write to."""
        with self.flow.silent():
            return part_of(self.step.batch, self.cut, self.total, start, stop, self._mark)

    def _mark(self, value: Any, cut: Cut) -> Any:
        """Say how the samples lie in what was cut out of the batch."""
        if isinstance(value, torch.Tensor):
            value = value.clone()
            self.flow.put(value, Layout("rows", cut.dim, 1, cut.rows))
            return value
        if cut.kind == "count":
            return Size(cut.rows * self.total, value)
        if isinstance(value, np.ndarray):
            raise Refused("its batch holds samples in an array of NumPy")
        if not isinstance(value, list):
            return value
        numbers = {type(each) for each in value} == {int}
        return Lengths(value, Layout("rows", 0, 1, cut.rows)) if numbers else Entries(value)

    @contextmanager
    def _pass(self, start: int, stop: int, *, extends: bool = False) -> Iterator[None]:
        """The surroundings of one pass over some samples."""
        self.flow.begin(start, stop, extends=extends)
        self.step.noted.put_back()
        self.reductions.begin()
        unknown = self.step.noted.unknown_draws()
        before = random_states(unknown)
        refusals, gradients = Refused.raised, Gradients(self.module.parameters())
        with ExitStack() as around:
            around.enter_context(torch.compiler.set_stance("force_eager"))
            for name in ("grad", "backward"):
                around.enter_context(patched(torch.autograd, **{name: _refused(getattr(torch.autograd, name))}))
            around.enter_context(lengths(self.reductions))
            around.enter_context(self.custom.watched())
            around.enter_context(self.flow)
            around.enter_context(self.reductions)
            try:
                yield
            except (Refused, Waits):
                raise
            except Exception as error:
                if ran_out_of_memory(error):
                    raise
                raise refuse_after(
                    f"a part of its batch raises {type(error).__name__}: {error!s:.160}", error
                ) from None
        if gradients.written():
            raise Refused("training_step changes gradients")
        if Refused.raised != refusals:
            raise Refused("its code has caught a refusal")
        if before != random_states(unknown):
            raise Refused("it draws random numbers, whose states before are not known: earlier steps drew none")

    @contextmanager
    def _backward(self) -> Iterator[None]:
        """The surroundings of a backward pass: code that users wrote is followed in it, too."""
        if not self.reductions.checkpoints and not self.custom.any:
            yield
            return
        if self.reductions.checkpoints and self.flow.samples == 1:
            raise Refused("activation checkpoints in a part of one sample")
        own: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def run_backward(*args: object, **kwargs: object) -> Any:  # function modes are off while `backward` prepares
            with lengths(self.reductions), self.flow, self.reductions:
                return own(*args, **kwargs)

        self.flow.idle = self.flow.recomputes = True
        try:
            with self.custom.followed(), patched(torch.autograd, _engine_run_backward=run_backward):
                yield
        finally:
            self.flow.custom_returned = None
            self.flow.idle = self.flow.recomputes = False


@dataclass(frozen=True)
class _Kept:
    """A tensor of a part's output, and how its samples lie."""

    tensor: torch.Tensor
    layout: Layout | None


def _joined(outputs: list[Any]) -> Any:
    last = outputs[-1]
    if isinstance(last, _Kept):
        value = last.tensor if last.layout is None else join([each.tensor for each in outputs], last.layout)
        forget(value)
        return value
    children = children_of(last)
    if children is None:
        return plain(last)
    every = [children_of(each) or {} for each in outputs]
    return rebuilt(last, {key: _joined([each[key] for each in every]) for key in children})


def _refuse_backward(_: object) -> torch.Tensor:
    raise Refused("it runs a backward pass of its own")


def _refused(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes gradients, refused in this thread."""
    thread = threading.get_ident()

    def call(*args: object, **kwargs: object) -> Any:
        if threading.get_ident() != thread:
            return own(*args, **kwargs)
        raise refuse(f"it computes gradients of its own, by torch.autograd.{own.__name__}")

    return call
