"""One named table of the bytes that no trace of operators sees. Every figure has a source or a recorded measurement.

The rules of all families of operators are joined here, for the CPU and for CUDA. cuBLAS' workspace, which outlives its
operator, is here too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_memguard.core import torch_port as port
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
    rnn,
    sorting,
)
from lightning_memguard.core.kernels.arguments import Rule, Rules, checked
from lightning_memguard.core.trace.scratch import CpuTarget, CudaTarget

CPU = Rules[CpuTarget]().join(cpu.RULES, cpu_convolutions.RULES, cpu_factorizations.RULES, attention.EITHER)
_CUDA_FAMILIES = (cuda_reductions, indexing, sorting, norms, convolutions, rnn, attention, cuda)
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
    products = ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation", *_SCALED)
    return operator.startswith("aten.") and operator.split(".")[1] in products


_SCALED = ("_scaled_mm", "_scaled_mm_v2")


def keeps_workspaces() -> bool:
    """Whether cuBLAS' workspaces stay with their thread; torch 2.15 takes one for each product and frees it at once."""
    return port.VERSION < (2, 15)


class CublasLt(NamedTuple):
    """The workspace of cublasLt: how large it is, and whether it is one besides that of cuBLAS, or may be."""

    nbytes: int
    is_sure: bool


def cublas_lt(compute_capability: tuple[int, int], environ: Mapping[str, str]) -> CublasLt:
    """Return what a product with `takes_cublas_lt` needs, by the allocator's events of torch 2.11 to 2.15.

    1 MiB, or what ``CUBLASLT_WORKSPACE_SIZE`` says in KiB; up to 2.14 no more than cuBLAS' own, unless they are told
    apart. 2.12 to 2.14 share that one; three of three published steps took twice this more even so, to the byte (a T4,
    torch 2.10 and 2.14), and eight of eight without such products nothing.
    """
    size, unified = environ.get("CUBLASLT_WORKSPACE_SIZE", ""), environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "")
    nbytes = int(size) << 10 if size.isdecimal() else 1 << 20
    if keeps_workspaces() and unified != "0":
        nbytes = min(nbytes, cublas_workspace_bytes(compute_capability, environ))
    is_shared = (unified or "01"[port.VERSION >= (2, 12)]) == "1"
    return CublasLt(nbytes, is_sure=not (keeps_workspaces() and is_shared))


def takes_cublas_lt(operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a product goes to cublasLt, which adds its bias (`addmm_out_cuda_impl` in Blas.cpp) or scales float8.

    Float8 with a scale for each row is taken for cublasLt's too (`_scaled_mm_out_cuda` in ScaledBlas.cpp), but it is
    CUTLASS' except on compute capability 9 with CUDA 12.9 or newer.
    """
    if operator.split(".")[1] in _SCALED:
        return True
    if not operator.startswith(("aten.addmm.", "aten._addmm_activation.")):
        return False
    bias, _, second = args[:3]
    added = bias.dim() == 1 and bias.is_contiguous() and kwargs.get("beta", 1) == 1
    return bool(added and bias.shape[0] == second.shape[1] and min(second.shape) > 1 and not bias.is_complex())


def cublas_workspace_bytes(compute_capability: tuple[int, int], environ: Mapping[str, str]) -> int:
    """Return the bytes that each handle of cuBLAS (one a thread and stream) takes from the caching allocator and keeps.

    32 MiB on compute capability 9, and from torch 2.12 on 10 and 12, else 8,519,680 bytes, or what
    ``CUBLAS_WORKSPACE_CONFIG`` sets as ``:[KiB]:[count]`` pairs: `parseChosenWorkspaceSize` in
    aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    pairs = re.findall(r":(\d+):(\d+)", environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(kib) * int(count) for kib, count in pairs) << 10
    large = (9, 10, 12) if port.VERSION >= (2, 12) else (9,)
    return 32 << 20 if compute_capability[0] in large else 8_519_680
