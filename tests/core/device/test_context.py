"""Memory that a process holds on its GPU outside PyTorch's allocator."""

from __future__ import annotations

import pytest
import torch

from lightning_memguard.core.device.context import context_bytes, outside_allocator_bytes
from lightning_memguard.core.device.host import MemoryInfo
from lightning_memguard.units import GIB, MIB

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_a_context_not_yet_up_is_opened_and_measured_by_what_it_takes(gpu):
    gpu.nvml = MemoryInfo(8 * GIB, 3 * GIB, "nvml", used_bytes=5 * GIB)  # most of it another process's
    assert context_bytes(CUDA) == 300 * MIB
    assert gpu.context_is_up


def test_only_cuda_has_a_context_to_count():
    assert context_bytes(CPU) == context_bytes(torch.device("mps")) == context_bytes(torch.device("xpu")) == 0


def memory(free: int, used: int | None = None) -> MemoryInfo:
    return MemoryInfo(80 * GIB, free, "nvml", used)


@pytest.mark.parametrize(
    ("before", "now", "answer"),
    [
        # 10 GiB reserved in each
        (memory(50 * GIB), memory(39 * GIB, 40 * GIB), (GIB, "nvml")),
        (None, memory(39 * GIB, 11 * GIB), (GIB, "nvml, whole device")),
        (memory(50 * GIB), memory(60 * GIB, 11 * GIB), (GIB, "nvml, whole device")),  # others went meanwhile
        (memory(50 * GIB), memory(30 * GIB, 40 * GIB), (0, "context not seen")),  # others came meanwhile
        (None, memory(39 * GIB, 40 * GIB), (0, "context not seen")),  # others are there
        (None, memory(39 * GIB), (0, "context not seen")),  # an older driver counts its own share as used
        (memory(50 * GIB), None, (0, "context not seen")),
    ],
)
def test_memory_outside_the_allocator_is_reported_only_if_it_cannot_be_other_processes(before, now, answer):
    assert outside_allocator_bytes(before, now, 10 * GIB) == answer
