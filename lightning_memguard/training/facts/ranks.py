"""The processes that train together: they choose one batch size together, or none of them tunes the run.

What one rank finds out is sent to all before any of them acts on it, so every rank makes the same calls in the same
order, and none waits for one that took another branch.
"""

from __future__ import annotations

import logging
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from lightning_memguard.core.decision.decision import Budget
from lightning_memguard.core.foreign import reason_of
from lightning_memguard.errors import CannotTraceError, DoesNotFitError, MemGuardError
from lightning_memguard.training.facts.run_facts import RunFacts

T = TypeVar("T")


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """The result of an attempt: a value, or the reason why there is none. ``too_large``: the error if nothing fits."""

    value: T | None = None
    reason: str = ""
    too_large: DoesNotFitError | None = None

    def unwrap(self) -> T:
        """The value.

        Raises:
            CannotTraceError: there is none, for this reason.
        """
        if self.value is None:
            raise CannotTraceError(self.reason)
        return self.value


def attempt(work: Callable[[], T]) -> Attempt[T]:
    """Run a function whose failure must not fail the training; the attempt holds its result or its reason.

    If the caller needs no reason, the error is still in the log, at the level DEBUG.
    """
    try:
        return Attempt(work())
    except Exception as error:  # noqa: BLE001 - a guard that fails must not fail the training
        return failed(error)


def failed(error: Exception) -> Attempt[Any]:
    """Return the attempt that ended with an error, which is being handled."""
    _logger().debug("MemGuard goes on without a result:", exc_info=True)
    too_large = error.with_traceback(None) if isinstance(error, DoesNotFitError) else None
    reason = str(error) if isinstance(error, MemGuardError) else reason_of(error)
    return Attempt(reason=reason, too_large=too_large)


def warn(text: str, stacklevel: int = 2) -> None:
    """Warn of something that must not fail the training: if warnings are errors, it is a line of text."""
    try:
        warnings.warn(text, stacklevel=stacklevel + 1)
    except Warning:
        sys.stderr.write(f"{text}\n")


def say(text: str) -> None:
    """Log a message at the level INFO, as Lightning logs its own: it is seen unless the user sets another level."""
    _logger().info(text)


def explains() -> bool:
    """Whether all that is known is asked for, by the level DEBUG."""
    return _logger().isEnabledFor(logging.DEBUG)


def is_heard() -> bool:
    """Whether anything becomes of what is said."""
    return _logger().isEnabledFor(logging.INFO)


def _logger() -> logging.Logger:
    logger = logging.getLogger("lightning_memguard")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        logger.propagate = False
    return logger


@dataclass(frozen=True)
class Ranks:
    """All ranks of a run; one rank if it has one process."""

    size: int = 1
    rank: int = 0

    @classmethod
    def of(cls, facts: RunFacts) -> Ranks:
        """The ranks of a run whose process group is initialized.

        Raises:
            CannotTraceError: its ranks cannot exchange anything, which each of them finds alike.
        """
        if facts.world_size <= 1:
            return cls()
        if not (dist.is_available() and dist.is_initialized()):
            raise CannotTraceError(
                f"the run has {facts.world_size} processes under {type(facts.strategy).__name__}, and no process "
                "group of torch.distributed through which they could agree on a size"
            )
        return cls(facts.world_size, facts.global_rank)

    def gather(self, mine: T) -> list[T]:
        """Return each rank's value, by rank. All ranks must call this."""
        if self.size == 1:
            return [mine]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, mine)  # on NCCL this also opens its communicators, before memory is read
        return values

    def agree(self, mine: Attempt[T]) -> T:
        """Return the value if every rank has one.

        Raises:
            DoesNotFitError: on one of them nothing fits.
            CannotTraceError: one of them failed.
        """
        reasons = self.gather((mine.reason, mine.too_large))
        failed = [(rank, *each) for rank, each in enumerate(reasons) if each[0]]
        if not failed:
            return mine.unwrap()
        rank, reason, too_large = next((each for each in failed if each[2]), failed[0])
        if too_large:
            raise too_large.on_rank(rank) if self.size > 1 else too_large
        raise CannotTraceError(f"rank {rank}: {reason}" if self.size > 1 else reason)


def shared(ranks: Ranks, budget: Budget, device: torch.device, held_bytes: int) -> Budget:
    """Return this rank's share of the memory that several ranks find free on one device. All ranks must call this.

    ``budget`` is what this rank read there, ``held_bytes`` what its model takes of it already.
    """
    read = ranks.gather((_name(device, ranks.rank), budget.free_bytes - held_bytes, budget.source))
    same = [free for name, free, source in read if name == read[ranks.rank][0] and source != "given"]
    if budget.source == "given" or len(same) < 2:
        return budget
    free = max(0, min(same)) // len(same) + held_bytes
    name, margin = f"{budget.device}, shared by {len(same)} ranks", int(free * budget.margin_share)
    return replace(budget, free_bytes=free, margin_bytes=margin, device=name)


def _name(device: torch.device, rank: int) -> tuple[str, str]:
    """Return a name that identifies a device among those of all machines."""
    if device.type == "cpu":
        return socket.gethostname(), "cpu"
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return socket.gethostname(), str(getattr(properties, "uuid", None) or f"{device} of rank {rank}")
