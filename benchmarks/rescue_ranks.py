"""Two ranks of DistributedDataParallel over gloo whose steps run out of memory: do both train as without failures?

    python benchmarks/rescue_ranks.py                         # all situations, 50 trainings each
    python benchmarks/rescue_ranks.py --runs 5 accumulation   # some of them

Each training has six batches a rank. Its failures are drawn at random: which batches, at which place of the step, how
few samples fit. In every other training the batches after a failure are tried whole again, in the others they go in
parts from the start. Weights, buffers and logged values are compared with those of a training without MemGuard.

`sending` plants a failure in a backward pass that sends gradients, which must end as it does without MemGuard.
It ends with status 1 if a rank hangs, the ranks differ, or a training is another one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from shared.truth import QUIET, quieten

RANK = int(os.environ.get("LOCAL_RANK", "0"))
BATCH, BATCHES = 8, 6
PATIENCE_SECONDS = 90
LEAST = (2, 1)  # samples of a part that are to fit in a forward pass, in a backward pass
FORWARD = ("first", "middle", "last")
Failure = tuple[str, int, int]  # the place, how many samples fit there, and which later visit of it fails as well
Plan = dict[tuple[int, int], Failure]  # by rank and batch

# name: ranks that may fail, settings of the Trainer, whether the module has buffers
SITUATIONS: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any], bool]] = {
    "rank 0": (((0,),), {}, False),
    "rank 1": (((1,),), {}, False),
    "both": (((0, 1),), {}, True),
    "again": (((0,), (1,), (0, 1)), {}, True),
    "accumulation": (((0,), (1,), (0, 1)), {"accumulate_grad_batches": 3}, True),
    "validation": (((0,), (1,)), {}, True),
}


def planned(situation: str, run: int) -> Plan:
    """Draw the failures of a training; both ranks draw the same."""
    chance = random.Random(f"{situation} {run}")
    plan: Plan = {}
    for batch in chance.sample(range(BATCHES), 3):
        for rank in chance.choice(SITUATIONS[situation][0]):
            places = FORWARD
            if situation == "accumulation" and batch % 3 < 2:
                places = (*FORWARD, "backward")
            visit = chance.randint(2, 7) if situation in ("again", "accumulation") else 0
            place = chance.choice(places)  # the forward pass of two samples has to fit
            plan[rank, batch] = place, chance.randint(LEAST[place == "backward"], BATCH - 1), visit
    return plan


def samples_of(x: torch.Tensor) -> int:
    """How many samples a part really has: to the step it seems to be the whole batch."""
    with torch._C.DisableTorchFunction():
        return int(x.shape[0])


class Net(pl.LightningModule):
    """Fails by plan."""

    def __init__(self, plan: Plan, *, buffers: bool, fails_in: str = "training") -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.fails_in, self.process = fails_in, os.getpid()  # copies in children never fail
        FAILING.restart(plan)
        if buffers:
            self.register_buffer("scale", torch.ones(4))
            self.register_buffer("steps", torch.zeros(()))

    def on_fit_start(self) -> None:
        node = self.first.weight.expand_as(self.first.weight).grad_fn.next_functions[0][0]
        node.register_prehook(lambda _: FAILING.check("backward"))
        FAILING.node = node  # which lives as long as its hook is to be called

    def step(self, batch: Any, batch_idx: int, kind: str) -> torch.Tensor:
        x, y = batch
        if kind == self.fails_in and os.getpid() == self.process and not self.trainer.sanity_checking:
            FAILING.begin(batch_idx, samples_of(x))
        FAILING.check("first")
        hidden = F.gelu(self.first(x))
        FAILING.check("middle")
        out = self.head(F.gelu(self.second(hidden)))
        if hasattr(self, "steps"):
            out = out * self.scale
            if kind == "training":
                self.steps += 1
        loss = F.cross_entropy(out, y)
        FAILING.check("last")
        self.log(kind, loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.step(batch, batch_idx, "training")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, batch_idx, "validation")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Failing:
    """Which visits of a place in a step fail. It is not the module's, whose state a rescue puts back."""

    def restart(self, plan: Plan) -> None:
        self.plan, self.batch, self.samples, self.visits = plan, -1, 0, 0
        self.raised: dict[int, int] = {}  # by batch
        self.node: Any = None

    def begin(self, batch: int, samples: int) -> None:
        self.visits = self.visits if batch == self.batch else 0
        self.batch, self.samples = batch, samples

    def check(self, place: str) -> None:
        where, most, again = self.plan.get((RANK, self.batch), ("", 0, 0))
        if place != where:
            return
        self.visits += 1
        if self.samples > most or (self.visits == again and self.samples > LEAST[place == "backward"]):
            self.raised[self.batch] = self.raised.get(self.batch, 0) + 1
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")


class FailingLast(Failing):
    """Fails in the forward pass of a batch, and in the backward pass of the second part of it, which is the last."""

    def check(self, place: str) -> None:
        if (RANK, self.batch) != (1, 3) or place not in ("middle", "backward"):
            return
        whole = place == "middle" and self.samples == BATCH
        self.visits = 0 if whole else self.visits + (place == "backward")
        if whole or self.visits == 2:
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")


FAILING = Failing()


