"""MemGuard for transformers' own Trainer, and for loops with Accelerate.

The first batch says what is trained: it is seen as the model is called with it, so nothing is drawn from the data. The
step is predicted on a copy without memory, before this first forward pass; the batch size stays as it is. Checked on
transformers 5.24 and accelerate 1.15.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memguard.core.batch.nesting import map_tensors
from lightning_memguard.core.capture.capture import Captures, capture
from lightning_memguard.core.capture.recorder import gradients_of, part_bytes, states_of
from lightning_memguard.core.decision.decision import Decision, Limits, Request, decide, prediction_of
from lightning_memguard.core.decision.record import EpochRecord
from lightning_memguard.core.device.meter import PeakMeter
from lightning_memguard.errors import MemGuardError
from lightning_memguard.report.decision_table import last_line, setup_text, warning_of
from lightning_memguard.training.facts.ranks import attempt, warn
from lightning_memguard.training.offload.engine import Offload
from lightning_memguard.training.planning.subject import MakeOptimizer, predicted, program_of, subject_of
from lightning_memguard.training.planning.target import target_and_budget
from lightning_memguard.units import parse_bytes

try:
    from transformers import TrainerCallback as _Base
except ImportError:  # a loop with Accelerate needs it not
    _Base = object

Loss = Callable[..., Any]
Given = tuple[tuple[Any, ...], dict[str, Any]]
Loop = tuple[nn.Module, object, int, float]
"""A model, its optimizer, the batches of an optimizer step, and the norm of clipping."""


class MemGuardCallback(_Base):  # type: ignore[misc]
    """Predicts the memory of a step of transformers' Trainer, warns if it will not fit, and logs what it took.

    A step that is predicted not to fit keeps its saved activations on the host. Batch size, weights and random numbers
    stay as they are. Whatever goes wrong here is a warning, and the training goes on.

    Args:
        budget: what the training may take on its device, in bytes or such as ``"20GiB"`` (default: what is free).
        margin: share of the budget to keep free.
        offload: ``"if_needed"``, or ``"never"``.
        loss: ``(model, *args, **kwargs) -> loss``, how the loss comes of what the model is called with (default: the
            ``loss`` of its output), if it is computed elsewhere.

    Attributes:
        decision: the prediction, and whether it fits; None until the first batch.
        records: predicted and measured, epoch by epoch.

    Example:
        >>> guard = MemGuardCallback()
        >>> trainer.add_callback(guard)  # doctest: +SKIP

        With Accelerate, `attach` and `detach` are around the loop, and `epoch` ends an epoch:

        >>> guard.attach(model, optimizer)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        budget: int | str | None = None,
        margin: float = 0.05,
        offload: Literal["if_needed", "never"] = "if_needed",
        loss: Loss | None = None,
    ) -> None:
        if offload not in ("if_needed", "never"):
            raise MemGuardError(f'offload={offload!r} is unknown: "if_needed" or "never".')
        self._limits = Limits(margin, None if budget is None else parse_bytes(budget, "budget"))
        self._wanted, self._loss = offload, loss
        self.decision: Decision | None = None
        self.records: list[EpochRecord] = []
        self._offload: Offload | None = None
        self._hooks: list[Any] = []
        self._meter: PeakMeter | None = None
        self._steps = 0
        self._is_quiet = self._is_watching = self._is_predicted = False
        self._notes: tuple[str, ...] = ()
        self._loop: Loop | None = None

    # -- the Trainer's hooks

    def on_train_begin(self, args: Any, state: Any, control: object, **kwargs: Any) -> None:
        """Begin to watch a training; `TrainerCallback` documents the arguments of this and the other hooks."""
        del control
        self._is_quiet = not state.is_world_process_zero
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        settings = {"accumulate": args.gradient_accumulation_steps, "clip": float(args.max_grad_norm or 0)}
        _tried(lambda: self.attach(model, optimizer, **settings))
        _tried(lambda: self._watch_loss_of(_trainer_behind(inspect.currentframe())))

    def on_epoch_end(self, args: object, state: Any, control: object, **_: object) -> None:
        """Compare an epoch's prediction with what it took."""
        del args, control
        _tried(lambda: self._log(state))

    def on_train_end(self, args: object, state: object, control: object, **_: object) -> None:
        """Stop watching."""
        del args, state, control
        _tried(self.detach)

    def _watch_loss_of(self, trainer: Any) -> None:
        """Predict a loss that is computed outside of the model as it is first asked for, with what it is given."""
        if trainer is None or self._loss or not _has_own_loss(trainer):
            return
        mine, compute = vars(trainer).get("compute_loss"), trainer.compute_loss

        def first(model: nn.Module, *args: object, **kwargs: object) -> object:
            if model.training:
                vars(trainer).pop("compute_loss", None)
                vars(trainer).update({"compute_loss": mine} if mine else {})
                _tried(lambda: self._predict((args, kwargs), own=compute))
            return compute(model, *args, **kwargs)

        trainer.compute_loss = first

    def _log(self, state: Any) -> None:
        record = self.epoch()
        if record is not None:
            state.log_history.append({"epoch": state.epoch, "step": state.global_step, **record.as_metrics()})

    # -- for any loop

    def attach(self, model: nn.Module, optimizer: object, *, accumulate: int = 1, clip: float = 0.0) -> None:
        """Watch a model that is trained in a loop from now on.

        Args:
            model: what is called with each batch, as `Accelerator.prepare` returns it or as it was.
            optimizer: steps its parameters; also as `Accelerator.prepare` returns it.
            accumulate: batches of an optimizer step.
            clip: the norm at which gradients are clipped; 0 if they are not.
        """
        self.detach()
        self.decision, self.records = None, []
        model = getattr(model, "module", model)  # of DistributedDataParallel
        device = next(model.parameters()).device
        self._meter = meter = PeakMeter(device)
        held = [*model.parameters(), *model.buffers(), *gradients_of([], model)]
        inner = getattr(optimizer, "optimizer", optimizer)
        self._loop = model, inner, accumulate, clip
        held += states_of([inner]) if isinstance(inner, Optimizer) else []
        meter.start(part_bytes({"held": held}, device.type)["held"])
        meter.restart()

        self._is_watching, self._is_predicted, self._notes, entered = True, False, (), list[Offload]()

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not module.training or not torch.is_grad_enabled():
                return
            if not self._is_predicted:
                self._predict((args, kwargs))
            if self._offload is not None:
                entered.append(self._offload.__enter__())
                self._steps += 1

        def after() -> None:
            while entered:
                entered.pop().__exit__(None, None, None)

        def begin(*given: Any) -> None:
            if self._is_watching:
                _tried(lambda: before(*given))

        def end(*_: object) -> None:
            if self._is_watching:
                _tried(after)

        self._hooks = [
            model.register_forward_pre_hook(begin, with_kwargs=True),
            model.register_forward_hook(end, always_call=True),
        ]

    def epoch(self) -> EpochRecord | None:
        """End an epoch: return what was predicted and measured, and print nothing; None if nothing was predicted."""
        decision = self.decision
        if decision is None or self._meter is None:
            return None
        (footprint, budget), measured = prediction_of(decision), self._meter.read({})
        of_budget = budget.free_bytes, budget.margin_bytes
        record = EpochRecord(
            len(self.records), decision.batch_size, footprint, measured, *of_budget, offloaded=self._steps
        )
        self.records.append(record)
        self._steps = 0
        self._meter.restart()
        return record

    def detach(self) -> None:
        """Stop watching, and print one line of what was predicted and measured."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._is_watching, self._loop = [], False, None
        if self._meter is not None:
            self._meter.close()
        if self._offload is not None:
            self._offload.close()
            self._offload = None
        if self.records:
            self._print(last_line(self.records))

    # -- the prediction

    def _predict(self, given: Given, own: Loss | None = None) -> None:
        """Predict once, with a loss of the Trainer's ``own`` if that runs without memory."""
        self._is_watching = False  # the copy has these hooks, too
        assert self._loop is not None
        loop = self._loop
        found = attempt(lambda: self._decided(loop, given, own))
        self._is_watching, self.decision = True, found.value
        self._is_predicted = found.value is not None or own is None
        if not self._is_predicted:
            self._notes = (_NOT_FOLLOWED,)
        elif found.value is None:
            warn(f"MemGuard does not predict this run: {found.reason}")
        if found.value is None:
            return
        self._print(setup_text(found.value, "training"))
        if warning := warning_of(found.value):
            warn(f"MemGuard: {warning}")
        footprint, budget = prediction_of(found.value)
        over = footprint.most_device_bytes - budget.usable_bytes
        if over > 0 and self._wanted == "if_needed":
            self._offload = Offload(loop[0], max(0, footprint.parts["activations"] - over))
            self._print("MemGuard: saved activations go to the host; the step stays the same, and takes longer.")

    def _decided(self, loop: Loop, given: Given, own: Loss | None) -> Decision:
        model, optimizer, accumulate, clip = loop
        args, kwargs = map_tensors(given, lambda tensor: tensor.detach().cpu())
        loss = own or self._loss or _own_loss
        subject = subject_of(
            model,
            {"args": args, "kwargs": kwargs},
            step=lambda module, batch: loss(module, *batch["args"], **batch["kwargs"]),
            optimizer=_like(optimizer, model, clip) if isinstance(optimizer, Optimizer) else None,
        )
        trainer = {"accumulate_grad_batches": accumulate}
        subject = replace(subject, trainer=trainer, notes=(*subject.notes, *self._notes))
        target, budget = target_and_budget(str(next(model.parameters()).device), self._limits, model)
        with Captures():
            if own:  # a loss that reads values would take a real run of the whole model
                capture(program_of(subject, target), subject.batch_size, "fake")
            prediction = predicted(subject, target, capacity_bytes=target.capacity_bytes)
            request = Request(subject.batch_size, accumulate_grad_batches=accumulate, free_to_choose=False)
            return decide(prediction.footprint_at, budget, request)

    def _print(self, text: str) -> None:
        if not self._is_quiet:
            sys.stdout.write(f"{text}\n")


