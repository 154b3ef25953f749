"""Programs, which run a step of themselves under a recorder; among them a plain module in PyTorch's usual loop."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.batch.batches import Batches, Epoch
from lightning_memguard.core.batch.nesting import batch_bytes, is_known, map_tensors, shapes_of, tensors_in
from lightning_memguard.core.capture.leftovers import Leftovers
from lightning_memguard.core.capture.recorder import Recorder, gradients_of, refuse_sparse, watching
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.isolation.pool import in_child
from lightning_memguard.core.simulation.constants import KnownFakeMode, give_value
from lightning_memguard.core.simulation.fake import fake_copy, isolated_rng, pyro_params_of, real_copy
from lightning_memguard.core.simulation.fake_cuda import FAKE_DEVICE, FakeCudaMode, simulated_cuda
from lightning_memguard.core.simulation.faking import faking
from lightning_memguard.core.simulation.one_rank import one_rank_of
from lightning_memguard.core.torch_port import FakeTensorMode
from lightning_memguard.core.trace.trace import Shapes
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.units import format_bytes

if TYPE_CHECKING:
    from lightning_memguard.core.trace.depth import Deepening

T = TypeVar("T")
Change = Callable[[nn.Module], None]
"""Function that changes a copy of a module."""
Context = Callable[[], contextlib.AbstractContextManager[Any]]
Around = Callable[[nn.Module, Recorder], contextlib.AbstractContextManager[Any]]
"""A copy and what records it -> the context manager that each of its training steps runs in, backward pass excluded."""
SwapOptimizer = Callable[[Optimizer], Optimizer]
"""An optimizer -> the one to use in its place, for the same parameters."""


@dataclass
class FewLayers:
    """Models that differ from a program's in how many equal layers they have.

    Attributes:
        models: with `DEPTHS` layers each.
        depth: layers of the program's own model.
        path: of the list of layers, such as ``"model.layers"``.
        known: how the step's trace grows with the layers, as far as was found; None where it could not be.
    """

    models: tuple[nn.Module, ...]
    depth: int
    path: str
    known: list[Deepening] | None = field(default_factory=list)


class Program(ABC):
    """A step that can run on a copy of its module, at any batch size, and be changed before it runs.

    Attributes:
        device: where it runs.
        gpu: the GPU behind ``device``, present or simulated; None if it is not a CUDA device.
        batches: batches of any size; several loaders that are evaluated one after the other have one each.
        precision: one of Lightning's names, such as ``"bf16-mixed"``.
        accumulate_grad_batches: batches per optimizer step.
        changes: what is done to each copy of the module before it runs.
        around: makes what each training step runs in; None for nothing.
    """

    device: torch.device
    gpu: Gpu | None
    batches: Batches | tuple[Batches, ...]
    precision: str
    accumulate_grad_batches: int | None
    changes: tuple[Change, ...]
    around: Around | None
    few: FewLayers | None = None  # the same step with less to capture

    @property
    @abstractmethod
    def trains(self) -> bool:
        """Whether it runs a backward pass and an optimizer step."""

    @abstractmethod
    def run(self, recorder: Recorder, batch_size: int, *, fake: bool) -> None:
        """Run two optimizer steps (or one inference) under the recorder, on fake or on real tensors."""

    @abstractmethod
    def run_states(self, recorder: Recorder) -> None:
        """Allocate only memory that stays: parameters, buffers, gradients, optimizer state."""

    @abstractmethod
    def inspect(self, examine: Callable[[nn.Module, str], T]) -> T:
        """Pass a function the module as it trains, and what its owner's code calls it."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the parameters; 0 if that is not known."""
        return 0

    @abstractmethod
    def setting(self, name: str, value: str | int) -> str:
        """Return the code that changes a setting of the Trainer, or of the loop in its place."""

    @abstractmethod
    def with_optimizer(self, swap: SwapOptimizer) -> Program:
        """Return the program with each optimizer replaced as soon as it is made.

        Raises:
            CannotTraceError: there is no optimizer; now or once it runs.
        """

    @property
    def precision_in_use(self) -> str:
        """One of Lightning's names, such as ``"bf16-mixed"``."""
        return self.precision

    @property
    def batches_per_step(self) -> int | None:
        """Batches an optimizer step; None if the module's own code decides."""
        return self.accumulate_grad_batches

    @property
    def families(self) -> tuple[Batches, ...]:
        """``batches``, by loader."""
        return self.batches if isinstance(self.batches, tuple) else (self.batches,)

    def expected_batch(self, batch_size: int) -> tuple[Shapes, int]:
        """Shapes and bytes of the largest batch that the step is given."""
        largest = max((without_memory(family, batch_size) for family in self.families), key=batch_bytes)
        return shapes_of(largest), batch_bytes(largest)

    def uneven_draws(self, batch_size: int, draws: Iterable[int]) -> tuple[float, tuple[int, int]]:
        """Compare batches of the largest sample alone with real ones, by their bytes.

        Returns:
            How many times as large they are as the largest of some draws (0 if there are none), and which draws are
            the least and the largest.
        """
        if not all(each.has_draws(batch_size) for each in self.families):
            return 0.0, (0, 0)
        with isolated_rng():
            drawn = {
                draw: sum(batch_bytes(each.drawn(batch_size)) for each in self.of_draw(draw).families) for draw in draws
            }
        least, most = min(drawn, key=drawn.__getitem__), max(drawn, key=drawn.__getitem__)
        stretched = sum(batch_bytes(without_memory(each, batch_size)) for each in self.families)
        return stretched / max(1, drawn[most]), (least, most)

    def with_batches(self, batches: Batches) -> Self:
        """Return the program on other batches; these are as the hooks around their transfer leave them."""
        return self.edited(batches=batches)

    def without_samples(self) -> Self:
        """Return the program on batches known by their shapes alone."""
        return self._with_families(
            lambda each: replace(each, small=_on_meta(each.small), large=_on_meta(each.large), draws=None, kinds=())
        )

    def without_draws(self) -> Self:
        """Return the program on batches stretched from one, without the samples that make other real ones."""
        return self._with_families(lambda each: replace(each, draws=None, kinds=()))

    def measures(self, batch_size: int, draw: int) -> tuple[int, int]:
        """Two numbers that the memory of a draw's samples may grow with; see `Draws`."""
        known = [each.draws.measures(batch_size, draw) for each in self.families if each.draws]
        return sum(nbytes for nbytes, _ in known), sum(squares for _, squares in known)

    def steps_of_epoch(self, batch_size: int) -> int | None:  # noqa: ARG002
        """Batches of an epoch; None if unknown."""
        return None

    def of_draw(self, number: int, epoch: Epoch | None = None) -> Self:
        """Return the program on other real batches, if there are others; with 0 on the first."""
        return self._with_families(lambda each: replace(each, draw=number, epoch=epoch)) if number else self

    def with_values(self) -> Self:
        """Return the program on fake batches that know the values of real ones, as far as these are known."""
        known = all(is_known(tensor) for each in self.families for tensor in tensors_in(each.small))
        return self._with_families(lambda each: replace(each, keep_value=give_value)) if known else self

    @functools.cached_property
    def kinds(self) -> tuple[Self, ...]:
        """The program on each kind of batch, if the data sets their sizes."""
        return tuple(self._with_families(lambda _, kind=kind: kind) for kind in self.families[0].kinds)  # type: ignore[misc]

    def of_kind(self, place: int) -> Self:
        """Return the program on one of the kinds, or itself if there are no others."""
        return self.kinds[place] if self.kinds else self

    def is_real_at(self, batch_size: int) -> bool:
        """Whether real batches of this size are ones that the user's own code made."""
        return all(each.is_real_at(batch_size) for each in self.families)

    @property
    def multiple(self) -> int:
        """Sizes of real batches are multiples of this."""
        return math.lcm(*(each.multiple for each in self.families))

    def with_bucket_views(self) -> Program | None:
        """Return the program with gradients as views of DDP's buckets; None without DDP, or if they are already."""
        return None

    def changes_shape(self, batch_size: int) -> bool:
        """Whether batches of other shapes come as well, as far as is known."""
        family = self.families[0]
        if not self.trains or len(self.families) > 1 or not family.has_draws(batch_size):
            return False
        with isolated_rng():
            own = shapes_of(family.drawn(batch_size)) if family.draw else self.expected_batch(batch_size)[0]
            drawn = (shapes_of(replace(family, draw=draw, epoch=None).drawn(batch_size)) for draw in _OTHERS)
            return any(shapes != own for shapes in drawn)

    def unfrozen(self) -> Program | None:
        """Return the program with all parameters trained; None if frozen ones stay frozen, as far as is known."""
        return None

    def with_change(self, change: Change) -> Self:
        """Return the program with each copy of the module changed before it runs."""
        return self.edited(changes=(*self.changes, change))

    def _with_families(self, change: Callable[[Batches], Batches]) -> Self:
        changed = tuple(map(change, self.families))
        return self.edited(batches=changed if isinstance(self.batches, tuple) else changed[0])

    def edited(self, **fields: object) -> Self:
        """Return the program with other attributes, such as ``precision``."""
        return replace(self, **fields)  # type: ignore[type-var]  # each program is a dataclass


