"""The costs of MemGuard: seconds and bytes of a decision, of a step, of a large model, and on the CPU.

decision   `tune`, from `setup` to the decision, for the zoo, of two checkouts in turns: seconds, processor seconds of
           all processes, and resident memory left behind. Each measurement is a process of its own, and each number a
           median: first of processes that have trained the model for two steps, then of new ones.
large      predictions of large models for a GPU that is not there, in a process each (needs torchvision, transformers)
step       thread time of a step with and without MemGuard: two trainings take turns of blocks of tiny steps; and of
           noting what a step that fails may have changed, which is part of it
malloc     seconds of steps on the CPU with glibc's own rule, and with freed memory returned at once, in turns
process    what a process that trains on the CPU takes besides its tensors (RssAnon): what MKL keeps after a linear
           layer's products, and objects from `setup` to the second step; the recordings behind `process_bytes`
finder     versus Lightning's BatchSizeFinder: both choose a batch size in a process under RLIMIT_AS, where allocations
           fail as on a full GPU; then the largest that really trains is found by trying, a process for each try

    python benchmarks/overhead.py step
    python benchmarks/overhead.py decision BEFORE AFTER --only mlp gpt --rounds 1     # two checkouts
    python benchmarks/overhead.py large llama_7b
    python benchmarks/overhead.py process 1 4 8            # numbers of threads
    python benchmarks/overhead.py finder mlp --room 512MiB
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

import lightning_memguard
from lightning_memguard import MemGuard, estimate
from shared.process import adopt_orphans, forked, memory_of, processor_seconds, resident
from shared.truth import QUIET, quieten
from shared.zoo import CASES, LARGE, Case, Supervised, case_named, images, resnet_small, vectors

MIB = 1 << 20
Measured = dict[str, float]  # by quantity

# Decision ------------------------------------------------------------------------------------------------------------

BUDGET = 8 << 30  # the same for both checkouts, whatever else the machine does


class Validated(Supervised):
    """Trains, and validates the same way."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


VALIDATED = Case(
    "resnet_validated", lambda name: Validated(resnet_small(), name, F.cross_entropy), images(3, 48), (8, 16, 32)
)
NAMES = [case.name for case in (*CASES, *LARGE, VALIDATED)]


def measure_decision(case: Case, checkout: Path, *, warm: bool) -> Measured:
    from lightning_memguard.training.run.tune import tune

    if checkout not in Path(lightning_memguard.__file__).parents:
        raise SystemExit(f"{lightning_memguard.__file__} is not the package of {checkout}.")
    adopt_orphans()
    module = case.build(case.optimizers[0])
    if warm:
        trainer_of(case, limit_train_batches=2, limit_val_batches=1, num_sanity_val_steps=0).fit(module, *loaders(case))
    trainer = trainer_of(case)
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, *loaders(case))
    settings = MemGuard(budget=BUDGET, min_steps_per_epoch=None)._settings
    held, used = resident(), processor_seconds()
    started = time.perf_counter()
    tuning = tune(trainer, module, settings)
    seconds = time.perf_counter() - started
    used = processor_seconds() - used
    after = resident()
    if tuning.profile is None:
        raise SystemExit(f"{case.name}: {tuning.decision.reason}")
    left = {name: (after[name] - held[name]) / MIB for name in held}
    return {"batch_size": tuning.decision.batch_size, "seconds": seconds, "processor": used, **left}


