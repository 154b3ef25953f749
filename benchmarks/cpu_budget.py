"""Is a budget on the CPU kept? Fits with MemGuard in mode "tune", each in a process that counts its own memory.

The count is the kernel's (VmHWM): how far the process's peak rose above what it held just before `trainer.fit`, plus
the model, which was there before. Pages of mapped files are left out, since the kernel drops them at need. The last
column counts them too; each process is forked from one that has imported everything, and those of the libraries it
uses come in again. Families of the zoo, a GPT-2 with low-rank adapters, an encoder and decoder; `torch.save` in the
step; a fit after another in one process; with and without a logger, validation and workers; on one thread and on two.

    python benchmarks/cpu_budget.py                        # this checkout
    python benchmarks/cpu_budget.py --checkout PATH        # another one of the package, such as of `git worktree add`
    python benchmarks/cpu_budget.py --only lora --json results.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import io
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shared.truth import QUIET, quieten
from shared.zoo import CASES, GPT, Case, language_model, next_tokens

_MIB = 1 << 20
_LENGTH = 1_000_000  # samples: no choice is limited by the dataset
_STEPS = 3
_SECONDS = 600


# Models --------------------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A linear layer that stays as it is, and an adapter that learns."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(requires_grad=False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(F.dropout(self.down(x), 0.05, self.training))


def lora_gpt() -> nn.Module:
    """A GPT-2 of six layers, frozen, with adapters at its attention."""
    model = GPT(vocabulary=4096, tokens=64, width=384, heads=6, depth=6, dropout=0.1).requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.project = LowRank(block.qkv), LowRank(block.project)
    return model


class EncoderDecoder(nn.Module):
    """An encoder and a decoder, as T5 has them."""

    def __init__(self, vocabulary: int = 2048, width: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(width, 4, 3, 3, 4 * width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.transformer(x, x))


MODELS = (
    *CASES,
    Case("lora", language_model(lora_gpt), next_tokens(4096, 64), (4, 8, 16)),
    Case("t5", language_model(EncoderDecoder), next_tokens(2048, 48), (4, 8, 16)),
)


def case_named(name: str) -> Case:
    return next(case for case in MODELS if case.name == name)


# The runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One fit under a budget."""

    case: str
    budget_mib: int
    optimizer: str = "adam"
    extras: tuple[str, ...] = ()  # see `fit`
    threads: int = 2
    workers: int = 0

    @property
    def title(self) -> str:
        workers = f"{self.workers} workers" if self.workers else ""
        return ", ".join(filter(None, (self.case, *self.extras, workers, f"{self.threads} threads")))


RUNS = (
    Run("mlp", 60),
    Run("mlp", 120, "sgd", threads=1),
    Run("mlp", 200, extras=("tensorboard",)),
    Run("mlp", 80, extras=("save",)),
    Run("mlp", 100, extras=("second",)),
    Run("mlp", 512, "sgd", workers=2),
    Run("cnn_batch_norm", 60),
    Run("cnn_batch_norm", 100, threads=1),
    Run("cnn_batch_norm", 150, workers=2),
    Run("cnn_batch_norm", 80, extras=("second",)),
    Run("cnn_batch_norm", 120, extras=("csv", "validation")),
    Run("cnn_batch_norm", 60, extras=("save",)),
    Run("resnet", 60, threads=1),
    Run("resnet", 100),
    Run("resnet", 150, "sgd", extras=("tensorboard",)),
    Run("resnet", 80, extras=("validation",)),
    Run("resnet", 60, extras=("second", "guarded first")),
    Run("unet", 60),
    Run("unet", 100, threads=1),
    Run("unet", 120, extras=("tensorboard", "validation")),
    Run("unet", 100, extras=("second", "guarded first")),
    Run("lstm", 60),
    Run("lstm", 120, threads=1),
    Run("lstm", 200, extras=("csv",)),
    Run("lstm", 60, extras=("second",)),
    Run("transformer", 60),
    Run("transformer", 100, extras=("tensorboard",), threads=1),
    Run("transformer", 80, "sgd", ("validation",)),
    Run("transformer", 80, extras=("save",)),
    Run("transformer", 200, workers=2),
    Run("gpt", 60),
    Run("gpt", 100, "adamw", threads=1),
    Run("gpt", 150, extras=("tensorboard",)),
    Run("gpt", 60, extras=("second",)),
    Run("gpt_fused_attention", 80),
    Run("gan", 60),
    Run("gan", 100, extras=("tensorboard",), threads=1),
    Run("autoencoder", 80),
    Run("two_optimizers", 100),
    Run("clip_by_norm", 60, "adamw"),
    Run("accumulate_4", 80, extras=("csv",)),
    Run("contrastive", 80),
    Run("contrastive", 1024, "sgd"),
    Run("contrastive", 2048, threads=1),
    Run("logged", 80, "adamw", ("tensorboard",), workers=2),
    Run("lora", 150),
    Run("lora", 200, extras=("tensorboard",), threads=1),
    Run("lora", 150, extras=("second",)),
    Run("t5", 100),
    Run("t5", 120, extras=("csv",), threads=1),
)


