"""During a run: a batch larger than predicted, and what to report of a step that ran out of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap, zip_longest
from operator import gt
from typing import Any

import torch

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.batch.nesting import batch_bytes, batch_size_of, growth_sizes, map_tensors, shapes_of
from lightning_memguard.core.capture.capture import trusted_child
from lightning_memguard.core.capture.curve import Terms
from lightning_memguard.core.capture.predict import Prediction, predict
from lightning_memguard.core.capture.program import Program
from lightning_memguard.core.decision.decision import Budget, Request, decide
from lightning_memguard.core.decision.record import Measured
from lightning_memguard.core.device.budget import read_budget
from lightning_memguard.core.device.host import or_none
from lightning_memguard.core.device.meter import allocated_now, held_now
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.replay.timeline import LineShare, shares_at_peak
from lightning_memguard.core.trace.trace import Shapes, Trace
from lightning_memguard.errors import DoesNotFitError, MemGuardError
from lightning_memguard.report.failure import FRAMES, Failure, Larger
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.training.run.profile import RunProfile

_NEXT = 1.1  # what was announced once is announced again when it is this much larger
_MOST_USUAL = 1024  # shapes that are known to be within the prediction


@dataclass(frozen=True, eq=False)
class Kind:
    """Batches of one size, as far as memory grows with it, and what was predicted of their step, without its traces."""

    sizes: tuple[float, ...]
    batch_size: int
    footprint: Footprint
    program: Program
    terms: Terms

    def times(self, sizes: Sequence[float]) -> float:
        """How many times as large a batch is, in the size that grew most."""
        pairs = zip_longest(sizes, self.sizes, fillvalue=0.0)
        return max((size / known if known else math.inf for size, known in pairs if size or known), default=1.0)


class BatchWatch:
    """Compares each batch of a step, at its batch size, with those predicted from; cheap: it examines every one.

    Attributes:
        exceeds: whether the batch at hand is larger than those predicted from.
        largest: the last one that was announced for its memory, and a prediction on batches like it.
        kinds: of batches that were predicted: first those that the run was decided by.
        is_same: whether the batch at hand is as large as the one before it.
        saw_whole: whether any was as large as predicted.
        is_largest: whether the batch at hand is larger than each before.
    """

    def __init__(self, profile: RunProfile, prediction: Prediction, batch_size: int) -> None:
        self.profile = profile
        self.prediction = prediction
        self.batch_size = batch_size
        self.predicted_shapes, self._predicted_bytes = prediction.expected_batch(batch_size)
        self.shapes: Shapes = ()
        self.exceeds = self.saw_whole = self.is_largest = False
        self.largest: tuple[Larger, Prediction] | None = None
        kinds = prediction.curve.kinds or [((), self._predicted_bytes)]
        self.is_fixed = bool(prediction.curve.kinds)
        self._usual = set[Shapes]()
        self._quick: list[torch.Size] | int = 0
        self.is_same = False
        self._most_bytes, self._seen_bytes = 0.0, 0
        self._limits = [max(sizes) for sizes in zip_longest(*starmap(growth_sizes, kinds), fillvalue=0.0)]
        self._of_prediction = [*self._limits]
        usual = profile.with_extra(prediction.footprint_at(batch_size))
        largest = zip_longest(*(growth_sizes(*kind, alone=False) for kind in kinds), fillvalue=0.0)
        self.kinds = [Kind(tuple(map(max, largest)), batch_size, usual, prediction.program, prediction.curve.terms)]

    def larger(self, batch: object) -> Larger | None:
        """Compare a batch on its way into the step with the prediction; None if it is within it."""
        quick = _quick_sizes(batch, by_shape=self.is_fixed)
        self.is_largest, self.is_same = False, bool(quick) and quick == self._quick
        if self.is_same:
            return None
        self._quick, self.shapes = quick, tuple(quick) if isinstance(quick, list) else shapes_of(batch)
        self.exceeds = False
        if self.shapes in self._usual:
            return None
        nbytes = batch_bytes(batch)
        self.is_largest, self._seen_bytes = nbytes > self._seen_bytes, max(nbytes, self._seen_bytes)
        self.saw_whole |= nbytes >= self._predicted_bytes
        sizes = growth_sizes(self.shapes if self.is_fixed else (), nbytes)
        self.exceeds = any(starmap(gt, zip_longest(sizes, self._of_prediction, fillvalue=0.0)))
        if any(starmap(gt, zip_longest(sizes, self._limits, fillvalue=0.0))):
            both = zip_longest(sizes, self._limits, fillvalue=0.0)
            self._limits = [size * _NEXT if size > limit else limit for size, limit in both]
            return self.predict(batch)
        if len(self._usual) < _MOST_USUAL and not self.exceeds:
            self._usual.add(self.shapes)
        return None

    def alike(self, batch: object) -> tuple[Kind, float]:
        """Return the predicted kind that the batch at hand is most like, and how many times as large it is at most.

        Memory grows with the square of a batch's bytes at most, and with no more than one of its `growth_sizes`.
        """
        sizes = self._sizes(batch)
        times = [kind.times(sizes) for kind in self.kinds]
        times = times if self.is_fixed else [max(each, each**2) for each in times]
        place = min(range(len(times)), key=lambda at: self.kinds[at].footprint.most_device_bytes * times[at])
        return self.kinds[place], times[place]

    def _sizes(self, batch: object) -> list[float]:
        """Sizes that memory grows with, without single dimensions, which one batch shares with others."""
        return growth_sizes(self.shapes if self.is_fixed else (), batch_bytes(batch), alone=False)

    def predict(self, batch: object) -> Larger | None:
        """Predict a step on the batch at hand; None if it needs no more than is known, or cannot be predicted."""
        if self.prediction.curve.method == "cut":  # a capture takes too long
            return None
        return attempt(lambda: self._predicted(batch)).value

    def _predicted(self, batch: object) -> Larger | None:
        """Predict a step on batches like this one, as its transfer leaves it; None if it needs no more."""
        size, known, terms = batch_size_of(batch), self.prediction, self.prediction.curve.terms
        with torch.inference_mode(mode=False):
            like = map_tensors(batch, lambda tensor: torch.empty_like(tensor, device="meta"))
            program = known.program.with_batches(batches_from_one(like, size))
            prediction = predict(program, size, terms.settings, context_bytes=terms.context_bytes, scalable=False)
            footprint = self.profile.with_extra(prediction.footprint_at(size))
        usual, nbytes = self.kinds[0].footprint, footprint.most_device_bytes
        self.kinds.append(Kind(tuple(self._sizes(batch)), size, footprint, program, terms))
        if nbytes <= max(self._most_bytes, usual.most_device_bytes) and not footprint.is_partial:
            return None
        self._most_bytes = nbytes * _NEXT
        footprint = replace(footprint, batch=usual.batch)
        larger = Larger(self.shapes, self.predicted_shapes, footprint, self.profile.budget)
        self.largest = larger, prediction
        return larger

    @property
    def shapes_seen(self) -> int:
        """How many shapes of batches there were, so far as they were within the prediction."""
        return len(self._usual)

    # -- which sizes fit

    def would_fit(self, budget: Budget, ratio: float, alike: Prediction | None = None) -> int | None:
        """The largest batch size that would have fit, if steps take as much more as this one did.

        It is smaller than the one that ran. 0 if not even one sample is predicted to fit, None if none is known: what
        came on top of a prediction may be there with one sample, too, or not.
        ``alike``: a prediction on batches like the one that did not fit.
        """
        if alike is not None and alike.curve.method == "states":
            return None
        scaled = replace(budget, free_bytes=int(budget.usable_bytes / ratio), margin_bytes=0)
        size, unit = self.batch_size, self.profile.loader_info.unit
        request = Request(size, max_batch_size=max(1, size - 1), multiple_of=unit)

        def footprint_at(batch_size: int) -> Footprint:
            step = (alike or self.prediction).footprint_at(batch_size)
            return self.profile.with_extra(self.profile.with_objects(step))

        try:
            return decide(footprint_at, scaled, request).batch_size
        except DoesNotFitError:
            return 0 if ratio == 1 else None
        except MemGuardError:
            return None


def _quick_sizes(batch: Any, *, by_shape: bool) -> list[torch.Size] | int:
    """Shapes or bytes of a batch that is a tensor, or a flat list, tuple or dict of dense ones; 0 for any other."""
    kind, nbytes = type(batch), 0
    try:
        values = batch if kind is list or kind is tuple else batch.values() if kind is dict else (batch,)
        if by_shape:
            return [value.shape for value in values]
        for value in values:
            nbytes += value.nbytes
    except (AttributeError, RuntimeError):  # no tensor, or a sparse one
        return 0
    return nbytes


# -- after an out-of-memory error


def failure(
    watch: BatchWatch, decided: Footprint, measured: Measured | None, elsewhere: Mapping[str, int], **found: Any
) -> Failure:
    """Compare what was there when memory ran out with the prediction, and find what would have fit.

    ``elsewhere`` and ``found`` are other fields of the result.
    """
    then, device = watch.profile.budget, watch.profile.facts.device
    kept = sum(nbytes for who, nbytes in elsewhere.items() if who != FRAMES)
    now = attempt(lambda: _budget_now(then, device, kept)).value
    own = or_none(held_now, device) or 0 if device.type == "cpu" else kept
    larger, alike = watch.largest if watch.largest and watch.exceeds else (None, watch.prediction)
    failed = larger.footprint if larger else decided
    ratio = _ratio(measured, failed, failed.peak_device_bytes)
    least = min(now or then, then, key=lambda each: each.usable_bytes)
    smaller = None if watch.is_fixed else watch.would_fit(least, ratio, alike=alike)
    shapes = watch.shapes, watch.predicted_shapes
    of_larger, trace_at = (larger.footprint, alike.own_trace_at) if larger else (None, watch.profile.trace_at)
    shares = attempt(lambda: _shares(trace_at((of_larger or decided).batch_size), alike.curve.settings, device)).value
    of_step = *shapes, smaller, of_larger, shares or ()
    return Failure(decided, measured, then, now, *of_step, elsewhere=elsewhere, own_bytes=own, **found)


def _budget_now(then: Budget, device: torch.device, kept_bytes: int) -> Budget:
    """Read what a GPU offers once the step that failed is let go: all that this process has allocated but what is kept.

    The error's frames still hold that step's activations.
    """
    held = 0 if device.type == "cpu" else max(0, held_now(device) - kept_bytes)
    return read_budget(device, margin=then.margin_share, already_held_bytes=held)


def _shares(trace: Trace, settings: AllocatorSettings, device: torch.device) -> list[LineShare]:
    """Lines that hold the memory at the peak, next to what each line really holds, if that is recorded."""
    shares, actual = shares_at_peak(trace, settings), or_none(allocated_now, device)
    if not actual:
        return shares
    return [replace(share, actual_bytes=actual.get(share.line, 0)) if share.line else share for share in shares]


def size_within_budget(watch: BatchWatch, decided: Footprint, measured: Measured) -> int | None:
    """The largest batch size that would have kept the budget; see `would_fit`. None if none can be set.

    It is found in a child: what finding it takes would come on top of what the run takes.
    """
    larger, alike = watch.largest or (None, watch.prediction)
    predicted = larger.footprint if larger else decided
    ratio = _ratio(measured, predicted, predicted.most_device_bytes)

    def find(_: int) -> int | None:
        return watch.would_fit(watch.profile.budget, ratio, alike=alike)

    if watch.is_fixed:
        return None
    with trusted_child(find) as child:
        return child.answer(0).value


def _ratio(measured: Measured | None, predicted: Footprint, predicted_bytes: int) -> float:
    taken = measured.on_device(predicted) if measured else 0
    return max(1.0, taken / predicted_bytes if predicted_bytes else 1.0)
