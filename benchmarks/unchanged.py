"""Trainings with a plain `MemGuard()` and without: weights to the bit, seconds added, and what is printed.

    python benchmarks/unchanged.py trainings    # five trainings and thirty of shared/step_programs.py
    python benchmarks/unchanged.py promises     # a warm-up, max_steps, a resumed run, test, predict
    python benchmarks/unchanged.py printed      # lines of ten trainings

Everything runs on the CPU, on data that is made here or comes with Python and scikit-learn. With PYTHONPATH set to a
checkout of another version, the same is shown of that one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import logging
import random
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard
from shared.step_programs import PROGRAMS, STEPS

sys.path.append(str(Path(__file__).parents[1]))
from examples.char_gpt import CONTEXT, standard_library_text

OTHERS = 30  # programs


class Net(pl.LightningModule):
    """A network with a loss and an optimizer."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], rate: float, warm_up: int = 0) -> None:
        super().__init__()
        self.net, self.loss, self.rate, self.warm_up = net, loss, rate, warm_up

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = self.loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("rmse", self.loss(self.net(batch[0]), batch[1]).sqrt())

    def predict_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        kind = torch.optim.SGD if self.rate > 5e-3 else torch.optim.Adam
        optimizer = kind(self.parameters(), self.rate)
        if not self.warm_up:
            return optimizer
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=self.warm_up)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Last(nn.Module):
    """A GRU's forecast from its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 48, batch_first=True), nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1])


class Characters(nn.Module):
    """A small causal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(128, 64), nn.Parameter(torch.zeros(CONTEXT, 64))
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
        self.head = nn.Linear(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layers(self.embed(x) + self.place, mask, is_causal=True)).transpose(1, 2)


def tabular(rows: int = 50_000, batch_size: int = 64, warm_up: int = 0) -> tuple[Net, DataLoader]:
    x = torch.randn(rows, 20)
    y = (x[:, :5].sin().sum(1) + x[:, 5] * x[:, 6] + 0.1 * torch.randn(rows))[:, None]
    net = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    return Net(net, F.mse_loss, 1e-3, warm_up), DataLoader(TensorDataset(x, y), batch_size, shuffle=True)


def digits_cnn() -> tuple[Net, DataLoader]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randint(len(images), (11_200,))
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16
    x = x.roll((1, -1), (2, 3)) + 0.1 * torch.randn_like(x)
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    net = nn.Sequential(*net, nn.Dropout(0.2), nn.Linear(256, 10))
    return Net(net, F.cross_entropy, 0.01), DataLoader(
        TensorDataset(x, torch.tensor(labels)[order]), batch_size=32, shuffle=True
    )


def char_gpt() -> tuple[Net, DataLoader]:
    text = torch.tensor(list(standard_library_text()[: 4_800 * CONTEXT + 1].encode()))
    data = TensorDataset(text[:-1].reshape(-1, CONTEXT), text[1:].reshape(-1, CONTEXT))
    return Net(Characters(), F.cross_entropy, 3e-4), DataLoader(data, batch_size=16, shuffle=True)


def gru() -> tuple[Net, DataLoader]:
    series = torch.randn(16_024, 4).cumsum(0) * 0.05
    windows = series.unfold(0, 24, 1)[:16_000].transpose(1, 2).sin()
    return Net(Last(), F.mse_loss, 1e-3), DataLoader(
        TensorDataset(windows, series[24:16_024, :1].sin()), batch_size=32, shuffle=True
    )


def autoencoder() -> tuple[Net, DataLoader]:
    x = (torch.randn(15_000, 8) @ torch.randn(8, 64)).tanh()
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
    return Net(net, F.mse_loss, 1e-3), DataLoader(TensorDataset(x, x), batch_size=32, shuffle=True)


FIVE = (tabular, digits_cnn, char_gpt, gru, autoencoder)


def trainer(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "max_epochs": 1, "default_root_dir": tempfile.gettempdir()}
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **settings})


def trained(make: Callable[[], tuple[Any, DataLoader]], *callbacks: pl.Callback, **settings: Any) -> tuple[str, Any]:
    """Train from one seed, and return a hash of the weights and the Trainer."""
    pl.seed_everything(0, verbose=False)
    module, loader = make()
    run = trainer(*callbacks, **settings)
    run.fit(module, loader)
    content = hashlib.sha256()
    for name, value in module.state_dict().items():
        content.update(name.encode() + value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()[:16], run


class Timed(MemGuard):
    """A MemGuard that times its setup, also by processors, where the load of others does not count."""

    seconds = busy = 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        started, busy = time.perf_counter(), processor_seconds()
        super().setup(trainer, pl_module, stage)
        self.seconds, self.busy = time.perf_counter() - started, processor_seconds() - busy


def processor_seconds() -> float:
    """What this process and its children took that are over."""
    taken = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in taken)


