"""The memory a real training on the CPU takes, byte for byte, as PyTorch's own profiler sees it.

A real `Trainer.fit` runs under `torch.profiler` with `profile_memory=True`. The CPU allocator reports to the
profiler each block that it allocates and frees (address, bytes, time), from any depth inside an operator. Replayed in
order, these events give the live bytes at every moment, their peak, and which operators allocated what is alive there.
Nothing here imports lightning_memguard: its predictions are compared with this.

What it holds: every byte of every tensor from the building of the module to the end of the fit, batches included, and
the scratch that kernels (oneDNN's too) take through PyTorch's allocator. What it leaves out: the dataset's own storage
(built before the profiler starts; a free of an older block is ignored) and what libraries allocate elsewhere.

How exact it is: after every event the replay must have changed as the allocator's own counter did (`miscounted` is 0),
a repetition gives the same byte, and an MLP's peak is the sum added by hand (`--by-hand`).

    cd benchmarks
    python -m shared.truth mlp --optimizer adam --batch-size 64             # what stood at the peak, as text
    python -m shared.truth mlp --optimizer sgd adam --batch-size 64 256 --json
    python -m shared.truth mlp --by-hand                                    # compared with a sum added by hand
"""

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

from shared.zoo import Case, case_named

MARKER = "truth::"
# Operators that only allocate: the operator that called them is more informative.
MEMORY_ONLY = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "zeros", "zeros_like"),
    *("new_zeros", "zero_", "clone", "contiguous", "to", "_to_copy", "ones", "full", "fill_", "copy_"),
)
FACTORIES = {f"aten::{name}" for name in MEMORY_ONLY}


@dataclass(frozen=True)
class MemoryEvent:
    """A block allocated (bytes > 0) or freed (bytes < 0) by the CPU allocator."""

    time_ns: int
    thread: int
    address: int
    bytes: int
    counter_bytes: int  # the allocator's own running total, after this event
    operator: str
    phase: str


@dataclass(frozen=True)
class Held:
    """What one operator allocated and was still alive at the peak."""

    operator: str
    count: int
    bytes: int


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
    held: tuple[Held, ...]  # alive at the peak, the largest first
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
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    profiler.start()
    fit(case, optimizer, DataLoader(dataset, batch_size=batch_size), batches)
    profiler.stop()
    events = memory_events(profiler)
    peak_index, peak_bytes = peak_of(events)
    return Truth(
        case=case.name,
        optimizer=optimizer,
        batch_size=batch_size,
        steps=steps,
        threads=torch.get_num_threads(),
        peak_bytes=peak_bytes,
        phase=events[peak_index].phase,
        operator=events[peak_index].operator,
        held=held_after(events[: peak_index + 1]),
        event_count=len(events),
        miscounted=count_disagreements(events),
        wall_seconds=time.perf_counter() - started,
    )


def fit(case: Case, optimizer: str, loader: DataLoader, batches: int) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=batches,
        **QUIET,
        callbacks=[PhaseMarkers()],
        **case.trainer_kwargs,
    )
    trainer.fit(case.build(optimizer), train_dataloaders=loader)


# What a Trainer writes and prints of its own, off.
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def quieten() -> None:
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


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
            events.append(
                MemoryEvent(
                    time_ns=node.start_time_ns,
                    thread=node.start_tid,
                    address=block.ptr,
                    bytes=block.alloc_size,
                    counter_bytes=block.total_allocated,
                    operator=operator_of(ancestors),
                    phase=phase_of(ancestors, phase),
                )
            )
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


def held_after(events: Sequence[MemoryEvent]) -> tuple[Held, ...]:
    *_, (_, live) = live_bytes(events)
    counts: Counter[str] = Counter()
    sizes: defaultdict[str, int] = defaultdict(int)
    for block in live.values():
        counts[block.operator] += 1
        sizes[block.operator] += block.bytes
    held = (Held(operator, counts[operator], sizes[operator]) for operator in sizes)
    return tuple(sorted(held, key=lambda group: -group.bytes))


def count_disagreements(events: Sequence[MemoryEvent]) -> int:
    """How often the replay and the allocator's own counter changed by different amounts."""
    offsets = [event.counter_bytes - total for event, (total, _) in zip(events, live_bytes(events), strict=True)]
    return sum(before != after for before, after in pairwise(offsets))


# In a separate process -----------------------------------------------------------------------------------------------


