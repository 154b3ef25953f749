"""Where saved tensors go: memory of the host, or a temporary file; and how their bytes get there and back.

With fake tensors nothing goes anywhere and all else runs as it is, so a capture allocates and frees on the device what
the step does. No GPU has run the copies of `_Link` yet.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_memguard.core.device.host import available_memory
from lightning_memguard.training.offload.space import Space
from lightning_memguard.units import MIB

_CHUNK_BYTES = 64 * MIB  # of host memory that is allocated at once; pinning takes milliseconds
_IN_FLIGHT_BYTES = 64 * MIB  # of tensors on the device whose copies may still run, besides the last one
_STAGED_BYTES = 16 * MIB  # between a GPU and a file
_IN_MEMORY = frozenset(("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"))


class Place:
    """A span of a tier; it can be taken again when this object is gone."""

    __slots__ = ("memory", "nbytes", "offset", "space", "tier")

    def __init__(self, tier: File | Host, space: Space, offset: int, nbytes: int, memory: Tensor | None = None) -> None:
        self.tier, self.space, self.offset, self.nbytes, self.memory = tier, space, offset, nbytes, memory

    def __del__(self) -> None:
        self.space.freed.append((self.offset, self.nbytes))


# -- a file


class File:
    """An unlinked temporary file: it is gone with this object, however the process ends.

    Args:
        is_fake: nothing is written: the tensors are fake.
    """

    def __init__(self, *, is_fake: bool) -> None:
        self.is_fake, self._space = is_fake, Space()
        self._file: IO[bytes] | None = None

    def write(self, storage: torch.UntypedStorage, start: int, nbytes: int, device: torch.device) -> Place:
        """Write a part of a storage.

        Raises:
            OSError: there is no folder for it, the disk is full, or it fails.
        """
        place = Place(self, self._space, self._space.take(nbytes) or 0, nbytes)
        if not self.is_fake:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0, dir=folder())  # noqa: SIM115 - it outlives this call
            self._file.seek(place.offset)
            for piece in _pieces(_over(storage, start, nbytes, device)):
                _write_all(self._file, _bytes_of(piece.cpu()))
        return place

    def read(self, place: Place, into: Tensor) -> None:
        """Read back what was written.

        Raises:
            RuntimeError: the disk fails; the step cannot go on.
        """
        if self._file is None:
            return
        try:
            self._file.seek(place.offset)
            for piece in _pieces(into):
                host = piece if piece.device.type == "cpu" else torch.empty_like(piece, device="cpu")
                _read_all(self._file, _bytes_of(host))
                if host is not piece:
                    piece.copy_(host)
        except OSError as error:
            raise RuntimeError(
                f"MemGuard cannot read {place.nbytes} bytes of saved activations back from its temporary file in "
                f"{folder()}, and the backward pass needs them: {error}"
            ) from error

    def land(self) -> None:
        """Wait for nothing: what is written is written."""


def folder() -> Path:
    """Return the folder of temporary files, or another one if it is in memory.

    Raises:
        FileNotFoundError: all known ones are in memory, or cannot be written to.
    """
    candidates = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]  # noqa: S108 - a file without a name
    found = next((each for each in candidates if os.access(each, os.W_OK) and not in_memory(each)), None)
    if found is None:
        names = ", ".join(map(str, candidates))
        raise FileNotFoundError(f"each of {names} is in memory or cannot be written to; set TMPDIR to one on a disk")
    return found


def in_memory(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether the files of a folder take memory, as those in tmpfs do; False if the system does not say."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}" if hasattr(os, "major") else ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return False
    # man 5 proc: id parent major:minor root mount-point options [tags ...] - type source super-options
    kinds = (line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == number)
    return any(kind in _IN_MEMORY for kind in kinds)


def _pieces(whole: Tensor) -> Iterable[Tensor]:
    """Of memory of the host all at once; of other devices parts, as each needs a copy on the host."""
    return (whole,) if whole.device.type == "cpu" else whole.split(_STAGED_BYTES)


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _write_all(file: IO[bytes], view: memoryview) -> None:
    while len(view):
        view = view[file.write(view) :]


def _read_all(file: Any, view: memoryview) -> None:
    while len(view):
        count = file.readinto(view)
        if not count:
            raise OSError("the file ends before")
        view = view[count:]


# -- memory of the host


class Host:
    """Memory of the host: pinned for CUDA, in chunks that are used again.

    Args:
        device: the device of the tensors.
        most_bytes: what it may take; None for half of what the host has available.
        is_fake: it takes none: the tensors are fake.
    """

    def __init__(self, device: torch.device, most_bytes: int | None, *, is_fake: bool) -> None:
        self.is_fake = is_fake
        self._link = None if is_fake else _Link(device)
        if most_bytes is None:
            memory = available_memory()
            most_bytes = memory.free_bytes // 2 if memory else 1 << 62
        self._left_bytes = most_bytes
        self._chunks: list[tuple[Space, Tensor | None]] = []
        self._is_asynchronous = device.type == "cuda"
        self._in_flight: deque[tuple[torch.UntypedStorage, int, Any]] = deque()
        self._in_flight_bytes = 0

    def write(self, storage: torch.UntypedStorage, start: int, nbytes: int, device: torch.device) -> Place | None:
        """Copy a part of a storage; None if there is no room. The original is held until its copy is done."""
        place = self._take(nbytes)
        if place is None:
            return None
        done = self._link.out(_over(storage, start, nbytes, device), _part(place)) if self._link is not None else None
        if self._is_asynchronous:
            self._in_flight.append((storage, nbytes, done))
            self._in_flight_bytes += nbytes
            while len(self._in_flight) > 1 and self._in_flight_bytes > _IN_FLIGHT_BYTES:
                self._land_one()
        return place

    def read(self, place: Place, into: Tensor) -> None:
        """Copy back what was copied."""
        if self._link is not None:
            self._link.back(_part(place), into)

    def land(self) -> None:
        """Hold no original any longer: the device waits for its copies before it does anything else."""
        while self._in_flight:
            self._land_one()

    def _land_one(self) -> None:
        storage, nbytes, done = self._in_flight.popleft()
        self._in_flight_bytes -= nbytes
        if self._link is not None:
            self._link.wait(done)
        del storage  # from here on the device may use its memory again

    def _take(self, nbytes: int) -> Place | None:
        for space, memory in self._chunks:
            offset = space.take(nbytes)
            if offset is not None:
                return Place(self, space, offset, nbytes, memory)
        # PyTorch pins powers of two (CachingHostAllocator.h).
        size = max(_CHUNK_BYTES, 1 << (nbytes - 1).bit_length())
        if size > self._left_bytes:
            return None
        self._chunks.append((Space(size), self._link.memory(size) if self._link is not None else None))
        self._left_bytes -= size
        return self._take(nbytes)


class _Link:
    """Copies between a device and the host: of CUDA on a stream of their own, in order, so that memory of the host is
    never written before it was read; of other devices at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def memory(self, nbytes: int) -> Tensor:
        if self.stream is not None:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError:  # the system pins no more: copies from such memory wait
                pass
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def out(self, source: Tensor, host: Tensor) -> Any:
        if self.stream is None:
            host.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def back(self, host: Tensor, into: Tensor) -> None:
        if self.stream is None:
            into.copy_(host)
            return
        compute = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(compute)  # its memory may be in use until now
        with torch.cuda.stream(self.stream):
            into.copy_(host, non_blocking=True)
        compute.wait_stream(self.stream)

    def wait(self, done: Any) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(done)


def _over(storage: torch.UntypedStorage, start: int, nbytes: int, device: torch.device) -> Tensor:
    """The bytes of a storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, start, (nbytes,), (1,))  # type: ignore[call-overload, no-any-return]


def _part(place: Place) -> Tensor:
    assert place.memory is not None
    return place.memory[place.offset : place.offset + place.nbytes]
