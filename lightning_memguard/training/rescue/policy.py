"""How large the parts of a step are, and which batches go in parts before they fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightning_memguard.core.batch.nesting import batch_bytes, batch_size_of

_PATIENCE, _MORE = 16, 4  # steps until a size that failed is tried again, and how many times longer if it fails again


@dataclass(frozen=True)
class Samples:
    """Some samples of a batch: how many, and the bytes of their tensors."""

    count: int
    nbytes: int


@dataclass(frozen=True)
class Rescue:
    """A step that was done in parts.

    Attributes:
        samples: in the batch.
        at_once: in the largest part.
        changes: how the step in parts differs from the whole one; empty if it does not.
        failed: whether the whole batch ran out of memory; if not, it was known to be too large.
    """

    samples: int
    at_once: int
    changes: tuple[str, ...]
    failed: bool = True


class Policy:
    """Remembers what ran and what did not.

    Args:
        fits_now: whether a batch of so many bytes fits, by the prediction and what is free now.
        fitting: how many samples of a part that failed the prediction says fit now; None if it does not know.
        notify: called with each step that was done in parts.

    Attributes:
        failures: which steps ran out of memory since `restart`, by their place in the epoch.
        steps: which were done in parts.
        too_large_bytes: batches from this size on go in parts before they fail.
    """

    def __init__(
        self,
        fits_now: Callable[[int], bool] = lambda _: True,
        fitting: Callable[[Samples], int | None] = lambda _: None,
        notify: Callable[[Rescue], None] = lambda _: None,
    ) -> None:
        self._fits_now, self._fitting, self._notify = fits_now, fitting, notify
        self.too_large_bytes = math.inf
        self._fitting_bytes = 0.0  # the largest part that ran, or is predicted to
        self._wait, self._patience = 0, _PATIENCE
        self.restart()

    def restart(self) -> None:
        """An epoch begins."""
        self.failures, self.steps = set[int](), set[int]()

    # -- before a step

    def at_once(self, batch: object) -> int:
        """How many samples of a batch to run at once; 0 for all of them."""
        nbytes = batch_bytes(batch)
        if nbytes < self.too_large_bytes:
            return 0
        self._wait -= 1
        if self._wait < 0:
            if self._fits_now(nbytes):
                return 0
            self._wait = self._patience
        return self._within(batch_size_of(batch), nbytes)

    def expect(self, batch: object, share: float) -> int:
        """Run batches as large as this one in parts, as it is predicted not to fit; return how many samples at once.

        Only a ``share`` of its samples fit. The result is 0 for all of them.
        """
        samples, nbytes = batch_size_of(batch), batch_bytes(batch)
        if samples < 2 or share <= 0:
            return 0
        self.too_large_bytes = min(self.too_large_bytes, nbytes)
        self._fitting_bytes = max(self._fitting_bytes, nbytes * share)
        self._wait = self._patience
        return self._within(samples, nbytes)

    def _within(self, samples: int, nbytes: int) -> int:
        fitting = int(samples * self._fitting_bytes / max(1, nbytes))
        return max(1, min(fitting, math.ceil(samples / 2)))

    # -- after it

    def failed(self, place: int) -> None:
        """A step ran out of memory as a whole."""
        self.failures.add(place)

    def ran_whole(self, batch: object) -> None:
        """A step ran as a whole: batches as large as it are tried again."""
        if self.too_large_bytes < math.inf and batch_bytes(batch) >= self.too_large_bytes:
            self.too_large_bytes, self._patience = math.inf, _PATIENCE

    def most_samples(self, failed: Samples) -> int:
        """Learn from a whole batch that failed; return how many of its samples to run at once."""
        if failed.nbytes >= self.too_large_bytes:
            self._patience *= _MORE  # it was tried again, and failed again
        self.too_large_bytes = min(self.too_large_bytes, failed.nbytes)
        self._wait = self._patience
        half = math.ceil(failed.count / 2)
        if self._fitting_bytes:
            return self._within(failed.count, failed.nbytes)
        known = self._fitting(failed)
        return half if known is None else max(1, min(known, half))

    def smaller(self, failed: Samples) -> int:
        """Learn from a part that failed; return how many of its samples to run at once."""
        self._fitting_bytes = min(self._fitting_bytes, failed.nbytes / 2)
        return math.ceil(failed.count / 2)

    def rescued(self, place: int, batch: Samples, largest: int, changes: tuple[str, ...]) -> None:
        """A step was done in parts."""
        self.steps.add(place)
        self._fitting_bytes = max(self._fitting_bytes, batch.nbytes * largest / batch.count)
        self._notify(Rescue(batch.count, largest, changes, place in self.failures))
