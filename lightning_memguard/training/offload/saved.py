"""Saved tensors as autograd holds them in place of the tensors: one that stays, and one that was moved.

Both compare versions as autograd itself would, and raise its words: with hooks on, it no longer does
(torch/csrc/autograd/saved_variable.cpp). Checked on torch 2.13.
"""

from __future__ import annotations

import re
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from lightning_memguard.training.offload.tiers import Place

_ALIGNED_BYTES = 512  # blocks of the CUDA allocator begin there, and kernels choose their loads by it


class Kept:
    """A saved tensor that stays on the device."""

    __slots__ = ("origin", "tensor", "version")

    def __init__(self, tensor: Tensor, node: Any = None) -> None:
        # A node's own result refers to the node: a cycle through C++, which Python cannot collect. A leaf is held
        # itself, as autograd does: its data may be replaced.
        self.tensor = tensor if node is None else tensor.detach()
        self.version: int = tensor._version
        self.origin = None if node is None else _Origin(tensor, node)

    def restored(self) -> Tensor:
        """Return the tensor."""
        found = self.tensor
        if found._version != self.version:
            raise _modified(found.dtype, found.device, found.shape, found._version, self.version, self.origin)
        return found


class Copy:
    """The copy of a storage, or of a part of one, at one version.

    Attributes:
        owner: whose version counter counts the writes into it.
        start: the byte of the storage with which it begins.
        gathered: it holds the elements of one view alone, in order.
    """

    __slots__ = ("__weakref__", "begins", "device", "gathered", "live", "nbytes", "owner", "place", "start", "version")
    __slots__ += ("whole_bytes", "witness")

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage, owner: Tensor) -> None:
        self.device, self.version, self.owner = tensor.device, tensor._version, weakref.ref(owner)
        self.live, self.begins, self.whole_bytes = weakref.ref(storage), 0, storage.nbytes()  # the original, at first
        self.witness = tensor.detach()  # shares the version counter, and from the next line on no memory
        self.witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.start, self.nbytes, self.gathered = 0, self.whole_bytes, False
        self.place: Place | None = None

    def is_of(self, storage: torch.UntypedStorage, owner: Tensor, version: int) -> bool:
        """Whether it holds what a tensor of this storage, owner and version does."""
        return self.version == version and self.owner() is owner and self.witness._version == version

    def storage(self) -> tuple[torch.UntypedStorage, int]:
        """Return a storage with its bytes, and the byte of the original with which that begins: the original itself
        if it lives, or one that another node has asked for; else it is brought back.
        """
        storage = self.live()
        if storage is None or (self.begins == 0 and storage.nbytes() < self.nbytes):  # freed, perhaps in place
            storage = self._brought_back().untyped_storage()
            self.live, self.begins = weakref.ref(storage), self.start
        return storage, self.begins

    def _brought_back(self) -> Tensor:
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        assert self.place is not None
        self.place.tier.read(self.place, buffer)
        return buffer


class Moved:
    """A view of a storage that was moved: strides, alignment, dtype and bits come back as they were."""

    __slots__ = ("copy", "dtype", "is_conj", "is_neg", "offset", "origin", "shape", "stride")

    def __init__(self, tensor: Tensor, copy: Copy, node: Any) -> None:
        self.copy = copy
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.dtype, self.is_conj, self.is_neg = tensor.dtype, tensor.is_conj(), tensor.is_neg()
        self.origin = None if node is None else _Origin(tensor, node)

    def restored(self) -> Tensor:
        """Return the tensor, which shares its version counter with the original."""
        copy = self.copy
        now = copy.witness._version
        if now != copy.version:
            raise _modified(self.dtype, copy.device, self.shape, now, copy.version, self.origin)
        found = self._spread() if copy.gathered else self._view(*copy.storage())
        if self.is_conj:
            found = torch.conj(found)
        if self.is_neg:
            found = torch._neg_view(found)
        tensor = copy.witness.detach()
        tensor.data = found
        return tensor

    def _view(self, storage: torch.UntypedStorage, begins: int) -> Tensor:
        offset = self.offset - begins // self.dtype.itemsize
        return _laid_over(storage, self.dtype, self.copy.device, offset, self.shape, self.stride)

    def _spread(self) -> Tensor:
        """Bring back single elements of a storage, each where it was."""
        live = self.copy.live()
        if live is not None and live.nbytes() == self.copy.whole_bytes:
            return self._view(live, 0)
        itemsize, device = self.dtype.itemsize, self.copy.device
        offset = self.offset * itemsize % _ALIGNED_BYTES // itemsize
        length = offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) + 1
        whole = torch.empty(length, dtype=self.dtype, device=device).untyped_storage()
        found = _laid_over(whole, self.dtype, device, offset, self.shape, self.stride)
        found.copy_(self.copy._brought_back().view(self.dtype).view(self.shape))  # noqa: SLF001 - of the same file
        return found


