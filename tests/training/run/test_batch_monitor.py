"""Events that were not predicted: a larger batch, and a step that runs out of memory."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memguard import MemGuard
from lightning_memguard.core.decision.decision import Budget
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.report import failure as report
from lightning_memguard.training.run import aftermath, batch_monitor, guarded_run
from lightning_memguard.training.run.guarded_run import GuardedRun
from lightning_memguard.units import MIB
from tests.forks import with_shared_memory

pytestmark = pytest.mark.usefixtures("taped", "at_own_size")

notes_there = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes since Python 3.11")


class Tokens(pl.LightningModule):
    """Embeds and averages; what a step takes grows with the longest of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.head = nn.Linear(32, 2)
        self.shapes: list[tuple[int, ...]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.shapes.append(tuple(batch.shape))
        return self.head(self.embedding(batch).mean(1)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pad(items: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(items, batch_first=True)


class Growing(IterableDataset[torch.Tensor]):
    """A stream whose later texts are longer than all that a guard looks at."""

    def __init__(self, later: list[int], before: int = 500) -> None:
        self.lengths = [10] * before + later

    def __iter__(self) -> Any:
        return (torch.zeros(length, dtype=torch.long) for length in self.lengths)


Begun = Callable[..., GuardedRun]


def at_batches(begun: Begun, loader: Any, last: float = math.inf, **settings: Any) -> GuardedRun:
    """A fit that has come to a batch, or to the end of its data."""
    run = begun(Tokens(), loader, **{"batch_size": "largest", "max_batch_size": 100, **settings})
    for batch_idx, batch in enumerate(loader):
        run.start_batch(batch, batch_idx)
        run.check_batch("train", batch, batch_idx, math.inf)
        if batch_idx == last:
            break
    return run


def warnings_of(begun: Begun, data: Any, **settings: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        at_batches(begun, DataLoader(data, batch_size=100, collate_fn=pad), **settings)
    return [str(each.message) for each in caught if "larger than the" in str(each.message)]


@pytest.mark.captures
def test_one_that_may_not_fit_says_so(begun: Begun) -> None:
    (text,) = warnings_of(begun, Growing([4000] * 100), budget=4 * MIB, offload="never")
    assert "may run out of memory" in text


@pytest.mark.captures
def test_a_larger_batch_is_announced_with_what_it_takes_and_again_only_if_larger_by_a_tenth(begun: Begun) -> None:
    """Texts of 40 tokens where 10 were predicted from, again 40, 43 (less than a tenth more), 48."""
    lengths = [length for length in (40, 40, 43, 48) for _ in range(100)]
    first, second = warnings_of(begun, Growing(lengths), budget="64MiB")
    assert "Training batch 5 has [100, 40], larger than the [100, 10] of the prediction" in first
    assert first.endswith("It fits.")
    assert "[100, 48]" in second


def test_batches_within_the_prediction_are_passed_over(begun: Begun, played: Any) -> None:
    played(lambda trace: trace.plus({"activations": 10_000 * trace.batch[1]}))
    assert warnings_of(begun, Growing([3] * 150), budget="64MiB") == []


def test_a_smaller_last_batch_is_not_announced(begun: Begun, played: Any, dataset: TensorDataset, small: Any) -> None:
    played(lambda trace: trace.plus({"activations": 10_000 * trace.batch[1]}))
    loader = DataLoader(dataset, batch_size=30)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run = begun(small(), loader, batch_size="largest", max_batch_size=30)
        for batch_idx, batch in enumerate(loader):
            run.check_batch("train", batch, batch_idx, len(loader))


# -- out of memory


def fails(begun: Begun, error: Any, data: Any = None, at: int = 2, **settings: Any) -> str:
    """What is said of an error at a batch."""
    texts = data or [torch.zeros(10, dtype=torch.long) for _ in range(400)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = at_batches(begun, DataLoader(texts, batch_size=100, collate_fn=pad), at, **settings)
    with pytest.raises((RuntimeError, MemoryError, ValueError)) as caught:
        error()
    return run.note_on(caught.value)


def too_much() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def on_a_gpu(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("error", [too_much, on_a_gpu])
def test_an_out_of_memory_error_carries_what_was_predicted(begun: Begun, error: Any) -> None:
    note = fails(begun, error, budget="64MiB")
    assert "MemGuard predicted" in note
    assert "at batch size 100" in note
    assert "the measured peak up to this error is" in note
    assert "CPU offered 64.0 MiB at setup (given); now" in note
    assert "The batch had the predicted shape: [100, 10]." in note
    assert "These figures do not explain the error" in note


@pytest.mark.captures
def test_the_note_names_the_batch_that_was_larger(begun: Begun) -> None:
    note = fails(begun, on_a_gpu, Growing([500] * 100), at=5, budget="4MiB")
    assert "The batch had [100, 500]; the prediction is for [100, 10], and this batch is predicted to need " in note
    assert "  6.1 MiB  temporaries of test_batch_monitor.py:" in note  # 100 x 500 x 32 floats
    size = int(note.partition("For batches like it, batch size ")[2].partition(" ")[0])
    assert 10 < size < 100
    assert f"set max_batch_size={size}, or raise `margin`, or truncate long samples." in note


def test_later_batches_as_short_as_predicted_are_not_taken_for_the_larger_one(begun: Begun) -> None:
    texts = Growing([500] * 100 + [10] * 200)
    note = fails(begun, on_a_gpu, texts, at=6, budget="64MiB")
    assert "The batch had the predicted shape: [100, 10]." in note
    assert "batches like it" not in note


def test_a_size_that_would_have_fit_is_smaller_and_fits(begun: Begun) -> None:
    def of_pages() -> None:
        pages = torch.ones(9 << 20)  # more than the C library may have kept
        on_a_gpu(pages)

    note = fails(begun, of_pages, budget="16MiB", margin=0.0)
    size = int(note.partition("Batch size ")[2].partition(" ")[0])
    assert 1 <= size < 100
    assert f"max_batch_size={size}" in note


def test_other_errors_are_left_as_they_are(begun: Begun) -> None:
    def wrong() -> None:
        raise ValueError("a mistake in the step")

    assert fails(begun, wrong) == ""


def test_where_the_run_was_not_tuned_the_note_says_that_there_was_no_prediction(begun: Begun, small: Any) -> None:
    once = iter([(torch.zeros(4, 16), torch.zeros(4, dtype=torch.long))] * 4)
    with pytest.warns(UserWarning, match="MemGuard"):
        run = begun(small(), once, batch_size="largest")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        on_a_gpu()
    assert run.note_on(caught.value).startswith("MemGuard made no prediction: ")


class Keeping(Tokens):
    """Keeps what each step makes: 100 x 10 x 32 floats, 125 KiB, and the graph behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        embedded = self.embedding(batch)
        self.outputs.append(embedded)
        if batch_idx == 3 and not isinstance(embedded, torch._subclasses.FakeTensor):
            on_a_gpu()
        return self.head(embedded.exp().mean(1)).square().mean()


@pytest.mark.captures
@notes_there
def test_the_note_names_the_lines_that_hold_the_memory_and_what_was_kept_besides(trainer: Any) -> None:
    loader = DataLoader([torch.zeros(10, dtype=torch.long)] * 400, batch_size=100, collate_fn=pad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            trainer(MemGuard("check")).fit(Keeping(), loader)
    lines = "\n".join(caught.value.__notes__).splitlines()
    file, start = Path(__file__).name, Keeping.training_step.__code__.co_firstlineno
    begin = next(place for place, line in enumerate(lines) if line.startswith("At the predicted peak of "))
    held = [line.strip() for line in lines[begin + 1 :] if line.startswith("  ")]
    assert len(held) <= 5
    assert f"500.0 KiB  activations of {file}:{start + 1} (training_step), in embedding" in held
    assert f"375.0 KiB  temporaries of {file}:{start + 5} (training_step)" in held
    assert "12.8 KiB  parameters; actual: 12.8 KiB" in held
    assert any(
        "kept on the device: `Keeping.outputs` with the graphs of its tensors (500.0 KiB)" in line for line in lines
    )


def test_what_outlives_the_step_is_told_by_who_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor counts once, for the first who keeps it; those of the model and the optimizer do not count."""

    def caught(nbytes: int, *others: torch.Tensor) -> Exception:
        large = torch.zeros(nbytes, dtype=torch.uint8)  # of this frame
        try:
            int(f"not a number: {large.numel()}, {len(others)}")
        except ValueError as error:
            return error

    module = Keeping()
    module.outputs += [module.embedding.weight, torch.zeros(3 * MIB, dtype=torch.uint8)]
    shown = torch.zeros(5 * MIB, dtype=torch.uint8)
    monkeypatch.setattr(sys.modules["__main__"], "Out", {3: shown, 4: [module.outputs[1]]}, raising=False)
    monkeypatch.setattr(sys, "last_value", caught(2 * MIB), raising=False)
    trainer = pl.Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    held = aftermath.held_elsewhere(trainer, module, caught(7 * MIB, shown))
    assert [(who, nbytes) for who, nbytes in held.items() if nbytes] == [
        ("the frames of this error, until it is let go", 7 * MIB),
        ("the notebook's `Out[]`", 5 * MIB),
        ("`Keeping.outputs`", 3 * MIB),
        ("an earlier error's frames (`sys.last_value`)", 2 * MIB),
    ]


def test_what_the_failed_step_holds_on_a_gpu_is_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 alone: the error's frames hold 59.7 GiB of the step; 1 GiB in a list stays."""
    card, context, free, allocated, reserved = 81_079 * MIB, 685 * MIB, 19_192 * MIB, 61_123 * MIB, 61_202 * MIB

    def read(device: torch.device, *, margin: float, already_held_bytes: int = 0) -> Budget:
        own = context + reserved - allocated + min(already_held_bytes, allocated)
        return Budget(card, free + own, int(margin * card), "nvml", "NVIDIA H100 80GB HBM3 (cuda:0)")

    monkeypatch.setattr(batch_monitor, "read_budget", read)
    monkeypatch.setattr(batch_monitor, "held_now", lambda device: allocated)
    run, unknown = types.SimpleNamespace(device=torch.device("cuda", 0)), mock.Mock(side_effect=ValueError)
    offered = read(run.device, margin=0.05, already_held_bytes=allocated)
    profile = types.SimpleNamespace(budget=offered, facts=run, trace_at=unknown)
    step = Footprint(400, "cuda", 140 << 30, 157 << 30, 158 << 30, {"activations": 140 << 30}, "backward")
    watch: Any = mock.Mock(profile=profile, largest=None, is_fixed=True, shapes=(), predicted_shapes=())
    elsewhere = {report.FRAMES: 5 << 30, "`Net.outputs`": 1 << 30}
    failed = batch_monitor.failure(watch, step, None, elsewhere)
    assert failed.budget_now == replace(offered, free_bytes=card - (1 << 30))
    assert "now it offers 78.2 GiB of 79.2 GiB to this run (nvml), and other processes hold 0 B." in report.note(failed)


# -- workers


class Dying(torch.utils.data.Dataset[torch.Tensor]):
    """Whose worker gets a signal; batches of 2 MiB."""

    def __init__(self, signal_number: int = 0) -> None:
        self.signal_number = signal_number

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if torch.utils.data.get_worker_info() and index == 9 and self.signal_number:
            os.kill(os.getpid(), self.signal_number)
        return torch.zeros(MIB // 16)


class Wide(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(MIB // 16, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.head(batch).sum()


def shorten(patches: pytest.MonkeyPatch) -> None:
    patches.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    patches.setattr(torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


@pytest.fixture
def dead_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The loader does not wait 5 s for each dead worker, now or when it goes."""
    shorten(monkeypatch)
    yield
    gc.collect()


def of_workers(trainer: Any, data: Dying) -> str:
    loader = DataLoader(data, batch_size=8, num_workers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError) as caught:
            trainer(MemGuard("check")).fit(Wide(), loader)
    return "\n".join(getattr(caught.value, "__notes__", []))


@notes_there
@pytest.mark.usefixtures("dead_soon")
@pytest.mark.parametrize(
    ("kills_before", "words"), [(-3, "want of memory 3 times since"), (0, "was killed, but not by the kernel")]
)
def test_a_worker_that_was_killed_is_explained(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, kills_before: int, words: str
) -> None:
    real = aftermath.oom_kills() or 0
    counts = iter([real + kills_before, real])
    monkeypatch.setattr(guarded_run, "oom_kills", lambda: next(counts))
    monkeypatch.setattr(aftermath, "oom_kills", lambda: next(counts))
    note = of_workers(trainer, Dying(signal.SIGKILL))
    assert words in note
    assert ("fetched ahead take up to 10.0 MiB" in note) == bool(kills_before)


@notes_there
@pytest.mark.usefixtures("dead_soon")
def test_a_worker_that_ran_out_of_shared_memory_is_explained(trainer: Any) -> None:
    """Two workers that fetch two batches ahead, and the one in use: five batches of 2 MiB."""
    note = of_workers(trainer, Dying(signal.SIGBUS))
    assert note.startswith("A worker of the loader ran out of /dev/shm, which has ")
    assert "fetched ahead take up to 10.0 MiB" in note
    assert not of_workers(trainer, Dying(signal.SIGSEGV))


@notes_there
def test_a_small_shared_memory_is_explained(tmp_path: Path) -> None:
    with_shared_memory(6, in_small_memory, tmp_path)


def in_small_memory(_: Path) -> None:
    shorten(pytest.MonkeyPatch())
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    said = of_workers(lambda guard: pl.Trainer(callbacks=[guard], max_epochs=1, **settings), Dying())
    assert "A worker of the loader ran out of /dev/shm, which has 6.0 MiB in all." in said
