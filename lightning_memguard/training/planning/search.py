"""Prediction + Budget + Request -> the largest batch size that fits and runs, proven by a capture at that size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, takewhile

from lightning_memguard.core.capture.curve import Curve
from lightning_memguard.core.capture.predict import Prediction, StepFailsError
from lightning_memguard.core.decision.decision import Budget, Decision, LimitedBy, Request, decide
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.recurring import retries_within
from lightning_memguard.core.replay.settings import NO_COST_SETTINGS, VARIABLE
from lightning_memguard.errors import DoesNotFitError

Refusal = Callable[[int], "LimitedBy | None"]
"""Batch size -> what forbids it, so that the next smaller one is looked at."""

_FootprintAt = Callable[[Prediction, int], Footprint]


def largest_that_runs(
    prediction: Prediction,
    budget: Budget,
    request: Request,
    *,
    footprint_at: _FootprintAt = Prediction.footprint_at,
    refused_by: Refusal = lambda _: None,
    preferred: int = 1,
) -> tuple[Decision, Prediction]:
    """Decide, and capture the step at the chosen size; if it fails there, a multiple of 2, 4, ... may run.

    Args:
        prediction: the step's memory.
        budget: what the device offers.
        request: what was asked for.
        footprint_at: a prediction and a batch size -> what to compare with the budget.
        refused_by: what forbids a batch size, so that the next smaller one is tried; None if nothing does.
        preferred: a larger batch size is a multiple of this where that costs less than 3 %.

    Returns:
        The decision, and the prediction that it is made from: another than was passed if the capture disagreed.

    Raises:
        DoesNotFitError: even the smallest size does not fit.
        StepFailsError: the step fails at each size tried; the error is that of the first.
    """

    def decided(prediction: Prediction, request: Request) -> Decision:
        decision = _decide(prediction, budget, request, footprint_at)
        size, limit, step = decision.batch_size, decision.limited_by, request.multiple_of
        # what is refused gives way to the next smaller size
        while request.free_to_choose and size - step >= request.min_batch_size and (by := refused_by(size)):
            size, limit = size - step, by
        if request.may_grow and limit not in ("dataset", "max_batch_size", "request"):
            size = _preferred(size, math.lcm(step, preferred), request.batch_size, refused_by)
        if size == decision.batch_size:
            return decision
        smaller = decide(partial(footprint_at, prediction), budget, replace(request, max_batch_size=size))
        multiple = math.lcm(step, preferred) if size % math.lcm(step, preferred) == 0 else step
        limited_by = limit if smaller.batch_size == size else decision.limited_by
        return replace(smaller, limited_by=limited_by, multiple_of=multiple)

    failures: list[StepFailsError] = []
    if prediction.curve.compiles and request.free_to_choose:
        prediction = _compiled_around(prediction, request, decided)
    for power in range(5):
        even = replace(request, multiple_of=math.lcm(request.multiple_of, 1 << power))
        if failures and even.smallest_batch_size > (request.max_batch_size or math.inf):
            break
        decision = decided(prediction, even)
        try:
            proven = prediction.proven_at(decision.batch_size)
        except StepFailsError as error:
            failures.append(error)
            continue
        if proven is not prediction:
            decision = decided(proven, even)
        compiled = proven.curve.compiled
        if proven.curve.compiles and decision.batch_size not in compiled:  # it is an estimate there
            known = [size for size in compiled if size < decision.batch_size]
            capped, limit = (
                replace(even, max_batch_size=max(known, default=even.smallest_batch_size)),
                decision.limited_by,
            )
            decision = decided(proven, capped)
            if decision.limited_by == "max_batch_size":  # of ours, not the user's
                decision = replace(decision, limited_by=limit)
        return with_retries(decision, proven), proven
    raise failures[0]


def _preferred(size: int, multiple: int, asked: int, refused_by: Refusal) -> int:
    """Return a multiple of a number that is hardly smaller than a larger batch size; else the size itself."""
    multiples = range(size // multiple * multiple, max(asked, math.ceil(size * _HARDLY_LESS) - 1), -multiple)
    return next((each for each in multiples if each == size or not refused_by(each)), size)


_HARDLY_LESS = 0.97


def smallest_fast(seconds_at: Callable[[int], float], request: Request, largest: int) -> int:
    """The smallest batch size whose time a sample is within `_ABOUT` of the best up to ``largest``.

    Args:
        seconds_at: batch size -> seconds of a step.
        request: the smallest size, and what sizes are multiples of.
        largest: the largest size.
    """
    step, least = request.multiple_of, request.smallest_batch_size
    sizes = [*takewhile(lambda size: size < largest, (least << power for power in count())), largest]
    times = {size: seconds_at(size) / size for size in sizes}
    enough = _ABOUT * min(times.values())
    good = next(size for size in sizes if times[size] <= enough)
    slow = max((size for size in sizes if size < good), default=good)
    while good - slow > step:
        middle = slow + (good - slow) // (2 * step) * step
        slow, good = (slow, middle) if seconds_at(middle) / middle <= enough else (middle, good)
    return good


_ABOUT = 1.03


def _decide(prediction: Prediction, budget: Budget, request: Request, footprint_at: _FootprintAt) -> Decision:
    try:
        return decide(partial(footprint_at, prediction), budget, request)
    except DoesNotFitError as error:
        setting = setting_that_fits(prediction, request.smallest_batch_size, budget, footprint_at)
        if setting:
            error.way_out = f"set {setting} in the environment, with which it fits"
        raise


def setting_that_fits(
    prediction: Prediction,
    batch_size: int,
    budget: Budget,
    footprint_at: _FootprintAt = Prediction.footprint_at,
) -> str:
    """Return the allocator's setting under which a step fits that does not as it is; empty if none is known."""
    curve = prediction.extended_to(batch_size)
    found = setting_that_saves(curve, batch_size, 0.0)
    if found is None:
        return ""
    changed = Prediction(prediction.program, curve.on_terms(settings=curve.settings.with_setting(found[0])))
    fits = footprint_at(changed, batch_size).most_device_bytes <= budget.usable_bytes
    return f"{VARIABLE}={found[0]}" if fits else ""