@dataclass(frozen=True)
class Taken:
    """What a run took of its budget, in MiB."""

    batch_size: int
    predicted: float
    most: float  # what the decision compared with the budget
    reported: float  # as MemGuard measured it
    taken: float
    with_files: float
    seconds: float
    warned: list[str] = field(default_factory=list)


# One run, in a process of its own ------------------------------------------------------------------------------------


class Saving(pl.Callback):
    """Serializes the whole module after each step."""

    def on_train_batch_end(self, trainer: Any, pl_module: pl.LightningModule, *_: Any) -> None:
        torch.save(pl_module.state_dict(), io.BytesIO())


class Watch(pl.Callback):
    """Reads the process's peak before anybody resets it, and at the end. The first of the callbacks."""

    def __init__(self) -> None:
        self.at_start = status()
        self.peaks: list[tuple[float, float]] = []

    def read(self) -> None:
        now = status()
        grown = now["VmHWM"] - self.at_start["VmRSS"]
        self.peaks.append((grown - max(0.0, now["RssFile"] - self.at_start["RssFile"]), grown))

    def on_fit_start(self, *_: Any) -> None:
        self.read()

    on_train_start = on_train_epoch_start = on_validation_start = on_train_epoch_end = on_fit_end = on_fit_start


def status() -> dict[str, float]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) / 1024 for words in lines if words[2:] == ["kB"]}


def trainer_of(case: Case, folder: str, extras: tuple[str, ...], *callbacks: pl.Callback) -> pl.Trainer:
    from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

    logger = TensorBoardLogger(folder) if "tensorboard" in extras else CSVLogger(folder) if "csv" in extras else False
    settings = {**QUIET, "logger": logger, **case.trainer_kwargs}
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=_STEPS,
        limit_val_batches=2,
        log_every_n_steps=1,
        default_root_dir=folder,
        callbacks=[*callbacks, *([Saving()] if "save" in extras else [])],
        **settings,
    )


def validated(module: pl.LightningModule) -> pl.LightningModule:
    """The module, which validates as it trains."""
    kind = type(module)
    step = lambda self, batch, batch_idx: self.training_step(batch, batch_idx) and None  # noqa: E731
    module.__class__ = type(kind.__name__, (kind,), {"validation_step": step})
    return module


def fit(run: Run, folder: str) -> Taken:
    from lightning_memguard import MemGuard

    quieten()
    warnings.simplefilter("always")
    torch.set_num_threads(run.threads)
    torch.manual_seed(0)
    case = case_named(run.case)

    def loader() -> DataLoader:
        return DataLoader(case.dataset(_LENGTH), batch_size=case.batch_sizes[0], num_workers=run.workers)

    if "second" in run.extras:  # as in a notebook
        first = [MemGuard(budget=2 * run.budget_mib * _MIB)] if "guarded first" in run.extras else []
        module = case.build(run.optimizer)
        trainer = trainer_of(case, folder, (), *first)
        trainer.fit(module, loader())
        del module, trainer, first
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else the count would start high, and miss as much

    module = case.build(run.optimizer)
    module = validated(module) if "validation" in run.extras else module
    guard = MemGuard(budget=run.budget_mib * _MIB)
    model = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers())) / _MIB
    loaders = [loader(), *([loader()] if "validation" in run.extras else [])]
    trainer = trainer_of(case, folder, run.extras)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    watch = Watch()
    trainer.callbacks[:0] = [watch, guard]
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        trainer.fit(module, *loaders)
    seconds = time.perf_counter() - started
    watch.read()
    taken, with_files = (model + max(peaks) for peaks in zip(*watch.peaks, strict=True))
    decision = guard.decision
    return Taken(
        decision.batch_size,
        decision.footprint.peak_device_bytes / _MIB,
        decision.footprint.most_device_bytes / _MIB,
        max(record.measured.peak_bytes for record in guard.records) / _MIB,
        taken,
        with_files,
        seconds,
        [str(each.message) for each in caught if "MemGuard" in str(each.message) or "emory" in str(each.message)],
    )


