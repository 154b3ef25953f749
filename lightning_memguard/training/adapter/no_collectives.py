"""Replacements for collective calls: while a copy of a training runs, its calls do not reach other ranks.

One rank may run more captures than another, or fail in the middle of one; a collective call that reached the others
from there would wait forever. Calls that write into existing tensors allocate nothing: here they do nothing.

The functions of torch.distributed are replaced for the whole process while a copy runs: this is not thread-safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_memguard.core.foreign import patched
from lightning_memguard.core.simulation.one_rank import OF_OBJECTS, refuse_call

_WRITE_INTO = """
    all_reduce all_gather all_gather_into_tensor all_gather_single all_gather_coalesced all_reduce_coalesced all_to_all
    all_to_all_single barrier broadcast gather isend irecv monitored_barrier recv reduce reduce_scatter
    reduce_scatter_single reduce_scatter_tensor scatter send destroy_process_group
""".split()  # noqa: SIM905 - the formatter would put each name on a line of its own
_RETURN_VALUES = (*OF_OBJECTS, "batch_isend_irecv")


class _Done:
    """The handle of an asynchronous call that is finished."""

    def wait(self, *_: object, **__: object) -> bool:
        return True

    is_completed = wait


def _nothing(*_: object, async_op: bool = False, **__: object) -> _Done | None:
    return _Done() if async_op else None


class _Group:
    """A process group without processes."""

    barrier = monitored_barrier = staticmethod(_nothing)


@contextlib.contextmanager
def no_collectives() -> Iterator[None]:
    """Keep collective calls inside from reaching other ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    replacements = {
        **dict.fromkeys(_WRITE_INTO, _nothing),
        **{name: partial(refuse_call, name) for name in _RETURN_VALUES},
        "new_group": lambda *_, **__: _Group(),
    }
    with ExitStack() as exits:
        for home in (dist, distributed_c10d):
            for name, replacement in replacements.items():
                if hasattr(home, name):
                    exits.enter_context(patched(home, **{name: replacement}))
        yield
