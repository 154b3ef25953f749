"""The benchmark that looks for hangs sees one."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs sessions of processes")

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "no_hang.py"
DEADLOCK = """
import os, threading
lock = threading.Lock()
lock.acquire()
def waits_in_the_child(): lock.acquire()
def waits_for_the_child(child): os.waitpid(child, 0)
child = os.fork()
waits_for_the_child(child) if child else waits_in_the_child()
"""


@pytest.fixture(scope="module")
def no_hang() -> ModuleType:
    spec = importlib.util.spec_from_file_location("no_hang", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["no_hang"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_fork_that_deadlocks_is_a_hang_and_shows_where_each_process_waits(
    no_hang, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(no_hang, "IDLE_SECONDS", 1.0)
    ended = no_hang.run([sys.executable, "-c", DEADLOCK], tmp_path, seconds=2)
    assert ended.code is None
    assert "in waits_in_the_child" in ended.text
    assert "in waits_for_the_child" in ended.text


class Child:
    """A process that has not ended at the first so many looks."""

    pid = 1

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def wait(self, seconds: float) -> int:
        self.looks -= 1
        if self.looks >= 0:
            raise subprocess.TimeoutExpired("child", seconds)
        return 0


@pytest.mark.parametrize(
    ("looks", "works", "code"),
    [(0, False, 0), (3, False, None), (3, True, 0), (1_000_000, True, None)],
    ids=["in time", "idle", "slow", "endless"],
)
def test_only_a_session_that_works_has_more_time_and_not_forever(no_hang, monkeypatch, looks, works, code) -> None:
    used = itertools.count()
    monkeypatch.setattr(no_hang, "cpu_seconds", lambda leader: {1: float(next(used)) if works else 7.0, 2: 3.0})
    assert no_hang.exit_code(Child(looks), 60.0) == code


def test_a_process_left_behind_is_counted_and_ended(no_hang, tmp_path: Path) -> None:
    program = "import os, time; child = os.fork(); print(child or time.sleep(600))"
    ended = no_hang.run([sys.executable, "-c", program], tmp_path, seconds=60)
    assert (ended.code, ended.left) == (0, 1)
    pid = int(ended.text.split()[0])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_every_situation_has_a_number_of_fits(no_hang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    assert list(no_hang.FITS) == list(importlib.import_module("shared.situations").SITUATIONS)
