"""Predicted against measured, byte for byte, on the CPU: every case of the zoo, three batch sizes, its optimizers.

Each prediction and each measurement is made in a fork of its own: the first by lightning_memguard through a Trainer
(`shared/predicted.py`), the second by PyTorch's profiler around a real training (`shared/truth.py`).

    python benchmarks/cpu_truth.py                     # the table, then median, 90th percentile and worst
    python benchmarks/cpu_truth.py --quick             # one batch size and one optimizer of each case
    python benchmarks/cpu_truth.py --only unet lstm --json results.json
    python benchmarks/cpu_truth.py --tight             # is the size chosen for a budget the largest that fits?
"""

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from shared.predicted import Predicted, predict_here
from shared.process import forked
from shared.truth import Truth, measure_here
from shared.zoo import CASES, Case, case_named

LARGE_ERROR_PERCENT = 0.3
TIGHT_CASES = ("mlp", "cnn_batch_norm", "resnet", "unet", "transformer", "gpt", "gan", "contrastive")
TIGHT_BUDGET = 1.5  # times the measured peak at the middle batch size
MIB = 2**20

Result = TypeVar("Result")


@dataclass(frozen=True)
class Comparison:
    """One training, predicted and measured."""

    predicted: Predicted
    measured: Truth

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted.peak_bytes / self.measured.peak_bytes - 1)


# Compare -------------------------------------------------------------------------------------------------------------


def predict(case: Case, optimizer: str, size: int, threads: int, budget: int | None = None) -> Predicted:
    return Predicted(**forked(lambda: asdict(predict_here(case, optimizer, size, budget)), threads))


def measure(case: Case, optimizer: str, size: int, steps: int, threads: int) -> Truth:
    return Truth(**forked(lambda: asdict(measure_here(case, optimizer, size, steps)), threads))


def compare(case: Case, quick: bool, steps: int, threads: int) -> list[Comparison]:
    """The case at all its optimizers and sizes."""
    optimizers = case.optimizers[-1:] if quick else case.optimizers
    sizes = case.batch_sizes[1:2] if quick else case.batch_sizes
    return [
        Comparison(predict(case, *which, threads), measure(case, *which, steps, threads))
        for which in itertools.product(optimizers, sizes)
    ]


def print_cases() -> None:
    for case in CASES:
        parameters = sum(p.numel() for p in case.build(case.optimizers[0]).parameters())
        sizes = ", ".join(map(str, case.batch_sizes))
        print(f"{case.name:24} {parameters / 1e6:7.2f} M parameters   sizes {sizes:14}  {', '.join(case.optimizers)}")


def print_table(comparisons: Sequence[Comparison]) -> None:
    head = f"{'case':<23} {'optimizer':<9} {'batch':>5} {'predicted MiB':>13} {'measured MiB':>12} {'error %':>8}"
    print(f"{head}  {'method':<10} {'predicted in':<13} measured in")
    for c in comparisons:
        ours, truth = c.predicted, c.measured
        row = f"{truth.case:<23} {truth.optimizer:<9} {truth.batch_size:>5} {ours.peak_bytes / MIB:>13.3f}"
        row += f" {truth.peak_bytes / MIB:>12.3f} {c.error_percent:>+8.3f}"
        print(f"{row}  {ours.method:<10} {ours.phase:<13} {truth.phase}")


def print_summary(comparisons: Sequence[Comparison]) -> None:
    errors = sorted(abs(c.error_percent) for c in comparisons)
    ninetieth = f"90th percentile {errors[math.ceil(0.9 * len(errors)) - 1]:.3f} %"
    median = f"median error {statistics.median(errors):.3f} %"
    print(f"\n{len(errors)} trainings: {median}, {ninetieth}, worst {errors[-1]:.3f} %")


def print_large_errors(comparisons: Sequence[Comparison]) -> None:
    """For each large error: what was predicted to be alive at the peak, next to what was."""
    large = [c for c in comparisons if abs(c.error_percent) > LARGE_ERROR_PERCENT]
    print(f"{len(large)} of them above {LARGE_ERROR_PERCENT} %")
    for c in sorted(large, key=lambda c: -abs(c.error_percent)):
        truth, missing = c.measured, c.measured.peak_bytes - c.predicted.peak_bytes
        print(f"\n{truth.case}, {truth.optimizer}, batch size {truth.batch_size}: {c.error_percent:+.3f} %", end=" ")
        print(f"({missing:+,} bytes measured over predicted), peak measured in {truth.phase} at {truth.operator}")
        parts = [f"{size:>14,} {part}" for part, size in sorted(c.predicted.parts.items(), key=lambda item: -item[1])]
        print(f"  {'predicted, by part':<40} measured, by operator")
        for left, right in itertools.zip_longest(parts, truth.held[:12], fillvalue=""):
            print(f"  {left:<40} {right}")


