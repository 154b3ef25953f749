"""Compare predictions for CUDA with measurements on real GPUs. Needs torchvision and transformers, but no GPU.

Published runs (`data/`, measured by others): the loop is rebuilt, predicted, and compared with what NVML measured, next
to what xMem, DNNMem and SchedTune predicted for the same runs. Recordings (`recordings/`, written by `record.py`):
allocated and reserved peaks, and the recorded allocator histories replayed event by event.

    python benchmarks/accuracy.py                    # everything
    python benchmarks/accuracy.py --only ConvNeXt    # the published runs of some models
    python benchmarks/accuracy.py --json out.json

The published figures are NVML's highest use minus the first sample. "reserved" is the plain reading: all that is
reserved. In the image runs of 2025 the first sample was taken when the model, and what an optimizer creates in its
constructor, already existed: Adagrad's runs measured lower than the others by exactly that state. "after the model" is
what is reserved from the first step on for these runs (for the others everything reserved), with the kernels that CUDA
loads late. That reading was found on these runs; on those kept aside it is no better than the plain one.

`data/published_runs_aside.csv` has more runs of the same authors, on which nothing here was chosen: all 2025 runs of
two of their folders, and the first of a third by name, that are not in the other file and did not run out of memory.

The range is the footprint's, low to high, with the kernels that CUDA loads late: in 2025 0 to 52 MiB, in 2024 0 to 555
MB, the whole context. Two shares are printed. Strictly, a range holds a run if the measured figure is between low and
high, with nothing added to either. With setup, it also does if the figure is after what is reserved before the first
step was added to it, which the first sample may have included.

How far the range goes beyond the replays (`LESS_CACHED`, `MORE_CACHED`) is chosen on the CNN runs of half the models:
the least median width that strictly holds 80 % of them (no share holds MNASNet below a batch of 375 on an RTX 3060, 12
% of that half). The other half shows what that is worth.
"""

import argparse
import contextlib
import csv
import hashlib
import itertools
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pool
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from record import read

HERE = Path(__file__).parent
MIB = 1 << 20
OLD_CUDNN = 90_100  # of torch 2.6; that of torch 2.3 is older still. Neither can be asked
LAZY_KERNELS = 26 * MIB  # loaded by CUDA after the first sample; data/README.md
MOST_LAZY_KERNELS = 2 * LAZY_KERNELS

CAUSES = {
    "VGG16": "copies that older versions of cuDNN than the one that was asked seem not to have taken",
    "MnasNet": "a cuDNN workspace of 2 MiB an image in a backward convolution, on the RTX 3060 up to 375 images alone",
    "MobileNetV2": "the same workspace as MNASNet's, with which it shares its first layers",
    "RegNetX400MF": "a cuDNN workspace of grouped convolutions, on the RTX 4060 up to some 300 images",
}

TOKENS = 128  # of a text

OTHERS = ("xmem", "dnnmem", "schedtune")
NEW_MODELS = {"ConvNeXtBase", "MobeNetV3Large", "MobeNetV3Small", "RegNetY400MF", "ResNet152", "VGG19"}


