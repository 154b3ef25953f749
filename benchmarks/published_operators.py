"""Single losses and layers that others measured on GPUs, forward and backward, and what MemGuard predicts for them.

Liger-Kernel @ead96b61, benchmark/data/all_benchmark_data.csv: `max_memory_allocated` of those rows whose provider is
plain torch or transformers' code, on A100, H100 and B200. Gradients are never cleared, and most scripts retain the
graph. The last column is what is predicted too much, without the three blocks of 512 bytes that the loop around it has
here: a batch, a loss and its gradient. Figures above 16 GiB are rounded to 2 KiB, as float32 is.

    python benchmarks/published_operators.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memguard import estimate
from shared.truth import quieten

MIB = 1 << 20
OF_LOOP = 3 * 512
A100, H100, PCIE, B200 = "A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "H100 PCIe", "B200"


class Measured(nn.Module):
    def backward(self, result: Tensor) -> None:
        """Run a backward pass as its script does."""
        result.backward(torch.randn_like(result), retain_graph=True)


class Loss(Measured):
    """A loss between two tables of logarithms, or of probabilities."""

    def __init__(self, rows: int, words: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.empty(rows, words))
        self.register_buffer("target", torch.empty(rows, words))


class JensenShannon(Loss):
    def forward(self) -> Tensor:
        found, target = self.scores.log_softmax(-1), self.target
        middle = torch.lerp(torch.exp(found), torch.exp(target), 0.5)
        first, second = (
            F.kl_div(torch.log(middle), each, reduction="none", log_target=True).sum(-1) for each in (target, found)
        )
        return ((0.5 * first + 0.5 * second) / found.shape[0]).sum()


class TotalVariation(Loss):
    def forward(self) -> Tensor:
        found = self.scores.softmax(-1)
        return torch.sum(torch.abs(found - self.target) / 2.0) / found.size(0)


class LlamaNorm(Measured):
    """Next to it is Liger's, which does not run, and the gradient of its result, in bfloat16."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.empty(rows, width, dtype=torch.bfloat16))
        self.register_buffer("gradient", torch.empty_like(self.x))
        self.register_buffer("of_liger", torch.empty(width))
        self.weight = nn.Parameter(torch.empty(width))

    def backward(self, result: Tensor) -> None:
        result.backward(self.gradient, retain_graph=True)

    def forward(self) -> Tensor:
        x = self.x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(torch.bfloat16)


class TorchNorm(Measured):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.empty(rows, width, dtype=torch.bfloat16))
        self.norm = nn.RMSNorm(width, eps=1e-6, dtype=torch.bfloat16)

    def backward(self, result: Tensor) -> None:
        result.sum().backward()

    def forward(self) -> Tensor:
        return self.norm(self.x)


class SwiGlu(Measured):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.empty(4, tokens, width))
        self.gate, self.up = (nn.Linear(width, 11_008, bias=False) for _ in range(2))
        self.down = nn.Linear(11_008, width, bias=False)
        self.bfloat16()

    def forward(self) -> Tensor:
        return self.down(F.silu(self.gate(self.x)) * self.up(self.x))


class Kept(torch.optim.SGD):
    """Neither clears gradients nor changes a parameter."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing."""

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def step(model: Any, batch: Tensor) -> Tensor:
    result = model()
    model.backward(result)
    return torch.zeros((), device=batch.device, requires_grad=True)


class Row(NamedTuple):
    """A module, the GPU, and the MiB that were measured by its two sizes."""

    module: Callable[..., nn.Module]
    gpu: str
    measured: dict[tuple[int, int], float]


ROWS = [
    Row(
        JensenShannon,
        PCIE,
        {
            (8192, 4096): 1664.0009765625,
            (8192, 8192): 3328.0009765625,
            (8192, 16_384): 6656.0009765625,
            (8192, 32_768): 13312.0009765625,
            (8192, 65_536): 26624.0,
            (8192, 131_072): 53248.0,
        },
    ),
    Row(
        JensenShannon,
        B200,
        {
            (1024, 128_256): 6526.0009765625,
            (2048, 128_256): 13026.0009765625,
            (4096, 128_256): 26052.0,
            (8192, 128_256): 52104.0,
        },
    ),
    Row(
        TotalVariation,
        H100,
        {
            (16_384, 4096): 2048.0009765625,
            (16_384, 8192): 4096.0009765625,
            (16_384, 16_384): 8192.0009765625,
            (16_384, 32_768): 16384.0,
            (16_384, 65_536): 32768.0,
            (16_384, 131_072): 65536.0,
        },
    ),
    Row(
        LlamaNorm,
        A100,
        {
            (2048, 1024): 80.01953125,
            (2048, 2048): 160.03125,
            (2048, 4096): 320.0546875,
            (2048, 8192): 640.1015625,
            (2048, 16_384): 1280.1953125,
            (2048, 32_768): 2560.3828125,
        },
    ),
    Row(
        TorchNorm,
        H100,
        {
            (4096, 1024): 40.0224609375,
            (4096, 2048): 80.0283203125,
            (4096, 4096): 160.0400390625,
            (4096, 8192): 320.0634765625,
            (4096, 16_384): 640.1103515625,
        },
    ),
    Row(SwiGlu, A100, {(1024, 4096): 1294.25, (2048, 4096): 1992.25, (4096, 4096): 3452.25, (8192, 4096): 6372.25}),
]


def main() -> None:
    quieten()
    print(f"{'step':<36}{'measured, MiB':>16}{'predicted':>12}{'bytes too many':>16}")
    for row in ROWS:
        for sizes, measured in row.measured.items():
            with torch.device("meta"):
                model = row.module(*sizes)
            found = estimate(model, torch.zeros(1), step=step, optimizer=partial(Kept, lr=0.0), device=row.gpu)
            more = found.peak_allocated_bytes - OF_LOOP - measured * MIB
            name = f"{row.module.__name__} {sizes[0]} x {sizes[1]}, {row.gpu[:11]}"
            print(f"{name:<36}{measured:>16,.2f}{found.peak_allocated_bytes / MIB:>12,.2f}{more:>+16,.0f}", flush=True)


if __name__ == "__main__":
    main()