def trainings() -> bool:
    rows = [(make.__name__, make, {}) for make in FIVE]
    chosen = random.Random(0).sample([*PROGRAMS.values()], OTHERS)
    rows += [(each.name, lambda each=each: each.training(STEPS), each.settings) for each in chosen]
    equal, seconds = 0, []
    print("| training | batch size | weights | setup, s | of processors, s |\n| :--- | ---: | :--- | ---: | ---: |")
    for name, make, settings in rows:
        guard = Timed()
        own, guarded = trained(make, **settings)[0], trained(make, guard, **settings)[0]
        equal, seconds = equal + (own == guarded), [*seconds, guard.busy]
        size = guard.decision.batch_size if guard.decision else "-"
        print(f"| {name} | {size} | {'equal' if own == guarded else 'DIFFERENT'} ", end="")
        print(f"| {guard.seconds:.2f} | {guard.busy:.2f} |", flush=True)
    print(f"\n{equal} of {len(rows)} equal to the bit")
    print(
        f"setup took processors {sorted(seconds)[len(seconds) // 2]:.2f} s in the middle, {max(seconds):.2f} s at most"
    )
    return equal == len(rows)


def promises() -> bool:
    """What a batch size that was set is read by: each figure without MemGuard, and with it."""

    def warm_up(*guards: pl.Callback) -> object:
        _, run = trained(lambda: tabular(warm_up=500), *guards)
        return f"{run.optimizers[0].param_groups[0]['lr']:.1e} at the end, loss {run.callback_metrics['loss']:.4f}"

    def max_steps(*guards: pl.Callback) -> object:
        seen = Seen()
        trained(tabular, *guards, seen, max_epochs=-1, max_steps=2000)
        return f"{seen.samples} samples"

    def resumed(*guards: pl.Callback) -> object:
        seen, path = Seen(), Path(tempfile.mkdtemp()) / "first.ckpt"
        _, run = trained(lambda: tabular(20_000, 32), max_epochs=1)
        run.save_checkpoint(path)
        pl.seed_everything(0, verbose=False)
        trainer(*guards, seen, max_epochs=2).fit(*tabular(20_000, 32), ckpt_path=path)
        return f"batches of {seen.most}"

    def tested(*guards: pl.Callback) -> object:
        pl.seed_everything(0, verbose=False)
        module, loader = tabular(1000)
        return f"RMSE {trainer(*guards).test(module, loader, verbose=False)[0]['rmse']:.5f}"

    def predicted(*guards: pl.Callback) -> object:
        pl.seed_everything(0, verbose=False)
        module, loader = tabular(1000)
        pairs = zip(loader, trainer(*guards).predict(module, loader), strict=False)
        return f"{sum(len(batch[1]) == len(found) for batch, found in pairs)} of {len(loader)} batches pair"

    same = True
    for ask in (warm_up, max_steps, resumed, tested, predicted):
        without, guarded = ask(), ask(MemGuard())
        same &= without == guarded
        print(f"{ask.__name__}: without {without}; with {guarded}", flush=True)
    return same


class Seen(pl.Callback):
    """Counts samples of training batches."""

    samples = most = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.samples, self.most = self.samples + len(batch[0]), max(self.most, len(batch[0]))


def printed() -> bool:
    heard = logging.getLogger("lightning_memguard")
    heard.handlers, heard.propagate = [handler := logging.StreamHandler(io.StringIO())], False
    tight = {"budget": "12MiB"}
    ten = [(make, {}, {}) for make in FIVE]
    ten += [(lambda: tabular(2000, 1000), tight, {}), (lambda: tabular(batch_size=8192), {"budget": "24MiB"}, {})]
    ten += [(tabular, {"mode": "check"}, {}), (tabular, {}, {"max_epochs": 0}), (tabular, {}, {"max_steps": 100})]
    lines = 0
    for number, (make, options, settings) in enumerate(ten, 1):
        handler.stream = io.StringIO()
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("always")
            trained(make, MemGuard(**options), **{"max_time": {"seconds": 3}, **settings})
        text = handler.stream.getvalue().strip()
        text += "".join(f"\nwarning: {each.message}" for each in caught if "MemGuard" in str(each.message))
        lines += len(text.splitlines())
        arguments = ", ".join(f"{key}={value!r}" for key, value in {**options, **settings}.items())
        print(f"\n-- {number}: {getattr(make, '__name__', '')} {arguments}\n{text}", flush=True)
    print(f"\n{lines} lines")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("trainings", "promises", "printed"))
    for name in ("pytorch_lightning", "lightning_memguard"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    what = parser.parse_args().what
    if what == "printed":
        logging.getLogger("lightning_memguard").setLevel(logging.INFO)
    sys.exit(not globals()[what]())


if __name__ == "__main__":
    main()
