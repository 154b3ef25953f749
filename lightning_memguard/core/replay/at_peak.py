"""Trace -> the blocks alive at its peak, by the line of code that requested them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from lightning_memguard.core.replay.replay import alive_at_peak, within_capacity
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.trace import OPTIONAL_PARTS, Trace

_NOT_OF_A_LINE = ("parameters", "buffers", "gradients", "optimizer_state", "batch", *OPTIONAL_PARTS)


@dataclass(frozen=True)
class LineShare:
    """Bytes that one line of code has requested, or that belong to one part.

    ``part`` is that of most of the bytes, ``line`` is ``"<file>:<line>:<function>"`` or empty for a part that no line
    has requested, and ``modules`` have run the line, the one with most bytes first. ``actual_bytes`` are those of the
    blocks that are really there; None if that is not recorded.
    """

    nbytes: int
    part: str
    line: str = ""
    modules: tuple[str, ...] = ()
    actual_bytes: int | None = None


def shares_at_peak(trace: Trace, settings: AllocatorSettings) -> list[LineShare]:
    """Return the lines and parts that hold the memory at the peak of a trace, the largest first.

    >>> from lightning_memguard.core.trace.trace import Event
    >>> EXACT = AllocatorSettings(kind="exact")
    >>> step = [Event("alloc", 0, 512, "parameters"), Event("alloc", 1, 2048, "activations", source="net.py:7:forward")]
    >>> [(share.nbytes, share.part, share.line) for share in shares_at_peak(Trace(1, "cpu", "fake", step), EXACT)]
    [(2048, 'activations', 'net.py:7:forward'), (512, 'parameters', '')]
    """
    parts, modules = defaultdict[str, Counter[str]](Counter), defaultdict[str, Counter[str]](Counter)
    trace = trace.only("point")
    for event, nbytes in within_capacity(trace, settings, lambda s: alive_at_peak(s.trace.events, list(s)))[1]:
        key = "" if event.part in _NOT_OF_A_LINE else event.source
        parts[key or event.part][event.part] += nbytes
        if key:
            modules[key][event.module] += nbytes
    shares = []
    for key, of_key in parts.items():
        ran = tuple(module for module, _ in modules[key].most_common() if module) if key in modules else ()
        shares.append(LineShare(of_key.total(), of_key.most_common(1)[0][0], key if key in modules else "", ran))
    return sorted(shares, key=lambda share: -share.nbytes)
