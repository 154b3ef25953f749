"""What a process that trains on the CPU takes besides its tensors."""

from __future__ import annotations

import torch

from lightning_memguard.core.device.process import process_bytes
from lightning_memguard.units import MIB


def weight(outputs: int, inputs: int) -> torch.Tensor:
    return torch.empty(outputs, inputs, device="meta")


def test_what_a_process_takes_is_a_range_that_grows_with_threads_and_with_the_largest_matrix() -> None:
    assert process_bytes([], 1) == (0, 0, 6 * MIB)
    assert process_bytes([], 4) == (0, 0, 12 * MIB)
    head = weight(4096, 384)
    assert process_bytes([weight(8, 8), head, torch.empty(9000, 9, 9, 9, device="meta")], 2) == (0, 0, 14 * MIB)


def test_a_head_as_wide_as_a_vocabulary_is_packed_in_panels() -> None:
    # kept by 448 x 768 times 768 x 50257: 17 MiB on one thread, 35 on two (benchmarks/cpu_process.py)
    one, two = (process_bytes([weight(50257, 768)], threads)[2] / MIB for threads in (1, 2))
    assert 17 < one < 26
    assert 35 < two < 48
