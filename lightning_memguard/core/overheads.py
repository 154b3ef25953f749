"""One named table of the bytes that no trace of operators sees. Every figure has a source or a recorded measurement.

Scratch that kernels take inside one operator is listed by device in `lightning_memguard.core.cpu_kernels` and
`lightning_memguard.core.cuda_kernels`; what outlives an operator, or never passes the allocator, stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_memguard.core import cpu_kernels, cuda_kernels
from lightning_memguard.core.scratch import NONE, Chip, Host, Scratch


def scratch(
    operator: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], on: Host | Chip | None
) -> Scratch:
    """What a kernel takes inside one operator.

    Args:
        operator: such as ``"aten.convolution.default"``.
        args: its positional arguments; tensors may be fake.
        kwargs: its keyword arguments.
        results: its results.
        on: what it runs on: there are rules for a `Host` and a `Chip`, none for other devices.
    """
    if not operator.startswith("aten."):
        return NONE
    name = operator.split(".")[1]
    if isinstance(on, Host):
        on_host = cpu_kernels.RULES.get(name)
        return on_host(args, kwargs, results, on) if on_host else NONE
    on_chip = cuda_kernels.RULES.get(name) if on else None
    return on_chip(args, kwargs, results, on) if on_chip and on else NONE


# -- CUDA

_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation")


def takes_cublas(operator: str) -> bool:
    """Whether an operator needs a cuBLAS handle, and with it a workspace."""
    return operator.split(".")[1] in _MATRIX_PRODUCTS if operator.startswith("aten.") else False


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """What cuBLAS takes from the caching allocator for each handle, and keeps; each thread and stream has its own.

    32 MiB on compute capability 9, 10 and 12, else 8,519,680 bytes: `getChosenWorkspaceSize` in
    aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    return 32 << 20 if compute_capability[0] in (9, 10, 12) else 8_519_680
