"""A child changes nothing outside of itself: no file, no memory that is shared, no other process."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_memguard.core.isolation import child as child_module
from lightning_memguard.core.isolation.pool import Answer, Children
from tests.forks import run_program

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
LIBC = ctypes.CDLL(None, use_errno=True)
HAS_LANDLOCK = sys.platform.startswith("linux") and LIBC.syscall(444, None, ctypes.c_size_t(0), 1) >= 3
NEEDS_LANDLOCK = pytest.mark.skipif(not HAS_LANDLOCK, reason="this kernel cannot refuse what code in C writes")
NEEDS_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone tells what is mapped")


def in_child(work: Callable[[], Any]) -> Answer[Any]:
    with Children[int, Any](lambda _: work(), most=1) as pool:
        return pool.answer(0)


# -- files by name


def sqlite_row(folder: Path) -> None:
    with sqlite3.connect(folder / "rows.db") as connection:
        connection.execute("INSERT INTO rows VALUES (2)")


def c_write(folder: Path) -> None:
    LIBC.fopen.restype = ctypes.c_void_p
    file = LIBC.fopen(str(folder / "old.txt").encode(), b"w")
    if file:
        LIBC.fclose(ctypes.c_void_p(file))


def memory_map(folder: Path) -> None:
    numbers = np.memmap(folder / "numbers.bin", np.int64, "r+")
    numbers[0] = 7
    numbers.flush()


def descriptor_write(folder: Path) -> None:
    descriptor = os.open(folder / "new.txt", os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, b"x")
    os.close(descriptor)


def encoded(folder: Path, name: str = "old.txt") -> bytes:
    return str(folder / name).encode()


IN_PYTHON: dict[str, Callable[[Path], object]] = {
    "write": lambda folder: (folder / "old.txt").write_text("changed"),
    "append": lambda folder: print("more", file=(folder / "old.txt").open("a"), flush=True),
    "exclusive": lambda folder: (folder / "new.txt").open("x").close(),
    "update": lambda folder: (folder / "old.txt").open("r+").write("changed"),
    "descriptor": descriptor_write,
    "truncate": lambda folder: os.truncate(folder / "old.txt", 1),
    "mkdir": lambda folder: (folder / "new").mkdir(),
    "makedirs": lambda folder: (folder / "a" / "b").mkdir(parents=True),
    "rename": lambda folder: (folder / "old.txt").rename(folder / "new.txt"),
    "remove": lambda folder: (folder / "old.txt").unlink(),
    "rmtree": lambda folder: shutil.rmtree(folder / "full"),
    "symlink": lambda folder: (folder / "new").symlink_to(folder / "old.txt"),
    "copy": lambda folder: shutil.copy(folder / "old.txt", folder / "new.txt"),
    "chmod": lambda folder: (folder / "old.txt").chmod(0o600),
    "touch": lambda folder: os.utime(folder / "old.txt", (1, 1)),
    "numpy.save": lambda folder: np.save(folder / "new.npy", np.zeros(3)),
    "memmap": memory_map,
}
IN_C: dict[str, Callable[[Path], object]] = {
    "torch.save": lambda folder: torch.save(torch.zeros(3), folder / "new.pt"),
    "sqlite3": sqlite_row,
    "fopen": c_write,
    "open": lambda folder: LIBC.open(encoded(folder, "new"), os.O_CREAT | os.O_WRONLY, 0o644),
    "unlink": lambda folder: LIBC.unlink(encoded(folder)),
    "rename": lambda folder: LIBC.rename(encoded(folder), encoded(folder, "new")),
    "mkdir": lambda folder: LIBC.mkdir(encoded(folder, "new"), 0o755),
    "truncate": lambda folder: LIBC.truncate(encoded(folder), ctypes.c_long(1)),
    "another program": lambda folder: subprocess.run(["rm", folder / "old.txt"], check=False, capture_output=True),
}


def files(folder: Path) -> Any:
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_size, status.st_mtime_ns, content)
    return found


def folder_with_files(folder: Path) -> Path:
    (folder / "full").mkdir(parents=True)
    (folder / "full" / "one.txt").write_text("one")
    (folder / "old.txt").write_text("old")
    np.arange(4).tofile(folder / "numbers.bin")
    with sqlite3.connect(folder / "rows.db") as connection:
        connection.execute("CREATE TABLE rows (number)")
        connection.execute("INSERT INTO rows VALUES (1)")
    connection.close()
    return folder


@pytest.mark.parametrize(
    "change",
    [
        *(pytest.param(change, id=name) for name, change in IN_PYTHON.items()),
        *(pytest.param(change, id=f"c-{name}", marks=NEEDS_LANDLOCK) for name, change in IN_C.items()),
    ],
)
def test_files_stay_as_they_are(change: Callable[[Path], object], tmp_path: Path) -> None:
    folder, same = folder_with_files(tmp_path / "one"), folder_with_files(tmp_path / "two")
    before = files(folder)
    in_child(lambda: change(folder))
    assert files(folder) == before
    before = files(same)
    change(same)
    assert files(same) != before  # so that equality above means something


# -- what was open before


def test_files_that_were_open_get_what_the_parent_writes_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w") as file:
        file.write("pending,")

        def write() -> None:
            file.write("child")
            file.flush()
            os.write(file.fileno(), b"child")
            os.ftruncate(file.fileno(), 0)
            LIBC.write(file.fileno(), b"child", 5)
            LIBC.ftruncate(file.fileno(), ctypes.c_long(0))

        in_child(write)
        file.write("parent")
    assert path.read_text() == "pending,parent"


def test_an_open_database_keeps_its_rows(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "rows.db")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE rows (number)")
    connection.commit()

    def insert() -> None:
        connection.execute("INSERT INTO rows VALUES (1)")
        connection.commit()

    in_child(insert)
    assert connection.execute("SELECT count(*) FROM rows").fetchone() == (0,)
    insert()
    assert connection.execute("SELECT count(*) FROM rows").fetchone() == (1,)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_reading_moves_no_offset_of_the_parent(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("one\ntwo\nthree\n")
    with path.open("rb", buffering=0) as file:
        assert file.readline() == b"one\n"
        answer = in_child(file.readline)
        assert answer.value == b"two\n"  # it reads on from where the parent is
        assert file.readline() == b"two\n"


def test_standard_output_gets_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def print_everywhere() -> None:
        print("python")
        print("python", file=sys.stderr)
        os.write(1, b"descriptor")
        LIBC.puts(b"c")
        LIBC.fflush(None)
        subprocess.run(["echo", "program"], check=False)
        warnings.warn("warning", stacklevel=1)
        logging.getLogger("some").critical("logged")

    assert in_child(print_everywhere) == Answer()
    assert capfd.readouterr() == ("", "")


def test_pipes_and_sockets_of_the_parent_get_nothing() -> None:
    mine, theirs = socket.socketpair()
    readable, writable = os.pipe()
    os.write(writable, b"for the parent")

    def speak() -> bytes:
        for send in (
            lambda: theirs.send(b"x"),
            lambda: os.write(writable, b"x"),
            lambda: LIBC.write(writable, b"x", 1),
        ):
            with contextlib.suppress(OSError):
                send()
        return os.read(readable, 100)

    assert in_child(speak).value == b""
    mine.setblocking(False)
    with pytest.raises(BlockingIOError):
        mine.recv(1)
    assert os.read(readable, 100) == b"for the parent"
    for end in (mine, theirs):
        end.close()
    for descriptor in (readable, writable):
        os.close(descriptor)


@NEEDS_LANDLOCK
def test_no_connection_can_be_made() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        address = server.getsockname()
        if LIBC.syscall(444, None, ctypes.c_size_t(0), 1) < 4:
            pytest.skip("this kernel cannot refuse connections")
        answer = in_child(lambda: socket.create_connection(address, timeout=1).send(b"x"))
        assert answer.lost.startswith("PermissionError")
        with pytest.raises(TimeoutError):
            server.accept()


# -- memory


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[mmap.mmap]:
    path = tmp_path / "mapped.bin"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192) as memory:
        yield memory


@NEEDS_LINUX
def test_memory_that_is_shared_stays_as_it_is(mapped: mmap.mmap) -> None:
    number = multiprocessing.get_context("fork").Value("i", 1)
    tensor = torch.ones(1000).share_memory_()
    anonymous = mmap.mmap(-1, 4096)
    anonymous[0] = 1
    mapped[0] = 1

    def write() -> tuple[int, float, int, int]:
        before = number.value, tensor[0].item(), anonymous[0], mapped[0]
        number.value, anonymous[0], mapped[0] = 2, 2, 2
        tensor.fill_(2)
        mapped.flush()
        assert (number.value, tensor[0].item(), anonymous[0], mapped[0]) == (2, 2, 2, 2)
        return before

    assert in_child(write).value == (1, 1, 1, 1)
    assert (number.value, tensor[0].item(), anonymous[0], mapped[0]) == (1, 1, 1, 1)
    anonymous.close()


@NEEDS_LINUX
def test_large_memory_that_is_shared_can_only_be_read(mapped: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "_MOST_COPIED", 4096)
    mapped[0] = 1
    assert in_child(lambda: mapped[0]).value == 1
    assert in_child(lambda: mapped.write(b"2")) == Answer(lost="it was ended by SIGSEGV")
    assert mapped[0] == 1


def test_ordinary_memory_and_random_state_are_as_in_the_parent() -> None:
    counted: list[int] = []
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)

    def draw() -> tuple[float, float, float]:
        counted.append(1)
        return random.random(), float(np.random.rand()), torch.rand(()).item()

    first = in_child(draw).value
    assert counted == []
    assert draw() == first
    assert counted == [1]


@NEEDS_LINUX
def test_gigabytes_are_refused_and_not_taken() -> None:
    answer = in_child(lambda: bytearray(50 << 30))
    assert answer.lost.startswith("MemoryError")
    assert "allocate" in in_child(lambda: torch.zeros(50 << 30, dtype=torch.uint8).sum()).lost


# -- processes


@pytest.mark.parametrize(
    "kill",
    [
        lambda: os.kill(os.getppid(), signal.SIGUSR1),
        pytest.param(lambda: LIBC.kill(os.getppid(), signal.SIGUSR1), marks=NEEDS_LANDLOCK),
    ],
    ids=["python", "c"],
)
def test_the_parent_gets_no_signal(kill: Callable[[], object]) -> None:
    if HAS_LANDLOCK and LIBC.syscall(444, None, ctypes.c_size_t(0), 1) < 6:
        pytest.skip("this kernel cannot refuse signals")
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    try:
        in_child(kill)
        time.sleep(0.05)
        assert got == []
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_from_the_keyboard_is_the_parents() -> None:
    """A terminal sends it to both."""

    def interrupt_itself() -> int:
        LIBC.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        return 1

    assert in_child(interrupt_itself).value == 1


@NEEDS_LINUX
@pytest.mark.parametrize("trusted", [False, True], ids=["child", "grandchild"])
def test_the_end_of_the_parent_is_the_end_of_its_children(trusted: bool, tmp_path: Path) -> None:
    script = f"""
