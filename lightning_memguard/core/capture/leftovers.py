"""Memory that batches leave behind: for good, until Python collects garbage, or in an optimizer's history."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch.optim import Optimizer

from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.core.isolation.pool import in_child
from lightning_memguard.core.trace.trace import WORTH_A_NOTE
from lightning_memguard.units import format_bytes

_MOST_RISING = 6
_RISE = 1.02  # if sizes depend on values, they differ a little as the weights do

# One young collection in eleven is one of the middle generation, and of those one in eleven at most is a full one
# (gc.get_threshold()); each may find a batch's objects in use, which then wait for the next older one. torchsde's
# Brownian intervals left those of 11 batches after 40 steps, of 18 after 200 and of 35 after 1,350.
_BATCHES_OF_GARBAGE = 32


class Leftovers:
    """Memory that each step leaves behind for good, in the optimizers' state or in the module's own lists.

    Args:
        recorder: records the steps.
        steps: how many are recorded in any case. If memory grows after each of them, two more are; and while each
            allocates more than the one before, as with a memory of past batches that fills, up to `_MOST_RISING` more.
    """

    def __init__(self, recorder: Recorder, steps: int) -> None:
        self._recorder, self._steps = recorder, steps
        self._garbage = Garbage(recorder)
        self._alive: list[int] = []  # before each batch
        self._allocated: list[int] = []  # in the forward passes before each batch since the one before
        self._last = self._period = 0
        self.bytes_per_batch = 0

    def note(self) -> None:
        """Note the bytes alive before a batch, without those that Python's garbage collector is going to free."""
        self._garbage.free()
        self._alive.append(self._recorder.alive_without_batch)
        self._allocated.append(self._recorder.newly_allocated_bytes("forward"))

    def are_known(self, optimizers: Iterable[Optimizer]) -> bool:
        """Whether enough batches were noted, once the steps were recorded; if so, expect what they leave."""
        count = len(self._alive) - 1
        if not self._last:
            self._period = self._period or max(1, count // self._steps)
            if self._rises() and count < (self._steps + _MOST_RISING) * self._period:
                return False
            if self._expect_history(optimizers) or self._left(1) <= 0:
                self._garbage.expect()
                return True
            self._last = count + 2 * self._period
        if count < self._last:
            return False
        self.bytes_per_batch = max(0, min(self._left(1), self._left(2))) // self._period
        self._garbage.expect()
        return True

    @property
    def last_steps(self) -> range:
        """Batches of the last period but for the very last batch, which a module may hold for one step."""
        return range(max(0, len(self._alive) - 2 - self._period), len(self._alive) - 2)

    def _rises(self) -> bool:
        """Whether the last forward passes allocated clearly more than those before."""
        if len(self._allocated) <= 2 * self._period:
            return False
        before, last = self._allocated[-2 * self._period : -self._period], self._allocated[-self._period :]
        return sum(last) > _RISE * sum(before)

    def _left(self, periods: int) -> int:
        end = len(self._alive) - 1 - (periods - 1) * self._period
        return self._alive[end] - self._alive[end - self._period] if end >= self._period else 0

    def _expect_history(self, optimizers: Iterable[Optimizer]) -> bool:
        """Optimizers such as LBFGS keep ``history_size`` entries, of which each iteration adds one."""
        missing = sum(map(_missing_history, optimizers))
        if missing:
            self._recorder.expect(missing, "optimizer_state")
            more = format_bytes(missing)
            self._recorder.assume(f"the optimizer's history grows to its `history_size`, by {more} after two steps")
        return missing > 0


class Garbage:
    """Memory that each batch leaves in cycles of Python's objects, which only a garbage collection frees.

    While a step is captured, Python collects nothing by itself (`without_collections`): in a real run it does so at
    moments that depend on all that the process does.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._bytes = 0  # of the last batch

    def free(self) -> None:
        """Collect garbage between two batches, and note how many bytes that freed."""
        before = self._recorder.alive_bytes
        gc.collect()
        self._bytes = before - self._recorder.alive_bytes

    def expect(self) -> None:
        """Count the garbage of one batch as expected, and that of `_BATCHES_OF_GARBAGE` as the upper bound."""
        if self._bytes <= 0:
            return
        self._recorder.expect(self._bytes, "activations")
        self._recorder.expect((_BATCHES_OF_GARBAGE - 1) * self._bytes, "activations", at_most=True)
        if _BATCHES_OF_GARBAGE * self._bytes < WORTH_A_NOTE:
            return
        self._recorder.assume(
            f"each batch leaves {format_bytes(self._bytes)} in reference cycles of Python objects that wait for the "
            f"garbage collector; at most, those of {_BATCHES_OF_GARBAGE} batches are counted. `gc.collect()` after a "
            "batch frees them"
        )


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Python collects no garbage by itself, and searches only what is new when it is asked to."""
    is_on, has_frozen = gc.isenabled(), in_child() or gc.get_freeze_count()  # which counts them, one by one
    gc.disable()
    if not has_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not has_frozen:
            gc.unfreeze()
        if is_on:
            gc.enable()


def _missing_history(optimizer: Optimizer) -> int:
    """Bytes of the entries that lists in an optimizer's state lack, and of one that is made before the oldest goes.

    LBFGS may also throw the new one away, and holds it to the end of its iteration (`ys > 1e-10` in lbfgs.py).
    """
    missing = 0
    for group in optimizer.param_groups:
        size = group.get("history_size")
        if not isinstance(size, int):
            continue
        values = (value for parameter in group["params"] for value in optimizer.state.get(parameter, {}).values())
        for entries in (value for value in values if isinstance(value, (list, deque))):
            tensors = [entry for entry in entries if isinstance(entry, torch.Tensor)]
            if 0 < len(tensors) < size:
                missing += (size - len(tensors) + 1) * tensors[-1].untyped_storage().nbytes()
    return missing
