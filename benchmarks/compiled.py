"""Predicted against measured for models that torch.compile compiles, on the CPU, byte for byte.

`estimate` predicts: it compiles nothing, and needs no C++ compiler. Then another fork really compiles the model (that
needs g++), trains it, and has PyTorch's profiler record one step once nothing is compiled any more. What is there
before that step (parameters, buffers, optimizer state, batch) is added by its bytes.

    python benchmarks/compiled.py                        # the table; some ten minutes on two cores
    python benchmarks/compiled.py --only mlp gpt --json results.json
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from lightning_memguard import estimate
from shared import zoo
from shared.process import forked
from shared.truth import memory_events, peak_of

GOAL_PERCENT = 0.1

# Models --------------------------------------------------------------------------------------------------------------


def resnet18() -> nn.Module:
    """ResNet-18 with the first layer that small images are given."""
    return zoo.resnet18(zoo.conv_bn(3, 64), nn.ReLU(), nn.MaxPool2d(2))


def conv_bn() -> nn.Module:
    first = (nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    second = (nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def mlp(dropout: float = 0.0) -> nn.Module:
    hidden = (nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512), nn.Dropout(dropout))
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Dropout(dropout), *hidden, nn.Linear(512, 10))


def gpt() -> nn.Module:
    return zoo.GPT(1000, 64, 128, 4, 6, 0.0)


def encoder() -> nn.Module:
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, 0.1, batch_first=True), 2)
    return nn.Sequential(layers, nn.Flatten(), nn.Linear(64 * 128, 10))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 128, 2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class GraphBreak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(256, 512), nn.Linear(512, 512), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        torch._dynamo.graph_break()
        return self.head(F.gelu(self.second(x)) * x)


class Checkpointed(nn.Module):
    """Checkpoints that draw random numbers, inside of what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.head = nn.ModuleList(mlp(0.2)[:3] for _ in range(3)), nn.Linear(512, 10)
        self.back = nn.ModuleList(nn.Linear(512, 256) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part, back in zip(self.parts, self.back, strict=True):
            inner = checkpoint(part, x, use_reentrant=False)
            x = back(inner)
        return self.head(inner)


def parts_of(model: nn.Module) -> nn.Module:
    """`Module.compile()` on parts."""
    for block in model.blocks:
        block.compile()
    return model


@dataclass(frozen=True)
class Case:
    """A compiled model, its batches, and two sizes of them."""

    name: str
    model: Callable[[], nn.Module]
    sample: Callable[[int], Tensor]
    sizes: tuple[int, int]
    classes: int = 10
    precision: str = "32-true"

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        inputs = self.sample(size)
        return inputs, torch.randint(self.classes, inputs.shape if self.classes > 10 else (size,))


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), batch[1].reshape(-1))


def tokens(size: int) -> Tensor:
    return torch.randint(1000, (size, 64))


def rows(*shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(size, *shape)


CASES = (
    Case("mlp", lambda: torch.compile(mlp()), rows(256), (256, 1024)),
    Case("conv_bn", lambda: torch.compile(conv_bn()), rows(3, 32, 32), (16, 64)),
    Case("resnet18", lambda: torch.compile(resnet18()), rows(3, 32, 32), (16, 32)),
    Case("gpt", lambda: torch.compile(gpt()), tokens, (8, 24), 1000),
    Case("encoder", lambda: torch.compile(encoder()), rows(64, 128), (16, 48)),
    Case("lstm", lambda: torch.compile(LSTM()), rows(30, 32), (16, 64)),
    Case("graph_break", lambda: torch.compile(GraphBreak()), rows(256), (256, 1024)),
    Case("dropout", lambda: torch.compile(mlp(0.2)), rows(256), (256, 1024)),
    Case("checkpointed", lambda: torch.compile(Checkpointed()), rows(256), (256, 1024)),
    Case("dynamic", lambda: torch.compile(mlp(), dynamic=True), rows(256), (256, 1024)),
    Case("gpt_parts", lambda: parts_of(gpt()), tokens, (8, 24), 1000),
    Case("gpt_bf16", lambda: torch.compile(gpt()), tokens, (8, 24), 1000, "bf16-mixed"),
)

# Measure -------------------------------------------------------------------------------------------------------------


def measured(case: Case, size: int) -> dict[str, Any]:
    """The peak of a step that is compiled already, and the seconds it took, of which compiling takes most."""
    started = time.perf_counter()
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = case.batch(size)
    precision = torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16-mixed")
    for _ in range(3):
        model.zero_grad()
        with precision:
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    model.zero_grad()
    loss = loss.new_empty(0)  # an older block's end is not seen
    held = [*model.parameters(), *model.buffers(), *batch]
    held += [value for state in optimizer.state.values() for value in state.values()]
    static = sum(tensor.untyped_storage().nbytes() for tensor in {id(tensor): tensor for tensor in held}.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with precision:
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    peak = static + peak_of(memory_events(profiler))[1]
    return {"measured": peak, "measure_seconds": time.perf_counter() - started}


def predicted(case: Case, size: int) -> dict[str, Any]:
    batch = case.batch(size)
    predict = partial(estimate, step=loss_of, optimizer=torch.optim.AdamW, device="cpu", precision=case.precision)
    started = time.perf_counter()
    found = predict(case.model(), batch)
    seconds = time.perf_counter() - started
    eager = predict(_uncompiled(case.model()), batch).peak_allocated_bytes
    low, high = found.lowest.allocated_bytes, found.highest.allocated_bytes
    sizes = {"eager": eager, "predicted": found.peak_allocated_bytes, "low": low, "high": high}
    return {**sizes, "method": found.method, "predict_seconds": seconds}


def _uncompiled(model: nn.Module) -> nn.Module:
    for module in model.modules():
        module._compiled_call_impl = None
    return getattr(model, "_orig_mod", model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases only")
    parser.add_argument("--budget", type=float, default=1.0, help="torch._functorch.config.activation_memory_budget")
    parser.add_argument("--json", metavar="FILE", help="also write every number to this file")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch._functorch.config.activation_memory_budget = arguments.budget
    cases = {case.name: case for case in CASES}
    print(
        f"{'case':<12} {'batch':>5} {'eager MiB':>10} {'predicted MiB':>13} {'measured MiB':>12} {'error %':>8} "
        f"{'bytes':>9}  {'method':<8} {'seconds':>7} {'real':>5}"
    )
    found = []
    for case in CASES if arguments.only is None else [cases[name] for name in arguments.only]:
        for size in case.sizes:
            row: dict[str, Any] = {"case": case.name, "batch_size": size}
            for each in (predicted, measured):
                row |= forked(partial(each, case, size), torch.get_num_threads())
            row["error_percent"] = 100 * (row["predicted"] / row["measured"] - 1)
            found.append(row)
            mib = [row[name] / 2**20 for name in ("eager", "predicted", "measured")]
            print(
                f"{case.name:<12} {size:>5} {mib[0]:>10.2f} {mib[1]:>13.2f} {mib[2]:>12.2f} "
                f"{row['error_percent']:>+8.3f} {row['predicted'] - row['measured']:>+9,}  {row['method']:<8} "
                f"{row['predict_seconds']:>7.1f} {row['measure_seconds']:>5.0f}",
                flush=True,
            )
    within = sum(abs(row["error_percent"]) <= GOAL_PERCENT for row in found)
    print(f"\n{within} of {len(found)} within {GOAL_PERCENT} %")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        main()
