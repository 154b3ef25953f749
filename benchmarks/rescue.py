"""Programs whose steps run out of memory and are done again in parts: is the training the same, or was it refused?

    python benchmarks/rescue.py                            # several minutes on two busy cores
    python benchmarks/rescue.py --only mask kl_ --steps 4  # programs whose name contains one of these
    python benchmarks/rescue.py --guard                    # with MemGuard, not only the rescue (slower)
    python benchmarks/rescue.py --truth                    # no rescue: every program trains, twice the same

Each program of `rescue_programs.py` trains in float32 and in float64: once without failures, and once with
out-of-memory errors planted in most steps (`PLACES`), some of them again in a part, so that parts of one sample and
uneven parts occur. After each step weights, buffers, optimizer state, logged values, plain attributes and outputs are
compared, also those of the steps before a refusal. Controls: differences made on purpose.

A result is equal, refused, OTHER (the step was done again and something differs, an error of the rescue's own, or no
reason), or broken (the training without failures does not repeat). The exit status is 1 if any is OTHER or broken, or
differs from what its label allows.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import math
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rescue_programs
from rescue_programs import BATCH, PROGRAMS, STEPS, Program
from shared.truth import QUIET, quieten

TOLERANCES = {"32-true": 1e-6, "64-true": 1e-12, "bf16-mixed": 1e-6}
NOTE = "The step was not done again in parts of its batch: "
FIRST, FORWARD, END, GRADIENT, BACKWARD, LAST = PLACES = (
    *("first operator", "mid-forward", "end of forward"),
    *("first gradient", "mid-backward", "last operator"),
)
Shots = tuple[tuple[int, str], ...]  # passes that are left alone before the next error, and its place
# By precision and step: errors in the whole step, then in its parts. Eight samples go in fours, twos, ones.
PLANS: dict[str, tuple[Shots, ...]] = {
    "32-true": (
        *((), ((0, FIRST),), ((0, FORWARD), (0, FORWARD)), ((0, END),), ((0, GRADIENT), (1, FIRST))),
        *(((0, BACKWARD), (0, FORWARD), (2, END)), ((0, LAST),), ((0, FORWARD), (2, BACKWARD))),
    ),
    "64-true": (
        *(((0, LAST),), ((0, BACKWARD), (1, FORWARD)), ((0, END),), ((0, FIRST), (0, FIRST), (0, FIRST)), ()),
        *(((0, GRADIENT), (4, GRADIENT)), ((0, FORWARD),), ((0, FIRST), (1, LAST))),
    ),
}
PLANS["bf16-mixed"] = PLANS["32-true"]
FITTING = (0, 3 / 8, 0, 5 / 8, 0, 0, 1 / 8, 3 / 8)  # share of a batch that the rescue takes for fitting, by step
Values = dict[str, torch.Tensor]

# -- the rescue


def direct_guard(trainer: Any, module: Any, lenient: bool = False) -> Any:
    """Do steps of this Trainer again in parts if they run out of memory, without the rest of MemGuard."""
    from lightning_memguard.training.rescue.rescuer import Rescuer

    rescuer = Rescuer(trainer, module, lenient=lenient, announce=lambda _: None)
    rescuer.install()
    return rescuer


def forget(rescuer: Any, batch: Any, step: int) -> None:
    """Have a batch tried as a whole, however many failed before; and choose the first size of its parts."""
    from lightning_memguard.core.batch.nesting import batch_bytes

    rescuer.policy.too_large_bytes, rescuer.policy._wait = math.inf, 0
    rescuer.policy._fitting_bytes = batch_bytes(batch) * FITTING[step % len(FITTING)]


class Direct(pl.Callback):
    """Attaches the rescue to a Trainer, and counts the steps it has done."""

    def __init__(self, lenient: bool) -> None:
        self.lenient, self.rescuer, self.batches, self.rescued, self.reason = lenient, None, 0, 0, ""

    def find(self, trainer: Any, module: Any) -> Any:
        return direct_guard(trainer, module, self.lenient)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.rescuer = self.find(trainer, module)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.rescuer = self.rescuer or self.find(trainer, module)
        forget(self.rescuer, batch, self.batches)
        self.batches += 1

    def on_train_epoch_end(self, *_: Any) -> None:
        self.rescued = len(self.rescuer.policy.steps)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.rescued, self.reason = len(self.rescuer.policy.steps), self.rescuer.refused

    def teardown(self, *_: Any, **__: Any) -> None:
        self.rescuer.close()


class Guarded(Direct):
    """Finds the rescue of a MemGuard."""

    def find(self, trainer: Any, module: Any) -> Any:
        from lightning_memguard import MemGuard

        guard = next(each for each in trainer.callbacks if isinstance(each, MemGuard))
        return guard._run and guard._run._rescuer

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        super().on_exception(trainer, module, exception)
        notes = [re.search(f"{NOTE}(.*)", note, re.DOTALL) for note in getattr(exception, "__notes__", ())]
        self.reason = next((note.group(1) for note in notes if note), "")

    def teardown(self, *_: Any, **__: Any) -> None:  # MemGuard closes it
        pass


def callbacks_of(how: str) -> list[Any]:
    if how != "guard":
        return [Direct(lenient=how == "by name")]
    from lightning_memguard import MemGuard

    return [MemGuard(on_oom=None, max_batch_size=BATCH), Guarded(lenient=False)]


# -- errors at a place


def is_in_pass() -> bool:
    """Whether the user's step or its backward pass is running, and not the rescue's own few operators between them."""
    frame = sys._getframe()
    while frame and frame.f_code.co_name not in ("training_step", "_engine_run_backward", "post_backward"):
        frame = frame.f_back
    return frame is not None


class Errors(TorchDispatchMode):
    """Counts the operators of each pass; raises the out-of-memory errors that are planted in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.shots: list[tuple[int, int]] = []  # passes to leave alone, operators to let through
        self.process, self.count, self.waited, self.raised, self.active = os.getpid(), 0, -1, 0, False

    def begin(self) -> None:
        """A pass, of the batch or of some of it, begins."""
        self.count, self.active = 0, os.getpid() == self.process
        self.waited += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.active and func.namespace == "aten":
            self.count += 1
            due = self.shots and self.waited >= self.shots[0][0] and self.count >= self.shots[0][1]
            if due and is_in_pass():
                self.shots.pop(0)
                self.raised += 1
                self.waited, self.active = -1, False
                raise torch.OutOfMemoryError("CUDA out of memory (planted)")  # before anything is written
        return func(*args, **(kwargs or {}))


