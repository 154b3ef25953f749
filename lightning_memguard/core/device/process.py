"""What a process that trains on the CPU takes besides its tensors: a range, from recordings."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_memguard.units import MIB

OBJECTS_BYTES = 4 * MIB
"""Objects of Python's, threads, what is first imported meanwhile: 2.6 to 3.9 MiB from `setup` to the second step
(`benchmarks/cpu_process.py`, which reproduces the figures below as well)."""

LESS = ((0, 0, OBJECTS_BYTES), 0)
"""What of it is counted at the smallest batch size, where all of it leaves no room: that alone refuses no training."""

_PRODUCTS_BYTES = 2 * MIB  # for each thread, besides the panel

# MKL's sgemm copies panels of the right-hand matrix into buffers that it keeps (recorded on AVX-512, torch 2.13).
_PANEL_ROWS, _PANEL_COLUMNS = 512, 9984


def process_bytes(parameters: Iterable[torch.Tensor], threads: int) -> tuple[int, int, int]:
    """What a training takes besides its tensors on the CPU: at least, most likely, at most.

    That is what Python holds, threads, and the buffers that matrix products keep; how large those are depends on
    what is multiplied, and a model that multiplies nothing has none.

    Args:
        parameters: of the model; the larger its matrices, the larger the buffers.
        threads: how many PyTorch computes with.

    >>> process_bytes([torch.zeros(1024, 512)], threads=2)
    (0, 0, 10485760)
    """
    panels = (_panel_bytes(each.shape[0], each.shape[1], threads) for each in parameters if each.dim() == 2)
    return 0, 0, OBJECTS_BYTES + threads * _PRODUCTS_BYTES + max(panels, default=0)


def _panel_bytes(outputs: int, inputs: int, threads: int) -> int:
    """The larger one of the forward pass's product with a weight and the backward pass's."""
    shapes = ((inputs, outputs), (outputs, inputs))
    return max(4 * min(rows, _PANEL_ROWS) * min(columns, threads * _PANEL_COLUMNS) for rows, columns in shapes)
