"""Trainer + module -> what one training (or validation, test, prediction) step runs, in Lightning's own order.

The order is not written down here a second time: a second Trainer of the same package, the shadow Trainer, runs a copy
of the module through Lightning's own loops for a few batches, under the recorder. It has the user's settings and none
of the user's loggers, callbacks, checkpoints or data.

Private names of Lightning are read in this folder. Checked on 2.5.0 to 2.6.6.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import itertools
import logging
import operator
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memguard.core.capture.batch import Batches, batch_bytes, shapes_of, tensors_in
from lightning_memguard.core.capture.fake import fake_copy, real_copy
from lightning_memguard.core.capture.program import (
    SwapOptimizer,
    device_to_run_on,
    largest_batch,
    refuse_meta,
    shapes_alone,
    step_states,
    tensors,
)
from lightning_memguard.core.capture.recorder import (
    Recorder,
    answered,
    gradients_of,
    refuse_sparse,
    states_of,
    watching,
)
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.layers.layers import LayerTable, table_of
from lightning_memguard.core.trace.trace import Shapes
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.adapter import callbacks, ddp
from lightning_memguard.training.adapter.ddp import attach, steps_until_steady
from lightning_memguard.training.adapter.lightning_types import is_a, lightning_of
from lightning_memguard.training.adapter.no_collectives import no_collectives

# Each optimizer's first step makes its state, and its second runs with it. Those stepped by hand may step seldom.
_STEPS = 2
_MOST_BATCHES = 16
# What a step without a backward pass leaves behind is known after the second: the third runs beside all of it.
_EVALUATED = 3


T = TypeVar("T")
Stage = Literal["fit", "validate", "test", "predict"]


class _StepsDone(Exception):  # noqa: N818 - it is no error, it ends a loop
    """Ends the shadow's run after the last step worth watching."""