class Count(pl.Callback):
    """Counts the operators of the steps of a training without failures: at each place, of each step."""

    def __init__(self, errors: Errors) -> None:
        self.errors, self.counts, self.forward, self.gradient = errors, list[dict[str, int]](), 0, 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.noticed)

    def noticed(self, _: torch.Tensor) -> None:
        self.gradient = self.gradient or self.errors.count

    def on_train_batch_start(self, *_: Any) -> None:
        self.forward = self.gradient = self.errors.count = 0

    def on_before_backward(self, *_: Any) -> None:
        self.forward, self.gradient = self.errors.count, 0

    def on_after_backward(self, *_: Any) -> None:
        self.errors.active = False

    def on_train_batch_end(self, *_: Any) -> None:
        self.errors.active, forward, total = False, self.forward, self.errors.count
        steps = 1, forward // 2, forward, min(self.gradient + 1, total), (forward + total) // 2, total
        self.counts.append(dict(zip(PLACES, steps, strict=True)) if forward else {})


class Plant(pl.Callback):
    """Plants the errors of a training."""

    def __init__(self, errors: Errors, plan: Sequence[Shots], counts: list[dict[str, int]], turn: int) -> None:
        self.errors, self.plan, self.counts, self.turn, self.batches = errors, plan, counts, turn, 0

    def on_train_batch_start(self, *_: Any) -> None:
        at = self.counts[self.batches]
        shots = self.plan[(self.turn + self.batches) % len(self.plan)] if at else ()
        self.errors.shots, self.errors.waited = [(skip, max(1, at[place])) for skip, place in shots], -1
        self.batches += 1

    def on_after_backward(self, *_: Any) -> None:
        self.errors.active = False

    def on_train_batch_end(self, *_: Any) -> None:
        self.errors.shots, self.errors.active = [], False


# -- a training, and what it leaves


