"""The shadow Trainer: it runs a copy of a module through Lightning's own loops for a few batches, under a recorder.

It has the user's settings and none of the user's loggers, callbacks, checkpoints or data. Lightning comes as two
unrelated packages, so its classes are made from the mixins here and the package of the user's module.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.batch.batches import Batches
from lightning_memguard.core.batch.nesting import batch_bytes, tensors_in
from lightning_memguard.core.capture.counters import Counters
from lightning_memguard.core.capture.holders import Holder, Use, UsersCode, holdings, roots_of, use_of
from lightning_memguard.core.capture.leftovers import Garbage, Leftovers
from lightning_memguard.core.capture.program import Program
from lightning_memguard.core.capture.recorder import Recorder, gradients_of, refuse_sparse
from lightning_memguard.core.foreign import call_around, patched
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.torch_port import DisableTorchFunction
from lightning_memguard.core.trace.kept import RETURNED, Kept, places
from lightning_memguard.core.trace.trace import WORTH_A_NOTE
from lightning_memguard.training.adapter import stand_ins
from lightning_memguard.training.adapter.callbacks import Average, Pruner
from lightning_memguard.training.adapter.epoch_end import (
    AT_EPOCH_END,
    EPOCH_END,
    Lists,
    bound,
    bound_collected,
    collecting,
    has_own,
    only_computes,
    own_copy,
    run_after_training,
    run_hook,
)
from lightning_memguard.training.adapter.metrics import compute_over_epoch
from lightning_memguard.training.facts import lightning_port as lightning
from lightning_memguard.training.facts.lightning_types import is_a, is_deepspeeds, lightning_of, wraps_in_ddp
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.training.facts.run_facts import LIMIT_NAMES, ROLES, Role, Stage
from lightning_memguard.units import format_bytes

if TYPE_CHECKING:
    from pytorch_lightning import LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.plugins import Precision
    from pytorch_lightning.strategies import SingleDeviceStrategy, Strategy

    from lightning_memguard.core.capture.program import Around, Change
    from lightning_memguard.core.torch_port import FakeTensorMode
    from lightning_memguard.training.strategies.sharded import Layout

    _Strategy = SingleDeviceStrategy
else:
    _Strategy = object

STEPS = 2  # each optimizer's first step makes its state, and its second runs with it
_PRUNINGS = 2  # of an epoch each: the second finds the masks of the first
_MOST_BATCHES = 16  # optimizers stepped by hand may step rarely
# What a step without a backward pass leaves behind is known after the second: the third runs next to all of it.
_EVALUATED = 3
_LOOPS = {"fit": "train", "validate": "validation", "test": "test", "predict": "predict"}
_PHASES = {"validate": "validation", "test": "test", "predict": "prediction"}


class StepsDone(Exception):  # noqa: N818 - not an error: it ends a loop
    """Ends the shadow Trainer's run after the last step worth recording."""


@dataclass(frozen=True)
class LightningStep(Program):
    """A step of a LightningModule, as a Trainer runs it.

    Attributes: those of `Program`, and
        trainer: the user's Trainer; its settings are read, nothing is changed.
        module: the user's LightningModule; only copies of it run.
        batches_per_epoch: how many batches the loader holds at a size, or None if it has no length.
        datamodule: the user's LightningDataModule, if any.
        accumulate_grad_batches: micro-batches a step (default: the Trainer's).
        stage: the stage that runs; all but ``"fit"`` have no backward pass.
        setup_stage: passed to the module's ``setup`` (default: ``stage``): a fit validates a module set up to fit.
        callback_bytes: bytes that other callbacks hold on the device throughout.
        strategy: the user's, if it makes several processes train together.
        ranks: how many processes train together (default: the Trainer's).
        layout: its ranks, if it shards and one of them is captured.
        transferred: whether the hooks around the transfer of batches have run already.
        precision: another precision than the Trainer's; empty to keep that one.
        changes: done to each copy before it is recorded and before it has optimizers.
        around: makes what each training step runs in; None for nothing.
        loaders_at: the run's loaders at a batch size, by role, for its step to read.
    """

    trainer: Trainer
    module: LightningModule
    batches: Batches | tuple[Batches, ...]
    device: torch.device
    batches_per_epoch: Callable[[int], int | None] | None = None
    datamodule: LightningDataModule | None = None
    accumulate_grad_batches: int | None = None
    gpu: Gpu | None = None
    stage: Stage = "fit"
    setup_stage: str = ""
    callback_bytes: int = 0
    strategy: Strategy | None = None
    ranks: int = 0
    layout: Layout | None = None
    transferred: bool = False
    precision: str = ""
    changes: tuple[Change, ...] = ()
    around: Around | None = None
    loaders_at: Callable[[Role, int], object] | None = field(default=None, compare=False)

    @property
    @override
    def trains(self) -> bool:
        return self.stage == "fit"

    @property
    def steps_until_steady(self) -> int:
        """After how many steps their memory no longer changes."""
        if not wraps_in_ddp(self.strategy):
            return STEPS
        from lightning_memguard.training.strategies import ddp

        return max(STEPS, ddp.steps_until_steady(self.strategy))

    @override
    def steps_of_epoch(self, batch_size: int) -> int | None:
        count = self.batches_per_epoch(batch_size) if self.batches_per_epoch and self.trains else None
        if count is None:
            return None
        limit, most = self.trainer.limit_train_batches, self.trainer.max_steps * self.trainer.accumulate_grad_batches
        count = int(count * limit) if isinstance(limit, float) else min(count, limit)
        return max(1, min(count, most) if most > 0 else count)


