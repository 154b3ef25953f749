"""A peak that no step explains is not answered with a smaller batch size."""

from __future__ import annotations

import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from lightning_memguard import MemGuard
from lightning_memguard.core.device import tensor_counter
from lightning_memguard.units import MIB
from tests.training.quiet import quiet_trainer

pytestmark = [
    pytest.mark.skipif(not tensor_counter.is_available(), reason="needs glibc's mallinfo2"),
    pytest.mark.usefixtures("taped"),
]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(64, 64)

    def training_step(self, batch, _):
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


class KeepsTexts(Net):
    """Keeps 4 MiB of bytes of each batch, which no tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[bytes] = []

    def on_train_batch_end(self, *_):
        self.texts.append(bytes(bytearray(4 * MIB)))


class Exports(Net):
    """Its hook at the end of the epoch takes 64 MiB, which no step does."""

    def on_train_epoch_end(self):
        torch.ones(16 * MIB).sum()


class TooLarge(Net):
    """Takes in each step what depends on the number of the step: its tensors explain the peak."""

    def training_step(self, batch, index):
        if type(batch) is torch.Tensor and self.trainer.global_step > 1:
            torch.ones(len(batch) * MIB // 4).sum()
        return super().training_step(batch, index)


def warned(module: pl.LightningModule, folder) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(MemGuard("check", budget="30MiB"), max_epochs=2, default_root_dir=folder)
        trainer.fit(module, DataLoader(torch.rand(1024, 64), 64))
    return " ".join(str(each.message) for each in caught if "has taken" in str(each.message))


def test_objects_that_pile_up_are_named_and_no_batch_size_is(tmp_path):
    text = warned(KeepsTexts(), tmp_path)
    assert "The memory of a step does not explain it" in text
    assert "`self.texts` (test_outside.py:" in text
    assert "max_batch_size" not in text


def test_a_hook_that_takes_much_is_named_and_no_batch_size_is(tmp_path):
    text = warned(Exports(), tmp_path)
    assert "in hooks at the end of an epoch, not in a step" in text
    assert "max_batch_size" not in text


def test_a_step_that_takes_more_than_predicted_is_answered_with_a_batch_size(tmp_path):
    text = warned(TooLarge(), tmp_path)
    assert "does not explain" not in text
    assert "Lower the batch size" in text or "max_batch_size=" in text
