"""Metrics: the values that we log, and what a module's own take at an epoch's end."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torchmetrics import Metric

from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.training.facts import lightning_port as lightning
from lightning_memguard.training.facts.lightning_types import lightning_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

_MOST_REAL_BYTES = 64 << 20  # of an epoch's scores, to compute a metric of real ones

_APART = 1e-3  # scores differ from each other by less: a curve has a point for each that is unlike the others


def log_epoch(trainer: Trainer, values: Mapping[str, float]) -> None:
    """Log values as ``self.log`` does in ``on_train_epoch_end``: with the epoch's own metrics, in one row of a logger.

    A module's own ``log`` is not called. ``sync_dist`` with ``rank_zero_only`` means that each rank keeps its value.
    """
    module = trainer.lightning_module
    log = functools.partial(lightning_of(module).LightningModule.log, module, sync_dist=True, rank_zero_only=True)
    for name, value in values.items():
        log(name, torch.tensor(value, dtype=torch.float64), on_step=False, on_epoch=True, batch_size=1)


def forget_logged(trainer: Trainer) -> None:
    """Remove the last epoch's values of ours from Lightning's collection, which is walked at each step."""
    results = lightning.logged_values(trainer)
    for key in [key for key in results if key.startswith("on_train_epoch_end.memguard/")]:
        del results[key]


def compute_over_epoch(module: nn.Module, recorder: Recorder, batch_size: int, samples: int, *, fake: bool) -> None:
    """Compute the metrics that keep all they are given, as large as so many samples make them.

    Such are exact curves and areas: their ``compute`` joins and sorts what it kept. They know some batches already; the
    memory of the others is counted already. With 0 samples, they are computed from what they know.
    """
    kept = {}  # what was recorded stays alive
    for metric in (each for each in module.modules() if isinstance(each, Metric)):
        lists = {name: value for name, value in metric.metric_state.items() if isinstance(value, list) and value}
        if lists:
            kept[metric] = lists
    if kept:
        gc.collect()  # of the last batch
    for metric, lists in kept.items():
        _compute(metric, lists if samples else {}, recorder, functools.partial(_of_all, batch_size, samples, fake=fake))


def _compute(
    metric: Metric,
    lists: Mapping[str, list[torch.Tensor]],
    recorder: Recorder,
    of_all: Callable[[list[torch.Tensor]], torch.Tensor],
) -> None:
    try:
        with recorder.paused():
            grown = {name: of_all(value) for name, value in lists.items()}
        for name, whole in grown.items():
            recorder.hold(whole)
            setattr(metric, name, [whole])
        metric.sync_on_compute = False
        recorder.mark("epoch end")
        metric.compute()
    except Exception as error:  # noqa: BLE001 - it may need values
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        note = f"what {type(metric).__name__} computes at the end of the epoch is not included ({reason})"
        recorder.assume(note)


def _of_all(batch_size: int, samples: int, entries: list[torch.Tensor], *, fake: bool) -> torch.Tensor:
    last = entries[-1]
    if last.dim() == 0 or len(last) % batch_size:
        raise ValueError("it keeps something else than as many rows for each sample")
    rows = max(1, len(last) * samples // batch_size)
    if not fake and rows * last[:1].nbytes > _MOST_REAL_BYTES:
        raise ValueError("an epoch's entries are too large to make")
    whole = torch.cat([last] * -(-rows // len(last)))[:rows].clone()
    if whole.is_floating_point():
        whole *= 1 - _APART * torch.rand_like(whole)
    return whole
