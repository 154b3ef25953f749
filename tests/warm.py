"""A capture before the first: each child then inherits what it would look up, most of the time of its first capture."""

from unittest import mock

import torch
from pytorch_lightning.demos.boring_classes import BoringModel

from lightning_memguard import estimate


class _Model(BoringModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def warm() -> None:
    with mock.patch("lightning_memguard.core.capture.capture.in_child", return_value=True):
        estimate(_Model(), torch.ones(2, 32), device="cpu")
