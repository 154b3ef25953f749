"""The first thing a forked child does: cut itself off, so that nothing it does reaches a file or another process.

What it does in memory ends with it anyway. Here the rest is cut off: descriptors that it shares with its parent, memory
that both have mapped, files and processes that it might name.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import gc
import io
import logging
import os
import pathlib
import resource
import signal
import socket
import stat
import struct
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

_LINUX = sys.platform.startswith("linux")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MOST_COPIED = 64 << 20  # bytes of shared memory that are worth a copy
_MEMORY_DEVICES = 1  # the major number of /dev/null, /dev/zero, /dev/urandom (man 4 null)
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38  # linux/prctl.h
_CLOCK_REALTIME_COARSE = 5  # linux/time.h: moves by ticks of some milliseconds
_NAMED = """
    chmod chown fchmod fchown ftruncate lchown link mkdir mkfifo mknod remove rename replace rmdir symlink
    truncate unlink utime
""".split()  # noqa: SIM905 - the formatter would put each name on a line of its own
_PATHS = {"link": 2, "rename": 2, "replace": 2, "symlink": 2}  # how many of its arguments are; of the others, one


def cut_off(parent: int, keep: Collection[int], memory_bytes: int | None, *, reaches_out: bool = False) -> None:
    """Keep what runs next from changing anything outside of this process.

    Args:
        parent: the process that forked this one, and whose end is its end.
        keep: descriptors that stay as they are.
        memory_bytes: what it may take on top of what it has; None for no limit.
        reaches_out: whether it may write new files and connect to other machines, as to read what is cached or stored
            there. Files that exist, and services of this machine, stay as they are.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the parent, which ends this process
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # and with it the processes that it starts
    gc.freeze()  # the parent's objects are not searched for garbage, which would copy them
    tracemalloc.stop()  # it would note each of the many objects that a capture makes, ten times as slowly
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    if _LINUX:
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        _unshare_memory()
    _replace_descriptors(keep, copied=not reaches_out)
    _divert_writes(new_too=not reaches_out)
    _refuse_connections(remote_too=not reaches_out)
    if reaches_out:
        _only_read_databases()
    is_restricted = _LINUX and _forbid_writes(new_too=not reaches_out)
    _limit(memory_bytes, may_write=is_restricted or reaches_out)


def _limit(memory_bytes: int | None, *, may_write: bool) -> None:
    limits = {resource.RLIMIT_CORE: 0} | ({} if may_write else {resource.RLIMIT_FSIZE: 0})
    if memory_bytes is not None and _LINUX:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory_bytes
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


# -- descriptors


def _replace_descriptors(keep: Collection[int], *, copied: bool) -> None:
    """Open files that are read again, with offsets of their own; lead all others to the null device.

    If they are to be ``copied``, a file that is read and written, as a database is, becomes a copy of its own, and a
    large one can only be read.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for path in list(Path("/proc/self/fd" if _LINUX else "/dev/fd").iterdir()):
        descriptor = int(path.name)
        if descriptor not in keep and descriptor != null:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
                _replace(descriptor, null, copied=copied)
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - a notebook's would go another way
    sys.stderr = sys.stdout


def _replace(descriptor: int, null: int, *, copied: bool) -> None:
    import fcntl

    status = os.fstat(descriptor)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    access = flags & os.O_ACCMODE
    reads = access == os.O_RDONLY or (access == os.O_RDWR and copied and not flags & os.O_APPEND)
    if stat.S_ISDIR(status.st_mode) or (stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == _MEMORY_DEVICES):
        return
    if reads and stat.S_ISREG(status.st_mode):
        with contextlib.suppress(OSError):
            is_copied = _LINUX and access == os.O_RDWR and status.st_size <= _MOST_COPIED
            again = _copy_of(descriptor, status.st_size) if is_copied else os.open(_path_of(descriptor), os.O_RDONLY)
            os.lseek(again, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(again, descriptor)
            os.close(again)
            return
    os.dup2(null, descriptor)


def _copy_of(descriptor: int, nbytes: int) -> int:
    copied = os.memfd_create("memguard")
    os.write(copied, os.pread(descriptor, nbytes, 0))
    return copied


def _path_of(descriptor: int) -> str | bytes:
    import fcntl

    if _LINUX:
        return f"/proc/self/fd/{descriptor}"
    path: bytes = fcntl.fcntl(descriptor, getattr(fcntl, "F_GETPATH", 50), bytes(1024))  # macOS, man 2 fcntl
    return path.rstrip(b"\0")


# -- memory that is mapped here and in other processes


def _unshare_memory() -> None:
    """Make shared memory private: a copy of what is small; what is large can only be read."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, _, *path = line.split(maxsplit=5)
        name = path[0] if path else ""
        device = name.startswith(("/dev/", "anon_inode:")) and not name.startswith(("/dev/shm", "/dev/zero"))  # noqa: S108
        if access.startswith("rw") and access.endswith("s") and not device:
            start, end = (int(part, 16) for part in place.split("-"))
            _unshare(start, end - start)


def _unshare(start: int, nbytes: int) -> None:
    import mmap

    libc = _libc()
    if nbytes > _MOST_COPIED:
        libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.PROT_READ)
        return
    content = ctypes.string_at(start, nbytes)
    fixed, access = 0x10, mmap.PROT_READ | mmap.PROT_WRITE  # MAP_FIXED in linux/mman.h
    flags = fixed | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    libc.mmap.restype = ctypes.c_void_p
    placed = libc.mmap(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), access, flags, -1, ctypes.c_long(0))
    if placed == start:
        ctypes.memmove(start, content, nbytes)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


