"""Ranks of gloo on this machine, forked from a server that has imported what they need, and has run nothing.

Not from the process that runs the tests: after some of them autograd refuses to run in a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path

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


def _run(rank: int, world: dict[str, str], work: Callable[..., None], folder: Path) -> None:
    os.chdir(folder)
    os.environ.update(world | {"LOCAL_RANK": str(rank), "RANK": str(rank)})
    torch.set_num_threads(1)
    work(rank, folder)
