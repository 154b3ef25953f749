"""What BatchSizeFinder and MemGuard do in situations where BatchSizeFinder is known to go wrong.

Each scenario is a small training in a separate process, in an empty folder, under a time limit. It reports what it saw:
no result is written down in advance, and each verdict follows from the numbers next to it.

    python benchmarks/finder_defects.py                        # the whole table
    python benchmarks/finder_defects.py --only resume ddp      # some of it
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BatchSizeFinder, EMAWeightAveraging
from pytorch_lightning.utilities.memory import is_oom_error
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from shared.truth import QUIET, quieten

WHO = ("BatchSizeFinder", "MemGuard")
SECONDS_AT_MOST = 150
MIB = 1 << 20


@dataclass(frozen=True)
class Seen:
    """What one scenario saw of one of the two, and the verdict."""

    text: str
    verdict: str


@dataclass(frozen=True)
class Trial:
    """One run of the training loop: the requested batch size, and what existed while it ran."""

    batch_size: int
    callbacks: int
    files: dict[str, int]
    callback_bytes: int = 0  # what other callbacks hold
    batches: list[int] = field(default_factory=list)
    validated: list[int] = field(default_factory=list)


class Net(pl.LightningModule):
    """A linear layer that keeps a `Trial` for each run of the loop; the last is the real training."""

    def __init__(self, samples: int = 256, batch_size: int = 2, copies: int = 1, validation: int = 0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
        self.dataset = TensorDataset(torch.randn(samples, 16))
        self.batch_size = batch_size
        self.copies = copies  # of each sample, on the way to the loss: 65536 of them take 4 MiB
        self.validation = validation
        self.trials: list[Trial] = []
        self.optimizer_steps = 0
        self.held_by_callback: Callable[[], list[torch.Tensor]] = list

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        size = self.validation
        return DataLoader(TensorDataset(torch.randn(2 * size, 16)), batch_size=size) if size else []

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0]).repeat(1, self.copies).relu().mean()

    def on_train_start(self) -> None:
        files = {path.name: path.stat().st_size for path in Path().rglob("*.ckpt")}
        held = sum(tensor.nbytes for tensor in self.held_by_callback())
        self.trials.append(Trial(self.batch_size, len(self.trainer.callbacks), files, held))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        if self.trials:  # empty if a step is only predicted, on a copy
            self.trials[-1].batches.append(len(batch[0]))
        return self.loss(batch)

    def validation_step(self, batch: Any, _: int) -> None:
        if self.trials:
            self.trials[-1].validated.append(len(batch[0]))
        self.loss(batch)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.optimizer_steps += 1
        super().optimizer_step(*args, **kwargs)


class Start(pl.Callback):
    """Records the state in which the real training starts: no callback runs in BatchSizeFinder's trials."""

    def __init__(self) -> None:
        self.epoch = self.step = self.searched_steps = self.batch_size = -1
        self.weights: list[torch.Tensor] = []
        self.optimizer_state = 0
        self.random_states: dict[str, str] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epoch, self.step = trainer.current_epoch, trainer.global_step
        self.searched_steps = pl_module.optimizer_steps
        self.batch_size = pl_module.batch_size
        self.weights = [parameter.detach().clone() for parameter in pl_module.parameters()]
        self.optimizer_state = len(trainer.optimizers[0].state)
        self.random_states = {
            "torch": str(torch.get_rng_state().tolist()),
            "numpy": str(np.random.get_state()),  # noqa: NPY002 - the state that a search disturbs
            "python": str(random.getstate()),
        }


def chooser(who: str, largest: int, smallest: int = 2, **settings: Any) -> pl.Callback:
    if who == "MemGuard":
        return MemGuard(max_batch_size=largest, **settings)
    return BatchSizeFinder("power", steps_per_trial=3, init_val=smallest, max_val=largest)


def trainer_with(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        **QUIET,
        "num_sanity_val_steps": 0,
        "default_root_dir": ".",
    }
    return pl.Trainer(**{**defaults, **settings}, callbacks=list(callbacks))


