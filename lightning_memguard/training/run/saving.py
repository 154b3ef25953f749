"""Checkpoints of a fit: what they hold, and the memory that it takes to write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_memguard.core.capture.curve import Curve
from lightning_memguard.core.capture.holders import tensors_of
from lightning_memguard.core.capture.recorder import part_bytes
from lightning_memguard.training.adapter import callbacks
from lightning_memguard.training.run.reading import Run


@dataclass(frozen=True)
class Saving:
    """Checkpoints of a fit, by what they hold.

    Attributes:
        parts: the parts of the training in them; empty if none are saved.
        unsaved_bytes: of the parameters and buffers, what they do not hold; below 0 if they hold more.
        made_bytes: of tensors that a hook makes for a checkpoint.
        on_host: bytes of the host to save the weights of another device, and those for its optimizer state.
        notes: what had to be assumed, in plain words.
    """

    parts: tuple[str, ...] = ()
    unsaved_bytes: int = 0
    made_bytes: int = 0
    on_host: tuple[int, int] = (0, 0)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: Run, training: Curve, *, counts_host: bool) -> Saving:
        """Find out what a run saves; what the host needs for it only if that ``counts_host``."""
        module, datamodule = run.program.module, getattr(run.program.trainer, "datamodule", None)
        savers = callbacks.hooks_that_save(run.facts, module)
        parts = callbacks.saved_parts(run.facts, savers)
        if not parts:
            return cls()
        unsaved, made = (0, 0) if run.program.layout else callbacks.unsaved_bytes(module, datamodule)
        on_host = _bytes_on_host(run, training, parts, unsaved) if counts_host else (0, 0)
        own = (f"{', '.join(savers)} saves the training, whose buffer in memory is included",) if savers else ()
        return cls(parts, unsaved, made, on_host, (*own, *callbacks.notes_on_hyperparameters(module, datamodule)))

    def content_bytes(self, parts: Mapping[str, int]) -> int:
        """Bytes of a checkpoint of a training whose parts take so many bytes."""
        return max(0, sum(parts.get(part, 0) for part in self.parts) - self.unsaved_bytes)

    def remedies(self, *, sharded: bool) -> dict[str, int]:
        """Bytes of the host that other ways of saving need less, by how."""
        less = {"ModelCheckpoint(save_weights_only=True)": self.on_host[1]}
        if sharded:
            how = 'a sharded checkpoint (state_dict_type="sharded", save_distributed_checkpoint=True)'
            less[how] = sum(self.on_host)
        return less


def _bytes_on_host(run: Run, training: Curve, saved: Sequence[str], unsaved: int) -> tuple[int, int]:
    """Bytes of the host for saving weights and optimizer state: a buffer, and under sharding what is gathered first."""
    trace = next(iter(training.surveyed.values()), None)
    layout = run.program.layout
    if trace is None or (layout and layout.saves_shards):
        return 0, 0
    weights = max(0, part_bytes({"model": tensors_of(run.program.module)}, "cpu")["model"] - unsaved)
    step = training.footprint_at(trace.batch_size)
    own = max(1, step.parts["parameters"] + step.parts["buffers"])
    state = sum(nbytes for part, nbytes in trace.alive_between_steps(gradients=False) if part in saved)
    whole = (2 if layout else 1) * (weights or own * (layout.ranks if layout else 1))
    return whole, int(whole * state / own)
