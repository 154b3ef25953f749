"""The work of a step + the speed of a device -> the seconds that it takes.

A roofline, operator by operator: each takes as long as its products at the device's peak, or as its bytes at the
device's bandwidth, whichever is longer, and never less than a launch. A GPU computes while the host calls the next
operators, so a step takes as long as the slower of the two.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_memguard.core.range import Range
from lightning_memguard.core.trace.work import COMMUNICATION, CONVOLUTION, TRANSFER, Work

_AT_ONCE = Range(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Speed:
    """How fast a device is.

    Attributes:
        flops: floating point operations a second that products reach, by number format.
        bandwidth: bytes a second, by the bytes that an operator moves: from that many on, ascending.
        launch_seconds: how long an operator takes at least.
        link: bytes a second to another rank; None if it is not known.
        host_link: bytes a second between the device and its host; None if it is not known.
        host_seconds: how long the host takes to call an operator, while the device computes; nothing on a CPU.
        spread: the likely time times these is the range that held nine of ten measured steps.
    """

    flops: Mapping[str, float]
    bandwidth: tuple[tuple[float, float], ...]
    launch_seconds: float
    spread: tuple[float, float]
    link: float | None = None
    host_link: float | None = None
    host_seconds: Range[float] = _AT_ONCE

    def seconds(self, work: Work) -> float:
        """How long one call takes."""
        moving = work.nbytes / self.bandwidth[bisect.bisect(self.bandwidth, (work.nbytes,)) - 1][1]
        return max(moving, work.flops / self._peak(work.kind) if work.kind else 0.0, self.launch_seconds)

    def _peak(self, kind: str) -> float:
        return next(
            self.flops[each] for each in (kind, kind.removesuffix(CONVOLUTION), "float32") if each in self.flops
        )


@dataclass(frozen=True)
class Timing:
    """The work of a step, and the device that does it.

    Attributes:
        work: what a batch and an optimizer step compute.
        speed: returns how fast the device is; None if that is not known.
        batches_per_step: batches of an optimizer step.
        compiled: whether torch.compile fuses operators of ``work``.
    """

    work: Sequence[Work]
    speed: Callable[[], Speed | None]
    batches_per_step: int = 1
    compiled: bool = False

    @functools.cached_property
    def step(self) -> Range[float] | None:
        """The seconds of an optimizer step: all its batches, and the update."""
        speed = self.speed() if self.work else None
        if speed is None or (self.moved_bytes and not speed.host_link):
            return None
        taken = [(each, speed.seconds(each)) for each in self.work if each.kind not in (COMMUNICATION, TRANSFER)]
        seconds, least = self._sum(taken), self._sum(one for one in taken if one[0].kind or not self.compiled)
        sent = self._sum((each, each.nbytes) for each in self.work if each.kind == COMMUNICATION)
        sending = sent / speed.link if speed.link else 0.0
        moving = self.moved_bytes / speed.host_link if speed.host_link else 0.0
        calls = self._sum((each, 1.0) for each, _ in taken)
        calling = speed.host_seconds.scaled(0.0 if self.compiled else calls)
        # on the way out it overlaps with the step, on the way back not
        likely = max(seconds, sending, moving, calling.likely) + moving
        least, most = max(least * speed.spread[0], moving), (seconds + 2 * (sending + moving)) * speed.spread[1]
        return Range(max(least, calling.low), likely, max(most, calling.high))

    @property
    def moved_bytes(self) -> int:
        """Activations of an optimizer step that wait on the host for their backward pass, in bytes."""
        return int(self._sum((each, each.nbytes) for each in self.work if each.kind == TRANSFER))

    def _sum(self, figures: Iterable[tuple[Work, float]]) -> float:
        return sum(figure * each.calls * (1 if each.updates else self.batches_per_step) for each, figure in figures)
