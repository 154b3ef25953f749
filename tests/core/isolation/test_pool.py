"""Whatever a child does, its pool answers; and nothing of it is left when the pool is closed."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_memguard.core.isolation import pool as pool_module
from lightning_memguard.core.isolation.pool import Answer, Children, StoppedError, beat, can_fork, in_child
from tests.forks import run_program

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def run(work: Callable[[], Any], **settings: Any) -> Answer[Any]:
    with Children[int, Any](lambda _: work(), most=1, **settings) as pool:
        return pool.answer(0)


def forever() -> None:
    while True:
        pass


def raise_(error: BaseException) -> None:
    raise error


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MOST_SECONDS", 120.0)
    monkeypatch.setattr(pool_module, "SILENT_SECONDS", 0.6)
    monkeypatch.setattr(pool_module, "BLOCKED_SECONDS", 0.5)
    monkeypatch.setattr(pool_module, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(pool_module, "_POLL_SECONDS", 0.1)


@pytest.mark.parametrize(
    ("work", "lost"),
    [
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: raise_(KeyboardInterrupt()), "KeyboardInterrupt: "),
        (lambda: os._exit(0), "it ended the process (exit code 0)"),
        (lambda: os._exit(7), "it ended the process (exit code 7)"),
        (lambda: ctypes.string_at(0), "it was ended by SIGSEGV"),
        (lambda: signal.raise_signal(signal.SIGKILL), "it was ended by SIGKILL"),
        (lambda: signal.raise_signal(signal.SIGTERM), "it was ended by SIGTERM"),
    ],
)
def test_what_ends_a_child_is_its_answer(work: Callable[[], Any], lost: str) -> None:
    assert run(work) == Answer(lost=lost)


def test_a_value_that_cannot_be_sent_is_no_end_of_the_process() -> None:
    answer = run(threading.Lock)
    assert answer.value is None
    assert "cannot pickle '_thread.lock' object" in answer.lost


def test_a_child_works_on_after_an_error() -> None:
    with Children[int, float](lambda number: (os.getpid(), 1 / number), most=1) as pool:
        assert pool.answer(0).lost.startswith("ZeroDivisionError")
        (process, value), (again, _) = pool.answer(2).value, pool.answer(3).value
    assert value == 0.5
    assert process != os.getpid()
    assert process == again


def test_another_child_takes_the_place_of_one_that_died() -> None:
    with Children[int, int](lambda number: os._exit(1) if number == 1 else number, most=1) as pool:
        pool.start(0, 1, 2, 3)
        assert [pool.answer(number).value for number in range(4)] == [0, None, 2, 3]


# -- limits of time


@pytest.mark.usefixtures("short_limits")
def test_an_endless_loop_is_given_up() -> None:
    assert run(forever).lost == "it went on for 1 s without calling an operator of torch"


@pytest.mark.usefixtures("short_limits")
def test_an_endless_loop_with_signs_of_life_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MOST_SECONDS", 1.4)

    def loop() -> None:
        while True:
            beat()

    assert run(loop) == Answer(lost="it had not ended after 1 s")


@pytest.mark.usefixtures("short_limits")
def test_long_work_with_signs_of_life_is_waited_for() -> None:
    def work() -> int:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            beat()
        return 1

    assert run(work).value == 1


@pytest.mark.usefixtures("short_limits")
def test_after_its_deadline_a_pool_keeps_what_is_known_and_begins_nothing() -> None:
    with Children[int, int](lambda number: number or forever(), most=1) as pool:
        assert pool.answer(2).value == 2
        pool.start(3, 0)
        while len(pool._answers) == 0:
            pool._wait()
        end = time.monotonic() + 0.1
        pool._deadline = lambda: end
        assert pool.answer(0).lost == "the time was up"
        assert pool.answer(3).value == 3
        assert not pool.has_children
        pool.start(1)
        assert pool.answer(1).lost == "the time was up"
        assert not pool.has_children


@pytest.mark.usefixtures("short_limits")
def test_a_child_that_is_stopped_may_answer_with_what_it_has() -> None:
    """It is told once; what it does about that is up to it, for as long as it has to answer."""

    def work(number: int) -> int:
        try:
            while True:
                beat()
        except StoppedError:
            beat()
            if number > 1:
                raise
            return number

    with Children[int, int](work, most=2) as pool:
        pool.start(0, 1)
        pool._deadline = lambda: 0.0
        assert pool.answer(1).value == 1
        assert not pool.has_children
        assert pool.answer(0).lost == "the time was up"
    with Children[int, int](work, most=1) as pool:
        pool.start(2)
        pool._deadline = lambda: 0.0
        assert pool.answer(2).lost == "the time was up"


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize("trusted", [False, True])
def test_a_lock_that_another_thread_holds_is_not_waited_for(trusted: bool) -> None:
    """In this process it will be free again; in a child, which has no other threads, never."""
    lock, held, done = threading.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    answer = run(lock.acquire, trusted=trusted)
    done.set()
    thread.join()
    assert answer.here
    assert answer.waits
    assert "for something that never came" in answer.lost


@pytest.mark.usefixtures("short_limits")
def test_a_trusted_child_takes_the_time_it_needs() -> None:
    def work() -> int:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pass
        return 1

    assert run(work, trusted=True).value == 1


def test_a_child_notes_no_objects_for_tracemalloc() -> None:
    tracemalloc.start()
    try:
        assert run(tracemalloc.is_tracing).value is False
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


def test_a_trusted_child_leaves_no_children_to_the_process_that_adopts_orphans() -> None:
    inner = Children[int, int](lambda _: os.getpid(), most=1)
    with Children[int, int](inner.ask, most=1, trusted=True) as pool:
        of_child = pool.ask(0)
    assert not psutil.pid_exists(of_child)


@pytest.mark.usefixtures("short_limits")
def test_a_trusted_child_gives_up_children_of_its_own() -> None:
    def work() -> tuple[Answer[Any], Answer[Any]]:
        with Children[int, Any](lambda number: forever() if number else time.sleep(60), most=2) as inner:
            inner.start(0, 1)
            return inner.answer(0), inner.answer(1)

    blocked, silent = run(work, trusted=True).value
    assert "for something that never came" in blocked.lost
    assert not blocked.here  # it would wait there, too
    assert silent.lost.endswith("without calling an operator of torch")


@pytest.mark.usefixtures("short_limits")
def test_a_process_that_it_left_behind_is_not_taken_for_it() -> None:
    """One that has the pipe open too, as a worker of a loader has."""

    def leave() -> None:
        if not os.fork():
            time.sleep(3)
            os._exit(0)
        os._exit(5)

    assert run(leave) == Answer(lost="it ended the process (exit code 5)")


# -- nothing is left


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()} if Path("/proc/self/fd").exists() else set()


@pytest.mark.parametrize("work", [lambda: 1, forever, lambda: os._exit(1)], ids=["idle", "busy", "ended"])
def test_nothing_is_left_when_it_is_closed(work: Callable[[], Any]) -> None:
    before, children = descriptors(), psutil.Process().children()
    with Children[int, Any](lambda _: work(), most=2) as pool:
        pool.start(0, 1, 2)
        if work is not forever:
            pool.answer(0)
    assert psutil.Process().children() == children  # a process that nobody waited for is one as well
    assert descriptors() == before


def test_nothing_is_left_of_children_of_children() -> None:
    before = psutil.Process().children(recursive=True)

    def nested(_: int) -> int:
        inner = Children[int, None](lambda _: forever(), most=2)
        inner.start(0, 1)
        return len(psutil.Process().children())

    with Children[int, int](nested, most=1, trusted=True) as pool:
        assert pool.answer(0).value == 2
    deadline = time.monotonic() + 10
    while psutil.Process().children(recursive=True) != before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert psutil.Process().children(recursive=True) == before


def test_an_interrupt_ends_the_wait_and_the_child() -> None:
    before = psutil.Process().children()
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores them
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(forever)
    finally:
        signal.signal(signal.SIGINT, interrupts)
    assert psutil.Process().children() == before


def test_an_interrupt_while_a_child_is_ended_stays_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child is not ended a second time, which would raise an error of its own."""
    end, ends = pool_module._Child.end, []

    def interrupted(child: Any) -> None:
        end(child)
        ends.append(child)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool_module._Child, "end", interrupted)
    with pytest.raises(KeyboardInterrupt), Children(os._exit) as children:
        children.answer(3)
    assert len(ends) == 1


