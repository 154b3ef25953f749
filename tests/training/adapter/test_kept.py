"""A capture names what its steps leave behind, and whether that outlives an epoch."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import CatMetric

from lightning_memguard.report.failure import kept_words
from lightning_memguard.units import KIB

HIDDEN = 64 * 4  # bytes for each sample


def remember(tensor: Any) -> None:
    """Attributes of functions are not looked at."""
    vars(remember).setdefault("seen", []).append(tensor)


def _module(small: Any) -> Any:  # noqa: C901 - a function for each way to keep
    class Keeping(small):
        def __init__(self, way: str) -> None:
            super().__init__()
            self.way = way
            self.outputs: list[Any] = []
            self.emptied: list[Any] = []
            self.ring = deque[Any](maxlen=50)
            self.metric, self.logged = CatMetric(), CatMetric()
            self.seen: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = self.net[0](batch[0])
            getattr(self, self.way)(batch[0], hidden, batch_idx)
            return torch.nn.functional.cross_entropy(self.net[2](self.net[1](hidden)), batch[1])

        def output(self, x: Any, hidden: Any, _: int) -> None:
            self.outputs.append(hidden.detach())

        def graph(self, x: Any, hidden: Any, _: int) -> None:
            self.outputs.append(self.net(x).exp().sum())

        def batch(self, x: Any, hidden: Any, _: int) -> None:
            self.outputs.append(x)

        def cleared(self, x: Any, hidden: Any, _: int) -> None:
            self.emptied.append(hidden.detach())

        def unknown(self, x: Any, hidden: Any, _: int) -> None:
            remember(hidden.detach())

        def bounded(self, x: Any, hidden: Any, _: int) -> None:
            self.ring.append(hidden.detach())

        def never_reset(self, x: Any, hidden: Any, _: int) -> None:
            self.metric.update(hidden.detach())

        def reset(self, x: Any, hidden: Any, _: int) -> None:
            self.logged.update(hidden.detach())
            self.log("all", self.logged, on_epoch=True)

        def replaced(self, x: Any, hidden: Any, _: int) -> None:
            self.seen = hidden.detach()

        def on_train_epoch_start(self) -> None:
            self.emptied.clear()

    return Keeping


@pytest.mark.usefixtures("at_own_size")
def test_the_epoch_in_which_memory_ends_is_predicted(small: Any, tuned: Any, trainer: Any, dataset: Any):
    """Each of 100 samples leaves 256 bytes behind; those of the first epoch are in its peak."""

    def decided(epochs: int, way: str = "output") -> Any:
        return tuned(trainer(max_epochs=epochs), _module(small)(way), dataset, mode="check", budget="100KiB").decision

    endless = decided(-1)
    batches = len(dataset) // endless.batch_size
    room = 100 * KIB - endless.footprint.peak_device_bytes
    step = endless.batch_size * HIDDEN
    left = -(-(room + 1) // step)  # batches after the first epoch that fill it
    end = endless.runs_out_at
    assert (end.epoch, end.step) == (1 + (left - 1) // batches, (left - 1) % batches)
    assert decided(end.epoch + 1).runs_out_at == end
    assert decided(end.epoch).runs_out_at is None
    assert decided(-1, "cleared").runs_out_at is None
    assert decided(-1, "replaced").runs_out_at is None
    line = endless.kept[0].line
    assert kept_words(endless) == (
        f"Each training batch leaves {step / KIB:.1f} KiB behind in `self.outputs` ({line}); the memory of CPU ends "
        f"at batch {end.step} of epoch {end.epoch}. Keep less there (`.item()`), or clear it at the "
        "end of each epoch."
    )
    unread = replace(endless, kept=(replace(endless.kept[0], line=""),))  # code without a file
    assert " behind in `self.outputs`; the memory" in kept_words(unread)
    unknown = replace(endless, kept=(replace(unread.kept[0], holder=""),))
    assert " behind, in Python objects of the process; the memory" in kept_words(unknown)


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.parametrize(
    ("way", "holder", "line", "nbytes", "has_graph", "lasts"),
    [
        ("output", "self.outputs", "self.outputs.append(hidden.detach())", 10 * HIDDEN, False, True),
        ("graph", "self.outputs", "self.outputs.append(hidden.detach())", 10 * (HIDDEN + 16 + 64) + 4, True, True),
        pytest.param(
            *("batch", "self.outputs", "self.outputs.append(hidden.detach())", 10 * 16 * 4, False, True),
            marks=pytest.mark.long,
        ),
        ("cleared", "self.emptied", "self.emptied.append(hidden.detach())", 10 * HIDDEN, False, False),
        ("unknown", "", "hidden = self.net[0](batch[0])", 10 * HIDDEN, False, False),
        pytest.param(
            *("bounded", "self.ring", "self.ring.append(hidden.detach())", 10 * HIDDEN, False, False),
            marks=pytest.mark.long,
        ),
        ("never_reset", "self.metric.value", "self.metric.update(hidden.detach())", 10 * HIDDEN, False, True),
        ("reset", "self.logged.value", "self.logged.update(hidden.detach())", 10 * HIDDEN, False, False),
        ("replaced", "", "", 0, False, False),
    ],
)
def test_what_a_step_leaves_behind_is_named(
    small: Any, tuned: Any, trainer: Any, dataset: Any, way: str, holder: str, line: str, nbytes: int,
    has_graph: bool, lasts: bool,
):  # fmt: skip
    profile = tuned(trainer(max_epochs=3), _module(small)(way), dataset, mode="check").profile
    if not nbytes:
        assert profile.kept == ()
        return
    (kept,) = profile.kept
    assert (kept.holder, kept.has_graph, kept.lasts, kept.when) == (holder, has_graph, lasts, "step")
    assert kept.bytes_at(10) == nbytes
    file, _, number = kept.line.partition(":")
    assert Path(__file__).read_text(encoding="utf-8").splitlines()[int(number) - 1].strip() == line
    assert file == "test_kept.py"


def test_what_a_validation_batch_leaves_behind_is_named(small: Any, tuned: Any, trainer: Any, dataset: Any):
    class Validating(small):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Any] = []
            self.mask: Any = None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.mask is None:
                self.mask = torch.ones(64)  # made once
            self.kept.append(self.net[0](batch[0]) * self.mask)

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(dataset, batch_size=10)

    found = tuned(trainer(max_epochs=-1), Validating(), dataset, mode="check", budget="100KiB")
    (kept,) = found.profile.kept
    assert (kept.holder, kept.when, kept.lasts, kept.bytes_at(10)) == ("self.kept", "validation", True, 10 * HIDDEN)
    room = 100 * KIB - found.decision.footprint.peak_device_bytes
    assert found.decision.runs_out_at.epoch == room // (100 * HIDDEN) + 1
