"""Scratch: what a kernel takes from PyTorch's allocator inside one operator, where no trace of operators sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FLOAT = 4  # bytes of a float32, which most kernels accumulate in


@dataclass(frozen=True)
class CpuTarget:
    """What scratch on the CPU depends on besides shapes.

    Attributes:
        threads: those of one operator (``torch.get_num_threads``).
        channel_block: channels that oneDNN keeps side by side: 16 with AVX-512, else 8.
    """

    threads: int
    channel_block: int = 16


@dataclass(frozen=True)
class CudaTarget:
    """What scratch on a CUDA GPU depends on besides shapes.

    Attributes:
        compute_capability: such as ``(9, 0)``.
        multiprocessors: ``multiProcessorCount`` of the device's properties.
        cudnn_benchmark: whether convolutions are chosen by trying them (``torch.backends.cudnn.benchmark``).
        deterministic: ``torch.are_deterministic_algorithms_enabled()``, or cuDNN's own flag.
        tf32: whether float32 convolutions may run on TF32 tensor cores (``torch.backends.cudnn.allow_tf32``).
    """

    compute_capability: tuple[int, int]
    multiprocessors: int
    cudnn_benchmark: bool = False
    deterministic: bool = False
    tf32: bool = True


class ByteRange(NamedTuple):
    """A block whose size is not known exactly: at least ``low``, likely ``point``, at most ``high`` bytes."""

    low: int
    point: int
    high: int


Block = int | ByteRange
Moment = Block | tuple[Block, ...]
"""One block, or several that are alive together; all are given back before the next moment."""


@dataclass(frozen=True)
class Scratch:
    """Bytes that a kernel takes inside one operator, moment by moment, beyond what was alive before.

    Attributes:
        before: taken and given back before the results are allocated.
        after: taken and given back while all results are alive.
        kept: bytes of the first result's storage past what its shape tells.
        between: by a result's place among the operator's results that are tensors: taken and given back once that one
            is allocated and before the next one is.
    """

    before: tuple[Moment, ...] = ()
    after: tuple[Moment, ...] = ()
    kept: int = 0
    between: Mapping[int, tuple[Moment, ...]] = field(default_factory=dict)


NONE = Scratch()


# -- shapes


def nbytes(tensor: Any) -> int:
    """Bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())


def up(value: int, to: int) -> int:
    """The next multiple of ``to``."""
    return -(-value // to) * to


def is_channels_last(tensor: Any) -> bool:
    """Whether an image batch has its channels innermost, and is not contiguous besides."""
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    _, channels, height, width = tensor.shape
    return tuple(tensor.stride()) == (height * width * channels, 1, width * channels, channels)


def is_dense(tensor: Any) -> bool:
    """Whether a tensor is contiguous in either of the orders that kernels take as they are."""
    return bool(tensor.is_contiguous()) or is_channels_last(tensor)