def measure_all(
    case: Case, optimizers: Sequence[str], batch_sizes: Sequence[int], steps: int = 3, threads: int | None = None
) -> list[Truth]:
    """Train at every optimizer and batch size, one after the other in one fresh process."""
    arguments = [case.name, "--optimizer", *optimizers, "--batch-size", *map(str, batch_sizes)]
    arguments += ["--steps", str(steps), "--json"] + (["--threads", str(threads)] if threads else [])
    lines = run_module("shared.truth", arguments, f"The measurement of {case.name}")
    return [truth_from(json.loads(line)) for line in lines]


def run_module(name: str, arguments: Sequence[str], what: str) -> list[str]:
    """The JSON objects that a module of `shared` prints in a fresh process, a line each."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", name, *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise RuntimeError(f"{what} failed:\n{process.stderr[-2000:]}")
    return [line for line in process.stdout.splitlines() if line.startswith("{")]


def truth_from(fields: dict[str, Any]) -> Truth:
    return Truth(**{**fields, "held": tuple(Held(**group) for group in fields["held"])})


# As a script ----------------------------------------------------------------------------------------------------------


def mlp_by_hand(optimizer: str, batch_size: int) -> int:
    """The peak of the zoo's MLP (512 -> 1024 -> 1024 -> 1024 -> 10), added up by hand.

    With SGD it is at the last ReLU: parameters, the last step's gradients, momentum, the batch, the outputs of
    three ReLUs and the input of the third. With Adam and a small batch it is in the update of a 1024 x 1024
    weight: parameters, gradients, two moments, a step count each, the batch, and the two temporaries of the
    denominator, while the name `denominator` still holds that of the bias before. Five scalars take 20 bytes more.
    """
    sizes = [512 * 1024, 1024, 1024 * 1024, 1024, 1024 * 1024, 1024, 1024 * 10, 10]
    parameter_bytes = 4 * sum(sizes)
    batch_bytes = batch_size * (512 * 4 + 8)
    if optimizer == "sgd":
        return 3 * parameter_bytes + batch_bytes + 4 * batch_size * 1024 * 4
    if optimizer == "adam":
        return 4 * parameter_bytes + 4 * len(sizes) + batch_bytes + 2 * 1024 * 1024 * 4 + 1024 * 4 + 20
    raise ValueError(f"No sum by hand for {optimizer}.")


def check_by_hand() -> None:
    for optimizer, batch_size in (("sgd", 64), ("sgd", 256), ("sgd", 1024), ("adam", 8), ("adam", 16), ("adam", 64)):
        measured = measure_here(case_named("mlp"), optimizer, batch_size).peak_bytes
        by_hand = mlp_by_hand(optimizer, batch_size)
        print(
            f"mlp, {optimizer:4}, {batch_size:>4}: measured {measured:,}, by hand {by_hand:,}: {measured - by_hand:+,}"
        )


def as_text(truth: Truth) -> str:
    lines = [
        (
            f"{truth.case}, {truth.optimizer}, batch size {truth.batch_size}, {truth.threads} threads: "
            f"peak {truth.peak_bytes:,} bytes ({truth.peak_bytes / 2**20:.2f} MiB)"
        ),
        (
            f"in {truth.phase}, at {truth.operator}; {truth.event_count} events, {truth.miscounted} miscounted, "
            f"{truth.wall_seconds:.2f} s"
        ),
    ]
    lines += [f"  {group.bytes:>14,} bytes  {group.count:>5} x {group.operator}" for group in truth.held]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--optimizer", nargs="+", help="default: the case's first")
    parser.add_argument("--batch-size", nargs="+", type=int, help="default: the case's middle size")
    parser.add_argument("--steps", type=int, default=3, help="periods of the case; the second is the first with states")
    parser.add_argument("--threads", type=int, help="torch.set_num_threads: some kernels' scratch depends on it")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--by-hand", action="store_true", help="compare the MLP's peak with a sum added by hand")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.by_hand:
        check_by_hand()
        return
    case = case_named(arguments.case)
    for optimizer in arguments.optimizer or case.optimizers[:1]:
        for batch_size in arguments.batch_size or case.batch_sizes[1:2]:
            truth = measure_here(case, optimizer, batch_size, arguments.steps)
            print(json.dumps(asdict(truth)) if arguments.json else as_text(truth), flush=True)


if __name__ == "__main__":
    main()
