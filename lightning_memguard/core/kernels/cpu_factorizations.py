"""Matrix factorizations on the CPU: copies in LAPACK's column-major order, and its workspaces.

PyTorch asks the LAPACK that is linked into libtorch_cpu.so (MKL, in its own builds) how large a workspace a routine
wants, and so do we: a call with ``lwork = -1`` computes nothing, and writes how many numbers it wants. Where the
library exports no such routine there is no answer (None), and rules fall back to LAPACK's reference. Recorded on torch
2.11 and 2.13 with MKL, Linux x86-64 (`tests/core/kernels/test_cpu.py`).
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Literal

from lightning_memguard.core.kernels.arguments import CpuCall, Rules, after
from lightning_memguard.core.kernels.layout import transposing_tile_bytes
from lightning_memguard.core.trace.scratch import NONE, CpuTarget, Scratch, Tensor, nbytes

RULES = Rules[CpuTarget]()
Routine = Literal["geqrf", "orgqr"]
Kind = Literal["s", "d", "c", "z"]
"""How LAPACK names the types float32, float64, complex64 and complex128."""

NUMBER_BYTES: dict[Kind, int] = {"s": 4, "d": 8, "c": 8, "z": 16}
_INT, _LONG = 4, 8
_BLOCK = 32  # columns, in LAPACK's reference (`ilaenv`)
_KINDS: dict[tuple[bool, int], Kind] = {(False, 4): "s", (False, 8): "d", (True, 8): "c", (True, 16): "z"}


def _batch(matrices: Tensor) -> int:
    return math.prod(matrices.shape[:-2])


def _column_major_copy(matrices: Tensor) -> tuple[int, int]:
    """`cloneBatchedColumnMajor` (aten/src/ATen/native/LinearAlgebraUtils.h): the copy, and a tile that turns it."""
    return nbytes(matrices), transposing_tile_bytes(matrices.mT)


def _workspace(routine: Routine, call: CpuCall, columns: int, *reflectors: int) -> int:
    """Return the workspace that LAPACK asks for; a block of columns if it cannot be asked."""
    a = call["A"]
    kind = _KINDS.get((a.is_complex(), a.element_size()), "s")  # half precision raises, though not on fake tensors
    asked = workspace_bytes(routine, kind, (a.shape[-2], columns, *reflectors), call.target.threads)
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


# -- asking LAPACK


@functools.cache
def workspace_bytes(routine: Routine, kind: Kind, sizes: tuple[int, ...], threads: int) -> int | None:
    """The workspace of a routine that takes sizes, matrix, its leading dimension, scalars, workspace, lwork and info.

    Args:
        routine: "geqrf" decomposes (rows, columns); "orgqr" makes Q, of (rows, columns, reflectors).
        kind: the type of its numbers.
        sizes: in the routine's order.
        threads: those of one operator.
    """
    name = "ungqr" if routine == "orgqr" and kind in ("c", "z") else routine
    function = getattr(_library(), f"{kind}{name}_", None)
    if function is None:
        return None
    numbers = [ctypes.byref(ctypes.c_int(size)) for size in (*sizes, max(1, sizes[0]), -1, 0)]
    wanted = (ctypes.c_double * 2)()  # room for a number of any type
    choose = getattr(_library(), "MKL_Set_Num_Threads_Local", None)  # it starts none of them
    before = choose(threads) if choose else 0
    try:
        function(*numbers[:-3], None, numbers[-3], None, wanted, *numbers[-2:])
    finally:
        if choose:
            choose(before)
    single = ctypes.cast(wanted, ctypes.POINTER(ctypes.c_float))
    # `real_impl<...>(wkopt)` in aten/src/ATen/native/BatchLinearAlgebraKernel.cpp
    count = int(single[0] if kind in ("s", "c") else wanted[0])
    return (count + 1) * NUMBER_BYTES[kind]


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libtorch_cpu.so")  # as it is loaded: by its name
    except OSError:
        return None