import os, sys, time
from lightning_memguard.core.isolation.pool import Children

def endless(_):
    LIST.write(str(os.getpid()).encode())
    while True:
        pass

def nested(_):
    with Children(endless, most=1) as inner:
        return inner.answer(0)

LIST = open({str(tmp_path / "pids")!r}, "wb", buffering=0)
import lightning_memguard.core.isolation.child as child
child._replace_descriptors = child._divert_writes = child._forbid_writes = child._limit = lambda *_, **__: None
with Children(nested if {trusted} else endless, most=1, trusted={trusted}) as pool:
    pool.start(0)
    while not os.path.getsize({str(tmp_path / "pids")!r}):
        time.sleep(0.01)
    os._exit(0)
"""
    run_program(script, tmp_path)
    process = int((tmp_path / "pids").read_text())
    deadline = time.monotonic() + 10
    while is_running(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(process)


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"  # whoever adopted it may not have waited for it


# -- what is read


def test_a_file_that_is_read_and_written_is_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "both"
    path.write_bytes(b"abcdef")
    with path.open("r+b", buffering=0) as file:
        file.seek(2)

        def read_and_write() -> bytes:
            read: bytes = file.read(2)
            file.write(b"X")
            file.seek(0)
            return read + file.read()

        answer = in_child(read_and_write)
        assert (file.tell(), path.read_bytes()) == (2, b"abcdef")
    assert answer.value == (b"cdabcdXf" if sys.platform.startswith("linux") else answer.value)


def test_an_open_database_can_be_read(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "rows.db")
    connection.executescript("CREATE TABLE rows (number); INSERT INTO rows VALUES (1), (2), (3)")
    rows = connection.execute("SELECT number FROM rows")
    next(rows)
    assert in_child(lambda: [number for (number,) in rows]).value == [2, 3]
    assert [number for (number,) in rows] == [2, 3]


@pytest.mark.parametrize("reaches_out", [False, True])
def test_no_service_of_this_machine_is_called(tmp_path: Path, reaches_out: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
        named.bind(str(tmp_path / "socket"))
        named.listen()
        addresses = server.getsockname(), named.getsockname()
        families = socket.AF_INET, socket.AF_UNIX

        def connect(place: int) -> None:
            socket.socket(families[place]).connect(addresses[place])

        with Children[int, None](connect, most=1, reaches_out=reaches_out) as pool:
            assert all(pool.answer(place).lost.startswith("PermissionError") for place in (0, 1))
        connect(0)


def test_a_child_that_reaches_out_writes_new_files_and_leaves_others(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("old")

    def write(_: int) -> str:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "part").write_text("new")
        (tmp_path / "cache" / "part").rename(tmp_path / "cache" / "whole")
        (tmp_path / "old.txt").write_text("changed")
        (tmp_path / "old.txt").unlink()
        (tmp_path / "cache" / "whole").replace(tmp_path / "old.txt")
        return (tmp_path / "cache" / "whole").read_text()

    with Children[int, str](write, most=1, reaches_out=True) as pool:
        assert pool.answer(0).value == "new"
    assert (tmp_path / "old.txt").read_text() == "old"
    assert (tmp_path / "cache" / "whole").read_text() == "new"


def test_a_child_that_reaches_out_only_reads_databases(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "rows.db")
    connection.executescript("CREATE TABLE rows (number); INSERT INTO rows VALUES (1), (2)")

    def take(again: int) -> list[int]:
        taken = sqlite3.connect(tmp_path / "rows.db") if again else connection
        rows = taken.execute("SELECT number FROM rows").fetchall()
        with contextlib.suppress(sqlite3.OperationalError), taken:
            taken.execute("DELETE FROM rows")
        return [number for (number,) in rows]

    with Children[int, list[int]](take, most=1, reaches_out=True) as pool:
        pool.answer(0)
        assert pool.answer(1).value == [1, 2]
    assert connection.execute("SELECT number FROM rows").fetchall() == [(1,), (2,)]
    assert {path.name for path in tmp_path.iterdir()} == {"rows.db"}


def test_a_child_that_reaches_out_signals_no_other_process() -> None:
    received = list[int]()
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        parent = os.getpid()
        with Children[int, None](lambda _: os.kill(parent, signal.SIGUSR1), most=1, reaches_out=True) as pool:
            assert pool.answer(0) == Answer(None)
        time.sleep(0.05)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == []
