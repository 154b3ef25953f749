"""Values for the Trainer's other callbacks, past Lightning's collection of results.

``self.log`` takes a mean over the epoch, weighted by batch size, and raises where it sees no batch: in a module whose
step takes ``dataloader_iter``. Private names of Lightning were checked on 2.5.0 to 2.6.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def show_to_callbacks(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Add values to ``trainer.callback_metrics``, as ``self.log(..., logger=False, on_epoch=True)`` does."""
    device = trainer.strategy.root_device
    values = {
        name: torch.tensor(value, dtype=torch.get_default_dtype(), device=device) for name, value in metrics.items()
    }
    trainer._logger_connector._callback_metrics.update(values)
