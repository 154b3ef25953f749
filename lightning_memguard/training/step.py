"""Trainer + module -> what one training step runs, in Lightning's own order.

The order is not written down here a second time: a second Trainer of the same package, the shadow, runs a copy of the
module through Lightning's own loops for a few batches, under the recorder. It has the user's settings and none of the
user's loggers, callbacks, checkpoints or data.

Private names of Lightning are read here and in `lightning_memguard.training.loaders` alone. Checked on 2.5.0 to 2.6.6.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_memguard.core.batch import Batches, tensors_in
from lightning_memguard.core.capture import Recorder, gradients_of, refuse_sparse, states_of, watching
from lightning_memguard.core.estimate import device_to_run_on, refuse_meta, step_states, tensors
from lightning_memguard.core.fake import fake_twin, real_twin
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.errors import CannotTraceError

# Each optimizer's first step makes its state, and its second runs with it. Those stepped by hand may step seldom.
_STEPS = 2
_MOST_BATCHES = 16
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def lightning_of(thing: object) -> Any:
    """The Lightning package (``lightning.pytorch`` or ``pytorch_lightning``) that an object's class comes from.

    Raises:
        CannotTraceError: neither package defines any of its classes.
    """
    for cls in type(thing).__mro__:
        for package in _PACKAGES:
            if cls.__module__ == package or cls.__module__.startswith(package + "."):
                return importlib.import_module(package)
    raise CannotTraceError(f"{type(thing).__qualname__} comes from neither `lightning` nor `pytorch_lightning`.")


class _StepsDone(Exception):  # noqa: N818 - it is no error, it ends a loop
    """Ends the shadow's run after the last step worth watching."""


@dataclass(frozen=True)
class LightningProgram:
    """The training of a LightningModule by a Trainer, runnable on copies.

    Attributes:
        trainer: the user's Trainer; its settings are read, nothing is changed.
        module: the user's LightningModule; only copies of it run.
        batches: batches of any size, as the loader would collate them.
        device: where the training will run.
        batches_per_epoch: how many batches the loader holds at a size, or None where it has no length.
        datamodule: the user's LightningDataModule, if any.
        accumulate_grad_batches: micro-batches a step (default: the Trainer's).
        gpu: the GPU behind the device.
    """

    trainer: Any
    module: Any
    batches: Batches
    device: torch.device
    batches_per_epoch: Callable[[int], int] | None = None
    datamodule: Any = None
    accumulate_grad_batches: int | None = None
    gpu: Gpu | None = None

    def run(self, recorder: Recorder, batch_size: int, *, fake: bool) -> None:
        """See `lightning_memguard.core.estimate.Program`."""
        with self._stage(recorder, batch_size, fake) as (shadow, twin):
            loader = (_SizedLoader if self.batches_per_epoch else _Loader)(self, recorder, batch_size, fake)
            with contextlib.suppress(_StepsDone):
                shadow.fit(twin, train_dataloaders=loader)
        if not recorder.ran_backward:
            recorder.assumptions[
                "training_step led to no backward pass (did it return None?): what one takes is missing"
            ] = None

    def run_states(self, recorder: Recorder) -> None:
        """See `lightning_memguard.core.estimate.Program`."""
        with self._stage(recorder, self.batches.small_size, True) as (shadow, twin):
            shadow.callbacks[0].on_ready = lambda: _only_states(recorder, twin, shadow)
            with contextlib.suppress(_StepsDone):
                shadow.fit(twin, train_dataloaders=[])

    @contextlib.contextmanager
    def _stage(self, recorder: Recorder, batch_size: int, fake: bool) -> Iterator[tuple[Any, Any]]:
        """The shadow and the twin, in a quiet place where nothing they do is seen outside."""
        pl = lightning_of(self.module)
        with quiet(), tensors(fake=fake, gpu=self.gpu) as mode, ExitStack() as watch:
            if mode is None:
                refuse_meta(self.module)
            instead = {id(self.trainer): None}
            device = device_to_run_on(self, fake=fake)
            twin: Any = (
                fake_twin(self.module, mode, device, instead) if mode else real_twin(self.module, instead).to(device)
            )
            _set_batch_size(twin, batch_size)
            twin.configure_callbacks = _no_callbacks
            twin.prepare_data = _nothing

            def start(model: nn.Module) -> None:
                watch.enter_context(watching(recorder, model))

            yield _shadow(pl, self, device, recorder, start), twin