def fitted(trainer: pl.Trainer, net: Net, **settings: Any) -> str:
    """Train; return the first line of the error, if any."""
    try:
        trainer.fit(net, **settings)
    except Exception as error:  # noqa: BLE001 - any error is a result
        if is_oom_error(error) or isinstance(error, MemoryError):
            return "an allocation failed"
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:150]
    return ""


def chosen(guard: pl.Callback) -> int | None:
    if isinstance(guard, MemGuard):
        return guard.decision.batch_size if guard.decision else None
    return guard.optimal_batch_size


def not_tuned_because(guard: pl.Callback) -> str:
    """Why MemGuard did not tune the run, if it did not."""
    decision = getattr(guard, "decision", None)
    if decision is None or decision.outcome in ("tuned", "unchanged"):
        return ""
    return f" ({decision.outcome}: {decision.reason})"


def limit_address_space(room_mib: int) -> None:
    """Let an allocation past this much more memory fail, as on a full GPU."""
    torch.ones(MIB).add_(1).sum()  # start the worker threads first
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room_mib * MIB, resource.RLIM_INFINITY))


# -- the scenarios


def resume(who: str) -> Seen:
    """Two epochs are trained and saved; the training resumes to four."""
    first, second = Net(64, 8), Net(64, 8)
    trainer = trainer_with(chooser(who, 8, 8), max_epochs=2)
    fitted(trainer, first)
    trainer.save_checkpoint("two_epochs.ckpt")
    guard, start = chooser(who, 32, 8), Start()
    resumed = trainer_with(guard, start, max_epochs=4)
    error = fitted(resumed, second, ckpt_path="two_epochs.ckpt")
    same = bool(start.weights) and all(map(torch.equal, start.weights, first.parameters()))
    trained = len(second.trials[-1].batches) if second.trials else 0
    sizes = sorted(set(second.trials[-1].batches)) if second.trials else []
    stale = "" if sizes == [start.batch_size] else ", attribute stale"
    kept = (start.epoch, start.step, same) == (2, trainer.global_step, True) and start.optimizer_state == 2
    verdict = f"kept{stale}" if kept and not error else f"lost{stale}"
    return Seen(
        f"saved at epoch 2, step {trainer.global_step}, batch size {first.batch_size}; started at epoch {start.epoch}, "
        f"step {start.step}, {'the' if same else 'not the'} saved weights, optimizer state of {start.optimizer_state} "
        f"of 2 parameters; module.batch_size {start.batch_size}, then {trained} steps on batches of {sizes}"
        f"{'; ' + error if error else ''}",
        verdict,
    )


def first_trial(who: str) -> Seen:
    """The search should start at 16; the loader has 4."""
    net = Net(256, 4)
    guard = chooser(who, 64, 16)
    fitted(trainer_with(guard), net)
    *trials, training = net.trials
    runs = [(trial.batch_size, sorted(set(trial.batches[:3]))) for trial in [*trials, training]]
    wrong = [size for size, seen in runs if seen != [size]]
    listed = ", ".join(f"{size} ran on batches of {'/'.join(map(str, seen))}" for size, seen in runs[:2])
    text = f"{len(trials)} trials; {'trials of ' if trials else 'the training at '}{listed}"
    return Seen(text, "on the old loader" if wrong else "as requested")


def untested_maximum(who: str) -> Seen:
    """At most 64 may be chosen; 64 needs about 1 GiB, and there are 700 MiB."""
    net = Net(256, 2, copies=65536)
    limit_address_space(700)
    guard, start = chooser(who, 64), Start()
    error = fitted(trainer_with(guard, start, limit_train_batches=2), net)
    tried = [size for trial in (net.trials[:-1] if start.step == 0 else net.trials) for size in trial.batches]
    text = f"chose {chosen(guard)}; largest batch really tried before: {max(tried, default='none')}"
    return Seen(f"{text}; then {error or 'trained'}", "does not train" if error else "trains")