# -- files and processes, by name


def _divert_writes(*, new_too: bool) -> None:
    """Have Python open the null device for writing, and ignore calls that make, move, remove or signal something.

    Unless new files are meant ``too``, those are written that did not exist when this was called.
    """
    open_file: Any = io.open
    open_descriptor: Any = os.open
    is_ours = _made_since(_next_tick()) if not new_too else lambda _: False

    def open_(file: object, mode: str = "r", *args: object, opener: object = None, **kwargs: object) -> Any:
        if isinstance(file, int) or not {*mode} & {*"wax+"} or is_ours(file):
            return open_file(file, mode, *args, opener=opener, **kwargs)
        return open_file(os.devnull, mode.replace("x", "w"), *args, **kwargs)

    def os_open(path: object, flags: int, *args: object, **kwargs: object) -> Any:
        if flags & _WRITES and not is_ours(path):
            return open_descriptor(os.devnull, os.O_RDWR)
        return open_descriptor(path, flags, *args, **kwargs)

    def of_ours(function: Any, paths: int) -> Any:
        return lambda *args, **how: function(*args, **how) if args and all(map(is_ours, args[:paths])) else None

    builtins.open = io.open = open_
    os.open = os_open
    for home in (os, getattr(pathlib, "_NormalAccessor", None)):  # where Python 3.10's paths keep the same functions
        for name in _NAMED:
            if hasattr(home, name):
                setattr(home, name, of_ours(getattr(home, name), _PATHS.get(name, 1)))
        for name in ("kill", "killpg"):
            if hasattr(home, name):
                setattr(home, name, lambda *_, **__: None)


def _next_tick() -> int:
    """Wait until the clock that dates files has moved on, and read it: files that were there have earlier dates."""
    if not _LINUX:
        return time.time_ns()
    before = now = time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
    while now == before:
        time.sleep(0.001)
        now = time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
    return now


def _made_since(begun: int) -> Callable[[object], bool]:
    """Return a function that says whether a path is of this process's own making, or is still to be made."""
    status_of = os.stat

    def is_ours(path: Any) -> bool:
        try:
            return status_of(path).st_ctime_ns >= begun
        except (OSError, TypeError, ValueError):
            return isinstance(path, (str, bytes, os.PathLike))

    return is_ours


def _refuse_connections(*, remote_too: bool) -> None:
    """Have Python's sockets refuse to connect to services of this machine, whose state would move; or to any."""

    def refusing(connect: Any) -> Any:
        def call(self: socket.socket, address: Any) -> Any:
            host = str(address[0]) if isinstance(address, tuple) and address else ""
            if remote_too or not host or host == "localhost" or host.startswith(("127.", "::", "0.")):
                raise PermissionError(errno.EACCES, "MemGuard lets a copy of this process connect to no such service")
            return connect(self, address)

        return call

    changed: Any = socket.socket
    changed.connect, changed.connect_ex = refusing(changed.connect), refusing(changed.connect_ex)


def _only_read_databases() -> None:
    """Have sqlite3 open databases to be read: its code in C would change their files."""
    try:
        import sqlite3
    except ImportError:  # a build of Python without it
        return
    from urllib.parse import quote

    connect: Any = sqlite3.connect

    def connect_to_read(database: Any, *args: Any, uri: bool = False, **kwargs: Any) -> Any:
        text = os.fsdecode(database)
        if text == ":memory:" or not text:
            return connect(database, *args, uri=uri, **kwargs)
        named = text if uri else f"file:{quote(text)}"
        return connect(f"{named}{'&' if '?' in named else '?'}mode=ro", *args, uri=True, **kwargs)

    sqlite3.connect = sqlite3.dbapi2.connect = connect_to_read


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, alike on all architectures
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # removing and making files of any kind
_BIND_AND_CONNECT, _SCOPES = 3, 3  # TCP; abstract sockets and signals to processes outside


def _forbid_writes(*, new_too: bool) -> bool:
    """Have the kernel, if it has Landlock, refuse writes, new files, connections and signals of code in C.

    Unless new files are meant ``too``, it only refuses to truncate existing ones.

    See docs.kernel.org/userspace-api/landlock.html. An older kernel refuses less, or nothing: then `RLIMIT_FSIZE` keeps
    files from growing.

    Returns:
        Whether writes are refused.
    """
    libc = _libc()
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    changes = (_CHANGES if new_too else 0) | (_TRUNCATE if version >= 3 else 0)
    wanted = struct.pack("QQQ", changes, _BIND_AND_CONNECT if new_too else 0, _SCOPES)[
        : 8 if version < 4 else 16 if version < 6 else 24
    ]
    ruleset = libc.syscall(_CREATE_RULESET, wanted, ctypes.c_size_t(len(wanted)), 0)
    if ruleset < 0:
        return False
    null = os.open(os.devnull, os.O_RDWR)
    if changes:
        allowed = struct.pack("=Qi", changes & (_WRITE_FILE | _TRUNCATE), null)
        libc.syscall(_ADD_RULE, ruleset, 1, allowed, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    failed = libc.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return not failed