_OTHERS = range(1, 21)  # draws among which a batch of another shape is looked for


def device_to_run_on(program: Program, *, fake: bool) -> torch.device:
    """Return the device that a copy runs on: the simulated GPU, its own device, or the CPU if that is absent."""
    if program.gpu is None:
        return program.device
    if fake:
        return FAKE_DEVICE
    return program.device if torch.cuda.is_available() and not in_child() else torch.device("cpu")


# -- a plain module in PyTorch's canonical loop

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_TRUE_DTYPES = {"32-true": None, "bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
PRECISIONS = tuple(sorted({*_AUTOCAST, *_TRUE_DTYPES}))


def check_precision(name: str) -> None:
    """Refuse an unknown precision.

    Raises:
        MemGuardError: it is none of `PRECISIONS`.
    """
    if name not in PRECISIONS:
        raise MemGuardError(f"precision={name!r} is unknown; choose one of {', '.join(PRECISIONS)}.")


@dataclass(frozen=True)
class LoopProgram(Program):
    """The optimizer's ``zero_grad``, forward, backward, ``step``: the loop of PyTorch's tutorials, over a plain module.

    Attributes: those of `Program`, and
        model: any module; only copies of it run.
        step: ``(model, batch) -> loss``, or the loss and what the loop's variables hold besides.
        optimizer: ``(parameters) -> Optimizer``, or None to keep gradients only.
        training: False for one forward under ``torch.no_grad``.
        accumulate_grad_batches: above 1, each batch finds the gradients of the one before.
        changes: done to each copy in its first step.
        ranks: how many ranks of a process group train it, one of which is captured; 0 if there is no such group.
        parallelize: (a copy on its device) -> what this rank trains of it, as ``fully_shard`` or `FSDP` makes it.
        context: makes the context manager that each step and its backward pass run in.
        few: the model with fewer layers, from which the step is predicted as well.
    """

    model: nn.Module
    batches: Batches
    step: Callable[[Any, Any], Any]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None
    device: torch.device
    precision: str = "32-true"
    training: bool = True
    gpu: Gpu | None = None
    accumulate_grad_batches: int = 1
    changes: tuple[Change, ...] = ()
    ranks: int = 0
    parallelize: Callable[[nn.Module], nn.Module] | None = None
    context: Context = contextlib.nullcontext
    around: Around | None = None
    few: FewLayers | None = None

    def __post_init__(self) -> None:
        check_precision(self.precision)

    @property
    @override
    def trains(self) -> bool:
        return self.training

    @override
    def inspect(self, examine: Callable[[nn.Module, str], T]) -> T:
        return examine(self.model, "model")

    @override
    def setting(self, name: str, value: str | int) -> str:
        return f"an optimizer step every {value} batches" if name == "accumulate_grad_batches" else f'{name}="{value}"'

    @override
    def with_optimizer(self, swap: SwapOptimizer) -> LoopProgram:
        make = self.optimizer
        if make is None:
            raise CannotTraceError("there is no optimizer")
        return replace(self, optimizer=lambda parameters: swap(make(parameters)), few=None)

    @override
    def edited(self, **fields: object) -> Self:
        return super().edited(**fields if fields.keys() == {"batches"} else {"few": None, **fields})

    @override
    def run(self, recorder: Recorder, batch_size: int, *, fake: bool) -> None:
        with self._group(), tensors(fake=fake, gpu=self.gpu) as mode:
            module_copy = self._module_copy(mode)
            optimizers = self._optimizers(module_copy) if self.training else []
            recorder.follow(mode)
            with pyro_params_of(module_copy, self.model), watching(recorder, module_copy):
                self._begin(recorder, module_copy)
                recorder.label_held_by(optimizers)
                if self.training:
                    self._train(recorder, module_copy, optimizers, batch_size, fake)
                else:
                    module_copy.eval()
                    with torch.no_grad(), self.context():
                        self._step(recorder, module_copy, self._next_batch(recorder, batch_size, fake), fake=fake)

    @override
    def run_states(self, recorder: Recorder) -> None:
        with self._group(), tensors(fake=True, gpu=self.gpu) as mode:
            module_copy = self._module_copy(mode)
            optimizers = self._optimizers(module_copy)
            with watching(recorder, module_copy):
                self._begin(recorder, module_copy)
                step_states(recorder, module_copy, optimizers)

    def _begin(self, recorder: Recorder, module_copy: nn.Module) -> None:
        """Prepare a copy that is recorded now; subclasses attach their wrappers."""

    def _optimizers(self, module_copy: nn.Module) -> list[Optimizer]:
        return [self.optimizer(module_copy.parameters())] if self.optimizer else []

    def _module_copy(self, mode: FakeTensorMode | None) -> nn.Module:
        if mode is None:
            refuse_meta(self.model)
        device = self._place_of_copy(fake=mode is not None)
        module_copy = fake_copy(self.model, mode, device) if mode else real_copy(self.model).to(device)
        dtype = _TRUE_DTYPES.get(self.precision)
        module_copy = module_copy.to(dtype) if dtype else module_copy
        return self.parallelize(module_copy) if self.parallelize else module_copy

    def _place_of_copy(self, *, fake: bool) -> torch.device:
        return device_to_run_on(self, fake=fake)

    def _group(self) -> contextlib.AbstractContextManager[None]:
        return one_rank_of(self.ranks) if self.ranks else contextlib.nullcontext()

    def _next_batch(self, recorder: Recorder, batch_size: int, fake: bool) -> Any:
        recorder.mark("transfer")
        device = device_to_run_on(self, fake=fake)
        with recorder.paused():
            batch = (self.batches.fake if fake else self.batches.real)(batch_size, device)
        recorder.label(tensors_in(batch), "batch")
        return batch

    def _step(
        self, recorder: Recorder, module_copy: nn.Module, batch: object, *, fake: bool, first: bool = True
    ) -> Any:
        if self.accumulate_grad_batches > 1:
            _give_gradients(recorder, module_copy)
        recorder.mark("forward")
        with self._autocast(fake=fake):
            for change in self.changes if first else ():
                change(module_copy)
            around = self.around and self.training and self.around(module_copy, recorder)
            with around or contextlib.nullcontext():
                return self.step(module_copy, batch)

    def _autocast(self, *, fake: bool) -> contextlib.AbstractContextManager[Any]:
        dtype = _AUTOCAST.get(self.precision)
        where = device_to_run_on(self, fake=fake).type
        return torch.autocast(where, dtype) if dtype else contextlib.nullcontext()

    @property
    def _least_steps(self) -> int:
        return 2

    def _train(
        self, recorder: Recorder, module_copy: nn.Module, optimizers: Sequence[Optimizer], batch_size: int, fake: bool
    ) -> None:
        leftovers, counters, last = Leftovers(recorder, self._least_steps), recorder.counters, -1
        kept: list[object] = []  # in the loop's variables, until the next forward pass has returned
        sizes: list[int] = []  # of what the model returns
        hooked = _to_be_hooked(recorder, module_copy)
        hook = hooked.register_forward_hook(lambda *call: sizes.append(batch_bytes(call[-1])))
        for index in itertools.count():
            counters.note(optimizers, module_copy)
            if last < 0:
                leftovers.note()
                if index >= self._least_steps and leftovers.are_known(optimizers):
                    with recorder.paused():
                        last = index + counters.move(optimizers, module_copy)
            if index == last:
                break
            recorder.mark("zero_grad", step=index)
            for optimizer in optimizers:
                optimizer.zero_grad()
            batch = self._next_batch(recorder, batch_size, fake)  # alive until the next, as a loop variable is
            with self.context():
                loss = self._step(recorder, module_copy, batch, fake=fake, first=index == 0)
                if index == 0:
                    hook.remove()
                    if isinstance(loss, tuple):
                        hooked.register_forward_hook(lambda *_: kept.clear())
                    elif self.gpu is not None:  # whose figures have a range: the loop may keep what the model returns
                        recorder.expect(max(sizes, default=0), "activations", at_most=True)
                if isinstance(loss, tuple):
                    loss, *kept[:] = loss
                recorder.mark("backward")
                loss.backward()
            gradients = gradients_of(optimizers, module_copy)
            refuse_sparse(gradients)
            recorder.label(gradients, "gradients")
            del gradients
            recorder.mark("optimizer")
            for optimizer in optimizers:
                optimizer.step()
                recorder.label_held_by(optimizers)
        if leftovers.bytes_per_batch:
            left = format_bytes(leftovers.bytes_per_batch)
            recorder.assume(f"each step leaves {left} behind; what more steps leave is not included")


def _to_be_hooked(recorder: Recorder, module_copy: nn.Module) -> nn.Module:
    """Return the module, or another: hooks of what is compiled are compiled, too, and it again once they are gone."""
    outside = not recorder.compiled or port.compiler_of_module(module_copy) is not None
    return module_copy if outside else nn.Identity()


def _give_gradients(recorder: Recorder, module_copy: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
    held = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    for parameter in {id(p): p for p in (*module_copy.parameters(), *held)}.values():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    recorder.label(gradients_of(optimizers, module_copy), "gradients")


def without_memory(batches: Batches, batch_size: int) -> Any:
    """A batch on the meta device."""
    return batches.of(batch_size, lambda shape, like: torch.empty(shape, dtype=like.dtype, device="meta"))


def _on_meta(batch: object) -> object:
    return map_tensors(batch, lambda tensor: tensor.to("meta"))


def refuse_meta(module: nn.Module) -> None:
    """A module on the meta device has no weights to run with, and may be too large to be given any."""
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise CannotTraceError("its parameters are on the meta device, so there is nothing to run it with")


def step_states(recorder: Recorder, module_copy: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Give each trainable parameter a gradient and step each optimizer once: allocates all that stays after a step."""
    recorder.mark("backward", step=0)
    _give_gradients(recorder, module_copy, optimizers)
    recorder.mark("optimizer")
    for optimizer in optimizers:
        optimizer.step()
    recorder.label_held_by(optimizers)


@contextlib.contextmanager
def tensors(*, fake: bool, gpu: Gpu | None = None) -> Iterator[FakeTensorMode | None]:
    """Run what is inside on fake tensors, or on real ones; the random state is left as it was.

    Args:
        fake: which of the two.
        gpu: the GPU to simulate for fake ``cuda`` tensors.
    """
    with isolated_rng():
        if not fake:
            with torch.compiler.set_stance("force_eager"):  # a child cannot build kernels
                yield None
            return
        mode = (FakeCudaMode if gpu else KnownFakeMode)(allow_non_fake_inputs=True)
        with simulated_cuda(gpu) if gpu else contextlib.nullcontext(), faking(mode):
            yield mode