def larger_than_dataset(who: str) -> Seen:
    """The attribute is 100, the dataset 32; 32 need about 512 MiB, and there are 350."""
    net = Net(32, 100, copies=65536)
    limit_address_space(350)
    guard, start = chooser(who, 8192), Start()
    error = fitted(trainer_with(guard, start), net)
    trials = net.trials[:-1] if start.step == 0 else net.trials
    sizes = sorted({trial.batch_size for trial in trials})
    tried = f"{len(trials)} trials at {sizes}" if trials else "0 trials"
    return Seen(
        f"{tried}; attribute 100 -> {net.batch_size}; then {error or 'trained'}",
        "shrunk" if net.batch_size <= 32 and not error else "never shrinks",
    )


def validation(who: str) -> Seen:
    """Training's batches are of at most 8; validation's are of 128, which need about 1 GiB, and there are 700 MiB."""
    net = Net(64, 2, copies=65536, validation=128)
    limit_address_space(700)
    guard, start = chooser(who, 8), Start()
    error = fitted(trainer_with(guard, start), net)
    *trials, training = net.trials
    steps = sum(len(trial.validated) for trial in trials)
    before = f"{len(trials)} trials with {steps} validation steps"
    if isinstance(guard, MemGuard) and guard.decision:
        before = f"0 trials; chose {guard.decision.validation_batch_size} for validation"
    ended = f"validation at {sorted(set(training.validated))} {'failed: ' + error if error else 'ran'}"
    return Seen(f"{before}; after {len(training.batches)} training steps {ended}", "fails" if error else "fits")


class Scheduled(Net):
    """Plans its learning rate over all the steps that the Trainer estimates."""

    planned = 0

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.planned = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.planned)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def estimated_stepping_batches(who: str) -> Seen:
    """A OneCycle schedule over `trainer.estimated_stepping_batches`, 4 epochs."""
    net = Scheduled(1024, 2)
    trainer = trainer_with(chooser(who, 32), max_epochs=4)
    error = fitted(trainer, net)
    rate = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else float("nan")
    return Seen(
        f"planned {net.planned} steps, trained {trainer.global_step}; last learning rate {rate:.1e}"
        f"{'; ' + error if error else ''}",
        "as planned" if net.planned == trainer.global_step else "stale",
    )


def random_state(who: str) -> Seen:
    """The random states in which training starts, versus those of a training without either."""
    starts = []
    for callbacks in ([], [chooser(who, 32)]):
        pl.seed_everything(7)
        net, start = Noisy(256, 2), Start()
        torch.manual_seed(11)
        fitted(trainer_with(*callbacks, start), net)
        starts.append(start.random_states)
    plain, guarded = starts
    same = {name: plain[name] == guarded[name] for name in plain}
    compared = ", ".join(f"{name} {'the same' if equal else 'changed'}" for name, equal in same.items())
    return Seen(f"{compared} (versus a plain training)", "kept" if all(same.values()) else "not restored")


class Noisy(Net):
    """A loader that shuffles and a step that draws from all three generators."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, batch_size=self.batch_size, shuffle=True)

    def loss(self, batch: Any) -> torch.Tensor:
        noise = torch.randn(()) * 0 + random.random() + float(np.random.rand())  # noqa: NPY002 - as above
        return super().loss(batch) * noise


class Wide(Net):
    """16 MiB of weights."""

    def __init__(self) -> None:
        super().__init__(256, 2)
        self.wide = torch.nn.Linear(16, 1 << 18, bias=False)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.wide(self.layer(batch[0])).mean()


class CountedAverage(EMAWeightAveraging):
    """Lightning's callback, which also counts its updates."""

    updates = 0

    def tensors(self) -> list[torch.Tensor]:
        return list(self._average_model.parameters()) if self._average_model is not None else []

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        update = super().should_update(step_idx, epoch_idx)
        self.updates += update
        return update


