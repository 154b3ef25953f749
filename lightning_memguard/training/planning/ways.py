"""The samples that an optimizer step is to see -> the ways to train so that fit, with their memory, time and cost.

Two captures tell roughly how a way grows; what is offered in the end was captured as it would run.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

from torch import nn

from lightning_memguard.core import gpus
from lightning_memguard.core.capture.capture import Captures, UserCode
from lightning_memguard.core.capture.predict import Prediction, predict, speed_here
from lightning_memguard.core.capture.program import PRECISIONS, Program
from lightning_memguard.core.decision.decision import Budget, Limits, check_count
from lightning_memguard.core.range import Range
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.training.planning.layouts import shardings_for
from lightning_memguard.training.planning.remedies import Remedy, checkpointing, offloading, precisions
from lightning_memguard.training.planning.structure import Structure
from lightning_memguard.training.planning.subject import MakeOptimizer, Step, Subject, program_of, subject_of
from lightning_memguard.training.planning.target import Target, target_and_budget


@dataclass(frozen=True)
class TrainingWay:
    """One way to see so many samples a step.

    Attributes:
        device: the GPU, or ``"CPU"``.
        ranks: how many train together, each on samples of its own.
        batch_size: samples of a batch on each.
        accumulate_grad_batches: batches of a step.
        changes: the names of what else is changed, such as ``"bf16-mixed"``; empty for the training as it is.
        how: what to write for each.
        costs: what each costs in accuracy, time or behavior, in plain words.
        footprint: the memory of the step, and its time.
        budget: what the device offers.
        dollars_per_hour: the price of the devices of a rank; None if none was given.
    """

    device: str
    ranks: int
    batch_size: int
    accumulate_grad_batches: int
    changes: tuple[str, ...]
    how: tuple[str, ...]
    costs: tuple[str, ...]
    footprint: Footprint
    budget: Budget
    dollars_per_hour: float | None = None

    @property
    def samples(self) -> int:
        """Samples of an optimizer step, over all ranks."""
        return self.batch_size * self.accumulate_grad_batches * self.ranks

    @cached_property
    def seconds_per_sample(self) -> Range[float] | None:
        """The time of a step, by its samples; None if the device's speed is not known."""
        step = self.footprint.step_seconds
        return step and step.scaled(1 / self.samples)

    @property
    def dollars_per_million(self) -> float | None:
        """The likely cost of a million samples; None without a price or a time."""
        seconds, price = self.seconds_per_sample, self.dollars_per_hour
        return None if seconds is None or price is None else seconds.likely * 1e6 / 3600 * price * self.ranks

    @property
    def altered(self) -> int:
        """How much it changes the numbers: 0 not at all, 1 mixed precision, 2 low precision throughout."""
        return max((1 if name.endswith("-mixed") else 2 for name in self.changes if name in PRECISIONS), default=0)


@dataclass(frozen=True)
class Ways:
    """The `TrainingWay` records worth a look, the best first; and in words, which devices or changes have none."""

    ways: tuple[TrainingWay, ...]
    left_out: tuple[str, ...] = ()


def ways_to_train(
    model: nn.Module,
    batch: object,
    target_batch: int,
    *,
    devices: Sequence[str] = ("cuda",),
    prices: Mapping[str, float] | None = None,
    step: Step | None = None,
    optimizer: MakeOptimizer | None = None,
    precision: str = "32-true",
    limits: Limits | None = None,
) -> tuple[TrainingWay, ...]:
    """Find the ways to train with so many samples a step that fit: each with its memory, time and cost.

    A way is a batch size, an accumulation, a precision and activation checkpointing or none, on one device. Returned
    are those that no other beats in time, cost and faithfulness to the training as it is.

    Args:
        model: as for `estimate`; so are ``batch``, ``step``, ``optimizer`` and ``precision``.
        batch: an example batch.
        target_batch: samples that each optimizer step is to see.
        devices: ``"cpu"``, ``"cuda"``, or GPUs by name, which need not be there.
        prices: dollars an hour, by the name of a device: ``{"H100": 2.5}``.
        step: for a plain module.
        optimizer: for a plain module.
        precision: the training's own.
        limits: of the memory and the batch size.

    Returns:
        The ways, the cheapest first if there are prices, else the fastest; empty if none fits.

    Raises:
        MemGuardError: an argument is unknown.
        CannotTraceError: the step cannot be predicted.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> batch = torch.zeros(8, 64)
        >>> found = ways_to_train(nn.Linear(64, 64), batch, 32, devices=["T4"], step=lambda m, x: m(x).sum())
        >>> found[0].batch_size, found[0].accumulate_grad_batches
        (32, 1)
    """
    subject = subject_of(model, batch, step=step, optimizer=optimizer, precision=precision)
    return find_ways(subject, target_batch, devices, limits, prices).ways