def test_a_child_that_is_killed_from_outside_is_an_answer() -> None:
    with Children[int, int](lambda number: os.getpid() if number else time.sleep(60), most=1) as pool:
        process = pool.answer(1).value
        assert process is not None
        threading.Timer(0.2, os.kill, (process, signal.SIGKILL)).start()
        assert pool.answer(0) == Answer(lost="it was ended by SIGKILL")
        again = pool.answer(2).value
        assert again is not None
        os.kill(again, signal.SIGKILL)
        time.sleep(0.1)
        assert pool.answer(3) == Answer(lost="it was ended by SIGKILL")  # it died while it waited
        assert pool.answer(4).value


def test_a_process_that_waits_for_all_its_children_hides_no_end() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run(lambda: os._exit(3)).lost == "it ended the process"
        assert run(lambda: 3).value == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


# -- forks that fail


def no_memory() -> int:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_where_none_can_be_forked_the_same_may_be_tried_here(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    monkeypatch.setattr(os, "fork", no_memory)
    with Children[int, int](lambda number: number, most=2) as pool:
        pool.start(1, 2)
        assert pool.answer(1) == Answer(
            lost="no process could be forked ([Errno 12] Cannot allocate memory)", here=True
        )
        assert pool.answer(2).here
        assert pool.answer(3).here
    assert descriptors() == before


def test_one_child_does_all_where_no_second_can_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    with Children[int, int](lambda number: number, most=2) as pool:
        pool.start(1)
        monkeypatch.setattr(os, "fork", no_memory)
        pool.start(2, 3)
        assert [pool.answer(number).value for number in (1, 2, 3)] == [1, 2, 3]


def test_a_child_that_cannot_be_cut_off_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "cut_off", lambda *_: raise_(OSError("no /proc")))
    answer = run(lambda: 1)
    assert answer.here
    assert answer.value is None


