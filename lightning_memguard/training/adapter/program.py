"""Trainer + module -> what one training (or validation, test, prediction) step runs, in Lightning's own order.

The order is not written down here a second time: the shadow Trainer runs a copy of the module through Lightning's own
loops for a few batches, under the recorder.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_memguard.core.batch.batches import Batches
from lightning_memguard.core.capture.capture import CaptureFailedError, isolated
from lightning_memguard.core.capture.program import device_to_run_on, refuse_meta, step_states, tensors
from lightning_memguard.core.capture.recorder import Recorder, call_with_overrides, watching
from lightning_memguard.core.simulation.fake import fake_copy, pyro_params_of, real_copy
from lightning_memguard.core.torch_port import tree_leaves, tree_map
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.adapter import callbacks
from lightning_memguard.training.adapter.no_collectives import no_collectives
from lightning_memguard.training.adapter.shadow import LightningStep, Shadow, StepsDone, lending_optimizers
from lightning_memguard.training.facts import lightning_port as lightning
from lightning_memguard.training.facts.lightning_types import is_a, is_deepspeeds, wraps_in_ddp
from lightning_memguard.training.facts.ranks import attempt

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

    from lightning_memguard.core.capture.program import SwapOptimizer
    from lightning_memguard.core.layers.layers import LayerTable
    from lightning_memguard.core.torch_port import FakeTensorMode

T = TypeVar("T")


class LightningProgram(LightningStep):
    """A `LightningStep` that runs on copies of its module."""

    @property
    def precision_in_use(self) -> str:
        """The precision asked for, else the Trainer's."""
        return str(self.precision or self.trainer.precision)

    @property
    def batches_per_step(self) -> int | None:
        """Micro-batches a step; None under manual optimization."""
        if not getattr(self.module, "automatic_optimization", True):
            return None
        return int(self.accumulate_grad_batches or self.trainer.accumulate_grad_batches)

    @functools.cached_property
    def accumulating(self) -> LightningProgram:
        """The program with gradients of earlier batches in its step; itself if it has them."""
        return self if (self.accumulate_grad_batches or 1) > 1 else replace(self, accumulate_grad_batches=2)

    @override
    def inspect(self, examine: Callable[[nn.Module, str], T]) -> T:
        # ``configure_model`` and ``setup`` may make parts of the module.
        try:
            return isolated(lambda: self._inspect_copy(examine))
        except CaptureFailedError:
            return examine(self.module, "self")

    @property
    @override
    def held_bytes(self) -> int:
        parameters: Iterable[Any] = () if self.layout else self.module.parameters()  # ranks that shard have a part
        return sum(each.nbytes for each in parameters if not nn.parameter.is_lazy(each))

    def _inspect_copy(self, examine: Callable[[nn.Module, str], T]) -> T:
        found: list[T] = []

        def show(module_copy: nn.Module) -> None:
            found.append(examine(module_copy, "self"))
            raise StepsDone

        self.with_change(show).run_states(Recorder(self.device.type))
        return found[0]

    @override
    def setting(self, name: str, value: str | int) -> str:
        return f'Trainer({name}="{value}")' if isinstance(value, str) else f"Trainer({name}={value})"

    @override
    def with_optimizer(self, swap: SwapOptimizer) -> LightningProgram:
        def change(module_copy: Any) -> None:
            configure = module_copy.configure_optimizers
            module_copy.configure_optimizers = lambda: _swap_optimizers(configure(), swap)

        return self.with_change(change)

    @override
    def with_bucket_views(self) -> LightningProgram | None:
        if not wraps_in_ddp(self.strategy):
            return None
        from lightning_memguard.training.strategies import ddp

        return ddp.with_bucket_views(self)

    @override
    def unfrozen(self) -> LightningProgram | None:
        others = getattr(self.trainer, "callbacks", ())
        if not self.trains or not callbacks.may_unfreeze(others, self.module, self.trainer.max_epochs):
            return None
        return self.with_change(callbacks.unfreeze)

    @override
    def changes_shape(self, batch_size: int) -> bool:
        """A second epoch follows a last batch that may be smaller; torch.compile compiles a single sample by itself."""
        count = self.batches_per_epoch if self.trains else None
        samples, batches = (count(1), count(batch_size)) if count else (None, None)
        rest = samples % batch_size if samples and batches and samples < batches * batch_size else 0
        again = self.trainer.max_epochs != 1 and self.steps_of_epoch(batch_size) == batches
        return (rest > 1 and again) or super().changes_shape(batch_size)

    @override
    def with_batches(self, batches: Batches) -> LightningProgram:
        return replace(self, batches=batches, transferred=True)

    @override
    def run(self, recorder: Recorder, batch_size: int, *, fake: bool) -> None:
        with self._stage(recorder, batch_size, fake) as (shadow, module_copy):
            with contextlib.suppress(StepsDone):
                shadow.run(module_copy, self.families, fake=fake)
            if self.trains:
                lightning.logged_values(shadow.trainer).batch = None  # as at the end of an epoch
                shadow.marker.end_epoch(shadow.trainer, module_copy)
        if self.stage == "fit" and not recorder.ran_backward:
            note = "training_step led to no backward pass (did it return None?): its memory is not included"
            recorder.assume(note)

    def layer_table(self, batch_size: int) -> LayerTable:
        """Return the memory and FLOPs of each layer in the first step, called as Lightning calls it."""
        from lightning_memguard.core.layers.layers import table_of

        found: list[LayerTable] = []
        recorder = Recorder(self.device.type)
        whole = replace(self, layout=self.layout.whole) if self.layout else self
        with whole._stage(recorder, batch_size, True, recorded=False) as (shadow, module_copy):
            hook = _STEP_HOOKS[self.stage]
            step = getattr(module_copy, hook)

            def make_table(batch: object, *rest: object) -> None:
                found.append(table_of(module_copy, batch, batch_size, lambda _, given: step(given, *rest), self.gpu))
                raise StepsDone

            setattr(module_copy, hook, make_table)
            shadow.run(module_copy, self.families, fake=True)
        if not found:
            raise CannotTraceError(f"{type(self.module).__name__}.{hook} was not called.")
        return found[0]

    @override
    def run_states(self, recorder: Recorder) -> None:
        size = self.families[0].small_size
        with self._stage(recorder, size, True) as (shadow, module_copy):
            if self.stage != "fit":
                shadow.evaluate(module_copy, [])
                return

            def step_and_stop() -> None:
                optimizer: Any
                for optimizer in shadow.trainer.optimizers:
                    if is_deepspeeds(optimizer):
                        from lightning_memguard.training.strategies import deepspeed

                        optimizer.step = functools.partial(deepspeed.step_partitions, optimizer)
                step_states(recorder, module_copy, shadow.trainer.optimizers)
                raise StepsDone

            shadow.marker.on_ready = step_and_stop
            shadow.trainer.fit(module_copy, train_dataloaders=[])

    @contextlib.contextmanager
    def _stage(
        self, recorder: Recorder, batch_size: int, fake: bool, *, recorded: bool = True
    ) -> Iterator[tuple[Shadow, LightningModule]]:
        """The shadow Trainer and the module's copy; nothing they do is seen outside. Ends at `StepsDone`."""
        with (
            self.layout.one_rank() if self.layout else no_collectives(),
            lightning.preserve_loader_classes(),
            tensors(fake=fake, gpu=self.gpu) as mode,
            lending_optimizers(self.trainer),
            ExitStack() as watch,
        ):
            if mode is None:
                refuse_meta(self.module)
            recorder.follow(mode)
            device = device_to_run_on(self, fake=fake)
            on_host = self.layout is not None and self.layout.begins_on_host
            module_copy = self._copy_module(mode, torch.device("cpu") if on_host else device, batch_size)
            watch.enter_context(pyro_params_of(module_copy, self.module))

            def start(model: nn.Module) -> None:
                for change in self.changes:
                    change(model)
                if self.around and self.trains:
                    _run_inside(self.around(model, recorder), model)
                watch.enter_context(watching(recorder, model) if recorded else _ReadableTotals())
                if recorded:
                    self._record_surroundings(recorder, model, shadow)

            shadow = Shadow(self, device, recorder, start, batch_size)
            if recorded:
                shadow.collect(module_copy, mode)
            for path, child in self.module.named_modules():
                for name in [name for name, value in vars(child).items() if value is self.trainer]:
                    vars(module_copy.get_submodule(path))[name] = shadow.trainer
            with contextlib.suppress(StepsDone):
                yield shadow, module_copy

    def _copy_module(self, mode: FakeTensorMode | None, device: torch.device, batch_size: int) -> LightningModule:
        """A copy whose hooks that prepare the run, or need other ranks, do nothing."""
        instead: dict[int, object] = {id(self.trainer): None}
        if self.layout is not None:
            self.layout.refuse_divided(self.module)
            instead[id(lightning.mesh_of(self.module))] = None
        module_copy: Any = (
            fake_copy(self.module, mode, device, instead) if mode else real_copy(self.module, instead).to(device)
        )
        _copy_optimizers(self.module, module_copy)
        lightning.set_batch_size(module_copy, None, batch_size)
        module_copy.configure_callbacks = lambda: []  # noqa: PIE807 - Lightning may read its __code__
        module_copy.prepare_data = lambda: None
        if is_a(self.strategy, "ModelParallelStrategy") and self.layout is None:
            module_copy.configure_model = lambda: None  # it shards, and needs the other ranks for that
        if self.transferred:
            module_copy.on_before_batch_transfer = module_copy.on_after_batch_transfer = lambda batch, _: batch
        if self.setup_stage:
            setup = module_copy.setup
            module_copy.setup = lambda stage: setup(stage=type(stage)(self.setup_stage))
        return module_copy  # type: ignore[no-any-return]

    def _record_surroundings(self, recorder: Recorder, model: nn.Module, shadow: Shadow) -> None:
        """Record what the run has on the device besides the module's own tensors."""
        is_fit = self.stage == "fit"
        if wraps_in_ddp(self.strategy) and (is_fit or not self.setup_stage):  # a fit's validation runs in its wrapper
            from lightning_memguard.training.strategies import ddp

            ddp.attach(self.strategy, model, recorder, is_fit=is_fit)
        if self.callback_bytes:
            recorder.keep(self.callback_bytes, "callbacks")
        recorder.mark_held()
        others: Any = self.trainer
        shadow.marker.averages += callbacks.averages(others.callbacks, self.device, model) if is_fit else []
        pruning = [each for each in others.callbacks if is_fit and is_a(each, "ModelPruning")]
        pruners = attempt(lambda: [callbacks.Pruner(each, self.module, model, recorder) for each in pruning])
        shadow.marker.pruners = pruners.value or []
        for average in shadow.marker.averages:
            recorder.label(average.tensors, "callbacks")


