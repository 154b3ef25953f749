"""Ladders of batch sizes that others measured on an H100, and what MemGuard predicts without a GPU.

milabench @faf39234, config/scaling/H100.yaml: the most that NVML counts as used while benchmarks/{torchvision,
lightning,huggingface} @dc0617d1 train with torch 2.6.0 and cuDNN 9.5.1. That is the whole device, with what the driver
keeps of it, so that is taken off. Sizes that fill the card are left out: the allocator gives its cache back there.

The programs are as written there. In torchvision's the backward pass runs under autocast, too. The loader of "noio"
makes its targets with a forward pass of the model in float32, on images of 244 x 244 pixels, whose graph is alive then.
BERT's loop never clears its gradients.

cuDNN 9.5 cannot be asked for workspaces without a GPU; the nearest that can is 9.8 (nvidia-cudnn-cu12==9.8.0.87 and
nvidia-cublas-cu12 in front of the others on PYTHONPATH).

    python benchmarks/published_ladders.py                  # all: some minutes on two cores
    python benchmarks/published_ladders.py resnet50 bert    # those whose name contains one of these
"""

import csv
import statistics
import sys
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
import torchvision
import transformers
from torch import Tensor
from torch.nn import functional as F

from accuracy import on_meta
from lightning_memguard.core.kernels import cudnn
from lightning_memguard.training.planning.subject import Subject, predicted, subject_of
from lightning_memguard.training.planning.target import target_of
from lightning_memguard.units import parse_bytes
from shared.truth import quieten

GPU, MIB = "NVIDIA H100 80GB HBM3", 1 << 20


