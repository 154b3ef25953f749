"""Storages: what is allocated in a step, when and where, for what, and when it is freed.

A weak reference's finalizer runs when a storage is freed, fake or real. The code of a step sets its phase, hooks on its
modules set the module, and the stack or the graph of the forward pass tells the line of the model's code.
"""

from __future__ import annotations

import functools
import math
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.batch.nesting import batch_bytes, shapes_of, tensors_in
from lightning_memguard.core.device.out_of_memory import refusal_of
from lightning_memguard.core.foreign import patched
from lightning_memguard.core.kernels.arguments import operands
from lightning_memguard.core.objects import is_installed, is_users_line, module_of
from lightning_memguard.core.simulation import streams
from lightning_memguard.core.torch_port import (
    DataDependentOutputException,
    DisableTorchFunction,
    FakeTensor,
    no_dispatch,
)
from lightning_memguard.core.trace.trace import WAITS, Action, Event, Shapes
from lightning_memguard.errors import CannotTraceError

_OF_A_STEP = ("", "activations", "temporaries")
_ACTIVATION_PHASES = ("forward", "transfer")


class Storages:
    """The storages of one type of device, and the events of their blocks.

    Args:
        device_type: only storages on this type of device are recorded.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.phase, self.step, self.module = "setup", 0, ""
        self.source: str | None = None  # of the forward pass, while the backward pass runs; None: read the stack
        self._line: str | None = None  # of the operator that is noted now, once it was asked for
        self._graph_task = -1
        self.rows: list[Event] = []  # an empty part is filled in at the end
        self._parts: dict[int, str] = {}
        self._live: dict[int, int] = {}  # address of the storage -> its block
        self._bytes: list[int] = []  # by block
        self._storage_bytes: dict[int, int] = {}  # by block, without what the operator keeps
        self._references: list[weakref.ref[Any]] = []
        self._stream = self.node_stream = 0  # the latter of the node of a backward pass that runs
        self._streams: dict[int, int] = {}  # by block, if it is not the default one
        self._users: dict[int, int] = {}  # by block, another stream that uses it
        self._late: list[streams.Late] = []
        self._recording = True
        self._kept_bytes = 0
        self._expected: list[tuple[str, str, int]] = []
        self._held_at = self._asked_until = 0
        self._batch: tuple[Shapes, int] | None = None
        self._batches: list[set[int]] = []  # the blocks of each batch
        self.device_bytes: float = math.inf  # a request for more raises, as it does on the device
        self.room_bytes: float = math.inf  # so does one for more than is left of these
        self.refused: dict[str, int] = {}  # bytes of requests that have raised, by line

    # -- called by the code that runs the step

    def paused(self) -> AbstractContextManager[Any]:
        """Record nothing while something is made that is not part of the step, such as its example batch."""
        return patched(self, _recording=False)

    def label(self, tensors: Iterable[object], part: str) -> None:
        """Set the part that these tensors belong to; a block that already has one keeps it."""
        for block in self._blocks_of(tensors):
            self._parts.setdefault(block, part)

    def _blocks_of(self, tensors: Iterable[object]) -> set[int]:
        with DisableTorchFunction():
            known = [tensor for tensor in tensors if not is_lazy(tensor)]  # type: ignore[arg-type]
            blocks = [self.watch(tensor, "") for tensor in plain_tensors(known)]
        return {block for block in blocks if block is not None}

    @property
    def stream(self) -> int:
        """The stream whose pool blocks are allocated in now, in a backward pass that of its forward; 0 by default."""
        return self._stream or streams.in_use() or (self.node_stream if self._graph_task != -1 else 0)

    def on_stream(self, stream: int) -> AbstractContextManager[Any]:
        """Record allocations made inside in the pool of another stream, whose free memory no other stream uses."""
        return patched(self, _stream=stream)

    def note_batch(self, batch: object) -> None:
        """Note a batch that the step is given; of several the largest."""
        self.label(tensors_in(batch), "batch")
        self._batches.append(self._blocks_of(tensors_in(batch)))
        known, nbytes = self._batch, batch_bytes(batch)
        if known is None or nbytes > known[1]:
            self._batch = shapes_of(batch), nbytes

    def note_resized(self, storage: torch.UntypedStorage) -> None:
        """Record a storage that was resized in place: how FSDP frees what it gathered, and allocates it again."""
        if not self._recording or storage.device.type not in (self.device_type, "meta"):
            return
        address, nbytes = port.storage_id(storage), storage.nbytes()
        block = self._live.get(address)
        if block is not None and nbytes != self._storage_bytes[block]:
            self._parts[block] = "gathered"
            self._forget(address, block)
            block = None
        if block is None and nbytes:
            self._hold(storage, self.take(nbytes, "storage.resize_", "gathered"), nbytes)

    def use(self, tensor: Tensor, user: int) -> None:
        """Note that a stream uses a tensor, unless its block is that stream's own."""
        block = self._live.get(port.storage_id(tensor.untyped_storage()))
        if block is not None and self._streams.get(block, 0) != user:
            self._users[block] = user

    def _wait(self, block: int) -> None:
        """Keep a freed block until the stream that uses it is done, in the upper bound."""
        waiting, user = len(self._bytes), self._users.pop(block)
        self._bytes.append(self._bytes[block])
        self._parts[waiting] = self._parts.get(block, "temporaries")
        self.add_row("alloc", waiting, WAITS, self._streams.get(block, 0), case="high")
        self._late.append(streams.Late(waiting, user, streams.now(), self.step))

    def give_back(self, is_done: Callable[[streams.Late], bool]) -> None:
        """Give back the blocks that streams are done with, as the host finds out."""
        for late in [each for each in self._late if is_done(each)]:
            self._late.remove(late)
            self.add_row("free", late.waiting, WAITS, case="high")

    def mark_held(self) -> None:
        """Mark this moment: memory that the run holds on its device throughout was allocated before it."""
        self._held_at = len(self.rows)

    def keep(self, nbytes: int, part: str) -> None:
        """Count a block that is held from now to the end, without a tensor of the step."""
        if nbytes:
            self.take(nbytes, "", part)
            self._kept_bytes += nbytes

    def expect(self, nbytes: int, part: str, *, at_most: bool = False) -> None:
        """Count a block that later steps find besides what was recorded, or find at most; at least, it is not there."""
        if nbytes:
            self._expected += [(case, part, nbytes) for case in (("high",) if at_most else ("point", "high"))]

    def take_for_a_moment(self, nbytes: int, part: str) -> None:
        """Count a block that is allocated here and freed at once."""
        if nbytes > 0:
            self.add_row("free", self.take(nbytes, "", part), "")

    def hold_at_most(self, inside: int, tensor: Tensor, nbytes: int) -> None:
        """Count at most so many bytes for a moment, and others for as long as a tensor lives."""
        moment, block = len(self._bytes), len(self._bytes) + 1
        self._bytes += [inside, nbytes]
        self.add_row("alloc", moment, "", source=self.line(), case="high")
        self.add_row("free", moment, "", case="high")
        self.add_row("alloc", block, "", source=self.line(), case="high")

        def free(_: object) -> None:
            self.add_row("free", block, "", case="high")

        self._references.append(weakref.ref(tensor.untyped_storage(), free))

    def hold(self, tensor: Tensor) -> None:
        """Watch a tensor without counting it: `keep` or `expect` counted its memory, or it is not the step's."""
        self.watch(tensor, "", -tensor.untyped_storage().nbytes())

    @property
    def alive_bytes(self) -> int:
        """Bytes that are allocated now."""
        return self._kept_bytes + sum(self._bytes[block] for block in self._live.values())

    def newly_allocated_bytes(self, phase: str) -> int:
        """Return the bytes that operators allocated in one phase since the last call, freed or not."""
        rows, self._asked_until = self.rows[self._asked_until :], len(self.rows)
        new = (row for row in rows if row.action == "alloc" and row.phase == phase and row.operator != WAITS)
        return sum(row.nbytes for row in new if self._parts.get(row.block) != "communication")

    @property
    def alive_without_batch(self) -> int:
        """Bytes alive now without the batch, which may have another size than the one before."""
        kept = set[int]().union(*self._batches[:-1]).difference(*self._batches[-1:])  # Lightning holds the last one
        batch = (block for block in self._live.values() if self._parts.get(block) == "batch" and block not in kept)
        return self.alive_bytes - sum(self._bytes[block] for block in batch)

    def left_by(self, steps: range) -> dict[int, tuple[int, str]]:
        """Return what batches of these numbers left behind: bytes and line of code, by the address of the storage."""
        batches = set[int]().union(*(self._batches[step] for step in steps))
        addresses = {block: address for address, block in self._live.items()}
        made = (row for row in self.rows if row.action == "alloc" and row.block in addresses)
        return {
            addresses[row.block]: (row.nbytes, row.source)
            for row in made
            if row.block in batches or (row.step in steps and self._parts.get(row.block, "") in _OF_A_STEP)
        }

    # -- the events

    def line(self) -> str:
        """The line of the model's code that runs now; in the backward pass, the line of its forward pass."""
        if self.source is not None:
            return self.source
        if not self._line:
            line = _line_of_the_model(sys._getframe(1))
            if self._line is None:
                return line
            self._line = line
        return self._line

    def where(self) -> str:
        """The phase; ``"backward"`` if a backward pass runs in the forward pass, too."""
        return "backward" if self._graph_task != -1 and self.phase in _ACTIVATION_PHASES else self.phase

    def watch(self, tensor: Tensor, operator: str, kept_bytes: int = 0) -> int | None:
        """Return the block behind a tensor, which is recorded if it is new; None if it has none on this device."""
        if tensor.device.type != self.device_type:
            return None
        if tensor.layout is torch.sparse_coo and not isinstance(tensor, FakeTensor):
            with no_dispatch():
                parts = tensor._indices(), tensor._values()
            return [self.watch(part, operator) for part in parts][-1]
        if self._graph_task != -1 and tensor.layout is not torch.strided:
            return None  # `refuse_sparse` has a better message for a gradient
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
            raise CannotTraceError(f"The step makes {kind}, whose bytes depend on values. Use dense tensors instead.")
        storage = tensor.untyped_storage()
        nbytes, block = storage.nbytes(), self._live.get(port.storage_id(storage))
        if block is not None:
            if nbytes == self._storage_bytes[block]:
                return block
            self._forget(port.storage_id(storage), block)  # resized in place: a new allocation behind the same object
        if not nbytes:
            return None
        if operator and nbytes > self._free_bytes:
            self._refuse(nbytes)
        return self._hold(storage, self.take(nbytes + kept_bytes, operator), nbytes)

    @property
    def _free_bytes(self) -> float:
        """The most that a request is granted."""
        is_limited = self.room_bytes < math.inf  # else all blocks would be added up at each request
        return min(self.device_bytes, self.room_bytes - self.alive_bytes) if is_limited else self.device_bytes

    def _refuse(self, nbytes: int) -> None:
        """Raise what a request raises on the device, if it does.

        Raises:
            RuntimeError: as on the device, which lacks the memory whatever else is in it.
        """
        error = refusal_of(nbytes, self.device_type, int(min(self.device_bytes, self.room_bytes)))
        if error is not None:
            self.refused[self.line()] = nbytes
            try:
                raise error
            finally:
                del error  # whose traceback holds this frame, and with it the step's tensors

    def _hold(self, storage: torch.UntypedStorage, block: int, nbytes: int) -> int:
        address = port.storage_id(storage)
        self._storage_bytes[block], self._live[address] = nbytes, block
        self._references.append(weakref.ref(storage, functools.partial(self._forget, address, block)))
        return block

    def take(self, nbytes: int, operator: str, part: str = "") -> int:
        """Record a new block, and return its number."""
        block = len(self._bytes)
        self._bytes.append(nbytes)
        if part:
            self._parts[block] = part
        stream = self.stream
        if stream:
            self._streams[block] = stream
        self.add_row("alloc", block, operator, stream, self.line())
        return block

    def take_held(self, nbytes: int, operator: str) -> object:
        """Record a new block that is held by the object that this returns."""
        block, keeper = self.take(nbytes, operator, "activations"), _Keeper()
        self._references.append(weakref.ref(keeper, lambda _: self.add_row("free", block, "")))
        return keeper

    def add_row(
        self, action: Action, block: int, operator: str, stream: int = 0, source: str = "", case: str = ""
    ) -> None:
        """Record that a block is allocated or freed here."""
        where = self.where(), self.step, self.module, operator
        self.rows.append(Event(action, block, self._bytes[block], "", *where, stream, case, source))

    def _forget(self, address: int, block: int, _: object = None) -> None:
        if self._live.get(address) == block:
            del self._live[address]
            self.add_row("free", block, "")
            if block in self._users:
                self._wait(block)

    def keep_activations(self) -> None:
        """Label blocks that are still held when the backward pass starts as activations, if they have no part yet."""
        for block in self._live.values():
            self._parts.setdefault(block, "activations")

    def like(self, operator: str) -> Event:
        """An event that could be at this place, of a block that lives inside an operator."""
        where = self.where(), self.step, self.module, operator, self._stream or streams.in_use()
        return Event("alloc", 0, 0, "workspaces", *where, source=self.line())

    def block_behind(self, tensor: Tensor) -> int:
        """The block behind a tensor that is recorded; else -1."""
        return self._live.get(port.storage_id(tensor.untyped_storage()), -1)


