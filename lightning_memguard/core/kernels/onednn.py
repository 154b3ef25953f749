"""oneDNN's own answer to what a kernel of it takes: blocked copies and scratchpads, by shape, processor and threads.

oneDNN is linked into libtorch_cpu.so. Its C interface (dnnl.h; the functions used here are the same in oneDNN 3.0 to
3.13) is not exported, but named in the library's symbol table. A *primitive descriptor* chooses an implementation and
says which memory it wants; nothing is computed, and nothing is allocated from PyTorch. Checked on Linux x86-64. Where
the library has no such symbols there is no answer (None), and rules fall back to formulas.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from typing_extensions import Self

Kind = Literal["f16", "bf16", "f32"]
Operation = Literal["forward", "input", "weight"]

# Constants of dnnl_types.h and dnnl_common_types.h.
_KINDS: dict[Kind, int] = {"f16": 1, "bf16": 2, "f32": 3}
_CPU, _USER_SCRATCHPAD, _FORWARD_TRAINING, _ANY_FORMAT = 1, 1, 64, 1
_CONVOLUTION, _DECONVOLUTION = 1, 10  # `dnnl_convolution_direct`, `dnnl_deconvolution_direct`
_SRC, _DIFF_SRC, _WEIGHTS, _DIFF_WEIGHTS, _DST, _DIFF_DST, _SCRATCHPAD = 129, 130, 131, 132, 133, 134, 136
_ARGUMENT_SRC, _INNER_BLOCKS = 1, 263  # `DNNL_ARG_SRC`, `dnnl_query_inner_nblks_s32`
_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_CONVOLVE = (_POINTER,) * 9  # descriptors, four lists of sizes, attributes, and in the backward pass the forward one
_PREFIX = b"\0dnnl_"  # of their names, in a table of names that end with 0
_MAJOR_VERSION = 3  # whose minor versions keep the interface
_FUNCTIONS = {
    "dnnl_version": (),
    "dnnl_engine_create": (_POINTER, _INT, _SIZE),
    "dnnl_memory_desc_create_with_tag": (_POINTER, _INT, _POINTER, _INT, _INT),
    "dnnl_memory_desc_create_with_strides": (_POINTER, _INT, _POINTER, _INT, _POINTER),
    "dnnl_memory_desc_get_size": (_POINTER,),
    "dnnl_memory_desc_equal": (_POINTER, _POINTER),
    "dnnl_memory_desc_query": (_POINTER, _INT, _POINTER),
    "dnnl_memory_desc_destroy": (_POINTER,),
    "dnnl_primitive_attr_create": (_POINTER,),
    "dnnl_primitive_attr_set_scratchpad_mode": (_POINTER, _INT),
    "dnnl_primitive_attr_set_scales_mask": (_POINTER, _INT, _INT),
    "dnnl_primitive_attr_set_post_ops": (_POINTER, _POINTER),
    "dnnl_primitive_attr_destroy": (_POINTER,),
    "dnnl_post_ops_create": (_POINTER,),
    "dnnl_post_ops_append_sum": (_POINTER, ctypes.c_float, ctypes.c_int32, _INT),
    "dnnl_post_ops_destroy": (_POINTER,),
    "dnnl_convolution_forward_primitive_desc_create": (_POINTER, _POINTER, _INT, _INT, *_CONVOLVE),
    "dnnl_convolution_backward_data_primitive_desc_create": (_POINTER, _POINTER, _INT, *_CONVOLVE),
    "dnnl_convolution_backward_weights_primitive_desc_create": (_POINTER, _POINTER, _INT, *_CONVOLVE, _POINTER),
    "dnnl_deconvolution_forward_primitive_desc_create": (_POINTER, _POINTER, _INT, _INT, *_CONVOLVE),
    "dnnl_deconvolution_backward_data_primitive_desc_create": (_POINTER, _POINTER, _INT, *_CONVOLVE),
    "dnnl_deconvolution_backward_weights_primitive_desc_create": (_POINTER, _POINTER, _INT, *_CONVOLVE, _POINTER),
    "dnnl_matmul_primitive_desc_create": (_POINTER,) * 7,
    "dnnl_reorder_primitive_desc_create": (_POINTER,) * 6,
    "dnnl_primitive_desc_query_md": (_POINTER, _INT, _INT),
    "dnnl_primitive_desc_destroy": (_POINTER,),
}
_RETURNS: dict[str, Any] = {
    "dnnl_version": ctypes.POINTER(_INT),
    "dnnl_memory_desc_get_size": _SIZE,
    "dnnl_primitive_desc_query_md": _POINTER,
}


class Matrix(NamedTuple):
    """A tensor as oneDNN is given it: sizes, strides in elements, type.

    ``fixed`` is whether oneDNN must take it in these strides, rather than choose a layout of its own.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    kind: Kind
    fixed: bool = False