def _tried(work: Callable[[], object]) -> None:
    """Run a function; what it raises is a warning."""
    if reason := attempt(work).reason:
        warn(f"MemGuard goes on without: {reason}")


_NOT_FOLLOWED = "the loss is that of the model's output: what else the Trainer's compute_loss does was not followed"


def _trainer_behind(frame: FrameType | None) -> Any:
    """Find the Trainer that called this hook, which is given everything else."""
    while frame is not None:
        found = frame.f_locals.get("self")
        if hasattr(type(found), "compute_loss") and hasattr(type(found), "training_step"):
            return found
        frame = frame.f_back
    return None


def _has_own_loss(trainer: object) -> bool:
    """Whether the loss is more than the output's own."""
    kind: Any = type(trainer)
    is_theirs = "compute_loss" in vars(trainer) or not kind.compute_loss.__module__.startswith("transformers.")
    return is_theirs or bool(getattr(trainer, "compute_loss_func", None) or getattr(trainer, "label_smoother", None))


def _own_loss(model: Any, *args: Any, **kwargs: Any) -> Any:
    output = model(*args, **kwargs)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None:
        raise MemGuardError(
            f"the output of {type(model).__name__} has no loss: pass MemGuardCallback(loss=...), a function "
            "(model, *args, **kwargs) -> loss"
        )
    return found