def torchvision_loop(name: str, precision: str, *, last: bool = False, noio: bool = False) -> Subject:
    """benchmarks/torchvision/main.py; ``last``: channels_last; ``noio``: with the loader "synthetic_fixed"."""
    half = torch.float16 if precision == "fp16" else torch.float32
    layout = {"dtype": half, "memory_format": torch.channels_last if last else torch.contiguous_format}
    model = on_meta(getattr(torchvision.models, name)).to(memory_format=layout["memory_format"])
    kept: list[Tensor] = []

    def step(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, targets = batch
        if noio:
            if not hasattr(model, "has_made_targets"):
                with torch.autocast("cuda", enabled=False):
                    model.has_made_targets = torch.rand_like(model(images)) is not None
            images = images.to(**layout)
        kept[:] = [model(images)]
        return F.cross_entropy(kept[0], targets)

    if noio:
        batch = torch.zeros(4, 3, 244, 244), torch.zeros(4, 1000)
    else:
        batch = torch.zeros(4, 3, 224, 224).to(**layout), torch.zeros(4, dtype=torch.long)
    context = partial(torch.autocast, "cuda", torch.float16, enabled=precision == "fp16")
    return subject_of(model, batch, step=step, context=context, optimizer=partial(torch.optim.SGD, lr=0.01))


class Classifier(pl.LightningModule):
    """benchmarks/lightning/main.py."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torchvision.models.resnet152()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def lightning() -> Subject:
    batch = torch.zeros(4, 3, 224, 224), torch.zeros(4, dtype=torch.long)
    return subject_of(on_meta(Classifier), batch, precision="bf16-mixed")


class NeverCleared(torch.optim.Adam):
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Keep the gradients."""


def bert(precision: str) -> Subject:
    """benchmarks/huggingface/bench/__main__.py: the outputs are alive until its function for a step returns."""
    kept: list[Any] = []

    def step(model: Any, ids: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16, enabled=precision == "fp16"):
            kept[:] = [model(input_ids=ids, labels=ids)]
        return kept[0].loss

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = NeverCleared(parameters)
        optimizer.register_step_post_hook(lambda *_: kept.clear())
        return optimizer

    model = on_meta(lambda: transformers.BertForMaskedLM(transformers.BertConfig())).train()
    return subject_of(model, torch.zeros(4, 512, dtype=torch.long), step=step, optimizer=make)


class Ladder(NamedTuple):
    """What builds the program, its precision of products, and the MiB measured by batch size."""

    build: Callable[[], Subject]
    tf32: bool
    measured: dict[int, int]


resnet50 = partial(torchvision_loop, "resnet50", "fp16", last=True)
convnext = partial(torchvision_loop, "convnext_large")
HALF_CONVNEXT = {1: 3487, 64: 15089, 120: 25761, 136: 28983, 144: 30407, 256: 51665, 304: 60925}
FLOAT_CONVNEXT = {1: 3177, 64: 24989, 72: 27747, 80: 30665, 120: 44601, 136: 50389, 144: 53069, 160: 58467}
TF32_CONVNEXT = {1: 3177, 64: 24995, 80: 30413, 120: 44391, 136: 50203, 144: 52883, 160: 58289, 208: 75191}
RESNET50 = {128: 7669, 248: 13327, 264: 14147, 272: 14579, 512: 25839, 608: 30491, 1248: 60845, 1560: 75693}
NOIO = {128: 14343, 248: 26387, 264: 27967, 272: 28801, 288: 30407, 512: 52875, 592: 60871}
REGNET = {1: 8051, 32: 17835, 56: 26655, 64: 29539, 72: 32611, 80: 35603, 128: 53581, 136: 70669}
RESNET152 = {1: 2547, 128: 14619, 248: 26167, 264: 27751, 272: 28649, 288: 30201, 512: 51803, 600: 60169}
HALF_BERT = {1: 3885, 16: 9895, 24: 12421, 40: 19399, 48: 22889, 64: 29845, 104: 47353, 136: 61365}
BERT = {1: 3915, 16: 12343, 24: 16231, 40: 25887, 48: 30679, 64: 40341, 80: 50003, 96: 59649}
LADDERS = {
    "resnet50": Ladder(resnet50, True, RESNET50),
    "resnet50-noio": Ladder(partial(resnet50, noio=True), True, NOIO),
    "lightning (resnet152)": Ladder(lightning, True, RESNET152),
    "regnet_y_128gf": Ladder(partial(torchvision_loop, "regnet_y_128gf", "fp16"), True, REGNET),
    "convnext_large-tf32-fp16": Ladder(partial(convnext, "fp16"), True, HALF_CONVNEXT),
    "convnext_large-tf32": Ladder(partial(convnext, "tf32"), True, TF32_CONVNEXT),
    "convnext_large-fp32": Ladder(partial(convnext, "fp32"), False, FLOAT_CONVNEXT),
    "bert-tf32-fp16": Ladder(partial(bert, "fp16"), True, HALF_BERT),
    "bert-tf32": Ladder(partial(bert, "tf32"), True, BERT),
}


def of_driver() -> int:
    """MiB that the driver keeps of the card: what NVML calls its total, less CUDA's."""
    text = files("lightning_memguard.core").joinpath("gpus.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if line and not line.startswith("#"))
    row = next(row for row in rows if row["name"] == GPU)
    return (parse_bytes(row["nvidia_smi"]) - parse_bytes(row["memory"])) // MIB


def main(wanted: list[str]) -> None:
    quieten()
    target, driver, errors, widths, inside, below = target_of(GPU), of_driver(), [], [], 0, 0
    print(f"cuDNN {cudnn.version()} asked, torch {torch.__version__}; MiB, less {driver} of the driver")
    for name, ladder in LADDERS.items():
        if wanted and not any(each in name for each in wanted):
            continue
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = ladder.tf32
        found = predicted(ladder.build(), target, scalable=True, capacity_bytes=target.capacity_bytes)
        print(f"\n{name}\n{'batch':>6}{'measured':>10}{'predicted':>10}{'off':>8}  range")
        for size, total in ladder.measured.items():
            peak, measured = found.footprint_at(size), total - driver
            mib, low, high = (each.device_bytes / MIB for each in (peak.peak, peak.lowest, peak.highest))
            errors.append(100 * (mib / measured - 1))
            widths.append(100 * (high - low) / measured)
            inside, below = inside + (low <= measured <= high), below + (measured <= high)
            mark = "" if low <= measured <= high else "!"
            print(
                f"{size:>6}{measured:>10,}{mib:>10,.0f}{errors[-1]:>+7.1f}%  {low:,.0f} to {high:,.0f}{mark}",
                flush=True,
            )
    sizes = sorted(map(abs, errors))
    print(
        f"\n{len(sizes)} figures: median {statistics.median(sizes):.2f} %, p90 {sizes[int(0.9 * len(sizes))]:.2f} %, "
        f"worst {sizes[-1]:.2f} %; {inside} inside, {below} at or below the most; "
        f"median width {statistics.median(widths):.1f} %"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
