"""Ways to find a batch size that fits, side by side on the CPU, each in a process of its own whose memory is limited.

All train one CNN on the same images. The user asked for a batch size of 512, which does not fit. For each way: whether
it trained an epoch, the batch size, samples of an optimizer step, seconds before the training that counts began,
training steps taken and allocations that failed before it, and what these had left behind when it began: weights,
random state, attributes and files.

    python benchmarks/alternatives.py                        # needs accelerate and transformers for two of the rows
    python benchmarks/alternatives.py --room 384MiB --only MemGuard power
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import logging
import os
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.units import parse_bytes
from shared.process import forked

ASKED, SAMPLES = 512, 2048
Row = dict[str, Any]


class Watch:
    """Counts what happens before the training that counts, and looks at what is there when that begins."""

    def __init__(self, net: Net) -> None:
        self.row: Row = {
            "size": 0,
            "samples": 0,
            "seconds": 0.0,
            "steps": 0,
            "failures": 0,
            "trained": "no",
            "left": [],
        }
        self.started, self.net = time.perf_counter(), net
        self.before = _state(net)

    def begin(self, net: Net, size: int) -> None:
        """Note an attempt that may be the training that counts: the last one does."""
        self.row.update(seconds=time.perf_counter() - self.started, steps=net.seen, size=size)
        now = _state(net)
        self.row["left"] = [name for name in now if now[name] != self.before[name]]
        self.row["random state"] = now["random state"]


def _state(net: Net) -> dict[str, object]:
    tensors = {"weights": net.state_dict().values(), "random state": [torch.get_rng_state()]}
    hashes = {
        name: hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in found)).hexdigest()
        for name, found in tensors.items()
    }
    return {**hashes, "batch_size": net.batch_size, "files": sorted(str(path) for path in Path().rglob("*"))}


class Net(pl.LightningModule):
    """Three convolutions with batch norm."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size, self.seen = batch_size, 0
        layers = [
            part
            for channels in (3, 48, 48)
            for part in (nn.Conv2d(channels, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU())
        ]
        self.network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.seen += not torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        return loss

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:  # as transformers' Trainer calls it
        return {"loss": self.training_step([images, labels])}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data(), batch_size=self.batch_size, shuffle=True)


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SAMPLES, 3, 32, 32, generator=made), torch.randint(10, (SAMPLES,), generator=made))


class Begin(pl.Callback):
    """Notes the state when the training begins."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        size = trainer.train_dataloader.batch_size
        self.watch.begin(pl_module, size)
        self.watch.row["samples"] = size * trainer.accumulate_grad_batches


def lightning(watch: Watch, callback: Callable[[], pl.Callback] | None, loader: bool = False) -> None:
    net = watch.net
    callbacks = [*([callback()] if callback else []), Begin(watch)]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, callbacks=callbacks, **quiet)
    trainer.fit(net, *([net.train_dataloader()] if loader else []))


def finder(mode: str) -> pl.Callback:
    from pytorch_lightning.callbacks import BatchSizeFinder

    return BatchSizeFinder(mode)


def accelerate(watch: Watch) -> None:
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=ASKED)
    def train(batch_size: int) -> None:
        net = watch.net  # as made outside: a user who makes the model in here starts from new weights each time
        optimizer = torch.optim.Adam(net.parameters())
        watch.begin(net, batch_size)
        watch.row["samples"] = batch_size
        for batch in DataLoader(data(), batch_size=batch_size, shuffle=True):
            optimizer.zero_grad()
            net.training_step(batch).backward()
            optimizer.step()

    train()


def transformers(watch: Watch) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Start(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            size = state.train_batch_size
            watch.begin(watch.net, size)
            watch.row["samples"] = size * args.gradient_accumulation_steps

    def collate(rows: list[Any]) -> dict[str, Tensor]:
        return {"images": torch.stack([row[0] for row in rows]), "labels": torch.stack([row[1] for row in rows])}

    options = TrainingArguments(
        "out", per_device_train_batch_size=ASKED, auto_find_batch_size=True, num_train_epochs=1, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    Trainer(watch.net, options, train_dataset=data(), data_collator=collate, callbacks=[Start()]).train()


WAYS: dict[str, Callable[[Watch], None]] = {
    "nothing": partial(lightning, callback=None),
    "MemGuard()": partial(lightning, callback=MemGuard, loader=True),
    'MemGuard(batch_size="largest")': partial(
        lightning, callback=partial(MemGuard, batch_size="largest", min_steps_per_epoch=None), loader=True
    ),
    'BatchSizeFinder("power")': partial(lightning, callback=partial(finder, "power")),
    'BatchSizeFinder("binsearch")': partial(lightning, callback=partial(finder, "binsearch")),
    'BatchSizeFinder("binsearch"), from 2': partial(lightning, callback=partial(finder, "binsearch")),
    "BatchSizeFinder, a loader given to fit": partial(lightning, callback=partial(finder, "power"), loader=True),
    "accelerate find_executable_batch_size": accelerate,
    "transformers auto_find_batch_size": transformers,
}


def trained(way: str, room_bytes: int) -> Row:
    """Limit this process, and train in it."""
    for name in ("pytorch_lightning", "lightning_memguard", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, failures() as failed:
        os.chdir(folder)
        torch.manual_seed(0)
        with contextlib.suppress(ImportError):
            import transformers  # noqa: F401 - its imports are not a part of the comparison
        torch.ones(1 << 20).add_(1).sum()  # start the worker threads: their stacks neither
        watch = Watch(Net(2 if way.endswith("from 2") else ASKED))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + room_bytes, resource.RLIM_INFINITY))
        try:
            WAYS[way](watch)
            watch.row["trained"] = "yes"
        except Exception as error:  # noqa: BLE001 - the table has it
            watch.row["trained"] = f"no: {str(error).strip().splitlines()[0][:90]}"
        watch.row["failures"] = failed()
    return watch.row


@contextlib.contextmanager
def failures() -> Iterator[Callable[[], int]]:
    """Count the allocations that fail: steps that raise PyTorch's error for that."""
    count, original = [0], Net.training_step
    backward = Tensor.backward

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                count[0] += "can't allocate" in str(error)
                raise

        return run

    Net.training_step, Tensor.backward = counted(original), counted(backward)
    try:
        yield lambda: count[0]
    finally:
        Net.training_step, Tensor.backward = original, backward


def version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} not installed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", default="512MiB", help="memory beyond what the process has at the start")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of ways")
    options = parser.parse_args()
    names = ("pytorch-lightning", "accelerate", "transformers", "torch")
    print(
        f"{', '.join(map(version, names))}; {os.environ.get('OMP_NUM_THREADS', 'all')} threads; room {options.room}\n"
    )
    print(f"{'way':40}{'size':>6}{'samples':>9}{'seconds':>9}{'steps':>7}{'failed':>8}  {'left behind':34}trained")
    plain = ""
    for way in WAYS:
        if any(part in way for part in options.only):
            row = forked(partial(trained, way, parse_bytes(options.room)), torch.get_num_threads())
            plain = plain or row["random state"]  # Lightning itself draws from it before a training begins
            left = [name for name in row["left"] if name != "random state" or row[name] != plain]
            figures = f"{row['size']:6}{row['samples']:9}{row['seconds']:9.1f}{row['steps']:7}{row['failures']:8}"
            print(f"{way:40}{figures}  {', '.join(left) or 'nothing':34}{row['trained']}", flush=True)


if __name__ == "__main__":
    main()
