"""How fast a device is: a GPU of the catalogue by its published peaks, this machine's CPU by a short measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from lightning_memguard.core.gpus import Gpu, find
from lightning_memguard.core.range import Range
from lightning_memguard.core.replay.seconds import Speed
from lightning_memguard.core.trace.work import CONVOLUTION, RANDOM, SPECIAL
from lightning_memguard.errors import MemGuardError

# Shares of the published peaks that products and bytes reach, and the range of measured times around the likely one:
# fitted on published training steps of half of some models of timm on an RTX 3090, and shown on the other half. The
# range's lower end is from inference on an RTX 4090, its upper one from float32 on an H100 (`benchmarks/seconds.py`).
_SHARES = 1.0, 0.64
_GPU_SPREAD = 0.5, 1.5
_GPU_LAUNCH = 5e-6  # seconds of a kernel that does next to nothing
# Seconds of the host for an operator, views not counted: trainings of text in half precision on the machine of an H100
# took 26 to 33 us (`benchmarks/seconds.py recorded`). The range is for processors twice as fast, and half as fast.
_HOST_SECONDS = Range(14e-6, 28e-6, 56e-6)
# For the CPU: 104 of 105 steps of 12 models on two cores of an AMD EPYC.
_CPU_SPREAD = 0.85, 2.2
# Bytes a second of 16 lanes of PCI Express in one direction (PCI-SIG: 0.985, 1.969, 3.938 GB/s a lane), by the first
# compute capability whose GPUs have that generation, in NVIDIA's data sheets.
_HOST_LINKS = {(9, 0): 63.0e9, (8, 0): 31.5e9, (0, 0): 15.8e9}
_KINDS = ("float32", "tf32", "float16", "bfloat16", "float64")


def speed_of(gpu: Gpu) -> Speed | None:
    """How fast a GPU is, by its name if it was read from the device; None if the catalogue does not say it."""
    if not gpu.bandwidth:
        with suppress(MemGuardError):
            gpu = find(gpu.name)
    return gpu_speed(gpu)


def gpu_speed(gpu: Gpu, shares: tuple[float, float] = _SHARES) -> Speed | None:
    """The speed of a GPU of the catalogue, given the shares of its peaks that are reached; None if it has none."""
    of_peak, of_bandwidth = shares
    flops = {kind: peak * of_peak for kind in _KINDS if (peak := gpu.peak_flops(kind))}
    if not flops or not gpu.bandwidth:
        return None
    host_link = next(rate for least, rate in _HOST_LINKS.items() if gpu.compute_capability >= least)
    links, bandwidth = (gpu.link, host_link), ((0.0, gpu.bandwidth * of_bandwidth),)
    return Speed(flops, bandwidth, _GPU_LAUNCH, _GPU_SPREAD, *links, _HOST_SECONDS)


def cpu_speed() -> Speed:
    """Measure this machine's CPU on the threads that torch uses, in about a third of a second.

    Products of matrices by number format; a convolution with its backward pass; a special function and random numbers;
    sums of two vectors of several sizes, as a cache holds small ones; and modules on one element, with their nodes in
    the backward pass.
    """
    flops = {name: 2 * _SIDE**3 / _fastest(_product(name)) for name in ("float32", "float64", "bfloat16", "float16")}
    slower = _CONVOLUTION_FLOPS / _fastest(_convolution) / flops["float32"]
    flops |= {f"{name}{CONVOLUTION}": slower * rate for name, rate in flops.items()}
    flops |= {SPECIAL: _ELEMENTS / _fastest(_special), RANDOM: _ELEMENTS / _fastest(_random)}
    bandwidth = [(3.0 * nbytes, 3 * nbytes * _HELD / _fastest(_sums(nbytes))) for nbytes in _SIZES]
    bandwidth[0] = (0.0, bandwidth[0][1])
    return Speed(flops, tuple(bandwidth), _fastest(_chain) / (2 * _OPERATORS), _CPU_SPREAD)


_SIDE = 384  # of a matrix
_SIZES = (1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes of a vector
_HELD = 4  # results that live at once, as activations do: memory that is new has to be mapped
_OPERATORS, _MODULE = 50, nn.ReLU()
_ELEMENTS = 1 << 16
_IMAGES = 8, 32, 28, 28
_CONVOLUTION_FLOPS = 3 * 2 * math.prod(_IMAGES) * 32 * 9


def _product(dtype: str) -> Callable[[], object]:
    matrix = torch.ones(_SIDE, _SIDE, dtype=getattr(torch, dtype), device="cpu")
    return lambda: matrix @ matrix


def _sums(nbytes: int) -> Callable[[], object]:
    vector = torch.ones(nbytes // 4, dtype=torch.float32, device="cpu")
    return lambda: [vector + vector for _ in range(_HELD)]


@torch.inference_mode(mode=False)
@torch.enable_grad()
def _convolution() -> None:
    options: Any = {"device": "cpu", "dtype": torch.float32, "requires_grad": True}
    images, weight = torch.ones(_IMAGES, **options), torch.ones(32, 32, 3, 3, **options)
    result = nn.functional.conv2d(images, weight, padding=1)
    result.backward(torch.ones_like(result))


@torch.inference_mode(mode=False)
@torch.enable_grad()
def _chain() -> None:
    result = torch.ones(1, device="cpu", requires_grad=True)
    for _ in range(_OPERATORS):
        result = _MODULE(result)
    result.backward()


def _special() -> object:
    return nn.functional.gelu(torch.ones(_ELEMENTS, dtype=torch.float32, device="cpu"))


def _random() -> object:
    return torch.empty(_ELEMENTS, dtype=torch.float32, device="cpu").bernoulli_(0.5, generator=torch.Generator("cpu"))


def _fastest(run: Callable[[], object], times: int = 3) -> float:
    """Seconds of the fastest of a few runs, after one that is not counted."""
    taken = []
    for _ in range(times + 1):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])
