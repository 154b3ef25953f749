"""Traces of a training and of its validation -> the events of a fit that does both, in its order.

The allocator caches what each leaves: a fit that validates reserves more, or other blocks, than its larger part alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from lightning_memguard.core.replay.recurring import RecurringStep, StepSequence
from lightning_memguard.core.trace.trace import OPTIONAL_PARTS, Event, Trace

_STAYS = "parameters", "buffers", "optimizer_state", "workspaces", *OPTIONAL_PARTS


def validated(
    training: Trace, validation: Trace, batches: int, *, checked: bool, again: bool, clears_gradients: bool
) -> Trace:
    """Return the steps of a training, then a validation, then a step like the last, if that recurs.

    A block whose size is not known has its most likely one.

    Args:
        training: steps of so many ``batches`` each.
        validation: some batches of it, without what training holds.
        batches: of an optimizer step.
        checked: whether there is a validation before the first step, as Lightning's sanity check.
        again: whether training goes on after a validation.
        clears_gradients: whether gradients are freed before a validation.
    """
    training, validation = training.only("point"), validation.only("point")
    step, sequence = RecurringStep.of(training, batches), StepSequence()
    events = [*training.events] if step is None else sequence.events_of(step)
    begins = training.held_at or next((at for at, each in enumerate(events) if each.phase != "setup"), len(events))
    last = max((each.step for each in events), default=0)
    if checked:
        first = _numbered(validation, events, 0)
        events = [*events[:begins], *first, *_without(events[begins:], _opened(first))]
    stays = _STAYS if clears_gradients else (*_STAYS, "gradients")
    left = sequence.end(stays) if step else _freed(each for each in _alive(events) if each.part not in stays)
    opened = _opened(each for each in events if each.phase not in ("setup", "backward"))
    events += [*left, *_without(_numbered(validation, events, last + 1), opened)]
    if again and step is not None:  # numbered so that it is the last step of the trace
        events += [each._replace(step=each.step + batches + 1) for each in sequence.events_of(step)]
    return replace(training, events=tuple(events), held_at=begins, kernels=(), scratch_spans=())


def _numbered(validation: Trace, before: Sequence[Event], step: int) -> list[Event]:
    """The events of a validation as blocks of their own; it frees all but the workspaces that a library keeps.

    They are numbered below all others, as later steps count upwards.
    """
    first = min((each.block for each in before), default=0) - max((each.block for each in validation), default=0) - 1
    held = {each.block for each in validation if each.phase == "setup"}
    own = [each for each in validation if each.block not in held]
    found = [each._replace(block=each.block + first, step=step) for each in own]
    return [*found, *_freed(each for each in _alive(found) if each.part != "workspaces")]


def _freed(events: Iterable[Event]) -> list[Event]:
    return [each._replace(action="free") for each in events]


def _alive(events: Iterable[Event]) -> list[Event]:
    alive: dict[int, Event] = {}
    for each in events:
        if each.action == "alloc":
            alive[each.block] = each
        else:
            alive.pop(each.block, None)
    return [*alive.values()]


def _opened(events: Iterable[Event]) -> Counter[int]:
    """Bytes of the workspaces that stay open, each as often as there are such."""
    return Counter(each.nbytes for each in _alive(events) if each.part == "workspaces")


def _without(events: Sequence[Event], opened: Counter[int]) -> list[Event]:
    """The events without the workspaces that stay and are open already; a backward pass has a thread of its own."""
    freed: Collection[int] = {each.block for each in events if each.action == "free"}
    found, there = list[Event](), opened.copy()
    for each in events:
        stays = each.part == "workspaces" and each.phase != "backward" and each.block not in freed
        if stays and there[each.nbytes]:
            there[each.nbytes] -= 1
        else:
            found.append(each)
    return found
