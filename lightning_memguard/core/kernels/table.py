"""One named table of the bytes that no trace of operators sees. Every figure has a source or a recorded measurement.

The rules of all families of operators are joined here, for the CPU and for CUDA. cuBLAS' workspace, which outlives its
operator, is here too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lightning_memguard.core.kernels import (
    attention,
    convolutions,
    cpu,
    cpu_convolutions,
    cpu_factorizations,
    cuda,
    cuda_reductions,
    indexing,
    norms,
    sorting,
)
from lightning_memguard.core.kernels.arguments import Rule, Rules, checked
from lightning_memguard.core.trace.scratch import CpuTarget, CudaTarget

CPU = Rules[CpuTarget]().join(cpu.RULES, cpu_convolutions.RULES, cpu_factorizations.RULES, attention.EITHER)
_CUDA_FAMILIES = (cuda_reductions, indexing, sorting, norms, convolutions, attention, cuda)
CUDA = Rules[CudaTarget]().join(*(family.RULES for family in _CUDA_FAMILIES), attention.EITHER)
BY_TYPES = cpu.BY_TYPES
_BY_TARGET: dict[type, dict[str, Rule[Any]]] = {
    CpuTarget: {operator: checked(rule) for operator, rule in CPU.items()},
    CudaTarget: {operator: checked(rule) for operator, rule in CUDA.items()},
}


def rule(operator: str, target: CpuTarget | CudaTarget | None) -> Rule[Any] | None:
    """The rule for what a kernel takes inside one operator, or None if it takes nothing.

    Args:
        operator: its name in ``aten``, such as ``"convolution"``.
        target: what it runs on: there are rules for a `CpuTarget` and a `CudaTarget`, none for other devices.
    """
    return _BY_TARGET[type(target)].get(operator) if target else None


def takes_cublas(operator: str) -> bool:
    """Whether an operator needs a cuBLAS handle, and with it a workspace."""
    products = ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation")
    return operator.startswith("aten.") and operator.split(".")[1] in products


CUBLAS_LT_WORKSPACE = 1 << 20
"""Bytes that each thread may keep for products to which a bias is added: cublasLt shares cuBLAS' workspace by default,
but three of three published steps with them took twice this more than is predicted, to the byte (a T4, torch 2.10 and
2.14), and eight of eight without them nothing."""


def cublas_workspace_bytes(compute_capability: tuple[int, int], environ: Mapping[str, str]) -> int:
    """Return the bytes that each handle of cuBLAS (one a thread and stream) takes from the caching allocator and keeps.

    32 MiB on compute capability 9, 10 and 12, else 8,519,680 bytes, or what ``CUBLAS_WORKSPACE_CONFIG`` sets as
    ``:[KiB]:[count]`` pairs: `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    pairs = re.findall(r":(\d+):(\d+)", environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(kib) * int(count) for kib, count in pairs) << 10
    return 32 << 20 if compute_capability[0] in (9, 10, 12) else 8_519_680
