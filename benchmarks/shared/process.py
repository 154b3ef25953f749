"""Work in a fork of this process, and what processes take."""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@functools.cache
def script(path: Path) -> Any:
    """A script as a module: the names of some, such as `field.py`, are those of packages."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_script", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def describe(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"[:400]


def in_fork(answer: Callable[[], dict[str, Any]], threads: int, limit: float) -> dict[str, Any]:
    """A function's answer from a fork of this process, or why there is none."""
    import torch

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(reader)
        os.dup2(2, 1)  # stdout is for results
        try:
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            found = answer()
        except BaseException as error:  # noqa: BLE001 - the table has it
            traceback.print_exc()
            found = {"failed": describe(error)}
        with os.fdopen(writer, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(writer)
    ended = time.monotonic() + limit
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"failed": f"it took more than {limit:.0f} s"}
        time.sleep(0.02)
    with os.fdopen(reader) as pipe:
        return json.loads(pipe.read() or '{"failed": "the process died"}')


def forked(answer: Callable[[], dict[str, Any]], threads: int, limit: float = 3600) -> dict[str, Any]:
    """A function's answer from a fork of this process, which must give one, and prints nothing."""

    def silent() -> dict[str, Any]:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        return answer()

    found = in_fork(silent, threads, limit)
    if "failed" in found:
        raise RuntimeError(found["failed"])
    return found


def adopt_orphans() -> None:
    """Processes that outlive theirs count as this one's."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def processor_seconds() -> float:
    """Processor time of this process and of those below it, for whose end it waits."""
    ended = time.monotonic() + 10
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < ended:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def memory_of(name: str) -> int:
    """Bytes of a line of this process's status, such as RssAnon."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def resident() -> dict[str, int]:
    """Bytes in memory, once what can be given back was."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return {name: memory_of(name) for name in ("VmRSS", "RssAnon")}
