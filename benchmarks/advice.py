"""Is the advice true? Train a small GPT with each remedy applied as advised, and measure its peak.

`advise` predicts the memory with each remedy from a run on a copy without memory. Here the same module is rewritten
that way and trained by Lightning on the CPU, while PyTorch's profiler counts every byte (`shared/truth.py`). The
prediction is compared with the peak from the first batch on: converting weights to bfloat16, before that, may take
more. Rows with bfloat16 can be too low: the scratch of the CPU's bfloat16 convolutions and products is not counted.

    python benchmarks/advice.py                       # every remedy that can be applied on a CPU, and the pairs
    python benchmarks/advice.py --batch-size 8 --budget-share 0.5
"""

import argparse
import functools
import gc
import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, default_collate

from lightning_memguard.core.capture.predict import Prediction, predict
from lightning_memguard.core.decision.advice import Advice
from lightning_memguard.core.decision.decision import Budget
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.training.planning.advise import try_remedies
from shared.predicted import program_of
from shared.truth import fit, live_bytes, profiled, quieten
from shared.zoo import Case, case_named

OPTIMIZER = "adam"
MIB = 2**20
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "fused optimizer": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=True),
    "per-parameter optimizer": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, foreach=False),
}


Followed = tuple[str, int, int, int]  # the remedies, the batch size, the predicted and the measured peak


def predicted(case: Case, batch_size: int) -> Prediction:
    """The unchanged training."""
    module = case.build(OPTIMIZER)
    dataset = case.dataset(batch_size)
    batch = default_collate([dataset[index] for index in range(batch_size)])
    program = program_of(module, batch, "cpu", **case.trainer_kwargs)
    return predict(program, batch_size, AllocatorSettings.for_device("cpu", os.environ), scalable=False)


# Follow --------------------------------------------------------------------------------------------------------------


def following(case: Case, remedies: Sequence[str], how: Sequence[str]) -> Case:
    """The case, rewritten as advised: lines with `self` run on the module, the rest goes to the Trainer."""
    lines = [line for line in how if "self" in line]
    optimizer = next((OPTIMIZERS[name] for name in remedies if name in OPTIMIZERS), None)
    settings: dict[str, Any] = {}
    for call in re.findall(r"Trainer\(.*?\)", " ".join(how)):
        settings |= eval(call, {"Trainer": dict})
    period = settings.get("accumulate_grad_batches", 1)
    build = functools.partial(rewritten, case.build, lines, optimizer)
    return replace(case, build=build, trainer_kwargs={**case.trainer_kwargs, **settings}, period=period)


def rewritten(build: Callable[[str], pl.LightningModule], lines: Sequence[str], optimizer: Any, name: str) -> Any:
    module = build(name)
    for line in lines:
        exec(line, {"self": module, "torch": torch, "functools": functools})
    if optimizer is not None:
        module.configure_optimizers = lambda: optimizer(module.parameters())
    return module


def follow(case: Case, advice: Advice) -> Followed:
    """Train as advised and measure."""
    size = advice.footprint.batch_size
    measured = measured_bytes(following(case, advice.remedies, advice.how), size)
    return " + ".join(advice.remedies), size, advice.footprint.peak_allocated_bytes, measured


def measured_bytes(case: Case, batch_size: int, steps: int = 3) -> int:
    """The peak of a real training, from its first batch on."""
    gc.collect()
    batches = steps * case.period
    loader = DataLoader(case.dataset(batches * batch_size), batch_size=batch_size)
    events = profiled(lambda: fit(case, OPTIMIZER, loader, batches))
    trains = itertools.dropwhile(lambda pair: pair[0].phase != "forward", zip(events, live_bytes(events), strict=True))
    return max(total for _, (total, _) in trains)


def print_table(rows: Sequence[Followed]) -> None:
    width = max(len(name) for name, *_ in rows)
    errors = [100 * (predicted / measured - 1) for *_, predicted, measured in rows]
    print(f"{'remedy':<{width}} {'batch':>5} {'predicted MiB':>13} {'measured MiB':>12} {'error %':>8}")
    for (name, size, predicted, measured), off in zip(rows, errors, strict=True):
        print(f"{name:<{width}} {size:>5} {predicted / MIB:>13.3f} {measured / MIB:>12.3f} {off:>+8.3f}")
    print(f"\n{len(rows)} trainings, worst error {max(map(abs, errors)):.3f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="gpt", help="a case of the zoo")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--budget-share", type=float, default=0.6, help="the budget, as a share of the predicted peak")
    arguments = parser.parse_args()
    quieten()
    case, size = case_named(arguments.case), arguments.batch_size
    prediction = predicted(case, size)
    need = prediction.footprint_at(size).peak_allocated_bytes
    found = try_remedies(prediction, size, Budget(need, int(arguments.budget_share * need), 0, "given")).advice
    print_table([("as it is", size, need, measured_bytes(case, size)), *(follow(case, each) for each in found)])


if __name__ == "__main__":
    main()
