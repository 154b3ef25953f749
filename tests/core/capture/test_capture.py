"""A step is captured in a child: what comes back is its trace, or why there is none; nothing else of it is left."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture import capture as capture_module
from lightning_memguard.core.capture.capture import (
    CaptureFailedError,
    Captures,
    capture,
    capture_here,
    captures_of,
    isolated,
)
from lightning_memguard.core.capture.predict import predict
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.isolation import pool
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.simulation.driver import NEEDS_GPU
from lightning_memguard.core.trace.growth import grow
from lightning_memguard.core.trace.packed import PackedGrowth, PackedTraces
from lightning_memguard.core.trace.trace import Trace
from tests import tape

NEEDS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
HERE = os.getpid()


class Words(nn.Module):
    """Kernels whose scratch follows rules: an embedding's gradient, a norm's, a convolution's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.layer = nn.Embedding(50, 16), nn.LayerNorm(16), nn.Conv1d(16, 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(self.norm(self.embedding(x)).transpose(1, 2))
        return found


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


def program_of(before: Callable[[torch.Tensor], object] = len, **options: Any) -> LoopProgram:
    """A linear layer; its step begins with something else."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        before(x)
        return plain(model, x)

    given: dict[str, Any] = {"model": nn.Linear(4, 8), "batches": batches_from_one(torch.ones(16, 4)), "step": step}
    return LoopProgram(optimizer=torch.optim.Adam, device=torch.device("cpu"), **{**given, **options})


def words(where: str) -> LoopProgram:
    options: dict[str, Any] = {"device": torch.device("cpu")}
    if where == "H200":
        options = {"device": torch.device("cuda"), "gpu": gpus.find("NVIDIA H200")}
    return LoopProgram(
        model=Words(),
        step=plain,
        batches=batches_from_one(torch.randint(0, 50, (16, 12))),
        optimizer=torch.optim.Adam,
        **options,
    )


def in_this_process(program: LoopProgram, batch_size: int) -> Trace:
    return capture_here(program, batch_size, "fake")


# -- traces as values


@NEEDS_FORK
@pytest.mark.parametrize("where", ["cpu", "H200"])
def test_a_trace_from_a_child_is_the_one_of_this_process(where: str) -> None:
    program = words(where)
    sent, made = capture(program, 8, "fake"), in_this_process(program, 8)
    assert sent == made
    assert sent.kernels
    assert [kernel.scratch(kernel.numbers) for kernel in sent.kernels] == [
        kernel.scratch(kernel.numbers) for kernel in made.kernels
    ]


@pytest.mark.parametrize("name", ["words_gpu", "words_bf16_gpu"])
def test_traces_that_were_sent_grow_alike(name: str) -> None:
    """Rules of kernels are sent as data, and are asked again at another size."""
    captured = tape.read(name)
    made = [captured[size] for size in (4, 8, 16)]
    growth = grow([pickle.loads(pickle.dumps(trace)) for trace in made])
    for n in (1, 438, 439, 4096):
        assert growth.at(n) == grow(made).at(n)
        assert growth.at(n).events == captured[n].events
        assert PackedGrowth.of(growth).at(n) == growth.at(n)


def test_what_was_captured_is_not_captured_again(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def trace_of(size: int) -> Trace:
        return Trace(size, "cpu", "fake", ())

    monkeypatch.setattr(capture_module, "capture_here", lambda _, size, *rest, **__: ran.append(size) or trace_of(size))
    program = words("cpu")
    with Captures(program) as captures:
        captures.start(program, 4, "fake")
        assert [captures.trace(program, size, "fake").batch_size for size in (4, 8, 4)] == [4, 8, 4]
    assert ran == [4, 8]


def test_packed_traces_are_the_same_in_less_memory() -> None:
    traces = {size: trace for size, trace in tape.read("words_gpu").items() if size in (4, 8)}
    packed = PackedTraces(traces)
    assert dict(packed) == traces
    assert PackedTraces.of(packed) is packed
    assert (list(packed), len(packed), 5 in packed) == ([4, 8], 2, False)
    assert len(pickle.dumps(packed)) < len(pickle.dumps(traces)) / 3


# -- nothing is left


@NEEDS_FORK
@pytest.mark.parametrize("method", ["fake", "real"])
def test_a_step_changes_nothing_here(method: Any) -> None:
    called: list[int] = []
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout())
    other = nn.Parameter(torch.zeros(1))
    numbers = iter(range(100))
    random.seed(3)
    drawn = random.getstate()

    def step(copy: nn.Module, x: torch.Tensor) -> torch.Tensor:
        called.append(next(numbers))
        model(torch.ones(3, 4)).sum().backward()  # not the copy that it is given
        sys.modules["of a step"] = sys
        random.random()
        return plain(copy, x) + other.sum()

    before = {name: value.clone() for name, value in model.state_dict().items()}
    program = program_of(model=model, step=step)
    state = torch.get_rng_state()
    assert capture(program, 4, method).method == method
    assert called == []
    assert next(numbers) == 0
    assert "of a step" not in sys.modules
    assert random.getstate() == drawn
    assert torch.equal(torch.get_rng_state(), state)
    assert other.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@NEEDS_FORK
@pytest.mark.parametrize("method", ["fake", "real"])
def test_a_step_that_saves_is_captured_and_saves_nothing(method: Any, tmp_path: Path) -> None:
    def save(x: torch.Tensor) -> None:
        torch.save({"size": len(x)}, tmp_path / "step.pt")
        torch.save(x.detach(), str(tmp_path / "batch.pt"))
        memory = io.BytesIO()
        torch.save({"size": len(x)}, memory)
        memory.seek(0)
        assert torch.load(memory) == {"size": len(x)}

    assert capture(program_of(save), 4, method).method == method
    assert not list(tmp_path.iterdir())


@NEEDS_FORK
def test_a_step_draws_what_it_would_draw_here() -> None:
    random.seed(4)
    expected = random.random()
    random.seed(4)

    def check(_: torch.Tensor) -> None:
        if not drawn:
            drawn.append(random.random())
            assert drawn == [expected]

    drawn: list[float] = []
    assert capture(program_of(check), 4, "fake").method == "fake"


# -- children that fail


@NEEDS_FORK
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda _: os._exit(0), "it ended the process (exit code 0)"),
        (lambda _: sys.exit(2), "SystemExit: 2"),
        (lambda _: ctypes.string_at(0), "it was ended by SIGSEGV"),
    ],
)
def test_a_step_that_ends_its_process_is_a_step_that_fails(end: Callable[[Any], Any], reason: str) -> None:
    with pytest.raises(CaptureFailedError) as failed:
        capture(program_of(end), 4, "fake")
    assert str(failed.value).startswith(reason)
    assert not failed.value.value_needed


@NEEDS_FORK
def test_a_step_that_crashes_at_other_sizes_is_known_at_its_own() -> None:
    def crash(x: torch.Tensor) -> None:
        if len(x) != 6:
            ctypes.string_at(0)

    prediction = predict(program_of(crash), 6, AllocatorSettings(kind="exact"))
    assert (prediction.curve.method, list(prediction.curve.captured), prediction.curve.scalable) == ("fake", [6], False)


@NEEDS_FORK
@pytest.mark.parametrize(
    ("work", "most", "silent", "reason"),
    [
        (len, 600.0, 0.6, "it went on for 1 s without calling an operator of torch"),
        (torch.sin, 0.6, 600.0, "it had not ended after 1 s"),
    ],
    ids=["without operators", "with operators"],
)
def test_an_endless_step_is_given_up(
    work: Callable[[Any], Any], most: float, silent: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MOST_SECONDS", most)
    monkeypatch.setattr(pool, "SILENT_SECONDS", silent)
    monkeypatch.setattr(pool, "_BEAT_SECONDS", 0.2)

    def forever(x: torch.Tensor) -> None:
        while True:
            work(x)

    with pytest.raises(CaptureFailedError) as failed:
        capture(program_of(forever), 4, "fake")
    assert str(failed.value) == reason


# -- the way without a child


def no_memory() -> int:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


NOTE = "the step was captured in this process, not in a child: "


def test_where_no_child_can_be_had_the_step_is_captured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    program = words("cpu")
    expected = in_this_process(program, 8)
    if hasattr(os, "fork"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fork", no_memory)
            trace = capture(program, 8, "fake")
        assert trace.events == expected.events
        assert trace.notes == (f"{NOTE}no process could be forked ([Errno 12] Cannot allocate memory)",)
    monkeypatch.delattr(os, "fork", raising=False)
    trace = capture(program, 8, "fake")
    assert trace.events == expected.events
    assert trace.notes == (f"{NOTE}this system cannot fork",)


def test_a_step_that_exits_ends_no_process_where_there_is_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork", raising=False)
    with pytest.raises(CaptureFailedError, match="SystemExit: 3"):
        capture(program_of(lambda _: sys.exit(3)), 4, "fake")


@NEEDS_FORK
def test_what_another_thread_holds_is_waited_for_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "BLOCKED_SECONDS", 1.0)
    lock, held, done = threading.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    def wait(_: torch.Tensor) -> None:
        if os.getpid() == HERE:
            done.set()
        with lock:
            pass

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        trace = capture(program_of(wait), 4, "fake")
    finally:
        done.set()
        thread.join()
    (note,) = trace.notes
    assert note.startswith(f"{NOTE}it waited 1 s for something that never came")


THREADING = "Unable to handle autograd's threading in combination with fork-based multiprocessing."


@NEEDS_FORK
@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Cannot re-initialize CUDA in forked subprocess.", NEEDS_GPU),
        (THREADING, f"RuntimeError: {THREADING}"),
        ("CUDA error: initialization error", NEEDS_GPU),
    ],
)
def test_what_cannot_be_done_after_a_fork_is_done_here(message: str, said: str) -> None:
    def refuse(_: torch.Tensor) -> None:
        if os.getpid() != HERE:
            raise RuntimeError(message)

    (note,) = capture(program_of(refuse), 4, "fake").notes
    assert note.startswith(f"{NOTE}{said}")


# -- several at once


@NEEDS_FORK
def test_captures_are_found_by_their_programs_and_leave_no_child() -> None:
    one, two, other = program_of(), words("cpu"), program_of()
    before = psutil.Process().children()
    with Captures(one, two) as captures:
        captures.start(one, 4, "fake")
        captures.start(two, 8, "fake")
        assert [captures.place_of(program) for program in (one, two, other)] == [0, 1, -1]
        with captures_of(two) as found:
            assert found is captures
        assert capture(two, 8, "fake").events == in_this_process(two, 8).events
        assert capture(one, 4, "fake").batch_size == 4
        assert capture(other, 4, "fake").batch_size == 4
        assert len(psutil.Process().children()) <= len(before) + os.cpu_count()
    assert psutil.Process().children() == before


@NEEDS_FORK
def test_isolated_work_comes_back_as_its_value() -> None:
    found: list[int] = []

    def work() -> int:
        found.append(1)
        return os.getpid()

    process = isolated(work)
    assert process != HERE
    assert found == []
    assert isolated(lambda: isolated(os.getpid) == os.getpid()), "a child needs no other"
    with pytest.raises(CaptureFailedError, match="ZeroDivisionError: division by zero"):
        isolated(lambda: 1 / 0)
