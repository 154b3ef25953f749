"""Scratch: what a kernel takes from PyTorch's allocator inside one operator, unseen by a trace of operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from lightning_memguard.core.range import Range

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor"
"""For type checkers alone: the files of rules load no torch."""

FLOAT = 4  # bytes of a float32, which most kernels accumulate in


@dataclass(frozen=True)
class CpuTarget:
    """Properties of a CPU that scratch depends on, apart from shapes.

    Attributes:
        threads: threads of one operator (``torch.get_num_threads``).
        channel_block: channels that oneDNN keeps side by side: 16 with AVX-512, else 8.
        bf16: whether PyTorch gives bfloat16 to oneDNN here.
        fp16: whether PyTorch gives float16 to oneDNN here.
        amx_bf16: whether there are AMX tiles for bfloat16.
        amx_fp16: whether there are AMX tiles for float16.
    """

    threads: int
    channel_block: int = 16
    bf16: bool = True
    fp16: bool = True
    amx_bf16: bool = False
    amx_fp16: bool = False


@dataclass(frozen=True)
class CudaTarget:
    """Properties of a CUDA GPU that scratch depends on, apart from shapes.

    Attributes:
        compute_capability: such as ``(9, 0)``.
        multiprocessors: ``multiProcessorCount`` of the device's properties.
        deterministic: ``torch.are_deterministic_algorithms_enabled()``, or cuDNN's own flag.
        tf32: whether float32 convolutions may run on TF32 tensor cores (``torch.backends.cudnn.allow_tf32``).
        benchmark: whether cuDNN's algorithms are chosen by their speed (``torch.backends.cudnn.benchmark``).
        cudnn: the version of cuDNN that runs there, such as 91900; 0 if it is unknown.
    """

    compute_capability: tuple[int, int]
    multiprocessors: int
    deterministic: bool = False
    tf32: bool = True
    benchmark: bool = False
    cudnn: int = 0


class Plans(NamedTuple):
    """A block for a kernel's plan.

    ``otherwise`` are the sizes that are tried in turn if it does not fit the device. ``first`` is a size that is
    as plausible as the likely one in the first forward pass; 0 if there is none.
    """

    size: Range[int]
    otherwise: tuple[int, ...]
    first: int = 0


Block = int | Range[int] | Plans


def likely_bytes(block: Block) -> int:
    """The likely size of a block."""
    size = block.size if isinstance(block, Plans) else block
    return size.likely if isinstance(size, Range) else size


Moment = Block | tuple[Block, ...]
"""One block, or several that are alive together; all are given back before the next moment."""


@dataclass(frozen=True)
class Scratch:
    """Bytes that a kernel takes inside one operator, moment by moment, beyond what was alive before.

    Attributes:
        before: taken and given back before the results are allocated.
        after: taken and given back while all results are alive.
        kept: bytes of the first result's storage past those of its shape.
        between: by a result's place among the operator's results that are tensors: taken and given back once that one
            is allocated and before the next one is.
    """

    before: tuple[Moment, ...] = ()
    after: tuple[Moment, ...] = ()
    kept: int = 0
    between: Mapping[int, tuple[Moment, ...]] = field(default_factory=dict)


NONE = Scratch()


# -- shapes


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def up(value: int, to: int) -> int:
    """The next multiple of ``to``."""
    return -(-value // to) * to