@dataclass(frozen=True)
class Run:
    """One published run and what was predicted for it, in bytes."""

    model: str
    optimizer: str
    batch: int
    gpu: str
    version: str
    measured: int
    others: dict[str, int]
    other_seconds: dict[str, float]
    reserved: int
    predicted: int
    low: int
    high: int
    least: int  # of the replays alone
    most: int
    setup: int  # reserved before the first step, which the first sample may have included
    allocated: int
    slack: int  # how far below its reserved peak the replay still runs, by giving the cache back
    other_failed: dict[str, bool]  # whether a second run, with their prediction as a hard cap, failed
    seconds: float
    is_image: bool

    @property
    def error(self) -> float:
        return 100 * (self.predicted / self.measured - 1)

    @property
    def cap_fails(self) -> bool:
        """Whether more is missing than a run capped at the prediction could save."""
        return self.measured - self.predicted > self.slack

    @property
    def is_within(self) -> bool:
        """Whether the range holds the measured figure, with nothing added to either."""
        return self.low <= self.measured <= self.high

    @property
    def is_within_with_setup(self) -> bool:
        return self.measured + self.setup >= self.low and self.measured <= self.high

    @property
    def verdict(self) -> str:
        """A mark after the range: ``!`` if it does not hold the run, ``+`` if it does with setup added."""
        return " " if self.is_within else "+" if self.is_within_with_setup else "!"

    @property
    def is_shown(self) -> bool:
        """Whether the model is of the half of which no run was used to choose the range."""
        return hashlib.sha256(self.model.encode()).digest()[-1] % 2 == 1

    @property
    def width(self) -> float:
        return 100 * (self.high - self.low) / self.measured

    @property
    def is_recent(self) -> bool:
        return self.version.startswith("2025")

    @property
    def is_new(self) -> bool:
        """Whether no run of this architecture was looked at while rules were chosen."""
        return self.model in NEW_MODELS

    @property
    def reserved_error(self) -> float:
        """The error of the whole reserved peak, in percent."""
        return 100 * (self.reserved / self.measured - 1)

    def other_error(self, name: str) -> float | None:
        return 100 * (self.others[name] / self.measured - 1) if name in self.others else None


# T5-small, whose other settings are the default. In 2025 its attention had no fused kernel in transformers.
T5 = {"decoder_start_token_id": 0, "pad_token_id": 0, "attn_implementation": "eager"}

DROPOUTS = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
CEREBRAS = {"n_layer": 10, "n_inner": 3072, "n_positions": 2048, "activation_function": "gelu", **DROPOUTS}


# The published loops --------------------------------------------------------------------------------------------------


def stepping(forward: Callable[[Any, Any], Any], loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def step(model: Any, batch: Any) -> Any:
        outputs = forward(model, batch)  # a loop's variable: alive until the next forward pass has run
        return loss(outputs, batch), outputs

    return step


def image_loop(row: dict[str, str]) -> tuple[nn.Module, Any, Callable[[Any, Any], Any]]:
    """A torchvision model on CIFAR-10 images, resized to 86 x 86."""
    import torchvision  # here, so that the recordings can be checked without it

    names = {"torchvision": torchvision, "MNASNet": torchvision.models.MNASNet}
    model = on_meta(lambda: eval(row["constructor"], names))  # from this repository's own table
    size = int(row["batch"])
    batch = torch.empty(size, 3, 86, 86, device="meta"), torch.empty(size, dtype=torch.long, device="meta")
    return model, batch, stepping(lambda m, b: m(b[0]), lambda out, b: nn.functional.cross_entropy(out, b[1]))


def text_loop(row: dict[str, str]) -> tuple[nn.Module, Any, Callable[[Any, Any], Any]]:
    """A language model of transformers on 128 tokens of wikitext-2; the lengths of the real batches are unknown."""
    model = on_meta(lambda: language_model(row["constructor"]))
    tokens = torch.empty(int(row["batch"]), TOKENS, dtype=torch.long, device="meta")
    forward = lambda m, b: m(input_ids=b[0], attention_mask=b[1], labels=b[0])  # noqa: E731
    return model.train(), (tokens, torch.empty_like(tokens)), stepping(forward, lambda out, _: out.loss)


def language_model(name: str) -> nn.Module:
    """One of the language models, by its name on the Hugging Face hub."""
    import transformers

    if "T5" in name:
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
    if "neo" in name:
        layers = {"hidden_size": 768, "num_layers": 12, "num_heads": 12}
        pairs = [[["global", "local"], 6]]
        return transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(attention_types=pairs, **layers))
    if "opt-125m" in name:
        return transformers.OPTForCausalLM(transformers.OPTConfig())
    settings = CEREBRAS if "Cerebras" in name else {"n_layer": 6 if "distil" in name else 12}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))


