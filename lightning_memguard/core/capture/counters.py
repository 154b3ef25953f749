"""Work that recurs later: counters that a step reads are moved forward, and the step runs on from there.

A step that does more every k-th time takes a counter modulo k, or compares it with a number. Whole numbers that grow by
one a step are replaced by `Counter`, an int that notes such numbers; known values of small tensors are noted as the
operators that compare them run. Lightning's own counters are read through `Counters.step` and `Counters.epoch`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.objects import COMPUTE, is_users, module_of, package_of, walk
from lightning_memguard.core.replay.replay import replay
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.simulation.constants import KnownFakeMode, known_value
from lightning_memguard.core.torch_port import FakeTensor
from lightning_memguard.core.trace.trace import Trace

_FURTHER_STEPS = 5  # the counters pass the place in them, whether they begin at 0 or 1 and are read before or after
_BEFORE = 2  # the place
_FARTHEST = 1_000_000
_LATE = 1000  # the place for what is computed from a counter


@dataclass(frozen=True)
class Due:
    """Numbers that counters of steps and of epochs are moved to (0: not moved), and the line that reads them there."""

    steps: int
    epochs: int
    line: str

    @property
    def place(self) -> str:
        """The place in words, such as ``"step 200 (galore_projector.py:20)"``."""
        where = [f"{name} {number}" for name, number in (("step", self.steps), ("epoch", self.epochs)) if number]
        return f"{' and '.join(where)} ({self.line})"


@dataclass
class _Numbers:
    """Numbers that counters were divided by (``periods``) or compared with (``bounds``), each with its line."""

    periods: dict[int, str] = field(default_factory=dict)
    bounds: dict[int, str] = field(default_factory=dict)

    def note(self, number: object, frame: FrameType, *, period: bool) -> None:
        if not isinstance(number, (int, float)) or not 1 < number <= _FARTHEST or (period and number == _BEFORE):
            return
        if package_of(frame) not in COMPUTE or module_of(frame).startswith("torch.optim."):
            line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            (self.periods if period else self.bounds).setdefault(int(number), line)

    def place(self, limit: float) -> tuple[int, str]:
        """The number at which all that can happen at the same time does, and the line that reads the last of it."""
        periods, bounds = ([k for k in sorted(each) if k <= limit] for each in (self.periods, self.bounds))
        if not periods and not bounds:
            return 0, ""
        place, line = 1, ""
        for period in periods:
            together = math.lcm(place, period)
            place, line = (together, self.periods[period]) if together <= limit else (place, line)
        after = place * -(-bounds[-1] // place) if bounds else 0
        return (after, self.bounds[bounds[-1]]) if place < after <= limit else (place, line)


class Counter(int):
    """Whole number that grows by one a step; numbers that it is compared with or divided by are noted."""

    numbers: _Numbers

    def __reduce__(self) -> Any:
        return int, (int(self),)


class Derived(float):
    """Number computed from a counter, as a correction of a bias is: where it passes another one is unknown."""

    numbers: _Numbers

    def __reduce__(self) -> Any:
        return float, (float(self),)


def _like(result: Any, numbers: _Numbers) -> Any:
    """A number computed from a counter, which notes as that does."""
    if type(result) not in (int, float):
        return result
    derived = Counter(result) if type(result) is int else Derived(result)
    derived.numbers = numbers
    return derived


def _computing(kind: type, name: str) -> Callable[..., Any]:
    operate = getattr(kind, name)
    return lambda self, *others: _like(operate(self, *others), self.numbers)


def _noting(kind: type, name: str) -> Callable[..., Any]:
    operate, period = getattr(kind, name), name in _DIVISIONS

    def noting(self: Counter | Derived, other: object) -> Any:
        self.numbers.note(other, sys._getframe(1), period=period)
        if type(self) is Derived and not period:
            self.numbers.note(_LATE, sys._getframe(1), period=False)
        return operate(self, other)

    return noting


_DIVISIONS = ("__mod__", "__floordiv__")
_SUMS = [f"__{r}{name}__" for name in ("add", "sub", "mul", "truediv", "pow") for r in ("", "r")]
for _kind, _numeric in ((Counter, int), (Derived, float)):
    for _name in _SUMS:
        setattr(_kind, _name, _computing(_numeric, _name))
    for _name in (*_DIVISIONS, "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
        setattr(_kind, _name, _noting(_numeric, _name))
    type.__setattr__(_kind, "__hash__", _numeric.__hash__)


class Counters:
    """The counters of a training that is captured.

    Args:
        due: where to move them to once the steps were recorded; None to find that out.
        active: False leaves everything as it is.
    """

    def __init__(self, due: Due | None = None, *, active: bool = True) -> None:
        self._due, self._active = due, active
        self._steps, self._epochs = _Numbers(), _Numbers()
        self._limits: tuple[float, float] = math.inf, math.inf
        self._values: dict[tuple[int, object], int] = {}
        self._growths: Counts[tuple[int, object]] = Counts()
        self._batches = self._shift = 0
        self.first_moved = 0  # the batch before which they were moved; 0 if they were not

    def limit(self, steps: float, epochs: float) -> None:
        """Set the most optimizer steps and epochs that the run takes."""
        self._limits = steps, epochs

    def read(self, mode: object) -> None:
        """Note comparisons of known values of fake tensors, too."""
        if self._active and isinstance(mode, KnownFakeMode):
            mode.compared = self._note_comparison

    def _note_comparison(self, number: object, *, period: bool) -> None:
        frame: Any = sys._getframe(1)
        while frame and package_of(frame) in COMPUTE:
            frame = frame.f_back
        if frame and self._batches:
            self._steps.note(number, frame, period=period)

    def read_out(self, number: Any) -> Any:
        """A number that was read out of a tensor: it may count the steps."""
        counts = self._active and type(number) in (int, float) and abs(number - self._batches) <= 1
        return _like(number, self._steps) if counts and self._batches else number

    def step(self, number: int) -> int:
        """A number of batches or steps of the Trainer, as the step reads it."""
        return _like(number + self._shift, self._steps) if self._active else number

    def epoch(self, number: int) -> int:
        """The number of the Trainer's epoch, as the step reads it: after the move, each batch is of the next one."""
        moved = self._due is not None and self._due.epochs and self.first_moved
        shift = self._due.epochs - _BEFORE + self._batches - self.first_moved if moved and self._due else 0
        return _like(number + shift, self._epochs) if self._active else number

    def note(self, optimizers: Iterable[Optimizer], module: nn.Module) -> None:
        """Note all whole numbers before a batch, and put counters in place of those that grew by one since the last."""
        self._batches += 1
        if not self._active or self.first_moved:
            return
        before, self._values = self._values, {}
        for owner in _owners([*optimizers, module]):
            for name, value in owner.items():
                key = id(owner), name
                if type(value) in (int, Counter):
                    self._values[key] = int(value)
                    if before and int(value) - before.get(key, 0) == 1:
                        self._growths[key] += 1
                        owner[name] = _like(int(value), self._steps)

    def move(self, optimizers: Iterable[Optimizer], module: nn.Module) -> int:
        """Move the counters, if they are to be moved, and return how many further batches are then recorded."""
        if self._due is None:
            return 0
        self.first_moved, place = self._batches - 1, self._due.steps

        def missing(value: int) -> int:
            return max(0, place * (value // place + 1) - _BEFORE - value) if place else 0

        self._shift = missing(self.first_moved) // 2 * 2  # gradients may be accumulated over two batches
        for owner in _owners([*optimizers, module]):
            for name, value in owner.items():
                if type(value) is Counter and self._growths[id(owner), name] > 1:
                    owner[name] = _like(int(value) + missing(int(value)), self._steps)
                elif isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
                    known = known_value(value) if isinstance(value, FakeTensor) else value
                    number = None if known is None else float(known)
                    if number is not None and 1 <= number <= self.first_moved and number == int(number):
                        with torch.no_grad():
                            value.add_(missing(int(number)))
        return _FURTHER_STEPS * (2 if self.first_moved > _BEFORE else 1)

    @property
    def due(self) -> Due | None:
        """The numbers that counters are moved to, if that may change what a step does."""
        (steps, line), (epochs, other) = (
            numbers.place(limit) for numbers, limit in zip((self._steps, self._epochs), self._limits, strict=True)
        )
        return Due(steps, epochs, line or other) if steps or epochs else None

    def differ(self, trace: Trace) -> bool:
        """Whether a step after the move allocated anything else than the steps before it did."""
        steps: dict[int, list[tuple[object, ...]]] = defaultdict(list)
        for event in trace.events:
            if event.action == "alloc" and event.phase != "setup":
                steps[event.step].append((event.nbytes, event.operator, event.phase))
        usual = [steps[number] for number in range(1, self.first_moved)]
        return any(events not in usual for number, events in steps.items() if number >= self.first_moved)

    def peaks_later(self, trace: Trace) -> bool:
        """Whether a step after the move takes the most."""
        event = replay(trace.only("point"), AllocatorSettings(kind="exact")).peak_event
        return event is not None and event.step >= self.first_moved


def _owners(roots: Iterable[object]) -> Iterator[MutableMapping[Any, Any]]:
    """The attributes of modules, optimizers and users' objects that are reached from some, and optimizers' state."""
    for owner in walk(roots, _inside):
        yield from _values_of(owner)


def _inside(owner: object) -> Iterator[object]:
    values = (value for held in _values_of(owner) for value in held.values() if _is_owner(value))
    return chain(owner.children() if isinstance(owner, nn.Module) else (), values)


def _values_of(owner: object) -> Iterator[MutableMapping[Any, Any]]:
    yield vars(owner)
    if isinstance(owner, nn.Module):
        yield port.buffers_of(owner)
    if isinstance(owner, Optimizer):
        states = getattr(owner, "state", {}).values()
        yield from (*owner.param_groups, *(state for state in states if isinstance(state, dict)))


def _is_owner(thing: object) -> bool:
    return isinstance(thing, (nn.Module, Optimizer)) or (is_users(thing) and hasattr(thing, "__dict__"))
