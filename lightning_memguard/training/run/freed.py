"""Freed blocks that glibc keeps in its heap: what they add to a fit on the CPU, at most.

A heap only shrinks from its end. Blocks of up to 32 MiB come to lie in it, and small ones that stay keep it from
shrinking: 400 losses in a list kept 100 MiB of it, all of it freed (``mallinfo2``), which ``malloc_trim`` returned.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.device.malloc import KEPT_FREED_RATIO, LARGEST_IN_HEAP_BYTES
from lightning_memguard.core.trace.trace import PARTIAL, WORTH_A_NOTE, Event
from lightning_memguard.training.data.loaders import batches_taken
from lightning_memguard.training.run.profile import RunProfile
from lightning_memguard.units import format_bytes

_IN_STEP = ("forward", "backward")
_THERE_BEFORE = ("parameters", "buffers")
_NODE_BYTES = 4 << 10  # at most, for each tensor of a forward pass; the graph of a GRU cell takes 2.3 KiB


def trims(decision: Decision, profile: RunProfile) -> bool:
    """Whether freed blocks could make a fit pass its budget, so that glibc is made to return them."""
    footprint, budget = decision.footprint, decision.budget
    if footprint is None or budget is None or decision.would_overrun(KEPT_FREED_RATIO):
        return footprint is not None and budget is not None
    return footprint.most_device_bytes + _between_leftovers(profile, footprint.batch_size) > budget.free_bytes


def with_freed_blocks(decision: Decision, profile: RunProfile) -> Decision:
    """The decision with what freed blocks add to its footprint, at most, if glibc is not made to return them."""
    footprint, budget, facts = decision.footprint, decision.budget, profile.facts
    applies = facts.device.type == "cpu" and facts.stage == "fit" and not profile.trims
    if footprint is None or budget is None or not applies:
        return decision
    between = _between_leftovers(profile, footprint.batch_size)
    saving, of_steps = profile.saving_at(footprint.batch_size), 0
    if saving is not None:
        saving_bytes = saving.most_device_bytes + _of_steps(profile, footprint.batch_size)
        of_steps = saving_bytes - footprint.most_device_bytes
    freed, graphs = max(between, of_steps, 0), _of_graphs(profile, footprint.batch_size)
    most = freed + graphs
    if most <= 0:
        return decision
    wider = footprint.plus_outside(most)
    if freed >= WORTH_A_NOTE:
        wider = replace(wider, notes=(*wider.notes, _note(freed, next_to_a_checkpoint=of_steps > between)))
    if graphs >= WORTH_A_NOTE:
        note = f"at most, {format_bytes(graphs)} are the nodes of the graphs that steps leave behind"
        wider = replace(wider, notes=(*wider.notes, note))
    if wider.most_device_bytes > budget.usable_bytes >= footprint.most_device_bytes:  # only a warning could follow
        wider = replace(wider, yielding_bytes=wider.yielding_bytes + most)
    return replace(decision, footprint=wider)


def _note(nbytes: int, *, next_to_a_checkpoint: bool) -> str:
    cause = "next to a checkpoint's buffer" if next_to_a_checkpoint else "between what each step leaves behind"
    return (
        f"at most, {format_bytes(nbytes)} are freed blocks that the C library keeps {cause} "
        f"(MALLOC_MMAP_THRESHOLD_={128 << 10} in the environment keeps none, and costs speed)"
    )


def _in_heap(profile: RunProfile, batch_size: int) -> Iterator[Event]:
    """The events of a step's blocks that may come to lie in the heap."""
    if sys.platform == "linux" and profile.prediction.method not in PARTIAL:
        for event in profile.prediction.trace_at(batch_size).only("high").events:
            if event.nbytes <= LARGEST_IN_HEAP_BYTES and event.part not in _THERE_BEFORE:
                yield event


def _between_leftovers(profile: RunProfile, batch_size: int) -> int:
    """The largest tensor of a step, for each step of an epoch, if steps leave something behind.

    A hole of several freed blocks holds one block less of the same size, as these are aligned (glibc's bug 14581); what
    the step leaves then lies behind the one that took new memory. Norms of gradients of 4 MiB, kept in 800 steps, made
    the heap 1.4 GiB larger.
    """
    if not any(each.when == "step" for each in profile.kept):
        return 0
    made = (each for each in _in_heap(profile, batch_size) if each.phase in _IN_STEP and each.part != "workspaces")
    largest = max((each.nbytes for each in made), default=0)
    return largest * (batches_taken(profile.facts, profile.loader_info, batch_size) or 0)


def _of_graphs(profile: RunProfile, batch_size: int) -> int:
    """Bound the objects of the graphs that each step of an epoch leaves behind: no tensor holds them."""
    if not any(each.when == "step" and each.has_graph for each in profile.kept):
        return 0
    events = profile.prediction.trace_at(batch_size).only("high").events
    steps = Counter(event.step for event in events if event.action == "alloc" and event.phase == "forward")
    made = min(steps.values(), default=0)
    return _NODE_BYTES * made * (batches_taken(profile.facts, profile.loader_info, batch_size) or 0)


def _of_steps(profile: RunProfile, batch_size: int) -> int:
    """Bound what steps have freed once a checkpoint is saved: their peak, with what glibc keeps, less what stays.

    Four layers of 15 MiB with Adam kept 47 to 169 MiB, from epoch to epoch.
    """
    alive, now, peak = dict[int, int](), 0, 0
    for event in _in_heap(profile, batch_size):
        alive[event.block] = event.nbytes if event.action == "alloc" else 0
        now += event.change
        peak = max(peak, now)
    stay = sum(nbytes for _, nbytes in profile.between)
    return int(KEPT_FREED_RATIO * peak) - min(peak, stay)