@dataclass(frozen=True)
class LightningProgram:
    """What a Trainer runs of a LightningModule, runnable on copies.

    Attributes:
        trainer: the user's Trainer; its settings are read, nothing is changed.
        module: the user's LightningModule; only copies of it run.
        batches: batches of any size, as the loader would collate them; several loaders that are evaluated one after
            the other have one each.
        device: where the run will be.
        batches_per_epoch: how many batches the loader holds at a size, or None where it has no length.
        datamodule: the user's LightningDataModule, if any.
        accumulate_grad_batches: micro-batches a step (default: the Trainer's).
        gpu: the GPU behind the device.
        stage: what runs; all but ``"fit"`` without a backward pass.
        setup_stage: what the module's ``setup`` is told (default: the same): a fit validates a module set up to fit.
        resident_blocks: blocks, by part and bytes, that stand on the device all the while and are none of the module's.
        strategy: the user's, where it makes several processes train together.
        transferred: the batches are as the hooks around their transfer left them, which do not run again.
        precision: another precision than the Trainer's, such as ``"bf16-mixed"``; empty to keep that one.
        changes: what is done to each copy before it is watched and before it has optimizers.
        seen: by batch size, the shapes and bytes of the batch that the step was given.
    """

    trainer: Any
    module: Any
    batches: Batches | tuple[Batches, ...]
    device: torch.device
    batches_per_epoch: Callable[[int], int | None] | None = None
    datamodule: Any = None
    accumulate_grad_batches: int | None = None
    gpu: Gpu | None = None
    stage: Stage = "fit"
    setup_stage: str = ""
    resident_blocks: tuple[tuple[str, int], ...] = ()
    strategy: Any = None
    transferred: bool = False
    precision: str = ""
    changes: tuple[Callable[[Any], None], ...] = ()
    seen: dict[int, tuple[Shapes, int]] = field(default_factory=dict, compare=False)

    @property
    def families(self) -> tuple[Batches, ...]:
        """``batches``, by loader."""
        return self.batches if isinstance(self.batches, tuple) else (self.batches,)

    # What follows: see `lightning_memguard.core.capture.program.Program`.

    @property
    def trains(self) -> bool:
        """Whether it runs a backward pass and an optimizer step."""
        return self.stage == "fit"

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

    def inspect(self, examine: Callable[[nn.Module, str], T]) -> T:
        """Pass a function the module as ``configure_model`` and ``setup`` make it, and ``"self"``."""
        found: list[T] = []

        def show(module_copy: nn.Module) -> None:
            found.append(examine(module_copy, "self"))
            raise _StepsDone

        with contextlib.suppress(Exception):
            self.with_change(show).run_states(Recorder(self.device.type))
        return found[0] if found else examine(self.module, "self")

    def expected_batch(self, batch_size: int) -> tuple[Shapes, int]:
        """Shapes and bytes of the batch that the step was given, else of what its loaders give."""
        return self.seen.get(batch_size) or largest_batch(self.families, batch_size)

    def setting(self, name: str, value: str | int) -> str:
        """What to write to change a setting of the Trainer."""
        return f'Trainer({name}="{value}")' if isinstance(value, str) else f"Trainer({name}={value})"

    def with_batches(self, batches: Batches) -> LightningProgram:
        """The same step on other batches, which come as the hooks around their transfer leave them."""
        return replace(self, batches=batches, transferred=True)

    def without_samples(self) -> LightningProgram:
        """The same on batches known by their shapes alone."""
        bare = tuple(map(shapes_alone, self.families))
        return replace(self, batches=bare if isinstance(self.batches, tuple) else bare[0])

    def with_precision(self, precision: str) -> LightningProgram:
        """The same in another precision."""
        return replace(self, precision=precision, seen={})

    def with_accumulation(self, batches: int) -> LightningProgram:
        """The same with an optimizer step every so many batches."""
        return replace(self, accumulate_grad_batches=batches, seen={})

    def with_optimizer(self, swap: SwapOptimizer) -> LightningProgram:
        """The same with each optimizer replaced as soon as ``configure_optimizers`` makes it."""

        def change(module_copy: Any) -> None:
            configure = module_copy.configure_optimizers
            module_copy.configure_optimizers = lambda: _swap_optimizers(configure(), swap)

        return self.with_change(change)

    def with_bucket_views(self) -> LightningProgram | None:
        """The same with gradients as views of DDP's buckets; None without DDP, or where they are."""
        if not ddp.wraps_in_ddp(self.strategy) or ddp.Arguments.of(self.strategy).gradient_as_bucket_view:
            return None
        return replace(self, strategy=ddp.with_bucket_views(self.strategy), seen={})

    def with_change(self, change: Callable[[nn.Module], None]) -> LightningProgram:
        """The same with each copy changed before it is watched and before it has optimizers."""
        return replace(self, changes=(*self.changes, change), seen={})

    def run(self, recorder: Recorder, batch_size: int, *, fake: bool) -> None:
        """See `lightning_memguard.core.capture.program.Program`."""
        with self._stage(recorder, batch_size, fake) as (shadow_trainer, module_copy), contextlib.suppress(_StepsDone):
            self._run(shadow_trainer, module_copy, recorder, batch_size, fake)
        if self.stage == "fit" and not recorder.ran_backward:
            recorder.assumptions[
                "training_step led to no backward pass (did it return None?): what one takes is missing"
            ] = None

    def _run(self, shadow_trainer: Any, module_copy: Any, recorder: Recorder, batch_size: int, fake: bool) -> None:
        kind = _SizedLoader if self.batches_per_epoch else _Loader
        loaders = [kind(self, each, recorder, batch_size, fake) for each in self.families]
        marker = shadow_trainer.callbacks[0]
        marker.batch_size = batch_size
        for loader in loaders:
            loader.before_batch = marker.before_batch
        if self.stage == "fit":
            shadow_trainer.fit(module_copy, train_dataloaders=loaders[0])
        else:
            self._evaluate(shadow_trainer, module_copy, loaders)

    def layer_table(self, batch_size: int) -> LayerTable:
        """What each layer holds, keeps and computes in the first step, called as Lightning calls it."""
        found: list[LayerTable] = []
        recorder = Recorder(self.device.type)
        with self._stage(recorder, batch_size, True, watched=False) as (shadow_trainer, module_copy):
            hook = _STEP_HOOKS[self.stage]
            step = getattr(module_copy, hook)

            def told(batch: Any, *rest: Any) -> None:
                found.append(table_of(module_copy, batch, batch_size, lambda _, given: step(given, *rest), self.gpu))
                raise _StepsDone

            setattr(module_copy, hook, told)
            with contextlib.suppress(_StepsDone):
                self._run(shadow_trainer, module_copy, recorder, batch_size, True)
        if not found:
            raise CannotTraceError(f"{type(self.module).__name__}.{hook} was not called.")
        return found[0]

    def run_states(self, recorder: Recorder) -> None:
        """See `lightning_memguard.core.capture.program.Program`."""
        size = self.families[0].small_size
        with self._stage(recorder, size, True) as (shadow_trainer, module_copy), contextlib.suppress(_StepsDone):
            if self.stage == "fit":
                shadow_trainer.callbacks[0].on_ready = lambda: _only_states(recorder, module_copy, shadow_trainer)
                shadow_trainer.fit(module_copy, train_dataloaders=[])
            else:
                self._evaluate(shadow_trainer, module_copy, [])

    def _evaluate(self, shadow_trainer: Any, module_copy: Any, loaders: list[Any]) -> None:
        marker = shadow_trainer.callbacks[0]
        marker.samples = (self.batches_per_epoch or _nothing)(1) or 0
        marker.most_batches = getattr(self.trainer, f"limit_{_LIMITS[self.stage]}_batches")
        marker.loaders = len(loaders)
        if self.batches_per_epoch and len(loaders) == 1:
            marker.batches = _limited(self.batches_per_epoch(marker.batch_size), marker.most_batches)
        # turning metrics into numbers, at the end of each loader, needs values
        shadow_trainer._logger_connector.update_eval_epoch_metrics = dict  # checked on 2.5.0 to 2.6.6
        if self.stage == "predict":
            shadow_trainer.predict(
                module_copy, loaders, return_predictions=self.trainer.predict_loop.return_predictions
            )
        else:
            getattr(shadow_trainer, self.stage)(module_copy, loaders, verbose=False)

    @contextlib.contextmanager
    def _stage(
        self, recorder: Recorder, batch_size: int, fake: bool, *, watched: bool = True
    ) -> Iterator[tuple[Any, Any]]:
        """The shadow Trainer and the copy, in a quiet place where nothing they do is seen outside."""
        pl = lightning_of(self.module)
        with quiet(), no_collectives(), tensors(fake=fake, gpu=self.gpu) as mode, ExitStack() as watch:
            if mode is None:
                refuse_meta(self.module)
            instead = {id(self.trainer): None}
            device = device_to_run_on(self, fake=fake)
            module_copy: Any = (
                fake_copy(self.module, mode, device, instead) if mode else real_copy(self.module, instead).to(device)
            )
            _give_optimizers(self.module, module_copy)
            _set_batch_size(module_copy, batch_size)
            module_copy.configure_callbacks = _no_callbacks
            module_copy.prepare_data = _nothing
            if is_a(self.strategy, "ModelParallelStrategy"):
                module_copy.configure_model = _nothing  # it shards, and wants the other ranks for that
            if self.transferred:
                module_copy.on_before_batch_transfer = module_copy.on_after_batch_transfer = _first
            if self.setup_stage:
                module_copy.setup = _set_up_as(module_copy.setup, self.setup_stage)

            def start(model: nn.Module) -> None:
                for change in self.changes:
                    change(model)
                if not watched:
                    watch.enter_context(_Answers())
                    return
                watch.enter_context(watching(recorder, model))
                if self.stage == "fit" or self.setup_stage == "":  # a fit's own validation runs in its wrapper
                    attach(self.strategy, model, recorder, fits=self.stage == "fit")
                for part, nbytes in self.resident_blocks:
                    recorder.keep(nbytes, part)
                for average in callbacks.averages(self.trainer, self.device, model) if self.stage == "fit" else ():
                    recorder.label(average.tensors, "callbacks")
                    shadow_trainer.callbacks[0].averages.append(average)

            shadow_trainer = _make_shadow_trainer(pl, self, device, recorder, start)
            yield shadow_trainer, module_copy