@contextlib.contextmanager
def transformers_of_2025(row: dict[str, str]) -> Iterator[None]:
    """What transformers kept in spring 2025 (4.4x and 4.5x), if another version is installed.

    `DynamicCache.update` took a layer's first keys and values as they were (they are copied now), and
    `sdpa_attention_forward` made its arguments contiguous. OPT's keys and values were contiguous already.
    """
    if is_image(row) or "opt" in row["constructor"]:
        yield
        return
    from transformers.cache_utils import DynamicLayer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ATTENTION

    appended, attention = DynamicLayer.update, ATTENTION["sdpa"]

    def update(layer: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        if layer.is_initialized:
            return appended(layer, keys, values, *args, **kwargs)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        return keys, values

    def contiguous(module: Any, *states: Any, **kwargs: Any) -> Any:
        return attention(module, *(each.contiguous() for each in states[:3]), *states[3:], **kwargs)

    with mock.patch.object(DynamicLayer, "update", update):
        ATTENTION["sdpa"] = contiguous
        try:
            yield
        finally:
            ATTENTION["sdpa"] = attention


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build without memory if possible; some models need values while they are built."""
    try:
        with torch.device("meta"):
            return build()
    except (NotImplementedError, RuntimeError):
        return build()


@dataclass(frozen=True)
class Captured:
    """The loop of a published run on fake tensors, and what is added to its replay."""

    trace: Any
    settings: Any
    capacity: int
    late: tuple[int, int, int]  # what CUDA loads after the first sample: at least, likely, at most
    setup: int  # reserved before the first step, which the first sample may have included


def captured(row: dict[str, str]) -> Captured:
    from lightning_memguard.core import gpus
    from lightning_memguard.core.batch.batches import batches_from_one
    from lightning_memguard.core.capture.predict import capture
    from lightning_memguard.core.capture.program import LoopProgram
    from lightning_memguard.core.replay.replay import replay
    from lightning_memguard.core.replay.settings import AllocatorSettings
    from lightning_memguard.core.simulation import sdpa

    quieten()
    workspaces = {"CUBLAS_WORKSPACE_CONFIG": ":0:0" if row["version"] == "2025-05" else ""}
    old_cudnn = mock.patch.object(sdpa, "cudnn_version", return_value=OLD_CUDNN)
    model, batch, step = image_loop(row) if is_image(row) else text_loop(row)
    chosen = getattr(torch.optim, row["optimizer"])
    optimizer = lambda parameters: chosen(parameters, lr=0.001)  # noqa: E731
    given = model, batches_from_one(batch), step, optimizer, torch.device("cuda")
    gpu = gpus.find(row["gpu"])
    program = LoopProgram(*given, gpu=gpu)
    settings = AllocatorSettings.for_device("cuda", {})
    with transformers_of_2025(row), old_cudnn, mock.patch.dict(os.environ, workspaces):
        trace = capture(program, int(row["batch"]), "fake")
    recent = row["version"].startswith("2025")
    setup = tuple(event for event in trace.events if event.phase == "setup")
    before = replay(replace(trace, events=setup), settings).peak_reserved_bytes if recent and is_image(row) else 0
    late = (0, LAZY_KERNELS, MOST_LAZY_KERNELS) if recent else (0, *gpu.context_bytes[1:])
    return Captured(trace, settings, int(row["gpu_total_bytes"]) - gpu.context_bytes.likely, late, before)


def is_image(row: dict[str, str]) -> bool:
    return row["input"].startswith("86")


def predict(row: dict[str, str]) -> Run:
    from lightning_memguard.core.replay.footprint import footprint

    started = time.perf_counter()
    loop = captured(row)
    settings = replace(loop.settings, capacity_bytes=loop.capacity)
    found = footprint(loop.trace, settings, loop.late)
    seconds = time.perf_counter() - started
    adjustment = (LAZY_KERNELS if row["version"].startswith("2025") else 0) - loop.setup
    assert found.low is not None
    assert found.high is not None
    replayed = [found.peak, *(peak for doubt in found.doubts if doubt.kind != "cache" for peak in doubt.peaks)]
    return Run(
        model=row["model"],
        optimizer=row["optimizer"],
        batch=int(row["batch"]),
        gpu=row["gpu"],
        version=row["version"],
        measured=int(row["measured_bytes"]),
        others={name: int(float(row[f"{name}_bytes"])) for name in OTHERS if row[f"{name}_bytes"]},
        other_seconds={name: float(row[f"{name}_seconds"]) for name in OTHERS[:2] if row[f"{name}_seconds"]},
        reserved=found.peak_reserved_bytes,
        predicted=found.peak_reserved_bytes + adjustment,
        low=found.low.device_bytes,
        high=found.high.device_bytes,
        least=min(peak.device_bytes for peak in replayed),
        most=max(peak.device_bytes for peak in replayed),
        setup=loop.setup,
        allocated=found.peak_allocated_bytes,
        slack=found.peak_reserved_bytes - least_capacity(loop.trace, loop.settings, found.peak_reserved_bytes),
        other_failed={name: row[f"{name}_cap_failed"] == "True" for name in OTHERS if row[f"{name}_cap_failed"]},
        seconds=seconds,
        is_image=is_image(row),
    )


def least_capacity(trace: Any, settings: Any, enough: int) -> int:
    """The least memory in which the replay runs, found by bisection; ``enough`` is known to be enough."""
    from lightning_memguard.core.replay.replay import replay

    point, low = trace.only("point"), 0
    while enough - low > 8 * MIB:
        middle = (low + enough) // 2
        if replay(point, replace(settings, capacity_bytes=middle)).out_of_memory_event is None:
            enough = middle
        else:
            low = middle
    return enough


def quieten() -> None:
    """One thread per process, and no advice from the models' libraries."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


# Output ---------------------------------------------------------------------------------------------------------------


def show(runs: Sequence[Run]) -> None:
    print(
        f"{'model':<13}{'optimizer':<10}{'batch':>5} {'GPU':<9}{'measured':>9}{'reserved':>9}{'error':>8}{'low':>7}"
        f"{'high':>6}  {'after the model':>17}{'xMem':>8}{'DNNMem':>8}{'SchedT.':>8}{'seconds':>9}"
    )
    for run in runs:
        others = "".join(
            f"{error:>+7.1f}%" if (error := run.other_error(name)) is not None else f"{'-':>8}" for name in OTHERS
        )
        print(
            f"{run.model.split('/')[-1]:<13}{run.optimizer:<10}{run.batch:>5} {run.gpu.split('GeForce ')[-1]:<9}"
            f"{run.measured / MIB:>9.0f}{run.reserved / MIB:>9.0f}{run.reserved_error:>+7.1f}%"
            f"{run.low / MIB:>7.0f}{run.high / MIB:>6.0f}{run.verdict}"
            f"{run.predicted / MIB:>9.0f}{run.error:>+8.1f}%{others}{run.seconds:>9.2f}"
        )


def spread(errors: Iterable[float]) -> str:
    """Median, 90th percentile and worst of absolute errors."""
    sizes = sorted(abs(error) for error in errors)
    if not sizes:
        return "none"
    ninth = sizes[min(len(sizes) - 1, round(0.9 * (len(sizes) - 1)))]
    return f"median {statistics.median(sizes):5.2f} %   90th percentile {ninth:5.2f} %   worst {sizes[-1]:5.2f} %"


def summarise(title: str, runs: Sequence[Run]) -> None:
    """The errors of a group of runs, ours and those of the others on the same runs."""
    if not runs:
        return
    print(f"\n{title}: {len(runs)} runs")
    print(f"  {'lightning-memguard, reserved':<30}{spread(run.reserved_error for run in runs)}")
    print(f"  {'  after the model':<30}{spread(run.error for run in runs)}")
    bounds(runs)
    for name in OTHERS:
        print(f"  {name:<30}{spread(e for run in runs if (e := run.other_error(name)) is not None)}")
    line = f"  seconds a prediction: {statistics.median(run.seconds for run in runs):.2f} (median)"
    for name in OTHERS[:2]:
        seconds = [run.other_seconds[name] for run in runs if name in run.other_seconds]
        line += f"; {name} {statistics.median(seconds):.1f}" if seconds else ""
    print(line)
    line = f"  the prediction as a hard cap fails: {sum(run.cap_fails for run in runs)} of {len(runs)} (by replay)"
    for name in OTHERS:
        failed = [run.other_failed[name] for run in runs if name in run.other_failed]
        line += f"; {name} {sum(failed)} of {len(failed)} (run)"
    print(line)


def bounds(runs: Sequence[Run]) -> None:
    """How many runs the ranges hold, and how wide they are."""
    strict, with_setup = sum(run.is_within for run in runs), sum(run.is_within_with_setup for run in runs)
    below = sum(run.measured < run.low for run in runs)
    print(
        f"  range, strictly: holds {strict} of {len(runs)} ({strict / len(runs):.0%}; {below} measured below low, "
        f"{len(runs) - strict - below} above high); with setup added: {with_setup} ({with_setup / len(runs):.0%}); "
        f"median width {statistics.median(run.width for run in runs):.1f} %"
    )


def show_halves(runs: Sequence[Run]) -> None:
    """The ranges of all CNN runs on both halves, and the shares of the peak that the first half chooses."""
    from lightning_memguard.core.replay.footprint import LESS_CACHED, MORE_CACHED

    images = [run for run in runs if run.is_image]
    chosen_on, shown = ([run for run in images if run.is_shown == half] for half in (False, True))
    for title, half in (("All CNN runs", images), ("  chosen on", chosen_on), ("  shown on, the others", shown)):
        if half:
            print(f"\n{title}: {', '.join(sorted({run.model for run in half}))}")
            bounds(half)
    if chosen_on:
        below, above = min(itertools.product(range(41), repeat=2), key=lambda steps: chosen_width(chosen_on, *steps))
        print(f"  the first half chooses {below / 4} % of the allocated peak below and {above / 4} % above", end="")
        print(f" (in use: {100 * LESS_CACHED:g} and {100 * MORE_CACHED:g} %)")


def chosen_width(runs: Sequence[Run], below: int, above: int) -> float:
    """The median width with these shares, in quarters of a percent; infinite if too few runs are held."""
    ranges = [(run, run.least - below * run.allocated / 400, run.most + above * run.allocated / 400) for run in runs]
    held = sum(low <= run.measured <= high for run, low, high in ranges)
    widths = (100 * (high - low) / run.measured for run, low, high in ranges)
    return statistics.median(widths) if held >= 0.8 * len(runs) else math.inf


def large_errors(runs: Sequence[Run], limit: float = 5.0) -> None:
    """Every error above 5 %, with the bytes that are missing or too many."""
    far = [run for run in runs if abs(run.error) > limit]
    print(f"\nErrors above {limit:.0f} %: {len(far)}")
    for run in far:
        missing = (run.measured - run.predicted) / MIB
        which = f"{run.model} {run.optimizer} {run.batch} on {run.gpu.split('GeForce ')[-1]} ({run.version})"
        off = (
            f"{abs(missing):.0f} MiB {'missing' if missing > 0 else 'too many'}, {missing / run.batch:+.2f} MiB an item"
        )
        print(f"  {which}: {off}; attributed to {CAUSES.get(run.model, 'no known cause')}")


# Recordings -----------------------------------------------------------------------------------------------------------


def recordings() -> list[Path]:
    return sorted((*HERE.glob("recordings/*.json"), *HERE.glob("recordings/*.json.gz")))


@dataclass(frozen=True)
class Recorded:
    """One recorded training and what was predicted for it, in bytes."""

    name: str
    allocated: int
    reserved: int
    predicted_allocated: int
    predicted_reserved: int
    fits: bool  # the replay runs under what was reserved, as a hard cap
    history: tuple[int, int] | None  # events replayed, and those after which the reserved bytes differ
    low: int  # the range of the reserved bytes
    high: int

    @property
    def is_within(self) -> bool:
        return self.low <= self.reserved <= self.high


def predict_recorded(task: tuple[str, dict[str, Any], dict[str, Any]]) -> Recorded:
    """Predict one training of the corpus for the GPU that it was recorded on."""
    from torch.utils.data import DataLoader

    from lightning_memguard.core.capture.predict import predict as predict_program
    from lightning_memguard.core.gpus import Gpu
    from lightning_memguard.core.replay.replay import replay
    from lightning_memguard.core.replay.settings import AllocatorSettings
    from shared.corpus import corpus
    from shared.predicted import program_of

    quieten()
    name, case, machine = task
    training = next(training for training in corpus() if training.name == name)
    capability = tuple(machine["compute_capability"])
    gpu = Gpu(machine["gpu"], machine["total_memory"], capability, machine["multiprocessors"])
    module, size = training.module(), case["batch_size"]
    batch = next(iter(DataLoader(training.dataset(size), batch_size=size)))
    program = program_of(module, batch, "cuda", training.precision, gpu, **training.trainer_kwargs)
    settings = AllocatorSettings.for_device("cuda", machine["environ"])
    capped = replace(settings, capacity_bytes=int(training.cap_gib * 2**30)) if training.cap_gib else settings
    prediction = predict_program(program, size, capped, scalable=False)
    found = prediction.footprint_at(size)
    trace = prediction.trace_at(size).only("point")
    fitting = replay(trace, replace(settings, capacity_bytes=case["max_reserved"])).out_of_memory_event is None
    peaks = case["max_allocated"], case["max_reserved"], found.peak_allocated_bytes, found.peak_reserved_bytes
    history = replay_history(case["history"], capped) if case.get("history") else None
    return Recorded(name, *peaks, fitting, history, found.lowest.reserved_bytes, found.highest.reserved_bytes)


def replay_history(history: Sequence[Sequence[Any]], settings: Any) -> tuple[int, int]:
    """Replay the recorded requests with our allocator and compare its segments with the recorded ones.

    What Lightning releases once the model is on the GPU (`_CheckpointConnector.resume_end`) is released here, too.

    Returns:
        How many requests there were, and after how many of them the reserved bytes differ.
    """
    from lightning_memguard.core.replay.allocator import Allocator

    allocator = Allocator(settings)
    blocks: dict[int, Any] = {}
    reserved = requests = different = 0
    last = ""  # action on segments since the last request
    for action, address, nbytes, stream in history:
        if action in ("segment_alloc", "segment_map"):
            reserved += nbytes
            last = action
        elif action in ("segment_free", "segment_unmap"):
            reserved -= nbytes
            last = action
        elif action == "alloc":
            requests += 1
            if last in ("segment_free", "segment_unmap"):  # not to make room: `torch.cuda.empty_cache`
                allocator.empty_cache()
            last = ""
            blocks[address] = allocator.alloc(nbytes, stream)
            different += allocator.reserved_bytes != reserved
        elif action == "free_completed" and address in blocks:
            allocator.free(blocks.pop(address))
    return requests, different


def show_recording(path: Path, pool: Any) -> None:
    recording = read(path)
    cases = {name: case for name, case in recording["cases"].items() if case.get("max_reserved")}
    if not cases:
        return
    found = pool.map(predict_recorded, [(name, case, recording["machine"]) for name, case in cases.items()])
    print(f"\n{path.name}: {recording['machine']['gpu']}, torch {recording['machine']['torch']}; MiB")
    print(
        f"{'training':<32}{'allocated':>11}{'predicted':>11}{'error':>9}{'reserved':>11}{'predicted':>11}{'error':>9}"
        f"{'range':>15}"
    )
    errors: tuple[list[float], list[float]] = [], []
    for run in found:
        pairs = ((run.allocated, run.predicted_allocated), (run.reserved, run.predicted_reserved))
        cells = ""
        for (real, predicted), column in zip(pairs, errors, strict=True):
            column.append(100 * (predicted / real - 1))
            cells += f"{real / MIB:>11.0f}{predicted / MIB:>11.0f}{column[-1]:>+8.2f}%"
        history = "" if run.history is None else f"  history: {run.history[1]} of {run.history[0]} requests differ"
        ends = f"{run.low / MIB:>8.0f} to {run.high / MIB:.0f}{' ' if run.is_within else '!'}"
        print(f"{run.name:<32}{cells}{ends}{history}")
    print(f"  allocated  {spread(errors[0])}\n  reserved   {spread(errors[1])}")
    width = statistics.median(100 * (run.high - run.low) / run.reserved for run in found)
    print(f"  reserved in the range: {sum(run.is_within for run in found)} of {len(found)}, median width {width:.1f} %")
    fails = sum(not run.fits for run in found)
    print(f"  the replay fails under the recorded peak as a hard cap: {fails} of {len(found)}")
    for name, case in recording["cases"].items():
        if "failed" in case:
            print(f"  not recorded: {name}: {case['failed']}")


def main() -> None:
    from lightning_memguard.core.kernels import cudnn
    from shared.lives import show_lives

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="predictions at a time (default: all cores)")
    parser.add_argument("--json", type=Path, help="write every run here")
    arguments = parser.parse_args()
    asked = cudnn.version()
    print(f"Workspaces: {f'cuDNN {asked} was asked' if asked else 'no cuDNN can be asked here, its table is used'}\n")
    rows, aside = (published(name, arguments.only) for name in ("published_runs", "published_runs_aside"))
    with Pool(arguments.jobs) as pool:
        runs = pool.map(predict, rows + aside, chunksize=4)
        known, others = (
            sorted(some, key=lambda run: (run.version, run.model, run.gpu, run.batch))
            for some in (runs[: len(rows)], runs[len(rows) :])
        )
        if known:
            show_all(known, GROUPS)
            large_errors([run for run in known if run.is_image and run.is_recent])
        if others:
            print("\nKept aside")
            show_all(others, GROUPS_ASIDE, " kept aside")
        show_halves(runs)
        show_lives(runs, lambda run: run.is_shown)
        for path in recordings():
            show_recording(path, pool)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(run) for run in runs], indent=1), encoding="utf-8")
    if not recordings():
        print("\nNo recordings: `benchmarks/record.py` has not run on a GPU yet.")


