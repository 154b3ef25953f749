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
from torch import nn

from length_grid import CASES, Case, own_token
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

SAMPLES, LENGTHS, STEPS = 16, (64, 512), 40
MIB = 2**20
SETTINGS = {"default": AllocatorSettings(), "expandable": AllocatorSettings(expandable_segments=True)}
assert nn and own_token  # models of length_grid


def program_of(case: Case, target: Target, length: int) -> LoopProgram:
    batches = batches_from_one(case.batch(SAMPLES, length), SAMPLES)
    rest = target.device, case.precision, True, target.gpu
    return LoopProgram(case.model, batches, case.loss, torch.optim.AdamW, *rest)


def one_after_another(traces: list[Trace]) -> Iterator[list[Event]]:
    """The steps of separate captures as one run: of the first all, of each other its last step.

    What a step leaves is known by its place among the blocks that the trace frees at its end, and freed where the last
    step of the next trace frees the block at that place that was left to it.
    """
    block, left = 1_000_000, list[int]()
    for place, trace in enumerate(traces):
        events = trace.only("point").events
        last = max(event.step for event in events)
        end = max(at for at, event in enumerate(events) if event.action == "alloc") + 1
        begin = next(at for at, event in enumerate(events) if event.step == last)
        made = {event.block for event in events[begin:end] if event.action == "alloc"}
        stays = [event.block for event in events[end:] if event.block in made]
        takes = [event.block for event in events[begin:end] if event.action == "free" and event.block not in made]
        names, run = dict[int, int](), list[Event]()
        if place:
            order = _in_order_of(traces, place)
            names = {gone: left[at] for gone, at in order.items() if at < len(left)}
        assert len(takes) <= len(stays), "a step frees more than it leaves"
        for event in events[:end] if not place else events[begin:end]:
            if event.action == "alloc":
                names[event.block], block = block, block + 1
            if event.block in names:
                run.append(event._replace(block=names[event.block]))
        freed = [each for each in stays[len(takes) :]] if len(stays) > len(takes) else []
        run += [Event("free", names[each], 0) for each in freed]
        left = [names[each] for each in stays if each not in freed]
        yield run


def _in_order_of(traces: list[Trace], place: int) -> dict[int, int]:
    """Of the blocks that a last step frees of the step before, the place of each among those that such a step leaves."""
    events = traces[place].only("point").events
    last = max(event.step for event in events)
    end = max(at for at, event in enumerate(events) if event.action == "alloc") + 1
    before = [event for event in events[:end] if event.step == last - 1]
    own = [event for event in events[:end] if event.step == last]
    made = {event.block for event in own if event.action == "alloc"}
    asked = {event.block: at for at, event in enumerate(each for each in before if each.action == "alloc")}
    now = {event.block: at for at, event in enumerate(each for each in own if each.action == "alloc")}
    stays = [event.block for event in events[end:] if event.block in made]
    rank = {block: at for at, block in enumerate(sorted(stays, key=now.__getitem__))}
    gone = [event.block for event in own if event.action == "free" and event.block not in made]
    by_age = sorted((each for each in gone if each in asked), key=asked.__getitem__)
    in_age = sorted(stays, key=rank.__getitem__)
    return {block: stays.index(in_age[at]) for at, block in enumerate(by_age) if at < len(in_age)}


def compare(case: Case, target: Target, seed: int) -> str:
    draw = random.Random(seed)
    lengths = [draw.randint(*LENGTHS) for _ in range(STEPS)]
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
    options = parser.parse_args()
    target = replace(target_of(options.device), capacity_bytes=None)
    torch.set_num_threads(1)
    print(f"{STEPS} steps of {SAMPLES} samples, lengths {LENGTHS}; reserved, fast / captured one by one")
    for name in options.cases or CASES:
        try:
            print(f"{name:32} {compare(CASES[name], target, options.seed)}", flush=True)
        except CannotTraceError as error:
            print(f"{name:32} not known: {error}", flush=True)


if __name__ == "__main__":
    main()