def with_retries(decision: Decision, prediction: Prediction) -> Decision:
    """Return the decision on a step too large for its GPU with `Decision.setting`, and `Decision.retries` if known."""
    size, most, budget = decision.batch_size, decision.footprint, decision.budget
    if decision.fits or not most or not budget or most.is_evaluation:
        return decision
    decision, curve = replace(decision, setting=setting_that_fits(prediction, size, budget)), prediction.curve
    if curve.method != "fake" or curve.variants or curve.stopped:
        return decision
    beside = most.peak_reserved_bytes - prediction.footprint_at(size).peak_reserved_bytes
    beside += most.high.outside_bytes if most.high else most.outside_bytes
    trace, capacity = prediction.own_trace_at(size), budget.usable_bytes - beside
    return replace(decision, retries=retries_within(trace, curve.settings, capacity))


def _compiled_around(
    prediction: Prediction, request: Request, decided: Callable[[Prediction, Request], Decision]
) -> Prediction:
    """Capture a compiled step at the sizes that are chosen in turn, until one is chosen that is known."""
    for _ in range(_MOST_COMPILED):
        try:
            size = decided(prediction, request).batch_size
        except DoesNotFitError:
            size = request.smallest_batch_size
        if size in prediction.curve.compiled:
            break
        try:
            prediction = prediction.proven_at(size)
        except StepFailsError:
            break
    return prediction


_MOST_COMPILED = 4


def setting_that_saves(prediction: Curve, batch_size: int, share: float) -> tuple[str, int] | None:
    """The allocator setting that leaves the least reserved, by replaying each, and what it saves: more than a share."""
    now = prediction.settings
    if now.kind != "cuda" or now.expandable_segments:
        return None
    asked = prediction.footprint_at(batch_size).most_device_bytes
    found = {
        text: prediction.on_terms(settings=now.with_setting(text)).footprint_at(batch_size).most_device_bytes
        for text in NO_COST_SETTINGS
    }
    text = min(found, key=found.__getitem__)
    return (text, asked - found[text]) if asked - found[text] > share * asked else None
