"""Blocks that PyTorch's CPU allocator hands out in a run, as PyTorch's own profiler lists them."""

from __future__ import annotations

from collections.abc import Callable

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def blocks_of(run: Callable[[], object]) -> list[tuple[int, int]]:
    """Addresses and bytes of the blocks of a run, in order; bytes are negative where a block is given back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    nodes, found = [*profiler.profiler.kineto_results.experimental_event_tree()], []
    for node in nodes:
        nodes += node.children
        if node.tag == _EventType.Allocation:
            found.append((node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size))
    return [(address, nbytes) for _, address, nbytes in sorted(found, key=lambda block: block[0])]


def measured_peak(run: Callable[[], object]) -> int:
    """The most bytes alive at once of those that were handed out in a run; older blocks do not count."""
    live: dict[int, int] = {}
    total = peak = 0
    for address, nbytes in blocks_of(run):
        total += nbytes if nbytes > 0 else -live.pop(address, 0)
        live.update({address: nbytes} if nbytes > 0 else {})
        peak = max(peak, total)
    return peak