class Shadow:
    """A shadow Trainer for a program, and the callback in it that marks the phases of its steps.

    ``start`` is called with the module's copy when that is on its device and has no optimizers yet.
    """

    def __init__(
        self,
        program: LightningStep,
        device: torch.device,
        recorder: Recorder,
        start: Callable[[nn.Module], None],
        batch_size: int,
    ) -> None:
        self.program = program
        kind = type("PhaseMarker", (PhaseMarkerMixin, lightning_of(program.module).Callback), {})
        self.marker: PhaseMarkerMixin = kind(program, recorder)
        self.marker.batch_size = batch_size
        self.trainer = self._make_trainer(device, start)

    def _make_trainer(self, device: torch.device, start: Callable[[nn.Module], None]) -> Trainer:
        program, user, pl = self.program, self.program.trainer, lightning_of(self.program.module)
        environments = importlib.import_module(f"{pl.__name__}.plugins.environments")
        strategy = type("InPlaceStrategy", (InPlaceStrategyMixin, pl.strategies.SingleDeviceStrategy), {})
        trainer: Trainer = type("ShadowTrainer", (ShadowTrainerMixin, pl.Trainer), {})(
            accelerator="cpu",
            strategy=strategy(device, start, user.world_size),
            plugins=[environments.LightningEnvironment(), _precision_of(program)],
            logger=False,
            callbacks=[self.marker],
            max_epochs=user.max_epochs if user.max_epochs and user.max_epochs > 0 else 1000,
            max_steps=max(user.max_steps, 2) if user.max_steps > 0 else -1,
            # a third micro-batch would run exactly as the second does
            accumulate_grad_batches=min(program.accumulate_grad_batches or user.accumulate_grad_batches, 2),
            gradient_clip_val=user.gradient_clip_val,
            gradient_clip_algorithm=user.gradient_clip_algorithm,
            limit_val_batches=0 if program.trains else 1.0,
            num_sanity_val_steps=0,
            inference_mode=_inference_mode(program),
            detect_anomaly=lightning.detects_anomaly(user),
            log_every_n_steps=user.log_every_n_steps,  # type: ignore[attr-defined]  # set by a connector
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=user.default_root_dir,
        )
        lightning.leave_numbers(trainer)
        counters = self.marker.recorder.counters
        lightning.count_batches_as(trainer, counters.step)
        counters.limit(*_most_steps_and_epochs(program))
        trainer.loggers = [stand_ins.SilentLogger(logger) for logger in user.loggers]  # type: ignore[misc]
        trainer.callbacks = [*map(stand_ins.IdleCallback, getattr(user, "callbacks", ())), self.marker]  # type: ignore[attr-defined]
        trainer.datamodule = stand_ins.idle_datamodule(program.datamodule, self.marker.batch_size)  # type: ignore[attr-defined]
        lightning.ask_no_rank(trainer)
        trainer.memguard_shadow = self  # type: ignore[attr-defined]
        if program.layout is not None:
            lightning.use_strategy(trainer, program.layout.strategy_for(trainer, device, _precision_of(program), start))
        return trainer

    def collect(self, module_copy: nn.Module, mode: FakeTensorMode | None) -> None:
        """Let the user's callbacks that keep what batches give do so, on copies."""
        program, copies = self.program, (module_copy, mode)
        user, recorder = program.trainer, self.marker.recorder
        things: dict[str, Any] = {"trainer": user, "module": program.module, "copies": copies, "recorder": recorder}
        make = functools.partial(collecting, stage=program.stage, **things)
        self.trainer.callbacks = [*map(make, getattr(program.trainer, "callbacks", ())), self.marker]  # type: ignore[attr-defined]

    def run(self, module_copy: LightningModule, batches: tuple[Batches, ...], *, fake: bool) -> None:
        """Run batches of one loader, or of several that are evaluated one after the other."""
        limited = type(getattr(self.program.trainer, LIMIT_NAMES[ROLES[self.program.stage]])) is int
        kind = SizedLoader if self.program.batches_per_epoch or limited else EndlessLoader
        self.marker.fake = fake
        loaders = [kind(self.marker, each) for each in batches]
        if self.program.trains:
            self.trainer.fit(module_copy, train_dataloaders=loaders[0])
        else:
            self.evaluate(module_copy, loaders)

    def evaluate(self, module_copy: LightningModule, loaders: list[EndlessLoader]) -> None:
        """Run validation, test or prediction."""
        trainer, stage = self.trainer, self.program.stage
        self.marker.loaders = len(loaders)
        lightning.leave_numbers_of_epochs(trainer)
        if stage == "predict":
            returned = self.program.trainer.predict_loop.return_predictions
            trainer.predict(module_copy, loaders, return_predictions=returned)
        else:
            getattr(trainer, stage)(module_copy, loaders, verbose=False)


