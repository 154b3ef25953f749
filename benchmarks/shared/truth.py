"""The memory a real training on the CPU takes, byte for byte, as PyTorch's own profiler sees it.

A real `Trainer.fit` runs under `torch.profiler` with `profile_memory=True`. The CPU allocator reports to the
profiler each block that it allocates and frees (address, bytes, time), from any depth inside an operator. Replayed in
order, these events give the live bytes at every moment, their peak, and which operators allocated what is alive there.
Nothing here imports lightning_memguard: its predictions are compared with this.

It counts every byte of every tensor from the building of the module to the end of the fit, batches included, and the
scratch that kernels (oneDNN's too) take through PyTorch's allocator; not the dataset's own storage (a free of an older
block is ignored) and what libraries allocate elsewhere. Inside `counting_arrays` it also counts arrays that become
tensors without a copy (`torch.from_numpy`), which are memory of the process all the same: NumPy allocates it, and the
profiler sees a marker of ours in its place. After every event the replay must have changed as the
allocator's own counter did (`miscounted` is 0), and a repetition gives the same byte.
"""

import gc
import logging
import time
import tracemalloc
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytorch_lightning as pl
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

from shared.zoo import Case

MARKER = "truth::"
ARRAY = "truth array::"
# Operators that only allocate: the operator that called them is more informative.
MEMORY_ONLY = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "zeros", "zeros_like"),
    *("new_zeros", "zero_", "clone", "contiguous", "to", "_to_copy", "ones", "full", "fill_", "copy_"),
)
FACTORIES = {f"aten::{name}" for name in MEMORY_ONLY}


@dataclass(frozen=True)
class MemoryEvent:
    """A block allocated (bytes > 0) or freed (bytes < 0) by the CPU allocator."""

    address: int
    bytes: int
    counter_bytes: int  # the allocator's own running total, after this event
    operator: str
    phase: str


@dataclass(frozen=True)
class Truth:
    """The measured peak of one training, and what was alive there."""

    case: str
    optimizer: str
    batch_size: int
    steps: int
    threads: int
    peak_bytes: int
    phase: str
    operator: str  # whose allocation reached the peak
    held: Sequence[str]  # alive at the peak, by operator, the largest first
    event_count: int
    miscounted: int  # events after which the replay and the allocator's own counter moved differently; 0 is exact
    wall_seconds: float


# Run -----------------------------------------------------------------------------------------------------------------


class PhaseMarkers(pl.Callback):
    """Leaves a named marker in the profile where Lightning starts a new phase."""

    def on_fit_start(self, *_: Any) -> None:
        mark("setup")

    def on_train_batch_start(self, *_: Any) -> None:
        mark("forward")

    def on_before_backward(self, *_: Any) -> None:
        mark("backward")

    def on_after_backward(self, *_: Any) -> None:
        mark("after backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        mark("optimizer")

    def on_train_batch_end(self, *_: Any) -> None:
        mark("between steps")


def mark(phase: str) -> None:
    with record_function(MARKER + phase):
        pass


def measure_here(case: Case, optimizer: str, batch_size: int, steps: int = 3) -> Truth:
    """Train in this process and return its peak. Needs no fresh process: older blocks are left out."""
    quieten()
    gc.collect()
    started = time.perf_counter()
    batches = steps * case.period
    torch.manual_seed(0)
    dataset = case.dataset(batches * batch_size)
    events = profiled(lambda: fit(case, optimizer, DataLoader(dataset, batch_size=batch_size), batches))
    place, peak_bytes = peak_of(events)
    return Truth(
        *(case.name, optimizer, batch_size, steps, torch.get_num_threads(), peak_bytes),
        *(events[place].phase, events[place].operator, held_after(events[: place + 1])),
        *(len(events), count_disagreements(events), time.perf_counter() - started),
    )


def fit(case: Case, optimizer: str, loader: DataLoader, batches: int) -> None:
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "limit_train_batches": batches, **QUIET}
    trainer = pl.Trainer(**settings, callbacks=[PhaseMarkers()], **case.trainer_kwargs)
    trainer.fit(case.build(optimizer), train_dataloaders=loader)


# What a Trainer writes and prints of its own, off.
SHOWN = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET: dict[str, Any] = dict.fromkeys(SHOWN, False)


