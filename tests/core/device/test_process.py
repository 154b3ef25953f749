"""Memory that a process takes besides its tensors when it trains on the CPU."""

from __future__ import annotations

import torch

from lightning_memguard.core.device.process import OBJECTS_BYTES, process_bytes
from lightning_memguard.units import MIB


def weight(outputs: int, inputs: int) -> torch.Tensor:
    return torch.empty(outputs, inputs, device="meta")


def test_what_a_process_takes_is_a_range_that_grows_with_threads_and_with_the_largest_matrix() -> None:
    assert process_bytes([], 1) == (0, 0, 8 * MIB)
    assert process_bytes([], 4) == (0, 0, 12 * MIB)
    head = weight(4096, 384)
    assert process_bytes([weight(8, 8), head, torch.empty(9000, 9, 9, 9, device="meta")], 2) == (0, 0, 14 * MIB)


def test_a_head_as_wide_as_a_vocabulary_is_packed_in_panels() -> None:
    # kept by 448 x 768 times 768 x 50257: 17 MiB on one thread, 35 on two (benchmarks/overhead.py)
    one, two = (process_bytes([weight(50257, 768)], threads)[2] / MIB for threads in (1, 2))
    assert 17 < one < 28
    assert 35 < two < 48


def test_what_was_recorded_is_within_the_range() -> None:
    """MiB kept after a linear layer's products: inputs, outputs, threads, from `benchmarks/overhead.py`."""
    recorded = {
        (2048, 512, 1): 7.31,
        (384, 4096, 1): 6.60,
        (384, 16384, 1): 15.23,
        (128, 512, 2): 3.56,
        (2048, 512, 2): 7.69,
        (384, 4096, 2): 9.12,
        (384, 16384, 2): 27.13,
    }
    for (inputs, outputs, threads), kept in recorded.items():
        most = process_bytes([weight(outputs, inputs)], threads)[2] - OBJECTS_BYTES
        assert kept * MIB <= most <= (kept + 5) * MIB