def _most_steps_and_epochs(program: LightningStep) -> tuple[float, float]:
    """The most optimizer steps that the run may take, and its last epoch."""
    user, count = program.trainer, program.batches_per_epoch
    epochs = user.max_epochs if user.max_epochs and user.max_epochs > 0 else math.inf
    steps = epochs * ((count(1) if count else None) or math.inf)
    return min(steps, user.max_steps) if user.max_steps > 0 else steps, epochs - 1


def _inference_mode(program: LightningStep) -> bool:
    """Whether it runs under ``torch.inference_mode``, where autocast keeps no copies of weights; else ``no_grad``.

    A validation inside a fit does not (`_TrainingEpochLoop`), nor what FSDP shards (`_no_grad_context`).
    """
    if program.trains or program.setup_stage or is_a(program.trainer.strategy, "FSDPStrategy"):
        return False
    return bool(getattr(program.trainer, f"{program.stage}_loop").inference_mode)


def _loaders(name: str, role: Role) -> property:
    def read(trainer: ShadowTrainerMixin) -> object:
        own = getattr(super(ShadowTrainerMixin, trainer), name)
        shadow: Shadow | None = vars(trainer).get("memguard_shadow")
        if shadow is None or not shadow.program.loaders_at or (own is None and role != "val"):
            return own  # None if they are not there yet, which Lightning asks for
        found = shadow.program.loaders_at(role, shadow.marker.batch_size)
        return own if found is None else found

    return property(read)


