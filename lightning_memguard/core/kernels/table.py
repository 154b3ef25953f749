"""One named table of the bytes that no trace of operators sees. Every figure has a source or a recorded measurement.

Scratch that kernels take inside one operator is listed by device in `lightning_memguard.core.kernels.cpu` and
`lightning_memguard.core.kernels.cuda`; what outlives an operator, or never passes the allocator, stands here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from lightning_memguard.core.kernels import cpu, cuda
from lightning_memguard.core.trace.scratch import CpuTarget, CudaTarget, Scratch

Rule = Callable[..., Scratch]


def rule(operator: str, on: CpuTarget | CudaTarget | None) -> Rule | None:
    """The rule that tells what a kernel takes inside one operator, or None where it takes nothing.

    Args:
        operator: its name in ``aten``, such as ``"convolution"``.
        on: what it runs on: there are rules for a `CpuTarget` and a `CudaTarget`, none for other devices.

    Returns:
        A function of the operator's positional arguments, its keyword arguments, its results, and ``on``.
    """
    if isinstance(on, CpuTarget):
        return cpu.RULES.get(operator)
    return cuda.RULES.get(operator) if on else None


# -- CUDA

_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation")


def takes_cublas(operator: str) -> bool:
    """Whether an operator needs a cuBLAS handle, and with it a workspace."""
    return operator.split(".")[1] in _MATRIX_PRODUCTS if operator.startswith("aten.") else False


def cublas_workspace_bytes(compute_capability: tuple[int, int], environ: Mapping[str, str]) -> int:
    """What cuBLAS takes from the caching allocator for each handle, and keeps; each thread and stream has its own.

    32 MiB on compute capability 9, 10 and 12, else 8,519,680 bytes, or what ``CUBLAS_WORKSPACE_CONFIG`` asks for as
    ``:[KiB]:[count]`` pairs: `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    asked = re.findall(r":(\d+):(\d+)", environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if asked:
        return sum(int(kib) * int(count) for kib, count in asked) << 10
    return 32 << 20 if compute_capability[0] in (9, 10, 12) else 8_519_680