def _make_shadow_trainer(
    pl: Any, program: LightningProgram, device: torch.device, recorder: Recorder, start: Callable[[nn.Module], None]
) -> Any:
    """A Trainer with the user's settings and none of the user's loggers, callbacks or checkpoints."""
    user = program.trainer
    environments = importlib.import_module(f"{pl.__name__}.plugins.environments")
    dummy = importlib.import_module(f"{pl.__name__}.loggers.logger").DummyLogger
    shadow_trainer = _shadow_trainer_class(pl)(
        accelerator="cpu",
        strategy=_strategy_class(pl)(device, start, user.world_size),
        plugins=[environments.LightningEnvironment(), _precision_of(pl, program)],
        logger=dummy() if user.loggers else False,
        callbacks=[_phase_marker_class(pl)(program, recorder)],
        max_epochs=user.max_epochs if user.max_epochs and user.max_epochs > 0 else 1000,
        max_steps=max(user.max_steps, 2) if user.max_steps > 0 else -1,
        # a third micro-batch would run exactly as the second does
        accumulate_grad_batches=min(program.accumulate_grad_batches or user.accumulate_grad_batches, 2),
        gradient_clip_val=user.gradient_clip_val,
        gradient_clip_algorithm=user.gradient_clip_algorithm,
        limit_val_batches=0 if program.stage == "fit" else 1.0,
        num_sanity_val_steps=0,
        inference_mode=False,  # takes as much as no_grad, under which operators come to the recorder taken apart
        detect_anomaly=user._detect_anomaly,  # checked on 2.5.0 to 2.6.6
        log_every_n_steps=1 << 30,  # turning metrics into numbers needs values
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=user.default_root_dir,
    )
    shadow_trainer.memguard_user = user
    shadow_trainer.datamodule = None if program.transferred else _idle_datamodule(program.datamodule)
    return shadow_trainer


