"""Scratch of single operators, forward and backward: predicted, and recorded by the CUDA allocator itself.

Each call of `shared/operator_calls.py` runs under PyTorch's recorded memory history, and on fake tensors under the
recorder. Their peaks are compared, and their allocations in order: of how many bytes, and with how many allocated after
each, in multiples of 512 as the allocator counts them. If a size depends on values or is not known exactly, the peak
has to be within the predicted range. Needs a CUDA build and a GPU, and about two minutes. A library that stands for the
CUDA runtime and launches no kernel does as well: then all values are zero.

With `--recording`, such calls and those of `shared/layer_calls.py` are compared with what an allocator took for them
earlier (`recordings/calls/`), part by part, on a machine without a GPU; the CUDA build should be the recording's.

    python benchmarks/operators.py [part of a name ...]
    python benchmarks/operators.py --recording recordings/calls/h100.json.gz [part of a name ...]
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_memguard.core.capture.capture import quiet
from lightning_memguard.core.capture.program import tensors
from lightning_memguard.core.capture.recorder import Recorder, watching
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.simulation.fake_cuda import gpu_of
from lightning_memguard.core.trace.scratch import up
from shared.layer_calls import Settings, applied, of_settings
from shared.operator_calls import Call, calls

Step = tuple[int, int]
"""An allocation: its bytes, and what is allocated after it, less what was before the call."""


class Events(NamedTuple):
    """Allocations of a call in order, and its peak."""

    steps: tuple[Step, ...]

    @property
    def peak(self) -> int:
        return max((after for _, after in self.steps), default=0)


NEAR_BYTES = 1024
WORKSPACES = (32 << 20, 8_519_680, 1 << 20)
"""Workspaces of cuBLAS and cublasLt, which some versions take for every product and give back at once."""


def events_of(changes: Sequence[int]) -> Events:
    """The events of a list of allocations, above zero, and frees, below it."""
    now, steps = 0, list[Step]()
    for place, change in enumerate(changes):
        at_once = {*changes[place : place + 2]} if change > 0 else {*changes[place - 1 : place + 1]}
        if abs(change) in WORKSPACES and at_once == {abs(change), -abs(change)}:
            continue
        now += up(change, 512) if change > 0 else -up(-change, 512)
        if change > 0:
            steps.append((up(change, 512), now))
    return Events(tuple(steps))


def run(function: Callable[[], object]) -> object:
    """Forward, then backward from every result that has a gradient."""
    result = function()
    results = [result] if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else []
    ends = [each for each in results if isinstance(each, Tensor) and each.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(each) if each.dim() else None for each in ends])
    return result


def open_libraries() -> None:
    """Products with and without a bias, in both threads: workspaces that stay are not a call's."""
    x = torch.ones(16, 16, device="cuda", requires_grad=True)
    for _ in range(2):
        torch.addmm(x[0], x @ x, x).sum().backward()


# -- predicted


def predicted(gpu: Gpu, make: Call) -> tuple[Events, ...]:
    """At least, most likely, at most."""
    recorder = Recorder("cuda", kernel_target=gpu.kernel_target, worst_case=True)
    with tensors(fake=True, gpu=gpu), quiet(), watching(recorder, nn.Identity()):
        open_libraries()
        function = make()
        recorder.mark("forward", step=1)
        result = run(function)
        trace = recorder.trace(1, "fake")
        del result
    low, point, high = (
        events_of([event.change for event in trace.only(case) if event.step == 1]) for case in ("low", "point", "high")
    )
    return (Events(()), point, high) if recorder.assumptions else (low, point, high)


# -- recorded


def recorded(make: Call) -> Events:
    function = make()
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=100_000)
    try:
        result = run(function)
        torch.cuda.synchronize()
        entries = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(None)
    del result
    signs = {"alloc": 1, "free_completed": -1}
    return events_of([signs[each["action"]] * each["size"] for each in entries if each["action"] in signs])


# -- both, each in a process that may end


Answer = Any  # an error's text, or what the work returned


def _answer(sender: Connection, works: Sequence[Callable[[], Answer]], prepare: Callable[[], object]) -> None:
    prepare()
    for work in works:
        try:
            answer = work()
        except Exception as error:  # noqa: BLE001 - a call that cannot run here
            answer = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        sender.send(answer)


def _nothing() -> None:
    """Prepare nothing."""


def answers(works: Sequence[Callable[[], Answer]], prepare: Callable[[], object] = _nothing) -> list[Answer]:
    """What each function returns; where their process ends, another goes on behind the one that ended it."""
    got: list[Answer] = []
    context = multiprocessing.get_context("fork")
    while len(got) < len(works):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(sender, works[len(got) :], prepare))
        process.start()
        sender.close()
        try:
            while len(got) < len(works):
                got.append(receiver.recv())
        except EOFError:
            got.append("its process ended")
        process.join()
    return got