def find_ways(
    subject: Subject,
    samples: int,
    devices: Sequence[str],
    limits: Limits | None = None,
    prices: Mapping[str, float] | None = None,
    *,
    say: Callable[[str], object] = lambda _: None,
) -> Ways:
    """The ways of a subject to see so many samples a step; see `ways_to_train`.

    Raises:
        MemGuardError: the samples cannot be divided so, or a device or price is unknown.
        CannotTraceError: the step cannot be predicted.
    """
    limits = limits or Limits()
    search = _Search(subject, samples, limits, [_Place.of(subject, each, limits, prices or {}) for each in devices])
    with UserCode[_Task, _Answer](search.work) as children:
        say(f"tracing {len(search.options)} ways")
        candidates, left_out = search.candidates(children)
        ways = search.front(children, candidates, say)
    known = {way.device for each in candidates.values() for way in each}
    nothing = [f"nothing that was tried fits {p.budget.device}" for p in search.places if p.budget.device not in known]
    shown = {way.device for way in ways}
    beaten = [f"every way on {device} is beaten by one above" for device in sorted(known - shown)]
    return Ways(tuple(ways), (*left_out, *beaten, *nothing))


class _Place(NamedTuple):
    """A device that was asked for."""

    target: Target
    budget: Budget
    dollars: float | None

    @classmethod
    def of(cls, subject: Subject, device: str, limits: Limits, prices: Mapping[str, float]) -> _Place:
        target, budget = target_and_budget(device, limits, subject.model)
        same = (of for name, of in prices.items() if name == device or (target.gpu and gpus.find(name) == target.gpu))
        price = next(same, None)
        devices = subject.devices * subject.nodes // subject.ranks
        return cls(target.talking(subject.communicators), budget, price and price * devices)

    @property
    def kind(self) -> tuple[str, bool]:
        """Places of one kind are predicted alike, roughly."""
        gpu = self.target.gpu
        return self.target.device.type, gpu is None or gpu.compute_capability >= (8, 0)


_Key = tuple[int, int]  # of an option and a place
_Task = tuple[int, int, int, bool]
"""An option, a place and a batch size, and whether work recurs; place and size are 0 to learn how it grows."""
_Answer = tuple[bool, list[Footprint]]
"""Whether work recurs, and the step at that size; or at each size that fits some place, as it would accumulate."""


