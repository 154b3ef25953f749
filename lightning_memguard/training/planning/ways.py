"""The samples that an optimizer step is to see -> the ways to train so that fit, with their memory, time and cost.

Two captures tell roughly how a way grows; what is offered in the end was captured as it would run.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from lightning_memguard.core import gpus
from lightning_memguard.core.capture.capture import Captures, UserCode
from lightning_memguard.core.capture.predict import Prediction, predict, speed_here
from lightning_memguard.core.capture.program import Program
from lightning_memguard.core.decision.decision import Budget, Limits, check_count
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.seconds import Seconds
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.training.planning.layouts import shardings_for
from lightning_memguard.training.planning.remedies import Remedy, checkpointing, precisions
from lightning_memguard.training.planning.structure import Structure
from lightning_memguard.training.planning.subject import MakeOptimizer, Step, Subject, program_of, subject_of
from lightning_memguard.training.planning.target import Target, target_and_budget


@dataclass(frozen=True)
class TrainingWay:
    """One way to see so many samples a step.

    Attributes:
        device: the GPU, or ``"cpu"``.
        ranks: how many of them train together.
        batch_size: samples of a batch on each.
        accumulate_grad_batches: batches of a step.
        changes: the names of what else is changed, such as ``"bf16-mixed"``; empty for the training as it is.
        how: what to write for each.
        costs: what each costs in accuracy, time or behavior, in plain words.
        footprint: the memory of the step, and its time.
        budget: what the device offers.
        altered: how much that changes the numbers: 0 not at all, 1 mixed precision, 2 low precision throughout.
        dollars_per_hour: the price of one device; None if none was given.
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
    altered: int = 0
    dollars_per_hour: float | None = None

    @property
    def samples(self) -> int:
        """Samples of an optimizer step, over all ranks."""
        return self.batch_size * self.accumulate_grad_batches * self.ranks

    @property
    def seconds_per_sample(self) -> Seconds | None:
        """The time of a step, by its samples; None if the device's speed is not known."""
        step = self.footprint.step_seconds
        return step and step.times(1 / self.samples)

    @property
    def dollars_per_million(self) -> float | None:
        """The likely cost of a million samples; None without a price or a time."""
        seconds, price = self.seconds_per_sample, self.dollars_per_hour
        return None if seconds is None or price is None else seconds.likely * 1e6 / 3600 * price * self.ranks

    @property
    def fits(self) -> bool:
        """Whether it is within the budget."""
        return self.footprint.most_device_bytes <= self.budget.usable_bytes


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
        model: as for `estimate`.
        batch: an example batch.
        target_batch: samples that each optimizer step is to see.
        devices: ``"cpu"``, ``"cuda"``, or GPUs by name, which need not be there.
        prices: dollars an hour, by the name of a device: ``{"H100": 2.5}``.
        step: as for `estimate`.
        optimizer: as for `estimate`.
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
        >>> found = ways_to_train(
        ...     nn.Linear(64, 64), torch.zeros(8, 64), 32, devices=["T4"], step=lambda m, x: m(x).sum()
        ... )
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
    places = [_Place.of(subject, device, limits, prices or {}) for device in devices]
    search = _Search(subject, _sizes(subject, samples, limits), samples // subject.ranks, places, say)
    with search.children:
        return search.run()


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


@dataclass(frozen=True)
class _Place:
    """A device that was asked for."""

    target: Target
    budget: Budget
    price: float | None

    @classmethod
    def of(cls, subject: Subject, device: str, limits: Limits, prices: Mapping[str, float]) -> _Place:
        target, budget = target_and_budget(device, limits, subject.model)
        price = next((each for name, each in prices.items() if _names(name, device, target)), None)
        return cls(target.talking(subject.communicators), budget, price)

    @property
    def is_for_bf16(self) -> bool:
        gpu = self.target.gpu
        return gpu is None or gpu.compute_capability >= (8, 0)

    @property
    def kind(self) -> tuple[str, bool]:
        """Places of one kind are predicted alike, roughly."""
        return self.target.device.type, self.is_for_bf16


def _names(name: str, device: str, target: Target) -> bool:
    return name == device or (target.gpu is not None and gpus.find(name) == target.gpu)


@dataclass(frozen=True)
class _Option:
    """Remedies to combine, on places of one kind; ``first`` is the place whose GPU it is roughly predicted for."""

    first: int
    remedies: tuple[Remedy, ...]

    @property
    def altered(self) -> int:
        names = [remedy.name for remedy in self.remedies if remedy.kind == "precision"]
        return max((1 if name.endswith("-mixed") else 2 for name in names), default=0)


@dataclass
class _Candidate:
    """An option on a place: footprints by size, the largest that fits first; once proven, its own."""

    place: int
    option: int
    sizes: list[tuple[int, Footprint]]
    is_proven: bool = False


_Task = tuple[int, int, int, bool]
"""The option, its place and batch size, and whether work recurs; place and size are 0 to learn how it grows."""


@dataclass
class _Search:
    subject: Subject
    sizes: list[int]
    of_rank: int
    places: list[_Place]
    say: Callable[[str], object]
    options: list[_Option] = field(default_factory=list)
    left_out: dict[str, None] = field(default_factory=dict)
    recurs: bool = False  # whether a step does more later, so that it has to be captured with that
    children: UserCode[_Task, tuple[bool, list[tuple[int, Footprint]]]] = field(init=False)

    def __post_init__(self) -> None:
        self.children = UserCode(self._work)

    def run(self) -> Ways:
        kinds: dict[tuple[str, bool], int] = {}
        for at, place in enumerate(self.places):
            kinds.setdefault(place.kind, at)
        for first in kinds.values():
            program = program_of(self.subject, self.places[first].target)
            shardings: list[tuple[Remedy, ...]] = [(each,) for each in self._shardings(first)]
            formats: list[tuple[Remedy, ...]] = [(each,) for each in precisions(program)]
            again: list[tuple[Remedy, ...]] = []
            if not shardings:
                again += [(each,) for each in checkpointing(program.inspect(Structure.of))][:1]
            combined = itertools.product(shardings or [()], [(), *formats], [(), *again])
            self.options += [_Option(first, (*a, *b, *c)) for a, b, c in combined]
        self.say(f"tracing {len(self.options)} ways")
        tasks = [(option, 0, 0, False) for option in range(len(self.options))]
        self.children.start(*tasks)
        answers = [attempt(partial(self.children.ask, task)) for task in tasks]
        self.recurs = any(answer.value and answer.value[0] for answer in answers)
        for option, answer in zip(self.options, answers, strict=True):
            if answer.reason:
                name = " + ".join(each.name for each in option.remedies) or "the step as it is"
                self.left_out[f"{name}: {answer.reason.rstrip('.')}"] = None
        if len(self.left_out) == len(answers):
            raise CannotTraceError("; ".join(self.left_out))
        candidates = [
            each for at, answer in enumerate(answers) if answer.value for each in self._candidates(at, answer.value[1])
        ]
        return Ways(tuple(self._front(candidates)), tuple(self.left_out))

    # -- what there is to try

    def _shardings(self, first: int) -> Iterator[Remedy]:
        """Strategies, if several devices train together."""
        subject, place = self.subject, self.places[first]
        if subject.devices * subject.nodes == 1 or not subject.runs_in_lightning:
            return
        for way in shardings_for(subject, place.budget.device):
            on = way.subject(subject.devices, subject.nodes)

            def apply(program: Program, on: Subject = on) -> Program:
                return program_of(on, Target(program.device, program.gpu))

            yield Remedy(way.name, "strategy", way.how, "what its ranks send each other", apply)

    def _program(self, place: _Place, remedies: Sequence[Remedy], batches: int) -> Program:
        program = program_of(self.subject, place.target)
        for remedy in remedies:
            program = remedy.apply(program)
        return program.with_accumulation(batches) if program.batches_per_step else program

    # -- in children

    def _work(self, task: _Task) -> tuple[bool, list[tuple[int, Footprint]]]:
        """Footprints by size, and whether the step does more later."""
        option, at, size, recurs = task
        known = self.options[option]
        place = self.places[at if size else known.first]
        program = self._program(place, known.remedies, self.of_rank // size if size else 1)
        settings = AllocatorSettings.for_device(place.target.device.type, os.environ)
        context = place.target.context_bytes
        with Captures(program, rough=not recurs if size else option > 0):
            found = predict(program, size or self.of_rank, settings, context_bytes=context, scalable=not size)
            footprints = [(size, found.footprint_at(size))] if size else [*self._grown(found, known)]
        if found.method == "states":
            raise CannotTraceError("; ".join(found.notes))
        return any(trace.recurs for trace in found.traces.values()), footprints

    def _grown(self, found: Prediction, option: _Option) -> Iterator[tuple[int, Footprint]]:
        """The step at each size that fits some place."""
        most = max(place.budget.usable_bytes for place in self.places if place.kind == self.places[option.first].kind)
        for size in self.sizes if found.program.batches_per_step else self.sizes[-1:]:
            trace, batches = found.trace_at(size), self.of_rank // size
            footprint = found.footprint_of(_accumulating(trace) if batches > 1 else trace)
            if footprint.most_device_bytes > most:
                return
            timing = footprint.timing and replace(footprint.timing, batches_per_step=batches)
            yield size, replace(footprint, timing=timing)

    # -- which are worth a look

    def _candidates(self, option: int, footprints: list[tuple[int, Footprint]]) -> Iterator[_Candidate]:
        known = self.options[option]
        for at, place in enumerate(self.places):
            if place.kind != self.places[known.first].kind:
                continue
            fitting = [(n, self._on(place, each)) for n, each in footprints]
            fitting = [(n, each) for n, each in fitting if each.most_device_bytes <= place.budget.usable_bytes]
            if fitting:
                yield _Candidate(at, option, sorted(fitting, key=_slowness))

    def _on(self, place: _Place, footprint: Footprint) -> Footprint:
        timing = footprint.timing and replace(footprint.timing, speed=partial(speed_here, place.target.gpu))
        return replace(footprint, timing=timing)

    def _front(self, candidates: list[_Candidate]) -> list[TrainingWay]:
        """Prove those on the front until all of it is proven: what then does not fit gives way to its next size."""
        while True:
            ways = [(each, self._way(each)) for each in candidates if each.sizes]
            front = [pair for pair in ways if not any(_beats(other, pair[1]) for _, other in ways)]
            unproven = [each for each, _ in front if not each.is_proven]
            if not unproven:
                break
            tasks = [(each.option, each.place, each.sizes[0][0], self.recurs) for each in unproven]
            self.say(f"proving {len(tasks)} ways")
            self.children.start(*tasks)
            for each, task in zip(unproven, tasks, strict=True):
                self._prove(each, task)
        for place in self.places:
            if not any(way.budget is place.budget for _, way in ways):
                self.left_out[f"nothing that was tried fits {place.budget.device}"] = None
        priced = all(way.dollars_per_million is not None for _, way in front)
        return sorted((way for _, way in front), key=_dollars if priced else _time)

    def _prove(self, candidate: _Candidate, task: _Task) -> None:
        answer, size = attempt(partial(self.children.ask, task)).value, task[2]
        fits = answer and answer[1][0][1].most_device_bytes <= self.places[candidate.place].budget.usable_bytes
        if answer and fits:
            candidate.sizes, candidate.is_proven = answer[1], True
        else:  # smaller ones may
            candidate.sizes = [each for each in candidate.sizes if each[0] < size]

    def _way(self, candidate: _Candidate) -> TrainingWay:
        place, option = self.places[candidate.place], self.options[candidate.option]
        size, footprint = candidate.sizes[0]
        names, how, costs = (tuple(getattr(each, of) for each in option.remedies) for of in ("name", "how", "cost"))
        device, ranks, batches = place.budget.device, self.subject.ranks, self.of_rank // size
        what = names, how, costs, footprint, place.budget, option.altered, place.price
        return TrainingWay(device, ranks, size, batches, *what)


def _accumulating(trace: Trace) -> Trace:
    """A step as it would be if its gradients stayed from the batch before."""
    gradients = [each for each in trace.events if each.action == "alloc" and each.part == "gradients"]
    first = {each.block for each in gradients if each.step == gradients[0].step}
    later = {each.block for each in gradients} - first
    events = [e for e in trace.events if e.block not in later and not (e.action == "free" and e.block in first)]
    return replace(trace, events=tuple(events), kernels=(), scratch_spans=())


def _slowness(sized: tuple[int, Footprint]) -> tuple[float, int]:
    seconds = sized[1].step_seconds
    return seconds.likely if seconds else math.inf, -sized[0]


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
