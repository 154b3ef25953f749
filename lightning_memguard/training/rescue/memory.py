"""Memory that ran out: which exceptions say so, and how to free what a failed step holds."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator

import torch

from lightning_memguard.core.device.malloc import trim_heap

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


def free(device: torch.device, *, again: bool = False) -> None:
    """Release what is not used; thoroughly, which takes longer, if memory has run out once more."""
    gc.collect(2 if again else 1)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim_heap()


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, and what led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def release(error: BaseException | None) -> None:
    """Let go of what the frames of an exception hold."""
    for each in causes_of(error):
        traceback.clear_frames(each.__traceback__)
