"""When a step's activations go to the host: what the step takes and what the device offers -> the bytes that stay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """Memory that a training may take on its device now, in bytes, its own part included.

    ``usable_bytes`` are ``free_bytes`` less the margin, and less what the allocator holds in pieces too small to use.
    """

    free_bytes: int
    usable_bytes: int


@dataclass(frozen=True)
class Demand:
    """Memory that the step of one kind of batch takes on its device, in bytes.

    Attributes:
        likely_bytes: the predicted peak.
        most_bytes: its upper bound; the measured peak, once there is one.
        fixed_bytes: of both, what does not depend on the batch.
        times: how many times as large as the predicted batch the one at hand may be, in what memory grows with.
        measured: whether steps of this kind have run and were measured.
    """

    likely_bytes: int
    most_bytes: int
    fixed_bytes: int = 0
    times: float = 1.0
    measured: bool = False

    def scaled(self, nbytes: int) -> int:
        """Bytes, at most, on the batch at hand of a step that takes so many on the predicted one."""
        fixed = min(nbytes, self.fixed_bytes)
        return fixed + int((nbytes - fixed) * self.times)

    def fits(self, room: Room) -> bool:
        """Whether it fits as it is; what was measured needs no margin."""
        return self.scaled(self.most_bytes) <= (room.free_bytes if self.measured else room.usable_bytes)

    def must_move(self, room: Room) -> bool:
        """Whether something will have to move, if the prediction is right."""
        return not self.fits(room) and self.scaled(self.likely_bytes) > room.usable_bytes


def kept_bytes(demand: Demand, room: Room, rest: tuple[int, int] | None) -> int | None:
    """How many bytes of saved activations may stay on the device; None for all of them.

    If only the upper bound does not fit, what stays is as much as the likely step saves, and nothing moves unless the
    prediction was too low.

    Args:
        demand: of the batch at hand.
        room: on its device.
        rest: bytes that the predicted step takes with all its activations on the host, likely and at most; None if
            they are not known.
    """
    if demand.fits(room):
        return None
    if rest is None:
        return 0
    if demand.must_move(room):
        return max(0, room.usable_bytes - demand.scaled(rest[1]))
    return max(0, room.free_bytes - demand.scaled(rest[0]))