def trainer_of(case: Case, **settings: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", max_epochs=1, **QUIET, **case.trainer_kwargs, **settings)


def loaders(case: Case) -> list[DataLoader]:
    count = 2 if case is VALIDATED else 1
    return [DataLoader(case.dataset(100_000), batch_size=case.batch_sizes[0]) for _ in range(count)]


def measured_in(checkout: Path, name: str, *, warm: bool) -> Measured:
    command = [sys.executable, __file__, "decision", str(checkout), "--measure", name, *(["--warm"] if warm else [])]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def print_decisions(names: list[str], checkouts: list[Path], rounds: int, *, warm: bool) -> None:
    state = "that has trained the model for two steps" if warm else "that has just started"
    print(f"\nIn a process {state}, before and after; memory in MiB, median of {rounds} rounds:\n")
    quantities = ("seconds", "processor", "VmRSS", "RssAnon")
    print(f"| model | batch size | ratio of seconds | {' | '.join(quantities)} |")
    print(f"|---|{'---:|' * (2 + len(quantities))}", flush=True)
    ratios, left = [], []
    for name in names:
        turns = [[measured_in(checkout, name, warm=warm) for checkout in checkouts] for _ in range(rounds)]
        before, after = ({key: statistics.median(t[i][key] for t in turns) for key in turns[0][0]} for i in (0, 1))
        ratios.append(before["seconds"] / after["seconds"])
        left.append(after["VmRSS"])
        sizes = " / ".join(dict.fromkeys(f"{each['batch_size']:g}" for each in (before, after)))
        cells = [f"{before[key]:.2f} / {after[key]:.2f}" for key in quantities]
        print(f"| {name} | {sizes} | {ratios[-1]:.2f} | {' | '.join(cells)} |", flush=True)
    print(f"\nSeconds before / after: {statistics.median(ratios):.2f} in the median, {min(ratios):.2f} at least.")
    print(f"Left behind after: {statistics.median(left):.2f} MiB in the median, {max(left):.2f} MiB at most.")


def decision(options: argparse.Namespace) -> None:
    checkouts = [Path(path).resolve() for path in options.checkouts]
    if options.measure:
        case = VALIDATED if options.measure == VALIDATED.name else case_named(options.measure)
        print(json.dumps(measure_decision(case, checkouts[0], warm=options.warm)))
        return
    if len(checkouts) != 2:
        raise SystemExit("Give two checkouts: the one before, and the one after.")
    for warm in (True, False):
        print_decisions(options.only, checkouts, options.rounds, warm=warm)


# Large models --------------------------------------------------------------------------------------------------------

GPU = "NVIDIA H200"
Model = tuple[nn.Module, Any, Callable[[Any, Any], Any]]


def resnet50() -> Model:
    import torchvision

    batch = torch.empty(32, 3, 224, 224), torch.empty(32, dtype=torch.long)
    return torchvision.models.resnet50(), batch, lambda m, b: F.cross_entropy(m(b[0]), b[1])


def language_model(name: str, samples: int, length: int, **settings: int) -> Model:
    import transformers

    configuration = getattr(transformers, f"{name}Config")(**settings)
    head = {"Bert": "BertForMaskedLM", "GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[name]
    batch = torch.empty(samples, length, dtype=torch.long)
    return getattr(transformers, head)(configuration), batch, lambda m, b: m(input_ids=b, labels=b).loss


BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
MODELS: dict[str, tuple[int, Callable[[], Model]]] = {  # the goal in seconds
    "resnet50": (3, resnet50),
    "bert_large": (5, lambda: language_model("Bert", 8, 512, **BERT_LARGE)),
    "gpt2_small": (4, lambda: language_model("GPT2", 8, 1024)),
    "llama_7b": (15, lambda: language_model("Llama", 1, 2048)),
}


def large(options: argparse.Namespace) -> None:
    """Each model's definition is real; its weights are never allocated."""
    from lightning_memguard.units import format_bytes

    print(f"Predicted for the {GPU} with AdamW in float32, on {torch.get_num_threads()} threads:", flush=True)
    for name in options.models or MODELS:
        goal, build = MODELS[name]
        found = forked(partial(predicted_large, build), torch.get_num_threads())
        sizes = "".join(f"{format_bytes(found[what]):>12} {what}" for what in ("resident", "allocated", "reserved"))
        print(f"{name:<12}{found['seconds']:>6.1f} s (goal {goal:>2}){sizes}  in {found['at']}", flush=True)


def predicted_large(build: Callable[[], Model]) -> dict[str, Any]:
    with torch.device("meta"):
        model, batch, step = build()
    model.train()
    started = time.perf_counter()
    found = estimate(model, batch, step=step, optimizer=torch.optim.AdamW, device=GPU)
    return {
        "seconds": time.perf_counter() - started,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1),
        "allocated": found.peak_allocated_bytes,
        "reserved": found.peak_reserved_bytes,
        "at": f"{found.phase} at {found.operator} ({found.method})",
    }


# Step ----------------------------------------------------------------------------------------------------------------


class Tiny(pl.LightningModule):
    """The least work a training step can do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Empty(pl.Callback):
    """The hook that MemGuard has in each batch, and nothing in it: Lightning's own work around it is not ours."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pass


class Turns(pl.Callback):
    """Lets two trainings take turns of a block of steps, so that other load slows both, and times the blocks."""

    def __init__(self, mine: threading.Semaphore, other: threading.Semaphore, block: int) -> None:
        self.mine, self.other, self.block = mine, other, block
        self.seconds: list[float] = []
        self.started = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.block == 0:
            if batch_idx:
                self.seconds.append(time.thread_time() - self.started)
                self.other.release()
            self.mine.acquire()
            self.started = time.thread_time()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seconds.append(time.thread_time() - self.started)
        self.other.release()


def train_in_turns(turns: Turns, guards: list[Any], steps: int) -> None:
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, **QUIET, callbacks=[*guards, turns])
    trainer.fit(Tiny(), DataLoader(TensorDataset(torch.zeros(steps, 4)), batch_size=1))