class _Keeper:
    """Placeholder for a block that no tensor of the recording has."""


def plain_tensors(out: object, *, inside: bool = True) -> Iterator[Tensor]:
    """The tensors among an operator's results; ``inside``: those that wrappers hold, such as DTensor."""
    for tensor in operands(out):
        if inside and hasattr(tensor, "__tensor_flatten__"):
            yield from plain_tensors([getattr(tensor, name) for name in _held_by(tensor)])
        else:
            yield tensor


def _held_by(tensor: Any) -> Sequence[str]:
    """The attributes with the tensors of a wrapper, such as a jagged tensor's values and offsets."""
    try:
        return tensor.__tensor_flatten__()[0]  # type: ignore[no-any-return]
    except DataDependentOutputException:  # torchao asks whether a scale is 0 (checked on 0.18)
        return [name for name, value in vars(tensor).items() if isinstance(value, Tensor)]


_END_OF_THE_STEP = "lightning_memguard.core.capture.capture"  # callers of it are not the model


def _line_of_the_model(frame: FrameType | None) -> str:
    while frame is not None and frame.f_globals.get("__name__", "") != _END_OF_THE_STEP:
        if is_users_line(frame):
            return sys.intern(f"{frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_code.co_name}")
        frame = frame.f_back
    return ""


def line_that_checks() -> str:
    """The line that asks for values now, as ``file:line``; empty if it belongs to a library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and module_of(frame).startswith(_MACHINERY):
        frame = frame.f_back
    own = frame is not None and is_users_line(frame) and not is_installed(frame.f_code.co_filename)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame and own else ""


# Between a line and the answer to it.
_MACHINERY = ("lightning_memguard.", "torch._ops", "torch._subclasses", "torch._compile", "torch.utils.")


def line_behind(error: BaseException) -> str:
    """The innermost line of the model's own code in an error's traceback, as ``file:line``; empty if there is none."""
    for frame, lineno in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_users_line(frame):
            return f"{frame.f_code.co_filename}:{lineno}"
    return ""


_WRAPPERS = ("", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def written_path(path: str) -> str:
    """A module's path without what FSDP, activation checkpointing and torch.compile put between it and its parent."""
    return ".".join(name for name in path.split(".") if name not in _WRAPPERS)
