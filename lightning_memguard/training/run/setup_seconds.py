"""The first traces of a step, and the length of its run -> how long setup may go on with its survey."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_memguard.core.replay.seconds import Speed, Timing
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.core.trace.work import WorkAt, groups_of
from lightning_memguard.training.data.loaders import batches_taken

if TYPE_CHECKING:
    from lightning_memguard.training.run.profile import Run

LEAST_SECONDS = 5.0  # for the shortest run; most surveys are complete by then
_SHARE = 0.2  # of what the run is predicted to take
_FAST_SECONDS, _MOST_IF_FAST = 0.5, 15.0  # of a step, and of setup before steps that are faster


def setup_seconds(traces: Sequence[Trace], run: Run, batch_size: int, speed: Speed | None) -> float:
    """Seconds that a survey may take: a share of its run's; infinity if neither is known."""
    step = _step_seconds(traces, batch_size, speed)
    if step is None:
        return math.inf
    most = _MOST_IF_FAST if step < _FAST_SECONDS else math.inf
    return max(LEAST_SECONDS, min(_SHARE * step * batches_of(run, batch_size), most))


def _step_seconds(traces: Sequence[Trace], batch_size: int, speed: Speed | None) -> float | None:
    """Seconds of one batch, from the work of the step; of one that ran for real, else from the time that it took."""
    last = {trace.batch_size: trace for trace in traces if trace.method == traces[-1].method}
    sizes = sorted(last)
    works = [last[size].work for size in sizes]
    if all(works):
        known = Timing(WorkAt(groups_of(works), sizes, batch_size), lambda: speed).step
        if known:
            return known.likely
    return last[sizes[-1]].seconds * batch_size / sizes[-1] if traces[-1].method == "real" else None


def batches_of(run: Run, batch_size: int) -> float:
    """Batches of all epochs; infinity if there is no end."""
    trainer, batches = run.program.trainer, batches_taken(run.facts, run.loader_info, batch_size)
    epochs = trainer.max_epochs if run.program.trains else 1
    steps = trainer.max_steps * run.facts.accumulate_grad_batches if run.program.trains else -1
    in_epochs = math.inf if batches is None or epochs is None or epochs < 0 else batches * epochs
    return in_epochs if steps < 0 else min(in_epochs, steps)
