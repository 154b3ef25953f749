"""FlexAttention: one kernel where torch.compile makes it; the whole table of scores where it runs as it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_memguard.core import torch_port as port


@contextmanager
def watched(mode_type: type, *, fused: bool) -> Iterator[None]:
    """Let steps run FlexAttention under a mode.

    Args:
        mode_type: the class of the mode, that of a recorder.
        fused: record the results alone, of a step that runs as it was written though it would be compiled. torch
            compiles FlexAttention in any step: without the user's torch.compile, to run its formula.
    """
    known = port.flexible_attention()
    for operator, (results, formula) in known.items():
        operator.python_key_table[mode_type] = _of_one_kernel(results) if fused else _of_formula(formula)
    try:
        yield
    finally:
        for operator in known:
            del operator.python_key_table[mode_type]


def _of_one_kernel(results: Callable[..., Any]) -> Callable[..., Any]:
    def attend(mode: Any, *args: object, **kwargs: object) -> Any:
        found = results(*args, **kwargs)
        for tensor in port.tree_leaves(found):
            if isinstance(tensor, Tensor):
                mode.watch(tensor, "flex_attention")
        return found

    return attend


def _of_formula(formula: Callable[..., Any]) -> Callable[..., Any]:
    def attend(mode: Any, *args: object, **kwargs: object) -> Any:
        with mode:
            return formula(*args, **kwargs)

    return attend
