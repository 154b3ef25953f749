"""The first traces of a step, and the length of its run -> how long setup may go on with its survey."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_memguard.core.replay.seconds import Speed, Timing
from lightning_memguard.core.trace.trace import RUN, Trace
from lightning_memguard.core.trace.work import WorkAt, groups_of
from lightning_memguard.training.data.loaders import batches_taken
from lightning_memguard.training.facts.lightning_types import is_a

if TYPE_CHECKING:
    from lightning_memguard.training.run.reading import Run

LEAST_SECONDS = 5.0  # for the shortest run; most surveys are complete by then
_SHARE = 0.2  # of what the run is predicted to take
_FAST_SECONDS, MOST_IF_FAST = 0.5, 15.0  # of a step, and of setup before steps that are faster
_MOST_TIMES = 90  # as long as its step takes a capture of two: 270 instead of 6 us an operator that computes little
_OF_A_STEP = 1 / 3  # takes a validation step


def setup_seconds(
    traces: Sequence[Trace], run: Run, batch_size: int, speed: Speed | None, capture_seconds: float = 0.0
) -> float:
    """Seconds that a survey may take: a share of its run, whose step takes at least a share of a capture."""
    step = _step_seconds(traces, batch_size, speed) if traces else capture_seconds / _MOST_TIMES
    if step is None:
        return math.inf
    most = MOST_IF_FAST if step < _FAST_SECONDS else math.inf
    seconds = min(step * batches_of(run, batch_size, _of_validation(run)), _max_time(run))
    return max(LEAST_SECONDS, min(_SHARE * seconds, most))


def _max_time(run: Run) -> float:
    """Seconds until a Timer ends the run, as ``max_time`` sets one."""
    timers = (each for each in getattr(run.program.trainer, "callbacks", ()) if is_a(each, "Timer"))
    return min(filter(None, (timer.time_remaining() for timer in timers)), default=math.inf)


def _step_seconds(traces: Sequence[Trace], batch_size: int, speed: Speed | None) -> float | None:
    """Seconds of one batch, from the work of the step; of one that ran for real, else from the time that it took."""
    last = {trace.batch_size: trace for trace in traces if trace.method == traces[-1].method}
    sizes = sorted(last)
    works = [last[size].work for size in sizes]
    if all(works):
        known = Timing(WorkAt(groups_of(works), sizes, batch_size), lambda: speed).step
        if known:
            return known.likely
    return last[sizes[-1]].seconds * batch_size / sizes[-1] if traces[-1].method in RUN else None


def batches_of(run: Run, batch_size: int, more: float = 0.0) -> float:
    """Batches of all epochs, each with so many ``more``; infinity if there is no end."""
    trainer, batches = run.program.trainer, batches_taken(run.facts, run.loader_info, batch_size)
    epochs = trainer.max_epochs if run.program.trains else 1
    steps = trainer.max_steps * run.facts.accumulate_grad_batches if run.program.trains else -1
    in_epochs = math.inf if batches is None or epochs is None or epochs < 0 else (batches + more) * epochs
    return in_epochs if steps < 0 else min(in_epochs, steps)


def _of_validation(run: Run) -> float:
    """Batches of an epoch's validation, each as the share of a training step that it takes."""
    info, evaluation = run.validation_info, run.evaluation.value
    if info is None or evaluation is None:
        return 0.0
    batches = batches_taken(run.facts, info, evaluation.batch_size) or 0
    return _OF_A_STEP * batches / (run.facts.check_val_every_n_epoch or 1)
