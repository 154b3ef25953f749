"""Compare predicted seconds of a step with published ones of timm's models on GPUs, and with measured ones here.

    python benchmarks/seconds.py published benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv "RTX 3090" --fit
    python benchmarks/seconds.py recorded      # trainings of text that were recorded on a GPU
    python benchmarks/seconds.py here          # this CPU: nothing else may run on it

Published: tables of timm's repository (its folder `results`), models in the order of a hash of their names. Each is
captured at two small sizes on the simulated GPU, and its work grown to the published size. With `--fit`, the shares of
the peaks (`_SHARES` of `core/device/speed.py`) are those that fit the models of even hash best; those of odd hash show
what that is worth. Models with grouped convolutions are left out of both, and counted apart: channels last, with torch
1.12, cuDNN ran these many times slower than with torch 2.4. `--json` continues where it stopped. Needs timm, no
GPU.

Recorded: from the end of a batch to that of the next. Images are left out, as loading them took longer than the step,
and compiled steps, which were recorded while other processes ran.

Here: 12 models at five batch sizes, with their blocks checkpointed and without. "chosen" is the way whose predicted
time a sample is least; it is compared with the way that was measured to be the fastest.
"""

import argparse
import csv
import hashlib
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

SHARES = tuple(share / 100 for share in range(50, 101, 2))


def hash_of(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


def step(model: nn.Module, batch: Sequence[Any]) -> Any:
    out = model(batch[0])
    return nn.functional.cross_entropy(out[0] if isinstance(out, tuple) else out, batch[1])


def published_work(name: str, row: dict[str, str], gpu: Any, table: str) -> dict[str, Any]:
    """The work of a model's step at its published size: as timm's benchmark.py runs it, in mixed float16."""
    import timm

    from lightning_memguard.core.batch.batches import batches_from_one
    from lightning_memguard.core.capture.capture import capture
    from lightning_memguard.core.capture.program import LoopProgram
    from lightning_memguard.core.trace.work import WorkAt, groups_of

    trains, channels_last = "train" in table, "nhwc" in table
    kind = "train" if trains else "infer"
    side = int(row[f"{kind}_img_size"])
    timm.layers.set_fused_attn("pt112" not in table)  # timm had none with torch 1.12
    try:
        model = timm.create_model(name, pretrained=False)
    except AssertionError:  # it has to be told the side
        model = timm.create_model(name, pretrained=False, img_size=side)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.zeros(2, 3, side, side).to(memory_format=memory_format)
    program = LoopProgram(
        model=model.to(memory_format=memory_format),
        batches=batches_from_one((images, torch.zeros(2, dtype=torch.long))),
        step=step,
        optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9, nesterov=True) if trains else None,
        device=torch.device("cuda"),
        precision="16-mixed",
        gpu=gpu,
        training=trains,
    )
    grouped = any(isinstance(each, nn.Conv2d) and 1 < each.groups < each.in_channels for each in model.modules())
    groups = groups_of([capture(program, size, "fake").work for size in (4, 8)])
    return {"work": WorkAt(groups, (4, 8), int(row[f"{kind}_batch_size"])), "grouped": grouped}


def published(arguments: argparse.Namespace) -> None:
    import timm

    from lightning_memguard.core import gpus
    from lightning_memguard.core.device.speed import gpu_speed
    from lightning_memguard.core.trace.work import Work

    gpu, out = gpus.find(arguments.gpu), Path(arguments.json)
    trains = "train" in arguments.table.name
    kind = "train" if trains else "infer"
    with arguments.table.open() as file:
        rows = {row["model"]: row for row in csv.DictReader(file) if timm.is_model(row["model"].split(".")[0])}
    names = sorted(rows, key=hash_of)[: arguments.models]
    known = {line["model"]: line for line in map(json.loads, out.read_text().splitlines())} if out.exists() else {}
    with out.open("a") as file:
        for name in names:
            if name not in known:
                try:
                    work = published_work(name.split(".")[0], rows[name], gpu, arguments.table.name)
                except Exception as error:  # noqa: BLE001 - a model that cannot be built is listed
                    print(f"{name}: left out ({type(error).__name__}: {str(error)[:100]})")
                    work = {"work": [], "grouped": False}
                known[name] = {"model": name, **work}
                print(json.dumps(known[name]), file=file, flush=True)
    works = {name: tuple(Work(*each) for each in known[name]["work"]) for name in names if known[name]["work"]}
    measured = {name: float(rows[name][f"{kind}_step_time"]) / 1000 for name in works}
    sizes = {name: int(rows[name][f"{kind}_batch_size"]) for name in works}
    plain = [name for name in works if not known[name]["grouped"]]
    even, odd = ([name for name in plain if hash_of(name) % 2 == half] for half in (0, 1))
    speed = fitted(gpu, {name: works[name] for name in even}, measured) if arguments.fit else gpu_speed(gpu)
    odd_all = [name for name in works if hash_of(name) % 2]
    for title, chosen in (
        ("even hash", even),
        ("odd hash", odd),
        ("odd hash, grouped too", odd_all),
        ("all", [*works]),
    ):
        times = {name: seconds_of(works[name], speed) for name in chosen}
        likely = {name: times[name].likely for name in chosen}
        off = {name: likely[name] / measured[name] - 1 for name in chosen}
        rates = [[sizes[name] / of[name] for name in chosen] for of in (likely, measured)]
        held = sum(times[name].low <= measured[name] <= times[name].high for name in chosen) / len(chosen)
        print(
            f"{title}: {len(chosen)} models, median error {statistics.median(map(abs, off.values())):.1%}, rank "
            f"correlation of samples a second {statistics.correlation(*map(ranks, rates)):.3f}, in range {held:.0%}"
        )
    for name in sorted(off, key=lambda each: -abs(off[each]))[:12]:
        print(f"  {name}: measured {measured[name]:.3f} s, predicted {off[name]:+.0%}")