def _run_inside(around: contextlib.AbstractContextManager[Any], model: Any) -> None:
    """Run each training step of a copy in a context, which can be entered again and again."""
    step = model.training_step

    @functools.wraps(step)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        with around:
            return step(*args, **kwargs)

    model.training_step = training_step


class _ReadableTotals(TorchFunctionMode):
    """Mode in which Lightning's loops can read the totals that they add up on the device, as `watching` does."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        return call_with_overrides(func, args, kwargs or {})


_STEP_HOOKS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}


def _swap_optimizers(configured: object, swap: SwapOptimizer) -> Any:
    """Replace the optimizers that ``configure_optimizers`` returned; its schedulers set the rates of the new ones."""
    others = {id(old): swap(old) for old in tree_leaves(configured) if isinstance(old, Optimizer)}
    if not others:
        raise CannotTraceError("there is no optimizer")
    for scheduler in tree_leaves(configured):
        if id(getattr(scheduler, "optimizer", None)) in others:
            scheduler.optimizer = others[id(scheduler.optimizer)]
    return tree_map(lambda leaf: others.get(id(leaf), leaf), configured)


def _copy_optimizers(module: LightningModule, module_copy: LightningModule) -> None:
    """Rebind the optimizers that LightningCLI set on the module to the copy's parameters.

    They are in a bound partial, which a deep copy shares: the copy would step the user's own.
    """
    partial = lightning.optimizers_of_cli(module_copy)
    if partial is None:
        return
    memo = {id(mine): theirs for mine, theirs in zip(module.parameters(), module_copy.parameters(), strict=True)}
    own = functools.partial(partial.func, *partial.args, **copy.deepcopy(partial.keywords, memo))
    bound = types.MethodType(functools.update_wrapper(own, partial.func), module_copy)
    module_copy.configure_optimizers = bound  # type: ignore[method-assign]