class _Search:
    """``options`` are remedies to combine, each with the first of the places of its kind."""

    def __init__(self, subject: Subject, samples: int, limits: Limits, places: list[_Place]) -> None:
        self.subject, self.places, self.of_rank = subject, places, samples // subject.ranks
        self.sizes = _sizes(subject, samples, limits)
        firsts = {place.kind: place for place in reversed(places)}.values()
        self.options = [(place, remedies) for place in firsts for remedies in _remedies(subject, place)]

    def work(self, task: _Task) -> _Answer:
        """Predict in a child: roughly, to choose, or as it would run."""
        option, at, size, recurs = task
        first, remedies = self.options[option]
        target = self.places[at].target if size else first.target
        program = reduce(lambda known, remedy: remedy.apply(known), remedies, program_of(self.subject, target))
        if program.batches_per_step:
            program = program.edited(accumulate_grad_batches=self.of_rank // size if size else 1)
        settings = AllocatorSettings.for_device(target.device.type, os.environ)
        with Captures(program, rough=not recurs if size else option > 0):
            context = target.context_bytes
            found = predict(program, size or self.of_rank, settings, context_bytes=context, scalable=not size)
            if found.curve.method == "states":
                raise CannotTraceError("; ".join(found.curve.notes))
            footprints = [found.footprint_at(size)] if size else [*self._grown(found, first.kind)]
        return any(trace.recurs for trace in found.curve.surveyed.values()), footprints

    def _grown(self, found: Prediction, kind: tuple[str, bool]) -> Iterator[Footprint]:
        most = max(place.budget.usable_bytes for place in self.places if place.kind == kind)
        for size in self.sizes if found.program.batches_per_step else self.sizes[-1:]:
            trace, batches = found.trace_at(size), self.of_rank // size
            footprint = found.curve.footprint_of(_accumulating(trace) if batches > 1 else trace)
            if footprint.most_device_bytes > most:
                return
            yield replace(footprint, timing=footprint.timing and replace(footprint.timing, batches_per_step=batches))

    def candidates(self, children: UserCode[_Task, _Answer]) -> tuple[dict[_Key, list[TrainingWay]], list[str]]:
        """Roughly what fits, by option and place, the fastest first; and what could not be predicted."""
        tasks = [(option, 0, 0, False) for option in range(len(self.options))]
        children.start(*tasks)
        answers = [attempt(partial(children.ask, task)) for task in tasks]
        self.recurs = any(answer.value and answer.value[0] for answer in answers)
        names = [" + ".join(each.name for each in remedies) or "the step as it is" for _, remedies in self.options]
        failed = [
            f"{name}: {each.reason.rstrip('.')}" for name, each in zip(names, answers, strict=True) if each.reason
        ]
        if len(failed) == len(answers):
            raise CannotTraceError("; ".join(failed))
        found: dict[_Key, list[TrainingWay]] = {}
        for (option, (first, _)), (at, place) in itertools.product(enumerate(self.options), enumerate(self.places)):
            known = answers[option].value
            if known and place.kind == first.kind:
                ways = [self._way((option, at), each) for each in known[1] if _fits(each, place.budget)]
                found[option, at] = sorted(ways, key=lambda way: (_time(way), -way.batch_size))
        return found, failed

    def front(
        self,
        children: UserCode[_Task, _Answer],
        candidates: dict[_Key, list[TrainingWay]],
        say: Callable[[str], object],
    ) -> list[TrainingWay]:
        """Prove those that no other beats until all are proven; what then does not fit gives way to smaller batches."""
        proven = set[_Key]()
        while True:
            ways = {key: each[0] for key, each in candidates.items() if each}
            front = {key: way for key, way in ways.items() if not any(_beats(each, way) for each in ways.values())}
            tasks = [(*key, way.batch_size, self.recurs) for key, way in front.items() if key not in proven]
            if not tasks:
                priced = all(way.dollars_per_million is not None for way in front.values())
                return sorted(front.values(), key=_dollars if priced else _time)
            say(f"proving {len(tasks)} ways")
            children.start(*tasks)
            for task in tasks:
                key, answer = task[:2], attempt(partial(children.ask, task)).value
                if answer and _fits(answer[1][0], self.places[key[1]].budget):
                    candidates[key] = [self._way(key, answer[1][0])]
                    proven.add(key)
                else:
                    candidates[key] = [way for way in candidates[key] if way.batch_size < task[2]]

    def _way(self, key: _Key, footprint: Footprint) -> TrainingWay:
        place, remedies = self.places[key[1]], self.options[key[0]][1]
        timing = footprint.timing and replace(footprint.timing, speed=partial(speed_here, place.target.gpu))
        names, how, costs = (tuple(getattr(each, of) for each in remedies) for of in ("name", "how", "cost"))
        size, what = footprint.batch_size, (names, how, costs, replace(footprint, timing=timing), place.budget)
        return TrainingWay(place.budget.device, self.subject.ranks, size, self.of_rank // size, *what, place.dollars)


def _sizes(subject: Subject, samples: int, limits: Limits) -> list[int]:
    """Batch sizes that some accumulation makes so many samples of, the smallest first."""
    check_count("target_batch", samples)
    if not subject.training or subject.fixed_because:
        raise MemGuardError(f"There are no ways to choose from: {subject.fixed_because or 'it is not a training'}.")
    least, most, of_rank = limits.min_batch_size, limits.max_batch_size or samples, samples // subject.ranks
    step = math.lcm(limits.multiple_of, subject.unit)
    sizes = [] if samples % subject.ranks else [n for n in range(least, most + 1) if not of_rank % n and not n % step]
    if not sizes:
        raise MemGuardError(f"No batch size of {least} to {most} divides {samples} samples on {subject.ranks} ranks.")
    return sizes


def _remedies(subject: Subject, place: _Place) -> Iterator[tuple[Remedy, ...]]:
    """Strategies if several devices train together, else activation checkpointing; each in each precision."""
    program = program_of(subject, place.target)
    several = subject.devices * subject.nodes > 1 and subject.runs_in_lightning
    ways: Sequence[Any] = [*_shardings(subject, place)] if several else [None]
    inside = [*checkpointing(program.inspect(Structure.of))][:1] if not several else []
    blocks = [None, *inside, offloading(program)]
    for combined in itertools.product(ways, [None, *precisions(program)], blocks):
        yield tuple(filter(None, combined))


def _shardings(subject: Subject, place: _Place) -> Iterator[Remedy]:
    for way in shardings_for(subject, place.budget.device):
        on = way.subject(subject.devices, subject.nodes)

        def apply(program: Program, on: Subject = on) -> Program:
            return program_of(on, Target(program.device, program.gpu))

        if on.ranks == subject.ranks:
            yield Remedy(way.name, "strategy", way.how, "what its ranks send each other", apply)


def _fits(footprint: Footprint, budget: Budget) -> bool:
    return footprint.most_device_bytes <= budget.usable_bytes


def _accumulating(trace: Trace) -> Trace:
    """A step as it would be if its gradients stayed from the batch before."""
    gradients = [each for each in trace.events if each.action == "alloc" and each.part == "gradients"]
    first = {each.block for each in gradients if each.step == gradients[0].step}
    later = {each.block for each in gradients} - first
    events = [e for e in trace.events if e.block not in later and not (e.action == "free" and e.block in first)]
    return replace(trace, events=tuple(events), kernels=(), scratch_spans=())


def _dollars(way: TrainingWay) -> float:
    return way.dollars_per_million or 0.0


def _time(way: TrainingWay) -> float:
    seconds = way.seconds_per_sample
    return seconds.likely if seconds else math.inf


def _beats(one: TrainingWay, other: TrainingWay) -> bool:
    """Whether one is as good as another in everything, and better in something; without prices, on one device."""
    priced = one.dollars_per_million is not None and other.dollars_per_million is not None
    if not priced and one.budget is not other.budget:
        return False
    pairs = [(_time(one), _time(other)), (one.altered, other.altered), (_dollars(one), _dollars(other))]
    better = (len(one.changes), one.changes) < (len(other.changes), other.changes)
    return all(a <= b for a, b in pairs) and (any(a < b for a, b in pairs) or better)
