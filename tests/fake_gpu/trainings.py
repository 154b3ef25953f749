"""Trainings with MemGuard on a GPU, or on the one that is not there: a script that prints a line of JSON for each.

python trainings.py             # all of them
python trainings.py plain half   # some
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.cuda import mem_get_info, memory_allocated, synchronize  # names that users import
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard, estimate

FEATURES, CLASSES = 64, 10


class Net(pl.LightningModule):
    """A multilayer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 2048), nn.LayerNorm(2048), nn.GELU(), nn.Linear(2048, CLASSES))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Compute the loss."""
        return F.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log the loss."""
        self.log("val_loss", self.training_step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make AdamW."""
        return torch.optim.AdamW(self.parameters())


class Asking(Net):
    """Asks the GPU much in a step, has a stream of its own, and uses a tensor that no module holds."""

    weight: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        self.noise = torch.Generator(device="cuda")

    def training_step(self, batch: list[Tensor]) -> Tensor:
        synchronize()
        torch.accelerator.synchronize()
        self.log_dict({"allocated": float(memory_allocated()), "free": float(mem_get_info()[0])})
        self.log("peak", float(torch.cuda.memory_stats()["allocated_bytes.all.peak"]))
        noise = torch.randn(len(batch[0]), FEATURES, device="cuda", generator=self.noise.manual_seed(1))
        self.event.record()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            target = batch[1] * self.weight[0]
        torch.cuda.current_stream().wait_event(self.stream.record_event())
        return F.mse_loss(self.net(batch[0] + noise), target)


class Manual(Net):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch))
        self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()


class Convolutions(Net):
    """A small network for images."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, groups=16)
        self.net = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), first, nn.BatchNorm2d(16), second, nn.Flatten())
        self.net.append(nn.Linear(16 * 36, CLASSES))


class Compiled(Net):
    """Its network is compiled, by Triton."""

    def __init__(self) -> None:
        super().__init__()
        self.net.compile()


class Peak(pl.Callback):
    """Reads PyTorch's own counter at the end of the epoch."""

    measured_bytes = 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.measured_bytes = torch.cuda.max_memory_allocated()


def data(*, pinned: bool = False, device: str = "cpu") -> TensorDataset:
    """Make eight batches of 64 samples."""
    columns = torch.randn(512, FEATURES, device=device), torch.randn(512, CLASSES, device=device)
    return TensorDataset(*(column.pin_memory() if pinned else column for column in columns))


def fit(
    make: Callable[[], Net],
    loader: DataLoader[Any] | None = None,
    *,
    validated: bool = False,
    max_setup_seconds: Any = "auto",
    **settings: Any,
) -> Any:
    """Train four batches, and return what was predicted and measured, without what was allocated before."""
    held, peak = torch.cuda.memory_allocated(), Peak()
    guard = MemGuard(mode="check", learn=False, max_setup_seconds=max_setup_seconds)
    module = make()
    torch.cuda.reset_peak_memory_stats()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            max_epochs=1,
            limit_train_batches=4,
            limit_val_batches=2 if validated else 0,
            enable_model_summary=False,
            callbacks=[peak, guard],
            default_root_dir=folder,
            **quiet,
            **settings,
        )
        loader = loader or DataLoader(data(), 64)
        try:
            trainer.fit(module, loader, loader)
            error = ""
        except RuntimeError as raised:
            error = str(raised)
    decision = guard.decision
    assert decision is not None
    footprint = decision.footprint
    return {
        "method": footprint.method if footprint else "none",
        "range": [footprint.lowest.allocated_bytes, footprint.highest.allocated_bytes] if footprint else [0, 0],
        "measured": peak.measured_bytes - held,
        "said": decision.reason,
        "error": error,
    }


def asking() -> Any:
    """Train the module that asks."""
    Asking.weight[:] = [torch.ones(CLASSES, device="cuda")]
    return fit(Asking)


def estimated() -> Any:
    """Predict without a Trainer."""
    batch = [torch.randn(64, FEATURES), torch.randn(64, CLASSES)]
    footprint = estimate(Convolutions(), batch, device="cuda", precision="bf16-mixed")
    return {"method": footprint.method, "range": [], "measured": 0, "said": "", "error": ""}


def refusing() -> Any:
    """Call the driver in a child."""
    stream, (read, write) = torch.cuda.Stream(), os.pipe()
    if not os.fork():
        try:
            stream.synchronize()
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        return {"said": said.read()}


TRAININGS: dict[str, Callable[[], Any]] = {
    "plain": lambda: fit(Net),
    "half": lambda: fit(Net, precision="16-mixed", gradient_clip_val=1.0, accumulate_grad_batches=2),
    "manual": lambda: fit(Manual, precision="bf16-mixed"),
    "asking": asking,
    "pinned": lambda: fit(Net, DataLoader(data(pinned=True), 64, num_workers=2, pin_memory=True)),
    "compiled": lambda: fit(Compiled, max_setup_seconds=300.0),
    "on the GPU": lambda: fit(lambda: Net().cuda()),
    "validated": lambda: fit(Net, validated=True),
    "convolutions": lambda: fit(Convolutions, precision="bf16-mixed"),
    "estimated": estimated,
    "refusing": refusing,
}


def refusals() -> tuple[int, str]:
    """Return how many calls of this process' children a stand-in has refused, and the first."""
    first = ctypes.create_string_buffer(4096)
    count = ctypes.CDLL(None).fake_gpu_refusals(first, len(first))
    return count, first.value.decode()


def main() -> None:
    """Run the trainings that were named."""
    torch.ones(1, device="cuda")  # this process uses its GPU from now on
    for name in sys.argv[1:] or TRAININGS:
        found = TRAININGS[name]()
        count, first = refusals()
        sys.stdout.write("\n" + json.dumps({"name": name, **found, "refused": count, "first": first}) + "\n")
        sys.stdout.flush()
        gc.collect()  # events and streams are not left to a child


if __name__ == "__main__":
    main()
