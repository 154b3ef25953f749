"""Matrix factorizations on the CPU: copies in LAPACK's column-major order, and its workspaces.

Recorded on torch 2.11 and 2.13 with MKL, x86-64 (`tests/core/kernels/test_cpu.py`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_memguard.core.kernels import lapack
from lightning_memguard.core.kernels.arguments import CpuCall, Rules, after
from lightning_memguard.core.kernels.layout import transposing_tile_bytes
from lightning_memguard.core.trace.scratch import NONE, CpuTarget, Scratch, nbytes

if TYPE_CHECKING:
    from torch import Tensor

RULES = Rules[CpuTarget]()
_INT, _LONG = 4, 8
_BLOCK = 32  # columns, in LAPACK's reference (`ilaenv`)
_KINDS: dict[tuple[bool, int], lapack.Kind] = {(False, 4): "s", (False, 8): "d", (True, 8): "c", (True, 16): "z"}


def _batch(matrices: Tensor) -> int:
    return math.prod(matrices.shape[:-2])


def _column_major_copy(matrices: Tensor) -> tuple[int, int]:
    """`cloneBatchedColumnMajor` (aten/src/ATen/native/LinearAlgebraUtils.h): the copy, and a tile that turns it."""
    return nbytes(matrices), transposing_tile_bytes(matrices.mT)


def _workspace(routine: lapack.Routine, call: CpuCall, columns: int, *reflectors: int) -> int:
    """Return the workspace that LAPACK asks for; a block of columns if it cannot be asked."""
    a = call["A"]
    kind = _KINDS.get((a.is_complex(), a.element_size()), "s")  # half precision raises, though not on fake tensors
    asked = lapack.workspace_bytes(routine, kind, (a.shape[-2], columns, *reflectors), call.target.threads)
    return asked or _BLOCK * columns * a.element_size()


@RULES.of("_linalg_svd")
def _svd(call: CpuCall) -> Scratch:
    """`linalg_svd_out` (aten/src/ATen/native/BatchLinearAlgebra.cpp): a copy that is overwritten."""
    a = call["A"]
    return after((*_column_major_copy(a), _INT * _batch(a))) if a.numel() else NONE


@RULES.of("linalg_qr")
def _qr(call: CpuCall) -> Scratch:
    """`linalg_qr_out` (BatchLinearAlgebra.cpp), `apply_geqrf` and `apply_orgqr` (BatchLinearAlgebraKernel.cpp)."""
    a, mode = call["A"], call["mode"]
    if not a.numel():
        return NONE
    rows, columns = a.shape[-2:]
    least = min(rows, columns)
    scalars, decompose = _batch(a) * least * a.element_size(), _workspace("geqrf", call, columns)
    if mode == "r":
        copy, tile = _column_major_copy(a) if rows > columns else (0, 0)  # else R has room for the reflectors
        return after((scalars, copy, tile), (scalars, copy, decompose))
    width = rows if mode == "complete" else least
    in_order = nbytes(call.results[1]) if a.dim() > 2 else 0  # `triu_` of a batch
    return after((scalars, decompose), (scalars, in_order), (scalars, _workspace("orgqr", call, width, least)))


@RULES.of("_linalg_eigh")
def _eigh(call: CpuCall) -> Scratch:
    """`apply_lapack_eigh` (BatchLinearAlgebraKernel.cpp): the workspaces of `syevd`, if it makes the vectors."""
    a, n = call["A"], call["A"].shape[-1]
    if not a.numel():
        return NONE
    if a.is_complex() or not call["compute_v"]:
        return after((_INT * _batch(a), *(() if call["compute_v"] else _column_major_copy(a))))
    return after((_INT * _batch(a), (2 + 6 * n + 2 * n * n) * a.element_size(), (3 + 5 * n) * _INT))


@RULES.of("linalg_inv_ex")
def _inverse(call: CpuCall) -> Scratch:
    """`linalg_inv_ex_out` (BatchLinearAlgebra.cpp): the LU decomposition, its pivots, and whether they are in range."""
    a = call["A"]
    pivots = _batch(a) * a.shape[-1]
    return after((nbytes(a), _INT * pivots, pivots, _LONG + _INT)) if a.numel() else NONE
