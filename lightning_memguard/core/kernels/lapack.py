"""LAPACK's own answer to how large a workspace a routine wants, by its arguments and threads.

PyTorch asks the LAPACK that is linked into libtorch_cpu.so (MKL, in its own builds) in the same way: a call with
``lwork = -1`` computes nothing, and writes how many numbers it wants. Checked on torch 2.11 and 2.13, Linux x86-64.
Where the library exports no such routine there is no answer (None), and rules fall back to LAPACK's reference.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Routine = Literal["geqrf", "orgqr"]
Kind = Literal["s", "d", "c", "z"]
"""How LAPACK names the types float32, float64, complex64 and complex128."""

NUMBER_BYTES: dict[Kind, int] = {"s": 4, "d": 8, "c": 8, "z": 16}


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
    with _threads_of_mkl(threads):
        function(*numbers[:-3], None, numbers[-3], None, wanted, *numbers[-2:])
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


@contextmanager
def _threads_of_mkl(count: int) -> Iterator[None]:
    """Let MKL answer for this many threads; it starts none of them."""
    choose = getattr(_library(), "MKL_Set_Num_Threads_Local", None)
    before = choose(count) if choose else 0
    try:
        yield
    finally:
        if choose:
            choose(before)
