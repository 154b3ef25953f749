"""Simulated lives: published runs of one training on one GPU come in random order, and each corrects the next ones.

A training is a model with its optimizer on a GPU. Each of its runs is predicted without any measurement, and after
those of one, two and three others at other batch sizes.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median, quantiles
from typing import Any

from lightning_memguard.core.replay.footprint import Doubt, Footprint, Peak
from lightning_memguard.core.replay.learned import Learned, Sighting

ORDERS = 40
WORSE = 5.0  # percent


def footprint_of(run: Any) -> Footprint:
    ends = (Peak(0, nbytes, nbytes) for nbytes in (min(run.low, run.predicted), max(run.high, run.predicted)))
    low, high = ends
    return Footprint(run.batch, "cuda", 0, run.predicted, run.predicted, doubts=(Doubt("process", (low, high)),))


def corrected(run: Any, others: Iterable[Any]) -> Footprint:
    sightings = tuple(Sighting(each.batch, each.predicted, each.measured) for each in others)
    return Learned("published", sightings).corrected(footprint_of(run))


def error(run: Any, found: Footprint) -> float:
    return 100 * (found.peak_device_bytes / run.measured - 1)


def trainings(runs: Iterable[Any]) -> dict[tuple[str, ...], list[Any]]:
    by_training = defaultdict(dict)
    for run in runs:
        by_training[run.model, run.optimizer, run.gpu, run.version].setdefault(run.batch, run)
    return {name: [*by_size.values()] for name, by_size in by_training.items() if len(by_size) > 1}


def lives(runs: Sequence[Any], after: int) -> list[tuple[Any, Footprint]]:
    chance, found = random.Random(0), []
    for of_one in trainings(runs).values():
        for _ in range(ORDERS if len(of_one) > after else 0):
            run, *others = chance.sample(of_one, after + 1)
            found.append((run, corrected(run, others)))
    return found


def show_lives(runs: Sequence[Any], is_shown: Callable[[Any], bool]) -> None:
    images = [run for run in runs if run.is_image]
    groups = {
        "CNNs, all": images,
        "CNNs that the constants were chosen on": [run for run in images if not is_shown(run)],
        "CNNs, the others": [run for run in images if is_shown(run)],
        "transformers": [run for run in runs if not run.is_image],
    }
    print("\nAfter measurements of the same training at other batch sizes, in random order")
    print("| runs | trainings | measured before | median error | 90th percentile | held | median width |")
    print("| :--- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for title, group in groups.items():
        for after in range(4):
            known = lives(group, after)
            if len(known) > ORDERS:
                errors = [abs(error(*each)) for each in known]
                held = sum(found.low.device_bytes <= run.measured <= found.high.device_bytes for run, found in known)
                widths = [100 * (f.high.device_bytes - f.low.device_bytes) / run.measured for run, f in known]
                far = quantiles(errors, n=10)[-1]
                print(f"| {title} | {len(known) // ORDERS} | {after} | {median(errors):.2f} % | {far:.2f} % ", end="")
                print(f"| {held / len(known):.0%} | {median(widths):.1f} % |")
    print(f"\nOne measurement that makes another run's error more than {WORSE:.0f} points larger")
    for name, of_one in trainings(runs).items():
        for run in of_one:
            for other in of_one:
                before, now = error(run, footprint_of(run)), error(run, corrected(run, [other]))
                if abs(now) > abs(before) + WORSE:
                    print(f"  {' '.join(name[:3])}: {other.batch} for {run.batch}: {before:+.1f} -> {now:+.1f} %")