def _laid_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    device: torch.device,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:
    empty = torch.empty(0, dtype=dtype, device=device)
    return empty.set_(storage, offset, shape, stride)  # type: ignore[call-overload, no-any-return]


def part_to_copy(tensor: Tensor, whole_bytes: int) -> tuple[int, int, bool]:
    """Return which bytes of its storage a small view needs: from where, how many, and whether single elements.

    All of them, if it is not small: other views need them, too, and they are copied once.
    """
    if tensor.nbytes * _SMALL_PART >= whole_bytes:
        return 0, whole_bytes, False
    shape, stride, itemsize = tensor.shape, tensor.stride(), tensor.element_size()
    start = tensor.storage_offset() * itemsize
    span = (sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1) * itemsize
    if tensor.numel() and span * _SMALL_PART < whole_bytes:
        first = start - start % _ALIGNED_BYTES
        return first, start + span - first, False
    if tensor.numel() and not _overlaps(shape, stride):
        return start, tensor.nbytes, True
    return 0, whole_bytes, False


_SMALL_PART = 4


def _overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def contiguous(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return the elements of a view in order, without its bits."""
    offset, shape, stride = tensor.storage_offset(), tensor.shape, tensor.stride()
    found = _laid_over(storage, tensor.dtype, tensor.device, offset, shape, stride)
    return found.clone(memory_format=torch.contiguous_format)


# -- a saved tensor that was written to


class _Origin:
    """Where a tensor with a history came from, for the error that says so."""

    __slots__ = ("name", "number", "original", "place")

    def __init__(self, tensor: Tensor, node: Any) -> None:
        self.original = weakref.ref(tensor)
        # A view whose base was written to gets another node, if anyone asks.
        self.name = node.name() if tensor._base is None or tensor.is_conj() else "AsStridedBackward0"
        self.number, self.place = node._sequence_nr(), tensor.output_nr

    def source(self) -> tuple[str, int]:
        """Return the node that autograd names, and which of its results: the one that saved its own result, else the
        last one that has written the tensor.
        """
        asking, original = torch._C._current_autograd_node(), self.original()
        if asking is not None and asking._sequence_nr() == self.number:
            return asking.name(), self.place
        if original is not None and original.grad_fn is not None:
            return original.grad_fn.name(), 0
        return self.name, 0


def _modified(
    dtype: torch.dtype, device: torch.device, shape: tuple[int, ...], now: int, version: int, origin: _Origin | None
) -> RuntimeError:
    """The error of `SavedVariable::unpack`, in the words of the torch that is installed."""
    kind = torch.empty(0, dtype=dtype, device=device).type()
    name = kind.rpartition(".")[2].removesuffix("Tensor")
    if name not in _TRANSLATED or device.type not in ("cpu", "cuda"):
        kind = f"{device.type.upper()}{name}Type"
    which = ""
    if origin is not None:
        source, place = origin.source()
        which = f", which is output {place} of {source if _NAMED in _words() else _forward_name(source)},"
    text = _words().replace("torch.FloatTensor [1]", f"{kind} {list(shape)}")
    text = re.sub(r", which is output 0 of \w+,", lambda _: which, text)
    return RuntimeError(text.replace("version 1; expected version 0", f"version {now}; expected version {version}"))


# torch/csrc/Exceptions.cpp, `processErrorMsg`.
_TRANSLATED = frozenset(("Byte", "Char", "Double", "Float", "Int", "Long", "Short", "Half"))
_NAMED = "ExpBackward0"


def _forward_name(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name)


def _words() -> str:
    """Return what autograd says of a result of ``exp`` that was written to; in a thread without modes and hooks."""
    said: list[str] = []

    def provoke() -> None:
        result = torch.ones(1, dtype=torch.float32, device="cpu", requires_grad=True).exp()
        node: Any = result.grad_fn
        result.add_(1)
        try:
            said.append(str(node._saved_result))
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=provoke)
    thread.start()
    thread.join()
    return said[0]
