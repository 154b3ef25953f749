"""Memory of a second stream: free at once at least, and at most when the host has waited for that stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


def test_memory_comes_back_when_the_host_has_waited() -> None:
    with recorded() as (used, trace):
        for _ in range(4):
            used.once().synchronize()
        assert reserved(trace()) == (SIZE, SIZE, SIZE)


def test_at_most_none_comes_back_before() -> None:
    with recorded() as (used, trace):
        for _ in range(4):
            used.once()
        assert reserved(trace()) == (SIZE, SIZE, 4 * SIZE)


@pytest.mark.parametrize("inflight", [1, 2])
def test_a_limit_of_events_in_flight_limits_what_waits(inflight: int) -> None:
    with recorded() as (used, trace):
        events = []
        for _ in range(6):
            if len(events) == inflight:
                events.pop(0).synchronize()
            events.append(used.once())
        assert reserved(trace()) == (SIZE, SIZE, inflight * SIZE)


@pytest.mark.parametrize("of_stream", [False, True])
def test_the_host_may_wait_for_all(of_stream: bool) -> None:
    with recorded() as (used, trace):
        for _ in range(3):
            used.once()
            used.once()
            if of_stream:
                torch.cuda.current_stream().synchronize()
            else:
                torch.cuda.synchronize()
        assert reserved(trace()) == (SIZE, SIZE, 2 * SIZE)


def test_the_host_is_less_than_a_step_ahead() -> None:
    with recorded() as (used, trace):
        for step in range(4):
            used.recorder.mark("forward", step)
            used.once()
        assert reserved(trace()) == (SIZE, SIZE, 2 * SIZE)


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