def _shadow(
    pl: Any, program: LightningProgram, device: torch.device, recorder: Recorder, start: Callable[[nn.Module], None]
) -> Any:
    """A Trainer with the user's settings and none of the user's loggers, callbacks or checkpoints."""
    user = program.trainer
    environments = importlib.import_module(f"{pl.__name__}.plugins.environments")
    dummy = importlib.import_module(f"{pl.__name__}.loggers.logger").DummyLogger
    shadow = _shadow_class(pl)(
        accelerator="cpu",
        strategy=_strategy_class(pl)(device, start),
        plugins=[environments.LightningEnvironment(), _precision_of(user)],
        logger=dummy() if user.loggers else False,
        callbacks=[_marks_class(pl)(recorder)],
        max_epochs=user.max_epochs if user.max_epochs and user.max_epochs > 0 else 1000,
        max_steps=max(user.max_steps, 2) if user.max_steps > 0 else -1,
        # a third micro-batch would run exactly as the second does
        accumulate_grad_batches=min(program.accumulate_grad_batches or user.accumulate_grad_batches, 2),
        gradient_clip_val=user.gradient_clip_val,
        gradient_clip_algorithm=user.gradient_clip_algorithm,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        log_every_n_steps=1 << 30,  # turning metrics into numbers needs values
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=user.default_root_dir,
    )
    shadow.memguard_user = user
    shadow.datamodule = _idle_datamodule(program.datamodule)
    return shadow


def _shadow_class(pl: Any) -> Any:
    """A Trainer class that answers reads of the user's callbacks and own attributes as the user's Trainer does."""

    class Shadow(pl.Trainer):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or "memguard_user" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self.__dict__["memguard_user"], name)

    def users(name: str) -> property:
        own = getattr(pl.Trainer, name)
        return property(lambda self: getattr(self.__dict__["memguard_user"], name) if self.set_up else own.fget(self))

    Shadow.set_up = property(lambda self: "memguard_user" in self.__dict__)
    for name in ("checkpoint_callback", "checkpoint_callbacks", "early_stopping_callback", "early_stopping_callbacks"):
        setattr(Shadow, name, users(name))
    return Shadow


def _strategy_class(pl: Any) -> Any:
    """One device, which is never touched: the model is there already, or is fake."""

    class Twin(pl.strategies.SingleDeviceStrategy):  # type: ignore[misc]
        def __init__(self, device: torch.device, start: Callable[[nn.Module], None]) -> None:
            super().__init__(device=device)
            self.start = start

        def setup_environment(self) -> None:
            pass  # asks an accelerator for the device, or sets it

        def model_to_device(self) -> None:
            super().model_to_device()
            self.start(self.model)  # from here on storages are watched, and can no longer be moved

        def teardown(self) -> None:
            pass  # moves the model to the CPU

    return Twin


def _marks_class(pl: Any) -> Any:
    """The callback that tells the recorder where the step stands."""

    class Marks(pl.Callback):  # type: ignore[misc]
        def __init__(self, recorder: Recorder) -> None:
            self.recorder = recorder
            self.on_ready: Callable[[], None] = _nothing
            self.steps: dict[int, int] = {}

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.datamodule is not None:
                selector = trainer._data_connector._datahook_selector
                selector.datamodule = trainer.datamodule
            for optimizer in trainer.optimizers:
                self.steps[id(optimizer)] = 0
                optimizer.register_step_post_hook(self.after_optimizer)
            self.recorder.label(states_of(trainer.optimizers), "optimizer_state")
            _let_scaler_step(trainer.precision_plugin)
            self.on_ready()

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if min(self.steps.values(), default=batch_idx) >= _STEPS or batch_idx >= _MOST_BATCHES:
                raise _StepsDone
            self.recorder.label(tensors_in(batch), "batch")
            self.recorder.mark("forward", step=batch_idx)

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

    return Marks


class _Loader:
    """What the shadow iterates over: batches without end, each made when it is asked for."""

    def __init__(self, program: LightningProgram, recorder: Recorder, batch_size: int, fake: bool) -> None:
        self.program = program
        self.recorder = recorder
        self.batch_size = batch_size
        self.fake = fake

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._batch()

    def _batch(self) -> Any:
        self.recorder.mark("transfer")
        make = self.program.batches.fake if self.fake else self.program.batches.real
        with self.recorder.paused():
            batch = make(self.batch_size, torch.device("cpu"))
        self.recorder.label(tensors_in(batch), "batch")
        return batch


class _SizedLoader(_Loader):
    """The same with a length, where the user's loader has one: Lightning fetches ahead where there is none."""

    def __len__(self) -> int:
        count = self.program.batches_per_epoch
        return max(_MOST_BATCHES + 1, count(self.batch_size) if count else 0)


def _only_states(recorder: Recorder, twin: Any, shadow: Any) -> None:
    step_states(recorder, twin, shadow.optimizers)
    raise _StepsDone


def _precision_of(trainer: Any) -> Any:
    return copy.deepcopy(trainer.precision_plugin)


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


def _set_batch_size(twin: Any, batch_size: int) -> None:
    """Keep a size that the module remembers in step with its batches."""
    if isinstance(getattr(twin, "batch_size", None), int):
        with contextlib.suppress(AttributeError):
            twin.batch_size = batch_size
    if "batch_size" in getattr(twin, "hparams", {}):
        twin.hparams["batch_size"] = batch_size


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


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
