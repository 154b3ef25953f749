"""Search for remedies that make a step fit: each is run on a copy of the step, alone and in pairs.

Nothing is estimated by a rule of thumb: a remedy that cannot run is left out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_memguard.core.capture.capture import CaptureFailedError, UserCode, Variant, capture
from lightning_memguard.core.capture.curve import Curve
from lightning_memguard.core.capture.predict import Prediction, Surveyor, terms_of
from lightning_memguard.core.decision.advice import Advice, in_order
from lightning_memguard.core.decision.decision import Budget, Request, decide, largest_that
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import VARIABLE
from lightning_memguard.core.trace.trace import Method
from lightning_memguard.errors import CannotTraceError, DoesNotFitError
from lightning_memguard.training.planning.remedies import Family, Remedy, budgets_of_graphs, families_for
from lightning_memguard.training.planning.search import setting_that_saves

_KINDS_PAIRED = 4  # the best remedy of each of so many kinds is tried in pairs: at most six

_OTHERWISE: dict[Method, str] = {  # why the step with a remedy cannot be compared with the step as it is
    "compiled": "with it, only the compiled step is known",
    "fake": "only with it, the step runs on fake tensors",
    "worst-case": "with it, only the largest size possible is known",
    "sampled": "only with it, real batches take less than the largest size possible",
    "valued": "with it, the step depends on values",
    "answered": "with it, the step depends on values that it computes",
    "real": "with it, the step runs on real tensors only",
    "states": "with it, the step does not run on a copy",
}

_ONE_WAY = ("fake", "worst-case", "sampled")  # a step captured so is captured so with remedies, and in no other way
_Single = tuple[Family, Advice]
_Places = tuple[int, ...]  # of remedies


@dataclass(frozen=True)
class AdviceReport:
    """Remedies that save memory, `in_order`; the other remedies by name, and why; how many there was no time to try."""

    advice: tuple[Advice, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    not_tried: int = 0


def try_remedies(
    prediction: Prediction,
    batch_size: int,
    budget: Budget,
    *,
    combinations: bool = True,
    progress: Callable[[str], object] = lambda _: None,
    most_seconds: float | None = None,
    request: Request | None = None,
) -> AdviceReport:
    """Find out what would make a step take less memory, by predicting it with each remedy and with two of them.

    Args:
        prediction: the step as it is; what it compiles is compared as written, but for what the compiler may save.
        batch_size: samples per batch.
        budget: what the step is to fit into.
        combinations: try pairs of the best remedies too.
        progress: called with the name of each remedy before it is tried, and with why one was left out.
        most_seconds: no remedy is started later than this.
        request: which batch sizes may be chosen, to say which is the largest with another setting of the allocator.
    """
    until = None if most_seconds is None else time.monotonic() + most_seconds
    compiled = prediction if prediction.curve.compiles else None
    prediction = Prediction(prediction.program, prediction.extended_to(batch_size).uncompiled())
    families = families_for(prediction, batch_size, budget.usable_bytes)
    if compiled and (compiled := _compiled_at(compiled, batch_size)) and prediction.program.trains:
        families.insert(0, budgets_of_graphs())
    remedies = list(itertools.chain(*families))
    attempts = _Attempts(prediction, batch_size, budget, progress, until, remedies, compiled)
    settings = _settings_that_save(prediction.curve, batch_size, budget, request)
    with attempts.children:
        attempts.start([(family[0],) for family in families])
        tried = [(family, attempts.mildest([(remedy,) for remedy in family])) for family in families]
        singles = [(family, found) for family, found in tried if found]
        best: dict[str, _Single] = {}
        for single in sorted(singles, key=_worth, reverse=True):
            if single[0][0].saving is None:  # of another step: the others are compared as written
                best.setdefault(single[0][0].kind, single)
        # If several groups of blocks could be checkpointed: the one that is worth most.
        known = [each[1] for each in singles if each[0][0].kind != "checkpointing" or each is best["checkpointing"]]
        pairs = [*itertools.combinations([*best.values()][:_KINDS_PAIRED], 2)] if combinations else []
        combined = [[*itertools.product(_paired(first), _paired(second))] for first, second in pairs]
        attempts.start([degrees[0] for degrees in combined])
        for ((_, first), (_, second)), degrees in zip(pairs, combined, strict=True):
            pair = attempts.mildest(degrees)
            if pair and pair.saved_bytes > max(first.saved_bytes, second.saved_bytes):
                known.append(pair)
    return AdviceReport(in_order([*known, *settings]), tuple(attempts.left_out), attempts.not_tried)


def _compiled_at(prediction: Prediction, batch_size: int) -> Prediction | None:
    """Return the prediction of a step that is known as it is compiled at a size; None if it cannot be."""
    with contextlib.suppress(CannotTraceError):
        prediction = prediction.proven_at(batch_size)
    return prediction if batch_size in prediction.curve.compiled else None


def _settings_that_save(
    prediction: Curve, batch_size: int, budget: Budget, request: Request | None = None
) -> list[Advice]:
    """The setting that leaves least reserved at a batch size, or else at the largest that fits as it is."""
    now = _largest(prediction, budget, request)
    known = setting_that_saves(prediction, batch_size, _NOTABLE)
    known = known or (setting_that_saves(prediction, now, _NOTABLE) if now else None)
    if known is None:
        return []
    text = known[0]
    changed = prediction.on_terms(settings=prediction.settings.with_setting(text))
    best, asked = changed.footprint_at(batch_size), prediction.footprint_at(batch_size)
    saved, size = asked.most_device_bytes - best.most_device_bytes, _largest(changed, budget, request)
    sizes = None if size is None or now is None else (size, now)
    if saved <= _NOTABLE * asked.most_device_bytes and (sizes is None or sizes[0] <= sizes[1]):
        return []
    how, cost = f"set {VARIABLE}={text} in the environment", "none: the same blocks, in other segments"
    fits = best.most_device_bytes <= budget.usable_bytes
    return [Advice((text,), (how,), (cost,), best, saved, fits, sizes, _FIRST)]


def _largest(prediction: Curve, budget: Budget, request: Request | None) -> int | None:
    """The largest batch size that fits, 0 if none does; None if other sizes are not known, or not asked for."""
    if request is None or not request.free_to_choose or not prediction.scalable or prediction.growth is None:
        return None
    try:
        return decide(prediction.footprint_at, budget, request).batch_size
    except DoesNotFitError:
        return 0


_NOTABLE = 0.01  # of the step: less is not worth a setting
_FIRST = (-1,)  # before all remedies, as it does not change the training


def _worth(single: _Single) -> tuple[float, int]:
    """The more a remedy saves; of checkpointing that fits, the less time it takes."""
    ratio = single[1].time_ratio if single[1].fits and single[0][0].kind == "checkpointing" else None
    return -ratio if ratio else -math.inf, single[1].saved_bytes


def _paired(single: _Single) -> Family:
    """The degrees of a remedy that are tried with others: of activation checkpointing all blocks."""
    return single[0][-1:] if single[0][0].kind == "checkpointing" else single[0]


@dataclass
class _Attempts:
    """The step as it is, what of it was tried so far, and until when more may be; several at the same time."""

    prediction: Prediction
    batch_size: int
    budget: Budget
    progress: Callable[[str], object]
    until: float | None
    remedies: list[Remedy]
    compiled: Prediction | None = None
    left_out: list[tuple[str, str]] = field(default_factory=list)
    not_tried: int = 0
    children: UserCode[_Places, Footprint] = field(init=False)

    def __post_init__(self) -> None:
        self.children = UserCode(self.footprint_with)

    @property
    def is_over(self) -> bool:
        return self.until is not None and time.monotonic() > self.until

    def start(self, several: Sequence[Family]) -> None:
        """Begin with what will be asked for."""
        if not self.is_over:
            self.children.start(*map(self.places_of, several))

    def places_of(self, remedies: Family) -> _Places:
        """The remedies as a value that can be sent."""
        return tuple(map(self.remedies.index, remedies))

    def mildest(self, degrees: Sequence[Family]) -> Advice | None:
        """Return the mildest remedy that fits, of some from mildest to strongest; if none fits, the mildest of all."""
        if self.is_over:
            self.not_tried += 1
            return None
        first, last = self.advice_for(degrees[0]), len(degrees) - 1
        if first is None or first.fits or not last:
            return first
        fitting: dict[int, Advice] = {}

        def is_too_mild(index: int) -> bool:
            found = self.advice_for(degrees[index]) if index == last or not self.is_over else None
            if found and found.fits:
                fitting[index] = found
            return index not in fitting

        return fitting.get(largest_that(is_too_mild, 0, last) + 1, first)

    def advice_for(self, remedies: Family) -> Advice | None:
        """The step with these remedies; None if it cannot be run with them, or they save nothing."""
        name = " + ".join(remedy.name for remedy in remedies)
        self.progress(name)
        try:
            # if there are several ways, one that ends its process is not the last
            ways_left = self.prediction.curve.method not in _ONE_WAY
            found = self.children.ask(self.places_of(remedies), here_too=ways_left)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything when it is run otherwise
            self.leave_out(name, _reason(error))
            return None
        compiled = self.compiled if remedies[0].saving is not None else None
        before = (compiled or self.prediction).footprint_at(self.batch_size)
        saved = before.most_device_bytes - found.most_device_bytes
        if saved <= 0:
            self.leave_out(name, "it saves nothing here")
            return None
        names, how, costs = zip(*((remedy.name, remedy.how, remedy.cost) for remedy in remedies), strict=True)
        fits = found.most_device_bytes <= self.budget.usable_bytes
        now, then = before.step_seconds, found.step_seconds
        ratio = then.likely / now.likely if now and then and not compiled else None
        return Advice(names, how, costs, found, saved, fits, places=self.places_of(remedies), time_ratio=ratio)

    def footprint_with(self, places: _Places) -> Footprint:
        """Captured in the way in which the step as it is was, so that the two can be compared."""
        known, size, remedies = self.prediction.curve, self.batch_size, [self.remedies[place] for place in places]
        if self.compiled and remedies[0].saving is not None:
            curve = self.compiled.curve
            variant = Variant(answers=curve.reads or (), saving=remedies[0].saving)
            return curve.footprint_of(capture(self.compiled.program, size, "compiled", variant))
        program = functools.reduce(lambda program, remedy: remedy.apply(program), remedies, self.prediction.program)
        for remedy in remedies:
            size //= remedy.share
        if known.method in _ONE_WAY:
            nothing: dict[str, Any] = {"growth": None, "ceiling": None, "captured": {}, "proofs": {}, "gaps": {}}
            changed = replace(known, terms=terms_of(program, known.terms), **nothing)
        else:
            terms = replace(known.terms, learned=None)
            changed = Surveyor(program).survey(size, terms, scalable=False)
        if changed.method != known.method:
            raise CannotTraceError(f"{_OTHERWISE[changed.method]}")
        return Prediction(program, changed).footprint_at(size)

    def leave_out(self, name: str, why: str) -> None:
        self.left_out.append((name, why))
        self.progress(f"{name}: left out, {why}")


def _reason(error: Exception) -> str:
    if isinstance(error, CaptureFailedError):
        return error.reason
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200] if isinstance(error, CannotTraceError) else f"{type(error).__name__}: {lines[0][:200]}"
