"""The models of the field: each pattern trained for real under PyTorch's profiler, and predicted.

Each pattern of `field/` (see `field/pattern.py`) is built and trained by a real Trainer on the CPU at two batch sizes,
each time in a process of its own, in which PyTorch's profiler counts every block (`shared/truth.py`). Two other
processes ask MemGuard (`mode="check"`) for the same runs. A result is

- exact: less than 0.3 % off
- near: less than 2 % off
- inside: further off, but in the range that was stated (its ends as exact as above)
- wrong: further off, and outside any range
- unpredicted: no prediction, or one without activations
- skipped: it does not train here (a library that is missing, or too slow)

    python benchmarks/field.py                                    # all: the table, the shares, the exceptions
    python benchmarks/field.py --only tft faster_rcnn --notes     # those whose name or library contains one of these
    python benchmarks/field.py --json field.jsonl                 # resumable: what the file has is not run again
    python benchmarks/field.py --json field.jsonl --show          # only print what the file has
    python benchmarks/field.py --tune --only tft deepar nhits     # the size chosen under a budget, and 10 % more

With `--tune`, MemGuard chooses the batch size in a real Trainer, which then trains. The budget is `--times` what the
prediction says for the pattern's second size. The profiler says what the chosen size takes, and one 10 % larger; both
are compared with what the decision leaves for tensors. `make field` installs the libraries.
"""

import argparse
import contextlib
import copy
import importlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shared.process import adopt_orphans, describe, in_fork, processor_seconds

EXACT_PERCENT, NEAR_PERCENT = 0.3, 2.0
OUTCOMES = ("exact", "near", "inside", "wrong", "unpredicted", "skipped")
FAMILIES = ("forecasting", "vision", "language", "science", "trainer")
GIB, MIB = 2**30, 2**20
ENOUGH = 720_720  # samples: no choice is limited by them, and batches of up to 16 leave none over
# Steps and epochs of trainings that take all they will take only later: Autoformer leaves layers out at random, and the
# longest utterance is in the first batch, before an optimizer has states.
LONGER = {"hf_autoformer": (8, 1), "conformer_ctc": (3, 2), "speechbrain_transformer_asr": (3, 2)}
EPOCH = 16_384  # samples of an epoch, where a run has several


@dataclass(frozen=True)
class Result:
    """One pattern at one batch size: measured and predicted, in bytes; 0 is unknown."""

    pattern: str
    library: str
    batch_size: int
    measured: int = 0
    predicted: int = 0
    low: int = 0
    high: int = 0
    method: str = ""
    seconds: float = 0.0  # of the prediction, elapsed
    processor_seconds: float = 0.0  # of the prediction, of all its processes
    step_seconds: float = 0.0  # of the training, a step
    measured_at: str = ""
    predicted_at: str = ""
    notes: Sequence[str] = ()
    error: str = ""  # why it was not predicted
    skipped: str = ""  # why it does not train

    @property
    def difference(self) -> int:
        return self.predicted - self.measured

    @property
    def percent(self) -> float:
        return 100 * self.difference / self.measured if self.measured and self.predicted else 0.0

    @property
    def width_percent(self) -> float:
        return 100 * (self.high - self.low) / self.measured if self.high and self.measured else 0.0

    @property
    def is_inside(self) -> bool:
        slack = EXACT_PERCENT / 100
        return self.low * (1 - slack) <= self.measured <= self.high * (1 + slack)

    @property
    def is_tight(self) -> bool:
        return self.outcome == "exact" or (self.outcome != "unpredicted" and self.is_inside and self.width_percent < 5)

    @property
    def is_slow(self) -> bool:
        return self.processor_seconds > 10 and self.step_seconds < 1

    @property
    def outcome(self) -> str:
        if self.skipped or not self.measured:
            return "skipped"
        if not self.predicted or self.method == "states":
            return "unpredicted"
        if abs(self.percent) < EXACT_PERCENT:
            return "exact"
        if abs(self.percent) < NEAR_PERCENT:
            return "near"
        return "inside" if self.is_inside else "wrong"