def averaged(who: str) -> Seen:
    """EMAWeightAveraging keeps a copy of 16 MiB of weights."""
    net, guard = Wide(), chooser(who, 8)
    average = CountedAverage()
    net.held_by_callback = average.tensors
    fitted(trainer_with(guard, average), net)
    *trials, training = net.trials
    if not isinstance(guard, MemGuard):
        held = {round(trial.callback_bytes / MIB) for trial in trials}
        counts = sorted({trial.callbacks for trial in trials})
        return Seen(
            f"{len(trials)} trials with {counts} of {training.callbacks} callbacks; "
            f"a copy of {sorted(held)} MiB was held (it is created at setup); updated {average.updates} times, by "
            f"{net.optimizer_steps} steps of which {len(training.batches)} belong to the training",
            "seen" if average.updates == net.optimizer_steps else "held, not run",
        )
    without = chooser(who, 8)
    fitted(trainer_with(without), Wide())
    if not (guard.decision and guard.decision.footprint and without.decision and without.decision.footprint):
        return Seen(f"nothing predicted{not_tuned_because(guard)}", "invisible")
    predicted = [each.decision.footprint.peak_allocated_bytes for each in (guard, without)]
    copy_bytes = sum(parameter.nbytes for parameter in net.parameters())
    more = predicted[0] - predicted[1]
    text = f"predicted {more / MIB:.1f} MiB more with the average than without; its copy takes {copy_bytes / MIB:.1f}"
    return Seen(text, "seen" if more >= copy_bytes else "invisible")


class OwnAverage(pl.Callback):
    """A typical hand-written average: its copy is created when the fit starts."""

    def __init__(self) -> None:
        self.copy: list[torch.Tensor] = []

    def tensors(self) -> list[torch.Tensor]:
        return self.copy

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.copy = [parameter.detach().clone() for parameter in pl_module.parameters()]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for mine, theirs in zip(self.copy, pl_module.parameters(), strict=True):
            mine.lerp_(theirs.detach(), 0.01)


def own_average(who: str) -> Seen:
    """A custom callback copies 16 MiB of weights in `on_fit_start`, after the chooser's."""
    net, guard, average = Wide(), chooser(who, 8), OwnAverage()
    net.held_by_callback = average.tensors
    fitted(trainer_with(guard, average), net)
    *trials, training = net.trials
    if not isinstance(guard, MemGuard):
        held = sorted({round(trial.callback_bytes / MIB) for trial in trials})
        text = f"held in {len(trials)} trials: {held} MiB; in the training: {round(training.callback_bytes / MIB)} MiB"
        return Seen(text, "seen" if all(trial.callback_bytes for trial in trials) else "invisible")
    decision = guard.decision
    predicted = decision.footprint.parts.get("callbacks", 0) if decision and decision.footprint else 0
    copy_bytes = sum(parameter.nbytes for parameter in net.parameters())
    text = f"predicted {predicted / MIB:.1f} MiB held by callbacks; the copy takes {copy_bytes / MIB:.1f}"
    return Seen(text, "seen" if predicted >= copy_bytes else "invisible")


def plain_loader(who: str) -> Seen:
    """`trainer.fit(model, train_dataloaders=loader)`."""
    net, guard = Net(), chooser(who, 32)
    error = fitted(trainer_with(guard), net, train_dataloaders=DataLoader(net.dataset, batch_size=2))
    if error:
        return Seen(error, "refused")
    sizes = sorted(set(net.trials[-1].batches))
    return Seen(f"chose {chosen(guard)}, trained on batches of {sizes}", "done" if sizes == [32] else "left alone")


def ddp(who: str) -> Seen:
    """Two gloo processes on the CPU; the Trainer starts the second one."""
    net, guard = Net(), chooser(who, 32)
    trainer = trainer_with(guard, strategy="ddp", devices=2)
    error = fitted(trainer, net)
    if error:
        return Seen(error, "refused")
    sizes = sorted(set(net.trials[-1].batches))
    ranks: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(ranks, sizes)
    text = f"{trainer.world_size} ranks trained on batches of {ranks}, {trainer.global_step} steps"
    return Seen(text + not_tuned_because(guard), "done" if ranks == [[32], [32]] else "left alone")


