"""What one source says of a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """What one source says of a device, in bytes.

    ``used_bytes`` is what processes hold, without the driver's own share; None where the source does not say.
    """

    total_bytes: int
    free_bytes: int
    source: str
    used_bytes: int | None = None


def smallest(rooms: tuple[Room | None, ...]) -> Room | None:
    """The one with the least free memory; None where no source answered."""
    return min((room for room in rooms if room), key=lambda room: room.free_bytes, default=None)