def published(name: str, only: str) -> list[dict[str, str]]:
    """The rows of one file of published runs, of models whose name contains ``only``."""
    with (HERE / "data" / f"{name}.csv").open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if only.lower() in row["model"].lower()]


# title: of which runs
GROUPS: dict[str, Callable[[Run], bool]] = {
    "CNNs, 2025": lambda run: run.is_image and run.is_recent,
    "CNNs, 2024 (context included, torch 2.3)": lambda run: run.is_image and not run.is_recent,
    "Transformers (lengths and attention of the real runs unknown)": lambda run: not run.is_image,
}
GROUPS_ASIDE: dict[str, Callable[[Run], bool]] = {
    "Kept aside, CNNs": lambda run: run.is_image,
    "Kept aside, CNNs of architectures in the other file": lambda run: run.is_image and not run.is_new,
    "Kept aside, CNNs of other architectures": lambda run: run.is_image and run.is_new,
    "Kept aside, transformers": lambda run: not run.is_image,
}


def show_all(runs: list[Run], groups: dict[str, Callable[[Run], bool]], kept: str = "") -> None:
    """Published runs, one by one and by group."""
    show(runs)
    for title, is_of in groups.items():
        summarise(title, [run for run in runs if is_of(run)])
    print(f"\nAll {len(runs)} runs{kept}")
    bounds(runs)


if __name__ == "__main__":
    sys.exit(main())