# Tight ---------------------------------------------------------------------------------------------------------------


def choose(case: Case, steps: int, threads: int) -> dict[str, Any]:
    """Let MemGuard choose under a budget, then measure at its choice and at 10 % more."""
    optimizer, middle = case.optimizers[-1], case.batch_sizes[1]
    budget = int(TIGHT_BUDGET * measure(case, optimizer, middle, steps, threads).peak_bytes)
    chosen = predict(case, optimizer, middle, threads, budget).batch_size
    found = {"case": case.name, "optimizer": optimizer, "budget_bytes": budget, "batch_size": chosen}
    for name, size in (("", chosen), ("larger_", math.ceil(1.1 * chosen))):
        measured = measure(case, optimizer, size, steps, threads).peak_bytes
        found |= {f"{name}batch_size": size, f"{name}measured_bytes": measured, f"{name}fits": measured <= budget}
    return found


def print_choices(choices: Sequence[dict[str, Any]]) -> None:
    head = f"{'case':<23} {'optimizer':<9} {'budget MiB':>10} {'chosen':>6} {'measured MiB':>12}"
    print(f"{head}  {'':<12} {'10 % more':>9} {'measured MiB':>12}")
    for c in choices:
        row = f"{c['case']:<23} {c['optimizer']:<9} {c['budget_bytes'] / MIB:>10.2f} {c['batch_size']:>6}"
        row += f" {c['measured_bytes'] / MIB:>12.2f}  {'fits' if c['fits'] else 'DOES NOT FIT':<12}"
        row += f" {c['larger_batch_size']:>9} {c['larger_measured_bytes'] / MIB:>12.2f}"
        print(f"{row}  {'WOULD ALSO FIT' if c['larger_fits'] else 'would not fit'}")
    print(f"\n{sum(c['fits'] and not c['larger_fits'] for c in choices)} of {len(choices)} choices are tight")


# Run -----------------------------------------------------------------------------------------------------------------


def for_each(cases: Sequence[Case], work: Callable[[Case], Result], jobs: int) -> list[Result]:
    """The results of all cases that have one; the others are printed and left out."""

    def attempt(case: Case) -> list[Result]:
        try:
            return [work(case)]
        except RuntimeError as error:
            print(f"{case.name}: left out. {error}\n", flush=True)
            return []

    with ThreadPoolExecutor(jobs) as pool:
        return [result for results in pool.map(attempt, cases) for result in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases only")
    parser.add_argument("--list", action="store_true", help="print the cases with their parameters and stop")
    parser.add_argument("--quick", action="store_true", help="the middle batch size and last optimizer of each case")
    parser.add_argument("--tight", action="store_true", help="check the sizes chosen under a budget instead")
    parser.add_argument("--steps", type=int, default=3, help="periods measured: batches until the training repeats")
    threads = torch.get_num_threads()
    parser.add_argument("--threads", type=int, default=threads, help="of PyTorch on both sides (default: its own)")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number to this file")
    arguments = parser.parse_args()
    if arguments.list:
        print_cases()
        return
    names = arguments.only or (TIGHT_CASES if arguments.tight else [case.name for case in CASES])
    cases = [case_named(name) for name in names]
    if arguments.tight:
        work = partial(choose, steps=arguments.steps, threads=arguments.threads)
        results = for_each(cases, work, arguments.jobs)
        print_choices(results)
    else:
        work = partial(compare, quick=arguments.quick, steps=arguments.steps, threads=arguments.threads)
        comparisons = [comparison for group in for_each(cases, work, arguments.jobs) for comparison in group]
        if not comparisons:
            raise SystemExit("Nothing could be compared.")
        print_table(comparisons)
        print_summary(comparisons)
        print_large_errors(comparisons)
        results = [{**asdict(c), "error_percent": c.error_percent} for c in comparisons]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