def _shadow_trainer_class(pl: Any) -> Any:
    """A Trainer class that answers reads of the user's callbacks and own attributes as the user's Trainer does."""

    class ShadowTrainer(pl.Trainer):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or "memguard_user" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self.__dict__["memguard_user"], name)

    def users(name: str) -> property:
        own = getattr(pl.Trainer, name)
        return property(lambda self: getattr(self.__dict__["memguard_user"], name) if self.set_up else own.fget(self))

    ShadowTrainer.set_up = property(lambda self: "memguard_user" in self.__dict__)
    for name in ("checkpoint_callback", "checkpoint_callbacks", "early_stopping_callback", "early_stopping_callbacks"):
        setattr(ShadowTrainer, name, users(name))
    return ShadowTrainer


def _strategy_class(pl: Any) -> Any:
    """One device, which is never touched: the model is there already, or is fake."""

    class InPlace(pl.strategies.SingleDeviceStrategy):  # type: ignore[misc]
        def __init__(self, device: torch.device, start: Callable[[nn.Module], None], ranks: int) -> None:
            super().__init__(device=device)
            self.start = start
            self.ranks = ranks

        def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
            """What all ranks would give is as large as this for each of them."""
            return tensor if self.ranks == 1 else torch.stack([tensor] * self.ranks)

        def setup_environment(self) -> None:
            pass  # asks an accelerator for the device, or sets it

        def model_to_device(self) -> None:
            super().model_to_device()
            self.start(self.model)  # from here on storages are watched, and can no longer be moved

        def teardown(self) -> None:
            pass  # moves the model to the CPU

    return InPlace