def ranks(values: Sequence[float]) -> list[int]:
    return [sorted(values).index(value) for value in values]


def seconds_of(work: tuple[Any, ...], speed: Any) -> Any:
    from lightning_memguard.core.replay.seconds import Timing

    return Timing(work, lambda: speed).step


def fitted(gpu: Any, works: dict[str, tuple[Any, ...]], measured: dict[str, float]) -> Any:
    """The speed whose shares of the peaks fit best, and whose range holds nine of ten."""
    from lightning_memguard.core.device.speed import gpu_speed

    def error(shares: tuple[float, float]) -> float:
        speed = gpu_speed(gpu, shares)
        logs = [math.log(seconds_of(work, speed).likely / measured[name]) for name, work in works.items()]
        return statistics.median(map(abs, logs))

    shares = min(product(SHARES, SHARES), key=error)
    speed = gpu_speed(gpu, shares)
    ratios = sorted(measured[name] / seconds_of(work, speed).likely for name, work in works.items())
    spread = ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]
    print(f"shares of peak and bandwidth: {shares}; range: {spread[0]:.2f} to {spread[1]:.2f}")
    return replace(speed, spread=spread)


# -- recorded by record.py


def recorded(_: argparse.Namespace) -> None:
    """Print measured and predicted milliseconds; a training's own flags decide whether products run in TF32."""
    from torch.utils.data import DataLoader

    from accuracy import quieten, recordings
    from lightning_memguard.core import gpus
    from lightning_memguard.core.capture.capture import capture
    from lightning_memguard.core.device.speed import gpu_speed
    from record import read
    from shared.corpus import corpus
    from shared.predicted import program_of

    quieten()
    trainings = {each.name: each for each in corpus() if each.name.startswith(TEXTS) and not each.compiled}
    for found in map(read, recordings()):
        gpu, off, held = gpus.find(found["machine"]["gpu"]), [], 0
        for name, case in found["cases"].items():
            if name not in trainings or "step_seconds" not in case:
                continue
            training, size = trainings[name], case["batch_size"]
            torch.backends.cuda.matmul.fp32_precision = "tf32" if training.tf32 else "ieee"
            batch = next(iter(DataLoader(training.dataset(size), batch_size=size)))
            module, kwargs = training.module(), training.trainer_kwargs
            work = capture(program_of(module, batch, "cuda", training.precision, gpu, **kwargs), size, "fake").work
            predicted, measured = seconds_of(work, gpu_speed(gpu)), statistics.median(case["step_seconds"])
            off.append(predicted.likely / measured - 1)
            held += predicted.low <= measured <= predicted.high
            low, likely, high = (f"{1e3 * seconds:.1f}" for seconds in predicted)
            print(f"{name:24} {1e3 * measured:6.1f} ms, predicted {likely} ({off[-1]:+.0%}), {low} to {high}")
        error = statistics.median(map(abs, off))
        print(f"{gpu.name}: {len(off)} trainings, median error {error:.0%}, {held} in the range")


TEXTS = "bert", "gpt", "llama", "lstm"


# -- on this machine