def _like(optimizer: Optimizer, model: nn.Module, clip: float) -> MakeOptimizer:
    """Make optimizers with the settings of one, and no state, for copies of a model's parameters."""
    places = {id(each): place for place, each in enumerate(model.parameters())}

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        copies = [*parameters]
        made: Any = object.__new__(type(optimizer))
        own = {name: value for name, value in vars(optimizer).items() if name not in _BOUND}  # to the optimizer itself
        vars(made).update({name: copy.copy(value) if isinstance(value, dict) else value for name, value in own.items()})
        made.state = defaultdict(dict)
        made.param_groups = [
            {**group, "params": [copies[places[id(each)]] for each in group["params"]]}
            for group in optimizer.param_groups
        ]
        if hasattr(made, "mng"):
            made.mng = _settings_of_copies(made.mng, {own: copies[place] for own, place in places.items()})
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(made, name, OrderedDict())
        if clip:
            trained = [each for group in made.param_groups for each in group["params"]]
            made.register_step_pre_hook(lambda *_: _clip(trained, clip))
        return made  # type: ignore[no-any-return]

    return make


def _settings_of_copies(manager: Any, copies: Mapping[int, nn.Parameter]) -> Any:
    """Return bitsandbytes' settings of single parameters (the Trainer gives embeddings 32 bits) for their copies."""
    later = {id(getattr(module, name)): config for module, name, config in manager.module_weight_config_triple}
    known = {**manager.pid2config, **later}
    manager = copy.copy(manager)
    manager.module_weight_config_triple = []
    manager.pid2config = {id(each): known[own] for own, each in copies.items() if own in known}
    return manager


_BOUND = ("step", "zero_grad")  # schedulers wrap the method of the object


def _clip(parameters: list[nn.Parameter], norm: float) -> None:
    nn.utils.clip_grad_norm_(parameters, norm)
