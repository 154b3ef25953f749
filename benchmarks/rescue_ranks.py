"""Two ranks of DistributedDataParallel over gloo whose steps run out of memory: do both train as without failures?

    python benchmarks/rescue_ranks.py                         # all situations, 50 trainings each
    python benchmarks/rescue_ranks.py --runs 5 accumulation   # some of them

A training is an epoch of six batches a rank, which starts with new weights; five of them are one fit. Its failures are
drawn at random: which batches, at which place of the step, how few samples fit. In every other fit the batches after a
failure are tried whole again, in the others they go in parts from the start. Weights, buffers, the losses of all steps
and the logged ones of validation are compared with those of a training without MemGuard.

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
EPOCHS = 5  # of a fit, each of which is a training of its own
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

    def __init__(self, *, buffers: bool, fails_in: str) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.fails_in, self.process = fails_in, os.getpid()  # copies in children never fail
        FAILING.restart({})
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
    """Visits of a place in a step that fail. It is not the module's, whose state a rescue puts back."""

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


class Trainings(pl.Callback):
    """Makes each epoch of a fit a training of its own, with its own failures, and keeps what became of it."""

    def __init__(self, plans: list[Plan], *, forgets: bool) -> None:
        self.plans, self.forgets = plans, forgets
        self.seen: list[dict[str, Any]] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.start = {name: value.clone() for name, value in module.state_dict().items()}

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.load_state_dict(self.start)
        trainer.optimizers[0].state.clear()
        FAILING.restart(self.plans[trainer.current_epoch])
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.forgets:  # each batch is tried as a whole, whatever failed before
            guard = next(each for each in trainer.callbacks if isinstance(each, MemGuard))
            guard._run._rescuer.policy.too_large_bytes = math.inf  # type: ignore[union-attr]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.losses.append(float(trainer.callback_metrics["validation"]))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        weights = torch.cat([each.detach().flatten() for each in module.state_dict().values()]).tolist()
        self.seen.append({"weights": weights, "losses": self.losses, "raised": FAILING.raised})


def train(situation: str, plans: list[Plan], *, guarded: bool, forgets: bool = True) -> list[dict[str, Any]]:
    """Train once for each plan, in one fit; what this rank saw of each."""
    _, settings, buffers = SITUATIONS[situation]
    pl.seed_everything(0, verbose=False)
    size = 2 * BATCHES * BATCH
    loader = DataLoader(TensorDataset(torch.randn(size, 8), torch.randint(0, 4, (size,))), BATCH)
    module = Net(buffers=buffers, fails_in="validation" if situation == "validation" else "training")
    guard, trainings = MemGuard(max_batch_size=BATCH), Trainings(plans, forgets=guarded and forgets)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=len(plans), **settings, **QUIET,
        callbacks=[guard, trainings] if guarded else [trainings],
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, loader, loader if situation == "validation" else None)
    said = [str(each.message) for each in told if "ran out of memory" in str(each.message)]
    counts = [(each.out_of_memory, each.rescued) for each in guard.records] if guarded else [(0, 0)] * len(plans)
    return [{**seen, "count": count, "said": said} for seen, count in zip(trainings.seen, counts, strict=True)]


# -- in the ranks


def run(situation: str, runs: int) -> None:
    if situation.startswith("sending"):
        if "part" in situation:
            FAILING.__class__ = FailingLast
        train("both", [{(1, 3): ("backward", 1, 0)}], guarded="alone" not in situation)
        return
    write(train(situation, [{}] * EPOCHS, guarded=False))
    for index in range(0, runs, EPOCHS):
        plans = [planned(situation, each) for each in range(index, index + EPOCHS)]
        write(train(situation, plans, guarded=True, forgets=index // EPOCHS % 2 == 0))


def write(seen: list[dict[str, Any]]) -> None:
    with Path(f"rank{RANK}.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(each)}\n" for each in seen)


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


def defects(situation: str, index: int, seen: Any, expected: Any) -> list[str]:
    """Defects of a training."""
    plan, found = planned(situation, index), []
    if seen[0]["weights"] != seen[1]["weights"]:
        found.append("the ranks differ")
    if (off := difference(seen[0]["weights"], expected["weights"])) > 1e-6:
        found.append(f"weights off by {off:.1e}")
    off = difference(seen[0]["losses"], expected["losses"])
    if off > 1e-6:
        found.append(f"losses off by {off:.1e}")
    failed, first = {batch for _, batch in plan}, index // EPOCHS * EPOCHS
    if situation != "validation" and index // EPOCHS % 2 == 0 and seen[0]["count"] != [len(failed)] * 2:
        found.append(f"rank 0 counted {seen[0]['count']} instead of {len(failed)}")
    failing = {rank for each in range(first, first + EPOCHS) for rank, _ in planned(situation, each)}
    named = {rank for rank in (0, 1) if any(text.startswith(f"Rank {rank}: A ") for text in seen[rank]["said"])}
    return found if named == failing else [*found, f"failures on ranks {failing}, said of ranks {named}"]


def difference(one: list[float], other: list[float]) -> float:
    first, second = torch.tensor(one), torch.tensor(other)
    return float((first - second).abs().max() / second.abs().max())


def check(situation: str, runs: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        status, log, (here, there) = watched(situation, runs, folder)
    pairs = list(zip(here, there, strict=False))
    expected, pairs = [first for first, _ in pairs[:EPOCHS]], pairs[EPOCHS:]
    every = [(index, pair, expected[index % EPOCHS]) for index, pair in enumerate(pairs)]
    bad = {index: found for index, pair, right in every if (found := defects(situation, index, pair, right))}
    raised = sum(sum(rank["raised"].values()) for pair in pairs for rank in pair)
    off = max((difference(pair[0]["weights"], right["weights"]) for _, pair, right in every), default=math.nan)
    ended = "HANG" if status is None else f"status {status}"
    print(f"{situation:14} {len(pairs)}/{runs} trainings, {raised} failures, {len(bad)} not the same; "
          f"weights off by at most {off:.1e}; {ended}", flush=True)  # fmt: skip
    for index, found in list(bad.items())[:5]:
        print(f"    training {index}: {'; '.join(found)}; {planned(situation, index)}")
    if status != 0:
        print("\n".join(f"    {line:.300}" for line in log.splitlines() if "Error" in line or "not done again" in line))
    return status == 0 and not bad and len(pairs) >= runs


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