class Forgets(pl.Callback):
    """Has each batch tried as a whole, whatever failed before."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        next(
            each for each in trainer.callbacks if isinstance(each, MemGuard)
        )._run._rescuer.policy._too_large_bytes = math.inf


def train(situation: str, plan: Plan, *, guarded: bool, forgets: bool = True) -> dict[str, Any]:
    """Train once; what this rank saw."""
    _, settings, buffers = SITUATIONS[situation]
    pl.seed_everything(0, verbose=False)
    size = 2 * BATCHES * BATCH
    loader = DataLoader(TensorDataset(torch.randn(size, 8), torch.randint(0, 4, (size,))), BATCH)
    module = Net(plan, buffers=buffers, fails_in="validation" if situation == "validation" else "training")
    guard = MemGuard(max_batch_size=BATCH)
    callbacks = [guard, *[Forgets()] * forgets] if guarded else []
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, callbacks=callbacks, **settings, **QUIET
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, loader, loader if situation == "validation" else None)
    return {
        "weights": torch.cat([each.detach().flatten() for each in module.state_dict().values()]).tolist(),
        "logged": {name: float(x) for name, x in trainer.callback_metrics.items() if "memguard" not in name},
        "raised": FAILING.raised,
        "records": [(each.out_of_memory, each.rescued) for each in guard.records],
        "said": [str(each.message) for each in told if "ran out of memory" in str(each.message)],
    }


# -- in the ranks


def run(situation: str, runs: int) -> None:
    if situation.startswith("sending"):
        if "part" in situation:
            FAILING.__class__ = FailingLast
        train("both", {(1, 3): ("backward", 1, 0)}, guarded="alone" not in situation)
        return
    expected = train(situation, {}, guarded=False)
    write(expected)
    for index in range(runs):
        write(train(situation, planned(situation, index), guarded=True, forgets=index % 2 == 0))


def write(seen: dict[str, Any]) -> None:
    with Path(f"rank{RANK}.jsonl").open("a") as file:
        file.write(f"{json.dumps(seen)}\n")


# -- above them


def watched(situation: str, runs: int, folder: str) -> tuple[int | None, str, list[list[Any]]]:
    """Run both ranks; their status, None where they hung; the end of what they said; what each wrote."""
    command = [sys.executable, str(Path(__file__).resolve()), "--run", situation, "--runs", str(runs)]
    files = [Path(folder, f"rank{rank}.jsonl") for rank in (0, 1)]
    with Path(folder, "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        progress, since = 0, time.monotonic()
        while process.poll() is None and time.monotonic() - since < PATIENCE_SECONDS:
            time.sleep(0.2)
            size = sum(file.stat().st_size for file in files if file.exists())
            progress, since = size, (since if size == progress else time.monotonic())
        status = process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seen = [[json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file in files]
    return status, Path(folder, "log").read_text(), seen


def defects(situation: str, index: int, seen: list[dict[str, Any]], expected: dict[str, Any]) -> list[str]:
    """What is not as it should be in a training."""
    plan, found = planned(situation, index), []
    if seen[0]["weights"] != seen[1]["weights"]:
        found.append("the ranks differ")
    if (off := difference(seen[0]["weights"], expected["weights"])) > 1e-6:
        found.append(f"weights off by {off:.1e}")
    logged = [difference([seen[0]["logged"][name]], [value]) for name, value in expected["logged"].items()]
    if max(logged) > 1e-5:
        found.append(f"logged values off by {max(logged):.1e}")
    failed = {batch for _, batch in plan}
    counts = [tuple(each) for each in seen[0]["records"]]
    if situation != "validation" and index % 2 == 0 and counts != [(len(failed), len(failed))] * 2:
        found.append(f"rank 0 counted {counts} instead of {len(failed)}")
    unnamed = {rank for rank, _ in plan if not any(text.startswith(f"Rank {rank}: ") for text in seen[rank]["said"])}
    return [*found, *(f"rank {rank} was not named" for rank in unnamed)]


def difference(one: list[float], other: list[float]) -> float:
    first, second = torch.tensor(one), torch.tensor(other)
    return float((first - second).abs().max() / second.abs().max())


def check(situation: str, runs: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        status, log, (here, there) = watched(situation, runs, folder)
    pairs = list(zip(here, there, strict=False))
    expected = pairs[0][0] if pairs else None
    bad = {index: found for index, pair in enumerate(pairs[1:]) if (found := defects(situation, index, pair, expected))}
    raised = [sum(sum(rank["raised"].values()) for rank in pair) for pair in pairs[1:]]
    off = max((difference(pair[0]["weights"], expected["weights"]) for pair in pairs[1:]), default=math.nan)
    ended = "HANG" if status is None else f"status {status}"
    print(
        f"{situation:14} {len(pairs) - 1}/{runs} trainings, {sum(raised)} failures, {len(bad)} not the same; "
        f"weights off by at most {off:.1e}; {ended}",
        flush=True,
    )
    for index, found in list(bad.items())[:5]:
        print(f"    training {index}: {'; '.join(found)}; {planned(situation, index)}")
    if status != 0:
        print(f"    training {len(pairs) - 2}: {planned(situation, max(0, len(pairs) - 2))}")
        print("\n".join(f"    {line:.300}" for line in log.splitlines() if "Error" in line or "not done again" in line))
    return status == 0 and not bad and len(pairs) == runs + 1


def sending() -> bool:
    good = True
    for kind in ("sending, alone", "sending", "sending, a part"):
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            status, log, _ = watched(kind, 1, folder)
        why = "cannot start a backward pass again" in log
        print(f"{kind:16} status {status} after {time.monotonic() - started:.0f} s; our reason: {why}; "
              f"out of memory raised: {'OutOfMemoryError' in log}", flush=True)  # fmt: skip
        good &= bool(status) and why == ("alone" not in kind) and "OutOfMemoryError" in log
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("situations", nargs="*", choices=[*SITUATIONS, "sending", []], help="default: all")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    quieten()
    torch.set_num_threads(1)
    if options.run:
        run(options.run, options.runs)
        return 0
    good = [
        sending() if each == "sending" else check(each, options.runs)
        for each in options.situations or [*SITUATIONS, "sending"]
    ]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
