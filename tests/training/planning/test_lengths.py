"""The largest batch size at each length: what fits, and not one sample more."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_memguard import CannotTraceError, DoesNotFitError, MemGuardError, batch_sizes, estimate
from lightning_memguard.core.batch.batches import batch_of_length, length_of
from lightning_memguard.core.capture import lengths as surveys
from lightning_memguard.core.replay.epoch import Shape
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.training.planning import epochs
from lightning_memguard.training.planning import lengths as lengths_module
from lightning_memguard.training.planning.subject import predicted, program_of, subject_of
from lightning_memguard.training.planning.target import target_of
from lightning_memguard.units import GIB, MIB

BUDGET = GIB


_warnings_of = lengths_module._warnings_of


@pytest.fixture(autouse=True)
def _without_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds; one test has it."""
    monkeypatch.setattr(lengths_module, "_warnings_of", lambda *_: ())


IDS = torch.zeros(4, 32, dtype=torch.long)


class Attention(nn.Module):
    """Attends with scores that are written out, and takes some more steps at some lengths."""

    def __init__(self, more_at: Callable[[int], int] = lambda length: 0) -> None:
        super().__init__()
        self.token, self.out, self.more_at = nn.Embedding(50, 64), nn.Linear(64, 50), more_at

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.token(ids)
        logits = self.out((hidden @ hidden.transpose(1, 2)).softmax(-1) @ hidden)
        for _ in range(self.more_at(ids.shape[1])):
            logits = logits.sin()
        return logits


def written(program: Any, batch_size: int, *_: object, **__: object) -> Trace:
    """In place of a capture: what a step of `Attention` keeps for its backward pass, in bytes; nothing runs."""
    (first, *_), nbytes = batch = program.expected_batch(batch_size)
    model = program.module.model if hasattr(program, "module") else program.model
    tokens, weights = batch_size * first[1], 4 * (2 * 50 * 64 + 50)
    forward = [64 * tokens, tokens * first[1], 64 * tokens, *[50 * tokens] * (1 + model.more_at(first[1]))]
    step = [Event("alloc", 1, nbytes, "batch", step=1)]
    step += [Event("alloc", block, 4 * each, "activations", step=1) for block, each in enumerate(forward, 2)]
    events = Event("alloc", 0, weights, "parameters"), *step, *(each._replace(action="free") for each in step[::-1])
    return Trace(batch_size, program.device.type, "fake", events, batch=batch)


def changing() -> Attention:
    """Does more above one length, and at another alone."""
    return Attention(lambda length: 2 * (length > 500) + 4 * (length == 384))


