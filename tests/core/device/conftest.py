"""Machines that report what a test wants: a host, a CUDA GPU, a process of its own."""

from __future__ import annotations

import json
import textwrap
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_memguard.core.device import budget as budget_module
from lightning_memguard.core.device import host as host_module
from lightning_memguard.core.device import nvml as nvml_module
from lightning_memguard.core.device.host import MemoryInfo
from lightning_memguard.units import GIB, MIB
from tests import forks


@pytest.fixture
def run_program(tmp_path: Path) -> Callable[..., object]:
    """A function that runs a program in a process of its own; the program prints its result as JSON last."""

    def run(program: str) -> object:
        strict = "import warnings\nwarnings.simplefilter('error', UserWarning)\n"
        return json.loads(forks.run_program(strict + textwrap.dedent(program), tmp_path).splitlines()[-1])

    return run


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A host that reports what a test wants."""

    def report(**memories: MemoryInfo | None) -> None:
        for source in ("host", "cgroup", "rlimit"):
            monkeypatch.setattr(host_module, f"{source}_memory", lambda source=source: memories.get(source))
        monkeypatch.setattr(budget_module, "host_memory", lambda: memories["host"])

    report(host=MemoryInfo(16 * GIB, 10 * GIB, "host"))
    return report


class Gpu:
    """Values that torch.cuda and NVML report for one GPU; 8 GiB, 6 of them free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.context_is_up, self.reserved, self.allocated, self.fraction = False, 0, 0, 1.0
        self.nvml: MemoryInfo | None = MemoryInfo(8 * GIB, 6 * GIB, "nvml", used_bytes=2 * GIB)
        self.info: tuple[int, int] | None = (5 * GIB, 8 * GIB)
        self.peak_allocated = self.peak_reserved = 0
        self.stats: dict[str, int] = {}
        self.own: int | None = None  # as in a container: NVML names no process
        # in the catalogue, the context of such a GPU is 240 to 328 MiB
        kind = {"name": "NVIDIA A10G", "major": 8, "minor": 6, "multi_processor_count": 80}
        self.properties = types.SimpleNamespace(total_memory=8 * GIB, is_integrated=0, uuid="aaaa", **kind)
        answers = {
            "is_initialized": lambda: True,
            "current_device": lambda: 0,
            "synchronize": self.open_context,
            "get_device_name": lambda where: "NVIDIA H200",
            "get_device_properties": lambda where: self.properties,
            "get_per_process_memory_fraction": lambda where: self.fraction,
            "mem_get_info": self.mem_get_info,
            "memory_reserved": lambda where: self.reserved,
            "memory_allocated": lambda where: self.allocated,
            "memory_stats": self.memory_stats,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: self.context_is_up, raising=False)
        for module in (budget_module, nvml_module):
            monkeypatch.setattr(module, "nvml_memory", lambda gpu: self.nvml and replace(self.nvml, own_bytes=self.own))
        self.context = 300 * MIB

    def take(self, nbytes: int) -> None:
        """Some process takes memory, and NVML's free memory shrinks."""
        free, used = self.nvml.free_bytes - nbytes, self.nvml.used_bytes + nbytes
        self.nvml = MemoryInfo(self.nvml.total_bytes, free, "nvml", used)

    def open_context(self, where: torch.device) -> None:
        if not self.context_is_up and self.nvml:
            self.take(self.context)
        self.context_is_up = True

    def reserve(self, nbytes: int) -> None:
        self.take(nbytes)
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def mem_get_info(self, where: torch.device) -> tuple[int, int]:
        if self.info is None:
            raise RuntimeError("CUDA error: unknown error")
        self.open_context(where)
        return self.info

    def memory_stats(self, where: torch.device) -> dict[str, int]:
        peaks = {"reserved_bytes.all.peak": self.peak_reserved, "allocated_bytes.all.peak": self.peak_allocated}
        return {**self.stats, **peaks, "reserved_bytes.all.current": self.reserved}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.fixture(scope="session")
def simulated_gpu() -> type[Gpu]:
    """For tests that need another GPU for each example."""
    return Gpu
