"""A step as it is written -> the least and the most that it takes compiled, if no capture has shown that.

At the least, nothing that the step makes on its way is there: the compiler may compute all of it again. What stays
between steps, the gradients and the batch are there however the step is compiled.

At the most, four things come on top of what it takes as written. The partitioner chooses what is saved for the backward
pass, in place of what autograd saves: of the forward pass, which made nothing else, both at once. Fused kernels have
their inputs and results in another layout, which takes copies: of the largest block, twice. A graph returns all of its
gradients before any is added to those there are. And the first step times ways to run its kernels between two writes
to a buffer as large as the GPU's cache, on copies of what they change.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from lightning_memguard.core.trace.trace import Trace

_SAVEABLE = ("activations", "temporaries")
_ON_THE_WAY = (*_SAVEABLE, "workspaces")
_COPIES, _TIMED_AT_ONCE = 2, 2


def least_if_compiled(trace: Trace) -> Trace:
    """Return the trace of what no compiler takes away."""
    made = {event.block: event.part for event in trace.events if event.action == "alloc"}
    events = tuple(event for event in trace.events if made[event.block] not in _ON_THE_WAY)
    return replace(trace, events=events, kernels=(), scratch_spans=())


def most_more_if_compiled(trace: Trace, timing_bytes: int, *, accumulates: bool) -> int:
    """Bytes by which the compiled step's peak may be above that of the step as written.

    Args:
        trace: the step as written.
        timing_bytes: of the buffer between two kernels that are timed.
        accumulates: whether gradients are added to those of other batches.
    """
    made = {event.block: event for event in trace.events if event.action == "alloc"}
    largest, freed, gradients = 0, Counter[int](), Counter[int]()
    for event in trace.events:
        first = made[event.block]
        if event.action == "alloc" and event.part in _ON_THE_WAY:
            largest = max(largest, event.nbytes)
        elif event.action == "alloc" and event.part == "gradients":
            gradients[event.step] += event.nbytes
        elif event.action == "free" and first.part in _SAVEABLE and event.phase == first.phase == "forward":
            freed[first.step] += event.nbytes
    at_once = max(gradients.values(), default=0) if accumulates else 0
    return max(freed.values(), default=0) + _COPIES * largest + at_once + _TIMED_AT_ONCE * timing_bytes
