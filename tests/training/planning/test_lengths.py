"""The largest batch size at each length: what fits, and not one sample more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memguard import CannotTraceError, DoesNotFitError, MemGuardError, batch_sizes, estimate
from lightning_memguard.core.batch.batches import batch_of_length, length_of
from lightning_memguard.core.capture import lengths as surveys
from lightning_memguard.units import GIB, MIB

BUDGET = GIB
IDS = torch.zeros(4, 32, dtype=torch.long)


class Attention(nn.Module):
    """Attends with scores that are written out."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.out = nn.Embedding(50, 64), nn.Linear(64, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.token(ids)
        return self.out((hidden @ hidden.transpose(1, 2)).softmax(-1) @ hidden)


class Changing(Attention):
    """Does more above one length, and at another alone."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(ids)
        for _ in range((ids.shape[1] > 500) + 2 * (ids.shape[1] == 384)):
            logits = logits.sin().cos()
        return logits


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    ids = batch["input_ids"] if isinstance(batch, dict) else batch
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


SETTINGS: dict[str, Any] = {"step": loss_of, "optimizer": torch.optim.AdamW, "device": "T4"}


def most_bytes(model: nn.Module, batch_size: int, length: int) -> int:
    batch = torch.zeros(2, length, dtype=torch.long)
    return estimate(model, batch, batch_size=batch_size, **SETTINGS).most_device_bytes


def test_each_size_fits_and_one_more_does_not():
    """Unlike a budget of tokens, it knows that pairs of tokens take memory too."""
    model = Attention()
    found = batch_sizes(model, IDS, lengths=[1024, 128, 128], budget=BUDGET, margin=0.1, **SETTINGS)
    assert [*found] == [128, 1024]
    for length, size in found.items():
        assert most_bytes(model, size, length) <= 0.9 * BUDGET < most_bytes(model, size + 1, length)
    assert found[128] * 128 > 2 * found[1024] * 1024


def test_lengths_between_follow_from_others_until_a_capture_disagrees(monkeypatch: pytest.MonkeyPatch):
    alone, survey_at = list[int](), surveys.LengthSurveyor.survey_at

    def noted(surveyor: surveys.LengthSurveyor, length: int) -> Any:
        alone.append(length)
        return survey_at(surveyor, length)

    monkeypatch.setattr(surveys.LengthSurveyor, "survey_at", noted)
    lengths = [128, 192, 256, 320, 384, 448]
    found = batch_sizes(Changing(), IDS, lengths=[*lengths, 301], budget=BUDGET, max_batch_size=200, **SETTINGS)
    assert alone == [448, 301, 384]
    one = batch_sizes(Changing(), IDS, lengths=[384], budget=BUDGET, max_batch_size=200, **SETTINGS)
    assert found[384] == one[384] < found[448] * 448 / 384
    alone.clear()
    lengths[3:] = [768, 896]  # in two regions
    longer = batch_sizes(Changing(), IDS, lengths=lengths, budget=BUDGET, max_batch_size=20, **SETTINGS)
    assert alone == [896, *lengths]
    assert [*longer] == lengths


def test_a_dict_and_a_function_of_the_length_give_what_the_tensor_gives():
    model, lengths = Attention(), [96, 200]

    def sizes(batch: object) -> dict[int, int]:
        return batch_sizes(model, batch, lengths=lengths, budget="512MiB", **SETTINGS)

    of_tensor = sizes(IDS)
    assert sizes(lambda length: torch.zeros(2, length, dtype=torch.long)) == of_tensor
    of_dict = sizes({"input_ids": IDS, "attention_mask": IDS, "labels": torch.zeros(4)})
    assert all(of_dict[length] <= of_tensor[length] for length in lengths)
    assert min(of_dict.values()) > 1


def test_a_lightning_module_brings_its_own_step():
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Attention()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    settings: dict[str, Any] = {"budget": "1GiB", "device": "T4"}
    sizes = batch_sizes(Module(), IDS, lengths=[512, 2048], **settings)
    assert 1 < sizes[2048] < sizes[512]
    assert batch_sizes(Module(), IDS, lengths=[512], strategy="ddp", devices=2, **settings)[512] < sizes[512]


# What does not fit


def test_a_length_at_which_nothing_fits_has_no_size():
    assert batch_sizes(Attention(), IDS, lengths=[64, 8192], budget=500 * MIB, max_batch_size=8, **SETTINGS) == {
        64: 8,
        8192: 0,
    }


def test_an_error_says_that_nothing_fits_at_any_length():
    words = "At length 8192, the shortest, not even one sample fits. Batch size 1 needs"
    with pytest.raises(DoesNotFitError, match=words):
        batch_sizes(Attention(), IDS, lengths=[8192], budget=500 * MIB, **SETTINGS)


def test_a_length_that_the_model_cannot_run_is_named():
    class Placed(Attention):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) + torch.zeros(1, 100, 50, device=ids.device)[:, : ids.shape[1]]

    with pytest.raises(CannotTraceError, match=r"cannot be predicted at length 200: .*must match"):
        batch_sizes(Placed(), IDS, lengths=[64, 200], budget=BUDGET, **SETTINGS)


@pytest.mark.parametrize(
    ("batch", "lengths", "words"),
    [
        (IDS, [], "lengths is empty"),
        (IDS, [0], "lengths=0 is not a count"),
        (IDS, ["128"], "lengths='128' is not a count"),
        (torch.zeros(4), [8], r"has no length: .* shapes are \[\(4,\)\]"),
        (None, [8], "no batch to size by"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(batch: object, lengths: list[Any], words: str):
    with pytest.raises(MemGuardError, match=words):
        batch_sizes(Attention(), batch, lengths=lengths, **SETTINGS)


# Batches of other lengths


def test_tensors_of_the_length_are_repeated_or_cut_and_the_rest_stays():
    batch = {
        "ids": torch.arange(6).view(2, 3),
        "weights": torch.ones(2, 3, 4, requires_grad=True),
        "labels": torch.tensor([0, 1]),
        "lengths": torch.tensor([2, 3]),
        "name": "text",
        "meta": torch.empty(2, 3, device="meta"),
    }
    assert length_of(batch) == 3
    longer = batch_of_length(batch, 5)
    assert longer["ids"].tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 3, 4]]
    assert longer["weights"].shape == (2, 5, 4)
    assert longer["weights"].requires_grad
    assert longer["labels"].tolist() == [0, 1]
    assert longer["lengths"].tolist() == [5, 5]
    assert longer["name"] == "text"
    assert longer["meta"].shape == (2, 5)
    assert batch_of_length(batch, 2)["ids"].tolist() == [[0, 1], [3, 4]]
    assert batch_of_length(batch, 3) is batch