def models() -> dict[str, tuple[Any, Any, tuple[int, ...]]]:
    """By name: a network, its samples (x, y) and five batch sizes."""
    from shared import zoo

    def pictures(side: int) -> Any:
        return lambda n: (torch.randn(n, 3, side, side), torch.randint(10, (n,)))

    def tokens(vocabulary: int, length: int) -> Any:
        return lambda n: (torch.randint(vocabulary, (n, length)), torch.randint(10, (n,)))

    def language(network: nn.Module) -> nn.Module:
        return nn.Sequential(network, Mean())

    def rows(features: int) -> Any:
        return lambda n: (torch.randn(n, features), torch.randint(10, (n,)))

    words, small, large = (4, 8, 16, 32, 64), (4, 8, 16, 32, 48), (16, 64, 256, 512, 1024)
    return {
        "mlp": (zoo.mlp(), rows(512), large),
        "deep mlp": (zoo.mlp(256, 512, 12), rows(256), large),
        "cnn": (zoo.cnn(), pictures(32), words),
        "resnet": (zoo.resnet_small(), pictures(48), small),
        "unet": (nn.Sequential(zoo.UNet(classes=10), Mean()), pictures(48), small),
        "autoencoder": (nn.Sequential(zoo.encoder(), zoo.decoder(), nn.Flatten()), pictures(32), small),
        "encoder": (zoo.EncoderClassifier(), tokens(4000, 64), words),
        "lstm": (zoo.LSTMClassifier(), tokens(4000, 32), words),
        "gpt": (language(zoo.gpt_small()), tokens(1024, 64), words),
        "gpt, 6 blocks": (language(zoo.gpt_small(depth=6)), tokens(1024, 64), words),
        "gpt, no dropout": (language(zoo.gpt_small(dropout=0.0)), tokens(1024, 64), words),
        "wide gpt": (language(zoo.GPT(256, 64, 384, 6, 2, 0.0)), tokens(256, 64), words),
    }


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2).mean(2) if x.dim() == 4 else x.mean(1)


def measure(model: nn.Module, batch: Any, repeats: int = 5) -> float:
    """Seconds of the fastest step of a few: what else the machine does only adds to them."""
    optimizer, taken = torch.optim.Adam(model.parameters()), []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        optimizer.zero_grad()
        step(model, batch).backward()
        optimizer.step()
        taken.append(time.perf_counter() - started)
    return min(taken[2:])


def here(arguments: argparse.Namespace) -> None:
    from copy import deepcopy

    from lightning_memguard.core.device.speed import cpu_speed
    from lightning_memguard.training.planning.remedies import checkpoint_blocks
    from lightning_memguard.training.planning.structure import Structure

    torch.set_num_threads(arguments.threads)
    speed, good, errors = cpu_speed(), 0, []
    for name, (network, samples, sizes) in models().items():
        blocks = Structure.of(network, "model").blocks
        paths = max((each.paths for each in blocks), key=len, default=())
        times: dict[tuple[int, bool], tuple[float, float]] = {}
        for checkpointed in (False, True) if paths else (False,):
            model = deepcopy(network)
            if checkpointed:
                checkpoint_blocks(model, paths)
            predicted = predict_here(model, samples, sizes)
            for size in sizes:
                times[size, checkpointed] = (
                    seconds_of(predicted[size], speed).likely / size,
                    measure(model, samples(size)) / size,
                )
        chosen, best = (min(times, key=lambda way: times[way][place]) for place in (0, 1))
        lost = times[chosen][1] / times[best][1] - 1
        good += lost <= 0.05
        errors += [predicted / measured - 1 for predicted, measured in times.values()]
        print(f"{name}: chosen {chosen}, fastest {best}, {lost:.1%} slower")
        for (size, checkpointed), (predicted, measured) in times.items():
            how = "checkpointed" if checkpointed else ""
            off = f"predicted {1e3 * predicted:8.3f} ({predicted / measured - 1:+.0%})"
            print(f"  {size:5} {how:12} {1e3 * measured:8.3f} ms a sample, {off}")
    print(f"within 5 % of the fastest: {good} of 12; median error {statistics.median(map(abs, errors)):.0%}")


def predict_here(model: nn.Module, samples: Any, sizes: tuple[int, ...]) -> dict[int, Any]:
    from lightning_memguard.core.batch.batches import batches_from_one
    from lightning_memguard.core.capture.capture import capture
    from lightning_memguard.core.capture.program import LoopProgram
    from lightning_memguard.core.trace.work import WorkAt, groups_of

    program = LoopProgram(model, batches_from_one(samples(4)), step, torch.optim.Adam, torch.device("cpu"))
    groups = groups_of([capture(program, size, "fake").work for size in (4, 8)])
    return {size: WorkAt(groups, (4, 8), size) for size in sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("published")
    command.add_argument("table", type=Path)
    command.add_argument("gpu")
    command.add_argument("--models", type=int, default=160)
    command.add_argument("--json", type=Path, default=Path("seconds.jsonl"))
    command.add_argument("--fit", action="store_true")
    command.set_defaults(run=published)
    commands.add_parser("recorded").set_defaults(run=recorded)
    command = commands.add_parser("here")
    command.add_argument("--threads", type=int, default=1)
    command.set_defaults(run=here)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
