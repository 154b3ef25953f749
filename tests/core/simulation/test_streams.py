"""Memory of a second stream: free at once at least, and at most when the host has waited for that stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memguard.core import gpus
from lightning_memguard.core.capture.program import tensors
from lightning_memguard.core.capture.recorder import Recorder, watching
from lightning_memguard.core.replay.footprint import MORE_CACHED, footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import WAITS, Trace
from lightning_memguard.units import MIB

GPU = gpus.find("NVIDIA H200")
SIZE = 32 * MIB


def tensor() -> torch.Tensor:
    return torch.empty(SIZE, dtype=torch.uint8, device="cuda")


@dataclass
class Used:
    """Tensors of a side stream that the default one uses, freed one after the other."""

    recorder: Recorder

    def __post_init__(self) -> None:
        self.side = torch.cuda.Stream()

    def once(self) -> torch.cuda.Event:
        """Make one, use it, free it, and record an event of the stream that used it."""
        with torch.cuda.stream(self.side):
            x = tensor()
        x.record_stream(torch.cuda.current_stream())
        del x
        event = torch.cuda.Event()
        event.record()
        return event


@contextmanager
def recorded() -> Iterator[tuple[Used, Callable[[], Trace]]]:
    recorder = Recorder("cuda", kernel_target=GPU.kernel_target)
    with tensors(fake=True, gpu=GPU), watching(recorder, nn.Identity()):
        yield Used(recorder), lambda: recorder.trace(1, "fake")


def reserved(trace: Trace, **settings: Any) -> tuple[int, int, int]:
    """Low, point and high, without the share by which caches differ."""
    known = footprint(trace, AllocatorSettings(**settings))
    assert known.peak_allocated_bytes == SIZE
    if known.low is None or known.high is None:
        return (known.peak_reserved_bytes,) * 3
    assert known.high.allocated_bytes == SIZE
    most = known.high.reserved_bytes - (0 if "capacity_bytes" in settings else int(MORE_CACHED * SIZE))
    return known.low.reserved_bytes, known.peak_reserved_bytes, most


def waits(used: Used) -> None:
    for _ in range(4):
        used.once().synchronize()


def waits_never(used: Used) -> None:
    for _ in range(4):
        used.once()


def with_in_flight(count: int, used: Used) -> None:
    events = []
    for _ in range(6):
        if len(events) == count:
            events.pop(0).synchronize()
        events.append(used.once())


def waits_for_all(of_stream: bool, used: Used) -> None:
    for _ in range(3):
        used.once()
        used.once()
        (torch.cuda.current_stream() if of_stream else torch.cuda).synchronize()


def steps(used: Used) -> None:
    for step in range(4):
        used.recorder.mark("forward", step)
        used.once()


@pytest.mark.parametrize(
    ("run", "most"),
    [
        pytest.param(waits, 1, id="memory comes back when the host has waited"),
        pytest.param(waits_never, 4, id="at most none comes back before"),
        pytest.param(partial(with_in_flight, 1), 1, id="one event in flight limits what waits"),
        pytest.param(partial(with_in_flight, 2), 2, id="so do two"),
        pytest.param(partial(waits_for_all, True), 2, id="the host may wait for all of a stream"),
        pytest.param(partial(waits_for_all, False), 2, id="or of the device"),
        pytest.param(steps, 2, id="the host is less than a step ahead"),
    ],
)
def test_what_waits_for_the_host_is_at_most_what_it_has_not_waited_for(run: Callable[[Used], None], most: int) -> None:
    with recorded() as (used, trace):
        run(used)
        assert reserved(trace()) == (SIZE, SIZE, most * SIZE)


def test_a_block_of_the_stream_that_uses_it_is_free_at_once() -> None:
    with recorded() as (_, trace):
        for _ in range(3):
            x = tensor()
            x.record_stream(torch.cuda.current_stream())
            del x
        assert not any(event.operator == WAITS for event in trace())


def test_where_memory_is_short_what_waits_gives_way() -> None:
    with recorded() as (used, trace):
        for _ in range(4):
            used.once()
        assert reserved(trace(), capacity_bytes=3 * SIZE)[2] <= 3 * SIZE
        assert footprint(trace(), AllocatorSettings()).yielding_bytes == 3 * SIZE + int(MORE_CACHED * SIZE)
