"""Where saved tensors go: memory of the host, or a temporary file; and how their bytes get there and back.

With fake tensors nothing goes anywhere and all else runs as it is, so a capture allocates and frees on the device what
the step does.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import tempfile
from collections import deque
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_memguard.core.device.host import available_memory
from lightning_memguard.core.isolation.pool import in_child
from lightning_memguard.training.offload.space import ROUND_BYTES, Space
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


def laid_over(
    storage: torch.UntypedStorage,
    device: torch.device,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...] = (1,),
) -> Tensor:
    """Return a tensor over the memory of a storage."""
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, stride)


# -- a file


class File:
    """An unlinked temporary file: it is gone with this object, however the process ends.

    Args:
        is_fake: nothing is written: the tensors are fake.
    """

    def __init__(self, *, is_fake: bool) -> None:
        self.is_fake, self._space = is_fake, Space()
        self._file: IO[bytes] | None = None

    def write(self, storage: torch.UntypedStorage, device: torch.device) -> Place:
        """Write a storage.

        Raises:
            OSError: there is no folder for it, the disk is full, or it fails.
        """
        nbytes = storage.nbytes()
        place = Place(self, self._space, self._space.take(nbytes) or 0, nbytes)
        if not self.is_fake:
            if self._file is None:  # a child that captures may write no file: its memory is watched, not saved
                made = io.BytesIO() if in_child() else tempfile.TemporaryFile(buffering=0, dir=folder())  # noqa: SIM115
                self._file = made
            self._file.seek(place.offset)
            if device.type == "cpu":
                _write_all(self._file, storage.data_ptr(), nbytes)
            else:
                for piece in laid_over(storage, device, torch.uint8, 0, (nbytes,)).split(_STAGED_BYTES):
                    host = piece.cpu()
                    _write_all(self._file, host.data_ptr(), host.nbytes)
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
            for piece in (into,) if into.device.type == "cpu" else into.split(_STAGED_BYTES):
                host = torch.empty_like(piece, device="cpu") if piece is not into else into
                _read_all(self._file, host.data_ptr(), host.nbytes)
                if host is not into:
                    piece.copy_(host)
        except OSError as error:
            raise RuntimeError(
                f"MemGuard cannot read {place.nbytes} bytes of saved activations back from its temporary file, and the "
                f"backward pass needs them: {error}"
            ) from error


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
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return False
    # man 5 proc: id parent major:minor root mount-point options [tags ...] - type source super-options
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(line.split()[2] == number and line.partition(" - ")[2].split()[0] in _IN_MEMORY for line in lines)


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _write_all(file: IO[bytes], address: int, nbytes: int) -> None:
    while nbytes:
        count = file.write(_memory(address, nbytes))
        address, nbytes = address + count, nbytes - count


def _read_all(file: Any, address: int, nbytes: int) -> None:
    while nbytes:
        count = file.readinto(_memory(address, nbytes))
        if not count:
            raise OSError("it ends too early")
        address, nbytes = address + count, nbytes - count


# -- memory of the host


class Host:
    """Memory of the host: pinned for CUDA, in chunks that are used again.

    Args:
        device: the device of the tensors.
        most_bytes: what it may take; None for half of what the host has available.
        is_fake: it takes none: the tensors are fake.
    """

    def __init__(self, device: torch.device, most_bytes: int | None, *, is_fake: bool) -> None:
        self._link = None if is_fake else _Link(device)
        if most_bytes is None:
            memory = available_memory()
            most_bytes = memory.free_bytes // 2 if memory else 1 << 62
        self._left_bytes = most_bytes
        self._chunks: list[tuple[Space, Tensor | None]] = []
        self._is_asynchronous = device.type == "cuda"
        self._in_flight: deque[tuple[torch.UntypedStorage, Any]] = deque()
        self._in_flight_bytes = 0

    def write(self, storage: torch.UntypedStorage, device: torch.device) -> Place | None:
        """Copy a storage, which is held until the copy is done; None if there is no room."""
        nbytes = storage.nbytes()
        place = self._take(nbytes)
        if place is None:
            return None
        done = None
        if self._link is not None:
            done = self._link.out(laid_over(storage, device, torch.uint8, 0, (nbytes,)), _part(place))
        if self._is_asynchronous:
            self._in_flight.append((storage, done))
            self._in_flight_bytes += nbytes
            while len(self._in_flight) > 1 and self._in_flight_bytes > _IN_FLIGHT_BYTES:
                self._land_one()
        return place

    def read(self, place: Place, into: Tensor) -> None:
        """Copy back what was copied."""
        self.land()
        if self._link is not None:
            self._link.back(_part(place), into)

    def land(self) -> None:
        """Hold no original any longer: the device waits for its copies before it does anything else."""
        while self._in_flight:
            self._land_one()

    def _land_one(self) -> None:
        storage, done = self._in_flight.popleft()
        self._in_flight_bytes -= storage.nbytes()
        if done is not None:
            stream, event = done
            stream.wait_event(event)  # from here on it may use the memory again

    def _take(self, nbytes: int) -> Place | None:
        for space, memory in self._chunks:
            offset = space.take(nbytes)
            if offset is not None:
                return Place(self, space, offset, nbytes, memory)
        size = 1 << (max(nbytes, ROUND_BYTES) - 1).bit_length()  # PyTorch pins powers of two (CachingHostAllocator.h)
        size = max(size, _CHUNK_BYTES if self._left_bytes >= _CHUNK_BYTES else 0)
        if size > self._left_bytes:
            return None
        self._chunks.append((Space(size), self._link.memory(size) if self._link is not None else None))
        self._left_bytes -= size
        return self._take(nbytes)


class _Link:
    """Copies between a device and the host: of CUDA on a stream of their own, of other devices at once.

    They run in order, so that memory of the host is not written before it was read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def memory(self, nbytes: int) -> Tensor:
        if self.stream is not None:
            with contextlib.suppress(RuntimeError):  # the system pins no more: copies from other memory wait
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def out(self, source: Tensor, host: Tensor) -> Any:
        """Return the stream that the memory of ``source`` goes back to, and the event after which it may."""
        if self.stream is None:
            host.copy_(source)
            return None
        compute = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            host.copy_(source, non_blocking=True)
            return compute, self.stream.record_event()

    def back(self, host: Tensor, into: Tensor) -> None:
        if self.stream is None:
            into.copy_(host)
            return
        compute = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(compute)  # what used the memory of ``into`` before may still run
        with torch.cuda.stream(self.stream):
            into.copy_(host, non_blocking=True)
        compute.wait_stream(self.stream)


def _part(place: Place) -> Tensor:
    assert place.memory is not None
    return place.memory[place.offset : place.offset + place.nbytes]
