"""Ranks of gloo on this machine, forked from a server that has imported what they need, and has run nothing.

Not from the process that runs the tests: after some of them autograd refuses to run in a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["lightning_memguard.training.run.guarded_run", "torch.profiler", "tests.warm"])


def on_ranks(count: int, work: Callable[..., None], folder: Path) -> None:
    """Run a function of the rank and a folder on so many ranks, in that folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "NODE_RANK": "0"}
    ranks = [CONTEXT.Process(target=_run, args=(rank, world, work, folder)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(600)
    assert [rank.exitcode for rank in ranks] == [0] * count


def of_both_ranks(work: Callable[..., None], folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Run a function on two ranks, and return what each has written to ``rank0.json`` or ``rank1.json``, by name."""
    on_ranks(2, work, folder)
    here, there = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1))
    return {name: (here[name], there[name]) for name in here}


def _run(rank: int, world: dict[str, str], work: Callable[..., None], folder: Path) -> None:
    os.chdir(folder)
    os.environ.update(world | {"LOCAL_RANK": str(rank), "RANK": str(rank)})
    torch.set_num_threads(1)
    work(rank, folder)


def with_shared_memory(megabytes: int, work: Callable[[Path], None], folder: Path) -> None:
    """Run a function of a folder in a process that has a small /dev/shm of its own."""
    process = CONTEXT.Process(target=_with_shared_memory, args=(megabytes, work, folder))
    process.start()
    process.join(600)
    if process.exitcode == NO_MOUNTS:
        pytest.skip("this machine gives a process no mounts of its own")
    assert process.exitcode == 0


NO_MOUNTS = 77
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000  # linux/sched.h


def _with_shared_memory(megabytes: int, work: Callable[[Path], None], folder: Path) -> None:
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "unshare") or libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        sys.exit(NO_MOUNTS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={megabytes}m".encode()):
        sys.exit(NO_MOUNTS)
    multiprocessing.set_start_method("fork", force=True)  # of workers: this process inherits the forkserver's
    torch.set_num_threads(1)
    work(folder)


def run_script(script: Path, folder: Path, *options: str, without: str = "") -> str:
    """What a script prints in a folder, in a process that has imported torch and Lightning before; it must succeed.

    A package ``without`` which it begins is imported again where the script first needs it.
    """
    shown = folder.with_name(f"{folder.name}.txt")
    process = CONTEXT.Process(target=_run_script, args=(script, folder, shown, options, without))
    process.start()
    process.join(600)
    text = shown.read_text(encoding="utf-8")
    assert process.exitcode == 0, text
    return text


def run_program(code: str, folder: Path) -> str:
    """What a program prints in a folder, as `run_script`."""
    script = folder / "program.py"
    script.write_text(code, encoding="utf-8")
    return run_script(script, folder)


def _run_script(script: Path, folder: Path, shown: Path, options: tuple[str, ...], without: str) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == without]:
        del sys.modules[name]
    os.chdir(folder)
    os.environ["COLUMNS"] = "160"  # no wrapped sentences
    with shown.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    sys.argv = [str(script), *options]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def run_all(scenarios: dict[str, Callable[[], Any]], in_children: Collection[str]) -> dict[str, Any]:
    """What each scenario returns; captures are in children in the named ones, and in this process in the others."""
    from tests.warm import capture_here

    found = {}
    for name, run in scenarios.items():
        with contextlib.ExitStack() as patches:
            if name not in in_children:
                capture_here(lambda path, function: patches.enter_context(mock.patch(path, function)))
            found[name] = run()
    return found
