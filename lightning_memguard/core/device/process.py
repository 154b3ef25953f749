"""Memory of a process that trains on the CPU, in addition to its tensors: a range, from recordings."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_memguard.core.range import Range
from lightning_memguard.units import MIB

OBJECTS_BYTES = 4 * MIB
"""Objects of Python's, threads, what is first imported meanwhile: 2.7 MiB from `setup` to the second step
(`benchmarks/overhead.py process`, which gives the figures below as well); the rest is for loggers and validation."""

LESS = Range(0, 0, OBJECTS_BYTES)
"""Bytes counted at the smallest batch size if the full range leaves no room: the process alone refuses no training."""

# MKL's sgemm copies panels of the right-hand matrix into buffers that it keeps (recorded on AVX-512, torch 2.13), and
# besides the largest up to 3.3 MiB on one thread, 3.7 on two. Not counted: if a weight's gradient sums over 8 times
# as many rows as the weight's smaller side, two threads keep another copy of it (1024 x 1024 from 8,192 rows on).
_PRODUCTS_BYTES, _LEAST_THREADS = 2 * MIB, 2
_PANEL_ROWS, _PANEL_COLUMNS = 512, 9984


def process_bytes(parameters: Iterable[torch.Tensor], threads: int) -> Range[int]:
    """Return the bytes that a training on the CPU takes in addition to its tensors: at least, most likely, at most.

    These are Python's objects, threads, and the buffers that matrix products keep. The buffers depend on the matrices;
    a model without products has none.

    Args:
        parameters: of the model; the larger its matrices, the larger the buffers.
        threads: how many PyTorch computes with.

    >>> process_bytes([torch.zeros(1024, 512)], threads=2)
    Range(0, 0, 10485760)
    """
    # Of the forward pass's product with a weight and of the backward pass's.
    known = (each for each in parameters if not torch.nn.parameter.is_lazy(each))
    shapes = (shape for each in known if each.dim() == 2 for shape in (each.shape, each.shape[::-1]))
    panels = (4 * min(rows, _PANEL_ROWS) * min(columns, threads * _PANEL_COLUMNS) for rows, columns in shapes)
    return Range(0, 0, OBJECTS_BYTES + max(threads, _LEAST_THREADS) * _PRODUCTS_BYTES + max(panels, default=0))