@dataclass(frozen=True)
class Tuned:
    """A size chosen under a budget, and what the profiler says of it and of one 10 % larger, in bytes."""

    pattern: str
    library: str
    budget: int = 0
    for_tensors: int = 0
    limited_by: str = ""
    method: str = ""
    batch_size: int = 0
    trained_at: int = 0  # the batch size of the loader that the Trainer had
    measured: int = 0
    larger: int = 0
    measured_larger: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def outcome(self) -> str:
        if self.error:
            return self.error
        if self.trained_at != self.batch_size:
            return f"trained at {self.trained_at}"
        if self.measured > self.for_tensors:
            return f"over by {100 * (self.measured / self.for_tensors - 1):.1f} %"
        return "fits" if self.measured_larger > self.for_tensors else "fits, as does 10 % more"


# One measurement, in a process of its own ----------------------------------------------------------------------------


def load_patterns() -> dict[str, Any]:
    for family in FAMILIES:
        importlib.import_module(f"field.{family}")
    return importlib.import_module("field.pattern").PATTERNS


def trainer_options(steps: int, run: Any) -> dict[str, Any]:
    shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps")
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "limit_train_batches": steps}
    return {**options, **dict.fromkeys(shown, False), **copy.deepcopy(dict(run.trainer))}


def train(run: Any, batch_size: int, steps: int) -> dict[str, Any]:
    """Train under the profiler; the module is built inside: it does not see frees of blocks older than itself.

    What building takes for a while is not of the training: LPIPS builds all of VGG, and keeps its convolutions.
    """
    from torch.profiler import ProfilerActivity, profile

    from shared.truth import PhaseMarkers, count_disagreements, counting_arrays, live_bytes, memory_events

    data = run.data(batch_size, steps)
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    profiler.start()
    with counting_arrays():
        module = run.build()
        started = time.perf_counter()
        options = trainer_options(steps, run)
        fit(module, data, options, PhaseMarkers())
        elapsed = time.perf_counter() - started
    profiler.stop()
    events = memory_events(profiler)
    pairs = zip(live_bytes(events), events, strict=True)
    totals = [total * (event.phase != "build") for (total, _), event in pairs]
    place, peak = totals.index(max(totals)), max(totals)
    if count_disagreements(events):
        raise RuntimeError("The replay of the profiler's events differs from the allocator's own counter.")
    at = f"{events[place].phase}, {events[place].operator}"
    return {"measured": peak, "measured_at": at, "step_seconds": round(elapsed / steps, 3)}


def fit(module: Any, data: Any, options: dict[str, Any], *callbacks: Any) -> None:
    """Train by the Trainer of the package that the module's class is from: `pytorch_lightning` or `lightning`."""
    package = "pytorch_lightning"
    if any(cls.__module__.startswith("lightning.pytorch.") for cls in type(module).__mro__):
        package = "lightning.pytorch"
    trainer = importlib.import_module(package).Trainer(
        **{**options, "callbacks": [*options.get("callbacks", []), *callbacks]}
    )
    named = {"datamodule": data} if hasattr(data, "train_dataloader") else {"train_dataloaders": data}
    trainer.fit(module, **named)


class Decided(Exception):  # noqa: N818 - it ends a fit that has been predicted
    """The run was decided."""