class ShadowTrainerMixin:
    """Answers a step's reads as the user's Trainer would: of its loaders, folders, checkpoint, and own attributes."""

    train_dataloader = _loaders("train_dataloader", "train")
    val_dataloaders = _loaders("val_dataloaders", "val")
    test_dataloaders = _loaders("test_dataloaders", "test")
    predict_dataloaders = _loaders("predict_dataloaders", "predict")
    progress_bar_callback = None
    should_stop = property(lambda _: False, lambda *_: None)  # the batches that are recorded all come
    memguard_is_read_only = False

    def __setattr__(self, name: str, value: object) -> None:
        if not self.memguard_is_read_only:
            super().__setattr__(name, value)

    @property
    def global_step(self) -> int:
        step, counters = self.fit_loop.epoch_loop.global_step, self._counters
        return counters.step(step) if counters else step

    @property
    def current_epoch(self) -> int:
        epoch, counters = self.fit_loop.epoch_progress.current.completed, self._counters
        return counters.epoch(epoch) if counters else epoch

    @property
    def estimated_stepping_batches(self) -> int | float:
        self.memguard_shadow.marker.reads_steps = True
        return super().estimated_stepping_batches  # type: ignore[misc,no-any-return]

    @property
    def _counters(self) -> Counters | None:
        shadow: Shadow | None = vars(self).get("memguard_shadow")
        return shadow.marker.recorder.counters if shadow else None

    @property
    def log_dir(self) -> str | None:
        return lightning.log_dir_of(self.memguard_shadow.program.trainer)  # type: ignore[no-any-return]

    @property
    def ckpt_path(self) -> object:
        return self.memguard_shadow.program.trainer.ckpt_path

    @property
    def world_size(self) -> int:
        shadow: Shadow | None = vars(self).get("memguard_shadow")
        if shadow is not None and shadow.program.layout is not None:
            return shadow.program.layout.ranks
        # if there is no process group, a step that is told of other ranks would fail as it calls them
        alone = shadow is None or not (dist.is_available() and dist.is_initialized())
        return 1 if alone or shadow is None else shadow.program.trainer.world_size

    def save_checkpoint(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "memguard_shadow" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return stand_ins.attribute_of(vars(self)["memguard_shadow"].program.trainer, name, self)


@contextlib.contextmanager
def lending_optimizers(user: Trainer) -> Iterator[None]:
    """A step may know the user's Trainer by another name: its optimizers are, until the end, those of the copy."""
    own = lightning.optimizers_of(user.strategy)
    try:
        yield
    finally:
        vars(user.strategy).update(own)


class InPlaceStrategyMixin(_Strategy):
    """One device, which is never touched: the model is there already, or is fake."""

    def __init__(self, device: torch.device, start: Callable[[nn.Module], None], ranks: int) -> None:
        super().__init__(device=device)
        self.start = start
        self.ranks = ranks

    def all_gather(self, tensor: torch.Tensor, group: object = None, sync_grads: bool = False) -> torch.Tensor:
        """Return a result as large as that of all ranks: the tensor once for each of them."""
        return tensor if self.ranks == 1 else torch.stack([tensor] * self.ranks)

    def setup_environment(self) -> None:
        pass  # asks an accelerator for the device, or sets it

    def model_to_device(self) -> None:
        super().model_to_device()
        if self.model is not None:
            self.start(self.model)  # from here on storages are recorded, and can no longer be moved

    def teardown(self) -> None:
        pass  # moves the model to the CPU


class PhaseMarkerMixin:
    """The callback that tells the recorder which phase of the step begins, and which part a tensor belongs to."""

    def __init__(self, program: LightningStep, recorder: Recorder) -> None:
        self.program = program
        self.recorder = recorder
        self.steps_recorded = program.steps_until_steady
        self.limit: int | float = 1.0 if program.trains else getattr(program.trainer, LIMIT_NAMES[ROLES[program.stage]])
        self.on_ready: Callable[[], object] = lambda: None
        self.averages: list[Average] = []
        self.pruners: list[Pruner] = []
        self.pruned = 0  # how often
        self.epochs = max(program.trainer.max_epochs or 0, 0) or _MOST_BATCHES
        self.reads_steps = False  # how many the run will have
        self.later = range(0)  # the batches after the steps; before its last one, the run stops
        self.batch_size = self.batches = 0
        self.loaders = 1
        self.fake = True
        self.samples = 0  # of an epoch in all, of which steps or evaluation leave something behind; 0 if unknown
        self.steps: dict[int, int] = {}  # by optimizer
        self.alive_bytes: list[int] = []  # before each batch that is evaluated
        self.leftovers = Leftovers(recorder, self.steps_recorded)
        self.garbage = Garbage(recorder)
        self.left_bytes = 0  # by an epoch of steps
        self.output_bytes = 0  # of a batch
        self.lists = Lists(())
        self.validates = bool(attempt(lambda: program.trainer.enable_validation).value)

    # -- training

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lists = Lists(self.owners(trainer, pl_module))
        self.use_hooks_of_datamodule(trainer)
        user = self.program.trainer.strategy
        own, lent = lightning.optimizers_of(user), lightning.optimizers_of(trainer.strategy)
        vars(user).update({name: value for name, value in lent.items() if name in own})
        _label_deepspeed(trainer, self.recorder)
        for optimizer in trainer.optimizers:
            self.steps[id(optimizer)] = 0
            _call_after_step(optimizer, self.after_optimizer)
        self.recorder.label_held_by(trainer.optimizers)
        schedules = trainer.lr_scheduler_configs
        self.recorder.counts_steps = not self.reads_steps and any(each.interval == "step" for each in schedules)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            port.steps_unscaled(scaler)
        for callback in trainer.callbacks if self.program.trainer.num_sanity_val_steps else ():  # type: ignore[attr-defined]
            for hook in ("on_sanity_check_start", "on_sanity_check_end"):  # Lightning calls the other before training
                if call := getattr(callback, hook, None):
                    call(trainer, pl_module)
        self.on_ready()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        index = self.batches
        self.batches += 1
        self.recorder.counters.note(trainer.optimizers, pl_module)
        if not self.later:
            self.leftovers.note()
            steps = min(self.steps.values(), default=index) if self.recorder.ran_backward else index
            recorded = steps >= self.steps_recorded  # batches, if the step trains nothing, as one that returns None
            if (recorded and self.leftovers.are_known(trainer.optimizers)) or index >= _MOST_BATCHES:
                self.count_what_is_left(index, pl_module)
                with self.recorder.paused():  # counters move to where a step does more
                    more = self.recorder.counters.move(trainer.optimizers, pl_module)
                period = 1 + (index > self.steps_recorded)
                pruned = period * (1 + 2 * min(_PRUNINGS, self.epochs - 1)) if self.pruners else 0
                self.later = range(index, index + max(more, pruned) + 1)
        if self.later:
            if index == self.later[-1]:
                raise StepsDone
            if self.recorder.counters.first_moved:
                pl_module.on_train_epoch_start()
        self.recorder.note_batch(batch)
        self.recorder.mark("forward", step=index)

    def count_what_is_left(self, recorded: int, pl_module: LightningModule) -> None:
        """Expect what each batch leaves behind for good once for each batch of an epoch that was not recorded."""
        left, count, size = self.leftovers.bytes_per_batch, self.program.batches_per_epoch, self.batch_size
        if not left:
            return
        self.name_what_is_left(self.leftovers.last_steps, pl_module)
        each = f"each step leaves {format_bytes(left)} behind{places(self.recorder.kept[:1])}"
        limit, in_all = self.program.trainer.limit_train_batches, (count(1) if count else None) or 0
        samples = min(limit * size, in_all or limit * size) if type(limit) is int else int(in_all * limit)
        if not samples:
            self.recorder.assume(f"{each}; how many steps there are is unknown, and that is not included")
            return
        rest = max(0, samples - recorded * size)
        more = -(-left // size) * rest
        self.recorder.expect(more, "activations")  # by the sample: a line at every size
        self.samples, self.left_bytes = samples, -(-left // size) * samples
        if more >= WORTH_A_NOTE:
            self.recorder.assume(f"{each}; what an epoch leaves is included")

    def owners(self, trainer: Trainer, pl_module: LightningModule) -> list[object]:
        """The copies whose hooks run here, in Lightning's order: of callbacks that collect, and the module's."""
        copies = map(own_copy, trainer.callbacks)  # type: ignore[attr-defined]
        return [*(each for each in copies if each is not None), pl_module]

    def end_epoch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run what the hooks at the end of a training epoch compute, with what an epoch leaves."""
        self.compute_metrics(pl_module)
        seen = self.batches - 1
        in_all = max(seen, self.samples // self.batch_size)
        copies = map(own_copy, trainer.callbacks)  # type: ignore[attr-defined]
        owners, run = [*zip(self.users_callbacks, copies, strict=False), (pl_module, pl_module)], []
        for hook, (owner, own) in itertools.product(AT_EPOCH_END["fit"], owners):
            if not self.computes_over_epoch(owner, hook, pl_module):
                continue
            if own is not None and only_computes(own, hook, pl_module):
                run.append((own, hook))
            else:
                bound(owner, hook, pl_module, self.recorder, self.left_bytes, "it does more than compute")
        user = self.program.trainer
        every = user.check_val_every_n_epoch, type(lightning.check_interval(user))
        if self.validates and every == (1, float):
            run.insert(0, (pl_module, "on_validation_model_zero_grad"))  # each epoch ends with a validation
        fill = functools.partial(self.lists.fill, seen, in_all)
        run_after_training(trainer, pl_module, run, self.recorder, fill, in_all, self.samples, self.left_bytes)
        self.bound_collected(trainer, in_all)

    def computes_over_epoch(self, owner: object, hook: str, module: LightningModule) -> bool:
        """Whether a hook may compute over what the batches of an epoch left, or keep a copy of the weights."""
        if not has_own(owner, hook) or ("validation" in hook and not self.validates):
            return False
        left = {each.holder.rpartition(".")[2] for each in self.recorder.kept} if self.left_bytes else set()
        names = UsersCode(owner, *module.modules()).names(hook)
        return hook == EPOCH_END or not names.isdisjoint({*left, "state_dict", "deepcopy"})

    def bound_collected(self, trainer: Trainer, batches: int) -> None:
        ran, hook = {type(own_copy(each)) for each in trainer.callbacks}, f"on_{_LOOPS[self.program.stage]}_batch_end"  # type: ignore[attr-defined]
        if self.recorder.device_type == "cpu":  # elsewhere they keep them on the host, as far as is known
            given = batches * self.output_bytes
            bound_collected(self.users_callbacks, lambda owner: type(owner) in ran, hook, self.recorder, given)

    @property
    def users_callbacks(self) -> Iterable[object]:
        return getattr(self.program.trainer, "callbacks", ())

    def name_what_is_left(self, steps: range, pl_module: LightningModule) -> None:
        if self.program.stage in ("fit", "validate", "predict"):
            with self.recorder.paused(), DisableTorchFunction():
                self.recorder.kept = attempt(lambda: self.find_kept(steps, pl_module)).value or ()

    def find_kept(self, steps: range, module: LightningModule) -> tuple[Kept, ...]:
        """Name what holds the memory that the batches of some steps left behind, the most first."""
        others = self.users_callbacks  # their code may empty what the module holds
        when: Literal["step", "validation"] = "step" if self.program.stage == "fit" else "validation"
        lines: dict[Holder, Counter[str]] = {}
        graphs, missing = set(), self.recorder.left_by(steps)
        for holder, thing, _, in_graph in holdings(roots_of(module)):
            address = port.storage_id(thing.untyped_storage()) if isinstance(thing, torch.Tensor) else 0
            if address in missing:
                nbytes, line = missing.pop(address)
                lines.setdefault(holder, Counter())[line] += nbytes
                graphs |= {holder} if in_graph else set()
        predicts = self.program.stage == "predict" and self.program.trainer.predict_loop.return_predictions
        for nbytes, line in missing.values():
            lines.setdefault(Holder(RETURNED if predicts else ""), Counter())[line] += nbytes
        found = []
        for holder, made in lines.items():
            use = _use_of(holder, module, others)
            file, _, number = made.most_common(1)[0][0].rpartition(":")[0].rpartition(":")
            line, lasts = use.line or f"{Path(file).name}:{number}", not (use.is_conditional or use.is_cleared)
            found.append(Kept(holder.name, line, holder in graphs, when, lasts, sum(made.values()) // len(steps)))
        return tuple(sorted(found, key=lambda kept: -kept.fixed_bytes))

    def kept_after_hooks(self, module: LightningModule) -> tuple[Kept, ...]:
        """What an evaluation has left behind, with what of it stays once its hooks have run; metrics are reset."""
        left = self.recorder.left_by(range(len(self.alive_bytes)))
        stays = {
            holder
            for holder, thing, *_ in holdings(roots_of(module) if self.recorder.kept else {})
            if isinstance(thing, torch.Tensor) and port.storage_id(thing.untyped_storage()) in left
        }
        names = {each.name for each in stays if not isinstance(each.owner, Metric)}
        return tuple(replace(each, stays=each.holder in names) for each in self.recorder.kept)

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.label_gradients(trainer, pl_module)
        self.recorder.mark("zero_grad")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self.recorder.mark("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.label_gradients(trainer, pl_module)
        self.recorder.mark("forward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.label_gradients(trainer, pl_module)
        model: Any = trainer.strategy.model
        # Lightning leaves it to DeepSpeed's engine to count micro-batches
        if not is_deepspeeds(model) or model.is_gradient_accumulation_boundary():
            self.recorder.mark("optimizer")

    def after_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        self.steps[id(optimizer)] += 1
        self.recorder.label_held_by([optimizer])
        self.recorder.mark("forward")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: object, *_: object) -> None:
        self.output_bytes = max(self.output_bytes, batch_bytes(outputs))
        self.average(between_epochs=False)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: object, *_: Any) -> None:
        self.output_bytes = max(self.output_bytes, batch_bytes(outputs))

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def average(self, *, between_epochs: bool) -> None:
        for average in self.averages:
            if average.between_epochs == between_epochs:
                self.recorder.mark("averaging")
                average.update()

    def prune(self) -> None:
        """Prune as callbacks do at the end of an epoch; how many weights are left is not known, but at most all."""
        self.pruned += 1
        self.recorder.mark("pruning")
        try:
            with patched(self.recorder, worst_case=True):
                for pruner in self.pruners:
                    pruner.run()
        except Exception as error:  # noqa: BLE001 - a method of the user's own may need values, or raise anything
            self.pruners = []
            self.recorder.assume(f"what ModelPruning takes is not predicted ({error})"[:200])

    def label_gradients(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gradients = gradients_of(trainer.optimizers, pl_module)
        refuse_sparse(gradients)
        self.recorder.label(gradients, "gradients")

    # -- evaluation

    def use_hooks_of_datamodule(self, trainer: Trainer, *_: object) -> None:
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if datamodule is not None and not self.program.transferred:
            lightning.use_hooks_of(trainer, datamodule)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lists = Lists(self.owners(trainer, pl_module))
        self.use_hooks_of_datamodule(trainer)
        _label_deepspeed(trainer, self.recorder)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.recorder.note_batch(batch)
        self.recorder.mark(_PHASES[self.program.stage], step=batch_idx)
        if dataloader_idx == 0:
            self.garbage.free()
            self.alive_bytes.append(self.recorder.alive_bytes)
            if batch_idx == _EVALUATED - 1:
                self.garbage.expect()
                self.count_remaining_batches(pl_module)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.compute_metrics(pl_module)
        batches, size = self.program.batches_per_epoch, self.batch_size
        count = (batches(size) if batches else None) or 0
        count = min(count, self.limit * self.loaders) if type(self.limit) is int else int(count * self.limit)
        seen = len(self.alive_bytes) * self.loaders
        owners, lists, in_all = self.owners(trainer, pl_module), self.lists, max(seen, count)
        ran = [
            run_hook(trainer, pl_module, owner, hook, self.recorder, lists, seen, in_all)
            for hook in AT_EPOCH_END[self.program.stage]
            for owner in owners
            if has_own(owner, hook) and (owner is pl_module or only_computes(owner, hook, pl_module))
        ]
        self.bound_collected(trainer, in_all)
        if not all(ran):
            raise StepsDone  # one that did not may have emptied what the others have left
        with self.recorder.paused(), DisableTorchFunction():
            self.recorder.kept = attempt(lambda: self.kept_after_hooks(pl_module)).value or self.recorder.kept
        raise StepsDone  # what follows needs values

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def count_remaining_batches(self, pl_module: LightningModule) -> None:
        """Count what each batch leaves behind (outputs kept for later) for all batches that would still come, too."""
        count, limit, size = self.program.batches_per_epoch, self.limit, self.batch_size
        left, in_all = self.alive_bytes[-1] - self.alive_bytes[-2], (count(1) if count else None) or 0
        samples = in_all * (limit if type(limit) is float else 1)
        if left <= 0 or not samples:
            return
        self.name_what_is_left(range(1), pl_module)
        first = {(each.holder, each.line) for each in self.recorder.kept}
        self.name_what_is_left(range(1, 2), pl_module)
        self.recorder.kept = tuple(each for each in self.recorder.kept if (each.holder, each.line) in first)
        if type(limit) is int and limit * size * self.loaders < samples:
            self.recorder.keep(left * max(0, limit - _EVALUATED) * self.loaders, "activations")
            self.samples = size * limit * self.loaders
        else:  # rounded up by the sample, so that the same is kept at every batch size
            rest = max(0, int(samples) - _EVALUATED * size * self.loaders)
            self.recorder.keep(-(-left // size) * rest, "activations")
            self.samples = int(samples)

    # -- both

    def compute_metrics(self, pl_module: LightningModule) -> None:
        """Compute what the module's metrics kept of an epoch; while it is evaluated its last batch is there, too."""
        compute_over_epoch(pl_module, self.recorder, self.batch_size, self.samples, fake=self.fake)

    def begin_batch(self, index: int) -> None:
        """Do before a training batch what callbacks do between epochs: update averages, prune."""
        if index:
            self.average(between_epochs=True)
        if self.later and self.pruned < min(_PRUNINGS, self.epochs) and (index - self.later[0]) % 2 and self.pruners:
            self.prune()

    def ends_before(self, index: int) -> bool:
        """Whether an evaluation's loader ends here, because what its batches leave adds up."""
        count, limit = self.program.batches_per_epoch, self.limit
        batches = (count(self.batch_size) if count and self.loaders == 1 else None) or 0  # 0 if unknown
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        return 0 < batches <= index and self.recorder.alive_bytes > self.alive_bytes[-1]


def _use_of(holder: Holder, module: LightningModule, others: Iterable[object]) -> Use:
    """How the module uses a list, or the metric that it is in: Lightning resets metrics passed to ``self.log``."""
    if isinstance(holder.owner, Metric):
        used = [use_of(Holder("", name, module), others) for name in holder.name.split(".")[1:-1]]
        return used[0]._replace(is_cleared=any(use.is_cleared for use in used)) if used else Use()
    use, value = use_of(holder, (module, *others)), getattr(holder.owner, holder.attribute, None)
    is_bounded = getattr(value, "maxlen", None) is not None or not holder.name
    return use._replace(is_cleared=use.is_cleared or is_bounded)


class EndlessLoader:
    """Loader of the shadow Trainer: batches without end, each made when it is asked for."""

    def __init__(self, marker: PhaseMarkerMixin, batches: Batches) -> None:
        self.marker, self.program, self.batch_size = marker, marker.program, marker.batch_size
        self.batches = batches

    def __iter__(self) -> Iterator[object]:
        for index in itertools.count() if self.program.trains else range(_EVALUATED):
            if self.program.trains:
                self.marker.begin_batch(index)
            elif self.marker.ends_before(index):
                return
            yield self._batch()

    def _batch(self) -> object:
        recorder, device = self.marker.recorder, torch.device("cpu")
        recorder.mark("transfer")
        with recorder.paused():
            size, batches = self.batch_size, self.batches
            batch = (batches.fake if self.marker.fake else batches.real)(size, device)
            held = batches.held(batch, size, fake=self.marker.fake)
        for tensor in held:
            recorder.hold(tensor)
        recorder.label(tensors_in(batch), "batch")
        return batch


class SizedLoader(EndlessLoader):
    """Endless loader with the length of the user's, or of its limit: without a length, Lightning would prefetch."""

    def __len__(self) -> int:
        if not self.program.trains:
            return _EVALUATED
        count = self.program.batches_per_epoch
        return max(2 * _MOST_BATCHES, (count(self.batch_size) if count else None) or 0)


def _call_after_step(optimizer: Optimizer, call: Callable[[Optimizer], object]) -> None:
    """Call a function after each step, of optimizers too that wrap another and have no hooks, as Opacus' has none."""
    try:
        optimizer.register_step_post_hook(lambda stepped, *_: call(stepped))  # type: ignore[arg-type]
    except AttributeError:
        call_around(optimizer, "step", after=lambda *_: call(optimizer))


def _label_deepspeed(trainer: Trainer, recorder: Recorder) -> None:
    if is_deepspeeds(trainer.strategy.model):
        from lightning_memguard.training.strategies import deepspeed

        deepspeed.label(trainer.strategy.model, recorder)


def _precision_of(program: LightningStep) -> Precision:
    """The user's precision plugin, or one for one device that computes alike; or the one asked for instead."""
    plugin, plugins = program.trainer.precision_plugin, lightning_of(program.module).plugins
    if is_a(program.strategy, "DeepSpeedStrategy"):
        return plugins.DeepSpeedPrecision(program.precision or plugin.precision)  # type: ignore[no-any-return]
    if program.layout is not None and is_a(program.layout.strategy, "FSDPStrategy"):
        return plugins.FSDPPrecision(program.precision or plugin.precision)  # type: ignore[no-any-return]
    if not (program.precision or is_a(plugin, "FSDPPrecision")):
        return copy.deepcopy(plugin)
    precision = program.precision or plugin.precision
    if precision.endswith("-mixed"):
        return plugins.MixedPrecision(precision, program.device.type)  # type: ignore[no-any-return]
    return plugins.Precision() if precision == "32-true" else plugins.HalfPrecision(precision)  # type: ignore[no-any-return]
