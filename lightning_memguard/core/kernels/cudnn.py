"""Workspaces of convolutions in cuDNN, as PyTorch asks for them: by the cuDNN that is installed, without a GPU.

The library runs in a process of its own, see `lightning_memguard.core.kernels.cudnn_process`. If none can be asked (a
CPU-only build of torch without the wheels ``nvidia-cudnn-cu13`` and ``nvidia-cublas``), the answer is None, and rules
fall back to ``cudnn_table.csv``: shares of the tensors, made by asking one (``benchmarks/cudnn_table.py``).
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Literal

Operation = Literal["forward", "input", "weight"]

FIRST_VERSION = 90800  # the first that can be asked without a device
FIRST_CAPABILITY = (7, 5)  # of newer versions, which name plans for older GPUs that none of them could run
_LEAST, _ENOUGH_BYTES = 4, 1 << 20  # plans to ask for, and a workspace that fits wherever the tensors do


@dataclass(frozen=True)
class Question:
    """One convolution or one of its gradients, as cuDNN is given it.

    Attributes:
        operation: the convolution itself, its input's gradient, or its weight's.
        x: the image's shape; a sequence is an image of one row.
        weight: the weight's, without the groups' other channels.
        y: the result's.
        kind: the tensors' type, such as ``"float32"``.
        channels_last: the layout of all three.
        padding, stride, dilation: of the kernel.
        capability: the GPU's compute capability.
        tf32: whether float32 may run on tensor cores.
        deterministic: whether plans whose results vary are left out.
        every: ask for every plan, rather than for the first ones, down to a small workspace.
        multiprocessors: the GPU's; 0 for the usual number.
    """

    operation: Operation
    x: tuple[int, ...]
    weight: tuple[int, ...]
    y: tuple[int, ...]
    kind: str
    channels_last: bool
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    capability: tuple[int, int]
    tf32: bool
    deterministic: bool
    every: bool = False
    multiprocessors: int = 0


@functools.lru_cache(16384)
def workspaces(question: Question) -> tuple[int, ...] | None:
    """The workspaces of the plans that PyTorch would try in turn: the next one if the one before runs out of memory.

    None if no cuDNN can be asked, or it has no plan without the device.
    """
    process = _of_this_process() if question.capability >= FIRST_CAPABILITY else None
    return process.ask(question) if process else None


def version() -> int:
    """The version of the cuDNN that is asked, such as 91900; 0 if there is none."""
    process = _of_this_process()
    return process.version if process else 0


class _Process:
    """The process that has cuDNN loaded; it ends when its input is closed, with this one at the latest.

    It sees no GPU: cuDNN would open a context there, which took 608 MiB of an H100, and answers as on any machine.
    """

    def __init__(self, libraries: tuple[str, ...]) -> None:
        self.owner = os.getpid()
        self._lock = Lock()
        script = str(Path(__file__).with_name("cudnn_process.py"))
        self._process = subprocess.Popen(  # noqa: S603 - this package's own script
            [sys.executable, "-I", "-S", script, *libraries],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        self.version = int(self._line() or 0)

    def ask(self, question: Question) -> tuple[int, ...] | None:
        least = sys.maxsize if question.every else _LEAST
        asked = {**asdict(question), "least": least, "enough_bytes": _ENOUGH_BYTES}
        with self._lock:
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(json.dumps(asked) + "\n")
                self._process.stdin.flush()
                answer = self._line()
            except (OSError, ValueError):
                return None
        return tuple(json.loads(answer)) or None if answer else None

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


_running: list[_Process | None] = []


def _of_this_process() -> _Process | None:
    """The process that this one asks; a fork does not share its parent's."""
    if _running and (_running[0] is None or _running[0].owner == os.getpid()):
        return _running[0]
    process, libraries = None, _libraries()
    with suppress(OSError, ValueError):
        process = _Process(libraries) if libraries else None
    _running[:] = [process if process and process.version >= FIRST_VERSION else None]
    return _running[0]


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Find the libraries to load, cuDNN last, in the wheels that torch for CUDA requires on Linux; () without them."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    needed = ("libnvrtc.so.*", "libcublasLt.so.*", "libcublas.so.*", "libcudnn.so.9")
    found = []
    for name in needed:
        paths = (path for folder in folders for path in sorted(folder.glob(f"*/lib/{name}")))
        found.append(next((str(path) for path in paths if ".alt." not in path.name), None))
    return () if found[1] is None or found[-1] is None else tuple(filter(None, found))


# -- where no cuDNN can be asked

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_VOLTA, _TURING = (7, 0), (7, 5)


def kind_of(question: Question) -> tuple[str, str, str, str]:
    """Operation, window, numbers and layout: what a row of the table is found by, next to the compute capability."""
    window = "1x1" if math.prod(question.weight[2:]) == 1 else "kxk"
    if question.x[1] != question.weight[1]:
        window = "grouped"
    elif question.x[1] % 4:
        window = "first"
    elif math.prod(question.stride) > 1:
        window += " strided"
    numbers = "half"
    if question.kind == "float32":
        numbers = "tf32" if question.tf32 and question.capability >= (8, 0) else "float32"
    return question.operation, window, numbers, "channels last" if question.channels_last else "contiguous"


def tensors_bytes(question: Question) -> int:
    """Bytes of image, weight and result together."""
    return sum(map(math.prod, (question.x, question.weight, question.y))) * _BYTES.get(question.kind, 0)


def likely(question: Question) -> int:
    """Return the likely workspace in bytes.

    A GPU between two of the table is like the older; the first with tensor cores is like Turing. Nothing for float64,
    and for GPUs without tensor cores.
    """
    shares = _table().get(kind_of(question), {})
    known = [capability for capability in shares if capability <= max(question.capability, _TURING)]
    percent = shares[max(known)] if known and question.capability >= _VOLTA else 0
    return tensors_bytes(question) * percent // 100


@functools.cache
def _table() -> dict[tuple[str, str, str, str], dict[tuple[int, int], int]]:
    """Read the shares in percent, by kind and compute capability."""
    text = files("lightning_memguard.core.kernels").joinpath("cudnn_table.csv").read_text(encoding="utf-8")
    table: dict[tuple[str, str, str, str], dict[tuple[int, int], int]] = {}
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        kind = row["operation"], row["window"], row["numbers"], row["layout"]
        for capability in row["capabilities"].split(";"):
            major, minor = capability.split(".")
            table.setdefault(kind, {})[int(major), int(minor)] = int(row["percent"])
    return table