def _phase_marker_class(pl: Any) -> Any:
    """The callback that tells the recorder where the step stands."""

    class PhaseMarker(pl.Callback):  # type: ignore[misc]
        def __init__(self, program: LightningProgram, recorder: Recorder) -> None:
            self.program = program
            self.recorder = recorder
            self.on_ready: Callable[[], None] = _nothing
            self.steps: dict[int, int] = {}
            self.batch_size = 0
            self.samples = 0  # in all that is evaluated; 0 where nobody knows
            self.most_batches: float = 1.0
            self.alive_bytes: list[int] = []
            self.averages: list[callbacks.Average] = []
            self.batches: int | None = None  # in all that is evaluated, where one loader gives them
            self.loaders = 1

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            _hooks_of_datamodule(trainer)
            for optimizer in trainer.optimizers:
                self.steps[id(optimizer)] = 0
                optimizer.register_step_post_hook(self.after_optimizer)
            self.recorder.label(states_of(trainer.optimizers), "optimizer_state")
            _let_scaler_step(trainer.precision_plugin)
            self.on_ready()

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            steps = max(_STEPS, steps_until_steady(self.program.strategy))
            if min(self.steps.values(), default=batch_idx) >= steps or batch_idx >= _MOST_BATCHES:
                raise _StepsDone
            self.note_batch(batch)
            self.recorder.mark("forward", step=batch_idx)

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            _hooks_of_datamodule(trainer)

        on_test_start = on_predict_start = on_validation_start

        def on_validation_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            self.note_batch(batch)
            self.recorder.mark(_PHASES[trainer.state.fn.value], step=batch_idx)
            if dataloader_idx == 0:
                self.alive_bytes.append(self.recorder.alive_bytes)
            if dataloader_idx == 0 and batch_idx == _EVALUATED - 1:
                self.stand_for_the_rest(trainer)

        on_test_batch_start = on_predict_batch_start = on_validation_batch_start

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            raise _StepsDone  # metrics over all that was evaluated are not a step's

        on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

        def note_batch(self, batch: Any) -> None:
            self.recorder.label(tensors_in(batch), "batch")
            seen = shapes_of(batch), batch_bytes(batch)
            known = self.program.seen.get(self.batch_size, seen)
            self.program.seen[self.batch_size] = max(seen, known, key=operator.itemgetter(1))

        def stand_for_the_rest(self, trainer: Any) -> None:
            """What each batch left behind (outputs kept for later) will be there once for every batch."""
            left, size = self.alive_bytes[-1] - self.alive_bytes[-2], self.batch_size
            samples = self.samples * (self.most_batches if type(self.most_batches) is float else 1)
            if left <= 0 or not samples:
                return
            if type(self.most_batches) is int and self.most_batches * size * self.loaders < samples:
                self.recorder.keep(left * max(0, self.most_batches - _EVALUATED) * self.loaders, "activations")
            else:  # rounded up by the sample, so that the same stands at every batch size
                rest = max(0, int(samples) - _EVALUATED * size * self.loaders)
                self.recorder.keep(-(-left // size) * rest, "activations")

        def before_batch(self, index: int) -> bool:
            """What happens between two batches; whether the next one is not to come, as what they leave piles up."""
            if self.program.stage == "fit":
                if index:
                    self.average(between_epochs=True)
                return False
            missing = self.batches is not None and 0 < self.batches <= index
            return missing and self.recorder.alive_bytes > self.alive_bytes[-1]

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.average(between_epochs=False)

        def average(self, *, between_epochs: bool) -> None:
            for average in self.averages:
                if average.between_epochs == between_epochs:
                    self.recorder.mark("averaging")
                    average.update()

        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.label_gradients(trainer, pl_module)
            self.recorder.mark("zero_grad")

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            self.recorder.mark("backward")

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            self.label_gradients(trainer, pl_module)
            self.recorder.mark("forward")

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.label_gradients(trainer, pl_module)
            self.recorder.mark("optimizer")

        def after_optimizer(self, optimizer: Any, *_: Any) -> None:
            self.steps[id(optimizer)] += 1
            self.recorder.label(states_of([optimizer]), "optimizer_state")
            self.recorder.mark("forward")

        def label_gradients(self, trainer: Any, pl_module: Any) -> None:
            gradients = gradients_of(trainer.optimizers, pl_module)
            refuse_sparse(gradients)
            self.recorder.label(gradients, "gradients")

    return PhaseMarker


class _Loader:
    """What the shadow iterates over: batches without end, each made when it is asked for."""

    def __init__(
        self, program: LightningProgram, batches: Batches, recorder: Recorder, batch_size: int, fake: bool
    ) -> None:
        self.program = program
        self.batches = batches
        self.recorder = recorder
        self.batch_size = batch_size
        self.fake = fake
        self.before_batch: Callable[[int], bool] = bool

    def __iter__(self) -> Iterator[Any]:
        for index in range(_EVALUATED) if self.program.stage != "fit" else itertools.count():
            if self.before_batch(index):
                return
            yield self._batch()

    def _batch(self) -> Any:
        self.recorder.mark("transfer")
        make = self.batches.fake if self.fake else self.batches.real
        with self.recorder.paused():
            batch = make(self.batch_size, torch.device("cpu"))
        self.recorder.label(tensors_in(batch), "batch")
        return batch


class _SizedLoader(_Loader):
    """The same with a length, where the user's loader has one: Lightning fetches ahead where there is none."""

    def __len__(self) -> int:
        if self.program.stage != "fit":
            return _EVALUATED
        count = self.program.batches_per_epoch
        return max(_MOST_BATCHES + 1, (count(self.batch_size) if count else None) or 0)


class _Answers(TorchFunctionMode):
    """Has Lightning's own loops find a value in what they add up on the device, as `watching` does."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return answered(func, args, kwargs or {})


def _only_states(recorder: Recorder, module_copy: Any, shadow_trainer: Any) -> None:
    step_states(recorder, module_copy, shadow_trainer.optimizers)
    raise _StepsDone


_STEP_HOOKS = {
    "fit": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
_PHASES = {"validate": "validation", "test": "test", "predict": "prediction"}
_LIMITS = {"validate": "val", "test": "test", "predict": "predict"}


def _limited(batches: int | None, limit: float) -> int | None:
    if batches is None:
        return None
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def _hooks_of_datamodule(trainer: Any) -> None:
    if trainer.datamodule is not None:
        trainer._data_connector._datahook_selector.datamodule = trainer.datamodule


def _swap_optimizers(configured: Any, swap: SwapOptimizer) -> Any:
    """What ``configure_optimizers`` returned, with other optimizers, whose rates the same schedulers set."""
    others = {id(old): swap(old) for old in tree_leaves(configured) if isinstance(old, Optimizer)}
    if not others:
        raise CannotTraceError("there is no optimizer")
    for scheduler in tree_leaves(configured):
        if id(getattr(scheduler, "optimizer", None)) in others:
            scheduler.optimizer = others[id(scheduler.optimizer)]
    return tree_map(lambda leaf: others.get(id(leaf), leaf), configured)


def _set_up_as(setup: Callable[[str], Any], known_stage: str) -> Callable[[str], Any]:
    def as_known(stage: str) -> Any:
        return setup(known_stage)

    return as_known


def _precision_of(pl: Any, program: LightningProgram) -> Any:
    """The user's precision plugin, or one for one device that computes alike; or the one asked for instead."""
    plugin = program.trainer.precision_plugin
    if not (program.precision or is_a(plugin, "FSDPPrecision", "DeepSpeedPrecision")):
        return copy.deepcopy(plugin)
    precision = program.precision or plugin.precision
    if precision.endswith("-mixed"):
        return pl.plugins.MixedPrecision(precision, program.device.type)
    return pl.plugins.Precision() if precision == "32-true" else pl.plugins.HalfPrecision(precision)


def _let_scaler_step(precision: Any) -> None:
    """A GradScaler asks the device whether any gradient overflowed; here none did. Checked on torch 2.9 to 2.13."""
    scaler = getattr(precision, "scaler", None)
    if scaler is not None:
        scaler._maybe_opt_step = lambda optimizer, state, *args, **kwargs: optimizer.step(*args, **kwargs)


def _idle_datamodule(datamodule: Any) -> Any:
    """A shallow copy to read from, whose hooks that prepare or clean up do nothing (they have run, or will)."""
    if datamodule is None:
        return None
    idle = copy.copy(datamodule)
    for hook in ("prepare_data", "setup", "teardown", "on_exception"):
        setattr(idle, hook, _nothing)
    return idle


def _give_optimizers(module: Any, module_copy: Any) -> None:
    """Optimizers that LightningCLI made and hung on the module, over the copy's parameters.

    They hang there in a bound partial, which a deep copy shares: the copy would step the user's own. Checked on 2.5.0
    to 2.6.6.
    """
    made = getattr(vars(module_copy).get("configure_optimizers"), "__func__", None)
    if not isinstance(made, functools.partial):
        return
    memo = {id(mine): theirs for mine, theirs in zip(module.parameters(), module_copy.parameters(), strict=True)}
    own = functools.partial(made.func, *made.args, **copy.deepcopy(made.keywords, memo))
    module_copy.configure_optimizers = types.MethodType(functools.update_wrapper(own, made.func), module_copy)


def _set_batch_size(module_copy: Any, batch_size: int) -> None:
    """Keep a size that the module remembers in step with its batches."""
    if isinstance(getattr(module_copy, "batch_size", None), int):
        with contextlib.suppress(AttributeError):
            module_copy.batch_size = batch_size
    if "batch_size" in getattr(module_copy, "hparams", {}):
        module_copy.hparams["batch_size"] = batch_size


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _first(batch: Any, _: int) -> Any:
    return batch


def _no_callbacks() -> list[Any]:
    return []


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What a copy prints, warns or logs is not the user's concern: the real run will say it again."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


def logging_step(trainer: Any) -> int:
    """The step that ``self.log`` writes an epoch's metrics at, so that all curves share one axis.

    Lightning counts one less while it logs them, to stay on the epoch's last step. Checked on 2.5.0 to 2.6.6.
    """
    return max(0, int(trainer.fit_loop.epoch_loop._batches_that_stepped) - 1)
