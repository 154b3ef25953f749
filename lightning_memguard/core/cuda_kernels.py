"""Scratch that CUDA kernels take inside one operator, by operator, each rule with its source in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_memguard.core.scratch import Chip, Scratch

Rule = Callable[[Sequence[Any], Mapping[str, Any], Sequence[Any], Chip], Scratch]

RULES: dict[str, Rule] = {}
