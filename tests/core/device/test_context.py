"""Memory that a process holds on its GPU outside PyTorch's allocator."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from lightning_memguard.core.device.context import context_bytes, context_held, outside_bytes
from lightning_memguard.core.device.host import MemoryInfo
from lightning_memguard.units import GIB, MIB

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
RECORDINGS = Path(__file__).parents[3] / "benchmarks/recordings"


def test_only_cuda_has_a_context_to_count():
    assert not any(map(context_bytes, (CPU, torch.device("mps"), torch.device("xpu"))))


def test_the_context_that_a_training_needs_is_known_without_creating_one(gpu):
    assert context_bytes(CUDA) == (240 * MIB, 272 * MIB, 328 * MIB)
    assert context_held(CUDA, gpu.nvml) == 0
    assert not gpu.context_is_up


def test_libraries_that_load_later_are_counted_and_those_that_are_loaded_are_the_least(gpu):
    gpu.context_is_up = True
    for held, needed in ((100, (240, 272, 328)), (300, (300, 300, 328)), (400, (400, 432, 488))):
        gpu.nvml = MemoryInfo(8 * GIB, 8 * GIB - held * MIB, "nvml", used_bytes=held * MIB)
        assert context_bytes(CUDA) == tuple(each * MIB for each in needed)


@pytest.mark.parametrize(
    ("process", "used", "answer"),
    [
        # MiB beyond the 1 GiB that is reserved in each
        (300, 300, (300, "nvml")),
        (300, 40_000, (300, "nvml")),  # others are there, and NVML tells them from this process
        (None, 300, (300, "nvml, whole device")),
        (None, 470, (470, "nvml, whole device")),  # too little for another context of 240
        (None, 490, (0, "context not seen")),  # two contexts
        (None, 40_000, (0, "context not seen")),
        (None, None, (0, "context not seen")),  # an older driver counts its own share as used
        (None, -100, (0, "context not seen")),
        (30_000, 40_000, (0, "context not seen")),  # a process of another container with this one's number
        (-100, 300, (300, "nvml, whole device")),
    ],
)
def test_memory_outside_the_allocator_is_reported_only_if_it_cannot_be_other_processes(gpu, process, used, answer):
    gpu.context_is_up, gpu.reserved = True, GIB
    now = MemoryInfo(80 * GIB, GIB, "nvml", *(None if each is None else GIB + each * MIB for each in (used, process)))
    nbytes, source = answer
    assert outside_bytes(CUDA, now) == (nbytes * MIB, source)
    assert context_held(CUDA, now) == (nbytes or 240) * MIB  # of a context that is there, the least


def test_buffers_of_nccl_are_not_mistaken_for_another_process(gpu, monkeypatch):
    gpu.context_is_up = True
    now = MemoryInfo(8 * GIB, GIB, "nvml", 900 * MIB)
    assert outside_bytes(CUDA, now)[0] == 0
    for name, answer in (("is_initialized", True), ("get_backend", "cpu:gloo,cuda:nccl")):
        monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)
    assert outside_bytes(CUDA, now) == (900 * MIB, "nvml, whole device")


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.json.gz")), ids=lambda path: path.name)
def test_what_was_recorded_on_a_real_gpu_is_within_the_range_that_is_predicted(gpu, path):
    """17 trainings, each alone on an H100: 641 MiB without cuBLAS, else 751 to 771 at the end; 619 after a kernel."""
    recording = json.loads(gzip.decompress(path.read_bytes()))
    machine, cases = recording["machine"], [case for case in recording["cases"].values() if case.get("context")]
    major, minor = machine["compute_capability"]
    properties = {"major": major, "minor": minor, "multi_processor_count": machine["multiprocessors"]}
    vars(gpu.properties).update(properties, total_memory=machine["total_memory"])
    least, likely, most = context_bytes(CUDA)
    outside = sorted(case["outside_at_end"] for case in cases)
    assert least <= outside[0]
    assert outside[-1] <= most
    assert likely == pytest.approx(outside[len(outside) // 2], rel=0.03)
    # at setup, it is less than that, and more than half of what another process would add
    assert all(least <= case["context"] <= likely for case in cases)
    assert outside[-1] < 2 * least