def _gpu() -> Gpu | None:
    return gpu_of(torch.device("cuda", 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recording", type=Path, metavar="FILE", help="compare with these, rather than with a GPU")
    parser.add_argument("parts", nargs="*", metavar="PART", help="only calls whose names have all of these")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.recording:
        compare_recording(options.recording, options.parts)
    else:
        compare_here(options.parts)


def compare_here(parts: Sequence[str]) -> None:
    """Print what differs, largest last, then how many calls are equal."""
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        gpu = pool.apply(_gpu)
    assert gpu is not None, "needs a CUDA build and a GPU"
    rows = [(name, call) for name, call in calls() if all(part in name for part in parts)]
    ours = answers([partial(predicted, gpu, call) for _, call in rows])
    theirs = answers([partial(recorded, call) for _, call in rows], open_libraries)
    compare([name for name, _ in rows], ours, theirs)
    print(f"torch {torch.__version__}, compute capability {gpu.compute_capability}")


def compare_recording(path: Path, parts: Sequence[str]) -> None:
    """Print what differs of each part of a recording, largest last, then how many calls are equal."""
    with gzip.open(path, "rt") as file:
        recording = json.load(file)
    machine, named = recording["machine"], dict(calls())
    capability = tuple(machine["compute_capability"])
    gpu = Gpu(machine["gpu"], machine["total_memory"], capability, machine["multiprocessors"])
    for part, rows in recording["parts"].items():
        some = [(settings, real) for settings, real in rows if all(each in name_of(settings) for each in parts)]
        works = []
        for settings, _ in some:
            call = named[settings] if isinstance(settings, str) else of_settings(part, settings)
            works.append(partial(predicted_under, settings, gpu, call))
        theirs = [real if isinstance(real, str) else events_of([change(*each) for each in real]) for _, real in some]
        print(f"\n{part}")
        compare([name_of(settings) for settings, _ in some], answers(works), theirs)
    print(
        f"\nrecorded: torch {machine['torch']}, cuDNN {machine['cudnn']}, {gpu.name}; here: torch {torch.__version__}"
    )


def predicted_under(settings: Settings | str, gpu: Gpu, call: Call) -> tuple[Events, ...]:
    with applied(settings):
        return predicted(gpu, call)


def name_of(settings: Settings | str) -> str:
    """A call's name and settings."""
    if isinstance(settings, str):
        return settings
    kept = {key: value for key, value in settings.items() if key != "name" and value not in (False, None)}
    return " ".join((settings["name"], *(f"{key}={value}".replace(" ", "") for key, value in kept.items())))


def change(action: str, nbytes: int) -> int:
    return nbytes if action == "alloc" else -nbytes


def compare(names: Sequence[str], ours: Sequence[Answer], theirs: Sequence[Answer]) -> None:
    failed, peaks, near, lists, within, worst = 0, 0, 0, 0, 0, 0
    rows: list[tuple[int, str]] = []
    for name, events, real in zip(names, ours, theirs, strict=True):
        if isinstance(real, str) or isinstance(events, str):
            failed += 1
            rows.append((-1, f"{name}: {real if isinstance(real, str) else f'predicted: {events}'}"))
            continue
        low, point, high = events
        difference = abs(point.peak - real.peak)
        inside = low.peak <= real.peak <= high.peak
        within += inside
        peaks += not difference
        near += difference <= NEAR_BYTES
        worst = max(worst, difference)
        lists += point.steps == real.steps
        if point.steps != real.steps:
            rows.append((difference, f"{'' if inside else '! '}{_difference(name, point, real)}"))
    for _, row in sorted(rows):
        print(row)
    print(f"{len(names)} calls, {failed} did not run; peak equal: {peaks}, within 1 KiB: {near}, list equal: {lists}")
    print(f"recorded peak in the range: {within}, else marked !; the worst is {worst:,} bytes off")


def _difference(name: str, point: Events, real: Events) -> str:
    place = next(
        (at for at, (one, other) in enumerate(zip(point.steps, real.steps, strict=False)) if one != other),
        min(len(point.steps), len(real.steps)),
    )
    here = [
        f"{' '.join(f'{size:,}>{after:,}' for size, after in each.steps[place : place + 4])}" for each in (point, real)
    ]
    peak = f"{point.peak:,} for {real.peak:,}" if point.peak != real.peak else "equal peak"
    return f"{name}: {peak}; from allocation {place}: {here[0]} | {here[1]}"


if __name__ == "__main__":
    main()