def test_whether_this_system_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_fork()
    monkeypatch.delattr(os, "fork")
    assert not can_fork()


# -- requests and answers


def test_answers_may_be_larger_than_a_pipe() -> None:
    content = os.urandom(20 << 20)
    started = time.monotonic()
    assert run(lambda: content).value == content
    assert time.monotonic() - started < 10
    with Children[bytes, int](len, most=1) as pool:
        assert pool.answer(content).value == len(content)


def test_signs_of_life_are_no_part_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_BEAT_SECONDS", 0.0)

    def work(number: int) -> bytes:
        for _ in range(1000):
            beat()
        return bytes(number)

    with Children[int, bytes](work, most=1) as pool:
        assert [pool.answer(number).value for number in (0, 1, 100_000)] == [b"", bytes(1), bytes(100_000)]


def test_requests_are_worked_on_once_each_and_again_when_asked_again() -> None:
    counted = multiprocessing.get_context("fork").SimpleQueue()
    with Children[int, int](lambda number: -number, most=2) as pool:
        pool.start(*range(5), *range(5))
        pool.start(3)
        assert [pool.answer(number).value for number in (4, 2, 0, 1, 3)] == [-4, -2, 0, -1, -3]
        assert not pool._answers
        assert pool.answer(3).value == -3
        assert len(pool._children) == 2
    counted.close()


def test_children_work_side_by_side() -> None:
    def work(number: int) -> tuple[int, float, float]:
        started = time.monotonic()
        time.sleep(0.3)
        return os.getpid(), started, time.monotonic()

    with Children[int, Any](work, most=2) as pool:
        pool.start(0, 1)
        (one, start, end), (other, other_start, other_end) = pool.answer(0).value, pool.answer(1).value
    assert one != other
    assert max(start, other_start) < min(end, other_end)


def test_a_child_knows_that_it_is_one() -> None:
    assert not in_child()
    assert run(in_child).value is True
    assert run(in_child, trusted=True).value is False
    assert run(lambda: (run(in_child).value, in_child()), trusted=True).value == (True, False)


def test_autograd_and_many_threads_in_the_parent_do_not_stop_a_child(tmp_path: Path) -> None:
    """In a process of its own: where CUDA is simulated, autograd has threads for it and refuses a fork."""
    script = """
import torch
from lightning_memguard.core.isolation.pool import Children
def learn(threads):
    torch.set_num_threads(threads)
    x = torch.ones(300, 300, requires_grad=True)
    (x @ x).relu().sum().backward()
    return x.grad.sum().item()
here = learn(2)
with Children(learn, most=1) as pool:
    assert pool.answer(1).value == here, pool.answer(1)
"""
    run_program(script, tmp_path)


def test_a_warning_that_was_shown_is_not_shown_again_after_a_fork() -> None:
    """`warnings.catch_warnings` makes Python forget what it has shown: Lightning's warnings came with each fit."""
    registry: dict[object, object] = {}

    def warn() -> None:
        warnings.warn_explicit("once", UserWarning, "program.py", 1, registry=registry)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        filters = [*warnings.filters]
        warn()
        assert run(lambda: 1).value == 1
        warn()
        assert warnings.filters == filters
    assert len(shown) == 1


def test_a_notebooks_output_is_not_written_to(tmp_path: Path) -> None:
    """A notebook's `sys.stdout` is an object that sends text through a socket."""
    script = """
import sys
class Notebook:
    def write(self, text): raise RuntimeError(text)
    def flush(self): pass
from lightning_memguard.core.isolation.pool import Children
sys.stdout = Notebook()
with Children(lambda _: print("child"), most=1) as pool:
    assert pool.answer(0).lost == "", pool.answer(0)
"""
    run_program(script, tmp_path)


def test_what_a_child_started_ends_with_it() -> None:
    with Children[int, int](
        lambda _: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
    ) as pool:
        started = pool.answer(0).value
        assert started is not None
        assert psutil.pid_exists(started)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(started) and psutil.Process(started).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
