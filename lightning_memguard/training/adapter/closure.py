"""A step of automatic optimization that runs out of memory, done again in parts of its batch.

The retry is inside the closure that Lightning passes to the optimizer: it runs ``training_step``, ``zero_grad`` and the
backward pass, so that everything around it (clipping, scaling, the step, the hooks) happens once.

What a failed attempt has written is undone without a copy made in advance. Where the batch is the first to accumulate,
gradients are cleared again. Later in an accumulation, autograd has added a parameter's gradient as a whole or not at
all (AccumulateGrad runs once for each parameter): those that have theirs keep it, and the retry is for the others.

Private names of Lightning were checked on 2.5.0 to 2.6.6, those of torch on 2.9 to 2.13.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_memguard.core.capture.averages import Average, Averages
from lightning_memguard.core.capture.batch import batch_bytes, batch_size_of, batches_from_one
from lightning_memguard.core.capture.split import Cut, cut_of, even_parts, join, part_of, size_of
from lightning_memguard.core.device.malloc import trim_heap
from lightning_memguard.training.adapter.lightning_types import lightning_of
from lightning_memguard.training.adapter.logged import Journal, Noted, StepState
from lightning_memguard.training.adapter.same_step import SameStep

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

Gradients: TypeAlias = tuple[list[torch.Tensor | None], list[int]]
"""Of each parameter, in order: its gradient, and how often that was written to."""

Attempted: TypeAlias = tuple[Noted, Gradients]
"""What there was before an attempt."""

_SHARE_ERROR = 1e-4
_NONE: Gradients = ([], [])


@dataclass(frozen=True)
class Part:
    """Some samples of a batch.

    Attributes:
        samples: how many.
        of: how many the batch has.
        nbytes: bytes of its tensors.
    """

    samples: int
    of: int
    nbytes: int


@dataclass(frozen=True)
class Policy:
    """What decides, and what is notified.

    Attributes:
        is_memory: whether an exception says that memory ran out.
        allows: why a step must not be done again, in plain words; empty where it may be.
        most_samples: of the next attempt, after this part ran out of memory.
        ran: called with each part that ran.
        rescued: called once the step is done, with the batch and the number of samples in its largest part.
    """

    is_memory: Callable[[BaseException], bool]
    allows: Callable[[], str]
    most_samples: Callable[[Part], int]
    ran: Callable[[Part], None]
    rescued: Callable[[Part, int], None]


class StepGuard:
    """Does steps again in parts where they run out of memory, between `install` and `remove`.

    Attributes:
        at_once: how many samples of the next batch to run at once; 0 for all of them.
        refused: why the last step that ran out of memory was not done again.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, same: SameStep, policy: Policy) -> None:
        self.trainer: Any = trainer
        self.module = module
        self.policy = policy
        self.at_once = 0
        self.refused = ""
        self._loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self._calls = importlib.import_module(f"{lightning_of(module).__name__}.trainer.call")
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._epoch_loop: Any = trainer.fit_loop.epoch_loop
        self._state = StepState(trainer, module)
        self.follow(same)
        self._in_backward = self._zeroed = False
        self._ddp = wrapper_of(trainer)
        self._collectives = -1
        self._entering: RemovableHandle | None = None
        self._classes: dict[type, type] = {}

    def follow(self, same: SameStep) -> None:
        """Do steps as they were found to be."""
        self.same = same
        self._state.expect(draws=same.draws, in_place=same.in_place, buffers=same.buffers)

    def install(self) -> None:
        """Guard the steps from now on."""
        self._make = self._loop._make_closure
        self._loop._make_closure = self._make_guarded
        if self.trainer.world_size > 1:
            self._entering = self.module.register_forward_pre_hook(self._count_collectives)

    def remove(self) -> None:
        """Leave the Trainer as it was."""
        vars(self._loop).pop("_make_closure", None)
        if self._entering is not None:
            self._entering.remove()

    # -- each step

    def _make_guarded(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        closure = self._make(kwargs, optimizer, batch_idx)
        closure.guard, closure.step = self, (kwargs, optimizer, batch_idx)
        closure.__class__ = self._classes.get(type(closure)) or self._guarded(type(closure))
        return closure

    def _guarded(self, kind: type) -> type:
        """Lightning's closure, under a guard; of one base, so that an object may become one."""
        guarded = type("GuardedClosure", (kind,), {"closure": _guarded(kind.closure)})  # type: ignore[attr-defined]
        self._classes[kind] = guarded
        return guarded

    def _count_collectives(self, *_: object) -> None:
        self._collectives = _collectives()

    def before(self, closure: Any) -> Attempted | None:
        """Note what an attempt may change; None where that cannot be determined."""
        self._collectives = -1
        try:
            noted = self._state.note(self._epoch_loop._results)
        except Exception:  # noqa: BLE001 - the step runs all the same
            return None
        return noted, _NONE if closure._zero_grad_fn is not None else self._gradients()

    def _gradients(self) -> Gradients:
        """Which gradients are there, and how often each was written to."""
        gradients = [each.grad for each in self._parameters]
        return gradients, [0 if each is None else each._version for each in gradients]

    def _written(self, before: Gradients) -> set[torch.Tensor]:
        return {
            p
            for p, grad, version in zip(self._parameters, *before, strict=False)
            if p.grad is not grad or (grad is not None and grad._version != version)
        }

    # -- after a failure

    def takes(self, closure: Any, attempted: Attempted, error: BaseException) -> bool:
        """Whether a step that raised is to be done again; if so, nothing that it had made is held any more."""
        if not self.policy.is_memory(error):
            return False
        raised_in = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        self._in_backward = getattr(closure._backward_fn, "__code__", None) in raised_in
        self._zeroed = self._in_backward or getattr(closure._zero_grad_fn, "__code__", None) in raised_in
        try:
            self.refused = self._obstacle_of_strategy() or self.policy.allows() or self._obstacle(closure, attempted)
        except Exception as failure:  # noqa: BLE001 - the user's error is the one to be raised
            self.refused = f"{type(failure).__name__}: {failure}"
        if self.refused:
            return False
        release(error)
        return True

    def _obstacle_of_strategy(self) -> str:
        name = type(self.trainer.strategy).__name__
        if self.trainer.strategy.handles_gradient_accumulation:
            return f"{name} accumulates gradients by itself"
        alone = self.trainer.world_size == 1 or self._ddp is not None
        return "" if alone else f"{name} talks to the other ranks while the step runs"

    def _obstacle(self, closure: Any, attempted: Attempted) -> str:
        kwargs = closure.step[0]
        if "batch" not in kwargs:
            return "its training_step takes an iterator instead of a batch"
        if self._in_backward and closure._backward_fn is None:
            return "its backward pass is skipped"
        samples, cut = self._samples(kwargs["batch"])
        if samples < 2:
            return "its batch is a single sample" if samples else "its batch cannot be cut by sample"
        part_of(kwargs["batch"], cut, samples, 0, 1)
        written = self._written(attempted[1])
        if written and not self.same.atomic:
            return "a part of a gradient may have been added to those accumulated before (reentrant checkpointing)"
        return self._obstacle_of_ranks()

    def _obstacle_of_ranks(self) -> str:
        """Why this rank cannot do a step again by itself, such that the others see the collective calls of one step.

        Before the backward pass, the last of the parts can make the calls that the step would have made, and no rank
        waits for one that does not come. Once DistributedDataParallel has prepared for the gradients of a step, it
        sends those that come next, which would be those of the first part.
        """
        if self._ddp is None or self.trainer.world_size == 1:
            return ""
        syncs = self._in_backward and self._ddp.require_backward_grad_sync
        obstacles = {
            "its training_step talks to the other ranks": self.same.collectives,
            "it had begun to talk to the other ranks": self._collectives < 0 or _collectives() != self._collectives,
            "DistributedDataParallel cannot start a backward pass again": syncs,
        }
        return next((obstacle for obstacle, holds in obstacles.items() if holds), "")

    def _samples(self, batch: Any) -> tuple[int, Cut]:
        return samples_in(batch, self.same.cut)

    def again(self, closure: Any, attempted: Attempted, error: BaseException) -> Any:
        """Do a step that failed again, in parts.

        Raises:
            BaseException: what a part raised that is not due to memory, or that holds a single sample; or the step's
                own error, where it turns out that parts would make another step.
        """
        noted, gradients = attempted
        self._state.put_back(noted)
        buffers_were_sent(self._ddp)
        batch = closure.step[0]["batch"]
        samples, _ = self._samples(batch)
        had_backward, written = self._in_backward, self._written(gradients)
        free(self.trainer.strategy.root_device)
        most = self.policy.most_samples(Part(samples, samples, batch_bytes(batch)))
        try:
            return self._in_parts(closure, most, written, had_backward)
        except _UnequalError as unequal:
            self.refused = str(unequal)
        raise error.with_traceback(None)

    def in_parts(self, closure: Any) -> Any:
        """Do a step in parts from the start, because it would run out of memory; None where it cannot be cut."""
        most, self.at_once = self.at_once, 0
        self._in_backward = self._zeroed = False
        self._collectives = -1
        try:
            if self._obstacle_of_strategy() or self.policy.allows() or self._obstacle_of_plan(closure):
                return None
            most = min(most, self._samples(closure.step[0]["batch"])[0])
        except Exception:  # noqa: BLE001 - it is tried as a whole
            return None
        try:
            return self._in_parts(closure, most, set(), False)
        except _UnequalError:
            if self._in_backward and closure._zero_grad_fn is None:
                raise
            return None

    def _obstacle_of_plan(self, closure: Any) -> bool:
        kwargs = closure.step[0]
        if "batch" not in kwargs:
            return True
        samples, cut = self._samples(kwargs["batch"])
        part_of(kwargs["batch"], cut, max(1, samples), 0, 1)
        return samples < 2 or self.same.collectives

    def _in_parts(self, closure: Any, most: int, has_theirs: set[torch.Tensor], had_backward: bool) -> Any:
        kwargs, optimizer, batch_idx = closure.step
        samples, cut = self._samples(kwargs["batch"])
        run = _Run(self, kwargs, optimizer, batch_idx, cut, samples, had_backward)
        connector = self.trainer._logger_connector
        is_first = connector._first_loop_iter
        noted = self._state.note(self._epoch_loop._results)
        counts = self.same.counted or (bool(self.same.averages) and closure._zero_grad_fn is None)
        try:
            while not run.counts:
                try:
                    if counts:
                        run.count(most)
                        self._state.put_back(noted)
                    self._zero(closure, optimizer, batch_idx)
                    run.range(0, samples, most, has_theirs)
                except _PartialError:  # noqa: PERF203 - it does not average over all elements, as it did when it was tried
                    self.same = replace(self.same, counted=True)
                    run.start_over()
                    self._state.put_back(noted)
                    counts = self._zeroed = True
            run.journal.end(self.same.rules)
        except _UnequalError:
            self._state.put_back(noted)
            raise
        finally:
            run.journal.end()
            connector._first_loop_iter = is_first
        nbytes = batch_bytes(kwargs["batch"])
        self.policy.rescued(Part(samples, samples, nbytes), max(run.counts))
        return run.result()

    def _zero(self, closure: Any, optimizer: Any, batch_idx: int) -> None:
        if closure._zero_grad_fn is not None and self._zeroed:  # its hooks were called
            self.trainer.lightning_module.optimizer_zero_grad(self.trainer.current_epoch, batch_idx, optimizer)
        elif closure._zero_grad_fn is not None:
            closure._zero_grad_fn()


class _UnequalError(Exception):
    """Parts would make another step, for this reason; nothing was written yet."""


class _PartialError(Exception):
    """A part averages over some of its elements only, and its weight is not known."""


def _guarded(own: Callable[..., Any]) -> Callable[..., Any]:
    """Lightning's ``Closure.closure``, under the guard that the closure has."""

    def closure(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard: StepGuard = self.guard
        if guard.at_once:
            result = guard.in_parts(self)
            if result is not None:
                return result
        attempted = guard.before(self)
        try:
            return own(self, *args, **kwargs)
        except Exception as error:
            if attempted is None or not guard.takes(self, attempted, error):
                raise
            failed = error
        return guard.again(self, attempted, failed)

    return closure


class _Run:
    """One batch in parts."""

    def __init__(
        self, guard: StepGuard, kwargs: Any, optimizer: Any, batch_idx: int, cut: Cut, samples: int, had_backward: bool
    ) -> None:
        self.guard = guard
        self.kwargs, self.optimizer, self.batch_idx = kwargs, optimizer, batch_idx
        self.cut, self.samples = cut, samples
        self.journal = Journal(guard._epoch_loop._results)
        self.results: list[Any] = []
        self.counts: list[int] = []
        self.weights: list[float] = []
        self._had_backward = had_backward  # whether the hooks before it were called
        self._totals: list[float] = []  # what each of the averages divides by for the whole batch; empty by samples
        self._each_sample: list[float] = []  # the same for each sample of the first part

    def start_over(self) -> None:
        """Forget the parts that ran."""
        self.journal.forget()
        self.results.clear()
        self.counts.clear()
        self.weights.clear()

    def count(self, most: int) -> None:
        """Run the forward pass of all parts, to know by how many elements the whole batch averages.

        Raises:
            _UnequalError: see `_share`.
        """
        parts = self._counted(0, self.samples, most)
        self._totals = [sum(counts) for counts in zip(*parts, strict=True)]
        for counts in parts:
            _share(counts, self._totals)
        self.guard._in_backward = False

    def _counted(self, start: int, stop: int, most: int) -> list[list[float]]:
        counts = []
        for first, last in even_parts(start, stop, most):
            closure, batch = self._closure(first, last)
            averages = Averages()
            self.journal.begin(batch, last - first)
            try:
                with self._alone(), torch.enable_grad(), averages:
                    closure._step_fn()
                counts.append(self._at_places(averages))
            except Exception as error:
                if last - first == 1 or not self.guard.policy.is_memory(error):
                    raise
                release(error)
            else:
                continue
            finally:
                self.journal.drop()
            free(self.guard.trainer.strategy.root_device, again=True)
            counts += self._counted(first, last, math.ceil((last - first) / 2))
        return counts

    def _alone(self) -> contextlib.AbstractContextManager[object]:
        """Without the other ranks."""
        return contextlib.nullcontext() if self.guard._ddp is None else self.guard._ddp.no_sync()

    def _at_places(self, averages: Averages) -> list[float]:
        return [each.count for each in self._found(averages)]

    def _found(self, averages: Averages) -> list[Average]:
        found, places = averages.found(), self.guard.same.averages
        if len(found) <= max(places):
            raise _UnequalError("its loss is not computed as it was when it was tried in parts")
        return [found[place] for place in places]

    def _closure(self, start: int, stop: int) -> tuple[Any, Any]:
        """Lightning's closure for some samples, and these."""
        batch = part_of(self.kwargs["batch"], self.cut, self.samples, start, stop)
        kwargs = type(self.kwargs)(self.kwargs)
        kwargs["batch"] = batch
        return self.guard._make(kwargs, self.optimizer, self.batch_idx), batch

    def range(self, start: int, stop: int, most: int, has_theirs: set[torch.Tensor]) -> None:
        """Run samples in parts; the parameters in ``has_theirs`` have the gradients of them all already."""
        guard = self.guard
        for first, last in even_parts(start, stop, most):
            before = guard._gradients()
            kept = None if guard.same.atomic else [(p, _on_host(p.grad)) for p in guard._parameters]
            error = self._part(first, last, has_theirs)
            if error is None:
                continue
            written = guard._written(before) - has_theirs
            if last - first == 1 or (last == self.samples and guard._obstacle_of_ranks()):
                raise error
            del error
            if kept is not None:
                written = set()
                _put_back(kept)
            free(guard.trainer.strategy.root_device, again=True)
            part = self._as_part(first, last)
            self.range(first, last, guard.policy.most_samples(part), has_theirs | written)

    def _as_part(self, start: int, stop: int) -> Part:
        part = part_of(self.kwargs["batch"], self.cut, self.samples, start, stop)
        return Part(stop - start, self.samples, batch_bytes(part))

    def _part(self, start: int, stop: int, has_theirs: set[torch.Tensor]) -> BaseException | None:
        """Forward and backward of some samples; an exception where memory ran out."""
        guard, count = self.guard, stop - start
        guard._in_backward, guard._collectives = False, -1
        noted = guard._state.note(guard._epoch_loop._results)
        closure, batch = self._closure(start, stop)
        averages = Averages()
        if guard.same.averages:
            closure._step_fn = partial(_within, averages, closure._step_fn)
        own, closure._zero_grad_fn = closure._backward_fn, None
        if own is not None:
            closure._backward_fn = partial(self._backward, own, count, averages)
        self.journal.begin(batch, count)
        try:
            with ExitStack() as around:
                around.enter_context(self._hooks(is_last=stop == self.samples))
                around.enter_context(_without(has_theirs))
                if stop < self.samples:
                    around.enter_context(self._alone())
                result = closure.closure()
        except Exception as error:
            self.journal.drop()
            guard._state.put_back(noted)
            if not guard.policy.is_memory(error):
                raise
            release(error)
            return error.with_traceback(None)
        guard.trainer._logger_connector._first_loop_iter = False  # the first part has reset the last epoch's values
        result.closure_loss = None
        self.results.append(result)
        self.counts.append(count)
        self.weights.append(self._weight(count, averages))
        self.journal.weigh(self.weights[-1])
        guard.policy.ran(Part(count, self.samples, batch_bytes(batch)))
        return None

    def _weight(self, count: int, averages: Averages) -> float:
        same = self.guard.same
        if same.weighting == "sum":
            return 1.0
        if not same.averages:
            return count / self.samples
        found = self._found(averages)
        if self._totals:
            return _share([each.count for each in found], self._totals)
        each_sample = [each.count / count for each in found]
        self._each_sample = self._each_sample or each_sample
        if each_sample != self._each_sample or not all(each.is_full for each in found):
            raise _PartialError
        return count / self.samples

    def _backward(
        self, own: Callable[[torch.Tensor], None], count: int, averages: Averages, loss: torch.Tensor
    ) -> None:
        weight = self._weight(count, averages)
        self.guard._in_backward = True
        own(loss * weight)

    @contextlib.contextmanager
    def _hooks(self, *, is_last: bool) -> Iterator[None]:
        """Call those around the backward pass once for the batch."""
        calls = self.guard._calls

        def filtered(call: Callable[..., Any], trainer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            if (name == "on_before_backward" and self._had_backward) or (name == "on_after_backward" and not is_last):
                return None
            result = call(trainer, name, *args, **kwargs)
            if name == "on_before_backward" and call is module_hook:
                self._had_backward = True
            return result

        callback_hooks, module_hook = calls._call_callback_hooks, calls._call_lightning_module_hook
        with (
            mock.patch.object(calls, "_call_callback_hooks", partial(filtered, callback_hooks)),
            mock.patch.object(calls, "_call_lightning_module_hook", partial(filtered, module_hook)),
        ):
            yield

    def result(self) -> Any:
        """What one step on the batch would have returned."""
        rules, kind = self.guard.same.rules, type(self.results[0])
        losses = [(each.loss, weight) for each, weight in zip(self.results, self.weights, strict=True)]
        extras = [each.extra for each in self.results]
        extra = join(extras, self.counts, rules, "output", self.weights) if extras else {}
        merged = kind(None, extra=extra)
        given = [loss * weight for loss, weight in losses if loss is not None]
        merged.loss = sum(given[1:], given[0]) if given else None
        return merged


def _within(averages: Averages, step: Callable[[], Any]) -> Any:
    with averages:
        return step()


def _share(counts: Sequence[float], totals: Sequence[float]) -> float:
    """The share of a part in the whole batch, which all averages must agree on.

    Raises:
        _UnequalError: they do not, or the part has nothing to average over: its loss is not a number.
    """
    if min(counts) <= 0:
        raise _UnequalError("its loss averages over no element of some samples")
    shares = [count / total for count, total in zip(counts, totals, strict=True)]
    if max(shares) - min(shares) > _SHARE_ERROR:
        raise _UnequalError("its loss is a sum of means over different numbers of elements, not all of them full")
    return shares[0]


# -- gradients


@contextlib.contextmanager
def _without(parameters: set[torch.Tensor]) -> Iterator[None]:
    """Keep the gradients that parameters have; what a backward pass computes for them is let go."""
    kept = {parameter: parameter.grad for parameter in parameters}
    handles = []
    for parameter in parameters:
        parameter.grad = None
        handles.append(parameter.register_post_accumulate_grad_hook(_let_go))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, grad in kept.items():
            parameter.grad = grad


def _let_go(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _on_host(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.to("cpu", copy=True)


def _put_back(kept: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    with torch.no_grad():
        for parameter, value in kept:
            if value is None or parameter.grad is None:
                parameter.grad = None if value is None else value.to(parameter.device)
            else:
                parameter.grad.copy_(value)


# -- batches, processes, memory


def samples_in(batch: Any, cut: Cut | None) -> tuple[int, Cut]:
    """How many samples a batch has, and how it is cut; by its first dimensions where that is not known."""
    if cut is not None:
        return size_of(batch, cut), cut
    size = batch_size_of(batch)
    two = batches_from_one(batch, size)
    return size, cut_of(two.small, two.large, size, size + 1)


def free(device: torch.device, *, again: bool = False) -> None:
    """Release what is not used; thoroughly, which takes longer, where memory has run out once more."""
    gc.collect(2 if again else 1)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim_heap()


def wrapper_of(trainer: Any) -> DistributedDataParallel | None:
    """What the ranks talk to each other through; None where that is nothing, or something else."""
    model = trainer.strategy.model
    return model if type(model) is DistributedDataParallel else None


def buffers_were_sent(wrapper: DistributedDataParallel | None) -> None:
    """By an attempt that failed: the other ranks expect them once for a batch."""
    if wrapper is not None:
        wrapper.require_forward_param_sync = False


def _collectives() -> int:
    """How many collective calls this rank has made; checked on gloo and NCCL."""
    group: Any = dist.group.WORLD
    return int(group._get_sequence_number_for_group())


def release(error: BaseException | None) -> None:
    """Let go of what the frames of an exception hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