# All runs ------------------------------------------------------------------------------------------------------------


def in_a_process(run: Run) -> Taken | str:
    """What the run took, or what went wrong. The process is forked from this one, which has imported everything."""
    with tempfile.TemporaryDirectory() as folder:
        answer, output = Path(folder, "answer"), Path(folder, "output")
        child = os.fork()
        if child == 0:
            with output.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                os.environ["TMPDIR"] = folder
                try:
                    answer.write_text(json.dumps(asdict(fit(run, folder))))
                except BaseException as error:  # noqa: BLE001 - it is the answer
                    answer.write_text(json.dumps(f"{type(error).__name__}: {error}".splitlines()[0]))
                os._exit(0)
        ends = time.monotonic() + _SECONDS
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > ends:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.1)
        found = json.loads(answer.read_text()) if answer.is_file() else "it ended without a word"
    return found if isinstance(found, str) else Taken(**found)


def line(run: Run, taken: Taken | str) -> str:
    title = f"{run.title:<50} {run.budget_mib:>6}"
    if isinstance(taken, str):
        return f"{title} {taken}"
    over = 100 * (taken.taken / run.budget_mib - 1)
    return (
        f"{title} {taken.batch_size:>6} {taken.predicted:>9.1f} {taken.most:>7.1f} {taken.reported:>9.1f} "
        f"{taken.taken:>7.1f} {over:>+7.1f} % {taken.with_files:>9.1f} {taken.seconds:>6.0f}"
    )


def summary(results: list[tuple[Run, Taken | str]]) -> str:
    taken = [(run, each) for run, each in results if isinstance(each, Taken)]
    shares = [100 * each.taken / run.budget_mib for run, each in taken]
    over = sorted(share - 100 for share in shares if share > 100)
    with_files = sum(each.with_files > run.budget_mib for run, each in taken)
    worst = f", by {over[0]:.1f} to {over[-1]:.1f} %" if over else ""
    return (
        f"{len(taken)} of {len(results)} runs trained. {len(over)} overran their budget{worst} "
        f"({sum(each > 3 for each in over)} by more than 3 %); {with_files} with pages of files counted. "
        f"Share of the budget used: median {statistics.median(shares):.0f} %, least {min(shares):.0f} %."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1], help="of the package to measure")
    parser.add_argument("--only", nargs="+", default=[""], help="runs whose title contains one of these words")
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.checkout.resolve()))
    from pytorch_lightning import loggers  # noqa: F401 - for the processes that are forked

    import lightning_memguard

    if arguments.checkout.resolve() not in Path(lightning_memguard.__file__).parents:
        raise SystemExit(f"{lightning_memguard.__file__} is not the package of {arguments.checkout}.")
    runs = [run for run in RUNS if any(word in run.title for word in arguments.only)]
    print(
        f"{'MiB':<50} {'budget':>6} {'size':>6} {'predicted':>9} {'most':>7} {'MemGuard':>9} {'taken':>7} "
        f"{'over':>9} {'+ files':>9} {'s':>6}",
        flush=True,
    )
    results: list[tuple[Run, Taken | str]] = []
    for run in runs:
        results.append((run, in_a_process(run)))
        print(line(*results[-1]), flush=True)
        if arguments.json:
            written = [{**asdict(r), "result": t if isinstance(t, str) else asdict(t)} for r, t in results]
            arguments.json.write_text(json.dumps(written, indent=1))
    print(summary(results))


if __name__ == "__main__":
    main()
