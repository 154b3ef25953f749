"""A step in parts and the rest of the Trainer: hooks, gradients, the other ranks.

Private names of Lightning were checked on 2.5.0 to 2.6.6, those of torch on 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_memguard.core.foreign import patched
from lightning_memguard.training.facts.lightning_types import lightning_of
from lightning_memguard.training.rescue.memory import ran_out_of_memory
from lightning_memguard.training.rescue.sample_layout import Refused, refuse

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_HAS_SENT = "DistributedDataParallel cannot start a backward pass again"


def clears_otherwise(module: LightningModule) -> bool:
    """Whether a module clears gradients in a way of its own, which may not be done twice."""
    own: Any = lightning_of(module).LightningModule
    return type(module).optimizer_zero_grad is not own.optimizer_zero_grad


@contextlib.contextmanager
def hooks_once(calls: object, share: float, *, is_last: bool, again: bool) -> Iterator[None]:
    """Call the hooks before and after a backward pass once for a batch: those of its last part.

    Args:
        calls: the module of Lightning that calls hooks.
        share: of the part in the batch; hooks get the loss of the whole batch.
        is_last: whether it is the last part.
        again: whether the failed attempt has called those before the backward pass; what the module's has changed was
            put back, what those of callbacks have was not.
    """

    def filtered(call: Callable[..., Any], called: bool, trainer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "on_before_backward":
            return call(trainer, name, args[0] / share, **kwargs) if is_last and not called else None
        return call(trainer, name, *args, **kwargs) if is_last or name != "on_after_backward" else None

    names = {"_call_callback_hooks": again, "_call_lightning_module_hook": False}
    with contextlib.ExitStack() as patches:
        for name, called in names.items():
            patches.enter_context(patched(calls, **{name: partial(filtered, getattr(calls, name), called)}))
        yield


@contextlib.contextmanager
def without_experiments(loggers: Sequence[Any]) -> Iterator[None]:
    """Refuse what a step writes to its loggers by itself: each pass would write it."""

    def refused(_: object) -> Any:
        raise refuse("it writes to a logger by itself, and each part would")

    kinds = [type(each) for each in loggers]
    try:
        for each, kind in zip(loggers, kinds, strict=True):
            each.__class__ = type(
                kind.__name__, (kind,), {"experiment": property(refused), "__module__": kind.__module__}
            )
        yield
    finally:
        for each, kind in zip(loggers, kinds, strict=True):
            each.__class__ = kind


class Gradients:
    """The gradients that parameters have, and how often each was written to."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._known = [(each, each.grad, 0 if each.grad is None else each.grad._version) for each in parameters]
        self._kept: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []

    def keep(self) -> None:
        """Copy them to the host."""
        self._kept = [
            (parameter, grad, None if grad is None else grad.to("cpu", copy=True)) for parameter, grad, _ in self._known
        ]

    def put_back(self) -> None:
        """Make them as they were when they were kept, if they were."""
        with torch.no_grad():
            for parameter, grad, value in self._kept:
                parameter.grad = grad
                if grad is not None and value is not None:
                    grad.copy_(value)

    def written(self) -> set[torch.Tensor]:
        """The parameters whose gradient was added to since."""
        return {
            parameter
            for parameter, grad, version in self._known
            if parameter.grad is not grad or (grad is not None and grad._version != version)
        }


@contextlib.contextmanager
def without_gradients(parameters: set[torch.Tensor]) -> Iterator[None]:
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


class OtherRanks:
    """The other ranks see the collective calls of one step, however many parts it has.

    Attributes:
        has_sent: whether this rank has begun to send the gradients of the step.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer: Any = trainer
        self._module = module
        self.are_many = trainer.world_size > 1
        self.has_sent = False
        self._collectives = -1
        self._entering: RemovableHandle | None = None

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        model = self._trainer.strategy.model
        return model if type(model) is DistributedDataParallel else None

    def install(self) -> None:
        """Count the collective calls of each step from now on."""
        if self.are_many:
            self._entering = self._module.register_forward_pre_hook(self._count)

    def close(self) -> None:
        """Stop."""
        if self._entering is not None:
            self._entering.remove()

    def begin(self) -> None:
        """A step begins."""
        self._collectives, self.has_sent = -1, False

    def _count(self, *_: object) -> None:
        if self._collectives < 0:
            self._collectives = _calls()

    def failed(self) -> None:
        """The attempt that failed has sent the buffers: the other ranks expect them once for a batch."""
        if self._ddp is not None:
            self._ddp.require_forward_param_sync = False

    def send_buffers(self) -> None:
        """Send what the forward pass of the whole batch would; the parts send nothing before their gradients."""
        if self._ddp is not None:
            self._ddp._pre_forward()
            self.failed()

    @contextlib.contextmanager
    def alone(self, with_others: bool) -> Iterator[None]:
        """Keep gradients on this rank, unless this part's are to be sent for the whole batch."""
        if self._ddp is None or with_others:
            yield
            return
        with self._ddp.no_sync():
            yield

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Run a backward pass.

        Raises:
            Refused: it ran out of memory while it sent gradients.
        """
        self.has_sent = self._ddp is not None and self._ddp.require_backward_grad_sync
        try:
            yield
        except Exception as error:
            if self.has_sent and ran_out_of_memory(error):
                raise Refused(_HAS_SENT) from None
            raise

    def obstacle_of_strategy(self) -> str:
        """Why this strategy's steps are not done in parts; empty if they are."""
        strategy = self._trainer.strategy
        name = type(strategy).__name__
        if strategy.handles_gradient_accumulation:
            return f"{name} accumulates gradients by itself"
        alone = not self.are_many or self._ddp is not None
        return "" if alone else f"{name} talks to the other ranks while the step runs"

    def obstacle(self, *, in_backward: bool) -> str:
        """Why this rank cannot do a step again by itself, such that the others see the collective calls of one step.

        Before the backward pass, the last of the parts can make the calls that the step would have made, and no rank
        waits for one that does not come. Once DistributedDataParallel has prepared for the gradients of a step, it
        sends those that come next, which would be those of the first part.
        """
        if own := self.obstacle_of_strategy():
            return own
        if self._ddp is None or not self.are_many:
            return ""
        if self._collectives < 0 or _calls() != self._collectives:
            return "it had begun to talk to the other ranks"
        if in_backward and self._ddp.require_backward_grad_sync:
            return _HAS_SENT
        return ""


def _calls() -> int:
    """How many collective calls this rank has made; checked on gloo and NCCL."""
    group: Any = dist.group.WORLD
    return int(group._get_sequence_number_for_group())
