"""One rank of a pipeline: its stages, run by torch's own schedule, in one process.

The schedule (`torch.distributed.pipelining.schedules`) decides how many micro-batches are alive; here it runs on the
rank's stages alone, as a member of a process group whose other ranks do not exist. It is given the shapes that stages
pass on, which they would agree on by sending them. Private names of torch were checked on 2.13.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.optim import Optimizer

from lightning_memguard.core.capture.program import TRUE_DTYPES, LoopProgram, device_to_run_on, tensors
from lightning_memguard.core.capture.recorder import Recorder, gradients_of, states_of, watching
from lightning_memguard.core.simulation.fake import fake_copy
from lightning_memguard.core.simulation.one_rank import one_rank_of, unsharded_gradients
from lightning_memguard.errors import CannotTraceError

_STEPS = 2  # the first makes the optimizer's state
_SHARING = ("data_parallel", "tensor_parallel")


@dataclass(frozen=True)
class PipelineProgram(LoopProgram):
    """A step of one rank of a pipeline.

    Attributes: those of `LoopProgram`, whose ``model`` holds the stages of this rank, and whose batches are (inputs,
    targets) of the whole pipeline, and
        stages: all stages in order; stage ``i`` is of rank ``i % ranks``.
        rank: which rank it is.
        schedule: a class of schedule by its name, such as ``"1F1B"``.
        micro_batches: how many a batch is divided into.
        loss: ``(output, targets) -> loss`` of a micro-batch.
        shard: ``(stage, mesh)``: does to a stage what ``fully_shard`` and ``parallelize_module`` do.
        mesh: the data and tensor-parallel ranks that share each stage.
        context: makes what a step runs in, such as ``loss_parallel``.
    """

    stages: tuple[nn.Module, ...] = ()
    rank: int = 0
    schedule: str = "1F1B"
    micro_batches: int = 1
    loss: Callable[[Any, Any], Any] | None = None
    shard: Callable[[nn.Module, Any], object] | None = None
    mesh: tuple[int, int] = (1, 1)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def run(self, recorder: Recorder, batch_size: int, *, fake: bool) -> None:
        """See `Program.run`."""
        with self._group(), _given_shapes():
            mesh, passed = self._passed_on(batch_size)
            with tensors(fake=fake, gpu=self.gpu) as mode:
                parts: Any = self._module_copy(mode)
                schedule = self._schedule(parts, passed, mesh, device_to_run_on(self, fake=fake))
                optimizers = self._optimizers(parts)
                with watching(recorder, parts), _labeling(schedule, recorder, optimizers, parts):
                    recorder.label(states_of(optimizers), "optimizer_state")
                    for index in range(_STEPS):
                        recorder.mark("zero_grad", step=index)
                        parts.zero_grad()
                        given = self._given(recorder, batch_size, fake)
                        recorder.mark("forward")
                        with self.context():
                            schedule.step(*given[0], **given[1])
                        recorder.label(gradients_of(optimizers, parts), "gradients")
                        recorder.mark("optimizer")
                        for optimizer in optimizers:
                            optimizer.step()
                            recorder.label(states_of(optimizers), "optimizer_state")

    def _group(self) -> AbstractContextManager[None]:
        sharing = math.prod(self.mesh)
        return one_rank_of(self.ranks * sharing, self.rank * sharing)

    @property
    def _own(self) -> range:
        """The stages of this rank."""
        return range(self.rank, len(self.stages), self.ranks)

    def _given(self, recorder: Recorder, batch_size: int, fake: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the first stage and the last are given of the batch; others none of it."""
        first, last = 0 in self._own, len(self.stages) - 1 in self._own
        if not (first or last):
            return (), {}
        inputs, targets = self._next_batch(recorder, batch_size, fake)
        return ((inputs,) if first else ()), ({"target": targets} if last else {})

    def _passed_on(self, batch_size: int) -> tuple[Any, list[Tensor]]:
        """The mesh of all ranks; and, fake, a micro-batch as each stage gets it, and what the last one makes of it."""
        dtype = TRUE_DTYPES.get(self.precision)
        with tensors(fake=True, gpu=self.gpu) as mode, torch.no_grad():
            assert mode is not None
            device = device_to_run_on(self, fake=True)
            shape = self.ranks, *self.mesh
            mesh = device_mesh.init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", *_SHARING))
            inputs = self.batches.fake(batch_size, device)[0]
            passed = [inputs[: -(-batch_size // self.micro_batches)]]
            for stage in self.stages:
                alone = fake_copy(stage, mode, device)
                alone = alone.to(dtype) if dtype else alone
                if self.shard:
                    self.shard(alone, mesh[_SHARING])
                passed.append(alone(passed[-1]))
        if not all(isinstance(each, Tensor) for each in passed):
            raise CannotTraceError("a stage passes on something else than one tensor")
        return mesh, passed

    def _schedule(self, parts: Any, passed: list[Tensor], mesh: Any, device: torch.device) -> Any:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        def like(shape: Tensor, *, grad: bool) -> Tensor:
            return torch.empty(shape.shape, dtype=shape.dtype, device=device, requires_grad=grad)

        made = []
        for index, part in zip(self._own, parts, strict=True):
            if self.shard:
                self.shard(part, mesh[_SHARING])
            first, (before, after) = index == 0, passed[index : index + 2]
            shapes: dict[str, Any] = {
                "input_args": (like(before, grad=not first),),
                "output_args": (like(after, grad=True),),
                "input_grads": (None if first else like(before, grad=False),),
                "output_grads": (like(after, grad=False),),
            }
            known = inspect.signature(PipelineStage).parameters  # gradients' since torch 2.12
            shapes = {name: value for name, value in shapes.items() if name in known}
            group = mesh["pipeline"].get_group()
            made.append(PipelineStage(part, index, len(self.stages), device, group=group, **shapes))
        kind = get_schedule_class(self.schedule)
        several = issubclass(kind, PipelineScheduleMulti)
        if len(made) > 1 and not several:
            raise CannotTraceError(f"the schedule {self.schedule} runs one stage on each rank, not {len(made)}")
        return kind(made if several else made[0], self.micro_batches, loss_fn=self.loss)


@contextmanager
def _labeling(schedule: Any, recorder: Recorder, optimizers: Sequence[Optimizer], parts: nn.Module) -> Iterator[None]:
    """Label the gradients of each micro-batch: the next one would take them for activations."""
    with ExitStack() as exits:
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:

            def backward(*args: Any, own: Any = stage.backward_one_chunk, **kwargs: Any) -> Any:
                result = own(*args, **kwargs)
                recorder.label((*gradients_of(optimizers, parts), *unsharded_gradients(parts)), "gradients")
                return result

            exits.enter_context(mock.patch.object(stage, "backward_one_chunk", backward))
        yield


@contextmanager
def _given_shapes() -> Iterator[None]:
    """Stages know their shapes, so that the schedule need not ask their neighbors for them."""
    from torch.distributed.pipelining import schedules, stage

    modes: Any = stage

    def know(_: object, stages: list[Any], *__: object) -> None:
        for each in stages:
            each._inference_mode = modes.InferenceMode.STATIC

    base: Any = schedules._PipelineSchedule
    with ExitStack() as exits:
        if hasattr(base, "_warmup_p2p"):  # of torch 2.12 and newer
            exits.enter_context(mock.patch.object(base, "_warmup_p2p", know))
        exits.enter_context(mock.patch.object(torch.random, "fork_rng", return_value=nullcontext()))
        yield
