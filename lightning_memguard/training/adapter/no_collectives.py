"""While a copy of a training runs, it speaks to no other rank.

One rank may run more captures than another, or fail in the middle of one; a collective call that reached the others
from there would wait for ever. Those that write into tensors made beforehand take no memory of their own: they do
nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_memguard.errors import CannotTraceError

_WRITE_INTO = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "isend",
    "irecv",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "destroy_process_group",
)
# What these give depends on the other ranks.
_TELL = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "batch_isend_irecv",
)


class _Done:
    """The handle of a call that needs no waiting for."""

    def wait(self, *_: Any, **__: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Group:
    """A process group of nobody."""

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        pass

    barrier = monitored_barrier


def _new_group(*_: Any, **__: Any) -> _Group:
    return _Group()


def _nothing(*_: Any, async_op: bool = False, **__: Any) -> _Done | None:
    return _Done() if async_op else None


def _refusing(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise CannotTraceError(f"the step calls torch.distributed.{name}, whose result only the other ranks know")

    return refuse


@contextlib.contextmanager
def no_collectives() -> Iterator[None]:
    """Keep what runs inside from reaching other ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    stand_ins = {
        **dict.fromkeys(_WRITE_INTO, _nothing),
        **{name: _refusing(name) for name in _TELL},
        "new_group": _new_group,
    }
    with ExitStack() as exits:
        for home in (dist, distributed_c10d):
            for name, stand_in in stand_ins.items():
                if hasattr(home, name):
                    exits.enter_context(mock.patch.object(home, name, stand_in))
        yield
