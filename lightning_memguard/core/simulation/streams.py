"""CUDA streams of a simulated GPU, on which nothing runs: each has memory of its own.

A block that another stream uses too (``record_stream``) comes back to its own when the host finds that the other one is
done with it, not when it is freed (``insert_events`` and ``process_events`` in CUDACachingAllocator.cpp). How far the
host is ahead of the GPU is not known: at least, such a block is back at once; at most, when the host has waited.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from typing_extensions import Self

from lightning_memguard.core.foreign import added, nothing, patched

_FIRST_STREAM = 16  # lower numbers are those of `Recorder.on_stream`
_stream_numbers = itertools.count(_FIRST_STREAM)
_clock = itertools.count()


class FakeStream:
    """A ``torch.cuda.Stream`` of the simulated GPU."""

    def __init__(self, _: object = None, priority: int = 0, stream_id: int | None = None, **__: object) -> None:
        self.device, self.priority = torch.device("cuda", 0), priority
        self.device_index, self.device_type = 0, 1  # c10::DeviceType (torch/headeronly/core/DeviceType.h)
        self.cuda_stream = self.stream_id = next(_stream_numbers) if stream_id is None else stream_id

    def wait_stream(self, _: object) -> None:  # noqa: D102 - as torch's
        pass

    wait_event = wait_stream

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:  # noqa: D102
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:  # noqa: D102
        self.record_event().synchronize()

    def query(self) -> bool:  # noqa: D102
        return True

    def is_capturing(self) -> bool:  # noqa: D102
        return False

    def __enter__(self) -> Self:
        _streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _streams.pop()


_ELAPSED = 1.0


class FakeEvent:
    """A ``torch.cuda.Event`` of the simulated GPU."""

    _last = -1  # when any event was recorded last

    def __init__(self, *_: object, **__: object) -> None:
        self._stream = self._at = self._before = -1

    def record(self, stream: FakeStream | None = None) -> None:  # noqa: D102 - as torch's
        self._stream = (stream or _streams[-1]).cuda_stream
        self._before, self._at = FakeEvent._last, next(_clock)
        FakeEvent._last = self._at

    def wait(self, *_: object) -> None:  # noqa: D102
        pass

    def synchronize(self) -> None:  # noqa: D102
        for watcher in _watched:
            watcher.give_back(self._is_done)

    def query(self) -> bool:  # noqa: D102
        return True

    def elapsed_time(self, _: FakeEvent) -> float:  # noqa: D102 - in milliseconds; a user may divide by it
        return _ELAPSED

    def _is_done(self, late: Late) -> bool:
        """Whether a stream is done with a block when this event is over.

        Its own stream is done with what was freed before it, others with what was freed before the previous event: FSDP
        records one with each parameter that it frees. A layer's gather comes before the layer's event, and after the
        reductions of earlier layers, on the one stream of the communicator.
        """
        return late.freed_at < (self._at if late.user == self._stream else self._before)


_streams = [FakeStream(stream_id=0)]  # the one in use last


def in_use() -> int:
    """The number of the stream whose memory is allocated now; 0 for the default one."""
    return _streams[-1].cuda_stream


class _OnStream:
    """A ``torch.cuda.StreamContext`` of the simulated GPU; Dynamo asks for the class."""

    def __init__(self, stream: Any) -> None:
        # One that was made on the GPU itself is known by its number.
        is_fake = stream is None or isinstance(stream, FakeStream)
        self._within = (stream or nullcontext()) if is_fake else FakeStream(stream_id=stream.cuda_stream)

    def __enter__(self) -> None:
        self._within.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._within.__exit__(*raised)


def _synchronize(*_: object) -> None:
    for watcher in _watched:
        watcher.give_back(lambda _: True)


def functions() -> dict[str, Callable[..., Any]]:
    """Return the replacements for the functions of `torch.cuda` about streams, by name."""
    return {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": _OnStream,
        "StreamContext": _OnStream,
        "current_stream": lambda *_: _streams[-1],
        "default_stream": lambda *_: _streams[0],
        "set_stream": lambda stream: _streams.__setitem__(-1, stream),
        "synchronize": _synchronize,
    }


@contextmanager
def replaced() -> Iterator[None]:
    """Make streams and events those of a simulated GPU, under names that were imported earlier too.

    Those that were made on a GPU wait for nothing, and nothing is recorded on them.
    """
    streams: Any = torch.cuda.streams
    of_stream = {
        "__new__": staticmethod(lambda _, *args, **kwargs: FakeStream(*args, **kwargs)),
        "record_event": lambda self, event=None: FakeStream(stream_id=self.cuda_stream).record_event(event),
        "synchronize": _synchronize,
        "query": lambda _: True,
        **dict.fromkeys(("wait_event", "wait_stream"), nothing),
    }
    of_event = {
        "__new__": staticmethod(lambda _, *args, **kwargs: FakeEvent(*args, **kwargs)),
        "elapsed_time": lambda *_: _ELAPSED,
        "query": lambda _: True,
        **dict.fromkeys(("record", "wait", "synchronize"), nothing),
    }
    with added(streams.Stream, **of_stream), added(streams.Event, **of_event), patched(torch.cuda, **functions()):
        yield


# -- blocks that another stream uses


class Late(NamedTuple):
    """A freed block that waits for a stream that used it, and the block that is in its place meanwhile."""

    waiting: int
    user: int  # a stream
    freed_at: int
    step: int


def now() -> int:
    """A moment after all that came before, as of events."""
    return next(_clock)


class Watcher(Protocol):
    """Object that follows which blocks another stream uses, and when the host waits."""

    def use(self, tensor: torch.Tensor, user: int) -> None:
        """A stream uses a tensor."""

    def give_back(self, is_done: Callable[[Late], bool]) -> None:
        """The host finds out that streams are done with some blocks."""


_watched: list[Watcher] = []  # the innermost last


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Report blocks that another stream uses, and waits of the host, to ``watcher`` while the context is open."""
    _watched.append(watcher)
    try:
        yield
    finally:
        _watched.pop()


def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:
    """``torch.Tensor.record_stream``."""
    if _watched:
        _watched[-1].use(tensor, stream.cuda_stream)