class Watch(pl.Callback):
    """Keeps what a training has become after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Values]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = trainer.optimizers[0].state.values()
        self.steps.append({
            "weights": kept(dict(module.named_parameters())),
            "buffers": kept(dict(module.named_buffers())),
            "optimizer": kept({f"{k} {place}": value for place, each in enumerate(state) for k, value in each.items()}),
            "logged": kept(trainer.callback_metrics),
            "attributes": kept({name: value for name, value in vars(module).items() if not name.startswith("_")}),
            "outputs": kept(outputs if isinstance(outputs, dict) else {"loss": outputs}),
        })  # fmt: skip

    def on_train_end(self, trainer: Any, module: Any) -> None:  # the epoch's values
        self.steps.append({"logged": kept(trainer.callback_metrics)})


def kept(values: Any) -> Values:
    """Tensors and numbers, nested ones by their place, as they are now, in float64."""
    found: Values = {}
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            found |= kept({f"{name} {place}": each for place, each in enumerate(value)})
        elif isinstance(value, (bool, int, float, torch.Tensor)) and "memguard" not in name:
            found[name] = torch.as_tensor(value).detach().to(torch.float64, copy=True)
    return found


@dataclass
class Training:
    """Results of a training, and how it ended."""

    steps: list[dict[str, Values]]
    counts: list[dict[str, int]] = field(default_factory=list)
    raised: int = 0
    rescued: int = 0
    refused: str | None = None
    error: str = ""


def train(
    program: Program, precision: str, steps: int, counts: Any = None, how: str = "direct", more: Sequence[Any] = ()
) -> Training:
    """Train a program: with planted errors if the operators of its steps were counted."""
    quieten()
    pl.seed_everything(program.seed, verbose=False)
    errors, watch = Errors(), Watch()
    plain = counts is None
    count, planned = (
        Count(errors),
        [] if plain else [Plant(errors, PLANS[precision], counts, program.seed), *callbacks_of(how)],
    )
    settings = {"max_epochs": 1, "accelerator": "cpu", "precision": precision, **QUIET, **program.settings}
    trainer = pl.Trainer(**settings, callbacks=[*([count] if plain else planned), *more, watch])
    module, loader = program.training(steps)
    done = Training(watch.steps, count.counts)
    rescue_programs.began[:] = [errors.begin]
    try:
        with errors, contextlib.redirect_stdout(io.StringIO()):  # MemGuard prints a table
            trainer.fit(module, loader)
    except torch.OutOfMemoryError as error:
        done.refused = planned[-1].reason if planned else str(error)
        if "planted" not in str(error):
            done.error = f"another error of memory: {error}"
    except Exception as error:  # noqa: BLE001
        done.error = f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        rescue_programs.began.clear()
    done.raised, done.rescued = errors.raised, planned[-1].rescued if planned else 0
    return done


def differences(truth: Training, found: Training) -> dict[str, float]:
    """The largest difference by kind, over the steps that ended, relative to the largest value of its name."""
    worst: dict[str, float] = {}
    for kind in ("weights", "buffers", "optimizer", "logged", "attributes", "outputs"):
        pairs = [(one[kind], other.get(kind, {})) for one, other in zip(truth.steps, found.steps) if kind in one]  # noqa: B905
        largest: dict[str, float] = {}
        for name, value in chain.from_iterable(one.items() for one, _ in pairs):
            largest[name] = max(largest.get(name, 0), magnitude(value))
        floor = max(1e-3, 1e-2 * max(largest.values(), default=0)) if kind != "logged" else 1e-3
        for one, other in pairs:
            if one.keys() != other.keys():
                return {f"names of {kind}": math.inf}
            off = (difference(value, other[name]) / max(largest[name], floor) for name, value in one.items())
            worst[kind] = max(worst.get(kind, 0), *off, 0)
    return worst


def magnitude(value: torch.Tensor) -> float:
    return float(value.nan_to_num(0, 0, 0).abs().max()) if value.numel() else 0.0


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    return magnitude(one - other)


# -- verdicts


@dataclass(frozen=True)
class Verdict:
    """How a program ended at one precision."""

    outcome: str
    words: str
    raised: int = 0
    rescued: int = 0
    largest: float = 0.0


def judge(program: Program, truth: Training, found: Training, precision: str) -> Verdict:
    off, step = differences(truth, found), len(found.steps)
    kind, largest = max(off.items(), key=lambda each: each[1], default=("nothing", 0.0))
    limit, outcome = TOLERANCES[precision] * program.loose, "OTHER"
    if found.error:
        words = found.error
    elif any(value > limit * (1 if name == "weights" else 10) for name, value in off.items()):
        words = ", ".join(f"{name} {value:.1e}" for name, value in off.items() if value > limit)
        words += f", then refused: {found.refused}" if found.refused else ""
    elif found.refused is not None:
        outcome = "refused" if found.refused else "OTHER"
        words = f"step {step}: {found.refused or 'refused without a reason'}"
    elif len(truth.steps) != step:
        words = f"{step} of {len(truth.steps)} steps"
    elif not found.rescued:
        words = f"no step was done again ({found.raised} errors)"
    else:
        outcome, words = "equal", f"{largest:.1e} ({kind})"
    return Verdict(outcome, words, found.raised, found.rescued, largest)


def examine(program: Program, precision: str, options: argparse.Namespace) -> Verdict:
    truth = train(program, precision, options.steps)
    if truth.error or truth.refused is not None:
        return Verdict("broken", truth.error or f"refused: {truth.refused}")
    if options.truth:
        again = differences(truth, train(program, precision, options.steps))
        finite = all(value.isfinite().all() for value in truth.steps[-2]["weights"].values())
        planted = sum(bool(shots and at) for shots, at in zip(PLANS[precision] * 3, truth.counts))  # noqa: B905
        same = finite and not any(again.values())
        return Verdict("equal" if same else "broken", "" if same else f"finite {finite}, {again}", planted)
    return judge(program, truth, train(program, precision, options.steps, truth.counts, options.how), precision)


def allowed(label: str, outcome: str, truth: bool) -> bool:
    return outcome in (("equal",) if truth else {"either": ("equal", "refused")}.get(label, (label,)))


def equality(options: argparse.Namespace) -> bool:
    totals: Counter[tuple[str, str]] = Counter()
    worst: dict[str, float] = {}
    wrong = []
    print(f"{'':28} {'must be':8} {'':7} {'errors':>6} {'rescued':>7}  result")
    chosen = [each for name, each in PROGRAMS.items() if any(part in name for part in options.only or [""])]
    for program, precision in [(each, name) for each in chosen for name in each.precisions]:
        if options.precision and precision[:2] != options.precision:
            continue
        verdict = examine(program, precision, options)
        totals[program.label, verdict.outcome] += 1
        if verdict.outcome == "equal":
            worst[precision] = max(worst.get(precision, 0), verdict.largest)
        words, mark = f"{verdict.outcome} {verdict.words}", ""
        if not allowed(program.label, verdict.outcome, options.truth):
            mark = "   <-- NOT AS IT MUST BE"
            wrong.append(f"{program.name} ({precision[:4]}): must be {program.label}, is {words}")
        counted = f"{verdict.raised:6} {verdict.rescued:7}"
        print(f"{program.name:28} {program.label:8} {precision[:7]:7} {counted}  {words}{mark}", flush=True)
        gc.collect()
    print(f"\n{sum(totals.values())} trainings of {len({*PROGRAMS})} programs")
    for label, outcome in sorted(totals):
        print(f"  must be {label:8} {outcome:8} {totals[label, outcome]:4}")
    print(f"largest difference of the equal ones: {', '.join(f'{p} {value:.1e}' for p, value in worst.items())}")
    if wrong:
        print(*(f"not as it must be: {each}" for each in wrong), sep="\n")
    return controls(options) and not wrong


# -- controls: does the comparison see what it is there for?


class Meddles(pl.Callback):
    """Changes something a little in one step."""

    def __init__(self, what: str) -> None:
        self.what, self.batches = what, 0

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if self.batches == 3 and self.what == "gradients":
            for parameter in module.parameters():
                parameter.grad.mul_(1 + 1e-4)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if self.batches == 3 and self.what == "logged":
            module.log("loss", outputs["loss"] * (1 + 1e-4), on_step=True)
        if self.batches == 3 and self.what == "outputs":
            outputs["loss"] = outputs["loss"] * (1 + 1e-4)
        self.batches += 1


def controls(options: argparse.Namespace) -> bool:
    if options.truth or options.only:
        return True
    good, program = True, PROGRAMS["plain_ce"]
    truth = train(program, "32-true", 6)
    for what in ("gradients", "logged", "outputs"):
        found = train(program, "32-true", 6, truth.counts, options.how, [Meddles(what)])
        verdict = judge(program, truth, found, "32-true")
        good &= verdict.outcome == "OTHER"
        print(f"control: {what} changed by 1e-4: {verdict.outcome} {verdict.words}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="programs whose name contains one of these")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps, up to {STEPS}")
    parser.add_argument("--precision", choices=("32", "64", "bf"), help="only this one")
    parser.add_argument("--truth", action="store_true", help="no rescue: train each program twice without failures")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--direct", dest="how", action="store_const", const="direct", help="the rescue alone (default)")
    ways.add_argument("--guard", dest="how", action="store_const", const="guard", help="with MemGuard(on_oom=None)")
    ways.add_argument("--by-name", dest="how", action="store_const", const="by name", help='as with on_oom="split"')
    parser.set_defaults(how="direct")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    quieten()
    torch.set_num_threads(1)
    os.chdir(tempfile.mkdtemp())  # for the reports
    good = equality(options)
    print("\nall as expected" if good else "\nfailed")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
