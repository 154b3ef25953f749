"""During a fit: before each step, whether its activations go to the host; what is announced and counted of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from lightning_memguard.core.batch.nesting import batch_bytes
from lightning_memguard.core.decision.record import TENSORS
from lightning_memguard.core.device.budget import read_budget
from lightning_memguard.core.device.malloc import return_freed_memory
from lightning_memguard.report.failure import Larger, Offloaded, announcement, less_room_words, surprise_words
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.training.offload.engine import Offload
from lightning_memguard.training.offload.policy import Demand, Room, kept_bytes
from lightning_memguard.training.offload.predicted import predict_offloaded
from lightning_memguard.training.run.batch_monitor import BatchWatch, Kind
from lightning_memguard.training.run.measuring import Measuring
from lightning_memguard.training.run.profile import RunProfile
from lightning_memguard.units import MIB

Wanted = Literal["if_needed", "always", "never"]
_POLL_SECONDS = 1.0
_MOST_PLANS = 1024
_NOISE_BYTES = 16 * MIB  # of resident memory, that no tensor takes
_STATES = ("parameters", "buffers", "callbacks")  # alive between two steps
_LATER = ("optimizer_state", "gradients", "communication")  # from the second step on
_OF_KERNELS = ("workspaces",)


class Plan(NamedTuple):
    """Plan for batches of some shapes: bytes of activations that stay, None for all; whether some must move.

    ``likely_bytes`` are predicted of their step as it is.
    """

    kept: int | None
    must_move: bool
    likely_bytes: int = 0


@dataclass(eq=False)
class Offloading:
    """Puts the activations of steps that will not fit on the host, between creation and `close`.

    Attributes:
        trainer: of the fit.
        module: that is trained.
        profile: of the run.
        measuring: what its steps really take.
        announce: warns of something.
        wanted: ``MemGuard(offload=...)``.
        steps: how many steps of the epoch have moved some.
    """

    trainer: Any
    module: Any
    profile: RunProfile
    measuring: Measuring
    announce: Callable[[str], None]
    wanted: Wanted = "if_needed"
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._strategy: Any = self.trainer.strategy
        host = self.profile.host_at(self.profile.request.batch_size)
        left = host.budget.usable_bytes - host.most_bytes if host and host.budget else None
        self._offload = Offload(self.module, host_bytes=left and max(0, left))
        self._own: Any = None  # what stood in the place of the strategy's method, while ours does
        self._is_on = self._has_moved = self._whole_ran = self._usual_fits = False
        self._due, self._retries, self._pieces_bytes = 0.0, 0, 0
        self._measured_bytes = self._tensor_bytes = 0  # of a step, and of these what tensors take for sure
        self._ran_bytes = 0  # predicted of the largest step that has run
        self._room = Room(0, 0)
        self._undo: list[Callable[[], None]] = []
        self._plans: dict[object, Plan] = {}  # by the shapes of a batch; () for the usual ones
        self._plan = Plan(None, must_move=False)
        self._rests: dict[Kind, Offloaded | None] = {}
        self._announced: set[str] = set()
        if self.wanted == "always":
            self._set(0)

    @property
    def why_not(self) -> str:
        """Why activations cannot go to the host; empty if they can, or none were to."""
        return self._offload.refused or self._offload.trouble

    # -- before each step

    def before(self, watch: BatchWatch, batch: object, batch_idx: int, larger: Larger | None) -> None:
        """Decide what becomes of the activations of the step on this batch; announce a larger batch."""
        now = time.monotonic()
        if watch.is_same and now < self._due and not larger:
            return
        if now >= self._due:
            self._due = now + _POLL_SECONDS
            self._look(watch, batch)
        place = watch.shapes if watch.exceeds or not self._usual_fits else ()
        if place not in self._plans or larger:
            if len(self._plans) > _MOST_PLANS:
                self._plans.clear()
            self._plans[place] = self._plan_for(watch, batch, batch_idx, larger)
        self._whole_ran = watch.saw_whole  # once this step is over
        self._ran_bytes = max(self._ran_bytes, self._plans[place].likely_bytes)
        if self.wanted != "always":
            self._plan = self._plans[place]
            self._set(self._plan.kept)

    def _plan_for(self, watch: BatchWatch, batch: object, batch_idx: int, larger: Larger | None) -> Plan:
        kind, demand = self._demand(watch, batch)
        if not demand.fits(self._room) and watch.exceeds and demand.times > 1 and not larger:
            larger = watch.predict(batch)  # it may be less than it seems from a known one
            kind, demand = self._demand(watch, batch)
        stays = demand.fits(self._room) or bool(self._offload.refused)
        rest = None if stays else self._rest(kind)
        taken = (rest.footprint.peak_device_bytes, rest.footprint.most_device_bytes) if rest else None
        kept = None if stays else kept_bytes(demand, self._room, taken)
        must_move = not stays and demand.must_move(self._room)
        if larger:
            self.announce(announcement(larger, "train", batch_idx, rest if must_move else None))
        elif must_move:
            self._say("room", less_room_words(kind.footprint, self.profile.budget, self._room.usable_bytes, rest))
        return Plan(kept, must_move, kind.footprint.peak_device_bytes)

    def _demand(self, watch: BatchWatch, batch: object) -> tuple[Kind, Demand]:
        """Demand of batches like this one; what was measured of the usual ones corrects it."""
        kind, times = watch.alike(batch)
        return kind, self._demand_of(watch.kinds[0], kind, times)

    def _demand_of(self, usual: Kind, kind: Kind, times: float = 1.0) -> Demand:
        footprint, measured, sure = kind.footprint, self._measured_bytes, self._tensor_bytes
        parts = [*_STATES, *_LATER, *_OF_KERNELS]
        fixed = footprint.outside_bytes + sum(footprint.parts.get(part, 0) for part in parts)
        likely, most = footprint.peak_device_bytes, footprint.most_device_bytes
        if measured and kind is usual:
            return Demand(likely, measured if sure > most else min(most, measured), fixed, times, measured=True)
        more = max(1.0, sure / max(1, usual.footprint.peak_device_bytes, self._ran_bytes))
        return Demand(int(likely * more), int(max(most, likely * more)), fixed, times)

    def _rest(self, kind: Kind) -> Offloaded | None:
        if kind not in self._rests:
            found = attempt(lambda: predict_offloaded(kind.program, kind.terms, kind.batch_size)).value
            known = found and replace(found, footprint=self.profile.with_extra(found.footprint))
            self._rests[kind] = None if known and known.footprint.is_partial else known
        return self._rests[kind]

    # -- what there is

    def _look(self, watch: BatchWatch, batch: object) -> None:
        """Read what is free, and what the steps so far have taken; plans on other figures are made again."""
        before = self._room, self._measured_bytes, self._tensor_bytes
        if self._whole_ran and not self._has_moved and self.trainer.global_step >= 2 * len(self.trainer.optimizers):
            measured = self.measuring.peak()
            counts_process = self._strategy.root_device.type == "cpu" and not measured.source.startswith(TENSORS)
            noise = _NOISE_BYTES if counts_process else 0
            self._measured_bytes = max(self._measured_bytes, measured.on_device(watch.kinds[0].footprint))
            self._tensor_bytes = max(self._tensor_bytes, measured.peak_bytes - noise)
        self._room, usual = self._read_room(watch.kinds[0], batch), watch.kinds[0]
        if (self._room, self._measured_bytes, self._tensor_bytes) != before:
            self._plans.clear()
            self._usual_fits = self._demand_of(usual, usual).fits(self._room)

    def _read_room(self, usual: Kind, batch: object) -> Room:
        """Return what the training may take in all: now, or at setup if that was less."""
        then, parts, device = self.profile.budget, usual.footprint.parts, self._strategy.root_device
        alive = _STATES + (_LATER if self.trainer.global_step else ())
        held = sum(parts.get(part, 0) for part in alive) + batch_bytes(batch)
        now = attempt(lambda: read_budget(device, margin=then.margin_share, already_held_bytes=held)).value
        known = [each for each in (then, now) if each]
        usable = min(each.usable_bytes for each in known) - self._in_pieces()
        return Room(min(each.free_bytes for each in known), max(0, usable))

    def _in_pieces(self) -> int:
        """Bytes that the allocator holds in pieces too small to use, once it had to empty its cache to make room."""
        if self._strategy.root_device.type == "cuda":
            measured, before = self.measuring.peak(), self._retries
            self._retries = measured.alloc_retries or 0
            if self._retries > before and measured.peak_allocated_bytes is not None:
                unused = (measured.peak_reserved_bytes or 0) - measured.peak_allocated_bytes
                self._pieces_bytes = max(self._pieces_bytes, unused)
        return self._pieces_bytes

    # -- the strategy's step

    def _set(self, kept: int | None) -> None:
        """Run the next steps with so many bytes of activations on the device; None: as without MemGuard."""
        if kept is None:
            self._take_away()
            return
        self._offload.keep_bytes = kept
        if not self._is_on:
            if not self._undo:  # the room is tight from now on
                self._undo.append(return_freed_memory(self._strategy.root_device, fill_holes=False))
            self._is_on, self._own = True, vars(self._strategy).get("training_step")
            step = self._strategy.training_step
            self._strategy.training_step = partial(self._run, step)

    def _take_away(self) -> None:
        if self._is_on:
            self._is_on = False
            if self._own is None:
                del self._strategy.training_step
            else:
                self._strategy.training_step = self._own

    def _run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._offload:
            result = step(*args, **kwargs)
        if self._offload.moved_bytes:
            self.steps += 1
            self._has_moved = True
            if self.wanted != "always" and not self._plan.must_move:
                self._say("surprise", surprise_words(self._offload.moved_bytes))
        return result

    def _say(self, kind: str, text: str) -> None:
        if kind not in self._announced:
            self._announced.add(kind)
            self.announce(text)

    def close(self) -> None:
        """Leave the strategy as it was."""
        self._take_away()
        self._offload.close()
        while self._undo:
            self._undo.pop()()
