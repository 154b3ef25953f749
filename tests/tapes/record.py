"""Make the tapes of this folder: `python -m tests.tapes.record [names]`, on the torch that constraints.txt pins.

`tests/test_tapes.py` holds each against what is captured today. One that differs for a reason is made anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.curve import Curve
from lightning_memguard.core.capture.predict import Surveyor, capture, predict
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.range import NOTHING, Range
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.scratch import CpuTarget
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.training.planning.subject import predicted, subject_of
from lightning_memguard.training.planning.target import target_of
from lightning_memguard.training.run.tune import tune
from tests import tape
from tests.core.capture.test_predict import predicted as predicted_step
from tests.training.conftest import Small
from tests.training.planning.test_advise import Stacked, known, program_of
from tests.training.quiet import quiet_trainer
from tests.warm import IN_THIS_PROCESS

GPU = gpus.find("NVIDIA H200")


class Validated(Small):
    """A step and its validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)  # which lives on, whether Python hands arguments on or holds them: Dynamo changes that


def of_fit(what: str) -> Curve:
    """The step of a small training, alone or with accumulated gradients, or its validation."""
    torch.manual_seed(0)
    module, trainer = Validated(), quiet_trainer()
    loader = DataLoader(TensorDataset(torch.randn(100, 16), torch.randint(0, 4, (100,))), batch_size=10)
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, loader, loader)
    profile = tune(trainer, module, MemGuard("check")._settings).profile
    assert profile is not None
    if what == "validation":
        assert profile.validation is not None
        terms = profile.validation.prediction.terms
        found = Surveyor(profile.run.evaluation.unwrap().program).survey(16, terms)
    else:
        found = (profile.accumulating() if what == "accumulating" else profile).prediction
    return found.on_terms(context_bytes=NOTHING)


def of_plan(device: str) -> Curve:
    """The step of the small training on a GPU."""
    torch.manual_seed(0)
    subject = subject_of(Small(), (torch.randn(8, 16), torch.zeros(8, dtype=torch.long)))
    return predicted(subject, target_of(device), scalable=True).curve


def of_blocks() -> Curve:
    """A step of three blocks, at one batch size."""
    return known(program_of(Stacked())).curve


class Drawn:
    """Batches whose first value is the number of the draw."""

    multiple = 1

    def has(self, batch_size: int) -> bool:
        return True

    def batch(self, batch_size: int, draw: int) -> torch.Tensor:
        batch = torch.ones(batch_size, 8)
        batch[0, 0], batch[1:, 1] = draw, -1
        return batch


def of_loop(
    step: Callable[[Any, Any], Any], model: Any = None, *, batch: Any = None, drawn: bool = False, on_gpu: bool = False
) -> Curve:
    """A step in PyTorch's own loop."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 32))
    batches = replace(batches_from_one(torch.ones(16, 8) if batch is None else batch), draws=Drawn() if drawn else None)
    device, gpu = ("cuda", GPU) if on_gpu else ("cpu", None)
    program = LoopProgram(model, batches, step, torch.optim.Adam, torch.device(device), gpu=gpu)
    context = Range(300 << 20, 400 << 20, 600 << 20) if on_gpu else Range(0, 0, 10 << 20)
    return predict(program, 16, AllocatorSettings.for_device(device, {}), context_bytes=context).curve


def of_one_weight() -> Curve:
    """The step that `tests/core/capture/test_predict.py` sums by hand."""
    return predicted_step().curve


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def masked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)[x[:, 1] > 0].tanh().exp().sum()


def by_value(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return sum(model(x).tanh().sum() for _ in range(1 + int(x[0, 0]) % 3))


def by_sample(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return sum(model(each).tanh().sum() for each in x)


def fails(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such column")


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


class Gpt(nn.Module):
    """One block of a language model."""

    def __init__(self, width: int = 64, words: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.block(self.embed(x))).flatten(0, 1), x.flatten())


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Words(nn.Module):
    """Its kernels change their ways between 438 and 439 samples of seven words: more than 3072 are sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(words)))


def of_words(precision: str) -> dict[int, Trace]:
    """Captures at small sizes and large ones, each by itself."""
    batches, how = batches_from_one(torch.zeros(4, 7, dtype=torch.long)), (torch.optim.SGD, torch.device("cuda"))
    program = LoopProgram(Words(), batches, plain, *how, precision, gpu=GPU)
    return {size: capture(program, size, "fake") for size in (1, 4, 8, 16, 438, 439, 4096)}


TAPES: dict[str, Callable[[], Any]] = {
    "fit": lambda: of_fit("step"),
    "fit_accumulating": lambda: of_fit("accumulating"),
    "fit_validation": lambda: of_fit("validation"),
    "fit_gpu": lambda: of_plan("T4"),
    "blocks": of_blocks,
    "mlp": lambda: of_loop(plain),
    "cnn_gpu": lambda: of_loop(plain, cnn(), batch=torch.ones(16, 3, 16, 16), on_gpu=True),
    "gpt_gpu": lambda: of_loop(lambda model, x: model(x), Gpt(), batch=torch.zeros(16, 32).long(), on_gpu=True),
    "lstm_gpu": lambda: of_loop(plain, Lstm(), batch=torch.ones(16, 12, 8), on_gpu=True),
    "one_weight": of_one_weight,
    "masked": lambda: of_loop(masked, drawn=True),
    "by_value": lambda: of_loop(by_value, drawn=True),
    "by_sample": lambda: of_loop(by_sample),
    "words_gpu": lambda: of_words("32-true"),
    "words_bf16_gpu": lambda: of_words("bf16-mixed"),
    "fails": lambda: of_loop(fails),
}


def record(name: str) -> Any:
    """Capture what a tape has, in this process, as any machine would."""
    with ExitStack() as patches:
        for path, function in (IN_THIS_PROCESS | ALIKE).items():
            patches.enter_context(mock.patch(path, function))
        return TAPES[name]()


ALIKE = {
    "lightning_memguard.core.capture.kernel_scratch.this_cpu": lambda threads: CpuTarget(1),
    "lightning_memguard.core.kernels.cudnn.workspaces": lambda *_: None,
    "lightning_memguard.core.simulation.sdpa.cudnn_version": lambda: 0,
    "lightning_memguard.training.run.reading.process_bytes": lambda *_: NOTHING,
}


def main() -> None:
    for name in sys.argv[1:] or TAPES:
        path = tape.FOLDER / f"{name}.jsonl.gz"
        tape.write(record(name), path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
