"""How much memory one source reports for a device; and the host's, within the limits of control groups and the process.

Sources may fail: a driver, a library or a file can be missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil

_P = ParamSpec("_P")
_T = TypeVar("_T")
_NO_LIMIT_BYTES = 1 << 60  # control groups v1 write "no limit" as the largest multiple of a page below 2**63


@dataclass(frozen=True)
class MemoryInfo:
    """Report of one source on a device, in bytes.

    ``used_bytes`` is the memory of processes, without the driver's own, and ``own_bytes`` that of this process on its
    GPU, with CUDA's context; None if the source does not report it.
    """

    total_bytes: int
    free_bytes: int
    source: str
    used_bytes: int | None = None
    own_bytes: int | None = None


def least_free(infos: Iterable[MemoryInfo | None]) -> MemoryInfo | None:
    """The one with the least free memory; None if no source answered."""
    return min((info for info in infos if info), key=lambda info: info.free_bytes, default=None)


def or_none(ask: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
    """Call a source; None if it fails: no library, no driver, no permission, or not supported on this device."""
    try:
        return ask(*args, **kwargs)
    except Exception:  # noqa: BLE001 - drivers raise errors of any type, and none of them may stop a training
        return None


# -- the host


def available_memory() -> MemoryInfo | None:
    """The least that the host, control groups and the process's own limits leave; None if none can be read."""
    return least_free((or_none(host_memory), or_none(cgroup_memory), or_none(rlimit_memory)))


def host_memory() -> MemoryInfo:
    """Read what the host has available: free memory, and caches that it can drop."""
    memory = psutil.virtual_memory()
    return MemoryInfo(memory.total, memory.available, "host")


@functools.cache
def host_bytes() -> int:
    """The host's memory, which does not change."""
    return host_memory().total_bytes


def cgroup_memory(root: Path = Path("/")) -> MemoryInfo | None:
    """Read what the process's control group leaves it: the least of all groups up to the root; None without a limit.

    ``root`` is the folder of ``proc`` and the mount points.
    """
    return least_free(map(_group_memory, _group_folders(root)))


def _group_folders(root: Path) -> Iterator[Path]:
    """The folders of the process's memory groups, v1 and v2, each with those above it."""
    lines = (root / "proc/self/cgroup").read_text().splitlines()
    groups = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    for mounted, mount_point, names in _group_mounts(root):
        path = next((path for key, path in groups.items() if names in key.split(",")), None)
        if path is not None:
            top = root / mount_point.lstrip("/")
            folder = top / _below(path, mounted)
            yield from (at for at in (folder, *folder.parents) if at.is_relative_to(top))


def _group_mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the mounted subtree, the mount point and the name in /proc of each hierarchy that holds memory groups."""
    # man 5 proc: id parent major:minor root mount-point options [tags ...] - type source super-options
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        mounted, mount_point = left.split()[3:5]
        kind, *_, options = right.split()
        if kind == "cgroup2":
            yield mounted, mount_point, ""
        elif kind == "cgroup" and "memory" in options.split(","):
            yield mounted, mount_point, "memory"


def _below(path: str, mounted: str) -> str:
    """``path`` relative to what is mounted; a container's own group may be all that is mounted."""
    prefix = mounted.rstrip("/")
    inside = path == mounted or path.startswith(f"{prefix}/")
    return path[len(prefix) :].lstrip("/") if inside and ".." not in path.split("/") else ""


def _group_memory(folder: Path) -> MemoryInfo | None:
    """One group's limit less its use. Page cache that is inactive is dropped at need, so it does not count as used."""
    # Above memory.high a group is slowed down until it hardly runs; above the others it is killed.
    limit = _least_number(folder, "memory.max", "memory.high", "memory.limit_in_bytes")
    use = _least_number(folder, "memory.current", "memory.usage_in_bytes")
    if limit is None or use is None or limit >= _NO_LIMIT_BYTES:
        return None
    stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    # v1 sums up the groups below under `total_...`; v2 does so everywhere (kernel.org: cgroup-v1/memory.rst 5.2).
    droppable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return MemoryInfo(limit, max(0, limit - max(0, use - droppable)), "cgroup")


def _least_number(folder: Path, *names: str) -> int | None:
    """The least of the numbers in these files; a file may be missing, or contain ``max``."""
    texts = (_text(folder / name).strip() for name in names)
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def rlimit_memory(process: Path = Path("/proc/self")) -> MemoryInfo | None:
    """Read what the process's own limits leave it (``ulimit -v``, ``ulimit -d``); None without a limit, or off Linux.

    ``process`` is its folder in ``/proc``.
    """
    import resource

    status = status_bytes(process)
    memories = []
    for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):  # man 2 setrlimit
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            memories.append(MemoryInfo(limit, max(0, limit - status[used]), "rlimit"))
    return least_free(memories)


def status_bytes(process: Path) -> dict[str, int]:
    """The sizes in a process's status file, in bytes."""
    fields = (line.split() for line in (process / "status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if words[2:] == ["kB"]}
