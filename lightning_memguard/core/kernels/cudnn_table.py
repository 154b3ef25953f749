"""Workspaces of cuDNN as shares of the tensors, for when no installed cuDNN can be asked.

``cudnn_table.csv`` was made by asking one, see ``benchmarks/cudnn_table.py``.
"""

from __future__ import annotations

import csv
import functools
import math
from importlib.resources import files

from lightning_memguard.core.kernels.cudnn import Question

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
