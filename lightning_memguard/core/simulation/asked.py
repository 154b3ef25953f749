"""Scratch of CPU operators without a rule: the operator is run once, on zeros, in a process of its own.

For operators of C++ libraries, and for torch's own that factorize matrices. Whatever one does (crash, hang, fail) ends
with that process, which is a child of a child: never is one run in the training's own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memguard.core.isolation.pool import in_child
from lightning_memguard.core.kernels import table

_MOST_SECONDS = 5
_MOST_BYTES = 256 << 20  # that an operator reads
_known: dict[str, int | None] = {}


def is_asked(func: OpOverload) -> bool:
    """Whether an operator of torch's own is asked: one that factorizes, and has no rule."""
    short = func.overloadpacket.__name__
    return func.namespace == "aten" and short.lstrip("_").startswith("linalg_") and short not in table.CPU


def scratch_bytes(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the most bytes that an operator holds next to its results; None if that is unknown."""
    read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in read)
    if not in_child() or nbytes > _MOST_BYTES or any(tensor.device.type != "cpu" for tensor in read):
        return None
    key = f"{func} {tree_map_only(Tensor, lambda x: (x.shape, x.stride(), x.dtype), (args, kwargs))}"
    if key not in _known:
        _known[key] = _asked(func, args, kwargs)
    return _known[key]


def _asked(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.alarm(_MOST_SECONDS)
            os.write(writer, str(_run(func, args, kwargs)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        answer = answers.read()  # ends with the process
    os.waitpid(child, 0)
    return int(answer) if answer else None


def _run(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Run an operator under torch's profiler, which sees each block."""
    profiler, autograd = torch._C._profiler, cast("Any", torch._C._autograd)
    options = False, True, False, False, False, profiler._ExperimentalConfig()  # with memory
    with no_dispatch(), torch._C._AutoDispatchBelowAutograd():
        args, kwargs = tree_map_only(
            Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_(), (args, kwargs)
        )
        autograd._enable_profiler_legacy(profiler.ProfilerConfig(profiler.ProfilerState.CPU, *options))
        results = func(*args, **kwargs)
        threads = autograd._disable_profiler_legacy(autograd._ProfilerDisableOptions(True, True))
        del results
    blocks: list[int] = [
        event.cpu_memory_usage() for events in threads for event in events if event.kind() == "memory_alloc"
    ]
    return max(0, *accumulate(blocks)) - sum(blocks)
