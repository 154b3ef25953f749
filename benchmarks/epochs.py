"""What a GPU's cache grows to over an epoch of lengths: the fast replay next to one of separately captured steps.

The fast replay (`lightning_memguard/core/replay/epoch.py`) takes each step from captures at four lengths. Here the same
steps are captured one by one, each at its own length, and all their events are replayed in one allocator, without the
code that repeats a step: what a step leaves is freed when the next one frees it.

    python benchmarks/epochs.py                      # ten models, 40 steps each: half an hour on one core
    python benchmarks/epochs.py "GPT, SDPA, float32"
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from length_grid import CASES, Case
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.capture import Captures, capture
from lightning_memguard.core.capture.lengths import ShapeSurveyor
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.replay.epoch import Shape, replay_epoch
from lightning_memguard.core.replay.replay import Steps
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.planning.target import Target, target_of

SAMPLES, LENGTHS = 16, (64, 512)
MIB = 2**20
SETTINGS = {"default": AllocatorSettings(), "expandable": AllocatorSettings(expandable_segments=True)}


def program_of(case: Case, target: Target, length: int) -> LoopProgram:
    batches = batches_from_one(case.batch(SAMPLES, length), SAMPLES)
    rest = target.device, case.precision, True, target.gpu
    return LoopProgram(case.model, batches, case.loss, torch.optim.AdamW, *rest)


def one_after_another(traces: list[Trace]) -> Iterator[list[Event]]:
    """The steps of separate captures as one run: of the first all, of each other its last step.

    A step leaves what is no temporary, in the order that it was allocated; the next one frees it by its own order.
    """
    block, left = 1_000_000, list[int]()
    for trace in traces:
        events = trace.only("point").events
        end = 1 + max(at for at, event in enumerate(events) if event.action == "alloc")
        last = events[end - 1].step
        begin = next(at for at, event in enumerate(events) if event.step == last)
        age = {event.block: at for at, event in enumerate(events[:end]) if event.action == "alloc"}
        rest = [event for event in events[end:] if age[event.block] >= begin]
        stays = sorted((each.block for each in rest if each.part != "temporaries"), key=age.__getitem__)
        frees = [each.block for each in events[begin:end] if each.action == "free"]
        takes = sorted((each for each in frees if age[each] < begin), key=age.__getitem__)
        assert len(takes) == len(stays), f"{len(takes)} blocks are freed of the step before, and {len(stays)} left"
        names = dict(zip(takes, left, strict=True)) if left else {}
        run = list[Event]()
        for event in events[begin:end] if left else events[:end]:
            if event.action == "alloc":
                names[event.block], block = block, block + 1
            run.append(event._replace(block=names[event.block]))
        yield [*run, *(each._replace(block=names[each.block]) for each in rest if each.part == "temporaries")]
        left = [names[each] for each in stays]


def compare(case: Case, target: Target, seed: int, steps: int) -> str:
    draw = random.Random(seed)
    lengths = [draw.randint(*LENGTHS) for _ in range(steps)]
    started = time.process_time()
    with Captures():
        surveyor = ShapeSurveyor(lambda length: program_of(case, target, length), (SAMPLES,))
        shapes = surveyor.survey(lengths)
    epochs = {
        name: replay_epoch([Shape(SAMPLES, each) for each in lengths], shapes.at, settings)
        for name, settings in SETTINGS.items()
    }
    seconds = time.process_time() - started
    captured = {}
    for length in {*lengths}:
        program = program_of(case, target, length)
        with Captures(program):
            captured[length] = capture(program, SAMPLES, "fake")
    same = sum(
        shapes.at(Shape(SAMPLES, each)).only("point").events == trace.only("point").events
        for each, trace in captured.items()
    )
    found = []
    for name, settings in SETTINGS.items():
        steps = Steps(Trace(0, "cuda", "fake", ()), settings)
        for events in one_after_another([captured[each] for each in lengths]):
            for _ in steps.go_on(events):
                pass
        assert steps.allocator
        truth, fast = steps.allocator.peak_reserved_bytes, epochs[name].run.peak_reserved_bytes
        found.append(f"{name} {fast // MIB:6,} / {truth // MIB:6,} MiB ({fast / truth - 1:+.1%})")
    return f"{'  '.join(found)}  {same} of {len(captured)} traces equal; {seconds:.0f} s of processor"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--device", default="A100 80GB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    target = replace(target_of(options.device), capacity_bytes=None)
    torch.set_num_threads(1)
    print(f"{options.steps} steps of {SAMPLES} samples, lengths {LENGTHS}; reserved, fast / captured one by one")
    for name in options.cases or CASES:
        try:
            found = compare(CASES[name], target, options.seed, options.steps)
        except CannotTraceError as error:
            found = f"not fitted: {error}"
        print(f"{name:32} {found}", flush=True)


if __name__ == "__main__":
    main()