@pytest.fixture(autouse=True)
def _written(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is captured but in a test marked `captures`: what is chosen follows from traces, whosever they are."""
    if not request.node.get_closest_marker("captures"):
        monkeypatch.setattr("lightning_memguard.core.capture.capture.capture_here", written)


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
    found = batch_sizes(changing(), IDS, lengths=[*lengths, 301], budget=BUDGET, max_batch_size=200, **SETTINGS)
    assert alone == [448, 301, 384]
    one = batch_sizes(changing(), IDS, lengths=[384], budget=BUDGET, max_batch_size=200, **SETTINGS)
    assert found[384] == one[384] < found[448] * 448 / 384
    alone.clear()
    lengths[3:] = [768, 896]  # in two regions
    longer = batch_sizes(changing(), IDS, lengths=lengths, budget=BUDGET, max_batch_size=20, **SETTINGS)
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


@pytest.mark.captures
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


# An epoch of lengths: what a GPU's cache grows to


@pytest.mark.captures
def test_an_estimate_over_lengths_holds_what_the_cache_grows_to():
    draw = random.Random(0)
    lengths = [draw.randint(300, 700) for _ in range(30)]
    found = estimate(Attention(), IDS, batch_size=32, lengths=lengths, **SETTINGS)
    longest = estimate(Attention(), torch.zeros(4, max(lengths), dtype=torch.long), batch_size=32, **SETTINGS)
    assert found.peak == longest.peak
    assert found.epoch
    assert found.high
    assert found.epoch.longest == max(lengths)
    assert found.high.reserved_bytes >= found.epoch.run.peak_reserved_bytes > 1.2 * longest.peak_reserved_bytes
    assert found.most_device_bytes == longest.most_device_bytes
    assert found.epoch.text in found.notes


@pytest.mark.captures
def test_an_estimate_takes_a_function_of_the_length_where_the_length_is_no_first_dimension():
    """Channels come first in a batch of sound; its lengths are dimension 2."""
    model = nn.Sequential(nn.Conv1d(16, 32, 3, padding=1), nn.ReLU())
    loop = {"step": lambda model, sound: model(sound).sum(), "device": "T4"}

    def sound(length: int) -> torch.Tensor:
        return torch.zeros(4, 16, length)

    found = estimate(model, sound, lengths=[3000, 9000, 5000], **loop)
    assert found.peak == estimate(model, sound(9000), **loop).peak
    assert found.epoch
    assert (found.epoch.shortest, found.epoch.longest) == (3000, 9000)


def test_without_a_cache_or_with_one_length_there_is_no_epoch():
    on_cpu = {**SETTINGS, "device": "cpu"}
    assert estimate(Attention(), IDS, lengths=[8, 9], **on_cpu).epoch is None
    assert estimate(Attention(), IDS, lengths=[32, 32], **SETTINGS).epoch is None


def test_a_note_says_that_an_epoch_cannot_be_replayed(monkeypatch: pytest.MonkeyPatch):
    def refused(*_: object, **__: object) -> None:
        raise CannotTraceError("a reason")

    monkeypatch.setattr(epochs, "replayed_epoch", refused)
    assert "is not known: a reason" in estimate(Attention(), IDS, lengths=[8, 9], **SETTINGS).notes[-1]


def test_sizes_whose_epoch_fills_the_budget_are_returned_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
):
    monkeypatch.setattr(lengths_module, "_warnings_of", _warnings_of)
    batch_sizes(Attention(), IDS, lengths=[128, 256, 512], budget=BUDGET, **SETTINGS)
    said = [str(each.message) for each in recwarn if "over an epoch of lengths" in str(each.message)]
    assert len(said) == 1
    assert "To avoid it, set PYTORCH_ALLOC_CONF=expandable_segments:True" in said[0]


class OfTexts(pl.LightningModule):
    """Has data of its own: texts of these lengths."""

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        self.lengths, self.model = lengths, Attention()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        texts: Any = [torch.zeros(length, dtype=torch.long) for length in self.lengths]
        return DataLoader(texts, 2, collate_fn=partial(pad_sequence, batch_first=True))


def test_a_plan_with_data_of_many_lengths_notes_that_a_cache_may_grow():
    def notes(device: str, *lengths: int) -> str:
        return " ".join(predicted(subject_of(OfTexts(*lengths)), target_of(device)).curve.notes)

    said = "what the GPU caches may grow beyond it"
    assert said in notes("T4", 30, 70, 50)
    assert said not in notes("T4", 70, 70)
    assert said not in notes("cpu", 30, 70, 50)
    one_length = epochs.at_length(subject_of(OfTexts(30, 70, 50)), 64)
    assert said not in " ".join(predicted(one_length, target_of("T4")).curve.notes)


def surveyor_of(model: nn.Module) -> surveys.ShapeSurveyor:
    subject = subject_of(model, IDS, step=loss_of, optimizer=torch.optim.AdamW)
    return surveys.ShapeSurveyor(lambda at: program_of(epochs.at_length(subject, at), target_of("T4")), (4,))


def test_a_step_that_runs_differently_at_some_lengths_is_followed_in_regions():
    surveyor = surveyor_of(Attention(lambda length: 2 * (length > 200)))
    traces = surveyor.survey(range(64, 513))
    assert len(traces.regions) > 1
    for length in (96, 128, 384, 512):
        assert traces.at(Shape(4, length)).events == surveyor.survey([length]).at(Shape(4, length)).events
    with pytest.raises(CannotTraceError, match=r"at many of these lengths|does not follow from other lengths"):
        surveyor_of(Attention(lambda length: length // 64 % 2)).survey(range(64, 513))


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


@pytest.mark.captures
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
