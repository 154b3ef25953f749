"""A fit in a process that cannot import some files of the package, and the same fit once it can.

    python without_rooms.py MODULE ...    beginnings of modules' names

Prints the prediction, the weights and the warnings of both as JSON.
"""

from __future__ import annotations

import importlib.abc
import json
import sys
import warnings

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard


class Missing(importlib.abc.MetaPathFinder):
    """Finds none of these modules."""

    def __init__(self, *beginnings: str) -> None:
        self.beginnings = beginnings

    def find_spec(self, name, path=None, target=None):
        if name.startswith(self.beginnings):
            raise ImportError(f"{name} is missing")


class Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def training_step(self, batch, _):
        return self.layer(batch[0]).exp().sum()

    def validation_step(self, batch, _):
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def fitted() -> dict[str, object]:
    torch.manual_seed(0)
    module, guard, data = Small(), MemGuard(budget="1GiB"), TensorDataset(torch.randn(64, 8))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[guard], **quiet)
        trainer.fit(module, DataLoader(data, 8), DataLoader(data, 8))
    decision, said = guard.decision, [str(each.message) for each in caught if "MemGuard" in str(each.message)]
    footprint = decision.footprint
    predicted = decision.largest_batch_size, footprint.method, footprint.peak_device_bytes, footprint.most_device_bytes
    return {"predicted": predicted, "weights": module.layer.weight.flatten().tolist(), "said": said}


if __name__ == "__main__":
    missing = Missing(*sys.argv[1:])
    sys.meta_path.insert(0, missing)
    print(json.dumps(fitted()))
    missing.beginnings = ()
    print(json.dumps(fitted()))