class Window(NamedTuple):
    """How a convolution's kernel moves over the image."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    transposed: bool


class Piece(NamedTuple):
    """A tensor in the layout that a primitive wants.

    Attributes:
        nbytes: of the tensor, in that layout.
        given: whether it is the layout it was given in, so that no copy is made.
        strided: whether it is a plain layout, such as NHWC, rather than a blocked one.
        reorder: the scratchpad of the copy.
    """

    nbytes: int
    given: bool
    strided: bool
    reorder: int

    @property
    def copied(self) -> int:
        """Bytes of the copy that is made before the primitive runs."""
        return 0 if self.given else self.nbytes


NO_COPY = Piece(0, True, True, 0)


class Taken(NamedTuple):
    """Memory of one primitive: source, weights, destination (or their gradients), and its scratchpad in bytes."""

    source: Piece
    weights: Piece
    destination: Piece
    scratchpad: int


@functools.lru_cache(8192)
def convolution(
    operation: Operation, x: Matrix, weight: Matrix, y: Matrix, bias: bool, window: Window, threads: int
) -> Taken | None:
    """Ask oneDNN for the memory of a convolution or one of its gradients; None if it cannot be asked.

    Args:
        operation: the convolution itself, its input's gradient, or its weight's.
        x: the input.
        weight: with the groups as first dimension, if there are several.
        y: the result.
        bias: whether there is one (of the weight's gradient: whether its gradient is computed).
        window: how the kernel moves.
        threads: those of one operator.
    """
    return _asked(threads, lambda question: question.convolution(operation, x, weight, y, bias, window))


@functools.lru_cache(8192)
def matmul(x: Matrix, weight: Matrix, y: Matrix, alpha: float, beta: float, threads: int) -> Taken | None:
    """Ask oneDNN for the memory of ``y = alpha * x @ weight + beta * y``; None if it cannot be asked."""
    return _asked(threads, lambda question: question.matmul(x, weight, y, alpha, beta))


def _asked(threads: int, ask: Callable[[_Question], Taken]) -> Taken | None:
    asked = library()
    if asked is None:
        return None
    with _Question(asked, threads) as question:
        return ask(question)
    return None  # it was refused


class _RefusedError(Exception):
    """oneDNN has no implementation for this."""


class _Library:
    """The functions of dnnl.h inside libtorch_cpu.so."""

    def __init__(self, addresses: dict[str, int], omp: ctypes.CDLL) -> None:
        self.omp = omp
        self.functions = {
            name: ctypes.CFUNCTYPE(_RETURNS.get(name, _INT), *types)(addresses[name])
            for name, types in _FUNCTIONS.items()
        }
        if self.functions["dnnl_version"]()[0] != _MAJOR_VERSION:
            raise _RefusedError("dnnl_version")
        self.engine = self.new("dnnl_engine_create", _CPU, 0)

    def new(self, name: str, *arguments: object) -> int:
        made = _POINTER()
        if self.functions[name](ctypes.addressof(made), *arguments) or made.value is None:
            raise _RefusedError(name)
        return made.value


class _Question:
    """One question, asked as if an operator had this many threads; whatever was made for it is given back."""

    def __init__(self, library: _Library, threads: int) -> None:
        self._library, self._threads, self._exits = library, threads, ExitStack()

    def __enter__(self) -> Self:
        omp = self._library.omp
        before = omp.omp_get_max_threads()
        omp.omp_set_num_threads(self._threads)
        self._exits.callback(omp.omp_set_num_threads, before)
        self._attributes = self._new_attributes()
        return self

    def __exit__(self, *error: object) -> bool:
        self._exits.close()
        return error[0] is _RefusedError

    def convolution(
        self, operation: Operation, x: Matrix, weight: Matrix, y: Matrix, bias: bool, window: Window
    ) -> Taken:
        """`get_primitive_desc` and `compute_v2` in ideep's conv.hpp and deconv.hpp."""
        name, kind = ("deconvolution", _DECONVOLUTION) if window.transposed else ("convolution", _CONVOLUTION)
        source, weights, result = (self._wanted(each) for each in (x, weight, y))
        offset = self._wanted(Matrix((y.shape[1],), (1,), y.kind)) if bias else None
        right = window.padding
        if window.transposed:  # `padding_r` in aten/src/ATen/native/mkldnn/Conv.cpp
            right = tuple(p - o for p, o in zip(window.padding, window.output_padding, strict=True))
        moves = [self._list(each) for each in (window.stride, [d - 1 for d in window.dilation], window.padding, right)]
        engine, tensors, rest = self._library.engine, (source, weights, offset, result), (*moves, self._attributes)
        forward = self._descriptor(f"{name}_forward", engine, _FORWARD_TRAINING, kind, *tensors, *rest)
        if operation == "forward":
            return self._taken(forward, (x, _SRC), (weight, _WEIGHTS), (y, _DST))
        rest = (*moves, forward, self._attributes)
        if operation == "input":
            backward = self._descriptor(f"{name}_backward_data", engine, kind, source, weights, result, *rest)
            return self._taken(backward, (x, _DIFF_SRC), (weight, _WEIGHTS), (y, _DIFF_DST))
        backward = self._descriptor(f"{name}_backward_weights", engine, kind, *tensors, *rest)
        return self._taken(backward, (x, _SRC), (weight, _DIFF_WEIGHTS), (y, _DIFF_DST))

    def matmul(self, x: Matrix, weight: Matrix, y: Matrix, alpha: float, beta: float) -> Taken:
        """`matmul_forward::do_prepare` in ideep's matmul.hpp."""
        if alpha != 1:
            self._call("dnnl_primitive_attr_set_scales_mask", self._attributes, _ARGUMENT_SRC, 0)
        if beta:
            operations = self._new("dnnl_post_ops_create", "dnnl_post_ops_destroy")
            self._call("dnnl_post_ops_append_sum", operations, beta, 0, 0)
            self._call("dnnl_primitive_attr_set_post_ops", self._attributes, operations)
        tensors = self._given(x), self._given(weight), None, self._given(y)
        made = self._descriptor("matmul", self._library.engine, *tensors, self._attributes)
        return self._taken(made, (x, _SRC), (weight, _WEIGHTS), (y, _DST))

    def _taken(self, primitive: int, *tensors: tuple[Matrix, int]) -> Taken:
        source, weights, destination = (self._piece(primitive, *tensor) for tensor in tensors)
        return Taken(source, weights, destination, self._bytes(self._query(primitive, _SCRATCHPAD)))

    def _piece(self, primitive: int, tensor: Matrix, what: int) -> Piece:
        wanted, given = self._query(primitive, what), self._given(tensor)
        if self._library.functions["dnnl_memory_desc_equal"](wanted, given):
            return Piece(self._bytes(wanted), True, True, 0)
        ends = (wanted, given) if what in (_DST, _DIFF_SRC, _DIFF_WEIGHTS) else (given, wanted)
        engine = self._library.engine
        reorder = self._descriptor("reorder", ends[0], engine, ends[1], engine, self._new_attributes())
        blocks = ctypes.c_int()
        self._call("dnnl_memory_desc_query", wanted, _INNER_BLOCKS, ctypes.addressof(blocks))
        return Piece(self._bytes(wanted), False, not blocks.value, self._bytes(self._query(reorder, _SCRATCHPAD)))

    def _new_attributes(self) -> int:
        attributes = self._new("dnnl_primitive_attr_create", "dnnl_primitive_attr_destroy")
        self._call("dnnl_primitive_attr_set_scratchpad_mode", attributes, _USER_SCRATCHPAD)
        return attributes

    def _wanted(self, tensor: Matrix) -> int:
        if tensor.fixed:
            return self._given(tensor)
        sizes = (len(tensor.shape), self._list(tensor.shape), _KINDS[tensor.kind])
        return self._new("dnnl_memory_desc_create_with_tag", "dnnl_memory_desc_destroy", *sizes, _ANY_FORMAT)

    def _given(self, tensor: Matrix) -> int:
        sizes = (len(tensor.shape), self._list(tensor.shape), _KINDS[tensor.kind])
        strides = self._list(tensor.stride)
        return self._new("dnnl_memory_desc_create_with_strides", "dnnl_memory_desc_destroy", *sizes, strides)

    def _descriptor(self, name: str, *arguments: object) -> int:
        return self._new(f"dnnl_{name}_primitive_desc_create", "dnnl_primitive_desc_destroy", *arguments)

    def _query(self, primitive: int, what: int) -> int:
        found = self._library.functions["dnnl_primitive_desc_query_md"](primitive, what, 0)
        return found if isinstance(found, int) else 0

    def _bytes(self, descriptor: int) -> int:
        return int(self._library.functions["dnnl_memory_desc_get_size"](descriptor)) if descriptor else 0

    def _list(self, values: Sequence[int]) -> object:
        return ctypes.cast((ctypes.c_int64 * 12)(*values), _POINTER)

    def _new(self, name: str, destroy: str, *arguments: object) -> int:
        made = self._library.new(name, *arguments)
        self._exits.callback(self._library.functions[destroy], made)
        return made

    def _call(self, name: str, *arguments: object) -> None:
        if self._library.functions[name](*arguments):
            raise _RefusedError(name)


@functools.cache
def library() -> _Library | None:
    """The functions inside this PyTorch, or None where they are not found."""
    try:
        start, path = _mapped("libtorch_cpu")
        _, omp = _mapped("libgomp", near=str(Path(path).parents[1]))  # torch/lib or torch.libs: others bundle one too
        addresses = _symbols(path, list(_FUNCTIONS))
        return _Library({name: start + offset for name, offset in addresses.items()}, ctypes.CDLL(omp))
    except (OSError, LookupError, struct.error, ValueError, AttributeError, _RefusedError):
        return None


def _mapped(name: str, near: str = "") -> tuple[int, str]:
    """Find the address of a loaded library, and its file; of several the one in a folder that starts like ``near``."""
    found: list[tuple[int, str]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, _, _, *path = line.split(maxsplit=5)
        if path and Path(path[0]).name.startswith(name) and int(offset, 16) == 0:
            found.append((int(addresses.partition("-")[0], 16), path[0]))
    if not found:
        raise LookupError(name)
    return next((each for each in found if each[1].startswith(near)), found[0])


def _symbols(path: str, names: Sequence[str]) -> dict[str, int]:
    """Addresses of functions in a library's symbol table (``.symtab`` of a 64-bit little-endian ELF file).

    The tables have 100 MiB: they are read in pieces, since a process in training would be seen to take them.
    """
    with Path(path).open("rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":
            raise LookupError(path)
        place, size, count = *struct.unpack("<Q", _read(file, 40, 8)), *struct.unpack("<HH", _read(file, 58, 4))
        sections = [
            struct.unpack_from("<IIQQQQIIQQ", _read(file, place + number * size, 64)) for number in range(count)
        ]
        table = next((section for section in sections if section[1] == 2), None)  # SHT_SYMTAB
        if table is None:
            raise LookupError(".symtab")
        strings = sections[table[6]]
        names_at, found = dict[int, str](), dict[str, int]()
        for start in range(0, strings[5], _PIECE):
            piece = _read(file, strings[4] + start, min(_PIECE + _LONGEST_NAME, strings[5] - start))
            at = piece.find(_PREFIX)
            while at >= 0 and (stop := piece.find(b"\0", at + 1)) >= 0:
                names_at[start + at + 1] = piece[at + 1 : stop].decode()
                at = piece.find(_PREFIX, stop)
        for start in range(0, table[5], _PIECE):
            entries = array("I", _read(file, table[4] + start, min(_PIECE, table[5] - start)))
            for number, offset in enumerate(entries[::6]):
                if offset in names_at:
                    found[names_at[offset]] = entries[6 * number + 2] | entries[6 * number + 3] << 32
    return {name: found[name] for name in names}


_PIECE = 24 << 16  # bytes of a table, whole entries of symbols
_LONGEST_NAME = 512


def _read(file: BinaryIO, place: int, size: int) -> bytes:
    file.seek(place)
    return file.read(size)