def stop_at_first_step(module: Any, data: Any, options: dict[str, Any], guard: Any) -> None:
    import pytorch_lightning as pl

    class Stop(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            raise Decided

    with contextlib.suppress(Decided):
        fit(module, data, options, guard, Stop())


def predict(run: Any, batch_size: int, steps: int) -> dict[str, Any]:
    """Start the same training with MemGuard, and stop before its first step."""
    from lightning_memguard import MemGuard

    adopt_orphans()
    guard = MemGuard(mode="check", budget=64 * GIB, max_setup_seconds=None)
    module, data = run.build(), run.data(batch_size, steps)
    options = trainer_options(steps, run)
    started, used = time.perf_counter(), processor_seconds()
    with warnings.catch_warnings(record=True) as caught:
        stop_at_first_step(module, data, options, guard)
    seconds, used = time.perf_counter() - started, processor_seconds() - used
    times = {"seconds": round(seconds, 2), "processor_seconds": round(used, 2)}
    decision = guard.decision
    footprint = decision.footprint if decision else None
    if footprint is None:
        said = [str(w.message) for w in caught if "MemGuard" in str(w.message)]
        return {**times, "error": (decision.reason if decision else "") or " ".join(said) or "no decision"}
    return {
        **times,
        "predicted": footprint.peak_allocated_bytes,
        "low": footprint.low.allocated_bytes if footprint.low else 0,
        "high": footprint.high.allocated_bytes if footprint.high else 0,
        "method": footprint.method,
        "notes": footprint.notes,
        "predicted_at": f"{footprint.phase}, {footprint.module}, {footprint.operator}",
        "error": "" if footprint.method != "states" else "; ".join(footprint.notes),
    }


def tune(run: Any, batch_size: int, larger: int, steps: int, times: float) -> dict[str, Any]:
    """Train in a Trainer whose batch size MemGuard chooses, under a multiple of what another size takes."""
    import pytorch_lightning as pl

    from lightning_memguard import MemGuard

    class Sizes(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            sizes.append(trainer.train_dataloader.batch_size)

    sizes: list[int] = []
    asked = MemGuard(mode="check", budget=64 * GIB)
    stop_at_first_step(run.build(), run.data(larger, steps), trainer_options(steps, run), asked)
    budget = int(times * asked.decision.footprint.most_device_bytes)
    guard = MemGuard(budget=budget, min_steps_per_epoch=None)
    options = {**trainer_options(steps, run), "limit_train_batches": 1.0}  # a number of batches would keep their size
    samples, last = (ENOUGH, steps) if options["max_epochs"] == 1 else (EPOCH, -1)
    module, data = run.build(), run.data(batch_size, samples // batch_size)
    started = time.perf_counter()
    fit(module, data, {**options, "max_steps": last}, guard, Sizes())
    decision = guard.decision
    besides = decision.footprint.most_device_bytes - decision.footprint.high.allocated_bytes
    found = {"limited_by": decision.limited_by, "method": decision.footprint.method, "batch_size": decision.batch_size}
    found |= {"budget": budget, "for_tensors": decision.budget.usable_bytes - besides, "trained_at": sizes[0]}
    return {**found, "seconds": round(time.perf_counter() - started, 1)}


def keep(path: Path, found: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(found) + "\n")


def work(pattern: Any, arguments: argparse.Namespace, threads: int) -> None:
    """Import a pattern's library and make its data; then measure and predict each size in a fork of its own."""
    import torch

    torch.manual_seed(0)
    run, missing = None, ""
    try:
        run = pattern.make()
    except Exception as error:  # noqa: BLE001 - a library that is missing or changed: said in the table
        missing = describe(error)
        traceback.print_exc()
    steps, epochs = LONGER.get(pattern.name, (pattern.steps, 1))
    run = run and replace(run, trainer={"max_epochs": epochs, **run.trainer})
    chosen = {"first": pattern.sizes[:1], "second": pattern.sizes[1:]}.get(arguments.sizes, pattern.sizes)
    for size in chosen:
        found: dict[str, Any] = {"pattern": pattern.name, "library": pattern.library, "batch_size": size}
        if run is None:
            found["skipped"] = missing
        else:
            truth = in_fork(partial(train, run, size, steps), threads, arguments.limit)
            found.update(truth if "failed" not in truth else {"skipped": truth["failed"]})
        if "skipped" not in found:
            answer = in_fork(partial(predict, run, size, steps), threads, arguments.limit)
            found.update(answer if "failed" not in answer else {"error": answer["failed"]})
        keep(arguments.json, found)
        print(row_of(Result(**found)), flush=True)


def choose(pattern: Any, arguments: argparse.Namespace, threads: int) -> None:
    """Have a batch size chosen, and measure it and one 10 % larger, each in a fork of its own."""
    import torch

    torch.manual_seed(0)
    run = pattern.make()
    found = {"pattern": pattern.name, "library": pattern.library}
    found.update(in_fork(partial(tune, run, *pattern.sizes, pattern.steps, arguments.times), threads, arguments.limit))
    if "failed" not in found:
        found["larger"] = -(-11 * found["batch_size"] // 10)
        for size, name in ((found["batch_size"], "measured"), (found["larger"], "measured_larger")):
            answer = in_fork(partial(train, run, size, pattern.steps), threads, arguments.limit)
            found[name] = answer.get("measured", 0)
            found.update({"failed": answer["failed"]} if "failed" in answer else {})
    if "failed" in found:
        found["error"] = found.pop("failed")
    keep(arguments.json, found)


# All of them ---------------------------------------------------------------------------------------------------------


def run_all(patterns: Sequence[Any], arguments: argparse.Namespace) -> None:
    """Each library in a fork of this process, some of them at a time; their results are appended to the file."""
    import lightning.pytorch  # noqa: F401 - before the forks, so that each has it
    import torch

    import lightning_memguard  # noqa: F401
    from shared.truth import quieten

    quieten()
    os.environ.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"})
    threads = arguments.threads or torch.get_num_threads()
    torch.set_num_threads(1)  # until the last fork: the threads of OpenMP would not survive it
    running = 0
    libraries: dict[str, list[Any]] = {}
    for pattern in patterns:
        libraries.setdefault(pattern.library, []).append(pattern)
    for group in libraries.values():
        if running == arguments.jobs:
            os.wait()
            running -= 1
        sys.stdout.flush()
        running += 1
        if os.fork() == 0:
            resource.setrlimit(resource.RLIMIT_DATA, (arguments.memory, arguments.memory))
            if not arguments.verbose:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                for pattern in group:
                    (choose if arguments.tune else work)(pattern, arguments, threads)
            finally:
                sys.stdout.flush()
                os._exit(0)
    for _ in range(running):
        os.wait()


def read(path: Path, names: set[str], record: type[Any]) -> list[Any]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [result for line in lines if (result := record(**json.loads(line))).pattern in names]


COLUMNS = (
    ("pattern", "<31", lambda r: r.pattern),
    ("library", "<27", lambda r: r.library),
    ("batch", ">5", lambda r: r.batch_size),
    ("measured", ">9", lambda r: f"{r.measured / MIB:.3f}"),
    ("predicted", ">9", lambda r: f"{r.predicted / MIB:.3f}"),
    ("error %", ">8", lambda r: f"{r.percent:+.2f}" if r.predicted else ""),
    ("range, MiB", ">17", lambda r: f"{r.low / MIB:.1f} .. {r.high / MIB:.1f}" if r.high else ""),
    ("outcome", "<11", lambda r: r.outcome),
    ("method", "<10", lambda r: r.method),
    ("s", ">5", lambda r: f"{r.seconds:.1f}"),
    ("cpu s", ">5", lambda r: f"{r.processor_seconds:.1f}"),
    ("step s", ">6", lambda r: f"{r.step_seconds:.2f}"),
)


TUNED_COLUMNS = (
    *COLUMNS[:2],
    ("budget", ">8", lambda r: f"{r.budget / MIB:.1f}"),
    ("tensors", ">8", lambda r: f"{r.for_tensors / MIB:.1f}"),
    ("batch", ">6", lambda r: r.batch_size),
    ("measured", ">9", lambda r: f"{r.measured / MIB:.2f}"),
    ("larger", ">6", lambda r: r.larger),
    ("measured", ">9", lambda r: f"{r.measured_larger / MIB:.2f}"),
    ("limited by", "<10", lambda r: r.limited_by),
    ("method", "<10", lambda r: r.method),
    ("s", ">5", lambda r: f"{r.seconds:.0f}"),
    ("outcome", "<22", lambda r: r.outcome),
)


def row_of(result: Any, columns: Any = COLUMNS) -> str:
    return " ".join(f"{value(result):{width}}" for _, width, value in columns)


def print_table(results: Sequence[Any], columns: Any) -> None:
    print(" ".join(f"{title:{width}}" for title, width, _ in columns))
    for result in results:
        print(row_of(result, columns))


def print_summary(results: Sequence[Result]) -> None:
    trained = [r for r in results if r.outcome != "skipped"]
    if not trained:
        return
    counts, share = Counter(r.outcome for r in trained), 1 / len(trained)
    shares = ", ".join(f"{each} {counts[each] * share:.1%} ({counts[each]})" for each in OUTCOMES[:-1])
    patterns, libraries = ({getattr(r, name) for r in trained} for name in ("pattern", "library"))
    print(f"\n{len(trained)} trainings of {len(patterns)} patterns from {len(libraries)} libraries: {shares}")
    print(f"exact, or inside a range below 5 % wide: {sum(r.is_tight for r in trained) / len(trained):.1%}")
    used = sorted(r.processor_seconds for r in trained)
    slow = [f"{r.pattern} ({r.processor_seconds:.0f} s)" for r in trained if r.is_slow]
    print(
        f"processor time of a prediction: {statistics.median(used):.1f} s (median), {used[-1]:.1f} s at most; "
        f"above 10 s where a step takes less than 1 s: {', '.join(slow) or 'none'}"
    )
    for r in results:
        if r.outcome == "skipped":
            print(f"skipped: {r.pattern} ({r.batch_size}): {r.skipped}")


def print_exceptions(results: Iterable[Result], notes: bool) -> None:
    """Each result that is not exact, with its bytes."""
    for r in results:
        if r.outcome in ("exact", "skipped") and not notes:
            continue
        bounds = f", range {r.low:,} to {r.high:,}" if r.high else ""
        print(
            f"\n{r.outcome}: {r.pattern}, {r.library}, batch size {r.batch_size}: predicted {r.predicted:,}, measured "
            f"{r.measured:,}, difference {r.difference:+,} ({r.percent:+.2f} %){bounds}, {r.method or 'no method'}"
            f"\n  measured at: {r.measured_at}\n  predicted at: {r.predicted_at}"
        )
        for line in filter(None, (r.error, *r.notes)):
            print(f"  - {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="patterns whose name or library contains one of these")
    parser.add_argument("--sizes", choices=("both", "first", "second"), default="both", help="of the two of a pattern")
    parser.add_argument("--tune", action="store_true", help="have the size chosen under a budget instead")
    parser.add_argument("--times", type=float, default=2.0, help="the budget of --tune, as what the second size takes")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a training or a prediction")
    parser.add_argument("--memory", type=int, default=5 * GIB, help="bytes that a process may take")
    parser.add_argument("--json", type=Path, help="a file of one result a line, continued where it exists")
    parser.add_argument("--show", action="store_true", help="run nothing, print what the file has")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--notes", action="store_true", help="print the notes of exact predictions too")
    parser.add_argument("--verbose", action="store_true", help="show what trainings and libraries print to stderr")
    arguments = parser.parse_args()
    words = arguments.only or [""]
    every = load_patterns().items()
    patterns = {name: p for name, p in every if any(word in name or word in p.library for word in words)}
    if arguments.list:
        for p in patterns.values():
            print(f"{p.name:<32} {p.library:<28} sizes {p.sizes}")
        print(f"{len(patterns)} patterns, {len({p.library for p in patterns.values()})} libraries")
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.json = arguments.json or Path(folder) / "field.jsonl"
        record = Tuned if arguments.tune else Result
        known = {r.pattern for r in read(arguments.json, set(patterns), record)}
        if not arguments.show:
            run_all([p for name, p in patterns.items() if name not in known], arguments)
        results = read(arguments.json, set(patterns), record)
    order = {name: index for index, name in enumerate(patterns)}
    results.sort(key=lambda r: (order[r.pattern], r.batch_size))
    print()
    print_table(results, TUNED_COLUMNS if arguments.tune else COLUMNS)
    if arguments.tune:
        return
    print_summary(results)
    print_exceptions(results, arguments.notes)


if __name__ == "__main__":
    main()
