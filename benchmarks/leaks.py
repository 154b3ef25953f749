"""Planted leaks: are they named, with the epoch at which memory ends? And is all quiet about programs without one?

Each leak of `shared/leaky.py` is trained under a budget, in a fork of this process. The truth is its resident memory,
read at each batch by a callback of ours: the first epoch in which its peak has grown by more than the budget.

    python benchmarks/leaks.py                    # the leaks
    python benchmarks/leaks.py --only dataset     # those whose name contains this
    python benchmarks/leaks.py --quiet            # programs of field.py, the zoo, step_programs.py leave nothing
    python benchmarks/leaks.py --quiet --train    # the same, trained for some epochs
"""

import argparse
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch.utils.data import DataLoader

from lightning_memguard import MemGuard
from shared.leaky import LEAKS, Leak, loader, random_data
from shared.process import in_fork, memory_of, script
from shared.step_programs import PROGRAMS
from shared.truth import QUIET
from shared.zoo import CASES, Case

FIELD = Path(__file__).with_name("field.py")
MIB = 2**20
BUDGET, EPOCHS, QUIET_EPOCHS = 144 * MIB, 14, 7


class Truth(pl.Callback):
    """Resident memory of a training, next to its budget."""

    def __init__(self) -> None:
        self.base, self.ended, self.by_epoch = 0, None, []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        held = sum(parameter.nbytes for parameter in pl_module.parameters())
        self.base = memory_of("RssAnon") - held

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:
        grown = memory_of("VmHWM") - memory_of("RssFile") - self.base  # the kernel's peak, of this epoch
        if self.ended is None and grown > BUDGET:
            self.ended = trainer.current_epoch
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Any, *_: object) -> None:
        self.by_epoch.append((memory_of("RssAnon") - self.base) // MIB)


def trained(leak: Leak) -> dict[str, Any]:
    guard, truth = MemGuard(mode="check", budget=BUDGET, max_setup_seconds=None), Truth()
    own = [leak.callback()] if leak.callback else []
    data = loader((leak.dataset or random_data)())
    validation = loader(random_data()) if leak.validates else None
    trainer = pl.Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[*own, guard, truth], **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(leak.module(), data, validation)
    said = [str(each.message) for each in caught if "behind" in str(each.message)]
    end = guard.decision.runs_out_at
    return {"said": said, "predicted": end and end.epoch, "real": truth.ended, "by_epoch": truth.by_epoch}


def place_of(leak: Leak) -> str:
    """The file and line that is marked in a leak's source."""
    import shared.leaky

    def marked(owner: Any) -> list[int]:
        lines, first = inspect.getsourcelines(owner)
        return [first + index for index, line in enumerate(lines) if "# kept" in line]

    owners = [shared.leaky.load_sample] if "function" in leak.name else [leak.dataset, leak.callback, leak.module]
    owners += [shared.leaky.Tracker] if "own" in leak.name else []
    return f"leaky.py:{next(line for owner in owners if owner for line in marked(owner))}"


def check_leaks(leaks: Sequence[Leak], limit: float) -> None:
    named = close = 0
    print("| leak | named | epoch predicted | epoch real |\n| :--- | :--- | ---: | ---: |")
    for leak in leaks:
        found = in_fork(functools.partial(trained, leak), 1, limit)
        text = " ".join(found.get("said", ()))
        is_named = leak.attribute in text and place_of(leak) in text
        predicted, real = found.get("predicted"), found.get("real")
        is_close = None not in (predicted, real) and abs(predicted - real) < 2
        named, close = named + is_named, close + is_close
        print(f"| {leak.name} | {'yes' if is_named else 'NO'} | {predicted} | {real} |", flush=True)
        print(f"{leak.name}: {place_of(leak)} {found}", file=sys.stderr, flush=True)
    print(f"\nNamed with file, line and attribute: {named} of {len(leaks)}; epoch within one: {close} of {len(leaks)}.")


def programs() -> dict[str, Callable[[], tuple[Any, Any, dict[str, Any]]]]:
    """Trainings that keep nothing: a module, its data, and options of its Trainer, each made when it is asked for."""
    field, found = script(FIELD), {}

    def of_field(pattern: Any) -> tuple[Any, Any, dict[str, Any]]:
        run = pattern.make()
        return run.build(), run.data(pattern.sizes[0], pattern.steps), field.trainer_options(pattern.steps, run)

    def of_zoo(case: Case, optimizer: str) -> tuple[Any, Any, dict[str, Any]]:
        size = case.batch_sizes[0]
        data = DataLoader(case.dataset(3 * size), batch_size=size)
        return case.build(optimizer), data, {**case.trainer_kwargs, **QUIET, "accelerator": "cpu"}

    def of_step(program: Any) -> tuple[Any, Any, dict[str, Any]]:
        module, data = program.training(3)
        return module, data, {**QUIET, "accelerator": "cpu", **program.settings}

    for name, pattern in field.load_patterns().items():
        found[name] = functools.partial(of_field, pattern)
    for case in CASES:
        for optimizer in case.optimizers:
            found[f"zoo: {case.name}, {optimizer}"] = functools.partial(of_zoo, case, optimizer)
    found |= {f"step: {program.name}": functools.partial(of_step, program) for program in PROGRAMS.values()}
    return found


class StopAfter(pl.Callback):
    """Ends a training without end."""

    def on_train_epoch_end(self, trainer: Any, *_: object) -> None:
        trainer.should_stop = trainer.current_epoch >= QUIET_EPOCHS - 1


def kept_by(make: Callable[[], Any], trains: bool) -> dict[str, Any]:
    module, data, options = make()
    options |= {"max_epochs": -1}
    guard = MemGuard(mode="check", budget="1GiB", max_setup_seconds=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if trains:
            script(FIELD).fit(module, data, options, guard, StopAfter())
        else:
            script(FIELD).stop_at_first_step(module, data, options, guard)
    said = [str(each.message) for each in caught if "leaves" in str(each.message)]
    kept = [f"{each.holder} {each.line} {each.fixed_bytes} {each.lasts}" for each in guard.decision.kept]
    return {"kept": kept, "said": said, "predicted": guard.decision.footprint is not None}


def check_quiet(only: str, limit: float, trains: bool) -> None:
    checked = alarms = 0
    for name, make in programs().items():
        if only in name:
            found = in_fork(functools.partial(kept_by, make, trains), 1, limit)
            checked, alarms = checked + bool(found.get("predicted")), alarms + bool(found.get("said"))
            if not found.get("predicted") or found["kept"] or found["said"]:
                print(name, found, flush=True)
    print(f"{checked} programs {'trained' if trains else 'predicted'}, for epochs without end: {alarms} alarms.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--quiet", action="store_true", help="check programs without a leak")
    parser.add_argument("--train", action="store_true", help="train these too, for some epochs")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each")
    arguments = parser.parse_args()
    if arguments.quiet:
        check_quiet(arguments.only, arguments.limit, arguments.train)
    else:
        check_leaks([leak for leak in LEAKS if arguments.only in leak.name], arguments.limit)


if __name__ == "__main__":
    main()
