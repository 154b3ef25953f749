"""Traces as compressed bytes, for what is kept while a training runs: a fiftieth of the memory, and no objects."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from lightning_memguard.core.trace.growth import Growth
from lightning_memguard.core.trace.trace import Trace

T = TypeVar("T")

_FASTEST = 1  # level of compression


def _pack(value: object) -> bytes:
    return zlib.compress(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), _FASTEST)


@dataclass(frozen=True)
class PackedGrowth:
    """A `Growth` that is unpacked whenever it is asked."""

    sizes: tuple[int, ...]
    content: bytes

    @classmethod
    def of(cls, growth: Growth) -> PackedGrowth:
        """Pack a growth."""
        return cls(growth.sizes, _pack(growth))

    def at(self, batch_size: int) -> Trace:
        """The trace at a batch size."""
        return self.unpacked().at(batch_size)

    def unpacked(self) -> Growth:
        """The growth itself, to be asked several times."""
        return cast("Growth", pickle.loads(zlib.decompress(self.content)))  # noqa: S301 - our own


class PackedTraces(Mapping[int, T]):
    """Traces by batch size, or several for each, unpacked whenever they are asked for."""

    def __init__(self, traces: Mapping[int, T]) -> None:
        self._content = {batch_size: _pack(trace) for batch_size, trace in traces.items()}

    @classmethod
    def of(cls, traces: Mapping[int, T]) -> PackedTraces[T]:
        """Pack traces that are not packed yet."""
        return traces if isinstance(traces, PackedTraces) else cls(traces)

    def __contains__(self, batch_size: object) -> bool:
        return batch_size in self._content  # without unpacking

    def __getitem__(self, batch_size: int) -> T:
        return cast("T", pickle.loads(zlib.decompress(self._content[batch_size])))  # noqa: S301 - our own

    def __iter__(self) -> Iterator[int]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)