def optimizer_steps(who: str) -> Seen:
    """How many times the optimizer has stepped before the real training starts."""
    net, guard, start = Net(), chooser(who, 32), Start()
    fitted(trainer_with(guard, start), net)
    sizes = [trial.batch_size for trial in net.trials[:-1]]
    text = f"{start.searched_steps} optimizer steps before the first; {len(sizes)} trials at {sizes}"
    return Seen(text, "none" if not start.searched_steps else f"{start.searched_steps / len(sizes):.0f} a size")


def checkpoint_on_disk(who: str) -> Seen:
    """Files on disk during the search; Adam, 16 MiB of weights, `enable_checkpointing=False`."""
    net, guard = Wide(), chooser(who, 32)
    written: list[Path] = []
    save = torch.save

    def saved(what: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        written.append(Path(str(target)))
        save(what, target, *args, **kwargs)

    torch.save = saved  # type: ignore[assignment]
    fitted(trainer_with(guard), net)
    *trials, _ = net.trials
    files = {name: size for trial in trials for name, size in trial.files.items()}
    total = sum(files.values()) / MIB
    text = f"{len(files)} checkpoint file(s), {total:.1f} MiB, seen in {len(trials)} trials; torch.save called"
    return Seen(f"{text} {len(written)} time(s)", "none" if not files and not written else f"{len(files)} a search")


SCENARIOS: dict[str, tuple[str, Callable[[str], Seen]]] = {
    "resume": ("Resuming from ckpt_path", resume),
    "first_trial": ("The first trial's loader", first_trial),
    "maximum": ("The largest size allowed", untested_maximum),
    "dataset": ("An attribute larger than the dataset", larger_than_dataset),
    "validation": ("Validation larger than training", validation),
    "schedule": ("estimated_stepping_batches", estimated_stepping_batches),
    "random": ("Random state", random_state),
    "average": ("EMAWeightAveraging's copy", averaged),
    "own_average": ("A copy that another callback makes", own_average),
    "loader": ("A plain loader passed to fit", plain_loader),
    "ddp": ("DDP, two processes", ddp),
    "steps": ("Optimizer steps to choose", optimizer_steps),
    "disk": ("Checkpoints on disk", checkpoint_on_disk),
}


# -- running them


def in_a_process(scenario: str, who: str) -> Seen:
    """Run one scenario for one of the two in a separate process; its children end with it."""
    words = [sys.executable, str(Path(__file__).resolve()), "--run", scenario, "--who", who]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, errors = process.communicate(timeout=SECONDS_AT_MOST)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Seen(f"not done after {SECONDS_AT_MOST} s", "hangs")
    for line in reversed(out.splitlines()):
        if line.startswith('{"text"'):
            return Seen(**json.loads(line))
    return Seen((errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1][:200], "failed")


def print_defects(names: list[str]) -> None:
    """Run the scenarios, two at a time, and print what each of the two did."""
    cells = [(name, who) for name in names for who in WHO]
    with ThreadPoolExecutor(2) as pool:
        seen = dict(zip(cells, pool.map(lambda cell: in_a_process(*cell), cells), strict=True))
    table = Table(title=f"Results on Lightning {pl.__version__} and torch {torch.__version__}", show_lines=True)
    table.add_column("Situation", ratio=2)
    for who in WHO:
        table.add_column(f"{who}", ratio=5, overflow="fold")
        table.add_column("verdict", ratio=1)
    for name in names:
        finder, guard = (seen[name, who] for who in WHO)
        table.add_row(SCENARIOS[name][0], finder.text, finder.verdict, guard.text, guard.verdict)
    console = Console()
    (console if console.is_terminal and console.width >= 150 else Console(width=170)).print(table)


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--run", choices=SCENARIOS, help=argparse.SUPPRESS)
    parser.add_argument("--who", choices=WHO, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.run:
        print_defects(options.only)
        return
    quieten()
    seen = SCENARIOS[options.run][1](options.who)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(json.dumps(asdict(seen)), flush=True)


if __name__ == "__main__":
    main()
