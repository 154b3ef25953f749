"""What a run records as its measured peak, against another process that polls its memory, in 40 life cycles.

    python benchmarks/lifecycles.py [name or width ...]

Ten ways that a training lives (checkpoints of all kinds, a resume, validation, a second fit, a test after it) with two
optimizers and two sizes of model, on the CPU. Truth is read every millisecond from outside: anonymous resident memory
from before each `trainer.fit` on, plus the model and its gradients, which were there before. Pages of mapped files are
left out, as they are in what is recorded: PyTorch's libraries come in while a first step runs.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

LIVES: dict[str, dict[str, Any] | None] = {
    "fresh": None,
    "checkpoint each epoch": {},
    "weights only": {"save_weights_only": True},
    "checkpoint each 3 steps": {"every_n_train_steps": 3},
    "last checkpoint": {"save_last": True},
    "resumed": None,
    "resumed, checkpoint each epoch": {},
    "validation between": None,
    "two fits": None,
    "test after": None,
}


def train(life: str, optimizer: str, width: int) -> None:
    """Live once, and print what was recorded."""
    import pytorch_lightning as pl
    import torch
    from pytorch_lightning.callbacks import ModelCheckpoint
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_memguard import MemGuard
    from lightning_memguard.core.device.malloc import trim_heap
    from shared.truth import QUIET

    class Module(pl.LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.training_step(batch, batch_idx))

        test_step = validation_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD}[optimizer](self.parameters(), 1e-5)

    def begin(module: Module) -> None:
        trim_heap()
        left = (each.grad.nbytes for each in module.parameters() if each.grad is not None)
        print("BEGUN", time.time(), sum(each.nbytes for each in module.parameters()) + sum(left), flush=True)

    def trainer(guard: MemGuard | None, epochs: int = 2) -> pl.Trainer:
        how = LIVES[life] if guard else None
        saving = [] if how is None else [ModelCheckpoint("checkpoints", **how)]
        settings = {**QUIET, "enable_checkpointing": bool(saving), "accelerator": "cpu", "max_epochs": epochs}
        return pl.Trainer(**settings, callbacks=[*([guard] if guard else []), *saving])

    torch.set_num_threads(1)
    module, data = Module(width), DataLoader(TensorDataset(torch.randn(128, width)), 32)
    resumed = None
    if life.startswith("resumed"):
        resumed = Path("resumed.ckpt")
        if not resumed.exists():
            first = trainer(None, 1)
            first.fit(module, data)
            first.save_checkpoint(resumed)
            return
    small = DataLoader(TensorDataset(torch.randn(8, 8)), 4)
    trainer(MemGuard("check"), 1).fit(Module(8), small)  # loads what is loaded once
    guard = MemGuard("check")
    run = trainer(guard)
    begin(module)
    run.fit(module, data, data if life == "validation between" else None, ckpt_path=resumed)
    records = list(guard.records)
    if life == "test after":
        run.test(module, data, verbose=False)
    if life == "two fits":
        begin(module)
        trainer(guard).fit(module, data)
        records += guard.records
    most = max(records, key=lambda record: record.measured.peak_bytes)
    print("RESULT", most.predicted.peak_device_bytes, most.measured.peak_bytes, flush=True)


def resident(pid: int) -> int:
    """Anonymous resident memory of a process; 0 if it has ended."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    # man 5 proc: size, resident, and of it what is in files or shared memory
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def lived(life: str, optimizer: str, width: int) -> tuple[int, int, int]:
    """Predicted, measured, and the truth from outside."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--child", life, optimizer, str(width)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        if life.startswith("resumed"):
            subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
        out = Path(folder) / "out.txt"
        with out.open("w") as stream:
            child = subprocess.Popen(command, cwd=folder, env=env, stdout=stream, stderr=subprocess.STDOUT)
            samples = []
            while child.poll() is None:
                samples.append((time.time(), resident(child.pid)))
                time.sleep(0.001)
        lines = [line.split() for line in out.read_text().splitlines() if line.strip()]
    fits = [(float(words[1]), int(words[2])) for words in lines if words[0] == "BEGUN"]
    truths = []
    for (begun, model), (end, _) in zip(fits, [*fits[1:], (math.inf, 0)], strict=True):
        taken = [nbytes for moment, nbytes in samples if begun <= moment < end]
        truths.append(max(taken) - taken[0] + model)
    predicted, measured = map(int, lines[-1][1:])
    return predicted, measured, max(truths)


def main() -> None:
    """Print a line for each life, and how many are within 2 %."""
    if sys.argv[1:2] == ["--child"]:
        return train(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    asked = [each for each in sys.argv[1:] if not each.isdigit()] or list(LIVES)
    widths = [int(each) for each in sys.argv[1:] if each.isdigit()] or [2048, 3072]
    errors = []
    for life, optimizer, width in product(asked, ("Adam", "SGD"), widths):
        predicted, measured, truth = lived(life, optimizer, width)
        errors.append(measured / truth - 1)
        mib = (f"{nbytes / 2**20:8.1f}" for nbytes in (predicted, measured, truth))
        off = f"MiB {errors[-1]:+.1%} {predicted / truth - 1:+.1%}"
        print(f"{life:32} {optimizer:5} {width}", *mib, off, flush=True)
    near = sum(abs(error) <= 0.02 for error in errors)
    print(f"measured within 2 % of the truth: {near} of {len(errors)}; worst {max(errors, key=abs):+.1%}")
    return None


if __name__ == "__main__":
    main()
