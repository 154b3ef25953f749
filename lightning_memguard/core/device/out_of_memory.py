"""Memory that ran out: which exceptions say so, what led to them, and which requests raise them for certain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lightning_memguard.units import format_bytes

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


def refusal_of(nbytes: int, device_type: str, device_bytes: int) -> RuntimeError | None:
    """Return the error that a request for more than a device has raises on it; None if it raises none.

    A host may grant what it does not have (man 5 proc: overcommit_memory), so it is asked; untouched, that is free.
    """
    if device_type != "cpu":
        return torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {format_bytes(nbytes)}. GPU 0 has a total capacity of "
            f"{format_bytes(device_bytes)}."
        )
    from lightning_memguard.core.torch_port import no_dispatch  # which takes time to import

    try:
        with _own_limit_lifted(), no_dispatch():
            torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        return error.with_traceback(None)
    return None


@contextlib.contextmanager
def _own_limit_lifted() -> Iterator[None]:
    """Lift the limit that a child sets itself, which the run does not have."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
