"""What can run one step of itself under a recorder; and a plain module in PyTorch's canonical loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
)

from lightning_memguard.core.capture.batch import Batches, tensors_in
from lightning_memguard.core.capture.fake import fake_copy, faking, isolated_rng, real_copy
from lightning_memguard.core.capture.fake_cuda import FAKE_DEVICE, FakeCudaMode, pretended_cuda
from lightning_memguard.core.capture.recorder import (
    Recorder,
    gradients_of,
    refuse_sparse,
    states_of,
    watching,
)
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.errors import CannotTraceError, MemGuardError


class Program(Protocol):
    """A training that can run a few of its steps on a copy of itself, at any batch size."""

    @property
    def device(self) -> torch.device:
        """Where the training runs."""

    @property
    def gpu(self) -> Gpu | None:
        """The GPU behind ``device``, present or pretended; None where it is no CUDA device."""

    def run(self, recorder: Recorder, batch_size: int, *, fake: bool) -> None:
        """Run two optimizer steps (or one inference) under the recorder, on fake or on real tensors."""

    def run_states(self, recorder: Recorder) -> None:
        """Only make what stays: parameters, buffers, gradients, optimizer state."""


def device_to_run_on(program: Program, *, fake: bool) -> torch.device:
    """Where a copy of the training runs: the pretended GPU, its own device, or, where that is absent, the CPU."""
    if program.gpu is None:
        return program.device
    if fake:
        return FAKE_DEVICE
    return program.device if torch.cuda.is_available() else torch.device("cpu")


# -- a plain module in PyTorch's canonical loop

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_TRUE = {"32-true": None, "bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
PRECISIONS = tuple(sorted({*_AUTOCAST, *_TRUE}))


@dataclass(frozen=True)
class LoopProgram:
    """``zero_grad``, forward, backward, ``step``: the loop that PyTorch's tutorials write, over a plain module.

    Attributes:
        model: any module; only copies of it run.
        batches: batches of any size.
        step: ``(model, batch) -> loss``.
        optimizer: ``(parameters) -> Optimizer``, or None to keep gradients only.
        device: where it runs.
        gpu: the GPU behind it.
        precision: one of Lightning's names, such as ``"bf16-mixed"``.
        training: False for one forward under ``torch.no_grad``.
    """

    model: nn.Module
    batches: Batches
    step: Callable[[Any, Any], Any]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
    device: torch.device
    precision: str = "32-true"
    training: bool = True
    gpu: Gpu | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise MemGuardError(f"precision={self.precision!r} is unknown; choose one of {', '.join(PRECISIONS)}.")

    def run(self, recorder: Recorder, batch_size: int, *, fake: bool) -> None:
        """See `Program.run`."""
        with tensors(fake=fake, gpu=self.gpu) as mode:
            module_copy = self._module_copy(mode)
            optimizer = self.optimizer(module_copy.parameters()) if self.training and self.optimizer else None
            with watching(recorder, module_copy):
                recorder.label(states_of([optimizer] if optimizer else []), "optimizer_state")
                if self.training:
                    self._train(recorder, module_copy, optimizer, batch_size, fake)
                else:
                    module_copy.eval()
                    with torch.no_grad():
                        self._step(recorder, module_copy, self._next_batch(recorder, batch_size, fake))

    def run_states(self, recorder: Recorder) -> None:
        """See `Program.run_states`."""
        with tensors(fake=True, gpu=self.gpu) as mode:
            module_copy = self._module_copy(mode)
            optimizers = [self.optimizer(module_copy.parameters())] if self.optimizer else []
            with watching(recorder, module_copy):
                step_states(recorder, module_copy, optimizers)

    def _module_copy(self, mode: FakeTensorMode | None) -> nn.Module:
        if mode is None:
            refuse_meta(self.model)
        device = device_to_run_on(self, fake=mode is not None)
        module_copy = fake_copy(self.model, mode, device) if mode else real_copy(self.model).to(device)
        dtype = _TRUE.get(self.precision)
        return module_copy.to(dtype) if dtype else module_copy

    def _batch(self, batch_size: int, fake: bool) -> Any:
        make = self.batches.fake if fake else self.batches.real
        return make(batch_size, device_to_run_on(self, fake=fake))

    def _next_batch(self, recorder: Recorder, batch_size: int, fake: bool) -> Any:
        recorder.mark("transfer")
        with recorder.paused():
            batch = self._batch(batch_size, fake)
        recorder.label(tensors_in(batch), "batch")
        return batch

    def _step(self, recorder: Recorder, module_copy: nn.Module, batch: Any) -> Any:
        recorder.mark("forward")
        dtype = _AUTOCAST.get(self.precision)
        where = device_to_run_on(self, fake=isinstance(next(module_copy.parameters(), None), FakeTensor)).type
        with torch.autocast(where, dtype) if dtype else contextlib.nullcontext():
            return self.step(module_copy, batch)

    def _train(
        self,
        recorder: Recorder,
        module_copy: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        batch_size: int,
        fake: bool,
    ) -> None:
        optimizers = [optimizer] if optimizer else []
        for index in range(2):
            recorder.mark("zero_grad", step=index)
            module_copy.zero_grad()
            batch = self._next_batch(recorder, batch_size, fake)  # a loop variable: alive until the next one comes
            loss = self._step(recorder, module_copy, batch)
            recorder.mark("backward")
            loss.backward()
            gradients = gradients_of(optimizers, module_copy)
            refuse_sparse(gradients)
            recorder.label(gradients, "gradients")
            del gradients
            recorder.mark("optimizer")
            if optimizer:
                optimizer.step()
                recorder.label(states_of(optimizers), "optimizer_state")


def refuse_meta(module: nn.Module) -> None:
    """A module on the meta device has no weights to run with, and may be too large to be given any."""
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise CannotTraceError("its parameters are on the meta device, so there is nothing to run it with")


def step_states(recorder: Recorder, module_copy: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give each trainable parameter a gradient and step each optimizer once: all that stays, without a step."""
    recorder.mark("backward", step=0)
    held = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    for parameter in {id(p): p for p in (*module_copy.parameters(), *held)}.values():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    recorder.label(gradients_of(optimizers, module_copy), "gradients")
    recorder.mark("optimizer")
    for optimizer in optimizers:
        optimizer.step()
    recorder.label(states_of(optimizers), "optimizer_state")


@contextlib.contextmanager
def tensors(*, fake: bool, gpu: Gpu | None = None) -> Iterator[FakeTensorMode | None]:
    """Run what is inside on fake tensors, or on real ones; the random state is left as it was.

    Args:
        fake: which of the two.
        gpu: what fake ``cuda`` tensors pretend to live on.
    """
    with isolated_rng():
        if not fake:
            yield None
            return
        mode = (FakeCudaMode if gpu else FakeTensorMode)(allow_non_fake_inputs=True)
        with pretended_cuda(gpu) if gpu else contextlib.nullcontext(), faking(mode):
            yield mode