def quieten() -> None:
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def counting_arrays() -> Iterator[None]:
    """Mark in the profile when an array made from now on becomes a tensor without a copy, and when the array goes."""

    def marking(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor, array = make(*args, **kwargs), next(iter(args), None)
            if isinstance(array, np.ndarray) and tensor.data_ptr() == array.ctypes.data:
                while isinstance(array.base, np.ndarray):
                    array = array.base
                name = f"{ARRAY}{id(array)} {array.nbytes}"
                if name not in alive and tracemalloc.get_object_traceback(array) is not None:
                    alive.add(name)
                    with record_function(name):
                        pass
                    weakref.finalize(array, forget, name)
            return tensor

        return made

    def forget(name: str) -> None:
        alive.discard(name)
        with record_function(f"{name} freed"):
            pass

    alive: set[str] = set()
    tracemalloc.start(1)
    with ExitStack() as patches:
        for name in ("from_numpy", "as_tensor"):
            patches.enter_context(mock.patch.object(torch, name, marking(getattr(torch, name))))
        yield
    tracemalloc.stop()


def profiled(work: Callable[[], Any]) -> list["MemoryEvent"]:
    """Work, as the allocator saw it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        work()
    return memory_events(profiler)


# Read the profile ----------------------------------------------------------------------------------------------------


def memory_events(profiler: profile) -> list[MemoryEvent]:
    """The allocator's events in time order, each with its operator and phase."""
    nodes = sorted(
        walk(profiler.profiler.kineto_results.experimental_event_tree()), key=lambda pair: pair[0].start_time_ns
    )
    events = []
    phase = "build"
    for node, ancestors in nodes:
        if node.tag == _EventType.Allocation and node.extra_fields.device.type == "cpu":
            block = node.extra_fields
            at = operator_of(ancestors), phase_of(ancestors, phase)
            events.append(MemoryEvent(block.ptr, block.alloc_size, block.total_allocated, *at))
        elif node.name.startswith(ARRAY):
            number, nbytes, *freed = node.name.removeprefix(ARRAY).split()
            at = operator_of(ancestors), phase_of(ancestors, phase)
            events.append(MemoryEvent(-int(number), -int(nbytes) if freed else int(nbytes), 0, *at))
        elif node.name.startswith(MARKER):
            phase = node.name.removeprefix(MARKER)
    return events


def walk(nodes: Iterable[Any], ancestors: tuple[str, ...] = ()) -> Iterator[tuple[Any, tuple[str, ...]]]:
    for node in nodes:
        yield node, ancestors
        yield from walk(node.children, (*ancestors, node.name))


def operator_of(ancestors: Sequence[str]) -> str:
    """The innermost operator that does more than allocate, else the outermost that only allocates."""
    operators = [name for name in ancestors if name.startswith("aten::")]
    working = [name for name in operators if name not in FACTORIES]
    if working:
        return working[-1]
    return operators[0] if operators else next(reversed(ancestors), "outside any operator")


def phase_of(ancestors: Sequence[str], marked: str) -> str:
    if any(name.startswith("autograd::engine") for name in ancestors):
        return "backward"
    if marked in ("after backward", "backward"):
        return "optimizer" if any(name.startswith("Optimizer.step") for name in ancestors) else "forward"
    return marked


# Replay --------------------------------------------------------------------------------------------------------------


def live_bytes(events: Iterable[MemoryEvent]) -> Iterator[tuple[int, dict[int, MemoryEvent]]]:
    """After each event: the bytes and the blocks alive, by address. Blocks older than the profile do not count."""
    live: dict[int, MemoryEvent] = {}
    total = 0
    for event in events:
        if event.bytes > 0:
            live[event.address] = event
            total += event.bytes
        elif (block := live.pop(event.address, None)) is not None:
            total -= block.bytes
        yield total, live


def peak_of(events: Sequence[MemoryEvent]) -> tuple[int, int]:
    totals = [total for total, _ in live_bytes(events)]
    peak = max(totals)
    return totals.index(peak), peak


def held_after(events: Sequence[MemoryEvent]) -> list[str]:
    *_, (_, live) = live_bytes(events)
    blocks: defaultdict[str, list[int]] = defaultdict(list)
    for block in live.values():
        blocks[block.operator].append(block.bytes)
    largest = sorted(blocks.items(), key=lambda group: -sum(group[1]))
    return [f"{sum(sizes):>14,} {len(sizes)} x {operator}" for operator, sizes in largest]


def count_disagreements(events: Sequence[MemoryEvent]) -> int:
    """How often the replay and the allocator's own counter changed by different amounts."""
    events = [event for event in events if event.address >= 0]  # the allocator knows nothing of arrays
    counted = [(total, event.counter_bytes) for event, (total, _) in zip(events, live_bytes(events), strict=True)]
    changes = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(counted)]
    return sum(ours not in (0, theirs) for ours, theirs in changes)
