"""A capture before the first: each child then inherits what it would look up, most of the time of its first capture.

And what makes captures run in a process of tests, as they do in a child: a third of the time.
"""

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from pytorch_lightning.demos.boring_classes import BoringModel

from lightning_memguard import estimate

# Only a child, which ends, may unfreeze all objects: each later collection of this process would search them.
IN_THIS_PROCESS: dict[str, Callable[[], Any]] = {
    "lightning_memguard.core.capture.capture.in_child": lambda: True,
    "lightning_memguard.core.capture.leftovers.in_child": lambda: True,
    "lightning_memguard.core.simulation.compiled_cuda.in_child": lambda: True,
    "lightning_memguard.core.isolation.pool.can_fork": lambda: False,
    "lightning_memguard.training.adapter.epoch_end.is_forked": lambda: True,
    "lightning_memguard.training.data.workers.collected_bytes": lambda: 0,
}


def capture_here(replace: Callable[[str, Any], object]) -> None:
    """Have captures run in this process; ``replace`` is given the path of each function, and the other."""
    for path, function in IN_THIS_PROCESS.items():
        replace(path, function)
    gc.collect()
    gc.freeze()  # as a child does: each collection of a capture would search what was there before


class _Model(BoringModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def warm() -> None:
    with mock.patch("lightning_memguard.core.capture.capture.in_child", return_value=True):
        estimate(_Model(), torch.ones(2, 32), device="cpu")