def step(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    first, second = threading.Semaphore(1), threading.Semaphore(0)
    alone, guarded = Turns(first, second, options.block), Turns(second, first, options.block)
    guard = MemGuard(max_batch_size=1)
    threads = [
        threading.Thread(target=train_in_turns, args=(turns, guards, options.steps))
        for turns, guards in ((alone, [Empty()]), (guarded, [guard]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert guard.decision is not None
    print(f"MemGuard: {guard.decision.outcome} at batch size {guard.decision.batch_size}, {options.steps} steps each")
    pairs = list(zip(alone.seconds, guarded.seconds, strict=True))[1:]  # the first warms up
    ratios = [with_it / without for without, with_it in pairs]
    each = [statistics.median(turns.seconds) / options.block * 1e6 for turns in (alone, guarded)]
    print(f"a step with an empty callback {each[0]:.1f} us, with MemGuard {each[1]:.1f} us")
    print(
        f"ratio, median of {len(ratios)} pairs of {options.block} steps: {statistics.median(ratios):.4f} "
        f"(quartiles {', '.join(f'{value:.4f}' for value in statistics.quantiles(ratios)[::2])})"
    )


# Freed memory --------------------------------------------------------------------------------------------------------

ROUNDS = 6
SIZES = {"resnet": 32, "unet": 32, "mlp": 1024}


def seconds_with_freed_memory(name: str) -> tuple[float, float, float]:
    """Seconds of two steps with glibc's rule, with MemGuard's, and the median ratio of neighbors."""
    from lightning_memguard.core.device.malloc import return_freed_memory

    case = case_named(name)
    module = case.build("sgd")
    optimizer = module.configure_optimizers()
    dataset = case.dataset(SIZES[name])
    batch = default_collate([dataset[i] for i in range(SIZES[name])])

    def two_steps() -> float:
        started = time.perf_counter()
        for _ in range(2):
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
        return time.perf_counter() - started

    undo = return_freed_memory(torch.device("cpu"))
    undo()  # from here on the threshold is where glibc's own rule lets it rise to
    kept, returned = [], []
    for _ in range(ROUNDS):
        two_steps()
        kept.append(two_steps())
        undo = return_freed_memory(torch.device("cpu"))
        two_steps()
        returned.append(two_steps())
        undo()
    ratio = statistics.median(b / a for a, b in zip(kept, returned, strict=True))
    return statistics.median(kept), statistics.median(returned), ratio


def malloc(_: argparse.Namespace) -> None:
    torch.set_flush_denormal(True)
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        raise SystemExit("This C library has no mallopt: there is nothing to compare.")
    for name in SIZES:
        kept, returned, ratio = seconds_with_freed_memory(name)
        print(f"{name:8} two steps: kept {kept:.3f} s, returned {returned:.3f} s, ratio {ratio:.2f}", flush=True)


# Process -------------------------------------------------------------------------------------------------------------

ROWS = (64, 512, 2048)
LAYERS = (  # inputs, outputs
    *((128, 128), (256, 256), (128, 512), (512, 128), (512, 512)),
    *((512, 2048), (2048, 512), (1024, 1024), (384, 4096), (384, 16384)),
)
MOST_FLOPS = 6e9


def mib_of(work: Callable[[], float]) -> float:
    """From a process that has computed nothing."""
    return forked(lambda: {"mib": work()}, 1)["mib"]


def anonymous_mib() -> float:
    return memory_of("RssAnon") / MIB


def products_mib(threads: int, rows: int, inputs: int, outputs: int) -> float:
    """Memory that stays once the three products of a linear layer were computed."""
    torch.set_num_threads(threads)
    x, weight, y = torch.ones(rows, inputs), torch.ones(outputs, inputs), torch.ones(rows, outputs)
    dx, dweight = torch.ones_like(x), torch.ones_like(weight)
    before = anonymous_mib()
    torch.mm(x, weight.t(), out=y)
    torch.mm(y, weight, out=dx)
    torch.mm(y.t(), x, out=dweight)
    return anonymous_mib() - before


class Objects(pl.Callback):
    """Reads what the process holds when its second step is over."""

    def __init__(self) -> None:
        self.before = anonymous_mib()

    def on_train_batch_end(self, *_: object) -> None:
        self.taken = anonymous_mib() - self.before


def objects_mib(threads: int) -> float:
    """From the setup of a fit to its second step, without a logger; the model and its batches are a few KiB."""
    from lightning_memguard.core.device.malloc import return_freed_memory

    torch.set_num_threads(threads)
    return_freed_memory(torch.device("cpu"))
    module = Supervised(nn.Linear(16, 10), "adam", F.cross_entropy)
    trainer = pl.Trainer(accelerator="cpu", max_steps=2, **QUIET)
    watch = Objects()
    trainer.callbacks += [watch, MemGuard(max_batch_size=8)]
    trainer.fit(module, DataLoader(vectors(16)(64), batch_size=8))
    return watch.taken


def process(options: argparse.Namespace) -> None:
    from lightning_memguard.core.device.process import OBJECTS_BYTES, process_bytes

    for threads in options.threads:
        taken = [mib_of(partial(objects_mib, threads)) for _ in range(3)]
        print(f"{threads} threads: objects {statistics.median(taken):.2f} (of {min(taken):.2f} to {max(taken):.2f})")
        print(f"{'inputs':>8} {'outputs':>8} {'at most':>8}   kept at {', '.join(map(str, ROWS))} rows")
        for inputs, outputs in LAYERS:
            most = process_bytes([torch.empty(outputs, inputs, device="meta")], threads)[2] - OBJECTS_BYTES
            kept = [
                mib_of(partial(products_mib, threads, rows, inputs, outputs))
                for rows in ROWS
                if rows * inputs * outputs < MOST_FLOPS
            ]
            words = " ".join(f"{each:6.2f}" for each in kept)
            above = "  ABOVE" if max(kept) > most / MIB else ""
            print(f"{inputs:>8} {outputs:>8} {most / MIB:>8.2f}   {words}{above}", flush=True)


# Versus BatchSizeFinder ----------------------------------------------------------------------------------------------

STEPS = 3


class Stop(pl.Callback):
    """Ends the training after some steps; with `limit_train_batches`, MemGuard would keep the batch size."""

    batch_size = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.batch_size = trainer.train_dataloader.batch_size

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.should_stop or batch_idx + 1 >= STEPS


def limited_training(name: str, who: str, batch_size: int, room_bytes: int) -> dict[str, Any]:
    """Limit this process, then train in it: the batch size, seconds to choose it, and allocations that failed."""
    from pytorch_lightning.callbacks import BatchSizeFinder
    from pytorch_lightning.tuner import batch_size_scaling

    seen = {"seconds": 0.0, "failures": 0}
    is_failure = batch_size_scaling.is_oom_error

    def counted(error: BaseException) -> bool:
        seen["failures"] += is_failure(error)
        return is_failure(error)

    batch_size_scaling.is_oom_error = counted  # Lightning asks about the kind of each error that it catches
    case = case_named(name)
    module, dataset = case.build(case.optimizers[0]), case.dataset(1_000_000)
    module.batch_size = batch_size
    module.train_dataloader = lambda: DataLoader(dataset, batch_size=module.batch_size)
    torch.ones(1 << 20).add_(1).sum()  # start the worker threads: their stacks are not part of the comparison
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room_bytes, resource.RLIM_INFINITY))
    stop = Stop()
    callbacks: list[Any] = [stop]
    if who == "MemGuard":
        callbacks.insert(0, timed(MemGuard(min_steps_per_epoch=None), "setup", seen))
    elif who == "BatchSizeFinder":
        finder = BatchSizeFinder("binsearch", STEPS, batch_size, 25, max_val=1 << 20)
        callbacks.insert(0, timed(finder, "on_fit_start", seen))
    error = ""
    try:
        pl.Trainer(accelerator="cpu", max_epochs=1, limit_val_batches=0, **QUIET, callbacks=callbacks).fit(module)
    except (RuntimeError, MemoryError) as failure:
        error = str(failure).splitlines()[0][:160]
        seen["failures"] += 1
    return {"batch_size": stop.batch_size, "error": error, **seen}


def timed(callback: Any, hook: str, seen: dict[str, float]) -> Any:
    original = getattr(callback, hook)

    def run(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            seen["seconds"] += time.perf_counter() - started

    setattr(callback, hook, run)
    return callback


def in_a_process(name: str, who: str, batch_size: int, room_bytes: int) -> dict[str, Any]:
    try:
        return forked(partial(limited_training, name, who, batch_size, room_bytes), torch.get_num_threads())
    except RuntimeError as error:
        return {"batch_size": batch_size, "error": str(error)[:160], "seconds": 0.0, "failures": 1}


def largest_that_trains(trains: Callable[[int], bool], start: int) -> int:
    """The largest size that trains, to within one percent, by trying."""
    good, bad = 0, start
    while trains(bad):
        good, bad = bad, bad + max(1, bad // 4)
    good = good or 1
    while bad - good > max(1, good // 100):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if trains(middle) else (good, middle)
    return good


def finder(options: argparse.Namespace) -> None:
    from lightning_memguard.units import format_bytes, parse_bytes

    room = parse_bytes(int(options.room) if options.room.isdigit() else options.room)
    print(
        f"{options.case}, {format_bytes(room)} of address space beyond the start, {torch.get_num_threads()} threads\n"
    )
    found = {who: in_a_process(options.case, who, 2, room) for who in ("MemGuard", "BatchSizeFinder")}
    start = max(found["MemGuard"]["batch_size"], 1)
    largest = largest_that_trains(lambda size: not in_a_process(options.case, "", size, room)["error"], start)
    print(f"{'':18}{'batch size':>12}{'of largest':>12}{'seconds':>10}{'failed allocations':>20}  then trained")
    for who, row in found.items():
        size = row["batch_size"]
        cells = f"{size:12}{size / largest:12.1%}{row['seconds']:10.2f}{row['failures']:20}"
        print(f"{who:18}{cells}  {row['error'] or 'yes'}")
    print(f"{'largest by trying':18}{largest:12}")


# Run -----------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True, metavar="PART")
    adding = {
        part.__name__: parts.add_parser(part.__name__) for part in (decision, large, step, malloc, process, finder)
    }
    for name, part in adding.items():
        part.set_defaults(run=globals()[name])
    adding["decision"].add_argument("checkouts", nargs="+", metavar="CHECKOUT")
    adding["decision"].add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="MODEL")
    adding["decision"].add_argument("--rounds", type=int, default=3)
    adding["decision"].add_argument("--measure", choices=NAMES, help=argparse.SUPPRESS)
    adding["decision"].add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    adding["large"].add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    adding["step"].add_argument("--steps", type=int, default=20_000)
    adding["step"].add_argument("--block", type=int, default=500)
    adding["process"].add_argument("threads", type=int, nargs="*", default=[1, 2])
    adding["finder"].add_argument("case", nargs="?", default="cnn_batch_norm")
    adding["finder"].add_argument("--room", default="1GiB", help="memory beyond what the process has at the start")
    options = parser.parse_args()
    quieten()
    options.run(options)


if __name__ == "__main__":
    main()
