"""Children that work side by side: each is asked for values, one after the other, and answers with them."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import random
import signal
import warnings
from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from time import monotonic, sleep
from typing import Any, Generic, TypeVar, cast

import psutil
from typing_extensions import Self

from lightning_memguard.core.device.host import available_memory

if hasattr(os, "fork"):  # the module needs what Windows lacks, too
    from lightning_memguard.core.isolation.child import cut_off

Request = TypeVar("Request", bound=Hashable)
Value = TypeVar("Value")

MOST_SECONDS = 300.0  # for one request
SILENT_SECONDS = 30.0  # of the processor, without a sign of life: no operator that a step calls takes so long
BLOCKED_SECONDS = 10.0  # asleep, without a sign of life
STOP_SECONDS = 3.0  # for a child that is asked to stop, to answer with what it has
_END_SECONDS = 1.0  # for an idle child, to end its own
_BEAT_SECONDS = 0.5
_POLL_SECONDS = 0.2
# A child takes these from the module.
_kill, _kill_group = os.kill, getattr(os, "killpg", os.kill)


@dataclass(frozen=True)
class Answer(Generic[Value]):
    """Answer of a child: a value, or the reason why there is none.

    ``here`` means that the request may be tried in this process: the child failed, not the work in it. ``waits`` means
    that the work waited for what no copy of a process has.
    """

    value: Value | None = None
    lost: str = ""
    here: bool = False
    waits: bool = False


class StoppedError(BaseException):
    """Raised in a child that is asked to stop; no `except Exception` of the code that it runs is meant."""


class Children(Generic[Request, Value]):
    """Forked children that call a function of one argument; nothing else that it does reaches this process.

    A child is forked when it is first needed, and the function sees this process as it was then. `close` ends them.

    Args:
        work: the function; what it is given and returns is pickled.
        most: how many children work at the same time (default: one for each processor).
        begin: what each child does first.
        trusted: whether the function only does what is ours. Such a child may have children, and all the time that it
            works or waits for them.
        reaches_out: whether it may write new files and connect to other machines.
        while_waiting: called several times a second while an answer is waited for.
        deadline: returns the moment (of `time.monotonic`) at which all children are ended. Requests without an answer
            are then lost, and so are new ones; the child at the one that is waited for is asked to stop, and may reply.
    """

    def __init__(
        self,
        work: Callable[[Request], Value],
        most: int | None = None,
        *,
        begin: Callable[[], object] = lambda: None,
        trusted: bool = False,
        reaches_out: bool = False,
        while_waiting: Callable[[], object] = lambda: None,
        deadline: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._work = work
        self._deadline = deadline
        self._while_waiting = while_waiting
        self._begin = begin
        self._trusted = trusted
        self._reaches_out = reaches_out
        self._most = most or processors()
        self._children: list[_Child] = []
        self._waiting: deque[Request] = deque()
        self._answers: dict[Request, Answer[Value]] = {}
        self._most_used = 0.0

    @property
    def most_used(self) -> float:
        """Seconds of the processor that the busiest child has had."""
        self._most_used = max([self._most_used, *(child.processor_seconds() for child in self._children)])
        return self._most_used

    @property
    def has_children(self) -> bool:
        """Whether a child was forked and still lives."""
        return bool(self._children)

    @property
    def doing(self) -> str:
        """The last words that a child sent about the work that it is at."""
        return next((child.doing for child in self._children if child.is_busy), "")

    def start(self, *requests: Request) -> None:
        """Queue requests for the next free children."""
        if monotonic() > self._deadline():
            return
        working = [child.request for child in self._children if child.is_busy]
        self._waiting += (each for each in requests if each not in (*self._waiting, *working, *self._answers))
        self._hand_out()

    def ask(self, request: Request) -> Value:
        """Return what a child answers to a request; if none does, the work is done in this process."""
        answer = self.answer(request)
        return self._work(request) if answer.lost else cast("Value", answer.value)

    def answer(self, request: Request) -> Answer[Value]:
        """Wait for the answer to a request, which need not have been started; it comes before those that wait."""
        self.start(request)
        if request in self._waiting:
            self._waiting.remove(request)
            self._waiting.appendleft(request)
        while request not in self._answers:
            if monotonic() > self._deadline():
                self._stop(request)
                late = self._answers.pop(request, None)
                return late if late and not late.lost else Answer(lost="the time was up")
            self._wait()
        return self._answers.pop(request)

    def _stop(self, request: Request) -> None:
        """End the children; the one at this request has a moment to answer."""
        self._waiting.clear()
        last = [child for child in self._children if child.is_busy and child.request == request]
        self.close(but=last)
        for child in last:
            child.stop()
        until = monotonic() + STOP_SECONDS
        while self._children and request not in self._answers and monotonic() < until:
            self._wait()
        self.close()

    def close(self, but: Collection[_Child] = ()) -> None:
        """End the children, whatever they do."""
        self._waiting.clear()
        for child in [each for each in self._children if each not in but]:
            self._children.remove(child)  # each is ended once, even if Ctrl-C comes while it is waited for
            child.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hand_out(self) -> None:
        while self._waiting:
            child = next((child for child in self._children if not child.is_busy), None)
            if child is None and len(self._children) < self._most:
                child = self._fork()
            if child is None:
                return
            child.ask(self._waiting.popleft())

    def _fork(self) -> _Child | None:
        try:
            free = available_memory()
            memory_bytes = free.free_bytes // self._most if free else None
            child = _Child(self._serve, memory_bytes, trusted=self._trusted, reaches_out=self._reaches_out)
        except OSError as error:
            if not self._children:
                lost = Answer[Value](lost=str(error), here=True)
                self._answers |= dict.fromkeys(self._waiting, lost)
                self._waiting.clear()
            return None
        self._children.append(child)
        return child

    def _serve(self, requests: Connection, answers: Connection) -> None:
        self._begin()
        _serve(self._handle, requests, answers, trusted=self._trusted, reaches_out=self._reaches_out)

    def _handle(self, request: Request) -> object:
        return self._work(request)

    def _wait(self) -> None:
        busy = {child.answers: child for child in self._children if child.is_busy}
        beat()
        self._while_waiting()
        ready = wait([*busy], _POLL_SECONDS)
        for sent, child in busy.items():
            answer = (child.read() if sent in ready else None) or child.overdue()
            if answer is not None:
                self._answers[cast("Request", child.request)] = answer
                child.is_busy = bool(answer.lost)  # to the end
                if answer.lost:
                    self._children.remove(child)
                    child.end()
        self._hand_out()


class _Child:
    """One child, seen from its parent. ``request`` is what it works on, or worked on last."""

    def __init__(
        self,
        serve: Callable[[Connection, Connection], None],
        memory_bytes: int | None,
        *,
        trusted: bool,
        reaches_out: bool,
    ) -> None:
        parent, state = os.getpid(), random.getstate()
        asked, self._requests = Pipe(duplex=False)
        self.answers, answers = Pipe(duplex=False)
        self.request: Any = None
        self.is_busy = False
        self.doing = ""
        self._trusted = trusted
        self._is_cut_off = self._has_ended = False
        self._process = _fork()
        if not self._process:
            try:
                _living.clear()
                cut_off(parent, (asked.fileno(), answers.fileno()), memory_bytes, reaches_out=reaches_out)
                random.setstate(state)  # which Python sets again after a fork
                serve(asked, answers)
            finally:
                os._exit(1)
        _living.append(self)
        asked.close()
        answers.close()
        self._started = self._awake = monotonic()
        self._used = 0.0  # seconds of processor time when it was heard last

    def ask(self, request: object) -> None:
        self.request, self.is_busy = request, True
        self._started = self._awake = monotonic()
        with contextlib.suppress(BrokenPipeError):  # it has died, which `read` will find
            self._requests.send_bytes(_pickled(request))

    def stop(self) -> None:
        """Ask it to stop, which it finds at its next sign of life."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.send_bytes(b"")

    def read(self) -> Answer[Any] | None:
        """Read what it sent: its answer, or a sign of life, some of them with words."""
        try:
            sent = pickle.loads(self.answers.recv_bytes())  # noqa: S301 - from our own child
        except (EOFError, OSError):  # before or within what it sent
            return self._ended()
        self._awake, self._used = monotonic(), self.processor_seconds()
        self._is_cut_off = True
        if isinstance(sent, Answer):
            return sent
        self.doing = sent or self.doing
        return None

    def overdue(self) -> Answer[Any] | None:
        """Why no more is to be expected of it; None while it may still answer."""
        if ended := self._ended(os.WNOHANG):  # with its pipe held open by a process that it left behind
            return ended
        now = monotonic()
        if now - self._started > MOST_SECONDS and not self._trusted:
            return Answer(lost=f"it had not ended after {MOST_SECONDS:.0f} s")
        if self.processor_seconds() - self._used > SILENT_SECONDS and not self._trusted:
            return Answer(lost=f"it went on for {SILENT_SECONDS:.0f} s without calling an operator of torch")
        try:
            is_asleep = psutil.Process(self._process).status() in (psutil.STATUS_SLEEPING, psutil.STATUS_ZOMBIE)
        except psutil.Error:
            is_asleep = True
        if not is_asleep:  # a busy machine may let it wait for a processor
            self._awake = now
        elif now - self._awake > BLOCKED_SECONDS:
            waited = f"it waited {BLOCKED_SECONDS:.0f} s for something that never came"
            lost = f"{waited}, such as a result of a thread, which a copy of a process lacks"
            return Answer(lost=lost, here=not is_forked(), waits=True)
        return None

    def processor_seconds(self) -> float:
        """Seconds of the processor that it has had."""
        try:
            times = psutil.Process(self._process).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def _ended(self, options: int = 0) -> Answer[Any] | None:
        """Return how it ended; None if it has not ended and ``options`` say not to wait."""
        try:
            process, status = os.waitpid(self._process, options)
        except ChildProcessError:  # other code waited for it
            process, status = self._process, None
        if not process:
            return None
        self._has_ended = True
        return Answer(lost=_ending(status), here=not self._is_cut_off)

    def end(self) -> None:
        """End it, whatever it does, and the processes that it started."""
        _living.remove(self)
        self._requests.close()
        self.answers.close()
        until = monotonic() + _END_SECONDS
        while self._trusted and not self.is_busy and not self._ended(os.WNOHANG) and monotonic() < until:
            sleep(0.005)  # it ends its own children, which would be left to the process that adopts orphans
        if not self._has_ended:
            for kill in (_kill_group, _kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(self._process, signal.SIGKILL)
            self._ended()


_living = list[_Child]()  # of this process


def _fork() -> int:
    """Fork.

    Raises:
        OSError: it cannot be done; the text says why.
    """
    if not can_fork():
        raise OSError("this system cannot fork")
    # Python 3.12 warns of other threads: what they hold, the child cannot wait for, and it is given up. The functions
    # that change filters, and `catch_warnings`, make Python forget which warnings it has shown: they would come again.
    filters = cast("list[object]", warnings.filters)
    filters.insert(0, _OF_THREADS)
    try:
        return os.fork()
    except OSError as error:
        raise OSError(f"no process could be forked ({error})") from error
    finally:
        filters.remove(_OF_THREADS)


_OF_THREADS = ("ignore", None, DeprecationWarning, None, 0)


def _ending(status: int | None) -> str:
    if status is None:
        return "it ended the process"
    if os.WIFSIGNALED(status):
        return f"it was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"it ended the process (exit code {os.WEXITSTATUS(status)})"


def processors() -> int:
    """Count those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- in the child

_beats_to: Connection | None = None  # None in a process whose parent waits for no sign of life
_asked: Connection | None = None  # where more comes while it works only if it is to stop
_is_trusted = _reaches_out = False
_next_beat = 0.0


def reaches_out() -> bool:
    """Whether this process is a child that may write new files and connect to other machines."""
    return _reaches_out


def can_fork() -> bool:
    """Whether this system can fork; Windows cannot."""
    return hasattr(os, "fork")


def in_child() -> bool:
    """Whether this process is a child of a pool that is not trusted."""
    return _beats_to is not None and not _is_trusted


def is_forked() -> bool:
    """Whether this process is a child of a pool: what it does in memory ends with it."""
    return _beats_to is not None


def beat() -> None:
    """Send a sign of life, if the parent waits for one; raise `StoppedError`, once, if it has asked to stop."""
    global _asked, _next_beat  # noqa: PLW0603
    if _beats_to and monotonic() > _next_beat:
        _next_beat = monotonic() + _BEAT_SECONDS
        tell("")
        if _asked and _asked.poll():
            _asked = None
            raise StoppedError


def tell(doing: str) -> None:
    """Send what is being done as a sign of life."""
    if _beats_to:
        _beats_to.send_bytes(_pickled(doing))


def _serve(
    handle: Callable[[Any], Any], requests: Connection, answers: Connection, *, trusted: bool, reaches_out: bool
) -> None:
    global _asked, _beats_to, _is_trusted, _reaches_out  # noqa: PLW0603
    _beats_to, _is_trusted, _reaches_out = answers, trusted, reaches_out
    _asked = None if trusted else requests
    tell("")  # it is cut off
    while True:
        try:
            request = pickle.loads(requests.recv_bytes())  # noqa: S301 - from our own parent
        except EOFError:
            for child in [*_living]:
                child.end()
            os._exit(0)
        try:
            answer = _pickled(Answer(handle(request)))
        except BaseException as error:  # noqa: BLE001 - whatever it was ends here
            answer = _pickled(Answer(lost=f"{type(error).__name__}: {error}"))
        answers.send_bytes(answer)


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
