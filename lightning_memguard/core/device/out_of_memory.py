"""Memory that ran out: which exceptions say so, and what led to them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def ran_out_of_memory(exception: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the GPU, on the host, or in a library's own words."""
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exception, RuntimeError) and any(word in str(exception) for word in _WORDS)


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, and what led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
