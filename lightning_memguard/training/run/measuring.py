"""Memory that a run really takes: the peak on its device and of its workers, by part where that can be read."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lightning_memguard.core.batch.nesting import batch_bytes
from lightning_memguard.core.capture.holders import tensors_of
from lightning_memguard.core.capture.recorder import gradients_of, part_bytes, states_of
from lightning_memguard.core.decision.record import AFTER_EPOCH, AFTER_VALIDATION, TRAINING, VALIDATION, Measured
from lightning_memguard.core.device.children import ChildrenMeter
from lightning_memguard.core.device.host import or_none
from lightning_memguard.core.device.meter import PeakMeter, held_now
from lightning_memguard.training.adapter import callbacks
from lightning_memguard.training.facts.ranks import attempt

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer

_STEPS_MEASURED = 4  # optimizers stepped in turn each have a step of their own
_BATCHES_COUNTED = 2  # of a validation; of a training, until two optimizer steps are done
_MOST_SAMPLES_COUNTED = 256
_MOST_BATCHES_COUNTED = 16  # a step may accumulate many


class Measuring:
    """Measures one run, epoch by epoch; see `PeakMeter`.

    Attributes:
        between_steps: optimizer steps done, and bytes held then: after the first step, and when last read.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._device = trainer.strategy.root_device
        self._meter = PeakMeter(self._device)
        self._host_meter: PeakMeter | None = None
        self._children: ChildrenMeter | None = None
        self._gradient_bytes: list[int] = []
        self.between_steps: list[tuple[int, int]] = []
        self._counted_until = 0, 0  # step and batch
        self._again = False  # whether the next batch is counted in any case
        self._pauses = False  # whether counting goes on with the next batch
        self._others = 0  # bytes that callbacks hold
        self._last: float | None = None  # when the batch before began, if what it takes counts
        self._ends_epoch = False  # whether this batch does
        self._times: tuple[float, int] = 0.0, 0  # seconds, and of how many batches

    def watch_children(self) -> None:
        """Measure worker processes, too; call it before the sanity check, whose batches stay in shared memory."""
        self._children = attempt(ChildrenMeter).value

    def start(self, *, on_host: bool) -> None:
        """Start; what the model and its optimizers hold is the training's. ``on_host``: measure the host's peak too."""
        of_run: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        others = attempt(lambda: callbacks.held_bytes(of_run, self._module, self._device, averaging=True))
        self._others = others.value or 0
        self._meter.start(self._held() + self._others)
        if on_host:
            self._host_meter = PeakMeter(torch.device("cpu"))
            self._host_meter.start(0)

    def _held(self) -> int:
        """Bytes of the module; in a fit, also of the optimizers' states and of gradients that a fit before has left."""
        held = tensors_of(self._module)
        if self._is_fit:
            optimizers = self._trainer.optimizers
            held += [*states_of(optimizers), *gradients_of(optimizers, self._module)]
        return part_bytes({"held": held}, self._device.type)["held"]

    @property
    def _is_fit(self) -> bool:
        """Whether states and gradients are this run's: one that evaluates after a fit finds those of the fit."""
        return bool(self._trainer.state.fn == "fit")

    def at_batch(self, batch: object, batch_idx: int, *, trains: bool, last: bool, largest: bool) -> None:
        """Look at the clock, and at the workers: their shared memory, and their pages after 2, 4, 8, ... batches.

        The tensors of an epoch's first, last and ``largest`` steps are counted.
        """
        now, before, (seconds, batches) = time.perf_counter(), self._last, self._times
        self._ends_epoch = trains and last
        if before is not None and trains and batch_idx:
            self._times = seconds + now - before, batches + 1
        self._last = now if trains and batch_idx >= self._trainer.accumulate_grad_batches else None
        if self._children is not None:
            self._children.read_shared()
            if batch_idx > 1 and batch_idx.bit_count() == 1:
                self._children.read_pages()
        if self._meter.tensors is not None:
            counts, self._again = batch_idx == 0 or last or largest or self._again, False
            if counts or self._pauses or self._meter.tensors.is_open:
                self._count_at(batch, batch_idx, trains=trains, counts=counts)

    def _count_at(self, batch: object, batch_idx: int, *, trains: bool, counts: bool) -> None:
        steps = self._trainer.global_step if trains else batch_idx
        if counts:
            self._count(TRAINING if trains else VALIDATION, batch)
            self._counted_until = steps + _BATCHES_COUNTED, batch_idx + _MOST_BATCHES_COUNTED
        elif steps >= self._counted_until[0] or batch_idx >= self._counted_until[1]:
            self.stop_counting()
        else:
            self._count(TRAINING if trains else VALIDATION, batch)
        self._pauses = False

    @property
    def is_counting(self) -> bool:
        """Whether the tensors of this step are counted."""
        return self._meter.tensors is not None and self._meter.tensors.is_open

    def count_backward(self) -> None:
        """Count afresh as a backward pass begins: earlier gradients were freed, unseen by what counts."""
        if self.is_counting:
            self._count(TRAINING)

    def count_again(self) -> None:
        """Count the tensors of the next steps: the process took more than those that were counted explain."""
        if self._meter.tensors is not None:
            self._meter.tensors.be_due()
            self._again = True

    def end_batch(self, batch_size: int) -> None:
        """Stop counting until the next batch is there, if it is collated of many samples: each takes blocks.

        What follows an epoch's last batch is no step: other callbacks' hooks may run before those of this one.
        """
        if self._ends_epoch and self.is_counting:
            self.count_hooks_of_epoch()
        elif batch_size > _MOST_SAMPLES_COUNTED:
            self._pauses = self.is_counting
            self.stop_counting()

    def count_hooks_of_validation(self) -> None:
        """Count what the hooks at the end of a validation take."""
        self._count(AFTER_VALIDATION)

    def count_hooks_of_epoch(self) -> None:
        """Count what the hooks at the end of an epoch take."""
        self._count(AFTER_EPOCH)

    def stop_counting(self) -> None:
        """Count no more until a step begins whose tensors are counted."""
        if self._meter.tensors is not None:
            or_none(self._meter.tensors.close)

    def _count(self, kind: str, batch: object = None) -> None:
        if self._meter.tensors is not None:
            known = None if batch is None else lambda: self._held() + self._others + batch_bytes(batch)
            or_none(self._meter.tensors.mark, kind, known)

    def outside_tensors(self, batch: object) -> dict[str, int]:
        """Bytes that the process takes now outside of the tensors of a step, as a batch begins, by what takes them."""
        tensors = self._meter.tensors
        if tensors is None:
            return {}
        return or_none(tensors.others, self._held() + self._others + batch_bytes(batch)) or {}

    @property
    def stayed_bytes(self) -> int:
        """Bytes that came after the first step and are still there, as last noted."""
        return max(0, self.between_steps[-1][1] - self.between_steps[0][1]) if self.between_steps else 0

    def note_held(self) -> None:
        """Note what is held between two steps, for an error message to compare."""
        steps, held = self._trainer.global_step, or_none(held_now, self._device)
        if held and steps:
            self.between_steps = [*self.between_steps[:1], (steps, held)]

    def measure_gradients(self) -> bool:
        """Measure the gradients while they are there: validation clears them. Return False if enough were measured."""
        if len(self._gradient_bytes) == _STEPS_MEASURED:
            return False
        gradients = {"gradients": gradients_of(self._trainer.optimizers, self._module)}
        self._gradient_bytes.append(part_bytes(gradients, self._device.type)["gradients"])
        return True

    def forget_gradients(self) -> None:
        """Measure the gradients of the next steps: an epoch begins."""
        self._gradient_bytes.clear()

    def peak(self) -> Measured:
        """The peak since the last `restart`, without its parts, which take time to read."""
        return self._with_children(self._meter.read({}))

    def peak_by_part(self) -> Measured:
        """The peak since the last `restart`, with what can be read of its parts."""
        module, states = self._module, states_of(self._trainer.optimizers) if self._is_fit else []
        parts = {"parameters": module.parameters(), "buffers": module.buffers(), "optimizer_state": states}
        nbytes = part_bytes(parts, self._device.type)
        return self._with_children(self._meter.read({**nbytes, "gradients": max(self._gradient_bytes, default=0)}))

    def _with_children(self, measured: Measured) -> Measured:
        """Add what worker processes take: on the CPU that is the device's, else it is the host's."""
        taken = self._children.peak_bytes if self._children else 0
        if self._host_meter is not None:
            return replace(measured, host_bytes=taken + self._host_meter.read({}).peak_bytes)
        if not taken or not measured.peak_bytes:
            return measured
        process = measured.process_bytes and measured.process_bytes + taken
        peak, source = measured.peak_bytes + taken, f"{measured.source} and workers"
        return replace(measured, peak_bytes=peak, source=source, process_bytes=process)

    @property
    def step_seconds(self) -> float | None:
        """The mean time of a step since the last `restart`, from the beginnings of its batches; None if unknown.

        A GPU is not waited for: over many steps, the host cannot begin them faster than they are done.
        """
        seconds, batches = self._times
        return seconds / batches * self._trainer.accumulate_grad_batches if batches else None

    def restart(self) -> None:
        """Forget the peaks and times so far."""
        self._times = 0.0, 0
        for meter in (self._meter, self._host_meter, self._children):
            if meter is not None:
                meter.restart()

    def close(self) -> None:
        """Stop measuring."""
        attempt(self._meter.close)
        self._children = self._host_meter = None
